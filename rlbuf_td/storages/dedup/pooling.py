"""Which keys rows share, and what a row then looks like: pure bookkeeping, no memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from math import prod
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
from tensordict import TensorDictBase

from rlbuf_td.kernels.rows.pool import Group, Part
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.schema import Leaf, SchemaError, show_key
from rlbuf_td.storages.tensordict_fast import leaf_of

Key: TypeAlias = tuple[str, ...]
NAMES = "_entries"  # the key of the names of entries, in the rows that are stored
_COLUMNS = ("done", "terminated", "truncated", "traj_ids", "reward")  # samplers read them without the rest of a row
_LEAST = 8  # bytes of a key that is worth sharing: a name takes 4, and there are two
_WORTH = 16  # bytes of all shared keys
_LOOK = 256  # time steps of the first write that "auto" looks at


@dataclass(frozen=True)
class Pooled:
    """Keys that are kept together in one kind of entry.

    Attributes:
        keys: of the observation; what comes next has the same below ``"next"``.
        pieces: how many entries make up one observation.
        dim: of the key along which the pieces lie.
        has_next: whether rows hold a next observation.
    """

    keys: tuple[Key, ...]
    pieces: int = 1
    dim: int = 0
    has_next: bool = True


@dataclass(frozen=True)
class Sharing:
    """What a user asks for: the arguments of :class:`~rlbuf_td.PackedStorage`, checked.

    Attributes:
        share_next: ``"auto"``, whether at all, or which keys.
        frames: number of frames and dim by key.
    """

    share_next: bool | str | tuple[Key, ...] = False
    frames: tuple[tuple[Key, int, int], ...] = ()

    @classmethod
    def of(cls, share_next: Any, frames: Mapping[Any, Any] | None) -> Sharing:
        """Check the arguments.

        Raises:
            ValueError: one is none of those that are allowed.
        """
        if isinstance(share_next, str) and share_next != "auto":
            raise ValueError(f"share_next must be 'auto', True, False or a list of keys, got {share_next!r}")
        if not isinstance(share_next, bool | str):
            if not isinstance(share_next, Sequence | Set):
                raise ValueError(f"share_next must be 'auto', True, False or a list of keys, got {share_next!r}")
            share_next = tuple(_key(key, "share_next") for key in share_next)
            if any(key[:1] == ("next",) for key in share_next):
                raise ValueError(f"share_next names keys as they are at the root, without 'next': got {share_next}")
        stacks: list[tuple[Key, int, int]] = []
        if frames is not None and not isinstance(frames, Mapping):
            raise ValueError(f"frames must be a dict of a number of frames by key, got {frames!r}")
        for name, how in (frames or {}).items():
            key, count, dim = _key(name, "frames"), *_count_and_dim(name, how)
            if key[:1] == ("next",):
                raise ValueError(f"frames names keys as they are at the root, without 'next': got {name!r}")
            if any(key == other for other, _, _ in stacks):
                raise ValueError(f"frames names {show_key(key)} twice")
            stacks.append((key, count, dim))
        return cls(share_next, tuple(stacks))

    def __bool__(self) -> bool:
        return self.share_next is not False or bool(self.frames)


def _key(key: Any, argument: str) -> Key:
    path = (key,) if isinstance(key, str) else key
    if not isinstance(path, tuple) or not path or not all(isinstance(name, str) for name in path):
        raise ValueError(f"{argument} names keys, a string or a tuple of strings each: got {key!r}")
    return path


def _count_and_dim(key: Any, how: Any) -> tuple[int, int]:
    """Return how many frames a stack has, and along which dim they lie."""
    pair = tuple(how) if isinstance(how, tuple | list) else (how, 0)
    if len(pair) != 2 or not all(isinstance(number, Real) and number == number // 1 for number in pair) or pair[0] < 2:
        raise ValueError(
            f"frames of {key!r} must be a whole number, at least 2, or (that number, the dim along which they lie), "
            f"got {how!r}"
        )
    return int(pair[0]), int(pair[1])


def choose(sharing: Sharing, layout: RowLayout, data: TensorDictBase | None = None) -> tuple[Pooled, ...]:
    """Choose what rows are to share.

    Args:
        sharing: what was asked for.
        layout: what whole rows hold.
        data: the first write, ``[T, *lanes, ...]``, which ``"auto"`` looks at; None if it is of one time step. Of that,
            or of a single row, nothing can be told: all keys of some size are shared then, each by itself.

    Raises:
        SchemaError: a key that was named cannot be shared.
    """
    leaves = {leaf.key: leaf for leaf in layout.leaves}
    groups = [_frames_of(leaves, *stack) for stack in sharing.frames]
    taken = {key for group in groups for key in group.keys}
    asked = sharing.share_next
    if isinstance(asked, tuple):
        for key in asked:
            _refuse_unshared(leaves, key)
        keys = [key for key in dict.fromkeys(asked) if key not in taken]
    else:
        keys = [] if asked is False else [key for key in _candidates(leaves) if key not in taken]
        if asked == "auto" and (
            data is None or len(data) < 2
        ):  # nobody knows: what does not repeat must not spoil others
            return (*groups, *(Pooled((key,)) for key in keys if leaves[key].nbytes >= _WORTH))
        if asked == "auto" and data is not None:
            keys = [key for key in keys if _repeats(data, leaves[key])]
            keys = keys if sum(leaves[key].nbytes for key in keys) >= _WORTH else []
    if keys:
        groups.append(Pooled(tuple(sorted(keys, key=lambda key: (-leaves[key].dtype.itemsize, key)))))
    return tuple(groups)


def _candidates(leaves: Mapping[Key, Leaf]) -> Iterator[Key]:
    for key, leaf in leaves.items():
        other = leaves.get(("next", *key))
        if other is not None and _kind(leaf) == _kind(other) and leaf.nbytes >= _LEAST and key[-1] not in _COLUMNS:
            yield key


def _kind(leaf: Leaf) -> tuple[Any, ...]:
    return leaf.dtype, leaf.shape


def _refuse_unshared(leaves: Mapping[Key, Leaf], key: Key) -> None:
    leaf, other = leaves.get(key), leaves.get(("next", *key))
    if leaf is None or other is None:
        raise SchemaError(
            f"share_next names {show_key(key)}, but rows do not hold both that and {show_key(('next', *key))}"
        )
    if _kind(leaf) != _kind(other):
        raise SchemaError(f"share_next names {show_key(key)}, which has another dtype or shape in 'next'")
    if key not in dict.fromkeys(_candidates(leaves)):
        raise SchemaError(
            f"share_next names {show_key(key)}, of {leaf.nbytes} bytes: only keys of {_LEAST} bytes or more are "
            f"shared, and never {', '.join(map(repr, _COLUMNS))}"
        )


def _frames_of(leaves: Mapping[Key, Leaf], key: Key, count: int, dim: int) -> Pooled:
    leaf, other = leaves.get(key), leaves.get(("next", *key))
    if leaf is None:
        raise SchemaError(f"frames names {show_key(key)}, which rows do not hold")
    if not -len(leaf.shape) <= dim < len(leaf.shape) or leaf.shape[dim] % count or not leaf.nbytes:
        raise SchemaError(
            f"frames={{{show_key(key)}: ({count}, {dim})}}, but dim {dim} of its shape {tuple(leaf.shape)} "
            f"is not {count} frames: name the dim along which they lie"
        )
    if other is not None and _kind(leaf) != _kind(other):
        raise SchemaError(f"frames names {show_key(key)}, which has another dtype or shape in 'next'")
    return Pooled((key,), count, dim % len(leaf.shape), other is not None)


def _repeats(data: TensorDictBase, leaf: Leaf) -> bool:
    """Return whether the next observation is that of the following row, in half of the rows or more."""
    following, now = (leaf_of(data, path) for path in (("next", *leaf.key), leaf.key))
    count = min(len(data) - 1, _LOOK)
    if following is None or now is None or count < 1:
        return True
    following, now = following[:count], now[1 : count + 1]
    same = (now == following) | ((now != now) & (following != following))
    rows = same.flatten(same.ndim - len(leaf.shape)).all(-1) if leaf.shape else same
    return bool(rows.double().mean() >= 0.5)


class Pooling:
    """What stored rows look like whose pooled keys are names of entries, and how whole rows are put together.

    Args:
        layout: what whole rows hold.
        pooled: what they share, at least one group.

    Raises:
        SchemaError: a key has a name that is needed.
    """

    def __init__(self, layout: RowLayout, pooled: tuple[Pooled, ...]) -> None:
        self.layout, self.pooled = layout, pooled
        self.offsets: dict[Key, int] = {}
        at = 0
        for leaf in layout.leaves:
            self.offsets[leaf.key] = at
            at += leaf.nbytes
        self.leaves = {leaf.key: leaf for leaf in layout.leaves}
        #: of each pooled key: its group, its part of that, and whether it is in "next"
        self.places: dict[Key, tuple[int, int, int]] = {}
        for g, group in enumerate(pooled):
            for p, key in enumerate(group.keys):
                sides = [key, ("next", *key)] if group.has_next else [key]
                self.places.update((path, (g, p, side)) for side, path in enumerate(sides))
        if (NAMES,) in self.offsets or any(name == NAMES for name, _ in layout.root.nodes):
            raise SchemaError(f"rows that share observations cannot hold a key {NAMES!r}")
        names = sum(group.pieces * (1 + group.has_next) for group in pooled)
        state = _without(layout.state(), (), self.places)
        state["leaves"][NAMES] = ["int32", [*state["batch_size"], names]]
        self.own = RowLayout.from_state(state)

    @cached_property
    def own_offsets(self) -> dict[Key, int]:
        """Where each key begins in a stored row."""
        offsets, at = {}, 0
        for leaf in self.own.leaves:
            offsets[leaf.key] = at
            at += leaf.nbytes
        return offsets

    @cached_property
    def names_slot(self) -> int:
        """Which leaf of a stored row the names are."""
        return [leaf.key for leaf in self.own.leaves].index((NAMES,))

    @cached_property
    def kept(self) -> list[int]:
        """Which leaves of a whole row are stored in the row itself, in the order of the stored row's."""
        slots = {leaf.key: slot for slot, leaf in enumerate(self.layout.leaves)}
        return [slots[leaf.key] for leaf in self.own.leaves if leaf.key != (NAMES,)]

    @cached_property
    def given(self) -> list[tuple[int, ...]]:
        """Which leaves of a whole row the parts of the groups come from, their next ones included."""
        slots = {leaf.key: slot for slot, leaf in enumerate(self.layout.leaves)}
        given = []
        for group in self.pooled:
            for key in group.keys:
                sides = [key, ("next", *key)] if group.has_next else [key]
                given.append(tuple(slots[path] for path in sides))
        return given

    @cached_property
    def runs(self) -> np.ndarray:
        """What is copied from a stored row to a whole one: from where, to where, how many bytes."""
        joined: list[list[int]] = []
        for leaf in self.own.leaves:
            if leaf.key == (NAMES,) or not leaf.nbytes:
                continue
            source, to = self.own_offsets[leaf.key], self.offsets[leaf.key]
            last = joined[-1] if joined else None
            if last is not None and last[0] + last[2] == source and last[1] + last[2] == to:
                last[2] += leaf.nbytes
            else:
                joined.append([source, to, leaf.nbytes])
        return np.array(joined, np.int64).reshape(-1, 3)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups as the kernels take them."""
        at, groups = self.own_offsets[(NAMES,)], []
        for group in self.pooled:
            parts, into = [], 0
            for key in group.keys:
                leaf = self.leaves[key]
                outer, inner = 1, leaf.nbytes
                if group.pieces > 1:
                    outer = prod(leaf.shape[: group.dim])
                    inner = leaf.nbytes // outer // group.pieces
                following = self.offsets.get(("next", *key), 0) if group.has_next else 0
                parts.append(Part(into, inner, outer, inner * group.pieces, self.offsets[key], following))
                into += inner * outer
            groups.append(Group(at, group.pieces, 1 + group.has_next, tuple(parts)))
            at += 4 * groups[-1].names
        return tuple(groups)

    def saved_bytes(self, cells: int, used: Sequence[int]) -> dict[Key, int]:
        """Return by key how many bytes are not stored, of both observations of ``cells`` rows.

        Names are counted against the keys, in proportion to their bytes.

        Args:
            cells: number of rows.
            used: number of entries of each group.
        """
        saved = {}
        for group, kernel, entries in zip(self.pooled, self.groups, used, strict=True):
            for key, part in zip(group.keys, kernel.parts, strict=True):
                width = part.inner * part.outer
                whole = cells * width * kernel.names
                saved[key] = whole - entries * width - round(4 * cells * kernel.names * width / kernel.nbytes)
        return saved

    def state(self) -> list[list[Any]]:
        """Return what is shared as plain numbers and strings; :meth:`from_state` reads it back."""
        return [[[list(key) for key in g.keys], g.pieces, g.dim, g.has_next] for g in self.pooled]

    @classmethod
    def from_state(cls, layout: RowLayout, state: Sequence[Any]) -> Pooling:
        """Return what :meth:`state` described.

        Raises:
            SchemaError: it does not fit the layout.
        """
        leaves = {leaf.key: leaf for leaf in layout.leaves}
        groups = []
        for keys, pieces, dim, has_next in state:
            names = tuple(tuple(str(part) for part in key) for key in keys)
            if int(pieces) > 1:
                groups.append(_frames_of(leaves, names[0], int(pieces), int(dim)))
            else:
                for name in names:
                    _refuse_unshared(leaves, name)
                groups.append(Pooled(names))
            if groups[-1].has_next != bool(has_next):
                raise SchemaError("the saved rows share a next observation that their layout does not hold")
        return cls(layout, tuple(groups))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pooling) and self.layout == other.layout and self.pooled == other.pooled

    def __hash__(self) -> int:
        return hash((self.layout, self.pooled))


def _without(state: dict[str, Any], path: Key, keys: Mapping[Key, Any]) -> dict[str, Any]:
    """Return the state of a layout without some of its leaves."""
    return state | {
        "leaves": {name: leaf for name, leaf in state["leaves"].items() if (*path, name) not in keys},
        "nodes": {name: _without(node, (*path, name), keys) for name, node in state["nodes"].items()},
    }
