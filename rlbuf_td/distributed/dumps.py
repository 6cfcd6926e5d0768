"""Dumps of all shards: the manifest that tells which dumps of shards belong together, and how it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.checkpoint import CheckpointError, load_state, open_checkpoint, save_state
from rlbuf_td.checkpoint.buffer import innermost_state
from rlbuf_td.checkpoint.files import delete_others, is_folder
from rlbuf_td.storages import PackedStorage

_KIND, _FOLDER = "ShardedReplayBuffer", "shards"  # the manifest's kind, and the folder that it lies in
_AT_ONCE = 16 << 20  # bytes of rows that are written at once


@dataclass(frozen=True)
class Manifest:
    """The last complete dump in a folder."""

    dump: str  # the subfolder
    steps: list[int]  # the number of time steps of each shard
    lanes: int
    flow: dict[str, Any] | None  # the state of flow control

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Return the manifest in the folder ``path``; raise a CheckpointError if there is none."""
        found = load_state(path / _FOLDER, _KIND)
        try:
            manifest = cls(**found)
            fits = all(type(number) is int and number >= 0 for number in (manifest.lanes, *manifest.steps))
            fits = fits and is_folder(manifest.dump)
        except TypeError:
            fits = False
        if not fits:
            raise CheckpointError(f"{path} does not say which dumps of shards belong together: {found}")
        return manifest

    @classmethod
    def last(cls, path: Path) -> Manifest | None:
        try:
            return cls.read(path)
        except CheckpointError:
            return None

    def commit(self, path: Path) -> None:
        """Replace the manifest, which makes a dump the valid one; then delete the other dumps in the folder."""
        save_state(path / _FOLDER, _KIND, asdict(self))
        delete_others(path / self.dump)


def shard_name(place: int) -> str:
    return f"shard-{place:04d}"


def newest_dump(path: Path, place: int, shards: int) -> str | None:
    """Return the folder of one shard in the last complete dump of ``shards`` shards, or None if there is none."""
    manifest = Manifest.last(path)
    if manifest is None or len(manifest.steps) != shards:
        return None
    return str(path / manifest.dump / shard_name(place))


def end_trajectories(storage: PackedStorage) -> None:
    """End all open trajectories, so that the rows written next do not continue them."""
    if storage.episodes is not None:
        storage.episodes.end()


def extend_by(buffer: ReplayBuffer, dumps: Sequence[tuple[str, int]], first: int, last: int) -> None:
    """Write rows of dumps, and their priorities, to a buffer: time steps ``first`` to ``last`` of all dumps in order.

    ``dumps``: the folder of each shard's dump, and its number of time steps.
    """
    for folder, steps in dumps:
        low, high = max(first, 0), min(last, steps)
        first, last = first - steps, last - steps
        if low >= high:
            continue
        found = open_checkpoint(folder)
        source, state = found.storage, innermost_state(found.sampler)
        if source is None or int(source.ring.count[0]) != steps:
            raise CheckpointError(f"{folder} does not hold the {steps} time steps that the manifest says")
        ring, prioritized = source.ring, buffer._initialize().prioritized
        if prioritized is not None:
            prioritized.alpha = state["alpha"]
        end_trajectories(buffer.storage)
        slots = (torch.arange(low, high, device="cpu") + int(ring.tail[0])) % ring.steps
        for part in slots.split(max(1, _AT_ONCE // (source.row_bytes * ring.lanes))):
            rows = source.get(part)
            index = buffer.extend(rows if source.ndim == 1 else rows.transpose(0, 1), update_priority=False)
            if prioritized is not None:
                cells = (part[:, None] * ring.lanes + torch.arange(ring.lanes, device="cpu")).flatten()
                magnitude = state["priorities"]["magnitude"][cells]
                prioritized.priorities.assign(index, magnitude, buffer.storage, counts=False)
        if prioritized is not None:
            prioritized.priorities.largest = max(prioritized.priorities.largest, float(state["largest"]))
