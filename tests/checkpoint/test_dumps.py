"""What a dump holds, where and how often it is written, what a kill leaves, what is
loaded of it, and that transforms stay the buffer's own."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import PrioritizedSampler
from torchrl.envs import Compose, DoubleToFloat, RewardScaling

import rlbuf_td as td
from rlbuf_td import PackedStorage, ReplayBuffer, ReplayBufferMixture
from rlbuf_td.checkpoint import CheckpointError, buffer, files, open_checkpoint
from tests.catalogue import SAMPLERS, assert_same


def make(
    sampler: str = "proportional",
    steps: int = 20,
    lanes: int = 0,
    *,
    seed: int | None = 0,
    storage=None,
    **kwargs,
) -> td.ReplayBuffer:
    """Return an empty storage of ``steps`` time steps, with a generator of its own
    unless ``seed`` is ``None``."""
    rows = steps * max(1, lanes)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    if storage is None:
        storage = td.PackedStorage(rows, ndim=1 + bool(lanes))
    made = SAMPLERS[sampler](rows)
    return td.ReplayBuffer(
        storage=storage, sampler=made, batch_size=8, generator=generator, **kwargs
    )


def transitions(n: int, lanes: int = 0, first: int = 0) -> TensorDict:
    lead = [lanes, n] if lanes else [n]
    number = torch.arange(first, first + n).expand(lead).clone()
    value, done = number.unsqueeze(-1).float(), (number % 7 == 6).unsqueeze(-1)
    after = {
        "reward": value,
        "done": done,
        "terminated": done.clone(),
        "achieved_goal": value.clone(),
    }
    observation = {
        "observation": value + torch.rand(*lead, 3),
        "number": number,
        "desired_goal": value + 1,
    }
    return TensorDict(observation | {"next": after}, lead)


def step(rb: td.ReplayBuffer, number: int, lanes: int = 0) -> TensorDictBase:
    """Write (more at first), sample and update priorities, as a run does; return the
    batch."""
    rb.extend(transitions(3 if number else 8, lanes, first=3 * number))
    batch = rb.sample()
    batch["td_error"] = torch.sin(batch["observation"].sum(-1)) * (1 + number % 5)
    rb.update_tensordict_priority(batch)
    return batch


def test_without_a_generator_the_state_of_torchs_own_decides(tmp_path):
    rb = make("uniform", seed=None)
    rb.extend(transitions(9))
    rb.dumps(tmp_path)
    state = torch.get_rng_state()
    expected = rb.sample()
    again = make("uniform", seed=None)
    torch.manual_seed(4)
    again.loads(tmp_path)
    assert not torch.equal(again.sample()["index"], expected["index"])
    torch.set_rng_state(state)
    assert_same(again.sample(), expected)


def test_the_dump_says_what_it_holds(tmp_path):
    rb = make("rank", lanes=2)
    rb.extend(transitions(5, 2))
    rb.dumps(tmp_path)
    found = open_checkpoint(tmp_path)
    assert found.classes.pop("buffer") == "ReplayBuffer"
    assert found.classes == {
        "storage": "PackedStorage",
        "sampler": "RankSampler",
        "writer": "RingWriter",
    }
    assert (found.shape, found.writer["_cursor"], found.sampler["alpha"]) == (
        (20, 2),
        5,
        0.7,
    )
    assert found.about["versions"]["torch"] in str(torch.__version__)
    assert found.storage is not None
    assert_same(found.storage[:], rb.storage[:])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["format"] == "rlbuf_td checkpoint"


def test_torchrls_trees_are_refused_and_a_proportional_sampler_takes_their_priorities(
    tmp_path,
):
    rb = td.ReplayBuffer(
        storage=td.PackedStorage(20),
        sampler=PrioritizedSampler(20, 0.7, 0.5),
        batch_size=8,
    )
    rb.update_priority(rb.extend(transitions(9)), torch.rand(9))
    with pytest.raises(
        td.CheckpointError,
        match=r"_sum_tree is a SumSegmentTree\w*, .*Use a Proportional",
    ):
        rb.dumps(tmp_path)
    ours, before = td.ProportionalSampler(20), rb.sampler.state_dict()
    ours.load_state_dict(before)
    rb.set_sampler(ours)
    rb.dumps(tmp_path)
    again = make("proportional")
    again.loads(tmp_path)
    assert torch.allclose(
        again.sampler.rule.table.weight[:9].double(),
        before["_sum_tree"][torch.arange(9)].double(),
    )


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
                oldest = int(found.get("number").argmin())
                assert torch.equal(
                    found["number"].roll(-oldest),
                    found["number"].min() + torch.arange(500),
                )
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


ROWS = 4_000  # of 256 bytes: 1 MB


def of_rows(scratch_dir=None, sampler="proportional", seed=0, rows=ROWS):
    return td.ReplayBuffer(
        storage=td.PackedStorage(rows, scratch_dir=scratch_dir),
        sampler=td.ProportionalSampler(rows)
        if sampler == "proportional"
        else td.UniformSampler(),
        batch_size=16,
        generator=torch.Generator().manual_seed(seed),
    )


def extend_by(rb, n, value):
    rb.extend(
        TensorDict(
            {
                "x": torch.full((n, 32), float(value), dtype=torch.float64),
                "k": torch.rand(n),
            },
            [n],
        )
    )


def sizes(path: Path) -> dict[str, tuple[int, int]]:
    return {
        file.name: (file.stat().st_ino, file.stat().st_size)
        for file in path.glob("data/*.bin")
    }


def written(before, after):
    return sum(
        size
        for name, (number, size) in after.items()
        if before.get(name, (0, 0))[0] != number
    )


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 1 << 14)


def test_only_what_has_changed_is_written(small_chunks, tmp_path):
    rb = of_rows(sampler="uniform")
    extend_by(rb, ROWS, 0)
    rb.dumps(tmp_path)
    before = sizes(tmp_path)
    assert sum(size for _, size in before.values()) > ROWS * 256
    rb.dumps(tmp_path)
    after = sizes(tmp_path)
    assert written(before, after) == 0
    extend_by(rb, 100, 1)  # 26 kB: two or three chunks
    rb.dumps(tmp_path)
    assert 0 < written(after, sizes(tmp_path)) <= 3 * (1 << 14)
    assert len(sizes(tmp_path)) == len(after)
    rb.storage["x"][1234, 5] = 7.0  # a view: no writer knows of it
    rb.dumps(tmp_path)
    again = of_rows(sampler="uniform")
    again.loads(tmp_path)
    assert again.storage["x"][1234, 5] == 7.0


def test_a_dump_in_the_scratch_dir_survives_later_writes(tmp_path):
    rb = of_rows(tmp_path)
    extend_by(rb, 3_000, 0)
    extend_by(rb, 1_500, 1)  # wraps
    rb.update_priority(torch.arange(ROWS), torch.rand(ROWS))
    rb.dumps(tmp_path)
    rows, state, count = rb.storage[:].clone(), rb._rng.get_state(), rb.write_count
    extend_by(rb, ROWS, 2)  # overwrites everything
    copy = of_rows(seed=4)
    for loading in (copy, rb):  # into another buffer, and over what the dump is of
        loading.loads(tmp_path)
        assert_same(loading.storage[:], rows)
        assert (loading.write_count, torch.equal(loading._rng.get_state(), state)) == (
            count,
            True,
        )
    del rb, loading
    # in the place of the file that the dump is of
    again = of_rows(tmp_path)
    again.loads(tmp_path)
    assert_same(again[:], copy[:])


def storage_of(kind: str) -> td.PackedStorage:
    settings: dict[str, Any] = {
        "larger": {"max_size": 30},
        "deduplicated": {"max_size": 20, "share_next": True},
        "lanes": {"max_size": 40, "ndim": 2, "lanes": 2},
        "larger lanes": {"max_size": 90, "ndim": 2, "lanes": 3},
        "more lanes": {"max_size": 80, "ndim": 2, "lanes": 4},
    }
    return td.PackedStorage(**settings[kind])


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize(
    ("lanes", "kind", "words", "remedy"),
    [
        (0, "larger", r"\[20\] .* \[30\]", "old.chronological()"),
        (0, "deduplicated", "plain rows.*deduplicated", "old.chronological()"),
        (0, "lanes", r"\[20\] .* \[20, 2\]", "old.chronological(), lanes=e"),
        (3, "larger lanes", "30, 3", "old.lane(e).chronological(), lanes=e"),
        (3, "more lanes", "20, 4", "old.lane(e).chronological(), lanes=e"),
        (3, "larger", r"\[20, 3\] .* \[30\]", "old.lane(e).chronological()"),
    ],
)
def test_other_capacities_and_forms_are_refused_with_a_remedy_that_works(
    lanes, kind, words, remedy, is_used, tmp_path
):
    def with_next(n, lanes):
        data = transitions(n, lanes)
        return data.set(("next", "observation"), data["observation"] + 1)

    old = make("proportional", lanes=lanes)
    old.extend(with_next(26 - lanes, lanes))
    old.dumps(tmp_path)
    new = make("proportional", storage=storage_of(kind))
    if is_used:
        own_lanes = 0 if new.storage.ndim == 1 else new.storage.lane_count
        new.extend(with_next(9, own_lanes))
    before = len(new)
    remedy = f"new.extend({remedy})"
    with pytest.raises(td.CheckpointError, match=f"{words}.*{re.escape(remedy)}"):
        new.loads(tmp_path)
    with pytest.raises(ValueError, match=f"{words}.*{re.escape(remedy)}"):
        new.load_state_dict(old.state_dict())
    assert len(new) == before
    new.empty()
    for e in range(max(1, lanes)):
        eval(remedy)
        copied, rows = new, old
        if new.storage.ndim > 1:
            copied = new.lane(e)
        if lanes:
            rows = old.lane(e)
        expected = rows.chronological()
        assert_same(copied.chronological()[-len(expected) :], expected)


@pytest.mark.parametrize("device", ["mps", "cuda:99"])
def test_generators_of_devices_that_are_not_here_are_left_out(device):
    rb, state = make("uniform"), torch.get_rng_state()
    generator = rb._rng
    with pytest.warns(
        UserWarning, match=f"generator is on {device}, which is not available"
    ):
        buffer.restore_generator(rb, (state, device))
    assert rb._rng is generator
    buffer.refuse(rb, {"_writer": {}, "_rng": (state, device)})
    with pytest.raises((RuntimeError, TypeError)):
        buffer.refuse(rb, {"_writer": {}, "_rng": (state[:5], "cpu")})


def small(**kwargs) -> td.ReplayBuffer:
    return td.ReplayBuffer(
        storage=td.PackedStorage(8, **kwargs),
        sampler=td.ProportionalSampler(8),
        batch_size=2,
    )


def mixture() -> td.ReplayBufferMixture:
    return td.ReplayBufferMixture({"only": small()}, {"only": 1.0})


PARTS: dict[str, Any] = {
    "buffer": small,
    "mixture": mixture,
    "shares": lambda: mixture().sampler,
    "storage": lambda: small().storage,
    "sampler": lambda: td.ProportionalSampler(8),
    "wrapper": lambda: td.NStepSampler(td.UniformSampler(), 2, 0.9),
    "ring": td.RingWriter,
    "reservoir": td.ReservoirWriter,
}
FOUR = TensorDict(
    {"x": torch.arange(4), "next": {"done": torch.ones(4, 1, dtype=torch.bool)}}, [4]
)


def test_a_load_restores_the_batch_size_and_the_counts_of_batches(tmp_path):
    one, other = small(), td.ReplayBuffer(storage=td.PackedStorage(8), batch_size=3)
    other.set_sampler(td.ProportionalSampler(8))
    one.extend(FOUR)
    one.sample()
    one.dumps(tmp_path)
    other.loads(tmp_path)
    assert len(other.sample()) == 2
    stats = other.stats()
    assert (stats["sample_calls"], stats["samples_returned"]) == (2, 4)


def test_a_load_sets_the_generator_that_others_share():
    generator = torch.Generator().manual_seed(3)
    rb = small()
    rb.set_rng(generator)
    rb.extend(FOUR)
    state, before = rb.state_dict(), generator.get_state()
    rb.sample()
    assert not torch.equal(generator.get_state(), before)
    rb.load_state_dict(state)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("part", PARTS)
def test_parts_are_saved_and_loaded(part, tmp_path):
    path = [str, Path][len(part) % 2]
    one, other = PARTS[part](), PARTS[part]()
    if part in ("buffer", "storage"):
        (one.extend if part == "buffer" else lambda rows: one.set(range(4), rows))(FOUR)
    one.dumps(path(tmp_path / "dump"))
    other.loads(path(tmp_path / "dump"))
    if part in ("buffer", "storage"):
        assert (other[:] == FOUR).all()


ROW_BYTES = 128


def extend_quarter(rb: td.ReplayBuffer, generation: int, rows: int) -> None:
    """Write a quarter of the rows (at first all of them) with the number of the
    generation."""
    count = rows if generation == 0 else rows // 4
    rb.extend(
        TensorDict({"x": torch.full((count, ROW_BYTES // 8), generation)}, [count])
    )


def quarters(generation: int, rows: int) -> torch.Tensor:
    numbers = torch.zeros(rows, dtype=torch.int64)
    for g in range(max(1, generation - 5), generation + 1):
        numbers[((g - 1) * (rows // 4) + torch.arange(rows // 4)) % rows] = g
    return numbers


def killed_child(
    rb: td.ReplayBuffer, folder: Path, generation: int, rows: int, after: float
) -> int:
    """Let a child dump for ``after`` seconds, kill it, and return the last generation
    that it has announced."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads, of which none is running
        warnings.simplefilter("ignore")
        pid = os.fork()
    while pid == 0:
        generation += 1
        extend_quarter(rb, generation, rows)
        rb.dumps(folder)
        os.write(writer, generation.to_bytes(8, "little"))
    os.close(writer)
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as told:
        announced = told.read()
    return int.from_bytes(announced[-8:], "little") if announced else generation


@pytest.mark.filterwarnings("ignore:this process was forked")
@pytest.mark.parametrize(
    ("kills", "megabytes"), [(8, 4), pytest.param(30, 25, marks=pytest.mark.slow)]
)
def test_a_dump_that_is_killed_leaves_the_old_or_the_new_one_whole(
    kills, megabytes, tmp_path
):
    rows, chance, generation = (
        megabytes * 10**6 // ROW_BYTES // 4 * 4,
        random.Random(0),
        3,
    )
    rb = td.ReplayBuffer(
        storage=td.PackedStorage(rows),
        sampler=td.ProportionalSampler(rows),
        batch_size=4,
    )
    for number in range(generation + 1):
        start = time.perf_counter()
        extend_quarter(rb, number, rows)
        rb.dumps(tmp_path)
    took = time.perf_counter() - start
    for _ in range(kills):  # in all parts of a dump, and in the one after it
        last = killed_child(rb, tmp_path, generation, rows, chance.uniform(0, 2 * took))
        rb.loads(tmp_path)
        numbers = rb.storage["x"]
        generation = int(numbers.max())
        assert generation >= last
        assert (numbers == quarters(generation, rows)[:, None]).all()
        assert rb.write_count == rows + generation * (rows // 4)


THREE = TensorDict(
    {"observation": torch.zeros(3, 2), "next": {"reward": torch.ones(3, 1)}}, [3]
)


def scaled(*scales: float):
    parts = [
        RewardScaling(0.0, scale, in_keys=[("next", "reward")]) for scale in scales
    ]
    return parts[0] if len(parts) == 1 else Compose(*parts)


def transformed(transform=None) -> ReplayBuffer:
    kwargs = {} if transform is None else {"transform": transform}
    return ReplayBuffer(storage=PackedStorage(10), batch_size=2, **kwargs)


def saved_with(transform, folder: Path) -> Path:
    rb = transformed(transform)
    rb.extend(THREE)
    rb.dumps(folder)
    return folder


def reward_of(rb) -> float:
    return rb.sample()["next", "reward"].unique().item()


def to_float():
    return DoubleToFloat(in_keys=["observation"])


#: Makers of the saved transform and of the buffer's own, and the reward then.
PAIRS: dict[str, tuple[Any, Any, float]] = {
    "none now": (lambda: scaled(0.1), lambda: None, 1.0),
    "none saved": (lambda: None, lambda: scaled(0.1), 0.1),
    "other numbers": (lambda: scaled(0.1), lambda: scaled(0.5), 0.5),
    "one of two": (lambda: scaled(0.1, 0.1), lambda: scaled(0.5), 0.5),
    "two of one": (lambda: scaled(0.1), lambda: scaled(0.5, 0.5), 0.25),
    "without tensors": (to_float, lambda: scaled(0.5), 0.5),
    "another kind": (lambda: scaled(0.1), to_float, 1.0),
}


@pytest.mark.parametrize("rows_only", [False, True])
@pytest.mark.parametrize(("saved", "own", "reward"), PAIRS.values(), ids=PAIRS)
def test_a_load_keeps_the_buffers_own_transforms(
    saved, own, reward, rows_only, tmp_path
):
    folder = saved_with(saved(), tmp_path)
    rb = transformed(own())
    rb.loads(folder, rows_only=rows_only)
    assert len(rb) == 3
    assert reward_of(rb) == pytest.approx(reward)


@pytest.mark.parametrize("rows_only", [False, True])
def test_a_load_gives_transforms_the_saved_tensors_on_request(rows_only, tmp_path):
    folder = saved_with(scaled(0.1), tmp_path)
    rb = transformed(scaled(0.5))
    rb.loads(folder, rows_only=rows_only, transforms=True)
    assert reward_of(rb) == pytest.approx(0.1)


def test_a_mixture_loads_the_transforms_of_its_members_on_request(tmp_path):
    def mixture(scale: float) -> ReplayBufferMixture:
        members = {name: transformed(scaled(scale)) for name in ("a", "b")}
        return ReplayBufferMixture(members, {"a": 1, "b": 1}, batch_size=4)

    mixed = mixture(0.1)
    for name in mixed.names:
        mixed.extend(THREE, name)
    mixed.dumps(tmp_path)
    for transforms, reward in ((False, 0.5), (True, 0.1)):
        other = mixture(0.5)
        other.loads(tmp_path, transforms=transforms)
        assert reward_of(other) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        (lambda: scaled(0.1), lambda: None),
        (lambda: None, lambda: scaled(0.1)),
        (lambda: scaled(0.1), to_float),
        (lambda: scaled(0.1, 0.1), lambda: scaled(0.5)),
    ],
    ids=["none now", "none saved", "another kind", "one of two"],
)
def test_other_transforms_do_not_take_the_saved_tensors(saved, own, tmp_path):
    folder = saved_with(saved(), tmp_path)
    rb = transformed(own())
    rb.extend(THREE[:1])
    said = "the saved transforms have the tensors .*, those of this buffer .*: make it with the same transforms"
    with pytest.raises(CheckpointError, match=said):
        rb.loads(folder, transforms=True)
    filled = transformed(saved())
    filled.extend(THREE)
    with pytest.raises(ValueError, match=said):
        rb.load_state_dict(filled.state_dict())
    assert len(rb) == 1
    rb.loads(folder)  # the remedy
    assert len(rb) == 3


@pytest.mark.parametrize("how", ["loads", "load_state_dict"])
def test_reserved_rows_take_those_of_a_state_with_more_entries(how, tmp_path):
    schema = TensorDict({"x": torch.tensor(0)})
    rows = TensorDict({"x": torch.arange(6), "policy": torch.rand(6, 2)}, [6])
    old = ReplayBuffer.from_schema(schema, 8)
    old.extend(rows)
    old.dumps(tmp_path)
    new = ReplayBuffer.from_schema(schema, 8)
    if how == "loads":
        new.loads(tmp_path)
    else:
        new.load_state_dict(old.state_dict())
    assert torch.equal(new.storage["policy"], rows["policy"])
    new.extend(rows)
    assert new.sample(4)["policy"].shape == (4, 2)
