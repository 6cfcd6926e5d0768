"""Pictures of buffers, episodes and rollouts, as matplotlib figures.

Each function returns a ``matplotlib.figure.Figure`` as wide as a column of a paper (3.4 in) and shows nothing: in
Jupyter it is shown as what a cell returns, elsewhere call ``figure.savefig``. Lines and shades differ in grey, too.
Pyplot and its global state are not touched. matplotlib comes with ``pip install 'rlbuf_td[demo]'``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from tensordict.utils import NestedKey
from torchrl.data.replay_buffers import Sampler

from rlbuf_td.buffers import ReplayBuffer
from rlbuf_td.health import ages, priorities, probabilities, unwrapped
from rlbuf_td.indices import coordinates, device_of, flat_rows, lanes_of
from rlbuf_td.rollouts import RolloutBuffer
from rlbuf_td.stats import EpisodeStats
from rlbuf_td.trajectories import TrajectoryIndex

WIDTH = 3.4  # inches
INK, ACCENT, SHADE, GUIDE = "0.1", "#c8500a", "0.78", "0.45"  # in grey: black, middle, light, dashed
_SMALL = 7


class Picture(Figure):
    """A figure that Jupyter shows without pyplot."""

    def _repr_png_(self) -> bytes:
        png = BytesIO()
        self.savefig(png, dpi=160, format="png")
        return png.getvalue()


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
        >>> from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer
        >>> from rlbuf_td.plots import plot_health
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(100), sampler=ProportionalSampler(100), batch_size=32)
        >>> _, _ = rb.extend(TensorDict({"x": torch.zeros(90)}, [90])), rb.sample()
        >>> len(plot_health(rb).axes)  # ages, weights, mass
        3
    """
    health, last = rb.health(), rb._last_draw
    if last is None:
        raise RuntimeError("there is no health to draw before the first batch: sample one")
    storage, panels = rb.storage, list[Callable[[Axes], None]]()
    age = ages(storage, rb.writer, last)
    if age is not None:
        panels.append(lambda axes: _draw_ages(axes, _numbers(age), len(storage) // lanes_of(storage).numel()))
    law = probabilities(storage, rb.sampler)
    if last[1] is not None:
        weight = _numbers(last[1])
        panels.append(lambda axes: _draw_weights(axes, weight, health["effective_share"]))
    if law is not None:
        panels.append(lambda axes: _draw_mass(axes, _numbers(law), health["top_mass"]))
    if rb._replays is not None:
        counts = _numbers(rb._replays.counts()[: len(storage)])
        panels.append(lambda axes: _draw_replays(axes, counts, health["never_sampled"]))
    figure, axes = _figure(-(-len(panels) // 2), min(2, len(panels)), 1.6)
    for draw, each in zip(panels, axes, strict=False):
        draw(each)
    for each in axes[len(panels) :]:
        each.remove()
    _title(figure, f"{len(storage):,} of {storage.max_size:,} rows ({health['fill']:.0%} full)")
    return figure


def _draw_ages(axes: Axes, age: np.ndarray, steps: int) -> None:
    bins = np.linspace(0, steps, min(20, steps) + 1).tolist()
    axes.hist(age, bins, color=SHADE, edgecolor=INK, linewidth=0.5)
    axes.axhline(len(age) / (len(bins) - 1), color=GUIDE, linestyle="--", linewidth=0.9)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    _dress(axes, "age of the last batch\n(dashed: uniform)", "time steps since written", "rows")


def _draw_weights(axes: Axes, weight: np.ndarray, share: float) -> None:
    axes.hist(weight, 20, range=(0, float(weight.max())), color=SHADE, edgecolor=INK, linewidth=0.5)
    _dress(axes, f"weights of the last batch\n(worth {share:.0%} of its size)", "importance weight", "rows")


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
    _dress(axes, "who gets the draws\n(dashed: uniform)", "most probable rows", "share of draws")


def _draw_replays(axes: Axes, counts: np.ndarray, never: float) -> None:
    doublings = np.bincount(np.frexp(counts)[1])  # 0, 1, 2 to 3, 4 to 7, ...
    axes.bar(range(len(doublings)), doublings / len(counts), width=1, color=SHADE, edgecolor=INK, linewidth=0.5)
    edges = ["0", "1", *(f"{2**k:,}+" for k in range(1, len(doublings) - 1))]
    every = -(-len(edges) // 4)
    axes.set_xticks(range(len(edges))[::every], edges[::every])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _dress(axes, f"draws of the stored rows\n(never: {never:.1%})", "times drawn", "rows")


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
        >>> from rlbuf_td import PackedStorage, RankSampler, ReplayBuffer
        >>> from rlbuf_td.plots import plot_priorities
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
    figure, (left, right) = _figure(1, 2, 1.7)
    _draw_magnitudes(left, _numbers(magnitude))
    _draw_law(right, _numbers(law))
    _title(figure, _sampler_words(rb.sampler))
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
    _dress(axes, f"TD errors\n({words})", "magnitude", "rows")


def _draw_law(axes: Axes, law: np.ndarray) -> None:
    ratio = np.sort(law)[::-1] / law.mean()
    some = np.unique(np.geomspace(1, len(law), 200).astype(int)) - 1
    axes.plot(some + 1, ratio[some], color=INK, linewidth=1.2)
    axes.axhline(1, color=GUIDE, linestyle="--", linewidth=0.9)
    axes.set(xscale="log", yscale="log")
    if ratio[some].max() < 1.5 and ratio[some].min() > 0.67:
        axes.set_ylim(0.1, 10)
    _dress(axes, "probability of a draw\n(dashed: uniform)", "rank of the row", "times uniform")


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
        >>> from rlbuf_td import EpisodeStats
        >>> from rlbuf_td.plots import plot_episodes
        >>> from tensordict import TensorDict
        >>> stats = EpisodeStats()
        >>> done = torch.arange(1, 31) % 10 == 0
        >>> stats.update(TensorDict({"next": {"reward": torch.randn(30), "done": done}}, [30]))
        >>> plot_episodes(stats).get_suptitle()
        '3 episodes (line: mean of the last 100, band: deviation)'
    """
    history = {name: _numbers(column) for name, column in stats.history().items()}
    if not len(history["step"]):
        raise RuntimeError("there is nothing to draw: no episode has ended")
    metrics = ["return", "length", *stats.metrics[2:]]
    if np.array_equal(history["return"], history["length"]):  # a reward of 1 a step: one picture says both
        metrics.remove("length")
    figure, axes = _figure(len(metrics) + 1, 1, 1.15, sharex=True)
    for name, each in zip(metrics, axes, strict=False):
        mean, deviation = _running(history[name], stats.window)
        each.plot(history["step"], history[name], ".", color="0.6", markersize=2, zorder=1)
        each.fill_between(history["step"], mean - deviation, mean + deviation, color=SHADE, alpha=0.6, linewidth=0)
        each.plot(history["step"], mean, color=INK, linewidth=1.3)
        words = "return = length, steps" if len(metrics) < len(stats.metrics) and name == "return" else _unit(name)
        _dress(each, "", "", words)
    for line, name in zip(_LINES, stats.reasons, strict=False):
        rate, _ = _running(history[f"done_{name}"].astype(float), stats.window)
        axes[-1].plot(history["step"], rate, label=name, **line)
    axes[-1].set_ylim(-0.04, 1.04)
    axes[-1].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _dress(axes[-1], "", "environment steps", "ended so")
    axes[-1].legend(fontsize=_SMALL - 0.5, frameon=False, loc="best", borderaxespad=0.2)
    axes[-1].xaxis.set_major_locator(MaxNLocator(5))
    _title(figure, f"{stats.episodes:,} episodes (line: mean of the last {stats.window}, band: deviation)")
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


def plot_trajectory(rb: ReplayBuffer, row: Any, *, keys: Sequence[NestedKey] | None = None) -> Figure:
    """Draw the trajectory that a row belongs to, as far as it is stored; the row itself is marked.

    Args:
        rb: a buffer over a storage of TensorDicts, with ends (``("next", "done")``) or trajectory numbers.
        row: a flat row, or its coordinates ``(t, e)``.
        keys: what to draw, a panel each; default: reward, action and the first observation of few numbers.

    Raises:
        IndexError: nothing is stored at this row.
        KeyError: no such key, or neither ends nor trajectory numbers are stored.

    Returns:
        A figure of a panel a key, over time steps from the row.

    Cost: O(rows of the trajectory).

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from rlbuf_td.plots import plot_trajectory
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(100))
        >>> outcome = {"reward": torch.randn(20), "done": torch.arange(20) == 14}
        >>> _ = rb.extend(TensorDict({"observation": torch.randn(20, 3), "next": outcome}, [20]))
        >>> plot_trajectory(rb, 4).get_suptitle()
        'row 4: trajectory of 15 steps, finished'
    """
    storage = rb.storage
    lanes = lanes_of(storage).numel()
    index = tuple(torch.as_tensor([part]) for part in row) if isinstance(row, Sequence) else torch.as_tensor([row])
    flat = int(flat_rows(index, storage, device_of(storage)))
    if not 0 <= flat < len(storage):
        raise IndexError(f"there is no row {row}: {len(storage)} rows are stored")
    at = torch.tensor([flat], device=device_of(storage))
    back, ahead, ended = (int(x) for x in TrajectoryIndex.of(storage).reach(at))
    steps, capacity = np.arange(-back, ahead + 1), storage.max_size // lanes
    cells = (flat // lanes + torch.arange(-back, ahead + 1)) % capacity * lanes + flat % lanes
    data = rb.storage.get(coordinates(cells.to(at.device), storage))
    chosen = _default_keys(data) if keys is None else list(keys)
    figure, axes = _figure(len(chosen), 1, 1.15, sharex=True)
    for key, each in zip(chosen, axes, strict=True):
        values = data.get(key, None)
        if values is None:
            raise KeyError(f"no {key!r} in the rows")
        numbers = _numbers(values.reshape(len(steps), -1).float())
        _draw_components(each, steps, numbers)
        each.axvline(0, color=ACCENT, linestyle=":", linewidth=1.2)
        shown = f"\n({len(_LINES)} of {numbers.shape[1]})" if numbers.shape[1] > len(_LINES) else ""
        _dress(each, "", "", _key_words(key) + shown)
    axes[-1].set_xlabel("time steps from the row (dotted)", fontsize=_SMALL)
    axes[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    where = f"row {flat:,}" if lanes == 1 else f"row {flat:,} (step {flat // lanes:,}, lane {flat % lanes})"
    _title(figure, f"{where}: trajectory of {len(steps)} steps, {'finished' if ended else 'goes on'}")
    return figure


def _draw_components(axes: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    if values.shape[1] > 1 and np.isin(values, (0, 1)).all() and (values.sum(1) == 1).all():
        values = values.argmax(1)[:, None]  # one-hot
    whole = np.array_equal(values, values.round())
    for column, line in zip(values.T, _LINES, strict=False):
        axes.plot(steps, column, **({**line, "linestyle": "", "marker": ".", "markersize": 2.5} if whole else line))
    if whole:
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.margins(y=0.12)
    if np.ptp(values) == 0:
        axes.set_ylim(values[0, 0] - 1, values[0, 0] + 1)


def _default_keys(data: Any) -> list[NestedKey]:
    found = [key for key in (("next", "reward"), "action") if data.get(key, None) is not None]
    for key, x in data.items(True, True):
        is_small = isinstance(x, torch.Tensor) and x.dtype.is_floating_point and x[0].numel() <= 64
        first = key if isinstance(key, str) else key[0]
        if (
            is_small
            and first not in ("next", "action")
            and "observation" in (key if isinstance(key, tuple) else (key,))
        ):
            return [*found, key]
    return found


def plot_advantages(rollout: RolloutBuffer) -> Figure:
    """Draw a rollout: value, target and ends along one lane, the advantages, and how well values predict targets.

    Args:
        rollout: a buffer whose rollout is complete.

    Returns:
        A figure of three panels.

    Raises:
        RuntimeError: the rollout is not complete.

    Cost: O(rows of the rollout).

    Example:
        >>> from rlbuf_td import RolloutBuffer
        >>> from rlbuf_td.plots import plot_advantages
        >>> from tensordict import TensorDict
        >>> rollout, done = RolloutBuffer(30, 2), (torch.arange(30) % 10 == 9).expand(2, 30).unsqueeze(-1)
        >>> step = {"reward": torch.ones(2, 30, 1), "done": done, "terminated": done}
        >>> _ = rollout.extend(TensorDict({"state_value": torch.randn(2, 30, 1), "next": step}, [2, 30]))
        >>> len(plot_advantages(rollout).axes)
        3
    """
    summary, storage, writer = rollout.summary(), rollout.storage, rollout.writer
    data = storage.get(slice(None))
    steps = data.shape[0]
    value, target, advantage = (
        _numbers(data.get(key).float()).reshape(steps, -1)
        for key in (writer.value_key, writer.value_target_key, writer.advantage_key)
    )
    figure = _empty_figure(3.1)
    top, *bottom = figure.subplot_mosaic("AA;BC").values()
    top.plot(target[:, 0], color=INK, linewidth=1.1, label="value target")
    top.plot(value[:, 0], color=ACCENT, linewidth=1.1, linestyle="--", label="value")
    done = data.get(writer.estimator.done_key, None)
    for end in [] if done is None else np.flatnonzero(_numbers(done).reshape(steps, -1)[:, 0]):
        top.axvline(end + 0.5, color=SHADE, linewidth=0.8, zorder=0)
    top.legend(fontsize=_SMALL - 0.5, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(-0.02, 0.97))
    _dress(top, "", "time step of the first lane (grey: an episode ends)", "return")
    _draw_advantages(bottom[0], advantage.ravel())
    _draw_explained(bottom[1], value.ravel(), target.ravel(), summary["explained_variance"])
    return figure


def _draw_advantages(axes: Axes, advantage: np.ndarray) -> None:
    axes.hist(advantage, 30, color=SHADE, edgecolor=INK, linewidth=0.5)
    axes.axvline(0, color=GUIDE, linestyle="--", linewidth=0.9)
    _dress(axes, f"mean {advantage.mean():.2g}, deviation {advantage.std():.2g}", "advantage", "steps")


def _draw_explained(axes: Axes, value: np.ndarray, target: np.ndarray, explained: float) -> None:
    low, high = min(value.min(), target.min()), max(value.max(), target.max())
    axes.plot([low, high], [low, high], color=GUIDE, linestyle="--", linewidth=0.9)
    some = np.linspace(0, len(value) - 1, min(len(value), 1_000)).astype(int)
    axes.plot(value[some], target[some], ".", color=INK, markersize=2, alpha=0.35, markeredgewidth=0)
    _dress(axes, f"explained variance {explained:.2f}", "value", "value target")


# -- what they share

_LEADER: dict[str, Any] = {
    "fontsize": _SMALL - 0.5,
    "arrowprops": {"arrowstyle": "-", "linewidth": 0.6, "color": ACCENT},
}
_LINES: tuple[dict[str, Any], ...] = (
    {"color": INK, "linestyle": "-", "linewidth": 1.2},
    {"color": ACCENT, "linestyle": "--", "linewidth": 1.2},
    {"color": "0.55", "linestyle": "-", "linewidth": 1.2},
    {"color": "#2a6f97", "linestyle": "-.", "linewidth": 1.2},
    {"color": "0.35", "linestyle": ":", "linewidth": 1.2},
    {"color": "0.75", "linestyle": "--", "linewidth": 1.2},
)


def _empty_figure(height: float) -> Picture:
    figure = Picture(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03))
    FigureCanvasAgg(figure)
    return figure


def _figure(rows: int, columns: int, height: float, *, sharex: bool = False) -> tuple[Picture, list[Axes]]:
    figure = _empty_figure(rows * height + 0.35)
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharex=sharex).flat)


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=_SMALL, loc="left", pad=3)
    if x:
        axes.set_xlabel(x, fontsize=_SMALL, labelpad=2)
    axes.set_ylabel(y, fontsize=_SMALL, labelpad=2)
    axes.tick_params(which="both", labelsize=_SMALL - 0.5, length=2, width=0.5, pad=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_linewidth(0.5)


def _title(figure: Figure, words: str) -> None:
    figure.suptitle(words, fontsize=_SMALL + 0.5)


def _sampler_words(sampler: Sampler) -> str:
    sampler = unwrapped(sampler)
    return f"{type(sampler).__name__}, alpha = {sampler.alpha:g}, beta = {sampler.beta:g}"


def _unit(name: str) -> str:
    return "length, steps" if name == "length" else name


def _key_words(key: NestedKey) -> str:
    return key if isinstance(key, str) else ".".join(key)


def _numbers(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()
