"""Plots of buffers, episodes and rollouts, as matplotlib figures.

Each function returns a figure that is 3.4 inches wide, like a column of a paper.
Jupyter shows the figure as the result of a cell; elsewhere, call ``figure.savefig``.
``pip install 'rlbuf_td[demo]'`` installs matplotlib. All plots share the style in
``plots.mplstyle``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers import ReplayBuffer

from rlbuf_td.diagnostics.episode_stats import EpisodeStats, running
from rlbuf_td.diagnostics.health import ages, health, priorities, probabilities
from rlbuf_td.functional import explained_variance
from rlbuf_td.storages.indexing import coordinates, flat_rows, lanes_of, row_count
from rlbuf_td.storages.keys import as_tuple, nested_key
from rlbuf_td.storages.schema import walk
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from rlbuf_td.writers import RolloutWriter

__all__ = ["plot_advantages", "plot_episodes", "plot_health", "plot_trajectory"]

WIDTH = 3.4  # inches
STYLE = Path(__file__).with_name("plots.mplstyle")
_ACCENT, _SHADE = "#c8500a", "0.78"
_GUIDE: dict[str, Any] = {"color": "0.45", "linestyle": "--", "linewidth": 0.9}
_MOST_LINES = 6  # that the style tells apart
_DOTS: dict[str, Any] = {"linestyle": "", "marker": ".", "markersize": 2.5}


class _Picture(Figure):
    """A figure that Jupyter shows without pyplot."""

    def draw(self, renderer: RendererBase) -> None:
        with rc_context(fname=STYLE):  # ticks are made when they are first drawn
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        png = BytesIO()
        self.savefig(png, format="png")
        return png.getvalue()


def _panels(
    rows: int, columns: int, height: float, *, sharex: bool = False
) -> tuple[_Picture, list[Axes]]:
    """Return a figure and its panels, row by row; ``height`` is the height of a row in
    inches."""
    figure = _Picture(figsize=(WIDTH, rows * height + 0.35))
    return figure, list(
        figure.subplots(rows, columns, squeeze=False, sharex=sharex).flat
    )


def _count(axis: Axis, most: int = 4) -> None:
    """Give an axis of rows, steps or episodes whole numbers, at most ``most`` + 1."""
    axis.set_major_locator(MaxNLocator(most, integer=True))


def _percent(share: float) -> str:
    """Return a share in percent with three digits, as far as they are not 0."""
    return f"{100 * share:.3g}%"


def _in_percent(axis: Axis) -> None:
    """Label an axis of shares in percent: each tick with the share where it stands."""
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))


def _numbers_of(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()


@rc_context(fname=STYLE)
def plot_episodes(stats: EpisodeStats) -> Figure:
    """Plot the metrics of recorded episodes, and how often each reason ended an
    episode, over environment steps.

    A dot is an episode, the line is the mean of the last ``stats.window`` episodes, and
    the band shows their standard deviation, within the range of all episodes.

    Args:
        stats: statistics of episodes, such as ``rb.episode_stats``.

    Returns:
        A figure with a panel per metric (one for returns and lengths that are equal),
        and a panel for end reasons.

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
    history = {name: _numbers_of(column) for name, column in stats.history().items()}
    if not len(history["step"]):
        raise RuntimeError("there is nothing to plot: no episode has ended")
    metrics = ["return", "length", *stats.metrics[2:]]
    words = {"length": "length, steps"}
    # a reward of 1 per step: one panel shows both
    if np.array_equal(history["return"], history["length"]):
        metrics.remove("length")
        words["return"] = "return =\nlength in steps"
    figure, axes = _panels(len(metrics) + 1, 1, 1.15, sharex=True)
    for name, panel in zip(metrics, axes, strict=False):
        mean, deviation = running(history[name], stats.window)
        panel.plot(history["step"], history[name], color="0.6", zorder=1, **_DOTS)
        lowest, highest = history[name].min(), history[name].max()
        below = np.maximum(mean - deviation, lowest)
        above = np.minimum(mean + deviation, highest)
        panel.fill_between(
            history["step"], below, above, color=_SHADE, alpha=0.6, linewidth=0
        )
        panel.plot(history["step"], mean, color="0.1")
        panel.set_ylabel(words.get(name, name))
        if name == "length" or words.get(name, "").endswith("steps"):
            _count(panel.yaxis)
    for name in stats.reasons[:_MOST_LINES]:
        rate, _ = running(history[f"done_{name}"].astype(float), stats.window)
        axes[-1].plot(history["step"], rate, label=name)
    axes[-1].set(
        ylim=(-0.04, 1.04), xlabel="environment steps", ylabel="share of\nepisodes"
    )
    _in_percent(axes[-1].yaxis)
    axes[-1].legend(loc="best")
    _count(axes[-1].xaxis, 5)
    figure.suptitle(
        f"{stats.episodes:,} episodes (line: mean of the last {stats.window}, band: deviation)"
    )
    return figure


@rc_context(fname=STYLE)
def plot_advantages(rollout: ReplayBuffer) -> Figure:
    """Plot a rollout: values and value targets of the first lane, all advantages, and
    values against targets.

    Args:
        rollout: a complete :class:`~rlbuf_td.RolloutBuffer`, or an incomplete one with
            ``partial=True``.

    Returns:
        A figure with three panels.

    Raises:
        RuntimeError: the rollout is not complete, or ``rollout`` is not a rollout
            buffer.

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
    if not isinstance(writer, RolloutWriter) or not writer.is_readable:
        raise RuntimeError("the rollout is not complete: it has no advantages to plot")
    data = rollout.storage.get(slice(None))
    keys = writer.value_key, writer.value_target_key, writer.advantage_key
    value, target, advantage = (
        data.get(key).float().reshape(len(data), -1) for key in keys
    )
    explained = float(explained_variance(value, target))
    value, target, advantage = map(_numbers_of, (value, target, advantage))
    figure = _Picture(figsize=(WIDTH, 3.1))
    top, left, right = figure.subplot_mosaic("AA;BC").values()
    top.plot(target[:, 0], label="value target")
    top.plot(value[:, 0], label="value")
    done = data.get(writer.estimator.done_key, None)
    if done is not None:
        done_of_first = _numbers_of(done.reshape(len(data), -1))[:, 0]
        for end in np.flatnonzero(done_of_first):
            top.axvline(end + 0.5, color=_SHADE, linewidth=0.8, linestyle="-", zorder=0)
    top.legend(ncols=2, loc="lower left", bbox_to_anchor=(-0.02, 0.97))
    _count(top.xaxis, 6)
    top.set(
        xlabel="time step of the first lane (grey: an episode ends)", ylabel="return"
    )
    left.hist(advantage.ravel(), 30, color=_SHADE)
    left.axvline(0, **_GUIDE)
    _count(left.yaxis)
    left.set_title(f"mean {advantage.mean():.2g}, deviation {advantage.std():.2g}")
    left.set(xlabel="advantage", ylabel="steps")
    low = min(value.min(), target.min())
    high = max(value.max(), target.max())
    right.plot([low, high], [low, high], **_GUIDE)
    some = np.linspace(0, value.size - 1, min(value.size, 1_000)).astype(int)
    right.plot(
        value.flat[some],
        target.flat[some],
        color="0.1",
        alpha=0.35,
        markeredgewidth=0,
        **_DOTS,
    )
    right.set_title(f"explained variance {round(explained, 2) + 0.0:.2f}")
    right.set(xlabel="value", ylabel="value target")
    return figure


@rc_context(fname=STYLE)
def plot_trajectory(
    rb: ReplayBuffer,
    row: int | tuple[int, ...],
    *,
    keys: Sequence[NestedKey] | None = None,
) -> Figure:
    """Plot the stored part of the trajectory that a row belongs to, and mark the row.

    Args:
        rb: a buffer whose rows have ``("next", "done")`` or trajectory ids.
        row: the number of a row, or its time step and lane, ``(t, e)``.
        keys: the keys to plot; default: the reward, the action, and the first
            observation key with at most 64 numbers per row.

    Returns:
        A figure with one panel per key. The time axis counts steps from the given row.

    Raises:
        TypeError: the storage is no :class:`PackedStorage`.
        IndexError: the storage has no such row.
        KeyError: a key is not stored, or the rows have neither end flags nor trajectory
            ids.

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
    index = torch.as_tensor([row], device="cpu")
    back, ahead, ended = map(int, TrajectoryIndex(storage).reach(index))
    flat = int(flat_rows(index, storage, storage.device))
    lanes = lanes_of(storage).numel()
    steps = np.arange(-back, ahead + 1)
    cells = (flat + lanes * torch.from_numpy(steps)) % storage.max_size
    data = storage.get(coordinates(cells.to(storage.device), storage))
    chosen = _default_keys(data) if keys is None else [*map(nested_key, keys)]
    figure, axes = _panels(len(chosen), 1, 1.15, sharex=True)
    for key, panel in zip(chosen, axes, strict=True):
        values = data.get(key, None)
        if values is None:
            raise KeyError(f"no {key!r} in the rows")
        components = _numbers_of(values.reshape(len(steps), -1).float())
        _draw_components(panel, steps, components)
        panel.axvline(0, color=_ACCENT, linestyle=":", linewidth=1.2)
        shown = (
            f"\n({_MOST_LINES} of {components.shape[1]})"
            if components.shape[1] > _MOST_LINES
            else ""
        )
        panel.set_ylabel(".".join(as_tuple(key)) + shown)
    axes[-1].set_xlabel("time steps from the row (dotted)")
    _count(axes[-1].xaxis, 6)
    where = (
        f"row {flat:,}"
        if lanes == 1
        else f"row {flat:,} (step {flat // lanes:,}, lane {flat % lanes})"
    )
    figure.suptitle(
        f"{where}: trajectory of {len(steps)} steps, {'finished' if ended else 'goes on'}"
    )
    return figure


def _draw_components(axes: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    """Draw each column of ``values``, ``[steps, n]``; one-hot columns as one line."""
    if (
        values.shape[1] > 1
        and np.isin(values, (0, 1)).all()
        and (values.sum(1) == 1).all()
    ):
        values = values.argmax(1)[:, None]  # one-hot
    whole = np.array_equal(values, values.round())
    for number, column in enumerate(values.T[:_MOST_LINES]):
        axes.plot(steps, column, label=f"{number}", **_DOTS if whole else {})
    if values.shape[1] > 1:
        axes.legend(ncols=_MOST_LINES, loc="lower left", bbox_to_anchor=(-0.02, 0.95))
    if whole:
        _count(axes.yaxis)
    axes.margins(y=0.12)
    if np.ptp(values) == 0:
        axes.set_ylim(values[0, 0] - 1, values[0, 0] + 1)


def _default_keys(data: TensorDictBase) -> list[NestedKey]:
    """Return the reward, the action, and the first small observation of the data."""
    keys: list[NestedKey] = [
        key for key in (("next", "reward"), "action") if data.get(key, None) is not None
    ]
    for key, x in walk(data):
        is_small = (
            isinstance(x, torch.Tensor)
            and x.dtype.is_floating_point
            and x[0].numel() <= 64
        )
        if is_small and key[0] not in ("next", "action") and "observation" in key:
            return [*keys, key]
    return keys


@rc_context(fname=STYLE)
def plot_health(rb: ReplayBuffer) -> Figure:
    """Plot the ages and weights of the last batch, and the TD errors and probabilities
    of all rows.

    Args:
        rb: a buffer with rows.

    Returns:
        A figure with one to four panels: ages and weights need a batch, ages a writer
        that keeps the time order, and weights and TD errors a prioritized sampler.

    Raises:
        RuntimeError: no panel has data.
        TypeError: ``rb`` is a :class:`~rlbuf_td.ReplayBufferMixture`; plot one of its
            members.

    Cost: O(N log N).

    Example:
        >>> import torch
        >>> from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(100), sampler=ProportionalSampler(100), batch_size=32)
        >>> index = rb.extend(TensorDict({"x": torch.zeros(90)}, [90]))
        >>> rb.update_priority(index, torch.rand(90))
        >>> _ = rb.sample()
        >>> len(plot_health(rb).axes)
        4
    """
    if hasattr(rb, "members"):
        raise TypeError(
            "a mixture has no plot of its own: plot a member, mixture['name']"
        )
    last = getattr(rb, "last_draw", None)
    storage = rb.storage
    sampler = rb.sampler
    report = health(storage, sampler, rb.writer, last)
    draws: list[Callable[[Axes], None]] = []
    if last is not None:
        age = ages(storage, rb.writer, last)
        if age is not None:
            steps = len(storage) // lanes_of(storage).numel()
            draws.append(partial(_draw_ages, age=_numbers_of(age), steps=steps))
        if last.weight is not None:
            weight = _numbers_of(last.weight)
            share = report["effective_share"]
            draws.append(partial(_draw_weights, weight=weight, share=share))
    magnitude = priorities(storage, sampler)
    if magnitude is not None and len(magnitude):
        draws.append(partial(_draw_magnitudes, magnitude=_numbers_of(magnitude)))
    probability = probabilities(storage, sampler) if "top_mass" in report else None
    if probability is not None:
        numbers = _numbers_of(probability)
        top = report["top_mass"]
        draws.append(partial(_draw_mass, probability=numbers, top=top))
    if not draws:
        raise RuntimeError(
            "there is no health to plot: no rows, or no batch, and the sampler has no priorities"
        )
    figure, axes = _panels(-(-len(draws) // 2), min(2, len(draws)), 1.6)
    for draw, panel in zip([*draws, Axes.remove], axes, strict=False):
        draw(panel)
    figure.suptitle(
        f"{row_count(storage):,} of {storage.max_size:,} rows ({_percent(report['fill'])} full)"
    )
    return figure


def _draw_ages(axes: Axes, age: np.ndarray, steps: int) -> None:
    """Draw a histogram of the ages of the last batch, and the uniform law."""
    bins = np.linspace(0, steps, min(20, steps) + 1).tolist()
    axes.hist(age, bins, color=_SHADE)
    axes.axhline(len(age) / (len(bins) - 1), **_GUIDE)
    _count(axes.xaxis)
    _count(axes.yaxis)
    axes.set(
        title="age of the last batch\n(dashed: uniform)",
        xlabel="time steps since written",
        ylabel="rows",
    )


def _draw_weights(axes: Axes, weight: np.ndarray, share: float) -> None:
    axes.hist(weight, 20, range=(0, float(weight.max())), color=_SHADE)
    axes.set_title(f"weights of the last batch\n(effective size: {_percent(share)})")
    _count(axes.yaxis)
    axes.set(xlabel="importance weight", ylabel="rows")


def _draw_mass(axes: Axes, probability: np.ndarray, top: float) -> None:
    """Draw the share of draws that the most probable rows get; ``top`` is that of the
    first percent."""
    # evenly spaced on a logarithmic scale
    some = np.unique(np.geomspace(1, len(probability), 200).astype(int)) - 1
    mass = (np.cumsum(np.sort(probability)[::-1]) / probability.sum())[some]
    share = (some + 1) / len(probability)
    axes.plot(share, mass)
    axes.plot(share, share, **_GUIDE)
    axes.plot([0.01], [top], "o", color=_ACCENT, markersize=3.5)
    axes.annotate(
        f"top 1%: {_percent(top)}",
        (0.01, top),
        xytext=(0.05, 0.86),
        textcoords="axes fraction",
        arrowprops={"arrowstyle": "-", "linewidth": 0.6, "color": _ACCENT},
    )
    axes.set_xscale("log")
    _in_percent(axes.xaxis)
    _in_percent(axes.yaxis)
    axes.set(
        title="concentration of draws\n(dashed: uniform)",
        xlabel="most probable rows",
        ylabel="share of draws",
    )


def _draw_magnitudes(axes: Axes, magnitude: np.ndarray) -> None:
    """Draw a histogram of the TD errors above 0 on a logarithmic scale, and their
    median."""
    positive = magnitude[magnitude > 0]
    if len(positive):
        low = positive.min()
        high = positive.max()
        bins = (
            np.geomspace(low, high, 31).tolist() if high > low else [low / 2, low * 2]
        )
        axes.hist(
            positive,
            bins,
            weights=np.full(len(positive), 1 / len(magnitude)),
            color=_SHADE,
        )
        axes.axvline(float(np.median(magnitude)), color=_ACCENT, linestyle="-")
        axes.set_xscale("log")
    zeros = 1 - len(positive) / len(magnitude)
    words = f"line: median {np.median(magnitude):.2g}" + (
        f"; zero: {_percent(zeros)}" if zeros else ""
    )
    _in_percent(axes.yaxis)
    axes.set(title=f"TD errors\n({words})", xlabel="magnitude", ylabel="rows")
