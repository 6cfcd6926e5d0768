"""Lanes of rows ``[T, E]`` that advance alone: the newest step and the number of rows of each lane.

Lanes *stand together* while all writes are whole time steps, and after each write to single lanes that has brought them
to the same step. Otherwise they stand *apart*. Then ``len(storage)`` counts whole time steps up to the longest lane,
and lanes with fewer rows have *holes*: cells that have not been written, which no sampler draws and no index reads.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rlbuf_td.kernels.episodes import occurrences
from rlbuf_td.kernels.inference_mode import outside_inference_mode
from rlbuf_td.storages.indexing import device_of, lanes_of
from rlbuf_td.storages.torchrl_parts import last_step, listeners_of
from rlbuf_td.storages.write_clock import LAST

if TYPE_CHECKING:
    from torchrl.data.replay_buffers import Storage

    from rlbuf_td.storages.packed import PackedStorage

LENGTH, REVISION, NEWEST, APART, HOLES = range(5)  # positions in the storage's `numbers`
MOST_TAKEOVERS = 1024  # how many takeovers of lanes by other actors a storage remembers


class LaneHeads:
    """The newest step of each lane (-1: none), and its number of rows; valid while the lanes stand apart."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None  # [2, E] int64 on the host
        self._aside: torch.Tensor | None = None  # a copy in shared memory, with which a write that failed is undone

    def keep_in(self, memory: torch.Tensor) -> None:
        """Move the numbers to ``memory``, ``[2, 2, E]`` int64 in shared memory."""
        if self.memory is not None:
            memory[0].copy_(self.memory)
        self.memory, self._aside = memory.unbind(0)

    def save(self) -> None:
        """Copy the numbers of shared rows, before a write."""
        if self.memory is not None and self._aside is not None:
            self._aside.copy_(self.memory)

    def undo(self) -> None:
        """Restore the numbers of the last :meth:`save`."""
        if self.memory is not None and self._aside is not None:
            self.memory.copy_(self._aside)

    def read(self, storage: PackedStorage) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of the newest step and the number of rows of each lane, ``[E]`` int64 each."""
        if storage.numbers[APART] and self.memory is not None:
            newest, count = self.memory.numpy().copy()
            return newest, count
        lanes = prod(storage.lanes)
        newest, length = self._together(storage, lanes)
        return np.full(lanes, newest), np.full(lanes, length)

    def _together(self, storage: PackedStorage, lanes: int) -> tuple[int, int]:
        """Return the newest step and the number of rows of all lanes, which stand together."""
        numbers = storage.numbers.values
        length, last = numbers[LENGTH] // lanes, storage.clock.numbers.values[LAST]
        if not length:
            return -1, 0
        return last if last >= 0 else numbers[NEWEST] if numbers[NEWEST] >= 0 else length - 1, length

    def serials(self, storage: PackedStorage, out: np.ndarray | None = None) -> np.ndarray:
        """Return a serial of the oldest row of each lane, and of the row to write next, ``[2, E]`` int64.

        The row with a serial is in time step ``serial % T``.
        """
        newest: Any
        rows = storage.all_rows()
        out = np.empty((2, prod(rows.lanes)), np.int64) if out is None else out
        newest, count = self.read(storage) if lanes_apart(storage) else self._together(storage, out.shape[1])
        out[0] = oldest = (newest + 1 - count) % rows.steps
        out[1] = oldest + count
        return out

    def write(self, storage: PackedStorage, newest: np.ndarray, count: np.ndarray) -> None:
        """Set the numbers of all lanes, and the storage's counters that depend on them."""
        lanes = len(newest)
        if self.memory is None:
            with outside_inference_mode():
                self.memory = torch.empty(2, lanes, dtype=torch.int64, device="cpu")
        self.memory.copy_(torch.from_numpy(np.stack((newest, count))))
        numbers, longest = storage.numbers, int(count.max())
        apart = bool((newest != newest[0]).any() or (count != longest).any())
        numbers[APART], numbers[HOLES] = apart, longest * lanes - int(count.sum())
        numbers[LENGTH], numbers[NEWEST] = longest * lanes, -1 if apart else int(newest[0])
        storage.clock.numbers[LAST] = -1 if apart else int(newest[0])

    def __getstate__(self) -> dict[str, Any]:
        return {"memory": None, "_aside": None}  # a spawned process maps the shared memory itself


def serials_of(newest: np.ndarray, count: np.ndarray, steps: int) -> np.ndarray:
    """Return :meth:`LaneHeads.serials` of lanes with ``count`` rows, the newest one in time step ``newest``."""
    oldest = (newest + 1 - count) % steps
    return np.stack((oldest, oldest + count))


def lane_count(storage: PackedStorage) -> int | None:
    """Return the number of lanes, E, of rows ``[T, E]``; None before the first write if nobody has given it."""
    with storage.lock:  # the first write may allocate reserved rows again
        return storage.lanes_wanted if storage.rows is None else storage.lanes[0]


def places(storage: PackedStorage, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return where rows that are appended to ``lanes``, ``[n]``, are written.

    Returns:
        the time step of each row, ``[n]``; whether it is kept (not if later rows of the call overwrite it); and the
        newest step and the number of rows of each lane after the write, ``[E]``.
    """
    newest, count = storage.heads.read(storage)
    steps = storage.all_rows().steps
    before, more = occurrences(lanes), np.bincount(lanes, minlength=len(newest))
    at = (newest[lanes] + 1 + before) % steps
    return (
        at,
        more[lanes] - before <= steps,
        np.where(more > 0, (newest + more) % steps, newest),
        np.minimum(count + more, steps),
    )


def cells_by_age(storage: PackedStorage) -> np.ndarray:
    """Return the flat indices of all written rows, lane after lane, each from its oldest row on; O(N)."""
    newest, count = storage.heads.read(storage)
    lane = np.repeat(np.arange(len(count)), count)
    age = np.repeat(count, count) - 1 - occurrences_of_runs(count)
    return (newest[lane] - age) % storage.all_rows().steps * len(count) + lane


def occurrences_of_runs(count: np.ndarray) -> np.ndarray:
    """Return ``0 .. count[0] - 1, 0 .. count[1] - 1, ...``."""
    return np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)


def last_writes(rows: np.ndarray) -> np.ndarray:
    """Return ``rows`` without elements that occur again later."""
    again = occurrences(rows[::-1])[::-1]
    return rows[again == 0]


def reach_in_lane(storage: Any, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many stored rows of its lane precede and follow each written row, ``[n]`` int64 each."""
    if lanes_apart(storage):
        newest, count = (torch.from_numpy(each).to(flat.device) for each in storage.heads.read(storage))
        lane, lanes, steps = flat % len(count), len(count), storage.all_rows().steps
        newest, count = newest[lane], count[lane]
    else:
        lanes = lanes_of(storage).numel()
        count = steps = len(storage) // lanes
        newest = last_step(storage, steps)
    ahead = (newest - flat // lanes) % steps
    return count - 1 - ahead, ahead


def row_count(storage: Storage) -> int:
    """Return the number of written rows, without holes."""
    return len(storage) - holes_of(storage)


def holes_of(storage: Any) -> int:
    """Return the number of cells below ``len(storage)`` that have not been written."""
    return storage.numbers.values[HOLES] if hasattr(storage, "heads") else 0


def written_rows(storage: Any) -> torch.Tensor:
    """Return the flat indices of all written rows, ``[N]``."""
    return nth_rows(storage, torch.arange(row_count(storage), device=device_of(storage)))


def nth_rows(storage: Any, number: torch.Tensor) -> torch.Tensor:
    """Return the flat indices of written rows; ``number``, int64, counts written rows from 0 on, lane after lane.

    Without holes, the number of a row is its flat index.
    """
    if not holes_of(storage):
        return number
    _, count = storage.heads.read(storage)
    end = torch.from_numpy(np.cumsum(count)).to(number.device)
    lane = torch.searchsorted(end, number, right=True)
    step = number - torch.where(lane > 0, end[lane - 1], 0)
    return step * len(count) + lane


def holes_among(storage: Any, flat: torch.Tensor) -> torch.Tensor | None:
    """Return which flat indices are holes; None if the storage has none. Indices out of range are no holes."""
    if not holes_of(storage):
        return None
    _, count = storage.heads.read(storage)
    lanes = len(count)
    is_beyond = flat // lanes >= torch.from_numpy(count).to(flat.device)[flat % lanes]
    return is_beyond & (flat < len(storage)) & (flat >= 0)


#: What to use instead of a sampler of TorchRL, by a part of its name.
_INSTEAD = {
    "Slice": 'SequenceSampler(UniformSampler(), n, boundary="strict")',
    "WithoutReplacement": "MinibatchSampler",
    "Prioritized": "ProportionalSampler",
}


def remedy_of_holes(storage: Storage) -> str:
    """Say what to use if a buffer over the storage has a sampler of TorchRL that draws holes, otherwise ""."""
    samplers = [type(vars(each).get("_sampler")) for each in listeners_of(storage) if hasattr(each, "__dict__")]
    names = [kind.__name__ for kind in samplers if kind.__module__.startswith("torchrl.")]
    found = [name for name in names if name not in ("RandomSampler", "NoneType")]
    if not found:
        return ""
    instead = next((f"rlbuf_td.{ours}" for part, ours in _INSTEAD.items() if part in found[0]), "one of rlbuf_td")
    return f". TorchRL's {found[0]} draws such rows if lanes have unlike lengths: use {instead}"


def lanes_apart(storage: Any) -> bool:
    """Whether the lanes of a storage stand at unlike steps."""
    return hasattr(storage, "heads") and bool(storage.numbers.values[APART])


def as_lanes(storage: PackedStorage, lanes: Any, data: TensorDictBase) -> np.ndarray:
    """Check ``lanes``, an int or one per row of ``data``; return one per row, ``[n]`` int64.

    Raises:
        TypeError: lanes are not integers.
        ValueError: data or lanes have the wrong shape.
        IndexError: a lane is out of range.
    """
    if data.ndim < 1 or not len(data):
        raise ValueError(f"lanes= takes rows of batch size [n], n at least 1, in time order, got {[*data.shape]}")
    array = lanes.detach().cpu().numpy() if isinstance(lanes, torch.Tensor) else np.asarray(lanes)
    if array.dtype.kind not in "iu":
        raise TypeError(f"lanes must be integers, one per row or one for all, got {array.dtype}")
    if array.size == 1:
        array = np.broadcast_to(array.reshape(()), (len(data),))
    if array.shape != (len(data),):
        raise ValueError(f"lanes of shape {array.shape} for {len(data)} rows: pass one lane per row, or one for all")
    size = prod(storage.lanes)
    if array.min() < 0 or array.max() >= size:
        bad = array[(array < 0) | (array >= size)][0]
        raise IndexError(f"lane {bad} is out of range: lanes are 0 to {size - 1}")
    return np.array(array, np.int64, order="C")
