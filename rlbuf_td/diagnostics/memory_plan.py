"""Compute the memory that a buffer will need, and whether it fits into the free
memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
)

from rlbuf_td.envs.specs import schema_of
from rlbuf_td.samplers import ProportionalSampler, RankSampler, UniformSampler
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import whole
from rlbuf_td.storages.dedup import DedupLayout, DedupOptions
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.memory_budget import SHARED, Room, room_for, show_bytes
from rlbuf_td.storages.schema import Leaf, show_key
from rlbuf_td.storages.torchrl_parts import stored_rows

# with any of them, rows mark the ends of trajectories
_ENDS = "done", "terminated", "truncated", "traj_ids"
SAMPLERS: dict[str, type] = {
    "uniform": UniformSampler,
    "proportional": ProportionalSampler,
    "rank": RankSampler,
}


@dataclass(frozen=True)
class MemoryPlan:
    """The result of :func:`~rlbuf_td.plan`: the bytes that a full buffer needs, and the free
    memory."""

    capacity: int  # rows, rounded up to whole time steps of all lanes
    leaves: tuple[Leaf, ...]  # the keys, dtypes and shapes of a row, the largest first
    row_bytes: int  # bytes of a row, with padding
    priorities: int  # bytes of the sampler's state
    # bytes of the trajectory index, which is created at its first use
    trajectories: int
    place: Room  # where the rows are, with the free memory
    memory: Room  # where priorities and trajectory index are, with the free memory
    dedup: DedupLayout | None = None  # which keys are deduplicated, if any

    @property
    def keys(self) -> dict[str, int]:
        """Bytes of each key over all rows, in descending order."""
        return {leaf.name: leaf.nbytes * self.capacity for leaf in self.leaves}

    @property
    def rows(self) -> int:
        """Bytes of all rows, with padding. Deduplicated keys may need more where
        trajectories begin or end."""
        if self.dedup is None:
            return self.capacity * self.row_bytes
        return self.capacity * (
            self.dedup.stored.row_bytes
            + sum(group.nbytes for group in self.dedup.groups)
        )

    @property
    def saved(self) -> dict[str, int]:
        """Bytes that deduplication saves, by key."""
        if self.dedup is None:
            return {}
        saved = self.dedup.saved_bytes(
            self.capacity, [self.capacity] * len(self.dedup.groups)
        )
        return {show_key(key): nbytes for key, nbytes in saved.items()}

    @property
    def total(self) -> int:
        return self.rows + self.priorities + self.trajectories

    @property
    def fits(self) -> bool:
        """Whether the buffer fits into the free memory; true if the free memory is
        unknown."""
        return all(room.free is None or need <= room.free for room, need in self._needs)

    @property
    def most_rows(self) -> int | None:
        """Approximately the largest capacity that fits into the free memory; ``None``
        if the free memory is unknown."""
        needs = [(room.free, need) for room, need in self._needs if need]
        limits = [
            int(free / need * self.capacity) for free, need in needs if free is not None
        ]
        return min(limits, default=None)

    @property
    def remedy(self) -> str:
        """Suggestions for a buffer that does not fit, one per line; empty if the buffer
        fits."""
        if self.fits:
            return ""
        largest = self.leaves[0]
        ways = [f"use a capacity of at most {self.most_rows:,}"]
        if not self.place.location.startswith("disk"):
            ways.append("keep the rows in a file, on the CPU: scratch_dir=...")
        share = largest.nbytes / self.row_bytes
        smaller = f"make the rows smaller: {largest.name} is {share:.0%} of them"
        if largest.dtype.is_floating_point and len(largest.shape) > 2:
            smaller += f"; images stored as uint8 take {1 / largest.dtype.itemsize:.0%} of their memory as floats"
        ways.append(smaller)
        if self.dedup is None and self._holds_observations_twice:
            ways.append("store observations once: share_next=True")
        return "\n".join(ways)

    @property
    def _holds_observations_twice(self) -> bool:
        keys = {leaf.key for leaf in self.leaves}
        return any(
            ("next", *leaf.key) in keys and leaf.nbytes >= 16 for leaf in self.leaves
        )

    @property
    def _needs(self) -> list[tuple[Room, int]]:
        """The bytes that the buffer needs in each memory."""
        if self.place.location == self.memory.location:
            return [(self.place, self.total)]
        # what lies in /dev/shm takes RAM, too
        rows = self.total if self.place.location == "RAM" else self.rows
        return [(self.place, rows), (self.memory, self.priorities + self.trajectories)]

    def __str__(self) -> str:
        sizes = dict(self.keys)
        for key, nbytes in self.saved.items():
            sizes[f"{key} shared"] = -nbytes
        sums = {
            "padding": self.rows - sum(sizes.values()),
            "rows": self.rows,
            "priorities": self.priorities,
            "trajectory index": self.trajectories,
            "total": self.total,
        }
        width = max(map(len, [*sizes, *sums]))
        lines = [
            f"{self.capacity:,} rows of {self.row_bytes:,} bytes: {show_bytes(self.total)}",
            "",
            _line("".ljust(width), "bytes/row", "all rows"),
        ]
        for name, nbytes in sizes.items():
            line = self._size(name.ljust(width), nbytes)
            lines.append(f"{line}{nbytes / self.rows:>8.0%}")
        lines += [self._size(name.ljust(width), sums[name]) for name in sums]
        fits = "fits" if self.fits else "does not fit"
        lines += ["", f"{self.place.words()}: {fits}"]
        if not self.fits:
            ways = [f"  - {way}" for way in self.remedy.splitlines()]
            lines += ["", "What to do:", *ways]
        return "\n".join(lines)

    def _size(self, name: str, nbytes: int) -> str:
        """Return a line of the table."""
        digits = 2 if nbytes % self.capacity else 0
        number = f"{nbytes / self.capacity:,.{digits}f}"
        sign = "-" if nbytes < 0 else ""
        return _line(name, number, sign + show_bytes(abs(nbytes)))


def _line(name: str, number: str, size: str) -> str:
    return f"  {name}{number:>14}{size:>14}"


def plan(
    source: Any,
    capacity: int | None = None,
    *,
    sampler: Sampler | type[Sampler] | str | None = None,
    device: torch.device | str | None = None,
    scratch_dir: str | Path | None = None,
    shared: bool = False,
    share_next: bool | str | Sequence[NestedKey] = False,
    frames: Mapping[NestedKey, int] | None = None,
) -> MemoryPlan:
    """Return the bytes that a buffer of ``capacity`` transitions needs, and whether
    they fit into the free memory.

    The function allocates nothing.

    Args:
        source: a TorchRL or Gymnasium environment, a TensorDict with one transition
            ``[]`` or one time step ``[E]``, or a storage or buffer that has been
            written to.
        capacity: the number of transitions; default: the capacity of the storage.
        sampler: ``"uniform"``, ``"proportional"``, ``"rank"``, a sampler class or a
            sampler; default: the sampler of the buffer, or ``"uniform"``.
        device: the device of the rows; default: the device of the storage, or
            ``"cpu"``.
        scratch_dir: the folder of a memory-mapped file for the rows; default: the
            folder of the storage, or no file.
        shared: whether the rows are in shared memory; default: as in the storage.
        share_next: the argument of :class:`PackedStorage`. The plan omits the final
            observations of trajectories, which are stored separately.
        frames: the argument of :class:`PackedStorage`.

    Returns:
        A ``MemoryPlan``, for example with ``rows`` (bytes of all rows), ``priorities``
        (bytes) and ``fits``.

    Raises:
        ValueError: the capacity is missing or below 1.
        TypeError: ``source`` has no keys, dtypes and shapes, or ``sampler`` is not a
            sampler.
        SchemaError: a key has no fixed size in bytes.

    Cost: O(keys), and one query of the free memory. TorchRL has no such function.

    Example:
        >>> from tensordict import TensorDict
        >>> transition = TensorDict({"pixels": torch.zeros(3, 64, 64, dtype=torch.uint8), "action": torch.zeros(6)})
        >>> needed = plan(transition, 1_000, sampler="proportional", device="cpu")
        >>> needed.keys, needed.row_bytes
        ({"'pixels'": 12288000, "'action'": 24000}, 12352)
        >>> needed.rows, needed.priorities, needed.fits
        (12352000, 9984, True)
    """
    dedup = None
    # `isinstance` would read `source.__class__`, which hangs for a SerialEnv that has
    # not started.
    if issubclass(type(source), ReplayBuffer):
        sampler = source.sampler if sampler is None else sampler
        source = source.storage
    if issubclass(type(source), Storage):
        scratch_dir = scratch_dir or getattr(source, "scratch_dir", None)
        shared = shared or getattr(source, "shared", False)
        device = getattr(source, "device", None) if device is None else device
        capacity = source.max_size if capacity is None else capacity
        dedup = getattr(source, "dedup", None)
        source = _time_step(source)
    capacity = whole(1)("capacity", capacity)
    device = torch.device("cpu" if device in (None, "auto") else device)
    schema = schema_of(source)
    layout = RowLayout(schema, schema.ndim)
    lanes = schema.numel()
    if dedup is None or share_next or frames:
        dedup = DedupLayout.chosen_for(layout, DedupOptions.of(share_next, frames))
    steps = -(-capacity // lanes)
    return MemoryPlan(
        capacity=steps * lanes,
        leaves=tuple(sorted(layout.leaves, key=lambda leaf: -leaf.nbytes)),
        row_bytes=layout.row_bytes,
        priorities=priority_bytes(sampler, steps * lanes, device),
        trajectories=8 * steps * lanes + 16 * lanes
        if any(leaf.key[-1] in _ENDS for leaf in layout.leaves)
        else 0,
        place=room_for(device, None if scratch_dir is None else Path(scratch_dir)),
        memory=room_for(device, SHARED if shared else None),
        dedup=dedup,
    )


def priority_bytes(
    sampler: object, capacity: int, device: torch.device | str = "cpu"
) -> int:
    """Return the bytes that a sampler, a class or a name of :data:`SAMPLERS` needs for
    ``capacity`` rows."""
    while hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    if isinstance(sampler, str):
        if sampler not in SAMPLERS:
            raise TypeError(
                f"sampler must be one of {', '.join(SAMPLERS)}, a sampler or its class, got {sampler!r}"
            )
        sampler = SAMPLERS[sampler]
    kind = sampler if isinstance(sampler, type) else type(sampler)
    if issubclass(kind, SamplerWrapper):
        raise TypeError(
            f"a {kind.__name__} wraps a sampler that its class does not specify: pass a sampler instance"
        )
    if issubclass(kind, Prioritized):
        return kind.nbytes_for(capacity, device)
    if issubclass(kind, PrioritizedSampler):
        return 2 * 4 * 2 * (1 << int(capacity).bit_length())  # two float32 trees
    return 8 * capacity if issubclass(kind, SamplerWithoutReplacement) else 0


def _time_step(storage: Storage) -> TensorDictBase:
    """Return one time step of the rows of a storage; TypeError if it has not been
    written to."""
    if isinstance(storage, PackedStorage) and storage.dedup is not None:
        layout = storage.all_rows().layout
        return layout.unpack(
            torch.empty(
                (*storage.lanes, layout.row_bytes), dtype=torch.uint8, device="meta"
            )
        )
    rows = stored_rows(storage)
    if rows is None:
        raise TypeError(
            f"the {type(storage).__name__} has not been written to, so its rows have "
            "no keys: plan with the environment, or with a TensorDict that holds "
            "one transition"
        )
    return cast("TensorDictBase", rows[0])
