"""A run that was dumped, killed and loaded is, bit for bit, the run that was not interrupted.

The run is a small DQN on made-up transitions. As a script,

    python -m tests.checkpoint.test_resume SAMPLER FOLDER FIRST LAST

runs steps FIRST to LAST - 1, from the dump in FOLDER if FIRST > 0, and writes a digest of every batch and of all
parameters to FOLDER/log; then dumps, and, with a fifth argument, kills itself.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import OneHot
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from rlbuf_td import ReplayBuffer, TrajectoryIndex
from tests.checkpoint.worlds import WRAPPERS, make

ROWS, LANES = 128, 2


class Run:
    """The state of the run, and its steps."""

    def __init__(self, sampler: str) -> None:
        torch.manual_seed(0)
        actor = QValueActor(MLP(4, 3, num_cells=[16]), in_keys=["observation"], spec=OneHot(3))
        self.loss = DQNLoss(actor, action_space="one_hot", delay_value=True)
        self.loss.make_value_estimator(gamma=0.9)
        self.target = SoftUpdate(self.loss, eps=0.95)
        self.optimizer = torch.optim.Adam(self.loss.parameters())
        self.rb: ReplayBuffer = make(sampler, steps=ROWS // LANES, lanes=LANES, seed=None)
        TrajectoryIndex.of(self.rb.storage)

    def transitions(self) -> TensorDict:
        """Return new steps; they take random numbers, as a policy that explores does."""
        lead = (LANES, 9)
        done = torch.rand(*lead, 1) < 0.1
        after = {
            "achieved_goal": torch.randn(*lead, 2),
            "observation": torch.randn(*lead, 4),
            "reward": torch.randn(*lead, 1),
            "done": done,
            "terminated": done,
        }
        action = torch.nn.functional.one_hot(torch.randint(3, lead), 3)
        entries = {"observation": torch.randn(*lead, 4), "action": action, "desired_goal": torch.randn(*lead, 2)}
        return TensorDict(entries | {"next": after}, lead)

    def step(self, number: int) -> str:
        """Write, sample, learn; return a digest of everything that this step saw and made."""
        self.rb.extend(self.transitions())
        while len(self.rb) < 24:
            self.rb.extend(self.transitions())
        batch = self.rb.sample()
        seen = digest(batch)
        weight = batch.get("priority_weight", None)
        loss = self.loss(batch)["loss"]
        (loss if weight is None else (loss * weight.mean())).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.target.step()
        if weight is not None:
            self.rb.update_tensordict_priority(batch)
        return f"{number} {seen} {digest(TensorDict(dict(self.loss.state_dict())))}"

    def save(self, folder: Path) -> None:
        """Save the learner with torch, and the buffer."""
        torch.save({"loss": self.loss.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / "learner.pt")
        self.rb.dumps(folder / "buffer")

    def load(self, folder: Path) -> None:
        """Continue where :meth:`save` was called."""
        state = torch.load(folder / "learner.pt", weights_only=True)
        self.loss.load_state_dict(state["loss"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rb.loads(folder / "buffer", default_generator=True)


def digest(data: TensorDictBase) -> str:
    """Return a checksum of all tensors, by key."""
    whole = hashlib.sha256()
    for key, value in sorted(data.items(True, True), key=lambda item: str(item[0])):
        whole.update(str(key).encode())
        whole.update(value.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()[:16]


def main(sampler: str, folder: Path, first: int, last: int, dies: bool) -> None:
    """Run from ``first`` to ``last``; see above."""
    run = Run(sampler)
    if first:
        run.load(folder)
    with open(folder / "log", "a", buffering=1) as log:
        for number in range(first, last):
            log.write(run.step(number) + "\n")
    run.save(folder)
    if dies:
        run.step(last)  # lost
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("sampler", ["proportional", *WRAPPERS])
def test_training_goes_on_bit_for_bit(sampler, tmp_path):
    whole, first = Run(sampler), Run(sampler)
    torch.manual_seed(1)
    expected = [whole.step(number) for number in range(16)]
    torch.manual_seed(1)
    found = [first.step(number) for number in range(8)]
    first.save(tmp_path)
    second = Run(sampler)
    torch.rand(7)
    second.load(tmp_path)
    assert found + [second.step(number) for number in range(8, 16)] == expected


def test_a_killed_process_is_resumed_bit_for_bit(tmp_path):
    sampler, steps = "n-step over hindsight", 20
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    main(sampler, tmp_path / "whole", 0, 2 * steps, dies=False)
    command = [sys.executable, "-m", "tests.checkpoint.test_resume", sampler, str(tmp_path / "killed")]
    killed = subprocess.run([*command, "0", str(steps), "die"], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    main(sampler, tmp_path / "killed", steps, 2 * steps, dies=False)
    logs = [(tmp_path / name / "log").read_text().splitlines() for name in ("whole", "killed")]
    assert len(logs[0]) == 2 * steps
    assert logs[0] == logs[1]


if __name__ == "__main__":
    name, place, begin, end = sys.argv[1:5]
    main(name, Path(place), int(begin), int(end), dies=len(sys.argv) > 5)
