"""Writing: every kind of cursor and every form of data leaves the rows that a LazyTensorStorage would hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyTensorStorage

from rlbuf_td import PackedStorage
from tests.catalogue import SCHEMAS, Schema, assert_same, copied, transitions

over_schemas = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)
NESTED = SCHEMAS["nested"]
LANES = {1: (), 2: (2,), 3: (2, 3)}


def both(ndim: int, steps: int, capacity: int = 8) -> tuple[PackedStorage, LazyTensorStorage]:
    lanes = torch.Size(LANES[ndim])
    packed = PackedStorage(capacity * lanes.numel(), ndim=ndim)
    theirs = LazyTensorStorage(capacity * lanes.numel(), ndim=ndim)
    for storage in (packed, theirs):
        storage.set(slice(0, steps), transitions(NESTED, steps, lanes))
    return packed, theirs


@over_schemas
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_every_schema_is_stored_byte_for_byte(schema: Schema, ndim: int, device: torch.device) -> None:
    storage = PackedStorage(4 * torch.Size(LANES[ndim]).numel(), ndim=ndim, device=device)
    first, single, scattered = (
        transitions(schema, n, LANES[ndim], seed=seed, device=device) for n, seed in ((2, 0), (None, 1), (3, 2))
    )
    storage.set(range(2), first)
    storage.set(2, single)
    assert_same(storage[:], torch.cat([first, single[None]]))
    storage.set(torch.tensor([3, 0, 2]), scattered)
    assert_same(storage[:], torch.stack([scattered[1], first[1], scattered[2], scattered[0]]))
    storage.write(3, first)
    assert_same(storage[:], torch.stack([first[1], first[1], scattered[2], first[0]]))
    storage.write(1, single, single=True)
    assert_same(storage[1], single)


CURSORS: dict[str, tuple[Any, int | None]] = {
    "int": (4, None),
    "0-d tensor": (torch.tensor(4), None),
    "range": (range(4, 7), 3),
    "slice": (slice(4, 7), 3),
    "step slice": (slice(0, 3, 2), 2),
    "open slice": (slice(None), 8),
    "tensor": (torch.tensor([3, 0, 4]), 3),
    "list": ([4, 1, 5], 3),
    "unsigned array": (np.array([4, 1, 5], dtype=np.uint8), 3),
    "wrapped": (torch.tensor([6, 7, 0, 1, 4, 5]), 6),
}


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize(("cursor", "n"), CURSORS.values(), ids=CURSORS)
def test_a_cursor_along_time_writes_what_lazy_tensor_storage_writes(ndim: int, cursor: Any, n: int | None) -> None:
    packed, theirs = both(ndim, 4)
    data = transitions(NESTED, n, LANES[ndim], seed=5)
    packed.set(cursor, data)
    theirs.set(torch.from_numpy(cursor.astype(np.int64)) if isinstance(cursor, np.ndarray) else cursor, data)
    steps = np.r_[np.arange(8)[cursor if isinstance(cursor, slice) else np.asarray(cursor)]]
    written = max(4, int(steps.max()) + 1)
    assert len(packed) == written * torch.Size(LANES[ndim]).numel()
    assert_same(packed[:], theirs._storage[:written])
    assert packed._last_cursor_index == int(steps[-1])


REGIONS: dict[str, Any] = {
    "mask": torch.tensor([True, False, True, True]),
    "mask [T, E]": torch.tensor([[True, False], [False, False], [True, True], [False, True]]),
    "mask of none": torch.zeros(4, 2, dtype=torch.bool),
    "two ints": (1, 1),
    "two tensors": (torch.tensor([3, 0, -1]), torch.tensor([0, 1, 1])),
    "broadcast tensors": (torch.tensor([[3], [0]]), torch.tensor([0, 1])),
    "slice and tensor": (slice(1, 3), torch.tensor([1])),
    "tensor and slice": (torch.tensor([3, 1]), slice(None)),
    "Ellipsis and int": (Ellipsis, 0),
    "arrays": (np.array([0, 1]), np.array([1, 0])),
}


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_a_mask_or_a_tuple_replaces_what_lazy_tensor_storage_replaces(region: Any) -> None:
    packed, theirs = both(2, 4)
    shape = theirs[region].batch_size
    data = transitions(NESTED, None, shape, seed=6)
    packed.set(region, data)
    expected = copied(theirs[:])
    expected[region] = data
    assert_same(packed[:], expected)
    assert len(packed) == 8
    packed[region] = transitions(NESTED, None, shape, seed=7)
    expected[region] = transitions(NESTED, None, shape, seed=7)
    assert_same(packed[:], expected)


def test_of_a_repeated_position_the_last_row_stays() -> None:
    n = 100_000  # enough for torch to write in parallel, where it may write rows out of order
    steps = torch.randint(50, (n,), generator=torch.Generator().manual_seed(0))
    last = torch.full((50,), -1).scatter_reduce_(0, steps, torch.arange(n), "amax")
    data = TensorDict({"x": torch.arange(n), "y": torch.arange(n).byte()}, [n])
    line, grid = PackedStorage(50), PackedStorage(50, ndim=2)
    line.set(range(50), data[:50])
    line.set(steps, data)
    assert torch.equal(line["x"], last)
    assert torch.equal(line["y"], last.byte())
    grid.set(range(10), data[:50].view(10, 5))
    grid.set((steps // 5, steps % 5), data)
    assert torch.equal(grid["x"].flatten(), last)
    line.set(range(50), data[:50])
    line.set((steps,), data)
    assert torch.equal(line["x"], last)


def test_set_cursor_false_counts_no_rows_and_moves_no_cursor() -> None:
    packed, _ = both(1, 4)
    one = transitions(NESTED, 1, seed=8)
    before = copied(packed[:])
    for cursor in (5, range(6, 7), torch.tensor([7])):
        packed.set(cursor, one[0] if isinstance(cursor, int) else one, set_cursor=False)
    assert_same(packed[:], before)
    assert_same(packed._storage[5], one[0])
    packed[1] = one[0]
    packed[2:] = torch.cat([one, one])
    assert_same(packed[:], torch.cat([before[:1], one, one, one]))
    assert (len(packed), packed._last_cursor_index) == (4, 3)


def test_every_write_raises_the_revision_that_caches_look_at() -> None:
    packed, _ = both(1, 4)
    one = transitions(NESTED, 1, seed=8)
    for write in (
        lambda: packed.set(2, one[0]),
        lambda: packed.set([2], one),
        lambda: packed.set((2,), one[0]),
        lambda: packed.set(5, one[0], set_cursor=False),
        lambda: packed.write(4, one),
        packed._empty,
    ):
        revision = packed._mutation_revision
        write()
        assert packed._mutation_revision == revision + 1


@pytest.mark.parametrize(("ndim", "max_size", "lanes", "steps"), [(1, 7, (), 7), (2, 7, (2,), 4), (3, 25, (2, 3), 5)])
def test_the_capacity_is_rounded_up_to_whole_time_steps(ndim, max_size, lanes, steps):
    packed, theirs = PackedStorage(max_size, ndim=ndim), LazyTensorStorage(max_size, ndim=ndim)
    data = transitions(NESTED, 2, lanes)
    for given in ({"batched_data": data}, {"single_data": data[0]}):
        assert packed._max_size_along_dim0(**given) == theirs._max_size_along_dim0(**given) == steps
    for storage in (packed, theirs):
        storage.set(slice(0, 2), data)
        assert storage._max_size_along_dim0() == steps
    assert packed.max_size == theirs.max_size == steps * torch.Size(lanes).numel()


def forms(data: TensorDict) -> dict[str, Any]:
    wide = TensorDict({"all": data.expand(2, 3).transpose(0, 1).contiguous()}, [3])["all"]
    strided = data.apply(lambda leaf: torch.stack([leaf, leaf], -1)[..., 0])
    named = copied(data)
    named.names = ["time"]
    return {
        "list": list(data.unbind(0)),
        "lazy stack": lazy_stack(list(data.unbind(0))),
        "lazy stack below the root": TensorDict(
            {key: lazy_stack(list(value)) if key == "next" else value for key, value in data.items()}, [3]
        ),
        "locked": copied(data).lock_(),
        "not contiguous": strided,
        "transposed": wide.transpose(0, 1)[0],
        "named dims": named,
        "memory-mapped": data.memmap(),
        "consolidated": data.clone().consolidate(),
    }


@pytest.mark.parametrize("name", forms(transitions(NESTED, 3)))
@pytest.mark.parametrize("again", [False, True], ids=["first write", "later write"])
def test_data_of_any_form_is_stored(name: str, again: bool) -> None:
    data = transitions(NESTED, 3, seed=4)
    storage = PackedStorage(5)
    if again:
        storage.set(range(3), transitions(NESTED, 3))
    given = forms(data)[name]
    storage.set(range(3), given)
    assert_same(storage[:], data)
    storage.set(torch.tensor([2, 1, 0]), given)
    assert_same(storage[:], data.flip(0) if hasattr(data, "flip") else data[torch.tensor([2, 1, 0])])
    storage.write(2, given)
    assert_same(storage[torch.tensor([2, 3, 4])], data)


@pytest.mark.parametrize("cursor", [range(3), torch.tensor([2, 0, 1]), (torch.arange(3),)], ids=str)
def test_data_that_requires_grad_is_stored_without_its_history(cursor: Any) -> None:
    x = torch.rand(3, 2, requires_grad=True)
    data = TensorDict({"x": x * 2, "y": x}, [3])
    storage = PackedStorage(5)
    storage.set(range(3), data)
    assert not storage["x"].requires_grad
    assert torch.equal(storage["x"], 2 * x.detach())
    storage.set(range(3), torch.zeros_like(data.detach()))
    storage.set(cursor, data)
    for value in (storage["x"], storage[0]["y"], storage[torch.tensor([0])]["x"]):
        assert not value.requires_grad
    assert data["x"].requires_grad
    storage.write(2, data)
    assert not storage._storage.requires_grad


def test_an_index_in_the_data_is_not_stored() -> None:
    data = transitions(NESTED, 3)
    marked = copied(data).set("index", torch.arange(3))
    storage = PackedStorage(5)
    storage.write(0, marked)
    storage.set(range(3), marked)
    assert_same(storage[:], data)
    first = PackedStorage(5)
    first.set(range(3), marked)
    first.write(3, marked[:2])
    assert_same(first[:3], data)


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("source", [slice(0, 4), slice(1, 5), slice(2, 3), slice(0, 6)])
@pytest.mark.parametrize("ndim", [1, 2])
def test_views_of_the_rows_may_be_written_to_them(ndim: int, source: slice, start: int) -> None:
    storage = PackedStorage(6 * torch.Size(LANES[ndim]).numel(), ndim=ndim)
    storage.set(range(6), transitions(NESTED, 6, LANES[ndim]))
    expected, view = storage[:].clone(), storage[source]
    steps = (start + torch.arange(len(view))) % 6
    expected[steps] = view.clone()
    storage.write(start, view)
    assert_same(storage[:], expected)
