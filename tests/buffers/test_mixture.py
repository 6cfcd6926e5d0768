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
    MinibatchSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReplayBufferMixture,
    SchemaError,
    SequenceSampler,
)
from tests import catalogue
from tests.catalogue import assert_same
from tests.statistics import assert_follows, power
from tests.test_lockstep import stopped

CAPACITY = 30
SAMPLERS: dict[str, Any] = catalogue.SAMPLERS | {
    "by batch": lambda rows: ProportionalSampler(rows, weight_norm="batch"),
    "by nothing": lambda rows: RankSampler(rows, weight_norm=None),
}


def rows(first: int, count: int, lanes: int = 0) -> TensorDict:
    number = torch.arange(first, first + count * max(lanes, 1)).view(
        [count, lanes] if lanes else [count]
    )
    number = number.t().contiguous() if lanes else number
    lead = number.shape
    following = {
        "reward": torch.rand(*lead, 1),
        "done": torch.zeros(*lead, 1, dtype=torch.bool),
    }
    return TensorDict(
        {"number": number, "observation": torch.rand(*lead, 3), "next": following}, lead
    )


def member(
    sampler: str, first: int, count: int, lanes: int = 0, **kwargs: Any
) -> ReplayBuffer:
    storage = PackedStorage(CAPACITY, ndim=2 if lanes else 1)
    rb = ReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](CAPACITY), **kwargs)
    rb.extend(rows(first, count, lanes))
    if hasattr(rb.sampler, "alpha"):
        rb.sampler.update_priority(
            torch.arange(len(rb)), torch.linspace(0.3, 3.0, len(rb)), storage=rb.storage
        )
    return rb


def mixture(one: str, other: str, lanes: int = 0, **kwargs: Any) -> ReplayBufferMixture:
    given: dict[str, Any] = {
        "batch_size": 64,
        "generator": torch.Generator().manual_seed(0),
    } | kwargs
    shares = given.pop("shares", {"demos": 0.5, "online": 0.5})
    members = {
        "demos": member(one, 0, 25),
        "online": member(other, 1_000, 21 // max(1, lanes), lanes),
    }
    return ReplayBufferMixture(members, shares, **given)


def check(mixed: ReplayBufferMixture, batch: TensorDict) -> None:
    for place, rb in enumerate(mixed.members.values()):
        mine = batch[batch["source"] == place]
        index = mine["index"]
        if index.ndim > 1 and rb.storage.ndim == 1:
            assert (index[:, 1] == 0).all()
            index = index[:, 0]
        stored = rb.storage.get(index if index.ndim == 1 else tuple(index.unbind(-1)))
        for key in ("number", "observation", ("next", "reward")):
            assert torch.equal(mine[key], stored[key]), key


def test_groups_of_agents_keep_their_batch_dims():
    agents = TensorDict({"x": torch.arange(8.0).view(4, 2)}, [4, 2])
    members = {name: ReplayBuffer(storage=PackedStorage(4)) for name in ("a", "b")}
    for rb in members.values():
        rb.extend(TensorDict({"agents": agents}, [4]))
    batch = ReplayBufferMixture(members, {"a": 1, "b": 1}, batch_size=6).sample()
    alone = members["a"].sample(6)
    sizes = [each.get("agents").batch_size for each in (batch, alone)]
    assert sizes == [(6, 2), (6, 2)]


def test_members_may_have_unlike_numbers_of_lanes():
    members = {
        "demos": member("uniform", 0, 10, 2),
        "online": member("proportional", 1_000, 5, 6),
    }
    mixed = ReplayBufferMixture(members, {"demos": 0.5, "online": 0.5}, batch_size=64)
    for _ in range(3):
        check(mixed, batch := mixed.sample())
    batch["td_error"] = torch.full((64,), 50.0)
    mixed.update_tensordict_priority(batch)
    drawn = batch["index"][batch["source"] == 1].unique(dim=0)
    assert (members["online"].sampler.priority(torch.arange(30)) == 50).sum() == len(
        drawn
    )


@pytest.mark.parametrize(
    ("one", "other"), [("uniform", "uniform"), ("uniform", "proportional")]
)
def test_rows_of_a_member_follow_the_law_of_its_sampler(one, other):
    mixed = mixture(one, other, batch_size=10_000, shares={"demos": 0.3, "online": 0.7})
    counts = torch.zeros(2, CAPACITY)
    for batch in (mixed.sample() for _ in range(60)):
        for place in (0, 1):
            counts[place] += torch.bincount(
                batch["index"][batch["source"] == place], minlength=CAPACITY
            )
    weight = (
        torch.linspace(0.3, 3.0, 21).double() ** 0.6
        if other == "proportional"
        else torch.ones(21).double()
    )
    laws = [torch.full((25,), 1 / 25, dtype=torch.float64), weight / weight.sum()]
    for place, law in enumerate(laws):
        assert power(law.numpy(), int(counts[place].sum()), bias=0.02) > 0.97
        assert_follows(counts[place][: len(law)], law)


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
    counts = torch.tensor([mixed.counts(2)[0] for _ in range(30_000)])
    assert power(torch.tensor([1, 6, 9]).numpy() / 16, 30_000, bias=0.04) > 0.95
    assert_follows(
        torch.bincount(counts, minlength=3), torch.tensor([1, 6, 9]).double() / 16
    )
    check(mixed, mixed.sample())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("proportional", "rank"),
        ("uniform", "proportional"),
        ("independent", "uniform"),
        ("no norm", "uniform"),
    ],
)
def test_weights_are_normalised_over_the_mixture(one, other):
    mixed = mixture(one, other)
    batch = mixed.sample()
    raw, most = torch.zeros(64, dtype=torch.float64), 1.0
    for place, rb in enumerate(mixed.members.values()):
        mine = batch["source"] == place
        if not hasattr(rb.sampler, "alpha"):
            raw[mine] = 1.0
            continue
        every = (
            len(rb) * rb.sampler.probability(torch.arange(len(rb)))
        ) ** -rb.sampler.beta
        raw[mine] = every[batch["index"][mine]]
        norm = {"buffer": every, "batch": raw[mine], None: torch.ones(1)}[
            rb.sampler.weight_norm
        ]
        most = max(most, float(norm.max()))
    torch.testing.assert_close(
        batch["priority_weight"].double(), raw / most, rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(("kind", "exact"), [("proportional", True), ("rank", False)])
def test_a_row_has_the_same_weight_whichever_members_are_in_its_batch(kind, exact):
    mixed = mixture(
        "uniform",
        kind,
        exact=exact,
        batch_size=8,
        shares={"demos": 0.05, "online": 0.95},
    )
    mixed.members["demos"] = demos = member(kind, 0, 25)
    # its weights are larger than those of the online rows
    demos.sampler.beta, demos.sampler.alpha = 1.0, 1.0
    demos.sampler.update_priority(
        torch.tensor([3]), torch.tensor([1e-4]), storage=demos.storage
    )
    seen: dict[int, set[float]] = {}
    are_together = set()
    for _ in range(60):
        batch = mixed.sample()
        are_together.add(bool((batch["source"] == 0).any()))
        online = batch["source"] == 1
        for row, weight in zip(
            batch["index"][online].tolist(),
            batch["priority_weight"][online].tolist(),
            strict=True,
        ):
            seen.setdefault(row, set()).add(round(weight, 7))
    assert are_together == {True, False}
    assert all(len(weights) == 1 for weights in seen.values())
    # no weight is divided, whether the batch has demonstrations or not
    demos.sampler.weight_norm = None
    every = (21 * mixed["online"].sampler.probability(torch.arange(21))) ** -mixed[
        "online"
    ].sampler.beta
    for batch in (mixed.sample() for _ in range(20)):
        online = batch["source"] == 1
        torch.testing.assert_close(
            batch["priority_weight"][online].double(), every[batch["index"][online]]
        )
    demos.empty()  # and a member without rows has no normalizer
    mixed.sampler.demos, demos.sampler.weight_norm = 0.0, "buffer"
    assert mixed.sample()["priority_weight"].max() <= 1.0


@pytest.mark.parametrize("refuses", ["demos", "online"])
def test_an_update_that_one_member_refuses_changes_none(refuses):
    mixed = mixture("proportional", "proportional")
    batch = mixed.sample()
    is_bad = batch["source"] == mixed.names.index(refuses)
    before = [rb.sampler.priority(torch.arange(21)) for rb in mixed.members.values()]
    batch["td_error"] = torch.where(is_bad, torch.nan, 7.0)
    with pytest.raises(ValueError, match="NaN"):
        mixed.update_tensordict_priority(batch)
    after = [rb.sampler.priority(torch.arange(21)) for rb in mixed.members.values()]
    assert all(map(torch.equal, before, after))


def test_a_state_says_whether_shares_are_exact():
    mixed, other = mixture("uniform", "uniform"), mixture("uniform", "uniform")
    mixed.exact = False
    other.load_state_dict(mixed.state_dict())
    assert not other.exact


@pytest.mark.parametrize("shared", [False, True])
def test_a_state_with_a_larger_sampler_is_loaded_or_refused_as_by_a_member(shared):
    def mixed(capacities: tuple[int, int]) -> Any:
        members = {
            str(number): ReplayBuffer(
                storage=PackedStorage(8),
                sampler=ProportionalSampler(capacity),
                shared=shared,
            )
            for number, capacity in enumerate(capacities)
        }
        mixture = ReplayBufferMixture(members, dict.fromkeys(members, 1.0))
        for rb in members.values():
            rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
        return mixture

    small, large = mixed((8, 8)), mixed((8, 20))
    for number, rb in enumerate(large.members.values()):
        rb.update_priority(torch.arange(4), torch.arange(1.0, 5.0) + number)
    before = [rb.sampler.priority(torch.arange(4)) for rb in small.members.values()]
    if shared:  # whose memory is fixed: no member has changed
        with pytest.raises(ValueError, match="cannot grow in shared memory"):
            small.load_state_dict(large.state_dict())
        expected = before
    else:
        small.load_state_dict(large.state_dict())
        expected = [
            rb.sampler.priority(torch.arange(4)) for rb in large.members.values()
        ]
    for rb, priority in zip(small.members.values(), expected, strict=True):
        assert torch.equal(rb.sampler.priority(torch.arange(4)), priority)


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
    step = TensorDict({"x": torch.zeros(())})
    full, reserved = (ReplayBuffer.from_schema(step, 10) for _ in range(2))
    full.extend(TensorDict({"x": torch.arange(3.0), "y": torch.arange(3)}, [3]))
    mixture = ReplayBufferMixture(
        {"full": full, "reserved": reserved}, {"full": 1, "reserved": 1}, batch_size=4
    )
    reserved.extend(TensorDict({"x": torch.arange(3.0), "y": torch.arange(3)}, [3]))
    assert mixture.sample()["source"].tolist() == [0, 0, 1, 1]
    reserved.set_storage(PackedStorage(10))
    reserved.extend(TensorDict({"x": torch.arange(3.0)}, [3]))
    with pytest.raises(SchemaError, match=r"'y' is int64 .* missing in 'reserved'"):
        mixture.sample()


def test_trainers_use_it_as_a_buffer():
    mixed = mixture("proportional", "proportional", writes_to="online")
    trainer = ReplayBufferTrainer(mixed, batch_size=16, flatten_tensordicts=True)
    trainer.extend(rows(3_000, 6).view(2, 3))
    batch = trainer.sample(None)
    assert len(batch) == 16
    batch["td_error"] = torch.full((16,), 50.0)
    trainer.update_priority(batch)
    assert (mixed["demos"].sampler.priority(batch["index"][:8]) == 50).all()
    trainer.load_state_dict(trainer.state_dict())
    assert (len(mixed), mixed.batch_size, mixed.storage.device.type) == (52, 64, "cpu")
    assert len(next(iter(mixed))) == 64


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


HALF = {"one": 0.5, "other": 0.5}


def test_threads_that_sample_get_batches_of_their_own():
    mixed = ReplayBufferMixture(
        {"one": numbered(0), "other": numbered(1_000)}, HALF, batch_size=64
    )
    mixed.sample()

    def draw() -> bool:
        batches = [mixed.sample() for _ in range(300)]
        return all(
            bool(((batch["number"] >= 1_000) == batch["source"].bool()).all())
            for batch in batches
        )

    def alone() -> bool:  # in more sizes than a member has plans for
        return all(
            len(mixed["one"].sample(size)) == size for size in [*range(1, 21)] * 30
        )

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(
                future.result()
                for future in [pool.submit(each) for each in (draw, draw, draw, alone)]
            )
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.filterwarnings(
    "ignore:.*use of fork:DeprecationWarning", "ignore:this process was forked"
)
def test_a_process_that_is_forked_while_a_thread_samples_can_sample():
    mixed = ReplayBufferMixture(
        {"one": numbered(0), "other": numbered(1_000)}, HALF, batch_size=64
    )
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
    batch = ReplayBufferMixture(
        {"one": one, "other": numbered(0)}, HALF, batch_size=8
    ).sample()
    assert torch.equal(batch["index"], batch["number"])


def test_health_is_of_the_last_batch():
    mixed = ReplayBufferMixture(
        {"one": numbered(0), "other": numbered(0)}, HALF, batch_size=64, writes_to="one"
    )
    mixed.sample()
    mixed.extend(TensorDict({"number": torch.arange(90)}, [90]))
    mixed.sample()
    health = mixed.health()
    assert health["one/age_max"] > 60
    assert (health["one/share"], health["one/rows"], health["other/rows"]) == (
        0.5,
        100,
        10,
    )
    mixed.sample()
    mixed.extend(TensorDict({"number": torch.arange(900)}, [900]))
    assert mixed.health()["one/age_max"] < 100  # the age at the draw


def windows(length: int, lanes: int) -> ReplayBuffer:
    storage = PackedStorage(60, ndim=2 if lanes else 1)
    rb = ReplayBuffer(
        storage=storage, sampler=SequenceSampler(ProportionalSampler(60), length)
    )
    rb.extend(rows(0, 20, lanes))
    return rb


def test_members_of_equal_windows_give_whole_windows_at_any_share():
    members = {"one": windows(4, 0), "other": windows(4, 0)}
    mixed = ReplayBufferMixture(members, {"one": 0.6, "other": 0.4}, batch_size=16)
    counts = torch.stack(
        [mixed.sample().get("source").bincount(minlength=2) for _ in range(200)]
    )
    assert set(counts[:, 0].tolist()) == {8, 12}
    assert abs(float(counts[:, 0].float().mean()) - 0.6 * 16) < 0.5


def test_a_member_whose_draw_is_not_compiled_costs_others_no_rows():
    """The last batch of an epoch is short, and drawn with torch: rows that other
    members have drawn are kept."""
    members = {
        "epochs": numbered(0, 12, sampler=MinibatchSampler()),
        "priorities": numbered(100, 80, sampler=ProportionalSampler(100)),
        "short": numbered(200, 14, sampler=MinibatchSampler()),
    }
    mixture = ReplayBufferMixture(members, dict.fromkeys(members, 1), batch_size=12)
    epochs = []
    for _ in range(24):
        batch = mixture.sample()
        assert batch["source"].tolist() in (
            [0] * 4 + [1] * 4 + [2] * 4,
            [0] * 4 + [1] * 4 + [2] * 2,
        )
        assert (batch["priority_weight"] == 1).all()
        epochs += batch["number"][:4].tolist()
        assert ((batch["number"][4:8] >= 100) & (batch["number"][4:8] < 180)).all()
    assert [sorted(epochs[i : i + 12]) for i in range(0, 96, 12)] == [[*range(12)]] * 8


def test_a_batch_that_one_member_refuses_counts_nowhere():
    one = numbered(0, 10, samples_per_insert=1.0, tolerance=50)
    mixed = ReplayBufferMixture(
        {"one": one, "other": numbered(0, 10, min_size=100)}, HALF, batch_size=8
    )
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
    mixed = ReplayBufferMixture(
        {"one": one, "other": numbered(0, 50)}, HALF, batch_size=8
    )
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
    mixed = ReplayBufferMixture(
        {"one": one, "other": numbered(0, 50)}, HALF, batch_size=8
    )
    assert mixed.sample()["priority_weight"].tolist() == [1.0] * 8


def test_members_on_different_devices_are_refused():
    elsewhere = ReplayBuffer(storage=PackedStorage(50, device="meta"), batch_size=8)
    elsewhere.extend(numbered(0)[:])
    mixed = ReplayBufferMixture(
        {"one": numbered(0), "other": elsewhere}, HALF, batch_size=8
    )
    with pytest.raises(
        ValueError,
        match=r"different devices, .*'other': 'meta'.*: keep their rows on one device",
    ):
        mixed.sample()


def test_sequences_of_other_lengths_and_lanes_are_mixed():
    members = {"one": windows(2, 0), "other": windows(4, 3)}
    mixed = ReplayBufferMixture(members, HALF, batch_size=16, exact=False)
    for _ in range(20):
        batch = mixed.sample()
        assert batch["anchor_index"].shape == (16, 2)
        batch["td_error"] = torch.full((16,), 5.0)
        mixed.update_tensordict_priority(batch)
    assert float(members["one"].sampler.sampler.priorities.largest) == 5.0


def test_uniform_members_write_back_by_their_stamps():
    mixed = ReplayBufferMixture(
        {"one": numbered(0), "other": numbered(50)}, HALF, batch_size=8
    )
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
    mixed = ReplayBufferMixture({"one": one, "other": numbered(0)}, HALF, batch_size=4)

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
            storage=PackedStorage(size), sampler=ProportionalSampler(size)
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
    members = [
        (rb.chronological()["number"], rb.sampler.state_dict())
        for rb in mixed.members.values()
    ]
    return repr((members, mixed.sampler, mixed.state_dict()["generator"].tolist()))


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
        found = content(mixed)
        assert found in allowed, line
        seen.add(found)
        if stopper.left > 0:
            break
    assert len(seen) == 2
