"""The health of a buffer in numbers, as ``rb.health()`` returns them.

The numbers are as follows; those that do not apply to a buffer are omitted:

- ``rows``: the number of stored rows. ``fill``: the number of stored rows divided by
  the capacity.
- ``age_p10``, ``age_p50``, ``age_p90``, ``age_max``: quantiles of the ages of the last
  batch's rows. The age of a row is the number of time steps written between the row and
  the draw.
- ``effective_sample_size``: ``(sum w)^2 / sum w^2`` of the last batch's importance
  weights ``w``.
- ``effective_share``: ``effective_sample_size`` divided by the batch size.
- ``weight_max_over_median``: the largest importance weight of the last batch divided by
  the median weight.
- ``top_mass``: the total probability of the 1 % most probable rows; 0.01 if all rows
  are equally probable.
- ``priority_p10``, ``priority_p50``, ``priority_p90``, ``priority_max``: quantiles of
  the absolute TD errors.
- ``refused_priorities``: the number of NaN or infinite TD errors that a prioritized
  sampler on CUDA has ignored.
- ``too_old``: the number of stored rows that are older than the ``max_age`` of the
  sampler; for an :class:`~rlbuf_td.ExperienceQueue`, the number of rows that were
  discarded because they were too old.
- ``stretch_mean``: the mean number of rows of one trajectory that are stored one after
  another, with a sampler of n-step returns, sequences or hindsight goals. If rows of
  several trajectories alternate, this number is near 1.
- ``compiled``: 1.0 if compiled code executes writes and samples, 0.5 if it executes one
  of them, otherwise 0.0; ``rb.compiled`` says which, and why not the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple

import torch
from torchrl.data import SamplerWithoutReplacement, Storage, Writer
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    RandomSampler,
    RoundRobinWriter,
    Sampler,
)

from rlbuf_td.samplers import RecencySampler, UniformSampler
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.uniform import young_count
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.indexing import (
    are_ragged,
    device_of,
    flat_rows,
    lanes_of,
    row_count,
    written_rows,
)


class LastDraw(NamedTuple):
    """The rows of a batch that belong to one buffer."""

    report: Mapping[Any, Any]  # of the sampler
    written: int  # the serial of the next row of the first lane at the draw

    @property
    def index(self) -> Any:  # pyrefly: ignore [bad-override]
        return self.report["index"]

    @property
    def weight(self) -> torch.Tensor | None:
        return self.report.get("priority_weight")


_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}


def health(
    storage: Storage, sampler: Sampler, writer: Writer, last_draw: LastDraw | None
) -> dict[str, float]:
    """Return the numbers that this module's docstring explains."""
    rows = row_count(storage)
    report = {"rows": float(rows), "fill": rows / storage.max_size}
    if last_draw is not None:
        report |= _quantiles("age", ages(storage, writer, last_draw))
        report |= _weights(last_draw.weight)
    if rows:
        report |= _top_mass(probabilities(storage, sampler))
        report |= _quantiles("priority", priorities(storage, sampler))
    innermost = unwrapped(sampler)
    max_age = getattr(innermost, "max_age", None)
    discarded = getattr(innermost, "discarded", None)
    if discarded is not None and max_age is not None:
        report["too_old"] = float(discarded.total())
    elif max_age is not None:
        report["too_old"] = float(rows - young_count(storage, max_age))
    if isinstance(innermost, Prioritized):
        report["refused_priorities"] = float(innermost.rule.table.refused)
    return report | _stretches(storage, sampler)


def _weights(weight: torch.Tensor | None) -> dict[str, float]:
    """Return statistics of the importance weights of a batch; nothing without
    weights."""
    if weight is None or not weight.numel():
        return {}
    weight = weight.double()
    size = float(weight.sum() ** 2 / (weight**2).sum())
    return {
        "effective_sample_size": size,
        "effective_share": size / weight.numel(),
        "weight_max_over_median": float(weight.max() / weight.median()),
    }


def _top_mass(probability: torch.Tensor | None) -> dict[str, float]:
    total = 0.0 if probability is None else probability.sum()
    if probability is None or not total > 0:
        return {}
    top = probability.topk(ceil(len(probability) / 100)).values
    return {"top_mass": float(top.sum() / total)}


def _stretches(storage: Storage, sampler: Sampler) -> dict[str, float]:
    """Return the mean length of stored stretches of trajectories, for samplers of
    several steps."""
    if (
        not isinstance(storage, PackedStorage)
        or not len(storage)
        or getattr(sampler, "steps_needed", 1) < 2
    ):
        return {}
    try:
        return {"stretch_mean": storage.episodes_now().segments().mean}
    # the rows do not mark trajectories: draws raise the error
    except (KeyError, TypeError, ValueError, RuntimeError):
        return {}


def _quantiles(name: str, x: torch.Tensor | None) -> dict[str, float]:
    """Return the quantiles of a 1-D tensor (nearest rank); nothing of an empty one."""
    if x is None or not x.numel():
        return {}
    x = x.double().sort().values
    ranks = [round(q * (len(x) - 1)) for q in _QUANTILES.values()]
    return {
        f"{name}_{label}": value
        for label, value in zip(_QUANTILES, x[ranks].tolist(), strict=True)
    }


def ages(storage: Storage, writer: Writer, last_draw: LastDraw) -> torch.Tensor | None:
    """Return the ages of the drawn rows, ``[B]`` time steps; ``None`` if the writer
    does not write in time order."""
    if not isinstance(writer, RoundRobinWriter) or not len(storage):
        return None
    index = last_draw.index
    if isinstance(index, torch.Tensor) and index.ndim > 1:
        index = index.reshape(-1) if storage.ndim == 1 else index.flatten(0, -2)
    flat = flat_rows(index, storage, device_of(storage))
    if isinstance(storage, PackedStorage) and are_ragged(storage):
        return storage.ring.reach(flat)[1]
    lanes = lanes_of(storage).numel()
    steps = storage.max_size // lanes
    return (last_draw.written - 1 - flat // lanes) % steps


def probabilities(storage: Storage, sampler: Sampler) -> torch.Tensor | None:
    """Return the probability of each stored row, ``[N]`` float64; ``None`` for samplers
    of unknown classes."""
    sampler = unwrapped(sampler)
    rows = row_count(storage)
    index = written_rows(storage)
    if isinstance(sampler, Prioritized | RecencySampler | UniformSampler):
        return sampler.probability(index, storage=storage)
    if type(sampler) is PrioritizedSampler:
        weight = torch.as_tensor(sampler._sum_tree[index.cpu()], device="cpu").double()
        return weight / weight.sum()
    if isinstance(sampler, RandomSampler | SamplerWithoutReplacement):
        return torch.full((rows,), 1 / rows, dtype=torch.float64, device="cpu")
    return None


def priorities(storage: Storage, sampler: Sampler) -> torch.Tensor | None:
    """Return the absolute TD errors of the stored rows, float64; ``None`` if the
    sampler has no priorities."""
    sampler = unwrapped(sampler)
    if not isinstance(sampler, Prioritized):
        return None
    magnitude = sampler.priority(written_rows(storage))
    return magnitude[magnitude >= 0]


def unwrapped(sampler: Sampler) -> Sampler:
    return sampler.innermost if isinstance(sampler, SamplerWrapper) else sampler
