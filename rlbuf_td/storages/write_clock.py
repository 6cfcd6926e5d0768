"""Counts writes: finds rows that were rewritten after they were sampled, and knows whether rows are in time order."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

from rlbuf_td.kernels import rows as row_kernels
from rlbuf_td.kernels.host_memory import address_of
from rlbuf_td.kernels.inference_mode import outside_inference_mode
from rlbuf_td.storages.indexing import first_of_row, flat_rows, inner_dims
from rlbuf_td.storages.shared.memory import SharedNumbers

#: Entry of a prioritized batch: the clock's count when the row was sampled, ``[B]`` int64. Also called stamp.
SAMPLED_AT = "sampled_at"
#: Indices of `WriteClock.numbers`: count of written time steps; time step after which a ring continues (-1: unknown);
#: 1 if write times are stored; the count after the last write out of time order (0: none).
NOW, LAST, BY_ROW, DISORDER = range(4)


def skip_stale(index: Any, stamp: torch.Tensor, dims: int, storage: Any) -> tuple[torch.Tensor, int | torch.Tensor]:
    """Return ``index`` with -1 for each row that was rewritten since sampling, and the number of these rows.

    ``stamp`` is the entry ``"sampled_at"`` of a batch with ``dims`` batch dims.
    """
    clock, device = storage.clock, storage.device
    if clock.stands_at(stamp):
        return index, 0
    flat = flat_rows(index, storage, device)
    if dims != 1:
        stamp = first_of_row(stamp, dims, inner_dims(storage, dims))
    if stamp.is_cpu:
        address_of(stamp)  # refuses stamps without memory
    rows = flat.shape[0]
    if stamp.shape[0] != rows and stamp.ndim == 1 and rows and stamp.shape[0] % rows == 0:
        stamp = stamp[:: stamp.shape[0] // rows]
    if stamp.dtype is not torch.int64 or stamp.device != device or not stamp.is_contiguous():
        stamp = stamp.to(device, torch.int64).contiguous()
    if stamp.shape != flat.shape:
        raise ValueError(
            f"the batch has {tuple(stamp.shape)} entries {SAMPLED_AT!r} for {rows} rows: take both from one batch, "
            f"or leave out {SAMPLED_AT!r} to update the rows without a check"
        )
    return clock.skip_rewritten(flat, stamp, storage.all_rows().shape)


def not_rewritten(storage: Any, marks: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the flat index of each mark ``(flat index, count of the clock)``; -1 if its row was rewritten since."""
    if not marks:
        return torch.empty(0, dtype=torch.int64, device=storage.device)
    cell, stamp = torch.tensor(marks, device=storage.device).unbind(1)
    return storage.clock.skip_rewritten(cell.contiguous(), stamp.contiguous(), storage.all_rows().shape)[0]


class WriteClock:
    """Counts the time steps written to a storage, and finds rows that were rewritten since they were sampled.

    From the first write out of order on, the clock stores the write time of each row (8 bytes per row).

    Rows are *in time order* if each lane of the ring holds time steps that were written one after another.
    """

    def __init__(self) -> None:
        self.numbers = SharedNumbers("q", [0, -1, 0, 0])  # indices NOW, LAST, BY_ROW and DISORDER
        self._newest: tuple[Any, int] = (None, 0)  # the newest stamps, and the count at that time
        self.times: torch.Tensor | None = None  # write times, int64 by flat row; used if BY_ROW is 1

    @property
    def now(self) -> int:
        return self.numbers[NOW]

    def since(self, then: int) -> int:
        return (self.now - then) % (1 << 64)  # the count may have overflowed

    def stamp(self, now: int, rows: int, device: torch.device) -> torch.Tensor:
        stamps = torch.full((rows,), now, device=device)
        self._newest = stamps, now
        return stamps

    def stands_at(self, stamps: torch.Tensor) -> bool:
        """Whether ``stamps`` is the tensor that :meth:`stamp` returned last, and nothing has been written since."""
        newest, then = self._newest
        return stamps is newest and self.now == then

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_newest": (None, 0)}  # stamps are compared by identity
        # A spawned process maps the shared memory itself; pickling a view would move it out of this process's map.
        return state if get_spawning_popen() is None else state | {"times": None}

    def advance(self, start: int, count: int, shape: torch.Size, device: torch.device | None = None) -> bool:
        """Record a write of ``count`` new time steps from ``start`` on, in rows of ``shape`` ``[T, *lanes]``.

        Return whether the new time steps follow the last one.
        """
        numbers, steps = self.numbers, shape[0]
        in_order = self.is_next(start, count, steps)
        if not in_order or numbers[BY_ROW]:
            step, lane = torch.arange(count, device=device), torch.arange(prod(shape[1:]), device=device)
            cells = (start + step)[:, None] % steps * len(lane) + lane
            self._stamp_rows(cells, count, shape, (count - 1 - step)[:, None])
        else:
            numbers[NOW] += count
        if in_order:
            numbers[LAST] = (start + count - 1) % steps
        return in_order

    def is_next(self, start: int, count: int, steps: int) -> bool:
        """Whether ``count`` time steps from ``start`` on follow the last one (if known), or replace them all."""
        last = self.numbers.values[LAST]
        return start == last + 1 or (start == 0 and last == steps - 1) or count >= steps or last < 0

    def note(self, cells: torch.Tensor, count: int, shape: torch.Size, ago: torch.Tensor | int = 0) -> None:
        """Record that the rows at flat indices ``cells`` were replaced, and add ``count`` to the count of time steps.

        ``ago`` says how many of these time steps follow each row. The time order of the rows does not change.
        """
        self._stamp_rows(cells, count, shape, ago)
        if self.numbers[DISORDER]:
            self.numbers[DISORDER] += count

    def _stamp_rows(self, cells: torch.Tensor, count: int, shape: torch.Size, ago: torch.Tensor | int) -> None:
        written = self._by_row(shape, cells.device)
        self.numbers[NOW] += count
        written[cells] = self.numbers[NOW] - torch.as_tensor(ago, device=cells.device)

    def lose_order(self) -> None:
        """Record that the write before this call was out of time order."""
        self.numbers[DISORDER] = self.numbers[NOW]

    def in_time_order(self, steps: int) -> bool:
        """Whether all of the ``steps`` stored time steps are in time order."""
        disorder = self.numbers.values[DISORDER]
        return not disorder or self.since(disorder) >= steps

    def forget(self, steps: int, last: int = -1, order: torch.Tensor | None = None) -> None:
        """Treat all rows as rewritten; ``steps`` is the capacity, ``last`` the newest time step (-1: unknown).

        ``order`` holds other write times of the rows, int64 by flat row; the rows keep their order.
        """
        self.numbers[NOW] += steps
        self.numbers[LAST] = last
        self.numbers[BY_ROW] = self.numbers[DISORDER] = 0
        if order is not None:
            self._keep_times(order.unique(return_inverse=True)[1] + (self.numbers[NOW] + 1))
            self.numbers[NOW] += len(order)
            self.numbers[BY_ROW] = 1

    def _keep_times(self, times: torch.Tensor) -> None:
        if self.times is not None and self.times.shape == times.shape:
            self.times.copy_(times)
        else:
            with outside_inference_mode():
                self.times = times.clone()

    def keep_in(self, written: torch.Tensor) -> None:
        """Move the write times of the rows to ``written``, ``[N]`` int64 in shared memory."""
        if self.times is not None:
            written.copy_(self.times)
        self.times = written

    def _by_row(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        written = self.times
        if self.numbers[BY_ROW] and written is not None:
            return written
        if written is None or written.shape[0] != prod(shape):
            with outside_inference_mode():
                written = self.times = torch.empty(prod(shape), dtype=torch.int64, device=device)
        steps, last, now = shape[0], self.numbers[LAST], self.numbers[NOW]
        age = (last - torch.arange(steps, device=device)) % steps
        written.view(steps, -1).copy_((now - age)[:, None].expand(steps, prod(shape[1:])))
        self.numbers[BY_ROW] = 1
        return written

    def skip_rewritten(
        self, flat: torch.Tensor, stamp: torch.Tensor, shape: torch.Size
    ) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Return ``flat`` with -1 for each row that was rewritten after its ``stamp``, and the number of these rows."""
        now, last, by_row, _ = self.numbers
        if by_row and self.times is not None:
            return row_kernels.skip_newer(flat, stamp, now, self.times)
        return row_kernels.skip_ring(flat, stamp, now, last, shape[0], prod(shape[1:]))

    def state_dict(self) -> dict[str, Any]:
        now, last, by_row, _ = self.numbers
        written = self.times.clone() if by_row and self.times is not None else None
        return {"now": now, "last": last, "written": written}

    def load_state_dict(self, state: dict[str, Any], steps: int, last: int, device: torch.device) -> None:
        """Restore the state of a storage of ``steps`` time steps, whose last written step is ``last``."""
        written = None if state["written"] is None else state["written"].to(device)
        if self.numbers[NOW]:  # batches may hold counts of either clock: treat all rows as rewritten
            self.numbers[NOW] = max(self.numbers[NOW], state["now"])
            return self.forget(steps, last, written)
        self.numbers[NOW], self.numbers[LAST] = state["now"], state["last"]
        self.numbers[BY_ROW], self.numbers[DISORDER] = written is not None, 0
        if written is not None:
            self._keep_times(written)


class Tally:
    """A count that processes can share."""

    def __init__(self) -> None:
        self._numbers = SharedNumbers("q", [0])
        self._on_device: torch.Tensor | None = None

    def add(self, count: int | torch.Tensor) -> None:
        """Add an int, or a 0-dim tensor without waiting for its device."""
        if isinstance(count, torch.Tensor):
            self._on_device = count if self._on_device is None else self._on_device + count
        elif count:
            self._numbers[0] += count

    def share_memory_(self) -> None:
        self._numbers.share_memory_()

    def total(self) -> int:
        """Return the count; this call waits for the device, while :meth:`add` does not."""
        return self._numbers[0] + (0 if self._on_device is None else int(self._on_device))
