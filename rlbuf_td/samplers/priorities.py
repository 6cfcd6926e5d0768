"""The priorities of a storage's rows, and the base class of the rules that convert TD
errors to probabilities."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from rlbuf_td.kernels.batch import UPDATE, Updates
from rlbuf_td.kernels.dispatch import (
    backend_of,
    compiled_form,
    record_of,
    untraced,
    uses_numba,
)
from rlbuf_td.kernels.host_memory import HostTensors, outside_inference_mode
from rlbuf_td.kernels.serials import Serials
from rlbuf_td.kernels.strata import Stratification, empty_draws
from rlbuf_td.kernels.sum_tree import LARGEST_MAGNITUDE, REFUSED
from rlbuf_td.kernels.sum_tree.blocks import BlockUpdate, Run
from rlbuf_td.kernels.wrappers import Windows
from rlbuf_td.samplers.common import (
    OneStorage,
    as_errors,
    refuse_priorities,
)
from rlbuf_td.samplers.priority_file import PriorityFile
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.indexing import (
    device_of,
    flat_rows,
    numbered,
    row_count,
    written_rows,
)
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.numbers import SharedNumbers
from rlbuf_td.storages.ring import Ring, refuse_stamps

# indices of the shared settings; WEIGHED: the alpha of the stored weights
ALPHA, BETA, LARGEST, WEIGHED = range(4)
_NO_RECORD = (), None, 0


class PriorityRule(ABC):
    """Abstract conversion of TD errors to probabilities; ``flat``, ``[B]`` int64, holds
    flat indices of rows."""

    # the data structure of all rows; its ``magnitude`` is ``|td_error|``, -1 for rows
    # without a priority
    table: Any
    eps = min_priority = 0.0  # what is added to magnitudes, and their lower bound
    # whether the table holds a weight of each row, which depends on alpha
    weighs_rows = False
    first = property(
        lambda self: max(1.0, self.min_priority),
        doc="Magnitude of new rows before any TD error.",
    )

    def __init__(self, settings: SharedNumbers) -> None:
        self.settings = settings

    @abstractmethod
    def make(self, capacity: int, device: torch.device | str) -> Any:
        """Create an empty table for the priorities of ``capacity`` rows."""

    def draw(
        self, uniform: Tensor, rows: int, law: Stratification
    ) -> tuple[Tensor, Tensor]:
        """Return drawn rows and importance weights, both ``[B]``; RuntimeError (on the
        CPU) if no row can be drawn.

        Args:
            uniform: ``[B]`` float64 numbers in ``[0, 1)``.
            rows: the number of live rows.
            law: how the rows are drawn and weighed.
        """
        if backend_of(uniform) == "numba":
            flat, weight = empty_draws(uniform.shape[0])
            self.draw_into(uniform, rows, law, flat, weight)
            return flat, weight
        self.refresh_weights()
        return self.draw_with_torch(uniform, rows, law)

    @abstractmethod
    def draw_with_torch(
        self, uniform: Tensor, rows: int, law: Stratification
    ) -> tuple[Tensor, Tensor]:
        """Return what :meth:`draw` returns, on any device."""

    def launch_draw(
        self,
        batch: int,
        rows: int,
        law: Stratification,
        *,
        generator: torch.Generator | None,
        serials: Serials | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what :meth:`draw` does with numbers of ``generator``, and the serials
        of the rows, ``[B]``, or None; with a kernel on a GPU."""
        raise NotImplementedError

    @abstractmethod
    def draw_into(
        self,
        uniform: Tensor,
        rows: int,
        law: Stratification,
        flat: Tensor,
        weight: Tensor,
    ) -> None:
        """Draw with the current alpha to ``flat`` and ``weight`` in host memory;
        RuntimeError if no row can be drawn."""

    @abstractmethod
    def probability(self, flat: Tensor) -> Tensor:
        """Return the probability of each row, ``[B]`` float64."""

    @abstractmethod
    def least_probability(self) -> float | Tensor:
        """Return the smallest positive probability of all rows, float64; infinite if no
        row can be drawn."""

    def floored(self, td_error: Tensor) -> Tensor:
        """Raise the magnitudes of TD errors to :attr:`min_priority`."""
        return (
            td_error.abs().clamp_(min=self.min_priority)
            if self.min_priority
            else td_error
        )

    @abstractmethod
    def update_(self, flat: Tensor, td_error: Tensor, rows: int) -> float | Tensor:
        """Set priorities; see :func:`rlbuf_td.kernels.sum_tree.update_` for the
        arguments and the result."""

    @property
    def is_launched(self) -> bool:
        """Whether kernels on a GPU draw and update."""
        return False

    def launch_update_(
        self, update: BlockUpdate, largest: Tensor, counts: bool
    ) -> Tensor | None:
        """See :func:`rlbuf_td.kernels.sum_tree.triton.update_`."""
        raise NotImplementedError

    def launch_enter_(self, run: Run, largest: Tensor) -> None:
        """See :func:`rlbuf_td.kernels.sum_tree.triton.enter_`."""
        raise NotImplementedError

    @abstractmethod
    def update_loop(self) -> Callable[..., Any]:
        """Return the compiled function that updates priorities, such as
        ``kernels.batch.cpu.update_proportional``."""

    @abstractmethod
    # the caller holds the buffer's lock
    def refresh_weights(self, anew: bool = False) -> None:
        """Recompute derived values, such as ``p ** alpha`` of each row, if alpha has
        changed or ``anew`` is True."""

    @abstractmethod
    def check(self) -> None:
        """Raise an AssertionError unless the table is as its class states it."""

    @abstractmethod
    def restore_(self, magnitude: Tensor) -> None:
        """Copy the magnitudes of the first ``len(magnitude)`` rows into the table."""


def _are_pairs(index: Any, device: torch.device) -> bool:
    is_like = (
        type(index) is Tensor and index.dtype is torch.int64 and index.device == device
    )
    return is_like and index.ndim == 2 and index.shape[1] == 2


class Update(NamedTuple):
    """An update of priorities.

    With ``windows``, the rows are their anchors; index, TD errors and stamps are those
    of all rows of a batch.
    """

    index: Any  # flat rows ``[B]``, coordinates, or another index of rows
    td_error: Any  # ``[B]``, or one for all rows
    # ``[B]`` int64: rows that are gone since they got it are skipped; None: none are
    stamp: Tensor | None = None
    windows: Windows | None = None
    counts: bool = True  # whether these TD errors can raise the magnitude of new rows

    @property
    def tensors(self) -> list[Any]:
        """What compiled code reads, in the order of :class:`Updates`."""
        tensors = [self.index, self.td_error]
        if self.stamp is not None:
            tensors.append(self.stamp)
        if self.windows is not None:
            tensors += self.windows.mask, self.windows.burn_in_mask
        return tensors

    def reduced(self) -> Update:
        """Return the update of the anchors, with one TD error for each window."""
        if self.windows is None:
            return self
        index, td_error = self.windows.reduced(self.index, self.td_error)
        return self._replace(index=index, td_error=td_error, windows=None)


class _Form:
    """The tensors of updates that compiled code can read: like those of ``update``.

    ``loop`` is the compiled function that updates priorities.
    """

    def __init__(self, update: Update, loop: Callable[..., Any]) -> None:
        self.loop = loop
        self.tensors = HostTensors([(x.dtype, x.shape) for x in update.tensors])
        self.size = update.td_error.numel()
        self.in_pairs = update.index.numel() > self.size
        self.is_double = update.td_error.dtype is torch.float64

    def arguments(self, update: Update, written: int) -> Updates | None:
        """Return the arguments of the loop; None if the tensors are not of this form.

        ``written``: the number of cells that hold rows.
        """
        addresses = self.tensors.addresses(update.tensors)
        if addresses is None:
            return None
        index, td_error, *others = addresses
        stamp = others.pop(0) if update.stamp is not None else 0
        mask = 0
        burn_in_mask = 0
        every = 1
        eta = 1.0
        if update.windows is not None:
            mask, burn_in_mask = others
            every, eta = update.windows.length, update.windows.eta
        return Updates(
            index,
            td_error,
            stamp,
            mask,
            burn_in_mask,
            every,
            eta,
            self.in_pairs,
            self.is_double,
            self.size // every,
            written,
            update.counts,
        )


class Priorities:
    """The priorities of the rows of one storage. A row's *magnitude* is its
    ``|td_error|``."""

    def __init__(self, rule: PriorityRule, capacity: int, device: Any) -> None:
        self.rule = rule
        self.settings = rule.settings
        self.capacity = capacity
        self.device = torch.device("cpu")
        self._wanted = None if device is None else torch.device(device)
        self.serves = OneStorage()
        self.file: PriorityFile | None = None  # with PackedStorage(reopen=True)
        self.is_shared = False
        self._largest_on_device: Tensor | None = None
        self._form: _Form | None = None  # of the last update
        # what compiled code reads; see `record_at`
        self._record: tuple[Any, ...] = _NO_RECORD
        rule.table = rule.make(capacity, self.device)

    @property
    def largest(self) -> Any:
        """The largest magnitude so far, -1 if there is none.

        It is a 0-dim tensor on other devices than the CPU, and on the CPU if torch
        updates priorities that are not shared.
        """
        return (
            self.settings[LARGEST]
            if self._largest_on_device is None
            else self._largest_on_device
        )

    @largest.setter
    def largest(self, value: float | Tensor) -> None:
        # in shared settings, other processes find it
        if isinstance(value, Tensor) and not self.is_shared:
            self._largest_on_device = value
        else:
            self._largest_on_device, self.settings[LARGEST] = (
                None,
                min(float(value), LARGEST_MAGNITUDE),
            )

    @property
    def initial(self) -> Any:
        """The magnitude of new rows."""
        largest = self.largest
        if isinstance(largest, Tensor):
            return largest.masked_fill(largest < 0, self.rule.first)
        return self.rule.first if largest < 0 else largest

    def rows(self, index: object, storage: Storage | None) -> Tensor:
        """Convert an index to flat rows; on the CPU, raise an IndexError if a row is
        out of range."""
        flat = flat_rows(index, storage, self.device)
        is_on_host = backend_of(flat) == "numba"
        if (
            is_on_host
            and flat.numel()
            and not 0 <= int(flat.min()) <= int(flat.max()) < self.capacity
        ):
            raise IndexError(
                f"rows {flat.min()} to {flat.max()} are out of range: rows are 0 to {self.capacity - 1}"
            )
        return flat

    @untraced(
        "an update on the CPU checks its input, and changes numbers that no graph knows"
    )
    def assign(self, update: Update, storage: Storage | None) -> int | Tensor:
        """Set the priorities of rows; return the number of those that are skipped
        because they are gone.

        If ``update.counts`` and the storage is given, the rows must have been written;
        otherwise, they may be new.
        """
        self._prepare(storage)
        rule = self.rule
        written = self.capacity
        has_holes = False
        ring = getattr(storage, "ring", None)
        if update.counts and storage is not None:
            live = numbered(storage)
            written = live.rows if live.are_cells else len(storage)
            has_holes = live.rows < written
        form = self._form
        arguments = None
        stale: int | Tensor = 0
        if form is not None and storage is not None and not has_holes:
            arguments = form.arguments(update, written)
        if form is None or arguments is None:
            update, stale = self._converted(update, storage, has_holes)
            if not len(update.index):
                return stale
            if not self._is_compiled:
                gone = self._assign_with_torch(update, written, ring)
                self.keep(update.index, None if update.counts else storage)
                return stale if gone is None else gone
            self._form = form = _Form(update, rule.update_loop())
            arguments = form.arguments(update, written)
        with rule.table.lock:
            largest, gone = form.loop(self.record_at(storage, ring), arguments)
        if largest == REFUSED or self.file is not None:
            update = update.reduced()
            flat = flat_rows(update.index, storage, self.device)
            if largest == REFUSED:
                refuse_priorities(flat, update.td_error, written)
            self.keep(flat, None if update.counts else storage)
        return stale + gone

    def _prepare(self, storage: Storage | None) -> None:
        """Move to the rows of a storage, and compute weights anew if alpha has
        changed."""
        # a draw claims a storage that may have more rows than there are priorities
        if storage is not None and (
            storage.max_size > self.capacity or self.serves._storage() is not storage
        ):
            self.move_to(storage)
        settings = self.settings.values
        if self.rule.weighs_rows and settings[ALPHA] != settings[WEIGHED]:
            self.rule.refresh_weights()

    @property
    def _is_compiled(self) -> bool:
        return (
            uses_numba(self.device)
            and compiled_form(self.rule, "update_loop", "update_") is not None
        )

    @property
    def is_launched(self) -> bool:
        """Whether kernels on a GPU draw and update."""
        return (
            self.rule.is_launched
            and compiled_form(self.rule, "launch_update_", "update_") is not None
        )

    def _on_device(self) -> Tensor:
        """Return :attr:`largest` as a tensor, which kernels increase in place."""
        if self._largest_on_device is None:
            self._largest_on_device = torch.full(
                (), self.settings[LARGEST], dtype=torch.float32, device=self.device
            )
        return self._largest_on_device

    def _converted(
        self, update: Update, storage: Any, has_holes: bool
    ) -> tuple[Update, int | Tensor]:
        """Check and convert an update; return it, and the number of rows that are known
        to be gone.

        Compiled code takes windows of usual tensors, flat rows ``[B]`` or coordinates
        ``[B, 2]``, and skips rows that are gone by itself. The torch form, and rows
        some of which may be holes, need flat rows, with -1 in place of those that are
        gone.
        """
        is_loop = self._is_compiled and not has_holes
        if update.windows is not None:
            if is_loop and _are_usual_windows(update, storage):
                return update, 0
            update = update.reduced()
        index, td_error, stamp, *_ = update
        takes_pairs = is_loop and hasattr(storage, "ring") and storage.ndim == 2
        if not (takes_pairs and _are_pairs(index, self.device)):
            index = flat_rows(index, storage, self.device)
        td_error = as_errors(td_error, len(index), self.device)
        stale: int | Tensor = 0
        if stamp is not None:
            refuse_stamps(stamp, len(index))
            stamp = stamp.to(self.device, torch.int64).contiguous()
            ring = getattr(storage, "ring", None)
            is_read = is_loop or (
                self.is_launched and ring is not None and ring.for_kernels() is not None
            )
            is_of_windows = stamp.shape != td_error.shape
            if is_of_windows or has_holes or not is_read:
                flat = flat_rows(index, storage, self.device)
                index, stale = storage.ring.skip_stale(flat, stamp)
                stamp = None
        if has_holes:
            storage.refuse_holes(index)
        update = Update(index.contiguous(), td_error, stamp, counts=update.counts)
        return update, stale

    def _assign_with_torch(
        self, update: Update, written: int, ring: Ring | None
    ) -> Tensor | None:
        """Set priorities with kernels on a GPU, or with torch; return the number of
        stale updates if a kernel has counted them."""
        flat, td_error, stamp, *_ = update
        with defer_sigint:
            if self.is_launched:
                serials = None if stamp is None or ring is None else ring.for_kernels()
                launched = BlockUpdate(flat, td_error, stamp, written, serials)
                return self.rule.launch_update_(
                    launched, self._on_device(), update.counts
                )
            largest = self.rule.update_(flat, self.rule.floored(td_error), written)
            if type(largest) is float and largest == REFUSED:
                refuse_priorities(flat, td_error, written)
            if update.counts and isinstance(largest, Tensor):
                self.largest = largest.clamp(min=self.largest)
            elif update.counts:
                self.largest = max(largest, self.largest)
            return None

    def enter(self, index: object, storage: Storage | None) -> None:
        initial = self.initial
        # torch.full writes on the device; torch.tensor would copy, and wait for it
        if not isinstance(initial, Tensor):
            initial = torch.full((), initial, dtype=torch.float32, device=self.device)
        self.set_magnitudes(index, initial, storage)

    def set_magnitudes(
        self, index: object, magnitude: Tensor, storage: Storage | None
    ) -> None:
        """Set magnitudes without raising that of new rows."""
        self.assign(Update(index, magnitude, counts=False), storage)

    def enter_run(
        self, index: object, storage: PackedStorage, first: int, count: int
    ) -> None:
        """Do what :meth:`enter` does; the new rows lie in ``count`` cells from
        ``first`` on."""
        self._prepare(storage)
        if not self.is_launched:
            return self.enter(index, storage)
        run = Run(first, count, storage.ring.steps * storage.ring.lanes)
        with defer_sigint:
            self.rule.launch_enter_(run, self._on_device())
        return self.keep_new(index, storage)

    def admit(self, storage: Storage) -> int:
        """Give stored rows without a priority the magnitude of new rows; return their
        number."""
        rows = written_rows(storage)
        absent = rows[self.rule.table.magnitude[rows] < 0]
        if len(absent):
            self.enter(absent, storage)
        return len(absent)

    def reopen(self, storage: PackedStorage) -> int:
        """Continue with the priorities that are in a file beside the rows, and keep
        them there from now on.

        Rows that are not in the file get the magnitude of new rows; the result is their
        number.
        """
        folder = storage.scratch_dir if storage.reopen else None
        if folder is None or (self.file is not None and self.file.folder == folder):
            # a spawned process keeps it
            self.file = None if folder is None and not self.is_shared else self.file
            return 0
        file = PriorityFile(storage)
        magnitude = self.rule.table.magnitude
        stored, largest = file.read(storage)
        magnitude[: file.cells] = torch.where(
            stored < 0, -1.0, stored.clamp(min=self.rule.min_priority)
        )
        self.rule.refresh_weights(anew=True)
        self.largest = largest
        missing = self.admit(storage)
        self.file = file
        self.keep(slice(0, file.cells), storage)
        return missing

    def keep(self, rows: Any, new_in: Any = None) -> None:
        """Copy the magnitudes of these rows to the file, if there is one; ``new_in``:
        the storage that has just got them, if they are new.

        For an index of -1, which updates skip, row 0 is copied.
        """
        file = self.file
        if file is None:
            return
        if not self.is_shared and file.process != os.getpid():
            raise RuntimeError(
                "this process was forked, and has only a copy of the priorities: call "
                "rb.share() before a fork"
            )
        if isinstance(rows, slice):
            rows = slice(*rows.indices(file.cells))
        else:
            rows = rows.clamp(min=0)
        file.copy(rows, self.rule.table.magnitude, float(self.largest), new_in)

    def record_at(self, storage: Storage | None, ring: Ring | None) -> int:
        """Return the address of the ``UPDATE`` record with which compiled code changes
        priorities."""
        rule = self.rule
        epoch = storage.epoch if isinstance(storage, PackedStorage) else None
        numbers = epoch, rule.table.address, rule.eps, rule.min_priority
        if numbers != self._record[0]:
            settings_at = rule.settings.address
            has_lanes = ring is not None and storage is not None and storage.ndim > 1
            record = record_of(
                UPDATE,
                table=rule.table.address,
                eps=rule.eps,
                least=rule.min_priority,
                first=rule.first,
                largest=settings_at + 8 * LARGEST,
                weighed_alpha=settings_at + 8 * WEIGHED,
                alpha=settings_at + 8 * ALPHA if rule.weighs_rows else 0,
                serials=0 if ring is None else ring.address,
                steps=0 if ring is None else ring.steps,
                lanes=ring.lanes if has_lanes else 0,
            )
            # at once: an interrupt may come
            self._record = numbers, record, record.ctypes.data
        return self._record[2]

    def keep_new(self, index: object, storage: PackedStorage) -> None:
        """Copy the magnitudes of new rows to the file, if there is one."""
        if self.file is not None:
            self.keep(flat_rows(index, storage, self.device), storage)

    @defer_sigint
    def recover(self, storage: Storage, new: Tensor) -> None:
        """See :class:`~rlbuf_td.storages.listeners.Recovers`."""
        if not row_count(storage):
            return self.clear()
        magnitude = self.rule.table.magnitude
        is_old = torch.zeros(len(magnitude), dtype=torch.bool, device=self.device)
        is_old[written_rows(storage)] = True
        is_old[new.to(self.device)] = False
        magnitude[~is_old] = -1.0
        self.rule.refresh_weights(anew=True)
        self.admit(storage)
        self.keep(slice(0, None), storage)

    def move_to(self, storage: Storage) -> None:
        """Move the priorities to the storage's device, and increase ``capacity`` to the
        storage's ``max_size``."""
        self.serves.claim(storage)
        self._form, self._record = None, _NO_RECORD
        device = device_of(storage)
        capacity = max(self.capacity, storage.max_size)
        if self._wanted not in (None, device, torch.device(device.type)):
            where = f"priorities must be on the device of the rows, {device}, not on {self._wanted}"
            raise ValueError(
                f"{where}: omit device=, or create the storage with device={str(self._wanted)!r}"
            )
        if self.file is not None and self.file.cells < storage.max_size:
            self.file.grow(storage.max_size)
        if device == self.device and capacity == self.capacity:
            return
        if self.is_shared:
            grow = f"a sampler of max_capacity={self.capacity} cannot grow in shared memory"
            raise ValueError(
                f"{grow}: create it with max_capacity={capacity}, or write before you share the buffer"
            )
        magnitude = self.rule.table.magnitude[: self.capacity].to(device)
        table = self.rule.make(capacity, device)
        with defer_sigint:
            self.device, self.capacity, self.rule.table = device, capacity, table
            self.rule.restore_(magnitude)

    @defer_sigint
    def clear(self) -> None:
        self.serves.release()
        self.largest = -1.0
        self.rule.restore_(torch.full_like(self.rule.table.magnitude, -1.0))
        self.keep(slice(0, None))

    def load(
        self,
        alpha: float,
        beta: float,
        largest: float,
        magnitude: Tensor,
        capacity: int,
    ) -> None:
        """Restore a state; raise a ValueError before any change if it is invalid or of
        another kind of sampler."""
        if capacity < self.capacity or (self.is_shared and capacity > self.capacity):
            limit = (
                f"{self.capacity}, and cannot grow in shared memory"
                if self.is_shared
                else str(self.capacity)
            )
            raise ValueError(
                f"the saved sampler has max_capacity={capacity}, this one {limit}"
            )
        if not (largest == -1 or 0 <= largest < float("inf")):
            expected = "expected -1 or a finite number that is not negative"
            raise ValueError(
                f"the saved sampler has seen a largest magnitude of {largest}, {expected}"
            )
        table = (
            self.rule.table if self.is_shared else self.rule.make(capacity, self.device)
        )
        refuse_magnitude(magnitude, capacity)
        with defer_sigint:
            self.rule.table, self.capacity = table, capacity
            self.settings[ALPHA], self.settings[BETA] = alpha, beta
            self.largest = largest
            self.rule.restore_(magnitude.to(self.device))
            self.keep(slice(0, None))

    def share_memory_(self) -> None:
        if not self.is_shared:
            with outside_inference_mode(), defer_sigint:
                self.rule.table.share_memory_()
                self.largest = float(self.largest)
                self.settings.share_memory_()
                self._record = _NO_RECORD  # has the address of the settings
            self.is_shared = True

    def __getstate__(self) -> dict[str, object]:
        is_spawning = get_spawning_popen() is not None
        if is_spawning and not self.is_shared:
            remedy = "Share the buffer first: rb.share(); in TorchRL's buffers, rb.storage.share_memory_()"
            reason = "a prioritized sampler in memory of its own cannot be shared between processes"
            raise RuntimeError(f"{reason}. {remedy}")
        return self.__dict__ | {
            "_form": None,
            "_record": _NO_RECORD,
            "is_shared": is_spawning,
            "file": self.file if is_spawning else None,
        }


def refuse_magnitude(magnitude: Tensor, capacity: int) -> None:
    """Raise a ValueError unless saved magnitudes are ``[capacity]`` float32, and
    valid."""
    if magnitude.dtype is not torch.float32 or magnitude.shape != (capacity,):
        got = f"{tuple(magnitude.shape)} {magnitude.dtype}"
        raise ValueError(
            f"the saved magnitude is {got}, expected {(capacity,)} {torch.float32}"
        )
    if not magnitude.isfinite().all():
        raise ValueError("the saved magnitude holds NaN or infinite values")
    if ((magnitude < 0) & (magnitude != -1)).any():
        raise ValueError("the saved magnitude holds negative numbers other than -1")


def _are_usual_windows(update: Update, storage: Any) -> bool:
    """Whether the loop can read windows, and the stamps of their rows, as they are."""
    if storage.ndim > 2:
        return False
    tensors = update.tensors
    rows = update.td_error.numel()
    dtypes = [torch.int64, update.td_error.dtype]
    if update.stamp is not None:
        dtypes.append(torch.int64)
    dtypes += torch.bool, torch.bool
    sizes = [rows * storage.ndim] + [rows] * (len(tensors) - 1)
    return (
        update.td_error.dtype in (torch.float32, torch.float64)
        and dtypes == [x.dtype for x in tensors]
        and sizes == [x.numel() for x in tensors]
        and HostTensors([(x.dtype, x.shape) for x in tensors]).addresses(tensors)
        is not None
    )
