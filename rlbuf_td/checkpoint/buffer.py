"""The state of a buffer and its parts: how to capture it, to save it, and to load all
of it or nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import RoundRobinWriter

from rlbuf_td.checkpoint.files import CheckpointError, SavedTensor, reading, writing
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import State, state_of
from rlbuf_td.storages.indexing import row_count, written_rows
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.schema import kind
from rlbuf_td.storages.torchrl_parts import (
    empty_part,
    generator_of,
    set_cursor,
)

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer

KIND = "buffer"
_RETURNED = "_sample_calls", "_sampled_items"  # TorchRL's names in a state


def dump_buffer(rb: ReplayBuffer, path: str | Path) -> None:
    with writing(path, KIND) as writer, at_rest(rb):
        storage, state = rb.storage, capture(rb, copies=False)
        names = {
            part: name_of(getattr(rb, part))
            for part in ("storage", "sampler", "writer")
        }
        state |= {
            "classes": {"buffer": type(rb).__name__} | names,
            "shape": [*(storage._total_shape or ())],
        }
        writer.write(state)


def load_buffer(
    rb: ReplayBuffer, path: str | Path, *, rows_only: bool, transforms: bool
) -> None:
    """Check a dump against the buffer, and then load it; if a component refuses its
    state, undo all changes. See :meth:`ReplayBuffer.loads` for the arguments."""
    rb.synchronize()
    with reading(path, KIND) as dump:
        saved = dump.state()
        _refuse_other_parts(rb, saved, rows_only)
        rows = rb.storage.examine(saved["_storage"], dump.path)
        refuse(rb, saved)
        if rows and not rows.is_read_once:  # before the load changes anything
            for saved_tensor in (rows.matrix, *rows.entries):
                if isinstance(saved_tensor, SavedTensor):
                    saved_tensor.verify()
        with rb._fully_locked():
            put = (
                rb.storage.remove_rows
                if rows is None
                else partial(rows.put, rows.read())
            )
            restore(rb, saved, put, rows_only=rows_only, transforms=transforms)


def _refuse_other_parts(rb: ReplayBuffer, saved: State, rows_only: bool) -> None:
    names = {"storage": type(rb.storage).__name__}
    if not rows_only:
        names |= {"writer": name_of(rb.writer), "sampler": name_of(rb.sampler)}
    elif not isinstance(rb.writer, RoundRobinWriter):
        raise CheckpointError(
            f"rows_only needs a ring, this buffer has a {type(rb.writer).__name__}"
        )
    for part, name in names.items():
        if (saved_name := saved["classes"][part]) != name:
            hint = "; rows_only=True loads only the rows" if part != "storage" else ""
            raise CheckpointError(
                f"the dump has a {saved_name} as {part}, this buffer a {name}{hint}"
            )


@dataclass(frozen=True)
class Checkpoint:
    """The content of a dump."""

    about: dict[str, Any]  # when the dump was written, and by which versions
    classes: dict[str, str]  # the class names of buffer, storage, sampler and writer
    shape: tuple[int, ...]  # the capacity, [T, *lanes]
    # the written rows, [n] or [steps, E]; None if there are none
    rows: TensorDictBase | None
    # the rows in a storage of that capacity in RAM; None before the first write
    storage: PackedStorage | None
    sampler: State  # the sampler's state
    # the writer's state: `_cursor` is a ring's next position, `_write_count` counts rows
    writer: State


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read a dump of :meth:`ReplayBuffer.dumps <rlbuf_td.ReplayBuffer.dumps>` without
    loading it into a buffer.

    Args:
        path: the folder of the dump.

    Returns:
        A :class:`Checkpoint` with the rows, the class names, the capacity, and the
        states of sampler and writer.

    Raises:
        CheckpointError: the folder holds no dump, a file is missing or damaged.

    Cost: reads all files and verifies their checksums. The rows take as many bytes of
    RAM as in the buffer.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from rlbuf_td import ReplayBuffer
        >>> rb = ReplayBuffer()
        >>> _ = rb.extend(TensorDict({"reward": torch.arange(3.0)}, [3]))
        >>> folder = tempfile.TemporaryDirectory()
        >>> rb.dumps(folder.name)
        >>> found = open_checkpoint(folder.name)
        >>> found.classes["sampler"], found.shape, found.rows["reward"].tolist()
        ('UniformSampler', (1000,), [0.0, 1.0, 2.0])
        >>> folder.cleanup()
    """
    with reading(path, KIND) as dump:
        saved, storage, rows = dump.state(), None, None
        if (content := saved["_storage"]) and "layout" in content:
            storage = PackedStorage.of_state(content)
            has_gap = storage.ndim == 1 and storage.ring.holes > 0  # after a kill
            rows = storage[written_rows(storage)] if has_gap else storage[:]
        return Checkpoint(
            about=dump.about,
            classes=saved["classes"],
            shape=tuple(saved["shape"]),
            rows=rows,
            storage=storage,
            sampler=saved["_sampler"],
            writer=saved["_writer"],
        )


# -- the state


@contextmanager
def at_rest(rb: ReplayBuffer) -> Iterator[None]:
    """Drop the batches drawn ahead, and hold all locks of a buffer."""
    with rb._capture_prefetch_state(clone_queue=False), rb._locked():
        yield


def capture(rb: ReplayBuffer, *, copies: bool) -> State:
    """Return all state that determines the behaviour of a buffer, with copies or views
    of its tensors."""
    generator = generator_of(rb)
    parts = {
        "_storage": rb.storage,
        "_sampler": rb.sampler,
        "_writer": rb.writer,
        "_transforms": rb.transform,
    }
    return {
        **{
            name: part.state_dict()
            if copies or not hasattr(part, "snapshot")
            else part.snapshot()
            for name, part in parts.items()
        },
        "_batch_size": rb._batch_size,
        "_consume_after_n_samples": rb._consume_after_n_samples,
        "_rng": None
        if generator is None
        else (generator.get_state(), str(generator.device)),
        "_flow": None if rb.flow is None else rb.flow.state_dict(),
        "_stats": None if rb.episode_stats is None else rb.episode_stats.state_dict(),
        **dict(zip(_RETURNED, rb.returned, strict=True)),
    }


def name_of(part: object) -> str:
    """Return the class name of a part, with that of a wrapped sampler:
    ``"NStepSampler(UniformSampler)"``."""
    inner = getattr(part, "sampler", None)
    return type(part).__name__ + ("" if inner is None else f"({name_of(inner)})")


def refuse(rb: ReplayBuffer, state: State) -> None:
    """Raise an error if a state has a wrong number that its part does not refuse."""
    counts = [*map(state.get, ("_batch_size", "_consume_after_n_samples", *_RETURNED))]
    counts += map(state["_writer"].get, ("_cursor", "_write_count"))
    if not all(
        count is None or (type(count) is int and 0 <= count < 1 << 63)
        for count in counts
    ):
        raise ValueError(
            f"batch size, counts and cursor must be whole numbers of 63 bits, got {counts}"
        )
    if rb.flow is not None:
        rb.flow.refuse_state(state.get("_flow"))
    if state.get("_rng") is not None:
        _generator(*state["_rng"])


@defer_sigint
def restore(
    rb: ReplayBuffer,
    state: State,
    put: Callable[[], None],
    *,
    rows_only: bool = False,
    transforms: bool = True,
) -> None:
    """Restore what :func:`capture` has returned; if a part refuses its state, undo all
    changes.

    Args:
        rb: the buffer; the caller holds its locks.
        state: the state, which :func:`refuse` has checked.
        put: replaces the rows.
        rows_only: whether only rows and counts of writes are restored; for the sampler,
            the rows are then new.
        transforms: whether transforms take their saved state.
    """
    writer = state["_writer"]
    with all_or_nothing() as undo:
        if transforms:
            _refuse_other_tensors(rb.transform.state_dict(), state["_transforms"])
            load_part(rb.transform, state["_transforms"], undo)
        if not rows_only:
            if rb.episode_stats is not None and state.get("_stats") is not None:
                load_part(rb.episode_stats, state["_stats"], undo)
            load_part(rb.writer, writer, undo)
            load_part(rb.sampler, state["_sampler"], undo)
        put()
    # The code below cannot fail.
    if rows_only:
        empty_part(rb.sampler)
        empty_part(rb.writer)
        set_cursor(rb.writer, writer.get("_cursor", 0), writer.get("_write_count", 0))
    else:
        rb._batch_size, rb._consume_after_n_samples = (
            state["_batch_size"],
            state.get("_consume_after_n_samples"),
        )
        rb.returned.values[:] = [state.get(name) or 0 for name in _RETURNED]
        restore_generator(rb, state.get("_rng"))
    if rb.flow is not None:
        rb.flow.restore(
            None if rows_only else state.get("_flow"), row_count(rb.storage)
        )
    _end_loaded(rb)
    rb._connect(default_priorities=rows_only)


def _refuse_other_tensors(own: State, saved: State) -> None:
    """Raise a ValueError if the saved transforms have other tensors than the buffer's
    own."""
    kinds, saved_kinds = (
        {
            name: kind(x.dtype, x.shape) if isinstance(x, torch.Tensor) else "no tensor"
            for name, x in state.items()
        }
        for state in (own, saved)
    )
    if kinds != saved_kinds:
        raise ValueError(
            f"the saved transforms have the tensors {saved_kinds}, those of this buffer {kinds}: make it with the same "
            "transforms, or use loads without transforms=True, which keeps the buffer's own"
        )


def _end_loaded(rb: ReplayBuffer) -> None:
    """After a load, tell the other buffers over the storage, and end the unfinished
    trajectories that have ids, also those of the statistics."""
    rb.storage.end_load(but=rb)
    if rb.episode_stats is not None:
        rb.episode_stats.forget_open()
    # all loaded rows have their priorities
    if rb.parts is not None and rb.parts.prioritized is not None:
        rb.parts.prioritized.priorities.keep(slice(0, None), rb.storage)


def innermost_of(sampler: object) -> Any:
    while hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    return sampler


def innermost_state(state: State) -> State:
    while "sampler" in state:
        state = state["sampler"]
    return state


# -- generators


def restore_generator(rb: ReplayBuffer, saved: tuple[object, str] | None) -> None:
    """Restore the buffer's generator; create a generator if the buffer has none on the
    saved device."""
    if saved is None:
        return
    generator, current = _generator(*saved), generator_of(rb)
    if generator is None:
        where = f"on {saved[1]}, which is not available"
        warnings.warn(
            f"the dump's generator is {where}: it was not restored", stacklevel=4
        )
    elif current is not None and current.device == generator.device:
        current.set_state(saved[0])  # the same object: others may share it
    else:
        rb.set_rng(generator)


def _generator(state: Any, device: str) -> torch.Generator | None:
    """Return a generator in a saved state; None if this machine lacks its device."""
    try:
        generator = torch.Generator(device)
    except RuntimeError:
        return None
    generator.set_state(state)
    return generator


# -- undoing


@contextmanager
def all_or_nothing() -> Iterator[ExitStack]:
    """Yield a stack that undoes changes if the ``with`` block raises an error."""
    with ExitStack() as undo:
        yield undo
        undo.pop_all()


def load_part(part: Any, state: State, undo: ExitStack) -> None:
    """Load a state into a part. Load samplers last: those of this package refuse a
    state before they change."""
    with state_of(part):
        if not hasattr(innermost_of(part), "snapshot"):
            undo.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))
        part.load_state_dict(state)
