"""Stored rows as the doctor reads them, whatever holds them; wrong values, and the
bounds of spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from os import PathLike
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite, ImmutableDatasetWriter, TensorStorage
from torchrl.data.replay_buffers import ReplayBuffer, RoundRobinWriter, Storage, Writer

from rlbuf_td.checkpoint import open_checkpoint
from rlbuf_td.diagnostics.doctor.report import FAULTS, Finding
from rlbuf_td.envs.specs import OBSERVATION, entries, is_space
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.episodes import TRAJ_KEY
from rlbuf_td.storages.indexing import device_of, lanes_of, stored_rows
from rlbuf_td.storages.observed import hashes, is_observed, values_of
from rlbuf_td.storages.schema import show_key

Key: TypeAlias = tuple[str, ...]
Values: TypeAlias = dict[Key, Tensor]
Interval: TypeAlias = tuple[Tensor, Tensor]
Suspects: TypeAlias = dict[tuple[str, Key], Callable[[Tensor], Tensor]]
_BLOCK_BYTES = 4 << 20  # rows of this size fit into a cache
_NAMED = 5  # a finding names at most this many rows


class Record:
    """Rows, lane after lane, each from its oldest row on, and what one pass over them
    finds.

    Masks of all rows are ``[N]`` bool on the CPU. Observations are compared by their
    hashes. The first row follows the last one; rows that are not ``paired`` are the
    last ones of their lanes.
    """

    def __init__(
        self, storage: Storage, writer: Writer | None, bounds: Mapping[Key, Interval]
    ) -> None:
        if not len(storage):
            raise ValueError("the buffer is empty: there is nothing to read")
        rows = stored_rows(storage)
        if rows is None:
            raise TypeError(
                f"the doctor reads storages of TensorDicts, not a {type(storage).__name__}"
            )
        self.storage, self.lanes = storage, lanes_of(storage).numel()
        # as the storage indexes rows
        self.shape = (len(storage) // self.lanes, *lanes_of(storage))
        self._gather: Callable[[Tensor], TensorDictBase]
        if isinstance(storage, PackedStorage):
            self._gather, cells, counts = (
                storage.gather,
                storage.ring.cells_by_age(),
                storage.ring.count,
            )
        else:
            flat = rows if storage.ndim == 1 else rows.flatten(0, storage.ndim - 1)
            self._gather = cast("Callable[[Tensor], TensorDictBase]", flat.__getitem__)
            steps = self.shape[0]
            first = (
                torchrl_parts.last_step(storage, steps) + 1 if steps == len(rows) else 0
            )
            order = (torch.arange(steps, device="cpu") + first) % steps
            cells = (
                order * self.lanes + torch.arange(self.lanes, device="cpu")[:, None]
            ).flatten()
            counts = np.full(self.lanes, steps)
        #: The flat index of each row in the storage, ``[N]``.
        self.cells, self.rows = cells.cpu(), len(cells)
        self.paired = ~self._mask()
        self.paired[torch.from_numpy(counts[counts > 0].cumsum() - 1)] = False
        # the entries of a row
        self.kinds = self.read(torch.zeros(1, dtype=torch.int64, device="cpu"))
        #: The keys of observations, which are stored at the root and under "next", with
        # the same dtype and shape.
        self.observed = [key for key in self.kinds if is_observed(key, self.kinds)]
        self.skipped = [*self._unknown_order(writer)]  # omitted checks, and the reasons
        #: Whether the rows are in time order, with flags or ids that mark the ends of
        # trajectories.
        self.knows_ends = not self.skipped
        self._scan(bounds)

    def _mask(self) -> Tensor:
        return torch.zeros(self.rows, dtype=torch.bool, device="cpu")

    def _flag(self, name: str) -> list[Key]:
        """Return the keys of an end flag: the shortest ones under "next"."""
        keys = [key for key in self.kinds if key[0] == "next" and key[-1] == name]
        return [
            key
            for key in keys
            if len(key) == min(map(len, keys)) and self.kinds[key].dtype is torch.bool
        ]

    def _unknown_order(self, writer: Writer | None) -> list[str]:
        storage, ids = self.storage, self.kinds.get(TRAJ_KEY)
        if not isinstance(writer, RoundRobinWriter | ImmutableDatasetWriter | None):
            return [f"the order of rows, which a {type(writer).__name__} does not keep"]
        if (
            isinstance(storage, PackedStorage)
            and storage.all_rows().layout.root.batch_size
        ):
            return [
                f"trajectories: a row holds several steps, use a storage with ndim={storage.ndim + 1}"
            ]
        has_flags = any(map(self._flag, ("done", "terminated", "truncated")))
        if (
            has_flags
            if ids is None
            else ids.numel() == 1 and not ids.is_floating_point()
        ):
            return []
        return [
            "trajectories: neither done flags nor trajectory ids, one integer per row, are stored"
        ]

    def read(self, rows: Tensor) -> Values:
        """Return the entries of rows, ``[n, ...]`` each, on the storage's device."""
        cells = self.cells[rows].to(device_of(self.storage))
        return values_of(self._gather(cells))

    def _scan(self, bounds: Mapping[Key, Interval]) -> None:
        flags = {
            name: keys
            for name in ("done", "terminated", "truncated")
            if (keys := self._flag(name))
        }
        suspects, ids = (
            suspects_of(self.kinds, self.observed, bounds),
            self.kinds.get(TRAJ_KEY),
        )
        self.flags = {name: self._mask() for name in flags}
        #: For each kind of fault and key, whether the value is wrong.
        self.wrong = {suspect: self._mask() for suspect in suspects}
        self.ids = (
            None
            if ids is None
            else torch.empty(self.rows, dtype=ids.dtype, device="cpu")
        )
        #: Hashes of the observation, and of the next observation, of each row, ``[N]``
        # int64.
        self.here, self.there = (
            torch.empty(self.rows, dtype=torch.int64, device="cpu") for _ in range(2)
        )
        size = max(
            1,
            _BLOCK_BYTES // max(1, sum(value.nbytes for value in self.kinds.values())),
        )
        for rows in torch.arange(self.rows, device="cpu").split(size):
            values = self.read(rows)
            for name, keys in flags.items():
                self.flags[name][rows] = torch.stack(
                    [values[key].flatten(1).any(1).cpu() for key in keys]
                ).any(0)
            for suspect, is_wrong in suspects.items():
                self.wrong[suspect][rows] = (
                    is_wrong(values[suspect[1]]).flatten(1).any(1).cpu()
                )
            if self.ids is not None:
                self.ids[rows] = values[TRAJ_KEY].flatten(1)[:, 0].cpu()
            self.here[rows] = hashes(values, (), self.observed)
            self.there[rows] = hashes(values, ("next",), self.observed)
        #: The next row of the lane does not continue this row's trajectory.
        self.cut = self._cuts()
        self.inside, self.ends = self.paired & ~self.cut, self.paired & self.cut
        unknown, unknown_next = (self._not_finite(lead) for lead in ((), ("next",)))
        known, same = (
            ~(unknown.roll(-1) | unknown_next),
            self.there == self.here.roll(-1),
        )
        #: The next observation is not that of the following row; NaN and infinity match
        # any value.
        self.apart = known & ~same
        #: A trajectory ends, yet the next observation is the following row's, and not
        # this row's.
        self.unbroken = self.ends & known & same & (self.there != self.here)

    def _not_finite(self, lead: Key) -> Tensor:
        suspects = (
            self.wrong.get(("not-finite", (*lead, *key))) for key in self.observed
        )
        return torch.stack(
            [self._mask(), *(where for where in suspects if where is not None)]
        ).any(0)

    def _cuts(self) -> Tensor:
        storage, flags = self.storage, self.flags
        if self.knows_ends and isinstance(storage, PackedStorage) and storage.episodes:
            spans = storage.episodes_now().spans
            ahead = [
                spans(cells.to(storage.device)).ahead.cpu()
                for cells in self.cells.split(1 << 16)
            ]
            return torch.cat(ahead) == 0
        ended = [flags["done"]] if "done" in flags else [*flags.values()]
        changes = [] if self.ids is None else [self.ids != self.ids.roll(-1)]
        return torch.stack([~self.paired, *ended, *changes]).any(0)

    def finding(
        self,
        code: str,
        where: Tensor | None,
        of: int,
        key: Key | None = None,
        **words: object,
    ) -> Finding:
        """Return a finding about the rows of the mask ``where``; ``None`` stands for
        all rows."""
        cells = self.cells[:0] if where is None else self.cells[where].sort().values
        places = zip(
            *(x.tolist() for x in np.unravel_index(cells[:_NAMED].numpy(), self.shape)),
            strict=True,
        )
        rows = tuple(cell if len(cell) > 1 else cell[0] for cell in places)
        explanation, remedy = (
            text.format(key=key and show_key(key), **words) for text in FAULTS[code]
        )
        return Finding(
            code,
            key,
            rows,
            of if where is None else len(cells),
            of,
            explanation,
            remedy,
        )


def open_source(source: object) -> tuple[Storage, Writer | None]:
    if isinstance(source, str | PathLike):
        storage = open_checkpoint(Path(source)).storage
        if storage is None:
            raise ValueError(f"{source} holds no rows")
        return storage, None
    if isinstance(source, ReplayBuffer):
        return source.storage, source.writer
    if isinstance(source, Storage):
        return source, None
    if isinstance(source, TensorDictBase):
        storage = TensorStorage(source, ndim=max(1, source.ndim))
        # TorchRL counts time steps until the storage is first used
        torchrl_parts.set_length(storage, source.numel())
        return storage, None
    accepted = "a buffer, a storage, a TensorDict of rows [T] or [T, E], or the path of a saved buffer"
    raise TypeError(f"the doctor reads {accepted}, not a {type(source).__name__}")


def suspects_of(
    kinds: Mapping[Key, Tensor], observed: Sequence[Key], bounds: Mapping[Key, Interval]
) -> Suspects:
    """Return for each code and key, the function that tells which values are wrong, of
    rows like ``kinds``."""
    suspects: Suspects = {}
    for key, value in kinds.items():
        root = key[1:] if key[0] == "next" else key
        is_input = (
            key[-1] in ("reward", "action") or root in observed or "observation" in key
        )
        if is_input and (value.is_floating_point() or value.is_complex()):
            suspects["not-finite", key] = lambda values: ~values.isfinite()
        if root in bounds and value.numel() == bounds[root][0].numel():
            low, high = (
                bound.reshape(value.shape[1:]).to(value.device)
                for bound in bounds[root]
            )
            suspects["out-of-bounds", key] = lambda values, low=low, high=high: (
                ((values < low) | (values > high)) & values.isfinite()
            )
    return suspects


def bounds_of(source: object) -> dict[Key, Interval]:
    """Return the bounds of each key that has bounds; ``source`` is a space, spec,
    environment or its name."""
    if isinstance(source, str):
        import gymnasium

        try:
            with closing(gymnasium.make(source)) as env:
                return bounds_of(env)
        except gymnasium.error.Error as error:
            raise ValueError(str(error)) from error
    for name in (
        "observation_spec_unbatched",
        "single_observation_space",
        "observation_space",
    ):
        if hasattr(type(source), name) or name in getattr(source, "__dict__", {}):
            source = getattr(source, name)
            break
    if not is_space(source):
        accepted = "a Gymnasium space, a TorchRL spec of observations, an environment, or a name of Gymnasium's"
        raise TypeError(f"space must be {accepted}, got {type(source).__name__}")
    has_keys = isinstance(source, Composite) or isinstance(
        getattr(source, "spaces", None), Mapping
    )
    return dict(_intervals(source, () if has_keys else (OBSERVATION,)))


def _intervals(space: object, path: Key) -> Iterator[tuple[Key, Interval]]:
    parts = entries(
        dict(space.items())
        if isinstance(space, Composite)
        else getattr(space, "spaces", None)
    )
    # TorchRL's specs hold the limits in an attribute
    box = getattr(space, "space", space)
    if parts is not None:
        for name, part in parts.items():
            yield from _intervals(part, (*path, name))
    elif hasattr(box, "low") and hasattr(box, "high"):
        yield (
            path,
            (
                torch.as_tensor(box.low, device="cpu"),
                torch.as_tensor(box.high, device="cpu"),
            ),
        )
