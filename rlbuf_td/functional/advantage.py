"""Advantages: the generalized advantage estimate (GAE), and V-trace for off-policy
actions."""

from __future__ import annotations

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
    r"""Generalized advantage estimates (GAE), and the corresponding value targets.

    .. math::
        \delta_t &= r_t + \gamma (1 - \mathrm{terminated}_t) V(s'_t) - V(s_t) \\
        A_t &= \delta_t + \gamma \lambda (1 - \mathrm{done}_t) A_{t+1}, \qquad R_t = A_t + V(s_t)

    Args:
        gamma: discount factor in [0, 1]: a float, or a tensor that broadcasts to the
            inputs' shape.
        lmbda: the decay :math:`\lambda` in [0, 1]: a float, or a tensor that broadcasts
            to the inputs' shape.
        state_value: :math:`V(s_t)`, ``[*batch, T, *F]``, floating.
        next_state_value: :math:`V(s'_t)`, same shape: the value of the next observation
            before any reset.
        reward: :math:`r_t`, same shape, any real dtype.
        done: bool, same shape: whether the trajectory ends with this step.
        terminated: bool, same shape: whether the next state is terminal (its value is
            then ignored). Default: ``done``.
        time_dim: the dimension of time.

    Returns:
        ``(advantage, value_target)``, both with the shape of the inputs and the dtype
        of the values.

    Raises:
        ValueError, TypeError: the inputs are invalid; see :mod:`rlbuf_td.functional`.

    Cost: one pass over the data.
    Source: Schulman et al., 2016, equation 16: "High-dimensional continuous control
    using generalized advantage estimation". Unlike in TorchRL's
    ``generalized_advantage_estimate``, results have no gradient, and gamma is not
    rounded to float32. TorchRL's ``vec_generalized_advantage_estimate`` also drops
    powers of ``gamma * lmbda`` below 1e-7.

    Example:
        >>> reward = torch.ones(1, 3, 1)
        >>> value = torch.zeros(1, 3, 1)
        >>> done = torch.tensor([[[False], [False], [True]]])
        >>> advantage, value_target = generalized_advantage_estimate(0.5, 1.0, value, value, reward, done)
        >>> value_target.flatten().tolist()
        [1.75, 1.5, 1.0]
    """
    values = {"state_value": state_value, "next_state_value": next_state_value}
    layout, columns = TimeLayout.of(
        "generalized_advantage_estimate", time_dim, values, reward, done, terminated
    )
    advantage, target = scan.gae(
        layout.coefficient("gamma", gamma), layout.coefficient("lmbda", lmbda), columns
    )
    return layout.restore(advantage), layout.restore(target)


def vtrace_advantage_estimate(
    gamma: float | Tensor,
    log_pi: Tensor,
    log_mu: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rho_thresh: float | Tensor = 1.0,
    c_thresh: float | Tensor = 1.0,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    r"""V-trace advantages and value targets of a policy :math:`\pi`, for actions that a
    policy :math:`\mu` took.

    .. math::
        \rho_t &= \min(\bar\rho, \pi/\mu), \quad c_t = \min(\bar c, \pi/\mu), \quad
        \delta_t = \rho_t (r_t + \gamma (1 - \mathrm{terminated}_t) V(s'_t) - V(s_t)) \\
        v_t &= V(s_t) + x_t, \qquad x_t = \delta_t + \gamma c_t (1 - \mathrm{done}_t) x_{t+1} \\
        A_t &= \rho_t (r_t + \gamma (1 - \mathrm{terminated}_t) v_{t+1} - V(s_t))

    At the end of a trajectory and at the last step, :math:`V(s'_t)` replaces
    :math:`v_{t+1}`.

    Args:
        gamma: discount factor in [0, 1]: a float, or a tensor that broadcasts to the
            inputs' shape.
        log_pi: log-probability of the action under the policy :math:`\pi`,
            ``[*batch, T, *F]``, floating.
        log_mu: log-probability of the action under the policy :math:`\mu`, same shape.
        state_value: :math:`V(s_t)`, same shape, floating.
        next_state_value: :math:`V(s'_t)`, same shape: the value of the next observation
            before any reset.
        reward: :math:`r_t`, same shape, any real dtype.
        done: bool, same shape: whether the trajectory ends with this step.
        terminated: bool, same shape: whether the next state is terminal (its value is
            then ignored). Default: ``done``.
        rho_thresh: :math:`\bar\rho \ge 0`, the upper bound of :math:`\rho_t`, a float
            or a tensor.
        c_thresh: :math:`\bar c \ge 0`, the upper bound of :math:`c_t`, a float or a
            tensor.
        time_dim: the dimension of time.

    Returns:
        ``(advantage, value_target)``, both with the shape of the inputs and the dtype
        of the values.

    Raises:
        ValueError, TypeError: the inputs are invalid (see :mod:`rlbuf_td.functional`),
            or a threshold is negative.

    Cost: O(elements) on the CPU.
    Source: Espeholt et al., 2018, "IMPALA", section 4.1. TorchRL's
    ``vtrace_advantage_estimate`` gives the same result. TorchRL's documentation swaps
    the two policies, and TorchRL takes ``time_dim`` only as a keyword argument.

    Example:
        >>> one, zero = torch.ones(2, 1), torch.zeros(2, 1)
        >>> done = torch.tensor([[False], [True]])
        >>> advantage, value_target = vtrace_advantage_estimate(0.5, zero, zero, zero, one, one, done)
        >>> value_target.flatten().tolist()
        [2.0, 1.0]
    """
    values = {
        "state_value": state_value,
        "next_state_value": next_state_value,
        "log_pi": log_pi,
        "log_mu": log_mu,
    }
    layout, columns = TimeLayout.of(
        "vtrace_advantage_estimate", time_dim, values, reward, done, terminated
    )
    value, next_value, log_pi, log_mu, reward, done, terminated = columns
    g = layout.coefficient("gamma", gamma)
    bootstrap = next_value.masked_fill(terminated, 0)
    ratio = (log_pi - log_mu).exp()
    rho = ratio.clamp_max(_threshold("rho_thresh", rho_thresh, ratio))
    trace = (g * ratio.clamp_max(_threshold("c_thresh", c_thresh, ratio))).masked_fill(
        done, 0
    )
    target = value + scan.reverse_scan(rho * (reward + g * bootstrap - value), trace)
    following = torch.cat([target[:, 1:], bootstrap[:, -1:]], dim=1).masked_fill(
        terminated, 0
    )
    following = torch.where(done, bootstrap, following)
    advantage = rho * (reward + g * following - value)
    return layout.restore(advantage), layout.restore(target)


def _threshold(name: str, value: float | Tensor, like: Tensor) -> float | Tensor:
    """Return a clipping threshold of V-trace; ValueError if it is negative."""
    if isinstance(value, Tensor):
        return value.to(like)
    if not value >= 0:
        raise ValueError(
            f"vtrace_advantage_estimate: {name} must be at least 0, got {value}."
        )
    return value
