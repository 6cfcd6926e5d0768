"""Computes values, advantages and value targets of a rollout."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey, expand_as_right
from torch import Tensor

from rlbuf_td.functional import generalized_advantage_estimate, normalize
from rlbuf_td.storages import SchemaError
from rlbuf_td.storages.episodes import TRAJ_KEY, StoredSegments, may_be_missing
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.observed import alternate, rows_that_show

Estimator: TypeAlias = Callable[[TensorDictBase], tuple[Tensor, Tensor]]
"""Computes ``(advantage, value_target)`` of a rollout, see
:class:`~rlbuf_td.writers.RolloutWriter`."""


Coefficient: TypeAlias = "float | Sequence[float] | Tensor"
"""Gamma or lambda: one number, or one for each component of the rewards."""

_FLAGS = "done", "terminated", "truncated"
_SHORT = 8  # shorter stretches of rows leave little of an advantage
_LANES_REMEDY = (
    "Give each environment a lane of its own, RolloutBuffer(num_steps, num_envs), or write the steps of each "
    "trajectory one after another"
)


class Estimates(NamedTuple):
    """Estimates for a rollout."""

    advantage: Tensor
    value_target: Tensor
    value: Tensor | None  # None: the rows have all values
    rows_asked: int  # on which the value network was called


@dataclass
class RolloutEstimator:
    """Computes the estimates of rollouts, with the arguments of a
    :class:`~rlbuf_td.writers.RolloutWriter`."""

    gamma: float | Tensor  # a tensor has the feature shape of the values
    lmbda: float | Tensor
    function: Estimator | None  # the user's; None: GAE
    value_network: TensorDictModuleBase | None
    value_key: NestedKey
    reward_key: NestedKey
    done_key: NestedKey
    terminated_key: NestedKey
    truncated_key: NestedKey
    trajectory_key: NestedKey
    exclude_dims: tuple[int, ...] = ()  # see :func:`normalize`; negative
    #: Whether a rollout has been searched for trajectories that alternate.
    has_checked_order: bool = field(default=False, init=False)

    def check(self, rows: TensorDictBase, ndim: int) -> None:
        """Raise a SchemaError or ValueError unless ``rows``, ``[n, *lanes]``, have the
        entries that :meth:`estimate` needs, besides values."""
        reward = entry(rows, self.reward_key)
        self._refuse_other_shape(rows.get(self.value_key, reward), reward.shape)
        self._refuse_components(reward.shape[ndim:])
        self._ends(rows, reward, ndim)

    def estimate(self, rows: TensorDictBase, ndim: int) -> Estimates:
        """Return the estimates for ``rows``, ``[T, *lanes]``; the network computes the
        values that are NaN."""
        reward, value = entry(rows, self.reward_key), entry(rows, self.value_key)
        asked = 0
        added = None
        is_missing = value.isnan()
        missing = int(is_missing.sum())
        if missing:
            lead = rows.batch_size[:ndim]
            need = f"{missing} of {value.numel()} values {self.value_key!r} are missing or NaN"
            values = self._network_values(rows, lead, need)
            self._refuse_other_shape(values, reward.shape)
            value = added = torch.where(is_missing, values.to(value.dtype), value)
            asked = lead.numel()
        ends, terminated = self._ends(rows, value, ndim)
        if not self.has_checked_order:
            self.has_checked_order = True
            self._warn_if_interleaved(rows, ends, ndim)
        mask = self.mask_of(rows)
        absent = None
        if mask is not None:
            absent = ~expand_as_right(mask, value)
            ends, terminated = ends | absent, terminated | absent
            ends[:-1] |= absent[1:]
        next_value, next_count = self._next_values(rows, value, ends, terminated, ndim)
        inputs = value, next_value, reward, ends, terminated
        if self.function is None:
            advantage, target = generalized_advantage_estimate(
                self.gamma, self.lmbda, *inputs, time_dim=0
            )
        else:
            advantage, target = self._call_function(rows, inputs, ndim)
        if absent is not None:
            advantage = advantage.masked_fill(absent, 0)
            target = target.masked_fill(absent, 0)
        return Estimates(advantage, target, added, asked + next_count)

    def _refuse_other_shape(self, value: Tensor, shape: torch.Size) -> None:
        if value.shape != shape:
            raise ValueError(
                f"values {self.value_key!r} and rewards {self.reward_key!r} must "
                f"share one shape, got {tuple(value.shape)} and {tuple(shape)}"
            )

    def _refuse_components(self, features: torch.Size) -> None:
        """Raise a ValueError unless gamma and lmbda fit the feature shape of the
        values, and it has the dims that are excluded from normalization."""
        for name, x in (("gamma", self.gamma), ("lmbda", self.lmbda)):
            if isinstance(x, Tensor) and x.shape != features[len(features) - x.ndim :]:
                raise ValueError(
                    f"{name} has the shape {tuple(x.shape)}, one number for each component, but the rewards of a step "
                    f"have the shape {tuple(features)}"
                )
        missing = [dim for dim in self.exclude_dims if -dim > len(features)]
        if missing:
            raise ValueError(
                f"normalize_advantage_exclude_dims={missing}, but a step's rewards have the shape {tuple(features)}"
            )

    def _warn_if_interleaved(
        self, rows: TensorDictBase, ends: Tensor, ndim: int
    ) -> None:
        """Warn if trajectories alternate in the first lane, where advantages then end
        with each stretch of rows, or mix environments; not on other devices."""
        if ends.device.type != "cpu":
            return
        lane: Any = rows[(slice(None), *[0] * (ndim - 1))]
        ended = ends.flatten(ndim).any(-1) if ends.ndim > ndim else ends
        ended = ended.flatten(1)[:, 0] if ndim > 1 else ended
        segments = self._segments(lane, ended)
        first = slice(rows_that_show(lane[:1]))
        if segments is not None and segments.are_interleaved(_SHORT):
            fault = (
                f"trajectories alternate after {segments.mean:.1f} rows of the rollout on average: advantages end with "
                "each stretch of rows. "
            )
        elif alternate(lane[first], ~ended[first]):
            fault = (
                "environments alternate in the rollout, and no trajectory ids tell them apart: the next observation of "
                "most steps is not the observation of the following step, but that of a later one. Advantages mix the "
                "environments. "
            )
        else:
            return
        warnings.warn(fault + _LANES_REMEDY, RuntimeWarning, stacklevel=3)

    def _segments(self, lane: TensorDictBase, ended: Tensor) -> StoredSegments | None:
        """Count the segments of trajectories in the rows of a lane, ``[T]``; None if
        they have no ids. ``ended``: by flag or by id."""
        ids = lane.get(self.trajectory_key, None)
        if ids is None:
            return None
        ids = ids.reshape(-1)
        number = 1 + int(ended[:-1].sum())
        changes = int((ids[1:] != ids[:-1]).sum())
        # an id that goes on after a change is not at its end, whatever the flags
        return StoredSegments(
            len(ids), number, changes, ids.unique().numel(), has_flags=False
        )

    @property
    def group(self) -> tuple[str, ...]:
        """The group of agents of the rewards: ``("knight",)`` for
        ``("next", "knight", "reward")``, else empty."""
        return as_tuple(self.reward_key)[1:-1]

    def mask_of(self, rows: TensorDictBase) -> Tensor | None:
        """Return which agents of the group act, bool, ``[*batch, agents]``; None if no
        mask is stored."""
        mask = rows.get((*self.group, "mask"), None) if self.group else None
        return mask if mask is not None and mask.dtype is torch.bool else None

    def normalized(
        self, advantage: Tensor, acts: Tensor | None, is_row: Tensor | None = None
    ) -> Tensor:
        """Return normalized advantages, 0 for agents that do not act; ``is_row``,
        ``[*batch]``: False for padding."""
        if acts is None:
            return normalize(advantage, mask=is_row, exclude_dims=self.exclude_dims)
        counts = acts if is_row is None else acts & is_row[..., None]
        scaled = normalize(advantage, mask=counts, exclude_dims=self.exclude_dims)
        return scaled.masked_fill(~expand_as_right(acts, advantage), 0)

    def dtype(self, like: Tensor, *, has_values: bool) -> torch.dtype:
        """Return the dtype of estimates: the network's if the network computes values,
        else the dtype of ``like``."""
        if not has_values and self.value_network is not None:
            like = next(self.value_network.parameters(), like)
        return like.dtype if like.is_floating_point() else torch.get_default_dtype()

    def _ends(
        self, rows: TensorDictBase, value: Tensor, ndim: int
    ) -> tuple[Tensor, Tensor]:
        """Return tensors shaped like ``value``: whether each step ends a trajectory,
        and whether it is terminated."""
        done, terminated = self._flags(rows, value, ndim)
        trajectory = _optional(rows, self.trajectory_key, TRAJ_KEY)
        if trajectory is None:
            return done, terminated
        ends, lead = done.clone(), value.shape[:ndim]
        if trajectory.numel() != lead.numel():
            raise ValueError(
                f"trajectory ids {self.trajectory_key!r} of shape "
                f"{tuple(trajectory.shape)} are not one per step, {tuple(lead)}: for "
                "batches [E, T] of a collector, make the storage with "
                f"ndim={ndim + 1}"
            )
        trajectory = trajectory.reshape(lead + (1,) * (value.ndim - ndim))
        ends[:-1] |= trajectory[1:] != trajectory[:-1]
        return ends, terminated

    def _flags(
        self, rows: TensorDictBase, value: Tensor, ndim: int
    ) -> tuple[Tensor, Tensor]:
        """Return whether each step is done and terminated, by the flags of the group's
        agents and those of the step."""
        keys = self.done_key, self.terminated_key, self.truncated_key
        flags = self._pair(keys, rows, value, ndim)
        agent_flags = None
        if self.group:
            beside = as_tuple(self.reward_key)[:-1]
            agent_keys = tuple((*beside, name) for name in _FLAGS)
            agent_flags = self._pair(agent_keys, rows, value, ndim)
        if flags is None and agent_flags is None:
            entry(rows, self.done_key)  # raises the error
        if flags is None or agent_flags is None:
            return agent_flags or flags  # pyrefly: ignore [bad-return]
        # an agent that is not done does not terminate with the others
        return flags[0] | agent_flags[0], agent_flags[1]

    def _pair(
        self,
        keys: tuple[NestedKey, ...],
        rows: TensorDictBase,
        value: Tensor,
        ndim: int,
    ) -> tuple[Tensor, Tensor] | None:
        """Return whether each step is done and terminated, by the flags at ``keys``;
        None if the flags are missing."""
        # ``done`` has precedence over ``truncated``, because TorchRL's PPOTrainer sets
        # ``truncated`` on every step.
        done, terminated, truncated = (
            self._flag(_optional(rows, key, ("next", name)), key, value, ndim)
            for key, name in zip(keys, _FLAGS, strict=True)
        )
        if done is None:
            if terminated is None or truncated is None:
                return None
            done = terminated | truncated
        if terminated is None:
            terminated = done if truncated is None else done & ~truncated
        return done, terminated

    def _flag(
        self, flags: Tensor | None, key: NestedKey, value: Tensor, ndim: int
    ) -> Tensor | None:
        """Return the bool ``flags`` of ``key`` in the shape of the values; ``None`` if
        the flags are missing."""
        if flags is None or flags.shape == value.shape:
            return flags
        lead = value.shape[:ndim]
        if flags.shape == (*value.shape[:-1], 1):
            return flags.expand(value.shape)
        if flags.numel() != lead.numel():
            raise ValueError(
                f"{key!r} of shape {tuple(flags.shape)} fits neither the values' "
                f"shape {tuple(value.shape)} nor one flag per step, {tuple(lead)}"
            )
        return flags.reshape(lead + (1,) * (value.ndim - ndim)).expand(value.shape)

    def _next_values(
        self,
        rows: TensorDictBase,
        value: Tensor,
        ends: Tensor,
        terminated: Tensor,
        ndim: int,
    ) -> tuple[Tensor, int]:
        """Return the value of each next state, and the number of rows on which the
        network was called."""
        next_value = torch.cat((value[1:], torch.zeros_like(value[:1])))
        breaks = ends & ~terminated
        breaks[-1] = ~terminated[-1]
        if value.ndim > ndim:
            breaks = breaks.flatten(ndim).any(-1)
        index = breaks.nonzero(as_tuple=True)
        count = index[0].numel()
        if not count:
            return next_value, 0
        following = entry(rows, "next")
        stored = following.get(self.value_key, None)
        if stored is None:
            need = f"{count} rows need the value of their next state: their trajectories break off"
            values = self._network_values(following, torch.Size([count]), need, index)
        else:
            values, count = stored[index], 0
        next_value[index] = values.to(value.dtype)
        return next_value, count

    @torch.no_grad()
    def _network_values(
        self,
        data: TensorDictBase,
        shape: torch.Size,
        need: str,
        index: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Call the network on ``data``, or on the rows ``data[index]``; return values
        ``[*shape, *F]``. ``need``: why, for the error if there is no network."""
        network = self.value_network
        if network is None:
            raise ValueError(
                f"{need}. Pass value_network=, a TensorDict module that writes it"
            )
        entries = {key: entry(data, key) for key in network.in_keys}
        inputs = TensorDict({key: x[index] for key, x in entries.items()}, shape)
        parameter = next(network.parameters(), None)
        out = network(inputs if parameter is None else inputs.to(parameter.device)).get(
            self.value_key, None
        )
        if out is None:
            raise SchemaError(
                f"the value network writes {list(network.out_keys)}, not {self.value_key!r}"
            )
        return out.to(next(iter(entries.values())).device)

    @torch.no_grad()
    def _call_function(
        self, rows: TensorDictBase, inputs: tuple[Tensor, ...], ndim: int
    ) -> tuple[Tensor, Tensor]:
        """Return what the user's estimator computes, which gets and returns
        ``[*lanes, T, *F]``; time is dim 0 here."""
        value, next_value, reward, done, terminated = inputs
        value_key = as_tuple(self.value_key)
        entries: dict[NestedKey, Tensor] = {
            value_key: value,
            ("next", *value_key): next_value,
            self.reward_key: reward,
            self.done_key: done,
            self.terminated_key: terminated,
        }
        if self.group:
            entries |= {
                ("next", *self.group, "done"): done,
                ("next", *self.group, "terminated"): terminated,
            }
        data = rows.copy()
        for key, column in entries.items():
            data.set(key, column)
        data = data.permute(*range(1, ndim), 0, *range(ndim, data.ndim))
        estimates = self.function(data)  # pyrefly: ignore [not-callable]
        _refuse_estimates(estimates, value.movedim(0, ndim - 1))
        advantage, target = estimates
        return advantage.detach().movedim(ndim - 1, 0), target.detach().movedim(
            ndim - 1, 0
        )


def _refuse_estimates(estimates: object, value: Tensor) -> None:
    """Raise an error unless ``estimates`` is a tuple of two finite tensors like
    ``value``."""
    if not (
        isinstance(estimates, tuple)
        and len(estimates) == 2
        and all(isinstance(x, Tensor) for x in estimates)
    ):
        got = type(estimates).__name__
        raise TypeError(
            f"estimator must return a tuple (advantage, value_target), got {got}: "
            'from TorchRL\'s estimators, return data["advantage"], '
            'data["value_target"]'
        )
    for name, x in zip(("advantage", "value_target"), estimates, strict=True):
        shown, expected = (
            f"{y.dtype} of shape {[*y.shape]} on {y.device}" for y in (x, value)
        )
        if shown != expected:
            raise ValueError(
                f"estimator returned {name} as {shown}, expected {expected}, like the values"
            )
        wrong = ~x.isfinite()
        if wrong.any():
            first = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"estimator returned NaN or infinity: {int(wrong.sum())} of {x.numel()} "
                f"of {name}, first at {first}"
            )


def entry(data: TensorDictBase, key: NestedKey) -> Any:
    value = data.get(key, None)
    if value is None:
        raise SchemaError(f"no {key!r} in the data; there are {_names(data)}")
    return value


def _optional(data: TensorDictBase, key: NestedKey, default: NestedKey) -> Any:
    """Return an entry, or None if it is missing; SchemaError if only a user can have
    named its key."""
    if may_be_missing(as_tuple(key), as_tuple(default)):
        return data.get(key, None)
    return entry(data, key)


def _names(data: TensorDictBase) -> list[str]:
    return sorted(map(str, data.keys(include_nested=True, leaves_only=True)))
