"""Mixtures: how many rows of each member a batch has, their weights, and what members
may be.

``tests/test_lockstep.py`` draws, updates, writes back, saves and loads.
"""

from __future__ import annotations

import multiprocessing as mp
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import SamplerWithoutReplacement
from torchrl.data.replay_buffers.scheduler import LinearScheduler
from torchrl.envs.transforms import Transform
from torchrl.trainers import ReplayBufferTrainer

from rlbuf_td import (
    CheckpointError,
    EpisodeStats,
    MinibatchSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    ReplayBufferMixture,
    SchemaError,
    SequenceSampler,
    ShutDown,
)
from tests.catalogue import SAMPLERS, assert_same, buffer_of
from tests.model import mixed_importance
from tests.statistics import assert_follows, power
from tests.test_lockstep import stopped

CAPACITY = 30


def rows(first: int, count: int, lanes: int = 0) -> TensorDict:
    """Return rows ``[n]`` or ``[E, n]`` that know their number."""
    shape = [lanes, count] if lanes else [count]
    number = torch.arange(first, first + count * max(lanes, 1)).view(shape)
    reward = number[..., None].float()
    after = {"reward": reward, "done": torch.zeros_like(reward, dtype=torch.bool)}
    return TensorDict({"number": number, "next": after}, shape)


def member(
    sampler: str, first: int, count: int, lanes: int = 0, **kwargs: Any
) -> ReplayBuffer:
    """Return a buffer of rows, which have unlike priorities."""
    made = SAMPLERS[sampler](CAPACITY)
    data = rows(first, count, lanes)
    rb = buffer_of(CAPACITY // max(1, lanes), made, lanes, rows=data, **kwargs)
    if hasattr(rb.sampler, "alpha"):
        rb.sampler.update_priority(
            torch.arange(len(rb)), torch.linspace(0.3, 3.0, len(rb)), storage=rb.storage
        )
    return rb


def mixture(one: str, other: str, **kwargs: Any) -> ReplayBufferMixture:
    shares = kwargs.pop("shares", {"demos": 0.5, "online": 0.5})
    members = {"demos": member(one, 0, 25), "online": member(other, 1_000, 21)}
    options = {"batch_size": 64, "generator": torch.Generator().manual_seed(0)}
    return ReplayBufferMixture(members, shares, **options | kwargs)


def test_groups_of_agents_keep_their_batch_dims():
    agents = TensorDict({"x": torch.arange(8.0).view(4, 2)}, [4, 2])
    members = {name: ReplayBuffer(storage=PackedStorage(4)) for name in ("a", "b")}
    for rb in members.values():
        rb.extend(TensorDict({"agents": agents}, [4]))
    batch = ReplayBufferMixture(members, {"a": 1, "b": 1}, batch_size=6).sample()
    alone = members["a"].sample(6)
    sizes = [each.get("agents").batch_size for each in (batch, alone)]
    assert sizes == [(6, 2), (6, 2)]


def test_rows_of_a_member_follow_the_law_of_its_sampler():
    shares = {"demos": 0.3, "online": 0.7}
    mixed = mixture("uniform", "proportional", batch_size=10_000, shares=shares)
    counts = torch.zeros(2, 25)
    for _ in range(60):
        batch = mixed.sample()
        counts.index_put_(
            (batch["source"], batch["index"]), torch.ones(1), accumulate=True
        )
    weights = torch.ones(25), torch.linspace(0.3, 3.0, 21) ** 0.6
    for drawn, weight in zip(counts, weights, strict=True):
        law = weight.double() / weight.double().sum()
        assert power(law.numpy(), int(drawn.sum()), bias=0.02) > 0.97
        assert_follows(drawn[: len(law)], law)


@pytest.mark.parametrize(
    "shares",
    [(0.5, 0.3, 0.2), (0.07, 0.88, 0.05), (1 / 3, 1 / 3, 1 / 3), (0.0, 1.0, 0.0)],
)
def test_exact_shares_hold_in_every_batch_and_on_average(shares):
    members = {name: member("uniform", 0, 5) for name in ("a", "b", "c")}
    mixed = ReplayBufferMixture(members, dict(zip(members, shares, strict=True)))
    wanted = torch.tensor(shares, dtype=torch.float64) * 7
    counts = torch.tensor([mixed.counts(7) for _ in range(20_000)], dtype=torch.float64)
    assert ((counts - wanted).abs() < 1 - 1e-9).all()
    assert (counts.sum(1) == 7).all()
    for each, mean in zip(counts.t(), wanted, strict=True):
        up = float(mean - mean.floor())
        assert_follows(
            [int((each > mean).sum()), int((each <= mean).sum())], [up, 1 - up]
        )


def test_drawn_shares_are_multinomial():
    mixed = mixture("uniform", "uniform", shares={"demos": 3, "online": 1}, exact=False)
    counts = torch.tensor([mixed.counts(2)[0] for _ in range(15_000)])
    law = torch.tensor([1, 6, 9]).double() / 16
    assert power(law.numpy(), 15_000, bias=0.06) > 0.95
    assert_follows(torch.bincount(counts, minlength=3), law)


@pytest.mark.parametrize(
    ("one", "other"),
    [("proportional", "rank"), ("independent", "uniform"), ("no norm", "uniform")],
)
def test_weights_are_normalized_over_the_mixture(one, other):
    mixed = mixture(one, other)
    laws: list[Any] = [None, None]
    norms: list[Any] = ["buffer", "buffer"]
    for place, rb in enumerate(mixed.members.values()):
        if hasattr(rb.sampler, "alpha"):
            rb.sampler.beta, norms[place] = 0.5, rb.sampler.weight_norm
            laws[place] = rb.sampler.probability(torch.arange(len(rb))).tolist()
    batch = mixed.sample()
    drawn = [batch["index"][batch["source"] == place].tolist() for place in (0, 1)]
    expected = torch.tensor(mixed_importance(laws, drawn, 0.5, norms))
    torch.testing.assert_close(batch["priority_weight"], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("kind", "exact"), [("proportional", True), ("rank", False)])
def test_a_row_has_the_same_weight_whichever_members_are_in_its_batch(kind, exact):
    shares = {"demos": 0.05, "online": 0.95}
    mixed = mixture(kind, kind, exact=exact, batch_size=8, shares=shares)
    demos = mixed["demos"]
    # its weights are larger than those of the online rows
    demos.sampler.beta, demos.sampler.alpha = 1.0, 1.0
    demos.update_priority(torch.tensor([3]), torch.tensor([1e-4]))
    seen: dict[int, set[float]] = {}
    are_together = set()
    for _ in range(60):
        batch = mixed.sample()
        online = batch["source"] == 1
        are_together.add(not online.all())
        weights = batch["priority_weight"][online].tolist()
        for row, weight in zip(batch["index"][online].tolist(), weights, strict=True):
            seen.setdefault(row, set()).add(round(weight, 7))
    assert are_together == {True, False}
    assert all(len(weights) == 1 for weights in seen.values())
    demos.empty()  # a member without rows has no normalizer
    mixed.sampler.demos = 0.0
    assert mixed.sample()["priority_weight"].max() <= 1.0


def test_a_state_says_whether_shares_are_exact():
    mixed, other = mixture("uniform", "uniform"), mixture("uniform", "uniform")
    mixed.exact = False
    other.load_state_dict(mixed.state_dict())
    assert not other.exact


@pytest.mark.parametrize("shared", [False, True])
def test_a_state_with_a_larger_sampler_is_loaded_or_refused_as_by_a_member(shared):
    def mixed(capacity: int, largest: float) -> Any:
        members = {}
        for name, size in (("a", 8), ("b", capacity)):
            rb = members[name] = ReplayBuffer(
                storage=PackedStorage(8),
                sampler=ProportionalSampler(size),
                shared=shared,
            )
            rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
            rb.update_priority(torch.arange(4), torch.full((4,), largest))
        return ReplayBufferMixture(members, dict.fromkeys(members, 1.0))

    small, large = mixed(8, 1.0), mixed(20, 3.0)
    if shared:  # whose memory is fixed: no member has changed
        with pytest.raises(ValueError, match="cannot grow in shared memory"):
            small.load_state_dict(large.state_dict())
    else:
        small.load_state_dict(large.state_dict())
    for rb in small.members.values():
        priorities = rb.sampler.priority(torch.arange(4))
        assert (priorities == (1.0 if shared else 3.0)).all()


def test_schedulers_change_shares():
    mixed = mixture("uniform", "uniform")
    scheduler = LinearScheduler(mixed.sampler, "demos", 0.1, 4)
    for _ in range(4):
        scheduler.step()
    assert mixed.sampler.by_name == pytest.approx({"demos": 0.1, "online": 0.9})
    mixed.sampler.online = 1.0
    assert mixed.sampler.by_name == {"demos": 0.0, "online": 1.0}
    mixed.sampler.online = 0.5
    assert mixed.sampler.demos == 0.5


def test_a_share_that_is_set_leaves_the_proportion_of_the_others():
    members = {name: member("uniform", 0, 9) for name in "abc"}
    mixed = ReplayBufferMixture(members, {"a": 5, "b": 3, "c": 2})
    mixed.sampler.a = 0.75
    assert mixed.sampler.by_name == pytest.approx({"a": 0.75, "b": 0.15, "c": 0.1})


def test_reserved_rows_are_compared_after_their_first_write():
    numbers = TensorDict({"x": torch.arange(3.0)}, [3])
    pairs = numbers.copy().set("y", torch.arange(3))
    full, reserved = (ReplayBuffer.from_schema(numbers[0], 10) for _ in range(2))
    members = {"full": full, "reserved": reserved}
    full.extend(pairs)
    mixture = ReplayBufferMixture(members, dict.fromkeys(members, 1), batch_size=4)
    reserved.extend(pairs)
    assert mixture.sample()["source"].tolist() == [0, 0, 1, 1]
    reserved.set_storage(PackedStorage(10))
    reserved.extend(numbers)
    with pytest.raises(SchemaError, match=r"'y' is int64 .* missing in 'reserved'"):
        mixture.sample()


def test_trainers_use_it_as_a_buffer():
    mixed = mixture("proportional", "proportional", writes_to="online")
    trainer = ReplayBufferTrainer(mixed, batch_size=16, flatten_tensordicts=True)
    trainer.extend(rows(3_000, 6).view(2, 3))
    batch = trainer.sample(None)
    assert len(batch) == 16
    trainer.update_priority(batch.set("td_error", torch.full((16,), 50.0)))
    assert (mixed["demos"].sampler.priority(batch["index"][:8]) == 50).all()
    trainer.load_state_dict(trainer.state_dict())
    assert (len(mixed), mixed.storage.device.type) == (52, "cpu")
    assert len(next(iter(mixed))) == mixed.batch_size == 64


@pytest.mark.parametrize("when", ["before the last member", "before the commit"])
def test_a_dump_that_is_not_finished_leaves_the_old_one_whole(
    when, tmp_path: Path, monkeypatch
):
    mixed, other = mixture("proportional", "rank"), mixture("proportional", "rank")
    mixed.dumps(tmp_path)
    wanted = [rb.chronological() for rb in mixed.members.values()]
    for name in mixed.names:
        mixed.extend(rows(7_000, 5), name)
    with monkeypatch.context() as patched:
        if when == "before the last member":
            patched.setattr(mixed["online"], "dumps", lambda *_: 1 / 0)
        else:
            patched.setattr(mixed, "_own_state", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mixed.dumps(tmp_path)
    other.loads(tmp_path)
    for rb, before in zip(other.members.values(), wanted, strict=True):
        assert_same(rb.chronological(), before)
    mixed.dumps(tmp_path)
    other.loads(tmp_path)
    for rb, original in zip(
        other.members.values(), mixed.members.values(), strict=True
    ):
        assert_same(rb.chronological(), original.chronological())
    assert len(list(tmp_path.glob("members-*"))) == 1


def test_a_dump_replaces_one_that_lacks_a_file(tmp_path: Path):
    mixed = mixture("uniform", "uniform", generator=torch.Generator().manual_seed(0))
    mixed.dumps(tmp_path)
    for file in (tmp_path / "mixture" / "data").iterdir():
        file.unlink()
    mixed.dumps(tmp_path)
    mixed.loads(tmp_path)


def numbered(first: int, count: int = 10, **kwargs: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=PackedStorage(100), **kwargs)
    rb.extend(TensorDict({"number": torch.arange(first, first + count)}, [count]))
    return rb


def halves(one: Any, other: Any, **options: Any) -> ReplayBufferMixture:
    """Return a mixture that draws as many rows of each member."""
    members = {"one": one, "other": other}
    options = {"batch_size": 8} | options
    return ReplayBufferMixture(members, dict.fromkeys(members, 0.5), **options)


def test_threads_that_sample_get_batches_of_their_own():
    mixed = halves(numbered(0), numbered(1_000), batch_size=64)
    mixed.sample()

    def draw() -> bool:
        batches = [mixed.sample() for _ in range(300)]
        return all(
            bool(((batch["number"] >= 1_000) == batch["source"].bool()).all())
            for batch in batches
        )

    def alone() -> bool:  # in more sizes than a member has plans for
        sizes = [*range(1, 21)] * 30
        return all(len(mixed["one"].sample(size)) == size for size in sizes)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(work) for work in (draw, draw, draw, alone)]
            assert all(call.result() for call in calls)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.filterwarnings(
    "ignore:.*use of fork:DeprecationWarning", "ignore:this process was forked"
)
def test_a_process_that_is_forked_while_a_thread_samples_can_sample():
    mixed = halves(numbered(0), numbered(1_000), batch_size=64)
    mixed.sample()
    with mixed["other"].storage.lock:
        thread = Thread(target=mixed.sample)
        thread.start()
        # it waits for the lock, with the rows of the first member in its memory
        thread.join(0.2)
        child = mp.get_context("fork").Process(target=mixed.sample)
        child.start()
        child.join(20)
        child.kill()
    thread.join()
    child.join()
    assert child.exitcode == 0


def test_members_with_a_sampler_of_torchrls():
    one = ReplayBuffer(storage=PackedStorage(10), sampler=SamplerWithoutReplacement())
    one.extend(TensorDict({"number": torch.arange(10)}, [10]))
    batch = halves(one, numbered(0)).sample()
    assert torch.equal(batch["index"], batch["number"])


def test_health_is_of_the_last_batch():
    mixed = halves(numbered(0), numbered(0), batch_size=64, writes_to="one")
    mixed.sample()
    mixed.extend(TensorDict({"number": torch.arange(90)}, [90]))
    mixed.sample()
    health = mixed.health()
    assert health["one/age_max"] > 60
    assert health["one/share"] == 0.5
    assert (health["one/rows"], health["other/rows"]) == (100, 10)
    mixed.extend(TensorDict({"number": torch.arange(900)}, [900]))
    assert mixed.health()["one/age_max"] < 100  # the age at the draw


def windows(length: int, lanes: int) -> ReplayBuffer:
    sampler = SequenceSampler(ProportionalSampler(60), length)
    return buffer_of(60 // max(1, lanes), sampler, lanes, rows=rows(0, 20, lanes))


def test_members_of_equal_windows_give_whole_windows_at_any_share():
    members = {"one": windows(4, 0), "other": windows(4, 0)}
    mixed = ReplayBufferMixture(members, {"one": 0.6, "other": 0.4}, batch_size=16)
    counts = [int((mixed.sample()["source"] == 0).sum()) for _ in range(200)]
    assert {*counts} == {8, 12}
    assert abs(sum(counts) / 200 - 0.6 * 16) < 0.5


def test_a_member_whose_draw_is_not_compiled_costs_others_no_rows():
    """The last batch of an epoch is short, and drawn with torch: rows that other
    members have drawn are kept."""
    members = {
        "epochs": numbered(0, 12, sampler=MinibatchSampler()),
        "priorities": numbered(100, 80, sampler=ProportionalSampler(100)),
        "short": numbered(200, 14, sampler=MinibatchSampler()),
    }
    mixture = ReplayBufferMixture(members, dict.fromkeys(members, 1), batch_size=12)
    drawn = []
    for number in range(24):
        batch = mixture.sample()
        is_last = number % 4 == 3  # of the epochs of the third member
        assert batch.get("source").bincount().tolist() == [4, 4, 2 if is_last else 4]
        assert torch.equal(batch["number"] // 100, batch["source"])
        assert (batch["priority_weight"] == 1).all()
        drawn += batch["number"][:4].tolist()
    for start in range(0, 96, 12):
        assert sorted(drawn[start : start + 12]) == [*range(12)]


def test_a_batch_that_one_member_refuses_counts_nowhere():
    one = numbered(0, 10, samples_per_insert=1.0, tolerance=50)
    mixed = halves(one, numbered(0, 10, min_size=100))
    flow: Any = one.flow
    for _ in range(20):
        with pytest.raises(RuntimeError, match="flow control does not admit"):
            mixed.sample()
    assert flow.report()["samples"] == 0


@pytest.mark.parametrize("exact", [True, False])
def test_every_batch_has_the_same_keys_whichever_members_it_needs(exact):
    lanes = member("uniform", 1_000, 4, lanes=2)
    members = {"one": member("proportional", 0, 9), "other": lanes}
    mixed = ReplayBufferMixture(
        members, {"one": 0.1, "other": 0.9}, batch_size=2, exact=exact
    )
    kinds = {
        (frozenset(batch.keys()), batch["index"].shape)
        for batch in [mixed.sample() for _ in range(60)]
    }
    assert len(kinds) == 1


def test_batches_drawn_ahead_by_a_member_are_not_used():
    ahead = {"device": "cpu", "prefetch": 2, "batch_size": 4}
    one = numbered(0, 50, sampler=ProportionalSampler(100, beta=1.0), **ahead)
    mixed = halves(one, numbered(0, 50))
    mixed.sample()
    one.update_priority(torch.arange(50), torch.arange(50) + 1.0)
    batch = mixed.sample()
    law = (torch.arange(50) + 1.0) ** 0.6
    weight = 1 / (50 * law / law.sum())
    wanted = torch.cat((weight[batch["index"][:4]], torch.ones(4))) / weight.max()
    torch.testing.assert_close(batch["priority_weight"], wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_weights_are_of_the_moment_of_the_draw(device):
    class Later(Transform):
        def forward(self, tensordict):
            one.update_priority(torch.arange(50), torch.arange(50) + 1.0)
            return tensordict

    sampler = ProportionalSampler(100, beta=1.0)
    one = numbered(0, 50, sampler=sampler, transform=Later([], []), device=device)
    mixed = halves(one, numbered(0, 50))
    assert mixed.sample()["priority_weight"].tolist() == [1.0] * 8


def test_members_on_different_devices_are_refused():
    elsewhere = ReplayBuffer(storage=PackedStorage(50, device="meta"), batch_size=8)
    elsewhere.extend(numbered(0)[:])
    mixed = halves(numbered(0), elsewhere)
    with pytest.raises(
        ValueError,
        match=r"different devices, .*'other': 'meta'.*: keep their rows on one device",
    ):
        mixed.sample()


def test_sequences_of_other_lengths_and_lanes_are_mixed():
    members = {"one": windows(2, 0), "other": windows(4, 3)}
    mixed = halves(*members.values(), batch_size=16, exact=False)
    for _ in range(20):
        batch = mixed.sample()
        assert batch["anchor_index"].shape == (16, 2)
        batch["td_error"] = torch.full((16,), 5.0)
        mixed.update_tensordict_priority(batch)
    assert float(members["one"].sampler.sampler.priorities.largest) == 5.0


def test_uniform_members_write_back_by_their_stamps():
    mixed = halves(numbered(0), numbered(50))
    batch = mixed.sample()
    index = [batch["index"][batch["source"] == place] for place in range(2)]
    stamps = {
        name: rb.storage.stamps(index[k])
        for k, (name, rb) in enumerate(mixed.members.items())
    }
    batch["number"] = -1 - batch["source"]
    assert mixed.write_back(batch, ["number"], sampled_at=stamps) == 8
    assert (mixed["one"].storage["number"] == -1).any()
    assert (mixed["other"].storage["number"] == -2).any()


class Locked(Transform):
    lock = Lock()

    def forward(self, data: Any) -> Any:
        with self.lock:
            return data


def test_members_are_transformed_without_their_locks():
    one = numbered(0, transform=Locked())
    mixed = halves(one, numbered(0), batch_size=4)

    def write() -> None:
        for _ in range(500):
            with Locked.lock:
                one.extend(
                    TensorDict({"number": torch.zeros(1, dtype=torch.int64)}, [1])
                )

    writer = Thread(target=write, daemon=True)
    writer.start()
    reader = Thread(target=lambda: [mixed.sample() for _ in range(200)], daemon=True)
    reader.start()
    for thread in (writer, reader):
        thread.join(60)
        assert not thread.is_alive()


def pair(shift: int = 0, capacity: int = CAPACITY, **names: str) -> ReplayBufferMixture:
    """Two members of unlike rows, priorities, shares and generators."""
    one, other = names.get("one", "one"), names.get("other", "other")
    members: dict[str, Any] = {}
    for name, size in {one: CAPACITY, other: capacity}.items():
        members[name] = ReplayBuffer(
            storage=PackedStorage(size),
            sampler=ProportionalSampler(size),
            stats=EpisodeStats(),
            min_size=1,  # with flow control
            generator=torch.Generator().manual_seed(size + shift),
        )
        members[name].extend(rows(shift + 100 * len(members), 9 + shift))
        members[name].update_priority(torch.arange(3), torch.tensor([1.0, shift, 9.0]))
    generator = torch.Generator().manual_seed(shift)
    share = 0.5 + shift / 10
    return ReplayBufferMixture(
        members, {one: share, other: 1 - share}, batch_size=4, generator=generator
    )


def content(mixed: ReplayBufferMixture) -> Any:
    """Return what a load may change."""
    states = [
        (rb.chronological()["number"], rb.state_dict() | {"_storage": None})
        for rb in mixed.members.values()
    ]
    return repr((states, mixed.sampler, mixed.state_dict()["generator"].tolist()))


def load(mixed: ReplayBufferMixture, saved: ReplayBufferMixture, folder: Path | None):
    if folder is None:
        mixed.load_state_dict(saved.state_dict())
    else:
        mixed.loads(folder)


@pytest.mark.parametrize("is_dumped", [True, False])
@pytest.mark.parametrize(
    "refused", [{"capacity": CAPACITY + 1}, {"other": "unlike"}, {"one": "unlike"}]
)
def test_a_load_that_a_member_refuses_changes_no_member(
    refused, is_dumped, tmp_path: Path
):
    saved, mixed = pair(2, **refused), pair()
    saved.dumps(tmp_path)
    before = content(mixed)
    with pytest.raises((ValueError, CheckpointError)):
        load(mixed, saved, tmp_path if is_dumped else None)
    assert content(mixed) == before


PARTS = "_storage", "_sampler", "_writer", "_stats", "_flow", "_rng", "_batch_size"


@pytest.mark.parametrize(
    ("part", "is_missing"),
    [*((part, False) for part in PARTS), *((part, True) for part in PARTS[:3])],
)
def test_a_wrong_state_of_a_part_changes_no_member(part, is_missing):
    saved, mixed = pair(2), pair()
    state = saved.state_dict()
    wrong = state["members"]["other"]
    assert part in wrong
    if is_missing:
        del wrong[part]
    else:
        wrong[part] = -1 if part == "_batch_size" else {"wrong": -1}
    before = content(mixed)
    with pytest.raises((ValueError, TypeError)):
        mixed.load_state_dict(state)
    assert content(mixed) == before


@pytest.mark.parametrize("is_dumped", [True, False])
def test_a_load_into_a_member_that_is_shut_down_changes_no_member(is_dumped, tmp_path):
    saved, mixed = pair(2), pair()
    saved.dumps(tmp_path)
    mixed["other"].shutdown()
    before = content(mixed)
    with pytest.raises(ShutDown):
        load(mixed, saved, tmp_path if is_dumped else None)
    assert content(mixed) == before


@pytest.mark.parametrize("is_dumped", [True, False])
def test_members_with_prefetch_over_one_storage_are_loaded(is_dumped, tmp_path):
    def make(first: int) -> ReplayBufferMixture:
        one = numbered(first, prefetch=2, batch_size=3)
        other = ReplayBuffer(storage=one.storage, prefetch=2, batch_size=3)
        for rb in (one, other):
            rb.sample()
        return halves(one, other, batch_size=4)

    saved, mixed = make(0), make(1_000)
    saved.dumps(tmp_path)
    thread = Thread(target=load, args=(mixed, saved, tmp_path if is_dumped else None))
    thread.daemon = True
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    for rb in mixed.members.values():
        assert rb.chronological()["number"].tolist() == [*range(10)]
        assert rb.sample()["number"].max() < 10


def test_a_load_of_a_damaged_member_changes_no_member(tmp_path: Path):
    pair(2).dumps(tmp_path)
    mixed = pair()
    before = content(mixed)
    files = sorted(tmp_path.glob("members-*/other/data/*"))
    assert files
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError):
            mixed.loads(tmp_path)
        assert content(mixed) == before, file
        file.write_bytes(whole)
    mixed.loads(tmp_path)
    assert content(mixed) == content(pair(2))


@pytest.mark.parametrize("is_dumped", [True, False])
def test_an_interrupted_load_loads_all_members_or_none(is_dumped, tmp_path: Path):
    saved = pair(2)
    saved.dumps(tmp_path)
    allowed = [content(pair()), content(saved)]
    seen = set()
    for line in count(1, 397):
        mixed = pair()
        with stopped(line, signal.SIGINT) as stopper:
            load(mixed, saved, tmp_path if is_dumped else None)
        state = content(mixed)
        assert state in allowed, line
        seen.add(state)
        if stopper.left > 0:
            break
    assert len(seen) == 2
