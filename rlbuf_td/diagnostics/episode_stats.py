"""Statistics of episodes, updated at every write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from rlbuf_td.kernels.host_memory import address_of
from rlbuf_td.storages.checks import whole
from rlbuf_td.storages.episodes import DONE_KEY, TRAJ_KEY, may_be_missing
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.schema import show_key
from rlbuf_td.storages.tensordict_fast import leaf_of

Key: TypeAlias = tuple[str, ...]
Reduction = Literal["sum", "mean", "last"]
#: Counts steps, given the addresses of the leaves of a write, and the ``shape`` and
# ``strides`` of :class:`Steps`.
Record: TypeAlias = Callable[[np.ndarray, tuple[int, int], tuple[int, int]], None]

_REDUCTIONS = ("sum", "mean", "last")  # in the kernel's order
_FREE = np.iinfo(np.int64).min
_STEPS = 0
_EPISODES = 1
_WRITES = 2  # as in the kernel
_SUMMARIES = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
_FORGET_AFTER = 1_000  # writes
_NO_LANES = np.zeros(0, np.int64)
#: The stored dtypes that compiled code reads as each dtype.
_READ_AS = {
    torch.float64: (torch.float32, torch.float64),
    torch.bool: (torch.bool,),
    torch.int64: (torch.int64,),
}
_STATE = (
    "_records",
    "_ends",
    "_counters",
    "_lane_slot",
    "_keys",
    "_lengths",
    "_touched",
    "_sums",
)


class Steps(NamedTuple):
    """The steps of one write."""

    shape: tuple[int, int]  # number of time steps, number of lanes
    strides: tuple[int, int]  # rows between time steps, and between lanes
    # trajectory ids, done, metrics, reasons: contiguous, one number per row
    columns: list[torch.Tensor | None]


class EpisodeStats:
    """Returns, lengths and other metrics of the last episodes.

    A buffer made with ``ReplayBuffer(..., stats=EpisodeStats())`` counts the steps of
    every write, before any transform. Without a buffer, call :meth:`update`. An episode
    consists of the steps with the same trajectory id (without ids, in the same lane) up
    to a ``done``; it may span several writes. An unfinished episode without a step in
    the last 1,000 writes may be dropped. Returns are undiscounted.

    Args:
        keys: further metrics with one number per step, as a dict from keys to
            ``"sum"``, ``"mean"`` or ``"last"``, such as
            ``{("next", "speed"): "mean"}``. If ``keys`` is a sequence, its metrics are
            summed over the episode.
        window: the number of episodes that :meth:`summary` covers.
        prefix: the prefix of the names in :meth:`summary`.
        reasons: keys of further flags to read at the end of an episode, such as
            ``[("next", "success")]``.
        history: the number of episodes to keep for plots and :meth:`history`; raised to
            ``window`` if smaller.
        reward_key: the key of the rewards.
        done_key: the key of ``done``; ``terminated`` and ``truncated`` lie beside it.
            If one of these three flags is missing, it is derived from the others. A key
            of another name than ``"done"`` must be present.
        trajectory_key: the key of the trajectory ids. The default key may be missing.
            Steps with id -1 are padding and are ignored.

    Raises:
        ValueError: an argument is out of range, or two metrics or two reasons have the
            same name.

    Cost: O(steps) per write. Data on another device is copied to the host, so that each
    write waits for it. If several processes write to the buffer, the statistics in each
    process count its own steps.

    Example:
        >>> from tensordict import TensorDict
        >>> stats = EpisodeStats()
        >>> step = {"reward": torch.tensor([1.0, 2.0, 3.0]), "done": torch.tensor([False, True, False])}
        >>> stats.update(TensorDict({"next": step}, [3]))
        >>> summary = stats.summary()
        >>> summary["train/return_mean"], summary["train/length_max"], summary["train/done_terminated_rate"]
        (3.0, 2.0, 1.0)
    """

    def __init__(
        self,
        keys: Mapping[NestedKey, Reduction] | Iterable[NestedKey] = (),
        window: int = 100,
        prefix: str = "train",
        *,
        reasons: Iterable[NestedKey] = (),
        history: int = 10_000,
        reward_key: NestedKey = ("next", "reward"),
        done_key: NestedKey = ("next", "done"),
        trajectory_key: NestedKey = ("collector", "traj_ids"),
    ) -> None:
        window = whole(1)("window", window)
        history = whole(1)("history", history)
        how = (
            keys
            if isinstance(keys, Mapping)
            else dict.fromkeys(map(as_tuple, keys), "sum")
        )
        if not set(how.values()) <= set(_REDUCTIONS):
            raise ValueError(
                f"metrics are reduced by 'sum', 'mean' or 'last', got {list(how.values())}"
            )
        self.window = window
        self.prefix = prefix
        self._rows = max(window, history)
        self._trajectory_key = as_tuple(trajectory_key)
        done = as_tuple(done_key)
        self._flags = flags = [
            done,
            *((*done[:-1], name) for name in ("terminated", "truncated")),
        ]
        others = [*map(as_tuple, how)]
        reason_keys = [*map(as_tuple, reasons)]
        self._columns = [(self._trajectory_key, torch.int64), (flags[0], torch.bool)]
        self._columns += [
            (key, torch.float64) for key in (as_tuple(reward_key), *others)
        ]
        self._columns += [(key, torch.bool) for key in (*flags[1:], *reason_keys)]
        self.metrics = ("length", "return", *map(_name, others))
        self.reasons = ("terminated", "truncated", *map(_name, reason_keys))
        for names in (("step", *self.metrics), self.reasons):
            if len(set(names)) < len(names):
                raise ValueError(
                    f"each metric and each reason needs a unique name, got {names}"
                )
        self._reduction = np.array(
            [_REDUCTIONS.index(reduction) for reduction in ("sum", *how.values())],
            np.uint8,
        )
        self.reset()

    def reset(self) -> None:
        """Forget all episodes, finished or not."""
        metrics = len(self._reduction)
        reasons = len(self.reasons)
        self._is_double = np.zeros(metrics, np.bool_)
        self._inputs = np.zeros(2 + metrics + reasons, np.int64)
        self._records = np.zeros((self._rows, 1 + len(self.metrics)))
        self._ends = np.zeros((self._rows, reasons), np.uint8)
        self._counters = np.zeros(3, np.int64)
        self._lane_slot, self._keys, self._lengths, self._touched = (
            np.zeros(0, np.int64) for _ in range(4)
        )
        self._sums = np.zeros((0, metrics))

    def forget_open(self) -> None:
        """Drop unfinished episodes that have trajectory ids, because new collectors use
        the same ids again."""
        self._keys[self._keys >= 0] = _FREE

    def update(self, data: TensorDictBase, *, time_dim: int | None = -1) -> None:
        """Count the steps of a write.

        Args:
            data: the steps, with batch size ``[T]``, ``[E, T]`` (as collectors return
                them), or more lane dims.
            time_dim: the batch dim of time. With ``None``, ``data`` is one time step,
                and all batch dims are lanes.

        Raises:
            KeyError: ``data`` lacks the rewards or a key of ``keys`` or ``reasons``,
                has no end flag (done, terminated or truncated), or lacks a
                ``done_key`` or ``trajectory_key`` of a name of your own; no step is
                counted.
            ValueError: a key does not hold one number per step, or ``time_dim`` is not
                a batch dim; no step is counted.
        """
        self.record(self.read(data, time_dim=time_dim))

    def read(self, data: TensorDictBase, *, time_dim: int | None = -1) -> Steps:
        """Convert the steps of a write for :meth:`record`; this is the first half of
        :meth:`update`."""
        size = data.batch_size
        if time_dim is None:
            shape = (1, prod(size))
            strides = (0, 1)
        elif not -len(size) <= time_dim < len(size):
            raise ValueError(
                f"no time dim {time_dim} in batch size {[*size]}; a single step has time_dim=None"
            )
        elif time_dim % len(size) == 0:
            steps = size[0]
            lanes = prod(size[1:])
            shape = (steps, lanes)
            strides = (lanes, 1)
        else:
            data = _with_time_last(data, time_dim % len(size))
            *lane_sizes, steps = data.batch_size
            shape = (steps, prod(lane_sizes))
            strides = (1, steps)
        columns = [
            self._column(data, key, dtype, prod(shape)) for key, dtype in self._columns
        ]
        return Steps(shape, strides, [_on_host(column) for column in columns])

    def _column(
        self, data: TensorDictBase, key: Key, kind: torch.dtype, rows: int
    ) -> torch.Tensor | None:
        """Return one number per step, of the dtype ``kind`` (rewards and metrics may be
        float32); None for trajectory ids that are missing."""
        x = leaf_of(data, key)
        if x is None:
            if key == self._trajectory_key and may_be_missing(key, TRAJ_KEY):
                return None
            x = self._implied(data, key)
        if x.numel() != rows:
            raise ValueError(
                f"EpisodeStats needs one number per step, got {show_key(key)} of "
                f"shape {[*x.shape]} for {rows} steps: name a key that has one"
            )
        if x.dtype is kind or (kind is torch.float64 and x.dtype is torch.float32):
            return x
        return x.to(kind)

    def _implied(self, data: TensorDictBase, key: Key) -> torch.Tensor:
        """Return a missing end flag, as it follows from the others."""
        leaves = [leaf_of(data, flag) for flag in self._flags]
        flags = [None if leaf is None else leaf.bool() for leaf in leaves]
        present = [flag for flag in flags if flag is not None]
        is_required = key == self._flags[0] and not may_be_missing(key, DONE_KEY)
        if key not in self._flags or is_required or not present:
            raise KeyError(
                f"no {show_key(key)} in the data: EpisodeStats needs one per step"
            )
        done, terminated, truncated = flags
        if done is None:
            done = present[0] | present[-1]
        if terminated is None:  # with done alone, all ends are terminations
            terminated = done if truncated is None else done & ~truncated
        implied = done, terminated, done & ~terminated
        return implied[self._flags.index(key)]

    def record(self, steps: Steps, lanes: torch.Tensor | None = None) -> None:
        """Count the steps that :meth:`read` returned; this is the second half of
        :meth:`update`.

        ``lanes``, ``[n]``: the lanes of n rows of unlike lanes, which :meth:`read` has
        read as n time steps.
        """
        shape, strides, columns = steps
        metrics = columns[2 : 2 + len(self._is_double)]
        self._inputs[:] = [0 if x is None else address_of(x) for x in columns]
        self._is_double[:] = [
            x is not None and x.dtype is torch.float64 for x in metrics
        ]
        self._count(shape, strides, _NO_LANES if lanes is None else lanes.cpu().numpy())

    def bind_record(self, layout: RowLayout) -> Record | None:
        """Return the compiled form of :meth:`record` for data of a row layout; None if
        it must be converted first."""
        has_ids = self._trajectory_key in layout.places
        if not (has_ids or may_be_missing(self._trajectory_key, TRAJ_KEY)):
            return None
        columns = self._columns if has_ids else self._columns[1:]
        is_double = []
        for key, kind in columns:
            leaf = layout.leaf(key)
            if (
                leaf is None
                or leaf.shape.numel() != 1
                or leaf.dtype not in _READ_AS[kind]
            ):
                return None
            if kind is torch.float64:
                is_double.append(leaf.dtype is torch.float64)
        numbers = np.array([layout.places[key] for key, _ in columns])
        return partial(self._record_leaves, numbers, is_double)

    def _record_leaves(
        self,
        numbers: np.ndarray,
        is_double: list[bool],
        addresses: np.ndarray,
        shape: tuple[int, int],
        strides: tuple[int, int],
    ) -> None:
        """Count steps whose columns are the leaves ``numbers``; ``addresses`` holds
        the addresses of all leaves."""
        self._inputs[0] = 0  # the trajectory ids, if they are missing
        self._inputs[-len(numbers) :] = addresses[numbers]
        self._is_double[:] = is_double
        self._count(shape, strides, _NO_LANES)

    def _count(
        self, shape: tuple[int, int], strides: tuple[int, int], lane_ids: np.ndarray
    ) -> None:
        """Count steps whose addresses are in ``_inputs``."""
        from rlbuf_td.kernels.episodes.statistics import count_steps

        lanes = shape[1]
        if len(lane_ids):
            lanes = max(lanes, int(lane_ids.max()) + 1)
        if len(self._lane_slot) < lanes:
            self._lane_slot = np.arange(lanes)
        self._counters[_WRITES] += 1
        arguments = {
            "shape": shape,
            "strides": strides,
            "lane_ids": lane_ids,
            "inputs": self._inputs,
            "is_double": self._is_double,
            "reduction": self._reduction,
            "lane_slot": self._lane_slot,
            "records": self._records,
            "ends": self._ends,
            "counters": self._counters,
        }
        steps = prod(shape)
        counted = 0
        while True:
            counted = count_steps(
                counted,
                keys=self._keys,
                lengths=self._lengths,
                touched=self._touched,
                sums=self._sums,
                **arguments,
            )
            if counted >= steps:
                return
            self._make_room(lanes)

    def _make_room(self, lanes: int) -> None:
        """Drop unfinished episodes without recent steps; if no episode is dropped,
        allocate space for more episodes."""
        stale = (self._keys != _FREE) & (
            self._touched < self._counters[_WRITES] - _FORGET_AFTER
        )
        self._keys[stale] = _FREE
        if stale.any():
            return
        extra = (0, max(lanes, len(self._keys), 8))
        keys = np.pad(self._keys, extra, constant_values=_FREE)
        lengths = np.pad(self._lengths, extra)
        touched = np.pad(self._touched, extra)
        sums = np.pad(self._sums, (extra, (0, 0)))
        # Together, because compiled code trusts that all have the same length.
        arrays = {
            "_keys": keys,
            "_lengths": lengths,
            "_touched": touched,
            "_sums": sums,
        }
        self.__dict__.update(arrays)

    @property
    def episodes(self) -> int:
        """The number of episodes that have ended."""
        return int(self._counters[_EPISODES])

    @property
    def steps(self) -> int:
        """The number of steps counted."""
        return int(self._counters[_STEPS])

    def summary(self) -> dict[str, float]:
        """Return statistics of the last ``window`` episodes by name; an empty dict
        before an episode has ended.

        - ``{prefix}/{metric}_{mean,std,min,max}``: for ``return``, ``length`` and each
          key in ``keys``. The key ``("next", "a", "b")`` has the name ``a.b``.
        - ``{prefix}/done_{reason}_rate``: the share of episodes that ended for this
          reason.
        - ``{prefix}/episodes``, ``{prefix}/steps``: the number of all episodes and of
          all steps counted.
        """
        numbers, ends = self._latest(self.window)
        if not len(numbers):
            return {}
        columns = dict(zip(self.metrics, numbers.T[1:], strict=True))
        values = {
            f"{name}_{word}": summarize(x)
            for name, x in columns.items()
            for word, summarize in _SUMMARIES.items()
        }
        values |= {
            f"done_{name}_rate": rate
            for name, rate in zip(self.reasons, ends.mean(0), strict=True)
        }
        values |= {"episodes": self.episodes, "steps": self.steps}
        return {f"{self.prefix}/{name}": float(value) for name, value in values.items()}

    def history(self) -> dict[str, torch.Tensor]:
        """Return one tensor ``[n]`` per metric, with an element per episode, in the
        order in which episodes ended.

        Metrics are float64, and ``"done_{reason}"`` is bool. ``"step"`` is the step
        count at the episode's end.
        """
        numbers, ends = self._latest(self._rows)
        columns = dict(
            zip(("step", *self.metrics), torch.from_numpy(numbers).T, strict=True)
        )
        flags = torch.from_numpy(ends).bool().T
        return columns | {
            f"done_{name}": flag for name, flag in zip(self.reasons, flags, strict=True)
        }

    def _latest(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of the newest ``count`` records and of their end reasons,
        oldest first."""
        last = self.episodes
        slots = np.arange(max(0, last - min(count, self._rows)), last) % self._rows
        return self._records[slots], self._ends[slots]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of the state as tensors, including unfinished episodes."""
        return {name: torch.from_numpy(getattr(self, name).copy()) for name in _STATE}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Restore a result of :meth:`state_dict`.

        Raises:
            ValueError: numbers of metrics, reasons or kept episodes differ, or a count
                is negative; nothing changes.
        """
        arrays = {name: state_dict[name].numpy().copy() for name in _STATE}
        lengths = dict.fromkeys(
            ("_keys", "_lengths", "_touched", "_sums"), len(arrays["_keys"])
        )
        lengths |= {"_records": self._rows, "_ends": self._rows, "_counters": 3}
        for name, array in arrays.items():
            current = getattr(self, name)
            shape = (lengths.get(name, len(array)), *current.shape[1:])
            if (array.dtype, array.shape) != (current.dtype, shape):
                raise ValueError(
                    f"the saved statistics are {array.dtype} of shape {array.shape} "
                    f"({name.strip('_')}), these {current.dtype} of {shape}: make "
                    "EpisodeStats with the same keys, reasons, window and history"
                )
        if (arrays["_counters"] < 0).any():
            raise ValueError("the saved statistics have negative counts")
        self.__dict__.update(arrays)

    def __repr__(self) -> str:
        names = f"metrics={list(self.metrics)}, reasons={list(self.reasons)}"
        return f"{type(self).__name__}({names}, window={self.window}, episodes={self.episodes:,}, steps={self.steps:,})"


def _with_time_last(data: TensorDictBase, time_dim: int) -> TensorDictBase:
    lanes = [dim for dim in range(data.ndim) if dim != time_dim]
    return data.permute(*lanes, time_dim)


def _on_host(column: torch.Tensor | None) -> torch.Tensor | None:
    return None if column is None else column.cpu().resolve_neg().contiguous()


def running(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the running mean and the running standard deviation over ``window``
    values, ``[n]`` each."""
    shift = values.mean()  # for accuracy: the deviation is a difference of squares
    total, squares = (
        np.concatenate([[0.0], np.cumsum(x)])
        for x in (values - shift, (values - shift) ** 2)
    )
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    mean = (total[end] - total[start]) / (end - start)
    deviation = np.sqrt(
        np.maximum(0, (squares[end] - squares[start]) / (end - start) - mean**2)
    )
    return mean + shift, deviation


def _name(path: tuple[str, ...]) -> str:
    return ".".join(path[1:] if path[0] == "next" and len(path) > 1 else path)
