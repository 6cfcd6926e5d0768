"""PackedStorage: each index and cursor, each form of data, gives what TorchRL's
LazyTensorStorage gives; its rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyTensorStorage

from rlbuf_td import PackedStorage, ReplayBuffer
from rlbuf_td.storages.memory import ROWS_FILE
from tests.catalogue import SCHEMAS, Schema, assert_same, copied, transitions

over_schemas = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)
NESTED = SCHEMAS["nested"]
STEPS = 7
LANES: dict[int, tuple[int, ...]] = {1: (), 2: (3,), 3: (3, 2)}


def filled(
    ndim: int, full: bool, schema: Schema, device: Any = "cpu"
) -> tuple[PackedStorage, LazyTensorStorage]:
    lanes = LANES[ndim]
    capacity = (STEPS if full else STEPS + 3) * prod(lanes)
    data = transitions(schema, STEPS, lanes, device=device)
    packed = PackedStorage(capacity, ndim=ndim, device=device)
    theirs = LazyTensorStorage(capacity, ndim=ndim, device=device)
    for storage in (packed, theirs):
        storage.set(slice(0, STEPS), data)
        assert len(storage) == STEPS * prod(lanes)
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
    packed, theirs = read_only(ndim, full, NESTED, device)
    for name, index in (case[1:] for case in CASES if case[0] == ndim):
        found = packed.get(index)
        assert_same(found, theirs.get(index))
        assert_same(packed[index], theirs[index])
        places = [
            rows["first"].untyped_storage().data_ptr() for rows in (found, packed[:])
        ]
        assert is_fresh(index) in (None, places[0] != places[1]), name


WIDTHS: dict[str, tuple[Any, Any]] = {
    "int8": (torch.tensor([4, -1], dtype=torch.int8), [4, -1]),
    "int16, twice": (
        (torch.tensor([1, -2]).short(), torch.tensor([0, -1]).short()),
        (torch.tensor([1, -2]), torch.tensor([0, -1])),
    ),
    "uint8 of NumPy": (np.array([3, 1], dtype=np.uint8), [3, 1]),
}


@pytest.mark.parametrize(("index", "same"), WIDTHS.values(), ids=WIDTHS)
def test_positions_of_any_width_are_taken(index: Any, same: Any) -> None:
    packed, _ = read_only(2, False, NESTED)
    assert_same(packed[index], packed[same])  # torch itself takes none of these


#: What names no rows to write.
READ_ONLY = "Ellipsis", "None", "2-d tensor", "int32", "None and int", "empty"


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_an_edit_changes_the_rows_that_a_read_at_its_index_gives(ndim: int) -> None:
    numbers = torch.arange(STEPS * torch.Size(LANES[ndim]).numel())
    numbers = numbers.view(STEPS, *LANES[ndim])
    storage = PackedStorage(numbers.numel(), ndim=ndim)
    storage.set(range(STEPS), TensorDict({"x": numbers}, numbers.shape))
    indices = [(name, index) for dims, name, index in CASES if dims == ndim]
    indices += [(name, index) for name, (index, _) in WIDTHS.items() if ndim == 2]
    for name, index in indices:
        named = storage[index]["x"]
        if not named.numel() or name in READ_ONLY:
            continue
        changed = numbers.clone()
        changed.view(-1)[named.flatten()] += 100
        storage[index] = TensorDict({"x": named + 100}, named.shape)
        assert torch.equal(storage["x"], changed), name
        storage.edit(lambda data: data.set_("x", data["x"] - 100), index)
        assert torch.equal(storage["x"], numbers), name


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
    for index in (slice(None), [], torch.zeros(0, dtype=torch.int64)):
        assert packed[index].batch_size == (0,)
    assert packed["observation"].shape == (0, 3)


def test_an_empty_first_write_fixes_no_schema() -> None:
    rb = ReplayBuffer(storage=PackedStorage(6))
    with pytest.raises(ValueError, match="at least one transition, got none"):
        rb.extend(TensorDict({"x": torch.zeros(0, 3)}, [0]))
    assert rb.extend(TensorDict({"y": torch.zeros(2)}, [2])).tolist() == [0, 1]


def test_the_repr_tells_rows_bytes_place_and_columns() -> None:
    packed, _ = filled(2, False, SCHEMAS["vector"])
    empty = "PackedStorage(max_size=5, ndim=1, device=cpu, empty)"
    assert repr(PackedStorage(5)) == empty
    for part in (
        "21 of 30 rows",
        "shape (10, 3)",
        "24 bytes per row",
        "cpu",
        "'observation': float32 (3,)",
        "'done': bool",
    ):
        assert part in repr(packed)


@over_schemas
@pytest.mark.parametrize("ndim", [1, 3])
def test_every_schema_is_stored_byte_for_byte(
    schema: Schema, ndim: int, device: torch.device
) -> None:
    lanes = LANES[ndim]
    storage = PackedStorage(4 * prod(lanes), ndim=ndim, device=device)
    rows = transitions(schema, 7, lanes, device=device)
    storage.set(range(2), rows[:2])
    storage.set(2, rows[2])
    assert_same(storage[:], rows[:3])
    storage.set(torch.tensor([3, 0, 2]), rows[3:6])
    storage.set(1, rows[6])
    assert_same(storage[:], torch.stack([rows[4], rows[6], rows[5], rows[3]]))


CURSORS: dict[str, Any] = {
    "int": 4,
    "0-d tensor": torch.tensor(4),
    "range": range(4, 7),
    "slice": slice(4, 7),
    "step slice": slice(0, 3, 2),
    "open slice": slice(None),
    "tensor": torch.tensor([3, 0, 4]),
    "list": [4, 1, 5],
    "unsigned array": np.array([4, 1, 5], dtype=np.uint8),
    "wrapped": torch.tensor([6, 7, 0, 1, 4, 5]),
}


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("cursor", CURSORS.values(), ids=CURSORS)
def test_a_cursor_along_time_writes_what_lazy_tensor_storage_writes(
    ndim: int, cursor: Any
) -> None:
    lanes = LANES[ndim]
    packed = PackedStorage(8 * prod(lanes), ndim=ndim)
    theirs = LazyTensorStorage(8 * prod(lanes), ndim=ndim)
    for storage in (packed, theirs):
        storage.set(slice(0, 4), transitions(NESTED, 4, lanes))
    steps = np.arange(8)[cursor]
    data = transitions(NESTED, steps.size if steps.ndim else None, lanes, seed=5)
    packed.set(cursor, data)
    theirs.set(torch.as_tensor(steps), data)
    written = max(4, int(steps.max()) + 1)
    assert len(packed) == written * prod(lanes)
    assert_same(packed[:], theirs._storage[:written])
    packed.check()


def test_of_a_repeated_position_the_last_row_stays() -> None:
    # enough for torch to write in parallel, where it may write rows out of order
    n = 100_000
    steps = torch.randint(50, (n,), generator=torch.Generator().manual_seed(0))
    last = torch.full((50,), -1).scatter_reduce_(0, steps, torch.arange(n), "amax")
    data = TensorDict({"x": torch.arange(n), "y": torch.arange(n).byte()}, [n])
    grid = PackedStorage(50, ndim=2)
    grid.set(range(10), data[:50].view(10, 5))
    grid.set((steps // 5, steps % 5), data)
    assert torch.equal(grid["x"].flatten(), last)
    for cursor in (steps, (steps,)):
        line = PackedStorage(50)
        line.set(range(50), data[:50])
        line.set(cursor, data)
        assert torch.equal(line["x"], last)
        assert torch.equal(line["y"], last.byte())


@pytest.mark.parametrize(
    ("max_size", "lanes", "steps"), [(7, (), 7), (7, (2,), 4), (25, (2, 3), 5)]
)
def test_the_capacity_is_rounded_up_to_whole_time_steps(max_size, lanes, steps):
    data = transitions(NESTED, 2, lanes)
    for storage in (PackedStorage, LazyTensorStorage):
        made = storage(max_size, ndim=1 + len(lanes))
        assert made._max_size_along_dim0(batched_data=data) == steps
        assert made._max_size_along_dim0(single_data=data[0]) == steps
        made.set(slice(0, 2), data)
        assert made._max_size_along_dim0() == steps
        assert made.max_size == steps * prod(lanes)


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
def test_data_of_any_form_is_stored(name: str) -> None:
    data = transitions(NESTED, 3, seed=4)
    storage = PackedStorage(5)
    for cursor in (range(3), range(2, 5), torch.tensor([3, 1, 0])):
        storage.set(cursor, forms(data)[name])
        assert_same(storage[torch.tensor([*cursor])], data)


@pytest.mark.parametrize(
    "cursor", [range(3), torch.tensor([2, 0, 1]), (torch.arange(3),)], ids=str
)
def test_data_that_requires_grad_is_stored_without_its_history(cursor: Any) -> None:
    x = torch.rand(3, 2, requires_grad=True)
    data = TensorDict({"x": x * 2, "y": x}, [3])
    storage = PackedStorage(5)
    for where in (range(3), cursor, range(2, 5)):  # first, again, and further
        storage.set(where, data)
    assert torch.equal(storage["x"][2:], 2 * x.detach())
    assert data["x"].requires_grad
    for value in (storage["x"], storage[0]["y"], storage[torch.tensor([0])]["x"]):
        assert not value.requires_grad
    assert not storage._storage.requires_grad


@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("source", [slice(0, 4), slice(1, 5), slice(0, 6)])
@pytest.mark.parametrize("ndim", [1, 2])
def test_views_of_the_rows_may_be_written_to_them(
    ndim: int, source: slice, start: int
) -> None:
    storage = PackedStorage(6 * prod(LANES[ndim]), ndim=ndim)
    storage.set(range(6), transitions(NESTED, 6, LANES[ndim]))
    expected, view = storage[:].clone(), storage[source]
    steps = (start + torch.arange(len(view))) % 6
    expected[steps] = view.clone()
    storage.set(steps, view)
    assert_same(storage[:], expected)


def test_threads_that_read_batches_of_different_sizes_get_their_own_rows() -> None:
    storage = PackedStorage(1_000)
    numbers = torch.arange(1_000)
    storage.set(range(1_000), TensorDict({"x": numbers, "y": numbers * 2.0}, [1_000]))

    def read(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for step in range(300):
            size = 64 if step // 5 % 2 else 16
            index = torch.randint(1_000, (size,), generator=generator)
            batch = storage.get(index)
            assert torch.equal(batch["x"], index)
            assert torch.equal(batch["y"], index * 2.0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))


def test_a_file_of_rows_is_replaced_and_deleted_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    first = PackedStorage(5, scratch_dir=folder)
    first.set(range(5), transitions(NESTED, 5))
    before, content = first[:].clone(), (folder / ROWS_FILE).read_bytes()
    refused = PackedStorage(5, scratch_dir=folder, auto_cleanup=True)
    words = "already holds rows.*not overwritten: choose another scratch_dir, or delete"
    for write in (
        lambda: refused.set(range(3), transitions(NESTED, 3)),
        lambda: ReplayBuffer(storage=refused).extend(transitions(NESTED, 3)),
    ):
        with pytest.raises(FileExistsError, match=words):
            write()
        assert not refused.initialized
    assert (folder / ROWS_FILE).read_bytes() == content
    second = PackedStorage(5, scratch_dir=folder, existsok=True, auto_cleanup=True)
    second.set(range(3), transitions(NESTED, 3, seed=4))
    assert_same(first[:], before)
    del second
    assert not folder.exists()
