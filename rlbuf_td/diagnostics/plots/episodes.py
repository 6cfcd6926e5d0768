"""Episodes as a picture."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rlbuf_td.diagnostics.episode_stats import EpisodeStats
from rlbuf_td.diagnostics.plots.figure import INK, LINES, SHADE, SMALL, dress, numbers_of, panels, title


def plot_episodes(stats: EpisodeStats) -> Figure:
    """Draw every metric of the episodes that are kept over the steps counted, and how episodes ended.

    A dot is an episode; the line is the mean of the last ``stats.window``, with its deviation as a band.

    Args:
        stats: what has counted episodes: ``rb.episode_stats``, say.

    Returns:
        A figure of a panel a metric, and one for the share of each way to end.

    Raises:
        RuntimeError: no episode has ended.

    Cost: O(episodes that are kept).

    Example:
        >>> import torch
        >>> from rlbuf_td import EpisodeStats
        >>> from rlbuf_td.diagnostics.plots import plot_episodes
        >>> from tensordict import TensorDict
        >>> stats = EpisodeStats()
        >>> done = torch.arange(1, 31) % 10 == 0
        >>> stats.update(TensorDict({"next": {"reward": torch.randn(30), "done": done}}, [30]))
        >>> plot_episodes(stats).get_suptitle()
        '3 episodes (line: mean of the last 100, band: deviation)'
    """
    history = {name: numbers_of(column) for name, column in stats.history().items()}
    if not len(history["step"]):
        raise RuntimeError("there is nothing to draw: no episode has ended")
    metrics = ["return", "length", *stats.metrics[2:]]
    if np.array_equal(history["return"], history["length"]):  # a reward of 1 a step: one picture says both
        metrics.remove("length")
    figure, axes = panels(len(metrics) + 1, 1, 1.15, sharex=True)
    for name, each in zip(metrics, axes, strict=False):
        mean, deviation = _running(history[name], stats.window)
        each.plot(history["step"], history[name], ".", color="0.6", markersize=2, zorder=1)
        each.fill_between(history["step"], mean - deviation, mean + deviation, color=SHADE, alpha=0.6, linewidth=0)
        each.plot(history["step"], mean, color=INK, linewidth=1.3)
        words = "return = length, steps" if len(metrics) < len(stats.metrics) and name == "return" else _unit(name)
        dress(each, "", "", words)
    for line, name in zip(LINES, stats.reasons, strict=False):
        rate, _ = _running(history[f"done_{name}"].astype(float), stats.window)
        axes[-1].plot(history["step"], rate, label=name, **line)
    axes[-1].set_ylim(-0.04, 1.04)
    axes[-1].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    dress(axes[-1], "", "environment steps", "ended so")
    axes[-1].legend(fontsize=SMALL - 0.5, frameon=False, loc="best", borderaxespad=0.2)
    axes[-1].xaxis.set_major_locator(MaxNLocator(5))
    title(figure, f"{stats.episodes:,} episodes (line: mean of the last {stats.window}, band: deviation)")
    return figure


def _running(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and population deviation of the last ``window`` values at each place."""
    shift = values.mean()  # for accuracy: the deviation is a difference of squares
    total, squares = (np.concatenate([[0.0], np.cumsum(x)]) for x in (values - shift, (values - shift) ** 2))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    mean = (total[end] - total[start]) / (end - start)
    deviation = np.sqrt(np.maximum(0, (squares[end] - squares[start]) / (end - start) - mean**2))
    return mean + shift, deviation


def _unit(name: str) -> str:
    return "length, steps" if name == "length" else name
