"""The recorder of PettingZoo environments: its rows, and the returns of agents that die
and return."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pettingzoo")

from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies
from tensordict import TensorDict
from torchrl.envs import MarlGroupMapType
from torchrl.envs.libs.pettingzoo import PettingZooWrapper
from torchrl.objectives.value import TD0Estimator

from rlbuf_td import (
    NStepSampler,
    PettingZooRecorder,
    ReplayBuffer,
    SchemaError,
    UniformSampler,
    check,
)
from tests.multi_agent import AGENTS, Meadow, act

GROUPS = {"wolf": AGENTS[:3], "sheep": AGENTS[3:]}


def started(env: Any, capacity: int = 200, **settings: Any) -> PettingZooRecorder:
    recorder = PettingZooRecorder(ReplayBuffer.from_env(env, capacity, **settings), env)
    for each in recorder.envs:
        for number, agent in enumerate(each.possible_agents):
            each.action_space(agent).seed(number)
    recorder.reset(seed=1)
    return recorder


def run(recorder: PettingZooRecorder, steps: int) -> ReplayBuffer:
    is_list = isinstance(recorder.env, list)
    for _ in range(steps):
        ended = [not env.agents for env in recorder.envs]
        if any(ended):
            recorder.reset(lanes=ended if is_list else None)
        actions = [act(env) for env in recorder.envs]
        recorder.step(actions if is_list else actions[0])
    return recorder.buffer


def brute(env: Meadow) -> list[dict[Any, np.ndarray]]:
    """Return what the rows of an environment must hold, step by step, in plain
    loops."""
    rows = []
    for _, acted, before, actions, (
        seen,
        rewards,
        terminated,
        truncated,
        _,
    ), living in env.history:
        row: dict[Any, Any] = {}
        for name, agents in GROUPS.items():
            kind = np.float64 if name == "sheep" else np.float32
            place, following = (np.zeros((len(agents), 2), kind) for _ in range(2))
            action = (
                np.zeros((len(agents), 2), np.float32)
                if name == "sheep"
                else np.zeros(len(agents), np.int64)
            )
            reward, (ended, cut) = (
                np.zeros((len(agents), 1)),
                np.ones((2, len(agents), 1), bool),
            )
            allowed, allowed_next = np.ones((2, len(agents), 3), bool)
            for i, agent in enumerate(agents):
                if agent in acted:
                    place[i], action[i], reward[i] = (
                        _place(before[agent]),
                        actions[agent],
                        rewards[agent],
                    )
                    ended[i], cut[i] = terminated[agent], truncated[agent]
                    allowed[i] = _allowed(before[agent])
                if agent in seen:
                    following[i], allowed_next[i] = (
                        _place(seen[agent]),
                        _allowed(seen[agent]),
                    )
            acts, lives = (
                np.array([agent in some for agent in agents])
                for some in (acted, living)
            )
            key = (
                (name, "observation")
                if env.kind == "box"
                else (name, "observation", "place")
            )
            row |= {
                key: place,
                (name, "action"): action,
                (name, "mask"): acts,
                ("next", *key): following,
            }
            row |= {
                ("next", name, "reward"): reward.astype(np.float32),
                ("next", name, "mask"): lives,
            }
            row |= {
                ("next", name, "terminated"): ended,
                ("next", name, "truncated"): cut,
            }
            row["next", name, "done"] = ended | cut
            if env.kind == "dict":
                row |= {
                    (name, "action_mask"): allowed,
                    ("next", name, "action_mask"): allowed_next,
                }
        over = not living
        died = over and all(terminated[agent] for agent in acted)
        row |= {
            ("next", "done"): [over],
            ("next", "terminated"): [died],
            ("next", "truncated"): [over and not died],
        }
        rows.append(row)
    return rows


def _place(observation: Any) -> Any:
    return observation["place"] if isinstance(observation, dict) else observation


def _allowed(observation: Any) -> Any:
    return (
        observation["action_mask"].astype(bool)
        if isinstance(observation, dict)
        else [True] * 3
    )


def assert_steps(rows: Any, env: Meadow) -> None:
    """Compare rows with the history that an environment keeps."""
    expected, ids = brute(env), [step[0] for step in env.history]
    assert len(expected) == len(rows) > 0
    keys = set(rows.keys(True, True)) - {("collector", "traj_ids")}
    assert keys == set(expected[0])
    for key in keys:
        assert torch.equal(
            rows[key], torch.from_numpy(np.stack([row[key] for row in expected]))
        ), key
    numbers = rows["collector", "traj_ids"].tolist()
    assert [a == b for a, b in pairwise(numbers)] == [a == b for a, b in pairwise(ids)]


@pytest.mark.parametrize("kind", ["box", "dict"])
@pytest.mark.parametrize("lanes", [0, 3])
def test_rows_are_the_steps_of_the_environments_and_zeros_for_absent_agents(
    kind, lanes
):
    env: Any = (
        [Meadow(10 + e, kind) for e in range(lanes)] if lanes else Meadow(kind=kind)
    )
    recorder = started(env)
    rows = run(recorder, 60).chronological()
    returned = 0
    for lane, each in enumerate(recorder.envs):
        mine = rows[:, lane] if lanes else rows
        assert_steps(mine, each)
        masks = mine["wolf", "mask"]
        returned += int(
            (
                masks[1:]
                & ~masks[:-1]
                & (torch.diff(mine["collector", "traj_ids"]) == 0)[:, None]
            ).sum()
        )
    assert returned > 5  # agents that died came back in the same episode
    # the observations of the game
    assert {finding.code for finding in check(recorder.buffer).findings} == {"float64"}


def test_lanes_hold_the_steps_of_environments_that_go_at_their_own_pace():
    envs = [Meadow(), Meadow(9)]
    rb = ReplayBuffer.from_env(envs, 400)
    for lane, env in enumerate(envs):
        recorder = PettingZooRecorder(rb.lane(lane), env)
        recorder.reset(seed=lane)
        run(recorder, 40 + 60 * lane)
    rows = [rb.lane(lane).chronological() for lane in (0, 1)]
    for mine, env in zip(rows, envs, strict=True):
        assert_steps(mine, env)
    first, second = (set(mine["collector", "traj_ids"].tolist()) for mine in rows)
    assert not first & second


def torchrl_rollout(env: Any, seed: int, **settings: Any) -> TensorDict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its PettingZoo version, and of ours
        wrapped = PettingZooWrapper(env, use_mask=True, done_on_any=False, **settings)
        wrapped.set_seed(seed)
        return wrapped.rollout(250)


@pytest.mark.parametrize("group_map", [None, "each"])
def test_rows_are_those_of_torchrls_wrapper(group_map):
    group_map = (
        MarlGroupMapType.ONE_GROUP_PER_AGENT if group_map == "each" else group_map
    )

    def make() -> Any:
        return knights_archers_zombies.parallel_env(
            max_cycles=200, spawn_delay=5, max_zombies=20
        )

    theirs, env = torchrl_rollout(make(), 3, group_map=group_map), make()
    rb = ReplayBuffer.from_env(env, 300, group_map=group_map)
    recorder = PettingZooRecorder(rb, env, group_map=group_map)
    recorder.reset(seed=3)
    recorder.reset()  # as TorchRL's set_seed and rollout do
    places = {
        agent: (g.name, i) for g in recorder.groups for i, agent in enumerate(g.agents)
    }
    for t in range(len(theirs)):
        actions = {agent: places[agent] for agent in env.agents}
        recorder.step(
            {
                agent: theirs[name, "action"][t, i].item()
                for agent, (name, i) in actions.items()
            }
        )
    ours = rb.chronological()
    assert not env.agents
    flags = {
        key
        for key in theirs.keys(True, True)
        if "next" not in key and key[-1] in ("done", "terminated")
    }
    assert set(ours.keys(True, True)) - {("collector", "traj_ids")} == {
        key
        for key in theirs.keys(True, True)
        if "next" in key
        or ({"done", "terminated", "truncated"}.isdisjoint({key, *key}))
    }
    assert flags
    absent = 0
    for key in set(ours.keys(True, True)) - {("collector", "traj_ids")}:
        assert (ours[key].shape, ours[key].dtype) == (
            theirs[key].shape,
            theirs[key].dtype,
        ), key
        mine, other = ours[key], theirs[key]
        # TorchRL keeps the last observation and actions of the dead
        if "next" not in key and key[-1] != "mask":
            acts = ours[key[0], "mask"]
            assert not mine[~acts].any()
            mine, other, absent = mine[acts], other[acts], absent + int((~acts).sum())
        assert torch.equal(mine, other), key
    assert absent


def test_reset_and_step_return_what_the_environment_returns():
    plain, env = Meadow(), Meadow()
    recorder = PettingZooRecorder(ReplayBuffer.from_env(env, 30), env)
    results: list[Any] = [[plain.reset(seed=7)], [recorder.reset(seed=7)]]
    while plain.agents:
        actions = act(plain)
        results[0].append(plain.step(actions))
        results[1].append(recorder.step(actions))
    assert repr(results[0]) == repr(results[1])


def test_extras_are_stored_and_those_of_absent_agents_are_zeros():
    env = [Meadow(), Meadow()]
    recorder = started(env)
    for step in range(30):
        if any(ended := [not each.agents for each in env]):
            recorder.reset(lanes=ended)
        value = np.full((2, 3, 1), 1.0 + step, np.float32)
        recorder.step(
            [act(each) for each in env],
            wolf={"state_value": value},
            note=np.full(2, step),
        )
    rows = recorder.buffer.chronological()
    acts = rows["wolf", "mask"]
    expected = torch.arange(1.0, 31)[:, None, None] * acts
    assert torch.equal(rows["wolf", "state_value"][..., 0], expected)
    assert not acts.all()
    assert rows["note"][:, 1].tolist() == list(range(30))
    recorder.reset()
    with pytest.raises(
        SchemaError,
        match=r"this step has the extras \[\"'note'\"\], the first step had",
    ):
        recorder.step([act(each) for each in env], note=np.zeros(2))


WOLF_REWARD = ("next", "wolf", "reward")


@pytest.mark.parametrize("per_agent", [True, False])
def test_n_step_sums_end_with_each_agent_or_with_the_team(per_agent):
    n, gamma = 4, 0.9
    sampler = NStepSampler(
        UniformSampler(), n, gamma, reward_key=WOLF_REWARD, per_agent=per_agent
    )
    rb = run(started(Meadow(), 60, sampler=sampler), 80)
    rows, batch = rb.chronological(), rb.sample(100)
    oldest = int(rb.storage.stamps(torch.arange(60)).min())
    numbers = (rb.storage.stamps(batch["index"]) - oldest).tolist()
    alone = 0
    for number, drawn in zip(numbers, batch, strict=True):
        after = rows[number : number + n]["next"]
        ends = after["done"].flatten().tolist()
        team = ends.index(True) + 1 if True in ends else len(ends)
        for agent in range(3):
            flags = after["wolf", "done"][:team, agent, 0].tolist()
            steps = flags.index(True) + 1 if per_agent and True in flags else team
            alone += steps < team
            discounts = gamma ** torch.arange(steps)
            total = (discounts * after["wolf", "reward"][:steps, agent, 0]).sum()
            torch.testing.assert_close(drawn["next", "wolf", "reward"][agent, 0], total)
            assert drawn["steps_to_next_obs"][agent].tolist() == [steps]
            for key in ("observation", "done", "terminated", "truncated", "mask"):
                value = after["wolf", key][steps - 1, agent]
                assert torch.equal(drawn["next", "wolf", key][agent], value), key
        for key in ("done", ("sheep", "observation"), ("sheep", "done")):
            assert torch.equal(drawn["next"][key], after[key][team - 1]), key
        assert torch.equal(drawn["sheep", "action"], rows[number]["sheep", "action"])
    assert (alone > 10) == per_agent


def test_torchrls_estimator_takes_the_steps_of_each_agent():
    sampler = NStepSampler(UniformSampler(), 3, 0.9, reward_key=WOLF_REWARD)
    batch = run(started(Meadow(), sampler=sampler), 30).sample(64)
    batch["wolf", "state_value"] = torch.rand(64, 3, 1)
    batch["next", "wolf", "state_value"] = torch.rand(64, 3, 1)
    estimator = TD0Estimator(gamma=0.9, value_network=None)
    estimator.set_keys(
        value=("wolf", "state_value"),
        reward=("wolf", "reward"),
        done=("wolf", "done"),
        terminated=("wolf", "terminated"),
    )
    target = estimator.value_estimate(batch)
    discount = 0.9 ** batch["steps_to_next_obs"] * ~batch["next", "wolf", "terminated"]
    following = discount * batch["next", "wolf", "state_value"]
    torch.testing.assert_close(target, batch["next", "wolf", "reward"] + following)


class Broken(Meadow):
    """Loses an agent, or its last observation."""

    how = ""

    def step(self, actions: Any) -> Any:
        seen, rewards, terminated, truncated, infos = super().step(actions)
        if self.how == "left":
            terminated["sheep"] = truncated["sheep"] = False
            self.agents = [agent for agent in self.agents if agent != "sheep"]
        if self.how == "unseen":
            truncated["sheep"], seen = (
                True,
                {agent: x for agent, x in seen.items() if agent != "sheep"},
            )
            self.agents = [agent for agent in self.agents if agent != "sheep"]
        return seen, rewards, terminated, truncated, infos


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("left", "'sheep' left the environment without being"),
        ("unseen", "'sheep' has no observation after a step that"),
    ],
)
def test_an_agent_whose_last_step_is_unknown_is_refused_by_name(how, words):
    env = Broken()
    recorder = started(env)
    env.how = how
    with pytest.raises(RuntimeError, match=words):
        recorder.step(act(env))
    assert not len(recorder.buffer)
    with pytest.raises(RuntimeError, match=r"reset environments \[0\] first"):
        recorder.step(act(env))
    env.how = ""
    recorder.reset()
    recorder.step(act(env))
    assert len(recorder.buffer) == 1


def test_an_ended_environment_must_be_reset():
    env = [Meadow(3), Meadow(50)]
    recorder = started(env)
    while all(each.agents for each in env):
        recorder.step([act(each) for each in env])
    ended = [e for e in range(2) if not env[e].agents]
    with pytest.raises(
        RuntimeError, match=rf"reset environments \[{ended[0]}.*with reset\(lanes="
    ):
        recorder.step([act(each) for each in env])


def test_whole_rewards_that_float32_lacks_are_refused_or_kept():
    env = Meadow(rewards=2**24 + 1)
    with pytest.raises(
        SchemaError,
        match=r"'wolf', 'reward'\) is 16777217, which float32 changes to 16777216: store",
    ):
        run(started(env), 1)
    extras = {
        "next": {
            name: {"reward": torch.zeros(len(GROUPS[name]), 1, dtype=torch.float64)}
            for name in GROUPS
        }
    }
    rows = run(started(env, extras=extras), 20).chronological()
    rewards, acts = rows["next", "wolf", "reward"][..., 0], rows["wolf", "mask"]
    assert torch.equal(rewards, (2**24 + 1.0) * acts.double())
