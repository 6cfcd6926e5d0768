"""A writer that keeps a uniform sample of all time steps ever written."""

from __future__ import annotations

from math import expm1, inf, log, log1p, prod
from struct import pack, unpack
from typing import TYPE_CHECKING, NamedTuple

import torch
from torchrl.data.replay_buffers import Storage

from rlbuf_td.storages import torchrl_parts
from rlbuf_td.storages.checks import State, state_of
from rlbuf_td.storages.listeners import Recovers
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.numbers import SharedNumbers
from rlbuf_td.storages.schema import reshaped
from rlbuf_td.storages.writes import Write, stacked
from rlbuf_td.writers.common import PackedWriter, without_index

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from rlbuf_td.storages import PackedStorage

_STATE = "_write_count", "following", "threshold"
# least uniform number u, so that log(1 - u) < 0; most skipped time steps
_LEAST, _MOST = 2.0**-54, 1 << 62


class Choice(NamedTuple):
    """Which time steps of a write are stored, and the state of the algorithm after the
    write."""

    # number of time steps, from the start of the write, that fill free slots
    filled: int
    #: (position in the write, in the storage) of steps that replace others, also of
    # those that do not stay
    kept: list[tuple[int, int]]
    # the numbers of the writer after the write
    state: tuple[int, int, int]


class ReservoirWriter(PackedWriter, Recovers):
    r"""Keeps a uniform sample of all time steps ever written: each is in the buffer
    with the same probability.

    The first T time steps fill the buffer. After N time steps in total, each one is
    stored with probability ``T / N``, and every set of T time steps is equally likely.
    With ``ndim=2``, all lanes of a time step are stored or dropped together. The stored
    rows are not in time order: :class:`HindsightSampler`, :class:`NStepSampler`,
    :class:`SequenceSampler` and ``rb.last`` need a :class:`RingWriter`, also in a later
    buffer over these rows. Store ``"next"`` with each transition, because the following
    row is not the following time step.

    In a full buffer, a write edits stored rows: new data takes the place, the serial
    and the stamp (``"sampled_at"``) of the row that it replaces, and gets the priority
    of new rows. A batch that was drawn before counts as one of the new data: updates of
    its priorities, and ``rb.write_back``, change the row that is there now. A process
    that is killed during such a write may leave these rows half written.

    ``add`` and ``extend`` return the index -1 for dropped time steps; priority updates
    skip this index. :attr:`ReplayBuffer.write_count` also counts dropped rows.

    Raises:
        TypeError: (on making a buffer) the storage is no :class:`PackedStorage`.
        SchemaError: (on writing) the data does not match the stored rows; nothing has
            changed.
        ValueError: (on writing) the data is empty; (on making a buffer) the sampler
            needs rows in time order, or another buffer over the storage has a
            :class:`ReservoirWriter` of its own.

    Cost: to write n time steps, O(n) for the index, and a copy of the stored time
    steps. Of N time steps in total, an expected O(T (1 + log(N / T))) are written to
    the storage. The writer draws random numbers when the storage becomes full, and for
    each time step that replaces another. The numbers come from the buffer's generator
    or, without one, from torch's default generator.

    Source: Vitter: Random Sampling with a Reservoir, 1985; algorithm L: Li,
    Reservoir-Sampling Algorithms of Time Complexity O(n(1 + log(N/n))), 1994. Used for
    average policies (NFSP, Heinrich and Silver 2016) and distillation. TorchRL has no
    reservoir writer.

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
        # Number of rows written, that of the first row of the next time step to store,
        # and the bits of the float64 ``log_threshold``.
        self.numbers = SharedNumbers("q", [0, 0, 0])

    @property
    def _write_count(self) -> int:
        """The number of rows written, dropped ones included."""
        return self.numbers[0]

    @_write_count.setter
    def _write_count(self, count: int) -> None:
        self.numbers[0] = count

    def share_memory_(self) -> None:
        """Share the counts with processes that are forked later, or spawned with this
        writer as an argument."""
        self.numbers.share_memory_()

    def register_storage(self, storage: Storage) -> None:
        """Set the storage to write to; ValueError if the writer already has another
        storage, or the storage another :class:`ReservoirWriter`, which counts the rows.

        If the writer's write count is lower than the number of rows in the storage, it
        is raised to that number. If it is higher and the storage is not full, it is
        lowered to that number.
        """
        self.refuse_others(storage)
        super().register_storage(storage)
        self._match_storage()

    def refuse_others(self, storage: Storage, buffer: object = None) -> None:
        """Raise a ValueError if another buffer over the storage than ``buffer`` has a
        :class:`ReservoirWriter` of its own."""
        for listener in torchrl_parts.listeners_of(storage):
            if listener is buffer:
                continue
            other = getattr(listener, "_writer", None)
            if isinstance(other, ReservoirWriter) and other is not self:
                raise ValueError(
                    "another ReservoirWriter counts the rows of this storage, and one count makes them equally likely: "
                    "give both buffers the same one, writer=rb.writer"
                )

    def _match_storage(self) -> None:
        """Correct the write count if the storage has other rows than this writer wrote;
        a new sample then starts."""
        storage = self._storage
        rows = storage.ring.longest * storage.ring.lanes
        if self._write_count < rows or (
            self._write_count > rows and not torchrl_parts.is_full(storage)
        ):
            self.numbers.set((rows, 0, 0))

    def choose(self, count: int, steps: int, lanes: int = 1) -> Choice:
        """Choose which of the next ``count`` time steps of ``lanes`` rows to store in a
        storage of ``steps`` time steps."""
        written, following, bits = self.numbers
        written, following = written // lanes, following // lanes
        (log_threshold,) = unpack("d", pack("q", bits))
        filled = max(0, min(steps - written, count))
        kept: list[tuple[int, int]] = []
        end = written + count
        # this write fills the storage: draw the first threshold
        if end >= steps and not log_threshold:
            log_threshold, following, _ = self._skip(
                steps, 0.0, max(steps, written) - 1
            )
        while end >= steps and following < end:
            step = following
            log_threshold, following, slot = self._skip(steps, log_threshold, step)
            kept.append((step - written, slot))
        (bits,) = unpack("q", pack("d", log_threshold))
        first = min(following * lanes, (1 << 63) - 1)
        return Choice(filled, kept, (end * lanes, first, bits))

    def _skip(
        self, steps: int, log_threshold: float, step: int
    ) -> tuple[float, int, int]:
        """Return a new ``log_threshold``, the next time step to store after ``step``, and
        a random storage position."""
        # Each time step gets a uniform random number; the smallest are stored; the
        # largest of these is the threshold.
        source = "cpu" if self._rng is None else self._rng.device
        shrink, ahead, slot = torch.rand(
            3, dtype=torch.float64, generator=self._rng, device=source
        ).tolist()
        log_threshold += log1p(-max(shrink, _LEAST)) / steps
        skipped = log1p(-max(ahead, _LEAST)) / log(-expm1(log_threshold))
        return (
            log_threshold,
            step + 1 + int(min(skipped, _MOST)),
            min(int(slot * steps), steps - 1),
        )

    def recover(self, storage: PackedStorage, new: torch.Tensor) -> None:
        """See :class:`~rlbuf_td.storages.listeners.Recovers`."""
        self._match_storage()

    def add(self, data: TensorDictBase) -> int | torch.Tensor:  # pyrefly: ignore [bad-override]
        """Write one time step, ``[]`` or, if ``ndim > 1``, ``[*lanes]``; return its
        index, -1 if it is dropped."""
        index = self.extend(data.unsqueeze(0))
        return int(index) if self._storage.ndim == 1 else index

    def extend(self, data: object) -> torch.Tensor:
        """Write ``[n, *lanes]`` time steps; return their index, ``[n]`` or
        ``[n * lanes, ndim]``.

        The index is -1 for dropped time steps. If several time steps have the same
        index, the last one is stored.
        """
        storage, data = self._storage, stacked(data)
        count = len(data)
        if count == 0:
            raise ValueError("extend needs at least one transition, got none")
        if storage.rows is not None and not storage.is_reserved:
            data = storage.as_rows(data, storage.ndim)
            # raises SchemaError
            storage.rows.layout.collect(data, data.batch_size[:1] + storage.rows.lanes)
        self._match_storage()
        lanes = prod(data.shape[1 : storage.ndim])
        choice = self.choose(
            count, torchrl_parts.capacity_in_steps(storage, batched_data=data), lanes
        )
        written = self._write_count // lanes
        index = torch.full(
            (count,),
            -1,
            dtype=torch.int64,
            device=getattr(data, "device", None) or "cpu",
        )
        if choice.filled:
            index[: choice.filled] = torch.arange(
                written, written + choice.filled, device="cpu"
            )
            storage.advance(Write(data[: choice.filled]))
            # if it does not come to this, `_match_storage` will do it
            self.numbers[0] = (written + choice.filled) * lanes
        if choice.kept:
            newest = {slot: position for position, slot in choice.kept}
            slots, rows = torch.tensor([[*newest], [*newest.values()]], device="cpu")
            kept = reshaped(
                without_index(data), lambda leaf: leaf[rows.to(leaf.device)]
            )
            with storage.lock, defer_sigint:
                storage.set(slots, kept, set_cursor=False)
                self._count(choice, written + choice.filled, lanes)
                replaced = self._replicate_index(slots)
                for listener in torchrl_parts.listeners_of(storage):
                    listener.mark_update(replaced)
            for position, slot in choice.kept:
                index[position] = slot
        else:
            with storage.lock, defer_sigint:
                self._count(choice, written + choice.filled, lanes)
        if storage.ndim > 1:
            index = self._replicate_index(index)
            index = torch.where(index[:, :1] < 0, -1, index)
        return index

    def _count(self, choice: Choice, filled: int, lanes: int) -> None:
        """Count the time steps of a write after the first ``filled`` ones, which have been
        appended."""
        self._storage.ring.count_edits(choice.state[0] - filled * lanes)
        self.numbers.set(choice.state)

    def _empty(self, empty_write_count: bool = True) -> None:
        # even without ``empty_write_count``, because a new sample starts
        self.numbers.set((0, 0, 0))

    def state_dict(self) -> State:
        """Return the counters. The buffer saves the random generator."""
        return dict(zip(_STATE, self.numbers, strict=True))

    def load_state_dict(self, state_dict: State) -> None:
        """Restore a state that :meth:`state_dict` returned; ValueError if the state is
        not valid."""
        with state_of(self):
            values = [state_dict[name] for name in _STATE]
        are_whole = all(type(value) is int and abs(value) < 1 << 63 for value in values)
        written, following, bits = values if are_whole else (-1, 0, 0)
        threshold = unpack("d", pack("q", bits))[0]
        # Before the storage is full, no time step is chosen; later, the next one is
        # chosen ahead.
        is_chosen = following == 0 if threshold == 0 else following >= written
        if written < 0 or not (-inf < threshold <= 0 and is_chosen):
            raise ValueError(
                f"the state is not that of a ReservoirWriter: {state_dict}"
            )
        self.numbers.set(values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(write_count={self._write_count})"
