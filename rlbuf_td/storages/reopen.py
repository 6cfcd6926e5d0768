"""Continues the rows that an earlier process has left in a folder, see ``PackedStorage(reopen=True)``.

A *break* is a row after which a trajectory ends although no flag of the row says so: the newest row of a lane when the
rows were reopened, because the next row comes from an environment that was started anew. A break is a pair: a lane
and a serial.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rlbuf_td.storages.allocate import ROWS_FILE
from rlbuf_td.storages.shared.journal_file import JournalFile
from rlbuf_td.storages.shared.rows import share

if TYPE_CHECKING:
    from pathlib import Path

    from rlbuf_td.storages.packed import PackedStorage


def reopen_rows(storage: PackedStorage) -> None:
    """Continue the rows that an earlier process has left in ``scratch_dir``; keep a journal for later processes."""
    folder = cast("Path", storage.scratch_dir)
    file = JournalFile(folder, folder / ROWS_FILE)
    try:
        share(storage, file)
        with storage.lock:  # maps the rows, and undoes a write during which the earlier process died
            if storage.rows is not None:
                _refuse_wrong_counters(storage, file)
                storage.reopened = len(storage) > 0
                file.breaks = storage.breaks = _breaks(storage, file.breaks)
        file.finish()
    except BaseException:
        file.close()
        raise


def _refuse_wrong_counters(storage: PackedStorage, file: JournalFile) -> None:
    try:
        storage.ring.check()
    except AssertionError as error:
        file.refuse(str(error))


def _breaks(storage: PackedStorage, earlier: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ``earlier`` breaks of rows that are live, and the newest row of each lane."""
    ring = storage.ring
    kept = [row for row in earlier if len(ring.live_cells([row]))]
    lanes = ring.count.nonzero()[0].tolist()
    return [*dict.fromkeys([*kept, *((lane, int(ring.written[lane]) - 1) for lane in lanes)])]
