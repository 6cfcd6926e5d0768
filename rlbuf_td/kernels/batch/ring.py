"""The records that describe a buffer to the compiled functions in this folder."""

from typing import NamedTuple

import numpy as np

_NUMBERS = "row_bytes", "steps", "lanes", "leaves"
_ADDRESSES = (
    *("rows", "extents", "sources", "head", "episodes", "entries"),
    *("write_entries", "enter"),
)
#: For writes: the shape of the rows (``lanes`` is 0 for ``[T]``), and addresses (0 for
# none). ``sources`` points to the addresses of the data's leaves, ``head`` to the
# block of a ring, see :mod:`rlbuf_td.kernels.serials`, ``episodes`` to an ``EPISODES``
# record, and ``entries`` to a :class:`rlbuf_td.kernels.rows.entries.Stored`. The last
# two point to functions in ``write_cpu``: one stores deduplicated observations, one
# sets the priorities of new rows.
WRITE_RECORD = np.dtype([(name, np.int64) for name in _NUMBERS + _ADDRESSES])
#: For batches of ``count`` rows: the same shape, and addresses. ``serials`` points to
#: the numbers of a ring. ``stamped`` is 1 if batches have the serials of their rows.
BATCH = np.dtype([
    (name, np.int64) for name in (*_NUMBERS, "rows", "extents", "count", "serials", "stamped")
])  # fmt: skip

#: For updates of priorities: the shape of the rows, as above, and addresses. ``table``
# points to ``SumTree.addresses`` or ``ChunkedOrder.addresses``; updates can raise the
# number at ``largest``; new rows get it, or ``first`` if it is negative. Magnitudes
# are ``least`` or larger. A sum tree needs ``eps``, the exponent at ``alpha``, and that
# of the stored weights at ``weighed_alpha``.
UPDATE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "steps",
            "lanes",
            "table",
            "serials",
            "largest",
            "alpha",
            "weighed_alpha",
        )
    ]
    + [(name, np.float64) for name in ("eps", "first", "least")]
)

#: For ``count`` windows of ``burn_in + length`` rows; ``shifts`` is 1 if windows may
# begin earlier, ``across`` if they go on across the ends of episodes, and
# ``adds_init`` if the rows then have no flag "is_init". ``bounds`` points to scratch
# memory, ``[count, 2]`` int64, for the places of the first and the last row of the
# trajectory in each window, and ``flags`` to the numbers of targets and the sizes of
# the flags "is_init", truncated and done, ``[3, 2]`` int64; a size of 0 means that a
# flag is not stored. ``weight`` points to the weights of the anchors, float32, if it is
# not 0. : The other fields are numbers of targets.
WINDOWS = np.dtype([
    (name, np.int64)
    for name in (
        *("count", "length", "burn_in", "shifts", "across", "adds_init", "bounds", "flags", "weight"),
        *("mask", "burn_in_mask", "anchor_index", "priority_weight"),
    )
])  # fmt: skip

#: The kinds of leaves in an n-step transition: of the first row, of the last row, and
# sums.
ROOT, NEXT, REWARD = range(3)
#: For n-step transitions: ``taken`` and ``ends`` are addresses, of one int64 per row,
# for the number of steps of each transition and for its last row.
STEPS = np.dtype(
    [("n", np.int64), ("gamma", np.float64), ("taken", np.int64), ("ends", np.int64)]
)


class Updates(NamedTuple):
    """The rows of an update; numbers without a comment are addresses.

    The rows may be the anchors of windows of ``every`` rows: indices, TD errors and
    stamps are then those of a batch, and a row of a window counts as
    :class:`~rlbuf_td.kernels.wrappers.Windows` says.
    """

    index: int  # flat indices, or coordinates; a negative one is skipped
    td_error: int  # of each row
    # rows that are gone since they got their stamp are skipped; 0: there are no stamps
    stamp: int
    mask: int  # 0: there are no windows; ``every`` and ``eta`` are then 1
    burn_in_mask: int
    every: int  # the number of rows of a window
    eta: float  # the share of the largest TD error in the priority of a window
    in_pairs: bool  # whether the index has coordinates
    is_double: bool  # whether TD errors are float64, not float32
    count: int  # the number of rows
    written: int  # the number of cells that hold rows
    counts: bool  # whether TD errors can raise the number at ``UPDATE.largest``
