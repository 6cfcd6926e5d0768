"""The trajectory index: for each row, which rows before and after it belong to the same
trajectory."""

from __future__ import annotations

import torch
from tensordict import NestedKey
from torchrl.data.replay_buffers import Storage

from rlbuf_td.storages.checks import require_packed
from rlbuf_td.storages.episodes import DONE_KEY, TRAJ_KEY, EpisodeKeys, Episodes
from rlbuf_td.storages.indexing import flat_rows


class TrajectoryIndex:
    """Finds where the trajectory of each stored row begins and ends.

    Time is dim 0 of the storage, the other dims are lanes (environments). Within a
    lane, a trajectory ends at a done flag, at a change of the trajectory id, at the
    newest row, and at a *break*: after a load, a reopening, or a reset without a flag,
    or where another actor takes the lane, the next row begins a trajectory. A full
    ring's oldest row follows no row, but its trajectory may have begun before it.

    A storage has one pair of keys; all wrappers and indices over it have the same.

    Args:
        storage: a :class:`PackedStorage`.
        done_key: key of the done flags, bool, one or more per row. A trajectory ends
            with a row in which a flag is set. If no ``"done"`` is stored,
            ``"terminated"`` and ``"truncated"`` beside it take its place. A key of
            another name must be stored.
        traj_key: key of the trajectory ids, one integer per row. The default key is
            ignored if it is not stored; another key must be stored. Batches flattened
            to ``[E * T]`` need ids, because rows of different environments follow each
            other.

    Look-ups take an index of written rows: flat indices ``[B]``, a tuple of one tensor
    per dim, or ``[B, ndim]``.

    Raises:
        TypeError: the storage is no PackedStorage.
        ValueError: another pair of keys is in use for this storage.
        KeyError: (on a look-up) the rows hold neither done flags nor trajectory ids, or
            lack a key of a name of your own.
        TypeError: (on a look-up) flags are not bool, or ids are not integers.
        SchemaError: (on a look-up) a row holds several steps, as a write ``[E, T]``
            with ``ndim=1``.
        RuntimeError: (on a look-up) the storage is empty.
        IndexError: (on a look-up) an index is -1, or outside the written rows; indices
            on CUDA are not checked.

    Cost: look-ups and writes are O(1) per row; 8 bytes per row, whether or not there is
    an index. After edits of the rows, the first look-up reads all rows; on other
    devices, also after writes.

    TorchRL has no such index.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(6))
        >>> trajectories = TrajectoryIndex(rb.storage)
        >>> done = torch.tensor([False, False, True, False, False]).unsqueeze(-1)
        >>> rows = rb.extend(TensorDict({"next": {"done": done}}, [5]))
        >>> trajectories.steps_back(rows), trajectories.steps_ahead(rows)
        (tensor([0, 1, 2, 0, 1]), tensor([2, 1, 0, 1, 0]))
        >>> trajectories.ended(rows)
        tensor([ True,  True,  True, False, False])
    """

    def __init__(
        self,
        storage: Storage,
        *,
        done_key: NestedKey = DONE_KEY,
        traj_key: NestedKey | None = TRAJ_KEY,
    ) -> None:
        self.storage = require_packed(
            storage, "a TrajectoryIndex", "look-ups need rows whose writes it has seen"
        )
        self.keys = EpisodeKeys.of(done_key, traj_key)
        self.storage.use_episode_keys(self.keys)

    def reach(self, index: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return :meth:`steps_back`, :meth:`steps_ahead` and :meth:`ended` of the rows,
        ``[B]`` each."""
        with self.storage.lock:  # no row is half written
            episodes = self._episodes()
            flat = flat_rows(index, self.storage, self.storage.device)
            self.storage.refuse_unwritten(flat)
            return episodes.spans(flat)

    def steps_back(self, index: object) -> torch.Tensor:
        """Return the number of stored rows before each row in its trajectory, ``[B]``
        int64."""
        return self.reach(index)[0]

    def steps_ahead(self, index: object) -> torch.Tensor:
        """Return the number of stored rows after each row in its trajectory, ``[B]``
        int64."""
        return self.reach(index)[1]

    def ended(self, index: object) -> torch.Tensor:
        """Return whether each row's trajectory has ended: with a flag, or because
        another one follows, ``[B]`` bool."""
        return self.reach(index)[2]

    def length(self, index: object) -> torch.Tensor:
        """Return the number of stored rows of each row's trajectory, ``[B]`` int64."""
        back, ahead, _ = self.reach(index)
        return back + ahead + 1

    def whole(self, *, only_finished: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the flat index of the first row, and the length, of each trajectory
        whose rows are all stored.

        Both are ``[K]`` int64, ordered by lane and then by age. ``only_finished=False``
        also returns the trajectories that have not ended yet. If one write had more
        rows than the storage, the trajectory of its oldest stored row counts as
        incomplete.

        Raises:
            RuntimeError: the storage is empty.

        Cost: O(E + K); on other devices, O(T * E).
        """
        with self.storage.lock:
            return self._episodes().whole(only_finished=only_finished)

    def _episodes(self) -> Episodes:
        """Return the storage's episodes, up to date; the errors are those of a
        look-up."""
        if not len(self.storage):
            self.storage.refuse_closed()
            raise RuntimeError(
                "cannot look up trajectories of an empty storage: extend the buffer first"
            )
        return self.storage.episodes_now()

    @property
    def nbytes(self) -> int:
        """Memory of the index in bytes; 0 before the first write."""
        return 0 if self.storage.episodes is None else self.storage.episodes.nbytes

    def __repr__(self) -> str:
        keys = ", ".join(f"{name}={key}" for name, key in self.keys._asdict().items())
        return f"{type(self).__name__}({keys}, {self.nbytes:,} bytes)"
