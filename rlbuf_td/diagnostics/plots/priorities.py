"""Priorities and what follows from them as a picture."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torchrl.data.replay_buffers import Sampler

from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.diagnostics.health import priorities, probabilities, unwrapped
from rlbuf_td.diagnostics.plots.figure import ACCENT, GUIDE, INK, SHADE, dress, numbers_of, panels, title


def plot_priorities(rb: ReplayBuffer) -> Figure:
    """Draw the magnitudes of the TD errors of all rows, and how probable a draw makes each.

    Args:
        rb: a buffer with a prioritized sampler, wrapped or not.

    Returns:
        A figure of two panels: a histogram, and the probabilities from the likeliest row on.

    Raises:
        TypeError: the buffer's sampler knows no priorities.
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
