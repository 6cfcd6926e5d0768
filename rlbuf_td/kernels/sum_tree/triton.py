"""Proportional draws and updates of priorities on a GPU.

The weights lie in blocks of :data:`WEIGHTS`. ``blocks``, ``[2, blocks]`` float64, has
the sum of each block, and the smallest positive weight in it (infinite if there is
none). A draw scans the sums, then the weights of one block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.draws.triton import serial_of, uniform_number
from rlbuf_td.kernels.launches import (
    blocks_of,
    launch,
    philox_start,
)
from rlbuf_td.kernels.serials import Serials
from rlbuf_td.kernels.strata import BY_BATCH, BY_BUFFER, FIRST, Stratification
from rlbuf_td.kernels.sum_tree.blocks import WEIGHTS, BlockUpdate, Run, WeightLaw

_ROWS, _OTHERS = 32, 256  # updates per program, and with how many it compares them
_CHANGING = ["seed", "first", "batch", "step", "blocks_count", "rows", "beta", "newest"]
_CHANGING += ["steps", "lanes", "alpha", "eps", "least", "tail", "written", "count"]
_CHANGING += ["size", "initial"]
_FIRST = tl.constexpr(FIRST)
_SMALLEST, _LARGEST = tl.constexpr(2.0**-126), tl.constexpr(2.0**126)
_MOST = tl.constexpr(torch.finfo(torch.float32).max)
_BY_BUFFER = tl.constexpr(BY_BUFFER)
_INFINITE = tl.constexpr(float("inf"))


@triton.jit
def _power(base, exponent):
    """Return ``base ** exponent`` of positive float64 numbers."""
    return tl.exp2(exponent * tl.log2(base))


@triton.jit
def _weight_of(magnitude, alpha, eps):
    """See ``weight_of`` of this folder; ``magnitude`` is float32, not negative."""
    priority = magnitude.to(tl.float64) + eps
    is_positive = priority > 0
    weight = _power(tl.where(is_positive, priority, 1.0), alpha)
    weight = tl.minimum(tl.maximum(weight, _SMALLEST), _LARGEST)
    of_zero = tl.where(alpha == 0, 1.0, 0.0)
    return tl.where(is_positive, weight, of_zero).to(tl.float32)


@triton.jit
def _pick(values, mass):
    """Return the last positive value before which the sum is at most ``mass``.

    The first positive value has the sum 0 before it: rounding never leads to a value
    of 0.
    """
    before = tl.cumsum(values, 0) - values
    position = tl.arange(0, values.shape[0])
    is_before = (values > 0) & (before <= tl.maximum(mass, 0.0))
    return tl.max(tl.where(is_before, position, 0), 0)


@triton.jit
def _totals(blocks, blocks_count, lane, BLOCK: tl.constexpr):
    """Return the sum and the smallest of all weights."""
    total = tl.zeros((), tl.float64)
    smallest = tl.zeros((), tl.float64) + _INFINITE
    for start in range(0, blocks_count, BLOCK):
        is_block = start + lane < blocks_count
        total += tl.sum(tl.load(blocks + start + lane, mask=is_block, other=0.0), 0)
        least = blocks + blocks_count + start + lane
        least = tl.min(tl.load(least, mask=is_block, other=_INFINITE), 0)
        smallest = tl.minimum(smallest, least)
    return total, smallest


@triton.jit
def _block_at(blocks, blocks_count, mass, lane, BLOCK: tl.constexpr):
    """Return the block of weights at a cumulative weight, and what remains of the
    cumulative weight in this block."""
    here, before = tl.zeros((), tl.int32), tl.zeros((), tl.float64)
    rest = mass
    for start in range(0, blocks_count, BLOCK):
        is_block = start + lane < blocks_count
        part = tl.sum(tl.load(blocks + start + lane, mask=is_block, other=0.0), 0)
        is_here = (part > 0) & (before <= mass)
        here = tl.where(is_here, start, here)
        rest = tl.where(is_here, mass - before, rest)
        before += part
    is_block = here + lane < blocks_count
    sums = tl.load(blocks + here + lane, mask=is_block, other=0.0)
    block = _pick(sums, rest)
    rest -= tl.sum(tl.where(lane < block, sums, 0.0), 0)
    return here + block, rest


@triton.jit(do_not_specialize=_CHANGING)
def _draw(
    weight,
    blocks,
    flat,
    importance,
    stamp,
    size: tl.int64,
    blocks_count: tl.int32,
    seed: tl.int64,
    first: tl.int64,
    batch: tl.int64,
    step: tl.int64,
    rows: tl.float64,
    beta: tl.float64,
    written: tl.int64,
    steps: tl.int64,
    lanes: tl.int64,
    NORM: tl.constexpr,
    IS_STAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    draw, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total, smallest = _totals(blocks, blocks_count, lane, BLOCK)
    uniform = uniform_number(seed, first + draw)
    mass = uniform * total
    if step > 0:  # stratified, see ``strata.masses``
        begin = (uniform_number(seed, first) * _FIRST).to(tl.int64)
        segment = (begin + draw * step) % batch
        mass = (segment.to(tl.float64) + uniform) * (total / batch.to(tl.float64))
    block, rest = _block_at(blocks, blocks_count, mass, lane, BLOCK)
    start = block.to(tl.int64) * BLOCK
    is_weight = start + lane < size
    weights = tl.load(weight + start + lane, mask=is_weight, other=0.0)
    weights = weights.to(tl.float64)
    position = _pick(weights, rest)
    cell = start + position
    chosen = tl.sum(tl.where(lane == position, weights, 0.0), 0)
    tl.store(flat + draw, cell)
    if IS_STAMPED:
        tl.store(stamp + draw, serial_of(cell, written, steps, lanes))
    unit = smallest if NORM == _BY_BUFFER else total / rows
    ratio = tl.where(chosen > 0, chosen / unit, 1.0)
    tl.store(importance + draw, _power(ratio, -beta).to(tl.float32))


def draw(
    tree: Any,
    batch: int,
    generator: torch.Generator | None,
    law: Stratification,
    rows: int,
    serials: Serials | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw as ``sum_tree.draw`` does, with random numbers of ``generator``, in one
    launch.

    Returns:
        Rows, importance weights, and the serials of the rows; None without ``serials``.
    """
    device = tree.weight.device
    flat = torch.empty(batch, dtype=torch.int64, device=device)
    importance = torch.empty(batch, dtype=torch.float32, device=device)
    stamp = None if serials is None else torch.empty_like(flat)
    _, *newest = serials or Serials(0, 0, 1, 1)
    seed, first = philox_start(generator, device, batch)
    if batch:
        launch(
            _draw,
            (batch,),
            tree.weight,
            *(tree.blocks, flat, importance, flat if stamp is None else stamp),
            *(len(tree.weight), tree.blocks.shape[1], seed, first, batch),
            *(law.step, float(rows), float(law.beta), *newest),
            NORM=law.norm,
            IS_STAMPED=stamp is not None,
            BLOCK=WEIGHTS,
        )
    if law.norm == BY_BATCH:
        chosen = tree.weight[flat].to(torch.float64)
        importance = (chosen / chosen.amin()).pow(-law.beta).to(torch.float32)
    return flat, importance, stamp


@triton.jit
def _read(
    index,
    td_error,
    stamp,
    i,
    count,
    rows,
    tail,
    written,
    steps,
    lanes,
    least,
    IS_STAMPED: tl.constexpr,
):
    """Return cells and magnitudes, and which updates are stale, refused and valid."""
    is_listed = i < count
    cell = tl.load(index + i, mask=is_listed, other=-1)
    size = tl.abs(tl.load(td_error + i, mask=is_listed, other=0.0).to(tl.float64))
    is_row = (cell >= 0) & (cell < rows)
    is_stale = is_row & (cell < 0)
    if IS_STAMPED:
        taken = tl.load(stamp + i, mask=is_listed, other=0)
        is_gone = (taken != serial_of(cell, written, steps, lanes)) | (taken < tail)
        is_stale = is_row & is_gone
    is_row = is_row & (is_stale == 0)
    is_finite = size < _INFINITE
    magnitude = tl.minimum(tl.maximum(size, least), _MOST).to(tl.float32)
    return cell, magnitude, is_stale, is_row & (is_finite == 0), is_row & is_finite


@triton.jit(do_not_specialize=_CHANGING)
def _set(
    magnitude,
    weight,
    index,
    td_error,
    stamp,
    largest,
    refused,
    stale,
    count: tl.int32,
    rows: tl.int64,
    tail: tl.int64,
    written: tl.int64,
    steps: tl.int64,
    lanes: tl.int64,
    alpha: tl.float64,
    eps: tl.float64,
    least: tl.float64,
    COUNTS: tl.constexpr,
    IS_STAMPED: tl.constexpr,
    ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cell, size, _, _, is_valid = _read(
        *(index, td_error, stamp, i, count, rows),
        *(tail, written, steps, lanes, least, IS_STAMPED),
    )
    last, most = tl.full((ROWS,), -1, tl.int32), tl.zeros((), tl.float32) - 1.0
    stale_count, refused_count = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, count, OTHERS):
        j = start + tl.arange(0, OTHERS)
        other, others_size, is_stale, is_refused, is_other = _read(
            *(index, td_error, stamp, j, count, rows),
            *(tail, written, steps, lanes, least, IS_STAMPED),
        )
        is_same = is_other[None, :] & (other[None, :] == cell[:, None])
        last = tl.maximum(last, tl.max(tl.where(is_same, j[None, :], -1), 1))
        most = tl.maximum(most, tl.max(tl.where(is_other, others_size, -1.0), 0))
        stale_count += tl.sum(is_stale.to(tl.int64), 0)
        refused_count += tl.sum(is_refused.to(tl.int64), 0)
    is_last = is_valid & (last == i)
    tl.store(magnitude + cell, size, mask=is_last)
    tl.store(weight + cell, _weight_of(size, alpha, eps), mask=is_last)
    if tl.program_id(0) == 0:
        tl.store(refused, tl.load(refused) + refused_count)
        if COUNTS:
            tl.store(largest, tl.maximum(tl.load(largest), most))
        if IS_STAMPED:
            tl.store(stale, stale_count)


@triton.jit
def _store_block(blocks, blocks_count, block, weights):
    weights = weights.to(tl.float64)
    tl.store(blocks + block, tl.sum(weights, 0))
    least = tl.min(tl.where(weights > 0, weights, _INFINITE), 0)
    tl.store(blocks + blocks_count + block, least)


@triton.jit(do_not_specialize=_CHANGING)
def _enter(
    magnitude,
    weight,
    blocks,
    largest,
    blocks_count: tl.int32,
    first: tl.int64,
    count: tl.int64,
    size: tl.int64,
    alpha: tl.float64,
    eps: tl.float64,
    least: tl.float64,
    initial: tl.float64,
    BLOCK: tl.constexpr,
):
    block = (first // BLOCK + tl.program_id(0)) % ((size + BLOCK - 1) // BLOCK)
    cell = block * BLOCK + tl.arange(0, BLOCK)
    age = tl.where(cell < first, cell + size - first, cell - first)
    is_new = (age < count) & (cell < size)
    seen = tl.load(largest).to(tl.float64)
    value = tl.where(seen < 0, tl.zeros((), tl.float64) + initial, seen)
    value = tl.maximum(value, least).to(tl.float32) + tl.zeros((BLOCK,), tl.float32)
    tl.store(magnitude + cell, value, mask=is_new)
    old = tl.load(weight + cell, mask=cell < size, other=0.0)
    weights = tl.where(is_new, _weight_of(value, alpha, eps), old)
    tl.store(weight + cell, weights, mask=is_new)
    _store_block(blocks, blocks_count, block, weights)


@triton.jit(do_not_specialize=_CHANGING)
def _sum(
    weight,
    blocks,
    index,
    size: tl.int64,
    blocks_count: tl.int32,
    IS_LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    if IS_LISTED:
        cell = tl.load(index + block)
        block = tl.where((cell >= 0) & (cell < size), cell, 0) // BLOCK
    i = block * BLOCK + tl.arange(0, BLOCK)
    weights = tl.load(weight + i, mask=i < size, other=0.0)
    _store_block(blocks, blocks_count, block, weights)


def update_(
    tree: Any, update: BlockUpdate, largest: Tensor, law: WeightLaw, *, counts: bool
) -> Tensor | None:
    """Update as ``sum_tree.update_`` does, in two launches; stale updates are skipped,
    too.

    If ``counts``, magnitudes can increase ``largest``, 0-dim float32. Return the number
    of stale updates, 0-dim; None without stamps.
    """
    index, td_error, stamp, rows, serials = update
    count = index.shape[0]
    stale = None if stamp is None else torch.empty_like(tree.refused)
    launch(
        _set,
        (blocks_of(count, _ROWS),),
        tree.magnitude,
        *(tree.weight, index, td_error, index if stamp is None else stamp, largest),
        *(tree.refused, tree.refused if stale is None else stale),
        *(count, rows, *(serials or Serials(0, 0, 1, 1))),
        *(law.alpha, law.eps, law.least),
        COUNTS=counts,
        IS_STAMPED=stamp is not None,
        ROWS=_ROWS,
        OTHERS=_OTHERS,
    )
    sum_blocks_(tree, index)
    return stale


def enter_(tree: Any, run: Run, largest: Tensor, law: WeightLaw) -> None:
    """Give new rows the magnitude ``largest``, 0-dim float32, or ``law.first`` if that
    is below 0, in one launch."""
    first, count, size = run
    blocks = blocks_of(size, WEIGHTS)
    programs = blocks_of(first % WEIGHTS + count, WEIGHTS) + (first + count > size)
    launch(
        _enter,
        (min(blocks, programs),),
        tree.magnitude,
        *(tree.weight, tree.blocks, largest, tree.blocks.shape[1]),
        *(first, count, size, *law),
        BLOCK=WEIGHTS,
    )


def sum_blocks_(tree: Any, index: Tensor | None = None) -> None:
    """Sum the blocks that hold the rows ``index`` again; None: all blocks."""
    size, count = len(tree.weight), tree.blocks.shape[1]
    is_listed = index is not None and len(index) < count
    launch(
        _sum,
        (len(index) if is_listed else count,),
        tree.weight,
        *(tree.blocks, index if is_listed else tree.blocks, size, count),
        IS_LISTED=is_listed,
        BLOCK=WEIGHTS,
    )
