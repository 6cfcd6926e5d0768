"""What compiled loops read and change of a :class:`~rlbuf_td.storages.ring.Ring`: its
block of int64 numbers; and what kernels on a GPU are told of them."""

from __future__ import annotations

from typing import NamedTuple

#: Rows of ``Ring.head``, ``[4, E]``: the oldest live serial; the number of rows ever
#: written; and two rows from `FOLLOWING` on, what the next row of each lane continues,
#: see :mod:`rlbuf_td.kernels.episodes`.
TAIL, WRITTEN, FOLLOWING = range(3)
#: The first row, after those of the head, of the head after a write; and the row with
#: ``written`` before the write.
AFTER, BEFORE = 4, 8
#: The last words of the block: how many rows were ever written, and this number after
# the write; how many of them ``Ring.write_count`` leaves out; on how many rows a writer
# called its value network; of which `PUBLICATION` the rows have the estimates that this
# writer adds, see :class:`~rlbuf_td.writers.RolloutWriter`; how often rows have changed;
# whether the numbers of episodes must be built again before a look-up; how far a write
# has come; how often rows have been published or given up; and this number
# after the write.
(
    ROWS_WRITTEN,
    NEXT_ROWS_WRITTEN,
    UNCOUNTED,
    VALUE_ROWS,
    ESTIMATED,
    REVISION,
    EPISODES_STALE,
    DIRTY,
    PUBLICATION,
    NEXT_PUBLICATION,
) = range(-10, 0)
#: What `DIRTY` says: no write; rows are given up and new ones copied; new rows are
#: live, but who is told of them may not know.
IDLE, WRITING, PUBLISHED = range(3)


class Serials(NamedTuple):
    """The serials of the live rows of a ring in time order, the same in all lanes."""

    tail: int  # of the oldest row
    written: int  # of the row to write next
    steps: int  # slots of a lane
    lanes: int


def block_size(lanes: int) -> int:
    """Return how many numbers the block of a ring of ``lanes`` lanes has."""
    return (BEFORE + 1) * lanes - ROWS_WRITTEN
