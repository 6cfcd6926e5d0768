"""GPU twins of :mod:`rlbuf_td.kernels.rows`: rows and parts of rows from one place to another, as bits.

:func:`take_along` gathers in the kernel that has chosen the rows: a launch less, and no waiting between the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.dispatch import launching_on

if TYPE_CHECKING:
    from rlbuf_td.kernels.rows import Gathering

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OPTIONS = {"enable_fp_fusion": True}  # Triton warns where neither is asked for


@triton.jit
def take_along(source, row, out, at, inside, words, stride, WORDS: tl.constexpr):
    """Copy rows that a program has found to its positions ``at`` in the batch, so many words at a time; 0: do not."""
    if WORDS > 0:
        for first in range(0, words, WORDS):
            word = first + tl.arange(0, WORDS)
            here = inside[:, None] & (word < words)[None, :]
            block = tl.load(source + row[:, None] * stride + word[None, :], mask=here)
            tl.store(out + at.to(tl.int64)[:, None] * words + word[None, :], block, mask=here)


@triton.jit(do_not_specialize=["count"])
def _gather(matrix, index, out, count, words, stride, ROWS: tl.constexpr, WORDS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    source = tl.load(index + row, mask=row < count, other=0)
    inside = (row < count)[:, None] & (word < words)[None, :]
    block = tl.load(matrix + source[:, None] * stride + word[None, :], mask=inside)
    tl.store(out + row.to(tl.int64)[:, None] * words + word[None, :], block, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _copy(
    target, target_stride, source, source_stride, index, mask, count, words, ROWS: tl.constexpr, WORDS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    wanted = tl.load(mask + row, mask=row < count, other=0) != 0
    origin = tl.load(index + row, mask=wanted, other=0)
    inside = wanted[:, None] & (word < words)[None, :]
    block = tl.load(source + origin[:, None] * source_stride + word[None, :], mask=inside)
    tl.store(target + row.to(tl.int64)[:, None] * target_stride + word[None, :], block, mask=inside)


def _plan(rows: int, words: int) -> tuple[tuple[int, int], dict[str, int]]:
    # Neighbouring threads read neighbouring words of a row: of rows in page-locked RAM whole lines of 128 bytes then
    # cross the bus, not a request for each word (EMOGI, Min et al. 2020).
    wide = min(1024, triton.next_power_of_2(words))
    tall = max(1, 256 // wide)
    return (triton.cdiv(rows, tall), triton.cdiv(words, wide)), {"ROWS": tall, "WORDS": wide}


def in_words(matrix: Tensor) -> Tensor:
    """Return a matrix as integers, of 8 bytes if its rows consist of such."""
    size, nbytes = matrix.element_size(), matrix.shape[1] * matrix.element_size()
    wide = size < 8 and nbytes % 8 == 0 and matrix.stride(0) * size % 8 == 0 and matrix.data_ptr() % 8 == 0
    return matrix.view(torch.int64 if wide else _BITS[size])


def to_take_along(gathering: Gathering | None, other: Tensor) -> tuple[tuple[Tensor, Tensor, int, int], int]:
    """Return source, target, words and stride of :func:`take_along` (``other`` if there is nothing), and ``WORDS``."""
    if gathering is None:
        return (other, other, 0, 0), 0
    words = gathering.out.shape[1]
    given = gathering.source, gathering.out, words, gathering.source.stride(0)
    return given, min(128, triton.next_power_of_2(words))


def gather_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """Do as :func:`rlbuf_td.kernels.rows.gather_rows`."""
    source = in_words(matrix)
    out = torch.empty((rows.shape[0], source.shape[1]), dtype=source.dtype, device=matrix.device)
    if out.numel():
        grid, tile = _plan(*out.shape)
        with launching_on(matrix):
            _gather[grid](source, rows.contiguous(), out, *out.shape, source.stride(0), **tile, **_OPTIONS)
    return out.view(matrix.dtype)


def copy_rows_(target: Tensor, source: Tensor, rows: Tensor, mask: Tensor) -> None:
    """Do as :func:`rlbuf_td.kernels.rows.copy_rows_`; each row of both is contiguous, of 1, 2, 4 or 8 bytes."""
    words, bits = target.shape[1:].numel(), _BITS[target.element_size()]
    to, given = target.view(bits), source.view(bits)
    if rows.shape[0] and words:
        grid, tile = _plan(rows.shape[0], words)
        with launching_on(target):
            strides = target.stride(0), given, source.stride(0)
            _copy[grid](to, *strides, rows, mask, rows.shape[0], words, **tile, **_OPTIONS)
