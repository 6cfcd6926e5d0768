"""TorchRL's collectors write from several processes into one prioritized buffer, from which a learner samples."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase, GymEnv, SerialEnv, StepCounter, TransformedEnv

from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer
from rlbuf_td.storages.trajectory_index import TrajectoryIndex

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]


def single() -> EnvBase:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=30))


def vectorised() -> EnvBase:
    return SerialEnv(3, single)


class Coin(torch.nn.Module):
    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = torch.rand(observation.shape[:-1]) < 0.5
        return torch.stack((heads, ~heads), -1).long(), heads[..., None].float()


def policy() -> TensorDictModule:
    return TensorDictModule(Coin(), in_keys=["observation"], out_keys=["action", "heads"])


def check_trajectories(rb: ReplayBuffer) -> None:
    """Rows that the index joins are one worker's, one trajectory's, and follow each other."""
    rows, lanes = rb.storage[:], rb.storage.shape[1:].numel() if rb.storage.ndim > 1 else 1
    flat = TensorDict({key: rows[key].flatten(0, rb.storage.ndim - 1) for key in KEYS}, [len(rb)])
    cells = torch.arange(len(rb))
    ahead = TrajectoryIndex.of(rb.storage).steps_ahead(cells)
    joined = cells[ahead > 0]
    assert len(joined) > len(rb) // 2
    here, following = flat[joined], flat[(joined + lanes) % len(rb)]
    assert torch.equal(here["collector", "traj_ids"], following["collector", "traj_ids"])
    assert torch.equal(here["next", "observation"], following["observation"])
    assert torch.equal(here["step_count"] + 1, following["step_count"])


KEYS = ["observation", "step_count", ("next", "observation"), ("collector", "traj_ids")]


@pytest.mark.parametrize(
    ("collector", "ndim", "sampler"),
    [
        (MultiSyncCollector, 2, ProportionalSampler),
        pytest.param(MultiAsyncCollector, 1, RankSampler, marks=pytest.mark.slow),
    ],
)
def test_workers_write_while_the_learner_samples_and_updates(collector, ndim, sampler):
    rb = ReplayBuffer(storage=PackedStorage(240, ndim=ndim), sampler=sampler(240), batch_size=16)
    trajectories = TrajectoryIndex.of(rb.storage)
    environment = vectorised if ndim == 2 else single
    # Policies that are made in the workers: only they know what a row holds, so that one of them makes the rows.
    makers = {"policy_factory": [policy, policy]} if collector is MultiAsyncCollector else {"policy": None}
    collecting = collector([environment] * 2, frames_per_batch=60, total_frames=480, replay_buffer=rb, **makers)
    assert rb.shared
    sampled = 0
    for nothing in collecting:
        assert nothing is None
        for _ in range(5):
            batch = rb.sample()
            batch["td_error"] = torch.rand(16)
            rb.update_tensordict_priority(batch)
            sampled += 1
    collecting.shutdown()
    assert sampled >= 5 * (480 // (60 if collector is MultiSyncCollector else 120)) // 2
    assert len(rb) == 240
    assert rb.write_count >= (480 // 3 if ndim == 2 else 480)
    assert ("heads" in rb.storage[:].keys()) == (collector is MultiAsyncCollector)
    assert (rb.sampler.priority(torch.arange(240)) > 0).all()
    assert trajectories is TrajectoryIndex.of(rb.storage)
    check_trajectories(rb)
    assert len(rb.storage["collector", "traj_ids"].unique()) > 4
