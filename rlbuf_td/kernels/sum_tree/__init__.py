"""A sum tree over priorities, which draws rows with probabilities proportional to their weights.

Every row has a *magnitude* ``|td_error|`` (-1 if not set) and a *weight* ``(magnitude + eps) ** alpha`` (0 if not set).
Eight weights form a block, eight blocks form a group, and eight groups form a group of the next level, up to the root.
A group stores three numbers for each of its eight members: the sum of the member's weights, the sum of all members
*before* it, and the smallest positive weight in the member. The eight numbers of one kind fill a cache line, and a draw
reads one cache line per level.

An update *recomputes* a parent from its children, and never adjusts it by a difference. Rounding errors therefore do
not accumulate. If the last members of a group have sum 0, their ``before`` is infinite. A draw therefore never returns
a row of weight 0. ``tests/kernels/invariants.py`` checks all nodes.

Source: Schaul et al., Prioritized Experience Replay, ICLR 2016, appendix B.2.1. Costs are for ``B`` rows out of ``N``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, machine_code
from rlbuf_td.kernels.strata import NORMS, DrawLaw, empty_draws, known_step_of
from rlbuf_td.kernels.sum_tree import reference
from rlbuf_td.kernels.sum_tree.reference import weight_of
from rlbuf_td.kernels.sum_tree.tree import LARGEST, REFUSED, SMALLEST, Number, SumTree, tree_bytes

__all__ = ["LARGEST", "REFUSED", "SMALLEST", "SumTree", "draw", "fill_"]
__all__ += ["rebuild_", "reweigh_", "tree_bytes", "update_", "weigh_beside_", "weight_of"]


def update_(tree: SumTree, index: Tensor, td_error: Tensor, rows: Number, alpha: Number, eps: Number) -> float | Tensor:
    """Set the weights of the rows with the indices ``index`` to ``(|td_error| + eps) ** alpha``. O(B log N).

    An index of -1 is skipped, and a repeated row gets its last TD error. An index outside ``[-1, rows)`` or a NaN or
    infinite TD error is invalid: on the CPU, nothing changes and :data:`REFUSED` is returned; other devices skip it.

    The result is the largest ``|td_error|`` of the batch, -1 if all elements are skipped; on other devices than the CPU
    it is a 0-dim tensor.
    """
    if backend_of(tree.weight) == "numba":
        from rlbuf_td.kernels.sum_tree import cpu

        return cpu.update(tree.addresses, index.numpy(), td_error.numpy(), int(rows), float(alpha), float(eps))
    return reference.update(tree, index, td_error, rows, alpha, eps)


def fill_(tree: SumTree, start: int, count: int, magnitude: Number, alpha: Number, eps: Number) -> None:
    """Set the magnitude of the ``count`` rows from row ``start`` on. O(count + log N)."""
    if backend_of(tree.weight) == "numba":
        from rlbuf_td.kernels.sum_tree import cpu

        return cpu.fill(tree.addresses, start, count, float(magnitude), float(alpha), float(eps))
    reference.fill(tree, start, count, magnitude, alpha, eps)


def rebuild_(tree: SumTree) -> None:
    """Recompute all nodes of the tree from the weights. O(N)."""
    if backend_of(tree.weight) == "numba":
        from rlbuf_td.kernels.sum_tree import cpu

        cpu.repair_range(tree.addresses, 0, tree.weight.shape[0])
    else:
        reference.rebuild(tree)


def reweigh_(tree: SumTree, alpha: Number, eps: Number) -> None:
    """Recompute all weights from the magnitudes, after a change of ``alpha`` or ``eps``. O(N)."""
    tree.weight.copy_(torch.where(tree.magnitude < 0, 0.0, weight_of(tree.magnitude, alpha, eps)))
    rebuild_(tree)


def draw(
    tree: SumTree,
    uniform: Tensor,
    stratified: bool,
    rows: Number,
    beta: Number,
    norm: str | None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Draw rows with probability ``weight / total``, and compute their importance weights.

    Costs O(B log N) on the CPU; other devices scan all N weights.

    Args:
        tree: the sum tree.
        uniform: ``[B]`` float64 in ``[0, 1)``; the call may overwrite this tensor.
        stratified: divide the sum of all weights into ``B`` equal segments, and draw one row in each.
        rows: the number ``N`` in the importance weight ``(N * P)^-beta`` of a row drawn with probability ``P``.
        beta: exponent of the importance weight, not negative.
        norm: ``"buffer"`` or ``"batch"``: divide the importance weights by the largest one in the buffer or in the
            batch; None: do not divide them.
        out: on the CPU, the memory of the result, contiguous; None: new memory.

    Returns:
        ``[B]`` int64 rows and ``[B]`` float32 importance weights; on the CPU ``None`` if no weight is positive.
    """
    if backend_of(tree.weight) != "numba":
        return reference.draw(tree, uniform, stratified, rows, beta, norm)
    batch = uniform.shape[0]
    index, weight = out or empty_draws(batch)
    places = uniform.data_ptr(), index.data_ptr(), weight.data_ptr()
    law = DrawLaw(known_step_of(batch, stratified), float(beta), NORMS[norm])
    return (index, weight) if _draw()(tree.address, *places, batch, law, int(rows)) else None


@cache
def _draw() -> Callable[..., bool]:
    from rlbuf_td.kernels.sum_tree import cpu

    return machine_code(cpu.draw)


def weigh_beside_(tree: SumTree, index: Tensor, drawn: Tensor, beta: float, weight: Tensor) -> bool:
    """Set ``weight[:len(index)]`` to the importance weights of the rows in ``index``, and return True.

    Return False, and change nothing, except on the CPU for contiguous float32 weights: those of a user's sampler may be
    others.

    Before the call, ``weight[0]`` must hold the importance weight of the one row in ``drawn`` (shape ``[1]``). Rows
    whose weight in the tree is 0 get this importance weight, too.
    """
    if backend_of(tree.weight) != "numba" or weight.dtype is not torch.float32 or not weight.is_contiguous():
        return False
    index = index.contiguous()
    places = index.data_ptr(), drawn.data_ptr(), weight.data_ptr()
    _weigh_beside()(tree.address, *places, index.shape[0], weight.shape[0], float(beta))
    return True


@cache
def _weigh_beside() -> Callable[..., None]:
    from rlbuf_td.kernels.sum_tree import cpu

    return machine_code(cpu.weigh_beside)
