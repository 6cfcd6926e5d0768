"""Plots of the state of a buffer: its health, and its priorities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from torchrl.data.replay_buffers import ReplayBuffer, Sampler, Storage, Writer

from rlbuf_td.diagnostics.health import LastDraw, ReplayCount, ages, priorities, probabilities, unwrapped
from rlbuf_td.diagnostics.plots.figure import ACCENT, GUIDE, INK, SHADE, SMALL, dress, numbers_of, panels, title
from rlbuf_td.storages.indexing import lanes_of

_LEADER: dict[str, Any] = {
    "fontsize": SMALL - 0.5,
    "arrowprops": {"arrowstyle": "-", "linewidth": 0.6, "color": ACCENT},
}


class HealthyBuffer(Protocol):
    """What :func:`plot_health` needs of a :class:`~rlbuf_td.ReplayBuffer`."""

    last_draw: LastDraw | None

    @property
    def storage(self) -> Storage:
        """The rows."""

    @property
    def sampler(self) -> Sampler:
        """The sampler."""

    @property
    def writer(self) -> Writer:
        """The writer."""

    def health(self) -> dict[str, float]:
        """Return the numbers of :mod:`rlbuf_td.diagnostics.health`."""


def plot_health(rb: HealthyBuffer) -> Figure:
    """Plot what :meth:`ReplayBuffer.health` measures: ages and weights of the last batch, probabilities and draws.

    A panel is left out if the buffer has no numbers for it: weights and probabilities without priorities, draws without
    ``count_replays=True``.

    Args:
        rb: a buffer that has been sampled.

    Returns:
        A figure with one to four panels.

    Raises:
        RuntimeError: nothing has been sampled yet.

    Cost: O(N log N) with priorities or counts.

    Example:
        >>> import torch
        >>> from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer
        >>> from rlbuf_td.diagnostics.plots import plot_health
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(100), sampler=ProportionalSampler(100), batch_size=32)
        >>> _, _ = rb.extend(TensorDict({"x": torch.zeros(90)}, [90])), rb.sample()
        >>> len(plot_health(rb).axes)  # ages, weights, mass
        3
    """
    health, last = rb.health(), rb.last_draw
    if last is None:
        raise RuntimeError("there is no health to draw before the first batch: sample one")
    storage, draws = rb.storage, list[Callable[[Axes], None]]()
    age = ages(storage, rb.writer, last)
    if age is not None:
        draws.append(lambda axes: _draw_ages(axes, numbers_of(age), len(storage) // lanes_of(storage).numel()))
    law = probabilities(storage, rb.sampler)
    if last[1] is not None:
        weight = numbers_of(last[1])
        draws.append(lambda axes: _draw_weights(axes, weight, health["effective_share"]))
    if law is not None:
        draws.append(lambda axes: _draw_mass(axes, numbers_of(law), health["top_mass"]))
    replays = ReplayCount.attached_to(storage)
    if replays is not None:
        counts = numbers_of(replays.counts()[: len(storage)])
        draws.append(lambda axes: _draw_replays(axes, counts, health["never_sampled"]))
    figure, axes = panels(-(-len(draws) // 2), min(2, len(draws)), 1.6)
    for draw, each in zip(draws, axes, strict=False):
        draw(each)
    for each in axes[len(draws) :]:
        each.remove()
    title(figure, f"{len(storage):,} of {storage.max_size:,} rows ({health['fill']:.0%} full)")
    return figure


def _draw_ages(axes: Axes, age: np.ndarray, steps: int) -> None:
    bins = np.linspace(0, steps, min(20, steps) + 1).tolist()
    axes.hist(age, bins, color=SHADE, edgecolor=INK, linewidth=0.5)
    axes.axhline(len(age) / (len(bins) - 1), color=GUIDE, linestyle="--", linewidth=0.9)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    dress(axes, "age of the last batch\n(dashed: uniform)", "time steps since written", "rows")


def _draw_weights(axes: Axes, weight: np.ndarray, share: float) -> None:
    axes.hist(weight, 20, range=(0, float(weight.max())), color=SHADE, edgecolor=INK, linewidth=0.5)
    dress(axes, f"weights of the last batch\n(worth {share:.0%} of its size)", "importance weight", "rows")


def _draw_mass(axes: Axes, law: np.ndarray, top: float) -> None:
    mass = np.cumsum(np.sort(law)[::-1]) / law.sum()
    share = np.arange(1, len(law) + 1) / len(law)
    some = np.unique(np.geomspace(1, len(law), 200).astype(int)) - 1
    axes.plot(share[some], mass[some], color=INK, linewidth=1.2)
    axes.plot(share[some], share[some], color=GUIDE, linestyle="--", linewidth=0.9)
    axes.plot([0.01], [top], "o", color=ACCENT, markersize=3.5)
    axes.annotate(f"top 1%: {top:.0%}", (0.01, top), (0.05, 0.86), textcoords="axes fraction", **_LEADER)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g}%"))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    dress(axes, "who gets the draws\n(dashed: uniform)", "most probable rows", "share of draws")


def _draw_replays(axes: Axes, counts: np.ndarray, never: float) -> None:
    doublings = np.bincount(np.frexp(counts)[1])  # 0, 1, 2 to 3, 4 to 7, ...
    axes.bar(range(len(doublings)), doublings / len(counts), width=1, color=SHADE, edgecolor=INK, linewidth=0.5)
    edges = ["0", "1", *(f"{2**k:,}+" for k in range(1, len(doublings) - 1))]
    every = -(-len(edges) // 4)
    axes.set_xticks(range(len(edges))[::every], edges[::every])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    dress(axes, f"draws of the stored rows\n(never: {never:.1%})", "times drawn", "rows")


def plot_priorities(rb: ReplayBuffer) -> Figure:
    """Plot the magnitudes of the TD errors of all rows, and their probabilities.

    Args:
        rb: a buffer with a prioritized sampler, wrapped or not.

    Returns:
        A figure with two panels: a histogram, and the probabilities, the largest first.

    Raises:
        TypeError: the buffer's sampler has no priorities.
        RuntimeError: the buffer is empty.

    Cost: O(N log N).

    Example:
        >>> import torch
        >>> from rlbuf_td import PackedStorage, RankSampler, ReplayBuffer
        >>> from rlbuf_td.diagnostics.plots import plot_priorities
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(100), sampler=RankSampler(100))
        >>> index = rb.extend(TensorDict({"x": torch.zeros(90)}, [90]))
        >>> rb.update_priority(index, torch.rand(90))
        >>> plot_priorities(rb).get_suptitle()
        'RankSampler, alpha = 0.7, beta = 0.5'
    """
    if not len(rb):
        raise RuntimeError("there are no priorities to draw: the buffer is empty")
    magnitude, law = priorities(rb.storage, rb.sampler), probabilities(rb.storage, rb.sampler)
    if magnitude is None or law is None:
        raise TypeError(
            f"a {type(rb.sampler).__name__} keeps no priorities: use a ProportionalSampler or a RankSampler"
        )
    figure, (left, right) = panels(1, 2, 1.7)
    _draw_magnitudes(left, numbers_of(magnitude))
    _draw_law(right, numbers_of(law))
    title(figure, _sampler_words(rb.sampler))
    return figure


def _draw_magnitudes(axes: Axes, magnitude: np.ndarray) -> None:
    positive = magnitude[magnitude > 0]
    if len(positive):
        low, high = positive.min(), positive.max()
        bins = np.geomspace(low, high, 31).tolist() if high > low else [low / 2, low * 2]
        weights = np.full(len(positive), 1 / len(magnitude))
        axes.hist(positive, bins, weights=weights, color=SHADE, edgecolor=INK, linewidth=0.5)
        axes.axvline(float(np.median(magnitude)), color=ACCENT, linewidth=1.0)
        axes.set_xscale("log")
    zeros = 1 - len(positive) / len(magnitude)
    words = f"line: median {np.median(magnitude):.2g}" + (f"; zero: {zeros:.1%}" if zeros else "")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    dress(axes, f"TD errors\n({words})", "magnitude", "rows")


def _draw_law(axes: Axes, law: np.ndarray) -> None:
    ratio = np.sort(law)[::-1] / law.mean()
    some = np.unique(np.geomspace(1, len(law), 200).astype(int)) - 1
    axes.plot(some + 1, ratio[some], color=INK, linewidth=1.2)
    axes.axhline(1, color=GUIDE, linestyle="--", linewidth=0.9)
    axes.set(xscale="log", yscale="log")
    if ratio[some].max() < 1.5 and ratio[some].min() > 0.67:
        axes.set_ylim(0.1, 10)
    dress(axes, "probability of a draw\n(dashed: uniform)", "rank of the row", "times uniform")


def _sampler_words(sampler: Sampler) -> str:
    sampler = unwrapped(sampler)
    return f"{type(sampler).__name__}, alpha = {sampler.alpha:g}, beta = {sampler.beta:g}"
