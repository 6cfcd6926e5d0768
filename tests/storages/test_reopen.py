"""A process that writes to ``PackedStorage(reopen=True)`` is killed (SIGKILL); another
one continues its rows."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    GymnasiumRecorder,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    SchemaError,
    TrajectoryIndex,
    UniformSampler,
)
from rlbuf_td.kernels.serials import block_size
from rlbuf_td.storages.indexing import written_rows
from rlbuf_td.storages.memory import HEAD_FILE, PRIORITY_FILE
from rlbuf_td.storages.rows import Rows
from tests.backends import forced
from tests.storages.test_kill import die

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
CAPACITY, LANES = 240, 3
NEW = 1_000.0  # the magnitude of new rows, once a row had this TD error
SAMPLERS: dict[str, Callable[[], Any]] = {
    "proportional": partial(ProportionalSampler, CAPACITY),
    "rank": partial(RankSampler, CAPACITY),
}


def rows(number: torch.Tensor) -> TensorDict:
    """Return rows whose entries all follow from their number, with a done flag after
    each 7 rows."""
    data: dict[str, Any] = {
        "x": number,
        "payload": number[..., None] * 3 + torch.arange(40),
        "next": {"done": number[..., None] % 7 == 6},
    }
    data["next"]["reward"] = torch.ones(*number.shape, 1)
    return TensorDict(data, number.shape)


def are_whole(found: TensorDict) -> bool:
    return bool((found == rows(found["x"])).all())


def opened(folder: Path, lanes: int = 0, **kwargs: Any) -> PackedStorage:
    if lanes:
        kwargs |= {"ndim": 2, "lanes": lanes}
    return PackedStorage(CAPACITY, scratch_dir=folder, reopen=True, **kwargs)


def killed(work: Callable[[], object], after: float | None = None) -> None:
    """Do ``work`` in a child that is killed: by itself, or ``after`` seconds."""

    def child() -> None:
        torch.set_num_threads(1)
        work()

    process = mp.get_context("fork").Process(target=child)
    process.start()
    if after is not None:
        time.sleep(after)
        os.kill(process.pid or 0, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def last_numbers(storage: PackedStorage, lost: int = 0) -> list[int]:
    """Check all rows, and return the number of the last row of each lane (-1: none).

    A lane may lack the ``lost`` oldest rows.
    """
    if not len(storage):
        return [-1] * LANES ** (storage.ndim - 1)
    rb, found = ReplayBuffer(storage=storage), []
    count = storage.ring.count
    for lane in range(len(count)):
        if not count[lane]:
            found.append(-1)
            continue
        part = (
            rb.lane(lane).chronological() if storage.ndim == 2 else rb.chronological()
        )
        assert are_whole(part)
        assert (part["x"].diff() == 1).all()
        usual, steps = int(part["x"][-1]) + 1, storage.all_rows().steps
        assert len(part) in (min(steps, usual), min(steps - lost, usual))
        found.append(int(part["x"][-1]))
    return found


@pytest.fixture(autouse=True, scope="module")
def compiled(tmp_path_factory: Any) -> None:
    """Compile what the killed processes call, which inherit the machine code."""
    for name in SAMPLERS:
        for lanes in (0, LANES):
            rb = start(tmp_path_factory.mktemp("compiled"), lanes, name)
            for _ in range(4):
                write(rb, lanes, 3)
                batch = rb.sample()
                rb.update_tensordict_priority(
                    batch.set("td_error", own(batch["x"]).float())
                )


def write_and_die(
    folder: Path, first: int, count: int, lanes: int = 0, lane: int = 0
) -> None:
    rb = ReplayBuffer(storage=opened(folder, lanes))
    rb.extend(rows(torch.arange(first, first + count)), lanes=lane if lanes else None)
    die()


@pytest.mark.parametrize(
    "backends",
    [
        ("torch", "torch", "numba"),
        ("numba", "torch", "numba"),
        ("numba", "numba", "torch"),
    ],
)
def test_processes_without_numba_leave_episodes_and_priorities_to_others(
    tmp_path: Path, backends: Any
) -> None:
    for number, backend in enumerate(backends):
        with forced(backend):
            rb = ReplayBuffer(
                storage=opened(tmp_path),
                sampler=ProportionalSampler(CAPACITY),
                batch_size=2,
            )
            rb.extend(rows(torch.arange(3)))
            rb.update_priority(3 * number, 2.0 + number)
            whole, priorities = (
                TrajectoryIndex(rb.storage),
                rb.sampler.priority(torch.arange(0, 3 * number + 3, 3)),
            )
            assert priorities.tolist() == [2.0 + each for each in range(number + 1)]
            # looks up what no process before has looked up
            if number == len(backends) - 1:
                assert [each.tolist() for each in whole.whole(only_finished=False)] == [
                    [0, 3, 6],
                    [3, 3, 3],
                ]
            rb.close()


def test_a_living_owner_is_not_disturbed(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    ReplayBuffer(storage=storage).extend(rows(torch.arange(9)))
    with pytest.raises(RuntimeError, match=f"are open in process {os.getpid()}"):
        opened(tmp_path)
    said = RawArray("b", 1)

    def work() -> None:
        try:
            opened(tmp_path)
        except RuntimeError:
            said[0] = 1
        die()

    killed(work)
    assert said[0]
    assert last_numbers(storage) == [8]
    del storage
    # the same process opens the rows again
    assert last_numbers(opened(tmp_path)) == [8]


def test_other_arguments_are_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    killed(lambda: write_and_die(tmp_path, 0, 9))
    refused: list[tuple[str, dict[str, Any]]] = [
        ("have capacity 240, not 239", {"max_size": 239}),
        ("have ndim=1, not ndim=2", {"ndim": 2}),
        ("existsok=True replaces", {"existsok": True}),
        ("auto_cleanup=True deletes", {"auto_cleanup": True}),
        ("does not support deduplicated rows", {"share_next": True}),
        ("pass scratch_dir", {"scratch_dir": None}),
    ]
    for match, arguments in refused:
        with pytest.raises(ValueError, match=match):
            PackedStorage(
                **{
                    "max_size": CAPACITY,
                    "scratch_dir": tmp_path,
                    "reopen": True,
                    **arguments,
                }
            )
    with pytest.raises(ValueError, match="a ReservoirWriter cannot continue"):
        ReplayBuffer(storage=opened(tmp_path), writer=ReservoirWriter())
    storage = opened(tmp_path, shared_init=True)
    with pytest.raises(SchemaError, match="'y'"):
        ReplayBuffer(storage=storage).extend(TensorDict({"y": torch.zeros(2)}, [2]))
    assert last_numbers(storage) == [8]


def test_other_lanes_are_refused(tmp_path: Path) -> None:
    killed(lambda: write_and_die(tmp_path, 0, 9, LANES))
    with pytest.raises(ValueError, match="have lanes=3, not lanes=2"):
        opened(tmp_path, 2)
    assert last_numbers(opened(tmp_path, LANES)) == [8, -1, -1]


def test_rows_without_a_head_are_refused(tmp_path: Path) -> None:
    PackedStorage(CAPACITY, scratch_dir=tmp_path).set(range(9), rows(torch.arange(9)))
    content = (tmp_path / "rows.bin").read_bytes()
    with pytest.raises(FileExistsError, match=r"holds rows without head\.bin"):
        opened(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.bin"]
    assert (tmp_path / "rows.bin").read_bytes() == content


def change(file: Path, place: int, new: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[place : place + len(new)] = new
    file.write_bytes(content)


SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (lambda file: change(file, 0, b"xxxx"), "its header"),
    (lambda file: change(file, 0, bytes(24)), "its header"),
    (lambda file: change(file, 8, b"\x07"), "its header"),
    (lambda file: change(file, 24, b"\x01"), "checksum"),
    (lambda file: change(file, (1 << 16) + 5, b"#"), "checksum"),
    (
        lambda file: change(file, file.stat().st_size - 8 * block_size(1) + 9, b"\x10"),
        "do not fit",
    ),
    (lambda file: os.truncate(file, 100), "its header"),
    (lambda file: os.truncate(file, (1 << 16) + 5000), "too short"),
    (
        lambda file: os.truncate(file.with_name("rows.bin"), 100),
        r"rows\.bin has 100 bytes",
    ),
    (lambda file: file.with_name("rows.bin").unlink(), r"rows\.bin has 0 bytes"),
]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    killed(lambda: write_and_die(tmp_path / "rows", 0, 9))
    for number, (spoil, match) in enumerate(SPOILT):
        shutil.copytree(tmp_path / "rows", tmp_path / str(number))
        spoil(tmp_path / str(number) / HEAD_FILE)
        with pytest.raises(ValueError, match=match):
            opened(tmp_path / str(number))
    assert last_numbers(opened(tmp_path / "rows")) == [8]


@pytest.mark.slow
def test_processes_share_reopened_rows(tmp_path: Path) -> None:
    killed(lambda: write_and_die(tmp_path, 0, 9))
    rb = ReplayBuffer(storage=opened(tmp_path)).share()
    for context in ("fork", "spawn"):
        how: Any = mp.get_context(context)
        process = how.Process(target=extend_further, args=(rb,))
        process.start()
        process.join(120)
        assert process.exitcode == 0
    assert last_numbers(rb.storage) == [18]
    del rb
    assert last_numbers(opened(tmp_path)) == [18]


def extend_further(rb: ReplayBuffer) -> None:
    first = len(rb)
    rb.extend(rows(torch.arange(first, first + 5)))


def test_a_relative_folder_is_found_from_where_the_storage_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    rb = ReplayBuffer(
        storage=PackedStorage(9, scratch_dir="rows", reopen=True),
        sampler=ProportionalSampler(9),
    )
    cleaned = PackedStorage(9, scratch_dir="cleaned", auto_cleanup=True)
    monkeypatch.chdir("job")
    for storage in (rb, ReplayBuffer(storage=cleaned)):
        storage.extend(rows(torch.arange(5)))
    files = {"head.bin", "priorities.bin", "rows.bin"}
    assert {file.name for file in (tmp_path / "rows").iterdir()} <= files
    del cleaned, storage
    assert sorted(file.name for file in tmp_path.iterdir()) == ["job", "rows"]
    assert not any((tmp_path / "job").iterdir())


def test_a_closed_buffer_frees_its_folder(tmp_path: Path) -> None:
    with ReplayBuffer(
        storage=opened(tmp_path), sampler=ProportionalSampler(CAPACITY), batch_size=4
    ) as rb:
        for _ in range(2):
            rb.extend(rows(torch.arange(130)))
            rb.sample()
        with pytest.raises(RuntimeError, match=r"call close\(\) of the buffers"):
            opened(tmp_path)
    look_up = TrajectoryIndex(rb.storage).whole
    for use in (
        rb.sample,
        rb.state_dict,
        rb.chronological,
        look_up,
        lambda: rb.extend(rows(torch.arange(3))),
    ):
        with pytest.raises(RuntimeError, match="has been closed"):
            use()
    for written in (260, 263):
        with ReplayBuffer(storage=opened(tmp_path)) as rb:
            assert (len(rb), rb.write_count) == (CAPACITY, written)
            rb.extend(rows(torch.arange(3)))


def test_rows_of_an_environment_are_continued(tmp_path: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium")

    def run(name: str) -> int:
        env = gymnasium.make_vec(name, num_envs=2)
        with ReplayBuffer.from_env(env, 40, scratch_dir=tmp_path, reopen=True) as rb:
            recorder = GymnasiumRecorder(rb, env)
            recorder.reset(seed=0)
            recorder.step(env.action_space.sample())
            return len(rb)

    assert run("CartPole-v1") == 2
    with pytest.raises(
        SchemaError, match=r"'observation' is float32 of shape \(6,\) in the schema"
    ):
        run("Acrobot-v1")
    assert run("CartPole-v1") == 4


# -- priorities outlive the process, and never pass to another row


def buffer(folder: Path, lanes: int, name: str) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=opened(folder, lanes), sampler=SAMPLERS[name](), batch_size=16
    )
    rb._initialize()
    return rb


def own(number: torch.Tensor) -> torch.Tensor:
    """Return the TD error of a row, which no other row has."""
    return 1 + number.double() / 1024  # exact in float32


def magnitudes(rb: ReplayBuffer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of each row that was written, and its magnitude."""
    cells = written_rows(rb.storage)
    number = rb.storage["x"].reshape(-1)[cells]
    prioritized = rb._initialize().prioritized
    assert prioritized is not None
    return number, prioritized.rule.table.magnitude[cells].double()


def write(rb: ReplayBuffer, lanes: int, count: int) -> None:
    """Write the next rows, to a single lane at a time if there are lanes."""
    first = int(rb.storage["x"].max()) + 1 if len(rb.storage) else 0
    data = rows(torch.arange(first, first + count))
    if lanes:
        rb.extend(data, lanes=first % lanes)
    else:
        rb.extend(data)


def train(rb: ReplayBuffer, lanes: int) -> None:
    """Write and update for ever."""
    draw = np.random.default_rng(len(rb))
    while True:
        write(rb, lanes, int(draw.choice([1, 3, 20])))
        for _ in range(3):
            batch = rb.sample()
            rb.update_tensordict_priority(
                batch.set("td_error", own(batch["x"]).float())
            )


def start(folder: Path, lanes: int, name: str) -> ReplayBuffer:
    rb = buffer(folder, lanes, name)
    write(rb, lanes, 30)
    rb.update_priority(rb.sample()["index"][:1], torch.tensor([NEW]))
    return rb


def begin_and_die(folder: Path, lanes: int, name: str) -> None:
    start(folder, lanes, name)
    die()


def kill_learners(folder: Path, lanes: int, name: str, kills: int) -> None:
    killed(partial(begin_and_die, folder, lanes, name))
    draw, kept = np.random.default_rng(kills), 0
    for _ in range(kills):
        killed(
            lambda: train(buffer(folder, lanes, name), lanes),
            float(draw.uniform(0.02, 0.15)),
        )
        with warnings.catch_warnings():
            # of the killed write
            warnings.filterwarnings(
                "ignore", ".* rows were reopened without a priority"
            )
            rb = buffer(folder, lanes, name)
        assert lanes or last_numbers(rb.storage)[0] >= 29
        assert all(
            are_whole(rb.lane(lane).chronological())
            for lane in range(lanes)
            if len(rb.lane(lane))
        )
        number, magnitude = magnitudes(rb)
        # the first 30 came before that TD error
        is_new = (magnitude == NEW) | ((magnitude == 1) & (number < 30))
        assert ((magnitude == own(number)) | is_new).all()
        kept += int((~is_new).sum())
        rb.sample()
        del rb
    assert kept > 10 * kills


@pytest.mark.slow
@pytest.mark.parametrize(("lanes", "name"), [(0, "rank"), (LANES, "proportional")])
def test_killed_often_while_training(tmp_path: Path, lanes: int, name: str) -> None:
    kill_learners(tmp_path, lanes, name, int(os.environ.get("RLBUF_TD_KILLS", "10")))


def test_rows_written_without_priorities_are_new(tmp_path: Path) -> None:
    def work() -> None:
        rb = start(tmp_path, 0, "proportional")
        write(rb, 0, CAPACITY)
        index = torch.arange(CAPACITY)
        rb.update_priority(index, own(rb.storage["x"]).float())
        rb.update_priority(index[:1], torch.tensor([NEW]))
        die()

    killed(work)
    rb = ReplayBuffer(storage=opened(tmp_path), sampler=UniformSampler(), batch_size=4)
    write(rb, 0, 100)
    del rb
    with pytest.warns(UserWarning, match="reopened without a priority"):
        rb = buffer(tmp_path, 0, "rank")  # another law continues the same TD errors
    number, magnitude = magnitudes(rb)
    is_new = number > number.max() - 100
    assert (magnitude[is_new] == NEW).all()
    assert (magnitude[~is_new] == own(number[~is_new])).sum() >= (~is_new).sum() - 1
    del rb
    assert (magnitudes(buffer(tmp_path, 0, "rank"))[1] == magnitude).all()


def spoil_header(file: Path) -> None:
    file.write_bytes(b"\x07" + file.read_bytes()[1:])


def fill_with_nan(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(
        content[: 1 << 16] + np.full((len(content) - (1 << 16)) // 8, np.nan).tobytes()
    )


def test_without_a_readable_file_all_rows_are_new(tmp_path: Path) -> None:
    killed(partial(begin_and_die, tmp_path / "rows", 0, "proportional"))
    spoils: list[Callable[[Path], object]] = [Path.unlink, spoil_header, fill_with_nan]
    for spoil in [*spoils, lambda file: os.truncate(file, 70_000)]:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "rows", tmp_path / "copy")
        spoil(tmp_path / "copy" / PRIORITY_FILE)
        with pytest.warns(UserWarning, match="reopened without a priority"):
            rb = buffer(tmp_path / "copy", 0, "proportional")
        number, magnitude = magnitudes(rb)
        assert len(number) == 30
        assert (magnitude == magnitude[0]).all()
        rb.sample()
        rb.close()


def test_updates_of_other_processes_are_kept(tmp_path: Path) -> None:
    rb = start(tmp_path, 0, "proportional").share()
    process = mp.get_context("fork").Process(target=update_all, args=(rb,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    del rb
    number, magnitude = magnitudes(buffer(tmp_path, 0, "proportional"))
    assert (magnitude == own(number)).all()


def update_all(rb: ReplayBuffer) -> None:
    rb.update_priority(torch.arange(len(rb)), own(rb.storage["x"][: len(rb)]).float())


def test_priorities_of_a_sampler_that_is_loaded_alone_are_kept(tmp_path: Path) -> None:
    rb = start(tmp_path, 0, "proportional")
    state = rb.sampler.state_dict()
    count = len(rb)
    state["magnitude"][:count] = own(rb.storage["x"][:count]).float()
    rb.sampler.load_state_dict(state)
    del rb
    number, magnitude = magnitudes(buffer(tmp_path, 0, "proportional"))
    assert (magnitude == own(number)).all()


def test_a_killed_write_of_as_many_rows_as_fit_leaves_none(tmp_path: Path) -> None:
    def work() -> None:
        with forced("torch"):
            rb = ReplayBuffer(storage=opened(tmp_path))
            rb.extend(rows(torch.arange(100)))
            Rows.append_ = die
            rb.extend(rows(torch.arange(100, 100 + CAPACITY)))

    killed(work)
    rb = ReplayBuffer(storage=opened(tmp_path))
    assert len(rb) == 0
    rb.extend(rows(torch.arange(3)))
    assert rb.chronological()["x"].tolist() == [0, 1, 2]


def test_updates_after_a_load_are_kept_without_a_write(tmp_path: Path) -> None:
    rb = start(tmp_path / "rows", 0, "proportional")
    rb.dumps(tmp_path / "dump")
    del rb

    def work() -> None:
        rb = buffer(tmp_path / "rows", 0, "proportional")
        rb.loads(tmp_path / "dump")
        rb.update_priority(torch.arange(30), own(rb.storage["x"][:30]).float())
        die()

    killed(work)
    number, magnitude = magnitudes(buffer(tmp_path / "rows", 0, "proportional"))
    assert (magnitude == own(number)).all()


def test_a_forked_process_needs_a_shared_buffer(tmp_path: Path) -> None:
    rb = start(tmp_path, 0, "proportional")
    empty = ReplayBuffer(storage=opened(tmp_path / "empty"))
    refusals = [
        (lambda: write(rb, 0, 3), r"share the buffer before forking \(rb.share\(\)\)"),
        (lambda: update_all(rb), r"call rb.share\(\) before a fork"),
        (lambda: write(empty, 0, 3), "share the buffer before forking"),
    ]
    said = RawArray("b", len(refusals))

    def work() -> None:
        for place, (call, words) in enumerate(refusals):
            with pytest.raises(RuntimeError, match=words):
                call()
            said[place] = 1
        die()

    killed(work)
    assert list(said) == [1, 1, 1]
    assert not (tmp_path / "empty" / "rows.bin").exists()


def test_parts_of_reopened_rows_cannot_be_replaced(tmp_path: Path) -> None:
    rb = start(tmp_path, 0, "proportional")
    for replace in (
        lambda: rb.set_sampler(UniformSampler()),
        lambda: rb.set_writer(RingWriter()),
        lambda: rb.set_storage(PackedStorage(CAPACITY)),
    ):
        with pytest.raises(RuntimeError, match="of a reopened buffer: its folder"):
            replace()
    write(rb, 0, 3)


@pytest.mark.parametrize("shared", [False, True])
def test_the_next_process_may_find_episodes_by_other_keys(
    shared: bool, tmp_path: Path
) -> None:
    step = torch.arange(12)
    data = TensorDict(
        {
            "x": step,
            "next": {
                "done": (step % 3 == 2)[:, None],
                "ended": (step % 5 == 4)[:, None],
            },
        },
        [12],
    )
    expected = {"done": step % 3, "ended": step % 5}
    for number, name in enumerate(("ended", "done", "ended")):
        storage = PackedStorage(12, scratch_dir=tmp_path, reopen=True, shared=shared)
        with ReplayBuffer(storage=storage) as rb:
            if not number:
                rb.extend(data)
            index = TrajectoryIndex(storage, done_key=("next", name))
            assert torch.equal(index.steps_back(step), expected[name])
            with pytest.raises(ValueError, match="in all processes that share it"):
                TrajectoryIndex(storage, done_key=("next", "other"))


def second(storage: PackedStorage, sampler: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    rb.sample()
    return rb


def test_a_buffer_that_was_shut_down_leaves_its_priorities_to_another(
    tmp_path: Path,
) -> None:
    rb = start(tmp_path, 0, "proportional")
    rb.shutdown()
    other = second(rb.storage, SAMPLERS["proportional"]())
    other.update_priority(torch.arange(30), own(rb.storage["x"][:30]).float())
    del rb, other
    number, magnitude = magnitudes(buffer(tmp_path, 0, "proportional"))
    assert (magnitude == own(number)).all()


@pytest.mark.parametrize(
    ("name", "is_shared"), [("proportional", True), ("rank", False)]
)
def test_a_second_buffer_that_would_write_to_the_file_of_priorities_is_refused(
    tmp_path: Path, name: str, is_shared: bool
) -> None:
    rb = start(tmp_path, 0, name)
    if is_shared:
        rb.share()
    before, attached = magnitudes(rb), len(rb.storage._attached_entities)
    apart = ReplayBuffer(
        storage=PackedStorage(CAPACITY),
        sampler=ProportionalSampler(CAPACITY),
        batch_size=4,
    )
    apart.extend(rows(torch.arange(9)))
    plain = second(rb.storage, UniformSampler())
    own_sampler, wrapped = SAMPLERS[name](), NStepSampler(SAMPLERS[name](), 3, 0.9)
    for attempt in (
        partial(second, rb.storage, own_sampler),
        partial(second, rb.storage, wrapped),
        partial(apart.set_storage, rb.storage),
    ):
        with pytest.raises(
            ValueError,
            match=r"use one buffer, or a sampler without priorities here, or call shutdown",
        ):
            attempt()
    assert len(rb.storage._attached_entities) == attached + 1
    assert len(apart) == 9
    for found, expected in zip(magnitudes(rb), before, strict=True):
        assert torch.equal(found, expected)
    rb.update_priority(torch.arange(30), own(rb.storage["x"][:30]).float())
    apart.extend(rows(torch.arange(9))), apart.sample(), plain.sample()
    write(plain, 0, 3)
    write(rb, 0, 4)
    there, magnitude = magnitudes(rb)
    del rb, plain, apart, before, attempt
    number, again = magnitudes(buffer(tmp_path, 0, name))
    assert torch.equal(number, there)
    assert torch.equal(again, magnitude)


def test_the_largest_magnitude_goes_with_the_rows_that_had_it(tmp_path: Path) -> None:
    def opened(sampler: Any) -> Any:
        storage = PackedStorage(CAPACITY, scratch_dir=tmp_path, reopen=True)
        return ReplayBuffer(storage=storage, sampler=sampler)

    data = TensorDict({"x": torch.arange(CAPACITY)}, [CAPACITY])
    with opened(ProportionalSampler(CAPACITY)) as rb:
        rb.extend(data)
        rb.update_priority(torch.arange(CAPACITY), 50.0)
    with opened(UniformSampler()) as rb:
        rb.extend(data)
    with pytest.warns(UserWarning, match="were reopened without a priority"):
        rb = opened(ProportionalSampler(CAPACITY))
    assert (rb.sampler.priority(torch.arange(CAPACITY)) == 1.0).all()
    assert rb.sampler.default_priority == 1.0
