"""Rows of several trajectories that alternate in a flat buffer are reported once; short episodes are not."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import (
    FreshRowsSampler,
    GymnasiumRecorder,
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
    check,
)

WORDS = r"stored in stretches of 1\.0 rows on average, .* alternate: .* PackedStorage\(\.\.\., ndim=2\)"
SAMPLERS: dict[str, Any] = {
    "n-step": lambda: NStepSampler(UniformSampler(), 5, 0.9),
    "sequences": lambda: SequenceSampler(ProportionalSampler(200), 8),
    "hindsight": lambda: HindsightSampler(UniformSampler(), lambda batch: batch["next", "reward"]),
    "nested": lambda: NStepSampler(FreshRowsSampler(UniformSampler()), 5, 0.9),
}


def rows(steps: int, lanes: int, length: int = 20, ids: bool = True, flags: bool = True) -> TensorDict:
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


def buffer(sampler: Any, cls: Any = ReplayBuffer, storage: Any = PackedStorage, ndim: int = 1) -> Any:
    return cls(storage=storage(200, ndim=ndim), sampler=sampler, batch_size=16)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(("steps", "flags"), [(1, True), (40, True), (40, False)])
def test_interleaved_trajectories_are_reported_once_with_the_mean_stretch(kind: str, steps: int, flags: bool) -> None:
    rb = buffer(SAMPLERS[kind]())
    rb.extend(rows(steps, 4, flags=flags)[0, :1].flatten())  # too few rows to tell
    rb.sample()
    rb.extend(rows(steps, 4, flags=flags).flatten()[1:])
    with pytest.warns(RuntimeWarning, match=WORDS):
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
        rows(120, 1, length=1).flatten(),
        rows(120, 1, length=2).flatten(),
        rows(120, 1, length=2, flags=False).flatten(),
        rows(120, 1, length=2, ids=False).flatten(),
        rows(40, 3, ids=False).transpose(0, 1).flatten(),
        rows(40, 3).transpose(0, 1).flatten(),  # 20 steps of one environment, then of the next
        rows(1, 1).flatten(),
    ],
    ids=["1 step", "2 steps", "2 steps by id", "2 steps by flag", "no ids", "in pieces", "one row"],
)
def test_short_episodes_and_whole_trajectories_are_not(kind: str, data: TensorDict) -> None:
    rb = buffer(SAMPLERS[kind]())
    rb.extend(data)
    for _ in range(3):
        rb.sample()
    assert "trajectories-interleaved" not in check(rb).codes


def test_lanes_of_their_own_and_draws_of_single_rows_need_no_warning() -> None:
    rb = buffer(SAMPLERS["n-step"](), ndim=2)
    rb.extend(rows(40, 4).transpose(0, 1))
    rb.sample()
    assert rb.health()["stretch_mean"] == 20.0
    plain = buffer(FreshRowsSampler(UniformSampler()))
    plain.extend(rows(40, 4).flatten())
    plain.sample()
    assert check(plain).codes == []
    assert check(plain.storage).codes == ["trajectories-interleaved"]  # the sampler is not known


@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
def test_buffers_of_torchrl_report_them_too(storage: Any) -> None:
    rb = buffer(SAMPLERS["n-step"](), TensorDictReplayBuffer, storage)
    rb.extend(rows(40, 4).flatten())
    with pytest.warns(RuntimeWarning, match=WORDS):
        rb.sample()
    rb.sample()


def test_two_recorders_in_turn() -> None:
    envs = [gymnasium.make("CartPole-v1") for _ in range(2)]
    rb = ReplayBuffer.from_env(envs[0], 100, sampler=SAMPLERS["n-step"](), batch_size=8)
    recorders = [GymnasiumRecorder(rb, env) for env in envs]
    for recorder in recorders:
        recorder.reset(seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            for recorder, env in zip(recorders, envs, strict=True):
                recorder.step(env.action_space.sample())
            rb.sample()
    assert [str(each.message).count("stretches of 1.0 rows") for each in caught] == [1]
