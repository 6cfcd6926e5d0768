"""The memory of ``ChunkedOrder``: all keys in ascending order, in a list of chunks.

A key combines the magnitude and the row. A **chunk** ``c`` holds ``n <= WIDTH`` keys: ``keys[c, :n]``. The **list** has
a position ``p`` for each chunk in use::

    position p     0         1             2
    first[p]       0         30            70            lower bound of the chunk's keys, above all earlier keys
    chunk[p]       0         2             1             the chunk's number: chunks are numbered by first use
    size[p]        2         4             2             its number of keys
    before[p]      0         2             6             the number of keys in earlier chunks, counted by look-ups
    keys           10 20     30 40 50 60   70 80

A full chunk is split; chunks are never merged. When no unused chunk is left, all keys move to chunks that are three
quarters full. This takes O(N), and happens at most once per N / 3 changed rows.

Invariants: ``first[0]`` is 0. Behind the last position, ``first`` and ``before`` are ``NO_KEY``, which a search never
selects. ``tests/kernels/invariants.py`` checks the invariants.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import torch

from rlbuf_td.kernels.dispatch import record_of
from rlbuf_td.kernels.huge_pages import advise_huge_pages

WIDTH = 128
ROOM = 96  # keys per chunk after a rearrangement
ABSENT = -1082130432  # the bits of -1.0, which marks rows without a magnitude; all other magnitudes are at least 0
NO_KEY = (1 << 63) - 1
#: Indices into ``head``: the numbers of rows, and of chunks in use, and whether ``before`` must be counted again.
ROWS, USED, CHANGED = range(3)

Chunks = namedtuple("Chunks", "head bits keys first chunk size before")
#: The numbers of rows, chunks and positions, and the addresses of the arrays.
ORDER = np.dtype([(name, np.int64) for name in ("rows", "chunks", "positions", *Chunks._fields)])


def allocate(capacity: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return the tensors of an empty rank order. Pages that are never written take no physical memory."""
    chunks = capacity // 47 + 8
    positions = 1 << chunks.bit_length()  # more than chunks: a search reads up to the next power of 2
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "head": (torch.int64, (3,)),
        "bits": (torch.int32, (capacity,)),
        "keys": (torch.int64, (chunks, WIDTH)),
        "first": (torch.int64, (positions,)),
        "chunk": (torch.int32, (positions,)),
        "size": (torch.int32, (positions,)),
        "before": (torch.int64, (positions,)),
    }
    tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in shapes.items()}
    for tensor in tensors.values():
        advise_huge_pages(tensor)
    tensors["bits"].fill_(ABSENT)
    tensors["head"].zero_()[USED] = 1
    for name, beyond in (("first", NO_KEY), ("before", NO_KEY), ("chunk", 0), ("size", 0)):
        tensors[name].fill_(beyond)[0] = 0
    return tensors


def addresses(chunks: Chunks) -> np.ndarray:
    """Return an :data:`ORDER` record for compiled loops, ``[1]``."""
    places = {name: array.ctypes.data for name, array in chunks._asdict().items()}
    return record_of(ORDER, **places, rows=len(chunks.bits), chunks=len(chunks.keys), positions=len(chunks.first))
