"""Uniform replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torchrl.data.replay_buffers import Sampler, Storage

from rlbuf_td.kernels.dispatch import backend_of, uses_triton
from rlbuf_td.kernels.draws import append_distinct_, distinct_rows
from rlbuf_td.samplers.common import EMPTY, refuse_never, setting, uniform_numbers
from rlbuf_td.samplers.row_sampler import RowSampler, drawn_into
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import State, optional, whole
from rlbuf_td.storages.indexing import (
    are_ragged,
    device_of,
    flat_rows,
    lanes_of,
    nth_rows,
    row_count,
)
from rlbuf_td.storages.ring import LiveRows
from rlbuf_td.storages.torchrl_parts import last_step


class Replaceable(type(Sampler)):
    """Metaclass: ``cls(replacement=False)`` creates an instance of
    ``cls.without_replacement``, as in TorchRL."""

    # set in __init__.py, because samplers do not import each other
    without_replacement: type[Sampler]

    def __call__(cls, *args: object, replacement: bool = True, **kwargs: object) -> Any:
        return (
            super().__call__(*args, **kwargs)
            if replacement
            else cls.without_replacement(*args, **kwargs)
        )


class UniformSampler(RowSampler, metaclass=Replaceable):
    """Draws every written row with equal probability.

    Args:
        unique: whether a batch's rows are distinct. To draw no row twice in an epoch,
            use :class:`MinibatchSampler`.
        max_age: the largest age of a row that may be drawn, at least 0, in time steps
            of its lane (0: the newest); ``None``: any age. The rows that are young
            enough are equally likely. For ages in versions of the policy, use TorchRL's
            ``StalenessAwareSampler``.
        replacement: if ``False``, create a :class:`MinibatchSampler` from the other
            arguments. TorchRL's ``RandomSampler`` similarly creates a
            ``SamplerWithoutReplacement``.

    Raises:
        RuntimeError: (when sampling) the buffer is empty.
        ValueError: ``max_age`` is negative, or is given and the buffer's writer does
            not write in time order; (when sampling) ``unique`` is set and fewer rows
            may be drawn than a batch has.

    Cost: O(B); with ``unique=True`` O(B log B) on other devices than the CPU.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(10), sampler=UniformSampler(unique=True), batch_size=4)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
        >>> rb.sample()["x"].sort().values
        tensor([0, 1, 2, 3])
    """

    state_keys = ("unique",)
    _shown: ClassVar = ("unique", "max_age")
    requires_shared_state = False
    unique: bool = setting(lambda _, value: bool(value))
    max_age: int | None = setting(optional(whole(0)), is_fixed=True)

    def __init__(
        self,
        *,
        unique: bool = False,
        max_age: int | None = None,
        replacement: bool = True,
    ) -> None:
        self.unique, self.max_age = unique, max_age
        self.needs_order = max_age is not None

    def launches(self, storage: PackedStorage) -> bool:
        """Whether a kernel draws rows on a GPU."""
        return not self.unique and self.max_age is None

    def draw(
        self, storage: Storage, batch_size: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See :class:`~rlbuf_td.samplers.row_sampler.RowSampler`."""
        is_plain = not self.unique and self.max_age is None
        device = device_of(storage)
        if is_plain and uses_triton(device):
            rows = row_count(storage)
            if not rows:
                raise RuntimeError(EMPTY)
            number = torch.empty(batch_size, dtype=torch.int64, device=device)
            from rlbuf_td.kernels.draws.triton import uniform_rows_

            uniform_rows_(number, rows, self._rng)
            return nth_rows(storage, number), {}
        # not on the device: some have no float64
        return drawn_into(self, storage, batch_size, torch.empty(0, device="cpu"))

    def draw_into(
        self,
        storage: Storage,
        live: LiveRows,
        flat: torch.Tensor,
        report: dict[str, torch.Tensor],
        scratch: torch.Tensor,
    ) -> None:
        """See :class:`~rlbuf_td.buffers.plan.CompiledPlan`."""
        rows = live.rows
        if self.max_age is not None:
            rows = self._drawable(storage)
        if not rows:
            raise RuntimeError(EMPTY)
        generator = self._rng
        if self.unique:
            _refuse_more_than(rows, flat.shape[0])
            _draw_distinct_(flat, rows, generator)
        elif generator is None or generator.device == flat.device:
            flat.random_(0, rows, generator=generator)
        else:
            source = torch.empty_like(flat, device=generator.device)
            flat.copy_(source.random_(0, rows, generator=generator))
        if self.max_age is not None:
            flat.copy_(_nth_young(storage, self.max_age, flat))
        elif not live.are_cells:
            flat.copy_(nth_rows(storage, flat))

    def _drawable(self, storage: Storage) -> int:
        return (
            row_count(storage)
            if self.max_age is None
            else young_count(storage, self.max_age)
        )

    def probability(self, index: object, *, storage: Storage) -> torch.Tensor:
        """Return each row's probability of being drawn, ``[B]`` float64."""
        flat = flat_rows(index, storage, device_of(storage))
        probability = torch.full(
            flat.shape,
            1 / self._drawable(storage),
            dtype=torch.float64,
            device=flat.device,
        )
        if self.max_age is not None:
            return probability * _is_young(storage, self.max_age, flat)
        return (
            probability * storage.ring.is_live(flat)
            if isinstance(storage, PackedStorage)
            else probability
        )

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether there are enough rows for a batch; raise a ValueError if there
        never will be."""
        if self.unique:
            refuse_never(batch_size, storage, "distinct rows", "unique=False")
        return self._drawable(storage) >= (batch_size if self.unique else 1)

    def load_state_dict(self, state_dict: State) -> None:
        """Restore the settings. A state of TorchRL's ``RandomSampler`` is accepted, and
        changes nothing."""
        self.unique = bool(state_dict.get("unique", self.unique))


def young_count(storage: Storage, max_age: int) -> int:
    """Return how many stored rows are young: at most ``max_age`` time steps of their
    lane old."""
    if hasattr(storage, "ring"):
        return int(storage.ring.count.clip(max=max_age + 1).sum())
    return (
        min(len(storage), (max_age + 1) * lanes_of(storage).numel())
        if len(storage)
        else 0
    )


def _nth_young(storage: Storage, max_age: int, number: torch.Tensor) -> torch.Tensor:
    """Return flat indices, ``[B]`` int64; ``number`` counts the young rows from 0
    on."""
    if are_ragged(storage):
        return storage.ring.newest_of(number, storage.ring.count.clip(max=max_age + 1))
    rows = len(storage)
    lanes = lanes_of(storage).numel()
    after_newest = (last_step(storage, rows // lanes) + 1) * lanes
    return (number + (after_newest - young_count(storage, max_age))) % rows


def _is_young(storage: Storage, max_age: int, flat: torch.Tensor) -> torch.Tensor:
    if hasattr(storage, "ring"):
        return (storage.ring.reach(flat)[1] <= max_age) & storage.ring.is_live(flat)
    steps = len(storage) // lanes_of(storage).numel()
    lanes = lanes_of(storage).numel()
    return (last_step(storage, steps) - flat // lanes) % steps <= max_age


def _refuse_more_than(rows: int, batch_size: int) -> None:
    if batch_size > rows:
        raise ValueError(
            f"cannot draw {batch_size} distinct rows of {rows}: use a smaller batch or unique=False"
        )


def _draw_distinct_(
    drawn: torch.Tensor, rows: int, generator: torch.Generator | None
) -> None:
    """Fill ``drawn`` with distinct numbers below ``rows``."""
    size = drawn.shape[0]
    is_theirs = generator is not None and generator.device != drawn.device
    if is_theirs or backend_of(drawn) != "numba":
        uniform = uniform_numbers(size, generator, drawn.device)
        drawn.copy_(distinct_rows(uniform, rows))
        return
    kept = 0
    for numbers in _candidates(rows, size, generator):
        kept = append_distinct_(drawn, kept, numbers)
        if kept == size:
            break


def _candidates(
    rows: int, batch_size: int, generator: torch.Generator | None
) -> Iterator[torch.Tensor]:
    """Yield ``[B]`` rows until they have B distinct ones; the first B of these are a
    sample without replacement."""
    if 8 * batch_size > rows:
        yield torch.randperm(rows, generator=generator, device="cpu")[:batch_size]
    while True:
        yield torch.randint(rows, (batch_size,), generator=generator, device="cpu")
