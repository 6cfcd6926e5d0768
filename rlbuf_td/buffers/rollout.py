"""The buffer for on-policy learning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial as partial_of
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey

from rlbuf_td.buffers.plan import Drawn
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.buffers.writing import refuse_other_data
from rlbuf_td.functional import explained_variance
from rlbuf_td.samplers.minibatch import MinibatchSampler
from rlbuf_td.samplers.sequence import SequenceSampler
from rlbuf_td.storages import PackedStorage, SchemaError
from rlbuf_td.storages.checks import optional, shown_kind, whole
from rlbuf_td.storages.indexing import Info
from rlbuf_td.writers.estimator import Coefficient, Estimator
from rlbuf_td.writers.rollout import RolloutWriter

if TYPE_CHECKING:
    from typing_extensions import Self


class RolloutBuffer(ReplayBuffer):
    """Stores a rollout for on-policy learning, computes its advantages once, and yields
    epochs of minibatches.

    ``for batch in rollout`` yields all minibatches of all epochs, and can be repeated.
    One or several writes fill a rollout; the next write begins a new rollout. Batches
    hold the written entries, ``advantage``, ``value_target`` and ``state_value``. The
    first read of a complete rollout computes these three, with the value network as it
    is then: a batch, a summary, ``rollout[...]``, in any process that shares the rows.
    If the network or the estimator raises an error, so does the read, and the next read
    tries again. In TorchRL, a ``GAE`` module computes advantages before the data is written to a
    buffer.

    **Recurrent policies.** With ``sequence_length=L``, batches are chunks of
    consecutive steps, ``[B, L]`` and time last; every row is in one chunk per epoch. A
    chunk ends after L steps, and at the end of an episode or rollout; ``"mask"``,
    ``[B, L]`` bool, is False for padding, which repeats the chunk's last row.
    ``batch_size`` counts rows with padding, B * L. Advantages are computed before the
    division, and normalized over unpadded rows. A network starts a chunk from the
    recurrent state stored in the chunk's first row, ``batch["state"][:, 0]``, as
    TorchRL's ``LSTMModule`` and ``GRUModule`` do in recurrent mode; a recurrent
    ``value_network`` reads the state after a step at ``("next", "state")``. TorchRL's
    losses need ``loss_module.loss_mask_key = "mask"``. See :class:`SequenceSampler`
    with ``stride``, which draws these batches.

    Args:
        num_steps: T, the number of time steps per rollout.
        num_envs: E, the number of environments; ``None``: rollouts are ``[T]``, without
            an environment dimension.
        batch_size: the number of rows per minibatch; with ``sequence_length``, a
            multiple of it.
        epochs: the number of passes over the rollout in one iteration, default 1.
        gamma: discount factor, in [0, 1], default 0.99; or a list of one for each
            component of the rewards, see :class:`RolloutWriter`.
        lmbda: the lambda of GAE, in [0, 1], default 0.95; or a list.
        estimator: a function ``estimator(data)`` of your own that returns
            ``(advantage, value_target)``, instead of GAE with ``gamma`` and ``lmbda``:
            V-trace, n-step returns, one of TorchRL's. See :class:`RolloutWriter`.
        value_network: computes the state values that the data lacks, see
            :class:`RolloutWriter`.
        group: the name of a group of agents, such as ``"agents"``: rewards, values and
            estimates are those of its agents, under the keys that TorchRL's multi-agent
            environments use. See :class:`RolloutWriter`.
        normalize_advantage: scale advantages to mean 0 and standard deviation 1: over
            the whole rollout (``"rollout"``), over each batch (``"minibatch"``), or not
            at all (``None``). Value targets and :meth:`summary` use unscaled advantages
            (with ``"rollout"``, ``value_target - state_value``). TorchRL's losses can
            also scale advantages; scale only once.
        normalize_advantage_exclude_dims: ``(-1,)`` scales each component of the
            advantages by itself, see :class:`RolloutWriter`; default: all together.
        partial: allow reading an incomplete rollout; advantages are computed as if the
            newest step were the last.
        sequence_length: L, the length of chunks, from 1 to ``num_steps``; ``None``:
            batches of rows, ``[B]``.
        shuffle: draw rows, or chunks, in a new random order in each epoch, default
            ``True``.
        drop_last: drop the last batch of an epoch if it is short, default ``False``.
        device: the device of the batches, and also of the rows unless
            ``storing_device`` is given.
        storing_device: the device of the rows.
        storage: used instead of a new :class:`PackedStorage`; its capacity must be T *
            E rows.
        sampler: used instead of a :class:`MinibatchSampler` made from ``epochs``,
            ``shuffle``, ``drop_last`` and ``sequence_length``.
        writer: used instead of a :class:`RolloutWriter` made from the arguments
            ``gamma`` to ``group``, and ``partial``.
        **kwargs: keywords of :class:`ReplayBuffer`, except ``prefetch``:
            ``transform``, ``generator``, ...

    Raises:
        ValueError: an argument is out of range, or configures a component that is also
            passed (``epochs`` together with ``sampler``, for example).
        TypeError: ``writer`` is not a :class:`RolloutWriter`, or ``value_network`` is
            no TensorDict module.

    Cost: a copy of the rollout; at the first read, one pass over it for the advantages;
    and a gather per minibatch.

    Example:
        >>> from tensordict import TensorDict
        >>> rollout = RolloutBuffer(4, 2, batch_size=4, epochs=3, gamma=0.5, lmbda=1.0)
        >>> done = torch.zeros(2, 4, 1, dtype=torch.bool)
        >>> done[:, -1] = True
        >>> step = {"reward": torch.ones(2, 4, 1), "done": done, "terminated": done}
        >>> _ = rollout.extend(TensorDict({"state_value": torch.zeros(2, 4, 1), "next": step}, [2, 4]))
        >>> [tuple(batch["advantage"].shape) for batch in rollout]
        [(4, 1), (4, 1), (4, 1), (4, 1), (4, 1), (4, 1)]
        >>> rollout.storage["value_target"][:, 0].flatten().tolist()
        [1.875, 1.75, 1.5, 1.0]
        >>> def one_step(data):
        ...     after = data["next"]
        ...     target = after["reward"] + 0.5 * after["state_value"].masked_fill(after["terminated"], 0.0)
        ...     return target - data["state_value"], target
        >>> rollout = RolloutBuffer(4, 2, batch_size=4, estimator=one_step)
        >>> _ = rollout.extend(TensorDict({"state_value": torch.full((2, 4, 1), 2.0), "next": step}, [2, 4]))
        >>> rollout.storage["advantage"][:, 0].flatten().tolist()
        [0.0, 0.0, 0.0, -1.0]
        >>> rollout = RolloutBuffer(4, 2, batch_size=6, sequence_length=3)
        >>> _ = rollout.extend(TensorDict({"state_value": torch.zeros(2, 4, 1), "next": step}, [2, 4]))
        >>> [(tuple(batch.shape), int(batch["mask"].sum())) for batch in rollout][0][0]
        (2, 3)
    """

    _writer: RolloutWriter

    def __init__(
        self,
        num_steps: int,
        num_envs: int | None = None,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        gamma: Coefficient | None = None,
        lmbda: Coefficient | None = None,
        estimator: Estimator | None = None,
        value_network: TensorDictModuleBase | None = None,
        group: NestedKey | None = None,
        normalize_advantage: Literal["rollout", "minibatch"] | None = None,
        normalize_advantage_exclude_dims: Sequence[int] = (),
        partial: bool = False,
        sequence_length: int | None = None,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        storage: Any = None,
        sampler: Any = None,
        writer: RolloutWriter | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_arguments(num_steps, num_envs, normalize_advantage, storage, writer)
        if normalize_advantage_exclude_dims and normalize_advantage is None:
            raise ValueError(
                "normalize_advantage_exclude_dims= needs normalize_advantage='rollout' or 'minibatch'"
            )
        self.num_steps, self.num_envs = num_steps, num_envs
        self.normalize_advantage = normalize_advantage
        self._summary: tuple[int, dict[str, float]] | None = None
        if storage is not None or storing_device is not None:
            device, kwargs["device"] = storing_device, device
        rows = num_steps * (num_envs or 1)
        ndim = 1 if num_envs is None else 2
        storage = _part(
            "storage",
            storage,
            partial_of(PackedStorage, rows, ndim=ndim),
            device=device,
        )
        made: RolloutWriter = _part(
            "writer",
            writer,
            RolloutWriter,
            gamma=gamma,
            lmbda=lmbda,
            estimator=estimator,
            value_network=value_network,
            group=group,
            partial=partial or None,
            normalize_advantage=True if normalize_advantage == "rollout" else None,
            normalize_advantage_exclude_dims=normalize_advantage_exclude_dims or None,
        )
        sampler = _part(
            "sampler",
            sampler,
            partial_of(_sampler_for, made, num_steps, batch_size),
            epochs=epochs,
            shuffle=shuffle,
            drop_last=drop_last,
            sequence_length=sequence_length,
        )
        super().__init__(
            storage=storage,
            sampler=sampler,
            writer=made,
            batch_size=batch_size,
            **kwargs,
        )

    @classmethod
    def from_schema(cls, schema: TensorDictBase, capacity: int, **kwargs: Any) -> Self:
        """Return a rollout buffer of ``capacity`` time steps; see
        :meth:`ReplayBuffer.from_schema`.

        Raises a SchemaError if ``schema`` has several batch dimensions, or an entry
        without a fixed size in bytes.
        """
        if schema.ndim > 1:
            raise SchemaError(
                f"rollouts are [T] or [T, E], got a schema of batch size {tuple(schema.batch_size)}"
            )
        shared = kwargs.pop("shared", False)
        rollout = cls(capacity, schema.shape[0] if schema.ndim else None, **kwargs)
        rollout.storage.reserve(schema)
        return rollout.share() if shared else rollout

    def add(self, data: TensorDictBase, *columns: object) -> int | torch.Tensor:
        """Write one time step; return its index. See :meth:`extend` for errors.

        The batch size is ``[E]``, or ``[]`` if ``num_envs`` is ``None``.
        """
        if not columns:
            lead = () if self.num_envs is None else (self.num_envs,)
            self._refuse_shape("add", data, lead)
        return super().add(data, *columns)  # pyrefly: ignore [bad-return]

    def extend(
        self,
        tensordicts: TensorDictBase,
        *,
        update_priority: bool | None = None,
        lanes: None = None,
    ) -> torch.Tensor:
        """Write n time steps; return their index.

        The batch size is ``[E, n]`` as in collectors' batches, ``[n, E]`` with
        ``dim_extend=0``, or ``[n]`` if ``num_envs`` is ``None``. ``update_priority``
        has no effect, and single ``lanes`` are refused.

        Raises:
            ValueError: the shape is wrong, or fewer than n steps are left in the
                rollout; nothing has changed.
            SchemaError: the data does not match the rows; nothing has changed.
        """
        shape: tuple[int | None, ...] = (None,)
        if lanes is not None:
            return super().extend(tensordicts, lanes=lanes)
        if self.num_envs is not None:
            shape = (self.num_envs, None) if self._dim_extend else (None, self.num_envs)
        self._refuse_shape("extend", tensordicts, shape)
        return super().extend(tensordicts, update_priority=update_priority)

    def _refuse_shape(
        self, how: str, data: TensorDictBase, expected: tuple[int | None, ...]
    ) -> None:
        """Raise an error unless data has the batch size ``expected``, in which None
        stands for any number."""
        if not isinstance(data, TensorDictBase):
            refuse_other_data(how, data)
        if data.batch_size == expected:
            return
        got = tuple(data.batch_size)
        is_short = len(got) < len(expected)
        lacks_lanes = False
        if len(got) > len(expected):
            # an inner dim of a step has no trajectories
            ids = data.get(self._writer.estimator.trajectory_key, None)
            lacks_lanes = ids is not None and ids.ndim > len(expected)
        is_other = any(
            want not in (None, have) for want, have in zip(expected, got, strict=False)
        )
        if not (is_short or is_other or lacks_lanes):
            return
        remedy = ""
        if lacks_lanes:
            remedy = f": for {got[0]} environments, make a RolloutBuffer(num_steps, {got[0]})"
        elif self.num_envs == 1 and is_short:
            remedy = f": for one environment without such a dim, make a RolloutBuffer({self.num_steps})"
        elif how == "extend" and is_short:
            remedy = ": pass a collector's batch as it is, without reshape(-1)"
        elif got[1::-1] == (self.num_envs, got[0]):
            remedy = ": pass data.transpose(0, 1)"
        names = ", ".join("n" if size is None else str(size) for size in expected)
        lanes = "" if self.num_envs is None else f" and {self.num_envs} lanes"
        raise ValueError(
            f"{how} takes batch size [{names}] in a rollout of {self.num_steps} steps"
            f"{lanes}, got {list(got)}{remedy}"
        )

    @property
    def is_complete(self) -> bool:
        """Whether all time steps are written."""
        return self._writer.is_complete

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield the minibatches of all epochs; after loading a state saved during an
        iteration, yield only the rest.

        Raises a RuntimeError if there is no batch size, or if the rollout is incomplete
        and ``partial`` is False.
        """
        self._initialize()
        sampler = getattr(self._sampler, "innermost", self._sampler)
        self._complete_rows()
        if not isinstance(sampler, MinibatchSampler):
            yield from super().__iter__()
            return
        # before the first draw; not after a load at the end of the last epoch
        has_rows = sampler.begin_pass()
        try:
            if has_rows:
                yield from super().__iter__()
        finally:
            sampler.end_pass()

    @property
    def _returns_as_drawn(self) -> bool:
        """Like :attr:`ReplayBuffer._returns_as_drawn`, but False with
        ``normalize_advantage="minibatch"``."""
        return self.normalize_advantage != "minibatch" and super()._returns_as_drawn

    def _finish(self, batch: object, info: Info) -> Drawn:
        """See :class:`ReplayBuffer`; also normalizes the advantages of a minibatch."""
        batch, info = super()._finish(batch, info)
        if self.normalize_advantage == "minibatch":
            key, estimator = self._writer.advantage_key, self._writer.estimator
            batch.set(
                key,
                estimator.normalized(
                    batch.get(key), estimator.mask_of(batch), info.get("mask")
                ),
            )
        return batch, info

    def _complete_rows(self) -> None:
        """Compute the estimates; a RuntimeError if the rollout is incomplete and
        :attr:`partial` is False."""
        writer = self._writer
        if not writer.is_readable:
            hint = (
                ", or pass partial=True to read the written steps"
                if writer.steps
                else ""
            )
            raise RuntimeError(
                f"the rollout is not complete: {writer.steps} of {self.num_steps} "
                f"steps are written. Write the rest first{hint}"
            )
        writer.estimate()

    @property
    def partial(self) -> bool:
        """Whether an incomplete rollout may be read; the writer's setting."""
        return self._writer.partial

    @property
    def value_rows(self) -> int:
        """Number of rows of this rollout for which the value network was evaluated; 0
        before the first read."""
        return self._writer.value_rows

    def summary(self) -> dict[str, float]:
        """Return statistics of the current rollout as a flat dict, computed once per
        rollout.

        Raises a RuntimeError if the rollout is incomplete and ``partial`` is False.
        """
        self._complete_rows()
        revision = self._storage.revision
        if self._summary is None or self._summary[0] != revision:
            writer = self._writer
            data = self._storage.get(slice(None))
            value = data.get(writer.value_key).float()
            target = data.get(writer.value_target_key).float()
            advantage = (
                target - value
                if writer.normalize_advantage
                else data.get(writer.advantage_key).float()
            )
            acts = writer.estimator.mask_of(data)
            if acts is not None:
                value, target, advantage = (x[acts] for x in (value, target, advantage))
            statistics = {
                "advantage_mean": advantage.mean(),
                "advantage_std": advantage.std(correction=0),
                "value_target_mean": target.mean(),
                "value_target_std": target.std(correction=0),
                "explained_variance": explained_variance(value, target),
                "value_rows": writer.value_rows,
            }
            numbers = {name: float(number) for name, number in statistics.items()}
            self._summary = revision, numbers
        return dict(self._summary[1])


def _part(name: str, part: Any, make: Any, **settings: Any) -> Any:
    """Return ``part``, or ``make(**settings)`` if it is None; refuse settings that
    come with ``part``."""
    settings = {
        setting: value for setting, value in settings.items() if value is not None
    }
    if part is not None and settings:
        ignored = ", ".join(map("{}=".format, settings))
        raise ValueError(
            f"{name}= has its own settings: pass {ignored} to it instead, or omit {name}="
        )
    return make(**settings) if part is None else part


def _sampler_for(
    writer: RolloutWriter,
    num_steps: int,
    batch_size: int | None,
    sequence_length: int | None = None,
    **settings: Any,
) -> MinibatchSampler | SequenceSampler:
    """Return a sampler of minibatches of rows, or of chunks of ``sequence_length``
    rows."""
    rows = MinibatchSampler(**settings)
    if sequence_length is None:
        return rows
    length = whole(1)("sequence_length", sequence_length)
    if length > num_steps:
        raise ValueError(
            f"a rollout of {num_steps} steps has no chunks of {length}: use a "
            f"sequence_length from 1 to {num_steps}"
        )
    keys: Any = {
        "done_key": writer.estimator.done_key,
        "traj_key": writer.estimator.trajectory_key,
    }
    chunks = SequenceSampler(
        rows, length, stride=length, output_layout="batch_time", **keys
    )
    if batch_size is not None and batch_size % length:
        raise ValueError(
            f"batch_size must be a multiple of sequence_length={length}, got "
            f"{batch_size}: for 32 chunks use {32 * length}"
        )
    return chunks


def _refuse_arguments(
    num_steps: int,
    num_envs: int | None,
    normalize: object,
    storage: Any,
    writer: object,
) -> None:
    """Raise an error if the sizes, the normalization or the parts of a rollout buffer
    do not fit."""
    whole(1)("num_steps", num_steps)
    optional(whole(1))("num_envs", num_envs)
    if normalize not in (None, "rollout", "minibatch"):
        raise ValueError(
            f"normalize_advantage must be None, 'rollout' or 'minibatch', got {normalize!r}"
        )
    rows = num_steps * (num_envs or 1)
    if getattr(storage, "max_size", rows) != rows:
        raise ValueError(
            f"a rollout of {num_steps} steps and {num_envs or 1} lanes needs a "
            f"storage of {rows} rows, got one of {storage.max_size}"
        )
    if writer is not None and not isinstance(writer, RolloutWriter):
        raise TypeError(f"writer must be a RolloutWriter, got {shown_kind(writer)}")
