"""The writer of rollouts, which computes their advantages."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from rlbuf_td.functional._layout import coefficient
from rlbuf_td.storages.checks import State, saved_number
from rlbuf_td.storages.episodes import STALE
from rlbuf_td.storages.keys import as_tuple, is_key, nested_key
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.torchrl_parts import capacity_in_steps, count_change
from rlbuf_td.storages.writes import stacked
from rlbuf_td.writers.common import MOST, TimeWriter
from rlbuf_td.writers.estimator import Estimates, Estimator, RolloutEstimator, entry


class RolloutWriter(TimeWriter):
    r"""Writes rollouts of T steps, ``[T]`` or ``[T, E]``, and adds advantages and value
    targets.

    T is the storage's capacity along time. ``add`` writes one step, ``extend`` several.
    When the last step of a rollout arrives, the writer stores ``advantage`` and
    ``value_target`` of all steps
    (:func:`~rlbuf_td.functional.generalized_advantage_estimate`), and ``state_value``
    if the data had none. Until then, ``advantage`` and ``value_target`` are NaN. The
    next step begins a new rollout, which replaces the old one.

    **Values.** :math:`V(s_t)` is the ``state_value`` in the data; if it is missing,
    ``value_network`` is called once on all steps. The next state's value
    :math:`V(s'_t)` is :math:`V(s_{t+1})` within a trajectory. At truncations and at the
    rollout's end, :math:`V(s'_t)` is the ``("next", "state_value")`` in the data; if it
    is missing, the network is called on the next observations of these steps only. A
    trajectory ends at a step that is ``done``, or where the
    ``("collector", "traj_ids")`` change. Estimates have the dtype of the values in the
    data or, if there are none, of the network's parameters.

    **Agents.** With ``group="agents"``, the values ``("agents", "state_value")``, the
    rewards ``("next", "agents", "reward")``, and the estimates
    ``("agents", "advantage")`` and ``("agents", "value_target")`` are those of the
    agents of a group, ``[T, E, n, *F]``. They are computed for each agent: its
    trajectory also ends at its own flags, which are beside the reward, and where
    ``("agents", "mask")`` is False in the next step. Where the mask is False, the
    estimates are 0, and do not count for normalization. See
    :class:`PettingZooRecorder`.

    **An estimator of your own** is called once per rollout, without gradients, as
    ``estimator(data)``. ``data`` is a TensorDict ``[T]`` or ``[E, T]``, as collectors
    give it, with all written entries, and with

    - ``state_value`` and ``("next", "state_value")``: :math:`V(s_t)` and
      :math:`V(s'_t)`, ``[E, T, *F]``;
    - ``("next", "reward")``, ``("next", "done")`` and ``("next", "terminated")``, of
      the same shape, the latter two bool. ``done`` is also set where trajectories
      change. The last step is ``done`` only if its trajectory ends there.

    Functions of :mod:`rlbuf_td.functional` and TorchRL's value estimators take these
    shapes as they are. The estimator must change no tensor of ``data`` in place. It
    returns a tuple ``(advantage, value_target)`` with the shape, dtype and device of
    ``state_value``, without NaN and infinity. With TorchRL's module::

        gae = TDLambdaEstimator(gamma=0.99, lmbda=0.95, value_network=None)
        def estimator(data):
            data = gae(data)
            return data["advantage"], data["value_target"]

    A dump holds the estimates, but neither the estimator nor the network: load it into
    a buffer that was made with them. Pickling a buffer, also to a spawned process,
    needs an estimator that can be pickled, which a lambda cannot.

    Args:
        gamma: discount, in [0, 1], default 0.99.
        lmbda: GAE's lambda, in [0, 1], default 0.95.
        estimator: a function of your own, called instead of GAE, see above; it replaces
            ``gamma`` and ``lmbda``.
        value_network: a TensorDict module that reads an observation and writes
            ``value_key``, called without gradients. No network is needed if the data
            has ``value_key`` and ``("next", value_key)``. If each trajectory terminates
            within the rollout, ``value_key`` is enough.
        normalize_advantage: whether to normalize the stored advantages to mean 0 and
            standard deviation 1 over the rollout. Value targets use the advantages
            before normalization.
        group: the name of a group of agents, see above; ``None``: values and rewards
            are those of the environment.
        value_key: key of the values, floating point, ``[T, *F]`` or ``[T, E, *F]`` with
            any feature shape ``F``; default: ``"state_value"``, in the group if there
            is one.
        advantage_key, value_target_key: keys under which the estimates are stored;
            default: ``"advantage"`` and ``"value_target"``, in the group.
        reward_key: key of the rewards, which have the shape of the values; default:
            ``("next", "reward")``, or ``("next", group, "reward")``.
        done_key: key of the bool done flags, with the values' shape or one flag per
            step. Missing flags are computed as ``terminated | truncated``.
        terminated_key: key of the bool terminated flags, shaped like done flags.
            Missing flags are computed as ``done & ~truncated`` or, if truncated flags
            are missing too, as ``done``.
        truncated_key: key of the truncated flags, shaped like done flags; used only if
            done or terminated flags are missing.
        trajectory_key: key of integer trajectory ids, one per step, if the data has
            them.

    Attributes:
        value_rows: number of rows on which the network was called for the last rollout.

    Cost: O(T * E) per rollout, and the network's calls. On CUDA, the CPU waits for the
    GPU once per rollout, to find where trajectories end. TorchRL's ``GAE`` by default
    calls its network on all observations and all next observations.

    Raises:
        TypeError: the storage is no :class:`PackedStorage`; ``estimator`` is not
            callable, or (on writing) returned something else than two tensors;
            ``value_network`` is no TensorDict module.
        ValueError: ``gamma`` or ``lmbda`` is out of range, or came with ``estimator``;
            ``group`` is no name; (on writing) the estimator returned another shape or
            dtype, or NaN; the data is empty or has too many steps for the rollout, or
            values are missing and there is no network. A failed write changes nothing.
        SchemaError: (on writing) the data does not match the stored rows, or lacks an
            entry that the estimates need.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(3), writer=RolloutWriter(gamma=0.5, lmbda=1.0))
        >>> done = torch.tensor([[False], [False], [True]])
        >>> step = {"reward": torch.ones(3, 1), "done": done, "terminated": done}
        >>> _ = rb.extend(TensorDict({"state_value": torch.zeros(3, 1), "next": step}, [3]))
        >>> rb.storage["value_target"].flatten().tolist()
        [1.75, 1.5, 1.0]
    """

    needs_capacity = True  # a dump loads into the same capacity only
    appends = False  # the advantages of a rollout need whole time steps

    def __init__(
        self,
        gamma: float | None = None,
        lmbda: float | None = None,
        *,
        estimator: Estimator | None = None,
        value_network: TensorDictModuleBase | None = None,
        normalize_advantage: bool = False,
        group: NestedKey | None = None,
        value_key: NestedKey | None = None,
        advantage_key: NestedKey | None = None,
        value_target_key: NestedKey | None = None,
        reward_key: NestedKey | None = None,
        done_key: NestedKey = ("next", "done"),
        terminated_key: NestedKey = ("next", "terminated"),
        truncated_key: NestedKey = ("next", "truncated"),
        trajectory_key: NestedKey = ("collector", "traj_ids"),
    ) -> None:
        super().__init__()
        _refuse_estimator(estimator, gamma, lmbda)
        _refuse_network(value_network, value_key)
        gamma = coefficient("RolloutWriter", "gamma", 0.99 if gamma is None else gamma)
        lmbda = coefficient("RolloutWriter", "lmbda", 0.95 if lmbda is None else lmbda)
        of = _group(group)
        self.value_key = nested_key(value_key or (*of, "state_value"))
        self.advantage_key = nested_key(advantage_key or (*of, "advantage"))
        self.value_target_key = nested_key(value_target_key or (*of, "value_target"))
        names = (
            reward_key or ("next", *of, "reward"),
            done_key,
            terminated_key,
            truncated_key,
            trajectory_key,
        )
        keys = map(nested_key, names)
        self.estimator = RolloutEstimator(
            gamma, lmbda, estimator, value_network, self.value_key, *keys
        )
        self.normalize_advantage = normalize_advantage
        self.value_rows = self._estimated_steps = 0
        self._has_values = True

    @property
    def steps(self) -> int:
        """Number of written steps of the current rollout, from 0 to T."""
        return self._storage.ring.longest

    @property
    def begins_anew(self) -> bool:  # pyrefly: ignore [bad-override]
        """Whether the next write begins a rollout, which replaces the old one."""
        return self._cursor == 0

    @property
    def is_complete(self) -> bool:
        """Whether the storage holds all T steps of a rollout, with their advantages."""
        return self._cursor == 0 and 0 < len(self._storage) >= self._storage.max_size

    @property
    def is_estimated(self) -> bool:
        """Whether all written steps have advantages (T steps are written, or
        :meth:`estimate` was called)."""
        return self.is_complete or 0 < self._estimated_steps == self.steps

    def add(self, data: TensorDictBase) -> int | Tensor:
        """Write one step, ``[]`` or ``[E]``; return its index. Errors: see the
        class."""
        steps = capacity_in_steps(self._storage, single_data=data)
        # the step is a complete rollout, which is estimated before the write
        if steps == 1:
            index = self.extend(data.unsqueeze(0))
            return 0 if self._storage.ndim == 1 else index
        return self._write_part(super().add, data, 1, steps)

    def extend(self, data: Any) -> Tensor:
        """Write steps, ``[n]`` or ``[n, E]``; return their index, ``[n]`` or
        ``[n * E, 2]``. Errors: see the class."""
        data = stacked(data)
        count = len(data)
        if not count:
            raise ValueError("extend needs at least one step, got none")
        steps = capacity_in_steps(self._storage, batched_data=data)
        if count > steps - self._cursor:
            room = f"a rollout takes {steps} steps and {self._cursor} are written: {count} more do not fit"
            remedy = "Write the rest of it first, or make the storage as long as a collector's batch"
            raise ValueError(f"{room}. {remedy}")
        if count < steps:
            return self._write_part(super().extend, data, count, steps)
        estimates = self.estimator.estimate(data, self._storage.ndim)
        index = super().extend(data.copy().update(self._columns(estimates)))
        self.value_rows, self._estimated_steps = estimates.rows_asked, count
        return index

    def _write_part(
        self, write: Any, data: TensorDictBase, count: int, steps: int
    ) -> Any:
        """Write steps with NaN as their estimates; compute all estimates if these steps
        complete the rollout."""
        storage, cursor = self._storage, self._cursor
        has_values = data.get(self.value_key, None) is not None
        if cursor and has_values != self._has_values:
            before, now = (
                "with" if has else "without" for has in (self._has_values, has_values)
            )
            raise ValueError(
                f"earlier steps of this rollout came {before} {self.value_key!r}, these come {now}"
            )
        index = write(data.copy().update(self.added_entries(data)))
        self._has_values = has_values
        if cursor + count == steps:
            try:
                self._estimate_stored(steps)
            except BaseException:
                self._write_count -= count
                storage.ring.written -= count
                storage.mark_episodes(STALE)
                raise
        return index

    def added_entries(self, data: TensorDictBase) -> dict[NestedKey, Tensor]:
        """Return the entries that this writer adds to time steps like ``data``, filled
        with NaN."""
        has_values = data.get(self.value_key, None) is not None
        like = entry(data, self.value_key if has_values else self.estimator.reward_key)
        dtype = self.estimator.dtype(like, has_values=has_values)
        missing = (
            self.advantage_key,
            self.value_target_key,
            *(() if has_values else (self.value_key,)),
        )
        return {key: torch.full_like(like, torch.nan, dtype=dtype) for key in missing}

    def estimate(self) -> None:
        """Compute estimates as if the rollout ended at the last written step.
        RuntimeError if no step is written."""
        if not self.steps:
            raise RuntimeError("there is nothing to estimate: no step has been written")
        if not self.is_estimated:
            self._estimate_stored(self.steps)

    def _estimate_stored(self, steps: int) -> None:
        # views: the assignments below change the storage
        rows = self._storage.get(slice(0, steps))
        estimates = self.estimator.estimate(
            rows, self._storage.ndim, has_values=self._has_values
        )
        for key, x in self._columns(estimates).items():
            rows.get(key).copy_(x)
        count_change(self._storage)
        self.value_rows, self._estimated_steps = estimates.rows_asked, steps

    def _columns(self, estimates: Estimates) -> dict[NestedKey, Tensor]:
        advantage = estimates.advantage
        if self.normalize_advantage:
            advantage = self.estimator.normalized(advantage, estimates.mask)
        columns = {self.value_key: estimates.value, self.advantage_key: advantage}
        return columns | {self.value_target_key: estimates.value_target}

    def _empty(self, empty_write_count: bool = True) -> None:
        super()._empty(empty_write_count=empty_write_count)
        self._estimated_steps = 0

    def state_dict(self) -> State:
        """Return the cursor, the counters, and the number of time steps that have
        advantages."""
        progress = {
            "estimated_steps": self._estimated_steps,
            "has_values": self._has_values,
        }
        return super().state_dict() | progress | {"value_rows": self.value_rows}

    def _refuse_state(self, state: State) -> None:
        super()._refuse_state(state)
        saved_number("count of estimated steps", state["estimated_steps"], 0, MOST)
        saved_number("value_rows", state["value_rows"], 0, MOST)
        if type(state["has_values"]) is not bool:
            raise ValueError(
                f"the saved has_values is {state['has_values']!r}, expected True or False"
            )

    @defer_sigint
    def load_state_dict(self, state_dict: State) -> None:
        """Restore a state that :meth:`state_dict` returned; ValueError, and no change,
        if it is invalid."""
        super().load_state_dict(state_dict)
        self._estimated_steps, self._has_values = (
            state_dict["estimated_steps"],
            state_dict["has_values"],
        )
        self.value_rows = state_dict["value_rows"]

    def __repr__(self) -> str:
        own = self.estimator.own
        settings = f"gamma={self.estimator.gamma}, lmbda={self.estimator.lmbda}"
        if own is not None:
            settings = f"estimator={getattr(own, '__name__', type(own).__name__)}"
        return f"{type(self).__name__}({settings}, cursor={self._cursor}, write_count={self._write_count})"


def _group(group: object) -> tuple[str, ...]:
    """Return where the entries of a group of agents are; ``None``: not in a group."""
    if group is not None and not (is_key(group) and "next" not in as_tuple(group)):
        raise ValueError(
            f'group must be the name of a group of agents, such as "agents", got {group!r}'
        )
    return () if group is None else as_tuple(group)


def _refuse_estimator(
    estimator: object, gamma: float | None, lmbda: float | None
) -> None:
    if estimator is None:
        return
    if not callable(estimator):
        raise TypeError(
            f"estimator must be a function of a rollout, got {type(estimator).__name__}"
        )
    if gamma is not None or lmbda is not None:
        raise ValueError(
            "gamma= and lmbda= are those of GAE, which estimator= replaces: use them in the estimator"
        )


def _refuse_network(network: object, value_key: NestedKey | None) -> None:
    if network is None or hasattr(network, "in_keys"):
        return
    fault = f"value_network must be a TensorDict module, got {type(network).__name__}"
    raise TypeError(
        f'{fault}: wrap it, TensorDictModule(network, ["observation"], [{value_key!r}])'
    )
