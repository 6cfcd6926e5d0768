"""The leaves of a batch are contiguous tensors, each with memory of its own, whichever way the batch is made."""

from __future__ import annotations

import io

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer, RolloutBuffer
from rlbuf_td.kernels.batch import LeafMemory
from rlbuf_td.kernels.batch.memory import _empty
from tests.catalogue import SAMPLERS

CAPACITY, BATCH = 100, 16
CPU = torch.device("cpu")


def rows(count: int) -> TensorDict:
    flags = {"done": torch.zeros(count, 1, dtype=torch.bool)}
    after = {"observation": torch.rand(count, 3), "reward": torch.rand(count, 1), "achieved_goal": torch.rand(count, 2)}
    image = torch.randint(256, (count, 2, 84, 84), dtype=torch.uint8)
    now = {"observation": torch.rand(count, 3), "desired_goal": torch.rand(count, 2), "image": image}
    return TensorDict(now | {"next": after | flags}, [count])


@pytest.fixture(params=["plain", "shared memory", "observations once", "a file"])
def storage(request, tmp_path):
    scratch_dir = tmp_path if request.param == "a file" else None
    is_shared, once = request.param == "shared memory", request.param == "observations once"
    return PackedStorage(CAPACITY, shared=is_shared, share_next=once, scratch_dir=scratch_dir)


def assert_own_memory(data: TensorDictBase) -> None:
    for key, leaf in data.items(True, True):
        assert leaf.is_contiguous(), key
        assert leaf.untyped_storage().nbytes() == leaf.nbytes, key


@pytest.mark.parametrize("shape", [(), (0,), (5,), (5, 1), (1, 5), (5, 0, 3), (4, 3, 2), (256, 6_000)], ids=str)
def test_memory_is_allocated_as_torch_allocates_it(shape, monkeypatch):
    dtypes = [torch.bool, torch.uint8, torch.bfloat16, torch.int32, torch.float32, torch.complex128]
    memory = LeafMemory([(dtype, torch.Size(shape)) for dtype in dtypes])
    fast = memory.allocate()
    monkeypatch.setattr("rlbuf_td.kernels.batch.memory._empty_on_cpu", _empty)
    for dtype, *leaves in zip(dtypes, fast, memory.allocate(), strict=True):
        expected = torch.empty(shape, dtype=dtype)
        for leaf in leaves:
            assert (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) == (shape, expected.stride(), dtype, CPU)
            assert leaf.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
            assert not leaf.requires_grad
            leaf.copy_(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_leaf_of_a_batch_has_its_own_memory(storage, sampler):
    rb = ReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](CAPACITY), batch_size=BATCH)
    rb.extend(rows(60))
    for _ in range(3):  # the general path, then the plan
        batch = rb.sample()
        assert_own_memory(batch)
    reward = batch["next", "reward"]
    assert reward.view(-1).shape == (BATCH,)
    torch.save(reward, saved := io.BytesIO())
    assert saved.tell() < 4_000


def test_each_leaf_of_rows_read_by_index_has_its_own_memory(storage):
    rb = ReplayBuffer(storage=storage)
    rb.extend(rows(60))
    for data in (rb[torch.arange(5)], rb.storage.get([3, 4]), rb.last(5), rb.chronological()):
        assert_own_memory(data)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"transform": lambda batch: batch}])
def test_each_leaf_of_a_batch_drawn_ahead_has_its_own_memory(options):
    sampler = ProportionalSampler(CAPACITY)
    rb = ReplayBuffer(storage=PackedStorage(CAPACITY), sampler=sampler, batch_size=4, prefetch=2, **options)
    rb.extend(rows(60))
    for _ in range(5):
        assert_own_memory(rb.sample())
    rb.shutdown()


@pytest.mark.parametrize("scale", [None, "minibatch"])
@pytest.mark.parametrize("share_next", [False, True])
def test_each_leaf_of_a_minibatch_has_its_own_memory(share_next, scale):
    storage = PackedStorage(60, share_next=share_next)
    rollout = RolloutBuffer(60, batch_size=BATCH, storage=storage, epochs=2, normalize_advantage=scale)
    data = rows(60).set("state_value", torch.zeros(60, 1))
    data["next", "terminated"] = data["next", "done"] = torch.ones(60, 1, dtype=torch.bool)
    rollout.extend(data)
    for batch in rollout:
        assert_own_memory(batch)


@pytest.mark.parametrize("sampler", ["uniform", "unique"])
def test_leaves_of_a_batch_of_one_row_can_be_viewed_as_bytes(sampler):
    rb = ReplayBuffer(storage=PackedStorage(CAPACITY), sampler=SAMPLERS[sampler](CAPACITY), batch_size=1)
    rb.extend(rows(60))
    for batch in (rb.sample(), rb.sample()):
        assert batch["next", "reward"].view(torch.uint8).shape == (1, 4)
        assert batch["index"].view(torch.uint8).shape == (8,)
