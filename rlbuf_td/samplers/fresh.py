"""A sampler that begins each batch with newly written rows."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from rlbuf_td.kernels.dispatch import compiled_form, compiled_form_of
from rlbuf_td.kernels.episodes import occurrences
from rlbuf_td.kernels.recency import HEAD, LENGTH, NUMBER, QUEUE, Counters
from rlbuf_td.samplers.bound import BoundDraw
from rlbuf_td.samplers.common import OneStorage, setting
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.checks import state_of, whole
from rlbuf_td.storages.trajectory_index import DONE_KEY
from rlbuf_td.storages.write_clock import BY_ROW, NOW

_ALL = [(-1, 1 << 62, 0)]  # contains the ages of all rows, for any number of rows


class FreshQueue:
    """Keeps track of the fresh rows of a :class:`FreshRowsSampler`; see :mod:`rlbuf_td.kernels.recency.fresh_cpu`.

    Its state is an array of intervals, ``[n, 3]`` int64: a lane (0 for rows ``[T]``), and two row numbers or ages.
    """

    def __init__(self) -> None:
        record = np.zeros(1, QUEUE)
        self.state, self.address = record[0], record.ctypes.data  # a view, and its address for kernels
        self.storage: Callable[[], Any] = _nothing  # a weak reference to the storage of the last call
        self.rows: Any = None  # the rows of this storage
        self.times = self.heads = None  # the tensors of this storage whose addresses the state holds
        self.serves = OneStorage()
        self.begin(_ALL)

    def begin(self, ages: Any) -> None:
        """Replace the fresh rows: ``(e, a, b)`` means the newest ``a`` rows of lane e except the newest ``b``.

        A lane of -1 stands for all lanes.
        """
        self._ages: np.ndarray | None = np.reshape(
            np.asarray(ages, np.int64), (-1, 3)
        )  # until the next :meth:`note_writes`

    def _begin(self, storage: Any, ages: np.ndarray) -> None:
        newest, count = storage.heads.read(storage)
        self._places = np.stack((newest, count, np.zeros_like(count), np.zeros_like(count)))
        ages = np.concatenate([_of_lane(ages, lane) for lane in range(len(count))])
        ages[:, 1:] = np.maximum(count[ages[:, 0], None] - ages[:, 1:], 0)
        self.state["clock"], self._ages = storage.clock.numbers.values[NOW], None
        self._keep(ages[ages[:, 1] < ages[:, 2]])

    def _keep(self, intervals: np.ndarray) -> None:
        """Replace the fresh rows by intervals of row numbers, the oldest of each lane first."""
        state, lanes = self.state, self._places.shape[1]
        length = np.bincount(intervals[:, 0], minlength=lanes)
        capacity = int(state["steps"]) // 2 + 2 + int(length.max())
        self._intervals = np.empty((lanes, capacity, 2), np.int64)  # pages that are never written take no memory
        self._intervals[intervals[:, 0], occurrences(intervals[:, 0])] = intervals[:, 1:]
        self._places[HEAD], self._places[LENGTH] = 0, length
        state["places"], state["intervals"] = self._places.ctypes.data, self._intervals.ctypes.data
        state["capacity"] = capacity

    def intervals(self) -> np.ndarray:
        """Return intervals of the numbers of fresh rows."""
        length = self._places[LENGTH]
        lane = np.repeat(np.arange(len(length)), length)
        at = (self._places[HEAD][lane] + occurrences(lane)) % int(self.state["capacity"])
        return np.column_stack((lane, self._intervals[lane, at]))

    def switch_to(self, storage: Any) -> bool:
        """Switch to ``storage``; return whether its rows have been allocated."""
        rows, times, heads = storage.rows, storage.clock.times, storage.heads.memory
        if rows is not self.rows or self.storage() is not storage:
            self.serves.claim(storage)
            self.storage, self.rows = ref(storage), rows
            if rows is not None:
                lanes = rows.cells // rows.steps
                self.state["steps"], self.state["lanes"] = rows.steps, lanes
                if self._ages is None and self._places.shape[1] == lanes:
                    self._keep(self.intervals())
                elif self._ages is None:
                    self.begin(_ALL)
        if times is not self.times or heads is not self.heads or not (times is None or times.is_cpu):
            self.times, self.heads = times, heads
            self._on_host = times if times is None or not storage.clock.numbers[BY_ROW] else times.cpu()
            for name, memory in (("times", self._on_host), ("heads", heads)):
                self.state[name] = 0 if memory is None else memory.data_ptr()
        if rows is not None and self._ages is not None:
            self._begin(storage, self._ages)
        return rows is not None

    def holds(self) -> bool:
        """Whether compiled code may use the state, because nothing has changed that :meth:`switch_to` reads."""
        storage = self.storage()
        is_same = storage is not None and storage.clock.times is self.times and storage.heads.memory is self.heads
        return is_same and storage.rows is self.rows and self._ages is None

    def note_writes(self, storage: Any) -> None:
        """Mark as fresh the rows that were written since the last call of this method or :meth:`take`."""
        if self.switch_to(storage):
            from rlbuf_td.kernels.recency import fresh_cpu

            fresh_cpu.note_writes(self.address, counters_of(storage))

    def take(self, storage: Any, most: int) -> np.ndarray:
        """Return the flat indices of the newest fresh rows, at most ``most``; these rows are then no longer fresh."""
        found = np.empty(most, np.int64)
        from rlbuf_td.kernels.recency import fresh_cpu

        self.switch_to(storage)
        count = fresh_cpu.take(self.address, counters_of(storage), most, found.ctypes.data)
        return found[:count]

    def ages(self) -> np.ndarray:
        """Return the ages of the fresh rows, as the intervals that :meth:`begin` takes."""
        storage = self.storage()
        if storage is not None:
            self.note_writes(storage)
        if self._ages is not None:
            return self._ages
        found = self.intervals()
        found[:, 1:] = self._places[NUMBER][found[:, 0], None] - found[:, 1:]
        return found

    def fresh_rows(self, storage: Any) -> tuple[np.ndarray, np.ndarray] | None:
        """Return intervals of the fresh rows, and how many rows each lane has got; None before the first row."""
        self.note_writes(storage)
        return None if self._ages is not None else (self.intervals(), self._places[NUMBER].copy())

    def return_fresh(self, rows: tuple[np.ndarray, np.ndarray]) -> None:
        """Mark as fresh the rows of an earlier :meth:`fresh_rows`, and all rows written since then."""
        if (storage := self.storage()) is not None:
            self.note_writes(storage)
            intervals, number = rows
            written = np.column_stack((np.arange(len(number)), number, self._places[NUMBER]))
            self._keep(np.concatenate((intervals, written[written[:, 1] < written[:, 2]])))

    def __getstate__(self) -> dict[str, Any]:
        kept = {"state": self.state.tolist(), "ages": self._ages}
        return kept if self._ages is not None else kept | {"places": self._places, "intervals": self.intervals()}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        for name, number in zip(QUEUE.names or (), saved["state"], strict=True):
            self.state[name] = number
        self._ages, self.state["times"], self.state["heads"] = saved["ages"], 0, 0
        if self._ages is None:
            self._places = saved["places"].copy()
            self._keep(saved["intervals"])


def _of_lane(ages: np.ndarray, lane: int) -> np.ndarray:
    found = ages[(ages[:, 0] == lane) | (ages[:, 0] == -1)]
    found[:, 0] = lane
    return found


def counters_of(storage: Any) -> Counters:
    return Counters(numbers=addressof(storage.numbers.values), clock=addressof(storage.clock.numbers.values))


def _nothing() -> None:
    """Stand in for a weak reference while there is no storage."""


class FreshRowsSampler(SamplerWrapper):
    """Begins each batch with *fresh* rows; the wrapped sampler draws the rest.

    A row is fresh from its write until this sampler puts it at the beginning of a batch. If at most
    ``min(fresh, batch_size)`` rows are written between two batches, the second batch begins with all these rows. With
    ``fresh=1`` and one update per step, this sampler is combined experience replay. Inside a :class:`SequenceSampler`
    with ``boundary="shift"``, this sampler is the online queue of DreamerV3.

    **Distribution.** A batch of B rows begins with the newest f fresh rows, where f is the smallest of ``fresh``, B and
    the number of fresh rows. The wrapped sampler draws B rows, of which only B - f are used. If the wrapped
    sampler is a :class:`MinibatchSampler`, the f unused rows are not drawn again in the same epoch. All importance
    weights are those of the wrapped sampler; by design, they do not correct for the higher share of fresh rows.

    Args:
        sampler: draws the other rows, and handles priorities, writes and state.
        fresh: the largest number of fresh rows at the beginning of a batch, at least 1; may be set at any time.

    The newest row is the one written last, also among lanes that advance alone (:meth:`ReplayBuffer.lane`). Of one time
    step of all lanes, the row of the last lane is the newest. A row that is overwritten is no longer fresh. If
    ``storage.set`` has replaced all rows of a full lane since the last batch, all of them are fresh again. If processes
    share a buffer, every new row is fresh once in each process.

    Raises:
        ValueError: ``fresh`` is not a positive whole number, or the buffer's writer does not write in time order; (when
            sampling) rows were written out of time order.
        TypeError: the wrapped sampler is another wrapper, a :class:`QueueSampler`, or TorchRL's ``PrioritizedSampler``;
            (when sampling) the storage is not a :class:`PackedStorage`.

    Cost: O(E + f log E) for E lanes, in addition to the wrapped draw. Rows on another device than the CPU whose lanes
    advance alone: also a copy of their write times, 8 bytes per row.
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
    state_keys = _shown = ("fresh",)
    requires_shared_state = adds_fresh_rows = True
    fresh: int = setting(whole(1))

    def __init__(self, sampler: Sampler, fresh: int = 1) -> None:
        super().__init__(sampler, DONE_KEY, None)
        if self._is_prioritized and not hasattr(sampler, "law"):
            raise TypeError("FreshRowsSampler cannot wrap TorchRL's PrioritizedSampler: use a ProportionalSampler")
        if getattr(sampler, "max_age", None) is not None:
            kind = f"a {type(sampler).__name__} with max_age"
            raise ValueError(f"FreshRowsSampler draws each new row once, however old: it cannot wrap {kind}")
        if getattr(sampler, "draws_once", False):
            raise TypeError("FreshRowsSampler cannot wrap a QueueSampler, which gives each row once")
        self.queue = FreshQueue()
        self.fresh = fresh

    def settings_changed(self) -> None:
        """See :class:`~rlbuf_td.samplers.common.StatefulSampler`."""
        self.queue.state["fresh"] = self.fresh

    def watch(self, storage: Storage) -> None:
        """Mark as fresh the rows that were written since the last draw."""
        if isinstance(storage, PackedStorage):
            self.queue.note_writes(storage)

    def _draw(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        if not isinstance(storage, PackedStorage):
            raise TypeError(f"FreshRowsSampler needs the clock of a PackedStorage, got a {type(storage).__name__}")
        flat, info = super()._draw(storage, batch_size)
        found = self.queue.take(storage, len(flat))
        if len(found):
            rows, weight = torch.from_numpy(found).to(flat.device), info.get("priority_weight")
            if weight is not None:
                self.innermost.law.weigh_beside_(rows, flat[:1], weight)
                if self.innermost.weight_norm == "batch":
                    weight.div_(weight.max())
            kept = flat[len(rows) :]
            if getattr(self.innermost, "unique", False):
                kept = flat[~torch.isin(flat, rows)][: len(kept)]
            flat = torch.cat((rows, kept))
        return flat, info

    @compiled_form_of("_draw", "draw_batch", "batch_of", "anchored")
    def bind_draw(self, storage: PackedStorage, size: int, *, reads: bool) -> BoundDraw | str:
        """See :mod:`rlbuf_td.samplers.bound`."""
        draws = compiled_form(self.sampler, "bind_draw")
        draw = (
            f"{type(self.sampler).__name__} has no compiled draw"
            if draws is None
            else draws(storage, size, reads=reads)
        )
        if isinstance(draw, str):
            return draw
        if not draw.takes_fresh_rows:
            return f"fresh rows among those of a {type(self.sampler).__name__} are drawn with torch"
        self.queue.switch_to(storage)
        draw.kept = draw.kept, self, storage.numbers.values, storage.clock.numbers.values
        draw.record["queue"], draw.queue = self.queue.address, self.queue
        draw.record["numbers"], draw.record["clock"] = counters_of(storage)
        return draw

    def _empty(self) -> None:
        self.queue.serves.release()
        self.queue.begin(_ALL)
        torchrl_parts.empty_part(self.sampler)

    # -- state

    @property
    def progress(self) -> tuple[Any, Any]:
        """The fresh rows; setting an earlier progress makes rows that were handed out since then fresh again."""
        storage = self.queue.storage()
        rows = None if storage is None else self.queue.fresh_rows(storage)
        return rows, getattr(self.sampler, "progress", None)

    @progress.setter
    def progress(self, progress: tuple[Any, Any]) -> None:
        rows, inner = progress
        if rows is not None:
            self.queue.return_fresh(rows)
        if inner is not None:
            self.sampler.progress = inner

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the wrapped sampler, the setting ``fresh``, and the ages of the fresh rows."""
        return super().snapshot() | {"undrawn": torch.from_numpy(self.queue.ages().copy())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`. The storage must be loaded before the next draw or write.

        Raises:
            ValueError: the state is of another sampler; this sampler is unchanged.
        """
        with state_of(self):
            ages = state_dict["undrawn"].numpy()
            _refuse_ages(ages)
        super().load_state_dict(state_dict)
        self.queue.begin(ages)


def _refuse_ages(ages: np.ndarray) -> None:
    """Raise a ValueError unless saved ages are disjoint intervals, those of each lane from the oldest on."""
    fits = ages.ndim == 2 and ages.shape[1] == 3 and ages.dtype == np.int64
    if fits and len(ages):
        lane, old, new = ages.T
        follows = (lane[1:] > lane[:-1]) | ((lane[1:] == lane[:-1]) & (new[:-1] >= old[1:]))
        fits = bool(
            ((lane >= 0).all() or (lane == -1).all()) and (old > new).all() and (new >= 0).all() and follows.all()
        )
    if not fits:
        what = "disjoint intervals of ages in each lane, [n, 3], from the oldest on"
        raise ValueError(f"the saved fresh rows are {ages.tolist()}, expected {what}")
