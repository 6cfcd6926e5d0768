"""Keys as the lists of a YAML file give them are the keys that tuples of strings are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

import rlbuf_td as td
from rlbuf_td.diagnostics.plots import plot_trajectory

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
    rb.set_(key("a.value"), torch.ones(20, 1)).set_at_(key("a.wanted"), torch.zeros(1), 3)
    batch["a", "obs"] += 1
    rb.write_back(batch, [key("a.obs")], sampled_at=rb.storage.clock.now)
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
