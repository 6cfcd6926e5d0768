"""Train DQN with TorchRL's environment, collector and loss, and with this package's
replay buffer.

Run this script with ``python -m rlbuf_td demo``. The main part is :func:`train`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data.replay_buffers import Sampler
from torchrl.envs import EnvBase, GymEnv
from torchrl.modules import MLP, EGreedyModule, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate

from rlbuf_td import (
    EpisodeStats,
    NStepSampler,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    UniformSampler,
)
from rlbuf_td.cli import UsageError
from rlbuf_td.diagnostics.plots import plot_episodes

CAPACITY = 50_000
STEPS, EXPLORE = 59_904, 8_000
FRAMES, UPDATES, WARM_UP = 256, 128, 1_024
GAMMA, N_STEPS = 0.99, 3
LEFT_OUT = ["collector", "action_value", "chosen_action_value"]  # not used by the loss
WINDOW = 20  # episodes
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "uniform": UniformSampler,
    "proportional": lambda: ProportionalSampler(CAPACITY, alpha=0.6, beta=0.4),
    "rank": lambda: RankSampler(CAPACITY, alpha=0.7, beta=0.5),
}


def make_policy(
    env: EnvBase, device: torch.device, cells: int = 256
) -> tuple[TensorDictSequential, EGreedyModule]:
    """Return a greedy policy, and an epsilon-greedy exploration module with decaying
    epsilon."""
    spec = env.action_spec
    if not hasattr(spec.space, "n"):
        raise UsageError("DQN needs an environment with discrete actions")
    network = MLP(
        env.observation_spec["observation"].shape[-1],
        spec.space.n,
        num_cells=[cells, cells],
        device=device,
    )
    value = TensorDictModule(
        network, in_keys=["observation"], out_keys=["action_value"]
    )
    explore = EGreedyModule(
        spec, eps_init=1.0, eps_end=0.01, annealing_num_steps=EXPLORE, device=device
    )
    return TensorDictSequential([value, QValueModule(spec=spec)]), explore


class Learner:
    """TorchRL's double DQN: a loss, its target network and its optimizer."""

    def __init__(self, policy: TensorDictSequential, env: EnvBase, steps: int) -> None:
        self.loss_module = DQNLoss(
            policy,
            action_space=env.action_spec,
            double_dqn=True,
            delay_value=True,
            loss_function="smooth_l1",
        )
        self.loss_module.make_value_estimator(gamma=GAMMA)
        self.target_update = SoftUpdate(self.loss_module, tau=0.005)
        self.optimizer = torch.optim.Adam(self.loss_module.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, 1.0, 0.1, total_iters=steps // FRAMES
        )

    def learn(self, batch: TensorDictBase) -> None:
        """Take an optimizer step; the loss reads "priority_weight" from the batch and
        adds "td_error"."""
        loss = self.loss_module(batch)["loss"]
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.loss_module.parameters(), 10.0)
        self.optimizer.step()
        self.target_update.step()


def train(
    env_name: str, sampler: str, steps: int, seed: int, device: torch.device, out: Path
) -> EpisodeStats:
    """Train until the environment is solved; leave a picture of all episodes in the
    folder ``out``."""
    torch.manual_seed(seed)
    steps = -(-steps // FRAMES) * FRAMES
    env = GymEnv(env_name)
    env.set_seed(seed)
    policy, explore = make_policy(env, device)
    learner, acting = (
        Learner(policy, env, steps),
        TensorDictSequential([policy, explore]),
    )
    frames = {"frames_per_batch": FRAMES, "total_frames": steps}
    collector = Collector(
        env,
        acting,
        **frames,
        policy_device=device,
        auto_register_policy_transforms=False,
    )
    n_step, stats = (
        NStepSampler(SAMPLERS[sampler](), n_steps=N_STEPS, gamma=GAMMA),
        EpisodeStats(window=WINDOW),
    )
    buffer = ReplayBuffer.from_env(
        env, CAPACITY, device=device, sampler=n_step, batch_size=128, stats=stats
    )

    threshold = gymnasium.spec(env_name).reward_threshold or float("inf")
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[shown]}"),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("", total=steps, shown="")
        for data in collector:
            explore.step(data.numel())
            buffer.extend(data.exclude(*LEFT_OUT))
            words = f"mean return of {WINDOW} episodes: {mean_return(stats):.0f}"
            bar.update(task, completed=stats.steps, shown=words, refresh=True)
            if stats.steps >= WARM_UP:
                for _ in range(UPDATES):
                    batch = buffer.sample()
                    learner.learn(batch)
                    buffer.update_tensordict_priority(batch)
                learner.schedule.step()
            if stats.episodes >= WINDOW and mean_return(stats) >= threshold:
                break
    collector.shutdown()
    if stats.steps < steps:
        print(f"solved, stopped early: {stats.steps:,} of at most {steps:,} steps")
    if stats.episodes:
        plot_episodes(stats).savefig(out / "learning_curve.png")
    return stats


def mean_return(stats: EpisodeStats) -> float:
    return stats.summary().get("train/return_mean", float("nan"))


def prepare(options: argparse.Namespace, name: str) -> Path:
    """Refuse options that cannot work, limit torch to one thread, and return a folder
    for the results."""
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).partition("\n")[0].partition(". ")[0]
        raise UsageError(
            f"--device {options.device}: torch cannot use this device here: {first}"
        ) from None
    try:
        gymnasium.make(options.env).close()
    except (gymnasium.error.Error, ImportError) as error:
        raise UsageError(f"--env {options.env}: {error}") from None
    out: Path = options.out or Path("runs", f"{name}-seed{options.seed}")
    try:  # before the work that would otherwise be lost
        out.mkdir(parents=True, exist_ok=True)
        (out / "learning_curve.png").touch()
    except OSError as error:
        raise UsageError(f"--out: cannot write to {out}: {error.strerror}") from None
    torch.set_num_threads(1)  # the networks are too small for more
    return out


def main(options: argparse.Namespace) -> int:
    steps, sampler = options.steps or STEPS, options.sampler
    if steps < WARM_UP:
        raise UsageError(
            f"--steps must be at least {WARM_UP}: learning begins after {WARM_UP} steps"
        )
    out, began = prepare(options, f"dqn-{options.env}-{sampler}"), time.perf_counter()
    stats = train(
        options.env, sampler, steps, options.seed, torch.device(options.device), out
    )
    print(
        f"mean return of the last {WINDOW} training episodes: {mean_return(stats):.1f}, after {stats.steps:,} steps"
    )
    print(f"{time.perf_counter() - began:,.0f} s")
    print(f"learning curve: {out / 'learning_curve.png'}")
    print("next: try --sampler uniform")
    return 0
