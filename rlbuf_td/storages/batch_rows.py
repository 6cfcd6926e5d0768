"""How batches, the rows that they name and the TD errors of these fit together: pure functions.

A batch has *row dims*, which index rows, and perhaps *inner dims* behind them, where a row is a batch itself (a
trajectory, say). The index of a row is a number, or with ``ndim > 1`` its coordinates in a last dim.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import expand_as_right
from torchrl.data.replay_buffers import Storage

from rlbuf_td.storages.tensordict_fast import set_entries_


def inner_dims(storage: Storage) -> int:
    """Return how many batch dims lie within a row of ``storage``."""
    rows = getattr(storage, "_storage", None)
    return rows.ndim - storage.ndim if isinstance(rows, TensorDictBase) else 0


def merge_(batch: TensorDict, info: dict[Any, Any]) -> None:
    """Put what a sampler reports into a batch of one row dim that nobody else has seen."""
    plain = batch.ndim == 1
    for key, value in info.items():
        plain = plain and type(key) is str and type(value) is torch.Tensor
    if plain:
        return set_entries_(batch, info)
    for key, value in info.items():
        if isinstance(value, tuple):  # coordinates, one tensor a dim
            value = torch.stack(value, -1)
            value = value.view(len(value), *(1,) * (batch.ndim - 1), value.shape[-1]).expand(*batch.shape, -1)
        batch.set(key, expand_as_right(value, batch) if value.ndim < batch.ndim else value)


def put_back_(batch: TensorDictBase, known: dict[Any, torch.Tensor]) -> None:
    """Set what is known of the rows of a batch where it is missing, unless the batch has other rows by now."""
    for key, value in known.items():
        if key not in batch.keys(include_nested=True) and value.shape[: batch.ndim] == batch.shape:
            batch.set(key, value)


def by_row(
    td_error: torch.Tensor, index: torch.Tensor, dims: int, storage: Storage, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one TD error and one index a row of a batch with ``dims`` batch dims.

    Args:
        td_error: ``[*batch, ...]``; several errors a row are reduced, by magnitude.
        index: ``[*batch]``, or ``[*batch, ndim]`` when the storage has ``ndim > 1``.
        dims: number of batch dims.
        storage: where the rows lie.
        reduction: ``"max"``, ``"min"``, ``"mean"`` or ``"median"``.

    Returns:
        ``[B]`` errors, and ``[B]`` or ``[B, ndim]`` indices.

    Raises:
        ValueError: the index does not name rows of this storage.
    """
    inner = inner_dims(storage) if dims > 1 else 0
    index = first_of_row(index, dims, inner)
    if index.ndim != 1 + (storage.ndim > 1):
        raise ValueError(
            f"the batch has an index of shape {tuple(index.shape)} a row, which does not name rows of a storage "
            f"with ndim={storage.ndim}"
        )
    return one_a_row(td_error, dims - inner, reduction), index


def first_of_row(entry: torch.Tensor, dims: int, inner: int) -> torch.Tensor:
    """Return ``[B, ...]`` of an entry of a batch with ``dims`` batch dims, ``inner`` of which lie within a row."""
    if dims == 1:
        return entry
    if dims == 0:
        return entry[None]
    first = (slice(None), *(0,) * inner)
    return entry.flatten(0, dims - inner - 1)[first]


def one_a_row(td_error: torch.Tensor, row_dims: int, reduction: str) -> torch.Tensor:
    """Return one TD error a row, ``[B]`` without gradient, from errors whose first ``row_dims`` dims index rows.

    Raises:
        TypeError: the errors are no real tensor.
        ValueError: there is none a row.
    """
    if not isinstance(td_error, torch.Tensor) or td_error.is_complex():
        raise TypeError(f"TD errors must be a tensor of real numbers, got {getattr(td_error, 'dtype', type(td_error))}")
    if td_error.requires_grad:
        td_error = td_error.detach()
    if row_dims != 1:
        td_error = td_error.flatten(0, row_dims - 1) if row_dims else td_error[None]
    if td_error.ndim == 1:
        return td_error
    td_error = td_error.flatten(1)
    if td_error.shape[1] == 1:
        return td_error[:, 0]
    if not td_error.shape[1]:
        raise ValueError("the rows have no TD error each: its last dims have size 0")
    if not td_error.is_floating_point():
        td_error = td_error.to(torch.float64)
    reduced = getattr(td_error.abs(), reduction)(1)
    return reduced if isinstance(reduced, torch.Tensor) else reduced.values
