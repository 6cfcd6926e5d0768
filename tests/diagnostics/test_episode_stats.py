"""Statistics of episodes, against an oracle that keeps every step of every trajectory
in a list."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data.replay_buffers import PrioritizedSampler

from rlbuf_td import (
    EpisodeStats,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    RolloutBuffer,
    UniformSampler,
)

KEYS = {("next", "speed"): "mean", ("next", "fuel"): "sum", "height": "last"}
REASONS = [("next", "success")]
FLAGS = "terminated", "truncated", "success"


class Oracle:
    def __init__(self, window: int) -> None:
        self.window, self.steps = window, 0
        self.open: dict[Any, list[dict[str, float]]] = defaultdict(list)
        self.ended: list[dict[str, float]] = []

    def step(self, trajectory, step: dict[str, float]) -> None:
        self.steps += 1
        self.open[trajectory].append(step)
        if not step["done"]:
            return
        steps = self.open.pop(trajectory)
        sums = {
            name: sum(each[name] for each in steps)
            for name in ("reward", "speed", "fuel")
        }
        reasons = {f"done_{name}": step[name] for name in FLAGS}
        self.ended.append(
            {
                "step": self.steps,
                "length": len(steps),
                "return": sums["reward"],
                "speed": sums["speed"] / len(steps),
                "fuel": sums["fuel"],
                "height": step["height"],
                **reasons,
            }
        )

    def summary(self) -> dict[str, float]:
        last = self.ended[-self.window :]
        if not last:
            return {}
        out = {"episodes": float(len(self.ended)), "steps": float(self.steps)}
        for name in ("length", "return", "speed", "fuel", "height"):
            xs = [each[name] for each in last]
            out |= {f"{name}_mean": fmean(xs), f"{name}_std": pstdev(xs)}
            out |= {f"{name}_min": min(xs), f"{name}_max": max(xs)}
        for name in FLAGS:
            out[f"done_{name}_rate"] = fmean(each[f"done_{name}"] for each in last)
        return {f"eval/{name}": value for name, value in out.items()}


def play(lanes: int, steps: int, seed: int, *, ids: bool = False) -> TensorDict:
    """Return ``[E, T]`` steps whose episodes end at random; the numbers are exact in
    float32."""
    g = torch.Generator().manual_seed(seed)
    shape = (lanes, steps)

    def number() -> torch.Tensor:
        return torch.randint(-64, 64, (*shape, 1), generator=g) / 8.0

    terminated, truncated = (
        torch.rand(*shape, 1, generator=g) < 0.15 for _ in range(2)
    )
    done = terminated | truncated
    outcome = {
        "reward": number(),
        "fuel": torch.randint(0, 9, shape, generator=g),
        "speed": number(),
        "done": done,
        "terminated": terminated,
        "truncated": truncated,
        "success": torch.rand(shape, generator=g) < 0.5,
    }
    height = number().squeeze(-1).double()
    data = TensorDict({"height": height, "next": outcome}, shape)
    if ids:  # each trajectory has a number, whichever the lane
        episode = done.squeeze(-1).long().cumsum(1) - done.squeeze(-1).long()
        data["collector", "traj_ids"] = episode * lanes + torch.arange(lanes)[:, None]
    return data


def tell(oracle: Oracle, row: TensorDict, trajectory) -> None:
    names = "reward", "speed", "fuel", "done", *FLAGS
    step = {name: float(row["next", name]) for name in names}
    oracle.step(trajectory, step | {"height": float(row["height"])})


def tell_all(oracle: Oracle, data: TensorDict) -> None:
    has_ids = "collector" in data.keys()
    for t in range(data.shape[1]):
        for lane, row in enumerate(data[:, t]):
            trajectory = int(row["collector", "traj_ids"]) if has_ids else lane
            tell(oracle, row, trajectory)


def make(window: int, history: int = 10_000) -> tuple[EpisodeStats, Oracle]:
    return EpisodeStats(KEYS, window, "eval", reasons=REASONS, history=history), Oracle(
        window
    )


def agree(stats: EpisodeStats, oracle: Oracle) -> None:
    assert stats.summary() == pytest.approx(oracle.summary(), rel=1e-12, abs=1e-12)
    assert all(type(value) is float for value in stats.summary().values())
    assert (stats.episodes, stats.steps) == (len(oracle.ended), oracle.steps)
    history = stats.history()
    last = oracle.ended[-len(history["step"]) :] if oracle.ended else []
    for name, column in history.items():
        assert column.tolist() == [each[name] for each in last], name


@given(
    lanes=st.integers(1, 5),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    form=st.sampled_from(
        ["lanes, time", "time, lanes", "step by step", "flattened", "workers in turn"]
    ),
    window=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_in_lockstep_with_a_list_of_every_step(lanes, cuts, form, window, seed):
    stats, oracle = make(window, history=window + seed % 5)
    data = play(lanes, sum(cuts), seed, ids=form in ("flattened", "workers in turn"))
    for part in data.split(cuts, dim=1):
        steps = part.shape[1]
        # lane after lane, as one sequence or from a worker for each lane
        if "collector" in data.keys():
            for piece in [part.reshape(-1)] if form == "flattened" else part.split(1):
                stats.update(piece)
            for row in part.reshape(-1):
                tell(oracle, row, int(row["collector", "traj_ids"]))
        else:
            if form == "step by step":
                for t in range(steps):
                    stats.update(part[:, t], time_dim=None)
            elif form == "time, lanes":
                stats.update(part.transpose(0, 1).contiguous(), time_dim=0)
            else:
                stats.update(part)
            tell_all(oracle, part)
        agree(stats, oracle)


def test_lanes_of_several_dims_and_padding_and_many_lanes_after_few():
    stats, oracle = make(50)
    data = play(6, 40, 3)
    stats.update(data.view(2, 3, 40).permute(0, 2, 1), time_dim=1)
    tell_all(oracle, data)
    agree(stats, oracle)
    stats.reset()
    oracle, data = Oracle(50), play(3, 40, 5, ids=True)
    agree(stats, oracle)
    padded = TensorDict.cat([data, data], 1)
    padded["collector", "traj_ids"][:, 40:] = -1
    stats.update(padded)
    tell_all(oracle, data)
    agree(stats, oracle)
    stats, oracle = make(15)
    for lanes in (3, 40, 3):
        data = play(lanes, 10, lanes)
        stats.update(data)
        tell_all(oracle, data)
        agree(stats, oracle)


def test_open_episodes_without_steps_are_forgotten():
    stats = EpisodeStats()
    step = play(1, 1, 0, ids=True)
    step["next", "done"].zero_()
    for number in range(2_500):
        step["collector", "traj_ids"].fill_(number)
        stats.update(step)
    assert len(stats._keys) <= 2048
    step["collector", "traj_ids"].fill_(2_499)
    step["next", "done"].fill_(True)
    stats.update(step)
    assert stats.summary()["train/length_mean"] == 2.0


FORMS = "[T]", "[T], add", "[E, T]", "[T, E]", "[T, E], add", "[n, 1]"
PLAIN = False, torch.float32, UniformSampler
OTHER = True, torch.float64, lambda: ProportionalSampler(120)


@pytest.mark.parametrize(
    ("form", "ids", "kind", "sampler"),
    [(form, *given) for form in FORMS for given in (PLAIN, OTHER)],
)
def test_compiled_writes_count_the_same_steps_as_update(form, ids, kind, sampler):
    data = play(3 if "E" in form else 1, 200, 5, ids=ids)
    for key in (("next", "fuel"), ("next", "reward")):
        data[key] = data[key].to(kind)
    is_time_first = form == "[T, E]"
    is_single = "add" in form
    stats, by_hand = make(20)[0], make(20)[0]
    rb = ReplayBuffer(
        storage=PackedStorage(120, ndim=1 + ("E" in form)),  # the ring wraps
        sampler=sampler(),
        stats=stats,
        dim_extend=0 if is_time_first else None,
    )
    if form == "[n, 1]":  # rows of one step each, by the batch size
        rb.storage.reserve(data[:, 0])
    for part in data.split(1 if is_single else 8, dim=1):
        if is_time_first or form == "[n, 1]":
            rows = part.transpose(0, 1).contiguous()
        else:
            rows = part if "E" in form else part[0]
        time_dim: int | None = 0 if is_time_first else -1
        if is_single:
            rows, time_dim = rows.squeeze(-1), None
            rb.add(rows)
        else:
            rb.extend(rows)
        by_hand.update(rows, time_dim=time_dim)
    assert rb.compiled.startswith("add, extend")
    assert stats.episodes > 20
    mine, other = stats.state_dict(), by_hand.state_dict()
    assert all(torch.equal(mine[name], other[name]) for name in other)


def test_statistics_that_replace_others_count_the_next_writes():
    data, rb = (
        play(1, 40, 6)[0].exclude(("next", "fuel")),
        ReplayBuffer(storage=PackedStorage(100)),
    )
    rb.extend(data[:10])
    for _ in range(2):
        rb.episode_stats = EpisodeStats()
        rb.extend(data[10:20])
        rb.extend(data[20:30])
        assert rb.episode_stats.steps == 20


def test_a_listener_that_writes_again_leaves_the_counted_steps_as_they_are():
    class Echo(UniformSampler):
        again: Any = None

        def mark_update(self, index, *, storage=None) -> None:
            data, self.again = self.again, None
            if data is not None:
                rb.extend(data)

    first, second, echo = play(1, 10, 6)[0], play(1, 30, 7)[0], Echo()
    stats, alone = EpisodeStats(), EpisodeStats()
    rb = ReplayBuffer(storage=PackedStorage(100), sampler=echo, stats=stats)
    for data in (first, first, second):
        alone.update(data)
    rb.extend(first)
    echo.again = second.clone()
    rb.extend(first)
    assert stats.summary() == alone.summary()


def test_torchrls_own_parts_and_rollouts_are_counted_once():
    data = play(4, 16, 4)
    data["state_value"] = data["next", "state_value"] = torch.zeros(4, 16, 1)
    rollout = RolloutBuffer(16, 4, stats=EpisodeStats())
    prioritized = ReplayBuffer(
        storage=PackedStorage(64),
        sampler=PrioritizedSampler(64, 0.6, 0.4),
        stats=EpisodeStats(),
    )
    for rb, written in ((rollout, data), (prioritized, data[0])):
        by_hand = EpisodeStats()
        by_hand.update(written)
        rb.extend(written.clone())
        assert rb.episode_stats is not None
        assert rb.episode_stats.summary() == by_hand.summary()


@pytest.mark.parametrize(
    "missing",
    ["done", "terminated", "truncated", "done truncated", "terminated truncated"],
)
def test_a_flag_that_is_missing_follows_from_the_others(missing):
    data, names = play(2, 40, 9), missing.split()
    outcome = data["next"]
    if len(names) == 2:
        outcome["truncated"].zero_()
    outcome["truncated"] &= ~outcome["terminated"]
    outcome["done"] = outcome["terminated"] | outcome["truncated"]
    whole, part = EpisodeStats(), EpisodeStats()
    whole.update(data)
    part.update(data.exclude(*(("next", name) for name in names)))
    assert whole.summary() == part.summary()
    assert whole.episodes > 3


def test_numbers_of_any_dtype_are_exact():
    stats = EpisodeStats([("next", "count")])
    step = {
        "reward": torch.tensor([1, 2]),
        "count": torch.tensor([2**40 + 1, 1]),
        "done": torch.tensor([False, True]),
    }
    stats.update(TensorDict({"next": step}, [2]))
    assert stats.summary()["train/count_mean"] == 2**40 + 2
    assert stats.summary()["train/return_mean"] == 3.0


def test_a_lazily_negated_reward_counts_with_its_sign():
    stats = EpisodeStats()
    # 2, stored as -2
    reward = torch.complex(torch.zeros(1, 1), torch.full((1, 1), -2.0)).conj().imag
    assert reward.is_neg()
    outcome = {"reward": reward, "done": torch.ones(1, 1, dtype=torch.bool)}
    stats.update(TensorDict({"next": outcome}, [1]))
    assert stats.summary()["train/return_mean"] == 2.0


@pytest.mark.parametrize("name", [None, 0, 1])
def test_a_load_ends_open_episodes_with_ids_alone(name: int | None) -> None:
    rb = ReplayBuffer(storage=PackedStorage(8), stats=EpisodeStats())

    def write(*done: bool) -> None:
        flags = torch.tensor(done)[:, None]
        data = {"next": {"reward": torch.ones(len(done), 1), "done": flags}}
        if name is not None:
            data["collector"] = {"traj_ids": torch.full((len(done),), name)}
        rb.extend(TensorDict(data, [len(done)]))

    write(False, False)
    rb.load_state_dict(rb.state_dict())
    write(False, True)
    assert rb.episode_stats.history()["length"].tolist() == [4 if name is None else 2]
