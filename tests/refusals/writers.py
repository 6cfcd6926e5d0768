"""What writers refuse."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import TensorDictRoundRobinWriter

from rlbuf_td import SchemaError
from tests.refusals.makers import *


def attached(writer: Any) -> Any:
    """Return a writer with 6 of 10 rows."""
    writer.register_storage(td.PackedStorage(10))
    writer.extend(steps(6))
    return writer


def counting() -> Any:
    return TensorDictRoundRobinWriter(track_generations=True)


def reservoir(size: int = 30) -> Any:
    rb = fresh(storage=td.PackedStorage(size), writer=td.ReservoirWriter())
    rb.extend(steps(200))
    return rb


def complete(data: TensorDict, **options: Any) -> Any:
    rb = rollout(0, 4, 2, **options)
    rb.extend(data)
    return rb


def with_nan() -> TensorDict:
    data = rolled(2, 4)
    data["state_value"][1, 2] = nan
    return data


KEEPS_NONE = "in time order, a ReservoirWriter keeps none"
GOOD = zeros(2, 4, 1)
BAD = zeros(2, 4, 1).index_put_(tuple(tensor([[1, 2, 0], [1, 3, 0]]).T), tensor(nan))
REFUSALS: Table = {
    ("track_generations", nothing): [
        (lambda _: td.RingWriter(track_generations=True), NotImplementedError, "In place of update_if_present, rb.wri"),
        (lambda _: fresh(writer=counting()), NotImplementedError, "track_generations=True is not supported: leave it"),
        (lambda _: fresh().set_writer(counting()), NotImplementedError, "track_generations=True is not supported"),
        (lambda _: filled().update_if_present(index=tensor([0]), generation=tensor([0]), patch={}), NotImplementedError,
         "write_back"),
    ],
    ("RingWriter", lambda: attached(td.RingWriter())): [
        (lambda writer: writer.extend(steps(0)), ValueError, "at least one transition, got none"),
        (lambda writer: writer.extend(steps(4).exclude("action")), SchemaError, "key 'action' is missing"),
        (lambda writer: writer.add(steps().exclude("action")), SchemaError, "key 'action' is missing"),
        (lambda writer: writer.write_at(tensor([1, 0]), steps(2).exclude("action")), SchemaError, "key 'action' is"),
        (lambda writer: fresh(writer=writer), ValueError, "writes to the storage of another buffer: use one writer"),
        (lambda writer: fresh().set_writer(writer), ValueError, "writes to the storage of another buffer: use one"),
    ],
    ("ReservoirWriter", lambda: attached(td.ReservoirWriter())): [
        (lambda writer: writer.extend(steps(0)), ValueError, "at least one transition, got none"),
        (lambda writer: writer.extend(steps(4).exclude("action")), SchemaError, "key 'action' is missing"),
        (lambda writer: writer.add(steps().exclude("action")), SchemaError, "key 'action' is missing"),
        (lambda writer: writer.load_state_dict({"following": 1.5}), ValueError, "not that of a ReservoirWriter"),
    ],
    ("ReservoirWriter, a full reservoir", reservoir): [
        (lambda rb: rb.extend(steps(50).exclude("action")), SchemaError, "key 'action' is missing"),
        (lambda rb: rb.last(2), TypeError, "keeps no order of age"),
        (lambda rb: rb.set_sampler(n_step()), ValueError, "use a RingWriter"),
        (lambda rb: fresh(storage=rb.storage, sampler=n_step()).sample(), ValueError, KEEPS_NONE),
        (lambda rb: filled(n_step()).set_storage(rb.storage), ValueError, KEEPS_NONE),
        (lambda rb: td.ReplayBuffer.from_torchrl(rb, sampler=n_step()), ValueError, "needs rows in time order"),
    ],
    ("ReservoirWriter, loaded into a larger one", lambda: reservoir(40)): [
        (loads(reservoir), td.CheckpointError, r"\[30\] .* \[40\].*old\[:\]"),
    ],
    ("writers over another storage", nothing): [
        (lambda _, make=make: TensorDictReplayBuffer(storage=LazyTensorStorage(8), writer=make()), TypeError,
         "a .*Writer needs a PackedStorage, got a LazyTensorStorage: use")
        for make in (td.RingWriter, td.RolloutWriter, td.ReservoirWriter, td.QueueWriter)
    ],
    ("RolloutWriter", nothing): [
        (lambda _: td.RolloutWriter(1.5), ValueError, r"RolloutWriter: gamma must lie in \[0, 1\], got 1.5"),
        (lambda _: td.RolloutWriter(value_network=torch.nn.Identity()), TypeError, r"wrap it, TensorDictModule\("),
        (lambda _: td.RolloutWriter(estimator=3), TypeError, "estimator must be a function of a rollout, got int"),
        *((lambda _, group=group: td.RolloutWriter(group=group), ValueError, "group must be the name of a group of ag")
          for group in (3, (), ("next", "agents"), ["red", "blue"])),
    ],
    ("RolloutWriter without a network", lambda: rollout(0, 4, 2, value_network=None)): [
        (lambda rb: rb.extend(rolled(2, 4).exclude(REWARD)), SchemaError, r"no \('next', 'reward'\) in the data;"),
        (lambda rb: rb.extend(rolled(2, 4).exclude(*ENDS)), SchemaError, r"no \('next', 'done'\) in the data"),
        (lambda rb: rb.extend(rolled(2, 4, value=3)), ValueError, "values 'state_value' and rewards .* must share one"),
    ],
    ("RolloutWriter of a group", lambda: td.RolloutBuffer(4, 2, group="agents")): [
        (lambda rb: rb.extend(rolled(2, 4)), SchemaError, r"no \('next', 'agents', 'reward'\) in the data; there are"),
    ],
    ("RolloutWriter, rows of another writer", lambda: td.RolloutBuffer(30, storage=filled().storage)): [
        (lambda rb: rb.extend(rolled(4)), SchemaError, "advantage"),
    ],
    ("RolloutWriter without a network, complete", lambda: complete(rolled(2, 4), value_network=None)): [
        (lambda rb: rb.sample(), ValueError, r"2 rows need the value of their next state: their.*\. Pass val"),
    ],
    ("RolloutWriter without values, complete", lambda: complete(steps(2, 4), value_network=None)): [
        (lambda rb: rb.sample(), ValueError, "8 of 8 values 'state_value' are missing or NaN\\. Pass value_network="),
    ],
    ("RolloutWriter, a value is NaN", lambda: complete(with_nan(), value_network=None)): [
        (lambda rb: rb.sample(), ValueError, "1 of 8 values 'state_value' are missing or NaN"),
    ],
    ("RolloutWriter, another network", lambda: complete(rolled(2, 4), value_network=critic("v"))): [
        (lambda rb: rb.sample(), SchemaError, r"the value network writes \['v'\], not 'state_value'"),
    ],
    ("RolloutWriter, a network that fails", lambda: complete(rolled(2, 4), value_network=critic(fails=True))): [
        *((read, RuntimeError, "the network failed") for read in (
            lambda rb: rb.sample(), lambda rb: next(iter(rb)), lambda rb: rb.summary(), lambda rb: rb[:],
            lambda rb: rb.last(1), lambda rb: rb.storage["advantage"])),
    ],
    **{("RolloutWriter(estimator=)", partial(complete, rolled(2, 4), estimator=lambda _, found=found: found)): [
        (lambda rb: rb.sample(), error, word)] for found, error, word in [
        (None, TypeError, r"a tuple \(advantage, value_target\), got NoneType: from TorchRL's"),
        (TensorDict(), TypeError, "got TensorDict: from TorchRL's"),
        ((GOOD, GOOD, GOOD), TypeError, "got tuple"),
        ((GOOD, 0.0), TypeError, "got tuple"),
        ((GOOD, GOOD[..., 0]), ValueError, r"value_target as torch.float32 of shape \[2, 4\] on cpu, expected "
         r"torch.float32 of shape \[2, 4, 1\] on cpu, like the values"),
        ((GOOD.transpose(0, 1), GOOD), ValueError, r"returned advantage as torch.float32 of shape \[4, 2, 1\]"),
        ((GOOD.double(), GOOD), ValueError, "returned advantage as torch.float64 of .* expected torch.float32"),
        ((GOOD, BAD), ValueError, r"NaN or infinity: 2 of 8 of value_target, first at \[1, 2, 0\]"),
        ((1 / GOOD, GOOD), ValueError, r"NaN or infinity: 8 of 8 of advantage, first at \[0, 0, 0\]"),
    ]},
}  # fmt: skip
