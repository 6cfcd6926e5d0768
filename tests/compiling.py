"""Compiles the loops that most tests use, once, in two processes.

Workers of pytest-xdist that start with an empty cache would each compile them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ReplayBuffer, TrajectoryIndex
from rlbuf_td.functional import generalized_advantage_estimate
from tests.catalogue import SAMPLERS

HALVES = (
    ["uniform", "unique", "proportional", "n-step", "sequence", "strict", "windows"],
    ["recency", "minibatch", "rank", "hindsight", "n-step over hindsight", "shared", "lanes", "share_next", "gae"],
)


def rows(*lead: int) -> TensorDict:
    goal = torch.rand(*lead, 3)
    following = {"observation": torch.rand(*lead, 3), "achieved_goal": goal, "reward": torch.rand(*lead, 1)}
    following["done"] = torch.rand(*lead, 1) < 0.1
    return TensorDict({"observation": torch.rand(*lead, 3), "desired_goal": goal, "next": following}, lead)


def use(name: str) -> None:
    """Call what compiles the loops of one sampler, or of what else is named."""
    if name == "gae":
        for features in (1, 2):
            x = torch.rand(2, 5, features)
            generalized_advantage_estimate(0.9, 0.9, x, x, x, x > 0.5)
        return
    sampler = SAMPLERS.get(name, SAMPLERS["proportional"])(200)
    lanes = 2 if name == "lanes" else 0
    storage = PackedStorage(200, ndim=2 if lanes else 1, share_next=name == "share_next")
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=8 * getattr(sampler, "window", 1))
    if name == "shared":
        rb.share()
    TrajectoryIndex.of(rb.storage)
    for _ in range(2):
        rb.extend(rows(2, 60) if lanes else rows(60))
        rb.add(rows(2) if lanes else rows())
        batch = rb.sample()
        rb.update_tensordict_priority(batch.set("td_error", torch.rand(len(batch))))
    TrajectoryIndex.of(rb.storage).whole()
    for lane in range(lanes):
        rb.extend(rows(3 + lane), lanes=lane)
        rb.sample()


def compile_halves(root: Path) -> None:
    """Compile both halves at the same time, and wait until both are done."""
    print("compiling the loops that most tests use (a minute, once)", flush=True)
    command = [sys.executable, "-W", "ignore", "-m", "tests.compiling"]
    halves = [subprocess.Popen([*command, str(half)], cwd=root, stderr=subprocess.PIPE) for half in range(2)]
    for half in halves:
        _, errors = half.communicate()
        if half.returncode:
            print(errors.decode(), file=sys.stderr)  # the tests that need the loops compile them, or fail


if __name__ == "__main__":
    for name in HALVES[int(sys.argv[1])]:
        use(name)
