"""Advantages of agents that die and return, against plain loops in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

pytest.importorskip("pettingzoo")

from rlbuf_td import PettingZooRecorder, RolloutBuffer, RolloutWriter
from rlbuf_td.functional import generalized_advantage_estimate
from tests.multi_agent import Meadow, act

GAMMA, LMBDA, T, E, GROUP = 0.9, 0.8, 48, 2, "wolf"
KEYS: dict[str, Any] = {
    "value_key": (GROUP, "state_value"),
    "advantage_key": (GROUP, "advantage"),
    "value_target_key": (GROUP, "value_target"),
    "reward_key": ("next", GROUP, "reward"),
}


def value_of(observation: torch.Tensor) -> torch.Tensor:
    return (observation * torch.tensor([0.3, -0.7]).to(observation)).sum(-1, keepdim=True)


def recorded(lanes: int = E, *, stored: bool = True, **settings: Any) -> tuple[RolloutBuffer, list[Meadow]]:
    """Return a rollout of random steps; with ``stored``, the values of the agents are stored with each step."""
    critic = TensorDictModule(value_of, [(GROUP, "observation")], [(GROUP, "state_value")])
    envs = [Meadow(9 + e) for e in range(max(1, lanes))]
    writer = RolloutWriter(GAMMA, LMBDA, value_network=critic, **KEYS, **settings.pop("writer", {}))
    rollout = RolloutBuffer.from_env(envs if lanes else envs[0], T, writer=writer, batch_size=16, **settings)
    recorder = PettingZooRecorder(rollout, envs if lanes else envs[0])
    for each in envs:
        for number, agent in enumerate(each.possible_agents):
            each.action_space(agent).seed(number)
    observed: list[Any] = (
        [result[0] for result in [recorder.reset(seed=4)][0]] if lanes else [recorder.reset(seed=4)[0]]
    )
    for _ in range(T):
        for e, env in enumerate(envs):
            if not env.agents:
                again = recorder.reset(lanes=[e == each for each in range(lanes)] if lanes else None)
                observed[e] = again[e][0] if lanes else again[0]
        values = np.zeros((len(envs), 3, 1), np.float32)
        for e, seen in enumerate(observed):
            for i in range(3):
                if f"{GROUP}_{i}" in envs[e].agents:
                    values[e, i] = value_of(torch.from_numpy(seen[f"{GROUP}_{i}"])).item()
        extras = {GROUP: {"state_value": values if lanes else values[0]}} if stored else {}
        actions = [act(env) for env in envs]
        results: Any = recorder.step(actions if lanes else actions[0], **extras)
        observed = [result[0] for result in results] if lanes else [results[0]]
    return rollout, envs


def brute(envs: list[Meadow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and value targets of the wolves, from the environments' own histories."""
    advantage, target = torch.zeros(2, T, len(envs), 3, 1, dtype=torch.float64)
    for e, env in enumerate(envs):
        for i in range(3):
            agent, carried, later = f"{GROUP}_{i}", 0.0, None
            for t in reversed(range(T)):
                episode, acted, before, _, (seen, rewards, terminated, truncated, _), _ = env.history[t]
                if agent not in acted:
                    carried, later = 0.0, None
                    continue
                goes_on = not (terminated[agent] or truncated[agent]) and later == episode
                value = value_of(torch.from_numpy(before[agent])).item()
                following = 0.0 if terminated[agent] else value_of(torch.from_numpy(seen[agent])).item()
                delta = float(np.float32(rewards[agent])) + GAMMA * following - value
                carried = delta + GAMMA * LMBDA * carried * goes_on
                advantage[t, e, i], target[t, e, i], later = carried, carried + value, episode
    return advantage, target


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("lanes", [0, E])
def test_advantages_of_agents_end_where_the_agent_dies(lanes, stored):
    rollout, envs = recorded(lanes, stored=stored)
    rows, (advantage, target) = rollout.storage[:].reshape(T, -1), brute(envs)
    acts = rows[GROUP, "mask"]
    assert 0.3 < acts.float().mean() < 0.9
    torch.testing.assert_close(rows[GROUP, "advantage"].double(), advantage, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows[GROUP, "value_target"].double(), target, rtol=1e-5, atol=1e-5)
    assert not rows[GROUP, "advantage"][~acts].any()
    summary = rollout.summary()
    assert summary["advantage_mean"] == pytest.approx(advantage[acts].mean().item(), rel=1e-4)
    assert summary["value_target_std"] == pytest.approx(target[acts].std(correction=0).item(), rel=1e-4)


def test_an_estimator_of_ones_own_gets_the_flags_of_agents():
    def estimator(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        names = ("state_value", "reward", "done", "terminated")
        keys: list[Any] = [(GROUP, names[0]), ("next", GROUP, names[0]), ("next", GROUP, names[1])]
        flags = [data["next", name] for name in names[2:]]
        return generalized_advantage_estimate(GAMMA, LMBDA, *(data[key] for key in keys), *flags, time_dim=1)

    critic = TensorDictModule(value_of, [(GROUP, "observation")], [(GROUP, "state_value")])
    expected, _ = recorded(stored=False)
    writer = RolloutWriter(estimator=estimator, value_network=critic, **KEYS)
    rollout = RolloutBuffer(T, E, writer=writer)
    rows = expected.storage[:].exclude((GROUP, "advantage"), (GROUP, "value_target"), (GROUP, "state_value"))
    rollout.extend(rows.transpose(0, 1))
    for key in ((GROUP, "advantage"), (GROUP, "value_target")):
        torch.testing.assert_close(rollout.storage[key], expected.storage[key])


@pytest.mark.parametrize("how", ["rollout", "minibatch"])
def test_absent_agents_do_not_count_for_normalization(how):
    settings = {"writer": {"normalize_advantage": True}} if how == "rollout" else {"normalize_advantage": how}
    rollout, envs = recorded(**settings)
    advantage, _ = brute(envs)
    if how == "rollout":
        rows = rollout.storage[:]
        acts, found = rows[GROUP, "mask"], rows[GROUP, "advantage"]
        expected = advantage[acts]
        expected = (expected - expected.mean()) / expected.std(correction=0)
        torch.testing.assert_close(found[acts].double(), expected, rtol=1e-4, atol=1e-5)
        assert not found[~acts].any()
        return
    for batch in rollout:
        acts, found = batch[GROUP, "mask"], batch[GROUP, "advantage"].double()
        assert found[acts].mean().item() == pytest.approx(0, abs=1e-5)
        assert found[acts].std(correction=0).item() == pytest.approx(1, rel=1e-4)
        assert not found[~acts].any()
