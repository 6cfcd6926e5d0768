"""XXH64 over 64-bit words; see :mod:`rlbuf_td.kernels.rows.checksum`."""

from __future__ import annotations

import numpy as np
from numba import njit

_kernel = njit(cache=True, nogil=True)
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)
_BITS = np.uint64(64)
_ONE, _TWO, _THREE, _FOUR = (np.uint64(k) for k in (1, 2, 3, 4))


@_kernel
def _rotate(value, bits):
    shift = np.uint64(bits)
    return (value << shift) | (value >> (_BITS - shift))


@_kernel
def _round(lane, word):
    return _rotate(lane + word * _P2, 31) * _P1


@_kernel
def _merge(digest, lane):
    return (digest ^ _round(np.uint64(0), lane)) * _P1 + _P4


@_kernel
def xxh64(words, tail, nbytes):
    """Return the checksum of ``nbytes`` bytes: whole words (uint64), then fewer than eight bytes."""
    stripes = len(words) // 4 * 4
    digest = _P5
    if stripes:
        a, b, c, d = _P1 + _P2, _P2, np.uint64(0), np.uint64(0) - _P1
        for j in range(np.uint64(0), np.uint64(stripes), _FOUR):  # unsigned: numba then checks no sign
            a = _round(a, words[j])
            b = _round(b, words[j + _ONE])
            c = _round(c, words[j + _TWO])
            d = _round(d, words[j + _THREE])
        digest = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        digest = _merge(_merge(_merge(_merge(digest, a), b), c), d)
    digest += nbytes
    for j in range(stripes, len(words)):
        digest = _rotate(digest ^ _round(np.uint64(0), words[j]), 27) * _P1 + _P4
    first = 0
    if len(tail) >= 4:
        word = np.uint64(0)
        for j in range(4):
            word |= np.uint64(tail[j]) << np.uint64(8 * j)
        digest = _rotate(digest ^ (word * _P1), 23) * _P2 + _P3
        first = 4
    for j in range(first, len(tail)):
        digest = _rotate(digest ^ (np.uint64(tail[j]) * _P5), 11) * _P1
    digest = (digest ^ (digest >> np.uint64(33))) * _P2
    digest = (digest ^ (digest >> np.uint64(29))) * _P3
    return digest ^ (digest >> np.uint64(32))
