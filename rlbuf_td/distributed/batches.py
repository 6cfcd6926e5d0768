r"""Assigns draws to shards, and assembles batches from their answers.

The *mass* of shard s is :math:`M_s = \sum_{i \in s} p_i^\alpha` or, with a uniform
sampler, the number of its rows. A client chooses shard s with probability
:math:`M_s / \sum_t M_t`; the shard then draws row i by its own priorities:

.. math:: P(i) = \frac{M_s}{\sum_t M_t} \cdot \frac{p_i^\alpha}{M_s} = p_i^\alpha \Big/ \sum_j p_j^\alpha

If another client has changed the mass to :math:`M'_s` before the draw, the probability
is
:math:`(M_s / \sum_t M_t) \cdot p_i^\alpha / M'_s`. Importance weights use this
probability, so they remain correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlbuf_td.distributed.shard import Answer, Drawn, Report, Spec
from rlbuf_td.kernels.batch import gather_leaves
from rlbuf_td.storages.layout import RowLayout

_BELOW_ONE = 1.0 - 2.0**-53


class Split(NamedTuple):
    """The draws of a batch, sorted by shard."""

    # ``[B]`` int64: for each row of the batch, the position of its draw among the
    # sorted draws
    rank: Tensor
    counts: Tensor  # ``[shards]`` int64: number of draws from each shard
    # ``[B]`` float64 in [0, 1), sorted: position of each draw, as a fraction of its
    # shard's mass
    fractions: Tensor


def split(positions: Tensor, masses: Tensor) -> Split:
    """Assign each draw to a shard; ``positions``, ``[B]`` float64, lie between 0 and
    the sum of ``masses``."""
    ends = masses.cumsum(0)
    begins = ends - masses
    # rounding can put a position at the total mass
    last = int(masses.nonzero()[-1])
    shard = torch.searchsorted(ends, positions, right=True).clamp_(max=last)
    fractions = (positions - begins[shard]) / masses[shard]
    fractions.clamp_(0.0, _BELOW_ONE)
    # a radix sort
    order = torch.from_numpy(np.argsort(shard.numpy().astype(np.uint16), kind="stable"))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    counts = torch.bincount(shard, minlength=len(masses))
    return Split(rank, counts, fractions[order])


def importance_weights(
    probability: Tensor, least: float, rows: int, beta: float, norm: str | None
) -> Tensor:
    """Return importance weights ``(rows * probability) ** -beta``, ``[B]`` float32.

    With ``norm="batch"``, weights are divided by the largest weight in the batch. With
    ``norm="buffer"``, they are divided by the largest weight of all rows, that of a row
    with the smallest probability, ``least``.
    """
    unit = {"buffer": least, "batch": float(probability.min()), None: 1.0 / rows}[norm]
    return (probability / unit).pow(-beta).to(torch.float32)


class Batches:
    """One or more batches, drawn with one request to each shard.

    Args:
        spec: the properties of the shards' buffers.
        layout: the layout of the drawn rows.
        answers: for each shard with draws, its answer, sorted by shard.
        known: per shard, the report that determined its draws (None: lost).
        rank: ``[batches, draws]`` int64: each draw's position in the concatenated
            answers.
    """

    def __init__(
        self,
        spec: Spec,
        layout: RowLayout,
        answers: dict[int, Answer],
        known: list[Report | None],
        rank: Tensor,
    ) -> None:
        self.spec, self.layout, self.rank = spec, layout, rank
        drawn = drawn_of(answers)
        rows = [part.rows for part in drawn.values()]
        self.rows = torch.from_numpy(np.concatenate(rows))
        #: The handles of the draws, ``[n, 4]``, and of all their rows.
        self.draws = _handles(
            answers, {shard: (part.flat, part.stamp) for shard, part in drawn.items()}
        )
        self.cells = self.draws
        if spec.windows is not None:
            cells = {
                shard: part.cells.T
                for shard, part in drawn.items()
                if part.cells is not None
            }
            self.cells = _handles(answers, cells)
        if spec.is_prioritized:
            self.probability, self.least, self.live = probabilities(answers, known)
        self.next = 0

    def __len__(self) -> int:
        return len(self.rank) - self.next

    @property
    def size(self) -> int:
        """Number of rows in a batch."""
        return self.rank.shape[1] * self.spec.window_rows

    def take(self, beta: float) -> TensorDict:
        """Return the next batch, ``[B]``, in newly allocated memory."""
        draws = self.rank[self.next]
        window = self.spec.window_rows
        self.next += 1
        rows = draws
        if window > 1:
            step = torch.arange(window, device="cpu")
            rows = (draws[:, None] * window + step).flatten()
        leaves = self.layout.blank(rows.shape, rows.device)
        gather_leaves(self.rows, rows, self.layout.extents, leaves)
        report = {"index": self.cells.index_select(0, rows)}
        if self.spec.windows is not None:
            report["anchor_index"] = self.draws[draws].repeat_interleave(window, 0)
        if self.spec.is_prioritized:
            weight = importance_weights(
                self.probability[draws], self.least, self.live, beta, self.spec.norm
            )
            report["priority_weight"] = weight.repeat_interleave(window)
        return self.layout.wrap(leaves, rows.shape, rows.device, report)


def drawn_of(answers: dict[int, Answer]) -> dict[int, Drawn]:
    """Return the drawn rows of the shards that have drawn some."""
    drawn = {shard: answer.drawn for shard, answer in answers.items()}
    return {shard: rows for shard, rows in drawn.items() if rows is not None}


def _handles(answers: dict[int, Answer], rows: Mapping[int, Any]) -> Tensor:
    """Return the entry ``"index"`` (``[n, 4]`` int64) for ``rows``, which maps shards
    to row numbers and stamps."""
    parts = []
    for shard, (flat, stamp) in rows.items():
        columns = (shard, answers[shard].before.incarnation, flat, stamp)
        parts.append(np.stack(np.broadcast_arrays(*columns), 1))
    return torch.from_numpy(np.concatenate(parts))


class Probabilities(NamedTuple):
    """What importance weights are computed from."""

    drawn: Tensor  # of each drawn row, ``[n]`` float64
    least: float  # the smallest one of all rows
    rows: int  # the number of all rows


def probabilities(
    answers: dict[int, Answer], known: list[Report | None]
) -> Probabilities:
    """Return the probabilities of drawn rows, by the shards' answers and by the reports
    with which shards were chosen."""
    # The client chooses a shard by the masses in ``known``; the shard chooses a row by
    # its mass at the draw.
    total = sum(report.mass for report in known if report is not None)
    rows = 0
    least = inf
    parts = []
    for shard, report in enumerate(known):
        if report is None:
            continue
        answer = answers.get(shard)
        at_draw = report if answer is None else answer.before
        rows += at_draw.rows
        if not report.mass > 0.0:  # no row has a positive priority
            continue
        # P of a row is this scale times p ** alpha
        scale = report.mass / total / at_draw.mass
        least = min(least, scale * at_draw.smallest)
        if answer is not None and answer.drawn is not None:
            parts.append(scale * answer.drawn.weight)
    return Probabilities(torch.from_numpy(np.concatenate(parts)), least, rows)
