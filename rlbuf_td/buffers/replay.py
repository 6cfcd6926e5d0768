"""The replay buffer, which combines a storage, a sampler and a writer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import get_spawning_popen
from operator import attrgetter
from threading import RLock
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td.buffers import abilities, editing, flow, minari_data, parts, prefetch, priorities, torchrl_data, writing
from rlbuf_td.buffers.bound_write import BoundWrite
from rlbuf_td.buffers.parts import Parts, as_size
from rlbuf_td.buffers.prefetch import Prefetcher, Sample
from rlbuf_td.diagnostics.episode_stats import EpisodeStats
from rlbuf_td.diagnostics.health import LastDraw, ReplayCount
from rlbuf_td.diagnostics.html import html_of
from rlbuf_td.samplers import UniformSampler
from rlbuf_td.samplers.bound import BoundBatch, bind
from rlbuf_td.samplers.common import OwnSignature
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.checks import usable_device
from rlbuf_td.storages.indexing import attached_or_new, coordinates, merge_, put_back_
from rlbuf_td.storages.write_clock import SAMPLED_AT, Tally
from rlbuf_td.writers import RingWriter

_MOST_SIZES = 8  # batch sizes whose bound stages are kept


class ReplayBuffer(TensorDictReplayBuffer):
    """A replay buffer for TorchRL: stores transitions and samples batches.

    Takes the keywords of TorchRL's ``TensorDictReplayBuffer``, except ``checkpointer``. Sampling is fast with a
    :class:`PackedStorage` and a sampler of this package, or another sampler with a ``draw`` method. Other buffers use
    TorchRL's slower code, and so do ``collate_fn``, ``sample_unit``, and a writer with ``track_generations=True``.

    Args:
        storage: keeps the transitions, default ``PackedStorage(1_000)``. If the storage already holds rows, a
            :class:`RingWriter` continues after the newest row.
        sampler: chooses the rows of a batch, default :class:`UniformSampler`.
        writer: chooses where new transitions are stored, default :class:`RingWriter`.
        priority_key: the key of TD errors in a batch, default ``"td_error"``.
        stats: an :class:`EpisodeStats` that records every write, before any transform.
        count_replays: count how often each row is sampled, for :meth:`health`; this takes 4 bytes per row.
        include_info: whether batches contain the sampler's report (index, weights, ...), default ``True``.
        device: the device to which batches are copied from host memory; transforms run on this device. With
            ``prefetch=k``, k batches are copied ahead asynchronously, and up to k priority updates wait in a queue.
            Saving the buffer applies the queued updates, and drops the batches copied ahead.
        prefetch: k, the number of batches that are drawn and transformed ahead. Transforms that take more than 1 ms run
            in threads. Without transforms, ``pin_memory`` and ``device``, only buffers that use TorchRL's code draw
            ahead. Equal seeds give equal batches, except with random transforms in threads, or with TorchRL's
            samplers. :meth:`empty`, a load, or a change of storage, sampler or transform drops the batches drawn ahead.
        samples_per_insert: target ratio of sampled rows to written rows. A write that would exceed ``tolerance`` waits.
            If a batch would exceed it, :meth:`sample` raises a RuntimeError, or waits if ``wait=True``.
        min_size: number of rows that must be written before the first batch, and again after :meth:`empty`.
        tolerance: largest deviation from the target, in sampled rows; see :class:`~rlbuf_td.buffers.flow.FlowControl`.
        **kwargs: other keywords of ``TensorDictReplayBuffer``: ``batch_size``, ``transform``, ``pin_memory``,
            ``generator``, ``dim_extend``, ``sample_unit``, ``collate_fn``, ``shared``, ...

    Unlike in TorchRL, the batch that transforms receive already contains the sampler's report. If a transform removes
    an entry of the report, the buffer puts the entry back. If a row has several TD errors, their magnitudes are reduced
    to one; TorchRL reduces the signed errors. Updating priorities from a batch without TD errors raises a KeyError;
    TorchRL sets the default priority. Rows with an entry that the report has, too, are refused (:class:`SchemaError`).

    Cost: see the storage, sampler and writer; ``python -m rlbuf_td bench`` measures whole calls.

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

    __signature__ = OwnSignature()

    def __init__(
        self,
        *,
        priority_key: str = "td_error",
        stats: EpisodeStats | None = None,
        count_replays: bool = False,
        include_info: bool = True,
        device: torch.device | str | None = None,
        samples_per_insert: float | None = None,
        min_size: int = 0,
        tolerance: float | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("checkpointer") is not None:
            raise NotImplementedError(abilities.NO_CHECKPOINTERS)
        self.parts: Parts = None  # type: ignore[assignment]  # until initialized
        self.episode_stats = stats  # the name ``stats`` is a method of TorchRL's buffers
        self.last_draw: LastDraw | None = None
        self.replay_count: ReplayCount | None = None
        self.stale_updates = Tally()
        self._count_replays, self.include_info, self.has_environment = count_replays, include_info, False
        #: Bound batches by size; in place of one, the reason in one line why there is none.
        self.bound: dict[int, BoundBatch | str] = {}
        self.bound_write: BoundWrite | str | None = None
        ahead = kwargs.get("prefetch") or 0
        self.flow = flow.make_flow(samples_per_insert, min_size, tolerance, ahead)
        device = None if device is None else usable_device(device)
        self.prefetcher = Prefetcher(self, device, ahead) if ahead or device is not None else None
        defaults = {"storage": partial(PackedStorage, 1_000), "sampler": UniformSampler, "writer": RingWriter}
        if kwargs.get("consume_after_n_samples") is not None:
            del defaults["sampler"]  # TorchRL uses its default
        kwargs |= {part: default for part, default in defaults.items() if kwargs.get(part) is None}
        super().__init__(priority_key=priority_key, **kwargs)
        if device is not None:
            self._prefetch = False  # disables TorchRL's own prefetching

    # The methods below are functions of other modules, which document them.
    from_env = abilities.constructor(abilities.from_env)
    from_spaces = abilities.constructor(abilities.from_spaces)
    from_schema = abilities.constructor(abilities.from_schema)
    from_minari = abilities.constructor(minari_data.from_minari)
    to_minari = minari_data.to_minari
    from_torchrl = abilities.constructor(torchrl_data.from_torchrl)
    add = writing.add
    extend = writing.extend
    write_back = writing.write_back
    mark_update = writing.mark_update
    mark_range = writing.mark_range
    refuse_schema = parts.refuse_schema
    set_storage = parts.set_storage
    set_sampler = parts.set_sampler
    set_writer = parts.set_writer
    empty = writing.empty
    update_priority = priorities.update_priority
    update_tensordict_priority = priorities.update_tensordict_priority
    full = property(lambda rb: torchrl_parts.is_full(rb.storage), doc="Whether there are as many rows as the capacity.")
    chronological = abilities.chronological
    last = abilities.last
    set_at_ = editing.set_at_
    set_ = editing.set_
    update_ = editing.update_
    __setitem__ = editing.set_item
    health = abilities.health
    dumps = abilities.dumps
    loads = abilities.loads
    register_save_hook = register_load_hook = abilities.refuse_hook
    share = abilities.share
    repair = abilities.repair
    state_dict = abilities.state_dict
    load_state_dict = abilities.load_state_dict
    shutdown = flow.shutdown
    synchronize = prefetch.synchronize
    __iter__ = prefetch.iterate
    _repr_html_ = html_of
    __repr__ = abilities.describe

    def _init(self) -> None:
        super()._init()
        self.connect()
        parts.continue_ring(self._writer, self._storage)
        if self.prefetcher is not None:
            self.prefetcher.refuse_other_parts(self.parts)
        if self.shared or getattr(self._storage, "shared", False):
            self.share()

    def initialize(self) -> Parts:
        """Return the components of the buffer; initialize the buffer if this has not happened yet."""
        if not self._initialized:
            self._init()
        return self.parts or self.connect()

    def _get_collate_fn(self, collate_fn: Any) -> None:
        self._has_collate_fn = collate_fn is not None
        super()._get_collate_fn(collate_fn)

    def connect(self, *, default_priorities: bool = False) -> Parts:
        """Update ``parts``; with ``default_priorities``, rows without a priority get the priority of new rows."""
        self.bound, self.bound_write = {}, None
        transforms, has_units = getattr(self._transform, "transforms", ()), self._sample_unit is not None
        parts = Parts.of(self._storage, self._sampler, self._writer, transforms, has_units, self._has_collate_fn)
        self.parts = parts
        if parts.prioritized is not None:
            parts.prioritized.priorities.follow(parts.storage)
            if default_priorities:
                parts.prioritized.priorities.admit(parts.storage)
        self.replay_count = attached_or_new(parts.storage, ReplayCount) if self._count_replays else None
        return parts

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        wait: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Return a batch ``[B]`` in fresh memory, as a TensorDict; ``batch.numpy()`` returns a dict of NumPy arrays.

        Args:
            batch_size: B, default: the ``batch_size`` of the buffer.
            return_info: return ``(batch, info)``, where ``info`` is the sampler's report.
            include_info: whether the batch contains the sampler's report, default: the setting of the buffer.
            wait: wait until the buffer has rows and flow control admits the batch.
            timeout: longest wait in seconds; ``None`` waits forever.

        Raises:
            ValueError: the batch size is negative or no whole number.
            RuntimeError: no batch size is given. Without ``wait``, also: the buffer is empty, or flow control does not
                admit the batch.
            TimeoutError: the wait took longer than ``timeout``.
        """
        include_info = self.include_info if include_info is None else include_info
        if not wait and self.flow is None:
            return self._sample_now(batch_size, return_info, include_info)
        with flow.permission(self, batch_size or self._batch_size, wait, timeout):
            return self._sample_now(batch_size, return_info, include_info)

    def _sample_now(self, batch_size: int | None, return_info: bool, include_info: bool) -> Any:
        size = self._batch_size if batch_size is None else batch_size
        if type(size) is int and size in self.bound and include_info and not return_info and self.returns_as_drawn:
            drawn = self._draw_bound(size)
            if drawn is not None:
                return drawn[0]
        if not (self.parts or self.initialize()).draws:
            generally = super().sample if include_info else super(TensorDictReplayBuffer, self).sample
            return generally(batch_size, return_info)
        size = as_size(self._batch_size if batch_size is None else batch_size)
        is_other = size != self._batch_size is not None and self.prefetcher is None
        if self._service_shutdown or size is None or is_other:  # TorchRL raises an error or warns
            batch, info = super(TensorDictReplayBuffer, self).sample(batch_size, return_info=True)
        else:
            batch, info = self._sample(size)
        if size is not None and size not in self.bound and not self.parts.is_looking:
            self._bind(size)
        if not include_info:
            batch = self.parts.without_report(batch, info)
        return (batch, info) if return_info else batch

    @property
    def returns_as_drawn(self) -> bool:
        """Whether batches are returned as drawn: not transformed, not page-locked, not copied to a device."""
        is_moved = self._pin_memory or (self.prefetcher is not None and self.copies_batches)
        return not (is_moved or self._service_shutdown or torchrl_parts.modules_of(self.parts.transforms))

    @property
    def compiled(self) -> str:
        """The calls that compiled code executes, and in one line why others are not compiled.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> rb = ReplayBuffer(batch_size=2)
            >>> for _ in range(2):
            ...     _ = rb.extend(TensorDict({"x": torch.zeros(4)}, [4])), rb.sample()
            >>> rb.compiled
            'add, extend, sample'
        """
        bound = self.bound.get(self._batch_size or 0, next(iter(self.bound.values()), None))
        update = "" if self.parts is None or self.parts.prioritized is None else ", update_tensordict_priority"
        calls = {"add, extend": self.bound_write, f"sample{update}": bound}
        if self.parts is not None and not self.parts.draws:
            calls[f"sample{update}"] = "TorchRL's code draws"
        found = [name for name, stage in calls.items() if not (stage is None or isinstance(stage, str))]
        others = [f"not {name}: {stage or 'no call yet'}" for name, stage in calls.items() if name not in found]
        return "; ".join([*([", ".join(found)] if found else []), *others])

    def _draw_bound(self, size: int) -> Sample | None:
        """Draw a batch by :attr:`bound` stages; return None if there are none for this size, or they are outdated."""
        with self.parts.storage.lock:
            bound = self.bound.get(size)
            drawn = None if bound is None or isinstance(bound, str) else bound.sample()
            if drawn is None:
                if not isinstance(bound, str):
                    self.bound.pop(size, None)
                return None
            report, newest = drawn.report, bound.newest  # type: ignore[union-attr]
            self.last_draw = report["index"], report.get("priority_weight"), newest
            if self.replay_count is not None:
                self.replay_count.count_(report["index"])
        return drawn.batch, report

    def _bind(self, size: int) -> None:
        with self.locked():
            if len(self.bound) == _MOST_SIZES:
                self.bound.clear()
            self.bound[size] = bind(self._storage, self._sampler, size)

    def _sample(self, batch_size: int) -> Sample:
        if self.prefetcher is not None and (self.parts.draws or self.copies_batches):  # not in TorchRL's threads
            with self._futures_lock:
                if self.copies_batches or (self._prefetch and self.parts.draws and not self.returns_as_drawn):
                    return self.prefetcher.take(batch_size, prefetch=batch_size == self._batch_size)
        drawn = self.draw(batch_size)
        return self._sample_generally(batch_size) if drawn is None else self.finish(*drawn)

    def sample_and_report(self, batch_size: int) -> Sample:
        """Return a batch and the sampler's report; flow control does not count the batch."""
        return self._sample(batch_size)

    def draw(self, batch_size: int) -> Sample | None:
        """Return an untransformed batch and the sampler's report, or None if TorchRL's code must draw."""
        storage = self._storage
        drawn = self._draw_bound(batch_size) if batch_size in self.bound else None
        if drawn is not None and storage.ndim > 1:
            drawn[1]["index"] = drawn[1]["index"].unbind(-1)
        if drawn is not None or not self.parts.is_packed:
            return drawn
        with storage.lock:
            parts = self.parts  # under the lock: another thread may replace the sampler
            if not parts.draws:
                return None
            flat, info, batch = parts.draw(batch_size, storage.gather)
            if parts.is_stamped:
                info[SAMPLED_AT] = storage.clock.stamp(storage.clock.now, flat.shape[0], flat.device)
        return self.assemble(flat, info, batch), info

    def finish(self, batch: Any, info: dict[Any, Any]) -> Sample:
        """Transform a batch, and move it to page-locked memory if the buffer was made with ``pin_memory``."""
        batch = self.transformed(batch, info)
        if self._pin_memory and batch.device is not None and batch.device.type == "cpu":
            batch = batch.pin_memory()
        return batch, info

    def _sample_generally(self, batch_size: int) -> Sample:
        now = self._storage.clock.now if self.parts.is_stamped else None
        batch, info = super()._sample(batch_size)
        self._note_draw(info["index"], info)
        if now is not None:
            first = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
            info[SAMPLED_AT] = self._storage.clock.stamp(now, first.shape[0], first.device)
        return batch, info

    def assemble(self, flat: torch.Tensor, info: dict[Any, Any], batch: Any) -> TensorDictBase:
        """Add the sampler's report ``info`` and the index of the rows to a batch."""
        info["index"] = index = flat if self._storage.ndim == 1 else coordinates(flat, self._storage)
        self._note_draw(index, info)
        merge_(batch, info)
        return batch

    def _note_draw(self, index: Any, info: dict[str, Any]) -> None:
        """Record the rows and weights of a batch, and the newest time step, for :meth:`health`."""
        self.last_draw = index, info.get("priority_weight"), self.parts.newest()
        if self.replay_count is not None:
            self.replay_count.count_(index)

    def transformed(self, batch: TensorDictBase, report: Iterable[NestedKey] = ()) -> TensorDictBase:
        """Transform a batch; put back entries whose keys are in ``report`` if a transform has removed them."""
        if not len(self.parts.transforms):
            return batch
        known = {key: batch.get(key) for key in report}
        with _set_dispatch_td_nn_modules(True):
            batch = self._transform(batch)
        if isinstance(batch, TensorDictBase):
            put_back_(batch, known)
        return batch

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the locks under which writes, draws and priority updates run one at a time."""
        self.initialize()
        with self._replay_lock, self._write_lock:
            yield

    @contextmanager
    def fully_locked(self) -> Iterator[None]:
        """Drop the batches drawn ahead, and hold all locks of the buffer."""
        with self._futures_lock:
            self._clear_prefetch_queue_locked()  # waits for threads that need the other locks
            with self.locked():
                yield

    @property
    def _replay_lock(self) -> Any:
        """The lock of the storage, or a lock of this buffer if the storage has none."""
        lock = getattr(self.__dict__.get("_storage"), "lock", None)
        return self._own_lock if lock is None else lock

    @_replay_lock.setter
    def _replay_lock(self, lock: Any) -> None:
        self._own_lock = lock  # TorchRL's lock, for storages without one

    @property
    def copies_batches(self) -> bool:
        """Whether batches are copied to ``device``: not if ``device`` is None, or is the GPU that holds the rows."""
        return self.prefetcher is not None and self.prefetcher.copies_from(self._storage)

    futures_lock = property(attrgetter("_futures_lock"), doc="TorchRL's lock of the batches drawn ahead.")
    replay_lock = property(attrgetter("_replay_lock"), doc="The lock of rows and priorities.")
    is_shut_down = property(attrgetter("_service_shutdown"), doc="Whether :meth:`shutdown` has been called.")
    consume_after_n_samples = property(attrgetter("_consume_after_n_samples"), doc="TorchRL's keyword of this name.")
    restore_options, order_lost = parts.restore_options, parts.order_lost
    prefetch_state = prefetch.prefetch_state
    capture_prefetched = _capture_prefetch_state = prefetch.capture_prefetched
    _clear_prefetch_queue_locked = prefetch.clear_prefetched
    validate_prefetched = _validate_prefetch_state = prefetch.validate_prefetched
    restore_prefetched = _restore_prefetch_queue_locked = prefetch.restore_prefetched

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None and self.parts is not None and self.parts.is_packed:
            self.share()
        state = super().__getstate__()
        state.pop("_own_lock")
        return state | {"bound": {}, "bound_write": None}  # these hold addresses

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._own_lock = RLock()
        super().__setstate__(state)
        self.rows_restored()

    def rows_restored(self) -> None:
        """Connect a sampler wrapper to the restored storage, after a copy or unpickling."""
        wrapper = getattr(vars(self).get("parts"), "wrapper", None)
        if wrapper is not None and "rows" in vars(self._storage):  # else the storage calls this method later
            wrapper.watch(self._storage)
