"""The layout of the chunked order: three levels of plain tensors, and the NumPy views that the loops work on.

- A **chunk** holds up to ``WIDTH`` keys in ascending order (``keys[c, :fill[c]]``).
- A **group** holds up to ``WIDTH`` chunks in order: ``child[g, s]`` is the chunk in slot ``s``, ``first[g, s]`` a lower
  bound of its keys (and above every key before it), ``before[g, s]`` the number of keys in the slots before it;
  ``before[g, size[g]]`` is thus the group's total.
- The **top** lists the groups in order: ``top_group[p]``, their lower bounds ``top_first[p]``, and a Fenwick tree over
  their totals (``top_tree``, 1-based).

Invariants (``tests/kernels/invariants.py`` checks them): adjacent chunks of a group hold more than ``MERGE`` keys
together, adjacent groups more than ``MERGE`` chunks; ``first[g, 0] == top_first[p]``, and 0 for the very first; slots
past the end read ``NO_KEY`` and ``FULL``, so that a branchless search of fixed length never enters them. From these
bounds follows the capacity that ``allocate`` reserves: no operation can run out of chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rlbuf_td.kernels.huge_pages import advise_huge_pages

WIDTH = 128
MERGE = 96
#: The bits of -1.0: rows without a magnitude. All others are positive.
ABSENT = -1082130432
NO_KEY = (1 << 63) - 1
FULL = 1 << 30
MAX_CAPACITY = (1 << 32) - 1

# Entries of ``head``.
ROWS, GROUPS, SPARE_CHUNKS, SPARE_GROUPS = range(4)


class Chunks(NamedTuple):
    """The arrays of one order, as numba sees them."""

    head: np.ndarray
    bits: np.ndarray
    keys: np.ndarray
    fill: np.ndarray
    spare: np.ndarray
    first: np.ndarray
    child: np.ndarray
    before: np.ndarray
    size: np.ndarray
    spare_group: np.ndarray
    top_first: np.ndarray
    top_group: np.ndarray
    top_tree: np.ndarray


def plan(capacity: int) -> tuple[int, int, int]:
    """Chunks, groups and top entries (a power of two) that suffice for ``capacity`` rows, whatever their history."""
    chunks = int(capacity * 2 / (MERGE + 1) * 1.03) + 8
    groups = int(chunks * 2 / (MERGE + 1)) + 4
    return chunks, groups, 1 << (groups - 1).bit_length()


def allocate(capacity: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Make the tensors of an empty order. Pages of ``keys`` that are never used cost no memory."""
    chunks, groups, top = plan(capacity)
    tensors = {
        "head": torch.zeros(8, dtype=torch.int64, device=device),
        "bits": torch.empty(capacity, dtype=torch.int32, device=device),
        "keys": torch.empty((chunks, WIDTH), dtype=torch.int64, device=device),
        "fill": torch.empty(chunks, dtype=torch.int32, device=device),
        "spare": torch.empty(chunks, dtype=torch.int32, device=device),
        "first": torch.empty((groups, WIDTH), dtype=torch.int64, device=device),
        "child": torch.empty((groups, WIDTH), dtype=torch.int32, device=device),
        "before": torch.empty((groups, WIDTH + 1), dtype=torch.int32, device=device),
        "size": torch.empty(groups, dtype=torch.int32, device=device),
        "spare_group": torch.empty(groups, dtype=torch.int32, device=device),
        "top_first": torch.empty(top, dtype=torch.int64, device=device),
        "top_group": torch.empty(top, dtype=torch.int32, device=device),
        "top_tree": torch.empty(top + 1, dtype=torch.int64, device=device),
    }
    for tensor in tensors.values():
        advise_huge_pages(tensor)
    clear(tensors)
    return tensors


def clear(tensors: dict[str, torch.Tensor]) -> None:
    """Make the order empty: one group with one chunk without keys. The cost is O(capacity)."""
    chunks, groups = len(tensors["spare"]), len(tensors["spare_group"])
    tensors["bits"].fill_(ABSENT)
    # Stacks: the next chunk taken is the one given back last, else the lowest that was never used.
    tensors["spare"].copy_(torch.arange(chunks - 1, -1, -1, device="cpu"))
    tensors["spare_group"].copy_(torch.arange(groups - 1, -1, -1, device="cpu"))
    tensors["fill"].zero_()
    tensors["size"].zero_()
    tensors["first"].fill_(NO_KEY)
    tensors["before"].fill_(FULL)
    tensors["top_first"].fill_(NO_KEY)
    tensors["top_tree"].zero_()
    tensors["first"][0, 0] = 0
    tensors["child"][0, 0] = 0
    tensors["before"][0, :2] = 0
    tensors["size"][0] = 1
    tensors["top_first"][0] = 0
    tensors["top_group"][0] = 0
    tensors["head"].copy_(torch.tensor([0, 1, chunks - 1, groups - 1, 0, 0, 0, 0], device="cpu"))


def views(tensors: dict[str, torch.Tensor]) -> Chunks:
    """Return the same memory as NumPy arrays, in the order that the loops expect."""
    return Chunks(*(tensors[name].numpy() for name in Chunks._fields))
