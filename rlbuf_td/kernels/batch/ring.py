"""The dtypes of the records that describe a buffer to the compiled functions in this folder."""

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
_SOURCES = "rows", "extents", "count", "table", "flat", "uniform", "queue", "numbers", "clock", "loops"
#: For batches of ``count`` rows: the same shape, and addresses. ``table`` points to ``addresses`` as ``priorities``
#: does, ``flat`` and ``uniform`` to scratch memory for ``count`` int64 and float64, and ``queue`` to a ``QUEUE`` of
#: fresh rows (0: none), which needs the storage's counters at ``numbers`` and ``clock``. ``loops`` points to
#: ``rlbuf_td.kernels.batch.parallel_loops()`` if batches are large.
BATCH = np.dtype([(name, np.int64) for name in (*_NUMBERS, *_SOURCES)])
