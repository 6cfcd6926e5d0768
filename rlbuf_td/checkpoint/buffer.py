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
from rlbuf_td.storages.checks import State, is_count, state_of
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
    from rlbuf_td.storages.saved import SavedRows

KIND = "buffer"
_RETURNED = "_sample_calls", "_sampled_items"  # TorchRL's names in a state


def dump_buffer(rb: ReplayBuffer, path: str | Path) -> None:
    """Write the state of a buffer, the classes of its parts and its shape to the folder
    ``path``."""
    with writing(path, KIND) as writer, at_rest(rb):
        state = capture(rb, copies=False)
        state["classes"] = {
            "buffer": type(rb).__name__,
            "storage": name_of(rb.storage),
            "sampler": name_of(rb.sampler),
            "writer": name_of(rb.writer),
        }
        state["shape"] = [*(rb.storage._total_shape or ())]
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
        if rows is not None and not rows.is_read_once:
            _verify(rows)  # before the load changes anything
        with rb._fully_locked():
            put = rb.storage.remove_rows
            if rows is not None:
                put = partial(rows.put, rows.read())
            restore(rb, saved, put, rows_only=rows_only, transforms=transforms)


def try_dump(rb: ReplayBuffer, path: str | Path, *, transforms: bool) -> None:
    """Raise an error if :func:`load_buffer` would, and verify all files; leave the
    buffer unchanged."""
    with reading(path, KIND) as dump:
        saved = dump.state()
        _refuse_other_parts(rb, saved, rows_only=False)
        rows = try_state(rb, saved, dump.path, transforms=transforms)
        if rows is not None:
            _verify(rows)


def _verify(rows: SavedRows) -> None:
    for tensor in (rows.matrix, *rows.entries):
        if isinstance(tensor, SavedTensor):
            tensor.verify()


def _refuse_other_parts(rb: ReplayBuffer, saved: State, rows_only: bool) -> None:
    """Raise a CheckpointError if the dump is that of a buffer with other classes of
    parts."""
    names = {"storage": type(rb.storage).__name__}
    if not rows_only:
        names |= {"writer": name_of(rb.writer), "sampler": name_of(rb.sampler)}
    elif not isinstance(rb.writer, RoundRobinWriter):
        raise CheckpointError(
            f"rows_only needs a ring, this buffer has a {type(rb.writer).__name__}"
        )
    for part, name in names.items():
        saved_name = saved["classes"][part]
        if saved_name != name:
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
        >>> saved = open_checkpoint(folder.name)
        >>> saved.classes["sampler"], saved.shape, saved.rows["reward"].tolist()
        ('UniformSampler', (1000,), [0.0, 1.0, 2.0])
        >>> folder.cleanup()
    """
    with reading(path, KIND) as dump:
        saved = dump.state()
        content = saved["_storage"]
        storage = rows = None
        if content and "layout" in content:
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
    flow = rb.flow
    stats = rb.episode_stats
    parts = {
        "_storage": rb.storage,
        "_sampler": rb.sampler,
        "_writer": rb.writer,
        "_transforms": rb.transform,
    }
    state: State = {
        name: part.state_dict()
        if copies or not hasattr(part, "snapshot")
        else part.snapshot()
        for name, part in parts.items()
    }
    state["_batch_size"] = rb._batch_size
    state["_consume_after_n_samples"] = rb._consume_after_n_samples
    state["_rng"] = None
    if generator is not None:
        state["_rng"] = (generator.get_state(), str(generator.device))
    state["_flow"] = None if flow is None else flow.state_dict()
    state["_stats"] = None if stats is None else stats.state_dict()
    return state | dict(zip(_RETURNED, rb.returned, strict=True))


def name_of(part: object) -> str:
    """Return the class name of a part, with that of a wrapped sampler:
    ``"NStepSampler(UniformSampler)"``."""
    inner = getattr(part, "sampler", None)
    return type(part).__name__ + ("" if inner is None else f"({name_of(inner)})")


def refuse(rb: ReplayBuffer, state: State) -> None:
    """Raise an error if a state has a wrong number that its part does not refuse."""
    names = "_batch_size", "_consume_after_n_samples", *_RETURNED
    counts = [state.get(name) for name in names]
    counts += [state["_writer"].get(name) for name in ("_cursor", "_write_count")]
    if not all(count is None or is_count(count) for count in counts):
        raise ValueError(
            f"batch size, counts and cursor must be whole numbers of 62 bits, got {counts}"
        )
    if rb.flow is not None:
        rb.flow.refuse_state(state.get("_flow"))
    if state.get("_rng") is not None:
        _generator(*state["_rng"])


def try_state(
    rb: ReplayBuffer,
    state: State,
    folder: Path | None = None,
    *,
    transforms: bool = True,
) -> SavedRows | None:
    """Raise an error if a buffer cannot restore a state; leave the buffer unchanged.

    ``folder`` is that of the files of a dump. Return the rows.
    """
    rb._initialize()
    stats = rb.episode_stats
    with rb._locked(), defer_sigint, state_of(rb):
        rows = rb.storage.examine(state["_storage"], folder)
        refuse(rb, state)
        if stats is not None and state.get("_stats") is not None:
            with state_of(stats):
                copy.deepcopy(stats).load_state_dict(state["_stats"])
        parts: dict[str, Any] = {"_writer": rb.writer}
        if transforms:
            _refuse_other_tensors(rb.transform.state_dict(), state["_transforms"])
            parts["_transforms"] = rb.transform
        if hasattr(innermost_of(rb.sampler), "snapshot"):
            # its own copy, because a larger one cannot become smaller again
            with state_of(rb.sampler):
                _trial_of(rb.sampler).load_state_dict(state["_sampler"])
        else:
            parts["_sampler"] = rb.sampler
        before = {key: copy.deepcopy(part.state_dict()) for key, part in parts.items()}
        for values in (state, before):
            with all_or_nothing() as undo:
                for key, part in parts.items():
                    load_part(part, values[key], undo)
    return rows


def _trial_of(sampler: Any) -> Any:
    """Return a copy of a sampler that refuses what the sampler refuses."""
    trial = copy.deepcopy(sampler)
    prioritized = innermost_of(trial)
    if hasattr(prioritized, "priorities"):
        prioritized.priorities.is_shared = innermost_of(sampler).priorities.is_shared
    return trial


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
    with all_or_nothing() as undo:
        if transforms:
            _refuse_other_tensors(rb.transform.state_dict(), state["_transforms"])
            load_part(rb.transform, state["_transforms"], undo)
        if not rows_only:
            _load_parts(rb, state, undo)
        put()
    # What follows cannot fail.
    if rows_only:
        _count_as_new(rb, state["_writer"])
    else:
        _restore_settings(rb, state)
    if rb.flow is not None:
        flow = None if rows_only else state.get("_flow")
        rb.flow.restore(flow, row_count(rb.storage))
    _end_loaded(rb)
    rb._connect(default_priorities=rows_only)


def _load_parts(rb: ReplayBuffer, state: State, undo: ExitStack) -> None:
    """Load the parts of a buffer; samplers last, because those of this package refuse a
    state before they change."""
    stats = rb.episode_stats
    if stats is not None and state.get("_stats") is not None:
        load_part(stats, state["_stats"], undo)
    load_part(rb.writer, state["_writer"], undo)
    load_part(rb.sampler, state["_sampler"], undo)


def _count_as_new(rb: ReplayBuffer, writer: State) -> None:
    """Take the rows of a load as new ones; the counts of the writer are the saved
    ones."""
    empty_part(rb.sampler)
    empty_part(rb.writer)
    set_cursor(rb.writer, writer.get("_cursor", 0), writer.get("_write_count", 0))


def _restore_settings(rb: ReplayBuffer, state: State) -> None:
    """Restore what belongs to the buffer itself."""
    rb._batch_size = state["_batch_size"]
    rb._consume_after_n_samples = state.get("_consume_after_n_samples")
    rb.returned.set([state.get(name) or 0 for name in _RETURNED])
    restore_generator(rb, state.get("_rng"))


def _refuse_other_tensors(current: State, saved: State) -> None:
    """Raise a ValueError if the saved transforms have other tensors than the buffer's
    own."""
    kinds = _kinds_of(current)
    saved_kinds = _kinds_of(saved)
    if kinds != saved_kinds:
        raise ValueError(
            f"the saved transforms have the tensors {saved_kinds}, those of this buffer {kinds}: make it with the same "
            "transforms, or use loads without transforms=True, which keeps the buffer's own"
        )


def _kinds_of(state: State) -> dict[str, str]:
    return {
        name: kind(value.dtype, value.shape)
        if isinstance(value, torch.Tensor)
        else "no tensor"
        for name, value in state.items()
    }


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
    state, device = saved
    generator = _generator(state, device)
    current = generator_of(rb)
    if generator is None:
        warnings.warn(
            f"the dump's generator is on {device}, which is not available: it was not restored",
            stacklevel=5,
        )
    elif current is not None and current.device == generator.device:
        current.set_state(state)  # the same object: others may share it
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


@contextmanager
def all_or_nothing() -> Iterator[ExitStack]:
    """Yield a stack that undoes changes if the ``with`` block raises an error."""
    with ExitStack() as undo:
        yield undo
        undo.pop_all()


def load_part(part: Any, state: State, undo: ExitStack) -> None:
    """Load a state into a part; ``undo`` restores a part that may fail halfway."""
    with state_of(part):
        if not hasattr(innermost_of(part), "snapshot"):
            undo.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))
        part.load_state_dict(state)
