"""Hindsight experience replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from math import log
from typing import Literal, TypeAlias

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Sampler

from rlbuf_td.kernels.dispatch import loop, machine_code
from rlbuf_td.kernels.host_memory import HostTensors, outside_inference_mode
from rlbuf_td.kernels.serials import Serials
from rlbuf_td.kernels.wrappers import (
    STRATEGIES,
    choose_goals,
    put_values_,
)
from rlbuf_td.kernels.wrappers.records import GoalDistribution, Goals
from rlbuf_td.samplers.common import fill_uniform_, setting, uniform_numbers
from rlbuf_td.samplers.goal_env import TransitionFn
from rlbuf_td.samplers.reading import BatchSlot, BatchSlots, Reading, Uncompiled
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import as_number, fraction
from rlbuf_td.storages.episodes import DONE_KEY, TRAJ_KEY
from rlbuf_td.storages.indexing import device_of, nth_rows, row_count
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.schema import Leaf, refuse_rounding, show_key
from rlbuf_td.storages.tensordict_fast import leaf_of, set_entries_

Strategy: TypeAlias = Literal["future", "final", "episode", "random"]
_LEAST_GAMMA = 1e-300  # practically 0, but with a finite logarithm


class HindsightSampler(SamplerWrapper):
    """Hindsight relabelling: replaces the goals of some drawn rows by goals that the
    agent achieved.

    The new goal is the ``("next", achieved_goal_key)`` of a row that ``strategy``
    selects. The reward is recomputed for the new goal, as are ``terminated`` and
    ``done`` if ``terminated_fn`` is given. The entry ``"relabeled"``, ``[B]`` bool,
    marks the relabelled rows. ``her_ratio``, ``only_finished`` and ``future_gamma`` may
    be set at any time.

    Args:
        sampler: draws the rows, and handles priorities, writes and state.
        reward_fn: takes the batch ``[B]`` with the new goals, and returns the rewards,
            ``[B]`` or ``[B, 1]``. The function must not change the batch. For a
            Gymnasium goal environment, use :func:`gymnasium_reward_fn`.
        her_ratio: the probability that a row is relabelled, 0 to 1. The k new goals per
            transition in the paper correspond to ``her_ratio = k / (k + 1)``; the
            default 0.8 corresponds to k = 4.
        strategy: which rows may provide the new goal, by default with equal
            probabilities. ``"future"``: the row itself and all later rows of its
            trajectory; ``"final"``: the last stored row of its trajectory;
            ``"episode"``: all rows of its trajectory; ``"random"``: all rows of the
            buffer. A dict such as ``{"future": 0.75, "random": 0.25}`` mixes
            strategies.
        future_gamma: a discount from 0 to 1. ``"future"`` selects the row k steps ahead
            with a probability proportional to ``future_gamma**k``. In contrastive RL,
            ``future_gamma`` is the discount factor of the return.
        goal_key: the key of the desired goal, of any shape. If ``"next"`` also has this
            key, both goals are replaced.
        achieved_goal_key: the key of the achieved goal in ``"next"``, of the desired
            goal's dtype and shape.
        reward_key: the key of the reward. New rewards are converted to the stored dtype
            and shape.
        terminated_fn: takes the same batch as ``reward_fn``, and returns whether each
            transition reaches a terminal state under the new goal, bool. The result
            replaces ``terminated``, and ``done`` becomes ``terminated | truncated``. By
            default, the stored flags are kept.
        only_finished: relabel only rows of trajectories that have ended. ``"random"``
            ignores this setting.
        done_key, traj_key: the keys of the done flag and the trajectory id, as for
            :class:`TrajectoryIndex`.

    Raises:
        ValueError: an argument is out of range. When sampling: the desired and achieved
            goals differ in dtype or shape, or a new reward has a wrong shape or is NaN,
            or is a whole number that the stored dtype cannot hold.
        KeyError: (at the first draw) a key is not stored.
        TypeError: the wrapped sampler is an n-step, sequence or hindsight sampler.

    Warns:
        RuntimeWarning: (at the first draw, on the CPU) rows of several trajectories
            alternate.

    Cost: O(B), in addition to the wrapped draw.
    Source: Andrychowicz et al., Hindsight Experience Replay, NeurIPS 2017, sections 3
    and 4.5; for ``future_gamma``: Eysenbach et al., Contrastive Learning as
    Goal-Conditioned RL, NeurIPS 2022.
    In contrast, TorchRL's ``HERReplayBuffer`` reads ``"achieved_goal"`` instead of
    ``("next", "achieved_goal")``, and relabels the first rows of each batch. It
    supports neither ``ndim > 1`` nor trajectories that continue from the last row of a
    full storage to the first.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer, UniformSampler
        >>> from tensordict import TensorDict
        >>> def reward_fn(batch):
        ...     return (batch["next", "achieved_goal"] == batch["desired_goal"]).float()
        >>> sampler = HindsightSampler(UniformSampler(), reward_fn, her_ratio=1.0, strategy="final")
        >>> rb = ReplayBuffer(storage=PackedStorage(10), sampler=sampler, batch_size=4)
        >>> position, goal = torch.arange(4.0).unsqueeze(-1), torch.full((3, 1), 9.0)
        >>> done = torch.tensor([[False], [False], [True]])
        >>> outcome = {"achieved_goal": position[1:], "reward": torch.zeros(3, 1), "done": done}
        >>> _ = rb.extend(TensorDict({"desired_goal": goal, "next": outcome}, [3]))
        >>> batch = rb.sample()
        >>> batch["desired_goal"].squeeze(-1)
        tensor([3., 3., 3., 3.])
        >>> bool((batch["next", "reward"] == (batch["next", "achieved_goal"] == 3)).all())
        True
    """

    _level = 1
    takes_goals = True
    # with fewer rows ahead, most new goals would be the row's own outcome
    steps_needed = 8
    report_keys = frozenset({"relabeled"})
    state_keys = ("her_ratio", "only_finished", "future_gamma")
    _shown = ("her_ratio", "strategy", "future_gamma")
    only_finished: bool = setting(lambda name, value: bool(value))
    future_gamma: float = setting(fraction)
    her_ratio: float = setting(fraction)

    def __init__(
        self,
        sampler: Sampler,
        reward_fn: TransitionFn,
        *,
        her_ratio: float = 0.8,
        strategy: Strategy | Mapping[Strategy, float] = "future",
        goal_key: NestedKey = "desired_goal",
        achieved_goal_key: NestedKey = "achieved_goal",
        reward_key: NestedKey = ("next", "reward"),
        terminated_fn: TransitionFn | None = None,
        only_finished: bool = False,
        future_gamma: float = 1.0,
        done_key: NestedKey = DONE_KEY,
        traj_key: NestedKey | None = TRAJ_KEY,
    ) -> None:
        super().__init__(sampler, done_key, traj_key)
        if not callable(reward_fn):
            raise TypeError(
                f"reward_fn must be a function of the batch, got a {type(reward_fn).__name__}: "
                "for an environment with compute_reward, pass gymnasium_reward_fn(env)"
            )
        self.reward_fn, self.terminated_fn = reward_fn, terminated_fn
        self.strategy = strategy
        self._shares = _cumulative(strategy)
        self.only_finished = only_finished
        self.future_gamma = future_gamma
        self.her_ratio = her_ratio
        self.goal_key = as_tuple(goal_key)
        self.achieved_goal_key = as_tuple(achieved_goal_key)
        self.reward_key = as_tuple(reward_key)

    def settings_changed(self) -> None:
        """See :class:`~rlbuf_td.samplers.common.StatefulSampler`."""
        if "her_ratio" in self.__dict__:  # the last setting of the constructor
            thresholds = tuple(self.her_ratio * share for share in self._shares)
            log_gamma = log(max(self.future_gamma, _LEAST_GAMMA))
            self.distribution = GoalDistribution(
                thresholds, self.only_finished, log_gamma
            )

    def read(
        self,
        storage: PackedStorage,
        drawn: Tensor,
        flat: Tensor,
        owner: Tensor | None = None,
    ) -> TensorDictBase:
        """Read the rows ``flat``, and relabel some of them; see
        :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        serials = storage.ring.for_kernels()
        if serials is not None and self._is_relabelled_by_kernel(storage):
            return self._launch(storage, drawn, flat, owner, serials)
        distribution = self.distribution
        uniform = uniform_numbers(drawn.shape[0], self._rng, device_of(storage))
        batch, goal_keys = storage.gather(flat), self._goal_keys(storage)
        steps, mask = choose_goals(
            self.episodes_of(storage).spans(drawn), uniform, distribution
        )
        rows = storage.ring.cells_after(drawn, steps)
        begin, end = distribution.thresholds[-2:]
        if begin < end:
            is_random = (uniform >= begin) & (uniform < end)
            live = row_count(storage)
            number = (
                ((uniform - begin) / (end - begin) * live).clamp(max=live - 1).long()
            )
            rows = torch.where(
                is_random, nth_rows(storage, torch.where(is_random, number, 0)), rows
            )
        if owner is not None:
            rows = rows[owner]
            mask = mask[owner]
        achieved = storage.all_rows().column_at(("next", *self.achieved_goal_key), rows)
        where = mask.view(-1, *[1] * (achieved.ndim - 1))
        for key in goal_keys:
            goal = leaf_of(batch, key)
            goal.copy_(torch.where(where, achieved, goal))
        self.recompute_(batch, mask, leaf_of(batch, self.reward_key))
        set_entries_(batch, {"relabeled": mask})
        return batch

    def launches(self, storage: PackedStorage) -> bool:
        """Whether kernels draw rows and copy goals on a GPU."""
        draws = getattr(self.sampler, "launches", None)
        is_drawn = draws is not None and draws(storage)
        return is_drawn and self._is_relabelled_by_kernel(storage)

    def _is_relabelled_by_kernel(self, storage: PackedStorage) -> bool:
        """Whether a kernel on a GPU chooses and copies goals: live rows lie in the
        cells from 0 on, or in all cells."""
        return storage.all_rows().is_launched and storage.ring.numbered().are_cells

    def _launch(
        self,
        storage: PackedStorage,
        drawn: Tensor,
        flat: Tensor,
        owner: Tensor | None,
        serials: Serials,
    ) -> TensorDictBase:
        """Return the rows ``flat``, some of which a kernel on a GPU relabels."""
        from rlbuf_td.kernels.wrappers import triton

        rows = storage.all_rows()
        goal_keys = self._goal_keys(storage)
        numbers = self.episodes_of(storage).numbers
        batch = storage.gather(flat)
        outcome_key = ("next", *self.achieved_goal_key)
        offset = rows.layout.offsets[outcome_key]
        leaves = [leaf_of(batch, key) for key in goal_keys]
        goals = Goals(rows.flat, offset, leaves, row_count(storage))
        how = self.distribution, self._rng
        mask = triton.relabel_(goals, drawn, owner, numbers, serials, *how)
        self.recompute_(batch, mask, leaf_of(batch, self.reward_key))
        set_entries_(batch, {"relabeled": mask})
        return batch

    def recompute_(
        self,
        batch: TensorDictBase,
        mask: Tensor,
        reward: Tensor,
        put: Callable[[Tensor, Tensor, Tensor], int] = put_values_,
    ) -> None:
        """Recompute the rewards and flags of the relabelled rows.

        Args:
            batch: the batch, which has the new goals.
            mask: ``[B]`` bool, selects the rows.
            reward: the rewards of the batch.
            put: a form of ``kernels.wrappers.put_values_``.
        """
        new = self.reward_fn(batch)
        if not (
            type(new) is Tensor
            and new.shape == reward.shape
            and new.dtype is reward.dtype
            and new.is_cpu
        ):
            new = _fitted(new, reward, "reward_fn", "reward")
        bad = put(reward, new, mask)
        if bad >= 0:
            raise ValueError(
                f"reward_fn returned NaN for relabelled rows, the first of them row {bad}"
            )
        if self.terminated_fn is not None:
            self._end_(batch, mask)

    def _goal_keys(self, storage: PackedStorage) -> list[tuple[str, ...]]:
        """Return the keys of the desired goals in a row; raise an error if a key is
        missing, or goals do not fit."""
        outcome_key = ("next", *self.achieved_goal_key)
        next_key = ("next", *self.goal_key)
        outcome = _needed(
            storage, outcome_key, "name the key of outcomes with achieved_goal_key"
        )
        _needed(storage, self.reward_key, "name the key of rewards with reward_key")
        if self.terminated_fn is not None:
            _needed(
                storage, (*self.reward_key[:-1], "terminated"), "terminated_fn sets it"
            )
        goals = [
            _needed(
                storage, self.goal_key, "name the key of desired goals with goal_key"
            )
        ]
        next_goal = storage.all_rows().layout.leaf(next_key)
        if next_goal is not None:
            goals.append(next_goal)
        for goal in goals:
            if not goal.is_like(outcome):
                one, other = (
                    f"{leaf.dtype} of shape {tuple(leaf.shape)}"
                    for leaf in (goal, outcome)
                )
                kinds = f"{show_key(goal.key)} is {one}, but {show_key(outcome_key)} {other}"
                raise ValueError(
                    f"{kinds}: goals and outcomes must have equal dtypes and shapes"
                )
        return [goal.key for goal in goals]

    def reading(self, storage: PackedStorage, size: int, is_stamped: bool) -> Reading:
        """See ``reading_of`` in ``wrapper.py``."""
        self._goal_keys(storage)
        self.need_loops(storage)
        if (
            "next",
            *self.achieved_goal_key,
        ) in storage.deduplicated or storage.all_rows().is_mapped:
            raise Uncompiled(
                "goals of deduplicated rows, and of rows in a file, are read with torch"
            )
        return _RelabelledReading(self, storage, size, is_stamped)

    def _end_(self, batch: TensorDictBase, mask: Tensor) -> None:
        """Set the end flags of the relabeled rows in ``mask`` with
        :attr:`terminated_fn`."""
        beside = self.reward_key[:-1]
        terminated, truncated, done = (
            leaf_of(batch, (*beside, key))
            for key in ("terminated", "truncated", "done")
        )
        new = _fitted(self.terminated_fn(batch), terminated, "terminated_fn", "flag")  # pyrefly: ignore [not-callable]
        where = mask.view(-1, *[1] * (terminated.ndim - 1))
        if done is not None:
            other = truncated if truncated is not None else done & ~terminated
            done.copy_(torch.where(where, new | other, done))
        terminated.copy_(torch.where(where, new, terminated))

    def _revised_keys(self) -> Iterator[NestedKey]:
        """Yield the keys of the entries that relabeling changes or adds."""
        yield from (
            self.goal_key,
            ("next", *self.goal_key),
            self.reward_key,
            "relabeled",
        )
        if self.terminated_fn is not None:
            yield from (
                (*self.reward_key[:-1], flag) for flag in ("terminated", "done")
            )


class _RelabelledReading(Reading):
    """Gathers rows, and relabels some of them."""

    entries = (("relabeled", (torch.bool, torch.Size([]))),)

    def __init__(
        self,
        wrapper: HindsightSampler,
        storage: PackedStorage,
        size: int,
        is_stamped: bool,
    ) -> None:
        from rlbuf_td.kernels.wrappers import cpu as kernels

        super().__init__(storage, size, is_stamped)
        achieved = ("next", *wrapper.achieved_goal_key)
        places = self.rows.layout.places
        self.goals = np.array(
            [places[key] for key in (achieved, *wrapper._goal_keys(storage))], np.int64
        )
        self.wrapper = wrapper
        self.reward = places[wrapper.reward_key]
        reward = self.rows.layout.leaves[self.reward]
        self.item_bytes = reward.dtype.itemsize
        #: Recognizes rewards, new rewards and the mask, if a loop copies the rewards.
        self.expected: HostTensors | None = None
        is_number = reward.shape.numel() == 1
        if is_number and reward.dtype in (torch.float32, torch.float64):
            rewards = reward.dtype, torch.Size([size, *reward.shape])
            mask = torch.bool, torch.Size([size])
            self.expected = HostTensors([rewards, rewards, mask])
        # a random number of each drawn row
        self.uniform = torch.zeros(size, dtype=torch.float64, device="cpu")
        self.put_values = loop("wrappers.cpu", "put_values")
        self.relabel = machine_code(
            kernels.relabel, distribution=wrapper.distribution, goals=self.goals
        )

    def __call__(
        self, slots: BatchSlots, slot: BatchSlot, flat: Tensor, drawn: Tensor, live: int
    ) -> bool:
        """See :class:`~rlbuf_td.samplers.reading.Reading`."""
        if not super().__call__(slots, slot, flat, drawn, live):
            return False
        wrapper = self.wrapper
        count = drawn.numel()
        mask = slot.report["relabeled"]
        if self.uniform.numel() != count:
            with outside_inference_mode():
                self.uniform = torch.zeros(count, dtype=torch.float64, device="cpu")
        uniform = self.uniform
        fill_uniform_(uniform, wrapper._rng)
        live_rows = self.storage.ring.numbered()
        self.relabel(
            self.storage.episodes_now().address,
            self.address,
            slot.targets,
            mask.data_ptr(),
            drawn.data_ptr(),
            uniform.data_ptr(),
            count,
            wrapper.distribution,
            live_rows.rows,
            live_rows.are_cells,
            self.goals,
        )
        wrapper.recompute_(slot.batch, mask, slot.leaves[self.reward], self._put)
        return True

    def _put(self, reward: Tensor, new: Tensor, mask: Tensor) -> int:
        """Do what :func:`~rlbuf_td.kernels.wrappers.put_values_` does, after a quicker
        check of the memory."""
        addresses = None
        if self.expected is not None:
            addresses = self.expected.addresses((reward, new, mask))
        if addresses is None:
            return put_values_(reward, new, mask)
        return self.put_values(*addresses, self.size, self.item_bytes)


def _needed(storage: PackedStorage, key: tuple[str, ...], remedy: str) -> Leaf:
    leaf = storage.all_rows().layout.leaf(key)
    if leaf is None:
        raise KeyError(
            f"hindsight needs {show_key(key)}, which is not stored: {remedy}"
        )
    return leaf


def _cumulative(strategy: Strategy | Mapping[Strategy, float]) -> list[float]:
    """Check ``strategy``; return its cumulative probabilities in the order of
    ``STRATEGIES``."""
    names = [*strategy] if isinstance(strategy, Mapping) else [strategy]
    unknown = [name for name in names if name not in (*STRATEGIES,)]
    if unknown:
        raise ValueError(
            f"strategy must be one of {', '.join(STRATEGIES)}, got {unknown[0]!r}"
        )
    shares = strategy if isinstance(strategy, Mapping) else {strategy: 1.0}
    mixture = {name: as_number(share) for name, share in shares.items()}
    total = sum(mixture.values())
    if any(not share >= 0 for share in mixture.values()) or abs(total - 1.0) > 1e-9:
        raise ValueError(
            f"the shares of a mixture of strategies must be at least 0 and add up to 1, got {shares}"
        )
    return [
        *accumulate(mixture.get(name, 0.0) / total for name in STRATEGIES[:-1]),
        1.0,
    ]


def _fitted(values: object, like: Tensor, source: str, name: str) -> Tensor:
    """Convert the output of a user's function, one value per row, to the shape and
    dtype of the tensor ``like``."""
    if not isinstance(values, Tensor):
        values = torch.as_tensor(values, device=like.device)
    if values.shape != like.shape:
        if (
            values.shape not in (like.shape[:1], (*like.shape[:1], 1))
            or like.shape[1:].numel() != 1
        ):
            shapes = f"shape {tuple(like.shape)} or [{len(like)}], got shape {tuple(values.shape)}"
            raise ValueError(f"{source} must return one {name} per row, of {shapes}")
        values = values.view(like.shape)
    refuse_rounding((name,), values, like.dtype, f"store {name}s in float64")
    return values.to(like.device, like.dtype)
