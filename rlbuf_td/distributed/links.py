"""Sends a client's requests to the shards, stores the last report of each shard, and
detects lost shards."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError

from rlbuf_td.buffers.waiting import ShutDown
from rlbuf_td.distributed.shard import Answer, Report

# seconds after which a shard that does not answer counts as lost; doubled if it answers
# later
PATIENCE = 3.0
RECOVERY = 60.0  # seconds to wait for a shard if all are lost
_IN_FLIGHT = 4  # the most unconfirmed writes to a shard
# seconds that a write waits for a slow shard, before the client changes to another
# shard
_SLOW = 1.0
SHUT_DOWN = "the buffer has been shut down"


class ShardLost(RuntimeError):
    """Raised if all shards are lost."""


class ShardsGone(ShardLost, ShutDown):
    """Raised if Ray restarts none of the shards: the buffer has been shut down, or all
    shards have crashed."""


class Links:
    """Sends a client's requests to the shards, and tracks which shards are lost."""

    def __init__(self, handles: list[Any], engine: Any) -> None:
        # engine: has get and wait, as ray has
        self.handles, self.engine = handles, engine
        self.patience = PATIENCE
        # None: lost, or no report yet
        self.known: list[Report | None] = [None] * len(handles)
        self.heard = [0.0] * len(handles)  # time of each shard's last report
        # rows lost by restarts, and by writes that never arrived
        self.lost_rows = [0] * len(handles)
        self.losses = 0
        self.is_closed = False
        self._dead: set[int] = set()  # lost shards that Ray does not restart again
        # the last reports, including those of lost shards
        self._last: list[Report | None] = [None] * len(handles)
        # for each lost shard, the call that Ray repeats until the shard answers
        self._probes: dict[int, Any] = {}
        self._flights: dict[int, deque[tuple[Any, int]]] = {
            place: deque() for place in range(len(handles))
        }

    @property
    def live(self) -> list[int]:
        return [place for place, report in enumerate(self.known) if report is not None]

    def hear(self, place: int, report: Report) -> None:
        last = self._last[place]
        if last is not None and last.incarnation != report.incarnation:
            self.lost_rows[place] += max(0, last.rows + last.waiting - report.rows)
        self.known[place] = self._last[place] = report
        self.heard[place] = time.monotonic()

    def lose(self, place: int) -> None:
        if place not in self._probes:
            self.losses += 1
            self._probe(place)
        self.known[place] = None

    def revive(self, timeout: float = 0.0) -> None:
        """Use lost shards again if they answer; if all are lost, wait up to ``timeout``
        seconds for one."""
        deadline = time.monotonic() + timeout
        while self._probes:
            for place in [*self._probes]:
                self._return(place)
            if (
                self.live
                or len(self._dead) == len(self.handles)
                or time.monotonic() >= deadline
            ):
                return
            time.sleep(0.01)

    def require_one(self) -> None:
        """Raise ShardLost if all shards are lost and none answers within ``RECOVERY``
        seconds."""
        self.require_open()
        self.revive(RECOVERY)
        if not self.live and len(self._dead) == len(self.handles):
            raise ShardsGone(
                f"{SHUT_DOWN}, or its shards have crashed: Ray restarts none of {len(self.handles)}"
            )
        if not self.live:
            raise ShardLost(
                f"none of {len(self.handles)} shards has answered for {RECOVERY:.0f} seconds"
            )

    def close(self) -> None:
        """Make later calls raise :class:`~rlbuf_td.ShutDown`."""
        self.is_closed = True
        self.known = [None for _ in self.handles]

    def require_open(self) -> None:
        if self.is_closed:
            raise ShutDown(SHUT_DOWN)

    def _probe(self, place: int) -> None:
        """Ask a lost shard for a report; Ray repeats the call if the shard's process
        dies or is not there yet."""
        self._probes[place] = (
            self.handles[place].report.options(max_task_retries=-1).remote()
        )

    def _return(self, place: int) -> None:
        if not self.engine.wait([self._probes[place]], timeout=0)[0]:
            return
        try:
            report, last = self.engine.get(self._probes[place]), self._last[place]
        except ActorDiedError:  # for good
            self._dead.add(place)
            return
        except RayActorError:
            return self._probe(place)
        # not restarted, only slow
        if last is not None and last.incarnation == report.incarnation:
            self.patience = min(2 * self.patience, RECOVERY)
        self.hear(place, report)
        del self._probes[place]

    def start(
        self, method: str, arguments: Mapping[int, tuple[object, ...]]
    ) -> dict[int, Any]:
        """Call ``method`` of each shard with its ``arguments``; return Ray's references
        to the answers."""
        return {
            place: getattr(self.handles[place], method).remote(*given)
            for place, given in arguments.items()
        }

    def finish(
        self, calls: Mapping[int, Any], patience: float | None = None
    ) -> dict[int, Any]:
        """Return each shard's answer; mark shards that crash or do not answer within
        ``patience`` seconds as lost."""
        answers, deadline = (
            {},
            time.monotonic() + (self.patience if patience is None else patience),
        )
        for place, call in calls.items():
            try:
                answers[place] = self.engine.get(
                    call, timeout=max(0.0, deadline - time.monotonic())
                )
            except (RayActorError, GetTimeoutError):
                self.lose(place)
        return answers

    def receive(self, calls: Mapping[int, object]) -> dict[int, Answer]:
        """Wait for the answers to requests, and store the shard's report in each."""
        answers = {
            place: pickle.loads(answer) for place, answer in self.finish(calls).items()
        }
        for place, answer in answers.items():
            self.hear(place, answer.after)
        return answers

    def reports(
        self, calls: Mapping[int, object], patience: float | None = None
    ) -> dict[int, Report]:
        """Wait for calls that return reports; store and return the reports."""
        reports = self.finish(calls, patience)
        for place, report in reports.items():
            self.hear(place, report)
        return reports

    def ask(
        self,
        method: str,
        places: Iterable[int] | None = None,
        patience: float | None = None,
    ) -> dict[int, Report]:
        """Call ``method`` of the shards in ``places`` (default: all but lost ones);
        store and return their reports."""
        self.require_open()
        self.revive()
        return self.reports(
            self.start(
                method, dict.fromkeys(self.live if places is None else places, ())
            ),
            patience,
        )

    def write(
        self, place: int, writer: int, layout: bytes, rows: np.ndarray, lead: torch.Size
    ) -> bool:
        """Send rows to a shard, and raise errors of earlier writes; return False if the
        shard does not keep up."""
        flight = self._flights[place]
        self.collect(place, 0.0)
        flight.append(
            (self.handles[place].write.remote(writer, layout, rows, lead), lead.numel())
        )
        return len(flight) < _IN_FLIGHT or self.collect(place, _SLOW)

    def collect(self, place: int, timeout: float, until: int = _IN_FLIGHT - 1) -> bool:
        """Wait until at most ``until`` writes to a shard are unconfirmed; return False
        after ``timeout`` seconds."""
        flight, deadline = self._flights[place], time.monotonic() + timeout
        while flight:
            wanted = timeout > 0 and len(flight) > until
            left = max(0.0, deadline - time.monotonic()) if wanted else 0.0
            if not self.engine.wait([flight[0][0]], timeout=left)[0]:
                break
            call, count = flight.popleft()
            try:
                self.engine.get(call)
            except RayActorError:
                self.lost_rows[place] += count
                self.lose(place)
        return len(flight) <= until
