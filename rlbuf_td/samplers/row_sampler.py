"""The base class of samplers that draw rows; subclass it to write a sampler of your
own."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from rlbuf_td.samplers.common import (
    StatefulSampler,
    refuse_replacing,
    refuse_stored,
    refuse_unordered,
    rows_drawn,
)
from rlbuf_td.storages.indexing import Index, coordinates


class RowSampler(StatefulSampler):
    """Abstract base of samplers that draw rows: a subclass writes ``draw``, and works
    in every buffer.

    :meth:`draw` chooses the rows of a batch. This class has the other methods that
    TorchRL's buffers call, saves the state, and converts rows to coordinates for
    storages with lanes. A subclass works in this package's buffers and in TorchRL's,
    over any storage of tensors, and within the wrappers :class:`NStepSampler`,
    :class:`HindsightSampler` and :class:`SequenceSampler`. A
    subclass of any sampler of this package is as fast as its parent where it changes
    nothing. For TD errors, subclass :class:`ProportionalSampler` or
    :class:`RankSampler`.

    A subclass may set these class attributes:

    - ``report_keys``: the names of the entries, besides ``"index"``, that :meth:`draw`
      adds to each batch, a frozenset. Rows that have an entry of such a name are
      refused at the first write. Names that are missing here are compared with the rows
      at each draw.
    - ``needs_order``: whether :meth:`draw` needs rows in time order. If true, writers
      that keep no time order are refused when a buffer is made. A writer of your own
      says with ``keeps_order = True`` in its class that it writes one time step after
      another. Step ``t`` of lane ``e`` of ``E`` is row ``t * E + e``. In a full ring,
      the newest step is ``storage._last_cursor_index``, as in TorchRL, and the oldest
      step follows it.
    - ``state_keys``: the names of the attributes that ``state_dict`` and ``dumps``
      save: numbers, strings, tensors, or lists and dicts of these. Loading assigns
      them. Pickling saves all attributes but the generator. After ``rb.share()``, each
      process has its own copy of them.

    A subclass may override ``_empty()``, which is called when all rows are removed, or
    replaced by those of a state that the buffer itself does not load. It may override
    ``mark_update(index, *, storage)``, which is called after each write to the rows
    ``index``, ``[n]``, or ``[n, ndim]`` with lanes.

    Raises:
        ValueError: the sampler needs rows in time order, and the writer keeps none.
        SchemaError: the rows have an entry with the name of an entry that the sampler
            adds.
        TypeError: (when sampling) :meth:`draw` returned something else than ``[B]``
            int64 rows, alone or with a dict.
        IndexError: (when sampling) a drawn row has not been written; checked in a
            :class:`ReplayBuffer` over a :class:`PackedStorage` on the CPU, and within
            wrappers.

    Cost: that of :meth:`draw`, a gather, and checks of the drawn rows.
    Source: TorchRL's ``Sampler`` has an abstract ``sample``, and its subclasses convert
    and save by themselves.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer, RowSampler
        >>> from tensordict import TensorDict
        >>> class RewardSampler(RowSampler):
        ...     '''Draws rows with a reward above ``least``, all equally likely.'''
        ...     state_keys = ("least",)
        ...     def __init__(self, least=0.0):
        ...         self.least = least
        ...     def draw(self, storage, batch_size):
        ...         rows = (storage["next", "reward"].flatten()[: len(storage)] > self.least).nonzero().flatten()
        ...         if not len(rows):
        ...             raise RuntimeError(f"no stored reward is above {self.least}")
        ...         chosen = torch.randint(len(rows), (batch_size,), generator=self._rng, device=rows.device)
        ...         return rows[chosen]
        >>> rb = ReplayBuffer(storage=PackedStorage(100), sampler=RewardSampler(least=2.0), batch_size=3)
        >>> _ = rb.extend(TensorDict({"next": {"reward": torch.arange(4.0)}}, [4]))
        >>> rb.sample()["next", "reward"]
        tensor([3., 3., 3.])
        >>> rb.sampler.state_dict()
        {'least': 2.0}
    """

    @abstractmethod
    def draw(
        self, storage: Storage, batch_size: int
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Draw the rows of a batch.

        Args:
            storage: the storage of the buffer; ``storage[key]`` is a column,
                ``len(storage)`` the number of rows. If lanes have unlike lengths, see
                :meth:`ReplayBuffer.lane`, cells that a lane has not written hold zeros,
                and drawing one raises an IndexError.
            batch_size: B, the number of rows to draw. Fewer rows give a shorter batch.

        Returns:
            The rows, ``[B]`` int64 from 0 to ``len(storage) - 1``, on the storage's
            device, in any order and also repeatedly. With further batch entries: a pair
            of the rows and a dict of new tensors ``[B, ...]``. All random numbers come
            from the ``torch.Generator`` ``self._rng`` (``None``: torch's default one).

        Raise a RuntimeError if no row can be drawn, as from an empty storage.
        """

    @torch.compiler.disable(
        reason="compiled code would depend on the number of rows, which each write changes"
    )
    def sample(
        self, storage: Storage, batch_size: int
    ) -> tuple[Index, dict[str, Tensor]]:
        """Draw ``batch_size`` rows.

        Returns:
            The index, ``[B]`` int64 (a tuple of ``ndim`` tensors if ``ndim > 1``), and
            a dict of further batch entries: ``{"priority_weight": [B] float32}`` for
            prioritized samplers, else empty.
        """
        # TorchRL's buffers, which call this method, do not
        refuse_stored(self, storage)
        refuse_unordered(self, storage)
        flat, info = rows_drawn(self, self.draw(storage, batch_size))
        refuse_replacing(self, storage, info)
        return coordinates(flat, storage), info

    def _empty(self) -> None:
        pass
