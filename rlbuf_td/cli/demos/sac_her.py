"""Train SAC to reach goals from sparse rewards, with hindsight and without: TorchRL's agent, and our buffer.

Run it with ``python -m rlbuf_td demo --algo sac-her``. :func:`train` is the example to read: hindsight is one sampler
around another, and the buffer's transforms see the goals that it has put in place.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import gymnasium
import gymnasium_robotics
import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import TensorSpec
from torchrl.envs import (
    CatTensors,
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    ObservationNorm,
    Transform,
    TransformedEnv,
    default_info_dict_reader,
)
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate
from tqdm import tqdm

from rlbuf_td import HindsightSampler, PackedStorage, ReplayBuffer, gymnasium_reward_fn
from rlbuf_td.cli.demos.dqn import CAPACITY, SAMPLERS
from rlbuf_td.cli.demos.report import Run, Stopwatch, save_comparison, train_each

gymnasium.register_envs(gymnasium_robotics)

STEPS = 5_000
FRAMES, UPDATES, WARM_UP, CHECK_EVERY = 50, 25, 1_000, 500
TESTS = 50  # episodes of the final evaluation
KEYS = [
    *("observation", "desired_goal", "action"),
    *(("next", key) for key in ("observation", "desired_goal", "achieved_goal", "reward", "done", "terminated")),
]


def make_env(name: str, *transforms: Transform) -> EnvBase:
    """Return a Gymnasium goal environment that also says whether it ``"is_success"``."""
    env = GymEnv(name)
    if "desired_goal" not in env.observation_spec.keys() or not env.action_spec.dtype.is_floating_point:
        raise SystemExit(
            f"hindsight needs an environment with goals and continuous actions, as FetchReach-v4; {name} is none"
        )
    env.set_info_dict_reader(default_info_dict_reader(["is_success"]))
    return TransformedEnv(env, Compose(DoubleToFloat(), *transforms))


def see_goals(loc: torch.Tensor, scale: torch.Tensor, *prefixes: tuple[str, ...]) -> Transform:
    """Return a transform that puts observation and goal together as ``"input"``, standardized."""
    inputs = [(*prefix, "input") for prefix in prefixes]
    parts = [[(*prefix, key) for key in ("observation", "desired_goal")] for prefix in prefixes]
    together = (CatTensors(*keys, del_keys=False, sort=False) for keys in zip(parts, inputs, strict=True))
    return Compose(*together, ObservationNorm(loc, scale, in_keys=inputs, standard_normal=True))


def make_agent(inputs: int, spec: TensorSpec, device: torch.device) -> tuple[ProbabilisticActor, ValueOperator]:
    """Return a policy that takes actions within the bounds of ``spec``, and a network for the value of actions."""
    network = partial(MLP, num_cells=[256, 256], activation_class=torch.nn.ReLU, device=device)
    actions = spec.shape[-1]
    parameters = torch.nn.Sequential(network(inputs, 2 * actions), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(parameters, ["input"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
    )
    return actor, ValueOperator(network(inputs + actions, 1), in_keys=["action", "input"])


def is_reached(episode: TensorDictBase) -> float:
    """Return 1 if the goal is reached at the end of an episode, else 0."""
    return float(episode["next", "is_success"][-1])


def train(env_name: str, sampler: str, her_ratio: float, steps: int, seed: int, device: torch.device, out: Path) -> Run:
    """Train on a Gymnasium goal environment for ``steps`` steps; ``her_ratio=0`` leaves the goals as they were."""
    torch.manual_seed(seed)
    env = make_env(env_name)
    env.set_seed(seed)
    random = env.rollout(WARM_UP, break_when_any_done=False, set_truncated=True)
    inputs = torch.cat([random["observation"], random["desired_goal"]], -1)
    loc, scale = inputs.mean(0), inputs.std(0) + 1e-3
    env.append_transform(see_goals(loc, scale, ()))

    rows, reward_fn = SAMPLERS[sampler](), gymnasium_reward_fn(env)
    buffer = ReplayBuffer(
        storage=PackedStorage(CAPACITY, device=device),
        sampler=HindsightSampler(rows, reward_fn, her_ratio=her_ratio) if her_ratio else rows,
        transform=see_goals(loc.to(device), scale.to(device), (), ("next",)),  # the goals that hindsight has put there
        batch_size=256,
    )
    buffer.extend(random.select(*KEYS))
    actor, critic = make_agent(inputs.shape[-1], env.action_spec.to(device), device)
    collector = Collector(
        env,
        actor,
        frames_per_batch=FRAMES,
        total_frames=steps - WARM_UP,
        policy_device=device,
        auto_register_policy_transforms=False,
    )
    loss_module = SACLoss(actor, critic, alpha_init=0.2)
    loss_module.make_value_estimator(gamma=0.95)
    target_update = SoftUpdate(loss_module, tau=0.05)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)

    make_test = partial(make_env, env_name, see_goals(loc, scale, ()))
    run, clock, seen = Run(make_test, out, seed, threshold=float("inf"), score=is_reached), Stopwatch(), WARM_UP
    run.is_solved_by(actor, seen)
    bar = tqdm(total=steps, initial=seen, unit=" steps")
    for data in collector:
        seen += data.numel()
        with clock("buffer"):
            buffer.extend(data.select(*KEYS))
        for _ in range(UPDATES):
            with clock("buffer"):
                batch = buffer.sample()
            losses = loss_module(batch)  # weighted by "priority_weight"; puts "td_error" into the batch
            optimizer.zero_grad()
            (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
            optimizer.step()
            target_update.step()
            with clock("buffer"):
                buffer.update_tensordict_priority(batch)

        ended = data["next", "done"].squeeze(-1)
        run.episodes += [(seen, float(success)) for success in data["next", "is_success"][ended]]
        bar.update(data.numel())
        bar.set_postfix({"success": f"{run.recent():.0%}", "in buffer": f"{clock.share('buffer'):.1%}"})
        if seen % CHECK_EVERY < FRAMES:
            run.is_solved_by(actor, seen)
    bar.close()
    collector.shutdown()
    run.test(actor, seen, TESTS)
    return run


def main(options: argparse.Namespace) -> int:
    """Train as the command line says, and tell how it went (``python -m rlbuf_td demo --algo sac-her``)."""
    out = options.out or Path("runs") / f"sac-her-{options.env}-{options.sampler}-seed{options.seed}"
    torch.set_num_threads(1)  # the networks are small: more threads only wait for each other
    steps = STEPS if options.steps is None else options.steps
    if steps < WARM_UP + FRAMES:
        raise SystemExit(f"--steps must be at least {WARM_UP + FRAMES}: learning begins after {WARM_UP}")
    rest = (steps, options.seed, torch.device(options.device))
    arms = {
        "with hindsight": partial(train, options.env, options.sampler, 0.8, *rest),
        "without": partial(train, options.env, options.sampler, 0.0, *rest),
    }
    runs = train_each(out, arms, f"{{:.0%}} of {TESTS} new episodes end at their goal")
    picture = out / "learning_curves.png"
    save_comparison(
        picture, f"SAC on {options.env}, {options.sampler} replay", "share of episodes that end at the goal", runs
    )
    print(f"learning curves: {picture}, policies: {out / '*' / 'policy.pt'}")
    print("next: the same from prioritized replay, python -m rlbuf_td demo --algo sac-her --sampler proportional")
    return 0
