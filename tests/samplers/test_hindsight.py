"""Hindsight: which goals, with which probabilities; what is computed anew; what is
refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import TensorDictReplayBuffer

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from tests.catalogue import buffer_of, numbered_rows, reward_fn
from tests.model import World, allowed_goals
from tests.statistics import assert_follows, power


def world(sampler, lanes: int = 2, **often) -> World:
    return World.of(sampler, 12, lanes, 1.6, **often)


def chosen(made: World, draws: int) -> np.ndarray:
    """Return how often each row (last: none) has given its outcome to each row,
    ``[rows, rows + 1]``."""
    achieved = [row.fields["next", "achieved_goal"] for row in made.model.rows()]
    outcomes = torch.tensor(achieved)
    rows = len(outcomes)
    counts = np.zeros((rows, rows + 1))
    for _ in range(draws // 5_000):
        batch = made.rb.sample(5_000)
        row = batch["index"] @ torch.tensor([made.model.lanes, 1])
        is_same = (batch["desired_goal"][:, None] == outcomes).all(-1)
        assert torch.equal(is_same.any(1), batch["relabeled"])
        goal = torch.where(batch["relabeled"], is_same.int().argmax(1), rows)
        np.add.at(counts, (row.numpy(), goal.numpy()), 1)
    return counts


def law(
    made: World,
    mixture: dict[str, float],
    her_ratio: float,
    only_finished: bool = False,
    gamma: float = 1.0,
) -> np.ndarray:
    """Return the probability of the same, by definition."""
    model = made.model
    probability = np.zeros((len(model), len(model) + 1))
    for each in model.rows():
        row, finished = model.flat(each), model.ended(each)
        for strategy, share in mixture.items():
            if only_finished and not finished and strategy != "random":
                probability[row, -1] += her_ratio * share
                continue
            allowed = allowed_goals(model, each, strategy)
            weight = [
                gamma**k if strategy == "future" else 1.0 for k in range(len(allowed))
            ]
            for goal, mine in zip(allowed, weight, strict=True):
                probability[row, model.flat(goal)] += (
                    her_ratio * share * mine / sum(weight)
                )
        probability[row, -1] += 1 - her_ratio
    return probability / len(model)


MIXTURES = [
    ({"future": 1.0}, 0.8, False, 1.0),
    ({"final": 1.0}, 0.5, True, 1.0),
    ({"episode": 1.0}, 1.0, False, 1.0),
    ({"future": 0.75, "random": 0.25}, 0.9, True, 1.0),
    ({"episode": 0.1, "final": 0.2, "future": 0.3, "random": 0.4}, 1.0, False, 1.0),
    ({"future": 0.75, "episode": 0.25}, 1.0, False, 0.0),
    ({"future": 0.75, "episode": 0.25}, 1.0, False, 0.9),
]


@pytest.mark.usefixtures("boundaries")
@pytest.mark.parametrize(("mixture", "her_ratio", "only_finished", "gamma"), MIXTURES)
def test_every_allowed_row_is_chosen_with_its_probability(
    mixture, her_ratio, only_finished, gamma
):
    """Over lanes that have wrapped, with trajectories whose beginning is lost and some
    that are unfinished."""
    strategy = next(iter(mixture)) if len(mixture) == 1 else mixture
    given: Any = {
        "her_ratio": her_ratio,
        "only_finished": only_finished,
        "future_gamma": gamma,
    }
    made = world(
        HindsightSampler(UniformSampler(), reward_fn, strategy=strategy, **given),
        often=(0.05, 0.03, 0.02),
    )
    torch.manual_seed(0)
    probability = law(made, mixture, her_ratio, only_finished, gamma).flatten()
    draws = 200_000 if gamma == 0.9 else 50_000
    is_possible = probability > 0
    assert gamma != 0.9 or power(probability[is_possible], draws, bias=0.04) > 0.95
    assert not all(made.model.ended(row) for row in made.model.rows())
    assert max(made.model.reach(row)[1] for row in made.model.rows()) > 4
    assert_follows(chosen(made, draws).flatten(), probability)


def test_the_ratio_is_drawn_for_every_row_by_itself():
    made = world(HindsightSampler(UniformSampler(), reward_fn, her_ratio=0.25))
    torch.manual_seed(0)
    masks = torch.stack([made.rb.sample(500)["relabeled"] for _ in range(200)])
    both = int((masks[:, 1:] & masks[:, :-1]).sum())
    law = np.array([1 / 16, 15 / 16])
    draws = masks[:, 1:].numel()
    assert power(law, draws, bias=0.1) > 0.99
    assert_follows([both, draws - both], law)


def test_flags_stay_as_stored_without_terminated_fn():
    made = world(
        HindsightSampler(UniformSampler(), reward_fn, her_ratio=1.0, strategy="final")
    )
    batch = made.rb.sample(500)
    for name in ("terminated", "truncated", "done"):
        stored = [row.fields["next", name] for row in made.rows_at(batch["index"])]
        assert batch["next", name].tolist() == stored


def nested_goals(shape: tuple[int, ...], dtype: torch.dtype) -> TensorDict:
    """Return a trajectory of eight steps whose outcomes count up."""
    count = torch.arange(8).view(8, *[1] * len(shape)).expand(8, *shape).to(dtype)
    goals = {"desired": torch.full_like(count, 99), "achieved": count}
    after = {"obs": {"goals": goals | {"achieved": count + 1}}}
    after |= {"reward": torch.zeros(8, 1), "done": torch.zeros(8, 1).bool()}
    return TensorDict({"obs": {"goals": goals}, "next": after}, [8])


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), torch.float32),
        ((1,), torch.float64),
        ((3,), torch.uint8),
        ((2, 3, 4), torch.int64),
    ],
)
def test_goals_of_any_shape_dtype_and_depth(shape, dtype, cls):
    desired, achieved = ("obs", "goals", "desired"), ("obs", "goals", "achieved")
    next_desired, next_achieved = ("next", *desired), ("next", *achieved)

    def is_reached(batch: TensorDictBase) -> torch.Tensor:
        same = batch[desired] == batch[next_achieved]
        return same.view(len(batch), -1).all(1)

    sampler = HindsightSampler(
        UniformSampler(),
        is_reached,
        her_ratio=0.5,
        goal_key=desired,
        achieved_goal_key=achieved,
    )
    rb = cls(storage=PackedStorage(10), sampler=sampler, batch_size=200)
    rb.extend(nested_goals(shape, dtype))
    batch = rb.sample()
    index = batch["index"]
    mask = batch["relabeled"]
    goals = batch[desired].reshape(200, -1)
    goal = goals[:, 0]
    assert torch.equal(batch[desired], batch[next_desired])
    assert (goals == goal[:, None]).all()
    assert (goal[~mask] == 99).all()  # the goal of all rows
    # row i reaches the goal i + 1, and the episode ends with row 7
    assert ((goal > index) & (goal <= 8))[mask].all()
    is_next = mask & (goal == index + 1)
    assert torch.equal(batch["next", "reward"].squeeze(-1) == 1, is_next)


def half_relabelled(fn, **outcome) -> ReplayBuffer:
    """Return a buffer of six rows with other outcomes, of which each second one that is
    drawn gets a new goal; only the stored goals are negative."""
    rows = numbered_rows(6, 1)
    rows["next"].update(outcome)
    return buffer_of(
        6, HindsightSampler(UniformSampler(), fn, her_ratio=0.5), rows=rows
    )


def test_goals_need_not_be_stored_in_next():
    batch = half_relabelled(lambda batch: torch.ones(len(batch))).sample(50)
    assert ("next", "desired_goal") not in batch.keys(True)
    assert torch.equal(batch["desired_goal"][:, 0] > 0, batch["relabeled"])


GIVEN: dict[str, Any] = {
    "float64": torch.Tensor.double,
    "bool": torch.Tensor.bool,
    "array": lambda values: values.numpy().astype(np.float32),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize(
    ("stored", "dims"), [((), ()), ((1,), ()), ((1,), (1,)), ((1, 1), (1,))]
)
def test_rewards_are_taken_in_either_shape_and_stored_in_that_of_the_rows(
    stored, dims, given
):
    dtype = torch.float16 if given == "bool" else torch.float32
    rb = half_relabelled(
        lambda batch: GIVEN[given]((torch.arange(len(batch)) % 2).view(-1, *dims)),
        reward=torch.full((6, *stored), 7, dtype=dtype),
    )
    batch = rb.sample(40)
    reward = batch["next", "reward"]
    wanted = torch.where(batch["relabeled"], torch.arange(40) % 2, 7)
    assert (reward.shape, reward.dtype) == ((40, *stored), dtype)
    assert reward.flatten().tolist() == wanted.tolist()


def test_nan_in_rows_that_are_not_relabelled_is_ignored():
    def reward(batch: TensorDictBase) -> torch.Tensor:
        return torch.where(batch["desired_goal"][:, 0] < 0, torch.nan, 1.0)

    assert half_relabelled(reward).sample(100)["next", "reward"].isfinite().all()


@pytest.mark.parametrize("batch", [1, 4])
def test_a_lazily_negated_reward_keeps_its_sign(batch):
    def two(rows: TensorDictBase) -> torch.Tensor:
        return torch._neg_view(torch.full((len(rows), 1), -2.0))

    sampler = HindsightSampler(UniformSampler(), two, her_ratio=1.0)
    rb = buffer_of(8, sampler, rows=numbered_rows(8), batch_size=batch)
    for _ in range(3):
        assert (rb.sample()["next", "reward"] == 2.0).all()


WITHIN = [
    lambda inner: NStepSampler(inner, 3, 0.9),
    lambda inner: SequenceSampler(inner, 3, boundary="strict"),
]


@pytest.mark.parametrize("wrap", WITHIN)
def test_a_reward_fn_may_sample_the_buffer_and_update_priorities(wrap):
    def sampling(batch: TensorDictBase) -> torch.Tensor:
        if depth[0] == 1:
            depth[0] = 2
            other = rb.sample()
            rb.update_tensordict_priority(other.set("td_error", torch.rand(12)))
        return torch.zeros(len(batch))

    depth = [0]
    sampler = wrap(HindsightSampler(ProportionalSampler(40), sampling))
    rb = buffer_of(40, sampler, rows=numbered_rows(40), batch_size=12)
    for _ in range(20):
        depth[0] = 1
        batch = rb.sample()
        assert torch.equal(batch["index"], batch["x"])
        if "mask" in batch.keys():
            assert torch.equal(batch["anchor_index"][::3], batch["x"][::3])
            ends = torch.arange(12) % 3 == 2
            assert torch.equal(
                batch["next", "done"][:, 0], ends | (batch["x"] % 7 == 6)
            )
    assert ("; not" in rb.compiled) == isinstance(sampler, NStepSampler)


def test_random_goals_are_written_rows_if_relabelling_begins_later():
    sampler = HindsightSampler(
        UniformSampler(),
        lambda batch: batch["next", "reward"],
        her_ratio=0.0,
        strategy="random",
    )
    rb = ReplayBuffer(
        storage=PackedStorage(40, ndim=2, lanes=2), sampler=sampler, batch_size=32
    )
    rb.extend(numbered_rows(2, first=1).expand(2, 2).clone())
    for _ in range(2):
        rb.sample()
    rb.lane(1).extend(numbered_rows(15, first=3))
    sampler.her_ratio = 1.0
    # cells that have not been written hold 0
    assert (rb.sample()["desired_goal"] > 0).all()


def test_all_steps_of_a_batch_follow_one_her_ratio():
    def once(batch: TensorDictBase) -> torch.Tensor:
        sampler.sampler.her_ratio = 0.0  # as another thread may do at any time
        return torch.ones(len(batch))

    sampler: Any = NStepSampler(
        HindsightSampler(UniformSampler(), once, her_ratio=1.0), 2, 1.0
    )
    rb = buffer_of(20, sampler, rows=numbered_rows(20), batch_size=16)
    for _ in range(3):  # the torch form, then the compiled form
        sampler.sampler.her_ratio = 1.0
        batch = rb.sample()
        assert torch.equal(batch["next", "reward"], batch["steps_to_next_obs"].float())


def test_random_goals_are_equal_in_both_forms_after_one_lane_was_rewritten():
    """Both lanes are full then, but with unlike serials: the number of a row is its
    cell all the same."""
    rows, batches = numbered_rows(4, lanes=2), []
    for is_compiled in (True, False):
        sampler: Any = HindsightSampler(UniformSampler(), reward_fn, strategy="random")
        if not is_compiled:
            sampler.draw_batch = sampler.draw_batch  # as a subclass that overrides it
        rb = buffer_of(4, sampler, 2, rows=rows, batch_size=64)
        rb.extend(rows[0], lanes=0)
        batches.append(rb.sample())
        assert ("not sample" in rb.compiled) != is_compiled
    assert torch.equal(batches[0]["desired_goal"], batches[1]["desired_goal"])
