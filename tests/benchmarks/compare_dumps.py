"""How long dumps and loads take, beside ``cp`` of the same bytes and TorchRL's own.

    python tests/benchmarks/compare_dumps.py --rows 1000000 --rounds 5

Medians of interleaved rounds. ``cp`` returns when the bytes are in memory; ``cp + sync`` when they are on the disk, as
they are when a dump of ours returns, unless it is told not to wait. A new buffer takes its pages from the system, as
``cp`` does: the time of that alone is shown, too. On a virtual machine that gives free pages back to its host, pages
cost many times more some seconds after they were freed: ``--pause 5`` lets all contenders pay for that alike.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer
from rlbuf_td.kernels.huge_pages import take_pages
from rlbuf_td.storages.allocate import allocate_bytes


def transitions(n: int) -> TensorDict:
    """Return rows of HalfCheetah's shape: 7 leaves, 167 bytes."""
    flag = torch.zeros(n, 1, dtype=torch.bool)
    following = {"observation": torch.randn(n, 17), "reward": torch.randn(n, 1)}
    flags = {"done": flag, "terminated": flag, "truncated": flag}
    return TensorDict({"observation": torch.randn(n, 17), "action": torch.randn(n, 6), "next": following | flags}, [n])


def ours(rows: int) -> ReplayBuffer:
    """Return an empty buffer of this package."""
    return ReplayBuffer(storage=PackedStorage(rows), sampler=ProportionalSampler(rows), batch_size=256)


def theirs(rows: int) -> Any:
    """Return TorchRL's prioritized buffer, ``None`` where it cannot be made."""
    from torchrl.data import PrioritizedSampler

    try:
        sampler: Any = PrioritizedSampler(rows, 0.6, 0.4)
    except (ImportError, RuntimeError) as error:
        print(f"TorchRL's PrioritizedSampler cannot be made here ({error}): it is left out")
        return None
    return TensorDictReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler, batch_size=256)


def main(rows: int, rounds: int, pause: float) -> None:
    """Print the table."""
    data, root = transitions(rows), Path(tempfile.mkdtemp())
    rb, other = ours(rows), theirs(rows)
    for each in (rb, other):
        if each is not None:
            each.extend(data.clone())
            each.update_priority(torch.arange(rows), torch.rand(rows))
    taken: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> None:
        time.sleep(pause)
        start = time.perf_counter()
        call()
        taken.setdefault(name, []).append(time.perf_counter() - start)

    live = ours(rows)
    for _ in range(rounds + 1):  # the first one warms up
        for name in ("dump", "copy", "theirs"):
            shutil.rmtree(root / name, ignore_errors=True)
        timed("dump, sync=False", lambda: rb.dumps(root / "dump", sync=False))
        shutil.rmtree(root / "dump")
        timed("dump", lambda: rb.dumps(root / "dump"))
        timed("cp", lambda: subprocess.run(["cp", "-r", root / "dump", root / "copy"], check=True))
        shutil.rmtree(root / "copy")
        command = f"cp -r {root}/dump {root}/copy && sync {root}/copy/data/*"
        timed("cp + sync", partial(subprocess.run, command, shell=True, check=True))
        timed("dump again, nothing changed", lambda: rb.dumps(root / "dump"))
        rb.extend(data[: rows // 100])
        timed("dump again, 1% of the rows changed", lambda: rb.dumps(root / "dump"))
        block = allocate_bytes(rb.storage.nbytes, torch.device("cpu"))
        timed("take the pages of a new buffer", partial(take_pages, block))
        del block
        fresh = ours(rows)
        timed("load into a new buffer", partial(fresh.loads, root / "dump"))
        fresh.set_storage(PackedStorage(1))  # its memory is used again in the next round, as that of the copy is
        timed("load into a used buffer", lambda: live.loads(root / "dump"))
        if other is not None:
            timed("TorchRL's dump", lambda: other.dumps(root / "theirs"))
            timed("TorchRL's load", partial(theirs(rows).loads, root / "theirs"))
    size = sum(file.stat().st_size for file in (root / "dump").rglob("*"))
    shutil.rmtree(root)
    medians = {name: statistics.median(times[1:]) for name, times in taken.items()}
    print(f"{rows:,} rows, {size / 1e6:,.0f} MB")
    for name, took in medians.items():
        print(f"{name:36s} {1e3 * took:9.1f} ms   {took / medians['cp']:6.2f} x cp   ", end="")
        print(f"{took / medians['cp + sync']:6.2f} x cp + sync")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each call")
    arguments = parser.parse_args()
    main(arguments.rows, arguments.rounds, arguments.pause)
