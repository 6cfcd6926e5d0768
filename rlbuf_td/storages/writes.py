"""Checks indices and data, and writes rows. The argument ``storage`` is a :class:`~rlbuf_td.PackedStorage`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from rlbuf_td.kernels.host_memory import address_of
from rlbuf_td.storages.dedup import DedupLayout
from rlbuf_td.storages.episodes import refuse_inner
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.listeners import Then
from rlbuf_td.storages.row_class import unwrap
from rlbuf_td.storages.rows import Rows, last_of_each
from rlbuf_td.storages.schema import SchemaError, refuse_other_index, refuse_unfit, show_key, walk
from rlbuf_td.storages.torchrl_parts import capacity_in_steps, count_change, listeners_of

if TYPE_CHECKING:
    from rlbuf_td.storages.packed import PackedStorage

_INDEX_DTYPES = frozenset((torch.int64, torch.int32, torch.int16, torch.int8))  # torch takes uint8 for a mask


def is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor | np.ndarray) and index.dtype in (torch.bool, np.bool_)


def is_index(index: Any) -> bool:
    """Whether ``index`` is a tensor of signed integers with at least one dim."""
    is_index = isinstance(index, torch.Tensor) and index.ndim > 0 and index.dtype in _INDEX_DTYPES
    if is_index and index.is_cpu:
        address_of(index)  # refuses an index without memory
    return is_index


def as_index(index: Any) -> torch.Tensor:
    array = np.asarray(index)
    if array.dtype.kind in "iu" or (not array.size and array.dtype.kind == "f"):  # an empty list has a float dtype
        array = array.astype(np.int64, copy=False)
    return torch.as_tensor(array, device="cpu")


def _as_steps(cursor: Any, total: int, live: int, append: bool) -> np.ndarray:
    """Convert an index of time steps to an int64 array; if ``append``, refuse a gap of unwritten steps.

    Otherwise negative indices count from the end of the ``live`` steps, as in reads.
    """
    if isinstance(cursor, slice):
        cursor = range(*cursor.indices(total if append else live))
    if isinstance(cursor, torch.Tensor):
        cursor = cursor.cpu().numpy()
    steps = np.atleast_1d(np.asarray(cursor))
    if steps.ndim != 1 or (steps.size and steps.dtype.kind not in "iu"):
        raise IndexError(f"cannot write at a cursor of shape {steps.shape} and dtype {steps.dtype}")
    if not len(steps):
        raise IndexError("cannot write at an empty set of positions")
    if not append and steps.dtype.kind == "i":
        steps = np.where((steps < 0) & (steps >= -live), steps + live, steps)
    if steps.min() < 0 or steps.max() >= total:
        bad = steps[(steps < 0) | (steps >= total)][0]
        raise IndexError(f"position {bad} is out of range of a storage of {total} time steps")
    if append and len(np.unique(steps[steps >= live])) != max(0, int(steps.max()) + 1 - live):
        raise IndexError(
            f"positions up to {steps.max()} leave rows after {live - 1} unwritten: write them in order, "
            "or pass set_cursor=False to write without counting the rows"
        )
    return steps.astype(np.int64)


def wrapping(data: Any, batch_size: str = "[n]") -> str:
    """Return how to make a TensorDict of ``data``, for error messages."""
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
        return "wrap each step, [TensorDict(step) for step in data]"
    entries = "data" if isinstance(data, Mapping) else '{"observation": data, ...}'
    return (
        f"wrap it, TensorDict({entries}, {batch_size}), where NumPy arrays may be values; "
        "make_transition(...) wraps what a step of a Gymnasium environment returns"
    )


def stacked(data: Any, dim: int = 0) -> Any:
    """Stack a list of TensorDicts, tensorclasses or tensors, one per time step; other data stay the same."""
    kinds: Any = (list, torch.Tensor) if isinstance(data, list) else (tuple,)  # a tuple of tensors is a pytree
    if not isinstance(data, kinds[0]) or not data or isinstance(data, torch.Size):
        return data
    if not all(isinstance(each, kinds[1:]) or is_tensor_collection(each) for each in data):
        return data
    if len({each.shape for each in data}) > 1:
        raise SchemaError(f"cannot stack steps of different batch sizes: {sorted({(*each.shape,) for each in data})}")
    try:
        return torch.stack(list(data), dim)
    except (RuntimeError, TypeError) as error:
        raise SchemaError(f"cannot stack the steps of a list: {error}") from None


def refuse_shape(data: TensorDictBase, lead: int) -> NoReturn:
    """Raise an error for data with too few batch dims; ``lead``: how many it must have."""
    if data.ndim:
        raise SchemaError(f"extend takes batch size [E, T] (lanes, time) with ndim={lead}, got {[*data.shape]}")
    shapes = {(*value.shape[:lead],) for _, value in walk(data) if isinstance(value, torch.Tensor)}
    (common,) = shapes if len(shapes) == 1 else ((),)
    what = "a single one: use add"
    if len(common) == lead:
        remedy = f"pass TensorDict(data, {[*common]}), or, if it is a single one, use add"
        what = f"a TensorDict without batch size, whose entries all have the leading dims {[*common]}: {remedy}"
    raise ValueError(f"extend takes several transitions, {'[n]' if lead == 1 else '[E, T]'}, got {what}")


def as_tensordict(storage: PackedStorage, data: Any, lead_dims: int) -> TensorDictBase:
    """Return data for ``storage``, of any class that it takes, as a TensorDict."""
    if type(data) is TensorDict:
        return data
    found, row_class = unwrap(stacked(data), lead_dims)
    if row_class is not None:
        storage.take_class(row_class)
    if not isinstance(found, TensorDictBase):
        raise TypeError(
            f"PackedStorage stores TensorDicts, tensorclasses and tensors, got {type(data).__name__}: {wrapping(data)}"
            ", or use torchrl.data.LazyTensorStorage, which takes pytrees"
        )
    return found


def enter(storage: PackedStorage) -> None:
    """Refuse or warn of the first change of rows that are not shared in a forked process."""
    if storage.shared_rows is None and storage.process != os.getpid():
        _enter_forked_process(storage, storage.all_rows())


def _enter_forked_process(storage: PackedStorage, rows: Rows) -> None:
    if rows.is_mapped:
        raise RuntimeError(
            f"this process was forked, and its parent writes to the same file of rows in {storage.scratch_dir}: "
            "share the buffer before forking (rb.share()), or give each process a folder of its own"
        )
    warnings.warn(
        "this process was forked from the one that made the buffer, which is not shared: rows that are written here "
        "stay here. Call rb.share() before forking; or, for rows of this process alone, use copy.deepcopy(rb) in it",
        stacklevel=2,
    )
    storage.process = os.getpid()


def admit(storage: PackedStorage, data: TensorDictBase, single: bool) -> Rows:
    """Return the rows; allocate them for ``data`` if this is the first write."""
    if storage.rows is None or storage.is_reserved:
        if storage.uses_episode_keys:
            refuse_inner(data.batch_size, storage.ndim - single, storage.ndim)
        if "index" in data.keys():  # some writers of TorchRL's add it
            refuse_other_index(data.get("index"))
            data = data.exclude("index")
        fix_rows(storage, data, storage.ndim - single)
    return storage.all_rows()


def fix_rows(storage: PackedStorage, data: TensorDictBase, lead_dims: int) -> None:
    """Allocate rows for ``data``; reserved rows are kept if they fit and released otherwise."""
    ndim = storage.ndim
    storage.refuse_closed()
    if data.batch_dims < lead_dims:
        raise SchemaError(
            f"a storage with ndim={ndim} takes TensorDicts with {lead_dims} or more batch dims here "
            f"(time, lanes), got batch size {tuple(data.batch_size)}"
        )
    if storage.row_class is not None:
        storage.row_class.refuse_other(data)
    if storage.lanes_wanted is not None and storage.lanes_wanted != data.batch_size[lead_dims - 1]:
        raise SchemaError(f"data of batch size {[*data.batch_size]} does not fit lanes={storage.lanes_wanted}")
    reserved, layout = storage.rows if storage.is_reserved else None, RowLayout(data, lead_dims)
    storage.refuse_layout(layout)
    dedup = DedupLayout.chosen_for(layout, storage.dedup_options, data if lead_dims == ndim else None)
    if reserved is not None:
        lead = data.batch_size[: lead_dims + 1 - ndim] + reserved.lanes
        refuse_unfit(data, reserved.layout.leaves, lead, more=True)
        if layout != reserved.layout or dedup != reserved.dedup:
            storage.release()
            reserved = None
    if reserved is None:
        lanes = data.batch_size[1 + lead_dims - ndim : lead_dims]
        device = None if data.device is None or data.device.type == "meta" else data.device
        storage.adopt(storage.make_rows(layout, lanes, device, dedup))
    storage.is_reserved = False


def refuse_apart(storage: PackedStorage) -> None:
    """Raise a RuntimeError if the lanes stand apart, so that no time step is the next one of all lanes."""
    if not storage.ring.together:
        raise RuntimeError(
            "the lanes stand at unlike steps, because single lanes were written: write with rb.extend, rb.add or "
            "storage.append, which continue each lane"
        )


class Beginning(int):
    """A lane whose next row begins an episode, because another actor takes the lane over."""


def as_lanes(storage: PackedStorage, lanes: Any, data: TensorDictBase) -> torch.Tensor:
    """Return a lane for each row of ``data``, ``[n]`` int64, from an int or from one lane per row.

    Raises:
        TypeError: lanes are not integers.
        ValueError: data or lanes have the wrong shape.
        IndexError: a single lane is out of range.
    """
    size = data.batch_size
    if not size or not size[0]:
        raise ValueError(f"lanes= takes rows of batch size [n], n at least 1, in time order, got {[*size]}")
    if isinstance(lanes, torch.Tensor) and lanes.is_cpu:
        address_of(lanes)  # refuses lanes without memory
    array = lanes.numpy(force=True) if isinstance(lanes, torch.Tensor) else np.asarray(lanes)
    if array.dtype.kind not in "iu":
        raise TypeError(f"lanes must be integers, one per row or one for all, got {array.dtype}")
    if array.size != 1 and array.shape != size[:1]:
        raise ValueError(f"lanes of shape {array.shape} for {size[0]} rows: pass one lane per row, or one for all")
    # In memory of its own: nobody can change the lanes after their range has been checked.
    return torch.from_numpy(np.full(size[0], array.reshape(-1) if array.size == 1 else array, np.int64))


def fix_lanes(storage: PackedStorage, data: TensorDictBase) -> None:
    """Allocate rows for the first write to single lanes; raise a ValueError if the number of lanes is unknown."""
    if storage.ndim != 2:
        raise ValueError(
            f"lanes= needs a storage [T, E], PackedStorage(max_size, ndim=2), this one has ndim={storage.ndim}"
        )
    if storage.rows is not None and not storage.is_reserved:
        return
    if storage.rows is None and storage.shared_rows is not None:
        storage.shared_rows.find()
    lanes = storage.lane_count
    if lanes is None:
        raise ValueError(
            "the number of lanes is not known before the first write: give it, PackedStorage(max_size, ndim=2, lanes=E)"
        )
    if data.ndim and len(data):
        fix_rows(storage, data[:1].exclude("index").squeeze(0).expand(lanes), 1)


def set_steps(
    storage: PackedStorage, cursor: Any, data: TensorDictBase, set_cursor: bool, then: Then | None = None
) -> None:
    single = isinstance(cursor, int | np.integer) or (isinstance(cursor, torch.Tensor) and not cursor.ndim)
    total = capacity_in_steps(storage, **{"single_data" if single else "batched_data": data})
    live = 0 if storage.rows is None else storage.written_rows().steps
    if set_cursor:
        refuse_apart(storage)
    steps = _as_steps(cursor, total, live, set_cursor)
    if not single and data.batch_size[:1] != steps.shape:
        raise SchemaError(f"data of batch size {tuple(data.batch_size)} cannot fill {len(steps)} positions")
    rows = admit(storage, data, single)
    lead = rows.lanes if single else steps.shape + rows.lanes
    follows = set_cursor and bool((steps == (steps[0] + np.arange(len(steps))) % total).all())
    if follows and then is None and (steps[0] == storage.ring.cursor or len(steps) >= total):
        rows.layout.collect(data, lead)  # refuses the data before anything changes
        if steps[0] != storage.ring.cursor:
            storage.restart_at(int(steps[0]))
        storage.advance(data, single=single, tells=False)
        return
    leaves = rows.layout.collect(data, lead)
    if not set_cursor:
        refuse_shared_keys(storage, storage.deduplicated)
    elif storage.dedup is not None:
        raise SchemaError(
            f"cannot write at step {steps[0]}: deduplicated rows are written in order, and the next step is "
            f"{storage.ring.cursor}; leave out share_next and frames to write anywhere"
        )
    cells = rows.cells_at(torch.from_numpy(steps))
    if single:
        leaves = [leaf[None] for leaf in leaves]
    if set_cursor:
        storage.scatter(torch.from_numpy(steps).to(rows.matrix.device), partial(rows.replace_, cells, leaves), then)
        return
    storage.refuse_holes(cells.reshape(-1))
    with _editing(storage):
        rows.replace_(cells, leaves)


@contextmanager
def _editing(storage: PackedStorage) -> Iterator[None]:
    """Edit rows in a ``with`` block: what is derived from them is then computed again."""
    enter(storage)
    try:
        yield
    finally:
        count_change(storage)


def replace(storage: PackedStorage, cursor: Any, data: TensorDictBase) -> None:
    rows = storage.written_rows()
    refuse_shared_keys(storage, storage.deduplicated)
    cells = rows.cells_of(cursor)
    storage.refuse_holes(cells.reshape(-1))
    leaves = rows.layout.collect(data, cells.shape)
    with _editing(storage):
        rows.replace_(cells, leaves)


def refuse_shared_keys(storage: PackedStorage, keys: Iterable[tuple[str, ...]]) -> None:
    """Raise a SchemaError if one of the keys is deduplicated, because other rows share its values."""
    shared = sorted(storage.deduplicated.keys() & {*keys})
    if shared:
        remedy = "leave it out of share_next and frames to edit it, or write new rows"
        raise SchemaError(f"cannot edit {show_key(shared[0])}, which is deduplicated: {remedy}")


def edit(storage: PackedStorage, change: Callable[[TensorDictBase], Any], region: Any = None) -> None:
    """Edit rows: ``change`` receives a TensorDict of rows and modifies it in place.

    ``region`` selects the rows like an index of a tensor ``[T, *lanes]``; ``None`` selects all written rows.

    Raises:
        IndexError: the region is out of range, or contains holes; nothing has been written.
        SchemaError: a deduplicated entry has changed; nothing has been written.
    """
    with storage.lock:
        rows = storage.written_rows()
        in_place = region is None and rows.dedup is None
        cells = rows.cells_of(slice(None) if region is None else region)
        flat = cells.reshape(-1)
        holes = None if region is not None else storage.ring.holes_among(flat)
        if region is not None:
            storage.refuse_holes(flat)
        if not in_place:
            data = rows.at_cells(flat).reshape(cells.shape)
            before = {key: data.get(key).clone() for key in storage.deduplicated}
            change(data)
            leaves = rows.layout.collect(data, cells.shape)
            refuse_shared_keys(storage, (key for key, old in before.items() if not _same_bytes(old, data.get(key))))
        with _editing(storage):
            if in_place:
                change(rows.view())
                rows.exported.write_back()
                if holes is not None:
                    rows.flat[flat[holes]] = 0
            elif holes is not None:
                rows.replace_(flat[~holes], [leaf.flatten(0, cells.ndim - 1)[~holes] for leaf in leaves])
            else:
                rows.replace_(cells, leaves)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    copies = (each.clone(memory_format=torch.contiguous_format) for each in (one, other))  # with strides of their own
    return torch.equal(*(each.flatten().view(torch.uint8) for each in copies))


def edit_all(storage: PackedStorage, change: Callable[[TensorDictBase], Any]) -> None:
    """Edit all rows in place with torch's in-place operations; an error in any entry changes nothing."""
    with storage.lock:
        if storage.written_rows().dedup is None:  # `edit` changes a copy of deduplicated rows
            change(storage.written_rows().view().apply(partial(torch.empty_like, device="meta"), device="meta"))
        edit(storage, change)


def edit_entries(storage: PackedStorage, cells: torch.Tensor, values: Mapping[tuple[str, ...], torch.Tensor]) -> None:
    """Set the entries ``values``, ``[B, ...]`` each, of the rows at flat indices ``cells``."""
    # The revision stays the same, so that a trajectory index does not read all rows again.
    refuse_shared_keys(storage, values)
    with storage.lock:
        rows = storage.written_rows()
        numbers = cells.cpu().numpy()
        if len(numbers) and numbers.max() >= rows.cells:
            raise IndexError(f"row {numbers.max()} is out of range: rows 0 to {rows.cells - 1} have been written")
        storage.refuse_holes(cells)
        enter(storage)
        numbers, leaves = last_of_each(numbers, [*values.values()])
        where, columns = torch.from_numpy(numbers).to(cells.device), rows.unpack(rows.matrix)
        for key, leaf in zip(values, leaves, strict=True):
            columns[key].flatten(0, len(rows.lanes)).index_copy_(0, where, leaf)


#: What to use instead of a sampler of TorchRL, by a part of its name.
_INSTEAD = {
    "Slice": 'SequenceSampler(UniformSampler(), n, boundary="strict")',
    "WithoutReplacement": "MinibatchSampler",
    "Prioritized": "ProportionalSampler",
}


def remedy_of_holes(storage: PackedStorage) -> str:
    """Say what to use if a buffer over the storage has a sampler of TorchRL that draws holes, otherwise ""."""
    samplers = [type(vars(each).get("_sampler")) for each in listeners_of(storage) if hasattr(each, "__dict__")]
    names = [kind.__name__ for kind in samplers if kind.__module__.startswith("torchrl.")]
    found = [name for name in names if name not in ("RandomSampler", "NoneType")]
    if not found:
        return ""
    instead = next((f"rlbuf_td.{ours}" for part, ours in _INSTEAD.items() if part in found[0]), "one of rlbuf_td")
    return f". TorchRL's {found[0]} draws such rows: use {instead}"
