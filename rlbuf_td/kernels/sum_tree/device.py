"""What a sum tree has on a device beside its state."""

from __future__ import annotations

import torch

from rlbuf_td.kernels.device_scalars import DeviceScalars, outside_inference_mode
from rlbuf_td.kernels.sum_tree.reference import Number

#: The numbers: of the law, the rows that are drawn from and that may be named, the magnitude of new rows.
ALPHA, EPS, BETA, DRAWN, NAMED, ENTRY = range(6)


class OnDevice:
    """What a tree has beside its state on a device path, always in the same memory.

    Attributes:
        numbers: those named at the top of this module.
        claims: ``[rows]`` int32, -1 between updates: which mention of a row writes it.
        largest: 0-dim float64, the largest magnitude seen since :func:`clear_`, -1 before any.
        unseen: where the largest of others than that goes.
        refused: 0-dim int64, how many NaN or infinite errors have been left out.
        ended: 0-dim int32, how many programs have ended of the launch that recomputes sums.
        starts: ``[levels + 1]`` int64, where the levels begin.
    """

    def __init__(self, rows: int, starts: list[int], device: torch.device) -> None:
        with outside_inference_mode():
            self.numbers = DeviceScalars(6, device)
            self.claims = torch.full((rows,), -1, dtype=torch.int32, device=device)
            self.largest = torch.full((), -1.0, dtype=torch.float64, device=device)
            self.unseen = torch.full((), -1.0, dtype=torch.float64, device=device)
            self.refused = torch.zeros((), dtype=torch.int64, device=device)
            self.ended = torch.zeros((), dtype=torch.int32, device=device)
            self.starts = torch.tensor(starts, device=device)

    def take(self, at: tuple[int, ...], values: tuple[Number, ...]) -> tuple[Number, ...]:
        """Put numbers where kernels and captured graphs read them; return what torch ops are to read."""
        if torch.compiler.is_compiling():
            return values
        for place, value in zip(at, values, strict=True):
            self.numbers.set_(place, value)
        return tuple(self.numbers[place] for place in at)
