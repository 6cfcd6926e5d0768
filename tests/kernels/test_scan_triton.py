"""The GPU's twins of the reverse scans in lockstep with the plain loop: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from rlbuf_td import functional
from rlbuf_td.kernels import scan
from rlbuf_td.kernels.dispatch import forced
from tests.kernels.test_scan import random_inputs

#: Both forms, both layouts of a tile, ragged tiles, and horizons of several of them.
SHAPES = [(1, 1, 1), (3, 5, 1), (9, 32, 1), (2, 150, 1), (1, 12, 40), (1, 33, 6), (2, 20, 35), (1, 70, 9)]


@pytest.fixture(autouse=True)
def small_tiles(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a horizon of a hundred steps take several tiles."""
    monkeypatch.setattr("rlbuf_td.kernels.scan.cuda._TILE", 64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_gae_agrees_with_the_plain_loop(gpu, shape, p):
    tensors = random_inputs(shape, torch.float32, p, seed=0)
    with forced("triton"):
        advantage, target = scan.gae(0.97, 0.9, *(x.to(gpu) for x in tensors))
    delta, decay = scan.gae_terms(0.97, 0.9, *tensors)
    expected = scan.reverse_scan_loop(delta, decay)
    torch.testing.assert_close(advantage.cpu(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.cpu(), expected + tensors[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_scan_agrees_with_the_plain_loop(gpu, shape, dtype):
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(shape, dtype=dtype, generator=generator), torch.rand(shape, dtype=dtype, generator=generator)
    b[torch.rand(shape, generator=generator) < 0.1] = 0
    with forced("triton"):
        x = scan.reverse_scan(a.to(gpu), b.to(gpu)).cpu()
    rtol = 1e-12 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(x, scan.reverse_scan_loop(a, b), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("shape", [(1, 5, 1), (1, 5, 33)])
def test_nothing_crosses_a_zero_coefficient_not_even_nan(gpu, shape):
    a = torch.tensor([1.0, 2.0, torch.nan, 4.0, torch.inf]).reshape(1, 5, 1).expand(shape).contiguous()
    b = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.5]).reshape(1, 5, 1).expand(shape).contiguous()
    with forced("triton"):
        x = scan.reverse_scan(a.to(gpu), b.to(gpu)).cpu()[0, :, 0]
    assert x[:2].tolist() == [2.0, 2.0]
    assert x[2].isnan()
    assert x[3:].tolist() == [4.0, torch.inf]


def test_values_behind_a_terminal_step_are_not_read(gpu):
    value, next_value, reward, done, terminated = random_inputs((3, 20, 1), torch.float32, 0.3, seed=5)
    next_value[terminated] = torch.nan
    tensors = value, next_value, reward, done, terminated
    with forced("triton"):
        advantage, _ = scan.gae(0.9, 0.8, *(x.to(gpu) for x in tensors))
    expected, _ = scan.gae(0.9, 0.8, *tensors)
    torch.testing.assert_close(advantage.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_every_estimate_of_functional_runs_on_it(gpu):
    value, next_value, reward, done, terminated = random_inputs((2, 50, 1), torch.float32, 0.1, seed=2)
    log_ratio = torch.randn(value.shape, generator=torch.Generator().manual_seed(3)) / 10
    estimates = [
        lambda v, n, r, d, t, _: functional.td_lambda_return_estimate(0.9, 0.8, n, r, d, t),
        lambda v, n, r, d, t, _: functional.td1_return_estimate(0.9, n, r, d, t),
        lambda v, n, r, d, t, ratio: functional.vtrace_advantage_estimate(
            0.9, ratio, torch.zeros_like(ratio), v, n, r, d, t
        )[0],
        lambda v, n, r, d, t, _: functional.generalized_advantage_estimate(torch.full_like(v, 0.9), 0.8, v, n, r, d, t)[
            0
        ],
    ]
    given = value, next_value, reward, done, terminated, log_ratio
    for estimate in estimates:
        expected = estimate(*given)
        with forced("triton"):
            got = estimate(*(x.to(gpu) for x in given))
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)
