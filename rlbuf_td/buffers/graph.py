"""Sampling, learning and updating priorities as one CUDA graph: :meth:`ReplayBuffer.capture`."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import TensorDictBase

from rlbuf_td.buffers.priorities import errors_of
from rlbuf_td.kernels.device_scalars import DeviceScalars, capturing
from rlbuf_td.samplers.common import EMPTY, GraphCapturable
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.indexing import device_of
from rlbuf_td.storages.notebooks import GPU
from rlbuf_td.storages.write_clock import SAMPLED_AT

Step: TypeAlias = Callable[[TensorDictBase], Any]


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    output: Any
    drawn: tuple[Any, torch.Tensor | None]  # index and weights of the batch


class CapturedStep:
    """A function that samples, calls ``step`` and updates priorities; see :meth:`ReplayBuffer.capture`."""

    def __init__(self, buffer: Any, step: Step | None, batch_size: int, ring: int, warmup: int) -> None:
        if step is not None and not callable(step):
            raise TypeError(f"step must be a function of a batch, or None, got {type(step).__name__}")
        for name, number, least in (("batch_size", batch_size, 1), ("ring", ring, 2), ("warmup", warmup, 1)):
            if number < least or number != int(number):
                raise ValueError(f"{name} must be a whole number, at least {least}, got {number}")
        self._buffer, self._step, self._batch_size = buffer, step, int(batch_size)
        self._ring, self._warmup = int(ring), int(warmup)
        self._graphs: list[_Graph] = []
        self._next = 0
        self._write_clock = DeviceScalars(1, "cpu")
        self._recorded_with: tuple[tuple[Any, ...], Any] = (), None

    @property
    def is_captured(self) -> bool:
        """Whether calls launch a recorded graph; always False on the CPU."""
        return bool(self._graphs)

    def __call__(self) -> Any:
        """Sample, call the step and update priorities; return the output, which later calls overwrite on CUDA."""
        buffer = self._buffer
        if device_of(self._capturable_storage()).type != "cuda":
            return self._learn(buffer.sample_and_report(self._batch_size)[0], buffer.update_tensordict_priority)
        with buffer.locked():
            return self._replay(self._capturable_storage())

    def _capturable_storage(self) -> PackedStorage:
        storage, sampler = self._buffer.storage, self._buffer.sampler
        if not self._buffer.parts.draws or not isinstance(getattr(sampler, "innermost", sampler), GraphCapturable):
            raise TypeError(
                f"cannot capture a buffer with {type(storage).__name__} and {type(sampler).__name__}: this needs "
                "PackedStorage, and UniformSampler, ProportionalSampler or RankSampler, or HindsightSampler, "
                "NStepSampler or SequenceSampler over them (the host counts the epochs of a MinibatchSampler: use "
                f"UniformSampler(unique=True), or sample outside of a graph){GPU}"
            )
        if not len(storage):
            raise RuntimeError(EMPTY)
        return storage

    def _learn(self, batch: TensorDictBase, update: Callable[[TensorDictBase], None]) -> Any:
        """Call the step, then ``update(batch)`` if the batch has TD errors; return the step's output."""
        if self._step is None:  # TD errors in the batch would be a stored entry
            return batch
        output = self._step(batch)
        if self._buffer.parts.prioritized is not None and batch.get(self._buffer.priority_key, None) is not None:
            update(batch)
        return output

    # -- on CUDA, under the buffer's locks: no other thread writes while a graph is launched

    def _replay(self, storage: PackedStorage) -> Any:
        buffer, sampler = self._buffer, self._buffer.sampler
        settings = sampler.prepare_graph(storage, self._batch_size)
        if self._write_clock.tensor.device != storage.device:
            self._write_clock = DeviceScalars(1, storage.device)
        self._write_clock.set_(0, storage.clock.now)
        counts = None if buffer.replay_count is None else buffer.replay_count.counts()
        memory = storage.rows, *storage.all_rows().sources(), self._write_clock, counts
        objects = sampler, torchrl_parts.generator_of(sampler), *memory, *buffer.parts.transforms
        # Keep the objects of the last recording alive, so that no new object gets the address of an old one.
        before, settings_before = self._recorded_with
        is_same = len(before) == len(objects) and all(map(is_, before, objects)) and settings_before == settings
        if not self._graphs or not is_same:
            self._record_all(storage)
            self._recorded_with = objects, settings
        recorded = self._graphs[self._next]
        self._next = (self._next + 1) % self._ring
        recorded.graph.replay()
        buffer.last_draw = (*recorded.drawn, buffer.parts.newest())
        sampler.forget_order()
        return recorded.output

    def _record_all(self, storage: PackedStorage) -> None:
        sampler, last_draw = self._buffer.sampler, self._buffer.last_draw
        generator, device = torchrl_parts.generator_of(sampler), device_of(storage)
        if generator is not None and generator.device.type != device.type:
            raise ValueError(
                f"the buffer's generator is on {generator.device}: a graph needs one on {device}, or "
                "torch's default (set_rng(None))"
            )
        self._graphs.clear()
        self._next = 0
        try:
            with torch.cuda.device(device), capturing():
                # A stream of this GPU: torch's own capture stream is on the GPU of the first capture.
                stream = torch.cuda.Stream()
                self._warm_up(storage, stream)  # compiles kernels and allocates persistent memory
                for _ in range(self._ring):
                    sampler.forget_order()  # every graph must contain the sort
                    self._graphs.append(self._record(storage, generator, stream))
        except BaseException:
            self._graphs.clear()
            self._buffer.last_draw = last_draw
            raise
        finally:
            sampler.forget_order()  # the sort has been recorded, but has not run

    def _warm_up(self, storage: PackedStorage, stream: torch.cuda.Stream) -> None:
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(self._warmup):
                self._buffer.sampler.forget_order()
                self._run(storage)
        current.wait_stream(stream)

    def _record(self, storage: PackedStorage, generator: torch.Generator | None, stream: torch.cuda.Stream) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        if generator is not None:
            graph.register_generator_state(generator)
        # "thread_local": other threads may allocate memory and query events meanwhile.
        options: Any = {"stream": stream, "capture_error_mode": "thread_local"}
        with torch.cuda.stream(stream), torch.cuda.graph(graph, **options):  # the outer block restores the stream
            output, drawn = self._run(storage)
        return _Graph(graph, output, drawn)

    def _run(self, storage: PackedStorage) -> tuple[Any, tuple[Any, torch.Tensor | None]]:
        """Run one step; return its output, and the index and weights of the batch."""
        buffer, parts = self._buffer, self._buffer.parts
        sampler: Any = parts.prioritized

        def update(batch: TensorDictBase) -> None:  # no row is stale: nothing was written since the draw
            sampler.update_priority(*errors_of(parts, batch, buffer.priority_key), storage=storage)

        flat, info, batch = parts.draw(self._batch_size, storage.gather)
        if sampler is not None:
            info[SAMPLED_AT] = self._write_clock.tensor.long().expand(flat.shape[0])
        batch, _ = buffer.finish(buffer.assemble(flat, info, batch), info)
        drawn = info["index"], info.get("priority_weight")
        return self._learn(batch, update), drawn


def capture(
    rb: Any, step: Step | None = None, batch_size: int | None = None, *, ring: int = 2, warmup: int = 3
) -> CapturedStep:
    """Return a function that samples, calls ``step(batch)`` and updates priorities. On CUDA, it launches one graph.

    Each call draws new rows. The graph stays valid after writes, and after changes of alpha and beta. Write to the
    buffer between calls, on the CUDA stream of these calls. A thread that writes during a call waits until the graph
    has been launched. On the CPU, there is no graph, and other threads may write during a step.

    **Aliasing:** call ``k + ring`` reuses the memory of the output of call ``k``.

    Args:
        step: a function that takes a batch, and may return tensors. If ``step`` writes TD errors to ``priority_key`` of
            the batch, the priorities of the rows are updated. On CUDA, the step must not synchronise with the host, and
            its optimizers need ``capturable=True``. If ``step`` is ``None``, calls only return the batch.
        batch_size: the number of rows per batch, default: the ``batch_size`` of the buffer.
        ring: the number of graphs, at least 2. Calls launch the graphs in turn, and each graph has its own memory for
            the output.
        warmup: the number of steps that run before each capture, at least 1. Warm-up steps also update the network.

    Raises:
        ValueError: an argument is out of range, or there is no batch size. The returned function raises a ValueError if
            the buffer's generator is not on the device of the rows, or if the sampler does not accept the batch size.
        TypeError: ``step`` is not callable. The returned function raises a TypeError if the storage is not a
            :class:`PackedStorage`, or if the sampler cannot be captured (a :class:`MinibatchSampler`, for example).
        RuntimeError: the returned function is called while the buffer is empty.
    """
    size = rb.batch_size if batch_size is None else batch_size
    if size is None:
        raise ValueError("pass the number of rows per batch: batch_size")
    return CapturedStep(rb, step, size, ring, warmup)
