"""New rows first, then those of another sampler."""

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
    """The rows of a storage that no batch has had yet.

    Rows are numbered in the order of writing, from an arbitrary row on. The numbers that no batch has had lie in
    half-open intervals, the newest last. Places in the ring follow from the time step that was written last.
    """

    __slots__ = ("cells", "clock", "count", "intervals", "lanes", "newest", "rows", "storage")

    def __init__(self) -> None:
        self.storage: Callable[[], Any] = _nothing  # a weak reference to the storage of the last look
        self.rows: Any = None  # its rows
        self.lanes = self.cells = 0
        self.begin(_ALL)

    def begin(self, ages: list[Interval]) -> None:
        """Begin anew at the next look, with rows of these ages as the fresh ones: half-open intervals, oldest first."""
        self.intervals = [*ages]
        self.clock: int | None = None  # the storage's at the last look; until then intervals hold ages
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
            # Rows that were replaced tick, too: the ring has moved by what its newest time step says.
            ticks = now - self.clock
            written = min((newest - self.newest) % steps, ticks) if ticks < steps else steps
            begin = self.count + max(written * self.lanes - live, 0)
            self.count += written * self.lanes
            if self.intervals and self.intervals[-1][1] == begin:
                begin = self.intervals.pop()[0]
            if begin < self.count:
                self.intervals.append((begin, self.count))
            if len(self.intervals) % 4_096 == 0:  # those whose rows have been replaced are not drawn any more
                self.intervals = [each for each in self.intervals if each[1] > self.count - live]
        self.clock, self.newest = now, newest if live else -1

    def take(self, storage: Any, most: int, out: np.ndarray) -> int:
        """Write at most ``most`` fresh rows to ``out``, flat, newest first; return how many. They are fresh no more."""
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
        """Return the ages of fresh rows as :meth:`begin` takes them: loads and other capacities give other places."""
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
    """Stand for a weak reference to no storage."""


class FreshRowsSampler(SamplerWrapper):
    """Put the newest rows that no batch has had yet in the first places of each batch; the rest is the sampler's.

    Every row comes first in exactly one batch, unless it is replaced before: then it never does. With as many new rows
    per batch as ``fresh``, that is each row as soon as it is written (combined experience replay, with ``fresh=1`` and
    one update per step; the online queue of DreamerV3, inside a :class:`SequenceSampler` with ``boundary="shift"``).

    **Law.** Of a batch of B rows, f are fresh, where f is the least of ``fresh``, B and the rows not drawn yet,
    newest first. The other B - f follow the law of the wrapped sampler, which may draw fresh rows again. All rows have
    the importance weights that the wrapped sampler gives them: fresh rows are meant to weigh more than its law says,
    and no weight takes that back.

    Args:
        sampler: what draws the other rows. Priorities, writes and settings go to it.
        fresh: how many fresh rows a batch has at most; it may be set at any time.

    Of processes that share a buffer, each has the rows that are fresh to itself.

    Raises:
        ValueError: ``fresh`` is not a positive whole number; (in a buffer) the writer keeps no order of time.
        TypeError: the sampler is a wrapper: ``HindsightSampler(FreshRowsSampler(...))`` is the order; (when sampling)
            the storage is not a :class:`PackedStorage`.

    Cost: O(f) beside the wrapped draw; over priorities, their weights are looked up, too.

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
        # Rows are numbered from an arbitrary 0 on in the order of writing. Numbers that no batch has had yet lie in
        # half-open intervals, the newest last.
        self.queue = FreshQueue()

    def watch(self, storage: Storage) -> None:
        """Note which rows there are, after a load for example; no trajectories are needed."""
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
        """Write the fresh rows of a batch of a size to ``out``, flat; return how many. They are fresh no more."""
        return self.queue.take(storage, self.fresh if self.fresh < size else size, out)

    def weigh_(self, storage: Storage, rows: Tensor, index: Tensor, weight: Tensor) -> None:
        """Put importance weights of fresh rows, flat, in front of those of drawn ones, on the scale of the first."""
        both = torch.cat((rows, flat_rows(index[:1], storage, rows.device)))
        probability = self.innermost.probability(both, storage=storage)
        ratio = (probability[:-1] / probability[-1]).clamp(min=torch.finfo(torch.float32).tiny)
        weight[: len(rows)] = weight[0] * ratio.pow(-self.beta).to(weight.dtype)

    def _empty(self) -> None:
        self.queue.begin(_ALL)
        self.sampler._empty()

    # -- state: undrawn rows by age, since loads and other capacities give rows other places

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the wrapped sampler, the setting, and the ages of the rows that are still fresh."""
        return super().snapshot() | {
            "undrawn": torch.tensor(self.queue.ages(), dtype=torch.int64, device="cpu").view(-1, 2)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, over rows that are loaded before the next draw or write.

        Raises:
            ValueError: the state is not that of such a sampler; this one stays as it was.
        """
        ages = [(int(old), int(new)) for old, new in state_dict["undrawn"].tolist()]
        super().load_state_dict(state_dict)
        self.queue.begin(ages)
