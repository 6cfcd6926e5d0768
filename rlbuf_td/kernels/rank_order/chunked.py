"""The order on the CPU: always sorted, in chunks that split and merge."""

from __future__ import annotations

from functools import cache
from multiprocessing.context import get_spawning_popen
from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.rank_order.chunks import ROWS, Chunks, allocate, clear, views
from rlbuf_td.kernels.rank_order.law import RankLaw
from rlbuf_td.kernels.rank_order.reference import LARGEST, as_float32
from rlbuf_td.kernels.strata import step_of

#: From this many rows on, ``fill_`` goes through the old keys in their order.
_MANY = 256


class ChunkedOrder:
    """Rows in the order of their magnitudes, exact after every change.

    Has the methods of :class:`~rlbuf_td.kernels.rank_order.reference.SortedOrder`. The layout and its invariants are
    told in :mod:`rlbuf_td.kernels.rank_order.chunks`. Which values are stored does not matter: equal, monotone and
    adversarial ones cost the same.

    Args:
        magnitude: ``[capacity]`` float32, -1 for rows without; copied.

    Cost: a draw is O(B log N), an update O(B (128 + log N)); a fill sorts and deletes what the rows had.
    15 to 27 bytes per row, about 22 after random updates.

    Example:
        >>> order = ChunkedOrder(torch.full((5,), -1.0))
        >>> order.update_(torch.tensor([0, 1, 3]), torch.tensor([0.5, -2.0, 0.5]), rows=5)
        2.0
        >>> order.ranks_of(torch.arange(5))
        tensor([2, 1, 0, 3, 0])
    """

    def __init__(self, magnitude: Tensor) -> None:
        self._adopt(allocate(len(magnitude)))
        self._fill_with(magnitude)

    def _adopt(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._chunks = views(tensors)
        self._magnitude = tensors["bits"].view(torch.float32)
        # The loops let go of the GIL, and a prefetching buffer draws while priorities are updated.
        self._lock = Lock()

    def _fill_with(self, magnitude: Tensor) -> None:
        if bool((magnitude >= 0).any()):
            self._magnitude.copy_(magnitude)
            keys = _cpu_update().keys_of(self._chunks.bits)
            keys.sort()
            _cpu_update().append_sorted(self._chunks, keys)

    def assign_(self, magnitude: Tensor) -> None:
        """See :meth:`SortedOrder.assign_`. O(N log N)."""
        with self._lock:
            clear(self._tensors)
            self._fill_with(magnitude)

    def share_memory_(self) -> None:
        """See :meth:`SortedOrder.share_memory_`. O(N)."""
        self._adopt({name: tensor.clone().share_memory_() for name, tensor in self._tensors.items()})

    refused = 0

    def prepare_capture(self, law: RankLaw, beta: float, rows: int) -> None:
        """Do nothing: the CPU captures no graphs."""

    def forget_order(self) -> None:
        """Do nothing: no graph changes magnitudes."""

    @property
    def magnitude(self) -> Tensor:
        """See :class:`SortedOrder`."""
        return self._magnitude

    @property
    def chunks(self) -> Chunks:
        """The state, as NumPy arrays."""
        return self._chunks

    def update_(self, index: Tensor, td_error: Tensor, rows: int, counts: bool = True) -> float | Tensor | None:
        """See :meth:`SortedOrder.update_`. O(B (128 + log N))."""
        flat, error = index.numpy(), as_float32(td_error).numpy()
        if not _cpu_update().acceptable(flat, error, rows):
            return None
        with self._lock:
            return _cpu_update().update_rows(self._chunks, flat, error)

    def fill_(self, start: int, count: int, magnitude: float | Tensor) -> None:
        """See :meth:`SortedOrder.fill_`. O(count), and the deletion of the old keys."""
        if count < 1:
            return
        value = np.float32(min(float(magnitude), LARGEST))
        with self._lock:
            if count < _MANY:
                index = np.arange(start, start + count)
                _cpu_update().update_rows(self._chunks, index, np.full(count, value))
                return
            old = _cpu_update().take_range(self._chunks, start, start + count)
            old.sort()
            _cpu_update().delete_sorted(self._chunks, old)
            _cpu_update().insert_range(self._chunks, start, start + count, value.view(np.int32))

    def draw(
        self, law: RankLaw, uniform: Tensor, *, stratified: bool, beta: float, norm: str | None
    ) -> tuple[Tensor, Tensor] | None:
        """See :meth:`SortedOrder.draw`. O(B log N)."""
        batch = uniform.shape[0]
        index, weight = np.empty(batch, np.int64), np.empty(batch, np.float32)
        cpu = _cpu()
        mode = cpu.BUFFER if norm == "buffer" else cpu.BATCH if norm == "batch" else 2
        st, step = self._chunks, step_of(batch, stratified)
        with self._lock:
            drawn = cpu.draw(
                *(st.head, st.top_tree, st.top_group, st.before, st.child, st.keys),
                *(uniform.numpy(), law.head.numpy(), law.alpha, law.shift, beta, step, mode, index, weight),
            )
        return (torch.from_numpy(index), torch.from_numpy(weight)) if drawn else None

    def ranks_of(self, index: Tensor) -> Tensor:
        """See :meth:`SortedOrder.ranks_of`. O(B log N)."""
        ranks = np.empty(index.shape[0], np.int64)
        with self._lock:
            inside = _cpu().ranks_of(self._chunks, index.numpy(), ranks)
        if not inside:
            low, high, last = int(index.min()), int(index.max()), len(self._magnitude) - 1
            raise IndexError(f"row {low if low < 0 else high} is out of range: rows are 0 to {last}")
        return torch.from_numpy(ranks)

    def count(self) -> Tensor:
        """See :meth:`SortedOrder.count`. O(1)."""
        return self._tensors["head"][ROWS]

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None and self._magnitude.is_shared():
            return {"tensors": self._tensors}
        with self._lock:
            return {"magnitude": self._magnitude.clone()}  # all the rest follows from it

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "tensors" in state:
            self._adopt(state["tensors"])
        else:
            self.__init__(state["magnitude"])  # type: ignore[misc]


@cache
def _cpu() -> ModuleType:
    from rlbuf_td.kernels.rank_order import cpu

    return cpu


@cache
def _cpu_update() -> ModuleType:
    from rlbuf_td.kernels.rank_order import cpu_update

    return cpu_update
