"""Stored rows as the doctor reads them, whatever holds them, and the masks of one pass over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ImmutableDatasetWriter, TensorStorage
from torchrl.data.replay_buffers import ReplayBuffer, RoundRobinWriter, Sampler, Storage, Writer

from rlbuf_td.checkpoint import open_checkpoint
from rlbuf_td.diagnostics.doctor.report import FAULTS, Finding
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.episodes import TRAJ_KEY
from rlbuf_td.storages.indexing import device_of, lanes_of, stored_rows
from rlbuf_td.storages.schema import show_key, walk

Key: TypeAlias = tuple[str, ...]
Values: TypeAlias = dict[Key, Tensor]
# Keys that may be stored at the root and under "next" although they are not observations.
_NOT_OBSERVED = {"reward", "done", "terminated", "truncated", "state_value", "index"}
_BLOCK_BYTES = 4 << 20  # rows of this size fit into a cache
_AT_ONCE = 4_096  # rows
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6  # tolerances: floats this close count as equal
_HASHED = 256  # the most elements of a value that its hash includes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NEXT = ("next",)
NAMED = 5  # a finding names at most this many rows


class Record:
    """Rows, lane after lane, each from its oldest row on. Masks of all rows are ``[N]`` bool on the CPU."""

    def __init__(self, storage: Storage, writer: Writer | None) -> None:
        if not len(storage):
            raise ValueError("the buffer is empty: there is nothing to read")
        rows = stored_rows(storage)
        if rows is None:
            raise TypeError(f"the doctor reads storages of TensorDicts, not a {type(storage).__name__}")
        self.storage, self.lanes = storage, lanes_of(storage).numel()
        self.shape = (len(storage) // self.lanes, *lanes_of(storage))  # as the storage indexes rows
        is_packed = isinstance(storage, PackedStorage)
        self._gather: Callable[[Tensor], TensorDictBase]
        if is_packed:
            self._gather, self.cells, counts = storage.gather, storage.ring.cells_by_age(), storage.ring.count
        else:
            self._gather = (rows if storage.ndim == 1 else rows.flatten(0, storage.ndim - 1)).__getitem__
            self.cells, counts = _cells_by_age(storage, self.shape[0], self.lanes, len(rows))
        #: The flat index of each row in the storage, ``[N]``.
        self.cells, self.rows = self.cells.cpu(), len(self.cells)
        #: Whether the next row was written next in the lane, in any trajectory.
        self.paired = torch.ones(self.rows, dtype=torch.bool, device="cpu")
        self.paired[torch.from_numpy(counts[counts > 0].cumsum() - 1)] = False
        self.kinds = self.read(torch.zeros(1, dtype=torch.int64, device="cpu"))  # the entries of a row
        flags = {name: self._flag(name) for name in ("done", "terminated", "truncated")}
        self.flags = {name: keys for name, keys in flags.items() if keys}
        self.skipped: list[str] = []  # omitted checks, and the reasons
        if not isinstance(writer, RoundRobinWriter | ImmutableDatasetWriter | None):
            self.skipped.append(f"the order of rows, which a {type(writer).__name__} does not keep")
        elif is_packed and storage.all_rows().layout.root.batch_size:
            self.skipped.append(f"trajectories: a row holds several steps, use a storage with ndim={storage.ndim + 1}")
        elif not self._has_ends():
            self.skipped.append("trajectories: neither done flags nor trajectory ids, one integer per row, are stored")
        #: Whether the rows are in time order, with flags or ids that mark the ends of trajectories.
        self.knows_ends = not self.skipped

    def _flag(self, name: str) -> list[Key]:
        """Return the keys of an end flag: the shortest ones under "next"."""
        keys = [key for key in self.kinds if key[0] == "next" and key[-1] == name]
        return [key for key in keys if len(key) == min(map(len, keys)) and self.kinds[key].dtype is torch.bool]

    def _has_ends(self) -> bool:
        ids = self.kinds.get(TRAJ_KEY)
        return bool(self.flags) if ids is None else ids.numel() == 1 and not ids.is_floating_point()

    def read(self, rows: Tensor) -> Values:
        """Return the entries of rows, ``[n, ...]`` each, on the storage's device."""
        found = self._gather(self.cells[rows].to(device_of(self.storage)))
        return {
            key: value.reshape(len(rows), *(value.shape[1:] or (1,)))
            for key, value in walk(found)
            if isinstance(value, Tensor)
        }

    def blocks(self) -> Iterator[tuple[Tensor, Values, Values]]:
        """Yield row numbers, the values of these rows, and those of the row after each; the first follows the last."""
        size = max(1, _BLOCK_BYTES // max(1, sum(value.nbytes for value in self.kinds.values())))
        for rows in torch.arange(self.rows, device="cpu").split(size):
            values = self.read(torch.cat([rows, (rows[-1:] + 1) % self.rows]))
            yield rows, {key: x[:-1] for key, x in values.items()}, {key: x[1:] for key, x in values.items()}

    @property
    def observed(self) -> list[Key]:
        """The keys of observations, which are stored at the root and under "next", with the same dtype and shape."""
        return [
            key
            for key, value in self.kinds.items()
            if key[0] != "next"
            and key[-1] not in _NOT_OBSERVED
            and (after := self.kinds.get(NEXT + key)) is not None
            and (after.shape, after.dtype) == (value.shape, value.dtype)
        ]

    @property
    def main(self) -> list[Key]:
        """The observed keys with several numbers per row; if there are none, all observed keys."""
        return [key for key in self.observed if self.kinds[key].numel() > 1] or self.observed

    def finding(self, code: str, where: Tensor | None, of: int, key: Key | None = None, **words: Any) -> Finding:
        """Return a finding about the rows of the mask ``where``; ``None`` stands for all rows."""
        cells = self.cells[:0] if where is None else self.cells[where].sort().values
        places = zip(*(x.tolist() for x in np.unravel_index(cells[:NAMED].numpy(), self.shape)), strict=True)
        rows = tuple(place if len(place) > 1 else place[0] for place in places)
        fault, words = FAULTS[code], {"key": None if key is None else show_key(key), **words}
        count = of if where is None else len(cells)
        return Finding(code, key, rows, count, of, fault.explanation.format(**words), fault.remedy.format(**words))


def _cells_by_age(storage: Storage, steps: int, lanes: int, capacity: int) -> tuple[Tensor, np.ndarray]:
    """Return the flat indices of the rows in a storage of TorchRL, lane after lane, and the rows of each lane."""
    first = torchrl_parts.last_step(storage, steps) + 1 if steps == capacity else 0
    order = (torch.arange(steps, device="cpu") + first) % steps
    return (order * lanes + torch.arange(lanes, device="cpu")[:, None]).flatten(), np.full(lanes, steps)


class Scan:
    """What one pass over the rows finds: masks ``[N]`` bool on the CPU.

    ``suspects``: for each code and key, the function that tells which values ``[n, ...]`` are wrong, as a mask of the
    same shape.
    """

    def __init__(self, record: Record, suspects: Mapping[tuple[str, Key], Callable[[Tensor], Tensor]]) -> None:
        def mask() -> Tensor:
            return torch.zeros(record.rows, dtype=torch.bool, device="cpu")

        self.flags = {name: mask() for name in record.flags}  # the end flags
        self.wrong = {suspect: mask() for suspect in suspects}
        self.apart = mask()  # the next observation is not that of the following row
        main_apart = mask()  # the same, of the main keys
        ids = record.kinds.get(TRAJ_KEY)
        self.ids = None if ids is None else torch.empty(record.rows, dtype=ids.dtype, device="cpu")
        observed, main = record.observed, record.main
        for rows, here, after in record.blocks():
            for name, keys in record.flags.items():
                self.flags[name][rows] = torch.stack([here[key].flatten(1).any(1).cpu() for key in keys]).any(0)
            for suspect, is_wrong in suspects.items():
                self.wrong[suspect][rows] = is_wrong(here[suspect[1]]).flatten(1).any(1).cpu()
            if self.ids is not None:
                self.ids[rows] = here[TRAJ_KEY].flatten(1)[:, 0].cpu()
            for key in observed if record.knows_ends else ():
                differs = differ(_where_acting(key, here[NEXT + key], after), after[key]).cpu()
                self.apart[rows] |= differs
                if key in main:
                    main_apart[rows] |= differs
        ended = [flag for name, flag in self.flags.items() if name == "done"] or [*self.flags.values()]
        #: The next row of the lane does not continue this row's trajectory.
        self.cut = torch.stack([~record.paired, *ended]).any(0)
        storage = record.storage
        if record.knows_ends and isinstance(storage, PackedStorage) and storage.episodes and storage.in_time_order:
            spans = storage.episodes_now().spans
            ahead = [spans(cells.to(storage.device)).ahead.cpu() for cells in record.cells.split(1 << 16)]
            self.cut = torch.cat(ahead) == 0
        elif self.ids is not None:
            self.cut |= self.ids != self.ids.roll(-1)
        self.inside, self.ends = record.paired & ~self.cut, record.paired & self.cut
        #: A trajectory ends, yet the next observation is the following row's, and not this row's.
        self.unbroken = self.ends & ~main_apart
        rows = self.unbroken.nonzero()[:, 0]
        self.unbroken[rows] = moves(record, rows)


def moves(record: Record, rows: Tensor) -> Tensor:
    """Return whether the next observations of rows differ from their own, ``[n]`` bool."""
    found = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
    for part in torch.arange(len(rows), device="cpu").split(_AT_ONCE):
        values = record.read(rows[part])
        for key in record.main:
            found[part] |= differ(values[key], values[NEXT + key]).cpu()
    return found


def _where_acting(key: Key, reached: Tensor, after: Values) -> Tensor:
    """Return next observations; those of agents that are absent in the following row become that row's."""
    acts, following = after.get((key[0], "mask")) if len(key) > 1 else None, after[key]
    if acts is None or acts.dtype is not torch.bool or acts.shape[1:] != following.shape[1:2]:
        return reached
    return torch.where(acts.view(*acts.shape, *[1] * (following.ndim - 2)), reached, following)


def _bits(values: Tensor) -> Tensor:
    """Return values of any dtype as integers of the same size, so that NaN equals itself."""
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.view(_INTEGERS[values.dtype.itemsize])


def differ(left: Tensor, right: Tensor) -> Tensor:
    """Return where values ``[n, ...]`` differ, ``[n]`` bool; NaN and infinity match any value."""
    unequal = (_bits(left) != _bits(right)).flatten(1).any(1)
    if (left.is_floating_point() or left.is_complex()) and bool(unequal.any()):
        wide = torch.complex128 if left.is_complex() else torch.float64
        one, other = left[unequal].to(wide), right[unequal].to(wide)
        apart = ~torch.isclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE) & one.isfinite() & other.isfinite()
        unequal = unequal.masked_scatter(unequal, apart.flatten(1).any(1))
    return unequal


def hashes(values: Values, keys: list[Key]) -> Tensor:
    """Return a hash of the values ``[n, ...]`` of some keys, ``[n]`` int64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    result = torch.zeros(1, dtype=torch.int64, device="cpu")
    for key in keys:
        bits = _bits(values[key].contiguous()).flatten(1)
        places = torch.linspace(0, bits.shape[1] - 1, min(bits.shape[1], _HASHED), dtype=torch.float64, device="cpu")
        weight = torch.randint(-(1 << 62), 1 << 62, places.shape, generator=generator, device="cpu")
        result = result + (bits[:, places.long().to(bits.device)].cpu().long() * weight).sum(1)
    return result


def open_source(source: Any) -> tuple[Storage, Sampler | None, Writer | None]:
    """Return the storage of a source, and its sampler and writer, if it has them."""
    if isinstance(source, str | PathLike):
        found = open_checkpoint(Path(source)).storage
        if found is None:
            raise ValueError(f"{source} holds no rows")
        return found, None, None
    if isinstance(source, ReplayBuffer):
        return source.storage, source.sampler, source.writer
    if isinstance(source, Storage):
        return source, None, None
    if isinstance(source, TensorDictBase):
        storage = TensorStorage(source, ndim=max(1, source.ndim))
        torchrl_parts.set_length(storage, source.numel())  # TorchRL counts time steps until the storage is first used
        return storage, None, None
    accepted = "a buffer, a storage, a TensorDict of rows [T] or [T, E], or the path of a saved buffer"
    raise TypeError(f"the doctor reads {accepted}, not a {type(source).__name__}")
