"""Recorders of single lanes against lists that a plain loop keeps."""

from __future__ import annotations

import multiprocessing as mp
import threading
import traceback
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from rlbuf_td import (
    EpisodeStats,
    GymnasiumRecorder,
    NStepSampler,
    ReplayBuffer,
    TrajectoryIndex,
    UniformSampler,
    make_transition,
)
from tests.environments import Nested, Walk

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
STEPS, LONGEST = 40, 12


def cart_pole(nested: bool = False) -> Any:
    env = gymnasium.make("CartPole-v1", max_episode_steps=LONGEST)  # both kinds of ends
    return Nested(env) if nested else env


def buffer(env: Any, lanes: int, capacity: int = STEPS, **kwargs: Any) -> ReplayBuffer:
    spaces = env.observation_space, env.action_space
    return ReplayBuffer.from_spaces(*spaces, capacity * lanes, num_envs=lanes, batch_size=200, **kwargs)


class Actor:
    """Steps one environment with a recorder, and keeps the transitions in a list."""

    def __init__(self, target: Any, env: Any, seed: int, **settings: Any) -> None:
        self.env, self.recorder = env, GymnasiumRecorder(target, env, **settings)
        self.draw = np.random.default_rng(seed)
        self.steps: list[TensorDict] = []
        self.episodes: list[float] = []  # returns of the episodes that have ended
        self.obs, _ = self.recorder.reset(seed=seed)
        self.total = 0.0

    def step(self) -> None:
        before, action = deepcopy(self.obs), int(self.draw.integers(2))
        self.obs, reward, terminated, truncated, _ = self.recorder.step(action)
        after = deepcopy(self.obs)
        self.steps.append(make_transition(before, action, reward, after, terminated, truncated))
        self.total += float(reward)
        if terminated or truncated:
            self.episodes.append(self.total)
            self.reset()

    def reset(self) -> None:
        self.obs, _ = self.recorder.reset()
        self.total = 0.0

    def history(self) -> TensorDict:
        return torch.stack(self.steps)


def assert_rows(rows: Any, expected: TensorDict) -> None:
    assert rows.shape == expected.shape
    keys = set(expected.keys(True, True))
    assert keys | {("collector", "traj_ids")} == set(rows.keys(True, True))
    for key in keys:
        assert rows[key].dtype == expected[key].dtype, key
        assert torch.equal(rows[key], expected[key]), key
    ids, done = rows["collector", "traj_ids"], rows["next", "done"].flatten()
    assert (ids[1:] != ids[:-1])[done[:-1]].all()


@pytest.mark.parametrize(("nested", "capacity"), [(False, STEPS), (True, 4 * STEPS)])
def test_lanes_of_unlike_speed_hold_the_steps_of_their_environments(nested, capacity):
    envs, stats = [cart_pole(nested), cart_pole(nested)], EpisodeStats()
    rb = buffer(envs[0], 2, capacity, stats=stats, sampler=NStepSampler(UniformSampler(), 3, 0.5))
    fast, slow = (Actor(rb.lane(lane), env, lane) for lane, env in enumerate(envs))
    for step in range(2 * STEPS):
        fast.step()
        if step % 3 == 0:
            slow.step()
        if step % 25 == 24:
            slow.reset()  # breaks off an episode
        for lane, actor in enumerate((fast, slow)):
            assert len(rb.lane(lane)) == min(capacity, len(actor.steps))
    for lane, actor in enumerate((fast, slow)):
        assert_rows(rb.lane(lane).chronological(), actor.history()[-capacity:])
    assert sorted(stats.history()["return"].tolist()) == sorted(fast.episodes + slow.episodes)
    assert stats.steps == len(fast.steps) + len(slow.steps)
    first, second = (set(rb.lane(lane).chronological()["collector", "traj_ids"].tolist()) for lane in (0, 1))
    assert not first & second
    batch = rb.sample()  # the third next observation of an episode, or its last
    t, e = batch["index"].unbind(-1)
    _, ahead, ended = TrajectoryIndex.of(rb.storage).reach((t, e))
    assert torch.equal(batch["steps_to_next_obs"].flatten(), (ahead + 1).clamp(max=3))
    assert ended.any()


@pytest.mark.parametrize(("mode", "kind"), [*zip(AutoresetMode, ["box", "dict", "box"], strict=True)])
def test_a_vector_environment_of_one_sub_environment_is_a_lane(mode, kind):
    env = SyncVectorEnv([partial(Walk, kind)], autoreset_mode=mode)
    rb = buffer(Walk(kind), 2, 100)
    recorder = GymnasiumRecorder(rb.lane(1), env, infos={"energy": np.float64(0)})
    recorder.reset(seed=0)
    for _ in range(60):
        _, _, terminated, truncated, _ = recorder.step(env.action_space.sample())
        if mode is AutoresetMode.DISABLED and (terminated | truncated).any():
            recorder.reset(options={"reset_mask": terminated | truncated})
    (history,) = env.get_attr("history")
    assert len(rb.lane(0)) == 0
    rows = rb.lane(1).chronological()
    assert_rows(rows.exclude(("next", "energy")), torch.stack([make_transition(*step[:6]) for step in history]))
    assert rows["next", "energy"].tolist() == [step[6]["energy"] for step in history]


@pytest.mark.parametrize(("how", "nested"), [("threads", True), ("processes", False), ("shared threads", False)])
def test_actors_record_at_the_same_time(how, nested):
    lanes = 2
    rb = buffer(cart_pole(nested), lanes, 4 * STEPS, sampler=UniformSampler())
    if how != "threads":
        rb.share()
    results: Any = mp.get_context("fork").SimpleQueue()

    envs = [cart_pole(nested) for _ in range(lanes)]

    def act(lane: int) -> None:
        try:
            actor = Actor(rb.lane(lane), envs[lane], lane)
            for _ in range((3 + lane) * STEPS // 2):
                actor.step()
            results.put((lane, {key: value.numpy() for key, value in actor.history().items(True, True)}))
        except BaseException:
            results.put((lane, traceback.format_exc()))
            raise

    make: Any = mp.get_context("fork").Process if how == "processes" else threading.Thread
    workers = [make(target=act, args=(lane,)) for lane in range(lanes)]
    for worker in workers:
        worker.start()
    found = dict(results.get() for _ in workers)
    for worker in workers:
        worker.join(60)
    assert not [error for error in found.values() if isinstance(error, str)]
    ids = [rb.lane(lane).chronological()["collector", "traj_ids"] for lane in range(lanes)]
    assert not set(ids[0].tolist()) & set(ids[1].tolist())
    for lane, history in found.items():
        steps = {key: torch.from_numpy(value) for key, value in history.items()}
        assert_rows(rb.lane(lane).chronological(), TensorDict(steps, [(3 + lane) * STEPS // 2]))
    assert len(rb.sample()) == 200


@pytest.mark.parametrize("target", ["lane", "recorder"])
def test_a_lane_waits_while_another_thread_reserves_the_rows_again(target):
    rb, env, found = buffer(cart_pole(), 2), cart_pole(), []
    rows = rb.storage.layout.unpack(torch.empty(2, rb.storage.layout.row_bytes, dtype=torch.uint8))
    lane = rb.lane(1)

    def work() -> None:
        found.append(rb.lane(0).number if target == "lane" else GymnasiumRecorder(lane, env)._lane)

    thread = threading.Thread(target=work)
    with rb.storage.lock:
        rb.storage.release()
        thread.start()
        thread.join(0.1)
        rb.storage.reserve(rows)
    thread.join(60)
    assert found == [target == "recorder"]
