"""Plots of episodes, and of a rollout with its advantages."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torchrl.data.replay_buffers import ReplayBuffer

from rlbuf_td.diagnostics.episode_stats import EpisodeStats
from rlbuf_td.diagnostics.plots import figure as style
from rlbuf_td.functional import explained_variance
from rlbuf_td.writers import RolloutWriter


def plot_episodes(stats: EpisodeStats) -> Figure:
    """Plot each metric of the recorded episodes over the steps, and how episodes ended.

    A dot is an episode; the line is the mean of the last ``stats.window`` episodes, the band their deviation.

    Args:
        stats: statistics of episodes, such as ``rb.episode_stats``.

    Returns:
        A figure with a panel per metric, and one for the share of each way to end.

    Raises:
        RuntimeError: no episode has ended.

    Cost: O(episodes in the history).

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
    history = {name: style.numbers_of(column) for name, column in stats.history().items()}
    if not len(history["step"]):
        raise RuntimeError("there is nothing to draw: no episode has ended")
    metrics, words = ["return", "length", *stats.metrics[2:]], {"length": "length, steps"}
    if np.array_equal(history["return"], history["length"]):  # a reward of 1 per step: one panel shows both
        metrics.remove("length")
        words["return"] = "return = length, steps"
    figure, axes = style.panels(len(metrics) + 1, 1, 1.15, sharex=True)
    for name, each in zip(metrics, axes, strict=False):
        mean, deviation = _running(history[name], stats.window)
        each.plot(history["step"], history[name], ".", color="0.6", markersize=2, zorder=1)
        band = mean - deviation, mean + deviation
        each.fill_between(history["step"], *band, color=style.SHADE, alpha=0.6, linewidth=0)
        each.plot(history["step"], mean, color=style.INK, linewidth=1.3)
        style.dress(each, "", "", words.get(name, name))
    for line, name in zip(style.LINES, stats.reasons, strict=False):
        rate, _ = _running(history[f"done_{name}"].astype(float), stats.window)
        axes[-1].plot(history["step"], rate, label=name, **line)
    axes[-1].set_ylim(-0.04, 1.04)
    style.in_percent(axes[-1])
    style.dress(axes[-1], "", "environment steps", "ended so")
    axes[-1].legend(loc="best", borderaxespad=0.2, **style.LEGEND)
    axes[-1].xaxis.set_major_locator(MaxNLocator(5))
    style.title(figure, f"{stats.episodes:,} episodes (line: mean of the last {stats.window}, band: deviation)")
    return figure


def _running(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and population deviation of the last ``window`` values at each value."""
    shift = values.mean()  # for accuracy: the deviation is a difference of squares
    total, squares = (np.concatenate([[0.0], np.cumsum(x)]) for x in (values - shift, (values - shift) ** 2))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    mean = (total[end] - total[start]) / (end - start)
    deviation = np.sqrt(np.maximum(0, (squares[end] - squares[start]) / (end - start) - mean**2))
    return mean + shift, deviation


def plot_advantages(rollout: ReplayBuffer) -> Figure:
    """Plot a rollout: values, targets and ends of one lane, the advantages, and values against their targets.

    Args:
        rollout: a :class:`~rlbuf_td.RolloutBuffer` whose rollout is complete.

    Returns:
        A figure with three panels.

    Raises:
        RuntimeError: the rollout is not complete.

    Cost: O(rows of the rollout).

    Example:
        >>> import torch
        >>> from rlbuf_td import RolloutBuffer
        >>> from rlbuf_td.diagnostics.plots import plot_advantages
        >>> from tensordict import TensorDict
        >>> rollout, done = RolloutBuffer(30, 2), (torch.arange(30) % 10 == 9).expand(2, 30).unsqueeze(-1)
        >>> step = {"reward": torch.ones(2, 30, 1), "done": done, "terminated": done}
        >>> _ = rollout.extend(TensorDict({"state_value": torch.randn(2, 30, 1), "next": step}, [2, 30]))
        >>> len(plot_advantages(rollout).axes)
        3
    """
    writer = rollout.writer
    if not isinstance(writer, RolloutWriter) or not writer.is_estimated:
        raise RuntimeError("the rollout is not complete: it has no advantages to plot")
    data = rollout.storage.get(slice(None))
    keys = writer.value_key, writer.value_target_key, writer.advantage_key
    value, target, advantage = (data.get(key).float().reshape(len(data), -1) for key in keys)
    explained = float(explained_variance(value, target))
    value, target, advantage = map(style.numbers_of, (value, target, advantage))
    figure = style.empty_figure(3.1)
    top, left, right = figure.subplot_mosaic("AA;BC").values()
    top.plot(target[:, 0], color=style.INK, linewidth=1.1, label="value target")
    top.plot(value[:, 0], color=style.ACCENT, linewidth=1.1, linestyle="--", label="value")
    done = data.get(writer.estimator.done_key, None)
    for end in [] if done is None else np.flatnonzero(style.numbers_of(done.reshape(len(data), -1))[:, 0]):
        top.axvline(end + 0.5, color=style.SHADE, linewidth=0.8, zorder=0)
    top.legend(ncols=2, loc="lower left", bbox_to_anchor=(-0.02, 0.97), **style.LEGEND)
    style.dress(top, "", "time step of the first lane (grey: an episode ends)", "return")
    left.hist(advantage.ravel(), 30, **style.BARS)
    left.axvline(0, color=style.GUIDE, linestyle="--", linewidth=0.9)
    style.dress(left, f"mean {advantage.mean():.2g}, deviation {advantage.std():.2g}", "advantage", "steps")
    low, high = min(value.min(), target.min()), max(value.max(), target.max())
    style.guide(right, [low, high], [low, high])
    some = np.linspace(0, value.size - 1, min(value.size, 1_000)).astype(int)
    right.plot(value.flat[some], target.flat[some], ".", color=style.INK, markersize=2, alpha=0.35, markeredgewidth=0)
    style.dress(right, f"explained variance {explained:.2f}", "value", "value target")
    return figure
