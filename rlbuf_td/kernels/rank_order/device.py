"""What the orders have in common that live on a device."""

from __future__ import annotations

import torch
from torch import Tensor

from rlbuf_td.kernels.device_scalars import DeviceScalars, is_capturing, outside_inference_mode
from rlbuf_td.kernels.rank_order import reference as _rank_torch
from rlbuf_td.kernels.rank_order.law import HEAD, RankLaw

ALPHA, SHIFT, BETA, NAMED = range(4)  # the numbers of an order on a device


class OnDevice:
    """What an order has beside its magnitudes on a device path, always in the same memory.

    Attributes:
        numbers: alpha, the shift of the law, beta, the rows that may be named.
        head: the table of the law.
        largest: 0-dim float64, the largest magnitude seen, -1 before any.
        unseen: where the largest of others than that goes.
        refused: 0-dim int64, how many NaN or infinite errors have been left out.
    """

    def __init__(self, device: torch.device) -> None:
        with outside_inference_mode():
            self.numbers = DeviceScalars(4, device)
            self.head = torch.zeros(HEAD, dtype=torch.float64, device=device)
            self.largest = torch.full((), -1.0, dtype=torch.float64, device=device)
            self.unseen = torch.full((), -1.0, dtype=torch.float64, device=device)
            self.refused = torch.zeros((), dtype=torch.int64, device=device)
            self._law = RankLaw(self.numbers[ALPHA], self.head, self.numbers[SHIFT])
        self._taken: RankLaw | None = None

    def law(self, law: RankLaw, beta: float) -> tuple[RankLaw, float | Tensor]:
        """Return a law and beta as torch ops are to read them: where captured graphs see them change."""
        if not is_capturing():
            return law, beta
        self.take(law, beta)
        return self._law, self.numbers[BETA]

    def take(self, law: RankLaw, beta: float) -> None:
        """Put a law where kernels and captured graphs read it; call it outside the graph."""
        if law is not self._taken:
            self._taken = law
            self.head.copy_(law.head)
            self.numbers.set_(ALPHA, law.alpha)
            self.numbers.set_(SHIFT, law.shift)
        self.numbers.set_(BETA, beta)


class DeviceOrder:
    """Magnitudes on a device, and what changes them; abstract.

    Args:
        magnitude: ``[capacity]`` float32, -1 for rows without; owned by the order from now on.
    """

    def __init__(self, magnitude: Tensor) -> None:
        self._magnitude = magnitude
        self._on_device: OnDevice | None = None

    @property
    def on_device(self) -> OnDevice:
        """What the device paths need, made at first use."""
        if self._on_device is None:
            self._on_device = OnDevice(self._magnitude.device)
        return self._on_device

    @property
    def refused(self) -> Tensor | int:
        """See :class:`~rlbuf_td.kernels.rank_order.RankOrder`."""
        return 0 if self._on_device is None else self._on_device.refused

    @property
    def magnitude(self) -> Tensor:
        """See :class:`~rlbuf_td.kernels.rank_order.RankOrder`."""
        return self._magnitude

    def share_memory_(self) -> None:
        """Refuse: what is known of the order is known to one process.

        Raises:
            ValueError: always.
        """
        raise ValueError("an order on a device cannot be shared by several processes")

    def _replace(self, magnitude: Tensor) -> None:
        """Take other magnitudes over, and forget the largest that was seen."""
        self._magnitude.copy_(magnitude)
        if self._on_device is not None:
            self._on_device.largest.fill_(-1.0)

    def _write(self, index: Tensor, td_error: Tensor, rows: int, counts: bool) -> Tensor:
        """Give rows their magnitudes without waiting for the device; return where the largest is kept."""
        state = self.on_device
        largest = state.largest if counts else state.unseen
        named = state.numbers[NAMED] if is_capturing() else rows
        given, refused = _rank_torch.write(self._magnitude, index, td_error, named)
        largest.copy_(torch.maximum(largest, given))
        state.refused.add_(refused)
        return largest
