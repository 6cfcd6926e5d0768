"""Finds the boundaries of trajectories: how many stored steps of a trajectory precede and follow each row.

Rows are ``[T, E]``: T time steps and E lanes. A lane is one environment, and its rows form a ring. Each row has two
flags. *Cut* is True if the next step of the lane does not continue the trajectory: the trajectory has ended, or the
next step was not written directly after this step. *Over* is True if the trajectory has ended with this step.

:class:`FlagBoundaries` is the reference implementation, for any device. :class:`BitBoundaries` is the CPU
implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import record_of, uses_numba
from rlbuf_td.kernels.inference_mode import outside_inference_mode

WORD = 64
# Invariants: each written lane has at least one `cut` flag; until a lane is full, `cut` is set at its step T - 1;
# where `over` is set, `cut` is set too.


class BoundariesBase(ABC):
    """Abstract base of both implementations of trajectory boundaries."""

    lanes: int
    head: Tensor  # ``[E]`` int64 on the host, the last written step of each lane, -1 before the first write
    begun: Tensor  # ``[E]`` bool, whether a trajectory begins with the oldest step of a lane whose ring is full

    @abstractmethod
    def write(self, start: int, count: int, end: Tensor, name: Tensor | None) -> None:
        """Record a write of ``count`` time steps from step ``start`` on; the write must not wrap around.

        ``end`` and ``name`` (trajectory ids) cover all rows, ``[T, E]``. A trajectory ends where ``end`` is True, and
        where the next step has another id.
        """

    @abstractmethod
    def write_rows(self, rows: np.ndarray, end: Tensor, name: Tensor | None) -> None:
        """Record a write of single rows, at flat indices ``rows`` (``[n]`` int64); those of a lane are in time order.

        The other arguments are those of :meth:`write`.
        """

    @abstractmethod
    def reach(self, cells: Tensor, within: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return how many steps precede and follow each row in its trajectory: ``(back, ahead, over)``.

        ``back`` and ``ahead`` are at most ``within``. ``over`` is the flag *over* of the row ``ahead`` steps later.
        """

    @abstractmethod
    def whole(self, oldest: Tensor, live: Tensor, begun: Tensor, only_finished: bool) -> tuple[Tensor, Tensor]:
        """Return the first flat row and the length of each trajectory whose first row is stored, by lane and age.

        Lane ``e`` holds ``live[e]`` steps from step ``oldest[e]`` on, and ``begun[e]`` tells whether a trajectory
        begins with that step. ``only_finished``: omit trajectories that have not ended. The arguments are on the host.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the state as a dict of tensors, without copying them."""

    @abstractmethod
    def holds(self, tensors: dict[str, Tensor]) -> bool:
        """Whether ``tensors``, of the shapes of :meth:`tensors`, can be the state of such boundaries."""

    def restore(self, tensors: dict[str, Tensor]) -> None:
        for name, mine in self.tensors().items():
            mine.copy_(tensors[name])

    def clear(self) -> None:
        nothing = {name: torch.zeros_like(mine) for name, mine in self.tensors().items()}
        self.restore(nothing | {"head": torch.full_like(self.head, -1)})


class FlagBoundaries(BoundariesBase):
    """Reference implementation of trajectory boundaries: the flags ``cut`` and ``over``, both ``[T, E]`` bool."""

    def __init__(self, steps: int, lanes: int, device: torch.device | str = "cpu") -> None:
        self.lanes = lanes
        with outside_inference_mode():
            self.cut = torch.zeros(steps, lanes, dtype=torch.bool, device=device)
            self.over = torch.zeros_like(self.cut)
            self.head = torch.full((lanes,), -1, device="cpu")
            self.begun = torch.zeros(lanes, dtype=torch.bool, device=device)
        self._count: Tensor | None = None  # a result of `_count_cuts`, until the next write

    def write(self, start: int, count: int, end: Tensor, name: Tensor | None) -> None:
        for part, lanes in self._following(np.full(self.lanes, start), np.arange(self.lanes)):
            self._write(start, count, lanes, part, end, name)

    def write_rows(self, rows: np.ndarray, end: Tensor, name: Tensor | None) -> None:
        steps, lanes = np.divmod(rows, self.lanes)
        turns = occurrences(lanes)
        for turn in range(turns.max(initial=-1) + 1):  # the rows of a turn belong to different lanes
            now = turns == turn
            for t in np.unique(steps[now]):
                at = lanes[now & (steps == t)]
                for part, those in self._following(np.full(len(at), t), at):
                    self._write(int(t), 1, those, part, end, name)

    def _following(self, start: np.ndarray, lanes: np.ndarray) -> list[tuple[bool, Tensor]]:
        """Split lanes into those where a write at ``start`` follows the last write, and the others."""
        follows = self.head.numpy()[lanes] == (start - 1) % len(self.cut)
        parts = (True, lanes[follows]), (False, lanes[~follows])
        return [(part, torch.from_numpy(those)) for part, those in parts if len(those)]

    def _write(self, start: int, count: int, lanes: Tensor, follows: bool, end: Tensor, name: Tensor | None) -> None:
        self._count = None
        self.head[lanes] = start + count - 1
        at = lanes.to(self.cut.device)
        steps, stop = len(self.cut), start + count
        before = (start - 1) % steps
        if follows and name is not None:
            self.over[before, at] |= name[before, at] != name[start, at]
        self.cut[before, at] = self.over[before, at] if follows else torch.ones_like(self.over[before, at])
        self.begun[at] = self.cut[stop - 1, at]  # of the last step that this write replaces
        over = end[start:stop, at]
        if name is not None:
            over[:-1] |= name[start : stop - 1, at] != name[start + 1 : stop, at]
        self.over[start:stop, at] = self.cut[start:stop, at] = over
        self.cut[stop - 1, at] = True

    def reach(self, cells: Tensor, within: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Look up rows; the first look-up after a write scans all rows."""
        steps, lanes = self.cut.shape
        count, t, begin = self._count_cuts(), cells // lanes, cells % lanes * steps
        # The cuts of the row's lane have the numbers ``first`` to ``last``; those up to ``before`` lie before the row.
        before, first, last = count[begin + t], count[begin] + 1, count[begin + steps]
        next_cut = torch.searchsorted(count[1:], torch.where(before < last, before + 1, first)) - begin
        last_cut = torch.searchsorted(count[1:], torch.where(before < first, last, before)) - begin
        back, ahead = (t - 1 - last_cut) % steps, (next_cut - t) % steps
        most = steps if within is None else min(steps, within)
        back, ahead = back.clamp(max=most), ahead.clamp(max=most)
        return back, ahead, self.over.view(-1)[(cells + ahead * lanes) % (steps * lanes)]

    def whole(self, oldest: Tensor, live: Tensor, begun: Tensor, only_finished: bool) -> tuple[Tensor, Tensor]:
        (steps, lanes), device = self.cut.shape, self.cut.device
        oldest, live, begun = (each.to(device) for each in (oldest, live, begun))
        age = torch.arange(steps, device=device)[:, None]
        cut = self.cut.gather(0, (oldest + age) % steps) & (age < live)
        lane, last = cut.T.nonzero(as_tuple=True)
        is_first = torch.ones_like(lane, dtype=torch.bool)
        is_first[1:] = lane[1:] != lane[:-1]
        start = torch.where(is_first, 0, last.roll(1) + 1)
        is_whole = ~is_first | begun[lane]
        if only_finished:
            is_whole &= self.over[(oldest[lane] + last) % steps, lane]
        first = (oldest[lane] + start) % steps * lanes + lane
        return first[is_whole], (last + 1 - start)[is_whole]

    def _count_cuts(self) -> Tensor:
        """Return the number of cuts before each row and before the end, ``[E * T + 1]`` int64, lane after lane."""
        if self._count is None:
            # A scan of one dimension, over integers, is fast and exact on a device; cummax would use one core per lane.
            count = self.cut.T.reshape(-1).cumsum(0)
            self._count = torch.cat((count.new_zeros(1), count))
        return self._count

    def tensors(self) -> dict[str, Tensor]:
        return {"cut": self.cut, "over": self.over, "head": self.head, "begun": self.begun}

    def holds(self, tensors: dict[str, Tensor]) -> bool:
        cut, over = tensors["cut"], tensors["over"]
        head = tensors["head"]
        are_heads = bool(((head >= -1) & (head < len(cut))).all())
        return are_heads and bool((cut.any(0).cpu() | (head < 0)).all()) and not bool((over & ~cut).any())

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._count = None
        super().restore(tensors)


class Bitmap(NamedTuple):
    """The bitmap of :class:`BitBoundaries`, for compiled loops."""

    # It holds no arrays: numba's reference counting of arrays takes longer than a look-up.
    bits: int  # address of the words, ``[lanes, words]`` uint64
    words: int  # per lane
    starts: int  # address of the first word of each level, int64
    levels: int
    steps: int
    lanes: int


_COLUMNS = "end", "end_step", "end_lane", "name", "name_step", "name_lane", "name_size"
#: For writes: a bitmap, the addresses of ``head`` and ``begun``, and the columns ``end`` and ``name`` of all rows: the
#: address, and the strides in bytes from step to step and from lane to lane. ``name_size`` is 0 if rows have no names.
MARKS = np.dtype([(field, np.int64) for field in (*Bitmap._fields, "head", "begun", *_COLUMNS)])


class BitBoundaries(BoundariesBase):
    """CPU implementation of trajectory boundaries: the bitmap that :mod:`rlbuf_td.kernels.episodes.cpu` describes."""

    def __init__(self, steps: int, lanes: int, device: torch.device | str = "cpu") -> None:
        self.steps, self.lanes = steps, lanes
        sizes = [-(-steps // WORD)]
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // WORD))
        self.starts = np.cumsum([0, *sizes])
        with outside_inference_mode():
            self.bits = torch.zeros(lanes, int(self.starts[-1]) + sizes[0], dtype=torch.int64, device=device)
            self.head = torch.full((lanes,), -1, device="cpu")
            self.begun = torch.zeros(lanes, dtype=torch.bool, device=device)
        self._bitmap: Bitmap | None = None

    @property
    def bitmap(self) -> Bitmap:
        """The argument ``bitmap`` of the CPU loops; the same object as long as the bitmap has not moved."""
        bits = self.bits.data_ptr()
        if self._bitmap is None or self._bitmap.bits != bits:
            words, starts, levels = self.bits.shape[1], self.starts.ctypes.data, len(self.starts) - 1
            self._bitmap = Bitmap(bits, words, starts, levels, steps=self.steps, lanes=self.lanes)
        return self._bitmap

    def write(self, start: int, count: int, end: Tensor, name: Tensor | None) -> None:
        from rlbuf_td.kernels.episodes import cpu

        cpu.write(self.marks(end, name), start, count)

    def write_rows(self, rows: np.ndarray, end: Tensor, name: Tensor | None) -> None:
        from rlbuf_td.kernels.episodes import cpu

        cpu.write_rows(self.marks(end, name), rows)

    def marks(self, end: Tensor, name: Tensor | None) -> np.ndarray:
        """Return the record :data:`MARKS` that the CPU loop of :meth:`write` needs, ``[1]``."""
        given = {**self.bitmap._asdict(), "head": self.head.data_ptr(), "begun": self.begun.data_ptr()}
        for field, column in (("end", end), ("name", name)):
            if column is not None:
                step, lane = (stride * column.element_size() for stride in column.stride())
                given |= {field: column.data_ptr(), f"{field}_step": step, f"{field}_lane": lane}
        return record_of(MARKS, **given, name_size=0 if name is None else name.element_size())

    def reach(self, cells: Tensor, within: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        most = self.steps if within is None else min(self.steps, within)
        from rlbuf_td.kernels.episodes import cpu

        back, ahead, over = cpu.reach(self.bitmap, cells.numpy(), most)
        return torch.from_numpy(back), torch.from_numpy(ahead), torch.from_numpy(over)

    def whole(self, oldest: Tensor, live: Tensor, begun: Tensor, only_finished: bool) -> tuple[Tensor, Tensor]:
        from rlbuf_td.kernels.episodes import cpu

        first, length = cpu.whole(self.bitmap, oldest.numpy(), live.numpy(), begun.numpy(), only_finished)
        return torch.from_numpy(first), torch.from_numpy(length)

    def tensors(self) -> dict[str, Tensor]:
        return {"bits": self.bits, "head": self.head, "begun": self.begun}

    def holds(self, tensors: dict[str, Tensor]) -> bool:
        words = tensors["bits"].numpy().view(np.uint64)
        *levels, over = np.split(words, self.starts[1:], 1)
        head = tensors["head"].numpy()
        if not (((head >= -1) & (head < self.steps)).all() and (levels[0].any(1) | (head < 0)).all()):
            return False
        beyond = np.uint64(2**64 - 1) << np.uint64(self.steps % WORD) if self.steps % WORD else np.uint64(0)
        for above, below in zip(levels[1:], levels, strict=False):
            set_words = np.zeros((self.lanes, above.shape[1] * WORD), np.uint8)
            set_words[:, : below.shape[1]] = below != 0
            if (np.packbits(set_words, 1, bitorder="little").view(np.uint64) != above).any():
                return False
        return not ((over & ~levels[0]).any() or (levels[0][:, -1] & beyond).any())

    def share_memory_(self) -> None:
        for tensor in self.tensors().values():
            tensor.share_memory_()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_bitmap": None}


Boundaries: TypeAlias = FlagBoundaries | BitBoundaries


def occurrences(numbers: np.ndarray) -> np.ndarray:
    """Return for each element how many equal elements precede it, ``[n]`` int64; O(n log n)."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    found = np.empty(len(numbers), np.int64)
    found[order] = np.arange(len(numbers)) - np.searchsorted(ordered, ordered)
    return found


def make_boundaries(steps: int, lanes: int, device: torch.device) -> Boundaries:
    return BitBoundaries(steps, lanes) if uses_numba(device) else FlagBoundaries(steps, lanes, device)
