"""What is dumped comes back: rows, counters, priorities, trajectories, generators; and so does what follows."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictRoundRobinWriter,
)
from torchrl.envs.transforms import Compose, ObservationNorm, RewardScaling

from rlbuf_td import EpisodeStats, NStepSampler, PackedStorage, ReplayBuffer, RolloutBuffer, TrajectoryIndex
from rlbuf_td.checkpoint import open_checkpoint
from tests.catalogue import SCHEMAS, assert_same
from tests.catalogue import transitions as catalogue_transitions
from tests.checkpoint.worlds import NAMES, make, step, transitions


@pytest.mark.filterwarnings("ignore:with ndim=., data of batch size")  # rows with batch dims of their own
@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)
def test_rows_of_every_kind_come_back_byte_for_byte(schema, lanes, tmp_path):
    def buffer():
        return ReplayBuffer(storage=PackedStorage(6 * max(1, lanes), ndim=1 + bool(lanes)), dim_extend=0)

    rb = buffer()
    shape = (lanes,) if lanes else ()
    for n, seed in ((4, 0), (4, 1)):  # wraps
        rb.extend(catalogue_transitions(schema, n, shape, seed=seed))
    rb.dumps(tmp_path)
    again = buffer()
    again.loads(tmp_path)
    assert_same(again.storage[:], rb.storage[:])
    assert_same(open_checkpoint(tmp_path).rows, rb.storage[:])
    for each in (rb, again):
        each.extend(catalogue_transitions(schema, 1, shape, seed=2))
    assert_same(again.storage[:], rb.storage[:])


@pytest.mark.parametrize(("lanes", "written", "into"), [(0, 2, "new"), (0, 9, "used"), (3, 2, "used"), (3, 9, "new")])
@pytest.mark.parametrize("sampler", NAMES)
def test_a_loaded_buffer_goes_on_bit_for_bit(sampler, lanes, written, into, tmp_path):
    rb = make(sampler, lanes=lanes)
    index = TrajectoryIndex.of(rb.storage)
    for number in range(written):
        step(rb, number, lanes)
    rb.dumps(tmp_path / "dump")
    again = make(sampler, lanes=lanes, seed=99)
    if into == "used":
        for number in range(11):
            step(again, number, lanes)
    again.loads(tmp_path / "dump")
    assert (again.write_count, again.writer._cursor) == (rb.write_count, rb.writer._cursor)
    for number in range(written, written + 6):
        torch.manual_seed(number)
        expected = step(rb, number, lanes)
        torch.manual_seed(number)
        batch = step(again, number, lanes)
        if into == "used":  # its clock goes on, so that batches which it gave before the load are known to be stale
            batch, expected = batch.exclude("sampled_at"), expected.exclude("sampled_at")
        assert_same(batch, expected)
    rows = torch.arange(len(rb))
    for left, right in zip(index.reach(rows), TrajectoryIndex.of(again.storage).reach(rows), strict=True):
        assert torch.equal(left, right)


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


@pytest.mark.parametrize("was_used", [False, True])
def test_an_empty_buffer_can_be_dumped(was_used, tmp_path):
    rb = make()
    if was_used:
        rb.extend(transitions(5))
        rb.empty()
    rb.dumps(tmp_path)
    again = make()
    again.extend(transitions(3))
    again.loads(tmp_path)
    assert len(again) == again.write_count == 0
    assert_same(step(again, 1).select("number"), step(rb, 1).select("number"))
    assert open_checkpoint(tmp_path).classes["writer"] == "RingWriter"


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


def test_transforms_and_the_batch_size_come_back(tmp_path):
    norms = (ObservationNorm(loc=loc, scale=2.0, in_keys=["observation"]) for loc in (5.0, 0.0))
    scale = RewardScaling(0.0, 1.0, in_keys=["number"])
    rb, again = (make("uniform", transform=Compose(norm, scale.clone())) for norm in norms)
    rb.extend(transitions(9))
    rb.dumps(tmp_path)
    again.loads(tmp_path)
    assert_same(again.sample(), rb.sample())


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


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement, lambda: SliceSampler(num_slices=2)])
def test_torchrls_own_parts_come_back_too(storage, sampler, tmp_path):
    rb, again = two(ReplayBuffer, storage=lambda: storage(20), sampler=sampler, writer=TensorDictRoundRobinWriter)
    rb.extend(transitions(26))
    rb.sample()
    rb.dumps(tmp_path)
    again.loads(tmp_path)
    for number in range(3):
        data = transitions(4, first=number)
        left, right = (each.sample() for each in (rb, again) if each.extend(data.clone()) is not None)
        assert_same(right, left)
    rb.dumps(tmp_path)
    found = open_checkpoint(tmp_path)
    assert found.storage is None
    assert found.rows is not None
    assert_same(found.rows["observation"], rb.storage[:]["observation"])


@pytest.mark.parametrize("wrapped", [False, True])
def test_priorities_of_torchrls_sampler_come_back(wrapped, tmp_path):
    samplers = [PrioritizedSampler(20, 0.7, 0.5) for _ in range(2)]
    rb, again = (
        ReplayBuffer(storage=PackedStorage(20), sampler=NStepSampler(each, 2, 0.9) if wrapped else each, batch_size=4)
        for each in samplers
    )
    rb.extend(transitions(26))
    rb.sample()
    samplers[0].update_priority(torch.arange(3, 15), torch.linspace(0.1, 5.0, 12))
    rb.dumps(tmp_path)
    again.loads(tmp_path)
    trees, loaded = ([getattr(each, name) for name in ("_sum_tree", "_min_tree")] for each in samplers)
    for left, right in zip(trees, loaded, strict=True):
        assert right[torch.arange(20)].tolist() == left[torch.arange(20)].tolist()
        assert right.query(2, 17) == left.query(2, 17)
    assert samplers[1]._max_priority == samplers[0]._max_priority
    assert again.sample()["priority_weight"].shape == (4,)


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


def test_statistics_and_counts_of_replays_go_on(tmp_path):
    rb, again = (make("proportional", stats=EpisodeStats(window=5), count_replays=True) for _ in range(2))
    rb.extend(episodes(15))
    rb.sample()
    rb.dumps(tmp_path)
    again.loads(tmp_path)
    summaries = []
    for each in (rb, again):
        each.extend(episodes(4))
        each.sample()
        assert each.episode_stats is not None
        summaries.append(each.episode_stats.summary())
    assert summaries[0] == summaries[1] != {}
    assert again.health() == rb.health()
    assert rb.health()["replays_max"] > 0
    smaller = make("proportional", steps=10, count_replays=True)
    with pytest.warns(UserWarning, match="dropped"):
        smaller.loads(tmp_path)
    assert smaller.health()["replays_max"] == 0


def episodes(rows):
    done = (torch.arange(rows) % 3 == 2).unsqueeze(-1)
    return TensorDict({"next": {"reward": torch.arange(rows).unsqueeze(-1) ** 0.5, "done": done}}, [rows])
