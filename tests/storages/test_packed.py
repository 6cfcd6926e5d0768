"""PackedStorage: each index and cursor, each form of data, gives what TorchRL's
LazyTensorStorage gives; its rows."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import LazyMemmapStorage

from rlbuf_td import PackedStorage
from rlbuf_td.storages.memory import ROWS_FILE
from rlbuf_td.storages.writes import Write
from tests.catalogue import SCHEMAS, Schema, assert_same, copied, transitions

over_schemas = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)
NESTED = SCHEMAS["nested"]
STEPS = 7
LANES = {1: (), 2: (3,), 3: (3, 2)}


def filled(
    ndim: int, full: bool, schema: Schema, device: Any = "cpu"
) -> tuple[PackedStorage, LazyTensorStorage]:
    lanes = LANES[ndim]
    capacity = (STEPS if full else STEPS + 3) * torch.Size(lanes).numel()
    data = transitions(schema, STEPS, lanes, device=device)
    packed = PackedStorage(capacity, ndim=ndim, device=device)
    theirs = LazyTensorStorage(capacity, ndim=ndim, device=device)
    packed.set(range(STEPS), data)
    # a slice, for torch cannot write uint16 at a tensor of positions
    theirs.set(slice(0, STEPS), data)
    assert len(packed) == len(theirs) == STEPS * torch.Size(lanes).numel()
    return packed, theirs


read_only = cache(filled)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4


ALONG_TIME: dict[str, Any] = {
    "int": 3,
    "last": -1,
    "0-d tensor": torch.tensor(4),
    "0-d array": np.array(4),
    "slice": slice(1, 5),
    "everything": slice(None),
    "Ellipsis": Ellipsis,
    "None": None,
    "slice beyond the end": slice(5, 100),
    "empty slice": slice(3, 3),
    "tensor": torch.tensor([6, 0, 3, 3]),
    "negative tensor": torch.tensor([-1, 0, -7]),
    "empty tensor": torch.zeros(0, dtype=torch.int64),
    "2-d tensor": torch.tensor([[0, 1, 2], [3, 4, -1]]),
    "int32": torch.tensor([[1], [-2]], dtype=torch.int32),
    "strided tensor": torch.arange(7)[::2],
    "list": [0, 5, -1],
    "empty list": [],
    "list of bools": [True, False, True, False, False, False, True],
    "range": range(1, 6, 2),
    "reversed range": range(5, 0, -2),
    "array": np.array([4, 0, -2]),
    "uint16 array": np.array([4, 0], dtype=np.uint16),
    "empty array": np.array([], dtype=np.int64),
    "mask": mask(STEPS),
    "mask of none": torch.zeros(STEPS, dtype=torch.bool),
    "array mask": mask(STEPS).numpy(),
    "tuple of int": (2,),
    "tuple of tensor": (torch.tensor([2, 3]),),
    "tuple of mask": (mask(STEPS),),
    "None and int": (None, 1),
}
OVER_LANES: dict[str, Any] = {
    "mask [T, E]": mask(STEPS, 3),
    "array mask [T, E]": mask(STEPS, 3).numpy(),
    "two ints": (2, 1),
    "two tensors": (torch.tensor([0, 6, -1]), torch.tensor([2, -1, 0])),
    "two tensors, broadcast": (torch.tensor([[0], [6]]), torch.tensor([2, 1, 0])),
    "two empty tensors": (
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
    ),
    "two lists": ([0, 1, 2], [2, 1, 0]),
    "tensor and int": (torch.tensor([1, 2]), 1),
    "slice and int": (slice(1, 4), 2),
    "slice and tensor": (slice(None), torch.tensor([1, 2])),
    "Ellipsis and int": (Ellipsis, 1),
    "mask and tensor": (torch.arange(STEPS) > 4, torch.tensor([1, 2])),
}
OVER_THREE: dict[str, Any] = {
    "mask [T, E, A]": mask(STEPS, 3, 2),
    "mask [T, E]": mask(STEPS, 3),
    "three ints": (1, 2, 0),
    "three tensors": (
        torch.tensor([1, -1]),
        torch.tensor([2, 0]),
        torch.tensor([-1, 0]),
    ),
    "two of three tensors": (torch.tensor([1, -1]), torch.tensor([2, 0])),
}
CASES = [
    *((1, name, index) for name, index in ALONG_TIME.items()),
    *((2, name, index) for name, index in (ALONG_TIME | OVER_LANES).items()),
    *((3, name, index) for name, index in (ALONG_TIME | OVER_THREE).items()),
]


def is_fresh(index: Any) -> bool | None:
    """Return whether a batch at this index has memory of its own; None: as torch has
    it."""
    if isinstance(index, torch.Tensor | list | range | np.ndarray) and np.ndim(index):
        return True
    return False if isinstance(index, int | slice) else None


@pytest.mark.parametrize("full", [False, True], ids=["filling", "full"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_an_index_gives_what_lazy_tensor_storage_gives(
    ndim: int, full: bool, device: torch.device
) -> None:
    packed, theirs = read_only(ndim, full, SCHEMAS["nested"], device)
    for name, index in (case[1:] for case in CASES if case[0] == ndim):
        found = packed.get(index)
        assert_same(found, theirs.get(index))
        assert_same(packed[index], theirs[index])
        places = [
            rows["first"].untyped_storage().data_ptr() for rows in (found, packed[:])
        ]
        assert is_fresh(index) in (None, places[0] != places[1]), name


def test_positions_of_any_width_are_taken() -> None:
    packed, _ = read_only(2, False, SCHEMAS["nested"])
    steps, lanes = torch.tensor([1, -2, 6]), torch.tensor([0, -1, 2])
    for dtype in (torch.int8, torch.int16):  # torch itself takes none of these
        assert_same(packed[steps.to(dtype)], packed[steps])
        assert_same(packed[steps.to(dtype), lanes.to(dtype)], packed[steps, lanes])
    assert_same(packed[np.array([3, 1], dtype=np.uint8)], packed[[3, 1]])


@over_schemas
def test_a_key_gives_a_column_as_a_strided_view(schema: Schema) -> None:
    packed, theirs = filled(1, False, schema)
    for key in packed[:].keys(True):
        column = packed[key]
        assert_same(column, theirs[key])
        if isinstance(column, torch.Tensor) and column.numel():
            assert column.untyped_storage().nbytes() == packed.nbytes
            assert column.stride(0) * column.element_size() == packed.row_bytes


def test_an_emptied_storage_has_no_rows_but_keeps_its_schema() -> None:
    packed, _ = filled(1, True, SCHEMAS["vector"])
    packed._empty()
    assert len(packed) == 0
    assert (
        packed[:].batch_size
        == packed[[]].batch_size
        == packed[torch.zeros(0, dtype=torch.int64)].batch_size
        == (0,)
    )
    assert packed["observation"].shape == (0, 3)


def test_an_empty_first_write_fixes_no_schema() -> None:
    storage = PackedStorage(6)
    with pytest.raises(ValueError, match="at least one transition, got none"):
        storage.advance(Write(TensorDict({"x": torch.zeros(0, 3)}, [0])))
    write = Write(TensorDict({"y": torch.zeros(2)}, [2]))
    assert storage.advance(write).tolist() == [0, 1]


def test_the_repr_tells_rows_bytes_place_and_columns() -> None:
    packed, _ = filled(2, False, SCHEMAS["vector"])
    assert (
        repr(PackedStorage(5)) == "PackedStorage(max_size=5, ndim=1, device=cpu, empty)"
    )
    for part in (
        "21 of 30 rows",
        "shape (10, 3)",
        "24 bytes per row",
        "cpu",
        "'observation': float32 (3,)",
        "'done': bool",
    ):
        assert part in repr(packed)


LANES_OF = {1: (), 2: (2,), 3: (2, 3)}


def both(
    ndim: int, steps: int, capacity: int = 8
) -> tuple[PackedStorage, LazyTensorStorage]:
    lanes = torch.Size(LANES_OF[ndim])
    packed = PackedStorage(capacity * lanes.numel(), ndim=ndim)
    theirs = LazyTensorStorage(capacity * lanes.numel(), ndim=ndim)
    for storage in (packed, theirs):
        storage.set(slice(0, steps), transitions(NESTED, steps, lanes))
    return packed, theirs


@over_schemas
@pytest.mark.parametrize("ndim", [1, 3])
def test_every_schema_is_stored_byte_for_byte(
    schema: Schema, ndim: int, device: torch.device
) -> None:
    storage = PackedStorage(
        4 * torch.Size(LANES_OF[ndim]).numel(), ndim=ndim, device=device
    )
    first, single, scattered = (
        transitions(schema, n, LANES_OF[ndim], seed=seed, device=device)
        for n, seed in ((2, 0), (None, 1), (3, 2))
    )
    storage.set(range(2), first)
    storage.set(2, single)
    assert_same(storage[:], torch.cat([first, single[None]]))
    storage.set(torch.tensor([3, 0, 2]), scattered)
    assert_same(
        storage[:], torch.stack([scattered[1], first[1], scattered[2], scattered[0]])
    )
    storage.set(torch.tensor([3, 0]), first)
    assert_same(storage[:], torch.stack([first[1], first[1], scattered[2], first[0]]))
    storage.set(1, single)
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
def test_a_cursor_along_time_writes_what_lazy_tensor_storage_writes(
    ndim: int, cursor: Any, n: int | None
) -> None:
    packed, theirs = both(ndim, 4)
    data = transitions(NESTED, n, LANES_OF[ndim], seed=5)
    packed.set(cursor, data)
    theirs.set(
        torch.from_numpy(cursor.astype(np.int64))
        if isinstance(cursor, np.ndarray)
        else cursor,
        data,
    )
    steps = np.r_[
        np.arange(8)[cursor if isinstance(cursor, slice) else np.asarray(cursor)]
    ]
    written = max(4, int(steps.max()) + 1)
    assert len(packed) == written * torch.Size(LANES_OF[ndim]).numel()
    assert_same(packed[:], theirs._storage[:written])
    packed.check()


REGIONS: dict[str, Any] = {
    "mask": torch.tensor([True, False, True, True]),
    "mask [T, E]": torch.tensor(
        [[True, False], [False, False], [True, True], [False, True]]
    ),
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
def test_a_mask_or_a_tuple_replaces_what_lazy_tensor_storage_replaces(
    region: Any,
) -> None:
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
    # enough for torch to write in parallel, where it may write rows out of order
    n = 100_000
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


@pytest.mark.parametrize(
    ("ndim", "max_size", "lanes", "steps"),
    [(1, 7, (), 7), (2, 7, (2,), 4), (3, 25, (2, 3), 5)],
)
def test_the_capacity_is_rounded_up_to_whole_time_steps(ndim, max_size, lanes, steps):
    packed, theirs = (
        PackedStorage(max_size, ndim=ndim),
        LazyTensorStorage(max_size, ndim=ndim),
    )
    data = transitions(NESTED, 2, lanes)
    for given in ({"batched_data": data}, {"single_data": data[0]}):
        assert (
            packed._max_size_along_dim0(**given)
            == theirs._max_size_along_dim0(**given)
            == steps
        )
    for storage in (packed, theirs):
        storage.set(slice(0, 2), data)
        assert storage._max_size_along_dim0() == steps
    assert packed.max_size == theirs.max_size == steps * torch.Size(lanes).numel()


def forms(data: TensorDict) -> dict[str, Any]:
    wide = TensorDict({"all": data.expand(2, 3).transpose(0, 1).contiguous()}, [3])[
        "all"
    ]
    strided = data.apply(lambda leaf: torch.stack([leaf, leaf], -1)[..., 0])
    named = copied(data)
    named.names = ["time"]
    return {
        "list": list(data.unbind(0)),
        "lazy stack": lazy_stack(list(data.unbind(0))),
        "lazy stack below the root": TensorDict(
            {
                key: lazy_stack(list(value)) if key == "next" else value
                for key, value in data.items()
            },
            [3],
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
    assert_same(
        storage[:],
        data.flip(0) if hasattr(data, "flip") else data[torch.tensor([2, 1, 0])],
    )
    storage.set(range(2, 5), given)
    assert_same(storage[torch.tensor([2, 3, 4])], data)


@pytest.mark.parametrize(
    "cursor", [range(3), torch.tensor([2, 0, 1]), (torch.arange(3),)], ids=str
)
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
    storage.set(range(2, 5), data)
    assert not storage._storage.requires_grad


def test_an_index_in_the_data_is_not_stored() -> None:
    data = transitions(NESTED, 3)
    marked = copied(data).set("index", torch.arange(3))
    storage = PackedStorage(5)
    storage.set(range(3), marked)
    assert_same(storage[:], data)
    first = PackedStorage(5)
    first.set(range(3), marked)
    first.set(range(3, 5), marked[:2])
    assert_same(first[:3], data)


@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("source", [slice(0, 4), slice(1, 5), slice(0, 6)])
@pytest.mark.parametrize("ndim", [1, 2])
def test_views_of_the_rows_may_be_written_to_them(
    ndim: int, source: slice, start: int
) -> None:
    storage = PackedStorage(6 * torch.Size(LANES_OF[ndim]).numel(), ndim=ndim)
    storage.set(range(6), transitions(NESTED, 6, LANES_OF[ndim]))
    expected, view = storage[:].clone(), storage[source]
    steps = (start + torch.arange(len(view))) % 6
    expected[steps] = view.clone()
    storage.set(steps, view)
    assert_same(storage[:], expected)


def holding(data: TensorDict, capacity: int = 50) -> PackedStorage:
    storage = PackedStorage(capacity)
    storage.set(range(len(data)), data)
    return storage


def numbered(count: int) -> TensorDict:
    numbers = torch.arange(count)
    return TensorDict(
        {"id": numbers, "next": {"square": (numbers * numbers).float()[:, None]}},
        [count],
    )


def test_a_batch_that_was_read_in_inference_mode_can_be_changed() -> None:
    storage, index = holding(numbered(10)), torch.arange(4)
    storage.get(index)
    for _ in range(10):
        with torch.inference_mode():
            batch = storage.get(index)
        batch["next", "square"].requires_grad_()
        assert not batch["id"].is_inference()


def test_threads_that_read_batches_of_different_sizes_get_their_own_rows() -> None:
    storage = holding(numbered(1_000), 1_000)

    def read(seed: int) -> int:
        generator, wrong = torch.Generator().manual_seed(seed), 0
        for step in range(500):
            index = torch.randint(
                1_000, (64 if step // 5 % 2 else 16,), generator=generator
            )
            batch = storage.get(index)
            wrong += int(
                (batch["id"] != index).sum()
                + (batch["next", "square"][:, 0] != index * index).sum()
            )
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(4))) == [0] * 4


def test_a_file_of_rows_is_replaced_and_deleted_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    first = PackedStorage(5, scratch_dir=folder)
    first.set(range(5), transitions(NESTED, 5))
    before = first[:].clone()
    with pytest.raises(FileExistsError, match="already holds rows"):
        PackedStorage(5, scratch_dir=folder, auto_cleanup=True).set(
            range(3), transitions(NESTED, 3)
        )
    # which is not that of the storage that was refused
    assert (folder / ROWS_FILE).exists()
    second = PackedStorage(5, scratch_dir=folder, existsok=True, auto_cleanup=True)
    second.set(range(3), transitions(NESTED, 3, seed=4))
    assert (first[:] == before).all()
    del second
    assert not folder.exists()


@pytest.mark.parametrize("theirs", [LazyTensorStorage, LazyMemmapStorage])
def test_every_argument_of_torchrls_storages_is_taken_and_its_default_too(
    theirs: Any,
) -> None:
    _, size, *known = inspect.signature(theirs.__init__).parameters.values()
    assert size.name == "max_size"
    storage = PackedStorage(
        5, **{parameter.name: parameter.default for parameter in known}
    )
    storage.set(range(3), transitions(NESTED, 3))
    assert len(storage) == 3
