"""TorchRL's data sets over a buffer, read by the workers of a DataLoader."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from rlbuf_td import (
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RecencySampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from tests.features import needs
from tests.storages.test_sharing import elsewhere

WIDTH = 500


def rows(start: int, count: int) -> TensorDict:
    t = torch.arange(start, start + count)
    done = (t % 7 == 6)[:, None]
    after = {"reward": torch.ones(count, 1), "done": done, "terminated": done.clone()}
    return TensorDict(
        {"t": t, "x": t[:, None].expand(count, WIDTH).float().clone(), "next": after},
        [count],
    )


# as_dataset is of TorchRL's next release
def buffer(sampler: Any = None, capacity: int = 60, **kwargs: Any) -> Any:
    return ReplayBuffer(
        storage=PackedStorage(capacity, **kwargs),
        sampler=sampler or UniformSampler(),
        batch_size=8,
    )


def check(batch: TensorDict) -> None:
    assert (batch["x"] == batch["t"][:, None]).all()


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
    rb.extend(rows(0, 40))
    copied = PackedStorage.__new__(PackedStorage)
    copied.__setstate__(rb.storage.__getstate__() | {"_attached_entities_list": []})
    assert (copied[:] == rb.storage[:]).all()
    other = ReplayBuffer(storage=copied, batch_size=8)
    other.extend(rows(40, 10))
    assert len(other) == 50


@needs("data sets")
@pytest.mark.parametrize(
    ("form", "method"),
    [
        ({}, "fork"),
        ({}, "spawn"),
        ({"share_next": ["x"]}, "fork"),
        ({"scratch_dir": "rows"}, "fork"),
        ({"scratch_dir": "rows"}, "spawn"),
        ({"shared": True}, "fork"),
    ],
    ids=str,
)
def test_workers_read_each_row_once(
    form: dict[str, Any], method: str, tmp_path: Any
) -> None:
    rb = buffer(
        **{
            name: tmp_path / value if name == "scratch_dir" else value
            for name, value in form.items()
        }
    )
    data = rows(0, 40)
    if "share_next" in form:
        data["next", "x"] = data["x"] + 1
    rb.extend(data)
    rb.sample()
    batches = list(loader(rb.storage.as_dataset(), method, batch_size=4, shuffle=True))
    for batch in batches:
        check(batch)
    assert sorted(torch.cat([batch["t"] for batch in batches]).tolist()) == list(
        range(40)
    )


@needs("data sets")
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
    rb.extend(rows(0, 20))
    rb.sample()
    batches = loader(
        rb.as_dataset(num_batches=7), method, batch_size=None, persistent_workers=True
    )
    for written in (20, 40, 60):
        if written > 20:
            rb.extend(rows(written - 20, 20))
        found = list(batches)
        for batch in found:
            check(batch)
        assert len(found) == 7
        assert max(int(batch["t"].max()) for batch in found) >= written - 20
        check(rb.sample())


@needs("data sets")
def test_a_sampler_with_a_state_is_refused_in_workers() -> None:
    rb = buffer(ProportionalSampler(60))
    rb.extend(rows(0, 20))
    with pytest.raises(RuntimeError, match="ProportionalSampler keeps sampling state"):
        next(iter(loader(rb.as_dataset(), "fork", batch_size=None)))
    controlled = ReplayBuffer(storage=PackedStorage(60), batch_size=8, min_size=4)
    controlled.extend(rows(0, 20))
    with pytest.raises(RuntimeError, match="unless the buffer is shared"):
        next(iter(loader(controlled.as_dataset(), "fork", batch_size=None)))


def test_which_samplers_have_a_state() -> None:
    stateless = [
        UniformSampler(),
        RecencySampler(),
        NStepSampler(UniformSampler(), 2, 0.9),
    ]
    stateful = [
        ProportionalSampler(9),
        MinibatchSampler(),
    ]
    stateful.append(SequenceSampler(NStepSampler(ProportionalSampler(9), 2, 0.9), 4))
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
    elsewhere(rb.extend, rows(0, 20))
    check(rb.storage.get(torch.arange(20)))
