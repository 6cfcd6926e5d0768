"""Real environments, through TorchRL's collectors, into our buffers."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import EnvBase, GymEnv, SerialEnv, StepCounter, TransformedEnv

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer, RingWriter

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl", "ignore::UserWarning:torchrl")


def environment(ndim: int = 2) -> EnvBase:
    """Return one CartPole, or for two dims three of them."""

    def single() -> EnvBase:
        return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=30))

    env = single() if ndim == 1 else SerialEnv(3, single)
    env.set_seed(0)
    return env


def buffer(cls, ndim: int, capacity: int = 240) -> TensorDictReplayBuffer:
    return cls(
        storage=PackedStorage(capacity, ndim=ndim),
        sampler=ProportionalSampler(capacity),
        writer=RingWriter(),
        batch_size=16,
    )


def check_rows(rows: TensorDict) -> None:
    """Within a trajectory the next observation is the following row's, and its steps count up by one."""
    same = (rows["collector", "traj_ids"][1:] == rows["collector", "traj_ids"][:-1]).flatten()
    same &= ~rows["next", "done"][:-1].flatten()
    assert same.any()
    nxt, root = rows["next", "observation"][:-1].flatten(0, -2), rows["observation"][1:].flatten(0, -2)
    assert torch.equal(nxt[same], root[same])
    assert torch.equal((rows["step_count"][1:] - rows["step_count"][:-1]).flatten()[same], torch.ones(int(same.sum())))


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("extend_buffer", [True, False])
@pytest.mark.parametrize("ndim", [1, 2])
def test_a_collector_fills_the_buffer_itself(ndim, extend_buffer, cls):
    if cls is TensorDictReplayBuffer and ndim == 2 and not extend_buffer:
        pytest.skip("TensorDictReplayBuffer.add fails on ndim=2 with TorchRL's own parts too (shown below)")
    rb, env = buffer(cls, ndim), environment(ndim)
    collector = Collector(
        env, None, frames_per_batch=60, total_frames=480, replay_buffer=rb, extend_buffer=extend_buffer
    )
    for nothing in collector:
        assert nothing is None
        batch = rb.sample()
        batch["td_error"] = torch.rand(16)
        rb.update_tensordict_priority(batch)
    collector.shutdown()
    assert len(rb) == 240
    assert rb.write_count == 480 // (3 if ndim == 2 else 1)
    ours = rb if cls is ReplayBuffer else ReplayBuffer(storage=rb.storage, writer=rb.writer)
    rows = ours.chronological()
    for lane in [rows] if ndim == 1 else rows.unbind(1):
        check_rows(lane)


def test_torchrls_buffer_cannot_add_a_step_of_several_lanes_whoevers_parts_it_has():
    step = TensorDict({"x": torch.zeros(3)}, [3])
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    for rb in (theirs, buffer(TensorDictReplayBuffer, 2)):
        with pytest.raises(RuntimeError, match="expand_as_right"):
            rb.add(step.clone())
    ours = buffer(ReplayBuffer, 2)
    assert ours.add(step).tolist() == [[0, 0], [0, 1], [0, 2]]


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_steps_of_several_lanes_can_be_rows_of_a_storage_of_one_dim(cls):
    rb = buffer(cls, 1)
    settings = {"frames_per_batch": 60, "total_frames": 120, "replay_buffer": rb, "extend_buffer": False}
    collector = Collector(environment(), None, **settings)
    for _ in collector:
        assert rb.sample()["observation"].shape == (16, 3, 4)
    collector.shutdown()
    assert len(rb) == 40


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_loop_over_a_collector_extends_the_buffer(ndim):
    rb, flat, env = buffer(ReplayBuffer, ndim), buffer(ReplayBuffer, 1), environment(ndim)
    policy = TensorDictModule(lambda obs: env.full_action_spec["action"].rand(), ["observation"], ["action"])
    collector = Collector(env, policy, frames_per_batch=60, total_frames=300, auto_register_policy_transforms=False)
    collected = []
    for data in collector:
        rb.extend(data)
        flat.extend(data.reshape(-1))
        collected.append(data.transpose(0, 1) if ndim == 2 else data)
    collector.shutdown()
    everything = torch.cat(collected)
    steps = 240 // (3 if ndim == 2 else 1)
    stored = rb.chronological()
    for key in ("observation", "action", ("next", "reward"), ("next", "terminated"), ("collector", "traj_ids")):
        assert torch.equal(stored[key], everything[key][-steps:]), key
    assert len(flat) == 240
    assert flat.sample()["observation"].shape == (16, 4)
