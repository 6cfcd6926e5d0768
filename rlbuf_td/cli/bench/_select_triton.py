"""The GPU's kernels of :class:`rlbuf_td.cli.bench.selected_order.SelectedOrder`: many ranks are selected at once.

A key is 31 inverted bits of a magnitude, then the bits of its row; it ascends with the ranks, and no two are equal. Its
digits are counted in turn, and each count tells in which bin of the next one every rank lies:

1. 11 bits of the magnitude, of all rows: :func:`_count_first`, :func:`_look_first`;
2. 12 bits, of rows that share their first digit with a rank: :func:`_count_second`, :func:`_look_second`;
3. what is left, of rows that share both (:func:`_third`). Of 1e6 rows some ten share both, and are put into a list.
   Where they are more than 64, a tie as a rule, the third digit is counted: the last 8 bits of the magnitude and the
   first ones of the row. :func:`_finish` finds a rank in its list, or among the 2**BLOCK rows that are left.

A *slot* is the place of what is counted for one prefix. It has the number of one of the ranks with that prefix: the one
that comes first enters itself into the table of slots, where rows look up theirs, and clears what the next launch is to
fill. Nobody reads within a launch what others write in it, but by that exchange; the host knows nothing of what is
found.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.dispatch import launching_on
from rlbuf_td.kernels.rank_order.cuda import drawn, normed, outputs
from rlbuf_td.kernels.rank_order.merge_cuda import NONE, ROW, bits_of
from rlbuf_td.kernels.strata import step_of

BINS1, BINS2 = tl.constexpr(2048), tl.constexpr(4096)  # the first is selected_order.BINS
SHIFT1, SHIFT2 = tl.constexpr(20), tl.constexpr(8)  # of bits of a magnitude
LOW = tl.constexpr(255)
ROOM = tl.constexpr(64)  # rows of a list
DIGIT, LEFT, ENTRY, AT_LAST = (tl.constexpr(at) for at in range(4))  # what is found for each rank

_SIZE = 1024  # rows that a program reads
_CHUNK = 1024  # bins or rows of a slot that are read at a time
_EXACT = {"enable_fp_fusion": False}  # as in _rank_triton


@triton.jit
def _read(magnitude, capacity, SIZE: tl.constexpr):
    """Return rows of this program, the bits of their magnitudes, and which have one."""
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(magnitude + row, mask=row < capacity, other=-1.0)
    return row, bits_of(value), value >= 0


@triton.jit
def _tally(counts, at, bits, active):
    """Count one at each place.

    A million additions to one address take their turns. Ties are at the largest magnitude, which new rows are given, or
    at zero, as a rule: a program adds up who shares a place with its largest and with its smallest.
    """
    packed = (bits.to(tl.int64) << 32) | at
    for end in tl.static_range(2):
        if end == 0:
            chosen = tl.min(tl.where(active, packed, NONE), 0)
        else:
            chosen = tl.max(tl.where(active, packed, -1), 0)
        together = active & (at == (chosen & ROW))
        number = tl.sum(together.to(tl.int32), 0)
        tl.atomic_add(counts + (chosen & ROW), number, mask=number > 0, sem="relaxed")
        active &= ~together
    tl.atomic_add(counts + at, 1, mask=active, sem="relaxed")


@triton.jit
def _find(counts, left, BINS: tl.constexpr, SIZE: tl.constexpr):
    """Return in which bin the key lies that ``left`` others precede, and how many precede it there."""
    found, before, seen = left * 0, left * 0, left * 0
    for start in range(0, BINS, SIZE):
        here = tl.load(counts + start + tl.arange(0, SIZE))
        ends = tl.cumsum(here, 0) + seen
        below = ends <= left
        found += tl.sum(below.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(below, ends, 0), 0))
        seen += tl.sum(here, 0)
    return tl.minimum(found, BINS - 1), left - before  # beyond the last bin if there are no rows


@triton.jit
def _count_first(magnitude, capacity, first, slots1, SIZE: tl.constexpr):
    _, bits, there = _read(magnitude, capacity, SIZE)
    counts = tl.histogram(bits >> SHIFT1, BINS1, mask=there)
    digit = tl.arange(0, BINS1)
    tl.atomic_add(first + digit, counts, mask=counts > 0, sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(slots1 + digit, 0)


@triton.jit(do_not_specialize=["count", "step"])
def _look_first(
    uniform, numbers, head, weight, count, step, first, slots1, second, slots2, found,
    STRATIFIED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Draw a rank, and find its first digit."""
    number = tl.program_id(0)
    there_are = tl.sum(tl.load(first + tl.arange(0, BINS1)), 0).to(tl.int64)
    at = number + tl.arange(0, 1)
    rank = drawn(uniform, numbers, head, there_are, weight, at, count, step, STRATIFIED, NORM)
    digit, left = _find(first, tl.sum(rank, 0).to(tl.int32) - 1, BINS1, BINS1)
    tl.store(found + DIGIT * count + number, digit)
    tl.store(found + LEFT * count + number, left)
    if tl.atomic_cas(slots1 + digit, 0, number + 1, sem="relaxed") == 0:
        own = number * BINS2 + tl.arange(0, BINS2)
        tl.store(second + own, 0)
        tl.store(slots2 + own, 0)


@triton.jit
def _count_second(magnitude, capacity, slots1, second, SIZE: tl.constexpr):
    _, bits, there = _read(magnitude, capacity, SIZE)
    slot = tl.load(slots1 + (bits >> SHIFT1), mask=there, other=0) - 1
    _tally(second, slot * BINS2 + ((bits >> SHIFT2) & (BINS2 - 1)), bits, slot >= 0)


@triton.jit(do_not_specialize=["count"])
def _look_second(
    slots1, second, slots2, found, listed, third, count, BINS3: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Find a rank's second digit. A slot of many rows is entered with its sign changed."""
    number = tl.program_id(0)
    slot = tl.load(slots1 + tl.load(found + DIGIT * count + number)) - 1
    digit, left = _find(second + slot * BINS2, tl.load(found + LEFT * count + number), BINS2, BINS2)
    entry = slot * BINS2 + digit
    tl.store(found + ENTRY * count + number, entry)
    tl.store(found + AT_LAST * count + number, left)
    many = tl.load(second + entry) > ROOM
    if tl.atomic_cas(slots2 + entry, 0, tl.where(many, -number - 1, number + 1), sem="relaxed") == 0:
        tl.store(listed + number, 0)
        if many:
            for start in range(0, BINS3, SIZE):
                tl.store(third + number * BINS3 + start + tl.arange(0, SIZE), 0)


@triton.jit
def _third(
    magnitude, capacity, slots1, slots2, listed, lists, third,
    BLOCK: tl.constexpr, BINS3: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """List the rows of slots that have few, count the third digit of others."""
    row, bits, there = _read(magnitude, capacity, SIZE)
    slot = tl.load(slots1 + (bits >> SHIFT1), mask=there, other=0) - 1
    entry = slot * BINS2 + ((bits >> SHIFT2) & (BINS2 - 1))
    slot = tl.load(slots2 + entry, mask=slot >= 0, other=0)
    few, many = slot > 0, slot < 0
    place = tl.atomic_add(listed + slot - 1, 1, mask=few, sem="relaxed")
    tl.store(lists + (slot - 1) * ROOM + place, (bits.to(tl.int64) << 32) | row, mask=few)
    if tl.max(many.to(tl.int32), 0) > 0:
        digit = (bits & LOW) * (BINS3 // (LOW + 1)) + (row >> BLOCK)
        _tally(third, (-slot - 1) * BINS3 + digit, bits, many)


@triton.jit
def _of_list(keys, there_are, left):
    """Return the row of the key that ``left`` others of a list precede."""
    at = tl.arange(0, ROOM)
    key = tl.load(keys + at, mask=at < there_are, other=NONE)
    before = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)
    return tl.sum(tl.where((before == left) & (key != NONE), key & ROW, 0), 0)


@triton.jit
def _of_rows(magnitude, capacity, start, wanted, left, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Return the row of one magnitude that ``left`` others of it precede from ``start`` on."""
    row = tl.zeros([SIZE], tl.int64)
    for chunk in range(0, 2**BLOCK, SIZE):
        at = start + chunk + tl.arange(0, SIZE)
        value = tl.load(magnitude + at, mask=at < capacity, other=-1.0)
        same = (value >= 0) & (bits_of(value) == wanted)
        row += tl.where(same & (tl.cumsum(same.to(tl.int32), 0) == left + 1), at, 0)
        left -= tl.sum(same.to(tl.int32), 0)
    return tl.sum(row, 0)


@triton.jit(do_not_specialize=["count"])
def _finish(
    magnitude, capacity, first, slots2, found, listed, lists, third, index, count,
    BLOCK: tl.constexpr, BINS3: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    entry, left = tl.load(found + ENTRY * count + number), tl.load(found + AT_LAST * count + number)
    slot = tl.load(slots2 + entry)
    if slot > 0:
        row = _of_list(lists + (slot - 1) * ROOM, tl.load(listed + slot - 1), left)
    else:
        digit, left = _find(third + (-slot - 1) * BINS3, left, BINS3, SIZE)
        blocks = BINS3 // (LOW + 1)
        wanted = tl.load(found + DIGIT * count + number) << SHIFT1
        wanted += ((entry & (BINS2 - 1)) << SHIFT2) + digit // blocks
        row = _of_rows(magnitude, capacity, (digit % blocks) << BLOCK, wanted, left, BLOCK, SIZE)
    tl.store(index + number, row)
    if number == 0:  # for the next draw
        tl.store(first + tl.arange(0, BINS1), 0)


def digits_of_rows(capacity: int) -> tuple[int, int]:
    """Return how many bits of a row are left to the end (BLOCK), and how many bins the third digit has."""
    bits = (capacity - 1).bit_length()
    block = (bits + 9) // 2  # so that there are about as many rows to look through as bins
    return block, 2 ** (8 + max(0, bits - block))


def draw(
    on_device: Any, magnitude: Tensor, first: Tensor, uniform: Tensor, stratified: bool, norm: str | None
) -> tuple[Tensor, Tensor]:
    """Do as :meth:`rlbuf_td.kernels.rank_order.RankOrder.draw`, by the law that the device has.

    ``first`` is ``[2048]`` int32, zero before and after.
    """
    count, capacity = uniform.shape[0], magnitude.shape[0]
    block, bins = digits_of_rows(capacity)
    index, weight, norm_of = outputs(uniform, norm)

    def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=uniform.device)

    slots1, slots2, second, third = (
        room(*shape) for shape in ((BINS1.value,), (count, BINS2.value), (count, BINS2.value), (count, bins))
    )
    found, listed, lists = room(4, count), room(count), room(count, ROOM.value, dtype=torch.int64)
    lasting, law = (listed, lists, third), (on_device.numbers.tensor, on_device.head)
    last = {"BLOCK": block, "BINS3": bins}
    size, wide = min(bins, _CHUNK), 4 * _SIZE  # wide: the counts of a program are added to all for fewer times
    by_rows, by_ranks = (triton.cdiv(capacity, _SIZE),), (count,)
    with launching_on(uniform):
        _count_first[(triton.cdiv(capacity, wide),)](
            magnitude, capacity, first, slots1, SIZE=wide, num_warps=8, **_EXACT
        )
        _look_first[by_ranks](
            *(uniform, *law, weight, count, step_of(count, stratified), first, slots1, second, slots2, found),
            STRATIFIED=stratified,
            NORM=norm_of,
            **_EXACT,
        )
        _count_second[by_rows](magnitude, capacity, slots1, second, SIZE=_SIZE, **_EXACT)
        _look_second[by_ranks](slots1, second, slots2, found, listed, third, count, BINS3=bins, SIZE=size, **_EXACT)
        _third[by_rows](magnitude, capacity, slots1, slots2, *lasting, **last, SIZE=_SIZE, **_EXACT)
        _finish[by_ranks](
            *(magnitude, capacity, first, slots2, found, *lasting, index, count), **last, SIZE=size, **_EXACT
        )
    return index, normed(weight)
