"""Flow control over all shards, in a separate actor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf

from rlbuf_td.buffers.flow import NOT_YET, FlowControl

_POLL = 0.002


class Limiter:
    """The Ray actor that decides when clients may sample and write."""

    def __init__(self, flow: FlowControl) -> None:
        self.flow = flow

    async def sample(self, rows: int, wait: bool, timeout: float | None) -> None:
        """Wait until a batch of ``rows`` rows is admitted; with ``wait=False``, raise RuntimeError instead."""
        if wait:
            await self._until(lambda: self.flow.admit_sample(rows), timeout, of_sample=True)
        elif not self.flow.admit_sample(rows):
            raise RuntimeError(f"flow control does not admit a batch of {rows} rows now: {NOT_YET}")

    async def insert(self, rows: int) -> None:
        await self._until(lambda: self.flow.admit_insert(rows), None, of_sample=False)

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
        self.flow.take_back(self.flow.epoch, sampled=sampled, inserted=inserted)

    async def report(self) -> dict[str, float]:
        return self.flow.report()

    async def shutdown(self) -> None:
        self.flow.shutdown()
