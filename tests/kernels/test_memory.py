"""Memory of batches: each leaf has its own, which is used again only after nothing
refers to it; checks of tensors."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td import MinibatchSampler, PackedStorage, ReplayBuffer
from rlbuf_td.kernels.batch import LeafMemory, cpu
from rlbuf_td.kernels.batch.memory import _empty
from rlbuf_td.kernels.compiled import stream_bytes
from rlbuf_td.kernels.host_memory import HostTensors
from tests.catalogue import SAMPLERS, numbered_rows

IMAGES = [
    (torch.uint8, torch.Size([64, 4, 84, 84])),
    (torch.float32, torch.Size([64, 1])),
]


def images() -> torch.Tensor:
    return MEMORY.allocate()[0]


MEMORY = LeafMemory(IMAGES)


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    monkeypatch.setitem(globals(), "MEMORY", LeafMemory(IMAGES))


HOLDERS = {
    "tensor": lambda x: x,
    "view": lambda x: x[3:5],
    "reshaped": lambda x: x.flatten(),
    "array": lambda x: x.numpy(),
    "alias": lambda x: x.detach(),
    "data": lambda x: x.data,
    "storage": lambda x: x.untyped_storage(),
    "capsule": lambda x: x.__dlpack__(),
    "graph": lambda x: torch.ones(1, requires_grad=True) * x,
    "attribute": lambda x: torch.nn.Parameter(x, requires_grad=False),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_memory_in_use_is_not_given_out(hold):
    first = images()
    address = first.data_ptr()
    held = hold(first)
    del first
    others = [images() for _ in range(5)]
    assert address not in [other.data_ptr() for other in others]
    assert held is not None


def test_free_memory_is_given_out_again():
    addresses = set()
    batch = images()
    for _ in range(4):
        following = images()  # while the caller still holds the batch before
        assert following.data_ptr() != batch.data_ptr()
        addresses |= {batch.data_ptr(), following.data_ptr()}
        batch = following
        del following
    assert len(addresses) == 2


def test_memory_that_the_user_has_freed_is_not_given_out():
    images().untyped_storage().resize_(0)
    assert all(images().untyped_storage().nbytes() > 0 for _ in range(5))


def test_each_tensor_has_its_own_version_counter():
    first = images()
    address = first.data_ptr()
    first.fill_(1)
    assert first._version == 1
    del first
    second = images()
    assert second.data_ptr() == address
    assert second._version == 0


def test_shared_memory_is_not_given_out_again():
    first = images().share_memory_()
    address = first.data_ptr()
    del first
    assert all(images().data_ptr() != address for _ in range(3))
    assert not images().is_shared()


def test_inference_mode_leaves_no_memory_behind():
    with torch.inference_mode():
        assert images().is_inference()
    batch = images()
    assert not batch.is_inference()
    with torch.inference_mode():
        inside = images()
    assert inside.data_ptr() != batch.data_ptr()


def test_threads_never_get_the_same_memory():
    barrier, addresses, counts = threading.Barrier(4), [0] * 4, []

    def work(place: int) -> None:
        for _ in range(100):
            batch = images()
            addresses[place] = batch.data_ptr()
            barrier.wait(60)  # all four batches are alive
            if place == 0:
                counts.append(len({*addresses}))
            barrier.wait(60)
            del batch

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert counts == [4] * 100


UNLIKE = {
    "dtype": lambda: torch.rand(17).double(),
    "shape": lambda: torch.rand(16),
    "dims": lambda: torch.rand(17, 1),
    "device": lambda: torch.rand(17, device="meta"),
    "strides": lambda: torch.rand(34)[::2],
    "expanded": lambda: torch.rand(1).expand(17),
    "negated": lambda: torch._neg_view(torch.rand(17)),
    "sparse": lambda: torch.rand(17).to_sparse(),
    "class": lambda: torch.nn.Parameter(torch.rand(17)),
    "no tensor": lambda: None,
    "number": lambda: 3.0,
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_check_tells_tensors_from_others(kind):
    expected = HostTensors(
        [(torch.float32, torch.Size([17])), (torch.bool, torch.Size([2]))]
    )
    flags = torch.ones(2, dtype=torch.bool)
    for numbers in (torch.rand(17), torch.rand(40)[3:20]):
        assert expected.addresses([numbers, flags]) == [
            numbers.data_ptr(),
            flags.data_ptr(),
        ]
    assert expected.addresses([UNLIKE[kind](), flags]) is None


def test_one_tensor_may_stand_for_several_leaves():
    entry = (torch.float32, torch.Size([17]))
    expected, both, other = HostTensors([entry, entry]), torch.rand(17), torch.rand(17)
    for given in ([both, other], [both, both], [other, both], [both, both]):
        assert expected.addresses(given) == [each.data_ptr() for each in given]
    assert expected.addresses([both, torch.rand(16)]) is None
    assert expected.addresses([both]) is None


CAPACITY, BATCH = 100, 16
CPU = torch.device("cpu")


def rows() -> TensorDict:
    """Return 60 rows with large and small leaves."""
    pixels = torch.randint(256, (60, 2, 84, 84), dtype=torch.uint8)
    return numbered_rows(60).set("pixels", pixels)


@pytest.fixture(params=["plain", "shared memory", "observations once", "a file"])
def storage(request, tmp_path):
    scratch_dir = tmp_path if request.param == "a file" else None
    is_shared, once = (
        request.param == "shared memory",
        request.param == "observations once",
    )
    return PackedStorage(
        CAPACITY, shared=is_shared, share_next=once, scratch_dir=scratch_dir
    )


def assert_own_memory(data: TensorDictBase) -> None:
    for key, leaf in data.items(True, True):
        assert leaf.is_contiguous(), key
        assert leaf.untyped_storage().nbytes() == leaf.nbytes, key


@pytest.mark.parametrize("shape", [(), (0,), (5, 0, 3), (4, 3, 2)], ids=str)
def test_without_torchs_private_function_memory_is_allocated_as_torch_does(
    shape, monkeypatch
):
    dtypes = torch.bool, torch.bfloat16, torch.complex128
    memory = LeafMemory([(dtype, torch.Size(shape)) for dtype in dtypes])
    monkeypatch.setattr("rlbuf_td.kernels.batch.memory._empty_on_cpu", _empty)
    for leaf, dtype in zip(memory.allocate(), dtypes, strict=True):
        expected = torch.empty(shape, dtype=dtype)
        assert (leaf.shape, leaf.stride()) == (shape, expected.stride())
        assert (leaf.dtype, leaf.nbytes) == (dtype, expected.nbytes)
        assert_own_memory(TensorDict({"leaf": leaf}))


@pytest.mark.parametrize("sampler", ["minibatch", "n-step over hindsight", "windows"])
def test_each_leaf_of_a_batch_has_its_own_memory(storage, sampler):
    rb = ReplayBuffer(
        storage=storage, sampler=SAMPLERS[sampler](CAPACITY), batch_size=BATCH
    )
    rb.extend(rows())
    for _ in range(3):  # the general path, then the plan
        batch = rb.sample()
        assert_own_memory(batch)
    reward = batch["next", "reward"]
    assert reward.view(-1).shape == (BATCH,)
    torch.save(reward, saved := io.BytesIO())
    assert saved.tell() < 4_000


def test_each_leaf_of_rows_read_by_index_has_its_own_memory(storage):
    rb = ReplayBuffer(storage=storage)
    rb.extend(rows())
    for data in (
        rb[torch.arange(5)],
        rb.storage.get([3, 4]),
        rb.last(5),
        rb.chronological(),
    ):
        assert_own_memory(data)


# -- copies that bypass the processor's caches


CELLS = 700


@pytest.mark.parametrize("offset", [0, 1, 31, 32, 63])
def test_streams_copy_exactly_the_given_bytes(offset):
    source, target = torch.randint(1, 256, (2, 400), dtype=torch.uint8)
    for count in [*range(70), 127, 128, 129, 200]:
        before, left = target.clone(), -target.data_ptr() % 64
        stream_bytes(target.data_ptr() + left + offset, source.data_ptr() + 3, count)
        before[left + offset :][:count] = source[3:][:count]
        assert target.equal(before)
        target.random_()


def images_from(start: int, count: int) -> TensorDict:
    values = torch.arange(start, start + count).view(-1, 1)
    leaves = {
        f"{width}": (values * 7 + torch.arange(width)).to(torch.uint8)
        for width in (1, 1_023, 1_024, 1_030, 30_000)
    }
    return TensorDict({"row": values, **leaves}, [count])


def test_batches_and_writes_beyond_the_caches_keep_every_byte():
    rb = ReplayBuffer(
        storage=PackedStorage(CELLS), sampler=MinibatchSampler(), batch_size=600
    )
    for start in range(0, 1_200, 120):  # 3.6 MiB each; the ring wraps around
        rb.extend(images_from(start, 120))
    rows, width = rb.storage.rows, rb.storage.rows.matrix.shape[-1]
    # batches, and writes to a storage of this size, are streamed
    assert 600 * width > cpu._STREAMED
    assert rows.layout.extents[:, 1].max() == 30_000
    batch = rb.sample()
    for row, index in zip(batch["row"], batch["index"], strict=True):
        assert index == row % CELLS
        assert row >= 500
    written: Any = torch.cat([images_from(int(row), 1) for row in batch["row"]])
    for key, leaf in written.items():
        assert leaf.equal(batch[key]), key
    assert rb[:].get("30000").equal(images_from(0, 1_200)["30000"][rb[:]["row"][:, 0]])
