"""Triton kernels of :mod:`rlbuf_td.kernels.sum_tree`.

After weights have changed, the sums above them are computed in two launches, because a new launch waits until all
programs of the last one have ended. In the first launch, every program computes the sums of a subtree of 512 rows. In
the second, one program computes all sums above the subtrees. The order of additions is that of the torch reference, so
both give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels import strata
from rlbuf_td.kernels.dispatch import launching_on
from rlbuf_td.kernels.sum_tree.tree import SumTree

WIDTH = tl.constexpr(8)  # sum_tree.BLOCK
SUBTREE = tl.constexpr(512)  # rows of three levels
FIRST = tl.constexpr(strata.FIRST)

#: Fused multiply-add, which does not round products, could lead a draw to a wrong row, even one of weight 0.
_EXACT = {"enable_fp_fusion": False}


@triton.jit
def _set_blocks(weight, sums, minima, block, inside):
    w0, smallest = _leaf(weight, block, 0, inside, float("inf"))
    w1, smallest = _leaf(weight, block, 1, inside, smallest)
    w2, smallest = _leaf(weight, block, 2, inside, smallest)
    w3, smallest = _leaf(weight, block, 3, inside, smallest)
    w4, smallest = _leaf(weight, block, 4, inside, smallest)
    w5, smallest = _leaf(weight, block, 5, inside, smallest)
    w6, smallest = _leaf(weight, block, 6, inside, smallest)
    w7, smallest = _leaf(weight, block, 7, inside, smallest)
    tl.store(sums + block, ((w0 + w1) + (w2 + w3)) + ((w4 + w5) + (w6 + w7)), mask=inside)
    tl.store(minima + block, smallest, mask=inside)


@triton.jit
def _leaf(weight, block, member, inside, smallest):
    w = tl.load(weight + block * WIDTH + member, mask=inside, other=0.0)
    return w, tl.where(w > 0, tl.minimum(w, smallest), smallest)


@triton.jit
def _set_groups(sums, before, minima, start, above, group, inside):
    """Recompute the sums and minima of the groups with the numbers ``group``, and ``before`` of their members.

    The level of the members begins at index ``start``, and the level of the groups at index ``above``.
    """
    line = start + group * WIDTH
    smallest = tl.load(minima + line, mask=inside, other=0.0)
    last = tl.zeros_like(group)  # the last member with a positive sum
    for member in tl.static_range(1, 8):
        last = tl.where(tl.load(sums + line + member, mask=inside, other=0.0) > 0, member, last)
        smallest = tl.minimum(smallest, tl.load(minima + line + member, mask=inside, other=0.0))
    total = tl.load(sums + line, mask=inside, other=0.0)
    for member in tl.static_range(1, 8):
        tl.store(before + line + member, tl.where(member > last, float("inf"), total), mask=inside)
        total += tl.load(sums + line + member, mask=inside, other=0.0)
    tl.store(sums + above + group, total, mask=inside)
    tl.store(minima + above + group, smallest, mask=inside)


@triton.jit(do_not_specialize=["first"])
def _repair(
    rows, first, weight, sums, before, minima, blocks, starts, BY_ROW: tl.constexpr, LEVELS: tl.constexpr
):  # fmt: skip
    """Recompute one subtree in program ``p``: if ``BY_ROW`` the one of row ``rows[p]``, else number ``first + p``."""
    # Several programs may recompute the same subtree: all write the same values, and each reads after its own writes.
    subtree = first + tl.program_id(0).to(tl.int64)
    if BY_ROW:
        subtree = tl.load(rows + tl.program_id(0)) // SUBTREE
    block = subtree * 64 + tl.arange(0, 64)
    _set_blocks(weight, sums, minima, block, block < blocks)
    if LEVELS > 0:
        tl.debug_barrier()
        group = subtree * 8 + tl.arange(0, 8)
        groups = (blocks + 7) // 8
        _set_groups(sums, before, minima, tl.load(starts), tl.load(starts + 1), group, group < groups)
    if LEVELS > 1:
        tl.debug_barrier()
        group = subtree + tl.arange(0, 1)
        _set_groups(sums, before, minima, tl.load(starts + 1), tl.load(starts + 2), group, group >= 0)


@triton.jit
def _finish(sums, before, minima, starts, levels, nodes, SIZE: tl.constexpr):
    """Recompute all nodes above the subtrees, up to the root; ``nodes`` is the number of subtrees."""
    for at in range(2, levels):
        groups = (nodes + 7) // 8
        start, above = tl.load(starts + at), tl.load(starts + at + 1)
        for first in range(0, groups, SIZE):
            group = first + tl.arange(0, SIZE)
            _set_groups(sums, before, minima, start, above, group.to(tl.int64), group < groups)
        tl.debug_barrier()
        nodes = groups


@triton.jit
def _go(mass, left, right):
    goes_right = (mass >= left) & (right > 0)
    return tl.where(goes_right, mass - left, mass), goes_right


@triton.jit
def _draw_in_blocks(weight, mass, node, inside):
    """Draw one row below each lowest node in ``node``; return the rows and their weights."""
    leaf = weight + node * WIDTH
    w0, w1 = tl.load(leaf, mask=inside, other=1.0), tl.load(leaf + 1, mask=inside, other=1.0)
    w2, w3 = tl.load(leaf + 2, mask=inside, other=1.0), tl.load(leaf + 3, mask=inside, other=1.0)
    w4, w5 = tl.load(leaf + 4, mask=inside, other=1.0), tl.load(leaf + 5, mask=inside, other=1.0)
    w6, w7 = tl.load(leaf + 6, mask=inside, other=1.0), tl.load(leaf + 7, mask=inside, other=1.0)
    mass, four = _go(mass, (w0 + w1) + (w2 + w3), (w4 + w5) + (w6 + w7))
    a, b = tl.where(four, w4, w0), tl.where(four, w5, w1)
    c, d = tl.where(four, w6, w2), tl.where(four, w7, w3)
    mass, two = _go(mass, a + b, c + d)
    a, b = tl.where(two, c, a), tl.where(two, d, b)
    mass, one = _go(mass, a, b)
    row = node * WIDTH + 4 * four.to(tl.int64) + 2 * two.to(tl.int64) + one.to(tl.int64)
    return row, tl.where(one, b, a)


@triton.jit(do_not_specialize=["count", "step"])
def _draw(
    uniform, rows, beta, weight, sums, before, minima, starts, index, importance, count, step, levels,
    STRATIFIED: tl.constexpr, NORM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Draw rows, and write their importance weights to ``importance``, or their tree weights if ``NORM`` is 1."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    root = tl.load(starts + levels)
    total = tl.load(sums + root)
    mass = tl.load(uniform + at, mask=inside, other=0.0)
    if STRATIFIED:  # as strata.masses
        first = (tl.load(uniform) * FIRST).to(tl.int64)
        segment = (first + at.to(tl.int64) * step) % count
        mass = (segment.to(tl.float64) + mass) * (total / count)
    else:
        mass = mass * total
    node = tl.zeros([SIZE], tl.int64)
    for down in range(levels):
        line = tl.load(starts + levels - 1 - down) + node * WIDTH
        passed = tl.zeros([SIZE], tl.float64)
        member = tl.zeros([SIZE], tl.int64)
        for k in tl.static_range(1, 8):
            edge = tl.load(before + line + k, mask=inside, other=0.0)
            beyond = mass >= edge
            passed = tl.where(beyond, edge, passed)
            member += beyond.to(tl.int64)
        mass -= passed
        node = WIDTH * node + member
    row, chosen = _draw_in_blocks(weight, mass, node, inside)
    tl.store(index + at, row, mask=inside)
    if NORM == 1:
        tl.store(importance + at, chosen, mask=inside)
    else:
        unit = tl.load(minima + root) if NORM == 0 else total / tl.load(rows)
        log = tl.log(chosen / unit)
        tl.store(importance + at, tl.exp(-tl.load(beta) * log).to(tl.float32), mask=inside)


def repair(tree: SumTree, rows: Tensor) -> None:
    subtrees = triton.cdiv(tree.weight.shape[0], SUBTREE.value)
    if rows.shape[0] < subtrees:
        _recompute(tree, rows, 0, rows.shape[0])
    else:
        _recompute(tree, None, 0, subtrees)


def repair_range(tree: SumTree, start: int, count: int) -> None:
    first, last = start // SUBTREE.value, (start + count - 1) // SUBTREE.value
    _recompute(tree, None, first, last + 1 - first)


def _recompute(tree: SumTree, rows: Tensor | None, first: int, programs: int) -> None:
    """Recompute the subtrees of ``rows``, or ``programs`` subtrees from number ``first`` on, and all nodes above."""
    starts, blocks = tree.starts_on_device, tree.weight.shape[0] // WIDTH.value
    levels, nodes = starts.shape[0] - 1, triton.cdiv(blocks, 64)
    above = tree.sums, tree.before, tree.minima
    with launching_on(tree.weight):
        named = starts if rows is None else rows
        options = {"BY_ROW": rows is not None, "LEVELS": min(levels, 2), "num_warps": 4}
        _repair[(programs,)](named, first, tree.weight, *above, blocks, starts, **options, **_EXACT)
        if levels > 2:
            size = min(512, max(32, triton.next_power_of_2(triton.cdiv(nodes, 8))))
            _finish[(1,)](*above, starts, levels, nodes, SIZE=size, num_warps=4, **_EXACT)


def draw(
    tree: SumTree, uniform: Tensor, stratified: bool, rows: Tensor, beta: Tensor, norm: str | None
) -> tuple[Tensor, Tensor]:
    count, starts, by_batch = uniform.shape[0], tree.starts_on_device, norm == "batch"
    index = torch.empty(count, dtype=torch.int64, device=uniform.device)
    importance = torch.empty(count, dtype=torch.float64 if by_batch else torch.float32, device=uniform.device)
    size = 64 if count <= 16_384 else 128
    with launching_on(uniform):
        _draw[(triton.cdiv(count, size),)](
            *(uniform, rows, beta, tree.weight, tree.sums, tree.before, tree.minima, starts, index, importance),
            *(count, strata.step_of(count, stratified), starts.shape[0] - 1),
            STRATIFIED=stratified,
            NORM=1 if by_batch else 0 if norm == "buffer" else 2,
            SIZE=size,
            num_warps=size // 32,
            **_EXACT,
        )
    if by_batch:
        importance = (importance / importance.amin()).pow(-beta).to(torch.float32)
    return index, importance
