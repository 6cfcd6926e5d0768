"""Explained variance, and normalization of advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from tensordict.utils import expand_as_right
from torch import Tensor


def explained_variance(state_value: Tensor, value_target: Tensor) -> Tensor:
    r"""Share of the targets' variance that the values explain:
    :math:`1 - \mathrm{Var}[R - V] / \mathrm{Var}[R]`.

    1 means that values and targets differ by a constant; 0 means that the values
    predict no better than a constant.

    Args:
        state_value: the predictions :math:`V`, any shape, floating.
        value_target: the targets :math:`R`, same shape.

    Returns:
        A 0-dim tensor: float64 if an input is float64, else float32. NaN if the targets
            are constant.

    Raises:
        ValueError: the shapes differ, or the tensors are empty.

    Cost: O(elements), without host synchronisation.
    Source: OpenAI Baselines. TorchRL has no function for this.

    Example:
        >>> target = torch.tensor([1.0, 2.0, 3.0])
        >>> explained_variance(target - 1, target).item(), explained_variance(torch.zeros(3), target).item()
        (1.0, 0.0)
    """
    if state_value.shape != value_target.shape:
        raise ValueError(
            "explained_variance: values and targets must share one shape, got "
            f"{tuple(state_value.shape)} and {tuple(value_target.shape)}."
        )
    if state_value.numel() == 0:
        raise ValueError("explained_variance: the tensors are empty.")
    target = _wide(value_target)
    variance = target.var(correction=0)
    unexplained = (target - _wide(state_value)).var(correction=0)
    return torch.where(variance == 0, torch.nan, 1 - unexplained / variance)


def normalize(
    x: Tensor,
    eps: float = 1e-6,
    mask: Tensor | None = None,
    exclude_dims: Sequence[int] = (),
) -> Tensor:
    r"""Shift ``x`` to mean 0 and scale it to standard deviation 1:
    :math:`(x - \bar x) / \max(\sigma_x, \epsilon)`.

    Args:
        x: values, any shape, floating.
        eps: the smallest divisor, positive.
        mask: which values count for the mean and the standard deviation, bool, with the
            first dims of ``x``; ``None``: all values. Values that do not count are
            shifted and scaled, too.
        exclude_dims: dims along which each index has a mean and a standard deviation of
            its own, for example -1 for the components of a reward; default: none.

    Returns:
        A new, detached tensor of the same shape and dtype. bfloat16 and float16 are
        computed in float32.

    Raises:
        ValueError: ``x`` is empty, ``eps`` is not positive, the mask is not bool with
            the first dims of ``x``, or no dim is left.
        IndexError: ``x`` has no such dim.

    If no value counts, the result is NaN.

    Cost: O(elements), without host synchronisation. TorchRL's ``average_gae`` uses the
    sample standard deviation (divisor n - 1), which is undefined for one element; this
    function uses the divisor n.

    Example:
        >>> normalize(torch.tensor([1.0, 3.0])).tolist()
        [-1.0, 1.0]
        >>> normalize(torch.tensor([1.0, 3.0, 5.0]), mask=torch.tensor([True, True, False])).tolist()
        [-1.0, 1.0, 3.0]
    """
    if x.numel() == 0:
        raise ValueError("normalize: the tensor is empty.")
    if not eps > 0:
        raise ValueError(f"normalize: eps must be positive, got {eps}.")
    wide = _wide(x)
    excluded = {range(x.ndim)[dim] for dim in exclude_dims}
    dims = [dim for dim in range(x.ndim) if dim not in excluded]
    if excluded and not dims:
        raise ValueError(
            f"normalize: exclude_dims={[*exclude_dims]} leaves none of the {x.ndim} dims."
        )
    if mask is None:
        std, mean = torch.std_mean(wide, dims, correction=0, keepdim=True)
    else:
        std, mean = _masked_std_mean(wide, mask, dims)
    return ((wide - mean) / std.clamp_min(eps)).to(x.dtype)


def _masked_std_mean(x: Tensor, mask: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Return standard deviation and mean over ``dims`` of the elements where ``mask``
    is set."""
    if mask.dtype is not torch.bool or mask.shape != x.shape[: mask.ndim]:
        raise ValueError(
            "normalize: the mask must be bool with the first dims of "
            f"{tuple(x.shape)}, got {mask.dtype} of shape {tuple(mask.shape)}."
        )
    counts = cast("Tensor", expand_as_right(mask, x))
    number = counts.sum(dims, keepdim=True)
    mean = torch.where(counts, x, 0).sum(dims, keepdim=True) / number
    squares = torch.where(counts, (x - mean).square(), 0)
    variance = squares.sum(dims, keepdim=True) / number
    return variance.sqrt(), mean


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))
