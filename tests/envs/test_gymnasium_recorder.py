"""The rows of a recorder against the histories that the Gymnasium environments keep
themselves."""

from __future__ import annotations

import copy
import multiprocessing as mp
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.envs import DTypeCastTransform

import rlbuf_td as td
from tests.environments import Walk, rewarded

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
LANES = 3
MODES = list(AutoresetMode)


def vector(mode: AutoresetMode, kind: str = "box", how: str = "sync", **kwargs):
    cls = {
        "sync": SyncVectorEnv,
        "overwriting": partial(SyncVectorEnv, copy=False),
        "async": AsyncVectorEnv,
    }[how]
    return cls(
        [partial(Walk, kind, 3 + lane) for lane in range(LANES)],
        autoreset_mode=mode,
        **kwargs,
    )


def started(env, **settings) -> td.GymnasiumRecorder:
    recorder = td.GymnasiumRecorder(td.ReplayBuffer.from_env(env, 100), env, **settings)
    recorder.reset(seed=1)
    return recorder


def run(recorder, env, steps: int, seed: int = 0) -> None:
    """Begin episodes, and step at random."""
    env.action_space.seed(seed)
    recorder.reset(seed=seed)
    go_on(recorder, steps)


def go_on(recorder, steps: int) -> None:
    """Step at random; where autoreset is disabled, reset what has ended."""
    for _ in range(steps):
        action = recorder.env.action_space.sample()
        _, _, terminated, truncated, _ = recorder.step(action)
        ended = np.asarray(terminated | truncated)
        if recorder._mode == "Disabled" and ended.any():
            recorder.reset(options=None if not ended.ndim else {"reset_mask": ended})


def histories(env) -> list[TensorDict]:
    kept = (
        env.get_attr("history") if hasattr(env, "num_envs") else [env.unwrapped.history]
    )
    return [
        torch.stack([td.make_transition(*step[:6]) for step in history])
        for history in kept
    ]


def lanes_of(rb: td.ReplayBuffer) -> list[Any]:
    return [rb.lane(lane).chronological() for lane in range(rb.storage.shape[1])]


def assert_equal(rows: TensorDict, expected: TensorDict) -> None:
    rows = rows.exclude(("collector", "traj_ids"), "index")
    assert rows.shape == expected.shape
    keys = set(expected.keys(True, True))
    assert keys <= set(rows.keys(True, True))
    for key in keys:
        assert rows[key].dtype == expected[key].dtype, key
        assert torch.equal(rows[key], expected[key]), key


def assert_neighbours_follow(lane: TensorDict) -> None:
    """Within a trajectory, a row's next observation is the following row's observation;
    trajectories are whole."""
    ids, done = lane["collector", "traj_ids"], lane["next", "done"].flatten()
    same = (ids[1:] == ids[:-1]) & ~done[:-1]
    for key in set(lane["next"].keys(True, True)) & set(lane.keys(True, True)):
        assert torch.equal(lane["next"][key][:-1][same], lane[key][1:][same]), key
    assert not ((ids[1:] == ids[:-1]) & done[:-1]).any()


@pytest.mark.parametrize(
    ("mode", "how", "kind"),
    [
        *((mode, "sync", "box") for mode in MODES),
        *((mode, "overwriting", "dict") for mode in MODES),
        (AutoresetMode.SAME_STEP, "async", "tuple"),
    ],
)
def test_lanes_hold_the_histories_and_infos_of_their_environments(mode, how, kind):
    env = vector(mode, kind, how)
    rb = td.ReplayBuffer.from_env(env, 3_000, batch_size=4)
    stepped = gymnasium.wrappers.vector.DictInfoToList(env) if kind == "dict" else env
    recorder = td.GymnasiumRecorder(
        rb, stepped, infos={"energy": np.float64(0), "won": 7}
    )
    run(recorder, env, 60)
    kept, steps = histories(env), env.get_attr("history")
    env.close()
    assert len(rb) == sum(map(len, kept))
    assert (len({len(history) for history in kept}) > 1) is (
        mode is AutoresetMode.NEXT_STEP
    )
    assert all(
        any(history["next", key].any() for history in kept)
        for key in ("terminated", "truncated")
    )
    for lane, history in enumerate(kept):
        rows = rb.lane(lane).chronological()
        assert_equal(rows, history)
        assert_neighbours_follow(rows)
        infos = [step[6] for step in steps[lane]]  # of the step, not of the reset
        assert rows["next", "energy"].dtype == torch.float64
        assert rows["next", "energy"].tolist() == [info["energy"] for info in infos]
        assert rows["next", "won"].tolist() == [
            int(info.get("won", 7)) for info in infos
        ]


@pytest.mark.parametrize(
    ("autoreset", "kind", "lanes"),
    [(False, "dict", False), (True, "box", True), (True, "tuple", False)],
)
def test_a_single_environment_is_recorded_at_once(autoreset, kind, lanes):
    env: Any = Walk(kind)
    if autoreset:
        env = gymnasium.wrappers.Autoreset(env)
    rb = (
        td.ReplayBuffer(storage=td.PackedStorage(1_000, ndim=2))
        if lanes
        else td.ReplayBuffer.from_env(env, 1_000)
    )
    recorder = td.GymnasiumRecorder(rb, env)
    run(recorder, env, 50)
    (history,) = histories(env)
    rows = rb.chronological()
    assert_equal(rows[:, 0] if lanes else rows, history)
    assert_neighbours_follow(rows[:, 0] if lanes else rows)
    assert len(history) < 50 if autoreset else len(history) == 50


@pytest.mark.parametrize("mode", MODES)
def test_reset_and_step_return_what_the_environment_returns(mode):
    plain, recorded = vector(mode, "dict"), vector(mode, "dict")
    recorder = td.GymnasiumRecorder(td.ReplayBuffer.from_env(recorded, 300), recorded)
    results: list[list[Any]] = [[env.reset(seed=3)] for env in (plain, recorder)]
    for step in range(20):
        for env, seen in zip((plain, recorder), results, strict=True):
            seen.append(env.step(np.full(LANES, step % 3)))
            ended = seen[-1][2] | seen[-1][3]
            if mode is AutoresetMode.DISABLED and ended.any():
                seen.append(env.reset(options={"reset_mask": ended}))
    for theirs, ours in zip(*results, strict=True):
        assert data_equivalence(theirs, ours)


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_that_reset_breaks_off_does_not_run_into_the_next(mode):
    env = vector(mode)
    rb = td.ReplayBuffer.from_env(env, 3_000)
    recorder = td.GymnasiumRecorder(rb, env)
    for seed in range(8):
        run(recorder, env, 3, seed)
    broken = 0
    for lane in lanes_of(rb):
        assert_neighbours_follow(lane)
        ids, done = lane["collector", "traj_ids"], lane["next", "done"].flatten()
        broken += int(((ids[1:] != ids[:-1]) & ~done[:-1]).sum())
    assert broken
    assert len(rb) == sum(map(len, histories(env)))


def test_a_step_that_fails_in_the_environment_breaks_off_every_episode():
    class Failing(Walk):
        def step(self, action):
            result = super().step(action)
            if len(self.history) == 3:
                raise KeyboardInterrupt
            return result

    makers = [partial(cls, "box", 50) for cls in (Walk, Failing)]
    recorder = started(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED))
    actions = np.zeros(2, int)
    for _ in range(2):
        recorder.step(actions)
    with pytest.raises(KeyboardInterrupt):
        recorder.step(actions)
    with pytest.raises(RuntimeError, match="after a step that failed"):
        recorder.step(actions)
    recorder.reset(options={"reset_mask": np.array([False, True])})
    recorder.step(actions)
    ids = recorder.buffer.storage["collector", "traj_ids"]
    assert len(ids) == 3
    assert (ids[1] != ids[2]).all()


def pickled(made):
    return pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize(
    ("kind", "copier"),
    [*zip(["single", "lane", *MODES], [copy.deepcopy, pickled] * 3, strict=False)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_copy_of_a_recorder_goes_on_in_the_middle_of_an_episode(kind, copier):
    """Its steps go to rows of its own, and those of the original to the original."""
    env = vector(kind, "dict") if kind in MODES else Walk("dict")
    if kind == "lane":
        target = buffer(env, 2).lane(1)
    else:
        target = td.ReplayBuffer.from_env(env, 300)
    original = td.GymnasiumRecorder(target, env)
    run(original, env, 10)
    made = copier(original)
    ends = []
    for recorder in (made, original, made):
        go_on(recorder, 15)
        ends.append(len(recorder.buffer))
    assert ends[0] < ends[2]
    for recorder in (made, original):
        rows = recorder.buffer
        if kind in MODES:
            lanes = lanes_of(rows)
        elif kind == "lane":
            lanes = [rows.lane(1).chronological()]
        else:
            lanes = [rows.chronological()]
        for lane, history in zip(lanes, histories(recorder.env), strict=True):
            assert_rows(lane, history)


def record(recorder, episodes: int = 1) -> None:
    """Record a step of each of some episodes."""
    for _ in range(episodes):
        recorder.reset(seed=1)
        recorder.step(0)


def test_no_two_recorders_of_a_buffer_give_a_trajectory_the_same_number():
    env = Walk("box", 50)
    rb = td.ReplayBuffer.from_env(env, 100)
    recorders = [td.GymnasiumRecorder(rb, env) for _ in range(2)]
    for recorder in (*recorders, td.GymnasiumRecorder(rb, env)):
        record(recorder)
    assert rb.storage["collector", "traj_ids"].tolist() == [0, 1, 2]
    rb.empty()
    record(td.GymnasiumRecorder(rb, env))
    assert rb.storage["collector", "traj_ids"].tolist() == [3]


def test_a_recorder_gives_no_number_that_loaded_rows_have(tmp_path):
    env = Walk("box", 50)
    saved, rb = (td.ReplayBuffer.from_env(env, 100) for _ in range(2))
    recorder = td.GymnasiumRecorder(rb, env)
    record(td.GymnasiumRecorder(saved, env), 4)
    record(recorder)
    saved.dumps(tmp_path)
    rb.loads(tmp_path)
    record(recorder)
    assert rb.storage["collector", "traj_ids"].tolist() == [0, 1, 2, 3, 4]


# (With autoreset disabled, Gymnasium 1.4's wrapper counts all lanes anew when one is
# reset.)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_episode_statistics_of_gymnasiums_wrapper_can_be_stored(mode):
    env = gymnasium.wrappers.vector.RecordEpisodeStatistics(vector(mode))
    rb = td.ReplayBuffer.from_env(env, 3_000)
    run(td.GymnasiumRecorder(rb, env, infos={("episode", "l"): -1}), env, 40)
    rows = rb.chronological(flat=True)
    length = rows["next", "episode", "l"]
    assert torch.equal(length >= 0, rows["next", "done"].squeeze(-1))
    ends = rows["next", "observation"][..., 1]  # how many steps the episode has had
    assert torch.equal(length[length >= 0].float(), ends[length >= 0])


@pytest.mark.parametrize("how", ["single", "vector", "list"])
def test_infos_are_converted_to_the_dtype_of_their_default_if_lossless(how):
    class Fetch(Walk):
        def step(self, action):
            *result, info = super().step(action)
            success = np.float32(info.get("won", 0))
            return *result, info | {"is_success": success}

    env: Any = Fetch()
    if how != "single":
        env = SyncVectorEnv([Fetch] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    if how == "list":
        env = gymnasium.wrappers.vector.DictInfoToList(env)
    recorder = started(env, infos={"is_success": False, "won": 0.0})
    run(recorder, env, 3)
    outcome = recorder.buffer.storage[:]["next"]
    assert outcome["is_success"].dtype == torch.bool
    assert torch.equal(outcome["is_success"].float(), outcome["won"])


def test_extras_are_stored_with_each_step_but_those_that_reset():
    env = vector(AutoresetMode.NEXT_STEP)
    recorder = started(env)
    expected: list[list[float]] = [[] for _ in range(LANES)]
    ended = np.zeros(LANES, bool)
    for number in range(30):
        value = torch.full((LANES, 1), float(number), requires_grad=True)
        more = {"n": np.array([3, 2, 1])[::-1]}
        outcome = recorder.step(np.zeros(LANES, int), state_value=value, more=more)
        for lane in (~ended).nonzero()[0].tolist():
            expected[lane].append(float(number))
        ended = outcome[2] | outcome[3]
    for lane, rows in enumerate(lanes_of(recorder.buffer)):
        assert rows["state_value"].flatten().tolist() == expected[lane]
        assert rows["more", "n"].eq(lane + 1).all()


def value_of(observation: torch.Tensor) -> torch.Tensor:
    return observation[..., :1]


CRITIC = TensorDictModule(value_of, ["observation"], ["state_value"])


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_rollouts_are_filled_one_after_the_other_with_rows_of_the_current_policy(mode):
    env = vector(mode)
    rollout = td.RolloutBuffer.from_env(env, 8, batch_size=6, value_network=CRITIC)
    recorder = td.GymnasiumRecorder(rollout, env)
    recorder.reset(seed=0)
    for number in range(4):
        while not rollout.is_complete or rollout.write_count == 8 * LANES * number:
            version = np.full(LANES, number)
            outcome = recorder.step(np.ones(LANES, int), version=version)
            ended = outcome[2] | outcome[3]
            if mode is AutoresetMode.DISABLED and ended.any():
                recorder.reset(options={"reset_mask": ended})
        assert (rollout.storage["version"] == number).all()
        for lane, history in enumerate(histories(env)):
            kept = history[8 * number : 8 * number + 8]
            assert_equal(rollout.storage[:][:, lane], kept)
        assert sum(len(batch) for batch in rollout) == 8 * LANES


def test_rollouts_refuse_lanes_that_drift_apart():
    env = gymnasium.make_vec("CartPole-v1", 2)
    rollout = td.RolloutBuffer.from_env(env, 30, value_network=CRITIC)
    storage = td.PackedStorage(60, ndim=2)
    written = td.ReplayBuffer(storage=storage, writer=td.RolloutWriter())
    said = r"next-step autoreset: .*AutoresetMode\.SAME_STEP"
    for buffer in (written, rollout):
        with pytest.raises(ValueError, match=said) as refused:
            td.GymnasiumRecorder(buffer, env)
    assert not len(rollout)
    remedy = str(refused.value).split("for example ")[1]
    env = eval(remedy, {"gymnasium": gymnasium, "id": "CartPole-v1", "num_envs": 2})
    run(td.GymnasiumRecorder(rollout, env), env, 30)
    assert rollout.is_complete
    alone = SyncVectorEnv([Walk])  # a single lane is never behind
    rollout = td.RolloutBuffer.from_env(alone, 30, value_network=CRITIC)
    run(td.GymnasiumRecorder(rollout, alone), alone, 20)


class Forgetful(gymnasium.vector.VectorWrapper):
    """Same-step autoreset as in simulators: the final observation is lost, or missing
    in a lane."""

    def __init__(self, env, keeps: bool) -> None:
        super().__init__(env)
        self._keeps = keeps

    def step(self, actions):
        *result, info = self.env.step(actions)
        final = info.pop("final_obs", None)
        if self._keeps and final is not None:
            info["final_obs"] = np.full(len(final), None)
        return *result, info


@pytest.mark.parametrize("keeps", [False, True])
def test_a_lost_final_observation_is_refused_with_remedies(keeps):
    env = Forgetful(vector(AutoresetMode.SAME_STEP), keeps)
    said = r"observation is lost.*state_value.*terminated=True"
    with pytest.raises(RuntimeError, match=said):
        run(started(env), env, 20)


def test_an_unknown_autoreset_mode_is_refused():
    env = vector(AutoresetMode.SAME_STEP)
    env.metadata = {}
    said = r"must have an 'autoreset_mode'.*AutoresetMode, got None: set the mode"
    with pytest.raises(ValueError, match=said):
        started(env)
    env.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    run(started(env), env, 20)


def test_a_transform_stores_narrower_dtypes_and_returns_those_of_the_spaces():
    keys: Any = ["observation", ("next", "observation")]
    narrow = DTypeCastTransform(
        torch.float16, torch.float32, in_keys=keys, in_keys_inv=keys
    )
    buffers = []
    for transform in (None, narrow):
        env = vector(AutoresetMode.NEXT_STEP)
        rb = td.ReplayBuffer.from_env(env, 300, transform=transform)
        run(td.GymnasiumRecorder(rb, env), env, 40)
        buffers.append(rb)
    plain, half = buffers
    for key in keys:
        assert half.storage.read(slice(None))[key].dtype == torch.float16
    for rows, kept in zip(lanes_of(plain), lanes_of(half), strict=True):
        for key in keys:
            rows[key] = rows[key].half().float()
        assert_equal(kept, rows.exclude(("collector", "traj_ids")))


@pytest.mark.parametrize(("shape", "lanes"), [((1,), 2), ((3,), 0), ((2, 2), 2)])
def test_rewards_may_be_arrays(shape, lanes):
    lead = (lanes,) if lanes else ()
    extras = {"next": {"reward": np.zeros((*lead, *shape))}}
    for declared, options in (
        (True, {}),
        (False, {"extras": extras}),
        (True, {"shared": True}),
    ):
        env = rewarded(shape, lanes, declared)
        rb = td.ReplayBuffer.from_env(env, 200, **options)
        run(td.GymnasiumRecorder(rb, env), env, 20)
        rewards = rb.chronological()["next", "reward"].float()
        kept = [history["next", "reward"] for history in histories(env)]
        assert torch.equal(rewards, torch.stack(kept, 1) if lanes else kept[0])
        run(td.GymnasiumRecorder(rb, env), env, 3)  # a second recorder


def remedy_of(refused: pytest.ExceptionInfo) -> Any:
    """Return the extras that an error proposes."""
    text = str(refused.value).split("extras=")[1].removesuffix(")")
    return eval(text, {"torch": torch})


def test_rewards_that_do_not_fit_the_rows_are_refused():
    env = rewarded((3,), 2)
    rb = td.ReplayBuffer.from_env(env, 200)
    said = r"reward'\) came with shape \(2, 3\), the rows hold \(2, 1\)"
    with pytest.raises(td.SchemaError, match=said) as refused:
        run(td.GymnasiumRecorder(rb, env), env, 3)
    assert not len(rb)
    rb = td.ReplayBuffer.from_env(env, 200, extras=remedy_of(refused))
    run(td.GymnasiumRecorder(rb, env), env, 3)
    assert len(rb) == 6


@pytest.mark.parametrize("how", ["from_env", "single", "rollout", "after"])
def test_a_buffer_that_is_shared_before_the_first_write_can_be_recorded(how):
    env: Any = Walk() if how == "single" else vector(AutoresetMode.SAME_STEP)
    if how == "rollout":
        rb: Any = td.RolloutBuffer.from_env(env, 20, value_network=CRITIC)
    else:
        rb = td.ReplayBuffer.from_env(env, 300)
    recorder = td.GymnasiumRecorder(rb, env) if how == "after" else None
    rb.share()
    recorder = recorder or td.GymnasiumRecorder(rb, env)
    run(recorder, env, 20)
    assert len(rb) == sum(map(len, histories(env)))
    rows = rb.chronological()
    assert_neighbours_follow(rows if rows.ndim == 1 else rows[:, 0])


def test_what_shared_rows_lack_is_named_with_a_remedy_that_works():
    env, infos = vector(AutoresetMode.SAME_STEP), {"energy": 0.0}
    rb = td.ReplayBuffer.from_env(env, 300).share()
    said = r"have no \('next', 'energy'\), which the recorder writes"
    with pytest.raises(td.SchemaError, match=said) as refused:
        td.GymnasiumRecorder(rb, env, infos=infos)
    rb = td.ReplayBuffer.from_env(env, 300, extras=remedy_of(refused)).share()
    run(td.GymnasiumRecorder(rb, env, infos=infos), env, 3)
    assert len(rb) == 3 * LANES


# -- recorders of single lanes

STEPS = 40


def buffer(env, lanes: int, capacity: int = STEPS, **kwargs) -> td.ReplayBuffer:
    spaces = env.observation_space, env.action_space
    return td.ReplayBuffer.from_spaces(
        *spaces, capacity * lanes, num_envs=lanes, **kwargs
    )


def recorder_of(target, env: Walk, seed: int) -> td.GymnasiumRecorder:
    recorder = td.GymnasiumRecorder(target, env)
    recorder.reset(seed=seed)
    env.action_space.seed(seed)
    return recorder


def act(recorder: td.GymnasiumRecorder) -> None:
    _, _, terminated, truncated, _ = recorder.step(recorder.env.action_space.sample())
    if terminated or truncated:
        recorder.reset()


def assert_rows(rows, expected: TensorDict) -> None:
    assert_equal(rows, expected)
    assert_neighbours_follow(rows)


@pytest.mark.parametrize(("kind", "capacity"), [("box", STEPS), ("dict", 4 * STEPS)])
def test_lanes_of_unlike_speed_hold_the_steps_of_their_environments(kind, capacity):
    envs, stats = [Walk(kind), Walk(kind)], td.EpisodeStats()
    rb = buffer(envs[0], 2, capacity, stats=stats)
    fast, slow = (
        recorder_of(rb.lane(lane), env, lane) for lane, env in enumerate(envs)
    )
    for step in range(2 * STEPS):
        act(fast)
        if step % 3 == 0:
            act(slow)
        if step % 25 == 24:
            slow.reset()  # breaks off an episode
    kept = [histories(env)[0] for env in envs]
    lanes = [rb.lane(lane).chronological() for lane in (0, 1)]
    for rows, history in zip(lanes, kept, strict=True):
        assert_rows(rows, history[-capacity:])
    assert stats.steps == sum(map(len, kept))
    assert stats.episodes == sum(int(history["next", "done"].sum()) for history in kept)
    first, second = ({*rows["collector", "traj_ids"].tolist()} for rows in lanes)
    assert not first & second


@pytest.mark.parametrize(
    ("mode", "kind"), [*zip(AutoresetMode, ["box", "dict", "box"], strict=True)]
)
def test_a_vector_environment_of_one_sub_environment_is_a_lane(mode, kind):
    env = SyncVectorEnv([partial(Walk, kind)], autoreset_mode=mode)
    rb = buffer(Walk(kind), 2, 100)
    recorder = td.GymnasiumRecorder(rb.lane(1), env, infos={"energy": np.float64(0)})
    run(recorder, env, 60)
    assert len(rb.lane(0)) == 0
    rows = rb.lane(1).chronological()
    assert_rows(rows, histories(env)[0])
    assert rows["next", "energy"].tolist() == [
        step[6]["energy"] for step in env.get_attr("history")[0]
    ]


@pytest.mark.parametrize(
    ("how", "kind"),
    [("threads", "dict"), ("processes", "box"), ("shared threads", "box")],
)
def test_actors_record_at_the_same_time(how, kind):
    rb = buffer(Walk(kind), 2, 4 * STEPS)
    if how != "threads":
        rb.share()
    results = mp.get_context("fork").Queue()

    def work(lane: int) -> None:
        env = Walk(kind)
        recorder = recorder_of(rb.lane(lane), env, lane)
        for _ in range((3 + lane) * STEPS // 2):
            act(recorder)
        history = histories(env)[0].items(True, True)
        results.put((lane, {key: leaf.numpy() for key, leaf in history}))

    make: Any = threading.Thread
    if how == "processes":
        make = mp.get_context("fork").Process
    workers = [make(target=work, args=(lane,)) for lane in range(2)]
    for worker in workers:
        worker.start()
    recorded = dict(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(60)
    lanes = [rb.lane(lane).chronological() for lane in range(2)]
    for lane, rows in enumerate(lanes):
        steps = {key: torch.from_numpy(part) for key, part in recorded[lane].items()}
        assert_rows(rows, TensorDict(steps, [(3 + lane) * STEPS // 2]))
    first, second = ({*rows["collector", "traj_ids"].tolist()} for rows in lanes)
    assert not first & second


@pytest.mark.parametrize("target", ["lane", "recorder"])
def test_a_lane_waits_while_another_thread_reserves_the_rows_again(target):
    rb, env, numbers = buffer(Walk(), 2), Walk(), []
    layout = rb.storage.all_rows().layout
    rows = layout.unpack(torch.empty(2, rb.storage.row_bytes, dtype=torch.uint8))
    lane = rb.lane(1)

    def work() -> None:
        if target == "lane":
            numbers.append(rb.lane(1).number)
        else:
            numbers.append(td.GymnasiumRecorder(lane, env)._lane)

    thread = threading.Thread(target=work)
    with rb.storage.lock:
        rb.storage.release()
        thread.start()
        thread.join(0.1)
        rb.storage.reserve(rows)
    thread.join(60)
    assert numbers == [1]


@pytest.mark.parametrize("lanes", [3, 100])  # two ways to find the largest
@pytest.mark.parametrize("reward", [2.0**24 + 1, -(2.0**24) - 1])
def test_a_whole_reward_that_rows_would_round_is_refused(lanes, reward):
    flags, obs = np.zeros(lanes, bool), np.zeros((lanes, 2), np.float32)
    step = {"observation": obs, "action": obs, "next_observation": obs}
    step |= {"terminated": flags, "truncated": flags}
    rb = td.ReplayBuffer(storage=td.PackedStorage(4 * lanes, ndim=2))
    rewards = np.zeros(lanes)
    rewards[-1] = 0.1
    rb.add_step(**step, reward=rewards)
    rewards[1] = reward
    with pytest.raises(td.SchemaError, match=f"'reward'.* is {int(reward)}, which"):
        rb.add_step(**step, reward=rewards)
    assert len(rb) == lanes


def test_a_masked_reset_leaves_the_other_episodes_ended():
    makers = [partial(Walk, "box", 2)] * 3  # every step ends an episode
    recorder = started(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED))
    actions = np.zeros(3, np.int64)
    recorder.step(actions)
    recorder.reset(options={"reset_mask": np.array([True, False, True])})
    with pytest.raises(RuntimeError, match=r"the episode has ended in lanes \[1\]"):
        recorder.step(actions)
    assert len(recorder.buffer) == 3
    recorder.reset(options={"reset_mask": np.array([False, True, False])})
    recorder.step(actions)
    assert len(recorder.buffer) == 6


LOSSES: dict[str, Callable[[td.ReplayBuffer], object]] = {
    "a load": lambda rb: rb.load_state_dict(rb.state_dict()),
    "another storage": lambda rb: rb.set_storage(td.PackedStorage(90, ndim=2)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_masked_reset_after_a_loss_begins_an_episode_in_each_lane(loss):
    env = SyncVectorEnv(
        [partial(Walk, "box", 50)] * 3, autoreset_mode=AutoresetMode.DISABLED
    )
    rb = td.ReplayBuffer.from_env(env, 90)
    recorder = td.GymnasiumRecorder(rb, env)
    recorder.reset(seed=[3, 4, 5])
    recorder.step(np.zeros(3, np.int64))
    LOSSES[loss](rb)
    recorder.reset(options={"reset_mask": np.array([False, True, False])})
    recorder.step(np.zeros(3, np.int64))
    ids = rb.storage["collector", "traj_ids"]
    assert len(ids.unique()) == ids.numel()
