"""The records that describe a buffer to the compiled functions in this folder."""

from typing import NamedTuple

import numpy as np

_NUMBERS = "row_bytes", "steps", "lanes", "leaves"
_ADDRESSES = (
    *("rows", "extents", "sources"),
    *("cursor", "write_count", "length", "revision", "last_cursor", "clock", "clock_last", "clock_by_row"),
    *("priorities", "alpha", "weighed_alpha", "largest", "boundaries", "seen", "loops"),
)
#: For writes: the shape of the rows (``lanes`` is 0 for ``[T]``), and addresses (0 for none). ``priorities`` points to
#: ``SumTree.addresses`` or ``ChunkedOrder.addresses``, ``boundaries`` to ``BitBoundaries.numbers``, ``alpha`` to the
#: exponent of a sum tree, and ``weighed_alpha`` to the exponent of the stored weights.
RING = np.dtype([(name, np.int64) for name in _NUMBERS + _ADDRESSES] + [("eps", np.float64)])
_SOURCES = "rows", "extents", "count", "pairs", "table", "flat", "uniform", "queue", "numbers", "clock", "loops"
#: For batches of ``count`` rows: the same shape, and addresses. ``leaves`` is 0 if another function reads the drawn
#: rows, and ``pairs`` is 1 if the index of a row is a pair (time step, lane), else 0. ``table`` points to ``addresses``
#: as ``priorities`` does, ``flat`` and ``uniform`` to scratch memory for ``count`` int64 and float64, and ``queue`` to
#: a ``QUEUE`` of fresh rows (0: none), which needs the storage's counters at ``numbers`` and ``clock``. ``loops``
#: points to ``rlbuf_td.kernels.batch.parallel_loops()`` if batches are large.
BATCH = np.dtype([(name, np.int64) for name in (*_NUMBERS, *_SOURCES)])


class Windows(NamedTuple):
    """The windows of a batch of sequences; outputs are addresses, of one element per row of the batch."""

    length: int
    burn_in: int
    shifts: bool
    bounds: np.ndarray  # for each window, the places of the first and the last row of its trajectory, [windows, 2]
    mask: int
    burn_in_mask: int
    anchor_index: int
