"""Which of many values are the same: pure functions over blocks of rows."""

from __future__ import annotations

import torch

from rlbuf_td.diagnostics.doctor.record import Key, Record

# Floats nearer than this are the same value, computed twice.
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6
_HASHED = 256  # elements of a value that its hash looks at
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return values of any dtype as integers of the same size, so that NaN equals itself."""
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.view(_INTEGERS[values.dtype.itemsize])


def differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return which rows of two blocks differ, ``[B, E]`` bool; NaN and infinity differ from nothing.

    Args:
        left: ``[B, E, ...]``, on any device.
        right: the same.
    """
    unequal = (bits(left) != bits(right)).flatten(2).any(2)
    if (left.is_floating_point() or left.is_complex()) and bool(unequal.any()):
        wide = torch.complex128 if left.is_complex() else torch.float64
        one, other = left[unequal].to(wide), right[unequal].to(wide)
        apart = ~torch.isclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE) & one.isfinite() & other.isfinite()
        unequal = unequal.masked_scatter(unequal, apart.flatten(1).any(1))
    return unequal


def hashes(record: Record, keys: list[Key], *, under_next: bool, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return one number a row for what it holds under some keys: equal values have equal numbers.

    Args:
        record: the rows.
        keys: of the root.
        under_next: take what lies under "next" instead.
        rows: flat rows, ``[n]`` int64; ``None``: all.

    Returns:
        ``[n]`` int64, on the CPU.
    """
    generator = torch.Generator().manual_seed(0)
    result = torch.zeros(record.steps * record.lanes if rows is None else len(rows), dtype=torch.int64)
    for key in keys:
        column = record.columns[("next", *key) if under_next else key]
        width = column[0, 0].numel()
        if not width:
            continue
        places = torch.linspace(0, width - 1, min(width, _HASHED)).long()
        weight = torch.randint(-(1 << 62), 1 << 62, (len(places) * (1 + column.is_complex()),), generator=generator)
        if rows is None:
            parts = [column[block].flatten(0, 1) for block in record.blocks()]
        else:
            parts = [column[rows // record.lanes, rows % record.lanes]]
        numbers = [
            bits(part.flatten(1)[:, places.to(part.device)].contiguous()).flatten(1).cpu().long() for part in parts
        ]
        result += torch.cat([(each * weight).sum(1) for each in numbers])
    return result
