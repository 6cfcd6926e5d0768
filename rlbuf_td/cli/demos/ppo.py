"""Train PPO with TorchRL's environments, collector and loss, and with this package's rollout buffer.

Run this script with ``python -m rlbuf_td demo --algo ppo``. The main part is :func:`train`. The buffer adds
advantages to the collected data, and a loop over the buffer runs the epochs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import Compose, EnvBase, GymEnv, RewardScaling, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss

from rlbuf_td import RolloutBuffer
from rlbuf_td.cli import UsageError
from rlbuf_td.cli.demos.report import Run, prepare, whole_batches

LANES = 8


@dataclass(frozen=True)
class Settings:
    """The training settings for an environment."""

    steps: int = 100_000
    rollout_steps: int = 128
    gamma: float = 0.99
    reward_scale: float = 1.0
    solved: float = float("inf")  # stop when the mean return of the last 20 training episodes reaches it


SETTINGS = {
    "CartPole-v1": Settings(solved=475.0),
    "Pendulum-v1": Settings(steps=160_000, rollout_steps=256, gamma=0.9, reward_scale=0.1),
}


def make_env(name: str) -> EnvBase:
    return GymEnv(name, categorical_action_encoding=True)


def make_agent(env: EnvBase, device: torch.device) -> tuple[ProbabilisticActor, ValueOperator]:
    size = env.observation_spec["observation"].shape[-1]
    network = partial(MLP, size, num_cells=[64, 64], activation_class=torch.nn.Tanh, device=device)
    spec = env.action_spec_unbatched
    discrete = not spec.dtype.is_floating_point
    if discrete:
        head = TensorDictModule(network(spec.space.n), ["observation"], ["logits"])
    else:
        parameters = torch.nn.Sequential(network(2 * spec.shape[-1]), NormalParamExtractor())
        head = TensorDictModule(parameters, ["observation"], ["loc", "scale"])
    actor = ProbabilisticActor(
        head,
        in_keys=head.out_keys,
        spec=spec,
        distribution_class=torch.distributions.Categorical if discrete else TanhNormal,
        distribution_kwargs={} if discrete else {"low": spec.space.low, "high": spec.space.high},
        return_log_prob=True,
    )
    return actor, ValueOperator(network(1), in_keys=["observation"])


class Learner:
    """TorchRL's PPO: a loss and its optimizer."""

    def __init__(self, actor: ProbabilisticActor, critic: ValueOperator, rollouts: int) -> None:
        self.loss_module = ClipPPOLoss(
            actor, critic, clip_epsilon=0.2, entropy_bonus=False, critic_coeff=0.5, loss_critic_type="l2"
        )
        self.optimizer = torch.optim.Adam(self.loss_module.parameters(), lr=1e-3, eps=1e-5)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.05, total_iters=rollouts)

    def learn(self, batch: TensorDictBase) -> None:
        losses = self.loss_module(batch)
        self.optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"]).backward()
        torch.nn.utils.clip_grad_norm_(self.loss_module.parameters(), 0.5)
        self.optimizer.step()


def make_rollout(
    settings: Settings,
    critic: ValueOperator,
    device: torch.device,
    normalize_advantage: Literal["minibatch"] | None = "minibatch",
) -> RolloutBuffer:
    return RolloutBuffer(
        settings.rollout_steps,
        LANES,
        batch_size=256,
        epochs=10,
        gamma=settings.gamma,
        lmbda=0.95,
        value_network=critic,
        normalize_advantage=normalize_advantage,
        device=device,
    )


def train(env_name: str, steps: int | None, seed: int, device: torch.device, out: Path) -> Run:
    settings = SETTINGS.get(env_name, Settings())
    frames = LANES * settings.rollout_steps
    steps = whole_batches(steps or settings.steps, frames)
    torch.manual_seed(seed)
    transforms = Compose(RewardSum(), RewardScaling(loc=0.0, scale=settings.reward_scale))
    env = TransformedEnv(SerialEnv(LANES, partial(make_env, env_name)), transforms)
    env.set_seed(seed)
    actor, critic = make_agent(env, device)
    rollout, learner = make_rollout(settings, critic, device), Learner(actor, critic, steps // frames)
    collector = Collector(
        env,
        TensorDictSequential(actor, critic),  # stores the value with each step, so that it is not computed again
        frames_per_batch=frames,
        total_frames=steps,
        policy_device=device,
        auto_register_policy_transforms=False,
    )

    run = Run(partial(make_env, env_name), out, seed, steps, settings.solved)
    for data in collector:
        rollout.extend(data)
        for batch in rollout:
            learner.learn(batch)
        learner.schedule.step()
        run.count(data, **{"explained variance of the values": f"{rollout.explained_variance:.2f}"})
        if run.is_solved:
            break
    collector.shutdown()
    run.finish(actor, f"PPO on {env_name}")
    return run


def main(options: argparse.Namespace) -> int:
    if options.sampler is not None:
        raise UsageError("--sampler is for --algo dqn")
    out = prepare(options, f"ppo-{options.env}")
    run = train(options.env, options.steps, options.seed, torch.device(options.device), out)
    other = "Pendulum-v1" if options.env == "CartPole-v1" else "CartPole-v1"
    run.tell(f"python -m rlbuf_td demo --algo ppo --env {other}")
    return 0
