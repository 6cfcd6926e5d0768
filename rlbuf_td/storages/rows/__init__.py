"""Rows in memory, and how they are read and written. Nothing here depends on TorchRL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.kernels.batch import gather_leaves
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.host_memory import alias_of, to_device
from rlbuf_td.kernels.rows import ask_for_rows, row_words
from rlbuf_td.kernels.rows.words import ELSEWHERE, LAST_ROW, ROW, WIDE
from rlbuf_td.storages.dedup import DedupLayout
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.tensordict_fast import leaf_of, set_entries_
from rlbuf_td.storages.writes import as_integers, is_mask

if TYPE_CHECKING:
    from rlbuf_td.kernels.rows.triton import RowWords
    from rlbuf_td.kernels.wrappers.records import Sums

#: Rows in fewer runs are copied run by run.
_MOST_RUNS = 4
_NO_STEP = "position {} is out of range: {} time steps are stored, which rb.extend or rb.add continues"
_NO_LANE = "lane {} is out of range: there are {} lanes"


class Rows:
    """Rows of shape ``[T, *lanes]`` in a byte matrix ``[T, *lanes, row_bytes]``.

    The flat index of a row is ``t * E + e`` for step ``t`` and lane ``e`` of ``E``.
    Negative time steps count from the end. On the CPU, an index out of range raises an
    IndexError. Only :meth:`view`, :meth:`at_region`, :meth:`column` and
    :meth:`used_entries` may return views. Methods that write do not check the leaves.
    """

    # the layout of deduplicated rows; None for other rows
    dedup: DedupLayout | None = None
    # whether the rows lie in a file; reads then request all pages that they need at
    # once
    is_mapped = False

    def __init__(self, layout: RowLayout, matrix: torch.Tensor) -> None:
        self.layout = layout  # layout of whole rows, as in batches
        # offset and size in bytes of each leaf in a stored row; size 0: not stored
        # there
        self.extents = layout.extents
        self.use(matrix)
        self.exported = ExportedViews(self.matrix)
        #: Copies rows on a GPU; None elsewhere.
        self.words = row_words(self.extents, matrix)
        # copies n-step transitions, whose rewards have this key
        self._joins: dict[tuple[str, ...], RowWords] = {}

    def use(self, matrix: torch.Tensor) -> None:
        """Make ``matrix`` the memory of the rows: ``[T, *lanes, width]`` in the dtype
        :attr:`RowLayout.carrier`."""
        self.matrix, self.flat = matrix, matrix.view(-1, matrix.shape[-1])
        self.shape = matrix.shape[:-1]
        self.steps = self.shape[0]
        self.lanes = self.shape[1:]
        self.cells = prod(self.shape)

    @property
    def is_launched(self) -> bool:
        """Whether kernels on a GPU read and write the rows."""
        return self.words is not None and backend_of(self.matrix) == "triton"

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    @property
    def given(self) -> torch.Tensor:
        """An alias of :attr:`matrix` for views that users receive, so that no call on a
        view moves the rows."""
        return self.exported.tensor().narrow(0, 0, self.steps)

    def first(self, steps: int) -> Rows:
        rows = object.__new__(type(self))
        vars(rows).update(vars(self))  # three times as fast as copy.copy
        rows.use(self.matrix.narrow(0, 0, steps))
        return rows

    def ask_for(self, cells: torch.Tensor) -> None:
        """Ask the operating system for the pages of the rows at flat indices ``[B]``,
        if the rows lie in a file."""
        ask_for_rows(self.flat, cells)

    def leaves_at(self, cells: torch.Tensor) -> list[torch.Tensor]:
        """Return every leaf, ``[*cells.shape, ...]``, of the rows at flat indices
        ``cells`` (int64, not negative)."""
        if self.is_mapped:
            self.ask_for(cells.reshape(-1))
        if self.words is not None and self.is_launched:
            block = self.words.read(self.flat, cells.reshape(-1).contiguous())
            return self.layout.slices(block, cells.shape)
        # one kernel: leaves are views of one block
        if backend_of(self.matrix) != "numba":
            rows = self.flat.index_select(0, cells.reshape(-1))
            columns = self.layout.columns(rows.view(*cells.shape, rows.shape[1]))
            # without what autograd knows: each may be changed in place
            return [column.data for column in columns]
        leaves = self.layout.blank(cells.shape, self.matrix.device)
        gather_leaves(self.flat, cells.contiguous(), self.layout.extents, leaves)
        return leaves

    def pack_(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the rows at flat indices ``[B]`` to ``out``, ``[B, width]``."""
        if self.is_mapped:
            self.ask_for(flat)
        torch.index_select(self.flat, 0, flat, out=out)

    def at_cells(self, cells: torch.Tensor) -> TensorDict:
        return self.layout.wrap(
            self.leaves_at(cells), cells.shape, self.matrix.device, {}
        )

    def joined_at(self, cells: torch.Tensor, last: torch.Tensor) -> TensorDict:
        """Return the rows at flat indices ``cells``, with ``"next"`` taken from the
        rows at flat indices ``last``."""
        batch = self.at_cells(cells)
        set_entries_(batch, {"next": self.at_cells(last).get("next")})
        return batch

    def summed_at(
        self,
        cells: torch.Tensor,
        key: tuple[str, ...],
        sum_rewards: Callable[[torch.Tensor], Sums],
    ) -> tuple[TensorDict, torch.Tensor]:
        """Return n-step transitions, and their numbers of rewards, on a GPU.

        ``sum_rewards`` writes the sums of the rewards ``key`` to their leaf, and returns
        the last rows, whose ``"next"`` the batch has.
        """
        layout = self.layout
        words = self._joins.get(key)
        if words is None:
            sources = [
                LAST_ROW if leaf.key[0] == "next" else ROW for leaf in layout.leaves
            ]
            sources[layout.places[key]] = ELSEWHERE
            words = cast("RowWords", row_words(self.extents, self.matrix, sources))
            self._joins[key] = words
        block = words.allocate(len(cells))
        leaves = layout.slices(block, cells.shape)
        sums = sum_rewards(leaves[layout.places[key]])
        words.join(self.flat, cells, sums.ends, block)
        batch = layout.wrap(leaves, cells.shape, self.matrix.device, {})
        return batch, sums.taken

    def unpack(self, matrix: torch.Tensor) -> TensorDict:
        """Return a TensorDict of strided views of ``matrix``, a matrix of rows, without
        deduplicated keys."""
        return self.layout.unpack(matrix)

    def view(self) -> TensorDict:
        """Return all rows as a TensorDict of strided views of :attr:`given`, without
        deduplicated keys."""
        return self.unpack(self.given)

    def at_region(self, index: Any) -> TensorDict:
        """Index the rows like a tensor ``[T, *lanes]``; slices give views, except of
        deduplicated keys."""
        return cast("TensorDict", self.view()[index])

    def column(self, path: tuple[str, ...]) -> Any:
        """Return the values of one key in all rows, or a TensorDict if ``path`` names a
        nested level."""
        return self.view()[path]

    def column_at(self, key: tuple[str, ...], cells: torch.Tensor) -> torch.Tensor:
        """Return a copy of one key of the rows at flat indices of any shape."""
        return leaf_of(self.view(), key).flatten(0, len(self.lanes))[cells]

    def append_(
        self, cells: np.ndarray, leaves: list[torch.Tensor], head: np.ndarray
    ) -> None:
        """Write rows at flat indices, ``[B]`` without repetitions, those of each lane
        in time order.

        ``head`` tells which rows are live before the write, see :attr:`Ring.serials`.
        """
        block = self.flat.new_zeros((len(cells), self.flat.shape[1]))
        torch._foreach_copy_(self.layout.columns(block), leaves)
        # of runs of neighbours
        edges = [0, *np.flatnonzero(np.diff(cells) != 1) + 1, len(cells)]
        if len(edges) > _MOST_RUNS:
            self.flat.index_copy_(0, to_device(cells, block.device), block)
            return
        for start, end in pairwise(edges):
            self.flat[cells[start] : cells[start] + end - start] = block[start:end]

    def addresses_of(self, leaves: list[torch.Tensor]) -> list[int] | None:
        """Return the addresses of leaves that :attr:`words` can write to the rows; None if
        it cannot."""
        words = self.words
        if words is None or not self.is_launched:
            return None
        memory = self.matrix.untyped_storage().data_ptr()
        addresses = [leaf.data_ptr() for leaf in leaves]
        for leaf, address, is_wide in zip(
            leaves, addresses, words.is_wide, strict=True
        ):
            is_readable = leaf.is_contiguous() and not (leaf.is_conj() or leaf.is_neg())
            if (
                not is_readable
                or leaf.device != self.matrix.device
                or leaf.untyped_storage().data_ptr() == memory
                or (is_wide and address % WIDE)
            ):
                return None
        return addresses

    def edit_(
        self,
        cells: torch.Tensor | slice,
        values: Mapping[tuple[str, ...], torch.Tensor],
    ) -> None:
        """Set entries, ``[B, ...]``, that are not deduplicated, of the rows at flat
        indices without repetitions, or in a range."""
        stored = self.layout if self.dedup is None else self.dedup.stored
        # torch copies rows of unsigned and 8-bit numbers at an index only as bytes
        matrix = self.flat.view(torch.uint8)
        for key, value in values.items():
            leaf = stored.leaves[stored.places[key]]
            if not value.numel():
                continue
            value = value.detach().to(matrix.device, leaf.dtype)
            plain = value.resolve_conj().resolve_neg().contiguous()
            data = plain.view(len(plain), -1).view(torch.uint8)
            column = matrix.narrow(1, stored.offsets[key], leaf.nbytes)
            if isinstance(cells, torch.Tensor):
                column.index_copy_(0, cells, data)
            else:
                column[cells] = data

    def cells_at(self, steps: torch.Tensor) -> torch.Tensor:
        """Return the flat indices of all rows in the given time steps,
        ``[*steps.shape, *lanes]``."""
        steps = steps.to(self.matrix.device)
        if not self.lanes:
            return steps
        lanes = torch.arange(prod(self.lanes), device=steps.device)
        cells = steps[..., None] * len(lanes) + lanes
        return cells.view(steps.shape + self.lanes)

    def cells_of(self, index: Any) -> torch.Tensor:
        """Return the flat indices of the rows that an index of a tensor ``[T, *lanes]``
        selects: integers in any form, a slice, a mask, or a tuple of them.

        On the CPU, an index out of range raises an IndexError.
        """
        device = self.matrix.device
        if isinstance(index, slice):
            steps = np.arange(*index.indices(self.steps))
            return self.cells_at(torch.from_numpy(steps))
        if is_mask(index) and index.shape == self.shape:
            index = torch.as_tensor(index).nonzero(as_tuple=True)
        parts = index if isinstance(index, tuple) else (index,)
        if any(
            isinstance(part, torch.Tensor) and part.dtype is torch.uint8
            for part in parts
        ):
            raise IndexError(
                "an index of uint8 could be a mask or numbers of rows: pass index.bool() or index.long()"
            )
        integers = [
            part.to(device) for part in map(as_integers, parts) if part is not None
        ]
        are_all = len(integers) == len(parts)
        if not (are_all and len(parts) in (1, len(self.shape))):
            cells = torch.arange(self.cells, device=device)
            return cells.view(self.shape)[index]
        cells = from_start(integers[0], self.steps, _NO_STEP)
        if len(parts) == 1:
            return self.cells_at(cells)
        for lane, size in zip(integers[1:], self.lanes, strict=True):
            cells = cells * size + from_start(lane, size, _NO_LANE)
        return cells

    # -- state: saved rows are the first time steps of a matrix and, if deduplicated,
    # entries

    def used_entries(self) -> list[torch.Tensor]:
        """Return views of the entries that have been used, one ``[n, bytes]`` per group
        of keys."""
        return []

    def restore_(self, matrix: Any, entries: Sequence[Any]) -> None:
        """Copy saved rows, and their entries, which are tensors, or files that are read
        into memory."""
        room = self.room_for([saved.shape[0] for saved in entries])
        for target, saved in zip(
            (*room, self.matrix[: matrix.shape[0]]), (*entries, matrix), strict=True
        ):
            if isinstance(saved, torch.Tensor):
                target.copy_(saved)
            else:
                saved.read_into(target)

    def room_for(self, used: Sequence[int]) -> list[torch.Tensor]:
        """Give up all entries; return memory for ``used`` entries per group, which the
        caller fills."""
        return []

    def forget(self) -> None:
        """Give up all entries."""

    def link(self, head: np.ndarray) -> None:
        """Find the entries of the rows again, after a write that did not end; ``head``
        tells which rows are live."""


class ExportedViews:
    """An alias of the rows, whose views users receive; made anew after somebody has
    moved its memory."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self._matrix = matrix
        self._alias: torch.Tensor | None = None
        self._version = 0  # the alias's version at the last call of `take_edits`
        self._entries: TensorDict | None = None

    def tensor(self) -> torch.Tensor:
        alias = self._alias
        if alias is None or alias.data_ptr() != self._matrix.data_ptr():
            self._version = (
                -1 if alias is not None and alias._version != self._version else 0
            )
            alias = self._alias = alias_of(self._matrix)
            self._entries = None
        return alias

    def take_edits(self) -> bool:
        """Whether the rows were edited in place, through these views, since the last
        call."""
        alias = self._alias
        if alias is None or alias._version == self._version:
            return False
        self._version = alias._version
        return True

    def entries(self, view: Callable[[], TensorDict]) -> TensorDict:
        """Return ``view()``, the same object as long as nobody has moved its memory."""
        self.tensor()
        entries = self._entries
        # memmap_ replaces the leaves of a TensorDict by copies
        if entries is None or entries.is_memmap():
            entries = self._entries = view()
        return entries


def from_start(index: torch.Tensor, size: int, error: str) -> torch.Tensor:
    """Convert negative indices, which count from the end; on the CPU, refuse indices
    out of range."""
    if not index.is_cpu:
        return index % max(1, size)
    if not index.numel():
        return index
    low, high = map(int, index.aminmax())
    if low < -size or high >= size:
        raise IndexError(error.format(high if high >= size else low, size))
    return torch.where(index < 0, index + size, index) if low < 0 else index


def last_of_each(
    steps: np.ndarray, leaves: list[torch.Tensor]
) -> tuple[np.ndarray, list[torch.Tensor]]:
    """Return the sorted unique ``steps``, and of each leaf only the last row for each
    of these steps."""
    unique, last = np.unique(steps[::-1], return_index=True)
    keep = torch.from_numpy(len(steps) - 1 - last)
    return unique, [leaf[keep.to(leaf.device)] for leaf in leaves]
