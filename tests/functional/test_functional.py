"""Estimates against sums written from their definitions, against TorchRL's, and by
their identities."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.objectives.value.functional as torchrl_functional
from torch import Tensor

from rlbuf_td import functional as F
from rlbuf_td.kernels import scan
from tests import model
from tests.statistics import assert_follows, power

COEFFICIENTS = ((0.0, 0.5), (0.99, 0.95), (1.0, 1.0))
LENGTHS = (1, 2, 16)
PATTERNS = ("none", "terminated", "truncated", "mixed", "last", "always")


def case(
    shape: tuple[int, ...],
    pattern: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    time: int = 1,
) -> dict[str, Any]:
    """Random ``[E, T, F]`` inputs with a pattern of ends."""
    g = torch.Generator().manual_seed(seed)
    names = ("state_value", "next_state_value", "reward")
    numbers = {
        name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
        for name in names
    }
    ends = torch.rand(shape, generator=g) < (0.1 if shape[time] > 5 else 0.5)
    coin = torch.rand(shape, generator=g) < 0.5
    no = torch.zeros(shape, dtype=torch.bool)
    last = no.clone()
    last.select(time, -1).fill_(True)
    done = {"none": no, "last": last, "always": ~no}.get(pattern, ends)
    terminated = (
        done
        if pattern == "terminated"
        else no
        if pattern == "truncated"
        else done & coin
    )
    return numbers | {"done": done, "terminated": terminated}


def without_value(c: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in c.items() if k != "state_value"}


def gae_by_hand(c: dict[str, Tensor], gamma: float, lmbda: float) -> Tensor:
    steps = [c[name] for name in ("state_value", "next_state_value", "reward")]
    steps += [c["terminated"], ~c["done"]]
    out = torch.zeros_like(c["reward"])
    for e, f in product(range(len(out)), range(out.shape[2])):
        columns = [column[e, :, f].tolist() for column in steps]
        advantage = model.gae(*columns, gamma=gamma, lmbda=lmbda)
        out[e, :, f] = torch.tensor(advantage, dtype=out.dtype)
    return out


def lambda_return_by_hand(c: dict[str, Tensor], gamma: float, lmbda: float) -> Tensor:
    """Return the lambda returns (Sutton and Barto, 2018, equation 12.18)."""
    steps = c["reward"].shape[1]
    out = torch.zeros_like(c["reward"])
    for e, t, f in product(
        range(len(out)), reversed(range(steps)), range(out.shape[2])
    ):
        at = e, t, f
        bootstrap = 0.0 if c["terminated"][at] else float(c["next_state_value"][at])
        if not c["done"][at] and t < steps - 1:
            bootstrap = (1 - lmbda) * bootstrap + lmbda * float(out[e, t + 1, f])
        out[at] = c["reward"][at] + gamma * bootstrap
    return out


@pytest.mark.parametrize(("gamma", "lmbda"), COEFFICIENTS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("steps", LENGTHS)
def test_estimates_equal_the_sums_of_their_definitions(
    steps, pattern, gamma, lmbda, device
):
    c = case((2, steps, 2), pattern, seed=steps)
    tol: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
    advantage, target = F.generalized_advantage_estimate(gamma, lmbda, **c)
    expected = gae_by_hand(c, gamma, lmbda)
    torch.testing.assert_close(advantage, expected, **tol)
    torch.testing.assert_close(target, expected + c["state_value"], **tol)
    c = without_value(c)
    for weight in (lmbda, 1.0):
        expected = lambda_return_by_hand(c, gamma, weight)
        torch.testing.assert_close(
            F.td_lambda_return_estimate(gamma, weight, **c), expected, **tol
        )
    torch.testing.assert_close(F.td1_return_estimate(gamma, **c), expected, **tol)


@pytest.mark.parametrize("is_per_step", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, 20, 1), torch.float32),
        ((20, 1), torch.float64),
        ((2, 3, 20, 2), torch.float64),
    ],
    ids=str,
)
def test_results_are_torchrls(shape, dtype, pattern, is_per_step):
    c = case(shape, pattern, dtype, time=len(shape) - 2)
    gamma, lmbda = torch.rand(2, *shape, dtype=dtype) if is_per_step else (0.9, 0.8)
    # TorchRL multiplies gamma with an integer mask, which rounds it to float32 whatever
    # the inputs' dtype.
    tol = 1e-4 if dtype == torch.float32 else 1e-6
    no_value = without_value(c)
    calls = [
        ("generalized_advantage_estimate", (gamma, lmbda), c),
        ("td_lambda_return_estimate", (gamma, lmbda), no_value),
        ("td1_return_estimate", (gamma,), no_value),
    ]
    if not is_per_step:
        logs = {"log_pi": 0.3 * c["reward"], "log_mu": 0.3 * c["state_value"]}
        calls.append(("vtrace_advantage_estimate", (gamma,), c | logs))
    for name, args, inputs in calls:
        actual = getattr(F, name)(*args, **inputs)
        expected = getattr(torchrl_functional, name)(*args, **inputs)
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(
            actual, expected, rtol=10 * tol, atol=tol, msg=message
        )


def test_coefficients_may_be_tensors_of_one_number():
    c = case((3, 12, 2), "mixed")
    half = torch.tensor(0.5)
    expected = F.generalized_advantage_estimate(0.5, 0.5, **c)
    for gamma in (half, half[None]):
        advantage = F.generalized_advantage_estimate(gamma, half, **c)
        torch.testing.assert_close(advantage, expected)


FUNCTIONS = {
    "gae": lambda c, **kw: F.generalized_advantage_estimate(0.9, 0.8, **c, **kw),
    "td_lambda": lambda c, **kw: F.td_lambda_return_estimate(
        0.9, 0.8, **without_value(c), **kw
    ),
    "td1": lambda c, **kw: F.td1_return_estimate(0.9, **without_value(c), **kw),
    "vtrace": lambda c, **kw: F.vtrace_advantage_estimate(
        0.9, 0.1 * c["reward"], -0.1 * c["reward"], **c, **kw
    ),
}


@pytest.fixture(params=list(FUNCTIONS.values()), ids=list(FUNCTIONS))
def function(request: pytest.FixtureRequest):
    return request.param


def outputs(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("time_dim", [0, 2, -1])
def test_time_may_lie_anywhere(function, time_dim):
    c = case((3, 10, 2), "mixed")
    expected = outputs(function(c))
    moved = {k: v.movedim(1, time_dim).contiguous() for k, v in c.items()}
    views = {k: v.movedim(1, time_dim) for k, v in c.items()}
    for inputs in (moved, views):
        for actual, want in zip(
            outputs(function(inputs, time_dim=time_dim)), expected, strict=True
        ):
            torch.testing.assert_close(actual, want.movedim(1, time_dim))
    flat = {k: v[0, :, 0] for k, v in c.items()}  # one lane without batch or features
    for actual, want in zip(
        outputs(function(flat, time_dim=-1)), expected, strict=True
    ):
        torch.testing.assert_close(actual, want[0, :, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_dtypes_come_back_and_are_accumulated_wide(function, dtype):
    c = case((2, 200, 1), "mixed", dtype)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in c.items()}
    for actual, want in zip(outputs(function(c)), outputs(function(wide)), strict=True):
        assert actual.dtype == dtype
        # One rounding to the narrow dtype at the end, none on the way.
        absolute = 1e-5 if dtype is torch.float32 else 2e-3
        torch.testing.assert_close(
            actual.double(), want, rtol=torch.finfo(dtype).eps * 4, atol=absolute
        )


def test_rewards_may_be_integers_and_done_may_stand_for_terminated(function):
    c = case((2, 9, 1), "terminated")
    c["reward"] = (3 * c["reward"]).round()
    expected = outputs(function(c))
    c["reward"] = c["reward"].to(torch.int64)
    if "vtrace_advantage_estimate" not in function.__code__.co_names:
        del c["terminated"]
    for actual, want in zip(outputs(function(c)), expected, strict=True):
        torch.testing.assert_close(actual, want)


def test_results_carry_no_gradient_and_inputs_stay_as_they_were(function):
    c = case((2, 9, 1), "mixed")
    torch.testing.assert_close(
        torch.compile(function, fullgraph=True, backend="eager")(c), function(c)
    )
    before = {k: v.clone() for k, v in c.items()}
    c["reward"].requires_grad_()
    c["next_state_value"].requires_grad_()
    for x in outputs(function(c)):
        assert not x.requires_grad
        x.zero_()
    for k, v in c.items():
        assert torch.equal(v, before[k])


@pytest.mark.parametrize("time_dim", [-2, 1])
def test_lazily_negated_inputs_are_negated(function, time_dim):
    c = case((2, 9, 1), "mixed")
    expected = outputs(function(c, time_dim=time_dim))
    lazy = {
        k: torch._neg_view(-v) if v.is_floating_point() else v for k, v in c.items()
    }
    for actual, want in zip(
        outputs(function(lazy, time_dim=time_dim)), expected, strict=True
    ):
        assert torch.equal(actual, want)


def test_nan_behind_an_end_does_no_harm(function):
    c = case((1, 6, 1), "none")
    c["done"][0, 2] = c["terminated"][0, 2] = True
    expected = [x.clone() for x in outputs(function(c))]
    c["next_state_value"][0, 2] = torch.nan
    c["reward"][0, 4] = torch.nan
    for actual, want in zip(outputs(function(c)), expected, strict=True):
        torch.testing.assert_close(actual[:, :3], want[:, :3])
        assert actual[0, 3].isnan()


def test_explained_variance_of_perfect_constant_and_opposite_predictions():
    target = torch.tensor([[1.0], [2.0], [3.0]])
    assert F.explained_variance(target, target).item() == 1
    assert F.explained_variance(target + 5, target).item() == 1
    assert F.explained_variance(torch.zeros(3, 1), target).item() == 0
    assert F.explained_variance(-target, target).item() == -3
    assert F.explained_variance(target, torch.ones(3, 1)).isnan()
    assert (
        F.explained_variance(target.bfloat16(), target.bfloat16()).dtype
        == torch.float32
    )


def test_normalize_gives_mean_0_and_deviation_1_and_survives_constants():
    x = 5 + 3 * torch.randn(4, 50, 1, generator=torch.Generator().manual_seed(0))
    y = F.normalize(x)
    assert y.shape == x.shape
    torch.testing.assert_close(y.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.std(correction=0), torch.tensor(1.0))
    assert F.normalize(torch.full((3,), 7.0)).tolist() == [0, 0, 0]
    assert F.normalize(torch.tensor([2.0])).tolist() == [0]
    assert F.normalize(x.bfloat16()).dtype == torch.bfloat16


def test_normalize_takes_its_statistics_from_unmasked_values_only():
    x, mask = torch.randn(5, 4, 2), torch.rand(5, 4) < 0.6
    assert 1 < mask.sum() < 20
    y = F.normalize(x, mask=mask)
    torch.testing.assert_close(y[mask], F.normalize(x[mask]))
    std, mean = torch.std_mean(x[mask], correction=0)
    torch.testing.assert_close(y, (x - mean) / std)
    x[~mask] = torch.nan
    torch.testing.assert_close(F.normalize(x, mask=mask)[mask], y[mask])
    torch.testing.assert_close(
        F.normalize(x[mask], mask=torch.ones(len(x[mask])).bool()), y[mask]
    )
    assert F.normalize(x, mask=mask & False).isnan().all()


def test_returns_to_go_equal_their_definition():
    generator = torch.Generator().manual_seed(0)
    shape = lanes, steps, features = 4, 9, 2
    reward = torch.randn(shape, dtype=torch.float64, generator=generator)
    done = torch.rand(shape, generator=generator) < 0.2
    padded = torch.arange(steps) < torch.tensor([9, 5, 1, 0])[:, None]
    gaps = torch.rand(lanes, steps, generator=generator) < 0.7
    for mask in (None, padded, padded[..., None].expand(shape), gaps):
        counts = torch.ones(shape) if mask is None else mask.view(lanes, steps, -1)
        counts = counts.expand(shape).double()
        wanted = torch.zeros(lanes, steps + 1, features, dtype=torch.float64)
        for t in reversed(range(steps)):
            later = wanted[:, t + 1].masked_fill(done[:, t], 0)
            wanted[:, t] = reward[:, t] * counts[:, t] + 0.9 * later
        returns = F.reward2go(reward, done, 0.9, mask=mask)
        torch.testing.assert_close(returns, wanted[:, :-1] * counts, rtol=0, atol=1e-12)
    poisoned = reward.masked_fill(~padded[..., None], float("nan"))
    found = F.reward2go(poisoned, done, 0.9, mask=padded)
    assert torch.equal(found, F.reward2go(reward, done, 0.9, mask=padded))


# -- random shifts of images: those of DrQ-v2, each equally likely


@pytest.mark.parametrize(
    ("lead", "dtype"), [((), torch.uint8), ((6,), torch.float32), ((2, 3), torch.uint8)]
)
def test_each_image_is_a_crop_of_itself_padded(lead, dtype):
    images = torch.randint(256, (*lead, 2, 9, 7)).to(dtype)
    shifted = F.random_shift(images, 3)
    assert (shifted.shape, shifted.dtype, shifted.device) == (
        images.shape,
        dtype,
        images.device,
    )
    for image, result in zip(
        images.reshape(-1, 2, 9, 7), shifted.reshape(-1, 2, 9, 7), strict=True
    ):
        padded = torch.nn.functional.pad(
            image.float()[None], (3, 3, 3, 3), mode="replicate"
        )[0].to(dtype)
        crops = [padded[:, y : y + 9, x : x + 7] for y in range(7) for x in range(7)]
        assert any(torch.equal(result, crop) for crop in crops)


def test_all_shifts_are_equally_likely():
    images = (torch.arange(25) + 25).view(1, 1, 5, 5).expand(100_000, 1, 5, 5)
    centre = F.random_shift(images, 2)[:, 0, 2, 2] - 25
    law = np.full(25, 1 / 25)
    assert power(law, 100_000, bias=0.05) > 0.99
    assert_follows(centre.bincount(minlength=25), law)


def test_a_generator_fixes_the_shifts_and_nothing_is_changed_in_place():
    images = torch.rand(50, 1, 8, 8)
    before = images.clone()
    one, other = (
        F.random_shift(images, generator=torch.Generator().manual_seed(1))
        for _ in range(2)
    )
    assert torch.equal(one, other)
    assert not torch.equal(one, images)
    assert torch.equal(images, before)


@pytest.mark.parametrize("form", [scan.reverse_scan_doubling, scan.reverse_scan])
def test_nothing_crosses_a_zero_coefficient_not_even_nan(form):
    a = torch.tensor([1.0, 2.0, torch.nan, 4.0, torch.inf]).reshape(1, 5, 1)
    b = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.5]).reshape(1, 5, 1)
    x = form(a, b).flatten()
    assert x[:2].tolist() == [2.0, 2.0]
    assert x[2].isnan()
    assert x[3:].tolist() == [4.0, torch.inf]
