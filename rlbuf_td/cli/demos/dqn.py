"""Train a DQN from prioritized replay: TorchRL's environment, collector and loss, and our buffer between them.

Run it with ``python -m rlbuf_td demo``. :func:`train` is the example to read; the rest keeps the best policy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gymnasium
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data.replay_buffers import Sampler
from torchrl.envs import EnvBase, GymEnv, RewardSum, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueModule
from torchrl.objectives import DQNLoss, HardUpdate
from tqdm import tqdm

from rlbuf_td import ProportionalSampler, RankSampler, ReplayBuffer, UniformSampler
from rlbuf_td.cli.demos.report import Run, Stopwatch

CAPACITY = 50_000
STEPS = 50_000
FRAMES, UPDATES, WARM_UP, CHECK_EVERY = 256, 128, 1_024, 2_560
LEFT_OUT = ["collector", "action_value", "chosen_action_value"]  # no loss asks for them
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "uniform": UniformSampler,
    "proportional": lambda: ProportionalSampler(CAPACITY, alpha=0.6, beta=0.4),
    "rank": lambda: RankSampler(CAPACITY, alpha=0.7, beta=0.5),
}


def make_policy(env: EnvBase, steps: int, device: torch.device) -> tuple[TensorDictSequential, EGreedyModule]:
    """Return a greedy policy, and the module that makes it explore less and less."""
    spec = env.action_spec
    if not hasattr(spec.space, "n"):
        raise SystemExit("DQN needs an environment with discrete actions; for continuous ones try --algo ppo")
    network = MLP(env.observation_spec["observation"].shape[-1], spec.space.n, num_cells=[256, 256], device=device)
    value = TensorDictModule(network, in_keys=["observation"], out_keys=["action_value"])
    explore = EGreedyModule(spec, eps_init=1.0, eps_end=0.04, annealing_num_steps=steps // 6, device=device)
    return TensorDictSequential(value, QValueModule(spec=spec)), explore


def train(env_name: str, sampler: str, steps: int, seed: int, device: torch.device, out: Path) -> Run:
    """Train on a Gymnasium environment with discrete actions, until it is solved, for at most ``steps`` steps."""
    torch.manual_seed(seed)
    env = TransformedEnv(GymEnv(env_name), RewardSum())
    env.set_seed(seed)
    policy, explore = make_policy(env, steps, device)
    collector = Collector(
        env, TensorDictSequential(policy, explore), frames_per_batch=FRAMES, total_frames=steps, policy_device=device
    )
    buffer = ReplayBuffer.from_env(env, CAPACITY, device=device, sampler=SAMPLERS[sampler](), batch_size=64)
    loss_module = DQNLoss(policy, action_space=env.action_spec, double_dqn=True, delay_value=True)
    loss_module.make_value_estimator(gamma=0.99)
    target_update = HardUpdate(loss_module, value_network_update_interval=UPDATES)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=2.3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps // FRAMES)

    threshold = gymnasium.spec(env_name).reward_threshold or float("inf")
    run, clock, seen = Run(partial(GymEnv, env_name), out, seed, threshold), Stopwatch(), 0
    bar = tqdm(total=steps, unit=" steps")
    for data in collector:
        seen += data.numel()
        explore.step(data.numel())
        with clock("buffer"):
            buffer.extend(data.exclude(*LEFT_OUT))
        for _ in range(UPDATES if seen >= WARM_UP else 0):
            with clock("buffer"):
                batch = buffer.sample()
            loss = loss_module(batch)["loss"]  # weighted by "priority_weight"; puts "td_error" into the batch
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 10.0)
            optimizer.step()
            target_update.step()
            with clock("buffer"):
                buffer.update_tensordict_priority(batch)
        if seen >= WARM_UP:
            schedule.step()

        ended = data["next", "done"].squeeze(-1)
        run.episodes += [(seen, float(total)) for total in data["next", "episode_reward"][ended]]
        bar.update(data.numel())
        bar.set_postfix({"return": f"{run.recent():.0f}", "in buffer": f"{clock.share('buffer'):.1%}"})
        if seen % CHECK_EVERY < FRAMES and seen > steps // 4 and run.is_solved_by(policy, seen):
            break
    bar.close()
    collector.shutdown()
    run.finish(policy, seen, f"DQN on {env_name}, {sampler} replay")
    return run


def main(options: argparse.Namespace) -> int:
    """Train as the command line says, and tell how it went (``python -m rlbuf_td demo``)."""
    out = options.out or Path("runs") / f"dqn-{options.env}-{options.sampler}-seed{options.seed}"
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the networks are small: more threads only wait for each other
    steps = STEPS if options.steps is None else options.steps
    if steps < WARM_UP:
        raise SystemExit(f"--steps must be at least {WARM_UP}: learning begins after so many")
    run = train(options.env, options.sampler, steps, options.seed, torch.device(options.device), out)
    print(f"mean return of the best policy over 10 new episodes: {run.final:.1f}")
    print(f"learning curve: {out / 'learning_curve.png'}, policy: {out / 'policy.pt'}")
    print(f"next: the same from uniform replay, python -m rlbuf_td demo --sampler uniform --env {options.env}")
    return 0
