"""Checks the kernels of a GPU against the torch operations that specify them, on a few
hundred rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.episodes import (
    BACK,
    MOST,
    Spans,
    by_age,
    lanes_of_write,
    note_,
    spans,
)
from rlbuf_td.kernels.rows.words import ELSEWHERE, LAST_ROW, ROW
from rlbuf_td.kernels.serials import Serials
from rlbuf_td.kernels.strata import stratification_of
from rlbuf_td.kernels.sum_tree import weight_of, write_magnitudes
from rlbuf_td.kernels.sum_tree.blocks import (
    WEIGHTS,
    BlockUpdate,
    Run,
    WeightLaw,
    block_count,
    set_blocks_,
)
from rlbuf_td.kernels.wrappers import choose_goals, expand, n_step_sums
from rlbuf_td.kernels.wrappers.records import (
    GoalDistribution,
    Goals,
    Rewards,
    WindowShape,
)

_ROWS = WEIGHTS + 300
_BATCH = 40
_SERIALS = Serials(tail=7, written=7 + 20, steps=20, lanes=3)
_CELLS = _SERIALS.steps * _SERIALS.lanes
_LAW = WeightLaw(alpha=0.6, eps=1e-8, least=0.0, first=1.0)


class _Tree(NamedTuple):
    """The tensors of a ``SumTree`` that kernels use."""

    magnitude: Tensor
    weight: Tensor
    blocks: Tensor
    refused: Tensor


def fault_on(device: torch.device) -> str:
    """Return what is wrong with the kernels on a device, in one line; "" if they are
    right."""
    generator = torch.Generator().manual_seed(0)
    for check in CHECKS:
        name = words_of(check)
        try:
            is_right = check(device, generator)
        except Exception as error:  # noqa: BLE001  Triton raises errors of many classes
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            return f"Triton cannot {name} ({reason})"
        if not is_right:
            return f"Triton's kernels do not {name} as torch does"
    return ""


def words_of(check: Callable[..., bool]) -> str:
    """Say what the kernels of a check do."""
    return check.__name__.replace("_", " ")


def draw_uniformly(device: torch.device, generator: torch.Generator) -> bool:
    """Whether uniform draws are those of the reference."""
    from rlbuf_td.kernels.draws.triton import uniform_rows_

    count, rows = 4096, 8
    numbers = torch.empty(count, dtype=torch.int64, device=device)
    uniform_rows_(numbers, rows, generator)
    if int(numbers.min()) < 0 or int(numbers.max()) >= rows:
        return False
    expected = count / rows
    counts = numbers.bincount(minlength=rows) - expected
    # chi-square: above 40 with a probability of 1e-6
    return float((counts**2).sum()) / expected < 40


def read_and_write_rows(device: torch.device, generator: torch.Generator) -> bool:
    """Whether rows and their words are copied, gathered and scattered as with torch."""
    from rlbuf_td.kernels.rows.triton import RowWords

    extents = np.array([(0, 16), (16, 12), (28, 1), (29, 2)])
    shape = (_ROWS, 32)
    byte = {"dtype": torch.uint8, "generator": generator}
    rows = torch.randint(256, shape, **byte).to(device)
    cells = torch.randperm(_ROWS, generator=generator)[:_BATCH].to(device)
    words = RowWords(extents, device)
    last = cells.flip(0)
    parts = extents.tolist()
    leaves = [rows[cells, begin : begin + size] for begin, size in parts]
    last_leaves = [rows[last, begin : begin + size] for begin, size in parts]
    read = words.read(rows, cells)
    joined = words.allocate(_BATCH).fill_(0)
    sources = [ROW, LAST_ROW, ELSEWHERE, LAST_ROW]
    RowWords(extents, device, sources).join(rows, cells, last, joined)
    absent = torch.zeros_like(leaves[2])
    of_join = [leaves[0], last_leaves[1], absent, last_leaves[3]]
    wanted = rows.clone()
    wanted[last, :31] = torch.cat(leaves, 1)
    addresses = torch.tensor([leaf.data_ptr() for leaf in leaves], device=device)
    words.write(rows, last, addresses)
    return (
        _holds(read, leaves) and _holds(joined, of_join) and torch.equal(rows, wanted)
    )


def _holds(block: Tensor, leaves: list[Tensor]) -> bool:
    """Whether a block has these leaves, one after another, with equal room for the rows of
    each."""
    room = len(block) // sum(leaf.shape[1] for leaf in leaves)
    start = 0
    for leaf in leaves:
        stored = block[start : start + leaf.numel()].view_as(leaf)
        start += room * leaf.shape[1]
        if not torch.equal(stored, leaf):
            return False
    return True


def update_priorities(device: torch.device, generator: torch.Generator) -> bool:
    """Whether an update sets weights and sums of blocks, and skips stale and refused rows."""
    from rlbuf_td.kernels.sum_tree import triton

    tree = _empty_tree(device)
    largest = torch.tensor(-1.0, device=device)
    triton.enter_(tree, Run(WEIGHTS + 5, _ROWS - 2, _ROWS - 1), largest, _LAW)
    wanted = torch.ones_like(tree.magnitude)
    wanted[-1] = wanted[WEIGHTS + 4] = -1
    if not torch.equal(tree.magnitude, wanted) or not _is_whole(tree):
        return False
    index = torch.randint(-1, _ROWS, (_BATCH,), generator=generator)
    index[:9] = index[9:18]  # the last one of equal rows counts
    td_error = torch.randn(_BATCH, generator=generator)
    td_error[-1] = torch.nan
    index, td_error = index.to(device), td_error.to(device)
    serials = Serials(100, 100 + _ROWS, _ROWS, 1)
    stamp = index + _ROWS * (index < 100)
    stamp[20:25] -= _ROWS
    is_stale = (index >= 0) & (torch.arange(_BATCH, device=device) // 5 == 4)
    update = BlockUpdate(index, td_error, stamp, _ROWS - 1, serials)
    stale = triton.update_(tree, update, largest, _LAW, counts=True)
    of_torch = index.masked_fill(is_stale, -1), td_error, _ROWS - 1
    _, _, most, refused = write_magnitudes(wanted, *of_torch)
    return (
        stale is not None
        and torch.equal(stale, is_stale.sum())
        and torch.equal(tree.refused, refused)
        and torch.equal(largest, most)
        and torch.equal(tree.magnitude[:-1], wanted[:-1])
        and _is_whole(tree)
    )


def draw_by_priority(device: torch.device, generator: torch.Generator) -> bool:
    """Whether drawn rows lie in their segments, and have the right weights and stamps."""
    from rlbuf_td.kernels.draws.triton import stamps_of
    from rlbuf_td.kernels.sum_tree import triton

    tree = _empty_tree(device)
    weight = torch.rand(_ROWS, generator=generator) - 0.3
    tree.weight.copy_(weight.clamp(min=0.0))
    triton.sum_blocks_(tree)
    replaced = 7  # rows
    serials = Serials(tail=replaced, written=replaced + _ROWS, steps=_ROWS, lanes=1)
    stratification = stratification_of(_BATCH, True, 0.4, "buffer")
    flat, importance, stamp = triton.draw(
        tree, _BATCH, generator, stratification, _ROWS, serials
    )
    sums = tree.weight.cumsum(0, dtype=torch.float64)
    chosen = tree.weight[flat].to(torch.float64)
    least = tree.weight[tree.weight > 0].amin()
    expected = (chosen / least).pow(-0.4).to(torch.float32)
    # one draw in each segment
    first, _ = flat.sort()
    begin = torch.arange(_BATCH, device=device) * (sums[-1] / _BATCH)
    end = begin + sums[-1] / _BATCH
    is_inside = (sums[first] > begin) & (sums[first] - tree.weight[first] < end)
    return (
        bool((chosen > 0).all() & is_inside.all())
        and torch.allclose(importance, expected, rtol=1e-6, atol=0.0)
        and stamp is not None
        and torch.equal(stamp, torch.where(flat < replaced, flat + _ROWS, flat))
        and torch.equal(stamp, stamps_of(flat, serials))
    )


def note_episodes(device: torch.device, generator: torch.Generator) -> bool:
    """Whether a write notes the episodes of its rows as with torch."""
    from rlbuf_td.kernels.episodes.triton import EpisodeNotes

    steps = 100
    lanes = 3
    count = 90
    rows = torch.randint(2, (steps * lanes, 8), generator=generator)
    rows = (rows * (torch.rand(rows.shape, generator=generator) < 0.2)).byte()
    rows = rows.to(device)
    numbers = torch.zeros(lanes, steps, 2, dtype=torch.int32, device=device)
    wanted = numbers.clone()
    serials = torch.zeros(3, lanes, dtype=torch.int64)
    following = torch.tensor([[-1, 3, 0], [0, 1, 0]], device=device)
    notes = EpisodeNotes(np.array([(0, 1), (5, 2)]), 4, torch.uint8, device)
    for _ in range(3):
        serials[2] = serials[1]
        serials[1] += torch.tensor([count, 2, 0])
        serials[0] = (serials[1] - steps).clamp(min=0)
        after, table = torch.empty_like(following), serials.to(device)
        notes.note(numbers, rows, (following, after), table)
        changed = lanes_of_write(wanted, following, table)
        by_lane = by_age(changed, int(changed.newest.max()) + 1)
        row = rows[by_lane.cells]
        ended = (row[..., [0, 5, 6]] > 0).any(-1)
        next_rows = note_(changed, by_lane, ended, row[..., 4].long())
        if not torch.equal(after, next_rows) or not torch.equal(numbers, wanted):
            return False
        following = after
    return True


def sum_rewards(device: torch.device, generator: torch.Generator) -> bool:
    """Whether sums of rewards over several steps are those of the reference."""
    from rlbuf_td.kernels.wrappers.triton import sum_steps

    n, gamma = 4, 0.9
    numbers, cells = _episodes(device, generator)
    rows = torch.randn(_CELLS, 4, generator=generator).to(device)
    total = torch.empty(_CELLS, 2, device=device)
    rewards = Rewards(rows, 8, total)
    sums = sum_steps(rewards, cells, numbers, _SERIALS, n, gamma)
    last = _spans(numbers, cells).ahead.clamp(max=n - 1)
    step = torch.arange(n, device=device).minimum(last[:, None])
    window = (cells[:, None] + step * _SERIALS.lanes) % _CELLS
    wanted = n_step_sums(rows[window][..., 2:], last, gamma)
    return (
        torch.equal(sums.taken, last + 1)
        and torch.equal(sums.ends, window[:, -1])
        and torch.allclose(total, wanted, rtol=1e-6, atol=1e-6)
    )


def list_windows(device: torch.device, generator: torch.Generator) -> bool:
    """Whether the rows of windows, and their masks, are those of the reference."""
    from rlbuf_td.kernels.wrappers import triton

    numbers, anchors = _episodes(device, generator)
    for shifts, crosses in (False, False), (True, False), (True, True):
        shape = WindowShape(length=5, burn_in=2, shifts=shifts, crosses=crosses)
        of_lane = torch.zeros_like(numbers)
        of_lane[..., BACK] = MOST
        reach = _spans(of_lane if crosses else numbers, anchors)
        size = _SERIALS.steps, _SERIALS.lanes
        wanted = expand(anchors, (reach.back, reach.ahead), *size, shape)
        if crosses:
            begins = _spans(numbers, wanted.flat).back == 0
            wanted = wanted._replace(first=wanted.first | (wanted.mask & begins))
        listed = triton.expand(anchors, numbers, _SERIALS, shape, has_pairs=crosses)
        if crosses:
            pair = wanted.anchors // _SERIALS.lanes, wanted.anchors % _SERIALS.lanes
            wanted = wanted._replace(anchors=torch.stack(pair, -1))
        if not all(map(torch.equal, listed, wanted)):
            return False
    return True


def relabel_goals(device: torch.device, generator: torch.Generator) -> bool:
    """Whether goals are chosen and copied as with torch."""
    from rlbuf_td.kernels.wrappers import triton

    numbers, cells = _episodes(device, generator)
    shape = (_CELLS, 32)
    byte = {"dtype": torch.uint8, "generator": generator}
    rows = torch.randint(256, shape, **byte).to(device)
    owner = torch.arange(_CELLS, device=device).flip(0)
    thresholds = (0.3, 0.5, 0.7, 0.9)
    for log_gamma, offset, size in (-0.1, 4, 12), (0.0, 5, 3):
        distribution = GoalDistribution(
            thresholds, only_finished=log_gamma < 0, log_gamma=log_gamma
        )
        state = generator.get_state()
        uniform = _uniform_numbers(_CELLS, device, generator)
        generator.set_state(state)
        steps, mask = choose_goals(_spans(numbers, cells), uniform, distribution)
        chosen = (cells + steps * _SERIALS.lanes) % _CELLS
        is_random = (uniform >= 0.7) & (uniform < 0.9)
        any_row = ((uniform - 0.7) / (0.9 - 0.7) * _CELLS).long()
        chosen = torch.where(is_random, any_row, chosen)[owner]
        mask = mask[owner]
        goals = [rows.new_zeros(_CELLS, size) for _ in range(2)]
        where = Goals(rows, offset, goals, _CELLS)
        how = numbers, _SERIALS, distribution, generator
        relabeled = triton.relabel_(where, cells, owner, *how)
        wanted = rows[chosen, offset : offset + size] * mask[:, None]
        results = relabeled, *goals
        if not all(map(torch.equal, results, (mask, wanted, wanted))):
            return False
    return True


#: Each tells whether kernels on a device do what its name says.
CHECKS: tuple[Callable[[torch.device, torch.Generator], bool], ...] = (
    draw_uniformly,
    read_and_write_rows,
    update_priorities,
    draw_by_priority,
    note_episodes,
    sum_rewards,
    list_windows,
    relabel_goals,
)


def _episodes(
    device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return numbers of episodes of all rows of a ring, and all cells."""
    lengths = (_SERIALS.lanes, _SERIALS.steps, 2)
    numbers = torch.randint(0, 4, lengths, generator=generator)
    return numbers.to(device, torch.int32), torch.arange(_CELLS, device=device)


def _spans(numbers: Tensor, cells: Tensor) -> Spans:
    return spans(numbers, cells, _SERIALS.tail, _SERIALS.written)


def _uniform_numbers(
    count: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Return the random numbers that a kernel draws from this state of a generator."""
    from rlbuf_td.kernels.draws.triton import uniform_rows_

    digits = torch.empty(count, dtype=torch.int64, device=device)
    uniform_rows_(digits, 2**53, generator)
    return digits.to(torch.float64) * 2.0**-53


def _empty_tree(device: torch.device) -> _Tree:
    blocks = torch.zeros(2, block_count(_ROWS), dtype=torch.float64)
    tree = _Tree(
        torch.full((_ROWS,), -1.0),
        torch.zeros(_ROWS),
        blocks,
        torch.zeros((), dtype=torch.int64),
    )
    return _Tree(*(tensor.to(device) for tensor in tree))


def _is_whole(tree: _Tree) -> bool:
    """Whether weights follow from magnitudes, and blocks from weights."""
    weight = weight_of(tree.magnitude, _LAW.alpha, _LAW.eps)
    blocks = torch.empty_like(tree.blocks)
    set_blocks_(blocks, tree.weight)
    return torch.allclose(tree.weight, weight, rtol=2.0**-22, atol=0.0) and (
        torch.allclose(tree.blocks, blocks, rtol=1e-12, atol=0.0)
    )
