"""A sampler of one's own, written as CONTRIBUTING.md says, and all that it can do from
then on; wrappers around samplers of all kinds."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torchrl.data.replay_buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    Sequence,
    Storage,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReplayBufferMixture,
    RowSampler,
    SequenceSampler,
    UniformSampler,
)
from tests.catalogue import buffer_of, numbered_rows
from tests.model import World, reward_fn


class Marked(RowSampler):
    """Draws the first rows, and keeps a state of several kinds."""

    state_keys = "numbers", "level", "names"
    report_keys = frozenset({"mark"})

    def __init__(self) -> None:
        self.numbers, self.level, self.names = torch.zeros(2), 0.5, ["a"]

    def draw(
        self, storage: Storage, batch_size: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        return torch.arange(batch_size), {"mark": torch.ones(batch_size, 2)}

    def _empty(self) -> None:
        self.level = 0.0


@pytest.mark.parametrize(
    ("cls", "storage"),
    [
        (ReplayBuffer, PackedStorage),
        (TensorDictReplayBuffer, PackedStorage),
        (TensorDictReplayBuffer, LazyTensorStorage),
    ],
)
@pytest.mark.parametrize("lanes", [0, 2])
def test_batches_have_what_it_reports_and_it_is_told_when_all_rows_are_gone(
    cls, storage, lanes
):
    rows = numbered_rows(8, lanes=lanes)
    rb = buffer_of(20, Marked(), lanes, storage, cls, rows=rows, batch_size=3)
    assert torch.equal(rb.sample()["mark"], torch.ones(3, 2))
    rb.empty()
    assert rb.sampler.level == 0.0


def test_its_state_is_a_copy_of_what_it_names(tmp_path):
    one = Marked()
    state = one.state_dict()
    one.numbers += 1
    one.level, one.names = 0.75, ["b", "c"]
    assert state["numbers"].tolist() == [0, 0]
    assert (state["level"], state["names"]) == (0.5, ["a"])
    one.dumps(tmp_path)
    loaded, copied, unpickled = Marked(), Marked(), pickle.loads(pickle.dumps(one))
    loaded.loads(tmp_path)
    saved = one.state_dict()
    copied.load_state_dict(saved)
    saved["numbers"] += 1
    shown = "Marked(numbers=tensor([1., 1.]), level=0.75, names=['b', 'c'])"
    assert {repr(other) for other in (one, loaded, copied, unpickled)} == {shown}


class RevisesFlags(UniformSampler):
    """Reports entries that it does not announce, as TorchRL's SliceSampler does."""

    def draw(self, storage, batch_size: int):
        flat, info = super().draw(storage, batch_size)
        ends = torch.ones(batch_size, 1, dtype=torch.bool)
        return flat, info | {"chosen_by": flat, ("next", "done"): ends}


def test_batches_without_the_report_have_the_keys_of_the_rows_and_revised_flags():
    rows = numbered_rows(8)
    rb = buffer_of(8, RevisesFlags(), rows=rows, batch_size=5, include_info=False)
    batch = rb.sample()
    assert batch["next", "done"].all()
    assert set(batch.keys()) == set(rows.keys())


class KeepsItsRows(RowSampler):
    """Draws every second row to a tensor that it keeps, as a view with a stride, and
    more rows than wanted."""

    def __init__(self, extra: int = 0) -> None:
        self.rows, self.extra = torch.zeros(400, dtype=torch.int64), extra

    def draw(
        self, storage: Storage, batch_size: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        self.rows += 1
        rows = self.rows[::50]
        if self.extra:
            rows = (self.rows + torch.arange(400))[::2][: batch_size + self.extra]
        return rows, {"score": 2 * rows}


@pytest.mark.parametrize(
    "wrap", [lambda inner: inner, lambda inner: NStepSampler(inner, 2, 0.9)]
)
def test_rows_in_a_strided_tensor_that_the_sampler_keeps(wrap):
    rb = buffer_of(20, wrap(KeepsItsRows()), 2, rows=numbered_rows(20, lanes=2))
    batches = [rb.sample(8) for _ in range(3)]
    for number, batch in enumerate(batches, 1):
        assert batch["x"].tolist() == [number // 2 + 1_000 * (number % 2)] * 8
        assert batch["index"].tolist() == [[number // 2, number % 2]] * 8


def test_a_mixture_has_room_for_all_rows_and_entries_of_a_members_sampler():
    members = {
        "one": buffer_of(600, KeepsItsRows(extra=100), rows=numbered_rows(600)),
        "other": buffer_of(600, KeepsItsRows(extra=1), rows=numbered_rows(600)),
    }
    mixed = ReplayBufferMixture(members, {"one": 0.5, "other": 0.5}, batch_size=8)
    batch = mixed.sample()
    assert len(batch) == 104 + 5
    assert batch["x"].tolist() == [*range(1, 209, 2), *range(1, 11, 2)]
    assert torch.equal(batch["score"], 2 * batch["index"])


# -- wrappers


WRAPPERS = {
    "hindsight": lambda inner: HindsightSampler(inner, reward_fn),
    "n-step": lambda inner: NStepSampler(inner, 3, 0.9),
    "sequence": lambda inner: SequenceSampler(inner, 3, burn_in=1),
    "all": lambda inner: SequenceSampler(
        NStepSampler(HindsightSampler(inner, reward_fn), 3, 0.9), 3, burn_in=1
    ),
}
wrapped = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
both = pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])


def world(sampler, cls=ReplayBuffer, batch_size: int = 24, **kwargs) -> World:
    return World.of(sampler, 20, 2, 1.5, buffer=cls, batch_size=batch_size, **kwargs)


@wrapped
def test_alpha_and_beta_of_the_wrapped_sampler_are_those_of_the_wrapper(wrap):
    for inner in (ProportionalSampler(40, 0.7, 0.4), RankSampler(40, 0.7, 0.4)):
        wrapper = wrap(inner)
        # TorchRL's buffers pass priorities to this class only
        assert isinstance(wrapper, PrioritizedSampler)
        wrapper.alpha, wrapper.beta = 0.5, 0.9  # as TorchRL's schedulers do
        assert (inner.alpha, inner.beta) == (wrapper.alpha, wrapper.beta) == (0.5, 0.9)
        assert wrapper.innermost is inner
    assert not hasattr(wrap(UniformSampler()), "alpha")


def test_a_scheduler_of_the_buffer_reaches_alpha_and_beta_and_of_a_sampler_its_settings():
    rb = world(WRAPPERS["all"](ProportionalSampler(40, 0.7, 0.4))).rb
    sequence, n_step, hindsight = (
        rb.sampler,
        rb.sampler.sampler,
        rb.sampler.sampler.sampler,
    )
    targets = {
        "beta": (rb, sequence.innermost),
        "alpha": (rb, sequence.innermost),
        "eta": (rb, sequence),
        "gamma": (n_step, n_step),
        "her_ratio": (hindsight, hindsight),
    }
    for name, (target, owner) in targets.items():
        LinearScheduler(target, name, 0.5, 1).step()
        assert getattr(owner, name) == 0.5, name
    with pytest.raises(ValueError, match="does not have an attribute her_ratio"):
        LinearScheduler(rb, "her_ratio", 0.5, 1)


def test_a_wrapper_leaves_the_attributes_of_a_users_sampler_alone():
    class Named(UniformSampler):
        strategy = length = reward_key = finished_only = by = "mine"
        n_steps = 7

        def reward_fn(self) -> str:
            return "mine"

    inner = Named()
    before = vars(inner).copy()
    for wrap in WRAPPERS.values():
        wrapper = wrap(inner)
        assert vars(inner) == before
        assert inner.reward_fn() == inner.strategy == inner.length == "mine"
        assert wrapper.innermost is inner
    assert NStepSampler(inner, 3, 0.9).n_steps == 3


@both
@wrapped
def test_over_a_sampler_without_priorities_updates_do_nothing(wrap, cls):
    rb = world(wrap(UniformSampler()), cls).rb
    batch = rb.sample()
    rb.update_tensordict_priority(batch)
    batch["td_error"] = torch.rand(24, 1)
    rb.update_tensordict_priority(batch)
    rb.update_priority(batch["index"], batch["td_error"])
    single = cls(storage=PackedStorage(4), sampler=wrap(UniformSampler()))
    # TorchRL's buffer sets priorities with each write
    single.add(rb.storage[0][0].clone())
    assert not hasattr(rb.sampler, "priority")


@both
@wrapped
def test_td_errors_that_come_with_the_data_count(wrap, cls):
    inner = ProportionalSampler(40)
    rows = numbered_rows(5, lanes=2)
    rows["td_error"] = torch.arange(10.0).view(5, 2).T
    buffer_of(20, wrap(inner), 2, cls=cls, rows=rows)
    assert inner.priority(torch.arange(10)).tolist() == list(range(10))


@wrapped
def test_transforms_see_what_was_revised(wrap):
    made = world(
        wrap(UniformSampler()),
        transform=lambda batch: batch.set("seen", batch["next", "reward"] * 10),
    )
    batch = made.rb.sample()
    assert torch.equal(batch["seen"], batch["next", "reward"] * 10)


@both
def test_a_wrapped_sampler_of_torchrls_that_runs_out_gives_every_row_once_an_epoch(cls):
    inner = SamplerWithoutReplacement(drop_last=True)
    made = world(NStepSampler(inner, 3, 0.9), cls, batch_size=8)
    seen = [made.rb.sample()["index"] for _ in range(5)]
    flat = torch.cat(seen) @ torch.tensor([2, 1])
    assert sorted(flat.tolist()) == list(range(40))


def test_the_representation_shows_every_wrapped_sampler():
    sampler = WRAPPERS["all"](ProportionalSampler(40, weight_norm="batch"))
    assert repr(sampler).startswith(
        "SequenceSampler(NStepSampler(HindsightSampler(ProportionalSampler(alpha=0.6"
    )
    assert "her_ratio=0.8" in repr(sampler)
    assert sampler.innermost.weight_norm == "batch"
    assert not hasattr(sampler, "weight_norm")


@both
@wrapped
def test_a_wrapper_that_moves_to_another_buffer_reads_the_rows_of_that_one(cls, wrap):
    sampler = wrap(UniformSampler())
    made, other = world(sampler, cls), world(UniformSampler(), cls)
    made.rb.sample()
    other.extend(7)
    moved, fresh = other.rb.storage, wrap(UniformSampler())
    torch.manual_seed(0)
    _, report = sampler.sample(moved, 24)
    torch.manual_seed(0)
    _, wanted = fresh.sample(moved, 24)
    assert report.keys() == wanted.keys()
    assert all(torch.equal(report[key], wanted[key]) for key in wanted)


# -- TorchRL's sequence unit over our storage


@pytest.mark.parametrize(
    ("cls", "lanes", "fill"),
    [(ReplayBuffer, 0, 2.4), (ReplayBuffer, 2, 0.6), (TensorDictReplayBuffer, 2, 1.0)],
)
@pytest.mark.parametrize("sampler", [RandomSampler, lambda: ProportionalSampler(60)])
def test_torchrls_sequence_unit_never_crosses_an_end_a_lane_or_the_write_head(
    sampler, cls, lanes, fill
):
    unit = Sequence(length=4)
    made = World.of(
        sampler(), 30, lanes, fill, buffer=cls, batch_size=24, sample_unit=unit
    )
    for rows in made.rb.sample().view(24, 4):
        stored = made.rows_at(rows["index"])
        pairs = zip(stored, rows["validity_mask"].tolist(), strict=True)
        assert [row for row, is_real in pairs if is_real] == [
            *made.model.later(stored[0])
        ][:4]
        seen = [row.fields["observation",] for row in stored]
        assert rows["observation"].tolist() == seen
