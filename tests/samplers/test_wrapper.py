"""What every wrapper shares: it stands in for the sampler that it wraps, in either
library's buffer."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    Sequence,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from rlbuf_td import (
    HindsightSampler,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from tests.model import World, reward_fn

WRAPPERS = {
    "hindsight": lambda inner: HindsightSampler(inner, reward_fn),
    "n-step": lambda inner: NStepSampler(inner, 3, 0.9),
    "sequence": lambda inner: SequenceSampler(inner, 3, burn_in=1),
    "all": lambda inner: SequenceSampler(
        NStepSampler(HindsightSampler(inner, reward_fn), 3, 0.9), 3, burn_in=1
    ),
}
BUFFERS = [ReplayBuffer, TensorDictReplayBuffer]
wrapped = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
both = pytest.mark.parametrize("cls", BUFFERS)


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


def test_a_setting_of_a_wrapped_sampler_is_refused_where_it_would_do_nothing():
    sampler = WRAPPERS["all"](UniformSampler())
    owners = {
        "n_steps": "sampler",
        "gamma": "sampler",
        "her_ratio": "sampler.sampler",
        "unique": "sampler.sampler.sampler",
    }
    for name, path in owners.items():
        with pytest.raises(AttributeError, match=f"set {path}.{name} of this"):
            setattr(sampler, name, 1)
        assert not hasattr(sampler, name)
        setattr(attrgetter(path)(sampler), name, 1)  # what the error says


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
    made = world(wrap(inner), cls)
    data = made.rb.storage[:5].clone()
    data["td_error"] = torch.arange(10.0).view(5, 2)
    rb = cls(
        storage=PackedStorage(40, ndim=2),
        sampler=(sampler := ProportionalSampler(40)),
        dim_extend=0,
    )
    rb.set_sampler(wrap(sampler)) if cls is ReplayBuffer else None
    rb.extend(data)
    assert sampler.priority(torch.arange(10)).tolist() == list(range(10))


@wrapped
def test_transforms_see_what_was_revised(wrap):
    made = world(
        wrap(UniformSampler()),
        transform=lambda batch: batch.set("seen", batch["next", "reward"] * 10),
    )
    batch = made.rb.sample()
    assert torch.equal(batch["seen"], batch["next", "reward"] * 10)


@pytest.mark.parametrize(
    "inner",
    [
        lambda: MinibatchSampler(2, drop_last=True),
        lambda: SamplerWithoutReplacement(drop_last=True),
    ],
)
@both
def test_epochs_of_wrapped_rows(cls, inner):
    """Over a sampler that runs out, every row comes once an epoch."""
    made = world(NStepSampler(inner(), 3, 0.9), cls, batch_size=8)
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

PLACES = [
    (ReplayBuffer, 1, 2.4),
    (ReplayBuffer, 2, 0.6),
    (TensorDictReplayBuffer, 2, 1.0),
    (ReplayBuffer, 2, 2.4),
]


def of_slices(sampler, cls, ndim: int, fill: float, **kwargs) -> World:
    steps, lanes = (60, 0) if ndim == 1 else (30, 2)
    return World.of(
        sampler,
        steps,
        lanes,
        fill,
        buffer=cls,
        seed=2,
        batch_size=24,
        often=(0.05, 0.03, 0.0),
        **kwargs,
    )


@pytest.mark.parametrize(("cls", "ndim", "fill"), PLACES)
@pytest.mark.parametrize("sampler", [RandomSampler, lambda: ProportionalSampler(60)])
def test_torchrls_sequence_unit(sampler, ndim, fill, cls):
    """Anchors by any sampler, expanded by TorchRL: never across an end, a lane or the
    write head."""
    made = of_slices(sampler(), cls, ndim, fill, sample_unit=Sequence(length=4))
    for _ in range(4):
        batch = made.rb.sample()
        assert batch.shape == (96,)
        for rows in batch.view(24, 4):
            stored = made.rows_at(rows["index"])
            real = [
                row
                for row, here in zip(
                    stored, rows["validity_mask"].tolist(), strict=True
                )
                if here
            ]
            assert real == list(made.model.later(stored[0]))[:4]
            assert rows["observation"].tolist() == [
                row.fields["observation",] for row in stored
            ]


@wrapped
def test_a_buffer_that_was_emptied_before_its_first_batch_says_so(wrap):
    rb = World.of(wrap(UniformSampler()), 20, 2, 1.5, batch_size=24).rb
    rb.empty()
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        rb.sample()
