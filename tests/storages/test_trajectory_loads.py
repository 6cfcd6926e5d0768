"""A load ends the trajectories that are open: a new collector gives the next one the number 0 again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import (
    EpisodeStats,
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ReplayBuffer,
    TrajectoryIndex,
    UniformSampler,
)


def rows(first: int, *, done: bool) -> TensorDict:
    """Return 10 steps of the trajectory 0, with observations from ``first`` on."""
    here, ends = torch.arange(float(first), first + 10).unsqueeze(-1), torch.zeros(10, 1, dtype=torch.bool)
    ends[-1] = done
    after = {"observation": here + 1, "achieved_goal": here + 1, "reward": torch.ones(10, 1), "done": ends}
    now = {"observation": here, "desired_goal": here, "collector": {"traj_ids": torch.zeros(10, dtype=torch.int64)}}
    return TensorDict(now | {"next": after | {"terminated": ends, "desired_goal": here}}, [10])


def make(kind: Any, wrapper: str, capacity: int = 100) -> ReplayBuffer:
    inner = UniformSampler()
    n_step = NStepSampler(inner, n_steps=5, gamma=1.0)
    hindsight = HindsightSampler(inner, lambda batch: torch.zeros(len(batch), 1), her_ratio=1.0)
    sampler = n_step if wrapper == "n-step" else hindsight
    rb = ReplayBuffer(storage=kind(capacity), sampler=sampler, batch_size=256, stats=EpisodeStats())
    rb.empty()  # the buffer is there
    return rb


@pytest.mark.parametrize("wrapper", ["n-step", "hindsight"])
@pytest.mark.parametrize("kind", [PackedStorage, LazyTensorStorage])
@pytest.mark.parametrize("how", ["dump", "rows", "smaller", "state", "storage dump", "storage state"])
def test_no_trajectory_goes_on_after_a_load(how, kind, wrapper, tmp_path: Path):
    if kind is not PackedStorage and how in ("smaller", "storage dump", "storage state"):
        pytest.skip("TorchRL's storages keep their capacity, and tell nothing of their loads")
    saved, rb = make(kind, wrapper), make(kind, wrapper, 50 if how == "smaller" else 100)
    saved.extend(rows(0, done=False))
    if how == "state":
        rb.load_state_dict(saved.state_dict())
    elif how == "storage state":
        rb.storage.load_state_dict(saved.storage.state_dict())
        rb.writer.load_state_dict(saved.writer.state_dict())
    elif how == "storage dump":
        saved.storage.dumps(tmp_path)
        rb.storage.loads(tmp_path)
        rb.writer.load_state_dict(saved.writer.state_dict())
    else:
        saved.dumps(tmp_path)
        rb.loads(tmp_path, rows_only=how == "rows")
    rb.extend(rows(100, done=True))
    batch = rb.sample()
    first, last = batch["observation"] < 50, batch["next", "observation"] < 50
    goals = batch["desired_goal"] < 50
    assert len(rb) == 20
    assert first.any()
    assert not first.all()
    assert torch.equal(first, last)
    assert torch.equal(first, goals)
    assert rb.episode_stats is not None
    assert rb.episode_stats.history()["length"].tolist() == [10]


def test_a_torchrl_dump_is_read_in_ring_order(tmp_path):
    saved = TensorDictReplayBuffer(storage=LazyTensorStorage(5), batch_size=1)
    rb = TensorDictReplayBuffer(storage=PackedStorage(5), batch_size=1)
    for k in range(8):
        saved.add(rows(0, done=False)[k])
    TrajectoryIndex.of(rb.storage)
    rb.add(rows(0, done=False)[0])
    saved.dumps(tmp_path)
    rb.loads(tmp_path)
    assert TrajectoryIndex.of(rb.storage).steps_back(torch.arange(5)).tolist() == [2, 3, 4, 0, 1]
