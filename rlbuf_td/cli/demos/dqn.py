"""Train DQN with TorchRL's environment, collector and loss, and with this package's replay buffer.

Run this script with ``python -m rlbuf_td demo``. The main part is :func:`train`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gymnasium
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data.replay_buffers import Sampler
from torchrl.envs import EnvBase, GymEnv, RewardSum, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate

from rlbuf_td import NStepSampler, ProportionalSampler, RankSampler, ReplayBuffer, UniformSampler
from rlbuf_td.cli import UsageError
from rlbuf_td.cli.demos.report import Run, prepare, whole_batches

CAPACITY = 50_000
STEPS, EXPLORE = 59_904, 8_000
FRAMES, UPDATES, WARM_UP = 256, 128, 1_024
GAMMA, N_STEPS = 0.99, 3
LEFT_OUT = ["collector", "action_value", "chosen_action_value"]  # not used by the loss
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "uniform": UniformSampler,
    "proportional": lambda: ProportionalSampler(CAPACITY, alpha=0.6, beta=0.4),
    "rank": lambda: RankSampler(CAPACITY, alpha=0.7, beta=0.5),
}


def make_policy(env: EnvBase, device: torch.device, cells: int = 256) -> tuple[TensorDictSequential, EGreedyModule]:
    """Return a greedy policy, and an epsilon-greedy exploration module with decaying epsilon."""
    spec = env.action_spec
    if not hasattr(spec.space, "n"):
        raise UsageError("DQN needs an environment with discrete actions; for continuous ones try --algo ppo")
    network = MLP(env.observation_spec["observation"].shape[-1], spec.space.n, num_cells=[cells, cells], device=device)
    value = TensorDictModule(network, in_keys=["observation"], out_keys=["action_value"])
    explore = EGreedyModule(spec, eps_init=1.0, eps_end=0.01, annealing_num_steps=EXPLORE, device=device)
    return TensorDictSequential(value, QValueModule(spec=spec)), explore


class Learner:
    """TorchRL's double DQN: a loss, its target network and its optimizer."""

    def __init__(self, policy: TensorDictSequential, env: EnvBase, steps: int) -> None:
        self.loss_module = DQNLoss(
            policy, action_space=env.action_spec, double_dqn=True, delay_value=True, loss_function="smooth_l1"
        )
        self.loss_module.make_value_estimator(gamma=GAMMA)
        self.target_update = SoftUpdate(self.loss_module, tau=0.005)
        self.optimizer = torch.optim.Adam(self.loss_module.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=steps // FRAMES)

    def learn(self, batch: TensorDictBase) -> None:
        """Take an optimizer step; the loss reads "priority_weight" from the batch and adds "td_error"."""
        loss = self.loss_module(batch)["loss"]
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.loss_module.parameters(), 10.0)
        self.optimizer.step()
        self.target_update.step()


def train(
    env_name: str,
    sampler: str,
    steps: int,
    seed: int,
    device: torch.device,
    out: Path,
    *,
    stop_when_solved: bool = True,
) -> Run:
    torch.manual_seed(seed)
    steps = whole_batches(steps, FRAMES)
    env = TransformedEnv(GymEnv(env_name), RewardSum())
    env.set_seed(seed)
    policy, explore = make_policy(env, device)
    learner, acting = Learner(policy, env, steps), TensorDictSequential(policy, explore)
    frames = {"frames_per_batch": FRAMES, "total_frames": steps}
    collector = Collector(env, acting, **frames, policy_device=device, auto_register_policy_transforms=False)
    n_step = NStepSampler(SAMPLERS[sampler](), n_steps=N_STEPS, gamma=GAMMA)
    buffer = ReplayBuffer.from_env(env, CAPACITY, device=device, sampler=n_step, batch_size=128)

    threshold = gymnasium.spec(env_name).reward_threshold or float("inf")
    run = Run(partial(GymEnv, env_name), out, seed, steps, threshold)
    for data in collector:
        run.count(data)
        explore.step(data.numel())
        buffer.extend(data.exclude(*LEFT_OUT))
        if run.steps >= WARM_UP:
            for _ in range(UPDATES):
                batch = buffer.sample()
                learner.learn(batch)
                buffer.update_tensordict_priority(batch)
            learner.schedule.step()
        if stop_when_solved and run.is_solved:
            break
    collector.shutdown()
    run.finish(policy, f"DQN on {env_name}, {sampler} replay")
    return run


def main(options: argparse.Namespace) -> int:
    steps, sampler = options.steps or STEPS, options.sampler or "proportional"
    if steps < WARM_UP:
        raise UsageError(f"--steps must be at least {WARM_UP}: learning begins after {WARM_UP} steps")
    out = prepare(options, f"dqn-{options.env}-{sampler}")
    run = train(options.env, sampler, steps, options.seed, torch.device(options.device), out)
    run.tell("try --sampler uniform, or --algo ppo")
    return 0
