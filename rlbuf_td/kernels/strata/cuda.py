"""The GPU twin of :mod:`rlbuf_td.kernels.strata`."""

from __future__ import annotations

import triton
import triton.language as tl

from rlbuf_td.kernels import strata

FIRST = tl.constexpr(strata.FIRST)


@triton.jit
def masses(uniform, at, count, step, total, STRATIFIED: tl.constexpr):
    """Return the mass before the draws at ``at``."""
    value = tl.load(uniform + at, mask=at < count, other=0.0)
    if STRATIFIED:
        first = (tl.load(uniform) * FIRST).to(tl.int64)
        segment = (first + at.to(tl.int64) * step) % count
        value = (segment.to(tl.float64) + value) * (total / count)
    else:
        value = value * total
    return value
