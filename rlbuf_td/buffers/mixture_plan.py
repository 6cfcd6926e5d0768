"""Fast sampling from mixtures. One compiled call per member copies the member's rows into the batch."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlbuf_td.buffers.plan import Blank, RecencyPlan, UniformPlan, can_plan
from rlbuf_td.kernels.batch import Gather
from rlbuf_td.kernels.dispatch import machine_code
from rlbuf_td.samplers import RecencySampler, UniformSampler
from rlbuf_td.storages.rows import PlainRows
from rlbuf_td.storages.state import LENGTH, NEWEST

_CPU = torch.device("cpu")
_PLANS: dict[type, Any] = {UniformSampler: UniformPlan, RecencySampler: RecencyPlan}


class MixturePlan:
    """Samples from members that have uniform or recency samplers, and equal row layouts and ``ndim``."""

    def __init__(self, members: Sequence[Any], size: int) -> None:
        from rlbuf_td.kernels.batch import cpu

        self.members, self.size, self.kernel = members, size, machine_code(cpu.sample_part, *[0] * 5)
        self.member_parts = [member.parts for member in members]  # rebuilt if a part is replaced
        self.plans = [_PLANS[type(each.sampler)](each.storage, each.sampler, size) for each in members]
        self.batch_size = torch.Size([size])
        first = self.plans[0]
        self.layout = first.rows.layout
        entries = [(leaf.dtype, leaf.shape) for leaf in self.layout.leaves]
        index = (torch.int64, torch.Size([2] if first.lanes else []))
        self.gather = Gather(
            first.rows.flat, self.layout.extents, [*entries, index, (torch.int64, torch.Size([]))], size
        )
        #: For each member and number of rows n: the first n elements of the member's scratch memory.
        self.firsts: list[dict[int, Tensor]] = [{} for _ in members]
        self.blanks: list[Blank] = []
        self.lock = Lock()  # each address array serves one batch at a time

    def has_all_parts(self) -> bool:
        """Whether all members have the storage, sampler and writer that they had when the plan was made."""
        return all(member.parts is parts for member, parts in zip(self.members, self.member_parts, strict=True))

    def sample(self, counts: Sequence[int]) -> TensorDict | None:
        """Return a batch with ``counts[i]`` rows of member ``i``, or None if the plan cannot be used."""
        for member, plan, count in zip(self.members, self.plans, counts, strict=True):
            if count and not (is_usual(member) and plan.holds()):
                return None
        begin = 0
        with self.lock:
            if not self.blanks:
                with torch.inference_mode(False):  # a batch may be used after inference mode
                    self.blanks = self.make_blanks()
            slot, _, batch, report = self.blanks.pop()
            for number, plan in enumerate(self.plans):
                count, firsts = counts[number], self.firsts[number]
                if not count:
                    continue
                if count not in firsts:
                    firsts[count] = plan.flat[:count]
                with plan.storage.lock:
                    numbers = plan.storage.numbers.values
                    written = numbers[LENGTH]
                    if not written or not plan.holds():
                        return None
                    plan.draw_part(written, firsts[count])
                    self.kernel(plan.gather.address, slot, begin, count, number)
                    last_draw = report["index"], None, numbers[NEWEST], slice(begin, begin + count)
                self.members[number].last_draw = last_draw
                begin += count
        return batch

    def make_blanks(self) -> list[Blank]:
        blanks = []
        for slot in self.gather.slots:
            tensors = self.gather.allocate(slot)
            report = {"index": tensors[-2], "source": tensors[-1]}
            blanks.append(Blank(slot, tensors, self.layout.wrap(tensors, self.batch_size, _CPU, report), report))
        return blanks


def is_usual(member: Any) -> bool:
    """Whether a plan supports the options of a member."""
    return member.returns_as_drawn and member.replay_count is None and member.prefetcher is None and member.include_info


def make_mixture_plan(members: Sequence[Any], size: int) -> MixturePlan | None:
    """Return a plan for these members, or None if one of them does not support plans."""
    for member in members:
        if not _is_planned(member) or not is_usual(member) or member.flow is not None or not member.parts.draws:
            return None
    layouts = [(member.storage.layout, member.storage.ndim) for member in members]
    if any(each != layouts[0] for each in layouts):
        return None
    with torch.inference_mode(False):
        return MixturePlan(members, size)


def _is_planned(member: Any) -> bool:
    """Whether the kernel supports the sampler and the rows of a member."""
    storage, sampler = member.storage, member.sampler
    return type(sampler) in _PLANS and can_plan(storage, sampler) and type(storage.rows) is PlainRows
