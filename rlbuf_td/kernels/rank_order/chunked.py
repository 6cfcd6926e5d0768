"""The rows in the order of their priorities, on the CPU; every update keeps them sorted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from multiprocessing.context import get_spawning_popen
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import machine_code
from rlbuf_td.kernels.rank_order.chunks import ROWS, Chunks, addresses, allocate
from rlbuf_td.kernels.rank_order.law import RankLaw
from rlbuf_td.kernels.rank_order.reference import LARGEST, as_float32
from rlbuf_td.kernels.strata import NORMS, DrawLaw, empty_draws, known_step_of


class ChunkedOrder:
    """Rows sorted by magnitude ``|td_error|``, with the methods of ``SortedOrder``.

    Cost: a draw takes O(B log N), and O(N / 96) if rows have changed since the last one. An update takes
    O(B (128 + log N)). At most once per N / 3 changed rows, an update also rearranges all rows, in O(N). The memory is
    15 to 27 bytes per row.
    """

    refused = 0

    def __init__(self, magnitude: Tensor) -> None:
        self._adopt(allocate(len(magnitude)))
        self._fill_with(magnitude)

    def _adopt(self, tensors: dict[str, Tensor]) -> None:
        chunks = Chunks(**{name: tensor.numpy() for name, tensor in tensors.items()})
        record, magnitude = addresses(chunks), tensors["bits"].view(torch.float32)
        place = record.ctypes.data
        # At once, because an interrupt may come: the record has addresses of the tensors.
        self._tensors, self.chunks, self.addresses, self.address = tensors, chunks, record, place
        self.magnitude = magnitude
        self.lock = Lock()  # held around the loops, which release the GIL

    def _fill_with(self, magnitude: Tensor) -> None:
        self.magnitude.copy_(magnitude)
        rows = np.flatnonzero(self.chunks.bits >= 0)
        if len(rows) or self.chunks.head[ROWS]:
            keys = (0x7FFFFFFF - self.chunks.bits[rows].astype(np.int64)) << 32 | rows  # as cpu.key_of
            keys.sort()
            from rlbuf_td.kernels.rank_order import cpu_update

            cpu_update.arrange(self.addresses, keys)

    def assign_(self, magnitude: Tensor) -> None:
        with self.lock:
            self._fill_with(magnitude)

    def share_memory_(self) -> None:
        self._adopt({name: tensor.clone().share_memory_() for name, tensor in self._tensors.items()})

    def update_(self, index: Tensor, td_error: Tensor, rows: int) -> float | Tensor:
        with self.lock:
            from rlbuf_td.kernels.rank_order import cpu_update

            return cpu_update.update(self.addresses, index.numpy(), as_float32(td_error).numpy(), rows)

    def fill_(self, start: int, count: int, magnitude: float | Tensor) -> None:
        if count > 0:
            bits = int(np.float32(min(float(magnitude), LARGEST)).view(np.int32))
            with self.lock:
                from rlbuf_td.kernels.rank_order import cpu_update

                cpu_update.fill(self.addresses, np.arange(start, start + count), bits)

    def draw(
        self,
        law: RankLaw,
        uniform: Tensor,
        *,
        stratified: bool,
        beta: float,
        norm: str | None,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        batch = uniform.shape[0]
        index, weight = out or empty_draws(batch)
        places = uniform.data_ptr(), index.data_ptr(), weight.data_ptr()
        how = DrawLaw(known_step_of(batch, stratified), float(beta), NORMS[norm])
        with self.lock:
            has_rows = _draw()(self.address, law.compiled, *places, batch, how)
        return (index, weight) if has_rows else None

    def ranks_of(self, index: Tensor) -> Tensor:
        ranks = np.empty(index.shape[0], np.int64)
        with self.lock:
            from rlbuf_td.kernels.rank_order import cpu

            inside = cpu.ranks_of(self.addresses, index.numpy(), ranks)
        if not inside:
            low, high, last = int(index.min()), int(index.max()), len(self.magnitude) - 1
            raise IndexError(f"row {low if low < 0 else high} is out of range: rows are 0 to {last}")
        return torch.from_numpy(ranks)

    def count(self) -> Tensor:
        return self._tensors["head"][ROWS]

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None and self.magnitude.is_shared():
            return {"tensors": self._tensors}
        with self.lock:
            return {"magnitude": self.magnitude.clone()}  # the rest is derived from it

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "tensors" in state:
            self._adopt(state["tensors"])
        else:
            self.__init__(state["magnitude"])  # type: ignore[misc]


@cache
def _draw() -> Callable[..., bool]:
    from rlbuf_td.kernels.rank_order import cpu

    return machine_code(cpu.draw_at)
