"""A sum tree over priorities, which draws rows with probabilities proportional to their
weights.

Every row has a *magnitude* ``|td_error|`` (-1 if not set) and a *weight*
``(magnitude + eps) ** alpha`` (0 if not set), both float32. Sixteen weights form a
block, eight blocks form a group, and eight groups form a group of the next level, up to
the root. A group stores three float64 numbers for each of its eight members: the sum of
the member's weights, the sum of all members *before* it, and the smallest positive
weight in the member. The weights of a block, and the eight numbers of one kind of a
group, fill a cache line, and a draw reads one cache line per level.

A weight is computed in float64, and rounded. Probabilities are exact for the rounded
weights.

An update *recomputes* a parent from its children, and never adjusts it by a difference.
Rounding errors therefore do not accumulate. If the last members of a group have sum 0,
their ``before`` is infinite. A draw therefore never returns a row of weight 0.
:meth:`SumTree.check` says this of all nodes.

Other devices have no nodes: they read a million weights in the time of a few kernel
launches, so that a draw scans the weights of all rows, without host synchronisation.
The kernels of a GPU scan the sums of blocks of 1,024 weights (``blocks.py``).

Source: Schaul et al., Prioritized Experience Replay, ICLR 2016, appendix B.2.1. Costs
are for ``B`` rows out of ``N``.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, record_of, uses_numba
from rlbuf_td.kernels.host_memory import advise_huge_pages, outside_inference_mode
from rlbuf_td.kernels.strata import BY_BATCH, BY_BUFFER, Stratification, masses
from rlbuf_td.kernels.sum_tree.blocks import block_count, set_blocks_

#: A number, or a 0-dim tensor, whose changes ``torch.compile`` does not notice.
Number: TypeAlias = float | Tensor

BLOCK, GROUP = 16, 8  # weights per block, and blocks or groups per group
#: Bounds of weights, normal float32 numbers: no positive float32 priority gets the
# weight 0, and none an infinite one.
SMALLEST = 2.0**-126
LARGEST = 2.0**126
#: Larger magnitudes count as this value, the largest float32.
LARGEST_MAGNITUDE = torch.finfo(torch.float32).max
#: What an update returns, instead of a magnitude, if it refuses the batch.
REFUSED = -2.0


class SumTree:
    """A sum tree for less than ``rows`` rows, a multiple of 16. Only trees for compiled
    loops have nodes.

    Its numbers lie in two blocks, because ``torch.compile`` takes no views of several
    dtypes of one block.

    Attributes:
        magnitude: ``[rows]`` float32, ``|td_error|`` of each row, -1 if not set.
        weight: ``[rows]`` float32, 0 if not set.
        sums: float64, the sums of all levels, from the blocks to the root; each level
            is padded to whole groups.
        before: in the same layout, the sum of the members before each member of a
            group.
        minima: in the same layout, the smallest positive weight below each node,
            infinite if there is none.
        refused: the number of skipped NaN or infinite TD errors, 0-dim; 0 on the CPU,
            which refuses such a batch.
        blocks: for kernels on a GPU, see :mod:`rlbuf_td.kernels.sum_tree.blocks`;
            elsewhere ``[2, 0]``.
    """

    NAMES: ClassVar = ("magnitude", "weight", "sums", "before", "minima")

    def __init__(self, leaves: Tensor, nodes: Tensor) -> None:
        self.rows = len(leaves) // 2
        self.lock = Lock()  # held around loops, which release the GIL
        with outside_inference_mode():
            self.refused = torch.zeros((), dtype=torch.int64, device=leaves.device)
            is_on_gpu = backend_of(leaves) == "triton"
            count = block_count(self.rows) if is_on_gpu else 0
            self.blocks = torch.zeros(
                (2, count), dtype=torch.float64, device=leaves.device
            )
        self._adopt(leaves, nodes)

    def _adopt(self, leaves: Tensor, nodes: Tensor) -> None:
        self.magnitude, self.weight = leaves.chunk(2)
        self.sums, self.before, self.minima = nodes.chunk(3)
        self.leaves, self.nodes = leaves, nodes
        self._record: tuple[int, int, int, np.ndarray] = 0, 0, 0, np.empty(0)

    @classmethod
    def empty(cls, capacity: int, device: torch.device | str = "cpu") -> SumTree:
        """Return a tree for ``capacity`` rows, all without a priority."""
        rows, nodes = _sizes(capacity, uses_numba(torch.device(device)))
        with outside_inference_mode():
            leaves = torch.empty(2 * rows, dtype=torch.float32, device=device)
            tree = cls(
                leaves, torch.empty(3 * nodes, dtype=torch.float64, device=device)
            )
        for block in (tree.leaves, tree.nodes):
            advise_huge_pages(block)
        tree.magnitude.fill_(-1.0)
        tree.weight.zero_()
        tree.sums.zero_()
        tree.before.fill_(torch.inf)[::GROUP] = 0.0
        tree.minima.fill_(torch.inf)
        rebuild_blocks_(tree)
        return tree

    @property
    def has_nodes(self) -> bool:
        return self.sums.shape[0] > 0

    @property
    def is_launched(self) -> bool:
        """Whether kernels on a GPU draw and update."""
        return self.blocks.shape[1] > 0 and backend_of(self.weight) == "triton"

    @cached_property
    def starts(self) -> list[int]:
        """The index at which each level begins in ``sums``, ``before`` and
        ``minima``."""
        return _starts(self.weight.shape[0])

    @property
    def total(self) -> Tensor:
        return (
            self.sums[self.starts[-1]]
            if self.has_nodes
            else self.weight.sum(dtype=torch.float64)
        )

    @property
    def smallest(self) -> Tensor:
        """The smallest positive weight, 0-dim; infinite if there is none."""
        if self.has_nodes:
            return self.minima[self.starts[-1]]
        return self.weight.masked_fill(self.weight == 0, torch.inf).amin()

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.NAMES}

    def share_memory_(self) -> None:
        self._adopt(
            self.leaves.clone().share_memory_(), self.nodes.clone().share_memory_()
        )

    @property
    def address(self) -> int:
        """The address of a :data:`TREE` record, which is the same as long as the memory
        has not moved."""
        leaves = self.leaves.data_ptr()
        nodes = self.nodes.data_ptr()
        if self._record[0] != leaves or self._record[1] != nodes:
            tensors = {
                name: tensor.data_ptr() for name, tensor in self.tensors().items()
            }
            sizes = {
                "levels": len(self._starts),
                "rows": self.rows,
                "nodes": len(self.sums),
            }
            record = record_of(
                TREE, **sizes, **tensors, starts=self._starts.ctypes.data
            )
            # at once: an interrupt may come
            self._record = leaves, nodes, record.ctypes.data, record
        return self._record[2]

    @property
    def addresses(self) -> np.ndarray:
        """The record at :attr:`address`, ``[1]``."""
        self.address  # noqa: B018  # made anew if the memory has moved
        return self._record[3]

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.array(self.starts, np.int64)

    def set_nodes_(self) -> None:
        """Recompute all nodes from the weights, in torch; the compiled form is
        ``cpu.repair_range``."""
        weight = self.weight.view(-1, BLOCK)
        count = len(weight)
        self.sums[:count] = weight.sum(1, dtype=torch.float64)
        self.minima[:count] = torch.where(weight > 0, weight, torch.inf).amin(1)
        for start, above in pairwise(self.starts):
            sums = self.sums[start:above].view(-1, GROUP)
            count = (above - start) // GROUP
            total = sums.cumsum(1)
            # by a positive sum, its own included
            is_followed = sums.flip(1).cumsum(1).flip(1) > 0
            self.before[start:above].view(-1, GROUP)[:, 1:] = torch.where(
                is_followed[:, 1:], total[:, :-1], torch.inf
            )
            self.sums[above : above + count] = total[:, -1]
            self.minima[above : above + count] = (
                self.minima[start:above].view(-1, GROUP).amin(1)
            )

    def check(self, alpha: float, eps: float) -> None:
        """Raise an AssertionError unless the weights follow from the magnitudes, and
        the nodes from the weights."""
        expected = weight_of(self.magnitude, alpha, eps)
        # powers may round otherwise
        torch.testing.assert_close(self.weight, expected, rtol=2.0**-23, atol=0.0)
        if self.has_nodes:
            again = SumTree(self.leaves, self.nodes.clone())
            again.set_nodes_()
            for name in ("sums", "before", "minima"):
                torch.testing.assert_close(
                    getattr(again, name), getattr(self, name), rtol=1e-14, atol=0.0
                )
        if self.blocks.shape[1]:
            sums = torch.empty_like(self.blocks)
            set_blocks_(sums, self.weight)
            torch.testing.assert_close(self.blocks, sums, rtol=1e-14, atol=0.0)

    def __getstate__(self) -> dict[str, Tensor]:
        # without the addresses, which are invalid in a copy
        return {"leaves": self.leaves, "nodes": self.nodes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)
        rebuild_blocks_(self)


#: The numbers of levels, rows and nodes of a tree, and the addresses of its ``starts``
# and of its tensors.
TREE = np.dtype(
    [(name, np.int64) for name in ("levels", "rows", "nodes", "starts", *SumTree.NAMES)]
)


def tree_bytes(capacity: int, device: torch.device) -> int:
    """Return the memory of a tree for ``capacity`` rows: 10 bytes per row on the CPU, 8
    on other devices."""
    rows, nodes = _sizes(capacity, device.type == "cpu")
    return 8 * rows + 24 * nodes


def _sizes(capacity: int, has_nodes: bool) -> tuple[int, int]:
    """Return the numbers of leaves and of nodes of a tree for ``capacity`` rows."""
    # `write_magnitudes` needs an element behind all rows
    rows = (capacity // BLOCK + 1) * BLOCK
    nodes = _starts(rows)[-1] + GROUP if has_nodes else 0
    return rows, nodes


def _starts(rows: int) -> list[int]:
    starts = [0]
    size = rows // BLOCK
    while size > 1:
        size = -(-size // GROUP)
        starts.append(starts[-1] + size * GROUP)
    return starts


def magnitudes_of(td_error: Tensor) -> Tensor:
    """Return ``|td_error|`` as float32, at most :data:`LARGEST_MAGNITUDE`; NaN and
    infinite TD errors stay."""
    magnitude = td_error.abs()
    if td_error.dtype is torch.float32:
        return magnitude
    bounded = torch.where(
        magnitude.isfinite(), magnitude.clamp(max=LARGEST_MAGNITUDE), magnitude
    )
    return bounded.to(torch.float32)


def write_magnitudes(
    memory: Tensor, index: Tensor, td_error: Tensor, rows: float | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Set ``memory[index] = |td_error|`` for finite TD errors and
    ``0 <= index < rows``, the last one of equal indices.

    All others write -1 to the last element, which belongs to no row: no shape depends
    on data, and the host does not wait. Return the written elements and their values,
    ``[B]`` each, the largest valid magnitude, -1 if there is none, and the number of
    NaN or infinite TD errors at indices in ``[0, rows)``.
    """
    magnitude = magnitudes_of(td_error)
    outside = (index < 0) | (index >= rows)
    invalid = outside | ~(magnitude < torch.inf)
    magnitude = magnitude.masked_fill(invalid, -1.0)
    target = index.masked_fill(invalid, len(memory) - 1)
    ordered, order = target.sort(stable=True)
    # equal for equal targets
    value = magnitude[order[torch.searchsorted(ordered, target, right=True) - 1]]
    memory[target] = value
    return target, value, magnitude.max(), (invalid != outside).sum()


def weight_of(magnitude: Tensor, alpha: Number, eps: Number) -> Tensor:
    """Return the weights of magnitudes, float32: 0 for those below 0; no other priority
    than 0 has the weight 0."""
    priority = magnitude.to(torch.float64) + eps
    weight = priority.pow(alpha)
    weight = torch.where(priority > 0, weight.clamp(SMALLEST, LARGEST), weight)
    return weight.masked_fill(magnitude < 0, 0.0).to(torch.float32)


def update_(
    tree: SumTree,
    index: Tensor,
    td_error: Tensor,
    rows: Number,
    alpha: Number,
    eps: Number,
) -> float | Tensor:
    """Set the weights of the rows with the indices ``index`` to
    ``(|td_error| + eps) ** alpha``. O(B log N).

    An index of -1 is skipped, and a repeated row gets its last TD error. An index
    outside ``[-1, rows)`` or a NaN or infinite TD error is invalid: on the CPU, nothing
    changes and :data:`REFUSED` is returned; other devices skip it.

    The result is the largest ``|td_error|`` of the batch, -1 if all elements are
    skipped; on other devices than the CPU it is a 0-dim tensor.
    """
    if backend_of(tree.weight) == "numba":
        from rlbuf_td.kernels.sum_tree import cpu

        magnitude = magnitudes_of(td_error).numpy()
        return cpu.update(
            tree.addresses,
            index.numpy(),
            magnitude,
            int(rows),
            float(alpha),
            float(eps),
        )
    target, magnitude, largest, refused = write_magnitudes(
        tree.magnitude, index, td_error, rows
    )
    tree.weight[target] = weight_of(magnitude, alpha, eps)
    tree.refused.add_(refused)
    rebuild_(tree)
    return largest


def rebuild_(tree: SumTree) -> None:
    """Recompute all nodes and blocks of the tree, if it has any, from the weights.
    O(N)."""
    if backend_of(tree.weight) == "numba":
        from rlbuf_td.kernels.sum_tree import cpu

        return cpu.repair_range(tree.addresses, 0, tree.weight.shape[0])
    if tree.has_nodes:
        tree.set_nodes_()
    rebuild_blocks_(tree)


def rebuild_blocks_(tree: SumTree) -> None:
    """Sum all blocks of weights again, if the tree has any. O(N)."""
    if tree.is_launched:
        from rlbuf_td.kernels.sum_tree import triton

        triton.sum_blocks_(tree)
    elif tree.blocks.shape[1]:
        set_blocks_(tree.blocks, tree.weight)


def reweigh_(tree: SumTree, alpha: Number, eps: Number) -> None:
    """Recompute all weights from the magnitudes, after a change of ``alpha`` or
    ``eps``. O(N)."""
    tree.weight.copy_(weight_of(tree.magnitude, alpha, eps))
    rebuild_(tree)


def draw(
    tree: SumTree, uniform: Tensor, rows: Number, law: Stratification
) -> tuple[Tensor, Tensor]:
    """Draw rows with probability ``weight / total``, and compute their importance
    weights. O(N): scans all weights.

    Args:
        tree: the sum tree.
        uniform: ``[B]`` float64 in ``[0, 1)``; the call may overwrite this tensor.
        rows: the number ``N`` in the importance weight ``(N * P)^-beta`` of a row drawn
            with probability ``P``.
        law: how the ``B`` rows are drawn and weighed.

    Returns:
        ``[B]`` int64 rows and ``[B]`` float32 importance weights.
    """
    sums = tree.weight.cumsum(0, dtype=torch.float64)
    total = sums[-1]
    positions = masses(uniform, total, law.step)
    index = torch.searchsorted(sums, positions, right=True)
    index = index.clamp(max=len(tree.weight) - 1)
    # A scan on many cores rounds differently from row to row. A draw that rounding
    # leads to a row of weight 0, or beyond the last row, takes the row with the largest
    # weight instead.
    chosen = tree.weight[index]
    largest, its_row = tree.weight.max(0)
    is_valid = chosen > 0
    index = torch.where(is_valid, index, its_row)
    chosen = torch.where(is_valid, chosen, largest).to(torch.float64)
    if law.norm == BY_BUFFER:
        smallest = tree.smallest
    elif law.norm == BY_BATCH:
        smallest = chosen.amin()
    else:
        smallest = total / rows
    return index, (chosen / smallest).pow(-law.beta).to(torch.float32)
