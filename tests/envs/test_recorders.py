"""Recorders of single lanes against lists that a plain loop keeps; recorders that are saved in mid-episode."""

from __future__ import annotations

import multiprocessing as mp
import threading
import traceback
from collections.abc import Callable
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
    PackedStorage,
    PettingZooRecorder,
    ProportionalSampler,
    ReplayBuffer,
    TrajectoryIndex,
    UniformSampler,
    make_transition,
)
from tests.environments import Nested, Rewarded, Walk
from tests.test_goes_on import ALWAYS, WAYS, assert_equal, everything

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
    assert fast.recorder.pending == slow.recorder.pending == 0
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


def test_the_first_steps_of_two_lanes_tell_the_shape_of_their_rewards():
    shape = (3,)
    envs = Rewarded(shape), Rewarded(shape)
    rb = buffer(envs[0], 2, 100)
    recorders = [GymnasiumRecorder(rb.lane(lane), env) for lane, env in enumerate(envs)]
    for recorder in recorders:
        recorder.reset(seed=0)
    for _ in range(20):
        for recorder in recorders:
            _, _, terminated, truncated, _ = recorder.step(1)
            if terminated or truncated:
                recorder.reset()
    for lane, env in enumerate(envs):
        expected = torch.stack([make_transition(*step[:6]) for step in env.history])
        assert torch.equal(rb.lane(lane).chronological()["next", "reward"], expected["next", "reward"].float())


def test_without_trajectory_numbers_only_the_lane_itself_must_have_ended():
    rb = ReplayBuffer(storage=PackedStorage(60, ndim=2, lanes=2), batch_size=4)
    env = Walk()
    recorder = GymnasiumRecorder(rb.lane(0), env, trajectory_key=None)
    recorder.reset(seed=1)
    while not rb.lane(0).last(1)["next", "done"].any() if len(rb) else True:
        recorder.step(0)
    recorder.reset(seed=2)
    recorder.step(0)
    is_open = not bool(rb.lane(0).last(1)["next", "done"])
    GymnasiumRecorder(rb.lane(1), Walk(), trajectory_key=None)
    assert is_open
    with pytest.raises(RuntimeError, match="newest rows do not end an episode"):
        GymnasiumRecorder(rb.lane(0), env, trajectory_key=None)


@pytest.mark.parametrize("target", ["lane", "recorder"])
def test_a_lane_waits_while_another_thread_reserves_the_rows_again(target):
    rb, env, found = buffer(cart_pole(), 2), cart_pole(), []
    rows = rb.storage.layout.unpack(torch.empty(2, rb.storage.layout.row_bytes, dtype=torch.uint8))
    lane = rb.lane(1)

    def work() -> None:
        found.append(rb.lane(0).number if target == "lane" else GymnasiumRecorder(lane, env).pending)

    thread = threading.Thread(target=work)
    with rb.storage.lock:
        rb.storage.release()
        thread.start()
        thread.join(0.1)
        rb.storage.reserve(rows)
    thread.join(60)
    assert found == [0]


# -- recorders that are saved in mid-episode go on bit for bit, with a copy of their environments

CAPACITY = 90


def buffer_of(env: Any, seed: int, **given: Any) -> ReplayBuffer:
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
        self.rb = buffer_of(SyncVectorEnv([lambda: deepcopy(env)] * lanes) if lanes > 1 else env, seed, **given)
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
        self.envs, env = envs, envs[0] if len(envs) == 1 else envs
        self.rb = buffer_of(env, seed, sampler=ProportionalSampler(CAPACITY))
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
