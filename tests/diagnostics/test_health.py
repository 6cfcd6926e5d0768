"""What ``rb.health()`` says, against plain counts of what was drawn and written."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data.replay_buffers import RandomSampler, Sampler, TensorDictMaxValueWriter

import rlbuf_td as td
from tests.catalogue import SAMPLERS

CAPACITY = 40
NAMES = ["uniform", "unique", "no norm", "rank", "minibatch"]


def numbered(start: int, count: int, lanes: int = 1) -> TensorDict:
    step = torch.arange(start, start + count).expand(lanes, count).clone()
    return TensorDict({"step": step}, [lanes, count])


def filled(
    sampler=None, capacity: int = 40, rows: int = 30, **settings
) -> td.ReplayBuffer:
    rb = td.ReplayBuffer(
        storage=td.PackedStorage(capacity), sampler=sampler, batch_size=8, **settings
    )
    rb.extend(numbered(0, rows)[0])
    return rb


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
        if ages and draws:
            found = [health[f"age_{q}"] for q in ("p10", "p50", "p90", "max")]
            assert found == [quantile(ages, q) for q in (0.1, 0.5, 0.9, 1.0)]


@pytest.mark.parametrize("make", [td.ProportionalSampler, td.RankSampler])
def test_weights_and_mass_and_priorities_are_those_of_the_law(make):
    torch.manual_seed(0)
    n = 300
    rb = td.ReplayBuffer(
        storage=td.PackedStorage(n), sampler=make(n, 0.8, 0.7), batch_size=64
    )
    rb.extend(numbered(0, n)[0])
    errors = torch.randn(n).exp()
    rb.update_priority(torch.arange(n), -errors)
    weight = rb.sample()["priority_weight"].double()
    health = rb.health()
    share = 1 / sum((weight / weight.sum()) ** 2)
    assert health["effective_sample_size"] == pytest.approx(float(share))
    assert health["effective_share"] == pytest.approx(float(share) / 64)
    assert health["weight_max_over_median"] == pytest.approx(
        float(weight.max() / weight.sort().values[31])
    )
    if make is td.RankSampler:
        mass = [rank**-0.8 for rank in range(1, n + 1)]
    else:
        mass = [
            (error + 1e-8) ** 0.8
            for error in sorted(errors.double().tolist(), reverse=True)
        ]
    assert health["top_mass"] == pytest.approx(sum(mass[:3]) / sum(mass))
    assert health["priority_max"] == pytest.approx(float(errors.max()))
    assert health["priority_p50"] == pytest.approx(quantile(errors.tolist(), 0.5))


def test_health_of_a_wrapper_is_that_of_the_innermost_sampler():
    wrapped = td.SequenceSampler(td.NStepSampler(td.ProportionalSampler(40), 2, 0.9), 4)
    rb = td.ReplayBuffer(
        storage=td.PackedStorage(40, ndim=2), sampler=wrapped, batch_size=8
    )
    data = numbered(0, 10, 4)
    data["next"] = TensorDict(
        {"reward": torch.ones(4, 10, 1), "done": torch.zeros(4, 10, 1).bool()}, [4, 10]
    )
    rb.extend(data)
    rb.update_priority(torch.arange(40), torch.arange(40.0))
    batch, health = rb.sample(), rb.health()
    weight = batch["priority_weight"].double()
    mass = (torch.arange(40.0).double() + 1e-8) ** 0.6
    assert health["priority_max"] == 39.0
    assert health["top_mass"] == pytest.approx(float(mass[-1] / mass.sum()))
    share = float(weight.sum() ** 2 / weight.square().sum())
    assert health["effective_sample_size"] == pytest.approx(share)
    assert health["age_max"] == 9 - int(batch["step"].min())


@pytest.mark.parametrize(
    "make", [td.UniformSampler, RandomSampler, td.MinibatchSampler]
)
def test_equally_probable_rows_have_a_top_mass_of_a_hundredth(make):
    rb = filled(make(), 200, 200)
    assert set(rb.health()) == {"rows", "fill", "top_mass", "stale_updates", "compiled"}
    assert rb.health()["top_mass"] == pytest.approx(0.01)


def test_an_age_is_measured_at_the_draw():
    rb = filled(capacity=20, rows=10)
    expected = float(9 - rb.sample()["step"].min())
    rb.extend(numbered(10, 15)[0])  # replaces the rows of the batch
    assert rb.health()["age_max"] == expected


def test_numbers_of_unknown_samplers_and_writers_are_left_out():
    class Third(Sampler):
        def sample(self, storage, batch_size: int) -> tuple[torch.Tensor, dict]:
            return torch.full((batch_size,), 2), {}

        def _empty(self) -> None: ...
        def dumps(self, path) -> None: ...
        def loads(self, path) -> None: ...
        def state_dict(self): ...
        def load_state_dict(self, state_dict) -> None: ...

    rb = td.ReplayBuffer(storage=td.PackedStorage(10), sampler=Third(), batch_size=3)
    rb.extend(numbered(0, 5)[0])
    rb.sample()
    health = rb.health()
    assert "top_mass" not in health
    assert health["age_max"] == 2.0

    best = td.ReplayBuffer(
        storage=td.PackedStorage(10),
        writer=TensorDictMaxValueWriter(rank_key="step"),
        batch_size=3,
    )
    best.extend(numbered(0, 5)[0])
    best.sample()
    assert not [name for name in best.health() if name.startswith("age")]
