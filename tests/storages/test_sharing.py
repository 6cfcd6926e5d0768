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
from tensordict.nn import TensorDictModule
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td import (
    GymnasiumRecorder,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    RolloutBuffer,
    SchemaError,
    TrajectoryIndex,
    UniformSampler,
    schema_of,
)
from rlbuf_td.storages.writes import Write
from tests.catalogue import SAMPLERS, numbered_rows
from tests.storages.test_kill import check_priorities
from tests.test_lockstep import forked, stopped

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
SPAWN = pytest.param("spawn", marks=pytest.mark.slow)  # each process imports everything


def elsewhere(work: Callable[..., object], *args: object, method: str = "fork") -> None:
    all_elsewhere(work, [args], method)


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


def make(sampler=ProportionalSampler, capacity: int = 30, **kwargs) -> ReplayBuffer:
    storage = PackedStorage(capacity, **kwargs)
    return ReplayBuffer(
        storage=storage, sampler=sampler(capacity), batch_size=8, priority_key="error"
    )


@pytest.mark.parametrize("method", [SPAWN, "fork"])
def test_workers_that_start_one_after_another_write_every_row(method):
    """The nightly of TorchRL of October 2026 makes new semaphores at each
    ``share()``."""
    rb = make()
    if method == "fork":
        rb.share()
    context: Any = mp.get_context(method)
    workers = [
        context.Process(target=_extend, args=(rb, 5 * k))
        for k in range(2 if method == "spawn" else 4)
    ]
    for worker in workers:
        worker.start()
        assert rb.share() is rb
    for worker in workers:
        worker.join(180)
    assert [worker.exitcode for worker in workers] == [0] * len(workers)
    assert rb.write_count == 5 * len(workers)
    assert sorted(rb.storage["x"].tolist()) == list(range(5 * len(workers)))


def _extend(rb: ReplayBuffer, start: int) -> None:
    rb.extend(numbered_rows(5, start, every=4))


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_priorities_and_settings_are_everybodys(sampler):
    rb = make(sampler)
    rb.share()
    rb.extend(numbered_rows(20, every=4))

    def learn() -> None:
        rb.update_priority(torch.arange(20), torch.arange(20.0) - 30.0)
        rb.sampler.alpha, rb.sampler.beta = 1.0, 0.9

    elsewhere(learn)
    assert rb.sampler.priority(torch.arange(20)).tolist() == [
        30.0 - j for j in range(20)
    ]
    assert (rb.sampler.alpha, rb.sampler.beta, rb.sampler.default_priority) == (
        1.0,
        0.9,
        30.0,
    )
    weights = (
        torch.arange(30.0, 10, -1)
        if sampler is ProportionalSampler
        else 1 / torch.arange(1.0, 21)
    )
    expected = (weights / weights.sum()).double()
    assert torch.allclose(rb.sampler.probability(torch.arange(20)), expected, atol=1e-6)
    elsewhere(rb.extend, numbered_rows(3, 20, every=4))
    assert rb.sampler.priority(torch.arange(20, 23)).tolist() == [30.0] * 3
    check_priorities(rb)


def record(rb: ReplayBuffer, steps: int = 5) -> None:
    env = gymnasium.make("CartPole-v1")
    recorder = GymnasiumRecorder(rb, env)
    recorder.reset(seed=0)
    for _ in range(steps):
        recorder.step(env.action_space.sample())


@pytest.mark.parametrize("how", ["rb.share()", "storage.share_memory_()"])
def test_recorders_of_all_processes_use_different_trajectory_numbers(how):
    rb = ReplayBuffer.from_env(gymnasium.make("CartPole-v1"), 30, batch_size=8)
    rb.share() if how == "rb.share()" else rb.storage.share_memory_()
    record(rb)
    for _ in range(2):
        elsewhere(record, rb)
    numbers = rb.storage["collector", "traj_ids"].view(3, 5)
    assert (numbers == numbers[:, :1]).all()
    assert numbers[:, 0].unique().numel() == 3
    record(rb)
    assert rb.storage["collector", "traj_ids"].unique().numel() == 4


def test_a_rollout_that_another_process_records_into_reserved_rows_is_read_here():
    env = gymnasium.make("CartPole-v1")
    critic = TensorDictModule(
        lambda observation: observation[..., :1], ["observation"], ["state_value"]
    )
    rollout = RolloutBuffer.from_env(env, 5, value_network=critic, shared=True)
    elsewhere(record, rollout)
    rows = rollout.storage[:]
    assert torch.equal(rows["observation"][1:], rows["next", "observation"][:-1])
    assert torch.equal(rows["state_value"], rows["observation"][:, :1])
    assert (rows["next", "reward"] == 1).all()


def test_rows_that_one_process_reserves_are_found_by_another_one():
    storage = PackedStorage(9, shared=True)
    there, here = mp.get_context("fork").Pipe()

    def write() -> None:
        with storage.lock:  # the last one to hold it
            pass
        there.send("ready")
        there.recv()
        with pytest.raises(SchemaError):
            storage.advance(Write(TensorDict({"y": torch.zeros(2, 5)}, [2])))
        storage.advance(Write(TensorDict({"x": torch.ones(2, 3)}, [2])))

    process = mp.get_context("fork").Process(target=write)
    process.start()
    here.recv()
    storage.reserve(TensorDict({"x": torch.zeros(3)}, []))
    here.send("go on")
    process.join(60)
    assert process.exitcode == 0
    assert storage["x"].tolist() == [[1.0] * 3] * 2


FACTORS = torch.arange(1, 20)


def numbered(worker: int, first: int, count: int) -> TensorDict:
    """Return rows of a worker whose entries all follow from their number."""
    x = worker * 1_000_000 + torch.arange(first, first + count)
    return TensorDict(
        {
            "x": x,
            "state": x[:, None] * FACTORS,
            "next": {"state": (x[:, None] + 1) * FACTORS},
        },
        [count],
    )


def size_of(serial: int) -> int:
    return 1 + serial % 37


def write_for_ever(rb: ReplayBuffer, worker: int, told: Any) -> None:
    torch.set_num_threads(1)
    while True:
        count = size_of(told[worker])
        data = numbered(worker, told[worker], count)
        rb.add(data[0]) if count == 1 else rb.extend(data)
        told[worker] += count


def check_rows(data: TensorDict) -> TensorDict:
    assert (data["state"] == data["x"][:, None] * FACTORS).all()
    assert (data["next", "state"] == (data["x"][:, None] + 1) * FACTORS).all()
    return data


@pytest.mark.parametrize(
    ("sampler", "share_next"), [("proportional", False), ("rank", True)]
)
def test_workers_killed_at_random_leave_no_torn_lost_or_repeated_row(
    sampler, share_next
):
    storage = PackedStorage(5_000, shared=True, share_next=share_next)
    rb = ReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](5_000), batch_size=256)
    rb.extend(numbered(20, 0, 256))
    told, running, chance = RawArray("q", 20), {}, random.Random(0)
    for worker in range(6):
        running[worker] = mp.get_context("fork").Process(
            target=write_for_ever, args=(rb, worker, told), daemon=True
        )
        running[worker].start()
        until = time.monotonic() + chance.uniform(0.02, 0.15)
        while time.monotonic() < until or not told[worker]:
            batch = check_rows(rb.sample())
            rb.update_tensordict_priority(batch.set("td_error", torch.rand(256)))
        if worker > 2:  # three at a time
            running.pop(chance.choice([*running])).kill()
        stored = check_rows(rb.chronological())
        for each in (stored["x"] // 1_000_000).unique().tolist():
            assert (stored["x"][stored["x"] // 1_000_000 == each].diff() == 1).all()
    for process in running.values():
        process.kill()
        process.join(60)
    stored = rb.chronological()["x"]
    for worker in set((stored // 1_000_000).tolist()) - {20}:
        last = int(stored[stored // 1_000_000 == worker].max()) % 1_000_000 + 1
        assert last - told[worker] in (0, size_of(told[worker]))
    # the last write that was killed leaves a gap
    assert 5_000 - 37 <= len(stored) <= 5_000 < rb.write_count
    check_priorities(rb)
    if share_next:
        rb.storage.rows.entries.check(rb.storage.ring.serials)


def test_priorities_that_are_not_shared_cannot_be_sent():
    process = mp.get_context("spawn").Process(
        target=len, args=(ProportionalSampler(10),)
    )
    with pytest.raises(RuntimeError, match=r"Share the buffer first: rb.share\(\)"):
        process.start()


def points(count: int) -> TensorDict:
    return TensorDict({"x": torch.rand(count, 3)}, [count])


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_the_first_write_of_a_child_warns_if_the_buffer_is_not_shared() -> None:
    def write_twice(rb: ReplayBuffer) -> None:
        with pytest.warns(
            UserWarning,
            match=r"forked from .* not shared: .* Call rb.share\(\) before forking",
        ):
            rb.extend(points(3))
        warnings.simplefilter("error")
        rb.extend(points(3))

    def write_to_a_copy(rb: ReplayBuffer) -> None:
        copy.deepcopy(rb).extend(points(3))

    for act, shared in (
        (write_twice, False),
        (write_to_a_copy, False),
        (lambda rb: rb.extend(points(3)), True),
    ):
        rb = ReplayBuffer(storage=PackedStorage(100), batch_size=8, shared=shared)
        for _ in range(3):
            rb.extend(points(3))  # bound
        child = mp.get_context("fork").Process(target=act, args=(rb,))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert len(rb) == 9 + 3 * shared


def use_all(rb: ReplayBuffer) -> None:
    batch = rb.sample()
    rb.extend(points(3))
    rb.update_tensordict_priority(batch.set("td_error", torch.rand(8)))


def fork_beside(
    hold: Callable[[Any], AbstractContextManager[Any]], shared: bool
) -> None:
    """Fork while another thread holds a lock, and use the buffer in both processes."""
    os.setsid()  # the test kills this process and its child together
    torch.set_num_threads(1)
    rb = ReplayBuffer(
        storage=PackedStorage(100), sampler=RankSampler(100), batch_size=8
    )
    rb.extend(points(20))
    use_all(rb)
    if shared:
        rb.share()
    began = threading.Event()

    def work() -> None:
        with hold(rb):
            began.set()
            time.sleep(0.5)

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    child = mp.get_context("fork").Process(target=use_all, args=(rb,))
    child.start()
    use_all(rb)
    child.join(20)
    thread.join()
    if child.is_alive():
        child.kill()
    os._exit(0 if child.exitcode == 0 else 1)


@contextmanager
def inside_a_draw(rb: Any) -> Iterator[None]:
    with rb.storage.lock, rb.sampler.rule.table.lock:
        yield


HOLDS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "numba's compiler": lambda rb: global_compiler_lock,
    "the rows": lambda rb: rb.storage.lock,
    "the ranks": inside_a_draw,
}


@pytest.mark.filterwarnings(
    "ignore:.*use of fork:DeprecationWarning", "ignore:this process was forked"
)
@pytest.mark.parametrize(
    ("what", "shared"),
    [("numba's compiler", False), ("the rows", True), ("the ranks", True)],
)
def test_a_fork_beside_a_thread_that_holds_a_lock_stops_no_process(
    what: str, shared: bool
) -> None:
    process = mp.get_context("fork").Process(
        target=fork_beside, args=(HOLDS[what], shared)
    )
    process.start()
    process.join(30)
    ended = process.exitcode
    if ended is None:
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    assert ended == 0, (
        "a process waits for ever" if ended is None else f"exit status {ended}"
    )


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


def work_of_child(rbs: list[Any], expected: list[list[float]], told: Any) -> None:
    """Write and update in another process, which first looks at what is there."""
    torch.set_num_threads(1)
    for number, (rb, known) in enumerate(zip(rbs, expected, strict=True)):
        before = len(rb)
        seen = before == len(known)
        if before and priorities(rb) is not None:
            seen = seen and priorities(rb) == known
        rb.extend(flagged_rows(before, MORE))
        # the n-step wrapper is drawn from: it notes episodes here, too
        seen = seen and set(rb.sample()["x"].tolist()) <= set(range(before + MORE))
        if priorities(rb) is not None:
            td_error = torch.arange(1.0, 1 + len(rb)).flip(0)
            rb.update_priority(torch.arange(len(rb)), td_error)
        told[number] = seen


def begin(rb: Any) -> list[float]:
    """Write rows with priorities, and return the priorities."""
    rb.extend(flagged_rows(0, FIRST))
    if priorities(rb) is None:
        return [1.0] * FIRST
    expected = [2.0, *range(1, FIRST)]
    rb.update_priority(torch.arange(FIRST), torch.tensor(expected))
    return expected


def check_shared(
    place: str, way: str, samplers: list[str], folder: Path, *, method: str, first: str
) -> None:
    rbs = [made(place, way, sampler, folder / sampler) for sampler in samplers]
    assert all(rb.storage.shared for rb in rbs)
    expected: list[list[float]] = [[] for _ in rbs]
    if first == "parent":
        expected = [begin(rb) for rb in rbs]
    context: Any = mp.get_context(method)
    told = context.RawArray("b", len(rbs))
    process = context.Process(target=work_of_child, args=(rbs, expected, told))
    process.start()
    process.join(180)
    assert process.exitcode == 0
    assert all(told), "the other process did not see what was here"
    for rb, known in zip(rbs, expected, strict=True):
        total = len(known) + MORE
        assert rb.storage[:]["x"].tolist() == [*range(total)]
        rb.extend(flagged_rows(total, 2))
        assert set(rb.sample()["x"].tolist()) >= {*range(total)} - {total - 1}
        if priorities(rb) is not None:
            # new rows have the largest priority that any process has given
            assert priorities(rb) == [*range(total, 0, -1), total, total]
        rb.storage.check()
        if isinstance(rb, ReplayBuffer):
            rb.close()


FAST = [
    (place, "shared=True", "fork", first, sampler)
    for place, first, sampler in product(
        PLACES, ("child", "parent"), ("proportional", "rank")
    )
]
FAST += [("file", way, "fork", "child", "n-step") for way in WAYS[1:]]
FAST += [
    ("reopened file", "TorchRL's buffer", "fork", "parent", "proportional"),
    ("RAM", "storage.share_memory_()", "fork", "parent", "uniform"),
    ("RAM", "storage.share_memory_()", "fork", "parent", "rank"),
]
MATRIX = [
    case
    for case in product(PLACES, WAYS, ("fork",), ("child", "parent"), KINDS)
    if case not in FAST
]


@pytest.mark.parametrize(
    ("place", "way", "method", "first", "sampler"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in MATRIX)],
)
def test_what_one_process_writes_and_learns_the_others_have(
    place: str, way: str, method: str, first: str, sampler: str, tmp_path: Path
) -> None:
    check_shared(place, way, [sampler], tmp_path, method=method, first=first)


@pytest.mark.slow  # each process imports everything
@pytest.mark.parametrize(
    ("place", "way", "first"),
    [
        (place, way, first)
        for first, place, ways in [
            ("child", "RAM", WAYS[::2]),
            ("parent", "file", WAYS[1::2]),
            ("child", "reopened file", WAYS[::2]),
        ]
        for way in ways
    ],
)
def test_what_a_spawned_process_writes_and_learns_the_others_have(
    place: str, way: str, first: str, tmp_path: Path
) -> None:
    check_shared(place, way, [*KINDS], tmp_path, method="spawn", first=first)


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
    rb.extend(flagged_rows(0, FIRST))
    rb.sample()
    if sampler != "uniform":
        rb.update_priority(torch.arange(FIRST), torch.arange(1.0, 1 + FIRST))
    return rb


def check_goes_on(rb: Any) -> None:
    """Write, draw and check; share again, and let another process write."""
    known = priorities(rb)
    assert rb.storage[:]["x"].tolist() == [*range(FIRST)]
    assert known is None or known == [*range(1, 1 + FIRST)]
    rb.extend(flagged_rows(FIRST, 3))
    junk = [torch.zeros(300) for _ in range(30)]  # takes memory that was freed
    assert rb.storage.shared or rb.share() is rb
    assert rb.share() is rb

    def write() -> None:
        rb.extend(flagged_rows(FIRST + 3, 3))
        rb.sample()
        if known is not None:
            rb.update_priority(torch.tensor([0]), torch.tensor([50.0]))

    assert forked(write) == 0
    rb.extend(flagged_rows(FIRST + 6, 1))
    total = FIRST + 7
    assert rb.storage[:]["x"].tolist() == [*range(total)]
    assert (rb.write_count, rb.flow.report()["inserts"]) == (total, total)
    if known is not None:
        own = [50, *range(2, FIRST + 1), *[FIRST] * 6, 50]
        assert priorities(rb) == own
        getattr(rb.sampler, "innermost", rb.sampler).rule.check()
    assert {*rb.sample()["x"].tolist()} <= {*range(total)}
    # that of `unshared`, of the other process, and the last one
    assert rb.flow.report()["samples"] == 3 * 400
    rb.storage.check()
    rb.close()
    del junk


CALLS: dict[str, Callable[[Any], object]] = {
    "rb.share()": lambda rb: rb.share(),
    "storage.share_memory_()": lambda rb: rb.storage.share_memory_(),
    "sampler.share_memory_()": lambda rb: rb.sampler.share_memory_(),
}


@pytest.fixture
def handler() -> Iterator[Any]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


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
    call: str,
    place: str,
    sampler: str,
    dedup: bool,
    every: int,
    tmp_path: Path,
    handler: Any,
) -> None:
    # a sampler alone is shared in few lines
    step = max(1, every // 20) if call.startswith("sampler") else every
    for line in count(5, step):
        rb, done = unshared(place, sampler, tmp_path / str(line), dedup), False
        with stopped(line, signal.SIGINT) as stopper:
            CALLS[call](rb)
            done = True
        assert done == (stopper.left > 0), line
        assert signal.getsignal(signal.SIGINT) is handler
        check_goes_on(rb)
        if done:
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
    told = RawArray("q", 2)

    def work() -> None:
        for spare in count(0, step):
            rb = unshared(place, "proportional", tmp_path / str(spare))
            with open(os.devnull) as probe:
                lowest = probe.fileno()
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, limits[1]))
                with suppress(OSError, RuntimeError):
                    rb.share()
                    told[0] = 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            check_goes_on(rb)
            if told[0]:
                break
            told[1] += 1

    assert forked(work) == 0
    assert told[0]
    assert told[1] > 2, "no call failed in between"


# -- the members of the kind that are not a matter of priorities


def test_a_second_buffer_and_a_copy_of_shared_rows_are_shared() -> None:
    first = ReplayBuffer(
        storage=PackedStorage(CAPACITY), sampler=KINDS["rank"](), batch_size=4
    )
    second = ReplayBuffer(
        storage=first.storage, sampler=KINDS["proportional"](), batch_size=4
    )
    first.extend(flagged_rows(0, 5))
    first.share()
    third = ReplayBuffer(
        storage=first.storage, sampler=KINDS["proportional"](), batch_size=4
    )
    copied = copy.deepcopy(first)
    td_error = torch.arange(1.0, 9)

    def write() -> None:
        first.extend(flagged_rows(5, 3))
        copied.extend(flagged_rows(5, 3))
        for rb in (first, second, third, copied):
            rb.update_priority(torch.arange(8), td_error)

    assert forked(write) == 0
    for rb in (first, second, third, copied):
        assert len(rb) == 8
        assert priorities(rb) == td_error.tolist()
        rb.sample()
    copied.extend(flagged_rows(8, 1))
    assert (len(first), len(copied)) == (8, 9)


def test_a_shared_file_is_written_from_a_copy_only_in_memory(tmp_path: Path) -> None:
    storage = PackedStorage(CAPACITY, scratch_dir=tmp_path, shared=True)
    storage.set(range(3), flagged_rows(0, 3))
    assert "mapped file, shared" in repr(storage)
    copied = copy.deepcopy(storage)
    assert copied.shared
    assert "shared memory" in repr(copied)
    assert forked(lambda: copied.set(range(3, 5), flagged_rows(3, 2))) == 0
    assert (len(storage), len(copied)) == (3, 5)


@pytest.mark.parametrize("first", ["child", "parent"])
@pytest.mark.parametrize(
    ("place", "written"), [("RAM", 0), ("RAM", 12), ("reopened file", 12)]
)
def test_all_processes_find_episodes_by_one_pair_of_keys(
    place: str, written: int, first: str, tmp_path: Path
) -> None:
    """Two processes that have been forked before: one names the keys, the other one
    goes on writing."""
    rb = made(place, "shared=True", "uniform", tmp_path / "rows")
    if written:
        rb.extend(flagged_rows(0, written))
    began, named, wrote = (mp.get_context("fork").Event() for _ in range(3))
    told = RawArray("b", 2)

    def name_keys() -> None:
        wrapper = NStepSampler(UniformSampler(), 2, 0.9, done_key=("next", "ended"))
        ReplayBuffer(storage=rb.storage, sampler=wrapper, batch_size=4)

    def write() -> None:
        rb.extend(flagged_rows(written, 3))
        rb.extend(flagged_rows(written + 3, 9))
        with pytest.raises(ValueError, match="in all processes that share it"):
            TrajectoryIndex(rb.storage)
        with pytest.raises(ValueError, match=r"by done_key=\('next', 'ended'\)"):
            NStepSampler(UniformSampler(), 2, 0.9).watch(rb.storage)

    def child() -> None:
        began.set()
        if first == "child":
            name_keys()
            told[0] = 1
            named.set()
            assert wrote.wait(60)
        else:
            assert named.wait(60)
            write()
            told[0] = 1
            wrote.set()
        index = TrajectoryIndex(rb.storage, done_key=("next", "ended"))
        step = torch.arange(written + 12)
        told[1] = torch.equal(index.steps_back(step), step % 5)

    process = mp.get_context("fork").Process(target=child)
    process.start()
    assert began.wait(60)
    if first == "child":
        assert named.wait(60)
        write()
        wrote.set()
    else:
        name_keys()
        named.set()
        assert wrote.wait(60)
    process.join(60)
    assert process.exitcode == 0
    assert [*told] == [1, 1]
    index = TrajectoryIndex(rb.storage, done_key=("next", "ended"))
    step = torch.arange(written + 12)
    assert torch.equal(index.steps_back(step), step % 5)
    rb.storage.check()


def test_names_of_keys_that_are_too_long_to_share_change_nothing() -> None:
    storage = PackedStorage(CAPACITY, shared=True)
    with pytest.raises(ValueError, match="at most 4,096 fit: store flags"):
        TrajectoryIndex(storage, done_key=("next", "x" * 5_000))
    TrajectoryIndex(storage)


def test_an_interrupted_call_leaves_the_lock_to_others(handler: Any) -> None:
    """At the lines at which a process takes or releases the lock."""
    storage = PackedStorage(CAPACITY, shared=True)
    storage.set(range(2), flagged_rows(0, 2))

    def take() -> None:
        with storage.lock, storage.lock:
            pass

    for line in count(1):
        done = False
        with stopped(line, signal.SIGINT) as stopper:
            take()
            done = True
        assert done == (stopper.left > 0), line
        assert signal.getsignal(signal.SIGINT) is handler
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(storage.lock.threads.acquire, False).result()
            pool.submit(storage.lock.threads.release).result()
        if not line % 3:
            assert forked(take) == 0
        if done:
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
