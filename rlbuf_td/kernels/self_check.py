"""Checks the kernels of a GPU against the torch operations that specify them, on a few
hundred rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.episodes import by_age, lanes_of_write, note_, spans
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
from rlbuf_td.kernels.wrappers import n_step_sums
from rlbuf_td.kernels.wrappers.rewards import Rewards

_ROWS, _BATCH = WEIGHTS + 300, 40
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
        name = check.__name__.strip("_").replace("_", " ")
        try:
            is_right = check(device, generator)
        except Exception as error:  # noqa: BLE001  Triton raises errors of many classes
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            return f"Triton cannot {name} ({reason})"
        if not is_right:
            return f"Triton's kernels do not {name} as torch does"
    return ""


def draw_uniformly(device: torch.device, generator: torch.Generator) -> bool:
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
    from rlbuf_td.kernels.rows.triton import RowWords

    extents = np.array([(0, 16), (16, 12), (28, 1), (29, 2)])
    shape, byte = (_ROWS, 32), {"dtype": torch.uint8, "generator": generator}
    rows = torch.randint(256, shape, **byte).to(device)
    cells = torch.randperm(_ROWS, generator=generator)[:_BATCH].to(device)
    words = RowWords(extents, device)
    block, start = words.read(rows, cells), 0
    room = len(block) // words.nbytes
    leaves = [rows[cells, begin : begin + size] for begin, size in extents.tolist()]
    for leaf in leaves:
        read = block[start : start + leaf.numel()].view_as(leaf)
        start += room * leaf.shape[1]
        if not torch.equal(read, leaf):
            return False
    wanted, target = rows.clone(), cells.flip(0)
    wanted[target, :31] = torch.cat(leaves, 1)
    addresses = torch.tensor([leaf.data_ptr() for leaf in leaves], device=device)
    words.write(rows, target, addresses)
    return torch.equal(rows, wanted)


def update_priorities(device: torch.device, generator: torch.Generator) -> bool:
    from rlbuf_td.kernels.sum_tree import triton

    tree, largest = _empty_tree(device), torch.tensor(-1.0, device=device)
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
    from rlbuf_td.kernels.sum_tree import triton

    tree = _empty_tree(device)
    weight = torch.rand(_ROWS, generator=generator) - 0.3
    tree.weight.copy_(weight.clamp(min=0.0))
    triton.sum_blocks_(tree)
    serials, law = (
        Serials(7, 7 + _ROWS, _ROWS, 1),
        stratification_of(_BATCH, True, 0.4, "buffer"),
    )
    flat, importance, stamp = triton.draw(tree, _BATCH, generator, law, _ROWS, serials)
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
        and torch.equal(stamp, flat + _ROWS * (flat < 7))
    )


def note_episodes(device: torch.device, generator: torch.Generator) -> bool:
    from rlbuf_td.kernels.episodes.triton import EpisodeNotes

    steps, lanes, count = 100, 3, 90
    rows = torch.randint(2, (steps * lanes, 8), generator=generator)
    rows = (rows * (torch.rand(rows.shape, generator=generator) < 0.2)).byte()
    rows = rows.to(device)
    numbers = torch.zeros(lanes, steps, 2, dtype=torch.int32, device=device)
    wanted, serials = numbers.clone(), torch.zeros(3, lanes, dtype=torch.int64)
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
    from rlbuf_td.kernels.wrappers.triton import sum_steps

    steps, lanes, n, gamma = 20, 3, 4, 0.9
    cells = torch.arange(steps * lanes, device=device)
    rows = torch.randn(steps * lanes, 4, generator=generator).to(device)
    lengths = torch.randint(0, 4, (lanes, steps, 2), generator=generator)
    numbers = lengths.to(device, torch.int32)
    serials = Serials(7, 7 + steps, steps, lanes)
    rewards = Rewards(rows, 8, torch.float32, torch.Size([2]))
    sums = sum_steps(rewards, cells, numbers, serials, n, gamma)
    ahead = spans(numbers, cells, serials.tail, serials.written).ahead
    last = ahead.clamp(max=n - 1)
    step = torch.arange(n, device=device).minimum(last[:, None])
    window = (cells[:, None] + step * lanes) % (steps * lanes)
    wanted = n_step_sums(rows[window][..., 2:], last, gamma)
    return (
        torch.equal(sums.taken, last + 1)
        and torch.equal(sums.ends, window[:, -1])
        and torch.allclose(sums.total, wanted, rtol=1e-6, atol=1e-6)
    )


#: Each tells whether kernels on a device do what its name says.
CHECKS: tuple[Callable[[torch.device, torch.Generator], bool], ...] = (
    draw_uniformly,
    read_and_write_rows,
    update_priorities,
    draw_by_priority,
    note_episodes,
    sum_rewards,
)


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
