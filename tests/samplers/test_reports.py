"""Entries that a sampler adds to batches never replace an entry that the user stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReplayBufferMixture,
    SchemaError,
    SequenceSampler,
    UniformSampler,
    check,
)
from rlbuf_td.checkpoint import CheckpointError

SIZE = 12
MAKE: dict[str, Callable[[], Any]] = {
    "mask": lambda: SequenceSampler(UniformSampler(), 3),
    "burn_in_mask": lambda: SequenceSampler(UniformSampler(), 3, burn_in=1),
    "anchor_index": lambda: SequenceSampler(NStepSampler(UniformSampler(), 2, 0.9), 3),
    "steps_to_next_obs": lambda: SequenceSampler(NStepSampler(UniformSampler(), 2, 0.9), 3),
    "relabeled": lambda: HindsightSampler(UniformSampler(), lambda batch: batch["next", "reward"]),
    "priority_weight": lambda: ProportionalSampler(SIZE),
    "sampled_at": lambda: NStepSampler(RankSampler(SIZE), 2, 0.9),
}


def rows(name: str | None = None, value: Any = None, count: int = SIZE) -> TensorDict:
    done = torch.arange(count).view(-1, 1) % 6 == 5
    place = torch.arange(count * 1.0).view(-1, 1)
    following = {"reward": torch.ones(count, 1), "done": done, "observation": place + 1}
    data = TensorDict({"observation": place, "next": following}, [count])
    if name is not None:
        data[name] = torch.arange(count) + 100 if value is None else value
    return data


def buffer(sampler: Any = None, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=PackedStorage(SIZE), sampler=sampler, batch_size=12, **options)


@pytest.mark.parametrize("name", MAKE)
def test_the_first_write_is_refused_by_name_and_a_renamed_entry_is_stored(name: str) -> None:
    for value in (None, {"nested": torch.zeros(SIZE)}):
        rb = buffer(MAKE[name]())
        data = rows(name, value)
        for write in (rb.extend, lambda data, rb=rb: rb.add(data[0])):
            with pytest.raises(SchemaError, match=rf"have an entry '{name}', and a .*Sampler adds .* another name"):
                write(data)
            assert (len(rb), rb.storage.rows, rb.write_count) == (0, None, 0)
        rb.extend(data.rename_key_(name, f"my_{name}"))
        assert (rb.storage[f"my_{name}"] == data[f"my_{name}"]).all()
    other = buffer()  # whose sampler adds no such entry
    other.extend(rows(name))
    batch = other.sample()
    assert torch.equal(batch[name], batch["observation"][:, 0].long() + 100)


@pytest.mark.parametrize("name", ["mask", "priority_weight"])
def test_rows_that_are_already_stored_are_refused_wherever_the_sampler_meets_them(name: str, tmp_path: Path) -> None:
    full, words = buffer(), f"have an entry '{name}'"
    full.extend(rows(name))
    full.dumps(tmp_path)
    before = full.sampler
    with pytest.raises(SchemaError, match=words):
        full.set_sampler(MAKE[name]())
    assert full.sampler is before
    assert len(full.sample()) == 12
    with pytest.raises(SchemaError, match=words):
        ReplayBuffer.from_schema(rows(name)[0], SIZE, sampler=MAKE[name]())
    with pytest.raises(SchemaError, match=words):
        ReplayBuffer.from_torchrl(full, sampler=MAKE[name](), copy=False)
    saved = full.storage.state_dict()
    for load in (lambda rb: rb.loads(tmp_path, rows_only=True), lambda rb: rb.storage.load_state_dict(saved)):
        rb = buffer(MAKE[name]())
        with pytest.raises((SchemaError, CheckpointError), match=words):
            load(rb)
        assert rb.storage.rows is None
        rb.extend(rows())
    storage = rb.storage
    with pytest.raises(SchemaError, match=words):
        rb.set_storage(full.storage)
    assert rb.storage is storage
    assert len(rb.sample()) == 12


@pytest.mark.parametrize("name", ["mask", "priority_weight"])
def test_buffers_and_storages_of_torchrl_refuse_them_too(name: str) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(SIZE), sampler=MAKE[name](), batch_size=12)
    with pytest.raises(SchemaError, match=f"have an entry '{name}'"):
        rb.extend(rows(name))
    assert len(rb) == 0
    theirs = TensorDictReplayBuffer(storage=PackedStorage(SIZE), sampler=MAKE[name](), batch_size=12)
    theirs.extend(rows(name))
    with pytest.raises(SchemaError, match=f"have an entry '{name}'"):
        theirs.sample()
    (finding,) = check(theirs, ignore="done-without-reset")
    assert (finding.code, finding.key, finding.count) == ("entry-replaced", (name,), SIZE)


class OwnSampler(UniformSampler):
    def draw(self, storage: Any, batch_size: int) -> Any:
        flat, info = super().draw(storage, batch_size)
        return flat, info | {"chosen_by": torch.zeros(batch_size)}


def test_a_sampler_of_ones_own_is_refused_at_the_first_draw() -> None:
    rb = buffer(OwnSampler())
    rb.extend(rows("chosen_by"))
    with pytest.raises(SchemaError, match="have an entry 'chosen_by', and a OwnSampler adds"):
        rb.sample()


def test_an_index_that_cannot_be_one_is_refused() -> None:
    rb = buffer()
    with pytest.raises(
        SchemaError, match=r"an entry 'index' of torch.float32, but each batch has .* under another name"
    ):
        rb.extend(rows("index", torch.rand(SIZE)))
    rb.extend(rows("index"))  # of a sampled batch: not stored
    assert "index" not in rb.storage[:].keys()
    with pytest.raises(SchemaError, match="cannot reserve rows for an entry 'index'"):
        ReplayBuffer.from_schema(rows("index")[0], SIZE)


class ChangesFlags(UniformSampler):  # as TorchRL's SliceSampler does
    def draw(self, storage: Any, batch_size: int) -> Any:
        flat, info = super().draw(storage, batch_size)
        return flat, info | {("next", "done"): torch.ones(batch_size, 1, dtype=torch.bool)}


def test_batches_without_the_report_keep_what_the_rows_have() -> None:
    rb = buffer(ChangesFlags(), include_info=False)
    rb.extend(rows())
    batch = rb.sample()
    assert batch["next", "done"].all()
    assert set(batch.keys()) == {"observation", "next"}


@pytest.mark.parametrize("name", ["source", "priority_weight", "sampled_at"])
@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
def test_mixtures_refuse_what_they_add_to_the_rows_of_any_member(name: str, storage: Any) -> None:
    plain = ReplayBuffer(storage=storage(SIZE))
    weighted = ReplayBuffer(storage=storage(SIZE), sampler=ProportionalSampler(SIZE))
    mixed = ReplayBufferMixture({"a": plain, "b": weighted}, {"a": 0.5, "b": 0.5}, batch_size=4)
    weighted.extend(rows())
    plain.extend(rows(name))
    with pytest.raises(SchemaError, match=f"member 'a' stores the key '{name}', which the mixture adds"):
        mixed.sample()
