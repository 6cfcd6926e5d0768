"""Flow control over all shards: an actor that counts rows and makes calls wait. It holds no rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf

from rlbuf_td.buffers.flow import NOT_YET, FlowControl

_POLL = 0.002


class Limiter:
    """A Ray actor that clients call before each batch and each write; waiting calls do not block others."""

    def __init__(self, flow: FlowControl) -> None:
        self.flow = flow

    async def sample(self, rows: int, wait: bool, timeout: float | None) -> None:
        """Wait until a batch is admitted; without ``wait``, raise a RuntimeError if it is not admitted now."""
        if not wait and not self.flow.admit_sample(rows):
            raise RuntimeError(f"flow control does not admit a batch of {rows} rows now: {NOT_YET}")
        if wait:
            await self._until(lambda: self.flow.admit_sample(rows), timeout, of_sample=True)

    async def insert(self, rows: int, timeout: float | None = None) -> None:
        """Wait until a write is admitted; raise a TimeoutError after ``timeout`` seconds."""
        await self._until(lambda: self.flow.admit_insert(rows), timeout, of_sample=False)

    async def _until(self, admit: Callable[[], bool], timeout: float | None, *, of_sample: bool) -> None:
        deadline = inf if timeout is None else time.monotonic() + timeout
        if admit():
            return
        self.flow.count_wait(of_sample=of_sample)
        while not admit():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"flow control admitted nothing within {timeout} seconds")
            await asyncio.sleep(_POLL)

    async def take_back(self, sampled: int = 0, inserted: int = 0) -> None:
        """Uncount a batch or a write that has failed."""
        self.flow.take_back(sampled=sampled, inserted=inserted)

    async def report(self) -> dict[str, float]:
        return self.flow.report()

    async def shutdown(self) -> None:
        """Make all waiting calls raise a RuntimeError."""
        self.flow.shutdown()
