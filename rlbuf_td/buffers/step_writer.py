"""Writes steps of NumPy arrays without a TensorDict."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.storages.staged_step import StagedStep
from rlbuf_td.storages.torchrl_parts import modules_of
from rlbuf_td.storages.write_plan import CompiledWrites, WritePlan
from rlbuf_td.storages.writes import TakenLane, Write

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer

_MODULES = "rlbuf_td.", "torchrl."


class StepWriter:
    """Writes a staged step to a buffer, again and again.

    The step goes to the rows in one compiled call if nothing else has to see it.
    Otherwise (transforms, statistics, flow control, rows on a GPU, a writer of
    TorchRL's, ...) :meth:`ReplayBuffer.add` or :meth:`ReplayBuffer.extend` writes it.
    This is decided when parts of the buffer, or its plan of writes, have changed.

    Args:
        staged: the memory of the step.
        lane: the lane of its one row; None: it has a row for each lane.
    """

    def __init__(self, staged: StagedStep, lane: int | None = None) -> None:
        self.staged, self.lane = staged, lane
        self._reset()

    def _reset(self) -> None:
        """Forget the plan, and all that was prepared for it."""
        # weak: a plan holds the rows, which a buffer may release
        self._plan: Any = _no_plan
        self._transforms: Collection[Any] = ()  # the buffer's own
        # whether a write to the first slot removes the rows so far
        self._begins_anew = False
        self._restarts = False  # whether the sampler restarts its epochs
        # the memory of the steps with what the writer adds
        self._completed: list[StagedStep] = []
        #: How the plan writes the step, or some of its rows; None: as a TensorDict.
        self._whole: Write | None = None
        self._some: Write | None = None
        lanes = self.staged.size
        self._lane_ids = np.full(lanes, self.lane or 0, np.int64)
        self._chosen = self.staged.like_this()

    def write(self, buffer: ReplayBuffer, lanes: np.ndarray | None = None) -> None:
        """Write the step, or the rows of ``lanes``, a mask ``[E]``.

        Errors: those of :meth:`ReplayBuffer.add` and :meth:`ReplayBuffer.extend`.
        """
        storage = buffer._storage
        with storage.lock:
            plan: Any = storage.write_plan
            is_chosen = plan is not None and self._plan() is plan
            if not is_chosen or plan.changes != plan.listeners.changes:
                self._choose(buffer, plan)
            if self._is_direct(buffer):
                write, count = self._whole, 1
                if lanes is not None:
                    write, count = self._some, self._choose_rows(lanes)
                plan.write(storage, write, plan.rows.lanes, count)
                if self._restarts:
                    buffer.parts.sampler.add(None)
                return
        self._write_rows(buffer, lanes)

    def _is_direct(self, buffer: ReplayBuffer) -> bool:
        """Whether the plan writes the step; between two writes, this may change."""
        return (
            self._whole is not None
            and not (self._begins_anew and buffer._storage._ring.cursor == 0)
            and not self._transforms
            and buffer.flow is None
            and buffer.episode_stats is None
            and not buffer._service_shutdown
        )

    def _choose(self, buffer: ReplayBuffer, plan: WritePlan | None) -> None:
        """Choose how steps are written, until the storage makes another plan."""
        self._plan, self._whole, self._some = _no_plan, None, None
        if plan is None or plan.changes != plan.listeners.changes:
            return
        is_ours = isinstance(plan, CompiledWrites) and _is_ours(buffer)
        if is_ours and buffer.can_write_staged(plan):
            self._stage(buffer, plan)
        # last: after an interrupt, the next write chooses again
        self._plan = ref(plan)

    def _stage(self, buffer: ReplayBuffer, plan: CompiledWrites) -> None:
        """Let the plan write the step from its memory, unless it does not fit."""
        if self.lane is None and self.staged.size != plan.ring.lanes:
            return  # the write raises the error
        parts = buffer.parts
        layout = plan.rows.layout
        added = parts.writer.added_keys
        self._completed = [
            step.completed(layout, added) for step in (self.staged, self._chosen)
        ]
        whole, some = (step.addresses_in(layout) for step in self._completed)
        if whole is None or some is None:
            return  # here, too
        self._transforms = modules_of(parts.transforms)
        self._begins_anew = parts.writer.begins_anew
        self._restarts = bool(parts.notices)
        self._some = plan.stage(some, self._lane_ids)
        self._whole = plan.stage(whole, None if self.lane is None else self._lane_ids)

    def _choose_rows(self, lanes: np.ndarray) -> int:
        """Copy the rows of ``lanes`` to the memory of some rows; return their
        number."""
        chosen = lanes.nonzero()[0]
        count = len(chosen)
        self._lane_ids[:count] = chosen
        for key, column in self.staged.columns.items():
            np.compress(lanes, column, 0, out=self._chosen.columns[key][:count])
        return count

    def begin(self, buffer: ReplayBuffer) -> None:
        """Write the step to the lane, which another actor takes over with it."""
        lane = TakenLane(self.lane or 0)
        buffer.extend(self._rows_for(buffer), lanes=lane)

    def _write_rows(self, buffer: ReplayBuffer, lanes: np.ndarray | None) -> None:
        """Write the step as a TensorDict."""
        rows = self._rows_for(buffer)
        if lanes is not None and len(lanes) != buffer._storage.shape[1:].numel():
            buffer.add(rows)  # raises the error
        elif lanes is not None:
            some = cast("TensorDict", rows[torch.from_numpy(lanes)])
            buffer.extend(some, lanes=lanes.nonzero()[0])
        elif self.lane is not None:
            buffer.extend(rows, lanes=self.lane)
        else:
            buffer.add(rows)

    def _rows_for(self, buffer: ReplayBuffer) -> TensorDict:
        """Return the step; a copy, if code of others may modify or keep it."""
        rows = self.staged.rows
        is_seen = len(buffer.transform) or not (
            _is_ours(buffer) and _is_ours(buffer.writer)
        )
        return rows.clone() if is_seen else rows

    def __getstate__(self) -> dict[str, Any]:
        return {"staged": self.staged, "lane": self.lane}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


def _is_ours(part: Any) -> bool:
    """Whether this package or TorchRL has written how a part writes."""
    return all(
        getattr(type(part), name).__module__.startswith(_MODULES)
        for name in ("add", "extend")
    )


def _no_plan() -> None:
    """Stand in for a reference to a plan."""
