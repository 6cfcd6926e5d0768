"""Reads of batches: equal to single reads, independent of each other, and safe in threads."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage
from tests.catalogue import SCHEMAS, Schema, transitions

over_schemas = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)


def filled(data: TensorDict, capacity: int = 50) -> PackedStorage:
    storage = PackedStorage(capacity)
    storage.set(range(len(data)), data)
    return storage


def numbered(count: int) -> TensorDict:
    numbers = torch.arange(count)
    return TensorDict({"id": numbers, "next": {"square": (numbers * numbers).float()[:, None]}}, [count])


@over_schemas
def test_reads_of_changing_sizes_give_the_rows_at_the_index(schema: Schema) -> None:
    torch.manual_seed(0)
    data = transitions(schema, 40)
    storage = filled(data)
    for count in (1, 7, 7, 7, 3, 7, *[7] * 20, 0, 0, 1, 1, 1):
        index = torch.randint(-40, 40, (count,)) if count % 2 else torch.randint(40, (count,))
        for dtype in (torch.int64, torch.int32):
            batch = storage.get(index.to(dtype))
            assert batch.batch_size == data[index].batch_size
            assert (batch == data[index]).all()
            assert all(leaf.is_contiguous() for leaf in batch.values(True, True))


def test_batches_share_no_memory() -> None:
    storage = filled(numbered(40))
    index = torch.arange(8)
    batches = [storage.get(index) for _ in range(20)]
    for batch in batches[::2]:
        batch["id"].fill_(-1)
    assert all((batch["id"] == index).all() for batch in batches[1::2])
    assert len({batch["id"].untyped_storage().data_ptr() for batch in batches}) == 20
    assert (storage.get(index)["id"] == index).all()


def test_a_copy_of_the_rows_reads_into_batches_of_its_own() -> None:
    storage, index = filled(numbered(10)), torch.tensor([1, 2, 3])
    kept = [storage.get(index) for _ in range(3)]
    copied = copy.deepcopy(storage.rows)
    assert copied is not None
    for _ in range(4):
        assert copied.at_cells(index)["id"].tolist() == [1, 2, 3]
    assert all(batch["id"].tolist() == [1, 2, 3] for batch in kept)


def test_a_copy_of_deduplicated_rows_describes_its_own_memory() -> None:
    steps = torch.arange(41.0)[:, None].expand(41, 32)
    done = torch.zeros(40, 1, dtype=torch.bool)
    data = TensorDict({"observation": steps[:-1], "next": {"observation": steps[1:], "done": done}}, [40])
    storage = PackedStorage(40, share_next=True)
    storage.set(range(40), data)
    copied = copy.deepcopy(storage.rows)
    assert copied is not None
    assert copied.dedup is not None
    storage.set(range(40), data.clone().set("observation", -steps[:-1]).set(("next", "observation"), -steps[1:]))
    assert (copied.at_cells(torch.arange(40)) == data).all()


def test_rows_on_another_device_are_not_read_by_compiled_code() -> None:
    storage = PackedStorage(10, device="meta")
    storage.set(range(10), numbered(10))
    for _ in range(3):
        assert storage.gather(torch.arange(4)).batch_size == torch.Size([4])


def test_a_batch_that_was_read_in_inference_mode_can_be_changed() -> None:
    storage, index = filled(numbered(10)), torch.arange(4)
    storage.get(index)
    for _ in range(10):
        with torch.inference_mode():
            batch = storage.get(index)
        batch["next", "square"].requires_grad_()
        assert not batch["id"].is_inference()


def test_threads_that_read_batches_of_different_sizes_get_their_own_rows() -> None:
    storage = filled(numbered(1_000), 1_000)

    def read(seed: int) -> int:
        generator, wrong = torch.Generator().manual_seed(seed), 0
        for step in range(1_500):
            index = torch.randint(1_000, (64 if step // 5 % 2 else 16,), generator=generator)
            batch = storage.get(index)
            wrong += int((batch["id"] != index).sum() + (batch["next", "square"][:, 0] != index * index).sum())
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(4))) == [0] * 4
