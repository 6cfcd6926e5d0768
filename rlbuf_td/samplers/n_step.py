"""n-step transitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Sampler

from rlbuf_td.kernels.batch.ring import NEXT, REWARD, ROOT, STEPS
from rlbuf_td.kernels.dispatch import loop, record_of
from rlbuf_td.kernels.serials import Serials
from rlbuf_td.kernels.wrappers import n_step_sums
from rlbuf_td.kernels.wrappers.records import Rewards, Sums
from rlbuf_td.samplers.common import setting
from rlbuf_td.samplers.reading import BatchSlot, BatchSlots, Reading, Uncompiled
from rlbuf_td.samplers.wrapper import (
    SamplerWrapper,
    summable,
)
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import fraction, whole
from rlbuf_td.storages.episodes import DONE_KEY, TRAJ_KEY
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.schema import Leaf
from rlbuf_td.storages.tensordict_fast import leaf_of, set_entries_

_N, _GAMMA, _TAKEN = range(3)  # fields of a ``STEPS`` record


def joins_steps(wrapper: SamplerWrapper | None) -> bool:
    """Whether a wrapper or one of its wrapped samplers is an NStepSampler with more
    than one step."""
    while wrapper is not None and not (
        isinstance(wrapper, NStepSampler) and wrapper.n_steps > 1
    ):
        wrapper = (
            wrapper.sampler if isinstance(wrapper.sampler, SamplerWrapper) else None
        )
    return wrapper is not None


class NStepSampler(SamplerWrapper):
    r"""Converts drawn transitions to n-step transitions.

    .. math:: r = \sum_{k=0}^{m-1} \gamma^k r_{t+k}, \quad m = \min(n, \text{steps to the end of the trajectory})

    The sum :math:`r` replaces the reward. All other entries of ``"next"`` are those of
    the last row in the sum. The new entry ``"steps_to_next_obs"`` is :math:`m`, which
    TorchRL's losses use for discounting; for rewards of agents, there is one :math:`m`
    per agent. A sum stops at the end of the trajectory or at the newest row, where the
    loss bootstraps unless the state is terminal. With a prioritized sampler, the TD
    error of an n-step transition updates the priority of the drawn row.

    Args:
        sampler: draws the rows, for example a :class:`UniformSampler` or a
            :class:`HindsightSampler`. With hindsight, all rewards of a sum are for the
            same goal, and the sum also stops where ``terminated_fn`` returns True.
        n_steps: n, the largest number of rewards in a sum, at least 1; may be set at
            any time.
        gamma: the discount factor, 0 to 1; may be set at any time.
        reward_key: the key of the reward, which must be in ``"next"`` and have a
            floating dtype.
        done_key, traj_key: the keys of the done flag and the trajectory id, as for
            :class:`TrajectoryIndex`.
        per_agent: whether the sum of each agent's rewards also ends at the agent's own
            flag, which is ``("next", group, "done")`` for the rewards ``("next", group,
            "reward")``, ``[agents, ...]``. The entries of ``("next", group)`` are then
            those of the last row in the sum of each agent. If False, or if such flags
            are not stored, all agents' sums end with the trajectory.

    Raises:
        ValueError: an argument is out of range, or ``reward_key`` is not in ``"next"``.
        KeyError: (at the first draw) the reward is not stored, or neither done flags
            nor trajectory ids are stored.
        TypeError: the wrapped sampler draws sequences or n-step transitions; (at the
            first draw) the reward's dtype is not floating.

    Warns:
        RuntimeWarning: (at the first draw, on the CPU) rows of several trajectories
            alternate, with ids or without.

    Cost: O(B * n). Sums over hindsight, and sums that end at the flags of each agent,
    are made with torch.
    Source: Sutton and Barto, Reinforcement Learning, 2nd edition, chapter 7. In
    contrast to TorchRL's ``MultiStep``, the buffer stores one-step transitions, so that
    n may change during training.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer, UniformSampler
        >>> from tensordict import TensorDict
        >>> sampler = NStepSampler(UniformSampler(unique=True), n_steps=3, gamma=0.5)
        >>> rb = ReplayBuffer(storage=PackedStorage(10), sampler=sampler, batch_size=4)
        >>> done = torch.tensor([False, False, False, True])
        >>> outcome = {"observation": torch.arange(1, 5), "reward": torch.ones(4), "done": done}
        >>> _ = rb.extend(TensorDict({"observation": torch.arange(4), "next": outcome}, [4]))
        >>> batch = rb.sample()
        >>> batch = batch[batch["observation"].argsort()]
        >>> batch["next", "reward"]
        tensor([1.7500, 1.7500, 1.5000, 1.0000])
        >>> batch["next", "observation"], batch["steps_to_next_obs"]
        (tensor([3, 4, 4, 4]), tensor([3, 3, 2, 1]))
    """

    _level = 2
    report_keys = frozenset({"steps_to_next_obs"})
    state_keys = ("n_steps", "gamma")
    _shown = ("n_steps", "gamma")
    n_steps: int = setting(whole(1))
    gamma: float = setting(fraction)

    def __init__(
        self,
        sampler: Sampler,
        n_steps: int,
        gamma: float,
        *,
        reward_key: NestedKey = ("next", "reward"),
        done_key: NestedKey = DONE_KEY,
        traj_key: NestedKey | None = TRAJ_KEY,
        per_agent: bool = True,
    ) -> None:
        super().__init__(sampler, done_key, traj_key)
        self.n_steps, self.gamma = n_steps, gamma
        self.per_agent = bool(per_agent)
        self.reward_key = as_tuple(reward_key)
        if self.reward_key[0] != "next" or len(self.reward_key) < 2:
            raise ValueError(
                f"the reward of a transition must be in 'next', got reward_key={reward_key!r}"
            )

    @property
    def steps_needed(self) -> int:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        return max(self.n_steps, super().steps_needed)

    def read(
        self,
        storage: PackedStorage,
        drawn: Tensor,
        flat: Tensor,
        owner: Tensor | None = None,
    ) -> TensorDictBase:
        """Read the rows ``flat``, and sum the rewards of the next steps; see
        :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        n = self.n_steps
        rows = storage.all_rows()
        kind, of_agents = self._reward_of(storage), self._flags_of_agents(storage)
        episodes = self.episodes_of(storage)
        serials = storage.ring.for_kernels()
        if serials is not None and self._is_summed_by_kernel(storage):
            return self._launch(flat, storage, episodes.numbers, serials)
        step = torch.arange(n, device=flat.device)
        first = torch.arange(len(flat), device=flat.device)
        last = episodes.spans(flat).ahead.clamp(max=n - 1)
        # then the last row, repeated
        window = storage.ring.cells_after(flat[:, None], step.minimum(last[:, None]))
        if not self.takes_goals:
            batch = rows.joined_at(flat, window[:, -1])
            steps = None
        # the wrapped sampler may change rewards and flags: let it read the rows of all
        # steps
        else:
            owner = first if owner is None else owner
            owners = owner.repeat_interleave(n)
            steps = super().read(storage, drawn, window.flatten(), owners)
            batch = cast("TensorDictBase", steps[first * n])

        def column(key: tuple[str, ...], step: Tensor) -> Tensor:
            """Return a key of the rows at ``step``, ``[B]`` or ``[B, n]``."""
            row = first.view(-1, *[1] * (step.ndim - 1))
            if steps is None:
                return rows.column_at(key, window[row, step])
            return leaf_of(steps, key)[row * n + step]

        every = step.expand(len(flat), n)
        if steps is not None:
            for key in episodes.flags:
                last = last.minimum(_first_end(column(key, every), 1)[:, 0])
            set_entries_(batch, {"next": steps.get("next")[first * n + last]})
        reward = column(self.reward_key, every)

        agents = _agents_of(self.reward_key, kind)
        if not agents:
            total = n_step_sums(reward, last, self.gamma)
        else:
            last = last[:, None].expand(-1, agents)
            for key in of_agents:
                last = last.minimum(_first_end(column(key, every), agents))
            by_agent = reward.transpose(1, 2).flatten(0, 1)
            total = n_step_sums(by_agent, last.flatten(), self.gamma)
            total = total.unflatten(0, last.shape)
        if of_agents:
            self._set_outcomes_(batch, storage, last, column)

        leaf_of(batch, self.reward_key).copy_(total)
        shape = (*last.shape, *[1] * (total.ndim - last.ndim))
        set_entries_(batch, {"steps_to_next_obs": (last + 1).view(shape)})
        return batch

    def launches(self, storage: PackedStorage) -> bool:
        """Whether kernels draw rows and join steps on a GPU."""
        draws = getattr(self.sampler, "launches", None)
        return (
            draws is not None and draws(storage) and self._is_summed_by_kernel(storage)
        )

    def _is_summed_by_kernel(self, storage: PackedStorage) -> bool:
        """Whether a kernel on a GPU looks up the last rows, and sums the rewards."""
        if self.takes_goals or self._flags_of_agents(storage):
            return False
        is_float = self._reward_of(storage).dtype in (torch.float32, torch.float64)
        return is_float and storage.all_rows().is_launched

    def _launch(
        self, flat: Tensor, storage: PackedStorage, numbers: Tensor, serials: Serials
    ) -> TensorDictBase:
        """Return n-step transitions, which kernels on a GPU make."""
        from rlbuf_td.kernels.wrappers import triton

        rows = storage.all_rows()
        leaf = self._reward_of(storage)
        offset = rows.layout.offsets[leaf.key]
        cells = flat.contiguous()

        how = self.n_steps, self.gamma

        def sum_rewards(total: Tensor) -> Sums:
            rewards = Rewards(rows.flat, offset, total)
            return triton.sum_steps(rewards, cells, numbers, serials, *how)

        batch, taken = rows.summed_at(cells, leaf.key, sum_rewards)
        agents = _agents_of(self.reward_key, leaf)
        shape = [1] * len(leaf.shape)
        if agents:
            shape[0] = agents
            taken = taken.view(-1, *[1] * len(shape)).expand(-1, *shape).contiguous()
        set_entries_(batch, {"steps_to_next_obs": taken.view(-1, *shape)})
        return batch

    def _set_outcomes_(
        self,
        batch: TensorDictBase,
        storage: PackedStorage,
        last: Tensor,
        column: Callable[[tuple[str, ...], Tensor], Tensor],
    ) -> None:
        """Set the entries of ``("next", group)`` to those of the last row in the sum of
        each agent, ``last``, ``[B, agents]``."""
        group = self.reward_key[:-1]
        agents = last.shape[1]
        for leaf in storage.all_rows().layout.leaves:
            if leaf.key[: len(group)] != group:
                continue
            value = leaf_of(batch, leaf.key)
            if agents == 1:  # the whole group is this agent
                value.copy_(column(leaf.key, last[:, 0]))
            elif leaf.shape[:1] == (agents,):
                for agent in range(agents):
                    value[:, agent] = column(leaf.key, last[:, agent])[:, agent]

    def _flags_of_agents(self, storage: PackedStorage) -> list[tuple[str, ...]]:
        """Return the keys of the flags, beside the rewards, that end the sums of each
        agent; none without ``per_agent``."""
        *group, _ = self.reward_key
        if not self.per_agent or len(group) < 2:
            return []
        layout = storage.all_rows().layout
        agents = self._reward_of(storage).shape[:1]
        flags = (
            layout.leaf((*group, name)) for name in ("done", "terminated", "truncated")
        )
        stored = [
            leaf.key
            for leaf in flags
            if leaf is not None
            and leaf.dtype is torch.bool
            and leaf.shape[:1] == agents
        ]
        # as for advantages, `done` has precedence
        return stored[:1] if (*group, "done") in stored else stored

    def _reward_of(self, storage: PackedStorage) -> Leaf:
        """Return the dtype and the shape of the reward."""
        return summable(storage, self.reward_key, "n-step returns")

    def reading(self, storage: PackedStorage, size: int, is_stamped: bool) -> Reading:
        """See ``reading_of`` in ``wrapper.py``."""
        reward = self._reward_of(storage)
        self.need_loops(storage)
        if reward.dtype not in (torch.float32, torch.float64):
            raise Uncompiled(f"rewards are {reward.dtype}, not float32 or float64")
        if self._flags_of_agents(storage):
            reason = "sums that end at the flags of each agent are made with torch"
            raise Uncompiled(reason)
        if self._inner is not None:
            kind = type(self._inner).__name__
            raise Uncompiled(f"n-step returns over a {kind} are made with torch")
        return _JoinedReading(self, storage, size, is_stamped)

    def _revised_keys(self) -> Iterator[NestedKey]:
        yield from super()._revised_keys()
        yield from ("next", "steps_to_next_obs")


def _agents_of(reward_key: tuple[str, ...], reward: Leaf) -> int:
    """Return the number of agents whose rewards a key holds; 0 for rewards of a whole
    environment, which may have several elements."""
    return reward.shape[0] if len(reward_key) > 2 and reward.shape else 0


def _first_end(flags: Tensor, agents: int) -> Tensor:
    """Return the first step at which a flag of each agent, ``[B, n, ...]``, is True, or
    the last step: ``[B, agents]``."""
    count, n = flags.shape[:2]
    is_end = flags.reshape(count, n, agents, -1).any(3)
    step = torch.arange(n, device=flags.device)[:, None]
    return torch.where(is_end, step, n - 1).amin(1)


class _JoinedReading(Reading):
    """Gathers n-step transitions."""

    def __init__(
        self, wrapper: NStepSampler, storage: PackedStorage, size: int, is_stamped: bool
    ) -> None:
        super().__init__(storage, size, is_stamped)
        leaves = self.rows.layout.leaves
        reward = wrapper._reward_of(storage)
        kinds = [
            REWARD if leaf is reward else NEXT if leaf.key[0] == "next" else ROOT
            for leaf in leaves
        ]
        sizes = [leaf.dtype.itemsize for leaf in leaves]
        self.describe(np.column_stack((self.rows.extents, kinds, sizes)))
        self.agents = _agents_of(wrapper.reward_key, reward)
        shape = [1] * len(reward.shape)
        if self.agents:
            shape[0] = self.agents
        self.entries = [("steps_to_next_obs", (torch.int64, torch.Size(shape)))]
        # of each sum, of rewards of agents that end together
        self.taken = torch.zeros(size, dtype=torch.int64, device="cpu")
        self.wrapper = wrapper
        self.ends = np.zeros(size, np.int64)
        self.ends_at = self.ends.ctypes.data
        self.joined = record_of(STEPS, ends=self.ends_at)
        self.joined_at = self.joined.ctypes.data
        # to set its fields in a fourth of the time of `Struct.pack_into`
        self.joined_ints = memoryview(self.joined.view(np.int64).data)
        self.joined_floats: Any = memoryview(self.joined.view(np.float64).data)
        self.kernel = loop("wrappers.cpu", "n_step")
        if self.observations:
            self.entry_kernel = loop("batch.entries_cpu", "read_joined_entries")

    def __call__(
        self, slots: BatchSlots, slot: BatchSlot, flat: Tensor, drawn: Tensor, live: int
    ) -> bool:
        """See :class:`~rlbuf_td.samplers.reading.Reading`."""
        if self.rows.is_mapped:
            self.rows.ask_for(flat)
        steps = slot.report["steps_to_next_obs"]
        taken = self.taken if self.agents else steps
        self.joined_ints[_N] = self.wrapper.n_steps
        self.joined_floats[_GAMMA] = self.wrapper.gamma
        self.joined_ints[_TAKEN] = taken.data_ptr()
        places = self.address, flat.data_ptr(), slot.targets
        episodes = self.storage.episodes_now().address
        if not self.kernel(episodes, *places, self.joined_at, live):
            return False
        if self.observations:
            self.entry_kernel(*places, self.ends_at, self.observations)
        if self.agents:
            # all agents share the number of steps
            steps.copy_(taken.view(-1, *[1] * (steps.ndim - 1)))
        return True
