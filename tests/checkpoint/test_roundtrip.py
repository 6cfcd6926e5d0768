"""What a dump holds, and what is loaded of it; ``test_goes_on.py`` tests that a loaded buffer goes on."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, RandomSampler

from rlbuf_td import ReplayBuffer, RolloutBuffer
from rlbuf_td.checkpoint import open_checkpoint
from tests.catalogue import assert_same
from tests.checkpoint.worlds import make, transitions


def test_settings_large_counters_and_the_generator_object_stay(tmp_path):
    rb = make("rank")
    rb.extend(transitions(5))
    rb.sampler.alpha, rb.sampler.beta, rb.sampler.stratified = 0.3, 0.9, False  # schedulers change these
    rb.writer._write_count = 2**62
    rb.save(str(tmp_path / "a" / "b"))
    again = make("rank")
    generator = again._rng
    again.load(tmp_path / "a" / "b")
    assert (again.sampler.alpha, again.sampler.beta, again.sampler.stratified) == (0.3, 0.9, False)
    assert again.write_count == 2**62
    assert again._rng is generator


def test_the_default_generator_goes_on_if_asked(tmp_path):
    rb = make("uniform", seed=None)
    rb.extend(transitions(9))
    torch.manual_seed(3)
    rb.dumps(tmp_path)
    expected = rb.sample()
    again = make("uniform", seed=None)
    torch.manual_seed(4)
    again.loads(tmp_path)
    assert not torch.equal(again.sample()["index"], expected["index"])
    again.loads(tmp_path, default_generator=True)
    assert_same(again.sample(), expected)


def rollout_steps(*lead):
    done = torch.zeros(*lead, 1, dtype=torch.bool)
    done[..., -1, :] = True
    step = {"reward": torch.rand(*lead, 1), "done": done, "terminated": done}
    return TensorDict({"state_value": torch.rand(*lead, 1), "next": step}, lead)


def test_an_epoch_that_was_given_up_is_not_resumed(tmp_path):
    rollout, again = (RolloutBuffer(4, batch_size=2, epochs=2) for _ in range(2))
    rollout.extend(rollout_steps(4))
    for _ in rollout:
        break
    rollout.dumps(tmp_path)
    again.loads(tmp_path)
    assert len(list(again)) == 4


def two(kind, **parts):
    generators = (torch.Generator().manual_seed(seed) for seed in range(2))
    return [kind(**{name: make() for name, make in parts.items()}, batch_size=4, generator=g) for g in generators]


def test_the_dump_says_what_it_holds(tmp_path):
    rb = make("rank", lanes=2)
    rb.extend(transitions(5, 2))
    rb.dumps(tmp_path)
    found = open_checkpoint(tmp_path)
    assert found.classes.pop("buffer") == "ReplayBuffer"
    assert found.classes == {"storage": "PackedStorage", "sampler": "RankSampler", "writer": "RingWriter"}
    assert (found.shape, found.writer["_cursor"], found.sampler["alpha"]) == ((20, 2), 5, 0.7)
    assert found.about["versions"]["torch"] in str(torch.__version__)
    assert found.storage is not None
    assert_same(found.storage[:], rb.storage[:])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("rlbuf_td checkpoint", 3)


def test_a_dump_of_torchrls_parts_can_be_opened(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=RandomSampler(), batch_size=4)
    rb.extend(transitions(26))
    rb.dumps(tmp_path)
    found = open_checkpoint(tmp_path)
    assert found.storage is None
    assert found.rows is not None
    assert_same(found.rows["observation"], rb.storage[:]["observation"])


def test_the_dump_of_a_buffer_that_was_never_written_empties_another(tmp_path):
    make().dumps(tmp_path)
    assert open_checkpoint(tmp_path).classes["writer"] == "RingWriter"
    again = make()
    again.extend(transitions(3))
    again.loads(tmp_path)
    assert len(again) == again.write_count == 0


def test_a_bar_shows_how_far_a_dump_is(tmp_path, capsys, monkeypatch):
    rb = make("uniform")
    rb.extend(transitions(5))
    rb.dumps(tmp_path)
    assert "dump" not in capsys.readouterr().err
    rb.dumps(tmp_path, progress=True)
    assert "dump: 100%" in capsys.readouterr().err
    make("uniform").loads(tmp_path, progress=True)
    assert "load: 100%" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    rb.dumps(tmp_path)
    with pytest.raises(ImportError, match="progress=True needs tqdm"):
        rb.dumps(tmp_path, progress=True)


def test_several_threads_dump_to_one_place_while_others_write_and_load(tmp_path):
    rb = make("proportional", steps=500)
    rb.extend(transitions(500))
    rb.dumps(tmp_path)

    def work(what):
        for number in range(6):
            if what == "dump":
                rb.dumps(tmp_path)
            elif what == "load":
                found = open_checkpoint(tmp_path).rows
                assert found is not None
                oldest = int(found["number"].argmin())
                assert torch.equal(found["number"].roll(-oldest), found["number"].min() + torch.arange(500))
            else:
                for each in range(10):
                    rb.extend(transitions(7, first=500 + 7 * (10 * number + each)))

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(work, ("dump", "dump", "load", "write")):
            pass


def test_rows_only_takes_any_sampler_and_lets_the_rows_in(tmp_path):
    rb = make("uniform")
    rb.extend(transitions(26))
    rb.dumps(tmp_path)
    again = make("proportional")
    again.loads(tmp_path, rows_only=True)
    assert_same(again.storage[:], rb.storage[:])
    assert again.write_count == 26
    assert again.sampler.priority(torch.arange(20)).tolist() == [1.0] * 20
    assert_same(again.chronological(), rb.chronological())
