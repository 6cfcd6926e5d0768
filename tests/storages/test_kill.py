"""A process is killed (SIGKILL) at a given point of its work: it has written all or nothing, and blocks nobody."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictRoundRobinWriter

from rlbuf_td import NStepSampler, PackedStorage, ProportionalSampler, ReplayBuffer, ReservoirWriter, RingWriter
from rlbuf_td.buffers.bound_write import BoundWrite, bind_write
from rlbuf_td.storages.lane_heads import LaneHeads
from rlbuf_td.storages.rows import PlainRows
from rlbuf_td.storages.shared.rows import Journal
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.kernels.invariants import check_tree
from tests.storages.soak import SAMPLERS, check_priorities

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
CAPACITY = 24


def rows(first: int, count: int, lanes: int = 0) -> TensorDict:
    number = torch.arange(first, first + count)
    if lanes:
        number = number + 1000 * torch.arange(lanes)[:, None]
    shape = number.shape
    return TensorDict({"x": number, "y": -number, "next": {"done": (number % 4 == 3)[..., None]}}, shape)


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_then_die(rows_: PlainRows, start: int, count: int, leaves: list[torch.Tensor]) -> None:
    columns = rows_.layout.columns(rows_.matrix)
    for step in range(count // 2):
        columns[0][(start + step) % rows_.steps].copy_(leaves[0][step])
    die()


def killed(work: Callable[[], object], *where: Any) -> None:
    """Do ``work`` in a child, which must die of it; ``where``: what is to be patched there to kill it.

    The child writes with torch, unless a step of compiled writes is to be patched.
    """

    def child() -> None:
        torch.set_num_threads(1)
        if where:
            owner, name, *deadly = where
            if (owner, name) not in COMPILED_STEPS:
                BoundWrite.holds = lambda self: False  # type: ignore[method-assign]
            setattr(owner, name, *(deadly or [die]))
        work()

    process = mp.get_context("fork").Process(target=child)
    process.start()
    process.join(180)
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture(autouse=True)
def _not_blocked():
    """Fail rather than hang."""

    def give_up(*_: Any) -> None:
        raise TimeoutError("blocked by a dead process")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def make(sampler: str = "proportional", lanes: int = 0, written: int = 30, writer: Any = RingWriter) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=PackedStorage(CAPACITY, ndim=2 if lanes else 1),
        sampler=SAMPLERS[sampler](CAPACITY),
        writer=writer(),
        batch_size=8,
    )
    trajectories = TrajectoryIndex.of(rb.storage)
    for first in range(0, written, 5):
        rb.extend(rows(first, 5, lanes))
    trajectories.boundaries()
    rb.share()
    rb.bound_write = bind_write(rb, rb.parts)
    return rb


def check(rb: ReplayBuffer, expected: TensorDict, write_count: int) -> None:
    """Everything is in order: rows, counters, priorities, trajectories; and it goes on."""
    stored = rb.chronological()
    assert torch.equal(stored["x"], expected["x"].T if expected.ndim == 2 else expected["x"])
    assert torch.equal(stored["y"], -stored["x"])
    assert rb.write_count == write_count
    fresh, cells = TrajectoryIndex(rb.storage), torch.arange(len(rb))
    for mine, right in zip(TrajectoryIndex.of(rb.storage).reach(cells), fresh.reach(cells), strict=True):
        assert torch.equal(mine, right)
    check_priorities(rb)
    batch = rb.sample()
    assert torch.equal(batch["y"], -batch["x"])
    lanes = 0 if stored.ndim == 1 else stored.shape[1]
    rb.extend(rows(5000, 3, lanes))
    assert rb.last(3)["x"].reshape(3, -1)[:, 0].tolist() == [5000, 5001, 5002]


#: What compiled writes call: before a row is written, for deduplicated rows, and after all counters have moved.
COMPILED_STEPS = (
    (Journal, "saved"),
    (BoundWrite, "_copy"),
    (Journal, "written"),
    (BoundWrite, "enter_rows"),
    (BoundWrite, "enter_rows_of_lanes"),
)
BEFORE_IT_IS_WRITTEN = {
    "compiled: the rows are saved": (Journal, "saved"),
    "compiled: the counters have moved": (Journal, "written"),
    "half the rows are written": (PlainRows, "copy_", half_then_die),
    "the rows are written": (PackedStorage, "count_written", die),
    "the cursor has moved": (RingWriter, "_bump_generation", die),
}


@pytest.mark.parametrize("lanes", [0, 3])
@pytest.mark.parametrize("written", [10, 20, 30])
@pytest.mark.parametrize("point", BEFORE_IT_IS_WRITTEN)
def test_a_write_that_was_not_finished_was_not_made(point, written, lanes):
    rb = make(lanes=lanes, written=written)
    kept = min(written, CAPACITY // max(lanes, 1))
    killed(lambda: rb.extend(rows(900, 6, lanes)), *BEFORE_IT_IS_WRITTEN[point])
    check(rb, rows(written - kept, kept, lanes), written)


@pytest.mark.parametrize("point", [(ReplayBuffer, "mark_range"), (BoundWrite, "enter_rows")])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_write_with_complete_rows_and_counters_is_finished_by_others(sampler, point):
    rb = make(sampler)
    if sampler != "uniform":
        rb.update_priority(torch.arange(CAPACITY), torch.arange(CAPACITY) + 1.0)
    killed(lambda: rb.extend(rows(30, 6)), *point)
    rb.sample()
    if sampler != "uniform":
        expected = torch.arange(CAPACITY) + 1.0
        expected[6:12] = CAPACITY  # the new rows enter with the highest
        assert torch.equal(rb.sampler.priority(torch.arange(CAPACITY)).float(), expected)
    check(rb, rows(36 - CAPACITY, CAPACITY), 36)


LANE_POINTS = {
    "compiled: the rows are saved": (Journal, "saved"),
    "compiled: the counters have moved": (Journal, "written"),
    "compiled: the write is complete": (BoundWrite, "enter_rows_of_lanes"),
    "the rows are saved": (PlainRows, "replace_cells_", die),
    "the rows are written": (LaneHeads, "write", die),
    "the heads have moved": (RingWriter, "announce_rows", die),
    "the write is complete": (TrajectoryIndex, "mark_rows", die),
}


@pytest.mark.parametrize(
    ("point", "apart"),
    [(point, apart) for point in LANE_POINTS for apart in (False, True) if apart or not point.startswith("compiled")],
)
def test_a_write_to_a_lane_that_is_killed_leaves_the_other_lanes_as_they_were(point, apart):
    rb = make(lanes=3, written=10)
    lanes: list[list[int]] = [[lane * 1000 + k for k in range(2, 10)] for lane in range(3)]
    if apart:
        rb.extend(rows(10, 3), lanes=1)
        lanes[1] = [*lanes[1][3:], 10, 11, 12]
    killed(lambda: rb.extend(rows(900, 6), lanes=[0, 1, 0, 1, 1, 1]), *LANE_POINTS[point])
    rb.sample()
    if point.endswith("the write is complete"):
        lanes[0], lanes[1] = [*lanes[0][2:], 900, 902], [*lanes[1][4:], 901, 903, 904, 905]
    for lane, expected in enumerate(lanes):
        stored = rb.lane(lane).chronological()
        assert stored["x"].tolist() == expected
        assert torch.equal(stored["y"], -stored["x"])
    fresh, cells = TrajectoryIndex(rb.storage), torch.arange(len(rb))
    for mine, right in zip(TrajectoryIndex.of(rb.storage).reach(cells), fresh.reach(cells), strict=True):
        assert torch.equal(mine, right)
    check_priorities(rb)
    rb.lane(2).add(rows(77, 1)[0])
    assert rb.lane(2).last(2)["x"].tolist() == [lanes[2][-1], 77]


def test_workers_that_are_killed_lose_at_most_the_write_that_they_were_in():
    rb = ReplayBuffer(storage=PackedStorage(4 * 500, ndim=2), sampler=NStepSampler(ProportionalSampler(2_000), 5, 0.9))

    def rewarded(first: int, count: int) -> TensorDict:
        return rows(first, count).set(("next", "reward"), torch.ones(count, 1))

    rb.storage.reserve(rewarded(0, 1)[0].expand(4))
    rb.share()
    told = RawArray("q", 4)

    def act(lane: int) -> None:
        torch.set_num_threads(1)
        handle = rb.lane(lane)
        for first in range(0, 400, 2):
            handle.extend(rewarded(first, 2))
            told[lane] = first + 2

    for killed_lane in (0, 2, None):
        actors = [mp.get_context("fork").Process(target=act, args=(lane,)) for lane in range(4)]
        for actor in actors:
            actor.start()
        while killed_lane is not None and told[killed_lane] < 100:
            rb.sample(64) if len(rb) else time.sleep(0.001)
        if killed_lane is not None:
            actors[killed_lane].kill()
        for actor in actors:
            actor.join(180)
        for lane in range(4):
            written = rb.lane(lane).chronological()["x"].tolist()
            is_killed = lane == killed_lane
            assert written == list(range(len(written)))
            assert len(written) - told[lane] in ((0, 2) if is_killed else (0,))
            assert is_killed or len(written) == 400
        length = rb.sample(5_000)["steps_to_next_obs"].double().mean()
        assert abs(float(length) - 2.5) < 0.1  # a trajectory of 4 rows: 4, 3, 2 and 1
        rb.empty()
        told[:] = [0] * 4


class Deadly:
    """A compiled function that kills the process."""

    py_func = staticmethod(lambda: None)

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work

    def __call__(self, *_: object, **__: object) -> None:
        self.work()

    def compile(self, _: object) -> Deadly:
        return self


@pytest.mark.parametrize("sampler", ["proportional", "rank"])
@pytest.mark.parametrize("what", ["a write", "an update"])
def test_priorities_that_were_half_changed_are_made_anew(what, sampler, monkeypatch):
    rb = make(sampler)
    batch = rb.sample()
    batch["td_error"] = torch.rand(8)
    before = rb.sampler.priority(torch.arange(CAPACITY))

    def work() -> None:
        kind = "sum_tree.cpu" if sampler == "proportional" else "rank_order.cpu_update"
        die_in = spoil if sampler == "proportional" else lose
        for name in (f"{kind}.update", f"{kind}.fill", f"batch.cpu.update_{sampler}"):
            monkeypatch.setattr(f"rlbuf_td.kernels.{name}", Deadly(die_in))
        monkeypatch.setattr(BoundWrite, "enter_rows", lambda *_: die_in())
        rb.update_tensordict_priority(batch) if what == "an update" else rb.extend(rows(30, 6))

    def spoil() -> None:
        rb.sampler.law.table.magnitude[:3] = 77.0
        die()

    def lose() -> None:
        st = rb.sampler.law.table.chunks
        st.bits[:3] = -1082130432  # rows that are taken out of the order, to be put in again elsewhere
        st.before[st.top_group[0], 1] -= 3
        die()

    killed(work)
    after = rb.sampler.priority(torch.arange(CAPACITY))
    if what == "an update":
        assert torch.equal(after[3:], before[3:])
        check(rb, rows(6, CAPACITY), 30)
    else:
        check(rb, rows(36 - CAPACITY, CAPACITY), 36)


@pytest.mark.parametrize("point", [*BEFORE_IT_IS_WRITTEN, "the others have not been told"])
def test_flow_control_counts_the_rows_of_finished_writes_only(point):
    rb = ReplayBuffer(storage=PackedStorage(CAPACITY), batch_size=6, samples_per_insert=1.0, tolerance=6)
    rb.share()
    rb.extend(rows(0, 4))
    is_finished = point == "the others have not been told"
    killed(lambda: rb.extend(rows(900, 2)), *BEFORE_IT_IS_WRITTEN.get(point, (ReplayBuffer, "mark_range")))
    if not is_finished:
        rb.extend(rows(4, 2))  # would wait forever if the killed write still counted
    assert rb.health()["inserts"] == rb.write_count == len(rb) == 6
    killed(rb.empty, PackedStorage, "_empty")
    assert (len(rb), rb.health()["inserts"]) == (6, 6)


def replace_rows(rb: ReplayBuffer) -> None:
    with rb._replay_lock:
        rb.storage.set(torch.tensor([3, 17, 4]), rows(900, 3), set_cursor=False)


UNDONE: dict[str, tuple[Any, ...]] = {
    "rows replaced out of order": (replace_rows, PackedStorage, "_bump_mutation_revision"),
    "a write": (lambda rb: rb.extend(rows(900, 6)), PackedStorage, "count_written"),
    "emptying": (ReplayBuffer.empty, PackedStorage, "_empty"),
    "sampling": (ReplayBuffer.sample, PackedStorage, "gather"),
}


@pytest.mark.parametrize(
    ("what", "writer"), [*((what, RingWriter) for what in UNDONE), ("a write", TensorDictRoundRobinWriter)]
)
def test_work_that_was_not_finished_leaves_all_as_it_was(what, writer):
    rb = make(writer=writer)
    work, *where = UNDONE[what]
    killed(lambda: work(rb), *where)
    check(rb, rows(6, CAPACITY), 30)


@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize("how", ["a state", "a dump"])
def test_a_load_that_was_not_finished_was_not_made(how, share_next, monkeypatch, tmp_path):
    def buffer(first: int) -> ReplayBuffer:
        storage = PackedStorage(CAPACITY, share_next=share_next)
        rb = ReplayBuffer(storage=storage, sampler=ProportionalSampler(CAPACITY), batch_size=8)
        number = torch.arange(first, first + 31).repeat_interleave(4).view(31, 4)
        rb.extend(TensorDict({"x": number[:-1], "next": {"x": number[1:], "done": number[1:, :1] < 0}}, [30]))
        return rb

    rb, other = buffer(0), buffer(500)
    expected = rb.chronological()
    other.dumps(tmp_path)
    rb.share()

    def work() -> None:
        monkeypatch.setattr(PackedStorage, "restore_counters", die)  # the rows are in place
        if how == "a state":
            rb.load_state_dict(other.state_dict())
        else:
            rb.loads(tmp_path)

    killed(work)
    assert (rb.chronological() == expected).all()
    assert rb.write_count == 30
    check_tree(rb.sampler.tree, rb.sampler.alpha, rb.sampler.eps)
    rb.load_state_dict(other.state_dict())
    assert (rb.chronological() == other.chronological()).all()
    assert (rb.sample()["x"] >= 500).all()


@pytest.mark.parametrize("point", ["before it looks", "while it looks", "when it has looked", "when it leaves"])
def test_a_process_killed_at_the_lock_undoes_no_work_of_others(point, monkeypatch):
    rb = make()
    rb.extend(rows(30, 6))

    def work() -> None:
        entered = Journal.entered

        def look(journal: Journal) -> None:
            if point == "while it looks":
                monkeypatch.setattr(journal, "_counters", journal._counters[:2])
            if point != "before it looks":
                entered(journal)
            die()

        if point == "when it leaves":
            monkeypatch.setattr("rlbuf_td.storages.shared.lock.ProcessLock._leave", die)
            rb.extend(rows(36, 6))
        monkeypatch.setattr(Journal, "entered", look)
        rb.sample()

    killed(work)
    monkeypatch.undo()
    end = 42 if point == "when it leaves" else 36
    check(rb, rows(end - CAPACITY, CAPACITY), end)


def test_a_process_killed_in_a_repair_leaves_it_to_the_next():
    rb = make()
    killed(lambda: rb.extend(rows(30, 6)), ReplayBuffer, "mark_range")
    killed(rb.sample, ReplayBuffer, "repair")
    killed(rb.sample, Journal, "entered")
    killed(lambda: rb.extend(rows(900, 6)), PackedStorage, "count_written")
    killed(rb.sample, ReplayBuffer, "repair")
    check(rb, rows(36 - CAPACITY, CAPACITY), 36)


@pytest.mark.parametrize("where", [(PackedStorage, "count_written"), (Journal, "saved"), (Journal, "written")])
def test_an_error_in_the_middle_of_a_write_undoes_it(where, monkeypatch):
    rb = make()
    if where not in COMPILED_STEPS:
        rb.bound_write = None
    with monkeypatch.context() as patched:
        patched.setattr(*where, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rb.extend(rows(900, 6))
    check(rb, rows(6, CAPACITY), 30)


def half_replaced_then_die(rows_: PlainRows, cells: np.ndarray, leaves: list[torch.Tensor]) -> None:
    columns = rows_.layout.columns(rows_.flat)
    columns[0][torch.from_numpy(cells)] = leaves[0]
    die()


RESERVOIR: dict[str, tuple[Any, ...]] = {
    "rows are half replaced": (PlainRows, "replace_cells_", half_replaced_then_die),
    "all rows are replaced": (PackedStorage, "count_written", die),
    "nothing is counted": (ReservoirWriter, "note", die),
    "the others have not been told": (ReservoirWriter, "_announce", die),
}


@pytest.mark.parametrize("lanes", [0, 3])
@pytest.mark.parametrize("written", [CAPACITY // 4, 30])
@pytest.mark.parametrize("point", RESERVOIR)
def test_a_write_to_a_reservoir_that_was_not_finished_was_not_made(point, written, lanes):
    rb = make(lanes=lanes, written=5, writer=ReservoirWriter)
    rb.extend(rows(5, written - 5, lanes))
    before, state = rb.storage[:].clone(), rb.writer.state_dict()
    killed(lambda: rb.extend(rows(900, 400, lanes)), *RESERVOIR[point])  # fills what is free, and replaces rows
    rb.sample()
    assert (rb.storage[:] == before).all()
    assert rb.writer.state_dict() == state
    rb.extend(rows(5_000, 400, lanes))
    stored = rb.storage[:]
    assert torch.equal(stored["y"], -stored["x"])
    assert not (stored["x"] % 1_000 >= 900).any()
    assert (len(rb), rb.write_count) == (CAPACITY, written + 400)
    check_priorities(rb)


def test_a_complete_write_to_a_reservoir_is_finished_by_others():
    rb = make(writer=ReservoirWriter)
    killed(lambda: rb.extend(rows(900, 400)), ReplayBuffer, "mark_update")
    rb.sample()
    assert rb.write_count == 430
    assert (rb.storage[:]["x"] >= 900).any()
    assert torch.equal(rb.storage[:]["y"], -rb.storage[:]["x"])
    check_priorities(rb)
