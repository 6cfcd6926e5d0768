"""Notes the rows of a write on a GPU: one program per lane.

A program takes the new rows of its lane block by block, as the loops of
:mod:`rlbuf_td.kernels.episodes.cpu` take them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.episodes import BREAK, MOST, STEPS
from rlbuf_td.kernels.launches import launch

_ROWS = 64  # per block
_CHANGING = ["row_bytes", "steps", "lanes", "flag_count", "id_offset"]
_BREAK, _STEPS = tl.constexpr(BREAK), tl.constexpr(STEPS)
_MOST, _NEVER = tl.constexpr(MOST), tl.constexpr(1 << 20)  # above any place in a block
_INTEGERS = "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"
_KINDS = {getattr(torch, name): getattr(tl, name) for name in _INTEGERS}


@triton.jit
def _ends(row, is_row, flags, flag_count):
    """Whether a flag of each row is set; ``row``: the addresses of rows."""
    flag_bytes = tl.zeros(row.shape, tl.uint8)
    for flag in range(0, flag_count):
        begin, size = tl.load(flags + 2 * flag), tl.load(flags + 2 * flag + 1)
        for byte in range(begin, begin + size):
            address = (row + byte).to(tl.pointer_type(tl.uint8))
            flag_bytes |= tl.load(address, mask=is_row, other=0)
    return flag_bytes != 0


@triton.jit
def _ids(row, is_row, id_offset, KIND: tl.constexpr):
    address = (row + id_offset).to(tl.pointer_type(KIND))
    return tl.load(address, mask=is_row, other=0).to(tl.int64)


@triton.jit
def _extents(begins, ended, is_row, position):
    """Return the place of the last begin up to each row, -1 if there is none, and of the
    first end from it on, or `_NEVER`."""
    begin_of = tl.where(begins & is_row, position, -1)[None, :]
    begin_of = tl.where(position[None, :] <= position[:, None], begin_of, -1)
    begin = tl.max(begin_of, 1)
    end_of = tl.where(ended & is_row, position, _NEVER)[None, :]
    end_of = tl.where(position[None, :] >= position[:, None], end_of, _NEVER)
    cut_of = tl.where(begins & is_row, position - 1, _NEVER)[None, :]
    cut_of = tl.where(position[None, :] > position[:, None], cut_of, _NEVER)
    return begin, tl.minimum(tl.min(end_of, 1), tl.min(cut_of, 1))


@triton.jit
def _stored_before(numbers, first, tail, steps):
    """Return how many rows of its episode are stored before the row ``first``, if the
    episode has not ended."""
    newest = numbers + 2 * ((first + steps - 1) % steps)
    has_rows = first > tail
    back = tl.load(newest, mask=has_rows, other=0).to(tl.int64) & _STEPS
    return tl.where(has_rows, back + 1, 0)


@triton.jit
def _close(numbers, start, begins, end, stored, steps, ROWS: tl.constexpr):
    """Write ``rows_to_end`` of the ``stored`` rows before the serial ``start``, if their
    episode ends before the row at that serial, or in its block."""
    position = tl.arange(0, ROWS).to(tl.int64)
    begins_anew = tl.max(tl.where(position == 0, begins.to(tl.int32), 0), 0) > 0
    closing = tl.min(tl.where(position == 0, end, _NEVER), 0)
    closing = tl.where(begins_anew, -1, closing)
    stored = tl.where(closing < _NEVER, stored, 0)
    for ago in range(1, stored + 1, ROWS):
        slot_before = (start - ago - position) % steps
        is_before = ago + position <= stored
        rows_to_end = closing + ago + position + 1
        tl.store(numbers + 2 * slot_before + 1, rows_to_end, mask=is_before)


@triton.jit(do_not_specialize=_CHANGING)
def _note(
    numbers,
    rows,
    flags,
    following,
    following_after,
    serials,
    row_bytes: tl.int64,
    steps: tl.int64,
    lanes: tl.int64,
    flag_count: tl.int32,
    id_offset: tl.int64,
    HAS_IDS: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
):
    lane, position = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS).to(tl.int64)
    tail, written = tl.load(serials + lane), tl.load(serials + lanes + lane)
    noted = tl.load(serials + 2 * lanes + lane)
    first = tl.maximum(noted, written - steps)
    is_cut = first > noted  # the rows just before have never been stored
    numbers += 2 * lane * steps
    rows = rows.to(tl.int64) + lane * row_bytes
    width = lanes * row_bytes
    back, traj_id = tl.load(following + lane), tl.load(following + lanes + lane)
    back = tl.where(is_cut, _MOST, back)
    # the rows before in the newest episode, stored or not
    stored = tl.where(back != 0, _stored_before(numbers, first, tail, steps), 0)
    for start in range(first, written, ROWS):
        serial = start + position
        is_row, slot = serial < written, serial % steps
        is_newest = serial == tl.minimum(start + ROWS, written) - 1
        row = rows + slot * width
        ended = _ends(row, is_row, flags, flag_count)
        row_before = rows + (serial + steps - 1) % steps * width
        has_before = is_row & (position > 0)
        begins = _ends(row_before, has_before, flags, flag_count)
        if HAS_IDS:
            own_id = _ids(row, is_row, id_offset, KIND)
            id_before = _ids(row_before, has_before, id_offset, KIND)
            is_other = tl.where(position > 0, own_id != id_before, own_id != traj_id)
            begins |= is_other & ~(is_cut & (serial == first))
            traj_id = tl.sum(tl.where(is_newest, own_id, 0), 0)
        begins |= (position == 0) & (back <= 0)

        begin, end = _extents(begins, ended, is_row, position)
        since = tl.minimum(
            tl.where(begin < 0, back + position, position - begin), _MOST
        )
        rows_to_end = tl.where(end < _NEVER, end - position + 1, 0)
        is_break = (position == 0) & (back < 0)
        tl.store(numbers + 2 * slot, tl.where(is_break, _BREAK, since), mask=is_row)
        tl.store(numbers + 2 * slot + 1, rows_to_end, mask=is_row)

        stored = tl.minimum(stored, start - tail)
        _close(numbers, start, begins, end, stored, steps, ROWS)
        tl.debug_barrier()  # other threads may write to these rows next

        is_over = tl.max(tl.where(is_newest, ended.to(tl.int32), 0), 0) > 0
        back = tl.max(tl.where(is_newest, since, 0), 0) + 1
        back = tl.where(is_over, 0, tl.minimum(back, _MOST))
        stored = back
    tl.store(following_after + lane, back)
    tl.store(following_after + lanes + lane, traj_id)


class EpisodeNotes:
    """Notes rows of one layout on one device.

    Args:
        flags: offset and size in bytes of each end flag in a row, ``[n, 2]`` int64.
        id_offset: the offset of ids in a row.
        id_dtype: their dtype; None: there are no ids.
        device: the device of the rows.
    """

    def __init__(
        self,
        flags: np.ndarray,
        id_offset: int,
        id_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self.flags = torch.from_numpy(flags).to(device)
        self.id_offset = id_offset
        self.constants = {
            "HAS_IDS": id_dtype is not None,
            "KIND": _KINDS[id_dtype or torch.int64],
            "ROWS": _ROWS,
        }

    def note(
        self,
        numbers: Tensor,
        rows: Tensor,
        following: Sequence[Tensor],
        serials: Tensor,
    ) -> None:
        """Write the numbers of the new rows of a write, see :func:`lanes_of_write`.

        ``rows``, ``[T * E, width]``, holds the rows; ``following`` is what the new rows
        continue, and where what follows them is written.
        """
        lanes, steps = numbers.shape[:2]
        row_bytes = rows.stride(0) * rows.element_size()
        tensors = rows, self.flags, *following, serials
        sizes = row_bytes, steps, lanes, len(self.flags), self.id_offset
        launch(_note, (lanes,), numbers, *tensors, *sizes, **self.constants)
