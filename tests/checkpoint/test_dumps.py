"""What a dump holds, where and how often it is written, what a kill leaves, what is
loaded of it, and that transforms stay the buffer's own."""

from __future__ import annotations

import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import PrioritizedSampler
from torchrl.envs import Compose, DoubleToFloat, RewardScaling

from rlbuf_td import (
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    ReplayBufferMixture,
)
from rlbuf_td.checkpoint import CheckpointError, buffer, files, open_checkpoint
from tests.catalogue import SAMPLERS, assert_same, buffer_of, numbered_rows


def make(
    sampler: str = "proportional", steps: int = 20, lanes: int = 0, **options: Any
) -> Any:
    """Return a buffer of ``steps`` time steps, with a generator of its own."""
    made = SAMPLERS[sampler](steps * max(1, lanes))
    return buffer_of(steps, made, lanes, **{"batch_size": 8} | options)


def test_without_a_generator_the_state_of_torchs_own_decides(tmp_path):
    rb, other = (ReplayBuffer(storage=PackedStorage(20)) for _ in range(2))
    rb.extend(numbered_rows(9))
    rb.dumps(tmp_path)
    state = torch.get_rng_state()
    expected = rb.sample(8)
    torch.manual_seed(4)
    other.loads(tmp_path)
    assert not torch.equal(other.sample(8)["index"], expected["index"])
    torch.set_rng_state(state)
    assert_same(other.sample(8), expected)


def test_a_dump_says_what_it_holds(tmp_path):
    rb = make("rank", lanes=2, rows=numbered_rows(5, lanes=2))
    rb.dumps(tmp_path)
    found = open_checkpoint(tmp_path)
    classes = {"ReplayBuffer", "PackedStorage", "RankSampler", "RingWriter"}
    assert {*found.classes.values()} == classes
    assert (found.writer["_cursor"], found.sampler["alpha"]) == (5, 0.7)
    assert found.about["versions"]["torch"] in str(torch.__version__)
    assert_same(found.storage[:], rb.storage[:])  # pyrefly: ignore [unsupported-operation]


def test_torchrls_trees_are_refused_and_a_proportional_sampler_takes_their_priorities(
    tmp_path,
):
    rb = buffer_of(20, PrioritizedSampler(20, 0.7, 0.5))
    rb.update_priority(rb.extend(numbered_rows(9)), torch.rand(9))
    words = r"_sum_tree is a SumSegmentTree\w*, .*Use a Proportional"
    with pytest.raises(CheckpointError, match=words):
        rb.dumps(tmp_path)
    ours, before = ProportionalSampler(20), rb.sampler.state_dict()
    ours.load_state_dict(before)
    rb.set_sampler(ours)
    rb.dumps(tmp_path)
    again = make()
    again.loads(tmp_path)
    weights = before["_sum_tree"][torch.arange(9)].double()
    law = again.sampler.probability(torch.arange(9))
    torch.testing.assert_close(law, weights / weights.sum(), rtol=1e-5, atol=0.0)


def test_several_threads_dump_to_one_place_while_others_write_and_load(tmp_path):
    rb = make(steps=500, rows=numbered_rows(500))
    rb.dumps(tmp_path)

    def load() -> None:
        rows: Any = open_checkpoint(tmp_path).rows
        oldest = int(rows["x"].argmin())
        expected = rows["x"].min() + torch.arange(500)
        assert torch.equal(rows["x"].roll(-oldest), expected)

    def write() -> None:
        for _ in range(10):
            rb.extend(numbered_rows(7, rb.write_count))

    def repeat(work: Callable[[], None]) -> None:
        for _ in range(6):
            work()

    with ThreadPoolExecutor(4) as pool:
        dump = lambda: rb.dumps(tmp_path)  # noqa: E731
        list(pool.map(repeat, (dump, dump, load, write)))


# -- what is written


ROWS = 4_000  # of 256 bytes: 1 MB


def wide_rows(count: int, value: float) -> TensorDict:
    x = torch.full((count, 32), value, dtype=torch.float64)
    return TensorDict({"x": x, "k": torch.rand(count)}, [count])


def sizes(path: Path) -> dict[int, int]:
    """Return the bytes of each data file, by its number."""
    found = [file.stat() for file in path.glob("data/*.bin")]
    return {stat.st_ino: stat.st_size for stat in found}


def test_only_what_has_changed_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 1 << 14)
    rb = make("uniform", ROWS, rows=wide_rows(ROWS, 0))
    rb.dumps(tmp_path)
    before = sizes(tmp_path)
    assert sum(before.values()) > ROWS * 256
    for _ in range(2):  # chunks are once compared, once remembered
        rb.dumps(tmp_path)
        assert sizes(tmp_path) == before
    rb.extend(wide_rows(100, 1))  # 26 kB: two or three chunks
    rb.dumps(tmp_path)
    after = sizes(tmp_path)
    written = sum(after[number] for number in after.keys() - before)
    assert 0 < written <= 3 * (1 << 14)
    assert len(after) == len(before)
    rb.storage["x"][1234, 5] = 7.0  # a view: no writer knows of it
    rb.dumps(tmp_path)
    again = make("uniform", ROWS)
    again.loads(tmp_path)
    assert_same(again.storage[:], rb.storage[:])


def test_a_dump_in_the_scratch_dir_survives_later_writes(tmp_path):
    def in_folder() -> Any:
        storage = PackedStorage(ROWS, scratch_dir=tmp_path)
        return ReplayBuffer(storage=storage, sampler=ProportionalSampler(ROWS))

    rb, other = in_folder(), make(steps=ROWS)
    for value in (0, 1):  # the second one wraps
        rb.extend(wide_rows(3_000, value))
    rb.dumps(tmp_path)
    rows = rb.storage[:].clone()
    rb.extend(wide_rows(ROWS, 2))  # overwrites everything
    for loading in (other, rb):  # another buffer, and what the dump is of
        loading.loads(tmp_path)
        assert_same(loading.storage[:], rows)
        assert loading.write_count == 6_000
    del rb, loading
    again = in_folder()  # in the place of the file that the dump is of
    again.loads(tmp_path)
    assert_same(again.storage[:], rows)


# -- a dump is killed


ROW_BYTES = 128


def extend_quarter(rb: Any, generation: int, rows: int) -> None:
    """Write a quarter of the rows (at first all of them) with the number of the
    generation."""
    count = rows // 4 if generation else rows
    x = torch.full((count, ROW_BYTES // 8), generation)
    rb.extend(TensorDict({"x": x}, [count]))


def quarters(generation: int, rows: int) -> torch.Tensor:
    numbers = torch.zeros(4, dtype=torch.int64)
    for g in range(max(1, generation - 3), generation + 1):
        numbers[(g - 1) % 4] = g
    return numbers.repeat_interleave(rows // 4)


def killed_child(
    rb: Any, folder: Path, generation: int, rows: int, after: float
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
    rb = make(steps=rows)
    for number in range(generation + 1):
        start = time.perf_counter()
        extend_quarter(rb, number, rows)
        rb.dumps(tmp_path)
    took = time.perf_counter() - start
    for _ in range(kills):  # in all parts of a dump, and in the one after it
        last = killed_child(rb, tmp_path, generation, rows, chance.uniform(0, 2 * took))
        rb.loads(tmp_path)
        generation = int(rb.storage["x"].max())
        assert generation >= last
        assert (rb.storage["x"] == quarters(generation, rows)[:, None]).all()
        assert rb.write_count == rows + generation * (rows // 4)


# -- what is loaded


STORAGES: dict[str, Callable[[], Any]] = {
    "larger": lambda: PackedStorage(30),
    "deduplicated": lambda: PackedStorage(20, share_next=["seen"]),
    "lanes": lambda: PackedStorage(40, ndim=2, lanes=2),
    "larger lanes": lambda: PackedStorage(90, ndim=2, lanes=3),
    "more lanes": lambda: PackedStorage(80, ndim=2, lanes=4),
}


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
    lanes, kind, words, remedy, tmp_path
):
    rows = numbered_rows(23, lanes=lanes)
    rows["seen"] = rows["desired_goal"].expand(*rows.shape, 8).clone()
    rows["next", "seen"] = rows["seen"] - 1
    old = make(lanes=lanes, rows=rows)
    old.dumps(tmp_path)
    new = ReplayBuffer(storage=STORAGES[kind]())
    remedy = f"new.extend({remedy})"
    said = f"{words}.*{re.escape(remedy)}"
    with pytest.raises(CheckpointError, match=said):
        new.loads(tmp_path, rows_only=True)
    with pytest.raises(ValueError, match=said):
        new.storage.load_state_dict(old.storage.state_dict())
    assert len(new) == 0
    for e in range(max(1, lanes)):
        eval(remedy)
        copied = new.lane(e) if new.storage.ndim > 1 else new
        expected = (old.lane(e) if lanes else old).chronological()
        assert_same(copied.chronological()[-len(expected) :], expected)


def test_rows_only_takes_any_sampler_and_lets_the_rows_in(tmp_path):
    rb, again = make("uniform", rows=numbered_rows(26)), make()
    rb.dumps(str(tmp_path))
    again.loads(str(tmp_path), rows_only=True)
    assert_same(again.chronological(), rb.chronological())
    assert again.sampler.priority(torch.arange(20)).tolist() == [1.0] * 20


@pytest.mark.parametrize("device", ["mps", "cuda:99"])
def test_generators_of_devices_that_are_not_here_are_left_out(device):
    rb, state = make("uniform"), torch.get_rng_state()
    generator = rb._rng
    words = f"generator is on {device}, which is not available"
    with pytest.warns(UserWarning, match=words):
        buffer.restore_generator(rb, (state, device))
    assert rb._rng is generator
    buffer.refuse(rb, {"_writer": {}, "_rng": (state, device)})


def test_a_load_restores_the_batch_size_and_the_counts_of_batches(tmp_path):
    one, other = make(rows=numbered_rows(4)), make("uniform", batch_size=3)
    other.set_sampler(ProportionalSampler(20))
    one.sample()
    one.dumps(tmp_path)
    other.loads(tmp_path)
    assert len(other.sample()) == 8
    stats = other.stats()
    assert (stats["sample_calls"], stats["samples_returned"]) == (2, 16)


def test_a_load_sets_the_generator_that_others_share():
    generator = torch.Generator().manual_seed(3)
    rb = make(rows=numbered_rows(4))
    rb.set_rng(generator)
    state, before = rb.state_dict(), generator.get_state()
    rb.sample()
    assert not torch.equal(generator.get_state(), before)
    rb.load_state_dict(state)
    assert torch.equal(generator.get_state(), before)


def load(rb: Any, saved: Any, how: str, folder: Path) -> None:
    """Load a buffer by a dump or by its state."""
    if how == "loads":
        saved.dumps(folder)
        rb.loads(folder)
    else:
        rb.load_state_dict(saved.state_dict())


LOADS = pytest.mark.parametrize("how", ["loads", "load_state_dict"])


@LOADS
def test_reserved_rows_take_those_of_a_state_with_more_entries(how, tmp_path):
    schema = TensorDict({"x": torch.tensor(0)})
    rows = TensorDict({"x": torch.arange(6), "policy": torch.rand(6, 2)}, [6])
    old, new = (ReplayBuffer.from_schema(schema, 8) for _ in range(2))
    old.extend(rows)
    load(new, old, how, tmp_path)
    assert_same(new.storage[:], rows)
    new.extend(rows)
    assert new.sample(4)["policy"].shape == (4, 2)


# -- transforms


def scaled(*scales: float) -> Any:
    keys = [("next", "reward")]
    parts = [RewardScaling(0.0, scale, in_keys=keys) for scale in scales]
    return parts[0] if len(parts) == 1 else Compose(*parts)


def to_float() -> Any:
    return DoubleToFloat(in_keys=["desired_goal"])


def transformed(transform: Any = None, count: int = 0) -> Any:
    options = {} if transform is None else {"transform": transform}
    rows = numbered_rows(count, 1).apply(torch.ones_like) if count else None
    return buffer_of(10, None, rows=rows, batch_size=2, **options)


def reward_of(rb: Any) -> Any:
    return pytest.approx(rb.sample()["next", "reward"].unique().item())


#: Makers of the saved transform and of the buffer's own, and the reward then.
PAIRS: dict[str, tuple[Any, Any, float]] = {
    "none now": (lambda: scaled(0.1), lambda: None, 1.0),
    "none saved": (lambda: None, lambda: scaled(0.1), 0.1),
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
    old, rb = transformed(saved(), 3), transformed(own(), 1)
    old.dumps(tmp_path)
    said = "the saved transforms have the tensors .*, those of this buffer .*: make it with the same transforms"
    with pytest.raises(CheckpointError, match=said):
        rb.loads(tmp_path, transforms=True)
    with pytest.raises(ValueError, match=said):
        rb.load_state_dict(old.state_dict())
    assert len(rb) == 1
    rb.loads(tmp_path, rows_only=rows_only)
    assert len(rb) == 3
    assert reward == reward_of(rb)


@pytest.mark.parametrize("rows_only", [False, True])
@pytest.mark.parametrize(("transforms", "reward"), [(False, 0.5), (True, 0.1)])
def test_a_load_gives_transforms_the_saved_tensors_on_request(
    transforms, reward, rows_only, tmp_path
):
    def mixture(scale: float, count: int) -> ReplayBufferMixture:
        members = {name: transformed(scaled(scale), count) for name in ("a", "b")}
        return ReplayBufferMixture(members, {"a": 1, "b": 1}, batch_size=4)

    transformed(scaled(0.1), 3).dumps(tmp_path)
    rb = transformed(scaled(0.5))
    rb.loads(tmp_path, rows_only=rows_only, transforms=transforms)
    assert reward == reward_of(rb)
    mixture(0.1, 3).dumps(tmp_path / "mixture")
    mixed = mixture(0.5, 0)
    mixed.loads(tmp_path / "mixture", transforms=transforms)
    assert reward == reward_of(mixed)
