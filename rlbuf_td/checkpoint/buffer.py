"""Whole buffers: dump and load. Everything is checked before anything changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torchrl.data.replay_buffers import RoundRobinWriter

from rlbuf_td.checkpoint import parts
from rlbuf_td.checkpoint.errors import CheckpointError
from rlbuf_td.checkpoint.folder import DATA, flat_bytes, sync_file
from rlbuf_td.checkpoint.journal import Journal, read_journal, undo_
from rlbuf_td.checkpoint.manifest import Stored
from rlbuf_td.checkpoint.reader import DumpReader, read_matrix
from rlbuf_td.checkpoint.resize import Fit, fit, resized_state, warn_dropped
from rlbuf_td.checkpoint.saving import bar, reading, write_state, writing
from rlbuf_td.checkpoint.state import decode
from rlbuf_td.checkpoint.writer import Source
from rlbuf_td.kernels.huge_pages import take_pages
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.allocate import ROWS_FILE
from rlbuf_td.storages.dedup.pooling import Pooling
from rlbuf_td.storages.dedup.rows import PooledRows
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.state import copy_rows, refuse_foreign, rows_of_state, saved_pooling
from rlbuf_td.writers.rollout import RolloutWriter

KIND = "buffer"
#: What a manifest with a right checksum and a wrong content can make the code below raise.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


@contextmanager
def _at_rest(rb: Any) -> Iterator[dict[str, Any]]:
    """Hold all locks of a buffer, and give what it has fetched ahead."""
    with rb._capture_prefetch_state(clone_queue=False) as prefetched, rb._write_lock:
        yield prefetched


def dump_buffer(rb: Any, path: str | Path, progress: bool | None = None, *, sync: bool = True) -> None:
    """See :meth:`rlbuf_td.ReplayBuffer.dumps`."""
    with writing(path, KIND, sync=sync) as writer, _at_rest(rb) as prefetched:
        state, tensors, sources = parts.capture(rb, prefetched), [], []
        storage, journal = rb._storage, None
        if isinstance(storage, PackedStorage) and "rows" in state["storage"]["state"]:
            if _is_own_folder(storage, writer.path):
                if sync:
                    sync_file(writer.path / ROWS_FILE)
                journal = _journal_of(storage._written(), writer.path / DATA / writer.new_name("undo"))
            tensors.append(state["storage"]["state"].pop("rows"))
            name = None if journal is None else journal.file.name
            sources.append(Source(storage._all_rows().matrix.nbytes, name))
            state["storage"]["rows"] = 0  # the first tensor
            if isinstance(storage._rows, PooledRows):
                entries, offsets = state["storage"]["state"].pop("entries"), storage._rows.sections.entries
                state["storage"]["entries"] = [*range(1, 1 + len(entries))]
                tensors += entries
                sources += [Source(x.nbytes, name, at) for x, at in zip(entries, offsets, strict=True)]
        write_state(writer, state, tensors, sources, progress)
        if isinstance(storage, PackedStorage) and journal is not None:
            storage.journal = journal


def _is_own_folder(storage: Any, path: Path) -> bool:
    return storage.scratch_dir is not None and storage.scratch_dir.resolve() == path.resolve()


def _journal_of(rows: Rows, file: Path, kept: Sequence[int] = ()) -> Journal:
    if isinstance(rows, PooledRows):
        step_bytes = rows.table.lanes * rows.pooling.own.row_bytes
        return Journal(file, rows.memory.numpy(), step_bytes, kept, rows.used)
    return Journal(file, flat_bytes(rows.matrix).numpy(), rows.nbytes // max(1, rows.steps), kept)


def load_buffer(
    rb: Any, path: str | Path, *, rows_only: bool = False, default_generator: bool = False, progress: bool | None = None
) -> None:
    """See :meth:`rlbuf_td.ReplayBuffer.loads`."""
    with reading(path, KIND) as reader:
        try:
            load = _Load(rb, reader, rows_only)
        except _MALFORMED as error:
            raise _told(reader, error) from error
        with bar("load", load.nbytes, progress) as report:
            load.verify(report)
            rb.synchronize()
            with rb._futures_lock:
                rb._clear_prefetch_queue_locked()
                with rb._replay_lock, rb._write_lock:
                    load.apply(report)
        if default_generator:
            parts.restore_default_generator(load.saved["default_generator"])
    warn_dropped(load.fit.dropped, load.fit.steps)


def _told(reader: DumpReader, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return CheckpointError(f"cannot load {reader.path}: {words}")


class _Load:
    """One load: the constructor compares the dump with the buffer; :meth:`apply` changes it.

    Raises:
        CheckpointError: the dump does not fit the buffer, or is damaged.
    """

    def __init__(self, rb: Any, reader: DumpReader, rows_only: bool) -> None:
        self.rb, self.reader, self.rows_only = rb, reader, rows_only
        state = reader.manifest.state
        names = ("sampler", "transform", "trajectories", "generator", "default_generator", "buffer", "writer")
        self.saved: dict[str, Any] = {name: decode(state[name], reader.read) for name in names}
        self.saved["storage"] = decode(state["storage"], reader.read)
        self.rows: Stored | None = None
        self.fit = Fit((), 0, True, 0)
        self.journal: Journal | None = None
        self.pooling: Pooling | None = None  # what the saved rows share, and what that is
        self.entries: list[Stored] = []
        self.is_fresh = False  # whether rows are to be made
        self._refuse_other_parts()
        if isinstance(rb._storage, PackedStorage):
            self._fit_rows(rb._storage)
        else:
            self._fit_content(rb._storage)
        rb._validate_prefetch_state(self._prefetched)
        parts.refuse_malformed(self.saved)

    @property
    def _stored(self) -> Stored:
        if self.rows is None:
            raise CheckpointError(f"{self.reader.path} holds no rows")
        return self.rows

    @property
    def _prefetched(self) -> dict[str, Any]:
        """What was fetched ahead, and TD errors that were on their way, as TorchRL takes it."""
        buffer = self.saved["buffer"]
        queue, learned = buffer["prefetched"], buffer.get("learned", ())
        return {"version": 1, "capacity": self.rb._prefetch_cap, "queue": queue, "learned": learned}

    @property
    def _tensors(self) -> list[Stored]:
        """The rows, and what they share."""
        return [self._stored, *self.entries]

    @property
    def nbytes(self) -> int:
        """How much there is to read."""
        return (2 - self._checks_later) * sum(stored.nbytes for stored in self._tensors) if self.rows else 0

    @property
    def _checks_later(self) -> bool:
        """Whether all rows go into memory that can be thrown away if one is damaged."""
        return self.fit.is_same and self.is_fresh and not self._is_in_place

    @property
    def _is_in_place(self) -> bool:
        """Whether the rows are to be used where they lie."""
        return self._stored.journal is not None and _is_own_folder(self.rb._storage, self.reader.path)

    def _refuse_other_parts(self) -> None:
        rb, saved = self.rb, self.saved
        pairs = [("storage", type(rb._storage).__name__), ("writer", parts.name_of(rb._writer))]
        if not self.rows_only:
            pairs.append(("sampler", parts.name_of(rb._sampler)))
        elif not isinstance(rb._writer, RoundRobinWriter):
            raise CheckpointError(f"rows_only needs a ring, this buffer has a {type(rb._writer).__name__}")
        for part, own in pairs:
            if saved[part]["class"] != own and not (part == "writer" and self.rows_only):
                hint = "; rows_only=True takes the rows alone" if part != "storage" else ""
                raise CheckpointError(f"the dump has a {saved[part]['class']} as {part}, this buffer a {own}{hint}")
        if saved["storage"]["ndim"] != rb._storage.ndim:
            raise CheckpointError(f"the dump has ndim={saved['storage']['ndim']}, this buffer {rb._storage.ndim}")

    # -- what fits

    def _fit_rows(self, storage: PackedStorage) -> None:
        saved = self.saved["storage"]
        state = saved["state"]
        # dumped before the first write: nothing, or the keys alone, which count only where there are none
        if "layout" not in state or (state.get("reserved") and storage._rows is not None):
            return
        self.rows = rows = self.reader.tensor(saved["rows"])
        lead, steps = rows.shape[:-1], int(saved["shape"][0])
        lanes = lead[1:]
        cursor = self.saved["writer"]["state"].get("_cursor")
        if not (rows.dtype.is_floating_point or rows.dtype is torch.uint8) or not 0 <= lead[0] <= steps:
            raise CheckpointError(f"rows of {rows.dtype} and shape {tuple(rows.shape)} are not those of a storage")
        if state["_len"] != prod(lead) or (cursor is not None and not 0 <= cursor < max(1, steps)):
            raise CheckpointError(
                f"{state['_len']} rows, cursor {cursor} and shape {tuple(lead)} contradict each other"
            )
        layout, _ = storage.admit_state(state | {"_len": 0, "full": False}, lanes)
        self.pooling = saved_pooling(layout, state)
        self.entries = [self.reader.tensor(number) for number in saved.get("entries", [])]
        self.is_fresh = storage._rows is None or storage._rows.layout != layout
        row_bytes = layout.row_bytes if self.pooling is None else self.pooling.own.row_bytes
        if rows.shape[-1] * rows.dtype.itemsize != row_bytes:
            raise CheckpointError("the layout of the rows does not fit their size")
        capacity = storage._steps(lanes) if storage._rows is None else storage._rows.steps
        self.layout, self.lanes, self.capacity = layout, lanes, capacity
        self.fit = fit(steps, capacity, lead[0], cursor)
        if not self.fit.is_same:
            self._move(self.fit, lanes)
        elif not self.rows_only:
            state = self.saved["sampler"]["state"]
            self.saved["sampler"]["state"] = resized_state(self.rb._sampler, state, None, capacity * prod(lanes), False)
        storage.admit_state(self.saved["storage"]["state"], lanes)

    def _move(self, fit: Fit, lanes: torch.Size) -> None:
        """Change what was saved to what it is in a storage of another capacity."""
        saved, writer = self.saved, self.saved["writer"]["state"]
        if isinstance(self.rb._writer, RolloutWriter) or "_generation" in writer:
            raise CheckpointError(
                f"the dump is of {saved['storage']['shape'][0]} time steps, this buffer of {self.capacity}: "
                "rollouts and tracked generations can be loaded into the same capacity only"
            )
        state = saved["storage"]["state"]
        kept, moved = fit.steps, fit.ranges != ((0, fit.steps),) or fit.dropped > 0
        last = kept - 1 if moved else state["last_cursor"]
        saved["storage"]["state"] = {name: state[name] for name in ("layout",)} | {
            "_len": kept * prod(lanes),
            "full": kept == self.capacity,
            "last_cursor": last,
            "reserved": state.get("reserved", False),
        }
        saved["writer"]["state"] = writer | {"_cursor": kept % self.capacity}
        saved["trajectories"] = [each | {"state": {}} for each in saved["trajectories"]]
        saved["buffer"] |= {"prefetched": (), "learned": ()} if moved else {}
        if not self.rows_only:
            cells = self.capacity * prod(lanes)
            state = saved["sampler"]["state"]
            rows = fit.rows(prod(lanes))
            saved["sampler"]["state"] = resized_state(self.rb._sampler, state, rows, cells, moved)

    def _fit_content(self, storage: Any) -> None:
        saved = self.saved["storage"]
        if saved["max_size"] != storage.max_size:
            raise CheckpointError(
                f"the dump has max_size={saved['max_size']}, this {type(storage).__name__} {storage.max_size}: "
                "only a PackedStorage can be loaded into another capacity"
            )
        if len(storage) or getattr(storage, "initialized", False):
            parts.refuse_other_content(storage.state_dict(), saved["state"])

    # -- reading and changing

    def verify(self, report: Any) -> None:
        """Compare the files of the rows with their checksums, unless that is done while new rows are read."""
        if self.rows is not None and not self._checks_later:
            self.reader.verify(self._tensors, report)

    def apply(self, report: Any) -> None:
        """Change the buffer, or (if a part refuses its state) nothing."""
        rb, saved, rollback = self.rb, self.saved, parts.Rollback()
        fresh = self._fresh_rows(report) if self.rows is not None and self.is_fresh else None
        try:
            if not self.rows_only:
                if rb.episode_stats is not None and saved["buffer"]["stats"] is not None:
                    rollback.load(rb.episode_stats, saved["buffer"]["stats"])
                rollback.load(rb._writer, saved["writer"]["state"])
                rollback.load(rb._transform, saved["transform"])
            if not isinstance(rb._storage, PackedStorage):
                rollback.load_storage(rb._storage, saved["storage"]["state"])
                rb._storage._set_last_cursor(saved["storage"]["last_cursor"])
            if not self.rows_only:
                rollback.load(rb._sampler, saved["sampler"]["state"])
            if isinstance(rb._storage, PackedStorage):
                self._put_rows(rb._storage, fresh, report)
        except BaseException as error:
            rollback.undo()
            if isinstance(error, _MALFORMED):
                raise _told(self.reader, error) from error
            raise
        self._finish()

    def _finish(self) -> None:
        """Restore what cannot fail any more."""
        rb, saved = self.rb, self.saved
        if self.rows_only:
            rb._writer._cursor = saved["writer"]["state"].get("_cursor", 0)
            rb._writer._write_count = saved["writer"]["state"].get("_write_count", 0)
        else:
            rb._batch_size = saved["buffer"]["batch_size"]
            rb._consume_after_n_samples = saved["buffer"]["consume_after_n_samples"]
            parts.restore_generator(rb, saved["generator"])
            rb._restore_prefetch_queue_locked(self._prefetched, clone_queue=False)
        parts.load_trajectories(rb._storage, saved["trajectories"])
        rb._choose_path()
        if rb._replays is not None:
            replays = saved["buffer"]["replays"]
            rb._replays.restore(replays if self.fit.is_same and not self.rows_only else None)
        if self.rows_only:
            rb._sampler._empty()
            rb._let_rows_in()

    def _fresh_rows(self, report: Any) -> Rows:
        """Return new rows with the content of the dump; in the dump's own folder, the file that is there."""
        storage, rows = self.rb._storage, self._stored
        if rows.journal is not None and self._is_in_place:
            return self._open_in_place(storage, rows, rows.journal)
        if storage.is_reserved and (storage.scratch_dir is not None or storage.offload):  # no room for both
            storage._release()
        made = storage._make_rows(self.layout, self.lanes, None, storage.pooling_like(self.layout, self.pooling))
        if storage.scratch_dir is None:
            take_pages(made.first(self.fit.steps).matrix)
        try:
            self._read_rows(made, report)
        except BaseException:
            if storage.scratch_dir is not None:
                (storage.scratch_dir / ROWS_FILE).unlink()
            raise
        return made

    def _open_in_place(self, storage: PackedStorage, rows: Stored, journal: str) -> Rows:
        if not self.fit.is_same:
            raise CheckpointError(
                f"{self.reader.path} is the storage's own folder, and its rows can only be used where they lie with "
                f"the capacity that they were dumped with, {self.saved['storage']['shape'][0]} time steps"
            )
        if self.pooling != storage.pooling_like(self.layout, self.pooling):
            raise CheckpointError(
                f"{self.reader.path} is the storage's own folder, and its rows can only be used where they lie by a "
                "storage that shares observations and frames as they do"
            )
        opened = storage.map_rows(self.layout, self.lanes, self.pooling)
        live = opened.first(rows.shape[0])
        file = self.reader.path / DATA / journal
        blocks, _ = read_journal(file)
        if isinstance(opened, PooledRows) and self.pooling is not None:
            undo_(opened.memory.numpy(), 0, blocks)
            refuse_foreign(self.pooling, live.matrix, self.entries)
            opened.take_in([stored.shape[0] for stored in self.entries])
            self.journal = _journal_of(opened, file, sorted(blocks))
            return opened
        undo_(flat_bytes(live.matrix).numpy(), 0, blocks)
        self.journal = _journal_of(live, file, sorted(blocks))
        return opened

    def _put_rows(self, storage: PackedStorage, fresh: Rows | None, report: Any) -> None:
        if self.rows is None:
            return storage._empty()
        if fresh is not None:
            storage._adopt(fresh)
            storage.journal = self.journal
        elif storage._rows is not None:
            storage._about_to_write(storage._rows, 0, storage._rows.steps)
            self._read_rows(storage._rows, report)
        storage.restore_counters(self.saved["storage"]["state"])

    def _read_rows(self, rows: Rows, report: Any) -> None:
        if self.pooling is not None or isinstance(rows, PooledRows):
            return self._read_shared(rows, report)
        data, at = flat_bytes(rows.matrix), 0
        step = rows.nbytes // rows.steps
        for first, count in self.fit.ranges:
            target = data[at * step : (at + count) * step]
            self.reader.read_into(self._stored, first * step, target, report, check=True)
            at += count

    def _read_shared(self, rows: Rows, report: Any) -> None:
        """Put saved rows in place where they, or the storage's, share what repeats."""
        matrix = read_matrix(self.reader, self._stored, report)
        if self.pooling is not None:
            refuse_foreign(self.pooling, matrix, self.entries)
        used = [stored.shape[0] for stored in self.entries]
        if isinstance(rows, PooledRows) and self.fit.is_same and rows.takes(self.pooling, used):
            for entries, stored in zip(rows.room_for(used), self.entries, strict=True):
                self.reader.read_into(stored, 0, flat_bytes(entries), report, check=True)
            rows.matrix[: len(matrix)].copy_(matrix)
            rows.take_in(used)
        else:
            entries = [read_matrix(self.reader, stored, report) for stored in self.entries]
            copy_rows(rows_of_state(self.layout, matrix, self.pooling, entries), rows, self.fit.ranges)
