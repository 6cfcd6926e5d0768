"""What statistics of episodes need of the data: numbers in plain columns, one a step."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key

from rlbuf_td.storages.tensordict_fast import leaf_of


class Steps(NamedTuple):
    """The columns of some steps."""

    shape: tuple[int, int]  # time steps, lanes
    strides: tuple[int, int]  # rows from one to the next of each
    columns: list[torch.Tensor | None]  # trajectory numbers, ends, metrics, reasons: contiguous, one number a row
    ready: Any  # the CUDA event from which on the columns are on the host; None: they are


class StepReader:
    """Reads the columns of steps: trajectory numbers (if there are any), ends, metrics, reasons.

    Args:
        trajectory_key: integers.
        done_key: flags.
        metric_keys: numbers.
        reason_keys: flags; the first two say whether a step terminated, and whether it was truncated. Of these and
            ``done_key`` one is enough.
    """

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
        """Return the columns of some steps.

        Args:
            data: steps, in batch dims of which one is time and the others are lanes.
            time_dim: which one; ``None``: the data is one step.

        Raises:
            KeyError: rewards, ends or metrics are missing.
            ValueError: there is not one number a step, or no such dim.
        """
        size = data.batch_size
        if time_dim is None:
            shape, strides = (1, prod(size)), (0, 1)
        elif len(size) == 0 or not -len(size) <= time_dim < len(size):
            raise ValueError(
                f"there is no time dim {time_dim} in batch size {[*size]}; a single step has time_dim=None"
            )
        else:
            time_dim %= len(size)
            if 0 < time_dim < len(size) - 1:
                order = [d for d in range(len(size)) if d != time_dim]
                data, time_dim = data.permute(*order, time_dim), len(size) - 1
            steps = size[time_dim] if len(size) == 1 or time_dim == 0 else data.batch_size[-1]
            lanes = size.numel() // steps if steps else 0
            shape, strides = (steps, lanes), ((lanes, 1) if time_dim == 0 else (1, steps))
        return self._collect(data, shape, strides)

    def _collect(self, data: TensorDictBase, shape: tuple[int, int], strides: tuple[int, int]) -> Steps:
        rows = shape[0] * shape[1]
        columns: list[Any] = []
        for key, kind in self._columns:
            x = leaf_of(data, key)
            if x is None and key == self.trajectory_key:
                columns.append(None)
                continue
            if x is None:
                x = self._implied(data, key)
            if x.numel() != rows:
                raise ValueError(
                    f"EpisodeStats takes one number a step, got {_words(key)} of shape {[*x.shape]} for {rows} steps: "
                    "give it the key of one that has"
                )
            if x.dtype is not kind and (kind is not torch.float64 or x.dtype is not torch.float32):
                x = x.to(kind)
            columns.append(x)
        if columns[1].is_cuda:
            return Steps(shape, strides, *_to_host(columns, columns[1].device))
        return Steps(shape, strides, [x if x is None or x.is_contiguous() else x.contiguous() for x in columns], None)

    def _implied(self, data: TensorDictBase, key: tuple[str, ...]) -> torch.Tensor:
        """Return a flag that is not in the data: it follows from the two others, if only one of them is there, too."""
        keys = (self.done_key, *self.reason_keys[:2])
        done, terminated, truncated = flags = [
            None if x is None else x.bool() for x in (leaf_of(data, k) for k in keys)
        ]
        known = [x for x in flags if x is not None]
        if key not in keys or not known:
            raise KeyError(f"no {_words(key)} in the data: EpisodeStats needs one a step")
        if key == self.done_key:
            return known[0] | known[-1]
        ended = known[0] | known[-1] if done is None else done
        other = truncated if key == keys[1] else terminated
        if other is not None:
            return ended & ~other
        return ended if key == keys[1] else torch.zeros_like(ended)  # without either, episodes terminate


def _path(key: NestedKey) -> tuple[str, ...]:
    key = unravel_key(key)
    return (key,) if isinstance(key, str) else key


def _words(path: tuple[str, ...]) -> str:
    return repr(path if len(path) > 1 else path[0])


def _to_host(columns: list[torch.Tensor | None], device: torch.device) -> tuple[list[torch.Tensor | None], Any]:
    """Begin to copy tensors of a GPU to the host; return copies, and the event from which on they hold something."""
    copies: list[torch.Tensor | None] = []
    for x in columns:
        copy = None if x is None else torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        if copy is not None:
            copy.copy_(x, non_blocking=True)
        copies.append(copy)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return copies, event
