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
from torchrl.envs import DTypeCastTransform, Transform

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


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_step_that_fails_in_the_environment_breaks_off_every_episode(error):
    class Failing(Walk):
        def step(self, action):
            result = super().step(action)
            if len(self.history) == 3:
                raise error
            return result

    env = SyncVectorEnv(
        [partial(Walk, "box", 50), partial(Failing, "box", 50)], autoreset_mode=MODES[2]
    )
    recorder = started(env)
    for _ in range(2):
        recorder.step(np.zeros(2, int))
    with pytest.raises(error):
        recorder.step(np.zeros(2, int))
    with pytest.raises(RuntimeError, match="after a step that failed"):
        recorder.step(np.zeros(2, int))
    recorder.reset(options={"reset_mask": np.array([False, True])})
    recorder.step(np.zeros(2, int))
    ids = recorder.buffer.storage["collector", "traj_ids"]
    assert len(ids) == 3
    assert (ids[1] != ids[2]).all()


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))]
)
@pytest.mark.parametrize("kind", ["single", "lane", *MODES], ids=str)
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


def test_no_two_recorders_of_a_buffer_give_a_trajectory_the_same_number():
    env = Walk("box", 50)
    rb = td.ReplayBuffer.from_env(env, 100)
    recorders = [td.GymnasiumRecorder(rb, env) for _ in range(2)]
    for recorder in (*recorders, td.GymnasiumRecorder(rb, env)):
        recorder.reset(seed=1)
        recorder.step(0)
    assert rb.storage["collector", "traj_ids"].tolist() == [0, 1, 2]
    rb.empty()  # the statistics go on
    recorder = td.GymnasiumRecorder(rb, env)
    recorder.reset(seed=1)
    recorder.step(0)
    assert rb.storage["collector", "traj_ids"].tolist() == [3]


def test_a_recorder_gives_no_number_that_loaded_rows_have(tmp_path):
    env = Walk("box", 50)
    saved, rb = (td.ReplayBuffer.from_env(env, 100) for _ in range(2))
    recorders = td.GymnasiumRecorder(saved, env), td.GymnasiumRecorder(rb, env)
    for recorder, episodes in zip(recorders, (4, 1), strict=True):
        for _ in range(episodes):
            recorder.reset(seed=1)
            recorder.step(0)
    saved.dumps(tmp_path)
    rb.loads(tmp_path)
    recorder.reset(seed=1)
    recorder.step(0)
    assert rb.storage["collector", "traj_ids"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("how", ["made before", "made after", "in an episode"])
def test_no_trajectory_runs_from_a_loaded_buffer_into_what_is_recorded(how, tmp_path):
    env = Walk("box", 50)

    def buffer() -> td.ReplayBuffer:
        return td.ReplayBuffer(
            storage=td.PackedStorage(100), stats=td.EpisodeStats(), batch_size=4
        )

    def recorded(rb: td.ReplayBuffer) -> td.GymnasiumRecorder:
        recorder = td.GymnasiumRecorder(rb, env)
        recorder.reset(seed=1)
        for _ in range(3):
            recorder.step(0)
        return recorder

    first = recorded(saved := buffer())
    saved.dumps(tmp_path / "saved")
    rb = saved if how == "in an episode" else buffer()
    recorder = (
        first
        if how == "in an episode"
        else td.GymnasiumRecorder(rb, env)
        if how == "made before"
        else None
    )
    rb.loads(tmp_path / "saved")
    recorder = recorder or td.GymnasiumRecorder(rb, env)
    with pytest.raises(
        RuntimeError,
        match=r"call the recorder's reset\(\) before its first step.*was loaded",
    ):
        recorder.step(0)
    first, _ = recorder.reset(seed=1)
    recorder.step(0)
    assert torch.equal(rb.storage["observation"][3], torch.from_numpy(first))
    while not recorder._ended.any():
        recorder.step(0)
    assert td.TrajectoryIndex(rb.storage).steps_ahead(torch.tensor([0])).item() == 2
    assert rb.episode_stats is not None
    assert rb.episode_stats.history()["length"].tolist() == [len(rb) - 3]


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
            return *result, info | {
                "is_success": np.float32(info.get("won", 0)),
                "level": 0.5,
            }

    make = partial(Fetch, "dict")
    env: Any = (
        make()
        if how == "single"
        else SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    )
    env = gymnasium.wrappers.vector.DictInfoToList(env) if how == "list" else env
    recorder = started(env, infos={"is_success": False, "won": 0.0})
    run(recorder, env, 3)
    rows = recorder.buffer.storage[:]
    assert rows["next", "is_success"].dtype == torch.bool
    assert torch.equal(rows["next", "is_success"].float(), rows["next", "won"])


def test_extras_are_stored_with_each_step_but_those_that_reset():
    env = vector(AutoresetMode.NEXT_STEP)
    rb = td.ReplayBuffer.from_env(env, 3_000)
    recorder = td.GymnasiumRecorder(rb, env)
    recorder.reset(seed=0)
    given: list[list[float]] = [[] for _ in range(LANES)]
    ended = np.zeros(LANES, bool)
    for number in range(30):
        value = torch.full((LANES, 1), float(number), requires_grad=True)
        _, _, terminated, truncated, _ = recorder.step(
            np.zeros(LANES, int),
            state_value=value,
            more={"n": np.array([3, 2, 1])[::-1]},
        )
        for lane in (~ended).nonzero()[0].tolist():
            given[lane].append(float(number))
        ended = terminated | truncated
    for lane, rows in enumerate(lanes_of(rb)):
        assert rows["state_value"].flatten().tolist() == given[lane]
        assert rows["more", "n"].eq(lane + 1).all()
    assert rows["state_value"].dtype == torch.float32


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_rollouts_are_filled_one_after_the_other_with_rows_of_the_current_policy(mode):
    env = vector(mode)
    network = TensorDictModule(
        lambda obs: torch.zeros(*obs.shape[:-1], 1), ["observation"], ["state_value"]
    )
    rollout = td.RolloutBuffer.from_env(
        env, 8, batch_size=6, gamma=0.5, lmbda=1.0, value_network=network
    )
    recorder = td.GymnasiumRecorder(rollout, env)
    recorder.reset(seed=0)
    complete = written = 0
    for _ in range(40):
        version = np.full(LANES, complete)
        ended = recorder.step(
            np.ones(LANES, int),
            state_value=np.zeros((LANES, 1), np.float32),
            version=version,
        )[2:4]
        if mode is AutoresetMode.DISABLED and np.any(ended):
            recorder.reset(options={"reset_mask": np.any(ended, axis=0)})
        if rollout.is_complete and rollout.write_count > written:
            assert (rollout.storage["version"] == complete).all()
            complete, written = complete + 1, rollout.write_count
            for lane, history in enumerate(histories(env)):
                assert_equal(
                    rollout.storage[:][:, lane],
                    history[8 * (complete - 1) : 8 * complete],
                )
            assert sum(len(batch) for batch in rollout) == 8 * LANES
    assert complete >= 3


def test_rollouts_refuse_lanes_that_drift_apart():
    def network(observation: torch.Tensor) -> torch.Tensor:
        return observation[..., :1]

    critic = TensorDictModule(network, ["observation"], ["state_value"])
    env = gymnasium.make_vec("CartPole-v1", 2)
    rollout = td.RolloutBuffer.from_env(env, 30, value_network=critic)
    for buffer in (
        rollout,
        td.ReplayBuffer(
            storage=td.PackedStorage(60, ndim=2), writer=td.RolloutWriter()
        ),
    ):
        with pytest.raises(
            ValueError, match=r"next-step autoreset: .*AutoresetMode\.SAME_STEP"
        ) as refused:
            td.GymnasiumRecorder(buffer, env)
    assert not len(rollout)
    remedy = str(refused.value).split("for example ")[1]
    env = eval(remedy, {"gymnasium": gymnasium, "id": "CartPole-v1", "num_envs": 2})
    run(td.GymnasiumRecorder(rollout, env), env, 30)
    assert rollout.is_complete
    alone = SyncVectorEnv([Walk])  # a single lane is never behind
    run(
        td.GymnasiumRecorder(
            td.RolloutBuffer.from_env(alone, 30, value_network=critic), alone
        ),
        alone,
        20,
    )


class Forgetful(gymnasium.vector.VectorWrapper):
    """Same-step autoreset as in simulators: the final observation is lost, or missing
    in a lane."""

    def __init__(self, env, keeps: bool) -> None:
        super().__init__(env)
        self._keeps = keeps

    def step(self, actions):
        *result, info = self.env.step(actions)
        final = info.pop("final_obs", None)
        return *result, info | (
            {"final_obs": np.full(len(final), None)}
            if self._keeps and final is not None
            else {}
        )


@pytest.mark.parametrize("keeps", [False, True])
def test_a_lost_final_observation_is_refused_with_remedies(keeps):
    env = Forgetful(vector(AutoresetMode.SAME_STEP), keeps)
    with pytest.raises(
        RuntimeError, match=r"observation is lost.*state_value.*terminated=True"
    ) as refused:
        run(started(env), env, 20)
    assert "autoreset_mode" not in str(refused.value)


def test_an_unknown_autoreset_mode_is_refused():
    env = vector(AutoresetMode.SAME_STEP)
    env.metadata = {}
    with pytest.raises(
        ValueError,
        match=r"must have an 'autoreset_mode'.*AutoresetMode, got None: set the mode",
    ):
        td.GymnasiumRecorder(td.ReplayBuffer.from_env(env, 100), env)
    env.metadata = env.metadata | {"autoreset_mode": AutoresetMode.SAME_STEP}
    run(started(env), env, 20)


def test_transforms_see_what_is_recorded():
    env = vector(AutoresetMode.SAME_STEP)
    seen = []

    class Note(Transform):
        def _inv_call(self, data: TensorDict) -> TensorDict:
            seen.append(data["next", "reward"].flatten().tolist())
            return data.set("note", torch.full(data.shape, float(len(seen))))

    rb = td.ReplayBuffer.from_env(env, 300, transform=Note())
    recorder = td.GymnasiumRecorder(rb, env)
    run(recorder, env, 10)
    assert rb.storage["next", "reward"].flatten(1).tolist() == seen
    assert rb.storage["note"][:, 0].tolist() == list(range(1, 11))


@pytest.mark.parametrize("mode", MODES)
def test_a_transform_stores_narrower_dtypes_and_returns_those_of_the_spaces(mode):
    keys: Any = ["observation", ("next", "observation")]
    narrow = DTypeCastTransform(
        torch.float16, torch.float32, in_keys=keys, in_keys_inv=keys
    )
    recorders = []
    for transform in (None, narrow):
        env = vector(mode)
        rb = td.ReplayBuffer.from_env(env, 300, batch_size=64, transform=transform)
        recorders.append(td.GymnasiumRecorder(rb, env))
        run(recorders[-1], env, 40)
    plain, half = (recorder.buffer for recorder in recorders)
    for key in keys:
        assert half.storage.read(slice(None))[key].dtype == torch.float16
    for rows, kept in zip(lanes_of(plain), lanes_of(half), strict=True):
        for key in keys:
            rows[key] = rows[key].half().float()
        assert_equal(kept, rows.exclude(("collector", "traj_ids")))
    half.set_rng(torch.Generator().manual_seed(0))
    plain.set_rng(torch.Generator().manual_seed(0))
    batch, expected = half.sample(), plain.sample()
    for key in keys:
        expected[key] = expected[key].half().float()
    assert_equal(batch, expected.exclude("index", ("collector", "traj_ids")))


@pytest.mark.parametrize(("shape", "lanes"), [((1,), 2), ((3,), 0), ((2, 2), 2)])
def test_rewards_may_be_arrays(shape, lanes):
    lead = (lanes,) if lanes else ()
    extras = {"next": {"reward": np.zeros((*lead, *shape))}}
    for declared, made in (
        (True, {}),
        (False, {"extras": extras}),
        (True, {"shared": True}),
    ):
        env = rewarded(shape, lanes, declared)
        rb = td.ReplayBuffer.from_env(env, 200, **made)
        run(td.GymnasiumRecorder(rb, env), env, 20)
        for lane, history in enumerate(histories(env)):
            rows = rb.chronological()[:, lane] if lanes else rb.chronological()
            assert torch.equal(
                rows["next", "reward"].float(), history["next", "reward"]
            )
            assert rows["next", "reward"].shape[1:] == shape
        run(td.GymnasiumRecorder(rb, env), env, 3)  # a second recorder


def test_rewards_that_do_not_fit_the_rows_are_refused():
    env = rewarded((3,), 2)
    rb = td.ReplayBuffer.from_env(env, 200)
    with pytest.raises(
        td.SchemaError,
        match=r"reward'\) came with shape \(2, 3\), the rows hold \(2, 1\)",
    ) as refused:
        run(td.GymnasiumRecorder(rb, env), env, 3)
    assert not len(rb)
    remedy = eval(
        str(refused.value).split("extras=")[1].removesuffix(")"), {"torch": torch}
    )
    rb = td.ReplayBuffer.from_env(env, 200, extras=remedy)
    run(td.GymnasiumRecorder(rb, env), env, 3)
    other = rewarded((2,), 2)
    with pytest.raises(
        td.SchemaError, match=r"came with shape \(2, 2\), the rows hold \(2, 3\)"
    ):
        run(td.GymnasiumRecorder(rb, other), other, 3)
    assert len(rb) == 6


@pytest.mark.parametrize(
    "how", ["from_env", "from_spaces", "shared=True", "single", "rollout", "after"]
)
def test_a_buffer_that_is_shared_before_the_first_write_can_be_recorded(how):
    env: Any = Walk() if how == "single" else vector(AutoresetMode.SAME_STEP)
    critic = TensorDictModule(
        lambda obs: obs[..., :1], ["observation"], ["state_value"]
    )
    if how == "from_spaces":
        spaces = env.single_observation_space, env.single_action_space
        rb: Any = td.ReplayBuffer.from_spaces(*spaces, 300, num_envs=LANES)
    elif how == "rollout":
        rb = td.RolloutBuffer.from_env(env, 20, batch_size=10, value_network=critic)
    else:
        rb = td.ReplayBuffer.from_env(env, 300, shared=how == "shared=True")
    recorder = td.GymnasiumRecorder(rb, env) if how == "after" else None
    rb.share()
    recorder = recorder or td.GymnasiumRecorder(rb, env)
    run(recorder, env, 20)
    assert len(rb) == sum(map(len, histories(env)))
    lane = rb.chronological()
    assert_neighbours_follow(lane if lane.ndim == 1 else lane[:, 0])


def test_what_shared_rows_lack_is_named_with_a_remedy_that_works():
    env, infos = vector(AutoresetMode.SAME_STEP), {"energy": 0.0}
    rb = td.ReplayBuffer.from_env(env, 300).share()
    with pytest.raises(
        td.SchemaError, match=r"have no \('next', 'energy'\), which the recorder writes"
    ) as refused:
        td.GymnasiumRecorder(rb, env, infos=infos)
    remedy = eval(
        str(refused.value).split("extras=")[1].removesuffix(")"), {"torch": torch}
    )
    rb = td.ReplayBuffer.from_env(env, 300, extras=remedy).share()
    run(td.GymnasiumRecorder(rb, env, infos=infos), env, 3)
    assert len(rb) == 3 * LANES


# -- recorders of single lanes

STEPS = 40


def buffer(env, lanes: int, capacity: int = STEPS, **kwargs) -> td.ReplayBuffer:
    spaces = env.observation_space, env.action_space
    return td.ReplayBuffer.from_spaces(
        *spaces, capacity * lanes, num_envs=lanes, batch_size=200, **kwargs
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
    rb = buffer(
        envs[0],
        2,
        capacity,
        stats=stats,
        sampler=td.NStepSampler(td.UniformSampler(), 3, 0.5),
    )
    fast, slow = (
        recorder_of(rb.lane(lane), env, lane) for lane, env in enumerate(envs)
    )
    for step in range(2 * STEPS):
        act(fast)
        if step % 3 == 0:
            act(slow)
        if step % 25 == 24:
            slow.reset()  # breaks off an episode
        assert [len(rb.lane(lane)) for lane in (0, 1)] == [
            min(capacity, len(env.history)) for env in envs
        ]
    kept = [histories(env)[0] for env in envs]
    for lane, history in enumerate(kept):
        assert_rows(rb.lane(lane).chronological(), history[-capacity:])
    assert stats.steps == sum(map(len, kept))
    assert stats.episodes == sum(int(history["next", "done"].sum()) for history in kept)
    first, second = (
        set(rb.lane(lane).chronological()["collector", "traj_ids"].tolist())
        for lane in (0, 1)
    )
    assert not first & second
    batch = rb.sample()  # the third next observation of an episode, or its last
    t, e = batch["index"].unbind(-1)
    _, ahead, ended = td.TrajectoryIndex(rb.storage).reach((t, e))
    assert torch.equal(batch["steps_to_next_obs"].flatten(), (ahead + 1).clamp(max=3))
    assert ended.any()


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
    lanes = 2
    rb = buffer(Walk(kind), lanes, 4 * STEPS, sampler=td.UniformSampler())
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
    workers = [make(target=work, args=(lane,)) for lane in range(lanes)]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(60)
    ids = []
    for lane in range(lanes):
        rows = rb.lane(lane).chronological()
        steps = {key: torch.from_numpy(part) for key, part in found[lane].items()}
        assert_rows(rows, TensorDict(steps, [(3 + lane) * STEPS // 2]))
        ids.append({*rows["collector", "traj_ids"].tolist()})
    assert not ids[0] & ids[1]
    assert len(rb.sample()) == 200


@pytest.mark.parametrize("target", ["lane", "recorder"])
def test_a_lane_waits_while_another_thread_reserves_the_rows_again(target):
    rb, env, found = buffer(Walk(), 2), Walk(), []
    rows = rb.storage.all_rows().layout.unpack(
        torch.empty(2, rb.storage.row_bytes, dtype=torch.uint8)
    )
    lane = rb.lane(1)

    def work() -> None:
        found.append(
            rb.lane(0).number
            if target == "lane"
            else td.GymnasiumRecorder(lane, env)._lane
        )

    thread = threading.Thread(target=work)
    with rb.storage.lock:
        rb.storage.release()
        thread.start()
        thread.join(0.1)
        rb.storage.reserve(rows)
    thread.join(60)
    assert found == [target == "recorder"]


@pytest.mark.parametrize("lanes", [3, 100])  # two ways to find the largest
@pytest.mark.parametrize("reward", [2.0**24 + 1, -(2.0**24) - 1])
def test_a_whole_reward_that_rows_would_round_is_refused(lanes, reward):
    rewards = np.zeros(lanes)
    flags, obs = np.zeros(lanes, bool), np.zeros((lanes, 2), np.float32)
    step = {"observation": obs, "action": obs, "next_observation": obs}
    step |= {"terminated": flags, "truncated": flags}
    rb = td.ReplayBuffer(storage=td.PackedStorage(4 * lanes, ndim=2))
    rb.add_step(**step, reward=rewards)
    rewards[-1] = 0.1
    rb.add_step(**step, reward=rewards)
    rewards[1] = reward
    with pytest.raises(td.SchemaError, match=f"'reward'.* is {int(reward)}, which"):
        rb.add_step(**step, reward=rewards)
    assert len(rb) == 2 * lanes


def test_a_masked_reset_leaves_the_other_episodes_ended():
    env = SyncVectorEnv(
        [partial(Walk, "box", 2)] * 3, autoreset_mode=AutoresetMode.DISABLED
    )
    rb = td.ReplayBuffer.from_env(env, 30)
    recorder = td.GymnasiumRecorder(rb, env)
    recorder.reset(seed=0)
    recorder.step(np.zeros(3, np.int64))  # ends all episodes
    recorder.reset(options={"reset_mask": np.array([True, False, True])})
    with pytest.raises(RuntimeError, match=r"the episode has ended in lanes \[1\]"):
        recorder.step(np.zeros(3, np.int64))
    assert len(rb) == 3
    recorder.reset(options={"reset_mask": np.array([False, True, False])})
    recorder.step(np.zeros(3, np.int64))
    assert len(rb) == 6


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
