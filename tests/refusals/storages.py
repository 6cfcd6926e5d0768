"""What storages and trajectories refuse."""

from __future__ import annotations

from operator import setitem
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from torchrl.data import LazyTensorStorage

from rlbuf_td import SchemaError
from tests.refusals.makers import *


def rows_in(data: TensorDict, size: int = 10, **options: Any) -> Any:
    made = td.PackedStorage(size, **options)
    made.set(range(len(data)), data)
    return made


def rows_of(data: TensorDict, size: int = 10, **options: Any) -> Any:
    """Return the state of a storage."""
    return rows_in(data, size, **options).state_dict()


def of_float3(storage: Any) -> Any:
    state = storage.state_dict()
    state["layout"]["leaves"]["action"] = ["float3", []]
    return state


def entries_of(storage: Any) -> Any:
    return storage.state_dict()["entries"][0]


_SEEN = {"observation": zeros(4, 8), "done": zeros(4, 1).bool()}
FRAMES = TensorDict(
    _SEEN | {"other": zeros(4, 4), "next": _SEEN | {"other": zeros(4, 8)}}, [4]
)
FLAGS = TensorDict(
    {"over": zeros(4, 16).bool(), "next": {"over": zeros(4, 16).bool()}}, [4]
)
#: What no row can hold, with the storage that can.
UNPACKABLE: list[tuple[Any, str]] = [
    (lambda: TensorDict({"n": {}}, [3]), "contains no tensor"),
    (lambda: steps(3, s=NonTensorStack("a", "b", "c")), r"'s' .*torchrl\.data\.ListStorage, which takes it"),
    (lambda: steps(3, s=ones(3, 2).to_sparse()), r"'s' .*torchrl\.data\.ListStorage, which takes it"),
    (lambda: with_leaf(steps(3), "observation", jagged), r"'observation' .*data\.ListStorage, which takes it"),
    (lambda: lazy_stack([TensorDict({"x": ones(j)}) for j in (1, 2, 3)]), r"'x' .*\.LazyStackStorage, which takes it"),
]  # fmt: skip


def storage_of_lanes() -> Any:
    """Return a storage [5, 2] with 3 time steps."""
    made = td.PackedStorage(10, ndim=2)
    made.set(range(3), steps(2, 3).transpose(0, 1))
    return made


def indexed() -> Any:
    rb = buffer()
    index_of(rb.storage).length(tensor([0]))
    return rb


def ended(entries: dict[str, Any]) -> None:
    rb = fresh()
    for _ in range(2):
        rb.extend(TensorDict(entries, [2]))
    index_of(rb.storage).ended(tensor([0]))


def look_up(storage: Any) -> None:
    index_of(storage).steps_back(tensor([0]))


def state_of_index(capacity: int) -> Any:
    made = td.PackedStorage(capacity)
    made.set(range(4), steps(4))
    index_of(made).length(tensor([0]))
    return index_of(made).state_dict()


REFUSALS: Table = {
    ("PackedStorage", nothing): [
        (lambda _: td.PackedStorage("ten"), TypeError, "max_size must be a whole number, at least 1, got 'ten'"),
        (lambda _: td.PackedStorage(4, ndim=0), ValueError, "ndim must be a whole number, at least 1, got 0"),
        (lambda _: td.PackedStorage(21, lanes=3), ValueError, "needs ndim=2"),
        (lambda _: td.PackedStorage(4, scratch_dir="x", device="cuda"), ValueError, "scratch_dir needs device=.cpu"),
        (lambda _: td.PackedStorage(4, shared_init=True, device="cuda"), ValueError, "shared needs device='cpu'"),
        (lambda _: td.PackedStorage(4, device="cuda:99"), RuntimeError, "'cuda:99' is missing: torch finds . CUDA dev"),
        (lambda _: td.PackedStorage(4, share_next=True, device="cuda"), ValueError, "leave them out, or keep"),
        (lambda _: td.PackedStorage(4, share_next="yes"), ValueError, "must be True, False"),
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
        *((lambda storage, at=at: setitem(storage, at, steps(len(at))), IndexError,
           "position [67] has not been written, and cannot be edited: 6 time steps|out of range")
          for at in ([6], [7], [0, 6], [2, 7, 1])),
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
    ("PackedStorage.load_state_dict", storage): [
        (lambda storage: storage.load_state_dict(rows_of(steps(3, x=zeros(3)))), ValueError, "other keys, dtypes or"),
        (lambda storage: storage.load_state_dict(rows_of(steps(12), 15)), ValueError, r"\[15\] .* \[10\]"),
        (lambda storage: storage.load_state_dict(rows_of(steps(4), 4)), ValueError, r"\[4\] .* \[10\]"),
        (lambda storage: storage.load_state_dict(of_float3(storage)), ValueError, "'action' an unknown dtype 'float3'"),
    ],
    ("PackedStorage.load_state_dict, no rows", no_rows): [
        (lambda storage: storage.load_state_dict(rows_of(steps(12), 15)), ValueError, r"\[15\] .* \[10\]"),
    ],
    ("PackedStorage.load_state_dict, lanes", storage_of_lanes): [
        (lambda storage: storage.load_state_dict(rows_of(steps(3, 3), 15, ndim=2)), ValueError, "old.lane"),
    ],
    ("PackedStorage.load_state_dict, share_next", lambda: storage(share_next=True)): [
        *((lambda storage, spoil=spoil: storage.load_state_dict(storage.state_dict() | {"entries": spoil(storage)}),
           SchemaError, "do not belong together") for spoil in (
            lambda made: [entries_of(made)[:1]], lambda made: [entries_of(made)[:, :-1]], lambda made: [])),
        (lambda storage: storage.set(range(4), steps(4).exclude("action")), SchemaError, "key 'action' is missing"),
    ],
    **{("PackedStorage(share_next=, frames=)", lambda options=options: td.PackedStorage(**{"max_size": 9} | options)): [
        (lambda storage: storage.set(range(4), FRAMES), SchemaError, word)] for options, word in [
        ({"share_next": ["nothing"]}, "but rows lack that key or"),
        ({"share_next": ["done"]}, "of 1 bytes"),
        ({"share_next": ["other"]}, "another dtype"),
        ({"frames": {"nothing": 4}}, "not a key of the rows"),
        ({"frames": {"observation": 3}}, "not 3 frames"),
        ({"frames": {"other": 2}}, "another dtype"),
        ({"share_next": True, "max_size": 10**10}, r"1,073,741,820 of these fit\. Take a smaller max_size"),
    ]},
    ("TrajectoryIndex of shared flags", lambda: rows_in(FLAGS, share_next=True)): [
        (lambda storage: td.TrajectoryIndex(storage, done_key=("next", "over"), traj_key=None).reach(0), KeyError,
         "leave it out of share_next"),
    ],
    ("TrajectoryIndex of other rows", nothing): [
        *((lambda _, entries=entries: ended(entries), error, word) for entries, error, word in [
            ({"x": zeros(2, 1)}, KeyError, r"store \('next', 'done'\) \(or .*'terminated'.*'truncated'.*ids"),
            ({"done": zeros(2, 1).bool()}, KeyError, "no row marks the end of a trajectory"),
            ({"next": {"done": zeros(2, 1)}}, TypeError, r"must be bool, got float32 of shape \(1,\) per row"),
            ({"collector": {"traj_ids": zeros(2).double()}}, TypeError, "must be one integer per row, got float64"),
            ({"collector": {"traj_ids": zeros(2, 2).long()}}, TypeError, r"per row, got int64 of shape \(2,\)"),
        ]),
        (lambda _: look_up(td.PackedStorage(3)), RuntimeError, "trajectories of an empty"),
        (lambda _: index_of(LazyTensorStorage(3)), TypeError, "needs a PackedStorage, got a LazyTensorStorage"),
    ],
    ("TrajectoryIndex", indexed): [
        *((lambda rb, name=name, row=row: getattr(index_of(rb.storage), name)(tensor([3, row])), IndexError,
           f"row {row} is out of range: rows 0 to 19 have been written")
          for row in (-1, 20, 10**12) for name in ("reach", "steps_back", "steps_ahead", "ended", "length")),
        (lambda rb: index_of(rb.storage).length(freed(torch.arange(9))), (RuntimeError, ValueError), "no memory"),
    ],
}  # fmt: skip
