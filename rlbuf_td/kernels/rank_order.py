"""Rows in the order of their magnitudes ``|td_error|``: rank 1 is the largest, equal magnitudes are ranked by row.

:class:`SortedOrder` is the specification: it keeps the magnitudes and sorts them when asked. It runs on any device
without waiting for it, and is what CUDA uses. :class:`~rlbuf_td.kernels.chunked_order.ChunkedOrder` has the same
methods and gives the same ranks after any history, and changes in O(log N) a row: it is what the CPU uses.

Magnitudes are float32: errors that are equal as float32 are a tie, and larger ones count as the largest float32.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from rlbuf_td.kernels.numbers import DeviceNumbers
from rlbuf_td.kernels.paths import path_of
from rlbuf_td.kernels.rank_law import HEAD, RankLaw, mass, ranks_of_mass

#: Larger errors count as this one.
LARGEST = torch.finfo(torch.float32).max
ALPHA, SHIFT, BETA, NAMED = range(4)  # the numbers of an order on a device


class RankOrder(Protocol):
    """What a rank-based sampler asks of an order over ``capacity`` rows. ``B`` is the length of a batch."""

    def update_(self, index: Tensor, td_error: Tensor, rows: int, counts: bool = True) -> float | Tensor | None:
        """Give rows ``|td_error|``; -1 is skipped, and of a row that is named twice the last one stays.

        Args:
            index: ``[B]`` int64.
            td_error: ``[B]`` float32 or float64.
            rows: number of rows that may be named.
            counts: whether these are errors that have been seen: on CUDA, whether the largest one is remembered.

        Returns:
            The largest magnitude given, -1 if none. On the CPU ``None`` if a row is not in ``[-1, rows)`` or an error
            is NaN or infinite, and then nothing has changed; on CUDA rows with such errors keep what they have, the
            errors are counted, and the largest magnitude is that of all updates, a 0-dim tensor that later ones change.
        """

    def fill_(self, start: int, count: int, magnitude: float | Tensor) -> None:
        """Give ``count`` rows from ``start`` on one magnitude."""

    def draw(
        self, law: RankLaw, uniform: Tensor, *, stratified: bool, beta: float, norm: str | None
    ) -> tuple[Tensor, Tensor] | None:
        """Draw rows by rank.

        Args:
            law: probabilities of ranks.
            uniform: ``[B]`` float64 in ``[0, 1)``.
            stratified: draw one row from each of ``B`` segments of equal mass, rather than each row from the whole.
            beta: exponent of the importance weight ``(N P)^-beta``, not negative.
            norm: divide by the ``"buffer"``'s largest weight, the ``"batch"``'s, or nothing (``None``).

        Returns:
            ``[B]`` int64 rows and ``[B]`` float32 importance weights; ``None`` if no row has a magnitude (not on CUDA).
        """

    def ranks_of(self, index: Tensor) -> Tensor:
        """Return ranks of rows, int64; 0 for a row without a magnitude."""

    def count(self) -> Tensor:
        """Return how many rows have a magnitude, a 0-dim int64 tensor."""

    def assign_(self, magnitude: Tensor) -> None:
        """Make the order anew of ``[capacity]`` float32 magnitudes, in the memory that it has, whatever that holds."""

    def share_memory_(self) -> None:
        """Move the state into shared memory: a process that is given this object sees the same order."""

    @property
    def magnitude(self) -> Tensor:
        """``[capacity]`` float32, -1 for rows without; to be read only."""

    @property
    def refused(self) -> Tensor | int:
        """How many NaN or infinite errors have been left out; 0 on the CPU, which refuses the whole batch."""


class OnDevice:
    """What an order has beside its magnitudes on a device path, always in the same memory.

    Attributes:
        numbers: alpha, the shift of the law, beta, the rows that may be named.
        head: the table of the law.
        claims: ``[capacity]`` int32, -1 between updates: which mention of a row writes it.
        largest: 0-dim float64, the largest magnitude seen, -1 before any.
        unseen: where the largest of others than that goes.
        refused: 0-dim int64, how many NaN or infinite errors have been left out.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.numbers = DeviceNumbers(4, device)
        self.head = torch.zeros(HEAD, dtype=torch.float64, device=device)
        self.claims = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        self.largest = torch.full((), -1.0, dtype=torch.float64, device=device)
        self.unseen = torch.full((), -1.0, dtype=torch.float64, device=device)
        self.refused = torch.zeros((), dtype=torch.int64, device=device)
        self._law: RankLaw | None = None

    def take(self, law: RankLaw, beta: float) -> None:
        """Put a law where kernels and captured graphs read it; call it outside the graph."""
        if law is not self._law:
            self._law = law
            self.head.copy_(law.head)
            self.numbers.set_(ALPHA, law.alpha)
            self.numbers.set_(SHIFT, law.shift)
        self.numbers.set_(BETA, beta)


class SortedOrder:
    """Sort when asked, if something has changed since: O(N log N), on the device.

    Args:
        magnitude: ``[capacity]`` float32, -1 for rows without; owned by the order from now on.
        stale_updates: sort again only when there have been more updates than this; 0 is exact.
    """

    def __init__(self, magnitude: Tensor, stale_updates: int = 0) -> None:
        self._magnitude = magnitude
        self._stale_updates = stale_updates
        self._behind = -1  # updates since the last sort; -1 before the first
        self._by_rank = self._count = magnitude.new_empty(0, dtype=torch.int64)
        self._by_row: Tensor | None = None
        self._on_device: OnDevice | None = None

    @property
    def on_device(self) -> OnDevice:
        """What the device paths need, made at first use."""
        if self._on_device is None:
            self._on_device = OnDevice(len(self._magnitude), self._magnitude.device)
        return self._on_device

    @property
    def refused(self) -> Tensor | int:
        """See :class:`RankOrder`."""
        return 0 if self._on_device is None else self._on_device.refused

    @property
    def magnitude(self) -> Tensor:
        """See :class:`RankOrder`."""
        return self._magnitude

    def assign_(self, magnitude: Tensor) -> None:
        """See :meth:`RankOrder.assign_`."""
        self._magnitude.copy_(magnitude)
        self.forget_order()
        if self._on_device is not None:
            self._on_device.largest.fill_(-1.0)

    def forget_order(self) -> None:
        """Sort again at the next question: a captured graph has changed magnitudes."""
        self._behind = -1

    def share_memory_(self) -> None:
        """Refuse: what has been sorted is known to one process.

        Raises:
            ValueError: always.
        """
        raise ValueError("an order on a device cannot be shared by several processes")

    def update_(self, index: Tensor, td_error: Tensor, rows: int, counts: bool = True) -> float | Tensor | None:
        """See :meth:`RankOrder.update_`. O(B log B)."""
        path = path_of(index)
        if path == "numba":
            if bool(((index < -1) | (index >= rows) | ~td_error.isfinite()).any()):
                return None
            return self._update(index, td_error, rows)[0]
        state = self.on_device
        largest = state.largest if counts else state.unseen
        if path == "triton":
            state.numbers.set_(NAMED, rows)
            gpu_twin().update(self, index, td_error, largest)
            self._changed()
        else:
            given, refused = self._update(index, td_error, rows)
            largest.copy_(torch.maximum(largest, given))
            state.refused.add_(refused)
        return largest

    def _update(self, index: Tensor, td_error: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return the largest magnitude given and how many errors were left out, 0-dim."""
        named = (index >= 0) & (index < rows)
        valid = named & td_error.isfinite()
        magnitude = as_float32(td_error).abs()
        # Every mention of a row is given the value of its last one, and every skipped mention repeats the last valid
        # row: the order of the scatter cannot matter, and no shape depends on data.
        ordered, order = torch.where(valid, index, -1).sort(stable=True)
        target = torch.where(ordered < 0, ordered[-1], ordered)
        last = order[torch.searchsorted(ordered, target, right=True) - 1]
        row = target.clamp(min=0)
        self._magnitude[row] = torch.where(target < 0, self._magnitude[row], magnitude[last])
        self._changed()
        return torch.where(valid, magnitude, -1.0).max().to(torch.float64), (named & ~valid).sum()

    def fill_(self, start: int, count: int, magnitude: float | Tensor) -> None:
        """See :meth:`RankOrder.fill_`. O(count)."""
        value = as_float32(magnitude) if isinstance(magnitude, Tensor) else min(magnitude, LARGEST)
        self._magnitude[start : start + count] = value
        self._behind = -1  # a row that is new must be known at once

    def _changed(self) -> None:
        self._behind += self._behind >= 0

    def _refresh(self) -> None:
        if 0 <= self._behind <= self._stale_updates:
            return
        # Stable, so that ties are by row; rows without a magnitude, -1, come last.
        self._by_rank = self._magnitude.sort(descending=True, stable=True).indices
        self._by_row = None
        self._count = (self._magnitude >= 0).sum()
        self._behind = 0

    def draw(
        self, law: RankLaw, uniform: Tensor, *, stratified: bool, beta: float, norm: str | None
    ) -> tuple[Tensor, Tensor] | None:
        """See :meth:`RankOrder.draw`. O(B) after the sort."""
        self._refresh()
        rows, path = self._count, path_of(uniform)
        if path == "numba" and not rows:
            return None
        if path == "triton":
            self.on_device.take(law, beta)
            return gpu_twin().draw(self, uniform, self._by_rank, rows, stratified, norm)
        total = mass(law, rows)
        batch = uniform.shape[0]
        value = uniform * total
        if stratified:
            value = (torch.arange(batch, device=uniform.device) + uniform) * (total / batch)
        ranks = ranks_of_mass(law, value, rows)
        power = law.alpha * beta
        # (N P)^-beta is r^(alpha beta) times a constant; the least probable rank has the largest weight.
        log_scale = beta * torch.log(total / rows)
        if norm is not None:
            log_scale = -power * torch.log((rows if norm == "buffer" else ranks.max()).to(torch.float64))
        weight = torch.exp(power * torch.log(ranks.to(torch.float64)) + log_scale)
        return self._by_rank[ranks - 1], weight.to(torch.float32)

    def ranks_of(self, index: Tensor) -> Tensor:
        """See :meth:`RankOrder.ranks_of`. O(B) after the sort."""
        self._refresh()
        if self._by_row is None:
            self._by_row = torch.empty_like(self._by_rank)
            self._by_row[self._by_rank] = torch.arange(1, len(self._by_rank) + 1, device=self._by_rank.device)
        return torch.where(self._magnitude[index] >= 0, self._by_row[index], 0)

    def count(self) -> Tensor:
        """See :meth:`RankOrder.count`."""
        self._refresh()
        return self._count


def as_float32(td_error: Tensor) -> Tensor:
    """Return errors as float32; finite ones stay finite."""
    if td_error.dtype is torch.float32:
        return td_error
    return torch.where(td_error.isfinite(), td_error.clamp(-LARGEST, LARGEST), td_error).to(torch.float32)


def make_order(magnitude: Tensor, stale_updates: int = 0) -> RankOrder:
    """Make the order of ``[capacity]`` float32 magnitudes, -1 for rows without, for the device on which they live."""
    if path_of(magnitude) != "numba":
        return SortedOrder(magnitude, stale_updates)
    from rlbuf_td.kernels.chunked_order import ChunkedOrder

    return ChunkedOrder(magnitude)


@cache
def gpu_twin() -> ModuleType:
    """Return the Triton twin, imported (and compiled, or read from disk) on first use."""
    from rlbuf_td.kernels import _rank_triton

    return _rank_triton


def order_bytes(capacity: int, device: torch.device) -> int:
    """Return the bytes of what :func:`make_order` makes for so many rows."""
    if device.type == "cuda":
        return capacity * (4 + 4 + 8 + 8)  # magnitudes, claims, rows by rank, ranks by row
    from rlbuf_td.kernels import _rank_chunks

    with torch.device("meta"):  # shapes without memory
        return sum(tensor.nbytes for tensor in _rank_chunks.allocate(capacity).values())
