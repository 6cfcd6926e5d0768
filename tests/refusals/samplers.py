"""What samplers refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import (
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)

from tests.catalogue import SAMPLERS, reward_fn
from tests.refusals.makers import *


def weightless():
    rb = buffer(td.ProportionalSampler(30, alpha=1.0, eps=0.0))
    rb.update_priority(torch.arange(20), zeros(20))
    return rb


def of_no_rows(make, form: dict[str, Any], is_new: bool):
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

    def __init__(self, rows) -> None:
        self.rows = rows

    def draw(self, storage, batch_size: int):
        return self.rows, {}


def episodes() -> TensorDict:
    """Return 20 steps of two episodes."""
    return entry(("next", "done"), (torch.arange(20) % 10 == 9)[:, None])


def goals(changes: dict[Any, Any], fn=reward_fn, **options):
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


def with_mask():
    made = td.PackedStorage(30)
    made.set(range(4), steps(4, mask=zeros(4)))
    return made


def written_by(make, writer):
    return filled(make(), writer=writer())


IN_TIME_ORDER: list[Callable[[], Any]] = [
    lambda: td.RecencySampler(2.0), n_step, sequence, hindsight, lambda: td.UniformSampler(max_age=1),
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
FORMS: list[tuple[dict[str, Any], bool]] = [
    ({}, True), ({}, False), ({"ndim": 2}, False), ({"ndim": 2, "lanes": 3}, True)
]  # fmt: skip
NOT_FINITE = tensor([1.0, nan, torch.inf])
NEEDS_OURS = (
    "TypeError: a [A-Z].*Sampler looks up episodes and needs a PackedStorage, got a La"
)
HAVE_MASK = "SchemaError: have an entry 'mask'"

REFUSALS: Table = {
    ("UniformSampler, unique", lambda: buffer(td.UniformSampler(unique=True))): [
        (lambda rb: rb.sample(21), "ValueError: cannot draw 21 distinct rows of 20"),
    ],
    ("UniformSampler, unique and young", lambda: buffer(td.UniformSampler(unique=True, max_age=5))): [
        (lambda rb: rb.sample(7), "ValueError: cannot draw 7 distinct rows of 6"),
    ],
    ("MinibatchSampler", lambda: filled(td.MinibatchSampler(drop_last=True))): [
        (lambda rb: rb.sample(0), "ValueError: batch_size must be at least 1, got 0"),
        (lambda rb: rb.sample(21), "ValueError: drop_last leaves no batch: 20 rows are fewer than the batch size 21"),
    ],
    ("RecencySampler", lambda: buffer(td.RecencySampler(3.0, 4))): each(
        lambda rb, wrong: rb.sampler.load_state_dict(rb.sampler.state_dict() | wrong),
        ({"half_life": 0.0}, "ValueError: half_life"), ({"window": 0.5}, "ValueError: window must")),
    ("samplers of no rows", nothing): [
        *each(lambda _, make: make().sample(), *(
            (partial(of_no_rows, make, *form), "RuntimeError: Cannot sample from an empty storage: extend the buff")
            for make in SAMPLERS.values() for form in FORMS)),
    ],
    **{("ProportionalSampler, RankSampler", make): [
        *each(lambda rb, value: setattr(rb.sampler, "alpha", value), *(
            (value, "ValueError: alpha must be greater or equal to") for value in (-0.1, nan, torch.inf))),
        (lambda rb: setattr(rb.sampler, "beta", -0.1), "ValueError: beta must be greater or equal to 0, and finite"),
        *each(lambda rb, update: rb.sampler.update_priority(*update, storage=rb.storage),
              ((torch.arange(3), NOT_FINITE), "ValueError: 2 of 3 TD errors .*1, 2"),
              ((torch.arange(3), ones(2)), "ValueError: 2 priorities .* for 3 rows"),
              ((tensor([0, 20]), ones(2)), "IndexError: row 20 is out of range: 20 rows can have a priority"),
              ((tensor([0.0, 1.0]), ones(2)), "TypeError: row indices must be integers"),
              ((steps(2), ones(2)), r"TypeError: got a TensorDict: pass those of the batch, batch\['index'\]"),
              ((torch.arange(2), ones(2) * 1j), "TypeError: must be real numbers"),
              ((ones(2, 2).long(), ones(2)), r"ValueError: it must be flat, or of shape \[B, 1\]")),
        (lambda rb: rb.sampler.priority([-1]), "IndexError: rows are 0 to 29"),
        (lambda rb: rb.sampler.probability([30]), "IndexError: rows are 0 to 29"),
        (lambda rb: rb.sampler.priority(freed(torch.arange(9))), "RuntimeError|ValueError: no memory"),
        (lambda rb: rb.sampler.load_state_dict(type(rb.sampler)(29).state_dict()), "ValueError: max_capacity=29, this"),
        (lambda rb: rb.sampler.load_state_dict({}), "ValueError: the state is not that of a"),
        (lambda rb: fresh(sampler=rb.sampler).sample(), "ValueError: serves another storage.*use one sampler per"),
        (lambda rb: rb.sampler.sample(storage(), 2), "ValueError: serves another storage.*use one sampler per buffer"),
    ] for make in (prioritized, ranked)},
    ("RankSampler.segments", ranked): [
        (lambda rb: rb.sampler.segments(0), "ValueError: at least 1 segment, got k=0"),
        (lambda rb: rb.sampler.rank([30]), "IndexError: rows are 0 to 29"),
    ],
    ("RankSampler.sample, drawn", lambda: td.RankSampler(4)): [
        (lambda sampler: sampler.sample(storage(), 2), "RuntimeError: no row has a priority"),
    ],
    **sampling("ProportionalSampler without weights", (weightless, "RuntimeError: no row has a positive priority")),
    ("RowSampler.draw, drawn", nothing): [row for wrap in (lambda inner: inner, n_step) for row in each(
        lambda _, rows, wrap=wrap: filled(wrap(Fixed(rows)), batch_size=2).sample(),
        (tensor([0, 1]).int(), r"TypeError: got torch.int32 of shape \[2\]: return rows.to\(torch.int64"),
        (tensor([[0], [1]]), r"TypeError: draw\(\) of Fixed must return .* \[B\] int64, .* got .* \[2, 1\]"),
        (np.arange(2), "TypeError: must return a tensor of rows, .*got ndarray"),
        ((tensor([0, 1]), None), r"TypeError: got a tuple \(Tensor, NoneType\): return torch.as_tensor\(rows\)"),
        (tensor([0, 99]), "IndexError: row 99 .* rows 0 to 19 have been written"))],
    ("RowSampler", nothing): [
        (lambda _: Fixed(3).load_state_dict({"level": 0.1}), "ValueError: the state is not that of a Fixed"),
        (lambda _: filled(Fixed(3), steps(9, mark=zeros(9))), "SchemaError: an entry 'mark', and a Fixed adds an"),
        (lambda _: td.EpisodeSampler(Fixed(3)), "TypeError: uniformly or by length, not by a .*: wrap a UniformSamp"),
    ],
    ("wrappers, of attributes", lambda: sequence(n_step(hindsight(td.ProportionalSampler(40))))): [
        (lambda sampler: sampler.no_such_thing, "AttributeError: no_such_thing"),
        (lambda sampler: setattr(sampler.sampler, "n_steps", 4.5),
         "ValueError: n_steps must be a whole number, at least 1"),
        (lambda sampler: setattr(sampler.innermost, "weight_norm", "rows"),
         "ValueError: must be 'buffer', 'batch' or None, got"),
        *each(lambda sampler, setting: setattr(sampler.sampler.sampler, setting, 1.5), *(
            (setting, f"ValueError: {setting} must be between 0 and 1") for setting in ("future_gamma", "her_ratio"))),
        (lambda sampler: setattr(sampler, "n_steps", 4), "AttributeError: set sampler.n_steps of this Seq"),
        (lambda sampler: setattr(sampler, "her_ratio", 1), "AttributeError: set sampler.sampler.her_ratio of this"),
        (lambda sampler: setattr(sampler, "length", 6), "AttributeError: length is fixed when a SequenceSampler is"),
    ],
    **sampling("HindsightSampler",
        (lambda: goals({"desired_goal": None}), "KeyError: hindsight needs 'desired_goal', which is not stored"),
        (lambda: goals({("next", "achieved_goal"): None}), "KeyError: achieved_goal.*not stored"),
        (lambda: goals({("next", "reward"): None}), "KeyError: reward.*not stored: .*reward_key"),
        (lambda: goals({("next", "done"): None, ("next", "terminated"): None}), "KeyError: no row marks the end of a"),
        (lambda: goals({("next", "terminated"): None}, terminated_fn=reward_fn), "KeyError: terminated.*not stored"),
        (lambda: goals({"desired_goal": zeros(20, 3)}), r"ValueError: shape \(3,\), but .*shape \(2,\): goals and"),
        (lambda: goals({"desired_goal": zeros(20, 2).double()}), "ValueError: float64.*float32.*must have equal"),
        (lambda: goals({}, lambda batch: zeros(3)), r"ValueError: one reward per row, of shape \(4, 1\) or \[4\], got"),
        (lambda: goals({}, lambda batch: zeros(4, 1, device="meta")), "NotImplementedError: meta tensor"),
        (lambda: goals({}, lambda batch: full((4,), nan)), "ValueError: returned NaN for relabelled rows, the first"),
        (lambda: goals({}, lambda batch: full((4,), 2**24 + 1)), "SchemaError: 'reward' is 16777217, .*: store")),
    **sampling("NStepSampler",
        (lambda: filled(n_step(), steps(20).exclude(REWARD)), "KeyError: n-step returns need .*reward"),
        (lambda: filled(n_step(), steps(20).exclude(*ENDS)), "KeyError: no row marks the end of a trajectory"),
        (lambda: filled(n_step(), entry(REWARD, zeros(20, 1).long())), "TypeError: got torch.int64: .* reward.float"),
        (lambda: filled(n_step(), entry(("next", "done"), zeros(20, 1))), "TypeError: must be bool, got .* done.bool")),
    ("SequenceSampler", lambda: windows(td.ProportionalSampler(30), burn_in=1)): [
        (lambda rb: rb.sample(6), r"ValueError: of burn_in \+ length = 1 \+ 3 = 4, got 6; for 32 sequences use 128"),
        (lambda rb: rb.update_tensordict_priority(rb.batch[:7]), "ValueError: 7 TD errors are not whole windows of 4"),
        *each(lambda rb, entries: update(**entries)(rb),
              ({"td_error": freed(ones(8))}, "RuntimeError: no memory"),
              ({"td_error": shrunk(ones(8))}, "RuntimeError: no memory"),
              ({"mask": None}, "KeyError: needs its 'mask', 'burn_in_mask' and 'anchor_index'"),
              ({"td_error": full((8,), nan)}, "ValueError: NaN")),
    ],
    ("SequenceSampler, strides", lambda: windows(td.MinibatchSampler(), stride=3, batch_size=6)): [
        (lambda rb: setattr(rb.sampler, "stride", 2), "AttributeError: stride is fixed"),
        (lambda rb: rb.sample(7), "ValueError: batch_size must be a multiple of length=3, got 7; for 32"),
    ],
    ("SequenceSampler, all windows", lambda: filled(sequence(td.MinibatchSampler(drop_last=True), stride=3))): [
        (lambda rb: rb.sample(30), "ValueError: drop_last leaves no batch: 7 windows are fewer than .* size 10"),
    ],
    **sampling("SequenceSampler",
        (lambda: filled(sequence(length=30, boundary="strict"), batch_size=30),
         "RuntimeError: hardly any anchor had a window of 30 rows within its trajectory: use"),
        (lambda: filled(sequence(output_layout="batch_time", slice_end_key=("next", "done")), batch_size=6),
         "SchemaError: the rows have an entry .*done.*: choose another slice_end_key")),
    ("EpisodeSampler, drawn", lambda: filled(td.EpisodeSampler())): [
        (lambda rb: rb.sample(),
         "RuntimeError: no complete episode: write until one ends, or use finished_only=False"),
        (lambda rb: rb.sample(wait=True, timeout=0.01), "TimeoutError: waited for .*: EpisodeSampler cannot draw"),
    ],
    **sampling("EpisodeSampler with returns",
        (lambda: filled(td.EpisodeSampler(gamma=0.9), episodes().exclude(REWARD)),
         "KeyError: returns to go need")),
    ("samplers in time order", nothing): [
        *each(lambda _, make: theirs(make(), steps(9), LazyTensorStorage(30)).sample(), *(
            (make, NEEDS_OURS) for make in (n_step, sequence, hindsight))),
        *each(lambda _, make: make().sample(), *(
            (partial(written_by, make, writer), "ValueError: in time order, a .*Writer keeps none")
            for make in IN_TIME_ORDER
            for writer in (td.ReservoirWriter, lambda: TensorDictMaxValueWriter("action")))),
        (lambda _: filled(IN_TIME_ORDER[0](), storage=LazyTensorStorage(30), writer=TensorDictMaxValueWriter("action")),
         "ValueError: in time order, a TensorDictMaxValueWriter keeps none"),
    ],
    **{("entries that samplers add", lambda make=make: fresh(sampler=make())): [
        (lambda rb, name=name: rb.extend(steps(4).set(name, zeros(4))),
         f"SchemaError: have an entry '{name}', and a .*Sampler adds .* another name"),
        (lambda rb, name=name: rb.add(steps().set(name, zeros(()))), f"SchemaError: have an entry '{name}'"),
        (lambda rb, name=name: rb.extend(steps(4, **{name: TensorDict({"x": zeros(4)}, [4])})), f"SchemaError: {name}"),
    ] for name, make in REPORTS.items()},
    ("entries that samplers add, stored", lambda: filled(rows=steps(20, mask=zeros(20)))): everywhere(HAVE_MASK,
        lambda rb: rb.set_sampler(sequence()),
        lambda rb: filled(sequence(), episodes()).set_storage(rb.storage),
        lambda rb: td.ReplayBuffer.from_schema(rb[0], 9, sampler=sequence())),
    ("entries that samplers add, loaded", lambda: fresh(sampler=sequence())): [
        (loads(lambda: filled(rows=steps(20, mask=zeros(20))), rows_only=True), "CheckpointError: an entry 'mask'"),
        (lambda rb: rb.storage.load_state_dict(with_mask().state_dict()), HAVE_MASK),
        (lambda rb: rb.extend(steps(4, index=zeros(4))), "SchemaError: 'index', and each batch has the positions"),
        (lambda rb: rb.extend(steps(4, index=zeros(4).long())), r"SchemaError: leave it out, data.exclude\('index'\)"),
        (lambda rb: rb.add(steps(1, index=zeros(1).long())[0]), r"SchemaError: rename_key_\('index', 'my_index'\)"),
        (lambda rb: rb.storage.reserve(steps(index=tensor(3))), "SchemaError: the data has an entry 'index'"),
    ],
    ("entries that samplers add, of TorchRL's, drawn", nothing): [
        (lambda _: theirs(sequence(), steps(20, mask=zeros(20))).sample(), HAVE_MASK),
        (lambda _: theirs(n_step(), steps(4, 5)).sample(), r"SchemaError: holds \[5\] steps: make the storage with"),
    ],
    ("samplers of trajectories", lambda: fresh(sampler=n_step())): [
        (lambda rb: rb.extend(steps(4, 5)), r"SchemaError: \[4, 5\] holds \[5\] steps: make the storage with ndim=2"),
    ],
}  # fmt: skip
