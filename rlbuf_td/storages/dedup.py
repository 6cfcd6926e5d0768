"""Deduplicated observations: the user's options, the keys that they select, and the
memory layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from numbers import Real
from typing import Any, TypeAlias

import torch

from rlbuf_td.kernels.rows.entries import Group, Part, Run
from rlbuf_td.storages.checks import State
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.schema import Leaf, SchemaError, show_key

Key: TypeAlias = tuple[str, ...]
# samplers read these columns separately
_COLUMNS = ("done", "terminated", "truncated", "traj_ids", "reward")
_MIN_KEY_BYTES = 8  # two entry names of 4 bytes replace a key
ENTRY_NAMES = "_entries"  # the key of the entry names in a stored row
_CHUNK = 512  # bytes of a chunk at least, whose place in its ring takes 4 bytes


@dataclass(frozen=True)
class DedupGroup:
    """Keys whose values are stored together in one entry."""

    # of the observation; the next observation has these keys under "next"
    keys: tuple[Key, ...]
    pieces: int = 1  # entries per observation (frames of a stack)
    dim: int = 0  # the dim of the key along which its frames lie
    has_next: bool = True  # whether rows hold a next observation


@dataclass(frozen=True)
class DedupOptions:
    """The arguments ``share_next`` and ``frames`` of :class:`~rlbuf_td.PackedStorage`
    after validation."""

    share_next: bool | tuple[Key, ...]
    # (key, number of frames, dim of the frames) of each stack
    frames: tuple[tuple[Key, int, int], ...]

    @classmethod
    def of(cls, share_next: object, frames: object) -> DedupOptions:
        if isinstance(share_next, Sequence | Set) and not isinstance(share_next, str):
            share_next = tuple(_key(key, "share_next") for key in share_next)
        elif not isinstance(share_next, bool):
            raise ValueError(
                f"share_next must be True, False or a list of keys, got {share_next!r}"
            )
        if frames is not None and not isinstance(frames, Mapping):
            raise ValueError(
                f"frames must be a dict of a number of frames by key, got {frames!r}"
            )
        stacks = {}
        for name, how in (frames or {}).items():
            key = _key(name, "frames")
            if key in stacks:
                raise ValueError(f"frames names {show_key(key)} twice")
            stacks[key] = (key, *_count_and_dim(name, how))
        return cls(share_next, tuple(stacks.values()))

    def __bool__(self) -> bool:
        return self.share_next is not False or bool(self.frames)


def _key(key: object, argument: str) -> Key:
    try:
        path = as_tuple(key)
    except ValueError as error:
        raise ValueError(f"{argument} takes keys, and {error}") from None
    if path[0] == "next":
        raise ValueError(
            f"{argument} names keys at the root, without 'next': got {key!r}"
        )
    return path


def _count_and_dim(key: Any, how: Any) -> tuple[int, int]:
    pair = tuple(how) if isinstance(how, Sequence) else (how, 0)
    if (
        len(pair) != 2
        or not all(
            isinstance(number, Real) and number == number // 1 for number in pair
        )
        or pair[0] < 2
    ):
        raise ValueError(
            f"frames of {key!r} must be a whole number, at least 2, or (number, dim), got {how!r}"
        )
    return int(pair[0]), int(pair[1])


def choose(options: DedupOptions, leaves: Mapping[Key, Leaf]) -> tuple[DedupGroup, ...]:
    """Choose the keys to deduplicate."""
    groups = [frames_group(leaves, *stack) for stack in options.frames]
    taken = {key for group in groups for key in group.keys}
    asked = options.share_next
    if isinstance(asked, tuple):
        for key in asked:
            refuse_key(leaves, key)
        keys = [key for key in dict.fromkeys(asked) if key not in taken]
    else:
        keys = [
            key
            for key in leaves
            if asked and _may_share(leaves, key) and key not in taken
        ]
    if keys:
        groups.append(
            DedupGroup(
                tuple(sorted(keys, key=lambda key: (-leaves[key].dtype.itemsize, key)))
            )
        )
    return tuple(groups)


def _may_share(leaves: Mapping[Key, Leaf], key: Key) -> bool:
    leaf, other = leaves[key], leaves.get(("next", *key))
    return (
        other is not None
        and leaf.is_like(other)
        and leaf.nbytes >= _MIN_KEY_BYTES
        and key[-1] not in _COLUMNS
    )


def refuse_key(leaves: Mapping[Key, Leaf], key: Key) -> None:
    leaf, other = leaves.get(key), leaves.get(("next", *key))
    if leaf is None or other is None:
        raise SchemaError(
            f"share_next names {show_key(key)}, but rows lack that key or {show_key(('next', *key))}"
        )
    if not leaf.is_like(other):
        raise SchemaError(
            f"share_next names {show_key(key)}, which has another dtype or shape in 'next'"
        )
    if not _may_share(leaves, key):
        raise SchemaError(
            f"share_next names {show_key(key)}, of {leaf.nbytes} bytes: only keys of {_MIN_KEY_BYTES} bytes or more "
            f"are stored once, and never {', '.join(map(repr, _COLUMNS))}"
        )


def frames_group(
    leaves: Mapping[Key, Leaf], key: Key, count: int, dim: int
) -> DedupGroup:
    leaf, other = leaves.get(key), leaves.get(("next", *key))
    if leaf is None:
        raise SchemaError(
            f"frames names {show_key(key)}, which is not a key of the rows"
        )
    if (
        not -len(leaf.shape) <= dim < len(leaf.shape)
        or leaf.shape[dim] % count
        or not leaf.nbytes
    ):
        raise SchemaError(
            f"frames={{{show_key(key)}: ({count}, {dim})}}, but dim {dim} of its shape {tuple(leaf.shape)} "
            f"is not {count} frames: name the dim of the frames"
        )
    if other is not None and not leaf.is_like(other):
        raise SchemaError(
            f"frames names {show_key(key)}, which has another dtype or shape in 'next'"
        )
    return DedupGroup((key,), count, dim % len(leaf.shape), other is not None)


class DedupLayout:
    """The layout of *stored rows*, in which names of entries replace the deduplicated
    keys."""

    def __init__(self, layout: RowLayout, chosen: tuple[DedupGroup, ...]) -> None:
        # the layout of whole rows, as in batches; one or more groups
        self.layout, self.chosen = layout, chosen
        leaves = _by_key(layout)
        paths = [
            path
            for group in chosen
            for key in group.keys
            for path in _sides(group, key)
        ]
        self.deduplicated = {path: leaves[path] for path in paths}
        if (ENTRY_NAMES,) in layout.offsets or any(
            name == ENTRY_NAMES for name, _ in layout.root.nodes
        ):
            raise SchemaError(
                f"rows that share observations cannot have a key {ENTRY_NAMES!r}"
            )
        row = layout.unpack(
            torch.empty(layout.row_bytes, dtype=torch.uint8, device="meta")
        ).exclude(*self.deduplicated)
        count = sum(group.pieces * (1 + group.has_next) for group in chosen)
        row.set(
            ENTRY_NAMES,
            torch.empty((*row.batch_size, count), dtype=torch.int32, device="meta"),
        )
        self.stored = RowLayout(row, 0)
        #: Indices of the leaves that a stored row keeps, in the order of the stored
        # row.
        self.kept = [
            layout.places[key] for key in self.stored.offsets if key != (ENTRY_NAMES,)
        ]
        self.names_slot = self.stored.places[(ENTRY_NAMES,)]
        self.groups, self.parts = self._groups_and_parts()
        stored_leaves = [
            leaf
            for leaf in self.stored.leaves
            if leaf.key != (ENTRY_NAMES,) and leaf.nbytes
        ]
        self.runs = tuple(
            Run(self.stored.offsets[leaf.key], layout.places[leaf.key], leaf.nbytes)
            for leaf in stored_leaves
        )

    @classmethod
    def chosen_for(cls, layout: RowLayout, options: DedupOptions) -> DedupLayout | None:
        chosen = choose(options, _by_key(layout))
        return cls(layout, chosen) if chosen else None

    def _groups_and_parts(self) -> tuple[tuple[Group, ...], tuple[Part, ...]]:
        """Return the records of the chosen groups and of their keys, for compiled
        loops."""
        names_at = self.stored.offsets[(ENTRY_NAMES,)]
        groups: list[Group] = []
        parts: list[Part] = []
        places = self.layout.places
        for group in self.chosen:
            first_part = len(parts)
            pieces = group.pieces
            sides = 2 if group.has_next else 1
            nbytes = 0  # of the keys so far in an entry
            for key in group.keys:
                leaf = self.deduplicated[key]
                outer = prod(leaf.shape[: group.dim]) if pieces > 1 else 1
                inner = leaf.nbytes // outer // pieces
                part = Part(
                    into=nbytes,
                    inner=inner,
                    outer=outer,
                    pitch=inner * pieces,
                    root=places[key],
                    next=places[("next", *key)] if group.has_next else 0,
                )
                parts.append(part)
                nbytes += inner * outer
            record = Group(
                names_at=names_at,
                pieces=pieces,
                sides=sides,
                names=pieces * sides,
                nbytes=nbytes,
                bits=((_CHUNK - 1) // nbytes).bit_length(),
                first_part=first_part,
                past_part=len(parts),
            )
            groups.append(record)
            names_at += 4 * record.names
        return tuple(groups), tuple(parts)

    def saved_bytes(self, cells: int, used: Sequence[int]) -> dict[Key, int]:
        """Return how many bytes each deduplicated key saves in ``cells`` rows, with
        ``used`` entries of each group."""
        saved = {}
        for group, entries in zip(self.groups, used, strict=True):
            for part in self.parts[group.first_part : group.past_part]:
                width = part.inner * part.outer  # of the key in an entry
                in_rows = cells * width * group.names  # without deduplication
                in_entries = entries * width
                # its share of the int32 names that rows hold instead
                names = round(4 * cells * group.names * width / group.nbytes)
                key = self.layout.leaves[part.root].key
                saved[key] = in_rows - in_entries - names
        return saved

    def state(self) -> list[list[Any]]:
        return [
            [[list(key) for key in g.keys], g.pieces, g.dim, g.has_next]
            for g in self.chosen
        ]

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
        return (
            isinstance(other, DedupLayout)
            and self.layout == other.layout
            and self.chosen == other.chosen
        )

    def __hash__(self) -> int:
        return hash((self.layout, self.chosen))


def _by_key(layout: RowLayout) -> dict[Key, Leaf]:
    return {leaf.key: leaf for leaf in layout.leaves}


def saved_dedup(layout: RowLayout, state: State) -> DedupLayout | None:
    return (
        DedupLayout.from_state(layout, state["deduplicated"])
        if "deduplicated" in state
        else None
    )


def _sides(group: DedupGroup, key: Key) -> list[Key]:
    return [key, ("next", *key)] if group.has_next else [key]
