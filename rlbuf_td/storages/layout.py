"""The layout of a transition as one row of bytes.

A leaf is one tensor of a transition. Leaves are ordered by item size, largest first,
which aligns each leaf. Leaves of one dtype are neighbours, so that one ``view`` per
dtype turns a block of rows into typed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from rlbuf_td.kernels.batch import LeafMemory
from rlbuf_td.kernels.host_memory import has_memory
from rlbuf_td.storages.checks import State
from rlbuf_td.storages.schema import (
    Leaf,
    SchemaError,
    refuse,
    refuse_ragged,
    refuse_unpackable,
    walk,
)
from rlbuf_td.storages.tensordict_fast import entries_of, new_tensordict, plain_entries

CACHE_LINE = 64
_MAX_LINE_PADDING = 1 / 16
# bytes of a leaf that begins at a cache line: unaligned images take 15 % longer to copy
_LARGE = 1_024


@dataclass(frozen=True)
class _Node:
    """One nesting level of a TensorDict."""

    path: tuple[str, ...]
    leaves: tuple[tuple[str, int], ...]  # (name, leaf index)
    nodes: tuple[tuple[str, _Node], ...]
    batch_size: torch.Size


class _Expected(NamedTuple):
    """The shapes of the leaves of data, for the last ``lead`` dims."""

    lead: torch.Size | None
    shapes: list[torch.Size]


class _Level(NamedTuple):
    """A nesting level among all levels of a TensorDict."""

    parent: int  # the number of the level above
    path: tuple[str, ...]
    leaves: tuple[tuple[str, int], ...]  # their names and numbers
    count: int  # of leaves and nodes


class RowLayout:
    """The byte range of every leaf in a row.

    Args:
        data: an example, whose first ``lead_dims`` dims number the rows.

    Large leaves begin at a cache line. A saved layout names keys, dtypes and shapes
    alone, and where leaves lie follows from them: another order or padding here needs
    another version of dumps.
    """

    def __init__(self, data: TensorDictBase, lead_dims: int) -> None:
        refuse_ragged(data)
        leaves = []
        for key, value in walk(data):
            refuse_unpackable(key, value)
            leaves.append(Leaf(key, value.dtype, value.shape[lead_dims:]))
        if not leaves:
            raise SchemaError("cannot store a TensorDict that contains no tensor")
        self.leaves = tuple(sorted(leaves, key=_place))
        # the number of each leaf by its key; see also :meth:`leaf`
        self.places = {leaf.key: i for i, leaf in enumerate(self.leaves)}
        self.root = _describe(data, lead_dims, (), self.places)
        # offset of each leaf in a row, in bytes
        self.offsets: dict[tuple[str, ...], int] = {}
        self.data_bytes = 0
        for leaf in self.leaves:
            if leaf.nbytes >= _LARGE:
                self.data_bytes = _padded(self.data_bytes, CACHE_LINE)
            self.offsets[leaf.key] = self.data_bytes
            self.data_bytes += leaf.nbytes
        #: ``[leaves, 2]`` int64, for kernels: offset of each leaf in a row, and its
        # size in bytes.
        self.extents = np.array(
            [(self.offsets[leaf.key], leaf.nbytes) for leaf in self.leaves], np.int64
        )
        align = max(8, self.leaves[0].dtype.itemsize)
        small, lines = (
            _padded(max(1, self.data_bytes), size) for size in (align, CACHE_LINE)
        )
        self.row_bytes = lines if lines - small <= small * _MAX_LINE_PADDING else small
        # of each leaf: its place and size in a row, in elements of its dtype
        self._parts = [
            (
                leaf.dtype,
                self.offsets[leaf.key] // leaf.dtype.itemsize,
                prod(leaf.shape),
                leaf.shape,
            )
            for leaf in self.leaves
        ]
        #: The entries at the root of a row, with their dtypes; None for nested entries.
        self.names = {
            leaf.key[0]: leaf.dtype if len(leaf.key) == 1 else None
            for leaf in self.leaves
        }
        #: The keys of all leaves, and the names of the entries at the root.
        self.all_keys = frozenset((*self.names, *self.places))
        #: Each nesting level of a row before those below it.
        self.levels = tuple(_levels(self.root, 0, []))
        # for the last (lead, device)
        self._blank: tuple[Any, LeafMemory] = (None, LeafMemory([]))
        self._expected = _Expected(None, [])
        float_rows = any(leaf.dtype is torch.float32 for leaf in self.leaves)
        # Dtype of the stored matrix; with float32, the float32 leaves of a gathered
        # batch need no view.
        self.carrier = torch.float32 if float_rows else torch.uint8

    def columns(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return all leaves, in the order of :attr:`leaves`, as views of ``rows``,
        ``[*lead, row_bytes]``; edits of all views count as edits of ``rows``."""
        lead = rows.shape[:-1]
        typed = rows
        columns: list[torch.Tensor] = []
        for dtype, start, size, shape in self._parts:
            if typed.dtype is not dtype:
                typed = rows if rows.dtype is dtype else rows.view(dtype)
            column = typed.narrow(-1, start, size)
            columns.append(column if len(shape) == 1 else column.view(lead + shape))
        return columns

    def slices(self, block: torch.Tensor, lead: torch.Size) -> list[torch.Tensor]:
        """Return all leaves, ``[*lead, ...]``, as slices of ``block``, ``[bytes]``
        uint8.

        Each leaf begins with its first row, in the order of :attr:`leaves`, and has
        room for as many rows.
        """
        room = len(block) // max(1, sum(leaf.nbytes for leaf in self.leaves))
        leaves: list[torch.Tensor] = []
        start, count = 0, lead.numel()
        for dtype, group in groupby(self.leaves, key=lambda leaf: leaf.dtype):
            members = [*group]
            sizes = [room * prod(leaf.shape) for leaf in members]
            end = start + sum(sizes) * dtype.itemsize
            split = block[start:end].view(dtype).unsafe_split_with_sizes(sizes)
            start = end
            for leaf, part in zip(members, split, strict=True):
                used = part if room == count else part[: count * prod(leaf.shape)]
                leaves.append(used.view(lead + leaf.shape))
        return leaves

    def blank(self, lead: torch.Size, device: torch.device) -> list[torch.Tensor]:
        """Return an uninitialised tensor ``[*lead, ...]`` for each leaf."""
        last = self._blank  # read once: another thread may replace it
        if last[0] != (lead, device):
            memory = LeafMemory(
                [(leaf.dtype, lead + leaf.shape) for leaf in self.leaves], device
            )
            self._blank = last = (lead, device), memory
        with torch.inference_mode(False):  # a batch may outlive inference mode
            return last[1].allocate()

    def unpack(self, rows: torch.Tensor) -> TensorDict:
        """Return a TensorDict whose leaves are views of ``rows``,
        ``[*lead, row_bytes]``."""
        return self.wrap(self.columns(rows), rows.shape[:-1], rows.device, {})

    def wrap(
        self,
        columns: Sequence[torch.Tensor],
        lead: torch.Size,
        device: torch.device,
        extra: Mapping[str, torch.Tensor],
    ) -> TensorDict:
        """Return a TensorDict of the leaves ``columns``, each ``[*lead, ...]``; add the
        entries ``extra`` at the root.

        An entry of ``extra`` replaces a leaf with the same key.
        """
        return _build(self.root, columns, lead, device, extra)

    def leaf(self, key: tuple[str, ...]) -> Leaf | None:
        """Return the dtype and the shape of a key in each row; None if it is not
        stored."""
        return self.leaves[self.places[key]] if key in self.places else None

    def find(self, data: object) -> list[Any] | None:
        """Return the entries of ``data``, in the order of :attr:`leaves`; None if their
        keys are not those of a row."""
        mappings: list[Mapping[str, Any]] = []
        values: list[Any] = [None] * len(self.leaves)
        try:
            for parent, path, leaves, count in self.levels:
                nested = mappings[parent][path[-1]] if path else data
                if type(nested) is TensorDict:
                    entries = plain_entries(nested)
                elif isinstance(nested, TensorDictBase):
                    refuse_ragged(nested, path)
                    entries = entries_of(nested)
                else:
                    return None
                if len(entries) != count:
                    return None
                mappings.append(entries)
                # after a learner's step, in half the time of `map`
                for name, number in leaves:
                    values[number] = entries[name]
        except KeyError:
            return None
        return values

    def collect(self, data: TensorDictBase, lead: torch.Size) -> list[torch.Tensor]:
        """Check the leaves of ``data``, ``[*lead, ...]``, and return them detached; an
        entry ``"index"`` is ignored."""
        leaves = self.find(data)
        # some writers of TorchRL's add it
        if leaves is None and "index" in data.keys() and ("index",) not in self.places:
            leaves = self.find(data.exclude("index"))
        if leaves is None:
            refuse(data, self.leaves, lead)
        expected = self._expected
        if lead != expected.lead:
            shapes = [lead + leaf.shape for leaf in self.leaves]
            self._expected = expected = _Expected(lead, shapes)
        try:
            pairs = zip(self.leaves, expected.shapes, strict=True)
            for slot, (leaf, shape) in enumerate(pairs):
                value = leaves[slot]
                if (
                    not isinstance(value, torch.Tensor)
                    or value.dtype is not leaf.dtype
                    or value.layout is not torch.strided
                    or value.shape != shape
                    or value.is_meta
                    or not has_memory(value)
                ):
                    refuse(data, self.leaves, lead)
                if value.requires_grad:
                    leaves[slot] = value.detach()
        except RuntimeError:  # a nested tensor has no shape
            refuse(data, self.leaves, lead)
        return leaves

    def state(self) -> State:
        return _node_state(self.root, self.leaves)

    @classmethod
    def from_state(cls, state: State) -> RowLayout:
        return cls(_example(state), 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowLayout) and self.state() == other.state()

    def __hash__(self) -> int:
        return hash(self.leaves)


def _padded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _place(leaf: Leaf) -> tuple[int, str, bool, bool, tuple[str, ...]]:
    # Among leaves of one dtype, those under "next" come last, with the reward first:
    # n-step samplers read all of them.
    key = leaf.key
    return (
        -leaf.dtype.itemsize,
        str(leaf.dtype),
        key[0] == "next",
        key[-1] != "reward",
        key,
    )


def _describe(
    data: TensorDictBase,
    lead_dims: int,
    path: tuple[str, ...],
    slots: dict[tuple[str, ...], int],
) -> _Node:
    leaves, nodes = [], []
    for name, value in entries_of(data).items():
        key = (*path, name)
        if isinstance(value, TensorDictBase):
            nodes.append((name, _describe(value, lead_dims, key, slots)))
        else:
            leaves.append((name, slots[key]))
    return _Node(path, tuple(leaves), tuple(nodes), data.batch_size[lead_dims:])


def _build(
    node: _Node,
    columns: Sequence[torch.Tensor],
    lead: torch.Size,
    device: torch.device,
    extra: Mapping[str, object],
) -> TensorDict:
    entries: dict[str, Any] = {}
    for name, slot in node.leaves:  # a comprehension would cost a call
        entries[name] = columns[slot]
    for name, child in node.nodes:
        entries[name] = _build(child, columns, lead, device, {})
    entries.update(extra)
    return new_tensordict(
        entries, lead + node.batch_size if node.batch_size else lead, device
    )


def _levels(node: _Node, parent: int, levels: list[_Level]) -> list[_Level]:
    """Append a nesting level, and then those below it."""
    number = len(levels)
    count = len(node.leaves) + len(node.nodes)
    levels.append(_Level(parent, node.path, node.leaves, count))
    for _, child in node.nodes:
        _levels(child, number, levels)
    return levels


def _node_state(node: _Node, leaves: Sequence[Leaf]) -> State:
    kinds = [
        [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)] for leaf in leaves
    ]
    return {
        "batch_size": list(node.batch_size),
        "leaves": {name: kinds[slot] for name, slot in node.leaves},
        "nodes": {name: _node_state(child, leaves) for name, child in node.nodes},
    }


def _example(state: State) -> TensorDict:
    entries: dict[NestedKey, Any] = {
        name: _example(child) for name, child in state["nodes"].items()
    }
    for name, (dtype_name, shape) in state["leaves"].items():
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise SchemaError(
                f"the saved layout gives {name!r} an unknown dtype {dtype_name!r}"
            )
        entries[name] = torch.empty(shape, dtype=dtype, device="meta")
    return TensorDict(entries, batch_size=state["batch_size"])
