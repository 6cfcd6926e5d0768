"""Readings: compiled code that gathers the rows that a sampler has drawn, to tensors
that are allocated once.

A sampler draws rows with its ``draw``; wrappers change the list of rows that a batch
reads, or its entries. Their torch forms (``draw_batch``) work on every device and
specify the results. For rows in host memory, the method ``reading`` of each wrapper
returns the compiled form of the same work. From the same state of the random generator,
both forms give the same batches, except for draws without repeats and strict windows. A
subclass keeps its parent's reading unless it overrides a method that this reading
implements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from struct import Struct
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlbuf_td.kernels.batch import LeafMemory, batch_record
from rlbuf_td.kernels.dispatch import loop
from rlbuf_td.kernels.host_memory import Entry, HostTensors, advise_huge_pages
from rlbuf_td.kernels.threads import LARGE, all_parts
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.rows.dedup import DedupRows

_CPU = torch.device("cpu")
SCALAR = torch.Size([])
FLAG: Entry = torch.bool, SCALAR
# an entry of a batch besides the leaves, with its dtype and its shape per row
Named: TypeAlias = tuple[str, Entry]
WEIGHT: Named = "priority_weight", (torch.float32, SCALAR)


class Uncompiled(Exception):
    """Compiled code cannot read a batch; the message says why, in one line."""


class BatchSlot(NamedTuple):
    """A batch of uninitialised tensors."""

    targets: int  # address of an array with the addresses of the tensors
    leaves: list[Tensor]  # the stored entries, in the order of the layout
    batch: TensorDict  # of the leaves
    report: dict[str, Tensor]  # all other entries by name
    flat: Tensor  # for the drawn rows
    flat_at: int  # its address
    weights: Mapping[str, Tensor]  # for the weights of the drawn rows, by name


class BatchSlots:
    """Allocates batches, several at a time.

    Args:
        layout: the layout of their rows.
        named: their entries besides the leaves.
        size: their number of rows.
        is_complete: whether batches have these entries from the start.
        drawn: memory for the drawn rows, ``[B]``; None: they are the index of a batch.
        weights: memory for their weights; None: the weights are an entry of a batch.
    """

    def __init__(
        self,
        layout: RowLayout,
        named: Sequence[Named],
        size: int,
        *,
        is_complete: bool,
        drawn: Tensor | None,
        weights: Mapping[str, Tensor] | None,
    ) -> None:
        self.is_complete, self.drawn, self.weights = is_complete, drawn, weights
        self.layout = layout
        entries = dict(named)
        self.names = [*entries]
        columns = [(leaf.dtype, leaf.shape) for leaf in layout.leaves]
        columns += entries.values()
        self.tensors = [(dtype, torch.Size([size, *shape])) for dtype, shape in columns]
        self.memory = LeafMemory(self.tensors)
        # recognizes the tensors of a batch; None: no function of the user has seen one
        self.expected: HostTensors | None = None
        # addresses of the tensors of each batch
        self.targets = np.empty((self.memory.ahead, len(columns)), np.int64)
        self.set_targets = Struct(f"{len(columns)}q").pack_into
        self.address = self.targets.ctypes.data
        self.batch_size = torch.Size([size])
        self.ready = cast("list[BatchSlot]", [])

    def take(self) -> BatchSlot:
        if not self.ready:
            with torch.inference_mode(False):  # a batch may outlive inference mode
                self.ready = [self._slot(number) for number in range(len(self.targets))]
        return self.ready.pop()

    def _slot(self, number: int) -> BatchSlot:
        """Return a new batch, the addresses of whose tensors are in row ``number`` of
        ``targets``."""
        # Not views of one tensor: changing a view in place would break autograd for the
        # other views.
        tensors = self.memory.allocate()
        count = len(self.layout.leaves)
        targets = self.address + number * self.targets.strides[0]
        self._locate(targets, map(Tensor.data_ptr, tensors))
        report = dict(zip(self.names, tensors[count:], strict=True))
        batch = self.layout.wrap(
            tensors, self.batch_size, _CPU, report if self.is_complete else {}
        )
        flat = report["index"] if self.drawn is None else self.drawn
        weights = report if self.weights is None else self.weights
        leaves = tensors[:count]
        flat_at = flat.data_ptr()
        return BatchSlot(targets, leaves, batch, report, flat, flat_at, weights)

    def locate(self, slot: BatchSlot) -> None:
        """Store the addresses of a batch's tensors again: a function of the user may
        have moved or freed them."""
        if self.expected is None:
            self.expected = HostTensors(self.tensors)
        addresses = self.expected.addresses([*slot.leaves, *slot.report.values()])
        if addresses is None:
            raise RuntimeError(
                "reward_fn or terminated_fn has resized or freed tensors of its batch: pass it a copy"
            )
        self._locate(slot.targets, addresses)

    def _locate(self, targets: int, addresses: Iterable[int]) -> None:
        """Store the addresses of a batch's tensors at ``targets``."""
        self.set_targets(self.targets.data, targets - self.address, *addresses)


class Reading:
    """Gathers rows. Those of wrappers list other rows, change entries, or let another
    reading read what they list.

    Args:
        storage: the storage, whose rows have been allocated.
        size: the number of rows of a batch.
        is_stamped: whether batches have the serials of their rows.
    """

    entries: Sequence[Named] = ()  # what is added to the batch
    window = 1  # the rows of a batch per drawn row
    # the weights of the anchors; None: they are those of the rows of a batch
    anchor_weights: Mapping[str, Tensor] | None = None

    def __init__(self, storage: PackedStorage, size: int, is_stamped: bool) -> None:
        self.storage = storage
        self.rows = storage.all_rows()
        self.size = size
        self.is_stamped = is_stamped
        self.lanes = self.rows.lanes.numel() if self.rows.lanes else 0
        self.index: Entry = torch.int64, torch.Size([2] if self.lanes else [])
        self.kernel = loop("batch.cpu", "gather_rows")
        # stored once
        self.observations = (
            self.rows.entries.address if isinstance(self.rows, DedupRows) else 0
        )
        if self.observations:
            self.entry_kernel = loop("batch.entries_cpu", "read_entries")
        self.describe(self.rows.extents)

    def describe(self, extents: Any) -> None:
        """Describe the batches to compiled code; ``extents`` are those of the
        leaves."""
        rows, ring, self.extents = self.rows, self.storage.ring, extents
        advise_huge_pages(rows.flat)  # makes reads 10 to 20 % faster
        self.record = batch_record(
            self.size,
            rows.flat,
            extents,
            steps=rows.steps,
            lanes=self.lanes,
            stamped=int(self.is_stamped),
            serials=ring.address,
        )
        self.address = self.record.ctypes.data
        self.row_bytes = rows.flat.stride(0) * rows.flat.element_size()

    def named(self) -> list[Named]:
        """Return all entries of a batch besides the leaves, in the order of the
        targets."""
        stamps: list[Named] = (
            [(SAMPLED_AT, (torch.int64, SCALAR))] if self.is_stamped else []
        )
        return [("index", self.index), *stamps, *self.entries]

    def target_of(self, name: str) -> int:
        """Return which of the targets is that of an entry of :meth:`named`."""
        return len(self.rows.layout.leaves) + [
            other for other, _ in self.named()
        ].index(name)

    def targets_of(self, keys: Iterable[tuple[str, ...] | None]) -> np.ndarray:
        """Return the target and the size in bytes of each key's leaf, ``[n, 2]`` int64;
        size 0: there is none."""
        places = self.rows.layout.places
        sizes = self.rows.layout.extents[:, 1]
        pairs = [
            (places[key], sizes[places[key]]) if key in places else (0, 0)
            for key in keys
        ]
        return np.array(pairs, np.int64).reshape(-1, 2)

    def __call__(
        self, slots: BatchSlots, slot: BatchSlot, flat: Tensor, drawn: Tensor, live: int
    ) -> bool:
        """Fill a batch with rows; return False, and fill nothing, if one of them does
        not exist.

        Args:
            slots: where ``slot`` comes from.
            slot: the batch.
            flat: the cells of the rows, ``[size]`` int64.
            drawn: the rows that the sampler has drawn; each has been expanded to
                equally many of the rows ``flat``.
            live: the number of cells that hold rows.
        """
        if self.rows.is_mapped:
            self.rows.ask_for(flat)
        places = self.address, flat.data_ptr(), slot.targets
        gather = partial(self.kernel, *places, live)
        is_filled = all_parts(gather, 0, self.size, self.size * self.row_bytes)
        if is_filled and self.observations:
            self.entry_kernel(*places, self.observations)
        return is_filled

    def single_call(self, count: int) -> Any:
        """Return the loop that fills a batch of ``count`` rows in one call; None if
        this reading does more."""
        is_small = count * self.row_bytes < LARGE
        does_more = self.rows.is_mapped or self.observations
        return self.kernel if is_small and not does_more else None
