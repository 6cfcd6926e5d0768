"""The short path of wrappers gives what their general path gives, whatever happens between two calls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from tests.catalogue import assert_same
from tests.test_plan import GeneralBuffer

STEPS, LANES, BATCH = 24, 3, 12


def reward_fn(batch: TensorDict) -> torch.Tensor:
    return (batch["next", "achieved_goal"] - batch["desired_goal"]).sum(-1, keepdim=True)


def terminated_fn(batch: TensorDict) -> torch.Tensor:
    return (batch["next", "achieved_goal"] < batch["desired_goal"]).all(-1)


WRAPPERS: dict[str, Any] = {
    "hindsight": lambda inner: HindsightSampler(
        inner, reward_fn, strategy={"future": 0.5, "episode": 0.3, "random": 0.2}
    ),
    "ends": lambda inner: HindsightSampler(inner, lambda b: reward_fn(b)[:, 0].double(), terminated_fn=terminated_fn),
    "n-step": lambda inner: NStepSampler(inner, 3, 0.9),
    "n-step, rewards": lambda inner: NStepSampler(inner, 3, 0.9, reward_key=("next", "rewards")),
    "pad": lambda inner: SequenceSampler(inner, 3, burn_in=1),
    "shift": lambda inner: SequenceSampler(inner, 4, burn_in=2, boundary="shift"),
    "strict": lambda inner: SequenceSampler(inner, 1, boundary="strict"),  # has no plan
}
INNER: dict[str, Any] = {
    "uniform": UniformSampler,
    "proportional": lambda: ProportionalSampler(STEPS * LANES),
    "rank": lambda: RankSampler(STEPS * LANES),
}


def steps(count: int, lanes: int | None, seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    lead = [count] if lanes is None else [lanes, count]

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*lead, *shape, generator=generator)

    done, truncated = rand(1) > 0.85, rand(1) > 0.95
    after = {"reward": rand(1), "done": done | truncated, "terminated": done, "truncated": truncated}
    after |= {
        "rewards": rand(2, 2).double(),
        "achieved_goal": rand(3),
        "desired_goal": rand(3),
        "observation": rand(17),
    }
    return TensorDict({"desired_goal": rand(3), "is_init": rand(1) > 0.9, "observation": rand(17), "next": after}, lead)


def buffers(wrapper: str, inner: str, lanes: int | None) -> list[ReplayBuffer]:
    return [
        cls(
            storage=PackedStorage(STEPS * (lanes or 1), ndim=1 if lanes is None else 2),
            sampler=WRAPPERS[wrapper](INNER[inner]()),
            batch_size=BATCH,
            generator=torch.Generator().manual_seed(3),
        )
        for cls in (ReplayBuffer, GeneralBuffer)
    ]


def change(rb: ReplayBuffer, value: int) -> None:
    """Change a setting of the wrapper."""
    sampler = rb.sampler
    if isinstance(sampler, HindsightSampler):
        sampler.her_ratio, sampler.only_finished = (value % 5) / 4, value % 2 == 0
    elif isinstance(sampler, NStepSampler):
        sampler.n_steps, sampler.gamma = 1 + value % 7, (value % 3) / 2


CHANGES: dict[str, Any] = {
    "settings": change,
    "extend": lambda rb, value: rb.extend(steps(1 + value % 9, LANES if rb.storage.ndim > 1 else None, value)),
    "reload": lambda rb, value: rb.load_state_dict(rb.state_dict()),
    "replace": lambda rb, value: rb.storage.set(torch.tensor([1, 0]), rb.storage.get(torch.tensor([0, 1]))),
}


@pytest.mark.parametrize("lanes", [None, LANES])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@settings(max_examples=8, deadline=None)
@given(
    history=st.lists(
        st.tuples(st.sampled_from(["extend", "sample", "sample", "update", *CHANGES]), st.integers(0, 1 << 20)),
        max_size=20,
    )
)
def test_plan_and_general_path_agree_over_any_history(wrapper, inner, lanes, history):
    pair = buffers(wrapper, inner, lanes)
    for step, value in [("extend", 8), ("sample", 0), ("sample", 0), *history, ("sample", 0), ("sample", 0)]:
        batches = []
        for rb in pair:
            if step in CHANGES:
                CHANGES[step](rb, value)
                continue
            batches.append(rb.sample())
            if step == "update":
                batches[-1]["td_error"] = torch.randn(BATCH, generator=torch.Generator().manual_seed(value))
                rb.update_tensordict_priority(batches[-1])
        if batches:
            assert_same(*batches)
    priorities = [TensorDict(rb.state_dict()["_sampler"]["sampler"].get("priorities", {})) for rb in pair]
    assert_same(*priorities)
    assert pair[0].health() == pytest.approx(pair[1].health(), nan_ok=True)


@pytest.mark.parametrize("wrapper", ["hindsight", "n-step", "pad"])
def test_wrappers_take_the_short_path(wrapper):
    rb = buffers(wrapper, "proportional", None)[0]
    rb.extend(steps(20, None, 0))
    rb.sample()
    plan = rb._plan
    assert plan is not None
    rb.sample()
    rb.extend(steps(20, None, 1))
    rb.sample()
    assert rb._plan is plan


def test_goals_with_a_reward_of_nan_are_refused_as_on_the_general_path():
    rb = buffers("hindsight", "uniform", None)[0]
    rb.extend(steps(20, None, 0))
    rb.sample()
    rb.sampler.reward_fn = lambda batch: torch.full((BATCH, 1), math.nan)
    rb.sampler.her_ratio = 1.0
    with pytest.raises(ValueError, match="reward_fn returned NaN for relabelled rows, the first of them row 0"):
        rb.sample()


@pytest.mark.parametrize("rows", [slice(BATCH // 4), slice(1, None, 4)], ids=["rows", "a row of each window"])
def test_td_errors_of_part_of_a_window_are_refused(rows):
    rb = buffers("pad", "proportional", None)[0]
    rb.extend(steps(20, None, 0))
    rb.sample()
    batch = rb.sample()[rows].set("td_error", torch.full((BATCH // 4,), 9.0))
    with pytest.raises(ValueError, match="not whole windows of 4 rows"):
        rb.update_tensordict_priority(batch)
    assert (rb.sampler.priority(torch.arange(20)) == 1).all()
