"""Uniform replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import NestedKey
from torchrl.data.replay_buffers import Sampler, Storage

from rlbuf_td.kernels.dispatch import backend_of, compiled_form_of, machine_code
from rlbuf_td.kernels.distinct import append_distinct_, distinct_rows
from rlbuf_td.kernels.sum_tree import mask_of
from rlbuf_td.samplers.age import NO_RANGES, AgeLimit, count_of, of_limit, rows_in, set_consumer_version
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
        max_age: the largest age of a row that may be drawn, at least 0, in time steps of its lane (0: the newest), or
            in the unit of ``age_key``; ``None``: any age. The rows that are young enough are equally likely.
        age_key: the key of a stored number that increases over time, such as ``"policy_version"``, which TorchRL's
            collectors write if ``track_policy_version=True``. The age of a row is then :attr:`consumer_version` minus
            the row's number.
        replacement: if ``False``, create a :class:`MinibatchSampler` from the other arguments. TorchRL's
            ``RandomSampler`` similarly creates a ``SamplerWithoutReplacement``.

    Raises:
        RuntimeError: (when sampling) the buffer is empty, or all rows are too old.
        ValueError: ``max_age`` is negative, or is not given with ``age_key``; without ``age_key``, the buffer's writer
            does not write in time order; (when sampling) ``unique`` is set and the buffer has fewer rows than a batch,
            or ``max_age`` is in time steps and rows were written out of time order.
        SchemaError: (when sampling) rows do not have one number at ``age_key``.

    Cost: O(B); with ``unique=True`` O(B log B) on other devices than the CPU. With ``age_key``, also O(N) at the first
    draw after a write or a change of ``consumer_version``.

    ``UniformSampler(max_age=a, age_key=key)`` draws the same rows as TorchRL's
    ``StalenessAwareSampler(a, lambda staleness: 1 + 0 * staleness, key)``, with replacement.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(10), sampler=UniformSampler(unique=True), batch_size=4)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
        >>> rb.sample()["x"].sort().values
        tensor([0, 1, 2, 3])
    """

    state_keys = ("unique",)
    _shown: ClassVar = ("unique", "max_age", "age_key")
    requires_shared_state = False
    without_replacement: ClassVar[type[Sampler]]  # set in __init__.py, because samplers do not import each other

    def __init__(
        self,
        *,
        unique: bool = False,
        max_age: int | None = None,
        age_key: NestedKey | None = None,
        replacement: bool = True,
    ) -> None:
        self.unique, self.age_limit = unique, AgeLimit.of(max_age, age_key)
        self.needs_order = self.age_limit is not None and age_key is None

    max_age = property(of_limit("max_age"), doc="The largest age of a drawn row; ``None``: any age.")
    age_key = property(of_limit("age_key"), doc="The key of the number from which ages are computed; ``None``: time.")
    consumer_version = property(
        of_limit("consumer_version"),
        set_consumer_version,
        doc="The number from which ages are counted, with ``age_key``; ``None``: the largest stored number.",
    )

    def draw(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """See :class:`~rlbuf_td.samplers.row_sampler.RowSampler`."""
        rows = row_count(storage)
        if rows == 0:
            raise RuntimeError(EMPTY)
        device, generator, ranges = device_of(storage), self._rng, None
        if self.age_limit is not None:
            ranges = self.age_limit.ranges(storage)
            rows = count_of(ranges)
            if not rows:
                raise RuntimeError(self.age_limit.too_old())
        if self.unique:
            _refuse_more_than(rows, batch_size)
            number = self._distinct(rows, batch_size, device)
        else:
            source = device if generator is None else generator.device
            number = torch.randint(rows, (batch_size,), generator=generator, device=source)
            number = number if source == device else number.to(device)
        return (nth_rows(storage, number) if ranges is None else rows_in(ranges, number)), {}

    def probability(self, index: Any, *, storage: Storage) -> torch.Tensor:
        """Return each row's probability of being drawn, ``[B]`` float64."""
        flat = flat_rows(index, storage, device_of(storage))
        if self.age_limit is None:
            return torch.full(flat.shape, 1 / row_count(storage), dtype=torch.float64, device=flat.device)
        ranges = self.age_limit.ranges(storage)
        return mask_of(ranges, len(storage), flat.device)[flat].to(torch.float64) / max(count_of(ranges), 1)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether there are enough rows for a batch."""
        rows = row_count(storage) if self.age_limit is None else self.age_limit.count(storage)
        return rows >= (batch_size if self.unique else 1)

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

    def snapshot(self) -> dict[str, Any]:
        """See :class:`~rlbuf_td.samplers.common.StatefulSampler`."""
        limited = self.age_limit is not None and self.age_limit.age_key is not None
        return super().snapshot() | ({"consumer_version": self.consumer_version} if limited else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the settings. A state of TorchRL's ``RandomSampler`` is accepted, and changes nothing."""
        if self.age_limit is not None and "consumer_version" in state_dict:
            self.age_limit.consumer_version = state_dict["consumer_version"]
        self.unique = bool(state_dict.get("unique", self.unique))

    def dumps(self, path: str | Path) -> None:
        """Do nothing: ``unique``, ``max_age`` and ``age_key`` are constructor arguments.

        Set :attr:`consumer_version` again after a load.
        """

    loads = dumps


class _UniformDraw(BoundDraw):
    takes_fresh_rows = True

    def __init__(self, storage: PackedStorage, sampler: UniformSampler, size: int, reads: bool) -> None:
        from rlbuf_td.kernels.batch import cpu

        super().__init__(storage, sampler, size, reads)
        self.distinct = machine_code(cpu.gather_distinct)
        if sampler.age_limit is not None:
            self.within = machine_code(cpu.gather_within_ranges, ranges=NO_RANGES)

    def __call__(self, written: int, targets: int) -> bool:
        limit, has_holes = self.sampler.age_limit, self.storage.numbers.values[HOLES]
        if limit is not None:
            return self._draw_young(limit, targets)
        if self.sampler.unique:
            return not has_holes and self._draw_distinct(written, targets)
        self.flat.random_(0, written - has_holes, generator=self.generator)
        if has_holes:
            self.flat.copy_(nth_rows(self.storage, self.flat))
        self.kernel(self.address, targets)
        return True

    def _draw_young(self, limit: AgeLimit, targets: int) -> bool:
        """Draw rows that are not older than ``limit``; unique rows are left to torch."""
        ranges = limit.ranges(self.storage)
        count = count_of(ranges)
        if not count or self.sampler.unique or self.record["queue"][0]:
            return False
        self.flat.random_(0, count, generator=self.generator)
        self.within(self.address, targets, ranges)
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
