"""Sampling, learning and updating priorities as one CUDA graph: what :meth:`ReplayBuffer.capture` returns."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDictBase

from rlbuf_td.diagnostics.health import unwrapped
from rlbuf_td.kernels.device_scalars import DeviceScalars, capturing
from rlbuf_td.samplers import MinibatchSampler
from rlbuf_td.samplers.common import GraphCapturable
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.indexing import device_of
from rlbuf_td.storages.write_clock import SAMPLED_AT

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer


class _Baked(NamedTuple):
    """What a graph goes on with as it was when it was captured."""

    objects: tuple[Any, ...]  # the same ones; held here, so that nothing else comes to lie where they do
    values: tuple[Any, ...]

    def is_still(self, other: _Baked) -> bool:
        same = len(self.objects) == len(other.objects) and all(map(is_, self.objects, other.objects))
        return same and self.values == other.values


class _Captured(NamedTuple):
    """A graph, what the step returned in it, and the rows and weights that it draws."""

    graph: torch.cuda.CUDAGraph
    output: Any
    drawn: tuple[Any, torch.Tensor | None]


class CapturedStep:
    """A step that is launched as a whole; :meth:`ReplayBuffer.capture` makes it.

    What the host decides between two calls (rows written, alpha, beta, thresholds) lies in device memory and is put
    there before a replay; the random numbers of a replay go on where the last ones ended. What a graph cannot see
    change (settings, other memory after ``load_state_dict``, another sampler, generator or transform) is noticed, and
    the graphs are made anew.

    Args:
        buffer: what is sampled.
        step: what is done with a batch; ``None`` returns it.
        batch_size: rows a batch.
        ring: how many outputs there are, each in memory of its own.
        warmup: how often everything is done, for real, before it is captured.

    Raises:
        ValueError: a number is out of range.
        TypeError: ``step`` cannot be called.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        step: Callable[[TensorDictBase], Any] | None,
        batch_size: int,
        ring: int,
        warmup: int,
    ) -> None:
        if step is not None and not callable(step):
            raise TypeError(f"step must be a function of a batch, or None, got {type(step).__name__}")
        if batch_size < 1 or batch_size != int(batch_size):
            raise ValueError(f"batch_size must be a whole number, at least 1, got {batch_size}")
        if ring < 2 or ring != int(ring):
            raise ValueError(f"ring must be at least 2, so that an output outlives the next call, got {ring}")
        if warmup < 1 or warmup != int(warmup):
            raise ValueError(f"warmup must be at least 1: kernels are compiled outside of a graph, got {warmup}")
        self._buffer, self._step, self._batch_size = buffer, step, int(batch_size)
        self._ring, self._warmup = int(ring), int(warmup)
        self._graphs: list[_Captured] = []
        self._next = 0
        self._now = DeviceScalars(1, "cpu")  # how many time steps have been written
        self._baked: _Baked | None = None

    @property
    def is_captured(self) -> bool:
        """Whether calls replay a graph; never on the CPU, where they do the same one operation after the other."""
        return bool(self._graphs)

    def __call__(self) -> Any:
        """Sample, do the step, update priorities; return what the step returned.

        On CUDA this memory is used again after ``ring`` calls: copy what you keep.
        """
        buffer = self._buffer
        if not buffer._initialized:
            buffer._init()
        if device_of(self._checked()).type != "cuda":
            return self._learned(buffer._sample(self._batch_size)[0], buffer.update_tensordict_priority)
        with buffer._replay_lock, buffer._write_lock:
            return self._replayed(self._checked())

    def _checked(self) -> PackedStorage:
        """Return the storage.

        Raises:
            TypeError: a part of the buffer cannot be captured.
            RuntimeError: the buffer is empty.
        """
        buffer = self._buffer
        sampler = unwrapped(buffer._sampler)
        if isinstance(sampler, MinibatchSampler):
            raise TypeError(
                "cannot capture a MinibatchSampler: the host counts its epochs, and ends them with a shorter batch; "
                "take UniformSampler(unique=True), or sample outside of a graph"
            )
        if not buffer._is_direct or not isinstance(sampler, GraphCapturable):
            raise TypeError(
                f"cannot capture a buffer with {type(buffer._storage).__name__} and {type(sampler).__name__}: "
                "it takes PackedStorage, and UniformSampler, ProportionalSampler or RankSampler, "
                "or HindsightSampler, NStepSampler or SequenceSampler over them"
            )
        if not len(buffer._storage):
            raise RuntimeError("cannot sample from an empty buffer: extend it first")
        return buffer._storage

    def _learned(self, batch: TensorDictBase, update: Callable[[TensorDictBase], None]) -> Any:
        """Do the step, give the errors that it leaves in the batch to ``update``, and return what it returned."""
        buffer = self._buffer
        if self._step is None:  # errors in the batch, if any, are what was written with its rows
            return batch
        output = self._step(batch)
        if buffer._prioritized is not None and batch.get(buffer.priority_key, None) is not None:
            update(batch)
        return output

    # -- on CUDA, under the buffer's lock: nobody writes while a graph is launched

    def _replayed(self, storage: PackedStorage) -> Any:
        buffer = self._buffer
        sampler = buffer._sampler
        key = sampler.prepare_graph(storage, self._batch_size)
        if self._now.tensor.device != storage.device:
            self._now = DeviceScalars(1, storage.device)
        self._now.set_(0, storage.clock.now)
        baked = self._what_is_baked(storage, key)
        if self._baked is None or not self._baked.is_still(baked):
            self._capture(storage)
            self._baked = baked
        captured = self._graphs[self._next]
        self._next = (self._next + 1) % self._ring
        captured.graph.replay()
        buffer.last_draw = (*captured.drawn, getattr(buffer._writer, "_cursor", 0))
        sampler.forget_order()
        return captured.output

    def _what_is_baked(self, storage: PackedStorage, key: Any) -> _Baked:
        buffer = self._buffer
        sampler, replays = buffer._sampler, buffer._replays
        counts = None if replays is None else replays.counts()
        read = storage._storage, *storage.all_rows().sources(), self._now, counts
        return _Baked((sampler, sampler._rng, *read, *buffer._stages), (key,))

    def _capture(self, storage: PackedStorage) -> None:
        """Record one graph for each output of the ring, each with memory of its own.

        Raises:
            ValueError: the buffer's generator is on another device; the graphs that there are stay.
        """
        buffer = self._buffer
        sampler, before = buffer._sampler, buffer.last_draw
        generator, device = sampler._rng, device_of(storage)
        if generator is not None and generator.device.type != device.type:
            raise ValueError(
                f"the buffer's generator is on {generator.device}: a graph draws from one on {device}, or from "
                "torch's default (set_rng(None))"
            )
        self._graphs.clear()
        self._next, self._baked = 0, None
        try:
            with torch.cuda.device(device), capturing():
                # torch's own stream for captures is one of the GPU on which the process has captured first.
                beside = torch.cuda.Stream()
                self._warm_up(storage, beside)
                for _ in range(self._ring):
                    sampler.forget_order()  # a sort that is due once must be in every replay
                    self._graphs.append(self._recorded(storage, generator, beside))
        except BaseException:
            self._graphs.clear()
            buffer.last_draw = before
            raise
        finally:
            sampler.forget_order()  # what has been recorded has not been done yet

    def _warm_up(self, storage: PackedStorage, beside: torch.cuda.Stream) -> None:
        """Do everything on a stream beside, so that all kernels and all lasting memory are there."""
        current = torch.cuda.current_stream()
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(self._warmup):
                self._buffer._sampler.forget_order()
                self._run(storage)
        current.wait_stream(beside)

    def _recorded(
        self, storage: PackedStorage, generator: torch.Generator | None, beside: torch.cuda.Stream
    ) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        if generator is not None:
            graph.register_generator_state(generator)
        # What other threads ask of the GPU meanwhile (memory, whether an event has come) is their affair.
        how: Any = {"stream": beside, "capture_error_mode": "thread_local"}
        with torch.cuda.stream(beside), torch.cuda.graph(graph, **how):  # the former ends even if a capture fails
            output, drawn = self._run(storage)
        return _Captured(graph, output, drawn)

    def _run(self, storage: PackedStorage) -> tuple[Any, tuple[Any, torch.Tensor | None]]:
        """Do everything once; return the output, and the rows and weights that were drawn."""
        buffer = self._buffer
        sampler = buffer._prioritized

        def update(batch: TensorDictBase) -> None:  # nothing is stale: nobody has written since the draw
            if sampler is not None:
                sampler.update_priority(*buffer._errors_of(batch, sampler.reduction), storage=storage)

        flat, info, batch = buffer._draw(self._batch_size)
        if sampler is not None:
            info[SAMPLED_AT] = self._now.tensor.long().expand(flat.shape[0])
        batch = buffer._assembled(flat, info, batch)
        drawn = info["index"], info.get("priority_weight")
        return self._learned(batch, update), drawn
