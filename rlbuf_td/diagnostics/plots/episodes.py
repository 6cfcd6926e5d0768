"""Plots of episodes, of a rollout with its advantages, and of one trajectory in a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tensordict.utils import NestedKey
from torchrl.data.replay_buffers import ReplayBuffer

from rlbuf_td.diagnostics.episode_stats import EpisodeStats
from rlbuf_td.diagnostics.plots import figure as style
from rlbuf_td.functional import explained_variance
from rlbuf_td.storages.indexing import coordinates, device_of, flat_rows, lanes_of, refuse_unwritten
from rlbuf_td.storages.schema import walk
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from rlbuf_td.writers import RolloutWriter


def plot_episodes(stats: EpisodeStats) -> Figure:
    """Plot the metrics of recorded episodes, and how often each reason ended an episode, over environment steps.

    A dot is an episode, the line is the mean of the last ``stats.window`` episodes, and the band shows their standard
    deviation.

    Args:
        stats: statistics of episodes, such as ``rb.episode_stats``.

    Returns:
        A figure with a panel per metric, and a panel for end reasons. Returns and lengths share a panel if they are
        equal.

    Raises:
        RuntimeError: no episode has ended.

    Cost: O(episodes in the history).

    Example:
        >>> from rlbuf_td import EpisodeStats
        >>> from tensordict import TensorDict
        >>> stats = EpisodeStats()
        >>> done = torch.arange(1, 31) % 10 == 0
        >>> stats.update(TensorDict({"next": {"reward": torch.randn(30), "done": done}}, [30]))
        >>> plot_episodes(stats).get_suptitle()
        '3 episodes (line: mean of the last 100, band: deviation)'
    """
    history = {name: style.numbers_of(column) for name, column in stats.history().items()}
    if not len(history["step"]):
        raise RuntimeError("there is nothing to plot: no episode has ended")
    metrics, words = ["return", "length", *stats.metrics[2:]], {"length": "length, steps"}
    if np.array_equal(history["return"], history["length"]):  # a reward of 1 per step: one panel shows both
        metrics.remove("length")
        words["return"] = "return =\nlength in steps"
    figure, axes = style.panels(len(metrics) + 1, 1, 1.15, sharex=True)
    for name, each in zip(metrics, axes, strict=False):
        mean, deviation = running(history[name], stats.window)
        each.plot(history["step"], history[name], ".", color="0.6", markersize=2, zorder=1)
        band = mean - deviation, mean + deviation
        each.fill_between(history["step"], *band, color=style.SHADE, alpha=0.6, linewidth=0)
        each.plot(history["step"], mean, color=style.INK, linewidth=1.3)
        style.dress(each, "", "", words.get(name, name))
    for line, name in zip(style.LINES, stats.reasons, strict=False):
        rate, _ = running(history[f"done_{name}"].astype(float), stats.window)
        axes[-1].plot(history["step"], rate, label=name, **line)
    axes[-1].set_ylim(-0.04, 1.04)
    style.in_percent(axes[-1])
    style.dress(axes[-1], "", "environment steps", "share of\nepisodes")
    axes[-1].legend(loc="best", borderaxespad=0.2, **style.LEGEND)
    axes[-1].xaxis.set_major_locator(MaxNLocator(5))
    figure.suptitle(f"{stats.episodes:,} episodes (line: mean of the last {stats.window}, band: deviation)")
    return figure


def running(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the running mean and the running standard deviation over ``window`` values, ``[n]`` each."""
    shift = values.mean()  # for accuracy: the deviation is a difference of squares
    total, squares = (np.concatenate([[0.0], np.cumsum(x)]) for x in (values - shift, (values - shift) ** 2))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    mean = (total[end] - total[start]) / (end - start)
    deviation = np.sqrt(np.maximum(0, (squares[end] - squares[start]) / (end - start) - mean**2))
    return mean + shift, deviation


def plot_advantages(rollout: ReplayBuffer) -> Figure:
    """Plot a rollout: values and value targets of the first lane, all advantages, and values against targets.

    Args:
        rollout: a :class:`~rlbuf_td.RolloutBuffer` whose written steps all have advantages.

    Returns:
        A figure with three panels.

    Raises:
        RuntimeError: a step has no advantage, or ``rollout`` is not a rollout buffer.

    Cost: O(rows of the rollout).

    Example:
        >>> from rlbuf_td import RolloutBuffer
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
    style.dress(right, f"explained variance {round(explained, 2) + 0.0:.2f}", "value", "value target")
    return figure


def plot_trajectory(rb: ReplayBuffer, row: Any, *, keys: Sequence[NestedKey] | None = None) -> Figure:
    """Plot the stored part of the trajectory that a row belongs to, and mark the row.

    Args:
        rb: a buffer whose rows have ``("next", "done")`` or trajectory ids.
        row: the number of a row, or its time step and lane, ``(t, e)``.
        keys: the keys to plot; default: the reward, the action, and the first observation key with at most 64 numbers
            per row.

    Returns:
        A figure with one panel per key. The time axis counts steps from the given row.

    Raises:
        IndexError: the storage has no such row.
        KeyError: a key is not stored, or the rows have neither end flags nor trajectory ids.

    Cost: O(rows of the trajectory).

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(100))
        >>> outcome = {"reward": torch.randn(20), "done": torch.arange(20) == 14}
        >>> _ = rb.extend(TensorDict({"observation": torch.randn(20, 3), "next": outcome}, [20]))
        >>> plot_trajectory(rb, 4).get_suptitle()
        'row 4: trajectory of 15 steps, finished'
    """
    storage = rb.storage
    lanes = lanes_of(storage).numel()
    index = torch.as_tensor([row], device="cpu")
    index = index.unbind(-1) if isinstance(row, Sequence) else index
    flat = int(flat_rows(index, storage, device_of(storage)))
    if not 0 <= flat < len(storage):
        raise IndexError(f"there is no row {row}: {len(storage)} rows are stored")
    at = torch.tensor([flat], device=device_of(storage))
    refuse_unwritten(at, storage)
    back, ahead, ended = (int(x) for x in TrajectoryIndex.of(storage).reach(at))
    steps, capacity = np.arange(-back, ahead + 1), storage.max_size // lanes
    cells = (flat // lanes + torch.arange(-back, ahead + 1, device="cpu")) % capacity * lanes + flat % lanes
    data = rb.storage.get(coordinates(cells.to(at.device), storage))
    chosen = _default_keys(data) if keys is None else list(keys)
    figure, axes = style.panels(len(chosen), 1, 1.15, sharex=True)
    for key, each in zip(chosen, axes, strict=True):
        values = data.get(key, None)
        if values is None:
            raise KeyError(f"no {key!r} in the rows")
        components = style.numbers_of(values.reshape(len(steps), -1).float())
        _draw_components(each, steps, components)
        each.axvline(0, color=style.ACCENT, linestyle=":", linewidth=1.2)
        shown = f"\n({len(style.LINES)} of {components.shape[1]})" if components.shape[1] > len(style.LINES) else ""
        style.dress(each, "", "", (key if isinstance(key, str) else ".".join(key)) + shown)
    axes[-1].set_xlabel("time steps from the row (dotted)", fontsize=style.SMALL)
    axes[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    where = f"row {flat:,}" if lanes == 1 else f"row {flat:,} (step {flat // lanes:,}, lane {flat % lanes})"
    figure.suptitle(f"{where}: trajectory of {len(steps)} steps, {'finished' if ended else 'goes on'}")
    return figure


def _draw_components(axes: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    if values.shape[1] > 1 and np.isin(values, (0, 1)).all() and (values.sum(1) == 1).all():
        values = values.argmax(1)[:, None]  # one-hot
    whole = np.array_equal(values, values.round())
    for place, (column, line) in enumerate(zip(values.T, style.LINES, strict=False)):
        look = {**line, "linestyle": "", "marker": ".", "markersize": 2.5} if whole else line
        axes.plot(steps, column, label=f"{place}", **look)
    if values.shape[1] > 1:
        axes.legend(ncols=len(style.LINES), loc="lower left", bbox_to_anchor=(-0.02, 0.95), **style.LEGEND)
    if whole:
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.margins(y=0.12)
    if np.ptp(values) == 0:
        axes.set_ylim(values[0, 0] - 1, values[0, 0] + 1)


def _default_keys(data: Any) -> list[NestedKey]:
    found: list[NestedKey] = [key for key in (("next", "reward"), "action") if data.get(key, None) is not None]
    for key, x in walk(data):
        is_small = isinstance(x, torch.Tensor) and x.dtype.is_floating_point and x[0].numel() <= 64
        if is_small and key[0] not in ("next", "action") and "observation" in key:
            return [*found, key]
    return found
