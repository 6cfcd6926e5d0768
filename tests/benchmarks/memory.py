"""Observations once: what rows that share them save, and what that costs
(``python -m tests.benchmarks.memory``).

Each figure is a ratio to a plain :class:`PackedStorage`. A learner's step runs before
each timed call.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from operator import truediv
from typing import Any

import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ReplayBuffer
from tests.benchmarks.contenders import small_rows
from tests.benchmarks.timing import Learner, in_loop, one_thread

BATCH, CHUNK = 256, 20_000


def vector_rows(count: int, width: int, episode: int = 1_000) -> TensorDict:
    """Return HalfCheetah's transitions, of observations of any width, in episodes."""
    rows, seen = small_rows(count), torch.randn(count + 1, width)
    following = seen[1:].clone()
    ends = following[episode - 1 :: episode]
    ends.copy_(torch.randn(ends.shape))
    rows["observation"], rows["next", "observation"] = seen[:-1].clone(), following
    return rows


def image_rows(count: int, episode: int = 200) -> TensorDict:
    """Return Atari's transitions in episodes: stacks of four frames, which begin with
    four times the first."""
    rows = small_rows(count)
    now, after = torch.empty(2, count, 4, 84, 84, dtype=torch.uint8).unbind(0)
    for start in range(0, count, episode):
        steps = min(episode, count - start)
        frames = torch.randint(256, (steps + 1, 84, 84), dtype=torch.uint8)
        frames = torch.cat([frames[:1].expand(3, -1, -1), frames])
        for j in range(4):
            now[start : start + steps, j] = frames[j : j + steps]
            after[start : start + steps, j] = frames[j + 1 :][:steps]
    rows["observation"], rows["next", "observation"] = now, after
    rows["action"] = torch.randint(4, (count, 1))
    return rows


def compare(
    rows: int, make: Callable[[int], TensorDict], how: dict[str, Any], rounds: int
) -> dict[str, float]:
    """Return memory and times of rows that share, relative to plain ones; both are
    full."""
    plain = ReplayBuffer(storage=PackedStorage(rows), batch_size=BATCH)
    shared = ReplayBuffer(storage=PackedStorage(rows, **how), batch_size=BATCH)
    chunk = min(CHUNK if make(1).bytes() < 5_000 else 1_000, rows)
    for _ in range(-(-rows // chunk)):
        data = make(chunk)
        for rb in (plain, shared):
            rb.extend(data)
    result = {"memory": shared.storage.nbytes / plain.storage.nbytes}
    fresh = make(4 * BATCH)
    writes = {"extend": fresh.split(BATCH), "add": fresh.unbind(0)}
    for name in ("sample", "extend", "add"):
        calls: dict[str, Callable[[], object]] = {}
        for kind, rb in (("plain", plain), ("shared", shared)):
            calls[kind] = getattr(rb, name)
            if name in writes:
                calls[kind] = partial(next, map(getattr(rb, name), cycle(writes[name])))
        blocks = in_loop(calls, rounds, Learner(BATCH).step)
        result[name] = statistics.median(
            map(truediv, blocks["shared"], blocks["plain"])
        )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=float, default=1e6, help="HalfCheetah's")
    parser.add_argument(
        "--wide",
        type=float,
        default=1e5,
        help="rows with Humanoid's observations of 376 numbers",
    )
    parser.add_argument(
        "--images",
        type=float,
        default=1e4,
        help="rows with Atari's stacks, 56 KB each while plain",
    )
    parser.add_argument(
        "--rounds", type=int, default=12, help="blocks of 16 calls each"
    )
    options = parser.parse_args(arguments)
    once, frames = {"share_next": True}, {"frames": {"observation": 4}}
    cases: list[tuple[str, int, Callable[[int], TensorDict], dict[str, Any]]] = [
        ("HalfCheetah", int(options.rows), lambda n: vector_rows(n, 17), once),
        ("Humanoid", int(options.wide), lambda n: vector_rows(n, 376), once),
        ("Atari", int(options.images), image_rows, frames),
    ]
    with one_thread():
        print(f"relative to a plain PackedStorage, batches of {BATCH}:")
        for name, rows, make, how in cases:
            if rows:
                found = compare(rows, make, how, options.rounds)
                ratios = ", ".join(f"{what} {x:.2f}x" for what, x in found.items())
                print(f"  {name:<12} {rows:>9,} rows: {ratios}", flush=True)


if __name__ == "__main__":
    main()
