"""Flat rows and coordinates: ``t`` when ``ndim=1``, ``(t, e)`` when ``ndim=2``, and so on."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torchrl.data.replay_buffers import Storage

from rlbuf_td.kernels.dispatch import backend_of

Index: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


def device_of(storage: Storage) -> torch.device:
    """Return the device on which a storage wants its indices."""
    device = getattr(storage, "device", None)
    if type(device) is torch.device:
        return device
    return torch.device("cpu") if device is None or device == "auto" else torch.device(device)


def lanes_of(storage: Storage) -> torch.Size:
    """Return the dims after time, empty for ``ndim=1``."""
    return torch.Size([]) if storage.ndim == 1 else storage.shape[1:]


def coordinates(flat: torch.Tensor, storage: Storage) -> Index:
    """Return flat rows as TorchRL gives indices: the rows themselves, or a tuple of one tensor a dim."""
    if storage.ndim == 1:
        return flat
    parts = []
    for size in reversed(lanes_of(storage)):
        step = flat // size
        parts.append(torch.sub(flat, step, alpha=size))  # the remainder, without a second division
        flat = step
    return (flat, *reversed(parts))


def moved(value: Any, device: torch.device) -> torch.Tensor:
    """Return what is, or can be, a tensor on a device; a GPU is not waited for.

    Of pageable memory the driver has a copy when the call returns (CUDA Runtime API, "API synchronization behavior").
    Page-locked memory it would read later, when its owner may have changed it: that is waited for.
    """
    value = torch.as_tensor(value)
    if value.device == device:
        return value
    is_taken_over = device.type == "cuda" and value.device.type == "cpu" and not value.is_pinned()
    return value.to(device, non_blocking=is_taken_over)


def flat_rows(index: Any, storage: Storage | None, device: torch.device) -> torch.Tensor:
    """Return any form of an index as flat rows, contiguous ``[B]`` int64.

    The forms: an int, flat rows, a tuple of one tensor a dim, or their stack ``[B, ndim]``.

    Rows named -1 ("skip") stay -1.

    Raises:
        ValueError: coordinates came without the storage that gives them a meaning, or with a wrong number of dims.
        IndexError: a lane is out of range (on the CPU).
        TypeError: the index is not of integers.
    """
    if type(index) is torch.Tensor and index.ndim == 1 and index.dtype is torch.int64 and index.device == device:
        return index if index.is_contiguous() else index.contiguous()
    if isinstance(index, tuple):
        index = torch.stack([moved(part, device).reshape(-1) for part in index], -1)
    index = moved(index, device)
    if index.dtype is not torch.int64:
        if index.is_floating_point() or index.is_complex() or index.dtype is torch.bool:
            raise TypeError(f"rows are named by integers, got an index of dtype {index.dtype}")
        index = index.to(torch.int64)
    if index.ndim < 2:
        return index.reshape(-1).contiguous()
    if storage is None:
        raise ValueError(f"an index of shape {tuple(index.shape)} needs the storage: pass storage=rb.storage")
    if index.ndim > 2 or index.shape[-1] != storage.ndim:
        raise ValueError(
            f"an index of shape {tuple(index.shape)} does not name rows of a storage with ndim={storage.ndim}: "
            f"it must be flat, or of shape [B, {storage.ndim}]"
        )
    first, *others = index.unbind(-1)
    flat = first
    for size, part in zip(lanes_of(storage), others, strict=True):
        if backend_of(part) == "numba" and bool(((first >= 0) & ((part < 0) | (part >= size))).any()):
            raise IndexError(f"lanes {part.min()} to {part.max()} were named, there are lanes 0 to {size - 1}")
        flat = flat * size + part
    return torch.where(first < 0, -1, flat) if others else flat.contiguous()
