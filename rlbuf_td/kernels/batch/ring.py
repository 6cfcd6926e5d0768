"""What :func:`rlbuf_td.kernels.batch.cpu.write_ring` knows of a buffer."""

from __future__ import annotations

import numpy as np

_NUMBERS = "row_bytes", "steps", "lanes", "leaves"
_ADDRESSES = (
    *("rows", "extents", "sources"),
    *("cursor", "write_count", "length", "revision", "last_cursor", "clock", "clock_last", "clock_by_row"),
    *("tree", "order", "alpha", "weighed_alpha", "largest", "boundaries", "seen"),
)
#: The shape of its rows (``lanes``: 0 for ``[T]``) and the addresses of its parts and counters. ``tree`` or ``order``
#: points to the ``addresses`` of its priorities, ``boundaries`` to ``BitBoundaries.numbers``; 0 if there are none.
RING = np.dtype([(name, np.int64) for name in _NUMBERS + _ADDRESSES] + [("eps", np.float64)])
