"""Flip or cut random bytes of dumps, and see that every damage is noticed and named, and the live buffer unchanged.

python tests/checkpoint/damage_dumps.py --times 500
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict

from rlbuf_td import CheckpointError, PackedStorage, ProportionalSampler, ReplayBuffer


def make(rows: int) -> ReplayBuffer:
    """Return an empty buffer."""
    return ReplayBuffer(storage=PackedStorage(rows), sampler=ProportionalSampler(rows), batch_size=4)


def damage(file: Path, chance: random.Random) -> str:
    """Flip a bit, change some bytes, cut, lengthen or remove a file; return what was done."""
    data = bytearray(file.read_bytes())
    how = chance.choice(("flip", "flip", "change", "cut", "cut", "lengthen", "remove"))
    at = chance.randrange(len(data))
    if how == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif how == "change":
        for j in range(at, min(len(data), at + chance.randint(1, 100))):
            data[j] ^= chance.randint(1, 255)
    elif how == "cut":
        del data[at:]
    elif how == "lengthen":
        data += bytes(chance.randint(1, 9))
    file.write_bytes(data)
    if how == "remove":
        file.unlink()
    return f"{how} at {at}"


def run(times: int, rows: int = 2_000, seed: int = 0) -> list[str]:
    """Damage a dump ``times`` times; return what went unnoticed, or was noticed without naming the file."""
    chance, root, wrong = random.Random(seed), Path(tempfile.mkdtemp()), []
    try:
        rb = make(rows)
        rb.extend(TensorDict({"x": torch.rand(rows, 5), "done": torch.rand(rows) < 0.1}, [rows]))
        rb.update_priority(torch.arange(rows), torch.rand(rows))
        rb.dumps(root / "whole")
        files = sorted(file.relative_to(root / "whole") for file in (root / "whole").rglob("*.[jb][si][on]*"))
        live = make(rows)
        live.extend(TensorDict({"x": torch.ones(7, 5), "done": torch.ones(7).bool()}, [7]))
        for number in range(times):
            for target in (live, make(rows)):
                shutil.rmtree(root / "damaged", ignore_errors=True)
                shutil.copytree(root / "whole", root / "damaged")
                name = chance.choice(files)
                done = f"{number}: {name} {damage(root / 'damaged' / name, chance)}"
                try:
                    target.loads(root / "damaged")
                    wrong.append(f"{done}: unnoticed")
                except CheckpointError as error:
                    missing = name.name == "manifest.json" and "has no manifest.json" in str(error)
                    if str(name) not in str(error) and not missing:
                        wrong.append(f"{done}: told as {error}")
                if len(live) != 7 or live.write_count != 7 or not (live.storage["x"] == 1).all():
                    wrong.append(f"{done}: the live buffer has changed")
                if target is not live and (len(target) or target.write_count or target.storage.initialized):
                    wrong.append(f"{done}: the new buffer has changed")
        return wrong
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = run(arguments.times, seed=arguments.seed)
    print(*found, sep="\n")
    print(
        f"{arguments.times} damaged dumps, each into a used and a new buffer: {len(found)} not noticed as they should"
    )
    sys.exit(bool(found))
