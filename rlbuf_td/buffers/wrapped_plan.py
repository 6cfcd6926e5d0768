"""The short path of wrappers: one compiled call draws rows, another one gathers and revises them.

A plan of the wrapped sampler draws; see :mod:`rlbuf_td.buffers.plan`. Wrappers of wrappers take the general path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from rlbuf_td.buffers.plan import PLANS, Plan, can_plan
from rlbuf_td.kernels.batch import Gather, wrapped_loops
from rlbuf_td.kernels.episodes import BitBoundaries
from rlbuf_td.samplers import HindsightSampler, NStepSampler, SequenceSampler
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.tensordict_fast import set_entries_
from rlbuf_td.storages.trajectory_index import TrajectoryIndex

_CPU = torch.device("cpu")
_WHOLE = torch.Size([])
Key = tuple[str, ...]


class WrappedPlan(ABC):
    """Samples plain rows on the CPU through a wrapper.

    Args:
        storage: its rows are ``[T]`` or ``[T, E]``.
        wrapper: its sampler wraps none.
        size: rows per batch.
        drawn: rows that the wrapped sampler draws for a batch.
    """

    def __init__(self, storage: PackedStorage, wrapper: Any, size: int, drawn: int) -> None:
        self.storage, self.wrapper, self.drawn = storage, wrapper, drawn
        self.inner = PLANS[type(wrapper.sampler)](storage, wrapper.sampler, drawn, gathers=False)
        self.trajectories = TrajectoryIndex.of(storage, done_key=wrapper.done_key, traj_key=wrapper.traj_key)
        self.layout = self.inner.rows.layout
        self.places = self.layout.places
        entries = [(leaf.dtype, leaf.shape) for leaf in self.layout.leaves] + self.entries()
        self.gather = Gather(self.inner.rows.flat, self.layout.extents, entries, size)
        self.fixed = self.gather.rows, self.gather.row_bytes, self.inner.lanes
        self.batch_size = torch.Size([size])

    @abstractmethod
    def entries(self) -> list[tuple[torch.dtype, torch.Size]]:
        """Return dtype and shape of the entries that are gathered behind the leaves."""

    def sample(self) -> tuple[TensorDict, dict[str, Tensor]] | None:
        inner, written = self.inner, self.inner.length.value
        if not written or not inner.holds():
            return None
        boundaries: Any = self.trajectories.boundaries()
        rows = inner.gather.allocate()
        if not inner.draw(written, rows):
            return None
        tensors = self.gather.allocate()
        return self.revise(boundaries.bitmap, written, rows, tensors)

    @abstractmethod
    def revise(
        self, bitmap: Any, written: int, rows: list[Tensor], tensors: list[Tensor]
    ) -> tuple[TensorDict, dict[str, Tensor]]:
        """Fill a batch from the drawn ``rows`` and what is reported of them; return it and the report."""

    def update(self, batch: TensorDictBase, priority_key: NestedKey) -> int | None:
        return self.inner.update(batch, priority_key)


class NStepPlan(WrappedPlan):
    """Gathers n-step transitions."""

    def __init__(self, storage: PackedStorage, wrapper: NStepSampler, size: int) -> None:
        super().__init__(storage, wrapper, size, size)
        kernels, reward = wrapped_loops(), wrapper.reward_key
        kinds = [
            kernels.REWARD if key == reward else kernels.NEXT if key[0] == "next" else kernels.ROOT
            for key in self.places
        ]
        sizes = [leaf.dtype.itemsize for leaf in self.layout.leaves]
        self.leaves = np.column_stack((self.gather.leaves, kinds, sizes))
        self.shape = size, *[1] * len(self.layout.leaves[self.places[reward]].shape)

    def entries(self) -> list[tuple[torch.dtype, torch.Size]]:
        return [(torch.int64, _WHOLE)]

    def revise(
        self, bitmap: Any, written: int, rows: list[Tensor], tensors: list[Tensor]
    ) -> tuple[TensorDict, dict[str, Tensor]]:
        wrapper, where = self.wrapper, (rows[0].data_ptr(), self.drawn)
        wrapped_loops().n_step(
            bitmap, *self.fixed, self.leaves, self.gather.targets, *where, wrapper.n_steps, wrapper.gamma
        )
        report = dict(zip(self.inner.names, rows, strict=True))
        more = report | {"steps_to_next_obs": tensors[-1].view(self.shape)}
        return self.layout.wrap(tensors, self.batch_size, _CPU, more), report


class HindsightPlan(WrappedPlan):
    """Gathers rows and gives some of them the outcomes of others as goals."""

    def __init__(self, storage: PackedStorage, wrapper: HindsightSampler, size: int) -> None:
        super().__init__(storage, wrapper, size, size)
        goals = wrapper.goal_key, ("next", *wrapper.goal_key)
        self.goals = np.array([self.places[key] for key in goals if key in self.places], np.int64)
        outcome_key = "next", *wrapper.achieved_goal_key
        self.outcome, self.reward = self.places[outcome_key], self.places[wrapper.reward_key]
        self.uniform = torch.empty(size, dtype=torch.float64, device="cpu")

    def entries(self) -> list[tuple[torch.dtype, torch.Size]]:
        return [(torch.bool, _WHOLE)]

    def revise(
        self, bitmap: Any, written: int, rows: list[Tensor], tensors: list[Tensor]
    ) -> tuple[TensorDict, dict[str, Tensor]]:
        self.uniform.uniform_(generator=self.inner.generator)
        where, law = (rows[0].data_ptr(), self.drawn), (*self.wrapper.law, written, self.uniform.data_ptr())
        leaves, targets = self.gather.leaves, self.gather.targets
        wrapped_loops().hindsight(bitmap, *self.fixed, leaves, targets, *where, *law, self.outcome, self.goals)
        report = dict(zip(self.inner.names, rows, strict=True))
        batch = self.layout.wrap(tensors, self.batch_size, _CPU, {})
        self.wrapper.recompute_(batch, tensors[-1], tensors[self.reward])
        set_entries_(batch, {"relabeled": tensors[-1], **report})
        return batch, report


class SequencePlan(WrappedPlan):
    """Gathers the windows of anchors."""

    def __init__(self, storage: PackedStorage, wrapper: SequenceSampler, size: int) -> None:
        super().__init__(storage, wrapper, size, size // wrapper.window)
        self.flags = np.array([self.places.get(key, -1) for key in wrapper.flag_keys], np.int64)
        self.names = *self.inner.names, "mask", "burn_in_mask", "anchor_index"
        self.law = wrapper.length, wrapper.burn_in, wrapper.boundary == "shift"
        self.reports = np.array([(0, dtype.itemsize) for _, dtype in self.inner.reports], np.int64).reshape(-1, 2)

    def entries(self) -> list[tuple[torch.dtype, torch.Size]]:
        index = torch.int64, torch.Size([2] if self.inner.lanes else [])
        reports = [(dtype, _WHOLE) for _, dtype in self.inner.reports]
        return [index, *reports, (torch.bool, _WHOLE), (torch.bool, _WHOLE), index]

    def revise(
        self, bitmap: Any, written: int, rows: list[Tensor], tensors: list[Tensor]
    ) -> tuple[TensorDict, dict[str, Tensor]]:
        self.reports[:, 0] = [report.data_ptr() for report in rows[1:]]
        where, leaves, targets = (rows[0].data_ptr(), self.drawn), self.gather.leaves, self.gather.targets
        wrapped_loops().windows(bitmap, *self.fixed, leaves, targets, *where, *self.law, self.reports, self.flags)
        report = dict(zip(self.names, tensors[-len(self.names) :], strict=True))
        return self.layout.wrap(tensors, self.batch_size, _CPU, report), report

    def update(self, batch: TensorDictBase, priority_key: NestedKey) -> int | None:
        """Leave it to the wrapper, which turns the TD errors of a window into one."""
        return None


def make_plan(storage: Any, sampler: Any, size: int | None) -> Plan | WrappedPlan | None:
    """Return a plan for these parts, ``None`` if they need the general path."""
    wraps = type(sampler) in _PLANS
    if (
        not size
        or not can_plan(storage, sampler.sampler if wraps else sampler)
        or (wraps and not _fits(storage, sampler))
    ):
        return None
    with torch.inference_mode(False):  # the scratch memory outlives a call that was made in inference mode
        return _PLANS[type(sampler)](storage, sampler, size) if wraps else PLANS[type(sampler)](storage, sampler, size)


def _fits(storage: Any, wrapper: Any) -> bool:
    """Whether the rows hold what the kernels revise."""
    boundaries = TrajectoryIndex.of(storage, done_key=wrapper.done_key, traj_key=wrapper.traj_key).boundaries()
    dtypes = {leaf.key: leaf.dtype for leaf in storage.rows.layout.leaves}
    if type(wrapper) is NStepSampler and dtypes.get(wrapper.reward_key) not in (torch.float32, torch.float64):
        return False
    if type(wrapper) is SequenceSampler:
        flags = {dtypes.get(key, torch.bool) for key in wrapper.flag_keys}
        return wrapper.boundary != "strict" and flags == {torch.bool} and isinstance(boundaries, BitBoundaries)
    return isinstance(boundaries, BitBoundaries)


_PLANS: dict[type, Any] = {HindsightSampler: HindsightPlan, NStepSampler: NStepPlan, SequenceSampler: SequencePlan}
