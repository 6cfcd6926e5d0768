"""A shard, a ReplayBuffer in a separate process; the requests of clients, its answers, and how both are packed."""

from __future__ import annotations

import os
import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np
import ray
import torch
from tensordict import TensorDictBase

from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.checkpoint import CheckpointError
from rlbuf_td.distributed.dumps import end_trajectories, extend_by
from rlbuf_td.storages import SchemaError
from rlbuf_td.storages.indexing import merge_
from rlbuf_td.storages.layout import RowLayout

_IDLE = 10.0  # seconds without a request after which a shard stores received rows at once
_NOTHING = np.empty(0, np.float64)


class Report(NamedTuple):
    """The state of a shard, which each answer contains."""

    incarnation: int  # start time of the shard's process in ns, which differs after every restart
    version: int  # increases whenever the mass may have changed
    mass: float  # sum of p ** alpha over the stored rows; with a uniform sampler, the number of rows
    smallest: float  # p ** alpha of the least likely row; infinite without rows
    rows: int  # number of stored rows
    waiting: int  # number of rows received but not yet stored; the next request stores them
    inserts: int  # number of rows received so far
    largest: float  # largest magnitude of a TD error so far; -1 before the first
    stale_updates: int  # number of TD errors skipped because their row was replaced or the shard had restarted
    drifted: int  # number of rows drawn from a mass that the client did not know


class Request(NamedTuple):
    """A request for k draws, with TD errors of earlier batches."""

    fractions: np.ndarray = _NOTHING  # [k] float64 in [0, 1): positions of the draws, as fractions of the shard's mass
    version: int = -1  # version of the mass that the client knows
    incarnation: int = -1  # the shard's incarnation when the rows of the TD errors were drawn
    largest: float = -1.0  # largest TD error magnitude in any shard, which new rows get
    errors: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # [n] each: rows, their stamps, errors


class Drawn(NamedTuple):
    """The rows of k draws; a draw is one row (L = 1) or a sequence of L rows."""

    rows: np.ndarray  # [k * L, row_bytes] uint8, packed
    flat: np.ndarray  # [k] int64: row numbers of the draws; of sequences, their anchors
    stamp: np.ndarray  # [k] int64: their serials
    weight: np.ndarray  # [k] float64, p ** alpha
    cells: np.ndarray | None  # [k * L, 2] int64: row numbers of all rows of sequences, serials; None for single rows
    layout: bytes  # of the rows, see :func:`layout_named`


class Answer(NamedTuple):
    """The answer of a shard to a request."""

    drawn: Drawn | None  # None: no draw was requested, or the shard has no rows
    before: Report  # the state at the draw
    after: Report  # the state after the shard has applied TD errors and stored the rows that waited


class Shard:
    """A ReplayBuffer in a Ray actor.

    New rows usually wait until the next draw is done, so that this draw uses the mass that clients know.
    """

    def __init__(
        self,
        make_buffer: Callable[[], ReplayBuffer],
        find_dump: Callable[[], str | None] | None = None,  # returns the dump from which a restarted shard continues
        restarted: bool | None = None,
    ) -> None:
        self.make_buffer = make_buffer
        self._prepared: ReplayBuffer | None = None
        self.incarnation, self.version = time.time_ns(), 0
        self._set(make_buffer())
        self._staged: list[tuple[int, TensorDictBase]] = []
        self._waiting, self._writer, self._last_draw = 0, -1, -inf
        self._stale = self._drifted = 0
        self._layout: tuple[RowLayout | None, bytes] = (None, b"")  # of the last rows drawn
        if find_dump is not None and (_is_restart() if restarted is None else restarted):
            self._continue(find_dump)

    def _continue(self, find_dump: Callable[[], str | None]) -> None:
        """Load the newest dump, if there is one; a newer dump may replace it meanwhile."""
        folder = find_dump()
        while folder is not None:
            try:
                self.prepare([(folder, 0)])
                self.accept()
                return
            except CheckpointError:
                before, folder = folder, find_dump()
                if folder == before:
                    raise

    def _set(self, buffer: ReplayBuffer) -> None:
        parts = buffer._initialize()
        self.buffer, self.storage = buffer, buffer.storage
        self._prioritized, self._wrapper = parts.prioritized, parts.wrapper

    def report(self) -> Report:
        rows, mass, smallest, largest = len(self.storage), 0.0, inf, -1.0
        if self._prioritized is not None:
            self._prioritized.rule.refresh_weights()
            tree, largest = self._prioritized.rule.table, self._prioritized.priorities.largest
            mass, smallest = float(tree.total), float(tree.smallest)
        elif rows:
            mass, smallest = float(rows), 1.0
        written = self.buffer.write_count * self.storage.lanes.numel() + self._waiting
        counts = self._stale + self.buffer.stale_updates.total(), self._drifted
        return Report(
            self.incarnation, self.version, mass, smallest, rows, self._waiting, written, float(largest), *counts
        )

    def process(self) -> int:
        return os.getpid()

    def answer(self, request: bytes) -> bytes:
        """Answer a pickled request by a pickled answer; Ray sends bytes faster than other objects."""
        return pickle.dumps(self.draw(pickle.loads(request)), protocol=5)

    def draw(self, request: Request) -> Answer:
        """Draw rows, apply the request's TD errors, store waiting rows, and report the new mass, in this order."""
        self._last_draw = time.monotonic()
        before, drawn = self.report(), None
        if len(request.fractions) and before.mass > 0:
            if request.version != before.version:
                self._drifted += len(request.fractions)
            drawn = self._drawn_at(request.fractions)
        self._learn(request)
        self._enter()
        return Answer(drawn, before, self.report())

    def write(self, writer: int, layout: bytes, rows: np.ndarray, lead: torch.Size) -> None:
        """Receive packed transitions with batch dims ``lead``; SchemaError if the stored rows differ in layout."""
        given = layout_named(layout)
        packed = torch.from_numpy(rows.copy())  # Ray's memory is read-only, and not freed while it is in use
        data = given.unpack(packed.view(*lead, given.row_bytes))
        stored = None if self.storage.is_reserved else self.storage.layout
        if stored is not None and stored != given:
            stored.collect(data, lead)  # raises an error that names the key
            raise SchemaError("the rows of this writer have another layout than those of the shard")
        self._staged.append((writer, data))
        self._waiting += lead.numel()
        is_idle = time.monotonic() - self._last_draw > _IDLE
        if not len(self.storage) or is_idle or 4 * self._waiting > self.storage.max_size:
            self._enter()

    def empty(self) -> Report:
        self._staged, self._waiting = [], 0
        self.buffer.empty()
        self.version += 1
        return self.report()

    def dump(self, path: str) -> tuple[int, int]:
        """Store waiting rows and save the buffer; return the buffer's numbers of time steps and lanes."""
        self._enter()
        self.buffer.dumps(path)
        lanes = self.storage.lanes.numel()
        return len(self.storage) // lanes, lanes

    def prepare(self, dumps: Sequence[tuple[str, int]], part: tuple[int, int] | None = None) -> None:
        """Load the only one of ``dumps``, or ``part`` of their time steps (first, last), beside the rows of this shard.

        The arguments are those of :func:`~rlbuf_td.distributed.dumps.extend_by`.
        """
        self._prepared = None
        buffer = self.make_buffer()
        if part is None:
            buffer.loads(dumps[0][0])
        else:
            extend_by(buffer, dumps, *part)
        self._prepared = buffer

    def discard(self) -> None:
        """Forget the rows that :meth:`prepare` has loaded."""
        self._prepared = None

    def accept(self) -> Report:
        """Replace all rows by those that :meth:`prepare` has loaded."""
        if self._prepared is None:
            raise CheckpointError("the shard was restarted during the load: load the dump again")
        self._set(self._prepared)
        self._prepared, self._staged, self._waiting = None, [], 0
        self.version += 1
        return self.report()

    def _drawn_at(self, fractions: np.ndarray) -> Drawn:
        """Draw one row for each element of ``fractions``, positions in [0, 1) in the cumulative weights of the rows."""
        rows, where = len(self.storage), torch.from_numpy(fractions.copy())
        if self._prioritized is None:
            flat, weight = (where * rows).to(torch.int64), torch.ones_like(where)
        else:
            flat, _ = self._prioritized.rule.draw(where, rows, False, None)
            weight = self._prioritized.rule.table.weight[flat]
        cells, packed, layout = self._packed(flat)
        if self._layout[0] is not layout:
            self._layout = layout, named(layout)
        return Drawn(packed, flat.numpy(), self.storage.stamps(flat).numpy(), weight.numpy(), cells, self._layout[1])

    def _packed(self, flat: torch.Tensor) -> tuple[np.ndarray | None, np.ndarray, RowLayout]:
        """Return the row numbers of drawn sequences (``None`` for single rows), the packed rows, and their layout."""
        if self._wrapper is None:
            stored = self.storage.written_rows()
            out = torch.empty((len(flat), stored.layout.row_bytes), dtype=torch.uint8, device="cpu")
            stored.pack_(flat, out.view(stored.layout.carrier))
            return None, out.numpy(), stored.layout
        cells, info, batch = self._wrapper.batch_of(self.storage, flat, {})
        is_windowed = info.pop("anchor_index", None) is not None
        merge_(batch, info)
        layout = self._layout[0] or RowLayout(batch, 1)
        rows = torch.stack((cells, self.storage.stamps(cells)), 1).numpy() if is_windowed else None
        return rows, pack(layout, batch, batch.batch_size), layout

    def _learn(self, request: Request) -> None:
        """Apply the TD errors of a request, and update the largest TD error, which sets the priority of new rows."""
        if self._prioritized is None:
            return
        priorities = self._prioritized.priorities
        priorities.largest = max(priorities.largest, request.largest)
        if request.errors is not None and request.incarnation != self.incarnation:
            self._stale += len(request.errors[0])
        elif request.errors is not None:
            flat, stamp, error = (torch.from_numpy(part.copy()) for part in request.errors)
            self.buffer._update_sampled(flat, error, stamp)
            self.version += 1

    def _enter(self) -> None:
        if not self._staged:
            return
        staged, self._staged, self._waiting = self._staged, [], 0
        self.version += 1
        for writer, data in staged:
            if writer != self._writer:
                end_trajectories(self.storage)
            self._writer = writer
            self.buffer.extend(data)


def _is_restart() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own code causes this warning
        return ray.get_runtime_context().was_current_actor_reconstructed


def pack(layout: RowLayout, data: TensorDictBase, lead: torch.Size) -> np.ndarray:
    """Pack ``data`` (batch dims ``lead``) into ``[n, row_bytes]`` uint8; SchemaError if ``data`` does not fit."""
    leaves = layout.collect(data, lead)
    rows = torch.empty((*lead, layout.row_bytes), dtype=torch.uint8, device="cpu")
    torch._foreach_copy_(layout.columns(rows), leaves)
    return rows.view(-1, layout.row_bytes).numpy()


def named(layout: RowLayout) -> bytes:
    """Serialize a layout; equal layouts give equal bytes."""
    return pickle.dumps(layout.state())


@lru_cache(maxsize=64)
def layout_named(name: bytes) -> RowLayout:
    return RowLayout.from_state(pickle.loads(name))
