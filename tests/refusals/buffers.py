"""What buffers refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from operator import setitem
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import RandomSampler
from torchrl.envs import ObservationNorm

from tests.refusals.makers import *


def stopped(rb):
    rb.shutdown()
    return rb


def with_stopped_member(mixed):
    stopped(mixed.members["b"])
    return mixed


def of_lanes(size: int = 30):
    """Return a buffer [T, E], with three lanes of 4 steps unless it is smaller."""
    rb = fresh(
        storage=td.PackedStorage(size, ndim=2), sampler=td.ProportionalSampler(size)
    )
    if size == 30:
        rb.extend(steps(3, 4))
    return rb


def unlike(sampler=None):
    """Return a buffer with lanes of 1, 5 and 12 rows, in use."""
    rb = lane_buffer(sampler=sampler or td.ProportionalSampler(36))
    for lane, count in ((0, 1), (1, 5), (2, 30)):
        rb.extend(steps(count), lanes=lane)
    rb.batch = rb.sample().set("td_error", ones(4))
    index_of(rb.storage).length(tensor([0]))
    return rb


def lane_buffer(**options):
    rb = fresh(storage=td.PackedStorage(36, ndim=2, lanes=3), **options)
    rb.storage.reserve(steps(3))
    return rb


def moved_heads(storage):
    state = storage.state_dict()
    state["ring"]["head"][1] += 1
    return state


def functionalized(work: Callable[[Any, torch.Tensor], object]) -> Callable[[Any], Any]:
    return lambda rb: torch.func.functionalize(lambda x: (work(rb, x), x)[1])(ones(4))


def in_fake_mode(rb) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: a fake tensor has no address
        with FakeTensorMode(allow_non_fake_inputs=True):
            rb.sample()


def normalized():
    return buffer(
        td.ProportionalSampler(30), transform=ObservationNorm(0.0, 1.0, ["observation"])
    )


WIDER = TensorDict({"observation": ones(20, 3), "reward": ones(20, 7)}, [20])


class Holding(td.UniformSampler):
    """Has a state that only pickle can save."""

    state_keys = ("held",)
    held = object()


def elsewhere(**parts):
    return filled(storage=LazyTensorStorage(30), **parts)


def queue(**options):
    """Return a queue in which 5 rows wait."""
    rb = td.ExperienceQueue(
        **{"storage": td.PackedStorage(16), "batch_size": 4, "timeout": 0.01} | options
    )
    rb.extend(steps(5))
    return rb


def queue_parts(waiting: int):
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


def mixture(a=prioritized, b=ranked, rows=None):
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


def spoiled(mixed, part: str):
    """Return a state whose last member has a wrong part."""
    state = mixed.state_dict()
    state["members"]["b"][part] = {"bad": 1}
    return state | {"shares": {"a": 0.9, "b": 0.1}}


def quiet(rb, rows):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows of several steps
        rb.extend(rows)
    return rb


NO_CHECKPOINTER = "NotImplementedError: without TorchRL's checkpointers"
NOT_FINITE = tensor([1.0, nan, 1.0, -torch.inf])
NO_FIT = f"RuntimeError|ValueError: {MISSHAPEN}"
NO_DIMS = "ValueError: TD error"
STOPPED = (
    "ShutDown: has been shut down: rows can be read and saved, but no longer sampled"
)
NO_SAMPLE = "ValueError|TypeError: batch_size must be a whole number, at least 0, got"
FROM_OURS = (
    "TypeError: a .*Buffer needs a PackedStorage, got a LazyTensorStorage: use Tor"
)
NO_LANE = "IndexError: lane 3 is out of range: lanes are 0 to 2"
LATER = tensor([0, 4]), zeros(2).long()  # steps of lane 0, of which one is not written

WRITES: Table = {
    ("PackedStorage in a buffer", buffer): everywhere(NO_CHECKPOINTER,
        lambda rb: setattr(rb.storage, "checkpointer", print),
        lambda rb: rb.storage.register_save_hook(print), lambda rb: rb.storage.register_load_hook(print),
        lambda rb: rb.register_save_hook(print), lambda rb: rb.register_load_hook(print)),
    ("ReplayBuffer.extend", buffer): [
        *misfits(lambda rb, data: rb.extend(data), lambda: steps(4), RAGGED),
        *each(lambda rb, data: rb.extend(data),
              (steps(), "ValueError: got a single one: use add"),
              (steps(4).reshape(2, 2),
               r"SchemaError: the batch dims \[2, 2\], and this write takes 1; .*data.reshape\(-1\)"),
              (TensorDict(steps(4).to_dict()), r"ValueError: pass TensorDict\(data, \[4\]\), or, if"),
              (steps(4, loc=zeros(4), scale=zeros(4)), r"SchemaError: unknown keys 'loc', 'scale': .*"
               r"data\.exclude\('loc', 'scale'\), .*append_transform\(ExcludeTransform\('loc', 'scale', inverse"),
              ([steps(), steps().set("action", zeros(2).long())], "ValueError: stack|ragged"),
              ([steps(), steps(2)], "ValueError: different batch sizes"),
              ({"x": zeros(2, 3)}, r"TypeError: TensorDict\(data, \[n\]\)"),
              (np.zeros(3), r"TypeError: got ndarray: wrap it, TensorDict\(\{.observation.: data")),
    ],
    ("ReplayBuffer.add", buffer): [
        *misfits(lambda rb, data: rb.add(data), steps),
        (lambda rb: rb.add(steps(3)), "SchemaError: If these are several transitions, use extend"),
        (
            lambda rb: rb.add(zeros(3), 1, 0.5),
            "TypeError: add takes one TensorDict, got 3 arguments: add_step takes",
        ),
        (lambda rb: rb.add([1.0]), "TypeError: add takes a TensorDict, got list: wrap it"),
    ],
    ("ReplayBuffer.extend, priorities", prioritized): [
        *misfits(lambda rb, data: rb.extend(data), lambda: steps(4), RAGGED),
        *each(lambda rb, wrong: rb.extend(steps(4, td_error=wrong)),
              (ones(4) * 1j, "TypeError: TD error"),
              (zeros(4, 0), NO_DIMS), (zeros(4, 4), r"ValueError: shape \[4, 4\] for a batch \[4\]"),
              (NOT_FINITE, "ValueError: 2 of 4 TD errors are NaN or infinite")),
        (functionalized(lambda rb, x: rb.extend(steps(4, x=x * 2))), NO_MEMORY),
    ],
    ("ReplayBuffer.extend, priorities, before the first write", lambda: fresh(sampler=td.ProportionalSampler(30))):
        each(lambda rb, wrong: rb.extend(steps(4, td_error=wrong)), (zeros(4, 0), NO_DIMS),
             (full((4,), nan), "ValueError: 4 of 4 TD errors are NaN or infinite")),
    ("ReplayBuffer.extend, reserved rows", lambda: td.ReplayBuffer.from_schema(steps(), 30, batch_size=4)): [
        (lambda rb: rb.last(1), "RuntimeError: empty"),
        (lambda rb: rb.extend(TensorDict({}, [3])), "SchemaError: contains no tensor"),
        (lambda rb: rb.extend(steps(2).set("observation", zeros(2, 4))), r"SchemaError: as float32 of shape \(2, 4\)"),
    ],
    ("ReplayBuffer.extend, emptied", emptied): [
        (lambda rb: rb.extend(TensorDict({"other": zeros(2)}, [2])), "SchemaError: 'other'"),
    ],
    ("ReplayBuffer.extend, [T, E]", lambda: of_lanes()): [
        *misfits(lambda rb, data: rb.extend(data), lambda: steps(3, 4)),
        (lambda rb: rb.extend(steps(4)), r"SchemaError: \[E, T\] .* got \[4\]: leave .*, or give .*, lanes="),
        (lambda rb: rb.update_priority((tensor([0]), tensor([3])), ones(1)), "IndexError: lanes are 0 to 2"),
        (lambda rb: rb.sampler.update_priority(tensor([[0, 1]]), ones(1)), "ValueError: needs the storage"),
    ],
    ("ReplayBuffer.extend(lanes=)", unlike): [
        *misfits(lambda rb, data: rb.extend(data, lanes=0), lambda: steps(2)),
        *each(lambda rb, lanes: rb.extend(steps(2), lanes=lanes),
              ([0, 3], NO_LANE), ([0, 1, 2], "ValueError: lanes of shape"),
              (tensor([0.0, 1.0]), "TypeError: must be integers")),
        (lambda rb: rb.extend(steps(), lanes=0), "ValueError: single one"),
        (lambda rb: rb.extend(steps(0), lanes=0), "ValueError: at least one transition"),
        (lambda rb: rb.storage.set(range(2), steps(2, 3)), "RuntimeError: unlike steps"),
        (lambda rb: rb.chronological(), "ValueError: 1 to 12 time steps each"),
        (lambda rb: rb.lane(3), NO_LANE),
        (lambda rb: rb.storage.get(LATER), "IndexError: step 4 of lane 0 has not been"),
        (lambda rb: rb.set_at_("action", zeros(3, 3).long(), slice(3)), "NotImplementedError: takes coordinates"),
        *everywhere("IndexError: has not been written",
            lambda rb: rb.update_priority(tensor([[4, 0]]), ones(1)),
            lambda rb: index_of(rb.storage).reach(tensor([12])),
            update(index=tensor([[4, 0]]).expand(4, 2))),
        *everywhere("IndexError: of lane [01] has not been written: it has [15] rows",
            lambda rb: rb.set_at_("action", zeros(2).long(), LATER),
            lambda rb: rb.storage.set(LATER, steps(2)),
            lambda rb: rb.storage.set(4, steps(3), set_cursor=False),
            lambda rb: setitem(rb.storage, 4, steps(3)),
            lambda rb: rb.storage.edit(lambda data: data.zero_(), slice(None)),
            write_back("action", index=tensor([[4, 0]]).expand(4, 2))),
        (lambda rb: rb.storage.load_state_dict(moved_heads(rb.storage)), "ValueError: numbers of lanes"),
    ],
    **{("ReplayBuffer.extend(lanes=), without lanes", make): [
        (lambda rb: rb.extend(steps(2), lanes=0), said)] for make, said in [
        (buffer, r"TypeError: PackedStorage\(max_size, ndim=2\)"),
        (lambda: lane_buffer(writer=td.ReservoirWriter()), "TypeError: needs a RingWriter"),
        (lambda: td.RolloutBuffer(4, 2), "TypeError: needs a RingWriter, this buffer has a RolloutWriter"),
    ]},
    ("ReplayBuffer.lane", nothing): [
        *everywhere("ValueError: number of lanes is not known.*lanes=E",
            lambda _: of_lanes(9).extend(steps(2), lanes=0), lambda _: of_lanes(9).lane(0)),
        (lambda _: fresh().lane(0), "ValueError: ndim=2"),
        (lambda _: lane_buffer(dim_extend=0).extend(steps(2, 2)), "SchemaError: lanes=3|of shape"),
    ],
    ("ReplayBuffer(lane_key=)", lambda: lane_buffer(lane_key="env_id")): [
        *each(lambda rb, lanes: rb.extend(steps(2, env_id=tensor([2, 1])), lanes=lanes), *(
            (lanes, r"ValueError: is of lane [12] by 'env_id', .*and of lane [012] by lanes=")
            for lanes in ([2, 0], 2, tensor([1, 1])))),
        (lambda rb: rb.lane(0).add(steps(env_id=tensor(1))), "ValueError: row 0 is of lane 1 by 'env_id'"),
        (lambda rb: rb.extend(steps(1)), "KeyError: no lanes 'env_id'"),
    ],
    **{("ReplayBuffer, shut down", lambda make=make: stopped(make())): [
        *everywhere(STOPPED,
            lambda rb: rb.extend(steps(4)), lambda rb: rb.add(steps()), write_back("action"),
            lambda rb: rb.set_at_("action", tensor(7), 0), lambda rb: setitem(rb, 0, rb[1])),
        (lambda rb: rb.wait_until_sampleable(1), "ShutDown: shut down"),
    ] for make in (prioritized, lambda: buffer(td.ProportionalSampler(30), device="cpu"))},
    ("ReplayBuffer.write_back", prioritized): [
        (write_back("other"), "SchemaError: cannot write back 'other': the rows have none"),
        (write_back(["action", "gone"], gone=zeros(4)), "SchemaError: cannot write back 'gone': the rows have none"),
        (write_back("action", action=None), "SchemaError: the batch has none"),
        (write_back("action", action=zeros(4)), r"SchemaError: 'action': it is float32 of shape \(\) per row"),
        (write_back("observation", observation=zeros(4, 2)), r"SchemaError: float32 of shape \(2,\) per"),
        (write_back("action", index=None), "KeyError: the batch has no 'index'"),
        (write_back("action", sampled_at=None), "KeyError: no 'sampled_at': .*pass it as sampled_at="),
        (write_back("action", index=full((4,), 21)), "IndexError: row 21"),
        (write_back([3]), r"ValueError: keys must be a key or a sequence of keys, .* got \[3\]"),
    ],
    **{("ReplayBuffer.write_back, n-step", make): [
        (write_back(["action", ("next", "observation")]), "ValueError: cannot write back 'next' entries of n-step"),
    ] for make in (lambda: buffer(n_step(td.ProportionalSampler(30))), lambda: windows(n_step(td.RankSampler(30)), 6))},
    ("ReplayBuffer.write_back, elsewhere", nothing): [
        (lambda _: fresh().write_back(steps(3, index=ones(3).long()), "action", sampled_at=0), "SchemaError: none"),
    ],
    ("ReplayBuffer.set_at_", buffer): [
        *each(lambda rb, arguments: rb.set_at_(*arguments),
              (("absent", zeros(2), 0), "KeyError: absent"),
              (("observation", zeros(2, 4), [0, 1]), "RuntimeError: shape|size"),
              (("observation", zeros(3), 20), "IndexError: 20"),
              (("next", WIDER[:2], [0, 1]), NO_FIT),
              ((REWARD, full((20, 1), 2**24 + 1), slice(None)), "SchemaError: changes to 16777216")),
        *each(lambda rb, arguments: setitem(rb, *arguments),
              (("next", WIDER), NO_FIT), (("action", zeros(19).long()), "RuntimeError: batch dimension mismatch"),
              (("absent", zeros(20)), "KeyError: absent"), ((-21, steps()), "IndexError: position -21 is out of range"),
              ((REWARD, full((20, 1), 2**24 + 1).double()), "SchemaError: changes to 16777216")),
        *each(lambda rb, arguments: setitem(rb.storage, *arguments),
              (("next", WIDER), NO_FIT), (("absent", zeros(20)), "KeyError: absent")),
    ],
}  # fmt: skip
READS: Table = {
    ("ReplayBuffer.wait_until_sampleable", lambda: fresh(batch_size=None)): [
        (lambda rb: rb.wait_until_sampleable(0), "ValueError: min_items must be a whole number, at least 1, got 0"),
        (lambda rb: rb.wait_until_sampleable(1, -1), "ValueError: timeout must be at least 0 seconds, or None, got -1"),
        *everywhere("RuntimeError: batch_size not specified",
            lambda rb: rb.wait_until_sampleable(), lambda rb: rb.sample()),
        (lambda rb: rb.chronological(), "RuntimeError: empty"),
    ],
    ("ReplayBuffer.sample", buffer): each(lambda rb, n: rb.sample(n), *((n, NO_SAMPLE) for n in (-1, 2.5, [4]))),
    ("ReplayBuffer.sample of no rows", fresh): [
        (lambda rb: rb.sample(), "RuntimeError: empty storage: extend the buffer first"),
        (lambda rb: rb.sample(wait=True, timeout=0.01), "TimeoutError: waited for .* the buffer is empty"),
    ],
    ("ReplayBuffer.set_sampler, of a device", lambda: buffer(device="cpu")): [
        (lambda rb: rb.set_sampler(RandomSampler()), "TypeError: got PackedStorage on cpu and RandomSampler"),
    ],
    **{("ReplayBuffer.sample, FakeTensorMode", make): [(in_fake_mode, "RuntimeError: FakeTensorMode")]
       for make in (buffer, prioritized, lambda: buffer(n_step()), lambda: buffer(td.MinibatchSampler()))},
    ("ReplayBuffer.last", buffer): each(lambda rb, count: rb.last(count), *(
        (count, f"ValueError: cannot return the last {count} time steps: 20 are stored") for count in (0, 21)),
        (2.5, "ValueError: n must be a whole"), ("two", "TypeError: n must be a whole")),
    ("ReplayBuffer.share", lambda: prioritized().share()): [
        (lambda rb: rb.set_sampler(td.UniformSampler()), "RuntimeError: cannot set the sampler of a shared buffer"),
        (lambda rb: rb.set_writer(td.RingWriter()), "RuntimeError: cannot set the writer of a shared buffer"),
        (lambda rb: rb.set_storage(no_rows()), "RuntimeError: cannot set the storage of a shared buffer"),
    ],
    ("ReplayBuffer.share, other rows", nothing): [
        (lambda _: fresh(storage=td.PackedStorage(9, device="meta")).share(), "ValueError: rows on meta cannot be"),
        (lambda _: of_lanes(10).share().extend(steps(3, 2)), "ValueError: cannot grow in shared memory"),
    ],
    **{("ReplayBuffer.load_state_dict", make): each(
        lambda rb, source: rb.load_state_dict(quietly(source).state_dict()), *(
            (source, f"ValueError: {word}") for source, word in [
                (ranked, "not that of a"), (buffer, "not that of a"),
                (lambda: windows(td.UniformSampler(), 6), "not that of a"),
                (lambda: filled(td.ProportionalSampler(30), steps(4).exclude("action")), "other keys, dtypes or shape"),
                (lambda: filled(td.ProportionalSampler(40), steps(40), storage=td.PackedStorage(40)),
                 r"\[40\] .* \[30\]"),
                (lambda: theirs(RandomSampler(), steps(4), LazyTensorStorage(30)), "not th(e state|at) of a P"),
            ])) for make in (prioritized, lambda: filled(td.ProportionalSampler(30), steps(4)))},
    ("ReplayBuffer.load_state_dict, transforms", normalized): [
        (lambda rb: rb.load_state_dict(quietly(prioritized).state_dict()), "ValueError|RuntimeError: ."),
    ],
    ("ReplayBuffer.from_torchrl", nothing): [
        (lambda _: td.ReplayBuffer.from_torchrl(fresh()), "RuntimeError: the buffer is empty: there is nothing to"),
        (lambda _: td.ReplayBuffer.from_torchrl(filled(), 5), "ValueError: holds 20 transitions, more than the"),
        (lambda _: td.ReplayBuffer.from_torchrl(no_rows()), "TypeError: imports a replay buffer with a storage and a"),
        (lambda _: td.ReplayBuffer.from_torchrl(of_numbers()), "TypeError: are TensorDicts, this buffer holds a list"),
    ],
    ("ReplayBuffer.from_torchrl, of rows", buffer): each(
        lambda rb, options: td.ReplayBuffer.from_torchrl(rb, **options),
        ({"exclude": ["action", "sad"]},
         r"KeyError: exclude \['sad'\]: exclude takes a list of keys of the rows"),
        ({"exclude": [3]}, "ValueError: a key is a string, or .* got 3"),
        ({"storage": no_rows()}, "ValueError: made for the transitions, got")),
    **{("ReplayBuffer.update_tensordict_priority", make): each(
        lambda rb, entries: update(**entries)(rb),
        ({"td_error": None}, "KeyError: no 'td_error'"), ({"index": None}, "KeyError: no 'index'"),
        ({"td_error": NOT_FINITE}, r"ValueError: 2 of 4 TD errors are NaN or infinite"),
        ({"td_error": zeros(4, 4)},
         r"ValueError: shape \[4, 4\] for a batch \[4\].* reduce .*abs\(\).amax\(-1\)"),
        ({"index": full((4,), 20)}, "IndexError: row 20 is out of range")) for make in (prioritized, ranked)},
    ("ReplayBuffer.loads, other statistics", lambda: buffer(stats=td.EpisodeStats(["action"]))): [
        (loads(lambda: buffer(stats=td.EpisodeStats())), "CheckpointError: make EpisodeStats with the same keys"),
        (lambda rb: rb.extend(without("action")), "KeyError: no 'action' in the data"),
        (lambda rb: rb.extend(without(REWARD)), r"KeyError: no \('next', 'reward'\) in the data"),
    ],
    ("ReplayBuffer.loads, other parts", ranked): [
        (loads(prioritized), "CheckpointError: the dump has a ProportionalSampler as sampler, this buffer a Rank"),
        (loads(lambda: filled(td.RankSampler(30), steps(4).exclude("action"))),
         "CheckpointError: the saved rows have other keys, dtypes or shapes"),
    ],
    ("ReplayBuffer.dumps", lambda: buffer(Holding())): [
        (dumps, "CheckpointError: state._sampler.held is a object, which a"),
    ],
    ("ReplayBuffer over another storage", elsewhere): [
        *each(lambda rb, option: elsewhere(**option), *(
            (option, f"TypeError: {next(iter(option))}.*= needs a PackedStorage, got a Lazy") for option in (
                {"stats": td.EpisodeStats()}, {"lane_key": "e"}, {"device": "cpu"}, {"include_info": False},
                {"samples_per_insert": 1.0}, {"min_size": 2}))),
        (lambda _: elsewhere(sampler=n_step()), "TypeError: NStepSampler looks up episodes and needs a PackedStorage"),
        (lambda _: elsewhere(writer=td.RolloutWriter()), "TypeError: a RolloutWriter needs a PackedStorage"),
        *everywhere(FROM_OURS,
            lambda _: td.ReplayBuffer(storage=lambda: LazyTensorStorage(3)),
            lambda _: td.PrioritizedReplayBuffer(alpha=1.0, beta=0.0, storage=LazyTensorStorage(3))),
        (lambda rb: fresh().set_storage(rb.storage), "TypeError: this buffer needs a PackedStorage, got a LazyTensor"),
    ],
}  # fmt: skip
ROLLOUTS: Table = {
    **{("RolloutBuffer, not complete", lambda written=written: rollout(written)): [
        *everywhere(rf"RuntimeError: the rollout is not complete: {written} of 8 steps are written\. Write the rest fir"
                    rf"st{hint}", lambda rb: next(iter(rb)), lambda rb: rb.sample(), lambda rb: rb.summary()),
        *each(lambda rb, rows: rb.extend(rows),
              (rolled(4, 8), r"ValueError: extend takes batch size \[3, n\] .* 8 steps and 3 lanes"),
              (rolled(3, 9),
               f"ValueError: a rollout takes 8 steps and {written} are written: 9 more do not fit"),
              (rolled(3, 0), "ValueError: at least one transition")),
        (lambda rb: rb.add(rolled(4, 1)[:, 0]), r"ValueError: add takes batch size \[3\] .* got \[4\]"),
    ] for written, hint in ((0, ""), (5, ", or pass partial=True to read the written steps"))},
    ("RolloutBuffer, of 5 steps", lambda: rollout(5)): each(
        lambda rb, rows: rb.extend(rows),
        (rolled(24), r"ValueError: got \[24\]: pass .* without reshape\(-1\)$"),
        (rolled(8, 3), r"ValueError: got \[8, 3\]: pass data.transpose\(0, 1\)$"),
        (rolled(3, 3).exclude("observation"), "SchemaError: key 'observation' is missing")),
    ("RolloutBuffer(partial=True)", lambda: rollout(0, partial=True)): [
        (lambda rb: rb.sample(), "RuntimeError: 0 of 8 steps are written"),
        (lambda rb: rb.writer.estimate(), "RuntimeError: no step has been written"),
    ],
    ("RolloutBuffer, complete", lambda: rollout(8, batch_size=None)): [
        (lambda rb: rb.extend(rolled(3, 8).exclude("observation")), "SchemaError: key 'observation' is missing"),
        (lambda rb: next(iter(rb)), "RuntimeError: Batch_size was not specified"),
    ],
    ("RolloutBuffer, flat", lambda: td.RolloutBuffer(8, batch_size=5)): [
        (lambda rb: rb.extend(rolled()),
         r"ValueError: extend takes batch size \[n\] in a rollout of 8 steps, got"),
        (lambda _: td.RolloutBuffer(8, 1).extend(rolled(8)),
         r"ValueError: without such a dim.* RolloutBuffer\(8\)$"),
        (lambda rb: rb.extend(rolled(4, 8, collector={"traj_ids": zeros(4, 8).long()})),
         r"ValueError: got \[4, 8\]: for 4 environments, make a RolloutBuffer\(num_steps, 4\)"),
    ],
    ("RolloutBuffer(sequence_length=)", lambda: rollout(8, sequence_length=4, batch_size=None)): [
        (lambda rb: next(iter(rb)), "RuntimeError: Batch_size was not specified"),
        (lambda rb: rb.sample(5), "ValueError: batch_size must be a multiple of"),
    ],
    ("RolloutBuffer(sequence_length=), empty", lambda: rollout(0, sequence_length=4, batch_size=8)): [
        (lambda rb: rb.extend(rolled(3, 8).set("mask", zeros(3, 8))), "SchemaError: 'mask'"),
    ],
    ("RolloutBuffer.loads", lambda: rollout(5)): [
        (loads(lambda: rollout(4, 4)), r"CheckpointError: \[4, 3\] with plain rows, this one \[8, 3\]"),
        (loads(fresh), "CheckpointError: the dump has a RingWriter as writer, this buffer a RolloutWriter"),
        (lambda rb: rb.load_state_dict(fresh().state_dict()), "ValueError: not that of a (RolloutWriter|Mini)"),
    ],
}  # fmt: skip
QUEUES: Table = {
    ("ExperienceQueue(max_age=)", lambda: queue(batch_size=4, max_age=3)): [
        (lambda rb: rb.sample(5), "ValueError: only 4 rows are never older than max_age=3, a batch has 5"),
    ],
    ("ExperienceQueue, in use", queue): [
        *each(lambda rb, rows: rb.extend(rows),
              (steps(17), "ValueError: 17 rows never fit into a queue of 16"),
              (steps(2, y=zeros(2)), "SchemaError: 'y'"),
              (steps(12), "TimeoutError: waited for 0.01 seconds: 12 rows do not fit, because 5 of 16"),
              (steps(15), "ValueError: writes of 15 rows and batches of 4 can wait .* at least 18")),
        *each(lambda rb, n: rb.sample(n),
              (6, "TimeoutError: waited for 0.01 seconds: a batch has 6 rows, and 5 wait"),
              (17, "ValueError: a queue of 16 rows never holds a batch of 17"), (-1, NO_SAMPLE)),
        *each(lambda rb, n: rb.sample(timeout=n),
              ("one", "TypeError: timeout must be a number"), (-1, "ValueError: timeout must be at least 0"),
              (float("nan"), "ValueError: timeout must be at least 0")),
        *everywhere("ValueError: has no sampler and no writer of its own choice",
            lambda rb: rb.set_sampler(td.UniformSampler()), lambda rb: rb.set_writer(td.RingWriter())),
        (lambda rb: rb.set_storage(td.PackedStorage(8, ndim=2)), "ValueError: a queue holds rows .*, the storage"),
    ],
    ("ExperienceQueue, shut down", lambda: stopped(queue())): everywhere(
        "ShutDown: shut", lambda rb: rb.sample(), lambda rb: rb.extend(steps(1))),
    ("QueueWriter, empty", lambda: queue_parts(0)): [(lambda rb: rb.sample(), "Empty: a batch has 2 rows, and 0 wait")],
    ("QueueWriter, full", lambda: queue_parts(2)): [(lambda rb: rb.add(steps()), "Full: do not fit, because 2 of 2")],
    ("ReplayBuffer(samples_per_insert=)", lambda: fresh(samples_per_insert=4.0, tolerance=16, min_size=5)): [
        (lambda rb: rb.extend(steps(5)), "ValueError: a write of 5 rows could block forever"),
        (lambda rb: rb.sample(), "RuntimeError: too few rows|empty"),
    ],
    ("ReplayBuffer(samples_per_insert=), in use", lambda: filled(samples_per_insert=1.0, tolerance=64)): [
        (lambda rb: rb.extend(without("action")), "SchemaError: 'action'"),
        (lambda rb: rb.sample(65), "ValueError: a batch of 65 rows could block forever"),
        *each(lambda rb, counts: rb.load_state_dict(rb.state_dict() | {"_flow": {"counts": counts}}), *(
            (counts, "ValueError: flow control needs 6 whole numbers as counts")
            for counts in ([0, 1], [-1] * 6, [0.5] * 6, None))),
    ],
}  # fmt: skip
OTHER_SHARES = {"a": 0.9, "b": 0.1}
MIXTURES: Table = {
    ("ReplayBufferMixture, in use", mixture): [
        *each(lambda mixed, n: mixed.sample(n), *(
            (n, "ValueError|TypeError: batch_size must be a whole number, at least 1, got")
            for n in (0, 2.5, True, tensor(0)))),
        (lambda mixed: mixed.extend(steps(2)), r"KeyError: name one of \['a', 'b'\], or pass writes_to"),
        *each(lambda mixed, share: setattr(mixed.sampler, "a", share), *(
            (share, "ValueError: a must be between 0 and 1") for share in (1.5, nan))),
        *each(lambda mixed, columns: mixed.add(*columns), *(
              (columns, f"TypeError: add takes one TensorDict, got {len(columns)} arguments: add_step takes")
              for columns in ((zeros(3), zeros(1)), (zeros(3), "a", 0.5), (zeros(3), 1, 0.5, zeros(3))))),
        (lambda mixed: mixed.sampler.other, "AttributeError: a mixture of a, b has no share 'other'"),
        (lambda mixed: setattr(mixed.sampler, "two", 0.5), "AttributeError: a mixture of a, b has no share 'two'"),
        *each(lambda mixed, entries: update(**entries)(mixed),
              ({"source": None}, "KeyError: no 'source'"),
              ({"td_error": NOT_FINITE}, "ValueError: 1 of .* TD errors are NaN"),
              ({"index": full((4,), 30), "sampled_at": None}, "IndexError: out of range")),
        (write_back("action", source=None), "KeyError: no 'source'"),
        *(row for source in (tensor([0, 0, 0, 7]), tensor([0, 0, 0, -1]), zeros(4, 1), zeros(4)) for row in everywhere(
            r"IndexError: 'source' must hold one position in \['a', 'b'\] per row, .* got torch",
            update(source=source), write_back("action", source=source))),
        *each(lambda mixed, wrong: mixed.load_state_dict(mixed.state_dict() | wrong),
              ({"shares": {"a": 1.0}}, "ValueError: belong to a"),
              ({"members": {}, "shares": OTHER_SHARES}, "ValueError: the state is of members"),
              ({"generator": zeros(3).byte()}, "RuntimeError: RNG")),
        *each(lambda mixed, part: mixed.load_state_dict(spoiled(mixed, part)), *(
            (part, "ValueError|RuntimeError: .")
            for part in ("_storage", "_sampler", "_transforms", "_writer", "_batch_size"))),
    ],
    **sampling("ReplayBufferMixture",
        (lambda: mixture(b=fresh), "RuntimeError: member 'b' has no rows: extend it first, or set its share to 0"),
        (lambda: mixture(a=lambda: fresh(min_size=99)), "RuntimeError: member 'a'|flow control does not admit"),
        (lambda: mixture(a=filled, b=fresh, rows=without("observation")), "SchemaError: in 'a', missing in 'b'"),
        (lambda: mixture(a=fresh, b=filled, rows=steps(9, source=zeros(9))), "SchemaError: member 'a' stores the key"),
        (lambda: mixture(a=lambda: filled(n_step())), r"SchemaError: 'steps_to_next_obs' is int64 of shape \(1,\) in"),
        (lambda: mixture(*[lambda: filled(sequence(length=2, output_layout="batch_time"))] * 2), "ValueError: dims"),
        (lambda: mixture(*[lambda: quiet(fresh(), steps(4, 5))] * 2), "ValueError: members must store single"),
        (lambda: mixture(*[lambda: filled(sequence(length=3))] * 2), "ValueError: batch_size=4 must be a multiple of"),
        (lambda: td.ReplayBufferMixture({"a": filled()}, {"a": 1.0}), "RuntimeError: batch_size not specified")),
    ("ReplayBufferMixture.write_back, uniform", lambda: mixture(buffer, buffer)): each(
        lambda mixed, known: mixed.write_back(mixed.batch, "action", sampled_at=known), *(
            (known, r"KeyError: no 'sampled_at', and sampled_at=.* lacks one of \['a', 'b'\]: pass")
            for known in (None, 3, {"a": 9}))),
    ("ReplayBufferMixture, a member is shut down", lambda: with_stopped_member(mixture())): everywhere(
        "ShutDown: shut down", write_back("action"), lambda mixed: mixed.sample()),
}  # fmt: skip
REFUSALS = WRITES | READS | ROLLOUTS | QUEUES | MIXTURES
