"""Stored rows as the doctor reads them, whatever holds them, and what one pass over
them shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ImmutableDatasetWriter, TensorStorage
from torchrl.data.replay_buffers import ReplayBuffer, RoundRobinWriter, Storage, Writer

from rlbuf_td.checkpoint import open_checkpoint
from rlbuf_td.diagnostics.doctor.bounds import Interval
from rlbuf_td.diagnostics.doctor.report import ENDS, FAULTS, INSIDE, ROWS, Finding
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.episodes import TRAJ_KEY
from rlbuf_td.storages.indexing import device_of, lanes_of, steps_by_age
from rlbuf_td.storages.memory import HEAD_FILE
from rlbuf_td.storages.observed import hashes, is_observed, values_of
from rlbuf_td.storages.schema import show_key
from rlbuf_td.storages.torchrl_parts import stored_rows

Key: TypeAlias = tuple[str, ...]
Values: TypeAlias = dict[Key, Tensor]
#: For a code and a key, the function that tells which values are wrong.
Tests: TypeAlias = dict[tuple[str, Key], Callable[[Tensor], Tensor]]
_FLAGS = "done", "terminated", "truncated"
_BLOCK_BYTES = 4 << 20  # rows of this size fit into a cache
_NAMED = 5  # a finding names at most this many rows


class Record:
    """Rows, lane after lane, each from its oldest row on, and what one pass over them
    finds.

    Masks of all rows are ``[N]`` bool on the CPU. Observations are compared by their
    hashes. The first row follows the last one; the mask ``has_next`` is False for the
    last rows of lanes.
    """

    def __init__(
        self, storage: Storage, writer: Writer | None, bounds: Mapping[Key, Interval]
    ) -> None:
        if not len(storage):
            raise ValueError("the buffer is empty: there is nothing to read")
        stored = stored_rows(storage)
        if stored is None:
            raise TypeError(
                f"the doctor reads storages of TensorDicts, not a {type(storage).__name__}"
            )
        self.storage = storage
        lane_sizes = lanes_of(storage)
        lanes = lane_sizes.numel()
        steps = len(storage) // lanes
        #: ``[T, *lanes]``, as the storage indexes rows.
        self.shape = (steps, *lane_sizes)
        if isinstance(storage, PackedStorage):
            counts = storage.ring.count
            cells = storage.ring.cells_by_age()
            self._gather: Callable[[Tensor], Any] = storage.gather
        else:
            counts = np.full(lanes, steps)
            step = steps_by_age(storage, steps)
            lane = torch.arange(lanes, device="cpu")
            cells = (step * lanes + lane[:, None]).flatten()
            self._gather = stored.flatten(0, storage.ndim - 1).__getitem__
        #: The flat index of each row in the storage, ``[N]``.
        self.cells = cells.cpu()
        self.rows = len(cells)
        self.has_next = ~self._no_rows()
        last_of_lanes = counts[counts > 0].cumsum() - 1
        self.has_next[torch.from_numpy(last_of_lanes)] = False
        #: The entries of one row.
        self.example = self.read(torch.zeros(1, dtype=torch.int64, device="cpu"))
        #: The keys of observations, which are stored at the root and under "next", with
        #: the same dtype and shape.
        self.observed = [key for key in self.example if is_observed(key, self.example)]
        why_not = self._why_ends_are_unknown(writer)
        #: Whether the rows are in time order, with flags or ids that mark the ends of
        #: trajectories.
        self.knows_ends = why_not is None
        #: Omitted checks, and the reasons.
        self.skipped = [] if why_not is None else [why_not]
        if self.knows_ends and not self.observed:
            self.skipped.append(
                "next observations: no key is stored both at the root and under 'next'"
            )
        self._scan(self._tests(bounds))
        self._compare()
        #: How many rows, ends or flags there are, by the unit of findings.
        self.totals = {
            ROWS: self.rows,
            INSIDE: int(self.inside.sum()),
            ENDS: int(self.ends.sum()),
        } | {f"rows with {name}": int(flag.sum()) for name, flag in self.flags.items()}

    def _no_rows(self) -> Tensor:
        return torch.zeros(self.rows, dtype=torch.bool, device="cpu")

    def _flag_keys(self, name: str) -> list[Key]:
        """Return the keys of an end flag: the shortest ones under "next"."""
        keys = [
            key
            for key, value in self.example.items()
            if key[0] == "next" and key[-1] == name and value.dtype is torch.bool
        ]
        shortest = min(map(len, keys), default=0)
        return [key for key in keys if len(key) == shortest]

    def _why_ends_are_unknown(self, writer: Writer | None) -> str | None:
        """Return what the record lacks to tell where trajectories end; None if it lacks
        nothing."""
        storage = self.storage
        ids = self.example.get(TRAJ_KEY)
        if not isinstance(writer, RoundRobinWriter | ImmutableDatasetWriter | None):
            return f"the order of rows, which a {type(writer).__name__} does not keep"
        if (
            isinstance(storage, PackedStorage)
            and storage.all_rows().layout.root.batch_size
        ):
            return f"trajectories: a row holds several steps, use a storage with ndim={storage.ndim + 1}"
        if ids is None:
            shows_ends = any(map(self._flag_keys, _FLAGS))
        else:
            shows_ends = ids.numel() == 1 and not ids.is_floating_point()
        if shows_ends:
            return None
        return "trajectories: neither done flags nor trajectory ids, one integer per row, are stored"

    def _tests(self, bounds: Mapping[Key, Interval]) -> Tests:
        """Return for each code and key, the function that tells which values are
        wrong."""
        tests: Tests = {}
        for key, value in self.example.items():
            root = key[1:] if key[0] == "next" else key
            is_input = (
                key[-1] in ("reward", "action")
                or root in self.observed
                or "observation" in key
            )
            if is_input and (value.is_floating_point() or value.is_complex()):
                tests["not-finite", key] = lambda values: ~values.isfinite()
            interval = bounds.get(root)
            if interval is not None and value.numel() == interval.low.numel():
                tests["out-of-bounds", key] = interval.like(value).is_outside
        return tests

    def read(self, rows: Tensor) -> Values:
        """Return the entries of rows, ``[n, ...]`` each, on the storage's device."""
        cells = self.cells[rows].to(device_of(self.storage))
        return values_of(self._gather(cells))

    def _scan(self, tests: Tests) -> None:
        """Read all rows once."""
        keys = {name: self._flag_keys(name) for name in _FLAGS}
        self.flags = {name: self._no_rows() for name in _FLAGS if keys[name]}
        #: For each kind of fault and key, whether the value is wrong.
        self.wrong = {test: self._no_rows() for test in tests}
        self.ids = None
        if TRAJ_KEY in self.example:
            self.ids = self.cells.new_empty(
                self.rows, dtype=self.example[TRAJ_KEY].dtype
            )
        #: Hashes of the observation, and of the next observation, of each row, ``[N]``
        #: int64.
        self.seen = torch.empty_like(self.cells)
        self.seen_next = torch.empty_like(self.cells)
        row_bytes = sum(value.nbytes for value in self.example.values())
        block = max(1, _BLOCK_BYTES // max(1, row_bytes))
        for rows in torch.arange(self.rows, device="cpu").split(block):
            values = self.read(rows)
            for name, flag in self.flags.items():
                parts = [_any(values[key]) for key in keys[name]]
                flag[rows] = torch.stack(parts).any(0)
            for (code, key), is_wrong in tests.items():
                self.wrong[code, key][rows] = _any(is_wrong(values[key]))
            if self.ids is not None:
                self.ids[rows] = values[TRAJ_KEY].flatten(1)[:, 0].cpu()
            self.seen[rows] = hashes(values, (), self.observed)
            self.seen_next[rows] = hashes(values, ("next",), self.observed)

    def _compare(self) -> None:
        """Compare each row's next observation with the following row's observation."""
        #: Any end flag is set.
        self.ended = self._any_of(self.flags.values())
        #: The next row of the lane does not continue this row's trajectory.
        self.cut = self._cuts()
        self.inside = self.has_next & ~self.cut
        self.ends = self.has_next & self.cut
        # NaN and infinity match any value
        known = ~(self._not_finite(()).roll(-1) | self._not_finite(("next",)))
        same = self.seen_next == self.seen.roll(-1)
        #: The next observation is not that of the following row.
        self.differs = known & ~same
        #: A trajectory ends, yet the next observation is the following row's, and not
        #: this row's.
        self.goes_on = self.ends & known & same & (self.seen_next != self.seen)

    def _any_of(self, masks: Iterable[Tensor]) -> Tensor:
        return torch.stack([self._no_rows(), *masks]).any(0)

    def _not_finite(self, lead: Key) -> Tensor:
        tests = [("not-finite", (*lead, *key)) for key in self.observed]
        return self._any_of(self.wrong[test] for test in tests if test in self.wrong)

    def _cuts(self) -> Tensor:
        """Return which rows no stored row of their trajectory follows, ``[n]`` bool."""
        storage, flags = self.storage, self.flags
        if self.knows_ends and isinstance(storage, PackedStorage) and storage.episodes:
            spans = storage.episodes_now().spans
            parts = self.cells.split(1 << 16)
            ahead = [spans(cells.to(storage.device)).ahead.cpu() for cells in parts]
            return torch.cat(ahead) == 0
        cut = ~self.has_next | flags.get("done", self.ended)
        return cut if self.ids is None else cut | (self.ids != self.ids.roll(-1))

    def finding(
        self,
        code: str,
        where: Tensor | None = None,
        key: Key | None = None,
        **words: object,
    ) -> Finding:
        """Return a finding about the rows of the mask ``where``; ``None`` stands for
        all rows.

        ``words`` are the fields in the texts of the fault.
        """
        fault = FAULTS[code]
        if key is not None:
            words["key"] = show_key(key)
        unit = fault.unit.format(**words)
        total = self.totals[unit]
        cells = self.cells[:0] if where is None else self.cells[where].sort().values
        named = np.unravel_index(cells[:_NAMED].numpy(), self.shape)
        rows = np.stack(named, 1).tolist()
        return Finding(
            code=code,
            key=key,
            rows=tuple(tuple(row) if len(row) > 1 else row[0] for row in rows),
            count=total if where is None else len(cells),
            of=total,
            unit=unit,
            explanation=fault.explanation.format(**words),
            remedy=fault.remedy.format(**words),
        )


def _any(flags: Tensor) -> Tensor:
    """Return whether any flag of each row is set, ``[n]``, on the CPU."""
    return flags.flatten(1).any(1).cpu()


def open_source(source: object) -> tuple[Storage, Writer | None]:
    """Return the storage of what the doctor is given, and its writer if it has one."""
    if isinstance(source, str | PathLike):
        return _open_folder(Path(source)), None
    if isinstance(source, ReplayBuffer):
        return source.storage, source.writer
    if isinstance(source, Storage):
        return source, None
    if isinstance(source, TensorDictBase):
        storage = TensorStorage(source, ndim=max(1, source.ndim))
        # TorchRL counts time steps until the storage is first used
        torchrl_parts.set_length(storage, source.numel())
        return storage, None
    raise TypeError(
        "the doctor reads a buffer, a storage, a TensorDict of rows [T] or [T, E], "
        f"or the path of a saved buffer, not a {type(source).__name__}"
    )


def _open_folder(folder: Path) -> PackedStorage:
    """Return the rows in a folder of a dump, or in one of ``reopen=True``."""
    if (folder / HEAD_FILE).exists():
        return PackedStorage.of_folder(folder)
    storage = open_checkpoint(folder).storage
    if storage is None:
        raise ValueError(f"{folder} holds no rows")
    return storage
