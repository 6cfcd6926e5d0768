"""Real environments, through TorchRL's collectors of one and of several processes, into
buffers and rollouts."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import (
    LazyTensorStorage,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.envs import EnvBase, GymEnv, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.trainers.algorithms.ppo import PPOTrainer

from rlbuf_td import (
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    RingWriter,
    RolloutBuffer,
)
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.backends import needs_torchrl

quiet = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
KEYS = ["observation", "step_count", ("next", "observation"), ("collector", "traj_ids")]


def single() -> EnvBase:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=30))


def three() -> EnvBase:
    return SerialEnv(3, single)


def buffer(cls: Any, ndim: int, sampler: Any = ProportionalSampler) -> Any:
    return cls(
        storage=PackedStorage(240, ndim=ndim),
        sampler=sampler(240),
        writer=RingWriter(),
        batch_size=16,
    )


def learn(rb: Any) -> None:
    rb.update_tensordict_priority(rb.sample().set("td_error", torch.rand(16)))


def check_trajectories(rb: Any) -> None:
    rows, lanes = (
        rb.storage[:],
        rb.storage.shape[1:].numel() if rb.storage.ndim > 1 else 1,
    )
    flat = TensorDict(
        {key: rows[key].flatten(0, rb.storage.ndim - 1) for key in KEYS}, [len(rb)]
    )
    cells = torch.arange(len(rb))
    joined = cells[TrajectoryIndex(rb.storage).steps_ahead(cells) > 0]
    assert len(joined) > len(rb) // 2
    here, following = flat[joined], flat[(joined + lanes) % len(rb)]
    assert torch.equal(
        here["collector", "traj_ids"], following["collector", "traj_ids"]
    )
    assert torch.equal(here["next", "observation"], following["observation"])
    assert torch.equal(here["step_count"] + 1, following["step_count"])


@quiet
@pytest.mark.parametrize(
    ("ndim", "extend_buffer", "cls"),
    [
        (1, True, ReplayBuffer),
        (2, False, ReplayBuffer),
        # with [T, E] it fails with TorchRL's own parts, too
        pytest.param(1, False, TensorDictReplayBuffer, marks=pytest.mark.slow),
        pytest.param(2, True, TensorDictReplayBuffer, marks=pytest.mark.slow),
    ],
)
def test_a_collector_fills_the_buffer_itself(ndim, extend_buffer, cls):
    rb, env = buffer(cls, ndim), (single, three)[ndim - 1]()
    env.set_seed(0)
    settings = {
        "frames_per_batch": 60,
        "total_frames": 480,
        "replay_buffer": rb,
        "extend_buffer": extend_buffer,
    }
    collector = Collector(env, None, **settings)
    for nothing in collector:
        assert nothing is None
        learn(rb)
    collector.shutdown()
    assert len(rb) == 240
    assert rb.write_count == 480
    check_trajectories(rb)


@quiet
@needs_torchrl("trajectory writes")
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
    rb = ReplayBuffer(
        storage=PackedStorage(1_000), sampler=ProportionalSampler(1_000), batch_size=16
    )
    settings = {
        "frames_per_batch": 60,
        "total_frames": 480,
        "replay_buffer": rb,
        "replay_write_mode": "trajectory",
    }
    collecting = collector(
        env() if collector is Collector else [env] * 2, None, **settings
    )
    for nothing in collecting:
        assert nothing is None
        if len(rb):
            learn(rb)
    collecting.shutdown()
    rows = rb.chronological()
    ends = rows["next", "done"].flatten().nonzero().flatten() + 1
    assert int(ends[-1]) == len(rb)
    for trajectory in rows.split(
        ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
    ):
        assert trajectory["step_count"].flatten().tolist() == list(
            range(len(trajectory))
        )
        assert len(trajectory["collector", "traj_ids"].unique()) == 1
    check_trajectories(rb)


class Coin(torch.nn.Module):
    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = torch.rand(observation.shape[:-1]) < 0.5
        return torch.stack((heads, ~heads), -1).long(), heads[..., None].float()


def coin() -> TensorDictModule:
    return TensorDictModule(
        Coin(), in_keys=["observation"], out_keys=["action", "heads"]
    )


@quiet
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ndim", "sampler"), [(2, ProportionalSampler), (1, RankSampler)]
)
def test_workers_write_while_the_learner_samples_and_updates(ndim, sampler):
    rb, workers = (
        buffer(ReplayBuffer, ndim, sampler),
        {"frames_per_batch": 60, "total_frames": 480},
    )
    if ndim == 2:
        collecting = MultiSyncCollector(
            [three] * 2, policy=None, replay_buffer=rb, **workers
        )
    # policies that are made in the workers: only they know what a row holds, so that
    # one of them makes the rows
    else:
        collecting = MultiAsyncCollector(
            [single] * 2, policy_factory=[coin, coin], replay_buffer=rb, **workers
        )
    assert rb.shared
    for nothing in collecting:
        assert nothing is None
        for _ in range(5):
            learn(rb)
    collecting.shutdown()
    assert len(rb) == 240
    assert rb.write_count >= 480
    assert ("heads" in rb.storage[:].keys()) == (ndim == 1)
    assert (rb.sampler.priority(torch.arange(240)) > 0).all()
    check_trajectories(rb)
    assert len(rb.storage["collector", "traj_ids"].unique()) > 4


# -- collectors, TorchRL's recipe and its trainer with a RolloutBuffer in them

STEPS, LANES = 16, 3


@pytest.fixture
def agent():
    torch.manual_seed(0)
    network = MLP(in_features=4, out_features=2, num_cells=[16])
    logits = TensorDictModule(network, in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        logits,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(
        MLP(in_features=4, out_features=1, num_cells=[16]), in_keys=["observation"]
    )
    return actor, critic


def make_env():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_collector(actor, frames=STEPS * LANES, total=3, *, lanes=LANES, **kwargs):
    env = SerialEnv(lanes, make_env) if lanes else make_env()
    env.set_seed(0)
    kwargs |= {
        "frames_per_batch": frames,
        "total_frames": total * frames,
        "auto_register_policy_transforms": False,
    }
    return Collector(env, actor, **kwargs)


@pytest.mark.parametrize(
    ("extend_buffer", "values", "lanes"),
    [(True, True, LANES), (True, False, None), (False, False, LANES)],
)
def test_a_collector_fills_rollouts_in_both_of_its_modes(
    agent, extend_buffer, values, lanes
):
    actor, critic = agent
    policy = TensorDictSequential(actor, critic) if values else actor
    rollout = RolloutBuffer(STEPS, lanes, batch_size=10, value_network=critic)
    frames = STEPS * (lanes or 1)
    collector = make_collector(
        policy, frames, lanes=lanes, replay_buffer=rollout, extend_buffer=extend_buffer
    )
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    for number, nothing in enumerate(collector):
        assert nothing is None
        assert rollout.is_complete
        rows = rollout.chronological()
        rows = rows.transpose(0, 1) if lanes else rows
        kept = rows.clone()
        with torch.no_grad():
            gae(rows.exclude("advantage", "value_target", "state_value", inplace=True))
        torch.testing.assert_close(
            kept["advantage"], rows["advantage"], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            kept["value_target"], rows["value_target"], rtol=1e-4, atol=1e-5
        )
        assert rollout.value_rows <= (lanes or 1) + (0 if values else frames)
        assert sum(len(batch) for batch in rollout) == frames, number
    collector.shutdown()


def test_a_ppo_update_is_that_of_torchrls_recipe(agent):
    """The same rollout, the same order of rows, the same weights before and after four
    epochs of minibatches."""
    actor, critic = agent
    collector = make_collector(actor, total=1)
    data = next(iter(collector))
    collector.shutdown()
    results = []
    for ours in (True, False):
        loss_module = ClipPPOLoss(
            copy.deepcopy(actor), copy.deepcopy(critic), normalize_advantage=True
        )
        optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-2)
        value = loss_module.critic_network
        if ours:
            rollout = RolloutBuffer(
                STEPS, LANES, batch_size=7, epochs=4, shuffle=False, value_network=value
            )
            with loss_module.critic_network_params.to_module(value):
                rollout.extend(data.clone())
            batches = iter(rollout)
        else:
            rows = data.clone()
            gae = GAE(gamma=0.99, lmbda=0.95, value_network=value)
            with torch.no_grad():
                gae(rows, params=loss_module.critic_network_params.detach())
            buffer = TensorDictReplayBuffer(
                storage=LazyTensorStorage(STEPS * LANES),
                sampler=SamplerWithoutReplacement(shuffle=False),
                batch_size=7,
            )
            buffer.extend(rows.transpose(0, 1).reshape(-1))
            batches = (batch for _ in range(4) for batch in buffer)
        losses = []
        for batch in batches:
            terms = loss_module(batch)
            loss = (
                terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results.append(
            (
                torch.stack(losses),
                [p.detach().clone() for p in loss_module.parameters()],
            )
        )
    (our_losses, our_weights), (their_losses, their_weights) = results
    assert len(our_losses) == 4 * 7
    torch.testing.assert_close(our_losses, their_losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(our_weights, their_weights, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("epochs", ["trainer", "buffer"])
def test_the_buffer_drops_into_the_ppo_trainer(agent, epochs):
    """The trainer flattens each batch and marks its lanes' ends as truncated: a rollout
    without a lane dim takes it."""
    actor, critic = agent
    loss_module = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    frames = STEPS * LANES
    rollout = RolloutBuffer(
        frames,
        batch_size=12,
        epochs=4 if epochs == "buffer" else 1,
        value_network=critic,
        gamma=0.99,
        lmbda=0.95,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = PPOTrainer(
            collector=make_collector(actor, total=2),
            total_frames=2 * frames,
            frame_skip=1,
            optim_steps_per_batch=None,
            num_epochs=1 if epochs == "buffer" else 4,
            loss_module=loss_module,
            optimizer=optimizer,
            replay_buffer=rollout,
            add_gae=False,
            progress_bar=False,
            enable_logging=False,
        )
    before = [p.detach().clone() for p in loss_module.parameters()]
    batches = []

    def watch(batch):
        batches.append(batch)
        return batch

    trainer.register_op("process_optim_batch", watch)
    trainer.train()
    assert len(batches) == 2 * 4 * 4
    assert all("advantage" in batch for batch in batches)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(before, loss_module.parameters(), strict=True)
    )
    assert rollout.write_count == 2 * frames * (1 if epochs == "buffer" else 4)
    # values, ends of lanes, and no step twice
    assert rollout.value_rows <= frames + LANES + 10
