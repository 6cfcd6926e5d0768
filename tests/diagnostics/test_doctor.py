"""The doctor: a healthy buffer gives no finding, each fault that is planted into its
rows gives its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import Bounded, Composite
from torchrl.data.replay_buffers import (
    LazyTensorStorage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from torchrl.envs import (
    Compose,
    EnvBase,
    GymEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNormV2,
)

from rlbuf_td import PackedStorage, ReplayBuffer, RolloutBuffer
from rlbuf_td.__main__ import main
from rlbuf_td.diagnostics.doctor import check
from rlbuf_td.diagnostics.doctor.bounds import bounds_of
from tests.catalogue import assert_same

# -- a small world whose transitions are kept by hand: walks that end by falling off or
# by a time limit

Observe = Callable[[torch.Tensor], dict]


def vector(state: torch.Tensor) -> dict:
    return {"observation": state.clone()}


def nested(state: torch.Tensor) -> dict:
    pixels = state.repeat(1, 48).view(-1, 1, 12, 12) * 40
    return {
        "camera": {"pixels": (pixels.round() + 128).clamp(0, 255).to(torch.uint8)},
        "body": {
            "speed": state.clone(),
            "cell": state[:, :1].round().long().clamp(-3, 3),
            "free": state > 0,
        },
    }


def walk(
    steps: int,
    lanes: int = 1,
    *,
    observe: Observe = vector,
    seed: int = 0,
    limit: int = 25,
) -> TensorDict:
    """Return ``[T, E]`` transitions, with true final observations, and every flag that
    TorchRL has."""
    generator = torch.Generator().manual_seed(seed)
    state, age = torch.zeros(lanes, 3), torch.zeros(lanes, 1, dtype=torch.int64)
    rows = []
    for _ in range(steps):
        action = torch.randint(2, (lanes, 1), generator=generator)
        noise = torch.randn(lanes, 3, generator=generator)
        reached = state + 0.15 * (2 * action - 1) + 0.1 * noise
        age = age + 1
        terminated = reached.abs().amax(1, keepdim=True) > 1.0
        truncated = (age >= limit) & ~terminated
        done = terminated | truncated
        flags = {"done": done, "terminated": terminated, "truncated": truncated}
        outcome = observe(reached) | flags | {"reward": torch.ones(lanes, 1)}
        row = {"action": action, "done": torch.zeros_like(done), "next": outcome}
        rows.append(TensorDict(observe(state) | row, [lanes]))
        fresh = 0.1 * torch.randn(lanes, 3, generator=generator)
        state, age = torch.where(done, fresh, reached), torch.where(done, 0, age)
    return torch.stack(rows)


def with_ids(rows: TensorDict) -> TensorDict:
    """Add trajectory ids to rows ``[T, E]``; each has one lane."""
    done = rows["next", "done"].reshape(rows.shape).long()
    episode = done.cumsum(0) - done
    lanes = rows.shape[1]
    rows["collector", "traj_ids"] = episode * lanes + torch.arange(lanes)
    return rows


# -- faults to plant into healthy rows [T, E]

Fault = Callable[[TensorDict], TensorDict]
FLAGS = ("done", "terminated", "truncated")


def flags(rows: TensorDict, **values: torch.Tensor) -> TensorDict:
    for name, value in values.items():
        rows["next", name] = value.clone()
    return rows


def shifted(by: int, *names: str) -> Fault:
    return lambda rows: flags(
        rows, **{name: rows["next", name].roll(by, 0) for name in names}
    )


def without_flags(rows: TensorDict) -> TensorDict:
    return flags(rows, **{name: torch.zeros_like(rows["next", name]) for name in FLAGS})


def same_step_autoreset(rows: TensorDict) -> TensorDict:
    """Store as next observation what ``step`` returned: at an end, the first one of the
    next episode."""
    following = rows.exclude("next", "action", "done", "collector").roll(-1, 0)
    ends = rows["next", "done"].squeeze(-1).clone()
    ends[-1] = False
    reached = rows["next"].select(*following.keys())
    rows["next"].update(torch.where(ends, following, reached))
    return rows


def time_limit_left_out(rows: TensorDict) -> TensorDict:
    return flags(
        rows,
        done=rows["next", "terminated"],
        truncated=torch.zeros_like(rows["next", "done"]),
    )


def next_step_autoreset(rows: TensorDict) -> TensorDict:
    """Store the step after an end, which resets, as a transition; of one lane."""
    lane, stored = rows[:, 0], []
    for row, following in pairwise(lane):
        stored.append(row)
        if bool(row["next", "done"]):
            reset = following.clone()
            reset.update(row["next"].exclude("reward", *FLAGS))
            reset["next"].update(following.exclude("next", "action", "done"))
            for name in ("reward", *FLAGS):
                reset["next", name].zero_()
            stored.append(reset)
    return torch.stack(stored)[:, None]


def done_twice(rows: TensorDict) -> TensorDict:
    """Set done one step before the end, too: the last step is then a trajectory of its
    own."""
    done = rows["next", "done"]
    return flags(rows, done=done | done.roll(-1, 0))


def done_within(rows: TensorDict) -> TensorDict:
    done = rows["next", "done"][:, 0, 0]
    alone = [t for t in range(5, len(done) - 5) if not done[t - 5 : t + 5].any()]
    rows["next", "done"][alone[-1], 0] = True
    return rows


def interleaved(rows: TensorDict) -> TensorDict:
    return rows.reshape(-1)[:, None]


def interleaved_with_ids(rows: TensorDict) -> TensorDict:
    """Store two steps of each environment at a time, with trajectory ids."""
    steps = len(rows) // 2
    pairs = with_ids(rows)[: 2 * steps].unflatten(0, (steps, 2))
    return pairs.transpose(1, 2).reshape(-1)[:, None]


def transposed(rows: TensorDict) -> TensorDict:
    return rows[: 10 * (len(rows) // 10)].transpose(0, 1).contiguous()


def rows_shuffled(rows: TensorDict) -> TensorDict:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def two_steps_ahead(rows: TensorDict) -> TensorDict:
    """Store a next observation that is none: of another scale."""
    seen = rows["next"].exclude("reward", *FLAGS)
    rows["next"].update(
        seen.apply(lambda leaf: 3 * leaf + 1 if leaf.is_floating_point() else leaf)
    )
    return rows


def one_array(rows: TensorDict) -> TensorDict:
    """Store what is left of an observation after a step that writes the next one to the
    same array."""
    rows.update(rows["next"].exclude("reward", *FLAGS))
    return rows


#: The fault, the number of lanes that it needs (0: any), and the code of its finding.
FAULTS: dict[str, tuple[Fault, int, str]] = {
    "done late": (shifted(1, "done"), 0, "done-shifted"),
    "done early": (shifted(-1, "done"), 0, "done-shifted"),
    "all flags late": (shifted(1, *FLAGS), 0, "done-shifted"),
    "all flags early": (shifted(-1, *FLAGS), 0, "done-shifted"),
    "done never": (without_flags, 0, "done-never"),
    "done always": (
        lambda rows: flags(rows, done=torch.ones_like(rows["next", "done"])),
        0,
        "done-without-reset",
    ),
    "time limit left out": (time_limit_left_out, 0, "reset-without-done"),
    "terminated without done": (
        lambda rows: flags(rows, done=rows["next", "truncated"]),
        0,
        "terminated-without-done",
    ),
    "truncated without done": (
        lambda rows: flags(rows, done=rows["next", "terminated"]),
        0,
        "truncated-without-done",
    ),
    "same-step autoreset": (same_step_autoreset, 0, "final-observation-lost"),
    "next-step autoreset": (next_step_autoreset, 1, "reset-row-stored"),
    "done twice": (done_twice, 0, "done-without-reset"),
    "done within": (done_within, 0, "done-without-reset"),
    "interleaved": (interleaved, 3, "lanes-mixed"),
    "interleaved with ids": (interleaved_with_ids, 3, "trajectories-interleaved"),
    "transposed": (transposed, 12, "lanes-mixed"),
    "rows shuffled": (rows_shuffled, 1, "lanes-mixed"),
    "one array": (one_array, 0, "observation-reused"),
    "another scale": (two_steps_ahead, 0, "next-observation-differs"),
}


# -- the order of rows

OBSERVERS = {"vector": vector, "nested": nested}
HOLDERS = [
    "rows",
    "packed",
    "packed ring",
    "torchrl",
    "torchrl ring",
    "unlike lanes",
    "unlike lanes, deduplicated",
]


@cache
def _healthy(lanes: int, observer: str) -> TensorDict:
    return walk(600 if lanes > 1 else 1_200, lanes, observe=OBSERVERS[observer])


def healthy(lanes: int, observer: str = "vector") -> TensorDict:
    return _healthy(lanes, observer).clone()


def held(rows: TensorDict, holder: str):
    """Return rows ``[T, E]`` in a buffer; in a ring, the oldest fifth has been
    overwritten."""
    if "unlike lanes" in holder:
        return in_unlike_lanes(rows, "deduplicated" in holder)
    if rows.shape[1] == 1:
        rows = rows[:, 0]
    if holder == "rows":
        return rows
    storage = PackedStorage if "packed" in holder else LazyTensorStorage
    buffer = ReplayBuffer if "packed" in holder else TensorDictReplayBuffer
    steps = len(rows) * 4 // 5 if "ring" in holder else len(rows) + 7
    size = steps * rows.shape[1:].numel()
    rb = buffer(storage=storage(size, ndim=rows.ndim), dim_extend=0)
    # of a longer write TorchRL keeps rows at random, each key for itself
    for part in rows.split(min(97, steps)):
        rb.extend(part)
    return rb


def in_unlike_lanes(rows: TensorDict, share_next: bool = False) -> ReplayBuffer:
    """Return rows ``[T, E]`` in lanes of a ring that hold fewer and fewer rows, the
    last one none; the first wraps."""
    steps, written = rows.shape
    storage = PackedStorage(
        steps * 3 // 4 * (written + 1),
        ndim=2,
        lanes=written + 1,
        share_next=share_next,
    )
    rb = ReplayBuffer(storage=storage)
    for lane in range(written):
        rb.extend(rows[: steps * (written - lane) // written, lane], lanes=lane)
    return rb


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_healthy_buffer_gives_no_finding(holder):
    assert check(held(healthy(1, "vector"), holder)).healthy
    report = check(held(healthy(3, "nested"), holder))
    assert report.healthy
    assert "nothing found" in str(report)


PLACES = [
    (1, "vector", "rows"),
    (3, "nested", "packed ring"),
    (3, "vector", "torchrl"),
    (1, "vector", "torchrl ring"),
]


def test_trajectories_in_longer_stretches_give_no_finding():
    rows = with_ids(healthy(3))[:500].unflatten(0, (10, 50))
    assert check(rows.transpose(1, 2).reshape(-1)).healthy


@pytest.mark.parametrize(
    ("mix", "code"),
    [(interleaved, "lanes-mixed"), (interleaved_with_ids, "trajectories-interleaved")],
)
def test_a_rollout_of_environments_that_alternate_gives_their_finding(mix, code):
    rows = healthy(3)
    rows["state_value"] = rows["next", "state_value"] = rows["next", "reward"].clone()
    rows = mix(rows)[:, 0]
    rollout = RolloutBuffer(len(rows), batch_size=8)
    rollout.extend(rows)
    with pytest.warns(RuntimeWarning, match="alternate .*RolloutBuffer"):
        rollout.summary()
    assert check(rollout).codes == [code]


@pytest.mark.parametrize(
    ("name", "lanes", "observer", "holder"),
    [(name, *PLACES[(j + k) % 4]) for j, name in enumerate(FAULTS) for k in (0, 1)],
)
def test_a_fault_gives_exactly_its_finding(name, lanes, observer, holder):
    fault, needed, code = FAULTS[name]
    report = check(held(fault(healthy(needed or lanes, observer)), holder))
    assert report.codes == [code]


@pytest.mark.parametrize(
    "name", [name for name, (_, lanes, _) in FAULTS.items() if lanes < 2]
)
def test_a_fault_is_found_in_lanes_of_unlike_lengths(name):
    fault, lanes, code = FAULTS[name]
    report = check(held(fault(healthy(lanes or 3, "nested")), "unlike lanes"))
    assert report.codes == [code]
    assert not report.skipped


@pytest.mark.parametrize(
    "name", [name for name, (_, lanes, _) in FAULTS.items() if not lanes]
)
def test_a_fault_is_found_in_rows_with_trajectory_ids(name):
    fault, _, code = FAULTS[name]
    rows = with_ids(healthy(2))
    assert check(rows).healthy
    # the ids tell of a reset
    expected = [] if code == "reset-without-done" else [code]
    assert check(fault(rows)).codes == expected


@pytest.mark.parametrize(
    ("name", "shift", "words"),
    [
        ("same-step autoreset", 0, ""),
        ("done late", 1, "one step too late"),
        ("done early", -1, "one step too early"),
    ],
)
def test_a_finding_names_the_rows_at_fault(rows, name, shift, words):
    ends = rows["next", "done"][:-1].flatten().nonzero()[:, 0] + shift
    finding = check(FAULTS[name][0](rows[:, None])[:, 0])[0]
    assert finding.rows == (*ends[:5].tolist(),)
    assert words in finding.explanation
    assert finding.count >= len(ends)


def test_the_rows_of_resets_are_named(rows):
    cut = rows["next", "truncated"].flatten().nonzero()[:, 0]
    left_out = check(time_limit_left_out(rows.clone()))[0]
    assert left_out.rows == (*cut[:5].tolist(),)
    ends = rows["next", "done"].flatten().nonzero()[:, 0]
    # each reset moves the rows after it
    resets = ends + 1 + torch.arange(len(ends))
    stored = check(next_step_autoreset(rows[:, None])[:, 0])[0]
    assert stored.rows == (*resets[:5].tolist(),)


def test_rows_of_lanes_of_unlike_lengths_are_named_as_the_storage_indexes_them():
    rb = in_unlike_lanes(healthy(3))
    faulty = [(3, 1), (7, 0), (199, 2), (299, 1), (449, 0)]
    index = torch.tensor(faulty).unbind(-1)
    rb.set_at_(("next", "reward"), torch.full((5, 1), torch.nan), index)
    (finding,) = check(rb)
    assert (finding.code, finding.count) == ("not-finite", 5)
    assert finding.of == 450 + 400 + 200
    assert sorted(finding.rows) == faulty


def without_end(observation: torch.Tensor, following: torch.Tensor) -> TensorDict:
    steps = len(observation)
    outcome = {"observation": following, "done": torch.zeros(steps, 1).bool()}
    return TensorDict({"observation": observation, "next": outcome}, [steps])


def endless(steps: int) -> TensorDict:
    place = torch.arange(steps + 1.0).unsqueeze(-1)
    return without_end(place[:-1], place[1:])


def test_a_lane_without_an_end_is_a_fault_only_if_it_is_long():
    assert check(endless(500)).healthy
    (finding,) = check(endless(20_000))
    assert (finding.code, finding.count) == ("done-never", 20_000)


def test_pieces_of_lanes_that_have_not_ended_yet_are_no_fault_with_ids():
    rows = walk(20, 12, limit=10_000)
    rows = rows[:4]  # nothing has ended
    assert not rows["next", "done"].any()
    rows["collector", "traj_ids"] = torch.arange(12).expand(4, 12).clone()
    flat = torch.cat([piece.transpose(0, 1).reshape(-1) for piece in rows.split(2)])
    assert check(flat).healthy
    assert check(rows[:2].transpose(0, 1).reshape(-1)).healthy


def test_games_that_often_end_with_the_first_step_are_no_fault():
    observation = torch.randn(500, 4)
    done = torch.rand(500, 1) < 0.7
    following = torch.where(done, torch.randn(500, 4), observation.roll(-1, 0))
    outcome = {"observation": following, "done": done}
    rows = TensorDict({"observation": observation, "next": outcome}, [500])
    assert check(rows).healthy


SLICES = slice(None, -1), slice(1, None)


def test_coincidences_beside_a_number_that_never_repeats_are_no_fault():
    place = torch.randint(0, 5, (60, 10, 2)).float()
    seen = {"place": place, "battery": torch.rand(60, 10, 1)}
    place[4::4, 0] = place[3:-1:4, -1]  # some episodes begin where the one before ended
    before, after = ({key: x[:, at] for key, x in seen.items()} for at in SLICES)
    after["done"] = (torch.arange(9) == 8).expand(60, -1).unsqueeze(-1)
    assert check(TensorDict(before | {"next": after}, [60, 9]).flatten()).healthy


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_observations_of_a_few_small_numbers_are_told_apart(dtype):
    seen = torch.cartesian_prod(*[torch.arange(3)] * 6).to(dtype)
    seen = seen[torch.randperm(3**6)]
    rows = without_end(seen[:-2], seen[2:])
    finding = check(rows)[0]
    assert finding.code == "lanes-mixed"
    assert finding.count == finding.of == len(rows) - 1


def test_rows_without_next_observations_are_checked_for_the_rest(rows):
    rows = rows.exclude(("next", "observation"))
    report = check(rows)
    assert report.healthy
    assert "not checked: next observations" in str(report)
    skipped = check(rows.exclude("next", "done")).skipped[0]
    assert skipped.startswith("trajectories: neither done flags nor")
    storage = PackedStorage(4)
    # a collector's batch [E, T]
    storage.set(range(4), rows[:40].reshape(4, 10))
    assert "ndim=2" in check(storage).skipped[0]


def test_rows_without_an_order_of_time_are_not_checked_for_it():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200), writer=TensorDictMaxValueWriter(rank_key="key")
    )
    rb.extend(healthy(1)[:, 0].set("key", torch.rand(1_200)))
    report = check(rb)
    assert report.healthy
    order = "the order of rows, which a TensorDictMaxValueWriter does not keep"
    assert order in report.skipped


# -- buffers that TorchRL's collectors have filled, and loops


def cartpole() -> EnvBase:
    return TransformedEnv(
        GymEnv("CartPole-v1"), Compose(StepCounter(max_steps=30), RewardSum())
    )


def normalised_pendulum() -> EnvBase:
    return TransformedEnv(
        GymEnv("Pendulum-v1"),
        Compose(StepCounter(max_steps=40), VecNormV2(in_keys=["observation"])),
    )


@cache
def collected(
    make: Callable[[], EnvBase], lanes: int, frames: int = 360, **settings
) -> tuple[TensorDict, ...]:
    torch.manual_seed(0)
    env = SerialEnv(lanes, make) if lanes else make()
    env.set_seed(0)
    collector = Collector(
        env, None, frames_per_batch=60, total_frames=frames, **settings
    )
    batches = tuple(data.clone() for data in collector)
    collector.shutdown()
    return batches


@pytest.mark.parametrize(
    ("make", "lanes", "buffer", "settings"),
    [
        (
            cartpole,
            0,
            lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(240)),
            {},
        ),
        (normalised_pendulum, 0, lambda: ReplayBuffer(storage=PackedStorage(240)), {}),
        (
            cartpole,
            3,
            lambda: ReplayBuffer(storage=PackedStorage(240, ndim=2)),
            {"reset_at_each_iter": True},
        ),
    ],
)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torchrl", "ignore::UserWarning:torchrl"
)
def test_what_a_collector_fills_is_healthy(make, lanes, buffer, settings):
    rb = buffer()
    for data in collected(make, lanes, **settings):
        rb.extend(data.clone())
    report = check(rb, space=make())
    assert report.codes == [], str(report)
    assert report.rows == len(rb)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torchrl", "ignore::UserWarning:torchrl"
)
def test_rollouts_are_healthy():
    network = TensorDictModule(
        lambda observation: observation[..., :1] * 0.5, ["observation"], ["state_value"]
    )
    rb = RolloutBuffer(20, 3, value_network=network)
    for data in collected(cartpole, 3, 120):
        rb.extend(data.clone())
        assert check(rb).codes == []


# -- values that are not finite, or out of bounds; saved buffers, the command


@pytest.fixture
def rows() -> TensorDict:
    return healthy(1)[:, 0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("observation", float("nan")),
        (("next", "observation"), float("inf")),
        (("next", "reward"), float("-inf")),
    ],
)
def test_a_value_that_is_not_finite_is_found_once(rows, key, value):
    for t in (7, 700, 701):
        rows[key][t, 0] = value
    (finding,) = check(rows)
    assert (finding.code, finding.rows, finding.count, finding.of) == (
        "not-finite",
        (7, 700, 701),
        3,
        1_200,
    )
    assert finding.key == ((key,) if isinstance(key, str) else key)


def test_actions_are_looked_at_and_what_a_policy_stores_beside_them_is_not(
    rows,
):
    rows["action"] = rows["action"].float()
    # of actions that a mask excludes
    rows["logits"] = torch.full((1_200, 2), float("-inf"))
    assert check(rows).codes == []
    rows["action"][3] = float("nan")
    assert [(each.code, each.key) for each in check(rows)] == [
        ("not-finite", ("action",))
    ]


def test_a_report_names_five_rows_and_the_gravest_finding_first(rows):
    rows["next", "reward"][100:200] = float("nan")
    rows["next", "done"] = rows["next", "done"].roll(1, 0)
    report = check(rows)
    assert report.codes == ["done-shifted", "not-finite"]
    said = "100 of 1,200 rows (8.3%): 100, 101, 102, 103, 104 ..."
    assert said in str(report[1])
    assert check(rows, ignore="not-finite").codes == ["done-shifted"]
    assert check(rows, ignore=["not-finite", "done-shifted"]).healthy


@pytest.mark.parametrize(
    ("fault", "unit", "flag"),
    [
        ("another scale", "rows that another row of their trajectory follows", ""),
        ("same-step autoreset", "ends of trajectories", "done"),
        ("terminated without done", "rows with terminated", "terminated"),
    ],
)
def test_a_finding_says_what_it_counts(rows, fault, unit, flag):
    counted = rows["next", flag] if flag else ~rows["next", "done"]
    expected = int(counted[:-1].sum())
    (finding,) = check(FAULTS[fault][0](rows[:, None])[:, 0])
    assert (finding.of, finding.unit) == (expected, unit)
    text = " ".join(str(finding).split())
    assert f"{finding.count:,} of {expected:,} {unit} (" in text


BOX = Box(
    np.array([-9.0, -9.0, -np.inf], np.float32),
    np.array([9.0, 9.0, np.inf], np.float32),
)
SPEC = Composite(
    observation=Bounded(
        torch.tensor([-9.0, -9.0, -99.0]), torch.tensor([9.0, 9.0, 99.0])
    )
)


@pytest.mark.parametrize(
    "space",
    [BOX, Dict(observation=BOX), SPEC, SPEC["observation"]],
    ids=["Box", "Dict", "C", ""],
)
def test_an_observation_out_of_its_bounds_is_found(rows, space):
    assert check(rows, space=space).codes == []
    rows["observation"][33, 1] = 9.5
    rows["next", "observation"][32, 1] = 9.5
    found = {each.key: each.rows for each in check(rows, space=space)}
    assert found == {("observation",): (33,), ("next", "observation"): (32,)}


def test_flags_of_agents_are_no_flags_of_the_trajectory(rows):
    rows["next", "terminated"] = rows["next", "done"].clone()
    flags = torch.ones(len(rows), 2, 1, dtype=torch.bool)
    rows["next", "agents"] = TensorDict({"terminated": flags}, flags.shape[:2])
    assert check(rows).codes == []


def test_an_infinite_observation_is_not_out_of_bounds_too(rows):
    rows["observation"][33, 1] = torch.inf
    assert check(rows, space=BOX).codes == ["not-finite"]


def test_bounds_are_those_of_the_parts_of_a_space_or_of_one_of_several_environments():
    space = Dict(
        camera=Dict(pixels=Box(100, 255, (1, 12, 12), np.uint8)),
        body=Dict(speed=Box(-9, 9, (3,))),
    )
    report = check(healthy(1, "nested")[:, 0], space=space)
    pixels = ("camera", "pixels")
    assert {finding.key for finding in report} == {pixels, ("next", *pixels)}
    for env in (
        gymnasium.make_vec("CartPole-v1", 2),
        gymnasium.make("CartPole-v1"),
        GymEnv("CartPole-v1"),
        SerialEnv(2, lambda: GymEnv("CartPole-v1")),
    ):
        assert bounds_of(env)[("observation",)][1][0] == pytest.approx(4.8)
    said = r"must be a Gymnasium space, a TorchRL spec .* got int"
    with pytest.raises(TypeError, match=said):
        bounds_of(3)


def test_entries_of_float64_are_found_once(rows):
    for key in ("observation", ("next", "observation")):
        rows[key] = rows[key].double()
    (finding,) = check(rows)
    assert (finding.code, finding.count) == ("float64", 1_200)
    assert "'observation', ('next', 'observation'): float64" in finding.explanation


def test_an_environment_is_taken_by_name_or_with_its_wrappers():
    observation = torch.zeros(3, 4)
    observation[1] = 100.0
    rows = TensorDict({"observation": observation}, [3])
    env = gymnasium.make("CartPole-v1")
    wrapped = gymnasium.wrappers.DtypeObservation(env, np.float32)
    for space in ("CartPole-v1", wrapped):
        assert check(rows, space=space).codes == ["out-of-bounds"]
    with pytest.raises(ValueError, match="CartPole"):
        check(rows, space="CartPole-v17")


def test_a_check_changes_nothing(rows):
    rb = ReplayBuffer(storage=PackedStorage(1_000), batch_size=4)
    rb.extend(rows)
    before = rb[:]
    attached = list(rb.storage._attached_entities)
    generator = torch.random.get_rng_state()
    check(rb)
    assert_same(rb[:], before)
    assert list(rb.storage._attached_entities) == attached
    assert torch.equal(torch.random.get_rng_state(), generator)


# -- saved buffers, and the command


def saved(folder: Path, fault: str | None = None) -> Path:
    rows = walk(400)
    if fault is not None:
        rows = FAULTS[fault][0](rows)
    held(rows, "packed ring").dumps(folder)
    return folder


def test_a_dump_of_lanes_is_examined(tmp_path):
    held(walk(400, 2), "packed ring").dumps(tmp_path)
    report = check(tmp_path)
    assert (report.codes, report.rows) == ([], 640)


@pytest.mark.skipif(sys.platform == "win32", reason="reopen=True needs POSIX locks")
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_folder_of_rows_to_reopen_is_examined_and_left_as_it_was(tmp_path, lanes):
    rows = walk(400, lanes)
    rows["next", "reward"][7, 0] = float("nan")

    def opened() -> ReplayBuffer:
        storage = PackedStorage(
            400 * lanes, ndim=lanes, scratch_dir=tmp_path, reopen=True
        )
        return ReplayBuffer(storage=storage, dim_extend=0)

    with opened() as rb:
        rb.extend(rows if lanes > 1 else rows[:, 0])
        before = rb[:]
        with pytest.raises(RuntimeError, match="are open in process"):
            check(tmp_path)
    for _ in range(2):
        (finding,) = check(tmp_path)
        assert (finding.code, finding.of) == ("not-finite", 400 * lanes)
        assert finding.rows == ((7, 0) if lanes > 1 else 7,)
    with opened() as rb:
        assert_same(rb[:], before)


@pytest.mark.parametrize(
    ("kept", "message"), [(0, "holds no rows"), (1 << 16, "is damaged")]
)
def test_a_damaged_folder_of_rows_is_refused(tmp_path, kept, message):
    storage = PackedStorage(400, scratch_dir=tmp_path, reopen=True)
    with ReplayBuffer(storage=storage) as rb:
        rb.extend(walk(40)[:, 0])
    file = tmp_path / "head.bin"
    content = file.read_bytes()
    damaged = content[:kept] + b"?" + content[kept + 1 :] if kept else b""
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match=message):
        check(tmp_path)


def test_the_command_returns_1_for_findings_and_2_for_what_it_cannot_read(
    tmp_path, capsys
):
    path, late = str(saved(tmp_path / "a")), str(saved(tmp_path / "b", "done late"))
    for arguments, status, said in (
        ([path], 0, f"{path}: 320 rows read: nothing found"),
        # |cos| and |sin| are at most 1, these walks go further
        ([path, "--env", "Pendulum-v1"], 1, "out-of-bounds: ('next', 'observation')"),
        ([path, "--env", "NoSuchPole-v1"], 2, "NoSuchPole"),
        ([path, "--ignore", "speed"], 2, "there is no finding speed"),
        ([str(tmp_path / "nothing")], 2, "cannot examine"),
        ([late], 1, "320 rows read: 1 finding\n\ndone-shifted\n    "),
        ([late, "--ignore", "done-shifted"], 0, "nothing found"),
    ):
        assert main(["doctor", *arguments]) == status
        printed = capsys.readouterr()
        assert said in (printed.err if status == 2 else printed.out)
