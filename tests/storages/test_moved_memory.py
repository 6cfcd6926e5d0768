"""Whatever moves the memory of what a buffer gives out, the buffer's rows stay where its compiled calls find them.

Each scenario runs in a process of its own, because a fault here ends the process.
"""

from __future__ import annotations

import copy
import multiprocessing as mp
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
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
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.storages.test_sharing import elsewhere

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
STEPS, BATCH, WIDTH = 400, 16, 60

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lanes": {"ndim": 2},
    "share_next": {"share_next": ["seen"]},
    "lanes, share_next": {"ndim": 2, "share_next": ["seen"]},
    "frames": {"frames": {"seen": WIDTH}},
    "shared": {"shared": True},
    "shared, share_next": {"shared": True, "share_next": ["seen"]},
    "file": {"scratch_dir": "rows"},
}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": UniformSampler,
    "proportional": lambda: ProportionalSampler(STEPS),
    "rank": lambda: RankSampler(STEPS),
    "minibatch": MinibatchSampler,
    "fresh": lambda: FreshRowsSampler(ProportionalSampler(STEPS)),
    "n-step": lambda: NStepSampler(ProportionalSampler(STEPS), 3, 0.9),
    "sequence": lambda: SequenceSampler(UniformSampler(), 4),
}


def rows(first: int, count: int, lanes: int) -> TensorDict:
    """``[count]`` or ``[lanes, count]`` steps: step t has ``t`` everywhere in ``seen``, and ``t + 1`` after it."""
    time = torch.arange(first, first + count)
    time = time if lanes == 1 else time.expand(lanes, count)
    seen = (time[..., None] + torch.arange(WIDTH)).float()
    done = ((time + 1) % 7 == 0)[..., None]
    after = {"seen": seen + 1, "reward": time[..., None].float(), "done": done, "terminated": done.clone()}
    return TensorDict({"seen": seen, "t": time.clone(), "next": after}, time.shape)


class World:
    """A buffer, and how many time steps it should hold."""

    def __init__(self, form: str, sampler: str, folder: Path) -> None:
        options = dict(FORMS[form])
        if "scratch_dir" in options:
            options["scratch_dir"] = folder / "rows"
        self.lanes = 2 if options.get("ndim") == 2 else 1
        self.rb = ReplayBuffer(storage=PackedStorage(STEPS, **options), sampler=SAMPLERS[sampler](), batch_size=BATCH)
        self.folder, self.written = folder, 0
        self.extend(STEPS // self.lanes)
        self.check()

    def extend(self, count: int) -> None:
        self.rb.extend(rows(self.written, count, self.lanes))
        self.written += count

    def check(self) -> None:
        """Call everything twice (the second time compiled), and compare every row with what was written."""
        rb = self.rb
        for _ in range(2):
            self.extend(3)
            step = rows(self.written, 1, self.lanes)
            rb.add(step[:, 0] if self.lanes > 1 else step[0])
            self.written += 1
            batch = rb.sample()
            self.compare(batch["seen"], batch["t"])
            if "priority_weight" in batch.keys():
                rb.update_tensordict_priority(batch.set("td_error", torch.rand(BATCH)))
            TrajectoryIndex.of(rb.storage).length(batch["index"])
        stored = rb.storage.get(torch.arange(len(rb) // self.lanes))
        self.compare(stored["seen"], stored["t"])
        newest = np.arange(self.written - len(rb) // self.lanes, self.written)
        assert sorted(set(stored["t"].flatten().tolist())) == newest.tolist()
        assert stored["next", "seen"].equal(stored["seen"] + 1)

    def compare(self, seen: torch.Tensor, time: torch.Tensor) -> None:
        assert seen.equal((time[..., None] + torch.arange(WIDTH)).float())
        assert int(time.min()) >= self.written - STEPS // self.lanes


def move_leaves(data: TensorDict) -> None:
    for leaf in data.values(True, True):
        leaf.share_memory_()


def share_a_module(world: World) -> None:
    module = torch.nn.Module()
    module.register_buffer("rows", world.rb["t"])
    module.share_memory()


def refused(change: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="not resizable"):
        change()


def loaded(world: World) -> None:
    world.rb.dumps(world.folder / "dump")
    world.rb.loads(world.folder / "dump")


def replace_data(world: World) -> None:
    world.rb["t"].data = torch.zeros(3, dtype=torch.int64)
    world.rb["t"].set_(torch.zeros(3, dtype=torch.int64))


def move_priorities(world: World) -> None:
    state: dict[str, Any] = getattr(world.rb.sampler, "snapshot", dict)()
    for part in (state, state.get("priorities", {}), state.get("sampler", {})):
        for value in part.values() if isinstance(part, dict) else ():
            if isinstance(value, torch.Tensor):
                value.share_memory_()


def reload_state(world: World) -> None:
    world.rb.load_state_dict(world.rb.state_dict())


MOVES: dict[str, Callable[[World], object]] = {
    "share_memory_ of all rows": lambda world: world.rb[:].share_memory_(),
    "share_memory_ of each leaf": lambda world: move_leaves(world.rb[:]),
    "rows put into a queue": lambda world: mp.get_context("spawn").SimpleQueue().put(world.rb[:2]),
    "a module that holds rows": share_a_module,
    "resize_": lambda world: refused(lambda: world.rb["t"].resize_(1_000_000)),
    "out=": lambda world: refused(lambda: torch.arange(1_000_000, out=world.rb["t"][:0])),
    "a larger storage": lambda world: refused(lambda: world.rb["t"].untyped_storage().resize_(1 << 24)),
    "a freed storage": lambda world: refused(lambda: world.rb["t"].untyped_storage().resize_(0)),
    "set_ and data": replace_data,
    "a storage's snapshot": lambda world: world.rb.storage.snapshot()["rows"].share_memory_(),
    "a sampler's snapshot": move_priorities,
    "an edit that moves rows": lambda world: world.rb.storage.edit(move_leaves),
    "TorchRL's entries in shared memory": lambda world: world.rb.storage._storage.share_memory_(),
    "TorchRL's entries in a memory map": lambda world: world.rb.storage._storage.memmap_(),
    "a memory map of rows": lambda world: world.rb[:].memmap_(),
    "a deep copy": lambda world: copy.deepcopy(world.rb),
    "a pickle": lambda world: pickle.loads(pickle.dumps(world.rb)),
    "a load": loaded,
    "a loaded state": reload_state,
    "a fork": lambda world: elsewhere(world.rb[:].share_memory_),
    "a data set of TorchRL": lambda world: world.rb.storage._share_memory_(),
    "share": lambda world: world.rb.share(),
}


def every_move(form: str, sampler: str, folder: Path) -> None:
    world = World(form, sampler, folder)
    for name, move in MOVES.items():
        with suppress(NotImplementedError):
            move(world)
        try:
            world.check()
        except Exception as error:
            raise AssertionError(f"after {name}") from error


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("form", ["plain", "lanes, share_next"])
def test_rows_stay_in_place_for_every_sampler(form: str, sampler: str, tmp_path: Path) -> None:
    elsewhere(every_move, form, sampler, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_rows_stay_in_place_in_every_form(form: str, tmp_path: Path) -> None:
    elsewhere(every_move, form, "proportional", tmp_path)
