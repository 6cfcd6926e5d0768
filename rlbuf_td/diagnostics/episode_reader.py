"""Read the columns that episode statistics need: one number per step and key."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key

from rlbuf_td.storages.schema import show_key
from rlbuf_td.storages.tensordict_fast import leaf_of

Key: TypeAlias = tuple[str, ...]


class Steps(NamedTuple):
    """The columns of a portion of steps."""

    shape: tuple[int, int]  # time steps, lanes
    strides: tuple[int, int]  # in rows, along time and lanes
    columns: list[torch.Tensor | None]  # trajectory ids, ends, metrics, reasons: contiguous, one number per row
    ready: Any  # the CUDA event after which the columns are on the host; None: they are there


class StepReader:
    """Reads trajectory ids, ends, metrics and reasons, of which ``terminated`` and ``truncated`` are the first two."""

    def __init__(
        self,
        trajectory_key: NestedKey,
        done_key: NestedKey,
        metric_keys: Iterable[NestedKey],
        reason_keys: Iterable[NestedKey],
    ) -> None:
        self.trajectory_key, self.done_key = _path(trajectory_key), _path(done_key)
        self.metric_keys, self.reason_keys = [*map(_path, metric_keys)], [*map(_path, reason_keys)]
        self._columns = [(self.trajectory_key, torch.int64), (self.done_key, torch.bool)]
        self._columns += [(key, torch.float64) for key in self.metric_keys]  # float32 may stay
        self._columns += [(key, torch.bool) for key in self.reason_keys]

    def read(self, data: TensorDictBase, time_dim: int | None) -> Steps:
        """Return the columns of steps, or raise what :meth:`EpisodeStats.update` does; ``time_dim``: see there."""
        size = data.batch_size
        if time_dim is None:
            shape, strides = (1, prod(size)), (0, 1)
        elif not -len(size) <= time_dim < len(size):
            raise ValueError(f"no time dim {time_dim} in batch size {[*size]}; a single step has time_dim=None")
        else:
            time_dim %= len(size)
            steps = size[time_dim]
            lanes = size.numel() // steps if steps else 0
            shape, strides = (steps, lanes), ((lanes, 1) if time_dim == 0 else (1, steps))
            if 0 < time_dim < len(size) - 1:
                data = data.permute(*(d for d in range(len(size)) if d != time_dim), time_dim)
        columns = [self._column(data, key, kind, shape[0] * shape[1]) for key, kind in self._columns]
        done = columns[1]
        if done is not None and done.is_cuda:
            return Steps(shape, strides, *_to_host(columns, done.device))
        return Steps(shape, strides, [x if x is None or x.is_contiguous() else x.contiguous() for x in columns], None)

    def _column(self, data: TensorDictBase, key: Key, kind: torch.dtype, rows: int) -> torch.Tensor | None:
        x = leaf_of(data, key)
        if x is None:
            if key == self.trajectory_key:
                return None
            x = self._implied(data, key)
        if x.numel() != rows:
            shape = f"{show_key(key)} of shape {[*x.shape]} for {rows} steps"
            raise ValueError(f"EpisodeStats takes one number a step, got {shape}: give it the key of one that has")
        if x.dtype is kind or (kind is torch.float64 and x.dtype is torch.float32):
            return x
        return x.to(kind)

    def _implied(self, data: TensorDictBase, key: Key) -> torch.Tensor:
        """Return a missing flag, which follows from the two others, or from the only one."""
        keys = (self.done_key, *self.reason_keys[:2])
        done, terminated, truncated = (None if (x := leaf_of(data, k)) is None else x.bool() for k in keys)
        known = [x for x in (done, terminated, truncated) if x is not None]
        if key not in keys or not known:
            raise KeyError(f"no {show_key(key)} in the data: EpisodeStats needs one a step")
        if key == self.done_key:
            return known[0] | known[-1]
        ended = known[0] | known[-1] if done is None else done
        other = truncated if key == keys[1] else terminated
        if other is not None:
            return ended & ~other
        return ended if key == keys[1] else torch.zeros_like(ended)  # without both, episodes terminate


def _path(key: NestedKey) -> Key:
    key = unravel_key(key)
    return (key,) if isinstance(key, str) else key


def _to_host(columns: list[torch.Tensor | None], device: torch.device) -> tuple[list[torch.Tensor | None], Any]:
    """Start copying tensors from a GPU to the host; return the copies, and the event after which they are complete."""
    copies = [
        None if x is None else torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
        for x in columns
    ]
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return copies, event
