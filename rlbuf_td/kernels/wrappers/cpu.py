"""The loops of wrappers: hindsight goals, n-step transitions and windows.

Args:
    episodes: address of a record with the dtype
        :data:`rlbuf_td.kernels.episodes.EPISODES`.
    address: address of a record with the dtype
        :data:`rlbuf_td.kernels.batch.ring.BATCH`.
    flat: address of the flat indices of the rows of a batch.
    targets: address of an array with the addresses of the output tensors: the leaves,
        what ``put_report`` writes, and the entries of the wrappers.
    steps: address of a record with the dtype :data:`rlbuf_td.kernels.batch.ring.STEPS`.
    windows: address of a record with the dtype
        :data:`rlbuf_td.kernels.batch.ring.WINDOWS`.
    live: number of rows that hold data. A function that takes it returns False, and
        writes nothing, if a row is not in ``[0, live)``.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.cpu import are_written, batch_at, put_report
from rlbuf_td.kernels.batch.ring import REWARD, ROOT, STEPS, WINDOWS
from rlbuf_td.kernels.compiled import (
    copy_few,
    inlined,
    kernel,
    load,
    pointer,
    prefetch,
    prefetch_row,
    store,
)
from rlbuf_td.kernels.episodes.cpu import (
    cell_of,
    expect,
    has_ended,
    numbers_at,
    rows_after,
    rows_before,
    split,
    steps_ahead,
    steps_back,
)

# how many rows ahead the numbers of a row, and its data, are prefetched
_SOON, _AHEAD = 16, 9


class Rewards(NamedTuple):
    """A column of rewards of all rows, one number per row."""

    address: int
    row_bytes: int  # from one row to the next
    is_double: bool  # float64, else float32


@inlined
def steps_to_goal(share, ahead, log_gamma):
    """Map ``share`` in ``[0, 1)`` to ``k`` in ``0 .. ahead``, with probability
    proportional to ``exp(k log_gamma)``."""
    if log_gamma < 0:
        return min(
            np.int64(np.log1p(share * np.expm1((ahead + 1) * log_gamma)) / log_gamma),
            ahead,
        )
    return min(np.int64(share * (ahead + 1)), ahead)


@inlined
def choose(numbers, distribution, live, cell, pick):
    """Return the row that provides the new goal of row ``cell``, or -1 if it keeps its
    goal; ``pick`` is random.

    ``distribution`` is a :class:`rlbuf_td.kernels.wrappers.GoalDistribution`. Of the strategy "random",
    return the number of the row.
    """
    future, final, episode, random = distribution.thresholds
    if pick >= episode:
        return (
            min(np.int64((pick - episode) / (random - episode) * live), live - 1)
            if pick < random
            else np.int64(-1)
        )
    steps, lanes = numbers.steps, numbers.lanes
    t, lane = split(cell, lanes)
    if distribution.only_finished and not has_ended(numbers, lane, t):
        return np.int64(-1)
    ahead = steps_ahead(numbers, lane, t)
    if pick < future:
        t += steps_to_goal(pick / future, ahead, distribution.log_gamma)
    elif pick < final:
        t += ahead
    else:
        back = steps_back(numbers, lane, t)
        t += (
            min(
                np.int64((pick - final) / (episode - final) * (back + ahead + 1)),
                back + ahead,
            )
            - back
        )
    if t < 0:
        t += steps
    elif t >= steps:
        t -= steps
    return t * lanes + lane


@inlined
def _reward_at(rewards, cell):
    address = rewards.address + cell * rewards.row_bytes
    return (
        load(address, np.float64)
        if rewards.is_double
        else np.float64(load(address, np.float32))
    )


@inlined
def next_row(numbers, cell):
    """Return the row one time step after row ``cell``, in the ring of its lane."""
    cell = cell + numbers.lanes
    cells = numbers.steps * numbers.lanes
    return cell if cell < cells else cell - cells


@inlined
def walk(numbers, cell, n):
    """Count the rows from ``cell`` to the end of its trajectory, at most ``n``; return
    the count and the last row."""
    t, lane = split(cell, numbers.lanes)
    count = min(steps_ahead(numbers, lane, t) + 1, n)
    t += count - 1
    return count, (t if t < numbers.steps else t - numbers.steps) * numbers.lanes + lane


@inlined
def put_sum(target, rewards, numbers, cell, count, gamma):
    """Write the discounted sum of ``count`` rewards, from row ``cell`` on, to
    ``target``."""
    # as with torch's ``cumsum``, -0.0 becomes 0.0
    total = 0.0 + _reward_at(rewards, cell)
    discount = 1.0
    for _ in range(1, count):
        cell = next_row(numbers, cell)
        discount *= gamma
        total += discount * _reward_at(rewards, cell)
    if rewards.is_double:
        store(target, total, np.float64)
    else:
        store(target, np.float32(total), np.float32)


@inlined
def _put_joined(batch, targets, numbers, i, cells, sums):
    """Write row ``i`` of a batch of n-step transitions.

    ``cells`` are the first and the last row; ``sums`` is the number of its rewards, and
    the discount.
    """
    first, last = cells
    leaves = carray(pointer(batch.extents), (batch.leaves, 4), np.int64)
    for leaf in range(batch.leaves):
        offset = leaves[leaf, 0]
        width = leaves[leaf, 1]
        kind = leaves[leaf, 2]
        size = leaves[leaf, 3]
        target = load(targets + 8 * leaf, np.int64) + i * width
        column = batch.rows + offset
        if kind != REWARD:
            row = first if kind == ROOT else last
            copy_few(target, column + row * batch.row_bytes, width)
            continue
        length, gamma = sums
        for part in range(0, width, size):
            rewards = Rewards(column + part, batch.row_bytes, size == 8)
            put_sum(target + part, rewards, numbers, first, length, gamma)


@kernel
def n_step(episodes, address, flat, targets, steps, live):
    """Gather n-step transitions."""
    numbers = numbers_at(episodes)
    batch = batch_at(address)
    joined = carray(pointer(steps), 1, STEPS)[0]
    taken, n, gamma = joined.taken, joined.n, joined.gamma
    rows, row_bytes, count = batch.rows, batch.row_bytes, batch.count
    first = carray(pointer(flat), count, np.int64)
    end = carray(pointer(joined.ends), count, np.int64)
    if not are_written(first, live):
        return False
    for begun in range(count + _AHEAD):
        if begun + _SOON < count:
            expect(numbers, first[begun + _SOON])
        if begun < count:
            cell = first[begun]
            length, end[begun] = walk(numbers, cell, n)
            store(taken + 8 * begun, length, np.int64)
            for _ in range(length):
                prefetch_row(rows + cell * row_bytes, row_bytes)
                cell = next_row(numbers, cell)
        i = begun - _AHEAD
        if i < 0:
            continue
        sums = load(taken + 8 * i, np.int64), gamma
        _put_joined(batch, targets, numbers, i, (first[i], end[i]), sums)
    put_report(batch, first, targets, 0, len(first))
    return True


@kernel
def relabel(
    episodes,
    address,
    targets,
    relabeled,
    drawn,
    uniform,
    count,
    distribution,
    live,
    are_cells: bool,
    goals,
):
    """Replace the desired goals of some rows of a batch, and write a mask of these rows
    to address ``relabeled``.

    The ``count`` rows at address ``drawn``, each of which is expanded to equally many
    rows of the batch, have the random numbers at ``uniform``. ``distribution`` is a
    :class:`rlbuf_td.kernels.wrappers.GoalDistribution`. Achieved goals from leaf number
    ``goals[0]`` replace the desired goals in the leaves with the numbers ``goals[1:]``.
    ``live`` is the number of live rows; ``are_cells``: whether their numbers are their
    flat indices.
    """
    numbers = numbers_at(episodes)
    batch = batch_at(address)
    window = batch.count // count
    cell = carray(pointer(drawn), count, np.int64)
    pick = carray(pointer(uniform), count, np.float64)
    chosen = np.empty(count, np.int64)
    _, _, least_random, _ = distribution.thresholds
    extent = batch.extents + 16 * goals[0]
    offset = load(extent, np.int64)  # of the achieved goal in a row
    width = load(extent + 8, np.int64)
    for i in range(count):
        expect(numbers, cell[i])
    for i in range(count):
        chosen[i] = choose(numbers, distribution, live, cell[i], pick[i])
        if chosen[i] >= 0:
            is_number = pick[i] >= least_random  # see `choose`
            if is_number and not are_cells:
                chosen[i] = cell_of(numbers, chosen[i])
            prefetch(batch.rows + chosen[i] * batch.row_bytes + offset)
    for i in range(count):
        is_relabeled = chosen[i] >= 0
        achieved = batch.rows + chosen[i] * batch.row_bytes + offset
        for j in range(i * window, (i + 1) * window):
            store(relabeled + j, is_relabeled, np.bool_)
            if is_relabeled:
                for goal in goals[1:]:
                    desired = load(targets + 8 * goal, np.int64) + j * width
                    copy_few(desired, achieved, width)


@inlined
def _back(numbers, across, lane, t):
    """Return the number of rows before step ``t`` of a lane that a window may have: of
    its trajectory, or its lane."""
    return rows_before(numbers, lane, t) if across else steps_back(numbers, lane, t)


@inlined
def _ahead(numbers, across, lane, t):
    """Return the number of rows after step ``t`` of a lane that a window may have."""
    return rows_after(numbers, lane, t) if across else steps_ahead(numbers, lane, t)


@kernel
def replace_short(
    episodes,
    length,
    burn_in,
    across,
    anchors,
    count,
    live,
    others,
    order,
    weight,
    other_weight,
):
    """Replace each anchor whose window does not fit; return how many windows do not fit
    then, -1 if a row is not live.

    Anchor ``i``, at address ``anchors``, is replaced by row ``order[i]`` of those at
    ``others``, and its weight too; 0 for ``weight`` means that there are no weights. 0
    for ``order`` only counts; a call with other anchors must do so before one that
    replaces.
    """
    numbers = numbers_at(episodes)
    short = 0
    anchor = carray(pointer(anchors), count, np.int64)
    for i in range(count):
        if order and not _fits(numbers, length, burn_in, across, anchor[i]):
            other = load(order + 8 * i, np.int64)
            anchor[i] = load(others + 8 * other, np.int64)
            if weight:
                store(
                    weight + 4 * i,
                    load(other_weight + 4 * other, np.float32),
                    np.float32,
                )
        if anchor[i] < 0 or anchor[i] >= live:
            return -1
        short += not _fits(numbers, length, burn_in, across, anchor[i])
    return short


@inlined
def _fits(numbers, length, burn_in, across, anchor):
    t, lane = split(anchor, numbers.lanes)
    has_burn_in = burn_in == 0 or _back(numbers, across, lane, t) >= burn_in
    return has_burn_in and _ahead(numbers, across, lane, t) >= length - 1


@inlined
def _windows_at(address):
    return carray(pointer(address), 1, WINDOWS)[0]


@inlined
def _put_masks(windows, targets, window, position, bounds):
    """Write the masks and the weight of the row at ``position`` in window number
    ``window``; ``bounds`` are the places of the first and the last row of the
    trajectory."""
    row = window * (windows.burn_in + windows.length) + position
    mask = load(targets + 8 * windows.mask, np.int64)
    burn_in_mask = load(targets + 8 * windows.burn_in_mask, np.int64)
    is_real = bounds[0] <= position <= bounds[1]
    store(mask + row, is_real, np.bool_)
    store(burn_in_mask + row, position < windows.burn_in, np.bool_)
    if windows.weight:
        weight = load(windows.weight + 4 * window, np.float32)
        target = load(targets + 8 * windows.priority_weight, np.int64)
        store(target + 4 * row, weight, np.float32)


@kernel
def expand(episodes, windows, anchors, flat, targets, lanes, live):
    """Write the rows of the window around each row at address ``anchors`` to address
    ``flat``, and their masks.

    A window is ``burn_in`` rows before the anchor, and ``length - 1`` rows after it.
    Places outside the trajectory repeat its first or last row. If ``shifts``, a window
    that runs past the end of the trajectory begins earlier. All rows of a window have
    the weight of the anchor.
    """
    windows = _windows_at(windows)
    numbers = numbers_at(episodes)
    length = windows.length
    burn_in = windows.burn_in
    count = windows.count
    window = burn_in + length
    anchor = carray(pointer(anchors), count, np.int64)
    if not are_written(anchor, live):
        return False
    bounds = carray(pointer(windows.bounds), (count, 2), np.int64)
    index = load(targets + 8 * windows.anchor_index, np.int64)
    for i in range(min(_SOON, count)):
        expect(numbers, anchor[i])
    for i in range(count):
        if i + _SOON < count:
            expect(numbers, anchor[i + _SOON])
        t, lane = split(anchor[i], numbers.lanes)
        back = _back(numbers, windows.across, lane, t)
        ahead = _ahead(numbers, windows.across, lane, t)
        shift = min(max(0, length - 1 - ahead), back) if windows.shifts else 0
        first = burn_in - min(back - shift, burn_in)
        past = burn_in + min(ahead + shift, length - 1)
        bounds[i, 0], bounds[i, 1] = first, past
        for j in range(window):
            row = i * window + j
            cell = (
                t - shift - burn_in + min(max(j, first), past)
            ) % numbers.steps * numbers.lanes + lane
            store(flat + 8 * row, cell, np.int64)
            _put_masks(windows, targets, i, j, (first, past))
            if lanes:
                store(index + 16 * row, t, np.int64)
                store(index + 16 * row + 8, lane, np.int64)
            else:
                store(index + 8 * row, anchor[i], np.int64)
    return True


@kernel
def mark_ends(episodes, windows, flat, targets):
    """Set the flags at the ends of each window, and "is_init" at first steps of
    episodes within it."""
    windows = _windows_at(windows)
    window = windows.burn_in + windows.length
    flags = carray(pointer(windows.flags), (3, 2), np.int64)
    bounds = carray(pointer(windows.bounds), (windows.count, 2), np.int64)
    if windows.across and flags[0, 1]:
        _mark_first_steps(
            numbers_at(episodes),
            windows,
            flat,
            load(targets + 8 * flags[0, 0], np.int64),
            flags[0, 1],
        )
    for flag in range(3):
        width = flags[flag, 1]
        if not width:
            continue
        target = load(targets + 8 * flags[flag, 0], np.int64)
        for i in range(windows.count):
            first = i * window
            if flag == 0:  # "is_init"
                _set_flags(target, first, width)
                _set_flags(target, first + bounds[i, 0], width)
            else:
                _set_flags(target, first + bounds[i, 1], width)


@inlined
def _set_flags(target, row, width):
    """Set the ``width`` flags of row ``row`` in the leaf at address ``target``."""
    for feature in range(width):
        store(target + row * width + feature, True, np.bool_)


@kernel
def _mark_first_steps(numbers, windows, flat, target, width):
    """Mark the rows of windows that begin an episode in the leaf at address ``target``,
    ``width`` flags per row."""
    window = windows.burn_in + windows.length
    bounds = carray(pointer(windows.bounds), (windows.count, 2), np.int64)
    for row in range(windows.count * window):
        t, lane = split(load(flat + 8 * row, np.int64), numbers.lanes)
        begins = (
            steps_back(numbers, lane, t) == 0
            and bounds[row // window, 0] <= row % window <= bounds[row // window, 1]
        )
        if begins or windows.adds_init:
            for feature in range(width):
                store(target + row * width + feature, begins, np.bool_)


@kernel
def put_values(target, values, mask, count, width):
    """Implement :func:`rlbuf_td.kernels.wrappers.put_values_` for ``count`` numbers of
    ``width`` bytes, given addresses."""
    for i in range(count):
        value = values + i * width
        if load(mask + i, np.bool_) and np.isnan(
            load(value, np.float64) if width == 8 else load(value, np.float32)
        ):
            return i
    for i in range(count):
        if load(mask + i, np.bool_):
            copy_few(target + i * width, values + i * width, width)
    return -1
