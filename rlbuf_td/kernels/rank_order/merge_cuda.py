"""The GPU's kernels of :class:`rlbuf_td.kernels.rank_order.merged.MergedOrder`: a batch is merged into sorted keys.

A change is in three parts, since a launch is the only thing that all programs wait for: (1) who writes a row's
magnitude lists its old key and its new one (:func:`exchange`), (2) torch sorts the lists, (3) :func:`merge` reads the
keys of one half and writes them into the other. Every key finds its own place by counting,

    place = keys below it - keys below it that go + keys below it that come,

so that programs need nothing of each other, and neither ties nor batches that all go to one place are a special case.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.dispatch import launching_on

SIDE, COUNT = tl.constexpr(0), tl.constexpr(1)  # as in merged_order
NONE = tl.constexpr(2**63 - 1)
ROW = tl.constexpr(2**32 - 1)
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)

_SIZE = 1024  # keys that a program moves
_EXACT = {"enable_fp_fusion": False}  # Triton warns where neither is asked for


@triton.jit
def bits_of(magnitude):
    """Return the bits of magnitudes, which ascend as they fall, without the sign."""
    return ~magnitude.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _key_of(magnitude, row):
    """Do as :func:`rlbuf_td.kernels.rank_order.merged.keys_of`."""
    return (bits_of(magnitude).to(tl.int64) << 32) | row


@triton.jit
def exchange(magnitude, row, value, wins, state, lists, at, count):
    """List at ``at`` the keys that go and those that come when rows that win are given values; call it before they are.

    ``lists`` is ``[2, count]`` int64. From here on the state tells of the half that :func:`merge` is to fill.
    """
    before = tl.load(magnitude + row, mask=wins, other=-1.0)
    had = before >= 0
    tl.store(lists + at, tl.where(had, _key_of(before, row), NONE), mask=at < count)
    tl.store(lists + count + at, tl.where(wins, _key_of(value, row), NONE), mask=at < count)
    tl.atomic_add(state + COUNT, tl.sum((wins & ~had).to(tl.int64), 0), sem="relaxed")
    tl.atomic_xor(state + SIDE, 1, mask=tl.program_id(0) == 0, sem="relaxed")


@triton.jit(do_not_specialize=["start", "count"])
def _fill(start, count, entry, magnitude, state, lists, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = (start + at).to(tl.int64)
    value = tl.zeros([SIZE], tl.float32) + tl.minimum(tl.load(entry), LARGEST).to(tl.float32)
    exchange(magnitude, row, value, at < count, state, lists, at, count)
    tl.store(magnitude + row, value, mask=at < count)


@triton.jit
def _below(keys, key, low, high, span):
    """Return how many of ascending keys are below each one of ``key``: ``low`` to ``high``, ``span`` apart at most."""
    low += tl.zeros_like(key)
    high += tl.zeros_like(key)
    while span > 0:
        middle = (low + high) // 2
        goes_on = tl.load(keys + middle, mask=low < high, other=NONE) < key
        low = tl.where(goes_on, middle + 1, low)
        high = tl.where(goes_on, high, middle)
        span = span // 2
    return low


@triton.jit
def _move(old, new, rows, removed, added, count, block, SIZE: tl.constexpr):
    """Move a block of keys, those that go left out."""
    at = block * SIZE + tl.arange(0, SIZE)
    key = tl.load(old + at, mask=at < rows, other=NONE)
    # What goes and comes between the first key of this block and the first of the next is all that its keys look
    # through; nothing, in most blocks, for a small batch.
    edge = block * SIZE + tl.arange(0, 2) * SIZE
    limit = tl.load(old + edge, mask=edge < rows, other=NONE)
    going, coming = _below(removed, limit, 0, count, count), _below(added, limit, 0, count, count)
    first, last = tl.min(going, 0), tl.max(going, 0)
    gone = _below(removed, key, first, last, last - first)
    goes = tl.load(removed + gone, mask=gone < last, other=NONE) == key
    first, last = tl.min(coming, 0), tl.max(coming, 0)
    come = _below(added, key, first, last, last - first)
    tl.store(new + at - gone + come, key, mask=(key != NONE) & ~goes)


@triton.jit
def _insert(old, new, rows, removed, added, count, block, SIZE: tl.constexpr):
    """Put a block of the keys that come between those that stay."""
    at = block * SIZE + tl.arange(0, SIZE)
    key = tl.load(added + at, mask=at < count, other=NONE)
    place = at + _below(old, key, 0, rows, rows) - _below(removed, key, 0, count, count)
    tl.store(new + place, key, mask=key != NONE)


@triton.jit(do_not_specialize=["count"])
def _merge(keys, capacity, state, removed, added, count, SIZE: tl.constexpr):
    """Fill the half that the state names; beyond its rows it holds no keys, for their number has never been greater."""
    side, rows = tl.load(state + SIDE), tl.load(state + COUNT)
    old, new = keys + (1 - side) * capacity, keys + side * capacity
    block, inserting = tl.program_id(0).to(tl.int64), tl.cdiv(count, SIZE)
    if block < inserting:  # these search among all keys, and so begin first
        _insert(old, new, rows, removed, added, count, block, SIZE)
    else:
        _move(old, new, rows, removed, added, count, block - inserting, SIZE)


def fill(magnitude: Tensor, start: int, count: int, entry: Tensor, state: Tensor, lists: Tensor) -> None:
    """Give ``count`` rows from ``start`` on the magnitude ``entry`` (0-dim), as :func:`exchange` does."""
    with launching_on(magnitude):
        _fill[(triton.cdiv(count, 256),)](start, count, entry, magnitude, state, lists, SIZE=256, **_EXACT)


def merge(keys: Tensor, state: Tensor, removed: Tensor, added: Tensor) -> None:
    """Fill the half of ``[2, capacity]`` keys that the state names from the other one.

    ``removed`` and ``added`` are ``[B]`` int64, ascending: the keys that go and those that come.
    """
    capacity, count = keys.shape[1], added.shape[0]
    with launching_on(keys):
        grid = (triton.cdiv(count, _SIZE) + triton.cdiv(capacity, _SIZE),)
        _merge[grid](keys, capacity, state, removed, added, count, SIZE=_SIZE, **_EXACT)
