"""On-policy work, against TorchRL's: advantages alone, and all that a PPO iteration does with data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.objectives.value import GAE
from torchrl.objectives.value.functional import generalized_advantage_estimate, vec_generalized_advantage_estimate

from rlbuf_td import RolloutBuffer, functional

GAMMA, LMBDA, EPOCHS = 0.99, 0.95, 4
OPERATIONS = {
    "gae": "GAE, TorchRL's default (loop)",
    "gae-vectorized": "GAE, TorchRL's vectorized form",
    "ppo": f"PPO data step: extend, GAE, {EPOCHS} epochs",
}
SHAPES = ((8, 2048), (4096, 32), (1, 128))


def rollout_of(lanes: int, steps: int, p: float = 0.005) -> TensorDict:
    """Return a rollout like HalfCheetah's, ``[E, T]``, with all values; half of its ends are truncations."""
    shape = (lanes, steps)
    done = torch.rand(*shape, 1) < p
    terminated = done & (torch.rand(*shape, 1) < 0.5)
    return TensorDict(
        {
            "observation": torch.randn(*shape, 17),
            "action": torch.randn(*shape, 6),
            "action_log_prob": torch.randn(*shape),
            "state_value": torch.randn(*shape, 1),
            "next": {
                "observation": torch.randn(*shape, 17),
                "state_value": torch.randn(*shape, 1),
                "reward": torch.randn(*shape, 1),
                "done": done,
                "terminated": terminated,
                "truncated": done & ~terminated,
            },
        },
        shape,
    )


def gae_calls(lanes: int, steps: int) -> dict[str, Callable[[], object]]:
    """Return one call each: this package, TorchRL's default and its vectorized form, on the same tensors."""
    data = rollout_of(lanes, steps)
    after = data["next"]
    values = (data["state_value"], after["state_value"], after["reward"], after["done"], after["terminated"])
    return {
        "rlbuf_td": lambda: functional.generalized_advantage_estimate(GAMMA, LMBDA, *values),
        "gae": lambda: generalized_advantage_estimate(GAMMA, LMBDA, *values),
        "gae-vectorized": lambda: vec_generalized_advantage_estimate(GAMMA, LMBDA, *values),
    }


def ppo_calls(lanes: int, steps: int, batch: int) -> dict[str, Callable[[], object]]:
    """Return one data step each, with the same values given: nothing is learned, no network is asked."""
    data = rollout_of(lanes, steps)
    ours = RolloutBuffer(steps, lanes, batch_size=batch, epochs=EPOCHS, gamma=GAMMA, lmbda=LMBDA)
    gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=None)
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(lanes * steps), sampler=SamplerWithoutReplacement(), batch_size=batch
    )

    def our_step() -> None:
        ours.extend(data.copy())
        for _ in ours:
            pass

    def their_step() -> None:
        rows = data.copy()
        with torch.no_grad():
            gae(rows)
        theirs.extend(rows.reshape(-1))
        for _ in range(EPOCHS):
            for _ in theirs:
                pass

    return {"rlbuf_td": our_step, "TorchRL": their_step}


def cases(operations: Sequence[str], batch: int) -> Iterator[tuple[str, int, str, dict[str, Callable[[], object]]]]:
    """Yield every case: the operation, its rows, their shape in words, and a call for each side."""
    for lanes, steps in SHAPES:
        if "gae" in operations or "gae-vectorized" in operations:
            calls = gae_calls(lanes, steps)
            for form in ("gae", "gae-vectorized"):
                if form in operations:
                    yield (
                        form,
                        lanes * steps,
                        f"[{lanes}, {steps}]",
                        {"rlbuf_td": calls["rlbuf_td"], "TorchRL": calls[form]},
                    )
    if "ppo" in operations:
        lanes, steps = SHAPES[0]
        yield "ppo", lanes * steps, f"[{lanes}, {steps}]", ppo_calls(lanes, steps, batch)
