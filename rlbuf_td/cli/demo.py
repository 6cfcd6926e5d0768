"""Train DQN with TorchRL's environment, collector and loss, and with this package's replay buffer.

Run this script with ``python -m rlbuf_td demo``. The main part is :func:`train`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data.replay_buffers import Sampler
from torchrl.envs import EnvBase, GymEnv, RewardSum, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, EGreedyModule, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate

from rlbuf_td import NStepSampler, ProportionalSampler, RankSampler, ReplayBuffer, UniformSampler
from rlbuf_td.cli import UsageError
from rlbuf_td.diagnostics.episode_stats import running

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
WINDOW = 20  # episodes


def make_policy(env: EnvBase, device: torch.device, cells: int = 256) -> tuple[TensorDictSequential, EGreedyModule]:
    """Return a greedy policy, and an epsilon-greedy exploration module with decaying epsilon."""
    spec = env.action_spec
    if not hasattr(spec.space, "n"):
        raise UsageError("DQN needs an environment with discrete actions")
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


def whole_batches(steps: int, frames: int) -> int:
    """Return the number of steps, rounded up to whole batches of the collector."""
    return -(-steps // frames) * frames


class Run:
    """Shows the progress of a training run, records its episodes, and evaluates and saves the final policy."""

    def __init__(self, make_env: Callable[[], EnvBase], out: Path, seed: int, steps: int, threshold: float) -> None:
        self.make_env, self.out, self.seed, self.threshold = make_env, out, seed, threshold
        self.steps, self.most_steps = 0, steps
        self.final = float("nan")  # mean return of the final policy over 10 new episodes without exploration
        self.episodes: list[tuple[int, float]] = []  # (environment steps, return)
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[shown]}")
        self._bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
        self._task, self._began = self._bar.add_task("", total=steps, shown=""), time.perf_counter()
        self._bar.start()

    def count(self, data: TensorDictBase) -> None:
        """Count the steps ``[*E, T]`` and the episodes that ended, each at the step at which it ended."""
        lanes = data.shape[:-1].numel()
        ended, returns = (data["next", key].squeeze(-1).movedim(-1, 0) for key in ("done", "episode_reward"))
        steps = self.steps + (1 + ended.nonzero()[:, 0]) * lanes
        self.episodes += zip(steps.tolist(), returns[ended].tolist(), strict=True)
        self.steps += data.numel()
        words = f"mean return of {WINDOW} episodes: {self.recent:.0f}"
        self._bar.update(self._task, completed=self.steps, shown=words, refresh=True)

    @property
    def recent(self) -> float:
        last = [total for _, total in self.episodes[-WINDOW:]]
        return sum(last) / len(last) if last else float("nan")

    @property
    def is_solved(self) -> bool:
        return len(self.episodes) >= WINDOW and self.recent >= self.threshold

    @property
    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """The steps at which episodes ended, and the mean return of the last episodes at each."""
        steps, returns = np.array(self.episodes or [(0, np.nan)]).T
        return steps, running(returns, WINDOW)[0]

    @torch.no_grad()
    def finish(self, policy: TensorDictModuleBase, title: str) -> None:
        """Evaluate and save the policy, and draw the learning curve."""
        self._bar.stop()
        env, episodes = self.make_env(), 10
        env.set_seed(10_000 + self.seed)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            rollouts = [env.rollout(10_000, policy, auto_cast_to_device=True) for _ in range(episodes)]
        self.final = sum(float(rollout["next", "reward"].sum()) for rollout in rollouts) / episodes
        torch.save(policy.state_dict(), self.out / "policy.pt")
        figure = Figure(figsize=(6.0, 3.4), layout="constrained")
        axes = figure.subplots()
        if self.episodes:
            axes.plot(*np.array(self.episodes).T, ".", markersize=3, color="0.75", label="training episode")
            axes.plot(*self.curve, color="C0", linewidth=2, label=f"mean of the last {WINDOW}")
        axes.set(title=title, ylabel="return")
        save_curves(figure, self.threshold, self.out / "learning_curve.png")

    def tell(self, following: str) -> None:
        if self.is_solved and self.steps < self.most_steps:
            print(f"solved, stopped early: {self.steps:,} of at most {self.most_steps:,} steps")
        print(f"mean return of the last {WINDOW} training episodes: {self.recent:.1f}, after {self.steps:,} steps")
        print(f"mean return of the final policy over 10 new episodes, no exploration: {self.final:.1f}")
        print(f"{time.perf_counter() - self._began:,.0f} s")
        print(f"learning curve: {self.out / 'learning_curve.png'}")
        print(f"policy: {self.out / 'policy.pt'}")
        print(f"next: {following}")


def save_curves(figure: Figure, threshold: float, path: Path) -> None:
    (axes,) = figure.axes
    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    if threshold < float("inf"):
        axes.axhline(threshold, color="0.4", linestyle="--", linewidth=1, label="solved")
    figure.legend(frameon=False, loc="outside lower center", ncols=4)  # no curve can cross it there
    figure.savefig(path, dpi=150)


def prepare(options: argparse.Namespace, name: str) -> Path:
    """Refuse options that cannot work, limit torch to one thread, and return a folder for the results."""
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).partition("\n")[0].partition(". ")[0]
        raise UsageError(f"--device {options.device}: torch cannot use this device here: {first}") from None
    try:
        gymnasium.make(options.env).close()
    except (gymnasium.error.Error, ImportError) as error:
        raise UsageError(f"--env {options.env}: {error}") from None
    out: Path = options.out or Path("runs", f"{name}-seed{options.seed}")
    try:  # before the work that would otherwise be lost
        out.mkdir(parents=True, exist_ok=True)
        (out / "policy.pt").touch()
    except OSError as error:
        raise UsageError(f"--out: cannot write to {out}: {error.strerror}") from None
    torch.set_num_threads(1)  # the networks are too small for more
    return out


def main(options: argparse.Namespace) -> int:
    steps, sampler = options.steps or STEPS, options.sampler
    if steps < WARM_UP:
        raise UsageError(f"--steps must be at least {WARM_UP}: learning begins after {WARM_UP} steps")
    out = prepare(options, f"dqn-{options.env}-{sampler}")
    run = train(options.env, sampler, steps, options.seed, torch.device(options.device), out)
    run.tell("try --sampler uniform")
    return 0
