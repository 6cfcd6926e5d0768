"""The index by example: what it is asked and told, which storages and writers it follows, what it refuses."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import NStepSampler, PackedStorage, ReplayBuffer, UniformSampler
from rlbuf_td.storages.trajectory_index import TrajectoryIndex


def steps(done: list[int], *, ids: list[int] | None = None, key: tuple[str, ...] = ("next", "done")) -> TensorDict:
    data = TensorDict({"x": torch.arange(len(done))}, [len(done)])
    data[key] = torch.tensor(done, dtype=torch.bool).unsqueeze(-1)
    if ids is not None:
        data["collector", "traj_ids"] = torch.tensor(ids)
    return data


def reach(index: TrajectoryIndex, rows: int) -> list[tuple[int, int, bool]]:
    found = index.reach(torch.arange(rows))
    return list(zip(*(part.tolist() for part in found), strict=True))


@pytest.mark.usefixtures("boundaries")
def test_rows_are_named_in_every_form(device):
    rb = ReplayBuffer(storage=PackedStorage(12, ndim=2, device=device))
    done = torch.tensor([[0, 1], [0, 0], [1, 0]], dtype=torch.bool)  # [T, E]
    rows = rb.extend(TensorDict({"next": {"done": done.T}}, [2, 3]))
    index = TrajectoryIndex.of(rb.storage)
    flat = torch.arange(6, device=device)
    t, e = flat // 2, flat % 2
    for form in (flat, (t, e), torch.stack([t, e], -1), rows, flat.int()):
        assert index.steps_back(form).tolist() == [0, 0, 1, 0, 2, 1]
        assert index.steps_ahead(form).tolist() == [2, 0, 1, 1, 0, 0]
        assert index.ended(form).tolist() == [True, True, True, False, True, False]
        assert index.length(form).tolist() == [3, 1, 3, 2, 3, 2]
    back, ahead, ended = index.reach(flat[:0])
    assert (back.shape, ahead.dtype, ended.dtype) == ((0,), torch.int64, torch.bool)
    assert back.device.type == device.type


def test_of_returns_the_index_that_is_there_and_one_more_for_other_keys():
    rb = ReplayBuffer(storage=PackedStorage(4))
    one = TrajectoryIndex.of(rb.storage)
    assert TrajectoryIndex.of(rb.storage, done_key=("next", "done"), traj_key=("collector", "traj_ids")) is one
    other = TrajectoryIndex.of(rb.storage, done_key="end", traj_key=None)
    assert other is not one
    assert TrajectoryIndex.of(rb.storage, done_key=("end",), traj_key=None) is other
    data = steps([0, 0, 1, 0], ids=[0, 1, 1, 1])
    data["end"] = torch.tensor([1, 0, 0, 0]).bool()
    rb.extend(data)
    assert [found[0] for found in reach(one, 4)] == [0, 0, 1, 0]
    assert [found[0] for found in reach(other, 4)] == [0, 0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int16])
def test_ids_alone_are_enough(dtype):
    rb = ReplayBuffer(storage=PackedStorage(6))
    index = TrajectoryIndex.of(rb.storage)
    for part in ([5, 5], [5, 7, 7]):
        rb.extend(TensorDict({"collector": {"traj_ids": torch.tensor(part, dtype=dtype)}}, [len(part)]))
    assert reach(index, 5) == [(0, 2, True), (1, 1, True), (2, 0, True), (0, 1, False), (1, 0, False)]


def test_a_large_random_ring_by_numpy():
    """A million rows, ten thousand trajectories: every row at once, against a cumulative count."""
    rng = np.random.default_rng(0)
    n, capacity = 1_300_001, 1_000_000
    done = rng.random(n) < 0.01
    rb = ReplayBuffer(storage=PackedStorage(capacity))
    index = TrajectoryIndex.of(rb.storage)
    for part in np.split(done, [1, 400_000, 999_999, 1_000_002]):
        rb.extend(TensorDict({"next": {"done": torch.from_numpy(part)}}, [len(part)]))
    kept = done[-capacity:]
    at = np.arange(capacity)
    first = np.maximum.accumulate(np.where(np.append(True, kept[:-1]), at, 0))
    last = np.minimum.accumulate(np.where(np.append(kept[:-1], True), at, capacity)[::-1])[::-1]
    rows = torch.from_numpy((at + n - capacity) % capacity)
    back, ahead, ended = index.reach(rows)
    assert np.array_equal(back.numpy(), at - first)
    assert np.array_equal(ahead.numpy(), last - at)
    assert np.array_equal(ended.numpy(), kept[last])
    assert 0 < index.nbytes < capacity / 2
    assert f"{index.nbytes:,} bytes" in repr(index)


@pytest.mark.parametrize("ndim", [1, 2])
def test_done_flags_that_are_edited_through_a_view_end_trajectories(ndim):
    rb = ReplayBuffer(
        storage=PackedStorage(64, ndim=ndim), sampler=NStepSampler(UniformSampler(), 3, 0.9), batch_size=64
    )
    shape = (64,) if ndim == 1 else (2, 32)
    after = {"reward": torch.ones(*shape, 1), "done": torch.zeros(*shape, 1, dtype=torch.bool)}
    rb.extend(TensorDict({"x": torch.zeros(shape), "next": after}, shape))
    rb.sample(), rb.sample()
    rb["next", "done"].fill_(True)
    assert rb.sample()["steps_to_next_obs"].eq(1).all()
    rb["next", "done"][:] = False
    assert rb.sample()["steps_to_next_obs"].max() == 3


@pytest.mark.parametrize("edits_before", [True, False])
@pytest.mark.parametrize("how", ["pickled", "shared", "moved"])
def test_an_edit_is_noticed_whatever_happens_to_the_rows_around_it(how, edits_before):
    rb = ReplayBuffer(storage=PackedStorage(8))
    rb.extend(steps([0] * 8))
    rb["next", "done"].fill_(True)
    assert reach(TrajectoryIndex.of(rb.storage), 8) == [(0, 0, True)] * 8
    if edits_before:
        rb["next", "done"].fill_(False)
    if how == "pickled":
        rb = pickle.loads(pickle.dumps(rb))
    elif how == "shared":
        rb.share()
    else:
        rb.storage[:]["x"].share_memory_()
    if not edits_before:
        rb["next", "done"].fill_(False)
    assert reach(TrajectoryIndex.of(rb.storage), 8) == [(j, 7 - j, False) for j in range(8)]
    rb.extend(steps([0]))
    assert reach(TrajectoryIndex.of(rb.storage), 8)[0] == (7, 0, False)
