"""TorchRL's collectors, recipe and trainer with a RolloutBuffer in them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.trainers.algorithms.ppo import PPOTrainer

from rlbuf_td import RolloutBuffer

STEPS, LANES = 16, 3


@pytest.fixture
def agent():
    torch.manual_seed(0)
    network = MLP(in_features=4, out_features=2, num_cells=[16])
    logits = TensorDictModule(network, in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        logits, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True
    )
    critic = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[16]), in_keys=["observation"])
    return actor, critic


def make_env():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_collector(actor, frames=STEPS * LANES, total=3, *, lanes=LANES, **kwargs):
    env = SerialEnv(lanes, make_env) if lanes else make_env()
    env.set_seed(0)
    kwargs |= {"frames_per_batch": frames, "total_frames": total * frames, "auto_register_policy_transforms": False}
    return Collector(env, actor, **kwargs)


@pytest.mark.parametrize(
    ("extend_buffer", "values", "lanes"), [(True, True, LANES), (True, False, None), (False, False, LANES)]
)
def test_a_collector_fills_rollouts_in_both_of_its_modes(agent, extend_buffer, values, lanes):
    actor, critic = agent
    policy = TensorDictSequential(actor, critic) if values else actor
    rollout = RolloutBuffer(STEPS, lanes, batch_size=10, value_network=critic)
    frames = STEPS * (lanes or 1)
    collector = make_collector(policy, frames, lanes=lanes, replay_buffer=rollout, extend_buffer=extend_buffer)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    for number, nothing in enumerate(collector):
        assert nothing is None
        assert rollout.is_complete
        rows = rollout.chronological()
        rows = rows.transpose(0, 1) if lanes else rows
        kept = rows.clone()
        with torch.no_grad():
            gae(rows.exclude("advantage", "value_target", "state_value", inplace=True))
        torch.testing.assert_close(kept["advantage"], rows["advantage"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kept["value_target"], rows["value_target"], rtol=1e-4, atol=1e-5)
        assert rollout.value_rows <= (lanes or 1) + (0 if values else frames)
        assert sum(len(batch) for batch in rollout) == frames, number
    collector.shutdown()


def test_a_ppo_update_is_that_of_torchrls_recipe(agent):
    """The same rollout, the same order of rows, the same weights before and after four epochs of minibatches."""
    actor, critic = agent
    collector = make_collector(actor, total=1)
    data = next(iter(collector))
    collector.shutdown()
    results = []
    for ours in (True, False):
        loss_module = ClipPPOLoss(copy.deepcopy(actor), copy.deepcopy(critic), normalize_advantage=True)
        optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-2)
        value = loss_module.critic_network
        if ours:
            rollout = RolloutBuffer(STEPS, LANES, batch_size=7, epochs=4, shuffle=False, value_network=value)
            with loss_module.critic_network_params.to_module(value):
                rollout.extend(data.clone())
            batches = iter(rollout)
        else:
            rows = data.clone()
            gae = GAE(gamma=0.99, lmbda=0.95, value_network=value)
            with torch.no_grad():
                gae(rows, params=loss_module.critic_network_params.detach())
            buffer = TensorDictReplayBuffer(
                storage=LazyTensorStorage(STEPS * LANES), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=7
            )
            buffer.extend(rows.transpose(0, 1).reshape(-1))
            batches = (batch for _ in range(4) for batch in buffer)
        losses = []
        for batch in batches:
            terms = loss_module(batch)
            loss = terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results.append((torch.stack(losses), [p.detach().clone() for p in loss_module.parameters()]))
    (our_losses, our_weights), (their_losses, their_weights) = results
    assert len(our_losses) == 4 * 7
    torch.testing.assert_close(our_losses, their_losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(our_weights, their_weights, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("epochs", ["trainer", "buffer"])
def test_the_buffer_drops_into_the_ppo_trainer(agent, epochs):
    """The trainer flattens each batch and marks its lanes' ends as truncated: a rollout without a lane dim takes it."""
    actor, critic = agent
    loss_module = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    frames = STEPS * LANES
    rollout = RolloutBuffer(
        frames, batch_size=12, epochs=4 if epochs == "buffer" else 1, value_network=critic, gamma=0.99, lmbda=0.95
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
    assert any(not torch.equal(a, b) for a, b in zip(before, loss_module.parameters(), strict=True))
    assert rollout.write_count == 2 * frames * (1 if epochs == "buffer" else 4)
    assert rollout.value_rows <= frames + LANES + 10  # values, ends of lanes, and no step twice
