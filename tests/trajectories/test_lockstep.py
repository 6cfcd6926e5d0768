"""The index in lockstep with whole histories: random writes of every kind, over every storage and writer."""

from __future__ import annotations

import copy
import pickle
import random
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tensordict import TensorDict
from torchrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from rlbuf_td import PackedStorage, ReplayBuffer, RingWriter
from rlbuf_td.kernels.episodes import BitBoundaries, FlagBoundaries, make_boundaries
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.histories import History
from tests.kernels.invariants import check_boundaries

STORAGES: dict[str, Callable[..., Any]] = {
    "packed": PackedStorage,
    "mapped": lambda size, ndim: PackedStorage(size, ndim=ndim, scratch_dir=tempfile.mkdtemp()),
    "lazy": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
}
#: how rows say that their trajectory ends: the entries, by the dims of a row
FLAGS: dict[str, dict[str, tuple[int, ...]]] = {
    "done": {"done": (1,)},
    "bare done": {"done": ()},
    "both": {"done": (1,), "terminated": (1,), "truncated": (1,)},
    "parts": {"terminated": (1,), "truncated": (1,)},
    "terminated": {"terminated": (1,)},
    "truncated": {"truncated": ()},
    "agents": {"done": (3, 1)},
    "agents in parts": {"terminated": (2,), "truncated": (1,)},
    "bare parts": {"terminated": (), "truncated": ()},
    "none": {},
}
IDS: dict[str, Any] = {"no ids": None, "ids": (torch.int64, ()), "short ids": (torch.int32, (1,))}
KEYS = {"next": ("next", "done"), "group": ("next", "group", "done"), "root": "done"}


class Lockstep(RuleBasedStateMachine):
    """Random writes, told and untold; whenever asked, the index knows what the histories know."""

    make_boundaries = staticmethod(make_boundaries)

    @initialize(
        storage=st.sampled_from([*STORAGES]),
        ours=st.booleans(),
        ring=st.sampled_from([RingWriter, TensorDictRoundRobinWriter]),
        ndim=st.sampled_from([1, 1, 2, 2, 3]),
        steps=st.sampled_from([1, 2, 3, 5, 8, 67]),
        lanes=st.integers(1, 3),
        flags=st.sampled_from([*FLAGS]),
        ids=st.sampled_from([*IDS]),
        key=st.sampled_from([*KEYS]),
        early=st.booleans(),
    )
    def make(self, storage, ours, ring, ndim, steps, lanes, flags, ids, key, early) -> None:
        self.flags, self.ids = FLAGS[flags], IDS["ids" if flags == "none" else ids]
        self.done_key = KEYS[key]
        self.shape = {1: (), 2: (lanes,), 3: (lanes, 2)}[ndim]
        self.ndim, self.steps, self.lanes = ndim, steps, torch.Size(self.shape).numel()
        self.rb = (ReplayBuffer if ours else TensorDictReplayBuffer)(
            storage=STORAGES[storage](steps * self.lanes, ndim=ndim), writer=ring(), dim_extend=0
        )
        self.history = History(steps, self.lanes)
        self.cursor = self.live = self.newest = 0
        self.current = [0] * self.lanes
        self.untold = False  # whether something has come that the index was not told of
        self.patch = mock.patch("rlbuf_td.storages.trajectory_index.make_boundaries", self.make_boundaries)
        self.patch.start()
        self.attached = early
        self.untold = not early
        if early:
            self.index()

    def teardown(self) -> None:
        if hasattr(self, "rb"):
            try:
                self.ask_all()
            finally:
                self.patch.stop()

    def index(self) -> TrajectoryIndex:
        return TrajectoryIndex.of(self.rb.storage, done_key=self.done_key)

    def data(self, n: int, seed: int) -> TensorDict:
        """Return ``[n, *lanes]`` random transitions, and put them aside for :meth:`put`."""
        rng = random.Random(seed)
        often = rng.choice([0.0, 0.1, 0.5])
        ends = {name: torch.zeros(n, self.lanes, *dims, dtype=torch.bool) for name, dims in self.flags.items()}
        names = torch.zeros(n, self.lanes, dtype=torch.int64)
        for step in range(n):
            for lane in range(self.lanes):
                if rng.random() < often:
                    self.current[lane] += 1
                names[step, lane] = self.current[lane]
                for name, end in ends.items():
                    if rng.random() < often and name != "done":
                        cells = end[step, lane].view(-1)
                        cells[rng.randrange(len(cells))] = True
                if "done" in ends:
                    cells = ends["done"][step, lane].view(-1)
                    cells[rng.randrange(len(cells))] = rng.random() < often
        decides = ["done"] if "done" in ends else [*ends]
        done = torch.zeros(n, self.lanes, dtype=torch.bool)
        for name in decides:
            done |= ends[name].reshape(n, self.lanes, -1).any(2)
        self.pending = [(done[step].tolist(), None if self.ids is None else names[step].tolist()) for step in range(n)]
        lead = (n, *self.shape)
        data = TensorDict({"x": torch.arange(n * self.lanes).view(lead) + 1000 * seed}, lead)
        prefix = self.done_key[:-1] if isinstance(self.done_key, tuple) else ()
        for name, end in ends.items():
            data.set((*prefix, name), end.view(*lead, *end.shape[2:]))
        if self.ids is not None:
            dtype, dims = self.ids
            data["collector", "traj_ids"] = names.to(dtype).view(*lead, *dims)
        self.values = [[{"x": float(value)} for value in row] for row in data["x"].view(n, self.lanes).tolist()]
        return data

    def put(self, slots: list[int]) -> None:
        for slot, (done, names), values in zip(slots, self.pending, self.values, strict=True):
            self.history.put(slot, done, names, values)
        if self.attached and len(set(slots)) == self.live:
            self.untold = False

    def advance(self, n: int) -> None:
        slots = [(self.cursor + j) % self.steps for j in range(n)]
        self.cursor = (self.cursor + n) % self.steps
        self.live, self.newest = max(self.live, min(self.steps, max(slots) + 1)), slots[-1]
        self.put(slots)

    @rule(n=st.one_of(st.integers(1, 4), st.integers(1, 150)), seed=st.integers(0, 999))
    def extend(self, n: int, seed: int) -> None:
        n = min(n, 2 * self.steps + 3)
        # TorchRL's buffer cannot put the index of a single lane into the data
        way = self.rb if self.ndim == 1 or isinstance(self.rb, ReplayBuffer) else self.rb.writer
        way.extend(self.data(n, seed))
        self.advance(n)

    @rule(seed=st.integers(0, 999))
    def add(self, seed: int) -> None:
        self.rb.writer.add(self.data(1, seed)[0])
        self.advance(1)

    @precondition(lambda self: self.live)
    @rule(picks=st.lists(st.integers(0, 999), min_size=1, max_size=5, unique=True), seed=st.integers(0, 999))
    def write_at(self, picks: list[int], seed: int) -> None:
        slots = list(dict.fromkeys(pick % self.live for pick in picks))
        self.rb.writer.write_at(torch.tensor(slots), self.data(len(slots), seed))
        self.put(slots)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 999), seed=st.integers(0, 999))
    def write_one_at(self, pick: int, seed: int) -> None:
        slot = pick % self.live
        self.rb.writer.write_at(slot, self.data(1, seed)[0])
        self.put([slot])

    @precondition(lambda self: self.live)
    @rule(start=st.integers(0, 999), n=st.integers(1, 9), counted=st.booleans(), seed=st.integers(0, 999))
    def set_directly(self, start: int, n: int, counted: bool, seed: int) -> None:
        start %= self.live
        slots = list(range(start, min(self.live, start + n)))
        data = self.data(len(slots), seed)
        if "index" in self.rb.storage._storage.keys():  # TorchRL's writer stores it
            data["index"] = data["x"]
        counted &= isinstance(self.rb.storage, PackedStorage)  # TorchRL's count rows twice
        self.rb.storage.set(slice(slots[0], slots[-1] + 1), data, set_cursor=counted)
        self.newest = slots[-1] if counted else self.newest  # as the storage has it, whatever the writer's cursor
        self.put(slots)
        self.untold = True

    @precondition(lambda self: self.live)
    @rule()
    def empty(self) -> None:
        self.rb.empty()
        self.history.forget()
        self.live = self.cursor = 0
        self.untold = True

    @precondition(lambda self: self.live)
    @rule(how=st.sampled_from(["deepcopy", "pickle"]))
    def go_on_with_a_copy(self, how: str) -> None:
        if isinstance(self.rb.storage, LazyMemmapStorage):
            how = "deepcopy"  # torch cannot pickle its rows
        self.rb = copy.deepcopy(self.rb) if how == "deepcopy" else pickle.loads(pickle.dumps(self.rb))

    @precondition(lambda self: self.live)
    @rule()
    def reload(self) -> None:
        self.ask_all()
        saved, index = self.rb.state_dict(), self.index().state_dict()
        self.rb.load_state_dict(saved)
        self.index().load_state_dict(index)

    @rule()
    def ask_all(self) -> None:
        if not self.live:
            return
        if self.untold:
            self.history.read_as_ring(self.live, self.newest)
            self.untold = False
        self.attached = True
        cells = self.history.written()
        assert len(cells) == len(self.rb.storage)
        stored = self.rb.storage._storage["x"].reshape(-1)
        assert [self.history.at(*cell).values["x"] for cell in cells] == stored[: len(cells)].tolist()
        index, rows = self.index(), torch.tensor([slot * self.lanes + lane for slot, lane in cells])
        expected = [self.history.reach(*cell) for cell in cells]
        found = index.steps_back(rows), index.steps_ahead(rows), index.ended(rows)
        assert list(zip(*(part.tolist() for part in found), strict=True)) == expected
        assert index.length(rows).tolist() == [back + ahead + 1 for back, ahead, _ in expected]
        bits = index.boundaries()
        if isinstance(bits, BitBoundaries):
            check_boundaries(bits)


class LockstepWithFlags(Lockstep):
    make_boundaries = staticmethod(FlagBoundaries)


TestBitmap = Lockstep.TestCase
TestBitmap.settings = settings(stateful_step_count=30)
TestFlags = LockstepWithFlags.TestCase
TestFlags.settings = settings(stateful_step_count=30)
