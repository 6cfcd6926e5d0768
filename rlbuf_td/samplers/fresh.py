"""A sampler that begins each batch with newly written rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Sampler

from rlbuf_td.kernels.dispatch import loop, refuse_without_compiler
from rlbuf_td.samplers.common import OneStorage, setting
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.checks import State, state_of, whole
from rlbuf_td.storages.episodes import DONE_KEY
from rlbuf_td.storages.indexing import Info, refuse_unwritten
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.ring import Ring


class FreshQueue:
    """A first-in, first-out counter of each lane of one storage."""

    def __init__(self) -> None:
        self.serves = OneStorage()
        self.steps = 0  # of the storage, when `serials` was made
        self.begin()

    def begin(self, waiting: np.ndarray | None = None) -> None:
        """Count anew: the newest ``waiting`` rows of each lane, ``[E]``, are fresh;
        None: all rows."""
        self._waiting = waiting
        # of the next row of each lane to hand out, ``[E]``; None: to be made
        self.serials: np.ndarray | None = None

    def switch_to(self, storage: PackedStorage) -> Ring | None:
        """Count the rows of ``storage``; return its ring, None if its rows have not
        been allocated."""
        if self.serves._storage() is not storage:
            self.serves.claim(storage)
        ring: Ring = storage.ring
        if storage.rows is None:
            return None
        if (
            self.serials is None
            or len(self.serials) != ring.lanes
            or self.steps != ring.steps
        ):
            known, self._waiting = self._waiting, None
            waiting = (
                ring.count
                if known is None or len(known) != ring.lanes
                else np.minimum(known, ring.count)
            )
            self.serials, self.steps = ring.written - waiting, ring.steps
        return ring

    def following(self, ring: Ring) -> np.ndarray:
        """Return the serial of the next row of each lane to hand out, ``[E]``, a view;
        never one that is gone."""
        return np.maximum(self.serials, ring.tail, out=self.serials)  # pyrefly: ignore [no-matching-overload]

    def take(self, storage: PackedStorage, flat: Tensor, most: int) -> int:
        """Write the flat indices of the oldest fresh rows, at most ``most``, to the
        first elements of ``flat``.

        These rows are then no longer fresh. Return their number.
        """
        ring = self.switch_to(storage)
        if ring is None or self.serials is None:
            return 0
        given = (
            self.serials.ctypes.data,
            ring.steps,
            ring.lanes,
            ring.address,
            most,
            flat.data_ptr(),
        )
        return int(loop("draws.cpu", "take_fresh")(*given))

    def waiting(self) -> np.ndarray:
        """Return how many of the newest rows of each lane are fresh, ``[E]``; empty:
        all rows, if there are any."""
        storage = self.serves.storage
        ring = self.switch_to(storage) if isinstance(storage, PackedStorage) else None
        if ring is None:
            return np.zeros(0, np.int64) if self._waiting is None else self._waiting
        return ring.written - self.following(ring)

    def go_back(self, serials: np.ndarray) -> None:
        """Make rows fresh that were handed out since ``serials`` was copied."""
        if self.serials is not None and len(serials) == len(self.serials):
            self.serials[:] = serials


def _fresh(name: str, value: object) -> int | str:
    return (
        value
        if isinstance(value, str) and value == "windows"
        else whole(1)(name, value)
    )


class FreshRowsSampler(SamplerWrapper):
    """Begins each batch with *fresh* rows; the wrapped sampler draws the rest.

    A row is fresh from its write until this sampler puts it at the beginning of a
    batch: first in, first out. If at most ``min(fresh, batch_size)`` rows are written
    between two batches, the second batch begins with all these rows. With ``fresh=1``
    and one update per step, this sampler is combined experience replay. Rows that were
    written before the first batch, as a warm-up, are fresh, too: a larger ``fresh``
    works them off.

    **Windows.** Inside a :class:`SequenceSampler` with ``boundary="pad"`` and
    ``burn_in=0``, ``fresh="windows"`` begins each batch with windows of fresh rows that
    do not overlap: each step of each trajectory comes once, in order. Steps wait until
    a whole window is there, or their trajectory has ended. With
    ``across_episodes=True``, all windows are whole, as in the online queue of
    DreamerV3.

    **Distribution.** A batch of B rows begins with the oldest f fresh rows, where f is
    the smallest of ``fresh``, B and the number of fresh rows. The wrapped sampler draws
    B rows, of which only B - f are used. If the wrapped sampler is a
    :class:`MinibatchSampler`, the f unused rows are not drawn again in the same epoch.
    All importance weights are those of the wrapped sampler; by design, they do not
    correct for the higher share of fresh rows.

    Args:
        sampler: draws the other rows, and handles priorities, writes and state.
        fresh: the largest number of fresh rows at the beginning of a batch, at least 1,
            or ``"windows"``; may be set at any time.

    Rows of one lane come in the order of writing. Among lanes, the one with the most
    fresh rows comes first, and of equal ones the one with the smaller number: rows of
    whole time steps come in time order. A row that is overwritten is no longer fresh,
    and is skipped. If processes share a buffer, every new row is fresh once in each
    process.

    Raises:
        ValueError: ``fresh`` is not a positive whole number or ``"windows"``, or the
            buffer's writer does not write in time order; (when sampling)
            ``fresh="windows"`` is not inside a SequenceSampler.
        TypeError: the wrapped sampler is another wrapper, a :class:`QueueSampler`, or
            TorchRL's ``PrioritizedSampler``; (when sampling) the storage is not a
            :class:`PackedStorage`.

    Cost: O(E + f) for E lanes that advance together, at most O(E * f), in addition to
    the wrapped draw.
    Source: Zhang and Sutton: A Deeper Look at Experience Replay, 2017; Hafner et al.:
    Mastering Diverse Domains through World Models, 2023 (the online queue). TorchRL has
    no such sampler.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer, UniformSampler
        >>> from tensordict import TensorDict
        >>> sampler = FreshRowsSampler(UniformSampler(), fresh=2)
        >>> rb = ReplayBuffer(storage=PackedStorage(100), sampler=sampler, batch_size=4)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
        >>> rb.sample()["x"][:2], rb.sample()["x"][0]
        (tensor([0, 1]), tensor(2))
    """

    _level = 0
    state_keys = _shown = ("fresh",)
    requires_shared_state = adds_fresh_rows = True
    fresh: int | Literal["windows"] = setting(_fresh)
    # rows per window, with ``fresh="windows"``; 0: not inside a SequenceSampler
    window_length = 0
    crosses_episodes = False  # whether these windows go on into the next episode

    def __init__(self, sampler: Sampler, fresh: int | Literal["windows"] = 1) -> None:
        refuse_without_compiler("FreshRowsSampler needs")
        super().__init__(sampler, DONE_KEY, None)
        if self._is_prioritized and not hasattr(sampler, "rule"):
            raise TypeError(
                "FreshRowsSampler cannot wrap TorchRL's PrioritizedSampler: use a ProportionalSampler"
            )
        if getattr(sampler, "max_age", None) is not None:
            kind = f"a {type(sampler).__name__} with max_age"
            raise ValueError(
                f"FreshRowsSampler draws each new row once, however old: it cannot wrap {kind}"
            )
        if getattr(sampler, "draws_once", False):
            raise TypeError(
                "FreshRowsSampler cannot wrap a QueueSampler, which gives each row once"
            )
        self.queue = FreshQueue()
        self.fresh = fresh

    def watch(self, storage: PackedStorage) -> None:
        """Mark as fresh the rows that were written since the last draw."""
        if self.window_length:
            super().watch(storage)
        elif self._inner is not None:
            self._inner.watch(storage)
        self.queue.switch_to(storage)

    def give_windows_to(self, wrapper: Any) -> None:
        """With ``fresh="windows"``, hand out the windows of a SequenceSampler;
        ValueError if these would overlap."""
        if self.fresh != "windows":
            return
        if wrapper.boundary != "pad" or wrapper.burn_in or wrapper.stride is not None:
            needs = f"got boundary={wrapper.boundary!r}, burn_in={wrapper.burn_in}, stride={wrapper.stride}"
            raise ValueError(
                f'fresh="windows" needs boundary="pad" and neither burn_in nor stride, {needs}'
            )
        self.window_length, self.crosses_episodes = (
            wrapper.length,
            wrapper.across_episodes,
        )
        self.episode_keys = wrapper.episode_keys

    def _take(self, storage: PackedStorage, most: int) -> np.ndarray:
        if isinstance(self.fresh, int):
            flat = torch.empty(most, dtype=torch.int64, device="cpu")
            return flat[: self.queue.take(storage, flat, min(self.fresh, most))].numpy()
        if not self.window_length:
            remedy = 'SequenceSampler(FreshRowsSampler(..., fresh="windows"), length)'
            raise ValueError(
                f'fresh="windows" hands out windows of a SequenceSampler: use {remedy}'
            )
        ring, found = self.queue.switch_to(storage), np.zeros(0, np.int64)
        if ring is None or not len(ring):
            return found
        following = self.queue.following(ring)
        while len(found) < most:
            lane = np.flatnonzero(following < ring.written)
            waiting = (ring.written - following)[lane]
            cell = following[lane] % ring.steps * ring.lanes + lane
            rows, over = (
                np.minimum(waiting, self.window_length),
                np.zeros(len(lane), np.bool_),
            )
            if not self.crosses_episodes:
                place = torch.from_numpy(cell).to(storage.device)
                _, ahead, over, _ = (
                    each.cpu().numpy()
                    for each in self.episodes_of(storage).spans(place)
                )
                rows = np.minimum(ahead + 1, self.window_length)
            is_whole = np.flatnonzero((rows == self.window_length) | over)[
                : most - len(found)
            ]
            if not len(is_whole):
                break
            found = np.concatenate((found, cell[is_whole]))
            following[lane[is_whole]] += rows[is_whole]
        return found

    def draw_rows(self, storage: PackedStorage, batch_size: int) -> tuple[Tensor, Info]:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        flat, info = super().draw_rows(storage, batch_size)
        found = self._take(storage, len(flat))
        if len(found):
            rows, weight = (
                torch.from_numpy(found).to(flat.device),
                info.get("priority_weight"),
            )
            if weight is not None:
                # of a user's sampler, like these weights
                refuse_unwritten(flat[:1], storage)
                info["priority_weight"] = weight = weight.clone(
                    memory_format=torch.contiguous_format
                )
                self._weigh_beside_(rows, flat[:1], weight)
            kept = flat[len(rows) :]
            if getattr(self.innermost, "unique", False):
                kept = flat[~torch.isin(flat, rows)][: len(kept)]
            flat = torch.cat((rows, kept))
        return flat, info

    def fill(self) -> Callable[..., None] | None:
        """See :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper`."""
        fill = super().fill()
        return None if fill is None else partial(self._fill, fill)

    def _fill(
        self,
        fill: Callable[..., None],
        storage: PackedStorage,
        live: tuple[int, bool],
        flat: Tensor,
        report: dict[str, Tensor],
        scratch: Tensor,
    ) -> None:
        """Draw as :meth:`draw_rows` does, to the memory of a batch."""
        weight = report.get("priority_weight")
        if isinstance(self.fresh, str) or getattr(self.innermost, "unique", False):
            rows, info = self.draw_rows(storage, len(flat))
            flat.copy_(rows)
            if weight is not None:
                weight.copy_(info["priority_weight"])
            return
        fill(storage, live, flat, report, scratch)
        first = None if weight is None else flat[:1].clone()
        count = self.queue.take(storage, flat, min(self.fresh, flat.shape[0]))
        if count and weight is not None:
            self._weigh_beside_(flat[:count], first, weight)

    def _weigh_beside_(
        self, fresh: Tensor, drawn: Tensor | None, weight: Tensor
    ) -> None:
        """Give the fresh rows of a batch the weights that they have beside the first
        ``drawn`` row, ``[1]``."""
        self.innermost.rule.weigh_beside_(fresh, drawn, weight)
        if self.innermost.weight_norm == "batch":
            weight.div_(weight.max())

    def _empty(self) -> None:
        self.queue.serves.release()
        self.queue.begin()
        torchrl_parts.empty_part(self.sampler)

    # -- state

    @property
    def progress(self) -> tuple[Any, Any]:
        """What has been handed out; setting an earlier progress makes rows fresh that
        were handed out since then."""
        serials = self.queue.serials
        return None if serials is None else serials.copy(), getattr(
            self.sampler, "progress", None
        )

    @progress.setter
    def progress(self, progress: tuple[Any, Any]) -> None:
        serials, inner = progress
        if serials is not None:
            self.queue.go_back(serials)
        if inner is not None:
            self.sampler.progress = inner  # pyrefly: ignore [missing-attribute]

    def snapshot(self) -> State:
        """Return the state of the wrapped sampler, the setting ``fresh``, and the
        number of fresh rows of each lane."""
        return super().snapshot() | {
            "undrawn": torch.from_numpy(self.queue.waiting().copy())
        }

    @defer_sigint
    def load_state_dict(self, state_dict: State) -> None:
        """Restore a result of :meth:`state_dict`. The storage must be loaded before the
        next draw or write.

        Raises:
            ValueError: the state is of another sampler; this sampler is unchanged.
        """
        with state_of(self):
            waiting = state_dict["undrawn"].numpy()
            if waiting.ndim != 1 or waiting.dtype != np.int64 or (waiting < 0).any():
                raise ValueError(
                    f"the saved fresh rows are {waiting.tolist()}, expected a number of rows per lane, [E]"
                )
        super().load_state_dict(state_dict)
        self.queue.begin(waiting.copy() if len(waiting) else None)
