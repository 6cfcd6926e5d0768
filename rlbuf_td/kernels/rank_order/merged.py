"""The order on CUDA: sorted keys, into which every change is merged.

Why merging: an update gives new places to a few hundred rows among a million, and to sort all magnitudes for that moves
every one of them several times. Selecting ranks by passes over histograms needs no order and leaves an update nothing
to do, but reads all magnitudes for every digit of a key, at each draw. A merge reads every key once and writes it once,
ties or none, and a draw is a look-up. Which is fastest is for a GPU to say: ``python -m rlbuf_td bench --device cuda``
times all three, this order, the one that sorts, and :class:`~rlbuf_td.cli.bench.selected_order.SelectedOrder`, where
it is
counted what each of them moves.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import path_of
from rlbuf_td.kernels.rank_order import as_float32
from rlbuf_td.kernels.rank_order import reference as _rank_torch
from rlbuf_td.kernels.rank_order.device import DeviceOrder, gpu_twin
from rlbuf_td.kernels.rank_order.law import RankLaw

#: Greater than every key, where there is none.
NONE = 2**63 - 1
SIDE, COUNT = range(2)  # of the state
_ROW = 2**32 - 1
#: Batches of more than this share of all rows are sorted in: their two lists are half as long as all keys then, and to
#: sort and merge them takes as long as to sort everything.
_SHARE = 1 / 4


class MergedOrder(DeviceOrder):
    """Rows in the order of their magnitudes, exact after every change; nothing is ever due.

    Has the methods of :class:`~rlbuf_td.kernels.rank_order.RankOrder`, on a device. All that kernels need lies in
    memory that stays, so that captured graphs change and read the same order as calls between their replays.

    Keys are int64 and ascend with the ranks: inverted magnitude in the high half, row in the low one. There are two
    halves; a change reads one and fills the other, and the device knows which is current.

    Invariants (:meth:`check_valid`): the current half holds the key of every row that has a magnitude, ascending, and
    both hold :data:`NONE` from there on. The number of keys grows only, but where everything is sorted.

    Args:
        magnitude: ``[capacity]`` float32, -1 for rows without; owned by the order from now on.

    Cost: an update or a fill of ``B`` rows sorts ``2 B`` keys and reads and writes those of all ``N`` rows that have a
    magnitude, 16 bytes each; more than a quarter of the capacity are sorted in, O(N log N). A draw is O(B). 24 bytes
    a row. Counted, not timed: an update and a draw of 256 of 1e6 rows move 16 MB in about six launches (1 writes
    magnitudes, 3 sort, 1 merges, 1 draws); a radix sort of the magnitudes with their rows moves some 100 MB.
    """

    def __init__(self, magnitude: Tensor) -> None:
        super().__init__(magnitude)
        self._keys = torch.empty(2, len(magnitude), dtype=torch.int64, device=magnitude.device)
        self._state = torch.zeros(2, dtype=torch.int64, device=magnitude.device)
        self._sort()

    def assign_(self, magnitude: Tensor) -> None:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.assign_`. O(N log N)."""
        self._is_whole = False
        self._replace(magnitude)
        self._sort()

    def _sort(self) -> None:
        """Make both halves anew of the magnitudes."""
        self._keys.copy_(keys_of(self._magnitude).sort().values)
        self._state[COUNT].copy_((self._magnitude >= 0).sum())
        self._is_whole = True

    def _mend(self) -> None:
        """Sort if the host was interrupted between the launches of a change: only magnitudes are right then."""
        if not self._is_whole:
            self.on_device.claims.fill_(-1)
            self._sort()

    def update_(self, index: Tensor, td_error: Tensor, rows: int, counts: bool = True) -> Tensor:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.update_`. O(N + B log B)."""
        self._mend()
        self._is_whole = False
        lists = self._lists_for(index.shape[0])
        largest = self._write(index, td_error, rows, counts, None if lists is None else (self._state, lists))
        if lists is None:
            self._sort()
        else:
            removed, added = lists.sort().values
            self._merge(removed, added)
        return largest

    def fill_(self, start: int, count: int, magnitude: float | Tensor) -> None:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.fill_`. O(N + count log count)."""
        if count < 1:
            return
        self._mend()
        entry = magnitude
        if not isinstance(entry, Tensor):
            entry = torch.full((), entry, dtype=torch.float64, device=self._magnitude.device)
        self._is_whole = False
        lists = self._lists_for(count)
        if lists is None:
            self._magnitude[start : start + count] = as_float32(entry)
            self._sort()
        else:
            merging().fill(self._magnitude, start, count, entry, self._state, lists)
            self._merge(lists[0].sort().values, lists[1])  # equal magnitudes come in the order of their rows

    def _lists_for(self, count: int) -> Tensor | None:
        """Return memory for the keys that so many mentions exchange, ``None`` where all keys are to be sorted."""
        if path_of(self._magnitude) != "triton" or count > _SHARE * len(self._magnitude):
            return None
        return torch.empty(2, count, dtype=torch.int64, device=self._magnitude.device)

    def _merge(self, removed: Tensor, added: Tensor) -> None:
        merging().merge(self._keys, self._state, removed, added)
        self._is_whole = True

    def draw(
        self, law: RankLaw, uniform: Tensor, *, stratified: bool, beta: float, norm: str | None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.draw`. O(B)."""
        self._mend()
        if path_of(uniform) == "triton":
            self.on_device.take(law, beta)
            return gpu_twin().draw(self.on_device, uniform, self._keys, self._state, stratified, norm)
        rows = self._state[COUNT]
        ranks, weight = _rank_torch.draw_ranks(law, rows, uniform, stratified=stratified, beta=beta, norm=norm)
        return torch.where(rows > 0, self._of_current(self._keys[:, ranks - 1]) & _ROW, 0), weight

    def ranks_of(self, index: Tensor) -> Tensor:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.ranks_of`. O(B log N)."""
        self._mend()
        key = keys_of(self._magnitude[index], index)
        below = torch.searchsorted(self._keys, key.repeat(2, 1))
        return torch.where(key == NONE, 0, self._of_current(below) + 1)

    def _of_current(self, halves: Tensor) -> Tensor:
        """Return of two things that have been found in two halves the one in the current half."""
        return torch.where(self._state[SIDE] == 0, halves[0], halves[1])

    def count(self) -> Tensor:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.count`. O(1)."""
        self._mend()
        return self._state[COUNT]

    def check_valid(self) -> None:
        """Raise an AssertionError unless every internal invariant holds; for tests. O(N log N)."""
        side, count = self._state.tolist()
        if not (self._is_whole and side in (0, 1) and count == int((self._magnitude >= 0).sum())):
            raise AssertionError(f"the state is {side}, {count}")
        if not torch.equal(self._keys[side], keys_of(self._magnitude).sort().values):
            raise AssertionError("the current half is not that of sorting")
        if not bool((self._keys[1 - side, count:] == NONE).all()):
            raise AssertionError("the other half has keys beyond the rows that there are")


def keys_of(magnitude: Tensor, row: Tensor | None = None) -> Tensor:
    """Return keys that ascend with falling magnitude, then with the row.

    Args:
        magnitude: ``[n]`` float32; -1 is :data:`NONE`, -0.0 is 0.0.
        row: ``[n]`` int64, below 2**32; by default 0, 1, ...

    Example:
        >>> keys_of(torch.tensor([0.5, 2.0, 0.5, -1.0])).argsort()
        tensor([1, 0, 2, 3])
    """
    if row is None:
        row = torch.arange(len(magnitude), device=magnitude.device)
    bits = ~magnitude.view(torch.int32) & 0x7FFFFFFF  # without the sign
    return torch.where(magnitude >= 0, bits.to(torch.int64) << 32 | row, NONE)


@cache
def merging() -> ModuleType:
    """Return the kernels that merge, imported (and compiled, or read from disk) on first use."""
    from rlbuf_td.kernels.rank_order import merge_cuda as _rank_merge_triton

    return _rank_merge_triton
