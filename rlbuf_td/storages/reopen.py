"""Continues the rows that an earlier process has left in a folder, see ``PackedStorage(reopen=True)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rlbuf_td.storages.allocate import ROWS_FILE
from rlbuf_td.storages.shared.head_file import HeadFile
from rlbuf_td.storages.shared.rows import share

if TYPE_CHECKING:
    from pathlib import Path

    from rlbuf_td.storages.packed import PackedStorage


def reopen_rows(storage: PackedStorage) -> None:
    """Continue the rows that an earlier process has left in ``scratch_dir``."""
    folder = cast("Path", storage.scratch_dir)
    file = HeadFile(folder, folder / ROWS_FILE)
    try:
        share(storage, file)
        with storage.lock:  # maps the rows, and finishes or gives up a write during which the earlier process died
            if storage.rows is not None:
                _refuse_wrong_counters(storage, file)
                storage.reopened = len(storage) > 0
                if storage.episodes is not None:  # the next rows come from environments that were started anew
                    storage.episodes.end()
        file.finish()
    except BaseException:
        file.close()
        raise


def _refuse_wrong_counters(storage: PackedStorage, file: HeadFile) -> None:
    try:
        storage.ring.check()
    except AssertionError as error:
        file.refuse(str(error))
