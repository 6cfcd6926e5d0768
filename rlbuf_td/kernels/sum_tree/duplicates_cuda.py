"""Batches of priorities on a GPU, in which a row may be named more than once: the last mention of a row writes it.

All programs wait for nothing but a launch. Every mention claims its row for its position in the batch, and the greatest
wins; then winners write and give their claims back. One program does both in one launch, several in two.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

ONE_PROGRAM = 1024  # mentions that one program takes


@triton.jit
def mentions(index, td_error, count, rows, SIZE: tl.constexpr):
    """Return positions, rows and magnitudes (float64) of mentions, and which name a row, and which are valid, too."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.load(index + at, mask=at < count, other=-1)
    error = tl.abs(tl.load(td_error + at, mask=at < count, other=0.0).to(tl.float64))
    named = (row >= 0) & (row < tl.load(rows).to(tl.int64))
    return at, row, error, named, named & (error < float("inf"))  # NaN is not


@triton.jit
def winners(claims, row, at, valid, CLAIM: tl.constexpr, WRITE: tl.constexpr):
    """Let valid mentions claim their rows, or return which of them have won, or both."""
    wins = valid
    if CLAIM:
        tl.atomic_max(claims + row, at, mask=valid, sem="relaxed")
    if CLAIM and WRITE:
        tl.debug_barrier()
    if WRITE:
        # A winner gives its claim back at once: who reads it later finds -1, which is not its position either.
        wins = valid & (tl.load(claims + row, mask=valid, other=-1, cache_modifier=".cg") == at)
        tl.store(claims + row, -1, mask=wins)
    return wins


@triton.jit
def take_note(largest, refused, magnitude, named, valid):
    """Remember the largest valid magnitude (float64), and count the rows that were named with an invalid one."""
    tl.atomic_max(largest, tl.max(tl.where(valid, magnitude, -1.0), 0), sem="relaxed")
    tl.atomic_add(refused, tl.sum((named & ~valid).to(tl.int64), 0), sem="relaxed")


def passes(count: int) -> list[tuple[tuple[int], dict[str, Any]]]:
    """Return the grid and the options of each launch that a batch of so many mentions takes."""
    if count <= ONE_PROGRAM:
        # No more threads than mentions: a second thread with the same one might read a claim that is given back.
        size = max(32, triton.next_power_of_2(count))
        return [((1,), {"CLAIM": True, "WRITE": True, "SIZE": size, "num_warps": min(8, size // 32)})]
    grid = (triton.cdiv(count, 256),)
    return [(grid, {"CLAIM": first, "WRITE": not first, "SIZE": 256}) for first in (True, False)]
