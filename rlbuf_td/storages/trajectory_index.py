"""The trajectory index: for each row, which rows before and after it belong to the same trajectory."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers import Storage

from rlbuf_td.kernels.episodes import BitBoundaries, Boundaries, make_boundaries, occurrences
from rlbuf_td.kernels.inference_mode import outside_inference_mode
from rlbuf_td.storages.checks import require_packed
from rlbuf_td.storages.indexing import (
    device_of,
    flat_rows,
    lanes_of,
    refuse_range,
    refuse_unwritten,
    revision_of,
    stand_apart,
)
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.listeners import Attached
from rlbuf_td.storages.notebooks import TRANSITIONS
from rlbuf_td.storages.schema import SchemaError, kind
from rlbuf_td.storages.shared.memory import SharedNumbers
from rlbuf_td.storages.torchrl_parts import change_count_of, columns_of, last_step, listeners_of, newest_step_of

if TYPE_CHECKING:
    from rlbuf_td.storages.ring import Ring

DONE_KEY = ("next", "done")
TRAJ_KEY = ("collector", "traj_ids")
_NO_NAMES = (torch.bool, torch.complex64, torch.complex128)
_NOTHING = -2  # a revision that no storage has: the next look-up reads all rows


class _Columns(NamedTuple):
    """The columns of a storage that tell where trajectories end, ``[T, E]``."""

    entries: TensorDictBase  # the storage's TensorDict, whose memory the columns are views of
    end: torch.Tensor  # bool, a view of the only flag of each row, or a copy that combines several flags
    name: torch.Tensor | None  # trajectory ids
    flags: list[torch.Tensor]  # the flags that ``end`` combines, ``[T, E, n]`` each; empty if it is a view

    def write(self, boundaries: Boundaries, start: int, count: int) -> None:
        """Record in ``boundaries`` a write of ``count`` time steps from step ``start`` on."""
        if self.flags:
            part = slice(start, start + count)
            self.end[part] = torch.cat([flag[part] for flag in self.flags], 2).any(2)
        boundaries.write(start, count, self.end, self.name)

    def write_rows(self, boundaries: Boundaries, rows: np.ndarray) -> None:
        """Record in ``boundaries`` a write of single rows, at flat indices ``rows``."""
        if self.flags:
            at = torch.from_numpy(rows).to(self.end.device)
            self.end.view(-1)[at] = torch.cat([flag.flatten(0, 1)[at] for flag in self.flags], 1).any(1)
        boundaries.write_rows(rows, self.end, self.name)


class TrajectoryIndex(Attached):
    """Finds where the trajectory of each stored row begins and ends.

    Time is dim 0 of the storage, the other dims are lanes (environments). Within a lane, a trajectory ends at a done
    flag, at a change of the trajectory id, at the newest row, and where rows were not written in order. In a full ring,
    row 0 of a lane follows the lane's last row.

    Writers report every write to the index. The *revision* of a storage counts all changes of its rows: writes, edits
    in place, loads. If it is not the revision that the index has seen last, a change was not reported (``storage.set``,
    an edit, a load), and the next look-up reads all rows again.

    Args:
        storage: a :class:`PackedStorage`.
        done_key: key of the done flags, bool, one or more per row. A trajectory ends with a row in which a flag is set.
            If the key is not stored, ``"terminated"`` and ``"truncated"`` beside it take its place.
        traj_key: key of the trajectory ids, one integer per row; ignored if not stored. Batches flattened to
            ``[E * T]`` need ids, because rows of different environments follow each other.

    Look-ups take an index of written rows: flat indices ``[B]``, a tuple of one tensor per dim, or ``[B, ndim]``.

    Raises:
        KeyError: (on the first look-up) the rows hold neither done flags nor trajectory ids.
        TypeError: the storage is no :class:`PackedStorage`; (on the first look-up) flags are not bool, or ids are not
            integers.
        SchemaError: (on the first write or look-up) a row holds several steps, as a write ``[E, T]`` with ``ndim=1``.
        RuntimeError: (on a look-up) the storage is empty.
        IndexError: (on a look-up) an index is -1, or outside the written rows; indices on CUDA are not checked.

    Cost: look-ups and writes are O(1) per row; the index takes 0.3 bytes per row. On other devices, the index takes
    2 bytes per row, 8 more for look-ups, and the first look-up after a write reads all rows.

    TorchRL has no such index.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(6))
        >>> trajectories = TrajectoryIndex.of(rb.storage)
        >>> done = torch.tensor([False, False, True, False, False]).unsqueeze(-1)
        >>> rows = rb.extend(TensorDict({"next": {"done": done}}, [5]))
        >>> trajectories.steps_back(rows), trajectories.steps_ahead(rows)
        (tensor([0, 1, 2, 0, 1]), tensor([2, 1, 0, 1, 0]))
        >>> trajectories.ended(rows)
        tensor([ True,  True,  True, False, False])
    """

    def __init__(
        self, storage: Storage, *, done_key: NestedKey = DONE_KEY, traj_key: NestedKey | None = TRAJ_KEY
    ) -> None:
        require_packed(storage, "a TrajectoryIndex", "look-ups need rows whose writes it has seen")
        super().__init__(storage)
        self.done_key, self.traj_key = as_tuple(done_key), None if traj_key is None else as_tuple(traj_key)
        self._boundaries: Boundaries | None = None
        self._size: tuple[int, int, torch.device] | None = None  # steps, lanes and device of the boundaries
        #: The storage's revision that the boundaries describe, and the sum of its lanes' tails at that time.
        self._seen = SharedNumbers("q", [_NOTHING, 0])
        self._columns: _Columns | None = None  # until the storage moves them, see `_bound`
        self._head_before_load: torch.Tensor | None = None

    @classmethod
    def of(
        cls, storage: Storage, *, done_key: NestedKey = DONE_KEY, traj_key: NestedKey | None = TRAJ_KEY
    ) -> TrajectoryIndex:
        """Return the index attached to ``storage`` with these keys; attach a new one if there is none."""
        keys = as_tuple(done_key), None if traj_key is None else as_tuple(traj_key)
        for listener in listeners_of(storage):
            if isinstance(listener, cls) and (listener.done_key, listener.traj_key) == keys:
                return listener
        index = cls(storage, done_key=done_key, traj_key=traj_key)
        storage.attach(index)
        return index

    # -- look-ups

    def reach(self, index: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return :meth:`steps_back`, :meth:`steps_ahead` and :meth:`ended` of the rows, ``[B]`` each."""
        boundaries, flat = self.boundaries(), flat_rows(index, self.storage, device_of(self.storage))
        refuse_unwritten(flat, self.storage)
        return boundaries.reach(flat)

    def steps_back(self, index: Any) -> torch.Tensor:
        """Return the number of stored rows before each row in its trajectory, ``[B]`` int64."""
        return self.reach(index)[0]

    def steps_ahead(self, index: Any) -> torch.Tensor:
        """Return the number of stored rows after each row in its trajectory, ``[B]`` int64."""
        return self.reach(index)[1]

    def ended(self, index: Any) -> torch.Tensor:
        """Return whether each row's trajectory has ended with a done flag or a new trajectory id, ``[B]`` bool."""
        return self.reach(index)[2]

    def length(self, index: Any) -> torch.Tensor:
        """Return the number of stored rows of each row's trajectory, ``[B]`` int64."""
        back, ahead, _ = self.reach(index)
        return back + ahead + 1

    def whole(self, *, only_finished: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the flat index of the first row, and the length, of each trajectory whose rows are all stored.

        Both are ``[K]`` int64, ordered by lane and then by age. ``only_finished=False`` also returns the trajectories
        that have not ended yet. After a write that replaced all rows, and if the ring had overwritten rows before this
        index was created, a trajectory that begins with the oldest row of a lane counts as incomplete.

        Raises:
            RuntimeError: the storage is empty.

        Cost: O(K + T * E / 64); on other devices, O(T * E).
        """
        boundaries = self.boundaries()
        oldest, live, begun = self._oldest(boundaries)
        return boundaries.whole(oldest, live, begun, only_finished)

    def _oldest(self, boundaries: Boundaries) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each lane's oldest step, number of steps, and whether a trajectory begins with the oldest step."""
        steps, lanes = self._shape
        if stand_apart(self.storage):
            ring: Ring = self.storage.ring
            tail, count = torch.from_numpy(ring.tail), torch.from_numpy(ring.count)
            return tail % steps, count, (count < steps) | boundaries.begun.cpu()
        live = len(self.storage) // lanes
        if live < steps:
            oldest, begun = 0, torch.ones(lanes, dtype=torch.bool, device="cpu")
        else:
            oldest, begun = (last_step(self.storage, steps) + 1) % steps, boundaries.begun.cpu()
        return *(torch.full((lanes,), each, device="cpu") for each in (oldest, live)), begun

    def boundaries(self, revision: int | None = None) -> Boundaries:
        """Return up-to-date boundaries; ``revision`` is the current revision of the storage if the caller knows it."""
        if revision is None:
            if not len(self.storage):
                self.storage.refuse_closed()
                raise RuntimeError("cannot look up trajectories of an empty storage: extend the buffer first")
            revision = revision_of(self.storage)
        if revision != self._seen.values[0] or self._boundaries is None:
            return self.rebuild()
        return self._boundaries

    @property
    def _shape(self) -> tuple[int, int]:
        """The number of time steps and lanes of the boundaries."""
        return (0, 0) if self._size is None else self._size[:2]

    @property
    def nbytes(self) -> int:
        """Memory of the index in bytes; 0 before the first write."""
        boundaries = self._boundaries
        return 0 if boundaries is None else sum(tensor.nbytes for tensor in boundaries.tensors().values())

    def end_keys(self) -> list[tuple[str, ...]]:
        """Return the keys of the stored flags that end a trajectory."""
        stored, beside = columns_of(self.storage), self.done_key[:-1]
        parts = [key for key in ((*beside, "terminated"), (*beside, "truncated")) if stored.get(key, None) is not None]
        return parts if stored.get(self.done_key, None) is None else [self.done_key]

    # -- writes, which writers report after the rows are stored

    def mark_range(self, start: int, count: int) -> None:
        """Record a write of ``count`` consecutive flat rows (whole time steps) from flat row ``start`` on."""
        refuse_range(start, count, self.storage)
        lanes = lanes_of(self.storage).numel()
        start, count = start // lanes, count // lanes
        boundaries = self._followed()
        if boundaries is not None:
            self._bound().write(boundaries, start, count)
        elif (boundaries := self._begun(start, count)) is not None:
            self._bound().write(boundaries, start, count)
            self.mark_all()

    def mark_update(self, index: Any) -> None:
        """Record a write of the time steps ``index``, in this order.

        ``index`` is an int, ``[n]`` time steps, or the coordinates ``[n * E, ndim]`` of all rows of ``n`` time steps.
        An index of -1 stands for a skipped row. The row after a skipped row begins a new trajectory.
        """
        rows, lanes = torch.as_tensor(index, device="cpu").numpy(), lanes_of(self.storage).numel()
        steps = rows[::lanes, 0] if rows.ndim == 2 else rows.reshape(-1)
        refuse_range(0, (int(steps.max(initial=-1)) + 1) * lanes, self.storage)
        followed = self._followed()
        boundaries = followed or self._begun(0, len(np.unique(steps[steps >= 0])))
        if boundaries is None or not len(steps):
            return
        columns = self._bound()
        steps = np.where(steps < 0, -2, steps)  # -2 + 1 is not a step: no row follows a skipped one
        for run in np.split(steps, np.flatnonzero(np.diff(steps) != 1) + 1):
            if run[0] < 0:
                boundaries.head.fill_(-1)
            else:
                columns.write(boundaries, int(run[0]), len(run))
        if len(steps) >= self._shape[0] or followed is None:
            self.mark_all()

    def mark_rows(self, rows: torch.Tensor) -> None:
        """Record a write of single rows at flat indices ``rows``, ``[n]``; those of a lane are in time order."""
        boundaries = self._followed()
        if boundaries is None:  # the next look-up reads all rows
            return
        given, (steps, lanes) = rows.cpu().numpy(), self._shape
        self._bound().write_rows(boundaries, given[occurrences(given[::-1])[::-1] == 0])
        # the rows that are gone may belong to the oldest trajectory of a lane whose rows were all replaced
        replaced = torch.from_numpy(np.bincount(given % lanes, minlength=lanes) >= steps)
        boundaries.begun[replaced] = self._complete()[replaced].to(boundaries.begun.device)

    def mark_all(self) -> None:
        """Record that one write has replaced all rows.

        The oldest rows may then belong to trajectories that began in the rows before, or in rows that did not fit.
        """
        if self._boundaries is not None:
            self._boundaries.begun.copy_(self._complete())

    def marks(self) -> tuple[BitBoundaries, np.ndarray, Any] | None:
        """Return the arrays with which compiled code updates this index, or None if only Python code can update it."""
        boundaries, columns = self._boundaries, self._columns
        if not isinstance(boundaries, BitBoundaries) or columns is None or columns.flags:
            return None
        if columns.entries is not columns_of(self.storage):
            return None
        # The addresses are valid while `boundaries.bitmap` is the same tensor.
        return boundaries, boundaries.marks(columns.end, columns.name), self._seen.values

    def _followed(self) -> Boundaries | None:
        """Return the boundaries for the write that the revision counts, or None if there was another change before."""
        if self._boundaries is not None:
            self._bound()
        revision = int(change_count_of(self.storage))  # the next look-up notices edits
        if self._boundaries is None or not self._seen[0] <= revision <= self._seen[0] + 1:
            return None
        self._note_seen(revision)
        return self._boundaries

    def _note_seen(self, revision: int) -> None:
        self._seen[0], self._seen[1] = revision, self._tails()

    def _tails(self) -> int:
        """Return the sum of the oldest live serials of all lanes, which changes as soon as a row is gone."""
        return int(self.storage.ring.tail.sum()) if hasattr(self.storage, "ring") else 0

    def _begun(self, start: int, count: int) -> Boundaries | None:
        """Return empty boundaries for a write that has replaced all rows, None if there are others."""
        storage = self.storage
        live = len(storage) // lanes_of(storage).numel()
        if count != live and (start + count, newest_step_of(storage)) != (live, start - 1):
            return None
        try:
            boundaries = self._fit()
        except (KeyError, TypeError, SchemaError):  # the rows are already written: the next look-up raises the error
            return None
        boundaries.clear()
        self._note_seen(revision_of(storage))
        return boundaries

    # -- reading all rows again

    def rebuild(self) -> Boundaries:
        """Read all rows again, in the order of writing; O(T * E)."""
        boundaries, storage = self._fit(), self.storage
        steps, lanes = self._shape
        live, head = len(storage) // lanes, last_step(storage, steps)
        is_apart = stand_apart(storage)
        newest = torch.from_numpy(storage.ring.newest_of_lanes) if is_apart else head
        is_edited = bool((boundaries.head == newest).all()) and self._seen[1] == self._tails()
        begun = boundaries.begun & is_edited  # otherwise, rows were written
        boundaries.clear()
        if is_apart:
            self._read_rows(boundaries, storage.ring.cells_by_age().numpy())
        elif live == steps and head + 1 < steps:
            self._read_steps(boundaries, head + 1, steps)
            self._read_steps(boundaries, 0, head + 1)
        elif live:
            self._read_steps(boundaries, 0, live)
        boundaries.begun.copy_(begun | self._complete().to(begun.device))
        self._note_seen(revision_of(storage))
        return boundaries

    def _complete(self) -> torch.Tensor:
        """Return whether each row of a lane that was ever written is stored, ``[E]`` bool."""
        return torch.from_numpy(self.storage.ring.tail == 0)

    def _breaks(self) -> np.ndarray:
        """Return the flat rows after which a trajectory ends without a flag: the rows were reopened, a lane taken."""
        return self.storage.ring.live_cells([*self.storage.breaks, *taken_over(self.storage)])

    def _read_steps(self, boundaries: Boundaries, start: int, stop: int) -> None:
        """Read the time steps ``start`` to ``stop - 1``, and end trajectories after breaks."""
        breaks, lanes = self._breaks(), boundaries.lanes
        at = breaks // lanes
        for step in np.unique(at[(at >= start) & (at < stop)]):
            self._bound().write(boundaries, start, int(step) + 1 - start)
            boundaries.head[torch.from_numpy(breaks[at == step] % lanes)] = -1
            start = int(step) + 1
        if start < stop:
            self._bound().write(boundaries, start, stop - start)

    def _read_rows(self, boundaries: Boundaries, rows: np.ndarray) -> None:
        """Read ``rows``, lane after lane, and end trajectories after breaks."""
        breaks = self._breaks()
        for part in np.split(rows, np.flatnonzero(np.isin(rows, breaks)) + 1):
            self._bound().write_rows(boundaries, part)
            if len(part) and part[-1] in breaks:
                boundaries.head[part[-1] % boundaries.lanes] = -1

    # -- the columns

    def _fit(self) -> Boundaries:
        """Look up the columns again; return the boundaries, or empty ones if there are none of the columns' size."""
        self._columns = None
        end = self._bound().end
        if self._boundaries is None:
            self._size = *end.shape, end.device
            self._boundaries = make_boundaries(*self._size)
            self._seen[0] = _NOTHING
        return self._boundaries

    def _bound(self) -> _Columns:
        """Return the columns; look them up again if the storage's TensorDict, and with it their memory, has changed.

        Boundaries of another size than the columns are dropped.
        """
        entries = columns_of(self.storage)
        if self._columns is None or self._columns.entries is not entries:
            self._columns = self._find_columns(entries)
            end = self._columns.end
            if self._size != (*end.shape, end.device):
                self._boundaries = None
        return self._columns

    def _find_columns(self, entries: Any) -> _Columns:
        if entries is None:
            raise RuntimeError("cannot find trajectories in a storage without rows: write to it, or load it first")
        self.refuse_inner(entries.batch_size, self.storage.ndim)
        flags, name = self._find(entries, self.storage.ndim)
        steps, lanes = flags[0].shape[:2]
        if len(flags) == 1 and flags[0].shape[2:].numel() == 1:
            return _Columns(entries, flags[0].view(steps, lanes), name, [])
        with outside_inference_mode():
            end = torch.zeros(steps, lanes, dtype=torch.bool, device=flags[0].device)
        return _Columns(entries, end, name, [flag.view(steps, lanes, flag.shape[2:].numel()) for flag in flags])

    def refuse_inner(self, shape: torch.Size, row_dims: int) -> None:
        """Raise a SchemaError if rows hold several steps each: ``shape`` has more than ``row_dims`` batch dims."""
        if len(shape) > row_dims:
            ndim, steps = self.storage.ndim, [*shape[row_dims:]]
            raise SchemaError(
                f"trajectories are found row by row, but with ndim={ndim} each row of the batch size {[*shape]} holds "
                f"{steps} steps: make the storage with ndim={ndim + 1}, whose rows are [T, E]"
            )

    def _find(self, columns: TensorDictBase, ndim: int) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return the flags that end a trajectory, ``[T, E, ...]`` each, and the ids, ``[T, E]``."""
        for key in (self.done_key, self.traj_key):
            if key in self.storage.deduplicated:
                raise KeyError(f"rows share {key}, which the trajectory index needs: leave it out of share_next")

        def column(key: tuple[str, ...] | None) -> torch.Tensor | None:
            found = None if key is None else columns.get(key, None)
            return None if found is None else found.view(len(found), found.shape[1:ndim].numel(), *found.shape[ndim:])

        name = column(self.traj_key)
        if name is not None:
            if name.shape[2:].numel() != 1 or name.dtype in _NO_NAMES or name.is_floating_point():
                got = kind(name.dtype, name.shape[2:])
                raise TypeError(f"trajectory ids {self.traj_key} must be one integer per row, got {got} per row")
            name = name.view(name.shape[:2])
        flags = [flag for flag in map(column, self.end_keys()) if flag is not None]
        for flag in flags:
            if flag.dtype is not torch.bool:
                got = kind(flag.dtype, flag.shape[2:])
                raise TypeError(f"done flags {self.done_key} must be bool, got {got} per row")
        if flags:
            return flags, name
        if name is None:
            raise KeyError(
                f"no row marks the end of a trajectory: store {self.done_key} (or 'terminated' and 'truncated' there), "
                f"or trajectory ids {self.traj_key}{TRANSITIONS}"
            )
        return [torch.zeros(1, 1, dtype=torch.bool, device=name.device).expand(name.shape)], name

    # -- state

    @property
    def bytes_to_share(self) -> int:
        """The bytes that :meth:`share_memory_` will move to shared memory."""
        tensors = [] if self._boundaries is None else [*self._boundaries.tensors().values()]
        return sum(tensor.nbytes for tensor in tensors if not tensor.is_shared())

    def share_memory_(self) -> None:
        """Share the boundaries with other processes that use the storage, if rows are allocated."""
        if columns_of(self.storage) is not None:
            boundaries = self._fit()
            if isinstance(boundaries, BitBoundaries):
                boundaries.share_memory_()
                self._seen.share_memory_()

    def repair(self) -> None:
        """Make the next look-up read all rows again, for example after a process has died during a write."""
        self._seen[0] = _NOTHING

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of the boundaries, because the rows do not show which writes were out of order."""
        if self._boundaries is None or not len(self.storage):
            return {}
        state = {name: tensor.clone() for name, tensor in self.boundaries().tensors().items()}
        return state | {"size": torch.tensor(self._shape, device="cpu")}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Restore a :meth:`state_dict` for the same rows; if the state is empty, the next look-up reads the rows.

        Raises:
            ValueError: the state has another size, or is not that of an index; this index is unchanged.
        """
        if not state_dict:
            return self.repair()
        boundaries = self._fit()
        state_dict = {"begun": torch.zeros_like(boundaries.begun)} | state_dict  # older dumps have no such entry
        size = torch.tensor(self._shape, device="cpu")
        shapes = {name: tensor.shape for name, tensor in (boundaries.tensors() | {"size": size}).items()}
        if shapes != {name: tensor.shape for name, tensor in state_dict.items()} or (state_dict["size"] != size).any():
            raise ValueError("the saved trajectory index is of a storage of another size, or of another device")
        kinds = {name: tensor.dtype for name, tensor in boundaries.tensors().items()}
        if any(state_dict[name].dtype is not kind for name, kind in kinds.items()) or not boundaries.holds(state_dict):
            raise ValueError("the saved trajectory index is damaged: its levels contradict each other")
        boundaries.restore(state_dict)
        self._note_seen(revision_of(self.storage))

    def part(self, lane: int | None = None) -> None:
        """End all unfinished trajectories, or that of one lane, so that the next written rows begin new ones."""
        with suppress(KeyError, TypeError, RuntimeError, SchemaError):  # the next look-up raises the error
            self.boundaries().head[slice(None) if lane is None else lane] = -1

    def mark_load(self) -> None:
        """After a load, end unfinished trajectories that have ids, because new collectors reuse the ids."""
        with suppress(KeyError, TypeError, RuntimeError, SchemaError):  # the next look-up raises the error
            self._fit()
            if self._bound().name is not None:
                head = self.boundaries().head
                self._head_before_load = head.clone()
                head.fill_(-1)

    def resume(self) -> None:
        """Undo :meth:`mark_load`, because the recorder of the saved rows goes on: the next rows continue these."""
        if self._head_before_load is not None:
            self.boundaries().head.copy_(self._head_before_load)
            self._head_before_load = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_columns": None}  # views of the rows, which the storage pickles

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(done_key={self.done_key}, traj_key={self.traj_key}, {self.nbytes:,} bytes)"


def begin_episode(storage: Any, lane: int) -> None:
    """Let the next row of a lane begin an episode, because another actor takes the lane over."""
    with storage.lock:
        ring: Ring = storage.ring
        if not len(ring) or not ring.count[lane]:
            return
        numbers = storage.takeovers
        place = 1 + 2 * (numbers[0] % (len(numbers) // 2))
        numbers[place], numbers[place + 1] = lane, int(ring.written[lane]) - 1
        numbers[0] += 1
        for each in listeners_of(storage):
            if isinstance(each, TrajectoryIndex):
                each.part(lane)


def taken_over(storage: Any) -> list[tuple[int, int]]:
    """Return the rows (lane, serial) that were the newest ones of lanes that were taken over."""
    numbers = storage.takeovers
    found = [*numbers][1 : 1 + 2 * numbers[0]]
    return [*zip(found[::2], found[1::2], strict=True)]
