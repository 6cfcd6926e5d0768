"""Epochs of minibatches for on-policy learning."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor
from torchrl.data.replay_buffers import SamplerWithoutReplacement, Storage

from rlbuf_td.kernels.host_memory import alias_of
from rlbuf_td.samplers.common import (
    EMPTY,
    OneStorage,
    permutation,
    refuse_fake,
    refuse_never,
    setting,
)
from rlbuf_td.samplers.row_sampler import RowSampler
from rlbuf_td.storages.checks import State, state_of, whole
from rlbuf_td.storages.indexing import device_of, nth_rows, row_count
from rlbuf_td.storages.lock import defer_sigint


class MinibatchSampler(RowSampler, SamplerWithoutReplacement):
    """Draws every row exactly once per epoch, for a number of epochs, in minibatches.

    ``for batch in rb`` ends after the last batch of the last epoch. Any write restarts
    with the first epoch, also one through another buffer over the rows, or in another
    process that shares them. TorchRL's ``SamplerWithoutReplacement`` draws the same rows
    for the same seed, but does not restart after a write to a full buffer, because the
    number of rows stays the same.

    Args:
        epochs: the number of passes over all rows, at least 1; may be set at any time.
        shuffle: whether each epoch has a new random order. If False, rows are drawn in
            storage order, which in a full ring does not begin with the oldest row.
        drop_last: whether to drop the last rows of an epoch if they do not fill a
            batch.

    Raises:
        ValueError: ``epochs`` is not a positive whole number; (when sampling) another
            buffer uses the sampler, the batch size is below 1, or the buffer has fewer
            rows than a batch and ``drop_last`` is set.
        RuntimeError: (when sampling) the buffer is empty.

    Cost: O(B) per batch, and one permutation per epoch.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(5), sampler=MinibatchSampler(2, shuffle=False), batch_size=2)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(5)}, [5]))
        >>> [batch["x"].tolist() for batch in rb]
        [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4]]
    """

    epochs: int = setting(whole(1))
    shuffle: bool = setting(lambda _, value: bool(value))
    # all rows in the order of this epoch; None: not drawn yet
    _order: Tensor | None = None
    _position = 0
    # of the rows of this epoch, see :attr:`Ring.publication`; None: of the next draw
    _publication: int | None = None
    _shown = ("epochs", "shuffle", "drop_last", "epoch")

    def __init__(
        self, epochs: int = 1, *, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        super().__init__(drop_last=drop_last, shuffle=shuffle)
        self.epochs = epochs
        self.len_storage: int = 0
        self._epoch = 0
        self._in_pass = False  # inside a `for` loop over a buffer
        self._resumes = False  # the loaded state was saved inside such a loop
        self._serves = OneStorage()

    epoch = property(
        attrgetter("_epoch"),
        doc="The number of finished epochs, ``0 <= epoch < epochs``.",
    )
    position = property(
        attrgetter("_position"), doc="How many rows of this epoch have been drawn."
    )

    def _is_outdated(self, storage: Storage | None) -> bool:
        """Return whether rows were written since the epochs began; only the rows of a
        :class:`PackedStorage` tell."""
        known = self._publication
        return known is not None and known != _publication_of(storage)

    def restart(self) -> None:
        """Restart with the first epoch, in a new random order if ``shuffle`` is set."""
        self._publication = None
        if self._position:
            self._order, self._position = None, 0
        self._epoch = 0
        self._resumes = self.ran_out = False
        # unknown before the first draw
        self._remaining_batches = torch.iinfo(torch.int64).max

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether there are enough rows for a batch; raise a ValueError if there
        never will be."""
        if self.drop_last:
            refuse_never(batch_size, storage, "rows at once", "drop_last=False")
        return super().can_sample(storage, batch_size)

    def draw(
        self, storage: Storage, batch_size: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See :class:`~rlbuf_td.samplers.row_sampler.RowSampler`."""
        return nth_rows(
            storage, self.draw_numbers(storage, row_count(storage), batch_size)
        ), {}

    def draw_numbers(
        self, storage: Storage, count: int, batch_size: int, things: str = "rows"
    ) -> Tensor:
        """Draw the next ``batch_size`` of the numbers ``0 .. count - 1``, each once per
        epoch.

        These are the numbers of all rows, or of what a wrapper divides them into; an
        error calls them ``things``.
        """
        if count == 0:
            raise RuntimeError(EMPTY)
        if batch_size < 1:
            raise ValueError(
                f"batch_size must be at least 1, got {batch_size}: epochs of empty batches never end"
            )
        if self.drop_last and count < batch_size:
            raise ValueError(
                f"drop_last leaves no batch: {count} {things} are fewer than the batch size {batch_size}"
            )
        self._serves.claim(storage)
        if self._is_outdated(storage):
            self.restart()
        order = self._order
        if order is None or count != self.len_storage or not order.is_cpu:
            order = self._order_of(storage, count)
        self._publication = _publication_of(storage)
        start = self._position
        per_epoch = count // batch_size if self.drop_last else -(-count // batch_size)
        stop = min(start + batch_size, count)
        numbers = order[start:stop].clone()
        refuse_fake(numbers)
        following = order
        position = stop
        epoch = self._epoch
        ends = stop == count or (self.drop_last and count - stop < batch_size)
        if ends:
            # Draw the next order now: the generator then has the same state as with
            # TorchRL's class.
            following = self._new_order(count, storage)
            position = 0
            epoch = (epoch + 1) % self.epochs
        ran_out = ends and epoch == 0
        drawn = epoch * per_epoch - (-position // batch_size)
        # TorchRL's prefetching threads do not draw beyond this number of batches.
        remaining = 0 if ran_out else self.epochs * per_epoch - drawn
        # in one statement: an interrupted draw has not begun, or is over
        (
            self._order,
            self._position,
            self._epoch,
            self._ran_out,
            self._remaining_batches,
        ) = (
            following,
            position,
            epoch,
            ran_out,
            remaining,
        )
        return numbers

    def _order_of(self, storage: Storage, count: int) -> Tensor:
        """Return the numbers ``0 .. count - 1`` in the order of the current epoch, on
        the storage's device."""
        if count != self.len_storage:
            self.restart()
            self._order, self.len_storage = None, count
        if self._order is None:
            self._order = self._new_order(count, storage)
        self._order = self._order.to(device_of(storage))  # a loaded order is on the CPU
        return self._order

    def _new_order(self, rows: int, storage: Storage) -> Tensor:
        """Return the numbers of all rows in the order of the next epoch, ``[rows]``
        int64."""
        device = device_of(storage)
        order = (
            permutation(rows, self._rng, device)
            if self.shuffle
            else torch.arange(rows, device=device)
        )
        refuse_fake(order)
        return order

    def settings_changed(self) -> None:
        """See :class:`~rlbuf_td.samplers.common.StatefulSampler`."""
        # no row of the order has been drawn, and ``shuffle`` may have changed
        if not self._position:
            self._order = None

    def add(self, index: object) -> None:
        """Restart the epochs, because the rows have changed."""
        self.restart()

    extend = add

    def _empty(self) -> None:
        self._serves.release()
        self.restart()
        self._order, self.len_storage = None, 0

    def __getstate__(self) -> dict[str, object]:
        # the rows of a copy, or in another process, count from another number
        return super().__getstate__() | {"_publication": None}

    def begin_pass(self) -> bool:
        """Begin a ``for`` loop over all epochs, or continue a restored one; return
        whether a batch is left to draw."""
        resumes, self._resumes, self._in_pass = self._resumes, False, True
        if not resumes:
            self.restart()
        return not self.ran_out

    def end_pass(self) -> None:
        """End a ``for`` loop over all epochs, whether it was finished or left early."""
        self._in_pass = False

    def snapshot(self) -> State:
        """Return the settings, the position in the epoch, and the epoch's order of rows
        (not copied)."""
        names = (
            "epochs",
            "shuffle",
            "drop_last",
            "epoch",
            "position",
            "len_storage",
            "ran_out",
        )
        order = None if self._order is None else alias_of(self._order)
        return {name: getattr(self, name) for name in names} | {
            "order": order,
            "in_pass": self._in_pass,
        }

    @defer_sigint
    def load_state_dict(self, state_dict: State) -> None:
        """Restore a :meth:`state_dict`. ValueError if the saved order or position is
        invalid; nothing changes then."""
        with state_of(self):
            order = state_dict["order"]
            rows = int(state_dict["len_storage"])
            epochs, epoch, position = (
                int(state_dict[name]) for name in ("epochs", "epoch", "position")
            )
            if order is not None and not _is_order(order, rows):
                raise ValueError(
                    f"the saved order does not contain each of {rows} rows once"
                )
            if not (0 <= epoch < epochs and 0 <= position <= rows):
                raise ValueError(
                    f"epoch {epoch} of {epochs}, position {position} of {rows} is not a valid position"
                )
            shuffle, drop_last, ran_out = (
                bool(state_dict[name]) for name in ("shuffle", "drop_last", "ran_out")
            )
            self.epochs, self.shuffle, self.drop_last = epochs, shuffle, drop_last
            self._epoch, self._position = epoch, position
            self._order = None if order is None else order.clone()
            self.len_storage, self.ran_out = rows, ran_out
            self._resumes = bool(state_dict.get("in_pass", False))
            self._publication = None  # the rows are those of the state


def _publication_of(storage: Storage | None) -> int | None:
    ring = getattr(storage, "ring", None)
    return None if ring is None else ring.publication


def _is_order(order: Tensor, rows: int) -> bool:
    is_whole = order.dtype is torch.int64 and order.shape == (rows,)
    return is_whole and torch.equal(
        order.sort().values, torch.arange(rows, device=order.device)
    )
