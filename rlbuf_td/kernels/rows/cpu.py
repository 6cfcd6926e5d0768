"""The loop of :mod:`rlbuf_td.kernels.rows`."""

import numpy as np
from numba import types

from rlbuf_td.kernels.compiled import kernel, load

_PAGE = 4096
_SAMPLED = 16  # about this number of rows of a batch are checked
_mincore = types.ExternalFunction(
    "mincore", types.int64(types.int64, types.int64, types.int64)
)


@kernel
def is_absent(base, stride, cells, count):
    """Whether one of about ``_SAMPLED`` rows in ``cells`` is not in memory and must be
    read from the disk."""
    pages = np.zeros(1, np.uint8)
    step = max(1, count // _SAMPLED)
    for i in range(0, count, step):
        page = (base + load(cells + 8 * i, np.int64) * stride) // _PAGE * _PAGE
        pages[0] = 1
        _mincore(page, np.int64(_PAGE), np.int64(pages.ctypes.data))
        if load(np.int64(pages.ctypes.data), np.uint8) & 1 == 0:
            return True
    return False
