"""The prioritized samplers: laws of the proportional one, weights, priorities and bad input of both."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import PrioritizedSampler, TensorDictReplayBuffer
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from rlbuf_td import (
    MinibatchSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
)
from tests.catalogue import buffer_of
from tests.kernels.invariants import check_tree
from tests.statistics import assert_follows, power

both = pytest.mark.parametrize("cls", [ProportionalSampler, RankSampler])


def buffer(capacity: int, rows: int, *, lanes: int = 0, cls=ProportionalSampler, **settings) -> ReplayBuffer:
    rb = buffer_of(capacity, cls(capacity * max(lanes, 1), **settings), lanes, batch_size=64)
    shape = [lanes, rows] if lanes else [rows]
    if rows:
        rb.extend(TensorDict({"x": torch.zeros(shape)}, shape))
    return rb


def law(magnitude: torch.Tensor, alpha: float, eps: float) -> torch.Tensor:
    weight = (magnitude.double().abs() + eps) ** alpha
    return weight / weight.sum()


def draws(rb: ReplayBuffer, batch: int, batches: int) -> torch.Tensor:
    sampler, storage = rb.sampler, rb.storage
    counts = torch.zeros(storage.max_size)
    for _ in range(batches):
        counts += torch.bincount(sampler.draw(storage, batch)[0], minlength=storage.max_size)
    return counts


def check(rb: ReplayBuffer) -> None:
    check_tree(rb.sampler.tree, rb.sampler.alpha, rb.sampler.eps)


@pytest.mark.parametrize(("alpha", "rows"), [(0.6, 1), (1.0, 2), (0.5, 9), (0.0, 100), (0.6, 100), (1.5, 100)])
def test_independent_draws_follow_the_law(alpha, rows):
    rb = buffer(128, rows, alpha=alpha, stratified=False)
    td_error = torch.linspace(-2.0, 3.0, rows)
    rb.update_priority(torch.arange(rows), td_error)
    probability = law(td_error, alpha, rb.sampler.eps)
    counts = draws(rb, 1_000, 400)
    assert rows < 2 or alpha > 1 or power(probability.numpy(), 400_000, bias=0.02) > 0.95
    assert_follows(counts[:rows], probability)
    assert not counts[rows:].any()
    torch.testing.assert_close(rb.sampler.probability(torch.arange(rows)), probability)


@pytest.mark.parametrize("batch", [7, 64, 300])
def test_stratified_draws_follow_the_law_in_every_batch(batch):
    rb = buffer(128, 100, alpha=0.6)
    td_error = torch.rand(100, generator=torch.Generator().manual_seed(1)) * 4
    rb.update_priority(torch.arange(100), td_error)
    expected = law(td_error, 0.6, rb.sampler.eps) * batch
    total = torch.zeros(100)
    batches = 200_000 // batch
    for _ in range(batches):
        counts = torch.bincount(rb.sampler.draw(rb.storage, batch)[0], minlength=100)
        # a row that spans several segments is drawn in each that it fills, and at most twice besides
        assert ((counts - expected).abs() <= 2.0).all()
        total += counts
    assert_follows(total, expected / batch)


@pytest.mark.parametrize("lanes", [0, 3])
def test_the_law_holds_after_the_wrap_and_new_rows_enter_at_the_maximum(lanes):
    rb = buffer(20, 20, lanes=lanes, alpha=1.0, eps=0.0, stratified=False)
    cells = 20 * max(lanes, 1)
    rb.sampler.update_priority(torch.arange(cells), torch.linspace(0.5, 4.0, cells), storage=rb.storage)
    shape = [lanes, 7] if lanes else [7]
    rb.extend(TensorDict({"x": torch.ones(shape)}, shape))
    magnitude = torch.linspace(0.5, 4.0, cells)
    magnitude[: 7 * max(lanes, 1)] = 4.0
    torch.testing.assert_close(rb.sampler.priority(torch.arange(cells)), magnitude.double())
    check(rb)
    assert_follows(draws(rb, 1_000, 300), law(magnitude, 1.0, 0.0))


@both
@pytest.mark.parametrize("writer", [RingWriter, ReservoirWriter])
@pytest.mark.parametrize("lanes", [0, 3])
def test_new_rows_have_the_largest_td_error_that_was_seen(cls, writer, lanes, device):
    rb = buffer_of(20, cls(20 * max(lanes, 1), alpha=0.5), lanes, batch_size=4, writer=writer())
    shape = [max(lanes, 1), 90] if lanes else [90]
    data = TensorDict({"x": torch.arange(90).expand(shape).clone()}, shape)
    rb.extend(data[..., :40])
    every = torch.arange(len(rb.storage))
    rb.update_priority(every, torch.linspace(0.5, 16.0, len(every)))
    rb.sample()
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
    rb = buffer(50, 40, lanes=lanes, cls=cls, alpha=0.7, beta=0.5, weight_norm=norm, stratified=stratified)
    rows = len(rb)
    td_error = torch.rand(rows, generator=torch.Generator().manual_seed(2))
    rb.sampler.update_priority(torch.arange(rows), td_error, storage=rb.storage)
    index, info = rb.sampler.sample(rb.storage, 32)
    flat = index if not lanes else index[0] * lanes + index[1]
    every = (rows * rb.sampler.probability(torch.arange(rows))) ** -0.5
    scale = {"buffer": every.max(), "batch": every[flat].max(), None: 1.0}[norm]
    assert info["priority_weight"].dtype is torch.float32
    torch.testing.assert_close(info["priority_weight"].double(), every[flat] / scale, rtol=1e-6, atol=0.0)


def test_alpha_re_weights_what_is_stored_and_may_go_to_zero_and_back():
    rb = buffer(10, 10, alpha=0.6)
    td_error = torch.linspace(0.1, 5.0, 10)
    rb.update_priority(torch.arange(10), td_error)
    for alpha in (0.0, 1.0, np.float64(0.3), torch.tensor(0.9)):
        rb.sampler.alpha = alpha
        expected = law(td_error, float(alpha), rb.sampler.eps)
        torch.testing.assert_close(rb.sampler.probability(torch.arange(10)), expected)
        check(rb)


def test_torchrls_schedulers_set_alpha_and_beta():
    rb = buffer(10, 10, alpha=0.6, beta=0.4)
    schedulers = [LinearScheduler(rb, "beta", 1.0, 10), LinearScheduler(rb, "alpha", 0.0, 10)]
    for _ in range(10):
        for scheduler in schedulers:
            scheduler.step()
    assert (rb.sampler.alpha, rb.sampler.beta) == (0.0, 1.0)


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_errors_of_any_dtype_are_taken_and_gradients_left_behind(dtype, cls):
    rb = buffer(10, 10, cls=cls)
    td_error = torch.tensor([2.0, -4.0]).to(dtype)
    rb.update_priority(torch.tensor([1, 2]), td_error.requires_grad_(dtype.is_floating_point))
    assert rb.sampler.priority(torch.tensor([1, 2])).tolist() == [2.0, 4.0]


@both
@pytest.mark.parametrize("form", ["tuple", "stacked", "flat"])
def test_rows_of_two_dims_can_be_named_in_every_form(form, cls):
    rb = buffer(5, 5, lanes=3, cls=cls)
    time, lane = torch.tensor([0, 4, 2]), torch.tensor([2, 0, 1])
    index = {"tuple": (time, lane), "stacked": torch.stack([time, lane], -1), "flat": time * 3 + lane}[form]
    rb.sampler.update_priority(index, torch.tensor([5.0, 6.0, 7.0]), storage=rb.storage)
    assert rb.sampler.priority(index, storage=rb.storage).tolist() == [5.0, 6.0, 7.0]
    assert int((rb.sampler.priority(torch.arange(15)) > 4).sum()) == 3


def test_priorities_grow_with_a_capacity_rounded_to_whole_time_steps():
    storages = [PackedStorage(10, ndim=2) for _ in range(2)]
    rb, other = (ReplayBuffer(storage=each, sampler=ProportionalSampler(10), batch_size=4) for each in storages)
    rb.extend(TensorDict({"x": torch.arange(12).view(3, 4)}, [3, 4]))
    assert rb.storage.max_size == 12
    assert rb.sample()["x"].shape == (4,)
    check(rb)
    other.load_state_dict(rb.state_dict())
    torch.testing.assert_close(other.sampler.priority(torch.arange(12)), rb.sampler.priority(torch.arange(12)))


@both
def test_emptying_forgets_every_priority(cls):
    rb = buffer(10, 10, cls=cls)
    rb.update_priority(torch.arange(10), torch.full((10,), 50.0))
    rb.empty()
    rb.extend(TensorDict({"x": torch.zeros(3)}, [3]))
    assert rb.sampler.default_priority == 1.0
    assert rb.sampler.priority(torch.arange(4)).tolist() == [1.0, 1.0, 1.0, -1.0]
    assert not draws(rb, 64, 50)[3:].any()


def test_new_rows_enter_at_the_highest_now_stored_if_asked():
    rb = buffer(4, 4, max_priority_within_buffer=True)
    rb.update_priority(torch.arange(4), torch.tensor([1.0, 9.0, 2.0, 3.0]))
    assert rb.sampler.default_priority == 9.0
    rb.update_priority(torch.tensor([1]), torch.tensor([0.5]))
    rb.add(TensorDict({"x": 0.0}))
    assert rb.sampler.priority([0]).tolist() == [3.0]


@pytest.mark.parametrize("make", [lambda: ProportionalSampler(10), lambda: RankSampler(10), MinibatchSampler])
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_sampler_with_a_state_serves_one_storage_at_a_time(make, cls):
    data, sampler = TensorDict({"x": torch.zeros(10)}, [10]), make()
    storage, other = PackedStorage(10), PackedStorage(10)
    rb = cls(storage=storage, sampler=sampler, batch_size=2)
    rb.extend(data)
    rb.sample()
    other.set(torch.arange(10), data)
    for use in (lambda: cls(storage=other, sampler=sampler).sample(2), lambda: sampler.sample(other, 2)):
        with pytest.raises(ValueError, match=r"serves another storage.*use one sampler per buffer"):
            use()
    assert cls(storage=storage, sampler=sampler, batch_size=2).sample().shape == (2,)
    if cls is ReplayBuffer:  # which empties the sampler
        rb.set_storage(other)
        rb.extend(data)
        rb.sample()
    copied = copy.deepcopy(rb)
    assert copied.sample().shape == (2,)
    del rb, copied, storage  # a storage that is gone
    sampler.sample(other, 2) if cls is ReplayBuffer else cls(storage=PackedStorage(10), sampler=sampler).extend(data)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("alpha", [0.7, 0.0])
def test_priorities_come_from_the_state_of_torchrls_sampler(dtype, rtol, alpha):
    theirs = PrioritizedSampler(6, alpha, 0.5, 1e-3, dtype, device="cpu")
    ours = ProportionalSampler(9, 0.1, 0.1, max_priority_within_buffer=True)
    td_error = torch.tensor([0.0, 4.0, 0.5, 2.0], dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    assert (ours.priority(torch.arange(9)) == -1).all()
    assert (ours.alpha, ours.beta, ours.eps, ours.default_priority) == (alpha, 0.5, 1e-3, 1.0)
    theirs.update_priority(torch.tensor([0, 1, 2, 2, 4]), td_error[[0, 1, 0, 2, 3]].to(dtype))  # of two, the last
    ours.load_state_dict(theirs.state_dict())
    rows = torch.tensor([0, 1, 2, 4])
    expected = td_error if alpha else torch.full((4,), 4.0, dtype=torch.float64)
    torch.testing.assert_close(ours.priority(rows), expected, rtol=rtol, atol=1e-6)
    assert (ours.priority([3, 5, 6, 7, 8]) == -1).all()
    assert ours.default_priority == pytest.approx(4.0)
    torch.testing.assert_close(ours.probability(rows), law(td_error, alpha, 1e-3), rtol=rtol, atol=1e-9)
    check_tree(ours.tree, alpha, 1e-3) if dtype is torch.float64 else None


def test_a_loaded_sampler_goes_on_and_one_of_a_larger_capacity_is_refused():
    rb = buffer(10, 10, alpha=0.6)
    rb.update_priority(torch.arange(10), torch.linspace(1, 9, 10))
    other = ProportionalSampler(10, eps=0.5)
    other.load_state_dict(rb.sampler.state_dict())
    assert (other.eps, other.default_priority) == (rb.sampler.eps, 9.0)
    other.update_priority(torch.tensor([3]), torch.tensor([4.0]))
    check_tree(other.tree, 0.6, 1e-8)


@both
def test_priorities_live_where_the_rows_live_and_not_in_torchrls_cpp_tree(cls, device):
    rb = ReplayBuffer(storage=PackedStorage(10, device=device), sampler=cls(10), batch_size=32)
    rb.extend(TensorDict({"x": torch.arange(10.0)}, [10]))
    batch = rb.sample()
    batch["td_error"] = torch.rand(32, device=device)
    rb.update_tensordict_priority(batch)
    assert rb.sampler.device.type == device.type
    assert isinstance(rb.sampler, PrioritizedSampler)  # TorchRL's buffers pass priorities to this class only
    assert not hasattr(rb.sampler, "_sum_tree")
    assert batch["priority_weight"].device.type == device.type
    assert rb.sampler.priority(batch["index"]).device.type == device.type
