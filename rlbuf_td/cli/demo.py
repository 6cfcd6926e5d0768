"""Train a double DQN in a plain PyTorch loop, from prioritized 3-step replay.

Run this script with ``python -m rlbuf_td demo``. The main part is :func:`train`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import VectorEnv
from gymnasium.wrappers.vector import FlattenObservation
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from tensordict import TensorDictBase
from torch import nn
from torchrl.data.replay_buffers import Sampler

from rlbuf_td import (
    EpisodeStats,
    GymnasiumRecorder,
    NStepSampler,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    UniformSampler,
)
from rlbuf_td.cli import UsageError
from rlbuf_td.diagnostics.plots import plot_episodes

NUM_ENVS = 8
CAPACITY = 50_000
BATCH = 128
STEPS = 60_000
WARM_UP = 1_000
EXPLORE = 6_000  # steps of all environments together
ROLLOUT, UPDATES = 32, 128  # updates after each ROLLOUT steps of every environment
TAU = 0.05  # how far the target network moves in each update
GAMMA = 0.99
N_STEPS = 3
LEARNING_RATE = 2e-3
FINAL_EPSILON = 0.02
REWARD_SCALE = 0.1  # values then are of the order of 1 to 10
WINDOW = 20  # episodes
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "uniform": UniformSampler,
    "proportional": lambda: ProportionalSampler(
        CAPACITY, alpha=0.6, beta=0.4, weight_norm="batch"
    ),
    "rank": lambda: RankSampler(CAPACITY, alpha=0.7, beta=0.5),
}


def make_env(name: str) -> VectorEnv:
    """Return vector environments with flat observations and discrete actions."""
    try:
        env = gymnasium.make_vec(name, num_envs=NUM_ENVS)
    except (gymnasium.error.Error, ImportError) as error:
        raise UsageError(f"--env {name}: {error}") from None

    observations, actions = env.single_observation_space, env.single_action_space
    if not isinstance(actions, Discrete) or actions.start != 0:
        raise UsageError(
            f"--env {name}: DQN needs an environment with discrete actions from 0, got {actions}"
        )
    if not observations.is_np_flattenable:
        raise UsageError(
            f"--env {name}: the network needs observations of fixed size, got {observations}"
        )
    if isinstance(observations, Box) and len(observations.shape) == 1:
        return env
    return FlattenObservation(env)


class Learner:
    """A double DQN: a Q network, its target network and its optimizer.

    The target network is a running mean of the Q network. It also chooses the actions:
    its policy is steadier than that of the Q network.
    """

    def __init__(self, env: VectorEnv, steps: int, device: torch.device) -> None:
        inputs = gymnasium.spaces.flatdim(env.single_observation_space)
        self.actions = gymnasium.spaces.flatdim(env.single_action_space)
        layers = (nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.network = nn.Sequential(*layers, nn.Linear(128, self.actions)).to(device)
        self.target = deepcopy(self.network).requires_grad_(False)
        self.parameters = list(self.network.parameters())
        self.target_parameters = list(self.target.parameters())
        self.optimizer = torch.optim.Adam(
            self.parameters, lr=LEARNING_RATE, fused=device.type in ("cpu", "cuda")
        )
        self.schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, 1.0, 0.1, total_iters=steps // (NUM_ENVS * ROLLOUT)
        )
        self.device = device

    @torch.no_grad()
    def act(self, obs: np.ndarray, epsilon: float) -> np.ndarray:
        """Return an epsilon-greedy action for each environment."""
        values = self.target(torch.as_tensor(obs).to(self.device, torch.float32))
        greedy = values.argmax(-1).cpu()
        random = torch.randint(self.actions, greedy.shape)
        return torch.where(torch.rand(greedy.shape) < epsilon, random, greedy).numpy()

    def learn(self, batch: TensorDictBase) -> torch.Tensor:
        """Take an optimizer step, and return the TD error of each row, ``[B]``."""
        outcome: Any = batch["next"]
        steps: Any = batch["steps_to_next_obs"]
        with torch.no_grad():
            next_obs = outcome["observation"].float()
            best = self.network(next_obs).argmax(-1, keepdim=True)
            next_value = self.target(next_obs).gather(-1, best)
            # an n-step reward is a discounted sum, and its next observation is n steps on
            discount = GAMMA**steps * ~outcome["terminated"]
            value_target = REWARD_SCALE * outcome["reward"] + discount * next_value

        values = self.network(batch["observation"].float())
        value = values.gather(-1, batch["action"].view(-1, 1))
        loss = nn.functional.smooth_l1_loss(value, value_target, reduction="none")
        weight = batch.get("priority_weight", None)
        if weight is not None:
            loss = loss * weight.view(-1, 1)
        self.optimizer.zero_grad()
        loss.mean().backward()
        nn.utils.clip_grad_norm_(self.parameters, 10.0)
        self.optimizer.step()

        with torch.no_grad():
            torch._foreach_lerp_([*self.target_parameters], [*self.parameters], TAU)
        return (value_target - value.detach()).flatten()


def train(
    options: argparse.Namespace, env: VectorEnv, steps: int, stats: EpisodeStats
) -> None:
    """Train until the environment is solved, or for ``steps`` steps of all
    environments together; ``stats`` counts the episodes."""
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    learner = Learner(env, steps, device)
    rb = ReplayBuffer.from_env(
        env,
        CAPACITY,
        device=device,
        sampler=NStepSampler(SAMPLERS[options.sampler](), N_STEPS, GAMMA),
        batch_size=BATCH,
        stats=stats,
    )
    recorder = GymnasiumRecorder(rb, env)
    threshold = env.spec.reward_threshold if env.spec else None

    obs, _ = recorder.reset(seed=options.seed)
    with progress_bar() as bar:
        task = bar.add_task("", total=steps, shown="")
        while stats.steps < steps:
            for _ in range(ROLLOUT):
                epsilon = max(FINAL_EPSILON, 1 - stats.steps / EXPLORE)
                obs, *_ = recorder.step(learner.act(obs, epsilon))

            words = f"mean return of {WINDOW} episodes: {mean_return(stats):.0f}"
            bar.update(task, completed=stats.steps, shown=words, refresh=True)
            if is_solved(stats, threshold):
                break
            if stats.steps < WARM_UP:
                continue
            for _ in range(UPDATES):
                batch = rb.sample()
                batch["td_error"] = learner.learn(batch)
                rb.update_tensordict_priority(batch)
            learner.schedule.step()


def progress_bar() -> Progress:
    """Return a progress bar on stderr that shows the field ``shown`` of its tasks."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[shown]}"),
    )
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False)


def mean_return(stats: EpisodeStats) -> float:
    """Return the mean return of the last episodes; ``nan`` before one has ended."""
    return stats.summary().get("train/return_mean", float("nan"))


def is_solved(stats: EpisodeStats, threshold: float | None) -> bool:
    if threshold is None or stats.episodes < WINDOW:
        return False
    return mean_return(stats) >= threshold


def prepare(options: argparse.Namespace) -> Path:
    """Refuse options that cannot work, and return a folder for the picture."""
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).partition("\n")[0].partition(". ")[0]
        raise UsageError(
            f"--device {options.device}: torch cannot use this device here: {first}"
        ) from None
    name = f"dqn-{options.env}-{options.sampler}-seed{options.seed}"
    out: Path = options.out or Path("runs", name)
    try:  # before the work that would otherwise be lost
        out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out).close()
    except OSError as error:
        raise UsageError(f"--out: cannot write to {out}: {error.strerror}") from None
    return out


def report(stats: EpisodeStats, out: Path) -> None:
    """Print what was reached, and draw the episodes in ``out``."""
    if not stats.episodes:
        print(f"no episode has ended in {stats.steps:,} steps: no learning curve")
        return
    picture = out / "learning_curve.png"
    plot_episodes(stats).savefig(picture)
    print(
        f"mean return of the last {WINDOW} training episodes: {mean_return(stats):.1f}, after {stats.steps:,} steps"
    )
    print(f"learning curve: {picture}")


def main(options: argparse.Namespace) -> int:
    steps = options.steps or STEPS
    if steps < WARM_UP:
        raise UsageError(
            f"--steps must be at least {WARM_UP}: learning begins after {WARM_UP} steps"
        )
    env = make_env(options.env)
    out = prepare(options)
    torch.set_num_threads(1)  # the network is too small for more
    stats = EpisodeStats(window=WINDOW)
    began = time.perf_counter()
    try:
        train(options, env, steps, stats)
    except KeyboardInterrupt:
        report(stats, out)
        raise
    finally:
        env.close()
    if stats.steps < steps:
        print(f"solved, stopped early: {stats.steps:,} of at most {steps:,} steps")
    report(stats, out)
    print(f"{time.perf_counter() - began:,.0f} s")
    print("next: try --sampler uniform")
    return 0
