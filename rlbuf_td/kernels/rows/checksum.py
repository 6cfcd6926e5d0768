"""A checksum that keeps up with memory: XXH64, seed 0, as the ``xxhsum -H64`` of most systems computes it.

Any change of a byte within one 64-bit word changes the running state with certainty (each step is a bijection of the
word); other damage goes unnoticed with a probability of 2**-64. Not against malice: whoever can write the file can
write the checksum, too.

Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np


def xxh64(data: np.ndarray | bytes) -> str:
    """Return the checksum of bytes as 16 hexadecimal digits; other threads run meanwhile. About 12 GB/s.

    Args:
        data: bytes, or a contiguous uint8 array, 1-D.

    Example:
        >>> xxh64(b"abc")
        '44bc2cf5ad770999'
    """
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    if array.ctypes.data % 8:
        array = np.concatenate((array, np.empty(0, np.uint8)))  # numba reads whole words at whole addresses only
    whole = len(array) // 8 * 8
    digest = _twin().xxh64(array[:whole].view("<u8"), array[whole:], np.uint64(len(array)))
    return f"{int(digest):016x}"


@cache
def _twin() -> ModuleType:
    """Return the numba code, imported (and compiled, or read from disk) on first use."""
    from rlbuf_td.kernels.rows import checksum_cpu as _checksum_numba

    return _checksum_numba
