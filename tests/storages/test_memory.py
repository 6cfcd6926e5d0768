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
    UniformSampler,
)
from rlbuf_td.kernels.host_memory import take_pages
from rlbuf_td.storages import memory_budget as _room
from rlbuf_td.storages.memory import ROWS_FILE
from rlbuf_td.storages.memory_budget import Room
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.catalogue import SAMPLERS, SCHEMAS, assert_same, transitions
from tests.test_goes_on import MAKERS, REOPENED, steps

NESTED = SCHEMAS["nested"]
PLACES = ["RAM", "shared", "file"]


def stored(place: str, folder: Path, *, ndim: int = 1, steps: int = 3) -> Any:
    scratch_dir = folder / "rows" if place == "file" else None
    storage = PackedStorage(
        5 * ndim, ndim=ndim, shared=place == "shared", scratch_dir=scratch_dir
    )
    if steps:
        storage.set(range(steps), transitions(NESTED, steps, (2,) * (ndim - 1)))
    return storage


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ndim", [1, 2])
def test_rows_are_the_same_wherever_they_live(
    place: str, ndim: int, tmp_path: Path
) -> None:
    storage = stored(place, tmp_path, ndim=ndim)
    data = transitions(NESTED, 3, (2,) * (ndim - 1))
    assert_same(storage[:], data)
    assert_same(storage[torch.tensor([2, 0])], data[torch.tensor([2, 0])])
    assert (storage.shared_rows is not None) == (place == "shared")
    assert not storage[torch.tensor([0])]["first"].is_shared()
    assert {"RAM": "cpu", "shared": "shared memory", "file": "mapped file"}[
        place
    ] in repr(storage)


@pytest.mark.parametrize("auto", [True, False])
def test_rows_live_on_the_device_asked_for(device: torch.device, auto: bool) -> None:
    storage = PackedStorage(5, device="auto" if auto else device)
    storage.set(range(3), transitions(NESTED, 3, device=device))
    for place in (
        torch.device(storage.device),
        storage["first"].device,
        storage[[0]]["first"].device,
    ):
        assert place.type == device.type
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
    storage = stored("file", tmp_path)
    path = tmp_path / "rows" / ROWS_FILE
    assert path.stat().st_size == storage.nbytes == 5 * storage.row_bytes
    storage.set([4, 3], transitions(NESTED, 2, seed=3))
    on_disk = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(
        5, -1
    )
    assert torch.equal(on_disk, storage.rows.matrix.view(torch.uint8))


def test_a_first_write_that_is_refused_makes_no_file(tmp_path: Path) -> None:
    storage = stored("file", tmp_path, steps=0)
    data = transitions(NESTED, 3)
    for bad, cursor in (
        (data.clone().set("s", "text"), range(3)),
        (data, range(2)),
        (data, range(1, 4)),
    ):
        with pytest.raises((SchemaError, IndexError)):
            storage.set(cursor, bad)
        assert not (tmp_path / "rows").exists()
    storage.set(range(3), data)
    assert (tmp_path / "rows" / ROWS_FILE).exists()


def test_a_full_disk_is_an_error_at_the_first_write_and_leaves_no_file(
    tmp_path, monkeypatch
):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    storage = stored("file", tmp_path, steps=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            storage.set(range(3), transitions(NESTED, 3))
    assert not list((tmp_path / "rows").iterdir())
    assert not storage.initialized
    storage.set(range(3), transitions(NESTED, 3))
    assert_same(storage[:], transitions(NESTED, 3))


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
@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        (
            {"max_size": 2_000},
            MemoryError,
            "2,000 rows of .* take 23.* in all.*scratch_dir",
        ),
        (
            {"max_size": 2_000, "shared": True},
            MemoryError,
            "2,000 rows of .* take 23.* in all.*scratch_dir",
        ),
        (
            {"max_size": 1_000, "scratch_dir": "rows"},
            OSError,
            "1,000 rows of .* another scratch_dir",
        ),
    ],
)
def test_rows_that_cannot_be_had_are_refused_and_nothing_is_written(
    settings, kind, words, tmp_path
):
    if "scratch_dir" in settings:
        settings = settings | {"scratch_dir": tmp_path / "rows"}
    storage = PackedStorage(**settings)
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


USES: dict[str, Callable[[Path], Any]] = {
    name: partial(played, name) for name in MAKERS if ", rows" in name
}
USES |= {
    name: partial(played, name)
    for name in MAKERS
    if "proportional, " in name and "TorchRL's" not in name
}
USES |= {f"reopened, {name}": partial(played, f"reopened, {name}") for name in REOPENED}
USES |= {
    name: partial(played, name)
    for name in ("an epoch", "half a rollout in chunks", "queue", "mixture")
}
USES |= {
    "pickled": lambda folder: pickle.loads(
        pickle.dumps(played("windows, lanes", folder))
    )
}
USES |= {"copied": lambda folder: copy.deepcopy(played("n-step, ids", folder))}
USES |= {
    maker.__name__: maker
    for maker in (prefetching, looked_at, with_lanes, recorded, of_torchrl, in_pairs)
}


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def storages_of(used: Any) -> list[Any]:
    parts = used if isinstance(used, tuple) else (used,)
    buffers = [
        each for part in parts for each in getattr(part, "members", {"": part}).values()
    ]
    return [buffer.storage for buffer in buffers if hasattr(buffer, "storage")]


@pytest.mark.parametrize("name", USES)
def test_a_storage_is_freed_with_its_last_buffer(name, tmp_path):
    used = USES[name](tmp_path)
    left = [ref(storage) for storage in storages_of(used)]
    assert left
    del used
    # a thread may still transform a batch
    for _ in range(500 * (name == "prefetching")):
        time.sleep(0.01)
        if not any(reference() for reference in left):
            break
    assert [reference() for reference in left] == [None] * len(left)


@pytest.mark.parametrize("name", USES)
def test_close_frees_the_rows_although_the_buffers_live(name, tmp_path):
    used = USES[name](tmp_path)
    parts = used if isinstance(used, tuple) else (used,)
    storages = storages_of(used)
    left = [ref(storage.rows.flat) for storage in storages]
    assert all(reference() is not None for reference in left)
    for part in parts:
        for each in getattr(part, "members", {"": part}).values():
            getattr(each, "close", getattr(each, "shutdown", lambda: None))()
    for storage in storages:  # of TorchRL's buffers, which have no `close`
        storage.close()
    # a thread may still transform a batch
    for _ in range(500 * (name == "prefetching")):
        time.sleep(0.01)
        if not any(reference() is not None for reference in left):
            break
    assert [reference() is None for reference in left] == [True] * len(left)
    del used, parts


def test_a_reopened_folder_is_free_once_its_buffer_is_deleted(tmp_path):
    for count in (5, 10):
        rb = ReplayBuffer(
            storage=PackedStorage(20, scratch_dir=tmp_path, reopen=True),
            sampler=UniformSampler(),
        )
        rb.extend(steps(count - 5, 5, 0))
        assert len(rb) == count
        with pytest.raises(RuntimeError, match="are open in process"):
            PackedStorage(20, scratch_dir=tmp_path, reopen=True)
        del rb


def test_a_deleted_buffer_leaves_the_storage_to_others():
    storage = PackedStorage(20)
    one, other = (
        ReplayBuffer(storage=storage, sampler=SAMPLERS["rank"](20), batch_size=4)
        for _ in range(2)
    )
    one.extend(steps(0, 5, 0))
    del one
    other.extend(steps(5, 5, 0))
    other.close()
    assert storage.is_closed


@pytest.mark.parametrize("stats", [None, EpisodeStats], ids=["plain", "stats"])
def test_the_rows_are_freed_at_the_end_of_a_with_block(stats: Any) -> None:
    rb = ReplayBuffer(storage=PackedStorage(20), batch_size=4, stats=stats and stats())
    mixture = ReplayBufferMixture(
        {"one": rb, "same": rb}, {"one": 1, "same": 1}, batch_size=4
    )
    with rb:
        for number in range(3):
            rb.extend(steps(number, 5, 0))
            rb.sample()
            assert len(mixture.sample()) == 4
        rows = ref(rb.storage.rows)
        assert rows() is not None
    assert rows() is None
