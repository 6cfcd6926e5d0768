"""Fast sampling with sampler wrappers: one compiled call draws rows, a second call gathers and changes these rows.

The plan of the wrapped sampler draws the rows, see :mod:`rlbuf_td.buffers.plan`. With a FreshRowsSampler, one call does
everything. Nested wrappers have no plan.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from ctypes import addressof
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from rlbuf_td.buffers.plan import PLANS, Blank, Planned, can_plan
from rlbuf_td.kernels.batch import Gather
from rlbuf_td.kernels.dispatch import machine_code
from rlbuf_td.kernels.episodes import BitBoundaries
from rlbuf_td.samplers import (
    FreshRowsSampler,
    HindsightSampler,
    NStepSampler,
    ProportionalSampler,
    RecencySampler,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.rows import PlainRows
from rlbuf_td.storages.tensordict_fast import set_entries_
from rlbuf_td.storages.trajectory_index import TrajectoryIndex

_CPU = torch.device("cpu")
_WHOLE = torch.Size([])


class WrappedPlan(Planned):
    """Abstract base of the plans for sampler wrappers."""

    def __init__(
        self, storage: PackedStorage, wrapper: Any, size: int, drawn: int, more: Sequence[Any], *columns: Sequence[int]
    ) -> None:
        from rlbuf_td.kernels.batch import wrapped_cpu

        # drawn: the number of rows that the wrapped sampler draws; more: dtype and shape of entries that rows lack;
        # columns: further columns of the kernel's ``extents``.
        self.storage, self.wrapper, self.drawn, self.kernels = storage, wrapper, drawn, wrapped_cpu
        self.kernel: Callable[..., Any] | None = None  # the machine code of the wrapper's loop, from the first draw on
        self.inner = PLANS[type(wrapper.sampler)](storage, wrapper.sampler, drawn, gathers=False)
        self.trajectories = TrajectoryIndex.of(storage, done_key=wrapper.done_key, traj_key=wrapper.traj_key)
        self.layout = self.inner.rows.layout
        entries = [(leaf.dtype, leaf.shape) for leaf in self.layout.leaves]
        self.uniform = torch.zeros(size, dtype=torch.float64, device="cpu")
        record = {"lanes": self.inner.lanes, "uniform": self.uniform.data_ptr()}
        extents = np.column_stack((self.layout.extents, *columns))
        self.gather = Gather(self.inner.rows.flat, extents, [*entries, *more], size, **record)
        self.batch_size, self._blanks = torch.Size([size]), []

    def make_blanks(self) -> list[tuple[Blank, Blank]]:
        """Allocate two batches per sample: one to return, and one for the outputs of the wrapped sampler."""
        blanks = []
        for slot, drawn in zip(self.gather.slots, self.inner.make_blanks(), strict=False):
            tensors = self.gather.allocate(slot)
            report = self.report(tensors, drawn.report)
            batch = self.layout.wrap(tensors, self.batch_size, _CPU, report)
            blanks.append((Blank(slot, tensors, batch, drawn.report | report), drawn))
        return blanks

    @abstractmethod
    def report(self, tensors: list[Tensor], drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries that the wrapper adds to a batch; ``drawn`` holds those of the wrapped sampler."""

    def sample(self) -> Blank | None:
        inner = self.inner
        written, revision, self.newest = self.storage.numbers.values[:3]
        if not written or not inner.holds():
            return None
        boundaries: Any = self.trajectories.boundaries(revision)
        blank, drawn = self._blanks.pop() if self._blanks else self.blank()
        if not inner.draw(written, drawn.slot):
            return None
        given = boundaries.bitmap, self.gather.address, blank.slot, drawn.slot, self.drawn
        self.revise(given, written, blank)
        return blank

    @abstractmethod
    def revise(self, given: tuple[Any, ...], written: int, blank: Blank) -> None:
        """Call the wrapper's kernel, whose first arguments are ``given``, to fill the batch ``blank``."""

    def update(self, batch: TensorDictBase, priority_key: NestedKey) -> int | None:
        return self.inner.update(batch, priority_key)


def fresh_plan(storage: PackedStorage, wrapper: FreshRowsSampler, size: int) -> Planned:
    """Return a plan for the wrapped sampler; its batches begin with newly written rows."""
    plan = PLANS[type(wrapper.sampler)](storage, wrapper.sampler, size)
    wrapper.queue.follow(storage)
    kept = storage.numbers.values, storage.clock.numbers.values
    plan.kept = plan.kept, wrapper, *kept
    record = plan.gather.record
    record["queue"] = wrapper.queue.address
    record["numbers"], record["clock"] = map(addressof, kept)
    return plan


class NStepPlan(WrappedPlan):
    """Gathers n-step transitions."""

    def __init__(self, storage: PackedStorage, wrapper: NStepSampler, size: int) -> None:
        from rlbuf_td.kernels.batch import wrapped_cpu as kernels

        reward, leaves = wrapper.reward_key, storage.all_rows().layout.leaves
        kinds = [
            kernels.REWARD if leaf.key == reward else kernels.NEXT if leaf.key[0] == "next" else kernels.ROOT
            for leaf in leaves
        ]
        self.shape = size, *[1] * next(len(leaf.shape) for leaf in leaves if leaf.key == reward)
        widths = [leaf.dtype.itemsize for leaf in leaves]
        super().__init__(storage, wrapper, size, size, [(torch.int64, _WHOLE)], kinds, widths)

    def report(self, tensors: list[Tensor], drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        return drawn | {"steps_to_next_obs": tensors[-1].view(self.shape)}

    def revise(self, given: tuple[Any, ...], written: int, blank: Blank) -> None:
        arguments = *given, self.wrapper.n_steps, self.wrapper.gamma
        self.kernel = self.kernel or machine_code(self.kernels.n_step, *arguments)
        self.kernel(*arguments)


class HindsightPlan(WrappedPlan):
    """Gathers rows, and replaces the goals of some rows with achieved goals of other rows."""

    def __init__(self, storage: PackedStorage, wrapper: HindsightSampler, size: int) -> None:
        super().__init__(storage, wrapper, size, size, [(torch.bool, _WHOLE)])
        places, goals = self.layout.places, (wrapper.goal_key, ("next", *wrapper.goal_key))
        self.goals = np.array([places[key] for key in goals if key in places], np.int64)
        outcome_key = "next", *wrapper.achieved_goal_key
        self.outcome, self.reward = places[outcome_key], places[wrapper.reward_key]

    def report(self, tensors: list[Tensor], drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}  # ``revise`` adds the report, after the reward function has read the leaves

    def revise(self, given: tuple[Any, ...], written: int, blank: Blank) -> None:
        self.uniform.uniform_(generator=self.inner.generator)
        arguments = *given, *self.wrapper.law, written, self.outcome, self.goals
        self.kernel = self.kernel or machine_code(self.kernels.hindsight, *arguments)
        self.kernel(*arguments)
        relabeled = blank.tensors[-1]
        self.wrapper.recompute_(blank.batch, relabeled, blank.tensors[self.reward])
        set_entries_(blank.batch, {"relabeled": relabeled, **blank.report})


class SequencePlan(WrappedPlan):
    """Gathers the window of rows around each drawn row; does not update priorities."""

    def __init__(self, storage: PackedStorage, wrapper: SequenceSampler, size: int) -> None:
        index = torch.int64, torch.Size([2] if storage.ndim > 1 else [])
        reports = [(dtype, _WHOLE) for _, dtype in PLANS[type(wrapper.sampler)].reports]
        more = [index, *reports, (torch.bool, _WHOLE), (torch.bool, _WHOLE), index]
        super().__init__(storage, wrapper, size, size // wrapper.window, more)
        self.flags = np.array([self.layout.places.get(key, -1) for key in wrapper.flag_keys], np.int64)
        self.law = wrapper.length, wrapper.burn_in, wrapper.boundary == "shift"
        self.widths = np.array([dtype.itemsize for _, dtype in self.inner.reports], np.int64)

    def report(self, tensors: list[Tensor], drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        names = *drawn, "mask", "burn_in_mask", "anchor_index"
        return dict(zip(names, tensors[-len(names) :], strict=True))

    def revise(self, given: tuple[Any, ...], written: int, blank: Blank) -> None:
        arguments = *given, *self.law, self.widths, self.flags
        self.kernel = self.kernel or machine_code(self.kernels.windows, *arguments)
        self.kernel(*arguments)

    def update(self, batch: TensorDictBase, priority_key: NestedKey) -> int | None:
        return None


def make_plan(storage: Any, sampler: Any, size: int | None) -> Planned | None:
    """Return a plan for this storage and sampler, or None if they do not support plans."""
    wraps = type(sampler) in _PLANS
    if (
        not size
        or not can_plan(storage, sampler.sampler if wraps else sampler)
        or (wraps and not _fits(storage, sampler))
    ):
        return None
    with torch.inference_mode(False):  # the scratch memory outlives a call in inference mode
        return _PLANS[type(sampler)](storage, sampler, size) if wraps else PLANS[type(sampler)](storage, sampler, size)


def _fits(storage: Any, wrapper: Any) -> bool:
    """Whether the kernels support the settings of the wrapper, and the keys and dtypes of the rows."""
    if type(wrapper) is FreshRowsSampler:
        return type(wrapper.sampler) in _TAKES_FRESH
    if type(storage.rows) is not PlainRows:
        return False
    boundaries = TrajectoryIndex.of(storage, done_key=wrapper.done_key, traj_key=wrapper.traj_key).boundaries()
    dtypes = {leaf.key: leaf.dtype for leaf in storage.rows.layout.leaves}
    if type(wrapper) is NStepSampler and dtypes.get(wrapper.reward_key) not in (torch.float32, torch.float64):
        return False
    if type(wrapper) is SequenceSampler:
        flags = {dtypes.get(key, torch.bool) for key in wrapper.flag_keys}
        return wrapper.boundary != "strict" and flags == {torch.bool} and isinstance(boundaries, BitBoundaries)
    return isinstance(boundaries, BitBoundaries)


#: Samplers whose kernels can replace the first rows by fresh rows. The weights of RankSampler need torch operations,
#: and the kernel of MinibatchSampler reads the order of the epoch.
_TAKES_FRESH = {ProportionalSampler, RecencySampler, UniformSampler}
_PLANS: dict[type, Any] = {
    FreshRowsSampler: fresh_plan,
    HindsightSampler: HindsightPlan,
    NStepSampler: NStepPlan,
    SequenceSampler: SequencePlan,
}
