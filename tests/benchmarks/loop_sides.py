"""The loops that ``loops.py`` measures: each side of a case with its environment,
network and buffer."""

from __future__ import annotations

import ast
import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from rlbuf_td import (
    GymnasiumRecorder,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    RolloutBuffer,
)
from tests.benchmarks.contenders import ALPHA, BETA, small_rows
from tests.benchmarks.timing import Learner

ROOT = Path(__file__).parents[2]
CAPACITY, GAMMA, LMBDA = 100_000, 0.99, 0.95
now = time.perf_counter


class Timer:
    """A function that knows the seconds of its last call."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *values, **options):
        began = now()
        result = self.call(*values, **options)
        self.seconds = now() - began
        return result


class Side(ABC):
    """A loop with its environment, network and buffer.

    :attr:`spent` sums the seconds in the buffer, by part.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def count(self, part: str, began: float) -> None:
        self.spent[part] += now() - began

    @abstractmethod
    def run(self, steps: int) -> int:
        """Run about so many steps; return how many."""

    def fill(self, steps: int) -> None:
        """Prepare the loop: fill the buffer by ``steps`` steps, compile what is used."""
        self.run(steps)


class ReplaySide(Side):
    """Writes a step, samples a batch, learns from it, and updates priorities if the
    network returns TD errors."""

    def run(self, steps: int) -> int:
        for _ in range(steps):
            self.write()
            began = now()
            batch = self.sample()
            self.count("sample", began)
            td_error = self.learner.learn(*batch)
            if td_error is not None:
                began = now()
                self.update(td_error)
                self.count("update", began)
        return steps

    def fill(self, steps: int) -> None:
        for _ in range(steps):
            self.write()
        self.run(20)

    learner: Any

    @abstractmethod
    def write(self) -> None:
        """Take a step and store it; count the time to store it."""

    @abstractmethod
    def sample(self) -> Sequence[torch.Tensor]: ...

    def update(self, td_error: torch.Tensor) -> None:
        raise NotImplementedError


class PlainSide(ReplaySide):
    """Steps an environment without a recorder."""

    def __init__(self, env, learner) -> None:
        super().__init__()
        self.env, self.learner = env, learner
        self.obs, _ = env.reset(seed=0)

    def write(self) -> None:
        action = self.learner.act(self.obs)
        outcome = self.env.step(action)
        began = now()
        self.store(self.obs, action, *outcome)
        self.count("write", began)
        self.obs = outcome[0]
        if not hasattr(self.env, "num_envs") and (outcome[2] or outcome[3]):
            self.obs, _ = self.env.reset()

    @abstractmethod
    def store(self, obs, action, next_obs, reward, *ends) -> None:
        """Store a step; ``ends`` are terminated, truncated and the infos."""


class RecorderSide(ReplaySide):
    """The recorder and the replay buffer of this package."""

    def __init__(self, env, learner, **settings) -> None:
        super().__init__()
        self.env, self.learner = env, learner
        env.step = Timer(env.step)
        self.rb = ReplayBuffer.from_env(self.env, **settings)
        self.recorder = GymnasiumRecorder(self.rb, self.env)
        self.obs, _ = self.recorder.reset(seed=0)

    def write(self) -> None:
        action = self.learner.act(self.obs)
        began = now()
        self.obs, _, terminated, truncated, _ = self.recorder.step(action)
        self.spent["write"] += now() - began - self.env.step.seconds
        if not hasattr(self.env, "num_envs") and (terminated or truncated):
            self.obs, _ = self.recorder.reset()

    def sample(self) -> Sequence[torch.Tensor]:
        self.batch = self.rb.sample()
        outcome = self.batch["next"]
        parts: list[Any] = [self.batch["observation"], self.batch["action"]]
        parts += [outcome["reward"]]
        parts += [outcome["observation"], outcome["terminated"]]
        weight = self.batch.get("priority_weight", None)
        return parts if weight is None else [*parts, weight]

    def update(self, td_error: torch.Tensor) -> None:
        self.rb.update_priority(self.batch["index"], td_error)


# -- one environment, an actor and a critic: a NumPy ring, Stable-Baselines3, TorchRL


class ActorCritic:
    """The updates of DDPG without target networks."""

    def __init__(self) -> None:
        self.critic, self.actor = (MLP(i, 1, num_cells=[256, 256]) for i in (4, 3))
        both = [*self.critic.parameters(), *self.actor.parameters()]
        self.optimizer = torch.optim.Adam(both, 3e-4)

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> np.ndarray:
        return 2 * self.actor(torch.from_numpy(obs)).tanh().numpy()

    def learn(self, obs, action, reward, next_obs, end) -> None:
        with torch.no_grad():
            following = torch.cat([next_obs, self.actor(next_obs)], -1)
            target = reward + GAMMA * (1 - end.float()) * self.critic(following)
        error = self.critic(torch.cat([obs, action], -1)) - target
        gain = self.critic(torch.cat([obs, self.actor(obs)], -1))
        self.optimizer.zero_grad()
        (error.square().mean() - 1e-3 * gain.mean()).backward()
        self.optimizer.step()


def pendulum() -> gymnasium.Env:
    return gymnasium.make("Pendulum-v1")


class NumpyRing(PlainSide):
    """The buffer of a single-file script."""

    def __init__(self) -> None:
        super().__init__(pendulum(), ActorCritic())
        self.columns = [np.zeros((CAPACITY, n), np.float32) for n in (3, 1, 1, 3, 1)]
        self.written = 0

    def store(self, obs, action, next_obs, reward, *ends) -> None:
        row = self.written % CAPACITY
        values = (obs, action, reward, next_obs, ends[0])
        for column, value in zip(self.columns, values, strict=True):
            column[row] = value
        self.written += 1

    def sample(self) -> Sequence[torch.Tensor]:
        rows = np.random.randint(0, min(self.written, CAPACITY), 256)  # noqa: NPY002
        return [torch.from_numpy(column[rows]) for column in self.columns]


class Baselines(PlainSide):
    """Stable-Baselines3's replay buffer."""

    def __init__(self, env, learner, capacity: int, batch: int, **settings) -> None:
        from stable_baselines3.common.buffers import ReplayBuffer as Buffer

        super().__init__(env, learner)
        spaces = (env.observation_space, env.action_space)
        self.rb = Buffer(capacity, *spaces, device="cpu", **settings)
        self.batch = batch

    def store(self, obs, action, next_obs, reward, *ends) -> None:
        terminated, truncated, _ = ends
        infos = [{"TimeLimit.truncated": truncated and not terminated}]
        row = (obs[None], next_obs[None], np.array([action]), np.array([reward]))
        self.rb.add(*row, np.array([terminated or truncated]), infos)

    def sample(self) -> Sequence[torch.Tensor]:
        drawn = self.rb.sample(self.batch)
        parts = (drawn.observations, drawn.actions, drawn.rewards)
        return [*parts, drawn.next_observations, drawn.dones]


def baselines_pendulum() -> Baselines:
    return Baselines(pendulum(), ActorCritic(), CAPACITY, 256)


def recorded_pendulum() -> RecorderSide:
    settings = {"capacity": CAPACITY, "batch_size": 256}
    return RecorderSide(pendulum(), ActorCritic(), **settings)


class TorchRLByHand(PlainSide):
    """TorchRL's replay buffer; the loop makes the TensorDict of each step."""

    def __init__(self) -> None:
        super().__init__(pendulum(), ActorCritic())
        storage = LazyTensorStorage(CAPACITY)
        self.rb = TensorDictReplayBuffer(storage=storage, batch_size=256)

    def store(self, obs, action, next_obs, reward, *ends) -> None:
        terminated, truncated, _ = ends
        outcome = {
            "observation": torch.from_numpy(next_obs),
            "reward": torch.tensor([reward], dtype=torch.float32),
            "terminated": torch.tensor([terminated]),
            "done": torch.tensor([terminated or truncated]),
        }
        step = {
            "observation": torch.from_numpy(obs),
            "action": torch.from_numpy(action),
        }
        self.rb.add(TensorDict({**step, "next": outcome}, []))

    def sample(self) -> Sequence[torch.Tensor]:
        batch = self.rb.sample()
        outcome = batch["next"]
        parts = (batch["observation"], batch["action"], outcome["reward"])
        return [*parts, outcome["observation"], outcome["terminated"]]


# -- eight environments, prioritized replay: cpprb


class DoubleDQN:
    """A double DQN without a target network."""

    def __init__(self) -> None:
        self.network = MLP(4, 2, num_cells=[128, 128])
        self.optimizer = torch.optim.Adam(self.network.parameters(), 1e-3)

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> np.ndarray:
        greedy = self.network(torch.from_numpy(obs)).argmax(-1)
        is_random = torch.rand(greedy.shape) < 0.1
        return torch.where(is_random, torch.randint(2, greedy.shape), greedy).numpy()

    def learn(self, obs, action, reward, next_obs, end, weight) -> torch.Tensor:
        with torch.no_grad():
            following = self.network(next_obs).amax(-1)
            target = reward.flatten() + GAMMA * (1 - end.flatten().float()) * following
        value = self.network(obs).gather(-1, action.long().view(-1, 1)).flatten()
        self.optimizer.zero_grad()
        ((value - target).square() * weight.flatten()).mean().backward()
        self.optimizer.step()
        return (value - target).detach().abs()


def cartpoles() -> SyncVectorEnv:
    makers = [lambda: gymnasium.make("CartPole-v1")] * 8
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


class Cpprb(PlainSide):
    """cpprb's prioritized buffer; it has n-step returns for one environment alone."""

    def __init__(self) -> None:
        from cpprb import PrioritizedReplayBuffer

        super().__init__(cartpoles(), DoubleDQN())
        fields: dict[str, Any] = {"obs": {"shape": 4}, "next_obs": {"shape": 4}}
        fields |= {"act": {"dtype": np.int64}, "rew": {}, "done": {}}
        self.rb = PrioritizedReplayBuffer(CAPACITY, fields, alpha=ALPHA)

    def store(self, obs, action, next_obs, reward, *ends) -> None:
        terminated, truncated, info = ends
        if "final_obs" in info:
            next_obs = next_obs.copy()
            for lane in (terminated | truncated).nonzero()[0]:
                next_obs[lane] = info["final_obs"][lane]
        self.rb.add(obs=obs, act=action, rew=reward, next_obs=next_obs, done=terminated)

    def sample(self) -> Sequence[torch.Tensor]:
        batch = self.rb.sample(128, beta=BETA)
        self.rows = batch["indexes"]
        keys = ("obs", "act", "rew", "next_obs", "done", "weights")
        return [torch.from_numpy(batch[key]) for key in keys]

    def update(self, td_error: torch.Tensor) -> None:
        self.rb.update_priorities(self.rows, td_error.numpy())


def prioritized(n_steps: int) -> RecorderSide:
    sampler: Any = ProportionalSampler(CAPACITY, ALPHA, BETA)
    if n_steps > 1:
        sampler = NStepSampler(sampler, n_steps, GAMMA)
    settings = {"capacity": CAPACITY, "sampler": sampler, "batch_size": 128}
    return RecorderSide(cartpoles(), DoubleDQN(), **settings)


# -- images


class Frames(gymnasium.Env):
    """Stacks of four random frames, in episodes of 300 steps."""

    observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.frame = 0, np.zeros((1, 84, 84), np.uint8)
        self.stack = np.concatenate([self.frame] * 4)
        return self.stack, {}

    def step(self, action):
        self.time += 1
        frame = self.np_random.integers(0, 255, (1, 84, 84), np.uint8)
        self.stack = np.concatenate([self.stack[1:], frame])
        return self.stack, 1.0, False, self.time == 300, {}


class Convolutions:
    """Gradient steps of a small convolutional network."""

    def __init__(self) -> None:
        layers = (nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 16, 4, 2), nn.ReLU())
        self.network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 81, 4))
        self.optimizer = torch.optim.Adam(self.network.parameters())

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> int:
        return int(self.network(torch.from_numpy(obs)[None].float()).argmax())

    def learn(self, obs: torch.Tensor, *others: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.network(obs.float() / 255).square().mean().backward()
        self.optimizer.step()


IMAGES = {"capacity": 8_000, "batch_size": 64}


def baselines_images(**settings) -> Baselines:
    return Baselines(Frames(), Convolutions(), *IMAGES.values(), **settings)


def images(**settings) -> RecorderSide:
    return RecorderSide(Frames(), Convolutions(), **IMAGES, **settings)


# -- PPO over eight environments


class Policy:
    """PPO's network, and a gradient step without clipping."""

    def __init__(self) -> None:
        self.network = MLP(4, 3, num_cells=[64, 64], activation_class=nn.Tanh)
        self.optimizer = torch.optim.Adam(self.network.parameters(), 3e-4)

    def __call__(
        self, obs: torch.Tensor
    ) -> tuple[torch.distributions.Categorical, Any]:
        out = self.network(obs)
        return torch.distributions.Categorical(logits=out[..., :2]), out[..., 2:]

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        actions, value = self(torch.from_numpy(obs))
        action = actions.sample()
        return action, actions.log_prob(action), value

    def learn(self, *batch: torch.Tensor) -> None:
        obs, action, log_prob, advantage, value_target = batch
        actions, value = self(obs)
        ratio = (actions.log_prob(action.flatten()) - log_prob.flatten()).exp()
        loss = (value.flatten() - value_target.flatten()).square().mean()
        self.optimizer.zero_grad()
        (loss - (ratio * advantage.flatten()).mean()).backward()
        self.optimizer.step()


def advantages(value, reward, done, last_value) -> torch.Tensor:
    """GAE of tensors ``[T, E]``, as single-file scripts write it; ``done[t]`` is that of
    step ``t``."""
    result, last = torch.zeros_like(reward), torch.zeros_like(last_value)
    for t in reversed(range(len(reward))):
        following = last_value if t == len(reward) - 1 else value[t + 1]
        going = 1 - done[t]
        delta = reward[t] + GAMMA * following * going - value[t]
        result[t] = last = delta + GAMMA * LMBDA * going * last
    return result


class RolloutSide(Side):
    """Fills a rollout, and learns from its minibatches; a step is one of all
    environments."""

    T, E = 128, 8

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy()
        self.env: Any = cartpoles()
        self.env.step = Timer(self.env.step)

    def run(self, steps: int) -> int:
        rollouts = max(1, steps // self.T)
        for _ in range(rollouts):
            self.write()
            batches = self.batches()
            while True:
                began = now()
                batch = next(batches, None)
                self.count("sample", began)
                if batch is None:
                    break
                self.policy.learn(*batch)
        return rollouts * self.T

    @abstractmethod
    def write(self) -> None:
        """Fill a rollout; count the time to store its steps."""

    @abstractmethod
    def batches(self) -> Iterator[Sequence[torch.Tensor]]: ...


def minibatches(
    columns: Mapping[str, torch.Tensor], epochs: int, size: int
) -> Iterator[list[torch.Tensor]]:
    """Yield rows of tensors ``[T, E, ...]`` in random order."""
    flat = [column.flatten(0, 1) for column in columns.values()]
    for _ in range(epochs):
        for rows in torch.randperm(len(flat[0])).split(size):
            yield [column[rows] for column in flat]


class PPOByHand(RolloutSide):
    """PPO with tensors ``[T, E]``, as single-file scripts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.obs, _ = self.env.reset(seed=0)
        names = ("action", "log_prob", "value", "reward", "done")
        self.columns = {"obs": torch.zeros(self.T, self.E, 4)}
        self.columns |= {name: torch.zeros(self.T, self.E) for name in names}

    def write(self) -> None:
        columns = self.columns
        for t in range(self.T):
            action, log_prob, value = self.policy.act(self.obs)
            outcome = self.env.step(action.numpy())
            began = now()
            columns["obs"][t] = torch.from_numpy(self.obs)
            columns["action"][t] = action
            columns["log_prob"][t] = log_prob
            columns["value"][t] = value[:, 0]
            columns["reward"][t] = torch.from_numpy(outcome[1])
            columns["done"][t] = torch.from_numpy(outcome[2] | outcome[3])
            self.count("write", began)
            self.obs = outcome[0]

    def batches(self) -> Iterator[Sequence[torch.Tensor]]:
        columns = self.columns
        value, reward, done = (columns[name] for name in ("value", "reward", "done"))
        _, _, last_value = self.policy.act(self.obs)
        advantage = advantages(value, reward, done, last_value[:, 0])
        chosen = {name: columns[name] for name in ("obs", "action", "log_prob")}
        returns = {"advantage": advantage, "target": advantage + columns["value"]}
        yield from minibatches(chosen | returns, epochs=4, size=256)


class PPORecorder(RolloutSide):
    """PPO with :class:`RolloutBuffer` and the recorder."""

    def __init__(self) -> None:
        super().__init__()
        value = TensorDictModule(
            lambda obs: self.policy(obs)[1], ["observation"], ["state_value"]
        )
        extras = {
            "state_value": torch.zeros(self.E, 1),
            "log_prob": torch.zeros(self.E),
        }
        law = {"gamma": GAMMA, "lmbda": LMBDA, "value_network": value}
        self.rb = RolloutBuffer.from_env(
            self.env, self.T, extras=extras, batch_size=256, epochs=4, **law
        )
        self.recorder = GymnasiumRecorder(self.rb, self.env)
        self.obs, _ = self.recorder.reset(seed=0)

    def write(self) -> None:
        for _ in range(self.T):
            action, log_prob, value = self.policy.act(self.obs)
            extras = {"state_value": value, "log_prob": log_prob}
            began = now()
            self.obs, *_ = self.recorder.step(action.numpy(), **extras)
            self.spent["write"] += now() - began - self.env.step.seconds

    def batches(self) -> Iterator[Sequence[torch.Tensor]]:
        keys = ("observation", "action", "log_prob", "advantage", "value_target")
        for batch in self.rb:
            yield [batch.get(key) for key in keys]


# -- rollouts of thousands of environments, whose steps are TensorDicts


class ManySide(Side):
    """Writes steps of 4,096 environments into rollouts of 16 steps; a learner's step
    precedes each write."""

    T, E = 16, 4_096

    def __init__(self) -> None:
        super().__init__()
        self.learner = Learner(256)
        self.steps = [small_rows(self.E) for _ in range(self.T)]
        for step in self.steps:
            step["state_value"] = torch.randn(self.E, 1)
            step["next", "state_value"] = torch.randn(self.E, 1)

    def run(self, steps: int) -> int:
        for step in range(steps):
            self.learner.step()
            began = now()
            self.store(step % self.T, self.steps[step % self.T])
            self.count("write", began)
        return steps

    @abstractmethod
    def store(self, t: int, step: TensorDictBase) -> None: ...


class ManyByHand(ManySide):
    """One ``copy_`` per leaf into tensors ``[T, E]``."""

    def __init__(self) -> None:
        super().__init__()
        first = self.steps[0]
        keys = first.keys(include_nested=True, leaves_only=True)
        self.columns = {
            key: first[key].new_zeros(self.T, *first[key].shape) for key in keys
        }

    def store(self, t: int, step: TensorDictBase) -> None:
        for key, column in self.columns.items():
            column[t].copy_(step[key])


class ManyAdded(ManySide):
    """:class:`RolloutBuffer` and its ``add``."""

    def __init__(self) -> None:
        super().__init__()
        law = {"gamma": GAMMA, "lmbda": LMBDA}
        self.rb = RolloutBuffer(self.T, self.E, batch_size=4_096, epochs=1, **law)

    def store(self, t: int, step: TensorDictBase) -> None:
        self.rb.add(step)


# -- agents of other libraries: SAC with TorchRL's collector, and Stable-Baselines3's


class CollectorSide(Side):
    """TorchRL's collector and SAC, 64 frames and 64 updates in turn; a step is a frame
    with an update."""

    FRAMES = 64

    def __init__(self, rb: TensorDictReplayBuffer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rb = rb
        env = GymEnv("Pendulum-v1")
        env.set_seed(0)
        self.build(env)
        self.collector = Collector(
            env,
            self.actor,
            frames_per_batch=self.FRAMES,
            total_frames=-1,
            auto_register_policy_transforms=False,
        )
        self.rollouts = iter(self.collector)

    def build(self, env: GymEnv) -> None:
        head = nn.Sequential(MLP(3, 2, num_cells=[256, 256]), NormalParamExtractor())
        space = env.action_spec.space
        self.actor = ProbabilisticActor(
            TensorDictModule(head, ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            spec=env.action_spec,
            distribution_class=TanhNormal,
            distribution_kwargs={"low": space.low, "high": space.high},
        )
        critic = MLP(4, 1, num_cells=[256, 256])
        value = ValueOperator(critic, in_keys=["observation", "action"])
        self.loss_module = SACLoss(self.actor, value, num_qvalue_nets=2)
        self.loss_module.make_value_estimator(gamma=GAMMA)
        self.target = SoftUpdate(self.loss_module, eps=0.995)
        self.optimizer = torch.optim.Adam(self.loss_module.parameters(), lr=3e-4)

    def learn(self, batch: TensorDictBase) -> None:
        losses = self.loss_module(batch)
        loss = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.target.step()

    def run(self, steps: int) -> int:
        batches = max(1, steps // self.FRAMES)
        for _ in range(batches):
            data = next(self.rollouts)
            began = now()
            self.rb.extend(data.reshape(-1))
            self.count("write", began)
            for _ in range(self.FRAMES):
                began = now()
                batch = self.rb.sample()
                self.count("sample", began)
                self.learn(batch)
                began = now()
                self.rb.update_tensordict_priority(batch)
                self.count("update", began)
        return batches * self.FRAMES


def collect_theirs(**settings) -> CollectorSide:
    storage = LazyTensorStorage(CAPACITY)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=256, **settings)
    return CollectorSide(buffer)


def collect_ours(**settings) -> CollectorSide:
    storage = PackedStorage(CAPACITY)
    return CollectorSide(ReplayBuffer(storage=storage, batch_size=256, **settings))


def guides_buffer() -> type:
    """Return the class for Stable-Baselines3's agents that the migration guide has."""
    text = (ROOT / "notebooks" / "08_migration_guide.ipynb").read_text()
    cells = ("".join(cell["source"]) for cell in json.loads(text)["cells"])
    wanted = "PackedReplayBuffer"
    (source,) = (cell for cell in cells if f"\nclass {wanted}" in f"\n{cell}")
    imports = "".join(json.loads(text)["cells"][3]["source"]).partition("\nplt.")[0]
    names: dict[str, Any] = {}
    exec(imports, names)
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == wanted:
            exec(ast.unparse(node), names)
    return names[wanted]


class AgentSide(Side):
    """Stable-Baselines3's SAC."""

    def __init__(self, make_class: Callable[[], type] | None = None) -> None:
        from stable_baselines3 import SAC

        super().__init__()
        settings = {"replay_buffer_class": make_class()} if make_class else {}
        self.agent = SAC("MlpPolicy", pendulum(), seed=0, device="cpu", **settings)
        buffer: Any = self.agent.replay_buffer
        buffer.add = self.summed("write", "add")
        buffer.sample = self.summed("sample", "sample")

    def summed(self, part: str, method: str) -> Callable[..., Any]:
        call = Timer(getattr(self.agent.replay_buffer, method))

        def counted(*values, **options):
            result = call(*values, **options)
            self.spent[part] += call.seconds
            return result

        return counted

    def run(self, steps: int) -> int:
        self.agent.learn(steps, log_interval=10**9, reset_num_timesteps=False)
        return steps

    def fill(self, steps: int) -> None:
        self.run(self.agent.learning_starts + steps)
