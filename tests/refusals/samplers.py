"""What samplers refuse."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)

from rlbuf_td import SchemaError
from tests.catalogue import SAMPLERS, reward_fn
from tests.refusals.makers import *


def weightless() -> Any:
    rb = buffer(td.ProportionalSampler(30, alpha=1.0, eps=0.0))
    rb.update_priority(torch.arange(20), zeros(20))
    return rb


def of_no_rows(make: Any, form: dict[str, Any], is_new: bool) -> Any:
    cls: Any = td.ReplayBuffer if is_new else TensorDictReplayBuffer
    rb = cls(storage=td.PackedStorage(12, **form), sampler=make(12), batch_size=12)
    if not is_new:
        rb.extend(steps(3, 4) if form else steps(12))
        rb.empty()
    assert rb.can_sample() is False
    return rb


class Fixed(td.RowSampler):
    """Draws given rows."""

    report_keys = frozenset({"mark"})
    state_keys = ("rows",)

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def draw(self, storage: Any, batch_size: int) -> Any:
        return self.rows, {}


def episodes() -> TensorDict:
    """Return 20 steps of two episodes."""
    return entry(("next", "done"), (torch.arange(20) % 10 == 9)[:, None])


def goals(changes: dict[Any, Any], fn: Any = reward_fn, **options: Any) -> Any:
    """Return a buffer that relabels goals of rows with other entries; without those
    that are None."""
    rows = steps(20, desired_goal=full((20, 2), 9.0))
    rows["next"].update(
        {"achieved_goal": zeros(20, 2), "desired_goal": full((20, 2), 9.0)}
    )
    rows = rows.exclude(*(key for key, value in changes.items() if value is None))
    for key, value in changes.items():
        if value is not None:
            rows[key] = value
    return filled(hindsight(fn=fn, her_ratio=1.0, **options), rows)


def with_mask() -> Any:
    made = td.PackedStorage(30)
    made.set(range(4), steps(4, mask=zeros(4)))
    return made


def hindsight(inner: Any = None, fn: Any = reward_fn, **options: Any) -> Any:
    return td.HindsightSampler(inner or td.UniformSampler(), fn, **options)


IN_TIME_ORDER: list[Callable[[], Any]] = [
    lambda: td.RecencySampler(2.0), n_step, sequence, hindsight
]  # fmt: skip
REPORTS: dict[str, Callable[[], Any]] = {
    "mask": sequence,
    "burn_in_mask": lambda: sequence(burn_in=1),
    "anchor_index": sequence,
    "steps_to_next_obs": lambda: sequence(n_step()),
    "relabeled": hindsight,
    "priority_weight": lambda: td.ProportionalSampler(30),
    "sampled_at": lambda: n_step(td.RankSampler(30)),
}

REFUSALS: Table = {
    ("UniformSampler", nothing): [
        (lambda _: td.UniformSampler(max_age=-1), ValueError, "max_age must be a whole number, at least 0"),
        (lambda _: fresh(sampler=td.UniformSampler(max_age=1), writer=td.ReservoirWriter()), ValueError, "keeps none"),
    ],
    ("UniformSampler, unique", lambda: buffer(td.UniformSampler(unique=True))): [
        (lambda rb: rb.sample(21), ValueError, "cannot draw 21 distinct rows of 20"),
    ],
    ("UniformSampler, unique and young", lambda: buffer(td.UniformSampler(unique=True, max_age=5))): [
        (lambda rb: rb.sample(7), ValueError, "cannot draw 7 distinct rows of 6"),
    ],
    ("MinibatchSampler", nothing): [
        *((lambda _, n=n: td.MinibatchSampler(n), (TypeError, ValueError),
           f"epochs must be a whole number, at least 1, got {n}")
          for n in (0, 1.5, True)),
    ],
    ("MinibatchSampler", lambda: filled(td.MinibatchSampler(drop_last=True))): [
        (lambda rb: rb.sample(0), ValueError, "batch_size must be at least 1, got 0"),
        (lambda rb: rb.sample(21), ValueError, "drop_last leaves no batch: 20 rows are fewer than the batch size 21"),
    ],
    ("RecencySampler", nothing): [
        (lambda _: td.RecencySampler(half_life=0.0), ValueError, "a positive number of time steps, or infinite, got"),
        (lambda _: td.RecencySampler(window=0.5), ValueError, "window must be a whole number, at least 1"),
        (lambda _: td.RecencySampler(max_age=True), TypeError, "max_age must be a whole number, at least 0"),
    ],
    ("RecencySampler", lambda: buffer(td.RecencySampler(3.0, 4))): [
        (lambda rb: rb.sampler.load_state_dict(rb.sampler.state_dict() | {"half_life": 0.0}), ValueError, "half_life"),
        (lambda rb: rb.sampler.load_state_dict(rb.sampler.state_dict() | {"window": 0.5}), ValueError, "window must"),
    ],
    ("samplers of no rows", nothing): [
        *((lambda _, make=make, form=form, is_new=is_new: of_no_rows(make, form, is_new).sample(), RuntimeError,
           "Cannot sample from an empty storage: extend the buffer first")
          for make in SAMPLERS.values()
          for form, is_new in (({}, True), ({}, False), ({"ndim": 2}, False), ({"ndim": 2, "lanes": 3}, True))),
    ],
    ("ProportionalSampler", nothing): [
        (lambda _: td.ProportionalSampler(3.7), ValueError, "max_capacity must be a whole number, at least 1"),
        (lambda _: td.ProportionalSampler(9, eps=-1.0), ValueError, "eps must be"),
        (lambda _: td.ProportionalSampler(9, max_priority_within_buffer=True), NotImplementedError, "largest"),
        (lambda _: td.ProportionalSampler(9, alpha=nan), ValueError, "alpha must be greater or equal to 0, and finite"),
        (lambda _: td.ProportionalSampler(9, weight_norm="rows"), ValueError, "must be 'buffer', 'batch' or None, got"),
        (lambda _: td.ProportionalSampler(9, reduction="sum"), ValueError, "reduction must be"),
        (lambda _: td.ProportionalSampler(9, min_priority=nan), ValueError, "min_priority must be greater or equal to"),
        (lambda _: td.ProportionalSampler(9, dtype=torch.int64), ValueError, "must be torch.float32 or torch.float64"),
        (lambda _: td.RankSampler(9, beta=-0.1), ValueError, "beta must be greater or equal to 0, and finite"),
        (lambda _: fresh(sampler=td.ProportionalSampler(30, device="cuda:0")), ValueError, "on the device of the rows"),
    ],
    **{("ProportionalSampler, RankSampler", make): [
        *((lambda rb, value=value: setattr(rb.sampler, "alpha", value), ValueError, "alpha must be greater or equal to")
          for value in (-0.1, nan, torch.inf)),
        (lambda rb: setattr(rb.sampler, "beta", -0.1), ValueError, "beta must be greater or equal to 0, and finite"),
        *((lambda rb, index=index, td_error=td_error: rb.sampler.update_priority(index, td_error, storage=rb.storage),
           error, word) for index, td_error, error, word in [
            (torch.arange(3), tensor([1.0, nan, torch.inf]), ValueError, "2 of 3 TD errors .*1, 2"),
            (torch.arange(3), ones(2), ValueError, "2 priorities .* for 3 rows"),
            (tensor([0, 20]), ones(2), IndexError, "row 20 is out of range: 20 rows can have a priority"),
            (tensor([0.0, 1.0]), ones(2), TypeError, "row indices must be integers"),
            (torch.arange(2), ones(2, dtype=torch.complex64), TypeError, "must be real numbers"),
            (ones(2, 2).long(), ones(2), ValueError, r"it must be flat, or of shape \[B, 1\]"),
        ]),
        (lambda rb: rb.sampler.priority([-1]), IndexError, "rows are 0 to 29"),
        (lambda rb: rb.sampler.probability([30]), IndexError, "rows are 0 to 29"),
        (lambda rb: rb.sampler.priority(freed(torch.arange(9))), (RuntimeError, ValueError), "no memory"),
        (lambda rb: rb.sampler.load_state_dict(type(rb.sampler)(29).state_dict()), ValueError, "max_capacity=29, this"),
        (lambda rb: fresh(sampler=rb.sampler).sample(), ValueError, "serves another storage.*use one sampler per"),
        (lambda rb: rb.sampler.sample(storage(), 2), ValueError, "serves another storage.*use one sampler per buffer"),
    ] for make in (prioritized, ranked)},
    ("RankSampler.segments", ranked): [
        (lambda rb: rb.sampler.segments(0), ValueError, "at least 1 segment, got k=0"),
    ],
    ("RankSampler.sample, drawn", lambda: td.RankSampler(4)): [
        (lambda sampler: sampler.sample(storage(), 2), RuntimeError, "no row has a priority"),
    ],
    ("ProportionalSampler without weights, drawn", weightless): [
        (lambda rb: rb.sample(), RuntimeError, "no row has a positive priority"),
    ],
    ("RowSampler.draw, drawn", nothing): [
        *((lambda _, rows=rows, wrap=wrap: filled(wrap(Fixed(rows)), batch_size=2).sample(), error, word)
          for wrap in (lambda inner: inner, n_step) for rows, error, word in [
            (tensor([0, 1]).int(), TypeError, r"got torch.int32 of shape \[2\]: return rows.to\(torch.int64"),
            (tensor([[0], [1]]), TypeError, r"draw\(\) of Fixed must return .* \[B\] int64, .* got .* \[2, 1\]"),
            (np.arange(2), TypeError, "must return a tensor of rows, .*got ndarray"),
            ((tensor([0, 1]), None), TypeError, r"got a tuple \(Tensor, NoneType\): return torch.as_tensor\(rows\)"),
            (tensor([0, 99]), IndexError, "row 99 .* rows 0 to 19 have been written"),
        ]),
    ],
    ("RowSampler", nothing): [
        (lambda _: Fixed(3).load_state_dict({"level": 0.1}), ValueError, "the state is not that of a Fixed"),
        (lambda _: filled(Fixed(3), steps(9, mark=zeros(9))), SchemaError, "an entry 'mark', and a Fixed adds an"),
    ],
    ("wrappers in the wrong order", nothing): [
        *((lambda _, outer=outer, inner=inner: outer(inner(td.UniformSampler())), TypeError,
           r"cannot wrap a .*SequenceSampler\(NStepSampler\(HindsightSampler") for outer, inner in [
            (hindsight, hindsight), (hindsight, n_step), (hindsight, sequence), (n_step, n_step), (n_step, sequence),
            (sequence, sequence)]),
        (lambda _: sequence(hindsight(), across_episodes=True), TypeError, "combined with a HindsightSampler"),
        *((lambda _, inner=inner: td.EpisodeSampler(inner()), TypeError,
           r"uniformly or by length, not by a .*: wrap a UniformSampler, or ") for inner in (
            lambda: td.ProportionalSampler(9), lambda: PrioritizedSampler(9, 0.6, 0.4), td.RecencySampler,
            td.MinibatchSampler, lambda: Fixed(3),
            lambda: td.UniformSampler(unique=True), lambda: td.UniformSampler(max_age=8))),
        (lambda _: td.EpisodeSampler(sequence()), TypeError, "EpisodeSampler cannot wrap a SequenceSampler"),
    ],
    ("wrappers, of attributes", lambda: sequence(n_step(hindsight(td.ProportionalSampler(40))))): [
        (lambda sampler: sampler.no_such_thing, AttributeError, "no_such_thing"),
        (lambda sampler: setattr(sampler, "n_steps", 4), AttributeError, "set sampler.n_steps of this Seq"),
        (lambda sampler: setattr(sampler, "length", 6), AttributeError, "length is fixed when a SequenceSampler is"),
        *((lambda sampler, of=of, name=name, x=x: setattr(attrgetter(of)(sampler), name, x), ValueError, word)
          for of, name, x, word in (
            ("sampler", "n_steps", 4.5, "n_steps must be a whole number, at least 1"),
            ("innermost", "weight_norm", "rows", "must be 'buffer', 'batch' or None, got"),
            ("sampler.sampler", "future_gamma", 1.1, "future_gamma must be between 0 and 1"),
            ("sampler.sampler", "her_ratio", 1.5, "her_ratio must be between 0 and 1, got"))),
    ],
    ("HindsightSampler", nothing): [
        (lambda _: hindsight(her_ratio=-0.1), ValueError, "her_ratio must be between 0 and 1, got -0.1"),
        (lambda _: hindsight(strategy="past"), ValueError, "must be one of future, final, episode, random, got 'past'"),
        *((lambda _, strategy=strategy: hindsight(strategy=strategy), ValueError, "at least 0 and add up to 1")
          for strategy in ({"future": 0.5}, {"future": 1.5, "final": -0.5}, {"future": None})),
        (lambda _: td.HindsightSampler(None, reward_fn), TypeError, "HindsightSampler wraps a sampler, got NoneType"),
    ],
    **{("HindsightSampler, drawn", make): [(lambda rb: rb.sample(), error, word)] for make, error, word in [
        (lambda: goals({"desired_goal": None}), KeyError, "hindsight needs 'desired_goal', which is not stored"),
        (lambda: goals({("next", "achieved_goal"): None}), KeyError, "achieved_goal.*not stored"),
        (lambda: goals({("next", "reward"): None}), KeyError, "reward.*not stored: .*reward_key"),
        (lambda: goals({("next", "done"): None, ("next", "terminated"): None}), KeyError, "no row marks the end of a"),
        (lambda: goals({("next", "terminated"): None}, terminated_fn=reward_fn), KeyError, "terminated.*not stored"),
        (lambda: goals({"desired_goal": zeros(20, 3)}), ValueError, r"shape \(3,\), but .*shape \(2,\): goals and"),
        (lambda: goals({"desired_goal": zeros(20, 2).double()}), ValueError, "float64.*float32.*must have equal"),
        (lambda: goals({}, lambda batch: zeros(3)), ValueError, r"one reward per row, of shape \(4, 1\) or \[4\], got"),
        (lambda: goals({}, lambda batch: zeros(4, 1, device="meta")), NotImplementedError, "meta tensor"),
        (lambda: goals({}, lambda batch: full((4,), nan)), ValueError, "returned NaN for relabelled rows, the first"),
        (lambda: goals({}, lambda batch: full((4,), 2**24 + 1)), SchemaError, "'reward' is 16777217, .*: store"),
    ]},
    ("NStepSampler", nothing): [
        (lambda _: td.NStepSampler(td.UniformSampler(), 1.5, 0.9), ValueError, "n_steps must be a whole number, at"),
        (lambda _: td.NStepSampler(td.UniformSampler(), 3, 1.1), ValueError, "gamma must be between 0 and 1, got"),
        (lambda _: td.NStepSampler(td.UniformSampler(), 3, 0.9, reward_key="reward"), ValueError, "must be in 'next'"),
    ],
    **{("NStepSampler, drawn", make): [(lambda rb: rb.sample(), error, word)] for make, error, word in [
        (lambda: filled(n_step(), steps(20).exclude(REWARD)), KeyError, "n-step returns need .*reward"),
        (lambda: filled(n_step(), steps(20).exclude(*ENDS)), KeyError, "no row marks the end of a trajectory"),
        (lambda: filled(n_step(), entry(REWARD, zeros(20, 1).long())), TypeError, "got torch.int64"),
        (lambda: filled(n_step(), entry(("next", "done"), zeros(20, 1))), TypeError, "must be bool, got float32"),
    ]},
    ("SequenceSampler", nothing): [
        (lambda _: sequence(length=0), ValueError, "length must be a whole number, at least 1, got 0"),
        (lambda _: sequence(burn_in=-1), ValueError, "burn_in must be a whole number, at least 0, got -1"),
        (lambda _: sequence(boundary="cut"), ValueError, "boundary must be 'pad', 'shift' or 'strict', got 'cut'"),
        (lambda _: sequence(priority="min"), ValueError, "priority must be 'max' or 'mix', got 'min'"),
        (lambda _: sequence(eta=1.5), ValueError, r"eta must be between 0 and 1, got 1\.5"),
        (lambda _: sequence(output_layout="time"), ValueError, "output_layout must be"),
        *((lambda _, stride=stride: sequence(td.MinibatchSampler(), stride=stride), (TypeError, ValueError),
           "stride must be a whole number, at least 1, got") for stride in (0, 1.5, True)),
        (lambda _: sequence(td.MinibatchSampler(), stride=4), ValueError, "stride=4 leaves out rows .* a stride from"),
        *((lambda _, boundary=boundary: sequence(td.MinibatchSampler(), stride=3, boundary=boundary), ValueError,
           'stride needs boundary="pad": boundary=".*" would move or replace') for boundary in ("shift", "strict")),
        *((lambda _, inner=inner: sequence(inner(), stride=3), TypeError,
           "stride needs a sampler that draws each window once .*use a MinibatchSampler") for inner in (
            td.UniformSampler, SamplerWithoutReplacement, lambda: n_step(hindsight(SamplerWithoutReplacement())))),
    ],
    ("SequenceSampler", lambda: windows(td.ProportionalSampler(30), burn_in=1)): [
        (lambda rb: rb.sample(6), ValueError, r"of burn_in \+ length = 1 \+ 3 = 4, got 6; for 32 sequences use 128"),
        (lambda rb: rb.update_tensordict_priority(rb.batch[:7]), ValueError, "7 TD errors are not whole windows of 4"),
        *((update(td_error=spoil(ones(8))), RuntimeError, "no memory") for spoil in (freed, shrunk)),
        (update(mask=None), KeyError, "needs its 'mask', 'burn_in_mask' and 'anchor_index'"),
        (update(td_error=full((8,), nan)), ValueError, "NaN"),
    ],
    ("SequenceSampler, strides", lambda: windows(td.MinibatchSampler(), stride=3, batch_size=6)): [
        (lambda rb: setattr(rb.sampler, "stride", 2), AttributeError, "stride is fixed"),
        (lambda rb: rb.sample(7), ValueError, "batch_size must be a multiple of length=3, got 7; for 32"),
    ],
    ("SequenceSampler, drawn", lambda: filled(sequence(length=30, boundary="strict"), batch_size=30)): [
        (lambda rb: rb.sample(), RuntimeError, "hardly any anchor had a window of 30 rows within its trajectory: use"),
    ],
    ("SequenceSampler, all windows", lambda: filled(sequence(td.MinibatchSampler(drop_last=True), stride=3))): [
        (lambda rb: rb.sample(30), ValueError, "drop_last leaves no batch: 7 windows are fewer than .* size 10"),
    ],
    ("SequenceSampler, batch_time, drawn", lambda: filled(
        sequence(output_layout="batch_time", slice_end_key=("next", "done")), batch_size=6)): [
        (lambda rb: rb.sample(), SchemaError, "the rows have an entry .*done.*: choose another slice_end_key"),
    ],
    ("EpisodeSampler", nothing): [
        *((lambda _, wrong=wrong: td.EpisodeSampler(**wrong), ValueError, next(iter(wrong))) for wrong in (
            {"max_length": 0}, {"max_length": 2.5}, {"by": "rows"}, {"layout": "packed"}, {"gamma": 1.5})),
        (lambda _: td.EpisodeSampler(n_step(), gamma=0.9), ValueError, "a NStepSampler may change the rewards"),
    ],
    ("EpisodeSampler, drawn", lambda: filled(td.EpisodeSampler())): [
        (lambda rb: rb.sample(), RuntimeError, "no complete episode: write until one ends, or use finished_only=False"),
        (lambda rb: rb.sample(wait=True, timeout=0.01), TimeoutError, "waited for .*: EpisodeSampler cannot draw"),
    ],
    ("EpisodeSampler, drawn", lambda: filled(td.EpisodeSampler(gamma=0.9), episodes().exclude(("next", "reward")))): [
        (lambda rb: rb.sample(), KeyError, "returns to go need"),
    ],
    ("wrappers over another storage", nothing): [
        *((lambda _, make=make: theirs(make(), steps(9), LazyTensorStorage(30)).sample(), TypeError,
           "a [A-Z].*Sampler looks up episodes and needs a PackedStorage, got a LazyTensorStorage: use")
          for make in IN_TIME_ORDER[1:]),
    ],
    ("samplers in time order", nothing): [
        *((lambda _, make=make, writer=writer: filled(make(), writer=writer()).sample(), ValueError,
           "in time order, a .*Writer keeps none")
          for make in IN_TIME_ORDER for writer in (td.ReservoirWriter, lambda: TensorDictMaxValueWriter("action"))),
        (lambda _: filled(IN_TIME_ORDER[0](), storage=LazyTensorStorage(30), writer=TensorDictMaxValueWriter("action")),
         ValueError, "in time order, a TensorDictMaxValueWriter keeps none"),
    ],
    **{("entries that samplers add", lambda make=make: fresh(sampler=make())): [
        (lambda rb, name=name: rb.extend(steps(4).set(name, zeros(4))), SchemaError,
         f"have an entry '{name}', and a .*Sampler adds .* another name"),
        (lambda rb, name=name: rb.add(steps().set(name, zeros(()))), SchemaError, f"have an entry '{name}'"),
        (lambda rb, name=name: rb.extend(steps(4, **{name: TensorDict({"x": zeros(4)}, [4])})), SchemaError, name),
    ] for name, make in REPORTS.items()},
    ("entries that samplers add, stored", lambda: filled(rows=steps(20, mask=zeros(20)))): [
        (lambda rb: rb.set_sampler(sequence()), SchemaError, "have an entry 'mask'"),
        (lambda rb: filled(sequence(), episodes()).set_storage(rb.storage), SchemaError, "have an entry 'mask'"),
        (lambda rb: td.ReplayBuffer.from_schema(rb[0], 9, sampler=sequence()), SchemaError, "have an entry 'mask'"),
    ],
    ("entries that samplers add, loaded", lambda: fresh(sampler=sequence())): [
        (loads(lambda: filled(rows=steps(20, mask=zeros(20))), rows_only=True), td.CheckpointError, "an entry 'mask'"),
        (lambda rb: rb.storage.load_state_dict(with_mask().state_dict()), SchemaError, "have an entry 'mask'"),
        (lambda rb: rb.extend(steps(4, index=zeros(4))), SchemaError, "'index', and each batch has the positions"),
        (lambda rb: rb.extend(steps(4, index=zeros(4).long())), SchemaError, r"leave it out, data.exclude\('index'\)"),
        (lambda rb: rb.add(steps(1, index=zeros(1).long())[0]), SchemaError, r"rename_key_\('index', 'my_index'\)"),
        (lambda rb: rb.storage.reserve(steps(index=tensor(3))), SchemaError, "the data has an entry 'index'"),
    ],
    ("entries that samplers add, of TorchRL's, drawn", nothing): [
        (lambda _: theirs(sequence(), steps(20, mask=zeros(20))).sample(), SchemaError, "have an entry 'mask'"),
        (lambda _: theirs(n_step(), steps(4, 5)).sample(), SchemaError, r"holds \[5\] steps: make the storage with"),
    ],
    ("samplers of trajectories", lambda: fresh(sampler=n_step())): [
        (lambda rb: rb.extend(steps(4, 5)), SchemaError, r"\[4, 5\] holds \[5\] steps: make the storage with ndim=2"),
    ],
}  # fmt: skip
