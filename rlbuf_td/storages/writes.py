"""Converts and checks the indices and data that users give to writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

from rlbuf_td.kernels.host_memory import address_of
from rlbuf_td.storages.schema import SchemaError, walk

if TYPE_CHECKING:
    from rlbuf_td.storages.layout import RowLayout

#: Counts the steps of a write in statistics, given the addresses of its leaves.
Record: TypeAlias = Callable[[np.ndarray], None]


def is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor | np.ndarray) and index.dtype in (
        torch.bool,
        np.bool_,
    )


def as_integers(index: object) -> torch.Tensor | None:
    """Return integers in any form, such as an int, a list, an array or a tensor, as an
    int64 tensor of their shape; None for what is no integers, such as a mask."""
    if isinstance(index, range):  # NumPy would take one number after another
        index = np.arange(index.start, index.stop, index.step)
    if isinstance(index, int | np.integer | list | np.ndarray):
        array = np.asarray(index)
        # an empty list has a float dtype
        if array.dtype.kind in "iu" or (not array.size and array.dtype.kind == "f"):
            index = torch.from_numpy(np.array(array, np.int64))
    if (
        not isinstance(index, torch.Tensor)
        or index.is_floating_point()
        or index.is_complex()
        or index.dtype is torch.bool
    ):
        return None
    if index.is_cpu:
        address_of(index)  # refuses an index without memory
    return index.to(torch.int64)


def as_steps(cursor: object, total: int, live: int) -> np.ndarray:
    """Convert an index of the time steps to write, ``[n]`` int64; refuse steps that
    leave others after the ``live`` ones unwritten."""
    if isinstance(cursor, slice):
        cursor = range(*cursor.indices(total))
    integers = as_integers(cursor)
    if integers is None:
        raise IndexError(
            f"cannot write at a cursor that is no integers, got a {type(cursor).__name__}: pass time steps"
        )
    if integers.ndim > 1:
        raise IndexError(
            f"cannot write at a cursor of shape {tuple(integers.shape)}: pass time steps, [n]"
        )
    steps = np.atleast_1d(integers.cpu().numpy())
    if not len(steps):
        raise IndexError("cannot write at an empty set of positions")
    if steps.min() < 0 or steps.max() >= total:
        bad = steps[(steps < 0) | (steps >= total)][0]
        raise IndexError(
            f"position {bad} is out of range of a storage of {total} time steps"
        )
    new = np.unique(steps[steps >= live])
    if len(new) and len(new) != new[-1] + 1 - live:
        raise IndexError(
            f"positions up to {new[-1]} leave rows after {live - 1} unwritten: write them in order"
        )
    return steps


def wrapping(data: object, batch_size: str = "[n]") -> str:
    """Return how to make a TensorDict of ``data``, for error messages."""
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
        return "wrap each step, [TensorDict(step) for step in data]"
    entries = "data" if isinstance(data, Mapping) else '{"observation": data, ...}'
    return (
        f"wrap it, TensorDict({entries}, {batch_size}), where NumPy arrays may be values; "
        "make_transition(...) wraps what a step of a Gymnasium environment returns"
    )


def stacked(data: object, dim: int = 0) -> Any:
    """Stack a list of TensorDicts, tensorclasses or tensors, one per time step; other
    data stay the same."""
    if not isinstance(data, list | tuple) or isinstance(data, torch.Size) or not data:
        return data
    takes_tensors = isinstance(data, list)  # a tuple of tensors is a pytree
    are_steps = all(
        is_tensor_collection(step) or (takes_tensors and isinstance(step, torch.Tensor))
        for step in data
    )
    if not are_steps:
        return data
    if len({step.shape for step in data}) > 1:
        raise SchemaError(
            f"cannot stack steps of different batch sizes: {sorted({(*step.shape,) for step in data})}"
        )
    try:
        return torch.stack(list(data), dim)
    except (RuntimeError, TypeError) as error:
        raise SchemaError(f"cannot stack the steps of a list: {error}") from None


def refuse_shape(data: TensorDictBase, lead: int) -> NoReturn:
    """Raise an error for data with too few batch dims; ``lead``: how many it must
    have."""
    if data.ndim:
        raise SchemaError(
            f"extend takes batch size [E, T] (lanes, time) with ndim={lead}, got {[*data.shape]}: "
            "leave out reshape(-1), or give the lane of each row, lanes="
        )
    shapes = {
        (*value.shape[:lead],)
        for _, value in walk(data)
        if isinstance(value, torch.Tensor)
    }
    (common,) = shapes if len(shapes) == 1 else ((),)
    add = "add" if lead == 1 else "rb.lane(e).add"
    what = f"a single one: use {add}"
    if len(common) == lead:
        remedy = (
            f"pass TensorDict(data, {[*common]}), or, if it is a single one, use {add}"
        )
        what = f"a TensorDict without batch size, whose entries all have the leading dims {[*common]}: {remedy}"
    raise ValueError(
        f"extend takes several transitions, {'[n]' if lead == 1 else '[E, T]'}, got {what}"
    )


class TakenLane(NamedTuple):
    """A lane that another actor takes over: its next row begins an episode."""

    lane: int


class StagedRows(NamedTuple):
    """Rows that lie at the same addresses in each write, see
    :meth:`CompiledWrites.stage`."""

    record: int  # the address of a ``WRITE_RECORD``
    lane_ids: int  # the address of `lanes`; 0: one time step
    lanes: np.ndarray | None  # the lane of each row
    memory: object  # what the record refers to, and the record


@dataclass(slots=True)
class Write:
    """A write of rows after the newest ones, see :meth:`PackedStorage.advance`.

    Whoever prepares the write sets what it changes.
    """

    #: Time steps ``[n, *lanes]``, or rows ``[n]`` of single lanes; None with `staged`.
    data: Any
    #: Whether the data is one time step ``[*lanes]``.
    is_single: bool = False
    #: The lane of each row, ``[n]`` integers, those of a lane in time order; or one
    #: lane for all rows; or a :class:`TakenLane`. None: whole time steps.
    lanes: Any = None
    #: Whether the data is ``[E, n]``.
    lanes_first: bool = False
    #: Whether all rows so far are removed.
    begins_anew: bool = False
    #: Whether the buffers of the storage are told of the rows.
    is_told: bool = True
    #: Counts the rows in statistics; only where :class:`CompiledWrites` writes them.
    record: Record | None = None
    #: Rows in place of the data, for :meth:`CompiledWrites.write` alone.
    staged: StagedRows | None = None
    #: The entries of the data if :meth:`RowLayout.find` has found them, and the layout
    # that has.
    leaves: list[Any] | None = None
    layout: RowLayout | None = None

    def replace_data(self, data: Any) -> None:
        """Write other data, whose entries have not been found."""
        self.data = data
        self.leaves = self.layout = None

    def lead_dims(self, ndim: int) -> int:
        """Return the number of dims of the data that number rows of a storage of this
        ``ndim``."""
        return 1 if self.lanes is not None else ndim - self.is_single


def as_lanes(lanes: object, rows: int) -> torch.Tensor:
    """Return a lane for each of ``rows`` rows, ``[n]`` int64, from an int or from one
    lane per row.

    Raises:
        TypeError: lanes are not integers.
        ValueError: lanes have the wrong shape.
    """
    if isinstance(lanes, torch.Tensor) and lanes.is_cpu:
        address_of(lanes)  # refuses lanes without memory
    array = (
        lanes.numpy(force=True)
        if isinstance(lanes, torch.Tensor)
        else np.asarray(lanes)
    )
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"lanes must be integers, one per row or one for all, got {array.dtype}"
        )
    if array.size != 1 and array.shape != (rows,):
        raise ValueError(
            f"lanes of shape {array.shape} for {rows} rows: pass one lane per row, or one for all"
        )
    # In memory of its own: nobody can change the lanes after their range has been
    # checked.
    return torch.from_numpy(
        np.full(rows, array.reshape(-1) if array.size == 1 else array, np.int64)
    )


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    # with strides of their own
    copies = (
        tensor.clone(memory_format=torch.contiguous_format) for tensor in (one, other)
    )
    return torch.equal(*(tensor.flatten().view(torch.uint8) for tensor in copies))
