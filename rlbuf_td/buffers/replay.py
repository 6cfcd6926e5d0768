"""The replay buffer: storage, sampler and writer put together, with a short way through them.

What else it offers is in files of its own: constructors for environments in :mod:`rlbuf_td.buffers.construction`,
processes in
:mod:`rlbuf_td.buffers.shared`, dumps in :mod:`rlbuf_td.buffers.saved`, looking at it in
:mod:`rlbuf_td.buffers.looking`,
setting entries of rows in :mod:`rlbuf_td.buffers.editing`, learners on a GPU in :mod:`rlbuf_td.buffers.device`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torchrl.data.replay_buffers import (
    ConsumingSampler,
    PrioritizedSampler,
    RoundRobinWriter,
    Sampler,
    Storage,
    TensorDictReplayBuffer,
    Writer,
)

from rlbuf_td.buffers.construction import FromEnvironment
from rlbuf_td.buffers.device.graph import CapturedStep
from rlbuf_td.buffers.device.prefetch import DevicePrefetcher, Pack
from rlbuf_td.buffers.editing import EditedBuffer
from rlbuf_td.buffers.looking import InspectedBuffer
from rlbuf_td.buffers.plan import Plan, make_plan
from rlbuf_td.buffers.saved import NO_CHECKPOINTERS, SavedBuffer
from rlbuf_td.buffers.shared import SharedBuffer
from rlbuf_td.diagnostics.episode_stats import EpisodeStats
from rlbuf_td.diagnostics.health import LastDraw, ReplayCount
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.samplers import UniformSampler
from rlbuf_td.samplers.common import refuse_errors
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import PackedStorage, SchemaError
from rlbuf_td.storages.indexing import by_row, coordinates, device_of, merge_, one_a_row, put_back_
from rlbuf_td.storages.schema import reshaped
from rlbuf_td.storages.tensordict_fast import entries_of
from rlbuf_td.storages.write_clock import SAMPLED_AT, Tally, skip_stale
from rlbuf_td.writers import RingWriter


class ReplayBuffer(FromEnvironment, SharedBuffer, SavedBuffer, InspectedBuffer, EditedBuffer, TensorDictReplayBuffer):
    """TorchRL's ``TensorDictReplayBuffer`` with the parts of this package, and a direct path through them.

    Takes every keyword of ``TensorDictReplayBuffer`` but ``checkpointer``. Over a :class:`PackedStorage`, with this
    package's samplers or any that has a ``draw``, a sample is: draw, gather, wrap. TorchRL's own samplers, a
    ``collate_fn``, sample units and generation tracking take TorchRL's general path; both give the same batches from
    the same generator state.

    Args:
        storage: default ``PackedStorage(1_000)`` (give your own capacity). In one that holds rows already, a new
            :class:`RingWriter` goes on behind the newest.
        sampler: default :class:`UniformSampler`.
        writer: default :class:`RingWriter`.
        priority_key: where a batch holds its TD errors, default ``"td_error"``.
        stats: an :class:`EpisodeStats` that is shown every write, before any transform.
        count_replays: count how often each row is drawn, for :meth:`health`; 4 bytes a row and a few us a batch.
        device: where batches are wanted, for rows in host memory (the storage's ``device`` says where rows are). Each
            batch is one asynchronous copy, and transforms run on the device. With ``prefetch=k``, k batches are drawn
            ahead, and the TD errors of the last k updates are on their way back; both use streams, not threads. With
            ``prefetch=0``, batches and priorities equal those of a buffer without ``device``. Rows that are on that
            GPU already are not copied. Saving the buffer (:meth:`dumps`, :meth:`state_dict`, pickle, deepcopy) waits
            for the TD errors and drops the batches drawn ahead: this buffer and a loaded one both draw new ones.
        **kwargs: as in TorchRL: ``batch_size``, ``transform``, ``prefetch``, ``pin_memory``, ``generator``,
            ``dim_extend``, ``sample_unit``, ``collate_fn``, ``shared`` ...

    Differs from TorchRL: the index, the importance weights and whatever else a sampler reports are in the batch
    *before* the transforms run (and put back where one leaves them out, as ``SelectTransform`` does); several TD errors
    of a row are reduced after taking their magnitude; a prioritized buffer refuses a batch without TD errors rather
    than giving its rows the default priority.

    Cost: that of its parts; ``python -m rlbuf_td bench`` measures them.

    Example:
        >>> from tensordict import TensorDict
        >>> from rlbuf_td import PackedStorage, ProportionalSampler
        >>> rb = ReplayBuffer(storage=PackedStorage(100), sampler=ProportionalSampler(100), batch_size=2)
        >>> data = TensorDict({"observation": torch.zeros(5, 3), "next": {"reward": torch.ones(5, 1)}}, [5])
        >>> rb.extend(data)
        tensor([0, 1, 2, 3, 4])
        >>> batch = rb.sample()
        >>> sorted(batch.keys())
        ['index', 'next', 'observation', 'priority_weight', 'sampled_at']
        >>> batch["td_error"] = torch.rand(2)
        >>> rb.update_tensordict_priority(batch)
    """

    def __init__(
        self,
        *,
        priority_key: str = "td_error",
        stats: EpisodeStats | None = None,
        count_replays: bool = False,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("checkpointer") is not None:
            raise NotImplementedError(NO_CHECKPOINTERS)
        self.episode_stats = stats  # TorchRL's buffers have a method ``stats``
        self._count_replays = count_replays
        self._replays: ReplayCount | None = None
        self.last_draw: LastDraw | None = None
        defaults = {"storage": partial(PackedStorage, 1_000), "sampler": UniformSampler, "writer": RingWriter}
        if kwargs.get("consume_after_n_samples") is not None:
            del defaults["sampler"]  # TorchRL puts its own in place
        for part, default in defaults.items():
            if kwargs.get(part) is None:
                kwargs[part] = default
        self._stale_updates = Tally()
        self._plan: Plan | None = None
        self._unplanned: Any = None  # rows for which there is no plan
        self._prefetcher = None
        if device is not None:
            ahead = kwargs.get("prefetch") or 0
            self._prefetcher = DevicePrefetcher(
                self, torch.device(device), ahead, self._draw_packed, self._write_priorities
            )
        super().__init__(priority_key=priority_key, **kwargs)
        if device is not None:
            self._prefetch = False  # in TorchRL's threads

    # -- parts

    def _init(self) -> None:
        super()._init()
        self._choose_path()
        if type(self._writer) is RingWriter and not self._writer._write_count:
            self._writer._cursor = self._next_step()  # the storage may hold rows already
        self._refuse_parts_without_prefetch()
        if self.shared or getattr(self._storage, "shared", False):
            self.share()

    def _choose_path(self) -> None:
        """Go the direct way, unless something asks for TorchRL's general one."""
        self._plan = self._unplanned = None
        self._stages = getattr(self._transform, "transforms", ())  # the list itself: asking the transform takes 1 us
        how = _how_it_draws(type(self._sampler))
        self._is_direct = (
            self._initialized
            and self._sample_unit is None
            and self._collates_plainly
            and isinstance(self._storage, PackedStorage)
            and (how is not None or isinstance(self._sampler, SamplerWrapper))
            and not self._writer.tracks_generations
        )
        # Asking an abstract class for its instances takes longer than the question is worth at each call.
        self._wrapper = self._sampler if isinstance(self._sampler, SamplerWrapper) else None
        self._draws_batches = self._wrapper is not None or how == "draw_batch"
        sampler = self._sampler if self._wrapper is None else self._wrapper.innermost
        self._prioritized = sampler if isinstance(sampler, Prioritized) else None
        if self._prioritized is not None:
            self._prioritized.follow(self._storage)
        self._replays = ReplayCount.of(self._storage) if self._count_replays else None
        self._writes_generally = isinstance(sampler, ConsumingSampler) or (
            isinstance(sampler, PrioritizedSampler) and self._prioritized is None
        )

    def set_storage(self, storage: Storage, collate_fn: Any = None) -> Storage:
        """Put another storage in place, with what it holds, and return the old one.

        Unlike in TorchRL, the writer goes on where the new storage was written last, and priorities start anew.
        """
        self._refuse_if_shared("storage")
        previous = super().set_storage(storage, collate_fn)
        storage.attach(self)
        storage._rng = self._rng
        self._writer.register_storage(storage)
        if isinstance(self._writer, RoundRobinWriter):
            self._writer._cursor = self._next_step()
        self._sampler._empty()
        self._choose_path()
        self._let_rows_in()
        return previous

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Put another sampler in place, and return the old one.

        Unlike in TorchRL, rows to which it has given no priority yet enter as new ones do.
        """
        self._refuse_if_shared("sampler")
        with self._replay_lock:
            previous = super().set_sampler(sampler)
            sampler._rng = self._rng
            self._choose_path()
            self._let_rows_in()
        return previous

    def _let_rows_in(self) -> None:
        if self._prioritized is not None and len(self._storage):
            rows = torch.arange(len(self._storage), device=self._prioritized.device)
            absent = rows[self._prioritized.priority(rows) < 0]
            if len(absent):
                self._prioritized.mark_update(absent, storage=self._storage)

    def set_writer(self, writer: Writer) -> Writer:
        """Put another writer in place, and return the old one."""
        self._refuse_if_shared("writer")
        with self._replay_lock:
            previous = super().set_writer(writer)
            self._choose_path()
        return previous

    # -- sampling

    def _get_collate_fn(self, collate_fn: Any) -> None:
        self._collates_plainly = collate_fn is None
        super()._get_collate_fn(collate_fn)

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """Return a batch, as fresh memory; see TorchRL's ``TensorDictReplayBuffer.sample``.

        A batch has no environments' axis: its rows may come from any lane. ``numpy()`` makes it a nested dict of
        NumPy arrays, if it is on the CPU.

        Args:
            batch_size: default: the buffer's.
            return_info: return ``(batch, info)``, the sampler's report beside the batch.
            include_info: ``False`` leaves the report out of the batch (deprecated in TorchRL).

        Raises:
            RuntimeError: the buffer is empty, or there is no batch size.
        """
        plan = self._plan
        if plan is not None and batch_size is None and include_info is None and not return_info:
            batch = self._sample_by(plan)
            if batch is not None:
                return batch
        if not self._initialized:
            self._init()
        if not self._is_direct:
            return super().sample(batch_size, return_info, include_info)
        size = self._batch_size if batch_size is None else batch_size
        is_other = self._prefetcher is None and self._batch_size not in (None, size)
        if self._prefetch or self._service_shutdown or size is None or is_other:
            batch, info = super(TensorDictReplayBuffer, self).sample(batch_size, return_info=True)
        else:
            batch, info = self._sample(size)
            if self._plan is None and self._prefetcher is None:
                self._make_plan()
        if include_info is False:
            batch = batch.exclude(*info)
        return (batch, info) if return_info else batch

    def _sample_by(self, plan: Plan) -> TensorDictBase | None:
        """Return a batch the short way, ``None`` if the plan does not hold any more."""
        if len(self._stages) or self._service_shutdown:
            return None
        with self._storage.lock, self._write_lock:
            drawn = plan.sample() if self._plan is plan else None
        if drawn is None:
            self._plan = None
            return None
        batch, info = drawn
        self.last_draw = info["index"], info.get("priority_weight"), getattr(self._writer, "_cursor", 0)
        return batch

    def _make_plan(self) -> None:
        """Prepare the short way for the next call, if these parts have one."""
        rows = getattr(self._storage, "rows", None)
        if rows is self._unplanned or self._replays is not None or self._pin_memory or self._wrapper is not None:
            return
        with self._replay_lock, self._write_lock:
            self._plan = make_plan(self._storage, self._sampler, self._batch_size)
        self._unplanned = rows if self._plan is None else None

    def _sample(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        if self._prefetcher is not None and self._copies_batches:
            batch, info = self._prefetcher.take(batch_size, prefetch=batch_size == self._batch_size)
            return self._transformed(batch, info), info
        storage = self._storage
        with self._replay_lock, self._write_lock:
            is_direct = self._is_direct  # asked here: another thread may set another sampler
            stamped = self._prioritized is not None and isinstance(storage, PackedStorage)
            now = storage.clock.now if stamped else None
            if is_direct:
                flat, info, batch = self._draw(batch_size)
        if not is_direct:
            return self._sample_generally(batch_size, now)
        if now is not None:
            info[SAMPLED_AT] = storage.clock.stamp(now, flat.shape[0], flat.device)
        batch = self._assembled(flat, info, batch)
        if self._pin_memory and batch.device is not None and batch.device.type == "cpu":
            batch = batch.pin_memory()
        return batch, info

    def _draw(self, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any], TensorDictBase]:
        """Draw flat rows the direct way, and return them with the sampler's report and what they hold."""
        if self._draws_batches:
            return self._sampler.draw_batch(self._storage, batch_size)
        flat, info = self._sampler.draw(self._storage, batch_size)
        return flat, info, self._storage.gather(flat)

    def _assembled(self, flat: torch.Tensor, info: dict[Any, Any], batch: Any) -> TensorDictBase:
        """Return a batch with all that is known of its rows, transformed."""
        info["index"] = index = flat if self._storage.ndim == 1 else coordinates(flat, self._storage)
        self._note_draw(index, info)
        merge_(batch, info)
        return self._transformed(batch, info)

    def _note_draw(self, index: Any, info: dict[str, Any]) -> None:
        """Remember a batch's rows, weights and time; that is all that a draw pays for :meth:`health`."""
        self.last_draw = index, info.get("priority_weight"), getattr(self._writer, "_cursor", 0)
        if self._replays is not None:
            self._replays.count_(index)

    def _sample_generally(self, batch_size: int, now: int | None) -> tuple[TensorDictBase, dict[str, Any]]:
        batch, info = super()._sample(batch_size)
        self._note_draw(info["index"], info)
        if now is not None and self._sample_unit is None:
            first = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
            info[SAMPLED_AT] = self._storage.clock.stamp(now, first.shape[0], first.device)
        return batch, info

    def _transformed(self, batch: TensorDictBase, report: Iterable[NestedKey] = ()) -> TensorDictBase:
        if not len(self._stages):
            return batch
        known = {key: batch.get(key) for key in report}
        with _set_dispatch_td_nn_modules(True):
            batch = self._transform(batch)
        if isinstance(batch, TensorDictBase):
            put_back_(batch, known)
        return batch

    # -- writing

    def add(self, data: TensorDictBase) -> int | torch.Tensor:
        """Write one transition (with ``ndim > 1``: one time step of all lanes); return where it lies.

        Raises:
            SchemaError: the data does not match the rows; nothing has changed.
            ValueError: a TD error in the data is NaN or infinite; nothing has changed.
        """
        return self._write(data, "add")

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> torch.Tensor:
        """Write ``[n]`` transitions in order (with ``ndim=2``: ``[E, T]``, as collectors give them); return their rows.

        Args:
            tensordicts: the transitions.
            update_priority: ``False`` ignores TD errors that come with the data.

        Raises:
            SchemaError: the data does not match the rows; nothing has changed.
            ValueError: there is nothing to write, or a TD error is NaN or infinite; nothing has changed.
        """
        return self._write(tensordicts, "extend", update_priority is not False)

    def _write(self, data: TensorDictBase, how: str, update_priority: bool = True) -> Any:
        if not self._initialized:
            self._init()
        stats, dims = self.episode_stats, self._storage.ndim - (how == "add")
        if stats is None or not isinstance(data, TensorDictBase) or data.ndim < dims:
            return self._write_rows(data, how, update_priority)
        time_dim = -1 if data.ndim > dims else None if how == "add" else self._dim_extend
        steps = stats.read(data, time_dim=time_dim)  # refuses what it cannot count before anything is written
        with self._replay_lock:
            index = self._write_rows(data, how, update_priority)
            stats.record(steps)
        return index

    def _write_rows(self, data: TensorDictBase, how: str, update_priority: bool) -> Any:
        if type(data) is not TensorDict and not isinstance(data, TensorDictBase):
            raise TypeError(f"{how} takes a TensorDict, got {type(data).__name__}")
        if self._writes_generally:
            return super().add(data) if how == "add" else super().extend(data, update_priority=update_priority)
        if len(self._stages):
            with _set_dispatch_td_nn_modules(True):
                data = self._transform.inv(data)
            if data is None:  # a transform may keep data back
                return torch.zeros((0, self._storage.ndim), dtype=torch.long)
        rows = data
        if how == "extend" and self._dim_extend > 0:
            if data.ndim <= self._dim_extend:
                raise SchemaError(
                    f"extend takes batch size [E, T] (lanes, time) with ndim={self._storage.ndim}, got {[*data.shape]}"
                )
            rows = reshaped(data, self._transpose)
        row_dims = self._storage.ndim - (how == "add")
        td_error = None
        sampler = self._prioritized
        if update_priority and sampler is not None:
            td_error = rows.get(self.priority_key, None)
        if sampler is not None and td_error is not None:
            td_error = one_a_row(td_error, row_dims, sampler.reduction)
            if backend_of(td_error) == "numba":
                refuse_errors(td_error)
        with self._replay_lock, self._write_lock:
            index = getattr(self._writer, how)(rows)
            getattr(self._sampler, how)(index)
            if sampler is not None and td_error is not None:
                sampler.update_priority(index, td_error, storage=self._storage)
        return index

    def mark_update(self, index: Any) -> None:
        """Tell the sampler that rows have been written; writers do."""
        with self._replay_lock, self._write_lock:
            super().mark_update(index)

    def mark_range(self, start: int, count: int) -> None:
        """Tell the sampler that flat rows ``start, start + 1, ...`` have been written; a :class:`RingWriter` does."""
        if self._prioritized is not None:
            self._prioritized.mark_range(start, count, storage=self._storage)
        elif type(self._sampler).mark_update is not Sampler.mark_update:
            index = coordinates(torch.arange(start, start + count, device=self._storage.device), self._storage)
            self.mark_update(torch.stack(index, -1) if isinstance(index, tuple) else index)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all rows and priorities; keep the schema.

        Args:
            empty_write_count: count the writes anew, too.
        """
        if not self._initialized:
            self._init()
        with self._replay_lock, self._write_lock:
            super().empty(empty_write_count)

    # -- priorities

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give rows the magnitudes of TD errors, whatever they hold by now.

        Args:
            index: flat rows, or as :meth:`extend` and :meth:`sample` give it: a tuple of coordinates, or
                ``[..., ndim]``.
            priority: one TD error a row, in the same order; or one for all.

        Raises:
            ValueError: wrong number of errors, or NaN or infinite ones; all priorities are as they were.
            IndexError: a row is out of range; all priorities are as they were.
        """
        if not self._initialized:
            self._init()
        if self._prioritized is None:
            return super().update_priority(index, priority)
        if self._prefetcher is not None:
            self._prefetcher.flush()
        by_coordinates = self._storage.ndim > 1
        if isinstance(index, torch.Tensor) and index.ndim > 1 + by_coordinates:
            index = index.flatten(0, -2) if by_coordinates else index.flatten()
        with self._replay_lock, self._write_lock:
            self._prioritized.update_priority(index, priority, storage=self._storage)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Give the rows of a batch the TD errors that it now holds; does nothing for a sampler without priorities.

        Rows that have been replaced since the batch was sampled keep the priority of what they hold now, and are
        counted (:meth:`health`), whatever has happened in between: prefetching, other threads and processes, slicing
        the batch, moving it to a device. For a batch without its entry ``"sampled_at"`` all rows are updated, as by
        :meth:`update_priority`.

        Args:
            data: a batch of this buffer (it knows its rows by ``"index"``, and by ``"sampled_at"`` whether they are
                what they were) with ``priority_key`` set, ``[B]`` or ``[B, ...]``: several errors a row are reduced,
                by magnitude.

        Raises:
            KeyError: there are no TD errors in the batch, or no index.
            ValueError: an error is NaN or infinite; all priorities are as they were.
        """
        if not self._initialized:
            self._init()
        sampler = self._prioritized
        if sampler is None or self._sample_unit is not None:
            return super().update_tensordict_priority(data)
        if self._plan is not None:
            with self._storage.lock, self._write_lock:
                stale = self._plan.update(data, self.priority_key) if self._plan is not None else None
            if stale is not None:
                self._stale_updates.add(stale)
                return None
        index, td_error = self._errors_of(data, sampler.reduction)
        update = index, td_error, entries_of(data).get(SAMPLED_AT), data.ndim
        if self._prefetcher is None or not self._copies_batches or not self._prefetcher.return_errors(*update):
            self._write_priorities(*update)

    def _write_priorities(
        self, index: torch.Tensor, td_error: torch.Tensor, sampled_at: torch.Tensor | None, dims: int
    ) -> None:
        """Update priorities, except of rows that have been replaced since ``sampled_at``, of ``dims`` batch dims."""
        stale: int | torch.Tensor = 0
        with self._replay_lock, self._write_lock:
            sampler = self._prioritized
            if sampler is None:  # another sampler has been set since the update
                return
            if sampled_at is not None and isinstance(self._storage, PackedStorage):
                index, stale = skip_stale(index, sampled_at, dims, self._storage)
            sampler.update_priority(index, td_error, storage=self._storage)
            self._stale_updates.add(stale)

    def _errors_of(self, data: TensorDictBase, reduction: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows whose priorities a batch changes, in any form, and their TD errors.

        Raises:
            KeyError: there are no TD errors in the batch, or no index.
        """
        key, entries = self.priority_key, entries_of(data)
        td_error = entries.get(key) if type(key) is str else data.get(key, None)
        index = entries.get("index")
        if td_error is None or index is None:
            missing = self.priority_key if td_error is None else "index"
            raise KeyError(f"the batch has no {missing!r}: give it the TD errors of the rows that were sampled")
        td_error, index = by_row(td_error, index, data.ndim, self._storage, reduction)
        return (index, td_error) if self._wrapper is None else self._wrapper.anchored(data, index, td_error)

    # -- a learner on another device

    @property
    def _copies_batches(self) -> bool:
        """Whether batches are copied to another device than that of the rows."""
        return self._prefetcher is not None and self._prefetcher.copies_from(self._storage)

    def _refuse_parts_without_prefetch(self) -> None:
        """Refuse a storage or sampler whose batches cannot be copied to a device.

        Raises:
            TypeError: see above.
        """
        if self._copies_batches and not (self._is_direct and device_of(self._storage).type == "cpu"):
            raise TypeError(
                "device= needs a PackedStorage on the CPU and a sampler of this package or with a draw of its own, got "
                f"{type(self._storage).__name__} on {device_of(self._storage)} and {type(self._sampler).__name__} "
                "(nor does it take a collate_fn, a sample unit or tracked generations)"
            )

    def _draw_packed(self, batch_size: int, pack: Pack) -> Any:
        """Draw a batch and let ``pack`` gather its rows, under the locks."""
        with self._replay_lock, self._write_lock:
            self._refuse_parts_without_prefetch()
            storage, rows = self._storage, None
            now = storage.clock.now if self._prioritized is not None else None
            if self._draws_batches:
                flat, info, rows = self._sampler.draw_batch(storage, batch_size)
            else:
                flat, info = self._sampler.draw(storage, batch_size)
            self._note_draw(coordinates(flat, storage), info)
            if now is not None:
                info[SAMPLED_AT] = storage.clock.stamp(now, flat.shape[0], flat.device)
            return pack(flat, info, storage.written_rows() if rows is None else rows)

    def capture(
        self,
        step: Callable[[TensorDictBase], Any] | None = None,
        batch_size: int | None = None,
        *,
        ring: int = 2,
        warmup: int = 3,
    ) -> CapturedStep:
        """Return a function that samples, calls ``step(batch)`` and updates priorities, on CUDA as one graph.

        The graph stays right while the buffer fills and wraps and while alpha and beta change; each call draws anew.
        Write with :meth:`extend` between calls, on the same stream; other threads wait while a graph is launched. On
        the CPU there is no graph, and other threads may write during the step: rows that they replace are left out, as
        by :meth:`update_tensordict_priority`.

        **Aliasing:** outputs lie in memory that is used again: the output of call ``k`` is valid until call
        ``k + ring``.

        Args:
            step: takes a batch, and may return tensors. The TD errors that it leaves in ``priority_key`` become the
                priorities of the rows, or of the anchors of sequences; without that key priorities stay. It must be
                what a CUDA graph can hold: no host synchronisation, optimizers with ``capturable=True``. ``None``:
                return the batch, update nothing.
            batch_size: default: the buffer's.
            ring: number of outputs, at least 2.
            warmup: number of steps that run, with effect, before the capture.

        Raises:
            ValueError: an argument is out of range, or there is no batch size; (when called) the buffer's generator is
                not on the device of its rows, or the sampler cannot draw such a batch: nothing has changed.
            TypeError: ``step`` is not callable; (when called) the storage is not a :class:`PackedStorage`, or the
                sampler cannot be captured (:class:`MinibatchSampler`, TorchRL's samplers).
            RuntimeError: (when called) the buffer is empty.
        """
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError("say how many rows a batch has: batch_size")
        return CapturedStep(self, step, size, ring, warmup)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches until the sampler has run out (of an epoch, for example)."""
        if not self._initialized:
            self._init()
        if not self._copies_batches or self._batch_size is None:
            yield from super().__iter__()
            return
        if self._sampler.ran_out and not self._has_prefetched:
            self._sampler.ran_out = False
        while not self._sampler.ran_out or self._has_prefetched:
            yield self.sample()

    @property
    def _has_prefetched(self) -> bool:
        """Whether batches have been drawn ahead for a device."""
        return self._prefetcher is not None and self._prefetcher.has_batches

    def synchronize(self) -> None:
        """Wait for asynchronous updates, and for TD errors on their way from a device."""
        super().synchronize()
        if self._prefetcher is not None:
            self._prefetcher.flush()

    # TorchRL calls these when it saves, loads or pickles a buffer.

    @contextmanager
    def _capture_prefetch_state(self, *, clone_queue: bool = True) -> Iterator[dict[str, Any]]:
        paused = nullcontext() if self._prefetcher is None else self._prefetcher.paused()
        with paused, super()._capture_prefetch_state(clone_queue=clone_queue) as state:
            yield state

    def _validate_prefetch_state(self, prefetch_state: Any) -> None:
        super()._validate_prefetch_state(self._without_batches(prefetch_state))

    def _restore_prefetch_queue_locked(self, prefetch_state: Any, *, clone_queue: bool = True) -> None:
        super()._restore_prefetch_queue_locked(self._without_batches(prefetch_state), clone_queue=clone_queue)

    def _without_batches(self, prefetch_state: Any) -> Any:
        """Drop batches that a buffer without ``device`` fetched ahead, if this one has ``device``."""
        is_dropped = self._prefetcher is not None and isinstance(prefetch_state, dict)
        return prefetch_state | {"queue": ()} if is_dropped else prefetch_state

    def _clear_prefetch_queue_locked(self) -> None:
        super()._clear_prefetch_queue_locked()
        if self._prefetcher is not None:
            self._prefetcher.drop()


def _how_it_draws(sampler: type[Sampler]) -> str | None:
    """Return how a class of samplers draws at best, unless a subclass has changed it: batches, flat rows or neither."""
    for each in sampler.__mro__:
        for name in ("draw_batch", "draw"):
            if name in each.__dict__:
                return name
        if "sample" in each.__dict__:
            return None
    return None
