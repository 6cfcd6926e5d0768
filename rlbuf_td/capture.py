"""Sampling, learning and updating priorities as one CUDA graph: what :meth:`ReplayBuffer.capture` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from rlbuf_td.batches import merge_, one_a_row
from rlbuf_td.indices import coordinates, device_of
from rlbuf_td.kernels.numbers import DeviceNumbers
from rlbuf_td.kernels.paths import has_triton
from rlbuf_td.staleness import SAMPLED_AT
from rlbuf_td.storages import PackedStorage

if TYPE_CHECKING:
    from rlbuf_td.buffers import ReplayBuffer


class CapturedStep:
    """A step that is launched as a whole; :meth:`ReplayBuffer.capture` makes it.

    What the host decides between two calls (rows written, alpha, beta, thresholds) lies in device memory and is put
    there before a replay; the random numbers of a replay go on where the last ones ended. What a graph cannot see
    change (settings, other memory after ``load_state_dict``, another sampler) is noticed, and the graphs are made anew.

    Args:
        buffer: what is sampled.
        step: what is done with a batch; ``None`` returns it.
        batch_size: rows a batch.
        ring: how many outputs there are, each in memory of its own.
        warmup: how often everything is done, for real, before it is captured.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        step: Callable[[TensorDictBase], Any] | None,
        batch_size: int,
        ring: int,
        warmup: int,
    ) -> None:
        if ring < 2:
            raise ValueError(f"ring must be at least 2, so that an output outlives the next call, got {ring}")
        if warmup < 1:
            raise ValueError(f"warmup must be at least 1: kernels are compiled outside of a graph, got {warmup}")
        self._buffer, self._step, self._batch_size = buffer, step, batch_size
        self._ring, self._warmup = ring, warmup
        self._graphs: list[tuple[torch.cuda.CUDAGraph, Any, tuple[Any, Any]]] = []
        self._next = 0
        self._now = DeviceNumbers(1, "cpu")  # how many time steps have been written
        self._key: Any = None
        self._alive: Any = None  # what the key names by address, so that nothing else comes to lie there

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
        with buffer._replay_lock, buffer._write_lock:
            storage = self._checked()
            buffer._sampler.prepare_replay(storage)
            if self._now.tensor.device != storage.device:
                self._now = DeviceNumbers(1, storage.device)
            self._now.set_(0, storage.clock.now)
            if device_of(storage).type != "cuda":
                return self._run(storage)[0]
            key = self._what_is_baked(storage)
            if key != self._key:
                self._capture(storage)
                self._key, self._alive = key, (storage._storage, buffer._sampler)
            graph, output, drawn = self._graphs[self._next]
            self._next = (self._next + 1) % self._ring
            graph.replay()
            buffer._last_draw = (*drawn, getattr(buffer._writer, "_cursor", 0))
            buffer._sampler.forget_order()
            return output

    def _checked(self) -> PackedStorage:
        """Return the storage.

        Raises:
            TypeError: a part of the buffer cannot be captured.
            RuntimeError: the buffer is empty.
        """
        buffer = self._buffer
        if not buffer._is_direct or not hasattr(buffer._sampler, "prepare_replay"):
            raise TypeError(
                f"cannot capture a buffer with {type(buffer._storage).__name__} and {type(buffer._sampler).__name__}: "
                "it takes PackedStorage, and UniformSampler, ProportionalSampler or RankSampler, "
                "or HindsightSampler or NStepSampler over them"
            )
        if not len(buffer._storage):
            raise RuntimeError("cannot sample from an empty buffer: extend it first")
        return buffer._storage

    def _run(self, storage: PackedStorage) -> tuple[Any, tuple[Any, Any]]:
        """Do everything once; return the output, and the rows and weights that were drawn."""
        buffer = self._buffer
        if buffer._wrapper is not None:
            flat, info, batch = buffer._wrapper.draw_batch(storage, self._batch_size)
        else:
            flat, info = buffer._sampler.draw(storage, self._batch_size)
            batch = storage.gather(flat)
        if buffer._prioritized is not None:
            info[SAMPLED_AT] = self._now.tensor.long().repeat(flat.shape[0])
        info["index"] = index = coordinates(flat, storage)
        buffer._note_draw(index, info)
        merge_(batch, info)
        batch = buffer._transformed(batch)
        weight = info.get("priority_weight")
        if self._step is None:  # errors in the batch, if any, are what was written with its rows
            return batch, (index, weight)
        output = self._step(batch)
        sampler, td_error = buffer._prioritized, batch.get(buffer.priority_key, None)
        if sampler is not None and td_error is not None:
            sampler.update_priority(flat, one_a_row(td_error, 1, sampler.reduction), storage=storage)
        return output, (index, weight)

    def _what_is_baked(self, storage: PackedStorage) -> Any:
        """Return what a graph goes on with as it was when it was captured."""
        sampler, device = self._buffer._sampler, device_of(storage)
        bound = None if has_triton() else len(storage)  # torch's gather asserts that it reads written rows
        return device, id(storage._storage), bound, id(sampler), sampler.replay_key()

    def _capture(self, storage: PackedStorage) -> None:
        """Record one graph for each output of the ring; all share one pool of memory but for the outputs."""
        generator, device = self._buffer._sampler._rng, device_of(storage)
        if generator is not None and generator.device.type != device.type:
            raise ValueError(
                f"the buffer's generator is on {generator.device}: a graph draws from one on {device}, or from "
                "torch's default (set_rng(None))"
            )
        self._graphs.clear()
        self._next, self._key = 0, None
        with torch.cuda.device(device):
            current, beside = torch.cuda.current_stream(), torch.cuda.Stream()
            beside.wait_stream(current)
            with torch.cuda.stream(beside):
                for _ in range(self._warmup):
                    self._buffer._sampler.forget_order()
                    self._run(storage)
            current.wait_stream(beside)
            for _ in range(self._ring):
                graph = torch.cuda.CUDAGraph()
                if generator is not None:
                    graph.register_generator_state(generator)
                self._buffer._sampler.forget_order()  # a sort that is due once must be in every replay
                with torch.cuda.graph(graph):
                    output, drawn = self._run(storage)
                self._graphs.append((graph, output, drawn))
