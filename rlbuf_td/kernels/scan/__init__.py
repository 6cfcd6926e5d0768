"""Computes advantages and returns for :mod:`rlbuf_td.functional` by a linear
recurrence, backwards in time.

The recurrence is ``x[t] = a[t] + b[t] * x[t + 1]`` with ``x[T] = 0``. Where ``b[t]`` is
0, at the end of a trajectory, ``x[t + 1]`` is ignored, even if it is NaN or infinite.
All tensors are ``[L, T, F]``: L lanes, T time steps, F features; none is lazily
negated. On the CPU, numba computes the recurrence; on other devices, and under
``torch.compile``, torch operations do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, loop
from rlbuf_td.kernels.host_memory import addresses_of

#: State value, next state value, reward, done and terminated.
Columns: TypeAlias = Sequence[Tensor]
_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def reverse_scan_doubling(a: Tensor, b: Tensor) -> Tensor:
    """Implement :func:`reverse_scan` in ``ceil(log2 T)`` rounds of torch operations
    (Hillis and Steele, 1986)."""
    steps = a.shape[1]
    x = a
    carry = b.expand_as(a)
    reach = 1
    while reach < steps:
        near = x[:, :-reach]
        far = x[:, reach:]
        here = carry[:, :-reach]
        there = carry[:, reach:]
        cut = here == 0
        x = torch.cat([torch.where(cut, near, near + here * far), x[:, -reach:]], dim=1)
        # The last `reach` steps already include all later steps, so they carry nothing.
        carry = torch.cat(
            [torch.where(cut, 0, here * there), torch.zeros_like(carry[:, -reach:])],
            dim=1,
        )
        reach *= 2
    return x.clone() if x is a else x


def gae_terms(
    gamma: float | Tensor, lmbda: float | Tensor, columns: Columns
) -> tuple[Tensor, Tensor]:
    """Return the TD errors of GAE, and the coefficients
    ``gamma * lmbda * (1 - done[t])`` of its recurrence."""
    state_value, next_state_value, reward, done, terminated = columns
    delta = reward + gamma * next_state_value.masked_fill(terminated, 0) - state_value
    return delta, spread(gamma * lmbda, delta).masked_fill(done, 0)


def spread(x: float | Tensor, like: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        x = torch.full((), x, dtype=like.dtype, device=like.device)
    return x.expand_as(like)


def gae(
    gamma: float | Tensor, lmbda: float | Tensor, columns: Columns
) -> tuple[Tensor, Tensor]:
    """Return GAE advantages and value targets; done and terminated are bool, the other
    columns are floating point."""
    if (
        isinstance(gamma, Tensor)
        or isinstance(lmbda, Tensor)
        or not _is_for_numba(*columns)
    ):
        delta, decay = gae_terms(gamma, lmbda, columns)
        advantage = reverse_scan(delta, decay)
        return advantage, advantage + columns[0]
    inputs = [x.contiguous() for x in columns]
    advantage = torch.empty_like(inputs[0])
    target = torch.empty_like(inputs[0])
    rollout = (
        gamma,
        gamma * lmbda,
        *addresses_of((*inputs, advantage, target)),
        *advantage.shape,
    )
    dtype = _DTYPES[advantage.dtype]
    loop("scan.cpu", "gae", dtype=dtype)(rollout, dtype)
    return advantage, target


def reverse_scan(a: Tensor, b: Tensor) -> Tensor:
    """Return ``x`` with ``x[t] = a[t] + b[t] * x[t + 1]`` in dim 1 of ``[L, T, F]``
    tensors of one floating dtype."""
    if not _is_for_numba(a, b):
        return reverse_scan_doubling(a, b)
    b = b.expand_as(a).contiguous()
    a = a.contiguous()
    x = torch.empty_like(a)
    dtype = _DTYPES[a.dtype]
    loop("scan.cpu", "scan", dtype=dtype)(*addresses_of((a, b, x)), *a.shape, dtype)
    return x


def _is_for_numba(*tensors: Tensor) -> bool:
    return tensors[0].dtype in _DTYPES and all(
        backend_of(x) == "numba" for x in tensors
    )
