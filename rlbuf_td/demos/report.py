"""What the demos share beside learning: a stopwatch, an evaluation, a picture."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

T = TypeVar("T")


class Stopwatch:
    """Add up the time spent in named parts of a run.

    Example:
        >>> clock = Stopwatch()
        >>> with clock("sleep"):
        ...     time.sleep(0.01)
        >>> 0.0 < clock.share("sleep") <= 1.0
        True
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count the time inside the ``with`` block as ``part``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spent[part] += time.perf_counter() - begin

    def each(self, part: str, items: Iterable[T]) -> Iterator[T]:
        """Iterate over ``items``, and count the time that they take to come as ``part``."""
        iterator, end = iter(items), object()
        while True:
            with self(part):
                item = next(iterator, end)
            if item is end:
                return
            yield cast("T", item)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    def share(self, part: str) -> float:
        """Return the share of all time since the start that was spent in ``part``, 0 to 1."""
        return self.spent[part] / self.elapsed


@torch.no_grad()
def evaluate(env: EnvBase, policy: TensorDictModuleBase, episodes: int, max_steps: int = 10_000) -> list[float]:
    """Return the returns of whole episodes of the policy without exploration."""
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        rollouts = (env.rollout(max_steps, policy, auto_cast_to_device=True) for _ in range(episodes))
        return [float(rollout["next", "reward"].sum()) for rollout in rollouts]


@dataclass
class Run:
    """What a training run has shown so far."""

    make_env: Callable[[], EnvBase]
    out: Path
    seed: int
    threshold: float  # the mean return from which on the environment counts as solved
    best: float = float("-inf")
    final: float = float("nan")  # the best policy on episodes that did not choose it
    episodes: list[tuple[int, float]] = field(default_factory=list)  # (environment steps, return)
    evaluations: list[tuple[int, float]] = field(default_factory=list)

    def evaluate(self, policy: TensorDictModuleBase, seed: int) -> float:
        """Return the mean return of the policy over ten episodes without exploration."""
        env = self.make_env()
        env.set_seed(seed)
        returns = evaluate(env, policy, episodes=10)
        return sum(returns) / len(returns)

    def is_solved_by(self, policy: TensorDictModuleBase, step: int) -> bool:
        """Evaluate the policy, save it if it is the best so far, and return whether it has passed twice."""
        mean = self.evaluate(policy, seed=1_000 + self.seed)
        self.evaluations.append((step, mean))
        if mean > self.best:
            self.best = mean
            torch.save(policy.state_dict(), self.out / "policy.pt")
        return mean >= self.threshold and self.evaluate(policy, seed=5_000 + self.seed) >= self.threshold

    def finish(self, policy: TensorDictModuleBase, step: int, title: str) -> None:
        """Evaluate the best policy on new episodes, and draw the learning curve."""
        if not self.evaluations:
            self.is_solved_by(policy, step)
        policy.load_state_dict(torch.load(self.out / "policy.pt", weights_only=True))
        self.final = self.evaluate(policy, seed=10_000 + self.seed)
        save_learning_curve(self.out / "learning_curve.png", title, self.episodes, self.evaluations)

    def recent(self) -> float:
        """Return the mean return of the last 20 training episodes."""
        last = [value for _, value in self.episodes[-20:]]
        return sum(last) / len(last) if last else float("nan")


def save_learning_curve(
    path: Path, title: str, episodes: Sequence[tuple[int, float]], evaluations: Sequence[tuple[int, float]]
) -> None:
    """Draw the return of every training episode, their running mean over 20, and the evaluations."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if episodes:
        steps, returns = zip(*episodes, strict=True)
        means = [sum(window) / len(window) for window in (returns[max(0, i - 19) : i + 1] for i in range(len(returns)))]
        axes.plot(steps, returns, ".", markersize=3, color="0.75", label="training episode")
        axes.plot(steps, means, color="C0", linewidth=2, label="mean of the last 20")
    if evaluations:
        axes.plot(*zip(*evaluations, strict=True), "s", markersize=6, color="C1", label="evaluation, no exploration")
    axes.set(title=title, xlabel="environment steps", ylabel="return")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
