"""Samplers that wrap another sampler and revise its batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Sampler, Storage

from rlbuf_td.kernels.dispatch import compiled_form
from rlbuf_td.samplers.common import (
    Setting,
    StatefulSampler,
    refuse_other_storage,
    refuse_stored,
    refuse_unordered,
    reported_by,
)
from rlbuf_td.samplers.priorities import Update
from rlbuf_td.samplers.reading import Reading, Uncompiled
from rlbuf_td.samplers.row_sampler import draw_from
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import State, shown_kind, state_of
from rlbuf_td.storages.episodes import EpisodeKeys, Episodes
from rlbuf_td.storages.indexing import (
    Index,
    Info,
    coordinates,
    device_of,
)
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.observed import FEWEST_ROWS, alternate, rows_that_show
from rlbuf_td.storages.schema import Leaf, show_key
from rlbuf_td.storages.tensordict_fast import folded

_FEW_ROWS = 4  # fewer rows do not show whether trajectories are interleaved
_LANES_REMEDY = (
    "Store each environment in a lane of its own: PackedStorage(..., ndim=2), extended with [E, T]; write more steps "
    "of one trajectory at a time, with ids; or keep the handle of rb.lane(e)"
)


def _of_inner(name: str) -> Any:
    return property(
        attrgetter(f"sampler.{name}"),
        lambda self, value: setattr(self.sampler, name, value),
        doc=f"The ``{name}`` of the wrapped sampler.",
    )


RevisedBatch: TypeAlias = tuple[Tensor, Info, TensorDictBase]
"""Drawn flat rows, ``[B]`` int64; the sampler's info dict; and the revised batch, in
new memory."""


class SamplerWrapper(StatefulSampler, PrioritizedSampler):  # pyrefly: ignore [inconsistent-inheritance]
    """Abstract base of the samplers that wrap another sampler and *revise* its batches:
    change or add entries.

    TorchRL's buffers pass priorities only to a ``PrioritizedSampler``, so every wrapper
    inherits from that class, but does not call its ``__init__``, which creates C++ sum
    trees.
    """

    needs_order = needs_episodes = True
    sampler: Sampler
    # the sampler that draws the rows: one of ours, of TorchRL's or of a user's
    innermost: Any
    # whether batches have a dim for the steps of each window
    gives_windows: bool = False
    time_dim_name: str | None = None  # the name of this dim
    # whether this wrapper or one inside it gives rows goals from the episode of a drawn
    # row
    takes_goals: bool = False
    # whether a draw has looked for interleaved trajectories
    has_checked_order: bool = False
    _level: ClassVar[int]  # a wrapper can only wrap wrappers of lower levels

    def __init__(
        self, sampler: Sampler, done_key: NestedKey, traj_key: NestedKey | None
    ) -> None:
        if not isinstance(sampler, Sampler):
            raise TypeError(
                f"{type(self).__name__} wraps a sampler, got {shown_kind(sampler)}"
            )
        # isinstance is slow for ABCs
        self._inner = sampler if isinstance(sampler, SamplerWrapper) else None
        if self._inner is not None and self._inner._level >= self._level:
            order = "use SequenceSampler(NStepSampler(HindsightSampler(...)))"
            raise TypeError(
                f"{type(self).__name__} cannot wrap a {type(sampler).__name__}: {order}"
            )
        self.sampler = sampler
        self.innermost = sampler if self._inner is None else self._inner.innermost
        self.takes_goals = self.takes_goals or (
            self._inner is not None and self._inner.takes_goals
        )
        self.episode_keys = EpisodeKeys.of(done_key, traj_key)
        self._is_prioritized = isinstance(self.innermost, PrioritizedSampler)
        self.report_keys |= reported_by(sampler)

    def read(
        self,
        storage: PackedStorage,
        drawn: Tensor,
        flat: Tensor,
        owner: Tensor | None = None,
    ) -> TensorDictBase:
        """Read the rows ``flat`` for a batch of the ``drawn`` rows, and revise each one
        with the random choices for one drawn row.

        For row ``i``, this is the drawn row at position ``owner[i]``. If ``owner`` is
        None, ``flat`` holds the drawn rows.
        """
        if self._inner is None:
            return storage.gather(flat)
        return self._inner.read(storage, drawn, flat, owner)

    def _revised_keys(self) -> Iterator[NestedKey]:
        """Yield the keys of the entries that this wrapper and the wrappers inside it
        may change or add."""
        if self._inner is not None:
            yield from self._inner._revised_keys()

    def draw_batch(self, storage: PackedStorage, batch_size: int) -> RevisedBatch:
        """Draw and revise a batch."""
        flat, info = self.draw_rows(storage, batch_size)
        # compiled loops look up the trajectories of these rows without a check
        storage.refuse_unwritten(flat)
        drawn = self.batch_of(storage, flat, info)
        if not self.has_checked_order:
            self.warn_if_interleaved(storage)
        return drawn

    def draw_rows(self, storage: PackedStorage, batch_size: int) -> tuple[Tensor, Info]:
        """Draw the rows that this wrapper revises: return flat rows, ``[B]``, and the
        sampler's info dict."""
        return draw_from(self.innermost, storage, batch_size)

    def drawn_rows_of(self, batch_size: int) -> int:
        """Return how many rows :meth:`draw_rows` returns for a batch, if it finds as
        many."""
        return batch_size

    def find_draw_into(self) -> Callable[..., None] | None:
        """Return the form of :meth:`draw_rows` that writes to given memory, see
        :class:`CompiledPlan`, or None."""
        return compiled_form(self.innermost, "draw_into", "draw")

    def need_loops(self, storage: PackedStorage) -> None:
        """Raise :class:`Uncompiled` if no compiled code looks up episodes; raises the
        errors of a look-up."""
        if not self.episodes_of(storage).address:
            raise Uncompiled("episodes are looked up with torch")

    @property
    def steps_needed(self) -> int:
        """How many consecutive rows of a trajectory a useful batch needs."""
        return 1 if self._inner is None else self._inner.steps_needed

    def warn_if_interleaved(self, storage: PackedStorage) -> None:
        """Warn if trajectories are interleaved, unless this would wait for a device.

        Few rows do not tell: then the next draw looks again.
        """
        if len(storage) < _FEW_ROWS:
            return
        needed = self.steps_needed
        if needed < 2 or device_of(storage).type != "cpu":
            self.has_checked_order = True
            return
        fault = ""
        segments = storage.episodes_now().segments()
        if segments.are_interleaved(needed):
            fault = (
                f"trajectories are stored in stretches of {segments.mean:.1f} rows on average, because rows of several "
                "trajectories alternate: n-step returns, sequences and hindsight goals end with a stretch. "
            )
        elif environments_alternate(storage):
            fault = (
                "environments alternate in the rows, and no trajectory ids tell them apart: the next observation of "
                "most rows is not the observation of the following row, but that of a later one. n-step returns, "
                "sequences and hindsight goals mix the environments. "
            )
        is_enough = len(storage) >= FEWEST_ROWS or segments.rows >= storage.max_size
        self.has_checked_order = bool(fault) or is_enough
        if fault:
            warnings.warn(fault + _LANES_REMEDY, RuntimeWarning, stacklevel=2)

    def batch_of(
        self, storage: PackedStorage, flat: Tensor, info: Info
    ) -> RevisedBatch:
        """Return the result of :meth:`draw_batch` for given flat rows, ``[B]``, and
        their info dict."""
        return flat, info, self.read(storage, flat, flat)

    def episodes_of(self, storage: PackedStorage) -> Episodes:
        """Return the episodes of the rows by this wrapper's keys, up to date; raises
        the errors of a look-up."""
        storage.use_episode_keys(self.episode_keys)
        return storage.episodes_now()

    def watch(self, storage: PackedStorage) -> None:
        """Let the storage look up episodes by the keys of this wrapper and the wrappers
        inside it."""
        storage.use_episode_keys(self.episode_keys)
        if self._inner is not None:
            self._inner.watch(storage)

    # pyrefly: ignore [bad-override]
    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, Info]:
        """Draw rows; return their index, and a dict of all changed and added entries,
        ``{key: [B, ...]}``."""
        refuse_other_storage(self, storage)
        refuse_unordered(self, storage)
        refuse_stored(self, storage)
        flat, info, batch = self.draw_batch(cast("PackedStorage", storage), batch_size)
        # TorchRL's buffers merge these entries into the batch after the transforms
        for key in self._revised_keys():
            value = batch.get(key, None)
            if isinstance(value, TensorDictBase):
                names = value.keys(include_nested=True, leaves_only=True)
                info |= {
                    (*as_tuple(key), *as_tuple(name)): value.get(name) for name in names
                }
            elif value is not None:
                info[key] = value
        index = coordinates(flat, storage)
        if not self.gives_windows:
            return index, info
        report = self.report_by_window(info | {"index": index})  # pyrefly: ignore [bad-argument-type]
        return report.pop("index"), report

    def rows_per_window(self, info: Info) -> int:
        """Return L, the number of rows per window of a flat batch with this info dict;
        see :attr:`gives_windows`."""
        raise NotImplementedError

    def lay_out(self, batch: TensorDictBase, info: Info) -> tuple[TensorDictBase, Info]:
        """Return a flat batch and its info dict in the shape ``[B, L]``."""
        return folded(
            batch, self.rows_per_window(info), self.time_dim_name
        ), self.report_by_window(info)

    def report_by_window(self, info: Info) -> Info:
        """Return the entries of a flat batch's info dict in the shape ``[B, L]``."""
        length = self.rows_per_window(info)

        def folded_entry(value: Any) -> Any:
            if isinstance(value, tuple):  # coordinates, one tensor per dim
                return tuple(map(folded_entry, value))
            return value.view(-1, length, *value.shape[1:])

        return {key: folded_entry(value) for key, value in info.items()}

    def _set_sample_names(self, batch: Any) -> Any:
        if self.gives_windows and batch.ndim > 1:  # TorchRL calls this method
            batch.names = [*batch.names[:-1], self.time_dim_name]
        return batch

    def anchored(self, entries: Mapping[str, Any], update: Update) -> Update:
        """Return the update of the rows whose priorities a batch with these entries
        sets, for an update of all its rows.

        With windows, it still has a TD error for each row of the batch, and the row's
        anchor in place of the row.
        """
        if self._inner is None:
            return update
        return self._inner.anchored(entries, update)

    alpha = _of_inner("alpha")
    beta = _of_inner("beta")
    default_priority = _of_inner("default_priority")
    ran_out = _of_inner("ran_out")
    requires_shared_state = _of_inner("requires_shared_state")
    can_sample = _of_inner("can_sample")
    _remaining_batches = _of_inner("_remaining_batches")
    _rng = _of_inner("_rng")
    add = _of_inner("add")
    extend = _of_inner("extend")
    mark_update = _of_inner("mark_update")
    _empty = _of_inner("_empty")
    # pyrefly: ignore [bad-override]
    reduction = property(
        lambda self: getattr(self.sampler, "reduction", "max"),
        doc="The wrapped sampler's reduction.",
    )

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute of this wrapper; raise an AttributeError if it is a setting
        of a wrapped sampler, where it would have no effect."""
        if not hasattr(type(self), name):
            self._refuse_setting_of_inner(name)
        super().__setattr__(name, value)

    def _refuse_setting_of_inner(self, name: str) -> None:
        """Raise an AttributeError if ``name`` is a setting of a sampler inside this
        wrapper."""
        sampler = self.__dict__.get("sampler")
        path = "sampler"
        while sampler is not None:
            if isinstance(getattr(type(sampler), name, None), Setting):
                raise AttributeError(
                    f"a {type(self).__name__} has no setting {name!r}, the {type(sampler).__name__} in it has: "
                    f"set {path}.{name} of this {type(self).__name__}"
                )
            sampler = sampler.__dict__.get("sampler")
            path = f"{path}.sampler"

    def update_priority(
        self, index: Any, priority: Any, *, storage: Storage | None = None
    ) -> Any:
        """Pass priorities to the wrapped sampler, if that sampler is prioritized."""
        if self._is_prioritized:
            self.sampler.update_priority(index, priority, storage=storage)

    def snapshot(self) -> State:
        """Return the wrapped sampler's state and this wrapper's settings."""
        inner = getattr(self.sampler, "snapshot", self.sampler.state_dict)
        return {"sampler": inner(), "settings": self._settings()}

    @defer_sigint
    def load_state_dict(self, state_dict: State) -> None:
        """Restore a :meth:`state_dict`. Raises ValueError, and changes nothing, if the
        state is invalid."""
        with state_of(self):
            before = self._settings()
            settings = state_dict["settings"]
            # an older version may have fewer settings
            if not settings.keys() <= before.keys():
                expected = f"a {type(self).__name__} has {sorted(before)}"
                raise ValueError(
                    f"the saved settings are {sorted(settings)}, {expected}"
                )
            with self._set(settings):
                self.sampler.load_state_dict(state_dict["sampler"])

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"({self.sampler!r}, ", 1)


def environments_alternate(storage: PackedStorage) -> bool:
    """Whether environments alternate in the newest rows of the longest lane, see
    :func:`alternate`."""
    ring = storage.ring
    count = ring.count
    lane = int(ring.count.argmax())
    newest = np.zeros_like(count)
    newest[lane] = 1
    one = storage.gather(ring.newest_cells(newest))
    newest[lane] = min(count[lane], rows_that_show(one))
    cells = ring.newest_cells(newest)
    goes_on = storage.episodes_now().spans(cells).ahead > 0
    return alternate(storage.gather(cells), goes_on)


def reading_of(
    sampler: Sampler, storage: PackedStorage, size: int, is_stamped: bool
) -> Reading:
    """Return the compiled reading of what a sampler draws; raise :class:`Uncompiled` if
    there is none.

    Wrappers with a compiled form of their work, and of those inside them, have a method
    ``reading`` with the same arguments, except ``sampler``.

    Args:
        sampler: the sampler, or a wrapper.
        storage: the storage, whose rows have been allocated.
        size: the number of rows to read for the wrapper around this one, or of drawn
            rows.
        is_stamped: whether batches have the serials of their rows.
    """
    if not isinstance(sampler, SamplerWrapper):
        return Reading(storage, size, is_stamped)
    implemented = "read", "draw_batch", "batch_of", "drawn_rows_of", "window"
    reading = compiled_form(sampler, "reading", *implemented)
    if reading is None:
        raise Uncompiled(f"{type(sampler).__name__} has no compiled form")
    return reading(storage, size, is_stamped)


def summable(storage: PackedStorage, key: tuple[str, ...], what: str) -> Leaf:
    """Return the dtype and the shape of the rewards to sum; raise an error that names
    ``what`` needs them."""
    leaf = storage.all_rows().layout.leaf(key)
    if leaf is None or key in storage.deduplicated:
        raise KeyError(f"{what} need {show_key(key)}, which is not stored")
    if not leaf.dtype.is_floating_point:
        raise TypeError(
            f"rewards to sum must be floating point numbers, got {leaf.dtype}: "
            "cast them before the first write, reward.float()"
        )
    return leaf
