"""Time training scripts with TorchRL's buffers and with this package's
(``python -m tests.benchmarks.train``).

The two runs of a script have the same seed and differ only in the buffer. DQN uses
prioritized replay. In ``small-dqn``, network and batch are smaller, so that replay
takes a larger share of the time. SAC uses uniform replay: both buffers draw the same
rows, and the final weights are bitwise equal. PPO runs epochs over rollouts with GAE.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data.replay_buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.envs import EnvBase, GymEnv, SerialEnv
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, SACLoss, SoftUpdate
from torchrl.objectives.value import GAE

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer, RolloutBuffer
from rlbuf_td.cli import demo, whole_number
from tests.benchmarks.timing import OURS, one_thread

SIDES = (OURS, "TorchRL")
NOTES = """time in buffers: share of the time in calls of the buffer, ours / TorchRL's
final weights, after the same steps from the same seed: equal for sac, bit for bit, because uniform sampling draws the
same rows. Prioritized draws differ by design: ours are stratified, TorchRL's independent."""
CAPACITY, WARM_UP, CPU = 100_000, 1_000, torch.device("cpu")


class Clock:
    """Measures the time of a run, and the share of it that is spent in the buffer."""

    def __init__(self) -> None:
        self._start, self._in_buffer = time.perf_counter(), 0.0

    @contextmanager
    def in_buffer(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._in_buffer += time.perf_counter() - begin

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches; count the time to get each as time in the buffer."""
        iterator = iter(batches)
        while True:
            with self.in_buffer():
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def stop(self) -> tuple[float, float]:
        """Return the seconds so far, and the share of them in the buffer."""
        seconds = time.perf_counter() - self._start
        return seconds, self._in_buffer / seconds


def replay(side: str, batch: int, *, prioritized: bool) -> TensorDictReplayBuffer:
    alpha, beta = 0.6, 0.4
    if side == OURS:
        own = (
            {"sampler": ProportionalSampler(CAPACITY, alpha, beta)}
            if prioritized
            else {}
        )
        return ReplayBuffer(storage=PackedStorage(CAPACITY), batch_size=batch, **own)
    theirs = (
        {"sampler": PrioritizedSampler(CAPACITY, alpha, beta)} if prioritized else {}
    )
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), batch_size=batch, **theirs
    )


def learn_by_replay(
    clock: Clock,
    rb: Any,
    collector: Collector,
    learn: Callable[[TensorDictBase], object],
    updates: int,
) -> None:
    prioritized = isinstance(rb.sampler, PrioritizedSampler)
    for data in collector:
        with clock.in_buffer():
            rb.extend(data.reshape(-1))
        if len(rb) < WARM_UP:
            continue
        for _ in range(updates):
            with clock.in_buffer():
                batch = rb.sample()
            learn(batch)
            if prioritized:
                with clock.in_buffer():
                    rb.update_tensordict_priority(batch)
    collector.shutdown()


def train_dqn(
    side: str, clock: Clock, steps: int, cells: int = 256, batch: int = 64
) -> torch.nn.Module:
    env = GymEnv("CartPole-v1")
    env.set_seed(0)
    policy, explore = demo.make_policy(env, CPU, cells)
    learner = demo.Learner(policy, env, steps)
    collector = collect(env, TensorDictSequential(policy, explore), demo.FRAMES, steps)
    learn_by_replay(
        clock,
        replay(side, batch, prioritized=True),
        collector,
        learner.learn,
        demo.UPDATES,
    )
    return policy


def make_sac(
    env: EnvBase,
) -> tuple[ProbabilisticActor, Callable[[TensorDictBase], None]]:
    observations, actions = (
        env.observation_spec["observation"].shape[-1],
        env.action_spec.shape[-1],
    )
    head = torch.nn.Sequential(
        MLP(observations, 2 * actions, num_cells=[256, 256]), NormalParamExtractor()
    )
    actor = ProbabilisticActor(
        TensorDictModule(head, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs={
            "low": env.action_spec.space.low,
            "high": env.action_spec.space.high,
        },
    )
    critic = ValueOperator(
        MLP(observations + actions, 1, num_cells=[256, 256]),
        in_keys=["observation", "action"],
    )
    loss_module = SACLoss(actor, critic, num_qvalue_nets=2)
    loss_module.make_value_estimator(gamma=0.99)
    target, optimizer = (
        SoftUpdate(loss_module, eps=0.995),
        torch.optim.Adam(loss_module.parameters(), lr=3e-4),
    )

    def learn(batch: TensorDictBase) -> None:
        losses = loss_module(batch)
        optimizer.zero_grad()
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
        optimizer.step()
        target.step()

    return actor, learn


def train_sac(side: str, clock: Clock, steps: int) -> torch.nn.Module:
    env = GymEnv("Pendulum-v1")
    env.set_seed(0)
    actor, learn = make_sac(env)
    learn_by_replay(
        clock,
        replay(side, 256, prioritized=False),
        collect(env, actor, 10, steps),
        learn,
        updates=10,
    )
    return actor


def make_ppo(
    env: EnvBase,
) -> tuple[ProbabilisticActor, ValueOperator, Callable[[TensorDictBase], None]]:
    size, spec = (
        env.observation_spec["observation"].shape[-1],
        env.action_spec_unbatched,
    )
    network = partial(MLP, size, num_cells=[64, 64], activation_class=torch.nn.Tanh)
    head = TensorDictModule(network(spec.space.n), ["observation"], ["logits"])
    of_actions = {
        "distribution_class": torch.distributions.Categorical,
        "return_log_prob": True,
    }
    actor = ProbabilisticActor(head, in_keys=["logits"], spec=spec, **of_actions)
    critic = ValueOperator(network(1), in_keys=["observation"])
    loss_module = ClipPPOLoss(
        actor, critic, entropy_bonus=False, critic_coeff=0.5, loss_critic_type="l2"
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3, eps=1e-5)

    def learn(batch: TensorDictBase) -> None:
        losses = loss_module(batch)
        optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"]).backward()
        torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
        optimizer.step()

    return actor, critic, learn


def train_ppo(side: str, clock: Clock, steps: int) -> torch.nn.Module:
    lanes, frames = 8, 8 * 128
    law: dict[str, Any] = {"gamma": 0.99, "lmbda": 0.95}
    env = SerialEnv(
        lanes, partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
    )
    env.set_seed(0)
    actor, critic, learn = make_ppo(env)
    ours = RolloutBuffer(
        128,
        lanes,
        batch_size=256,
        epochs=10,
        value_network=critic,
        normalize_advantage=None,
        **law,
    )
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(frames),
        sampler=SamplerWithoutReplacement(),
        batch_size=256,
    )
    advantage = GAE(**law, value_network=critic, average_gae=False, vectorized=True)
    collector = collect(env, actor, frames, steps)
    for data in collector:
        with clock.in_buffer():
            rollout: list[Any] = [ours] if side == OURS else [theirs] * 10
            if side == OURS:
                ours.extend(data)
            else:
                with torch.no_grad():
                    theirs.extend(advantage(data).reshape(-1))
        for epoch in rollout:
            for batch in clock.batches(epoch):
                learn(batch)
    collector.shutdown()
    return actor


def collect(env: EnvBase, policy: Any, frames: int, steps: int) -> Collector:
    """Return a TorchRL collector; the number of ``steps`` is rounded up to a multiple
    of ``frames``."""
    frames_of = {
        "frames_per_batch": frames,
        "total_frames": -(-steps // frames) * frames,
    }
    return Collector(env, policy, **frames_of, auto_register_policy_transforms=False)


SCRIPTS: dict[str, Callable[[str, Clock, int], torch.nn.Module]] = {
    "dqn": train_dqn,
    "small-dqn": partial(train_dqn, cells=32, batch=32),
    "sac": train_sac,
    "ppo": train_ppo,
}
STEPS = {"dqn": 8_192, "small-dqn": 8_192, "sac": 4_000, "ppo": 16_384}


def run(script: str, side: str, steps: int) -> tuple[float, float, list[torch.Tensor]]:
    torch.manual_seed(0)
    clock = Clock()
    policy = SCRIPTS[script](side, clock, steps)
    return *clock.stop(), list(policy.parameters())


def compare(script: str, steps: int, rounds: int) -> list[str]:
    """Return a row of the table."""
    runs: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    weights: dict[str, list[torch.Tensor]] = {}
    for side in SIDES:
        run(script, side, 1_500)  # compiles kernels, fills caches
    for _ in range(rounds):
        for side in SIDES:
            total, in_buffer, weights[side] = run(script, side, steps)
            runs[side].append((total, in_buffer))
    speed = {
        side: steps / statistics.median(total for total, _ in runs[side])
        for side in SIDES
    }
    share = {
        side: statistics.median(inside for _, inside in runs[side]) for side in SIDES
    }
    both = zip(*(runs[side] for side in SIDES), strict=True)
    faster = statistics.median(theirs / ours for (ours, _), (theirs, _) in both)
    equal = all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(*weights.values(), strict=True)
    )
    shares = " / ".join(f"{share[side]:.1%}" for side in SIDES)
    speeds = [f"{speed[side]:,.0f}" for side in SIDES]
    return [script, *speeds, f"{faster:.2f}x", shares, "equal" if equal else "differ"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[*SCRIPTS], choices=[*SCRIPTS])
    parser.add_argument(
        "--steps", type=whole_number(1), help="environment steps per run"
    )
    parser.add_argument(
        "--rounds", type=whole_number(1), default=3, help="runs per script and buffer"
    )
    options = parser.parse_args(arguments)
    table = Table(
        "script", *SIDES, "speed-up", "time in buffers", "final weights", caption=NOTES
    )
    table.title = "Whole training scripts, one thread: environment steps per second"
    with one_thread():
        for script in track(options.only, "training", transient=True):
            table.add_row(
                *compare(script, options.steps or STEPS[script], options.rounds)
            )
    Console().print(table)


if __name__ == "__main__":
    main()
