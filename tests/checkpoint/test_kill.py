"""Kill a process at random moments while it dumps: a whole dump, and not an older one, is always there.

A child writes to a part of the rows, dumps, says so, and begins again; the content of generation ``g`` follows from
``g``. After each kill the folder must hold the generation that was announced last, or a later one.
"""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer

ROW_BYTES = 128


def extend(rb: ReplayBuffer, generation: int, rows: int) -> None:
    """Write a quarter of the rows (at first all of them) with the number of the generation."""
    count = rows if generation == 0 else rows // 4
    rb.extend(TensorDict({"x": torch.full((count, ROW_BYTES // 8), generation)}, [count]))


def expected(generation: int, rows: int) -> torch.Tensor:
    numbers = torch.zeros(rows, dtype=torch.int64)
    for g in range(max(1, generation - 5), generation + 1):
        numbers[((g - 1) * (rows // 4) + torch.arange(rows // 4)) % rows] = g
    return numbers


def killed_child(rb: ReplayBuffer, folder: Path, generation: int, rows: int, after: float) -> int:
    """Let a child dump for ``after`` seconds, kill it, and return the last generation that it has announced."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads, of which none is running
        pid = os.fork()
    while pid == 0:
        generation += 1
        extend(rb, generation, rows)
        rb.dumps(folder)
        os.write(writer, generation.to_bytes(8, "little"))
    os.close(writer)
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as told:
        announced = told.read()
    return int.from_bytes(announced[-8:], "little") if announced else generation


@pytest.mark.filterwarnings("ignore:this process was forked")
@pytest.mark.parametrize(("kills", "megabytes"), [(8, 4), pytest.param(60, 25, marks=pytest.mark.slow)])
def test_a_dump_that_is_killed_leaves_the_old_or_the_new_one_whole(kills, megabytes, tmp_path):
    rows, chance, generation = megabytes * 10**6 // ROW_BYTES // 4 * 4, random.Random(0), 3
    rb = ReplayBuffer(storage=PackedStorage(rows), sampler=ProportionalSampler(rows), batch_size=4)
    for number in range(generation + 1):
        start = time.perf_counter()
        extend(rb, number, rows)
        rb.dumps(tmp_path)
    took = time.perf_counter() - start
    for _ in range(kills):  # in all parts of a dump, and in the one after it
        last = killed_child(rb, tmp_path, generation, rows, chance.uniform(0, 2 * took))
        rb.loads(tmp_path)
        numbers = rb.storage["x"]
        generation = int(numbers.max())
        assert generation >= last
        assert (numbers == expected(generation, rows)[:, None]).all()
        assert rb.write_count == rows + generation * (rows // 4)
