"""From the steps of a rollout to its values, advantages and targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from rlbuf_td.functional import generalized_advantage_estimate
from rlbuf_td.storages import SchemaError


class Estimates(NamedTuple):
    """What :meth:`RolloutEstimator.estimate` returns; tensors are ``[T, *lanes, *F]``."""

    value: Tensor
    advantage: Tensor
    value_target: Tensor
    rows_asked: int


@dataclass
class RolloutEstimator:
    """GAE over the entries of a TensorDict, asking the value network for as few rows as there can be.

    The fields are the arguments of :class:`~rlbuf_td.writers.RolloutWriter`, which says what they mean.
    """

    gamma: float
    lmbda: float
    value_network: TensorDictModuleBase | None
    value_key: NestedKey
    reward_key: NestedKey
    done_key: NestedKey
    terminated_key: NestedKey
    truncated_key: NestedKey
    trajectory_key: NestedKey

    def estimate(self, rows: TensorDictBase, ndim: int, *, has_values: bool = True) -> Estimates:
        """Return the estimates for ``rows``, ``[T, *lanes]`` in their first ``ndim`` dims, time first.

        Args:
            rows: the steps of a rollout.
            ndim: number of dims that are time and lanes.
            has_values: ``False`` if what lies at ``value_key`` is not to be used.

        Raises:
            SchemaError: an entry that is needed is missing.
            ValueError: an entry has another shape than it must; or a value is needed and there is no network.
        """
        lead = rows.batch_size[:ndim]
        reward = _entry(rows, self.reward_key)
        value = rows.get(self.value_key, None) if has_values else None
        asked = 0
        if value is None:
            value, asked = self._ask(rows, lead, None), lead.numel()
        value = value.detach()
        if value.shape != reward.shape:
            raise ValueError(
                f"values {self.value_key!r} and rewards {self.reward_key!r} must share one shape, got "
                f"{tuple(value.shape)} and {tuple(reward.shape)}"
            )
        ends, terminated = self._ends(rows, value, ndim)
        next_value, more = self._next_values(rows, value, ends, terminated, ndim)
        advantage, target = self._scan(value, next_value, reward, ends, terminated, ndim)
        return Estimates(value, advantage, target, asked + more)

    def _ends(self, rows: TensorDictBase, value: Tensor, ndim: int) -> tuple[Tensor, Tensor]:
        """Return which steps end a trajectory, and which of them end the episode, both in the shape of the values.

        ``truncated`` is not asked where there is ``done``: TorchRL's PPOTrainer sets it for every step it writes.
        """
        done = self._flags(rows, self.done_key, value, ndim)
        terminated = self._flags(rows, self.terminated_key, value, ndim)
        truncated = self._flags(rows, self.truncated_key, value, ndim)
        if done is None:
            if terminated is None or truncated is None:
                raise SchemaError(f"no {self.done_key!r} in the data; there are {_names(rows)}")
            done = terminated | truncated
        if terminated is None:
            terminated = done if truncated is None else done & ~truncated
        ends = done
        trajectory = rows.get(self.trajectory_key, None)
        if trajectory is not None:
            ends = done.clone()
            trajectory = trajectory.reshape(value.shape[:ndim] + (1,) * (value.ndim - ndim))
            ends[:-1] |= trajectory[1:] != trajectory[:-1]
        return ends, terminated

    def _flags(self, rows: TensorDictBase, key: NestedKey, value: Tensor, ndim: int) -> Tensor | None:
        """Return bool flags in the shape of the values; one flag a step stands for all of a step's values."""
        flags = rows.get(key, None)
        if flags is None or flags.shape == value.shape:
            return flags
        lead = value.shape[:ndim]
        if flags.numel() != lead.numel():
            raise ValueError(
                f"{key!r} of shape {tuple(flags.shape)} fits neither the values' shape {tuple(value.shape)} nor one "
                f"flag a step, {tuple(lead)}"
            )
        return flags.reshape(lead + (1,) * (value.ndim - ndim)).expand(value.shape)

    def _next_values(
        self, rows: TensorDictBase, value: Tensor, ends: Tensor, terminated: Tensor, ndim: int
    ) -> tuple[Tensor, int]:
        """Return each step's next value, and for how many rows the network was asked: those that break off."""
        next_value = torch.empty_like(value)
        next_value[:-1] = value[1:]
        next_value[-1] = 0
        breaks = ends & ~terminated
        breaks[-1] = ~terminated[-1]
        if value.ndim > ndim:
            breaks = breaks.flatten(ndim).any(-1)
        index = breaks.nonzero(as_tuple=True)
        count = index[0].numel()
        if count:
            following = _entry(rows, "next")
            stored = following.get(self.value_key, None)
            if stored is not None:
                next_value[index] = stored[index]
                return next_value, 0
            next_value[index] = self._ask(following, torch.Size([count]), index).to(value.dtype)
        return next_value, count

    @torch.no_grad()
    def _ask(self, data: TensorDictBase, shape: torch.Size, index: tuple[Tensor, ...] | None) -> Tensor:
        """Return the network's values for ``data``, or for its rows at ``index``, ``[*shape, *F]``."""
        network = self.value_network
        if network is None:
            raise ValueError(
                f"{shape.numel()} rows need a value: "
                + (
                    "their trajectories break off"
                    if index is not None
                    else f"there is no {self.value_key!r} in the data"
                )
                + ". Pass value_network=, a TensorDict module that writes it"
            )
        entries = {key: _entry(data, key) for key in network.in_keys}
        if index is not None:
            entries = {key: x[index] for key, x in entries.items()}
        inputs = TensorDict(batch_size=shape)
        for key, x in entries.items():
            inputs.set(key, x)
        parameter = next(network.parameters(), None)
        home = next(iter(entries.values())).device
        out = network(inputs if parameter is None else inputs.to(parameter.device)).get(self.value_key, None)
        if out is None:
            raise SchemaError(f"the value network writes {list(network.out_keys)}, not {self.value_key!r}")
        return out.to(home)

    def _scan(
        self, value: Tensor, next_value: Tensor, reward: Tensor, ends: Tensor, terminated: Tensor, ndim: int
    ) -> tuple[Tensor, Tensor]:
        """GAE along dim 0. What a collector made lane by lane is read lane by lane, which copies nothing."""
        tensors = (value, next_value, reward, ends, terminated)
        if ndim == 2 and not value.is_contiguous() and value.transpose(0, 1).is_contiguous():
            swapped = (x.transpose(0, 1).contiguous() for x in tensors)
            advantage, target = generalized_advantage_estimate(self.gamma, self.lmbda, *swapped, time_dim=1)
            return advantage.transpose(0, 1), target.transpose(0, 1)
        whole = (x.contiguous() for x in tensors)
        return generalized_advantage_estimate(self.gamma, self.lmbda, *whole, time_dim=0)


def _entry(data: TensorDictBase, key: NestedKey) -> Any:
    value = data.get(key, None)
    if value is None:
        raise SchemaError(f"no {key!r} in the data; there are {_names(data)}")
    return value


def _names(data: TensorDictBase) -> list[str]:
    return sorted(map(str, data.keys(include_nested=True, leaves_only=True)))
