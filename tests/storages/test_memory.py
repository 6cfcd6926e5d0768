"""Where rows live (RAM, shared memory, files), that a buffer for which there is no room
is not begun, and that rows are freed with their last buffer."""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import mmap
import os
import pickle
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictPrioritizedReplayBuffer

from rlbuf_td import (
    EpisodeStats,
    GymnasiumRecorder,
    MemoryWarning,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReplayBufferMixture,
    SchemaError,
)
from rlbuf_td.kernels.host_memory import take_pages
from rlbuf_td.storages import memory_budget as _room
from rlbuf_td.storages.memory import ROWS_FILE
from rlbuf_td.storages.memory_budget import Room
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.catalogue import SAMPLERS, SCHEMAS, assert_same, transitions
from tests.test_goes_on import MAKERS, REOPENED, steps

NESTED = SCHEMAS["nested"]


def in_file(folder: Path, steps: int = 3) -> Any:
    storage = PackedStorage(5, scratch_dir=folder / "rows")
    if steps:
        storage.set(range(steps), transitions(NESTED, steps))
    return storage


def test_rows_say_where_they_live_and_are_read_into_memory_of_ones_own(
    tmp_path: Path,
) -> None:
    shared = PackedStorage(5, shared=True)
    shared.set(range(3), transitions(NESTED, 3))
    assert "shared memory" in repr(shared)
    assert not shared[torch.tensor([0])]["first"].is_shared()
    assert "mapped file" in repr(in_file(tmp_path))


@pytest.mark.parametrize("auto", [True, False])
def test_rows_live_on_the_device_asked_for(device: torch.device, auto: bool) -> None:
    storage = PackedStorage(5, device="auto" if auto else device)
    storage.set(range(3), transitions(NESTED, 3, device=device))
    leaves = storage["first"], storage[[0]]["first"]
    devices = {torch.device(storage.device), *(leaf.device for leaf in leaves)}
    assert {place.type for place in devices} == {device.type}
    storage.set([3], transitions(NESTED, 1))
    assert_same(storage[3], transitions(NESTED, 1)[0])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_what_users_do_to_views_counts_as_an_edit(device: str) -> None:
    storage = PackedStorage(5, device=device)
    storage.set(range(3), transitions(NESTED, 3))
    views, before = storage[:], storage.revision
    storage.set([3], transitions(NESTED, 1))
    assert storage.revision == before + 1
    views["first"].fill_(1.0)
    assert storage.revision == before + 2


def test_the_file_holds_capacity_times_row_bytes_and_the_rows_themselves(
    tmp_path: Path,
) -> None:
    storage = in_file(tmp_path)
    path = tmp_path / "rows" / ROWS_FILE
    assert path.stat().st_size == storage.nbytes == 5 * storage.row_bytes
    storage.set([4, 3], transitions(NESTED, 2, seed=3))
    on_disk = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    assert torch.equal(on_disk, storage.rows.matrix.view(torch.uint8).flatten())


def test_a_first_write_that_is_refused_makes_no_file(tmp_path: Path) -> None:
    storage, data = in_file(tmp_path, 0), transitions(NESTED, 3)
    for bad, cursor in (
        (data.clone().set("s", "text"), range(3)),
        (data, range(2)),
        (data, range(1, 4)),
    ):
        with pytest.raises((SchemaError, IndexError)):
            storage.set(cursor, bad)
    assert not (tmp_path / "rows").exists()


def test_a_full_disk_is_an_error_at_the_first_write_and_leaves_no_file(
    tmp_path, monkeypatch
):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    storage, data = in_file(tmp_path, 0), transitions(NESTED, 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            storage.set(range(3), data)
    assert not list((tmp_path / "rows").iterdir())
    assert not storage.initialized
    storage.set(range(3), data)
    assert_same(storage[:], data)


MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes pages ahead")
def test_pages_that_were_taken_are_resident():
    memory = torch.frombuffer(mmap.mmap(-1, 64 * MIB), dtype=torch.uint8)
    assert resident_of(memory) == 0
    take_pages(memory[: 33 * MIB])
    taken = resident_of(memory)
    if taken == 0:
        pytest.skip("this system does not know MADV_POPULATE_WRITE")
    assert 33 * MIB <= taken <= 35 * MIB  # a huge page at the end may be whole
    assert not memory.any()


def test_memory_is_read_where_the_system_tells_it() -> None:
    room = _room.room_for(torch.device("cpu"))
    if sys.platform == "linux":
        assert 1 << 20 < (room.free or 0) <= (room.total or 0) < 1 << 50
    assert _room.room_for(torch.device("cpu"), Path("/")).free


def step(n: int = 2) -> TensorDict:
    pixels = torch.zeros(n, 3, 64, 64, dtype=torch.uint8)
    return TensorDict(
        {"pixels": pixels, "next": {"done": torch.zeros(n, 1, dtype=torch.bool)}}, [n]
    )


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _room, "room_for", lambda device, _=None: Room(device.type, 10 << 20, 20 << 20)
    )


@pytest.mark.usefixtures("crowded")
def test_a_buffer_that_will_not_fit_warns_once_with_numbers_and_remedy() -> None:
    rb = ReplayBuffer(storage=PackedStorage(1_000))
    words = r"1,000 rows of 12,\d+ bytes take 11.\d MiB, .* Take a smaller max_size, or scratch_dir=.*'pixels', 12,288"
    with pytest.warns(MemoryWarning, match=words) as caught:
        rb.extend(step())
    assert len(caught) == 1
    rb.extend(step(600))  # a warning would be an error
    rb.add(step()[0])
    assert len(rb) == 603


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("place", ["RAM", "shared", "file"])
def test_rows_that_cannot_be_had_are_refused_and_nothing_is_written(place, tmp_path):
    kind, words = MemoryError, "2,000 rows of .* take 23.* in all.*scratch_dir"
    folder = None
    if place == "file":
        folder, kind = tmp_path / "rows", OSError
        words = "2,000 rows of .* another scratch_dir"
    storage = PackedStorage(2_000, shared=place == "shared", scratch_dir=folder)
    with pytest.raises(kind, match=words):
        storage.set(range(2), step())
    assert (len(storage), storage.initialized, storage.layout) == (0, False, None)
    assert not list(tmp_path.iterdir())


def test_written_rows_that_do_not_fit_into_memory_twice_are_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rb, fewer = (ReplayBuffer(storage=PackedStorage(900)) for _ in range(2))
    rb.extend(step(900))
    fewer.extend(step(2))
    monkeypatch.setattr(
        _room, "room_for", lambda device, _=None: Room(device.type, 5 << 20, 10 << 20)
    )
    with pytest.raises(
        MemoryError,
        match=r"A copy of the written rows .* 10.\d MiB, .*Share the rows before",
    ):
        rb.share()
    assert rb.storage.shared_rows is None
    rb.extend(step(900))
    assert (fewer.share()[:] == step(2)).all()  # only written rows are copied


def test_small_shared_file_systems_limit_priorities_but_not_rows(monkeypatch):
    usage = type("", (), {"free": 1 << 20, "total": 1 << 20})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    rb = ReplayBuffer.from_schema(step()[0], 200, shared=True)  # 2.4 MiB
    rb.extend(step(200))
    prioritized = ReplayBuffer(
        storage=PackedStorage(100), sampler=ProportionalSampler(200_000)
    )
    prioritized.extend(step())
    words = r"Priorities and trajectories of a shared buffer take 1.9 MiB, .* 1.0 MiB of disk ./dev/shm. .*--shm-size"
    with pytest.raises(OSError, match=words):
        prioritized.share()
    assert prioritized.storage.shared_rows is None
    assert len(prioritized.sample(4)) == 4


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_priorities_that_cannot_be_had_are_refused(sampler: Any) -> None:
    with pytest.raises(
        MemoryError,
        match=r"Priorities of 4,000,000 rows take (37|7\d).* free .*max_capacity",
    ):
        sampler(4_000_000)
    assert sampler(100_000)._max_capacity == 100_000


# -- which memory is in RAM: ``/proc/self/statm`` is off by some pages for every core


def resident() -> int:
    """Return how many bytes of RAM this process holds, counted page by page."""
    found = re.search(
        r"^Rss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE
    )
    assert found is not None
    return int(found[1]) * 1024


def resident_of(memory: torch.Tensor) -> int:
    """Return how many bytes are in RAM of the pages that ``memory`` lies on."""
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(memory.data_ptr() + memory.nbytes - start) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert (
        libc.mincore(
            ctypes.c_void_p(start), ctypes.c_size_t(pages * mmap.PAGESIZE), found
        )
        == 0
    )
    return sum(page & 1 for page in found) * mmap.PAGESIZE


# -- ``del rb`` frees the rows at once: no reference cycle keeps a storage


def played(name: str, folder: Path) -> Any:
    maker = MAKERS.get(name) or REOPENED[name.partition(", ")[2]].of(
        SAMPLERS["proportional"]
    )
    rb = maker.make(folder, 0)
    for number in range(maker.before + 1):
        maker.run(rb, number)
    return rb


def prefetching(folder: Path) -> Any:
    def slow(batch: Any) -> Any:
        time.sleep(2e-3)
        return batch

    rb = ReplayBuffer(
        storage=PackedStorage(20, ndim=2), batch_size=4, prefetch=2, transform=slow
    )
    rb.extend(steps(0, 5, 2))
    for _ in range(4):
        rb.sample()
    return rb


def looked_at(folder: Path) -> Any:
    """Use what reads a buffer."""
    rb = played("n-step, lanes", folder)
    for each in (
        rb.health,
        rb.chronological,
        rb.stats,
        rb.state_dict,
        lambda: rb.compiled,
        lambda: repr(rb),
    ):
        each()
    next(iter(rb))
    rb.dumps(folder / "dump")
    rb.loads(folder / "dump")
    TrajectoryIndex(rb.storage).whole()
    return rb


def with_lanes(folder: Path) -> Any:
    rb = ReplayBuffer(
        storage=PackedStorage(20, ndim=2, lanes=2),
        batch_size=4,
        samples_per_insert=2.0,
        tolerance=99,
    )
    lane = rb.lane(1)
    lane.extend(steps(0, 5, 0))
    rb.sample()
    return rb, lane


def recorded(folder: Path) -> Any:
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    rb = ReplayBuffer.from_env(env, 40, batch_size=4, stats=EpisodeStats())
    recorder = GymnasiumRecorder(rb, env)
    recorder.reset(seed=0)
    recorder.step(env.action_space.sample())
    return rb, recorder


def of_torchrl(folder: Path) -> Any:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=PackedStorage(20), batch_size=4
    )
    rb.extend(steps(0, 5, 0))
    rb.update_tensordict_priority(rb.sample().set("td_error", torch.ones(4)))
    return rb


def in_pairs(folder: Path) -> Any:
    """Two buffers over one storage, and a mixture of one of them with another
    buffer."""
    one = played("uniform, rows", folder)
    other = ReplayBuffer(
        storage=one.storage, sampler=SAMPLERS["sequence"](20), batch_size=4
    )
    other.extend(steps(0, 5, 0))
    mixture = ReplayBufferMixture(
        {"one": one, "third": played("rank, rows", folder)},
        {"one": 1, "third": 1},
        batch_size=4,
    )
    mixture.sample()
    other.sample()
    return mixture, other


def is_used(name: str) -> bool:
    """Whether a maker of another form or another sampler than the others' is used."""
    is_proportional = "proportional, " in name and "TorchRL's" not in name
    others = "an epoch", "half a rollout in chunks", "queue", "mixture"
    return ", rows" in name or is_proportional or name in others


NAMES = [name for name in MAKERS if is_used(name)]
NAMES += [f"reopened, {name}" for name in REOPENED]
USES: dict[str, Callable[[Path], Any]] = {
    **{name: partial(played, name) for name in NAMES},
    "pickled": lambda folder: pickle.loads(
        pickle.dumps(played("windows, lanes", folder))
    ),
    "copied": lambda folder: copy.deepcopy(played("n-step, ids", folder)),
    "prefetching": prefetching,
    "looked at": looked_at,
    "with lanes": with_lanes,
    "recorded": recorded,
    "of TorchRL": of_torchrl,
    "in pairs": in_pairs,
}


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def buffers_of(used: Any) -> list[Any]:
    parts = used if isinstance(used, tuple) else (used,)
    return [
        buffer
        for part in parts
        for buffer in getattr(part, "members", {"": part}).values()
        if hasattr(buffer, "storage")
    ]


def are_freed(references: list[ref[Any]], *, waits: bool) -> bool:
    """Whether nothing is left; a thread may still transform a batch."""
    for _ in range(500 * waits):
        if not any(reference() is not None for reference in references):
            break
        time.sleep(0.01)
    return all(reference() is None for reference in references)


@pytest.mark.parametrize("name", USES)
def test_a_storage_is_freed_with_its_last_buffer(name, tmp_path):
    used = USES[name](tmp_path)
    left = [ref(buffer.storage) for buffer in buffers_of(used)]
    assert left
    del used
    assert are_freed(left, waits=name == "prefetching")


@pytest.mark.parametrize("name", USES)
def test_close_frees_the_rows_although_the_buffers_live(name, tmp_path):
    used = USES[name](tmp_path)
    left = [ref(buffer.storage.rows.flat) for buffer in buffers_of(used)]
    for buffer in buffers_of(used):
        if isinstance(buffer, ReplayBuffer):
            buffer.close()
        else:  # of TorchRL's buffers, which have no `close`
            buffer.shutdown()
            buffer.storage.close()
    assert are_freed(left, waits=name == "prefetching")
    del used


def test_a_deleted_buffer_leaves_the_storage_to_others():
    storage = PackedStorage(20)
    one, other = (
        ReplayBuffer(storage=storage, sampler=RankSampler(20)) for _ in range(2)
    )
    one.extend(steps(0, 5, 0))
    del one
    other.extend(steps(5, 5, 0))
    assert len(other.sample(4)) == 4
    other.close()
    assert storage.is_closed


@pytest.mark.parametrize("stats", [None, EpisodeStats], ids=["plain", "stats"])
def test_the_rows_are_freed_at_the_end_of_a_with_block(stats: Any) -> None:
    rb = ReplayBuffer(storage=PackedStorage(20), batch_size=4, stats=stats and stats())
    members = {"one": rb, "same": rb}
    mixture = ReplayBufferMixture(members, {"one": 1, "same": 1}, batch_size=4)
    with rb:
        for number in range(3):
            rb.extend(steps(number, 5, 0))
            rb.sample()
            mixture.sample()
        rows = ref(rb.storage.rows)
        assert rows() is not None
    assert rows() is None
