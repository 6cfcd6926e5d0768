"""Continues the rows that an earlier process has left in a folder, see ``PackedStorage(reopen=True)``.

A *break* is a row after which a trajectory ends although no flag of the row says so: the newest row of a lane when the
rows were reopened, because the next row comes from an environment that was started anew. A break is a pair: its flat
index, and the count of the write clock, which tells when the row has been overwritten.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, cast

import torch

from rlbuf_td.storages.allocate import ROWS_FILE
from rlbuf_td.storages.lane_heads import NEWEST
from rlbuf_td.storages.shared.journal_file import JournalFile
from rlbuf_td.storages.shared.rows import share
from rlbuf_td.storages.state import heads_state, refuse_counters
from rlbuf_td.storages.write_clock import LAST, NOW, not_rewritten

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
    rows, clock = storage.all_rows(), storage.clock.numbers
    if not 0 <= len(storage) <= rows.cells:
        file.refuse(f"{len(storage)} rows do not fit a capacity of {rows.cells}")
    state = {"_len": len(storage), "last_cursor": storage.numbers[NEWEST], **heads_state(storage)}
    state["clock"] = {"capacity": rows.cells, "now": clock[NOW], "last": clock[LAST], "written": None}
    try:
        refuse_counters(state, torch.Size([len(storage) // prod(rows.lanes), *rows.lanes]), rows.steps)
    except ValueError as error:
        file.refuse(str(error))


def _breaks(storage: PackedStorage, earlier: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ``earlier`` breaks of rows that were not rewritten, and the newest row of each lane."""
    newest, count = storage.heads.read(storage)
    rows = storage.all_rows()
    found = dict(zip(not_rewritten(storage, earlier).tolist(), (stamp for _, stamp in earlier), strict=True))
    found.pop(-1, None)
    lanes = count.nonzero()[0]
    cells = newest[lanes] * prod(rows.lanes) + lanes
    return [*(found | dict.fromkeys(cells.tolist(), storage.clock.now)).items()]
