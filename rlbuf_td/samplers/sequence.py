"""Sequences of transitions for recurrent agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NoReturn, TypeAlias, cast
from weakref import ref

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from rlbuf_td.kernels.batch import WINDOWS
from rlbuf_td.kernels.dispatch import (
    backend_of,
    loop,
    record_of,
)
from rlbuf_td.kernels.wrappers import Windows, expand
from rlbuf_td.kernels.wrappers.records import Expanded, WindowShape
from rlbuf_td.samplers.common import EMPTY, permutation, setting
from rlbuf_td.samplers.priorities import Update
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.reading import (
    FLAG,
    WEIGHT,
    BatchSlot,
    BatchSlots,
    Named,
    Reading,
    Uncompiled,
)
from rlbuf_td.samplers.row_sampler import draw_from
from rlbuf_td.samplers.wrapper import (
    RevisedBatch,
    SamplerWrapper,
    reading_of,
)
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import State, fraction, one_of, optional, whole
from rlbuf_td.storages.episodes import DONE_KEY, TRAJ_KEY
from rlbuf_td.storages.indexing import (
    Info,
    coordinates,
    device_of,
    flat_rows,
    row_count,
    written_rows,
)
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.ring import LiveRows
from rlbuf_td.storages.schema import SchemaError, show_key
from rlbuf_td.storages.tensordict_fast import leaf_of

Boundary: TypeAlias = Literal["pad", "shift", "strict"]
# boundary="strict": the largest number of repeated draws until all windows fit
_ROUNDS = 200
_MOST_ROWS = 1 << 20  # rows whose trajectories are looked up at once


class SequenceSampler(SamplerWrapper):
    """Expands each drawn row, the *anchor*, to a window: ``burn_in`` rows, then
    ``length`` rows from the anchor on.

    A window never crosses the beginning or end of a trajectory, unless
    ``across_episodes`` is set. A batch of B windows has the shape ``[B * L]``, where
    ``L = burn_in + length`` is the length of a window. Each batch has three additional
    entries:

    - ``"mask"``, ``[B * L]`` bool: False for padding, which copies the first or last
      row of the trajectory.
    - ``"burn_in_mask"``, ``[B * L]`` bool: True for each window's first ``burn_in``
      rows, which a loss should ignore.
    - ``"anchor_index"``, ``[B * L]`` or, if ``ndim > 1``, ``[B * L, ndim]``: the index
      of the window's anchor.

    All rows of a window have the anchor's ``"priority_weight"`` and hindsight goal. So
    that TorchRL's modules treat each window separately, flags that the rows have are
    changed: ``"is_init"`` becomes True at the first row and at the first unpadded row
    of each window; ``truncated`` and ``done`` become True at the last unpadded row.

    ``batch.view(-1, L)`` has one window per row. TorchRL's ``split_trajectories`` also
    makes trajectories of padding: use ``split_trajectories(batch[batch["mask"]])``,
    with done flags and without trajectory ids.

    With ``output_layout="batch_time"``, a batch and all its entries have the shape
    ``[B, L]``, as recurrent networks take it; ``batch_size`` still counts ``B * L``
    rows. The batch also has ``slice_end_key``, ``[B, L, 1]`` bool: True at the last
    unpadded row of each window. The flags ``truncated`` and ``done`` then stay those of
    the environment.

    **Chunks.** With ``stride=length``, trajectories are divided into windows that do
    not overlap, and a wrapped :class:`MinibatchSampler` draws each window once per
    epoch: each stored row is then exactly once per epoch a row with
    ``mask & ~burn_in_mask``. The last chunk of a trajectory is padded, and the last
    batch of an epoch may have fewer windows (``drop_last`` omits it). Any write, and
    any change of the trajectories, restarts the epochs.

    **Windows across episodes**, as world models (DreamerV3) take them: with
    ``across_episodes=True``, a window is L consecutive steps of a lane, whether or not
    episodes end there; padding is only before the oldest and after the newest row of
    the lane. ``"is_init"`` is True at the first row of a window and of each episode;
    batches get this entry if the rows have none. ``boundary``, ``burn_in`` and
    ``stride`` mean the same as above, with the lane in place of the trajectory. Rows
    ``[T]`` are one lane: give each environment a lane of its own.

    **Recurrent states** that are stored with the rows are entries like any other. A
    network starts a window from the state in its first row, as TorchRL's ``LSTMModule``
    does in recurrent mode.

    Args:
        sampler: draws the anchors; may be a sampler of rows, a
            :class:`HindsightSampler` or an :class:`NStepSampler`.
        length: the number of rows from the anchor on, including the anchor, at least 1.
        burn_in: the number of rows before the anchor, at least 0.
        boundary: what happens if the trajectory has fewer than ``length`` rows from the
            anchor on. ``"pad"`` repeats the trajectory's last row. ``"shift"`` moves
            the window to earlier rows, and pads only if the trajectory has fewer than
            ``length`` rows. ``"strict"`` draws other anchors until every window fits
            into its trajectory, including its burn-in.
        stride: ``None``: any row can be an anchor. A whole number from 1 to ``length``:
            the anchors are each trajectory's first stored row, and every ``stride``-th
            row from there on. This needs ``boundary="pad"`` and a
            :class:`MinibatchSampler`, or one within a :class:`HindsightSampler` or an
            :class:`NStepSampler`.
        priority: how to compute the anchor's priority from the magnitudes of the
            window's TD errors, without padding and burn-in. ``"max"`` takes the largest
            magnitude; ``"mix"`` takes ``eta * max + (1 - eta) * mean``, as in R2D2.
        eta: the weight of the largest magnitude in ``"mix"``, 0 to 1; may be set at any
            time.
        init_key: the key of the flag that marks the first row of a trajectory.
        output_layout: ``"flat"`` or ``"batch_time"``, see above.
        across_episodes: whether windows go on into the next episode of the lane, see
            above.
        slice_end_key: the key of the flags at the last rows, with ``"batch_time"``.
        time_dim_name: the name of the second dim of a batch, with ``"batch_time"``;
            ``None``: no name.
        done_key, traj_key: the keys of the done flag and the trajectory id, as for
            :class:`TrajectoryIndex`.

    Raises:
        ValueError: an argument is out of range; (when sampling) ``batch_size`` is not a
            multiple of ``L``, or with ``drop_last`` greater than the number of rows in
            all windows.
        TypeError: ``sampler`` is no sampler, another :class:`SequenceSampler`, or, with
            ``stride``, draws rows repeatedly; with ``across_episodes``, it is or wraps
            a :class:`HindsightSampler`.
        KeyError: (at the first draw) neither done flags nor trajectory ids are stored.
        SchemaError: (at the first write) the rows have an entry ``"mask"``,
            ``"burn_in_mask"`` or ``"anchor_index"``.
        RuntimeError: (when sampling with ``"strict"``) repeated draws do not find
            enough windows that fit.

    Warns:
        RuntimeWarning: (at the first draw, on the CPU) rows of several trajectories
            alternate.

    Cost: O(B * L); with ``stride``, also O(N) for N rows at the first draw after a
    write. With ``"strict"``, draws wait for the device.
    Source: Kapturowski et al., Recurrent Experience Replay in Distributed RL (R2D2),
    ICLR 2019, section 2.3.

    **Priorities.** In this package's buffer, ``update_tensordict_priority`` takes a
    whole batch and updates the anchors. TorchRL's buffers update each window's first
    row after burn-in, which may not be the anchor with ``boundary="shift"``.

    **Arguments of TorchRL's** ``SliceSampler``. Pass ``slice_len`` as ``length`` and
    ``end_key`` as ``done_key``. The batch size determines ``num_slices``. ``boundary``
    replaces ``strict_length``, ``pad_output`` and ``span``, whose defaults correspond
    to ``"strict"``; the other arguments are unnecessary. Where TorchRL has
    ``("collector", "mask")``, batches have ``"mask"``.

    Example:
        >>> from rlbuf_td import MinibatchSampler, PackedStorage, ReplayBuffer, UniformSampler
        >>> from tensordict import TensorDict
        >>> sampler = SequenceSampler(UniformSampler(unique=True), length=2, burn_in=1)
        >>> rb = ReplayBuffer(storage=PackedStorage(10), sampler=sampler, batch_size=9)
        >>> done = torch.tensor([False, False, True])
        >>> _ = rb.extend(TensorDict({"x": torch.arange(3), "next": {"done": done}}, [3]))
        >>> batch = rb.sample().view(3, 3)  # three windows of three rows
        >>> batch = batch[batch["anchor_index"][:, 0].argsort()]
        >>> batch["x"].tolist(), batch["mask"].tolist()[0]
        ([[0, 0, 1], [0, 1, 2], [1, 2, 2]], [False, True, True])
        >>> chunks = SequenceSampler(MinibatchSampler(shuffle=False), 2, stride=2, output_layout="batch_time")
        >>> rb = ReplayBuffer(storage=rb.storage, sampler=chunks, batch_size=2)
        >>> [(batch["x"].tolist(), batch["mask"].tolist()) for batch in rb]
        [([[0, 1]], [[True, True]]), ([[2, 2]], [[True, False]])]
    """

    _level = 3
    report_keys = frozenset({"mask", "burn_in_mask", "anchor_index"})
    state_keys = ("eta",)
    _shown = (
        "length",
        "burn_in",
        "boundary",
        "stride",
        "priority_rule",
        "across_episodes",
    )
    length: int = setting(whole(1), is_fixed=True)
    burn_in: int = setting(whole(0), is_fixed=True)
    boundary: Boundary = setting(one_of("pad", "shift", "strict"), is_fixed=True)
    stride: int | None = setting(optional(whole(1)), is_fixed=True)
    eta: float = setting(fraction)
    # with ``stride``: of which trajectories the anchors are, and the anchors
    _divided: tuple[Any, Tensor] | None = None

    def __init__(
        self,
        sampler: Sampler,
        length: int,
        *,
        burn_in: int = 0,
        boundary: Boundary = "pad",
        stride: int | None = None,
        priority: Literal["max", "mix"] = "max",
        eta: float = 0.9,
        init_key: NestedKey = "is_init",
        done_key: NestedKey = DONE_KEY,
        traj_key: NestedKey | None = TRAJ_KEY,
        output_layout: Literal["flat", "batch_time"] = "flat",
        slice_end_key: NestedKey = ("collector", "slice_end"),
        time_dim_name: str | None = "time",
        across_episodes: bool = False,
    ) -> None:
        super().__init__(sampler, done_key, traj_key)
        self.across_episodes = one_of(True, False)("across_episodes", across_episodes)
        if self.across_episodes and self.takes_goals:
            reason = "all rows of a window get one goal, of the anchor's episode: leave out across_episodes"
            raise TypeError(
                f"across_episodes=True cannot be combined with a HindsightSampler: {reason}"
            )
        self.output_layout = one_of("flat", "batch_time")(
            "output_layout", output_layout
        )
        self.gives_windows = output_layout == "batch_time"
        self.slice_end_key = as_tuple(slice_end_key)
        self.time_dim_name = time_dim_name
        self.length = length
        self.burn_in = burn_in
        self.boundary = boundary
        self.stride = stride
        self._refuse_stride()
        self.priority_rule = one_of("max", "mix")("priority", priority)
        self.eta = eta
        beside = self.episode_keys.done_key[:-1]
        ends = (
            (None, None)
            if self.gives_windows
            else ((*beside, "truncated"), (*beside, "done"))
        )
        self.flag_keys: tuple[tuple[str, ...] | None, ...] = (as_tuple(init_key), *ends)

    def _refuse_stride(self) -> None:
        """Raise an error if the windows' anchors are given by a stride, and another
        argument does not allow this."""
        if self.stride is None:
            return
        if self.stride > self.length:
            gap = f"stride={self.stride} leaves out rows between windows of length={self.length}"
            raise ValueError(f"{gap}: use a stride from 1 to {self.length}")
        if self.boundary != "pad":
            reason = f'boundary="{self.boundary}" would move or replace windows'
            raise ValueError(f'stride needs boundary="pad": {reason}')
        kind = type(self.innermost)
        if not hasattr(kind, "draw_numbers"):
            needs = "stride needs a sampler that draws each window once per epoch"
            raise TypeError(f"{needs}: use a MinibatchSampler, got {kind.__name__}")

    window = property(
        lambda self: self.burn_in + self.length, doc="The number of rows in a window."
    )

    @property
    def steps_needed(self) -> int:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        return max(self.window, super().steps_needed)

    def draw_rows(self, storage: PackedStorage, batch_size: int) -> tuple[Tensor, Info]:
        """Draw the anchors of a batch; return them and the sampler's info dict."""
        if not row_count(storage):
            raise RuntimeError(EMPTY)
        # raises an error if the rows do not tell where trajectories end
        self.episodes_of(storage)
        count = self.drawn_rows_of(batch_size)
        if self.stride is not None:
            anchors = self.anchors(storage)
            return anchors[
                self.innermost.draw_numbers(storage, len(anchors), count, "windows")
            ], {}
        anchors, info = super().draw_rows(storage, count)
        return (
            (anchors, info)
            if self.boundary != "strict"
            else self._fitting(storage, anchors, info)
        )

    def find_draw_into(self) -> Callable[..., None] | None:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        draw_into = super().find_draw_into()
        if self.stride is not None or draw_into is None:
            return None
        if self.boundary == "strict":
            return partial(self._draw_fitting_into, draw_into)
        return draw_into

    def _draw_fitting_into(
        self,
        draw_into: Callable[..., None],
        storage: PackedStorage,
        live: LiveRows,
        flat: Tensor,
        report: dict[str, Tensor],
        scratch: Tensor,
    ) -> None:
        """Draw as :meth:`draw_rows` does with ``boundary="strict"``, to the memory of a
        batch."""
        draw_into(storage, live, flat, report, scratch)
        other = torch.empty_like(flat)
        other_report = {name: torch.empty_like(entry) for name, entry in report.items()}
        weight = report.get("priority_weight")
        order_at = 0
        replace = loop("wrappers.cpu", "replace_short")
        windows = (
            self.episodes_of(storage).address,
            self.length,
            self.burn_in,
            int(self.across_episodes),
        )
        places = (
            flat.data_ptr(),
            len(flat),
            storage.ring.longest * storage.ring.lanes,
            other.data_ptr(),
        )
        weights = (
            (0, 0)
            if weight is None
            else (weight.data_ptr(), other_report["priority_weight"].data_ptr())
        )
        for rounds in range(_ROUNDS):
            short = replace(*windows, *places, order_at, *weights)
            if short < 0:
                storage.refuse_unwritten(flat)
            if not short:
                return self._weigh_again_(flat, report) if rounds else None
            draw_into(storage, live, other, other_report, scratch)
            order = permutation(len(flat), self._rng, flat.device)
            order_at = order.data_ptr()
        self._refuse_trajectories()

    def batch_of(
        self, storage: PackedStorage, flat: Tensor, info: Info
    ) -> RevisedBatch:
        """Expand the anchors at flat indices ``flat`` to windows.

        Even with ``boundary="strict"``, no anchor is replaced.
        """
        anchors = flat.contiguous()
        window = self.window
        rows = self._expanded(storage, anchors)
        owner = None
        if self.takes_goals:
            number = torch.arange(len(anchors), device=anchors.device)
            owner = number.repeat_interleave(window)
        batch = self.read(storage, anchors, rows.flat, owner)
        added = self._mark_(batch, rows.first, rows.last)
        info = {key: value.repeat_interleave(window, 0) for key, value in info.items()}
        info |= added
        info |= {"mask": rows.mask, "burn_in_mask": rows.burn_in_mask}
        info["anchor_index"] = rows.anchors
        return rows.flat, info, batch

    def rows_per_window(self, info: Info) -> int:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        return self.window

    def lay_out(self, batch: TensorDictBase, info: Info) -> tuple[TensorDictBase, Info]:
        """Return a flat batch and its info dict in the shape ``[B, L]``."""
        batch, info = super().lay_out(batch, info)
        if batch.get(self.slice_end_key, None) is not None:
            raise SchemaError(
                f"the rows have an entry {show_key(self.slice_end_key)}: choose another slice_end_key"
            )
        batch.set(self.slice_end_key, info[self.slice_end_key])
        return batch, info

    def report_by_window(self, info: Info) -> Info:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`; adds the flags at the
        last rows of windows."""
        info = super().report_by_window(info)
        end = info["mask"].clone()
        end[:, :-1] &= ~info["mask"][:, 1:]
        return info | {self.slice_end_key: end[..., None]}

    def anchors(self, storage: PackedStorage) -> Tensor:
        """With ``stride``: return all rows that are anchors, ``[n]`` int64, in storage
        order.

        If these have changed since the last call, the wrapped sampler restarts its
        epochs.
        """
        # a weak reference: a buffer that is closed frees its rows
        seen = ref(self.episodes_of(storage)), storage.revision
        if self._divided is None or self._divided[0] != seen:
            rows = written_rows(storage).split(_MOST_ROWS)
            anchors = torch.cat(
                [
                    part[self._reach(storage, part)[0] % (self.stride or 1) == 0]
                    for part in rows
                ]
            )
            if self._divided is not None and not torch.equal(anchors, self._divided[1]):
                self.innermost.restart()
            self._divided = seen, anchors
        return self._divided[1]

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether the wrapped sampler can draw the anchors of a batch."""
        if self.stride is not None and self.innermost.drop_last and row_count(storage):
            return len(
                self.anchors(cast("PackedStorage", storage))
            ) >= self.drawn_rows_of(batch_size)
        return self.sampler.can_sample(storage, self.drawn_rows_of(batch_size))

    def drawn_rows_of(self, batch_size: int) -> int:
        """Return the number of windows in a batch; ValueError if the batch size is not
        a multiple of ``window``."""
        if batch_size % self.window:
            window = f"length={self.length}"
            if self.burn_in:
                window = (
                    f"burn_in + length = {self.burn_in} + {self.length} = {self.window}"
                )
            remedy = f"for 32 sequences use {32 * self.window}"
            raise ValueError(
                f"batch_size must be a multiple of {window}, got {batch_size}; {remedy}"
            )
        return batch_size // self.window

    def _fitting(
        self, storage: PackedStorage, anchors: Tensor, info: Info
    ) -> tuple[Tensor, Info]:
        """Replace anchors whose window does not fit into its trajectory by others,
        which are drawn until all fit."""
        for rounds in range(_ROUNDS):
            storage.refuse_unwritten(anchors)  # of a user's sampler
            back, ahead = self._reach(storage, anchors)
            fits = (back >= self.burn_in) & (ahead >= self.length - 1)
            if bool(fits.all()):
                if rounds:
                    self._weigh_again_(anchors, info)
                return anchors, info
            others, other_info = draw_from(self.innermost, storage, len(anchors))
            # A stratified draw fills a position from one segment, where perhaps no
            # window fits: shuffle the positions.
            order = permutation(len(anchors), self._rng, anchors.device) % len(others)
            anchors = torch.where(fits, anchors, others[order])
            for key, value in info.items():
                info[key] = torch.where(
                    fits.view(-1, *[1] * (value.ndim - 1)),
                    value,
                    other_info[key][order],
                )
        self._refuse_trajectories()

    def _refuse_trajectories(self) -> NoReturn:
        window = f"a window of {self.window} rows within its {'lane' if self.across_episodes else 'trajectory'}"
        raise RuntimeError(
            f"hardly any anchor had {window}: use shorter windows, or boundary='pad'"
        )

    def _reach(self, storage: PackedStorage, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many rows that a window may have precede and follow each row,
        ``[B]`` each."""
        if self.across_episodes:
            return storage.ring.reach(rows)
        return self.episodes_of(storage).spans(rows)[:2]

    def _weigh_again_(self, anchors: Tensor, info: Info) -> None:
        """Give anchors that come from several draws the weights of one draw."""
        if isinstance(self.innermost, Prioritized):
            self.innermost.weigh_batch_(anchors, info["priority_weight"])

    def launches(self, storage: PackedStorage) -> bool:
        """Whether kernels draw rows and list those of windows on a GPU."""
        draws = getattr(self.sampler, "launches", None)
        is_drawn = draws is not None and draws(storage)
        # others are drawn again, or listed, with torch
        is_plain = self.stride is None and self.boundary != "strict"
        return is_drawn and is_plain and storage.all_rows().is_launched

    def _expanded(self, storage: PackedStorage, anchors: Tensor) -> Expanded:
        """Return the rows of the windows."""
        ring = storage.ring
        ndim = storage.ndim
        episodes = self.episodes_of(storage)
        shifts = self.boundary == "shift"
        crosses = self.across_episodes
        shape = WindowShape(self.length, self.burn_in, shifts, crosses)
        serials = ring.for_kernels()
        is_paired = ndim == 2
        if serials is not None and ndim <= 2 and storage.all_rows().is_launched:
            from rlbuf_td.kernels.wrappers import triton

            numbers = episodes.numbers
            return triton.expand(anchors, numbers, serials, shape, has_pairs=is_paired)
        reach = self._reach(storage, anchors)
        rows = expand(anchors, reach, ring.steps, ring.lanes, shape)
        if crosses:
            begins = episodes.spans(rows.flat).back == 0
            rows = rows._replace(first=rows.first | (rows.mask & begins))
        index = coordinates(rows.anchors, storage)
        index = torch.stack(index, -1) if isinstance(index, tuple) else index
        return rows._replace(anchors=index)

    def _mark_(
        self, batch: TensorDictBase, first: Tensor, last: Tensor
    ) -> dict[Any, Tensor]:
        """Set the flags at the ends of each window of a batch; ``first`` and ``last``,
        ``[B * L]`` bool, are True there.

        Across episodes, return "is_init" if the rows have no such flag.
        """
        for key, flag in zip(self.flag_keys, (first, last, last), strict=True):
            stored = None if key is None else leaf_of(batch, key)
            if stored is not None:
                stored |= flag.view(-1, *[1] * (stored.ndim - 1))
        init_key = cast("tuple[str, ...]", self.flag_keys[0])
        if not self.across_episodes or leaf_of(batch, init_key) is not None:
            return {}
        return {init_key if len(init_key) > 1 else init_key[0]: first.reshape(-1, 1)}

    def reading(self, storage: PackedStorage, size: int, is_stamped: bool) -> Reading:
        """See ``reading_of`` in ``wrapper.py``."""
        layout = storage.all_rows().layout
        init_key = cast("tuple[str, ...]", self.flag_keys[0])
        flags = {leaf.dtype for leaf in layout.leaves if leaf.key in self.flag_keys}
        self.need_loops(storage)
        if storage.deduplicated.keys() & {*self.flag_keys}:
            raise Uncompiled("flags are deduplicated")
        if not flags <= {torch.bool}:
            raise Uncompiled(f"flags are {flags}")
        if self.across_episodes and len(init_key) > 1 and init_key not in layout.places:
            reason = f"{show_key(init_key)}, which the rows lack, is added with torch"
            raise Uncompiled(reason)
        inner = reading_of(self.sampler, storage, size * self.window, is_stamped)
        return _WindowReading(self, storage, size, is_stamped, inner)

    def _revised_keys(self) -> Iterator[NestedKey]:
        yield from super()._revised_keys()
        yield from (key for key in self.flag_keys if key is not None)

    def anchored(self, entries: Mapping[str, Any], update: Update) -> Update:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`. Raises ValueError if
        a window is incomplete."""
        mask, burn_in_mask, anchors = map(
            entries.get, ("mask", "burn_in_mask", "anchor_index")
        )
        if mask is None or burn_in_mask is None or anchors is None:
            needed = "'mask', 'burn_in_mask' and 'anchor_index'"
            raise KeyError(f"a batch of sequences needs its {needed} to set priorities")
        window = self.burn_in + self.length
        rows = update.td_error.numel()
        if rows % window:
            fault = f"{rows} TD errors are not whole windows of {window} rows"
            raise ValueError(
                f"{fault}: update priorities with the batch as it was sampled"
            )
        eta = 1.0 if self.priority_rule == "max" else self.eta
        windows = Windows(mask, burn_in_mask, window, eta)
        return update._replace(index=anchors, windows=windows)

    def update_priority(
        self, index: object, priority: object, *, storage: Storage | None = None
    ) -> None:
        """Set the priority of each window's first row after burn-in.

        If ``index`` does not consist of whole windows, or ``storage`` is None, set the
        priority of each row instead.
        """
        if not self._is_prioritized:
            return
        if (
            storage is not None
            and isinstance(priority, Tensor)
            and priority.numel() > 1
        ):
            flat = flat_rows(index, storage, device_of(storage))
            if flat.numel() == priority.numel() and flat.numel() % self.window == 0:
                rows = flat.view(-1, self.window)
                learned = self._learned(rows, storage)
                if learned is not None:
                    anchors = rows[:, self.burn_in, None].expand_as(rows)
                    entries = {
                        "mask": learned,
                        "burn_in_mask": torch.zeros_like(learned),
                        "anchor_index": anchors,
                    }
                    update = Update(anchors, priority)
                    update = SequenceSampler.anchored(self, entries, update).reduced()
                    index = update.index
                    priority = update.td_error
        super().update_priority(index, priority, storage=storage)

    def _learned(self, rows: Tensor, storage: Storage) -> Tensor | None:
        """Return which rows of windows ``[B, L]`` are neither burn-in nor padding; None
        if these are no windows.

        A window's rows follow each other in one lane, and its padding repeats the last
        one. On other devices than the CPU, rows are taken for windows: a check would
        wait for the device.
        """
        lanes = storage.shape[1:].numel() if storage.ndim > 1 else 1
        cells = len(storage)
        if not cells:
            return None
        step = (rows[:, 1:] - rows[:, :-1]) % cells
        if backend_of(rows) == "numba" and not bool(
            ((step == 0) | (step == lanes % cells)).all()
        ):
            return None
        learned = torch.ones_like(rows, dtype=torch.bool)
        learned[:, self.burn_in + 1 :] = step[:, self.burn_in :] != 0
        learned[:, : self.burn_in].fill_(False)
        return learned

    @defer_sigint
    def load_state_dict(self, state_dict: State) -> None:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        super().load_state_dict(state_dict)
        # the rows may be others; the wrapped sampler must not restart its epochs
        self._divided = None

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"_divided": None}


class _WindowReading(Reading):
    """Expands ``count`` drawn rows to windows, which the reading ``inner`` reads."""

    def __init__(
        self,
        wrapper: SequenceSampler,
        storage: PackedStorage,
        count: int,
        is_stamped: bool,
        inner: Reading,
    ) -> None:
        super().__init__(storage, count * wrapper.window, is_stamped)
        self.wrapper = wrapper
        self.inner = inner
        self.window = wrapper.window
        #: ``[B]`` int64, where the rows of windows with coordinates are listed; others
        # are listed in the index.
        self.listed = torch.zeros(
            self.size if self.lanes else 0, dtype=torch.int64, device="cpu"
        )
        init_key = cast("tuple[str, ...]", wrapper.flag_keys[0])
        adds_init = wrapper.across_episodes and init_key not in self.rows.layout.places
        added: list[Named] = (
            [(init_key[0], (torch.bool, torch.Size([1])))] if adds_init else []
        )
        masks: list[Named] = [("mask", FLAG), ("burn_in_mask", FLAG)]
        is_weighted = (
            is_stamped and self.window > 1 and wrapper.find_draw_into() is not None
        )
        self.entries = [*inner.entries, *masks, ("anchor_index", self.index), *added]
        weight = torch.zeros(count, dtype=torch.float32, device="cpu")
        names = ["mask", "burn_in_mask", "anchor_index"]
        if is_weighted:
            self.entries.append(WEIGHT)
            self.anchor_weights = {"priority_weight": weight}
            names.append("priority_weight")
        targets = {name: self.target_of(name) for name in names}
        self.flags = self.targets_of(wrapper.flag_keys)
        self.bounds = np.zeros((count, 2), np.int64)
        if adds_init:
            self.flags[0] = self.target_of(init_key[0]), 1
        shape = {"count": count, "length": wrapper.length, "burn_in": wrapper.burn_in}
        kind = {
            "shifts": wrapper.boundary == "shift",
            "across": wrapper.across_episodes,
            "adds_init": adds_init,
        }
        memory = {"flags": self.flags.ctypes.data, "bounds": self.bounds.ctypes.data}
        memory["weight"] = weight.data_ptr() if is_weighted else 0
        self.windows = record_of(WINDOWS, **shape, **kind, **memory, **targets)
        self.windows_at = self.windows.ctypes.data
        self.expand = loop("wrappers.cpu", "expand")
        self.mark_ends = loop("wrappers.cpu", "mark_ends")

    def __call__(
        self, slots: BatchSlots, slot: BatchSlot, flat: Tensor, drawn: Tensor, live: int
    ) -> bool:
        """See :class:`~rlbuf_td.samplers.reading.Reading`."""
        episodes = self.storage.episodes_now().address
        windows = self.windows_at
        targets = slot.targets
        listed = self.listed if self.lanes else slot.report["index"]
        listed_at = listed.data_ptr()
        if not self.expand(
            episodes, windows, flat.data_ptr(), listed_at, targets, self.lanes, live
        ):
            return False
        self.inner(slots, slot, listed, drawn, live)
        if self.wrapper.takes_goals:
            slots.locate(slot)
        self.mark_ends(episodes, windows, listed_at, targets)
        return True
