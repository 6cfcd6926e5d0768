"""The recorders of PettingZoo: agents that act together, die and return, and games whose
agents take turns."""

from __future__ import annotations

import warnings
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pettingzoo")

import pettingzoo
from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies
from pettingzoo.utils.wrappers import BaseWrapper
from tensordict import TensorDict
from torchrl.envs import MarlGroupMapType
from torchrl.envs.libs.pettingzoo import PettingZooWrapper

from rlbuf_td import (
    AECRecorder,
    EpisodeStats,
    NStepSampler,
    PettingZooRecorder,
    ReplayBuffer,
    SchemaError,
    UniformSampler,
    make_transition,
)
from tests.multi_agent import AGENTS, Council, Meadow, act

pytestmark = pytest.mark.filterwarnings("ignore:.*Illegal move made")
GROUPS = {"wolf": AGENTS[:3], "sheep": AGENTS[3:]}


def started(env, capacity: int = 200, **settings) -> PettingZooRecorder:
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


def empty_row(env: Meadow) -> dict[Any, np.ndarray]:
    """Return the row of a step in which no agent acts or lives."""
    row: dict[Any, Any] = {}
    for name, agents in GROUPS.items():
        count = len(agents)
        dtype = np.float64 if name == "sheep" else np.float32
        action = np.zeros(count, np.int64)
        if name == "sheep":
            action = np.zeros((count, 2), np.float32)
        row[name, "action"] = action
        row["next", name, "reward"] = np.zeros((count, 1), np.float32)
        for at in ((), ("next",)):
            row[(*at, name, "mask")] = np.zeros(count, bool)
            if env.kind == "box":
                row[(*at, name, "observation")] = np.zeros((count, 2), dtype)
            else:
                row[(*at, name, "observation", "place")] = np.zeros((count, 2), dtype)
                row[(*at, name, "action_mask")] = np.ones((count, 3), bool)
        for flag in ("terminated", "truncated"):
            row["next", name, flag] = np.ones((count, 1), bool)
    return row


def see(row: dict[Any, np.ndarray], at: Any, i: int, observation: Any) -> None:
    """Set what an agent observes."""
    if isinstance(observation, dict):
        row[(*at, "observation", "place")][i] = observation["place"]
        row[(*at, "action_mask")][i] = observation["action_mask"]
    else:
        row[(*at, "observation")][i] = observation


def brute(env: Meadow) -> list[dict[Any, np.ndarray]]:
    """Return what the rows of an environment must hold, step by step, in plain
    loops."""
    rows = []
    for _, acted, before, actions, outcome, living in env.history:
        seen, rewards, terminated, truncated, _ = outcome
        row = empty_row(env)
        for name, agents in GROUPS.items():
            for i, agent in enumerate(agents):
                if agent in acted:
                    see(row, (name,), i, before[agent])
                    row[name, "action"][i] = actions[agent]
                    row["next", name, "reward"][i] = rewards[agent]
                    row["next", name, "terminated"][i] = terminated[agent]
                    row["next", name, "truncated"][i] = truncated[agent]
                if agent in seen:
                    see(row, ("next", name), i, seen[agent])
                row[name, "mask"][i] = agent in acted
                row["next", name, "mask"][i] = agent in living
            ends = (row["next", name, flag] for flag in ("terminated", "truncated"))
            row["next", name, "done"] = np.logical_or(*ends)
        died = not living and all(terminated[agent] for agent in acted)
        row["next", "done"] = np.array([not living])
        row["next", "terminated"] = np.array([died])
        row["next", "truncated"] = np.array([not living and not died])
        rows.append(row)
    return rows


def assert_steps(rows, env: Meadow) -> None:
    """Compare rows with the history that an environment keeps."""
    expected, ids = brute(env), [step[0] for step in env.history]
    assert len(expected) == len(rows) > 0
    keys = set(rows.keys(True, True)) - {("collector", "traj_ids")}
    assert keys == set(expected[0])
    for key in keys:
        column = torch.from_numpy(np.stack([row[key] for row in expected]))
        assert torch.equal(rows[key], column), key
    numbers = rows["collector", "traj_ids"].tolist()
    assert [a == b for a, b in pairwise(numbers)] == [a == b for a, b in pairwise(ids)]


@pytest.mark.parametrize("kind", ["box", "dict"])
@pytest.mark.parametrize("lanes", [0, 3])
def test_rows_are_the_steps_of_the_environments_and_zeros_for_absent_agents(
    kind, lanes
):
    env: Any = Meadow(kind=kind)
    if lanes:
        env = [Meadow(10 + e, kind) for e in range(lanes)]
    recorder = started(env)
    rows = run(recorder, 60).chronological()
    returned = 0
    for lane, each in enumerate(recorder.envs):
        steps = rows[:, lane] if lanes else rows
        assert_steps(steps, each)
        masks = steps["wolf", "mask"]
        goes_on = torch.diff(steps["collector", "traj_ids"]) == 0
        returned += int((masks[1:] & ~masks[:-1] & goes_on[:, None]).sum())
    assert returned > 5  # agents that died came back in the same episode


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


def torchrl_rollout(env, seed: int, **settings) -> TensorDict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its PettingZoo version, and of ours
        wrapped = PettingZooWrapper(env, use_mask=True, done_on_any=False, **settings)
        wrapped.set_seed(seed)
        return wrapped.rollout(250)


@pytest.mark.parametrize("group_map", [None, MarlGroupMapType.ONE_GROUP_PER_AGENT])
def test_rows_are_those_of_torchrls_wrapper(group_map):
    make = partial(
        knights_archers_zombies.parallel_env,
        max_cycles=150,
        spawn_delay=5,
        max_zombies=20,
    )
    theirs, env = torchrl_rollout(make(), 3, group_map=group_map), make()
    rb = ReplayBuffer.from_env(env, 300, group_map=group_map)
    recorder = PettingZooRecorder(rb, env, group_map=group_map)
    recorder.reset(seed=3)
    recorder.reset()  # as TorchRL's set_seed and rollout do
    places = {
        agent: (group.name, i)
        for group in recorder.groups
        for i, agent in enumerate(group.agents)
    }
    for row in theirs:
        actions = {}
        for agent in env.agents:
            name, i = places[agent]
            actions[agent] = row[name, "action"][i].item()
        recorder.step(actions)
    assert not env.agents
    ours = rb.chronological().exclude("collector")
    # TorchRL keeps the last observation and actions of the dead
    absent = 0
    for key in ours.keys(True, True):
        mine, other = ours[key], theirs[key]
        assert mine.dtype == other.dtype, key
        if "next" not in key and key[-1] != "mask":
            acts = ours[key[0], "mask"]
            absent += int((~acts).sum())
            assert not mine[~acts].any()
            mine, other = mine[acts], other[acts]
        assert torch.equal(mine, other), key
    assert absent
    assert {*theirs["next"].keys(True, True)} == {*ours["next"].keys(True, True)}


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
    envs = [Meadow(), Meadow()]
    recorder = started(envs)
    for step in range(30):
        ended = [not env.agents for env in envs]
        if any(ended):
            recorder.reset(lanes=ended)
        value = np.full((2, 3, 1), 1.0 + step, np.float32)
        extras = {"wolf": {"state_value": value}, "note": np.full(2, step)}
        recorder.step([act(env) for env in envs], **extras)
    rows = recorder.buffer.chronological()
    acts = rows["wolf", "mask"]
    expected = torch.arange(1.0, 31)[:, None, None] * acts
    assert torch.equal(rows["wolf", "state_value"][..., 0], expected)
    assert not acts.all()
    assert rows["note"][:, 1].tolist() == list(range(30))
    recorder.reset()
    said = r"this step has the extras \[\"'note'\"\], the first step had"
    with pytest.raises(SchemaError, match=said):
        recorder.step([act(env) for env in envs], note=np.zeros(2))


WOLF_REWARD = ("next", "wolf", "reward")


@pytest.mark.parametrize("per_agent", [True, False])
def test_n_step_sums_end_with_each_agent_or_with_the_team(per_agent):
    n, gamma = 4, 0.9
    sampler = NStepSampler(
        UniformSampler(), n, gamma, reward_key=WOLF_REWARD, per_agent=per_agent
    )
    rb = run(started(Meadow(), 200, sampler=sampler), 80)
    rows, batch = rb.chronological(), rb.sample(100)
    alone = 0
    for drawn in batch:
        after = rows[drawn["index"] :][:n]["next"]
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
    assert (alone > 10) == per_agent


class Broken(Meadow):
    """Loses an agent, or its last observation."""

    how = ""

    def step(self, actions):
        result = super().step(actions)
        seen, _, terminated, truncated, _ = result
        if self.how:
            self.agents = [agent for agent in self.agents if agent != "sheep"]
            terminated["sheep"], truncated["sheep"] = False, self.how == "unseen"
        if self.how == "unseen":
            seen.pop("sheep", None)
        return result


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


def test_after_a_step_that_failed_all_environments_are_reset(monkeypatch):
    envs = [Meadow(3), Meadow(50)]
    recorder = started(envs)
    with monkeypatch.context() as patched:
        patched.setattr(envs[1], "step", lambda actions: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            recorder.step([act(env) for env in envs])
    with pytest.raises(RuntimeError, match=r"environments \[0\] need a reset, too"):
        recorder.reset(lanes=[False, True])
    recorder.reset()
    recorder.step([act(env) for env in envs])
    assert len(recorder.buffer) == 2


def test_each_environment_of_a_list_gets_its_own_seed(monkeypatch):
    envs, seeds = [Meadow(3), Meadow(3)], []
    recorder = started(envs)
    for env in envs:
        reset = env.reset

        def noted(reset=reset, **given):
            seeds.append(given["seed"])
            return reset(**given)

        monkeypatch.setattr(env, "reset", noted)
    recorder.reset(seed=5)
    recorder.reset(seed=[7, 3])
    assert seeds == [5, 6, 7, 3]


def test_an_ended_environment_must_be_reset():
    envs = [Meadow(3), Meadow(50)]
    recorder = started(envs)
    while all(env.agents for env in envs):
        recorder.step([act(env) for env in envs])
    (ended,) = (e for e in range(2) if not envs[e].agents)
    said = rf"reset environments \[{ended}.*with reset\(lanes="
    with pytest.raises(RuntimeError, match=said):
        recorder.step([act(env) for env in envs])


def test_whole_rewards_that_float32_lacks_are_refused_or_kept():
    env = Meadow(rewards=2**24 + 1)
    said = r"'wolf', 'reward'\) is 16777217, which float32 changes to 16777216: store"
    with pytest.raises(SchemaError, match=said):
        run(started(env), 1)
    rewards = {
        name: {"reward": torch.zeros(len(agents), 1, dtype=torch.float64)}
        for name, agents in GROUPS.items()
    }
    rows = run(started(env, extras={"next": rewards}), 20).chronological()
    stored, acts = rows["next", "wolf", "reward"][..., 0], rows["wolf", "mask"]
    assert torch.equal(stored, (2**24 + 1.0) * acts.double())


# -- games whose agents take turns

GAMES: dict[str, Any] = {
    **{
        name: partial(pettingzoo.make, "aec", f"classic/{name}")
        for name in ("tictactoe_v3", "connect_four_v3")
    },
    "rps_v2": partial(pettingzoo.make, "aec", "classic/rps_v2", max_cycles=6),
    "zombies": partial(
        knights_archers_zombies.env, max_cycles=80, spawn_delay=3, max_zombies=20
    ),
    "council": Council,
}


class Watched(BaseWrapper):
    """Logs each turn: the agent, what it sees, its flags and its action, and the
    rewards of all after the turn."""

    def __init__(self, env) -> None:
        super().__init__(env)
        self.games: list[list[Any]] = []

    def reset(self, seed: int | None = None, options=None) -> None:
        super().reset(seed=seed, options=options)
        self.games.append([])

    def step(self, action) -> None:
        env, agent = self.env, self.env.agent_selection
        seen = deepcopy(env.observe(agent))
        flags = bool(env.terminations[agent]), bool(env.truncations[agent])
        env.step(action)
        rewards = {} if any(flags) else {**env.rewards}
        self.games[-1].append((agent, seen, flags, action, rewards))

    def transitions(self, agent: str) -> list[TensorDict]:
        """Return the transitions of an agent, one after another: from each of its turns
        to its next."""
        steps = []
        for number, game in enumerate(self.games):
            turns = [place for place, turn in enumerate(game) if turn[0] == agent]
            for this, following in pairwise(turns):
                reward = sum(turn[-1].get(agent, 0.0) for turn in game[this:following])
                _, seen, _, action, _ = game[this]
                _, next_seen, flags, _, _ = game[following]
                step = masked(make_transition(seen, action, reward, next_seen, *flags))
                steps.append(step.set("game", torch.tensor(number)))
        return steps


def masked(step: TensorDict) -> TensorDict:
    """Convert action masks to bool; where a next mask allows nothing, all is
    allowed."""
    for part in (step, step["next"]):
        if "action_mask" in part.keys():
            part["action_mask"] = part["action_mask"].bool()
    if "action_mask" in step.keys() and not step["next", "action_mask"].any():
        step["next", "action_mask"] = torch.ones_like(step["next", "action_mask"])
    return step


def choice(env, random: np.random.Generator, illegal: float = 0.0):
    """Return the action of the next turn: None of a dead agent, mostly a legal one of
    others."""
    seen, _, terminated, truncated, _ = env.last()
    if terminated or truncated:
        return None
    space = env.action_space(env.agent_selection)
    if isinstance(seen, dict) and random.random() >= illegal:
        return int(random.choice(seen["action_mask"].nonzero()[0]))
    return int(random.integers(space.n))


def play(
    recorder: AECRecorder, games: int, seed: int = 0, illegal: float = 0.0
) -> None:
    env, random = recorder.env, np.random.default_rng(seed)
    for game in range(games):
        recorder.reset(seed=seed + game)
        for _ in env.agent_iter():
            recorder.step(choice(env, random, illegal))


def assert_rows(
    rows, expected: list[TensorDict], mask: torch.dtype = torch.bool
) -> None:
    wanted: Any = torch.stack(expected)
    assert len(rows) == len(expected)
    games, ids = wanted.pop("game"), rows["collector", "traj_ids"]
    assert torch.equal(games[1:] == games[:-1], ids[1:] == ids[:-1])
    keys = set(wanted.keys(True, True))
    assert set(rows.keys(True, True)) - {("collector", "traj_ids")} == keys
    for key in keys:
        dtype = mask if "action_mask" in key else wanted[key].dtype
        assert rows[key].dtype == dtype, key
        if key == ("next", "reward"):  # their sums may be added in another order
            assert torch.allclose(rows[key], wanted[key], atol=1e-6)
        else:
            assert torch.equal(rows[key], wanted[key]), key


@pytest.mark.parametrize(
    "name",
    # whose agents die as those of the council do, and which takes longest
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "zombies"))
        for name in GAMES
    ],
)
def test_lanes_hold_the_transitions_from_each_turn_of_an_agent_to_its_next(name):
    env, stats = Watched(GAMES[name]()), EpisodeStats()
    rb = ReplayBuffer.from_env(env, 6_000, stats=stats)
    is_board = name in ("tictactoe_v3", "connect_four_v3")
    play(AECRecorder(rb, env), 8, illegal=0.03 if is_board else 0.0)
    rewards, games = 0.0, 0
    for lane, agent in enumerate(env.possible_agents):
        expected = env.transitions(agent)
        assert_rows(rb.lane(lane).chronological(), expected)
        rewards += sum(float(step["next", "reward"]) for step in expected)
        games += len({int(step["game"]) for step in expected})
    returns = stats.history()["return"]
    assert returns.sum().item() == pytest.approx(rewards, abs=1e-4)
    assert len(returns) == games > 8


def test_what_a_reset_interrupts_is_dropped_but_not_what_has_ended():
    env = Watched(GAMES["tictactoe_v3"]())
    rb = ReplayBuffer.from_env(env, 200)
    recorder = AECRecorder(rb, env)
    # the first player wins; the second game is broken off
    for moves in ((0, 3, 1, 4, 2), (8, 7, 6)):
        recorder.reset()
        for move in moves:
            recorder.step(move)
    recorder.reset()
    first, second = (rb.lane(lane).chronological() for lane in (0, 1))
    assert first["action"].tolist() == [0, 1, 2, 8]
    assert second["action"].tolist() == [3, 4]
    assert first["next", "done"].flatten().tolist() == [False, False, True, False]
    assert second["next", "done"].flatten().tolist() == [False, True]
    assert second["next", "reward"].flatten().tolist() == [0, -1]
    for move in (4, 0, 5):
        recorder.step(move)
    ids = rb.lane(0).chronological()["collector", "traj_ids"].tolist()
    assert len({*ids[2:]}) == 3
    env.unwrapped.truncations["player_1"] = True  # it dies at the turn of the other
    recorder.reset()
    last = rb.lane(0).last(1)
    ends = [bool(last["next", name]) for name in ("terminated", "truncated")]
    assert (int(last["action"]), ends) == (5, [False, True])
    assert len(rb.lane(1)) == 2


def test_agents_with_unlike_spaces_and_two_games_have_places_of_their_own():
    envs = [Watched(Council(unlike=True)), Watched(Council(12, unlike=True))]
    action = Council().action_space("ann")
    mask = np.zeros((4, 3), bool)
    extras = {"action_mask": mask, "next": {"action_mask": mask}}
    space = envs[0].observation_space("ann")
    talks = ReplayBuffer.from_spaces(space, action, 1_000, num_envs=4, extras=extras)
    space = envs[0].observation_space("cy")
    notes = [ReplayBuffer.from_spaces(space, action, 300) for _ in envs]
    for game, env in enumerate(envs):
        ann, bob = (talks.lane(2 * game + lane) for lane in (0, 1))
        places = {"ann": ann, "bob": bob, "cy": notes[game]}
        play(AECRecorder(places, env), 5, seed=game)
        assert_rows(ann.chronological(), env.transitions("ann"))
        assert_rows(bob.chronological(), env.transitions("bob"))
        # as in their space
        assert_rows(notes[game].chronological(), env.transitions("cy"), mask=torch.int8)


def test_only_the_agents_of_a_dict_are_recorded_and_others_may_act_without_the_recorder():
    env = Watched(GAMES["connect_four_v3"]())
    rb = ReplayBuffer.from_spaces(
        env.observation_space("player_1"), env.action_space("player_1"), 200
    )
    recorder, random = AECRecorder({"player_1": rb}, env), np.random.default_rng(0)
    for seed in range(6):
        recorder.reset(seed=seed)
        for agent in env.agent_iter():
            (recorder if agent == "player_1" else env).step(choice(env, random))
    assert_rows(rb.chronological(), env.transitions("player_1"), mask=torch.int8)


def test_extras_belong_to_the_transition_that_begins():
    env = Council(50)
    rb = ReplayBuffer.from_env(env, 300)
    recorder, random = AECRecorder(rb, env), np.random.default_rng(0)
    expected: dict[str, list[float]] = {agent: [] for agent in env.possible_agents}
    recorder.reset(seed=2)
    for number, agent in enumerate(env.agent_iter()):
        action = choice(env, random)
        if action is None:
            recorder.step(None)
            continue
        recorder.step(action, log_prob=float(number))
        expected[agent].append(float(number))
    for lane, numbers in enumerate(expected.values()):
        assert rb.lane(lane).chronological()["log_prob"].tolist() == numbers


def test_an_agent_that_leaves_without_its_last_turn_is_refused_by_name():
    env = GAMES["tictactoe_v3"]()
    recorder = AECRecorder(ReplayBuffer.from_env(env, 200), env)
    recorder.reset()
    for move in (0, 3, 1, 4, 2):
        recorder.step(move)
    env.step(None)
    with pytest.raises(
        RuntimeError,
        match=r"agents \['player_2'\] have left .*: pass the None of their last turns",
    ):
        recorder.step(None)
    recorder.reset()
    recorder.step(0)
