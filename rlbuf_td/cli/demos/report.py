"""What the demos share beside learning: a stopwatch, an evaluation, a picture."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tensordict import TensorDictBase
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


def total_reward(episode: TensorDictBase) -> float:
    """Return the return of an episode, undiscounted."""
    return float(episode["next", "reward"].sum())


@torch.no_grad()
def evaluate(
    env: EnvBase,
    policy: TensorDictModuleBase,
    episodes: int,
    max_steps: int = 10_000,
    score: Callable[[TensorDictBase], float] = total_reward,
) -> list[float]:
    """Return the scores, by default the returns, of whole episodes of the policy without exploration."""
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        return [score(env.rollout(max_steps, policy, auto_cast_to_device=True)) for _ in range(episodes)]


@dataclass
class Run:
    """What a training run has shown so far."""

    make_env: Callable[[], EnvBase]
    out: Path
    seed: int
    threshold: float  # the mean score from which on the environment counts as solved
    score: Callable[[TensorDictBase], float] = total_reward  # of an episode
    best: float = float("-inf")
    final: float = float("nan")  # the best policy on episodes that did not choose it
    episodes: list[tuple[int, float]] = field(default_factory=list)  # (environment steps, score)
    evaluations: list[tuple[int, float]] = field(default_factory=list)

    def evaluate(self, policy: TensorDictModuleBase, seed: int, episodes: int = 10) -> float:
        """Return the mean score of the policy over some episodes without exploration."""
        env = self.make_env()
        env.set_seed(seed)
        scores = evaluate(env, policy, episodes, score=self.score)
        return sum(scores) / len(scores)

    def is_solved_by(self, policy: TensorDictModuleBase, step: int) -> bool:
        """Evaluate the policy, save it if none was better, and return whether it has passed twice."""
        mean = self.evaluate(policy, seed=1_000 + self.seed)
        self.evaluations.append((step, mean))
        if mean >= self.best:
            self.best = mean
            torch.save(policy.state_dict(), self.out / "policy.pt")
        return mean >= self.threshold and self.evaluate(policy, seed=5_000 + self.seed) >= self.threshold

    def test(self, policy: TensorDictModuleBase, step: int, episodes: int = 10) -> None:
        """Evaluate the best policy on new episodes."""
        if not self.evaluations:
            self.is_solved_by(policy, step)
        policy.load_state_dict(torch.load(self.out / "policy.pt", weights_only=True))
        self.final = self.evaluate(policy, seed=10_000 + self.seed, episodes=episodes)

    def finish(self, policy: TensorDictModuleBase, step: int, title: str) -> None:
        """Evaluate the best policy on new episodes, and draw the learning curve."""
        self.test(policy, step)
        save_learning_curve(self.out / "learning_curve.png", title, self.episodes, self.evaluations)

    def recent(self) -> float:
        """Return the mean score of the last 20 training episodes."""
        last = [value for _, value in self.episodes[-20:]]
        return sum(last) / len(last) if last else float("nan")


def train_each(out: Path, arms: Mapping[str, Callable[[Path], Run]], tell: str) -> dict[str, Run]:
    """Train several agents, each in a folder of its own in ``out``, and tell how the best policy of each does."""
    runs = {}
    for label, train in arms.items():
        folder, clock = out / label.replace(" ", "-"), Stopwatch()
        folder.mkdir(parents=True, exist_ok=True)
        runs[label] = train(folder)
        print(f"{label}: {tell.format(runs[label].final)} ({clock.elapsed:.0f} s)")
    return runs


def running_mean(episodes: Sequence[tuple[int, float]], window: int = 20) -> list[tuple[int, float]]:
    """Return ``(step, mean of the last so many values)`` for each ``(step, value)``.

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
    with picture(path, title, "return") as axes:
        if episodes:
            axes.plot(*zip(*episodes, strict=True), ".", markersize=3, color="0.75", label="training episode")
            means = running_mean(episodes)
            axes.plot(*zip(*means, strict=True), color="C0", linewidth=2, label="mean of the last 20")
        if evaluations:
            axes.plot(
                *zip(*evaluations, strict=True), "s", markersize=6, color="C1", label="evaluation, no exploration"
            )


def save_comparison(path: Path, title: str, score: str, runs: Mapping[str, Run]) -> None:
    """Draw the evaluations of several runs and, thinner, the running means of their training episodes."""
    looks = (("C0", "-", "s"), ("C1", "--", "o"), ("C2", ":", "^"))  # told apart in grey, too
    with picture(path, title, score) as axes:
        for (label, run), (color, line, marker) in zip(runs.items(), looks, strict=False):
            if run.episodes:
                means = running_mean(run.episodes)
                axes.plot(*zip(*means, strict=True), line, color=color, alpha=0.5, linewidth=1)
            steps, scores = zip(*run.evaluations, strict=True)
            axes.plot(steps, scores, line, marker=marker, color=color, linewidth=2, markersize=5, label=label)
        axes.plot([], [], color="0.5", linewidth=1, label="thin: mean of the last 20\nepisodes of training")


@contextmanager
def picture(path: Path, title: str, score: str) -> Iterator[Any]:
    """Save what is drawn on the axes inside the ``with`` block: a score over environment steps."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    yield axes
    axes.set(title=title, xlabel="environment steps", ylabel=score)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
