"""What a buffer is made of, as plain state, and back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import Storage

from rlbuf_td.checkpoint.encoding import CheckpointError
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.trajectory_index import TrajectoryIndex


def state_of(part: Any) -> dict[str, Any]:
    """Return the state of a part, not copied where the part can give it so."""
    return part.snapshot() if hasattr(part, "snapshot") else part.state_dict()


def innermost(sampler: Any) -> Any:
    """Return the sampler that wrappers wrap."""
    while hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    return sampler


def refuse_other_storage(storage: Storage, saved: dict[str, Any]) -> None:
    """Refuse what was saved of a TorchRL storage if it does not fit this one.

    Raises:
        CheckpointError: the capacity differs, or (if the storage holds something) keys, shapes or dtypes.
    """
    if saved["max_size"] != storage.max_size:
        raise CheckpointError(
            f"the dump has max_size={saved['max_size']}, this {type(storage).__name__} {storage.max_size}: "
            "only a PackedStorage can be loaded into another capacity"
        )
    if len(storage) or getattr(storage, "initialized", False):
        refuse_other_content(storage.state_dict(), saved["state"])


def refuse_other_content(own: Any, saved: Any, where: str = "the storage") -> None:
    """Refuse the saved state of a TorchRL storage whose keys, shapes or dtypes differ.

    Raises:
        CheckpointError: says where.
    """
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        if own.keys() != saved.keys():
            raise CheckpointError(f"{where} holds the keys {sorted(own)}, the dump {sorted(saved)}")
        for key in own:
            refuse_other_content(own[key], saved[key], f"{where}.{key}")
    elif isinstance(own, torch.Tensor):
        kinds = [f"{getattr(x, 'dtype', type(x))} of shape {tuple(getattr(x, 'shape', ()))}" for x in (own, saved)]
        if kinds[0] != kinds[1]:
            raise CheckpointError(f"{where} is {kinds[0]}, in the dump {kinds[1]}")


def name_of(part: Any) -> str:
    """Return the class of a part, with what it wraps: ``"NStepSampler(UniformSampler)"``."""
    inner = getattr(part, "sampler", None)
    return type(part).__name__ + ("" if inner is None else f"({name_of(inner)})")


def capture(rb: Any, prefetched: dict[str, Any]) -> dict[str, Any]:
    """Return all that the behaviour of a buffer depends on; its tensors are the live ones."""
    storage = rb._storage
    shape = getattr(storage, "_total_shape", None) or ()
    return {
        "buffer": {
            "class": type(rb).__name__,
            "batch_size": rb._batch_size,
            "consume_after_n_samples": rb._consume_after_n_samples,
            "prefetched": tuple(prefetched["queue"]),
            "stats": None if rb.episode_stats is None else rb.episode_stats.state_dict(),
            "replays": None if rb._replays is None else rb._replays.counts(),
        },
        "storage": {
            "class": type(storage).__name__,
            "max_size": storage.max_size,
            "ndim": storage.ndim,
            "shape": list(shape),
            "last_cursor": storage._last_cursor_index,
            "state": state_of(storage),
        },
        "sampler": {"class": name_of(rb._sampler), "state": state_of(rb._sampler)},
        "writer": {"class": name_of(rb._writer), "state": rb._writer.state_dict()},
        "transform": rb._transform.state_dict(),
        "trajectories": trajectories_of(storage),
        "generator": None if rb._rng is None else {"device": str(rb._rng.device), "state": rb._rng.get_state()},
        "default_generator": default_generator(storage),
    }


def refuse_malformed(saved: dict[str, Any]) -> None:
    """Refuse state of a form that only a forged dump has, where the part that is given it would not.

    Raises:
        ValueError: see above; also TypeError, RuntimeError, LookupError.
    """
    buffer, writer = saved["buffer"], saved["writer"]["state"]
    counts = {name: buffer[name] for name in ("batch_size", "consume_after_n_samples") if buffer[name] is not None}
    counts |= {name: writer[name] for name in ("_cursor", "_write_count") if name in writer}
    for name, count in counts.items():
        if type(count) is not int or not 0 <= count < 1 << 63:
            raise ValueError(f"{name} must be a whole number of 63 bits, got {count!r}")
    for batch, info in buffer["prefetched"]:
        if not isinstance(batch, TensorDictBase) or not isinstance(info, dict):
            raise TypeError("a batch that was fetched ahead must be a TensorDict and a dict")
    for each in saved["trajectories"]:
        keys = [each["done_key"], each["traj_key"] or []]
        if not each["done_key"] or not all(type(key) is list and all(type(k) is str for k in key) for key in keys):
            raise TypeError("the keys of a trajectory index must be lists of strings")
        if not all(isinstance(tensor, torch.Tensor) for tensor in dict(each["state"]).values()):
            raise TypeError("the state of a trajectory index must be tensors")
    states = dict(saved["default_generator"])
    if saved["generator"] is not None:
        states |= {saved["generator"]["device"]: saved["generator"]["state"]}
    for device, state in states.items():
        if _is_here(torch.device(device)):
            torch.Generator(device).set_state(state)


# -- trajectories


def trajectories_of(storage: Storage) -> list[dict[str, Any]]:
    """Return the state of each index that is attached to a storage."""
    return [
        {
            "done_key": list(index.done_key),
            "traj_key": index.traj_key and list(index.traj_key),
            "state": index.state_dict(),
        }
        for index in storage._attached_entities
        if isinstance(index, TrajectoryIndex)
    ]


def load_trajectories(storage: Storage, saved: list[dict[str, Any]]) -> None:
    """Continue from :func:`trajectories_of`, over the same rows; other indices read the rows anew."""
    for index in storage._attached_entities:
        if isinstance(index, TrajectoryIndex):
            index.load_state_dict({})
    for each in saved:
        traj_key = None if each["traj_key"] is None else tuple(each["traj_key"])
        index = TrajectoryIndex.of(storage, done_key=tuple(each["done_key"]), traj_key=traj_key)
        try:
            index.load_state_dict(each["state"])
        except ValueError:  # of a storage of another size or device
            index.load_state_dict({})


# -- generators


def default_generator(storage: Storage) -> dict[str, Any]:
    """Return the state of torch's default generator, and of that of the storage's CUDA device."""
    states = {"cpu": torch.get_rng_state()}
    device = getattr(storage, "device", None)
    if isinstance(device, torch.device) and device.type == "cuda":
        states[str(device)] = torch.cuda.get_rng_state(device)
    return states


def restore_default_generator(states: dict[str, Any]) -> None:
    """Continue from :func:`default_generator`."""
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        elif _is_here(torch.device(device)):
            torch.cuda.set_rng_state(state, device)


def _is_here(device: torch.device) -> bool:
    """Return whether there is such a device: a dump may come from a machine with more GPUs."""
    if device.type != "cuda":
        return device.type == "cpu"
    return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()


def restore_generator(rb: Any, saved: dict[str, Any] | None) -> None:
    """Let the buffer's generator go on where the saved one was; the buffer gets one if it has none."""
    if saved is None:
        return
    device = torch.device(saved["device"])
    if rb._rng is not None and rb._rng.device == device:
        rb._rng.set_state(saved["state"])  # the same object: others may draw from it, too
        return
    if not _is_here(device):
        warnings.warn(f"the dump's generator is of {device}, which is not here: it was not restored", stacklevel=4)
        return
    generator = torch.Generator(device)
    generator.set_state(saved["state"])
    rb.set_rng(generator)


# -- all or nothing


class Rollback:
    """Loads state into parts, one after the other; when one refuses, those before get back what they had.

    The last part is not given back anything: a sampler of this package, whose state may be large, comes last.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def load(self, part: Any, state: Any) -> None:
        """Give ``part`` a state that it may refuse; parts of this package change nothing then."""
        if not hasattr(innermost(part), "snapshot"):
            before = copy.deepcopy(part.state_dict())
            self._undo.append(lambda: part.load_state_dict(before))
        part.load_state_dict(state)

    def load_storage(self, storage: Storage, state: Any) -> None:
        """Give a storage of TorchRL's a state; it replaces its tensors where it can, else it copies into them."""
        if isinstance(storage, PackedStorage):
            raise TypeError("a PackedStorage is given its rows, not a copy of them")
        before = dict(storage.__dict__)
        content = copy.deepcopy(storage.state_dict()) if len(storage) else None

        def undo() -> None:
            if content is not None:
                storage.load_state_dict(content)
            storage.__dict__.update(before)

        self._undo.append(undo)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Loading the storage on an uninitialized TensorDict")
            storage.load_state_dict(state)

    def undo(self) -> None:
        """Give all parts back what they had."""
        for each in reversed(self._undo):
            each()
