"""Whole training loops with rows on a device
(``python -m tests.benchmarks.device_loops``): what a buffer adds to a step.

A step of the loop steps environments that are tensor functions, writes their
transitions, samples, lets a critic learn, and updates priorities. The sides of a case
run in one process, one segment of steps after another, in turn; the device is waited
for at the end of a segment. Another side has no buffer, and learns from one batch again
and again: the time of the buffer is what a step takes longer than one of that side.

Prints a table in Markdown, with date, device and versions. ``--device cpu --smoke``
runs all sides with few rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.replay_buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    TensorDictReplayBuffer,
)
from torchrl.envs.transforms import MultiStepTransform

from rlbuf_td import (
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    UniformSampler,
)
from tests.benchmarks.timing import OURS

GAMMA, ALPHA, BETA, EPS = 0.99, 0.6, 0.4, 1e-8
OBSERVATION, ACTION = 48, 12  # numbers per row
NOTHING = "no buffer"


@dataclass(frozen=True)
class Case:
    """A loop; ``n`` is the number of steps of its returns."""

    words: str
    environments: int
    steps: int  # rows of each environment
    batch: int
    n: int = 1
    is_prioritized: bool = False

    @property
    def rows(self) -> int:
        return self.environments * self.steps


FAST_TD3 = Case("FastTD3-like, uniform", 4_096, 256, 32_768)
RAINBOW = Case("Rainbow-like, prioritized 3-step", 64, 4_096, 32, 3, True)
CASES = [
    FAST_TD3,
    replace(FAST_TD3, words="FastTD3-like, uniform 3-step", n=3),
    *[replace(RAINBOW, batch=batch) for batch in (32, 128, 512)],
]


class Environments:
    """Environments that are a tensor function, and end now and then."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.state = torch.randn(count, OBSERVATION, device=device)
        self.actor = torch.randn(OBSERVATION, ACTION, device=device) / 7
        self.effect = torch.randn(ACTION, OBSERVATION, device=device) / 50

    def step(self) -> TensorDict:
        """Return transitions of all environments, ``[E]``."""
        before = self.state
        noise = torch.randn(len(before), ACTION, device=before.device) / 10
        action = torch.tanh(before @ self.actor + noise)
        after = 0.99 * before + action @ self.effect
        terminated = torch.rand(len(before), 1, device=before.device) < 0.005
        self.state = torch.where(terminated, torch.randn_like(after), after)
        outcome = {
            "observation": after,
            "reward": -after.square().mean(-1, keepdim=True),
            "done": terminated,
            "terminated": terminated.clone(),
        }
        rows = {"observation": before, "action": action, "next": outcome}
        return TensorDict(rows, [len(before)])


class Critic:
    """Learns the value of actions, one step of Adam per batch."""

    def __init__(self, device: torch.device, width: int) -> None:
        self.network = torch.nn.Sequential(
            torch.nn.Linear(OBSERVATION + ACTION, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, 1),
        ).to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=3e-4)

    def learn(self, batch: Any, n: int) -> Tensor:
        """Return the TD errors of a batch, ``[B]``."""
        action, following = batch["action"], batch["next"]
        value = self._value(batch["observation"], action)
        with torch.no_grad():
            bootstrap = self._value(following["observation"], action)
            goes_on = ~following["terminated"]
            target = following["reward"] + GAMMA**n * goes_on * bootstrap
        td_error = value - target
        weight = batch.get("priority_weight", None)
        square = td_error.square()
        loss = (square if weight is None else square * weight.view(-1, 1)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return td_error.detach().view(-1)

    def _value(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.network(torch.cat((observation, action), -1))


class Side(ABC):
    """A buffer."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device

    @abstractmethod
    def write(self, rows: TensorDict) -> None:
        """Write transitions of all environments, ``[E]``."""

    @abstractmethod
    def sample(self) -> Any: ...

    @abstractmethod
    def update(self, batch: Any, td_error: Tensor) -> None: ...


class Nothing(Side):
    """Learns from one batch of the right size."""

    def write(self, rows: TensorDict) -> None:
        if not hasattr(self, "batch"):
            index = torch.arange(self.case.batch, device=self.device) % len(rows)
            self.batch = rows[index]

    def sample(self) -> TensorDict:
        return self.batch

    def update(self, batch: Any, td_error: Tensor) -> None: ...


class Ours(Side):
    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        sampler: Any = UniformSampler()
        if case.is_prioritized:
            sampler = ProportionalSampler(case.rows, ALPHA, BETA)
        if case.n > 1:
            sampler = NStepSampler(sampler, case.n, GAMMA)
        storage = PackedStorage(
            case.rows, device=device, ndim=2, lanes=case.environments
        )
        self.rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=case.batch)

    def write(self, rows: TensorDict) -> None:
        self.rb.extend(rows[:, None])

    def sample(self) -> Any:
        return self.rb.sample()

    def update(self, batch: Any, td_error: Tensor) -> None:
        if self.case.is_prioritized:
            batch["td_error"] = td_error
            self.rb.update_tensordict_priority(batch)


class TorchRL(Side):
    """n-step rows are made when they are written."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        sampler: Any = RandomSampler()
        if case.is_prioritized:
            sampler = PrioritizedSampler(case.rows, ALPHA, BETA, eps=EPS)
        storage = LazyTensorStorage(case.rows, device=device)
        self.rb = TensorDictReplayBuffer(
            storage=storage,
            sampler=sampler,
            batch_size=case.batch,
            priority_key="td_error",
        )
        if case.n > 1:
            self.rb.append_transform(MultiStepTransform(case.n, GAMMA))

    def write(self, rows: TensorDict) -> None:
        # n-step returns need a dim of time
        self.rb.extend(rows[:, None] if self.case.n > 1 else rows)

    def sample(self) -> Any:
        batch = self.rb.sample()
        return batch.view(-1) if batch.ndim > 1 else batch

    def update(self, batch: Any, td_error: Tensor) -> None:
        if self.case.is_prioritized:
            self.rb.update_priority(batch["index"], td_error.abs())


class ByHand(Side):
    """A tensor per key, ``[T, E, ...]``, as in FastTD3; priorities are drawn by
    cumulative sums. Rows are not checked."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        shape, there = (case.steps, case.environments), {"device": device}
        flag = {"dtype": torch.bool, **there}
        self.rows: dict[str, Tensor] = {
            "observation": torch.empty(*shape, OBSERVATION, **there),
            "action": torch.empty(*shape, ACTION, **there),
            "following": torch.empty(*shape, OBSERVATION, **there),
            "reward": torch.empty(*shape, 1, **there),
            "terminated": torch.empty(*shape, 1, **flag),
        }
        self.weight = torch.zeros(shape, **there)
        self.largest = torch.ones((), **there)
        self.written = 0

    def write(self, rows: TensorDict) -> None:
        slot, following = self.written % self.case.steps, rows["next"]
        for key in ("observation", "action"):
            self.rows[key][slot] = rows[key]
        self.rows["following"][slot] = following["observation"]
        for key in ("reward", "terminated"):
            self.rows[key][slot] = following[key]
        self.weight[slot] = self.largest
        self.written += 1

    def _drawn(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return drawn cells, and their importance weights."""
        if not self.case.is_prioritized:
            rows = count * self.case.environments
            cells = torch.randint(rows, (self.case.batch,), device=self.device)
            return cells, None
        weight = self.weight[:count].flatten()
        sums = weight.cumsum(0, dtype=torch.float64)
        mass = torch.rand(self.case.batch, device=self.device, dtype=torch.float64)
        cells = torch.searchsorted(sums, mass * sums[-1]).clamp(max=len(weight) - 1)
        importance = (weight[cells] / weight.min()) ** -BETA
        return cells, importance

    def sample(self) -> TensorDict:
        steps, environments, n = self.case.steps, self.case.environments, self.case.n
        count = min(self.written, steps)
        cells, importance = self._drawn(count)
        rows = {key: column.flatten(0, 1) for key, column in self.rows.items()}
        last, reward = cells, rows["reward"][cells]
        if n > 1:
            # rows that end, or are the newest, end the sum
            newest = (self.written - 1) % steps
            step = torch.arange(n, device=self.device)[:, None]
            window = (cells + step * environments) % (count * environments)
            ends = rows["terminated"][window][..., 0] | (
                window // environments == newest
            )
            before = ends.cumsum(0) - ends.int()
            is_in = before == 0
            gamma = (GAMMA**step)[..., None]
            reward = (rows["reward"][window] * gamma * is_in[..., None]).sum(0)
            last = window.gather(0, is_in.sum(0, keepdim=True) - 1)[0]
        outcome = {
            "observation": rows["following"][last],
            "reward": reward,
            "terminated": rows["terminated"][last],
        }
        batch = {"index": cells, "next": outcome}
        batch |= {key: rows[key][cells] for key in ("observation", "action")}
        if importance is not None:
            batch["priority_weight"] = importance
        return TensorDict(batch, [len(cells)])

    def update(self, batch: Any, td_error: Tensor) -> None:
        if self.case.is_prioritized:
            weight = (td_error.abs() + EPS) ** ALPHA
            self.weight.view(-1)[batch["index"]] = weight
            self.largest = torch.maximum(self.largest, weight.max())


class Flashbax(Side):
    """A uniform buffer of JAX, on the same device; tensors are shared, not copied."""

    def __init__(self, case: Case, device: torch.device) -> None:
        if case.is_prioritized or case.n > 1:
            raise NotImplementedError("only uniform rows of one step are measured")
        # JAX takes most of the memory of a GPU otherwise
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import flashbax
        import jax

        super().__init__(case, device)
        platform = "gpu" if device.type == "cuda" else device.type
        jax.devices(platform)  # raises an error without this device
        size = case.rows, 1, case.batch, False, True
        self.buffer, self.state = flashbax.make_item_buffer(*size), None
        self.add = jax.jit(self.buffer.add, donate_argnums=0)
        self.draw = jax.jit(self.buffer.sample)
        self.jax, self.key = jax, jax.random.PRNGKey(0)

    def write(self, rows: TensorDict) -> None:
        leaves = self.jax.tree.map(
            lambda leaf: self.jax.dlpack.from_dlpack(leaf.contiguous()), rows.to_dict()
        )
        if self.state is None:
            first = self.jax.tree.map(lambda leaf: leaf[0], leaves)
            self.state = self.buffer.init(first)
        self.state = self.add(self.state, leaves)

    def sample(self) -> TensorDict:
        self.key, key = self.jax.random.split(self.key)
        drawn = self.draw(self.state, key).experience
        leaves = self.jax.tree.map(torch.from_dlpack, drawn)
        return TensorDict(leaves, [self.case.batch])

    def update(self, batch: Any, td_error: Tensor) -> None: ...


SIDES: dict[str, Callable[[Case, torch.device], Side]] = {
    NOTHING: Nothing,
    OURS: Ours,
    "TorchRL": TorchRL,
    "a tensor per key": ByHand,
}
if find_spec("flashbax") is not None:
    SIDES["Flashbax"] = Flashbax


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Loop:
    """The loop of one side."""

    def __init__(self, side: Side, width: int) -> None:
        self.side, device = side, side.device
        self.environments = Environments(side.case.environments, device)
        self.critic = Critic(device, width)

    def step(self) -> None:
        side = self.side
        side.write(self.environments.step())
        batch = side.sample()
        side.update(batch, self.critic.learn(batch, side.case.n))

    def fill(self) -> None:
        for _ in range(self.side.case.steps + 2 * self.side.case.n):
            self.side.write(self.environments.step())

    def segment(self, steps: int) -> float:
        """Return the microseconds per step of a segment."""
        wait(self.side.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        wait(self.side.device)
        return 1e6 * (time.perf_counter() - start) / steps


def loops_of(
    case: Case, device: torch.device, width: int
) -> tuple[dict[str, Loop], dict[str, str]]:
    """Return the loops of the sides that work, and why others do not."""
    loops, reasons = {}, {}
    for name, make in SIDES.items():
        try:
            loop = Loop(make(case, device), width)
            loop.fill()
            loop.step()
        except Exception as error:  # of other libraries
            if name == OURS:
                raise
            reasons[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            loops[name] = loop
    return loops, reasons


def times_of(loops: dict[str, Loop], steps: int, rounds: int) -> dict[str, float]:
    """Return the median microseconds per step of each side; a first round is not
    counted."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(1 + rounds):
        for name, loop in loops.items():
            times[name].append(loop.segment(steps))
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def table(device: torch.device, cases: Sequence[Case], how: argparse.Namespace) -> str:
    """Measure all cases; return a table in Markdown."""
    lines = ["| loop | batch | side | us per step | of these, the buffer |"]
    lines += ["|---|---|---|---|---|"]
    for case in cases:
        loops, reasons = loops_of(case, device, how.width)
        times = times_of(loops, how.steps, how.rounds)
        for name in SIDES:
            cells = [case.words, f"{case.batch:,}", name]
            if name in times:
                added = times[name] - times[NOTHING]
                cells += [f"{times[name]:,.0f}", f"{added:,.0f}"]
            else:
                cells += [reasons[name], ""]
            lines.append(f"| {' | '.join(cells)} |")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return "\n".join(lines)


def circumstances(device: torch.device) -> str:
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else str(device)
    names = [
        package
        for package in ("rlbuf_td", "torch", "torchrl", "triton", "flashbax", "jax")
        if find_spec(package) is not None
    ]
    packages = ", ".join(f"{package} {version(package)}" for package in names)
    return f"{date.today()}, {name}; {packages}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="few rows and steps")
    parser.add_argument("--steps", type=int, default=100, help="steps of a segment")
    parser.add_argument("--rounds", type=int, default=7, help="segments of a side")
    parser.add_argument("--width", type=int, default=256, help="of the critic's layers")
    how, cases = parser.parse_args(arguments), CASES
    if how.smoke:
        how.steps, how.rounds, how.width = 2, 1, 8
        small = partial(replace, environments=4, steps=16, batch=8)
        cases = [small(case) for case in CASES[:3]]
    device = torch.device(how.device)
    print(circumstances(device))
    print()
    print(table(device, cases, how))


if __name__ == "__main__":
    main()
