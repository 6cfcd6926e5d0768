"""Functions that draw, check and convert the rows of a mixture's members."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Sampler, SliceSampler

from rlbuf_td.buffers.experience_queue import ExperienceQueue
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.checkpoint.parts import load_or_restore
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.strata import LEAST_RATIO
from rlbuf_td.samplers import EpisodeSampler, SequenceSampler
from rlbuf_td.samplers.common import refuse_errors, refuse_priorities, stored_names
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.storages import PackedStorage, SchemaError
from rlbuf_td.storages.indexing import device_of, flat_rows, merge_, row_count
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.schema import kind, show_key
from rlbuf_td.storages.torchrl_parts import columns_of


def normalizer_of(member: ReplayBuffer, report: Mapping[Any, Any] | None) -> float | None:
    """Return the largest importance weight of a member, by which the member divides its weights; None: no division.

    ``report`` is the sampler's report of the member's rows in the batch, or None if the batch has no row of the member.
    """
    sampler, rows = member._initialize().prioritized, row_count(member.storage)
    if sampler is None or not rows or sampler.weight_norm is None:
        return None
    if sampler.weight_norm == "buffer":  # of all rows, drawn or not
        with member._locked():
            return float((rows * sampler.least_probability()) ** -sampler.beta)
    if report is None or "priority_weight" not in report:
        return None
    drawn = flat_rows(report.get("anchor_index", report["index"]), member.storage, sampler.device)
    probability = sampler.probability(drawn)
    likeliest = probability.argmax()
    if not probability[likeliest] > 0.0:  # all rows are fresh, and are never drawn otherwise
        return 1.0
    weight = (rows * probability[likeliest]) ** -sampler.beta
    return float(weight / report["priority_weight"][likeliest].clamp(min=LEAST_RATIO))  # which may have underflowed


def refuse_members(members: Any, shares: Any, writes_to: str | None) -> None:
    """Raise a TypeError or a ValueError for the arguments of a mixture that cannot work."""
    if not (isinstance(members, Mapping) and isinstance(shares, Mapping)):
        given = f"got {type(members).__name__} and {type(shares).__name__}"
        example = '{"demos": 0.5, "online": 0.5}'
        raise TypeError(
            f'members must be a dict of buffers by name, such as {{"demos": rb1, "online": rb2}}, and shares a dict of '
            f"numbers, such as {example}, {given}"
        )
    for name, member in members.items():
        refuse_member(name, member)
    if not members or members.keys() != shares.keys() or (writes_to is not None and writes_to not in members):
        given = f"members are {[*members]}, shares are of {[*shares]}, writes_to={writes_to!r}"
        raise ValueError(f"members and shares must have the same names: {given}")


def refuse_member(name: Any, member: Any) -> None:
    if not isinstance(member, ReplayBuffer):
        remedy = "copy its rows, ReplayBuffer.from_torchrl(member)"
        raise TypeError(f"member {name!r} must be a ReplayBuffer, got {type(member).__name__}: {remedy}")
    if isinstance(member, ExperienceQueue):
        raise TypeError(f"member {name!r} is an ExperienceQueue, which gives each row once: sample it apart")
    if isinstance(member.sampler, EpisodeSampler):
        reason = "whose batches have no fixed number of rows"
        raise TypeError(f"member {name!r} has an EpisodeSampler, {reason}: sample it apart, or use a SequenceSampler")
    sampler = getattr(member.sampler, "innermost", member.sampler)
    if isinstance(sampler, PrioritizedSampler) and member._initialize().prioritized is None:
        raise TypeError(f"member {name!r} has TorchRL's PrioritizedSampler: use a ProportionalSampler")


def refuse_entries(members: Mapping[str, ReplayBuffer]) -> None:
    """Raise a SchemaError if a member stores an entry that batches of the mixture use for something else."""
    is_weighted = any(member._initialize().prioritized is not None for member in members.values())
    adds = {"source"} | (Prioritized.report_keys if is_weighted else set())
    for name, member in members.items():
        for key in stored_names(member.storage).keys() & adds:
            remedy = f"store it under another name, data.rename_key_({key!r}, 'my_{key}')"
            raise SchemaError(f"member {name!r} stores the key {key!r}, which the mixture adds to batches: {remedy}")


class MemberRows(NamedTuple):
    """The rows that a member provides for a batch."""

    rows: TensorDictBase  # with the sampler's report
    normalizer: float | None  # see :func:`normalizer_of`
    stamps: Tensor | None  # of the rows; None if their storage has none


def draw_rows_of(member: ReplayBuffer, count: int) -> MemberRows:
    """Draw ``count`` rows from a member, and transform them."""
    with member._futures_lock, member._locked():  # priorities must not change before the normalizer is known
        batch, report = member._drawn(count)
        normalizer = normalizer_of(member, report)
        stamps = member.storage.stamps(report["index"]) if batch.ndim == 1 else None
    if not member.include_info:
        merge_(batch, report)
    rows = member._finish(batch, report)[0]
    if rows.ndim != 1:
        inner = [*rows.shape[1:]]
        raise ValueError(f"members must store single transitions, these rows have further batch dims, {inner}")
    return MemberRows(without_lane(member, rows), normalizer, stamps)  # TorchRL's slices have an index [B, 1]


def largest_normalizer(members: Mapping[str, ReplayBuffer], drawn: Mapping[str, float | None]) -> float:
    """Return the largest normalizer of all members; 1 if a member has ``weight_norm=None``.

    ``drawn`` has the normalizers of the members with rows in the batch.
    """
    samplers = [member._initialize().prioritized for member in members.values()]
    if any(sampler is not None and sampler.weight_norm is None for sampler in samplers):
        return 1.0
    known = [*drawn.values(), *(normalizer_of(member, None) for name, member in members.items() if name not in drawn)]
    return max([number for number in known if number is not None] + [1.0] * (None in samplers), default=1.0)


def window_of(sampler: Sampler) -> int:
    """Return a number that must divide the batch size: the length of windows or slices, the number of slices, or 1."""
    if isinstance(sampler, SequenceSampler):
        return sampler.window
    return (sampler.slice_len or sampler.num_slices) if isinstance(sampler, SliceSampler) else 1


INDICES = "index", "anchor_index"


def with_lane(rows: TensorDictBase) -> dict[str, Tensor]:
    """Return index entries ``[B]`` as ``[B, 2]``, (time step, lane); the lane is 0."""
    flat = {key: rows[key] for key in INDICES if key in rows.keys() and rows[key].ndim == 1}
    return {key: torch.stack((index, torch.zeros_like(index)), -1) for key, index in flat.items()}


def without_lane(member: ReplayBuffer, rows: TensorDictBase) -> TensorDictBase:
    """Undo :func:`with_lane` if the member has ``ndim=1``."""
    for key in INDICES:
        if member.storage.ndim == 1 and key in rows.keys() and rows[key].ndim > 1:
            rows[key] = rows[key][:, 0]
    return rows


def members_of(batch: TensorDictBase, names: Sequence[str]) -> dict[str, Tensor]:
    """Map each member's name to a bool mask of its rows in a batch ``[B]``; omit members without rows."""
    source = batch.get("source", None)
    if source is None:
        raise KeyError("the batch has no 'source', the member of each row: pass a batch of this mixture")
    if source.ndim != 1 or source.is_floating_point() or ((source < 0) | (source >= len(names))).any():
        found = f"{source.dtype} {source.unique().tolist()} of shape {[*source.shape]}"
        raise IndexError(f"'source' must hold one position in {[*names]} per row, [B] int64, got {found}")
    masks = {name: source == place for place, name in enumerate(names)}
    return {name: is_own for name, is_own in masks.items() if is_own.any()}


def own_errors(member: ReplayBuffer, batch: TensorDictBase, is_own: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the index of a member's rows in a batch ``[B]``, their TD errors, and their stamps.

    Other rows are left out, or have the index -1.
    """
    parts = member.parts
    batch = without_lane(member, batch.copy() if parts.wrapper is None else batch[is_own])
    index, td_error, stamp = parts.errors_of(batch, batch.ndim, member.priority_key)
    if parts.wrapper is None:
        index = torch.where(is_own[:, None] if index.ndim > 1 else is_own, index, -1)
        td_error = torch.where(is_own, td_error, 0)
    return index, td_error, stamp


def refuse_update(member: ReplayBuffer, index: Tensor, td_error: Tensor, stamp: Tensor | None) -> None:
    """Raise the error that an update of a prioritized member's priorities would raise."""
    storage = member.storage
    flat, rows = flat_rows(index, storage, device_of(storage)), len(storage)
    if stamp is not None:
        flat, _ = storage.skip_stale(flat, stamp)
    if backend_of(flat) == "numba" and backend_of(td_error) == "numba" and len(flat):
        refuse_errors(td_error.reshape(-1))
        if not -1 <= int(flat.min()) <= int(flat.max()) < rows:
            refuse_priorities(flat, td_error, rows)


def try_states(members: Mapping[str, ReplayBuffer], states: Mapping[str, Any]) -> None:
    """Raise an error if a member cannot load its state; leave all members unchanged."""
    if states.keys() != members.keys():
        raise ValueError(f"the state is of members {[*states]}, the mixture has {[*members]}")
    for name, member in members.items():
        state = states[name]
        member._initialize()
        with member._locked():
            member.storage.examine(state["_storage"])
            parts = {"_transforms": member.transform, "_writer": member.writer, "_sampler": member.sampler}
            before = {key: copy.deepcopy(part.state_dict()) for key, part in parts.items()}
            load_or_restore(parts, state)
            load_or_restore(parts, before)


def written_columns(storage: PackedStorage) -> Any:
    """Return the rows of a storage, or None before the first write."""
    return None if storage.is_reserved else columns_of(storage)


def kinds(data: TensorDictBase) -> dict[tuple[str, ...], Any]:
    items = data.items(include_nested=True, leaves_only=True)
    return {as_tuple(key): (value.dtype, value.shape[data.ndim :]) for key, value in items}


def refuse_difference(members: dict[str, dict[tuple[str, ...], Any]], reserved: Collection[str] = ()) -> None:
    """Raise a SchemaError if members differ in keys, dtypes or shapes; members in ``reserved`` may lack keys."""
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
