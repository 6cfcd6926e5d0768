"""An agent that can go on in mid-episode: ``python -m tests.resuming FOLDER STEPS`` saves it, and kills itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlbuf_td import EpisodeStats, GymnasiumRecorder, NStepSampler, ProportionalSampler, ReplayBuffer

SIZE = 400


def state_of(env: Any) -> dict[str, Any]:
    """Return the state of a CartPole with a time limit."""
    cart = env.unwrapped
    return {
        "state": torch.tensor(cart.state, dtype=torch.float64),
        "beyond": cart.steps_beyond_terminated,
        "random": cart.np_random.bit_generator.state,
        "elapsed": env.get_wrapper_attr("_elapsed_steps"),
    }


def restore(env: Any, state: dict[str, Any]) -> None:
    env.reset()
    cart = env.unwrapped
    cart.state, cart.steps_beyond_terminated = state["state"].numpy().copy(), state["beyond"]
    cart.np_random.bit_generator.state = state["random"]
    while not hasattr(env, "_max_episode_steps"):
        env = env.env
    env._elapsed_steps = state["elapsed"]


def carts(mode: AutoresetMode | None) -> Any:
    """Return two CartPoles with short episodes, or a single one if ``mode`` is None."""
    if mode is None:
        return gymnasium.make("CartPole-v1", max_episode_steps=23)
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1", max_episode_steps=23)] * 2, autoreset_mode=mode)


class Agent:
    """A small DQN with prioritized n-step replay."""

    def __init__(self, mode: AutoresetMode | None, *, flat: bool = False) -> None:
        torch.manual_seed(0)
        self.mode, self.env = mode, carts(mode)
        sampler = NStepSampler(ProportionalSampler(SIZE), 3, 0.99)
        given: Any = {"sampler": sampler, "batch_size": 16, "flat": flat, "stats": EpisodeStats()}
        self.rb = ReplayBuffer.from_env(self.env, SIZE, **given)
        self.recorder = GymnasiumRecorder(self.rb, self.env, stretch=7)
        self.network = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.network.parameters(), 1e-2)

    def begin(self) -> None:
        torch.manual_seed(0)
        self.obs, _ = self.recorder.reset(seed=5)

    def step(self) -> None:
        values = self.network(torch.as_tensor(self.obs))
        explore = torch.rand(values.shape[:-1]) < 0.3
        action = torch.where(explore, torch.randint(2, values.shape[:-1]), values.argmax(-1)).numpy()
        self.obs, _, *flags, _ = self.recorder.step(action if self.mode is not None else int(action))
        if self.mode is None and any(flags):
            self.obs, _ = self.recorder.reset()
        if len(self.rb) >= 32:
            self.learn()

    def learn(self) -> None:
        batch = self.rb.sample()
        value = self.network(batch["observation"]).gather(1, batch["action"].view(-1, 1))
        with torch.no_grad():
            following = self.network(batch["next", "observation"]).max(1, keepdim=True).values
            discount = 0.99 ** batch["steps_to_next_obs"] * ~batch["next", "terminated"]
            target = batch["next", "reward"] + discount * following
        batch["td_error"] = (target - value).detach()[:, 0]
        loss = ((target - value).square()[:, 0] * batch["priority_weight"]).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.rb.update_tensordict_priority(batch)

    def save(self, folder: Path) -> None:
        self.rb.dumps(folder / "buffer")
        single, env = self.mode is None, self.env
        state = {
            "recorder": self.recorder.state_dict(),
            "envs": [state_of(each) for each in ([env] if single else env.envs)],
            "autoreset": None if single else torch.from_numpy(env._autoreset_envs.copy()),
            "obs": torch.from_numpy(np.array(self.obs)),
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, folder / "agent.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "agent.pt")  # weights only: the state is of tensors and plain values
        self.rb.loads(folder / "buffer", default_generator=True)
        envs = [self.env] if self.mode is None else self.env.envs
        if self.mode is not None:
            self.env.reset()
            self.env._autoreset_envs[:] = state["autoreset"].numpy()
        for env, saved in zip(envs, state["envs"], strict=True):
            restore(env, saved)
        self.obs = state["obs"].numpy()
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.recorder.load_state_dict(state["recorder"])


if __name__ == "__main__":
    agent = Agent(AutoresetMode.SAME_STEP)
    agent.begin()
    for _ in range(int(sys.argv[2])):
        agent.step()
    agent.save(Path(sys.argv[1]))
    for _ in range(5):
        agent.step()  # lost
    os.kill(os.getpid(), signal.SIGKILL)
