"""Which observations a storage stores once: what the user asks for, and the keys that are chosen for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

from tensordict import TensorDictBase

from rlbuf_td.storages.schema import Leaf, SchemaError, show_key
from rlbuf_td.storages.tensordict_fast import leaf_of

Key: TypeAlias = tuple[str, ...]
_COLUMNS = ("done", "terminated", "truncated", "traj_ids", "reward")  # samplers read them without the rest of a row
_MIN_KEY_BYTES = 8  # a row holds two entry ids of 4 bytes instead of the key
_MIN_BYTES = 16  # of all keys together, for "auto"
_LOOK = 256  # time steps of the first write that "auto" compares


@dataclass(frozen=True)
class DedupGroup:
    """Keys that are stored together in one kind of entry."""

    keys: tuple[Key, ...]  # of the observation; the next observation has the same keys below "next"
    pieces: int = 1  # how many entries make up one observation (frames of a stack)
    dim: int = 0  # of the key, along which the pieces lie
    has_next: bool = True  # whether rows hold a next observation


@dataclass(frozen=True)
class DedupOptions:
    """The arguments ``share_next`` and ``frames`` of :class:`~rlbuf_td.PackedStorage`, checked."""

    share_next: bool | str | tuple[Key, ...]
    frames: tuple[tuple[Key, int, int], ...]  # key, number of frames and dim of each stack

    @classmethod
    def of(cls, share_next: Any, frames: Mapping[Any, Any] | None) -> DedupOptions:
        if isinstance(share_next, Sequence | Set) and not isinstance(share_next, str):
            share_next = tuple(_key(key, "share_next") for key in share_next)
        elif not isinstance(share_next, bool) and share_next != "auto":
            raise ValueError(f"share_next must be 'auto', True, False or a list of keys, got {share_next!r}")
        if frames is not None and not isinstance(frames, Mapping):
            raise ValueError(f"frames must be a dict of a number of frames by key, got {frames!r}")
        stacks = {}
        for name, how in (frames or {}).items():
            key = _key(name, "frames")
            if key in stacks:
                raise ValueError(f"frames names {show_key(key)} twice")
            stacks[key] = (key, *_count_and_dim(name, how))
        return cls(share_next, tuple(stacks.values()))

    def __bool__(self) -> bool:
        return self.share_next is not False or bool(self.frames)


def _key(key: Any, argument: str) -> Key:
    path = (key,) if isinstance(key, str) else key
    if not isinstance(path, tuple) or not path or not all(isinstance(name, str) for name in path):
        raise ValueError(f"{argument} names keys, a string or a tuple of strings each: got {key!r}")
    if path[0] == "next":
        raise ValueError(f"{argument} names keys as they are at the root, without 'next': got {key!r}")
    return path


def _count_and_dim(key: Any, how: Any) -> tuple[int, int]:
    pair = tuple(how) if isinstance(how, tuple | list) else (how, 0)
    if len(pair) != 2 or not all(isinstance(number, Real) and number == number // 1 for number in pair) or pair[0] < 2:
        raise ValueError(
            f"frames of {key!r} must be a whole number, at least 2, or (that number, the dim along which they lie), "
            f"got {how!r}"
        )
    return int(pair[0]), int(pair[1])


def choose_groups(
    options: DedupOptions, leaves: Mapping[Key, Leaf], data: TensorDictBase | None = None
) -> tuple[DedupGroup, ...]:
    """Choose which keys of whole rows are stored once.

    ``data`` is the first write, ``[T, *lanes, ...]``, which ``"auto"`` looks at; None if it is one time step, which
    cannot show what repeats: ``"auto"`` then takes all keys of 16 bytes or more, a group each, so that a key which does
    not repeat costs the others nothing.
    """
    groups = [frames_group(leaves, *stack) for stack in options.frames]
    taken = {key for group in groups for key in group.keys}
    asked = options.share_next
    if isinstance(asked, tuple):
        for key in asked:
            refuse_key(leaves, key)
        keys = [key for key in dict.fromkeys(asked) if key not in taken]
    else:
        keys = [key for key in leaves if asked and _may_share(leaves, key) and key not in taken]
        if asked == "auto" and (data is None or len(data) < 2):
            return (*groups, *(DedupGroup((key,)) for key in keys if leaves[key].nbytes >= _MIN_BYTES))
        if asked == "auto" and data is not None:
            keys = [key for key in keys if _repeats(data, leaves[key])]
            keys = keys if sum(leaves[key].nbytes for key in keys) >= _MIN_BYTES else []
    if keys:
        groups.append(DedupGroup(tuple(sorted(keys, key=lambda key: (-leaves[key].dtype.itemsize, key)))))
    return tuple(groups)


def _may_share(leaves: Mapping[Key, Leaf], key: Key) -> bool:
    leaf, other = leaves[key], leaves.get(("next", *key))
    return other is not None and leaf.is_like(other) and leaf.nbytes >= _MIN_KEY_BYTES and key[-1] not in _COLUMNS


def refuse_key(leaves: Mapping[Key, Leaf], key: Key) -> None:
    leaf, other = leaves.get(key), leaves.get(("next", *key))
    if leaf is None or other is None:
        raise SchemaError(
            f"share_next names {show_key(key)}, but rows do not hold both that and {show_key(('next', *key))}"
        )
    if not leaf.is_like(other):
        raise SchemaError(f"share_next names {show_key(key)}, which has another dtype or shape in 'next'")
    if not _may_share(leaves, key):
        raise SchemaError(
            f"share_next names {show_key(key)}, of {leaf.nbytes} bytes: only keys of {_MIN_KEY_BYTES} bytes or more "
            f"are stored once, and never {', '.join(map(repr, _COLUMNS))}"
        )


def frames_group(leaves: Mapping[Key, Leaf], key: Key, count: int, dim: int) -> DedupGroup:
    leaf, other = leaves.get(key), leaves.get(("next", *key))
    if leaf is None:
        raise SchemaError(f"frames names {show_key(key)}, which rows do not hold")
    if not -len(leaf.shape) <= dim < len(leaf.shape) or leaf.shape[dim] % count or not leaf.nbytes:
        raise SchemaError(
            f"frames={{{show_key(key)}: ({count}, {dim})}}, but dim {dim} of its shape {tuple(leaf.shape)} "
            f"is not {count} frames: name the dim along which they lie"
        )
    if other is not None and not leaf.is_like(other):
        raise SchemaError(f"frames names {show_key(key)}, which has another dtype or shape in 'next'")
    return DedupGroup((key,), count, dim % len(leaf.shape), other is not None)


def _repeats(data: TensorDictBase, leaf: Leaf) -> bool:
    """Return whether the next observation is that of the following row, in half of the rows or more."""
    count = min(len(data) - 1, _LOOK)
    following, now = leaf_of(data, ("next", *leaf.key))[:count], leaf_of(data, leaf.key)[1 : count + 1]
    same = (now == following) | ((now != now) & (following != following))
    rows = same.flatten(same.ndim - len(leaf.shape)).all(-1) if leaf.shape else same
    return bool(rows.double().mean() >= 0.5)
