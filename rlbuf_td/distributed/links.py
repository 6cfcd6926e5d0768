"""Sends a client's requests to the shards, stores the last report of each shard, and
detects lost shards."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any, NamedTuple

from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
)

from rlbuf_td.buffers.waiting import ShutDown
from rlbuf_td.distributed.shard import Answer, Refusal, Report

# seconds after which a shard that does not answer counts as lost; doubled if it answers
# later
PATIENCE = 3.0
RECOVERY = 60.0  # seconds to wait for a shard if all are lost
_IN_FLIGHT = 4  # the most unconfirmed writes to a shard
# seconds that a write waits for a slow shard, before the client changes to another
# shard
_SLOW = 1.0
# seconds after the end of a caller's time limit in which an answer may still arrive
GRACE = 0.25
SHUT_DOWN = "the buffer has been shut down"


class ShardLost(RuntimeError):
    """Raised if all shards are lost."""


class ShardsGone(ShardLost, ShutDown):
    """Raised if Ray restarts none of the shards: the buffer has been shut down, or all
    shards have crashed."""


class Write(NamedTuple):
    """A write that its shard has not confirmed."""

    call: Any  # Ray's reference to the shard's answer
    rows: int
    epoch: int  # of flow control's counts, when it admitted the rows


class Links:
    """Sends a client's requests to the shards, and tracks which shards are lost.

    Args:
        handles: the shards' Ray handles.
        engine: has ``get`` and ``wait``, as the module ``ray`` has.
        give_back: is called with the epoch and ``inserted=``, the number of rows that
            flow control has counted, and that no shard stores.
    """

    def __init__(
        self, handles: list[Any], engine: Any, give_back: Callable[..., None]
    ) -> None:
        self.handles, self.engine, self._give_back = handles, engine, give_back
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
        self._writes: list[deque[Write]] = [deque() for _ in handles]

    @property
    def live(self) -> list[int]:
        return [shard for shard, report in enumerate(self.known) if report is not None]

    @property
    def are_all_live(self) -> bool:
        return None not in self.known

    @property
    def are_all_dead(self) -> bool:
        return len(self._dead) == len(self.handles)

    def hear(self, shard: int, report: Report) -> None:
        last = self._last[shard]
        if last is not None and last.incarnation != report.incarnation:
            self.lost_rows[shard] += max(0, last.rows + last.waiting - report.rows)
        self.known[shard] = self._last[shard] = report
        self.heard[shard] = time.monotonic()

    def lose(self, shard: int) -> None:
        if shard not in self._probes:
            self.losses += 1
            self._probe(shard)
        self.known[shard] = None

    def revive(self, timeout: float = 0.0) -> None:
        """Use lost shards again if they answer; if all are lost, wait up to ``timeout``
        seconds for one."""
        deadline = time.monotonic() + timeout
        while self._probes:
            for shard in [*self._probes]:
                self._return(shard)
            if self.live or self.are_all_dead or time.monotonic() >= deadline:
                return
            time.sleep(0.01)

    def require_one(self, deadline: float = inf) -> None:
        """Raise ShardLost if all shards are lost and none answers within ``RECOVERY``
        seconds, and TimeoutError if none answers before the ``deadline``."""
        self.require_open()
        self.revive(min(RECOVERY, deadline - time.monotonic()))
        if self.live:
            return
        if self.are_all_dead:
            raise ShardsGone(
                f"{SHUT_DOWN}, or its shards have crashed: Ray restarts none of {len(self.handles)}"
            )
        refuse_late(deadline, "no shard has answered")
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

    def _probe(self, shard: int) -> None:
        """Ask a lost shard for a report; Ray repeats the call if the shard's process
        dies or is not there yet."""
        report = self.handles[shard].report.options(max_task_retries=-1)
        self._probes[shard] = report.remote()

    def _return(self, shard: int) -> None:
        """Use a lost shard again if it has answered."""
        if not self.engine.wait([self._probes[shard]], timeout=0)[0]:
            return
        try:
            report = self.engine.get(self._probes[shard])
        except ActorDiedError:  # for good
            self._dead.add(shard)
            return
        except RayActorError:
            self._probe(shard)
            return
        last = self._last[shard]
        # not restarted, only slow
        if last is not None and last.incarnation == report.incarnation:
            self.patience = min(2 * self.patience, RECOVERY)
        self.hear(shard, report)
        del self._probes[shard]

    def start(
        self, method: str, arguments: Mapping[int, tuple[object, ...]]
    ) -> dict[int, Any]:
        """Call ``method`` of each shard with its ``arguments``; return Ray's references
        to the answers."""
        return {
            shard: getattr(self.handles[shard], method).remote(*values)
            for shard, values in arguments.items()
        }

    def finish(
        self, calls: Mapping[int, Any], patience: float | None = None
    ) -> dict[int, Any]:
        """Return each shard's answer; mark shards that crash or do not answer within
        ``patience`` seconds as lost."""
        if patience is None:
            patience = self.patience
        deadline = time.monotonic() + patience
        answers = {}
        for shard, call in calls.items():
            seconds = max(0.0, deadline - time.monotonic())
            try:
                answers[shard] = self.engine.get(call, timeout=seconds)
            except (RayActorError, GetTimeoutError):
                self.lose(shard)
        return answers

    def wait_for(self, calls: Mapping[int, object], deadline: float) -> None:
        """Raise a TimeoutError if the ``deadline`` of a caller passes before all calls
        are answered, or shards count as lost."""
        seconds = max(0.0, deadline + GRACE - time.monotonic())
        if not calls or seconds >= self.patience:
            return
        waiting = [*calls.values()]
        _, late = self.engine.wait(waiting, num_returns=len(waiting), timeout=seconds)
        if late:
            raise TimeoutError(
                "a shard has not answered within the timeout of this call"
            )

    def receive(self, calls: Mapping[int, object]) -> dict[int, Answer]:
        """Wait for the answers to requests, and store the shard's report in each."""
        answers = {}
        for shard, pickled in self.finish(calls).items():
            answers[shard] = pickle.loads(pickled)
            self.hear(shard, answers[shard].after)
        return answers

    def reports(
        self, calls: Mapping[int, object], patience: float | None = None
    ) -> dict[int, Report]:
        """Wait for calls that return reports; store and return the reports."""
        reports = self.finish(calls, patience)
        for shard, report in reports.items():
            self.hear(shard, report)
        return reports

    def ask(
        self,
        method: str,
        shards: Iterable[int] | None = None,
        patience: float | None = None,
    ) -> dict[int, Report]:
        """Call ``method`` of the shards in ``shards`` (default: all but lost ones);
        store and return their reports."""
        self.require_open()
        self.revive()
        asked = self.live if shards is None else shards
        calls = self.start(method, dict.fromkeys(asked, ()))
        return self.reports(calls, patience)

    # -- writes

    def write(self, shard: int, epoch: int, rows: int, arguments: tuple) -> None:
        """Send ``rows`` rows, which flow control has counted, to a shard."""
        call = self.handles[shard].write.remote(*arguments)
        self._writes[shard].append(Write(call, rows, epoch))

    def ask_for_refusals(self, shard: int, writer: int) -> None:
        """Make the next :meth:`confirm` raise what the shard has refused since the last
        write to it."""
        call = self.handles[shard].refusals.remote(writer)
        self._writes[shard].append(Write(call, 0, 0))

    def keeps_up(self, shard: int) -> bool:
        """Wait for at most 1 s while too many writes to a shard are unconfirmed; return
        whether fewer are."""
        return self.arrives(shard, _SLOW, _IN_FLIGHT - 1)

    def arrives(self, shard: int, timeout: float, until: int = 0) -> bool:
        """Wait until at most ``until`` writes to a shard are not answered; return False
        after ``timeout`` seconds."""
        calls = [write.call for write in self._writes[shard]]
        excess = len(calls) - until
        if excess <= 0:
            return True
        finished, _ = self.engine.wait(calls, num_returns=excess, timeout=timeout)
        return len(finished) >= excess

    def confirm(self) -> bool:
        """Take the answers to writes that are there; return False if a write was lost.

        Rows that a shard has refused or lost are given back to flow control. Then the
        first refusal is raised.
        """
        refusals: list[Refusal] = []
        is_complete = True
        for shard, writes in enumerate(self._writes):
            while writes and self.engine.wait([writes[0].call], timeout=0)[0]:
                try:
                    refused = self._answer(writes[0])
                except RayActorError:
                    refused = []
                    is_complete = False
                    self._lose_write(shard, writes[0])
                writes.popleft()
                for refusal in refused:
                    self._give_back(refusal.epoch, inserted=refusal.rows)
                refusals += refused
        if refusals:
            raise refusals[0].error
        return is_complete

    def _lose_write(self, shard: int, write: Write) -> None:
        self.lost_rows[shard] += write.rows
        self._give_back(write.epoch, inserted=write.rows)
        self.lose(shard)

    def _answer(self, write: Write) -> list[Refusal]:
        """Return the refusals that a shard has answered; one that it has raised is that
        of the write."""
        try:
            return self.engine.get(write.call)
        except RayActorError:
            raise
        except Exception as error:  # noqa: BLE001  the caller raises it
            cause = error.cause if isinstance(error, RayTaskError) else error
            return [Refusal(write.rows, write.epoch, cause)]


def refuse_late(deadline: float, what: str) -> None:
    """Raise a TimeoutError that says what has happened, after the ``deadline`` of a
    caller."""
    if time.monotonic() >= deadline:
        raise TimeoutError(f"{what} within the timeout of this call")
