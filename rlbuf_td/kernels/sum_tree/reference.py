"""The reference implementation of the sum tree, in torch operations without host synchronisation.

A device reads a million weights in the time of a few kernel launches, so a draw scans the weights of all rows:
``cumsum``, then ``searchsorted``. Only a tree that compiled loops of the CPU read, too, has nodes to keep right.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rlbuf_td.kernels.magnitudes import write_magnitudes
from rlbuf_td.kernels.strata import masses
from rlbuf_td.kernels.sum_tree.tree import BLOCK, LARGEST, SMALLEST, Number, SumTree


def weight_of(magnitude: Tensor, alpha: Number, eps: Number) -> Tensor:
    """Return ``(magnitude + eps) ** alpha``, clamped to ``[SMALLEST, LARGEST]`` if ``magnitude + eps`` is positive."""
    priority = magnitude + eps
    weight = priority.pow(alpha)
    return torch.where(priority > 0, weight.clamp(SMALLEST, LARGEST), weight)


def update(tree: SumTree, index: Tensor, td_error: Tensor, rows: Number, alpha: Number, eps: Number) -> Tensor:
    """Implement :func:`rlbuf_td.kernels.sum_tree.update_`."""
    row, largest, refused = write_magnitudes(tree.magnitude, index, td_error.to(torch.float64).abs(), rows)
    magnitude = tree.magnitude[row]
    tree.weight[row] = torch.where(magnitude < 0, 0.0, weight_of(magnitude, alpha, eps))
    tree.refused.add_(refused)
    rebuild(tree)
    return largest


def fill(tree: SumTree, start: int, count: int, magnitude: Number, alpha: Number, eps: Number) -> None:
    part = slice(start, start + count)
    tree.magnitude[part] = magnitude
    tree.weight[part] = weight_of(tree.magnitude[part], alpha, eps)
    rebuild(tree)


def rebuild(tree: SumTree) -> None:
    """Recompute the nodes of the tree from the weights, if it has nodes. O(N)."""
    if not tree.has_nodes:
        return
    weight = tree.weight.view(-1, BLOCK)
    count, halves = len(weight), weight.unflatten(1, (2, 2, 2))
    tree.sums[:count] = halves.sum(3).sum(2).sum(1)  # added in the same order as on the CPU
    tree.minima[:count] = torch.where(weight > 0, weight, torch.inf).amin(1)
    for start, above in pairwise(tree.starts):
        sums, count = tree.sums[start:above].view(-1, BLOCK), (above - start) // BLOCK
        total = sums.cumsum(1)
        is_followed = sums.flip(1).cumsum(1).flip(1) > 0  # by a positive sum, its own included
        tree.before[start:above].view(-1, BLOCK)[:, 1:] = torch.where(is_followed[:, 1:], total[:, :-1], torch.inf)
        tree.sums[above : above + count] = total[:, -1]
        tree.minima[above : above + count] = tree.minima[start:above].view(-1, BLOCK).amin(1)


def draw(
    tree: SumTree, uniform: Tensor, stratified: bool, rows: Number, beta: Number, norm: str | None
) -> tuple[Tensor, Tensor]:
    """Implement :func:`rlbuf_td.kernels.sum_tree.draw`."""
    weight, sums = tree.weight, tree.weight.cumsum(0)
    total = sums[-1]
    mass = torch.minimum(masses(uniform, total, stratified), torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(sums, mass, right=True).clamp(max=len(weight) - 1)
    # A scan on many cores rounds differently from row to row. A draw that rounding leads to a row of weight 0 takes the
    # row with the largest weight instead.
    index = torch.where(weight[index] > 0, index, weight.argmax())
    chosen = weight[index]
    smallest = tree.smallest if norm == "buffer" else chosen.amin() if norm == "batch" else total / rows
    return index, (chosen / smallest).pow(-beta).to(torch.float32)
