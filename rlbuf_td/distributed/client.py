"""The client through which a learner samples from all shards, and a collector writes to
one of them."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from ray.exceptions import RayActorError, RayTaskError
from tensordict import TensorDictBase
from torch import Tensor

from rlbuf_td.buffers.waiting import (
    PATIENCE,
    ShutDown,
    seconds,
    warn_of_slow_write,
)
from rlbuf_td.distributed.batches import Batches, Split, drawn_of, split
from rlbuf_td.distributed.links import GRACE, RECOVERY, SHUT_DOWN, Links, refuse_late
from rlbuf_td.distributed.shard import (
    ROW,
    SHARD,
    Report,
    Request,
    Spec,
    layout_named,
    named,
    pack,
)
from rlbuf_td.kernels.strata import masses as positions_in
from rlbuf_td.kernels.strata import step_of
from rlbuf_td.samplers.common import EMPTY, NO_PRIORITY, refuse_errors
from rlbuf_td.samplers.priorities import Update
from rlbuf_td.samplers.weight_watch import WeightWatch
from rlbuf_td.storages import SchemaError
from rlbuf_td.storages.checks import State, whole
from rlbuf_td.storages.indexing import one_a_row
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.schema import refuse_index
from rlbuf_td.storages.tensordict_fast import entries_of

# seconds without a report after which the client asks a shard for its mass
_REFRESH = 0.1
# seconds in which rows that flow control has counted arrive in a shard, or are lost
_ARRIVAL = 1.0
_NO_HANDLES = np.empty((0, 4), np.int64)
_NO_ERRORS = np.empty(0, np.float64)


class Admission(NamedTuple):
    """A batch or a write that flow control has admitted."""

    epoch: int = 0  # of its counts; 0 without flow control
    inserted: int = 0  # the number of rows written so far


class Draw(NamedTuple):
    """Requests for batches, whose answers have not been received yet."""

    size: int  # rows per batch
    batches: int
    split: Split
    # the reports whose masses determined the draws; None: a lost shard
    known: list[Report | None]
    calls: dict[int, Any]  # shard -> Ray's reference to its answer


class Client:
    """Samples from all shards and writes to one. A client can be pickled for other
    processes of the Ray cluster.

    Args:
        connect: a function that returns a tuple: the shards' Ray handles, flow
            control's handle or ``None``, and the module ``ray``.
        spec: the properties that the buffers of all shards share.
        batch_size: number of rows in a batch; ``None``: the batch size of the shards'
            buffers.
        prefetch: number of batches per request. When :meth:`sample` receives these
            batches, it sends the next request. With 0, each request draws one batch,
            and is sent when the batch is needed.
        home: number of the shard to write to, until this shard is lost or too slow;
            ``None``: a random shard.
    """

    service_backend = "ray"
    _storage = None  # TorchRL's collectors with several workers read this attribute

    def __init__(
        self,
        connect: Callable[[], tuple[list[Any], Any, Any]],
        spec: Spec,
        batch_size: int | None,
        prefetch: int,
        home: int | None,
    ) -> None:
        self._arguments = connect, spec, batch_size, prefetch, home
        self.spec, self.prefetch = spec, prefetch
        self.batch_size = batch_size or spec.batch_size
        self.beta = spec.beta  # may be set at any time
        self.generator: torch.Generator | None = None
        handles, self._flow, engine = connect()
        self.links = Links(handles, engine, self._take_back)
        self.links.ask("report", range(len(handles)), RECOVERY)
        self._home = home
        # a copy of a client is another writer
        self._writer = random.SystemRandom().getrandbits(62)
        # of the rows that this client writes, once a shard has accepted some
        self._layout: tuple[RowLayout, bytes] | None = None
        # calls of flow control that may admit rows which nobody waits for, and what
        # to take back then
        self._abandoned: list[tuple[Any, dict[str, int]]] = []
        # handles and TD errors for the next requests
        self._errors: list[tuple[np.ndarray, np.ndarray]] = []
        self._weight_watch = WeightWatch()
        self._ready: Batches | None = None
        self._ahead: Draw | None = None
        self.stale = self.retries = 0

    def __getstate__(self) -> dict[str, object]:
        return {"arguments": self._arguments, "beta": self.beta}

    def __setstate__(self, state: State) -> None:
        Client.__init__(self, *state["arguments"])
        self.beta = state["beta"]

    def sample(
        self,
        batch_size: int | None = None,
        *,
        wait: bool = False,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Sample a batch, ``[B]``, from all shards, in newly allocated memory.

        The batch has an ``"index"``, ``[B, 4]`` int64: per row, the shard, the shard's
        start time in ns, the row in the shard, and the serial of this row. With
        prioritized buffers, the batch also has importance weights,
        ``"priority_weight"``, ``[B]`` float32.

        Args:
            batch_size: number of rows in the batch; default: ``batch_size`` of the
                shards.
            wait: wait until a shard has rows and flow control (``samples_per_insert``,
                ``min_size``) admits the batch.
            timeout: the longest wait in seconds; ``None``: no limit.

        Raises:
            RuntimeError: no batch size is set, or no row of any shard has a positive
                priority. With ``wait=False``, also if all shards are empty (with flow
                control, for 1 s: rows may be on their way), or if flow control does not
                admit the batch.
            ShutDown: the buffer has been shut down.
            TimeoutError: no batch was ready within ``timeout`` seconds; or, with
                ``wait=False``, flow control has not answered for a minute.
            ShardLost: all shards are lost.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise RuntimeError(
                "there is no batch size: pass it to sample, or to the constructor"
            )
        size = whole(1)("batch_size", size)
        self.links.require_open()
        limit = seconds(timeout)
        deadline = inf if limit is None else time.monotonic() + limit
        while True:
            admission = self._admit_batch(size, wait, deadline)
            with self._taken_back(admission, sampled=size):
                batches = self._batches(size, wait, deadline)
                if batches is not None:
                    batch = batches.take(self.beta)
                    if self.spec.norm == "buffer":
                        weight = cast("Tensor", batch["priority_weight"])
                        self._weight_watch.see(weight)
                    return batch
            # The counted rows are lost. Without a restart, writes and batches would
            # wait for each other.
            self._flow.found_empty.remote(*admission, size)
            if not wait:
                raise RuntimeError(EMPTY)

    # -- flow control

    def _ask_flow(self, method: str, *arguments: Any) -> Any:
        """Call a method of flow control, and return its result; without flow control,
        return None."""
        if self._flow is None:
            return None
        call = getattr(self._flow, method).remote(*arguments)
        return self._flow_answer(call, time.monotonic() + RECOVERY)

    def _flow_answer(self, call: Any, deadline: float) -> Any:
        """Return flow control's answer; TimeoutError if there is none by the
        ``deadline``, because its process may be frozen."""
        engine = self.links.engine
        left = None if deadline == inf else max(0.0, deadline - time.monotonic())
        try:
            if not engine.wait([call], timeout=left)[0]:
                raise TimeoutError("flow control has not answered in time")
            return engine.get(call)
        except RayActorError as error:
            raise ShutDown(
                f"{SHUT_DOWN}, or the process of its flow control has crashed"
            ) from error
        except RayTaskError as error:
            raise error.cause from None  # without the traceback of its process

    def _admit_batch(self, rows: int, wait: bool, deadline: float) -> Admission:
        """Wait until flow control admits and counts a batch."""
        if self._flow is None:
            return Admission()
        self._take_back_abandoned()
        now = time.monotonic()
        timeout = None if deadline == inf else deadline - now
        call = self._flow.sample.remote(rows, wait, timeout)
        with self._unless_abandoned(call, sampled=rows):
            last = deadline + GRACE if wait else now + RECOVERY
            return self._flow_answer(call, last)

    def _admit_write(self, rows: int) -> Admission:
        """Wait until flow control admits and counts a write; warn if this takes
        long."""
        if self._flow is None:
            return Admission()
        self._take_back_abandoned()
        engine = self.links.engine
        call = self._flow.insert.remote(rows)
        with self._unless_abandoned(call, inserted=rows):
            if not engine.wait([call], timeout=PATIENCE)[0]:
                why = self._flow.why_no_write.remote(rows)
                answers, _ = engine.wait([why], timeout=GRACE)
                reason = engine.get(why) if answers else "flow control does not answer"
                if not engine.wait([call], timeout=0)[0]:
                    warn_of_slow_write(reason, stacklevel=3)
            return self._flow_answer(call, inf)

    @contextmanager
    def _unless_abandoned(self, call: Any, **rows: int) -> Iterator[None]:
        """Note a call whose rows flow control may still count, if the ``with`` block
        raises an error."""
        try:
            yield
        except BaseException:
            self._abandoned.append((call, rows))
            self.links.engine.cancel(call)
            raise

    def _take_back_abandoned(self) -> None:
        """Subtract the rows that flow control has counted for abandoned calls."""
        waiting = []
        for call, rows in self._abandoned:
            if not self.links.engine.wait([call], timeout=0)[0]:
                waiting.append((call, rows))
                continue
            with suppress(Exception):  # such as the TimeoutError of the call
                self._take_back(self.links.engine.get(call).epoch, **rows)
        self._abandoned = waiting

    @contextmanager
    def _taken_back(self, admission: Admission, **rows: int) -> Iterator[None]:
        """Subtract ``rows`` from flow control's counters if the ``with`` block raises
        an error."""
        try:
            yield
        except BaseException:
            self._take_back(admission.epoch, **rows)
            raise

    def _take_back(self, epoch: int, **rows: int) -> None:
        if self._flow is not None:
            self._flow.take_back.remote(epoch, **rows)

    # -- batches

    def _batches(self, size: int, wait: bool, deadline: float) -> Batches | None:
        """Return batches of ``size`` rows, received now or before; None if rows that
        flow control has counted do not arrive.

        Raises a RuntimeError if there are rows, but no row has a positive priority.
        """
        patience = 0.0 if self._flow is None else _ARRIVAL
        arrival = time.monotonic() + patience
        while self._ready is None or not len(self._ready) or self._ready.size != size:
            if self._ahead is None or self._ahead.size != size:
                self._ahead = self._send(size, deadline)
            if self._ahead is not None:
                self._receive_ahead(self._ahead, deadline)
                continue
            if time.monotonic() >= arrival:
                if self._flow is not None and self.links.are_all_live:
                    return None
                if not wait:
                    raise RuntimeError(EMPTY)
            refuse_late(deadline, "the shards had no rows")
            time.sleep(0.005)
        return self._ready

    def _receive_ahead(self, draw: Draw, deadline: float) -> None:
        """Receive the requested batches, and request the next ones with
        ``prefetch``."""
        # after a TimeoutError, the next call waits for the same answers
        self.links.wait_for(draw.calls, deadline)
        self._ahead = None
        self._ready = self._receive(draw)
        if self._ready is None:
            self.retries += 1
        elif self.prefetch:
            # now, while the reported masses are current
            self._ahead = self._send(draw.size, deadline)

    def _send(self, size: int, deadline: float) -> Draw | None:
        """Request batches from the shards; return ``None`` if all shards are empty."""
        links = self.links
        windows = self.spec.windows
        links.require_one(deadline)
        # ValueError if it is no multiple of a window
        draws = size if windows is None else windows.drawn_rows_of(size)
        if not any(report is not None and report.mass > 0.0 for report in links.known):
            self._exchange(links.live, deadline)
        known = list(links.known)
        masses = torch.tensor(
            [0.0 if report is None else report.mass for report in known],
            dtype=torch.float64,
            device="cpu",
        )
        if not float(masses.sum()) > 0.0:
            if any(report is not None and report.rows for report in known):
                raise RuntimeError(NO_PRIORITY)
            return None
        batches = max(1, self.prefetch)
        parts = split(self._positions(batches, draws, masses.sum()), masses)
        counts = parts.counts.tolist()
        fractions = np.split(parts.fractions.numpy(), np.cumsum(counts)[:-1])
        now = time.monotonic()
        requests = {
            shard: fractions[shard]
            for shard in links.live
            if counts[shard] or now - links.heard[shard] > _REFRESH
        }
        return Draw(size, batches, parts, known, self._request(requests))

    def _positions(self, batches: int, draws: int, total: Tensor) -> Tensor:
        """Return where the draws of batches lie between 0 and the total mass, ``[batches
        * draws]``."""
        uniform = torch.rand(
            batches, draws, dtype=torch.float64, generator=self.generator, device="cpu"
        )
        step = step_of(draws, self.spec.stratified)
        return torch.cat([positions_in(row, total, step) for row in uniform])

    def _request(self, fractions: dict[int, np.ndarray]) -> dict[int, Any]:
        """Send each shard its draws and its queued TD errors; return Ray's references
        to the answers."""
        known = self.links.known
        largest = max(
            (report.largest for report in known if report is not None), default=-1.0
        )
        handles, errors = self._take_errors()
        requests = {}
        for shard in {*fractions, *np.unique(handles[:, SHARD]).tolist()}:
            is_here = handles[:, SHARD] == shard
            if known[shard] is None:
                self.stale += int(is_here.sum())
                continue
            draws = fractions.get(shard, _NO_ERRORS)
            request = Request(draws, largest, handles[is_here], errors[is_here])
            requests[shard] = (pickle.dumps(request, 5),)
        return self.links.start("answer", requests)

    def _take_errors(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the queued handles, ``[n, 4]``, with their TD errors, ``[n]``, and
        empty the queue."""
        queued = [(_NO_HANDLES, _NO_ERRORS), *self._errors]
        self._errors.clear()
        handles, errors = map(np.concatenate, zip(*queued, strict=True))
        return handles, errors

    def _exchange(self, shards: Iterable[int], deadline: float = inf) -> None:
        """Send the queued TD errors; make the shards in ``shards`` store their waiting
        rows and report their state."""
        calls = self._request(dict.fromkeys(shards, _NO_ERRORS))
        self.links.wait_for(calls, deadline)
        self.links.receive(calls)

    def _receive(self, draw: Draw) -> Batches | None:
        """Return the requested batches; ``None`` if a shard has been lost or emptied
        since the request.

        Raise a SchemaError if the rows of the answers differ in layout.
        """
        answers = self.links.receive(draw.calls)
        shards = [
            shard for shard, count in enumerate(draw.split.counts.tolist()) if count
        ]
        drawn = drawn_of(answers)
        if not drawn.keys() >= {*shards}:
            return None
        first = drawn[shards[0]].layout
        for shard in shards:
            if drawn[shard].layout != first:
                raise SchemaError(
                    f"shard {shard} holds rows of another layout than shard {shards[0]}"
                )
        return Batches(
            self.spec,
            layout_named(first),
            {shard: answers[shard] for shard in shards},
            draw.known,
            draw.split.rank.view(draw.batches, -1),
        )

    def _forget(self) -> None:
        self._ready = self._ahead = None
        self._errors.clear()

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Queue the TD errors of a batch. The next request to a shard sends the TD
        errors of that shard's rows.

        TD errors of rows that have been replaced, or whose shard has restarted, are
        skipped and counted.

        Args:
            data: a batch from :meth:`sample`, or a part of a batch, with TD errors
                under the buffers' ``priority_key``.

        Raises:
            KeyError: ``data`` has no TD errors, or no ``"index"``.
            ValueError: a TD error is NaN or infinite, or the ``"index"`` is not that of
                a batch of this buffer; nothing has been queued.
            ShutDown: the buffer has been shut down.
        """
        self.links.require_open()
        spec = self.spec
        if not spec.is_prioritized:
            return
        for key in (spec.priority_key, "index"):
            if data.get(key, None) is None:
                raise KeyError(
                    f"the batch has no {key!r}: set the TD errors of the sampled rows"
                )
        td_error = data.get(spec.priority_key)
        td_error = one_a_row(td_error, data.ndim, spec.reduction).cpu()
        refuse_errors(td_error)
        index = self._checked(data.get("index"), len(td_error))
        update = Update(index, td_error)
        if spec.windows is not None:
            update = spec.windows.anchored(entries_of(data.cpu()), update).reduced()
        errors = update.td_error.to(torch.float64)
        self._errors.append((update.index.numpy(), errors.numpy()))

    def _checked(self, index: Tensor, rows: int) -> Tensor:
        """Return the index of a batch as ``[rows, 4]``; ValueError if it does not name
        rows of the shards."""
        shape = tuple(index.shape)
        shards = len(self.links.handles)
        index = index.cpu().reshape(-1, shape[-1] if shape else 1)
        if index.shape != (rows, 4) or index.dtype is not torch.int64:
            kind = str(index.dtype).removeprefix("torch.")
            raise ValueError(
                f"the 'index' of a batch from shards is int64 [{rows}, 4], got {kind} of shape {shape}"
            )
        for column, size in ((SHARD, shards), (ROW, self.spec.capacity)):
            numbers = index[:, column]
            if bool(((numbers < 0) | (numbers >= size)).any()):
                raise ValueError(
                    f"the 'index' names rows that are not in the {shards} shards"
                )
        return index

    def synchronize(self) -> None:
        """Send the queued TD errors, and wait until the shards have received all rows
        that this client wrote.

        Raises:
            SchemaError: a shard has refused rows of this client, as :meth:`extend`
                says. Any other error that the buffer of a shard has raised, too.
            ShutDown: the buffer has been shut down.
        """
        self.links.require_open()
        for shard in self.links.live:
            self.links.ask_for_refusals(shard, self._writer)
        self._drain()
        self._confirm_writes()
        self._exchange(())

    def _confirm_writes(self) -> bool:
        """Raise what shards have refused of this client's rows; return False if they
        have lost some."""
        try:
            return self.links.confirm()
        except SchemaError:
            self._layout = None  # the shards may have other rows since a load
            raise

    def extend(self, data: TensorDictBase) -> None:
        """Send transitions, ``[n]`` (or ``[E, T]`` if the buffers have ``ndim=2``), to
        the shard of this client.

        The first write waits until the shard has received the rows. A later write waits
        only if flow control requires it, or, for at most 1 s, if the shard has not
        confirmed the last four writes. The client changes to another shard if its own
        is lost or too slow.

        The first rows that a shard stores fix the keys, dtypes and shapes of the rows
        in all shards. If a shard refuses rows after this call has returned, the next
        write or :meth:`synchronize` raises its error, and the rows of that write have
        not been sent. Flow control counts no rows that are refused or lost; of a client
        that is killed in this call, it may go on counting the rows of this write.

        Raises:
            SchemaError: the data does not match earlier rows of this client or of the
                shards.
            ValueError: the data has no rows, has too few batch dims, or has a TD error
                that is NaN or infinite.
            ShardLost: all shards are lost.
            ShutDown: the buffer has been shut down.
        """
        self.links.require_open()
        spec = self.spec
        lead = data.batch_size[: spec.ndim]
        if len(lead) < spec.ndim or not lead.numel():
            raise ValueError(
                f"extend needs transitions of {spec.ndim} or more batch dims, got {tuple(data.shape)}"
            )
        if "index" in data.keys():
            refuse_index()
        is_first = self._layout is None
        if is_first:
            self._drain()
        self._confirm_writes()
        if self._layout is None:
            layout = RowLayout(data, spec.ndim)
            name = named(layout)
        else:
            layout, name = self._layout
        rows = pack(layout, data, lead)
        if data.get(spec.priority_key, None) is not None:
            refuse_errors(data.get(spec.priority_key))
        count = lead.numel()
        admission = self._admit_write(count)
        with self._taken_back(admission, inserted=count):
            shard = self._shard_to_write()
            arguments = self._writer, admission.epoch, name, rows, lead
            self.links.write(shard, admission.epoch, count, arguments)
        if is_first:
            if self.links.arrives(shard, RECOVERY) and self._confirm_writes():
                self._layout = layout, name
        elif not self.links.keeps_up(shard) and len(self.links.live) > 1:
            self._home = next(other for other in self.links.live if other != shard)

    def _drain(self) -> None:
        """Wait until the live shards have answered all writes of this client."""
        for shard in self.links.live:
            self.links.arrives(shard, RECOVERY)

    def add(self, data: TensorDictBase, *columns: object) -> None:
        """Send one time step, ``[]`` (or ``[E]`` if the buffers have ``ndim=2``), as
        :meth:`extend` does."""
        if columns:
            raise TypeError(
                f"add takes one TensorDict, got {1 + len(columns)} arguments: make_transition(...) makes it of the "
                "columns of a step"
            )
        self.extend(data.unsqueeze(self.spec.ndim - 1))

    def _shard_to_write(self) -> int:
        """Return the shard to which this client writes: its home, or the next one that
        is alive."""
        links = self.links
        links.require_one()
        if self._home is None:
            self._home = random.SystemRandom().choice(links.live)
        self._home %= len(links.handles)
        while links.known[self._home] is None:
            self._home = (self._home + 1) % len(links.handles)
        return self._home

    def __len__(self) -> int:
        """Return the number of rows stored in all shards, without rows that shards have
        received but not stored."""
        self.links.require_one()
        return sum(report.rows for report in self.links.ask("report").values())

    @property
    def write_count(self) -> int:
        """The number of rows that the shards have received so far."""
        self.links.require_one()
        return sum(report.inserts for report in self.links.ask("report").values())
