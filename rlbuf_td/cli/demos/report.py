"""What the demos share beside learning: progress, evaluation, a picture of the learning curve."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import gymnasium
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type
from tqdm import tqdm

from rlbuf_td.cli import UsageError, refuse_missing_device

T = TypeVar("T")


class Clock:
    """The time of a run, and the part of it that the buffer takes."""

    def __init__(self) -> None:
        self._start, self._in_buffer = time.perf_counter(), 0.0

    @contextmanager
    def in_buffer(self) -> Iterator[None]:
        """Count the time inside the ``with`` block as spent in the buffer."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._in_buffer += time.perf_counter() - begin

    def batches(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate over ``items``, and count the time until each arrives as spent in the buffer."""
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
    """A training run: its progress bar, its scores, and the best policy so far.

    Args:
        make_env: makes an environment to evaluate in.
        out: folder of the policy and the picture.
        seed: of the evaluations.
        steps: environment steps at most, for the bar.
        threshold: mean return from which on the environment counts as solved.
    """

    def __init__(self, make_env: Callable[[], EnvBase], out: Path, seed: int, steps: int, threshold: float) -> None:
        super().__init__()
        self.make_env, self.out, self.seed, self.threshold = make_env, out, seed, threshold
        self.steps = 0
        self.final = float("nan")  # mean return of the best policy, over episodes that did not choose it
        self.episodes: list[tuple[int, float]] = []  # (environment steps, return)
        self.evaluations: list[tuple[int, float]] = []
        self._bar = tqdm(total=steps, unit=" steps")

    def count(self, data: TensorDictBase, **shown: str) -> None:
        """Count collected steps and the episodes that ended among them, and show both."""
        self.steps += data.numel()
        ended = data["next", "done"].squeeze(-1)
        self.episodes += [(self.steps, float(total)) for total in data["next", "episode_reward"][ended]]
        last = [total for _, total in self.episodes[-20:]] or [float("nan")]
        self._bar.update(data.numel())
        self._bar.set_postfix({"return": f"{sum(last) / len(last):.0f}", **shown, "in buffer": f"{self.share:.1%}"})

    @torch.no_grad()
    def evaluate(self, policy: TensorDictModuleBase, seed: int, episodes: int = 10) -> float:
        """Return the mean return of the policy over whole episodes without exploration."""
        env = self.make_env()
        env.set_seed(seed)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            rollouts = [env.rollout(10_000, policy, auto_cast_to_device=True) for _ in range(episodes)]
        return sum(float(rollout["next", "reward"].sum()) for rollout in rollouts) / episodes

    def is_solved_by(self, policy: TensorDictModuleBase) -> bool:
        """Evaluate the policy, save it if none was better, and return whether it has passed twice."""
        mean = self.evaluate(policy, seed=1_000 + self.seed)
        if mean >= max((score for _, score in self.evaluations), default=mean):
            torch.save(policy.state_dict(), self.out / "policy.pt")
        self.evaluations.append((self.steps, mean))
        return mean >= self.threshold and self.evaluate(policy, seed=5_000 + self.seed) >= self.threshold

    def finish(self, policy: TensorDictModuleBase, title: str) -> None:
        self._bar.close()
        if not self.evaluations:
            self.is_solved_by(policy)
        policy.load_state_dict(torch.load(self.out / "policy.pt", weights_only=True))
        self.final = self.evaluate(policy, seed=10_000 + self.seed)
        save_learning_curve(self.out / "learning_curve.png", title, self.episodes, self.evaluations)


def tell(run: Run, following: str) -> None:
    print(f"mean return of the best policy over 10 new episodes: {run.final:.1f}")
    print(f"learning curve: {run.out / 'learning_curve.png'}, policy: {run.out / 'policy.pt'}")
    print(f"next: {following}")


def prepare(options: argparse.Namespace, name: str) -> Path:
    """Make the folder of a run and return it; let torch use one thread, as more would wait for each other.

    Raises:
        UsageError: there is no such device or environment, or the folder cannot be made.
    """
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
    torch.set_num_threads(1)
    return out


def running_mean(episodes: Sequence[tuple[int, float]], window: int = 20) -> list[tuple[int, float]]:
    """Return ``(step, mean of the last `window` values)`` for each ``(step, value)``.

    Example:
        >>> running_mean([(10, 1.0), (20, 3.0), (30, 5.0)], window=2)
        [(10, 1.0), (20, 2.0), (30, 4.0)]
    """
    recent = (episodes[max(0, end - window) : end] for end in range(1, len(episodes) + 1))
    return [(some[-1][0], sum(value for _, value in some) / len(some)) for some in recent]


def save_learning_curve(
    path: Path, title: str, episodes: Sequence[tuple[int, float]], evaluations: Sequence[tuple[int, float]]
) -> None:
    """Draw the return of every training episode, their running mean over 20, and the evaluations."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if episodes:
        axes.plot(*zip(*episodes, strict=True), ".", markersize=3, color="0.75", label="training episode")
        axes.plot(*zip(*running_mean(episodes), strict=True), color="C0", linewidth=2, label="mean of the last 20")
    axes.plot(*zip(*evaluations, strict=True), "s", markersize=6, color="C1", label="evaluation, no exploration")
    axes.set(title=title, xlabel="environment steps", ylabel="return")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
