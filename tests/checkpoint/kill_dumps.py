"""Kill a process at random moments while it dumps, and see that a whole dump, and the right one, is always there.

    python tests/checkpoint/kill_dumps.py --kills 200 --megabytes 200

A child changes a part of the rows, dumps, says so, and begins again; what generation ``g`` holds follows from ``g``.
After each kill the folder must hold the generation that was announced last, or a later one.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict

from rlbuf_td import CheckpointError, PackedStorage, ProportionalSampler, ReplayBuffer
from rlbuf_td.checkpoint.manifest import read_manifest

ROW_BYTES = 128


@dataclass
class Outcome:
    """What was found after the kills."""

    kills: int
    dumps: int
    unreadable: int
    lost: int
    torn: int
    interrupted: int


def make(rows: int) -> ReplayBuffer:
    """Return an empty buffer for ``rows`` rows of 128 bytes."""
    return ReplayBuffer(storage=PackedStorage(rows), sampler=ProportionalSampler(rows), batch_size=4)


def extend(rb: ReplayBuffer, generation: int, rows: int) -> None:
    """Write what generation ``generation`` adds: a quarter of the rows, all of them with its number."""
    count = rows if generation == 0 else rows // 4
    rb.extend(TensorDict({"x": torch.full((count, ROW_BYTES // 8), generation)}, [count]))


def expected(generation: int, rows: int) -> torch.Tensor:
    """Return the number in each row after ``generation``, ``[rows]`` int64."""
    numbers, cursor = torch.zeros(rows, dtype=torch.int64), 0
    for g in range(max(1, generation - 5), generation + 1):
        cursor = (g - 1) * (rows // 4) % rows
        numbers[(cursor + torch.arange(rows // 4)) % rows] = g
    return numbers


def child(rb: ReplayBuffer, folder: Path, generation: int, rows: int, pipe: int) -> None:
    """Dump for ever, and tell which dumps are done."""
    while True:
        generation += 1
        extend(rb, generation, rows)
        rb.dumps(folder)
        os.write(pipe, generation.to_bytes(8, "little"))


def _is_interrupted(folder: Path) -> bool:
    """Return whether files lie there that a killed dump has left."""
    try:
        named = read_manifest(folder).files
    except CheckpointError:
        return False  # it is counted when it is loaded
    return any(file.name not in named for file in (folder / "data").iterdir())


def run(kills: int, megabytes: float, seed: int = 0) -> Outcome:
    """Kill ``kills`` dumps of a buffer of ``megabytes``."""
    rows = int(megabytes * 1e6 / ROW_BYTES) // 4 * 4
    root = Path(tempfile.mkdtemp())
    folder, chance = root / "dump", random.Random(seed)
    outcome = Outcome(kills, 0, 0, 0, 0, 0)
    try:
        rb = make(rows)
        extend(rb, 0, rows)
        rb.dumps(folder)
        start = time.perf_counter()
        for generation in range(1, 4):
            extend(rb, generation, rows)
            rb.dumps(folder)
        took = time.perf_counter() - start  # of three: kills fall on all parts of several
        for _ in range(kills):
            reader, writer = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads, of which none is running
                pid = os.fork()
            if pid == 0:
                child(rb, folder, generation, rows, writer)
            os.close(writer)
            time.sleep(chance.uniform(0, took))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            with os.fdopen(reader, "rb") as told:
                announced = told.read()
            outcome.dumps += len(announced) // 8
            last = int.from_bytes(announced[-8:], "little") if announced else generation
            outcome.interrupted += _is_interrupted(folder)
            try:
                rb.loads(folder)
            except CheckpointError as error:
                print("unreadable:", error, file=sys.stderr)
                outcome.unreadable += 1
                continue
            numbers = rb.storage["x"]
            generation = int(numbers.max())
            outcome.lost += generation < last
            whole = (numbers == expected(generation, rows)[:, None]).all() if generation else (numbers == 0).all()
            outcome.torn += not whole or rb.write_count != rows + generation * (rows // 4)
        return outcome
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = run(arguments.kills, arguments.megabytes, arguments.seed)
    print(result)
    sys.exit(bool(result.unreadable or result.lost or result.torn))
