"""Reading: every kind of index gives what TorchRL's LazyTensorStorage gives, as fresh memory or as a view."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage

from rlbuf_td import PackedStorage
from tests.catalogue import SCHEMAS, Schema, assert_same, transitions

over_schemas = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)
STEPS = 7
LANES = {1: (), 2: (3,), 3: (3, 2)}


def filled(ndim: int, full: bool, schema: Schema, device: Any = "cpu") -> tuple[PackedStorage, LazyTensorStorage]:
    lanes = LANES[ndim]
    capacity = (STEPS if full else STEPS + 3) * torch.Size(lanes).numel()
    data = transitions(schema, STEPS, lanes, device=device)
    packed = PackedStorage(capacity, ndim=ndim, device=device)
    theirs = LazyTensorStorage(capacity, ndim=ndim, device=device)
    packed.set(range(STEPS), data)
    theirs.set(slice(0, STEPS), data)  # a slice, for torch cannot write uint16 at a tensor of positions
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
    "two empty tensors": (torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)),
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
    "three tensors": (torch.tensor([1, -1]), torch.tensor([2, 0]), torch.tensor([-1, 0])),
    "two of three tensors": (torch.tensor([1, -1]), torch.tensor([2, 0])),
}
CASES = [
    *((1, name, index) for name, index in ALONG_TIME.items()),
    *((2, name, index) for name, index in (ALONG_TIME | OVER_LANES).items()),
    *((3, name, index) for name, index in (ALONG_TIME | OVER_THREE).items()),
]


def is_fresh(index: Any) -> bool | None:
    """Return whether a batch at this index has memory of its own; None: as torch has it."""
    if isinstance(index, torch.Tensor | list | range | np.ndarray) and np.ndim(index):
        return True
    return False if isinstance(index, int | slice) else None


@pytest.mark.parametrize("full", [False, True], ids=["filling", "full"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_an_index_gives_what_lazy_tensor_storage_gives(ndim: int, full: bool, device: torch.device) -> None:
    packed, theirs = read_only(ndim, full, SCHEMAS["nested"], device)
    for name, index in (case[1:] for case in CASES if case[0] == ndim):
        found = packed.get(index)
        assert_same(found, theirs.get(index))
        assert_same(packed[index], theirs[index])
        places = [rows["first"].untyped_storage().data_ptr() for rows in (found, packed[:])]
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
    assert packed[:].batch_size == packed[[]].batch_size == packed[torch.zeros(0, dtype=torch.int64)].batch_size == (0,)
    assert packed["observation"].shape == (0, 3)


def test_flatten_contains_and_shape_are_those_of_lazy_tensor_storage() -> None:
    for ndim in (1, 2):
        packed, theirs = filled(ndim, False, SCHEMAS["vector"])
        assert_same(packed.flatten()[:], theirs.flatten()[:])
        assert packed.shape == theirs.shape
        assert packed.max_size == theirs.max_size
        assert packed._is_full == theirs._is_full
        for item in (0, 6, 7, -7, -8):
            assert (item in packed) == (item in theirs)


def test_the_repr_tells_rows_bytes_place_and_columns() -> None:
    packed, _ = filled(2, False, SCHEMAS["vector"])
    assert repr(PackedStorage(5)) == "PackedStorage(max_size=5, ndim=1, device=cpu, empty)"
    for part in (
        "21 of 30 rows",
        "shape (10, 3)",
        "24 bytes per row",
        "cpu",
        "'observation': float32 (3,)",
        "'done': bool",
    ):
        assert part in repr(packed)


def test_an_empty_batch_of_shared_observations_is_read_on_every_path(device: torch.device, monkeypatch) -> None:
    monkeypatch.setattr("rlbuf_td.storages.allocate.grows", lambda device: True)  # as on other devices than the CPU
    data = transitions(SCHEMAS["halfcheetah"], 5, device=device)
    storage = PackedStorage(9, share_next=True, device=device)
    storage.set(range(5), data)
    assert_same(storage[torch.zeros(0, dtype=torch.int64)], data[:0])
