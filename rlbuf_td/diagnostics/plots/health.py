"""Plots of a buffer's health and of its priorities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torchrl.data.replay_buffers import ReplayBuffer

from rlbuf_td.diagnostics.health import ReplayCount, ages, health, priorities, probabilities, unwrapped
from rlbuf_td.diagnostics.plots import figure as style
from rlbuf_td.storages.indexing import attached, lanes_of
from rlbuf_td.storages.lane_heads import row_count, written_rows


def plot_health(rb: ReplayBuffer) -> Figure:
    """Plot the ages and weights of the last batch, and the probabilities and draw counts of all rows.

    A panel without data is omitted: ages need a writer that keeps the time order, weights need a prioritized sampler,
    and draw counts need ``count_replays=True``.

    Args:
        rb: a buffer that has been sampled.

    Returns:
        A figure with one to four panels.

    Raises:
        RuntimeError: no batch has been sampled, or no panel has data.
        TypeError: ``rb`` is a :class:`~rlbuf_td.ReplayBufferMixture`; plot one of its members.

    Cost: O(N log N).

    Example:
        >>> import torch
        >>> from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(100), sampler=ProportionalSampler(100), batch_size=32)
        >>> _, _ = rb.extend(TensorDict({"x": torch.zeros(90)}, [90])), rb.sample()
        >>> len(plot_health(rb).axes)  # ages, weights, mass
        3
    """
    if hasattr(rb, "members"):
        raise TypeError("a mixture has no plot of its own: plot a member, mixture['name']")
    last, storage = getattr(rb, "last_draw", None), rb.storage
    if last is None:
        raise RuntimeError("there is no health to plot before the first batch: sample one")
    replays = attached(storage, ReplayCount)
    report, weight = health(storage, rb.sampler, rb.writer, last, replays), last.weight
    age, probability = ages(storage, rb.writer, last), probabilities(storage, rb.sampler)
    draws = list[Callable[[Axes], None]]()
    if age is not None:
        steps = len(storage) // lanes_of(storage).numel()
        draws.append(lambda axes: _draw_ages(axes, style.numbers_of(age), steps))
    if weight is not None:
        draws.append(lambda axes: _draw_weights(axes, style.numbers_of(weight), report["effective_share"]))
    if probability is not None:
        draws.append(lambda axes: _draw_mass(axes, style.numbers_of(probability), report["top_mass"]))
    if replays is not None:
        counts = style.numbers_of(replays.counts()[written_rows(storage)])
        draws.append(lambda axes: _draw_replays(axes, counts, report["never_sampled"]))
    if not draws:
        raise RuntimeError("there is no health to plot: the writer keeps no time order, the sampler no priorities")
    figure, axes = style.panels(-(-len(draws) // 2), min(2, len(draws)), 1.6)
    for draw, each in zip([*draws, Axes.remove], axes, strict=False):
        draw(each)
    figure.suptitle(f"{row_count(storage):,} of {storage.max_size:,} rows ({report['fill']:.0%} full)")
    return figure


def _draw_ages(axes: Axes, age: np.ndarray, steps: int) -> None:
    bins = np.linspace(0, steps, min(20, steps) + 1).tolist()
    axes.hist(age, bins, **style.BARS)
    style.guide(axes, [0, steps], [len(age) / (len(bins) - 1)] * 2)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    style.dress(axes, "age of the last batch\n(dashed: uniform)", "time steps since written", "rows")


def _draw_weights(axes: Axes, weight: np.ndarray, share: float) -> None:
    axes.hist(weight, 20, range=(0, float(weight.max())), **style.BARS)
    style.dress(axes, f"weights of the last batch\n(effective size: {share:.0%})", "importance weight", "rows")


def _some_ranks(rows: int) -> np.ndarray:
    """Return up to 200 ranks from 0 to ``rows - 1``, evenly spaced on a logarithmic scale."""
    return np.unique(np.geomspace(1, rows, 200).astype(int)) - 1


def _draw_mass(axes: Axes, probability: np.ndarray, top: float) -> None:
    some = _some_ranks(len(probability))
    mass = (np.cumsum(np.sort(probability)[::-1]) / probability.sum())[some]
    share = (some + 1) / len(probability)
    axes.plot(share, mass, color=style.INK, linewidth=1.2)
    style.guide(axes, share, share)
    axes.plot([0.01], [top], "o", color=style.ACCENT, markersize=3.5)
    arrow = {"arrowstyle": "-", "linewidth": 0.6, "color": style.ACCENT}
    place: dict[str, Any] = {"xytext": (0.05, 0.86), "textcoords": "axes fraction", "arrowprops": arrow}
    axes.annotate(f"top 1%: {top:.0%}", (0.01, top), fontsize=style.SMALL - 0.5, **place)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g}%"))
    style.in_percent(axes)
    style.dress(axes, "concentration of draws\n(dashed: uniform)", "most probable rows", "share of draws")


def _draw_replays(axes: Axes, counts: np.ndarray, never: float) -> None:
    doublings = np.bincount(np.frexp(counts)[1])  # 0, 1, 2 to 3, 4 to 7, ...
    axes.bar(range(len(doublings)), doublings / len(counts), width=1, **style.BARS)
    edges = ["0", "1", *(f"{2**k:,}+" for k in range(1, len(doublings) - 1))]
    every = -(-len(edges) // 4)
    axes.set_xticks(range(len(edges))[::every], edges[::every])
    style.in_percent(axes)
    style.dress(axes, f"draws of the stored rows\n(never: {never:.1%})", "times drawn", "rows")


def plot_priorities(rb: ReplayBuffer) -> Figure:
    """Plot the absolute TD errors and the probabilities of all rows.

    Args:
        rb: a buffer whose sampler is prioritized, or wraps a prioritized sampler.

    Returns:
        A figure with two panels: a histogram of absolute TD errors, and the probabilities in descending order.

    Raises:
        TypeError: the buffer's sampler has no priorities.
        RuntimeError: the buffer is empty.

    Cost: O(N log N).

    Example:
        >>> import torch
        >>> from rlbuf_td import PackedStorage, RankSampler, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(100), sampler=RankSampler(100))
        >>> index = rb.extend(TensorDict({"x": torch.zeros(90)}, [90]))
        >>> rb.update_priority(index, torch.rand(90))
        >>> plot_priorities(rb).get_suptitle()
        'RankSampler, alpha = 0.7, beta = 0.5'
    """
    if not len(rb):
        raise RuntimeError("there are no priorities to plot: the buffer is empty")
    storage, sampler = rb.storage, unwrapped(rb.sampler)
    magnitude, probability = priorities(storage, sampler), probabilities(storage, sampler)
    if magnitude is None or probability is None:
        raise TypeError(f"a {type(rb.sampler).__name__} keeps no priorities: use ProportionalSampler or RankSampler")
    figure, (left, right) = style.panels(1, 2, 1.7)
    _draw_magnitudes(left, style.numbers_of(magnitude))
    _draw_law(right, style.numbers_of(probability))
    figure.suptitle(f"{type(sampler).__name__}, alpha = {sampler.alpha:g}, beta = {sampler.beta:g}")
    return figure


def _draw_magnitudes(axes: Axes, magnitude: np.ndarray) -> None:
    positive = magnitude[magnitude > 0]
    if len(positive):
        low, high = positive.min(), positive.max()
        bins = np.geomspace(low, high, 31).tolist() if high > low else [low / 2, low * 2]
        axes.hist(positive, bins, weights=np.full(len(positive), 1 / len(magnitude)), **style.BARS)
        axes.axvline(float(np.median(magnitude)), color=style.ACCENT, linewidth=1.0)
        axes.set_xscale("log")
    zeros = 1 - len(positive) / len(magnitude)
    words = f"line: median {np.median(magnitude):.2g}" + (f"; zero: {zeros:.1%}" if zeros else "")
    style.in_percent(axes)
    style.dress(axes, f"TD errors\n({words})", "magnitude", "rows")


def _draw_law(axes: Axes, probability: np.ndarray) -> None:
    some = _some_ranks(len(probability))
    ratio = (np.sort(probability)[::-1] / probability.mean())[some]
    axes.plot(some + 1, ratio, color=style.INK, linewidth=1.2)
    style.guide(axes, some[[0, -1]] + 1, [1, 1])
    axes.set(xscale="log", yscale="log")
    if ratio.max() < 1.5 and ratio.min() > 0.67:
        axes.set_ylim(0.1, 10)
    style.dress(axes, "probability of a draw\n(dashed: uniform)", "rank of the row", "times uniform")
