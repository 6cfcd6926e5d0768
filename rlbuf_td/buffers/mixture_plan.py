"""The plan of a mixture's batch: each member gathers the rows that it draws to a slice
of one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, ref

import torch
from tensordict import TensorDict
from torch import Tensor

from rlbuf_td.buffers.parts import Parts
from rlbuf_td.buffers.plan import CompiledPlan
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.kernels.strata import LEAST_RATIO
from rlbuf_td.samplers.reading import SCALAR, BatchSlot, BatchSlots, Named, Reading
from rlbuf_td.storages.indexing import flat_rows, refuse_unwritten, row_count
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.tensordict_fast import set_entries_

_WEIGHT = "priority_weight"
_MOST_PARTS = 64
_CHANGED = "another thread has changed member {!r}: sample again"


class _Part(NamedTuple):
    """A member's part of the memory for drawn rows."""

    rows: Tensor  # ``[n]`` int64, flat indices
    weight: Tensor  # ``[n]`` float32
    scratch: Tensor  # ``[n]`` float64, for random numbers


def normalizer_of(
    member: ReplayBuffer, report: Mapping[Any, Any] | None
) -> float | None:
    """Return the largest importance weight of a member, by which the member divides its
    weights; None: no division.

    ``report`` is the sampler's report of the member's rows in the batch, or None if the
    batch has no row of the member.
    """
    sampler, rows = member._initialize().prioritized, row_count(member.storage)
    if sampler is None or not rows or sampler.weight_norm is None:
        return None
    if sampler.weight_norm == "buffer":  # of all rows, drawn or not
        with member._locked():
            return float((rows * sampler.least_probability()) ** -sampler.beta)
    if report is None or "priority_weight" not in report:
        return None
    drawn = flat_rows(
        report.get("anchor_index", report["index"]), member.storage, sampler.device
    )
    probability = sampler.probability(drawn)
    likeliest = probability.argmax()
    weight = (rows * probability[likeliest]) ** -sampler.beta
    # which may have underflowed
    return float(weight / report["priority_weight"][likeliest].clamp(min=LEAST_RATIO))


def largest_normalizer(
    members: Mapping[str, ReplayBuffer], drawn: Mapping[str, float | None]
) -> float:
    """Return the largest normalizer of all members; 1 if a member has
    ``weight_norm=None``.

    ``drawn`` has the normalizers of the members with rows in the batch.
    """
    samplers = [member._initialize().prioritized for member in members.values()]
    if any(sampler is not None and sampler.weight_norm is None for sampler in samplers):
        return 1.0
    known = [
        *drawn.values(),
        *(
            normalizer_of(member, None)
            for name, member in members.items()
            if name not in drawn
        ),
    ]
    return max(
        [number for number in known if number is not None] + [1.0] * (None in samplers),
        default=1.0,
    )


class MixturePlan:
    """Draws batches of ``size`` rows from members of equal layout that have no option
    that changes batches.

    Its memory serves one batch at a time: a thread takes the plan away from the mixture
    while it uses it. A lock would still be held in a process that is forked meanwhile.
    """

    def __init__(
        self,
        members: Mapping[str, ReplayBuffer],
        plans: Sequence[CompiledPlan],
        size: int,
    ) -> None:
        self.members, self.size = members, size
        # replaced if a component is replaced
        self.parts = [member.parts for member in members.values()]
        self.is_weighted = any(plan.is_stamped for plan in plans)
        #: The readings of at most ``size`` rows, and the plans, which hold the rows
        # until a member drops its plans.
        self.readings = WeakKeyDictionary(
            {plan: Reading(plan.storage, size, self.is_weighted) for plan in plans}
        )
        self.plans = [ref(plan) for plan in plans]
        first = self.readings[plans[0]]
        layout, index = first.rows.layout, torch.Size([2] if first.lanes else [])
        named: list[Named] = [("index", (torch.int64, index))]
        named += (
            [(SAMPLED_AT, (torch.int64, SCALAR)), (_WEIGHT, (torch.float32, SCALAR))]
            if self.is_weighted
            else []
        )
        named += [("source", (torch.int64, SCALAR))]
        self.has_lanes, self.slots = bool(first.lanes), BatchSlots(layout, named, size)
        kinds = torch.int64, torch.float32, torch.float64
        self.drawn = _Part(
            *(torch.zeros(size, dtype=dtype, device="cpu") for dtype in kinds)
        )
        self.source = torch.zeros(size, dtype=torch.int64, device="cpu")
        # the bounds of the members' parts in `source`
        self.sourced: list[tuple[int, int]] = []
        self.parts_by_bounds: dict[tuple[int, int], _Part] = {}

    def held(self, counts: Sequence[int]) -> list[CompiledPlan | None] | None:
        """Return the plans of the members; None if one that provides rows can no longer
        draw them with its plan."""
        plans = [own() for own in self.plans]
        holds = all(
            member.parts is parts
            and (
                not count
                or (
                    is_usual(member)
                    and len(member.storage)
                    and plan is not None
                    and plan.holds()
                )
            )
            for member, plan, parts, count in zip(
                self.members.values(), plans, self.parts, counts, strict=True
            )
        )
        return plans if holds else None

    def sample(self, counts: Sequence[int], plans: Sequence[Any]) -> TensorDict:
        """Return a batch with ``counts[i]`` rows of member ``i``, or fewer if its
        sampler draws fewer.

        ``plans`` are :meth:`held` plans, which a member may drop meanwhile, because it
        has other batch sizes.
        """
        slot, end = self.slots.take(), 0
        report = slot.report
        normalizers: dict[str, float | None] = {}
        bounds: list[tuple[int, int]] = []
        for name, plan, parts, count in zip(
            self.members, plans, self.parts, counts, strict=True
        ):
            begin = end
            if count:
                end, normalizers[name] = self._fill(
                    name, plan, parts, slot, begin, count
                )
            bounds.append((begin, end))
        if not self.has_lanes:
            report["index"].copy_(self.drawn.rows)
        if bounds != self.sourced:
            for place, (first, past) in enumerate(bounds):
                self.source[first:past] = place
            self.sourced = bounds
        report["source"].copy_(self.source)
        if self.is_weighted:
            largest = largest_normalizer(self.members, normalizers)
            for name, each in zip(self.members, bounds, strict=True):
                factor = max((normalizers.get(name) or 1.0) / largest, LEAST_RATIO)
                if factor != 1.0:
                    self._part(*each).weight.mul_(factor)
            report[_WEIGHT].copy_(self.drawn.weight)
        set_entries_(slot.batch, report)
        return (
            slot.batch
            if end == self.size
            else cast("TensorDict", slot.batch[:end]).clone()
        )

    def _part(self, begin: int, end: int) -> _Part:
        found = self.parts_by_bounds.get((begin, end))
        if found is None:
            if len(self.parts_by_bounds) == _MOST_PARTS:
                self.parts_by_bounds.clear()
            found = self.parts_by_bounds[begin, end] = _Part(
                *(each[begin:end] for each in self.drawn)
            )
        return found

    def _fill(
        self,
        name: str,
        plan: CompiledPlan,
        parts: Parts,
        slot: BatchSlot,
        begin: int,
        count: int,
    ) -> tuple[int, float | None]:
        """Fill a part of a batch; return where it ends, and the member's normalizer."""
        member, part, end = (
            self.members[name],
            self._part(begin, begin + count),
            begin + count,
        )
        with plan.storage.lock:
            if plan.storage.has_estimates:
                member._complete_rows()
            if member.parts is not parts or not plan.holds():
                raise RuntimeError(_CHANGED.format(name))
            live, are_cells = numbered = plan.ring.numbered()
            if plan.draw_into is not None:
                report = {_WEIGHT: part.weight} if plan.is_stamped else {}
                plan.draw_into(plan.storage, numbered, part.rows, report, part.scratch)
            else:
                drawn, info = plan.draw(count)
                end = begin + len(drawn)
                part = self._part(begin, end)
                part.rows.copy_(drawn)
                part.weight.copy_(info.get(_WEIGHT, part.weight))
            if not are_cells:
                live = plan.without_holes(part.rows)
            if not self.readings[plan].fill(slot, self.drawn.rows, live, begin, end):
                refuse_unwritten(part.rows, plan.storage)
            if not plan.is_stamped:
                part.weight.fill_(1.0)
            names = ("index", _WEIGHT) if plan.is_stamped else ("index",)
            drawn_report = {name: slot.report[name] for name in names}
            member._last_draw = (
                drawn_report,
                plan.ring.numbers[plan.ring.lanes],
                slice(begin, end),
            )
            return end, normalizer_of(
                member,
                {"index": part.rows, _WEIGHT: part.weight} if plan.is_stamped else None,
            )


def is_usual(member: ReplayBuffer) -> bool:
    """Whether a member has no option that changes its batches."""
    return member._returns_as_drawn and member.include_info


def plan_mixture(members: Mapping[str, ReplayBuffer], size: int) -> MixturePlan | None:
    """Return the plan of these members, or None if one of them makes batches of its
    own."""
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
    layouts = [
        (member.storage.layout, member.storage.ndim) for member in members.values()
    ]
    if any(each != layouts[0] for each in layouts):
        return None
    with torch.inference_mode(False):
        return MixturePlan(members, plans, size)
