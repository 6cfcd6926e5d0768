"""The plan of a mixture's batch: each member gathers the rows that it draws to a slice of one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlbuf_td.buffers.mixture_parts import largest_normalizer, normalizer_of
from rlbuf_td.buffers.plan import CompiledPlan
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.diagnostics.health import LastDraw
from rlbuf_td.kernels.strata import LEAST_RATIO
from rlbuf_td.samplers.reading import SCALAR, BatchSlot, BatchSlots, Named, Reading
from rlbuf_td.storages.indexing import refuse_unwritten
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.tensordict_fast import set_entries_

_WEIGHT = "priority_weight"


class _Member(NamedTuple):
    buffer: ReplayBuffer
    plan: CompiledPlan
    reading: Reading  # of as many rows as the mixture's batch has, or fewer


class MixturePlan:
    """Draws batches of ``size`` rows from members of equal layout that have no option that changes batches."""

    def __init__(self, members: Mapping[str, ReplayBuffer], plans: Sequence[CompiledPlan], size: int) -> None:
        self.buffers, self.size = members, size
        self.parts = [member.parts for member in members.values()]  # replaced if a component is replaced
        self.is_weighted = any(plan.is_stamped for plan in plans)
        self.members = [
            _Member(member, plan, Reading(plan.storage, size, self.is_weighted))
            for member, plan in zip(members.values(), plans, strict=True)
        ]
        first = self.members[0].reading
        layout, index = first.rows.layout, torch.Size([2] if first.lanes else [])
        named: list[Named] = [("index", (torch.int64, index))]
        named += [(SAMPLED_AT, (torch.int64, SCALAR)), (_WEIGHT, (torch.float32, SCALAR))] if self.is_weighted else []
        named += [("source", (torch.int64, SCALAR))]
        self.has_lanes, self.slots = bool(first.lanes), BatchSlots(layout, named, size)
        leaves = [leaf.nbytes for leaf in layout.leaves]
        #: Bytes per row of the targets of a reading: the leaves, coordinates and stamps.
        self.widths = np.array([*leaves, 16 if self.has_lanes else 8, 8], np.int64)
        self.targets = np.zeros(len(self.widths), np.int64)
        self.lock = Lock()  # the targets serve one batch at a time

    def holds(self, counts: Sequence[int]) -> bool:
        """Whether all members that provide rows can still draw them with this plan."""
        return all(
            member.parts is parts and (not count or (is_usual(member) and len(member.storage) and plan.holds()))
            for (member, plan, _), parts, count in zip(self.members, self.parts, counts, strict=True)
        )

    def sample(self, counts: Sequence[int]) -> TensorDict:
        """Return a batch with ``counts[i]`` rows of member ``i``, or fewer if its sampler draws fewer."""
        with self.lock:
            slot, begin = self.slots.take(), 0
            normalizers: dict[str, float | None] = {}
            slices: dict[str, slice] = {}
            for number, (name, count) in enumerate(zip(self.buffers, counts, strict=True)):
                if count:
                    slices[name], normalizers[name] = self._fill(number, slot, begin, count)
                    begin = slices[name].stop
            if self.is_weighted:
                largest = largest_normalizer(self.buffers, normalizers)
                for name, normalizer in normalizers.items():
                    slot.report[_WEIGHT][slices[name]] *= max((normalizer or 1.0) / largest, LEAST_RATIO)
            set_entries_(slot.batch, slot.report)
            return slot.batch if begin == self.size else slot.batch[:begin].clone()

    def _fill(self, number: int, slot: BatchSlot, begin: int, count: int) -> tuple[slice, float | None]:
        """Fill a slice of a batch; return it, and the member's normalizer."""
        member, plan, reading = self.members[number]
        report = slot.report
        with plan.storage.lock:
            if not plan.holds():
                raise RuntimeError(f"another thread has changed member {[*self.buffers][number]!r}: sample again")
            (live, are_cells), (flat, info) = plan.ring.numbered(), plan.draw(count)
            rows = slice(begin, begin + len(flat))
            self._point_to(slot, begin)
            reading.limit(len(flat))
            part = slot._replace(targets=self.targets.ctypes.data)
            if not reading(self.slots, part, flat, flat, live if are_cells else plan.without_holes(flat)):
                refuse_unwritten(flat, plan.storage)
            if not self.has_lanes:
                report["index"][rows] = flat
            report["source"][rows] = number
            weight: Tensor | None = info.get(_WEIGHT)
            if self.is_weighted:
                report[_WEIGHT][rows] = 1.0 if weight is None else weight
            drawn = None if weight is None else report[_WEIGHT]
            member.last_draw = LastDraw(report["index"], drawn, plan.ring.numbers[plan.ring.lanes], rows)
            if member.replay_count is not None:
                member.replay_count.count_(report["index"][rows])
            own = None if weight is None else {"index": report["index"][rows], _WEIGHT: weight}
            return rows, normalizer_of(member, own)

    def _point_to(self, slot: BatchSlot, begin: int) -> None:
        """Store the addresses of the tensors from row ``begin`` on."""
        named = slot.report
        tensors = [*slot.leaves, named["index"], *([named[SAMPLED_AT]] if self.is_weighted else [])]
        count = len(tensors)
        self.targets[:count] = [tensor.data_ptr() for tensor in tensors]
        self.targets[:count] += begin * self.widths[:count]


def is_usual(member: ReplayBuffer) -> bool:
    """Whether a member has no option that changes its batches."""
    return member._returns_as_drawn and member.prefetcher is None and member.include_info


def plan_mixture(members: Mapping[str, ReplayBuffer], size: int) -> MixturePlan | None:
    """Return the plan of these members, or None if one of them makes batches of its own."""
    plans = []
    for member in members.values():
        if not (is_usual(member) and len(member.storage)):
            return None
        with member.storage.lock:
            plan = member._plan(size)
        if not isinstance(plan, CompiledPlan) or not plan.is_plain:
            return None
        plans.append(plan)
    layouts = [(member.storage.layout, member.storage.ndim) for member in members.values()]
    if any(each != layouts[0] for each in layouts):
        return None
    with torch.inference_mode(False):
        return MixturePlan(members, plans, size)
