"""The common style of all plots: the width of a paper's column, small type, lines that differ in greyscale."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import PercentFormatter

WIDTH = 3.4  # inches
INK, ACCENT, SHADE, GUIDE = "0.1", "#c8500a", "0.78", "0.45"
SMALL = 7  # points
BARS: dict[str, Any] = {"color": SHADE, "edgecolor": INK, "linewidth": 0.5}
_LOOKS = {INK: "-", ACCENT: "--", "0.55": "-", "#2a6f97": "-.", "0.35": ":", "0.75": "--"}
LINES: list[dict[str, Any]] = [{"color": c, "linestyle": style, "linewidth": 1.2} for c, style in _LOOKS.items()]
LEGEND: dict[str, Any] = {"fontsize": SMALL - 0.5, "frameon": False}


class Picture(Figure):
    """A figure that Jupyter shows without pyplot."""

    def suptitle(self, t: str, **settings: Any) -> Text:
        return super().suptitle(t, fontsize=SMALL + 0.5, **settings)

    def _repr_png_(self) -> bytes:
        png = BytesIO()
        self.savefig(png, format="png")
        return png.getvalue()


def empty_figure(height: float) -> Picture:
    return Picture(figsize=(WIDTH, height), dpi=180, layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03))


def panels(rows: int, columns: int, height: float, *, sharex: bool = False) -> tuple[Picture, list[Axes]]:
    """Return a figure and its panels, row by row; ``height`` is the height of a row in inches."""
    figure = empty_figure(rows * height + 0.35)
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharex=sharex).flat)


def dress(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=SMALL, loc="left", pad=3)
    if x:
        axes.set_xlabel(x, fontsize=SMALL, labelpad=2)
    axes.set_ylabel(y, fontsize=SMALL, labelpad=2)
    axes.tick_params(which="both", labelsize=SMALL - 0.5, length=2, width=0.5, pad=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_linewidth(0.5)


def guide(axes: Axes, x: Any, y: Any) -> None:
    axes.plot(x, y, color=GUIDE, linestyle="--", linewidth=0.9)


def in_percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def numbers_of(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()
