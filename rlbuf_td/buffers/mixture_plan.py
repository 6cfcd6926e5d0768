"""The short path of mixtures: each member writes its rows into its part of the batch, with one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.buffers.plan import RecencyPlan, UniformPlan, can_plan
from rlbuf_td.kernels.batch import Gather
from rlbuf_td.samplers import RecencySampler, UniformSampler

_CPU = torch.device("cpu")
_PLANS: dict[type, Any] = {UniformSampler: UniformPlan, RecencySampler: RecencyPlan}


class MixturePlan:
    """Fills batches from members with uniform or recency samplers.

    Args:
        members: replay buffers with the same row layout and ``ndim``.
        size: B.
    """

    def __init__(self, members: Sequence[Any], size: int) -> None:
        self.members, self.size = members, size
        self.plans = [_PLANS[type(each.sampler)](each.storage, each.sampler, size) for each in members]
        self.batch_size = torch.Size([size])
        first = self.plans[0]
        self.layout, lanes = first.rows.layout, first.lanes
        entries = [(leaf.dtype, leaf.shape) for leaf in self.layout.leaves]
        index = (torch.int64, torch.Size([2] if lanes else []))
        more = [index, (torch.int64, torch.Size([]))]
        self.gather = Gather(first.rows.flat, self.layout.extents, [*entries, *more], size)
        #: Bytes per row of each tensor: a member's part begins after the rows of the members before it.
        self.widths = np.array([*self.layout.extents[:, 1], 16 if lanes else 8, 8], np.int64)
        self.targets = np.empty(len(self.widths), np.int64)
        self.where, self.bases = self.targets.ctypes.data, self.gather.addresses
        self.counts: list[int] = []  # the counts of the last batch, for which `source` is valid
        self.source = torch.empty(0, dtype=torch.int64, device="cpu")
        self.blanks: list[Any] = []

    def sample(self, counts: list[int]) -> TensorDict | None:
        """Return a batch with the given number of rows from each member, or None to use the general path."""
        if not self.blanks:
            with torch.inference_mode(False):  # a batch may be used after inference mode
                self.blanks = self.make_blanks()
        place, source, batch = self.blanks.pop()
        begin = 0
        for member, plan, count in zip(self.members, self.plans, counts, strict=True):
            if not count:
                continue
            if member._storage is not plan.storage:
                return None
            self.targets[:] = self.bases[place] + begin * self.widths
            plan.gather.record["count"] = count
            with plan.storage.lock:
                written = plan.storage.numbers.values[0]
                if not written or not plan.holds() or member._sampler is not plan.sampler or not is_usual(member):
                    return None
                plan.draw(written, self.where)
            begin += count
        if counts != self.counts:
            self.counts, number = counts, torch.tensor(counts, device="cpu")
            self.source = torch.arange(len(counts), device="cpu").repeat_interleave(number)
        source.copy_(self.source)
        return batch

    def make_blanks(self) -> list[Any]:
        """Return batches of uninitialised memory, each with its slot in ``gather`` and its ``"source"`` tensor."""
        blanks = []
        for place, slot in enumerate(self.gather.slots):
            tensors = self.gather.allocate(slot)
            report = {"index": tensors[-2], "source": tensors[-1]}
            blanks.append((place, tensors[-1], self.layout.wrap(tensors, self.batch_size, _CPU, report)))
        return blanks


def is_usual(member: Any) -> bool:
    """Whether a member returns batches as drawn, and does not count draws."""
    return member._is_plain and member.replay_count is None and member._prefetcher is None and member._include_info


def make_mixture_plan(members: Sequence[Any], size: int) -> MixturePlan | None:
    """Return a plan for these members, or None if one of them needs the general path."""
    for member in members:
        kinds = type(member._sampler) in _PLANS and can_plan(member._storage, member._sampler)
        if not kinds or not is_usual(member) or not member._parts.draws:
            return None
    layouts = [(member.storage.layout, member.storage.ndim) for member in members]
    if any(each != layouts[0] for each in layouts):
        return None
    with torch.inference_mode(False):
        return MixturePlan(members, size)
