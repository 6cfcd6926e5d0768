"""n-step transitions: sums in float64, where they stop, and that TorchRL's losses take
them as they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.objectives.value import TD0Estimator

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    UniformSampler,
)
from tests.backends import forced
from tests.catalogue import buffer_of, numbered_rows


def chain(
    n: int,
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, ...] = (1,),
    **flags,
) -> TensorDict:
    """Return ``n`` rows of random rewards; ``("next", "x")`` counts up."""
    generator = torch.Generator().manual_seed(n)
    data = TensorDict({"x": torch.arange(n), "next": {"x": torch.arange(n) + 1}}, [n])
    data["next", "reward"] = torch.randn(
        n, *dims, generator=generator, dtype=torch.float64
    ).to(dtype)
    for name, places in (flags or {"done": []}).items():
        flag = torch.zeros(n, 1, dtype=torch.bool)
        flag[places] = True
        data["next", name] = flag
    return data


DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16


def by_row(rb) -> TensorDictBase:
    batch = rb.sample(len(rb))
    return batch[batch["index"].argsort()]


@pytest.mark.usefixtures("boundaries")
@pytest.mark.parametrize(
    ("dtype", "dims"), [*zip(DTYPES, [(), (1,), (3,), (2, 2)], strict=True)]
)
def test_rewards_of_every_kind_are_added_up_in_float64(dtype, dims):
    n, gamma, done = 7, 0.97, [11, 12, 30]
    data = chain(40, dtype, dims, done=done)
    batch = by_row(
        buffer_of(50, NStepSampler(UniformSampler(unique=True), n, gamma), rows=data)
    )
    reward = data["next", "reward"].double()
    for row in range(40):
        last = min(row + n - 1, 39, *[end for end in done if end >= row])
        total = sum(
            (gamma**k * reward[row + k] for k in range(last - row + 1)),
            torch.zeros(dims, dtype=torch.float64),
        )
        found, eps = batch["next", "reward"][row].double(), torch.finfo(dtype).eps
        torch.testing.assert_close(found, total, rtol=2 * eps, atol=1e-15 + eps**2)
        assert int(batch["next", "x"][row]) == last + 1
        assert batch["steps_to_next_obs"][row].flatten().tolist() == [last - row + 1]
        assert bool(batch["next", "done"][row]) == (last in done)
    assert batch["next", "reward"].dtype is dtype
    assert torch.equal(batch["x"], data["x"])
    wanted = (40, *[1] * len(dims))
    assert batch["steps_to_next_obs"].shape == wanted


def test_the_sum_of_a_thousand_small_rewards_is_that_of_float64():
    """In float32, adding up from the first one would lose them."""
    data = chain(1_000)
    data["next", "reward"] = torch.full((1_000, 1), 1e-4)
    data["next", "reward"][0] = 3e4
    rb = buffer_of(
        1_000, NStepSampler(UniformSampler(unique=True), 1_000, 1.0), rows=data
    )
    exact = math.fsum(data["next", "reward"].double().flatten().tolist())
    assert by_row(rb)["next", "reward"][0, 0] == torch.tensor(exact).float()


def reached(batch: TensorDictBase) -> torch.Tensor:
    return (batch["next", "x"] == batch["goal"]).float()


def goal_chain(n: int, **flags) -> TensorDict:
    data = chain(n, **flags)
    data["goal"] = torch.full((n,), 999)
    data["next", "reward"] = torch.zeros(n, 1)
    return data


@pytest.mark.parametrize(
    "flags",
    [
        ("done",),
        ("done", "terminated", "truncated"),
        ("terminated", "truncated"),
        ("terminated",),
    ],
)
def test_a_sum_stops_where_the_new_goal_is_reached(flags):
    """Whichever flags are stored; without ``terminated_fn`` it goes on."""
    data = goal_chain(12, **{name: [] for name in flags})
    ends = "terminated" in flags
    sampler = HindsightSampler(
        UniformSampler(),
        lambda batch: reached(batch) + 1,
        her_ratio=1.0,
        goal_key="goal",
        achieved_goal_key="x",
        terminated_fn=(lambda batch: reached(batch) == 1) if ends else None,
    )
    batch = buffer_of(50, NStepSampler(sampler, 5, 1.0), rows=data).sample(300)
    keys = "x", "goal", "steps_to_next_obs", ("next", "reward"), ("next", "x")
    for x, goal, taken, reward, following in zip(
        *(batch[key].flatten().tolist() for key in keys), strict=True
    ):
        steps = min(5, 12 - x, goal - x if ends else 99)
        assert taken == steps
        assert following == x + steps
        assert reward == steps + (x < goal <= x + steps)
    if ends:
        assert torch.equal(
            batch["next", "terminated"].flatten(), batch["next", "x"] == batch["goal"]
        )


def test_torchrls_estimators_bootstrap_with_the_right_discount():
    n, gamma = 3, 0.9
    data = chain(30, done=[9, 19], terminated=[9], truncated=[19])
    data["next", "state_value"] = torch.randn(30, 1)
    batch = by_row(
        buffer_of(50, NStepSampler(UniformSampler(unique=True), n, gamma), rows=data)
    )
    found = TD0Estimator(gamma=gamma, value_network=None).value_estimate(batch)
    for row in range(30):
        last = min(row + n - 1, 29, *[end for end in (9, 19) if end >= row])
        rewards = data["next", "reward"][row : last + 1, 0]
        discounts = gamma ** torch.arange(len(rewards) + 1)
        value = data["next", "state_value"][last, 0] * (last != 9)
        wanted = (discounts[:-1] * rewards).sum() + discounts[-1] * value
        torch.testing.assert_close(found[row, 0], wanted)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("n_steps", [0, 2])
def test_a_reward_function_that_writes_leaves_the_stamps_of_the_rows_that_were_read(
    n_steps, backend
):
    def reward(batch: TensorDictBase) -> torch.Tensor:
        count = rb.write_count
        rb.extend(numbered_rows(3, count))
        return batch["next", "reward"]

    with forced(backend):
        sampler: Any = HindsightSampler(ProportionalSampler(20), reward)
        sampler = NStepSampler(sampler, n_steps, 0.9) if n_steps else sampler
        rb = ReplayBuffer(storage=PackedStorage(20), sampler=sampler, batch_size=16)
        rb.extend(numbered_rows(20))
        for _ in range(5):
            batch = rb.sample()
            # the serial of a row is its number
            assert torch.equal(batch["sampled_at"], batch["x"])
    assert ("not sample" in rb.compiled) == (backend == "torch" or n_steps > 0)


def team(steps: int) -> TensorDict:
    """Return steps of a team of three, in which agents end alone, and all together."""
    generator = torch.Generator().manual_seed(1)
    data = chain(steps, done=[11, 30])
    data["goal"] = torch.zeros(steps, 2)
    data["next", "reached"] = torch.rand(steps, 2, generator=generator)
    agents = {
        "reward": torch.rand(steps, 3, 1, generator=generator),
        "done": torch.rand(steps, 3, 1, generator=generator) < 0.2,
        "observation": torch.rand(steps, 3, 5, generator=generator),
    }
    data["next", "agents"] = TensorDict(agents, [steps])
    return data


def test_sums_go_on_past_truncated_flags_of_agents_that_are_not_done():
    flags = {
        name: torch.zeros(6, 2, 1, dtype=torch.bool) for name in ("done", "truncated")
    }
    flags["truncated"].fill_(True)  # as TorchRL's PPOTrainer does
    agents = TensorDict({"reward": torch.ones(6, 2, 1)} | flags, [6, 2])
    key = ("next", "agents", "reward")
    sampler = NStepSampler(UniformSampler(), 3, 0.5, reward_key=key)
    rb = ReplayBuffer(storage=PackedStorage(6), sampler=sampler, batch_size=64)
    done = torch.zeros(6, 1, dtype=torch.bool)
    rb.extend(TensorDict({"next": {"done": done, "agents": agents}}, [6]))
    batch = rb.sample()
    steps = (6 - batch["index"]).clamp(max=3)
    assert (batch["steps_to_next_obs"].flatten(1) == steps[:, None]).all()
    assert (batch[key].flatten(1) == (2 - 0.5 ** (steps - 1))[:, None]).all()


@pytest.mark.parametrize("per_agent", [True, False])
@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_sums_of_agents_are_equal_where_the_wrapped_sampler_revises_rewards(
    per_agent, backend
):
    """No row is relabelled, but the rewards and flags of all steps are read from what
    hindsight has revised."""
    key = ("next", "agents", "reward")
    batches = []
    with forced(backend):
        for inner in (
            UniformSampler(unique=True),
            HindsightSampler(
                UniformSampler(unique=True),
                lambda batch: batch[key],
                her_ratio=0.0,
                goal_key="goal",
                achieved_goal_key="reached",
                reward_key=key,
            ),
        ):
            sampler = NStepSampler(inner, 4, 0.9, reward_key=key, per_agent=per_agent)
            rb = buffer_of(50, sampler, rows=team(40))
            batches.append(by_row(rb))
            made_with_torch = per_agent or backend == "torch" or len(batches) == 2
            assert ("not sample" in rb.compiled) == made_with_torch
    plain, revised = batches
    assert plain["steps_to_next_obs"].shape == (40, 3, 1)
    assert (
        plain["steps_to_next_obs"][:, 0] != plain["steps_to_next_obs"][:, 1]
    ).any() == per_agent
    for name in plain.keys(True, True):
        assert torch.equal(plain[name], revised[name]), name
