"""The reference implementation of the sum tree, in torch operations without host synchronisation."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rlbuf_td.kernels.device_scalars import write_magnitudes
from rlbuf_td.kernels.strata import masses
from rlbuf_td.kernels.sum_tree.tree import BLOCK, LARGEST, SMALLEST, Number, SumTree


def weight_of(magnitude: Tensor, alpha: Number, eps: Number) -> Tensor:
    """Return ``(magnitude + eps) ** alpha``, clamped to ``[SMALLEST, LARGEST]`` if ``magnitude + eps`` is positive."""
    priority = magnitude + eps
    weight = priority.pow(alpha)
    return torch.where(priority > 0, weight.clamp(SMALLEST, LARGEST), weight)


def assign(
    tree: SumTree, index: Tensor, td_error: Tensor, rows: Number, alpha: Number, eps: Number
) -> tuple[Tensor, Tensor, Tensor]:
    """Set magnitudes and weights of rows, but not the nodes above them; return the results of ``write_magnitudes``."""
    row, largest, refused = write_magnitudes(tree.magnitude, index, td_error.to(torch.float64).abs(), rows)
    magnitude = tree.magnitude[row]
    tree.weight[row] = torch.where(magnitude < 0, 0.0, weight_of(magnitude, alpha, eps))
    return row, largest, refused


def repair(tree: SumTree, rows: Tensor) -> None:
    _repair_blocks(tree, rows // BLOCK)


def repair_range(tree: SumTree, start: int, count: int) -> None:
    _repair_blocks(tree, torch.arange(start // BLOCK, (start + count - 1) // BLOCK + 1, device=tree.weight.device))


def _repair_blocks(tree: SumTree, block: Tensor) -> None:
    weight = tree.weight.view(-1, BLOCK)[block]
    tree.sums[block] = _block_levels(weight)[0][:, 0]
    tree.minima[block] = torch.where(weight > 0, weight, torch.inf).amin(1)
    for start, above in pairwise(tree.starts):
        block = block // BLOCK
        _set_groups(tree, start, above, block)


def _set_groups(tree: SumTree, start: int, above: int, group: Tensor) -> None:
    """Recompute the groups with the numbers ``group``: the sum and the minimum of each, and ``before`` of its members.

    The level of the members begins at index ``start``, and the level of the groups at index ``above``.
    """
    sums = tree.sums[start:above].view(-1, BLOCK)[group]
    before, total = [], torch.zeros_like(sums[:, 0])
    for member in sums.unbind(1):
        before.append(total)
        total = total + member
    positive_from_here = (sums > 0).flip(1).cumsum(1).flip(1) > 0
    positive_from_here[:, 0].fill_(True)
    tree.before[start:above].view(-1, BLOCK)[group] = torch.where(positive_from_here, torch.stack(before, 1), torch.inf)
    tree.sums[above + group] = total
    tree.minima[above + group] = tree.minima[start:above].view(-1, BLOCK)[group].amin(1)


def _block_levels(weight: Tensor) -> list[Tensor]:
    """Return four tensors: the sums of 8, 4 and 2 consecutive weights of each block, and the weights ``[N, 8]``."""
    levels = [weight]
    for _ in range(3):  # added in the same order as on the CPU
        levels.insert(0, levels[0][:, 0::2] + levels[0][:, 1::2])
    return levels


def draw(
    tree: SumTree, uniform: Tensor, stratified: bool, rows: Number, beta: Number, norm: str | None
) -> tuple[Tensor, Tensor]:
    total = tree.total
    mass = masses(uniform, total, stratified)
    index = torch.zeros_like(mass, dtype=torch.int64)
    for start, above in reversed(list(pairwise(tree.starts))):
        before = tree.before[start:above].view(-1, BLOCK)[index]
        member = (mass[:, None] >= before[:, 1:]).sum(1)
        mass = mass - before.gather(1, member[:, None])[:, 0]
        index = BLOCK * index + member
    for sums in _block_levels(tree.weight.view(-1, BLOCK)[index])[1:]:
        position = (2 * index) % sums.shape[1]
        left, right = (sums.gather(1, (position + side)[:, None])[:, 0] for side in (0, 1))
        go_right = (mass >= left) & (right > 0)
        mass = torch.where(go_right, mass - left, mass)
        index = 2 * index + go_right
    chosen = tree.weight[index]
    smallest = tree.smallest if norm == "buffer" else chosen.amin() if norm == "batch" else total / rows
    return index, (chosen / smallest).pow(-beta).to(torch.float32)
