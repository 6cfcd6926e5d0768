"""The state of a buffer's storage, sampler and writer: how to save it, and how to load all of it or nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torchrl.data.replay_buffers import RandomSampler, Storage

from rlbuf_td.checkpoint.manifest import CheckpointError
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import state_of
from rlbuf_td.storages.state import end_trajectories
from rlbuf_td.storages.torchrl_parts import generator_of, newest_step_of


@contextmanager
def at_rest(rb: Any) -> Iterator[None]:
    """Drop the batches drawn ahead, and hold all locks of a buffer."""
    with rb._capture_prefetch_state(clone_queue=False), rb._locked():
        yield


def capture(rb: Any) -> dict[str, Any]:
    """Return all state that determines the behaviour of a buffer, without copying the rows."""
    storage, generator = rb.storage, generator_of(rb)
    return {
        "buffer": {
            "class": type(rb).__name__,
            "batch_size": rb.batch_size,
            "consume_after_n_samples": rb._consume_after_n_samples,
            "stats": None if rb.episode_stats is None else rb.episode_stats.state_dict(),
            "replays": None if rb.replay_count is None else rb.replay_count.counts(),
            "flow": None if rb.flow is None else rb.flow.state_dict(),
            "returned": [*rb.returned],
        },
        "storage": {
            "class": type(storage).__name__,
            "max_size": storage.max_size,
            "ndim": storage.ndim,
            "shape": list(storage._total_shape or ()),
            "last_cursor": newest_step_of(storage),
            "state": storage.snapshot(),
        },
        "sampler": {"class": name_of(rb.sampler), "state": _state_of(rb.sampler)},
        "writer": {"class": name_of(rb.writer), "state": rb.writer.state_dict()},
        "transform": rb.transform.state_dict(),
        "generator": None if generator is None else {"device": str(generator.device), "state": generator.get_state()},
        "default_generator": _default_generators(storage),
    }


def restore_buffer(rb: Any, saved: dict[str, Any], generator: dict[str, Any] | None) -> None:
    """Restore the sampling options and the generator of a buffer; the caller holds the buffer's locks."""
    rb._batch_size, rb._consume_after_n_samples = saved["batch_size"], saved["consume_after_n_samples"]
    rb.returned.values[:] = saved.get("returned", [0, 0])
    restore_generator(rb, generator)


def name_of(part: Any) -> str:
    """Return the class name of a part, with that of a wrapped sampler: ``"NStepSampler(UniformSampler)"``."""
    inner = getattr(part, "sampler", None)
    return type(part).__name__ + ("" if inner is None else f"({name_of(inner)})")


def _state_of(part: Any) -> dict[str, Any]:
    return part.snapshot() if hasattr(part, "snapshot") else part.state_dict()


def refuse_malformed(rb: Any, saved: dict[str, Any]) -> None:
    """Refuse malformed values that the storage, sampler and writer do not check themselves."""
    buffer, writer = saved["buffer"], saved["writer"]["state"]
    counts = buffer["batch_size"], buffer["consume_after_n_samples"], *map(writer.get, ("_cursor", "_write_count"))
    returned = buffer.get("returned", [0, 0])
    refuse_counts(*counts, *(count if type(count) is int else -1 for count in returned))
    if len(returned) != 2:
        raise ValueError(f"the saved counts of batches and of their rows are {returned!r}")
    if rb.flow is not None:
        rb.flow.refuse_state(buffer.get("flow"))
    generator = saved["generator"]
    refuse_generators({} if generator is None else {generator["device"]: generator["state"]})
    refuse_generators(saved["default_generator"])


def refuse_counts(*counts: Any) -> None:
    if not all(count is None or (type(count) is int and 0 <= count < 1 << 63) for count in counts):
        raise ValueError(f"batch size, cursor and write count must be whole numbers of 63 bits, got {[*counts]}")


def refuse_generators(states: dict[str, Any]) -> None:
    for device, state in states.items():
        if _is_here(torch.device(device)):
            torch.Generator(device).set_state(state)


def refuse_other_capacity(sampler: Any) -> None:
    """Raise a CheckpointError if a sampler's state is lost when rows are loaded into another capacity."""
    innermost = innermost_of(sampler)
    if not hasattr(innermost, "snapshot") and not isinstance(innermost, RandomSampler):
        name = type(innermost).__name__
        raise CheckpointError(f"a {name} can only be loaded into the same capacity; rows_only=True omits its state")


def restore_settings(sampler: Any, state: dict[str, Any], rollback: ExitStack) -> None:
    """Restore the settings of a sampler, and of those that it wraps, but nothing that belongs to rows."""
    while hasattr(sampler, "snapshot"):
        own = state.get("settings", state)
        with state_of(sampler):
            rollback.enter_context(sampler._set({name: own[name] for name in sampler.state_keys}))
        sampler, state = getattr(sampler, "sampler", None), state.get("sampler", {})


def saved_priorities(rb: Any, state: dict[str, Any], cells: int) -> tuple[torch.Tensor, float] | None:
    """Return the magnitudes of the rows of a dump, at least ``[cells]``, and the largest one so far."""
    while "sampler" in state:
        state = state["sampler"]
    if rb.parts.prioritized is None:
        return None
    magnitude, largest = state["priorities"]["magnitude"], float(state["largest"])
    is_known = magnitude.isfinite() & ((magnitude >= 0) | (magnitude == -1))
    if magnitude.ndim != 1 or len(magnitude) < cells or not is_known.all() or not -1 <= largest < float("inf"):
        raise ValueError(f"the saved priorities, {tuple(magnitude.shape)} and {largest}, are not those of {cells} rows")
    return magnitude, largest


def set_priorities(rb: Any, saved: tuple[torch.Tensor, float], since: torch.Tensor, to: torch.Tensor) -> None:
    """Give each row ``to`` of a buffer the priority of the row ``since`` of a dump, ``[n]`` cells each."""
    magnitude, priorities = saved[0][since], rb.parts.prioritized.priorities
    known = magnitude >= 0
    priorities.assign(to[known], magnitude[known], None, rb.storage, counts=False)
    priorities.largest = saved[1]


def innermost_of(sampler: Any) -> Any:
    while hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    return sampler


def end_loaded(rb: Any) -> None:
    """After a load, end the unfinished trajectories that have ids, and those of the statistics."""
    if isinstance(rb.storage, PackedStorage):
        end_trajectories(rb.storage)  # new collectors use the same ids again
    if rb.episode_stats is not None:
        rb.episode_stats.forget_open()
    if rb.parts is not None and rb.parts.prioritized is not None:  # all loaded rows have their priorities
        rb.parts.prioritized.priorities.keep(slice(0, None), rb.storage)


def _default_generators(storage: Storage) -> dict[str, Any]:
    states = {"cpu": torch.get_rng_state()}
    if storage.device.type == "cuda":
        states[str(storage.device)] = torch.cuda.get_rng_state(storage.device)
    return states


def restore_default_generators(states: dict[str, Any]) -> None:
    for device, state in states.items():
        if _is_here(torch.device(device)):
            torch.set_rng_state(state) if device == "cpu" else torch.cuda.set_rng_state(state, device)


def restore_generator(rb: Any, saved: dict[str, Any] | None) -> None:
    """Restore the buffer's generator; create a generator if the buffer has none on the saved device."""
    if saved is None:
        return
    device = torch.device(saved["device"])
    generator = generator_of(rb)
    if generator is not None and generator.device == device:
        generator.set_state(saved["state"])  # the same object: others may share it
    elif _is_here(device):
        generator = torch.Generator(device)
        generator.set_state(saved["state"])
        rb.set_rng(generator)
    else:
        warnings.warn(f"the dump's generator is on {device}, which is not available: it was not restored", stacklevel=4)


def _is_here(device: torch.device) -> bool:
    """Whether this machine has the device; a dump may come from a machine with more GPUs."""
    if device.type != "cuda":
        return device.type == "cpu"
    return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()


class Rollback(ExitStack):
    """Loads states of parts; an error restores the old states.

    Load samplers last, because the old states of this package's samplers are not restored.
    """

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> bool | None:
        if kind is None:
            self.pop_all()
        return super().__exit__(kind, *rest)

    def load(self, part: Any, state: Any) -> None:
        if not hasattr(
            innermost_of(part), "snapshot"
        ):  # this package's samplers, if they refuse a state, are unchanged
            before = copy.deepcopy(part.state_dict())
            self.callback(part.load_state_dict, before)
        part.load_state_dict(state)


def load_or_restore(parts: dict[str, Any], states: dict[str, Any]) -> None:
    """Load a state into each of several parts; if a part refuses its state (ValueError), restore all parts."""
    with Rollback() as rollback:
        for name, part in parts.items():
            with state_of(part):
                rollback.load(part, states[name])
