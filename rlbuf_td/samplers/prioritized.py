"""What the prioritized samplers share: TorchRL's protocol around a table of priorities."""

from __future__ import annotations

from abc import abstractmethod
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Storage

from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.sum_tree import REFUSED
from rlbuf_td.samplers.common import GraphCapturable, RowSampler, as_errors, exponent, refuse_priorities
from rlbuf_td.storages.indexing import device_of, flat_rows, lanes_of
from rlbuf_td.storages.memory_budget import require_room
from rlbuf_td.storages.shared.memory import SharedNumbers

ALPHA, BETA, LARGEST, WEIGHED = range(4)  # the shared settings; the last is the alpha that the stored weights have
WeightNorm = Literal["buffer", "batch"] | None
Reduction = Literal["max", "min", "mean", "median"]


class Prioritized(RowSampler, GraphCapturable, PrioritizedSampler):
    """Base of the prioritized samplers; abstract.

    It is a TorchRL ``PrioritizedSampler``, because TorchRL's buffers pass priorities only to that class, but builds
    none of its C++ trees. TD errors are raw, of either sign: their magnitude counts.

    A subclass chooses the ``table``: the magnitudes of all rows, -1 for a row without a priority, in the data structure
    that its law draws from. The methods with an underscore that it implements work on flat rows, ``[B]`` int64.
    """

    table: Any
    """The priorities: a :class:`~rlbuf_td.kernels.sum_tree.SumTree`, or rows in the order of their magnitudes."""
    settings: SharedNumbers
    """The numbers that all processes see, at ``ALPHA``, ``BETA``, ``LARGEST`` and ``WEIGHED``."""
    device = torch.device("cpu")
    """Where the priorities live: with the rows."""
    _blank: ClassVar[dict[str, float]]
    """The tensors of the table that determine its state, each with its value for a row without a priority."""

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
        _refuse_settings(stratified, weight_norm, reduction)
        self._max_capacity = int(max_capacity)
        alpha = exponent("alpha", alpha)
        self.settings = SharedNumbers("d", [alpha, exponent("beta", beta), -1.0, alpha])
        self.stratified, self.weight_norm, self.reduction = stratified, weight_norm, reduction
        self._is_shared = False
        self._largest_on_device: Tensor | None = None
        require_room(
            self.nbytes_for(self._max_capacity),
            self.device,
            what=f"Priorities of {self._max_capacity:,} rows take",
            remedy="Take a smaller max_capacity, or UniformSampler, which needs none.",
        )
        self.table = self._make(self._max_capacity, self.device)

    @classmethod
    @abstractmethod
    def nbytes_for(cls, capacity: int, device: torch.device | str = "cpu") -> int:
        """Return the bytes that the priorities of ``capacity`` rows take."""

    @abstractmethod
    def _make(self, capacity: int, device: torch.device | str) -> Any:
        """Return a table of rows without priorities."""

    @abstractmethod
    def _update(self, flat: Tensor, td_error: Tensor, rows: int, counts: bool) -> float | Tensor:
        """Set priorities (row -1 is skipped; of a repeated row the last one stays), return the largest magnitude.

        On the CPU return ``REFUSED``, with nothing changed, if a row is not in ``[-1, rows)`` or an error not finite;
        elsewhere a tensor with the largest magnitude of all that ``counts``.
        """

    @abstractmethod
    def _fill(self, start: int, count: int, magnitude: float | Tensor) -> None:
        """Give ``count`` rows from ``start`` on one magnitude."""

    @abstractmethod
    def _weigh(self, anew: bool = False) -> None:
        """Apply alpha if any process has set it, or all weights anew; called under the buffer's lock."""

    @abstractmethod
    def _restore(self, tensors: dict[str, Tensor]) -> None:
        """Copy the tensors that determine the state, of the current alpha, into the table."""

    @abstractmethod
    def probability(self, index: Any, *, storage: Storage | None = None) -> Tensor:
        """Return the probability of each row in a draw, ``[B]`` float64; raises as :meth:`priority`."""

    @property
    def alpha(self) -> float:
        """How far priorities count: 0 is uniform. Setting it re-weights what is stored, at the next use."""
        return self.settings[ALPHA]

    @alpha.setter
    def alpha(self, value: float) -> None:
        self.settings[ALPHA] = exponent("alpha", value)

    @property
    def beta(self) -> float:
        """How far importance weights correct for the sampling law: 1 is fully."""
        return self.settings[BETA]

    @beta.setter
    def beta(self, value: float) -> None:
        self.settings[BETA] = exponent("beta", value)

    @property
    def largest_magnitude(self) -> Any:
        """The largest magnitude seen, negative before any; on CUDA a 0-dim tensor."""
        return self.settings[LARGEST] if self._largest_on_device is None else self._largest_on_device

    def _see(self, largest: float | Tensor) -> None:
        """Set the largest magnitude; a tensor is where a device keeps it, which goes on with what was seen before."""
        if isinstance(largest, Tensor):
            before = self.largest_magnitude
            if largest is not before:
                largest.clamp_(min=before)
            self._largest_on_device = largest
        else:
            self._largest_on_device, self.settings[LARGEST] = None, largest

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
        return int(self.table.refused)

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
        rows = self._max_capacity if storage is None else len(storage)
        largest = self._assign(index, priority, rows, storage, counts=True)
        if isinstance(largest, Tensor) or largest > self.largest_magnitude:
            self._see(largest)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Let rows that have just been written enter at :attr:`default_priority`."""
        entry = torch.as_tensor(self.default_priority, dtype=torch.float64, device=self.device)
        self._assign(index, entry, self._max_capacity, storage, counts=False)

    def _assign(self, index: Any, priority: Any, rows: int, storage: Storage | None, *, counts: bool) -> float | Tensor:
        if storage is not None:
            self.follow(storage)
        self._weigh()
        flat = flat_rows(index, storage, self.device)
        td_error = as_errors(priority, flat.numel(), self.device)
        if not flat.numel():
            return -1.0
        largest = self._update(flat, td_error, rows, counts)
        if type(largest) is float and largest == REFUSED:
            refuse_priorities(flat, td_error, rows)
        return largest

    def mark_range(self, start: int, count: int, *, storage: Storage) -> None:
        """Let the flat rows ``start, start + 1, ...`` that have just been written enter at :attr:`default_priority`."""
        self.follow(storage)
        self._weigh()
        self._fill(start, count, self.default_priority)

    def add(self, index: Any) -> None:
        """Do nothing: :meth:`mark_range` or :meth:`mark_update` lets new rows in."""

    extend = add

    def admit(self, storage: Storage) -> None:
        """Let stored rows without a priority enter as new ones do."""
        absent = (self.table.magnitude[: len(storage)] < 0).nonzero().squeeze(1)
        if len(absent):
            self.mark_update(absent, storage=storage)

    def repair(self, storage: Storage) -> None:
        """Repair what a process left that died while it changed priorities; rows without one enter as new. O(N)."""
        self._weigh(anew=True)
        self.admit(storage)

    def priority(self, index: Any, *, storage: Storage | None = None) -> Tensor:
        """Return ``|td_error|`` of rows, ``[B]`` float64; -1 for a row without a priority.

        Raises:
            IndexError: a row is out of range (on the CPU).
        """
        return self.table.magnitude[self._rows(index, storage)].to(torch.float64)

    def _rows(self, index: Any, storage: Storage | None) -> Tensor:
        flat = flat_rows(index, storage, self.device)
        is_on_host = backend_of(flat) == "numba"
        if is_on_host and flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self._max_capacity:
            raise IndexError(f"got rows {flat.min()} to {flat.max()}, there are rows 0 to {self._max_capacity - 1}")
        return flat

    def follow(self, storage: Storage) -> None:
        """Move to the storage's device, with room for each row; a storage of several lanes rounds its capacity up."""
        device = device_of(storage)
        if device != self.device:
            saved, self.device = self._saved(self.table), device
            self.table = self._make(self._max_capacity, device)
            self._restore({name: tensor.to(device) for name, tensor in saved.items()})
        if storage.max_size > self._max_capacity:
            lanes = lanes_of(storage).numel() if storage.ndim > 1 and len(storage) else 1
            remedy = f"make it with max_capacity={storage.max_size}"
            if storage.max_size - self._max_capacity >= lanes:
                made = f"the sampler was made for max_capacity={self._max_capacity}"
                raise ValueError(f"the storage holds {storage.max_size} rows, but {made}: {remedy}")
            if self._is_shared:
                grow = f"a sampler of max_capacity={self._max_capacity} cannot grow in shared memory"
                raise ValueError(f"{grow}: {remedy}, or write before you share the buffer")
            self._max_capacity = storage.max_size
            self.table = self._make(self._max_capacity, self.device)

    def _empty(self) -> None:
        self._see(-1.0)
        saved = self._saved(self.table).items()
        self._restore({name: old.new_full((), self._blank[name]).expand_as(old) for name, old in saved})

    def share_memory_(self) -> None:
        """Share the priorities with processes that are forked, or spawned with this sampler, from now on."""
        if not self._is_shared:
            self._is_shared = True
            self.table.share_memory_()

    def prepare_graph(self, storage: Storage, batch_size: int) -> Any:
        """See :class:`GraphCapturable`."""
        self.follow(storage)
        self._weigh()
        return self.stratified, self.weight_norm, self.reduction

    def _saved(self, table: Any) -> dict[str, Tensor]:
        return {name: getattr(table, name) for name in self._blank}

    def snapshot(self) -> dict[str, Any]:
        """See :class:`~rlbuf_td.samplers.common.RowSampler`."""
        self._weigh()
        settings = {name: getattr(self, name) for name in ("alpha", "beta", "stratified", "weight_norm", "reduction")}
        seen = {"max_capacity": self._max_capacity, "largest": float(self.largest_magnitude)}
        return settings | seen | {"priorities": self._saved(self.table)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: the state is of a smaller capacity or of another sampler; this one stays as it was.
        """
        capacity, tensors = int(state_dict["max_capacity"]), state_dict["priorities"]
        if capacity < self._max_capacity:
            raise ValueError(f"the saved sampler has max_capacity={capacity}, this one {self._max_capacity}")
        table = self.table if self._is_shared else self._make(capacity, self.device)
        _refuse_state(tensors, self._saved(table))
        alpha, beta = exponent("alpha", state_dict["alpha"]), exponent("beta", state_dict["beta"])
        settings = {n: state_dict.get(n, getattr(self, n)) for n in ("stratified", "weight_norm", "reduction")}
        _refuse_settings(**settings)
        largest = float(state_dict["largest"])
        if not largest < float("inf"):
            raise ValueError(f"the saved sampler has seen a largest magnitude of {largest}, which is no number")
        self.table, self._max_capacity = table, capacity  # a storage of several lanes may have rounded it up
        for name, value in settings.items():
            setattr(self, name, value)
        self.settings[ALPHA], self.settings[BETA], self.settings[WEIGHED] = alpha, beta, alpha
        self._see(largest)
        self._restore({name: tensor.to(self.device) for name, tensor in tensors.items()})

    def resized_state(self, state: dict[str, Any], rows: Tensor | None, capacity: int, moved: bool) -> dict[str, Any]:
        """See :class:`~rlbuf_td.samplers.common.RowSampler`."""
        capacity, saved = max(capacity, self._max_capacity), int(state["max_capacity"])
        if rows is None and saved >= capacity:
            return state
        _refuse_state(state["priorities"], self._saved(self._make(saved, "meta")))
        rows = torch.arange(saved, device="cpu") if rows is None else rows
        tensors = {}
        for name, like in self._saved(self._make(capacity, "meta")).items():
            tensors[name] = torch.full(like.shape, self._blank[name], dtype=like.dtype, device="cpu")
            tensors[name][: len(rows)] = state["priorities"][name].cpu()[rows]
        return state | {"max_capacity": capacity, "priorities": tensors}

    def __getstate__(self) -> dict[str, Any]:
        is_spawning = get_spawning_popen() is not None
        if is_spawning and not self._is_shared:
            name = type(self).__name__
            raise RuntimeError(f"a {name} cannot be sent to another process. Share the buffer first: rb.share()")
        return self.__dict__ | {"_rng": None, "_is_shared": is_spawning}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self.alpha:g}, beta={self.beta:g}, stratified={self.stratified}, "
            f"weight_norm={self.weight_norm!r}, max_capacity={self._max_capacity})"
        )


def _refuse_settings(stratified: Any, weight_norm: Any, reduction: Any) -> None:
    if not isinstance(stratified, bool):
        raise ValueError(f"stratified must be True or False, got {stratified!r}")
    if weight_norm not in ("buffer", "batch", None):
        raise ValueError(f"weight_norm must be 'buffer', 'batch' or None, got {weight_norm!r}")
    if reduction not in ("max", "min", "mean", "median"):
        raise ValueError(f"reduction must be 'max', 'min', 'mean' or 'median', got {reduction!r}")


def _refuse_state(tensors: Any, blank: dict[str, Tensor]) -> None:
    """Raise a ValueError if saved priorities differ from ``blank`` in name, dtype or shape, or are not finite."""
    if not isinstance(tensors, dict) or tensors.keys() != blank.keys():
        raise ValueError(f"the saved state is of another sampler: it must hold {', '.join(blank)}")
    for name, expected in blank.items():
        tensor = tensors[name]
        kinds = [(str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in (tensor, expected)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"the saved {name} is {kinds[0]}, expected {kinds[1]}")
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():  # NaN is the least and the largest
            raise ValueError(f"the saved {name} holds NaN or infinite values")
