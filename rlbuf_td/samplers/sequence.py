"""Sequences of transitions for recurrent agents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn, TypeAlias, cast

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from rlbuf_td.kernels.batch import WINDOWS
from rlbuf_td.kernels.dispatch import backend_of, compiled_form_of, machine_code, record_of
from rlbuf_td.kernels.rows.read_ahead import ask_for_rows
from rlbuf_td.samplers.bound import CPU, SCALAR, Blank, BoundDraw, Masks, Reading
from rlbuf_td.samplers.common import EMPTY, permutation, refuse_disorder, setting
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.wrapper import Drawn, SamplerWrapper, draw_from
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import fraction, one_of, whole
from rlbuf_td.storages.episodes import DONE_KEY, TRAJ_KEY
from rlbuf_td.storages.indexing import Index, coordinates, device_of, flat_rows, revision_of, row_count, written_rows
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.schema import SchemaError, show_key
from rlbuf_td.storages.tensordict_fast import folded, leaf_of

Boundary: TypeAlias = Literal["pad", "shift", "strict"]
_ROUNDS = 200  # boundary="strict" on the CPU: the largest number of repeated draws until all windows fit
_MOST_ROWS = 1 << 20  # rows whose trajectories are looked up at once
_BLIND_ROUNDS = 8  # boundary="strict" on CUDA: the number of repeated draws, without a check by the host


class SequenceSampler(SamplerWrapper):
    """Expands each drawn row, the *anchor*, to a window: ``burn_in`` rows, then ``length`` rows from the anchor on.

    A window never crosses the beginning or end of a trajectory, unless ``across_episodes`` is set. A batch of B windows
    has the shape ``[B * L]``, where ``L = burn_in + length`` is the length of a window. Each batch has three additional
    entries:

    - ``"mask"``, ``[B * L]`` bool: False for padding, which copies the first or last row of the trajectory.
    - ``"burn_in_mask"``, ``[B * L]`` bool: True for each window's first ``burn_in`` rows, which a loss should ignore.
    - ``"anchor_index"``, ``[B * L]`` or, if ``ndim > 1``, ``[B * L, ndim]``: the index of the window's anchor.

    If rows have the flags ``"is_init"``, ``truncated`` or ``done``, the sampler changes these flags so that TorchRL's
    modules treat each window separately. ``"is_init"`` becomes True at the first row and at the first unpadded row of
    each window; ``truncated`` and ``done`` become True at the last unpadded row. All rows of a window have the anchor's
    ``"priority_weight"`` and hindsight goal.

    ``batch.view(-1, L)`` has one window per row. TorchRL's ``split_trajectories(batch)`` also makes trajectories of the
    padding: use ``split_trajectories(batch[batch["mask"]])``, with done flags and without trajectory ids.

    With ``output_layout="batch_time"``, a batch has the shape ``[B, L]``, as recurrent networks take it, and all its
    entries too. It also has ``slice_end_key``, ``[B, L, 1]`` bool: True at the last unpadded row of each window. The
    flags ``truncated`` and ``done`` then stay those of the environment. ``batch_size`` still counts ``B * L`` rows.

    **Chunks.** With ``stride=length``, trajectories are divided into windows that do not overlap, and a wrapped
    :class:`MinibatchSampler` draws each window once per epoch. Each stored row is then exactly once per epoch a row
    with ``mask & ~burn_in_mask``. The last chunk of a trajectory may be shorter than ``length``, and is padded.
    ``batch_size`` counts rows, including padding; the last batch of an epoch may have fewer windows (``drop_last``
    omits such a batch). Any write restarts the epochs, as does any other change of the trajectories.

    **Windows across episodes**, as world models (DreamerV3) take them: with ``across_episodes=True``, a window is L
    consecutive steps of a lane, whether or not episodes end there, so that nothing is padded except before the oldest
    and after the newest row of the lane. ``"is_init"`` is True at the first row of a window and at the first step of
    each episode; batches get this entry if the rows have none. ``boundary``, ``burn_in`` and ``stride`` mean the same
    as above, with the lane in place of the trajectory. Rows ``[T]`` are one lane, so that each environment needs a lane
    of its own.

    **Recurrent states** that are stored with the rows are entries like any other. A network starts a window from the
    state in the window's first row: with ``batch`` in the shape ``[B, L]`` and the states ``h`` and ``c`` in the shape
    ``[B, L, layers, hidden]``, ``h0, c0 = (batch[key][:, 0].transpose(0, 1).contiguous() for key in ("h", "c"))``, then
    ``lstm(features, (h0, c0))``. No window crosses the end of a trajectory, so a loop over a window needs no resets.
    TorchRL's ``LSTMModule`` does the same in recurrent mode, in which ``"is_init"`` means: continue from the state
    stored here. (In its other mode, ``"is_init"`` means: continue from zeros.)

    Args:
        sampler: draws the anchors; may be a sampler of rows, a :class:`HindsightSampler` or an :class:`NStepSampler`.
        length: the number of rows from the anchor on, including the anchor, at least 1.
        burn_in: the number of rows before the anchor, at least 0.
        boundary: what happens if the trajectory has fewer than ``length`` rows from the anchor on. ``"pad"`` repeats
            the trajectory's last row. ``"shift"`` moves the window to earlier rows, and pads only if the trajectory has
            fewer than ``length`` rows. ``"strict"`` draws other anchors until every window fits into its
            trajectory, including its burn-in.
        stride: ``None``: any row can be an anchor. A whole number from 1 to ``length``: the anchors are each
            trajectory's first stored row, and every ``stride``-th row from there on. This needs ``boundary="pad"`` and
            a :class:`MinibatchSampler`, or one within a :class:`HindsightSampler` or an :class:`NStepSampler`.
        priority: how to compute the anchor's priority from the magnitudes of the window's TD errors, without padding
            and burn-in. ``"max"`` takes the largest magnitude; ``"mix"`` takes ``eta * max + (1 - eta) * mean``, as in
            R2D2.
        eta: the weight of the largest magnitude in ``"mix"``, 0 to 1; may be set at any time.
        init_key: the key of the flag that marks the first row of a trajectory.
        output_layout: ``"flat"`` or ``"batch_time"``, see above.
        across_episodes: whether windows go on into the next episode of the lane, see above.
        slice_end_key: the key of the flags at the last rows, with ``"batch_time"``.
        time_dim_name: the name of the second dim of a batch, with ``"batch_time"``; ``None``: no name.
        done_key, traj_key: the keys of the done flag and the trajectory id, as for :class:`TrajectoryIndex`.

    Raises:
        ValueError: an argument is out of range; (when sampling) ``batch_size`` is not a multiple of ``L``, or with
            ``drop_last`` greater than the number of rows in all windows.
        TypeError: ``sampler`` is no sampler, another :class:`SequenceSampler`, or, with ``stride``, draws rows
            repeatedly; with ``across_episodes``, it is or wraps a :class:`HindsightSampler`.
        KeyError: (at the first draw) neither done flags nor trajectory ids are stored.
        SchemaError: (at the first write) the rows have an entry ``"mask"``, ``"burn_in_mask"`` or ``"anchor_index"``.
        RuntimeError: (when sampling with ``"strict"`` on the CPU) repeated draws do not find enough windows that fit.
            On CUDA, there is no error: the ``"mask"`` is False for all rows of a window that does not fit.

    Warns:
        RuntimeWarning: (at the first draw, on the CPU) rows of several trajectories alternate.

    Cost: O(B * L); with ``stride``, also O(N) for N rows at the first draw after a write.
    Source: Kapturowski et al., Recurrent Experience Replay in Distributed RL (R2D2), ICLR 2019, section 2.3.

    **Priorities.** In this package's buffer, ``update_tensordict_priority`` takes a whole batch and updates the
    priorities of the anchors. TorchRL's buffers update the priority of each window's first row after burn-in. With
    ``boundary="shift"``, this row may be earlier than the anchor.

    **Arguments of TorchRL's** ``SliceSampler``. Pass ``slice_len`` as ``length`` and ``end_key`` as ``done_key``. The
    batch size determines ``num_slices``. ``boundary`` replaces ``strict_length``, ``pad_output`` and ``span``, whose
    defaults correspond to ``"strict"``. The trajectory index makes ``end_keys``, ``truncated_key``, ``step_key``,
    ``ends``, ``trajectories``, ``fragmented``, ``cache_values``, ``compile`` and ``use_gpu`` unnecessary. Where TorchRL
    has ``("collector", "mask")``, batches have ``"mask"``.

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
    _shown = ("length", "burn_in", "boundary", "stride", "priority_rule", "across_episodes")
    length: int = setting(whole(1), is_fixed=True)
    burn_in: int = setting(whole(0), is_fixed=True)
    boundary: Boundary = setting(one_of("pad", "shift", "strict"), is_fixed=True)
    stride: int | None = setting(lambda name, value: None if value is None else whole(1)(name, value), is_fixed=True)
    eta: float = setting(fraction)
    _divided: tuple[Any, Tensor] | None = None  # with ``stride``: the anchors, and of which trajectories

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
        if self.across_episodes and any(wrapper.takes_goals for wrapper in self._wrappers()):
            reason = "all rows of a window get one goal, of the anchor's episode: leave out across_episodes"
            raise TypeError(f"across_episodes=True cannot be combined with a HindsightSampler: {reason}")
        self.output_layout = one_of("flat", "batch_time")("output_layout", output_layout)
        self.gives_windows = output_layout == "batch_time"
        self.slice_end_key, self.time_dim_name = as_tuple(slice_end_key), time_dim_name
        self.length, self.burn_in, self.boundary, self.stride = length, burn_in, boundary, stride
        self._refuse_stride()
        for wrapper in self._wrappers():
            if wrapper.adds_fresh_rows:
                wrapper.give_windows_to(self)
        self.priority_rule, self.eta = one_of("max", "mix")("priority", priority), eta
        beside = self.done_key[:-1]
        ends = (None, None) if self.gives_windows else ((*beside, "truncated"), (*beside, "done"))
        self.flag_keys: tuple[tuple[str, ...] | None, ...] = (as_tuple(init_key), *ends)

    def _refuse_stride(self) -> None:
        """Raise an error if the windows' anchors are given by a stride, and another argument does not allow this."""
        if self.stride is None:
            return
        if self.stride > self.length:
            gap = f"stride={self.stride} leaves out rows between windows of length={self.length}"
            raise ValueError(f"{gap}: use a stride from 1 to {self.length}")
        if self.boundary != "pad":
            reason = f'boundary="{self.boundary}" would move or replace windows'
            raise ValueError(f'stride needs boundary="pad": {reason}')
        inner: Any = self.sampler
        while isinstance(inner, SamplerWrapper) and type(inner)._draw is SamplerWrapper._draw:
            inner = inner.sampler
        if not hasattr(type(inner), "draw_numbers"):
            needs = "stride needs a sampler that draws each window once per epoch"
            raise TypeError(f"{needs}: use a MinibatchSampler, got {type(inner).__name__}")

    window = property(lambda self: self.burn_in + self.length, doc="The number of rows in a window.")

    @property
    def steps_needed(self) -> int:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        return max(self.window, super().steps_needed)

    def draw_batch(self, storage: PackedStorage, batch_size: int) -> Drawn:
        """Draw anchors, and return their windows as a batch."""
        if not row_count(storage):
            raise RuntimeError(EMPTY)
        drawn = self._expanded(storage, *self._anchors(storage, self.windows_of(batch_size)))
        if not self.has_checked_order:
            self._warn_if_interleaved(storage)
        return drawn

    def batch_of(self, storage: PackedStorage, flat: Tensor, info: dict[Any, Any]) -> Drawn:
        """Expand the anchors at flat indices ``flat`` to windows.

        Even with ``boundary="strict"``, no anchor is replaced.
        """
        return self._expanded(storage, flat, info, *self._reach(storage, flat))

    def _expanded(
        self, storage: PackedStorage, anchors: Tensor, info: dict[Any, Any], back: Tensor, ahead: Tensor
    ) -> Drawn:
        window = self.window
        read = self._reader(storage, anchors)
        flat, real = self._windows(storage, anchors, back, ahead)
        owner = None if read is None else torch.arange(len(anchors), device=flat.device).repeat_interleave(window)
        batch = storage.gather(flat) if read is None else read(flat, owner)
        begins = self._begins(storage, flat).view_as(real) if self.across_episodes else None
        added = self._mark_(batch, real, begins)
        info = {key: value.repeat_interleave(window, 0) for key, value in info.items()}
        index = coordinates(anchors, storage)
        index = torch.stack(index, -1) if isinstance(index, tuple) else index
        before = torch.arange(window, device=flat.device) < self.burn_in
        info |= added | {"mask": real.flatten(), "burn_in_mask": before.repeat(len(anchors))}
        info["anchor_index"] = index.repeat_interleave(window, 0)
        return flat, info, batch

    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[Any, Any]]:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        index, info = super().sample(storage, batch_size)
        return (self._by_window(index), self._report_by_window(info)) if self.gives_windows else (index, info)

    def lay_out(self, batch: TensorDictBase, info: dict[Any, Any]) -> tuple[TensorDictBase, dict[Any, Any]]:
        """Return a flat batch and its info dict in the shape ``[B, L]``."""
        info = self._report_by_window(info)
        batch = folded(batch, self.window, self.time_dim_name)
        if batch.get(self.slice_end_key, None) is not None:
            raise SchemaError(f"the rows have an entry {show_key(self.slice_end_key)}: choose another slice_end_key")
        batch.set(self.slice_end_key, info[self.slice_end_key])
        return batch, info

    def _report_by_window(self, info: dict[Any, Any]) -> dict[Any, Any]:
        info = {key: self._by_window(value) for key, value in info.items()}
        end = info["mask"].clone()
        end[:, :-1] &= ~info["mask"][:, 1:]
        return info | {self.slice_end_key: end[..., None]}

    def _by_window(self, value: Any) -> Any:
        if isinstance(value, tuple):  # coordinates, one tensor per dim
            return tuple(map(self._by_window, value))
        return value.view(-1, self.window, *value.shape[1:])

    def _set_sample_names(self, batch: Any) -> Any:
        if self.gives_windows and batch.ndim > 1:  # TorchRL calls this method, too
            batch.names = [*batch.names[:-1], self.time_dim_name]
        return batch

    def _draw(self, storage: PackedStorage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        if self.stride is None:
            return super()._draw(storage, batch_size)
        refuse_disorder(self, storage)
        anchors = self.anchors(storage)
        numbers = self.innermost.draw_numbers(storage, len(anchors), batch_size, "windows")
        return anchors[numbers], {}

    def anchors(self, storage: PackedStorage) -> Tensor:
        """With ``stride``: return all rows that are anchors, ``[n]`` int64, in storage order.

        If these have changed since the last call, the wrapped sampler restarts its epochs.
        """
        seen = self._trajectories(storage).episodes(), revision_of(storage)
        if self._divided is None or self._divided[0] != seen:
            rows = written_rows(storage).split(_MOST_ROWS)
            found = torch.cat([part[self._reach(storage, part)[0] % self.stride == 0] for part in rows])
            if self._divided is not None and not torch.equal(found, self._divided[1]):
                self.innermost.restart()
            self._divided = seen, found
        return self._divided[1]

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether the wrapped sampler can draw the anchors of a batch."""
        if self.stride is not None and self.innermost.drop_last and row_count(storage):
            return len(self.anchors(storage)) >= self.windows_of(batch_size)
        return self.sampler.can_sample(storage, self.windows_of(batch_size))

    def windows_of(self, batch_size: int) -> int:
        """Return the number of windows in a batch; ValueError if the batch size is not a multiple of ``window``."""
        if batch_size % self.window:
            window = f"length={self.length}"
            if self.burn_in:
                window = f"burn_in + length = {self.burn_in} + {self.length} = {self.window}"
            remedy = f"for 32 sequences use {32 * self.window}"
            raise ValueError(f"batch_size must be a multiple of {window}, got {batch_size}; {remedy}")
        return batch_size // self.window

    def _anchors(self, storage: PackedStorage, count: int) -> tuple[Tensor, dict[Any, Any], Tensor, Tensor]:
        """Draw anchors; return them, their info dict, and how many rows of the trajectory are before and after each."""
        self._trajectories(storage).episodes()  # raises an error if the rows do not tell where trajectories end
        anchors, info = self._draw(storage, count)
        count = len(anchors)  # less at the end of an epoch
        back, ahead = self._reach(storage, anchors)
        if self.boundary != "strict":
            return anchors, info, back, ahead
        is_on_host = backend_of(anchors) == "numba"
        for rounds in range(_ROUNDS if is_on_host else _BLIND_ROUNDS):
            fits = (back >= self.burn_in) & (ahead >= self.length - 1)
            if is_on_host and bool(fits.all()):
                return anchors, self._weighed(anchors, info) if rounds else info, back, ahead
            others, other_info = draw_from(self.innermost, storage, count)
            # A stratified draw fills a position from one segment, where perhaps no window fits: shuffle the positions.
            order = permutation(count, self._rng, anchors.device) % len(others)
            anchors = torch.where(fits, anchors, others[order])
            for key, value in info.items():
                info[key] = torch.where(fits.view(-1, *[1] * (value.ndim - 1)), value, other_info[key][order])
            back, ahead = self._reach(storage, anchors)
        if is_on_host:
            self.refuse_trajectories()
        return anchors, self._weighed(anchors, info), back, ahead

    def _reach(self, storage: PackedStorage, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many rows that a window may have precede and follow each row, ``[B]`` each."""
        if self.across_episodes:
            return storage.ring.reach(rows)
        return self._trajectories(storage).episodes().spans(rows)[:2]

    def _begins(self, storage: PackedStorage, rows: Tensor) -> Tensor:
        """Return whether each row is the first stored row of its trajectory, ``[n]`` bool."""
        return self._trajectories(storage).episodes().spans(rows).back == 0

    def _weighed(self, anchors: Tensor, info: dict[Any, Any]) -> dict[Any, Any]:
        """Return the report of anchors that come from several draws, with the weights of one draw."""
        if isinstance(self.innermost, Prioritized):
            self.innermost.weigh_batch_(anchors, info["priority_weight"])
        return info

    def refuse_trajectories(self) -> NoReturn:
        """Raise the error of ``boundary="strict"`` for trajectories that are too short."""
        window = f"a window of {self.window} rows within its {'lane' if self.across_episodes else 'trajectory'}"
        raise RuntimeError(f"hardly any anchor had {window}: use shorter windows, or boundary='pad'")

    def _windows(self, storage: PackedStorage, anchors: Tensor, back: Tensor, ahead: Tensor) -> tuple[Tensor, Tensor]:
        """Return the flat rows of the windows, ``[B * L]``, and a mask that is False for padding, ``[B, L]``."""
        rows = storage.all_rows()
        lanes = rows.cells // rows.steps
        if self.boundary == "shift":
            shift = (self.length - 1 - ahead).clamp(min=0).minimum(back)
            anchors, back, ahead = anchors - shift * lanes, back - shift, ahead + shift
        wanted = torch.arange(-self.burn_in, self.length, device=anchors.device)
        offset = wanted.minimum(ahead[:, None]).maximum(-back[:, None])
        real = offset == wanted
        if self.boundary == "strict" and backend_of(anchors) != "numba":
            real &= real.all(1, keepdim=True)
        return ((anchors[:, None] + offset * lanes) % rows.cells).flatten(), real

    def _mark_(self, batch: TensorDictBase, real: Tensor, begins: Tensor | None) -> dict[Any, Tensor]:
        """Set the flags at the ends of each window of a batch; ``real``, ``[B, L]`` bool, is False for padding.

        With ``begins``, ``[B, L]`` bool, also set "is_init" there; return it if the rows have no such flag.
        """
        first, last = real.clone(), real.clone()
        first[:, 1:] &= ~real[:, :-1]
        last[:, :-1] &= ~real[:, 1:]
        first[:, 0].fill_(True)
        first |= real & begins if begins is not None else False
        for key, flag in zip(self.flag_keys, (first, last, last), strict=True):
            stored = None if key is None else leaf_of(batch, key)
            if stored is not None:
                stored |= flag.view(-1, *[1] * (stored.ndim - 1))
        init_key = cast("tuple[str, ...]", self.flag_keys[0])
        if begins is None or leaf_of(batch, init_key) is not None:
            return {}
        return {init_key if len(init_key) > 1 else init_key[0]: first.reshape(-1, 1)}

    @compiled_form_of(
        *("_reader", "_expanded", "_anchors", "_windows", "_mark_", "_draw", "draw_batch", "batch_of"),
        *("_reach", "_begins", "window", "windows_of", "anchored", "_summary", "anchors"),
    )
    def bind_revision(self, storage: PackedStorage, size: int, inner: Reading) -> Reading | str:
        """See :mod:`rlbuf_td.samplers.bound`."""
        flags = {leaf.dtype for leaf in inner.rows.layout.leaves if leaf.key in self.flag_keys}
        if self.boundary == "strict" and hasattr(self.innermost, "draw_numbers"):
            return 'boundary="strict" draws the next rows of an epoch with torch'
        if storage.deduplicated.keys() & {*self.flag_keys}:
            return "flags are deduplicated"
        if not flags <= {torch.bool}:
            return f"flags are {flags}"
        init_key = cast("tuple[str, ...]", self.flag_keys[0])
        if self.across_episodes and len(init_key) > 1 and init_key not in inner.rows.layout.places:
            return f"{show_key(init_key)}, which the rows lack, is added with torch"
        return _WindowReading(self, inner)

    def _revised_keys(self) -> Iterator[NestedKey]:
        yield from super()._revised_keys()
        yield from (key for key in self.flag_keys if key is not None)

    def anchored(self, batch: TensorDictBase, index: Tensor, td_error: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch's anchors and one priority per anchor. Raises ValueError if a window is incomplete."""
        entries = [batch.get(key, None) for key in ("mask", "burn_in_mask", "anchor_index")]
        if any(entry is None for entry in entries):
            needed = "'mask', 'burn_in_mask' and 'anchor_index'"
            raise KeyError(f"a batch of sequences needs its {needed} to set priorities")
        mask, burn_in, anchors = entries
        if td_error.shape[0] % self.window:
            given = f"{td_error.shape[0]} TD errors are not whole windows of {self.window} rows"
            raise ValueError(f"{given}: update priorities with the batch as it was sampled")
        anchors = anchors.reshape(-1, *anchors.shape[batch.ndim :])[:: self.window]
        return anchors, self._summary(td_error, (mask & ~burn_in).reshape(-1))

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Set the priority of each window's first row after burn-in.

        If ``index`` does not consist of whole windows, or ``storage`` is None, set the priority of each row instead.
        """
        if not self._is_prioritized:
            return
        if storage is not None and isinstance(priority, Tensor) and priority.numel() > 1:
            flat = flat_rows(index, storage, device_of(storage))
            if flat.numel() == priority.numel() and flat.numel() % self.window == 0:
                rows = flat.view(-1, self.window)
                lanes, cells = storage.shape[1:].numel() if storage.ndim > 1 else 1, len(storage)
                step = (rows[:, 1:] - rows[:, :-1]) % cells
                if backend_of(flat) != "numba" or bool(((step == 0) | (step == lanes % cells)).all()):
                    learned = torch.ones_like(rows, dtype=torch.bool)
                    learned[:, self.burn_in + 1 :] = step[:, self.burn_in :] != 0
                    learned[:, : self.burn_in].fill_(False)
                    index, priority = rows[:, self.burn_in], self._summary(priority.reshape(-1), learned.view(-1))
        super().update_priority(index, priority, storage=storage)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        super().load_state_dict(state_dict)
        self._divided = None  # the rows may be others; the wrapped sampler must not restart its epochs

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_divided": None}

    def _summary(self, td_error: Tensor, learned: Tensor) -> Tensor:
        """Return one priority per window, ``[B]``, from the TD errors, ``[B * L]``, for which ``learned`` is True."""
        magnitude = torch.where(learned, td_error.abs(), 0).view(-1, self.window)
        largest = magnitude.amax(1)
        if self.priority_rule == "max":
            return largest
        # Added in the same order as in the compiled loop (``batch.cpu._anchored``): the results are equal.
        total = magnitude.to(torch.float64).cumsum(1)[:, -1]
        mean = total / learned.view(-1, self.window).sum(1).clamp(min=1)
        mixed = self.eta * largest.to(torch.float64) + (1 - self.eta) * mean
        return mixed.to(td_error.dtype) if td_error.is_floating_point() else mixed


class _WindowReading(Reading):
    """Expands the drawn rows to windows, which it gathers as the reading ``inner`` gathers rows."""

    def __init__(self, wrapper: SequenceSampler, inner: Reading) -> None:
        from rlbuf_td.kernels.batch import wrapped_cpu as kernels

        super().__init__(inner.rows)
        self.wrapper, self.inner, self.window = wrapper, inner, wrapper.window
        self.adds_report, self.picks_any_row = inner.adds_report, inner.picks_any_row
        flag, layout = (torch.bool, SCALAR), inner.rows.layout
        anchor = torch.int64, torch.Size([2] if inner.rows.lanes else [])
        self.entries = [("mask", flag), ("burn_in_mask", flag), ("anchor_index", anchor)]
        self.adds_init = wrapper.across_episodes and wrapper.flag_keys[0] not in layout.places
        if self.adds_init:
            self.entries.append((cast("tuple[str, ...]", wrapper.flag_keys[0])[0], (torch.bool, torch.Size([1]))))
        self.entries += inner.entries
        places = [None if key is None else layout.places.get(key) for key in wrapper.flag_keys]
        flags = [(0, 0) if place is None else (place, layout.leaves[place].nbytes) for place in places]
        self.flags = np.array(flags, np.int64)
        self.parts = kernels.LIST, kernels.READ, kernels.BOTH, kernels.MARK
        self.kernel, self.replace_short = machine_code(kernels.sequence), machine_code(kernels.replace_short)

    def bind(self, draw: BoundDraw, size: int) -> None:
        """See :class:`~rlbuf_td.samplers.bound.Reading`."""
        self.widths = np.array([dtype.itemsize for _, dtype in draw.reports], np.int64)
        self.bounds, self.scratch = np.zeros((draw.size, 2), np.int64), np.zeros((4, draw.size), np.int64)
        memory = {"flags": self.flags, "widths": self.widths, "bounds": self.bounds, "scratch": self.scratch}
        given: dict[str, int] = {name: array.ctypes.data for name, array in memory.items()}
        names = [name for name, _ in draw.reports]
        given |= {"count": draw.size, "reports": len(names)}
        given["stamp"] = names.index(SAMPLED_AT) if SAMPLED_AT in names else -1
        if self.wrapper.stride is not None:
            draw.anchors = self.wrapper.anchors
        given |= {"length": self.wrapper.length, "burn_in": self.wrapper.burn_in, "adds_init": int(self.adds_init)}
        given["across"] = int(self.wrapper.across_episodes)
        if self.adds_init:
            self.flags[0] = len(self.rows.layout.leaves) + 1 + len(draw.reports) + 3, 1  # its place among the targets
        draw.expand_to(record_of(WINDOWS, **given, shifts=int(self.wrapper.boundary == "shift")))
        self.inner.bind(draw, size)
        self.draw, self.address, self.flat = draw, self.inner.address, self.inner.flat
        self.kept = np.zeros(draw.size, np.int64)
        self.others = [torch.zeros(draw.size, dtype=dtype, device="cpu") for _, dtype in draw.reports]
        places = [0] * (1 + len(self.rows.layout.leaves)) + [other.data_ptr() for other in self.others]
        self.other_targets = np.array(places, np.int64)

    def _fit(self, episodes: int, blank: Blank, written: int) -> None:
        """Draw other anchors until all windows fit, as :meth:`SequenceSampler._anchors` does with torch."""
        draw, fresh = self.draw, self.draw.record["queue"][0]
        address, targets, kept = self.address, blank.targets, self.kept.ctypes.data
        others = self.other_targets.ctypes.data
        short = self.replace_short(episodes, address, targets, kept, 0, 0)
        draw.record["queue"] = 0  # other anchors are not taken from the fresh rows
        try:
            for rounds in range(_ROUNDS):
                if not short:
                    if rounds:
                        report = {name: blank.report[name][: draw.size] for name, _ in draw.reports}
                        self.wrapper._weighed(draw.flat, report)
                    return
                draw(written, others)
                order = permutation(draw.size, draw.generator, CPU)
                short = self.replace_short(episodes, address, targets, kept, order.data_ptr(), others)
        finally:
            draw.record["queue"] = fresh
        self.wrapper.refuse_trajectories()

    def __call__(self, episodes: int, blank: Blank, written: int) -> None:
        if self.wrapper.boundary == "strict":
            self._fit(episodes, blank, written)
        address, targets, (lists, reads, both, marks) = self.address, blank.targets, self.parts
        if not self.inner.is_fused:
            self.kernel(episodes, address, targets, lists, 0)
            self.inner(episodes, blank, written)
            self.kernel(episodes, address, targets, marks, 0)
            return
        steps = self.inner.steps(blank)
        if self.rows.is_mapped:
            self.kernel(episodes, address, targets, lists, steps)
            ask_for_rows(self.rows.flat, self.flat)
            self.kernel(episodes, address, targets, reads, steps)
        else:
            self.kernel(episodes, address, targets, both, steps)
        self.inner.read_entries(blank)

    def masks(self, entries: Mapping[str, Any]) -> Masks:
        """See :class:`~rlbuf_td.samplers.bound.Reading`."""
        eta = 1.0 if self.wrapper.priority_rule == "max" else self.wrapper.eta
        return Masks(entries.get("mask"), entries.get("burn_in_mask"), eta)
