"""Whole training loops with rows on a device
(``python -m tests.benchmarks.device_loops``): what a buffer adds to a step.

A step of the loop steps environments that are tensor functions, writes their
transitions, samples, lets a critic learn, and updates priorities. ``loops.py`` runs the
sides of a case in turn; the device is waited for at the end of a segment. Another side
has no buffer, and learns from one batch again and again: the time of the buffer is what
a step takes longer than one of that side.

Prints a table in Markdown, with date, device and versions. ``--device cpu --smoke``
runs all sides with few rows.
"""

from __future__ import annotations

import argparse
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from tests.benchmarks import loop_sides, loops
from tests.benchmarks.timing import OURS, row

GAMMA, ALPHA, BETA, EPS = 0.99, 0.6, 0.4, 1e-8
OBSERVATION, ACTION = 48, 12  # numbers per row
NOTHING = "no buffer"


@dataclass(frozen=True)
class Sizes:
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


FAST_TD3 = Sizes("FastTD3-like, uniform", 4_096, 256, 32_768)
RAINBOW = Sizes("Rainbow-like, prioritized 3-step", 64, 4_096, 32, 3, True)
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


class Side(loop_sides.Side):
    """The loop with a buffer."""

    def __init__(self, sizes: Sizes, device: torch.device, width: int) -> None:
        super().__init__()
        self.sizes, self.device = sizes, device
        self.environments = Environments(sizes.environments, device)
        self.critic = Critic(device, width)
        self.build()

    def run(self, steps: int) -> int:
        for _ in range(steps):
            self.write(self.environments.step())
            batch = self.sample()
            self.update(batch, self.critic.learn(batch, self.sizes.n))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return steps

    def fill(self, steps: int) -> None:
        for _ in range(steps):
            self.write(self.environments.step())
        self.run(20)

    @abstractmethod
    def build(self) -> None:
        """Make the buffer."""

    @abstractmethod
    def write(self, rows: TensorDict) -> None:
        """Write transitions of all environments, ``[E]``."""

    @abstractmethod
    def sample(self) -> Any: ...

    @abstractmethod
    def update(self, batch: Any, td_error: Tensor) -> None: ...


class Nothing(Side):
    """Learns from one batch of the right size."""

    def build(self) -> None:
        index = torch.arange(self.sizes.batch, device=self.device)
        self.batch = self.environments.step()[index % self.sizes.environments]

    def write(self, rows: TensorDict) -> None: ...

    def sample(self) -> TensorDict:
        return self.batch

    def update(self, batch: Any, td_error: Tensor) -> None: ...


class Ours(Side):
    def build(self) -> None:
        sizes = self.sizes
        sampler: Any = UniformSampler()
        if sizes.is_prioritized:
            sampler = ProportionalSampler(sizes.rows, ALPHA, BETA)
        if sizes.n > 1:
            sampler = NStepSampler(sampler, sizes.n, GAMMA)
        storage = PackedStorage(
            sizes.rows, device=self.device, ndim=2, lanes=sizes.environments
        )
        self.rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=sizes.batch)

    def write(self, rows: TensorDict) -> None:
        self.rb.extend(rows[:, None])

    def sample(self) -> Any:
        return self.rb.sample()

    def update(self, batch: Any, td_error: Tensor) -> None:
        if self.sizes.is_prioritized:
            batch["td_error"] = td_error
            self.rb.update_tensordict_priority(batch)


class TorchRL(Side):
    """n-step rows are made when they are written."""

    def build(self) -> None:
        sizes = self.sizes
        sampler: Any = RandomSampler()
        if sizes.is_prioritized:
            sampler = PrioritizedSampler(sizes.rows, ALPHA, BETA, eps=EPS)
        storage = LazyTensorStorage(sizes.rows, device=self.device)
        self.rb = TensorDictReplayBuffer(
            storage=storage,
            sampler=sampler,
            batch_size=sizes.batch,
            priority_key="td_error",
        )
        if sizes.n > 1:
            self.rb.append_transform(MultiStepTransform(sizes.n, GAMMA))

    def write(self, rows: TensorDict) -> None:
        # n-step returns need a dim of time
        self.rb.extend(rows[:, None] if self.sizes.n > 1 else rows)

    def sample(self) -> Any:
        batch = self.rb.sample()
        return batch.view(-1) if batch.ndim > 1 else batch

    def update(self, batch: Any, td_error: Tensor) -> None:
        if self.sizes.is_prioritized:
            self.rb.update_priority(batch["index"], td_error.abs())


class ByHand(Side):
    """A tensor per key, ``[T, E, ...]``, as in FastTD3; priorities are drawn by
    cumulative sums. Rows are not checked."""

    def build(self) -> None:
        shape = (self.sizes.steps, self.sizes.environments)
        there = {"device": self.device}
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
        slot, following = self.written % self.sizes.steps, rows["next"]
        for key in ("observation", "action"):
            self.rows[key][slot] = rows[key]
        self.rows["following"][slot] = following["observation"]
        for key in ("reward", "terminated"):
            self.rows[key][slot] = following[key]
        self.weight[slot] = self.largest
        self.written += 1

    def _drawn(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return drawn cells, and their importance weights."""
        if not self.sizes.is_prioritized:
            rows = count * self.sizes.environments
            cells = torch.randint(rows, (self.sizes.batch,), device=self.device)
            return cells, None
        weight = self.weight[:count].flatten()
        sums = weight.cumsum(0, dtype=torch.float64)
        mass = torch.rand(self.sizes.batch, device=self.device, dtype=torch.float64)
        cells = torch.searchsorted(sums, mass * sums[-1]).clamp(max=len(weight) - 1)
        importance = (weight[cells] / weight.min()) ** -BETA
        return cells, importance

    def sample(self) -> TensorDict:
        steps, environments, n = self.sizes.steps, self.sizes.environments, self.sizes.n
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
        if self.sizes.is_prioritized:
            weight = (td_error.abs() + EPS) ** ALPHA
            self.weight.view(-1)[batch["index"]] = weight
            self.largest = torch.maximum(self.largest, weight.max())


SIDES: dict[str, type[Side]] = {
    NOTHING: Nothing,
    "TorchRL": TorchRL,
    "a tensor per key": ByHand,
    OURS: Ours,
}


def case(sizes: Sizes, device: torch.device, width: int, steps: int) -> loops.Case:
    sides: dict[str, Callable[[], loop_sides.Side]] = {
        name: partial(make, sizes, device, width) for name, make in SIDES.items()
    }
    return loops.Case(sizes.words, sides, steps, sizes.steps + 2 * sizes.n)


def table(
    device: torch.device, cases: Sequence[Sizes], options: argparse.Namespace
) -> Iterator[str]:
    """Measure all cases; yield a table in Markdown."""
    yield row("loop", "batch", "side", "us per step", "of these, the buffer")
    yield row(*["---"] * 5)
    for sizes in cases:
        measured = case(sizes, device, options.width, options.steps)
        results = loops.measure(measured, options.rounds, None, None)
        times = {result.side: 1e6 / result.rate for result in results}
        for name, time in times.items():
            added = time - times[NOTHING]
            yield row(
                sizes.words, f"{sizes.batch:,}", name, f"{time:,.0f}", f"{added:,.0f}"
            )
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="few rows and steps")
    parser.add_argument("--steps", type=int, default=100, help="steps of a segment")
    parser.add_argument("--rounds", type=int, default=7, help="segments of a side")
    parser.add_argument("--width", type=int, default=256, help="of the critic's layers")
    options, cases = parser.parse_args(arguments), CASES
    if options.smoke:
        options.steps, options.rounds, options.width = 2, 1, 8
        small = partial(replace, environments=4, steps=16, batch=8)
        cases = [small(sizes) for sizes in CASES[:3]]
    device = torch.device(options.device)
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else str(device)
    print(", ".join([name, *loops.lines(loops.circumstances())]))
    print()
    for line in table(device, cases, options):
        print(line, flush=True)


if __name__ == "__main__":
    main()
