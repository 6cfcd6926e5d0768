"""Observations of rows: which entries they are, and whether each row's next observation
is the observation of the following row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlbuf_td.storages.schema import walk

Key: TypeAlias = tuple[str, ...]
Values: TypeAlias = Mapping[Key, Tensor]
# Keys that may be stored at the root and under "next" although they are not
# observations.
_NOT_OBSERVED = {"reward", "done", "terminated", "truncated", "state_value", "index"}
_ODD = 0x1E3779B97F4A7C15  # an odd number: products with different words differ
#: The number of consecutive rows that show whether environments alternate.
FEWEST_ROWS = 64
_MOST_ROWS = 512
_BYTES = 4 << 20  # of rows that are read, if these are enough rows


def is_observed(key: Key, kinds: Values) -> bool:
    """Whether ``key`` is that of an observation: stored at the root and under "next",
    with the same dtype and shape per row."""
    value, after = kinds[key], kinds.get(("next", *key))
    if key[0] == "next" or key[-1] in _NOT_OBSERVED or after is None:
        return False
    return (after.shape, after.dtype) == (value.shape, value.dtype)


def hashes(values: Values, lead: Key, keys: Iterable[Key]) -> Tensor:
    """Return a hash of the entries ``keys`` under ``lead``, ``[n]`` int64; agents that
    do not act count as zeros."""
    generator = torch.Generator().manual_seed(0)
    result = torch.zeros(1, dtype=torch.int64, device="cpu")
    for path in ((*lead, *key) for key in keys):
        value, acts = values[path], values.get((*path[: len(lead) + 1], "mask"))
        if (
            acts is not None
            and acts.dtype is torch.bool
            and acts.shape[1:] == value.shape[1:2]
        ):
            value = value.masked_fill(
                ~acts.view(*acts.shape, *[1] * (value.ndim - 2)), 0
            )
        if value.is_floating_point() or value.is_complex():
            value = value + 0.0  # -0.0 becomes 0.0
        octets = value.contiguous().view(torch.uint8).flatten(1)
        words = torch.nn.functional.pad(octets, (0, -octets.shape[1] % 8)).view(
            torch.int64
        )
        # a product loses high bits, in which alone 1.0 and 2.0 differ: move them down
        # first
        words = words * _ODD
        words = words ^ (words >> 32 & 0xFFFFFFFF)
        weight = torch.randint(
            -(1 << 62), 1 << 62, words.shape[1:], generator=generator, device="cpu"
        )
        result = result + (words * weight.to(words.device)).sum(1).cpu()
    return result


def values_of(rows: TensorDictBase) -> dict[Key, Tensor]:
    """Return the entries of ``[n]`` rows, ``[n, ...]`` each, with at least one dim
    after the first."""
    entries = ((key, value) for key, value in walk(rows) if isinstance(value, Tensor))
    return {
        key: value.reshape(len(rows), *(value.shape[1:] or (1,)))
        for key, value in entries
    }


def rows_that_show(row: TensorDictBase) -> int:
    """Return how many consecutive rows :func:`alternate` needs, and can read quickly.

    ``row`` is one of them, ``[1]``.
    """
    nbytes = sum(value.nbytes for value in values_of(row).values())
    return min(_MOST_ROWS, max(FEWEST_ROWS, _BYTES // max(1, nbytes)))


def alternate(rows: TensorDictBase, goes_on: Tensor) -> bool:
    """Whether environments alternate in consecutive rows, ``[n]``, of one lane.

    They do if the next observation of most rows is not the observation of the following
    row, but that of a later one.

    Args:
        rows: hold the observations.
        goes_on: whether the trajectory of each row goes on in the following row, ``[n]``
            bool.
    """
    values = values_of(rows)
    keys = [key for key in values if is_observed(key, values)]
    if not keys or len(rows) < 2:
        return False
    observations = hashes(values, (), keys)
    next_observations = hashes(values, ("next",), keys)[:-1]
    goes_on = goes_on[:-1].cpu()
    # the following row has another observation
    is_apart = goes_on & (next_observations != observations[1:])
    # a row after the following one has this observation
    is_later = (next_observations[:, None] == observations).triu(2).any(1)
    apart_count = int(is_apart.sum())
    later_count = int((is_apart & is_later).sum())
    return 2 * apart_count > int(goes_on.sum()) and 2 * later_count >= apart_count
