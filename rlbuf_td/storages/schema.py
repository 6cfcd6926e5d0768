"""Checks of data before it is written, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

from rlbuf_td.kernels.host_memory import has_memory
from rlbuf_td.storages.tensordict_fast import entries_of


class SchemaError(ValueError):
    """Data whose keys, dtypes or shapes do not match the rows of a storage; nothing has
    been written.

    Example:
        >>> from rlbuf_td import ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer()
        >>> _ = rb.extend(TensorDict({"action": torch.zeros(2, 3)}, [2]))
        >>> rb.extend(TensorDict({"action": torch.zeros(2, 4)}, [2]))
        Traceback (most recent call last):
        rlbuf_td.storages.schema.SchemaError: ...
    """


@dataclass(frozen=True)
class Leaf:
    """One tensor of a transition: its key, dtype, and shape in a row."""

    key: tuple[str, ...]
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def is_like(self, other: Leaf) -> bool:
        return (self.dtype, self.shape) == (other.dtype, other.shape)

    @property
    def name(self) -> str:
        return show_key(self.key)


def show_key(key: tuple[str, ...]) -> str:
    """Return a key as a user writes it: ``'action'``, ``('next', 'reward')``."""
    return repr(key[0] if len(key) == 1 else key)


def walk(
    data: Mapping[str, object] | TensorDictBase, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in (
        entries_of(data) if isinstance(data, TensorDictBase) else data
    ).items():
        if isinstance(value, TensorDictBase | Mapping) and not is_non_tensor(value):
            yield from walk(value, (*path, name))
        else:
            yield (*path, name), value


_WIDE = (torch.int32, torch.int64, torch.uint32, torch.uint64, torch.float64)


def refuse_rounding(
    key: tuple[str, ...], values: torch.Tensor, dtype: torch.dtype, remedy: str
) -> None:
    """Raise a SchemaError if a cast to ``dtype`` changes a whole number; fractions may
    be rounded.

    Whole numbers beyond 2**53 in a float64 tensor may be rounded, too: float64 has
    already rounded them.
    """
    if values.dtype not in _WIDE or values.dtype is dtype:
        return
    largest = (
        int(2 / torch.finfo(dtype).eps)
        if dtype.is_floating_point
        else torch.iinfo(dtype).max
    )
    values = values.detach().flatten()
    large = values[~((values >= -largest) & (values <= largest))]
    for value, cast in zip(large.tolist(), large.to(dtype).tolist(), strict=True):
        is_whole = isinstance(value, int) or (
            value.is_integer() and abs(value) <= 2**53
        )
        if is_whole and value != cast:
            kind = str(dtype).removeprefix("torch.")
            remedy = "scale it" if dtype is torch.float64 else remedy
            raise SchemaError(
                f"{show_key(key)} is {int(value)}, which {kind} changes to {cast:.0f}: {remedy}"
            )


def refuse_unpackable(key: tuple[str, ...], value: object) -> None:
    if is_non_tensor(value) or not (
        isinstance(value, torch.Tensor) or is_tensor_collection(value)
    ):
        problem = f"holds non-tensor data ({type(value).__name__}): leave it out"
        taker = "ListStorage"
    elif isinstance(value, torch.Tensor):
        if (
            not value.is_nested
            and value.layout is torch.strided
            and not value.is_quantized
        ):
            return
        problem = "is a nested, sparse or quantized tensor: pad or convert it"
        taker = "ListStorage"
    elif isinstance(value, TensorDictBase):
        return
    else:
        problem = (
            f"is a tensorclass ({type(value).__name__}): store its to_tensordict()"
        )
        taker = "LazyTensorStorage"
    raise SchemaError(
        f"key {show_key(key)} {problem}, or use torchrl.data.{taker}, which takes it"
    )


def reshaped(data: object, reshape: Callable[[Any], Any]) -> Any:
    """Return ``reshape(data)``; raise a SchemaError if an entry is a tensor that cannot
    be reshaped."""
    try:
        return reshape(data)
    except RuntimeError:  # sparse and nested tensors
        if isinstance(data, TensorDictBase):
            refuse_ragged(data)
            for key, value in walk(data):
                refuse_unpackable(key, value)
        raise


def refuse_ragged(data: TensorDictBase, path: tuple[str, ...] = ()) -> None:
    """Raise a SchemaError for lazy stacks, also nested ones, whose members differ in
    keys or shapes."""
    if is_non_tensor(data):
        return
    if not isinstance(data, LazyStackedTensorDict):
        for name, value in entries_of(data).items():
            if isinstance(value, TensorDictBase):
                refuse_ragged(value, (*path, name))
        return
    for member in data.tensordicts:
        refuse_ragged(member, path)
    first, *others = (dict(walk(member, path)) for member in data.tensordicts)
    for other in others:
        for key in {**first, **other}:
            shapes = [
                getattr(leaves[key], "shape", None) if key in leaves else "absent"
                for leaves in (first, other)
            ]
            if shapes[0] != shapes[1]:
                raise SchemaError(
                    f"key {show_key(key)} is ragged: its shape differs between the stacked TensorDicts "
                    f"({shapes[0]} and {shapes[1]}); pad it, or use torchrl.data.LazyStackStorage, which takes it"
                )


def refuse(data: TensorDictBase, leaves: Sequence[Leaf], lead: torch.Size) -> NoReturn:
    refuse_unfit(data, leaves, lead, allows_more=False)
    raise SchemaError(
        f"the nesting of {sorted(data.keys())} differs from that of the rows"
    )


def refuse_unfit(
    data: TensorDictBase, leaves: Sequence[Leaf], lead: torch.Size, *, allows_more: bool
) -> None:
    """Raise a SchemaError if ``data``, ``[*lead, ...]``, does not fit the rows;
    ``allows_more`` allows unknown keys."""
    known = {leaf.key: leaf for leaf in leaves}
    entries = dict(walk(data))
    for key, value in entries.items():
        refuse_unpackable(key, value)
        leaf = known.get(key)
        if leaf is None and (allows_more or key == ("index",)):
            continue
        if leaf is None:
            _refuse_unknown(
                [key for key in entries if key not in known and key != ("index",)],
                leaves,
            )
        if value.is_meta:
            raise SchemaError(
                f"key {show_key(key)} is on the 'meta' device, where tensors hold no data"
            )
        if not has_memory(value):
            raise SchemaError(
                f"key {show_key(key)} has no memory for its {value.numel()} elements: its storage was freed or shrunk, "
                "or the write runs under FakeTensorMode or torch.func.functionalize, where tensors hold no data"
            )
        if value.dtype is not leaf.dtype or value.shape != lead + leaf.shape:
            remedy = "reshape it before writing"
            if value.dtype is not leaf.dtype:
                remedy = f"cast it with .to({leaf.dtype})"
            elif data.ndim > len(lead) and value.shape == data.shape + leaf.shape:
                remedy = f"the data has the batch dims {[*data.shape]}, and this write takes {len(lead)}"
                if len(lead) == 1:
                    remedy += "; rows [T] are extended with data.reshape(-1)"
            raise SchemaError(
                f"key {show_key(key)} came as {kind(value.dtype, value.shape)}, "
                f"expected {kind(leaf.dtype, lead + leaf.shape)}: {remedy}"
            )
    for leaf in leaves:
        if leaf.key not in entries:
            raise SchemaError(
                f"key {leaf.name} is missing, expected as {kind(leaf.dtype, lead + leaf.shape)}: "
                "every write must hold all keys of the rows"
            )


def _refuse_unknown(
    keys: Sequence[tuple[str, ...]], leaves: Sequence[Leaf]
) -> NoReturn:
    names, one = ", ".join(map(show_key, keys)), len(keys) == 1
    raise SchemaError(
        f"unknown key{'' if one else 's'} {names}: the rows hold {', '.join(leaf.name for leaf in leaves)}. "
        f"Leave {'it' if one else 'them'} out with data.exclude({names}), or store {'it' if one else 'them'} from the "
        "first write on. If a collector writes (its init_random_frames lack what a policy adds), first call "
        f"rb.append_transform(ExcludeTransform({names}, inverse=True))"
    )


def refuse_other_index(index: object) -> None:
    """Raise a SchemaError if an entry "index", a tensor or its dtype, cannot hold
    positions of rows."""
    dtype = (
        index
        if isinstance(index, torch.dtype)
        else index.dtype
        if isinstance(index, torch.Tensor)
        else None
    )
    if dtype is not torch.int64:
        taken = "each batch has the positions of its rows (int64) under this name"
        remedy = "store it under another name, data.rename_key_('index', 'my_index')"
        raise SchemaError(
            f"the rows have an entry 'index' of {dtype or 'nested entries'}, but {taken}: {remedy}"
        )


def refuse_index() -> NoReturn:
    """Raise a SchemaError for data with an entry "index"."""
    taken = "the data has an entry 'index', and each batch has the positions of its rows under this name"
    remedy = "store it under another name, data.rename_key_('index', 'my_index')"
    raise SchemaError(
        f"{taken}: {remedy}, or leave it out, data.exclude('index'), if it comes from a sampled batch"
    )


def kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
