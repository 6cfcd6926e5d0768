"""A wrapper that puts rows that no batch has contained yet at the front of each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from rlbuf_td.samplers.common import setting, whole
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.indexing import flat_rows
from rlbuf_td.storages.trajectory_index import DONE_KEY
from rlbuf_td.storages.write_clock import NOW

Interval: TypeAlias = tuple[int, int]
_ALL = [(1 << 62, 0)]  # the ages of all rows, however many there are, as a half-open interval


class FreshQueue:
    """The *fresh* rows of a storage: those that no batch has contained yet.

    Rows are numbered in the order of writing, beginning with an arbitrary row. Half-open intervals hold the numbers of
    the fresh rows, the newest last. The position of a row follows from its number and the position of the newest row.
    """

    __slots__ = ("cells", "clock", "count", "intervals", "lanes", "newest", "rows", "storage")

    def __init__(self) -> None:
        self.storage: Callable[[], Any] = _nothing  # a weak reference to the storage last looked at
        self.rows: Any = None  # its rows
        self.lanes = self.cells = 0
        self.begin(_ALL)

    def begin(self, ages: list[Interval]) -> None:
        """Restart at the next look with the rows of these ages as fresh: half-open intervals, oldest first."""
        self.intervals = [*ages]
        self.clock: int | None = None  # the storage's clock at the last look; None: `intervals` holds ages
        self.newest, self.count = -1, 0  # the time step written last, and the number of the next row

    def look(self, storage: Any) -> None:
        """Give numbers to the rows that have been written since the last look."""
        if storage.rows is not self.rows or self.storage() is not storage:
            self.storage, self.rows = ref(storage), storage.rows
            if storage.rows is not None:
                self.cells, self.lanes = storage.rows.cells, storage.rows.cells // storage.rows.steps
        live, _, newest = storage.numbers.values[:3]
        now = storage.clock.numbers.values[NOW]
        if storage.rows is None or now == self.clock:
            return
        if self.clock is None:
            self.count, self.intervals = live, [(live - old, live - new) for old, new in self.intervals]
        else:
            steps = self.cells // self.lanes
            # Edits of rows advance the clock, too: only the newest time step tells how far the ring has moved.
            ticks = now - self.clock
            written = min((newest - self.newest) % steps, ticks) if ticks < steps else steps
            begin = self.count + max(written * self.lanes - live, 0)
            self.count += written * self.lanes
            if self.intervals and self.intervals[-1][1] == begin:
                begin = self.intervals.pop()[0]
            if begin < self.count:
                self.intervals.append((begin, self.count))
            if len(self.intervals) % 4_096 == 0:  # drop intervals of replaced rows
                self.intervals = [each for each in self.intervals if each[1] > self.count - live]
        self.clock, self.newest = now, newest if live else -1

    def take(self, storage: Any, most: int, out: np.ndarray) -> int:
        """Write up to ``most`` fresh rows, flat, newest first, to ``out``; return how many. They stop being fresh."""
        if storage.clock.numbers.values[NOW] != self.clock or storage.rows is not self.rows:
            self.look(storage)
        intervals, taken = self.intervals, 0
        live = storage.numbers.values[0]
        oldest = self.count - live
        # The newest row has the number `count - 1`, and lies in the last lane of the newest time step.
        shift = (self.newest + 1) * self.lanes - self.count
        while intervals and taken < most:
            begin, end = intervals.pop()
            begin = max(begin, oldest)
            first = max(begin, end - most + taken)
            for number in range(end - 1, first - 1, -1):
                out[taken] = (number + shift) % live
                taken += 1
            if first > begin:
                intervals.append((begin, first))
        return taken

    def ages(self) -> list[Interval]:
        """Return the ages of the fresh rows, for :meth:`begin`: unlike positions, ages do not change with a load."""
        storage = self.storage()
        if storage is not None and storage.rows is not None:
            self.look(storage)
        if self.clock is None:
            return self.intervals
        return [(self.count - begin, self.count - end) for begin, end in self.intervals]

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in self.__slots__}
        return kept | {"storage": _nothing, "rows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _nothing() -> None:
    """Return None, like a weak reference to a storage that no longer exists."""


class FreshRowsSampler(SamplerWrapper):
    """Begin each batch with *fresh* rows, which no batch has contained yet; the wrapped sampler draws the others.

    Each row is fresh in exactly one batch, unless it is replaced before. If ``fresh`` rows are written between two
    batches, the next batch contains them all. With ``fresh=1`` and one update per step, this is combined experience
    replay. Inside a :class:`SequenceSampler` with ``boundary="shift"``, it is the online queue of DreamerV3.

    **Distribution.** A batch of B rows begins with the newest f fresh rows, where f is the smallest of ``fresh``, B and
    the number of fresh rows. The wrapped sampler draws the other B - f rows, which may include fresh ones. All rows
    have the importance weights of the wrapped sampler: on purpose, these do not correct for the fresh rows.

    Args:
        sampler: the wrapped sampler, which draws the other rows. Priorities, writes and settings are passed to it.
        fresh: the largest number of fresh rows in a batch; may be set at any time.

    If processes share a buffer, each counts as fresh the rows that none of its own batches has contained.

    Raises:
        ValueError: ``fresh`` is not a positive whole number; (in a buffer) the writer keeps no order of time.
        TypeError: the sampler is a wrapper (wrap it the other way: ``HindsightSampler(FreshRowsSampler(...))``); (when
            sampling) the storage is not a :class:`PackedStorage`.

    Cost: O(f) in addition to the wrapped draw, and with priorities a look-up of f weights.

    Source: Zhang and Sutton: A Deeper Look at Experience Replay, 2017; Hafner et al.: Mastering Diverse Domains through
    World Models, 2023 (the queue). TorchRL has no such sampler.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer, UniformSampler
        >>> from tensordict import TensorDict
        >>> sampler = FreshRowsSampler(UniformSampler(), fresh=2)
        >>> rb = ReplayBuffer(storage=PackedStorage(100), sampler=sampler, batch_size=4)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
        >>> rb.sample()["x"][:2], rb.sample()["x"][0]
        (tensor([2, 1]), tensor(0))
    """

    _level = 0
    _setting_names = _shown = ("fresh",)
    fresh: int = setting(whole(1))

    def __init__(self, sampler: Sampler, fresh: int = 1) -> None:
        super().__init__(sampler, DONE_KEY, None)
        self.fresh = fresh
        self.queue = FreshQueue()

    def watch(self, storage: Storage) -> None:
        """Record which rows are stored, for example after a load; this sampler needs no trajectories."""
        if isinstance(storage, PackedStorage):
            self.queue.look(storage)

    def _draw(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        if not isinstance(storage, PackedStorage):
            raise TypeError(f"FreshRowsSampler needs the clock of a PackedStorage, got a {type(storage).__name__}")
        flat, info = super()._draw(storage, batch_size)
        found = np.empty(len(flat), np.int64)
        count = self.take(storage, len(found), found)
        if count:
            rows = torch.from_numpy(found[:count]).to(flat.device)
            if "priority_weight" in info:
                self.weigh_(storage, rows, flat, info["priority_weight"])
            flat = torch.cat((rows, flat[count:]))
        return flat, info

    def take(self, storage: Any, size: int, out: np.ndarray) -> int:
        """Write the fresh rows of a batch, flat, to ``out``; return how many. They stop being fresh."""
        return self.queue.take(storage, self.fresh if self.fresh < size else size, out)

    def weigh_(self, storage: Storage, rows: Tensor, index: Tensor, weight: Tensor) -> None:
        """Replace the first weights by those of the fresh ``rows``, on the scale of ``weight[0]``, of ``index[0]``."""
        both = torch.cat((rows, flat_rows(index[:1], storage, rows.device)))
        probability = self.innermost.probability(both, storage=storage)
        ratio = (probability[:-1] / probability[-1]).clamp(min=torch.finfo(torch.float32).tiny)
        weight[: len(rows)] = weight[0] * ratio.pow(-self.beta).to(weight.dtype)

    def _empty(self) -> None:
        self.queue.begin(_ALL)
        self.sampler._empty()

    # -- state: ages of fresh rows, because a load into another capacity changes positions

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the wrapped sampler, the setting, and the ages of the fresh rows."""
        return super().snapshot() | {
            "undrawn": torch.tensor(self.queue.ages(), dtype=torch.int64, device="cpu").view(-1, 2)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; the rows must be loaded before the next draw or write.

        Raises:
            ValueError: the state is of another sampler; this sampler is unchanged.
        """
        ages = [(int(old), int(new)) for old, new in state_dict["undrawn"].tolist()]
        super().load_state_dict(state_dict)
        self.queue.begin(ages)
