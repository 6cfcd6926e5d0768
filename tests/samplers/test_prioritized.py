"""The prioritized samplers: their laws, weights, settings, and priorities from
TorchRL's sampler.

What writes, updates, loads and processes do to priorities is in ``test_lockstep.py``.
"""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import PrioritizedSampler

from rlbuf_td import (
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
)
from rlbuf_td.samplers import weight_watch
from rlbuf_td.samplers.weight_watch import WeightWatch
from tests.catalogue import buffer_of, numbered_rows
from tests.model import importance
from tests.statistics import assert_follows

both = pytest.mark.parametrize("cls", [ProportionalSampler, RankSampler])


def buffer(
    rows: int, *, lanes: int = 0, cls=ProportionalSampler, **settings
) -> ReplayBuffer:
    rb = buffer_of(rows, cls(rows * max(lanes, 1), **settings), lanes, batch_size=64)
    shape = [lanes, rows] if lanes else [rows]
    rb.extend(TensorDict({"x": torch.zeros(shape)}, shape))
    return rb


def law(magnitude: torch.Tensor, alpha: float, eps: float) -> torch.Tensor:
    weight = (magnitude.double().abs() + eps) ** alpha
    return weight / weight.sum()


@pytest.mark.parametrize("batch", [7, 300])
def test_stratified_draws_follow_the_law_in_every_batch(batch):
    rb = buffer(100, alpha=0.6)
    td_error = torch.rand(100, generator=torch.Generator().manual_seed(1)) * 4
    rb.update_priority(torch.arange(100), td_error)
    expected = law(td_error, 0.6, rb.sampler.eps) * batch
    total, batches = torch.zeros(100), 600 + 15_000 // batch
    for _ in range(batches):
        counts = torch.bincount(rb.sampler.draw(rb.storage, batch)[0], minlength=100)
        # a row that spans several segments is drawn in each that it fills, and at most
        # twice besides
        assert ((counts - expected).abs() <= 2.0).all()
        total += counts
    assert_follows(total, expected / batch)


@both
@pytest.mark.parametrize(
    ("writer", "lanes"), [(RingWriter, 0), (RingWriter, 3), (ReservoirWriter, 0)]
)
def test_new_rows_have_the_largest_td_error_that_was_seen(cls, writer, lanes, device):
    rb = buffer_of(
        20, cls(20 * max(lanes, 1), alpha=0.5), lanes, batch_size=4, writer=writer()
    )
    shape = [lanes, 90] if lanes else [90]
    data = TensorDict({"x": torch.arange(90).expand(shape).clone()}, shape)
    rb.extend(data[..., :40])
    every = torch.arange(len(rb.storage))
    rb.update_priority(every, torch.linspace(0.5, 16.0, len(every)))
    for first in (40, 65):
        rb.extend(data[..., first : first + 25])
        is_new = rb.storage["x"].flatten() >= first
        assert is_new.any()
        assert (rb.sampler.priority(every)[is_new] == 16.0).all()
        rb.update_priority(every, torch.linspace(0.5, 1.0, len(every)))


@both
@pytest.mark.parametrize("norm", ["buffer", "batch", None])
@pytest.mark.parametrize(("lanes", "stratified"), [(0, False), (2, True)])
def test_importance_weights_are_those_of_the_formula(lanes, stratified, norm, cls):
    rb = buffer(
        40,
        lanes=lanes,
        cls=cls,
        alpha=0.7,
        beta=0.5,
        weight_norm=norm,
        stratified=stratified,
    )
    rows = len(rb)
    td_error = torch.rand(rows, generator=torch.Generator().manual_seed(2))
    rb.sampler.update_priority(torch.arange(rows), td_error, storage=rb.storage)
    index, info = rb.sampler.sample(rb.storage, 32)
    flat = index[0] * lanes + index[1] if lanes else index
    law = rb.sampler.probability(torch.arange(rows)).tolist()
    expected = torch.tensor(importance(law, flat.tolist(), 0.5, norm))
    torch.testing.assert_close(info["priority_weight"], expected, rtol=1e-6, atol=0.0)


def test_alpha_re_weights_what_is_stored_and_may_go_to_zero_and_back():
    rb = buffer(10, alpha=0.6)
    td_error = torch.linspace(0.1, 5.0, 10)
    rb.update_priority(torch.arange(10), td_error)
    for alpha in (0.0, 1.0, np.float64(0.3), torch.tensor(0.9)):
        rb.sampler.alpha = alpha
        expected = law(td_error, float(alpha), rb.sampler.eps)
        torch.testing.assert_close(rb.sampler.probability(torch.arange(10)), expected)
        rb.sampler.tree.check(rb.sampler.alpha, rb.sampler.eps)


@both
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_snapshot_can_be_loaded_into_the_sampler_that_it_aliases(cls, is_shared):
    rb = buffer(20, cls=cls)
    every = torch.arange(20)
    rb.update_priority(every, torch.linspace(0.5, 2.0, 20))
    if is_shared:
        rb.sampler.share_memory_()
    before = rb.sampler.priority(every), rb.sampler.probability(every)
    rb.sampler.load_state_dict(rb.sampler.snapshot())
    assert torch.equal(rb.sampler.priority(every), before[0])
    torch.testing.assert_close(rb.sampler.probability(every), before[1])


@both
def test_a_shared_sampler_refuses_the_state_of_a_larger_one_and_goes_on(cls):
    rb = buffer(20, cls=cls)
    every = torch.arange(20)
    rb.update_priority(every, torch.linspace(0.5, 2.0, 20))
    rb.sampler.share_memory_()
    before, alpha = rb.sampler.probability(every), rb.sampler.alpha
    for capacity in (21, 100):
        with pytest.raises(ValueError, match="cannot grow in shared memory"):
            rb.sampler.load_state_dict(cls(capacity, alpha=0.2).state_dict())
        assert torch.equal(rb.sampler.probability(every), before)
        assert (rb.sampler.alpha, rb.sampler.default_priority) == (alpha, 2.0)
        with pytest.raises(IndexError, match="out of range"):
            rb.sampler.update_priority(torch.tensor([20]), torch.ones(1))


@both
def test_errors_of_any_dtype_and_rows_in_every_form_are_taken(cls):
    rb = buffer(5, lanes=3, cls=cls)
    time, lane, every = (
        torch.tensor([0, 4, 2]),
        torch.tensor([2, 0, 1]),
        torch.arange(15),
    )
    errors = torch.tensor([5.0, -6.0, 7.0])
    for name in ("float16", "bfloat16", "float32", "float64", "int64"):
        dtype = getattr(torch, name)
        error = errors.to(dtype).requires_grad_(dtype.is_floating_point)
        for index in ((time, lane), torch.stack([time, lane], -1), time * 3 + lane):
            rb.update_priority(every, torch.ones(15))
            rb.sampler.update_priority(index, error, storage=rb.storage)
            found = rb.sampler.priority(index, storage=rb.storage)
            assert found.tolist() == [5.0, 6.0, 7.0]
            assert int((rb.sampler.priority(every) > 4).sum()) == 3


def test_priorities_grow_with_a_capacity_rounded_to_whole_time_steps():
    def rows_of_four_lanes() -> ReplayBuffer:
        storage, sampler = PackedStorage(10, ndim=2), ProportionalSampler(10)
        return ReplayBuffer(storage=storage, sampler=sampler, batch_size=4)

    rb, other = rows_of_four_lanes(), rows_of_four_lanes()
    rb.extend(numbered_rows(3, lanes=4))
    assert rb.storage.max_size == 12
    assert rb.sample()["x"].shape == (4,)
    rb.sampler.tree.check(rb.sampler.alpha, rb.sampler.eps)
    other.load_state_dict(rb.state_dict())
    assert other.sampler.priority(torch.arange(12)).tolist() == [1.0] * 12


@pytest.mark.parametrize(
    ("dtype", "rtol", "alpha"), [(torch.float32, 1e-4, 0.0), (torch.float64, 1e-7, 0.7)]
)  # ours is float32
def test_priorities_come_from_the_state_of_torchrls_sampler(dtype, rtol, alpha):
    theirs = PrioritizedSampler(6, alpha, 0.5, 1e-3, dtype, device="cpu")
    ours = ProportionalSampler(9, 0.1, 0.1)
    td_error = torch.tensor([0.0, 4.0, 0.5, 2.0], dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    assert (ours.priority(torch.arange(9)) == -1).all()
    assert (ours.alpha, ours.beta, ours.eps, ours.default_priority) == (
        alpha,
        0.5,
        1e-3,
        1.0,
    )
    # of two, the last
    theirs.update_priority(
        torch.tensor([0, 1, 2, 2, 4]), td_error[[0, 1, 0, 2, 3]].to(dtype)
    )
    ours.load_state_dict(theirs.state_dict())
    rows = torch.tensor([0, 1, 2, 4])
    expected = td_error if alpha else torch.full((4,), 4.0, dtype=torch.float64)
    torch.testing.assert_close(ours.priority(rows), expected, rtol=rtol, atol=1e-6)
    assert (ours.priority([3, 5, 6, 7, 8]) == -1).all()
    assert ours.default_priority == pytest.approx(4.0)
    # Even where theirs is float64, our weights are float32.
    torch.testing.assert_close(
        ours.probability(rows), law(td_error, alpha, 1e-3), rtol=rtol, atol=1e-9
    )
    if alpha:
        ours.tree.check(alpha, 1e-3)


# -- by rank


def ranked(td_error: torch.Tensor, **settings) -> RankSampler:
    sampler = RankSampler(len(td_error), **settings)
    sampler.update_priority(torch.arange(len(td_error)), td_error)
    return sampler


def test_a_segment_that_ends_where_a_rank_ends_does_not_reach_the_next_one():
    assert ranked(torch.ones(4), alpha=0.0).segments(2).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 1.5])
def test_segments_follow_the_number_of_rows_and_cover_every_rank(alpha):
    sampler = RankSampler(5_000, alpha=alpha)
    for rows in (1, 5, 100, 5_000):
        sampler.mark_update(torch.arange(rows))
        for k in (1, 2, 7, 256):
            segments = sampler.segments(k)
            assert segments.shape == (k, 2)
            assert (segments[0, 0], segments[-1, 1]) == (1, rows)
            gap = segments[1:, 0] - segments[:-1, 1]
            assert ((gap == 0) | (gap == 1)).all()
            total = (np.arange(1, rows + 1) ** -alpha).cumsum()
            reached = total[segments[:, 1].numpy() - 1] / total[-1]
            assert (reached >= (np.arange(k) + 1) / k - 1e-9).all()


def test_ties_are_ranked_by_row(device):
    sampler = ranked(torch.tensor([1.0, 3.0, -1.0, -3.0, 2.0]), alpha=0.7)
    assert sampler.rank(torch.arange(5)).tolist() == [4, 1, 5, 2, 3]


def test_rows_without_a_priority_have_rank_and_probability_zero():
    sampler, rows = RankSampler(5), torch.arange(5)
    sampler.update_priority(torch.tensor([3, 1]), torch.tensor([1.0, 2.0]))
    assert sampler.rank(rows).tolist() == [0, 1, 0, 2, 0]
    assert torch.equal(sampler.probability(rows) > 0, sampler.rank(rows) > 0)
    assert sampler.priority(rows).tolist() == [-1.0, 2.0, -1.0, 1.0, -1.0]


@both
def test_a_sampler_that_could_not_draw_grows_with_the_rows_before_an_update(cls):
    """A draw claims the rows, of which there are more than priorities."""
    storage = buffer(64).storage
    sampler = cls(4)
    with pytest.raises(RuntimeError):
        sampler.sample(storage, 2)
    sampler.update_priority(torch.tensor([5, 60]), torch.ones(2), storage=storage)
    assert sampler.priority(torch.tensor([5, 60])).tolist() == [1.0, 1.0]
    sampler.priorities.rule.check()


def test_a_copy_of_a_shared_sampler_can_grow():
    storage = partial(PackedStorage, shared=True)
    shared = buffer_of(8, ProportionalSampler(8), 0, storage, rows=numbered_rows(8))
    sampler = copy.deepcopy(shared.sampler)
    sampler._empty()
    rb = buffer_of(20, sampler, rows=numbered_rows(20))
    assert rb.sampler.priority(torch.arange(20)).tolist() == [1.0] * 20
    assert len(shared.sample(30)) == 30


# -- importance weights that stay small are reported once


ROWS = 1_000


@pytest.fixture
def often(monkeypatch):
    """Look at every second batch, so that 20 batches do for 1,000."""
    monkeypatch.setattr(weight_watch, "EVERY", 2)


def with_small_error(sampler, smallest: float = 0.0) -> ReplayBuffer:
    """Return a buffer whose TD errors are 1, but for the smallest one of one row."""
    rb = buffer_of(ROWS, sampler, rows=numbered_rows(ROWS), batch_size=8)
    td_error = torch.ones(ROWS)
    td_error[0] = smallest
    rb.update_priority(torch.arange(ROWS), td_error)
    return rb


def test_a_row_with_a_tiny_error_is_reported_once_after_a_thousand_batches(
    device, often
):
    rb = with_small_error(NStepSampler(ProportionalSampler(ROWS), 3, 0.99))
    for _ in range(19):
        assert rb.sample()["priority_weight"].mean() < 0.1
    with pytest.warns(RuntimeWarning, match='weight_norm="batch"'):
        rb.sample()
    for _ in range(40):  # a warning is an error
        rb.sample()


@pytest.mark.parametrize(
    ("make", "smallest"),
    [
        (partial(ProportionalSampler, weight_norm="batch"), 0.0),
        (partial(ProportionalSampler, weight_norm=None), 0.0),
        (partial(ProportionalSampler, beta=0.0), 0.0),
        (RankSampler, 0.0),
        (ProportionalSampler, 0.5),
    ],
)
def test_other_weights_are_not_reported(make, smallest, device, often):
    rb = with_small_error(make(ROWS), smallest)
    for _ in range(40):
        rb.sample()


def test_one_mean_of_another_size_begins_the_count_anew(often):
    watch = WeightWatch()
    small, usual = torch.full([8], 0.05), torch.full([8], 0.5)
    for weight in [small] * 19 + [usual] * 2 + [small] * 18:
        watch.see(weight)
    assert watch.small_means == 9
