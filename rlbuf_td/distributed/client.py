"""The client of a learner or a collector: it draws batches from all shards, with one request per shard."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from tensordict import TensorDictBase

from rlbuf_td.distributed.batches import INCARNATION, ROW, SHARD, WRITTEN_AT, Batches
from rlbuf_td.distributed.law import Split, split
from rlbuf_td.distributed.links import RECOVERY, Links, OnLoss
from rlbuf_td.distributed.packing import layout_named, named, pack, pieces_of
from rlbuf_td.distributed.shard import Answer, Report, Request
from rlbuf_td.distributed.spec import Spec
from rlbuf_td.kernels.strata import masses as positions_in
from rlbuf_td.samplers.common import EMPTY, refuse_errors
from rlbuf_td.storages import SchemaError
from rlbuf_td.storages.indexing import one_a_row
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.notebooks import PRIORITIES

_REFRESH = 0.1  # seconds after which a shard that no batch has touched is asked for its mass
_NO_HANDLES, _NO_ERRORS = np.empty((0, 4), np.int64), np.empty(0, np.float64)


class Draw(NamedTuple):
    """Batches that have been requested."""

    size: int
    batches: int
    split: Split
    known: list[Report | None]  # the reports whose masses determined the draws; None: a lost shard
    calls: dict[int, Any]


class Client:
    """The access of a learner or a collector to the shards. It can be sent to other processes that use Ray.

    Args:
        connect: returns the handles of the shards' actors, the handle of the flow control or ``None``, and Ray.
        spec: the common properties of the buffers in the shards.
        batch_size: the rows of a batch; ``None``: the batch size of the shards' buffers.
        prefetch: batches per request; the next request is sent while these are used. 0: one batch, when it is needed.
        on_loss: ``"continue"``: go on without a lost shard; ``"raise"``: raise a :class:`ShardLost`.
        home: the shard that this client writes to unless it is lost; ``None``: a random one.
    """

    service_backend = "ray"
    _storage = None  # TorchRL's collectors with several workers check whether they must initialize it

    def __init__(
        self,
        connect: Callable[[], tuple[list[Any], Any, Any]],
        spec: Spec,
        batch_size: int | None,
        prefetch: int,
        on_loss: OnLoss,
        home: int | None,
    ) -> None:
        self._given = connect, spec, batch_size, prefetch, on_loss, home
        self.spec, self.prefetch, self.batch_size = spec, prefetch, batch_size or spec.batch_size
        self.beta = spec.beta  # may be set at any time
        self.generator: torch.Generator | None = None
        handles, self._flow, engine = connect()
        self.links = Links(handles, engine, on_loss)
        self.links.greet()
        self._home = home
        self._writer = random.SystemRandom().getrandbits(62)  # each copy of a client is a different writer
        self._layout: tuple[RowLayout, bytes] | None = None  # of this client's writes
        self._rows: tuple[RowLayout, bytes, int] | None = None  # of the rows in batches
        self._errors: list[tuple[np.ndarray, np.ndarray]] = []  # handles and TD errors for the next requests
        self._ready: Batches | None = None
        self._ready_size = 0
        self._ahead: Draw | None = None
        self.stale = self.retries = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"given": self._given, "beta": self.beta}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Client.__init__(self, *state["given"])
        self.beta = state["beta"]

    # -- sampling

    def sample(
        self, batch_size: int | None = None, *, wait: bool = False, timeout: float | None = None
    ) -> TensorDictBase:
        """Return a batch of rows from all shards, ``[B]``, in fresh memory.

        Its ``"index"``, ``[B, 4]`` int64, holds shard, incarnation, flat row and the shard's clock; with prioritized
        buffers, ``"priority_weight"``, ``[B]`` float32, holds the importance weights.

        Args:
            batch_size: the rows of the batch; default: :attr:`batch_size`.
            wait: wait until there are rows and flow control admits the batch.
            timeout: the longest wait in seconds.

        Raises:
            RuntimeError: there is no batch size; or, with ``wait=False``, all shards are empty or flow control refuses.
            TimeoutError: no batch was ready in time.
            ShardLost: a shard is lost and ``on_loss="raise"``, or all shards are lost.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise RuntimeError("there is no batch size: pass it to sample, or to the constructor")
        deadline = inf if timeout is None else time.monotonic() + timeout
        if self._flow is not None:
            self.links.engine.get(self._flow.sample.remote(size, wait, timeout))
            wait = True  # rows that flow control has counted may not have arrived in a shard yet
        with self._taken_back(sampled=size):
            while self._ready is None or not len(self._ready) or self._ready_size != size:
                if not self._fetch(size):
                    if not wait:
                        raise RuntimeError(EMPTY)
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"the shards had no rows within {timeout} seconds")
                    time.sleep(0.005)
            return self._ready.take(self.beta)

    @contextmanager
    def _taken_back(self, **rows: int) -> Iterator[None]:
        """Uncount rows that flow control has admitted, if the ``with`` block fails."""
        try:
            yield
        except BaseException:
            if self._flow is not None:
                self._flow.take_back.remote(**rows)
            raise

    def _fetch(self, size: int) -> bool:
        """Receive the batches requested ahead, or request new ones; return whether any shard has rows.

        With ``prefetch``, the next request follows at once: the masses that the answers report are then still current.
        """
        draw, self._ahead = self._ahead, None
        if draw is None or draw.size != size:
            draw = self._send(size)
        if draw is None:
            return False
        self._ready, self._ready_size = self._receive(draw), size
        if self._ready is None:
            self.retries += 1
        elif self.prefetch:
            self._ahead = self._send(size)
        return True

    def _send(self, size: int) -> Draw | None:
        """Request batches from the shards; ``None`` if no shard has a row."""
        links = self.links
        links.require_one()
        draws, batches = self.spec.draws_of(size), max(1, self.prefetch)
        if not any(report is not None and report.mass > 0.0 for report in links.known):
            self._exchange(links.live)
        known = list(links.known)
        mass = [0.0 if report is None else report.mass for report in known]
        masses = torch.tensor(mass, dtype=torch.float64, device="cpu")
        total = masses.sum()
        if not float(total) > 0.0:
            return None
        uniform = torch.rand(batches, draws, dtype=torch.float64, generator=self.generator, device="cpu")
        parts = split(torch.cat([positions_in(each, total, self.spec.stratified) for each in uniform]), masses)
        counts, now = parts.counts.tolist(), time.monotonic()
        fractions = np.split(parts.fractions.numpy(), np.cumsum(counts)[:-1])
        places = [place for place in links.live if counts[place] or now - links.heard[place] > _REFRESH]
        return Draw(
            size,
            batches,
            parts,
            known,
            self._request(dict(zip(places, (fractions[each] for each in places), strict=True))),
        )

    def _request(self, fractions: dict[int, np.ndarray]) -> dict[int, Any]:
        """Send shards their draws, as fractions of their masses, with the queued TD errors; return the calls."""
        known = self.links.known
        largest = max((report.largest for report in known if report is not None), default=-1.0)
        layout = 0 if self._rows is None else self._rows[2]
        handles = np.concatenate([_NO_HANDLES, *(handles for handles, _ in self._errors)])
        errors = np.concatenate([_NO_ERRORS, *(errors for _, errors in self._errors)])
        self._errors.clear()
        requests = {}
        for place in fractions.keys() | set(np.unique(handles[:, SHARD]).tolist()):
            report, mine = known[place], handles[:, SHARD] == place
            if report is None:
                self.stale += int(mine.sum())
                continue
            current = mine & (handles[:, INCARNATION] == report.incarnation)
            self.stale += int(mine.sum() - current.sum())
            columns = handles[current, ROW], handles[current, WRITTEN_AT], errors[current]
            known_as = report.version, report.incarnation, largest, layout
            drawn = fractions.get(place, _NO_ERRORS)
            request = Request(drawn, *known_as, columns if len(columns[0]) else None)
            requests[place] = request, self._pieces(len(drawn))
        return self.links.request(requests)

    def _pieces(self, draws: int) -> int:
        """Return in how many pieces a shard returns its answer; 0: as one object in Ray's store."""
        if draws and self._rows is None:
            return 0
        row_bytes = 0 if self._rows is None else self._rows[0].row_bytes
        return pieces_of(1_000 + draws * (16 + self.spec.window_rows * (row_bytes + 8)))

    def _exchange(self, places: Iterable[int]) -> None:
        """Send the queued TD errors to shards, let each shard write its waiting rows, and update the known masses."""
        self.links.receive(self._request(dict.fromkeys(places, _NO_ERRORS)))

    def _receive(self, draw: Draw) -> Batches | None:
        """Return batches from the answers; ``None`` (draw again) if a shard was lost or emptied meanwhile."""
        answers = self.links.receive(draw.calls)
        touched = [place for place, count in enumerate(draw.split.counts.tolist()) if count]
        drawn = {place: answers[place] for place in touched if place in answers and answers[place].drawn is not None}
        if len(drawn) < len(touched):
            return None
        layouts = [self._layout_of(place, answer) for place, answer in drawn.items()]
        return Batches(self.spec, layouts[0], drawn, draw.known, draw.split.rank.view(draw.batches, -1))

    def _forget(self) -> None:
        """Drop batches requested ahead and queued TD errors: all rows have been replaced."""
        self._ready = self._ahead = None
        self._errors.clear()

    def _layout_of(self, place: int, answer: Answer) -> RowLayout:
        """Return the layout of the rows of an answer; a shard sends it only to clients that do not know it."""
        name = None if answer.drawn is None else answer.drawn.layout
        if self._rows is None and name is not None:
            self._rows = layout_named(name), name, crc32(name)
        if self._rows is None or name not in (None, self._rows[1]):
            raise SchemaError(f"shard {place} holds rows of another layout than the others: see the first write to it")
        return self._rows[0]

    # -- priorities

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Queue the TD errors of a batch; the next request to each shard brings those of its rows.

        TD errors of replaced rows, and of rows in shards that have restarted, are skipped and counted.

        Args:
            data: a batch of :meth:`sample`, or a part of one, with the buffers' ``priority_key`` set.

        Raises:
            KeyError: the batch has no TD errors, or no index.
            ValueError: a TD error is NaN or infinite; nothing has been sent.
        """
        spec = self.spec
        if not spec.is_prioritized:
            return
        td_error, index = data.get(spec.priority_key, None), data.get("index", None)
        if td_error is None or index is None:
            missing = spec.priority_key if td_error is None else "index"
            raise KeyError(f"the batch has no {missing!r}: set the TD errors of the sampled rows{PRIORITIES}")
        td_error, index = one_a_row(td_error, data.ndim, spec.reduction).cpu(), index.reshape(-1, 4).cpu()
        refuse_errors(td_error)
        if spec.windows is not None:
            index, td_error = spec.windows.anchored(data.cpu(), index, td_error)
        self._errors.append((index.numpy(), td_error.to(torch.float32).numpy()))

    def synchronize(self) -> None:
        """Send the queued TD errors, and wait until the shards have received all writes."""
        for place in self.links.live:
            self.links.collect(place, RECOVERY, until=0)
        self._exchange(())

    # -- writing

    def extend(self, data: TensorDictBase) -> None:
        """Send transitions, ``[n]`` or ``[E, T]`` as for the buffers, to the shard of this client.

        The call does not wait for the shard, unless flow control holds the write back or the shard does not keep up.
        If the shard is lost, another one takes its place.

        Raises:
            SchemaError: the data does not match this client's earlier rows, or those of other clients. In the second
                case, a later write may raise this error.
            ValueError: the data has no rows, or a TD error in it is NaN or infinite.
            ShardLost: a shard is lost and ``on_loss="raise"``, or all shards are lost.
        """
        spec = self.spec
        lead = data.batch_size[: spec.ndim]
        if len(lead) < spec.ndim or not lead.numel():
            raise ValueError(f"extend needs transitions of {spec.ndim} or more batch dims, got {tuple(data.shape)}")
        if self._layout is None:
            layout = RowLayout(data.exclude("index"), spec.ndim)
            self._layout = layout, named(layout)
            is_first = True
        else:
            is_first = False
        rows = pack(self._layout[0], data, lead)
        if data.get(spec.priority_key, None) is not None:
            refuse_errors(data.get(spec.priority_key))
        if self._flow is not None:
            self.links.engine.get(self._flow.insert.remote(lead.numel()))
        with self._taken_back(inserted=lead.numel()):
            place = self._shard_to_write()
        if not self.links.write(place, self._writer, self._layout[1], rows, lead) and len(self.links.live) > 1:
            self._home = next(other for other in self.links.live if other != place)
        if is_first:
            self.links.collect(place, RECOVERY, until=0)

    def add(self, data: TensorDictBase) -> None:
        """Send one transition, ``[]``, or one time step of all lanes, ``[E]``; raises as :meth:`extend`."""
        self.extend(data.unsqueeze(self.spec.ndim - 1))

    def _shard_to_write(self) -> int:
        """Return the shard of this client; another one if it is lost."""
        links = self.links
        links.require_one()
        if self._home is None:
            self._home = random.SystemRandom().choice(links.live)
        self._home %= len(links.handles)
        while links.known[self._home] is None:
            self._home = (self._home + 1) % len(links.handles)
        return self._home

    # -- contents

    def __len__(self) -> int:
        """Return the number of rows in all shards, without those that are not yet written."""
        self.links.require_one()
        return sum(report.rows for report in self.links.ask("report").values())

    @property
    def write_count(self) -> int:
        """The number of rows that the shards have received, including those that are not yet written."""
        self.links.require_one()
        return sum(report.written for report in self.links.ask("report").values())
