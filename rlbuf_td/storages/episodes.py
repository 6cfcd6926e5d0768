"""The episodes of a storage's rows: their numbers, and the flags and ids that tell
where episodes end.

See :mod:`rlbuf_td.kernels.episodes` for what the numbers mean. A write notes its rows
after their bytes are stored and before they are published (:meth:`Episodes.note`).
Whatever else changes rows, and a write that did not end, makes the numbers stale: the
next look-up or write builds them again from flags, ids and breaks.
"""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, loop, record_of, uses_numba
from rlbuf_td.kernels.episodes import (
    BACK,
    BACK_OF_NEXT,
    EPISODES,
    MOST,
    Lanes,
    Spans,
    by_age,
    lanes_of_write,
    note_,
    spans,
    whole,
)
from rlbuf_td.kernels.host_memory import outside_inference_mode, to_device
from rlbuf_td.kernels.serials import EPISODES_STALE
from rlbuf_td.storages.checks import State
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.numbers import SharedNumbers
from rlbuf_td.storages.schema import SchemaError, kind, show_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlbuf_td.kernels.episodes.triton import EpisodeNotes
    from rlbuf_td.storages.layout import RowLayout
    from rlbuf_td.storages.memory import HeadFile
    from rlbuf_td.storages.ring import Ring
    from rlbuf_td.storages.rows import Rows
    from rlbuf_td.storages.schema import Leaf

Key = tuple[str, ...]
DONE_KEY: Key = ("next", "done")
TRAJ_KEY: Key = ("collector", "traj_ids")
_MOST_ROWS = 1 << 16  # rows that suffice to judge how trajectories are stored
_FEW_ROWS = 1_024  # among fewer rows, trajectories need not go on after a break
_NO_NAMES = (torch.bool, torch.complex64, torch.complex128)
# places in the numbers of StorageKeys; the text follows
_REPLACED, _USED, _LENGTH, _TEXT = range(4)
_WORDS = 512  # for the text


class EpisodeKeys(NamedTuple):
    """The keys that tell where episodes end."""

    done_key: Key = DONE_KEY
    traj_key: Key | None = TRAJ_KEY

    @classmethod
    def of(cls, done_key: NestedKey, traj_key: NestedKey | None) -> EpisodeKeys:
        return cls(as_tuple(done_key), None if traj_key is None else as_tuple(traj_key))

    def find(
        self, layout: RowLayout, deduplicated: Mapping[Key, Leaf], ndim: int
    ) -> tuple[list[Key], Key | None]:
        """Return the keys of the stored flags, and of the stored ids.

        Raises:
            KeyError: the rows hold neither flags nor ids, or lack a key that only a
                user can have named, or a key is deduplicated.
            TypeError: flags are not bool, or ids are not integers.
            SchemaError: a row holds several steps.
        """
        refuse_inner(layout.root.batch_size, 0, ndim)
        for key in (self.done_key, self.traj_key):
            if key in deduplicated:
                raise KeyError(
                    f"rows share {key}, which the trajectory index needs: leave it out of share_next"
                )
        leaf_of = {leaf.key: leaf for leaf in layout.leaves}
        name = None if self.traj_key is None else leaf_of.get(self.traj_key)
        if name is not None and (
            name.shape.numel() != 1
            or name.dtype in _NO_NAMES
            or name.dtype.is_floating_point
        ):
            got = kind(name.dtype, name.shape)
            raise TypeError(
                f"trajectory ids {self.traj_key} must be one integer per row, got {got} per row"
            )
        beside = self.done_key[:-1]
        parts: list[Key] = [
            key
            for key in ((*beside, "terminated"), (*beside, "truncated"))
            if key in leaf_of
        ]
        flags = [self.done_key] if self.done_key in leaf_of else parts
        named = {"done_key": (self.done_key, DONE_KEY)}
        if self.traj_key is not None:
            named["traj_key"] = (self.traj_key, TRAJ_KEY)
        for argument, (key, default) in named.items():
            if key not in leaf_of and not may_be_missing(key, default):
                raise KeyError(
                    f"the rows have no {show_key(key)}, which {argument}= names: name the key that they have, or leave "
                    f"{argument} out for {show_key(default)}"
                )
        for key in flags:
            if leaf_of[key].dtype is not torch.bool:
                got = kind(leaf_of[key].dtype, leaf_of[key].shape)
                raise TypeError(
                    f"done flags {self.done_key} must be bool, got {got} per row: "
                    "cast them before the first write, done.bool()"
                )
        if not flags and name is None:
            raise KeyError(
                f"no row marks the end of a trajectory: store {self.done_key} (or 'terminated' and 'truncated' there), "
                f"or trajectory ids {self.traj_key}"
            )
        return flags, None if name is None else name.key


class StorageKeys:
    """The one pair of keys by which all processes that use the rows of a storage note
    and look up episodes.

    Whoever replaces the pair holds the storage's lock, and so does whoever follows.
    """

    def __init__(self) -> None:
        self.pair = EpisodeKeys()
        # how often the pair was replaced, whether somebody looks up episodes by it, and
        # the bytes of its text (0: the default pair)
        self._numbers = SharedNumbers("q", [0] * (_TEXT + _WORDS))
        self._replaced = 0  # as far as this process knows

    @property
    def are_used(self) -> bool:
        """Whether somebody looks up episodes by this pair, in any process."""
        return bool(self._numbers.values[_USED])

    @property
    def are_outdated(self) -> bool:
        """Whether another process has replaced the pair."""
        return self._numbers.values[_REPLACED] != self._replaced

    def use(self) -> None:
        """Note that somebody looks up episodes by this pair, which is then kept."""
        self._numbers[_USED] = 1

    def refuse_long(self, pair: EpisodeKeys) -> None:
        """Raise a ValueError if the names of a pair are too long to be shared."""
        size, most = len(json.dumps(pair)), 8 * _WORDS
        if size > most:
            raise ValueError(
                f"done_key and traj_key take {size:,} bytes as text, at most {most:,} fit: store flags and ids under "
                "shorter names"
            )

    def replace(self, pair: EpisodeKeys) -> None:
        """Replace the pair for all processes."""
        text, numbers = json.dumps(pair).encode(), self._numbers
        numbers[_LENGTH] = 0  # a process may die before the text is whole
        numbers.values.cast("B")[8 * _TEXT :][: len(text)] = text
        numbers[_LENGTH] = len(text)
        self.pair, self._replaced = pair, numbers[_REPLACED] + 1
        numbers[_REPLACED] = self._replaced

    def follow(self) -> None:
        """Take the pair that another process has set."""
        self._replaced = self._numbers[_REPLACED]
        length = self._numbers[_LENGTH]
        self.pair = EpisodeKeys()
        if length:
            text = bytes(self._numbers.values.cast("B")[8 * _TEXT :][:length])
            done_key, traj_key = json.loads(text)
            self.pair = EpisodeKeys.of(
                tuple(done_key), None if traj_key is None else tuple(traj_key)
            )

    def share_memory_(self) -> None:
        self._numbers.share_memory_()

    def keep_in(self, file: HeadFile) -> None:
        """Keep the pair in a file; nobody uses the pair of an earlier process yet."""
        file.keep(self._numbers)
        self._numbers[_USED] = 0
        self.follow()


def may_be_missing(key: Key, default: Key) -> bool:
    """Whether rows without an entry ``key`` are right: it is the ``default``, or has a
    flag's standard name elsewhere, such as ``("next", group, "done")``.

    Any other name is a user's own: without its entry, it is misspelt.
    """
    return key == default or (default[0] == "next" and key[-1] == default[-1])


def refuse_inner(shape: torch.Size, row_dims: int, ndim: int) -> None:
    """Raise a SchemaError if rows hold several steps each: ``shape`` has more than
    ``row_dims`` batch dims."""
    if len(shape) > row_dims:
        raise SchemaError(
            f"trajectories are found row by row, but with ndim={ndim} each row of the batch size {[*shape]} holds "
            f"{[*shape[row_dims:]]} steps: make the storage with ndim={ndim + 1}, whose rows are [T, E]"
        )


class StoredSegments(NamedTuple):
    """Counts of *segments*, the rows of one trajectory that are stored one after
    another."""

    rows: int
    number: int  # of segments
    # segments that end because a row with another trajectory id follows, and not with
    # an end flag
    broken: int
    ids: int  # of different trajectories; ``number`` if no ids are stored
    has_flags: bool  # whether end flags are stored

    @property
    def mean(self) -> float:
        """The mean number of rows in a segment."""
        return self.rows / max(1, self.number)

    def are_interleaved(self, needed: int) -> bool:
        """Whether most segments are pieces of trajectories, with fewer than ``needed``
        rows on average."""
        # other pieces of most trajectories are stored, too
        go_on = 2 * (self.number - self.ids) >= self.broken
        may_go_on = self.has_flags and self.rows < _FEW_ROWS
        return (
            2 * self.broken > self.number
            and self.mean < needed
            and (go_on or may_go_on)
        )


class Episodes:
    """The numbers of the rows ``rows`` of a ring.

    Args:
        rows: hold the flags and ids.
        ring: the serials of the rows.
        keys: tell where episodes end.
        numbers: memory for the numbers, ``[E, T, 2]`` int32; default: new memory.
    """

    def __init__(
        self, rows: Rows, ring: Ring, keys: EpisodeKeys, numbers: Tensor | None = None
    ) -> None:
        self.rows, self.ring, self.keys = rows, ring, keys
        deduplicated = {} if rows.dedup is None else rows.dedup.deduplicated
        self.flags, self.id_key = keys.find(
            rows.layout, deduplicated, 1 + len(rows.lanes)
        )
        device, lanes = rows.matrix.device, prod(rows.lanes)
        with outside_inference_mode():
            if numbers is None:
                # no page is touched yet
                numbers = torch.empty(
                    lanes, rows.steps, 2, dtype=torch.int32, device=device
                )
            #: What the next rows continue, and what those after the write in progress
            #: do; on the host, both lie with the ring.
            self.following = to_device(ring.following, device)
            self.following_after = to_device(ring.following_after, device)
        self.numbers = numbers
        places, extents = rows.layout.places, rows.extents
        self._flag_extents = extents[[places[key] for key in self.flags], :2].copy()
        leaf = None if self.id_key is None else rows.layout.leaves[places[self.id_key]]
        self.id_dtype = None if leaf is None else leaf.dtype
        self._id_offset = 0 if leaf is None else int(extents[places[leaf.key], 0])
        self.record: np.ndarray | None = (
            self._describe() if uses_numba(device) else None
        )
        #: The address of the record that loops read; 0 where torch takes their place.
        self.address: int = 0 if self.record is None else self.record.ctypes.data
        #: What notes rows on a GPU; None elsewhere.
        self._notes = self._kernel() if backend_of(rows.matrix) == "triton" else None

    def _kernel(self) -> EpisodeNotes:
        from rlbuf_td.kernels.episodes.triton import EpisodeNotes

        device = self.rows.matrix.device
        return EpisodeNotes(self._flag_extents, self._id_offset, self.id_dtype, device)

    def _describe(self) -> np.ndarray:
        """Return the record that loops read."""
        ring, rows = self.ring, self.rows
        return record_of(
            EPISODES,
            numbers=self.numbers.data_ptr(),
            tail=ring.tail.ctypes.data,
            written=ring.written.ctypes.data,
            following=self.following.data_ptr(),
            following_after=self.following_after.data_ptr(),
            steps=rows.steps,
            lanes=ring.lanes,
            row_bytes=rows.flat.stride(0) * rows.flat.element_size(),
            flags=self._flag_extents.ctypes.data,
            flag_count=len(self.flags),
            id_offset=self._id_offset,
            id_size=0 if self.id_dtype is None else self.id_dtype.itemsize,
        )

    def locate_rows(self) -> int:
        """Store where the rows lie now, which loops that write numbers read; return
        :attr:`address`."""
        if self.record is not None:
            self.record["rows"] = self.rows.flat.data_ptr()
        return self.address

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.following.nbytes

    # -- writes

    def note(self, serials: Tensor) -> None:
        """Note the new rows of a write, whose bytes are stored; :meth:`publish` must
        follow.

        ``serials`` is :meth:`Ring.serials_after`, on the device of the rows.
        """
        if self.address:
            note_rows = loop("episodes.cpu", "note_rows")
            note_rows(self.locate_rows(), serials.data_ptr())
        elif self._notes is not None:
            following = self.following, self.following_after
            self._notes.note(self.numbers, self.rows.flat, following, serials)
        elif not self.numbers.is_meta:
            lanes = lanes_of_write(self.numbers, self.following, serials)
            longest = int(lanes.newest.max()) + 1
            self.following_after.copy_(self._compute(lanes, longest))

    def publish(self) -> None:
        """Make the new rows live, and current what follows them."""
        self.ring.publish()
        # An interrupt in between leaves what the new rows continued: a break that was
        # due then comes again, and all else is built again.
        if not self.numbers.is_cpu:
            self.following, self.following_after = self.following_after, self.following

    def end(self, lane: int | slice = slice(None)) -> None:
        """Let the next row of a lane (default: of each) begin an episode: a break."""
        self.following[BACK_OF_NEXT, lane] = -1

    def invalidate(self) -> None:
        """Let the next look-up, or write, build the numbers again from flags, ids and
        breaks."""
        self.ring.numbers[EPISODES_STALE] = True

    def forget(self) -> None:
        """Let the next look-up find the episodes in the rows alone, without breaks.

        Episodes of the oldest rows are not whole if rows before are gone.
        """
        self.invalidate()
        ring, device = self.ring, self.numbers.device
        self.numbers[:, : ring.longest] = 0
        lanes = torch.arange(ring.lanes, device=device)
        oldest = to_device(ring.tail % ring.steps, device)
        are_gone = to_device(ring.tail > 0, device)
        self.numbers[lanes, oldest, BACK] = torch.where(are_gone, MOST, 0).int()
        has_rows = to_device(ring.written > ring.tail, device)
        self.following[BACK_OF_NEXT] = torch.where(has_rows, 0, -1)

    def saved(self, steps: int) -> State:
        """Return what cannot be found in the rows of the first ``steps`` slots."""
        self.refresh()
        done_key, traj_key = self.keys
        names = {
            "done_key": [*done_key],
            "traj_key": None if traj_key is None else [*traj_key],
        }
        return names | {
            "back": self.numbers[:, :steps, BACK].clone(),
            "following": self.following.clone(),
        }

    def load(self, saved: State | None) -> None:
        """Restore a result of :meth:`saved` after the rows; None: find the episodes in
        the rows.

        No saved number reaches memory that is not the rows'.
        """
        if saved is None:
            return self.forget()
        back, following = saved["back"], saved["following"]
        self.numbers[:, : back.shape[1], BACK] = back.to(self.numbers.device)
        self.following.copy_(following)
        self.following[BACK_OF_NEXT].clamp_(-1, MOST)
        self.invalidate()

    def _live(self) -> tuple[Lanes, int]:
        """Return all rows, and the number of those of the longest lane."""
        ring, device = self.ring, self.numbers.device
        tail, written = (
            to_device(serials, device) for serials in (ring.tail, ring.written)
        )
        lanes = Lanes(self.numbers, self.following, tail, written, noted=written)
        return lanes, int(ring.count.max())

    def _compute(self, lanes: Lanes, longest: int) -> Tensor:
        """Compute the numbers of rows, and return what follows them."""
        rows = by_age(lanes, longest)
        return note_(lanes, rows, self._ended(rows.cells), self._traj_ids(rows.cells))

    def _column(self, key: Key, cells: Tensor) -> Tensor:
        """Return an entry of the rows at flat indices, ``[*cells.shape, n]``."""
        column = self.rows.unpack(self.rows.matrix).get(key)
        entries = column.flatten(0, len(self.rows.lanes))[cells]
        return entries[..., None].flatten(cells.ndim)

    def _ended(self, cells: Tensor) -> Tensor:
        """Return whether each row ends its episode, bool."""
        ended = torch.zeros(cells.shape, dtype=torch.bool, device=cells.device)
        for key in self.flags:
            ended |= self._column(key, cells).any(-1)
        return ended

    def _traj_ids(self, cells: Tensor) -> Tensor:
        """Return the id of each row's episode, int64."""
        if self.id_key is None:
            return torch.zeros_like(cells)
        return self._column(self.id_key, cells)[..., 0].long()

    # -- look-ups, after `refresh`

    def refresh(self) -> None:
        """Prepare look-ups after writes and edits."""
        if not self.ring.numbers[EPISODES_STALE]:
            return
        if self.address:
            loop("episodes.cpu", "build")(self.locate_rows())
        elif len(self.ring) and not self.numbers.is_meta:
            self.following.copy_(self._compute(*self._live()))
        self.ring.numbers[EPISODES_STALE] = False

    def spans(self, cells: Tensor) -> Spans:
        """Return how far the episode of each stored row reaches, ``[B]`` each;
        ``cells`` is contiguous int64."""
        if not self.address:
            return spans(self.numbers, cells, *self.ring.ends_at(cells))
        back, ahead = torch.empty_like(cells), torch.empty_like(cells)
        ended = torch.empty(len(cells), dtype=torch.bool, device="cpu")
        loop("episodes.cpu", "reach")(
            self.address,
            cells.data_ptr(),
            len(cells),
            back.data_ptr(),
            ahead.data_ptr(),
            ended.data_ptr(),
        )
        return Spans(back, ahead, ended)

    def whole(self, *, only_finished: bool) -> tuple[Tensor, Tensor]:
        """Return the first cell and the length of each episode whose rows are all
        stored, by lane and age."""
        if not self.address:
            lanes, longest = self._live()
            rows = by_age(lanes, longest)
            return whole(self.numbers, rows, lanes.newest, only_finished=only_finished)
        most = len(self.ring)
        first, length = (
            torch.empty(most, dtype=torch.int64, device="cpu") for _ in range(2)
        )
        count = loop("episodes.cpu", "whole")(
            self.address, only_finished, first.data_ptr(), length.data_ptr()
        )
        return first[:count].clone(), length[:count].clone()

    def segments(self) -> StoredSegments:
        """Count the segments of trajectories among the last rows: O(N)."""
        ring, rows = self.ring, self.rows
        cells = ring.cell_of(
            torch.arange(
                max(0, len(ring) - _MOST_ROWS), len(ring), device=self.numbers.device
            )
        )
        around, flagged = self.spans(cells), self._ended(cells)
        is_last = around.ahead == 0
        count, broken = torch.stack(
            (is_last.sum(), (is_last & around.ended & ~flagged).sum())
        ).tolist()
        ids = (
            count
            if self.id_key is None
            else rows.column_at(self.id_key, cells).unique().numel()
        )
        return StoredSegments(len(cells), count, broken, ids, bool(self.flags))

    def check(self) -> None:
        """Raise an AssertionError unless the numbers are those that flags, ids and
        breaks give."""
        self.refresh()
        if not len(self.ring):
            return
        lanes, longest = self._live()
        expected = self.numbers.clone()
        following = self._compute(lanes._replace(numbers=expected), longest)
        if not torch.equal(self.numbers, expected):
            raise AssertionError(
                f"the numbers of episodes are {self.numbers.tolist()}, expected {expected.tolist()}"
            )
        if not torch.equal(self.following, following):
            raise AssertionError(
                f"the next rows continue {self.following.tolist()}, expected {following.tolist()}"
            )


def refuse_episodes(saved: State | None, lanes: int, steps: int) -> None:
    """Raise a ValueError or TypeError if ``saved`` is no result of
    :meth:`Episodes.saved` for rows of this shape."""
    if saved is None:
        return
    keys = [saved["done_key"], saved["traj_key"] or []]
    if not keys[0] or not all(
        type(key) is list and all(type(name) is str for name in key) for key in keys
    ):
        raise TypeError(
            f"the saved keys of episodes are {keys}, expected lists of strings"
        )
    wanted = {
        "back": (torch.int32, torch.Size([lanes, steps])),
        "following": (torch.int64, torch.Size([2, lanes])),
    }
    for name, (dtype, shape) in wanted.items():
        numbers = saved[name]
        if (
            not isinstance(numbers, Tensor)
            or numbers.dtype is not dtype
            or numbers.shape != shape
        ):
            got = (
                kind(numbers.dtype, numbers.shape)
                if isinstance(numbers, Tensor)
                else repr(numbers)
            )
            raise ValueError(
                f"the saved numbers of episodes, {name!r}, are {got}, expected {kind(dtype, shape)}"
            )
