"""A sum tree over priorities: draw rows in proportion to their weight, change weights, keep the smallest at hand.

Every row has a *magnitude* ``|td_error|`` (-1 where none was given) and a *weight* ``(magnitude + eps) ** alpha``
(0 where none was given). Weights lie in blocks of eight, one cache line; eight blocks make a group, eight groups one of
the next level, up to the root. A group keeps, in one cache line each, the sums of its members, the sum *before* each of
them (what a draw compares with), and their minima (over positive weights). A draw thus reads one line a level.

Invariants, which :func:`check` states as code: a parent is *recomputed* from its children, never shifted by a
difference, so that nothing drifts and equal updates give equal trees; ``before`` is infinite behind a group's last
member of positive sum, so that a draw never returns a row of weight 0.

Source: Schaul et al., Prioritized Experience Replay, ICLR 2016, appendix B.2.1. Costs are per batch of ``B`` over ``N``
rows. On the CPU the numba twin runs; elsewhere the torch ops of this module, without host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch

from rlbuf_td._huge_pages import advise_huge_pages

BLOCK = 8
#: Weights are kept within these bounds, so that no sum overflows and no positive priority becomes 0.
SMALLEST, LARGEST = 1e-290, 1e290
#: What :func:`update_` returns instead of a magnitude when it has refused a batch.
REFUSED = -2.0


@dataclass
class SumTree:
    """The state: plain tensors, which may be shared, saved and moved.

    Attributes:
        magnitude: ``[8 * blocks]`` float64, ``|td_error|`` of each row, -1 for rows without.
        weight: ``[8 * blocks]`` float64, 0 for rows without.
        sums: the levels one after the other, each padded to whole groups, the blocks first and the root last.
        before: the same for the sums of the members before each member of a group.
        minima: the same for minima, infinite where nothing is positive.
    """

    magnitude: torch.Tensor
    weight: torch.Tensor
    sums: torch.Tensor
    before: torch.Tensor
    minima: torch.Tensor

    @classmethod
    def empty(cls, capacity: int, device: torch.device | str = "cpu") -> SumTree:
        """Return a tree for ``capacity`` rows, none of which has a priority yet. Takes less than 20 bytes a row."""
        rows = padded(capacity)
        nodes = _starts(rows)[-1] + BLOCK
        tree = cls(*(_memory(size, device) for size in (rows, rows, nodes, nodes, nodes)))
        clear_(tree)
        return tree

    @classmethod
    def over(cls, magnitude: torch.Tensor, weight: torch.Tensor) -> SumTree:
        """Return the tree over these magnitudes and weights, bit for bit as updates would have made it. O(N)."""
        tree = cls.empty(weight.shape[0], weight.device)
        tree.magnitude.copy_(magnitude)
        tree.weight.copy_(weight)
        rebuild_(tree)
        return tree

    @property
    def starts(self) -> list[int]:
        """Where each level begins in ``sums``, ``before`` and ``minima``."""
        return _starts(self.weight.shape[0])

    @property
    def total(self) -> torch.Tensor:
        """The sum of all weights, 0-dim."""
        return self.sums[self.starts[-1]]

    @property
    def smallest(self) -> torch.Tensor:
        """The smallest positive weight, 0-dim; infinite if there is none."""
        return self.minima[self.starts[-1]]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __getstate__(self) -> dict[str, torch.Tensor]:
        return self.tensors()  # without the NumPy views, which would come back as copies


def clear_(tree: SumTree) -> None:
    """Forget all priorities. O(N)."""
    tree.magnitude.fill_(-1.0)
    tree.weight.zero_()
    tree.sums.zero_()
    tree.before.fill_(torch.inf)
    tree.before[::BLOCK] = 0.0
    tree.minima.fill_(torch.inf)


def padded(capacity: int) -> int:
    """Return the number of rows that a tree for ``capacity`` rows has: whole blocks."""
    return -(-capacity // BLOCK) * BLOCK


def update_(
    tree: SumTree, index: torch.Tensor, td_error: torch.Tensor, rows: int, alpha: float, eps: float
) -> float | torch.Tensor:
    """Set the priority of rows; of a row that is named twice, the last one stays. O(B log N).

    On the CPU the whole batch is refused, before anything changes, if a row is not in ``[-1, rows)`` or an error is NaN
    or infinite. On CUDA, where looking would wait for the device, such rows are skipped.

    Args:
        tree: changed in place.
        index: ``[B]`` int64; -1 means "skip".
        td_error: ``[B]`` float32 or float64; the sign does not matter.
        rows: number of rows that may be named.
        alpha: exponent, not negative.
        eps: added to the magnitude, not negative.

    Returns:
        The largest magnitude set, -1 if none (on CUDA as a 0-dim tensor), or :data:`REFUSED`.
    """
    if tree.weight.is_cuda:
        return _update_torch(tree, index, td_error, rows, alpha, eps)
    return cpu_twin().update(*arrays(tree), index.numpy(), td_error.numpy(), rows, alpha, eps)


def fill_(tree: SumTree, start: int, count: int, magnitude: torch.Tensor | float, alpha: float, eps: float) -> None:
    """Give ``count`` rows from ``start`` on one magnitude (new rows, say). O(count + log N)."""
    if tree.weight.is_cuda:
        tree.magnitude[start : start + count] = magnitude
        tree.weight[start : start + count] = weight_of(tree.magnitude[start : start + count], alpha, eps)
        _repair(tree, torch.arange(start // BLOCK, (start + count - 1) // BLOCK + 1, device=tree.weight.device))
    else:
        cpu_twin().fill(*arrays(tree), start, count, float(magnitude), alpha, eps)


def rebuild_(tree: SumTree) -> None:
    """Compute everything above the weights anew. O(N)."""
    if tree.weight.is_cuda:
        _rebuild(tree)
    else:
        cpu_twin().rebuild(*arrays(tree))


def reweigh_(tree: SumTree, alpha: float, eps: float) -> None:
    """Compute every weight anew from its magnitude (after a change of alpha). O(N)."""
    tree.weight.copy_(torch.where(tree.magnitude < 0, 0.0, weight_of(tree.magnitude, alpha, eps)))
    rebuild_(tree)


def draw(
    tree: SumTree, uniform: torch.Tensor, stratified: bool, rows: int, beta: float, norm: str | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Draw rows with probability ``weight / total``, and their importance weights. O(B log N).

    Args:
        tree: the weights.
        uniform: ``[B]`` float64 in ``[0, 1)``; overwritten.
        stratified: draw one row from each of ``B`` segments of equal mass, rather than each row from the whole.
        rows: ``N`` of the importance weight ``(N P)^-beta``.
        beta: exponent of the importance weight, not negative.
        norm: divide by the ``"buffer"``'s largest weight, the ``"batch"``'s, or nothing (``None``).

    Returns:
        ``[B]`` int64 rows and ``[B]`` float32 importance weights; ``None`` if no weight is positive (not on CUDA, where
        looking would wait for the device).
    """
    if tree.weight.is_cuda:
        return _draw_torch(tree, uniform, stratified, rows, beta, norm)
    batch = uniform.shape[0]
    index, weight = np.empty(batch, np.int64), np.empty(batch, np.float32)  # 4 us less than by way of torch.empty
    mode = 0 if norm == "buffer" else 1 if norm == "batch" else 2
    if not cpu_twin().draw(*arrays(tree), uniform.numpy(), stratified, rows, beta, mode, index, weight):
        return None
    return torch.from_numpy(index), torch.from_numpy(weight)


def weight_of(magnitude: torch.Tensor, alpha: float, eps: float) -> torch.Tensor:
    """Return ``(magnitude + eps) ** alpha``, bounded; 0 stays 0 unless alpha is 0."""
    priority = magnitude + eps
    weight = priority.pow(alpha)
    return torch.where(priority > 0, weight.clamp(SMALLEST, LARGEST), weight)


def arrays(tree: SumTree) -> tuple[Any, ...]:
    """Return the starts of the levels and the state as NumPy views, made once per tree."""
    views = tree.__dict__.get("_arrays")
    if views is None:
        starts = np.array(tree.starts, np.uint64)
        views = tree.__dict__["_arrays"] = (starts, *(tensor.numpy() for tensor in tree.tensors().values()))
    return views


def _starts(rows: int) -> list[int]:
    starts, size = [0], rows // BLOCK
    while size > 1:
        size = -(-size // BLOCK)
        starts.append(starts[-1] + size * BLOCK)
    return starts


def _memory(size: int, device: torch.device | str) -> torch.Tensor:
    memory = torch.empty(size, dtype=torch.float64, device=device)
    if not memory.is_cuda:
        advise_huge_pages(memory)
    return memory


@cache
def cpu_twin() -> ModuleType:
    """Return the numba twin, imported (and compiled, or read from disk) on first use."""
    from rlbuf_td.kernels import _sum_tree_numba

    return _sum_tree_numba


def check(tree: SumTree, alpha: float, eps: float) -> None:
    """Assert the invariants, for tests: O(N)."""
    given = tree.magnitude >= 0
    expected = torch.where(given, weight_of(tree.magnitude, alpha, eps), 0.0)
    torch.testing.assert_close(tree.weight, expected, rtol=1e-12, atol=0.0)
    again = SumTree(**{name: tensor.clone() for name, tensor in tree.tensors().items()})
    _rebuild(again)
    for name in ("sums", "before", "minima"):
        torch.testing.assert_close(getattr(again, name), getattr(tree, name), rtol=1e-14, atol=0.0)


# -- the specification in torch ops


def _update_torch(
    tree: SumTree, index: torch.Tensor, td_error: torch.Tensor, rows: int, alpha: float, eps: float
) -> torch.Tensor:
    # Every mention of a row is given the value of the last one, and every skipped mention repeats the last valid row,
    # so that the order of the scatter cannot matter and nothing depends on how many are skipped.
    magnitude = td_error.to(torch.float64).abs()
    valid = (index >= 0) & (index < rows) & magnitude.isfinite()
    ordered, order = torch.sort(torch.where(valid, index, -1), stable=True)
    target = torch.where(ordered < 0, ordered[-1], ordered)
    last = order[torch.searchsorted(ordered, target, right=True) - 1]
    row = target.clamp(min=0)
    value = torch.where(target < 0, tree.magnitude[row], magnitude[last])
    tree.magnitude[row] = value
    tree.weight[row] = torch.where(value < 0, 0.0, weight_of(value, alpha, eps))
    _repair(tree, row // BLOCK)
    return torch.where(valid, magnitude, -1.0).max()


def _repair(tree: SumTree, block: torch.Tensor) -> None:
    """Recompute the blocks named, and everything above them."""
    weight = tree.weight.view(-1, BLOCK)[block]
    tree.sums[block] = _block_sum(weight)
    tree.minima[block] = torch.where(weight > 0, weight, torch.inf).amin(1)
    for start, above in pairwise(tree.starts):
        block = block // BLOCK
        _set_groups(tree, start, above, block)


def _rebuild(tree: SumTree) -> None:
    _repair(tree, torch.arange(tree.weight.shape[0] // BLOCK, device=tree.weight.device))


def _set_groups(tree: SumTree, start: int, above: int, group: torch.Tensor) -> None:
    """Recompute groups of the level that begins at ``start``, and their nodes on the one that begins at ``above``."""
    sums = tree.sums[start:above].view(-1, BLOCK)[group]
    before, total = [], torch.zeros_like(sums[:, 0])
    for member in sums.unbind(1):
        before.append(total)
        total = total + member
    positive_from_here = (sums > 0).flip(1).cumsum(1).flip(1) > 0
    positive_from_here[:, 0] = True
    tree.before[start:above].view(-1, BLOCK)[group] = torch.where(positive_from_here, torch.stack(before, 1), torch.inf)
    tree.sums[above + group] = total
    tree.minima[above + group] = tree.minima[start:above].view(-1, BLOCK)[group].amin(1)


def _pairs(weight: torch.Tensor) -> torch.Tensor:
    """Add neighbours: one level up, in the order in which the twin adds, so that both give the same bits."""
    return weight[:, 0::2] + weight[:, 1::2]


def _block_sum(weight: torch.Tensor) -> torch.Tensor:
    return _pairs(_block_levels(weight)[0])[:, 0]


def _block_levels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sums of four, of two and of one of eight columns."""
    twos = _pairs(weight)
    return _pairs(twos), twos, weight


def _draw_torch(
    tree: SumTree, uniform: torch.Tensor, stratified: bool, rows: int, beta: float, norm: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, total = uniform.shape[0], tree.total
    mass = uniform * total
    if stratified:
        mass = (torch.arange(batch, device=uniform.device) + uniform) * (total / batch)
    index = torch.zeros_like(mass, dtype=torch.int64)
    for start, above in reversed(list(pairwise(tree.starts))):
        before = tree.before[start:above].view(-1, BLOCK)[index]
        member = (mass[:, None] >= before[:, 1:]).sum(1)
        mass = mass - before.gather(1, member[:, None])[:, 0]
        index = BLOCK * index + member
    fours, twos, ones = _block_levels(tree.weight.view(-1, BLOCK)[index])
    for sums in (fours, twos, ones):
        position = (2 * index) % sums.shape[1]
        left, right = (sums.gather(1, (position + side)[:, None])[:, 0] for side in (0, 1))
        go_right = (mass >= left) & (right > 0)
        mass = torch.where(go_right, mass - left, mass)
        index = 2 * index + go_right
    chosen = tree.weight[index]
    smallest = tree.smallest if norm == "buffer" else chosen.amin() if norm == "batch" else total / rows
    return index, (chosen / smallest).pow(-beta).to(torch.float32)
