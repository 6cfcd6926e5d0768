"""What the demos share beside learning: a stopwatch, an evaluation, a picture."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type


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


def save_learning_curve(
    path: Path, title: str, episodes: Sequence[tuple[int, float]], evaluations: Sequence[tuple[int, float]]
) -> None:
    """Draw the return of every training episode, their running mean over 20, and the evaluations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
