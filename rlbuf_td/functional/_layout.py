"""Checks of inputs, and reshaping from TorchRL's ``[*batch, T, *F]`` to the kernels'
3-D shape ``[L, T, F]``."""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_WIDE_INTEGERS = (torch.int32, torch.int64)
_FLAGS = ("done", "terminated")


class TimeLayout(NamedTuple):
    """The shape, device and dtypes of the inputs of one call."""

    function: str  # its name, for errors
    shape: torch.Size  # of the inputs
    time_dim: int
    # (L, T, F): L is the product of the dims before time, F of the dims after time
    sizes: tuple[int, int, int]
    device: torch.device
    compute_dtype: torch.dtype  # of intermediate results
    out_dtype: torch.dtype

    @classmethod
    def of(
        cls,
        function: str,
        time_dim: int,
        values: dict[str, Tensor],
        *others: Tensor | None,
    ) -> tuple[TimeLayout, list[Tensor]]:
        """Check ``values`` and ``others`` (reward, done, terminated); return the
        layout, and each as ``[L, T, F]``."""
        reward, done, terminated = others
        named = values | {
            "reward": reward,
            "done": done,
            "terminated": done if terminated is None else terminated,
        }
        inputs = {
            name: _checked(function, name, x, must_float=name in values)
            for name, x in named.items()
        }
        first = next(iter(inputs.values()))
        shape = tuple(first.shape)
        device = first.device
        if any(x.shape != shape for x in inputs.values()):
            differing: dict[str, object] = {
                name: tuple(x.shape) for name, x in inputs.items()
            }
            raise ValueError(
                f"{function}: all inputs must share one shape [*batch, T, *features], got {differing}."
            )
        if any(x.device != device for x in inputs.values()):
            differing = {name: str(x.device) for name, x in inputs.items()}
            raise ValueError(
                f"{function}: all inputs must be on one device, got {differing}."
            )
        if first.numel() == 0:
            raise ValueError(
                f"{function}: the inputs are empty (shape {shape}): there are no steps."
            )
        if not -first.ndim <= time_dim < first.ndim:
            raise ValueError(
                f"{function}: time_dim={time_dim} does not exist in inputs of shape "
                f"{shape}. For inputs without a feature dimension ([*batch, T]) pass "
                "time_dim=-1."
            )
        time_dim %= first.ndim
        out_dtype = reduce(torch.promote_types, (x.dtype for x in values.values()))
        # float32 would round them before they are added
        is_wide = inputs["reward"].dtype in _WIDE_INTEGERS
        compute_dtype = torch.promote_types(
            out_dtype, torch.float64 if is_wide else inputs["reward"].dtype
        )
        compute_dtype = torch.float32 if compute_dtype in _HALF else compute_dtype
        sizes = (
            math.prod(shape[:time_dim]),
            shape[time_dim],
            math.prod(shape[time_dim + 1 :]),
        )
        columns = []
        for name, x in inputs.items():
            column = _shaped(x.detach().resolve_neg(), sizes)
            columns.append(column if name in _FLAGS else column.to(compute_dtype))
        layout = cls(
            function, first.shape, time_dim, sizes, device, compute_dtype, out_dtype
        )
        return layout, columns

    def restore(self, x: Tensor) -> Tensor:
        return _shaped(x, self.shape).to(self.out_dtype)

    def mask(self, mask: Tensor) -> Tensor:
        """Check a bool mask of the inputs' shape, or of their first dims; return it as
        ``[L, T, F]``."""
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            raise TypeError(
                f"{self.function}: mask must be a bool tensor, got {getattr(mask, 'dtype', type(mask))}."
            )
        dims = mask.ndim
        if (
            not self.time_dim < dims <= len(self.shape)
            or mask.shape != self.shape[:dims]
        ):
            raise ValueError(
                f"{self.function}: mask must have the inputs' shape "
                f"{tuple(self.shape)} or its first dims, up to time, got "
                f"{tuple(mask.shape)}."
            )
        return (
            mask.reshape(*mask.shape, *[1] * (len(self.shape) - dims))
            .expand(self.shape)
            .reshape(self.sizes)
        )

    def coefficient(self, name: str, x: float | Tensor) -> float | Tensor:
        """Check gamma or lmbda; return a float unchanged, and a tensor expanded to
        ``[L, T, F]``."""
        if not isinstance(x, Tensor):
            return coefficient(self.function, name, x)
        if x.requires_grad:
            raise ValueError(
                f"{self.function}: {name} requires a gradient; estimates have none. Pass {name}.detach()."
            )
        x = x.to(self.device, self.compute_dtype)
        try:
            return x.expand(self.shape).reshape(self.sizes)
        except RuntimeError:
            raise ValueError(
                f"{self.function}: {name} of shape {tuple(x.shape)} does not "
                f"broadcast to the inputs' shape {tuple(self.shape)}. Pass a float, "
                f"or one value per step with time at dim {self.time_dim}."
            ) from None


def coefficient(function: str, name: str, x: float) -> float:
    """Return a coefficient such as gamma as a float; an error names the function if it
    is not in [0, 1]."""
    try:
        x = float(x)
    except (TypeError, ValueError):
        raise TypeError(
            f"{function}: {name} must be a number or a tensor, got {type(x).__name__}."
        ) from None
    if not 0.0 <= x <= 1.0:
        raise ValueError(f"{function}: {name} must lie in [0, 1], got {x}.")
    return x


def _shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    # even to the same shape, ``reshape`` takes 4 us in a loop
    return x if x.shape == shape else x.reshape(shape)


def _checked(function: str, name: str, x: Tensor | None, *, must_float: bool) -> Tensor:
    """Return an argument of a function; TypeError if it is no tensor, or of another
    dtype than it takes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{function}: {name} must be a tensor, got {type(x).__name__}.")
    if name in _FLAGS:
        if x.dtype is not torch.bool:
            raise TypeError(
                f"{function}: {name} must be a bool tensor, got {x.dtype}. Pass {name}.bool()."
            )
    elif x.dtype.is_complex or (must_float and not x.dtype.is_floating_point):
        raise TypeError(
            f"{function}: {name} must be of a floating dtype, got {x.dtype}."
        )
    return x
