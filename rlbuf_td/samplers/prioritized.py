"""What every prioritized sampler shares: priorities in, checked; rows and importance weights out."""

from __future__ import annotations

from abc import abstractmethod
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Literal

import torch
from torchrl.data.replay_buffers import PrioritizedSampler, Storage

from rlbuf_td.checkpoint import load_state, save_state
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.sum_tree import REFUSED
from rlbuf_td.samplers.checks import as_errors, exponent, refuse_priorities, refuse_settings, refuse_state
from rlbuf_td.samplers.signature import OwnSignature
from rlbuf_td.storages.indexing import Index, coordinates, device_of, flat_rows, lanes_of
from rlbuf_td.storages.memory_budget import require_room
from rlbuf_td.storages.shared.numbers import SharedNumbers

_ALPHA, _BETA, _LARGEST, _WEIGHED = range(4)
WeightNorm = Literal["buffer", "batch"] | None
Reduction = Literal["max", "min", "mean", "median"]


class Prioritized(PrioritizedSampler):
    """Base of the prioritized samplers; abstract.

    It is a TorchRL ``PrioritizedSampler``, because TorchRL's buffers pass priorities on to that class only, but builds
    none of its C++ trees.

    A subclass keeps the priorities: it implements :meth:`nbytes_for`, :meth:`_allocate`, :meth:`_assign`,
    :meth:`_fill`, :meth:`_pick`, :meth:`_magnitude`, :meth:`_probability`, :meth:`_tensors` and
    :meth:`_alpha_changed`. It sees flat rows and magnitudes that have been checked. TD errors come raw, of either
    sign: their magnitude counts.
    """

    __signature__ = OwnSignature()

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
        self._numbers = SharedNumbers("d", [exponent("alpha", alpha), exponent("beta", beta), -1.0, float(alpha)])
        self._is_shared = False
        self.stratified = stratified
        self.weight_norm = weight_norm
        self.reduction = reduction
        self._device = torch.device("cpu")
        require_room(
            self.nbytes_for(self._max_capacity),
            self._device,
            what=f"Priorities of {self._max_capacity:,} rows take",
            remedy="Take a smaller max_capacity, or UniformSampler, which needs none.",
        )
        self._largest_on_device: torch.Tensor | None = None
        self._allocate(self._max_capacity)

    # -- what a subclass implements

    @classmethod
    @abstractmethod
    def nbytes_for(cls, capacity: int, device: torch.device | str = "cpu") -> int:
        """Return the bytes that the priorities of so many rows take."""

    @abstractmethod
    def _allocate(self, capacity: int) -> None:
        """Make the state for ``capacity`` rows on ``self._device``, none of which has a priority."""

    @abstractmethod
    def _assign(
        self, flat: torch.Tensor, td_error: torch.Tensor, rows: int, counts: bool = True
    ) -> float | torch.Tensor:
        """Set priorities (-1: skip; the last of a repeated row stays); return the largest magnitude among them.

        On a device path return a tensor that holds the largest of all that counts. On the CPU return ``REFUSED``,
        having changed nothing, if a row is not in ``[-1, rows)`` or an error not finite.
        """

    @abstractmethod
    def _fill(self, start: int, count: int, magnitude: float | torch.Tensor) -> None:
        """Give ``count`` rows from ``start`` on one magnitude."""

    @abstractmethod
    def _pick(self, rows: int, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn ``[B]`` uniform numbers (float64) into ``[B]`` rows of ``rows`` written ones, and float32 weights."""

    @abstractmethod
    def _magnitude(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the magnitudes of rows, float64, -1 where none was given."""

    @abstractmethod
    def _probability(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of rows, float64."""

    @abstractmethod
    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors from which all else follows, by name; :meth:`_restore` is given the same back."""

    @abstractmethod
    def _restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over copies of tensors that :meth:`_tensors` returned."""

    @abstractmethod
    def _blank(self, capacity: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Return what :meth:`_tensors` does for ``capacity`` rows without a priority."""

    @property
    @abstractmethod
    def _weighed_alpha(self) -> float:
        """The alpha of what is stored."""

    @abstractmethod
    def _alpha_changed(self, alpha: float) -> None:
        """Re-weight what is stored."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget all priorities, in place."""

    @abstractmethod
    def _share(self) -> None:
        """Move what :meth:`_allocate` made into shared memory."""

    @abstractmethod
    def _rebuild(self) -> None:
        """Make everything anew from the magnitudes; a process may have died while it changed them."""

    # -- settings, which all processes see

    @property
    def alpha(self) -> float:
        """How far priorities count: 0 is uniform. Setting it re-weights what is stored, at the next use."""
        return self._numbers[_ALPHA]

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._numbers[_ALPHA] = exponent("alpha", value)

    @property
    def beta(self) -> float:
        """How far importance weights correct for the sampling law: 1 is fully."""
        return self._numbers[_BETA]

    @beta.setter
    def beta(self, value: float) -> None:
        self._numbers[_BETA] = exponent("beta", value)

    @property
    def _largest(self) -> Any:
        """The largest magnitude seen, negative before any; on CUDA a tensor."""
        return self._numbers[_LARGEST] if self._largest_on_device is None else self._largest_on_device

    @_largest.setter
    def _largest(self, value: float | torch.Tensor) -> None:
        if isinstance(value, torch.Tensor):
            self._largest_on_device = value
        else:
            self._largest_on_device, self._numbers[_LARGEST] = None, value

    @property
    def refused_priorities(self) -> int:
        """How many NaN or infinite TD errors have been left out; their rows have kept what they had.

        Counted since the sampler was made or a state loaded. On the CPU always 0: there a batch with such an error is
        refused whole. Waits for the device.
        """
        return int(self._refused())

    @abstractmethod
    def _refused(self) -> torch.Tensor | int:
        """Return that count."""

    @property
    def device(self) -> torch.device:
        """Where the priorities live: with the rows."""
        return self._device

    @property
    def default_priority(self) -> Any:
        """The magnitude that a new row enters with: the highest seen so far, 1.0 before any."""
        largest = self._largest
        if isinstance(largest, torch.Tensor):
            return torch.where(largest < 0, 1.0, largest)
        return 1.0 if largest < 0 else largest

    # -- drawing

    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw ``batch_size`` rows.

        Returns:
            The index as TorchRL gives it, ``[B]`` or a tuple of ``ndim`` tensors ``[B]``, and
            ``{"priority_weight": [B] float32}``.

        Raises:
            RuntimeError: the storage is empty, or no row has a positive priority.
        """
        flat, info = self.draw(storage, batch_size)
        return coordinates(flat, storage), info

    def draw(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draw ``batch_size`` flat rows, ``[B]`` int64 on the storage's device; otherwise as :meth:`sample`."""
        flat, weight = self._pick(*self._numbers_for(storage, batch_size))
        return flat, {"priority_weight": weight}

    def _numbers_for(self, storage: Storage, batch_size: int) -> tuple[int, torch.Tensor]:
        """Return how many rows a draw is from, and its random numbers in ``[0, 1)``, ``[B]`` float64.

        Raises:
            RuntimeError: the storage is empty.
        """
        rows = len(storage)
        if rows == 0:
            raise RuntimeError("cannot sample from an empty buffer: extend it first")
        self._settle()
        source = self._device if self._rng is None else self._rng.device
        uniform = torch.rand(batch_size, dtype=torch.float64, generator=self._rng, device=source)
        return rows, uniform if source == self._device else uniform.to(self._device)

    # -- in captured graphs

    def prepare_replay(self, storage: Storage, batch_size: int) -> None:
        """Put where captured draws and updates read it what the host knows."""
        self.follow(storage)
        self._settle()
        largest = self._put_numbers(len(storage))
        if largest is not None:
            self._adopt(largest)

    def replay_key(self) -> Any:
        """Return what captured draws go on with as it was: settings, and memory that a loaded state replaces."""
        return self.stratified, self.weight_norm, self.reduction

    @abstractmethod
    def _put_numbers(self, rows: int) -> torch.Tensor | None:
        """Put the law and the number of rows into device memory; return where the largest magnitude is kept there."""

    def _adopt(self, largest: torch.Tensor) -> None:
        """Go on with the largest magnitude that a device path keeps, and with what has been seen before."""
        before = self._largest
        if largest is not before:
            is_on_device = isinstance(before, torch.Tensor)
            largest.copy_(torch.maximum(largest, before) if is_on_device else largest.clamp(min=before))
            self._largest = largest

    def forget_order(self) -> None:
        """Take note that priorities have been changed by a graph."""

    # -- priorities

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Set the priorities of rows to ``|priority|``, whatever they hold by now.

        TorchRL's buffers come here with every update, this package's :class:`ReplayBuffer` only with the rows that have
        not been replaced since they were sampled.

        Args:
            index: ``[B]`` flat rows, a tuple of ``ndim`` tensors, ``[B, ndim]``, or an int; -1 means "skip".
            priority: as many raw TD errors, or one for all. The sampler applies the magnitude, eps and alpha.
            storage: needed for coordinates; rows beyond those that it has written are refused.

        Raises:
            ValueError: wrong shape, or NaN or infinite errors (on the CPU; on CUDA such rows keep their
                priority, and :attr:`refused_priorities` counts them).
            IndexError: a row is out of range (on the CPU; on CUDA it is skipped).
            TypeError: the index is not of integers.

        In every case of error all priorities are as they were.
        """
        if storage is not None:
            self.follow(storage)
        self._settle()
        flat = flat_rows(index, storage, self._device)
        td_error = as_errors(priority, flat.numel(), self._device)
        if not flat.numel():
            return
        rows = self._max_capacity if storage is None else len(storage)
        largest = self._assign(flat, td_error, rows)
        if isinstance(largest, torch.Tensor):
            self._adopt(largest)
        elif largest == REFUSED:
            refuse_priorities(flat, td_error, rows)
        elif largest > self._largest:
            self._largest = largest

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Let rows that have just been written enter at :attr:`default_priority`."""
        if storage is not None:
            self.follow(storage)
        self._settle()
        flat = flat_rows(index, storage, self._device)
        entry = self.default_priority
        if not isinstance(entry, torch.Tensor):
            entry = torch.full((), entry, dtype=torch.float64, device=self._device)
        largest = self._assign(flat, entry.expand(flat.shape).contiguous(), self._max_capacity, counts=False)
        if isinstance(largest, float) and largest == REFUSED:
            refuse_priorities(flat, entry.expand(flat.shape), self._max_capacity)

    def mark_range(self, start: int, count: int, *, storage: Storage) -> None:
        """Let the flat rows ``start, start + 1, ...`` that have just been written enter at :attr:`default_priority`."""
        self.follow(storage)
        self._settle()
        self._fill(start, count, self.default_priority)

    def priority(self, index: Any, *, storage: Storage | None = None) -> torch.Tensor:
        """Return ``|td_error|`` of rows, ``[B]`` float64; -1 for a row without a priority.

        Raises:
            IndexError: a row is out of range (on the CPU).
        """
        return self._magnitude(self._rows(index, storage))

    def probability(self, index: Any, *, storage: Storage | None = None) -> torch.Tensor:
        """Return the probability with which a draw takes each of the rows, ``[B]`` float64.

        Raises:
            IndexError: a row is out of range (on the CPU).
        """
        self._settle()
        return self._probability(self._rows(index, storage))

    def _rows(self, index: Any, storage: Storage | None) -> torch.Tensor:
        flat = flat_rows(index, storage, self._device)
        is_on_host = backend_of(flat) == "numba"
        if is_on_host and flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self._max_capacity:
            raise IndexError(
                f"rows {flat.min()} to {flat.max()} were named, there are rows 0 to {self._max_capacity - 1}"
            )
        return flat

    def add(self, index: Any) -> None:
        """Do nothing: :meth:`mark_range` or :meth:`mark_update` has let the row in."""

    def extend(self, index: Any) -> None:
        """Do nothing: :meth:`mark_range` or :meth:`mark_update` has let the rows in."""

    def _settle(self) -> None:
        """Re-weight what is stored if alpha has been set: here, under the buffer's lock, whoever has set it."""
        alpha = self._numbers[_ALPHA]
        if alpha != self._weighed_alpha:
            self._alpha_changed(alpha)

    def follow(self, storage: Storage) -> None:
        """Live where the rows live, with room for each; a storage of several lanes rounds its capacity up."""
        device = device_of(storage)
        if device != self._device:
            self._device = device
            self._restore({name: tensor.to(device) for name, tensor in self._tensors().items()})
        if storage.max_size > self._max_capacity:
            lanes = lanes_of(storage).numel() if storage.ndim > 1 and len(storage) else 1
            if storage.max_size - self._max_capacity >= lanes:
                raise ValueError(
                    f"the storage holds {storage.max_size} rows, but the sampler was made for "
                    f"max_capacity={self._max_capacity}: make it with max_capacity={storage.max_size}"
                )
            if self._is_shared:
                raise ValueError(
                    f"the storage holds {storage.max_size} rows, and the sampler, whose max_capacity is "
                    f"{self._max_capacity}, cannot grow in shared memory: make it with "
                    f"max_capacity={storage.max_size}, or write before you share the buffer"
                )
            self._max_capacity = storage.max_size
            self._allocate(self._max_capacity)

    def _empty(self) -> None:
        self._largest = -1.0
        self._clear()

    # -- processes

    def share_memory_(self) -> None:
        """Let processes that are forked from now on, or spawned and sent this sampler, use the same priorities.

        The buffer's lock orders what they do; :meth:`ReplayBuffer.share` calls this.
        """
        if not self._is_shared:
            self._is_shared = True
            self._share()

    def repair(self, storage: Storage) -> None:
        """Put right what a process has left that died while it changed priorities; O(N).

        Rows that have lost theirs enter as new ones do.
        """
        self._rebuild()
        rows = torch.arange(len(storage), device=self._device)
        absent = rows[self._magnitude(rows) < 0]
        if len(absent):
            self.mark_update(absent, storage=storage)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all that behaviour depends on."""
        state = self.snapshot()
        return state | {"priorities": {name: tensor.clone() for name, tensor in state["priorities"].items()}}

    def snapshot(self) -> dict[str, Any]:
        """Return :meth:`state_dict` with the tensors themselves rather than copies."""
        self._settle()
        return {
            "alpha": self.alpha,
            "beta": self.beta,
            "stratified": self.stratified,
            "weight_norm": self.weight_norm,
            "reduction": self.reduction,
            "max_capacity": self._max_capacity,
            "largest": float(self._largest),
            "priorities": self._tensors(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: the state is of a sampler of a smaller capacity, or of no such sampler; this one stays as it
                was.
        """
        capacity = int(state_dict["max_capacity"])
        if capacity < self._max_capacity:
            raise ValueError(f"the saved sampler has max_capacity={capacity}, this one {self._max_capacity}")
        tensors = state_dict["priorities"]
        refuse_state(tensors, self._blank(capacity, "meta"))
        alpha, beta = exponent("alpha", state_dict["alpha"]), exponent("beta", state_dict["beta"])
        names = ("stratified", "weight_norm", "reduction")
        settings = {name: state_dict.get(name, getattr(self, name)) for name in names}
        refuse_settings(**settings)
        largest = float(state_dict["largest"])
        if not largest < float("inf"):
            raise ValueError(f"the saved sampler has seen a largest magnitude of {largest}, which is no number")
        self._max_capacity = capacity  # a storage of several lanes may have rounded it up
        self.alpha, self.beta = alpha, beta
        for name, value in settings.items():
            setattr(self, name, value)
        self._largest = largest
        self._restore({name: tensor.to(self._device) for name, tensor in tensors.items()})

    def resized_state(
        self, state: dict[str, Any], rows: torch.Tensor | None, capacity: int, moved: bool
    ) -> dict[str, Any]:
        """Return a saved state for rows that have moved; see :func:`rlbuf_td.checkpoint.resize.resized_state`."""
        capacity, saved = max(capacity, self._max_capacity), int(state["max_capacity"])
        if rows is None and saved >= capacity:
            return state
        refuse_state(state["priorities"], self._blank(saved, "meta"))
        rows = torch.arange(saved) if rows is None else rows
        blank = self._blank(capacity, "cpu")
        for name, tensor in blank.items():
            tensor[: len(rows)] = state["priorities"][name].cpu()[rows]
        return state | {"max_capacity": capacity, "priorities": blank}

    def dumps(self, path: str | Path) -> None:
        """Save the state in the folder ``path``, as :meth:`ReplayBuffer.dumps <rlbuf_td.ReplayBuffer.dumps>` does."""
        save_state(path, type(self).__name__, self.snapshot())

    def loads(self, path: str | Path) -> None:
        """Continue from what :meth:`dumps` saved; nothing is executed.

        Raises:
            CheckpointError: the files are missing, damaged or foreign; this sampler stays as it was.
        """
        self.load_state_dict(load_state(path, type(self).__name__))

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            return self.__dict__ | {"_rng": None, "_is_shared": False}
        if not self._is_shared:
            raise RuntimeError(
                f"a {type(self).__name__} cannot be sent to another process: each would keep priorities of its own. "
                "Share the buffer first: rb.share()"
            )
        return self.__dict__ | {"_rng": None}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self.alpha:g}, beta={self.beta:g}, stratified={self.stratified}, "
            f"weight_norm={self.weight_norm!r}, max_capacity={self._max_capacity})"
        )
