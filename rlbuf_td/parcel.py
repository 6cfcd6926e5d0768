"""A batch as one block of bytes: what the host packs, one copy takes to a device, and views make whole there.

The rows come first, packed as :class:`~rlbuf_td.storages.layout.RowLayout` says, then, packed likewise, what the
sampler reports of each: its place, its importance weight, whatever else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td._tensordict import new_tensordict
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.schema import SchemaError

_ALIGNED = 64
_INDEX = "index"


class Drawn(NamedTuple):
    """What a sampler has drawn, on the host, before any transform.

    Attributes:
        flat: flat rows, ``[B]`` int64.
        report: the sampler's, one entry a row.
        rows: the transitions, ``[B, ...]``, or where they are still to be gathered from.
        sampled_at: the storage's clock at that time.
    """

    flat: torch.Tensor
    report: dict[Any, Any]
    rows: TensorDictBase | Rows
    sampled_at: int

    @property
    def said(self) -> TensorDict:
        """The report with the flat rows, as ``[B]``."""
        entries = self.report | {_INDEX: self.flat}
        if all(type(key) is str for key in entries):
            return new_tensordict(entries, self.flat.shape, self.flat.device)
        return TensorDict(entries, self.flat.shape)


@dataclass(frozen=True)
class Parcel:
    """Where things lie in a block of ``count`` rows."""

    rows: RowLayout
    report: RowLayout
    keys: tuple[Any, ...]  # of the report
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self._first + self.count * self.report.row_bytes

    @property
    def _first(self) -> int:
        return -(-self.count * self.rows.row_bytes // _ALIGNED) * _ALIGNED

    def parts(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return packed rows and the packed report, ``[B, row_bytes]`` in bytes, as views of a block of bytes."""
        return self._part(block, 0, self.rows), self._part(block, self._first, self.report)

    def _part(self, block: torch.Tensor, start: int, layout: RowLayout) -> torch.Tensor:
        part = block.narrow(0, start, self.count * layout.row_bytes).view(layout.carrier)
        return part.view(self.count, layout.row_bytes // layout.carrier.itemsize)

    def unpack(self, block: torch.Tensor) -> tuple[TensorDict, torch.Tensor, dict[Any, Any]]:
        """Return the transitions, their flat rows and the report, all as views of a block."""
        packed, said = self.parts(block)
        report = self.report.unpack(said)
        return self.rows.unpack(packed), report.get(_INDEX), {key: report.get(key) for key in self.keys}


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


def pack_(layout: RowLayout, leaves: list[torch.Tensor], packed: torch.Tensor) -> None:
    """Write leaves into a part of a block."""
    torch._foreach_copy_(layout.columns(packed), leaves)
