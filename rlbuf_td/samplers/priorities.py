"""The priorities of a storage's rows, and the base class of the laws that convert TD errors to probabilities."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from ctypes import addressof
from multiprocessing.context import get_spawning_popen
from operator import ne
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from rlbuf_td.kernels.batch import UPDATE
from rlbuf_td.kernels.dispatch import backend_of, compiled_form, record_of, uses_numba
from rlbuf_td.kernels.host_memory import HostTensors, address_of, outside_inference_mode
from rlbuf_td.kernels.strata import LEAST_RATIO, MOST_RATIO
from rlbuf_td.kernels.sum_tree import LARGEST as LARGEST_WEIGHT
from rlbuf_td.kernels.sum_tree import REFUSED
from rlbuf_td.samplers.common import OneStorage, as_errors, refuse_priorities
from rlbuf_td.samplers.priority_file import PriorityFile
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.indexing import device_of, flat_rows, row_count, written_rows
from rlbuf_td.storages.numbers import SharedNumbers
from rlbuf_td.storages.ring import refuse_stamps

ALPHA, BETA, LARGEST, WEIGHED = range(4)  # indices of the shared settings; WEIGHED: the alpha of the stored weights


class Law(ABC):
    """Abstract conversion of TD errors to probabilities; ``flat``, ``[B]`` int64, holds flat indices of rows."""

    table: Any  # the data structure of all rows; its ``magnitude`` is ``|td_error|``, -1 for rows without a priority
    blank: ClassVar[dict[str, float]]  # the table's tensors in checkpoints, and their values without a priority
    min_priority = 0.0  # the lower bound of magnitudes
    lock: Any = nullcontext()  # held around compiled loops
    weighs_rows = False  # whether the table holds a weight of each row, which depends on alpha
    first = property(lambda self: max(1.0, self.min_priority), doc="Magnitude of new rows before any TD error.")

    def __init__(self, settings: SharedNumbers) -> None:
        self.settings = settings

    @abstractmethod
    def make(self, capacity: int, device: torch.device | str) -> Any:
        """Create an empty table for the priorities of ``capacity`` rows."""

    @abstractmethod
    def draw(
        self, uniform: Tensor, rows: int, stratified: bool, norm: str | None, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return drawn rows and importance weights, both ``[B]``; RuntimeError (on the CPU) if no row can be drawn.

        Compiled loops write to ``out`` if it is given.
        """

    @abstractmethod
    def probability(self, flat: Tensor) -> Tensor:
        """Return the probability of each row, ``[B]`` float64."""

    @abstractmethod
    def least_probability(self) -> float | Tensor:
        """Return the smallest positive probability of all rows, float64; infinite if no row can be drawn."""

    def weigh_beside_(self, flat: Tensor, drawn: Tensor, weight: Tensor) -> None:
        """Store the importance weights of the rows in ``flat`` in ``weight[:len(flat)]``.

        Before the call, ``weight[0]`` must be the importance weight of the one row in ``drawn`` (shape ``[1]``).
        """
        probability = self.probability(torch.cat((flat, drawn)))
        ratio = (probability[:-1] / probability[-1]).clamp(min=LEAST_RATIO)
        ratio = torch.where(probability[:-1] > 0.0, ratio, 1.0)
        weight[: len(flat)] = weight[0] * ratio.pow(-self.settings[BETA]).clamp(max=MOST_RATIO).to(weight.dtype)

    def floored(self, td_error: Tensor) -> Tensor:
        """Raise the magnitudes of TD errors to :attr:`min_priority`."""
        return td_error.abs().clamp_(min=self.min_priority) if self.min_priority else td_error

    @abstractmethod
    def update_(self, flat: Tensor, td_error: Tensor, rows: int) -> float | Tensor:
        """Set priorities; see :func:`rlbuf_td.kernels.sum_tree.update_` for the arguments and the result."""

    @abstractmethod
    def update_loop(self) -> Callable[..., Any]:
        """Return the compiled function that updates priorities, such as ``kernels.batch.cpu.update_proportional``."""

    @abstractmethod
    def fill_(self, start: int, count: int, magnitude: float | Tensor) -> None:
        """Set the magnitude, ``|td_error|``, of the rows ``start`` to ``start + count - 1``."""

    @abstractmethod
    def weigh(self, anew: bool = False) -> None:  # the caller holds the buffer's lock
        """Recompute derived values, such as ``p ** alpha`` of each row, if alpha has changed or ``anew`` is True."""

    @abstractmethod
    def restore_(self, tensors: dict[str, Tensor]) -> None:  # saved weights must be for the current alpha
        """Copy the saved ``tensors``, a dict with the keys of :attr:`blank`, into the table."""


class _Updates:
    """What compiled updates read of a sampler and its storage: a record, made anew when one of its numbers changes."""

    def __init__(self) -> None:
        self._numbers: tuple[Any, ...] = ()

    def address_for(self, priorities: Priorities, storage: Any) -> int:
        """Return the address of an ``UPDATE`` record."""
        law, ring = priorities.law, getattr(storage, "ring", None)
        settings = law.settings.values
        numbers: tuple[Any, ...] = law.table.address, settings, getattr(law, "eps", 0.0), law.min_priority, ring
        if ring is not None:
            generations = 0 if ring.in_order or ring.generations is None else ring.generations.data_ptr()
            numbers += ring.address, generations
        if len(numbers) != len(self._numbers) or any(map(ne, numbers, self._numbers)):
            at = addressof(settings)
            given: dict[str, Any] = {"table": numbers[0], "eps": numbers[2], "largest": at + 8 * LARGEST}
            given |= {"first": law.first, "alpha": at + 8 * ALPHA if law.weighs_rows else 0}
            if ring is not None:
                lanes = ring.lanes if storage.ndim > 1 else 0
                given |= {"serials": numbers[5], "generations": numbers[6], "steps": ring.steps, "lanes": lanes}
            record = record_of(UPDATE, **given, weighed_alpha=at + 8 * WEIGHED)
            place = record.ctypes.data
            self.record, self._address, self._numbers = record, place, numbers  # at once: an interrupt may come
        return self._address

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._numbers = ()


def _as_pairs(index: Any, storage: Any, device: torch.device) -> Tensor:
    """Return flat rows, ``[B]``, or, of a PackedStorage with lanes, coordinates, ``[B, 2]``, contiguous int64."""
    is_pair = type(index) is Tensor and index.ndim == 2 and index.dtype is torch.int64 and index.device == device
    if is_pair and index.shape[1] == 2 and getattr(storage, "ring", None) is not None and storage.ndim == 2:
        return index.contiguous()
    return flat_rows(index, storage, device)


class _Entries(NamedTuple):
    """The address of an ``UPDATE`` record with which compiled writes set priorities, and what it describes."""

    address: int
    record: Any
    table: Any
    numbers: tuple[Any, ...]


_NO_ENTRIES = _Entries(0, None, None, ())


class Priorities:
    """The priorities of the rows of one storage. A row's *magnitude* is its ``|td_error|``."""

    def __init__(self, law: Law, capacity: int, device: Any, within_buffer: bool) -> None:
        self.law, self.settings, self.within_buffer = law, law.settings, within_buffer
        self.capacity, self.device = capacity, torch.device("cpu")
        self._wanted = None if device is None else torch.device(device)
        self.serves = OneStorage()
        self.file: PriorityFile | None = None  # with PackedStorage(reopen=True)
        self.is_shared = False
        self._largest_on_device: Tensor | None = None
        self._largest_row = 0  # the row where the largest magnitude was last found
        self._updates = _Updates()
        self._inputs = HostTensors([])  # recognizes tensors like those of the last update
        self._entries = _NO_ENTRIES
        law.table = law.make(capacity, self.device)

    @property
    def largest(self) -> Any:
        """The largest magnitude so far, -1 if there is none; on other devices than the CPU, a 0-dim tensor."""
        return self.settings[LARGEST] if self._largest_on_device is None else self._largest_on_device

    @largest.setter
    def largest(self, value: float | Tensor) -> None:
        if isinstance(value, Tensor):  # on another device than the CPU
            self._largest_on_device = value
        else:
            self._largest_on_device, self.settings[LARGEST] = None, value

    @property
    def entry(self) -> Any:
        if self.within_buffer:
            self._find_largest()
        largest = self.largest
        if isinstance(largest, Tensor):
            return torch.where(largest < 0, self.law.first, largest)
        return self.law.first if largest < 0 else largest

    def _find_largest(self) -> None:  # O(N), or O(1) on the CPU if ``largest`` is still stored
        magnitude = self.law.table.magnitude
        if not uses_numba(self.device):
            self._largest_on_device = magnitude.max()
        elif float(magnitude[self._largest_row]) != self.largest:
            self._largest_row = int(magnitude.argmax())
            self.largest = float(magnitude[self._largest_row])

    def rows(self, index: Any, storage: Storage | None) -> Tensor:
        """Convert an index to flat rows; on the CPU, raise an IndexError if a row is out of range."""
        flat = flat_rows(index, storage, self.device)
        is_on_host = backend_of(flat) == "numba"
        if is_on_host and flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.capacity:
            raise IndexError(f"rows {flat.min()} to {flat.max()} are out of range: rows are 0 to {self.capacity - 1}")
        return flat

    @torch.compiler.disable(reason="an update on the CPU checks its input, and changes numbers that no graph knows")
    def assign(
        self, index: Any, priority: Any, rows: int | None, storage: Any, *, counts: bool, stamp: Tensor | None = None
    ) -> int | Tensor:
        """Set the priorities of rows below ``rows`` from TD errors; if ``counts``, these can increase ``largest``.

        Rows that are gone since they got their ``stamp``, ``[B]``, are skipped. Return the number of these rows.
        """
        if storage is not None and (storage.max_size > self.capacity or self.serves.storage is not storage):
            self.move_to(storage)
        law, stale, td_error = self.law, cast("int | Tensor", 0), priority
        law.weigh()
        rows = self.capacity if rows is None else rows
        given = (index, td_error) if stamp is None else (index, td_error, stamp)
        places = None if law.min_priority or storage is None else self._inputs.addresses(given)
        if places is None or (counts and storage is not None and row_count(storage) < len(storage)):
            index, td_error, stamp, stale = self._converted(index, priority, stamp, storage, counts)
            if not index.shape[0]:
                return stale
            if not self._is_compiled:
                self._update_with_torch(index, td_error, rows, counts)
                return stale
            given = (index, td_error) if stamp is None else (index, td_error, stamp)
            self._inputs = HostTensors([(each.dtype, each.shape) for each in given])
            places = [*map(address_of, given)]
        at, count = (*places, 0) if stamp is None else places, td_error.shape[0]
        every = 1 if stamp is None else stamp.shape[0] // count
        kinds = index.ndim > 1, td_error.dtype is torch.float64
        with law.lock:
            record = self._updates.address_for(self, storage)
            largest, skipped = law.update_loop()(record, *at, every, *kinds, count, rows, counts)
        if largest == REFUSED:
            refuse_priorities(flat_rows(index, storage, self.device), td_error, rows)
        if self.file is not None:
            self.keep(flat_rows(index, storage, self.device), None if counts else storage)
        return stale + skipped

    @property
    def _is_compiled(self) -> bool:
        """Whether compiled code updates priorities: not on other devices, nor where a user's law does."""
        return uses_numba(self.device) and compiled_form(self.law, "update_loop") is not None

    def _update_with_torch(self, flat: Tensor, td_error: Tensor, rows: int, counts: bool) -> None:
        largest = self.law.update_(flat, td_error, rows)
        if type(largest) is float and largest == REFUSED:
            refuse_priorities(flat, td_error, rows)
        if counts and isinstance(largest, Tensor):
            self.largest = largest.clamp(min=self.largest)
        elif counts:
            self.largest = max(largest, self.largest)
        self.keep(flat)

    def _converted(
        self, index: Any, priority: Any, stamp: Tensor | None, storage: Any, counts: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, int | Tensor]:
        """Check the arguments of an update; return what the update of this device takes, and how many rows are gone.

        On the CPU, these are flat rows ``[B]`` or coordinates ``[B, 2]``, TD errors ``[B]``, and a multiple of B stamps
        or None; on other devices, flat rows and TD errors. Rows that are known to be gone have the index -1.
        """
        is_compiled = self._is_compiled
        index = _as_pairs(index, storage, self.device) if is_compiled else flat_rows(index, storage, self.device)
        td_error = self.law.floored(as_errors(priority, index.shape[0], self.device))
        has_holes = counts and storage is not None and row_count(storage) < len(storage)
        if stamp is not None:
            refuse_stamps(stamp, index.shape[0])
        if is_compiled and not has_holes:
            return index, td_error, None if stamp is None else stamp.to(self.device, torch.int64).contiguous(), 0
        flat, stale = flat_rows(index, storage, self.device), cast("int | Tensor", 0)
        if stamp is not None:
            flat, stale = storage.skip_stale(flat, storage.stamps_of(stamp, flat))
        if has_holes:
            storage.refuse_holes(flat)
        return flat, td_error, None, stale

    def enter(self, index: Any, storage: Storage | None) -> None:
        entry = self.entry
        if not isinstance(entry, Tensor):  # torch.full writes on the device; torch.tensor would copy, and wait for it
            entry = torch.full((), entry, dtype=torch.float64, device=self.device)
        self.assign(index, entry, None, storage, counts=False)

    @torch.compiler.disable(reason="see `assign`")
    def enter_range(self, start: int, count: int, storage: Storage) -> None:
        """Give the flat rows ``start`` to ``start + count - 1`` the magnitude of new rows."""
        self.move_to(storage)
        self.law.weigh()
        self.law.fill_(start, count, self.entry)
        self.keep(slice(start, start + count), storage)

    def admit(self, storage: Storage) -> int:
        """Give stored rows without a priority the magnitude of new rows; return their number."""
        rows = written_rows(storage)
        absent = rows[self.law.table.magnitude[rows] < 0]
        if len(absent):
            self.enter(absent, storage)
        return len(absent)

    def reopen(self, storage: PackedStorage) -> int:
        """Continue with the priorities that are in a file beside the rows, and keep them there from now on.

        Rows that are not in the file get the magnitude of new rows; the result is their number.
        """
        folder = storage.scratch_dir if storage.reopen else None
        if folder is None or (self.file is not None and self.file.folder == folder):
            self.file = None if folder is None and not self.is_shared else self.file  # a spawned process keeps it
            return 0
        file, own = PriorityFile(storage), self.law.table.magnitude
        found, largest = file.found(storage)
        most = torch.finfo(own.dtype).max
        own[: file.cells] = torch.where(found < 0, -1.0, found.clamp(self.law.min_priority, most)).to(own.dtype)
        self.law.weigh(anew=True)
        self.largest = min(largest, most)
        missing = self.admit(storage)
        self.file = file
        self.keep(slice(0, file.cells), storage)
        return missing

    def keep(self, rows: Any, written: Any = None) -> None:
        """Copy the magnitudes of these rows to the file, if there is one; ``written``: the storage, if they are new.

        For an index of -1, which updates skip, row 0 is copied.
        """
        if self.file is not None:
            if not self.is_shared and self.file.process != os.getpid():
                share = "call rb.share() before a fork"
                raise RuntimeError(f"this process was forked, and has only a copy of the priorities: {share}")
            if isinstance(rows, slice):
                rows = slice(*rows.indices(self.file.cells))
            else:
                rows = rows.clamp(min=0)
            self.file.copy(rows, self.law.table.magnitude, float(self.largest), written)

    def record_of_entry(self, storage: PackedStorage) -> int:
        """Return the address of the ``UPDATE`` record with which a compiled write sets the priorities of new rows."""
        if self.within_buffer:
            self._find_largest()
        law, ring = self.law, storage._ring
        place = law.table.magnitude.data_ptr()
        numbers = place, law.settings.values, law.min_priority, getattr(law, "eps", 0.0), ring, ring.address
        if numbers != self._entries.numbers or law.table is not self._entries.table:
            self._entries = _Entries(self._updates.address_for(self, storage), self._updates.record, law.table, numbers)
        return self._entries.address

    def keep_new(self, index: Any, storage: PackedStorage) -> None:
        """Copy the magnitudes of new rows to the file, if there is one."""
        if self.file is not None:
            self.keep(flat_rows(index, storage, self.device), storage)

    def recover(self, storage: Storage, new: Tensor) -> None:
        """See :class:`~rlbuf_td.storages.listeners.Recovers`."""
        if not row_count(storage):
            return self.clear()
        magnitude = self.law.table.magnitude
        is_old = torch.zeros(len(magnitude), dtype=torch.bool, device=self.device)
        is_old[written_rows(storage)] = True
        is_old[new.to(self.device)] = False
        magnitude[~is_old] = -1.0
        self.law.weigh(anew=True)
        self.admit(storage)
        self.keep(slice(0, None), storage)

    def move_to(self, storage: Storage) -> None:
        """Move the priorities to the storage's device, and increase ``capacity`` to the storage's ``max_size``."""
        self.serves.claim(storage)
        device, capacity = device_of(storage), max(self.capacity, storage.max_size)
        if self._wanted not in (None, device, torch.device(device.type)):
            where = f"priorities must be on the device of the rows, {device}, not on {self._wanted}"
            raise ValueError(f"{where}: omit device=, or create the storage with device={str(self._wanted)!r}")
        if self.file is not None and self.file.cells < storage.max_size:
            self.file.grow(storage.max_size)
        if device == self.device and capacity == self.capacity:
            return
        if self.is_shared:
            grow = f"a sampler of max_capacity={self.capacity} cannot grow in shared memory"
            raise ValueError(f"{grow}: create it with max_capacity={capacity}, or write before you share the buffer")
        tensors = self.resized(self.tensors(), capacity)
        self.device, self.capacity = device, capacity
        self.law.table = self.law.make(capacity, device)
        self.law.restore_({name: tensor.to(device) for name, tensor in tensors.items()})

    def tensors(self, table: Any = None) -> dict[str, Tensor]:
        return {name: getattr(self.law.table if table is None else table, name) for name in self.law.blank}

    def resized(self, tensors: dict[str, Tensor], capacity: int) -> dict[str, Tensor]:
        """Return tensors padded to ``capacity`` with rows without a priority."""
        found = {}
        for name, like in self.tensors(self.law.make(capacity, "meta")).items():
            kept = tensors[name].cpu()
            found[name] = torch.full(like.shape, self.law.blank[name], dtype=like.dtype, device="cpu")
            found[name][: len(kept)] = kept
        return found

    def clear(self) -> None:
        self.serves.release()
        self.largest, self._largest_row = -1.0, 0
        saved = self.tensors().items()
        self.law.restore_({name: old.new_full((), self.law.blank[name]).expand_as(old) for name, old in saved})
        self.keep(slice(0, None))

    def load(self, alpha: float, beta: float, largest: float, tensors: dict[str, Tensor], capacity: int) -> None:
        """Restore a state; raise a ValueError before any change if it is invalid or of another kind of sampler."""
        if capacity < self.capacity:
            raise ValueError(f"the saved sampler has max_capacity={capacity}, this one {self.capacity}")
        if not (largest == -1 or 0 <= largest < float("inf")):
            expected = "expected -1 or a finite number that is not negative"
            raise ValueError(f"the saved sampler has seen a largest magnitude of {largest}, {expected}")
        table = self.law.table if self.is_shared else self.law.make(capacity, self.device)
        refuse_state(tensors, self.tensors(table))
        self.law.table, self.capacity = table, capacity
        self.settings[ALPHA], self.settings[BETA], self.settings[WEIGHED] = alpha, beta, alpha
        self.largest, self._largest_row = largest, 0
        self.law.restore_({name: tensor.to(self.device) for name, tensor in tensors.items()})
        self.keep(slice(0, None))

    def share_memory_(self) -> None:
        if not self.is_shared:
            self.is_shared = True
            with outside_inference_mode():
                self.law.table.share_memory_()
            self.settings.share_memory_()

    def __getstate__(self) -> dict[str, Any]:
        is_spawning = get_spawning_popen() is not None
        if is_spawning and not self.is_shared:
            remedy = "Share the buffer first: rb.share(); in TorchRL's buffers, use sync=False"
            reason = "a prioritized sampler in memory of its own cannot be shared between processes"
            raise RuntimeError(f"{reason}. {remedy}")
        return self.__dict__ | {
            "_inputs": HostTensors([]),
            "_entries": _NO_ENTRIES,
            "is_shared": is_spawning,
            "file": self.file if is_spawning else None,
        }


def refuse_state(tensors: Any, blank: dict[str, Tensor]) -> None:
    """Raise a ValueError unless ``tensors`` match the table, ``blank``, in names, dtypes and shapes, and can occur."""
    if not isinstance(tensors, dict) or tensors.keys() != blank.keys():
        raise ValueError(f"the saved state is of another sampler: this one needs {', '.join(blank)}")
    for name, expected in blank.items():
        tensor = tensors[name]
        kinds = [(str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in (tensor, expected)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"the saved {name} is {kinds[0]}, expected {kinds[1]}")
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():  # aminmax returns NaN if there is any
            raise ValueError(f"the saved {name} holds NaN or infinite values")
    magnitude, weight = tensors["magnitude"], tensors.get("weight")
    unset = magnitude < 0
    if (unset & (magnitude != -1)).any():
        raise ValueError("the saved magnitude holds negative numbers other than -1")
    if weight is not None and ((weight < 0) | (weight > LARGEST_WEIGHT) | (unset & (weight != 0))).any():
        raise ValueError(
            f"the saved weight holds numbers below 0 or above {LARGEST_WEIGHT}, or of rows without a priority"
        )
