"""Ctrl-C at any line of a call that changes a buffer and is no write: the buffer is as
before the call, or as after it.

``CHANGES`` lists the calls. Each is interrupted at some of its lines, in a copy of the
same small buffer, and ``state_of`` says what must be as before or as after. Then the
checks of all parts must pass, and the next calls must work. Writes have a test of their
own, because they may lose the rows that they replace (``storages/test_kill.py``).
"""

from __future__ import annotations

import copy
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl.data.replay_buffers
from tensordict import TensorDict

from rlbuf_td import (
    EpisodeStats,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    RingWriter,
    TrajectoryIndex,
    UniformSampler,
)
from rlbuf_td.checkpoint import open_checkpoint
from tests import test_lockstep
from tests.catalogue import numbered_rows
from tests.test_lockstep import stopped

ROWS = 9
TORCHRL = str(Path(torchrl.data.replay_buffers.__file__).parent)
SAMPLERS: dict[str, Callable[[], Any]] = {
    "proportional": lambda: ProportionalSampler(ROWS, 0.7, 0.5),
    "rank": lambda: RankSampler(ROWS, 0.7, 0.5),
    "minibatch": lambda: MinibatchSampler(3),
    "n-step": lambda: NStepSampler(ProportionalSampler(ROWS, 0.7, 0.5), 2, 0.9),
    "uniform": UniformSampler,
}
PRIORITIZED = "proportional", "rank"


@dataclass
class World:
    """A buffer, a prioritized one over the same rows, and what calls are given."""

    rb: Any
    second: Any
    state: Any  # of another buffer, to load
    folder: Path  # holds dumps of this other buffer
    work: Path  # for what a call writes

    @property
    def batch(self) -> TensorDict:
        """A batch of the rows in the cells 1 and 3."""
        index = torch.tensor([1, 3])
        rows = self.rb.storage.get(index)
        stamp = self.rb.storage.stamps(index)
        return rows.update(
            {"index": index, "sampled_at": stamp, "td_error": torch.tensor([5.0, 6.0])}
        )


def make(sampler: str, rows: int = ROWS, shift: int = 0) -> Any:
    rb: Any = ReplayBuffer(
        storage=PackedStorage(rows),
        sampler=SAMPLERS[sampler](),
        batch_size=2,
        min_size=2,  # with flow control
        stats=EpisodeStats(history=20),
        generator=torch.Generator().manual_seed(shift),
    )
    rb.extend(numbered_rows(ROWS + 2 - shift % 2, shift, every=3))
    set_priorities(rb, shift)
    rb.sample()
    return rb


def set_priorities(rb: Any, shift: int) -> None:
    if rb.parts.prioritized is not None:
        error = torch.arange(1.0, len(rb) + 1) + shift
        rb.update_priority(torch.arange(len(rb)), error)


@pytest.fixture
def worlds(tmp_path: Path) -> Callable[[str], World]:
    def world(sampler: str) -> World:
        rb, other = make(sampler), make(sampler, shift=101)
        second: Any = ReplayBuffer(
            storage=rb.storage, sampler=RankSampler(ROWS), batch_size=2
        )
        set_priorities(second, 7)
        other.dumps(tmp_path / "dump")
        other.sampler.dumps(tmp_path / "sampler")
        other.storage.dumps(tmp_path / "storage")
        return World(rb, second, other.state_dict(), tmp_path, tmp_path / "work")

    return world


def plain(value: Any) -> Any:
    """Return numbers, lists and dicts that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


def state_of(world: World) -> dict[str, Any]:
    """Return all that a change can change."""
    rb, storage = world.rb, world.rb.storage
    found: dict[str, Any] = {
        "rows": len(rb),
        "counts": (rb.write_count, *rb.returned, rb.flow.inserted),
        "sampled": rb.flow.report()["samples"],
        "stats": (rb.episode_stats.episodes, rb.episode_stats.steps),
        "parts": [type(each).__name__ for each in (rb.sampler, rb.writer)],
        "generators": len({id(part._rng) for part in (rb, storage, rb.sampler)}),
        "generator": rb._rng.get_state().tolist(),
    }
    if world.work.exists():
        rows = open_checkpoint(world.work).rows
        found["dump"] = None if rows is None else rows["x"].tolist()
    cells = storage.ring.cells_by_age() if len(rb) else torch.empty(0).long()
    if len(rb):
        found["data"] = plain(storage.gather(cells).to_dict())
        found["reach"] = [
            part.tolist() for part in TrajectoryIndex(storage).reach(cells)
        ]
    for name, buffer in (("first", rb), ("second", world.second)):
        found[name] = plain(buffer.sampler.state_dict())
        prioritized = buffer.parts.prioritized
        if prioritized is not None and len(rb):
            found[f"{name}, probability"] = prioritized.probability(cells).tolist()
    return found


def check(world: World) -> None:
    world.rb.storage.check()
    for buffer in (world.rb, world.second):
        if buffer.parts.prioritized is not None:
            buffer.parts.prioritized.rule.check()


def goes_on(world: World) -> None:
    """Write, draw and update, as if nothing had happened."""
    rb = world.rb
    rb.extend(numbered_rows(2, 600, every=3))
    assert rb.storage["x"].tolist().count(601) == 1
    for buffer in (rb, world.second):
        batch = buffer.sample()
        assert set(batch["x"].tolist()) <= set(buffer.storage["x"].tolist())
        buffer.update_tensordict_priority(batch.set("td_error", torch.ones(len(batch))))
        if buffer.parts.prioritized is not None:
            cells = buffer.storage.ring.cells_by_age()
            assert (buffer.parts.prioritized.priority(cells) >= 0).all()
    check(world)


@dataclass(frozen=True)
class Change:
    """A call of a buffer or of its parts."""

    call: Callable[[World], object]
    samplers: tuple[str, ...] = ("proportional",)  # of the buffer, see `SAMPLERS`
    # whether an interrupt may lose the result: it has been drawn, or counted, or both
    loses: bool = False


ALL = (*SAMPLERS,)
OTHERS: dict[str, Callable[[], Any]] = {
    "proportional": lambda: RankSampler(ROWS),
    "uniform": lambda: ProportionalSampler(ROWS),
    "minibatch": lambda: RecencySampler(3.0),
}


def weigh(world: World, name: str, value: float) -> None:
    setattr(world.rb.sampler, name, value)
    world.rb.sampler.probability(torch.arange(2))


def edit(data: Any) -> None:
    data["x"] += 1000
    data["desired_goal"] -= 1000


def new_storage() -> PackedStorage:
    storage = PackedStorage(ROWS)
    storage.set(range(4), numbered_rows(4, 300, every=3))
    return storage


# A call that changes something, and is no write, has an entry here.
CHANGES: dict[str, Change] = {
    "rb.empty": Change(lambda w: w.rb.empty(), ALL),
    "second.empty": Change(lambda w: w.second.empty()),
    "storage._empty": Change(lambda w: w.rb.storage._empty(), ALL),
    "rb.load_state_dict": Change(lambda w: w.rb.load_state_dict(w.state), ALL),
    "rb.loads": Change(lambda w: w.rb.loads(w.folder / "dump"), ALL),
    "rb.loads, rows_only": Change(
        lambda w: w.rb.loads(w.folder / "dump", rows_only=True)
    ),
    "storage.load_state_dict": Change(
        lambda w: w.rb.storage.load_state_dict(w.state["_storage"]), PRIORITIZED
    ),
    "storage.loads": Change(lambda w: w.rb.storage.loads(w.folder / "storage")),
    "sampler.load_state_dict": Change(
        lambda w: w.rb.sampler.load_state_dict(w.state["_sampler"]), ALL
    ),
    "sampler.loads": Change(lambda w: w.rb.sampler.loads(w.folder / "sampler")),
    "writer.load_state_dict": Change(
        lambda w: w.rb.writer.load_state_dict(w.state["_writer"])
    ),
    "stats.load_state_dict": Change(
        lambda w: w.rb.episode_stats.load_state_dict(w.state["_stats"])
    ),
    "rb.dumps": Change(lambda w: w.rb.dumps(w.work), ALL),
    "rb.state_dict": Change(lambda w: w.rb.state_dict(), ALL),
    "rb.set_sampler": Change(
        lambda w: w.rb.set_sampler(OTHERS[sampler_of(w)]()), (*OTHERS,)
    ),
    "rb.set_storage": Change(lambda w: w.rb.set_storage(new_storage()), PRIORITIZED),
    "rb.set_writer": Change(lambda w: w.rb.set_writer(RingWriter())),
    "rb.set_rng": Change(lambda w: w.rb.set_rng(torch.Generator().manual_seed(5))),
    "alpha": Change(lambda w: weigh(w, "alpha", 2.0), PRIORITIZED),
    "beta": Change(lambda w: weigh(w, "beta", 1.0), PRIORITIZED),
    "shuffle": Change(
        lambda w: setattr(w.rb.sampler, "shuffle", False), ("minibatch",)
    ),
    "rb.update_priority": Change(
        lambda w: w.rb.update_priority(
            torch.tensor([2, 5]), torch.tensor([20.0, 30.0])
        ),
        PRIORITIZED,
    ),
    "rb.update_tensordict_priority": Change(
        lambda w: w.rb.update_tensordict_priority(w.batch), PRIORITIZED
    ),
    "rb.write_back": Change(
        lambda w: w.rb.write_back(
            w.batch.set("x", torch.tensor([41, 42])).set(
                "desired_goal", torch.ones(2, 1)
            ),
            ["x", "desired_goal"],
        )
    ),
    "rb.set_at_": Change(lambda w: w.rb.set_at_("x", torch.arange(2), [4, 6])),
    "rb[key] = ": Change(
        lambda w: w.rb.__setitem__("next", w.rb["next"].apply(torch.zeros_like))
    ),
    "rb[index] = ": Change(
        lambda w: w.rb.__setitem__(torch.tensor([0, 7]), numbered_rows(2, 80, every=3))
    ),
    "storage[key] = ": Change(
        lambda w: w.rb.storage.__setitem__("x", torch.zeros(ROWS, dtype=torch.int64))
    ),
    "storage[index] = ": Change(
        lambda w: w.rb.storage.__setitem__(3, numbered_rows(1, 80, every=3)[0])
    ),
    "storage.edit": Change(lambda w: w.rb.storage.edit(edit, [1, 2])),
    "storage.edit, all": Change(
        lambda w: w.rb.storage.edit(lambda data: data["next", "done"].fill_(True))
    ),
    "rb.sample": Change(lambda w: w.rb.sample(), ("minibatch", *PRIORITIZED), True),
}


def sampler_of(world: World) -> str:
    names = {type(make()).__name__: name for name, make in SAMPLERS.items()}
    return names[type(world.rb.sampler).__name__]


@pytest.fixture
def handler() -> Iterator[Any]:
    """Python's own handler of Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def differences(found: dict[str, Any], state: dict[str, Any]) -> set[str]:
    return {key for key in {*found, *state} if found.get(key) != state.get(key)}


CASES = [(name, kind) for name, change in CHANGES.items() for kind in change.samplers]
#: Those that are interrupted by default: at every n-th line.
QUICK = [
    ("rb.empty", "n-step", 199),
    ("rb.load_state_dict", "proportional", 149),
    ("storage.load_state_dict", "rank", 149),
    ("rb.set_sampler", "uniform", 97),
    ("alpha", "proportional", 7),
    ("rb.write_back", "proportional", 97),
    ("rb.set_rng", "proportional", 1),
]


@pytest.mark.parametrize(
    ("name", "sampler", "every"),
    QUICK + [pytest.param(*case, 61, marks=pytest.mark.slow) for case in CASES],
)
def test_an_interrupted_change_is_made_as_a_whole_or_not_at_all(
    name: str,
    sampler: str,
    every: int,
    handler: Any,
    worlds: Callable[[str], World],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    # slow tests of each commit, which have a seed of their own, take other lines
    seed = f"{name} {request.config.getoption('--hypothesis-seed')}"
    # also at the lines of TorchRL's buffers, which some calls end in
    monkeypatch.setattr(test_lockstep, "PACKAGE", (test_lockstep.PACKAGE, TORCHRL))
    made, call = worlds(sampler), CHANGES[name].call

    def again() -> World:
        if name == "rb.dumps":  # over an older dump
            shutil.rmtree(made.work, ignore_errors=True)
            shutil.copytree(made.folder / "dump", made.work)
        world = copy.deepcopy(made)
        TrajectoryIndex(world.rb.storage).whole()  # edits of flags make it anew
        return world

    allowed = [state_of(again())]
    after = again()
    call(after)
    allowed.append(state_of(after))
    seen = set()
    for line in count(1 + random.Random(seed).randrange(every), every):
        world, is_done = again(), False
        with stopped(line, signal.SIGINT) as stopper:
            call(world)
            is_done = True
        assert is_done == (stopper.left > 0), line
        assert signal.getsignal(signal.SIGINT) is handler
        if is_done:
            break
        found = state_of(world)
        unlike = [differences(found, state) for state in allowed]
        are_whole = not all(unlike) or (
            CHANGES[name].loses and not unlike[0] & unlike[1]
        )
        assert are_whole, (line, unlike)
        seen.add(bool(unlike[0]))
        check(world)
        goes_on(world)
    assert False in seen or every > 3
