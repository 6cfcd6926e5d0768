"""A sampler of one's own, written as CONTRIBUTING.md says, and all that it can do from
then on; wrappers around samplers of all kinds."""

from __future__ import annotations

import pickle
from operator import attrgetter
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    Sequence,
    Storage,
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
    ReplayBufferMixture,
    RowSampler,
    SchemaError,
    SequenceSampler,
    UniformSampler,
)
from tests.catalogue import buffer_of
from tests.model import World, reward_fn
from tests.statistics import assert_follows, power


class RecentSampler(RowSampler):
    """The k-th of every K batches is drawn from the newest
    ``max(eta^(1000 k / K) N, least)`` time steps.

    Source: Wang and Ross, Boosting Soft Actor-Critic: Emphasizing Recent Experience
    without Forgetting the Past, 2019.
    """

    needs_order = True
    state_keys = ("count",)

    def __init__(
        self, eta: float = 0.996, updates: int = 1_000, least: int = 5_000
    ) -> None:
        self.eta, self.updates, self.least, self.count = eta, updates, least, 0

    def draw(
        self, storage: Storage, batch_size: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        if not len(storage):
            raise RuntimeError(
                "Cannot sample from an empty storage: extend the buffer first"
            )
        lanes = storage.shape[1:].numel()
        steps, share = (
            len(storage) // lanes,
            self.eta ** (1_000 * self.count / self.updates),
        )
        newest = min(steps, max(int(share * steps), self.least))
        self.count = (self.count + 1) % self.updates
        # (age, lane), as one number
        drawn = torch.randint(newest * lanes, (batch_size,), generator=self._rng)
        flat = (
            storage._last_cursor_index - drawn // lanes
        ) % steps * lanes + drawn % lanes
        return flat.to(storage.device), {}

    def _empty(self) -> None:
        self.count = 0


# windows of all of the rows, then of 78, 61 and 47 % of them
UPDATES, LEAST, ETA = 4, 6, 0.999
BUFFERS = {
    "ours": (ReplayBuffer, PackedStorage),
    "TorchRL's": (TensorDictReplayBuffer, PackedStorage),
    "TorchRL's throughout": (TensorDictReplayBuffer, LazyTensorStorage),
}


def steps_of(first: int, count: int, lanes: int) -> TensorDict:
    """Return time steps that know their number, ``[count]`` or ``[lanes, count]``; an
    episode lasts ten."""
    time = torch.arange(first, first + count)
    done = (time % 10 == 9).unsqueeze(-1)
    rows = TensorDict(
        {"time": time, "next": {"done": done, "reward": torch.ones(count, 1)}}, [count]
    )
    return rows.expand(lanes, count).clone() if lanes else rows


def buffer(kind: str, lanes: int, written: int, sampler: Sampler, batch: int = 50):
    cls, storage = BUFFERS[kind]
    rb = buffer_of(20, sampler, lanes, storage, cls, batch_size=batch)
    for first in range(0, written, 4):
        rb.extend(steps_of(first, min(4, written - first), lanes))
    return rb


@pytest.mark.parametrize(
    ("kind", "lanes", "written"),  # wrapped, filling, wrapped
    [*zip([*BUFFERS], [0, 3, 0], [47, 14, 47], strict=True)],
)
def test_each_batch_of_a_round_follows_its_law(kind, lanes, written):
    rb = buffer(kind, lanes, written, RecentSampler(ETA, UPDATES, LEAST), batch=4_000)
    steps, cells, rounds = min(written, 20), max(1, lanes), 100
    counts = torch.zeros(UPDATES, steps * cells)
    for batch in (rb.sample() for _ in range(rounds * UPDATES)):
        age = written - 1 - batch["time"]
        lane = batch["index"][:, 1] if lanes else 0
        counts[(rb.sampler.count - 1) % UPDATES] += torch.bincount(
            age * cells + lane, minlength=steps * cells
        )
    for k in range(UPDATES):
        window = max(int(ETA ** (1_000 * k / UPDATES) * steps), LEAST) * cells
        law = (torch.arange(steps * cells) < window).double() / window
        assert_follows(counts[k], law)
    assert (
        power((torch.ones(60) / 60).double().numpy(), 4_000 * rounds, bias=0.02) > 0.99
    )


def test_a_wrapper_takes_it_as_it_is():
    sampler = NStepSampler(
        RecentSampler(least=6, updates=1, eta=0.5), n_steps=3, gamma=1.0
    )
    batch = buffer("ours", 0, 18, sampler).sample()
    left = 10 - batch["time"] % 10  # to the end of the episode
    so_far = 18 - batch["time"]
    assert torch.equal(
        batch["next", "reward"].flatten(),
        torch.stack([left, so_far]).amin(0).clamp(max=3).float(),
    )


def test_a_saved_buffer_goes_on_within_its_round(tmp_path):
    rb, again = (
        buffer("ours", 0, written, RecentSampler(ETA, UPDATES, LEAST))
        for written in (47, 20)
    )
    rb.sample()
    rb.dumps(tmp_path)
    again.loads(tmp_path)
    assert again.sampler.count == 1
    for _ in range(UPDATES):
        assert torch.equal(again.sample()["time"], rb.sample()["time"])
    rb.empty()
    assert rb.sampler.count == 0


class Marked(RowSampler):
    """Draws what ``answer(batch_size)`` returns, and keeps a state of several kinds."""

    state_keys = "numbers", "level", "names"
    report_keys = frozenset({"mark"})

    def __init__(self, answer=torch.arange) -> None:
        self.answer, self.numbers, self.level, self.names = (
            answer,
            torch.zeros(2),
            0.5,
            ["a"],
        )

    def draw(
        self, storage: Storage, batch_size: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        return self.answer(batch_size), {"mark": torch.ones(batch_size, 2)}


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("lanes", [0, 2])
def test_batches_have_what_it_reports(kind, lanes):
    rb = buffer(kind, lanes, 8, Marked(), batch=3)
    assert torch.equal(rb.sample()["mark"], torch.ones(3, 2))


def test_its_state_is_a_copy_of_what_it_names(tmp_path):
    one = Marked()
    state = one.state_dict()
    one.numbers += 1
    one.level, one.names = 0.75, ["b", "c"]
    assert (state["numbers"].tolist(), state["level"], state["names"]) == (
        [0, 0],
        0.5,
        ["a"],
    )
    one.dumps(tmp_path)
    loaded, copied, unpickled = Marked(), Marked(), pickle.loads(pickle.dumps(one))
    loaded.loads(tmp_path)
    saved = one.state_dict()
    copied.load_state_dict(saved)
    saved["numbers"] += 1
    for other in (loaded, copied, unpickled):
        assert (
            repr(other)
            == repr(one)
            == "Marked(numbers=tensor([1., 1.]), level=0.75, names=['b', 'c'])"
        )
    assert copied.level == 0.75


# -- entries that a sampler adds to batches never replace an entry that the user stored


def rows_with(name: str) -> TensorDict:
    place = torch.arange(12.0).view(-1, 1)
    done = torch.arange(12).view(-1, 1) % 6 == 5
    next_ = {"reward": torch.ones(12, 1), "done": done, "observation": place + 1}
    return TensorDict(
        {"observation": place, name: torch.arange(12) + 100, "next": next_}, [12]
    )


class Reporting(UniformSampler):
    """Reports entries that it does not announce, as TorchRL's SliceSampler does."""

    def draw(self, storage, batch_size: int):
        flat, info = super().draw(storage, batch_size)
        ends = torch.ones(batch_size, 1, dtype=torch.bool)
        return flat, info | {
            "chosen_by": torch.zeros(batch_size),
            ("next", "done"): ends,
        }


def made_of(name: str, sampler=None, **options) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=PackedStorage(12), sampler=sampler, batch_size=12, **options
    )
    rb.extend(rows_with(name))
    return rb


def test_an_entry_of_another_samplers_report_is_stored():
    for name in (
        "mask",
        "burn_in_mask",
        "anchor_index",
        "steps_to_next_obs",
        "relabeled",
        "priority_weight",
    ):
        batch = made_of(name).sample()
        assert torch.equal(batch[name], batch["observation"][:, 0].long() + 100)


def test_an_entry_that_was_not_announced_is_refused_at_the_first_draw():
    with pytest.raises(
        SchemaError, match="have an entry 'chosen_by', and a Reporting adds"
    ):
        made_of("chosen_by", Reporting()).sample()


def test_batches_without_the_report_keep_what_the_rows_have():
    batch = made_of("mask", Reporting(), include_info=False).sample()
    assert batch["next", "done"].all()
    assert set(batch.keys()) == {"observation", "mask", "next"}


class KeepsItsRows(RowSampler):
    """Draws every second row to a tensor that it keeps, as a view with a stride, and
    more rows than wanted."""

    def __init__(self, extra: int = 0) -> None:
        self.rows, self.extra = torch.zeros(400, dtype=torch.int64), extra

    def draw(self, storage: Storage, batch_size: int) -> torch.Tensor:
        self.rows += 1
        return (
            (self.rows + torch.arange(400))[::2][: batch_size + self.extra]
            if self.extra
            else self.rows[::50]
        )


@pytest.mark.parametrize(
    "wrap", [lambda inner: inner, lambda inner: NStepSampler(inner, 2, 0.9)]
)
@pytest.mark.parametrize("lanes", [0, 2])
def test_rows_in_a_strided_tensor_that_the_sampler_keeps(lanes, wrap):
    rb = buffer_of(20, wrap(KeepsItsRows()), lanes, batch_size=8)
    rb.extend(steps_of(0, 20, lanes))
    batches = [rb.sample() for _ in range(3)]
    for number, batch in enumerate(batches, 1):  # with lanes, row n is time step n // 2
        assert batch["time"].tolist() == [number // max(lanes, 1)] * 8
        index = (
            batch["index"]
            if not lanes
            else batch["index"][:, 0] * lanes + batch["index"][:, 1]
        )
        assert index.tolist() == [number] * 8


def test_a_mixture_has_room_for_all_rows_of_a_member():
    members = {
        "one": buffer_of(600, KeepsItsRows(extra=100)),
        "other": buffer_of(600, UniformSampler()),
    }
    for member in members.values():
        member.extend(steps_of(0, 600, 0))
    batch = ReplayBufferMixture(
        members, {"one": 0.5, "other": 0.5}, batch_size=8
    ).sample()
    assert len(batch) == 108
    assert batch["time"][:104].tolist() == [*range(1, 209, 2)]
    assert torch.equal(batch["time"], batch["index"])


class Scored(UniformSampler):
    def draw(
        self, storage: Storage, batch_size: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        rows, _ = super().draw(storage, batch_size)
        return rows, {"score": rows.float()}


def test_a_mixture_keeps_the_entries_of_its_members_samplers():
    members = {name: buffer_of(20, Scored()) for name in ("one", "other")}
    for member in members.values():
        member.extend(steps_of(0, 20, 0))
    batch = ReplayBufferMixture(
        members, {"one": 0.5, "other": 0.5}, batch_size=8
    ).sample()
    assert torch.equal(batch.get("score").long(), batch["time"])


# -- wrappers


WRAPPERS = {
    "hindsight": lambda inner: HindsightSampler(inner, reward_fn),
    "n-step": lambda inner: NStepSampler(inner, 3, 0.9),
    "sequence": lambda inner: SequenceSampler(inner, 3, burn_in=1),
    "all": lambda inner: SequenceSampler(
        NStepSampler(HindsightSampler(inner, reward_fn), 3, 0.9), 3, burn_in=1
    ),
}
KINDS_OF_BUFFER = [ReplayBuffer, TensorDictReplayBuffer]
wrapped = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
both = pytest.mark.parametrize("cls", KINDS_OF_BUFFER)


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
