"""A shard: an ordinary buffer in a separate process, and the requests that it answers."""

from __future__ import annotations

import os
import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import torch
from tensordict import TensorDictBase

from rlbuf_td.buffers.priorities import write_priorities
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.distributed.packing import cut, layout_named, named, pack, unpack
from rlbuf_td.distributed.segments import Segment, load_segments
from rlbuf_td.storages import SchemaError
from rlbuf_td.storages.indexing import merge_
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.trajectory_index import TrajectoryIndex

_IDLE = 10.0  # seconds without a draw after which rows no longer wait for the next one
_NOTHING = np.empty(0, np.float64)

Errors: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""TD errors for a shard, as arrays ``[n]``: flat rows, the storage's clock at their draw, and the errors."""


class Report(NamedTuple):
    """The state that a shard reports with every answer."""

    incarnation: int  # start time of its process in ns, which differs after every restart
    version: int  # increases whenever the mass may have changed
    mass: float  # the sum of p ** alpha; the number of rows under a uniform sampler
    smallest: float  # p ** alpha of the least likely row; infinite without rows
    rows: int  # number of rows that can be drawn
    waiting: int  # rows received but not yet written: the shard writes them after its next draw
    written: int  # rows received so far: written and waiting ones
    largest: float  # the largest magnitude of a TD error so far, -1 before the first
    stale: int  # TD errors skipped, because their row has been replaced or the shard has restarted
    drifted: int  # rows drawn after the mass had changed without the client's knowledge
    requests: int  # number of requests so far


class Request(NamedTuple):
    """A request for a draw, with the TD errors of earlier batches."""

    fractions: np.ndarray = _NOTHING  # [k] float64 in [0, 1): positions of the draws, as fractions of the shard's mass
    version: int = -1  # the version of the mass that the client knows
    incarnation: int = -1  # the shard's incarnation when it drew the rows of the TD errors
    largest: float = -1.0  # the largest TD error magnitude of all shards: the priority of new rows
    layout: int = 0  # checksum of the rows' layout; 0 if the client does not know it
    errors: Errors | None = None


class Drawn(NamedTuple):
    """The rows of k draws; L is the length of a window, or 1 without windows."""

    rows: np.ndarray  # [k * L, row_bytes] uint8, packed
    flat: np.ndarray  # [k] int64: the flat rows drawn; for windows, their anchors
    weight: np.ndarray  # [k] float64, p ** alpha
    cells: np.ndarray | None  # [k * L] int64: the flat rows of all windows; None without windows
    layout: bytes | None  # the rows' layout; None if the client knows it


class Answer(NamedTuple):
    """The answer to a request."""

    drawn: Drawn | None  # None: no draw was requested, or the shard has no rows
    stamp: int  # the storage's clock at the draw
    before: Report  # the state at the draw
    after: Report  # the state after TD errors and waiting rows were applied


class Shard:
    """An ordinary buffer, and the rows that wait for the next draw before they are written to it.

    A draw uses the mass that the last answer reported. Only after the draw does the shard apply TD errors, write the
    waiting rows and report the new mass. The probabilities of a single learner are therefore exact while others write.
    Exception: after 10 s without a draw, or with a quarter of its capacity waiting, a shard writes before the draw.

    Args:
        make_buffer: returns the buffer.
        dump: the folder of a dump, which is loaded after a restart if it exists.
        restarted: whether this is a restart; ``None``: ask Ray.
    """

    def __init__(
        self, make_buffer: Callable[[], ReplayBuffer], dump: str | None = None, restarted: bool | None = None
    ) -> None:
        self.make_buffer = make_buffer
        self.incarnation, self.version = time.time_ns(), 0
        self._set(make_buffer())
        self._staged: list[tuple[int, TensorDictBase]] = []
        self._waiting, self._writer, self._last_draw = 0, -1, -inf
        self._stale = self._drifted = self._requests = 0
        self._layout: tuple[RowLayout | None, bytes, int] = (None, b"", 0)  # last layout: object, bytes, checksum
        if dump is not None and Path(dump).exists() and (_is_restart() if restarted is None else restarted):
            self.load([(dump, 0, None)])

    def _set(self, buffer: ReplayBuffer) -> None:
        self.buffer, self.storage = buffer, buffer.storage
        self._prioritized, self._wrapper = buffer._initialize().prioritized, buffer._parts.wrapper

    # -- requests of clients

    def report(self) -> Report:
        rows, mass, smallest, largest = len(self.storage), 0.0, inf, -1.0
        if self._prioritized is not None:
            self._prioritized.law.weigh()
            tree, largest = self._prioritized.law.table, self._prioritized.priorities.largest
            mass, smallest = float(tree.total), float(tree.smallest)
        elif rows:
            mass, smallest = float(rows), 1.0
        lanes = self.storage.lanes.numel()
        written = self.buffer.write_count * lanes + self._waiting
        counts = self._stale + self.buffer.stale_updates.total(), self._drifted, self._requests
        return Report(
            self.incarnation, self.version, mass, smallest, rows, self._waiting, written, float(largest), *counts
        )

    def process(self) -> int:
        return os.getpid()

    def answer(self, request: bytes, pieces: int) -> Any:
        """Call :meth:`draw` with a pickled request, which Ray sends faster; return the answer in pieces, see `cut`."""
        return cut(self.draw(pickle.loads(request)), pieces)

    def draw(self, request: Request) -> Answer:
        """Draw rows; then apply the TD errors, write the waiting rows, and report the new mass."""
        self._requests, self._last_draw = self._requests + 1, time.monotonic()
        before, stamp, drawn = self.report(), self.storage.clock.now, None
        if len(request.fractions) and before.mass > 0:
            if request.version != before.version:
                self._drifted += len(request.fractions)
            drawn = self._drawn_at(request.fractions, request.layout)
        self._learn(request)
        self._enter()
        return Answer(drawn, stamp, before, self.report())

    def write(self, writer: int, layout: bytes, rows: np.ndarray, lead: torch.Size) -> None:
        """Receive transitions, ``[*lead]``, and write them after the next draw.

        Write at once if the shard is empty, has not drawn for 10 s, or has more than a quarter of its capacity waiting.

        Raises:
            SchemaError: the data does not match the stored rows; nothing has changed.
        """
        data = unpack(layout_named(layout), rows.copy(), lead)  # Ray's memory is read-only, and not freed while in use
        count = lead.numel()
        stored = None if self.storage.is_reserved else self.storage.layout
        if stored not in (None, layout_named(layout)):
            stored.collect(data, lead)
            raise SchemaError("the rows of this writer have another layout than those of the shard")
        self._staged.append((writer, data))
        self._waiting += count
        is_idle = time.monotonic() - self._last_draw > _IDLE
        if not len(self.storage) or is_idle or 4 * self._waiting > self.storage.max_size:
            self._enter()

    def empty(self) -> Report:
        """Forget all rows, waiting ones included."""
        self._staged, self._waiting = [], 0
        self.buffer.empty()
        self.version += 1
        return self.report()

    def dump(self, path: str) -> tuple[int, int]:
        """Write the waiting rows and save the buffer; return its number of time steps and lanes."""
        self._enter()
        self.buffer.dumps(path, progress=False)
        lanes = self.storage.lanes.numel()
        return len(self.storage) // lanes, lanes

    def load(self, segments: Sequence[Segment]) -> Report:
        """Replace the rows by parts of dumps, in order; no trajectory continues from part to part."""
        buffer = self.make_buffer()
        load_segments(buffer, segments)
        self._set(buffer)
        self._staged, self._waiting = [], 0
        self.version += 1
        return self.report()

    # -- implementation

    def _drawn_at(self, fractions: np.ndarray, known: int) -> Drawn:
        """Draw at fractions of the mass; ``known``: the checksum of the layout that the client knows."""
        rows, where = len(self.storage), torch.from_numpy(fractions.copy())
        if self._prioritized is None:
            flat, weight = (where * rows).to(torch.int64), torch.ones_like(where)
        else:
            flat, _ = self._prioritized.law.draw(where, rows, False, None)
            weight = self._prioritized.law.table.weight[flat]
        cells, packed, layout = self._packed(flat)
        if self._layout[0] is not layout:
            name = named(layout)
            self._layout = layout, name, crc32(name)
        unknown = None if known == self._layout[2] else self._layout[1]
        return Drawn(packed, flat.numpy(), weight.numpy(), cells, unknown)

    def _packed(self, flat: torch.Tensor) -> tuple[np.ndarray | None, np.ndarray, RowLayout]:
        """Return the flat rows of all windows (else ``None``), the packed rows of a batch, and their layout."""
        if self._wrapper is None:
            stored = self.storage.written_rows()
            out = torch.empty((len(flat), stored.layout.row_bytes), dtype=torch.uint8, device="cpu")
            stored.pack_(flat, out.view(stored.layout.carrier))
            return None, out.numpy(), stored.layout
        cells, info, batch = self._wrapper.batch_of(self.storage, flat, {})
        is_windowed = info.pop("anchor_index", None) is not None
        merge_(batch, info)
        layout = self._layout[0] or RowLayout(batch, 1)
        return cells.numpy() if is_windowed else None, pack(layout, batch, batch.batch_size), layout

    def _learn(self, request: Request) -> None:
        """Apply TD errors; give new rows the largest magnitude of a TD error in any shard."""
        if self._prioritized is None:
            return
        priorities = self._prioritized.priorities
        priorities.largest = max(priorities.largest, request.largest)
        if request.errors is not None and request.incarnation != self.incarnation:
            self._stale += len(request.errors[0])
        elif request.errors is not None:
            flat, stamp, error = (torch.from_numpy(part.copy()) for part in request.errors)
            write_priorities(self.buffer, flat, error, stamp, 1)
            self.version += 1

    def _enter(self) -> None:
        if not self._staged:
            return
        staged, self._staged, self._waiting = self._staged, [], 0
        self.version += 1
        for writer, data in staged:
            if writer != self._writer:
                self._part()
            self._writer = writer
            self.buffer.extend(data)

    def _part(self) -> None:
        """End open trajectories: the next rows come from another writer."""
        for each in self.storage._attached_entities:
            if isinstance(each, TrajectoryIndex):
                each.part()


def _is_restart() -> bool:
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own code causes this warning
        return ray.get_runtime_context().was_current_actor_reconstructed
