"""The reverse scans: plain loop, doubling form and numba's loops in lockstep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlbuf_td.kernels import scan


def reverse_scan_loop(a: Tensor, b: Tensor) -> Tensor:
    """``x[t] = a[t] + b[t] * x[t + 1]``, written as it reads. O(T) operations on
    ``[L, F]`` slices."""
    x = torch.empty_like(a)
    later = torch.zeros_like(a[:, 0])
    for t in reversed(range(a.shape[1])):
        later = torch.where(b[:, t] == 0, a[:, t], a[:, t] + b[:, t] * later)
        x[:, t] = later
    return x


def random_inputs(
    shape: tuple[int, int, int], dtype: torch.dtype, p: float, seed: int
) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    value, next_value, reward = (
        torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(3)
    )
    done = torch.rand(shape, generator=g) < p
    terminated = done & (torch.rand(shape, generator=g) < 0.5)
    return value, next_value, reward, done, terminated


@given(
    lanes=st.integers(1, 10),
    steps=st.integers(1, 40),
    features=st.integers(1, 5),
    p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lmbda=st.sampled_from([0.0, 0.95, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_gae_equals_the_plain_loop(lanes, steps, features, p, gamma, lmbda, seed):
    tensors = random_inputs((lanes, steps, features), torch.float64, p, seed)
    delta, decay = scan.gae_terms(gamma, lmbda, tensors)
    expected = reverse_scan_loop(delta, decay)
    advantage, target = scan.gae(gamma, lmbda, tensors)
    torch.testing.assert_close(advantage, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(target, expected + tensors[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "form", [reverse_scan_loop, scan.reverse_scan_doubling, scan.reverse_scan]
)
def test_nothing_crosses_a_zero_coefficient_not_even_nan(form):
    a = torch.tensor([1.0, 2.0, torch.nan, 4.0, torch.inf]).reshape(1, 5, 1)
    b = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.5]).reshape(1, 5, 1)
    x = form(a, b).flatten()
    assert x[:2].tolist() == [2.0, 2.0]
    assert x[2].isnan()
    assert x[3:].tolist() == [4.0, torch.inf]
