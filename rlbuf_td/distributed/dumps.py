"""Dumps of all shards: their folder, and how to load them into any number of shards.

The folder has a subfolder for each dump, and a manifest that names the last complete one. A dump is written beside the
previous one, and becomes valid when the manifest is replaced. An interrupted dump leaves the previous one as it was,
and rows of two dumps are never mixed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch

from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.checkpoint import open_checkpoint
from rlbuf_td.checkpoint.files import DATA
from rlbuf_td.checkpoint.manifest import MANIFEST as SHARD_MANIFEST
from rlbuf_td.checkpoint.manifest import CheckpointError
from rlbuf_td.storages import PackedStorage

#: Time steps of a dump: folder of the dump, first time step (0 is the oldest), number of time steps (None: all).
Segment: TypeAlias = tuple[str, int, int | None]
_MANIFEST = "shards.json"
_SUBFOLDER = re.compile(r"shards-(\d{6,})")


@dataclass(frozen=True)
class Manifest:
    """The last complete dump in a folder."""

    steps: list[int]  # the number of time steps of each shard
    lanes: int
    dump: str | None  # the subfolder; None: the shards are in the folder itself, as in dumps of earlier versions
    flow: dict[str, Any] | None  # the state of flow control


def shard_folder(path: Path, dump: str | None, place: int) -> Path:
    return (path if dump is None else path / dump) / f"shard-{place:04d}"


def read(path: Path) -> Manifest:
    """Return the manifest in the folder ``path``; raise a CheckpointError if there is none."""
    try:
        found = json.loads((path / _MANIFEST).read_text())
        steps, lanes, dump = found["steps"], found["lanes"], found.get("dump")
        fits = all(type(number) is int and number >= 0 for number in (lanes, *steps))
        fits = fits and (dump is None or _SUBFOLDER.fullmatch(dump) is not None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise CheckpointError(f"there is no dump of a ShardedReplayBuffer in {path}")
    return Manifest(steps, lanes, dump, found.get("flow"))


def last_complete(path: Path) -> Manifest | None:
    try:
        return read(path)
    except CheckpointError:
        return None


def newest_dump(path: Path, place: int, shards: int) -> Path | None:
    """Return the folder of one shard in the last complete dump of ``shards`` shards, or None if there is none."""
    manifest = last_complete(path)
    if manifest is None or len(manifest.steps) != shards:
        return None
    return shard_folder(path, manifest.dump, place)


def new_name(path: Path) -> str:
    numbers = [int(found[1]) for each in path.iterdir() if (found := _SUBFOLDER.fullmatch(each.name))]
    return f"shards-{1 + max(numbers, default=0):06d}"


def reuse(folder: Path, previous: Path | None) -> None:
    """Link the files of a shard's previous dump into a new folder, so that unchanged data is not written again."""
    folder.mkdir(parents=True, exist_ok=True)
    if previous is None or not (previous / SHARD_MANIFEST).is_file() or (folder / DATA).exists():
        return
    with suppress(OSError):  # a file system without hard links: all data is written
        (folder / DATA).mkdir()
        for file in (previous / DATA).iterdir():
            os.link(file, folder / DATA / file.name)
        os.link(previous / SHARD_MANIFEST, folder / SHARD_MANIFEST)


def commit(path: Path, manifest: Manifest) -> None:
    """Replace the manifest, which makes a dump the valid one; then delete the other dumps in the folder."""
    previous = last_complete(path)
    temporary = path / f"{_MANIFEST}.{manifest.dump}"
    with open(temporary, "w") as file:
        json.dump(asdict(manifest), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path / _MANIFEST)
    outdated = [each for each in path.iterdir() if _SUBFOLDER.fullmatch(each.name) and each.name != manifest.dump]
    if previous is not None and previous.dump is None:
        outdated += [shard_folder(path, None, place) for place in range(len(previous.steps))]
    for folder in outdated:
        shutil.rmtree(folder, ignore_errors=True)


def deal(steps: Sequence[int], shards: int) -> list[list[tuple[int, int, int]]]:
    """Return each shard's segments, ``(number of the dump, first time step, number of time steps)``.

    Example:
        >>> deal([4, 2], 3)
        [[(0, 0, 2)], [(0, 2, 2)], [(1, 0, 2)]]
    """
    total, dealt = sum(steps), []
    bounds = [round(place * total / shards) for place in range(shards + 1)]
    for first, last in pairwise(bounds):
        segments, begin = [], 0
        for dump, count in enumerate(steps):
            low, high = max(first, begin), min(last, begin + count)
            if low < high:
                segments.append((dump, low - begin, high - low))
            begin += count
        dealt.append(segments)
    return dealt


def end_trajectories(storage: PackedStorage) -> None:
    """End all open trajectories, so that the rows written next do not continue them."""
    if storage.episodes is not None:
        storage.episodes.end()


def load_segments(buffer: ReplayBuffer, segments: Sequence[Segment]) -> None:
    """Fill a new buffer with the rows and priorities of ``segments``."""
    if len(segments) == 1 and segments[0][1:] == (0, None):
        return buffer.loads(segments[0][0], progress=False)
    for folder, first, count in segments:
        found = open_checkpoint(folder, progress=False)
        if found.rows is None:
            continue
        state: dict[str, Any] = found.sampler
        while "sampler" in state:
            state = state["sampler"]
        steps, capacity = found.rows.batch_size[0], found.shape[0]
        oldest = found.writer["_cursor"] if steps == capacity else 0
        chosen = (torch.arange(first, steps if count is None else first + count, device="cpu") + oldest) % steps
        end_trajectories(buffer.storage)
        rows = found.rows[chosen]
        index = buffer.extend(rows if buffer.storage.ndim == 1 else rows.transpose(0, 1), update_priority=False)
        prioritized = buffer._initialize().prioritized
        if prioritized is not None:
            lanes = rows.shape[1:].numel() if buffer.storage.ndim > 1 else 1
            magnitude = state["priorities"]["magnitude"][: steps * lanes].view(steps, lanes)[chosen].flatten()
            prioritized.alpha = state["alpha"]
            priorities = prioritized.priorities
            priorities.assign(index, magnitude, None, buffer.storage, counts=False)
            priorities.largest = max(priorities.largest, float(state["largest"]))
