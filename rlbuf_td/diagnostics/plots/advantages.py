"""A rollout and its advantages as a picture."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlbuf_td.buffers.rollout import RolloutBuffer
from rlbuf_td.diagnostics.plots.figure import ACCENT, GUIDE, INK, SHADE, SMALL, dress, empty_figure, numbers_of


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
    summary, storage, writer = rollout.summary(), rollout.storage, rollout.writer
    data = storage.get(slice(None))
    steps = data.shape[0]
    value, target, advantage = (
        numbers_of(data.get(key).float()).reshape(steps, -1)
        for key in (writer.value_key, writer.value_target_key, writer.advantage_key)
    )
    figure = empty_figure(3.1)
    top, *bottom = figure.subplot_mosaic("AA;BC").values()
    top.plot(target[:, 0], color=INK, linewidth=1.1, label="value target")
    top.plot(value[:, 0], color=ACCENT, linewidth=1.1, linestyle="--", label="value")
    done = data.get(writer.estimator.done_key, None)
    for end in [] if done is None else np.flatnonzero(numbers_of(done).reshape(steps, -1)[:, 0]):
        top.axvline(end + 0.5, color=SHADE, linewidth=0.8, zorder=0)
    top.legend(fontsize=SMALL - 0.5, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(-0.02, 0.97))
    dress(top, "", "time step of the first lane (grey: an episode ends)", "return")
    _draw_advantages(bottom[0], advantage.ravel())
    _draw_explained(bottom[1], value.ravel(), target.ravel(), summary["explained_variance"])
    return figure


def _draw_advantages(axes: Axes, advantage: np.ndarray) -> None:
    axes.hist(advantage, 30, color=SHADE, edgecolor=INK, linewidth=0.5)
    axes.axvline(0, color=GUIDE, linestyle="--", linewidth=0.9)
    dress(axes, f"mean {advantage.mean():.2g}, deviation {advantage.std():.2g}", "advantage", "steps")


def _draw_explained(axes: Axes, value: np.ndarray, target: np.ndarray, explained: float) -> None:
    low, high = min(value.min(), target.min()), max(value.max(), target.max())
    axes.plot([low, high], [low, high], color=GUIDE, linestyle="--", linewidth=0.9)
    some = np.linspace(0, len(value) - 1, min(len(value), 1_000)).astype(int)
    axes.plot(value[some], target[some], ".", color=INK, markersize=2, alpha=0.35, markeredgewidth=0)
    dress(axes, f"explained variance {explained:.2f}", "value", "value target")
