"""What buffers refuse."""

from __future__ import annotations

from operator import setitem

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import FlatStorageCheckpointer, RandomSampler

from rlbuf_td import SchemaError
from tests.catalogue import SAMPLERS
from tests.refusals.makers import (
    GOALS,
    MISSHAPEN,
    NOT_WRITTEN,
    RAGGED,
    REWARD,
    WIDER,
    Table,
    buffer,
    changed_sampler,
    emptied,
    filled,
    fresh,
    full,
    functionalized,
    in_fake_mode,
    index_of,
    lane_buffer,
    misfits,
    moved_heads,
    n_step,
    nan,
    no_rows,
    normalized,
    nothing,
    of_lanes,
    of_numbers,
    ones,
    prioritized,
    quietly,
    ranked,
    steps,
    stopped,
    td,
    tensor,
    theirs,
    unlike,
    update,
    windows,
    write_back,
    zeros,
)

REFUSALS: Table = {
    ("PackedStorage in a buffer", buffer): [
        (lambda rb: setattr(rb.storage, "checkpointer", print), NotImplementedError, "without TorchRL's checkpointers"),
        (lambda rb: rb.storage.register_save_hook(print), NotImplementedError, "without TorchRL's checkpointers"),
        (lambda rb: rb.storage.register_load_hook(print), NotImplementedError, "without TorchRL's checkpointers"),
    ],
    ("ReplayBuffer", nothing): [
        (lambda _: td.ReplayBuffer(checkpointer=FlatStorageCheckpointer()), NotImplementedError, "its own dump format"),
        (lambda _: td.ReplayBuffer(device="cuda:99"), RuntimeError, "device='cuda:99' is missing: torch finds . CUDA"),
        (lambda _: td.ReplayBuffer.from_schema(steps(), 9, device="cuda:99"), RuntimeError, "device='cuda:99' is"),
        (lambda _: td.ReplayBuffer(lane_key="e", storage=td.PackedStorage(9)), TypeError, "lane_key= needs a "),
        (lambda _: td.ReplayBuffer(lane_key="e", storage=LazyTensorStorage(8, ndim=2)), TypeError, "lane_key= needs a"),
        (lambda _: td.ReplayBuffer(lane_key="e", storage=td.PackedStorage(8, ndim=2), writer=td.ReservoirWriter()),
         TypeError, "lane_key= needs a "),
        (lambda _: td.ReplayBuffer(storage=td.PackedStorage(9), prefetch=1), ValueError, "batch-size must be"),
        *((lambda _, given=given: td.PrioritizedReplayBuffer(alpha=0.7, beta=0.9, **given), NotImplementedError,
           "sync=False and sampler_device=") for given in ({"sync": False}, {"sampler_device": "cpu"})),
        (lambda _: td.ReplayBuffer(storage=td.PackedStorage(9, device="meta"), device="cpu"), TypeError, "on the CPU"),
        (lambda _: td.ReplayBuffer(storage=LazyTensorStorage(9), device="cpu"), TypeError, "got LazyTensorStorage"),
        (lambda _: td.ReplayBuffer(collate_fn=lambda rows: rows, device="cpu"), TypeError, "collate_fn"),
        (lambda _: td.ReplayBuffer(sampler=RandomSampler(), device="cpu"), TypeError,
         "a sampler of this package.*got PackedStorage on cpu and RandomSampler"),
        *((lambda _, given=given: td.ReplayBuffer(**given), ValueError, word) for given, word in [
            ({"samples_per_insert": 0}, "samples_per_insert must be a positive number"),
            ({"samples_per_insert": nan}, "samples_per_insert must be a positive number"),
            ({"samples_per_insert": 4, "tolerance": 3}, "tolerance must be at least 4"),
            ({"tolerance": 3}, "tolerance needs samples_per_insert"),
            ({"min_size": 1.5}, "min_size must be a whole number"),
            ({"samples_per_insert": 1, "prefetch": 2, "batch_size": 4}, "use prefetch=0"),
            ({"samples_per_insert": 1, "tolerance": 4, "batch_size": 8}, "block forever .* make it at least 8"),
            ({"priority_key": 3}, "a key is a string, or strings such as .* got 3"),
        ]),
    ],
    ("ReplayBuffer.register_save_hook", buffer): [
        (lambda rb: rb.register_save_hook(lambda data, path=None: data), NotImplementedError, "its own dump format"),
        (lambda rb: rb.register_load_hook(lambda data, path=None: data), NotImplementedError, "its own dump format"),
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
        (lambda rb: rb.sample(), RuntimeError, "empty"),
        (lambda rb: rb.last(1), RuntimeError, "empty"),
        (lambda rb: rb.extend(TensorDict({}, [3])), SchemaError, "contains no tensor"),
        (lambda rb: rb.extend(TensorDict({"y": zeros(2)}, [2])), SchemaError, "is missing"),
        (lambda rb: rb.extend(steps(2).set("observation", zeros(2, 3).double())), SchemaError, "as float64"),
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
        (lambda rb: rb.update_priority(tensor([[1, -1]]), ones(1)), IndexError, "lanes are 0 to 2"),
    ],
    ("ReplayBuffer.extend(lanes=)", unlike): [
        *((lambda rb, lanes=lanes: rb.extend(steps(2), lanes=lanes), error, word) for lanes, error, word in [
            ([0, 3], IndexError, "lane 3 is out of range: lanes are 0 to 2"),
            (-1, IndexError, "lane -1 is out of range"),
            ([0, 1, 2], ValueError, "lanes of shape"),
            ([[0, 1]], ValueError, "lanes of shape"),
            (tensor([0.0, 1.0]), TypeError, "must be integers"),
            (tensor([True, False]), TypeError, "must be integers"),
        ]),
        *misfits(lambda rb, data: rb.extend(data, lanes=0), lambda: steps(2)),
        (lambda rb: rb.extend(steps(), lanes=0), ValueError, "single one"),
        (lambda rb: rb.extend(steps(0), lanes=0), ValueError, "at least 1"),
        (lambda rb: rb.storage.set(range(2), steps(2, 3)), RuntimeError, "unlike steps"),
        (lambda rb: rb.chronological(), ValueError, "1 to 12 time steps each"),
        (lambda rb: rb.lane(3), IndexError, "lane 3 is out of range: lanes are 0 to 2"),
        (lambda rb: rb.storage.get((tensor([0, 4]), tensor([0, 0]))), IndexError, "step 4 of lane 0 has not been"),
        (lambda rb: rb.update_priority(tensor([[4, 0]]), ones(1)), IndexError, "has not been written"),
        (lambda rb: index_of(rb.storage).reach(tensor([12])), IndexError, "has not been written"),
        (update(index=tensor([[4, 0]]).expand(4, 2)), IndexError, "has not been written"),
        (lambda rb: rb.set_at_("action", zeros(2).long(), (tensor([0, 4]), tensor([0, 0]))), IndexError, NOT_WRITTEN),
        (lambda rb: rb.set_at_("action", zeros(3, 3).long(), slice(3)), IndexError, NOT_WRITTEN),
        (lambda rb: rb.set_at_("action", 1, torch.arange(36).view(12, 3) == 12), IndexError, NOT_WRITTEN),
        (lambda rb: rb.storage.set((tensor([0, 4]), zeros(2).long()), steps(2)), IndexError, NOT_WRITTEN),
        (lambda rb: rb.storage.set(4, steps(3), set_cursor=False), IndexError, NOT_WRITTEN),
        (lambda rb: setitem(rb.storage, 4, steps(3)), IndexError, NOT_WRITTEN),
        (lambda rb: rb.storage.edit(lambda data: data.zero_(), slice(None)), IndexError, NOT_WRITTEN),
        (write_back("action", index=tensor([[4, 0]]).expand(4, 2)), IndexError, NOT_WRITTEN),
        (lambda rb: rb.storage.load_state_dict(moved_heads(rb.storage)), ValueError, "heads of lanes"),
    ],
    **{("ReplayBuffer.extend(lanes=), without lanes", make): [
        (lambda rb: rb.extend(steps(2), lanes=0), TypeError, word)] for make, word in [
        (buffer, r"PackedStorage\(max_size, ndim=2\)"),
        (lambda: lane_buffer(writer=td.ReservoirWriter()), "needs a RingWriter"),
        (lambda: lane_buffer(writer=td.RingWriter(track_generations=True)), "track_generations"),
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
            lambda rb: rb.set_("action", rb["action"] + 1), lambda rb: rb.set_at_("action", tensor(7), 0),
            lambda rb: rb.update_({"action": rb["action"] + 1}), lambda rb: setitem(rb, 0, rb[1])]),
        (lambda rb: rb.wait_until_sampleable(1), RuntimeError, "shut down"),
    ] for make in (prioritized, lambda: buffer(td.ProportionalSampler(30), device="cpu"))},
    ("ReplayBuffer.wait_until_sampleable", lambda: fresh(batch_size=None)): [
        (lambda rb: rb.wait_until_sampleable(0), ValueError, "min_items must be a whole number, at least 1, got 0"),
        (lambda rb: rb.wait_until_sampleable(True), ValueError, "min_items must be a whole number"),
        (lambda rb: rb.wait_until_sampleable(1, -1), ValueError, "a number of seconds, at least 0, or None, got -1"),
        (lambda rb: rb.wait_until_sampleable(), RuntimeError, "batch_size not specified"),
        (lambda rb: rb.sample(), RuntimeError, "batch_size not specified"),
        (lambda rb: rb.chronological(), RuntimeError, "empty"),
    ],
    ("ReplayBuffer.sample, samplers", nothing): [
        *((lambda _, make=make, size=size: filled(make(30), GOALS, batch_size=None).sample(size), ValueError,
           "batch_size must be a whole number, at least 0, got") for make in SAMPLERS.values() for size in (-1, 2.5)),
    ],
    ("ReplayBuffer.sample, of a device", lambda: changed_sampler(RandomSampler())): [
        (lambda rb: rb.sample(), TypeError, "RandomSampler"),
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
        (write_back(None), ValueError, "keys must be a key or a sequence of keys, .* got None"),
        (write_back([]), ValueError, r"got \[\]"),
    ],
    **{("ReplayBuffer.write_back, n-step", make): [
        (write_back(["action", ("next", "observation")]), ValueError, "cannot write back 'next' entries of n-step"),
    ] for make in (lambda: buffer(n_step(td.ProportionalSampler(30))), lambda: windows(n_step(td.RankSampler(30)), 6))},
    ("ReplayBuffer.write_back, elsewhere", nothing): [
        (lambda _: filled(storage=LazyTensorStorage(30)).write_back(steps(3), "action", sampled_at=0), TypeError,
         "write_back needs the clock of a PackedStorage, got a LazyTensorStorage"),
        (lambda _: fresh().write_back(steps(3, index=ones(3).long()), "action", sampled_at=0), SchemaError, "none"),
    ],
    ("ReplayBuffer.set_at_", buffer): [
        *((lambda rb, edit=edit: edit(rb), error, word) for edit, error, word in [
            (lambda rb: rb.set_at_("absent", zeros(2), 0), KeyError, "absent"),
            (lambda rb: rb.set_at_("observation", zeros(2, 4), [0, 1]), RuntimeError, "shape|size"),
            (lambda rb: rb.set_at_("observation", zeros(3), 20), IndexError, "20"),
            (lambda rb: rb.set_at_("next", WIDER[:2], [0, 1]), (RuntimeError, ValueError), MISSHAPEN),
            (lambda rb: rb.set_("next", WIDER), (RuntimeError, ValueError), MISSHAPEN),
            (lambda rb: rb.update_({"action": ones(20).long(), REWARD: ones(20, 7)}), RuntimeError, MISSHAPEN),
            (lambda rb: rb.update_({"action": ones(20).long(), "observation": ones(20, 7)}), RuntimeError, MISSHAPEN),
            (lambda rb: setitem(rb, "next", WIDER), (RuntimeError, ValueError), MISSHAPEN),
            (lambda rb: setitem(rb.storage, "next", WIDER), (RuntimeError, ValueError), MISSHAPEN),
            (lambda rb: setitem(rb, "action", zeros(19).long()), RuntimeError, "batch dimension mismatch"),
            (lambda rb: setitem(rb, "absent", zeros(20)), KeyError, "absent"),
            (lambda rb: setitem(rb.storage, "absent", zeros(20)), KeyError, "absent"),
            (lambda rb: setitem(rb, -21, steps()), IndexError, "position -21 is out of range"),
            (lambda rb: rb.set_(REWARD, full((20, 1), 2**24 + 1)), SchemaError, "which float32 changes to 16777216"),
            (lambda rb: rb.set_at_(REWARD, full((1, 1), 2**24 + 1), tensor([1])), SchemaError, "changes to 16777216"),
            (lambda rb: setitem(rb, REWARD, full((20, 1), 2**24 + 1).double()), SchemaError, "changes to 16777216"),
            (lambda rb: rb.update_({REWARD: full((20, 1), 2**24 + 1)}), SchemaError, "changes to 16777216: cast"),
            (lambda rb: rb.update_({"next": {"reward": full((20, 1), 2**24 + 1)}}), SchemaError, "to 16777216: cast"),
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
            (lambda: filled(td.ProportionalSampler(40), steps(40), storage=td.PackedStorage(40)), "capacity"),
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
        *((lambda rb, given=given: td.ReplayBuffer.from_torchrl(rb, copy=False, **given), ValueError,
           "as it is: pass a buffer, and omit capacity, exclude and storage; or copy")
          for given in ({"capacity": 30}, {"exclude": "action"}, {"storage": td.PackedStorage(9)})),
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
