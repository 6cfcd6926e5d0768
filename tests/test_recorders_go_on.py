"""Recorders that are saved in mid-episode go on bit for bit, with a copy of their environments."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlbuf_td import EpisodeStats, GymnasiumRecorder, NStepSampler, ProportionalSampler, ReplayBuffer
from tests.environments import Walk
from tests.test_goes_on import ALWAYS, WAYS, assert_equal, everything

CAPACITY = 90


def buffer(env: Any, seed: int, **given: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(seed)
    given = {"sampler": NStepSampler(ProportionalSampler(CAPACITY), 3, 0.9)} | given
    return ReplayBuffer.from_env(env, CAPACITY, batch_size=16, generator=generator, **given)


def vector(kind: str, mode: AutoresetMode) -> Any:
    return SyncVectorEnv([partial(Walk, kind, 3 + lane) for lane in range(3)], autoreset_mode=mode)


class Recording:
    """A recorder per environment over one buffer: ``run`` steps all, and resets where episodes have ended."""

    def __init__(self, envs: list[Any], seed: int, **given: Any) -> None:
        self.envs = envs
        env, lanes = envs[0], len(envs)
        self.rb = buffer(SyncVectorEnv([lambda: deepcopy(env)] * lanes) if lanes > 1 else env, seed, **given)
        targets = [self.rb.lane(lane) for lane in range(lanes)] if lanes > 1 else [self.rb]
        self.recorders: list[Any] = [
            GymnasiumRecorder(*pair, infos={"energy": 0.0}) for pair in zip(targets, envs, strict=True)
        ]

    def begin(self) -> None:
        for lane, recorder in enumerate(self.recorders):
            recorder.reset(seed=lane)

    def run(self, number: int) -> list[Any]:
        seen = [self.step(recorder, number) for recorder in self.recorders]
        torch.manual_seed(number)
        return [*seen, self.rb.sample()] if number % 4 == 3 else seen

    def step(self, recorder: Any, number: int) -> Any:
        lanes = getattr(recorder.env, "num_envs", None)
        action = number % 3 if lanes is None else np.full(lanes, number % 3)
        seen = recorder.step(action, note=np.float32(number) if lanes is None else np.full(lanes, np.float32(number)))
        if lanes is None and (seen[2] or seen[3]):
            recorder.reset()
        return [seen[0], *map(np.asarray, seen[1:4])]


class OfAgents(Recording):
    """One recorder of agents, over one environment or two."""

    def __init__(self, envs: list[Any], seed: int) -> None:
        from rlbuf_td import PettingZooRecorder

        self.envs, env = envs, envs[0] if len(envs) == 1 else envs
        self.rb = buffer(env, seed, sampler=ProportionalSampler(CAPACITY))
        self.recorders = [PettingZooRecorder(self.rb, env)]

    def step(self, recorder: Any, number: int) -> Any:
        ended = [not env.agents for env in recorder.envs]
        if any(ended):
            recorder.reset(lanes=ended)
        acts = [{a: np.ones(2, np.float32) if a == "sheep" else number % 3 for a in env.agents} for env in self.envs]
        recorder.step(acts[0] if len(acts) == 1 else acts)
        return [env.agents for env in self.envs]


def meadows(count: int) -> list[Any]:
    pytest.importorskip("pettingzoo")
    from tests.multi_agent import Meadow

    return [Meadow(9 + e, "dict") for e in range(count)]


stats = partial(Recording, stats=EpisodeStats())
CASES: dict[str, tuple[Callable[[], list[Any]], Any]] = {
    **{f"single {kind}": (partial(lambda kind: [Walk(kind)], kind), Recording) for kind in ("box", "tuple", "dict")},
    **{
        f"{mode.value} box": (partial(lambda mode: [vector("box", mode)], mode), Recording)
        for mode in [*AutoresetMode][:2]
    },
    "NextStep dict": (lambda: [vector("dict", AutoresetMode.NEXT_STEP)], Recording),
    "NextStep tuple, flat": (lambda: [vector("tuple", AutoresetMode.NEXT_STEP)], partial(Recording, flat=True)),
    "lanes": (lambda: [Walk("box"), Walk("box", 9)], Recording),
    "agents": (partial(meadows, 1), OfAgents),
    "agents of two": (partial(meadows, 2), OfAgents),
}


@pytest.mark.parametrize(("way", "rounds"), [("dump", 21), ("state", 26)])
@pytest.mark.parametrize("case", CASES)
def test_a_recorder_goes_on(case, way, rounds, tmp_path):
    make_envs, recording = CASES[case]
    one = recording(make_envs(), 0)
    one.begin()
    for number in range(rounds):
        one.run(number)
    other = recording(deepcopy(one.envs), 1)
    WAYS[way](one.rb, lambda: other.rb, tmp_path)
    for mine, theirs in zip(one.recorders, other.recorders, strict=True):
        torch.save(mine.state_dict(), tmp_path / "recorder.pt")
        theirs.load_state_dict(torch.load(tmp_path / "recorder.pt"))
    for number in range(rounds, rounds + 30):
        assert_equal(one.run(number), other.run(number), ALWAYS, f"round {number}")
    assert_equal(everything(one.rb), everything(other.rb), ALWAYS)


def spoiled(state: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return states of other recorders, and damaged ones, with a word of the error about each."""

    def of(mode: AutoresetMode = AutoresetMode.NEXT_STEP, kind: str = "box", **given: Any) -> dict[str, Any]:
        other = Recording([vector(kind, mode)], 0, **given)
        other.begin()
        return other.recorders[0].state_dict()

    queues = state["queues"]
    return [
        ({}, "not that of a GymnasiumRecorder"),
        (state | {"settings": state["settings"] | {"lanes": 5}}, "the state has lanes 5, this recorder 3"),
        (of(AutoresetMode.SAME_STEP), "autoreset_mode 'SameStep', this recorder 'NextStep'"),
        (of(kind="dict"), "not that of a GymnasiumRecorder|the saved"),
        (of(flat=True), r"rows '\[T\]', this recorder '\[T, E\]'"),
        (of(), r"write_count is \d+, and was 0 when the state was saved"),
        (state | {"observation": torch.zeros(3, 5)}, r"saved 'observation' has shape \(3, 5\), expected \(3, 2\)"),
        (state | {"trajectories": torch.zeros(2, dtype=torch.int64)}, r"saved trajectories are int64 of shape \(2,\)"),
        (state | {"queues": queues | {"layout": queues["layout"][:-1]}}, "in another order|the saved rows have"),
        (state | {"queues": queues | {"waiting": torch.tensor([5, 0, 0])}}, "words for .* waiting rows"),
    ]


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    one = Recording([vector("box", AutoresetMode.NEXT_STEP)], 0)
    one.begin()
    for number in range(21):
        one.run(number)
    state = one.recorders[0].state_dict()
    for wrong, words in spoiled(state):
        with pytest.raises(ValueError, match=words):
            one.recorders[0].load_state_dict(wrong)
        assert_equal(one.recorders[0].state_dict(), state, ())


def test_a_state_of_agents_needs_the_agents_that_lived():
    one = OfAgents(meadows(1), 0)
    one.begin()
    for number in range(21):
        one.run(number)
    state = one.recorders[0].state_dict()
    one.envs[0].reset()
    one.envs[0].agents = one.envs[0].agents[:1]
    one.rb.load_state_dict(one.rb.state_dict())
    with pytest.raises(ValueError, match=r"has the agents .*: restore the environments first"):
        one.recorders[0].load_state_dict(state)
