"""The connections of a client to the shards: calls, last reports, and lost shards."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import inf
from typing import Any, Literal

import numpy as np
import torch
from ray.exceptions import GetTimeoutError, RayActorError

from rlbuf_td.distributed.packing import join
from rlbuf_td.distributed.shard import Answer, Report, Request
from rlbuf_td.storages.notebooks import PROCESSES

OnLoss = Literal["continue", "raise"]

PATIENCE = 3.0  # seconds after which a shard that does not answer counts as lost; doubled if it answers later
RECOVERY = 60.0  # seconds to wait for a shard if all are lost
_PROBE_EVERY = 0.2  # seconds between requests to a lost shard
_PROBES = 15  # the most unanswered requests to a lost shard
_IN_FLIGHT = 4  # the most unconfirmed writes to a shard
_SLOW = 1.0  # seconds that a write waits for a shard that does not keep up, before its client changes to another


class ShardLost(RuntimeError):
    """A shard is lost and ``on_loss="raise"``, or all shards are lost."""

    def __str__(self) -> str:
        return super().__str__() + PROCESSES


class Links:
    """Calls to shards. A lost shard has mass 0 until it answers again.

    Args:
        handles: the handles of the shards' actors.
        engine: Ray, or an object with its functions ``get`` and ``wait``.
        on_loss: ``"raise"``: raise a :class:`ShardLost` when a shard is lost; ``"continue"``: go on without it.
    """

    def __init__(self, handles: list[Any], engine: Any, on_loss: OnLoss = "continue") -> None:
        self.handles, self.engine, self.on_loss = handles, engine, on_loss
        self.patience = PATIENCE
        self.known: list[Report | None] = [None] * len(handles)  # None: lost, or no report yet
        self.heard = [0.0] * len(handles)  # the time of each shard's last report
        self.lost_rows = [0] * len(handles)  # rows lost by restarts, and by writes that never arrived
        self.losses = 0
        self._last: list[Report | None] = [None] * len(handles)  # last reports, also of lost shards
        self._probes: dict[int, tuple[float, list[Any]]] = {}  # lost shards: time of the last request, open ones
        self._flights: dict[int, deque[tuple[Any, int]]] = {place: deque() for place in range(len(handles))}

    @property
    def live(self) -> list[int]:
        """The shards that are not lost."""
        return [place for place, report in enumerate(self.known) if report is not None]

    def hear(self, place: int, report: Report) -> None:
        last = self._last[place]
        if last is not None and last.incarnation != report.incarnation:
            self.lost_rows[place] += max(0, last.rows + last.waiting - report.rows)
        self.known[place] = self._last[place] = report
        self.heard[place] = time.monotonic()

    def lose(self, place: int) -> None:
        """Mark a shard as lost; from now on, :meth:`revive` asks whether it is back."""
        if place not in self._probes:
            self.losses += 1
            self._probes[place] = -inf, []
        self.known[place] = None
        if self.on_loss == "raise":
            raise ShardLost(f"shard {place} of {len(self.handles)} is lost")

    def revive(self, timeout: float = 0.0) -> None:
        """Use lost shards again if they answer; if all are lost, wait up to ``timeout`` seconds for one."""
        deadline = time.monotonic() + timeout
        while self._probes:
            for place in list(self._probes):
                self._probe(place)
            if self.live or time.monotonic() >= deadline:
                return
            time.sleep(0.01)

    def greet(self) -> None:
        """Ask all shards for their first report."""
        reports = self.finish(self.start("report", dict.fromkeys(range(len(self.handles)), ())), RECOVERY)
        for place, report in reports.items():
            self.hear(place, report)

    def require_one(self) -> None:
        """Use lost shards again if they answer; raise ShardLost if none answers within ``RECOVERY`` seconds."""
        self.revive()
        if not self.live:
            self.revive(RECOVERY)
        if not self.live:
            raise ShardLost(f"none of {len(self.handles)} shards has answered for {RECOVERY:.0f} seconds")

    def _probe(self, place: int) -> None:
        """Send requests to a lost shard without waiting: Ray takes 2 s to refuse one while the shard restarts."""
        asked, probes = self._probes[place]
        if time.monotonic() - asked > _PROBE_EVERY:
            asked = time.monotonic()
            probes = [*probes[-_PROBES:], self.handles[place].report.remote()]
        answered, probes = self.engine.wait(probes, num_returns=len(probes), timeout=0)
        self._probes[place] = asked, probes
        for probe in answered:
            with suppress(RayActorError):
                report, last = self.engine.get(probe), self._last[place]
                if last is not None and last.incarnation == report.incarnation:  # not restarted, only slow
                    self.patience = min(2 * self.patience, RECOVERY)
                self.hear(place, report)
                del self._probes[place]
                return

    def start(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of some shards; return the calls, for :meth:`finish`."""
        return {place: getattr(self.handles[place], method).remote(*given) for place, given in arguments.items()}

    def finish(self, calls: Mapping[int, Any], patience: float | None = None) -> dict[int, Any]:
        """Return the answers; a shard that does not answer in time counts as lost."""
        answers, deadline = {}, time.monotonic() + (self.patience if patience is None else patience)
        for place, call in calls.items():
            try:
                answers[place] = self.engine.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except (RayActorError, GetTimeoutError):
                self.lose(place)
        return answers

    def request(self, requests: Mapping[int, tuple[Request, int]]) -> dict[int, Any]:
        """Send requests, each with the number of pieces for its answer; return the calls, for :meth:`receive`."""
        return {
            place: self.handles[place].answer.options(num_returns=pieces or 1).remote(pickle.dumps(request, 5), pieces)
            for place, (request, pieces) in requests.items()
        }

    def receive(self, calls: Mapping[int, Any]) -> dict[int, Answer]:
        """Return the answers to requests for draws, and keep the reports in them."""
        answers = {place: join(answer) for place, answer in self.finish(calls).items()}
        for place, answer in answers.items():
            self.hear(place, answer.after)
        return answers

    def ask(self, method: str, *given: Any, places: Iterable[int] | None = None) -> dict:
        """Call a method of some shards (default: those that are not lost) with equal arguments; return the answers."""
        self.revive()
        places = self.live if places is None else places
        return self.finish(self.start(method, dict.fromkeys(places, given)))

    def refresh(self) -> None:
        for place, report in self.ask("report").items():
            self.hear(place, report)

    # -- writes, for which clients do not wait

    def write(self, place: int, writer: int, layout: bytes, rows: np.ndarray, lead: torch.Size) -> bool:
        """Send rows to a shard; return whether it keeps up, or raise the error of an earlier write."""
        flight = self._flights[place]
        self.collect(place, 0.0)
        flight.append((self.handles[place].write.remote(writer, layout, rows, lead), lead.numel()))
        return len(flight) < _IN_FLIGHT or self.collect(place, _SLOW)

    def collect(self, place: int, timeout: float, until: int = _IN_FLIGHT - 1) -> bool:
        """Wait up to ``timeout`` seconds until at most ``until`` writes are unconfirmed; return whether they are."""
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
