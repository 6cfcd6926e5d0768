"""Checks of inputs, and reshaping from TorchRL's ``[*batch, T, *F]`` to the kernels' ``[L, T, F]``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TimeLayout:
    """The shape that all inputs of one call share, its time dimension, and the dtypes of the call."""

    function: str
    shape: torch.Size
    time_dim: int
    device: torch.device
    compute_dtype: torch.dtype
    out_dtype: torch.dtype

    @classmethod
    def of(cls, function: str, time_dim: int, values: dict[str, Tensor], others: dict[str, Tensor]) -> TimeLayout:
        """Check the inputs of ``function``: types, shapes, devices, dtypes; ``values`` set the dtype returned."""
        inputs = values | others
        for name, x in inputs.items():
            if not isinstance(x, Tensor):
                raise TypeError(f"{function}: {name} must be a tensor, got {type(x).__name__}.")
        first = next(iter(inputs.values()))
        shapes = {name: tuple(x.shape) for name, x in inputs.items()}
        if len(set(shapes.values())) != 1:
            raise ValueError(f"{function}: all inputs must share one shape [*batch, T, *features], got {shapes}.")
        if first.numel() == 0:
            raise ValueError(f"{function}: the inputs are empty (shape {tuple(first.shape)}); there is no step.")
        if len({x.device for x in inputs.values()}) != 1:
            devices = {name: str(x.device) for name, x in inputs.items()}
            raise ValueError(f"{function}: all inputs must be on one device, got {devices}.")
        for name, x in inputs.items():
            _check_dtype(function, name, x, must_float=name in values)
        if not -first.ndim <= time_dim < first.ndim:
            remedy = "For inputs without a feature dimension ([*batch, T]) pass time_dim=-1."
            shape = tuple(first.shape)
            raise ValueError(f"{function}: time_dim={time_dim} does not exist in inputs of shape {shape}. {remedy}")
        out_dtype = reduce(torch.promote_types, (x.dtype for x in values.values()))
        compute_dtype = reduce(torch.promote_types, (x.dtype for x in others.values()), out_dtype)
        compute_dtype = torch.float32 if compute_dtype in _HALF else compute_dtype
        return cls(function, first.shape, time_dim % first.ndim, first.device, compute_dtype, out_dtype)

    @property
    def lanes_steps_features(self) -> tuple[int, int, int]:
        """``(L, T, F)``: the sizes before, along and after time."""
        t = self.time_dim
        return math.prod(self.shape[:t]), self.shape[t], math.prod(self.shape[t + 1 :])

    def flags(self, x: Tensor) -> Tensor:
        """Reshape a bool tensor to ``[L, T, F]``."""
        return x.detach().reshape(self.lanes_steps_features)

    def numbers(self, x: Tensor) -> Tensor:
        """Reshape a tensor to ``[L, T, F]``, in the dtype to compute in, detached."""
        return x.detach().reshape(self.lanes_steps_features).to(self.compute_dtype)

    def restore(self, x: Tensor) -> Tensor:
        return x.reshape(self.shape).to(self.out_dtype)

    def coefficient(self, name: str, x: float | Tensor) -> float | Tensor:
        """Check gamma or lmbda; a float stays a float, a tensor becomes ``[L, T, F]``."""
        if not isinstance(x, Tensor):
            return coefficient(self.function, name, x)
        if x.requires_grad:
            raise ValueError(f"{self.function}: {name} requires a gradient, estimates have none. Pass {name}.detach().")
        x = x.to(self.device, self.compute_dtype)
        try:
            return x.expand(self.shape).reshape(self.lanes_steps_features)
        except RuntimeError:
            shapes = f"shape {tuple(x.shape)} does not broadcast to the inputs' shape {tuple(self.shape)}"
            remedy = f"Pass a float, or one value per step with time at dim {self.time_dim}."
            raise ValueError(f"{self.function}: {name} of {shapes}. {remedy}") from None

    def is_per_step(self, x: object) -> bool:
        """Whether a coefficient is a tensor of the inputs' shape."""
        return isinstance(x, Tensor) and x.shape == self.shape


def coefficient(function: str, name: str, x: float) -> float:
    try:
        x = float(x)
    except (TypeError, ValueError):
        raise TypeError(f"{function}: {name} must be a number or a tensor, got {type(x).__name__}.") from None
    if not 0.0 <= x <= 1.0:
        raise ValueError(f"{function}: {name} must lie in [0, 1], got {x}.")
    return x


def _check_dtype(function: str, name: str, x: Tensor, *, must_float: bool) -> None:
    if name in ("done", "terminated"):
        if x.dtype is not torch.bool:
            raise TypeError(f"{function}: {name} must be a bool tensor, got {x.dtype}. Pass {name}.bool().")
    elif x.dtype.is_complex or (must_float and not x.dtype.is_floating_point):
        raise TypeError(f"{function}: {name} must be of a floating dtype, got {x.dtype}.")
