"""The index over real data, as TorchRL's collectors give it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import EnvBase, GymEnv, SerialEnv, StepCounter, TransformedEnv

from rlbuf_td import PackedStorage, ReplayBuffer
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.histories import History

torchrl_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl", "ignore::UserWarning:torchrl")


def environment(lanes: int, max_steps: int) -> EnvBase:
    def single() -> EnvBase:
        return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=max_steps))

    return SerialEnv(lanes, single) if lanes else single()


def assert_same_as_history(rb: TensorDictReplayBuffer, rows: list[TensorDict], names: bool) -> None:
    """Compare the index with the history of ``rows``, the time steps collected so far, ``[E]`` each."""
    storage = rb.storage
    lanes = 1 if storage.ndim == 1 else storage.shape[1]
    history = History(storage.max_size // lanes, lanes)
    for step, row in enumerate(rows):
        done = row["next", "done"].reshape(lanes).tolist()
        ids = row["collector", "traj_ids"].reshape(lanes).tolist() if names else None
        values = [{"steps": float(count)} for count in row["step_count"].reshape(lanes)]
        history.put(step % history.steps, done, ids, values)
    cells = history.written()
    assert len(cells) == len(storage)
    found = TrajectoryIndex.of(storage).reach(torch.tensor([slot * lanes + lane for slot, lane in cells]))
    assert list(zip(*(part.tolist() for part in found), strict=True)) == [history.reach(*cell) for cell in cells]
    for cell in cells:  # the environment counts steps itself: within a trajectory they go up by one
        counts = [history.at(slot, cell[1]).values["steps"] for slot in history.trajectory(*cell)]
        assert counts == list(np.arange(len(counts)) + counts[0])


@torchrl_warns
@pytest.mark.parametrize(
    ("lanes", "per_batch", "storage", "cls"),
    [
        (3, 7, PackedStorage, ReplayBuffer),
        (3, 1, PackedStorage, ReplayBuffer),
        (0, 60, PackedStorage, TensorDictReplayBuffer),
        (0, 1, LazyTensorStorage, ReplayBuffer),
        (3, 60, LazyTensorStorage, TensorDictReplayBuffer),
    ],
)
def test_a_collector_in_batches_of_any_length(lanes, per_batch, storage, cls):
    """Episodes of up to 25 steps span batches of one step; the ring of 50 wraps; ``[E, T]`` becomes ``[T, E]``."""
    env = environment(lanes, 25)
    env.set_seed(0)
    across = max(lanes, 1)
    rb = cls(storage=storage(50 * across, ndim=2 if lanes else 1), batch_size=8)
    TrajectoryIndex.of(rb.storage)
    total = 40 if per_batch == 1 else 120
    collector = Collector(env, None, frames_per_batch=per_batch * across, total_frames=total * across)
    rows: list[TensorDict] = []
    for data in collector:
        assert data.shape == ((lanes, per_batch) if lanes else (per_batch,))
        rb.extend(data)
        rows += (data.transpose(0, 1) if lanes else data).unbind(0)
        if per_batch > 1 or len(rows) % 10 == 0:
            assert_same_as_history(rb, rows, names=True)
    collector.shutdown()
    assert len(rows) >= total
