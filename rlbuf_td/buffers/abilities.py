"""Methods of :class:`~rlbuf_td.ReplayBuffer` other than writing, sampling and priorities.

Constructors for environments, rows by age, edits of rows, health, dumps, and sharing between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from multiprocessing.context import get_spawning_popen
from operator import setitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td.buffers.parts import share_parts
from rlbuf_td.checkpoint.buffer import dump_buffer, load_buffer
from rlbuf_td.checkpoint.parts import load_or_restore, load_trajectories, trajectories_of
from rlbuf_td.diagnostics.health import health as health_of_parts
from rlbuf_td.envs.specs import schema_of, transition_schema
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.state import examine
from rlbuf_td.storages.writes import is_key
from rlbuf_td.writers.common import steps_by_age

Arguments = ParamSpec("Arguments")
Buffer = TypeVar("Buffer", bound=TensorDictReplayBuffer)

if TYPE_CHECKING:

    class constructor(Generic[Arguments]):
        """A ``classmethod`` that returns a buffer of the class on which it is called."""

        def __init__(self, function: Callable[Concatenate[Any, Arguments], Any]) -> None: ...
        def __get__(self, instance: object, owner: type[Buffer]) -> Callable[Arguments, Buffer]: ...

else:
    constructor = classmethod

NO_CHECKPOINTERS = (
    "this buffer has its own dump format, without TorchRL's checkpointers and hooks: for those use TorchRL's "
    "TensorDictReplayBuffer over the same storage"
)

# -- constructors


def from_env(cls: Any, /, env: Any, capacity: int, *, extras: Any = None, **kwargs: Any) -> Any:
    """Return a buffer whose rows are allocated for the transitions of an environment.

    Every write is checked against the environment's keys, dtypes and shapes. The first write may add keys, such as a
    policy's outputs. RAM is committed as rows are written.

    Args:
        env: a TorchRL or Gymnasium environment, single or vectorised.
        capacity: the number of transitions, rounded up to whole time steps; for a :class:`RolloutBuffer`, the number of
            time steps.
        extras: further entries of a transition, see :func:`~rlbuf_td.envs.specs.schema_of`. If several processes share
            the rows, the first write cannot add entries: name all of them here.
        **kwargs: as for :meth:`from_schema`.

    Raises:
        SchemaError: the environment has values without a fixed size in bytes.
        TypeError: ``env`` is not an environment.

    Example:
        >>> import gymnasium
        >>> from rlbuf_td import ReplayBuffer
        >>> rb = ReplayBuffer.from_env(gymnasium.make_vec("CartPole-v1", num_envs=3), 300, batch_size=8)
        >>> rb.storage.max_size, len(rb)
        (300, 0)
    """
    return cls.from_schema(schema_of(env, extras=extras), capacity, **kwargs)


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
    """Return a buffer as :meth:`from_env` does, but from the Gymnasium spaces or TorchRL specs of one environment.

    Args:
        observation_space: the space or spec of one observation.
        action_space: the space or spec of one action.
        capacity: see :meth:`from_env`.
        num_envs: E, the number of lanes of rows ``[T, E]``; ``None``: rows ``[T]``.
        extras: see :meth:`from_env`; ``{"next": {"reward": numpy.zeros(1)}}`` keeps rewards float64.
        **kwargs: as for :meth:`from_schema`.

    Raises:
        SchemaError: a space has values without a fixed size in bytes.
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
    return cls.from_schema(schema_of(schema, extras=extras), capacity, **kwargs)


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
    offload: bool = False,
    share_next: Any = False,
    frames: Any = None,
    **kwargs: Any,
) -> Any:
    """Return a buffer whose rows are allocated for transitions like an example.

    Args:
        schema: an example of a time step, ``[]`` or ``[*lanes]``; or what :func:`~rlbuf_td.envs.specs.schema_of`
            returns.
        capacity: see :meth:`from_env`.
        flat: ``True``: rows ``[T]`` without a lane dim, even if ``schema`` has lanes.
        device: the device of the batches and, without ``storing_device``, of the rows.
        storing_device: the device of the rows (TorchRL's collectors use the same two names).
        scratch_dir, shared, offload, share_next, frames: see :class:`PackedStorage`.
        **kwargs: as for this class: ``sampler``, ``batch_size``, ``transform`` ...

    Raises:
        SchemaError: the schema has an entry that cannot be packed.

    Example:
        >>> from tensordict import TensorDict
        >>> from rlbuf_td import ReplayBuffer
        >>> transition = TensorDict({"observation": torch.zeros(3), "next": {"reward": torch.zeros(1)}})
        >>> ReplayBuffer.from_schema(transition, 100).storage.is_reserved
        True
    """
    if flat and schema.ndim:
        schema = schema.flatten()[0]
    if storing_device is not None:
        device, kwargs["device"] = storing_device, device
    rows: dict[str, Any] = {"scratch_dir": scratch_dir, "shared": shared, "offload": offload}
    rows |= {"share_next": share_next, "frames": frames, "device": device}
    storage = PackedStorage(capacity, ndim=1 + schema.ndim, **rows)
    storage.reserve(schema)
    return cls(storage=storage, **kwargs)


# -- rows by age


def chronological(rb: Any, *, flat: bool = False) -> TensorDictBase:
    """Return all rows, oldest first, in fresh memory: ``[n]``, or ``[T, E]`` when ``ndim=2``.

    Transforms are applied, as when sampling.

    Args:
        flat: merge the lane dim into time: ``[T * E]``, all lanes of a time step together.

    Raises:
        RuntimeError: the buffer is empty.
        TypeError: the writer does not write in time order, so the age of rows is unknown.
    """
    return last(rb, None, flat=flat)


def last(rb: Any, n: int | None, *, flat: bool = False) -> TensorDictBase:
    """Return the newest ``n`` time steps, oldest first, in fresh memory: ``[n]``, or ``[n, E]`` when ``ndim=2``.

    Args:
        n: the number of time steps, at least 1; ``None``: all.
        flat: see :meth:`chronological`.

    Raises:
        ValueError: fewer than ``n`` time steps are stored, or ``n < 1``. :meth:`chronological` lists the other errors.
    """
    storage, writer = rb.storage, rb.writer
    with rb._locked():
        data = storage.get(steps_by_age(writer, storage, n))
    if flat and data.ndim > 1:
        data = data.flatten(0, storage.ndim - 1)
    return rb._transformed(data)


# -- edits of rows, which keep their priorities


def set_at_(rb: Buffer, key: NestedKey, value: Any, index: Any) -> Buffer:
    """Set one entry of the rows at ``index``, an index of a tensor ``[T, *lanes]``, and return the buffer.

    Raises:
        KeyError: the rows have no such key.
        RuntimeError: ``value`` does not have the shape of the entry.
    """
    if not isinstance(rb.storage, PackedStorage):
        return TensorDictReplayBuffer.set_at_(rb, key, value, index)
    rb.storage.edit(lambda data: setitem(data[key], ..., value), index)
    return rb


def set_(rb: Buffer, key: NestedKey, value: Any) -> Buffer:
    """Set one entry of all rows, and return the buffer.

    Raises:
        KeyError: the rows have no such key.
        RuntimeError: ``value`` is not ``[T, *lanes, ...]``.
    """
    if not isinstance(rb.storage, PackedStorage):
        return TensorDictReplayBuffer.set_(rb, key, value)
    rb.storage.edit(lambda data: data.set_(key, value))
    return rb


def set_item(rb: Any, index: Any, value: Any) -> None:
    """Set the rows at an index; if the index is a key, set that entry of all rows, in the shape of ``rb[key]``."""
    if is_key(index) and isinstance(rb.storage, PackedStorage):
        rb.storage.edit(lambda data: rb._transpose(data).set_(index, value))
    else:  # TorchRL's code would change a temporary TensorDict
        TensorDictReplayBuffer.__setitem__(rb, index, value)


def update_(rb: Buffer, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None) -> Buffer:
    """Set several entries of all rows, and return the buffer; see TorchRL's ``ReplayBuffer.update_``."""
    if not isinstance(rb.storage, PackedStorage):
        return TensorDictReplayBuffer.update_(rb, input_dict_or_td, clone, keys_to_update=keys_to_update)
    rb.storage.edit(lambda data: data.update_(input_dict_or_td, clone=clone, keys_to_update=keys_to_update))
    return rb


# -- health, dumps


def health(rb: Any) -> dict[str, float]:
    """Return statistics of the buffer and its batches, as a flat dict for loggers.

    See :mod:`rlbuf_td.diagnostics.health` for the entries. Cost: O(N log N) with priorities, too much for every step.
    """
    storage, sampler, writer = rb.storage, rb.sampler, rb.writer
    with rb._locked():
        report = health_of_parts(storage, sampler, writer, rb.last_draw, rb.replay_count)
    report["stale_updates"] = float(rb.stale_updates.total())
    return report if rb.flow is None else report | rb.flow.report()


def dumps(rb: Any, path: str | Path, *, progress: bool | None = None, sync: bool = True) -> None:
    """Save rows, priorities, counters, trajectories and generators in the folder ``path``.

    A process killed at any time leaves the old or the new dump intact. Unchanged content is not written again.
    TorchRL's buffers cannot load a dump; ``theirs.extend(rb.chronological())`` copies the rows to a TorchRL buffer.

    Args:
        path: created if missing. A folder with the manifest of another program is never overwritten.
        progress: show a progress bar (needs tqdm); ``None``: only on a terminal, and for at least 1 GiB.
        sync: wait until everything is on the disk. ``False`` takes half the time, but a crash of the machine (not of
            the process) may then damage the old and the new dump; a load would detect the damage.

    Raises:
        CheckpointError: a part cannot be saved without pickle, or the folder holds something other than a dump.
        OSError: for example, the disk is full. The previous dump is intact.
        NotImplementedError: the storage has a checkpointer, which this method would not call.
    """
    if type(rb.storage.checkpointer) is not rb.storage._default_checkpointer:
        raise NotImplementedError(NO_CHECKPOINTERS)
    dump_buffer(rb, path, progress, sync=sync)


def loads(
    rb: Any, path: str | Path, *, rows_only: bool = False, default_generator: bool = False, progress: bool | None = None
) -> None:
    """Restore a dump of :meth:`dumps`; the buffer continues with the same batches as the saved one.

    Every file is first compared with its checksum; a load executes no code. The buffer must have parts of the same
    classes; its rows are replaced. A buffer of another capacity keeps the newest rows that fit, with their priorities,
    and warns. Unfinished trajectories with ids (``("collector", "traj_ids")``) end with the load, because new
    collectors reuse the ids.

    Args:
        path: the folder of the dump.
        rows_only: load only the rows; this buffer's sampler treats them as newly written.
        default_generator: also restore torch's default generator, which buffers without a generator use.
        progress: as for :meth:`dumps`.

    Raises:
        CheckpointError: a file is missing, damaged, truncated, foreign or of a newer version, or the dump does not fit
            this buffer; the message gives the reason. The buffer is unchanged.
    """
    connect = partial(rb._connect, default_priorities=rows_only)
    load_buffer(rb, path, connect, rows_only=rows_only, default_generator=default_generator, progress=progress)


def refuse_hook(rb: Any, hook: Any) -> NoReturn:
    """Refuse a hook (NotImplementedError): :meth:`dumps` and :meth:`loads` would not call it."""
    raise NotImplementedError(NO_CHECKPOINTERS)


def full(rb: Any) -> bool:
    """Whether the next write replaces the oldest rows."""
    return rb.storage._is_full


def describe(rb: Any) -> str:
    """Return the parts and the fill level of a buffer, for its ``repr``."""
    if not rb.initialized:
        return f"{type(rb).__name__}(not initialized)"
    named = [("storage", rb.storage), ("sampler", rb.sampler), ("writer", rb.writer)]
    if len(rb._parts.transforms):
        named.append(("transform", rb.transform))
    lines = [f"{name}={part!r},".replace("\n", "\n    ") for name, part in named]
    lines.append(f"batch_size={rb.batch_size}, fill={len(rb.storage) / rb.storage.max_size:.1%}")
    return f"{type(rb).__name__}(\n    " + "\n    ".join(lines) + "\n)"


def repair(rb: Any) -> None:
    """Make priorities consistent after a process has died while it held the lock."""
    if rb._parts is not None and rb._parts.prioritized is not None:
        rb._parts.prioritized.priorities.repair(rb._parts.storage)


def state_dict(rb: Any) -> dict[str, Any]:
    """Return a copy of all state that determines behaviour, as tensors and plain values."""
    return TensorDictReplayBuffer.state_dict(rb) | {"_trajectories": trajectories_of(rb.storage)}


def load_state_dict(rb: Any, state_dict: dict[str, Any]) -> None:
    """Restore a result of :meth:`state_dict`.

    Raises:
        ValueError: the state is of other parts, or its rows do not fit this buffer. The buffer is unchanged.
        RuntimeError: the state was saved with another ``prefetch``. The buffer is unchanged.
    """
    rb._initialize()
    rb._validate_prefetch_state(state_dict.get("_prefetch_state"))  # as TorchRL does, before any change
    with rb._futures_lock:
        rb.synchronize()  # before the other locks are taken: prefetching threads need them
        with rb._locked():  # no thread sees a mixture of two states
            if isinstance(rb.storage, PackedStorage):
                examine(rb.storage, state_dict["_storage"])
            parts = {"_transforms": rb.transform, "_writer": rb.writer, "_sampler": rb.sampler}
            load_or_restore(parts, state_dict)
            TensorDictReplayBuffer.load_state_dict(rb, state_dict)
            load_trajectories(rb, state_dict.get("_trajectories", []))
            if rb._parts.wrapper is not None:
                rb._parts.wrapper.watch(rb.storage)


# -- sharing


def share_if_spawning(rb: Any) -> None:
    """Share a buffer that is being sent to a spawned process."""
    if get_spawning_popen() is not None and rb._parts is not None and rb._parts.is_packed:
        rb.share()


def share(rb: Buffer, shared: bool = True) -> Buffer:
    """Share this buffer with processes that are later forked, or spawned with the buffer as an argument.

    Rows, counters and priorities move to shared memory. Every process may write, sample and update priorities; a lock
    runs these calls one at a time. If a process is killed during a write, the write is undone and the lock released.
    Each process has its own copy of other sampler state (position in an epoch, generator). Storage, sampler and writer
    of a shared buffer cannot be replaced. TorchRL's collectors with several workers call this themselves. A TorchRL
    storage is shared in TorchRL's way.

    Args:
        shared: ``False`` changes nothing (TorchRL's constructor passes it): sharing cannot be undone.

    Cost: some 5 us per call, and a copy of the rows that a write replaces; O(N) after a process has died in a call.

    Raises:
        ValueError: the rows are on a CUDA device.
        RuntimeError: this system lacks locks that outlive processes (Windows).
    """
    storage = vars(rb).get("_storage")  # missing while TorchRL's constructor calls this
    if not shared or not isinstance(storage, PackedStorage):
        return TensorDictReplayBuffer.share(rb, shared)
    with storage.lock:
        share_parts(storage, rb.sampler, rb.writer)
        rb.stale_updates.share_memory_()
        if rb.flow is not None:
            rb.flow.share_memory_()
        TensorDictReplayBuffer.share(rb, True)
        rb._write_lock = nullcontext()  # the storage's lock also works between processes
    return rb
