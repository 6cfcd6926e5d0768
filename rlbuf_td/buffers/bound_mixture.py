"""Bound batches of a mixture: each member draws its rows into a slice of one batch, without a batch of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlbuf_td.buffers.mixture_parts import Part, largest_normalizer, normalizer_of
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.diagnostics.health import LastDraw
from rlbuf_td.kernels.batch import batch_record
from rlbuf_td.kernels.dispatch import compiled_form, machine_code
from rlbuf_td.kernels.strata import LEAST_RATIO
from rlbuf_td.samplers.bound import SCALAR, Blank, Blanks, BoundDraw, lanes_of, unreadable
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.rows import PlainRows
from rlbuf_td.storages.tensordict_fast import entries_of

_WEIGHT = "priority_weight"


class _Bound(NamedTuple):
    """A member, and its draws."""

    member: ReplayBuffer
    draw: BoundDraw
    record: int  # address of what describes the member's rows to the function that gathers them
    updates: BoundDraw  # updates priorities, for as many rows as the mixture's batch has


class BoundMixture:
    """Bound draws of all members, which have rows of equal layout, for batches of ``size`` rows."""

    def __init__(self, members: Mapping[str, ReplayBuffer], draws: Sequence[BoundDraw], size: int) -> None:
        from rlbuf_td.kernels.batch import cpu

        self.members, self.size = members, size
        self.gather, self.scale = machine_code(cpu.gather_slice), machine_code(cpu.scale)
        self.parts = [member.parts for member in members.values()]  # replaced if a component is replaced
        self.bound: list[_Bound] = []
        self.records: list[np.ndarray] = []
        for member, draw in zip(members.values(), draws, strict=True):
            given = {"flat": draw.flat.data_ptr(), "lanes": lanes_of(draw.rows), "reads": 1, "steps": draw.rows.steps}
            given["serials"] = draw.ring.head.ctypes.data
            self.records.append(batch_record(size, draw.rows.flat, draw.rows.extents, **given))
            updates, record = type(draw)(draw.storage, draw.sampler, size, False), self.records[-1].ctypes.data
            self.bound.append(_Bound(member, draw, record, updates))
        self.is_weighted = any(draw.reports for draw in draws)
        named = {
            "index": (torch.int64, torch.Size([2] if draws[0].rows.lanes else [])),
            "source": (torch.int64, SCALAR),
        }
        named |= {_WEIGHT: (torch.float32, SCALAR), SAMPLED_AT: (torch.int64, SCALAR)} if self.is_weighted else {}
        self.blanks = Blanks(draws[0].rows.layout, [*named.items()], size)
        self.batch_size = self.blanks.batch_size
        #: As the ``targets`` of a draw that does not gather: the last two are addresses for its weights and stamps.
        self.outputs = np.zeros(len(self.blanks.layout.leaves) + 3, np.int64)
        self.targets = self.outputs.ctypes.data
        self.lock = Lock()  # each address array serves one batch at a time

    def has_all_parts(self) -> bool:
        """Whether all members have the storage, sampler and writer that they had when the mixture was bound."""
        return all(member.parts is parts for member, parts in zip(self.members.values(), self.parts, strict=True))

    def sample(self, counts: Sequence[int]) -> tuple[TensorDict | None, dict[str, Part]]:
        """Return a batch with ``counts[i]`` rows of member ``i``, and an empty dict.

        If the bound draw of a member cannot be used, return None and the parts of the members before it: a second draw
        would miss rows that are drawn only once.
        """
        for bound, count in zip(self.bound, counts, strict=True):
            if count and not is_usual(bound.member):
                return None, {}
        found: dict[str, Part] = {}
        begin = 0
        with self.lock:
            blank = self.blanks.take()
            for number, (name, count) in enumerate(zip(self.members, counts, strict=True)):
                if count:
                    normalizer = self._draw(number, blank, begin, count)
                    if normalizer is None:
                        parts = zip(found.items(), blank.batch.split([*filter(None, counts)]), strict=False)
                        return None, {drawn: Part(rows, part.normalizer, None) for (drawn, part), rows in parts}
                    found[name] = Part(blank.batch, normalizer or None, None)
                    begin += count
        if self.is_weighted:
            self._scale_weights(blank.report[_WEIGHT].data_ptr(), counts, found)
        return blank.batch, {}

    def _draw(self, number: int, blank: Blank, begin: int, count: int) -> float | None:
        """Fill a slice of a batch; return the member's normalizer (0.0: none), or None if compiled code refuses."""
        member, draw, record, _ = self.bound[number]
        report, rows = blank.report, slice(begin, begin + count)
        with draw.storage.lock:
            written, is_prioritized = len(draw.storage), bool(draw.reports)
            if not written or not draw.holds():
                return None
            if is_prioritized:
                self.outputs[-2] = report[_WEIGHT].data_ptr() + 4 * begin
                self.outputs[-1] = report[SAMPLED_AT].data_ptr() + 8 * begin
            draw.limit(count)
            if not draw(written, self.targets):
                return None
            self.records[number]["generations"] = draw.record["generations"]
            self.gather(record, blank.targets, begin, count, number, self.is_weighted and not is_prioritized)
            weight = report[_WEIGHT] if is_prioritized else None
            member.last_draw = LastDraw(report["index"], weight, draw.ring.newest, rows)
            if member.replay_count is not None:
                member.replay_count.count_(report["index"][rows])
            if not is_prioritized:
                return 0.0
            is_by_batch = draw.sampler.weight_norm == "batch"
            own = {name: report[name][rows] for name in ("index", _WEIGHT)} if is_by_batch else None
            return normalizer_of(member, own) or 0.0

    def _scale_weights(self, weights: int, counts: Sequence[int], found: Mapping[str, Part]) -> None:
        """Divide the weights at address ``weights`` by the largest weight of all members."""
        largest = largest_normalizer(self.members, found)
        for name, count in zip(self.members, counts, strict=True):
            if count:
                factor = max((found[name].normalizer or 1.0) / largest, LEAST_RATIO)
                self.scale(weights, count, factor)
                weights += 4 * count

    def update(self, batch: TensorDictBase) -> bool:
        """Update the priorities of the only prioritized member from a whole batch; return whether this was possible."""
        prioritized = [number for number, bound in enumerate(self.bound) if bound.draw.reports]
        if type(batch) is not TensorDict or batch.batch_size != self.batch_size or len(prioritized) != 1:
            return False
        member, _, _, updates = self.bound[prioritized[0]]
        entries = entries_of(batch)
        index, source, td_error = (entries.get(str(key)) for key in ("index", "source", member.priority_key))
        if source is None or index is None or td_error is None:
            return False
        if type(index) is not Tensor or not (self._is_source(source) and is_usual(member)):
            return False
        is_own: Tensor = source == prioritized[0]
        index = torch.where(is_own[:, None] if index.ndim > 1 else is_own, index, -1)
        with updates.storage.lock:
            stale = updates.update(index, td_error, entries.get(SAMPLED_AT))
        if stale is not None:
            member.stale_updates.add(stale)
        return stale is not None

    def _is_source(self, source: Tensor) -> bool:
        if type(source) is not Tensor or source.dtype is not torch.int64 or source.shape != self.batch_size:
            return False
        low, high = map(int, source.aminmax())
        return 0 <= low <= high < len(self.bound)


def is_usual(member: ReplayBuffer) -> bool:
    """Whether bound draws support the options of a member."""
    return member._returns_as_drawn and member.prefetcher is None and member.include_info


def bind_mixture(members: Mapping[str, ReplayBuffer], size: int) -> BoundMixture | None:
    """Return the bound draws of these members, or None if one of them does not support them."""
    draws = []
    for member in members.values():
        storage, rows = member.storage, member.storage.rows
        draw = compiled_form(member.sampler, "bind_draw")
        is_plain = not unreadable(storage) and isinstance(rows, PlainRows) and not rows.is_mapped
        is_plain = is_plain and not storage.layout.root.batch_size
        if draw is None or not is_plain or compiled_form(storage, "bind_read") is None:
            return None
        if not is_usual(member) or not member.parts.draws:
            return None
        with torch.inference_mode(False):
            draws.append(draw(storage, size, reads=False))
    layouts = [(member.storage.layout, member.storage.ndim) for member in members.values()]
    if any(isinstance(draw, str) for draw in draws) or any(each != layouts[0] for each in layouts):
        return None
    with torch.inference_mode(False):
        return BoundMixture(members, draws, size)
