"""What ``rb.health()`` says, against plain counts of what was drawn and written; and
what plots show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tensordict import TensorDict
from torchrl.data.replay_buffers import RandomSampler, Sampler, TensorDictMaxValueWriter

import rlbuf_td as td
from rlbuf_td.diagnostics.plots import (
    plot_advantages,
    plot_episodes,
    plot_health,
    plot_trajectory,
)
from tests.catalogue import SAMPLERS, numbered_rows

CAPACITY = 40
NAMES = ["uniform", "unique", "no norm", "rank", "minibatch"]


def numbered(start: int, count: int, lanes: int = 1) -> TensorDict:
    step = torch.arange(start, start + count).expand(lanes, count).clone()
    return TensorDict({"step": step}, [lanes, count])


def quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[round(q * (len(values) - 1))]


@given(
    sampler=st.sampled_from([*NAMES, "TorchRL's"]),
    lanes=st.sampled_from([1, 4]),
    parts=st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=6
    ),
    seed=st.integers(0, 99),
)
def test_in_lockstep_with_lists_of_what_was_written_and_drawn(
    sampler, lanes, parts, seed
):
    torch.manual_seed(seed)
    ndim = 1 if lanes == 1 else 2
    made = RandomSampler() if sampler == "TorchRL's" else SAMPLERS[sampler](CAPACITY)
    rb = td.ReplayBuffer(storage=td.PackedStorage(CAPACITY, ndim=ndim), sampler=made)
    written, ages = 0, list[int]()
    for count, draws in parts:
        data = numbered(written, count, lanes)
        rb.extend(data if ndim == 2 else data[0])
        written += count
        for _ in range(draws):
            batch = rb.sample(min(8, len(rb)))
            ages = [written - 1 - step for step in batch["step"].tolist()]
        health = rb.health()
        assert health["rows"] == len(rb)
        assert health["fill"] == len(rb) / CAPACITY
        assert all(
            type(value) is float and math.isfinite(value) for value in health.values()
        )
        if ages:  # at the draw
            measured = [health[f"age_{q}"] for q in ("p10", "p50", "p90", "max")]
            assert measured == [quantile(ages, q) for q in (0.1, 0.5, 0.9, 1.0)]


def by_error(errors: list[float]) -> list[float]:
    return [(error + 1e-8) ** 0.8 for error in errors]


def by_rank(errors: list[float]) -> list[float]:
    return [rank**-0.8 for rank in range(1, len(errors) + 1)]


PRIORITIZED: dict[str, Any] = {
    "proportional": (td.ProportionalSampler(300, 0.8, 0.7), by_error),
    "rank": (td.RankSampler(300, 0.8, 0.7), by_rank),
    "wrapped": (
        td.SequenceSampler(
            td.NStepSampler(td.ProportionalSampler(300, 0.8, 0.7), 2, 0.9), 4
        ),
        by_error,
    ),
}


@pytest.mark.parametrize("name", PRIORITIZED)
def test_weights_and_mass_and_priorities_are_those_of_the_law(name):
    sampler, law = PRIORITIZED[name]
    rb = td.ReplayBuffer(storage=td.PackedStorage(300), sampler=sampler, batch_size=256)
    rb.extend(numbered_rows(300))
    errors = torch.randn(300).exp()
    rb.update_priority(torch.arange(300), -errors)
    weight = rb.sample()["priority_weight"].double().flatten()
    health = rb.health()
    share = float(weight.sum() ** 2 / weight.square().sum())
    median = weight.sort().values[(len(weight) - 1) // 2]
    assert health["effective_sample_size"] == pytest.approx(share)
    assert health["effective_share"] == pytest.approx(share / len(weight))
    assert health["weight_max_over_median"] == pytest.approx(
        float(weight.max() / median)
    )
    mass = law(sorted(errors.double().tolist(), reverse=True))
    assert health["top_mass"] == pytest.approx(sum(mass[:3]) / sum(mass))
    assert health["priority_max"] == pytest.approx(float(errors.max()))
    assert health["priority_p50"] == pytest.approx(quantile(errors.tolist(), 0.5))


@pytest.mark.parametrize(
    "make", [td.UniformSampler, RandomSampler, td.MinibatchSampler]
)
def test_equally_probable_rows_have_a_top_mass_of_a_hundredth(make):
    rb = td.ReplayBuffer(storage=td.PackedStorage(200), sampler=make())
    rb.extend(numbered(0, 200)[0])
    health = rb.health()
    assert set(health) == {"rows", "fill", "top_mass", "stale_updates", "compiled"}
    assert health["top_mass"] == pytest.approx(0.01)


class Third(Sampler):
    """Draws the third row."""

    def sample(self, storage, batch_size: int) -> tuple[torch.Tensor, dict]:
        return torch.full((batch_size,), 2), {}

    def _empty(self) -> None: ...
    def dumps(self, path) -> None: ...
    def loads(self, path) -> None: ...
    def state_dict(self): ...
    def load_state_dict(self, state_dict) -> None: ...


def test_numbers_of_unknown_samplers_and_writers_are_left_out():
    best = TensorDictMaxValueWriter(rank_key="step")
    seen = []
    for parts in ({"sampler": Third()}, {"writer": best}):
        rb = td.ReplayBuffer(storage=td.PackedStorage(10), batch_size=3, **parts)
        rb.extend(numbered(0, 5)[0])
        rb.sample()
        seen.append(rb.health())
    drawn, ranked = seen
    assert "top_mass" not in drawn
    assert drawn["age_max"] == 2.0
    assert not [name for name in ranked if name.startswith("age")]


# -- plots show what the buffer holds, and are labelled


LANES, STEPS = 3, 50


def steps(seed: int = 0) -> TensorDict:
    """Return ``[E, T]`` steps whose observation counts them; episodes end every 8, 9
    and 10 steps."""
    g = torch.Generator().manual_seed(seed)
    time = torch.arange(STEPS).expand(LANES, STEPS).unsqueeze(-1)
    done = (time + 1) % torch.arange(8, 8 + LANES).view(-1, 1, 1) == 0
    return TensorDict(
        {
            "observation": torch.cat([time, -time], -1).float(),
            "action": torch.nn.functional.one_hot(
                torch.randint(3, (LANES, STEPS), generator=g), 3
            ),
            "next": {
                "reward": torch.randn(LANES, STEPS, 1, generator=g),
                "done": done,
                "terminated": done,
            },
        },
        [LANES, STEPS],
    )


def buffer(
    sampler: object = None,
    capacity: int = 200,
    written: int = STEPS,
    batch_size: int = 32,
) -> td.ReplayBuffer:
    rb = td.ReplayBuffer(
        storage=td.PackedStorage(capacity, ndim=2),
        sampler=sampler or td.ProportionalSampler(capacity + 2),
        batch_size=batch_size,
        stats=td.EpisodeStats(window=5),
    )
    rb.extend(steps()[:, :written])
    rb.sample()
    return rb


def heights(axes: Axes) -> list[float]:
    return [bar.get_height() for bar in axes.patches]  # pyrefly: ignore [missing-attribute]


def lines(figure: Figure) -> list[list[np.ndarray]]:
    return [
        [np.asarray(line.get_ydata()) for line in axes.lines] for axes in figure.axes
    ]


@pytest.mark.parametrize(
    ("kind", "zeros"), [(td.ProportionalSampler, 150), (td.RankSampler, 30)]
)
def test_health_shows_what_health_says(kind, zeros):
    rb = buffer(kind(202, 0.5))
    rb.update_priority(
        torch.arange(150), torch.cat([torch.zeros(zeros), torch.ones(150 - zeros)])
    )
    figure = plot_health(rb)
    age, weights, errors, mass = figure.axes
    assert sum(heights(age)) == 32
    assert sum(heights(weights)) == 32
    assert sum(heights(errors)) == pytest.approx(1 - zeros / 150)
    assert mass.lines[-1].get_ydata() == [rb.health()["top_mass"]]
    with np.errstate(all="raise"):
        assert figure._repr_png_().startswith(b"\x89PNG")  # pyrefly: ignore [missing-attribute]
    assert len(plot_health(buffer(td.UniformSampler(), capacity=198)).axes) == 2


def test_episodes_show_every_episode_and_the_running_mean():
    stats = buffer().episode_stats
    assert stats is not None
    figure = plot_episodes(stats)
    assert len(figure.axes) == 3
    returns = stats.history()["return"].numpy()
    dots, mean = lines(figure)[0]
    assert np.array_equal(dots, returns)
    windows = [returns[max(0, n - 4) : n + 1] for n in range(len(returns))]
    assert np.allclose(mean, [window.mean() for window in windows])


def test_a_trajectory_is_shown_whole_across_the_wrap():
    # 20 time steps of 50: 40 to 49, then 30 to 39
    rb = buffer(td.UniformSampler(), capacity=60)
    # lane 1 ends at 35 and 44
    row = int((rb.storage["observation"][:, 1, 0] == 38).nonzero()) * LANES + 1
    figure = plot_trajectory(rb, row)
    assert len(figure.axes) == 3
    reward, action, observation = lines(figure)
    shown = steps()[1, 36:45]
    assert np.array_equal(np.stack(observation[:2], 1), shown["observation"])
    assert np.array_equal(reward[0], shown["next", "reward"][:, 0])
    assert np.array_equal(action[0], shown["action"].argmax(-1))
    same = plot_trajectory(rb, (row // LANES, 1))
    assert same.get_suptitle() == figure.get_suptitle()
    assert len(plot_trajectory(rb, row, keys=["observation"]).axes) == 1


def test_a_rollout_shows_values_targets_and_advantages():
    rollout = rollout_of(STEPS)
    figure = plot_advantages(rollout)
    top, advantages, _ = figure.axes
    for line, key in zip(top.lines, ("value_target", "state_value"), strict=False):
        assert np.array_equal(line.get_ydata(), rollout.storage[key][:, 0, 0])
    # episodes of the first lane have 8 steps
    ends = [np.asarray(line.get_xdata())[0] for line in top.lines[2:]]
    assert ends == [7.5, 15.5, 23.5, 31.5, 39.5, 47.5]
    assert sum(heights(advantages)) == STEPS * LANES


def rollout_of(length: int) -> td.RolloutBuffer:
    rollout = td.RolloutBuffer(length, LANES)
    data = steps()[:, :length]
    value = data["observation"][..., :1] / 50
    data["state_value"], data["next", "state_value"] = value, value + 0.1
    rollout.extend(data)
    return rollout


def sampled(rows: int) -> td.ReplayBuffer:
    """Return a buffer whose draws are spread over ``rows`` rows."""
    sampler = td.ProportionalSampler(202, 0.9)
    rb = buffer(sampler, written=rows // LANES, batch_size=3)
    rb.update_priority(torch.arange(rows), torch.arange(1.0, rows + 1))
    rb.sample()
    return rb


FIGURES = {
    "a few draws": lambda: plot_health(sampled(12)),
    "more draws": lambda: plot_health(sampled(150)),
    "a few episodes": lambda: plot_episodes(sampled(30).episode_stats),
    "a short rollout": lambda: plot_advantages(rollout_of(3)),
    "a trajectory": lambda: plot_trajectory(buffer(), 30),
}
COUNTS = "rows", "steps", "length, steps", "return =\nlength in steps"


@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES)
def test_each_tick_is_labelled_with_the_number_where_it_stands(make):
    figure = make()
    figure.draw_without_rendering()
    read = 0
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        name = axis.get_label_text()
        is_count = name in COUNTS or "step" in name
        for tick in axis.get_major_ticks():
            place = tick.get_loc()
            text = tick.label1.get_text().replace("\N{MINUS SIGN}", "-")
            if "$" in text or not text:  # a power of ten
                continue
            is_share = text.endswith("%")
            number = float(text.rstrip("%")) / (100 if is_share else 1)
            assert number == pytest.approx(place, rel=1e-4, abs=1e-9)
            assert is_share or not is_count or place == round(place)
            read += 1
    assert read >= 8


def test_the_band_of_a_deviation_stays_within_the_range_of_the_episodes():
    stats = td.EpisodeStats(window=10)
    done = torch.ones(40, 1, dtype=torch.bool)
    reward = (torch.arange(40) % 10 == 0).float().unsqueeze(-1)  # mostly 0, some 1
    stats.update(TensorDict({"next": {"reward": reward, "done": done}}, [40]))
    (band,) = plot_episodes(stats).axes[0].collections
    heights_of_band = np.asarray(band.get_paths()[0].vertices)[:, 1]
    assert heights_of_band.min() == 0.0
    assert 0.1 < heights_of_band.max() <= 1.0
