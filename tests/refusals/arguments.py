"""What constructors and functions refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.data.replay_buffers import (
    FlatStorageCheckpointer,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    TensorDictRoundRobinWriter,
)

from rlbuf_td.diagnostics.memory_plan import priority_bytes
from rlbuf_td.diagnostics.plots import (
    plot_advantages,
    plot_episodes,
    plot_health,
    plot_trajectory,
)
from rlbuf_td.envs.specs import transition_schema
from tests.diagnostics.test_episode_stats import KEYS, play
from tests.refusals.makers import *


def called_with(
    make: Callable[..., Any], *cases: tuple[dict[str, Any], str]
) -> list[Row]:
    """Return a row for each dict of arguments."""
    return each(lambda _, arguments: make(**arguments), *cases)


# -- rules that hold for many arguments


def wrong_numbers(
    make: Callable[..., Any], names: str, numbers: list[Any], said: str
) -> list[Row]:
    return [
        row
        for name in names.split()
        for number in numbers
        for row in called_with(make, ({name: number}, said.format(name)))
    ]


def whole(make: Callable[..., Any], least: int, names: str) -> list[Row]:
    said = f"TypeError|ValueError: {{}} must be a whole number, at least {least}, got "
    return wrong_numbers(make, names, [least - 1, least + 0.1, True, "one"], said)


def number(
    make: Callable[..., Any], names: str, numbers: list[float], rule: str
) -> list[Row]:
    """Return rows of numbers out of range, and of what is no number."""
    others = ["0.5", [0.5], {}, True, zeros(2)]
    said = "TypeError: {} must be .* got .*, of type"
    no_number = wrong_numbers(make, names, others, said)
    return no_number + wrong_numbers(
        make, names, numbers, f"ValueError: {{}} must be {rule}, got "
    )


def at_least_0(make: Callable[..., Any], names: str) -> list[Row]:
    wrong = [-0.1, nan, torch.inf]
    return number(make, names, wrong, "greater or equal to 0, and finite")


def share(make: Callable[..., Any], names: str) -> list[Row]:
    return number(make, names, [-0.1, 1.1, nan], "between 0 and 1")


def n_steps(**options):
    return td.NStepSampler(
        **{"sampler": td.UniformSampler(), "n_steps": 3, "gamma": 0.9} | options
    )


def wrapped_twice(outer, inner):
    return outer(inner())


def chunks(**options):
    return sequence(td.MinibatchSampler(), **options)


proportional, storage_9 = (
    partial(td.ProportionalSampler, 9),
    partial(td.PackedStorage, 9),
)
rollout_8 = partial(td.RolloutBuffer, 8, 2)


def mixed(**parts):
    return td.ReplayBufferMixture(
        **{"members": {"a": fresh()}, "shares": {"a": 1.0}} | parts
    )


def queued(**options):
    return td.ExperienceQueue(**{"storage": no_rows()} | options)


def gae(gamma=0.9, lmbda=0.9, **inputs):
    return F.generalized_advantage_estimate(gamma, lmbda, **(estimates() | inputs))


def estimates(length: int = 9) -> dict[str, Any]:
    """Return the arguments of all estimates, [2, T, 1]."""
    names = "state_value", "next_state_value", "reward"
    made = {name: zeros(2, length, 1) for name in names}
    return made | {name: zeros(2, length, 1).bool() for name in ("done", "terminated")}


FUNCTIONS: list[Any] = [
    lambda **inputs: F.generalized_advantage_estimate(0.9, 0.8, **inputs),
    lambda state_value, **inputs: F.td_lambda_return_estimate(0.9, 0.8, **inputs),
    lambda state_value, **inputs: F.td1_return_estimate(0.9, **inputs),
    lambda **inputs: F.vtrace_advantage_estimate(
        0.9, inputs["reward"], inputs["reward"], **inputs
    ),
]


NUMBERS, FLAGS = np.zeros(3), np.zeros(3, bool)
TRANSITION = {
    "obs": NUMBERS,
    "action": NUMBERS,
    "reward": NUMBERS,
    "next_obs": NUMBERS,
    "terminated": FLAGS,
    "truncated": FLAGS,
}


def counting():
    return TensorDictRoundRobinWriter(track_generations=True)


def wider() -> TensorDict:
    return steps(3).set("observation", zeros(3, 4))


SAMPLERS: list[Row] = [
    *whole(td.UniformSampler, 0, "max_age"),
    *whole(td.MinibatchSampler, 1, "epochs"),
    *whole(td.RecencySampler, 0, "max_age"),
    *called_with(td.RecencySampler, ({"window": 0.5}, "ValueError: window must be a whole number, at least 1")),
    *number(td.RecencySampler, "half_life", [0.0, nan], "a positive number of time steps, or infinite"),
    *whole(td.ProportionalSampler, 1, "max_capacity"),
    *at_least_0(proportional, "alpha beta eps min_priority"),
    *at_least_0(partial(td.RankSampler, 9), "alpha beta"),
    *called_with(proportional,
           ({"max_priority_within_buffer": True}, "NotImplementedError: largest"),
           ({"weight_norm": "rows"}, "ValueError: must be 'buffer', 'batch' or None, got"),
           ({"reduction": "sum"}, "ValueError: reduction must be"),
           ({"dtype": torch.int64}, "ValueError: must be torch.float32 or torch.float64")),
    *share(hindsight, "her_ratio future_gamma"),
    *called_with(hindsight,
           ({"strategy": "past"}, "ValueError: must be one of future, final, episode, random, got 'past'"),
           *(({"strategy": mix}, "ValueError: at least 0 and add up to 1")
             for mix in ({"future": 0.5}, {"future": 1.5, "final": -0.5}, {"future": None}))),
    *whole(n_steps, 1, "n_steps"),
    *share(n_steps, "gamma"),
    *called_with(n_steps, ({"reward_key": "reward"}, "ValueError: must be in 'next'")),
    *whole(sequence, 1, "length"),
    *whole(sequence, 0, "burn_in"),
    *share(sequence, "eta"),
    *called_with(sequence,
           ({"boundary": "cut"}, "ValueError: boundary must be 'pad', 'shift' or 'strict', got 'cut'"),
           ({"priority": "min"}, "ValueError: priority must be 'max' or 'mix', got 'min'"),
           ({"output_layout": "time"}, "ValueError: output_layout must be"),
           *(({"inner": inner, "stride": 3},
              "TypeError: stride needs a sampler that draws each window once .*use a MinibatchSampler")
             for inner in (None, SamplerWithoutReplacement(), n_step(hindsight(SamplerWithoutReplacement()))))),
    *whole(chunks, 1, "stride"),
    *called_with(chunks,
           ({"stride": 4}, "ValueError: stride=4 leaves out rows .* a stride from"),
           *(({"stride": 3, "boundary": boundary},
              'ValueError: stride needs boundary="pad": boundary=".*" would move or replace')
             for boundary in ("shift", "strict"))),
    *whole(td.EpisodeSampler, 1, "max_length"),
    *share(td.EpisodeSampler, "gamma"),
    *called_with(td.EpisodeSampler,
           ({"by": "rows"}, "ValueError: by must"), ({"layout": "packed"}, "ValueError: layout must"),
           ({"sampler": n_step(), "gamma": 0.9}, "ValueError: a NStepSampler may change the rewards"),
           ({"sampler": sequence()}, "TypeError: EpisodeSampler cannot wrap a SequenceSampler"),
           *(({"sampler": inner}, "TypeError: uniformly or by length, not by a .*: wrap a UniformSampler, or ")
             for inner in (proportional(), PrioritizedSampler(9, 0.6, 0.4), td.RecencySampler(), td.MinibatchSampler(),
                           td.UniformSampler(unique=True), td.UniformSampler(max_age=8)))),
    *each(lambda _, make: make(), *(
        (partial(wrapped_twice, outer, inner), r"TypeError: cannot wrap a .*SequenceSampler\(NStepSampler\(HindsightS")
        for outer, inner in [
            (hindsight, hindsight), (hindsight, n_step), (hindsight, sequence), (n_step, n_step), (n_step, sequence),
            (sequence, sequence)])),
    (lambda _: sequence(hindsight(), across_episodes=True), "TypeError: combined with a HindsightSampler"),
    (lambda _: td.HindsightSampler(None, len), "TypeError: HindsightSampler wraps a sampler, got NoneType"),
    (lambda _: td.HindsightSampler(td.UniformSampler(), 0.0),
     r"TypeError: must be a function of the batch, got a float: .*pass gymnasium_reward_fn\(env\)"),
]  # fmt: skip
STORAGES: list[Row] = [
    *whole(td.PackedStorage, 1, "max_size"),
    *whole(storage_9, 1, "ndim"),
    *whole(partial(storage_9, ndim=2), 1, "lanes"),
    *called_with(storage_9,
           ({"lanes": 3}, "ValueError: needs ndim=2"),
           ({"scratch_dir": "x", "device": "cuda"}, "ValueError: scratch_dir needs device=.cpu"),
           ({"shared_init": True, "device": "cuda"}, "ValueError: shared needs device='cpu'"),
           ({"device": "cuda:99"}, "RuntimeError: 'cuda:99' is missing: torch finds . CUDA dev"),
           ({"share_next": True, "device": "cuda"}, "ValueError: leave them out, or keep"),
           ({"share_next": "yes"}, "ValueError: must be True, False"),
           ({"share_next": [("next", "observation")]}, "ValueError: without 'next'"),
           ({"share_next": [3]}, "ValueError: takes keys"),
           ({"frames": 4}, "ValueError: must be a dict"),
           ({"frames": {3: 4}}, "ValueError: takes keys"),
           ({"frames": {"pixels": 1}}, "ValueError: at least 2"),
           ({"frames": {"pixels": (4, 1.5)}}, "ValueError: 'pixels' must be a whole number"),
           ({"frames": {("next", "pixels"): 4}}, "ValueError: without 'next'"),
           ({"frames": {"pixels": 4, ("pixels",): 4}}, "ValueError: twice")),
]  # fmt: skip
BUFFERS: list[Row] = [
    *whole(td.ReplayBuffer, 0, "min_size batch_size"),
    *number(td.ReplayBuffer, "samples_per_insert", [0.0, nan, torch.inf], "a positive number"),
    *number(partial(td.ReplayBuffer, samples_per_insert=1), "tolerance", [0, nan], "at least 1.0"),
    *called_with(td.ReplayBuffer,
           ({"checkpointer": FlatStorageCheckpointer()}, "NotImplementedError: without TorchRL"),
           ({"device": "cuda:99"}, "RuntimeError: device='cuda:99' is missing: torch finds . CUDA"),
           ({"lane_key": "e", "storage": storage_9()}, "TypeError: lane_key= needs a "),
           ({"lane_key": "e", "storage": td.PackedStorage(8, ndim=2), "writer": td.ReservoirWriter()},
            "TypeError: lane_key= needs a "),
           ({"storage": storage_9(), "prefetch": 1}, "ValueError: batch-size must be"),
           ({"storage": storage_9(device="meta"), "device": "cpu"}, "TypeError: on the CPU"),
           ({"collate_fn": len, "device": "cpu"}, "TypeError: collate_fn"),
           ({"sampler": RandomSampler(), "device": "cpu"},
            "TypeError: a sampler of this package.*got PackedStorage on cpu and RandomSampler"),
           ({"sampler": proportional(device="cuda:0")}, "ValueError: on the device of the rows"),
           ({"samples_per_insert": 4, "tolerance": 3}, "ValueError: tolerance must be at least 4"),
           ({"tolerance": 3}, "ValueError: tolerance needs samples_per_insert"),
           ({"samples_per_insert": 1, "prefetch": 2, "batch_size": 4}, "ValueError: use prefetch=0"),
           ({"samples_per_insert": 1, "tolerance": 4, "batch_size": 8},
            "ValueError: block forever .* make it at least 8"),
           ({"priority_key": 3}, "ValueError: a key is a string, or strings such as .* got 3"),
           ({"writer": counting()}, "NotImplementedError: track_generations=True is not supported: leave it")),
    *called_with(partial(td.PrioritizedReplayBuffer, alpha=0.7, beta=0.9),
           ({"sync": False}, "NotImplementedError: sync=False and sampler_device="),
           ({"sampler_device": "cpu"}, "NotImplementedError: sync=False and sampler_device="),
           ({"sampler": td.UniformSampler()}, "TypeError: its own")),
    *called_with(queued,
           ({"storage": td.PackedStorage(8, ndim=2)}, "ValueError: a queue holds rows"),
           ({"min_size": 2}, "ValueError: an ExperienceQueue has no min_size of its own choice"),
           ({"prefetch": 2}, "ValueError: an ExperienceQueue has no prefetch of its own choice"),
           ({"timeout": -1.0}, "ValueError: timeout must be at least 0 seconds, or None"),
           ({"timeout": nan}, "ValueError: timeout must be at least 0 seconds, or None"),
           ({"timeout": "one"}, "TypeError: timeout must be a number, got 'one'"),
           ({"batch_size": 5, "max_age": 3}, "ValueError: only 4 rows are never older than max_age=3")),
    *called_with(mixed,
           ({"members": {"a": queued()}}, "TypeError: 'a' is an ExperienceQueue, which"),
           ({"members": {"a": fresh(sampler=td.EpisodeSampler())}}, "TypeError: batches have no fixed number of rows"),
           ({"members": {"a": fresh(sampler=PrioritizedSampler(9, 1.0, 1.0))}}, "TypeError: use a"),
           ({"members": fresh(), "shares": fresh()},
            'TypeError: a dict of buffers by name, such as {"demos": rb1'),
           ({"shares": [1.0]}, "TypeError: and shares a dict of numbers, such as .*, got dict and list"),
           ({"shares": {"b": 1.0}}, r"ValueError: same names: members are \['a'\], shares are of \['b'\]"),
           ({"shares": {"a": 0.0}}, "ValueError: shares must be at least 0 and finite, one of them positive"),
           ({"writes_to": "b"}, "ValueError: writes_to='b'"),
           *(({"members": {name: fresh()}, "shares": {name: 1.0}}, "ValueError: cannot be the name of a member")
             for name in ("", "_rng", "../one", "a/b", ".lock", "sample", "2\nlines"))),
    (lambda _: mixed(members={"a": theirs(None, steps(3))}), "TypeError: member 'a' must be a ReplayB"),
    (lambda _: mixed(members={"a": filled(), "b": filled(rows=wider())}, shares={"a": 1, "b": 1}),
     r"SchemaError: 'observation' is float32 of shape \(3,\) in 'a', float32 of shape \(4,\) in 'b'"),
    *whole(lambda num_steps=8, num_envs=2: td.RolloutBuffer(num_steps, num_envs), 1, "num_steps num_envs"),
    *whole(mixed, 1, "batch_size"),
    *whole(rollout_8, 1, "sequence_length epochs"),
    *called_with(rollout_8,
           ({"normalize_advantage": "batch"}, "ValueError: None, 'rollout' or 'minibatch'"),
           ({"storage": td.PackedStorage(8, ndim=2)}, "ValueError: a storage of 16 rows, got"),
           ({"writer": 3}, "TypeError: writer must be a RolloutWriter, got int"),
           ({"writer": td.RolloutWriter(), "gamma": 0.9, "lmbda": 0.9},
            "ValueError: writer= has its own settings: pass gamma=, lmbda= to it"),
           ({"sampler": td.MinibatchSampler(), "epochs": 1, "drop_last": False},
            "ValueError: sampler= has its own settings: pass epochs=, drop_last= to it"),
           ({"storage": td.PackedStorage(16, ndim=2), "storing_device": "cpu"},
            "ValueError: storage= has its own settings: pass device= to it instead"),
           ({"estimator": len, "lmbda": 0.9}, "ValueError: are those of GAE, which estimator="),
           ({"estimator": len, "writer": td.RolloutWriter()}, "ValueError: settings: pass"),
           ({"group": "a", "writer": td.RolloutWriter()}, "ValueError: pass group= to it instead"),
           ({"sequence_length": 9}, "ValueError: a rollout of 8 steps has no chunks of 9"),
           ({"sequence_length": 4, "batch_size": 10},
            "ValueError: must be a multiple of sequence_length=4, got 10: for 32 chunks use 128"),
           ({"sequence_length": 4, "sampler": td.UniformSampler()}, "ValueError: sequence_length=")),
    (lambda _: td.RolloutBuffer.from_schema(rolled(2, 3), 10), r"SchemaError: rollouts are \[T\] or \[T, E\]"),
]  # fmt: skip
WRITERS: list[Row] = [
    (lambda _: td.RingWriter(track_generations=True),
     "NotImplementedError: In place of update_if_present, rb.wri"),
    (lambda _: fresh().set_writer(counting()), "NotImplementedError: track_generations=True is not supported"),
    (lambda _: filled().update_if_present(index=tensor([0]), generation=tensor([0]), patch={}),
     "NotImplementedError: write_back"),
    *called_with(td.RolloutWriter,
           ({"gamma": 1.5}, r"ValueError: RolloutWriter: gamma must lie in \[0, 1\], got 1.5"),
           ({"value_network": torch.nn.Identity()}, r"TypeError: wrap it, TensorDictModule\("),
           ({"estimator": 3}, "TypeError: estimator must be a function of a rollout, got int"),
           *(({"group": group}, "ValueError: group must be the name of a group of ag")
             for group in (3, (), ("next", "agents"), ["red", "blue"]))),
]  # fmt: skip
ESTIMATES: list[Row] = [
    *(row for estimate in FUNCTIONS for row in called_with(
        lambda estimate=estimate, **inputs: estimate(**(estimates() | inputs)),
        ({"done": zeros(2, 9).bool()}, r"ValueError: all inputs must share one shape.*'done': \(2, 9\)"),
        ({"done": zeros(2, 9, 1).long()}, "TypeError: done must be a bool tensor, got torch.int64. Pass"),
        ({"terminated": zeros(2, 9, 1)}, "TypeError: terminated must be a bool tensor"),
        ({"next_state_value": zeros(2, 9, 1).long()}, "TypeError: next_state_value .* floating dtype, got"),
        ({"done": [False] * 9}, "TypeError: done must be a tensor, got list"),
        ({"time_dim": 3}, r"ValueError: time_dim=3 does not exist in inputs of shape \(2, 9, 1\)"),
        (estimates(0), r"ValueError: the inputs are empty \(shape \(2, 0, 1\)\)"),
        ({name: leaf[0, :, 0] for name, leaf in estimates().items()}, "ValueError: exist .* pass time_dim=-1"))),
    *called_with(gae,
           ({"gamma": nan}, r"ValueError: gamma must lie in \[0, 1\], got nan"),
           ({"lmbda": 2}, r"ValueError: lmbda must lie in \[0, 1\], got 2.0"),
           ({"gamma": None}, "TypeError: gamma must be a number or a tensor, got NoneType"),
           ({"gamma": ones(9)}, r"ValueError: gamma of shape \(9,\) does not broadcast to the inputs' shape"),
           ({"gamma": tensor(0.5, requires_grad=True)}, "ValueError: requires a gradient.*Pass"),
           *(({"state_value": spoil(zeros(2, 9, 1))}, "RuntimeError|TypeError: memory|[nN]ested|storage")
             for spoil in (freed, shrunk, nested))),
    *each(lambda _, estimate: estimate(**estimates(), rolling_gamma=False), *(
        (estimate, "ValueError: rolling_gamma=False is not supported") for estimate in FUNCTIONS[1:3])),
    (lambda _: FUNCTIONS[3](**estimates(), rho_thresh=-1.0), "ValueError: rho_thresh must be at least 0, got -1"),
    (lambda _: F.explained_variance(zeros(3, 1), zeros(3)), "ValueError: must share one shape"),
    (lambda _: F.normalize(zeros(0)), "ValueError: normalize: the tensor is empty"),
    (lambda _: F.normalize(zeros(3), eps=0), "ValueError: eps must be positive, got 0"),
    *each(lambda _, mask: F.normalize(zeros(5, 4, 2), mask=mask), *(
        (mask, r"ValueError: the mask must be bool with the first dims of \(5, 4, 2\), got")
        for mask in (ones(5, 4), ones(4, 4).bool(), ones(5, 4, 3).bool()))),
    *each(lambda _, mask: F.reward2go(zeros(4, 9), zeros(4, 9).bool(), 0.9, mask=mask),
          (ones(4, 5).bool(), "ValueError: mask must"), (ones(4, 9), "TypeError: mask must be a")),
    (lambda _: F.random_shift(zeros(3, 4)), r"ValueError: images must be \[..., C, H, W\], got shape \(3, 4\)"),
    (lambda _: F.random_shift(zeros(1, 3, 4), -1), "ValueError: pad must be at least 0, got -1"),
]  # fmt: skip
DIAGNOSTICS: list[Row] = [
    *whole(td.EpisodeStats, 1, "window history"),
    *called_with(td.EpisodeStats,
           ({"keys": {("next", "speed"): "median"}},
            "ValueError: metrics are reduced by 'sum', 'mean' or 'last', got .*median"),
           ({"keys": ["speed", ("next", "speed")]}, "ValueError: needs a unique name"),
           ({"reasons": [("next", "truncated")]}, "ValueError: needs a unique name")),
    *whole(partial(td.plan, steps()), 1, "capacity"),
    (lambda _: td.plan("CartPole-v1", 10), "TypeError: has no keys, dtypes and shapes"),
    (lambda _: td.plan(steps()), "TypeError: capacity must be a whole number, at least 1, got None"),
    (lambda _: td.plan(TensorDict({"s": "text"}), 10), "SchemaError: 's' .*non-tensor"),
    (lambda _: td.plan(fresh()), "TypeError: has not been written to"),
    (lambda _: priority_bytes("random", 10), "TypeError: must be one of uniform, proportional, rank, .* got"),
    (lambda _: priority_bytes(td.NStepSampler, 10), "TypeError: wraps a sampler that its class does not specify"),
    *each(lambda _, make: td.check(make()),
          (lambda: 3, "TypeError: the doctor reads a buffer, a storage, .* not a int"),
          (of_numbers, "TypeError: storages of TensorDicts, not a ListStorage"),
          (no_rows, "ValueError: the buffer is empty: there is nothing to read"),
          (lambda: quietly(emptied), "ValueError: the buffer is empty: there is nothing to read"),
          (lambda: "/nowhere/at/all", "CheckpointError: holds no dump: there is no such folder")),
    (lambda _: td.check(filled(), ignore="speed"), "ValueError: there is no finding speed; there are lanes-mixed"),
]  # fmt: skip
SPACES: list[Row] = [
    *each(lambda _, space: transition_schema(space, spaces.Discrete(2)),
          (spaces.Text(5), "SchemaError: 'observation' is a Text space, which has no fixed size"),
          (spaces.Dict(a=spaces.Dict(b=spaces.Sequence(spaces.Discrete(2)))), r"SchemaError: 'a', 'b'\) is a Sequence"),
          (spaces.Box(-1, 1, (2,), np.longdouble), "SchemaError: has dtype float128, which torch does not have"),
          (spaces.Dict(action=spaces.Discrete(2)), "SchemaError: a key 'action', which is reserved"),
          (spaces.Dict({3: spaces.Discrete(2)}), "SchemaError: keys are strings, got 3 of type int")),
    (lambda _: transition_schema(spaces.Discrete(2), 2), "TypeError: the action space must be .*, got a int"),
    (lambda _: transition_schema(spaces.Discrete(2), spaces.Discrete(2), 0), "ValueError: num_envs must be at"),
    (lambda _: td.schema_of("CartPole-v1"), "TypeError: a str has no keys, dtypes and shapes"),
    (lambda _: td.schema_of(TensorDict({"name": "x", "value": zeros(())}, [])), "SchemaError: holds non-tensor"),
    (lambda _: td.schema_of(steps(3), extras={"x": np.zeros(2)}), r"SchemaError: 'x' has shape \(2,\), expected"),
    (lambda _: td.make_transition(zeros(3), 0, ones(3), 1.0, False, False), r"SchemaError: 'observation' is of sha"
     r"pe \(3,\) before the step and of shape \(\) after it: give the observations before and after one step"),
    (lambda _: td.make_transition({"a": 1}, 0, 1.0, {"b": 1}, False, False), "SchemaError: 'a' .*missing after it"),
    *each(lambda _, reward: td.make_transition(1, 0, reward, 1, False, False),
          (None, "SchemaError: numbers"), (1j, "SchemaError: real"),
          ({"a": 1}, "SchemaError: a number or an array")),
    *called_with(lambda **entries: td.make_transition(**(TRANSITION | entries)),
           ({"obs": {"a": {"b": "text"}}}, r"SchemaError: \('a', 'b'\) is a str of dtype <U4, which no tensor can"),
           ({"obs": {"a": np.zeros(3, object)}}, "SchemaError: 'a' is a ndarray of dtype object"),
           ({"obs": {1: 2}}, "SchemaError: keys are strings, got 1"),
           ({"obs": {"next": 1}}, "SchemaError: a key 'next', which is reserved for the transition"),
           ({"terminated": 0}, "SchemaError: 'terminated' must be bool, or an array of bool, got torch.int64"),
           ({"truncated": np.zeros(2, bool)},
            r"SchemaError: 'truncated' has shape \(2,\), expected that of 'terminated', \(3,\)"),
           ({"action": np.zeros(2)}, r"SchemaError: 'action' has shape \(2,\), expected the leading dims \(3,\)"),
           ({"reward": 1.0}, r"SchemaError: \('next', 'reward'\) has shape \(\), expected the leading dims \(3,\)"),
           ({"reward": np.array([1, 2**24 + 1, 0])},
            "SchemaError: 16777217, which float32 changes to .*: pass rewards as a"),
           ({"next": 3}, "SchemaError: the extra 'next' must be a dict"),
           ({"next": {"done": True}}, "SchemaError: the extra 'done' has the name")),
]  # fmt: skip
STEPS_OF_STATS: list[Row] = [
    *each(lambda stats, spoil: stats.update(spoil(play(2, 5, 0))),
          (lambda rows: rows.exclude("height"), "KeyError: no 'height' in the data"),
          (lambda rows: rows.exclude(*ENDS, ("next", "truncated")), r"KeyError: no \('next'"),
          (lambda rows: rows[0, 0], "ValueError: no time dim -1 in batch size"),
          (lambda rows: rows.set(REWARD, zeros(2, 5, 3)), "ValueError: one number per step, got"),
          (lambda rows: rows.set(("collector", "traj_ids"), zeros(2, 5, 2).long()),
           r"ValueError: got \('collector', 'traj_ids'\) of shape \[2, 5, 2\] for 10 steps")),
    (lambda stats: stats.load_state_dict(td.EpisodeStats().state_dict()), "ValueError: make EpisodeStats with the"),
]  # fmt: skip
PLOTS: list[Row] = [
    (lambda _: plot_health(fresh()), "RuntimeError: there is no health to plot: no rows"),
    (lambda _: plot_health(mixed()), "TypeError: plot a member, mixture"),
    (lambda _: plot_episodes(td.EpisodeStats()), "RuntimeError: no episode has ended"),
    (lambda _: plot_trajectory(filled(), 20), "IndexError: row 20 is out of range: rows 0 to 19 have been written"),
    (lambda _: plot_trajectory(filled(), 0, keys=["velocity"]), "KeyError: no 'velocity' in the rows"),
    (lambda _: plot_advantages(td.RolloutBuffer(4, 2)), "RuntimeError: the rollout is not complete"),
]  # fmt: skip
REFUSALS: Table = {
    ("plots", nothing): PLOTS,
    ("EpisodeStats.update", lambda: td.EpisodeStats(KEYS)): STEPS_OF_STATS,
    ("arguments of samplers", nothing): SAMPLERS,
    ("arguments of storages", nothing): STORAGES,
    ("arguments of buffers", nothing): BUFFERS,
    ("arguments of writers", nothing): WRITERS,
    ("estimates", nothing): ESTIMATES,
    ("diagnostics", nothing): DIAGNOSTICS,
    ("spaces and steps", nothing): SPACES,
}
