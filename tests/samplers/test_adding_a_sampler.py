"""A sampler of one's own, written as CONTRIBUTING.md says, and all that it can do from
then on."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import (
    LazyTensorStorage,
    Sampler,
    Storage,
    TensorDictReplayBuffer,
)

from rlbuf_td import (
    NStepSampler,
    PackedStorage,
    ReplayBuffer,
    ReplayBufferMixture,
    RowSampler,
    SchemaError,
    UniformSampler,
)
from tests.catalogue import buffer_of
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
