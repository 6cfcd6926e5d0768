"""``del rb`` frees the rows at once: no reference cycle keeps a storage until a garbage
collection."""

from __future__ import annotations

import copy
import gc
import pickle
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import gymnasium
import pytest
import torch
from torchrl.data.replay_buffers import TensorDictPrioritizedReplayBuffer

from rlbuf_td import (
    EpisodeStats,
    GymnasiumRecorder,
    PackedStorage,
    ReplayBuffer,
    ReplayBufferMixture,
    UniformSampler,
)
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.catalogue import SAMPLERS
from tests.test_goes_on import MAKERS, REOPENED, steps


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
