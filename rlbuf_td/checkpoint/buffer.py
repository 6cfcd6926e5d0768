"""Dump and load whole buffers. Everything is checked before anything changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from torchrl.data.replay_buffers import RoundRobinWriter

from rlbuf_td.checkpoint import parts
from rlbuf_td.checkpoint.encoding import MALFORMED, CheckpointError, decode
from rlbuf_td.checkpoint.files import DumpReader, Report
from rlbuf_td.checkpoint.folder import progress_bar, reading, write_state, writing
from rlbuf_td.checkpoint.resize import Fit, resized_state, warn_dropped
from rlbuf_td.checkpoint.rows import SavedRows, split_rows
from rlbuf_td.storages import PackedStorage
from rlbuf_td.writers import RolloutWriter

KIND = "buffer"


def dump_buffer(rb: Any, path: str | Path, progress: bool | None = None, *, sync: bool = True) -> None:
    """Save a buffer; see :meth:`rlbuf_td.ReplayBuffer.dumps`."""
    with (
        writing(path, KIND, sync=sync) as writer,
        rb._capture_prefetch_state(clone_queue=False) as prefetched,  # holds TorchRL's locks
        rb._write_lock,
    ):
        state = parts.capture(rb, prefetched)
        write_state(writer, state, split_rows(state["storage"]), progress)


def load_buffer(
    rb: Any, path: str | Path, *, rows_only: bool = False, default_generator: bool = False, progress: bool | None = None
) -> None:
    """Load a buffer; see :meth:`rlbuf_td.ReplayBuffer.loads`."""
    with reading(path, KIND) as reader:
        with _explained(reader):
            load = _Load(rb, reader, rows_only)
        with progress_bar("load", load.rows.nbytes if load.rows else 0, progress) as report:
            if load.rows:
                load.rows.verify(report)
            rb.synchronize()
            with rb._futures_lock:
                rb._clear_prefetch_queue_locked()
                with rb._replay_lock, rb._write_lock, _explained(reader):
                    load.apply(report)
        if default_generator:
            parts.restore_default_generator(load.saved["default_generator"])
    if load.rows:
        warn_dropped(load.rows.fit)


@contextmanager
def _explained(reader: DumpReader) -> Iterator[None]:
    """Turn errors that a state of the wrong form causes into a CheckpointError that names the dump."""
    try:
        yield
    except CheckpointError:
        raise
    except MALFORMED as error:
        words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"cannot load {reader.path}: {words}") from error


class _Load:
    """One load: the constructor compares the dump with the buffer; :meth:`apply` changes the buffer.

    Raises:
        ValueError: the dump does not fit the buffer; also the other errors in ``MALFORMED``.
    """

    def __init__(self, rb: Any, reader: DumpReader, rows_only: bool) -> None:
        self.rb, self.rows_only = rb, rows_only
        self.saved: dict[str, Any] = {name: decode(part, reader.read) for name, part in reader.manifest.state.items()}
        self.rows: SavedRows | None = None
        storage, saved = rb._storage, self.saved["storage"]
        self._refuse_other_parts()
        if not isinstance(storage, PackedStorage):
            parts.refuse_other_storage(storage, saved)
        # A dump from before the first write holds no rows; one of a reserved storage holds keys, which matter only
        # to a storage that has none.
        elif "layout" in saved["state"] and not (saved["state"].get("reserved") and storage.rows is not None):
            cursor = self.saved["writer"]["state"].get("_cursor")
            self.rows = SavedRows(reader, saved, storage, cursor)
            self._resize(self.rows)
            storage.admit_state(saved["state"], self.rows.lanes)
        rb._validate_prefetch_state(self._prefetched)
        parts.refuse_malformed(self.saved)

    @property
    def _prefetched(self) -> dict[str, Any]:
        """Prefetched batches and pending TD errors, in TorchRL's form."""
        buffer = self.saved["buffer"]
        return {"version": 1, "capacity": self.rb._prefetch_cap, "queue": buffer["prefetched"]}

    def _refuse_other_parts(self) -> None:
        rb, saved = self.rb, self.saved
        own = {"storage": type(rb._storage).__name__}
        if not self.rows_only:
            own |= {"writer": parts.name_of(rb._writer), "sampler": parts.name_of(rb._sampler)}
        elif not isinstance(rb._writer, RoundRobinWriter):
            raise CheckpointError(f"rows_only needs a ring, this buffer has a {type(rb._writer).__name__}")
        for part, name in own.items():
            if saved[part]["class"] != name:
                hint = "; rows_only=True takes the rows alone" if part != "storage" else ""
                raise CheckpointError(f"the dump has a {saved[part]['class']} as {part}, this buffer a {name}{hint}")
        if saved["storage"]["ndim"] != rb._storage.ndim:
            raise CheckpointError(f"the dump has ndim={saved['storage']['ndim']}, this buffer {rb._storage.ndim}")

    def _resize(self, rows: SavedRows) -> None:
        """Convert the saved states to the capacity of this buffer."""
        fit, saved, lanes = rows.fit, self.saved, prod(rows.lanes)
        if not fit.is_same:
            self._refuse_tied_to_capacity(rows.capacity)
        if not self.rows_only:
            moved = None if fit.is_same else fit.rows(lanes)
            state, capacity = saved["sampler"]["state"], rows.capacity * lanes
            saved["sampler"]["state"] = resized_state(self.rb._sampler, state, moved, capacity, fit.moves)
        if not fit.is_same:
            self._resize_others(fit, lanes, rows.capacity)

    def _refuse_tied_to_capacity(self, capacity: int) -> None:
        if isinstance(self.rb._writer, RolloutWriter) or "_generation" in self.saved["writer"]["state"]:
            raise CheckpointError(
                f"the dump is of {self.saved['storage']['shape'][0]} time steps, this buffer of {capacity}: "
                "rollouts and tracked generations can be loaded into the same capacity only"
            )

    def _resize_others(self, fit: Fit, lanes: int, capacity: int) -> None:
        saved = self.saved
        state = saved["storage"]["state"]
        saved["storage"]["state"] = {
            "layout": state["layout"],
            "_len": fit.steps * lanes,
            "full": fit.steps == capacity,
            "last_cursor": fit.steps - 1 if fit.moves else state["last_cursor"],
            "reserved": state.get("reserved", False),
        }
        saved["writer"]["state"] |= {"_cursor": fit.steps % capacity}
        saved["trajectories"] = [each | {"state": {}} for each in saved["trajectories"]]
        if fit.moves:
            saved["buffer"] |= {"prefetched": ()}

    def apply(self, report: Report) -> None:
        """Change the buffer; if a part refuses its state, change nothing."""
        rb, saved, rollback = self.rb, self.saved, parts.Rollback()
        allocated = self.rows.allocated(report) if self.rows is not None else None
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
            if self.rows is not None:
                self.rows.put(allocated, report)
                rb._storage.restore_counters(saved["storage"]["state"])
            elif isinstance(rb._storage, PackedStorage):
                rb._storage._empty()
        except BaseException:
            rollback.undo()
            raise
        self._finish()

    def _finish(self) -> None:
        """Restore everything that cannot fail any more."""
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
            same = not self.rows_only and (self.rows is None or self.rows.fit.is_same)
            rb._replays.restore(saved["buffer"]["replays"] if same else None)
        if self.rows_only:
            rb._sampler._empty()
            rb._let_rows_in()
