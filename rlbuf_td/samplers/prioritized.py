"""What the prioritized samplers share: TorchRL's protocol, settings and state around the priorities of rows."""

from __future__ import annotations

from abc import abstractmethod
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Storage

from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.sum_tree import REFUSED
from rlbuf_td.samplers.common import (
    GraphCapturable,
    RowSampler,
    as_errors,
    exponent,
    refuse_priorities,
    refuse_settings,
    refuse_state,
)
from rlbuf_td.storages.indexing import device_of, flat_rows, lanes_of
from rlbuf_td.storages.memory_budget import require_room
from rlbuf_td.storages.shared.memory import SharedNumbers

ALPHA, BETA, LARGEST = range(3)  # the shared settings
WeightNorm = Literal["buffer", "batch"] | None
Reduction = Literal["max", "min", "mean", "median"]


class _Priorities(Protocol):
    """The priorities of ``capacity`` rows on one device, and the law by which they are drawn.

    Rows are flat, ``[B]`` int64. A magnitude is ``|td_error|``, -1 for a row without one. ``alpha`` weights what is
    stored; ``refused`` counts NaN and infinite errors (0 on the CPU, where the whole batch is refused).
    """

    @property
    def alpha(self) -> float: ...
    @property
    def refused(self) -> Tensor | int: ...
    def assign(self, flat: Tensor, td_error: Tensor, rows: int, counts: bool) -> float | Tensor:
        """Set priorities (row -1 is skipped; of a repeated row the last one stays), return the largest magnitude.

        On the CPU return ``REFUSED``, with nothing changed, if a row is not in ``[-1, rows)`` or an error not finite;
        elsewhere a tensor with the largest magnitude of all that ``counts``.
        """

    def fill(self, start: int, count: int, magnitude: float | Tensor) -> None: ...
    def magnitude(self, flat: Tensor) -> Tensor: ...  # float64
    def probability(self, flat: Tensor) -> Tensor: ...  # float64
    def reweigh(self, alpha: float) -> None: ...
    def rebuild(self) -> None: ...  # everything from the magnitudes, after a process died while it changed them
    def clear(self) -> None: ...
    def share_memory_(self) -> None: ...
    def tensors(self) -> dict[str, Tensor]: ...  # they determine the state
    def restore(self, tensors: dict[str, Tensor], alpha: float) -> None: ...  # copy such tensors into this memory
    def prepare_graph(self, rows: int, beta: float) -> tuple[Tensor | None, Any]:
        """Copy settings to the device; return where the largest magnitude is, and what a graph cannot see change."""


class Prioritized(RowSampler, GraphCapturable, PrioritizedSampler):
    """Base of the prioritized samplers; abstract.

    It is a TorchRL ``PrioritizedSampler``, because TorchRL's buffers pass priorities only to that class, but builds
    none of its C++ trees. TD errors are raw, of either sign: their magnitude counts.

    A subclass implements :meth:`draw`, :meth:`nbytes_for`, and :meth:`_make`.
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        *,
        stratified: bool,
        weight_norm: WeightNorm,
        reduction: Reduction,
    ) -> None:
        if max_capacity < 1 or max_capacity != int(max_capacity):
            raise ValueError(f"max_capacity must be a whole number, at least 1, got {max_capacity}")
        refuse_settings(stratified, weight_norm, reduction)
        self._max_capacity = int(max_capacity)
        self._numbers = SharedNumbers("d", [exponent("alpha", alpha), exponent("beta", beta), -1.0])
        self._is_shared = False
        self.stratified, self.weight_norm, self.reduction = stratified, weight_norm, reduction
        self._device = torch.device("cpu")
        require_room(
            self.nbytes_for(self._max_capacity),
            self._device,
            what=f"Priorities of {self._max_capacity:,} rows take",
            remedy="Take a smaller max_capacity, or UniformSampler, which needs none.",
        )
        self._largest_on_device: Tensor | None = None
        self._priorities = self._make(self._max_capacity, self._device)

    @classmethod
    @abstractmethod
    def nbytes_for(cls, capacity: int, device: torch.device | str = "cpu") -> int:
        """Return the bytes that the priorities of ``capacity`` rows take."""

    @abstractmethod
    def _make(self, capacity: int, device: torch.device) -> _Priorities:
        """Return ``_Priorities`` of ``capacity`` rows, all without one."""

    # -- settings, which all processes see

    @property
    def settings(self) -> Any:
        """The shared numbers themselves, by ``ALPHA``, ``BETA`` and ``LARGEST``; for hot paths."""
        return self._numbers.values

    @property
    def alpha(self) -> float:
        """How far priorities count: 0 is uniform. Setting it re-weights what is stored, at the next use."""
        return self._numbers[ALPHA]

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._numbers[ALPHA] = exponent("alpha", value)

    @property
    def beta(self) -> float:
        """How far importance weights correct for the sampling law: 1 is fully."""
        return self._numbers[BETA]

    @beta.setter
    def beta(self, value: float) -> None:
        self._numbers[BETA] = exponent("beta", value)

    @property
    def largest_magnitude(self) -> Any:
        """The largest magnitude seen, negative before any; on CUDA a 0-dim tensor."""
        return self._numbers[LARGEST] if self._largest_on_device is None else self._largest_on_device

    def _see(self, largest: float | Tensor) -> None:
        """Set the largest magnitude; a tensor is where a device keeps it, which goes on with what was seen before."""
        if isinstance(largest, Tensor):
            before = self.largest_magnitude
            if largest is not before:
                largest.clamp_(min=before)
            self._largest_on_device = largest
        else:
            self._largest_on_device, self._numbers[LARGEST] = None, largest

    @property
    def default_priority(self) -> Any:
        """The magnitude that a new row enters with: the highest seen so far, 1.0 before any."""
        largest = self.largest_magnitude
        if isinstance(largest, Tensor):
            return torch.where(largest < 0, 1.0, largest)
        return 1.0 if largest < 0 else largest

    @property
    def refused_priorities(self) -> int:
        """How many NaN or infinite TD errors were skipped since the sampler was made or a state loaded.

        Waits for the device. Always 0 on the CPU, which refuses the whole batch.
        """
        return int(self._priorities.refused)

    @property
    def device(self) -> torch.device:
        """Where the priorities live: with the rows."""
        return self._device

    # -- priorities

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Set the priorities of rows to ``|priority|``, also of rows that were replaced since they were sampled.

        Args:
            index: ``[B]`` flat rows, a tuple of ``ndim`` tensors, ``[B, ndim]``, or an int; -1 means "skip".
            priority: as many raw TD errors, or one for all. The sampler applies the magnitude, eps and alpha.
            storage: needed for coordinates; rows beyond those that it has written are refused.

        Raises:
            ValueError: wrong shape, or NaN or infinite errors (on CUDA such rows are skipped and counted).
            IndexError: a row is out of range (on CUDA it is skipped).
            TypeError: the index is not of integers.

        After any error all priorities are as they were.
        """
        flat = self._prepared(index, storage)
        td_error = as_errors(priority, flat.numel(), self._device)
        if not flat.numel():
            return
        rows = self._max_capacity if storage is None else len(storage)
        largest = self._assign(flat, td_error, rows, True)
        if isinstance(largest, Tensor) or largest > self.largest_magnitude:
            self._see(largest)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Let rows that have just been written enter at :attr:`default_priority`."""
        flat = self._prepared(index, storage)
        entry = torch.as_tensor(self.default_priority, dtype=torch.float64, device=self._device)
        self._assign(flat, entry.expand(flat.shape).contiguous(), self._max_capacity, False)

    def _prepared(self, index: Any, storage: Storage | None) -> Tensor:
        if storage is not None:
            self.follow(storage)
        self._apply_alpha()
        return flat_rows(index, storage, self._device)

    def _assign(self, flat: Tensor, td_error: Tensor, rows: int, counts: bool) -> float | Tensor:
        largest = self._priorities.assign(flat, td_error, rows, counts)
        if type(largest) is float and largest == REFUSED:
            refuse_priorities(flat, td_error, rows)
        return largest

    def mark_range(self, start: int, count: int, *, storage: Storage) -> None:
        """Let the flat rows ``start, start + 1, ...`` that have just been written enter at :attr:`default_priority`."""
        self.follow(storage)
        self._apply_alpha()
        self._priorities.fill(start, count, self.default_priority)

    def add(self, index: Any) -> None:
        """Do nothing: :meth:`mark_range` or :meth:`mark_update` lets new rows in."""

    extend = add

    def priority(self, index: Any, *, storage: Storage | None = None) -> Tensor:
        """Return ``|td_error|`` of rows, ``[B]`` float64; -1 for a row without a priority.

        Raises:
            IndexError: a row is out of range (on the CPU).
        """
        return self._priorities.magnitude(self._rows(index, storage))

    def probability(self, index: Any, *, storage: Storage | None = None) -> Tensor:
        """Return the probability of each row in a draw, ``[B]`` float64; raises as :meth:`priority`."""
        self._apply_alpha()
        return self._priorities.probability(self._rows(index, storage))

    def _rows(self, index: Any, storage: Storage | None) -> Tensor:
        flat = flat_rows(index, storage, self._device)
        is_on_host = backend_of(flat) == "numba"
        if is_on_host and flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self._max_capacity:
            raise IndexError(
                f"rows {flat.min()} to {flat.max()} were named, there are rows 0 to {self._max_capacity - 1}"
            )
        return flat

    def _apply_alpha(self) -> None:
        """Re-weight what is stored if any process has set alpha; called under the buffer's lock."""
        alpha = self._numbers[ALPHA]
        if alpha != self._priorities.alpha:
            self._priorities.reweigh(alpha)

    def follow(self, storage: Storage) -> None:
        """Move to the storage's device, with room for each row; a storage of several lanes rounds its capacity up."""
        device = device_of(storage)
        if device != self._device:
            self._device, before = device, self._priorities
            self._priorities = self._make(self._max_capacity, device)
            self._priorities.restore({name: x.to(device) for name, x in before.tensors().items()}, before.alpha)
        if storage.max_size > self._max_capacity:
            lanes = lanes_of(storage).numel() if storage.ndim > 1 and len(storage) else 1
            if storage.max_size - self._max_capacity >= lanes:
                raise ValueError(
                    f"the storage holds {storage.max_size} rows, but the sampler was made for "
                    f"max_capacity={self._max_capacity}: make it with max_capacity={storage.max_size}"
                )
            if self._is_shared:
                raise ValueError(
                    f"a sampler of max_capacity={self._max_capacity} cannot grow in shared memory: make it with "
                    f"max_capacity={storage.max_size}, which the storage holds, or write before you share the buffer"
                )
            self._max_capacity = storage.max_size
            self._priorities = self._make(self._max_capacity, self._device)

    def _empty(self) -> None:
        self._see(-1.0)
        self._priorities.clear()

    def prepare_graph(self, storage: Storage, batch_size: int) -> Any:
        """See :class:`GraphCapturable`."""
        self.follow(storage)
        self._apply_alpha()
        largest, key = self._priorities.prepare_graph(len(storage), self.beta)
        if largest is not None:
            self._see(largest)
        return self.stratified, self.weight_norm, self.reduction, key

    # -- processes

    def share_memory_(self) -> None:
        """Share the priorities with processes that are forked, or spawned with this sampler, from now on."""
        if not self._is_shared:
            self._is_shared = True
            self._priorities.share_memory_()

    def repair(self, storage: Storage) -> None:
        """Repair what a process left that died while it changed priorities; rows without one enter as new. O(N)."""
        self._priorities.rebuild()
        self.admit(storage)

    def admit(self, storage: Storage) -> None:
        """Let stored rows without a priority enter as new ones do."""
        rows = torch.arange(len(storage), device=self._device)
        absent = rows[self._priorities.magnitude(rows) < 0]
        if len(absent):
            self.mark_update(absent, storage=storage)

    # -- state

    def snapshot(self) -> dict[str, Any]:
        """See :class:`~rlbuf_td.samplers.common.RowSampler`."""
        self._apply_alpha()
        return {
            "alpha": self.alpha,
            "beta": self.beta,
            "stratified": self.stratified,
            "weight_norm": self.weight_norm,
            "reduction": self.reduction,
            "max_capacity": self._max_capacity,
            "largest": float(self.largest_magnitude),
            "priorities": self._priorities.tensors(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: the state is of a smaller capacity or of another sampler; this one stays as it was.
        """
        capacity = int(state_dict["max_capacity"])
        if capacity < self._max_capacity:
            raise ValueError(f"the saved sampler has max_capacity={capacity}, this one {self._max_capacity}")
        tensors = state_dict["priorities"]
        priorities = self._priorities if self._is_shared else self._make(capacity, self._device)
        refuse_state(tensors, priorities.tensors())
        alpha, beta = exponent("alpha", state_dict["alpha"]), exponent("beta", state_dict["beta"])
        settings = {n: state_dict.get(n, getattr(self, n)) for n in ("stratified", "weight_norm", "reduction")}
        refuse_settings(**settings)
        largest = float(state_dict["largest"])
        if not largest < float("inf"):
            raise ValueError(f"the saved sampler has seen a largest magnitude of {largest}, which is no number")
        self._max_capacity = capacity  # a storage of several lanes may have rounded it up
        self.alpha, self.beta = alpha, beta
        for name, value in settings.items():
            setattr(self, name, value)
        self._see(largest)
        self._priorities = priorities
        priorities.restore({name: tensor.to(self._device) for name, tensor in tensors.items()}, alpha)

    def resized_state(self, state: dict[str, Any], rows: Tensor | None, capacity: int, moved: bool) -> dict[str, Any]:
        """See :class:`~rlbuf_td.samplers.common.RowSampler`."""
        capacity, saved = max(capacity, self._max_capacity), int(state["max_capacity"])
        if rows is None and saved >= capacity:
            return state
        host = torch.device("cpu")
        refuse_state(state["priorities"], self._make(saved, host).tensors())
        rows = torch.arange(saved) if rows is None else rows
        blank = self._make(capacity, host).tensors()
        for name, tensor in blank.items():
            tensor[: len(rows)] = state["priorities"][name].cpu()[rows]
        return state | {"max_capacity": capacity, "priorities": blank}

    def __getstate__(self) -> dict[str, Any]:
        is_spawning = get_spawning_popen() is not None
        if is_spawning and not self._is_shared:
            raise RuntimeError(
                f"a {type(self).__name__} cannot be sent to another process: each would keep priorities of its own. "
                "Share the buffer first: rb.share()"
            )
        return self.__dict__ | {"_rng": None, "_is_shared": is_spawning}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self.alpha:g}, beta={self.beta:g}, stratified={self.stratified}, "
            f"weight_norm={self.weight_norm!r}, max_capacity={self._max_capacity})"
        )
