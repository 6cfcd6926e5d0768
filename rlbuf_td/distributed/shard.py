"""A shard, a ReplayBuffer in a separate process: which buffers can be shards, requests
of clients, and answers."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase

from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.checkpoint import CheckpointError, open_checkpoint
from rlbuf_td.checkpoint.buffer import innermost_state
from rlbuf_td.kernels.strata import stratification_of
from rlbuf_td.samplers import (
    EpisodeSampler,
    ProportionalSampler,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.samplers.priorities import Update
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import PackedStorage, SchemaError
from rlbuf_td.storages.indexing import merge_
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.writers import RingWriter

# seconds without a request after which a shard stores received rows at once
_IDLE = 10.0
_AT_ONCE = 16 << 20  # bytes of rows of a dump that are written at once
_NOTHING = np.empty(0, np.float64)
SHARD, INCARNATION, ROW, STAMP = range(4)  # the columns of a batch's "index"


class Packed(NamedTuple):
    """The bytes of drawn rows."""

    # the cell and the stamp of each row of drawn sequences, ``[n, 2]`` int64; None:
    # single rows were drawn
    cells: np.ndarray | None
    rows: np.ndarray  # ``[n, row_bytes]`` uint8
    layout: RowLayout


class ShardDump(NamedTuple):
    """The dump of a shard."""

    folder: str
    steps: int  # its number of time steps; 0 if it is unknown


class Spec(NamedTuple):
    """The properties of the shards' buffers that clients need."""

    ndim: int  # 2: rows have lanes
    capacity: int  # rows per shard
    batch_size: int | None  # the default of `sample`
    priority_key: Any  # of TD errors in a batch
    # a sampler with the settings of the shards' SequenceSamplers; it never draws
    windows: SequenceSampler | None
    is_prioritized: bool = False
    # settings of prioritized samplers
    beta: float = 0.0
    norm: str | None = None  # ``weight_norm``
    stratified: bool = True
    reduction: Any = "max"  # of several TD errors of a row

    @property
    def window_rows(self) -> int:
        """Number of rows per draw: the length of a sequence, including burn-in, or 1
        without sequences."""
        return 1 if self.windows is None else self.windows.window

    @classmethod
    def of(cls, buffer: ReplayBuffer) -> Spec:
        """Return the properties of a buffer; TypeError or ValueError if the buffer
        cannot be sharded."""
        inner = checked_sampler(buffer)
        outer = buffer.sampler
        windows = None
        if isinstance(outer, SequenceSampler):
            windows = SequenceSampler(
                UniformSampler(),
                outer.length,
                burn_in=outer.burn_in,
                boundary=outer.boundary,
                priority=outer.priority_rule,
                eta=outer.eta,
            )
        spec = cls(
            ndim=buffer.storage.ndim,
            capacity=buffer.storage.max_size,
            batch_size=buffer.batch_size,
            priority_key=buffer.priority_key,
            windows=windows,
        )
        if not isinstance(inner, ProportionalSampler):
            return spec
        return spec._replace(
            is_prioritized=True,
            beta=inner.beta,
            norm=inner.weight_norm,
            stratified=inner.stratified,
            reduction=inner.reduction,
        )


def checked_sampler(buffer: object) -> Any:
    """Return the buffer's sampler without its wrappers; TypeError or ValueError if the
    buffer cannot be sharded."""
    if not isinstance(buffer, ReplayBuffer) or not isinstance(
        buffer.storage, PackedStorage
    ):
        raise TypeError(
            f"make_buffer must return a ReplayBuffer of this package with a PackedStorage, got {buffer!r}"
        )
    sampler = buffer.sampler
    inner = sampler.innermost if isinstance(sampler, SamplerWrapper) else sampler
    unfit = [*_unfit_samplers(sampler, inner), *_unfit_parts(buffer)]
    if unfit:
        what, remedy = unfit[0]
        raise ValueError(f"{what} has no exact form over shards: use {remedy}")
    return inner


def _unfit_samplers(sampler: Any, inner: Any) -> Iterator[tuple[str, str]]:
    """Yield what of a sampler cannot be sharded, and what to use instead."""
    if type(inner) not in (UniformSampler, ProportionalSampler):
        yield type(inner).__name__, "a ProportionalSampler"
    if getattr(inner, "max_age", None) is not None:
        yield "max_age", "rows of any age, or one buffer"
    if isinstance(sampler, EpisodeSampler):
        yield "EpisodeSampler", "a SequenceSampler"
    if getattr(inner, "unique", False):
        yield "UniformSampler(unique=True)", "unique=False"
    if getattr(sampler, "boundary", "") == "strict":
        yield "boundary='strict'", "'pad' or 'shift'"


def _unfit_parts(buffer: ReplayBuffer) -> Iterator[tuple[str, str]]:
    """Yield what else of a buffer cannot be sharded, and what to use instead."""
    device = buffer.storage.device
    if type(buffer.writer) is not RingWriter:
        yield type(buffer.writer).__name__, "a RingWriter"
    if len(buffer._initialize().transforms):
        yield "a transform", "transforms in the learner"
    if buffer._prefetch or buffer.batch_device:
        yield "prefetch or device", "those of the shards and the learner"
    if buffer.flow is not None:
        yield (
            "flow control",
            "samples_per_insert and min_size of the ShardedReplayBuffer",
        )
    if buffer._sample_unit is not None:
        yield "a sample unit", "a SequenceSampler"
    if device.type != "cpu":
        yield f"rows on {device}", "rows on the CPU"


class Report(NamedTuple):
    """The state of a shard, which each answer contains."""

    # start time of the shard's process in ns, which differs after every restart
    incarnation: int
    # sum of p ** alpha over the stored rows; with a uniform sampler, the number of rows
    mass: float
    smallest: float  # p ** alpha of the least likely row; infinite without rows
    rows: int  # number of stored rows
    # number of rows received but not yet stored; the next request stores them
    waiting: int
    inserts: int  # number of rows received so far
    largest: float  # largest magnitude of a TD error so far; -1 before the first
    # number of TD errors skipped because their row was replaced or the shard had
    # restarted
    stale_updates: int


class Request(NamedTuple):
    """A request for k draws, with TD errors of earlier batches."""

    # [k] float64 in [0, 1): positions of the draws, as fractions of the shard's mass
    fractions: np.ndarray = _NOTHING
    largest: float = -1.0  # largest TD error magnitude in any shard, which new rows get
    handles: np.ndarray = _NOTHING  # [n, 4] int64: rows, as in the "index" of batches
    errors: np.ndarray = _NOTHING  # [n] float64: their TD errors


class Drawn(NamedTuple):
    """The rows of k draws; a draw is one row (L = 1) or a sequence of L rows."""

    rows: np.ndarray  # [k * L, row_bytes] uint8, packed
    flat: np.ndarray  # [k] int64: row numbers of the draws; of sequences, their anchors
    stamp: np.ndarray  # [k] int64: their serials
    weight: np.ndarray  # [k] float64, p ** alpha
    # [k * L, 2] int64: row numbers of all rows of sequences, serials; None for single
    # rows
    cells: np.ndarray | None
    layout: bytes  # of the rows, see :func:`layout_named`


class Answer(NamedTuple):
    """The answer of a shard to a request."""

    drawn: Drawn | None  # None: no draw was requested, or the shard has no rows
    before: Report  # the state at the draw
    # the state after the shard has applied TD errors and stored the rows that waited
    after: Report


class Staged(NamedTuple):
    """Received rows that wait to be stored."""

    writer: int  # the number of the client
    epoch: int  # of flow control's counts, when it admitted the rows
    data: TensorDictBase


class Refusal(NamedTuple):
    """Received rows that could not be stored."""

    rows: int  # how many
    epoch: int  # see :class:`Staged`
    error: Exception


class AgreedLayout(Protocol):
    """The layout of the rows of all shards, as the first shard with rows offers it; see
    :func:`named`."""

    def find(self) -> bytes | None: ...

    def offer(self, layout: bytes) -> bytes:
        """Set the layout if there is none; return the agreed one."""
        ...

    def replace(self, layout: bytes) -> None: ...


class Shard:
    """A ReplayBuffer in a Ray actor.

    New rows usually wait until the next draw is done, so that this draw uses the mass
    that clients know. A shard that stores its first rows agrees with the others on the
    layout of all rows.
    """

    def __init__(
        self,
        make_buffer: Callable[[], ReplayBuffer],
        find_dump: Callable[[], str | None],
        agreed: AgreedLayout,
    ) -> None:
        self.make_buffer, self._agreed = make_buffer, agreed
        self.incarnation = time.time_ns()
        self._set(make_buffer())
        self._prepared: ReplayBuffer | None = None  # for :meth:`accept`
        self._staged: list[Staged] = []
        # writer -> what it has not been told yet
        self._refused: dict[int, list[Refusal]] = {}
        self._writer: int | None = None  # of the last stored rows
        self._last_draw = -inf  # its time
        self._stale = 0  # updates of rows from before a restart
        self._continue(find_dump)

    def _continue(self, find_dump: Callable[[], str | None]) -> None:
        """Load the dump from which a restarted shard continues, if there is one."""
        folder = find_dump()
        while folder is not None:
            try:
                self._load(folder)
                return
            except CheckpointError:
                # a newer dump may have replaced it meanwhile
                newest = find_dump()
                if newest == folder:
                    raise
                folder = newest

    def _load(self, folder: str) -> None:
        """Load a dump, unless the other shards have rows of another layout by now."""
        self.prepare([ShardDump(folder, 0)])
        prepared, self._prepared = self._prepared, None
        if prepared is not None and self._other_layout(prepared) is None:
            self._set(prepared)

    def _set(self, buffer: ReplayBuffer) -> None:
        parts = buffer._initialize()
        self.buffer, self.storage = buffer, buffer.storage
        self._prioritized, self._wrapper = parts.prioritized, parts.wrapper
        # of the last rows drawn
        self._layout: tuple[RowLayout | None, bytes] = (None, b"")

    def _other_layout(self, buffer: ReplayBuffer) -> RowLayout | None:
        """Offer the layout of a buffer's rows; return the agreed layout if it is
        another one."""
        layout = written_layout(buffer.storage)
        if layout is None:
            return None
        agreed = layout_named(self._agreed.offer(named(layout)))
        return None if agreed == layout else agreed

    @property
    def _waiting(self) -> int:
        return sum(staged.data.numel() for staged in self._staged)

    def report(self) -> Report:
        """Return the counts and the sums of weights of this shard, for its clients."""
        rows = len(self.storage)
        mass = float(rows)
        smallest = 1.0 if rows else inf
        largest = -1.0
        if self._prioritized is not None:
            self._prioritized.rule.refresh_weights()
            tree = self._prioritized.rule.table
            mass = float(tree.total)
            smallest = float(tree.smallest)
            largest = float(self._prioritized.priorities.largest)
        return Report(
            incarnation=self.incarnation,
            mass=mass,
            smallest=smallest,
            rows=rows,
            waiting=self._waiting,
            inserts=self.buffer.write_count + self._waiting,
            largest=largest,
            stale_updates=self._stale + self.buffer.stale_updates.total(),
        )

    def answer(self, request: bytes) -> bytes:
        """Answer a pickled request by a pickled answer; Ray sends bytes faster than
        other objects."""
        return pickle.dumps(self.draw(pickle.loads(request)), protocol=5)

    def draw(self, request: Request) -> Answer:
        """Draw rows, apply the request's TD errors, store waiting rows, and report the
        new mass, in this order."""
        self._last_draw = time.monotonic()
        before = self.report()
        drawn = None
        if len(request.fractions) and before.mass > 0:
            drawn = self._drawn_at(request.fractions)
        self._learn(request)
        self._enter()
        return Answer(drawn, before, self.report())

    def write(
        self, writer: int, epoch: int, layout: bytes, rows: np.ndarray, lead: torch.Size
    ) -> list[Refusal]:
        """Receive packed transitions with batch dims ``lead``; SchemaError if the
        shards' rows differ in layout.

        Return what has been refused of this writer's rows since its last call.
        """
        data_layout = layout_named(layout)
        # Ray's memory is read-only, and not freed while it is in use
        packed = torch.from_numpy(rows.copy())
        data = data_layout.unpack(packed.view(*lead, data_layout.row_bytes))
        stored = written_layout(self.storage)
        if stored is None:
            agreed = self._agreed.find()
            stored = data_layout if agreed is None else layout_named(agreed)
        if stored != data_layout:
            _refuse_layout(stored, data, lead)
        self._staged.append(Staged(writer, epoch, data))
        is_idle = time.monotonic() - self._last_draw > _IDLE
        if (
            not len(self.storage)
            or is_idle
            or 4 * self._waiting > self.storage.max_size
        ):
            self._enter()
        return self.refusals(writer)

    def refusals(self, writer: int) -> list[Refusal]:
        """Return what has been refused of a writer's rows since its last call."""
        return self._refused.pop(writer, [])

    def empty(self) -> Report:
        self._staged = []
        self.buffer.empty()
        return self.report()

    def dump(self, path: str) -> tuple[int, int]:
        """Store waiting rows and save the buffer; return the buffer's numbers of time
        steps and lanes."""
        self._enter()
        self.buffer.dumps(path)
        lanes = self.storage.lanes.numel()
        return len(self.storage) // lanes, lanes

    def prepare(self, dumps: Sequence[ShardDump], steps: range | None = None) -> None:
        """Load ``steps``, counted over the time steps of all ``dumps``, beside the rows
        of this shard; None: load the only dump, with its counts and settings."""
        self._prepared = None
        buffer = self.make_buffer()
        if steps is None:
            (dump,) = dumps
            buffer.loads(dump.folder)
        else:
            _extend_by(buffer, dumps, steps)
        self._prepared = buffer

    def discard(self) -> None:
        self._prepared = None

    def accept(self) -> Report:
        """Replace all rows by those that :meth:`prepare` has loaded."""
        if self._prepared is None:
            raise CheckpointError(
                "the shard was restarted during the load: load the dump again"
            )
        self._set(self._prepared)
        self._prepared = None
        self._staged = []
        layout = written_layout(self.storage)
        if layout is not None:
            self._agreed.replace(named(layout))
        return self.report()

    def _drawn_at(self, fractions: np.ndarray) -> Drawn:
        """Draw one row for each element of ``fractions``, positions in [0, 1) in the
        cumulative weights of the rows."""
        rows = len(self.storage)
        positions = torch.from_numpy(fractions.copy())
        if self._prioritized is None:
            flat = (positions * rows).to(torch.int64)
            weight = torch.ones_like(positions)
        else:
            rule = self._prioritized.rule
            law = stratification_of(
                len(positions), stratified=False, beta=0.0, norm=None
            )
            flat, _ = rule.draw(positions, rows, law)
            weight = rule.table.weight[flat].to(torch.float64)
        packed = self._packed(flat)
        layout = packed.layout
        if self._layout[0] is not layout:
            self._layout = layout, named(layout)
        return Drawn(
            rows=packed.rows,
            flat=flat.numpy(),
            stamp=self.storage.stamps(flat).numpy(),
            weight=weight.numpy(),
            cells=packed.cells,
            layout=self._layout[1],
        )

    def _packed(self, flat: torch.Tensor) -> Packed:
        """Read the rows ``flat``, or the sequences around them."""
        if self._wrapper is None:
            stored = self.storage.written_rows()
            out = torch.empty(
                (len(flat), stored.layout.row_bytes), dtype=torch.uint8, device="cpu"
            )
            stored.pack_(flat, out.view(stored.layout.carrier))
            return Packed(None, out.numpy(), stored.layout)
        cells, info, batch = self._wrapper.batch_of(self.storage, flat, {})
        is_windowed = info.pop("anchor_index", None) is not None
        merge_(batch, info)
        layout = self._layout[0] or RowLayout(batch, 1)
        packed = pack(layout, batch, batch.batch_size)
        if not is_windowed:
            return Packed(None, packed, layout)
        stamped = torch.stack((cells, self.storage.stamps(cells)), 1)
        return Packed(stamped.numpy(), packed, layout)

    def _learn(self, request: Request) -> None:
        """Apply the TD errors of a request, and update the largest TD error, which sets
        the priority of new rows."""
        if self._prioritized is None:
            return
        priorities = self._prioritized.priorities
        priorities.largest = max(priorities.largest, request.largest)
        if not len(request.errors):
            return
        is_current = request.handles[:, INCARNATION] == self.incarnation
        self._stale += int((~is_current).sum())
        handles = torch.from_numpy(request.handles[is_current])
        flat = handles[:, ROW].contiguous()
        stamp = handles[:, STAMP].contiguous()
        errors = torch.from_numpy(request.errors[is_current])
        self.buffer._update_sampled(Update(flat, errors, stamp))

    def _enter(self) -> None:
        """Store all rows that wait; note those that the buffer refuses, for their
        writers."""
        staged, self._staged = self._staged, []
        for writer, epoch, data in staged:
            try:
                self._store(writer, data)
            except Exception as error:  # noqa: BLE001  the writer raises it
                refusal = Refusal(data.numel(), epoch, error.with_traceback(None))
                self._refused.setdefault(writer, []).append(refusal)

    def _store(self, writer: int, data: TensorDictBase) -> None:
        """Write the data of a writer; SchemaError if another shard got rows of another
        layout first."""
        is_first = written_layout(self.storage) is None
        if writer != self._writer:
            _end_trajectories(self.storage)
        self._writer = writer
        self.buffer.extend(data)
        agreed = self._other_layout(self.buffer) if is_first else None
        if agreed is not None:  # another shard was faster: take the rows back
            self._set(self.make_buffer())
            _refuse_layout(agreed, data, data.batch_size[: self.storage.ndim])


def written_layout(storage: PackedStorage) -> RowLayout | None:
    """Return the layout of a storage's rows; None before the first write."""
    return None if storage.is_reserved else storage.layout


def _refuse_layout(stored: RowLayout, data: TensorDictBase, lead: torch.Size) -> None:
    stored.collect(data, lead)  # raises an error that names the key
    raise SchemaError(
        "the rows of this writer have another layout than those of the shards"
    )


def pack(layout: RowLayout, data: TensorDictBase, lead: torch.Size) -> np.ndarray:
    """Pack ``data`` (batch dims ``lead``) into ``[n, row_bytes]`` uint8; SchemaError if
    ``data`` does not fit."""
    leaves = layout.collect(data, lead)
    rows = torch.empty((*lead, layout.row_bytes), dtype=torch.uint8, device="cpu")
    torch._foreach_copy_(layout.columns(rows), leaves)
    return rows.view(-1, layout.row_bytes).numpy()


def named(layout: RowLayout) -> bytes:
    """Serialize a layout; equal layouts give equal bytes, whatever the order of their
    keys."""
    return json.dumps(layout.state(), sort_keys=True).encode()


@lru_cache(maxsize=64)
def layout_named(name: bytes) -> RowLayout:
    return RowLayout.from_state(json.loads(name))


def _end_trajectories(storage: PackedStorage) -> None:
    """End all open trajectories, so that the rows written next do not continue them."""
    if storage.episodes is not None:
        storage.episodes.end()


def _extend_by(buffer: ReplayBuffer, dumps: Sequence[ShardDump], steps: range) -> None:
    """Write rows of dumps, and their priorities, to a buffer: the time steps ``steps``
    of all in order."""
    begin = 0  # of the dump, in all steps
    for dump in dumps:
        low = max(steps.start - begin, 0)
        high = min(steps.stop - begin, dump.steps)
        begin += dump.steps
        if low < high:
            _extend_by_dump(buffer, dump, range(low, high))


def _extend_by_dump(buffer: ReplayBuffer, dump: ShardDump, steps: range) -> None:
    """Write the time steps ``steps`` of a dump, and their priorities, to a buffer."""
    checkpoint = open_checkpoint(dump.folder)
    source = checkpoint.storage
    state = innermost_state(checkpoint.sampler)
    if source is None or int(source.ring.count[0]) != dump.steps:
        raise CheckpointError(
            f"{dump.folder} does not hold the {dump.steps} time steps that the manifest says"
        )
    ring = source.ring
    prioritized = buffer._initialize().prioritized
    _end_trajectories(buffer.storage)
    if prioritized is not None:
        prioritized.alpha = state["alpha"]
    lane = torch.arange(ring.lanes, device="cpu")
    serials = torch.arange(steps.start, steps.stop, device="cpu") + int(ring.tail[0])
    at_once = max(1, _AT_ONCE // (source.row_bytes * ring.lanes))
    for slots in (serials % ring.steps).split(at_once):
        rows = source.get(slots)
        index = buffer.extend(
            rows if source.ndim == 1 else rows.transpose(0, 1), update_priority=False
        )
        if prioritized is not None:
            cells = (slots[:, None] * ring.lanes + lane).flatten()
            magnitude = state["magnitude"][cells]
            prioritized.priorities.set_magnitudes(index, magnitude, buffer.storage)
    if prioritized is not None:
        priorities = prioritized.priorities
        priorities.largest = max(priorities.largest, float(state["largest"]))
