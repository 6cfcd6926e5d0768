"""Recorders of single lanes against the histories that their environments keep."""

from __future__ import annotations

import multiprocessing as mp
import threading
import traceback
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from rlbuf_td import EpisodeStats, GymnasiumRecorder, NStepSampler, ReplayBuffer, TrajectoryIndex, UniformSampler
from tests.environments import Walk
from tests.envs.test_gymnasium_recorder import assert_equal, assert_neighbours_follow, histories

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
STEPS = 40


def buffer(env: Any, lanes: int, capacity: int = STEPS, **kwargs: Any) -> ReplayBuffer:
    spaces = env.observation_space, env.action_space
    return ReplayBuffer.from_spaces(*spaces, capacity * lanes, num_envs=lanes, batch_size=200, **kwargs)


def started(target: Any, env: Walk, seed: int) -> GymnasiumRecorder:
    recorder = GymnasiumRecorder(target, env)
    recorder.reset(seed=seed)
    env.action_space.seed(seed)
    return recorder


def act(recorder: GymnasiumRecorder) -> None:
    _, _, terminated, truncated, _ = recorder.step(recorder.env.action_space.sample())
    if terminated or truncated:
        recorder.reset()


def assert_rows(rows: Any, expected: TensorDict) -> None:
    assert_equal(rows, expected)
    assert_neighbours_follow(rows)


@pytest.mark.parametrize(("kind", "capacity"), [("box", STEPS), ("dict", 4 * STEPS)])
def test_lanes_of_unlike_speed_hold_the_steps_of_their_environments(kind, capacity):
    envs, stats = [Walk(kind), Walk(kind)], EpisodeStats()
    rb = buffer(envs[0], 2, capacity, stats=stats, sampler=NStepSampler(UniformSampler(), 3, 0.5))
    fast, slow = (started(rb.lane(lane), env, lane) for lane, env in enumerate(envs))
    for step in range(2 * STEPS):
        act(fast)
        if step % 3 == 0:
            act(slow)
        if step % 25 == 24:
            slow.reset()  # breaks off an episode
        assert [len(rb.lane(lane)) for lane in (0, 1)] == [min(capacity, len(env.history)) for env in envs]
    kept = [histories(env)[0] for env in envs]
    for lane, history in enumerate(kept):
        assert_rows(rb.lane(lane).chronological(), history[-capacity:])
    assert stats.steps == sum(map(len, kept))
    assert stats.episodes == sum(int(history["next", "done"].sum()) for history in kept)
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
    assert len(rb.lane(0)) == 0
    rows = rb.lane(1).chronological()
    assert_rows(rows, histories(env)[0])
    assert rows["next", "energy"].tolist() == [step[6]["energy"] for step in env.get_attr("history")[0]]


@pytest.mark.parametrize(("how", "kind"), [("threads", "dict"), ("processes", "box"), ("shared threads", "box")])
def test_actors_record_at_the_same_time(how, kind):
    lanes = 2
    rb = buffer(Walk(kind), lanes, 4 * STEPS, sampler=UniformSampler())
    if how != "threads":
        rb.share()
    results: Any = mp.get_context("fork").SimpleQueue()
    envs = [Walk(kind) for _ in range(lanes)]

    def work(lane: int) -> None:
        try:
            recorder = started(rb.lane(lane), envs[lane], lane)
            for _ in range((3 + lane) * STEPS // 2):
                act(recorder)
            results.put((lane, {key: x.numpy() for key, x in histories(envs[lane])[0].items(True, True)}))
        except BaseException:
            results.put((lane, traceback.format_exc()))
            raise

    make: Any = mp.get_context("fork").Process if how == "processes" else threading.Thread
    workers = [make(target=work, args=(lane,)) for lane in range(lanes)]
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
    rb, env, found = buffer(Walk(), 2), Walk(), []
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
