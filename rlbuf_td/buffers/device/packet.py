"""A batch as one block of bytes: what the host packs, one copy takes to a device, and views make whole there.

The places of the rows come first, and whatever else the sampler reports of each: columns, the largest items in front,
so that all are aligned. Behind them lie the rows, packed as :class:`~rlbuf_td.storages.layout.RowLayout` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.schema import SchemaError, show_key

_ALIGNED = 64


class Drawn(NamedTuple):
    """What a sampler has drawn, on the host, before any transform.

    Attributes:
        flat: flat rows, ``[B]`` int64.
        report: the sampler's, one entry a row.
        rows: the transitions, ``[B, ...]``, or where they are still to be gathered from.
        sampled_at: the storage's clock at that time.
    """

    flat: torch.Tensor
    report: dict[Any, torch.Tensor]
    rows: TensorDictBase | Rows
    sampled_at: int


class _Column(NamedTuple):
    key: Any  # of the report; None for the places of the rows
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class Parcel:
    """Where things lie in a block of ``count`` rows.

    Attributes:
        layout: of the rows.
        columns: the places and the report.
        sizes: in bytes: of the columns, of what is left free behind them, and of the rows.
        count: rows.
    """

    layout: RowLayout
    columns: tuple[_Column, ...]
    sizes: tuple[int, ...]
    count: int

    @classmethod
    def of(cls, layout: RowLayout, drawn: Drawn, known: Parcel | None) -> Parcel:
        """Return a parcel for what was drawn, ``known`` if that will do.

        Raises:
            TypeError: an entry of the report is none a row.
        """
        count = drawn.flat.shape[0]
        found = [_Column(None, torch.int64, drawn.flat.shape)]
        for key, value in drawn.report.items():
            if not isinstance(value, torch.Tensor) or value.shape[:1] != drawn.flat.shape:
                raise TypeError(
                    f"what a sampler reports goes to a device as tensors with one entry for each of {count} rows, "
                    f"got {show_key(key)} as {getattr(value, 'shape', type(value).__name__)}"
                )
            found.append(_Column(key, value.dtype, value.shape))
        columns = tuple(sorted(found, key=_itemsize))
        if known is not None and known.columns == columns and known.layout is layout:
            return known
        sizes = [column.dtype.itemsize * column.shape.numel() for column in columns]
        return cls(layout, columns, (*sizes, -sum(sizes) % _ALIGNED, count * layout.row_bytes), count)

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return sum(self.sizes)

    def split(self, block: torch.Tensor) -> tuple[torch.Tensor, dict[Any, torch.Tensor]]:
        """Return packed rows, ``[B, row_bytes]`` in bytes, and the columns by their keys, as views of a block."""
        *parts, _, rows = block.unsafe_split_with_sizes(self.sizes)  # unsafe: see RowLayout.columns
        packed = rows.view(self.layout.carrier).view(self.count, self.layout.row_bytes // self.layout.carrier.itemsize)
        found = {}
        for (key, dtype, shape), part in zip(self.columns, parts, strict=True):
            column = part.view(dtype)
            found[key] = column if len(shape) == 1 else column.view(shape)
        return packed, found

    def pack_(self, block: torch.Tensor, drawn: Drawn, leaves: list[torch.Tensor]) -> None:
        """Fill a block; ``leaves`` are those of the rows, if they need not be gathered."""
        packed, columns = self.split(block)
        if isinstance(drawn.rows, Rows):
            drawn.rows.pack_(drawn.flat, packed)
        else:
            torch._foreach_copy_(self.layout.columns(packed), leaves)
        columns.pop(None).copy_(drawn.flat)
        for key, column in columns.items():
            column.copy_(drawn.report[key])

    def unpack(self, block: torch.Tensor) -> tuple[TensorDict, torch.Tensor, dict[Any, torch.Tensor]]:
        """Return the transitions, their flat rows and the report, all as views of a block."""
        packed, columns = self.split(block)
        return self.layout.unpack(packed), columns.pop(None), columns


def _itemsize(column: _Column) -> int:
    return -column.dtype.itemsize


def layout_of(data: TensorDictBase, known: RowLayout | None) -> tuple[RowLayout, list[torch.Tensor]]:
    """Return how ``data``, ``[B, ...]``, is packed, and its leaves in that order; ``known`` is what it may be.

    Raises:
        SchemaError: an entry cannot be packed.
    """
    if known is not None:
        try:
            return known, known.collect(data, data.batch_size[:1])
        except SchemaError:
            pass
    layout = RowLayout(data, lead_dims=1)
    return layout, layout.collect(data, data.batch_size[:1])
