"""Trajectories by example: what the index is asked and told, what ends them, that
alternating rows are reported."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    EpisodeStats,
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    SequenceSampler,
    TrajectoryIndex,
    UniformSampler,
)
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
