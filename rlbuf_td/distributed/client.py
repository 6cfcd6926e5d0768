"""The client through which a learner samples from all shards, and a collector writes to
one of them."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from ray.exceptions import RayActorError
from tensordict import TensorDictBase
from torch import Tensor

from rlbuf_td.buffers.waiting import PATIENCE, ShutDown, warn_of_slow_write
from rlbuf_td.distributed.batches import Batches, Split, split
from rlbuf_td.distributed.links import RECOVERY, SHUT_DOWN, Links
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
from rlbuf_td.samplers.common import EMPTY, NO_PRIORITY, refuse_errors
from rlbuf_td.storages import SchemaError
from rlbuf_td.storages.checks import State
from rlbuf_td.storages.indexing import one_a_row
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.schema import refuse_index
from rlbuf_td.storages.tensordict_fast import entries_of

# seconds without a report after which the client asks a shard for its mass
_REFRESH = 0.1
# seconds in which rows that flow control has counted arrive in a shard, or are lost
_ARRIVAL = 1.0
_NO_HANDLES, _NO_ERRORS = np.empty((0, 4), np.int64), np.empty(0, np.float64)


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
        self._given = connect, spec, batch_size, prefetch, home
        self.spec, self.prefetch, self.batch_size = (
            spec,
            prefetch,
            batch_size or spec.batch_size,
        )
        self.beta = spec.beta  # may be set at any time
        self.generator: torch.Generator | None = None
        handles, self._flow, engine = connect()
        self.links = Links(handles, engine)
        self.links.ask("report", range(len(handles)), RECOVERY)
        self._home = home
        # a copy of a client is another writer
        self._writer = random.SystemRandom().getrandbits(62)
        # of the rows that this client writes
        self._layout: tuple[RowLayout, bytes] | None = None
        self._rows: bytes | None = None  # the layout of the rows in batches
        # handles and TD errors for the next requests
        self._errors: list[tuple[np.ndarray, np.ndarray]] = []
        self._ready: Batches | None = None
        self._ahead: Draw | None = None
        self.stale = self.retries = 0

    def __getstate__(self) -> dict[str, object]:
        return {"given": self._given, "beta": self.beta}

    def __setstate__(self, state: State) -> None:
        Client.__init__(self, *state["given"])
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
            TimeoutError: no batch was ready within ``timeout`` seconds.
            ShardLost: all shards are lost.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise RuntimeError(
                "there is no batch size: pass it to sample, or to the constructor"
            )
        self.links.require_open()
        deadline = inf if timeout is None else time.monotonic() + timeout
        while True:
            admitted = self._ask_flow(
                "sample",
                size,
                wait,
                None if deadline == inf else deadline - time.monotonic(),
            )
            with self._taken_back(admitted and admitted[0], sampled=size):
                if self._arrives(size, wait, deadline):
                    return self._ready.take(self.beta)  # pyrefly: ignore [missing-attribute]
            # The counted rows are lost. Without a restart, writes and batches would
            # wait for each other.
            self._ask_flow("found_empty", *admitted, size)
            if not wait:
                raise RuntimeError(EMPTY)

    def _ask_flow(self, method: str, *given: Any) -> Any:
        """Call a method of flow control, and return its result; without flow control,
        return None."""
        if self._flow is None:
            return None
        engine, call = self.links.engine, getattr(self._flow, method).remote(*given)
        try:
            if method == "insert" and not engine.wait([call], timeout=PATIENCE)[0]:
                reason = engine.get(self._flow.why_no_write.remote(*given))
                if not engine.wait([call], timeout=0)[0]:
                    warn_of_slow_write(reason, stacklevel=3)
            return engine.get(call)
        except RayActorError as error:
            raise ShutDown(
                f"{SHUT_DOWN}, or the process of its flow control has crashed"
            ) from error

    @contextmanager
    def _taken_back(self, epoch: int | None, **rows: int) -> Iterator[None]:
        """Subtract ``rows`` from flow control's counters if the ``with`` block raises
        an error."""
        try:
            yield
        except BaseException:
            if self._flow is not None:
                self._flow.take_back.remote(epoch, **rows)
            raise

    def _arrives(self, size: int, wait: bool, deadline: float) -> bool:
        """Receive batches unless there are some; return False if rows that flow control
        has counted do not arrive.

        Raises a RuntimeError if there are rows, but no row has a positive priority.
        """
        arrival = time.monotonic() + (0.0 if self._flow is None else _ARRIVAL)
        while self._ready is None or not len(self._ready) or self._ready.size != size:
            draw, self._ahead = self._ahead, None
            if draw is None or draw.size != size:
                draw = self._send(size)
            if draw is not None:
                self._ready = self._receive(draw)
                if self._ready is None:
                    self.retries += 1
                elif self.prefetch:
                    # now, while the reported masses are current
                    self._ahead = self._send(size)
                continue
            now, links = time.monotonic(), self.links
            if (
                now >= arrival
                and self._flow is not None
                and len(links.live) == len(links.handles)
            ):
                return False
            if now >= arrival and not wait:
                raise RuntimeError(EMPTY)
            if now > deadline:
                raise TimeoutError(
                    "the shards had no rows within the timeout of this call"
                )
            time.sleep(0.005)
        return True

    def _send(self, size: int) -> Draw | None:
        """Request batches from the shards; return ``None`` if all shards are empty."""
        links = self.links
        links.require_one()
        windows, batches = self.spec.windows, max(1, self.prefetch)
        # ValueError if it is no multiple of a window
        draws = size if windows is None else windows.drawn_rows_of(size)
        if not any(report is not None and report.mass > 0.0 for report in links.known):
            self._exchange(links.live)
        known = list(links.known)
        mass = [0.0 if report is None else report.mass for report in known]
        masses = torch.tensor(mass, dtype=torch.float64, device="cpu")
        total = masses.sum()
        if not float(total) > 0.0:
            if any(report is not None and report.rows for report in known):
                raise RuntimeError(NO_PRIORITY)
            return None
        uniform = torch.rand(
            batches, draws, dtype=torch.float64, generator=self.generator, device="cpu"
        )
        parts = split(
            torch.cat(
                [positions_in(each, total, self.spec.stratified) for each in uniform]
            ),
            masses,
        )
        counts, now = parts.counts.tolist(), time.monotonic()
        fractions = np.split(parts.fractions.numpy(), np.cumsum(counts)[:-1])
        places = [
            place
            for place in links.live
            if counts[place] or now - links.heard[place] > _REFRESH
        ]
        return Draw(
            size,
            batches,
            parts,
            known,
            self._request({place: fractions[place] for place in places}),
        )

    def _request(self, fractions: dict[int, np.ndarray]) -> dict[int, Any]:
        """Send each shard its draws and its queued TD errors; return Ray's references
        to the answers."""
        known = self.links.known
        largest = max(
            (report.largest for report in known if report is not None), default=-1.0
        )
        handles = np.concatenate(
            [_NO_HANDLES, *(handles for handles, _ in self._errors)]
        )
        errors = np.concatenate([_NO_ERRORS, *(errors for _, errors in self._errors)])
        self._errors.clear()
        requests = {}
        for place in fractions.keys() | set(np.unique(handles[:, SHARD]).tolist()):
            mine = handles[:, SHARD] == place
            if known[place] is None:
                self.stale += int(mine.sum())
                continue
            request = Request(
                fractions.get(place, _NO_ERRORS), largest, handles[mine], errors[mine]
            )
            requests[place] = (pickle.dumps(request, 5),)
        return self.links.start("answer", requests)

    def _exchange(self, places: Iterable[int]) -> None:
        """Send the queued TD errors; make the shards in ``places`` store their waiting
        rows and report their state."""
        self.links.receive(self._request(dict.fromkeys(places, _NO_ERRORS)))

    def _receive(self, draw: Draw) -> Batches | None:
        """Return the requested batches; ``None`` if a shard has been lost or emptied
        since the request.

        Raise a SchemaError if rows in an answer have another layout than those of
        earlier answers.
        """
        answers = self.links.receive(draw.calls)
        touched = [
            place for place, count in enumerate(draw.split.counts.tolist()) if count
        ]
        drawn = {
            place: answers[place]
            for place in touched
            if place in answers and answers[place].drawn is not None
        }
        if len(drawn) < len(touched):
            return None
        names = {
            place: answer.drawn.layout
            for place, answer in drawn.items()
            if answer.drawn
        }
        self._rows = self._rows or next(iter(names.values()))
        if other := [place for place, name in names.items() if name != self._rows]:
            what = f"shard {other[0]} holds rows of another layout than the others"
            raise SchemaError(f"{what}: see the first write to it")
        return Batches(
            self.spec,
            layout_named(self._rows),
            drawn,
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
        td_error, index = data.get(spec.priority_key, None), data.get("index", None)
        if td_error is None or index is None:
            missing = spec.priority_key if td_error is None else "index"
            raise KeyError(
                f"the batch has no {missing!r}: set the TD errors of the sampled rows"
            )
        td_error = one_a_row(td_error, data.ndim, spec.reduction).cpu()
        refuse_errors(td_error)
        index = self._checked(index, len(td_error))
        if spec.windows is not None:
            index, td_error, windows = spec.windows.anchored(
                entries_of(data.cpu()), index, td_error
            )
            index, td_error = windows.reduced(index, td_error)
        self._errors.append((index.numpy(), td_error.to(torch.float64).numpy()))

    def _checked(self, index: Tensor, rows: int) -> Tensor:
        """Return the index of a batch as ``[rows, 4]``; ValueError if it does not name
        rows of the shards."""
        given, limits = (
            tuple(index.shape),
            torch.tensor([len(self.links.handles), self.spec.capacity], device="cpu"),
        )
        index = index.cpu().reshape(-1, given[-1] if given else 1)
        if index.shape != (rows, 4) or index.dtype is not torch.int64:
            kind = str(index.dtype).removeprefix("torch.")
            raise ValueError(
                f"the 'index' of a batch from shards is int64 [{rows}, 4], got {kind} of shape {given}"
            )
        named = index[:, [SHARD, ROW]]
        if bool(((named < 0) | (named >= limits)).any()):
            raise ValueError(
                f"the 'index' names rows that are not in the {len(self.links.handles)} shards"
            )
        return index

    def synchronize(self) -> None:
        """Send the queued TD errors, and wait until the shards have received all rows
        that this client wrote."""
        self.links.require_open()
        for place in self.links.live:
            self.links.collect(place, RECOVERY, until=0)
        self._exchange(())

    def extend(self, data: TensorDictBase) -> None:
        """Send transitions, ``[n]`` (or ``[E, T]`` if the buffers have ``ndim=2``), to
        the shard of this client.

        The first write waits until the shard has received the rows. A later write waits
        only if flow control requires it, or, for at most 1 s, if the shard has not
        confirmed the last four writes. The client changes to another shard if its own
        is lost or too slow.

        Raises:
            SchemaError: the data does not match earlier rows of this client or of the
                shard; for the shard's rows, a later write or :meth:`synchronize` may
                raise it.
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
        if self._layout is None:
            layout = RowLayout(data, spec.ndim)
            self._layout = layout, named(layout)
        rows = pack(self._layout[0], data, lead)
        if data.get(spec.priority_key, None) is not None:
            refuse_errors(data.get(spec.priority_key))
        with self._taken_back(
            self._ask_flow("insert", lead.numel()), inserted=lead.numel()
        ):
            place = self._shard_to_write()
        if (
            not self.links.write(place, self._writer, self._layout[1], rows, lead)
            and len(self.links.live) > 1
        ):
            self._home = next(other for other in self.links.live if other != place)
        if is_first:
            self.links.collect(place, RECOVERY, until=0)

    def add(self, data: TensorDictBase) -> None:
        """Send one time step, ``[]`` (or ``[E]`` if the buffers have ``ndim=2``), as
        :meth:`extend` does."""
        self.extend(data.unsqueeze(self.spec.ndim - 1))

    def _shard_to_write(self) -> int:
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
