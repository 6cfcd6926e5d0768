"""Train a DQN that remembers, and one that does not, on CartPole without velocities: sequences from our buffer.

Run it with ``python -m rlbuf_td demo --algo drqn``. :func:`train` is the example to read: the buffer gives windows of
consecutive steps; the LSTM goes through all of each, the loss leaves out the first, which only bring its state up to
date (burn-in; Kapturowski et al. 2019).
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import TensorSpec
from torchrl.envs import Compose, EnvBase, GymEnv, InitTracker, RewardSum, TransformedEnv, UnaryTransform
from torchrl.modules import MLP, EGreedyModule, LSTMModule, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate
from tqdm import tqdm

from rlbuf_td import PackedStorage, ReplayBuffer, SequenceSampler
from rlbuf_td.cli.demos.dqn import CAPACITY, SAMPLERS
from rlbuf_td.cli.demos.report import Run, Stopwatch, save_comparison, train_each

STEPS = 10_240
FRAMES, UPDATES, WARM_UP, CHECK_EVERY = 128, 32, 1_024, 1_280
SEQUENCES, BURN_IN, LENGTH = 64, 4, 8  # of a batch
HIDDEN = 64
STATE = ["recurrent_state_h", "recurrent_state_c"]  # as LSTMModule calls them
KEYS = ["position", "action", "is_init", *(("next", key) for key in ("position", "reward", "done", "terminated"))]


def positions(observation: torch.Tensor) -> torch.Tensor:
    """Return the position of the cart and the angle of the pole, in tenths of their limits, without velocities."""
    return observation[..., [0, 2]] * observation.new_tensor([10 / 2.4, 10 / 0.2095])


def make_env(memory: LSTMModule | None = None) -> EnvBase:
    """Return CartPole without velocities; it hands the state of ``memory`` from step to step."""
    transforms = [InitTracker(), UnaryTransform(["observation"], ["position"], fn=positions), RewardSum()]
    if memory is not None:
        transforms.append(memory.make_tensordict_primer())
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(*transforms))


def make_agent(spec: TensorSpec, memory: bool, device: torch.device) -> tuple[TensorDictSequential, ...]:
    """Return a greedy policy that acts step by step, and the same networks going through whole sequences.

    Going through a sequence leaves the stored states as they are: a sequence of next steps begins with that of its
    own first step.
    """
    embed = MLP(2, HIDDEN, num_cells=[], activate_last_layer=True, activation_class=torch.nn.ReLU, device=device)
    value = MLP(HIDDEN, spec.space.n, num_cells=[HIDDEN], device=device)
    if memory:
        lstm, last = torch.nn.LSTM(HIDDEN, HIDDEN, batch_first=True, device=device), [("last", key) for key in STATE]
        act = LSTMModule(lstm=lstm, in_key="features", out_key="belief")
        learn = LSTMModule(
            lstm=lstm, in_keys=["features", *STATE], out_keys=["belief", *last], default_recurrent_mode=True
        )
    else:
        network = MLP(HIDDEN, HIDDEN, num_cells=[2 * HIDDEN], activation_class=torch.nn.ReLU, device=device)
        act = learn = TensorDictModule(network, ["features"], ["belief"])
    ends = (
        TensorDictModule(embed, ["position"], ["features"]),
        TensorDictModule(value, ["belief"], ["action_value"]),
    )
    return tuple(TensorDictSequential(ends[0], middle, ends[1], QValueModule(spec=spec)) for middle in (act, learn))


def make_loss(learner: TensorDictSequential, spec: TensorSpec) -> tuple[DQNLoss, SoftUpdate]:
    """Return the loss of the steps that are marked ``"learn"``, and what moves its target network."""
    loss_module = DQNLoss(learner, action_space=spec, double_dqn=True, delay_value=True)
    loss_module.make_value_estimator(gamma=0.99)
    loss_module.loss_mask_key = "learn"
    return loss_module, SoftUpdate(loss_module, tau=0.01)


def as_sequences(batch: TensorDictBase) -> TensorDictBase:
    """Return a sampled batch as windows ``[N, T]``, with the steps whose errors count as ``"learn"``.

    Where the first real step of a window begins with its stored state, so does the next step of that one.
    """
    batch = batch.reshape(-1, BURN_IN + LENGTH)
    batch["learn"] = batch["mask"] & ~batch["burn_in_mask"]
    batch["next", "is_init"] = batch["is_init"]
    return batch


def train(memory: bool, sampler: str, steps: int, seed: int, device: torch.device, out: Path) -> Run:
    """Train with or without memory, until CartPole is solved, for at most ``steps`` steps."""
    torch.manual_seed(seed)
    spec = make_env().action_spec
    policy, learner = make_agent(spec, memory, device)
    make_own_env = partial(make_env, policy[1] if memory else None)
    env = make_own_env()
    env.set_seed(seed)
    explore = EGreedyModule(spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=steps // 4, device=device)
    collector = Collector(
        env,
        TensorDictSequential(policy, explore),
        frames_per_batch=FRAMES,
        total_frames=steps,
        policy_device=device,
        auto_register_policy_transforms=False,
    )
    buffer = ReplayBuffer(
        storage=PackedStorage(CAPACITY, device=device),
        sampler=SequenceSampler(SAMPLERS[sampler](), LENGTH, burn_in=BURN_IN),
        batch_size=SEQUENCES * (BURN_IN + LENGTH),
    )
    loss_module, target_update = make_loss(learner, spec)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps // FRAMES)

    keys = [*KEYS, *STATE, *(("next", key) for key in STATE)] if memory else KEYS
    run, clock, seen = Run(make_own_env, out, seed, threshold=475.0), Stopwatch(), 0
    bar = tqdm(total=steps, unit=" steps")
    for data in collector:
        seen += data.numel()
        explore.step(data.numel())
        with clock("buffer"):
            buffer.extend(data.select(*keys))
        for _ in range(UPDATES if seen >= WARM_UP else 0):
            with clock("buffer"):
                batch = as_sequences(buffer.sample())
            loss = loss_module(batch)["loss"]
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
        if seen % CHECK_EVERY < FRAMES and run.is_solved_by(policy, seen):
            break
    bar.close()
    collector.shutdown()
    run.test(policy, seen)
    return run


def main(options: argparse.Namespace) -> int:
    """Train as the command line says, and tell how it went (``python -m rlbuf_td demo --algo drqn``)."""
    if options.env != "CartPole-v1":
        raise SystemExit(f"drqn hides the velocities of CartPole-v1; it does not know what to hide of {options.env}")
    out = options.out or Path("runs") / f"drqn-{options.env}-{options.sampler}-seed{options.seed}"
    torch.set_num_threads(1)  # the networks are small: more threads only wait for each other
    steps = STEPS if options.steps is None else options.steps
    if steps < WARM_UP:
        raise SystemExit(f"--steps must be at least {WARM_UP}: learning begins after so many")
    rest = (options.sampler, steps, options.seed, torch.device(options.device))
    arms = {"with memory": partial(train, True, *rest), "without": partial(train, False, *rest)}
    runs = train_each(out, arms, "mean return of the best policy over 10 new episodes: {:.1f}")
    picture = out / "learning_curves.png"
    save_comparison(picture, "DQN on CartPole without velocities", "return", runs)
    print(f"learning curves: {picture}, policies: {out / '*' / 'policy.pt'}")
    print("next: python -m rlbuf_td demo --algo drqn --sampler proportional")
    return 0
