"""The records that describe a buffer to the compiled functions in this folder."""

import numpy as np

_NUMBERS = "row_bytes", "steps", "lanes", "leaves"
_ADDRESSES = (
    *("rows", "extents", "sources", "counts", "revision", "head"),
    *("priorities", "alpha", "weighed_alpha", "largest", "episodes", "goes_on"),
)
#: For writes: the shape of the rows (``lanes`` is 0 for ``[T]``), and addresses (0 for none). ``priorities`` points to
#: ``SumTree.addresses`` or ``ChunkedOrder.addresses``, ``episodes`` to an ``EPISODES`` record, ``alpha`` to the
#: exponent of a sum tree, and ``weighed_alpha`` to the exponent of the stored weights. ``head`` points to the block of
#: a ring, see :mod:`rlbuf_td.kernels.serials`, and ``counts`` to the numbers of a writer: the slot of the next row, the
#: write count, and two of a :class:`~rlbuf_td.storages.numbers.Planned`. If ``goes_on`` is not 0, the caller ends
#: the write, because listeners without compiled form follow.
RING = np.dtype([(name, np.int64) for name in _NUMBERS + _ADDRESSES] + [("eps", np.float64)])
#: For batches of ``count`` rows: the same shape, and addresses. ``serials`` points to the numbers of a ring, and
#: ``generations`` to the serial of each row if rows are out of order (0: serials follow from cells). ``stamped`` is 1
#: if batches have the serials of their rows.
BATCH = np.dtype([
    (name, np.int64) for name in (*_NUMBERS, "rows", "extents", "count", "serials", "generations", "stamped")
])  # fmt: skip

#: For updates of priorities: the shape of the rows, as above, and addresses. ``table`` points to ``addresses`` as
#: ``RING.priorities`` does; updates can raise the number at ``largest``. A sum tree needs ``weighed_alpha`` and
#: ``eps``, as in ``RING``.
UPDATE = np.dtype(
    [(name, np.int64) for name in ("steps", "lanes", "table", "serials", "generations", "largest", "weighed_alpha")]
    + [("eps", np.float64)]
)

#: For ``count`` windows of ``burn_in + length`` rows; ``shifts`` is 1 if windows may begin earlier. ``bounds`` points
#: to scratch memory, ``[count, 2]`` int64, for the places of the first and the last row of the trajectory in each
#: window, and ``flags`` to the leaf numbers and sizes of the flags "is_init", truncated and done, ``[3, 2]`` int64; a
#: size of 0 means that a flag is not stored. ``across`` is 1 if windows go on across the ends of episodes, and
#: ``adds_init`` if the rows then have no flag "is_init". ``own`` is the place of the masks among the targets.
WINDOWS = np.dtype([
    (name, np.int64)
    for name in ("count", "length", "burn_in", "shifts", "bounds", "flags", "across", "adds_init", "own")
])  # fmt: skip

#: For n-step transitions: ``taken`` and ``ends`` are addresses, of one int64 per row, for the number of steps of each
#: transition and for its last row.
ROOT, NEXT, REWARD = range(3)  # kinds of leaves: of the first row, of the last one, sums
STEPS = np.dtype([("n", np.int64), ("gamma", np.float64), ("taken", np.int64), ("ends", np.int64)])
