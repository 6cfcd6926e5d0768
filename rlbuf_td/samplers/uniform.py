"""Uniform replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torchrl.data.replay_buffers import Sampler, Storage

from rlbuf_td.kernels.device_scalars import DeviceScalars, is_capturing
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.distinct import distinct_rows
from rlbuf_td.samplers.signature import OwnSignature
from rlbuf_td.storages.indexing import Index, coordinates, device_of


class UniformSampler(Sampler):
    """Draw every row that has been written with equal probability.

    Args:
        unique: draw no row twice within a batch (the batch is then an ordered sample without replacement).

    Raises:
        RuntimeError: (when sampling) the buffer is empty.
        ValueError: (when sampling) ``unique``, and fewer rows than a batch has.

    Cost: O(B); ``unique=True`` O(B) too, and O(B log B) on CUDA, where the host does not look at what has been drawn.

    Randomness: the buffer's generator, else torch's default one. TorchRL's ``RandomSampler`` has no ``unique``; its
    ``SamplerWithoutReplacement`` repeats no row within an epoch: see :class:`MinibatchSampler` for that.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(10), sampler=UniformSampler(unique=True), batch_size=4)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
        >>> rb.sample()["x"].sort().values
        tensor([0, 1, 2, 3])
    """

    __signature__ = OwnSignature()

    def __init__(self, *, unique: bool = False) -> None:
        self.unique = unique
        self._live: DeviceScalars | None = None  # the rows that captured draws take from

    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw ``batch_size`` rows.

        Returns:
            The index as TorchRL gives it, ``[B]`` or a tuple of ``ndim`` tensors ``[B]``, and an empty dict.

        Raises:
            RuntimeError: the storage is empty.
            ValueError: ``unique`` and fewer rows than ``batch_size``.
        """
        flat, info = self.draw(storage, batch_size)
        return coordinates(flat, storage), info

    def draw(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draw ``batch_size`` flat rows, ``[B]`` int64 on the storage's device; otherwise as :meth:`sample`."""
        rows = len(storage)
        if rows == 0:
            raise RuntimeError("cannot sample from an empty buffer: extend it first")
        device = device_of(storage)
        live = self._live[0] if self._live is not None and is_capturing() else rows
        if self.unique:
            self._refuse_more_than(rows, batch_size)
            return self._distinct(live, batch_size, device), {}
        if isinstance(live, torch.Tensor):
            return (self._uniform(batch_size, device) * live).long(), {}
        source = self._source(device)
        flat = torch.randint(live, (batch_size,), generator=self._rng, device=source)
        return (flat if source == device else flat.to(device)), {}

    def _source(self, device: torch.device) -> torch.device:
        return device if self._rng is None else self._rng.device

    def _refuse_more_than(self, rows: int, batch_size: int) -> None:
        if batch_size > rows:
            raise ValueError(f"cannot draw {batch_size} distinct rows of {rows}: take a smaller batch or unique=False")

    def _uniform(self, batch_size: int, device: torch.device) -> torch.Tensor:
        source = self._source(device)
        return torch.rand(batch_size, dtype=torch.float64, generator=self._rng, device=source).to(device)

    def _distinct(self, rows: int | torch.Tensor, batch_size: int, device: torch.device) -> torch.Tensor:
        drawn = torch.empty(0, dtype=torch.int64, device=device)
        if isinstance(rows, torch.Tensor) or backend_of(drawn) != "numba" or self._source(device) != device:
            return distinct_rows(self._uniform(batch_size, device), rows)
        if 8 * batch_size > rows:
            return torch.randperm(rows, generator=self._rng)[:batch_size]
        # Rejection: of an endless sequence of draws the first mentions are an ordered sample without replacement.
        while drawn.shape[0] < batch_size:
            more = torch.randint(rows, (batch_size,), generator=self._rng)
            drawn = first_mentions(torch.cat((drawn, more)))
        return drawn[:batch_size]

    def prepare_replay(self, storage: Storage, batch_size: int) -> None:
        """Put where captured draws of ``batch_size`` rows read it what the host knows.

        Raises:
            ValueError: ``unique`` and fewer rows than ``batch_size``.
        """
        rows, device = len(storage), device_of(storage)
        if self.unique:
            self._refuse_more_than(rows, batch_size)
        if self._live is None or self._live.tensor.device != device:
            self._live = DeviceScalars(1, device)
        self._live.set_(0, rows)

    def replay_key(self) -> Any:
        """Return what captured draws go on with as it was: the setting, and where they read how many rows there are."""
        return self.unique, self._live

    def forget_order(self) -> None:
        """Do nothing: a replay changes nothing here."""

    def _empty(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        """Return the setting: there is no other state but the generator, which the buffer saves."""
        return {"unique": self.unique}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the setting."""
        self.unique = bool(state_dict.get("unique", self.unique))

    def resized_state(
        self, state: dict[str, Any], rows: torch.Tensor | None, capacity: int, moved: bool
    ) -> dict[str, Any]:
        """Return ``state``: it does not depend on rows."""
        return state

    def dumps(self, path: str | Path) -> None:
        """Write nothing: the setting is given to the constructor."""

    def loads(self, path: str | Path) -> None:
        """Read nothing: see :meth:`dumps`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(unique={self.unique})"


def first_mentions(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (1-D) without the repetitions, in order.

    Example:
        >>> first_mentions(torch.tensor([3, 1, 3, 2, 1]))
        tensor([3, 1, 2])
    """
    ordered, order = torch.sort(values, stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return values[order[first].sort().values]
