"""The CPU twin of :mod:`rlbuf_td.kernels.strata`."""

from __future__ import annotations

import numpy as np
from numba import njit

from rlbuf_td.kernels.strata import FIRST


@njit(cache=True, nogil=True, error_model="numpy")
def masses(uniform, total, step, out):
    """Put the mass before each draw into ``out``, which may be ``uniform``; ``step``: see ``step_of``."""
    batch = uniform.shape[0]
    if step == 0:
        for j in range(batch):
            out[j] = uniform[j] * total
        return
    width = total / batch
    segment = np.int64(uniform[0] * FIRST) % batch
    for j in range(batch):
        out[j] = (segment + uniform[j]) * width
        segment += step
        if segment >= batch:
            segment -= batch
