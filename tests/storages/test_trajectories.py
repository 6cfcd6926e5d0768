"""Trajectories by example: what the index is asked and told, what ends them, that
alternating rows are reported."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import (
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)

from rlbuf_td import (
    EpisodeStats,
    HindsightSampler,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    RowSampler,
    SequenceSampler,
    TrajectoryIndex,
    UniformSampler,
)
from tests.backends import forced
from tests.catalogue import numbered_rows
from tests.test_lockstep import forked


def steps(
    done: list[int],
    *,
    ids: list[int] | None = None,
    key: tuple[str, ...] = ("next", "done"),
) -> TensorDict:
    data = TensorDict({"x": torch.arange(len(done))}, [len(done)])
    data[key] = torch.tensor(done, dtype=torch.bool).unsqueeze(-1)
    if ids is not None:
        data["collector", "traj_ids"] = torch.tensor(ids)
    return data


def reach(index: TrajectoryIndex, rows: int) -> list[tuple[int, int, bool]]:
    found = index.reach(torch.arange(rows))
    return list(zip(*(part.tolist() for part in found), strict=True))


def test_rows_are_named_in_every_form():
    rb = ReplayBuffer(storage=PackedStorage(12, ndim=2))
    done = torch.tensor([[0, 1], [0, 0], [1, 0]], dtype=torch.bool)  # [T, E]
    rows = rb.extend(TensorDict({"next": {"done": done.T}}, [2, 3]))
    index = TrajectoryIndex(rb.storage)
    flat = torch.arange(6)
    t, e = flat // 2, flat % 2
    for form in (flat, (t, e), torch.stack([t, e], -1), rows, flat.int()):
        assert index.steps_back(form).tolist() == [0, 0, 1, 0, 2, 1]
        assert index.steps_ahead(form).tolist() == [2, 0, 1, 1, 0, 0]
        assert index.ended(form).tolist() == [True, True, True, False, True, False]
        assert index.length(form).tolist() == [3, 1, 3, 2, 3, 2]
    back, ahead, ended = index.reach(flat[:0])
    assert (back.shape, ahead.dtype, ended.dtype) == ((0,), torch.int64, torch.bool)


def test_a_storage_has_one_pair_of_keys():
    rb = ReplayBuffer(storage=PackedStorage(4))
    data = steps([0, 0, 1, 0], ids=[0, 1, 1, 1])
    data["end"] = torch.tensor([1, 0, 0, 0]).bool()
    rb.extend(data)
    index = TrajectoryIndex(rb.storage, done_key="end", traj_key=None)
    assert [found[0] for found in reach(index, 4)] == [0, 0, 1, 2]
    assert TrajectoryIndex(
        rb.storage, done_key=("end",), traj_key=None
    ).keys.done_key == ("end",)
    with pytest.raises(
        ValueError,
        match=r"done_key=\('end',\) and traj_key=None, not by .*use one pair",
    ):
        TrajectoryIndex(rb.storage)


@pytest.mark.parametrize("often", [0.01, 0.0])
def test_a_large_random_ring_by_numpy(often):
    """A million rows, ten thousand trajectories or one: every row at once, against a
    cumulative count."""
    rng = np.random.default_rng(0)
    n, capacity = 1_300_001, 1_000_000
    done = rng.random(n) < often
    rb = ReplayBuffer(storage=PackedStorage(capacity))
    index = TrajectoryIndex(rb.storage)
    for part in np.split(done, [1, 400_000, 999_999, 1_000_002]):
        rb.extend(TensorDict({"next": {"done": torch.from_numpy(part)}}, [len(part)]))
    kept = done[-capacity:]
    at = np.arange(capacity)
    first = np.maximum.accumulate(np.where(np.append(True, kept[:-1]), at, 0))
    last = np.minimum.accumulate(
        np.where(np.append(kept[:-1], True), at, capacity)[::-1]
    )[::-1]
    rows = torch.from_numpy((at + n - capacity) % capacity)
    back, ahead, ended = index.reach(rows)
    assert np.array_equal(back.numpy(), at - first)
    assert np.array_equal(ahead.numpy(), last - at)
    assert np.array_equal(ended.numpy(), kept[last])
    assert index.nbytes == 8 * capacity + 16
    assert f"{index.nbytes:,} bytes" in repr(index)


@pytest.mark.parametrize("ndim", [1, 2])
def test_done_flags_that_are_edited_through_a_view_end_trajectories(ndim):
    rb = ReplayBuffer(
        storage=PackedStorage(64, ndim=ndim),
        sampler=NStepSampler(UniformSampler(), 3, 0.9),
        batch_size=64,
    )
    shape = (64,) if ndim == 1 else (2, 32)
    after = {
        "reward": torch.ones(*shape, 1),
        "done": torch.zeros(*shape, 1, dtype=torch.bool),
    }
    rb.extend(TensorDict({"x": torch.zeros(shape), "next": after}, shape))
    rb.sample(), rb.sample()
    rb["next", "done"].fill_(True)
    assert rb.sample()["steps_to_next_obs"].eq(1).all()
    rb["next", "done"][:] = False
    assert rb.sample()["steps_to_next_obs"].max() == 3


@pytest.mark.parametrize(
    ("how", "edits_before"), [("pickled", True), ("shared", False), ("moved", False)]
)
def test_an_edit_is_noticed_whatever_happens_to_the_rows_around_it(how, edits_before):
    rb = ReplayBuffer(storage=PackedStorage(8))
    rb.extend(steps([0] * 8))
    rb["next", "done"].fill_(True)
    assert reach(TrajectoryIndex(rb.storage), 8) == [(0, 0, True)] * 8
    if edits_before:
        rb["next", "done"].fill_(False)
    if how == "pickled":
        rb = pickle.loads(pickle.dumps(rb))
    elif how == "shared":
        rb.share()
    else:
        rb.storage[:]["x"].share_memory_()
    if not edits_before:
        rb["next", "done"].fill_(False)
    assert reach(TrajectoryIndex(rb.storage), 8) == [
        (j, 7 - j, False) for j in range(8)
    ]
    rb.extend(steps([0]))
    assert reach(TrajectoryIndex(rb.storage), 8)[0] == (7, 0, False)


def of_one(first: int, *, done: bool) -> TensorDict:
    """Return 10 steps of the trajectory 0, with observations from ``first`` on."""
    here, ends = (
        torch.arange(float(first), first + 10).unsqueeze(-1),
        torch.zeros(10, 1, dtype=torch.bool),
    )
    ends[-1] = done
    after = {
        "observation": here + 1,
        "achieved_goal": here + 1,
        "reward": torch.ones(10, 1),
        "done": ends,
    }
    now = {
        "observation": here,
        "desired_goal": here,
        "collector": {"traj_ids": torch.zeros(10, dtype=torch.int64)},
    }
    return TensorDict(
        now | {"next": after | {"terminated": ends, "desired_goal": here}}, [10]
    )


def loadable() -> ReplayBuffer:
    hindsight = HindsightSampler(
        UniformSampler(), lambda batch: torch.zeros(len(batch), 1), her_ratio=1.0
    )
    sampler = NStepSampler(hindsight, n_steps=5, gamma=1.0)
    rb = ReplayBuffer(
        storage=PackedStorage(100),
        sampler=sampler,
        batch_size=256,
        stats=EpisodeStats(),
    )
    rb.empty()  # the buffer is there
    return rb


@pytest.mark.parametrize(
    "how", ["dump", "rows", "state", "storage dump", "storage state"]
)
def test_no_trajectory_goes_on_after_a_load(how, tmp_path: Path):
    saved, rb = loadable(), loadable()
    saved.extend(of_one(0, done=False))
    if how == "state":
        rb.load_state_dict(saved.state_dict())
    elif how == "storage state":
        rb.storage.load_state_dict(saved.storage.state_dict())
        rb.writer.load_state_dict(saved.writer.state_dict())
    elif how == "storage dump":
        saved.storage.dumps(tmp_path)
        rb.storage.loads(tmp_path)
        rb.writer.load_state_dict(saved.writer.state_dict())
    else:
        saved.dumps(tmp_path)
        rb.loads(tmp_path, rows_only=how == "rows")
    rb.extend(of_one(100, done=True))
    batch = rb.sample()
    first, last = batch["observation"] < 50, batch["next", "observation"] < 50
    goals = batch["desired_goal"] < 50
    assert len(rb) == 20
    assert first.any()
    assert not first.all()
    assert torch.equal(first, last)
    assert torch.equal(first, goals)
    assert rb.episode_stats is not None
    assert rb.episode_stats.history()["length"].tolist() == [10]


STRETCHES = r"stored in stretches of 1\.0 rows on average, .* alternate: .* PackedStorage\(\.\.\., ndim=2\)"
SAMPLERS: dict[str, Any] = {
    "n-step": lambda: NStepSampler(UniformSampler(), 5, 0.9),
    "sequences": lambda: SequenceSampler(ProportionalSampler(200), 8),
    "hindsight": lambda: HindsightSampler(
        UniformSampler(), lambda batch: batch["next", "reward"]
    ),
}


def interleaved(
    steps: int, lanes: int, length: int = 20, ids: bool = True, flags: bool = True
) -> TensorDict:
    """Return transitions ``[T, E]`` of episodes of ``length`` steps, all lanes at the
    same step."""
    step = torch.arange(steps)[:, None].expand(steps, lanes)
    done = (step % length == length - 1).unsqueeze(-1)
    state = (step * lanes + torch.arange(lanes)).unsqueeze(-1).float()
    following = {
        "observation": state + lanes,
        "achieved_goal": state,
        "reward": torch.ones_like(state),
    }
    data = TensorDict(
        {"observation": state, "desired_goal": state.clone(), "next": following},
        [steps, lanes],
    )
    if flags:
        data["next", "done"] = done
    if ids:
        data["collector", "traj_ids"] = (step // length) * lanes + torch.arange(lanes)
    return data.clone()


def over(
    sampler: Any, cls: Any = ReplayBuffer, storage: Any = PackedStorage, ndim: int = 1
) -> Any:
    return cls(storage=storage(200, ndim=ndim), sampler=sampler, batch_size=16)


@pytest.mark.parametrize(
    ("kind", "steps", "flags"),
    [
        ("n-step", 1, True),
        ("n-step", 40, False),
        ("sequences", 40, True),
        ("hindsight", 40, True),
    ],
)
def test_interleaved_trajectories_are_reported_once_with_the_mean_stretch(
    kind: str, steps: int, flags: bool
) -> None:
    rb = over(SAMPLERS[kind]())
    # too few rows to tell
    rb.extend(interleaved(steps, 4, flags=flags)[0, :1].flatten())
    rb.sample()
    rb.extend(interleaved(steps, 4, flags=flags).flatten()[1:])
    with pytest.warns(RuntimeWarning, match=STRETCHES):
        rb.sample()
    for _ in range(20):
        rb.sample()
    assert rb.compiled.startswith("add, extend, sample")
    assert rb.health()["stretch_mean"] == 1.0


MIXED = r"environments alternate in the rows, .* mix the environments. .* PackedStorage\(\.\.\., ndim=2\)"


@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_environments_that_alternate_without_ids_are_reported_once(
    kind: str, share_next: bool
) -> None:
    storage = PackedStorage(400, share_next=share_next)
    rb = ReplayBuffer(storage=storage, sampler=SAMPLERS[kind](), batch_size=16)
    # too few rows to tell
    rb.extend(interleaved(40, 4, ids=False)[0].flatten())
    rb.sample()
    rb.extend(interleaved(40, 4, ids=False)[1:].flatten())
    with pytest.warns(RuntimeWarning, match=MIXED):
        rb.sample()
    for _ in range(20):
        rb.sample()
    assert rb.health()["stretch_mean"] > 10  # the flags do not show it


@pytest.mark.parametrize("lanes", [2, 16, 200])
def test_many_environments_that_alternate_are_reported_too(lanes: int) -> None:
    rb = ReplayBuffer(
        storage=PackedStorage(4_000), sampler=SAMPLERS["n-step"](), batch_size=16
    )
    rb.extend(interleaved(20, lanes, ids=False).flatten())
    with pytest.warns(RuntimeWarning, match=MIXED):
        rb.sample()


def observations_that_differ(rows: TensorDict) -> TensorDict:
    """Store next observations of another scale, which are nowhere else."""
    rows["next", "observation"] = rows["next", "observation"] * 2 + 0.5
    return rows


def observations_that_repeat(rows: TensorDict) -> TensorDict:
    """Store a few observations again and again."""
    rows["observation"] = rows["observation"] % 3
    rows["next", "observation"] = rows["next", "observation"] % 3
    return rows


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("change", [observations_that_differ, observations_that_repeat])
def test_other_observations_are_not_taken_for_environments_that_alternate(
    kind: str, change: Any
) -> None:
    rb = over(SAMPLERS[kind]())
    rb.extend(change(interleaved(120, 1, ids=False).flatten()))
    for _ in range(3):
        rb.sample()


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(
    "data",
    [
        interleaved(120, 1, length=1).flatten(),
        interleaved(120, 1, length=2).flatten(),
        interleaved(120, 1, length=2, flags=False).flatten(),
        interleaved(120, 1, length=2, ids=False).flatten(),
        interleaved(40, 3, ids=False).transpose(0, 1).flatten(),
        # 20 steps of one environment, then of the next
        interleaved(40, 3).transpose(0, 1).flatten(),
        interleaved(1, 1).flatten(),
    ],
    ids=[
        "1 step",
        "2 steps",
        "2 steps by id",
        "2 steps by flag",
        "no ids",
        "in pieces",
        "one row",
    ],
)
def test_short_episodes_and_whole_trajectories_are_not(
    kind: str, data: TensorDict
) -> None:
    rb = over(SAMPLERS[kind]())
    rb.extend(data)
    for _ in range(3):
        rb.sample()


def test_lanes_of_their_own_and_draws_of_single_rows_need_no_warning() -> None:
    rb = over(SAMPLERS["n-step"](), ndim=2)
    rb.extend(interleaved(40, 4).transpose(0, 1))
    rb.sample()
    assert rb.health()["stretch_mean"] == 20.0
    plain = over(UniformSampler())
    plain.extend(interleaved(40, 4).flatten())
    plain.sample()


# -- boundaries of episodes, and identities of rows, outlast loads, edits, kills, full
# rings and new rollouts


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def stored(
    first: int, ids: list[int], done: Iterable[int] = (), with_ids: bool = True
) -> TensorDict:
    """Rows that know their number ``x``; those whose number is in ``done`` end an
    episode."""
    x = torch.arange(first, first + len(ids))
    ends = torch.tensor([number in {*done} for number in x.tolist()])[:, None]
    after = {
        "reward": x[:, None].float(),
        "done": ends,
        "terminated": ends,
        "state_value": torch.zeros(len(x), 1),
    }
    data = TensorDict(
        {"x": x, "note": torch.zeros(len(x), 1), "state_value": torch.zeros(len(x), 1)},
        [len(x)],
    )
    data["next"] = TensorDict(after, [len(x)])
    return data.set(("collector", "traj_ids"), torch.tensor(ids)) if with_ids else data


@pytest.mark.parametrize("shared", [False, True])
def test_keys_that_are_named_after_the_rows_find_the_same_episodes(shared) -> None:
    found = []
    for is_early in (True, False):
        storage = PackedStorage(8, shared=shared)
        if is_early:
            TrajectoryIndex(storage, done_key="end", traj_key=None)
        ends = torch.zeros(13, dtype=torch.bool)
        ends[[7, 9]] = True  # the beginning of the oldest episode is gone
        rb: Any = ReplayBuffer(storage=storage)
        data = stored(0, [0] * 13, with_ids=True).set("end", ends)
        rb.extend(data[:11])
        rb.load_state_dict(rb.state_dict())  # a break for those with ids
        rb.extend(data[11:])
        index = TrajectoryIndex(storage, done_key="end", traj_key=None)
        first, length = index.whole(only_finished=False)
        found.append((reach(index, 8), first.tolist(), length.tolist()))
    assert found[0] == found[1]
    assert len(found[0][1]) == 2


def test_a_load_continues_trajectories_without_ids() -> None:
    rb: Any = ReplayBuffer(storage=PackedStorage(8))
    rb.extend(stored(0, [0] * 3, with_ids=False))
    index = TrajectoryIndex(rb.storage)
    assert index.length(torch.arange(3)).tolist() == [3] * 3
    rb.load_state_dict(rb.state_dict())
    rb.extend(stored(3, [0] * 2, with_ids=False))
    assert index.length(torch.arange(5)).tolist() == [5] * 5


@needs_fork
def test_processes_share_the_episodes_of_keys_of_ones_own() -> None:
    storage = PackedStorage(20, shared=True)
    rb = ReplayBuffer(storage=storage)
    rb.extend(
        stored(0, [0] * 3, with_ids=False).set(
            "end", torch.tensor([False, False, True])
        )
    )
    index = TrajectoryIndex(storage, done_key="end", traj_key=None)
    assert index.length(torch.arange(3)).tolist() == [3] * 3
    forked(
        lambda: rb.extend(
            stored(3, [0] * 4, with_ids=False).set(
                "end", torch.tensor([False, True, False, False])
            )
        )
    )
    assert index.length(torch.arange(7)).tolist() == [3, 3, 3, 2, 2, 2, 2]


def test_breaks_of_keys_of_ones_own_outlast_reopenings(tmp_path: Path) -> None:
    for first in (0, 3, 6):
        with ReplayBuffer(
            storage=PackedStorage(20, scratch_dir=tmp_path, reopen=True)
        ) as rb:
            index = TrajectoryIndex(rb.storage, done_key="end", traj_key=None)
            rb.extend(
                stored(first, [0] * 3, with_ids=False).set(
                    "end", torch.zeros(3, dtype=torch.bool)
                )
            )
            assert index.length(torch.arange(first + 3)).tolist() == [3] * (first + 3)


def test_a_break_that_is_due_outlasts_an_edit_of_flags() -> None:
    rb = ReplayBuffer(storage=PackedStorage(8))

    def write(count: int) -> None:
        ids, done = torch.zeros(count), torch.zeros(count, 1, dtype=torch.bool)
        data = {"collector": {"traj_ids": ids.long()}, "next": {"done": done}}
        rb.extend(TensorDict(data, [count]))

    write(3)
    rb.load_state_dict(rb.state_dict())
    rb["next", "done"] = torch.zeros(3, 1, dtype=torch.bool)
    index = TrajectoryIndex(rb.storage)
    assert index.steps_ahead(torch.arange(3)).tolist() == [2, 1, 0]
    write(2)
    assert index.steps_ahead(torch.arange(5)).tolist() == [2, 1, 0, 1, 0]


# -- samplers that need rows in time order refuse writers that keep none


T = 16


class OwnSampler(RowSampler):
    needs_order = True

    def draw(self, storage: Any, batch_size: int) -> Any:
        return torch.randint(len(storage), (batch_size,), generator=self._rng), {}


NEED_ORDER = {
    "recency": lambda: RecencySampler(2.0),
    "a user's": OwnSampler,
    "n-step": lambda: NStepSampler(UniformSampler(), 3, 0.9),
    "windows": lambda: SequenceSampler(UniformSampler(), 2),
    "hindsight": lambda: HindsightSampler(
        UniformSampler(), lambda batch: batch["next", "reward"]
    ),
}


def buffer(storage: Any = None, sampler: Any = None, **parts: Any) -> ReplayBuffer:
    storage, sampler = (
        PackedStorage(T) if storage is None else storage,
        sampler or UniformSampler(),
    )
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=8, **parts)


def reservoir(storage: Any = None) -> ReplayBuffer:
    rb = buffer(storage, writer=ReservoirWriter())
    rb.extend(numbered_rows(20 * T, 0))
    return rb


class Every(Writer):
    """A writer of a user's own; ``order`` maps the number of a row to its place."""

    def __init__(self, order: Any) -> None:
        super().__init__()
        self.order, self.count = order, 0

    def add(self, data: Any) -> int:
        index = self.order(self.count)
        self.count += 1
        self._storage.set(index, data)
        for each in self._storage._attached_entities:
            each.mark_update(index)
        return index

    def extend(self, data: Any) -> torch.Tensor:
        return torch.tensor([self.add(row) for row in data])

    def _empty(self, empty_write_count: bool = True) -> None:
        self.count = 0

    def dumps(self, path: Any) -> None: ...
    def loads(self, path: Any) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("sampler", NEED_ORDER.values(), ids=NEED_ORDER)
def test_a_writer_of_ones_own_says_whether_it_keeps_order(sampler):
    class InOrder(Every):
        keeps_order = True

    for storage in (PackedStorage(T), LazyTensorStorage(T)):
        with pytest.raises(
            (ValueError, TypeError),
            match=r"a Every may write in any order: set keeps_order = True|a PackedStorage",
        ):
            buffer(storage, sampler(), writer=Every(lambda count: count % T))
    rb = buffer(sampler=sampler(), writer=InOrder(lambda count: count % T))
    for first in range(0, 3 * T, 4):
        rb.extend(numbered_rows(4, first))
        assert rb.sample().shape == (8,)
    ring = buffer(rb.storage)
    assert ring.chronological()["x"].tolist() == [*range(2 * T, 3 * T)]


@pytest.mark.parametrize("sampler", NEED_ORDER.values(), ids=NEED_ORDER)
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_samplers_refuse_the_writer_of_any_buffer_over_the_rows(sampler, cls):
    of = reservoir()
    with pytest.raises(ValueError, match="order, a ReservoirWriter keeps none: use"):
        cls(storage=of.storage, sampler=sampler(), batch_size=8).sample()
    assert buffer(of.storage).sample().shape == (8,)
    rb = buffer(sampler=sampler())
    with pytest.raises(ValueError, match="order, a ReservoirWriter keeps none: use"):
        reservoir(rb.storage)
    rb.extend(numbered_rows(4, 0))
    assert rb.sample().shape == (8,)


def test_torchrls_buffers_of_the_largest_values_are_imported_for_other_samplers(
    tmp_path,
):
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(T), writer=TensorDictMaxValueWriter("x"), batch_size=4
    )
    theirs.extend(numbered_rows(3 * T, 0))
    theirs.dumps(tmp_path)
    for source in (theirs, tmp_path):
        with pytest.raises(ValueError, match="a TensorDictMaxValueWriter keeps none"):
            ReplayBuffer.from_torchrl(source, sampler=NEED_ORDER["recency"]())
        assert len(ReplayBuffer.from_torchrl(source)) == T


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_the_writer_of_the_largest_values_keeps_them_with_their_priorities(cls):
    rb = cls(
        storage=PackedStorage(T),
        sampler=ProportionalSampler(T),
        writer=TensorDictMaxValueWriter("rank"),
        batch_size=8,
    )
    rank = torch.randperm(150).float()
    for first in range(0, 150, 7):
        part = torch.arange(first, min(first + 7, 150))
        rb.extend(TensorDict({"x": part, "rank": rank[part]}, [len(part)]))
        rb.storage.check()
        stored, best = rb.storage[:], rank[: part[-1] + 1].sort(descending=True).values
        assert torch.equal(stored["rank"].sort(descending=True).values, best[:T])
        assert torch.equal(rank[stored["x"]], stored["rank"])
        priority = rb.sampler.priority(torch.arange(len(stored)))
        assert (priority[stored["x"] >= first] == 1.0).all()
        errors = torch.full((len(stored),), 0.5).index_fill_(0, torch.tensor(0), 1.0)
        rb.update_priority(torch.arange(len(stored)), errors)


# -- several buffers over one storage


EMPTIED = [
    (by_ours, refill, by_ours == (refill > 5))
    for by_ours in (True, False)
    for refill in (0, T + 3)
]


@pytest.mark.parametrize(("by_ours", "refill", "single"), EMPTIED)
def test_removed_rows_do_not_come_back_with_a_write_of_another_buffer(
    by_ours, refill, single
):
    rb = buffer(PackedStorage(T))
    theirs = TensorDictReplayBuffer(
        storage=rb.storage, writer=TensorDictRoundRobinWriter()
    )
    other = buffer(rb.storage) if by_ours else theirs
    for _ in range(3):  # the fast path, too
        rb.extend(numbered_rows(4, 100))
    other.empty() if by_ours else rb.storage._empty()
    if refill:
        other.extend(numbered_rows(refill, 0))
    new = numbered_rows(3, refill)
    for data in new if single else [new]:
        rb.add(data) if single else rb.extend(data)
    end = refill + 3
    assert rb.last(min(T, end))["x"].tolist() == [*range(max(0, end - T), end)]
    assert len(rb) == min(T, end)


@pytest.mark.parametrize(
    "sampler",
    [lambda: ProportionalSampler(T), lambda: RankSampler(T), MinibatchSampler],
)
def test_a_buffer_draws_none_of_the_rows_that_another_buffer_has_removed(sampler):
    rb = buffer(sampler=sampler())
    rb.extend(numbered_rows(12, 100))
    rb.sample()
    buffer(rb.storage).empty()
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.sample()
    rb.extend(numbered_rows(8, 0))
    for _ in range(5):
        assert (rb.sample()["x"] < 8).all()


def test_a_reservoir_begins_again_after_another_buffer_has_removed_its_rows():
    rb = reservoir()
    buffer(rb.storage).empty()
    rb.extend(numbered_rows(3, 1_000))
    assert (rb[:]["x"].tolist(), rb.write_count) == ([1_000, 1_001, 1_002], 3)


def test_two_rings_over_one_storage_write_one_after_the_other():
    one, two = (buffer(storage) for storage in [PackedStorage(T)] * 2)
    for first in range(0, 40, 5):
        one.extend(numbered_rows(3, first))
        two.extend(numbered_rows(2, first + 3))
        assert one.chronological()["x"].tolist() == [
            *range(max(0, first + 5 - T), first + 5)
        ]


def test_a_writer_without_order_that_comes_later_is_refused() -> None:
    storage = PackedStorage(16)
    steps = NStepSampler(UniformSampler(), 3, 1.0)
    rb = ReplayBuffer(storage=storage, sampler=steps, batch_size=6)
    flag = torch.zeros(5, 1, dtype=torch.bool)
    after = {"reward": torch.ones(5, 1), "done": flag, "terminated": flag}
    rb.extend(TensorDict({"x": torch.arange(5), "next": after}, [5]))
    rb.sample()
    other = TensorDictReplayBuffer(storage=storage, writer=ReservoirWriter())
    with pytest.raises(ValueError, match="a ReservoirWriter keeps none"):
        rb.sample()
    assert len(other) == 5


def test_the_largest_age_is_fixed_when_a_sampler_is_made() -> None:
    with pytest.raises(AttributeError, match="max_age is fixed"):
        UniformSampler().max_age = 3


def test_rows_without_order_are_not_continued_as_if_they_had_one() -> None:
    rb = ReplayBuffer(storage=PackedStorage(4), writer=ReservoirWriter(), batch_size=2)
    rb.extend(TensorDict({"x": torch.arange(9)}, [9]))
    with pytest.raises(ValueError, match=r"ReservoirWriter are in no time .*rb.empty"):
        rb.set_writer(RingWriter())
    rb.empty()
    rb.set_writer(RingWriter())
    rb.extend(TensorDict({"x": torch.arange(5)}, [5]))
    assert rb.chronological()["x"].tolist() == [1, 2, 3, 4]


ENDS = ("next", "done"), ("next", "terminated")
EDITS: dict[str, Callable[[Any, TensorDict], object]] = {
    "entries": lambda rb, row: [rb.set_at_(key, row[key], [1]) for key in ENDS],
    "a row": lambda rb, row: rb.storage.set([1], row, set_cursor=False),
    "a view": lambda rb, row: rb.storage[:][1:2].update_(row),
}
WRITES: dict[str, Callable[[Any], object]] = {
    "extend": lambda rb: rb.extend(rb.storage[[0, 0]]),
    "add": lambda rb: [rb.add(rb.storage[[0]][0]) for _ in range(2)],
    "add_step": lambda rb: [play(rb, False) for _ in range(2)],
    "add after all are removed": lambda rb: [rb.storage._empty(), play(rb, False)],
}


def play(rb: Any, terminated: bool) -> None:
    numbers = dict.fromkeys(("observation", "action", "reward", "next_observation"), 0)
    rb.add_step(**numbers, terminated=terminated, truncated=False)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_counts_if_its_row_is_replaced_before_anybody_looks(
    edit: Any, write: Any, backend: Any
) -> None:
    """The second row is edited: it ends no episode, so that the third begins none.
    After two more rows, the episode of the oldest row has begun before it."""
    with forced(backend):
        rb: Any = ReplayBuffer(storage=PackedStorage(4))
        for terminated in (False, True, False, False):
            play(rb, terminated)
        edit(rb, rb.storage[[0]])
        write(rb)
        first, _ = TrajectoryIndex(rb.storage).whole(only_finished=False)
        assert first.tolist() == []
