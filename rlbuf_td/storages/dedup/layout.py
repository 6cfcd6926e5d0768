"""How deduplicated rows lie in memory: bookkeeping only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rlbuf_td.kernels.rows.pool import Group, Part
from rlbuf_td.storages.dedup.options import DedupGroup, DedupOptions, Key, choose_groups, frames_group, refuse_key
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.schema import Leaf, SchemaError

ENTRY_IDS = "_entries"  # the key of the entry ids in a stored row
_PAGE = 4096
_MAX_ENTRIES = 2**31 - 2


class DedupLayout:
    """A *stored row* holds the ids of entries in place of the deduplicated keys; entries hold the observations."""

    def __init__(self, layout: RowLayout, chosen: tuple[DedupGroup, ...]) -> None:
        self.layout, self.chosen = layout, chosen  # of whole rows, as batches hold them; at least one group
        leaves = _by_key(layout)
        #: Of each deduplicated key: its group, its place in that group, and 1 below "next", else 0.
        self.places: dict[Key, tuple[int, int, int]] = {}
        for g, group in enumerate(chosen):
            for p, key in enumerate(group.keys):
                self.places.update((path, (g, p, side)) for side, path in enumerate(_sides(group, key)))
        self.deduplicated = {key: leaves[key] for key in self.places}
        if (ENTRY_IDS,) in layout.offsets or any(name == ENTRY_IDS for name, _ in layout.root.nodes):
            raise SchemaError(f"rows that share observations cannot hold a key {ENTRY_IDS!r}")
        row = layout.unpack(torch.empty(layout.row_bytes, dtype=torch.uint8, device="meta")).exclude(*self.places)
        count = sum(group.pieces * (1 + group.has_next) for group in chosen)
        row.set(ENTRY_IDS, torch.empty((*row.batch_size, count), dtype=torch.int32, device="meta"))
        self.stored = RowLayout(row, lead_dims=0)
        #: Which leaves of a whole row are kept in the stored row, in the order of its leaves.
        self.kept = [layout.places[key] for key in self.stored.offsets if key != (ENTRY_IDS,)]
        #: Which leaves of a whole row each part of the groups comes from: the observation's, and the next one's.
        self.given = [
            tuple(layout.places[path] for path in _sides(group, key)) for group in chosen for key in group.keys
        ]
        self.ids_slot = self.stored.places[(ENTRY_IDS,)]

    @classmethod
    def chosen_for(
        cls, layout: RowLayout, options: DedupOptions, data: TensorDictBase | None = None
    ) -> DedupLayout | None:
        """Return what the options choose for rows of a layout, ``data`` being the first write; None for nothing."""
        chosen = choose_groups(options, _by_key(layout), data)
        return cls(layout, chosen) if chosen else None

    @cached_property
    def runs(self) -> np.ndarray:
        """What is copied from a stored row, ``[R, 3]``: from where, to which leaf, how many bytes."""
        leaves = [leaf for leaf in self.stored.leaves if leaf.key != (ENTRY_IDS,) and leaf.nbytes]
        runs = [[self.stored.offsets[leaf.key], self.layout.places[leaf.key], leaf.nbytes] for leaf in leaves]
        return np.array(runs, np.int64).reshape(-1, 3)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        at, groups = self.stored.offsets[(ENTRY_IDS,)], []
        for group in self.chosen:
            parts, into = [], 0
            for key in group.keys:
                leaf = self.deduplicated[key]
                outer = prod(leaf.shape[: group.dim]) if group.pieces > 1 else 1
                inner = leaf.nbytes // outer // group.pieces
                following = self.layout.places[_sides(group, key)[-1]] if group.has_next else 0
                parts.append(Part(into, inner, outer, inner * group.pieces, self.layout.places[key], following))
                into += inner * outer
            groups.append(Group(at, group.pieces, 1 + group.has_next, tuple(parts)))
            at += 4 * groups[-1].names
        return tuple(groups)

    def saved_bytes(self, cells: int, used: Sequence[int]) -> dict[Key, int]:
        """Return the bytes saved by key, of the observations of ``cells`` rows, with ``used`` entries of each group."""
        saved = {}
        for group, kernel, entries in zip(self.chosen, self.groups, used, strict=True):
            for key, part in zip(group.keys, kernel.parts, strict=True):
                width = part.inner * part.outer
                ids = round(4 * cells * kernel.names * width / kernel.nbytes)  # in proportion to the keys' bytes
                saved[key] = cells * width * kernel.names - entries * width - ids
        return saved

    def state(self) -> list[list[Any]]:
        """Return the groups as plain numbers and strings; :meth:`from_state` reads them back."""
        return [[[list(key) for key in g.keys], g.pieces, g.dim, g.has_next] for g in self.chosen]

    @classmethod
    def from_state(cls, layout: RowLayout, state: Sequence[Any]) -> DedupLayout:
        leaves, groups = _by_key(layout), []
        for keys, pieces, dim, _ in state:
            names = tuple(tuple(str(part) for part in key) for key in keys)
            if int(pieces) > 1:
                groups.append(frames_group(leaves, names[0], int(pieces), int(dim)))
            else:
                for name in names:
                    refuse_key(leaves, name)
                groups.append(DedupGroup(names))
        return cls(layout, tuple(groups))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DedupLayout) and self.layout == other.layout and self.chosen == other.chosen

    def __hash__(self) -> int:
        return hash((self.layout, self.chosen))


def _by_key(layout: RowLayout) -> dict[Key, Leaf]:
    return {leaf.key: leaf for leaf in layout.leaves}


def saved_dedup(layout: RowLayout, state: dict[str, Any]) -> DedupLayout | None:
    """Return how saved rows are deduplicated; None for plain rows."""
    return DedupLayout.from_state(layout, state["pooled"]) if "pooled" in state else None


@dataclass(frozen=True)
class Sections:
    """Where the parts of deduplicated rows lie in one block of memory, in bytes; each begins at a page.

    Rows come first, then the counters, then for each group the stack of free ids and the entries. Their memory is taken
    from the system as they are used: there is room for rows that share nothing, and for as many that replace them.
    """

    counters: int
    stacks: tuple[int, ...]
    entries: tuple[int, ...]
    most: tuple[int, ...]  # entries of each group
    fixed: int  # bytes before the stacks
    likely: int  # bytes that are taken where each row shares its next observation
    total: int

    @classmethod
    def of(cls, dedup: DedupLayout, cells: int) -> Sections:
        most = tuple(2 * cells * group.names for group in dedup.groups)
        if max(most) > _MAX_ENTRIES:
            fit = cells * _MAX_ENTRIES // max(most)
            raise SchemaError(
                f"{cells:,} rows are too many to share observations or frames: {fit:,} of these fit. Take a smaller "
                "max_size, or several storages"
            )
        counters, stacks, entries = _pages(cells * dedup.stored.row_bytes), [], []
        at = counters + _pages(16 * len(most))
        for group, count in zip(dedup.groups, most, strict=True):
            stacks.append(at)
            at += _pages(4 * (count + 1))
            entries.append(at)
            at += _pages(group.nbytes * (count + 1))
        likely = stacks[0] + sum(cells * group.nbytes for group in dedup.groups)
        return cls(counters, tuple(stacks), tuple(entries), most, stacks[0], likely, at)


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _sides(group: DedupGroup, key: Key) -> list[Key]:
    return [key, ("next", *key)] if group.has_next else [key]
