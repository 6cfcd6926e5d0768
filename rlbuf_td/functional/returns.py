"""The TD(lambda) return and the TD(1) return."""

from __future__ import annotations

import torch
from torch import Tensor

from rlbuf_td.functional._layout import TimeLayout
from rlbuf_td.kernels import scan


def td_lambda_return_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    r"""TD(:math:`\lambda`) return: the weighted mean of n-step returns, with weights
    :math:`(1-\lambda)\lambda^{n-1}`.

    .. math::
        G_t = r_t + \gamma \left[ (1 - \lambda) \bar V(s'_t) + \lambda G_{t+1} \right], \qquad
        \bar V(s'_t) = (1 - \mathrm{terminated}_t) V(s'_t)

    At the end of a trajectory and at the last step, :math:`\bar V(s'_t)` replaces
    :math:`G_{t+1}`.

    Args:
        gamma: discount factor in [0, 1]: a float, or a tensor that broadcasts to the
            inputs' shape.
        lmbda: the weight :math:`\lambda` in [0, 1]: a float, or a tensor that
            broadcasts to the inputs' shape.
        next_state_value: :math:`V(s'_t)`, ``[*batch, T, *F]``, floating.
        reward: :math:`r_t`, same shape, any real dtype.
        done: bool, same shape: whether the trajectory ends with this step.
        terminated: bool, same shape: whether the next state is terminal (its value is
            then ignored). Default: ``done``.
        rolling_gamma: must not be False, which TorchRL takes: each step of the
            recursion uses its own gamma and lmbda.
        time_dim: the dimension of time.

    Returns:
        The return of each step, with the shape of the inputs and the dtype of the
        values.

    Raises:
        ValueError, TypeError: the inputs are invalid; see :mod:`rlbuf_td.functional`.

    Cost: O(elements) on the CPU; for CUDA, see :mod:`rlbuf_td.functional`.
    Source: Sutton and Barto, 2018, section 12.1. TorchRL's
    ``td_lambda_return_estimate`` gives the same result.

    Example:
        >>> one = torch.ones(2, 1)
        >>> done = torch.tensor([[False], [True]])
        >>> td_lambda_return_estimate(0.5, 0.0, one, one, done).flatten().tolist()
        [1.5, 1.0]
    """
    return _estimate(
        "td_lambda_return_estimate",
        time_dim,
        gamma,
        lmbda,
        rolling_gamma,
        next_state_value,
        reward,
        done,
        terminated,
    )


def td1_return_estimate(
    gamma: float | Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    r"""TD(1) return: the discounted rewards to the end of the trajectory, plus the
    discounted value of its last state.

    .. math::
        G_t = r_t + \gamma \begin{cases}
            0 & \text{if terminated} \\ V(s'_t) & \text{if done, or at the last step} \\ G_{t+1} & \text{else}
        \end{cases}

    Args:
        gamma: discount factor in [0, 1]: a float, or a tensor that broadcasts to the
            inputs' shape.
        next_state_value: :math:`V(s'_t)`, ``[*batch, T, *F]``, floating.
        reward: :math:`r_t`, same shape, any real dtype.
        done: bool, same shape: whether the trajectory ends with this step.
        terminated: bool, same shape: whether the next state is terminal (its value is
            then ignored). Default: ``done``.
        rolling_gamma: as for :func:`td_lambda_return_estimate`.
        time_dim: the dimension of time.

    Returns:
        The return of each step, with the shape of the inputs and the dtype of the
        values.

    Raises:
        ValueError, TypeError: as for :func:`td_lambda_return_estimate`.

    Cost: as for :func:`td_lambda_return_estimate`.
    Source: Sutton and Barto, 2018, section 12.1 (lambda = 1). TorchRL's
    ``td1_return_estimate`` gives the same result.

    Example:
        >>> one = torch.ones(2, 1)
        >>> done = torch.tensor([[False], [False]])
        >>> td1_return_estimate(0.5, one, one, done).flatten().tolist()
        [1.75, 1.5]
    """
    return _estimate(
        "td1_return_estimate",
        time_dim,
        gamma,
        None,
        rolling_gamma,
        next_state_value,
        reward,
        done,
        terminated,
    )


def reward2go(
    reward: Tensor,
    done: Tensor,
    gamma: float | Tensor,
    *,
    mask: Tensor | None = None,
    time_dim: int = -2,
) -> Tensor:
    r"""Return to go: the discounted sum of the rewards from each step to the end of its
    trajectory.

    .. math::
        G_t = r_t + \gamma \, (1 - \mathrm{done}_t) \, G_{t+1}

    The sum also ends at the last step, without a bootstrap value. Decision transformers
    take it as an input.

    Args:
        reward: :math:`r_t`, ``[*batch, T, *F]``, floating.
        done: bool, same shape: whether the trajectory ends with this step.
        gamma: discount factor in [0, 1]: a float, or a tensor that broadcasts to the
            shape of ``reward``.
        mask: bool, the shape of ``reward`` or its first dims: False for padding, whose
            rewards do not count, and whose return is 0. The ``"mask"`` of a batch of
            :class:`~rlbuf_td.EpisodeSampler` fits.
        time_dim: the dimension of time.

    Returns:
        The return of each step, with the shape and dtype of ``reward``.

    Raises:
        ValueError, TypeError: the inputs are invalid; see :mod:`rlbuf_td.functional`.

    Cost: O(elements) on the CPU; for CUDA, see :mod:`rlbuf_td.functional`.
    Source: Chen et al., Decision Transformer, 2021, section 3. TorchRL's ``reward2go``
    gives the same result, without a mask.

    Example:
        >>> reward = torch.tensor([[1.0], [2.0], [4.0], [4.0]])
        >>> done = torch.tensor([[False], [False], [True], [True]])
        >>> reward2go(reward, done, 0.5, mask=torch.tensor([True, True, True, False])).flatten().tolist()
        [3.0, 4.0, 4.0, 0.0]
    """
    layout, (reward, ends, _) = TimeLayout.of(
        "reward2go", time_dim, {"reward": reward}, reward, done, None
    )
    padding = None if mask is None else ~layout.mask(mask)
    if padding is not None:
        reward = reward.masked_fill(padding, 0)
    g = layout.coefficient("gamma", gamma)
    returns = scan.reverse_scan(
        reward.contiguous(), scan.spread(g, reward).masked_fill(ends, 0)
    )
    if padding is not None:
        returns = returns.masked_fill(padding, 0)
    return layout.restore(returns)


def _estimate(
    name: str,
    time_dim: int,
    gamma: float | Tensor,
    lmbda: float | Tensor | None,  # None: a Monte Carlo return, TD(1)
    rolling_gamma: bool | None,
    next_state_value: Tensor,
    *others: Tensor | None,
) -> Tensor:
    """Return TD(lambda) returns, or Monte Carlo returns if ``lmbda`` is None, in the
    shape of the rewards."""
    if rolling_gamma is False:
        raise ValueError(
            f"{name}: rolling_gamma=False is not supported: leave it out, or use TorchRL's function."
        )
    layout, columns = TimeLayout.of(
        name, time_dim, {"next_state_value": next_state_value}, *others
    )
    next_value, reward, ends, terminated = columns
    g = layout.coefficient("gamma", gamma)
    lam = layout.coefficient("lmbda", 1.0 if lmbda is None else lmbda)
    bootstrap = next_value.masked_fill(terminated, 0)
    # A TD(1) return ends where the step terminates, even if done is not set.
    ends = ends | terminated if lmbda is None else ends.clone()
    ends[:, -1] = True  # there is no data after the last step
    mixed = torch.where(ends, bootstrap, 0 if lmbda is None else (1 - lam) * bootstrap)
    returns = scan.reverse_scan(
        reward + g * mixed, scan.spread(g * lam, bootstrap).masked_fill(ends, 0)
    )
    return layout.restore(returns)
