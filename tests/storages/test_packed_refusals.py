"""What must not be written is refused before anything changes, with a word on what came and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass
from torchrl.data import LazyStackStorage, LazyTensorStorage, ListStorage

from rlbuf_td import PackedStorage, ReplayBuffer, RingWriter, SchemaError
from tests.catalogue import SCHEMAS, as_bytes, transitions


@tensorclass
class Point:
    x: torch.Tensor


def point(n: int) -> Any:
    return Point(x=torch.zeros(n), batch_size=[n])  # type: ignore[call-arg]


def good(n: int = 3) -> TensorDict:
    return TensorDict({"x": torch.rand(n, 2), "next": {"done": torch.zeros(n, 1).bool(), "y": torch.rand(n)}}, [n])


def changed(**leaves: Any) -> TensorDict:
    """Return good data with some entries replaced; ``None`` takes one out, ``next__y`` is ``("next", "y")``."""
    data = good()
    for name, value in leaves.items():
        key = tuple(name.split("__"))
        if value is None:
            del data[key]
        else:
            data.set(key, value)
    return data


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1), torch.zeros(2)], layout=torch.jagged)


def one(**entries: Any) -> TensorDict:
    return TensorDict(entries)


def snapshot(storage: PackedStorage) -> Any:
    rows = None if storage.rows is None else as_bytes(storage.rows.matrix)
    counters = (len(storage), storage._last_cursor_index, storage._mutation_revision, storage.max_size)
    return rows, (*counters, storage.initialized, storage.shape, storage.device)


def assert_refused(storage: PackedStorage, write: Callable[[], Any], error: type[Exception], match: str) -> None:
    rows, counters = snapshot(storage)
    with pytest.raises(error, match=match):
        write()
    assert snapshot(storage)[1] == counters
    assert (rows is None) == (storage.rows is None)
    if rows is not None:
        assert torch.equal(snapshot(storage)[0], rows)


MISFITS = {
    "missing": (lambda: changed(x=None), r"key 'x' is missing, expected as float32 of shape \(3, 2\)"),
    "missing node": (lambda: changed(next=None), r"key \('next', '(done|y)'\) is missing"),
    "unknown": (lambda: changed(z=torch.zeros(3)), r"unknown key 'z': the rows hold .*'x'.*exclude"),
    "unknown index below the root": (lambda: changed(next__index=torch.zeros(3)), r"unknown key \('next', 'index'\)"),
    "dtype": (
        lambda: changed(x=torch.zeros(3, 2, dtype=torch.float64)),
        r"key 'x' came as float64 of shape \(3, 2\), expected float32 of shape \(3, 2\): cast it with "
        r"\.to\(torch\.float32\)",
    ),
    "shape": (
        lambda: changed(x=torch.zeros(3, 3)),
        r"key 'x' came as float32 of shape \(3, 3\), expected float32 of shape \(3, 2\): reshape",
    ),
    "extra batch dims": (lambda: good().unsqueeze(1), r"key 'x' came as float32 of shape \(3, 1, 2\)"),
    "a leaf for a node": (lambda: changed(next=torch.zeros(3, 1)), r"unknown key 'next'"),
    "a node for a leaf": (lambda: changed(x=TensorDict({"z": torch.zeros(3)}, [3])), r"unknown key \('x', 'z'\)"),
    "an empty node more": (lambda: changed(void=TensorDict({}, [3])), r"nesting of \['next', 'void', 'x'\] differs"),
    "sparse": (lambda: changed(x=torch.ones(3, 2).to_sparse()), r"key 'x' is a nested, sparse or quantized tensor"),
    "jagged": (lambda: changed(x=jagged()), r"key 'x' is a nested, sparse or quantized tensor"),
    "string": (lambda: changed(x=NonTensorData("a", batch_size=[3])), r"key 'x' holds non-tensor data"),
    "ragged": (lambda: lazy_stack([good()[0], good()[0].exclude(("next", "y")), good()[0]]), r"'y'\) is ragged"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_the_rows_is_refused_and_changes_nothing(name: str) -> None:
    rb = ReplayBuffer(storage=PackedStorage(5), writer=RingWriter())
    rb.extend(good(3))
    storage, (make, match) = rb.storage, MISFITS[name]
    data = make()
    for cursor in (range(3), slice(0, 3), torch.tensor([3, 0, 4]), (torch.tensor([2, 1, 0]),)):
        assert_refused(storage, partial(storage.set, cursor, data), SchemaError, match)
    assert_refused(storage, lambda: storage.write(3, data), SchemaError, match)
    assert_refused(storage, lambda: rb.extend(data), SchemaError, match)
    assert (rb.write_count, rb.writer._cursor) == (3, 3)
    if name in ("sparse", "jagged", "ragged"):  # cannot be taken apart
        return
    single = data[0]
    for cursor in (0, 3, torch.tensor(1), (2,)):
        assert_refused(storage, partial(storage.set, cursor, single), SchemaError, "key|nesting")
    assert_refused(storage, lambda: storage.write(3, single, single=True), SchemaError, "key|nesting")


@pytest.mark.parametrize(("lanes", "came"), [((2,), r"\(3, 2, "), ((), r"\(3, "), ((3, 1), r"\(3, 3, 1, ")])
def test_other_lanes_are_refused(lanes: tuple[int, ...], came: str) -> None:
    storage = PackedStorage(15, ndim=2)
    storage.set(range(3), transitions(SCHEMAS["vector"], 3, (3,)))
    data, match = transitions(SCHEMAS["vector"], 3, lanes), rf"came as .* of shape {came}\d\), expected .* \(3, 3, \d\)"
    for write in (lambda: storage.set(range(3), data), lambda: storage.write(3, data)):
        assert_refused(storage, write, SchemaError, match)


@pytest.mark.parametrize("n", [0, 2, 4])
@pytest.mark.parametrize("cursor", [range(3), [0, 1, 2], slice(0, 3), torch.tensor([2, 0, 1])], ids=str)
def test_another_number_of_transitions_than_positions_is_refused(n: int, cursor: Any) -> None:
    storage = PackedStorage(5)
    match = rf"batch size \({n},\) cannot fill 3 positions"
    assert_refused(storage, lambda: storage.set(cursor, good(n)), SchemaError, match)
    storage.set(range(3), good())
    assert_refused(storage, lambda: storage.set(cursor, good(n)), SchemaError, match)
    assert_refused(storage, lambda: storage.set((torch.arange(3),), good(n)), SchemaError, "expected .* of shape")


HOLE, EMPTY = "leave rows after 2 unwritten|out of range", "empty set of positions"
NO_POSITIONS = "cannot write at a cursor"
CURSORS: list[tuple[Any, int, str]] = [
    *((cursor, 1, HOLE) for cursor in (4, -1)),
    *((cursor, 2, HOLE) for cursor in (range(4, 6), slice(4, 6), torch.tensor([0, 4]), [3, 5], [9, 10])),
    *((torch.tensor(steps), len(steps), HOLE) for steps in ([0, -1], [3, 4, 5, 100])),
    ([], 0, EMPTY),
    *((cursor, 0, EMPTY) for cursor in (range(0), torch.zeros(0).long(), slice(2, 2))),
    *((cursor, 3, NO_POSITIONS) for cursor in ([0.5], torch.tensor([[0, 1, 2]]), "x", Ellipsis, None)),
]


@pytest.mark.parametrize(("cursor", "n", "match"), CURSORS, ids=str)
def test_cursors_that_leave_a_hole_lie_outside_or_name_nothing_are_refused(cursor: Any, n: int, match: str) -> None:
    storage = PackedStorage(10)
    storage.set(range(3), good())
    data = good(1)[0] if isinstance(cursor, int) else good(n)
    assert_refused(storage, lambda: storage.set(cursor, data), IndexError, match)


def test_a_region_outside_the_rows_written_is_refused() -> None:
    storage = PackedStorage(10, ndim=2)
    storage.set(range(2), transitions(SCHEMAS["vector"], 2, (2,)))
    data = transitions(SCHEMAS["vector"], 1)
    for cursor in ((torch.tensor([2]), torch.tensor([0])), (torch.tensor([0]), torch.tensor([2])), (-3, 0)):
        assert_refused(storage, partial(storage.set, cursor, data), IndexError, "out of (range|bounds)")
    for mask in (torch.ones(5, 2).bool(), torch.ones(3).bool()):
        assert_refused(storage, partial(storage.set, mask, data), IndexError, "shape of the mask")


@pytest.mark.parametrize("data", [(torch.zeros(3),), {"x": torch.zeros(3)}, None, [1, 2, 3], []], ids=str)
def test_data_that_is_no_tensordict_is_refused(data: Any) -> None:
    storage = PackedStorage(5)
    for _ in range(2):
        for write in (lambda: storage.set(range(3), data), lambda: storage.write(0, data)):
            assert_refused(storage, write, TypeError, "stores TensorDicts, .*, got .*LazyTensorStorage")
        storage.set(range(3), good())


UNPACKABLE: dict[str, tuple[Callable[[], Any], str, type]] = {
    "string": (lambda: TensorDict({"x": torch.zeros(3), "s": "hello"}, [3]), "'s'", ListStorage),
    "stack of strings": (
        lambda: TensorDict({"x": torch.zeros(3), "n": {"s": NonTensorStack("a", "b", "c")}}, [3]),
        r"\('n', 's'\)",
        ListStorage,
    ),
    "jagged": (lambda: TensorDict({"x": jagged()}, [3]), "'x'", ListStorage),
    "sparse": (lambda: TensorDict({"n": {"x": torch.ones(3, 2).to_sparse()}}, [3]), r"\('n', 'x'\)", ListStorage),
    "ragged shapes": (lambda: lazy_stack([one(x=torch.ones(j)) for j in (1, 2, 3)]), "'x'", LazyStackStorage),
    "ragged keys below the root": (
        lambda: one(n=lazy_stack([one(x=torch.ones(1), **{f"{j}": torch.ones(1)}) for j in range(3)])),
        r"\('n', '[01]'\)",
        LazyStackStorage,
    ),
    "tensorclass": (lambda: TensorDict({"n": {"p": point(3)}}, [3]), r"\('n', 'p'\)", LazyTensorStorage),
}


@pytest.mark.parametrize(("make", "key", "taker"), UNPACKABLE.values(), ids=UNPACKABLE)
def test_what_cannot_be_packed_is_refused_with_the_storage_that_takes_it(make: Any, key: str, taker: type) -> None:
    storage, theirs = PackedStorage(5), taker(5)
    data = make()
    if not data.batch_size:
        data.batch_size = [3]
    match = rf"key {key} .*torchrl\.data\.{taker.__name__}, which takes it"
    assert_refused(storage, lambda: storage.set(range(3), data), SchemaError, match)
    assert_refused(storage, lambda: storage.write(0, data), SchemaError, match)
    assert storage.layout is None
    storage.set(range(3), good())
    assert len(storage) == 3
    if taker is LazyTensorStorage:
        theirs.set(slice(0, 3), data)
        assert isinstance(theirs[1]["n", "p"], Point)
    else:
        items = list(data.unbind(0))
        theirs.set(range(3), items)
        for j, item in enumerate(items):
            assert set(theirs.get(j).keys(True, True)) == set(item.keys(True, True))
    assert len(theirs) == 3


FIRST = {
    "no tensor": (1, lambda: TensorDict({"n": {}}, [3]), "contains no tensor"),
    "too few dims": (2, lambda: good(), r"ndim=2 takes TensorDicts with 2 or more batch dims.*got batch size \(3,\)"),
    "no lanes": (2, lambda: transitions(SCHEMAS["vector"], 3, (0,)), r"transitions without lanes.*\(0,\)"),
}


@pytest.mark.parametrize(("ndim", "make", "match"), FIRST.values(), ids=FIRST)
def test_a_first_write_that_is_refused_leaves_the_storage_uninitialised(ndim: int, make: Any, match: str) -> None:
    storage = PackedStorage(12, ndim=ndim, device="auto")
    data = make()
    for write in (lambda: storage.set(range(3), data), lambda: storage.write(0, data)):
        assert_refused(storage, write, SchemaError, match)
    writer = RingWriter()
    writer.register_storage(storage)
    assert_refused(storage, lambda: writer.extend(data), SchemaError, match)
    assert (writer._cursor, writer._write_count) == (0, 0)
    storage.set(range(2), transitions(SCHEMAS["vector"], 2, (3,) * (ndim - 1)))
    assert storage.initialized


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_size": 0}, "max_size must be a whole number, at least 1, got 0"),
        ({"ndim": 0}, "ndim must be a whole number, at least 1, got 0"),
        ({"max_size": "ten"}, "max_size must be a whole number, at least 1, got 'ten'"),
        ({"max_size": None}, "max_size must be a whole number, at least 1, got None"),
        ({"scratch_dir": "x", "shared": True}, "scratch_dir or shared, not both"),
        ({"scratch_dir": "x", "device": "cuda"}, "need device='cpu', got device='cuda'"),
        ({"shared": True, "device": "cuda:0"}, "need device='cpu', got device='cuda:0'"),
    ],
    ids=str,
)
def test_arguments_out_of_range_or_at_odds_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PackedStorage(**{"max_size": 4, **arguments})
