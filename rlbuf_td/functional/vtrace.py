"""V-trace: returns of one policy from the actions of another."""

from __future__ import annotations

import torch
from torch import Tensor

from rlbuf_td.functional._layout import TimeLayout
from rlbuf_td.kernels import scan


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
    r"""V-trace advantages and value targets: :math:`\pi` evaluated on actions that :math:`\mu` took.

    .. math::
        \rho_t &= \min(\bar\rho, \pi/\mu), \quad c_t = \min(\bar c, \pi/\mu), \quad
        \delta_t = \rho_t (r_t + \gamma (1 - \mathrm{terminated}_t) V(s'_t) - V(s_t)) \\
        v_t &= V(s_t) + x_t, \qquad x_t = \delta_t + \gamma c_t (1 - \mathrm{done}_t) x_{t+1} \\
        A_t &= \rho_t (r_t + \gamma (1 - \mathrm{terminated}_t) v_{t+1} - V(s_t))

    where :math:`V(s'_t)` stands for :math:`v_{t+1}` at the end of a trajectory and at the last step.

    Args:
        gamma: discount, in [0, 1], or one per step.
        log_pi: log-probability of the action under the policy to evaluate, ``[*batch, T, *F]``.
        log_mu: log-probability of the action under the policy that took it.
        state_value: :math:`V(s_t)`, same shape, floating.
        next_state_value: :math:`V(s'_t)`, same shape.
        reward: :math:`r_t`, same shape.
        done: bool, same shape: the trajectory ends with this step.
        terminated: bool, same shape: the episode ends with this step. Default: ``done``.
        rho_thresh: :math:`\bar\rho \ge 0`, clips the ratios that weigh the TD errors.
        c_thresh: :math:`\bar c \ge 0`, clips the ratios that carry the trace.
        time_dim: the dimension of time.

    Returns:
        ``(advantage, value_target)`` in the inputs' shape and the values' dtype.

    Raises:
        ValueError: see the module; also a negative threshold (of tensors, values are not checked).
        TypeError: see the module.

    Cost: one pass over the data.

    Source: Espeholt et al., 2018, "IMPALA", section 4.1. Same result as TorchRL's ``vtrace_advantage_estimate`` (which
    names the two policies the other way round, and whose ``time_dim`` other than -2 works on transposed inputs only).

    Example:
        >>> one, zero = torch.ones(2, 1), torch.zeros(2, 1)
        >>> done = torch.tensor([[False], [True]])
        >>> advantage, value_target = vtrace_advantage_estimate(0.5, zero, zero, zero, one, one, done)
        >>> value_target.flatten().tolist()
        [2.0, 1.0]
    """
    values = {"state_value": state_value, "next_state_value": next_state_value, "log_pi": log_pi, "log_mu": log_mu}
    layout, columns = TimeLayout.of("vtrace_advantage_estimate", time_dim, values, reward, done, terminated)
    value, next_value, log_pi, log_mu, reward, done, terminated = columns
    g = layout.coefficient("gamma", gamma)
    bootstrap = next_value.masked_fill(terminated, 0)
    ratio = (log_pi - log_mu).exp()
    rho = ratio.clamp_max(_threshold("rho_thresh", rho_thresh, ratio))
    trace = (g * ratio.clamp_max(_threshold("c_thresh", c_thresh, ratio))).masked_fill(done, 0)
    target = value + scan.reverse_scan(rho * (reward + g * bootstrap - value), trace)
    following = torch.cat([target[:, 1:], bootstrap[:, -1:]], dim=1).masked_fill(terminated, 0)
    following = torch.where(done, bootstrap, following)
    advantage = rho * (reward + g * following - value)
    return layout.restore(advantage), layout.restore(target)


def _threshold(name: str, value: float | Tensor, like: Tensor) -> float | Tensor:
    if isinstance(value, Tensor):
        return value.to(like)
    if not value >= 0:
        raise ValueError(f"vtrace_advantage_estimate: {name} must be at least 0, got {value}.")
    return value
