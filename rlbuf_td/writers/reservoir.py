"""A writer that keeps a uniform sample of all time steps ever written."""

from __future__ import annotations

import json
from math import expm1, log, log1p
from pathlib import Path
from struct import pack, unpack
from typing import Any, NamedTuple

import torch
from tensordict import is_tensor_collection
from torchrl.data.replay_buffers import Storage, Writer

from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.indexing import lanes_of
from rlbuf_td.storages.interrupts import held_back
from rlbuf_td.storages.schema import reshaped
from rlbuf_td.storages.shared.memory import SharedNumbers
from rlbuf_td.writers.common import length_of, part_of, without_index

_FILE = "reservoir.json"
_LEAST, _MOST = 2.0**-54, 1 << 62  # least uniform number u, so that log(1 - u) < 0; most skipped time steps


class Choice(NamedTuple):
    """The time steps of a write that are kept, and the state of the algorithm after the write."""

    filled: int  # number of time steps at the beginning of the write that fill free slots
    slots: dict[int, int]  # slot -> position in the write, for later time steps, which replace stored ones
    kept: list[tuple[int, int]]  # (position, slot) of later time steps, also of those that a still later one replaces
    following: int  # the next time step to keep, counted from the first time step ever written
    log_threshold: float


class ReservoirWriter(Writer):
    r"""Keeps a uniform sample of all time steps ever written: each is in the buffer with the same probability.

    The first T time steps fill the buffer. Once N have been written in total, each of them is stored with probability
    ``T / N``, and every set of T of them is equally likely. With ``ndim=2`` a time step is stored or dropped with all
    its lanes. Rows are not in time order: :class:`HindsightSampler`, :class:`NStepSampler`, :class:`SequenceSampler`
    and ``rb.last`` need a :class:`RingWriter`. A transition must store its own ``"next"`` if it is needed.

    ``add`` and ``extend`` return the index -1 for dropped time steps; priority updates skip this index.
    :attr:`ReplayBuffer.write_count` counts all time steps, stored or not.

    Raises:
        SchemaError: (on writing) the data does not match the rows, even if it would be dropped; nothing has changed.
        ValueError: (on writing) there is nothing to write; (in a buffer) the sampler needs rows in time order.

    Cost: O(1 + stored rows) per write. In total, O(T log(N / T)) of N time steps are stored. Random numbers are drawn
    for stored time steps only, from the buffer's generator, else torch's default one.

    Source: Vitter: Random Sampling with a Reservoir, 1985; algorithm L: Li, Reservoir-Sampling Algorithms of Time
    Complexity O(n(1 + log(N/n))), 1994. Used for average policies (NFSP, Heinrich and Silver 2016) and distillation.
    TorchRL has no such writer.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(100), writer=ReservoirWriter(), batch_size=4)
        >>> index = rb.extend(TensorDict({"x": torch.arange(10_000)}, [10_000]))
        >>> len(rb), rb.write_count, bool((index[100:] == -1).any())
        (100, 10000, True)
    """

    keeps_order = False

    def __init__(self) -> None:
        super().__init__(compilable=False)
        # The number of time steps written, the next one to keep, and the bits of the float64 ``log_threshold``.
        self.numbers = SharedNumbers("q", [0, 0, 0])
        self._write_count_value, self._following_value, self._threshold_value = self.numbers.counters()

    @property
    def _write_count(self) -> int:
        return self._write_count_value.value

    @_write_count.setter
    def _write_count(self, count: int) -> None:
        self._write_count_value.value = count

    def register_storage(self, storage: Storage) -> None:
        """Write into ``storage`` from now on; the write count begins with the time steps that it already holds.

        Raises:
            ValueError: the writer belongs to another storage.
        """
        if self._storage not in (None, storage):
            raise ValueError("this writer writes to the storage of another buffer: use one writer per buffer")
        super().register_storage(storage)
        if not self._write_count and len(storage):
            self._write_count = len(storage) // lanes_of(storage).numel()

    def share_memory_(self) -> None:
        """Share the counters with processes that are later forked, or spawned with this writer."""
        self.numbers.share_memory_()

    # -- the choice of time steps

    def choose(self, count: int, steps: int) -> Choice:
        """Decide which of the next ``count`` time steps a reservoir of ``steps`` keeps, without changing its state."""
        written, following, bits = self.numbers
        (log_threshold,) = unpack("d", pack("q", bits))
        filled = max(0, min(steps - written, count))
        kept: list[tuple[int, int]] = []
        end = written + count
        if end >= steps and not log_threshold:  # this write fills the reservoir: draw the first threshold
            log_threshold, following, _ = self._skip(steps, 0.0, max(steps, written) - 1)
        while end >= steps and following < end:
            at = following
            log_threshold, following, slot = self._skip(steps, log_threshold, at)
            kept.append((at - written, slot))
        return Choice(filled, {slot: at for at, slot in kept}, kept, following, log_threshold)

    def _skip(self, steps: int, log_threshold: float, at: int) -> tuple[float, int, int]:
        """Draw the next log threshold, the next time step after ``at`` to keep, and the slot of time step ``at``.

        Imagine a uniform random number for every time step. The threshold is the largest of the ``steps`` smallest
        numbers so far; a new time step is kept if its number is below the threshold.
        """
        source = "cpu" if self._rng is None else self._rng.device
        shrink, ahead, place = torch.rand(3, dtype=torch.float64, generator=self._rng, device=source).tolist()
        log_threshold += log1p(-max(shrink, _LEAST)) / steps
        skipped = log1p(-max(ahead, _LEAST)) / log(-expm1(log_threshold))
        return log_threshold, at + 1 + int(min(skipped, _MOST)), min(int(place * steps), steps - 1)

    def note(self, written: int, choice: Choice) -> None:
        """Update the state after the write of a choice; ``written``: the number of time steps written in total."""
        (bits,) = unpack("q", pack("d", choice.log_threshold))
        for place, value in enumerate((written, choice.following, bits)):
            self.numbers[place] = value

    # -- writes

    def add(self, data: Any) -> int | torch.Tensor:
        """Write one time step (``[]``, or ``[*lanes]`` when ``ndim > 1``); return its index, -1 if it is not stored.

        Raises:
            SchemaError: the data does not match the rows; nothing has changed.
        """
        index = self.extend(data.unsqueeze(0))
        return int(index) if self._storage.ndim == 1 else index

    @held_back
    def extend(self, data: Any) -> torch.Tensor:
        """Write ``[n, *lanes]`` time steps; return their index, ``[n]`` or ``[n * lanes, ndim]``.

        The index is -1 for dropped time steps. If several time steps get the same slot, the last one is stored.

        Raises:
            ValueError: there is nothing to write.
            SchemaError: the data does not match the rows; nothing has changed.
        """
        storage = self._storage
        if isinstance(data, list) and isinstance(storage, PackedStorage) and all(map(is_tensor_collection, data)):
            data = torch.stack(data) if data else data
        count = length_of(data)
        if count == 0:
            raise ValueError("extend needs at least one transition, got none")
        if isinstance(storage, PackedStorage) and storage.rows is not None and not storage.is_reserved:
            storage.rows.layout.collect(data, data.batch_size[:1] + storage.rows.lanes)  # refuses what does not fit
        choice = self.choose(count, storage._max_size_along_dim0(batched_data=data))
        written = self._write_count
        index = torch.full((count,), -1, dtype=torch.int64, device=getattr(data, "device", None) or "cpu")
        if choice.filled:
            index[: choice.filled] = torch.arange(written, written + choice.filled, device=index.device)
            self._write(written, data, choice.filled)
        if choice.slots:
            slots, rows = torch.tensor([[*choice.slots], [*choice.slots.values()]], device="cpu")
            storage.set(slots, self._rows(without_index(data), rows))
            for position, slot in choice.kept:
                index[position] = slot
        self.note(written + count, choice)
        self._announce(written, choice)
        return index if storage.ndim == 1 else self._replicate(index)

    def _write(self, start: int, data: Any, count: int) -> None:
        storage, part = self._storage, part_of(data, 0, count)
        if isinstance(storage, PackedStorage):
            storage.write(start, part)
        else:
            storage.set(torch.arange(start, start + count, device="cpu"), without_index(part))

    def _rows(self, data: Any, rows: torch.Tensor) -> Any:
        if isinstance(self._storage, PackedStorage):
            return reshaped(data, lambda each: each[rows.to(each.device)])
        return [data[row] for row in rows.tolist()] if isinstance(data, list) else data[rows]

    def _replicate(self, index: torch.Tensor) -> torch.Tensor:
        every = self._replicate_index(index)
        return torch.where(every[:, :1] < 0, -1, every)

    def _announce(self, written: int, choice: Choice) -> None:
        shared_rows = getattr(self._storage, "shared_rows", None)
        if shared_rows is not None:
            shared_rows.journal.written()
        filled = torch.arange(written, written + choice.filled, device="cpu")
        slots = torch.cat((filled, torch.tensor([*choice.slots], dtype=torch.int64, device="cpu")))
        if len(slots):
            index = self._replicate_index(slots)
            for listener in self._storage._attached_entities:
                listener.mark_update(index)

    # -- state

    def _empty(self, empty_write_count: bool = True) -> None:
        """Restart the sample and the write count, for either value of ``empty_write_count``."""
        for place in range(len(self.numbers)):
            self.numbers[place] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counters; the buffer saves the generator."""
        count, following, threshold = self.numbers
        return {"_write_count": count, "following": following, "threshold": threshold}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`; ValueError for any other state."""
        values = [state_dict[name] for name in ("_write_count", "following", "threshold")]
        are_whole = all(type(value) is int and abs(value) < 1 << 63 for value in values)
        if not are_whole or not unpack("d", pack("q", values[2]))[0] <= 0:
            raise ValueError(f"the state is not that of a ReservoirWriter: {state_dict}")
        for place, value in enumerate(values):
            self.numbers[place] = value

    def dumps(self, path: str | Path) -> None:
        """Save the counters in the folder ``path``."""
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / _FILE).write_text(json.dumps(self.state_dict()))

    def loads(self, path: str | Path) -> None:
        """Restore a state that :meth:`dumps` saved."""
        self.load_state_dict(json.loads((Path(path) / _FILE).read_text()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(write_count={self._write_count})"
