"""Compiled functions that revise the batches of n-step, hindsight and sequence samplers on the CPU.

They read the flat indices of the rows to revise at the address ``BATCH.flat``.

Args:
    episodes: address of a record with the dtype :data:`rlbuf_td.kernels.episodes.EPISODES`.
    address: address of a record with the dtype :data:`rlbuf_td.kernels.batch.ring.BATCH`.
    targets: address of an array with the addresses of the output tensors: the leaves, the index, the sampler's outputs,
        and the entries of the wrappers.
    steps: address of a record with the dtype :data:`rlbuf_td.kernels.batch.ring.STEPS`.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.cpu import batch_at, gather_batch, gather_flat, put_index, put_stamps, windows_at
from rlbuf_td.kernels.batch.ring import STEPS
from rlbuf_td.kernels.compiled import (
    copy_bytes,
    copy_few,
    inlined,
    kernel,
    load,
    pointer,
    prefetch,
    prefetch_row,
    store,
)
from rlbuf_td.kernels.episodes.batches_cpu import Rewards, choose, following, put_sum, put_sum_of_rows, walk
from rlbuf_td.kernels.episodes.cpu import expect, numbers_at, rows_after, rows_before, split, steps_ahead, steps_back

_SOON, _AHEAD = 16, 9  # how many rows ahead the bits of a row, and its data, are prefetched
ROOT, NEXT, REWARD = 0, 1, 2  # kinds of leaves in an n-step transition
LIST, READ, BOTH, MARK = 0, 1, 2, 3  # the parts of ``sequence``


@kernel
def n_step(episodes, address, targets, steps):
    """Gather n-step transitions."""
    of, batch, joined = numbers_at(episodes), batch_at(address), carray(pointer(steps), 1, STEPS)[0]
    taken, n, gamma = joined.taken, joined.n, joined.gamma
    rows, row_bytes, count = batch.rows, batch.row_bytes, batch.count
    leaves = carray(pointer(batch.extents), (batch.leaves, 4), np.int64)
    out = carray(pointer(targets), batch.leaves + 1, np.int64)
    flat, end = carray(pointer(batch.flat), count, np.int64), carray(pointer(joined.ends), count, np.int64)
    for begun in range(count + _AHEAD):
        if begun + _SOON < count:
            expect(of, flat[begun + _SOON])
        if begun < count:
            cell = flat[begun]
            length, end[begun] = walk(of, cell, n)
            store(taken + 8 * begun, length, np.int64)
            for _ in range(length):
                prefetch_row(rows + cell * row_bytes, row_bytes)
                cell = following(of, cell)
        i = begun - _AHEAD
        if i < 0:
            continue
        cell, length = flat[i], load(taken + 8 * i, np.int64)
        for leaf in range(batch.leaves):
            offset, width, kind, size = leaves[leaf, 0], leaves[leaf, 1], leaves[leaf, 2], leaves[leaf, 3]
            target = out[leaf] + i * width
            if kind != REWARD:
                copy_few(target, rows + (cell if kind == ROOT else end[i]) * row_bytes + offset, width)
                continue
            for part in range(0, width, size):
                rewards = Rewards(rows + offset + part, row_bytes, size == 8)
                put_sum(target + part, rewards, of, cell, length, gamma)
    put_index(batch, flat, out[batch.leaves])


@kernel
def list_steps(episodes, address, listed, steps):
    """Write the rows of the ``STEPS.n`` steps from each row on to address ``listed``, and their number in a trajectory.

    After the end of the trajectory, its last row is repeated; the numbers, which do not count these rows, are written
    to ``STEPS.taken``.
    """
    of, batch, joined = numbers_at(episodes), batch_at(address), carray(pointer(steps), 1, STEPS)[0]
    n, flat = joined.n, carray(pointer(batch.flat), batch.count, np.int64)
    for i in range(batch.count):
        if i + _SOON < batch.count:
            expect(of, flat[i + _SOON])
        cell, (length, _) = flat[i], walk(of, flat[i], n)
        store(joined.taken + 8 * i, length, np.int64)
        for k in range(n):
            store(listed + 8 * (i * n + k), cell, np.int64)
            if k + 1 < length:
                cell = following(of, cell)


@kernel
def join_steps(address, targets, read, steps, ends):
    """Join the rows of :func:`list_steps`, which have been read to the tensors at ``read``, to n-step transitions.

    ``ends``, ``[m, 2]``, holds the leaf numbers and sizes of the flags that end a sum of rewards.
    """
    batch, joined = batch_at(address), carray(pointer(steps), 1, STEPS)[0]
    leaves = carray(pointer(batch.extents), (batch.leaves, 4), np.int64)
    out, found = carray(pointer(targets), batch.leaves + 1, np.int64), carray(pointer(read), batch.leaves, np.int64)
    for i in range(batch.count):
        most, length, first = load(joined.taken + 8 * i, np.int64), 1, i * joined.n
        while length < most and not _has_ended(found, ends, first + length - 1):
            length += 1
        store(joined.taken + 8 * i, length, np.int64)
        for leaf in range(batch.leaves):
            width, kind, size = leaves[leaf, 1], leaves[leaf, 2], leaves[leaf, 3]
            row = first if kind == ROOT else first + length - 1
            copy_few(out[leaf] + i * width, found[leaf] + row * width, width)
            if kind == REWARD:
                for part in range(0, width, size):
                    rewards = Rewards(found[leaf] + first * width + part, width, size == 8)
                    put_sum_of_rows(out[leaf] + i * width + part, rewards, length, joined.gamma)
    put_index(batch, carray(pointer(batch.flat), batch.count, np.int64), out[batch.leaves])


@inlined
def _has_ended(found, ends, row):
    for flag in range(ends.shape[0]):
        for feature in range(ends[flag, 1]):
            if load(found[ends[flag, 0]] + row * ends[flag, 1] + feature, np.uint8):
                return True
    return False


@kernel
def hindsight(episodes, address, targets, relabeled, law, live, goals):
    """Gather rows, replace the desired goals of some rows, and write a mask of these rows to address ``relabeled``.

    ``law`` is a :class:`rlbuf_td.kernels.episodes.goals.Law`. Achieved goals from leaf number ``goals[0]`` replace the
    desired goals in the leaves with the numbers ``goals[1:]``. All rows to
    which a drawn row is expanded get the goal of the drawn row.
    """
    of, batch = numbers_at(episodes), batch_at(address)
    rows, row_bytes, count = batch.rows, batch.row_bytes, batch.drawn
    window, drawn = batch.count // count, carray(pointer(batch.anchors), count, np.int64)
    out, flat = carray(pointer(targets), batch.leaves + 1, np.int64), carray(pointer(batch.flat), batch.count, np.int64)
    chosen = np.empty(count, np.int64)
    extent = batch.extents + 16 * goals[0]
    offset, width = load(extent, np.int64), load(extent + 8, np.int64)
    for i in range(count):
        expect(of, drawn[i])
    for i in range(count):
        pick = load(batch.uniform + 8 * i, np.float64)
        chosen[i] = choose(of, law, live, drawn[i], pick)
        for j in range(i * window, (i + 1) * window):
            store(relabeled + j, chosen[i] >= 0, np.bool_)
        if chosen[i] >= 0:
            prefetch(rows + chosen[i] * row_bytes + offset)
    gather_batch(batch, flat, targets)
    put_index(batch, flat, out[batch.leaves])
    for i in range(count):
        if chosen[i] >= 0:
            for goal in goals[1:]:
                for j in range(i * window, (i + 1) * window):
                    copy_few(out[goal] + j * width, rows + chosen[i] * row_bytes + offset, width)


@inlined
def _back(of, windows, lane, t):
    """Return the number of rows before step ``t`` of a lane that a window may have: of its trajectory, or its lane."""
    return rows_before(of, lane, t) if windows.across else steps_back(of, lane, t)


@inlined
def _ahead(of, windows, lane, t):
    """Return the number of rows after step ``t`` of a lane that a window may have."""
    return rows_after(of, lane, t) if windows.across else steps_ahead(of, lane, t)


@inlined
def _fits(of, windows, anchor):
    t, lane = split(anchor, of.lanes)
    has_burn_in = windows.burn_in == 0 or _back(of, windows, lane, t) >= windows.burn_in
    return has_burn_in and _ahead(of, windows, lane, t) >= windows.length - 1


@kernel
def replace_short(episodes, address, targets, kept, order, others):
    """Replace the anchors whose window does not fit into its trajectory; return how many windows still do not fit.

    The anchors are at address ``kept``. Anchor ``i`` is replaced by the drawn row ``order[i]``, and the outputs of the
    sampler by those of this row, whose addresses are at ``others``, as at ``targets``. In the first call, ``order`` is
    0: all drawn rows become anchors. When all windows fit, the anchors take the place of the drawn rows.
    """
    of, batch = numbers_at(episodes), batch_at(address)
    windows = windows_at(batch.windows)
    anchors = carray(pointer(kept), windows.count, np.int64)
    drawn = carray(pointer(batch.anchors), windows.count, np.int64)
    short = 0
    for i in range(windows.count):
        if not order:
            anchors[i] = drawn[i]
        elif not _fits(of, windows, anchors[i]):
            other = load(order + 8 * i, np.int64)
            anchors[i] = drawn[other]
            for report in range(windows.reports):
                width, place = load(windows.widths + 8 * report, np.int64), 8 * (batch.leaves + 1 + report)
                target, source = load(targets + place, np.int64), load(others + place, np.int64)
                copy_few(target + i * width, source + other * width, width)
        short += not _fits(of, windows, anchors[i])
    if not short:
        copy_bytes(batch.anchors, kept, 8 * windows.count)
    return short


@kernel
def sequence(episodes, address, targets, part, steps):
    """Expand the drawn rows, the anchors, to windows, and gather these; join n-step transitions unless ``steps`` is 0.

    ``part`` is ``LIST`` to write the list of rows only, ``READ`` to read the listed rows, ``BOTH`` for both, and
    ``MARK`` if another function has read the listed rows.
    """
    if part in (LIST, BOTH):
        _expand(episodes, address, targets)
        _repeat(address, targets)
    if part == LIST:
        return
    if steps:
        n_step(episodes, address, targets, steps)
    elif part != MARK:
        gather_flat(address, targets)
    _mark_ends(episodes, address, targets)


@kernel
def _expand(episodes, address, targets):
    """Write the rows of the window around each anchor to ``BATCH.flat``, and the masks of these rows.

    A window is ``burn_in`` rows before the anchor, and ``length - 1`` rows after it. Places outside the trajectory
    repeat its first or last row. If ``shifts``, a window that runs past the end of the trajectory begins earlier.
    """
    batch = batch_at(address)
    windows = windows_at(batch.windows)
    of, length, burn_in = numbers_at(episodes), windows.length, windows.burn_in
    window, count = burn_in + length, windows.count
    anchors, flat = (
        carray(pointer(batch.anchors), count, np.int64),
        carray(pointer(batch.flat), batch.count, np.int64),
    )
    bounds = carray(pointer(windows.bounds), (count, 2), np.int64)
    own = targets + 8 * (batch.leaves + 1 + windows.reports)
    mask, burn_in_mask, anchor = load(own, np.int64), load(own + 8, np.int64), load(own + 16, np.int64)
    for i in range(min(_SOON, count)):
        expect(of, anchors[i])
    for i in range(count):
        if i + _SOON < count:
            expect(of, anchors[i + _SOON])
        t, lane = split(anchors[i], of.lanes)
        back, ahead = _back(of, windows, lane, t), _ahead(of, windows, lane, t)
        shift = min(max(0, length - 1 - ahead), back) if windows.shifts else 0
        first, past = burn_in - min(back - shift, burn_in), burn_in + min(ahead + shift, length - 1)
        bounds[i, 0], bounds[i, 1] = first, past
        for j in range(window):
            at = i * window + j
            flat[at] = (t - shift - burn_in + min(max(j, first), past)) % of.steps * of.lanes + lane
            store(mask + at, first <= j <= past, np.bool_)
            store(burn_in_mask + at, j < burn_in, np.bool_)
            if batch.lanes:
                store(anchor + 16 * at, t, np.int64)
                store(anchor + 16 * at + 8, lane, np.int64)
            else:
                store(anchor + 8 * at, anchors[i], np.int64)


@kernel
def _repeat(address, targets):
    """Repeat the outputs of the sampler, one per window, for each row of the window, but write the row's own stamp."""
    batch = batch_at(address)
    windows = windows_at(batch.windows)
    window = windows.burn_in + windows.length
    for report in range(windows.reports):
        target, width = (
            load(targets + 8 * (batch.leaves + 1 + report), np.int64),
            load(windows.widths + 8 * report, np.int64),
        )
        if report == windows.stamp:
            put_stamps(batch, carray(pointer(batch.flat), batch.count, np.int64), target)
            continue
        for i in range(windows.count - 1, -1, -1):  # from the end, because the outputs are at the begin of the target
            for j in range(window - 1, -1, -1):
                copy_few(target + (i * window + j) * width, target + i * width, width)


@kernel
def _mark_ends(episodes, address, targets):
    """Set the flags at the ends of each window, and "is_init" at first steps of episodes within it."""
    batch = batch_at(address)
    windows = windows_at(batch.windows)
    window, flags = windows.burn_in + windows.length, carray(pointer(windows.flags), (3, 2), np.int64)
    bounds = carray(pointer(windows.bounds), (windows.count, 2), np.int64)
    if windows.across and flags[0, 1]:
        _mark_first_steps(numbers_at(episodes), batch, windows, load(targets + 8 * flags[0, 0], np.int64), flags[0, 1])
    for flag in range(3):
        width = flags[flag, 1]
        if width:
            target = load(targets + 8 * flags[flag, 0], np.int64)
            for i in range(windows.count):
                for place in (0, bounds[i, 0]) if flag == 0 else (bounds[i, 1], bounds[i, 1]):
                    for feature in range(width):
                        store(target + (i * window + place) * width + feature, True, np.bool_)


@kernel
def _mark_first_steps(of, batch, windows, target, width):
    flat, window = carray(pointer(batch.flat), batch.count, np.int64), windows.burn_in + windows.length
    bounds = carray(pointer(windows.bounds), (windows.count, 2), np.int64)
    for at in range(batch.count):
        t, lane = split(flat[at], of.lanes)
        begins = steps_back(of, lane, t) == 0 and bounds[at // window, 0] <= at % window <= bounds[at // window, 1]
        if begins or windows.adds_init:
            for feature in range(width):
                store(target + at * width + feature, begins, np.bool_)
