"""What a wrong argument of a buffer's constructor was meant to be."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from functools import cache

from torchrl.data.replay_buffers import ReplayBuffer as TorchRLBuffer
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td import samplers, storages, writers

_SIZES = "capacity", "max_size", "max_capacity", "size", "buffer_size", "replay_size"


def refuse_positional(cls: type, args: Collection[object]) -> None:
    """Raise a TypeError if a buffer's class takes keywords only, and ``args`` are
    given."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    parameters = [*inspect.signature(cls.__init__).parameters.values()][1:]
    if not args or any(parameter.kind in kinds for parameter in parameters):
        return
    raise TypeError(
        f"{cls.__name__} takes keywords only, got {', '.join(map(repr, args))}: its capacity is that of its storage, "
        f"{cls.__name__}(storage=PackedStorage(100_000))"
    )


def refuse_unknown(cls: type, names: Iterable[str]) -> None:
    """Raise a TypeError if a buffer has no keyword of one of these names; say which
    part has it."""
    for name in names:
        if name not in _known():
            makes = getattr(cls, "makes_parts", frozenset())
            meant = _meant(name, makes)
            raise TypeError(f"{cls.__name__} has no keyword {name}=: {meant}")


@cache
def _known() -> frozenset[str]:
    signatures = (
        inspect.signature(owner.__init__).parameters
        for owner in (TorchRLBuffer, TensorDictReplayBuffer)
    )
    return frozenset().union(*signatures)


def _meant(name: str, makes: Collection[str]) -> str:
    """Return which part has a keyword of this name, except parts that a buffer
    ``makes`` itself."""
    if name in _SIZES:
        return "its capacity is that of its storage, storage=PackedStorage(100_000)"
    rooms = {"storage": storages, "sampler": samplers, "writer": writers}
    parts = [
        (part, owner)
        for part, room in rooms.items()
        if part not in makes
        for owner in room.__all__
        if name in _parameters(getattr(room, owner))
    ]
    if not parts:
        known = sorted(_known() - {"self", "kwargs"})
        return f"there are also those of TorchRL's buffers, {', '.join(known)}"
    part, owner = parts[0]
    others = ", ".join(other for _, other in parts[1:])
    also = f" (also of {others})" if others else ""
    return f"it is one of {owner}{also}; pass it there, {part}={owner}(..., {name}=...)"


def _parameters(owner: object) -> Collection[str]:
    is_part = inspect.isclass(owner) and not inspect.isabstract(owner)
    return inspect.signature(owner.__init__).parameters if is_part else ()


def refuse_class(name: str, part: object) -> None:
    """Raise a TypeError if ``part`` is a class that cannot be made without
    arguments."""
    if not inspect.isclass(part):
        return
    try:
        inspect.signature(part.__init__).bind(None)
    except TypeError as error:
        raise TypeError(
            f"{name}= takes an object, got the class {part.__name__}: make one, {name}={part.__name__}(...) ({error})"
        ) from None
