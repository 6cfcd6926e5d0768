"""What buffers refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from operator import setitem
from queue import Empty, Full
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import (
    FlatStorageCheckpointer,
    PrioritizedSampler,
    RandomSampler,
)
from torchrl.envs import ObservationNorm

from rlbuf_td import SchemaError
from tests.catalogue import SAMPLERS
from tests.refusals.makers import *


def write_back(keys: Any, **entries: Any) -> Callable[[Any], Any]:
    """Return a call that writes back a batch with other entries; without those that are
    None."""
    removed = [name for name, value in entries.items() if value is None]
    changed = {name: value for name, value in entries.items() if value is not None}
    return lambda rb: rb.write_back(
        rb.batch.clone().update(changed).exclude(*removed), keys
    )


def stopped(rb: Any) -> Any:
    rb.shutdown()
    return rb


def with_stopped_member(mixed: Any) -> Any:
    stopped(mixed.members["b"])
    return mixed


def of_lanes(size: int = 30) -> Any:
    """Return a buffer [T, E], with three lanes of 4 steps unless it is smaller."""
    rb = fresh(
        storage=td.PackedStorage(size, ndim=2), sampler=td.ProportionalSampler(size)
    )
    if size == 30:
        rb.extend(steps(3, 4))
    return rb


def unlike(sampler: Any = None) -> Any:
    """Return a buffer with lanes of 1, 5 and 12 rows, in use."""
    rb = lane_buffer(sampler=sampler or td.ProportionalSampler(36))
    for lane, count in ((0, 1), (1, 5), (2, 30)):
        rb.extend(steps(count), lanes=lane)
    rb.batch = rb.sample().set("td_error", ones(4))
    index_of(rb.storage).length(tensor([0]))
    return rb


def lane_buffer(**options: Any) -> Any:
    rb = fresh(storage=td.PackedStorage(36, ndim=2, lanes=3), **options)
    rb.storage.reserve(steps(3))
    return rb


def moved_heads(storage: Any) -> Any:
    state = storage.state_dict()
    state["ring"]["head"][1] += 1
    return state


def functionalized(work: Callable[[Any, torch.Tensor], object]) -> Callable[[Any], Any]:
    return lambda rb: torch.func.functionalize(lambda x: (work(rb, x), x)[1])(ones(4))


def in_fake_mode(rb: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: a fake tensor has no address
        with FakeTensorMode(allow_non_fake_inputs=True):
            rb.sample()


def normalized() -> Any:
    return buffer(
        td.ProportionalSampler(30), transform=ObservationNorm(0.0, 1.0, ["observation"])
    )


WIDER = TensorDict({"observation": ones(20, 3), "reward": ones(20, 7)}, [20])
NOT_WRITTEN = "of lane [01] has not been written: it has [15] rows"
GOALS = steps(20, desired_goal=zeros(20, 2)).set(
    ("next", "achieved_goal"), zeros(20, 2)
)


def wider() -> TensorDict:
    return steps(3).set("observation", zeros(3, 4))


class Holding(td.UniformSampler):
    """Has a state that only pickle can save."""

    state_keys = ("held",)
    held = object()


def elsewhere(**parts: Any) -> Any:
    return filled(storage=LazyTensorStorage(30), **parts)


def queue(**options: Any) -> Any:
    """Return a queue in which 5 rows wait."""
    rb = td.ExperienceQueue(
        **{"storage": td.PackedStorage(16), "batch_size": 4, "timeout": 0.01} | options
    )
    rb.extend(steps(5))
    return rb


def queue_parts(waiting: int) -> Any:
    writer = td.QueueWriter()
    rb = td.ReplayBuffer(
        storage=td.PackedStorage(2),
        sampler=td.QueueSampler(writer),
        writer=writer,
        batch_size=2,
    )
    if waiting:
        rb.extend(steps(waiting))
    return rb


def mixture(a: Any = prioritized, b: Any = ranked, rows: Any = None) -> Any:
    """Return a mixture, and write rows to the member that is new. Its ``batch`` has
    errors."""
    members = {"a": a(), "b": b()}
    mixed = td.ReplayBufferMixture(
        members,
        {"a": 0.5, "b": 0.5},
        batch_size=4,
        generator=torch.Generator().manual_seed(0),
    )
    if rows is not None:
        members["a" if a is fresh else "b"].extend(rows)
    with suppress(Exception):
        mixed.batch = mixed.sample().set("td_error", ones(4))
    return mixed


def spoiled(mixed: Any, part: str) -> Any:
    """Return a state whose last member has a wrong part."""
    state = mixed.state_dict()
    state["members"]["b"][part] = {"bad": 1}
    return state | {"shares": {"a": 0.9, "b": 0.1}}


def quiet(rb: Any, rows: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows of several steps
        rb.extend(rows)
    return rb


ROWS_OF_X = TensorDict({"x": zeros(3)}, [3])
REFUSALS: Table = {
    ("PackedStorage in a buffer", buffer): [
        (lambda rb: setattr(rb.storage, "checkpointer", print), NotImplementedError, "without TorchRL's checkpointers"),
        (lambda rb: rb.storage.register_save_hook(print), NotImplementedError, "without TorchRL's checkpointers"),
        (lambda rb: rb.storage.register_load_hook(print), NotImplementedError, "without TorchRL's checkpointers"),
    ],
    ("ReplayBuffer", nothing): [
        (lambda _: td.ReplayBuffer(checkpointer=FlatStorageCheckpointer()), NotImplementedError, "without TorchRL"),
        (lambda _: td.ReplayBuffer(device="cuda:99"), RuntimeError, "device='cuda:99' is missing: torch finds . CUDA"),
        (lambda _: td.ReplayBuffer(lane_key="e", storage=td.PackedStorage(9)), TypeError, "lane_key= needs a "),
        (lambda _: td.ReplayBuffer(lane_key="e", storage=td.PackedStorage(8, ndim=2), writer=td.ReservoirWriter()),
         TypeError, "lane_key= needs a "),
        (lambda _: td.ReplayBuffer(storage=td.PackedStorage(9), prefetch=1), ValueError, "batch-size must be"),
        *((lambda _, given=given: td.PrioritizedReplayBuffer(alpha=0.7, beta=0.9, **given), NotImplementedError,
           "sync=False and sampler_device=") for given in ({"sync": False}, {"sampler_device": "cpu"})),
        (lambda _: td.PrioritizedReplayBuffer(alpha=0.7, beta=0.9, sampler=td.UniformSampler()), TypeError, "its own"),
        (lambda _: td.ReplayBuffer(storage=td.PackedStorage(9, device="meta"), device="cpu"), TypeError, "on the CPU"),
        (lambda _: td.ReplayBuffer(collate_fn=lambda rows: rows, device="cpu"), TypeError, "collate_fn"),
        (lambda _: td.ReplayBuffer(sampler=RandomSampler(), device="cpu"), TypeError,
         "a sampler of this package.*got PackedStorage on cpu and RandomSampler"),
        *((lambda _, given=given: td.ReplayBuffer(**given), ValueError, word) for given, word in [
            ({"samples_per_insert": 0}, "samples_per_insert must be a positive number"),
            ({"samples_per_insert": 4, "tolerance": 3}, "tolerance must be at least 4"),
            ({"tolerance": 3}, "tolerance needs samples_per_insert"),
            ({"min_size": 1.5}, "min_size must be a whole number"),
            ({"samples_per_insert": 1, "prefetch": 2, "batch_size": 4}, "use prefetch=0"),
            ({"samples_per_insert": 1, "tolerance": 4, "batch_size": 8}, "block forever .* make it at least 8"),
            ({"priority_key": 3}, "a key is a string, or strings such as .* got 3"),
        ]),
    ],
    ("ReplayBuffer.register_save_hook", buffer): [
        (lambda rb: rb.register_save_hook(print), NotImplementedError, "without TorchRL's checkpointers"),
        (lambda rb: rb.register_load_hook(print), NotImplementedError, "without TorchRL's checkpointers"),
    ],
    ("ReplayBuffer.extend", buffer): [
        *misfits(lambda rb, data: rb.extend(data), lambda: steps(4), RAGGED),
        (lambda rb: rb.extend(steps()), ValueError, "got a single one: use add"),
        (lambda rb: rb.extend(TensorDict(steps(4).to_dict())), ValueError, r"pass TensorDict\(data, \[4\]\), or, if"),
        (lambda rb: rb.extend(steps(4, loc=zeros(4), scale=zeros(4))), SchemaError, r"unknown keys 'loc', 'scale': .*"
         r"data\.exclude\('loc', 'scale'\), .*append_transform\(ExcludeTransform\('loc', 'scale', inverse=True\)\)"),
    ],
    ("RolloutBuffer, chunks", nothing): [
        (lambda _: td.RolloutBuffer(8, sequence_length=4, batch_size=10), ValueError, "must be a multiple of sequence_"
         "length=4, got 10: for 32 chunks use 128"),
    ],
    ("ReplayBuffer.add", buffer): [
        *misfits(lambda rb, data: rb.add(data), steps),
        (lambda rb: rb.add(steps(3)), SchemaError, "If these are several transitions, use extend"),
        (lambda rb: rb.add(zeros(3), 1, 0.5), TypeError, "add takes one TensorDict, got 3 arguments: add_step takes"),
    ],
    ("ReplayBuffer.extend, lists", buffer): [
        (lambda rb: rb.extend([steps(), steps().set("action", zeros(2).long())]), ValueError, "stack|ragged"),
        (lambda rb: rb.extend([steps(), steps(2)]), ValueError, "different batch sizes"),
        (lambda rb: rb.extend({"x": zeros(2, 3)}), TypeError, r"TensorDict\(data, \[n\]\)"),
        (lambda rb: rb.extend(np.zeros(3)), TypeError, r"got ndarray: wrap it, TensorDict\(\{.observation.: data"),
        (lambda rb: rb.add([1.0]), TypeError, "add takes a TensorDict, got list: wrap it"),
    ],
    ("ReplayBuffer.extend, priorities", prioritized): [
        *misfits(lambda rb, data: rb.extend(data), lambda: steps(4), RAGGED),
        *((lambda rb, wrong=wrong: rb.extend(steps(4, td_error=wrong)), error, word) for wrong, error, word in [
            (zeros(4, dtype=torch.complex64), TypeError, "TD error"),
            (TensorDict({"a": zeros(4)}, [4]), TypeError, "TD error"),
            (zeros(4, 0), ValueError, "TD error"),
            (tensor([1.0, nan, 1.0, 1.0]), ValueError, "1 of 4 TD errors are NaN or infinite"),
            (zeros(4, 4), ValueError, r"shape \[4, 4\] for a batch \[4\]"),
        ]),
        (functionalized(lambda rb, x: rb.extend(steps(4, x=x * 2))), (RuntimeError, ValueError), "no memory"),
    ],
    ("ReplayBuffer.extend, priorities, before the first write", lambda: fresh(sampler=td.ProportionalSampler(30))): [
        (lambda rb: rb.extend(steps(4, td_error=full((4,), nan))), ValueError, "4 of 4 TD errors are NaN or infinite"),
        (lambda rb: rb.extend(steps(4, td_error=zeros(4, 0))), ValueError, "TD error"),
    ],
    ("ReplayBuffer.extend, reserved rows", lambda: td.ReplayBuffer.from_schema(steps(), 30, batch_size=4)): [
        (lambda rb: rb.last(1), RuntimeError, "empty"),
        (lambda rb: rb.extend(TensorDict({}, [3])), SchemaError, "contains no tensor"),
        (lambda rb: rb.extend(steps(2).set("observation", zeros(2, 4))), SchemaError, r"as float32 of shape \(2, 4\)"),
    ],
    ("ReplayBuffer.extend, reserved and shared", lambda: td.ReplayBuffer.from_schema(steps(), 30, shared=True)): [
        (lambda rb: rb.extend(steps(4, y=ones(4))), SchemaError, "unknown key 'y'"),
    ],
    ("ReplayBuffer.extend, emptied", emptied): [
        (lambda rb: rb.extend(TensorDict({"other": zeros(2)}, [2])), SchemaError, "'other'"),
        (lambda rb: rb.sample(), RuntimeError, "empty storage"),
        *((lambda rb, at=at: rb.storage.get(at), IndexError, "out of|0 rows|empty") for at in (0, tensor([0]), [-1])),
    ],
    ("ReplayBuffer.extend, [T, E]", lambda: of_lanes()): [
        (lambda rb: rb.extend(steps(4)), SchemaError, r"extend takes batch size \[E, T\] .* got \[4\]"),
        *misfits(lambda rb, data: rb.extend(data), lambda: steps(3, 4)),
        (lambda rb: rb.extend(steps(2, 4)), SchemaError, "lanes|shape"),
        (lambda rb: rb.update_priority((tensor([0]), tensor([3])), ones(1)), IndexError, "lanes are 0 to 2"),
    ],
    ("ReplayBuffer.extend(lanes=)", unlike): [
        *((lambda rb, lanes=lanes: rb.extend(steps(2), lanes=lanes), error, word) for lanes, error, word in [
            ([0, 3], IndexError, "lane 3 is out of range: lanes are 0 to 2"),
            ([0, 1, 2], ValueError, "lanes of shape"),
            (tensor([0.0, 1.0]), TypeError, "must be integers"),
        ]),
        *misfits(lambda rb, data: rb.extend(data, lanes=0), lambda: steps(2)),
        (lambda rb: rb.extend(steps(), lanes=0), ValueError, "single one"),
        (lambda rb: rb.extend(steps(0), lanes=0), ValueError, "at least one transition"),
        (lambda rb: rb.storage.set(range(2), steps(2, 3)), RuntimeError, "unlike steps"),
        (lambda rb: rb.chronological(), ValueError, "1 to 12 time steps each"),
        (lambda rb: rb.lane(3), IndexError, "lane 3 is out of range: lanes are 0 to 2"),
        (lambda rb: rb.storage.get((tensor([0, 4]), tensor([0, 0]))), IndexError, "step 4 of lane 0 has not been"),
        (lambda rb: rb.update_priority(tensor([[4, 0]]), ones(1)), IndexError, "has not been written"),
        (lambda rb: index_of(rb.storage).reach(tensor([12])), IndexError, "has not been written"),
        (update(index=tensor([[4, 0]]).expand(4, 2)), IndexError, "has not been written"),
        (lambda rb: rb.set_at_("action", zeros(2).long(), (tensor([0, 4]), tensor([0, 0]))), IndexError, NOT_WRITTEN),
        (lambda rb: rb.set_at_("action", zeros(3, 3).long(), slice(3)), NotImplementedError, "takes coordinates"),
        (lambda rb: rb.storage.set((tensor([0, 4]), zeros(2).long()), steps(2)), IndexError, NOT_WRITTEN),
        (lambda rb: rb.storage.set(4, steps(3), set_cursor=False), IndexError, NOT_WRITTEN),
        (lambda rb: setitem(rb.storage, 4, steps(3)), IndexError, NOT_WRITTEN),
        (lambda rb: rb.storage.edit(lambda data: data.zero_(), slice(None)), IndexError, NOT_WRITTEN),
        (write_back("action", index=tensor([[4, 0]]).expand(4, 2)), IndexError, NOT_WRITTEN),
        (lambda rb: rb.storage.load_state_dict(moved_heads(rb.storage)), ValueError, "numbers of lanes"),
    ],
    **{("ReplayBuffer.extend(lanes=), without lanes", make): [
        (lambda rb: rb.extend(steps(2), lanes=0), TypeError, word)] for make, word in [
        (buffer, r"PackedStorage\(max_size, ndim=2\)"),
        (lambda: lane_buffer(writer=td.ReservoirWriter()), "needs a RingWriter"),
        (lambda: td.RolloutBuffer(4, 2), "needs a RingWriter, this buffer has a RolloutWriter"),
    ]},
    ("ReplayBuffer.lane", nothing): [
        (lambda _: of_lanes(9).extend(steps(2), lanes=0), ValueError, "number of lanes is not known.*lanes=E"),
        (lambda _: of_lanes(9).lane(0), ValueError, "number of lanes is not known.*lanes=E"),
        (lambda _: fresh().lane(0), ValueError, "ndim=2"),
        (lambda _: lane_buffer(dim_extend=0).extend(steps(2, 2)), SchemaError, "lanes=3|of shape"),
    ],
    ("ReplayBuffer(lane_key=)", lambda: lane_buffer(lane_key="env_id")): [
        *((lambda rb, lanes=lanes: rb.extend(steps(2, env_id=tensor([2, 1])), lanes=lanes), ValueError,
           r"is of lane [12] by 'env_id', .*and of lane [012] by lanes=") for lanes in ([2, 0], 2, tensor([1, 1]))),
        (lambda rb: rb.lane(0).add(steps(env_id=tensor(1))), ValueError, "row 0 is of lane 1 by 'env_id'"),
        (lambda rb: rb.extend(steps(1)), KeyError, "no lanes 'env_id'"),
    ],
    **{("ReplayBuffer, shut down", lambda make=make: stopped(make())): [
        *((call, RuntimeError, "has been shut down: rows can be read and saved, but no longer sampled") for call in [
            lambda rb: rb.extend(steps(4)), lambda rb: rb.add(steps()), write_back("action"),
            lambda rb: rb.set_at_("action", tensor(7), 0), lambda rb: setitem(rb, 0, rb[1])]),
        (lambda rb: rb.wait_until_sampleable(1), RuntimeError, "shut down"),
    ] for make in (prioritized, lambda: buffer(td.ProportionalSampler(30), device="cpu"))},
    ("ReplayBuffer.wait_until_sampleable", lambda: fresh(batch_size=None)): [
        (lambda rb: rb.wait_until_sampleable(0), ValueError, "min_items must be a whole number, at least 1, got 0"),
        (lambda rb: rb.wait_until_sampleable(1, -1), ValueError, "a number of seconds, at least 0, or None, got -1"),
        (lambda rb: rb.wait_until_sampleable(), RuntimeError, "batch_size not specified"),
        (lambda rb: rb.sample(), RuntimeError, "batch_size not specified"),
        (lambda rb: rb.chronological(), RuntimeError, "empty"),
    ],
    ("ReplayBuffer.sample, samplers", nothing): [
        *((lambda _, make=make, size=size: filled(make(30), GOALS, batch_size=None).sample(size), ValueError,
           "batch_size must be a whole number, at least 0, got") for make in SAMPLERS.values() for size in (-1, 2.5)),
    ],
    ("ReplayBuffer.set_sampler, of a device", lambda: buffer(device="cpu")): [
        (lambda rb: rb.set_sampler(RandomSampler()), TypeError, "got PackedStorage on cpu and RandomSampler"),
    ],
    **{("ReplayBuffer.sample, FakeTensorMode", make): [
        (in_fake_mode, RuntimeError, "FakeTensorMode")] for make in (buffer, prioritized, lambda: buffer(n_step()))},
    ("ReplayBuffer.last", buffer): [
        (lambda rb: rb.last(0), ValueError, "cannot return the last 0 time steps: 20 are stored"),
        (lambda rb: rb.last(21), ValueError, "cannot return the last 21 time steps: 20 are stored"),
    ],
    ("ReplayBuffer.write_back", lambda: buffer(td.ProportionalSampler(30))): [
        (write_back("other"), SchemaError, "cannot write back 'other': the rows have none"),
        (write_back(["action", "gone"], gone=zeros(4)), SchemaError, "cannot write back 'gone': the rows have none"),
        (write_back("action", action=None), SchemaError, "the batch has none"),
        (write_back("action", action=zeros(4)), SchemaError, r"'action': it is float32 of shape \(\) per row"),
        (write_back(["action", "observation"], observation=zeros(4, 2)), SchemaError, r"float32 of shape \(2,\) per"),
        (write_back("action", index=None), KeyError, "the batch has no 'index'"),
        (write_back("action", sampled_at=None), KeyError, "no 'sampled_at': .*pass it as sampled_at="),
        (write_back("action", index=full((4,), 21)), IndexError, "row 21"),
        (write_back([3]), ValueError, r"keys must be a key or a sequence of keys, .* got \[3\]"),
    ],
    **{("ReplayBuffer.write_back, n-step", make): [
        (write_back(["action", ("next", "observation")]), ValueError, "cannot write back 'next' entries of n-step"),
    ] for make in (lambda: buffer(n_step(td.ProportionalSampler(30))), lambda: windows(n_step(td.RankSampler(30)), 6))},
    ("ReplayBuffer.write_back, elsewhere", nothing): [
        (lambda _: fresh().write_back(steps(3, index=ones(3).long()), "action", sampled_at=0), SchemaError, "none"),
    ],
    ("ReplayBuffer.set_at_", buffer): [
        *((lambda rb, edit=edit: edit(rb), error, word) for edit, error, word in [
            (lambda rb: rb.set_at_("absent", zeros(2), 0), KeyError, "absent"),
            (lambda rb: rb.set_at_("observation", zeros(2, 4), [0, 1]), RuntimeError, "shape|size"),
            (lambda rb: rb.set_at_("observation", zeros(3), 20), IndexError, "20"),
            (lambda rb: rb.set_at_("next", WIDER[:2], [0, 1]), (RuntimeError, ValueError), MISSHAPEN),
            (lambda rb: setitem(rb, "next", WIDER), (RuntimeError, ValueError), MISSHAPEN),
            (lambda rb: setitem(rb.storage, "next", WIDER), (RuntimeError, ValueError), MISSHAPEN),
            (lambda rb: setitem(rb, "action", zeros(19).long()), RuntimeError, "batch dimension mismatch"),
            (lambda rb: setitem(rb, "absent", zeros(20)), KeyError, "absent"),
            (lambda rb: setitem(rb.storage, "absent", zeros(20)), KeyError, "absent"),
            (lambda rb: setitem(rb, -21, steps()), IndexError, "position -21 is out of range"),
            (lambda rb: setitem(rb, REWARD, full((20, 1), 2**24 + 1).double()), SchemaError, "changes to 16777216"),
            (lambda rb: rb.set_at_(REWARD, full((20, 1), 2**24 + 1), slice(None)), SchemaError, "changes to 16777216"),
        ]),
    ],
    ("ReplayBuffer.share", lambda: prioritized().share()): [
        (lambda rb: rb.set_sampler(td.UniformSampler()), RuntimeError, "cannot set the sampler of a shared buffer"),
        (lambda rb: rb.set_writer(td.RingWriter()), RuntimeError, "cannot set the writer of a shared buffer"),
        (lambda rb: rb.set_storage(no_rows()), RuntimeError, "cannot set the storage of a shared buffer"),
    ],
    ("ReplayBuffer.share, other rows", nothing): [
        (lambda _: fresh(storage=td.PackedStorage(9, device="meta")).share(), ValueError, "rows on meta cannot be"),
        (lambda _: of_lanes(10).share().extend(steps(3, 2)), ValueError, "cannot grow in shared memory"),
    ],
    **{("ReplayBuffer.load_state_dict", make): [
        (lambda rb, source=source: rb.load_state_dict(quietly(source).state_dict()), (ValueError, RuntimeError), word)
        for source, word in [
            *((source, "not that of a") for source in (ranked, buffer, lambda: windows(td.UniformSampler(), 6))),
            (lambda: filled(td.ProportionalSampler(30), steps(4).exclude("action")), "other keys, dtypes or shapes"),
            (lambda: filled(td.ProportionalSampler(40), steps(40), storage=td.PackedStorage(40)), r"\[40\] .* \[30\]"),
            (lambda: theirs(RandomSampler(), steps(4), LazyTensorStorage(30)), "not th(e state|at) of a P"),
        ]] for make in (prioritized, lambda: filled(td.ProportionalSampler(30), steps(4)))},
    ("ReplayBuffer.load_state_dict, transforms", normalized): [
        (lambda rb: rb.load_state_dict(quietly(prioritized).state_dict()), (ValueError, RuntimeError), "."),
    ],
    ("ReplayBuffer.from_torchrl", nothing): [
        (lambda _: td.ReplayBuffer.from_torchrl(fresh()), RuntimeError, "the buffer is empty: there is nothing to"),
        (lambda _: td.ReplayBuffer.from_torchrl(filled(), 5), ValueError, "holds 20 transitions, more than the"),
        (lambda _: td.ReplayBuffer.from_torchrl(no_rows()), TypeError, "imports a replay buffer with a storage and a"),
        (lambda _: td.ReplayBuffer.from_torchrl(of_numbers()), TypeError, "are TensorDicts, this buffer holds a list"),
    ],
    ("ReplayBuffer.from_torchrl, of rows", buffer): [
        (lambda rb: td.ReplayBuffer.from_torchrl(rb, exclude=["action", "sad"]), KeyError, r"exclude \['sad'\]: exclude"
         " takes a list of keys of the rows"),
        (lambda rb: td.ReplayBuffer.from_torchrl(rb, exclude=[3]), ValueError, "a key is a string, or .* got 3"),
        (lambda rb: td.ReplayBuffer.from_torchrl(rb, storage=no_rows()), ValueError, "made for the transitions, got"),
    ],
    ("ReplayBuffer.sample", buffer): [
        *((lambda rb, n=n: rb.sample(n), (TypeError, ValueError), "batch_size must be a whole number, at least 0, got")
          for n in (-1, 2.5, [4])),
    ],
    ("ReplayBuffer.sample of no rows", fresh): [
        (lambda rb: rb.sample(), RuntimeError, "empty storage: extend the buffer first"),
        (lambda rb: rb.sample(wait=True, timeout=0.01), TimeoutError, "waited for .* the buffer is empty"),
    ],
    **{("ReplayBuffer.update_tensordict_priority", make): [
        (update(td_error=None), KeyError, "no 'td_error'"),
        (update(index=None), KeyError, "no 'index'"),
        (update(td_error=tensor([1.0, nan, 1.0, -torch.inf])), ValueError, r"2 of 4 TD errors are NaN or infinite"),
        (update(td_error=zeros(4, 4)), ValueError, r"shape \[4, 4\] for a batch \[4\].* reduce .*abs\(\).amax\(-1\)"),
        (update(index=full((4,), 20)), IndexError, "row 20 is out of range"),
    ] for make in (prioritized, ranked)},
    ("RolloutBuffer", nothing): [
        (lambda _: td.RolloutBuffer(0, 3), ValueError, "num_steps and num_envs must be at least 1, got 0 and 3"),
        (lambda _: td.RolloutBuffer(2, 3, normalize_advantage="batch"), ValueError, "None, 'rollout' or 'minibatch'"),
        (lambda _: td.RolloutBuffer(2, 3, storage=td.PackedStorage(8, ndim=2)), ValueError, "a storage of 6 rows, got"),
        (lambda _: td.RolloutBuffer(2, 3, writer=3), TypeError, "writer must be a RolloutWriter, got int"),
        (lambda _: td.RolloutBuffer(2, 3, writer=td.RolloutWriter(), gamma=0.9, lmbda=0.9), ValueError,
         "writer= has its own settings: pass gamma=, lmbda= to it"),
        (lambda _: td.RolloutBuffer(2, 3, sampler=td.MinibatchSampler(), epochs=1, drop_last=False), ValueError,
         "sampler= has its own settings: pass epochs=, drop_last= to it"),
        (lambda _: td.RolloutBuffer(2, 3, storage=td.PackedStorage(6, ndim=2), storing_device="cpu"), ValueError,
         "storage= has its own settings: pass device= to it instead"),
        (lambda _: td.RolloutBuffer(4, estimator=len, lmbda=0.9), ValueError, "are those of GAE, which estimator="),
        (lambda _: td.RolloutBuffer(4, estimator=len, writer=td.RolloutWriter()), ValueError, "settings: pass"),
        (lambda _: td.RolloutBuffer(4, group="a", writer=td.RolloutWriter()), ValueError, "pass group= to it instead"),
        *((lambda _, length=length: td.RolloutBuffer(8, 2, sequence_length=length), ValueError,
           f"sequence_length must be a whole number, at least 1, got {length}") for length in (0, 2.5)),
        (lambda _: td.RolloutBuffer(8, 2, sequence_length=9), ValueError, "a rollout of 8 steps has no chunks of 9"),
        (lambda _: td.RolloutBuffer(8, 2, sequence_length=4, batch_size=6), ValueError, "a multiple of .*=4, got 6"),
        (lambda _: td.RolloutBuffer(8, sequence_length=4, sampler=td.UniformSampler()), ValueError, "sequence_length="),
        (lambda _: td.RolloutBuffer.from_schema(rolled(2, 3), 10), SchemaError, r"rollouts are \[T\] or \[T, E\]"),
    ],
    **{("RolloutBuffer, not complete", lambda written=written: rollout(written)): [
        *((read, RuntimeError, rf"the rollout is not complete: {written} of 8 steps are written\. Write the rest first"
           rf"{hint}") for read in (lambda rb: next(iter(rb)), lambda rb: rb.sample(),
                                                      lambda rb: rb.summary())),
        (lambda rb: rb.extend(rolled(4, 8)), ValueError, r"extend takes batch size \[3, n\] .* 8 steps and 3 lanes"),
        (lambda rb: rb.add(rolled(4, 1)[:, 0]), ValueError, r"add takes batch size \[3\] .* got \[4\]"),
        (lambda rb: rb.extend(zeros(3, 8)), TypeError, "extend takes a TensorDict, got Tensor"),
        (lambda rb, written=written: rb.extend(rolled(3, 9)), ValueError,
         f"a rollout takes 8 steps and {written} are written: 9 more do not fit"),
        (lambda rb: rb.extend(rolled(3, 0)), ValueError, "at least one transition"),
    ] for written, hint in ((0, ""), (5, ", or pass partial=True to read the written steps"))},
    ("RolloutBuffer, of 5 steps", lambda: rollout(5)): [
        (lambda rb: rb.extend(rolled(24)), ValueError, r"got \[24\]: pass .* without reshape\(-1\)$"),
        (lambda rb: rb.extend(rolled(8, 3)), ValueError, r"got \[8, 3\]: pass data.transpose\(0, 1\)$"),
        (lambda rb: rb.extend(rolled(3, 3).exclude("observation")), SchemaError, "key 'observation' is missing"),
    ],
    ("RolloutBuffer(partial=True)", lambda: rollout(0, partial=True)): [
        (lambda rb: rb.sample(), RuntimeError, "0 of 8 steps are written"),
        (lambda rb: rb.writer.estimate(), RuntimeError, "no step has been written"),
    ],
    ("RolloutBuffer, complete", lambda: rollout(8, batch_size=None)): [
        (lambda rb: rb.extend(rolled(3, 8).exclude("observation")), SchemaError, "key 'observation' is missing"),
        (lambda rb: next(iter(rb)), RuntimeError, "Batch_size was not specified"),
    ],
    ("RolloutBuffer, flat", lambda: td.RolloutBuffer(8, batch_size=5)): [
        (lambda rb: rb.extend(rolled()), ValueError, r"extend takes batch size \[n\] in a rollout of 8 steps, got"),
        (lambda _: td.RolloutBuffer(8, 1).extend(rolled(8)), ValueError, r"without such a dim.* RolloutBuffer\(8\)$"),
        (lambda rb: rb.extend(rolled(4, 8, collector={"traj_ids": zeros(4, 8).long()})), ValueError,
         r"got \[4, 8\]: for 4 environments, make a RolloutBuffer\(num_steps, 4\)"),
    ],
    ("RolloutBuffer(sequence_length=)", lambda: rollout(8, sequence_length=4, batch_size=None)): [
        (lambda rb: next(iter(rb)), RuntimeError, "Batch_size was not specified"),
        (lambda rb: rb.sample(5), ValueError, "batch_size must be a multiple of"),
    ],
    ("RolloutBuffer(sequence_length=), empty", lambda: rollout(0, sequence_length=4, batch_size=8)): [
        (lambda rb: rb.extend(rolled(3, 8).set("mask", zeros(3, 8))), SchemaError, "'mask'"),
    ],
    ("RolloutBuffer.loads", lambda: rollout(5)): [
        (loads(lambda: rollout(4, 4)), td.CheckpointError, r"\[4, 3\] with plain rows, this one \[8, 3\]"),
        (lambda rb: rb.load_state_dict(fresh().state_dict()), ValueError, "not that of a (RolloutWriter|Mini)"),
    ],
    ("ReplayBuffer.loads, other statistics", lambda: buffer(stats=td.EpisodeStats(["action"]))): [
        (loads(lambda: buffer(stats=td.EpisodeStats())), td.CheckpointError, "make EpisodeStats with the same keys"),
        (lambda rb: rb.extend(without("action")), KeyError, "no 'action' in the data"),
        (lambda rb: rb.extend(without("observation")), SchemaError, "'observation' is missing"),
        (lambda rb: rb.extend(without(("next", "reward"))), KeyError, r"no \('next', 'reward'\) in the data"),
    ],
    ("ReplayBuffer.dumps", lambda: buffer(Holding())): [
        (dumps, td.CheckpointError, r"state._sampler.held is a object, which a"),
    ],
    ("ReplayBuffer over another storage", elsewhere): [
        *((lambda rb, name=name, given=given: elsewhere(**{name: given}), TypeError,
           f"{name}.*= needs a PackedStorage, got a LazyTensorStorage")
          for name, given in {"stats": td.EpisodeStats(), "lane_key": "e", "device": "cpu",
                              "include_info": False, "samples_per_insert": 1.0, "min_size": 2}.items()),
        (lambda _: elsewhere(sampler=n_step()), TypeError, "NStepSampler looks up episodes and needs a PackedStorage"),
        (lambda _: elsewhere(writer=td.RolloutWriter()), TypeError, "a RolloutWriter needs a PackedStorage"),
        *((lambda _, made=made: made(), TypeError, "a .*Buffer needs a PackedStorage, got a LazyTensorStorage: use Tor")
          for made in (lambda: td.ReplayBuffer(storage=lambda: LazyTensorStorage(3)),
                       lambda: td.PrioritizedReplayBuffer(alpha=1.0, beta=0.0, storage=LazyTensorStorage(3)))),
        (lambda rb: fresh().set_storage(rb.storage), TypeError, "this buffer needs a PackedStorage, got a LazyTensor"),
    ],
    ("ExperienceQueue", nothing): [
        (lambda _: td.ExperienceQueue(storage=td.PackedStorage(8, ndim=2)), ValueError, "a queue holds rows"),
        *((lambda _, name=name: td.ExperienceQueue(storage=no_rows(), **{name: 2}), ValueError,
           f"an ExperienceQueue has no {name} of its own choice") for name in ("min_size", "prefetch")),
        *((lambda _, timeout=timeout: td.ExperienceQueue(storage=no_rows(), timeout=timeout), ValueError,
           "timeout must be at least 0 seconds, or None") for timeout in (-1.0, nan)),
    ],
    ("ExperienceQueue(max_age=)", lambda: queue(batch_size=4, max_age=3)): [
        (lambda rb: rb.sample(5), ValueError, "only 4 rows are never older than max_age=3, a batch has 5"),
        (lambda _: queue(batch_size=5, max_age=3), ValueError, "only 4 rows are never older than max_age=3"),
    ],
    ("ExperienceQueue, in use", queue): [
        (lambda rb: rb.extend(steps(17)), ValueError, "17 rows never fit into a queue of 16"),
        (lambda rb: rb.extend(steps(2, y=zeros(2))), SchemaError, "'y'"),
        (lambda rb: rb.extend(steps(12)), TimeoutError, "waited for 0.01 seconds: 12 rows do not fit, because 5 of 16"),
        (lambda rb: rb.extend(steps(15)), ValueError, "writes of 15 rows and batches of 4 can wait .* at least 18"),
        (lambda rb: rb.sample(6), TimeoutError, "waited for 0.01 seconds: a batch has 6 rows, and 5 wait"),
        (lambda rb: rb.sample(6, wait=False), TimeoutError, "waited for 0 seconds: a batch has 6 rows, and 5 wait"),
        (lambda rb: rb.sample(17), ValueError, "a queue of 16 rows never holds a batch of 17"),
        (lambda rb: rb.sample(-1), ValueError, "batch_size must be a whole number, at least 0, got -1"),
        (lambda rb: rb.set_sampler(td.UniformSampler()), ValueError, "has no sampler and no writer of its own"),
        (lambda rb: rb.set_writer(td.RingWriter()), ValueError, "has no sampler and no writer of its own choice"),
        (lambda rb: rb.set_storage(td.PackedStorage(8, ndim=2)), ValueError, "a queue holds rows .*, the storage"),
    ],
    ("ExperienceQueue, shut down", lambda: stopped(queue())): [
        (lambda rb: rb.sample(), RuntimeError, "shut"), (lambda rb: rb.extend(steps(1)), RuntimeError, "shut"),
    ],
    ("QueueWriter, empty", lambda: queue_parts(0)): [(lambda rb: rb.sample(), Empty, "a batch has 2 rows, and 0 wait")],
    ("QueueWriter, full", lambda: queue_parts(2)): [(lambda rb: rb.add(steps()), Full, "do not fit, because 2 of 2")],
    ("ReplayBuffer(samples_per_insert=)", lambda: fresh(samples_per_insert=4.0, tolerance=16, min_size=5)): [
        (lambda rb: rb.extend(steps(5)), ValueError, "a write of 5 rows could block forever"),
        (lambda rb: rb.sample(), RuntimeError, "too few rows|empty"),
    ],
    ("ReplayBuffer(samples_per_insert=), in use", lambda: filled(samples_per_insert=1.0, tolerance=64)): [
        (lambda rb: rb.extend(without("action")), SchemaError, "'action'"),
        (lambda rb: rb.extend([1]), TypeError, "extend takes a TensorDict"),
        (lambda rb: rb.sample(65), ValueError, "a batch of 65 rows could block forever"),
        *((lambda rb, counts=counts: rb.load_state_dict(rb.state_dict() | {"_flow": {"counts": counts}}), ValueError,
           "flow control needs 6 whole numbers as counts") for counts in ([0, 1], [-1] * 6, [0.5] * 6, None)),
    ],
    ("ReplayBufferMixture", nothing): [
        *((lambda _, given=given: td.ReplayBufferMixture(**({"members": {"a": fresh()}, "shares": {"a": 1.0}} | given)),
           error, word) for given, error, word in [
            ({"members": {"a": theirs(None, steps(3))}}, TypeError, "member 'a' must be a ReplayB"),
            ({"members": {"a": td.ExperienceQueue(storage=no_rows())}}, TypeError, "'a' is an ExperienceQueue, which"),
            ({"members": {"a": fresh(sampler=td.EpisodeSampler())}}, TypeError, "batches have no fixed number of rows"),
            ({"members": {"a": fresh(sampler=PrioritizedSampler(9, 1.0, 1.0))}}, TypeError, "use a"),
            ({"members": fresh(), "shares": fresh()}, TypeError, 'a dict of buffers by name, such as {"demos": rb1'),
            ({"shares": [1.0]}, TypeError, "and shares a dict of numbers, such as .*, got dict and list"),
            ({"shares": {"b": 1.0}}, ValueError, r"same names: members are \['a'\], shares are of \['b'\]"),
            ({"shares": {"a": 0.0}}, ValueError, "shares must be at least 0 and finite, one of them positive"),
            ({"writes_to": "b"}, ValueError, "writes_to='b'"),
            ({"members": {"a": filled(), "b": filled(rows=wider())}, "shares": {"a": 1, "b": 1}}, SchemaError,
             r"'observation' is float32 of shape \(3,\) in 'a', float32 of shape \(4,\) in 'b'"),
        ]),
        *((lambda _, name=name: td.ReplayBufferMixture({name: fresh()}, {name: 1.0}), ValueError,
           "cannot be the name of a member") for name in ("", "_rng", "../one", "a/b", ".lock", "sample", "2\nlines")),
    ],
    ("ReplayBufferMixture, in use", mixture): [
        (lambda mixed: mixed.sample(0), ValueError, "at least one row, got batch_size=0"),
        *((lambda mixed, n=n: mixed.sample(n), (TypeError, ValueError),
           "batch_size must be a whole number, at least 1, got")
          for n in (2.5, True, tensor(0))),
        (lambda mixed: mixed.extend(steps(2)), KeyError, r"name one of \['a', 'b'\], or pass writes_to"),
        *((lambda mixed, share=share: setattr(mixed.sampler, "a", share), ValueError, "a must be between 0 and 1")
          for share in (1.5, nan)),
        (lambda mixed: mixed.sampler.other, AttributeError, "a mixture of a, b has no share 'other'"),
        (lambda mixed: setattr(mixed.sampler, "two", 0.5), AttributeError, "a mixture of a, b has no share 'two'"),
        (update(source=None), KeyError, "no 'source'"),
        (update(td_error=tensor([1.0, 1.0, 1.0, nan])), ValueError, "1 of .* TD errors are NaN"),
        (update(index=full((4,), 30), sampled_at=None), IndexError, "out of range"),
        (write_back("action", source=None), KeyError, "no 'source'"),
        *((call(source), IndexError, r"'source' must hold one position in \['a', 'b'\] per row, .* got torch")
          for source in (tensor([0, 0, 0, 7]), tensor([0, 0, 0, -1]), zeros(4, 1), zeros(4))
          for call in (lambda source: update(source=source), lambda source: write_back("action", source=source))),
        (lambda mixed: mixed.load_state_dict(mixed.state_dict() | {"shares": {"a": 1.0}}), ValueError, "belong to a"),
        (lambda mixed: mixed.load_state_dict({}), ValueError, r"the state is of members \[\]"),
        (lambda mixed: mixed.load_state_dict(mixed.state_dict() | {"members": {}, "shares": {"a": 0.9, "b": 0.1}}),
         ValueError, "the state is of members"),
        *((lambda mixed, part=part: mixed.load_state_dict(spoiled(mixed, part)), (ValueError, RuntimeError), ".")
          for part in ("_storage", "_sampler", "_transforms", "_writer")),
        (lambda mixed: mixed.load_state_dict(mixed.state_dict() | {"generator": zeros(3).byte()}), RuntimeError, "RNG"),
    ],
    **{("ReplayBufferMixture.sample, drawn", make): [(lambda mixed: mixed.sample(), error, word)]
       for make, error, word in [
        (lambda: mixture(b=fresh), RuntimeError, "member 'b' has no rows: extend it first, or set its share to 0"),
        (lambda: mixture(a=lambda: fresh(min_size=99)), RuntimeError, "member 'a'|flow control does not admit"),
        (lambda: mixture(a=filled, b=fresh, rows=without("observation")), SchemaError, "in 'a', missing in 'b'"),
        (lambda: mixture(a=fresh, b=filled, rows=steps(9, source=zeros(9))), SchemaError, "member 'a' stores the key"),
        (lambda: mixture(a=fresh, rows=steps(9, sampled_at=zeros(9))), SchemaError, "member 'a' stores the"),
        (lambda: mixture(a=lambda: filled(n_step())), SchemaError, r"'steps_to_next_obs' is int64 of shape \(1,\) in"),
        (lambda: mixture(*[lambda: filled(sequence(length=2, output_layout="batch_time"))] * 2), ValueError, "dims"),
        (lambda: mixture(*[lambda: quiet(fresh(), steps(4, 5))] * 2), ValueError, "members must store single"),
        (lambda: mixture(*[lambda: filled(sequence(length=3))] * 2), ValueError, "batch_size=4 must be a multiple of"),
        (lambda: td.ReplayBufferMixture({"a": filled()}, {"a": 1.0}), RuntimeError, "batch_size not specified"),
    ]},
    ("ReplayBufferMixture.write_back, uniform", lambda: mixture(buffer, buffer)): [
        *((lambda mixed, known=known: mixed.write_back(mixed.batch, "action", sampled_at=known), KeyError,
           r"no 'sampled_at', and sampled_at=.* lacks one of \['a', 'b'\]: pass") for known in (None, 3, {"a": 9})),
    ],
    ("ReplayBufferMixture, a member is shut down", lambda: with_stopped_member(mixture())): [
        (write_back("action"), td.ShutDown, "shut down"),
        (lambda mixed: mixed.sample(), td.ShutDown, "shut down"),
    ],
}  # fmt: skip
