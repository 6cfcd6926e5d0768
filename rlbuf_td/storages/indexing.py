"""Converts row indices to flat indices, and entries of a batch (such as TD errors) to
one value per row.

The flat index of a row is ``t`` for ``ndim=1``, and ``t * E + e`` for ``ndim=2`` (step
``t``, lane ``e`` of ``E``). The first dims of a batch, the *row dims*, index rows. If a
stored row is itself a batch, such as a trajectory, the row's own dims (*inner dims*)
follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right
from torchrl.data.replay_buffers import Storage

from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.host_memory import address_of
from rlbuf_td.storages import torchrl_parts
from rlbuf_td.storages.ring import LiveRows
from rlbuf_td.storages.tensordict_fast import set_entries_
from rlbuf_td.storages.torchrl_parts import stored_rows
from rlbuf_td.storages.writes import as_integers

if TYPE_CHECKING:
    from rlbuf_td.storages.packed import PackedStorage

Index: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
# what a sampler reports, by key; TorchRL's index may be a tuple
Info: TypeAlias = dict[Any, torch.Tensor]


def device_of(storage: Storage) -> torch.device:
    device = getattr(storage, "device", None)
    if type(device) is torch.device:
        return device
    return (
        torch.device("cpu")
        if device is None or device == "auto"
        else torch.device(device)
    )


def lanes_of(storage: Storage) -> torch.Size:
    if storage.ndim == 1:
        return torch.Size([])
    # ten times as fast as a PackedStorage's ``shape``
    lanes = getattr(storage, "lanes", None)
    return lanes or storage.shape[1:]


def numbered(storage: Storage) -> LiveRows:
    """Return the number of written rows, and whether the number of each is its flat
    index."""
    if hasattr(storage, "ring"):
        return storage.ring.numbered()
    return LiveRows(len(storage), True)


def row_count(storage: Storage) -> int:
    """Return the number of written rows, without holes."""
    return numbered(storage).rows


def nth_rows(storage: Storage, number: torch.Tensor) -> torch.Tensor:
    """Return the flat indices of written rows; ``number``, int64, counts written rows
    from 0 on."""
    return storage.ring.cell_of(number) if hasattr(storage, "ring") else number


def written_rows(storage: Storage) -> torch.Tensor:
    """Return the flat indices of all written rows, ``[N]``, by their numbers."""
    return nth_rows(
        storage, torch.arange(row_count(storage), device=device_of(storage))
    )


def are_ragged(storage: Storage) -> TypeGuard[PackedStorage]:
    """Whether the lanes of a storage stand at unlike steps, or a lane has gaps that a
    killed write has left."""
    return hasattr(storage, "ring") and (
        not storage.ring.are_aligned or storage.ring.holes > 0
    )


def steps_by_age(storage: Storage, steps: int) -> torch.Tensor:
    """Return the ``steps`` written time steps of a storage, the oldest first; a storage
    that is not full begins at 0."""
    oldest = 0
    if torchrl_parts.is_full(storage):
        oldest = torchrl_parts.last_step(storage, steps) + 1
    return torch.arange(oldest, oldest + steps, device="cpu") % steps


def coordinates(flat: torch.Tensor, storage: Storage) -> Index:
    """Convert flat indices to TorchRL's index: unchanged for ``ndim=1``, else a tuple
    of one tensor per dim."""
    if storage.ndim == 1:
        return flat
    parts = []
    for size in reversed(lanes_of(storage)):
        step = flat // size
        # the remainder, without a second division
        parts.append(torch.sub(flat, step, alpha=size))
        flat = step
    return (flat, *reversed(parts))


def flat_rows(
    index: object, storage: Storage | None, device: torch.device
) -> torch.Tensor:
    """Convert an int, flat indices, a tuple of one tensor per dim, or ``[B, ndim]`` to
    contiguous flat indices.

    An index of -1 marks a row to skip, and stays -1.
    """
    if isinstance(index, torch.Tensor) and backend_of(index) == "numba":
        address_of(index)  # refuses an index without memory
    if (
        type(index) is torch.Tensor
        and index.ndim == 1
        and index.dtype is torch.int64
        and index.device == device
    ):
        return index if index.is_contiguous() else index.contiguous()
    if isinstance(index, tuple):
        parts = [_integers(part, device).reshape(-1) for part in index]
        index = torch.stack(parts, -1)
    integers = _integers(index, device)
    if integers.ndim < 2:
        return integers.reshape(-1).contiguous()
    if storage is None:
        raise ValueError(
            f"an index of shape {tuple(integers.shape)} needs the storage: pass storage=rb.storage"
        )
    if integers.ndim > 2 or integers.shape[-1] != storage.ndim:
        raise ValueError(
            f"an index of shape {tuple(integers.shape)} does not fit a storage with ndim={storage.ndim}: "
            f"it must be flat, or of shape [B, {storage.ndim}]"
        )
    first, *others = integers.unbind(-1)
    flat = first
    for size, part in zip(lanes_of(storage), others, strict=True):
        if backend_of(part) == "numba" and bool(
            ((first >= 0) & ((part < 0) | (part >= size))).any()
        ):
            raise IndexError(
                f"lanes {part.min()} to {part.max()} are out of range: lanes are 0 to {size - 1}"
            )
        flat = flat * size + part
    return torch.where(first < 0, -1, flat) if others else flat.contiguous()


def _integers(index: object, device: torch.device) -> torch.Tensor:
    """Return integers in any form as int64 on a device; the host does not wait for the
    device if it is one number."""
    if type(index) is int:
        return torch.full((), index, dtype=torch.int64, device=device)
    integers = as_integers(index)
    if integers is None:
        is_tensor = isinstance(index, torch.Tensor)
        got = str(index.dtype) if is_tensor else f"a {type(index).__name__}"
        raise TypeError(
            f"row indices must be integers, got {got}: pass those of the batch, batch['index']"
        )
    return integers.to(device)


def inner_dims(storage: Storage, dims: int) -> int:
    """Return the number of inner dims of a batch with ``dims`` batch dims, such as 1
    for stored trajectories."""
    rows = stored_rows(storage) if dims > 1 else None
    return 0 if rows is None else rows.ndim - storage.ndim


def merge_(batch: TensorDictBase, info: Info) -> None:
    """Add the entries of ``info``, which a sampler has returned, to a batch whose first
    dim indexes rows."""
    plain = batch.ndim == 1
    for key, value in info.items():
        plain = plain and type(key) is str and type(value) is torch.Tensor
    if plain:
        return set_entries_(batch, info)
    for key, value in info.items():
        if isinstance(value, tuple):  # coordinates, one tensor per dim
            value = torch.stack(value, -1)
            value = value.view(
                len(value), *(1,) * (batch.ndim - 1), value.shape[-1]
            ).expand(*batch.shape, -1)
        batch.set(
            key, expand_as_right(value, batch) if value.ndim < batch.ndim else value
        )


def put_back_(batch: TensorDictBase, known: dict[Any, torch.Tensor]) -> None:
    """Set the entries of ``known`` that a transform has removed, unless it has changed
    the shape of the batch."""
    for key, value in known.items():
        if (
            key not in batch.keys(include_nested=True)
            and value.shape[: batch.ndim] == batch.shape
        ):
            batch.set(key, value)


def by_row(
    td_error: torch.Tensor,
    index: torch.Tensor,
    dims: int,
    storage: Storage,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one TD error and one index entry for each row of a batch with ``dims``
    batch dims."""
    inner = inner_dims(storage, dims)
    index = first_of_row(index, dims, inner)
    if index.ndim != 1 + (storage.ndim > 1):
        raise ValueError(
            f"an index of shape {tuple(index.shape)} does not fit a storage with ndim={storage.ndim}"
        )
    return one_a_row(td_error, dims - inner, reduction, inner), index


def first_of_row(entry: torch.Tensor, dims: int, inner: int) -> torch.Tensor:
    """Return the first value of ``entry`` in each row; the last ``inner`` of its
    ``dims`` batch dims are inner dims."""
    if dims == 1:
        return entry
    if dims == 0:
        return entry[None]
    first: tuple[slice | int, ...] = (slice(None), *(0,) * inner)
    return entry.flatten(0, dims - inner - 1)[first]


def _refuse_broadcast(shape: torch.Size, dims: int) -> None:
    """Refuse the shape of ``[B, 1] - [B]``; two TD errors for each of two rows are
    usual, of two critics."""
    size = shape[0]
    if size > 2 and shape == (size,) * (dims + 1):
        batch, wrong = [*shape[:-1]], [*shape]
        raise ValueError(
            f"TD errors of shape {wrong} for a batch {batch}: {[*batch, 1]} - {batch} has this shape by broadcasting. "
            f"Give values and targets the same shape; if a row has {size} TD errors, reduce them to one: "
            "td_error.abs().amax(-1)"
        )


def one_a_row(
    td_error: torch.Tensor, row_dims: int, reduction: str, inner: int = 0
) -> torch.Tensor:
    """Reduce TD errors to one detached value per row, ``[B]``.

    The first ``row_dims`` dims index rows, the next ``inner`` dims are other batch
    dims.
    """
    if not isinstance(td_error, torch.Tensor) or td_error.is_complex():
        raise TypeError(
            f"TD errors must be a tensor of real numbers, got {getattr(td_error, 'dtype', type(td_error))}"
        )
    if backend_of(td_error) == "numba":
        address_of(td_error)  # refuses TD errors without memory
    if td_error.ndim > 1 and row_dims:
        _refuse_broadcast(td_error.shape, row_dims + inner)
    if td_error.requires_grad:
        td_error = td_error.detach()
    if td_error.is_neg():
        td_error = td_error.resolve_neg()
    if row_dims != 1:
        td_error = td_error.flatten(0, row_dims - 1) if row_dims else td_error[None]
    if td_error.ndim == 1:
        return td_error
    td_error = td_error.flatten(1)
    if td_error.shape[1] == 1:
        return td_error[:, 0]
    if not td_error.shape[1]:
        raise ValueError("the TD errors are empty: their last dims have size 0")
    if not td_error.is_floating_point():
        td_error = td_error.to(torch.float64)
    reduced = getattr(td_error.abs(), reduction)(1)
    return reduced if isinstance(reduced, torch.Tensor) else reduced.values
