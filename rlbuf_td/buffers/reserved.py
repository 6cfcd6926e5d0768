"""Completes reserved rows before processes share them, because the first write to shared rows cannot add entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase

from rlbuf_td.storages.schema import walk
from rlbuf_td.storages.trajectory_index import TRAJ_KEY
from rlbuf_td.writers.rollout import RolloutWriter


def for_environment(cls: Any, schema: TensorDictBase, capacity: int, kwargs: dict[str, Any]) -> Any:
    """Return a buffer from ``schema``, whose rows get trajectory ids when they are shared."""
    if kwargs.get("shared"):
        schema = _with_missing(schema, _trajectory_ids(schema.batch_size))
    rb = cls.from_schema(schema, capacity, **kwargs)
    rb.has_environment = True
    return rb


def complete_reserved(rb: Any) -> None:
    """Add the entries that recorders, collectors and the writer will write to the reserved rows of a buffer."""
    storage, layout = rb.storage, rb.storage.layout
    schema = layout.unpack(torch.empty((*storage.lanes, layout.row_bytes), dtype=torch.uint8, device="meta"))
    more = rb.writer.added_entries(schema) if isinstance(rb.writer, RolloutWriter) else {}
    if rb.has_environment:
        more |= _trajectory_ids(storage.lanes)
    complete = _with_missing(schema, more)
    if len(list(walk(complete))) > len(layout.leaves):
        storage.release()
        storage.reserve(complete)


def with_trajectory_ids(rb: Any, data: TensorDictBase, dims: int) -> TensorDictBase:
    """Return data whose first ``dims`` dims index rows; if only the shared rows have trajectory ids, with ids of 0.

    A loop of one's own writes no ids. Its trajectories then end at the done flags.
    """
    layout = rb.storage.layout
    if layout is None or TRAJ_KEY not in layout.places or data.get(TRAJ_KEY, None) is not None:
        return data
    ids = torch.zeros(data.batch_size[:dims], dtype=torch.int64, device="cpu")
    return data.copy().set(TRAJ_KEY, ids)


def _trajectory_ids(lanes: torch.Size) -> dict[NestedKey, torch.Tensor]:
    return {TRAJ_KEY: torch.empty(lanes, dtype=torch.int64, device="meta")}


def _with_missing(schema: TensorDictBase, more: Mapping[NestedKey, torch.Tensor]) -> TensorDictBase:
    """Return a copy of ``schema`` with the entries of ``more`` that it lacks."""
    schema = schema.copy()
    for key, value in more.items():
        if schema.get(key, None) is None:
            schema.set(key, value)
    return schema
