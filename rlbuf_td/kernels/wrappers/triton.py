"""Sums of rewards, windows and hindsight goals on a GPU, one launch each.

How far the episode of a row reaches follows from ``numbers``, see
:mod:`rlbuf_td.kernels.episodes`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.draws.triton import uniform_number
from rlbuf_td.kernels.episodes import STEPS
from rlbuf_td.kernels.launches import blocks_of, launch, philox_start
from rlbuf_td.kernels.rows.words import WIDE
from rlbuf_td.kernels.serials import Serials
from rlbuf_td.kernels.wrappers.records import (
    Expanded,
    GoalDistribution,
    Goals,
    Rewards,
    Sums,
    WindowShape,
)

_ROWS = 128  # per program
_GOALS, _WORDS = 32, 16  # goals per program, and how many words it copies at once
_CHANGING = ["count", "row_bytes", "offset", "elements", "tail", "written", "steps"]
_CHANGING += ["lanes", "n", "gamma", "length", "burn_in", "size", "goal", "next_goal"]
_CHANGING += ["seed", "first", "live", "future", "final", "episode", "random"]
_CHANGING += ["log_gamma"]
_STEPS = tl.constexpr(STEPS)
# closer to 0, ``exp`` rounds too much, and the steps are equally likely
_LEAST_EXPONENT = tl.constexpr(-1e-8)


@triton.jit
def _numbers_of(numbers, cell, is_row, tail, written, steps, lanes):
    """Return the slot and the lane of each row, ``back`` and ``rows_to_end``, and how
    many stored rows of its lane are before and after it."""
    slot, lane = cell // lanes, cell % lanes
    pair = numbers + 2 * (lane * steps + slot)
    back = tl.load(pair, mask=is_row, other=0).to(tl.int64) & _STEPS
    rows_to_end = tl.load(pair + 1, mask=is_row, other=0).to(tl.int64)
    age = (written - 1 - slot) % steps
    age = tl.where(age < 0, age + steps, age)
    return slot, lane, back, rows_to_end, written - 1 - tail - age, age


@triton.jit
def _cell_after(slot, lane, offset, steps, lanes):
    """Return the cell ``offset`` time steps after a row, at most one round of its
    lane."""
    after = (slot + offset) % steps
    return tl.where(after < 0, after + steps, after) * lanes + lane


@triton.jit(do_not_specialize=_CHANGING)
def _sum(
    rows,
    cells,
    numbers,
    ends,
    taken,
    totals,
    count: tl.int64,
    row_bytes: tl.int64,
    offset: tl.int64,
    elements: tl.int64,
    tail: tl.int64,
    written: tl.int64,
    steps: tl.int64,
    lanes: tl.int64,
    n: tl.int32,
    gamma: tl.float64,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = i < count
    cell = tl.load(cells + i, mask=is_row, other=0)
    slot, lane, _, rows_to_end, _, after = _numbers_of(
        numbers, cell, is_row, tail, written, steps, lanes
    )
    last = tl.minimum(tl.where(rows_to_end > 0, rows_to_end - 1, after), n - 1)
    element = tl.program_id(1)
    is_summed = is_row & (element < elements)
    total, power = tl.zeros((ROWS,), tl.float64), tl.zeros((), tl.float64) + 1.0
    for step in range(0, n):
        row = _cell_after(slot, lane, step, steps, lanes)
        address = rows.to(tl.int64) + row * row_bytes + offset + element * SIZE
        address = address.to(totals.dtype)
        reward = tl.load(address, mask=is_summed & (step <= last), other=0.0)
        total += reward.to(tl.float64) * power
        power *= gamma
    tl.store(totals + i * elements + element, total, mask=is_summed)
    is_first = is_row & (element == 0)
    end = _cell_after(slot, lane, last, steps, lanes)
    tl.store(ends + i, end, mask=is_first)
    tl.store(taken + i, last + 1, mask=is_first)


def sum_steps(
    rewards: Rewards,
    cells: Tensor,
    numbers: Tensor,
    serials: Serials,
    n: int,
    gamma: float,
) -> Sums:
    """Write the sums of the rewards of at most ``n`` rows from each cell on, within its
    episode, in one launch.

    ``numbers`` are those of :mod:`rlbuf_td.kernels.episodes`.
    """
    rows, offset, total = rewards
    count, elements = len(cells), total[:1].numel()
    ends, taken = torch.empty_like(cells), torch.empty_like(cells)
    row_bytes = rows.stride(0) * rows.element_size()
    # no sum has more rewards than a lane has rows
    n = min(n, serials.steps)
    if count:
        launch(
            _sum,
            (blocks_of(count, _ROWS), max(1, elements)),
            rows,
            *(cells, numbers, ends, taken, total),
            *(count, row_bytes, offset, elements, *serials, n, gamma),
            SIZE=total.element_size(),
            ROWS=_ROWS,
        )
    return Sums(ends, taken)


@triton.jit(do_not_specialize=_CHANGING)
def _expand(
    anchors,
    numbers,
    flat,
    index,
    mask,
    burn_in_mask,
    first_rows,
    last_rows,
    count: tl.int64,
    length: tl.int64,
    burn_in: tl.int64,
    tail: tl.int64,
    written: tl.int64,
    steps: tl.int64,
    lanes: tl.int64,
    SHIFTS: tl.constexpr,
    CROSSES: tl.constexpr,
    IS_PAIR: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    window, is_row = burn_in + length, row < count
    position = row % window
    anchor = tl.load(anchors + row // window, mask=is_row, other=0)
    slot, lane, back, rows_to_end, before, after = _numbers_of(
        numbers, anchor, is_row, tail, written, steps, lanes
    )
    if not CROSSES:
        before = tl.minimum(back, before)
        after = tl.where(rows_to_end > 0, rows_to_end - 1, after)
    wanted = position - burn_in
    if SHIFTS:
        wanted -= tl.minimum(tl.maximum(length - 1 - after, 0), before)
    offset = tl.maximum(tl.minimum(wanted, after), -before)
    cell = _cell_after(slot, lane, offset, steps, lanes)
    is_real = offset == wanted
    begins = offset == -before
    if CROSSES:
        _, _, back, _, _, _ = _numbers_of(
            numbers, cell, is_row, tail, written, steps, lanes
        )
        begins = begins | (back == 0)
    ends = (position == window - 1) | (offset == after)
    tl.store(flat + row, cell, mask=is_row)
    tl.store(mask + row, is_real, mask=is_row)
    tl.store(burn_in_mask + row, position < burn_in, mask=is_row)
    tl.store(first_rows + row, (position == 0) | (is_real & begins), mask=is_row)
    tl.store(last_rows + row, is_real & ends, mask=is_row)
    if IS_PAIR:
        tl.store(index + 2 * row, slot, mask=is_row)
        tl.store(index + 2 * row + 1, lane, mask=is_row)
    else:
        tl.store(index + row, anchor, mask=is_row)


def expand(
    anchors: Tensor,
    numbers: Tensor,
    serials: Serials,
    shape: WindowShape,
    *,
    has_pairs: bool,
) -> Expanded:
    """Return the rows of the window around each anchor, in one launch.

    If ``has_pairs``, each row has the slot and the lane of its anchor. ``numbers`` are
    those of :mod:`rlbuf_td.kernels.episodes`.
    """
    count = len(anchors) * shape.window
    flags = {"dtype": torch.bool, "device": anchors.device}
    flat = anchors.new_empty(count)
    index = anchors.new_empty((count, 2) if has_pairs else count)
    masks = [torch.empty(count, **flags) for _ in range(4)]
    if count:
        launch(
            _expand,
            (blocks_of(count, _ROWS),),
            anchors,
            *(numbers, flat, index, *masks),
            *(count, shape.length, shape.burn_in, *serials),
            SHIFTS=shape.shifts,
            CROSSES=shape.crosses,
            IS_PAIR=has_pairs,
            ROWS=_ROWS,
        )
    return Expanded(flat, index, *masks)


@triton.jit
def _share(uniform, begin, end):
    """Return where a number lies between two thresholds, 0 to 1."""
    share = (uniform - begin) / tl.where(begin < end, end - begin, 1.0)
    return tl.minimum(tl.maximum(share, 0.0), 1.0)


@triton.jit
def _steps_to_goal(uniform, back, ahead, future, final, episode, log_gamma):
    """Return how many steps after each row its new goal is, see ``choose_goals``."""
    share = _share(uniform, future * 0, future)
    exponent = log_gamma * (ahead + 1)
    is_discounted = exponent < _LEAST_EXPONENT
    exponent = tl.where(is_discounted, exponent, -1.0)
    power = tl.log(1.0 + share * (tl.exp(exponent) - 1.0))
    soon = power / tl.where(is_discounted, log_gamma, 1.0)
    soon = tl.where(is_discounted, soon, share * (ahead + 1)).to(tl.int64)
    around = (_share(uniform, final, episode) * (back + ahead + 1)).to(tl.int64)
    around = tl.minimum(around, back + ahead) - back
    others = tl.where(uniform < final, ahead, around)
    return tl.where(uniform < future, tl.minimum(soon, ahead), others)


@triton.jit
def _copy_goals(
    rows,
    goals,
    i,
    is_new,
    size,
    WORD: tl.constexpr,
    BYTES: tl.constexpr,
    WORDS: tl.constexpr,
):
    for start in range(0, size, WORDS * BYTES):
        inside = start + BYTES * tl.arange(0, WORDS)
        is_word = is_new[:, None] & (inside < size)[None, :]
        source = (rows[:, None] + inside[None, :]).to(tl.pointer_type(WORD))
        target = (goals + i[:, None] * size + inside[None, :]).to(tl.pointer_type(WORD))
        tl.store(target, tl.load(source, mask=is_word), mask=is_word)


@triton.jit(do_not_specialize=_CHANGING)
def _relabel(
    rows,
    drawn,
    owner,
    numbers,
    relabeled,
    goal: tl.int64,
    next_goal: tl.int64,
    count: tl.int64,
    row_bytes: tl.int64,
    offset: tl.int64,
    size: tl.int64,
    seed: tl.int64,
    first: tl.int64,
    live: tl.int64,
    tail: tl.int64,
    written: tl.int64,
    steps: tl.int64,
    lanes: tl.int64,
    future: tl.float64,
    final: tl.float64,
    episode: tl.float64,
    random: tl.float64,
    log_gamma: tl.float64,
    ONLY_FINISHED: tl.constexpr,
    IS_OWNED: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    WORD: tl.constexpr,
    BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row, number = i < count, i
    if IS_OWNED:
        number = tl.load(owner + i, mask=is_row, other=0)
    cell = tl.load(drawn + number, mask=is_row, other=0)
    uniform = uniform_number(seed, first + number)
    slot, lane, back, rows_to_end, before, after = _numbers_of(
        numbers, cell, is_row, tail, written, steps, lanes
    )
    back = tl.minimum(back, before)
    ahead = tl.where(rows_to_end > 0, rows_to_end - 1, after)
    is_random = uniform >= episode
    is_new = is_row & (uniform < random)
    if ONLY_FINISHED:
        is_new = is_new & ((rows_to_end > 0) | is_random)
    there = _steps_to_goal(uniform, back, ahead, future, final, episode, log_gamma)
    chosen = _cell_after(slot, lane, there, steps, lanes)
    any_row = (_share(uniform, episode, random) * live).to(tl.int64)
    chosen = tl.where(is_random, tl.minimum(any_row, live - 1), chosen)
    tl.store(relabeled + i, is_new, mask=is_row)
    source = rows.to(tl.int64) + chosen * row_bytes + offset
    _copy_goals(source, goal, i, is_new, size, WORD, BYTES, WORDS)
    if HAS_NEXT:
        _copy_goals(source, next_goal, i, is_new, size, WORD, BYTES, WORDS)


def relabel_(
    goals: Goals,
    drawn: Tensor,
    owner: Tensor | None,
    numbers: Tensor,
    serials: Serials,
    distribution: GoalDistribution,
    generator: torch.Generator | None,
) -> Tensor:
    """Choose goals as ``choose_goals`` does, for the rows ``drawn``, ``[n]``, and copy
    them, in one launch; return a mask of the rows that get one, ``[B]``.

    Row ``i`` of the batch has the goal of the drawn row ``owner[i]``, or ``i`` if
    ``owner`` is None. ``numbers`` are those of :mod:`rlbuf_td.kernels.episodes`.
    """
    rows, offset, leaves, live = goals
    drawn = drawn.contiguous()
    count = len(leaves[0])
    relabeled = torch.empty(count, dtype=torch.bool, device=drawn.device)
    seed, first = philox_start(generator, drawn.device, len(drawn))
    size = leaves[0][:1].nbytes
    is_wide = not (size % WIDE or offset % WIDE)
    word: Any = tl.int32 if is_wide else tl.uint8
    row_bytes = rows.stride(0) * rows.element_size()
    if count:
        launch(
            _relabel,
            (blocks_of(count, _GOALS),),
            rows,
            *(drawn, drawn if owner is None else owner, numbers, relabeled),
            *(leaves[0].data_ptr(), leaves[-1].data_ptr(), count),
            *(row_bytes, offset, size, seed, first, live),
            *(*serials, *distribution.thresholds, distribution.log_gamma),
            ONLY_FINISHED=distribution.only_finished,
            IS_OWNED=owner is not None,
            HAS_NEXT=len(leaves) > 1,
            WORD=word,
            BYTES=WIDE if is_wide else 1,
            ROWS=_GOALS,
            WORDS=_WORDS,
        )
    return relabeled
