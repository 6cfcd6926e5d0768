r"""The distribution of ranks: ``P(r) = r^-alpha / H_N`` with ``H_n = 1 + 2^-alpha + ... + n^-alpha``.

The first :data:`HEAD` values of ``H`` are stored in a table. For larger ``n``, the Euler-Maclaurin formula has float64
accuracy; its constant ``C`` is chosen so that the formula is exact at the end of the table:

.. math::

    H_n = C + \frac{x^{1-\alpha} - 1}{1-\alpha} + \frac{\alpha}{24} x^{-\alpha-1} + O(x^{-\alpha-3}), \quad
    x = n + \tfrac12

For ``alpha = 1``, the first fraction becomes ``log x``. The formula is inverted without a search, so that the time to
draw a rank does not depend on ``N``. None of the functions waits for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: Ranks whose cumulative mass is stored in a table.
HEAD = 1024


@dataclass(frozen=True)
class RankLaw:
    """The distribution of ranks for one ``alpha``."""

    alpha: float  # not negative; 0 is uniform
    head: Tensor  # ``[HEAD]`` float64, ``H_1, H_2, ...``
    shift: float  # the constant ``C``

    @property
    def compiled(self) -> Ranks:
        return Ranks(self.alpha, self.shift, self.head.data_ptr())


class Ranks(NamedTuple):
    """A :class:`RankLaw` for compiled loops; ``head`` is an address."""

    alpha: float
    shift: float
    head: int


def rank_law(alpha: float, device: torch.device | str = "cpu") -> RankLaw:
    head = cumulative(alpha, HEAD)
    x = torch.tensor(HEAD + 0.5, dtype=torch.float64, device="cpu")
    # An asynchronous copy is safe: drivers read memory that is not page-locked before the call returns.
    return RankLaw(alpha, head.to(device, non_blocking=True), float(head[-1] - _primitive(alpha, x)))


def cumulative(alpha: float, n: int) -> Tensor:
    """Return the cumulative masses ``H_1 .. H_n``, ``[n]`` float64, by direct summation. O(n)."""
    return torch.arange(1, n + 1, dtype=torch.float64, device="cpu").pow(-alpha).cumsum(0)


def mass(law: RankLaw, ranks: Tensor) -> Tensor:
    """Return the cumulative mass ``H_r = 1 + 2^-alpha + ... + r^-alpha`` of each rank ``r >= 1``, float64."""
    in_head = ranks <= HEAD
    table = torch.take(law.head, torch.where(in_head, ranks, 1) - 1)  # indexing by a 0-dim tensor would synchronise
    x = torch.where(in_head, HEAD, ranks).to(torch.float64) + 0.5
    return torch.where(in_head, table, law.shift + _primitive(law.alpha, x))


def ranks_of_mass(law: RankLaw, value: Tensor, rows: Tensor) -> Tensor:
    """Return for each ``value`` the rank ``r`` with ``H_(r-1) <= value < H_r`` (int64, at most ``rows``)."""
    in_head = torch.searchsorted(law.head, value, right=True) + 1
    y, bend = (value - law.shift).clamp(min=0.0), 1.0 - law.alpha
    if bend:
        y = torch.log1p((bend * y).clamp(min=-1.0)) / bend
    # Clamped before the conversion to integers, because rounding may lead past the last rank.
    x = torch.exp(y).clamp(min=HEAD, max=2.0**52)
    beyond = torch.floor(x - law.alpha / (24.0 * x) + 0.5).to(torch.int64).clamp(min=HEAD + 1)
    return torch.minimum(torch.where(in_head <= HEAD, in_head, beyond), rows)


def _primitive(alpha: float, x: Tensor) -> Tensor:
    """Return the integral of ``t^-alpha`` from 1 to ``x``, plus the Euler-Maclaurin correction."""
    bend, y = 1.0 - alpha, torch.log(x)
    return (torch.expm1(bend * y) / bend if bend else y) + alpha / 24.0 * x.pow(-alpha - 1.0)
