"""What recorders save and restore to go on in mid-episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.envs.infos import to_array
from rlbuf_td.envs.spaces import Key, entries
from rlbuf_td.envs.trajectory_numbers import TrajectoryNumbers
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.schema import kind, show_key
from rlbuf_td.storages.torchrl_parts import listeners_of
from rlbuf_td.storages.trajectory_index import TrajectoryIndex


def copied(observation: Any) -> Any:
    """Return a copy of an observation as a tensor, or as nested dicts of tensors, with the dtypes that it has."""
    parts = entries(observation)
    if parts is not None:
        return {key: copied(part) for key, part in parts.items()}
    array = to_array(observation)
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))


def refuse_other(own: Mapping[str, Any], saved: Mapping[str, Any], whose: str) -> None:
    """Raise a ValueError if two dicts of settings differ."""
    for name, mine in own.items():
        if name not in saved or saved[name] != mine:
            raise ValueError(f"{whose} has {name} {saved.get(name)!r}, this recorder {mine!r}")


def array_of(state: Mapping[str, Any], name: str, like: np.ndarray) -> np.ndarray:
    """Return a copy of a saved tensor as an array; raise a ValueError unless it has the shape and dtype of ``like``."""
    found = state[name].numpy()
    if (found.shape, found.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"the saved {name} are {found.dtype} of shape {found.shape}, expected {like.dtype} {like.shape}"
        )
    return found.copy()


def buffer_state(buffer: Any, numbers: TrajectoryNumbers) -> dict[str, Any]:
    """Return what a load of the buffer forgets because other recorders could go on, and what identifies its rows."""
    stats = buffer.episode_stats
    return {
        "write_count": int(buffer.write_count),
        "next_number": numbers.next_number,
        "stats": None if stats is None else stats.state_dict(),
    }


def refuse_other_rows(buffer: Any, saved: Mapping[str, Any]) -> None:
    """Raise a ValueError if the buffer does not hold the rows that it held when the state was saved."""
    count = saved["write_count"]
    if type(count) is not int or type(saved["next_number"]) is not int or count != buffer.write_count:
        has = f"the buffer's write_count is {buffer.write_count}, and was {count} when the state was saved"
        raise ValueError(f"{has}: load the buffer first, from a dump of the same moment")


def resume_buffer(buffer: Any, numbers: TrajectoryNumbers, saved: Mapping[str, Any]) -> None:
    """Let the next rows continue the trajectories and the statistics of the newest rows, which a load has ended."""
    if buffer.episode_stats is not None and saved["stats"] is not None:
        buffer.episode_stats.load_state_dict(saved["stats"])
    numbers.go_on(saved["next_number"])
    for each in listeners_of(buffer.storage):
        if isinstance(each, TrajectoryIndex):
            each.resume()


def saved_rows(layout: RowLayout) -> list[list[Any]]:
    """Return the entries of rows as plain values, in the order in which rows hold them."""
    return [[[*leaf.key], str(leaf.dtype).removeprefix("torch."), [*leaf.shape]] for leaf in layout.leaves]


def schema_of_rows(rows: list[list[Any]], lanes: int, expected: TensorDict, storage: Any) -> TensorDict:
    """Return the schema, ``[E]``, of saved rows; raise a ValueError if it lacks entries of ``expected`` or the storage.

    The shapes of rewards may differ from the expected ones, because the first step tells them.
    """
    schema = TensorDict({}, [lanes])
    for key, dtype, shape in rows:
        schema.set(tuple(key), torch.empty((lanes, *shape), dtype=getattr(torch, dtype), device="meta"))
    stored = getattr(getattr(storage, "layout", None), "places", {}) if len(storage) else {}
    for key in expected.keys(True, True):
        path: Key = key if isinstance(key, tuple) else (key,)
        found, wanted = schema.get(path, None), expected[path]
        if found is None or found.dtype is not wanted.dtype or ("reward" not in path and found.shape != wanted.shape):
            got = None if found is None else kind(found.dtype, found.shape[1:])
            raise ValueError(
                f"the saved rows have {show_key(path)} as {got}, here {kind(wanted.dtype, wanted.shape[1:])}"
            )
    for path, place in stored.items():
        leaf, found = storage.layout.leaves[place], schema.get(path, None)
        if found is not None and (found.dtype, found.shape[1:]) != (leaf.dtype, leaf.shape):
            given, rows_hold = kind(found.dtype, found.shape[1:]), kind(leaf.dtype, leaf.shape)
            raise ValueError(f"the saved rows have {show_key(path)} as {given}, the buffer's rows as {rows_hold}")
    return schema
