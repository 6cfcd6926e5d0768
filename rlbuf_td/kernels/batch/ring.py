"""Records that describe a buffer to the kernels of :mod:`rlbuf_td.kernels.batch`, passed by address."""

from __future__ import annotations

import numpy as np

_NUMBERS = "row_bytes", "steps", "lanes", "leaves"
_ADDRESSES = (
    *("rows", "extents", "sources"),
    *("cursor", "write_count", "length", "revision", "last_cursor", "clock", "clock_last", "clock_by_row"),
    *("priorities", "alpha", "weighed_alpha", "largest", "boundaries", "seen"),
)
#: For writes: the shape of the rows (``lanes``: 0 for ``[T]``) and the addresses of parts, settings and counters (0 for
#: none). ``priorities`` points to the ``addresses`` of a sum tree or an order of ranks, ``boundaries`` to
#: ``BitBoundaries.numbers``, ``alpha`` to the exponent of a sum tree, ``weighed_alpha`` to that of the stored weights.
RING = np.dtype([(name, np.int64) for name in _NUMBERS + _ADDRESSES] + [("eps", np.float64)])
_SOURCES = "rows", "extents", "count", "table", "flat", "uniform", "queue", "numbers", "clock"
#: For batches of ``count`` rows: the same numbers, and addresses. ``table`` points to the ``addresses`` of the
#: priorities, ``flat`` and ``uniform`` to scratch memory for ``count`` int64 and float64, and ``queue`` to a ``QUEUE``
#: of fresh rows (0: none), which needs the storage's counters at ``numbers`` and ``clock``.
BATCH = np.dtype([(name, np.int64) for name in (*_NUMBERS, *_SOURCES)])
