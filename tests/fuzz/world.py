"""A buffer beside a NumPy model of it, and the operations that both understand.

Row ``t`` of lane ``e`` holds the number ``id`` of its time step, counted from the first write on, and ``mark``, which
operations edit. An operation gets whole numbers and interprets them in the present state, so that a shorter list of
operations is again a valid one.
"""

from __future__ import annotations

import copy
import multiprocessing as mp
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    FreshRowsSampler,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    SequenceSampler,
    TrajectoryIndex,
    UniformSampler,
)
from tests.processes.test_sharing import elsewhere

ROWS, LANES, BATCH, WIDTH, PERIOD, N_STEPS, GAMMA = 24, 2, 6, 3, 5, 3, 0.5

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lanes": {"ndim": 2},
    "share_next": {"share_next": ["seen"]},
    "lanes, frames": {"ndim": 2, "frames": {"seen": WIDTH}},
    "shared": {"shared": True},
    "shared, share_next": {"shared": True, "share_next": ["seen"]},
    "file": {"scratch_dir": "rows"},
}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": UniformSampler,
    "unique": lambda: UniformSampler(unique=True),
    "recency": lambda: RecencySampler(),
    "minibatch": MinibatchSampler,
    "proportional": lambda: ProportionalSampler(ROWS),
    "rank": lambda: RankSampler(ROWS),
    "fresh": lambda: FreshRowsSampler(ProportionalSampler(ROWS)),
    "n-step": lambda: NStepSampler(ProportionalSampler(ROWS), N_STEPS, GAMMA),
    "n-step, uniform": lambda: NStepSampler(UniformSampler(), N_STEPS, GAMMA),
    "sequence": lambda: SequenceSampler(RankSampler(ROWS), 2),
    "sequence, chunks": lambda: SequenceSampler(MinibatchSampler(), 2, stride=2),
    "sequence of n-step": lambda: SequenceSampler(NStepSampler(UniformSampler(), N_STEPS, GAMMA), 2),
}


@dataclass
class Model:
    """What the buffer should hold, as NumPy arrays over time steps and lanes."""

    lanes: int
    written: int = 0  # time steps since the rows were last emptied
    first: int = 0  # number of the first of them
    largest: float = -1.0
    mark: np.ndarray = field(init=False)
    priority: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.mark, self.priority = np.zeros((2, ROWS // self.lanes, self.lanes))

    @property
    def steps(self) -> int:
        return len(self.mark)

    @property
    def live(self) -> int:
        return min(self.written, self.steps)

    def ids(self) -> np.ndarray:
        """Return the number of the time step at each position."""
        position = np.arange(self.live)
        return self.first + self.written - 1 - (self.written - 1 - position) % self.steps

    def write(self, count: int) -> None:
        positions = np.arange(self.written, self.written + count)[-self.steps :] % self.steps
        self.mark[positions] = 0.0
        self.priority[positions] = 1.0 if self.largest < 0 else self.largest
        self.written += count

    def set_priorities(self, flat: np.ndarray, errors: np.ndarray) -> None:
        for row, error in zip(flat, np.abs(errors), strict=True):
            self.priority.reshape(-1)[row] = error
            self.largest = max(self.largest, float(error))

    def ahead(self) -> np.ndarray:
        """Return for each position how many stored steps follow in its trajectory."""
        ids = self.ids()
        to_end, to_newest = PERIOD - 1 - ids % PERIOD, ids.max() - ids
        return np.minimum(to_end, to_newest)


class World:
    """A buffer, its model, and what operations have saved."""

    def __init__(self, form: str, sampler: str, folder: Path) -> None:
        options = dict(FORMS[form])
        if "scratch_dir" in options:
            options["scratch_dir"] = folder / "rows"
        self.model = Model(LANES if options.get("ndim") == 2 else 1)
        self.rb = ReplayBuffer(storage=PackedStorage(ROWS, **options), sampler=SAMPLERS[sampler](), batch_size=BATCH)
        self.kind, self.folder, self.next_id = sampler, folder, 0
        self.is_shared = bool(options.get("shared"))
        self.is_prioritized = hasattr(getattr(self.rb.sampler, "innermost", self.rb.sampler), "law")
        self.batch: TensorDict | None = None  # the last batch, and the model's count of writes when it was drawn
        self.drawn_at = 0
        self.saved: tuple[str, Any, Model, int] | None = None
        self.extend(3, 0)

    # -- operations: two whole numbers each

    def extend(self, a: int, b: int) -> None:
        count = 1 + a % (2 * self.model.steps)
        self.rb.extend(self.steps(count))
        self.count(count)

    def add(self, a: int, b: int) -> None:
        step = self.steps(1)
        self.rb.add(step[:, 0] if self.model.lanes > 1 else step[0])
        self.count(1)

    def sample(self, a: int, b: int) -> None:
        size = BATCH if a % 3 else 2 * (1 + b % 6)
        if self.kind == "unique":
            size = min(size, len(self.rb))
        if not self.model.live:
            with pytest.raises(RuntimeError, match="empty"):
                self.rb.sample()
            return
        self.batch, self.drawn_at = self.rb.sample(size), self.model.written
        self.check_batch(self.batch)

    def update(self, a: int, b: int) -> None:
        batch = self.batch
        if batch is None or not self.is_prioritized or "sequence" in self.kind:
            return
        errors = torch.linspace(-1.0, 1.0, len(batch)) * (1 + a % 7)
        self.rb.update_tensordict_priority(batch.set("td_error", errors))
        flat = self.flat(batch["index"])
        age = (self.model.written - 1 - flat // self.model.lanes) % self.model.steps
        kept = age >= self.model.written - self.drawn_at
        self.model.set_priorities(flat[kept], errors.double().numpy()[kept])

    def update_priority(self, a: int, b: int) -> None:
        if self.is_prioritized and self.model.live:
            flat = np.array([a, b, a + b]) % (self.model.live * self.model.lanes)
            errors = np.array([a % 5, b % 3, -1.5])
            index = torch.from_numpy(flat)
            if self.model.lanes > 1:
                index = torch.stack((index // LANES, index % LANES), -1)
            self.rb.update_priority(index, torch.from_numpy(errors).float())
            self.model.set_priorities(flat, errors)

    def edit(self, a: int, b: int) -> None:
        if self.model.live:
            self.rb["mark"] = torch.full_like(self.rb["mark"], float(a))
            self.model.mark[: self.model.live] = a

    def write_back(self, a: int, b: int) -> None:
        if self.batch is None or "sampled_at" not in self.batch.keys() or "sequence" in self.kind:
            return
        self.rb.write_back(self.batch.set("mark", torch.full((len(self.batch),), float(a))), "mark")
        flat = self.flat(self.batch["index"])
        age = (self.model.written - 1 - flat // self.model.lanes) % self.model.steps
        self.model.mark.reshape(-1)[flat[age >= self.model.written - self.drawn_at]] = a

    def empty(self, a: int, b: int) -> None:
        if a % 3:  # emptying is rare
            return
        self.rb.empty()
        self.model = Model(self.model.lanes, first=self.next_id)
        self.batch = None

    def save(self, a: int, b: int) -> None:
        if a % 2:
            self.rb.dumps(self.folder / "dump")
            self.saved = "dump", None, copy.deepcopy(self.model), self.next_id
        else:
            self.saved = "state", self.rb.state_dict(), copy.deepcopy(self.model), self.next_id

    def load(self, a: int, b: int) -> None:
        if self.saved is None:
            return
        how, state, model, _ = self.saved
        self.rb.loads(self.folder / "dump") if how == "dump" else self.rb.load_state_dict(state)
        self.model, self.batch = copy.deepcopy(model), None
        self.next_id = self.model.first + self.model.written  # ids go on where the saved rows end

    def copied(self, a: int, b: int) -> None:
        if self.is_shared:  # its copies are not shared
            return
        self.rb = copy.deepcopy(self.rb) if a % 2 else pickle.loads(pickle.dumps(self.rb))

    def share(self, a: int, b: int) -> None:
        if a % 4 == 0:
            self.rb.share()
            self.is_shared = True

    def write_elsewhere(self, a: int, b: int) -> None:
        if self.is_shared:
            count = 1 + a % self.model.steps
            elsewhere(self.rb.extend, self.steps(count))
            self.count(count)

    def move(self, a: int, b: int) -> None:
        moves: list[Callable[[], object]] = [
            lambda: self.rb[:].share_memory_(),
            lambda: self.rb["mark"].share_memory_(),
            lambda: mp.get_context("spawn").SimpleQueue().put(self.rb[:1]),
            lambda: self.rb[:].memmap_(),
            lambda: self.rb.storage.snapshot(),
        ]
        if self.model.live:
            moves[a % len(moves)]()

    def refused(self, a: int, b: int) -> None:
        step = self.steps(1)
        for bad in (
            step.exclude("id"),
            step.set("mark", step["mark"].double()),
            step.clone().set("more", step["mark"]),
        ):
            with pytest.raises(ValueError, match=r"missing|expected|unknown"):
                self.rb.extend(bad)
        if self.is_prioritized:
            outside = torch.tensor([ROWS if self.model.lanes == 1 else [ROWS, 0]])
            for index, error in ((torch.zeros_like(outside), torch.nan), (outside, 1.0)):
                with pytest.raises((ValueError, IndexError)):
                    self.rb.update_priority(index, torch.tensor([error]))

    # -- helpers

    def steps(self, count: int) -> TensorDict:
        """Return the next ``count`` time steps, ``[count]`` or ``[lanes, count]``."""
        numbers = torch.arange(self.next_id, self.next_id + count)
        if self.model.lanes > 1:
            numbers = numbers.expand(self.model.lanes, count).contiguous()
        seen = (numbers[..., None] + torch.arange(WIDTH)).float()
        done = ((numbers + 1) % PERIOD == 0)[..., None]
        after = {"seen": seen + 1, "reward": torch.ones(*numbers.shape, 1), "done": done, "terminated": done.clone()}
        mark = torch.zeros(numbers.shape)
        return TensorDict({"seen": seen, "id": numbers, "mark": mark, "next": after}, numbers.shape)

    def count(self, steps: int) -> None:
        self.model.write(steps)
        self.next_id += steps

    def flat(self, index: torch.Tensor) -> np.ndarray:
        rows = index.numpy()
        return rows[:, 0] * self.model.lanes + rows[:, 1] if self.model.lanes > 1 else rows

    def check_batch(self, batch: TensorDict) -> None:
        model, flat = self.model, self.flat(batch["index"])
        assert flat.min() >= 0
        assert flat.max() < model.live * model.lanes
        steps = flat // model.lanes
        ids = model.ids()[steps]
        assert batch["id"].tolist() == ids.tolist()
        assert batch["seen"].equal((batch["id"][:, None] + torch.arange(WIDTH)).float())
        assert batch["mark"].tolist() == model.mark.reshape(-1)[flat].tolist()
        taken = np.ones_like(steps)
        if "n-step" in self.kind:
            taken = 1 + np.minimum(model.ahead()[steps], N_STEPS - 1)
            assert batch["steps_to_next_obs"].flatten().tolist() == taken.tolist()
        if "sequence" not in self.kind or batch["mask"].all():
            assert batch["next", "seen"][:, 0].tolist() == (ids + taken).tolist()
            assert batch["next", "reward"].flatten().tolist() == (2.0 - 2.0 * GAMMA**taken).tolist()
        if self.kind == "unique":
            assert len(set(flat.tolist())) == len(flat)
        if "priority_weight" in batch.keys():
            assert batch["priority_weight"].isfinite().all()

    def check(self) -> None:
        """Compare all rows, priorities and trajectories with the model."""
        model, rb = self.model, self.rb
        assert len(rb) == model.live * model.lanes
        if not model.live:
            return
        rows = rb.storage.get(torch.arange(model.live))
        shape = (model.live, model.lanes)
        assert rows["id"].view(shape)[:, 0].tolist() == model.ids().tolist()
        assert rows["mark"].view(shape).tolist() == model.mark[: model.live].tolist()
        assert rows["seen"][..., 0].equal(rows["id"].float())
        assert rows["next", "seen"].equal(rows["seen"] + 1)
        flat = torch.arange(len(rb))
        if self.is_prioritized:
            sampler: Any = getattr(rb.sampler, "innermost", rb.sampler)
            priority = sampler.priority(flat, storage=rb.storage).numpy()
            if "sequence" not in self.kind:
                assert np.array_equal(priority, model.priority.reshape(-1)[: len(flat)].astype(np.float32))
        ahead = TrajectoryIndex.of(rb.storage).steps_ahead(flat).view(shape)
        assert ahead[:, 0].tolist() == model.ahead().tolist()


OPERATIONS = (
    *("extend", "add", "sample", "update", "update_priority", "edit", "write_back", "empty", "save", "load"),
    *("copied", "share", "write_elsewhere", "move", "refused"),
)
