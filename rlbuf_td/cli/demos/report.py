"""Progress, evaluation and learning curves of the demos."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import gymnasium
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type
from tqdm import tqdm

from rlbuf_td.cli import UsageError, refuse_missing_device
from rlbuf_td.diagnostics.plots.episodes import running

T = TypeVar("T")
WINDOW = 20  # episodes


class Clock:
    """Measures the time of a run, and the share of the time spent in the buffer."""

    def __init__(self) -> None:
        self._start, self._in_buffer = time.perf_counter(), 0.0

    @contextmanager
    def in_buffer(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._in_buffer += time.perf_counter() - begin

    def batches(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; count the time to get each item as time in the buffer."""
        iterator = iter(items)
        while True:
            with self.in_buffer():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @property
    def share(self) -> float:
        return self._in_buffer / self.seconds


class Run(Clock):
    """Shows the progress of a training run, records its episodes, and evaluates and saves the final policy."""

    def __init__(self, make_env: Callable[[], EnvBase], out: Path, seed: int, steps: int, threshold: float) -> None:
        super().__init__()
        self.make_env, self.out, self.seed, self.threshold = make_env, out, seed, threshold
        self.steps = 0
        self.final = float("nan")  # mean return of the final policy over 10 new episodes without exploration
        self.episodes: list[tuple[int, float]] = []  # (environment steps, return)
        self._bar = tqdm(total=steps, unit=" steps")

    def count(self, data: TensorDictBase, **shown: str) -> None:
        self.steps += data.numel()
        ended = data["next", "done"].squeeze(-1)
        self.episodes += [(self.steps, float(total)) for total in data["next", "episode_reward"][ended]]
        self._bar.update(data.numel())
        self._bar.set_postfix({"return": f"{self.recent:.0f}", **shown, "in buffer": f"{self.share:.1%}"})

    @property
    def recent(self) -> float:
        last = [total for _, total in self.episodes[-WINDOW:]]
        return sum(last) / len(last) if last else float("nan")

    @property
    def is_solved(self) -> bool:
        return len(self.episodes) >= WINDOW and self.recent >= self.threshold

    @torch.no_grad()
    def evaluate(self, policy: TensorDictModuleBase, episodes: int = 10) -> float:
        env = self.make_env()
        env.set_seed(10_000 + self.seed)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            rollouts = [env.rollout(10_000, policy, auto_cast_to_device=True) for _ in range(episodes)]
        return sum(float(rollout["next", "reward"].sum()) for rollout in rollouts) / episodes

    def finish(self, policy: TensorDictModuleBase, title: str) -> None:
        self._bar.close()
        self.final = self.evaluate(policy)
        torch.save(policy.state_dict(), self.out / "policy.pt")
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        if self.episodes:
            steps, returns = np.array(self.episodes).T
            axes.plot(steps, returns, ".", markersize=3, color="0.75", label="training episode")
            axes.plot(steps, running(returns, WINDOW)[0], color="C0", linewidth=2, label=f"mean of the last {WINDOW}")
        if self.threshold < float("inf"):
            axes.axhline(self.threshold, color="0.4", linestyle="--", linewidth=1, label="solved")
        axes.set(title=title, xlabel="environment steps", ylabel="return")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(self.out / "learning_curve.png", dpi=150)


def tell(run: Run, following: str) -> None:
    print(f"mean return of the last 20 training episodes: {run.recent:.1f}, after {run.steps:,} steps")
    print(f"mean return of the final policy over 10 new episodes, without exploration: {run.final:.1f}")
    print(f"learning curve: {run.out / 'learning_curve.png'}, policy: {run.out / 'policy.pt'}")
    print(f"next: {following}")


def prepare(options: argparse.Namespace, name: str) -> Path:
    """Check the device and the environment, limit torch to one thread, and return a folder for the results."""
    refuse_missing_device(options.device)
    try:
        gymnasium.make(options.env).close()
    except (gymnasium.error.Error, ImportError) as error:
        raise UsageError(f"--env {options.env}: {error}") from None
    out = options.out or Path("runs") / f"{name}-seed{options.seed}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}") from None
    torch.set_num_threads(1)  # the networks are too small for more
    return out
