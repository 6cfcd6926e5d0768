"""Lanes that advance alone, against lists: random writes to single lanes and to all, for every sampler and wrapper."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import PrioritizedSampler, RandomSampler, SamplerWithoutReplacement, SliceSampler

from rlbuf_td import (
    EpisodeSampler,
    EpisodeStats,
    FreshRowsSampler,
    HindsightSampler,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    ReplayBufferMixture,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.diagnostics.doctor import check as examine
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.statistics import assert_follows, power

GAMMA = 0.9


class Lists:
    """What a buffer of lanes should hold: all rows ever written, a list per lane."""

    def __init__(self, steps: int, lanes: int, seed: int, has_ids: bool) -> None:
        self.steps, self.lanes, self.has_ids = steps, lanes, has_ids
        self.rng = random.Random(seed)
        self.rows: list[list[dict[str, Any]]] = [[] for _ in range(lanes)]
        self.ids, self.cuts = [0] * lanes, [set[int]() for _ in range(lanes)]

    def make(self, lane: int) -> dict[str, Any]:
        """Return a new row of a lane."""
        done = self.rng.random() < 0.15
        if self.has_ids and self.rng.random() < 0.1:
            self.ids[lane] += 1
        number = len(self.rows[lane])
        row = {"x": lane * 10_000 + number, "done": done, "id": self.ids[lane], "reward": self.rng.gauss(0, 1)}
        self.rows[lane].append(row)
        return row

    def data(self, lanes: list[int]) -> TensorDict:
        rows = [self.make(lane) for lane in lanes]
        column = {name: torch.tensor([row[name] for row in rows]) for name in ("x", "done", "id", "reward")}
        done = column["done"][:, None]
        following = {"reward": column["reward"][:, None], "done": done, "terminated": done, "x": column["x"]}
        following |= {"achieved": column["x"][:, None].float()}
        data = TensorDict({"x": column["x"], "goal": torch.zeros(len(rows), 1), "next": following}, [len(rows)])
        if self.has_ids:
            data["collector", "traj_ids"] = column["id"]
        return data

    def schema(self) -> TensorDict:
        empty = Lists(1, 1, 0, self.has_ids).data([0])
        return empty[0].expand(self.lanes)

    def stored(self, lane: int) -> range:
        """Return the numbers of the rows that the buffer should still hold."""
        return range(max(0, len(self.rows[lane]) - self.steps), len(self.rows[lane]))

    def follows(self, lane: int, number: int) -> bool:
        """Whether row ``number`` of a lane continues the trajectory of the row before."""
        before, row = self.rows[lane][number - 1], self.rows[lane][number]
        return number not in self.cuts[lane] and not before["done"] and (not self.has_ids or before["id"] == row["id"])

    def trajectory(self, lane: int, number: int) -> tuple[int, int, bool]:
        stored = self.stored(lane)
        first = last = number
        while first > stored.start and self.follows(lane, first):
            first -= 1
        while last + 1 < stored.stop and self.follows(lane, last + 1):
            last += 1
        row = self.rows[lane][last]
        is_renamed = last + 1 < stored.stop and self.has_ids and self.rows[lane][last + 1]["id"] != row["id"]
        return first, last, row["done"] or is_renamed

    def cut(self) -> None:
        """Note a load: with ids, what is written next begins new trajectories."""
        for lane in range(self.lanes):
            if self.has_ids:
                self.cuts[lane].add(len(self.rows[lane]))

    def check(self, rb: ReplayBuffer) -> None:
        held = [(lane, number) for lane in range(self.lanes) for number in self.stored(lane)]
        assert len(rb) == len(held)
        index = TrajectoryIndex.of(rb.storage)
        for lane in range(self.lanes):
            stored = self.stored(lane)
            assert len(rb.lane(lane)) == len(stored)
            if not len(stored):
                continue
            assert rb.lane(lane).chronological()["x"].tolist() == [self.rows[lane][k]["x"] for k in stored]
            at = torch.tensor([k % self.steps for k in stored])
            assert rb.storage.get((at, torch.full_like(at, lane)))["x"].tolist() == [
                self.rows[lane][k]["x"] for k in stored
            ]
            back, ahead, over = index.reach((at, torch.full_like(at, lane)))
            found = zip(stored, back.tolist(), ahead.tolist(), over.tolist(), strict=True)
            assert [(k - b, k + a, o) for k, b, a, o in found] == [self.trajectory(lane, k) for k in stored]

    def check_batch(self, batch: TensorDictBase, n: int = 1, goals: bool = False) -> int:
        """Check each row of a batch of n-step returns; return the number of rows."""
        for row in batch.unbind(0):
            lane, number = divmod(int(row["x"]), 10_000)
            assert number in self.stored(lane)
            assert row["index"].tolist() == [number % self.steps, lane]
            _, last, _ = self.trajectory(lane, number)
            end = min(last, number + n - 1)
            rewards = [self.rows[lane][k]["reward"] for k in range(number, end + 1)]
            if not goals:
                expected = sum(GAMMA**j * r for j, r in enumerate(rewards)) if n > 1 else rewards[0]
                assert abs(float(row["next", "reward"]) - expected) < 1e-5
                assert int(row["next", "x"]) == self.rows[lane][end]["x"]
                assert bool(row["next", "done"]) == self.rows[lane][end]["done"]
            elif bool(row["relabeled"]):
                goal_lane, goal = divmod(int(row["goal"]), 10_000)
                assert goal_lane == lane
                assert number <= goal <= last
        return len(batch)

    def check_windows(self, batch: TensorDictBase) -> int:
        """Check windows of one row before the anchor and three from it on; return the number of rows."""
        for window in batch.view(-1, 4).unbind(0):
            lane, anchor = divmod(int(window["x"][1]), 10_000)
            assert anchor in self.stored(lane)
            first, last, _ = self.trajectory(lane, anchor)
            expected = [lane * 10_000 + min(max(anchor + k, first), last) for k in range(-1, 3)]
            assert window["x"].tolist() == expected
            assert window["mask"].tolist() == [first <= anchor + k <= last for k in range(-1, 3)]
        return len(batch)


def make_buffer(lists: Lists, sampler: Any, *, shared: bool = False, **kwargs: Any) -> ReplayBuffer:
    options = {name: kwargs.pop(name) for name in ("share_next", "scratch_dir") if name in kwargs}
    storage = PackedStorage(lists.steps * lists.lanes, ndim=2, **options)
    rb = ReplayBuffer(storage=storage, sampler=sampler, **kwargs)
    rb.storage.reserve(lists.schema())
    if shared:
        rb.share()
    return rb


def write_randomly(lists: Lists, rb: ReplayBuffer) -> None:
    """Write some rows to single lanes or to all, in one of the ways that there are."""
    rng, lanes = lists.rng, lists.lanes
    way = rng.choice(["mixed", "mixed", "one", "step", "steps"])
    slow = rng.randrange(lanes)  # a lane that falls behind
    if way == "mixed":
        ids = [lane for lane in (rng.randrange(lanes) for _ in range(rng.randint(1, 3 * lists.steps))) if lane != slow]
        if ids:
            index = rb.extend(lists.data(ids), lanes=torch.tensor(ids))
            assert index[:, 1].tolist() == ids
    elif way == "one":
        rb.extend(lists.data([slow] * rng.randint(1, 2 * lists.steps + 1)), lanes=slow)
    elif way == "step":
        rb.add(torch.cat([lists.data([lane]) for lane in range(lanes)]))
    else:
        n = rng.randint(1, lists.steps + 2)
        rb.extend(torch.stack([lists.data([lane] * n) for lane in range(lanes)]))  # [E, n]


def same_reward(batch: TensorDictBase) -> torch.Tensor:
    return batch["next", "reward"]


GOALS: dict[str, Any] = {"goal_key": "goal", "achieved_goal_key": "achieved"}
SAMPLERS: dict[str, Any] = {
    "uniform": lambda size: UniformSampler(),
    "unique": lambda size: UniformSampler(unique=True),
    "proportional": ProportionalSampler,
    "rank": RankSampler,
    "recency": lambda size: RecencySampler(half_life=3.0, window=5),
    "minibatch": lambda size: MinibatchSampler(),
    "at most 2 old": lambda size: UniformSampler(max_age=2),
    "recent, at most 2 old": lambda size: RecencySampler(4.0, max_age=2),
    "n-step": lambda size: NStepSampler(ProportionalSampler(size), 3, GAMMA),
    "fresh": lambda size: FreshRowsSampler(ProportionalSampler(size), 2),
    "windows of fresh": lambda size: SequenceSampler(FreshRowsSampler(RankSampler(size), 2), 3, burn_in=1),
    "hindsight": lambda size: HindsightSampler(UniformSampler(), same_reward, **GOALS),
    "n-step of hindsight": lambda size: NStepSampler(
        HindsightSampler(UniformSampler(), same_reward, **GOALS), 3, GAMMA
    ),
}


def unlike(sampler: Any, seed: int = 0, steps: int = 12) -> tuple[Lists, ReplayBuffer]:
    """Return a buffer whose lanes hold 1, 5 and 12 rows, the last of a lane that was written 30 times."""
    lists = Lists(steps, 3, seed, has_ids=False)
    rb = make_buffer(lists, sampler)
    for lane, count in ((0, 1), (1, 5), (2, 30)):
        rb.extend(lists.data([lane] * count), lanes=lane)
    return lists, rb


def counts_of(rb: ReplayBuffer, draws: int) -> torch.Tensor:
    counts = torch.zeros(36)
    for _ in range(draws // 1_000):
        index = rb.sample(1_000)["index"]
        counts += torch.bincount(index[:, 0] * 3 + index[:, 1], minlength=36)
    return counts


def held(rb: ReplayBuffer) -> torch.Tensor:
    """Return which cells ``[36]`` hold rows, and the age of each."""
    newest, count = rb.storage.heads.read(rb.storage)
    step, lane = np.divmod(np.arange(36), 3)
    age = (newest[lane] - step) % 12
    return torch.from_numpy(np.where(step < count[lane], age, -1))


@pytest.mark.parametrize("name", ["uniform", "proportional", "rank", "recency", "half-life"])
def test_laws_hold_in_lanes_of_unlike_lengths(name: str) -> None:
    makers = SAMPLERS | {"half-life": lambda size: RecencySampler(half_life=2.0)}
    sampler = makers[name](36)
    _, rb = unlike(sampler)
    rb.set_rng(torch.Generator().manual_seed(3))
    age = held(rb)
    flat = (age >= 0).nonzero().flatten()
    weight = torch.zeros(36, dtype=torch.float64)
    if name == "uniform":
        weight[flat] = 1.0
    elif name in ("proportional", "rank"):
        error = torch.rand(len(flat), generator=torch.Generator().manual_seed(5)) + 0.1
        sampler.update_priority(torch.stack((flat // 3, flat % 3), 1), error, storage=rb.storage)
        if name == "proportional":
            weight[flat] = (error.double() + sampler.eps) ** sampler.alpha
        else:
            weight[flat[error.argsort(descending=True)]] = (
                torch.arange(1.0, 19.0, dtype=torch.float64) ** -sampler.alpha
            )
    else:
        half_life, window = (3.0, 5) if name == "recency" else (2.0, 12)
        weight[flat] = torch.where(age[flat] < window, 2.0 ** (-age[flat].double() / half_life), 0.0)
    probability = weight / weight.sum()
    if hasattr(sampler, "probability"):
        found = sampler.probability((flat // 3, flat % 3), storage=rb.storage)
        torch.testing.assert_close(found, probability[flat], rtol=1e-6, atol=1e-9)
    assert power(probability[probability > 0].numpy(), 400_000, 0.02) > 0.95
    assert_follows(counts_of(rb, 400_000), probability)


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_importance_weights_count_only_written_rows(sampler: Any) -> None:
    _, rb = unlike(sampler(36, weight_norm=None, beta=1.0))
    flat = (held(rb) >= 0).nonzero().flatten()
    rb.sampler.update_priority((flat // 3, flat % 3), torch.arange(1.0, 19.0), storage=rb.storage)
    for _ in range(3):
        batch = rb.sample(16)
        probability = rb.sampler.probability(tuple(batch["index"].unbind(1)), storage=rb.storage)
        torch.testing.assert_close(batch["priority_weight"].double(), 1 / (18 * probability), rtol=1e-5, atol=0)


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("largest", [0.3, 7.7, 1e39])
@pytest.mark.parametrize("shared", [False, True])
def test_new_rows_of_single_lanes_get_the_largest_magnitude(
    sampler: Any, count: int, largest: float, shared: bool
) -> None:
    rb = ReplayBuffer(storage=PackedStorage(300, ndim=2, lanes=3, shared=shared), sampler=sampler(300), batch_size=4)
    rb.extend(TensorDict({"x": torch.arange(10)}, [10]), lanes=1)
    rb.update_priority(rb.sample()["index"][:1], torch.tensor([largest], dtype=torch.float64))
    stored = largest if sampler is ProportionalSampler else min(largest, torch.finfo(torch.float32).max)
    for _ in range(4):  # torch serves the first write, compiled code the others
        index = rb.extend(TensorDict({"x": torch.arange(count)}, [count]), lanes=torch.arange(count) % 2 * 2)
        assert rb.sampler.priority(index, storage=rb.storage).tolist() == pytest.approx([stored] * count, rel=1e-6)
    assert "extend" in rb.compiled.partition("not")[0]


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_a_second_buffer_gives_priorities_to_written_rows_only(sampler: Any) -> None:
    _, rb = unlike(UniformSampler())
    other = ReplayBuffer(storage=rb.storage, sampler=sampler(36))
    assert ((other.sampler.priority(torch.arange(36)) >= 0) == (held(rb) >= 0)).all()
    assert len(other.sample(16)) == 16


def test_random_goals_come_from_all_written_rows_alike() -> None:
    sampler = HindsightSampler(UniformSampler(), same_reward, her_ratio=1.0, strategy="random", **GOALS)
    lists, rb = unlike(sampler)
    rb.set_rng(torch.Generator().manual_seed(0))
    goals = torch.cat([rb.sample(1_000)["goal"].flatten() for _ in range(100)]).long()
    rows = [lists.rows[lane][k]["x"] for lane in range(3) for k in lists.stored(lane)]
    counts = torch.tensor([int((goals == row).sum()) for row in rows])
    assert int(counts.sum()) == len(goals)
    assert_follows(counts, torch.full((len(rows),), 1 / len(rows), dtype=torch.float64))


def test_windows_of_sequences_stay_in_their_lane() -> None:
    for seed in range(5):
        lists, rb = unlike(SequenceSampler(ProportionalSampler(36), 3, burn_in=1), seed)
        assert lists.check_windows(rb.sample(200)) == 200


@pytest.mark.parametrize("steps", [12, 7, 20, 3])
@pytest.mark.parametrize("dedup", [False, ["x"]], ids=["plain", "share_next"])
def test_dumps_keep_the_newest_rows_of_each_lane(tmp_path: Any, steps: int, dedup: Any) -> None:
    lists = Lists(12, 3, 1, has_ids=True)
    rb = make_buffer(lists, ProportionalSampler(36), share_next=dedup)
    for lane, count in ((0, 1), (1, 5), (2, 30)):
        rb.extend(lists.data([lane] * count), lanes=lane)
    batch = rb.sample(16)
    batch["td_error"] = batch["x"] / 1_000.0 + 1.0
    rb.update_tensordict_priority(batch)
    flat = (held(rb) >= 0).nonzero().flatten()
    old = dict(
        zip(rb.storage.get((flat // 3, flat % 3))["x"].tolist(), rb.sampler.priority(flat).tolist(), strict=True)
    )
    rb.dumps(tmp_path / "dump")
    smaller = Lists(min(steps, 12), 3, 1, has_ids=True)
    smaller.rows, smaller.ids, smaller.rng = lists.rows, lists.ids, lists.rng
    other = ReplayBuffer(
        storage=PackedStorage(3 * steps, ndim=2, share_next=dedup),
        sampler=ProportionalSampler(3 * steps),
        batch_size=16,
    )
    if steps < 12:
        with pytest.warns(UserWarning, match="oldest time steps of the dump were dropped"):
            other.loads(tmp_path / "dump")
    else:
        other.loads(tmp_path / "dump")
    for lane in range(3):
        rows = other.lane(lane).chronological()
        assert rows["x"].tolist() == [smaller.rows[lane][k]["x"] for k in smaller.stored(lane)]
    index = other.sample(500)["index"]
    rows = other.storage.get(tuple(index.unbind(1)))["x"].tolist()
    assert other.sampler.priority(index, storage=other.storage).tolist() == [old[row] for row in rows]
    if steps == 12:
        lists.cut()
        for _ in range(5):
            write_randomly(lists, other)
        lists.check(other)


def test_statistics_count_the_episodes_of_each_lane() -> None:
    lists = Lists(50, 3, 4, has_ids=False)
    rb = make_buffer(lists, UniformSampler(), stats=EpisodeStats())
    for _ in range(20):
        write_randomly(lists, rb)
    expected = []
    for rows in lists.rows:
        total, length = 0.0, 0
        for row in rows:
            total, length = total + row["reward"], length + 1
            if row["done"]:
                expected.append((length, round(total, 3)))
                total, length = 0.0, 0
    stats: Any = rb.episode_stats
    history = stats.history()
    found = zip(history["length"].tolist(), history["return"].tolist(), strict=True)
    assert sorted((int(length), round(total, 3)) for length, total in found) == sorted(expected)
    assert len(expected) > 20


@pytest.mark.parametrize("by", ["episode", "row"])
def test_whole_episodes_of_lanes_of_unlike_lengths_are_found(by: Any) -> None:
    for seed in range(6):
        lists, rb = unlike(EpisodeSampler(by=by), seed)
        expected: dict[int, int] = {}
        for lane in range(3):
            for k in lists.stored(lane):
                first, last, ended = lists.trajectory(lane, k)
                begins = first == 0 or not lists.follows(lane, first)
                if ended and begins:
                    expected[lists.rows[lane][first]["x"]] = last - first + 1
        # A lane that got more rows at once than it holds does not know where its oldest trajectory begins.
        oldest = lists.rows[2][lists.stored(2).start]["x"]
        batch = rb.sample(300) if expected.keys() - {oldest} else None
        if batch is not None:
            lengths = batch["mask"].sum(1)
            found = dict(zip(batch["x"][:, 0].tolist(), lengths.tolist(), strict=True))
            expected.pop(oldest, None)
            assert found == expected


def test_health_and_doctor_see_only_written_rows() -> None:
    _, rb = unlike(ProportionalSampler(36))
    rb.sample(16)
    report = rb.health()
    assert report["rows"] == 18.0
    assert report["fill"] == 0.5
    assert 0 <= report["age_p50"] < 12
    assert report["priority_p50"] == 1.0
    assert not rb.full
    assert examine(rb).rows == 18


def test_lanes_that_meet_again_stand_together() -> None:
    lists, rb = unlike(UniformSampler())
    assert rb.last(1)["x"].tolist() == [[0, 10_004, 20_029]]
    for lane, count in ((0, 29), (1, 25)):
        rb.extend(lists.data([lane] * count), lanes=lane)
    assert rb.full
    assert rb.chronological()["x"][:, 1].tolist() == list(range(10_018, 10_030))
    rb.extend(torch.stack([lists.data([lane] * 3) for lane in range(3)]))
    lists.check(rb)


def act(lane: Any, steps: int, is_killed: bool) -> None:
    for step in range(steps):
        after = {"reward": torch.ones(1), "done": torch.tensor([False])}
        lane.add(TensorDict({"step": torch.tensor(step), "next": after}))
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_actor_that_replaces_another_begins_an_episode(is_killed: bool) -> None:
    """Also in mid-episode of a process that was killed, whose handle another process inherits."""
    rb = ReplayBuffer(storage=PackedStorage(100, ndim=2, lanes=2), sampler=NStepSampler(UniformSampler(), 3, 1.0))
    rb = rb.share() if is_killed else rb
    other, inherited = rb.lane(1), rb.lane(0)
    for steps in (5, 7):
        act(other, 1, False)  # goes on with its episode
        if is_killed:
            actor = mp.get_context("fork").Process(target=act, args=(inherited, steps, steps == 5))
            actor.start()
            actor.join(60)
        else:
            act(rb.lane(0), steps, False)
    lengths = [TrajectoryIndex.of(rb.storage).length(torch.arange(length) * 2 + e) for e, length in ((0, 12), (1, 2))]
    assert [each.tolist() for each in lengths] == [[5] * 5 + [7] * 7, [2, 2]]
    batch = rb.sample(500)
    at_end = batch["index"][:, 0] == 4
    assert (batch["steps_to_next_obs"][at_end & (batch["index"][:, 1] == 0)] == 1).all()


def test_the_first_write_to_a_lane_allocates_rows_for_as_many_lanes_as_were_given() -> None:
    lists = Lists(7, 3, 2, has_ids=True)
    rb = ReplayBuffer(storage=PackedStorage(21, ndim=2, lanes=3))
    assert len(rb.lane(2)) == 0
    rb.lane(2).extend(lists.data([2, 2]))
    for _ in range(5):
        write_randomly(lists, rb)
    lists.check(rb)


@pytest.mark.parametrize("shared", [False, True])
def test_lanes_may_be_an_entry_of_the_data(shared: bool) -> None:
    lists = Lists(20, 4, 3, has_ids=True)
    rb = ReplayBuffer(storage=PackedStorage(80, ndim=2, lanes=4, shared=shared), lane_key="env_id")

    def with_ids(lanes: list[int]) -> TensorDict:
        return lists.data(lanes).set("env_id", torch.tensor(lanes))

    index = rb.extend(with_ids([3, 1, 3]))
    assert index.tolist() == [[0, 3], [0, 1], [1, 3]]
    rb.extend(torch.stack([with_ids([0] * 5), with_ids([2] * 5)]))  # [E, T], of a collector with two lanes
    rb.add(with_ids([1])[0])
    rb.add(with_ids([0, 2]))
    lists.check(rb)


def test_torchrls_random_sampler_draws_only_written_rows() -> None:
    lists, rb = unlike(UniformSampler())
    theirs = TensorDictReplayBuffer(storage=rb.storage, sampler=RandomSampler(), batch_size=2_000)
    rows = theirs.sample()
    assert set(rows["x"].tolist()) == {lists.rows[lane][k]["x"] for lane in range(3) for k in lists.stored(lane)}
    assert_follows(rows["x"].unique(return_counts=True)[1], torch.full((18,), 1 / 18, dtype=torch.float64))


@pytest.mark.parametrize(("sampler", "instead"), [
    (SamplerWithoutReplacement(), "MinibatchSampler"),
    (PrioritizedSampler(36, 0.6, 0.4), "ProportionalSampler"),
    (SliceSampler(slice_len=2, end_key=("next", "done"), strict_length=False), 'SequenceSampler.*boundary="strict"'),
])  # fmt: skip
def test_torchrls_samplers_that_draw_holes_name_what_to_use_instead(sampler: Any, instead: str) -> None:
    _, rb = unlike(UniformSampler())
    theirs = TensorDictReplayBuffer(storage=rb.storage, sampler=sampler, batch_size=4_000)
    kind = type(sampler).__name__
    with pytest.raises(IndexError, match=f"has not been written.*TorchRL's {kind} draws such rows.*use.*{instead}"):
        theirs.sample()


@pytest.mark.parametrize("dedup", [False, ["x"]], ids=["plain", "share_next"])
def test_edits_leave_holes_zero(dedup: Any) -> None:
    lists = Lists(12, 3, 0, has_ids=False)
    rb = make_buffer(lists, UniformSampler(), share_next=dedup)
    for lane, count in ((0, 1), (1, 5), (2, 30)):
        rb.extend(lists.data([lane] * count), lanes=lane)
    rb.set_at_("goal", torch.tensor([[7.0]]), (torch.tensor([0]), torch.tensor([0])))
    assert rb.storage["goal"][0, 0] == 7.0
    if dedup:
        return
    rb.storage["x"] = rb.storage["x"] + 1  # a whole column, and no holes
    lists.rows = [[row | {"x": row["x"] + 1} for row in rows] for rows in lists.rows]
    lists.check(rb)
    assert dedup or not rb.storage["x"][5:, 0].any()


def test_lanes_are_restored_from_a_dump_of_the_storage(tmp_path: Any) -> None:
    lists, rb = unlike(UniformSampler())
    rb.storage.dumps(tmp_path / "unlike")
    alike = Lists(12, 3, 5, has_ids=False)
    other = make_buffer(alike, UniformSampler())
    other.extend(torch.stack([alike.data([lane] * 4) for lane in range(3)]))
    other.storage.dumps(tmp_path / "alike")
    other.storage.loads(tmp_path / "unlike")
    lists.check(other)
    rb.storage.loads(tmp_path / "alike")
    alike.check(rb)


def test_a_state_goes_into_another_capacity_unless_a_lane_is_full() -> None:
    for steps in (20, 8):
        lists = Lists(12, 3, 0, has_ids=False)
        rb = make_buffer(lists, ProportionalSampler(60))
        rb.extend(lists.data([1] * 3 + [2] * 7), lanes=[1] * 3 + [2] * 7)
        into = Lists(steps, 3, 1, has_ids=False)
        other = make_buffer(into, ProportionalSampler(60))
        other.load_state_dict(rb.state_dict())
        into.rows = lists.rows
        for _ in range(4):
            into.check(other)
            write_randomly(into, other)
        into.check(other)
    lists, rb = unlike(UniformSampler())
    for steps, message in ((20, "not 20; rb.dumps and rb.loads"), (8, "rb.dumps and rb.loads")):
        into = Lists(steps, 3, 0, has_ids=False)
        other = make_buffer(into, UniformSampler())
        other.extend(into.data([1, 1]), lanes=1)
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(rb.state_dict())
        into.check(other)
    with pytest.raises(ValueError, match=r"lanes \(3,\) do not fit lanes \(4,\): copy lane after lane"):
        make_buffer(Lists(12, 4, 0, has_ids=False), UniformSampler()).load_state_dict(rb.state_dict())


def test_a_mixture_writes_to_lanes_of_a_member() -> None:
    lists, rb = unlike(UniformSampler())
    mixture = ReplayBufferMixture({"one": rb}, {"one": 1.0}, writes_to="one", batch_size=4)
    mixture.extend(lists.data([0, 1, 0]), lanes=[0, 1, 0])
    lists.check(rb)
