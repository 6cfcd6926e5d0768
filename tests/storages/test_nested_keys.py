"""A nested Dict observation is the native case of demos, buffers and hindsight; keys may be lists of strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import EnvBase, GymWrapper, SerialEnv

import rlbuf_td as td
from rlbuf_td import HindsightSampler, ProportionalSampler, ReplayBuffer, gymnasium_reward_fn
from rlbuf_td.__main__ import main
from rlbuf_td.cli import demo
from rlbuf_td.diagnostics.plots import plot_trajectory
from tests.catalogue import assert_same
from tests.environments import Nested

pytestmark = pytest.mark.filterwarnings(
    *(f"ignore::{kind}:torchrl" for kind in ("DeprecationWarning", "UserWarning", "FutureWarning")),
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
)
NAME = "NestedCartPole-v1"
PARTS = {
    "observation": torch.float32,
    ("camera", "image"): torch.uint8,
    ("body", "vector"): torch.float32,
    ("body", "mode"): torch.int64,
    ("body", "mask"): torch.bool,
}


@pytest.fixture(autouse=True)
def _registered():
    gymnasium.register(NAME, entry_point=lambda: Nested(gymnasium.make("CartPole-v1")), reward_threshold=475.0)
    yield
    del gymnasium.registry[NAME]


def test_the_demo_learns_from_a_nested_dict(tmp_path, monkeypatch, capsys):
    batches: list[TensorDict] = []
    sample = ReplayBuffer.sample

    def noted(rb: ReplayBuffer) -> TensorDict:
        batches.append(sample(rb))
        return batches[-1]

    monkeypatch.setattr(ReplayBuffer, "sample", noted)
    monkeypatch.setattr(demo, "UPDATES", 2)
    assert main(["demo", "--env", NAME, "--steps", "1280", "--out", str(tmp_path)]) == 0
    assert "mean return of the final policy" in capsys.readouterr().out
    assert batches
    for key, dtype in PARTS.items():
        assert batches[-1][key].dtype == dtype, key
    image, observation = batches[-1]["camera", "image"], batches[-1]["observation"]
    number = (observation[..., 0].abs() * 1_000).long() % 256  # each part is that of its own row
    assert torch.equal(image[..., 0, 0, 0].long(), number)


class Goals(gymnasium.ObservationWrapper):
    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        place = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        parts = dict(env.observation_space.spaces)
        self.observation_space = gymnasium.spaces.Dict(parts | {"desired_goal": place, "achieved_goal": place})

    def observation(self, observation: Any) -> Any:
        goals = {"desired_goal": np.ones(1, np.float32), "achieved_goal": observation["observation"][:1]}
        return observation | goals

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -np.abs(achieved - desired)[:, 0]


@pytest.mark.parametrize("lanes", [1, 3])
def test_hindsight_relabels_only_the_goals_of_a_nested_dict(lanes):
    def make() -> EnvBase:
        return GymWrapper(Goals(Nested(gymnasium.make("CartPole-v1"))), categorical_action_encoding=True)

    env = SerialEnv(lanes, make) if lanes > 1 else make()
    reward_fn = gymnasium_reward_fn(Goals(Nested(gymnasium.make("CartPole-v1"))))
    sampler = HindsightSampler(ProportionalSampler(600), reward_fn, her_ratio=0.5)
    rb = ReplayBuffer.from_env(env, 600, sampler=sampler, batch_size=64, dim_extend=int(lanes > 1))
    for data in Collector(env, frames_per_batch=60, total_frames=300):
        rb.extend(data)
    batch = rb.sample()
    stored = rb.storage.get(tuple(batch["index"].T) if lanes > 1 else batch["index"])
    new = batch["relabeled"]
    assert new.any()
    assert not new.all()
    assert (batch["desired_goal"][~new] == 1).all()
    reached = rb.chronological(flat=True)["next", "achieved_goal"]
    assert torch.isin(batch["desired_goal"][new], reached).all()
    distance = (batch["next", "achieved_goal"] - batch["desired_goal"]).abs()
    assert torch.equal(batch["next", "reward"][new], -distance[new])
    untouched = ["observation", "camera", "body", ("next", "observation"), ("next", "camera"), ("next", "body")]
    assert_same(batch.select(*untouched), stored.select(*untouched))
    for key, dtype in PARTS.items():
        assert batch[key].dtype == batch["next"][key].dtype == dtype, key


Key = Callable[[str], Any]  # makes a key of names with dots


def steps() -> TensorDict:
    number = torch.arange(20.0).unsqueeze(-1)
    end = number.long() % 5 == 4
    ids = {"traj_ids": number[:, 0].long() // 5}
    names = {"reward": number, "done": end, "terminated": end, "truncated": end & False}
    after = {"a": {"obs": number.expand(20, 16) + 1, "goal": number}, **names}
    root = {"obs": number.expand(20, 16), "value": number, "wanted": number, "first": end}
    return TensorDict({"a": root, "next": after, "ids": ids, "td": {"error": number}}, [20])


def rows_of(rb: Any) -> Any:
    torch.manual_seed(0)
    rb.extend(steps())
    return rb.sample(6)


def drawn(sampler: Any, **options: Any) -> Any:
    return rows_of(td.ReplayBuffer(storage=td.PackedStorage(20), sampler=sampler, **options))


def ends(key: Key) -> dict[str, Any]:
    return {"done_key": key("next.done"), "traj_key": key("ids.traj_ids")}


def flags(key: Key) -> dict[str, Any]:
    names = {f"{name}_key": key(f"next.{name}") for name in ("reward", "done", "terminated", "truncated")}
    return names | {"trajectory_key": key("ids.traj_ids")}


def goals(key: Key) -> dict[str, Any]:
    return {"goal_key": key("a.wanted"), "achieved_goal_key": key("a.goal")}


def relabelled(key: Key) -> Any:
    class Env:
        def compute_reward(self, achieved: Any, goal: Any, info: Any) -> Any:
            return (achieved + goal + info["value"])[:, 0]

    reward_fn = td.gymnasium_reward_fn(Env(), info_keys={"value": key("a.value")}, **goals(key))
    options = ends(key) | goals(key) | {"reward_key": key("next.reward")}
    return drawn(td.HindsightSampler(td.UniformSampler(), reward_fn, **options))


def rollout(key: Key) -> Any:
    added = {f"{name}_key": key(f"a.{name}") for name in ("value", "advantage", "value_target")}
    return rows_of(td.RolloutBuffer(20, batch_size=6, writer=td.RolloutWriter(**added, **flags(key))))


def statistics(key: Key) -> Any:
    stats = td.EpisodeStats([key("next.a.goal")], reasons=[key("a.first")], **flags(key))
    td.ReplayBuffer(storage=td.PackedStorage(20), stats=stats).extend(steps())
    return stats.summary()


def by_lane(key: Key) -> Any:
    rb = td.ReplayBuffer(storage=td.PackedStorage(40, ndim=2, lanes=4), lane_key=key("ids.traj_ids"))
    rb.extend(steps())
    return rb[:]


def edited(key: Key) -> Any:
    rb = td.ReplayBuffer(storage=td.PackedStorage(20))
    batch = rows_of(rb)
    rb.set_at_(key("a.value"), torch.ones(20, 1), slice(None)).set_at_(key("a.wanted"), torch.zeros(1), 3)
    batch["a", "obs"] += 1
    rb.write_back(batch, [key("a.obs")], sampled_at=rb.storage.stamps(batch["index"]))
    return rb[:]


def imported(key: Key) -> Any:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
    rb.extend(steps())
    return td.ReplayBuffer.from_torchrl(rb, exclude=[key("a.obs")], trajectory_key=key("ids.traj_ids"))[:]


def plotted(key: Key) -> Any:
    rb = td.ReplayBuffer(storage=td.PackedStorage(20))
    rb.extend(steps())
    return [axes.get_ylabel() for axes in plot_trajectory(rb, 0, keys=[key("a.value")]).axes]


TAKERS: dict[str, Callable[[Key], Any]] = {
    "NStepSampler": lambda key: drawn(
        td.NStepSampler(td.UniformSampler(), 3, 0.9, reward_key=key("next.reward"), **ends(key))
    ),
    "SequenceSampler": lambda key: drawn(
        td.SequenceSampler(td.UniformSampler(), 2, init_key=key("a.is_init"), **ends(key))
    ),
    "EpisodeSampler": lambda key: drawn(
        td.EpisodeSampler(reward_key=key("next.reward"), init_key=key("a.is_init"), **ends(key))
    ),
    "HindsightSampler": relabelled,
    "RolloutWriter": rollout,
    "EpisodeStats": statistics,
    "priority_key": lambda key: drawn(td.ProportionalSampler(20), priority_key=key("td.error")),
    "lane_key": by_lane,
    "share_next and frames": lambda key: rows_of(
        td.ReplayBuffer(storage=td.PackedStorage(20, share_next=[key("a.obs")]))
    ),
    "edits": edited,
    "from_torchrl": imported,
    "plot_trajectory": plotted,
}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_list_of_strings_is_a_nested_key(taker):
    expected = TAKERS[taker](lambda names: tuple(names.split(".")))
    for key in (lambda names: names.split("."), lambda names: OmegaConf.create(names.split("."))):
        found = TAKERS[taker](key)
        assert bool((found == expected).all()) if isinstance(expected, TensorDict) else found == expected
