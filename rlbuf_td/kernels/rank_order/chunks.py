"""The memory of ``ChunkedOrder``: rows sorted by magnitude, in three levels of tensors.

- A **chunk** ``c`` holds ``n <= WIDTH`` keys in ascending order: ``keys[c, :n]``. A key combines magnitude and row.
- A **group** holds up to ``WIDTH`` chunks in order. In slot ``s`` of group ``g``, ``child[g, s]`` is the chunk, and
  ``first[g, s]`` is a lower bound of its keys, greater than all keys of earlier chunks. ``before[g, s]`` counts the
  keys in earlier slots of the group, and ``before[g, size[g]]`` all keys of the group.
- The **top** lists the groups in order: ``top_group[p]`` is a group, ``top_first[p]`` its lower bound, ``top_count[p]``
  its number of keys, and ``top_before[p]`` the number of keys in earlier groups.

A full chunk or group is split; chunks and groups are never merged. When no unused chunk is left, all keys move to
chunks that are three quarters full. This takes O(N), and happens at most once per N / 3 changed rows.

Invariants: ``first[top_group[p], 0] == top_first[p]``, which is 0 for ``p = 0``. Searches also read unused array
elements. These are ``NO_KEY`` or ``FULL``, which a search never selects. A rank order without groups has no rows, and
only its ``head`` and ``bits`` are defined. ``tests/kernels/invariants.py`` checks the invariants.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import torch

from rlbuf_td.kernels.dispatch import record_of
from rlbuf_td.kernels.huge_pages import advise_huge_pages

WIDTH = 128
#: Keys per chunk, and chunks per group, after a rearrangement.
ROOM = 96
#: The bits of -1.0, which marks rows without a magnitude. All other magnitudes are at least 0.
ABSENT = -1082130432
NO_KEY = (1 << 63) - 1
FULL = 1 << 30

# Indices into ``head``: the numbers of rows, groups and chunks in use. Groups and chunks are numbered by first use.
ROWS, GROUPS, CHUNKS = range(3)

Chunks = namedtuple("Chunks", "head bits keys first child before size top_first top_group top_count top_before")
#: The numbers of rows, chunks, groups and top elements, and the addresses of the arrays.
ORDER = np.dtype([(name, np.int64) for name in ("rows", "chunks", "groups", "tops", *Chunks._fields)])


def allocate(capacity: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return the tensors of an empty rank order. Pages that are never written take no physical memory."""
    chunks = capacity // 47 + 8
    groups = chunks // (WIDTH // 2) + 2  # a split group leaves two half-full ones
    top = 1 << groups.bit_length()
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "head": (torch.int64, (3,)),
        "bits": (torch.int32, (capacity,)),
        "keys": (torch.int64, (chunks, WIDTH)),
        "first": (torch.int64, (groups, WIDTH)),
        "child": (torch.int32, (groups, WIDTH)),
        "before": (torch.int32, (groups, WIDTH + 1)),
        "size": (torch.int32, (groups,)),
        "top_first": (torch.int64, (top,)),
        "top_group": (torch.int32, (top,)),
        "top_count": (torch.int64, (top,)),
        "top_before": (torch.int64, (top,)),
    }
    tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in shapes.items()}
    for tensor in tensors.values():
        advise_huge_pages(tensor)
    tensors["head"].zero_()
    tensors["bits"].fill_(ABSENT)
    return tensors


def addresses(chunks: Chunks) -> np.ndarray:
    """Return an :data:`ORDER` record for compiled loops, ``[1]``."""
    places = {name: array.ctypes.data for name, array in chunks._asdict().items()}
    sizes = {"groups": len(chunks.size), "tops": len(chunks.top_first)}
    return record_of(ORDER, **places, **sizes, rows=len(chunks.bits), chunks=len(chunks.keys))
