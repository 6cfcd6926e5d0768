"""Hindsight: which rows give new goals to a batch, and putting them there.

Costs are per batch of ``B``. On the CPU numba's loops run, elsewhere the torch ops of this module, without waiting for
the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.episodes import BitBoundaries, Boundaries, FlagBoundaries, batch_loops
from rlbuf_td.kernels.rows import refuse_rows

#: The strategies, in the order of the thresholds.
STRATEGIES = ("future", "final", "episode", "random")


class Law(NamedTuple):
    """Who gets a goal, and from where.

    Attributes:
        thresholds: one for each of :data:`STRATEGIES`, not falling, at most 1. A row is relabelled by the first
            strategy whose threshold its uniform number is below; where it lies between two chooses the row.
        only_finished: leave rows of unfinished trajectories alone, but for ``random``.
    """

    thresholds: tuple[float, ...]
    only_finished: bool


class Outcomes(NamedTuple):
    """The column of a storage that goals are read from; :meth:`of` makes it.

    Attributes:
        column: ``[T * E, ...]``, each row contiguous.
        address, stride, width: where it lies, in bytes.
    """

    column: Tensor
    address: int
    stride: int
    width: int

    @classmethod
    def of(cls, column: Tensor) -> Outcomes:
        """Describe a column."""
        size = column.element_size()
        return cls(column, column.data_ptr(), column.stride(0) * size, column.shape[1:].numel() * size)


def read_relabelled_(
    boundaries: BitBoundaries,
    cells: Tensor,
    uniform: Tensor,
    law: Law,
    live: int,
    outcomes: Outcomes,
    base: int,
    block: int,
    offsets: tuple[int, int],
) -> Tensor:
    """Read whole rows into a batch and give them the outcomes of other rows as goals, in one pass through memory.

    Args:
        boundaries: where trajectories are cut.
        cells: the batch's flat rows, ``[B]`` int64, contiguous.
        uniform: ``[B]`` float64 in ``[0, 1)``, contiguous: what :func:`choose_goals` decides by.
        law: who gets a goal, and from where.
        live: how many rows are written.
        outcomes: a column of the rows.
        base: address of all rows.
        block: address of the batch's.
        offsets: of the two goals in a row; twice the same if there is one.

    Returns:
        Which rows have got a goal, ``[B]`` bool.

    Raises:
        IndexError: a row has not been written.
    """
    stride = outcomes.stride
    places = block + offsets[0], stride, block + offsets[1], stride
    mask = torch.from_numpy(np.empty(cells.shape[0], np.bool_))  # half the time of torch.empty
    given = *places, base, block, cells.shape[0], cells.data_ptr(), uniform.data_ptr(), mask.data_ptr()
    if not batch_loops().relabel(boundaries.bitmap, *law, live, *outcomes[1:], *given):
        refuse_rows(cells, live)
    return mask


def put_law(boundaries: FlagBoundaries, law: Law, live: int) -> None:
    """Put a law and the number of rows where kernels and captured graphs read it."""
    for place, value in enumerate((*law.thresholds, live, float(law.only_finished))):
        boundaries.numbers.set_(place, value)


def choose_goals(boundaries: Boundaries, cells: Tensor, uniform: Tensor, law: Law, live: int) -> tuple[Tensor, Tensor]:
    """Choose the rows whose outcomes become goals; arguments as for :func:`read_relabelled_`.

    Returns:
        ``[B]`` int64, the flat rows chosen (the row itself where it is left alone), and ``[B]`` bool, which are not.
    """
    if isinstance(boundaries, BitBoundaries):
        rows, mask = np.empty(len(cells), np.int64), np.empty(len(cells), np.bool_)
        batch_loops().choose_goals(boundaries.bitmap, *law, live, cells.numpy(), uniform.numpy(), rows, mask)
        return torch.from_numpy(rows), torch.from_numpy(mask)
    steps, lanes = boundaries.cut.shape
    back, ahead, over = boundaries.reach(cells)
    edges, live, only_finished = _law_of(boundaries, law, live)
    strategy = torch.searchsorted(edges[1:-1], uniform, right=True)
    where = (uniform - edges[strategy]) / (edges[strategy + 1] - edges[strategy])
    within = (where * (ahead + 1)).long().clamp(max=ahead)
    around = (where * (back + ahead + 1)).long().clamp(max=back + ahead) - back
    offset = torch.where(strategy == 0, within, torch.where(strategy == 1, ahead, around))
    rows = (cells + offset * lanes) % (steps * lanes)
    rows = torch.where(strategy == 3, (where * live).clamp(max=live - 1).long(), rows)
    mask = strategy < len(STRATEGIES)
    mask &= over | (strategy == 3) | ~only_finished
    return torch.where(mask, rows, cells), mask


def _law_of(boundaries: FlagBoundaries, law: Law, live: int) -> tuple[Tensor, int | Tensor, Tensor]:
    """Return a law, as the edges between strategies, and the rows, as torch ops are to read them, for graphs."""
    if torch.compiler.is_compiling():
        edges = torch.tensor([0.0, *law.thresholds, 1.0], dtype=torch.float64, device=boundaries.cut.device)
        return edges, live, torch.full((), law.only_finished, device=boundaries.cut.device)
    put_law(boundaries, law, live)
    numbers = boundaries.numbers.tensor
    edges = torch.cat((numbers.new_zeros(1), numbers[: len(law.thresholds)], numbers.new_ones(1)))
    return edges, numbers[4], numbers[5] != 0
