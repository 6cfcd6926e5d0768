"""Trajectories by example: what the index is asked and told, what ends them, that alternating rows are reported."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from rlbuf_td import (
    EpisodeStats,
    FreshRowsSampler,
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
    check,
)
from rlbuf_td.storages.trajectory_index import TrajectoryIndex


def steps(done: list[int], *, ids: list[int] | None = None, key: tuple[str, ...] = ("next", "done")) -> TensorDict:
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
    index = TrajectoryIndex.of(rb.storage)
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
    index = TrajectoryIndex.of(rb.storage, done_key="end", traj_key=None)
    assert [found[0] for found in reach(index, 4)] == [0, 0, 1, 2]
    assert TrajectoryIndex.of(rb.storage, done_key=("end",), traj_key=None).done_key == ("end",)
    with pytest.raises(ValueError, match=r"done_key=\('end',\) and traj_key=None, not by .*use one pair"):
        TrajectoryIndex.of(rb.storage)


@pytest.mark.parametrize("often", [0.01, 0.0])
def test_a_large_random_ring_by_numpy(often):
    """A million rows, ten thousand trajectories or one: every row at once, against a cumulative count."""
    rng = np.random.default_rng(0)
    n, capacity = 1_300_001, 1_000_000
    done = rng.random(n) < often
    rb = ReplayBuffer(storage=PackedStorage(capacity))
    index = TrajectoryIndex.of(rb.storage)
    for part in np.split(done, [1, 400_000, 999_999, 1_000_002]):
        rb.extend(TensorDict({"next": {"done": torch.from_numpy(part)}}, [len(part)]))
    kept = done[-capacity:]
    at = np.arange(capacity)
    first = np.maximum.accumulate(np.where(np.append(True, kept[:-1]), at, 0))
    last = np.minimum.accumulate(np.where(np.append(kept[:-1], True), at, capacity)[::-1])[::-1]
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
        storage=PackedStorage(64, ndim=ndim), sampler=NStepSampler(UniformSampler(), 3, 0.9), batch_size=64
    )
    shape = (64,) if ndim == 1 else (2, 32)
    after = {"reward": torch.ones(*shape, 1), "done": torch.zeros(*shape, 1, dtype=torch.bool)}
    rb.extend(TensorDict({"x": torch.zeros(shape), "next": after}, shape))
    rb.sample(), rb.sample()
    rb["next", "done"].fill_(True)
    assert rb.sample()["steps_to_next_obs"].eq(1).all()
    rb["next", "done"][:] = False
    assert rb.sample()["steps_to_next_obs"].max() == 3


@pytest.mark.parametrize(("how", "edits_before"), [("pickled", True), ("shared", False), ("moved", False)])
def test_an_edit_is_noticed_whatever_happens_to_the_rows_around_it(how, edits_before):
    rb = ReplayBuffer(storage=PackedStorage(8))
    rb.extend(steps([0] * 8))
    rb["next", "done"].fill_(True)
    assert reach(TrajectoryIndex.of(rb.storage), 8) == [(0, 0, True)] * 8
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
    assert reach(TrajectoryIndex.of(rb.storage), 8) == [(j, 7 - j, False) for j in range(8)]
    rb.extend(steps([0]))
    assert reach(TrajectoryIndex.of(rb.storage), 8)[0] == (7, 0, False)


def of_one(first: int, *, done: bool) -> TensorDict:
    """Return 10 steps of the trajectory 0, with observations from ``first`` on."""
    here, ends = torch.arange(float(first), first + 10).unsqueeze(-1), torch.zeros(10, 1, dtype=torch.bool)
    ends[-1] = done
    after = {"observation": here + 1, "achieved_goal": here + 1, "reward": torch.ones(10, 1), "done": ends}
    now = {"observation": here, "desired_goal": here, "collector": {"traj_ids": torch.zeros(10, dtype=torch.int64)}}
    return TensorDict(now | {"next": after | {"terminated": ends, "desired_goal": here}}, [10])


def loadable(capacity: int = 100) -> ReplayBuffer:
    hindsight = HindsightSampler(UniformSampler(), lambda batch: torch.zeros(len(batch), 1), her_ratio=1.0)
    sampler = NStepSampler(hindsight, n_steps=5, gamma=1.0)
    rb = ReplayBuffer(storage=PackedStorage(capacity), sampler=sampler, batch_size=256, stats=EpisodeStats())
    rb.empty()  # the buffer is there
    return rb


@pytest.mark.parametrize("how", ["dump", "rows", "smaller", "state", "storage dump", "storage state"])
def test_no_trajectory_goes_on_after_a_load(how, tmp_path: Path):
    saved, rb = loadable(), loadable(50 if how == "smaller" else 100)
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
    "hindsight": lambda: HindsightSampler(UniformSampler(), lambda batch: batch["next", "reward"]),
    "nested": lambda: NStepSampler(FreshRowsSampler(UniformSampler()), 5, 0.9),
}


def interleaved(steps: int, lanes: int, length: int = 20, ids: bool = True, flags: bool = True) -> TensorDict:
    """Return transitions ``[T, E]`` of episodes of ``length`` steps, all lanes at the same step."""
    step = torch.arange(steps)[:, None].expand(steps, lanes)
    done = (step % length == length - 1).unsqueeze(-1)
    state = (step * lanes + torch.arange(lanes)).unsqueeze(-1).float()
    following = {"observation": state + lanes, "achieved_goal": state, "reward": torch.ones_like(state)}
    data = TensorDict({"observation": state, "desired_goal": state.clone(), "next": following}, [steps, lanes])
    if flags:
        data["next", "done"] = done
    if ids:
        data["collector", "traj_ids"] = (step // length) * lanes + torch.arange(lanes)
    return data.clone()


def over(sampler: Any, cls: Any = ReplayBuffer, storage: Any = PackedStorage, ndim: int = 1) -> Any:
    return cls(storage=storage(200, ndim=ndim), sampler=sampler, batch_size=16)


@pytest.mark.parametrize(
    ("kind", "steps", "flags"),
    [
        ("n-step", 1, True),
        ("n-step", 40, False),
        ("sequences", 40, True),
        ("hindsight", 40, True),
        ("nested", 40, True),
    ],
)
def test_interleaved_trajectories_are_reported_once_with_the_mean_stretch(kind: str, steps: int, flags: bool) -> None:
    rb = over(SAMPLERS[kind]())
    rb.extend(interleaved(steps, 4, flags=flags)[0, :1].flatten())  # too few rows to tell
    rb.sample()
    rb.extend(interleaved(steps, 4, flags=flags).flatten()[1:])
    with pytest.warns(RuntimeWarning, match=STRETCHES):
        rb.sample()
    for _ in range(20):
        rb.sample()
    assert rb.compiled.startswith("add, extend, sample") or kind == "nested"
    assert rb.health()["stretch_mean"] == 1.0
    finding = check(rb, ignore=["done-never", "done-without-reset"])[0]
    assert (finding.code, "stretches of 1.0 rows" in finding.explanation) == ("trajectories-interleaved", True)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(
    "data",
    [
        interleaved(120, 1, length=1).flatten(),
        interleaved(120, 1, length=2).flatten(),
        interleaved(120, 1, length=2, flags=False).flatten(),
        interleaved(120, 1, length=2, ids=False).flatten(),
        interleaved(40, 3, ids=False).transpose(0, 1).flatten(),
        interleaved(40, 3).transpose(0, 1).flatten(),  # 20 steps of one environment, then of the next
        interleaved(1, 1).flatten(),
    ],
    ids=["1 step", "2 steps", "2 steps by id", "2 steps by flag", "no ids", "in pieces", "one row"],
)
def test_short_episodes_and_whole_trajectories_are_not(kind: str, data: TensorDict) -> None:
    rb = over(SAMPLERS[kind]())
    rb.extend(data)
    for _ in range(3):
        rb.sample()
    assert "trajectories-interleaved" not in check(rb).codes


def test_lanes_of_their_own_and_draws_of_single_rows_need_no_warning() -> None:
    rb = over(SAMPLERS["n-step"](), ndim=2)
    rb.extend(interleaved(40, 4).transpose(0, 1))
    rb.sample()
    assert rb.health()["stretch_mean"] == 20.0
    plain = over(FreshRowsSampler(UniformSampler()))
    plain.extend(interleaved(40, 4).flatten())
    plain.sample()
    assert check(plain).codes == []
    assert check(plain.storage).codes == ["trajectories-interleaved"]  # the sampler is not known


def test_buffers_of_torchrl_report_them_too() -> None:
    rb = over(SAMPLERS["n-step"](), TensorDictReplayBuffer)
    rb.extend(interleaved(40, 4).flatten())
    with pytest.warns(RuntimeWarning, match=STRETCHES):
        rb.sample()
    rb.sample()
