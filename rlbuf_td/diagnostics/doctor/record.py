"""Stored rows as the doctor reads them: one column per key, and the ends of trajectories."""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import ImmutableDatasetWriter, TensorStorage
from torchrl.data.replay_buffers import ReplayBuffer, RoundRobinWriter, Sampler, Storage, Writer

from rlbuf_td.checkpoint import open_checkpoint
from rlbuf_td.checkpoint.torchrl_folder import map_rows
from rlbuf_td.diagnostics.doctor.report import FAULTS, Finding
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.episodes import TRAJ_KEY
from rlbuf_td.storages.indexing import stand_apart, stored_rows
from rlbuf_td.storages.schema import show_key, walk

Key: TypeAlias = tuple[str, ...]
# Keys that may be stored at the root and under "next" although they are not observations.
_NOT_OBSERVED = {"reward", "done", "terminated", "truncated", "state_value", "index"}
_BLOCK_BYTES = 4 << 20  # a block of time steps fits into a cache
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6  # tolerances: floats this close count as equal
_HASHED = 256  # the most elements of a value that its hash includes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAMED = 5  # a finding names at most this many rows


class Record:
    """Rows as columns ``[T, E, ...]``, with all lane dims flattened into one, whatever holds them.

    Rows of lanes that stand apart, and deduplicated rows, are a copy; others are views of the storage. The rows of
    lanes that stand apart are one lane, ``[N, 1, ...]``: lane after lane, each from its oldest row on.
    """

    def __init__(self, storage: Storage, writer: Writer | None) -> None:
        if not len(storage):
            raise ValueError("the buffer is empty: there is nothing to read")
        rows = stored_rows(storage)
        if rows is None:
            raise TypeError(f"the doctor reads storages of TensorDicts, not a {type(storage).__name__}")
        capacity, lanes = len(rows), rows.shape[1 : storage.ndim]
        self.shape = (len(storage) // lanes.numel(), *lanes)  # as the storage indexes rows
        #: Of lanes that stand apart: the flat index of each row, ``[N]``.
        self.cells: torch.Tensor | None = None
        is_packed = isinstance(storage, PackedStorage)
        if is_packed and stand_apart(storage):
            self.cells = storage.ring.cells_by_age()
        if self.cells is not None or (is_packed and storage.deduplicated):
            cells = torch.arange(len(storage), device="cpu") if self.cells is None else self.cells
            rows, ndim = storage.gather(cells.to(storage.device)), 1
        else:
            rows, ndim = rows[: self.shape[0]], storage.ndim
        self.lanes: int = lanes.numel() if self.cells is None else 1
        self.steps: int = self.shape[0] if self.cells is None else len(rows)
        self.rows = self.steps * self.lanes
        self.skipped: list[str] = []  # omitted checks, and the reasons
        self.columns: dict[Key, torch.Tensor] = {
            key: value.reshape(self.steps, self.lanes, *(value.shape[ndim:] or (1,)))
            for key, value in walk(rows)
            if isinstance(value, torch.Tensor)
        }
        #: Whether the rows are in time order, with flags or ids that mark the ends of trajectories.
        self.knows_ends = False
        #: ``[T, E]`` bool on the CPU: step ``t + 1`` of the ring was written next in the lane, in any trajectory.
        self.paired = torch.ones(self.steps, self.lanes, dtype=torch.bool, device="cpu")
        self._mark_newest(storage, capacity)
        #: ``[T, E]`` bool on the CPU: the next row of the lane does not continue this row's trajectory.
        self.cut = torch.empty_like(self.paired)
        if not isinstance(writer, RoundRobinWriter | ImmutableDatasetWriter | None):
            self.skipped.append(f"the order of rows, which a {type(writer).__name__} does not keep")
        elif is_packed and storage.all_rows().layout.root.batch_size:
            remedy = f"make the storage with ndim={storage.ndim + 1}"
            self.skipped.append(f"trajectories: a row holds several steps, {remedy}")
        elif is_packed and storage.episodes is not None and storage.in_time_order:
            self._look_up_cuts(storage)
        else:
            self._find_cuts()

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of flat rows, ``[n]``, as ``[T, E]``."""
        values = values[: self.rows] if self.cells is None else values[self.cells.to(values.device)]
        return values.view(self.steps, self.lanes)

    def _mark_newest(self, storage: Storage, capacity: int) -> None:
        """Mark the newest row of each lane as a row without a next row."""
        if self.cells is not None:
            counts = torch.from_numpy(storage.ring.count)
            self.paired[counts[counts > 0].cumsum(0) - 1] = False
            return
        cursor = torchrl_parts.newest_step_of(storage)  # None: the storage does not know
        is_ring = self.steps == capacity and cursor is not None and 0 <= cursor < self.steps
        self.paired[int(cursor) if is_ring else self.steps - 1] = False

    def _find_cuts(self) -> None:
        """Find the ends of trajectories in the columns."""
        flags = self._flags("done") or self._flags("terminated", "truncated")
        ids = self.columns.get(TRAJ_KEY)
        has_names = ids is None or (ids.shape[2:].numel() == 1 and not ids.is_floating_point())
        if not (flags or ids is not None):
            self.skipped.append("trajectories: neither done flags nor trajectory ids are stored")
        elif any(self.columns[key].dtype is not torch.bool for key in flags) or not has_names:
            self.skipped.append("trajectories: done flags must be bool, trajectory ids one integer per row")
        else:
            self.cut = torch.stack([~self.paired, *(self.columns[key].flatten(2).any(2).cpu() for key in flags)]).any(0)
            if ids is not None:
                self.cut |= (ids != ids.roll(-1, 0)).flatten(2).any(2).cpu()
            self.knows_ends = True

    def _look_up_cuts(self, storage: PackedStorage) -> None:
        cut, episodes = self.cut.view(-1), storage.episodes_now()
        for rows in torch.arange(self.rows, device="cpu").split(1 << 16):
            cells = rows if self.cells is None else self.cells[rows]
            cut[rows] = episodes.spans(cells.to(storage.device)).ahead.cpu() == 0
        self.knows_ends = True

    def _flags(self, *names: str) -> list[Key]:
        """Return the keys under "next" whose last part is in ``names``, in the order of ``names``."""
        found = [key for key in self.columns if key[0] == "next" and key[-1] in names]
        return sorted(found, key=lambda key: (names.index(key[-1]), len(key)))

    def flag(self, name: str) -> torch.Tensor | None:
        """Return an end flag, ``[T, E]`` bool on the CPU; ``None`` if no bool flag has this name."""
        keys = self._flags(name)
        if not keys or self.columns[keys[0]].dtype is not torch.bool:
            return None
        return self.columns[keys[0]].flatten(2).any(2).cpu()

    @property
    def observed(self) -> list[Key]:
        """The keys of observations, which are stored at the root and under "next", with the same dtype and shape."""
        return [
            key
            for key, column in self.columns.items()
            if key[0] != "next"
            and key[-1] not in _NOT_OBSERVED
            and (after := self.columns.get(("next", *key))) is not None
            and after.shape == column.shape
            and after.dtype is column.dtype
        ]

    @property
    def main(self) -> list[Key]:
        """The observed keys with several numbers per row; if there are none, all observed keys."""
        return [key for key in self.observed if self.columns[key].shape[2:].numel() > 1] or self.observed

    def at(self, key: Key, flat: torch.Tensor) -> torch.Tensor:
        return self.columns[key][flat // self.lanes, flat % self.lanes]

    def blocks(self) -> Iterator[slice]:
        row = sum(column.shape[1:].numel() * column.dtype.itemsize for column in self.columns.values())
        size = max(1, _BLOCK_BYTES // max(1, row))
        for start in range(0, self.steps, size):
            yield slice(start, min(start + size, self.steps))

    def after(self, key: Key, block: slice) -> torch.Tensor:
        """Return the values of ``key`` one step later than in ``block``; the first step follows the last."""
        column = self.columns[key]
        if block.stop < self.steps:
            return column[block.start + 1 : block.stop + 1]
        return torch.cat([column[block.start + 1 :], column[:1]])

    def pairs(self, key: Key, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next values in ``block``, and the values of the following rows; equal ones for absent agents."""
        reached_key = "next", *key
        reached, following = self.columns[reached_key][block], self.after(key, block)
        mask = self.columns.get((key[0], "mask")) if len(key) > 1 else None
        if mask is None or mask.dtype is not torch.bool or mask.shape[2:] != following.shape[2:3]:
            return reached, following
        acts = self.after((key[0], "mask"), block)
        return torch.where(acts.view(*acts.shape, *[1] * (following.ndim - 3)), reached, following), following

    def _named(self, numbers: torch.Tensor) -> tuple[Any, ...]:
        """Return rows as the storage indexes them: ``t``, or ``(t, e)`` with lanes."""
        cells = numbers if self.cells is None else self.cells[numbers]
        places = np.stack(np.unravel_index(cells.numpy(), self.shape), -1).tolist()
        return tuple(tuple(place) if len(place) > 1 else place[0] for place in places)

    def finding(self, code: str, where: torch.Tensor | None, of: int, key: Key | None = None, **words: Any) -> Finding:
        """Return a finding about the rows of the mask ``where``, ``[T, E]``; ``None`` stands for all rows."""
        rows = () if where is None else self._named(where.view(-1).nonzero()[:NAMED, 0])
        count = of if where is None else int(where.sum())
        words |= {"key": None if key is None else show_key(key)}
        _, explanation, remedy = FAULTS[code]
        return Finding(code, key, rows, count, of, explanation.format(**words), remedy.format(**words))


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return values of any dtype as integers of the same size, so that NaN equals itself."""
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.view(_INTEGERS[values.dtype.itemsize])


def differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return where two blocks ``[T, E, ...]`` differ, ``[T, E]`` bool; NaN and infinity match any value."""
    unequal = (_bits(left) != _bits(right)).flatten(2).any(2)
    if (left.is_floating_point() or left.is_complex()) and bool(unequal.any()):
        wide = torch.complex128 if left.is_complex() else torch.float64
        one, other = left[unequal].to(wide), right[unequal].to(wide)
        apart = ~torch.isclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE) & one.isfinite() & other.isfinite()
        unequal = unequal.masked_scatter(unequal, apart.flatten(1).any(1))
    return unequal


def hashes(record: Record, keys: list[Key], rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return a hash per row, ``[n]`` int64 on the CPU; ``rows`` are row numbers, or ``None`` for all rows."""
    generator = torch.Generator().manual_seed(0)
    result = torch.zeros(record.rows if rows is None else len(rows), dtype=torch.int64, device="cpu")
    for key in keys:
        column = record.columns[key]
        width = column.shape[2:].numel()
        if not width:
            continue
        places = torch.linspace(0, width - 1, min(width, _HASHED), dtype=torch.float64, device="cpu").long()
        size = (len(places) * (1 + column.dtype.is_complex),)
        weight = torch.randint(-(1 << 62), 1 << 62, size, generator=generator, device="cpu")
        parts = (column[each].flatten(0, 1) for each in record.blocks()) if rows is None else [record.at(key, rows)]
        numbers = (_bits(part.flatten(1)[:, places.to(part.device)].contiguous()).flatten(1) for part in parts)
        result += torch.cat([(each.cpu().long() * weight).sum(1) for each in numbers])
    return result


def open_source(source: Any) -> tuple[Storage, Sampler | None, Writer | None]:
    if isinstance(source, str | PathLike):
        source = _open_saved(Path(source))
    if isinstance(source, ReplayBuffer):
        return source.storage, source.sampler, source.writer
    if isinstance(source, Storage):
        return source, None, None
    if isinstance(source, TensorDictBase):
        return _storage_of(source, source.numel()), None, None
    accepted = "a buffer, a storage, a TensorDict of rows [T] or [T, E], or the path of a saved buffer"
    raise TypeError(f"the doctor reads {accepted}, not a {type(source).__name__}")


def _open_saved(path: Path) -> Storage:
    """Return a storage with the rows that ``dumps(path)`` has saved; files of TorchRL are memory-mapped."""
    if (path / "manifest.json").is_file():  # saved by this package
        found = open_checkpoint(path)
        if found.storage is not None:
            return found.storage
        if found.rows is None:
            raise ValueError(f"{path} holds no rows")
        return _storage_of(found.rows, found.rows.numel(), found.writer.get("_cursor"))
    folder = next((each for each in (path, path / "storage") if (each / "storage_metadata.json").is_file()), None)
    if folder is None:
        what = "holds no saved buffer" if path.is_dir() else "is not a folder"
        raise FileNotFoundError(f"{path} {what}: pass the folder that rb.dumps(path) wrote")
    writer = folder.parent / "writer" / "metadata.json"
    try:
        about = json.loads((folder / "storage_metadata.json").read_text())
        if about["is_pytree"]:
            raise ValueError("it holds no TensorDict")
        cursor = int(json.loads(writer.read_text())["cursor"]) if writer.is_file() else None
        return _storage_of(map_rows(folder), int(about["len"]), cursor)
    except (LookupError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"cannot read the rows in {folder}: {error}") from error


def _storage_of(rows: TensorDictBase, length: int, cursor: int | None = None) -> Storage:
    """Return a storage of ``rows``, of which ``length`` are written; ``cursor`` is the next write position."""
    storage = TensorStorage(rows, ndim=max(1, rows.ndim))
    torchrl_parts.set_length(storage, length)  # TorchRL counts time steps until the storage is first used
    if cursor is not None:
        torchrl_parts.set_newest_step(storage, (cursor - 1) % len(rows))
    return storage
