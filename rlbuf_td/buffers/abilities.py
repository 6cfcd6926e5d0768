"""Methods of :class:`~rlbuf_td.ReplayBuffer` that create, read, save, load or share a buffer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td.buffers.parts import share_parts
from rlbuf_td.buffers.reserved import complete_reserved, for_environment
from rlbuf_td.checkpoint.buffer import dump_buffer, load_buffer
from rlbuf_td.checkpoint.parts import (
    load_or_restore,
    load_trajectories,
    refuse_counts,
    refuse_generators,
    refuse_trajectories,
    trajectories_of,
)
from rlbuf_td.diagnostics.health import health as health_of_parts
from rlbuf_td.envs.specs import schema_of, transition_schema
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import state_of
from rlbuf_td.storages.state import examine
from rlbuf_td.writers.common import steps_by_age

Arguments = ParamSpec("Arguments")
Buffer = TypeVar("Buffer", bound=TensorDictReplayBuffer)

if TYPE_CHECKING:

    class constructor(Generic[Arguments]):
        """A ``classmethod`` whose return type is the class on which the method is called."""

        def __init__(self, function: Callable[Concatenate[Any, Arguments], Any]) -> None: ...
        def __get__(self, instance: object, owner: type[Buffer]) -> Callable[Arguments, Buffer]: ...

else:
    constructor = classmethod

NO_CHECKPOINTERS = (
    "this buffer has its own dump format, without TorchRL's checkpointers and hooks: for those use TorchRL's "
    "TensorDictReplayBuffer over the same storage"
)


def from_env(cls: Any, /, env: Any, capacity: int, *, extras: Any = None, **kwargs: Any) -> Any:
    """Return a buffer for the transitions of an environment.

    Written data must have the environment's keys, dtypes and shapes. The first write may add keys, such as those of a
    policy's outputs. In RAM, rows take physical memory only after they are written.

    If the rows are shared before the first write, they get the trajectory ids ``("collector", "traj_ids")`` that
    recorders and collectors write. Every write must then have ids, because the rows of several processes follow each
    other. ``from_schema(schema_of(env), ...)`` adds none.

    Args:
        env: a TorchRL or Gymnasium environment, single or vectorised.
        capacity: the number of transitions, rounded up to a multiple of the number of environments. A
            :class:`RolloutBuffer` instead takes the number of time steps.
        extras: further entries of a transition, see :func:`~rlbuf_td.envs.specs.schema_of`. If the rows are shared
            before the first write, ``extras`` must contain all further entries, because that write cannot add entries.
        **kwargs: keywords of :meth:`from_schema`.

    Raises:
        SchemaError: an observation or action has no fixed size in bytes, as in Gymnasium's ``Text`` space.
        TypeError: ``env`` is not an environment.

    Example:
        >>> import gymnasium
        >>> from rlbuf_td import ReplayBuffer
        >>> rb = ReplayBuffer.from_env(gymnasium.make_vec("CartPole-v1", num_envs=3), 300, batch_size=8)
        >>> rb.storage.max_size, len(rb)
        (300, 0)
    """
    return for_environment(cls, schema_of(env, extras=extras), capacity, kwargs)


def from_spaces(
    cls: Any,
    /,
    observation_space: Any,
    action_space: Any,
    capacity: int,
    *,
    num_envs: int | None = None,
    extras: Any = None,
    **kwargs: Any,
) -> Any:
    """Return a buffer for the transitions of an environment with these Gymnasium spaces or TorchRL specs.

    Args:
        observation_space: the space or spec of one environment's observation.
        action_space: the space or spec of one environment's action.
        capacity: the number of transitions, see :meth:`from_env`.
        num_envs: E, the number of environments, for rows ``[T, E]``; ``None`` gives rows ``[T]``.
        extras: further entries, see :meth:`from_env`. For example, ``extras={"next": {"reward": numpy.zeros(1)}}``
            stores float64 rewards of a single environment; for E environments, the array has the shape ``(E, 1)``.
        **kwargs: keywords of :meth:`from_schema`.

    Raises:
        SchemaError: values of a space have no fixed size in bytes, as in Gymnasium's ``Text`` space.
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
    return for_environment(cls, schema_of(schema, extras=extras), capacity, kwargs)


def from_schema(
    cls: Any,
    /,
    schema: TensorDictBase,
    capacity: int,
    *,
    flat: bool = False,
    device: torch.device | str = "cpu",
    storing_device: torch.device | str | None = None,
    scratch_dir: str | Path | None = None,
    shared: bool = False,
    share_next: Any = False,
    frames: Any = None,
    **kwargs: Any,
) -> Any:
    """Return a buffer for transitions with the keys, dtypes and shapes of an example.

    Args:
        schema: an example of a step, with batch size ``[]``, or ``[E]`` for E environments; see
            :func:`~rlbuf_td.envs.specs.schema_of`.
        capacity: the number of transitions, see :meth:`from_env`.
        flat: store rows ``[T]`` instead of ``[T, E]``. Each row is then one transition of one environment.
        device: the device of the batches, and also of the rows unless ``storing_device`` is given.
        storing_device: the device of the rows.
        scratch_dir, shared, share_next, frames: keywords of :class:`PackedStorage`.
        **kwargs: keywords of the buffer's class: ``sampler``, ``batch_size``, ``transform``, ...

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
        raise ValueError(f"the storage is made for the transitions, got storage={kwargs['storage']!r}: {remedy}")
    if flat and schema.ndim:
        schema = schema.flatten()[0]
    if storing_device is not None:
        device, kwargs["device"] = storing_device, device
    rows: dict[str, Any] = {"scratch_dir": scratch_dir, "shared": shared}
    rows |= {"share_next": share_next, "frames": frames, "device": device}
    storage = PackedStorage(capacity, ndim=1 + schema.ndim, **rows)
    storage.reserve(schema)
    return cls(storage=storage, **kwargs)


def chronological(rb: Any, *, flat: bool = False) -> TensorDictBase:
    """Return a copy of all rows, transformed and oldest first: ``[T]``, or ``[T, E]`` if ``ndim=2``.

    Args:
        flat: return ``[T * E]``, in time order, instead of ``[T, E]``.

    Raises:
        RuntimeError: the buffer is empty.
        TypeError: the writer does not write in time order.
    """
    return last(rb, None, flat=flat)


def last(rb: Any, n: int | None, *, flat: bool = False) -> TensorDictBase:
    """Return a copy of the newest ``n`` time steps, transformed and oldest first: ``[n]``, or ``[n, E]`` if ``ndim=2``.

    Args:
        n: the number of time steps, at least 1; ``None`` returns all.
        flat: return ``[n * E]``, in time order, instead of ``[n, E]``.

    Raises:
        ValueError: ``n`` is below 1, or above the number of stored time steps.
        RuntimeError: the buffer is empty.
        TypeError: the writer does not write in time order.
    """
    storage, writer = rb.storage, rb.writer
    with rb.locked():
        data = storage.get(steps_by_age(writer, storage, n))
    if flat and data.ndim > 1:
        data = data.flatten(0, storage.ndim - 1)
    return rb.transformed(data)


def health(rb: Any) -> dict[str, float]:
    """Return statistics of the buffer and its batches as a flat dict; :mod:`rlbuf_td.diagnostics.health` explains them.

    Cost: O(N log N) for N rows with a prioritized sampler, otherwise O(N).
    """
    storage, sampler, writer = rb.storage, rb.sampler, rb.writer
    with rb.locked():
        report = health_of_parts(storage, sampler, writer, rb.last_draw, rb.replay_count)
    report["stale_updates"] = float(rb.stale_updates.total())
    return report if rb.flow is None else report | rb.flow.report()


def dumps(rb: Any, path: str | Path, *, progress: bool | None = None, sync: bool = True) -> None:
    """Save rows, priorities, counters, trajectories and random generators in the folder ``path``.

    If the process is killed during the call, either the previous dump or the new dump is intact. Data that has not
    changed since the previous dump is not written again. TorchRL's buffers cannot load a dump;
    ``theirs.extend(rb.chronological())`` copies the rows to a TorchRL buffer.

    Args:
        path: the folder, created if missing. Other files in the folder are kept.
        progress: whether to show a progress bar (needs tqdm); by default, only on a terminal for 1 GiB of data or more.
        sync: whether to wait until all data is on the disk. ``sync=False`` takes about half as long, but a crash of the
            machine may then damage both the previous and the new dump; :meth:`loads` detects the damage.

    Raises:
        CheckpointError: a component cannot be saved without pickle, ``path`` is a file, or the folder has a
            ``manifest.json`` of another program or of a newer version of this package.
        OSError: a file cannot be written (the disk is full, for example); the previous dump is intact.
        NotImplementedError: the storage's default checkpointer has been replaced.
    """
    if type(rb.storage.checkpointer) is not rb.storage._default_checkpointer:
        raise NotImplementedError(NO_CHECKPOINTERS)
    dump_buffer(rb, path, progress, sync=sync)


def loads(
    rb: Any, path: str | Path, *, rows_only: bool = False, default_generator: bool = False, progress: bool | None = None
) -> None:
    """Replace the rows and the state of this buffer by those of a dump that :meth:`dumps` has written.

    With equal capacities, this buffer then draws the batches that the saved buffer would have drawn next. If the saved
    buffer had no ``generator``, equal batches also need ``default_generator=True``. Checksums of all files are verified
    first, and no code from the dump is executed.

    Storage, sampler and writer must have the same classes as in the saved buffer. A :class:`PackedStorage` may have
    another capacity than the saved one, but not in a :class:`RolloutBuffer`, and not if the saved buffer's writer had
    ``track_generations=True`` (``rows_only`` loads these rows). If the saved rows exceed the capacity, the oldest are
    dropped, with a warning. New collectors may use the same trajectory ids (``("collector", "traj_ids")``) again. A
    load therefore ends unfinished trajectories that have ids. The two buffers may differ in ``prefetch``, ``device``
    and transforms: if this buffer draws no or fewer batches ahead, the saved batches drawn ahead are dropped, and a
    :class:`MinibatchSampler` starts its epochs again. Flow control goes on from the saved counts
    if its settings are the same; otherwise the rows count as written, and as sampled as often as ``samples_per_insert``
    asks.

    Args:
        path: the folder of the dump.
        rows_only: load only the rows; the sampler treats these rows as newly written. The sampler may then have any
            class, and the writer may be any ``RoundRobinWriter``.
        default_generator: also restore torch's default generator, which a buffer without ``generator`` uses.
        progress: whether to show a progress bar (needs tqdm); by default, only on a terminal for 1 GiB of data or more.

    Raises:
        CheckpointError: a file is missing or damaged, or the dump does not fit; the buffer is unchanged.
    """
    connect = partial(rb.connect, default_priorities=rows_only)
    how: Any = {"rows_only": rows_only, "default_generator": default_generator, "progress": progress}
    load_buffer(rb, path, connect, rb.fully_locked(), **how)


def refuse_hook(rb: Any, hook: Any) -> NoReturn:
    """Raise a NotImplementedError: :meth:`dumps` and :meth:`loads` do not support TorchRL's save and load hooks."""
    raise NotImplementedError(NO_CHECKPOINTERS)


def describe(rb: Any) -> str:
    if not rb.initialized:
        return f"{type(rb).__name__}(not initialized)"
    named = [("storage", rb.storage), ("sampler", rb.sampler), ("writer", rb.writer)]
    if len(rb.parts.transforms):
        named.append(("transform", rb.transform))
    lines = [f"{name}={part!r},".replace("\n", "\n    ") for name, part in named]
    lines.append(f"batch_size={rb.batch_size}, fill={len(rb.storage) / rb.storage.max_size:.1%}")
    lines.append(f"compiled: {rb.compiled}")
    return f"{type(rb).__name__}(\n    " + "\n    ".join(lines) + "\n)"


def repair(rb: Any) -> None:
    """Make the priorities consistent after a process died while it held the buffer's lock."""
    if rb.parts is not None and rb.parts.prioritized is not None:
        rb.parts.prioritized.priorities.repair(rb.parts.storage)


def state_dict(rb: Any) -> dict[str, Any]:
    """Return a copy of the rows and of the state of all components, as tensors and plain Python values."""
    own = {"_trajectories": trajectories_of(rb.storage), "_flow": None if rb.flow is None else rb.flow.state_dict()}
    return TensorDictReplayBuffer.state_dict(rb) | own


def load_state_dict(rb: Any, state_dict: dict[str, Any]) -> None:
    """Restore the state of :meth:`state_dict`; batches drawn ahead and flow control as in :meth:`loads`.

    Raises:
        ValueError: the state belongs to another class of storage, sampler or writer, its rows do not fit, or one of its
            numbers is wrong.

        After an error, the buffer is unchanged.
    """
    rb.initialize()
    with state_of(rb):
        rb.validate_prefetched(state_dict.get("_prefetch_state"))  # as TorchRL does, before any change
        if rb.flow is not None:
            rb.flow.refuse_state(state_dict.get("_flow"))
        refuse_counts(state_dict["_batch_size"], state_dict.get("_consume_after_n_samples"))
        refuse_trajectories(state_dict.get("_trajectories", []))
        rng = state_dict.get("_rng")
        refuse_generators({} if rng is None else {rng[1]: rng[0]})
    with rb.futures_lock:
        rb.synchronize()  # before the other locks are taken: prefetching threads need them
        with rb.locked():  # no thread sees a mixture of two states
            if isinstance(rb.storage, PackedStorage):
                with state_of(rb.storage):
                    examine(rb.storage, state_dict["_storage"])
            parts = {"_transforms": rb.transform, "_writer": rb.writer, "_sampler": rb.sampler}
            load_or_restore(parts, state_dict)
            TensorDictReplayBuffer.load_state_dict(rb, state_dict)
            load_trajectories(rb, state_dict.get("_trajectories", []))
            if rb.flow is not None:
                rb.flow.restore(state_dict.get("_flow"), len(rb.storage))
            if rb.parts.wrapper is not None:
                rb.parts.wrapper.watch(rb.storage)


def share(rb: Buffer, shared: bool = True) -> Buffer:
    """Share this buffer with processes that are later forked, or spawned with the buffer as an argument.

    Rows, counters and priorities move to shared memory. Every process may write, sample and update priorities; a lock
    runs these calls one at a time. If a process is killed during a write, the write is undone and the lock released.
    Each process has its own random generator, and its own position in an epoch. The storage, sampler and writer of a
    shared buffer cannot be replaced. TorchRL's collectors with several workers call this method. For a buffer with a
    storage of TorchRL, this method only calls TorchRL's ``share``.

    Args:
        shared: ``False`` does nothing, because sharing cannot be undone.

    Cost: about 5 us more per write, sample or update; a write also copies the rows that it replaces. If a process dies
    while it holds the lock, the next call takes O(N) for N rows.

    Raises:
        ValueError: the rows are on a CUDA device.
        MemoryError: the written rows or the priorities do not fit into shared memory; nothing has changed.
        RuntimeError: the operating system has no locks that survive the death of a process (Windows).
    """
    storage = vars(rb).get("_storage")  # missing while TorchRL's constructor calls this
    if not shared or not isinstance(storage, PackedStorage):
        return TensorDictReplayBuffer.share(rb, shared)
    with storage.lock:
        if storage.is_reserved:
            complete_reserved(rb)
        rb.bound = {}  # shared rows, counters and priorities have other addresses
        share_parts(storage, rb.sampler, rb.writer, rb.flow)
        rb.stale_updates.share_memory_()
        TensorDictReplayBuffer.share(rb, True)
        rb._write_lock = nullcontext()  # the storage's lock also works between processes
    return rb
