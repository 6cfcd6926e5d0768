"""What storages, trajectories and writers refuse."""

from __future__ import annotations

from functools import partial
from operator import methodcaller, setitem
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.refusals.makers import *


def rows_in(data: TensorDict, size: int = 10, **options):
    made = td.PackedStorage(size, **options)
    made.set(range(len(data)), data)
    return made


def rows_of(data: TensorDict, size: int = 10, **options):
    """Return the state of a storage."""
    return rows_in(data, size, **options).state_dict()


def of_float3(storage):
    state = storage.state_dict()
    state["layout"]["leaves"]["action"] = ["float3", []]
    return state


def entries_of(storage):
    return storage.state_dict()["entries"][0]


_SEEN = {"observation": zeros(4, 8), "done": zeros(4, 1).bool()}
FRAMES = TensorDict(
    _SEEN | {"other": zeros(4, 4), "next": _SEEN | {"other": zeros(4, 8)}}, [4]
)
FLAGS = TensorDict(
    {"over": zeros(4, 16).bool(), "next": {"over": zeros(4, 16).bool()}}, [4]
)


def storage_of_lanes():
    """Return a storage [5, 2] with 3 time steps."""
    made = td.PackedStorage(10, ndim=2)
    made.set(range(3), steps(2, 3).transpose(0, 1))
    return made


def indexed():
    rb = buffer()
    index_of(rb.storage).length(tensor([0]))
    return rb


def ended(entries: dict[str, Any]) -> None:
    rb = fresh()
    for _ in range(2):
        rb.extend(TensorDict(entries, [2]))
    index_of(rb.storage).ended(tensor([0]))


def look_up(storage) -> None:
    index_of(storage).steps_back(tensor([0]))


def attached(make):
    """Return a writer with 6 of 10 rows."""
    writer = make()
    writer.register_storage(td.PackedStorage(10))
    writer.extend(steps(6))
    return writer


def reservoir(size: int = 30):
    rb = fresh(storage=td.PackedStorage(size), writer=td.ReservoirWriter())
    rb.extend(steps(200))
    return rb


def complete(data: TensorDict, **options):
    rb = rollout(0, 4, 2, **options)
    rb.extend(data)
    return rb


def with_nan() -> TensorDict:
    data = rolled(2, 4)
    data["state_value"][1, 2] = nan
    return data


#: What no row can hold, with the storage that can.
UNPACKABLE: list[tuple[Any, str]] = [
    (lambda: TensorDict({"n": {}}, [3]), "SchemaError: contains no tensor"),
    (lambda: steps(3, s=NonTensorStack("a", "b", "c")), r"SchemaError: 's' .*torchrl\.data\.ListStorage, which takes"),
    (lambda: steps(3, s=ones(3, 2).to_sparse()), r"SchemaError: 's' .*torchrl\.data\.ListStorage, which takes it"),
    (lambda: with_leaf(steps(3), "observation", jagged), r"SchemaError: 'observation' .*ListStorage, which takes it"),
    (lambda: lazy_stack([TensorDict({"x": ones(j)}) for j in (1, 2, 3)]),
     r"SchemaError: 'x' .*\.LazyStackStorage, which takes it"),
]  # fmt: skip
OUT, NO_MASK = "IndexError: out of (range|bounds)", "IndexError: shape of the mask"
UNWRITTEN = "IndexError: leave rows after 5 unwritten|out of range"
NO_FIT = r"SchemaError: batch size \(\d,\) cannot fill 3 positions"
NO_ACTION = "SchemaError: key 'action' is missing"
KEEPS_NONE = "ValueError: in time order, a ReservoirWriter keeps none"
LEAVE_OUT = "KeyError: leave it out of share_next"
NO_STEPS = "ValueError: at least one transition, got none"
GOOD = zeros(2, 4, 1)
BAD = zeros(2, 4, 1).index_put_(tuple(tensor([[1, 2, 0], [1, 3, 0]]).T), tensor(nan))

STORAGES: Table = {
    ("PackedStorage.set, before the first write", no_rows): [
        *each(lambda storage, data: storage.set(range(3), data()), *UNPACKABLE),
        (lambda storage: storage.set(range(3), steps(2)), NO_FIT),
        (lambda storage: storage.set(range(1, 4), steps(3)), "IndexError: leave rows .* unwritten"),
    ],
    ("PackedStorage.set, before the first write to lanes", lambda: td.PackedStorage(12, ndim=2)): [
        (lambda storage: storage.set(range(3), steps(3)), r"SchemaError: ndim=2 takes .*got batch size \(3,\)"),
        (lambda storage: storage.set(range(3), steps(3, 0)), r"SchemaError: transitions without lanes.*\(0,\)"),
    ],
    ("PackedStorage.set", storage): [
        *misfits(lambda storage, data: storage.set(range(4), data), lambda: steps(4), RAGGED),
        *misfits(lambda storage, data: storage.set(3, data), steps),
        (lambda storage: storage.set([0, 1, 2], steps(4)), NO_FIT),
        *each(lambda storage, at: storage.set(at, steps(2)), *(
            (at, UNWRITTEN) for at in (range(7, 9), slice(7, 9), tensor([0, 7]), [7, 9], [9, 10], tensor([0, -7])))),
        (lambda storage: storage.set(7, steps()), UNWRITTEN),
        *each(lambda storage, at: setitem(storage, at, steps(len(at))), *(
            (at, "IndexError: position [67] has not been written, and cannot be edited: 6 time steps|out of range")
            for at in ([6], [7], [0, 6], [2, 7, 1]))),
        *each(lambda storage, at: storage.set(at, steps(0)), *(
            (at, "IndexError: empty set of positions") for at in ([], slice(2, 2)))),
        *each(lambda storage, at: storage.set(at, steps(3)), *(
            (at, "IndexError: cannot write at a cursor") for at in ([0.5], tensor([[0, 1, 2]]), "x", ..., None))),
    ],
    ("PackedStorage.set, lanes", storage_of_lanes): each(
        lambda storage, arguments: storage.set(*arguments),
        ((range(3), steps(3, 3)), r"SchemaError: of shape \(3, 3.*expected .* \(3, 2"),
        ((range(3), steps(3)), r"SchemaError: of shape \(3.*expected .* \(3, 2"),
        (((tensor([3]), tensor([0])), steps(1)), OUT), (((tensor([0]), tensor([2])), steps(1)), OUT),
        ((ones(5, 3).bool(), steps(1)), NO_MASK)),
    ("PackedStorage.get", storage): each(
        lambda storage, at: storage.get(at),
        *((at, OUT) for at in (6, -7, tensor([0, 6]), [6], np.array([-7]))),
        (ones(5).bool(), NO_MASK), (tensor([0.5]), "IndexError: indices"),
        (freed(torch.arange(4)), "RuntimeError|IndexError: no memory|not allocated"),
        ("zz", "KeyError: zz"), (("next", "zz"), "KeyError: zz")),
    ("PackedStorage.get, lanes", storage_of_lanes): each(
        lambda storage, at: storage.get(at), ((0, 2), OUT), ((zeros(1).long(), tensor([2])), OUT)),
    ("PackedStorage.get of no rows", no_rows): each(
        lambda storage, at: storage.get(at), *((at, "RuntimeError: before the first write") for at in (0, "action"))),
    ("PackedStorage, reserved", storage): [
        (lambda storage: storage.release(), "RuntimeError: rows that have been written cannot be released"),
        (lambda storage: storage.reserve(steps()), "RuntimeError: reserve them before the first write"),
        (lambda storage: td.PackedStorage(10, ndim=2).reserve(steps()), "SchemaError: 1 or more batch dims"),
    ],
    **{("PackedStorage.load_state_dict", make): each(
        lambda storage, state: storage.load_state_dict(state(storage)), *cases) for make, cases in [
        (storage, [(lambda _: rows_of(steps(3, x=zeros(3))), "ValueError: other keys, dtypes or"),
                   (lambda _: rows_of(steps(12), 15), r"ValueError: \[15\] .* \[10\]"),
                   (lambda _: rows_of(steps(4), 4), r"ValueError: \[4\] .* \[10\]"),
                   (of_float3, "ValueError: 'action' an unknown dtype 'float3'")]),
        (no_rows, [(lambda _: rows_of(steps(12), 15), r"ValueError: \[15\] .* \[10\]")]),
        (storage_of_lanes, [(lambda _: rows_of(steps(3, 3), 15, ndim=2), "ValueError: old.lane")]),
    ]},
    ("PackedStorage.load_state_dict, share_next", lambda: storage(share_next=True)): [
        *each(lambda storage, spoil: storage.load_state_dict(storage.state_dict() | {"entries": spoil(storage)}), *(
            (spoil, "SchemaError: do not belong together") for spoil in (
                lambda made: [entries_of(made)[:1]], lambda made: [entries_of(made)[:, :-1]], lambda made: []))),
    ],
    **{("PackedStorage(share_next=, frames=)", lambda options=options: td.PackedStorage(**{"max_size": 9} | options)): [
        (lambda storage: storage.set(range(4), FRAMES), said)] for options, said in [
        ({"share_next": ["nothing"]}, "SchemaError: but rows lack that key or"),
        ({"share_next": ["done"]}, "SchemaError: of 1 bytes"),
        ({"share_next": ["other"]}, "SchemaError: another dtype"),
        ({"frames": {"nothing": 4}}, "SchemaError: not a key of the rows"),
        ({"frames": {"observation": 3}}, "SchemaError: not 3 frames"),
        ({"frames": {"other": 2}}, "SchemaError: another dtype"),
        ({"share_next": True, "max_size": 10**10}, r"SchemaError: 1,073,741,820 of these fit\. Take a smaller max_s"),
    ]},
    ("TrajectoryIndex of shared flags", lambda: rows_in(FLAGS, share_next=True)): [
        (lambda storage: td.TrajectoryIndex(storage, done_key=("next", "over"), traj_key=None).reach(0), LEAVE_OUT),
    ],
    ("TrajectoryIndex of other rows", nothing): [
        *each(lambda _, entries: ended(entries),
              ({"x": zeros(2, 1)},
               r"KeyError: store \('next', 'done'\) \(or .*'terminated'.*'truncated'.*ids"),
              ({"done": zeros(2, 1).bool()}, "KeyError: no row marks the end of a trajectory"),
              ({"next": {"done": zeros(2, 1)}}, r"TypeError: must be bool, got float32 of shape \(1,\) per row"),
              ({"collector": {"traj_ids": zeros(2).double()}},
               "TypeError: must be one integer per row, got float64"),
              ({"collector": {"traj_ids": zeros(2, 2).long()}}, r"TypeError: per row, got int64 of shape \(2,\)")),
        (lambda _: look_up(td.PackedStorage(3)), "RuntimeError: trajectories of an empty"),
        (lambda _: index_of(LazyTensorStorage(3)), "TypeError: needs a PackedStorage, got a LazyTensorStorage"),
    ],
    ("TrajectoryIndex", indexed): [
        *each(lambda rb, look_up: look_up(index_of(rb.storage)), *(
            (methodcaller(name, tensor([3, row])), f"IndexError: row {row} is out of range: rows 0 to 19 have been wri")
            for row in (-1, 20, 10**12) for name in ("reach", "steps_back", "steps_ahead", "ended", "length"))),
        (lambda rb: index_of(rb.storage).length(freed(torch.arange(9))), "RuntimeError|ValueError: no memory"),
    ],
}  # fmt: skip
WRITERS: Table = {
    **{("RingWriter, ReservoirWriter", partial(attached, make)): [
        (lambda writer: writer.extend(steps(0)), NO_STEPS),
        *everywhere(NO_ACTION, lambda writer: writer.extend(without("action")),
                    lambda writer: writer.add(steps().exclude("action"))),
        *everywhere("ValueError: writes to the storage of another buffer: use one",
                    lambda writer: fresh(writer=writer), lambda writer: fresh().set_writer(writer)),
    ] for make in (td.RingWriter, td.ReservoirWriter)},
    ("RingWriter.write_at", lambda: attached(td.RingWriter)): [
        (lambda writer: writer.write_at(tensor([1, 0]), steps(2).exclude("action")), NO_ACTION),
    ],
    ("ReservoirWriter.load_state_dict", lambda: attached(td.ReservoirWriter)): [
        (lambda writer: writer.load_state_dict({"following": 1.5}), "ValueError: not that of a ReservoirWriter"),
    ],
    ("ReservoirWriter, a full reservoir", reservoir): [
        (lambda rb: rb.extend(steps(50).exclude("action")), NO_ACTION),
        (lambda rb: rb.last(2), "TypeError: keeps no order of age"),
        (lambda rb: rb.set_sampler(n_step()), "ValueError: use a RingWriter"),
        *everywhere(KEEPS_NONE, lambda rb: fresh(storage=rb.storage, sampler=n_step()).sample(),
                    lambda rb: filled(n_step()).set_storage(rb.storage)),
        (lambda rb: td.ReplayBuffer.from_torchrl(rb, sampler=n_step()), "ValueError: needs rows in time order"),
    ],
    ("ReservoirWriter, loaded into a larger one", lambda: reservoir(40)): [
        (loads(reservoir), r"CheckpointError: \[30\] .* \[40\].*old\[:\]"),
    ],
    ("writers over another storage", nothing): each(
        lambda _, make: TensorDictReplayBuffer(storage=LazyTensorStorage(8), writer=make()), *(
            (make, "TypeError: a .*Writer needs a PackedStorage, got a LazyTensorStorage: use")
            for make in (td.RingWriter, td.RolloutWriter, td.ReservoirWriter, td.QueueWriter))),
    ("RolloutWriter without a network", lambda: rollout(0, 4, 2, value_network=None)): each(
        lambda rb, rows: rb.extend(rows),
        (rolled(2, 4).exclude(REWARD), r"SchemaError: no \('next', 'reward'\) in the data;"),
        (rolled(2, 4).exclude(*ENDS), r"SchemaError: no \('next', 'done'\) in the data"),
        (rolled(2, 4, value=3), "ValueError: values 'state_value' and rewards .* must share one")),
    ("RolloutWriter of a group", lambda: td.RolloutBuffer(4, 2, group="agents")): [
        (lambda rb: rb.extend(rolled(2, 4)), r"SchemaError: no \('next', 'agents', 'reward'\) in the data; there are"),
    ],
    ("RolloutWriter, rows of another writer", lambda: td.RolloutBuffer(30, storage=filled().storage)): [
        (lambda rb: rb.extend(rolled(4)), "SchemaError: advantage"),
    ],
    **{("RolloutWriter, complete", lambda rows=rows, network=network: complete(rows(), value_network=network)): [
        (lambda rb: rb.sample(), said)] for rows, network, said in [
        (lambda: rolled(2, 4), None, r"ValueError: 2 rows need the value of their next state: their.*\. Pass val"),
        (lambda: steps(2, 4), None,
         "ValueError: 8 of 8 values 'state_value' are missing or NaN\\. Pass value_network="),
        (with_nan, None, "ValueError: 1 of 8 values 'state_value' are missing or NaN"),
        (lambda: rolled(2, 4), critic("v"), r"SchemaError: the value network writes \['v'\], not 'state_value'"),
    ]},
    ("RolloutWriter, a network that fails", lambda: complete(rolled(2, 4), value_network=critic(fails=True))):
        everywhere("RuntimeError: the network failed",
            lambda rb: rb.sample(), lambda rb: next(iter(rb)), lambda rb: rb.summary(), lambda rb: rb[:],
            lambda rb: rb.last(1), lambda rb: rb.storage["advantage"]),
    **{("RolloutWriter(estimator=)", partial(complete, rolled(2, 4), estimator=lambda _, found=found: found)): [
        (lambda rb: rb.sample(), said)] for found, said in [
        (None, r"TypeError: a tuple \(advantage, value_target\), got NoneType: from TorchRL's"),
        (TensorDict(), "TypeError: got TensorDict: from TorchRL's"),
        ((GOOD, GOOD, GOOD), "TypeError: got tuple"), ((GOOD, 0.0), "TypeError: got tuple"),
        ((GOOD, GOOD[..., 0]), r"ValueError: value_target as torch.float32 of shape \[2, 4\] on cpu, expected "
         r"torch.float32 of shape \[2, 4, 1\] on cpu, like the values"),
        ((GOOD.transpose(0, 1), GOOD), r"ValueError: returned advantage as torch.float32 of shape \[4, 2, 1\]"),
        ((GOOD.double(), GOOD), "ValueError: returned advantage as torch.float64 of .* expected torch.float32"),
        ((GOOD, BAD), r"ValueError: NaN or infinity: 2 of 8 of value_target, first at \[1, 2, 0\]"),
        ((1 / GOOD, GOOD), r"ValueError: NaN or infinity: 8 of 8 of advantage, first at \[0, 0, 0\]"),
    ]},
}  # fmt: skip
REFUSALS = STORAGES | WRITERS
