"""The parts of a mixture's batch: draws of its members, whose rows must have the same entries."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tensordict import TensorDictBase

from rlbuf_td.buffers.flow import permission
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.storages import SchemaError
from rlbuf_td.storages.indexing import flat_rows, merge_
from rlbuf_td.storages.schema import kind, show_key
from rlbuf_td.storages.trajectory_index import as_tuple


def largest_weight(member: ReplayBuffer, part: TensorDictBase) -> float | None:
    """Return the number that the weights of a member were divided by; None if they were not divided."""
    sampler, storage = member._parts.prioritized, member.storage
    if sampler is None or sampler.weight_norm is None:
        return None
    rows = flat_rows(part.get("anchor_index", part["index"]), storage, sampler.device)
    probability = sampler.probability(rows)
    likeliest = probability.argmax()  # fresh rows may have probability 0
    weight = (len(storage) * probability[likeliest]) ** -sampler.beta
    return float(weight / part["priority_weight"][likeliest])


def part_of(member: ReplayBuffer, count: int) -> TensorDictBase:
    """Return a batch of a member with its sampler's report."""
    member._initialize()
    if member.flow is None:
        part, info = member._sample(count)
    else:
        with permission(member, count, False, None):
            part, info = member._sample(count)
    if "index" not in part.keys():  # TorchRL's general path adds the report later
        merge_(part, info)
    return part


def index_of(member: ReplayBuffer, part: TensorDictBase) -> TensorDictBase:
    """Restore the index of rows ``[T]``, which has a lane in batches with rows ``[T, E]`` of other members."""
    if part["index"].ndim > 1 and member.storage.ndim == 1:
        part["index"] = part["index"][:, 0]
    return part


def settled_rows(storage: Any) -> Any:
    """Return the rows of a storage; None before the first write, which may still add keys to reserved rows."""
    return None if getattr(storage, "is_reserved", False) else getattr(storage, "rows", None)


def kinds(data: TensorDictBase) -> dict[tuple[str, ...], Any]:
    items = data.items(include_nested=True, leaves_only=True)
    return {as_tuple(key): (value.dtype, value.shape[data.ndim :]) for key, value in items}


def refuse_difference(members: dict[str, dict[tuple[str, ...], Any]], reserved: Collection[str] = ()) -> None:
    """Raise a SchemaError that names the first entry in which a member differs from the first member.

    The first write may add entries to the schema of a ``reserved`` member.
    """
    if not members:
        return
    (first, known), *others = members.items()
    for name, found in others:
        for key in sorted(known.keys() | found.keys()):
            comes_later = any(who in reserved and key not in each for who, each in ((first, known), (name, found)))
            if comes_later or known.get(key) == found.get(key):
                continue
            words = [
                f"{kind(*each[key])} in {who!r}" if key in each else f"missing in {who!r}"
                for who, each in ((first, known), (name, found))
            ]
            raise SchemaError(f"members must hold the same entries: {show_key(key)} is {words[0]}, {words[1]}")
