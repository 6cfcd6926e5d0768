"""Bad input is refused by an error of the right class, with the right word, before anything has changed.

``REFUSALS`` maps ``(name, maker)`` to rows ``(call, error, word)``. The runner makes two equal objects, gives one of
them to ``call``, and expects the error with the word (a regular expression). Then the object must hold what it held
before, byte for byte, and its next batch and its next write must equal those of the other object. Names stand in the
order of the package. To add a refusal, add a row: one line, if possible.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch._subclasses.fake_tensor import FakeTensorMode

import rlbuf_td
from rlbuf_td import SchemaError
from tests.catalogue import as_bytes

td: Any = rlbuf_td  # mypy does not check the arguments: they are wrong on purpose
zeros, ones, full, tensor, nan = torch.zeros, torch.ones, torch.full, torch.tensor, float("nan")


# ---------------------------------------------------------------------------------------------------- rows and batches
def steps(*size: int, first: int = 0, **entries: Any) -> TensorDict:
    """Return transitions, numbered along the last dim; no trajectory ends."""
    number = torch.arange(first, first + size[-1]).expand(size).clone() if size else tensor(first)
    observation = number[..., None].float().expand(*size, 3).clone()
    after = {"observation": observation + 1, "reward": number[..., None].float()}
    after |= {name: zeros(*size, 1, dtype=torch.bool) for name in ("done", "terminated")}
    return TensorDict({"observation": observation, "action": number, "next": after} | entries, size)


def freed(leaf: torch.Tensor) -> torch.Tensor:
    leaf = leaf.clone()
    leaf.untyped_storage().resize_(0)
    return leaf


def freed_behind_an_offset(leaf: torch.Tensor) -> torch.Tensor:
    leaf = torch.cat((leaf[:1], leaf))[1:]
    leaf.untyped_storage().resize_(0)
    return leaf


def shrunk(leaf: torch.Tensor) -> torch.Tensor:
    leaf = leaf.clone()
    leaf.untyped_storage().resize_(leaf.nbytes - 1)
    return leaf


def nested(leaf: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: nested tensors are a prototype
        return torch.nested.nested_tensor([*leaf])


def fake(leaf: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(leaf)


def jagged(leaf: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([row[: 1 + j % 2] for j, row in enumerate(leaf)], layout=torch.jagged)


def with_leaf(data: Any, key: str, spoil: Callable[[torch.Tensor], Any]) -> Any:
    """Replace an entry without reading the new one."""
    data = data.clone()
    data._tensordict[key] = spoil(data[key])
    return data


def text(data: TensorDictBase) -> NonTensorData:
    return NonTensorData("text", batch_size=data.batch_size)


#: How rows can differ from those that are stored, for any batch size, and what the error says.
MISFITS: list[tuple[Callable[[TensorDict], Any], Any, str]] = [
    (lambda data: data.exclude("action"), SchemaError, r"key 'action' is missing, expected as int64 of shape \("),
    (lambda data: data.exclude("next"), SchemaError, r"key \('next', '\w+'\) is missing"),
    (lambda data: data.exclude(("next", "done")), SchemaError, r"key \('next', 'done'\) is missing"),
    (lambda data: data.set("x", data["action"]), SchemaError, "unknown key 'x': the rows hold .*'action'.*exclude"),
    (lambda data: data.set(("next", "index"), data["action"]), SchemaError, r"unknown key \('next', 'index'\)"),
    (lambda data: data.set("action", data["action"].double()), SchemaError, r"'action' came as float64 .*expected int64"
     r" of shape \(.*\): cast it with \.to\(torch\.int64\)"),
    (lambda data: data.set("action", data["action"][..., None]), SchemaError, r"'action' came as int64 .*: reshape"),
    (lambda data: data.set("observation", data["observation"].to("meta")), SchemaError, "'observation'.*meta"),
    (lambda data: data.set("next", data["action"]), SchemaError, r"unknown key 'next'"),
    (lambda data: data.set("action", TensorDict({"z": data["action"]}, data.shape)), SchemaError,
     r"unknown key \('action', 'z'\)"),
    (lambda data: data.set("void", TensorDict({}, data.shape)), SchemaError, r"nesting of \[.*'void'\] differs"),
    (lambda data: data.set("observation", data["observation"].to_sparse()), SchemaError, "a nested, sparse or quantiz"),
    (lambda data: data.set("action", text(data)), SchemaError, "key 'action' holds non-tensor data"),
    (lambda data: with_leaf(data, "observation", freed), ValueError, "no memory"),
    (lambda data: with_leaf(data, "observation", shrunk), ValueError, "no memory"),
    (lambda data: with_leaf(data, "observation", fake), ValueError, "no memory"),
    (lambda data: data.to_dict(), TypeError, r"TensorDict.*, got "),
    (lambda data: data["action"], SchemaError, "cannot write Tensor: the rows of this storage are read as TensorDict"),
    (lambda data: None, TypeError, r"TensorDict.*, got "),
]  # fmt: skip
#: Those of several rows.
RAGGED: list[tuple[Callable[[TensorDict], Any], Any, str]] = [
    (lambda data: with_leaf(data, "observation", jagged), SchemaError, "'observation' is a nested, sparse or q"),
    (lambda data: with_leaf(data, "observation", nested), (SchemaError, ValueError), "nested"),
    (lambda data: with_leaf(data, "observation", freed_behind_an_offset), ValueError, "no memory"),
    (lambda data: lazy_stack([*data[:3], data[3].exclude(("next", "done"))]), SchemaError, r"'done'\) is ragged"),
    (lambda data: data[:0], ValueError, "at least one transition, got none|cannot fill"),
    (lambda data: [], (TypeError, ValueError), "at least one transition|stores TensorDicts"),
    (lambda data: [{"x": zeros(3)}] * 2, TypeError, r"wrap each step, \[TensorDict\(step\)|stores TensorDicts"),
    (lambda data: (zeros(2), zeros(2)), TypeError, "takes a TensorDict|stores TensorDicts"),
]  # fmt: skip
#: What no row can hold, with the storage that can.
UNPACKABLE: list[tuple[Any, str]] = [
    (lambda: TensorDict({"n": {}}, [3]), "contains no tensor"),
    (lambda: steps(3, s=NonTensorStack("a", "b", "c")), r"'s' .*torchrl\.data\.ListStorage, which takes it"),
    (lambda: steps(3, s=ones(3, 2).to_sparse()), r"'s' .*torchrl\.data\.ListStorage, which takes it"),
    (lambda: with_leaf(steps(3), "observation", jagged), r"'observation' .*data\.ListStorage, which takes it"),
    (lambda: lazy_stack([TensorDict({"x": ones(j)}) for j in (1, 2, 3)]), r"'x' .*\.LazyStackStorage, which takes it"),
]  # fmt: skip


def misfits(call: Callable[[Any, Any], Any], data: Callable[[], Any], *more: list[Any]) -> list[Any]:
    """Return rows that give a call all data that do not fit."""
    return [
        (lambda made, spoil=spoil: call(made, spoil(data())), error, word)
        for spoil, error, word in sum(more, [*MISFITS])
    ]


# -------------------------------------------------------------------------------------------------------------- makers
def nothing() -> None:
    return None


def storage(**options: Any) -> Any:
    """Return a storage with 6 of 10 rows."""
    made = td.PackedStorage(10, **options)
    made.set(range(6), steps(6))
    return made


def storage_of_lanes() -> Any:
    """Return a storage [5, 2] with 3 time steps."""
    made = td.PackedStorage(10, ndim=2)
    made.set(range(3), steps(2, 3).transpose(0, 1))
    return made


def no_rows() -> Any:
    return td.PackedStorage(10)


def fresh(**options: Any) -> Any:
    """Return a buffer without rows."""
    return td.ReplayBuffer(**{"storage": td.PackedStorage(30), "batch_size": 4} | options)


def buffer(sampler: Any = None, *, cls: Any = fresh, **options: Any) -> Any:
    """Return a buffer with 20 of 30 rows, in use: its calls are compiled, if they can be. Its ``batch`` has errors."""
    rb = cls(sampler=sampler, **options)
    for first in (0, 10):
        rb.extend(steps(10, first=first))
        rb.batch = rb.sample()
    rb.batch["td_error"] = ones(rb.batch.shape)
    return rb


def prioritized() -> Any:
    return buffer(td.ProportionalSampler(30))


def ranked() -> Any:
    return buffer(td.RankSampler(30))


def update(**entries: Any) -> Callable[[Any], Any]:
    """Return a call that updates the priorities of a batch with other entries; without those that are None."""
    removed = [name for name, value in entries.items() if value is None]
    changed = {name: value for name, value in entries.items() if value is not None}
    return lambda rb: rb.update_tensordict_priority(rb.batch.clone().update(changed).exclude(*removed))


def write_back(keys: Any, **entries: Any) -> Callable[[Any], Any]:
    """Return a call that writes back a batch with other entries; without those that are None."""
    removed = [name for name, value in entries.items() if value is None]
    changed = {name: value for name, value in entries.items() if value is not None}
    return lambda rb: rb.write_back(rb.batch.clone().update(changed).exclude(*removed), keys)


# ----------------------------------------------------------------------------------------------------------- the table
REFUSALS: dict[tuple[str, Callable[[], Any]], list[tuple[Callable[[Any], Any], Any, str]]] = {
    ("PackedStorage", nothing): [
        (lambda _: td.PackedStorage(0), ValueError, "max_size must be a whole number, at least 1, got 0"),
        (lambda _: td.PackedStorage("ten"), ValueError, "max_size must be a whole number, at least 1, got 'ten'"),
        (lambda _: td.PackedStorage(4, ndim=0), ValueError, "ndim must be a whole number, at least 1, got 0"),
        (lambda _: td.PackedStorage(21, lanes=3), ValueError, "needs ndim=2"),
        (lambda _: td.PackedStorage(4, scratch_dir="x", shared=True), ValueError, "scratch_dir or shared, not both"),
        (lambda _: td.PackedStorage(4, scratch_dir="x", device="cuda"), ValueError, "need device=.cpu., got device"),
        (lambda _: td.PackedStorage(4, shared=True, device="cuda:0"), ValueError, "need device=.cpu., got device"),
        (lambda _: td.PackedStorage(4, shared_init=True, device="cuda"), ValueError, "shared_init needs device='cpu'"),
        (lambda _: td.PackedStorage(4, shared_init=True, cleanup_memmap=False), ValueError, "keeps temporary files"),
        (lambda _: td.PackedStorage(4, shared=True, compilable=True), RuntimeError, "compilable=True cannot be shared"),
        (lambda _: td.PackedStorage(4, device="cuda:99"), RuntimeError, "'cuda:99' is missing: torch finds . CUDA dev"),
        (lambda _: td.PackedStorage(4, share_next="yes"), ValueError, "must be 'auto'"),
        (lambda _: td.PackedStorage(4, share_next=None), ValueError, "must be 'auto'"),
        (lambda _: td.PackedStorage(4, share_next=[("next", "observation")]), ValueError, "without 'next'"),
        (lambda _: td.PackedStorage(4, share_next=[3]), ValueError, "takes keys"),
        (lambda _: td.PackedStorage(4, frames=4), ValueError, "must be a dict"),
        (lambda _: td.PackedStorage(4, frames={3: 4}), ValueError, "takes keys"),
        (lambda _: td.PackedStorage(4, frames={"pixels": 1}), ValueError, "at least 2"),
        (lambda _: td.PackedStorage(4, frames={"pixels": (4, 1.5)}), ValueError, "'pixels' must be a whole number"),
        (lambda _: td.PackedStorage(4, frames={("next", "pixels"): 4}), ValueError, "without 'next'"),
        (lambda _: td.PackedStorage(4, frames={"pixels": 4, ("pixels",): 4}), ValueError, "twice"),
    ],
    ("PackedStorage.set, before the first write", no_rows): [
        *((lambda storage, data=data: storage.set(range(3), data()), SchemaError, word) for data, word in UNPACKABLE),
        (lambda storage: storage.set(range(3), steps(2)), SchemaError, r"batch size \(2,\) cannot fill 3 positions"),
        (lambda storage: storage.set(range(1, 4), steps(3)), IndexError, "leave rows .* unwritten"),
    ],
    ("PackedStorage.set, before the first write to lanes", lambda: td.PackedStorage(12, ndim=2)): [
        (lambda storage: storage.set(range(3), steps(3)), SchemaError, r"ndim=2 takes .*got batch size \(3,\)"),
        (lambda storage: storage.set(range(3), steps(3, 0)), SchemaError, r"transitions without lanes.*\(0,\)"),
    ],
    ("PackedStorage.set", storage): [
        *misfits(lambda storage, data: storage.set(range(4), data), lambda: steps(4), RAGGED),
        *misfits(lambda storage, data: storage.set(3, data), steps),
        (lambda storage: storage.set([0, 1, 2], steps(4)), SchemaError, r"batch size \(4,\) cannot fill 3 positions"),
        *((lambda storage, at=at: storage.set(at, steps(2)), IndexError, "leave rows after 5 unwritten|out of range")
          for at in (range(7, 9), slice(7, 9), tensor([0, 7]), [7, 9], [9, 10], tensor([0, -7]))),
        (lambda storage: storage.set(7, steps()), IndexError, "leave rows after 5 unwritten|out of range"),
        (lambda storage: storage.set([], steps(0)), IndexError, "empty set of positions"),
        (lambda storage: storage.set(slice(2, 2), steps(0)), IndexError, "empty set of positions"),
        *((lambda storage, at=at: storage.set(at, steps(3)), IndexError, "cannot write at a cursor")
          for at in ([0.5], tensor([[0, 1, 2]]), "x", ..., None)),
    ],
    ("PackedStorage.set, lanes", storage_of_lanes): [
        (lambda storage: storage.set(range(3), steps(3, 3)), SchemaError, r"of shape \(3, 3.*expected .* \(3, 2"),
        (lambda storage: storage.set(range(3), steps(3)), SchemaError, r"of shape \(3.*expected .* \(3, 2"),
        (lambda storage: storage.set((tensor([3]), tensor([0])), steps(1)), IndexError, "out of (range|bounds)"),
        (lambda storage: storage.set((tensor([0]), tensor([2])), steps(1)), IndexError, "out of (range|bounds)"),
        (lambda storage: storage.set(ones(5, 3).bool(), steps(1)), IndexError, "shape of the mask"),
    ],
    ("PackedStorage.get", storage): [
        *((lambda storage, at=at: storage.get(at), IndexError, r"out of (range|bounds)")
          for at in (6, -7, tensor([0, 6]), [6], np.array([-7]))),
        (lambda storage: storage.get(ones(5).bool()), IndexError, "shape of the mask"),
        (lambda storage: storage.get(tensor([0.5])), IndexError, "indices"),
        (lambda storage: storage.get(freed(torch.arange(4))), (RuntimeError, IndexError), "no memory|not allocated"),
        (lambda storage: storage.get("zz"), KeyError, "zz"),
        (lambda storage: storage.get(("next", "zz")), KeyError, "zz"),
    ],
    ("PackedStorage.get, lanes", storage_of_lanes): [
        (lambda storage: storage.get((0, 2)), IndexError, "out of (range|bounds)"),
        (lambda storage: storage.get((zeros(1).long(), tensor([2]))), IndexError, "out of (range|bounds)"),
    ],
    ("PackedStorage.get of no rows", no_rows): [
        (lambda storage: storage.get(0), RuntimeError, "before the first write"),
        (lambda storage: storage.get("observation"), RuntimeError, "before the first write"),
    ],
    ("PackedStorage, reserved", storage): [
        (lambda storage: storage.release(), RuntimeError, "rows that have been written cannot be released"),
        (lambda storage: storage.reserve(steps()), RuntimeError, "reserve them before the first write"),
        (lambda storage: td.PackedStorage(10, ndim=2).reserve(steps()), SchemaError, "1 or more batch dims"),
    ],
    ("PackedStorage in a buffer", buffer): [
        (lambda rb: setattr(rb.storage, "checkpointer", print), NotImplementedError, "without TorchRL's checkpointers"),
        (lambda rb: rb.storage.register_save_hook(print), NotImplementedError, "without TorchRL's checkpointers"),
        (lambda rb: rb.storage.register_load_hook(print), NotImplementedError, "without TorchRL's checkpointers"),
    ],
    ("ReplayBuffer.extend", buffer): [
        *misfits(lambda rb, data: rb.extend(data), lambda: steps(4), RAGGED),
        (lambda rb: rb.extend(steps()), ValueError, "got a single one: use add"),
    ],
    ("ReplayBuffer.add", buffer): [
        *misfits(lambda rb, data: rb.add(data), steps),
        (lambda rb: rb.add(steps(3)), SchemaError, "If these are several transitions, use extend"),
    ],
    ("ReplayBuffer.sample", buffer): [
        *((lambda rb, n=n: rb.sample(n), ValueError, "batch_size must be a whole number, at least 0, got")
          for n in (-1, 2.5, [4])),
    ],
    ("ReplayBuffer.sample of no rows", fresh): [
        (lambda rb: rb.sample(), RuntimeError, "empty storage: extend the buffer first"),
        (lambda rb: rb.sample(wait=True, timeout=0.01), TimeoutError, "no batch within .* the buffer is empty"),
    ],
    **{("ReplayBuffer.update_tensordict_priority", make): [
        (update(td_error=None), KeyError, "no 'td_error'"),
        (update(index=None), KeyError, "no 'index'"),
        (update(td_error=tensor([1.0, nan, 1.0, -torch.inf])), ValueError, r"2 of 4 TD errors are NaN or infinite"),
        (update(td_error=zeros(4, 4)), ValueError, r"shape \[4, 4\] for a batch \[4\].* reduce .*abs\(\).amax\(-1\)"),
        (update(index=full((4,), 20)), IndexError, "row 20 is out of range"),
    ] for make in (prioritized, ranked)},
}  # fmt: skip
ROWS = [pytest.param(make, *row, id=f"{name}: {row[-1]}") for (name, make), rows in REFUSALS.items() for row in rows]


# ---------------------------------------------------------------------------------------------------------- the runner
def contents(made: Any) -> Any:
    """Return all that an object holds as plain values, tensors as bytes."""
    if isinstance(made, torch.Tensor):
        return made.dtype, tuple(made.shape), as_bytes(made).numpy().tobytes()
    if isinstance(made, torch.Generator):
        return contents(made.get_state())
    if isinstance(made, TensorDictBase):
        return contents(made.to_dict())
    if isinstance(made, Mapping):
        return {key: contents(value) for key, value in made.items()}
    if isinstance(made, list | tuple):
        return [contents(each) for each in made]
    found = [contents(made.state_dict())] if hasattr(made, "state_dict") else []
    inner = "_rng", "buffer", "episode_stats", "write_count"
    return found + [contents(getattr(made, name)) for name in inner if hasattr(made, name)] or repr(made)


def what_follows(made: Any) -> Any:
    """Return the next batch of a buffer and what it holds after its next write, or the errors."""
    found: list[Any] = []
    for go_on in (lambda: made.sample(), lambda: made.extend(made.last(1)), lambda: made[:]):
        try:
            found.append(contents(go_on()))
        except Exception as error:  # noqa: BLE001  of what has none
            found.append((type(error), str(error)))
    return found


@pytest.mark.parametrize(("make", "call", "error", "word"), ROWS)
def test_it_is_refused_and_nothing_changes(make: Any, call: Any, error: Any, word: str) -> None:
    torch.manual_seed(0)
    made = make()
    random = torch.get_rng_state()
    before = contents(made)
    with pytest.raises(error, match=word):
        call(made)
    assert torch.equal(torch.get_rng_state(), random)
    assert contents(made) == before
    found = what_follows(made)
    torch.manual_seed(0)
    assert found == what_follows(make())
