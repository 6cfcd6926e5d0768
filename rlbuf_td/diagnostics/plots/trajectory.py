"""Plot of one trajectory in a buffer."""

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

from rlbuf_td.diagnostics.plots.figure import ACCENT, LINES, SMALL, dress, numbers_of, panels, title
from rlbuf_td.storages.indexing import coordinates, device_of, flat_rows, lanes_of
from rlbuf_td.storages.schema import walk
from rlbuf_td.storages.trajectory_index import TrajectoryIndex


def plot_trajectory(rb: ReplayBuffer, row: Any, *, keys: Sequence[NestedKey] | None = None) -> Figure:
    """Plot the stored part of the trajectory that a row belongs to, and mark the row.

    Args:
        rb: a buffer over a storage of TensorDicts with ``("next", "done")`` or trajectory ids.
        row: a flat row, or its coordinates ``(t, e)``.
        keys: the keys to plot; default: reward, action and the first observation of up to 64 numbers.

    Returns:
        A figure with a panel per key, over time steps from the row.

    Raises:
        IndexError: nothing is stored at this row.
        KeyError: no such key, or neither ends nor trajectory ids are stored.

    Cost: O(rows of the trajectory).

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from rlbuf_td.diagnostics.plots import plot_trajectory
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
    back, ahead, ended = (int(x) for x in TrajectoryIndex.of(storage).reach(at))
    steps, capacity = np.arange(-back, ahead + 1), storage.max_size // lanes
    cells = (flat // lanes + torch.arange(-back, ahead + 1, device="cpu")) % capacity * lanes + flat % lanes
    data = rb.storage.get(coordinates(cells.to(at.device), storage))
    chosen = _default_keys(data) if keys is None else list(keys)
    figure, axes = panels(len(chosen), 1, 1.15, sharex=True)
    for key, each in zip(chosen, axes, strict=True):
        values = data.get(key, None)
        if values is None:
            raise KeyError(f"no {key!r} in the rows")
        components = numbers_of(values.reshape(len(steps), -1).float())
        _draw_components(each, steps, components)
        each.axvline(0, color=ACCENT, linestyle=":", linewidth=1.2)
        shown = f"\n({len(LINES)} of {components.shape[1]})" if components.shape[1] > len(LINES) else ""
        dress(each, "", "", (key if isinstance(key, str) else ".".join(key)) + shown)
    axes[-1].set_xlabel("time steps from the row (dotted)", fontsize=SMALL)
    axes[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    where = f"row {flat:,}" if lanes == 1 else f"row {flat:,} (step {flat // lanes:,}, lane {flat % lanes})"
    title(figure, f"{where}: trajectory of {len(steps)} steps, {'finished' if ended else 'goes on'}")
    return figure


def _draw_components(axes: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    if values.shape[1] > 1 and np.isin(values, (0, 1)).all() and (values.sum(1) == 1).all():
        values = values.argmax(1)[:, None]  # one-hot
    whole = np.array_equal(values, values.round())
    for column, line in zip(values.T, LINES, strict=False):
        axes.plot(steps, column, **({**line, "linestyle": "", "marker": ".", "markersize": 2.5} if whole else line))
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
