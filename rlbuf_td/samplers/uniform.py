"""Uniform replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torchrl.data.replay_buffers import Sampler, Storage

from rlbuf_td.kernels.dispatch import backend_of, compiled_form_of, machine_code
from rlbuf_td.kernels.distinct import append_distinct_, distinct_rows
from rlbuf_td.samplers.bound import BoundDraw
from rlbuf_td.samplers.common import EMPTY, uniform_numbers
from rlbuf_td.samplers.row_sampler import RowSampler
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.indexing import device_of, flat_rows
from rlbuf_td.storages.lane_heads import HOLES, nth_rows, row_count


class Replaceable(type(Sampler)):  # type: ignore[misc]
    """Metaclass: ``cls(replacement=False)`` creates an instance of ``cls.without_replacement``, as in TorchRL."""

    def __call__(cls, *args: Any, replacement: bool = True, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) if replacement else cls.without_replacement(*args, **kwargs)


class UniformSampler(RowSampler, metaclass=Replaceable):
    """Draws every written row with equal probability.

    Args:
        unique: whether a batch's rows are distinct. To draw no row twice in an epoch, use :class:`MinibatchSampler`.
        replacement: if ``False``, create a :class:`MinibatchSampler` from the other arguments. TorchRL's
            ``RandomSampler`` similarly creates a ``SamplerWithoutReplacement``.

    Raises:
        RuntimeError: (when sampling) the buffer is empty.
        ValueError: (when sampling) ``unique`` is set and the buffer has fewer rows than a batch.

    Cost: O(B); with ``unique=True`` O(B log B) on other devices than the CPU.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(10), sampler=UniformSampler(unique=True), batch_size=4)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
        >>> rb.sample()["x"].sort().values
        tensor([0, 1, 2, 3])
    """

    _shown = state_keys = ("unique",)
    requires_shared_state = False
    without_replacement: ClassVar[type[Sampler]]  # set in __init__.py, because samplers do not import each other

    def __init__(self, *, unique: bool = False, replacement: bool = True) -> None:
        self.unique = unique

    def draw(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """See :class:`~rlbuf_td.samplers.row_sampler.RowSampler`."""
        rows = row_count(storage)
        if rows == 0:
            raise RuntimeError(EMPTY)
        device, generator = device_of(storage), self._rng
        if self.unique:
            _refuse_more_than(rows, batch_size)
            return nth_rows(storage, self._distinct(rows, batch_size, device)), {}
        source = device if generator is None else generator.device
        number = torch.randint(rows, (batch_size,), generator=generator, device=source)
        return nth_rows(storage, number if source == device else number.to(device)), {}

    def probability(self, index: Any, *, storage: Storage) -> torch.Tensor:
        """Return each row's probability of being drawn, ``[B]`` float64."""
        flat = flat_rows(index, storage, device_of(storage))
        return torch.full(flat.shape, 1 / row_count(storage), dtype=torch.float64, device=flat.device)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether there are enough rows for a batch."""
        return row_count(storage) >= (batch_size if self.unique else 1)

    @compiled_form_of("draw", "_distinct")
    def bind_draw(self, storage: PackedStorage, size: int, *, reads: bool) -> BoundDraw:
        """See :mod:`rlbuf_td.samplers.bound`."""
        return _UniformDraw(storage, self, size, reads)

    def _distinct(self, rows: int, batch_size: int, device: torch.device) -> torch.Tensor:
        generator, drawn = self._rng, torch.empty(batch_size, dtype=torch.int64, device=device)
        is_on_host = backend_of(drawn) == "numba" and (generator is None or generator.device == device)
        if not is_on_host:
            return distinct_rows(uniform_numbers(batch_size, generator, device), rows)
        kept = 0
        for rows_drawn in _candidates(rows, batch_size, generator):
            kept = append_distinct_(drawn, kept, rows_drawn)
            if kept == batch_size:
                break
        return drawn

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore ``unique``. A state of TorchRL's ``RandomSampler`` is accepted, and changes nothing."""
        self.unique = bool(state_dict.get("unique", self.unique))

    def dumps(self, path: str | Path) -> None:
        """Do nothing: the only setting, ``unique``, is a constructor argument."""

    loads = dumps


class _UniformDraw(BoundDraw):
    takes_fresh_rows = True

    def __init__(self, storage: PackedStorage, sampler: UniformSampler, size: int, reads: bool) -> None:
        from rlbuf_td.kernels.batch import cpu

        super().__init__(storage, sampler, size, reads)
        self.distinct = machine_code(cpu.gather_distinct, 0, 0, 0, 0)

    def __call__(self, written: int, targets: int) -> bool:
        has_holes = self.storage.numbers.values[HOLES]
        if self.sampler.unique:
            return not has_holes and self._draw_distinct(written, targets)
        self.flat.random_(0, written - has_holes, generator=self.generator)
        if has_holes:
            self.flat.copy_(nth_rows(self.storage, self.flat))
        self.kernel(self.address, targets)
        return True

    def _draw_distinct(self, written: int, targets: int) -> bool:
        if self.record["queue"][0]:
            return False  # fresh rows could repeat unique ones
        _refuse_more_than(written, self.size)
        kept = 0
        for rows_drawn in _candidates(written, self.size, self.generator):
            kept = self.distinct(self.address, targets, kept, rows_drawn.data_ptr())
            if kept == self.size:
                break
        return True


def _refuse_more_than(rows: int, batch_size: int) -> None:
    if batch_size > rows:
        raise ValueError(f"cannot draw {batch_size} distinct rows of {rows}: use a smaller batch or unique=False")


def _candidates(rows: int, batch_size: int, generator: torch.Generator | None) -> Iterator[torch.Tensor]:
    """Yield ``[B]`` rows until they have B distinct ones; the first B of these are a sample without replacement."""
    if 8 * batch_size > rows:
        yield torch.randperm(rows, generator=generator, device="cpu")[:batch_size]
    while True:
        yield torch.randint(rows, (batch_size,), generator=generator, device="cpu")
