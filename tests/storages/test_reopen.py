"""A process that writes to ``PackedStorage(reopen=True)`` is killed (SIGKILL); another one continues its rows."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    GymnasiumRecorder,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    ReservoirWriter,
    SchemaError,
    TrajectoryIndex,
)
from rlbuf_td.buffers.bound_write import BoundWrite
from rlbuf_td.storages.lane_heads import LaneHeads
from rlbuf_td.storages.rows import PlainRows
from rlbuf_td.storages.shared.journal_file import JOURNAL_FILE
from rlbuf_td.storages.shared.rows import Journal
from tests.storages.test_kill import die, half_then_die

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
CAPACITY, LANES = 240, 3


def rows(number: torch.Tensor) -> TensorDict:
    """Return rows whose entries all follow from their number, with a done flag after each 7 rows."""
    data = {
        "x": number,
        "payload": number[..., None] * 3 + torch.arange(40),
        "next": {"done": number[..., None] % 7 == 6},
    }
    data["next"]["reward"] = torch.ones(*number.shape, 1)
    return TensorDict(data, number.shape)


def are_whole(found: TensorDict) -> bool:
    return bool((found == rows(found["x"])).all())


def opened(folder: Path, lanes: int = 0, **kwargs: Any) -> PackedStorage:
    if lanes:
        kwargs |= {"ndim": 2, "lanes": lanes}
    return PackedStorage(CAPACITY, scratch_dir=folder, reopen=True, **kwargs)


def killed(work: Callable[[], object], after: float | None = None) -> None:
    """Do ``work`` in a child that is killed: by itself, or ``after`` seconds."""

    def child() -> None:
        torch.set_num_threads(1)
        work()

    process = mp.get_context("fork").Process(target=child)
    process.start()
    if after is not None:
        time.sleep(after)
        os.kill(process.pid or 0, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def last_numbers(storage: PackedStorage) -> list[int]:
    """Check all rows, and return the number of the last row of each lane (-1: none)."""
    if not len(storage):
        return [-1] * LANES ** (storage.ndim - 1)
    rb, found = ReplayBuffer(storage=storage), []
    _, count = storage.heads.read(storage)
    for lane in range(len(count)):
        if not count[lane]:
            found.append(-1)
            continue
        part = rb.lane(lane).chronological() if storage.ndim == 2 else rb.chronological()
        assert are_whole(part)
        assert (part["x"].diff() == 1).all()
        assert len(part) == min(storage.all_rows().steps, int(part["x"][-1]) + 1)
        found.append(int(part["x"][-1]))
    return found


def write_for_ever(folder: Path, lanes: int, seed: int, progress: Any) -> None:
    """Write rows in steps and in blocks; ``progress`` holds the last numbers before and after the current write."""
    draw, storage = np.random.default_rng(seed), opened(folder, lanes)
    last = np.array(last_numbers(storage))
    progress[:] = [*last, *last]
    rb = ReplayBuffer(storage=storage)
    while True:
        count = int(draw.choice([1, 3, 20, 70]))
        if lanes:
            ids = draw.integers(LANES, size=count)
            after = last + np.bincount(ids, minlength=LANES)
            number = last[ids] + 1 + np.array([(ids[:place] == lane).sum() for place, lane in enumerate(ids)])
        else:
            after, number = last + count, last + 1 + np.arange(count)
        progress[len(last) :] = after.tolist()
        data = rows(torch.from_numpy(number))
        if lanes:
            rb.extend(data, lanes=torch.from_numpy(ids))
        elif count == 1:
            rb.add(data[0])
        else:
            rb.extend(data)
        progress[: len(last)] = after.tolist()
        last = after


def sample_prioritized(storage: PackedStorage) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* rows were reopened without a priority")
        rb = ReplayBuffer(storage=storage, sampler=NStepSampler(ProportionalSampler(CAPACITY), 3, 1.0), batch_size=32)
    batch = rb.sample()
    assert (batch["payload"] == rows(batch["x"])["payload"]).all()
    assert (batch["next", "reward"].view(-1) <= 7 - batch["x"] % 7).all()  # returns end with the trajectory
    rb.update_priority(batch["index"], torch.rand(32))


@pytest.fixture(autouse=True, scope="module")
def compiled(tmp_path_factory: Any) -> None:
    for lanes in (0, LANES):
        compile_writes(tmp_path_factory.mktemp("compiled"), lanes)


def compile_writes(folder: Path, lanes: int) -> None:
    """Compile what the killed processes call, which inherit the machine code."""
    storage = opened(folder, lanes)
    rb = ReplayBuffer(storage=storage)
    for _ in range(3):
        if lanes:
            rb.extend(rows(torch.arange(3)), lanes=torch.arange(3))
        else:
            rb.extend(rows(torch.arange(3)))
            rb.add(rows(torch.tensor(3)))


def kill_often(folder: Path, lanes: int, kills: int) -> None:
    draw, size = np.random.default_rng(kills), LANES if lanes else 1
    progress, unfinished = RawArray("q", [-1] * (2 * size)), 0
    for kill in range(kills):
        killed(partial(write_for_ever, folder, lanes, kill, progress), float(draw.uniform(0.02, 0.12)))
        storage = opened(folder, lanes)
        found, before, after = last_numbers(storage), progress[:size], progress[size:]
        assert found in (before, after)
        unfinished += before != after
        if len(storage):
            sample_prioritized(storage)
        del storage
    assert max(found) > CAPACITY
    assert unfinished


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [0, LANES])
def test_killed_often_at_random_moments(tmp_path: Path, lanes: int) -> None:
    kill_often(tmp_path, lanes, int(os.environ.get("RLBUF_TD_KILLS", "25")))  # before a release: 200


POINTS: dict[str, tuple[bool, Any]] = {  # is the write kept?
    "half the rows are written": (False, (PlainRows, "copy_", half_then_die)),
    "the counters have moved": (False, (Journal, "written", die)),
    "the write is complete": (True, (ReplayBuffer, "mark_range", die)),
    "compiled: the rows are saved": (False, (Journal, "saved", die)),
    "compiled: the counters have moved": (False, (Journal, "written", die)),
    "compiled: the write is complete": (True, (BoundWrite, "enter_rows", die)),
}


@pytest.mark.parametrize("before", [100, CAPACITY, CAPACITY + 30])
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_write_is_whole_or_missing(tmp_path: Path, before: int, point: str) -> None:
    is_kept, where = POINTS[point]

    def work() -> None:
        rb = ReplayBuffer(storage=opened(tmp_path))
        rb.extend(rows(torch.arange(before)))
        write_with(point)
        setattr(*where)
        rb.extend(rows(torch.arange(before, before + 50)))

    killed(work)
    storage = opened(tmp_path)
    assert last_numbers(storage) == [before - 1 + 50 * is_kept]


def write_with(point: str) -> None:
    """Write with torch, unless ``point`` lies in a compiled write."""
    if not point.startswith("compiled"):
        BoundWrite.holds = lambda self: False  # type: ignore[method-assign]


LANE_POINTS: dict[str, tuple[bool, Any]] = {
    "the rows are written": (False, (LaneHeads, "write", die)),
    "compiled: the rows are saved": (False, (Journal, "saved", die)),
    "compiled: the counters have moved": (False, (Journal, "written", die)),
    "compiled: the write is complete": (True, (BoundWrite, "enter_rows_of_lanes", die)),
}


@pytest.mark.parametrize("point", LANE_POINTS)
def test_a_killed_write_to_single_lanes_is_whole_or_missing(tmp_path: Path, point: str) -> None:
    is_kept, where = LANE_POINTS[point]

    def work() -> None:
        rb = ReplayBuffer(storage=opened(tmp_path, LANES))
        rb.extend(rows(torch.arange(5)), lanes=1)
        write_with(point)
        setattr(*where)
        rb.extend(rows(torch.arange(4)), lanes=2)

    killed(work)
    storage = opened(tmp_path, LANES)
    assert last_numbers(storage) == [-1, 4, 3 if is_kept else -1]
    rb = ReplayBuffer(storage=storage)
    rb.lane(1).extend(rows(torch.arange(5, 9)))
    assert last_numbers(storage) == [-1, 8, 3 if is_kept else -1]


def write_and_die(folder: Path, first: int, count: int, lanes: int = 0, lane: int = 0) -> None:
    rb = ReplayBuffer(storage=opened(folder, lanes))
    rb.extend(rows(torch.arange(first, first + count)), lanes=lane if lanes else None)
    die()


@pytest.mark.parametrize("lanes", [0, LANES])
def test_trajectories_end_where_a_process_was_killed(tmp_path: Path, lanes: int) -> None:
    for first in (0, 10, 23):
        killed(partial(write_and_die, tmp_path, first, 13 if first else 10, lanes, 1))
    storage = opened(tmp_path, lanes)
    rb = ReplayBuffer(storage=storage)
    rb.extend(rows(torch.arange(36, 40)), lanes=1 if lanes else None)
    ends = [x for x in range(40) if x % 7 == 6 or x in (9, 22, 35, 39)]
    expected = [next(end for end in ends if end >= x) - x for x in range(40)]
    steps = torch.arange(40)
    index = TrajectoryIndex.of(storage)
    where = (steps, torch.ones_like(steps)) if lanes else steps
    assert index.steps_ahead(where).tolist() == expected
    index.repair()  # reads all rows again
    assert index.steps_ahead(where).tolist() == expected
    rb.extend(rows(torch.arange(40, 300)), lanes=1 if lanes else None)
    index.repair()
    kept = torch.tensor([x for x in range(300) if x >= 300 - storage.all_rows().steps and x < 290])
    where = (kept % storage.all_rows().steps, torch.ones_like(kept)) if lanes else kept % storage.all_rows().steps
    breaks = [x for x in (9, 22, 35) if x >= int(kept[0])]
    ends = sorted({*range(6, 300, 7), *breaks})
    assert index.steps_ahead(where).tolist() == [next(end for end in ends if end >= x) - x for x in kept.tolist()]


@pytest.mark.slow
def test_a_living_owner_is_not_disturbed(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    ReplayBuffer(storage=storage).extend(rows(torch.arange(9)))
    with pytest.raises(RuntimeError, match=f"are open in process {os.getpid()}"):
        opened(tmp_path)
    said = RawArray("b", 1)

    def work() -> None:
        try:
            opened(tmp_path)
        except RuntimeError:
            said[0] = 1
        die()

    killed(work)
    assert said[0]
    assert last_numbers(storage) == [8]
    del storage
    assert last_numbers(opened(tmp_path)) == [8]  # the same process opens the rows again


def test_other_arguments_are_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    killed(lambda: write_and_die(tmp_path, 0, 9))
    refused: list[tuple[str, dict[str, Any]]] = [
        ("have capacity 240, not 239", {"max_size": 239}),
        ("have ndim=1, not ndim=2", {"ndim": 2}),
        ("existsok=True replaces", {"existsok": True}),
        ("auto_cleanup=True deletes", {"auto_cleanup": True}),
        ("does not support deduplicated rows", {"share_next": True}),
        ("pass scratch_dir", {"scratch_dir": None}),
    ]
    for match, arguments in refused:
        with pytest.raises(ValueError, match=match):
            PackedStorage(**{"max_size": CAPACITY, "scratch_dir": tmp_path, "reopen": True, **arguments})
    with pytest.raises(ValueError, match="a ReservoirWriter cannot continue"):
        ReplayBuffer(storage=opened(tmp_path), writer=ReservoirWriter())
    storage = opened(tmp_path, shared_init=True)
    with pytest.raises(SchemaError, match="'y'"):
        ReplayBuffer(storage=storage).extend(TensorDict({"y": torch.zeros(2)}, [2]))
    assert last_numbers(storage) == [8]


def test_other_lanes_are_refused(tmp_path: Path) -> None:
    killed(lambda: write_and_die(tmp_path, 0, 9, LANES))
    with pytest.raises(ValueError, match="have lanes=3, not lanes=2"):
        opened(tmp_path, 2)
    assert last_numbers(opened(tmp_path, LANES)) == [8, -1, -1]


def test_rows_without_a_journal_are_refused(tmp_path: Path) -> None:
    PackedStorage(CAPACITY, scratch_dir=tmp_path).set(range(9), rows(torch.arange(9)))
    content = (tmp_path / "rows.bin").read_bytes()
    with pytest.raises(FileExistsError, match=r"holds rows without journal\.bin"):
        opened(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.bin"]
    assert (tmp_path / "rows.bin").read_bytes() == content


def change(file: Path, place: int, new: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[place : place + len(new)] = new
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda file: change(file, 0, b"xxxx"), "its header"),
        (lambda file: change(file, 0, bytes(24)), "its header"),
        (lambda file: change(file, 8, b"\x07"), "its header"),
        (lambda file: change(file, 24, b"\x01"), "checksum"),
        (lambda file: change(file, (1 << 16) + 5, b"#"), "checksum"),
        (lambda file: change(file, 40, b"\x00\x10"), "rows do not fit"),
        (lambda file: os.truncate(file, 100), "its header"),
        (lambda file: os.truncate(file, (1 << 16) + 5000), "too short"),
        (lambda file: os.truncate(file.with_name("rows.bin"), 100), r"rows\.bin has 100 bytes"),
        (lambda file: file.with_name("rows.bin").unlink(), r"rows\.bin has 0 bytes"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, spoil: Callable[[Path], object], match: str) -> None:
    folder, copy = tmp_path / "rows", tmp_path / "copy"
    killed(lambda: write_and_die(folder, 0, 9))
    shutil.copytree(folder, copy)
    spoil(folder / JOURNAL_FILE)
    with pytest.raises(ValueError, match=match):
        opened(folder)
    assert last_numbers(opened(copy)) == [8]


@pytest.mark.slow
def test_killed_before_the_first_write_ends(tmp_path: Path) -> None:
    def work() -> None:
        PlainRows.copy_ = die  # type: ignore[method-assign]
        write_and_die(tmp_path, 0, 9)

    killed(work)
    killed(lambda: write_and_die(tmp_path, 0, 9))
    assert last_numbers(opened(tmp_path)) == [8]
    folder = tmp_path / "other"

    def die_early() -> None:
        Journal.keep_in = die  # type: ignore[method-assign]
        write_and_die(folder, 0, 9)

    killed(die_early)
    assert (folder / "rows.bin").exists()
    killed(lambda: write_and_die(folder, 0, 9))
    assert last_numbers(opened(folder)) == [8]


@pytest.mark.slow
def test_processes_share_reopened_rows(tmp_path: Path) -> None:
    killed(lambda: write_and_die(tmp_path, 0, 9))
    rb = ReplayBuffer(storage=opened(tmp_path)).share()
    for context in ("fork", "spawn"):
        how: Any = mp.get_context(context)
        process = how.Process(target=extend_further, args=(rb,))
        process.start()
        process.join(120)
        assert process.exitcode == 0
    assert last_numbers(rb.storage) == [18]
    del rb
    assert last_numbers(opened(tmp_path)) == [18]


def extend_further(rb: ReplayBuffer) -> None:
    first = len(rb)
    rb.extend(rows(torch.arange(first, first + 5)))


def test_an_emptied_storage_is_continued(tmp_path: Path) -> None:
    def work() -> None:
        rb = ReplayBuffer(storage=opened(tmp_path))
        rb.extend(rows(torch.arange(100)))
        rb.empty()
        die()

    killed(work)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        storage = opened(tmp_path)
        rb = ReplayBuffer(storage=storage, sampler=ProportionalSampler(CAPACITY), batch_size=4)
    assert len(storage) == 0
    rb.extend(rows(torch.arange(20)))
    assert last_numbers(storage) == [19]


def test_a_relative_folder_is_found_from_where_the_storage_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    rb = ReplayBuffer(storage=PackedStorage(9, scratch_dir="rows", reopen=True), sampler=ProportionalSampler(9))
    cleaned = PackedStorage(9, scratch_dir="cleaned", auto_cleanup=True)
    monkeypatch.chdir("job")
    for storage in (rb, ReplayBuffer(storage=cleaned)):
        storage.extend(rows(torch.arange(5)))
    files = {"breaks.json", "journal.bin", "priorities.bin", "rows.bin"}
    assert {each.name for each in (tmp_path / "rows").iterdir()} <= files
    del cleaned, storage
    assert sorted(each.name for each in tmp_path.iterdir()) == ["job", "rows"]
    assert not any((tmp_path / "job").iterdir())


def test_a_closed_buffer_frees_its_folder(tmp_path: Path) -> None:
    with ReplayBuffer(storage=opened(tmp_path), sampler=ProportionalSampler(CAPACITY), batch_size=4) as rb:
        for _ in range(2):
            rb.extend(rows(torch.arange(130)))
            rb.sample()
        with pytest.raises(RuntimeError, match=r"call close\(\) of the buffers"):
            opened(tmp_path)
    look_up = TrajectoryIndex.of(rb.storage).boundaries
    for use in (rb.sample, rb.state_dict, rb.chronological, look_up, lambda: rb.extend(rows(torch.arange(3)))):
        with pytest.raises(RuntimeError, match="has been closed"):
            use()
    for count in (260, 263):
        with ReplayBuffer(storage=opened(tmp_path)) as rb:
            assert (len(rb), rb.write_count) == (CAPACITY, count)
            rb.extend(rows(torch.arange(3)))


def test_rows_of_an_environment_are_continued(tmp_path: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium")

    def run(name: str) -> int:
        env = gymnasium.make_vec(name, num_envs=2)
        with ReplayBuffer.from_env(env, 40, scratch_dir=tmp_path, reopen=True) as rb:
            recorder = GymnasiumRecorder(rb, env)
            recorder.reset(seed=0)
            recorder.step(env.action_space.sample())
            return len(rb)

    assert run("CartPole-v1") == 2
    with pytest.raises(SchemaError, match=r"'observation' is float32 of shape \(6,\) in the schema"):
        run("Acrobot-v1")
    assert run("CartPole-v1") == 4
