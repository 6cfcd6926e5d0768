"""Rows that survive a crash: how long reopening and writes take (``python -m tests.benchmarks.reopening``).

Writes are interleaved with those to a plain memory-mapped file and to shared rows; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer, TrajectoryIndex

CHUNK = 100_000


def transitions(count: int) -> TensorDict:
    """Return rows of 96 bytes, in episodes of 1,000 steps."""
    done = (torch.arange(count) % 1_000 == 999).unsqueeze(-1)
    entries: dict[str, Any] = {
        "observation": torch.randn(count, 10),
        "next": {"observation": torch.randn(count, 10), "done": done},
    }
    entries["next"]["reward"] = torch.randn(count, 1)
    return TensorDict(entries, [count])


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def time_reopening(folder: Path, rows: int) -> dict[str, float]:
    """Write ``rows`` rows, and return the seconds that reopening them and the first look-ups take."""

    def reopened() -> PackedStorage:
        return PackedStorage(rows, scratch_dir=folder, reopen=True)

    rb, data = ReplayBuffer(storage=reopened(), sampler=ProportionalSampler(rows)), transitions(min(CHUNK, rows))
    for _ in range(-(-rows // len(data))):
        rb.extend(data)
    del rb
    found = {}
    begun = time.perf_counter()
    storage = reopened()
    found["the storage"] = time.perf_counter() - begun
    found["the trajectories"] = seconds(lambda: TrajectoryIndex.of(storage).whole())
    sampler = ProportionalSampler(rows)
    found["the buffer, with priorities"] = seconds(lambda: ReplayBuffer(storage=storage, sampler=sampler)._initialize())
    return found


def time_writes(folder: Path, rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median microseconds of ``add`` and of ``extend`` by 256 rows, by kind of storage."""
    buffers = {
        "plain file": ReplayBuffer(storage=PackedStorage(rows, scratch_dir=folder / "plain")),
        "reopen=True": ReplayBuffer(storage=PackedStorage(rows, scratch_dir=folder / "kept", reopen=True)),
        "shared": ReplayBuffer(storage=PackedStorage(rows, shared=True)),
    }
    data = transitions(256)
    for rb in buffers.values():
        for _ in range(-(-rows // 256) + 2):
            rb.extend(data)
        rb.add(data[0])
    times: dict[str, dict[str, list[float]]] = {name: {"add": [], "extend": []} for name in buffers}
    step = data[0].clone()
    for _ in range(rounds):
        for name, rb in buffers.items():
            times[name]["add"].append(seconds(lambda rb=rb: rb.add(step)))  # type: ignore[misc]
            times[name]["extend"].append(seconds(lambda rb=rb: rb.extend(data)))  # type: ignore[misc]
    return {name: {how: 1e6 * statistics.median(each) for how, each in of.items()} for name, of in times.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows to reopen")
    parser.add_argument("--rounds", type=int, default=2_000, help="timed writes of each kind")
    parser.add_argument("--folder", help="where to make the files (default: the folder for temporary files)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with TemporaryDirectory(dir=options.folder) as folder:
        for name, found in time_writes(Path(folder), min(options.rows, 20_000), options.rounds).items():
            print(f"{name:12}", ", ".join(f"{how} {each:.1f} us" for how, each in found.items()))
        for name, found_seconds in time_reopening(Path(folder, "reopened"), options.rows).items():
            print(f"reopening {options.rows:,} rows: {name} {found_seconds:.3f} s")


if __name__ == "__main__":
    main()
