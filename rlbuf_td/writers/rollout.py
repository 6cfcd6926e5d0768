"""The writer of rollouts, which computes their advantages when they are read.

Nothing about a rollout lies beside its rows: its steps are the live rows of the ring,
and the ring's block, which all processes share, says whether these rows have their
estimates (``Ring.is_estimated``). This mark is set last, and any write clears it: if a
process dies, or an estimator fails, the next read computes the estimates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from rlbuf_td.functional._layout import coefficient
from rlbuf_td.kernels.serials import TAIL, WRITTEN
from rlbuf_td.storages.keys import as_tuple, is_key, nested_key
from rlbuf_td.storages.listeners import Completes
from rlbuf_td.storages.schema import refuse_ragged
from rlbuf_td.storages.tensordict_fast import entries_of, leaf_of, new_tensordict
from rlbuf_td.storages.torchrl_parts import capacity_in_steps
from rlbuf_td.storages.writes import Write
from rlbuf_td.writers.common import TimeWriter
from rlbuf_td.writers.estimator import Coefficient, Estimator, RolloutEstimator, entry


class RolloutWriter(TimeWriter, Completes):
    r"""Writes rollouts of T steps, ``[T]`` or ``[T, E]``, and adds advantages and value
    targets.

    T is the storage's capacity along time. ``add`` writes one step, ``extend`` several.
    The first read of a complete rollout stores ``advantage`` and ``value_target`` of
    all steps (:func:`~rlbuf_td.functional.generalized_advantage_estimate`), and
    ``state_value`` where the data had none. Batches and ``storage[...]`` are such
    reads, in any process that shares the rows. Until all T steps are written, these
    entries are NaN, unless ``partial`` is set. The next step begins a new rollout, which replaces the old one.

    **Values.** :math:`V(s_t)` is the ``state_value`` in the data. If it is missing or
    NaN in a step, the first read calls ``value_network`` once on all steps. The next state's value
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

    **An estimator of your own** is called once per rollout, at its first read, without
    gradients, as ``estimator(data)``. ``data`` is a TensorDict ``[T]`` or ``[E, T]``, as collectors
    give it, with all written entries, and with

    - ``state_value`` and ``("next", "state_value")``: :math:`V(s_t)` and
      :math:`V(s'_t)`, ``[E, T, *F]``;
    - ``("next", "reward")``, ``("next", "done")`` and ``("next", "terminated")``, of
      the same shape, the latter two bool. ``done`` is also set where trajectories
      change. The last step is ``done`` only if its trajectory ends there.

    With ``group="agents"``, values and rewards lie in the group, as above, and have the
    shape ``[E, T, n, *F]``. The flags, one per agent, are at ``("next", "done")`` and
    ``("next", "terminated")``, and also at ``("next", "agents", "done")`` and
    ``("next", "agents", "terminated")``.

    Functions of :mod:`rlbuf_td.functional` and TorchRL's value estimators take these
    shapes as they are. The estimator must change no tensor of ``data`` in place. It
    returns a tuple ``(advantage, value_target)`` with the shape, dtype and device of
    ``state_value``, without NaN and infinity. With TorchRL's module::

        gae = TDLambdaEstimator(gamma=0.99, lmbda=0.95, value_network=None)
        def estimator(data):
            data = gae(data)
            return data["advantage"], data["value_target"]

    If the estimator or the network raises an error, the read raises it; the rollout
    stays as it is, and the next read tries again.

    A dump of a rollout that has been read holds the estimates. It holds neither the
    estimator nor the network: load it into a buffer that was made with them. Pickling a
    buffer, also to a spawned process, needs an estimator that can be pickled, which a
    lambda cannot.

    Args:
        gamma: discount, in [0, 1], default 0.99; or one number for each component of
            rewards and values ``[T, E, C]``, as a tensor or a list, for example of
            several objectives, or of a reward and a cost that a critic with two outputs
            predicts.
        lmbda: GAE's lambda, in [0, 1], default 0.95; or one number for each component.
        estimator: a function of your own, called instead of GAE, see above; it replaces
            ``gamma`` and ``lmbda``.
        value_network: a TensorDict module that reads an observation and writes
            ``value_key``, called without gradients. No network is needed if the data
            has ``value_key`` and ``("next", value_key)``. If each trajectory terminates
            within the rollout, ``value_key`` is enough.
        normalize_advantage: whether to normalize the stored advantages to mean 0 and
            standard deviation 1 over the rollout. Value targets use the advantages
            before normalization.
        normalize_advantage_exclude_dims: dims of the advantages that keep a mean and a
            standard deviation of their own, counted from the last one: ``(-1,)`` for
            each component, ``(-2,)`` for each agent of a group; default: none.
        partial: whether reads also compute the estimates of an incomplete rollout, as
            if the newest step were the last; may be set at any time.
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
            step. Missing flags are computed as ``terminated | truncated``. Keys of
            flags and ids that have names of your own must be stored.
        terminated_key: key of the bool terminated flags, shaped like done flags.
            Missing flags are computed as ``done & ~truncated`` or, if truncated flags
            are missing too, as ``done``.
        truncated_key: key of the truncated flags, shaped like done flags; used only if
            done or terminated flags are missing.
        trajectory_key: key of integer trajectory ids, one per step, if the data has
            them.

    Cost: O(T * E) per rollout, and the network's calls. On CUDA, the CPU waits for the
    GPU twice per rollout, to find missing values and where trajectories end. TorchRL's ``GAE`` by default
    calls its network on all observations and all next observations.

    Raises:
        TypeError: the storage is no :class:`PackedStorage`; ``estimator`` is not
            callable, or (on reading) returned something else than two tensors;
            ``value_network`` is no TensorDict module.
        ValueError: ``gamma`` or ``lmbda`` is out of range, or came with ``estimator``;
            ``group`` is no name; (on writing) the data is empty, or has too many steps
            for the rollout; (on reading) the estimator returned another shape or dtype,
            or NaN, or values are missing and there is no network.
        SchemaError: (on writing) the data does not match the stored rows, or lacks an
            entry that the estimates need. A failed write changes nothing.

    Warns:
        RuntimeWarning: (with the first estimates, on the CPU) rows of several
            trajectories alternate in a lane.

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

    begins_anew = True
    appends = False  # the advantages of a rollout need whole time steps

    def __init__(
        self,
        gamma: Coefficient | None = None,
        lmbda: Coefficient | None = None,
        *,
        estimator: Estimator | None = None,
        value_network: TensorDictModuleBase | None = None,
        normalize_advantage: bool = False,
        normalize_advantage_exclude_dims: Sequence[int] = (),
        partial: bool = False,
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
        gamma = _coefficient("gamma", 0.99 if gamma is None else gamma)
        lmbda = _coefficient("lmbda", 0.95 if lmbda is None else lmbda)
        prefix = _group(group)
        self.value_key = nested_key(value_key or (*prefix, "state_value"))
        _refuse_network(value_network, self.value_key)
        self.advantage_key = nested_key(advantage_key or (*prefix, "advantage"))
        self.value_target_key = nested_key(
            value_target_key or (*prefix, "value_target")
        )
        #: The entries that this writer adds; the last one, the value, where the data
        # lacks it.
        self.added_keys = tuple(
            as_tuple(key)
            for key in (self.advantage_key, self.value_target_key, self.value_key)
        )
        names = (
            reward_key or ("next", *prefix, "reward"),
            done_key,
            terminated_key,
            truncated_key,
            trajectory_key,
        )
        keys = [nested_key(name) for name in names]
        self.estimator = RolloutEstimator(
            gamma,
            lmbda,
            estimator,
            value_network,
            self.value_key,
            *keys,
            exclude_dims=_negative(normalize_advantage_exclude_dims),
        )
        self.normalize_advantage, self.partial = normalize_advantage, partial
        # NaN, as the last data needs it
        self._blanks = [torch.empty(0, device="cpu")]

    def register_storage(self, storage: Storage) -> None:
        """Set the storage to write to, whose reads then compute estimates."""
        super().register_storage(storage)
        self._storage.has_estimates = True

    @property
    def steps(self) -> int:
        """Number of written steps of the current rollout, from 0 to T."""
        ring = self._storage.ring
        # lanes stand together
        return ring.numbers[WRITTEN * ring.lanes] - ring.numbers[TAIL * ring.lanes]

    @property
    def is_complete(self) -> bool:
        """Whether the storage holds all T steps of a rollout."""
        return self.steps == self._storage.ring.steps and not self._cursor

    @property
    def is_readable(self) -> bool:
        """Whether a read computes estimates: the rollout is complete, or ``partial``
        and a step is written."""
        return self.is_complete or (self.partial and self.steps > 0)

    @property
    def is_estimated(self) -> bool:
        """Whether all written steps have advantages: they have been read, or
        :meth:`estimate` was called."""
        return self.steps > 0 and self._storage.ring.is_estimated

    @property
    def value_rows(self) -> int:
        """Number of rows on which the network was called for the estimates; 0 unless
        :attr:`is_estimated`."""
        return self._storage.ring.value_rows

    # -- writes

    def write(self, write: Write) -> Any:
        """See ``TimeWriter.write``; the first step of a rollout removes the old
        rollout. Errors: see the class."""
        storage, data = self._storage, write.data
        if type(data) is not TensorDict:
            data = storage.as_rows(data, storage.ndim - write.is_single)
        with storage.lock:
            steps, cursor = storage.ring.steps, self._cursor
            if storage.rows is None or storage.is_reserved:
                rows = data.unsqueeze(0) if write.is_single else data
                if write.lanes_first:
                    rows = rows.transpose(0, 1)
                self.estimator.check(rows, storage.ndim)
                steps = capacity_in_steps(storage, batched_data=rows)
            is_one = write.is_single or not data.ndim
            count = 1 if is_one else data.shape[write.lanes_first]
            if count > steps - cursor:
                raise ValueError(
                    f"a rollout takes {steps} steps and {cursor} are written: "
                    f"{count} more do not fit. Write the rest of it first, or make "
                    "the storage as long as a collector's batch"
                )
            write.replace_data(_with_entries(data, self.added_entries(data)))
            write.begins_anew = not cursor
            return super().write(write)

    def added_entries(self, data: TensorDictBase) -> dict[tuple[str, ...], Tensor]:
        """Return the entries that this writer adds to time steps like ``data``, filled
        with NaN: the value only if the data has none."""
        value = leaf_of(data, self.added_keys[-1])
        like = entry(data, self.estimator.reward_key) if value is None else value
        layout = self._storage.layout
        stored = None if layout is None else layout.leaf(self.added_keys[0])
        if stored is None:
            dtype = self.estimator.dtype(like, has_values=value is not None)
        else:
            dtype = stored.dtype
        blank = self._blanks[0]
        if (
            blank.shape != like.shape
            or blank.dtype is not dtype
            or blank.device != like.device
            or type(blank) is not type(like)  # in FakeTensorMode
        ):
            # not one tensor: data whose tensors differ is recognized faster
            self._blanks = [
                torch.full_like(like, torch.nan, dtype=dtype) for _ in self.added_keys
            ]
        keys = self.added_keys if value is None else self.added_keys[:-1]
        return dict(zip(keys, self._blanks, strict=False))

    # -- estimates

    def complete(self, key: tuple[str, ...] | None) -> None:
        """Compute the estimates before they are read, see
        :meth:`PackedStorage.complete`."""
        is_read = key is None or any(
            added[: len(key)] == key for added in self.added_keys
        )
        if not (is_read and self.is_readable):
            return
        # another writer may have written rows without estimates
        if self.added_keys[0] in self._storage.all_rows().layout.places:
            self.estimate()

    def estimate(self) -> None:
        """Compute the estimates of the written steps, as if the rollout ended at the
        last one, unless they are there. RuntimeError if no step is written."""
        storage = self._storage
        with storage.lock:
            steps = self.steps
            if not steps:
                raise RuntimeError(
                    "there is nothing to estimate: no step has been written"
                )
            if self.is_estimated:
                return
            rows = storage.read(slice(0, steps))
            estimates = self.estimator.estimate(rows, storage.ndim)
            if self.normalize_advantage:
                mask = self.estimator.mask_of(rows)
                advantage = self.estimator.normalized(estimates.advantage, mask)
                estimates = estimates._replace(advantage=advantage)
            columns = {
                key: column.flatten(0, storage.ndim - 1)
                for key, column in zip(self.added_keys, estimates[:3], strict=True)
                if column is not None
            }
            storage.edit_entries(slice(0, steps * storage.ring.lanes), columns)
            storage.ring.mark_estimated(estimates.rows_asked)

    def __repr__(self) -> str:
        estimator = self.estimator.function
        settings = f"gamma={self.estimator.gamma}, lmbda={self.estimator.lmbda}"
        if estimator is not None:
            name = getattr(estimator, "__name__", type(estimator).__name__)
            settings = f"estimator={name}"
        return f"{type(self).__name__}({settings}, cursor={self._cursor}, write_count={self._write_count})"


def _with_entries(
    data: TensorDictBase, added: Mapping[tuple[str, ...], Tensor]
) -> TensorDictBase:
    """Return data with other entries, and otherwise the same tensors."""
    if type(data) is not TensorDict:
        refuse_ragged(data)
    entries: dict[str, Any] = {**entries_of(data)}
    for key, value in added.items():
        name = key[0]
        if len(key) == 1:
            entries[name] = value
            continue
        if name not in entries:
            entries[name] = new_tensordict({}, data.batch_size, data.device)
        entries[name] = _with_entries(entries[name], {key[1:]: value})
    return new_tensordict(entries, data.batch_size, data.device)


def _group(group: object) -> tuple[str, ...]:
    """Return where the entries of a group of agents are; ``None``: not in a group."""
    if group is not None and not (is_key(group) and "next" not in as_tuple(group)):
        raise ValueError(
            f'group must be the name of a group of agents, such as "agents", got {group!r}'
        )
    return () if group is None else as_tuple(group)


def _coefficient(name: str, value: Coefficient) -> float | Tensor:
    """Check gamma or lmbda, and return one number, or one for each component."""
    if isinstance(value, Tensor | np.ndarray | Sequence) and not isinstance(value, str):
        numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
        if numbers.ndim:
            for number in numbers.flatten().tolist():
                coefficient("RolloutWriter", name, number)
            return numbers.clone()
    return coefficient("RolloutWriter", name, value)  # pyrefly: ignore [bad-argument-type]


def _negative(dims: Sequence[int]) -> tuple[int, ...]:
    """Return dims that must be counted from the last one: batches and rollouts differ
    in their first ones."""
    if not isinstance(dims, Sequence) or any(
        type(dim) is not int or dim >= 0 for dim in dims
    ):
        raise ValueError(
            f"normalize_advantage_exclude_dims takes dims counted from the last one, such as (-1,), got {dims!r}"
        )
    return tuple(dims)


def _refuse_estimator(estimator: object, gamma: object, lmbda: object) -> None:
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


def _refuse_network(network: object, value_key: NestedKey) -> None:
    if network is None or hasattr(network, "in_keys"):
        return
    raise TypeError(
        f"value_network must be a TensorDict module, got {type(network).__name__}: "
        f'wrap it, TensorDictModule(network, ["observation"], [{value_key!r}])'
    )
