"""Recorders that go on in mid-episode, as if the program had not been stopped."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlbuf_td import GymnasiumRecorder, NStepSampler, ReplayBuffer, TrajectoryIndex, UniformSampler
from tests.environments import Walk
from tests.resuming import Agent

ROOT = Path(__file__).parent.parent
MODES = [None, *AutoresetMode][:-1]  # a disabled autoreset is that of a single environment


def assert_same(left: Agent, right: Agent) -> None:
    for mine, other in zip(left.network.parameters(), right.network.parameters(), strict=True):
        assert torch.equal(mine, other)
    rows, others = left.rb.chronological(), right.rb.chronological()
    for key in rows.keys(True, True):
        assert torch.equal(rows[key], others[key]), key
    every = torch.arange(len(left.rb))
    reaches = (TrajectoryIndex.of(each.rb.storage).reach(every) for each in (left, right))
    assert all(torch.equal(*pair) for pair in zip(*reaches, strict=True))
    assert left.rb.episode_stats.summary() == right.rb.episode_stats.summary()  # type: ignore[union-attr]
    assert left.recorder.pending == right.recorder.pending


@pytest.mark.parametrize(("mode", "flat"), [*((mode, False) for mode in MODES), (AutoresetMode.NEXT_STEP, True)])
@pytest.mark.parametrize("steps", [60, 91])
def test_a_resumed_agent_has_the_weights_of_one_that_was_not_stopped(mode, flat, steps, tmp_path):
    whole, stopped, resumed = (Agent(mode, flat=flat) for _ in range(3))
    for agent, count in ((whole, steps + 80), (stopped, steps)):
        agent.begin()
        for _ in range(count):
            agent.step()
    assert not stopped.rb.last(1)["next", "done"].all()  # in mid-episode
    stopped.save(tmp_path)
    resumed.load(tmp_path)
    assert_same(stopped, resumed)
    for _ in range(80):
        resumed.step()
    assert_same(whole, resumed)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="kills with a signal")
def test_a_killed_agent_goes_on_in_another_process(tmp_path):
    done = subprocess.run([sys.executable, "-m", "tests.resuming", str(tmp_path), "60"], cwd=ROOT, check=False)
    assert done.returncode == -9
    whole, resumed = Agent(AutoresetMode.SAME_STEP), Agent(AutoresetMode.SAME_STEP)
    resumed.load(tmp_path)
    for _ in range(80):
        resumed.step()
    whole.begin()
    for _ in range(140):
        whole.step()
    assert_same(whole, resumed)


def recorded(mode: AutoresetMode, kind: str, steps: int = 9, **settings: Any) -> GymnasiumRecorder:
    env = SyncVectorEnv([lambda lane=lane: Walk(kind, 3 + lane) for lane in range(3)], autoreset_mode=mode)
    rb = ReplayBuffer.from_env(env, 300, flat=settings.pop("flat", False))
    recorder = GymnasiumRecorder(rb, env, **settings)
    recorder.reset(seed=1)
    for step in range(steps):
        recorder.step(np.full(3, step % 3), note=np.full(3, step))
    return recorder


@pytest.mark.parametrize("kind", ["box", "tuple", "dict"])
@pytest.mark.parametrize("flat", [False, True])
def test_waiting_transitions_and_observations_of_every_kind_are_kept(kind, flat, tmp_path):
    recorder = recorded(AutoresetMode.NEXT_STEP, kind, 20, flat=flat, infos={"energy": 0.0})
    env = deepcopy(recorder.env)
    torch.save(recorder.state_dict(), tmp_path / "recorder.pt")
    recorder.buffer.dumps(tmp_path / "buffer")
    other = GymnasiumRecorder(ReplayBuffer.from_env(env, 300, flat=flat), env, infos={"energy": 0.0})
    other.buffer.loads(tmp_path / "buffer")
    other.load_state_dict(torch.load(tmp_path / "recorder.pt"))
    assert other.pending == recorder.pending
    for each in (recorder, other):
        for step in range(20):
            each.step(np.full(3, step % 3), note=np.full(3, step))
        each.flush()
    rows, others = recorder.buffer.chronological(flat=True), other.buffer.chronological(flat=True)
    assert len(rows) == len(others) > 10
    for key in rows.keys(True, True):
        assert torch.equal(rows[key], others[key]), key


def test_a_load_without_the_recorders_state_ends_the_trajectories():
    recorder = recorded(AutoresetMode.SAME_STEP, "box")
    state = recorder.state_dict()
    recorder.buffer.load_state_dict(recorder.buffer.state_dict())
    with pytest.raises(RuntimeError, match=r"call the recorder's reset\(\)"):
        recorder.step(np.zeros(3, int), note=np.zeros(3, int))
    recorder.load_state_dict(state)
    recorder.step(np.zeros(3, int), note=np.zeros(3, int))


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    recorder = recorded(AutoresetMode.SAME_STEP, "box")
    state = recorder.state_dict()

    def changed(**parts: Any) -> dict[str, Any]:
        return {name: parts.get(name, value) for name, value in deepcopy(state).items()}

    def other_env(lanes: int) -> dict[str, Any]:
        env = SyncVectorEnv([Walk] * lanes, autoreset_mode=AutoresetMode.SAME_STEP)
        return GymnasiumRecorder(ReplayBuffer.from_env(env, 300), env).state_dict()

    queues = state["queues"]
    bad: list[tuple[Any, str]] = [
        ({}, "not that of a GymnasiumRecorder"),
        (other_env(2), "the state has lanes 2, this recorder 3"),
        (recorded(AutoresetMode.NEXT_STEP, "box").state_dict(), "autoreset_mode 'NextStep', this recorder 'SameStep'"),
        (recorded(AutoresetMode.SAME_STEP, "dict").state_dict(), "not that of a GymnasiumRecorder|the saved"),
        (recorded(AutoresetMode.SAME_STEP, "box", infos={"energy": 0.0}).state_dict(), r"infos \[\['energy'\]\]"),
        (recorded(AutoresetMode.SAME_STEP, "box", flat=True).state_dict(), r"rows '\[T\]', this recorder '\[T, E\]'"),
        (
            recorded(AutoresetMode.SAME_STEP, "box", 8).state_dict(),
            "write_count is 9, and was 8 when the state was saved",
        ),
        (changed(observation=torch.zeros(3, 5)), r"saved 'observation' has shape \(3, 5\), expected \(3, 2\)"),
        (changed(trajectories=torch.zeros(2, dtype=torch.int64)), r"saved trajectories are int64 of shape \(2,\)"),
        (changed(queues=queues | {"layout": queues["layout"][:-1]}), "in another order|the saved rows have"),
        (changed(queues=queues | {"waiting": torch.tensor([5, 0, 0])}), "words for .* waiting rows"),
    ]
    before, loads = recorder.state_dict(), len(recorder.buffer)
    for wrong, words in bad:
        with pytest.raises(ValueError, match=words):
            recorder.load_state_dict(wrong)
        assert repr(recorder.state_dict()) == repr(before), words
    recorder.step(np.zeros(3, int), note=np.zeros(3, int))
    assert len(recorder.buffer) == loads + 3


def meadows(lanes: int) -> Any:
    pytest.importorskip("pettingzoo")
    from rlbuf_td import PettingZooRecorder
    from tests.multi_agent import Meadow

    envs = [Meadow(9 + e, "dict") for e in range(max(1, lanes))]
    return PettingZooRecorder, envs if lanes else envs[0]


def run_agents(recorder: Any, steps: int) -> None:
    for _ in range(steps):
        ended = [not env.agents for env in recorder.envs]
        if any(ended):
            recorder.reset(lanes=ended)
        actions = [
            {agent: 0 if agent != "sheep" else np.ones(2, np.float32) for agent in e.agents} for e in recorder.envs
        ]
        single = not isinstance(recorder.env, list)
        note = np.float32(len(recorder.buffer))
        recorder.step(actions[0] if single else actions, note=note if single else np.full(len(actions), note))


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("steps", [21, 26])
def test_agents_go_on_in_mid_episode(lanes, steps, tmp_path):
    recorder_of, env = meadows(lanes)

    def buffer() -> ReplayBuffer:
        sampler = NStepSampler(UniformSampler(), 3, 0.9, reward_key=("next", "wolf", "reward"))
        return ReplayBuffer.from_env(env, 200, sampler=sampler, batch_size=32)

    recorder = recorder_of(buffer(), env)
    recorder.reset(seed=3)
    run_agents(recorder, steps)
    assert any(each.agents for each in recorder.envs)
    again = deepcopy(env)
    torch.save(recorder.state_dict(), tmp_path / "recorder.pt")
    recorder.buffer.dumps(tmp_path / "buffer")
    other = recorder_of(buffer(), again)
    other.buffer.loads(tmp_path / "buffer")
    state = torch.load(tmp_path / "recorder.pt")
    with pytest.raises(ValueError, match="the state has lanes 5"):
        other.load_state_dict(state | {"settings": state["settings"] | {"lanes": 5}})
    other.load_state_dict(state)
    batches = []
    for each in (recorder, other):
        run_agents(each, 30)
        torch.manual_seed(1)
        batches.append(each.buffer.sample())
    rows, others = recorder.buffer.chronological(), other.buffer.chronological()
    for left, right in ((rows, others), batches):
        for key in left.keys(True, True):
            assert torch.equal(left[key], right[key]), key
    for e in again if lanes else [again]:
        e.reset()
        e.agents = e.agents[:2]
    other.buffer.load_state_dict(other.buffer.state_dict())
    with pytest.raises(ValueError, match=r"has the agents .*: restore the environments first"):
        other.load_state_dict(state)
