"""A sampler that begins each batch with newly written rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof
from typing import Any, TypeAlias
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from rlbuf_td.kernels.dispatch import compiled_form, compiled_form_of
from rlbuf_td.kernels.recency import QUEUE
from rlbuf_td.samplers.bound import BoundDraw
from rlbuf_td.samplers.common import OneStorage, setting
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.checks import state_of, whole
from rlbuf_td.storages.lane_heads import lanes_apart
from rlbuf_td.storages.trajectory_index import DONE_KEY
from rlbuf_td.storages.write_clock import NOW

Interval: TypeAlias = tuple[int, int]
_ALL = [(1 << 62, 0)]  # an interval that contains the ages of all rows, for any number of rows


class FreshQueue:
    """Keeps track of the fresh rows of a :class:`FreshRowsSampler`; see :mod:`rlbuf_td.kernels.recency.fresh_cpu`."""

    def __init__(self) -> None:
        record = np.zeros(1, QUEUE)
        self.state, self.address = record[0], record.ctypes.data  # a view, and its address for kernels
        self.storage: Callable[[], Any] = _nothing  # a weak reference to the storage of the last call
        self.rows: Any = None  # the rows of this storage
        self.serves = OneStorage()
        self.begin(_ALL)

    def begin(self, ages: Sequence[Interval]) -> None:
        """Replace the fresh rows: a pair ``(a, b)`` in ``ages`` means the newest ``a`` rows except the newest ``b``."""
        self.state["began"] = 0
        self._keep(ages)

    def _keep(self, intervals: Sequence[Interval]) -> None:
        state = self.state
        capacity = int(state["steps"] * state["lanes"]) // 2 + 2 + len(intervals)
        self._intervals = np.empty((capacity, 2), np.int64)  # pages that are never written take no memory
        self._intervals[: len(intervals)] = np.reshape(intervals, (-1, 2))
        state["intervals"], state["capacity"] = self._intervals.ctypes.data, capacity
        state["head"], state["length"] = 0, len(intervals)

    def intervals(self) -> list[Interval]:
        head, length, capacity = (int(self.state[name]) for name in ("head", "length", "capacity"))
        return [(int(old), int(new)) for old, new in self._intervals[(head + np.arange(length)) % capacity]]

    def follow(self, storage: Any) -> tuple[int, int, int]:
        """Switch to ``storage``; return ``(rows stored, index of the newest time step, time steps ever written)``."""
        rows = storage.rows
        if rows is not self.rows or self.storage() is not storage:
            self.serves.claim(storage)
            self.storage, self.rows = ref(storage), rows
            if rows is not None:
                self.state["steps"], self.state["lanes"] = rows.steps, rows.cells // rows.steps
                self._keep(self.intervals())
        live, _, newest = storage.numbers.values[:3]
        return live, newest, storage.clock.numbers.values[NOW]

    def look(self, storage: Any) -> None:
        """Mark as fresh the rows that were written since the last call of this method or :meth:`take`."""
        numbers = self.follow(storage)
        if self.rows is not None:
            from rlbuf_td.kernels.recency import fresh_cpu

            fresh_cpu.look(self.address, *numbers)

    def take(self, storage: Any, most: int) -> np.ndarray:
        """Return the flat indices of the newest fresh rows, at most ``most``; these rows are then no longer fresh."""
        found = np.empty(most, np.int64)
        from rlbuf_td.kernels.recency import fresh_cpu

        count = fresh_cpu.take(self.address, *self.follow(storage), most, found.ctypes.data)
        return found[:count]

    def ages(self) -> list[Interval]:
        """Return the ages of the fresh rows, as the pairs that :meth:`begin` takes."""
        storage, count = self.storage(), int(self.state["count"])
        if storage is not None:
            self.look(storage)
            count = int(self.state["count"])
        found = self.intervals()
        return [(count - begin, count - end) for begin, end in found] if self.state["began"] else found

    def place(self, storage: Any) -> tuple[list[Interval], int]:
        self.look(storage)
        return self.intervals(), int(self.state["count"])

    def rewind(self, place: tuple[list[Interval], int]) -> None:
        """Mark as fresh the rows that were fresh at an earlier :meth:`place`, and all rows written since then."""
        intervals, count = place
        if (storage := self.storage()) is not None:
            self.look(storage)
            self._keep([*intervals, (count, int(self.state["count"]))])

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.state.tolist(), "intervals": self.intervals()}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        for name, number in zip(QUEUE.names or (), saved["state"], strict=True):
            self.state[name] = number
        self._keep(saved["intervals"])


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

    All rows become fresh again if T or more time steps are written between two batches. T is the capacity in time
    steps; calls of ``storage.set`` count as writes. If processes share a buffer, every new row is fresh once in each
    process.

    Raises:
        ValueError: ``fresh`` is not a positive whole number, or the buffer's writer does not write in time order; (when
            sampling) rows were written out of time order.
        TypeError: the wrapped sampler is another wrapper, a :class:`QueueSampler`, or TorchRL's ``PrioritizedSampler``;
            (when sampling) the storage is not a :class:`PackedStorage`, or its lanes stand at unlike steps.

    Cost: O(f), in addition to the wrapped draw.
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
        if getattr(sampler, "age_limit", None) is not None:
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
            self.queue.look(storage)

    def _draw(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        if not isinstance(storage, PackedStorage):
            raise TypeError(f"FreshRowsSampler needs the clock of a PackedStorage, got a {type(storage).__name__}")
        if lanes_apart(storage):
            raise TypeError("FreshRowsSampler finds fresh rows by time step: lanes must stand at the same step")
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
        self.queue.follow(storage)
        counters = storage.numbers.values, storage.clock.numbers.values
        draw.kept = draw.kept, self, counters
        draw.record["queue"], draw.has_queue = self.queue.address, True
        draw.record["numbers"], draw.record["clock"] = map(addressof, counters)
        return draw

    def _empty(self) -> None:
        self.queue.serves.release()
        self.queue.begin(_ALL)
        torchrl_parts.empty_part(self.sampler)

    # -- state

    def place(self, storage: Storage) -> tuple[Any, Any]:
        """Return the fresh rows and the place of the wrapped sampler, for :meth:`rewind`."""
        inner = getattr(self.sampler, "place", None)
        return None if inner is None else inner(storage), self.queue.place(storage)

    def rewind(self, place: tuple[Any, Any]) -> None:
        """Go back to an earlier :meth:`place`; rows given to batches since then are fresh again."""
        inner, fresh = place
        if inner is not None:
            self.sampler.rewind(inner)
        self.queue.rewind(fresh)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the wrapped sampler, the setting ``fresh``, and the ages of the fresh rows."""
        return super().snapshot() | {
            "undrawn": torch.tensor(self.queue.ages(), dtype=torch.int64, device="cpu").view(-1, 2)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`. The storage must be loaded before the next draw or write.

        Raises:
            ValueError: the state is of another sampler; this sampler is unchanged.
        """
        with state_of(self):
            ages = [(int(old), int(new)) for old, new in state_dict["undrawn"].tolist()]
        bounds = [age for pair in ages for age in pair]
        if (
            any(old <= new for old, new in ages)
            or bounds != sorted(bounds, reverse=True)
            or (bounds and bounds[-1] < 0)
        ):
            raise ValueError(
                f"the saved fresh rows are {ages}, expected disjoint intervals of ages, from the oldest on"
            )
        super().load_state_dict(state_dict)
        self.queue.begin(ages)
