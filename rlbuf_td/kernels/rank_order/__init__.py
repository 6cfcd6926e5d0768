r"""Keeps rows in the order of their magnitudes ``|td_error|``: rank 1 is the largest,
and ties are ordered by row.

Magnitudes are float32: errors that are equal as float32 are a tie.

Ranks are drawn from ``P(r) = r^-alpha / H_N`` with
``H_n = 1 + 2^-alpha + ... + n^-alpha``. The first :data:`HEAD` values of ``H`` are
stored in a table. For larger ``n``, the Euler-Maclaurin formula has float64 accuracy;
its constant ``C`` is chosen so that the formula is exact at the end of the table:

.. math::

    H_n = C + \frac{x^{1-\alpha} - 1}{1-\alpha} + \frac{\alpha}{24} x^{-\alpha-1} + O(x^{-\alpha-3}), \quad
    x = n + \tfrac12

For ``alpha = 1``, the first fraction becomes ``log x``. The formula is inverted without
a search, so that the time to draw a rank does not depend on ``N``.

Two classes have the same methods: :class:`SortedOrder` sorts all rows when ranks are
needed, on any device, without host synchronisation. :class:`ChunkedOrder`, on the CPU,
keeps them sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import loop, record_of, uses_numba
from rlbuf_td.kernels.host_memory import advise_huge_pages, outside_inference_mode
from rlbuf_td.kernels.strata import BY_BATCH, BY_NONE, Stratification, masses
from rlbuf_td.kernels.sum_tree import magnitudes_of, write_magnitudes

#: Ranks whose cumulative mass is stored in a table.
HEAD = 1024

# -- the distribution of ranks


@dataclass(frozen=True)
class RankDistribution:
    """The distribution of ranks for one ``alpha``."""

    alpha: float  # not negative; 0 is uniform
    head: Tensor  # ``[HEAD]`` float64, ``H_1, H_2, ...``
    shift: float  # the constant ``C``

    @property
    def compiled(self) -> Ranks:
        return Ranks(self.alpha, self.shift, self.head.data_ptr())


class Ranks(NamedTuple):
    """A :class:`RankDistribution` for compiled loops."""

    alpha: float
    shift: float
    head: int  # its address


def rank_distribution(
    alpha: float, device: torch.device | str = "cpu"
) -> RankDistribution:
    """Return the distribution of ranks with probabilities proportional to ``rank **
    -alpha``."""
    head = cumulative(alpha, HEAD)
    x = torch.tensor(HEAD + 0.5, dtype=torch.float64, device="cpu")
    # An asynchronous copy is safe: drivers read memory that is not page-locked before
    # the call returns.
    return RankDistribution(
        alpha,
        head.to(device, non_blocking=True),
        float(head[-1] - _primitive(alpha, x)),
    )


def cumulative(alpha: float, n: int) -> Tensor:
    """Return the cumulative masses ``H_1 .. H_n``, ``[n]`` float64, by direct
    summation. O(n)."""
    return (
        torch.arange(1, n + 1, dtype=torch.float64, device="cpu").pow(-alpha).cumsum(0)
    )


def mass(distribution: RankDistribution, ranks: Tensor) -> Tensor:
    """Return the cumulative mass ``H_r = 1 + 2^-alpha + ... + r^-alpha`` of each rank
    ``r >= 1``, float64."""
    in_head = ranks <= HEAD
    # indexing by a 0-dim tensor would synchronise
    table = torch.take(distribution.head, torch.where(in_head, ranks, 1) - 1)
    x = torch.where(in_head, HEAD, ranks).to(torch.float64) + 0.5
    return torch.where(
        in_head, table, distribution.shift + _primitive(distribution.alpha, x)
    )


def ranks_of_mass(
    distribution: RankDistribution, value: Tensor, rows: Tensor
) -> Tensor:
    """Return for each ``value`` the rank ``r`` with ``H_(r-1) <= value < H_r`` (int64,
    at most ``rows``)."""
    in_head = torch.searchsorted(distribution.head, value, right=True) + 1
    y = (value - distribution.shift).clamp(min=0.0)
    bend = 1.0 - distribution.alpha
    if bend:
        y = torch.log1p((bend * y).clamp(min=-1.0)) / bend
    # Clamped before the conversion to integers, because rounding may lead past the last
    # rank.
    x = torch.exp(y).clamp(min=HEAD, max=2.0**52)
    beyond = (
        torch.floor(x - distribution.alpha / (24.0 * x) + 0.5)
        .to(torch.int64)
        .clamp(min=HEAD + 1)
    )
    return torch.minimum(torch.where(in_head <= HEAD, in_head, beyond), rows)


def _primitive(alpha: float, x: Tensor) -> Tensor:
    """Return the integral of ``t^-alpha`` from 1 to ``x``, plus the Euler-Maclaurin
    correction."""
    bend = 1.0 - alpha
    y = torch.log(x)
    return (torch.expm1(bend * y) / bend if bend else y) + alpha / 24.0 * x.pow(
        -alpha - 1.0
    )


# -- the order of rows


class SortedOrder:
    """Rows sorted by magnitude ``|td_error|``. After a change of magnitudes, a look-up
    sorts all rows, in O(N log N).

    The arguments of :meth:`update_` and :meth:`draw` are as in
    :mod:`rlbuf_td.kernels.sum_tree`.

    Args:
        magnitude: ``[capacity]`` float32, -1 for rows without a magnitude.
    """

    def __init__(self, magnitude: Tensor) -> None:
        #: With an element more, which `write_magnitudes` needs.
        self.magnitude = torch.cat((magnitude, magnitude.new_full((1,), -1.0)))
        self._is_sorted = False
        self._by_rank = self._count = magnitude.new_empty(0, dtype=torch.int64)
        self._by_row: Tensor | None = None
        with outside_inference_mode():
            # skipped TD errors, see update_
            self.refused = torch.zeros((), dtype=torch.int64, device=magnitude.device)

    def share_memory_(self) -> None:
        """Raise ValueError, because each process would cache a sorted order of its
        own."""
        raise ValueError(
            "a rank order on a device, or without numba, cannot be shared by several processes"
        )

    def assign_(self, magnitude: Tensor) -> None:
        self._is_sorted = False
        self.magnitude[: len(magnitude)] = magnitude

    def update_(self, index: Tensor, td_error: Tensor, rows: int) -> Tensor:
        self._is_sorted = False
        _, _, largest, refused = write_magnitudes(self.magnitude, index, td_error, rows)
        self.refused.add_(refused)
        return largest

    def _refresh(self) -> None:
        """Sort the rows again if a magnitude has changed."""
        if self._is_sorted:
            return
        # Stable, so that ties are ordered by row; rows without a magnitude, -1, come
        # last.
        self._by_rank = self.magnitude.sort(descending=True, stable=True).indices
        self._by_row = None
        self._count = (self.magnitude >= 0).sum()
        self._is_sorted = True

    def draw(
        self, distribution: RankDistribution, uniform: Tensor, law: Stratification
    ) -> tuple[Tensor, Tensor]:
        """Return drawn rows and importance weights, both ``[B]``, for ``[B]`` uniform
        numbers in ``[0, 1)``."""
        self._refresh()
        rows = self._count
        total = mass(distribution, rows)
        positions = masses(uniform, total, law.step)
        ranks = ranks_of_mass(distribution, positions, rows)
        # (N P)^-beta is r^(alpha beta) times a constant; the least probable rank has
        # the largest weight.
        power = distribution.alpha * law.beta
        last = ranks.max() if law.norm == BY_BATCH else rows
        weight = (ranks.to(torch.float64) / last).pow(power)
        if law.norm == BY_NONE:
            weight = weight * (
                last.to(torch.float64).pow(power) * (total / rows).pow(law.beta)
            )
        return self._by_rank[ranks - 1], weight.to(torch.float32)

    def ranks_of(self, index: Tensor) -> Tensor:
        """Return the ranks of rows, int64; 0 for a row without a magnitude."""
        self._refresh()
        if self._by_row is None:
            self._by_row = torch.empty_like(self._by_rank)
            self._by_row[self._by_rank] = torch.arange(
                1, len(self._by_rank) + 1, device=self._by_rank.device
            )
        return torch.where(self.magnitude[index] >= 0, self._by_row[index], 0)

    def count(self) -> Tensor:
        self._refresh()
        return self._count

    def check(self) -> None:
        """Do nothing: the order is made anew from the magnitudes."""


# The memory of a ChunkedOrder: all keys in ascending order, in a list of chunks. A key
# combines the magnitude and the row. A *chunk* c holds n <= WIDTH keys: keys[c, :n].
# The *list* has a position p for each chunk in use:
#
#     position p     0       1             2
#     first[p]       0       30            70      lower bound of the chunk's keys,
#                                                  above all earlier keys
#     chunk[p]       0       2             1       its number, by first use
#     size[p]        2       4             2       its number of keys
#     before[p]      0       2             6       keys in earlier chunks, counted by
#                                                  look-ups
#     keys           10 20   30 40 50 60   70 80
#
# A full chunk is split; chunks are never merged. When no unused chunk is left, all keys
# move to chunks that are three quarters full. This takes O(N), and happens at most once
# per N / 6 changed rows.
# Invariants: first[0] is 0. Behind the last position, `first` and `before` are NO_KEY,
# which a search never selects. :meth:`ChunkedOrder.check` checks them.
WIDTH = 128
ROOM = 96  # keys per chunk after a rearrangement
# the bits of -1.0, which marks rows without a magnitude; all other magnitudes are at
# least 0
ABSENT = -1082130432
NO_KEY = (1 << 63) - 1
#: Indices into ``head``: the numbers of rows, and of chunks in use, and whether
# ``before`` must be counted again.
ROWS, USED, CHANGED = range(3)
_NAMES = "head", "bits", "keys", "first", "chunk", "size", "before"
#: The numbers of rows, chunks and positions, and the addresses of the arrays.
ORDER = np.dtype(
    [(name, np.int64) for name in ("rows", "chunks", "positions", *_NAMES)]
)


def _allocate(capacity: int, device: str = "cpu") -> dict[str, Tensor]:
    """Return the tensors of an empty ChunkedOrder. Pages that are never written take no
    physical memory."""
    chunks = capacity // 64 + 8
    # more than chunks: a search reads up to the next power of 2
    positions = 1 << chunks.bit_length()
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "head": (torch.int64, (3,)),
        "bits": (torch.int32, (capacity,)),
        "keys": (torch.int64, (chunks, WIDTH)),
        "first": (torch.int64, (positions,)),
        "chunk": (torch.int32, (positions,)),
        "size": (torch.int32, (positions,)),
        "before": (torch.int64, (positions,)),
    }
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (dtype, shape) in shapes.items()
    }
    for tensor in tensors.values():
        advise_huge_pages(tensor)
    tensors["bits"].fill_(ABSENT)
    tensors["head"].zero_()[USED] = 1
    for name, beyond in (
        ("first", NO_KEY),
        ("before", NO_KEY),
        ("chunk", 0),
        ("size", 0),
    ):
        tensors[name].fill_(beyond)[0] = 0
    return tensors


class ChunkedOrder:
    """Rows that every update keeps sorted by magnitude ``|td_error|``, with the methods
    of :class:`SortedOrder`, except ``draw``, which is a loop.

    Cost: a draw takes O(B log N), and O(N / 96) if rows have changed since the last
    one. An update takes O(B (128 + log N)). At most once per N / 6 changed rows, an
    update also rearranges all rows, in O(N). The memory is 15 to 20 bytes per row.
    """

    refused = 0

    def __init__(self, magnitude: Tensor) -> None:
        self._adopt(_allocate(len(magnitude)))
        self._fill_with(magnitude)

    def _adopt(self, tensors: dict[str, Tensor]) -> None:
        """Use these tensors as the memory of the order."""
        shape = {
            "rows": len(tensors["bits"]),
            "chunks": len(tensors["keys"]),
            "positions": len(tensors["first"]),
        }
        record = record_of(
            ORDER,
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            **shape,
        )
        magnitude = tensors["bits"].view(torch.float32)
        address = record.ctypes.data
        # At once, because an interrupt may come: the record has addresses of the
        # tensors.
        self.tensors, self.addresses, self.address, self.magnitude = (
            tensors,
            record,
            address,
            magnitude,
        )
        self.lock = Lock()  # held around the loops, which release the GIL

    def _fill_with(self, magnitude: Tensor) -> None:
        """Set the magnitudes of the first rows, and order all rows anew; an order that
        had rows may be left without any."""
        self.magnitude[: len(magnitude)] = magnitude
        bits = self.tensors["bits"].numpy()
        rows = np.flatnonzero(bits >= 0)
        if len(rows) or self.count():
            keys = _keys_of(bits, rows)
            loop("rank_order.cpu", "arrange")(self.address, keys.ctypes.data, len(keys))

    def assign_(self, magnitude: Tensor) -> None:
        with self.lock:
            self._fill_with(magnitude)

    def share_memory_(self) -> None:
        self._adopt(
            {
                name: tensor.clone().share_memory_()
                for name, tensor in self.tensors.items()
            }
        )

    def update_(self, index: Tensor, td_error: Tensor, rows: int) -> float | Tensor:
        from rlbuf_td.kernels.rank_order import cpu

        with self.lock:
            return cpu.update(
                self.addresses, index.numpy(), magnitudes_of(td_error).numpy(), rows
            )

    def ranks_of(self, index: Tensor) -> Tensor:
        """Return the ranks of rows, int64; 0 for a row without a magnitude; IndexError
        if one is out of range."""
        last = len(self.magnitude) - 1
        index = index.contiguous()
        ranks = torch.empty(index.shape, dtype=torch.int64, device="cpu")
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) <= last:
            low = int(index.min())
            high = int(index.max())
            raise IndexError(
                f"row {low if low < 0 else high} is out of range: rows are 0 to {last}"
            )
        with self.lock:
            loop("rank_order.cpu", "ranks_of")(
                self.address, index.data_ptr(), len(index), ranks.data_ptr()
            )
        return ranks

    def count(self) -> Tensor:
        return self.tensors["head"][ROWS]

    def check(self) -> None:
        """Raise an AssertionError unless chunks and positions are as described
        above."""
        # counts the keys before each chunk
        self.ranks_of(torch.empty(0, dtype=torch.int64))
        head, bits, keys, first, chunk, size, before = (
            self.tensors[name].numpy() for name in _NAMES
        )
        used = int(head[USED])
        rows = np.flatnonzero(bits >= 0)
        stored = np.concatenate(
            [keys[c, :n] for c, n in zip(chunk[:used], size[:used], strict=True)]
        )
        ends = size[:used].cumsum()
        bounds = np.append(first[:used], NO_KEY)
        begins = ends - size[:used]
        position = np.repeat(np.arange(used), size[:used])
        faults = {
            "the number of rows": len(rows) != head[ROWS],
            "the keys of rows, in order": not np.array_equal(
                stored, _keys_of(bits, rows)
            ),
            "the sizes of chunks": (size[:used] < 0).any()
            or (size[:used] > WIDTH).any(),
            "the numbers of keys before each chunk": not np.array_equal(
                before[:used], begins
            ),
            "the places of chunks": sorted(chunk[:used]) != list(range(used)),
            "ascending bounds from 0": bounds[0] != 0
            or not (np.diff(bounds) > 0).all(),
            "keys within bounds": not (
                (bounds[position] <= stored) & (stored < bounds[position + 1])
            ).all(),
            "positions that are never entered": not (
                np.append(first[used:], before[used:]) == NO_KEY
            ).all(),
        }
        wrong = [name for name, is_wrong in faults.items() if is_wrong]
        if wrong:
            raise AssertionError(f"wrong in a rank order: {', '.join(wrong)}")

    def __getstate__(self) -> dict[str, Tensor | dict[str, Tensor]]:
        if get_spawning_popen() is not None and self.magnitude.is_shared():
            return {"tensors": self.tensors}
        with self.lock:
            return {"magnitude": self.magnitude.clone()}  # the rest is derived from it

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "tensors" in state:
            self._adopt(state["tensors"])
        else:
            self.__init__(state["magnitude"])


def _keys_of(bits: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the keys of rows in ascending order; see ``cpu.key_of``."""
    return np.sort((0x7FFFFFFF - bits[rows].astype(np.int64)) << 32 | rows)


RankOrder: TypeAlias = SortedOrder | ChunkedOrder


def make_order(magnitude: Tensor) -> RankOrder:
    """Return the rank order of rows with these magnitudes, ``[capacity]`` float32, -1
    for rows without a priority."""
    return (
        ChunkedOrder(magnitude)
        if uses_numba(magnitude.device)
        else SortedOrder(magnitude)
    )


def order_bytes(capacity: int, device: torch.device) -> int:
    if device.type != "cpu":
        return capacity * (4 + 2 * 8)  # magnitudes, rows by rank and ranks by row
    # shapes without memory
    return sum(tensor.nbytes for tensor in _allocate(capacity, "meta").values())
