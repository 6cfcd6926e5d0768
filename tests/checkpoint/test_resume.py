"""A run that was dumped, killed and loaded is, bit for bit, the run that was not interrupted.

The run is a small DQN on made-up transitions.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
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
        torch.save({"loss": self.loss.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / "learner.pt")
        self.rb.dumps(folder / "buffer")

    def load(self, folder: Path) -> None:
        """Continue where :meth:`save` was called."""
        state = torch.load(folder / "learner.pt", weights_only=True)
        self.loss.load_state_dict(state["loss"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rb.loads(folder / "buffer", default_generator=True)


def digest(data: TensorDictBase) -> str:
    whole = hashlib.sha256()
    for key, value in sorted(data.items(True, True), key=lambda item: str(item[0])):
        whole.update(str(key).encode())
        whole.update(value.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()[:16]


def first_half(sampler: str, folder: Path) -> Run:
    """Take 8 steps, save the run and a digest of each step."""
    run = Run(sampler)
    torch.manual_seed(1)
    seen = [run.step(number) for number in range(8)]
    run.save(folder)
    (folder / "seen").write_text("\n".join(seen))
    return run


def die_after(sampler: str, folder: Path) -> None:
    """Take the first half of the steps and another one, which is lost."""
    first_half(sampler, folder).step(8)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("sampler", "killed"), [*((name, False) for name in ["proportional", *WRAPPERS]), ("n-step over hindsight", True)]
)
def test_training_goes_on_bit_for_bit(sampler, killed, tmp_path):
    whole = Run(sampler)
    torch.manual_seed(1)
    expected = [whole.step(number) for number in range(16)]
    if killed:
        child = multiprocessing.get_context("spawn").Process(target=die_after, args=(sampler, tmp_path))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    else:
        first_half(sampler, tmp_path)
    second = Run(sampler)
    torch.rand(7)
    second.load(tmp_path)
    seen = (tmp_path / "seen").read_text().splitlines()
    assert seen + [second.step(number) for number in range(8, 16)] == expected
