"""Rows that know their number, in trajectories of seven."""

from __future__ import annotations

import torch
from tensordict import TensorDict


def data(n: int, first: int = 0) -> TensorDict:
    x = torch.arange(first, first + n)
    after = {"reward": x[:, None].float(), "done": (x % 7 == 6)[:, None], "achieved_goal": x[:, None].float()}
    after |= {"terminated": after["done"].clone(), "truncated": torch.zeros(n, 1, dtype=torch.bool)}
    return TensorDict({"x": x, "desired_goal": -x[:, None].float(), "next": after}, [n])
