"""The recorder of turn-based games, against what a plain log of the turns says."""

from __future__ import annotations

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

from rlbuf_td import (
    AECRecorder,
    EpisodeStats,
    NStepSampler,
    ReplayBuffer,
    UniformSampler,
    check,
    make_transition,
)
from tests.multi_agent import Council

pytestmark = pytest.mark.filterwarnings("ignore:.*Illegal move made")
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

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.games: list[list[Any]] = []

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed=seed, options=options)
        self.games.append([])

    def step(self, action: Any) -> None:
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


def act(env: Any, random: np.random.Generator, illegal: float = 0.0) -> Any:
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
            recorder.step(act(env, random, illegal))


def assert_rows(
    rows: Any, expected: list[TensorDict], mask: torch.dtype = torch.bool
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


@pytest.mark.parametrize("name", GAMES)
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
            (recorder if agent == "player_1" else env).step(act(env, random))
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
        action = act(env, random)
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
