"""What a process leaves in the folder of ``PackedStorage(reopen=True)``, another one
continues; also after a kill (SIGKILL)."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

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
from rlbuf_td.storages.memory import HEAD_FILE, PRIORITY_FILE
from rlbuf_td.storages.rows import Rows
from tests.backends import forced
from tests.catalogue import numbered_rows
from tests.storages.test_kill import check_priorities, die, killed
from tests.test_lockstep import forked

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
CAPACITY = 240
NEW = 1_000.0  # the magnitude of new rows, once a row had this TD error
SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": UniformSampler,
    "proportional": lambda: ProportionalSampler(CAPACITY),
    "rank": lambda: RankSampler(CAPACITY),
}


def opened(folder: Path, sampler: str = "uniform", **options: Any) -> Any:
    storage = PackedStorage(CAPACITY, scratch_dir=folder, reopen=True, **options)
    return ReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), batch_size=16)


def started(folder: Path, sampler: str = "proportional") -> Any:
    """Return a buffer with 30 rows, of which one has had the largest TD error."""
    rb = opened(folder, sampler)
    rb.extend(numbered_rows(30))
    rb.update_priority(torch.tensor([7]), torch.tensor([NEW]))
    return rb


def numbers(folder: Path, **options: Any) -> list[int]:
    """Return the numbers of the rows that a process has left, the oldest first."""
    with opened(folder, **options) as rb:
        return rb.chronological()["x"].tolist()


def own(number: torch.Tensor) -> torch.Tensor:
    """Return the TD error of a row, which no other row has."""
    return 1 + number.double() / 1024  # exact in float32


def update_all(rb: Any) -> None:
    rb.update_priority(torch.arange(len(rb)), own(rb.storage["x"]).float())


def magnitudes(rb: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of each row, and its magnitude."""
    number = rb.storage["x"]
    return number, rb.sampler.priority(torch.arange(len(number)))


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
        with forced(backend), opened(tmp_path, "proportional") as rb:
            rb.extend(numbered_rows(3))
            rb.update_priority(3 * number, 2.0 + number)
            priorities = rb.sampler.priority(torch.arange(0, 3 * number + 3, 3))
            assert priorities.tolist() == [2.0 + each for each in range(number + 1)]
            if number == 2:  # looks up what no process before has looked up
                episodes = TrajectoryIndex(rb.storage).whole(only_finished=False)
                assert [part.tolist() for part in episodes] == [[0, 3, 6], [3, 3, 3]]


# -- what cannot be opened


def test_a_living_owner_is_not_disturbed(tmp_path: Path) -> None:
    rb = opened(tmp_path)
    rb.extend(numbered_rows(9))

    def refuse() -> None:
        with pytest.raises(RuntimeError, match=f"are open in process {os.getppid()}"):
            opened(tmp_path)

    assert forked(refuse) == 0
    words = rf"are open in process {os.getpid()}.*call close\(\) of the buffers"
    with pytest.raises(RuntimeError, match=words):
        opened(tmp_path)
    assert len(rb) == 9
    del rb
    assert numbers(tmp_path) == [*range(9)]


@pytest.mark.parametrize("lanes", [None, 3])
def test_other_arguments_are_refused_and_nothing_is_lost(
    lanes: int | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"ndim": 2, "lanes": lanes} if lanes else {}
    with opened(tmp_path, **options) as rb:
        rb.extend(numbered_rows(9), lanes=lanes and 0)
        whole = rb[:]
    refused: list[tuple[str, dict[str, Any]]] = [
        ("have lanes=3, not lanes=2", {"lanes": 2})
        if lanes
        else ("have ndim=1, not ndim=2", {"ndim": 2}),
        ("have capacity 240, not 237", {"max_size": 237}),
        ("existsok=True replaces", {"existsok": True}),
        ("auto_cleanup=True deletes", {"auto_cleanup": True}),
        ("does not support deduplicated rows", {"share_next": True}),
        ("pass scratch_dir", {"scratch_dir": None}),
    ]
    given = {"max_size": CAPACITY, "scratch_dir": tmp_path, "reopen": True} | options
    for match, arguments in refused:
        with pytest.raises(ValueError, match=match):
            PackedStorage(**given | arguments)
    with pytest.raises(ValueError, match="a ReservoirWriter cannot continue"):
        ReplayBuffer(storage=PackedStorage(**given), writer=ReservoirWriter())
    with opened(tmp_path, **options) as rb:
        with pytest.raises(SchemaError, match="'x' is missing"):
            rb.extend(numbered_rows(2).exclude("x"), lanes=lanes and 0)
        assert (rb[:] == whole).all()


def test_rows_without_a_head_are_refused(tmp_path: Path) -> None:
    PackedStorage(CAPACITY, scratch_dir=tmp_path).set(range(9), numbered_rows(9))
    content = (tmp_path / "rows.bin").read_bytes()
    with pytest.raises(FileExistsError, match=r"holds rows without head\.bin"):
        opened(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.bin"]
    assert (tmp_path / "rows.bin").read_bytes() == content


def change(file: Path, place: int, new: bytes) -> None:
    content = bytearray(file.read_bytes())
    place %= len(content)
    content[place : place + len(new)] = new
    file.write_bytes(content)


SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (lambda file: change(file, 0, b"xxxx"), "its header"),
    (lambda file: change(file, 0, bytes(24)), "its header"),
    (lambda file: change(file, 8, b"\x07"), "its header"),
    (lambda file: change(file, 24, b"\x01"), "checksum"),
    (lambda file: change(file, (1 << 16) + 5, b"#"), "checksum"),
    (lambda file: change(file, 9 - 8 * block_size(1), b"\x10"), "do not fit"),
    (lambda file: os.truncate(file, 100), "its header"),
    (lambda file: os.truncate(file, (1 << 16) + 5000), "too short"),
    (lambda file: os.truncate(file.with_name("rows.bin"), 100), r"rows\.bin has 100 b"),
    (lambda file: file.with_name("rows.bin").unlink(), r"rows\.bin has 0 bytes"),
]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "rows") as rb:
        rb.extend(numbered_rows(9))
    for number, (spoil, match) in enumerate(SPOILT):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "rows", folder)
        spoil(folder / HEAD_FILE)
        with pytest.raises(ValueError, match=match):
            opened(folder)


def test_a_relative_folder_is_found_from_where_the_storage_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    kept = opened(Path("rows"), "proportional")
    cleaned = PackedStorage(9, scratch_dir="cleaned", auto_cleanup=True)
    monkeypatch.chdir("job")
    kept.extend(numbered_rows(5))
    cleaned.set(range(5), numbered_rows(5))
    files = {file.name for file in (tmp_path / "rows").iterdir()}
    assert files == {"head.bin", "priorities.bin", "rows.bin"}
    del cleaned
    assert sorted(file.name for file in tmp_path.iterdir()) == ["job", "rows"]
    assert not any((tmp_path / "job").iterdir())


def test_a_closed_buffer_frees_its_folder(tmp_path: Path) -> None:
    with opened(tmp_path, "proportional") as rb:
        for first in (0, 130):  # the calls are compiled at last
            rb.extend(numbered_rows(130, first))
            rb.sample()
    look_up = TrajectoryIndex(rb.storage).whole
    rows = numbered_rows(3)
    for use in (
        rb.sample,
        rb.state_dict,
        rb.chronological,
        look_up,
        lambda: rb.extend(rows),
    ):
        with pytest.raises(RuntimeError, match="has been closed"):
            use()
    for written in (260, 263):
        with opened(tmp_path) as rb:
            assert (len(rb), rb.write_count) == (CAPACITY, written)
            rb.extend(numbered_rows(3))


def test_rows_of_an_environment_are_continued(tmp_path: Path) -> None:
    def run(name: str) -> int:
        env = gymnasium.make_vec(name, num_envs=2)
        with ReplayBuffer.from_env(env, 40, scratch_dir=tmp_path, reopen=True) as rb:
            recorder = GymnasiumRecorder(rb, env)
            recorder.reset(seed=0)
            recorder.step(env.action_space.sample())
            return len(rb)

    assert run("CartPole-v1") == 2
    words = r"'observation' is float32 of shape \(6,\) in the schema"
    with pytest.raises(SchemaError, match=words):
        run("Acrobot-v1")
    assert run("CartPole-v1") == 4


@pytest.mark.parametrize("shared", [False, True])
def test_the_next_process_may_find_episodes_by_other_keys(
    shared: bool, tmp_path: Path
) -> None:
    step = torch.arange(12)
    lengths = {"end": 5, "other": 4}
    rows = numbered_rows(12)
    for name, length in lengths.items():
        rows[name] = step % length == length - 1
    for number, name in enumerate(("end", "other", "end"), 1):
        with opened(tmp_path, shared=shared) as rb:
            rb.extend(rows)
            index = TrajectoryIndex(rb.storage, done_key=name)
            # a reopening ends what is open
            expected = (step % lengths[name]).repeat(number)
            assert torch.equal(index.steps_back(torch.arange(12 * number)), expected)
            with pytest.raises(ValueError, match="in all processes that share it"):
                TrajectoryIndex(rb.storage)


# -- priorities outlive the process, and never pass to another row


def train(folder: Path, sampler: str) -> None:
    """Write and update for ever."""
    rb = opened(folder, sampler)
    draw = np.random.default_rng(len(rb))
    while True:
        first = int(rb.storage["x"].max()) + 1
        rb.extend(wide_rows(first, int(draw.choice([1, 3, 20]))))
        for _ in range(3):
            batch = rb.sample()
            errors = own(batch["x"]).float()
            rb.update_tensordict_priority(batch.set("td_error", errors))


def wide_rows(first: int, count: int) -> Any:
    rows = numbered_rows(count, first)
    return rows.set("wide", rows["x"][:, None].expand(-1, 40).clone())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* rows were reopened without a priority")
@pytest.mark.parametrize("sampler", ["proportional", "rank"])
def test_killed_often_while_training(tmp_path: Path, sampler: str) -> None:
    with opened(tmp_path, sampler) as rb:
        rb.extend(wide_rows(0, 30))
        rb.update_priority(torch.tensor([7]), torch.tensor([NEW]))
        for _ in range(4):  # processes inherit the machine code
            batch = rb.sample()
            rb.update_tensordict_priority(batch.set("td_error", torch.ones(16)))
    draw, updated = np.random.default_rng(0), 0
    kills = int(os.environ.get("RLBUF_TD_KILLS", "10"))
    for _ in range(kills):
        process = get_context("fork").Process(target=train, args=(tmp_path, sampler))
        process.start()
        time.sleep(float(draw.uniform(0.02, 0.15)))
        process.kill()
        process.join(60)
        with opened(tmp_path, sampler) as rb:
            stored = rb.chronological()
            assert (stored["x"].diff() == 1).all()
            expected = wide_rows(int(stored["x"][0]), len(stored))
            assert (stored == expected).all()
            number, magnitude = magnitudes(rb)
            magnitude = magnitude[rb.storage.ring.cells_by_age()]
            number = stored["x"]
            # the first 30 came before the largest TD error
            is_new = (magnitude == NEW) | ((magnitude == 1) & (number < 30))
            assert (is_new | (magnitude == own(number))).all()
            check_priorities(rb)
            updated += int((~is_new).sum())
    assert updated > 10 * kills


def test_rows_written_without_priorities_are_new(tmp_path: Path) -> None:
    def work() -> None:
        rb = started(tmp_path)
        rb.extend(numbered_rows(CAPACITY, 30))
        update_all(rb)
        rb.update_priority(torch.tensor([0]), torch.tensor([NEW]))
        die()

    killed(work)
    with opened(tmp_path) as rb:
        rb.extend(numbered_rows(100, 30 + CAPACITY))
    with pytest.warns(UserWarning, match="reopened without a priority"):
        rb = opened(tmp_path, "rank")  # another law continues the same TD errors
    number, magnitude = magnitudes(rb)
    is_new = number > number.max() - 100
    assert (magnitude[is_new] == NEW).all()
    is_same = magnitude[~is_new] == own(number[~is_new])
    assert is_same.sum() >= len(is_same) - 1  # but for that of the cell 0
    rb.close()
    assert torch.equal(magnitudes(opened(tmp_path, "rank"))[1], magnitude)


def fill_with_nan(file: Path) -> None:
    head = file.read_bytes()[: 1 << 16]
    rest = file.stat().st_size - len(head)
    file.write_bytes(head + np.full(rest // 8, np.nan).tobytes())


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "no file": Path.unlink,
    "another header": lambda file: change(file, 0, b"\x07"),
    "NaN": fill_with_nan,
    "too short": lambda file: os.truncate(file, 70_000),
}


@pytest.mark.parametrize("spoil", UNREADABLE.values(), ids=UNREADABLE)
def test_without_a_readable_file_all_rows_are_new(spoil: Any, tmp_path: Path) -> None:
    started(tmp_path).close()
    spoil(tmp_path / PRIORITY_FILE)
    with pytest.warns(UserWarning, match="reopened without a priority"):
        rb = opened(tmp_path, "proportional")
    number, magnitude = magnitudes(rb)
    assert len(number) == 30
    assert (magnitude == magnitude[0]).all()
    rb.sample()


def load_sampler_alone(rb: Any, folder: Path) -> None:
    state = rb.sampler.state_dict()
    state["magnitude"][:30] = own(rb.storage["x"]).float()
    rb.sampler.load_state_dict(state)


def load_and_update(rb: Any, folder: Path) -> None:
    rb.dumps(folder / "dump")
    rb.loads(folder / "dump")
    update_all(rb)


def update_by_another_buffer(rb: Any, folder: Path) -> None:
    rb.shutdown()
    other = ReplayBuffer(storage=rb.storage, sampler=SAMPLERS["rank"]())
    update_all(other)


UPDATES: dict[str, Callable[[Any, Path], object]] = {
    "in another process": lambda rb, folder: forked(lambda: update_all(rb.share())),
    "a sampler is loaded alone": load_sampler_alone,
    "after a load": load_and_update,
    "by another buffer": update_by_another_buffer,
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_updates_are_kept(update: Any, tmp_path: Path) -> None:
    def work() -> None:
        rb = started(tmp_path)
        update(rb, tmp_path)
        die()

    killed(work)
    number, magnitude = magnitudes(opened(tmp_path, "proportional"))
    assert torch.equal(magnitude, own(number))


def test_a_killed_write_of_as_many_rows_as_fit_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        with forced("torch"):
            rb = opened(tmp_path)
            rb.extend(numbered_rows(100))
            monkeypatch.setattr(Rows, "append_", die)
            rb.extend(numbered_rows(CAPACITY, 100))

    killed(work)
    rb = opened(tmp_path)
    assert len(rb) == 0
    rb.extend(numbered_rows(3))
    assert rb.chronological()["x"].tolist() == [0, 1, 2]


def test_a_forked_process_needs_a_shared_buffer(tmp_path: Path) -> None:
    rb, empty = started(tmp_path / "rows"), opened(tmp_path / "empty")

    def work() -> None:
        for call, words in (
            (lambda: rb.extend(numbered_rows(3)), r"before forking \(rb.share\(\)\)"),
            (lambda: update_all(rb), r"call rb.share\(\) before a fork"),
            (lambda: empty.extend(numbered_rows(3)), "share the buffer before forking"),
        ):
            with pytest.raises(RuntimeError, match=words):
                call()

    assert forked(work) == 0
    assert len(rb) == 30
    assert not (tmp_path / "empty" / "rows.bin").exists()


def test_parts_of_reopened_rows_cannot_be_replaced(tmp_path: Path) -> None:
    rb = started(tmp_path)
    for replace in (
        lambda: rb.set_sampler(UniformSampler()),
        lambda: rb.set_writer(RingWriter()),
        lambda: rb.set_storage(PackedStorage(CAPACITY)),
    ):
        with pytest.raises(RuntimeError, match="of a reopened buffer: its folder"):
            replace()
    rb.extend(numbered_rows(3))


@pytest.mark.filterwarnings("ignore:.* rows were reopened without a priority")
@pytest.mark.parametrize(
    ("name", "is_shared"), [("proportional", True), ("rank", False)]
)
def test_a_second_buffer_that_would_write_to_the_file_of_priorities_is_refused(
    tmp_path: Path, name: str, is_shared: bool
) -> None:
    rb = started(tmp_path, name)
    if is_shared:
        rb.share()
    apart = ReplayBuffer(sampler=SAMPLERS[name](), storage=PackedStorage(CAPACITY))
    apart.extend(numbered_rows(9))
    for attempt in (
        lambda: ReplayBuffer(storage=rb.storage, sampler=SAMPLERS[name]()).sample(4),
        lambda: ReplayBuffer(
            storage=rb.storage, sampler=NStepSampler(SAMPLERS[name](), 3, 0.9)
        ).sample(4),
        lambda: apart.set_storage(rb.storage),
    ):
        words = "use one buffer, or a sampler without priorities here, or call shutdown"
        with pytest.raises(ValueError, match=words):
            attempt()
    plain = ReplayBuffer(storage=rb.storage)
    update_all(rb)
    apart.extend(numbered_rows(9))
    plain.extend(numbered_rows(3, 30))
    rb.extend(numbered_rows(4, 33))
    assert (len(apart), len(plain)) == (18, 37)
    number, magnitude = magnitudes(rb)
    assert torch.equal(magnitude[:30], own(number[:30]))
    assert (magnitude[30:] == NEW).all()
    for each in (rb, plain):
        each.close()
    assert torch.equal(magnitudes(opened(tmp_path, name))[1], magnitude)


def test_the_largest_magnitude_goes_with_the_rows_that_had_it(tmp_path: Path) -> None:
    started(tmp_path).close()
    with opened(tmp_path) as rb:
        rb.extend(numbered_rows(CAPACITY))
    with pytest.warns(UserWarning, match="were reopened without a priority"):
        rb = opened(tmp_path, "proportional")
    assert (magnitudes(rb)[1] == 1.0).all()
    assert rb.sampler.default_priority == 1.0
