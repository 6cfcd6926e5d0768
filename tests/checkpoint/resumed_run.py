"""A small DQN on made-up transitions: 2 N steps at once, or N steps, a kill, and N more from the dump.

    python tests/checkpoint/resumed_run.py SAMPLER FOLDER FIRST LAST

runs steps FIRST to LAST - 1, from the dump in FOLDER if FIRST > 0; writes a digest of every batch, index and weight and
of all parameters to FOLDER/log, line by line; then dumps, and, with a fifth argument, kills itself.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import OneHot
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from rlbuf_td import ReplayBuffer, TrajectoryIndex
from tests.checkpoint.worlds import make

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
        lead = (LANES, 3)
        done = torch.rand(*lead, 1) < 0.1
        return TensorDict(
            {
                "observation": torch.randn(*lead, 4),
                "action": torch.nn.functional.one_hot(torch.randint(3, lead), 3),
                "desired_goal": torch.randn(*lead, 2),
                "next": {
                    "achieved_goal": torch.randn(*lead, 2),
                    "observation": torch.randn(*lead, 4),
                    "reward": torch.randn(*lead, 1),
                    "done": done,
                    "terminated": done,
                },
            },
            lead,
        )

    def step(self, number: int) -> str:
        """Write, sample, learn; return a digest of all that this step saw and made."""
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
        """Save the learner as one does with torch, and the buffer."""
        state = {
            "loss": self.loss.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, folder / "learner.pt")
        self.rb.dumps(folder / "buffer")

    def load(self, folder: Path) -> None:
        """Go on where :meth:`save` was called."""
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


if __name__ == "__main__":
    name, place, begin, end = sys.argv[1:5]
    main(name, Path(place), int(begin), int(end), dies=len(sys.argv) > 5)
