"""The episodes of a storage's rows: their numbers, and the flags and ids that tell
where episodes end.

See :mod:`rlbuf_td.kernels.episodes` for what the numbers mean. Loops note a write of
new rows after their bytes are stored and before they are published
(:meth:`Episodes.note`); with torch, the next look-up notes all rows, and whoever
removes rows or changes what follows them looks up before. Anything else that changes
rows, and a write that did not end, makes the numbers :data:`STALE`: the next look-up
builds them again from the rows.
"""

from __future__ import annotations

import json
from ctypes import addressof, memmove, string_at
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor

from rlbuf_td.kernels.dispatch import loop, record_of, uses_numba
from rlbuf_td.kernels.episodes import (
    BACK,
    BACK_OF_NEXT,
    EPISODES,
    MOST,
    STEPS,
    Lanes,
    Spans,
    note_,
    spans,
    whole,
)
from rlbuf_td.kernels.host_memory import outside_inference_mode, to_device
from rlbuf_td.kernels.serials import EPISODES_DUE
from rlbuf_td.storages.checks import State
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.numbers import SharedNumbers
from rlbuf_td.storages.schema import SchemaError, kind, show_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlbuf_td.storages.layout import RowLayout
    from rlbuf_td.storages.memory import HeadFile
    from rlbuf_td.storages.ring import Ring
    from rlbuf_td.storages.rows import Rows
    from rlbuf_td.storages.schema import Leaf

Key = tuple[str, ...]
DONE_KEY: Key = ("next", "done")
TRAJ_KEY: Key = ("collector", "traj_ids")
#: What a look-up must do before: nothing; note new rows; build the numbers again; build
# them without those before.
CURRENT, BEHIND, STALE, NEW = range(4)
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
                    f"done flags {self.done_key} must be bool, got {got} per row"
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
        memmove(addressof(numbers.values) + 8 * _TEXT, text, len(text))
        numbers[_LENGTH] = len(text)
        self.pair, self._replaced = pair, numbers[_REPLACED] + 1
        numbers[_REPLACED] = self._replaced

    def follow(self) -> None:
        """Take the pair that another process has set."""
        self._replaced = self._numbers[_REPLACED]
        at, length = addressof(self._numbers.values) + 8 * _TEXT, self._numbers[_LENGTH]
        self.pair = EpisodeKeys()
        if length:
            done_key, traj_key = json.loads(string_at(at, length))
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
            #: What the next rows continue; on the host, it lies with the ring.
            self.following = to_device(ring.following, device)
        self.numbers = numbers
        self.record: np.ndarray | None = (
            self._describe() if uses_numba(device) else None
        )
        #: The address of the record that loops read; 0 where torch takes their place.
        self.address: int = 0 if self.record is None else self.record.ctypes.data
        if self.record is None and ring.noted[0] < 0:  # loops have noted all rows
            ring.noted[:] = ring.written

    def _describe(self) -> np.ndarray:
        """Return the record that loops read."""
        rows, places = self.rows, self.rows.layout.places
        self._extents = rows.extents[[places[key] for key in self.flags], :2].copy()
        name, size = (
            (0, 0) if self.id_key is None else rows.extents[places[self.id_key], :2]
        )
        memory = {
            "numbers": self.numbers.data_ptr(),
            "following": self.following.data_ptr(),
        }
        memory |= {"following_after": self.ring.following_after.ctypes.data}
        memory |= {"flags": self._extents.ctypes.data}
        memory |= {
            "tail": self.ring.tail.ctypes.data,
            "written": self.ring.written.ctypes.data,
        }
        row_bytes = rows.flat.stride(0) * rows.flat.element_size()
        shape = {"steps": rows.steps, "lanes": self.lanes, "row_bytes": row_bytes}
        return record_of(
            EPISODES,
            **memory,
            **shape,
            flag_count=len(self.flags),
            id_offset=name,
            id_size=size,
        )

    def locate_rows(self) -> int:
        """Store where the rows lie now, which loops that write numbers read; return
        :attr:`address`."""
        if self.record is not None:
            self.record["rows"] = self.rows.flat.data_ptr()
        return self.address

    @property
    def steps(self) -> int:
        """T, the slots of a lane."""
        return self.rows.steps

    @property
    def lanes(self) -> int:
        """E, the number of lanes."""
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.following.nbytes

    def _numbers(self) -> Lanes:
        ring = self.ring
        tail, written, noted = (
            to_device(each, self.numbers.device)
            for each in (ring.tail, ring.written, ring.noted)
        )
        return Lanes(
            self.numbers, self.following, tail, written, noted, int(ring.count.max())
        )

    # -- writes

    def note(
        self,
        lanes: np.ndarray,
        first: np.ndarray,
        counts: np.ndarray,
        skips: np.ndarray,
    ) -> None:
        """Note new rows, whose bytes are stored; :meth:`Ring.publish` must follow.

        Args:
            lanes: ``[n]`` int64, each lane once.
            first: ``[n]`` int64, the serial of the first new row of each lane.
            counts: ``[n]`` int64, the number of its new rows, at most T.
            skips: ``[n]`` bool, whether the rows just before ``first`` have never been
                stored.
        """
        if self.record is None:
            return self.mark(BEHIND)
        rows = np.stack((lanes, first, counts, skips))
        loop("episodes.cpu", "note_rows")(
            self.locate_rows(), len(lanes), rows.ctypes.data
        )

    def prepare(self, lanes: np.ndarray, counts: np.ndarray) -> None:
        """Note all rows if ``counts`` new ones of these lanes will replace rows that
        have not been noted."""
        ring = self.ring
        if (
            self.record is None
            and (ring.noted[lanes] < ring.written[lanes] + counts - ring.steps).any()
        ):
            self.catch_up()

    def end(self, lane: int | slice = slice(None)) -> None:
        """Let the next row of a lane (default: of each) begin an episode: a break."""
        if self.ring.numbers[EPISODES_DUE] == NEW:
            self.refresh()
        self.catch_up()
        self._set_noted()
        self.following[BACK_OF_NEXT, lane] = -1

    def catch_up(self) -> None:
        """Note all rows, before some are removed, or before what follows them is
        changed."""
        ring = self.ring
        if (
            ring.numbers[EPISODES_DUE] != NEW
            and ((ring.noted >= 0) & (ring.noted < ring.written)).any()
        ):
            self.refresh()

    def mark(self, state: int) -> None:
        """Let the next look-up do what :data:`BEHIND`, :data:`STALE` or :data:`NEW`
        says."""
        self.ring.numbers[EPISODES_DUE] = max(self.ring.numbers[EPISODES_DUE], state)

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
            return self.mark(NEW)
        back, following = saved["back"], saved["following"]
        self.numbers[:, : back.shape[1], BACK] = back.to(self.numbers.device)
        self.following.copy_(following)
        self.following[BACK_OF_NEXT].clamp_(-1, MOST)
        self._set_noted()
        self.ring.numbers[EPISODES_DUE] = STALE

    def _set_noted(self) -> None:
        """Set up to where rows have been noted: all of them, or -1 where loops note
        each write."""
        self.ring.noted[:] = self.ring.written if self.record is None else -1

    def _build(self, *, is_new: bool) -> None:
        """Compute the numbers from flags, ids and breaks: O(T * E).

        ``is_new``: the rows have no numbers yet. Episodes of the oldest rows are not
        whole if rows before are gone.
        """
        if is_new:
            self.numbers.zero_()
            ring, device = self.ring, self.numbers.device
            oldest = to_device(ring.tail % self.rows.steps, device)
            # MOST: rows are gone
            before = to_device(
                np.where(ring.tail > 0, MOST, 0).astype(np.int32), device
            )
            self.numbers[torch.arange(len(oldest), device=device), oldest, BACK] = (
                before
            )
            self.following[BACK_OF_NEXT] = to_device(
                np.where(ring.written > ring.tail, 0, -1), device
            )
            self._set_noted()
        if self.record is not None and self.ring.noted[0] < 0:
            loop("episodes.cpu", "build")(self.locate_rows())
        elif len(self.ring):
            shape = self.rows.steps, self.lanes
            note_(self._numbers(), self._ended().view(shape), self._names().view(shape))
            self._set_noted()

    def _ended(self) -> Tensor:
        """Return whether each row ends its episode, ``[T * E]`` bool."""
        columns, dims = self.rows.unpack(self.rows.matrix), 1 + len(self.rows.lanes)
        found = [
            columns.get(key).flatten(0, dims - 1).reshape(self.rows.cells, -1)
            for key in self.flags
        ]
        if not found:
            return torch.zeros(
                self.rows.cells, dtype=torch.bool, device=self.numbers.device
            )
        return torch.cat(found, 1).any(1)

    def _names(self) -> Tensor:
        """Return the id of each row's episode, ``[T * E]`` int64."""
        if self.id_key is None:
            return torch.zeros(
                self.rows.cells, dtype=torch.int64, device=self.numbers.device
            )
        return (
            self.rows.unpack(self.rows.matrix)
            .get(self.id_key)
            .reshape(self.rows.cells)
            .long()
        )

    # -- look-ups, after `refresh`

    def refresh(self) -> None:
        """Prepare look-ups after writes and edits."""
        state = self.ring.numbers[EPISODES_DUE]
        if state == CURRENT:
            return
        self._build(is_new=state == NEW)
        self.ring.numbers[EPISODES_DUE] = CURRENT

    def spans(self, cells: Tensor) -> Spans:
        """Return how far the episode of each stored row reaches, ``[B]`` each;
        ``cells`` is contiguous int64."""
        if self.record is None:
            return spans(self.numbers, cells, *self.ring.ends_at(cells))
        count, integer, flag = len(cells), torch.int64, torch.bool
        found = Spans(
            *(
                torch.empty(count, dtype=dtype, device="cpu")
                for dtype in (integer, integer, flag, flag)
            )
        )
        loop("episodes.cpu", "reach")(
            self.address, cells.data_ptr(), count, *(each.data_ptr() for each in found)
        )
        return found

    def whole(self, *, only_finished: bool) -> tuple[Tensor, Tensor]:
        """Return the first cell and the length of each episode whose rows are all
        stored, by lane and age."""
        if self.record is None:
            return whole(self._numbers(), only_finished)
        most = len(self.ring)
        first, length = (
            torch.empty(most, dtype=torch.int64, device="cpu") for _ in range(2)
        )
        found = loop("episodes.cpu", "whole")(
            self.address, only_finished, first.data_ptr(), length.data_ptr()
        )
        return first[:found].clone(), length[:found].clone()

    def segments(self) -> StoredSegments:
        """Count the segments of trajectories among the last rows: O(N)."""
        ring, rows = self.ring, self.rows
        cells = ring.cell_of(
            torch.arange(
                max(0, len(ring) - _MOST_ROWS), len(ring), device=self.numbers.device
            )
        )
        found, flagged = self.spans(cells), self._ended()[cells]
        is_last = found.ahead == 0
        count, broken = torch.stack(
            (is_last.sum(), (is_last & found.ended & ~flagged).sum())
        ).tolist()
        ids = (
            count
            if self.id_key is None
            else rows.column_at(self.id_key, cells).unique().numel()
        )
        return StoredSegments(len(cells), count, broken, ids, bool(self.flags))

    def check(self) -> None:
        """Raise an AssertionError unless the invariant holds."""
        self.refresh()
        ring = self.ring
        for lane in range(ring.lanes):
            serial = np.arange(ring.tail[lane], ring.written[lane])
            if not len(serial):
                continue
            back, left = (
                self.numbers[lane].cpu().numpy()[serial % ring.steps].T.astype(np.int64)
            )
            steps, begins = back & STEPS, (back & STEPS) == 0
            last = np.where(left > 0, serial + left - 1, ring.written[lane] - 1)
            following = 0 if left[-1] else min(steps[-1] + 1, MOST)
            for holds, what in (
                (
                    begins[1:] | (np.diff(steps) == 1) | (steps[1:] == MOST),
                    "a row does not follow the one before",
                ),
                (begins[back < 0], "a break does not begin an episode"),
                (
                    np.where(
                        begins[1:], last[:-1] == serial[:-1], last[:-1] == last[1:]
                    ),
                    "a row has another last row",
                ),
                (
                    np.diff((left == 0).astype(np.int8)) >= 0,
                    "an episode goes on that is not the newest",
                ),
                (
                    int(self.following[BACK_OF_NEXT, lane]) in (-1, following),
                    "the next row continues another episode",
                ),
            ):
                if not np.all(holds):
                    raise AssertionError(
                        f"lane {lane}: {what}: {back.tolist()}, {left.tolist()}"
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
        found = saved[name]
        if (
            not isinstance(found, Tensor)
            or found.dtype is not dtype
            or found.shape != shape
        ):
            got = (
                kind(found.dtype, found.shape)
                if isinstance(found, Tensor)
                else repr(found)
            )
            raise ValueError(
                f"the saved numbers of episodes, {name!r}, are {got}, expected {kind(dtype, shape)}"
            )
