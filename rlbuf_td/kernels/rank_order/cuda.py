"""GPU twins of updates and draws by rank: an update of magnitudes in one or two launches, a draw in one.

What orders the rows is elsewhere: torch's sort, or :mod:`rlbuf_td.kernels.rank_order.merge_cuda`. ``expm1`` and
``log1p``,
which Triton has not, are made of ``exp`` and ``log`` by Kahan's quotients, exact to a few units in the last place.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.dispatch import launching_on
from rlbuf_td.kernels.rank_order.merge_cuda import COUNT, ROW, SIDE, exchange
from rlbuf_td.kernels.strata import step_of
from rlbuf_td.kernels.strata.cuda import masses
from rlbuf_td.kernels.sum_tree.duplicates_cuda import mentions, passes, take_note, winners

ALPHA, SHIFT, BETA, NAMED = (tl.constexpr(at) for at in range(4))  # as in _rank_device
HEAD = tl.constexpr(1024)  # rank_law.HEAD
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)

_EXACT = {"enable_fp_fusion": False}  # Kahan's quotients are made of what has been rounded


@triton.jit(do_not_specialize=["count"])
def _assign(
    index, td_error, count, numbers, claims, magnitude, largest, refused, state, lists,
    CLAIM: tl.constexpr, WRITE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Let mentions claim their rows, or winners write, or both; list keys that go and come if there are lists."""
    at, row, error, named, valid = mentions(index, td_error, count, numbers + NAMED, SIZE)
    wins = winners(claims, row, at, valid, CLAIM, WRITE)
    if WRITE:
        value = tl.minimum(tl.where(valid, error, 0.0), LARGEST).to(tl.float32)
        if lists is not None:
            exchange(magnitude, row, value, wins, state, lists, at, count)
        tl.store(magnitude + row, value, mask=wins)
        take_note(largest, refused, value.to(tl.float64), named, valid)


@triton.jit
def _expm1(w):
    u = tl.exp(w)
    near = (tl.abs(w) < 0.5) & (u != 1)
    return tl.where(u == 1, w, (u - 1) * tl.where(near, w / tl.log(tl.where(near, u, 2.0)), 1.0))


@triton.jit
def _log1p(z):
    u = 1 + z
    changed = u != 1
    return tl.where(changed, tl.log(u) * (z / tl.where(changed, u - 1, 1.0)), z)


@triton.jit
def _mass(rows, head, alpha, shift):
    """Return ``H_r`` of one rank."""
    log = tl.log(tl.maximum(rows, HEAD).to(tl.float64) + 0.5)
    bend = 1.0 - alpha
    y = tl.where(bend == 0, log, _expm1(bend * log) / tl.where(bend == 0, 1.0, bend))
    far = shift + y + alpha / 24.0 * tl.exp(-(alpha + 1.0) * log)
    return tl.where(rows <= HEAD, tl.load(head + tl.minimum(tl.maximum(rows, 1), HEAD) - 1), far)


@triton.jit
def _rank_of_mass(value, head, alpha, shift, inside):
    """Return the rank in whose share of the mass a value lies, not bounded by the rows that there are."""
    below = tl.zeros_like(value).to(tl.int64)
    for halving in tl.static_range(10):
        step = 512 >> halving
        edge = tl.load(head + below + (step - 1), mask=inside, other=0.0)
        below += tl.where(edge <= value, step, 0)
    bend = 1.0 - alpha
    y = tl.maximum(value - shift, 0.0)
    z = tl.maximum(bend * y, -1.0 + 1.1102230246251565e-16)
    y = tl.where(bend == 0, y, _log1p(z) / tl.where(bend == 0, 1.0, bend))
    x = tl.minimum(tl.maximum(tl.exp(tl.minimum(y, 36.0)), HEAD), 4503599627370496.0)
    beyond = tl.maximum(tl.floor(x - alpha / (24.0 * x) + 0.5).to(tl.int64), HEAD + 1)
    return tl.where(value >= tl.load(head + HEAD - 1), beyond, below + 1)


@triton.jit
def drawn(
    uniform, numbers, head, there_are, weight, at, count, step, STRATIFIED: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Return the ranks that draws at ``at`` give, at least 1, and store their weights.

    NORM: 0 divides by the buffer's largest weight, 2 by nothing; 1 stores logarithms, up to a scale.
    """
    inside = at < count
    alpha, shift, beta = tl.load(numbers + ALPHA), tl.load(numbers + SHIFT), tl.load(numbers + BETA)
    total = _mass(there_are, head, alpha, shift)
    value = masses(uniform, at, count, step, total, STRATIFIED)
    rank = tl.maximum(tl.minimum(_rank_of_mass(value, head, alpha, shift, inside), there_are), 1)
    log = alpha * beta * tl.log(rank.to(tl.float64))
    if NORM == 1:
        tl.store(weight + at, log, mask=inside)
    else:
        size = tl.maximum(there_are, 1).to(tl.float64)
        scale = -alpha * beta * tl.log(size) if NORM == 0 else beta * tl.log(total / size)
        tl.store(weight + at, tl.exp(log + scale).to(tl.float32), mask=inside)
    return rank


@triton.jit(do_not_specialize=["count", "step"])
def _draw(
    uniform, numbers, head, rows, by_rank, index, weight, count, step,
    capacity, HALVES: tl.constexpr, STRATIFIED: tl.constexpr, NORM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Draw rows. HALVES: ``rows`` is the state of a merged order, and ``by_rank`` its keys, which end in rows."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there_are = tl.load(rows + COUNT) if HALVES else tl.load(rows)
    rank = drawn(uniform, numbers, head, there_are, weight, at, count, step, STRATIFIED, NORM)
    if HALVES:
        by_rank += tl.load(rows + SIDE) * capacity
    row = tl.load(by_rank + rank - 1, mask=at < count, other=0) & ROW
    tl.store(index + at, tl.where(there_are > 0, row, 0), mask=at < count)


def update(
    order: Any, index: Tensor, td_error: Tensor, largest: Tensor, exchanged: tuple[Tensor, Tensor] | None
) -> None:
    """Do as :func:`write`, and as :func:`exchange` with the state and the lists given."""
    count, on_device = index.shape[0], order.on_device
    own = on_device.claims, order.magnitude, largest, on_device.refused, *(exchanged or (None, None))
    with launching_on(index):
        for grid, options in passes(count):
            _assign[grid](index, td_error, count, on_device.numbers.tensor, *own, **options, **_EXACT)


def outputs(uniform: Tensor, norm: str | None) -> tuple[Tensor, Tensor, int]:
    """Return memory for the rows and the weights of a draw, and the kernels' NORM."""
    index = torch.empty(uniform.shape[0], dtype=torch.int64, device=uniform.device)
    dtype = torch.float64 if norm == "batch" else torch.float32
    return index, torch.empty_like(index, dtype=dtype), 1 if norm == "batch" else 0 if norm == "buffer" else 2


def normed(weight: Tensor) -> Tensor:
    """Return the weights that a draw has stored, divided by the batch's largest if they are logarithms."""
    return (weight - weight.amax()).exp().to(torch.float32) if weight.dtype == torch.float64 else weight


def draw(
    on_device: Any, uniform: Tensor, by_rank: Tensor, rows: Tensor, stratified: bool, norm: str | None
) -> tuple[Tensor, Tensor]:
    """Do as :meth:`rlbuf_td.kernels.rank_order.RankOrder.draw`, by the law that the device has.

    ``by_rank`` are ``[n]`` rows by rank, of which there are ``rows`` (0-dim), or the ``[2, capacity]`` keys of a merged
    order, of which ``rows`` is the state.
    """
    count = uniform.shape[0]
    index, weight, norm_of = outputs(uniform, norm)
    with launching_on(uniform):
        _draw[(triton.cdiv(count, 128),)](
            *(uniform, on_device.numbers.tensor, on_device.head, rows, by_rank, index, weight, count),
            *(step_of(count, stratified), by_rank.shape[-1]),
            HALVES=by_rank.dim() == 2,
            STRATIFIED=stratified,
            NORM=norm_of,
            SIZE=128,
            **_EXACT,
        )
    return index, normed(weight)
