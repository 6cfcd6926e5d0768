"""The benchmark's results as a picture: relative times of the libraries, one line per operation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from rlbuf_td.cli import UsageError, refuse_unwritable
from rlbuf_td.cli.bench.timing import OURS, REPLAY, Timing

# Markers differ in form, for prints in greyscale.
_LOOKS: dict[str, dict[str, Any]] = {
    "TorchRL": {"marker": "o", "color": "#c8500a", "label": "TorchRL"},
    "Mixed": {
        **{"marker": "D", "color": "0.1", "fillstyle": "none", "zorder": 3},
        "label": "TorchRL's buffer, our parts",
    },
    "SB3": {"marker": "^", "color": "0.55", "label": "Stable-Baselines3"},
    "cpprb": {"marker": "s", "color": "#2a6f97", "label": "cpprb"},
    "Flashbax": {"marker": "v", "color": "#6b4c9a", "fillstyle": "none", "label": "Flashbax (JAX)"},
    "bare": {"marker": "|", "color": "0.1", "label": "bare randint + index_select"},
}
_MARK: dict[str, Any] = {"markersize": 3.6, "markeredgewidth": 0.8, "linestyle": "", "zorder": 2}
_LINE, _HEAD, _SIZE = 0.145, 0.26, 6.5  # inches per line and per heading, points


def refuse_picture(path: Path) -> None:
    """Refuse a file that could not be written, before anything is timed."""
    known = FigureCanvasAgg(Figure()).get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise UsageError(f"--picture {path}: expected a file name that ends in one of {', '.join(sorted(known))}")
    refuse_unwritable("--picture", path.parent)


def draw(timings: Sequence[Timing], batch: int) -> Figure:
    """Return a figure: one line per operation (replay: of the largest buffers), one mark per library."""
    groups = _groups(timings)
    if not groups:
        raise ValueError("there is nothing to plot: no operation has been timed")
    lines = [len(members) for members in groups.values()]
    height = sum(_HEAD + _LINE * count for count in lines) + 1
    figure = Figure(figsize=(3.4, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(groups), sharex=True, squeeze=False, height_ratios=lines)[:, 0]
    for axes, (title, members) in zip(panels, groups.items(), strict=True):
        _draw_group(axes, members)
        axes.set_title(title, fontsize=_SIZE, fontweight="bold", loc="left")
    highest = max(timing.ratio(name) for timing in timings for name in timing.blocks)
    panels[0].set_xlim(0.08, max(20.0, 1.6 * highest))
    words = f"time after a learner's step / rlbuf_td's, at the right (batch of {batch})"
    figure.supxlabel(f"{words}\n* TorchRL: proportional, it has no ranks", fontsize=_SIZE)
    found = {name for timing in timings for name in timing.blocks}
    marks = [panels[0].plot([], [], **_MARK | _LOOKS[name])[0] for name in _LOOKS if name in found]
    layout = {"loc": "outside upper left", "ncols": 2, "handletextpad": 0.1, "columnspacing": 1.2}
    figure.legend(handles=marks, fontsize=_SIZE, frameon=False, **layout)
    return figure


def _groups(timings: Sequence[Timing]) -> dict[str, list[Timing]]:
    replayed = [timing for timing in timings if timing.kind == "small" and timing.operation in REPLAY]
    largest = max((timing.rows for timing in replayed), default=0)
    groups: dict[str, list[Timing]] = {}
    for timing in timings:
        if timing not in replayed or timing.rows == largest:
            groups.setdefault(timing.data, []).append(timing)
    return groups


def _draw_group(axes: Axes, timings: Sequence[Timing]) -> None:
    axes.axvline(1, color="0.1", linewidth=0.9, zorder=1)
    for line, timing in enumerate(timings):
        ratios = {name: timing.ratio(name) for name in _LOOKS if name in timing.blocks}
        axes.plot([1, max(ratios.values(), default=1)], [line, line], color="0.8", linewidth=0.7, zorder=0)
        for name, ratio in ratios.items():
            axes.plot([ratio], [line], **_MARK | _LOOKS[name])
        own = timing.median(OURS)
        time = f"{own:,.0f} µs" if own < 1e3 else f"{own / 1e3:,.1f} ms"
        axes.text(1.02, line, time, transform=axes.get_yaxis_transform(), fontsize=_SIZE, va="center_baseline")
    words = [timing.words for timing in timings]
    axes.set_yticks(range(len(words)), words)
    axes.set_ylim(len(words) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.tick_params(labelsize=_SIZE, length=0, pad=2)
    axes.grid(axis="x", color="0.88", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
