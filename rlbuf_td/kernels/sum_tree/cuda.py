"""GPU twins of :mod:`rlbuf_td.kernels.sum_tree`.

A draw descends as the specification does: a thread a draw, and one cache line of ``before`` a level. All batch sizes
cost about the same per draw then; to scan the sums of large blocks instead would read a hundred times as much.

An update takes two or three launches, since a launch is the only thing that all programs wait for: (1) every mention
of a row claims it; (2) winners write (where one program holds the batch, in the launch of the claims); (3) every dirty
subtree of 512 rows is recomputed, and the program that ends last recomputes what is above: each releases its subtree
by counting itself, and who finds that all others are counted has acquired them. Sums are added in the order of the
specification, so that equal weights give equal bits. A weight is ``exp(alpha log p)`` where the specification has
``pow``: they may differ in the last bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.dispatch import launching_on
from rlbuf_td.kernels.strata import step_of
from rlbuf_td.kernels.strata.cuda import masses
from rlbuf_td.kernels.sum_tree.duplicates_cuda import mentions, passes, take_note, winners

ALPHA, EPS, BETA, DRAWN, NAMED, ENTRY = (tl.constexpr(at) for at in range(6))  # as in _sum_tree_device
SMALLEST, LARGEST = tl.constexpr(1e-290), tl.constexpr(1e290)
WIDTH = tl.constexpr(8)  # sum_tree.BLOCK
SUBTREE = tl.constexpr(512)  # rows of three levels

#: Products that are not rounded would lead a draw to another row than its mass says, even to one of weight 0.
_EXACT = {"enable_fp_fusion": False}


@triton.jit
def _weight_of(magnitude, numbers):
    alpha = tl.load(numbers + ALPHA)
    priority = magnitude + tl.load(numbers + EPS)
    positive = priority > 0
    weight = tl.exp(alpha * tl.log(tl.where(positive, priority, 1.0)))
    weight = tl.minimum(tl.maximum(weight, SMALLEST), LARGEST)
    return tl.where(positive, weight, tl.where(alpha == 0, 1.0, 0.0))


@triton.jit
def _begin(ended):
    """Let the next launch count its programs from 0, whatever has become of the one before."""
    if tl.program_id(0) == 0:
        tl.store(ended, 0)


@triton.jit(do_not_specialize=["count"])
def _assign(
    index, td_error, count, numbers, claims, magnitude, weight, largest, refused, ended,
    CLAIM: tl.constexpr, WRITE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Let mentions claim their rows, or winners write, or both where one program holds the batch."""
    at, row, error, named, valid = mentions(index, td_error, count, numbers + NAMED, SIZE)
    wins = winners(claims, row, at, valid, CLAIM, WRITE)
    if WRITE:
        tl.store(magnitude + row, error, mask=wins)
        tl.store(weight + row, _weight_of(error, numbers), mask=wins)
        take_note(largest, refused, error, named, valid)
        _begin(ended)


@triton.jit(do_not_specialize=["start", "count"])
def _fill(start, count, entry, numbers, magnitude, weight, ended, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.zeros([SIZE], tl.float64) + tl.load(entry)
    tl.store(magnitude + start + at, value, mask=at < count)
    tl.store(weight + start + at, _weight_of(value, numbers), mask=at < count)
    _begin(ended)


@triton.jit
def _set_blocks(weight, sums, minima, block, inside):
    """Recompute the sums and minima of blocks of rows."""
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
    """Recompute groups of the level that begins at ``start``, and their nodes on the one that begins at ``above``."""
    line = start + group * WIDTH
    smallest = tl.load(minima + line, mask=inside, other=0.0)
    last = tl.zeros_like(group)  # the last member of positive sum
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
    index, first, numbers, weight, sums, before, minima, blocks, starts, levels, nodes, ended,
    BY_MENTION: tl.constexpr, LEVELS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Recompute a subtree of 512 rows, that of a mention, or one counted from ``first``; the last one, all above."""
    subtree = first + tl.program_id(0).to(tl.int64)
    if BY_MENTION:
        row = tl.load(index + tl.program_id(0))
        named = (row >= 0) & (row < tl.load(numbers + NAMED).to(tl.int64))
        subtree = tl.where(named, row, 0) // SUBTREE  # of a skipped mention any subtree, which is then as it was
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
    if LEVELS > 2:
        tl.debug_barrier()  # only what all threads have done is released
        if tl.atomic_add(ended, 1) == tl.num_programs(0) - 1:
            _finish(sums, before, minima, starts, levels, nodes, SIZE)


@triton.jit
def _finish(sums, before, minima, starts, levels, nodes, SIZE: tl.constexpr):
    """Recompute everything above subtrees, of which there are so many nodes, up to the root."""
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


@triton.jit(do_not_specialize=["count", "step"])
def _draw(
    uniform, numbers, weight, sums, before, minima, starts, index, importance, count, step, levels,
    STRATIFIED: tl.constexpr, NORM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Draw rows. NORM: 0 divides by the buffer's largest importance weight, 2 by nothing; 1 returns plain weights."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    root = tl.load(starts + levels)
    total = tl.load(sums + root)
    mass = masses(uniform, at, count, step, total, STRATIFIED)
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
    chosen = tl.where(one, b, a)
    row = node * WIDTH + 4 * four.to(tl.int64) + 2 * two.to(tl.int64) + one.to(tl.int64)
    tl.store(index + at, row, mask=inside)
    if NORM == 1:
        tl.store(importance + at, chosen, mask=inside)
    else:
        unit = tl.load(minima + root) if NORM == 0 else total / tl.load(numbers + DRAWN)
        log = tl.log(chosen / unit)
        tl.store(importance + at, tl.exp(-tl.load(numbers + BETA) * log).to(tl.float32), mask=inside)


def update(tree: Any, index: Tensor, td_error: Tensor, largest: Tensor) -> None:
    """Do as :func:`rlbuf_td.kernels.sum_tree.update_`; the tree's ``on_device`` holds the numbers and the counters."""
    count, state = index.shape[0], tree.on_device
    own = state.claims, tree.magnitude, tree.weight, largest, state.refused, state.ended
    given = index, td_error, count, state.numbers.tensor, *own
    with launching_on(index):
        for grid, options in passes(count):
            _assign[grid](*given, **options, **_EXACT)
        subtrees = triton.cdiv(tree.weight.shape[0], SUBTREE.value)
        _recompute(tree, index if count < subtrees else None, 0, min(count, subtrees))


def fill(tree: Any, start: int, count: int, entry: Tensor) -> None:
    """Do as :func:`rlbuf_td.kernels.sum_tree.fill_`; ``entry`` is the magnitude, 0-dim float64."""
    first, last = start // SUBTREE.value, (start + count - 1) // SUBTREE.value
    with launching_on(entry):
        state = tree.on_device
        given = start, count, entry, state.numbers.tensor, tree.magnitude, tree.weight, state.ended
        _fill[(triton.cdiv(count, 256),)](*given, SIZE=256, **_EXACT)
        _recompute(tree, None, first, last + 1 - first)


def rebuild(tree: Any) -> None:
    """Do as :func:`rlbuf_td.kernels.sum_tree.rebuild_`."""
    with launching_on(tree.weight):
        tree.on_device.ended.zero_()
        _recompute(tree, None, 0, triton.cdiv(tree.weight.shape[0], SUBTREE.value))


def _recompute(tree: Any, index: Tensor | None, first: int, programs: int) -> None:
    """Recompute the subtrees that ``index`` names, or so many from ``first`` on, and everything above.

    No program has been counted yet.
    """
    state, blocks = tree.on_device, tree.weight.shape[0] // WIDTH.value
    levels = state.starts.shape[0] - 1
    named = state.numbers.tensor if index is None else index
    nodes = triton.cdiv(blocks, 64)
    size = min(512, max(32, triton.next_power_of_2(triton.cdiv(nodes, 8))))
    given = named, first, state.numbers.tensor, tree.weight, tree.sums, tree.before, tree.minima, blocks, state.starts
    options = {"BY_MENTION": index is not None, "LEVELS": min(levels, 3), "SIZE": size, "num_warps": 4}
    _repair[(programs,)](*given, levels, nodes, state.ended, **options, **_EXACT)


def draw(tree: Any, uniform: Tensor, stratified: bool, norm: str | None) -> tuple[Tensor, Tensor]:
    """Do as :func:`rlbuf_td.kernels.sum_tree.draw`: one launch, unless ``norm`` is the batch's."""
    count, state = uniform.shape[0], tree.on_device
    by_batch = norm == "batch"
    index = torch.empty(count, dtype=torch.int64, device=uniform.device)
    importance = torch.empty(count, dtype=torch.float64 if by_batch else torch.float32, device=uniform.device)
    size = 64 if count <= 16_384 else 128
    with launching_on(uniform):
        given = uniform, state.numbers.tensor, tree.weight, tree.sums, tree.before, tree.minima, state.starts
        _draw[(triton.cdiv(count, size),)](
            *given,
            *(index, importance, count, step_of(count, stratified), state.starts.shape[0] - 1),
            STRATIFIED=stratified,
            NORM=1 if by_batch else 0 if norm == "buffer" else 2,
            SIZE=size,
            num_warps=max(1, size // 32),
            **_EXACT,
        )
    if by_batch:
        importance = (importance / importance.amin()).pow(-state.numbers[BETA.value]).to(torch.float32)
    return index, importance
