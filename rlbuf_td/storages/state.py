"""Pickling, copies and ``state_dict`` of a :class:`~rlbuf_td.PackedStorage` (argument ``storage``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from rlbuf_td.kernels.host_memory import alias_of
from rlbuf_td.storages.allocate import allocate_bytes, make_rows, steps_for
from rlbuf_td.storages.checks import saved_number, state_of
from rlbuf_td.storages.dedup import DedupLayout, saved_dedup
from rlbuf_td.storages.entries import Sections
from rlbuf_td.storages.episodes import refuse_episodes
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.ring import Ring, extents, refuse_ring, saved_serials
from rlbuf_td.storages.row_class import RowClass
from rlbuf_td.storages.rows import PlainRows, Rows
from rlbuf_td.storages.rows.dedup import DedupRows
from rlbuf_td.storages.schema import SchemaError
from rlbuf_td.storages.torchrl_parts import count_change, empty_part, is_full, listeners_of
from rlbuf_td.storages.writes import begin_load, refuse_schema

if TYPE_CHECKING:
    from rlbuf_td.storages.packed import PackedStorage

_RING_FILE = "ring.json"


def snapshot(storage: PackedStorage) -> dict[str, Any]:
    """Return :meth:`PackedStorage.state_dict` with views of the rows instead of copies."""
    rows = storage.rows
    storage.refuse_closed()
    if rows is None:
        return {"_len": 0}
    shared = (
        {}
        if rows.dedup is None
        else {"pooled": rows.dedup.state(), "entries": [alias_of(entries) for entries in rows.used_entries()]}
    )
    return shared | {
        "_len": len(storage),
        "full": is_full(storage),
        "reserved": storage.is_reserved,
        "ring": storage.ring.state(),
        "episodes": None if storage.episodes is None else storage.episodes.saved(storage.ring.longest),
        "layout": rows.layout.state(),
        "rows": storage.written_rows().given,
        "row_class": None if storage.row_class is None else storage.row_class.state(),
    }


def load(storage: PackedStorage, state: dict[str, Any]) -> None:
    with state_of(storage):
        admitted = examine(storage, state)
    if admitted is None:
        return empty_part(storage)
    layout, lanes, dedup = admitted
    matrix, entries, rows = state["rows"], state.get("entries", []), storage.rows
    if rows is not None and matrix.data_ptr() == rows.matrix.data_ptr():  # a snapshot of this storage
        return storage.restore_counters(state)
    if rows is not None and rows.layout != layout:
        storage.release()
    if storage.rows is None:
        storage.adopt(make_rows(storage, layout, lanes, matrix.device, dedup_for(storage, layout, dedup)))
    rows = storage.all_rows()
    begin_load(storage)
    if rows.takes(dedup, [len(found) for found in entries]):
        rows.restore_(matrix, entries)
    else:
        source = rows_of_state(layout, matrix, dedup, entries)
        rows.copy_steps_(source, [(0, len(matrix))], saved_serials(state["ring"], rows.steps))
    storage.restore_counters(state)


def save_ring(storage: PackedStorage, path: str | Path) -> None:
    """Save the serials of the rows, which TorchRL's checkpointer omits."""
    saved = storage.ring.state()
    Path(path, _RING_FILE).write_text(json.dumps({"steps": saved["steps"], "head": saved["head"].tolist()}))


def saved_ring(storage: PackedStorage, path: str | Path) -> dict[str, Any]:
    """Check the numbers in a dump of TorchRL's checkpointer, and return the :meth:`Ring.state` of its rows.

    TorchRL's dumps of other storages have no such file; of a full storage, the writer's file tells the newest row.
    """
    with state_of(storage):
        shape = TensorDict.load_memmap(path).batch_size[: storage.ndim]
        length = json.loads(Path(path, "storage_metadata.json").read_text())["len"]
        saved_number("len", length, 0, shape.numel())
        lead, file = torch.Size([length // max(1, prod(shape[1:])), *shape[1:]]), Path(path, _RING_FILE)
        if file.exists():
            found = json.loads(file.read_text())
            state = {"steps": found["steps"], "head": torch.tensor(found["head"]), "generations": None}
        else:
            before, beside = Ring(shape[0], prod(shape[1:])), Path(path).parent / "writer" / "metadata.json"
            before.advance(slice(None), lead[0])
            if lead[0] == shape[0] and beside.exists():  # of TorchRL's buffer
                cursor = json.loads(beside.read_text())["cursor"]
                before.advance(slice(None), saved_number("cursor", cursor, 0, shape[0]))
            state = before.state()
        refuse_ring(state, lead)
        _refuse_resized_lanes(state, steps_for(storage, shape[1:]))
    return state


def load_ring(storage: PackedStorage, saved: dict[str, Any]) -> None:
    """Restore what :func:`saved_ring` has returned, and end trajectories as after any load."""
    storage.ring.load(saved, storage.all_rows().matrix.device)
    storage.load_episodes(None)
    if not storage.in_time_order:
        storage.tell_lost_order()
    storage.ring.finish()
    end_trajectories(storage)


def end_trajectories(storage: PackedStorage) -> None:
    """After a load, end unfinished trajectories that have ids, because new collectors and recorders reuse the ids."""
    if storage.episodes is not None:
        storage.episodes.end_for_load()
    for each in listeners_of(storage):
        if hasattr(each, "mark_load"):
            each.mark_load()


def examine(storage: PackedStorage, state: dict[str, Any]) -> tuple[RowLayout, torch.Size, DedupLayout | None] | None:
    """Check a state, and return the layout, lanes and deduplication of its rows; None if it has no rows to load."""
    if "layout" not in state:
        if state.keys() != {"_len"}:  # the state before the first write
            raise ValueError(
                f"this is not the state of a PackedStorage (it holds {', '.join(map(repr, state))}): load it into "
                "a buffer with a storage of its own kind, and use ReplayBuffer.from_torchrl(buffer)"
            )
        return None
    if state.get("reserved", False) and storage.rows is not None:
        return None
    matrix = state["rows"]
    layout, lanes = admit_state(storage, state, matrix.shape[1:-1])
    dedup = saved_dedup(layout, state)
    capacity = steps_for(storage, lanes)
    refuse_counters(state, matrix.shape[:-1])
    _refuse_resized_lanes(state["ring"], capacity)
    row_bytes = layout.row_bytes if dedup is None else dedup.stored.row_bytes
    if matrix.shape[-1] * matrix.itemsize != row_bytes:
        raise SchemaError(f"the saved rows take {matrix.shape[-1] * matrix.itemsize} bytes each, expected {row_bytes}")
    if dedup is not None:
        refuse_foreign(dedup, matrix, state.get("entries", []), has_holes=has_holes(state))
    return layout, lanes, dedup


def refuse_counters(state: dict[str, Any], lead: torch.Size) -> None:
    """Raise a ValueError if the counters of a state do not fit saved rows of shape ``[steps, *lanes]``."""
    saved_number("_len", state["_len"], prod(lead), prod(lead))
    refuse_ring(state["ring"], lead)
    refuse_episodes(state.get("episodes"), prod(lead[1:]), lead[0])


def _refuse_resized_lanes(ring: dict[str, Any], capacity: int) -> None:
    """Raise a ValueError if lanes that stand apart, some full or with gaps, were saved with another capacity."""
    tail, written, _ = ring["head"]
    saved = ring["steps"]
    begins_later = bool(((written - tail == saved) | (tail % saved > 0)).any())
    if saved != capacity and begins_later and not stand_together(ring):
        raise ValueError(
            f"lanes that stand apart, up to {saved} time steps, were saved with a capacity of {saved} time steps, not "
            f"{capacity}; rb.dumps and rb.loads transfer the newest ones of each lane into another capacity"
        )


def stand_together(ring: dict[str, Any]) -> bool:
    """Whether the lanes of a saved ring have as many rows, their next rows go to the same slot, without holes."""
    tail, written, _ = ring["head"]
    count = written - tail
    is_unlike = (count != count[0]).any() or ((written - written[0]) % ring["steps"]).any()
    return not is_unlike and int(extents(tail, written, ring["steps"])[0]) == int(count[0])


def has_holes(state: dict[str, Any]) -> bool:
    """Whether cells of the saved time steps have no rows."""
    tail, written, _ = state["ring"]["head"]
    return bool((written - tail != extents(tail, written, state["ring"]["steps"]).max()).any())


def dedup_for(storage: PackedStorage, layout: RowLayout, saved: DedupLayout | None) -> DedupLayout | None:
    """Return the saved layout of deduplicated rows, or choose one; None if the storage does not deduplicate."""
    if storage.dedup_options and saved is not None:
        return DedupLayout(layout, saved.chosen)
    return DedupLayout.chosen_for(layout, storage.dedup_options)


def admit_state(storage: PackedStorage, state: dict[str, Any], lanes: torch.Size) -> tuple[RowLayout, torch.Size]:
    """Return layout and lanes of saved rows; refuse rows that do not fit the storage."""
    layout, rows = RowLayout.from_state(state["layout"]), storage.rows
    refuse_schema(storage, layout)
    may_get_more = rows is not None and storage.is_reserved and set(rows.layout.leaves) <= set(layout.leaves)
    if rows is not None and layout != rows.layout and not may_get_more:
        raise SchemaError("the saved rows have other keys, dtypes or shapes than this storage")
    if len(lanes) != storage.ndim - 1 or (rows is not None and lanes != rows.lanes):
        own = tuple(rows.lanes) if rows is not None else f"of a storage with ndim={storage.ndim}"
        remedy = "copy lane after lane into other lanes, rb.extend(old.lane(e).chronological(), lanes=e)"
        raise ValueError(f"saved rows of lanes {tuple(lanes)} do not fit lanes {own}: {remedy}")
    capacity = steps_for(storage, lanes) * prod(lanes)
    if state["_len"] > capacity or (state["full"] and state["_len"] != capacity):
        raise ValueError(
            f"{state['_len']} rows of a {'full ' if state['full'] else ''}buffer do not fit "
            f"a capacity of {capacity}; rb.dumps and rb.loads transfer the newest ones that fit into another capacity"
        )
    return layout, lanes


def restore_counters(storage: PackedStorage, state: dict[str, Any]) -> None:
    """Restore the counters. If this storage has had rows, updates skip all batches that were sampled before."""
    storage.is_reserved = state.get("reserved", False)
    storage.row_class = RowClass.of_state(state.get("row_class"))
    storage.ring.load(state["ring"], storage.all_rows().matrix.device)
    count_change(storage)
    storage.load_episodes(state.get("episodes"))
    if not storage.in_time_order:
        storage.tell_lost_order()
    storage.ring.finish()


def describe(storage: PackedStorage) -> str:
    name, rows = type(storage).__name__, storage.rows
    if rows is None:
        return f"{name}(max_size={storage.max_size}, ndim={storage.ndim}, device={storage.device}, empty)"
    place = str(rows.matrix.device)
    if storage.shared or storage.scratch_dir is not None:
        place = "shared memory" if storage.shared else "mapped file"
    saved = sum(storage.saved_bytes.values())
    place += f", {saved / 2**20:,.1f} MiB saved by deduplication" * (saved != 0)
    lines = (
        f"    {leaf.name}: {str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
        + " (deduplicated)" * (leaf.key in storage.deduplicated)
        for leaf in rows.layout.leaves
    )
    head = f"{name}({len(storage):,} of {storage.max_size:,} rows, shape {tuple(rows.shape)}, "
    head += f"{rows.layout.row_bytes} bytes per row, {rows.nbytes / 2**20:,.1f} MiB, {place}"
    return "\n".join((head, *lines, ")"))


def refuse_foreign(
    dedup: DedupLayout, matrix: torch.Tensor, entries: Sequence[Any], *, has_holes: bool = False
) -> None:
    """Raise a SchemaError if saved rows and ``entries`` differ in layout, or a name in a row has no entry.

    The names in holes, in lanes with fewer rows than others, are 0.
    """
    rows = matrix.reshape(-1, matrix.shape[-1]).view(torch.uint8)
    groups = dedup.groups
    fits = len(entries) == len(groups) and rows.shape[1] == dedup.stored.row_bytes
    for group, found in zip(groups, entries, strict=False):
        fits = fits and len(found.shape) == 2 and found.dtype is torch.uint8 and found.shape[1] == group.nbytes
        if fits and len(rows):
            names = rows.narrow(1, group.names_at, 4 * group.names).view(torch.int32)
            fits = int(names.min()) >= (not has_holes) and int(names.max()) <= found.shape[0]
    if not fits:
        raise SchemaError("the saved rows and the observations that they share do not belong together")


def rows_of_state(layout: RowLayout, matrix: torch.Tensor, dedup: DedupLayout | None, used: list[torch.Tensor]) -> Rows:
    if dedup is None:
        return PlainRows(layout, matrix.contiguous())
    lanes, steps = matrix.shape[1:-1], max(1, len(matrix))
    for group, found in zip(dedup.groups, used, strict=True):  # overwritten rows may have left entries
        steps = max(steps, -(-len(found) // (group.names * lanes.numel())))
    shape = torch.Size([steps, *lanes])
    sections = Sections.of(dedup, shape)
    memory = allocate_bytes(sections.total, torch.device("cpu"), sparse=(sections.likely, sections.fixed))
    rows = DedupRows(dedup, memory, shape)
    rows.restore_(matrix.cpu(), [found.cpu() for found in used])
    return rows.first(len(matrix))
