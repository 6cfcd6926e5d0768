"""Priorities of ``PackedStorage(reopen=True)`` outlive the process, and never pass to another row."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlbuf_td import NStepSampler, PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer, UniformSampler
from rlbuf_td.buffers.bound_write import BoundWrite
from rlbuf_td.storages.shared.journal_file import JOURNAL_FILE, PRIORITY_FILE
from tests.storages.test_kill import die
from tests.storages.test_reopen import CAPACITY, LANES, killed, opened, rows, write_with

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
NEW = 1_000.0  # the magnitude of new rows, once a row had this TD error
SAMPLERS: dict[str, Callable[[], Any]] = {
    "proportional": partial(ProportionalSampler, CAPACITY),
    "rank": partial(RankSampler, CAPACITY),
}
each_sampler = pytest.mark.parametrize("name", SAMPLERS)
each_layout = pytest.mark.parametrize("lanes", [0, LANES])


def buffer(folder: Path, lanes: int, name: str) -> ReplayBuffer:
    rb = ReplayBuffer(storage=opened(folder, lanes), sampler=SAMPLERS[name](), batch_size=16)
    rb._initialize()
    return rb


def own(number: torch.Tensor) -> torch.Tensor:
    """Return the TD error of a row, which no other row has."""
    return 1 + number.double() / 1024  # exact in float32


def magnitudes(rb: ReplayBuffer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of each row that was written, and its magnitude."""
    _, count = rb.storage.heads.read(rb.storage)
    cells = torch.arange(len(rb.storage))
    lanes = len(count)
    is_written = cells // lanes < torch.from_numpy(count)[cells % lanes]
    number = rb.storage["x"].reshape(-1)[: len(cells)]
    prioritized = rb._initialize().prioritized
    assert prioritized is not None
    return number[is_written], prioritized.law.table.magnitude[cells][is_written].double()


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
            rb.update_tensordict_priority(batch.set("td_error", own(batch["x"]).float()))


def start(folder: Path, lanes: int, name: str) -> ReplayBuffer:
    rb = buffer(folder, lanes, name)
    write(rb, lanes, 30)
    rb.update_priority(rb.sample()["index"][:1], torch.tensor([NEW]))
    return rb


def begin_and_die(folder: Path, lanes: int, name: str) -> None:
    start(folder, lanes, name)
    die()


@pytest.fixture(autouse=True, scope="module")
def compiled(tmp_path_factory: Any) -> None:
    """Compile what the killed processes call, which inherit the machine code."""
    for name in SAMPLERS:
        for lanes in (0, LANES):
            rb = start(tmp_path_factory.mktemp("compiled"), lanes, name)
            for _ in range(4):
                write(rb, lanes, 3)
                batch = rb.sample()
                rb.update_tensordict_priority(batch.set("td_error", own(batch["x"]).float()))


def kill_often(folder: Path, lanes: int, name: str, kills: int) -> None:
    killed(partial(begin_and_die, folder, lanes, name))
    draw, kept = np.random.default_rng(kills), 0
    for _ in range(kills):
        killed(lambda: train(buffer(folder, lanes, name), lanes), float(draw.uniform(0.02, 0.15)))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* rows were reopened without a priority")  # of the killed write
            rb = buffer(folder, lanes, name)
        number, magnitude = magnitudes(rb)
        is_new = (magnitude == NEW) | ((magnitude == 1) & (number < 30))  # the first 30 came before that TD error
        assert ((magnitude == own(number)) | is_new).all()
        kept += int((~is_new).sum())
        rb.sample()
        del rb
    assert kept > 10 * kills


@pytest.mark.slow
@each_sampler
@each_layout
def test_killed_often_while_training(tmp_path: Path, lanes: int, name: str) -> None:
    kill_often(tmp_path, lanes, name, int(os.environ.get("RLBUF_TD_KILLS", "15")))


@each_sampler
@each_layout
@pytest.mark.parametrize("is_shared", [False, True])
def test_all_priorities_are_continued(tmp_path: Path, lanes: int, name: str, is_shared: bool) -> None:
    left = torch.zeros(2, CAPACITY, dtype=torch.float64).share_memory_()

    def work() -> None:
        rb = start(tmp_path, lanes, name)
        if is_shared:
            rb.share()
        for step in range(20):
            write(rb, lanes, 17)
            batch = rb.sample()
            rb.update_tensordict_priority(batch.set("td_error", own(batch["x"]).float()))
            if step == 10:
                write_with("torch")  # the rest without compiled writes
        number, magnitude = magnitudes(rb)
        left[0, : len(number)], left[1, : len(number)] = number, magnitude
        die()

    killed(work)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb = buffer(tmp_path, lanes, name)
    number, magnitude = magnitudes(rb)
    assert (left[0, : len(number)] == number).all()
    assert (left[1, : len(number)] == magnitude).all()
    assert 0 < (magnitude != NEW).sum() < len(number)
    write(rb, lanes, 5)
    number, magnitude = magnitudes(rb)
    assert (magnitude[number > number.max() - 5] == NEW).all()


@each_layout
@pytest.mark.parametrize("how", ["compiled", "torch"])
def test_rows_of_a_write_that_was_not_entered_are_new(tmp_path: Path, lanes: int, how: str) -> None:
    def work() -> None:
        rb = start(tmp_path, lanes, "proportional")
        for _ in range(20):
            write(rb, lanes, 17)
            batch = rb.sample()
            rb.update_tensordict_priority(batch.set("td_error", own(batch["x"]).float()))
        write_with(how)
        BoundWrite.enter_rows = BoundWrite.enter_rows_of_lanes = die  # type: ignore[method-assign]
        ReplayBuffer.mark_range = die  # type: ignore[method-assign]
        ProportionalSampler.mark_update = die  # type: ignore[method-assign]
        write(rb, lanes, 17)

    killed(work)
    with pytest.warns(UserWarning, match="reopened without a priority"):
        rb = buffer(tmp_path, lanes, "proportional")
    number, magnitude = magnitudes(rb)
    assert number.max() == 30 + 21 * 17 - 1
    assert ((magnitude == own(number)) | (magnitude == NEW)).all()
    assert (magnitude[number >= 30 + 20 * 17] == NEW).all()
    assert (magnitude != NEW).any()


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (magnitudes(buffer(tmp_path, 0, "rank"))[1] == magnitude).all()


def spoil_header(file: Path) -> None:
    file.write_bytes(b"\x07" + file.read_bytes()[1:])


def fill_with_nan(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: 1 << 16] + np.full((len(content) - (1 << 16)) // 8, np.nan).tobytes())


@pytest.mark.parametrize(
    "spoil", [Path.unlink, spoil_header, fill_with_nan, lambda file: os.truncate(file, 70_000)], ids=range(4)
)
def test_without_a_readable_file_all_rows_are_new(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    killed(partial(begin_and_die, tmp_path, 0, "proportional"))
    spoil(tmp_path / PRIORITY_FILE)
    with pytest.warns(UserWarning, match="reopened without a priority"):
        rb = buffer(tmp_path, 0, "proportional")
    number, magnitude = magnitudes(rb)
    assert len(number) == 30
    assert (magnitude == magnitude[0]).all()
    rb.sample()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_updates_of_other_processes_are_kept(tmp_path: Path, context: Any) -> None:
    rb = start(tmp_path, 0, "proportional").share()
    process = mp.get_context(context).Process(target=update_all, args=(rb,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    del rb
    number, magnitude = magnitudes(buffer(tmp_path, 0, "proportional"))
    assert (magnitude == own(number)).all()


def update_all(rb: ReplayBuffer) -> None:
    rb.update_priority(torch.arange(len(rb)), own(rb.storage["x"][: len(rb)]).float())


def test_a_load_and_an_emptied_buffer_are_kept(tmp_path: Path) -> None:
    rb = start(tmp_path / "rows", 0, "proportional")
    rb.update_priority(torch.arange(30), own(rb.storage["x"][:30]).float())
    rb.dumps(tmp_path / "dump")
    rb.empty()
    del rb
    rb = buffer(tmp_path / "rows", 0, "proportional")
    assert len(rb) == 0
    write(rb, 0, 4)
    assert (magnitudes(rb)[1] == 1).all()  # nothing is left of the largest TD error
    rb.loads(tmp_path / "dump")
    write(rb, 0, 5)
    number, magnitude = magnitudes(rb)
    assert (magnitude[number < 30] == own(number[number < 30])).all()
    del rb
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = magnitudes(buffer(tmp_path / "rows", 0, "proportional"))
    assert (found[0] == number).all()
    assert (found[1] == magnitude).all()


def test_a_ring_that_grows_to_whole_time_steps_is_kept(tmp_path: Path) -> None:
    def work() -> None:
        rb = ReplayBuffer(storage=PackedStorage(20, ndim=2, scratch_dir=tmp_path, reopen=True), sampler=RankSampler(20))
        rb.extend(rows(torch.arange(21)).reshape(3, 7))  # 7 time steps of 3 lanes
        rb.update_priority(torch.arange(21), torch.arange(21) + 2.0)
        die()

    killed(work)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb = ReplayBuffer(storage=PackedStorage(20, ndim=2, scratch_dir=tmp_path, reopen=True), sampler=RankSampler(20))
        rb._initialize()
    assert rb.sampler.priorities.law.table.magnitude[:21].tolist() == [float(number) for number in range(2, 23)]


def test_a_sampler_may_be_larger_than_the_storage(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=opened(tmp_path), sampler=ProportionalSampler(3 * CAPACITY), batch_size=4)
    write(rb, 0, 10)
    state = rb.state_dict()
    rb.empty()
    rb.load_state_dict(state)
    assert (magnitudes(rb)[1] == 1).all()


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        number, magnitude = magnitudes(buffer(tmp_path / "rows", 0, "proportional"))
    assert (magnitude == own(number)).all()


def test_a_storage_that_is_set_later_brings_its_priorities(tmp_path: Path) -> None:
    killed(partial(begin_and_die, tmp_path, 0, "proportional"))
    rb = ReplayBuffer(storage=PackedStorage(CAPACITY), sampler=ProportionalSampler(CAPACITY), batch_size=4)
    rb.set_storage(opened(tmp_path))
    assert (magnitudes(rb)[1] == NEW).sum() == 1
    rb.update_priority(torch.arange(30), own(rb.storage["x"][:30]).float())
    del rb
    number, magnitude = magnitudes(buffer(tmp_path, 0, "proportional"))
    assert (magnitude == own(number)).all()


def test_the_largest_magnitude_of_new_rows_is_continued(tmp_path: Path) -> None:
    rb = buffer(tmp_path, 0, "proportional")
    write(rb, 0, 10)
    rb.update_priority(torch.arange(5), torch.full((5,), 0.125))
    del rb
    with torch.inference_mode():
        rb = buffer(tmp_path, 0, "proportional")
    write(rb, 0, 3)
    assert magnitudes(rb)[1].tolist() == [0.125] * 5 + [1.0] * 5 + [0.125] * 3


def test_priorities_of_deleted_rows_are_dropped(tmp_path: Path) -> None:
    killed(partial(begin_and_die, tmp_path, 0, "proportional"))
    for name in ("rows.bin", JOURNAL_FILE):
        (tmp_path / name).unlink()
    rb = ReplayBuffer(storage=opened(tmp_path), batch_size=4)
    rb.extend(rows(torch.arange(50)))
    del rb
    with pytest.warns(UserWarning, match="50 of 50 rows were reopened without a priority"):
        rb = buffer(tmp_path, 0, "proportional")
    assert (magnitudes(rb)[1] == 1).all()


def test_a_forked_process_needs_shared_priorities(tmp_path: Path) -> None:
    rb = start(tmp_path, 0, "proportional")
    said = RawArray("b", 2)

    def work() -> None:
        for place, call in enumerate((lambda: write(rb, 0, 3), lambda: update_all(rb))):
            with pytest.raises(RuntimeError, match=r"call rb.share\(\) before a fork"):
                call()
            said[place] = 1
        die()

    killed(work)
    assert list(said) == [1, 1]


def second(storage: PackedStorage, sampler: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    rb.sample()
    return rb


@each_sampler
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_second_buffer_that_would_write_to_the_file_of_priorities_is_refused(
    tmp_path: Path, name: str, is_shared: bool
) -> None:
    rb = start(tmp_path, 0, name)
    if is_shared:
        rb.share()
    before, attached = magnitudes(rb), len(rb.storage._attached_entities)
    apart = ReplayBuffer(storage=PackedStorage(CAPACITY), sampler=ProportionalSampler(CAPACITY), batch_size=4)
    apart.extend(rows(torch.arange(9)))
    plain = second(rb.storage, UniformSampler())
    own_sampler, wrapped = SAMPLERS[name](), NStepSampler(SAMPLERS[name](), 3, 0.9)
    for attempt in (
        partial(second, rb.storage, own_sampler),
        partial(second, rb.storage, wrapped),
        partial(apart.set_storage, rb.storage),
    ):
        with pytest.raises(ValueError, match=r"use one buffer, or a sampler without priorities here, or call shutdown"):
            attempt()
    assert len(rb.storage._attached_entities) == attached + 1
    assert len(apart) == 9
    for found, expected in zip(magnitudes(rb), before, strict=True):
        assert torch.equal(found, expected)
    rb.update_priority(torch.arange(30), own(rb.storage["x"][:30]).float())
    apart.extend(rows(torch.arange(9))), apart.sample(), plain.sample()
    write(plain, 0, 3)
    write(rb, 0, 4)
    number, magnitude = magnitudes(rb)
    del rb, plain, apart, before, attempt
    found = magnitudes(buffer(tmp_path, 0, name))
    assert torch.equal(found[0], number)
    assert torch.equal(found[1], magnitude)


def write_update_and_die(rb: ReplayBuffer) -> None:
    write(rb, 0, 3)
    rb.update_priority(torch.arange(35, 38), torch.full((3,), 5.0))
    die()


@each_sampler
def test_the_file_of_priorities_passes_on_to_another_buffer(tmp_path: Path, name: str) -> None:
    rb = start(tmp_path, 0, name)
    rb.update_priority(torch.arange(30), torch.rand(30))
    copied = pickle.loads(pickle.dumps(rb))
    copied.update_priority(torch.arange(30), torch.full((30,), 7.0))
    rb.append_transform(lambda batch: batch)
    _, expected = magnitudes(rb)
    rb.shutdown()
    other = second(rb.storage, SAMPLERS[name]())
    assert torch.equal(magnitudes(other)[1], expected)
    write(other, 0, 5)
    other.share().update_priority(torch.arange(35), own(other.storage["x"][:35]).float())

    killed(partial(write_update_and_die, other))
    number, magnitude = magnitudes(other)
    assert magnitude[-3:].tolist() == [5.0] * 3
    del rb, other, copied
    found = magnitudes(buffer(tmp_path, 0, name))
    assert torch.equal(found[0], number)
    assert torch.equal(found[1], magnitude)
