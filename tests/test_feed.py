"""Batches from the host to a device and priorities back: on CUDA by pinned memory, on the CPU by plain copies."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import RandomSampler

from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer, UniformSampler
from rlbuf_td.buffers.device.prefetch import DeviceFeed


def data(n: int, first: int = 0, lanes: tuple[int, ...] = ()) -> TensorDict:
    x = torch.arange(first, first + n).view(n, *[1] * len(lanes)).expand(n, *lanes)
    x = x * 10 + (torch.arange(lanes[0]) if lanes else 0)
    leaves: dict[str, Any] = {"x": x, "image": (x[..., None] % 251 + torch.arange(5)).to(torch.uint8)}
    return TensorDict(leaves | {"next": {"reward": x[..., None].float()}}, x.shape)


def buffer(sampler: Any, rows: int = 50) -> ReplayBuffer:
    rb = ReplayBuffer(storage=PackedStorage(50), sampler=sampler, batch_size=16)
    rb.extend(data(rows))
    return rb


def assert_rows(batch: Any) -> None:
    assert torch.equal(batch["next", "reward"], batch["x"][..., None].float())
    assert torch.equal(batch["image"].cpu(), (batch["x"].cpu()[..., None] % 251 + torch.arange(5)).to(torch.uint8))


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("sampler", [UniformSampler, lambda: ProportionalSampler(50), lambda: RankSampler(50)])
def test_batches_are_those_of_the_buffer(device, sampler, ahead):
    ours, theirs = buffer(sampler()), buffer(sampler())
    for rb in (ours, theirs):
        rb.set_rng(torch.Generator().manual_seed(7))
    feed, batches = ours.feed(device, ahead=ahead), []
    for _ in range(6):
        batch, expected = feed.sample(), theirs.sample()
        assert batch.device.type == device.type
        assert_rows(batch)
        assert batch.cpu().keys() == expected.keys()
        for key, leaf in expected.items(True, True):
            assert torch.equal(batch[key].cpu(), leaf), key
        batches.append((batch["x"], batch["x"].clone()))
    for leaf, before in batches:  # fresh memory: later batches have not changed it
        assert torch.equal(leaf, before)


def test_rows_of_lanes_come_with_their_coordinates(device):
    rb = ReplayBuffer(storage=PackedStorage(60, ndim=2), batch_size=16, dim_extend=0)
    rb.extend(data(20, lanes=(3,)))
    batch = next(iter(rb.feed(device)))
    assert_rows(batch)
    assert torch.equal(batch["x"], batch["index"] @ torch.tensor([10, 1], device=device))


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("cls", [ProportionalSampler, RankSampler])
def test_priorities_come_back_in_their_order(device, cls, ahead):
    rb = buffer(cls(50))
    feed, learned = rb.feed(device, ahead=ahead), [torch.ones(50, dtype=torch.float64)]
    for step in range(6):
        batch = feed.sample()
        batch["td_error"] = batch["x"].float()[:, None] + 1 + step
        feed.update_tensordict_priority(batch)
        rows = batch["index"].cpu()
        learned.append(learned[-1].index_put((rows,), rows.double() * 10 + 1 + step))
        assert torch.equal(rb.sampler.priority(torch.arange(50)), learned[max(0, len(learned) - 1 - ahead)])
    feed.flush()
    assert torch.equal(rb.sampler.priority(torch.arange(50)), learned[-1])


def test_a_batch_that_is_given_up_is_not_kept_alive(device):
    feed = buffer(UniformSampler()).feed(device)
    batch = feed.sample()
    index = weakref.ref(batch["index"])
    del batch
    gc.collect()
    assert index() is None


def test_rows_that_were_replaced_meanwhile_keep_their_priority(device):
    rb = buffer(ProportionalSampler(50))
    feed = rb.feed(device, batch_size=50)
    batch = feed.sample()
    rb.extend(data(20, first=50))
    batch["td_error"] = torch.full((50,), 5.0, device=device)
    feed.update_tensordict_priority(batch)
    feed.flush()
    rows = batch["index"].cpu()
    assert (rb.sampler.priority(rows) == torch.where(rows < 20, 1.0, 5.0)).all()
    assert rb.health()["stale_updates"] == (rows < 20).sum()


def test_shared_observations_come_whole(device):
    seen = torch.randn(301, 17)
    rb = ReplayBuffer(storage=PackedStorage(500, share_next=True), sampler=ProportionalSampler(500), batch_size=64)
    rb.extend(TensorDict({"observation": seen[:-1], "next": {"observation": seen[1:]}}, [300]))
    assert rb.storage.dedup is not None
    batch = rb.feed(device).sample().cpu()
    assert torch.equal(batch["observation"], seen[batch["index"]])
    assert torch.equal(batch["next", "observation"], seen[batch["index"] + 1])


def test_other_parts_of_the_buffer_begin_anew(device):
    rb = buffer(ProportionalSampler(50))
    feed = rb.feed(device, ahead=2)
    before = feed.sample()
    rb.set_sampler(UniformSampler())
    assert "priority_weight" not in feed.sample()
    rb.set_sampler(ProportionalSampler(50))
    rb.set_storage(PackedStorage(50))
    x = torch.arange(100, 150)
    rb.extend(TensorDict({"y": x, "next": {"y": x + 1, "z": x.int()}}, [50]))  # as many bytes, in other leaves
    for _ in range(4):
        batch = feed.sample().cpu()
        assert torch.equal(batch["next", "y"], batch["y"] + 1)
    before["td_error"] = torch.full((16,), 9.0, device=device)
    feed.update_tensordict_priority(before)
    feed.flush()
    assert (rb.sampler.priority(torch.arange(50)) == 1.0).all()
    rb.set_sampler(RandomSampler())
    with pytest.raises(TypeError, match="RandomSampler"):
        feed.sample()


def test_a_batch_size_may_change_between_batches(device):
    feed = buffer(UniformSampler()).feed(device, ahead=1)
    sizes = []
    for size in (16, 16, 4, 4, 30, 30, 30):
        feed.batch_size = size
        batch = feed.sample()
        assert_rows(batch)
        sizes.append(len(batch))
    assert sizes == [16, 16, 16, 4, 4, 30, 30]
    assert len(feed._slots) == (2 if device.type == "cuda" else 0)


def test_what_cannot_be_fed_is_refused():
    rb = buffer(UniformSampler())
    with pytest.raises(ValueError, match="ahead must be at least 0"):
        rb.feed("cpu", ahead=-1)
    with pytest.raises(ValueError, match="how many rows"):
        ReplayBuffer(storage=PackedStorage(5)).feed("cpu")
    with pytest.raises(TypeError, match="RandomSampler"):
        buffer(RandomSampler()).feed("cpu")
    rb = buffer(ProportionalSampler(50))
    feed = rb.feed("cpu")
    batch = feed.sample()
    with pytest.raises(KeyError, match="no 'td_error'"):
        feed.update_tensordict_priority(batch)
    foreign = rb.sample()
    foreign["td_error"] = torch.ones(16)
    with pytest.raises(KeyError, match="none of the last few"):
        feed.update_tensordict_priority(foreign)
    assert isinstance(feed, DeviceFeed)
