"""Rows that know their number, in trajectories of seven, and buffers of twenty of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td import PackedStorage, ReplayBuffer

NAMES = ["uniform", "unique", "proportional", "rank", "strict"]


def data(n: int, first: int = 0) -> TensorDict:
    x = torch.arange(first, first + n)
    after = {"reward": x[:, None].float(), "done": (x % 7 == 6)[:, None], "achieved_goal": x[:, None].float()}
    after |= {"terminated": after["done"].clone(), "truncated": torch.zeros(n, 1, dtype=torch.bool)}
    return TensorDict({"x": x, "desired_goal": -x[:, None].float(), "next": after}, [n])


def buffer(sampler: Any, device: torch.device, rows: int = 20, **kwargs: Any) -> ReplayBuffer:
    given = {"storage": PackedStorage(20, device=device), "sampler": sampler, "batch_size": 500} | kwargs
    rb = ReplayBuffer(**given)
    rb.extend(data(rows).to(device))
    return rb


def counted(captured: Any, rows: int, calls: int) -> np.ndarray:
    counts = torch.zeros(rows, dtype=torch.int64)
    for _ in range(calls):
        counts += captured()["x"].cpu().bincount(minlength=rows)
    return counts.numpy()


def reward_fn(batch: TensorDictBase) -> torch.Tensor:
    return batch["desired_goal"][:, 0] * 10
