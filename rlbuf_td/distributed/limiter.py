"""Flow control over all shards, in a separate actor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import Any

from rlbuf_td.buffers.flow import NOT_YET, FlowControl

_POLL = 0.002


class Limiter:
    """The Ray actor that decides when clients may sample and write."""

    def __init__(self, flow: FlowControl) -> None:
        self.flow = flow

    async def sample(self, rows: int, wait: bool, timeout: float | None) -> tuple[int, int]:
        """Wait until a batch of ``rows`` rows is admitted; with ``wait=False``, raise RuntimeError instead.

        Return the epoch of the counts, and the number of rows written so far.
        """
        if wait:
            await self._until(lambda: self.flow.admit_sample(rows), timeout, of_sample=True)
        elif not self.flow.admit_sample(rows):
            raise RuntimeError(f"flow control does not admit a batch of {rows} rows now: {NOT_YET}")
        return self.flow.epoch, self.flow.inserted

    async def insert(self, rows: int) -> int:
        """Wait until a write of ``rows`` rows is admitted; return the epoch of the counts."""
        await self._until(lambda: self.flow.admit_insert(rows), None, of_sample=False)
        return self.flow.epoch

    async def _until(self, admit: Callable[[], bool], timeout: float | None, *, of_sample: bool) -> None:
        deadline = inf if timeout is None else time.monotonic() + timeout
        if admit():
            return
        self.flow.count_wait(of_sample=of_sample)
        while not admit():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"flow control admitted nothing within {timeout} seconds")
            await asyncio.sleep(_POLL)

    async def take_back(self, epoch: int, sampled: int = 0, inserted: int = 0) -> None:
        self.flow.take_back(epoch, sampled=sampled, inserted=inserted)

    async def found_empty(self, epoch: int, inserted: int, sampled: int) -> None:
        """Take back a batch of ``sampled`` rows, because all shards are empty; restart the counts.

        The counts are kept if rows have been written since the batch was admitted, with ``epoch`` and ``inserted``.
        """
        self.flow.take_back(epoch, sampled=sampled)
        if (epoch, inserted) == (self.flow.epoch, self.flow.inserted):
            self.flow.restart(0)

    async def restart(self, rows: int) -> None:
        self.flow.restart(rows)

    async def state_dict(self) -> dict[str, Any]:
        return self.flow.state_dict()

    async def restore(self, state: dict[str, Any] | None, rows: int) -> None:
        self.flow.restore(state, rows)

    async def report(self) -> dict[str, float]:
        return self.flow.report()

    async def shutdown(self) -> None:
        self.flow.shutdown()
