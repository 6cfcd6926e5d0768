"""How a buffer is doing, as numbers: pure functions over its parts, and a count of how often each row is drawn.

:func:`health` is what ``rb.health()`` returns. What a sampler does not have is left out:

- ``rows`` are stored, and ``fill`` is their share of the capacity.
- ``age_p10``, ``age_p50``, ``age_p90``, ``age_max``: for the rows of the last batch, how many time steps had been
  written since when they were drawn. The newest row is of age 0.
- ``effective_sample_size`` of the last batch's importance weights, ``(sum w)^2 / sum w^2``: so many rows of equal
  weight would be worth as much; ``effective_share`` is that by the batch size. ``weight_max_over_median``: how far one
  row outweighs the others.
- ``top_mass``: the share of the probability that falls to the 1 % most probable rows; 0.01 if all are alike.
- ``priority_p10``, ``priority_p50``, ``priority_p90``, ``priority_max``: the magnitudes of the TD errors that the rows
  have.
- ``refused_priorities``: how many NaN or infinite TD errors a prioritized sampler on CUDA has left out. There a batch
  cannot be refused, for the host would have to wait: their rows keep the priorities that they had.
- With ``count_replays=True``, ``replays_mean`` and ``replays_max``: how often a stored row has been drawn since it was
  written; ``never_sampled``: the share of those that have not been.
"""

from __future__ import annotations

from math import ceil
from typing import Any, TypeAlias

import torch
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    RandomSampler,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
    Writer,
)

from rlbuf_td.kernels.device_scalars import lasting
from rlbuf_td.samplers import MinibatchSampler, UniformSampler
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages.indexing import device_of, flat_rows, lanes_of

LastDraw: TypeAlias = tuple[Any, torch.Tensor | None, int]  # index, importance weights, the writer's cursor at the time

_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}


class ReplayCount:
    """How often each row of a storage has been drawn since it was written. It is attached to the storage.

    Args:
        storage: what is drawn from.

    Cost: 4 bytes a row; O(rows) a draw and a write.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._counts = torch.zeros(0, dtype=torch.int32)

    @classmethod
    def of(cls, storage: Storage) -> ReplayCount:
        """Return the count that is attached to ``storage``, attaching one if there is none."""
        for listener in storage._attached_entities:
            if isinstance(listener, cls):
                return listener
        count = cls(storage)
        storage.attach(count)
        return count

    def counts(self) -> torch.Tensor:
        """Return the counts of all rows, ``[max_size]`` int32, on the storage's device; not a copy."""
        rows, device = self.storage.max_size, device_of(self.storage)
        if len(self._counts) < rows or self._counts.device != device:  # the first write may round the size up
            with lasting():
                before, self._counts = self._counts, torch.zeros(rows, dtype=torch.int32, device=device)
            self._counts[: len(before)] = before
        return self._counts

    def count_(self, index: Any) -> None:
        """Count a draw of rows, in any form of an index."""
        counts = self.counts()
        flat = rows_of(index, self.storage)
        counts.index_add_(0, flat, torch.ones((), dtype=torch.int32, device=flat.device).expand(flat.shape))

    def restore(self, counts: torch.Tensor | None) -> None:
        """Continue with counts of the same rows; ``None``, or counts of other rows: with 0 for all."""
        mine = self.counts()
        if counts is not None and counts.shape == mine.shape and counts.dtype is mine.dtype:
            mine.copy_(counts)
        else:
            mine.zero_()

    def mark_range(self, start: int, count: int) -> None:
        """Begin at 0 for the flat rows ``start, start + 1, ...``, which have just been written."""
        self.counts()[start : start + count] = 0

    def mark_update(self, index: Any) -> None:
        """Begin at 0 for rows that have just been written."""
        flat = rows_of(index, self.storage)
        self.counts().index_fill_(0, flat, 0)


def rows_of(index: Any, storage: Storage) -> torch.Tensor:
    """Return any form of an index, also one of several dims, as flat rows ``[B]`` int64."""
    if isinstance(index, torch.Tensor) and index.ndim > 1:
        index = index.reshape(-1) if storage.ndim == 1 else index.reshape(-1, index.shape[-1])
    return flat_rows(index, storage, device_of(storage))


def health(
    storage: Storage, sampler: Sampler, writer: Writer, last_draw: LastDraw | None, replays: ReplayCount | None
) -> dict[str, float]:
    """Return the numbers that this module's docstring lists, as far as the parts have them.

    Args:
        storage: what is looked at, as also ``sampler`` and ``writer``; of a wrapping sampler, what it wraps counts.
        sampler: see ``storage``.
        writer: see ``storage``.
        last_draw: the last batch, ``None`` before any.
        replays: the counts, ``None`` where nobody counts.

    Cost: O(N log N) with priorities or counts, else O(B log B).
    """
    rows = len(storage)
    report = {"rows": float(rows), "fill": rows / storage.max_size}
    if last_draw is not None:
        report |= _of_batch(ages(storage, writer, last_draw), last_draw[1])
    if rows:
        law = probabilities(storage, sampler)
        if law is not None:
            report["top_mass"] = float(law.topk(ceil(len(law) / 100)).values.sum() / law.sum())
        report |= _quantiles("priority", priorities(storage, sampler))
    if isinstance(inner := unwrapped(sampler), Prioritized):
        report["refused_priorities"] = float(inner.refused_priorities)
    if rows and replays is not None:
        counts = replays.counts()[:rows]
        report |= {"replays_mean": float(counts.double().mean()), "replays_max": float(counts.max())}
        report["never_sampled"] = float((counts == 0).double().mean())
    return report


def _of_batch(age: torch.Tensor | None, weight: torch.Tensor | None) -> dict[str, float]:
    report = _quantiles("age", age)
    if weight is not None:
        weight = weight.double()
        size = float(weight.sum() ** 2 / (weight**2).sum())
        report["effective_sample_size"], report["effective_share"] = size, size / weight.numel()
        report["weight_max_over_median"] = float(weight.max() / weight.median())
    return report


def _quantiles(name: str, x: torch.Tensor | None) -> dict[str, float]:
    """Return quantiles of ``[n]`` numbers, each one of the numbers; nothing of none."""
    if x is None or not x.numel():
        return {}
    x = x.double().sort().values
    at = [round(q * (len(x) - 1)) for q in _QUANTILES.values()]
    return {f"{name}_{label}": value for label, value in zip(_QUANTILES, x[at].tolist(), strict=True)}


def ages(storage: Storage, writer: Writer, last_draw: LastDraw) -> torch.Tensor | None:
    """Return how many time steps had been written since each row of a batch, ``[B]``; ``None`` unless in a ring.

    The newest row is of age 0. What has been written after the draw does not count.
    """
    if not isinstance(writer, RoundRobinWriter) or not len(storage):
        return None
    index, _, cursor = last_draw
    lanes = lanes_of(storage).numel()
    steps = storage.max_size // lanes
    return (cursor - 1 - rows_of(index, storage) // lanes) % steps


def probabilities(storage: Storage, sampler: Sampler) -> torch.Tensor | None:
    """Return the probabilities of all stored rows, ``[N]`` float64; ``None`` for a sampler that does not tell."""
    sampler, rows = unwrapped(sampler), len(storage)
    index = torch.arange(rows, device=device_of(storage))
    if isinstance(sampler, Prioritized):
        return sampler.probability(index)
    if type(sampler) is PrioritizedSampler:
        weight = torch.as_tensor(sampler._sum_tree[index.cpu()]).double()
        return weight / weight.sum()
    if isinstance(sampler, UniformSampler | MinibatchSampler | RandomSampler | SamplerWithoutReplacement):
        return torch.full((rows,), 1 / rows, dtype=torch.float64)
    return None


def priorities(storage: Storage, sampler: Sampler) -> torch.Tensor | None:
    """Return the magnitudes of the TD errors of all stored rows that have one, float64; ``None`` if none can."""
    sampler = unwrapped(sampler)
    if not isinstance(sampler, Prioritized):
        return None
    magnitude = sampler.priority(torch.arange(len(storage), device=sampler.device))
    return magnitude[magnitude >= 0]


def unwrapped(sampler: Sampler) -> Sampler:
    """Return the sampler that draws, where others are wrapped around it."""
    return sampler.innermost if isinstance(sampler, SamplerWrapper) else sampler
