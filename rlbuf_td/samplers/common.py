"""Base classes of samplers, their random numbers, and checks of settings and TD
errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchrl.data.replay_buffers import PrioritizedSampler, Sampler, Storage, Writer

from rlbuf_td.checkpoint import load_state, save_state
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.host_memory import address_of, in_dispatch_mode
from rlbuf_td.storages.checks import State, require_packed, state_of
from rlbuf_td.storages.indexing import Info
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.schema import SchemaError, refuse_other_index
from rlbuf_td.storages.tensordict_fast import entries_of
from rlbuf_td.storages.torchrl_parts import keeps_order, listeners_of, stored_rows

EMPTY = "Cannot sample from an empty storage: extend the buffer first"
NO_PRIORITY = (
    "no row has a positive priority: set a TD error other than 0, or use eps > 0"
)


class OwnSignature:
    """Descriptor for ``__signature__``: shows the arguments of ``__init__``, which
    TorchRL's metaclasses hide."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if owner.__init__ is object.__init__:
            return inspect.Signature()
        signature = inspect.signature(owner.__init__)
        _, *others = signature.parameters.values()
        return signature.replace(
            parameters=others, return_annotation=inspect.Signature.empty
        )


class Setting:
    """Descriptor of a sampler's setting: ``check(name, value)`` validates and converts
    each assigned value."""

    def __init__(self, check: Callable[[str, object], object], is_fixed: bool) -> None:
        self._check, self._is_fixed = check, is_fixed

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, part: Any, value: object) -> None:
        if self._is_fixed and self._name in part.__dict__:
            raise AttributeError(
                f"{self._name} is fixed when a {type(part).__name__} is created: create another one"
            )
        checked = self._check(self._name, value)
        with defer_sigint:
            part.__dict__[self._name] = checked
            part.settings_changed()


def setting(check: Callable[[str, object], object], *, is_fixed: bool = False) -> Any:
    return Setting(check, is_fixed)


class StatefulSampler(Sampler):
    """Abstract base of this package's samplers; saves and restores their settings."""

    __signature__ = OwnSignature()
    # the attributes that ``repr`` shows; by default ``state_keys``
    _shown: ClassVar[tuple[str, ...]] = ()
    # the attributes that may be set at any time; saved in the state
    state_keys: ClassVar[tuple[str, ...]] = ()
    needs_order: bool = False  # whether the sampler needs rows in time order
    # whether the sampler looks up episodes, which only a PackedStorage keeps
    needs_episodes: bool = False
    # whether draws change or read state that other processes would have to share
    requires_shared_state: bool = True
    # the entries, besides "index", that the sampler adds to each batch
    report_keys: frozenset[str] = frozenset()

    def settings_changed(self) -> None:
        """Update the values that depend on settings; each change of a setting calls
        this method."""

    def _settings(self) -> State:
        return {name: getattr(self, name) for name in self.state_keys}

    @contextmanager
    def _set(self, settings: State) -> Iterator[None]:
        """Change settings one by one, and restore the old ones if one is refused or the
        ``with`` block raises."""
        before = self._settings()
        try:
            for name, value in settings.items():
                setattr(self, name, value)
            yield
        except Exception:
            for name, value in before.items():
                setattr(self, name, value)
            raise

    def snapshot(self) -> State:
        """Return the state without copying its tensors; by default, the settings."""
        return self._settings()

    def state_dict(self) -> State:
        """Return a copy of the state, without the random generator."""
        return _copy_of(self.snapshot())

    @defer_sigint
    def load_state_dict(self, state_dict: State) -> None:
        """Restore a :meth:`state_dict`. Raises ValueError, and changes nothing, if a
        setting is out of range."""
        with (
            state_of(self),
            self._set({name: _copy_of(state_dict[name]) for name in self.state_keys}),
        ):
            pass

    def dumps(self, path: str | Path) -> None:
        """Save the state in the folder ``path``, as
        :meth:`ReplayBuffer.dumps <rlbuf_td.ReplayBuffer.dumps>` does."""
        save_state(path, type(self).__name__, self.snapshot())

    def loads(self, path: str | Path) -> None:
        """Restore the dump in ``path``. Raises CheckpointError, and changes nothing, if
        another class saved it."""
        self.load_state_dict(load_state(path, type(self).__name__))

    def add(self, index: object) -> None:
        """Do nothing when a row is written."""

    extend = add

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_rng": None}

    def __repr__(self) -> str:
        shown = (
            f"{name.lstrip('_')}={getattr(self, name)!r}"
            for name in self._shown or self.state_keys
        )
        return f"{type(self).__name__}({', '.join(shown)})"


def _copy_of(state: object) -> Any:
    return tree_map_only(Tensor, Tensor.clone, state)


def refuse_other_storage(sampler: Sampler, storage: Storage) -> None:
    """Raise a TypeError if the sampler looks up episodes, and the storage is no
    :class:`PackedStorage`."""
    if getattr(sampler, "needs_episodes", False):
        kinds = "UniformSampler, ProportionalSampler, RankSampler, RecencySampler or MinibatchSampler"
        require_packed(
            storage,
            f"a {type(sampler).__name__} looks up episodes and",
            f"use one, or a {kinds}",
        )


def refuse_unordered(
    sampler: Sampler | None, storage: Storage, *writers: Writer
) -> None:
    """Raise a ValueError if the sampler needs rows in time order, and one of these
    writers, or of those of the storage's buffers, does not write in time order."""
    if not getattr(sampler, "needs_order", False):
        return
    buffers = listeners_of(storage)
    attached = (getattr(buffer, "_writer", None) for buffer in buffers)
    for writer in (*writers, *attached):
        keeps = keeps_order(writer)
        kind = type(writer).__name__
        if writer is None or keeps:
            continue
        needs = f"a {type(sampler).__name__} needs rows in time order"
        if keeps is False:
            raise ValueError(f"{needs}, a {kind} keeps none: use a RingWriter")
        raise ValueError(
            f"{needs}, and a {kind} may write in any order: set keeps_order = True in the class {kind} if it writes "
            "one time step after another"
        )


class OneStorage:
    """A weak reference to the only storage that a sampler serves."""

    _storage: Callable[[], Storage | None] = staticmethod(lambda: None)

    def release(self) -> None:
        self.__dict__.clear()

    def claim(self, storage: Storage) -> None:
        """Serve only ``storage`` from now on; raise a ValueError if another storage is
        served and still exists."""
        if self._storage() is storage:
            return
        if self._storage() is not None:
            reason = "this sampler serves another storage, and its state belongs to the rows of that one"
            raise ValueError(f"{reason}: use one sampler per buffer")
        self._storage = ref(storage)

    def __getstate__(self) -> dict[str, object]:
        return {}


def reported_by(sampler: Sampler) -> frozenset[str]:
    """Return the names of the entries, besides "index", that a sampler adds to each
    batch."""
    of_torchrl = frozenset(
        {"priority_weight"} if isinstance(sampler, PrioritizedSampler) else ()
    )
    return frozenset(getattr(sampler, "report_keys", of_torchrl))


def stored_names(storage: Storage) -> Mapping[str, Any]:
    """Return the names of the entries of a storage's rows, with their dtypes or
    tensors; empty without rows."""
    layout = getattr(storage, "layout", None)
    if layout is not None:
        return layout.names
    rows = stored_rows(storage)
    return {} if rows is None else entries_of(rows)


def refuse_stored(sampler: Sampler, storage: Storage) -> None:
    """Raise a SchemaError if a stored entry has a name under which the sampler adds an
    entry to each batch."""
    refuse_taken(sampler, stored_names(storage), reported_by(sampler))


def refuse_taken(
    sampler: Sampler, stored: Mapping[str, object], report_keys: Iterable[str]
) -> None:
    """Raise a SchemaError if ``stored``, which maps names to dtypes or tensors, has one
    of these names.

    An entry ``"index"`` is refused only if it is no index: TorchRL's writers store the
    position of each row.
    """
    for name in stored.keys() & report_keys:
        remedy = f"store it under another name, data.rename_key_({name!r}, 'my_{name}')"
        also = "or leave it out if it comes from a sampled batch"
        adds = f"a {type(sampler).__name__} adds an entry of this name to each batch"
        raise SchemaError(
            f"the rows have an entry {name!r}, and {adds}: {remedy}, {also}"
        )
    if "index" in stored:
        refuse_other_index(stored["index"])


def refuse_replacing(sampler: Sampler, storage: Storage, info: Info) -> None:
    """Raise a SchemaError if ``info``, which a sampler's ``draw`` has returned, has a
    name of the rows' entries.

    The names in ``report_keys`` are checked when sampler and rows first meet.
    """
    unknown = info.keys() - reported_by(sampler)
    if unknown:
        refuse_taken(sampler, stored_names(storage), unknown)


def rows_drawn(sampler: Sampler, drawn: object) -> tuple[Tensor, Info]:
    """Return the flat rows, ``[B]`` int64, and the further entries that a sampler's
    ``draw`` has returned.

    A tensor of rows alone has no further entries. Raises a TypeError if ``draw``
    returned something else.
    """
    flat, info = drawn if isinstance(drawn, tuple) and len(drawn) == 2 else (drawn, {})
    if not isinstance(info, dict):
        flat = drawn
    elif isinstance(flat, Tensor) and flat.dtype is torch.int64 and flat.ndim == 1:
        return flat, info
    if isinstance(flat, Tensor):
        got = f"{flat.dtype} of shape {[*flat.shape]}"
        remedy = (
            "return rows.to(torch.int64).flatten(), flat indices below len(storage)"
        )
    else:
        names = (
            [type(part).__name__ for part in flat] if isinstance(flat, tuple) else []
        )
        got = f"a tuple ({', '.join(names)})" if names else type(flat).__name__
        remedy = (
            "return torch.as_tensor(rows), or (torch.as_tensor(rows), {name: entries})"
        )
    name = type(sampler).__name__
    raise TypeError(
        f"draw() of {name} must return a tensor of rows, [B] int64, alone or with a dict, got {got}: {remedy}"
    )


def uniform_numbers(
    count: int, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Return ``[count]`` float64 numbers in ``[0, 1)``, which :func:`fill_uniform_` has
    drawn, on ``device``."""
    numbers = torch.empty(count, dtype=torch.float64, device=device)
    refuse_fake(numbers)
    fill_uniform_(numbers, generator)
    return numbers


def refuse_fake(numbers: Tensor) -> None:
    """Raise a RuntimeError if a dispatch mode such as FakeTensorMode has made a tensor
    without numbers."""
    if in_dispatch_mode() and type(numbers) is not Tensor:
        raise RuntimeError(
            f"cannot draw rows under a mode such as FakeTensorMode, whose {type(numbers).__name__} has no numbers: "
            "sample outside of it"
        )


def fill_uniform_(numbers: Tensor, generator: torch.Generator | None) -> None:
    """Fill ``numbers``, float64, with numbers in ``[0, 1)`` that are drawn on the
    generator's device."""
    if generator is None or generator.device == numbers.device:
        numbers.uniform_(generator=generator)
    else:
        source = torch.empty_like(numbers, device=generator.device)
        numbers.copy_(source.uniform_(generator=generator))


def permutation(
    count: int, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Draw a random order of ``0 .. count - 1`` on the generator's device, and return
    it on ``device``."""
    source = device if generator is None else generator.device
    return torch.randperm(count, generator=generator, device=source).to(device)


def as_errors(priority: object, rows: int, device: torch.device) -> Tensor:
    """Convert TD errors (one per row, or one for all rows) to a contiguous ``[rows]``
    float tensor on ``device``."""
    td_error = (
        priority
        if isinstance(priority, Tensor)
        else torch.as_tensor(priority, device="cpu")
    )
    if td_error.is_complex():
        raise TypeError(f"TD errors must be real numbers, got {td_error.dtype}")
    if backend_of(td_error) == "numba":
        address_of(td_error)  # refuses TD errors without memory
    if td_error.requires_grad:
        td_error = td_error.detach()
    td_error = td_error.to(device).resolve_neg()
    if td_error.dtype is not torch.float32 and td_error.dtype is not torch.float64:
        td_error = td_error.to(
            torch.float32 if td_error.is_floating_point() else torch.float64
        )
    if td_error.numel() == 1 != rows:
        return td_error.expand(rows).contiguous()
    if td_error.numel() != rows:
        fault = f"{td_error.numel()} priorities (shape {tuple(td_error.shape)})"
        raise ValueError(f"{fault} for {rows} rows: pass one per row, or one for all")
    return (
        td_error
        if td_error.ndim == 1 and td_error.is_contiguous()
        else td_error.reshape(-1).contiguous()
    )


def refuse_errors(td_error: Tensor) -> None:
    """Raise a ValueError if any TD error is NaN or infinite."""
    finite = td_error.isfinite()
    if not finite.all():
        where = (~finite).nonzero().squeeze(1)
        shown = ", ".join(str(int(j)) for j in where[:5]) + (
            ", ..." if where.numel() > 5 else ""
        )
        count = f"{where.numel()} of {td_error.numel()} TD errors"
        raise ValueError(
            f"{count} are NaN or infinite (positions {shown}): look for a diverging loss"
        )


def refuse_priorities(flat: Tensor, td_error: Tensor, rows: int) -> NoReturn:
    """Raise a ValueError for NaN or infinite TD errors, otherwise an IndexError for a
    row out of range."""
    refuse_errors(td_error)
    low, high = int(flat.min()), int(flat.max())
    bad = high if high >= rows else low
    raise IndexError(
        f"row {bad} is out of range: {rows} rows can have a priority, 0 to {rows - 1} (-1 means skip)"
    )


def refuse_never(batch_size: int, storage: Storage, what: str, remedy: str) -> None:
    """Raise a ValueError if a storage can never hold the rows of a batch, which would
    be waited for forever."""
    if batch_size > storage.max_size:
        raise ValueError(
            f"a storage of {storage.max_size} rows never has {batch_size} {what} for a batch: use a smaller batch, a "
            f"larger storage, or {remedy}"
        )
