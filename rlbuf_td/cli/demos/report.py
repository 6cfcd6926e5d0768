"""Progress, evaluation and learning curves of the demos."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from rlbuf_td.cli import UsageError
from rlbuf_td.diagnostics.episode_stats import running

WINDOW = 20  # episodes


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

    def count(self, data: TensorDictBase, **shown: str) -> None:
        """Count the steps ``[*E, T]`` and the episodes that ended, each at the step at which it ended."""
        lanes = data.shape[:-1].numel()
        ended, returns = (data["next", key].squeeze(-1).movedim(-1, 0) for key in ("done", "episode_reward"))
        steps = self.steps + (1 + ended.nonzero()[:, 0]) * lanes
        self.episodes += zip(steps.tolist(), returns[ended].tolist(), strict=True)
        self.steps += data.numel()
        words = {f"mean return of {WINDOW} episodes": f"{self.recent:.0f}", **shown}
        texts = ", ".join(f"{name}: {value}" for name, value in words.items())
        self._bar.update(self._task, completed=self.steps, shown=texts, refresh=True)

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
