"""The invariants of the kernels' data structures, as code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlbuf_td.kernels.rank_order.chunks import CHUNKS, FULL, GROUPS, NO_KEY, ROWS, WIDTH, Chunks
from rlbuf_td.kernels.rows.table import Table
from rlbuf_td.kernels.sum_tree import SumTree, reference, weight_of


def check_order(order: Any) -> None:
    st: Chunks = order.chunks
    groups = int(st.head[GROUPS])
    keys: list[np.ndarray] = []
    for p in range(groups):
        before = sum(map(len, keys))
        keys += _check_group(st, p, groups)
        counts = [before, sum(map(len, keys)) - before]
        _must([st.top_before[p], st.top_count[p]] == counts, f"the counts of group {p} are right")
    rows = np.nonzero(st.bits >= 0)[0]
    expected = np.sort(((0x7FFFFFFF - st.bits[rows].astype(np.int64)) << 32) | rows)
    _must(len(rows) == st.head[ROWS], "the number of rows is right")
    _must(np.array_equal(np.concatenate([expected[:0], *keys]), expected), "the keys are those of the rows, in order")
    if groups:
        _must(st.top_first[0] == 0, "the lowest bound is 0")
        unused = np.append(st.top_first[groups:], st.top_before[groups:])
        _must(bool((unused == NO_KEY).all()), "positions past the last group are never entered")
        used = [st.child[g, s] for g in range(groups) for s in range(st.size[g])]
        _must(sorted(used) == list(range(st.head[CHUNKS])), "each chunk is in one place")
        _must(sorted(st.top_group[:groups]) == list(range(groups)), "each group is in one place")


def _check_group(st: Chunks, p: int, groups: int) -> list[np.ndarray]:
    """Check the group at position ``p``; return its keys, chunk by chunk."""
    g, size = st.top_group[p], int(st.size[st.top_group[p]])
    after = st.top_first[p + 1] if p + 1 < groups else NO_KEY
    bounds, fill = np.append(st.first[g, :size], after), np.diff(st.before[g, : size + 1])
    _must(1 <= size <= WIDTH, f"group {p} has 1 to {WIDTH} chunks")
    _must(bounds[0] == st.top_first[p], f"the top knows the bound of group {p}")
    _must(bool((np.diff(bounds) > 0).all()), f"lower bounds rise in group {p}")
    _must(bool((st.first[g, size:] == NO_KEY).all()), f"slots past the end of group {p} are never entered by key")
    _must(bool((st.before[g, size + 1 :] == FULL).all()), f"slots past the end of group {p} are never entered by rank")
    _must(st.before[g, 0] == 0 and bool(((fill >= 0) & (fill <= WIDTH)).all()), f"chunks of group {p} fit")
    keys = [st.keys[c, :n] for c, n in zip(st.child[g, :size], fill, strict=True)]
    for s, held in enumerate(keys):
        inside = len(held) == 0 or bounds[s] <= held[0] <= held[-1] < bounds[s + 1]
        _must(bool(inside), f"keys of group {p}, slot {s} lie within its bounds")
    return keys


def _must(holds: bool, invariant: str) -> None:
    if not holds:
        raise AssertionError(f"violated: {invariant}")


def check_pool(table: Table) -> None:
    for g, group in enumerate(table.groups):
        free, used = table.counters[g].tolist()
        stack, ids = table.stacks[g][:free].tolist(), table.names(g).cpu().numpy()
        held = set(np.unique(ids).tolist()) - {0}
        is_apart = len(set(stack)) == free and not held & set(stack)
        is_whole = is_apart and held | set(stack) == set(range(1, used + 1))
        _must(is_whole, f"group {g}: each of {used} entries is free ({free}) or held ({len(held)})")
        steps, names = len(ids) // table.lanes, {name: set[tuple[int, int]]() for name in held}
        for cell, row in enumerate(ids):
            for name in set(row.tolist()) - {0}:
                names[name].add((cell % table.lanes, cell // table.lanes))
        for name, places in names.items():
            lanes, times = {lane for lane, _ in places}, [time for _, time in places]
            apart = max(min((a - b) % steps, (b - a) % steps) for a in times for b in times)
            near = len(lanes) == 1 and apart <= group.reach
            _must(near, f"group {g}: rows that hold entry {name} lie near each other, not at {sorted(places)}")


def check_tree(tree: SumTree, alpha: float, eps: float) -> None:
    given = tree.magnitude >= 0
    expected = torch.where(given, weight_of(tree.magnitude, alpha, eps), 0.0)
    torch.testing.assert_close(tree.weight, expected, rtol=1e-12, atol=0.0)
    again = SumTree(**{name: tensor.clone() for name, tensor in tree.tensors().items()})
    reference.rebuild(again)
    for name in ("sums", "before", "minima"):
        torch.testing.assert_close(getattr(again, name), getattr(tree, name), rtol=1e-14, atol=0.0)
