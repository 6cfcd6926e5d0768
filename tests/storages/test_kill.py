"""A process is killed (SIGKILL), or interrupted (Ctrl-C), at any line of its work: it
has done all or nothing, and blocks nobody."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, c_int64, c_void_p, cast
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReservoirWriter,
    TrajectoryIndex,
)
from rlbuf_td.storages.indexing import written_rows
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.writes import Write
from tests.backends import forced, running
from tests.catalogue import SAMPLERS, buffer_of, numbered_rows
from tests.model import World
from tests.test_lockstep import Machine, forked, stopped

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of forks beside threads
]
CAPACITY = 24
some_lines = pytest.mark.parametrize(
    "every", [307, pytest.param(59, marks=pytest.mark.slow)], ids=["some", "many"]
)


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], object]) -> None:
    """Do ``work`` in a child, which must die of it."""
    assert forked(work) == -signal.SIGKILL


def killed_at(line: int, work: Callable[[], object]) -> bool:
    """Do ``work`` in a child that dies at a line of the package; return whether it came
    so far."""

    def child() -> None:
        with stopped(line, signal.SIGKILL):
            work()

    code = forked(child)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def check_priorities(rb: ReplayBuffer) -> None:
    """Check that the priorities are consistent, and that every row has one."""
    sampler: Any = rb.parts.prioritized
    if sampler is not None:
        sampler.rule.check()
        assert bool((sampler.priority(written_rows(rb.storage)) >= 0).all())


@pytest.fixture(autouse=True)
def _not_blocked() -> Iterator[None]:
    """Fail rather than hang."""

    def give_up(*_: Any) -> None:
        raise TimeoutError("blocked by a dead process")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def shared(form: str, kind: str, folder: Path) -> Machine:
    """Return a full buffer in shared memory, whose calls are compiled, beside its
    model."""
    machine = Machine(form, kind, folder, seed=3)
    machine.extend(20, 0)
    for operation in (machine.share, machine.extend, machine.update, machine.add):
        operation(4, 0)
        machine.sample(0, 0)
    return machine


@some_lines
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("shared", "proportional"),
        ("shared lanes", "rank"),
        ("shared, share_next", "n-step"),
        ("shared lanes, frames", "uniform"),
    ],
)
def test_a_write_that_was_not_finished_loses_at_most_the_rows_that_it_replaces(
    form: str, kind: str, every: int, tmp_path: Path
) -> None:
    machine = shared(form, kind, tmp_path)
    for line in count(1, every):
        is_killed = machine.in_child(
            line, line, line, then=partial(killed_at, line % 60, machine.rb.sample)
        )
        machine.check(looks=True)
        machine.sample(0, 0)
        if is_killed:
            check_priorities(machine.rb)
        else:
            break
    assert line > every


@some_lines
@pytest.mark.parametrize("form", ["shared", "shared lanes, frames"])
def test_emptying_is_done_or_not_and_a_draw_changes_nothing(
    form: str, every: int, tmp_path: Path
) -> None:
    machine = shared(form, "uniform", tmp_path)
    for is_draw in (True, False):
        for line in count(1, every // 4):
            is_killed = machine.killed_at(line, is_draw=is_draw)
            if not len(machine.rb):
                machine.extend(20, 0)
            machine.check(looks=True)
            if not is_killed:
                break


@pytest.mark.parametrize(
    "every", [127, pytest.param(5, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("plain", "rank"),
        ("lanes", "proportional"),
        ("share_next", "n-step"),
        ("lanes, frames", "uniform"),
        ("torchrl", "proportional"),
    ],
)
def test_an_interrupted_write_loses_at_most_the_rows_that_it_replaces(
    form: str, kind: str, backend: str, every: int, tmp_path: Path
) -> None:
    with running(backend):
        for a, b in ((3, 0), (4, 2), (3, 1)):  # lanes, whole steps, and `add_step`
            machine = Machine(form, kind, tmp_path, seed=3)
            machine.extend(20, 0)
            for _ in range(2):  # the next writes are compiled
                machine.write(machine.world, a, b)
            # the reference runs three times as many lines
            step = every if backend == "compiled" else 3 * every
            for line in count(1, step):
                is_interrupted = machine.interrupted_at(line, a, b)
                machine.check(looks=True)
                machine.sample(0, 0)
                if not is_interrupted:
                    break
            assert line > step or backend == "compiled"


@pytest.mark.parametrize(
    "every", [37, pytest.param(5, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize("is_update", [True, False])
@pytest.mark.parametrize("kind", ["rank", "proportional"])
def test_an_interrupted_update_or_emptying_is_made_or_not(
    kind: str, is_update: bool, every: int, tmp_path: Path
) -> None:
    machine = Machine("plain", kind, tmp_path, seed=3)
    for line in count(1, every):
        machine.extend(20, 0)
        machine.sample(0, 0)
        machine.update(line, 0)
        is_interrupted = machine.change_interrupted_at(line, line, is_update=is_update)
        machine.check(looks=True)
        if not is_interrupted:
            break
    assert line > 1


@pytest.mark.filterwarnings("ignore:.*rows were reopened without a priority")
@some_lines
@pytest.mark.parametrize(
    ("form", "kind"), [("reopen", "rank"), ("reopen, lanes", "proportional")]
)
def test_rows_that_are_reopened_after_a_kill_are_those_before_or_after_its_write(
    form: str, kind: str, every: int, tmp_path: Path
) -> None:
    for a, b in ((20, 0), (13, 11)):  # whole steps, and those of single lanes
        machine = Machine(form, kind, tmp_path / str(a), seed=3)
        machine.extend(20, 0)
        is_unwritten = True
        for line in count(1, every):
            machine.rb.shutdown()
            machine.world.rb = None
            machine.model.begin_episodes()
            is_last = not is_unwritten
            is_unwritten = machine.reopened_after_kill_at(line, a, b)
            machine.model.begin_episodes()
            machine.check(looks=True)
            machine.sample(0, 0)
            machine.update(line, 0)
            if is_last or line > 4_000:
                break
        assert line > every


@some_lines
@pytest.mark.parametrize(("how", "share_next"), [("a state", True), ("a dump", False)])
def test_a_load_that_was_not_finished_leaves_all_rows_or_none(
    how: str, share_next: bool, every: int, tmp_path: Path
) -> None:
    storage = partial(PackedStorage, share_next=["observation"] if share_next else [])
    rb, other = (
        World.of(
            ProportionalSampler(CAPACITY),
            CAPACITY,
            fill=1.3,
            seed=seed,
            storage=storage,
        ).rb
        for seed in range(2)
    )
    kept, saved, state = rb.chronological(), other.chronological(), other.state_dict()
    other.dumps(tmp_path)
    rb.share()
    loads = {
        "a state": lambda: rb.load_state_dict(state),
        "a dump": lambda: rb.loads(tmp_path),
    }
    is_loaded = False
    for line in count(1, 2 * every):
        killed_at(line, loads[how])
        if len(rb):
            stored = rb.chronological()
            is_loaded = bool((stored == saved).all())
            assert is_loaded or (stored == kept).all()
        check_priorities(rb)
        if is_loaded:
            break
        rb.empty()
        rb.extend(kept)
    assert line > 2 * every
    rb.sample(8)


def make(sampler: str, writer: Any = None) -> Any:
    """Return a full buffer in shared memory, after some writes."""
    rb = buffer_of(CAPACITY, SAMPLERS[sampler](CAPACITY), writer=writer, batch_size=8)
    for first in range(0, 30, 5):
        rb.extend(numbered_rows(5, first, every=4))
    return rb.share()


class Deadly:
    """A compiled function that kills the process."""

    py_func = staticmethod(lambda: None)

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work

    def __call__(self, *_: object, **__: object) -> None:
        self.work()

    def compile(self, _: object) -> Deadly:
        return self


def call_within_a_write(rb: ReplayBuffer, what: str, work: Callable[..., None]) -> None:
    """Let the next compiled write call ``work``, before it publishes rows
    ("write_entries"), or after ("enter")."""
    plan: Any = rb.storage.write_plan or rb.storage._plan_writes(Write(TensorDict()))
    plan.work = CFUNCTYPE(None, c_int64)(work)
    plan.ring_record[what] = cast(plan.work, c_void_p).value


@pytest.mark.parametrize("sampler", ["proportional", "rank"])
@pytest.mark.parametrize("is_update", [False, True])
def test_priorities_that_were_half_changed_are_made_anew(
    is_update, sampler, monkeypatch
):
    rb = make(sampler)
    batch = rb.sample().set("td_error", torch.rand(8))
    before = rb.sampler.priority(torch.arange(CAPACITY))

    def spoil(*_: Any) -> None:
        table = rb.sampler.rule.table
        if sampler == "proportional":
            table.magnitude[:3] = 77.0
        else:  # rows are out of the order, to be put in again elsewhere
            table.tensors["bits"][:3] = -1082130432
            table.tensors["size"][0] -= 3
        die()

    def work() -> None:
        deadly = Deadly(spoil)
        kind = "sum_tree.cpu" if sampler == "proportional" else "rank_order.cpu"
        for name in (f"{kind}.update", f"{kind}.fill", f"batch.cpu.update_{sampler}"):
            monkeypatch.setattr(f"rlbuf_td.kernels.{name}", deadly)
        monkeypatch.setattr(type(rb.sampler.rule), "update_loop", lambda _: deadly)
        call_within_a_write(rb, "enter", spoil)
        if is_update:
            rb.update_tensordict_priority(batch)
        else:
            rb.extend(numbered_rows(6, 30, every=4))

    killed(work)
    if is_update:
        after = rb.sampler.priority(torch.arange(3, CAPACITY))
        assert torch.equal(after, before[3:])
    end = 30 if is_update else 36
    assert rb.chronological()["x"].tolist() == [*range(end - CAPACITY, end)]
    check_priorities(rb)


def test_a_kill_within_the_compiled_write_keeps_a_break_and_loses_what_it_replaces() -> (
    None
):
    rb = make("proportional")
    rb.extend(numbered_rows(1, 30, every=4))  # later ones are compiled
    rb.storage.episodes_now().end()

    def work() -> None:
        call_within_a_write(rb, "write_entries", die)
        rb.extend(numbered_rows(5, 31, every=4))

    killed(work)
    assert rb.chronological()["x"].tolist() == [*range(12, 31)]
    assert rb.write_count == 31
    check_priorities(rb)
    # the slots 7 to 11 are empty
    for index in (torch.arange(CAPACITY), 7 - CAPACITY, [7], slice(None), slice(5, 8)):
        with pytest.raises(IndexError, match="step 7 of lane 0 is gone"):
            rb.storage.get(index)
    assert rb[12:]["x"].tolist() == [*range(12, 24)]
    rb.extend(numbered_rows(2, 31, every=4))
    assert rb.chronological()["x"].tolist() == [*range(12, 33)]
    found = TrajectoryIndex(rb.storage).steps_ahead(torch.arange(28, 33) % CAPACITY)
    assert found.tolist() == [2, 1, 0, 0, 0]


def half_edited_then_die(rows_: Rows, cells: Any, values: dict[Any, Any]) -> None:
    key = rows_.layout.leaves[0].key
    rows_.unpack(rows_.matrix)[key][cells] = values[key]
    die()


def test_a_killed_write_to_a_reservoir_changes_no_row_but_those_that_it_replaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rb = make("proportional", ReservoirWriter())
    cells = torch.arange(CAPACITY)
    is_killed = True
    for line in count(1, 97):
        if not is_killed:
            break
        rb.update_priority(cells, torch.rand(CAPACITY))
        before, priorities = rb.storage[:].clone(), rb.sampler.priority(cells)
        rows = numbered_rows(40, 1_000 * line, every=4)
        with monkeypatch.context() as patch:
            if line % 2:
                patch.setattr(Rows, "edit_", half_edited_then_die)
            is_killed = killed_at(line // 2 * 2 + 1, partial(rb.extend, rows))
        stored = rb.storage[:]
        # the first entry of a row that was being replaced may be of the new row
        is_new = (
            torch.maximum(stored["x"], -stored["desired_goal"][:, 0]) >= 1_000 * line
        )
        kept = (~is_new).nonzero()[:, 0]
        assert (stored[kept] == before[kept]).all()
        assert torch.equal(rb.sampler.priority(kept), priorities[kept])
        rb.sample()
        rb.storage.ring.check()
        check_priorities(rb)
    assert line > 97


def test_cells_whose_rows_a_write_has_given_up_are_zeros():
    rb = buffer_of(8, None, rows=numbered_rows(11, 1))
    rb.storage.ring.begin(np.array([2]))  # of a process that dies here
    rb.storage.recover()
    assert rb.storage["x"].tolist() == [9, 10, 11, 0, 0, 6, 7, 8]
    assert rb.chronological()["x"].tolist() == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_rows_that_were_published_but_not_announced_are_new(sampler: Any):
    rb = buffer_of(8, sampler(8), rows=numbered_rows(8))
    rb.update_priority(torch.arange(8), torch.arange(3.0, 11.0))
    before = rb.sampler.priority(torch.arange(8))
    rb.storage.ring.begin(np.array([2]))
    rb.storage.ring.publish()  # of a process that dies here
    rb.storage.recover()
    expected = torch.cat([before[[7, 7]], before[2:]])
    assert torch.equal(rb.sampler.priority(torch.arange(8)), expected)


@pytest.mark.parametrize("form", ["numba", "torch"])
def test_a_write_whose_news_is_interrupted_is_finished(form: str):
    heard = []

    def interrupt(*_: Any, **__: Any) -> None:
        heard.append(None)
        if len(heard) == 1:
            raise KeyboardInterrupt

    with forced(form):
        rb = buffer_of(CAPACITY, ProportionalSampler(CAPACITY), rows=numbered_rows(5))
        sampler = ProportionalSampler(CAPACITY)
        other: Any = ReplayBuffer(storage=rb.storage, sampler=sampler)
        other.mark_update = interrupt
        with pytest.raises(KeyboardInterrupt):
            rb.extend(numbered_rows(3, 5))
        assert rb.storage.ring.dirty == 0
        assert len(rb) == 8
        assert len(heard) == 2  # again, of the rows that it had not heard of
        check_priorities(rb)
