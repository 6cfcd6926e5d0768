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
    check,
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


def _place(observation):
    return observation["place"] if isinstance(observation, dict) else observation


def _allowed(observation):
    return (
        observation["action_mask"].astype(bool)
        if isinstance(observation, dict)
        else [True] * 3
    )


def assert_steps(rows, env: Meadow) -> None:
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


def torchrl_rollout(env, seed: int, **settings) -> TensorDict:
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

    def make():
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
    ends = {"done", "terminated", "truncated"}
    wanted = {
        key
        for key in theirs.keys(True, True)
        if "next" in key or ends.isdisjoint({key, *key})
    }
    assert {*ours.keys(True, True)} - {("collector", "traj_ids")} == wanted
    absent = 0
    for key in wanted:
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


class Broken(Meadow):
    """Loses an agent, or its last observation."""

    how = ""

    def step(self, actions):
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


# -- games whose agents take turns

GAMES: dict[str, Any] = {
    **{
        name: partial(pettingzoo.make, "aec", f"classic/{name}")
        for name in ("tictactoe_v3", "connect_four_v3")
    },
    "rps_v2": partial(pettingzoo.make, "aec", "classic/rps_v2", max_cycles=6),
    "go_v5": partial(pettingzoo.make, "aec", "classic/go_v5", board_size=5),
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
        seen, flags = (
            deepcopy(env.observe(agent)),
            (bool(env.terminations[agent]), bool(env.truncations[agent])),
        )
        env.step(action)
        rewards = (
            {}
            if any(flags)
            else {each: float(reward) for each, reward in env.rewards.items()}
        )
        self.games[-1].append((agent, seen, flags, action, rewards))

    def transitions(self, agent: str) -> list[TensorDict]:
        """Return the transitions of an agent, one after another: from each of its turns
        to its next."""
        found = []
        for number, game in enumerate(self.games):
            turns = [place for place, turn in enumerate(game) if turn[0] == agent]
            for this, following in pairwise(turns):
                reward = sum(turn[-1].get(agent, 0.0) for turn in game[this:following])
                step = (
                    game[this][1],
                    game[this][3],
                    reward,
                    game[following][1],
                    *game[following][2],
                )
                found.append(
                    masked(make_transition(*step)).set("game", torch.tensor(number))
                )
        return found


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
    wanted: Any = torch.stack(expected) if expected else None
    assert len(rows) == len(expected)
    if wanted is None:
        return
    games, ids = wanted.pop("game"), rows["collector", "traj_ids"]
    assert torch.equal(games[1:] == games[:-1], ids[1:] == ids[:-1])
    assert set(rows.keys(True, True)) - {("collector", "traj_ids")} == set(
        wanted.keys(True, True)
    )
    for key in wanted.keys(True, True):
        assert rows[key].dtype == (
            mask if "action_mask" in key else wanted[key].dtype
        ), key
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
    rb = ReplayBuffer.from_env(env, 6_000, stats=stats, batch_size=8)
    play(
        AECRecorder(rb, env),
        8,
        illegal=0.03 if name in ("tictactoe_v3", "connect_four_v3") else 0.0,
    )
    ended: list[float] = []
    for lane, agent in enumerate(env.possible_agents):
        expected = env.transitions(agent)
        assert len(expected) > 8
        assert_rows(rb.lane(lane).chronological(), expected)
        for game in range(8):
            rewards = [
                float(step["next", "reward"])
                for step in expected
                if step["game"] == game
            ]
            ended += [sum(rewards)] if rewards else []
    assert stats.history()["return"].sum().item() == pytest.approx(sum(ended), abs=1e-4)
    assert len(stats.history()["return"]) == len(ended)
    unusual = {"council": {"done-without-reset"}, "zombies": {"float64"}}.get(
        name, set()
    )
    assert {finding.code for finding in check(rb).findings} <= unusual


def test_no_transition_runs_from_one_game_into_the_next():
    env = Watched(GAMES["tictactoe_v3"]())
    rb = ReplayBuffer.from_env(
        env, 200, batch_size=64, sampler=NStepSampler(UniformSampler(), 3, 1.0)
    )
    play(AECRecorder(rb, env), 10)
    batch = rb.sample()  # n-step sums of a lane's turns
    t, e = batch["index"].unbind(-1)
    for number in range(64):
        rows = rb.lane(int(e[number])).chronological()[int(t[number]) :][:3]
        same = rows["collector", "traj_ids"] == rows["collector", "traj_ids"][0]
        assert batch["next", "reward"][number] == rows["next", "reward"][same].sum()


def test_what_a_reset_interrupts_is_dropped_but_not_what_has_ended():
    env = Watched(GAMES["tictactoe_v3"]())
    rb = ReplayBuffer.from_env(env, 200)
    recorder = AECRecorder(rb, env)
    # the first player wins; the second game is broken off
    for moves in ((0, 3, 1, 4, 2), (8, 7, 6)):
        recorder.reset()
        for move in moves:
            recorder.step(move)
    # the last turns of the first game have been taken
    assert [len(rb.lane(lane)) for lane in (0, 1)] == [4, 2]
    recorder.reset()
    first, second = (rb.lane(lane).chronological() for lane in (0, 1))
    assert first["action"].tolist() == [0, 1, 2, 8]
    assert second["action"].tolist() == [3, 4]
    assert first["next", "done"].flatten().tolist() == [False, False, True, False]
    assert second["next", "done"].flatten().tolist() == [False, True]
    assert second["next", "reward"].flatten().tolist() == [0, -1]
    for move in (4, 0, 5):
        recorder.step(move)
    ids = rb.lane(0).chronological()["collector", "traj_ids"]
    assert len(ids) == 5
    assert ids[3] not in (ids[2], ids[4])
    env.unwrapped.truncations["player_1"] = True  # it dies at the turn of the other
    recorder.reset()
    last = rb.lane(0).last(1)
    assert (
        int(last["action"]),
        bool(last["next", "truncated"]),
        bool(last["next", "terminated"]),
    ) == (5, True, False)
    assert len(rb.lane(1)) == 2


def test_agents_with_unlike_spaces_and_two_games_have_places_of_their_own():
    envs = [Watched(Council(unlike=True)), Watched(Council(12, unlike=True))]
    spaces = {
        agent: (envs[0].observation_space(agent), Council().action_space(agent))
        for agent in ("ann", "cy")
    }
    mask = np.zeros((4, 3), bool)
    extras = {"action_mask": mask, "next": {"action_mask": mask}}
    talks = ReplayBuffer.from_spaces(*spaces["ann"], 1_000, num_envs=4, extras=extras)
    notes = [ReplayBuffer.from_spaces(*spaces["cy"], 300) for _ in envs]
    for game, env in enumerate(envs):
        places = {
            "ann": talks.lane(2 * game),
            "bob": talks.lane(2 * game + 1),
            "cy": notes[game],
        }
        play(AECRecorder(places, env), 5, seed=game)
    for game, env in enumerate(envs):
        for lane, agent in enumerate(("ann", "bob")):
            assert_rows(
                talks.lane(2 * game + lane).chronological(), env.transitions(agent)
            )
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
    recorder, given = (
        AECRecorder(rb, env),
        {agent: list[float]() for agent in env.possible_agents},
    )
    recorder.reset(seed=2)
    random = np.random.default_rng(0)
    for number, agent in enumerate(env.agent_iter()):
        action = choice(env, random)
        recorder.step(action, **({} if action is None else {"log_prob": float(number)}))
        given[agent] += [] if action is None else [float(number)]
    for lane, agent in enumerate(env.possible_agents):
        assert rb.lane(lane).chronological()["log_prob"].tolist() == given[agent]


def test_a_load_and_a_failed_step_interrupt_the_game():
    env = GAMES["tictactoe_v3"]()
    rb = ReplayBuffer.from_env(env, 200)
    recorder = AECRecorder(rb, env)
    with pytest.raises(
        RuntimeError, match=r"call the recorder's reset\(\) before the first step"
    ):
        recorder.step(0)
    recorder.reset()
    for move in (0, 1, 2):
        recorder.step(move)
    rb.load_state_dict(rb.state_dict())
    with pytest.raises(RuntimeError, match="after a load"):
        recorder.step(3)
    recorder.reset()
    recorder.step(5)
    with pytest.raises(AssertionError):
        recorder.step(99)
    with pytest.raises(RuntimeError, match="after a step that failed"):
        recorder.step(3)
    recorder.reset()
    for move in (6, 7, 8):
        recorder.step(move)
    rows = rb.lane(0).chronological()
    assert rows["action"].tolist() == [0, 6]
    assert rows.get(("collector", "traj_ids")).diff() != 0


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


class Observed(Meadow):
    """A meadow that tells what each agent would see, dead or alive."""

    def step(self, actions: Any) -> Any:
        _, *others = super().step(actions)
        return ({agent: self.observe(agent) for agent in AGENTS}, *others)


def test_what_absent_agents_would_see_is_not_stored():
    env = Observed()
    rb = ReplayBuffer.from_env(env, 200)
    recorder = PettingZooRecorder(rb, env)
    for _ in range(60):
        if not env.agents:
            recorder.reset(seed=len(rb))
        recorder.step(act(env))
    rows = rb[:]
    is_absent = ~rows["wolf", "mask"] & ~rows["next", "wolf", "mask"]
    assert is_absent.any()
    assert not rows["next", "wolf", "observation"][is_absent].any()
