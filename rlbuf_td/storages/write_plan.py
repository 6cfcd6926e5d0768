"""How rows are written after the newest ones: with compiled code or with torch, chosen
once for a storage.

:meth:`PackedStorage.advance` is the entrance of all such writes, except of staged steps,
which go to a plan directly. It makes one of two plans, whose writes give the same rows,
serials, episodes and counts, and tell the same listeners:

- :class:`CompiledWrites`, for rows in host memory: one compiled call, which also sets
  the priorities of new rows.
- :class:`TorchWrites`, for all others. On a GPU, a kernel copies rows that lie there.

A plan is used until rows, ring or episodes are replaced (the storage then drops it),
listeners are added or removed, or a buffer of the storage gets another sampler. The
caller holds the storage's lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, loop, record_of
from rlbuf_td.kernels.host_memory import HostTensors, addresses_of, on_host, to_device
from rlbuf_td.kernels.serials import REVISION, TAIL, WRITTEN
from rlbuf_td.storages.indexing import coordinates
from rlbuf_td.storages.listeners import Listener, Listeners, Stage
from rlbuf_td.storages.ring import extents
from rlbuf_td.storages.torchrl_parts import listeners_of
from rlbuf_td.storages.writes import StagedRows, Write

if TYPE_CHECKING:
    from rlbuf_td.storages.episodes import Episodes
    from rlbuf_td.storages.packed import PackedStorage
    from rlbuf_td.storages.ring import Ring

_MOST_SIZES = 8  # batch sizes whose dtypes and shapes are kept
# arguments of the kernel, see `kernels.batch.write_cpu.write`
_WHOLE_STEPS = 0  # instead of the address of lanes
_NO_INDEX = 0  # the index of the rows is not returned
_NO_RECORD = 0  # new rows get no priority


class WritePlan(ABC):
    """Writes rows of one storage."""

    reason = ""  # why writes are not compiled

    def __init__(self, storage: PackedStorage) -> None:
        self.rows, self.ring = storage.all_rows(), storage.ring
        self.listeners = listeners_of(storage)
        self.changes = self.listeners.changes  # another number: make another plan
        # those that are told after the rows have been published
        self.others: Iterable[Any] = self.listeners

    @abstractmethod
    def write(
        self, storage: PackedStorage, write: Write, lead: torch.Size, count: int
    ) -> Any:
        """Check the data, write the rows, and return their index; an error that the
        data causes changes nothing.

        Args:
            storage: the storage, to which the plan has no reference: whoever owns the
                storage can free it at once.
            write: its data is a TensorDict, and its lanes, if there are any, are
                ``[n]`` int64, in host memory of their own.
            lead: the dims of each entry that number rows.
            count: the number of time steps, or of rows of single lanes.
        """

    def tell(self, index: object) -> None:
        """Tell :attr:`others` of the new rows at ``index``."""
        for listener in self.others:
            listener.mark_update(index)


class _Form(NamedTuple):
    """How data with one number of rows looks."""

    tensors: HostTensors  # recognizes the leaves
    # of an index of the rows, which is a new tensor; None: it is an int
    index: Tensor | None


class CompiledWrites(WritePlan):
    """Writes rows in host memory with one compiled call."""

    def __init__(self, storage: PackedStorage) -> None:
        from rlbuf_td.kernels.batch import WRITE_RECORD, write_cpu

        super().__init__(storage)
        rows = self.rows
        ring = self.ring
        episodes = storage.episodes
        self.codes, self.in_cells = write_cpu, write_cpu.IN_CELLS
        stages = [(listener, _stage_of(listener)) for listener in self.listeners]
        #: How the kernel sets priorities of new rows.
        entered = next((stage for _, stage in stages if stage.loop), Stage())
        self.priorities = entered.priorities
        self.others = Listeners(
            listener
            for listener, stage in stages
            if stage.is_told and (stage.loop is None or stage != entered)
        )
        self.has_others = len(self.others) > 0
        self.has_pairs = bool(rows.lanes)  # whether an index is [n, 2]
        self.entries = getattr(rows, "entries", None)  # of deduplicated rows
        # which may be conjugate views
        self.needs_copies = any(leaf.dtype.is_complex for leaf in rows.layout.leaves)
        self.forms: dict[torch.Size, _Form] = {}  # of data, by `lead`
        self.sources = np.empty(len(rows.extents), np.int64)
        self.addresses = memoryview(self.sources.data)  # the same memory
        self.ring_record = record_of(
            WRITE_RECORD,
            rows=rows.flat.data_ptr(),
            row_bytes=rows.flat.stride(0) * rows.flat.element_size(),
            steps=rows.steps,
            lanes=ring.lanes if rows.lanes else 0,
            leaves=len(rows.extents),
            extents=rows.extents.ctypes.data,
            sources=self.sources.ctypes.data,
            head=ring.address,
            episodes=0 if episodes is None else episodes.locate_rows(),
            entries=0 if self.entries is None else self.entries.address,
            write_entries=0
            if self.entries is None
            else write_cpu.write_entries.address,
            enter=0 if entered.loop is None else entered.loop.address,
        )
        self.address = self.ring_record.ctypes.data
        self.kernel = loop("batch.write_cpu", "write")
        self.lock = Lock()

    def write(
        self, storage: PackedStorage, write: Write, lead: torch.Size, count: int
    ) -> Any:
        """See :class:`WritePlan`; for staged rows, the slot of the first one."""
        ring = self.ring
        entries = self.entries
        storage.take_edits()
        priorities = self.priorities if write.is_told else None
        leaves: list[Tensor] = []
        index = None
        index_at = _NO_INDEX
        address = self.address
        lanes_at = _WHOLE_STEPS
        if write.staged is not None:
            address = write.staged.record
            lanes_at = write.staged.lane_ids
        else:
            form = self.forms.get(lead) or self._form_of(lead)
            leaves = self._read(write, lead, form)  # kept alive for the kernel
            if write.lanes is not None:
                lanes_at = write.lanes.data_ptr()
            if form.index is not None:
                index = torch.empty_like(form.index)
                index_at = index.data_ptr()
        # the caller of the kernel has more to do before the write ends
        goes_on = write.is_told and (
            self.has_others or (priorities is not None and priorities.file is not None)
        )
        try:
            while True:
                if entries is not None:
                    entries.reserve(count if lanes_at else count * ring.lanes)
                    entries.begin(ring.head[:2])
                entry = _NO_RECORD
                if priorities is not None:
                    entry = priorities.record_at(storage, ring)
                with self.lock if priorities is None else priorities.rule.table.lock:
                    code = self.kernel(
                        address,
                        count,
                        lanes_at,
                        write.lanes_first,
                        index_at,
                        entry,
                        goes_on,
                    )
                if code >= self.in_cells:  # it is no reason why nothing was written
                    break
                if entries is not None:
                    entries.end()  # nothing has been written
                lanes = write.lanes if write.staged is None else write.staged.lanes
                leaves = self._mend(storage, code, leaves, lanes)
            if entries is not None:
                entries.end()
            if index is None:
                index = code
            if write.record is not None:
                # before others are told, who may write: then `sources` are new
                write.record(self.sources)
            if goes_on:
                if priorities is not None:
                    priorities.keep_new(index, storage)
                self.tell(index)
                ring.finish()
        except BaseException:
            if ring.dirty:
                storage.recover()
            raise
        return index

    @property
    def tells_nobody(self) -> bool:
        """Whether a write is complete with the compiled call: no listener is told, and
        no file of priorities is written."""
        file = None if self.priorities is None else self.priorities.file
        return not self.has_others and file is None

    def stage(self, addresses: Sequence[int], lane_ids: np.ndarray | None) -> Write:
        """Return the write of rows whose leaves always lie at these ``addresses``.

        ``lane_ids``, int64, always holds their lanes; None: they are one time step.
        """
        sources = np.array(addresses, np.int64)
        record = self.ring_record.copy()
        record["sources"] = sources.ctypes.data
        lanes_at = 0 if lane_ids is None else lane_ids.ctypes.data
        staged = StagedRows(record.ctypes.data, lanes_at, lane_ids, (record, sources))
        return Write(None, is_single=lane_ids is None, staged=staged)

    def _form_of(self, lead: torch.Size) -> _Form:
        """Return the form of data whose first dims, ``lead``, number rows."""
        if len(self.forms) == _MOST_SIZES:
            self.forms.clear()
        tensors = HostTensors(
            [(leaf.dtype, lead + leaf.shape) for leaf in self.rows.layout.leaves]
        )
        index = None
        if self.has_pairs or lead:
            shape = (lead.numel(), 2) if self.has_pairs else (lead.numel(),)
            with torch.inference_mode(False):
                index = torch.empty(1, dtype=torch.int64, device="cpu").expand(shape)
        self.forms[lead] = form = _Form(tensors, index)
        return form

    def _read(self, write: Write, lead: torch.Size, form: _Form) -> list[Tensor]:
        """Store the addresses of the leaves of the data, converted if necessary; return
        the leaves.

        Raises:
            SchemaError: the data does not match the rows.
        """
        layout = self.rows.layout
        leaves, addresses = write.leaves, None
        if write.layout is not layout:
            leaves = layout.find(write.data)
        if leaves is not None and not self.needs_copies:
            addresses = form.tensors.addresses(leaves)
        if leaves is None or addresses is None:
            leaves = [on_host(leaf) for leaf in layout.collect(write.data, lead)]
            addresses = addresses_of(leaves)
        # after a learner's step, in half the time of `Struct.pack_into`
        for number, address in enumerate(addresses):
            self.addresses[number] = address
        return leaves

    def _mend(
        self,
        storage: PackedStorage,
        code: int,
        leaves: list[Tensor],
        lanes: Any,
    ) -> list[Tensor]:
        """Remove the reason why nothing was written, or raise an error that says it;
        return the leaves."""
        if code == self.codes.UNFINISHED:  # a thread was interrupted while it recovered
            storage.recover()
        elif code == self.codes.UNWEIGHED:
            self.priorities.rule.refresh_weights()
        elif code == self.codes.EDITED:
            cast("Episodes", storage.episodes).refresh()
        # a row could be read after it was overwritten
        elif code == self.codes.OVERLAPPING:
            leaves = [leaf.clone() for leaf in leaves]
            self.sources[:] = addresses_of(leaves)
        else:
            refuse_lanes(np.asarray(lanes), self.ring.lanes)
        return leaves


class NewRows(NamedTuple):
    """Where the rows of a write go, in the order of its data."""

    cells: np.ndarray  # ``[n]``
    counts: np.ndarray  # ``[E]``, the number of rows of each lane
    # ``[n]``; the others are overwritten by later rows of the write
    are_kept: np.ndarray
    serials_after: np.ndarray  # see :meth:`Ring.serials_after`

    @property
    def kept_cells(self) -> np.ndarray:
        return self.cells[self.are_kept]


class Launch(NamedTuple):
    """The numbers of a write, on the device of the rows."""

    index: Tensor  # of all new rows, as users get it
    cells: Tensor  # of the rows that are kept
    addresses: Tensor  # of the leaves; empty if no kernel can read them
    serials_after: Tensor  # ``[3, E]``


class TorchWrites(WritePlan):
    """Writes rows with operations of torch, or a kernel on a GPU; ``reason``: why it is
    not compiled."""

    def __init__(self, storage: PackedStorage, reason: str) -> None:
        super().__init__(storage)
        self.reason = "" if self.rows.is_launched else reason

    def write(
        self, storage: PackedStorage, write: Write, lead: torch.Size, count: int
    ) -> Any:
        """See :class:`WritePlan`."""
        rows, ring, episodes = self.rows, self.ring, storage.episodes
        leaves = rows.layout.collect(write.data, lead)
        if write.lanes_first:
            leaves = [leaf.transpose(0, 1) for leaf in leaves]
        storage.enter()
        storage.take_edits()
        if ring.dirty:  # a thread was interrupted while it recovered
            storage.recover()
        if episodes is not None:
            episodes.refresh()
        new = new_rows(ring, write.lanes, count)
        if lead != new.cells.shape:
            leaves = [
                leaf.reshape(*new.cells.shape, *kind.shape)
                for leaf, kind in zip(leaves, rows.layout.leaves, strict=True)
            ]
        cells = new.kept_cells
        if len(cells) < len(new.cells):
            are_kept = torch.from_numpy(new.are_kept)
            leaves = [leaf[are_kept.to(leaf.device)] for leaf in leaves]
        addresses = rows.addresses_of(leaves)
        launch = self._send(storage, new, addresses)
        index = launch.index
        if write.is_single and storage.ndim == 1:
            index = int(cells[0])

        are_ragged = write.lanes is not None or not ring.are_aligned
        serials, longest = ring.serials, ring.longest
        try:
            ring.begin(new.counts)
            if are_ragged:
                steps = extents(ring.after[TAIL], ring.after[WRITTEN], ring.steps)
                rows.matrix[longest : steps.max()].zero_()  # those of other lanes
            if addresses is None or rows.words is None:
                rows.append_(cells, leaves, serials)
            else:
                rows.words.write(rows.flat, launch.cells, launch.addresses)
            if episodes is None:
                ring.publish()
            else:
                episodes.note(launch.serials_after)
                episodes.publish()
            ring.numbers[REVISION] += 1
            if write.is_told and (addresses is None or are_ragged):
                self.tell(index)
            elif write.is_told:
                self.tell_run(index, int(cells[0]), len(cells))
            ring.finish()
        except BaseException:
            if ring.dirty:
                storage.recover()
            raise
        return index

    def _send(
        self, storage: PackedStorage, new: NewRows, addresses: list[int] | None
    ) -> Launch:
        """Copy all numbers of a write to the device of the rows, at once."""
        index: Any = torch.from_numpy(new.cells)
        if storage.ndim > 1:
            index = torch.stack([*coordinates(index, storage)], -1)
        parts = [
            index.numpy().ravel(),
            new.kept_cells,
            np.array(addresses or (), np.int64),
            new.serials_after.ravel(),
        ]
        numbers = to_device(np.concatenate(parts), self.rows.matrix.device)
        flat_index, cells, pointers, serials = numbers.split([*map(len, parts)])
        shape = new.serials_after.shape
        return Launch(
            flat_index.view(index.shape), cells, pointers, serials.view(shape)
        )

    def tell_run(self, index: object, first: int, count: int) -> None:
        """Tell :attr:`others` of new rows in ``count`` cells from ``first`` on."""
        for listener in self.others:
            if isinstance(listener, Listener):
                listener._mark_run(index, first, count)
            else:
                listener.mark_update(index)


def _stage_of(listener: Any) -> Stage:
    """Return what a listener does in a compiled write."""
    return listener._stage_of_writes() if isinstance(listener, Listener) else Stage()


def unwritable(storage: PackedStorage) -> str:
    """Say in one line why compiled code cannot write the rows of a storage; "" if it
    can."""
    rows = storage.all_rows()
    if backend_of(rows.flat) != "numba":
        return (
            "numba's compiler is off"
            if rows.flat.is_cpu
            else f"the rows are on {rows.flat.device}"
        )
    if storage.episodes is not None and not storage.episodes.address:
        return "episodes are noted with torch"
    return f"the rows have ndim={storage.ndim}, above 2" if storage.ndim > 2 else ""


def refuse_lanes(lane: np.ndarray, lanes: int) -> None:
    """Raise an IndexError if a lane is out of range."""
    bad = lane[(lane < 0) | (lane >= lanes)]
    if len(bad):
        raise IndexError(f"lane {bad[0]} is out of range: lanes are 0 to {lanes - 1}")


def new_rows(ring: Ring, lanes: Tensor | None, count: int) -> NewRows:
    """Return where ``count`` rows of these lanes, or time steps of all, are written;
    refuse lanes that are out of range."""
    if lanes is None:
        lane = np.tile(np.arange(ring.lanes), count)
        before = np.arange(count).repeat(ring.lanes)
        counts = np.full(ring.lanes, count)
    else:
        lane = lanes.numpy()
        refuse_lanes(lane, ring.lanes)
        before = _occurrences(lane)
        counts = np.bincount(lane, minlength=ring.lanes)
    cells = (ring.written[lane] + before) % ring.steps * ring.lanes + lane
    are_kept = counts[lane] - before <= ring.steps
    return NewRows(cells, counts, are_kept, ring.serials_after(counts))


def _occurrences(numbers: np.ndarray) -> np.ndarray:
    """Return for each element how many equal elements precede it, ``[n]`` int64; O(n
    log n)."""
    order = np.argsort(numbers, kind="stable")
    ascending = numbers[order]
    counts = np.empty(len(numbers), np.int64)
    counts[order] = np.arange(len(numbers)) - np.searchsorted(ascending, ascending)
    return counts
