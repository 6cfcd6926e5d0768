"""The state of a buffer as a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.diagnostics.health import ages, probabilities
from rlbuf_td.diagnostics.plots.figure import ACCENT, GUIDE, INK, SHADE, SMALL, dress, numbers_of, panels, title
from rlbuf_td.storages.indexing import lanes_of

_LEADER: dict[str, Any] = {
    "fontsize": SMALL - 0.5,
    "arrowprops": {"arrowstyle": "-", "linewidth": 0.6, "color": ACCENT},
}


def plot_health(rb: ReplayBuffer) -> Figure:
    """Draw what :meth:`ReplayBuffer.health` measures: the last batch's ages and weights, the rows' mass and replays.

    Panels for what the buffer does not have are left out: weights and mass without priorities, replay counts without
    ``count_replays=True``.

    Args:
        rb: a buffer that has been sampled.

    Returns:
        A figure of one to four panels.

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
    health, last = rb.health(), rb._last_draw
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
    if rb._replays is not None:
        counts = numbers_of(rb._replays.counts()[: len(storage)])
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
