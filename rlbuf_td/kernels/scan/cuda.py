"""GPU twins of :mod:`rlbuf_td.kernels.scan`: everything an estimate needs in one launch.

Two forms. *Loop*: a thread a chain (one feature of one lane), from the last step to the first; neighbouring threads
read neighbouring features. Every step waits for memory, so it is the form for a few steps of time-major rollouts.
*Scan*: a program holds a tile of steps and chains, loads it at once, and combines the pairs ``(a, b)`` in a logarithmic
number of rounds; tile by tile where the horizon is longer, the value behind a tile being carried into it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.dispatch import launching_on

_LONGEST_LOOP = 16  # steps
_TILE = 2048  # elements of a tile
_OPTIONS = {"enable_fp_fusion": True}  # Triton warns where neither is asked for


@triton.jit
def _follow(x, b, later):
    return x + b * tl.where(b == 0, 0.0, later)


@triton.jit
def _combine(later_x, later_b, x, b):
    """Append an earlier step to later ones; a zero coefficient cuts, so that no NaN passes it."""
    return _follow(x, b, later_x), b * tl.where(b == 0, 0.0, later_b)


@triton.jit
def _delta(value, next_value, reward, done, terminated, gamma, decay, at, inside):
    """Return TD errors, coefficients and values."""
    v = tl.load(value + at, mask=inside, other=0.0)
    ahead = gamma * tl.load(next_value + at, mask=inside, other=0.0)
    ahead = tl.where(tl.load(terminated + at, mask=inside, other=1) != 0, 0.0, ahead)
    delta = tl.load(reward + at, mask=inside, other=0.0) + ahead - v
    return delta, tl.where(tl.load(done + at, mask=inside, other=1) != 0, 0.0, decay), v


@triton.jit
def _gae_loop(
    value, next_value, reward, done, terminated, advantage, target, gamma, decay, steps, features, chains,
    SIZE: tl.constexpr,
):  # fmt: skip
    chain = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = chain < chains
    at = (chain // features) * steps * features + chain % features + (steps - 1) * features
    x = tl.zeros([SIZE], tl.float32)
    for _ in range(steps):
        delta, b, v = _delta(value, next_value, reward, done, terminated, gamma, decay, at, inside)
        x = _follow(delta, b, x)
        tl.store(advantage + at, x, mask=inside)
        tl.store(target + at, x + v, mask=inside)
        at -= features


@triton.jit
def _scan_loop(a, b, out, steps, features, chains, SIZE: tl.constexpr):
    chain = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = chain < chains
    at = (chain // features) * steps * features + chain % features + (steps - 1) * features
    x = tl.zeros([SIZE], out.dtype.element_ty)
    for _ in range(steps):
        here, carry = tl.load(a + at, mask=inside, other=0.0), tl.load(b + at, mask=inside, other=0.0)
        x = _follow(here, carry, x)
        tl.store(out + at, x, mask=inside)
        at -= features


@triton.jit
def _tile(tile, steps, features, chains, TIME: tl.constexpr, CHAINS: tl.constexpr, TIME_LAST: tl.constexpr):
    """Return the positions in memory of a tile of steps and chains, and which of them there are.

    The axis that is dense in memory comes last.
    """
    t = tile * TIME + tl.arange(0, TIME)
    chain = tl.program_id(0).to(tl.int64) * CHAINS + tl.arange(0, CHAINS)
    base = (chain // features) * steps * features + chain % features
    if TIME_LAST:
        at = base[:, None] + (t * features)[None, :]
        inside = (chain < chains)[:, None] & (t < steps)[None, :]
    else:
        at = base[None, :] + (t * features)[:, None]
        inside = (chain < chains)[None, :] & (t < steps)[:, None]
    return at, inside


@triton.jit
def _first(x, TIME_LAST: tl.constexpr):
    """Return a tile's earliest step, ``[chains]``: the others are left out of a sum."""
    axis: tl.constexpr = 1 if TIME_LAST else 0
    step = tl.arange(0, x.shape[1])[None, :] if TIME_LAST else tl.arange(0, x.shape[0])[:, None]
    return tl.sum(tl.where(step == 0, x, 0.0), axis)


@triton.jit
def _resolve(x, b, behind, TIME_LAST: tl.constexpr):
    """Scan a tile of pairs, from the last step to the first, with the value that follows it."""
    x, b = tl.associative_scan((x, b), 1 if TIME_LAST else 0, _combine, reverse=True)
    return _follow(x, b, behind[:, None] if TIME_LAST else behind[None, :])


@triton.jit
def _gae_tiles(
    value, next_value, reward, done, terminated, advantage, target, gamma, decay, steps, features, chains,
    TIME: tl.constexpr, CHAINS: tl.constexpr, TIME_LAST: tl.constexpr,
):  # fmt: skip
    behind = tl.zeros([CHAINS], tl.float32)
    tiles = (steps + TIME - 1) // TIME
    for back in range(tiles):
        at, inside = _tile(tiles - 1 - back, steps, features, chains, TIME, CHAINS, TIME_LAST)
        delta, b, v = _delta(value, next_value, reward, done, terminated, gamma, decay, at, inside)
        x = _resolve(delta, b, behind, TIME_LAST)
        tl.store(advantage + at, x, mask=inside)
        tl.store(target + at, x + v, mask=inside)
        behind = _first(x, TIME_LAST)


@triton.jit
def _scan_tiles(a, b, out, steps, features, chains, TIME: tl.constexpr, CHAINS: tl.constexpr, TIME_LAST: tl.constexpr):
    behind = tl.zeros([CHAINS], out.dtype.element_ty)
    tiles = (steps + TIME - 1) // TIME
    for back in range(tiles):
        at, inside = _tile(tiles - 1 - back, steps, features, chains, TIME, CHAINS, TIME_LAST)
        here, carry = tl.load(a + at, mask=inside, other=0.0), tl.load(b + at, mask=inside, other=0.0)
        x = _resolve(here, carry, behind, TIME_LAST)
        tl.store(out + at, x, mask=inside)
        behind = _first(x, TIME_LAST)


def _plan(steps: int, features: int, chains: int) -> tuple[tuple[int], dict[str, int | bool]]:
    """Return the grid and the tile: of one chain or a few, so that as many programs run as there is work for."""
    time = min(_TILE, triton.next_power_of_2(steps))
    wide = max(1, min(_TILE // time, triton.next_power_of_2(triton.cdiv(chains, 512))))
    if features > 1:
        wide = max(wide, min(8, triton.next_power_of_2(features)))
    time = min(time, _TILE // wide)
    return (triton.cdiv(chains, wide),), {"TIME": time, "CHAINS": wide, "TIME_LAST": features == 1}


def _loops(steps: int, features: int) -> bool:
    return features >= 32 and steps <= _LONGEST_LOOP


def gae(gamma: float, lmbda: float, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Do as :func:`rlbuf_td.kernels.scan.gae` of contiguous float32 ``[L, T, F]`` tensors and numbers."""
    value = tensors[0]
    lanes, steps, features = value.shape
    chains = lanes * features
    advantage, target = torch.empty_like(value), torch.empty_like(value)
    given = *tensors, advantage, target, gamma, gamma * lmbda, steps, features, chains
    with launching_on(value):
        if _loops(steps, features):
            size = 32 if chains <= 32 * 512 else 128
            _gae_loop[(triton.cdiv(chains, size),)](*given, SIZE=size, num_warps=size // 32, **_OPTIONS)
        else:
            grid, tile = _plan(steps, features, chains)
            _gae_tiles[grid](*given, **tile, **_OPTIONS)
    return advantage, target


def reverse_scan(a: Tensor, b: Tensor) -> Tensor:
    """Do as :func:`rlbuf_td.kernels.scan.reverse_scan` of contiguous ``[L, T, F]`` tensors, float32 or float64."""
    lanes, steps, features = a.shape
    chains = lanes * features
    out = torch.empty_like(a)
    with launching_on(a):
        if _loops(steps, features):
            size = 32 if chains <= 32 * 512 else 128
            _scan_loop[(triton.cdiv(chains, size),)](
                a, b, out, steps, features, chains, SIZE=size, num_warps=size // 32, **_OPTIONS
            )
        else:
            grid, tile = _plan(steps, features, chains)
            _scan_tiles[grid](a, b, out, steps, features, chains, **tile, **_OPTIONS)
    return out
