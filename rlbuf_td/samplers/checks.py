"""What is asked of settings and of priorities before anything changes."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from rlbuf_td.storages.indexing import moved


def exponent(name: str, value: float) -> float:
    """Return a setting as a float.

    Raises:
        ValueError: it is negative, NaN or infinite.
    """
    number = float(value)
    if not 0.0 <= number < float("inf"):
        raise ValueError(f"{name} must be a finite number, at least 0, got {value}")
    return number


def refuse_settings(stratified: Any, weight_norm: Any, reduction: Any) -> None:
    """Refuse what is no way to draw, to weigh or to reduce.

    Raises:
        ValueError: names the setting.
    """
    if not isinstance(stratified, bool):
        raise ValueError(f"stratified must be True or False, got {stratified!r}")
    if weight_norm not in ("buffer", "batch", None):
        raise ValueError(f"weight_norm must be 'buffer', 'batch' or None, got {weight_norm!r}")
    if reduction not in ("max", "min", "mean", "median"):
        raise ValueError(f"reduction must be 'max', 'min', 'mean' or 'median', got {reduction!r}")


def as_errors(priority: Any, rows: int, device: torch.device) -> torch.Tensor:
    """Return TD errors in any form as ``[rows]`` float32 or float64, contiguous, on ``device``.

    Raises:
        ValueError: they are neither one nor as many as the rows.
        TypeError: they are complex.
    """
    td_error = priority if type(priority) is torch.Tensor else torch.as_tensor(priority)
    if td_error.is_complex():
        raise TypeError(f"TD errors must be real numbers, got {td_error.dtype}")
    if td_error.requires_grad:
        td_error = td_error.detach()
    td_error = moved(td_error, device)
    if td_error.dtype is not torch.float32 and td_error.dtype is not torch.float64:
        td_error = td_error.to(torch.float32 if td_error.is_floating_point() else torch.float64)
    if td_error.numel() == 1 != rows:
        return td_error.expand(rows).contiguous()
    if td_error.numel() != rows:
        raise ValueError(
            f"{td_error.numel()} priorities (shape {tuple(td_error.shape)}) for {rows} rows: "
            "give one a row, or one for all"
        )
    return td_error if td_error.ndim == 1 and td_error.is_contiguous() else td_error.reshape(-1).contiguous()


def refuse_errors(td_error: torch.Tensor) -> None:
    """Raise if a TD error is NaN or infinite, saying how many and where.

    Raises:
        ValueError: see above.
    """
    finite = td_error.isfinite()
    if not finite.all():
        where = (~finite).nonzero().squeeze(1)
        shown = ", ".join(str(int(j)) for j in where[:5]) + (", ..." if where.numel() > 5 else "")
        raise ValueError(
            f"{where.numel()} of {td_error.numel()} TD errors are NaN or infinite (positions {shown}): "
            "nothing has been changed. Look for a diverging loss."
        )


def refuse_priorities(flat: torch.Tensor, td_error: torch.Tensor, rows: int) -> NoReturn:
    """Say which error or which row of a refused batch is bad.

    Raises:
        ValueError: an error is NaN or infinite.
        IndexError: a row is out of range.
    """
    refuse_errors(td_error)
    low, high = int(flat.min()), int(flat.max())
    bad = high if high >= rows else low
    raise IndexError(f"row {bad} is out of range: {rows} rows can have a priority, 0 to {rows - 1} (-1 means skip)")


def refuse_state(tensors: Any, blank: dict[str, torch.Tensor]) -> None:
    """Refuse saved priorities that are not of the kind, dtype and shape of ``blank``, or hold NaN or infinite ones.

    Raises:
        ValueError: see above.
    """
    if not isinstance(tensors, dict) or tensors.keys() != blank.keys():
        raise ValueError(f"the saved state is of another sampler: it must hold {', '.join(blank)}")
    for name, expected in blank.items():
        tensor = tensors[name]
        kinds = [(str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in (tensor, expected)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"the saved {name} is {kinds[0]}, expected {kinds[1]}")
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():  # NaN is the least and the largest
            raise ValueError(f"the saved {name} holds NaN or infinite values")
