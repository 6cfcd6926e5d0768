"""Batches that are copied to a device are those of a plain buffer, whatever torch's
defaults are; and batches that threads draw ahead.

``tests/test_lockstep.py`` compares batches, updates and loads of buffers with a device.
"""

from __future__ import annotations

import pickle
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.transforms import ObservationNorm, Transform

from rlbuf_td import (
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    QueueSampler,
    QueueWriter,
    ReplayBuffer,
    RolloutBuffer,
    RolloutWriter,
    UniformSampler,
)
from tests.catalogue import SAMPLERS, assert_same, buffer_of, numbered_rows
from tests.storages.test_sharing import elsewhere

STEPS, SIZE = 40, 12
QUEUE = QueueWriter()


def buffer(sampler: Any, ndim: int = 1, **parts: Any) -> Any:
    lanes = 3 * (ndim - 1)
    return buffer_of(STEPS, sampler, lanes, **{"batch_size": SIZE} | parts)


def write(rb: ReplayBuffer, n: int, first: int) -> None:
    rb.extend(numbered_rows(n, first, 3 * (rb.storage.ndim - 1)))


def filled(sampler: Any, ndim: int = 1, **parts: Any) -> Any:
    rb = buffer(sampler, ndim, **parts)
    write(rb, STEPS, 0)
    return rb


def update(rb: Any, batch: TensorDict) -> None:
    batch["td_error"] = (batch["next", "reward"] % 7 - 3).clone()
    rb.update_tensordict_priority(batch)


def priorities(rb: Any) -> torch.Tensor:
    return rb.parts.prioritized.priority(torch.arange(len(rb.storage)))


# -- on a device


@pytest.mark.parametrize("ndim", [1, 2])
def test_reports_sizes_and_transforms_equal_those_without_device(ndim):
    rb, plain = (
        filled(
            SAMPLERS["windows"](200),
            ndim,
            transform=ObservationNorm(loc=1.0, scale=0.5, in_keys=["desired_goal"]),
            device=device,
        )
        for device in ("cpu", None)
    )
    (batch, info), (expected, report) = (
        each.sample(return_info=True) for each in (rb, plain)
    )
    assert batch.device.type == "cpu"
    assert_same(batch, expected)
    assert info.keys() == report.keys()
    assert_same(rb.sample(8), plain.sample(8))
    bare = rb.sample(include_info=False)
    assert "index" not in bare
    assert_same(bare, plain.sample(include_info=False))


@pytest.mark.parametrize(("ndim", "ahead"), [(1, 2), (2, 0)])
def test_batches_and_reports_are_on_the_device_before_the_transforms(ndim, ahead):
    seen: set[str] = set()

    def note(batch: Any) -> Any:
        seen.add(batch.device.type)
        return batch

    sampler = ProportionalSampler(3 * STEPS)
    rb = filled(sampler, ndim, device="meta", prefetch=ahead, transform=note)
    batch, info = rb.sample(return_info=True)
    index = info["index"] if ndim == 2 else (info["index"],)
    report = (*index, info["priority_weight"], info["sampled_at"])
    for leaf in (*batch.values(True, True), *report):
        assert leaf.device.type == "meta"
    rb.shutdown()
    assert seen == {"meta"}


def test_rollouts_are_those_of_a_buffer_without_device():
    fed, plain = (
        RolloutBuffer(
            7,
            3,
            batch_size=5,
            epochs=2,
            normalize_advantage="minibatch",
            generator=torch.Generator(),
            **where,
        )
        for where in ({"device": "cpu", "storing_device": "cpu"}, {})
    )
    for first in (0, 7):
        rows = numbered_rows(7, first, 3)
        rows["state_value"] = torch.linspace(0, 1, 21).view(3, 7, 1)
        for rollout in (fed, plain):
            rollout.extend(rows)
            next(iter(rollout))  # given up
        for batch, expected in zip(fed, plain, strict=True):
            assert batch.device.type == "cpu"
            assert_same(batch, expected)


def test_a_dump_within_an_epoch_loses_no_row(tmp_path):
    def made() -> ReplayBuffer:
        wrapped = NStepSampler(MinibatchSampler(2), 1, 0.9)
        return buffer(wrapped, batch_size=7, device="cpu")

    rb, again = made(), made()
    write(rb, STEPS, 0)
    batches = iter(rb)
    seen = [next(batches)["x"] for _ in range(4)]
    rb.dumps(tmp_path)
    again.loads(tmp_path)
    for rest in (batches, again):
        rows = torch.cat([*seen, *(batch["x"] for batch in rest)])
        for epoch in rows.split(STEPS):
            assert epoch.sort().values.tolist() == [*range(STEPS)]


def test_a_forked_process_samples_the_shared_rows_by_itself():
    sampler = ProportionalSampler(STEPS)
    shared = partial(PackedStorage, shared=True)
    rb = filled(sampler, storage=shared, device="cpu", prefetch=2)
    rb.sample()

    def work() -> None:
        write(rb, 10, 1000)
        batch = rb.sample().set("td_error", torch.full((SIZE,), 6.0))
        rb.update_tensordict_priority(batch)
        rb.synchronize()

    elsewhere(work)
    assert (priorities(rb) == 6).any()
    for _ in range(3):
        batch = rb.sample()
    assert torch.equal(batch["x"], rb.storage["x"][batch["index"]])


# -- drawn ahead


def doubled(batch: Any) -> Any:
    return batch.set("twice", batch["x"] * 2)


@pytest.mark.parametrize(
    ("name", "ndim"),
    [("uniform", 1), ("proportional", 2), ("windows", 1), ("n-step", 2)],
)
def test_threads_draw_and_transform_whole_batches_ahead(name, ndim):
    seen: set[str] = set()

    def note(batch: Any) -> Any:
        seen.add(threading.current_thread().name.partition("-")[0])
        return doubled(batch)

    rb = filled(SAMPLERS[name](200), ndim, prefetch=3, transform=note)
    for step in range(9):
        batch = rb.sample()
        assert torch.equal(batch["twice"], 2 * batch["x"])
        if "relabeled" not in batch.keys():
            assert torch.equal(batch["desired_goal"][:, 0], -batch["x"].float())
        update(rb, batch)
        write(rb, 2, STEPS + 2 * step)
    assert seen == {"MainThread", "ThreadPoolExecutor"}
    rb.append_transform(lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rb.sample()
    rb.shutdown()


@pytest.mark.parametrize(
    ("name", "ndim"), [("uniform", 2), ("rank", 1), ("sequence", 1), ("unique", 1)]
)
def test_without_transforms_batches_are_those_of_a_buffer_without_prefetch(name, ndim):
    buffers = [filled(SAMPLERS[name](200), ndim, prefetch=ahead) for ahead in (0, 3)]
    for step in range(9):
        plain, ahead = (rb.sample() for rb in buffers)
        assert_same(ahead, plain)
        for rb, batch in zip(buffers, (plain, ahead), strict=True):
            update(rb, batch)
            write(rb, 3, STEPS + 3 * step)


class Increased(Transform):
    def forward(self, batch: Any) -> Any:
        return batch.set("twice", batch["twice"] + 1)


def replace_storage(rb: Any) -> None:
    rb.set_storage(PackedStorage(STEPS))
    write(rb, STEPS, 0)


#: ``tests/test_replaced_rows.py`` lists the calls after which the rows are others.
CHANGES: dict[str, Any] = {
    "sampler": lambda rb: rb.set_sampler(UniformSampler()),
    "storage": replace_storage,
    "append": lambda rb: rb.append_transform(Increased()),
    "insert": lambda rb: rb.insert_transform(1, Increased()),
}


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("change", CHANGES)
def test_no_batch_that_was_drawn_with_other_parts_is_served(change, device):
    sampler = ProportionalSampler(STEPS)
    rb = buffer(sampler, prefetch=3, transform=doubled, device=device)
    write(rb, STEPS, 1000)
    rb.sample(), rb.sample(), rb.sample()
    CHANGES[change](rb)
    is_increased = change in ("append", "insert")
    for _ in range(5):
        batch = rb.sample()
        assert (batch["twice"] == batch["x"] * 2 + is_increased).all()
        assert ("priority_weight" in batch) == (change != "sampler")
        assert ((batch["x"] >= 1000) == (change != "storage")).all()
    rb.shutdown()


SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "fewer": {"prefetch": 1, "transform": doubled},
    "as many, without the transform": {"prefetch": 3},
    "fewer, to a device": {"prefetch": 1, "device": "cpu"},
}


@pytest.mark.parametrize(
    ("way", "name"),
    [*(("state", name) for name in SETTINGS), ("dump", "fewer"), ("pickle", "none")],
)
def test_no_way_takes_batches_drawn_ahead_along(way, name, tmp_path):
    rb = filled(ProportionalSampler(STEPS), prefetch=3, transform=doubled)
    rb.sample()
    again = buffer(ProportionalSampler(STEPS), **SETTINGS[name])
    if way == "state":
        again.load_state_dict(rb.state_dict())
    elif way == "dump":
        rb.dumps(tmp_path)
        again.loads(tmp_path)
    else:
        again = pickle.loads(pickle.dumps(rb))
    for each in (rb, again):
        write(each, STEPS, 1000)
        assert (each.sample()["x"] >= 1000).all()
        each.shutdown()


LATE: dict[str, dict[str, Any]] = {
    "max_age=4": {"sampler": UniformSampler(max_age=4)},
    "the order of a MinibatchSampler": {
        "sampler": NStepSampler(MinibatchSampler(), 2, 0.9)
    },
    "the order of a QueueSampler": {"sampler": QueueSampler(QUEUE), "writer": QUEUE},
    "the newest rollout of a RolloutWriter": {"writer": RolloutWriter()},
    "the ratio of flow control": {"samples_per_insert": 1.0},
}


@pytest.mark.parametrize("kept", LATE)
def test_prefetch_refuses_what_decides_late_which_rows_to_draw(kept):
    with pytest.raises(ValueError, match=f"to keep {kept}: use .*prefetch=0"):
        ReplayBuffer(storage=PackedStorage(9), batch_size=4, prefetch=3, **LATE[kept])


def test_a_part_that_prefetch_refuses_leaves_the_part_before():
    rb = buffer(UniformSampler(), prefetch=3)
    sampler, writer = rb.sampler, rb.writer
    with pytest.raises(ValueError, match="RolloutWriter: use prefetch=0"):
        rb.set_writer(RolloutWriter())
    with pytest.raises(ValueError, match="max_age=4: use prefetch=0"):
        rb.set_sampler(NStepSampler(UniformSampler(max_age=4), 2, 0.9))
    assert rb.writer is writer
    assert rb.sampler is sampler


def test_a_batch_of_another_size_leaves_those_drawn_ahead():
    rb = filled(UniformSampler(), prefetch=2, transform=doubled)
    for size in (SIZE, 5, SIZE, 30, SIZE, SIZE):
        assert len(rb.sample(None if size == SIZE else size)) == size
    rb.shutdown()


# -- torch's defaults

#: Made before torch's defaults change.
ROWS = {ndim: numbered_rows(93, 0, 3 * (ndim - 1)) for ndim in (1, 2)}
ERRORS = torch.linspace(-2, 3, SIZE)


def life(name: str, ndim: int, path: Path) -> list[Any]:
    device = "cpu" if ndim == 2 else None  # with one, batches are prefetched
    rb, loaded = (buffer(SAMPLERS[name](200), ndim, device=device) for _ in range(2))
    seen: list[Any] = []
    for first in (0, 31, 62):
        seen.append(rb.extend(ROWS[ndim][..., first : first + 30]))
        seen.append(torch.as_tensor(rb.add(ROWS[ndim][..., first + 30]), device="cpu"))
        batch = rb.sample()
        seen.append(batch.clone())
        rb.update_tensordict_priority(batch.set("td_error", ERRORS.clone()))
    rb.dumps(path)
    loaded.loads(path)
    loaded.load_state_dict(rb.state_dict())
    return [*seen, loaded.sample(), loaded.chronological(), loaded.last(3)]


@pytest.mark.parametrize(
    ("name", "ndim"),
    [("unique", 1), ("rank", 1), ("minibatch", 2), ("windows", 1), ("strict", 2)],
)
def test_torchs_defaults_change_nothing(name, ndim, tmp_path):
    expected = life(name, ndim, tmp_path / "a")
    dtype = torch.get_default_dtype()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        found = life(name, ndim, tmp_path / "b")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)
