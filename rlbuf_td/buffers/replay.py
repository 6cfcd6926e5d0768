"""The replay buffer, which combines a storage, a sampler and a writer."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from html import escape
from multiprocessing.context import get_spawning_popen
from operator import setitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, overload
from weakref import ref

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    RandomSampler,
    RoundRobinWriter,
    Sampler,
    Storage,
    TensorDictReplayBuffer,
    Writer,
)
from torchrl.data.replay_buffers import ReplayBuffer as TorchRLBuffer

from rlbuf_td.buffers import torchrl_data, waiting, writing
from rlbuf_td.buffers.arguments import (
    refuse_class,
    refuse_positional,
    refuse_unknown,
)
from rlbuf_td.buffers.flow import FlowControl, make_flow
from rlbuf_td.buffers.lane import Lane
from rlbuf_td.buffers.loop_step import LoopStep
from rlbuf_td.buffers.parts import (
    Parts,
    copied,
    fault_of_lanes,
    has_own,
    refuse_ahead,
    refuse_copies,
    refuse_writer,
    refuse_writer_of_reopened,
    trajectory_ids,
    with_missing,
)
from rlbuf_td.buffers.permission import NotAdmitted, Permission
from rlbuf_td.buffers.plan import (
    Drawn,
    GeneralPlan,
    Plan,
    plan_of,
    why_not_compiled,
    why_not_launched,
)
from rlbuf_td.buffers.step_writer import StepWriter
from rlbuf_td.buffers.waiting import Cancels
from rlbuf_td.checkpoint.buffer import (
    at_rest,
    capture,
    dump_buffer,
    load_buffer,
    refuse,
    restore,
)
from rlbuf_td.diagnostics.episode_stats import EpisodeStats
from rlbuf_td.diagnostics.health import LastDraw, health
from rlbuf_td.envs.recorder import TrajectoryNumbers
from rlbuf_td.envs.specs import schema_of, transition_schema
from rlbuf_td.envs.transition import GymnasiumStep
from rlbuf_td.kernels.dispatch import backend_of, compiled_form, untraced
from rlbuf_td.kernels.host_memory import in_dispatch_mode
from rlbuf_td.samplers import ProportionalSampler, SequenceSampler, UniformSampler
from rlbuf_td.samplers.common import (
    OwnSignature,
    refuse_errors,
    refuse_other_storage,
    refuse_stored,
    refuse_taken,
    refuse_unordered,
    reported_by,
)
from rlbuf_td.samplers.n_step import joins_steps
from rlbuf_td.samplers.priorities import Update
from rlbuf_td.samplers.prioritized import Prioritized, Reduction
from rlbuf_td.storages import PackedStorage, SchemaError, torchrl_parts
from rlbuf_td.storages.checks import (
    State,
    require,
    require_packed,
    shown_kind,
    state_of,
    usable_device,
    whole,
)
from rlbuf_td.storages.episodes import TRAJ_KEY
from rlbuf_td.storages.indexing import (
    Info,
    device_of,
    first_of_row,
    flat_rows,
    inner_dims,
    one_a_row,
    put_back_,
    row_count,
    written_rows,
)
from rlbuf_td.storages.keys import as_tuple, is_key, nested_key, optional_key
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.listeners import Listener, Stage
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.memory import PRIORITY_FILE
from rlbuf_td.storages.numbers import SharedCounter, SharedNumbers
from rlbuf_td.storages.processes import pickled_generator, unpickled_generator
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.row_class import unwrap, wrap
from rlbuf_td.storages.schema import refuse_index, refuse_rounding, reshaped, walk
from rlbuf_td.storages.staged_step import StagedStep
from rlbuf_td.storages.write_plan import CompiledWrites
from rlbuf_td.storages.writes import Record, Write, refuse_shape, stacked
from rlbuf_td.writers import RingWriter
from rlbuf_td.writers.common import NO_GENERATIONS, TimeWriter
from rlbuf_td.writers.rollout import RolloutWriter

if TYPE_CHECKING:
    from os import PathLike

    from typing_extensions import Self

    from rlbuf_td.envs.specs import AnySpace, Extras, Groups

_THEIRS = "use TorchRL's TensorDictReplayBuffer over it, which takes the samplers of this package, too"
_PRIORITIES_OF_REOPENED = (
    "rows were reopened without a priority, and have that of new rows: their write was killed, "
    "a buffer without a prioritized sampler wrote them, they were edited, or priorities.bin is missing or damaged"
)
_NO_SIZE = "batch_size not specified: pass it to the buffer or to sample"
_MOST_SIZES = 8  # batch sizes whose plans are kept


class _StatsRecorder(NamedTuple):
    """How the compiled writes of one plan count their rows in episode statistics."""

    plan: ref[CompiledWrites]  # weak: a plan holds the rows
    stats: EpisodeStats | None
    record: Callable[..., None] | None  # None: rows are counted before the write


class Ahead(NamedTuple):
    """A batch that was drawn ahead."""

    drawn: Drawn
    written: np.ndarray  # how many rows had been written to each lane, ``[E]``


class ReplayBuffer(TensorDictReplayBuffer, Listener):
    """A replay buffer for TorchRL: stores transitions and samples batches.

    Takes the keywords of TorchRL's ``TensorDictReplayBuffer``, except ``checkpointer``.
    Sampling is fast with a sampler of this package, or another sampler with a ``draw``
    method. It is slower with samplers of TorchRL's, ``collate_fn`` and
    ``sample_unit``.

    **Over another storage** than a :class:`PackedStorage`,
    ``ReplayBuffer(storage=...)`` returns TorchRL's ``TensorDictReplayBuffer``, and
    refuses the arguments of this package. The samplers that need no episodes work
    (uniform, proportional, rank, recency, minibatch).

    Args:
        storage: keeps the transitions, default ``PackedStorage(1_000)``. If the storage
            already holds rows, a :class:`RingWriter` continues after the newest row.
        sampler: chooses the rows of a batch, default :class:`UniformSampler`.
        writer: chooses where new transitions are stored, default :class:`RingWriter`.
        priority_key: the key of TD errors in a batch, default ``"td_error"``.
        stats: an :class:`EpisodeStats` that records every write, before any transform.
        lane_key: the key of the lanes in written data, with a storage ``[T, E]``: one
            integer per transition, such as the ``env_id`` of asynchronous vector
            environments. Writes then work as with ``extend(..., lanes=...)``; data of
            any batch size, such as ``[E, T]`` of a collector, is flattened. Raises a
            TypeError if storage or writer have no lanes, and (when writing) a
            ValueError if ``lanes=`` contradicts the data.
        include_info: whether batches contain the sampler's report (index, weights,
            ...), default ``True``.
        device: the device to which batches are copied from host memory; transforms run
            on this device. TD errors may be there, too.
        prefetch: k, the number of batches that TorchRL's threads draw, copy and
            transform ahead, in any order. What would only be drawn, by a sampler of
            this package without transforms, ``pin_memory`` and ``device``, is not drawn
            ahead, and neither are batches of another size than ``batch_size``, or with
            ``wait=True``. :meth:`empty`, saving, a load, a new transform, or a change
            of storage or sampler drops the batches drawn ahead. In a forked process,
            nothing is drawn ahead. Refused with flow control, ``max_age``, a
            :class:`MinibatchSampler`, a :class:`QueueSampler`, and a
            :class:`RolloutWriter`.
        samples_per_insert: target ratio of sampled rows to written rows. A write that
            would exceed ``tolerance`` waits, and warns after 5 seconds. If a batch
            would exceed it, :meth:`sample` raises a RuntimeError, or waits if
            ``wait=True``. In one thread, sample after each write:
            ``while rb.can_sample(): batch = rb.sample()``.
        min_size: number of rows that must be written before the first batch, and again
            after :meth:`empty`.
        tolerance: largest deviation from the target, in sampled rows; see
            :class:`~rlbuf_td.buffers.flow.FlowControl`.
        **kwargs: other keywords of ``TensorDictReplayBuffer``: ``batch_size``,
            ``transform``, ``pin_memory``, ``generator``, ``dim_extend``,
            ``sample_unit``, ``collate_fn``, ``shared``, ...

    Unlike in TorchRL, the batch that transforms receive already contains the sampler's
    report. If a transform removes an entry of the report, the buffer puts the entry
    back. If a row has several TD errors, their magnitudes are reduced to one; TorchRL
    reduces the signed errors. Updating priorities from a batch without TD errors raises
    a KeyError; TorchRL sets the default priority. Rows with an entry that the report
    has, too, are refused (:class:`SchemaError`).

    Raises:
        TypeError: an argument of this package, or a sampler that needs episodes, is
            given with another storage than a :class:`PackedStorage`.
        NotImplementedError: ``checkpointer`` is given.

    Cost: see the storage, sampler and writer; ``python -m tests.benchmarks.bench``, in
    a clone, measures whole calls.

    Example:
        >>> from tensordict import TensorDict
        >>> from rlbuf_td import PackedStorage, ProportionalSampler
        >>> rb = ReplayBuffer(storage=PackedStorage(100), sampler=ProportionalSampler(100), batch_size=2)
        >>> data = TensorDict({"observation": torch.zeros(5, 3), "next": {"reward": torch.ones(5, 1)}}, [5])
        >>> rb.extend(data)
        tensor([0, 1, 2, 3, 4])
        >>> batch = rb.sample()
        >>> sorted(batch.keys())
        ['index', 'next', 'observation', 'priority_weight', 'sampled_at']
        >>> batch["td_error"] = torch.rand(2)
        >>> rb.update_tensordict_priority(batch)
    """

    __signature__ = OwnSignature()
    # made for an environment: rows that are shared get trajectory ids
    _has_environment = False
    #: The parts that this class makes, and which nobody can pass.
    makes_parts: frozenset[str] = frozenset()
    _storage: PackedStorage
    _dim_extend: int
    if TYPE_CHECKING:  # TorchRL's properties have no types

        @property
        def storage(self) -> PackedStorage: ...  # pyrefly: ignore [bad-override]

    def __new__(cls, *args: Any, storage: Any = None, **kwargs: Any) -> Any:
        """Return a buffer of TorchRL's if ``storage`` is another one than a
        :class:`PackedStorage`."""
        refuse_positional(cls, args)
        if (
            not isinstance(storage, Storage)
            or isinstance(storage, PackedStorage)
            or cls is not ReplayBuffer
        ):
            return super().__new__(cls)
        options = inspect.signature(ReplayBuffer.__init__).parameters.keys() - {
            "priority_key",
            "kwargs",
        }
        refused = [f"{name}=" for name in kwargs if name in options]
        if refused:
            require_packed(storage, ", ".join(refused), _THEIRS)
        buffer = TensorDictReplayBuffer(storage=storage, **kwargs)
        refuse_other_storage(buffer.sampler, storage)
        refuse_unordered(buffer.sampler, storage, buffer.writer)
        return buffer

    def __init__(
        self,
        *,
        priority_key: NestedKey = "td_error",
        stats: EpisodeStats | None = None,
        lane_key: NestedKey | None = None,
        include_info: bool = True,
        device: torch.device | str | None = None,
        samples_per_insert: float | None = None,
        min_size: int = 0,
        tolerance: float | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_unknown(type(self), kwargs)
        for name in ("storage", "sampler", "writer"):
            refuse_class(name, kwargs.get(name))
        if stats is not None and not isinstance(stats, EpisodeStats):
            raise TypeError(f"stats= takes an EpisodeStats, got {shown_kind(stats)}")
        if kwargs.get("batch_size") is not None:
            kwargs["batch_size"] = whole(0)("batch_size", kwargs["batch_size"])
        self.parts: Parts = None  # pyrefly: ignore [bad-assignment]  # until initialized
        # the name ``stats`` is a method of TorchRL's buffers
        self.episode_stats = stats
        # of a :class:`LastDraw`, which would take longer to make
        self._last_draw: tuple[Any, ...] | None = None
        self.stale_updates = SharedCounter()
        # the numbers of batches and rows that `sample` has returned
        self.returned = SharedNumbers("q", [0, 0])
        self.include_info = include_info
        self.lane_key = optional_key(lane_key)
        self.plans: dict[int, Plan] = {}  # how batches are made, by size
        # the memory of the steps of `add_step`
        self._loop_steps = threading.local()
        self._recorder: _StatsRecorder | None = None
        self.flow = make_flow(
            samples_per_insert, min_size, tolerance, kwargs.get("batch_size")
        )
        self.batch_device = None if device is None else usable_device(device)
        # which needs TorchRL's default
        consumes = kwargs.get("consume_after_n_samples") is not None
        defaults = {
            "storage": partial(PackedStorage, 1_000),
            "sampler": RandomSampler if consumes else UniformSampler,
            "writer": RingWriter,
        }
        kwargs |= {
            part: default
            for part, default in defaults.items()
            if kwargs.get(part) is None
        }
        super().__init__(priority_key=nested_key(priority_key), **kwargs)  # pyrefly: ignore [bad-argument-type]
        # TorchRL would warn of sample(n) with another n than batch_size
        self._warned_batch_size_conflict = True

    # -- constructors

    @classmethod
    def from_env(
        cls,
        env: object,
        capacity: int,
        *,
        extras: Extras = None,
        group_map: Groups = None,
        **kwargs: Any,
    ) -> Self:
        """Return a buffer for the transitions of an environment.

        Written data must have the environment's keys, dtypes and shapes. The first
        write may add keys, such as those of a policy's outputs. In RAM, rows take
        physical memory only after they are written.

        If the rows are shared before the first write, or made with ``reopen``, they get
        the trajectory ids ``("collector", "traj_ids")`` that recorders and collectors
        write. Every write must then have ids, because the rows of several processes
        follow each other. ``from_schema(schema_of(env), ...)`` adds none.

        Args:
            env: a TorchRL or Gymnasium environment, single or vectorised; an
                environment of PettingZoo; or a list of E parallel ones. Agents that
                take turns get a lane each, see :class:`AECRecorder`.
            capacity: the number of transitions, rounded up to a multiple of the number
                of environments or lanes. A :class:`RolloutBuffer` instead takes the
                number of time steps.
            extras: further entries of a transition, see :func:`~rlbuf_td.schema_of`. If
                the rows are shared before the first write, or made with ``reopen``,
                ``extras`` must contain all further entries, because that write cannot
                add entries.
            group_map: the groups of a PettingZoo environment's agents, see
                :class:`PettingZooRecorder`.
            **kwargs: keywords of :meth:`from_schema`.

        Raises:
            SchemaError: an observation or action has no fixed size in bytes, as in
                Gymnasium's ``Text`` space.
            TypeError: ``env`` is not an environment.

        Example:
            >>> import gymnasium
            >>> from rlbuf_td import ReplayBuffer
            >>> rb = ReplayBuffer.from_env(gymnasium.make_vec("CartPole-v1", num_envs=3), 300, batch_size=8)
            >>> rb.storage.max_size, len(rb)
            (300, 0)
        """
        return cls._for_environment(
            schema_of(env, extras=extras, group_map=group_map), capacity, kwargs
        )

    @classmethod
    def from_spaces(
        cls,
        observation_space: AnySpace,
        action_space: AnySpace,
        capacity: int,
        *,
        num_envs: int | None = None,
        extras: Extras = None,
        **kwargs: Any,
    ) -> Self:
        """Return a buffer for the transitions of an environment with these Gymnasium
        spaces or TorchRL specs.

        Args:
            observation_space: the space or spec of one environment's observation.
            action_space: the space or spec of one environment's action.
            capacity: the number of transitions, see :meth:`from_env`.
            num_envs: E, the number of environments, for rows ``[T, E]``; ``None`` gives
                rows ``[T]``.
            extras: further entries, see :meth:`from_env`. For example,
                ``extras={"next": {"reward": numpy.zeros(1)}}`` stores float64 rewards
                of a single environment; for E environments, the array has the shape
                ``(E, 1)``.
            **kwargs: keywords of :meth:`from_schema`.

        Raises:
            SchemaError: values of a space have no fixed size in bytes, as in
                Gymnasium's ``Text`` space.
            TypeError: an argument is neither a space nor a spec.

        Example:
            >>> from gymnasium.spaces import Box, Dict, Discrete
            >>> from rlbuf_td import ReplayBuffer
            >>> space = Dict({"camera": Box(0, 255, (8, 8, 3), "uint8"), "body": Dict({"speed": Box(-1, 1, (2,))})})
            >>> rb = ReplayBuffer.from_spaces(space, Discrete(4), 100, num_envs=2)
            >>> rb.storage.layout.row_bytes, tuple(rb.storage.lanes)
            (416, (2,))
        """
        schema = transition_schema(observation_space, action_space, num_envs)
        return cls._for_environment(schema_of(schema, extras=extras), capacity, kwargs)

    @classmethod
    def _for_environment(
        cls, schema: TensorDictBase, capacity: int, kwargs: dict[str, Any]
    ) -> Self:
        """Return a buffer from ``schema``, whose rows get trajectory ids when they are
        shared."""
        if kwargs.get("shared") or kwargs.get("reopen"):
            schema = with_missing(schema, trajectory_ids(schema.batch_size))
        rb = cls.from_schema(schema, capacity, **kwargs)
        rb._has_environment = True
        return rb

    @classmethod
    def from_schema(
        cls,
        schema: TensorDictBase,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        storing_device: torch.device | str | None = None,
        scratch_dir: str | Path | None = None,
        reopen: bool = False,
        shared: bool = False,
        share_next: bool | Sequence[NestedKey] = False,
        frames: Mapping[NestedKey, int | tuple[int, int]] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Return a buffer for transitions with the keys, dtypes and shapes of an
        example.

        Args:
            schema: an example of a step, with batch size ``[]``, or ``[E]`` for E
                environments; see :func:`~rlbuf_td.schema_of`.
            capacity: the number of transitions, see :meth:`from_env`.
            device: the device of the batches, and also of the rows unless
                ``storing_device`` is given.
            storing_device: the device of the rows.
            scratch_dir: see :class:`PackedStorage`.
            reopen: see :class:`PackedStorage`; rows that an earlier process has left
                must have the schema's entries.
            shared: see :class:`PackedStorage`.
            share_next: see :class:`PackedStorage`.
            frames: see :class:`PackedStorage`.
            **kwargs: keywords of the buffer's class: ``sampler``, ``batch_size``,
                ``transform``, ...

        Raises:
            SchemaError: an entry of the schema has no fixed size in bytes.
            ValueError: ``storage`` is given.

        Example:
            >>> from tensordict import TensorDict
            >>> from rlbuf_td import ReplayBuffer
            >>> transition = TensorDict({"observation": torch.zeros(3), "next": {"reward": torch.zeros(1)}})
            >>> ReplayBuffer.from_schema(transition, 100).storage.is_reserved
            True
        """
        if "storage" in kwargs:
            remedy = "pass device, scratch_dir, shared, ... instead, or make the buffer with its storage and extend it"
            raise ValueError(
                f"the storage is made for the transitions, got storage={kwargs['storage']!r}: {remedy}"
            )
        if storing_device is not None:
            device, kwargs["device"] = storing_device, device
        rows: dict[str, Any] = {
            "scratch_dir": scratch_dir,
            "reopen": reopen,
            "shared": shared,
        }
        rows |= {"share_next": share_next, "frames": frames, "device": device}
        storage = PackedStorage(capacity, ndim=1 + schema.ndim, **rows)
        try:
            storage.reserve(schema)
            return cls(storage=storage, **kwargs)
        except BaseException:
            # an error keeps it alive, and it would keep its folder locked
            storage.close()
            raise

    @classmethod
    def from_torchrl(
        cls,
        rb: TensorDictReplayBuffer | str | PathLike[str],
        capacity: int | None = None,
        *,
        exclude: NestedKey | Sequence[NestedKey] = (),
        trajectory_key: NestedKey | None = "episode",
        **kwargs: Any,
    ) -> Self:
        """Return a buffer with the rows of a TorchRL buffer (a data set of
        ``torchrl.data.datasets``, for example).

        The rows are copied without transforms, oldest first if ``rb`` has a round-robin
        writer. With ``scratch_dir``, the rows may exceed RAM. If both buffers are
        prioritized, the rows keep the magnitudes of their TD errors.

        TorchRL's ``LeRobotExperienceReplay`` reads LeRobot data sets (needs
        ``torchrl[vla]``). In LeRobot data, exclude instructions (strings) and videos:
        ``exclude=["language_instruction", ("observation", "image", "camera")]``.

        Args:
            rb: a replay buffer of TorchRL whose rows are TensorDicts, or the folder
                that its ``dumps`` wrote (with the default checkpointer); the import
                does not change its rows. As after :meth:`loads`, trajectories from a
                folder that have ids end with the last row.
            capacity: the capacity of the new buffer in transitions, default: the
                capacity of ``rb``.
            exclude: a list of keys to omit, such as the keys of strings, or one key.
            trajectory_key: the key of episode numbers in ``rb``. The import renames
                this key to ``("collector", "traj_ids")``, unless the rows already have
                that entry.
            **kwargs: keywords of :meth:`from_schema`: ``sampler``, ``batch_size``
                (default: that of ``rb``), ...

        Raises:
            RuntimeError: ``rb`` is empty.
            TypeError: ``rb`` is not a replay buffer, or its rows are not TensorDicts.
            CheckpointError: the folder ``rb`` holds no rows that TorchRL's default
                checkpointer wrote.
            KeyError: the rows have no entry at a key in ``exclude``.
            ValueError: ``rb`` has more rows than ``capacity``, the rows are not in time
                order, which the ``sampler`` needs, or ``storage`` is given.
            SchemaError: an entry does not consist of numbers, and is not excluded.
            MemoryError: the rows are larger than RAM, and no ``scratch_dir`` is given.

        Cost: a read and a write of each row.

        Example:
            >>> from rlbuf_td import ReplayBuffer
            >>> from tensordict import TensorDict
            >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
            >>> theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
            >>> _ = theirs.extend(TensorDict({"x": torch.arange(6)}, [6]))
            >>> rb = ReplayBuffer.from_torchrl(theirs)
            >>> rb.storage["x"], rb.batch_size
            (tensor([2, 3, 4, 5]), 2)
        """
        keys: Any = {"exclude": exclude, "trajectory_key": trajectory_key}
        return torchrl_data.import_torchrl(cls, rb, capacity, **keys, **kwargs)

    # -- initialization

    def _init(self) -> None:
        super()._init()
        self._begin()

    def _maybe_make_storage(self, storage: Any, compilable: bool) -> Storage:
        made = super()._maybe_make_storage(storage, compilable)
        return require_packed(made, f"a {type(self).__name__}", _THEIRS)

    def _begin(self) -> Parts:
        """Connect the components; if they are refused, other buffers over the storage
        go on without this one.

        The storage must know this buffer before priorities are connected, and
        priorities before they are shared.
        """
        self._storage.attach(self)
        try:
            if self._storage.reopened:
                refuse_writer_of_reopened(self._writer)
            self._refuse_without_lanes(self._storage, self._writer)
            self._connect()
            if self.shared or self._storage.shared:
                self.share()
        except Exception:
            self.parts = None  # pyrefly: ignore [bad-assignment]
            self._storage.detach(self)
            raise
        return self.parts

    def _initialize(self) -> Parts:
        """Return the components of the buffer; initialize the buffer if this has not
        happened yet."""
        if not self._initialized:
            self._init()
        return self.parts or self._begin()

    def _get_collate_fn(self, collate_fn: Callable[..., object] | None) -> None:
        self._has_collate_fn = collate_fn is not None
        super()._get_collate_fn(collate_fn)

    def _refuse_second_priorities(
        self, storage: PackedStorage, sampler: Sampler
    ) -> None:
        """Raise a ValueError if another buffer keeps its priorities in the file beside
        the rows of ``storage``."""
        prioritized: Any = getattr(sampler, "innermost", sampler)
        if not (isinstance(prioritized, Prioritized) and storage.reopen):
            return
        for other in torchrl_parts.listeners_of(storage):
            theirs = getattr(getattr(other, "parts", None), "prioritized", None)
            if (
                other is not self
                and theirs is not None
                and theirs is not prioritized
                and theirs.priorities.file is not None
            ):
                raise ValueError(
                    f"another buffer over this storage keeps its priorities in {storage.scratch_dir}/{PRIORITY_FILE}, "
                    "and two buffers would overwrite each other's: use one buffer, or a sampler without priorities "
                    "here, or call shutdown() of the other buffer first"
                )

    def _connect(self, *, default_priorities: bool = False) -> Parts:
        """Update ``parts``; with ``default_priorities``, rows without a priority get
        the priority of new rows."""
        self._refuse_second_priorities(self._storage, self._sampler)
        refuse_ahead(self, self._sampler, self._writer)
        self.plans, self._storage.write_plan = {}, None
        self._loop_steps = threading.local()
        transforms = getattr(self._transform, "transforms", ())
        is_general = self._sample_unit is not None or self._has_collate_fn
        parts = Parts.of(
            self._storage, self._sampler, self._writer, transforms, is_general
        )
        if self._copies_batches:
            refuse_copies(parts)
        self.parts = parts
        if self.flow is not None:
            self.flow.count_from(self._storage)
        if parts.prioritized is not None:
            parts.prioritized.priorities.move_to(parts.storage)
            missing = (
                0
                if self._service_shutdown
                else parts.prioritized.priorities.reopen(parts.storage)
            )
            if missing:
                warnings.warn(
                    f"{missing:,} of {row_count(parts.storage):,} {_PRIORITIES_OF_REOPENED}",
                    stacklevel=3,
                )
            if default_priorities:
                parts.prioritized.priorities.admit(parts.storage)
        return parts

    # -- samples

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        *,
        wait: bool = False,
        timeout: float | None = None,
    ) -> TensorDictBase: ...
    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        wait: bool = False,
        timeout: float | None = None,
        cancel_event: Cancels | None = None,
    ) -> Any: ...
    @untraced("draws depend on numbers that no graph knows")
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        wait: bool = False,
        timeout: float | None = None,
        cancel_event: Cancels | None = None,
    ) -> Any:
        """Return a batch ``[B]`` in fresh memory, as a TensorDict; ``batch.numpy()``
        returns a dict of NumPy arrays.

        Args:
            batch_size: B, default: the ``batch_size`` of the buffer.
            return_info: return ``(batch, info)``, where ``info`` is the sampler's
                report.
            include_info: whether the batch contains the sampler's report, default: the
                setting of the buffer.
            wait: wait until the sampler can draw rows and flow control admits the
                batch.
            timeout: longest wait in seconds; ``None`` waits forever.
            cancel_event: an object such as a ``threading.Event``; the wait ends when
                its ``is_set()`` returns True.

        Raises:
            ValueError: the batch size is negative or no whole number, ``timeout`` is
                negative or NaN; or the batch would be waited for forever, because the
                storage is too small for it.
            RuntimeError: no batch size is given, or the wait was cancelled. Without
                ``wait``, also: the buffer is empty, or flow control does not admit the
                batch.
            TimeoutError: the wait took longer than ``timeout``; the error says what was
                missing.
            ShutDown: the buffer has been shut down.
        """
        include_info = self.include_info if include_info is None else include_info
        size = self._batch_size if batch_size is None else batch_size
        if type(size) is not int or size not in self.plans:
            size = self._checked_size(size)
        if wait or self.flow is not None:
            batch, info = self._drawn_when_admitted(size, wait, timeout, cancel_event)
        elif self._prefetch and size == self._batch_size and not self._returns_as_drawn:
            batch, info = self._drawn_ahead(size)
        else:
            is_plain = include_info and not return_info
            batch, info, is_final = self._draw(size, is_plain=is_plain)
            if is_final:
                return batch
            batch, info = self._finish(batch, info)
        row_class = self._storage.row_class
        if row_class is not None or not include_info:
            batch = self.parts.without_report(batch, info)
        if row_class is not None:
            batch = wrap(batch, row_class)
        index = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
        with self._replay_lock:
            self._count_returned(index.numel())
        return (batch, info) if return_info else batch

    def _count_returned(self, rows: int) -> None:
        """Count a batch for :meth:`stats`; the caller holds the lock."""
        counts = self.returned.values
        # both or none: Python handles Ctrl-C at calls and jumps only
        counts[0], counts[1] = counts[0] + 1, counts[1] + rows

    def _checked_size(self, batch_size: object) -> int:
        """Return the size of a batch as an int; raise an error if it is none, or the
        buffer has been shut down."""
        self._refuse_shut_down()
        self._initialize()
        if batch_size is None:
            raise RuntimeError(_NO_SIZE)
        return whole(0)("batch_size", batch_size)

    def _drawn_when_admitted(
        self,
        size: int,
        wait: bool,
        timeout: float | None,
        cancel_event: Cancels | None,
    ) -> Any:
        """Draw and finish a batch as soon as a :class:`Permission` admits it; see
        :meth:`sample`."""
        permission = Permission(self, size, waits=wait)
        for _ in waiting.attempts(timeout, permission.why_not, cancel_event):
            try:
                batch, report, _ = self._draw(size, permission)
                return self._finish(batch, report)
            except NotAdmitted:
                if not wait:
                    raise permission.refusal() from None
            except BaseException:
                permission.take_back()
                raise

    def _why_no_batch(self, rows: int) -> str:
        """Return in one sentence why there is no batch of ``rows`` rows now."""
        stored = len(self)
        flow = self.flow
        if flow is not None and not (stored and flow.admits_sample(rows)):
            return flow.why_no_batch(rows)
        if not stored:
            return "the buffer is empty"
        return f"{type(self.sampler).__name__} cannot draw a batch of {rows} rows from the {stored} stored ones yet"

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether :meth:`sample` can return a batch now.

        Args:
            batch_size: B, default: the ``batch_size`` of the buffer.

        Raises:
            RuntimeError: no batch size is given.
            ValueError: the storage is too small for such a batch.
        """
        size = self._batch_size if batch_size is None else batch_size
        with self._replay_lock:
            if self.flow is not None and size is not None:
                self.flow.agree(row_count(self._storage))
                if not self.flow.admits_sample(size):
                    return False
            return super().can_sample(batch_size)

    def wait_until_sampleable(
        self,
        min_items: int | None = None,
        timeout: float | None = None,
        cancel_event: Cancels | None = None,
    ) -> bool:
        """Wait until :meth:`can_sample` returns True; return False after a timeout or a
        cancellation.

        Args:
            min_items: B, the number of rows of a batch, default: the ``batch_size`` of
                the buffer.
            timeout: longest wait in seconds, at least 0; ``None`` waits forever.
            cancel_event: an object such as a ``threading.Event``; the wait ends when
                its ``is_set()`` returns True.

        Raises:
            ValueError: ``min_items`` is below 1, ``timeout`` is negative, or the storage
                is too small for such a batch.
            RuntimeError: no batch size is given.
            ShutDown: the buffer has been shut down.

        Cost: the buffer's lock once per millisecond; writes do not notify waiting
        threads or processes.
        """
        size = None if min_items is None else whole(1)("min_items", min_items)
        timeout = waiting.seconds(timeout)

        def can_sample() -> bool:
            self._refuse_shut_down()
            return self.can_sample(size)

        try:
            with waiting.admitted(
                can_sample, self._replay_lock, str, timeout, cancel_event=cancel_event
            ):
                return True
        except (TimeoutError, waiting.Cancelled):
            return False

    def stats(self) -> dict[str, int | float | bool]:
        """Return numbers for a monitor: ``size``, ``capacity``, ``utilization``,
        ``write_count``, ``sample_calls``, ``samples_returned``, ...

        ``sample_calls`` and ``samples_returned`` count the batches and the rows that
        :meth:`sample` has returned. See TorchRL's ``ReplayBuffer.stats``;
        :meth:`health` has further numbers.
        """
        calls, rows = self.returned
        return super().stats() | {"sample_calls": calls, "samples_returned": rows}

    @property
    def _returns_as_drawn(self) -> bool:
        """Whether batches are returned as drawn: not transformed, pinned, copied, or of
        another class."""
        parts = self.parts
        transforms = torchrl_parts.modules_of(parts.transforms)
        if transforms or self._pin_memory or self._copies_batches:
            return False
        if parts.is_general or parts.gives_windows or self._service_shutdown:
            return False
        return parts.storage.row_class is None

    @property
    def compiled(self) -> str:
        """The calls that compiled code executes, and in one line why others are not
        compiled.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> rb = ReplayBuffer(batch_size=2)
            >>> for _ in range(2):
            ...     _ = rb.extend(TensorDict({"x": torch.zeros(4)}, [4])), rb.sample()
            >>> rb.compiled
            'add, extend, sample'
        """
        calls = self._compiled_calls()
        compiled = [name for name, reason in calls.items() if not reason]
        others = [f"not {name}: {reason}" for name, reason in calls.items() if reason]
        return "; ".join([*([", ".join(compiled)] if compiled else []), *others])

    def _compiled_calls(self) -> dict[str, str]:
        """Return the calls that compiled code can execute; for each, why it does not
        yet, or "" if it does."""
        plan = self.plans.get(
            self._batch_size or 0, next(iter(self.plans.values()), None)
        )
        calls = {"sample": "no call yet" if plan is None else plan.reason}
        prioritized = self.parts.prioritized
        storage = self._storage
        if prioritized is not None:
            calls["update_tensordict_priority"] = (
                why_not_launched(prioritized, storage, "updates priorities")
                if storage.is_launched
                else why_not_compiled(storage)
            )
        plan = self._storage.write_plan
        write = "no call yet" if plan is None else plan.reason
        if not isinstance(self._writer, TimeWriter):
            write = f"{type(self._writer).__name__} has no compiled write"
        return {"add, extend": write} | calls

    def _draw(
        self,
        size: int,
        permission: Permission | None = None,
        *,
        is_plain: bool = False,
    ) -> tuple[Any, Info, bool]:
        """Draw a batch; return it, untransformed, the sampler's report, and whether
        :meth:`sample` returns this batch as it is, which is then counted.

        Args:
            size: the number of rows.
            permission: is asked for in the locked step that draws.
            is_plain: whether :meth:`sample` returns a batch with its report.
        """
        with self._storage.lock:
            if permission is not None:
                permission.ask()
            if self._storage.has_estimates:
                self._complete_rows()
            plan = self.plans.get(size)
            if (
                plan is None
                or plan.epoch != self._storage.epoch
                or plan.mode != in_dispatch_mode()
            ):
                plan = self._plan(size)
            batch, report = plan.sample(size)
            written = plan.ring.numbers[plan.ring.lanes]  # of the first lane
            self._last_draw = report, written
            is_final = is_plain and plan.is_final and not plan.transforms
            if is_final:
                self._count_returned(size if plan.is_exact else batch.batch_size[0])
        return batch, report, is_final

    def _complete_rows(self) -> None:
        """Compute what a writer adds to the rows, before they are drawn."""
        self._storage.complete()

    @property
    def last_draw(self) -> LastDraw | None:
        """The rows of the last batch, for :meth:`health`."""
        return None if self._last_draw is None else LastDraw(*self._last_draw)

    def _plan(self, size: int) -> Plan:
        """Choose how batches of ``size`` rows are made."""
        parts = self.parts
        # another buffer over the storage may have come since, with its writer
        refuse_unordered(parts.sampler, parts.storage)
        if parts.is_general:
            plan: Plan = GeneralPlan(
                parts.storage,
                parts.sampler,
                self._sample_unit,
                self._collate_fn,
                self.include_info,
            )
        else:
            plan = plan_of(parts.storage, parts.sampler, size)
        plan.is_final = self._returns_as_drawn
        plan.transforms = torchrl_parts.modules_of(parts.transforms)
        # the first write can change the plan
        if len(self._storage) and not self._service_shutdown:
            if len(self.plans) == _MOST_SIZES:
                self.plans.clear()
            self.plans[size] = plan
        return plan

    def _drawn_ahead(self, size: int) -> Drawn:
        """Return a batch that was drawn ahead and finished; draw others if all its rows
        are gone, because any process has replaced them."""
        sample = super(TensorDictReplayBuffer, self).sample
        with self._futures_lock:
            ahead: Ahead = sample(size)
            if self._storage.ring.are_gone(ahead.written):
                self._clear_prefetch_queue_locked()
                ahead = sample(size)
        return ahead.drawn

    def _sample(self, batch_size: int) -> tuple[Ahead, None]:
        """Draw and finish a batch; TorchRL's ``sample`` and its threads call this
        method, and return the first of the pair."""
        with self._storage.lock:
            batch, report, _ = self._draw(batch_size)
            written = self._storage.ring.written.copy()
        return Ahead(self._finish(batch, report), written), None

    def _finish(self, batch: Any, report: Info) -> Drawn:
        """Give a drawn batch and its report the shape and the index of TorchRL's
        samplers, copy them to ``device``, transform the batch, and pin its memory if the
        buffer was made with ``pin_memory``."""
        info = {**report}  # `_last_draw` keeps the other one
        index = info["index"]
        if self._storage.ndim > 1 and isinstance(index, torch.Tensor):
            info["index"] = index.unbind(-1)  # pyrefly: ignore [unsupported-operation]
        if self.parts.gives_windows:
            batch, info = self.parts.sampler.lay_out(batch, info)
        if self._copies_batches:
            batch, info = copied(batch, info, self.batch_device)
        batch = self._transformed(batch, info)
        if self._pin_memory and batch.device is not None and batch.device.type == "cpu":
            batch = batch.pin_memory()
        return batch, info

    def _transformed(
        self, batch: TensorDictBase, report: Iterable[NestedKey] = ()
    ) -> TensorDictBase:
        """Transform a batch; put back entries whose keys are in ``report`` if a
        transform has removed them."""
        if not len(self.parts.transforms):
            return batch
        known = {key: batch.get(key) for key in report}
        with _set_dispatch_td_nn_modules(True):
            batch = self._transform(batch)
        if isinstance(batch, TensorDictBase):
            put_back_(batch, known)
        return batch

    @property
    def _copies_batches(self) -> bool:
        """Whether batches are copied to ``device``: not if ``device`` is None, or is
        the GPU that holds the rows."""
        device = self.batch_device
        if device is None or device.type == "cpu":
            return device is not None
        rows = device_of(self._storage)
        return device.type != rows.type or device.index not in (None, rows.index)

    # -- writes

    def add(self, data: Any, *columns: object) -> int | torch.Tensor | None:
        """Write one transition, or with ``ndim > 1`` one time step of all environments;
        return its index, or None if the writer leaves the transition out.

        ``data`` is a TensorDict, a tensorclass or a tensor. If the first write was not
        a TensorDict, batches are objects of its class, without the sampler's report,
        which ``sample(return_info=True)`` returns.

        Raises:
            TypeError: there are further arguments: :meth:`add_step` takes the columns
                of a step, by name.
            SchemaError: the data does not match the rows; nothing has changed.
            ValueError: a TD error in the data is NaN or infinite, or flow control can
                never admit the write.
            ShutDown: the buffer has been shut down; nothing has changed.
        """
        if columns:
            writing.refuse_columns(data, *columns)
        try:
            return self._write(Write(data, True), update_priority=True)
        except SchemaError as error:
            if getattr(data, "ndim", None) != self._storage.ndim:
                raise
            raise SchemaError(
                f"{error.args[0]}. If these are several transitions, use extend"
            ) from None

    def add_step(
        self,
        *,
        observation: Any,
        action: Any,
        reward: Any,
        next_observation: Any,
        terminated: Any,
        truncated: Any,
        lane: int | None = None,
        **extras: Any,
    ) -> None:
        """Write one step of Gymnasium environments, given as arrays and numbers.

        The rows are those of :func:`~rlbuf_td.make_transition` and :meth:`add`, but no
        TensorDict is made, and a single compiled call writes the step. NumPy's
        "same_kind" casts, such as float64 to the float32 of the rows, are allowed
        unless they change a whole number. So are casts that change no number, such as
        from 0 and 1 to bool. In a buffer without :meth:`from_env`, the first step fixes
        dtypes and shapes. Rewards are then float32; Python floats, and lists of them,
        have torch's default dtype, as in ``torch.tensor``.

        Args:
            observation: the observation before the step: an array, a number or a
                tensor, or nested dicts and tuples of these, as spaces nest. With
                ``ndim=2``, arrays ``[E, ...]``.
            action: the action, in the same forms.
            reward: a number, or an array ``[E]``.
            next_observation: the observation after the step. With same-step autoreset,
                pass ``final_obs`` when an episode ends. With next-step autoreset, which
                ``gymnasium.make_vec`` has by default, the step after an episode's end
                only resets: write the steps of the other environments one by one, with
                ``lane=``, or use a :class:`~rlbuf_td.GymnasiumRecorder`, which leaves
                such steps out.
            terminated: a bool, or bools ``[E]``.
            truncated: a bool, or bools ``[E]``.
            lane: with ``ndim=2``, the lane to which the step of one environment
                belongs, as in :meth:`extend`.
            **extras: more entries, such as a policy's outputs; those of a dict ``next``
                go to ``"next"``. Each step has the same entries.

        Raises:
            SchemaError: a value does not match the rows, or these have ``ndim`` above
                2; nothing has changed.
            ValueError, IndexError, TypeError, ShutDown: as in :meth:`extend`.

        Cost: O(bytes of the step). The step becomes a TensorDict, and costs as much as
        :meth:`add`, with transforms, statistics, flow control, rows on a GPU, or a
        writer other than :class:`RingWriter` and :class:`RolloutWriter`.

        Example:
            >>> import gymnasium
            >>> env, rb = gymnasium.make("CartPole-v1"), ReplayBuffer(batch_size=4)
            >>> observation, _ = env.reset(seed=0)
            >>> for _ in range(10):
            ...     action = env.action_space.sample()
            ...     following, reward, terminated, truncated, _ = env.step(action)
            ...     rb.add_step(
            ...         observation=observation,
            ...         action=action,
            ...         reward=reward,
            ...         next_observation=following,
            ...         terminated=terminated,
            ...         truncated=truncated,
            ...     )
            ...     observation = following
            >>> rb.sample()["next", "observation"].shape
            torch.Size([4, 4])
        """
        outcome = reward, next_observation, terminated, truncated
        step = GymnasiumStep(observation, action, *outcome, extras)
        self.write_loop_step(step, lane)

    @untraced("a step is copied by NumPy, and written by compiled loops")
    def write_loop_step(
        self, step: GymnasiumStep, lane: int | None, begins: bool = False
    ) -> None:
        """Write a step as :meth:`add_step` does; ``begins``: another actor takes the
        lane over with it."""
        if self.parts is None:
            self._initialize()
        # by lane, for this thread
        steps: dict[Any, LoopStep] = vars(self._loop_steps)
        if lane is not None and type(lane) is not int:
            lane = whole(0)("lane", lane)
        memory = steps.pop(lane, None)
        if memory is None:
            memory = LoopStep.like(self, step, lane)
        try:
            memory.fill(step)
        except SchemaError:
            LoopStep.like(self, step, lane)  # an error about the whole step says more
            raise
        memory.write(self, begins=begins)
        steps[lane] = memory  # not after an error: the next step is seen as a first one

    def extend(
        self,
        tensordicts: Any,
        *,
        update_priority: bool | None = None,
        lanes: Any = None,
    ) -> torch.Tensor:
        """Write ``[n]`` transitions in order (with ``ndim=2``: ``[E, T]``, as
        collectors return them); return their index.

        Args:
            tensordicts: the transitions: a TensorDict, a tensorclass or a tensor, or a
                list of steps, each as :meth:`add` takes it.
            update_priority: whether TD errors in the data set the priorities, default
                ``True``.
            lanes: with ``ndim=2``, the lanes (environments) that ``[n]`` transitions
                belong to: ``[n]`` integers, or one for all. Each transition follows the
                newest one of its lane, so that lanes may have unlike lengths; see also
                :meth:`lane`. The storage must know the number of lanes:
                ``PackedStorage(..., lanes=E)``. Of TorchRL's samplers, only
                ``RandomSampler`` draws from lanes of unlike lengths. ``storage.set`` of
                new time steps then raises a RuntimeError; edits of rows that a lane
                lacks raise an IndexError.

        Raises:
            SchemaError: the data does not match the rows; nothing has changed.
            ValueError: there are no transitions, or a TD error is NaN or infinite;
                ``lanes`` do not fit the data, or the buffer has no lanes; nothing has
                changed.
            IndexError: a lane is out of range; nothing has changed.
            TypeError: the storage or writer cannot have lanes of unlike lengths;
                nothing has changed.
            ShutDown: the buffer has been shut down; nothing has changed.

        Warns:
            UserWarning: (on the first write) a row holds several steps, because the
                data has more batch dims than ``ndim``.
        """
        write = Write(tensordicts, False, lanes)
        return self._write(write, update_priority is not False)

    def _write(self, write: Write, update_priority: bool) -> Any:
        """Write as soon as flow control, if any, admits it."""
        data = write.data
        if type(data) is not TensorDict and not isinstance(data, TensorDictBase):
            return self._write_opened(write, update_priority)
        if self.lane_key is not None:
            if write.lanes is None:
                data, lanes = writing.with_lanes(self.lane_key, data)
                write = Write(data, False, lanes)
            else:
                writing.refuse_other_lanes(self.lane_key, data, write.lanes)
        if self.flow is None and self.episode_stats is None:
            return self._write_now(write, update_priority)
        self._refuse_shut_down()
        call = self._write_now if self.episode_stats is None else self._write_and_count
        if self.flow is None:
            return call(write, update_priority)
        rows = data.batch_size[: write.lead_dims(self.storage.ndim)].numel()
        with self._inserting(self.flow, rows):
            return call(write, update_priority)

    def _write_opened(self, write: Write, update_priority: bool) -> Any:
        """Write tensorclasses, tensors, or a list of steps as TensorDicts."""
        storage, data = (self.parts or self._initialize()).storage, write.data
        if not write.is_single and isinstance(data, list):
            if not data:
                raise ValueError("extend needs at least one transition, got none")
            data = stacked(data, self.dim_extend if write.lanes is None else 0)
        rows, row_class = unwrap(data, write.lead_dims(storage.ndim))
        if not isinstance(rows, TensorDictBase):
            how = "add" if write.is_single else "extend"
            writing.refuse_other_data(how, data)
        before = storage.row_class
        if row_class is not None:
            storage.take_class(row_class)
        try:
            write.data = rows
            return self._write(write, update_priority)
        except Exception:
            if not len(storage):
                storage.row_class = before
            raise

    @contextmanager
    def _inserting(self, flow: FlowControl, rows: int) -> Iterator[None]:
        """Enter the ``with`` block once flow control admits a write of ``rows`` rows.

        The block holds the buffer's lock, so that no other thread or process finds rows
        that are counted and not written. Rows count when they are there; if the block
        raises no error, those that a writer or a transform left out count, too.
        """

        def admit() -> bool:
            flow.agree(row_count(self.storage))
            return flow.admits_insert(rows)

        count_wait = partial(flow.count_wait, of_sample=False)
        reason = partial(flow.why_no_write, rows)
        with waiting.admitted(
            admit, self._replay_lock, reason, None, count_wait=count_wait, slow_write=8
        ):
            inserted = flow.inserted + rows
            yield
            flow.count_inserts(inserted - flow.inserted)

    def _write_and_count(self, write: Write, update_priority: bool) -> Any:
        """Write the data, and record the untransformed data in the episode
        statistics."""
        stats: Any = self.episode_stats
        data, dims = write.data, write.lead_dims(self.storage.ndim)
        if data.ndim < dims:
            return self._write_now(write, update_priority)
        record = (
            self._record_for(write)
            if write.lanes is None and data.ndim == dims
            else None
        )
        # data of the rows' dtypes and shapes needs no conversion
        if record is not None:
            write.record = record
            return self._write_now(write, update_priority)
        if data.ndim > dims:
            time_dim = -1
        elif write.is_single:
            time_dim = None
        else:
            time_dim = self.dim_extend if write.lanes is None else 0
        # refuses malformed data before the write
        steps = stats.read(data, time_dim=time_dim)
        with self._locked(), defer_sigint:
            index = self._write_now(write, update_priority)
            stats.record(steps, None if write.lanes is None else index[:, 1])
        return index

    def _record_for(self, write: Write) -> Record | None:
        """Return how compiled writes count the data in statistics; None if its columns
        must be converted first."""
        parts, stats = self.parts, self.episode_stats
        plan = None if parts is None else parts.storage.write_plan
        if (
            not isinstance(plan, CompiledWrites)
            or not parts.writes_directly
            or len(parts.transforms)
        ):
            return None
        if self._dim_extend >= parts.storage.ndim:
            return None
        recorder = self._recorder
        if (
            recorder is None
            or recorder.plan() is not plan
            or recorder.stats is not stats
        ):
            bind = compiled_form(stats, "bind_record", "read", "record", "update")
            record = None if bind is None else bind(plan.rows.layout)
            self._recorder = recorder = _StatsRecorder(ref(plan), stats, record)
        record = recorder.record
        lanes = plan.ring.lanes
        dim = 0 if write.is_single else self.dim_extend
        count = 1 if write.is_single else write.data.shape[dim]
        return record and partial(
            record, shape=(count, lanes), strides=(1, count) if dim else (lanes, 1)
        )

    def _write_now(self, write: Write, update_priority: bool) -> Any:
        """Check and transform the data, let the writer write it, and tell the
        sampler."""
        parts = self.parts
        if parts is None or self._service_shutdown:
            self._refuse_shut_down()
            parts = self._initialize()
        rows = self._storage.rows
        if (
            rows is not None
            and type(write.data) is TensorDict
            and not torchrl_parts.modules_of(parts.transforms)
        ):
            write.leaves = rows.layout.find(write.data)
            write.layout = None if write.leaves is None else rows.layout
        layout = write.layout
        if layout is None:  # entries may have to be removed, added or refused
            write.data = writing.without_report(write.data)
        if write.lanes is not None:
            self.refuse_lanes("lanes=")
        elif parts.writes_generally:
            return (
                super().add(write.data)
                if write.is_single
                else super().extend(write.data, update_priority=update_priority)
            )
        if layout is None:
            data = self._prepared(write.data, write.lead_dims(self._storage.ndim))
            if data is None:  # a transform may hold back data
                shape = (0, self._storage.ndim)
                return torch.zeros(shape, dtype=torch.long, device="cpu")
            write.data = data
        with self._storage.lock:
            # under the lock: another thread may have replaced a part
            parts = self.parts
            if self._dim_extend and not write.is_single and write.lanes is None:
                self._put_time(write)
            td_error = None
            if (
                update_priority
                and parts.prioritized is not None
                and (layout is None or self.priority_key in layout.all_keys)
            ):
                td_error = self._errors_in(write, parts.prioritized.reduction)
            if parts.writes_directly:
                index = parts.write(write)
            elif write.lanes is not None:
                index = parts.writer.append(write.lanes, write.data)
            elif write.is_single:
                index = parts.writer.add(write.data)
            else:
                index = parts.writer.extend(write.data)
            if index is None:  # TorchRL's maximum-value writer leaves the row out
                return None
            if parts.notices:
                how = "add" if write.is_single else "extend"
                if how in parts.notices:
                    getattr(parts.sampler, how)(index)
            if td_error is not None and parts.prioritized is not None:
                parts.prioritized.update_priority(
                    index, td_error, storage=parts.storage
                )
        return index

    def _put_time(self, write: Write) -> None:
        """Put the time steps of the data, in dim ``dim_extend``, first, or say that
        they are in the second dim."""
        data, time_dim, ndim = write.data, self._dim_extend, self._storage.ndim
        if data.ndim <= time_dim:
            refuse_shape(data, ndim)
        if self.parts.writes_directly and time_dim == 1 and ndim == 2:
            write.lanes_first = True
            return
        write.replace_data(reshaped(data, lambda data: data.transpose(time_dim, 0)))

    def step_writer(self, staged: StagedStep, lane: int | None = None) -> StepWriter:
        """Return what writes a staged step to this buffer; recorders use it."""
        return StepWriter(staged, lane)

    def can_write_staged(self, plan: CompiledWrites) -> bool:
        """Whether ``plan`` alone does all that :meth:`add` does, as long as there are
        no transforms."""
        parts = self.parts
        if parts is None or not parts.writes_directly:
            return False
        if self.lane_key is not None or not plan.tells_nobody:
            return False
        if type(parts.writer).write not in (TimeWriter.write, RolloutWriter.write):
            return False  # a subclass does more
        if parts.notices and not parts.only_restarts:
            return False
        has_errors = self.priority_key in plan.rows.layout.all_keys
        return parts.prioritized is None or not has_errors

    def _prepared(self, data: TensorDictBase, dims: int) -> Any:
        """Transform data whose first ``dims`` dims index rows, and check the entries
        that the rows may not have."""
        data = self.with_trajectory_ids(data, dims)
        if torchrl_parts.modules_of(self.parts.transforms):
            storage = self.parts.storage
            is_reserved = storage.is_reserved_for(data, dims)
            with _set_dispatch_td_nn_modules(True):
                data = self.transform.inv(data)
            # rows are reserved for what an environment gives: store what is left of it
            if is_reserved and data is not None and data.batch_size[:dims].numel():
                storage.reserve_again(data, dims)
        if data is not None:
            if "index" in data.keys():
                refuse_index()
            if self._storage.rows is None:
                writing.warn_of_long_rows(self.parts, data, dims)
        return data

    def _errors_in(self, write: Write, reduction: str) -> torch.Tensor | None:
        """Return one TD error for each row of the data, in the order of their index;
        None if there are none."""
        data, dims = write.data, write.lead_dims(self.storage.ndim)
        td_error = data.get(self.priority_key, None)
        if td_error is None:
            return None
        if write.lanes_first:
            td_error = td_error.transpose(0, 1)
        td_error = one_a_row(td_error, dims, reduction, data.ndim - dims)
        if backend_of(td_error) == "numba":
            refuse_errors(td_error)
        return td_error

    def _stage_of_writes(self) -> Stage:
        """See :class:`~rlbuf_td.storages.listeners.Listener`."""
        parts = self.parts
        if parts is None:
            return Stage()
        sampler = parts.prioritized
        if sampler is not None:
            entry_loop = compiled_form(sampler, "entry_loop", "mark_update")
            loop = None if entry_loop is None else entry_loop()
            if loop is not None:
                sampler.priorities.move_to(parts.storage)
                return Stage(is_told=True, priorities=sampler.priorities, loop=loop)
        return Stage(has_own(parts.sampler, "mark_update", Sampler.mark_update))

    def with_trajectory_ids(self, data: TensorDictBase, dims: int) -> TensorDictBase:
        """Add trajectory ids of 0 to data without ids if the rows have an entry for
        them.

        Rows that are shared have one, see :meth:`from_env`. A loop of one's own writes
        no ids: its trajectories end at the done flags. The first ``dims`` dims of the
        data index rows.
        """
        layout = self.storage.layout
        if (
            not self._has_environment
            or layout is None
            or TRAJ_KEY not in layout.places
            or data.get(TRAJ_KEY, None) is not None
        ):
            return data
        ids = torch.zeros(data.batch_size[:dims], dtype=torch.int64, device="cpu")
        return data.copy().set(TRAJ_KEY, ids)

    def refuse_lanes(self, argument: str) -> None:
        """Raise a TypeError if single lanes cannot be written; ``argument`` asks for
        them."""
        fault = self._initialize().fault_of_lanes
        if fault:
            raise TypeError(f"{argument} {fault}")

    @property
    def takes_lanes(self) -> bool:
        """Whether single lanes can be written (the storage is ``[T, E]``, and the
        writer allows it)."""
        return not self._initialize().fault_of_lanes

    def lane(self, lane: int) -> Lane:
        """Return a handle that writes and reads lane ``lane`` of a buffer ``[T, E]``,
        for one actor.

        The first write of each handle begins an episode, see
        :class:`~rlbuf_td.buffers.lane.Lane`.

        Raises:
            ValueError: the buffer has no lanes, or their number is not known yet.
            IndexError: there is no such lane.
        """
        return Lane(self, lane)

    def write_back(
        self,
        batch: TensorDictBase,
        keys: object,
        *,
        sampled_at: torch.Tensor | None = None,
    ) -> int:
        """Write entries of a sampled batch, such as recurrent states, to its rows;
        return the number of rows written.

        Rows that have been replaced since they were sampled are skipped, and so is the
        padding of sequences. If a row is in the batch several times, the last entry is
        stored. Age and priorities of the rows do not change. Any thread may call this
        method. A process that is killed during the call may leave the entries half
        written.

        Args:
            batch: a batch of this buffer, ``[B]`` or ``[B, ...]``, with its
                ``"index"``.
            keys: the keys of the entries, or one key. Rows and batch must have these
                keys with equal dtypes and shapes.
            sampled_at: the stamps of the batch's rows,
                ``rb.storage.stamps(batch["index"])``, taken before other rows are
                written. Batches of prioritized samplers do not need this argument,
                because they have an entry ``"sampled_at"``.

        Raises:
            SchemaError: a key is missing in the rows or in the batch, or its dtypes or
                shapes differ; nothing has changed.
            KeyError: the batch has no index, or its sampling time is unknown; nothing
                has changed.
            ValueError: a key is in ``"next"``, and an :class:`NStepSampler` has joined
                several steps; nothing has changed.
            ShutDown: the buffer has been shut down.

        Cost: O(B * bytes of the entries); on CUDA, also a
        synchronisation.

        Example:
            >>> from rlbuf_td import ReplayBuffer
            >>> from tensordict import TensorDict
            >>> rb = ReplayBuffer(batch_size=2)
            >>> _ = rb.extend(TensorDict({"x": torch.zeros(1), "state": torch.zeros(1)}, [1]))
            >>> batch = rb.sample()
            >>> stamps = rb.storage.stamps(batch["index"])
            >>> batch["state"] += 1
            >>> rb.write_back(batch, ["state"], sampled_at=stamps), rb.storage["state"]
            (2, tensor([1.]))
        """
        return self._write_back(batch, *self._checked_entries(batch, keys, sampled_at))

    def _checked_entries(
        self, batch: TensorDictBase, keys: object, sampled_at: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, dict[tuple[str, ...], torch.Tensor]]:
        """Raise the errors of :meth:`write_back`; return the index, the stamps and the
        entries, by row."""
        self._refuse_shut_down()
        parts = self.parts or self._initialize()
        storage = parts.storage
        dims = batch.ndim
        inner = inner_dims(storage, dims)
        index = batch.get("index", None)
        stamp = batch.get(SAMPLED_AT, None)
        stamp = stamp if sampled_at is None else sampled_at
        if index is None or stamp is None:
            reason = (
                "its rows are not known, sample it with include_info=True"
                if index is None
                else "rows may have been replaced since it was sampled"
            )
            remedy = (
                ""
                if index is None
                else ": read rb.storage.stamps(index) then, and pass it as sampled_at="
            )
            raise KeyError(
                f"the batch has no {'index' if index is None else SAMPLED_AT!r}: {reason}{remedy}"
            )
        names = writing.listed(keys)
        if (
            parts.wrapper is not None
            and any(key[0] == "next" for key in names)
            and joins_steps(parts.wrapper)
        ):
            raise ValueError(
                "cannot write back 'next' entries of n-step transitions: they belong to later rows"
            )
        values = {
            key: writing.entry_by_row(storage, batch, key, inner) for key in names
        }
        if sampled_at is not None:
            writing.refuse_other_stamps(stamp, batch.batch_size[: dims - inner])
            stamp = stamp.reshape(*stamp.shape, *[1] * inner).expand(batch.batch_size)
        return index, stamp, values

    def _write_back(
        self,
        batch: TensorDictBase,
        index: torch.Tensor,
        stamp: torch.Tensor,
        values: dict[tuple[str, ...], torch.Tensor],
    ) -> int:
        """Write the result of :meth:`_checked_entries`; return the number of rows
        written."""
        parts = self.parts
        storage = self.storage
        dims = batch.ndim
        inner = inner_dims(storage, dims)
        with storage.lock, defer_sigint:
            flat = flat_rows(first_of_row(index, dims, inner), storage, storage.device)
            stamp = first_of_row(stamp, dims, inner).to(storage.device)
            flat = storage.ring.skip_stale(flat, stamp)[0]
            kept = flat >= 0
            if "mask" in reported_by(parts.sampler) and "mask" in batch.keys():
                kept &= first_of_row(batch.get("mask"), dims, inner).to(kept.device)
            flat = flat[kept]
            kept_values = {key: value[kept] for key, value in values.items()}
            storage.edit_entries(flat, kept_values, is_counted=False)
        return len(flat)

    def set_at_(self, key: NestedKey, value: object, index: object) -> Self:
        """Set the entry ``key`` of the rows at ``index``; return the buffer.

        The rows are indexed like a tensor of shape ``[T]``, or ``[T, E]`` if
        ``ndim=2``. If the buffer reads them as ``[E, T]`` (``dim_extend=1``, the
        default with ``ndim=2``), ``index`` must be the coordinates of rows, one integer
        or one list of integers per dim, as a batch's ``"index"`` has them:
        ``rb.set_at_(key, value, (t, e))``.

        Raises:
            NotImplementedError: ``index`` would name other rows than in ``rb[index]``
                (a slice or mask, for example).
            KeyError: the rows have no entry ``key``.
            IndexError: ``index`` is out of range, or names rows that a shorter lane
                lacks.
            RuntimeError: ``value`` has the wrong shape.
            ShutDown: the buffer has been shut down.
            SchemaError: the dtype of the rows would round a whole number in ``value``.

        After an error, nothing has changed. A process that is killed in the call may
        leave the entries half written.
        """
        self._refuse_shut_down()
        key = nested_key(key)
        if self.dim_extend > 0 and not _names_rows(index, self.storage.ndim):
            raise NotImplementedError(
                f"set_at_ takes coordinates of rows, (t, e), but this buffer reads rows as [E, T] (dim_extend="
                f"{self.dim_extend}): use rb[key] = value, or rb.storage.edit(change, index), which takes [T, E]"
            )
        self._refuse_rounding({key: value})
        self.storage.edit(lambda data: setitem(data[key], ..., value), index, key=key)  # pyrefly: ignore [no-matching-overload]
        return self

    def set_(self, *_: object, **__: object) -> NoReturn:
        """Raise a NotImplementedError, as ``update_`` does: ``rb[key] = value`` takes
        what ``rb[key]`` gives."""
        raise NotImplementedError(
            "set_ and update_ have another form here: use rb[key] = value, which takes what rb[key] gives"
        )

    update_: Any = set_

    def update_if_present(self, *_: object, **__: object) -> NoReturn:
        """Raise a NotImplementedError: :meth:`write_back` takes its place."""
        raise NotImplementedError(NO_GENERATIONS)

    def __setitem__(self, index: object, value: object) -> None:
        """Set the rows at ``index``, in the shape in which ``rb[index]`` reads them.

        If ``index`` is a key, set the entry with this key in all rows: ``[T, ...]``, or
        ``[E, T, ...]`` if ``ndim=2``.
        """
        self._refuse_shut_down()
        if is_key(index):  # TorchRL's code would change a temporary TensorDict
            self._refuse_rounding({index: value})
            self.storage.edit(
                lambda data: data.transpose(self.dim_extend, 0).set_(index, value),
                key=index,
            )
        else:
            super().__setitem__(index, value)

    def _refuse_rounding(self, values: Any) -> None:
        """Raise a SchemaError if an edit with these entries would round whole numbers,
        see :func:`refuse_rounding`."""
        layout = self.storage.layout
        if layout is None:
            return
        for path, value in walk(values):
            leaf = layout.leaf(as_tuple(unravel_key(path)))
            if leaf is not None and isinstance(value, torch.Tensor):
                remedy = f"cast it with .to({leaf.dtype}), or store it in float64"
                refuse_rounding(leaf.key, value, leaf.dtype, remedy)

    def _refuse_shut_down(self) -> None:
        """Raise a ShutDown error if the buffer has been shut down or closed."""
        if self._service_shutdown and self._storage.is_closed:
            remedy = (
                "make another one (PackedStorage(reopen=True) continues rows in a file)"
            )
            raise waiting.ShutDown(
                f"the buffer has been closed, and its rows are released: {remedy}"
            )
        if self._service_shutdown:
            allowed = (
                "rows can be read and saved, but no longer sampled, written or edited"
            )
            raise waiting.ShutDown(f"the buffer has been shut down: {allowed}")

    def mark_update(self, index: object) -> None:
        """Tell the sampler that the rows at ``index`` were written; writers call this
        method."""
        with self._locked():
            super().mark_update(index)

    def _mark_run(self, index: object, first: int, count: int) -> None:
        """See :class:`~rlbuf_td.storages.listeners.Listener`."""
        prioritized = None if self.parts is None else self.parts.prioritized
        enter = (
            None
            if prioritized is None
            else compiled_form(prioritized, "mark_run", "mark_update")
        )
        if enter is None:
            return self.mark_update(index)
        with self._locked():
            return enter(index, self.parts.storage, first, count)

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all rows and priorities, and keep the schema; flow control starts
        again.

        Other buffers over the same storage then have no rows and priorities either,
        write from the first row on, and begin their epochs and flow control again.

        Args:
            empty_write_count: also set :attr:`write_count` to 0, default ``True``.

        Raises:
            ShutDown: the buffer has been shut down.
        """
        self._refuse_shut_down()
        with self._fully_locked(), defer_sigint:
            # This tells all buffers, also this one. First, because without rows, whatever
            # else is left is known to be old.
            torchrl_parts.empty_part(self._storage)
            self._writer._empty(empty_write_count=empty_write_count)

    def _rows_replaced(self, *, are_loaded: bool) -> None:
        """See :class:`~rlbuf_td.storages.listeners.Listener`."""
        rows = row_count(self._storage)
        if self.flow is not None:
            self.flow.restart(rows)
        if are_loaded and self.episode_stats is not None:
            self.episode_stats.forget_open()

    # -- priorities

    def update_priority(self, index: object, priority: object) -> None:
        """Set the priorities of rows from the magnitudes of TD errors, even if the rows
        were replaced after sampling.

        Args:
            index: the index that :meth:`extend` or :meth:`sample` returns, with lanes
                all of ``[B, 2]``; or flat positions of rows, ``[B]``.
            priority: one TD error per row, in the order of ``index``, or one TD error
                for all rows. For windows of a :class:`SequenceSampler`, call
                :meth:`update_tensordict_priority`, which updates their anchors.

        Raises:
            ValueError: the number of TD errors is wrong, or a TD error is NaN or
                infinite; all priorities are unchanged.
            IndexError: a row is out of range; all priorities are unchanged.

        On CUDA, rows that are out of range, or have a NaN or infinite TD error, are
        skipped instead.
        """
        parts = self.parts or self._initialize()
        if parts.prioritized is None:
            return super().update_priority(index, priority)
        if isinstance(index, torch.Tensor):
            has_pairs = parts.storage.ndim > 1  # ``[..., 2]``
            if has_pairs and index.ndim > 2:
                index = index.flatten(0, -2)
            elif not has_pairs and index.ndim > 1:
                index = index.flatten()
        with parts.storage.lock:
            parts.prioritized.update_priority(index, priority, storage=parts.storage)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of the rows of a batch from its TD errors; without a
        prioritized sampler, do nothing.

        Rows that have been replaced since the batch was sampled keep their priorities,
        and :meth:`health` counts them. If a batch has no entry ``"sampled_at"``, the
        priorities of all its rows are set. A row that was edited since counts as the
        same row, and its priority is set: so does a row that a
        :class:`ReservoirWriter`, or TorchRL's ``TensorDictMaxValueWriter``, has put in
        its place.

        Args:
            data: a batch of this buffer, ``[B]`` or ``[B, ...]``, with its ``"index"``
                and with TD errors at ``priority_key``. If a row has several TD errors,
                the sampler's ``reduction`` combines their magnitudes.

        Raises:
            KeyError: the batch has no TD errors, or no index.
            ValueError: a TD error is NaN or infinite; all priorities are unchanged. On
                CUDA, the row is skipped instead.
        """
        parts = self.parts or self._initialize()
        if parts.prioritized is None or self._sample_unit is not None:
            nothing = Sampler.update_priority, SequenceSampler.update_priority
            if has_own(parts.sampler, "update_priority", *nothing):
                super().update_tensordict_priority(data)
            return None
        update = parts.update_of(data, len(data.batch_size), self.priority_key)
        self._update_sampled(update)

    def _update_sampled(self, update: Update) -> None:
        """Update the priorities of rows, except of those that are gone since they got
        their stamp."""
        with self.parts.storage.lock:
            parts = self.parts
            # another thread may have replaced the sampler
            if parts.prioritized is not None:
                stale = parts.prioritized.update_sampled(update, parts.storage)
                if type(stale) is not int or stale:
                    self.stale_updates.add(stale)

    # -- reads

    def _initialize_prioritized_sampler(self) -> None:
        """Give the rows that a storage already holds a priority; TorchRL's constructor
        calls this method."""
        if isinstance(self._sampler, PrioritizedSampler) and len(self._storage):
            self._sampler.mark_update(
                written_rows(self._storage), storage=self._storage
            )

    def __len__(self) -> int:
        """Return the number of stored rows."""
        return super().__len__() - (len(self._storage) - row_count(self._storage))

    @property
    def write_count(self) -> int:  # pyrefly: ignore [bad-override]
        """The number of rows written to the storage so far, by any of its buffers;
        :meth:`empty` sets it to 0. A :class:`ReservoirWriter` counts its own rows,
        dropped ones included, and others do not count those that replace rows.

        Writers of TorchRL count time steps instead, as they do in its buffers.
        """
        return self._initialize().writer._write_count

    @property
    def full(self) -> bool:
        """Whether there are as many rows as the capacity, in each lane."""
        return torchrl_parts.is_full(self.storage)

    def chronological(self, *, flat: bool = False) -> TensorDictBase:
        """Return a copy of all rows, transformed and oldest first: ``[T]``, or
        ``[T, E]`` if ``ndim=2``.

        Args:
            flat: return ``[T * E]``, in time order, instead of ``[T, E]``. If lanes
                have unlike numbers of time steps, return ``[N]``, lane after lane, each
                in time order.

        Raises:
            RuntimeError: the buffer is empty.
            TypeError: the writer does not write in time order.
            ValueError: lanes have unlike numbers of time steps, see :meth:`lane`, and
                ``flat`` is not set.
        """
        if flat and row_count(self.storage) < len(self.storage):
            with self._locked():
                self._storage.complete()
                data = self._storage.gather(
                    self._storage.ring.cells_by_age().to(self._storage.device)
                )
            return self._transformed(wrap(data, self._storage.row_class))
        return self._newest(n=None, flat=flat)

    def last(self, n: int | None, *, flat: bool = False) -> TensorDictBase:
        """Return a copy of the newest ``n`` time steps, transformed and oldest first:
        ``[n]``, or ``[n, E]`` if ``ndim=2``.

        Args:
            n: the number of time steps, at least 1; ``None`` returns all.
            flat: return ``[n * E]``, in time order, instead of ``[n, E]``.

        Raises:
            ValueError: ``n`` is no whole number, is below 1, or above the number of time
                steps that each lane has; or ``n`` is ``None`` and lanes have unlike numbers of time
                steps, see :meth:`lane`.
            RuntimeError: the buffer is empty.
            TypeError: the writer does not write in time order.

        Example: batches that always hold the newest row (combined experience replay)

            >>> from rlbuf_td import PackedStorage, ReplayBuffer
            >>> from tensordict import TensorDict
            >>> rb = ReplayBuffer(storage=PackedStorage(9), batch_size=7, include_info=False)
            >>> _ = rb.extend(TensorDict({"x": torch.arange(20)}, [20]))
            >>> batch = torch.cat((rb.last(1), rb.sample()))
            >>> batch.shape, batch["x"][0]
            (torch.Size([8]), tensor(19))

        With ``include_info=True``, leave out what only ``sample`` adds:
        ``rb.sample().exclude("index")``.
        """
        return self._newest(n, flat=flat)

    def _newest(
        self, n: int | None, lane: int | None = None, *, flat: bool = False
    ) -> TensorDictBase:
        """See :meth:`last`, which reads all lanes, and :meth:`Lane.last`, which reads
        one."""
        with self._locked():
            storage = self._storage
            ring = self._storage.ring
            kind = type(self._writer).__name__
            if not isinstance(self._writer, RoundRobinWriter):
                raise TypeError(f"a {kind} keeps no order of age; use a RingWriter")
            storage.refuse_closed()
            if not len(storage):
                raise RuntimeError("the buffer is empty: extend it first")
            storage.complete()
            counts = ring.count if lane is None else ring.count[lane : lane + 1]
            least = int(counts.min())
            most = int(counts.max())
            if n is None and least < most:
                remedy = (
                    "read rb.lane(e).chronological(), or rb.chronological(flat=True)"
                )
                if least > 0:
                    remedy += f", or at most rb.last({least})"
                raise ValueError(
                    f"lanes have {least} to {most} time steps each, which do not fit one shape: {remedy}"
                )
            if n is not None and not 1 <= whole(0)("n", n) <= least:
                where = " in a lane" if least < most else ""
                raise ValueError(
                    f"cannot return the last {n} time steps: {least} are stored{where}"
                )
            if not least:
                raise RuntimeError(f"lane {lane} is empty: write to it first")
            taken = np.zeros_like(ring.count)
            taken[slice(None) if lane is None else lane] = n or least
            # lane after lane; then by age
            cells = ring.newest_cells(taken).view(len(counts), -1).t().flatten()
            data = storage.gather(cells.to(storage.device))
        data = data if flat or lane is not None else data.view(-1, *storage.lanes)
        return self._transformed(wrap(data, storage.row_class))

    def health(self) -> dict[str, float]:
        """Return statistics of the buffer and its batches as a flat dict;
        :mod:`rlbuf_td.diagnostics.health` explains them.

        Cost: O(N log N) for N rows with a prioritized sampler, otherwise O(N).
        """
        with self._locked():
            report = health(self._storage, self._sampler, self._writer, self.last_draw)
        report["stale_updates"] = float(self.stale_updates.total())
        reasons = self._compiled_calls().values()
        report["compiled"] = [*reasons].count("") / len(reasons)
        return report if self.flow is None else report | self.flow.report()

    def __repr__(self) -> str:
        name = type(self).__name__
        if not self.initialized:
            return f"{name}(not initialized)"
        named: list[tuple[str, object]]
        named = [
            ("storage", self._storage),
            ("sampler", self._sampler),
            ("writer", self._writer),
        ]
        if len(self.parts.transforms):
            named.append(("transform", self._transform))
        lines = [
            f"{part_name}={part!r},".replace("\n", "\n    ")
            for part_name, part in named
        ]
        lines.append(
            f"batch_size={self._batch_size}, fill={row_count(self._storage) / self._storage.max_size:.1%}"
        )
        lines.append(f"compiled: {self.compiled}")
        return f"{name}(\n    " + "\n    ".join(lines) + "\n)"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

    # -- saving and loading

    def dumps(self, path: str | Path) -> None:
        """Save rows, priorities, counters, trajectories and random generators in the
        folder ``path``.

        If the process is killed during the call, either the previous dump or the new
        dump is intact. Data that has not changed since the previous dump is neither
        written nor read again: if the disk has damaged it meanwhile, a load refuses the
        new dump, too. The folder holds JSON and the bytes of tensors. TorchRL's buffers
        cannot load a dump; ``theirs.extend(rb.chronological())`` copies the rows to a
        TorchRL buffer.

        Args:
            path: the folder, created if missing. Other files in the folder are kept.

        Raises:
            CheckpointError: a component cannot be saved without pickle, ``path`` is a
                file, or the folder has a ``manifest.json`` of another program.
            OSError: a file cannot be written (the disk is full, for example); the
                previous dump is intact.
        """
        dump_buffer(self, path)

    def loads(
        self, path: str | Path, *, rows_only: bool = False, transforms: bool = False
    ) -> None:
        """Replace the rows and the state of this buffer by those of a dump that
        :meth:`dumps` has written.

        This buffer then draws the batches that the saved buffer would have drawn next.
        If the saved buffer had no ``generator``, equal batches also need the state of
        torch's default generator, ``torch.get_rng_state()``. Checksums of all files are
        verified first, and no code from the dump is executed.

        Storage, sampler and writer must have the same classes as in the saved buffer;
        ``prefetch``, ``device`` and transforms may differ. This buffer keeps its own
        transforms as they are, unless ``transforms`` is set. Settings of its parts (alpha,
        beta, n_steps, gamma, ...) become those of the dump. Capacity, lanes, and
        deduplicated keys must be those of the saved storage; to change them, load the
        dump into a buffer of its own kind, ``old``, and copy the rows,
        ``new.extend(old.chronological())``, or with lanes
        ``new.extend(old.lane(e).chronological(), lanes=e)`` for each. A load ends
        unfinished trajectories that have ids (``("collector", "traj_ids")``), because
        new collectors may use the same ids again. Batches that were drawn ahead are
        dropped; TorchRL's ``SamplerWithoutReplacement`` skips them in this epoch. Flow control goes on from
        the saved counts if its settings are the same; otherwise the rows count as
        written, and as sampled as often as ``samples_per_insert`` asks.

        Other buffers over the same storage treat the loaded rows as new ones: all get
        the priority of new rows before any TD error, epochs begin anew, and flow
        control counts them as written. Ctrl-C while files are read leaves the buffer
        unchanged; while the state is replaced, it takes effect after the load.

        Args:
            path: the folder of the dump.
            rows_only: load only the rows; the sampler treats these rows as newly
                written. The sampler may then have any class, and the writer may be any
                ``RoundRobinWriter``.
            transforms: also give this buffer's transforms the tensors of the saved
                ones, such as the running statistics of a normalization. The transforms
                must then be of the same kinds, in the same order.

        Raises:
            CheckpointError: a file is missing or damaged, or the dump does not fit; the
                buffer is unchanged.
            ShutDown: the buffer has been shut down.
        """
        self._refuse_shut_down()
        load_buffer(self, path, rows_only=rows_only, transforms=transforms)

    def state_dict(self) -> State:
        """Return a copy of the rows and of the state of all components, as tensors and
        plain Python values."""
        self._initialize()
        with at_rest(self):
            return capture(self, copies=True)

    def load_state_dict(self, state_dict: State) -> None:
        """Restore the state of :meth:`state_dict`, with that of the transforms; flow
        control, and other buffers over the same storage, as in :meth:`loads`.

        Raises:
            ValueError: the state belongs to another class of storage, sampler or
                writer, its rows do not fit, or one of its numbers is wrong.
            ShutDown: the buffer has been shut down.

        After an error, the buffer is unchanged.
        """
        self._refuse_shut_down()
        self._initialize()
        with state_of(self):
            refuse(self, state_dict)
        # before the other locks are taken: prefetching threads need them
        self.synchronize()
        with self._fully_locked():  # no thread sees a mixture of two states
            put = self._storage.prepare_load(state_dict["_storage"])
            restore(self, state_dict, put)

    # -- processes and threads

    def share(self, shared: bool = True) -> Self:
        """Share this buffer with processes that are later forked, or spawned with the
        buffer as an argument.

        Rows, counters and priorities move to shared memory. Every process may write,
        sample and update priorities; a lock runs these calls one at a time. If a
        process is killed during a write, the lock is released; the new rows are
        missing, and those that they were about to replace may be gone. Each process has
        its own random generator, and its own position in an epoch. The storage, sampler
        and writer of a shared buffer cannot be replaced. TorchRL's collectors with
        several workers call this method.

        Args:
            shared: ``False`` does nothing, because sharing cannot be undone.

        Cost: each write, sample or update takes a file lock, too. If a process dies
        while it holds the lock, the next call takes O(N) for N rows.

        Raises:
            ValueError: the rows are on a CUDA device.
            MemoryError: the written rows do not fit into RAM a second time.
            OSError: the priorities do not fit into ``/dev/shm``. Nothing has changed.
            RuntimeError: the operating system has no locks that survive the death of a
                process (Windows).
        """
        storage = vars(self).get("_storage")
        # TorchRL's constructor calls this method before it makes the parts; `_begin`
        # calls again
        if storage is None:
            return super().share(shared)
        if shared:
            storage.share_memory_()
        return self

    def _rows_shared(self) -> None:
        """See :class:`~rlbuf_td.storages.listeners.Listener`."""
        if vars(self).get("parts") is None:  # `_begin` shares when they are connected
            return
        # before a fork: recorders in all processes use these numbers
        TrajectoryNumbers.of(self._storage)._rows_shared()
        for part in (self.flow, self.stale_updates, self.returned):
            if part is not None:
                part.share_memory_()
        # again, TorchRL would replace the semaphores that other processes have
        if not (self.shared and "_write_lock" in vars(self)):
            super().share(True)
        # the storage's lock also works between processes
        self._write_lock = nullcontext()

    def _complete_reserved(self) -> None:
        """Add the entries that recorders, collectors and the writer will write to the
        reserved rows."""
        if vars(self).get("_writer") is None:
            return
        storage = self._storage
        layout = self._storage.all_rows().layout
        schema = layout.unpack(
            torch.empty(
                (*storage.lanes, layout.row_bytes), dtype=torch.uint8, device="meta"
            )
        )
        added: dict[NestedKey, torch.Tensor] = {}
        if isinstance(self._writer, RolloutWriter):
            added |= self._writer.added_entries(schema)
        if self._has_environment:
            added |= trajectory_ids(storage.lanes)
        complete = with_missing(schema, added)
        if len(list(walk(complete))) > len(layout.leaves):
            with defer_sigint:
                storage.release()
                storage.reserve(complete)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the buffer's threads; later writes and samples raise :class:`ShutDown`.

        With flow control, calls raise it in all processes, also those that wait.
        Reading and saving rows still work. Priorities are no longer kept beside the
        rows of ``PackedStorage(reopen=True)``, so that another buffer may continue with
        them.
        """
        if self.flow is not None:
            self.flow.shutdown()
        with self._futures_lock:
            self._clear_prefetch_queue_locked()
        super().shutdown(timeout)
        self.plans = {}
        if self.parts is not None and self.parts.prioritized is not None:
            self.parts.prioritized.priorities.file = None

    def close(self) -> None:
        """Shut down the buffer, and release its rows if no other buffer uses them;
        ``with rb:`` closes it at the end.

        Memory becomes free, and another process may continue the rows of
        ``PackedStorage(reopen=True)``. Reading and saving rows raise a RuntimeError
        afterwards. Processes that share the rows keep them until they end. With flow
        control, the buffer is shut down in all of them (:meth:`shutdown`): an actor
        should not close it.
        """
        self.shutdown()
        parts = self.parts or self._initialize()
        parts.storage.detach(self)
        if not any(
            isinstance(listener, TorchRLBuffer)
            for listener in torchrl_parts.listeners_of(parts.storage)
        ):
            parts.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- locks

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the locks under which writes, draws and priority updates run one at a
        time."""
        self._initialize()
        with self._replay_lock, self._write_lock:
            yield

    @contextmanager
    def _fully_locked(self) -> Iterator[None]:
        """Drop the batches drawn ahead, and hold all locks of the buffer."""
        with self._futures_lock:
            # waits for threads that need the other locks
            self._clear_prefetch_queue_locked()
            with self._locked():
                yield

    @property
    def _replay_lock(self) -> Any:
        """The lock of the storage."""
        return self.storage.lock

    @_replay_lock.setter
    def _replay_lock(self, lock: object) -> None:
        """Drop the lock that TorchRL makes."""

    # -- components

    def set_storage(
        self, storage: Storage, collate_fn: Callable[..., object] | None = None
    ) -> Storage:
        """Replace the storage, together with its rows; return the old storage.

        Unlike in TorchRL, a ring writer continues after the newest row of the new
        storage, and all rows get the default priority.
        """
        require("set_storage", storage, Storage)
        storage = require_packed(
            storage, "this buffer", "make another buffer for a storage of TorchRL's"
        )
        self._refuse_if_shared("storage")
        refuse_writer(self.writer, storage)
        refuse_unordered(self.sampler, storage, self.writer)
        refuse_stored(self.sampler, storage)
        self._refuse_second_priorities(storage, self.sampler)
        self._refuse_without_lanes(storage, self.writer)
        with self._fully_locked(), defer_sigint:
            torchrl_parts.replace_storage(self._writer, storage)
            previous = super().set_storage(storage, collate_fn)
            previous.detach(self)
            storage.attach(self)
            torchrl_parts.set_generator(storage, self._rng)
            if isinstance(self._writer, RoundRobinWriter):
                torchrl_parts.set_cursor(
                    self._writer, storage.ring.cursor if storage.ring.are_aligned else 0
                )
            torchrl_parts.empty_part(self._sampler)
            self._connect(default_priorities=True)
            if self.flow is not None:
                self.flow.restart(row_count(storage))
        return previous

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replace the sampler; return the old one.

        Unlike in TorchRL, rows without a priority in the new sampler get the default
        priority.
        """
        require("set_sampler", sampler, Sampler)
        self._refuse_if_shared("sampler")
        refuse_unordered(sampler, self.storage, self.writer)
        with self._fully_locked(), defer_sigint:
            previous = super().set_sampler(sampler)
            rng = torchrl_parts.generator_of(sampler)
            torchrl_parts.set_generator(sampler, self._rng)
            try:
                self._connect(default_priorities=True)
            except Exception:
                super().set_sampler(previous)
                torchrl_parts.set_generator(sampler, rng)
                self._connect()
                raise
        return previous

    def set_writer(self, writer: Writer) -> Writer:
        """Replace the writer; return the old one. A new :class:`RingWriter` continues
        after the newest row."""
        require("set_writer", writer, Writer)
        self._refuse_if_shared("writer")
        refuse_writer(writer, self.storage, self)
        self._refuse_without_lanes(self.storage, writer)
        old = type(self.writer).__name__
        had_no_order = torchrl_parts.loses_order(self.writer) and len(self) > 0
        if had_no_order and not torchrl_parts.loses_order(writer):
            raise ValueError(
                f"the rows of a {old} are in no time order, and a {type(writer).__name__} writes in time order: "
                "call rb.empty() first"
            )
        refuse_ahead(self, self.sampler, writer)
        with self._replay_lock, defer_sigint:
            previous, self._writer = self._writer, writer
            try:
                writer.register_storage(self._storage)
            except BaseException:
                self._writer = previous
                raise
            super().set_writer(writer)
            self._connect()
            return previous

    @defer_sigint
    def set_rng(self, generator: torch.Generator | None) -> None:
        """Let the buffer and all its parts draw from this generator; None: from torch's
        default one."""
        super().set_rng(generator)

    def _refuse_without_lanes(self, storage: PackedStorage, writer: Writer) -> None:
        """Raise a TypeError if there is a ``lane_key``, and single lanes cannot be
        written."""
        fault = fault_of_lanes(storage, writer)
        if self.lane_key is not None and fault:
            raise TypeError(f"lane_key= {fault}")

    def _refuse_if_shared(self, part: str) -> None:
        if self.storage.shared:
            reason = "other processes would keep the old one. Set it before you share the buffer"
            raise RuntimeError(f"cannot set the {part} of a shared buffer: {reason}")
        if self.storage.reopen:
            reason = "its folder continues the counts and priorities of the old one. Make the buffer with the new one"
            raise RuntimeError(f"cannot set the {part} of a reopened buffer: {reason}")

    def _refuse_schema(self, layout: RowLayout) -> None:
        """See :class:`~rlbuf_td.storages.listeners.Listener`."""
        sampler = vars(self).get("_sampler")
        if sampler is not None:  # missing while a copy of the buffer is made
            refuse_taken(sampler, layout.names, reported_by(sampler))

    # -- batches drawn ahead

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform after the others, see TorchRL's ``ReplayBuffer``."""
        with self._fully_locked():
            return super().append_transform(transform, invert=invert)

    def insert_transform(
        self, index: int, transform: Any, *, invert: bool = False
    ) -> Self:
        """Add a transform at a position, see TorchRL's ``ReplayBuffer``."""
        with self._fully_locked():
            return super().insert_transform(index, transform, invert=invert)

    @contextmanager
    def _capture_prefetch_state(
        self, *, clone_queue: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Drop the batches drawn ahead, and suspend sampling in a ``with`` block."""
        with self._futures_lock:
            self._clear_prefetch_queue_locked()
            with super()._capture_prefetch_state(clone_queue=clone_queue) as state:
                yield state

    def _begin_child(self) -> None:
        """See :class:`~rlbuf_td.storages.listeners.Listener`."""
        self._prefetch, self._prefetch_queue = False, deque()
        self._futures_lock = threading.RLock()

    # -- workers of a DataLoader, in which TorchRL's data sets sample copies of the
    # buffer

    @property
    def _requires_shared_state(self) -> bool:
        return self.flow is not None and not self.shared

    # -- pickling

    def __getstate__(self) -> dict[str, object]:
        if get_spawning_popen() is not None and self.parts is not None:
            self.share()
        state = super().__getstate__()
        state |= {"plans": {}, "_recorder": None}  # these hold addresses
        state.pop("_loop_steps", None)
        return state | {"_rng": None, "generator": pickled_generator(self._rng)}

    def __setstate__(self, state: State) -> None:
        generator = unpickled_generator(state.pop("generator"))
        super().__setstate__(state)
        self._loop_steps = threading.local()
        if generator is not None:
            self.set_rng(generator)
        self._rows_restored()

    def _rows_restored(self) -> None:
        """Connect a sampler wrapper to the restored storage, after a copy or
        unpickling."""
        wrapper = getattr(vars(self).get("parts"), "wrapper", None)
        # else the storage calls this method later
        if wrapper is not None and "rows" in vars(self._storage):
            wrapper.watch(self._storage)


class PrioritizedReplayBuffer(ReplayBuffer):
    """A :class:`ReplayBuffer` with a :class:`ProportionalSampler`, for code that uses
    TorchRL's prioritized buffers.

    Takes the keywords of TorchRL's ``TensorDictPrioritizedReplayBuffer``, with the same
    defaults.

    Args:
        alpha: exponent of the priorities, at least 0; with 0, sampling is uniform.
        beta: exponent of the importance weights, at least 0.
        eps: added to the magnitude of each TD error, default 1e-8.
        reduction: reduces several TD errors of a row to one: ``"max"``, ``"min"``,
            ``"mean"`` or ``"median"``.
        storage: a storage, or a function that creates one; default
            ``PackedStorage(1_000)``.
        sync: must be ``True``, because every write updates priorities.
        sampler_device: must be ``None``, because priorities are on the device of the
            rows.
        **kwargs: keywords of :class:`ReplayBuffer`, except ``sampler``. A wrapper needs
            a :class:`ReplayBuffer`:
            ``sampler=NStepSampler(ProportionalSampler(n, alpha, beta), n_steps, gamma)``.

    Raises:
        NotImplementedError: ``sync`` is ``False``, or a ``sampler_device`` is given.
        TypeError: a ``sampler`` is given.

    Cost: see :class:`ReplayBuffer` and :class:`ProportionalSampler`.

    Example:
        >>> rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=PackedStorage(100), batch_size=8)
        >>> rb.sampler.alpha, rb.sampler.eps
        (0.7, 1e-08)
    """

    makes_parts = frozenset({"sampler"})

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        reduction: Reduction = "max",
        storage: Storage | Callable[[], Storage] | None = None,
        sync: bool = True,
        sampler_device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        if not sync or sampler_device is not None:
            reason = "every write updates priorities, on the device of the rows"
            raise NotImplementedError(
                f"sync=False and sampler_device= are not supported: {reason}"
            )
        if "sampler" in kwargs:
            remedy = "ReplayBuffer(sampler=...) takes any, such as NStepSampler(ProportionalSampler(n), 3, 0.99)"
            raise TypeError(
                f"a PrioritizedReplayBuffer makes its own ProportionalSampler: {remedy}"
            )
        refuse_class("storage", storage)
        if storage is None:
            storage = PackedStorage(1_000)
        rows = storage if isinstance(storage, Storage) else storage()
        sampler = ProportionalSampler(
            rows.max_size, alpha, beta, eps, reduction=reduction
        )
        super().__init__(storage=rows, sampler=sampler, **kwargs)


def _names_rows(index: object, ndim: int) -> bool:
    """Whether an index consists of one integer, or one list of integers, per dim."""
    parts = index if isinstance(index, tuple) else ()
    kinds = [
        getattr(part, "dtype", np.asarray(part).dtype)
        for part in parts
        if not isinstance(part, slice)
    ]
    return len(kinds) == len(parts) == ndim and not any(
        "int" not in str(kind) for kind in kinds
    )
