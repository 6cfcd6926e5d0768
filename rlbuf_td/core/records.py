"""Where the numbers of lanes and rows stand in memory: what the loops read."""

from __future__ import annotations

from typing import NamedTuple

#: Rows of ``Ring.head`` after those of :mod:`rlbuf_td.kernels.serials`: what a lane's next row continues (see
#: :mod:`rlbuf_td.core.episodes`): its steps since the episode began, or -1 for a break, and the id of the row before.
FOLLOWING, NAME = 3, 4
#: The two numbers of a row in ``Episodes.numbers``.
BACK, LEFT = range(2)
BREAK = -(1 << 31)  # the bit 31 of `back`
STEPS = (1 << 31) - 1  # the other bits


class Lanes(NamedTuple):
    """Addresses of ``Ring.head``, of its copy for a write, and of ``Episodes.numbers``, T and E."""

    head: int
    draft: int
    numbers: int
    steps: int
    lanes: int
