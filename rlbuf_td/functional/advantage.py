"""The generalized advantage estimate."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from rlbuf_td.functional._layout import TimeLayout
from rlbuf_td.kernels import scan


def generalized_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    r"""Generalized advantage estimate of trajectories, and the value targets that go with it.

    .. math::
        \delta_t &= r_t + \gamma (1 - \mathrm{terminated}_t) V(s'_t) - V(s_t) \\
        A_t &= \delta_t + \gamma \lambda (1 - \mathrm{done}_t) A_{t+1}, \qquad R_t = A_t + V(s_t)

    Args:
        gamma: discount, in [0, 1], or one per step.
        lmbda: decay of the trace, in [0, 1], or one per step.
        state_value: :math:`V(s_t)`, ``[*batch, T, *F]``, floating.
        next_state_value: :math:`V(s'_t)`, the value of the true next observation (not of the one after a reset).
        reward: :math:`r_t`, same shape, any real dtype.
        done: bool, same shape: the trajectory ends with this step.
        terminated: bool, same shape: the episode ends with this step. Default: ``done``.
        time_dim: the dimension of time.

    Returns:
        ``(advantage, value_target)`` in the inputs' shape and the values' dtype.

    Raises:
        ValueError, TypeError: see the module.

    Cost: one pass over the data; about 5 µs plus 1 ns per element on a CPU.

    Source: Schulman et al., 2016, "High-dimensional continuous control using generalized advantage estimation", eq. 16.
    Takes the place of TorchRL's ``generalized_advantage_estimate`` and ``vec_generalized_advantage_estimate``; unlike
    theirs it carries no gradient, cuts the series off nowhere, and does not round gamma to float32.

    Example:
        >>> reward = torch.ones(1, 3, 1)
        >>> value = torch.zeros(1, 3, 1)
        >>> done = torch.tensor([[[False], [False], [True]]])
        >>> advantage, value_target = generalized_advantage_estimate(0.5, 1.0, value, value, reward, done)
        >>> value_target.flatten().tolist()
        [1.75, 1.5, 1.0]
    """
    if terminated is None:
        terminated = done
    sizes = _plain_sizes(state_value, next_state_value, reward, done, terminated, time_dim)
    in_range = type(gamma) is float and type(lmbda) is float and 0.0 <= gamma <= 1.0 and 0.0 <= lmbda <= 1.0
    if sizes is not None and in_range:
        out = scan.gae_contiguous(gamma, lmbda, state_value, next_state_value, reward, done, terminated, *sizes)
        if out is not None:
            return out
    values = {"state_value": state_value, "next_state_value": next_state_value}
    layout, columns = TimeLayout.of("generalized_advantage_estimate", time_dim, values, reward, done, terminated)
    advantage, target = scan.gae(layout.coefficient("gamma", gamma), layout.coefficient("lmbda", lmbda), *columns)
    return layout.restore(advantage), layout.restore(target)


def _plain_sizes(
    value: Tensor, next_value: Tensor, reward: Tensor, done: Tensor, terminated: Tensor, time_dim: int
) -> tuple[int, int, int] | None:
    """Return ``(L, T, F)`` if the CPU kernel can take the tensors as they are, else ``None``; never raises.

    A fast form of the checks in :class:`TimeLayout`, since overhead dominates short rollouts.
    """
    try:
        dtype, shape = value.dtype, value.shape
        for x in (next_value, reward, done) if terminated is done else (next_value, reward, done, terminated):
            if not (x.is_cpu and x.is_contiguous() and x.shape == shape):
                return None
        is_alike = next_value.dtype is reward.dtype is dtype and done.dtype is terminated.dtype is torch.bool
        is_plain = value.is_contiguous() and value.is_cpu and (dtype is torch.float32 or dtype is torch.float64)
        if is_alike and is_plain and (count := value.numel()):
            steps = shape[time_dim]
            features = shape[-1] if time_dim == -2 else prod(shape[time_dim % len(shape) + 1 :])
            return count // (steps * features), steps, features
    except (AttributeError, IndexError, TypeError):
        pass
    return None
