"""What processes share, how they come by it, what cannot be shared; forks beside
threads that are inside a call."""

from __future__ import annotations

import copy
import multiprocessing as mp
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count, product
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from numba.core.compiler_lock import global_compiler_lock
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td import (
    GymnasiumRecorder,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SchemaError,
    TrajectoryIndex,
    UniformSampler,
    schema_of,
)
from rlbuf_td.storages.writes import Write
from tests.catalogue import SAMPLERS, buffer_of, numbered_rows
from tests.storages.test_kill import check_priorities
from tests.test_lockstep import forked, stopped

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
SPAWN = pytest.param("spawn", marks=pytest.mark.slow)  # each process imports everything


def elsewhere(work: Callable[..., object], *args: object) -> None:
    all_elsewhere(work, [args])


def all_elsewhere(
    work: Callable[..., object],
    calls: Iterable[tuple[object, ...]],
    method: str = "fork",
) -> None:
    """Do something at the same time in a process for each tuple of arguments."""
    context: Any = mp.get_context(method)
    processes = [context.Process(target=_alone, args=(work, *args)) for args in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
        assert process.exitcode == 0


def _alone(work: Callable[..., object], *args: object) -> None:
    torch.set_num_threads(1)
    work(*args)


@contextmanager
def forked_now(**calls: Callable[[], object]) -> Iterator[Callable[[str], None]]:
    """Fork a process, and yield a function that lets it do the call of a name."""
    here, there = mp.get_context("fork").Pipe()

    def serve() -> None:
        for name in iter(there.recv, None):
            calls[name]()
            there.send("done")

    def call(name: str) -> None:
        here.send(name)
        assert here.poll(60), f"no end of {name}"
        here.recv()

    process = mp.get_context("fork").Process(target=_alone, args=(serve,))
    process.start()
    yield call
    here.send(None)
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("method", [SPAWN, "fork"])
def test_workers_that_start_one_after_another_write_every_row(method):
    """The nightly of TorchRL of October 2026 makes new semaphores at each
    ``share()``."""
    rb = buffer_of(30, ProportionalSampler(30))
    if method == "fork":
        rb.share()
    context: Any = mp.get_context(method)
    workers = [context.Process(target=_extend, args=(rb, 5 * k)) for k in range(3)]
    for worker in workers:
        worker.start()
        assert rb.share() is rb
    for worker in workers:
        worker.join(180)
        assert worker.exitcode == 0
    assert rb.write_count == 15
    assert sorted(rb.storage["x"].tolist()) == [*range(15)]


def _extend(rb: ReplayBuffer, start: int) -> None:
    rb.extend(numbered_rows(5, start))


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_settings_are_everybodys(sampler):
    index, errors = torch.arange(20), torch.arange(1.0, 21.0)
    rb, alone = (
        buffer_of(30, sampler(30, alpha), rows=numbered_rows(20))
        for alpha in (0.6, 1.0)
    )
    for each in (rb.share(), alone):
        each.update_priority(index, errors)

    def schedule() -> None:
        rb.sampler.alpha, rb.sampler.beta = 1.0, 0.9

    elsewhere(schedule)
    assert (rb.sampler.alpha, rb.sampler.beta) == (1.0, 0.9)
    law = alone.sampler.probability(index)
    torch.testing.assert_close(rb.sampler.probability(index), law)
    check_priorities(rb)


def record(rb: ReplayBuffer) -> None:
    env = gymnasium.make("CartPole-v1")
    recorder = GymnasiumRecorder(rb, env)
    recorder.reset(seed=0)
    for _ in range(5):
        recorder.step(env.action_space.sample())


@pytest.mark.parametrize("how", ["rb.share()", "storage.share_memory_()"])
def test_recorders_of_all_processes_use_different_trajectory_numbers(how):
    rb = ReplayBuffer.from_env(gymnasium.make("CartPole-v1"), 30, batch_size=8)
    rb.share() if how == "rb.share()" else rb.storage.share_memory_()
    for is_here in (True, False, False, True):
        record(rb) if is_here else elsewhere(record, rb)
    numbers = rb.storage["collector", "traj_ids"].view(4, 5)
    assert (numbers == numbers[:, :1]).all()
    assert numbers[:, 0].unique().numel() == 4


def test_rows_that_one_process_reserves_are_found_by_another_one():
    storage = PackedStorage(9, shared=True)

    def lock() -> None:
        with storage.lock:  # the last one to hold it
            pass

    def write() -> None:
        with pytest.raises(SchemaError):
            storage.advance(Write(TensorDict({"y": torch.zeros(2, 5)}, [2])))
        storage.advance(Write(TensorDict({"x": torch.ones(2, 3)}, [2])))

    with forked_now(lock=lock, write=write) as other_process:
        other_process("lock")
        storage.reserve(TensorDict({"x": torch.zeros(3)}, []))
        other_process("write")
    assert storage["x"].tolist() == [[1.0] * 3] * 2


# -- kills at any moment


FACTORS = torch.arange(1, 20)
WORKER = 1_000_000


def numbered(worker: int, first: int, count: int) -> TensorDict:
    """Return rows of a worker whose entries all follow from their number."""
    x = worker * WORKER + torch.arange(first, first + count)
    after = {"state": (x[:, None] + 1) * FACTORS}
    return TensorDict({"x": x, "state": x[:, None] * FACTORS, "next": after}, [count])


def size_of(serial: int) -> int:
    return 1 + serial % 37


def write_for_ever(rb: ReplayBuffer, worker: int, written: Any) -> None:
    while True:
        count = size_of(written[worker])
        data = numbered(worker, written[worker], count)
        rb.add(data[0]) if count == 1 else rb.extend(data)
        written[worker] += count


def check_rows(data: TensorDict) -> torch.Tensor:
    """Check that no row is torn; return the numbers."""
    x = data["x"]
    assert (data["state"] == x[:, None] * FACTORS).all()
    assert (data["next", "state"] == (x[:, None] + 1) * FACTORS).all()
    return x


@pytest.mark.parametrize(
    ("sampler", "share_next"), [("proportional", False), ("rank", True)]
)
def test_workers_killed_at_random_leave_no_torn_lost_or_repeated_row(
    sampler, share_next
):
    storage = PackedStorage(5_000, shared=True, share_next=share_next)
    rb = ReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](5_000), batch_size=256)
    rb.extend(numbered(20, 0, 256))
    written, running, chance = RawArray("q", 20), [], random.Random(0)
    for worker in range(6):
        process = mp.get_context("fork").Process(
            target=_alone, args=(write_for_ever, rb, worker, written), daemon=True
        )
        process.start()
        running.append(process)
        until = time.monotonic() + chance.uniform(0.02, 0.15)
        while time.monotonic() < until or not written[worker]:
            batch = rb.sample()
            check_rows(batch)
            rb.update_tensordict_priority(batch.set("td_error", torch.rand(256)))
        if worker > 2:  # three at a time
            running.pop(chance.randrange(4)).kill()
    for process in running:
        process.kill()
        process.join(60)
    stored = check_rows(rb.chronological())
    for worker in set((stored // WORKER).tolist()) - {20}:
        numbers = stored[stored // WORKER == worker] % WORKER
        assert (numbers.diff() == 1).all()
        unannounced = int(numbers[-1]) + 1 - written[worker]
        assert unannounced in (0, size_of(written[worker]))
    # the last write that was killed leaves a gap
    assert 5_000 - 37 <= len(stored) <= 5_000 < rb.write_count
    check_priorities(rb)
    rb.storage.check()


def test_priorities_that_are_not_shared_cannot_be_sent():
    process = mp.get_context("spawn").Process(
        target=len, args=(ProportionalSampler(10),)
    )
    with pytest.raises(RuntimeError, match=r"Share the buffer first: rb.share\(\)"):
        process.start()


# -- forks


def use_all(rb: ReplayBuffer) -> None:
    batch = rb.sample()
    rb.extend(numbered_rows(3))
    rb.update_tensordict_priority(batch.set("td_error", torch.rand(len(batch))))


def write_twice(rb: ReplayBuffer) -> None:
    words = r"forked from .* not shared: .* Call rb.share\(\) before forking"
    with pytest.warns(UserWarning, match=words):
        rb.extend(numbered_rows(3))
    warnings.simplefilter("error")
    rb.extend(numbered_rows(3))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("work", "shared"),
    [
        (write_twice, False),
        (lambda rb: copy.deepcopy(rb).extend(numbered_rows(3)), False),
        (lambda rb: rb.extend(numbered_rows(3)), True),
    ],
    ids=["not shared", "a copy", "shared"],
)
def test_the_first_write_of_a_child_warns_if_the_buffer_is_not_shared(
    work: Callable[[Any], object], shared: bool
) -> None:
    rb = ReplayBuffer(storage=PackedStorage(100), shared=shared)
    for _ in range(3):
        rb.extend(numbered_rows(3))  # compiled at last
    elsewhere(work, rb)
    assert len(rb) == 9 + 3 * shared


@contextmanager
def inside_a_draw(rb: Any) -> Iterator[None]:
    with rb.storage.lock, rb.sampler.rule.table.lock:
        yield


def fork_beside(
    hold: Callable[[Any], AbstractContextManager[Any]], shared: bool
) -> None:
    """Fork while another thread holds a lock, and use the buffer in both processes."""
    rb = buffer_of(100, RankSampler(100), rows=numbered_rows(20), batch_size=8)
    use_all(rb)
    if shared:
        rb.share()
    began = threading.Event()

    def work() -> None:
        with hold(rb):
            began.set()
            time.sleep(0.3)

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    child = mp.get_context("fork").Process(target=use_all, args=(rb,), daemon=True)
    child.start()
    use_all(rb)
    child.join(20)
    thread.join()
    assert child.exitcode == 0


@pytest.mark.filterwarnings(
    "ignore:.*use of fork:DeprecationWarning", "ignore:this process was forked"
)
@pytest.mark.parametrize(
    ("hold", "shared"),
    [(lambda rb: global_compiler_lock, False), (inside_a_draw, True)],
    ids=["numba's compiler", "a draw by ranks"],
)
def test_a_fork_beside_a_thread_that_holds_a_lock_stops_no_process(
    hold: Callable[[Any], AbstractContextManager[Any]], shared: bool
) -> None:
    assert forked(lambda: fork_beside(hold, shared)) == 0


# -- every way to say that rows are shared, wherever they lie, shares all of them

CAPACITY, FIRST, MORE = 40, 8, 9

KINDS: dict[str, Callable[[], Any]] = {
    "uniform": UniformSampler,
    "proportional": lambda: ProportionalSampler(CAPACITY, alpha=1.0, eps=0.0),
    "rank": lambda: RankSampler(CAPACITY, alpha=1.0),
    "n-step": lambda: NStepSampler(
        ProportionalSampler(CAPACITY, alpha=1.0, eps=0.0), 2, 0.9
    ),
}
PLACES = ["RAM", "file", "reopened file"]
WAYS = [
    "shared=True",
    "shared_init=True",
    "from_schema",
    "rb.share()",
    "storage.share_memory_()",
    "storage, before the buffer",
    "ReplayBuffer(shared=True)",
    "TorchRL's buffer",
]


def flagged_rows(first: int, number: int) -> TensorDict:
    x = torch.arange(first, first + number)
    flags = {"done": (x % 3 == 2)[:, None], "ended": (x % 5 == 4)[:, None]}
    return TensorDict(
        {"x": x, "next": flags | {"reward": torch.ones(number, 1)}}, [number]
    )


def made(place: str, way: str, sampler: str, folder: Path) -> Any:
    """Return a buffer that is shared, without rows."""
    where: dict[str, Any] = {} if place == "RAM" else {"scratch_dir": folder}
    where["reopen"] = place == "reopened file"
    buffer: dict[str, Any] = {"sampler": KINDS[sampler](), "batch_size": 400}
    if way == "from_schema":
        schema = schema_of(flagged_rows(0, 1)[0])
        return ReplayBuffer.from_schema(
            schema, CAPACITY, shared=True, **where, **buffer
        )
    if way in ("shared=True", "shared_init=True", "TorchRL's buffer"):
        where["shared_init" if way == "shared_init=True" else "shared"] = True
    storage = PackedStorage(CAPACITY, **where)
    if way == "TorchRL's buffer":
        return TensorDictReplayBuffer(storage=storage, shared=True, **buffer)
    if way == "storage, before the buffer":
        storage.share_memory_()
    rb = ReplayBuffer(
        storage=storage, shared=way == "ReplayBuffer(shared=True)", **buffer
    )
    if way == "rb.share()":
        rb.share()
    if way == "storage.share_memory_()":
        storage.share_memory_()
    return rb


def priorities(rb: Any) -> list[float] | None:
    sampler = getattr(rb.sampler, "innermost", rb.sampler)
    if not hasattr(sampler, "priority"):
        return None
    return sampler.priority(torch.arange(len(rb)), storage=rb.storage).tolist()


def begin(rb: Any) -> None:
    """Write rows, and give them priorities."""
    rb.extend(flagged_rows(0, FIRST))
    if priorities(rb) is not None:
        rb.update_priority(torch.arange(FIRST), torch.arange(1.0, 1 + FIRST))


def go_on(rbs: list[Any]) -> None:
    """Write and update in another process, which first looks at what is there."""
    for rb in rbs:
        before = len(rb)
        assert not before or rb.storage[:]["x"].tolist() == [*range(before)]
        assert priorities(rb) in (None, [*range(1, 1 + before)])
        rb.extend(flagged_rows(before, MORE))
        # the n-step wrapper is drawn from: it notes episodes here, too
        assert {*rb.sample()["x"].tolist()} <= {*range(before + MORE)}
        if priorities(rb) is not None:
            errors = torch.arange(1.0, 1 + len(rb)).flip(0)
            rb.update_priority(torch.arange(len(rb)), errors)


FAST = [
    *product(PLACES, ["shared=True"], [True, False], [["proportional"], ["rank"]]),
    *(("file", way, False, ["n-step"]) for way in WAYS[1:]),
    ("reopened file", "TorchRL's buffer", True, ["proportional"]),
    ("RAM", "storage.share_memory_()", True, ["uniform", "rank"]),
]


@pytest.mark.parametrize(
    ("place", "way", "is_written", "samplers", "method"),
    [
        *((*case, "fork") for case in FAST),
        *(
            pytest.param(
                place, way, is_written, [*KINDS], method, marks=pytest.mark.slow
            )
            for number, (place, way, is_written) in enumerate(
                product(PLACES, WAYS, [False, True])
            )
            for method in (["fork", "spawn"] if number % 5 == 0 else ["fork"])
        ),
    ],
)
def test_what_one_process_writes_and_learns_the_others_have(
    place: str,
    way: str,
    is_written: bool,
    samplers: list[str],
    method: str,
    tmp_path: Path,
) -> None:
    rbs = [made(place, way, sampler, tmp_path / sampler) for sampler in samplers]
    assert all(rb.storage.shared for rb in rbs)
    if is_written:
        for rb in rbs:
            begin(rb)
    all_elsewhere(go_on, [(rbs,)], method)
    for rb in rbs:
        total = MORE + FIRST * is_written
        assert rb.storage[:]["x"].tolist() == [*range(total)]
        rb.extend(flagged_rows(total, 2))
        assert {*rb.sample()["x"].tolist()} >= {*range(total)} - {total - 1}
        # new rows have the largest priority that any process has given
        assert priorities(rb) in (None, [*range(total, 0, -1), total, total])
        rb.storage.check()
        if isinstance(rb, ReplayBuffer):
            rb.close()


# -- what fails or is interrupted


def unshared(place: str, sampler: str, folder: Path, dedup: bool = False) -> Any:
    where: dict[str, Any] = {} if place == "RAM" else {"scratch_dir": folder}
    storage = PackedStorage(
        CAPACITY, reopen=place == "reopened file", share_next=dedup, **where
    )
    rb = ReplayBuffer(
        storage=storage,
        sampler=KINDS[sampler](),
        batch_size=400,
        samples_per_insert=50.0,
        tolerance=1e6,
        min_size=1,
    )
    begin(rb)
    rb.sample()
    return rb


def check_goes_on(rb: Any) -> None:
    """Write, draw and check; share again, and let another process write."""
    assert rb.storage[:]["x"].tolist() == [*range(FIRST)]
    assert priorities(rb) == [*range(1, 1 + FIRST)]
    rb.extend(flagged_rows(FIRST, 3))
    junk = [torch.zeros(300) for _ in range(30)]  # takes memory that was freed
    assert rb.share().share() is rb

    def write() -> None:
        rb.extend(flagged_rows(FIRST + 3, 3))
        rb.sample()
        rb.update_priority(torch.tensor([0]), torch.tensor([50.0]))

    assert forked(write) == 0
    rb.extend(flagged_rows(FIRST + 6, 1))
    total = FIRST + 7
    assert rb.storage[:]["x"].tolist() == [*range(total)]
    assert priorities(rb) == [50, *range(2, FIRST + 1), *[FIRST] * 6, 50]
    assert {*rb.sample()["x"].tolist()} <= {*range(total)}
    # batches of `unshared`, of the other process, and the last one
    report = rb.flow.report()
    assert (report["inserts"], report["samples"]) == (rb.write_count, 3 * 400)
    check_priorities(rb)
    rb.storage.check()
    rb.close()
    del junk


CALLS: dict[str, Callable[[Any], object]] = {
    "rb.share()": lambda rb: rb.share(),
    "storage.share_memory_()": lambda rb: rb.storage.share_memory_(),
    "sampler.share_memory_()": lambda rb: rb.sampler.share_memory_(),
}


@pytest.mark.parametrize(
    "every", [173, pytest.param(29, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize(
    ("call", "place", "sampler", "dedup"),
    [
        ("rb.share()", "RAM", "n-step", False),
        ("rb.share()", "reopened file", "proportional", False),
        ("storage.share_memory_()", "RAM", "rank", True),
        ("storage.share_memory_()", "file", "proportional", False),
        ("sampler.share_memory_()", "RAM", "proportional", False),
    ],
)
def test_sharing_that_is_interrupted_loses_nothing_and_can_be_completed(
    call: str, place: str, sampler: str, dedup: bool, every: int, tmp_path: Path
) -> None:
    # a sampler alone is shared in few lines
    step = max(1, every // 20) if call.startswith("sampler") else every
    for line in count(5, step):
        rb, is_done = unshared(place, sampler, tmp_path / str(line), dedup), False
        with stopped(line, signal.SIGINT) as stopper:
            CALLS[call](rb)
            is_done = True
        assert is_done == (stopper.left > 0), line
        check_goes_on(rb)
        if is_done:
            break


@pytest.mark.parametrize(
    ("place", "step"),
    [("RAM", 4), *(pytest.param(place, 1, marks=pytest.mark.slow) for place in PLACES)],
)
def test_sharing_without_free_file_descriptors_loses_nothing(
    place: str, step: int, tmp_path: Path
) -> None:
    """Every file and every block of shared memory takes a descriptor."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def is_shared_with(spare: int) -> bool:
        """Share a buffer while there are few descriptors."""
        rb = unshared(place, "proportional", tmp_path / str(spare))
        with open(os.devnull) as probe:
            lowest = probe.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, limits[1]))
        is_done = False
        with suppress(OSError, RuntimeError):
            rb.share()
            is_done = True
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        check_goes_on(rb)
        return is_done

    def work() -> None:
        needed = next(spare for spare in count(0, step) if is_shared_with(spare))
        assert needed > 2 * step, "no call failed in between"

    assert forked(work) == 0


# -- the members of the kind that are not a matter of priorities


def test_a_second_buffer_and_a_copy_of_shared_rows_are_shared() -> None:
    first = buffer_of(CAPACITY, KINDS["rank"](), rows=flagged_rows(0, 5))

    def another() -> Any:
        return ReplayBuffer(storage=first.storage, sampler=KINDS["proportional"]())

    before = another()
    first.share()
    rbs = [first, before, another(), copy.deepcopy(first)]
    errors = torch.arange(1.0, 9)

    def write() -> None:
        for rb in (first, rbs[-1]):
            rb.extend(flagged_rows(5, 3))
        for rb in rbs:
            rb.update_priority(torch.arange(8), errors)

    assert forked(write) == 0
    assert [len(rb) for rb in rbs] == [8] * 4
    assert [priorities(rb) for rb in rbs] == [errors.tolist()] * 4
    rbs[-1].extend(flagged_rows(8, 1))
    assert [len(rb) for rb in rbs] == [8, 8, 8, 9]


def test_a_shared_file_is_written_from_a_copy_only_in_memory(tmp_path: Path) -> None:
    storage = PackedStorage(CAPACITY, scratch_dir=tmp_path, shared=True)
    storage.set(range(3), flagged_rows(0, 3))
    assert "mapped file, shared" in repr(storage)
    copied = copy.deepcopy(storage)
    assert copied.shared
    assert "shared memory" in repr(copied)
    assert forked(lambda: copied.set(range(3, 5), flagged_rows(3, 2))) == 0
    assert (len(storage), len(copied)) == (3, 5)


@pytest.mark.parametrize("is_named_here", [False, True])
@pytest.mark.parametrize(
    ("place", "written"), [("RAM", 0), ("RAM", 12), ("reopened file", 12)]
)
def test_all_processes_find_episodes_by_one_pair_of_keys(
    place: str, written: int, is_named_here: bool, tmp_path: Path
) -> None:
    """One of two processes names the keys, the other one goes on writing."""
    rb = made(place, "shared=True", "uniform", tmp_path / "rows")
    if written:
        rb.extend(flagged_rows(0, written))
    key = "next", "ended"

    def name_keys() -> None:
        NStepSampler(UniformSampler(), 2, 0.9, done_key=key).watch(rb.storage)

    def write() -> None:
        rb.extend(flagged_rows(written, 3))
        rb.extend(flagged_rows(written + 3, 9))
        with pytest.raises(ValueError, match="in all processes that share it"):
            TrajectoryIndex(rb.storage)
        with pytest.raises(ValueError, match=r"by done_key=\('next', 'ended'\)"):
            NStepSampler(UniformSampler(), 2, 0.9).watch(rb.storage)

    def check() -> None:
        step = torch.arange(written + 12)
        index = TrajectoryIndex(rb.storage, done_key=key)
        assert torch.equal(index.steps_back(step), step % 5)

    with forked_now(name_keys=name_keys, write=write, check=check) as other_process:
        if is_named_here:
            name_keys()
            other_process("write")
        else:
            other_process("name_keys")
            write()
        other_process("check")
    check()
    rb.storage.check()


def test_names_of_keys_that_are_too_long_to_share_change_nothing() -> None:
    storage = PackedStorage(CAPACITY, shared=True)
    with pytest.raises(ValueError, match="at most 4,096 fit: store flags"):
        TrajectoryIndex(storage, done_key=("next", "x" * 5_000))
    TrajectoryIndex(storage)


def test_an_interrupted_call_leaves_the_lock_to_others() -> None:
    """At the lines at which a process takes or releases the lock."""
    storage = PackedStorage(CAPACITY, shared=True)
    storage.set(range(2), flagged_rows(0, 2))

    def take() -> None:
        with storage.lock, storage.lock:
            pass

    for line in count(1):
        is_done = False
        with stopped(line, signal.SIGINT) as stopper:
            take()
            is_done = True
        assert is_done == (stopper.left > 0), line
        with ThreadPoolExecutor(1) as pool:
            pool.submit(take).result(60)
        if not line % 3:
            assert forked(take) == 0
        if is_done:
            break
    assert line > 20


#: In :meth:`ReplayBuffer.stats` or :meth:`ReplayBuffer.health`.
COUNTS = (
    *("write_count", "sample_calls", "samples_returned", "stale_updates"),
    *("inserts", "samples", "sample_waits", "insert_waits"),
)


def counts_after_use(rb: Any, work: Callable[[Callable[[], None]], object]) -> Any:
    """Let ``work`` call what uses all rows of a buffer, and return what it counts."""

    def use() -> None:
        batch = rb.sample()
        rb.extend(numbered_rows(8, 8))
        rb.update_tensordict_priority(batch.set("td_error", torch.ones(len(batch))))
        with suppress(TimeoutError):
            while True:
                rb.sample(wait=True, timeout=0.0)

    rb.extend(numbered_rows(8))
    work(use)
    found = rb.stats() | rb.health()
    return {name: found[name] for name in COUNTS}


def test_what_one_process_counts_all_processes_know() -> None:
    here, there = (
        ReplayBuffer(
            storage=PackedStorage(8, shared=shared),
            sampler=ProportionalSampler(8),
            batch_size=4,
            samples_per_insert=1.0,
            tolerance=16,
        )
        for shared in (False, True)
    )
    expected = counts_after_use(here, lambda use: use())
    assert min(expected[name] for name in COUNTS[:-1]) > 0
    assert counts_after_use(there, lambda use: elsewhere(use)) == expected
