"""The checksum is XXH64: published values, and a second implementation in Python's own integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbuf_td.kernels.rows.checksum import xxh64

P1, P2, P3, P4, P5 = (
    11400714785074694791,
    14029467366897019727,
    1609587929392839161,
    9650029242287828579,
    2870177450012600261,
)
MASK = (1 << 64) - 1


def rotate(x, r):
    return (x << r | x >> (64 - r)) & MASK


def slow_xxh64(data: bytes) -> str:
    def step(lane, word):
        return rotate((lane + word * P2) & MASK, 31) * P1 & MASK

    end = len(data) // 32 * 32
    digest = P5
    if end:
        lanes = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        for start in range(0, end, 8):
            j = start // 8 % 4
            lanes[j] = step(lanes[j], int.from_bytes(data[start : start + 8], "little"))
        digest = sum(rotate(lane, r) for lane, r in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            digest = ((digest ^ step(0, lane)) * P1 + P4) & MASK
    digest = (digest + len(data)) & MASK
    rest = data[end:]
    while len(rest) >= 8:
        digest = (rotate(digest ^ step(0, int.from_bytes(rest[:8], "little")), 27) * P1 + P4) & MASK
        rest = rest[8:]
    if len(rest) >= 4:
        digest = (rotate(digest ^ int.from_bytes(rest[:4], "little") * P1 & MASK, 23) * P2 + P3) & MASK
        rest = rest[4:]
    for byte in rest:
        digest = rotate(digest ^ byte * P5 & MASK, 11) * P1 & MASK
    digest = (digest ^ digest >> 33) * P2 & MASK
    digest = (digest ^ digest >> 29) * P3 & MASK
    return f"{digest ^ digest >> 32:016x}"


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        (b"", "ef46db3751d8e999"),
        (b"a", "d24ec4f1a98c6e5b"),
        (b"abc", "44bc2cf5ad770999"),
        (b"Nobody inspects the spammish repetition", "fbcea83c8a378bf1"),
    ],
)
def test_it_gives_the_published_values(data, digest):
    assert xxh64(data) == digest == slow_xxh64(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 7))
def test_it_agrees_with_a_plain_implementation_at_any_length_and_address(data, shift):
    array = np.zeros(len(data) + shift, np.uint8)
    array[shift:] = np.frombuffer(data, np.uint8)
    assert xxh64(array[shift:]) == slow_xxh64(data)


def test_every_flipped_bit_is_noticed():
    data = np.random.default_rng(0).integers(0, 256, 203).astype(np.uint8)
    seen = {xxh64(data)}
    for bit in range(8 * len(data)):
        changed = data.copy()
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(xxh64(changed))
    assert len(seen) == 8 * len(data) + 1
