"""What a buffer offers to be looked at: rows in the order of their age, its health, its words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import RoundRobinWriter

from rlbuf_td.diagnostics.health import health
from rlbuf_td.diagnostics.html import html_of

if TYPE_CHECKING:
    from torchrl.data.replay_buffers import TensorDictReplayBuffer as _Base
else:
    _Base = object  # a mixin: the buffer's own bases come behind it


class InspectedBuffer(_Base):
    """Looking at a buffer without changing it."""

    @property
    def full(self) -> bool:
        """Whether the next write replaces the oldest rows."""
        return self._storage._is_full

    def chronological(self, *, flat: bool = False) -> TensorDictBase:
        """Return everything, oldest first across the wrap, as fresh memory: ``[n]``, or ``[T, E]`` when ``ndim=2``.

        Transforms are applied, as when sampling. Like any batch on the CPU, the result is a nested dict of NumPy arrays
        by its ``numpy()``.

        Args:
            flat: without the environments' axis: ``[T * E]``, all lanes of a time step together.

        Raises:
            RuntimeError: the buffer is empty.
            TypeError: the writer is not a ring, so that there is no order of age.
        """
        return self._in_order(None, flat)

    def last(self, n: int, *, flat: bool = False) -> TensorDictBase:
        """Return the newest ``n`` time steps, oldest first, as fresh memory: ``[n]``, or ``[n, E]`` when ``ndim=2``.

        Args:
            n: time steps.
            flat: see :meth:`chronological`.

        Raises:
            RuntimeError: the buffer is empty.
            ValueError: fewer than ``n`` time steps are stored, or ``n < 1``.
            TypeError: the writer is not a ring, so that there is no order of age.
        """
        return self._in_order(n, flat)

    def _in_order(self, n: int | None, flat: bool) -> TensorDictBase:
        if not isinstance(self._writer, RoundRobinWriter):
            raise TypeError(f"a {type(self._writer).__name__} keeps no order of age; use a RingWriter")
        with self._replay_lock, self._write_lock:
            rows = len(self._storage)
            if not rows:
                raise RuntimeError("the buffer is empty: extend it first")
            steps = rows if self._storage.ndim == 1 else self._storage.shape[0]
            if n is not None and not 1 <= n <= steps:
                raise ValueError(f"cannot return the last {n} time steps: {steps} are stored")
            count = steps if n is None else n
            end = self._next_step()
            data = self._storage.get(torch.arange(end - count, end) % steps)
        if flat and data.ndim > 1:
            data = data.flatten(0, self._storage.ndim - 1)
        return self._transformed(data)

    def _next_step(self) -> int:
        """Return the time step that a ring writes next."""
        last = self._storage._last_cursor_index
        if last is None or not len(self._storage):
            return 0
        return (last + 1) % self._storage._max_size_along_dim0() if self._storage._is_full else last + 1

    def health(self) -> dict[str, float]:
        """Return how the buffer and what it gives are doing, as a flat dict for loggers; see :mod:`health`.

        ``stale_updates`` counts the TD errors that :meth:`update_tensordict_priority` has left out, because the row
        that was sampled had been replaced meanwhile.

        Cost: O(N log N) with priorities: for now and then, not for every step.
        """
        if not self._initialized:
            self._init()
        with self._replay_lock, self._write_lock:
            report = health(self._storage, self._sampler, self._writer, self.last_draw, self._replays)
        return report | {"stale_updates": float(self._stale_updates.total())}

    def _repr_html_(self) -> str:
        return html_of(self)

    def __repr__(self) -> str:
        if not self._initialized:
            return f"{type(self).__name__}(not initialized)"
        fill = len(self._storage) / self._storage.max_size
        parts = (("storage", self._storage), ("sampler", self._sampler), ("writer", self._writer))
        lines = [f"{name}={part!r},".replace("\n", "\n    ") for name, part in parts]
        if len(self._stages):
            lines.append(f"transform={self._transform!r},".replace("\n", "\n    "))
        lines.append(f"batch_size={self._batch_size}, fill={fill:.1%}")
        return f"{type(self).__name__}(\n    " + "\n    ".join(lines) + "\n)"
