"""Buffers of TorchRL, as its data sets are, taken over as copies or as they are."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torch.utils.data import DataLoader
from torchrl.data import ReplayBuffer as TorchRLReplayBuffer
from torchrl.data import VideoClipRef
from torchrl.data.datasets import LeRobotExperienceReplay
from torchrl.data.replay_buffers import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)

from rlbuf_td import (
    CheckpointError,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RecencySampler,
    ReplayBuffer,
    SchemaError,
    SequenceSampler,
    TrajectoryIndex,
    UniformSampler,
)
from rlbuf_td.buffers import torchrl_data
from tests.backends import needs_torchrl
from tests.catalogue import assert_same, numbered_rows
from tests.storages.test_sharing import elsewhere

CAPACITY = 12


def rows(count: int, lanes: int = 0, first: int = 0) -> TensorDict:
    return numbered_rows(count, first, lanes, every=4)


def theirs(
    written: int, lanes: int = 0, storage: Any = LazyTensorStorage, **parts: Any
) -> TensorDictReplayBuffer:
    rows_of = storage(CAPACITY * max(lanes, 1), ndim=2 if lanes else 1)
    rb = TensorDictReplayBuffer(storage=rows_of, batch_size=4, **parts)
    for first in range(0, written, 5):
        rb.extend(rows(min(5, written - first), lanes, first))
    return rb


def contents_of(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(autouse=True)
def _in_parts(monkeypatch):
    monkeypatch.setattr(torchrl_data, "_READ_AT_ONCE", 100)


def assert_copied(rb: Any, expected: TensorDict, lanes: int) -> None:
    """Compare rows in the order of age, and go on with the buffer."""
    time_first = expected.transpose(0, 1) if lanes else expected
    assert_same(rb.chronological(), time_first.contiguous())
    assert rb.storage.max_size == CAPACITY * max(lanes, 1)
    assert rb.batch_size == len(rb.sample()) == 4
    rb.extend(rows(3, lanes, 500))
    assert rb.last(3)["x"].reshape(3, -1)[:, 0].tolist() == [500, 501, 502]


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize(
    ("storage", "lanes", "written"),
    [(LazyTensorStorage, 0, 33), (LazyMemmapStorage, 3, 7), (LazyTensorStorage, 3, 12)],
)
def test_a_copy_has_the_rows_in_order_of_age(
    written, lanes, storage, is_folder, tmp_path
):
    source: Any = theirs(written, lanes, storage)
    if is_folder:
        source.dumps(tmp_path)
        source = tmp_path
    before = contents_of(tmp_path)
    kept = min(written, CAPACITY)
    rb = ReplayBuffer.from_torchrl(source)
    assert_copied(rb, rows(kept, lanes, written - kept), lanes)
    assert contents_of(tmp_path) == before


@pytest.mark.parametrize(("lanes", "used"), [(0, 5), (3, 14)])
def test_a_loaded_buffer_is_read_from_its_oldest_row(used, lanes, tmp_path):
    """TorchRL's loads restore in the writer alone where the ring goes on."""
    theirs(17, lanes).dumps(tmp_path)
    loaded = theirs(used, lanes)
    loaded.loads(tmp_path)
    rb = ReplayBuffer.from_torchrl(loaded)
    assert_copied(rb, rows(CAPACITY, lanes, 17 - CAPACITY), lanes)


def data_set(data: TensorDict) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=TensorStorage(data), writer=ImmutableDatasetWriter(), batch_size=3
    )


def test_episodes_of_a_data_set_do_not_run_into_each_other(tmp_path):
    data = rows(9).exclude(("next", "done"), ("next", "terminated"))
    data["episode"] = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    source = data_set(data)
    options: dict[str, Any] = {"scratch_dir": tmp_path / "rows", "share_next": True}
    rb = ReplayBuffer.from_torchrl(
        source, 20, sampler=MinibatchSampler(), batch_size=5, **options
    )
    assert (len(rb), rb.storage.max_size, rb.batch_size) == (9, 20, 5)
    _, ahead, _ = TrajectoryIndex(rb.storage).reach(torch.arange(9))
    assert ahead.tolist() == [2, 1, 0, 3, 2, 1, 0, 1, 0]
    plain = ReplayBuffer.from_torchrl(source, trajectory_key=None)
    assert "episode" in plain.storage[:].keys()


def test_entries_that_no_row_can_hold_are_excluded():
    source = data_set(rows(4).set("said", NonTensorData("go", batch_size=[4])))
    with pytest.raises(SchemaError, match="key 'said' holds non-tensor data"):
        ReplayBuffer.from_torchrl(source)
    for exclude in (["said"], "said"):
        assert len(ReplayBuffer.from_torchrl(source, exclude=exclude)) == 4
    rb = ReplayBuffer.from_torchrl(theirs(7), exclude=("next", "done"))
    assert ("next", "done") not in rb[:].keys(True)


def test_a_lerobot_data_set_comes_in_without_its_strings_and_videos():
    columns = {
        "observation.state": torch.rand(6, 4),
        "observation.images.top": VideoClipRef.from_file("top.mp4", num_frames=6),
        "action": torch.rand(6, 2),
        "next.done": torch.tensor([0, 0, 1, 0, 0, 1], dtype=torch.bool),
        "episode_index": torch.tensor([0, 0, 0, 1, 1, 1]),
        "task": ["pick"] * 3 + ["place"] * 3,
    }
    theirs = LeRobotExperienceReplay.from_columns(columns, decode_video=False)
    instruction, video = "language_instruction", ("observation", "image", "top")
    for excluded, refused in (
        ([video], "language_instruction"),
        ([instruction], "top"),
    ):
        with pytest.raises(SchemaError, match=refused):
            ReplayBuffer.from_torchrl(theirs, exclude=excluded)
    rb = ReplayBuffer.from_torchrl(theirs, exclude=[instruction, video])
    assert torch.equal(rb.storage["observation", "state"], columns["observation.state"])
    assert rb.storage["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert rb.storage["next", "done"].shape == (6, 1)


def test_a_folder_without_readable_rows_is_refused(tmp_path):
    listed = TorchRLReplayBuffer(storage=LazyTensorStorage(5))
    listed.extend(torch.arange(4))
    said = "no TensorDicts that TorchRL's default checkpointer wrote: load it"
    for _ in range(2):  # an empty folder, then one with other rows
        with pytest.raises(CheckpointError, match=said):
            ReplayBuffer.from_torchrl(tmp_path)
        listed.dumps(tmp_path)


# in TorchRL's sampler
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    ("source", "lanes", "written"),
    [
        ("a buffer", 0, 17),
        ("a buffer", 3, 7),
        ("a buffer", 3, 17),
        ("our storage", 3, 17),
        ("folder", 0, 7),
        ("folder", 3, 17),
    ],
)
def test_priorities_follow_their_rows(source, lanes, written, tmp_path):
    size = CAPACITY * max(lanes, 1)
    sampler = PrioritizedSampler(size, alpha=0.5, beta=0.4, eps=0.0)
    storage = PackedStorage if source == "our storage" else LazyTensorStorage
    their: Any = theirs(written, lanes, storage, sampler=sampler)
    order = torch.arange(len(their))
    index = (order // lanes, order % lanes) if lanes else order
    # a different one for each row
    sampler.update_priority(order, (their.storage.get(index)["x"] + 1).float())
    if source == "folder":
        their.dumps(tmp_path)
        their = tmp_path
    ours = ProportionalSampler(size, alpha=1.0, eps=0.0)
    rb = ReplayBuffer.from_torchrl(their, sampler=ours, batch_size=4)
    expected = (rb.storage.get(index)["x"] + 1).float()
    torch.testing.assert_close(ours.tree.magnitude[: len(order)].float(), expected)
    assert rb.sample().shape == (4,)


class Attack:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_pickles_in_a_folder_are_never_loaded(tmp_path):
    folder, mark = tmp_path / "dump", tmp_path / "ran"
    theirs(4).dumps(folder)
    note = NonTensorData(Attack(mark), batch_size=[4])
    rows(4).set("note", note).memmap(folder / "storage")
    assert [*folder.rglob("*.pickle")]
    with pytest.raises(CheckpointError, match="pickle, which is never loaded"):
        ReplayBuffer.from_torchrl(folder)
    assert not mark.exists()


def cut(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes()[:5])


def link(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(other)


def enlarge(file: Path, other: Path) -> None:
    metadata = file.parents[1] / "sampler" / "sampler_metadata.json"
    metadata.write_text(metadata.read_text().replace("12", "1000000"))


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (cut, "has 5 bytes, expected"),
        (lambda file, other: file.unlink(), "is missing"),
        (link, "is a link"),
        (enlarge, "sumtree.memmap has .* bytes, expected 8,000,000"),
    ],
)
def test_incomplete_dumps_are_refused_and_no_file_is_changed(spoil, match, tmp_path):
    folder, other = tmp_path / "dump", tmp_path / "other"
    theirs(12, sampler=PrioritizedSampler(12, 0.6, 0.4)).dumps(folder)
    other.write_bytes(b"of another program")
    spoil(folder / "storage" / "x.memmap", other)
    before = contents_of(tmp_path)
    with pytest.raises(CheckpointError, match=match):
        ReplayBuffer.from_torchrl(folder)
    assert contents_of(tmp_path) == before


# -- data sets over a buffer, read by the workers of a DataLoader


def wide_rows(start: int, count: int) -> TensorDict:
    """Return rows that are whole if all entries are their number."""
    data = numbered_rows(count, start)
    data["wide"] = data["x"][:, None].expand(count, 500).float().clone()
    return data


# as_dataset is of TorchRL's next release
def buffer(sampler: Any = None, capacity: int = 60, **kwargs: Any) -> Any:
    return ReplayBuffer(
        storage=PackedStorage(capacity, **kwargs),
        sampler=sampler or UniformSampler(),
        batch_size=8,
    )


def check(batch: TensorDict) -> None:
    assert (batch["wide"] == batch["x"][:, None]).all()


def loader(dataset: Any, method: str, **kwargs: Any) -> DataLoader:
    from torchrl.data import tensordict_collate

    return DataLoader(
        dataset,
        num_workers=2,
        multiprocessing_context=method,
        collate_fn=tensordict_collate,
        timeout=120,
        **kwargs,
    )


def test_a_storage_is_restored_without_its_listeners() -> None:
    """As data sets of TorchRL's next release send it to spawned workers."""
    rb = buffer()
    rb.extend(wide_rows(0, 40))
    copied = PackedStorage.__new__(PackedStorage)
    copied.__setstate__(rb.storage.__getstate__() | {"_attached_entities_list": []})
    assert (copied[:] == rb.storage[:]).all()
    other = ReplayBuffer(storage=copied, batch_size=8)
    other.extend(wide_rows(40, 10))
    assert len(other) == 50


@needs_torchrl("data sets")
@pytest.mark.parametrize(
    ("form", "method"),
    [
        ({}, "spawn"),
        ({"share_next": ["achieved_goal"]}, "fork"),
        ({"scratch_dir": True}, "fork"),
        ({"shared": True}, "fork"),
    ],
    ids=str,
)
def test_workers_read_each_row_once(
    form: dict[str, Any], method: str, tmp_path: Any
) -> None:
    if "scratch_dir" in form:
        form = {"scratch_dir": tmp_path / "rows"}
    rb = buffer(**form)
    data = wide_rows(0, 40)
    data["achieved_goal"] = data["next", "achieved_goal"] - 1
    rb.extend(data)
    rb.sample()
    batches = [*loader(rb.storage.as_dataset(), method, batch_size=4, shuffle=True)]
    for batch in batches:
        check(batch)
    assert torch.cat([batch["x"] for batch in batches]).sort()[0].tolist() == [
        *range(40)
    ]


@needs_torchrl("data sets")
@pytest.mark.parametrize(
    ("sampler", "method"),
    [
        (UniformSampler(), "fork"),
        (RecencySampler(half_life=50), "fork"),
        (SequenceSampler(UniformSampler(), 4), "fork"),
        (SequenceSampler(NStepSampler(RecencySampler(), 2, 0.9), 4), "spawn"),
    ],
    ids=str,
)
def test_workers_sample_rows_that_are_written_later(sampler: Any, method: str) -> None:
    rb = buffer(sampler)
    rb.extend(wide_rows(0, 20))
    rb.sample()
    batches = loader(
        rb.as_dataset(num_batches=7), method, batch_size=None, persistent_workers=True
    )
    for written in (20, 40, 60):
        if written > 20:
            rb.extend(wide_rows(written - 20, 20))
        found = list(batches)
        for batch in found:
            check(batch)
        assert len(found) == 7
        assert max(int(batch["x"].max()) for batch in found) >= written - 20
        check(rb.sample())


@needs_torchrl("data sets")
def test_a_sampler_with_a_state_is_refused_in_workers() -> None:
    rb = buffer(ProportionalSampler(60))
    rb.extend(wide_rows(0, 20))
    with pytest.raises(RuntimeError, match="ProportionalSampler keeps sampling state"):
        next(iter(loader(rb.as_dataset(), "fork", batch_size=None)))
    controlled = ReplayBuffer(storage=PackedStorage(60), batch_size=8, min_size=4)
    controlled.extend(wide_rows(0, 20))
    with pytest.raises(RuntimeError, match="unless the buffer is shared"):
        next(iter(loader(controlled.as_dataset(), "fork", batch_size=None)))


def test_which_samplers_have_a_state() -> None:
    wrapped = NStepSampler(UniformSampler(), 2, 0.9)
    stateless = UniformSampler(), RecencySampler(), wrapped
    windows = SequenceSampler(NStepSampler(ProportionalSampler(9), 2, 0.9), 4)
    stateful = ProportionalSampler(9), MinibatchSampler(), windows
    assert not any(sampler.requires_shared_state for sampler in stateless)
    assert all(sampler.requires_shared_state for sampler in stateful)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_row_is_never_read_while_it_is_written() -> None:
    rb = buffer(capacity=2, shared=True)
    data = [
        TensorDict({"x": torch.full((2, 300_000), float(t))}, [2]) for t in range(2)
    ]
    rb.extend(data[0])

    def read() -> None:
        for _ in range(100):
            for index in (torch.arange(2), [0, 1]):
                large = rb.storage.get(index)["x"]
                assert (large == large[0, 0]).all()

    reader = multiprocessing.get_context("fork").Process(target=read)
    reader.start()
    turn = 1
    while reader.is_alive():
        rb.extend(data[turn % 2])
        turn += 1
    assert reader.exitcode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_finds_rows_that_another_one_has_allocated() -> None:
    rb = buffer(shared=True)
    elsewhere(rb.extend, wide_rows(0, 20))
    check(rb.storage.get(torch.arange(20)))
