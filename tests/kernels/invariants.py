"""The invariants of the kernels' data structures, as code."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlbuf_td.kernels.rank_order import NO_KEY, ROWS, USED, WIDTH
from rlbuf_td.kernels.sum_tree import SumTree, rebuild_, weight_of
from tests.backends import forced


def check_order(order: Any) -> None:
    order.ranks_of(torch.arange(0))  # counts the keys before each chunk
    st = SimpleNamespace(**{name: tensor.numpy() for name, tensor in order.tensors.items()})
    used = int(st.head[USED])
    size, bounds = st.size[:used], np.append(st.first[:used], NO_KEY)
    keys = [st.keys[c, :n] for c, n in zip(st.chunk[:used], size, strict=True)]
    rows = np.nonzero(st.bits >= 0)[0]
    expected = np.sort(((0x7FFFFFFF - st.bits[rows].astype(np.int64)) << 32) | rows)
    _must(len(rows) == st.head[ROWS], "the number of rows is right")
    _must(np.array_equal(np.concatenate(keys), expected), "the keys are those of the rows, in order")
    _must(bool(((size >= 0) & (size <= WIDTH)).all()), "each chunk fits")
    before = np.append(0, np.cumsum(size)[:-1])
    _must(np.array_equal(st.before[:used], before), "the keys before each chunk are counted")
    _must(sorted(st.chunk[:used]) == list(range(used)), "each chunk is in one place")
    _must(bounds[0] == 0 and bool((np.diff(bounds) > 0).all()), "lower bounds rise from 0")
    for p, held in enumerate(keys):
        inside = len(held) == 0 or bounds[p] <= held[0] <= held[-1] < bounds[p + 1]
        _must(bool(inside), f"keys at position {p} lie within its bounds")
    unused = np.append(st.first[used:], st.before[used:])
    _must(bool((unused == NO_KEY).all()), "positions behind the last one are never entered")


def _must(holds: bool, invariant: str) -> None:
    if not holds:
        raise AssertionError(f"violated: {invariant}")


def check_tree(tree: SumTree, alpha: float, eps: float) -> None:
    expected = weight_of(tree.magnitude, alpha, eps)
    torch.testing.assert_close(tree.weight, expected, rtol=2.0**-23, atol=0.0)  # powers may round to another float32
    again = copy.deepcopy(tree)
    with forced("torch"):
        rebuild_(again)
    for name in ("sums", "before", "minima"):
        torch.testing.assert_close(getattr(again, name), getattr(tree, name), rtol=1e-14, atol=0.0)
