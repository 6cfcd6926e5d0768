"""Experience replay that prefers recent rows."""

from __future__ import annotations

from math import expm1, inf, log
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from rlbuf_td.kernels.draws import recent_rows_
from rlbuf_td.kernels.host_memory import to_device
from rlbuf_td.samplers.common import EMPTY, fill_uniform_, setting
from rlbuf_td.samplers.row_sampler import RowSampler, drawn_into
from rlbuf_td.storages import torchrl_parts
from rlbuf_td.storages.checks import number, optional, whole
from rlbuf_td.storages.indexing import device_of, flat_rows, lanes_of
from rlbuf_td.storages.ring import LiveRows, Ring


def _half_life(name: str, value: object) -> float:
    steps = number(name, value)
    if not steps > 0:
        raise ValueError(
            f"{name} must be a positive number of time steps, or infinite, got {value!r}"
        )
    return steps


def _window(name: str, value: object) -> int | None:
    """Return a checked window, or None; fractions are cut, because schedulers of
    TorchRL set them."""
    if (
        isinstance(value, Real)
        and not isinstance(value, bool)
        and 1 <= float(value) < inf
    ):
        value = int(float(value))  # TorchRL's schedulers set fractions
    return optional(whole(1))(name, value)


class RecencySampler(RowSampler):
    r"""Draws recent rows more often: the probability decreases exponentially with age,
    and old rows may be excluded.

    .. math::
        P(k) = 2^{-k/h} / \sum_{j=0}^{n-1} 2^{-j/h}, \quad 0 \le k < n

    Here :math:`P(k)` is the probability that a drawn row is :math:`k` time steps old
    (0: the newest), :math:`h` is ``half_life``, and :math:`n` is the number of time
    steps in the window. All lanes (environments) are equally likely; if lanes have
    unlike lengths, rows of equal age are.

    Args:
        half_life: the age in time steps at which a row is half as likely as the newest
            row, positive. By default (infinity), all ages in the window are equally
            likely.
        window: the number of newest time steps that may be drawn, at least 1 and
            rounded down; ``None``: all.
        max_age: the largest age of a row that may be drawn, at least 0; ``None``: any
            age. ``max_age=a`` means the same as ``window=a + 1``, except that it is
            fixed. For ages in versions of the policy, use TorchRL's
            ``StalenessAwareSampler``.

    ``half_life`` and ``window`` may be set at any time, also by TorchRL's schedulers.
    For *emphasizing recent experience* (ERE), set
    ``sampler.window = max(int(eta ** (1_000 * k / K) * N), least)`` before update k of
    K, where N is the number of stored time steps, ``eta`` is slightly below 1, and
    ``least`` is the smallest window.

    Raises:
        ValueError: a setting is out of range, or the buffer's writer does not write in
            time order.
        RuntimeError: (when sampling) the buffer is empty.

    Cost: O(B).
    Source: Wang and Ross: Boosting Soft Actor-Critic: Emphasizing Recent Experience
    without Forgetting the Past, 2019. TorchRL has no such sampler.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(100), sampler=RecencySampler(half_life=1.0, window=3), batch_size=8)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(150)}, [150]))
        >>> bool((rb.sample()["x"] >= 147).all())
        True
        >>> rb.sampler.probability(torch.tensor([49, 48, 47, 46]), storage=rb.storage)
        tensor([0.5714, 0.2857, 0.1429, 0.0000], dtype=torch.float64)
    """

    _shown: ClassVar = ("half_life", "window", "max_age")
    state_keys: ClassVar = ("half_life", "window")
    requires_shared_state, needs_order = False, True
    half_life: float = setting(_half_life)
    window: int | None = setting(_window)
    # the logarithm of ``P(k + 1) / P(k)``; 0 if all ages are equally likely
    log_decay: float

    def __init__(
        self,
        half_life: float = inf,
        window: int | None = None,
        *,
        max_age: int | None = None,
    ) -> None:
        self.half_life = half_life
        self.window = window
        self.max_age = optional(whole(0))("max_age", max_age)

    def settings_changed(self) -> None:
        """See :class:`~rlbuf_td.samplers.common.StatefulSampler`."""
        # not infinite, because 0 * infinity is NaN
        self.log_decay = max(-log(2.0) / self.half_life, -1e300)

    def span(self, steps: int) -> int:
        """Return how many of ``steps`` stored time steps may be drawn."""
        steps = steps if self.window is None else min(steps, self.window)
        return steps if self.max_age is None else min(steps, self.max_age + 1)

    def draw(
        self, storage: Storage, batch_size: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See :class:`~rlbuf_td.samplers.row_sampler.RowSampler`."""
        scratch = torch.empty(
            batch_size, dtype=torch.float64, device=device_of(storage)
        )
        return drawn_into(self, storage, batch_size, scratch)

    def draw_into(
        self,
        storage: Storage,
        live: LiveRows,
        flat: Tensor,
        report: dict[str, Tensor],
        scratch: Tensor,
    ) -> None:
        """See :class:`~rlbuf_td.buffers.plan.CompiledPlan`."""
        rows = live.rows
        ring: Any = getattr(storage, "ring", None)
        if not rows:
            raise RuntimeError(EMPTY)
        fill_uniform_(scratch, self._rng)
        if ring is None:
            lanes = lanes_of(storage).numel()
            newest = torchrl_parts.last_step(storage, rows // lanes)
        else:
            lanes, newest = ring.lanes, ring.newest
        if newest < 0:
            flat.copy_(self._draw_by_lane(ring, scratch))
            return
        steps = rows // lanes
        span = self.span(steps)
        recent_rows_(flat, scratch, newest, span, steps, lanes, self.log_decay)

    def _mass_by_lane(self, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return, of lanes with ``count`` steps, ``[E]``, how many may be drawn, and
        the sums of their weights."""
        span = count.clamp(max=self.span(int(count.max())))
        if self.log_decay == 0:
            return span, span.double()
        return span, torch.expm1(span.double() * self.log_decay) / expm1(self.log_decay)

    def _draw_by_lane(self, ring: Ring, uniform: Tensor) -> Tensor:
        """Return drawn cells of lanes with unlike numbers of rows, for ``[B]`` uniform
        numbers."""
        span, mass = self._mass_by_lane(to_device(ring.count, uniform.device))
        end = mass.cumsum(0)
        total = end[-1]
        below_total = torch.nextafter(total, mass.new_zeros(()))
        position = torch.minimum(uniform * total, below_total)
        lane = torch.searchsorted(end, position, right=True)
        # where the position lies in the mass of its lane, 0 to 1
        within = ((position - end[lane] + mass[lane]) / mass[lane]).clamp(0.0, 1.0)
        if self.log_decay < 0:
            age = (
                torch.log1p(within * torch.expm1(span[lane] * self.log_decay))
                / self.log_decay
            )
        else:
            age = within * span[lane]
        age = torch.minimum(age.long(), span[lane] - 1)
        written = to_device(ring.written, lane.device)
        return (written[lane] - 1 - age) % ring.steps * len(span) + lane

    def probability(self, index: object, *, storage: Storage) -> Tensor:
        """Return each row's probability of being drawn, ``[B]`` float64."""
        flat = flat_rows(index, storage, device_of(storage))
        lanes = lanes_of(storage).numel()
        if hasattr(storage, "ring"):
            count = to_device(storage.ring.count, flat.device)
            age = storage.ring.reach(flat)[1]
        else:
            steps = len(storage) // lanes
            count = torch.full((lanes,), steps, device=flat.device)
            age = (torchrl_parts.last_step(storage, steps) - flat // lanes) % steps
        span, mass = self._mass_by_lane(count)
        weight = torch.where(
            age < span[flat % lanes], torch.exp(age.double() * self.log_decay), 0.0
        )
        return weight / mass.sum()
