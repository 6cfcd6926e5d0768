"""The plan of a mixture's batch: each member gathers the rows that it draws to a slice of one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlbuf_td.buffers.plan import CompiledPlan
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.diagnostics.health import LastDraw
from rlbuf_td.kernels.strata import LEAST_RATIO
from rlbuf_td.samplers.reading import SCALAR, BatchSlot, BatchSlots, Named, Reading
from rlbuf_td.storages.indexing import flat_rows, refuse_unwritten, row_count
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.tensordict_fast import set_entries_

_WEIGHT = "priority_weight"
_CHANGED = "another thread has changed member {!r}: sample again"


def normalizer_of(member: ReplayBuffer, report: Mapping[Any, Any] | None) -> float | None:
    """Return the largest importance weight of a member, by which the member divides its weights; None: no division.

    ``report`` is the sampler's report of the member's rows in the batch, or None if the batch has no row of the member.
    """
    sampler, rows = member._initialize().prioritized, row_count(member.storage)
    if sampler is None or not rows or sampler.weight_norm is None:
        return None
    if sampler.weight_norm == "buffer":  # of all rows, drawn or not
        with member._locked():
            return float((rows * sampler.least_probability()) ** -sampler.beta)
    if report is None or "priority_weight" not in report:
        return None
    drawn = flat_rows(report.get("anchor_index", report["index"]), member.storage, sampler.device)
    probability = sampler.probability(drawn)
    likeliest = probability.argmax()
    if not probability[likeliest] > 0.0:  # all rows are fresh, and are never drawn otherwise
        return 1.0
    weight = (rows * probability[likeliest]) ** -sampler.beta
    return float(weight / report["priority_weight"][likeliest].clamp(min=LEAST_RATIO))  # which may have underflowed


def largest_normalizer(members: Mapping[str, ReplayBuffer], drawn: Mapping[str, float | None]) -> float:
    """Return the largest normalizer of all members; 1 if a member has ``weight_norm=None``.

    ``drawn`` has the normalizers of the members with rows in the batch.
    """
    samplers = [member._initialize().prioritized for member in members.values()]
    if any(sampler is not None and sampler.weight_norm is None for sampler in samplers):
        return 1.0
    known = [*drawn.values(), *(normalizer_of(member, None) for name, member in members.items() if name not in drawn)]
    return max([number for number in known if number is not None] + [1.0] * (None in samplers), default=1.0)


class MixturePlan:
    """Draws batches of ``size`` rows from members of equal layout that have no option that changes batches."""

    def __init__(self, members: Mapping[str, ReplayBuffer], plans: Sequence[CompiledPlan], size: int) -> None:
        self.members, self.size = members, size
        self.parts = [member.parts for member in members.values()]  # replaced if a component is replaced
        self.is_weighted = any(plan.is_stamped for plan in plans)
        #: The readings of at most ``size`` rows, and the plans, which hold the rows until a member drops its plans.
        self.readings = WeakKeyDictionary({plan: Reading(plan.storage, size, self.is_weighted) for plan in plans})
        self.plans = [ref(plan) for plan in plans]
        first = self.readings[plans[0]]
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
            member.parts is parts
            and (not count or (is_usual(member) and len(member.storage) and (plan := own()) and plan.holds()))
            for member, own, parts, count in zip(self.members.values(), self.plans, self.parts, counts, strict=True)
        )

    def sample(self, counts: Sequence[int]) -> TensorDict:
        """Return a batch with ``counts[i]`` rows of member ``i``, or fewer if its sampler draws fewer."""
        with self.lock:
            slot, begin = self.slots.take(), 0
            normalizers: dict[str, float | None] = {}
            slices: dict[str, slice] = {}
            for name, own, count in zip(self.members, self.plans, counts, strict=True):
                if count:
                    plan = own()
                    if plan is None:
                        raise RuntimeError(_CHANGED.format(name))
                    slices[name], normalizers[name] = self._fill(name, plan, slot, begin, count)
                    begin = slices[name].stop
            if self.is_weighted:
                largest = largest_normalizer(self.members, normalizers)
                for name, normalizer in normalizers.items():
                    slot.report[_WEIGHT][slices[name]] *= max((normalizer or 1.0) / largest, LEAST_RATIO)
            set_entries_(slot.batch, slot.report)
            return slot.batch if begin == self.size else slot.batch[:begin].clone()

    def _fill(
        self, name: str, plan: CompiledPlan, slot: BatchSlot, begin: int, count: int
    ) -> tuple[slice, float | None]:
        """Fill a slice of a batch; return it, and the member's normalizer."""
        member, report, reading = self.members[name], slot.report, self.readings[plan]
        with plan.storage.lock:
            if not plan.holds():
                raise RuntimeError(_CHANGED.format(name))
            (live, are_cells), (flat, info) = plan.ring.numbered(), plan.draw(count)
            rows = slice(begin, begin + len(flat))
            self._point_to(slot, begin)
            reading.limit(len(flat))
            part = slot._replace(targets=self.targets.ctypes.data)
            if not reading(self.slots, part, flat, flat, live if are_cells else plan.without_holes(flat)):
                refuse_unwritten(flat, plan.storage)
            if not self.has_lanes:
                report["index"][rows] = flat
            report["source"][rows] = [*self.members].index(name)
            weight: Tensor | None = info.get(_WEIGHT)
            if self.is_weighted:
                report[_WEIGHT][rows] = 1.0 if weight is None else weight
            drawn = None if weight is None else report[_WEIGHT]
            member.last_draw = LastDraw(report["index"], drawn, plan.ring.numbers[plan.ring.lanes], rows)
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
            plan = member.plans.get(size)
            if plan is None or not plan.holds():
                plan = member._plan(size)
        if not isinstance(plan, CompiledPlan) or not plan.is_plain:
            return None
        plans.append(plan)
    layouts = [(member.storage.layout, member.storage.ndim) for member in members.values()]
    if any(each != layouts[0] for each in layouts):
        return None
    with torch.inference_mode(False):
        return MixturePlan(members, plans, size)
