"""A sum tree over priorities: draw rows in proportion to their weight, change weights, keep the smallest at hand.

Every row has a *magnitude* ``|td_error|`` (-1 where none was given) and a *weight* ``(magnitude + eps) ** alpha``
(0 where none was given). Weights lie in blocks of eight, one cache line; eight blocks make a group, eight groups one of
the next level, up to the root. A group keeps, in one cache line each, the sums of its members, the sum *before* each of
them (what a draw compares with), and their minima (over positive weights). A draw thus reads one line a level.

Invariants, which :func:`check` states as code: a parent is *recomputed* from its children, never shifted by a
difference, so that nothing drifts and equal updates give equal trees; ``before`` is infinite behind a group's last
member of positive sum, so that a draw never returns a row of weight 0.

Source: Schaul et al., Prioritized Experience Replay, ICLR 2016, appendix B.2.1. Costs are per batch of ``B`` over ``N``
rows. The specification is :mod:`rlbuf_td.kernels.sum_tree.reference`; its twins are ``_sum_tree_numba`` for the CPU and
``_sum_tree_triton`` for CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch

from rlbuf_td.kernels.device_scalars import outside_inference_mode
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.huge_pages import advise_huge_pages
from rlbuf_td.kernels.strata import step_of
from rlbuf_td.kernels.sum_tree import reference as specification
from rlbuf_td.kernels.sum_tree.device import ALPHA, BETA, DRAWN, ENTRY, EPS, NAMED, OnDevice
from rlbuf_td.kernels.sum_tree.reference import BLOCK, LARGEST, SMALLEST, Number, weight_of

__all__ = ["BLOCK", "LARGEST", "REFUSED", "SMALLEST", "SumTree", "clear_", "draw", "fill_", "padded", "rebuild_"]
__all__ += ["reweigh_", "update_", "weight_of"]

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

    @property
    def on_device(self) -> OnDevice:
        """What the device paths need, made at first use."""
        found = self.__dict__.get("_on_device")
        if found is None:
            found = self.__dict__["_on_device"] = OnDevice(self.weight.shape[0], self.starts, self.weight.device)
        return found

    @property
    def refused(self) -> torch.Tensor | int:
        """How many NaN or infinite errors have been left out; the CPU refuses the whole batch instead."""
        return self.on_device.refused if "_on_device" in self.__dict__ else 0

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
    if "_on_device" in tree.__dict__:
        tree.on_device.largest.fill_(-1.0)


def padded(capacity: int) -> int:
    """Return the number of rows that a tree for ``capacity`` rows has: whole blocks."""
    return -(-capacity // BLOCK) * BLOCK


def update_(
    tree: SumTree,
    index: torch.Tensor,
    td_error: torch.Tensor,
    rows: Number,
    alpha: Number,
    eps: Number,
    counts: bool = True,
) -> float | torch.Tensor:
    """Set the priority of rows; of a row that is named twice, the last one stays. O(B log N).

    On the CPU the whole batch is refused, before anything changes, if a row is not in ``[-1, rows)`` or an error is NaN
    or infinite. On CUDA, where looking would wait for the device, such rows are skipped, and bad errors counted.

    Args:
        tree: changed in place.
        index: ``[B]`` int64; -1 means "skip".
        td_error: ``[B]`` float32 or float64; the sign does not matter.
        rows: number of rows that may be named; it, alpha and eps may be 0-dim tensors, for graphs that see them change.
        alpha: exponent, not negative.
        eps: added to the magnitude, not negative.
        counts: whether these are errors that have been seen: on CUDA, whether the largest one is remembered.

    Returns:
        The largest magnitude set, -1 if none, or :data:`REFUSED`; on CUDA the largest seen since :func:`clear_`, a
        0-dim tensor that later updates change.
    """
    path = backend_of(tree.weight)
    if path != "numba":
        return _update_on_device(tree, index, td_error, (alpha, eps, rows), counts, path == "triton")
    numbers = int(rows), float(alpha), float(eps)
    return cpu_twin().update(*arrays(tree), index.numpy(), td_error.numpy(), *numbers)


def _update_on_device(
    tree: SumTree,
    index: torch.Tensor,
    td_error: torch.Tensor,
    given: tuple[Number, Number, Number],
    counts: bool,
    by_triton: bool,
) -> torch.Tensor:
    state = tree.on_device
    alpha, eps, rows = state.take((ALPHA, EPS, NAMED), given)
    largest = state.largest if counts else state.unseen
    if by_triton:
        gpu_twin().update(tree, index, td_error, largest)
    else:
        among_these, refused = specification.update(tree, index, td_error, rows, alpha, eps)
        largest.copy_(torch.maximum(largest, among_these))
        state.refused.add_(refused)
    return largest


def fill_(tree: SumTree, start: int, count: int, magnitude: Number, alpha: Number, eps: Number) -> None:
    """Give ``count`` rows from ``start`` on one magnitude (new rows, say). O(count + log N)."""
    path = backend_of(tree.weight)
    if path == "numba":
        return cpu_twin().fill(*arrays(tree), start, count, float(magnitude), float(alpha), float(eps))
    alpha, eps, entry = tree.on_device.take((ALPHA, EPS, ENTRY), (alpha, eps, magnitude))
    if path == "triton":
        return gpu_twin().fill(tree, start, count, entry)
    part = slice(start, start + count)
    tree.magnitude[part] = entry
    tree.weight[part] = weight_of(tree.magnitude[part], alpha, eps)
    blocks = torch.arange(start // BLOCK, (start + count - 1) // BLOCK + 1, device=tree.weight.device)
    specification.repair(tree, blocks)


def rebuild_(tree: SumTree) -> None:
    """Compute everything above the weights anew. O(N)."""
    path = backend_of(tree.weight)
    if path == "numba":
        cpu_twin().rebuild(*arrays(tree))
    elif path == "triton":
        gpu_twin().rebuild(tree)
    else:
        specification.rebuild(tree)


def reweigh_(tree: SumTree, alpha: Number, eps: Number) -> None:
    """Compute every weight anew from its magnitude (after a change of alpha). O(N)."""
    tree.weight.copy_(torch.where(tree.magnitude < 0, 0.0, weight_of(tree.magnitude, alpha, eps)))
    rebuild_(tree)


def draw(
    tree: SumTree,
    uniform: torch.Tensor,
    stratified: bool,
    rows: Number,
    beta: Number,
    norm: str | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Draw rows with probability ``weight / total``, and their importance weights. O(B log N).

    Args:
        tree: the weights.
        uniform: ``[B]`` float64 in ``[0, 1)``; overwritten.
        stratified: draw one row from each of ``B`` segments of equal mass, rather than each row from the whole; see
            :mod:`rlbuf_td.kernels.strata`.
        rows: ``N`` of the importance weight ``(N P)^-beta``; it and beta may be 0-dim tensors.
        beta: exponent of the importance weight, not negative.
        norm: divide by the ``"buffer"``'s largest weight, the ``"batch"``'s, or nothing (``None``).

    Returns:
        ``[B]`` int64 rows and ``[B]`` float32 importance weights; ``None`` if no weight is positive (not on CUDA, where
        looking would wait for the device).
    """
    path = backend_of(tree.weight)
    if path != "numba":
        rows, beta = tree.on_device.take((DRAWN, BETA), (rows, beta))
        if path == "triton":
            return gpu_twin().draw(tree, uniform, stratified, norm)
        return specification.draw(tree, uniform, stratified, rows, beta, norm)
    batch = uniform.shape[0]
    index, weight = np.empty(batch, np.int64), np.empty(batch, np.float32)  # 4 us less than by way of torch.empty
    mode = 0 if norm == "buffer" else 1 if norm == "batch" else 2
    law = step_of(batch, stratified), int(rows), float(beta), mode
    if not cpu_twin().draw(*arrays(tree), uniform.numpy(), *law, index, weight):
        return None
    return torch.from_numpy(index), torch.from_numpy(weight)


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
    with outside_inference_mode():
        memory = torch.empty(size, dtype=torch.float64, device=device)
    if not memory.is_cuda:
        advise_huge_pages(memory)
    return memory


@cache
def cpu_twin() -> ModuleType:
    """Return the numba twin, imported (and compiled, or read from disk) on first use."""
    from rlbuf_td.kernels.sum_tree import cpu as _sum_tree_numba

    return _sum_tree_numba


@cache
def gpu_twin() -> ModuleType:
    """Return the Triton twin, imported (and compiled, or read from disk) on first use."""
    from rlbuf_td.kernels.sum_tree import cuda as _sum_tree_triton

    return _sum_tree_triton


def check(tree: SumTree, alpha: float, eps: float) -> None:
    """Assert the invariants, for tests: O(N)."""
    given = tree.magnitude >= 0
    expected = torch.where(given, weight_of(tree.magnitude, alpha, eps), 0.0)
    torch.testing.assert_close(tree.weight, expected, rtol=1e-12, atol=0.0)
    again = SumTree(**{name: tensor.clone() for name, tensor in tree.tensors().items()})
    specification.rebuild(again)
    for name in ("sums", "before", "minima"):
        torch.testing.assert_close(getattr(again, name), getattr(tree, name), rtol=1e-14, atol=0.0)
