"""Real environments, through TorchRL's collectors of one and of several processes, into our buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data.replay_buffers import TensorDictReplayBuffer
from torchrl.envs import EnvBase, GymEnv, SerialEnv, StepCounter, TransformedEnv

from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer, RingWriter
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.features import needs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
KEYS = ["observation", "step_count", ("next", "observation"), ("collector", "traj_ids")]


def single() -> EnvBase:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=30))


def three() -> EnvBase:
    return SerialEnv(3, single)


def buffer(cls: Any, ndim: int, sampler: Any = ProportionalSampler) -> Any:
    return cls(storage=PackedStorage(240, ndim=ndim), sampler=sampler(240), writer=RingWriter(), batch_size=16)


def learn(rb: Any) -> None:
    rb.update_tensordict_priority(rb.sample().set("td_error", torch.rand(16)))


def check_trajectories(rb: Any) -> None:
    rows, lanes = rb.storage[:], rb.storage.shape[1:].numel() if rb.storage.ndim > 1 else 1
    flat = TensorDict({key: rows[key].flatten(0, rb.storage.ndim - 1) for key in KEYS}, [len(rb)])
    cells = torch.arange(len(rb))
    joined = cells[TrajectoryIndex.of(rb.storage).steps_ahead(cells) > 0]
    assert len(joined) > len(rb) // 2
    here, following = flat[joined], flat[(joined + lanes) % len(rb)]
    assert torch.equal(here["collector", "traj_ids"], following["collector", "traj_ids"])
    assert torch.equal(here["next", "observation"], following["observation"])
    assert torch.equal(here["step_count"] + 1, following["step_count"])


@pytest.mark.parametrize(
    ("ndim", "extend_buffer", "cls"),
    [
        (1, True, ReplayBuffer),
        (2, False, ReplayBuffer),
        (1, False, TensorDictReplayBuffer),  # with [T, E] it fails with TorchRL's own parts, too
        (2, True, TensorDictReplayBuffer),
    ],
)
def test_a_collector_fills_the_buffer_itself(ndim, extend_buffer, cls):
    rb, env = buffer(cls, ndim), (single, three)[ndim - 1]()
    env.set_seed(0)
    settings = {"frames_per_batch": 60, "total_frames": 480, "replay_buffer": rb, "extend_buffer": extend_buffer}
    collector = Collector(env, None, **settings)
    for nothing in collector:
        assert nothing is None
        learn(rb)
    collector.shutdown()
    assert len(rb) == 240
    assert rb.write_count == 480 // (3 if ndim == 2 else 1)
    check_trajectories(rb)


@needs("trajectory writes")
@pytest.mark.parametrize(
    ("collector", "env"),
    [
        (Collector, single),
        (Collector, three),
        pytest.param(MultiSyncCollector, single, marks=pytest.mark.slow),
        pytest.param(MultiAsyncCollector, single, marks=pytest.mark.slow),
    ],
)
def test_collectors_write_whole_trajectories(collector, env):
    rb = ReplayBuffer(storage=PackedStorage(1_000), sampler=ProportionalSampler(1_000), batch_size=16)
    settings = {"frames_per_batch": 60, "total_frames": 480, "replay_buffer": rb, "replay_write_mode": "trajectory"}
    collecting = collector(env() if collector is Collector else [env] * 2, None, **settings)
    for nothing in collecting:
        assert nothing is None
        if len(rb):
            learn(rb)
    collecting.shutdown()
    rows = rb.chronological()
    ends = rows["next", "done"].flatten().nonzero().flatten() + 1
    assert int(ends[-1]) == len(rb)
    for trajectory in rows.split(ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()):
        assert trajectory["step_count"].flatten().tolist() == list(range(len(trajectory)))
        assert len(trajectory["collector", "traj_ids"].unique()) == 1
    check_trajectories(rb)


class Coin(torch.nn.Module):
    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = torch.rand(observation.shape[:-1]) < 0.5
        return torch.stack((heads, ~heads), -1).long(), heads[..., None].float()


def coin() -> TensorDictModule:
    return TensorDictModule(Coin(), in_keys=["observation"], out_keys=["action", "heads"])


@pytest.mark.slow
@pytest.mark.parametrize(("ndim", "sampler"), [(2, ProportionalSampler), (1, RankSampler)])
def test_workers_write_while_the_learner_samples_and_updates(ndim, sampler):
    rb, workers = buffer(ReplayBuffer, ndim, sampler), {"frames_per_batch": 60, "total_frames": 480}
    trajectories = TrajectoryIndex.of(rb.storage)
    if ndim == 2:
        collecting = MultiSyncCollector([three] * 2, policy=None, replay_buffer=rb, **workers)
    else:  # policies that are made in the workers: only they know what a row holds, so that one of them makes the rows
        collecting = MultiAsyncCollector([single] * 2, policy_factory=[coin, coin], replay_buffer=rb, **workers)
    assert rb.shared
    for nothing in collecting:
        assert nothing is None
        for _ in range(5):
            learn(rb)
    collecting.shutdown()
    assert len(rb) == 240
    assert rb.write_count >= (480 // 3 if ndim == 2 else 480)
    assert ("heads" in rb.storage[:].keys()) == (ndim == 1)
    assert (rb.sampler.priority(torch.arange(240)) > 0).all()
    assert trajectories is TrajectoryIndex.of(rb.storage)
    check_trajectories(rb)
    assert len(rb.storage["collector", "traj_ids"].unique()) > 4
