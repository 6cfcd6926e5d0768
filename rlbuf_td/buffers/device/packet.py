"""A batch as one block of bytes, so that a single copy takes it to a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.schema import SchemaError, show_key

_ALIGNMENT = 64


@dataclass(frozen=True)
class Packet:
    """The layout of a block: ``count`` packed rows, followed by ``count`` packed entries of the sampler's report."""

    rows: RowLayout
    report: RowLayout  # with the flat row as "index"
    count: int

    def sizes(self) -> tuple[int, int, int]:
        """Bytes of the rows, of the gap that aligns the report, and of the report."""
        rows = self.count * self.rows.row_bytes
        return rows, -rows % _ALIGNMENT, self.count * self.report.row_bytes

    def split(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the packed rows and the packed report in a block."""
        rows, _, report = block.unsafe_split_with_sizes(self.sizes())  # unsafe: see RowLayout.columns
        return _rows_of(rows, self.rows, self.count), _rows_of(report, self.report, self.count)

    def unpack(self, block: torch.Tensor) -> tuple[TensorDict, dict[Any, torch.Tensor]]:
        """Return the transitions, ``[count, ...]``, and the sampler's report, as views of a block."""
        rows, report = self.split(block)
        keys = (leaf.key if len(leaf.key) > 1 else leaf.key[0] for leaf in self.report.leaves)
        return self.rows.unpack(rows), dict(zip(keys, self.report.columns(report), strict=True))


def pack(
    flat: torch.Tensor, report: dict[Any, Any], rows: TensorDictBase | Rows, last: Packet | None, *, pin_memory: bool
) -> tuple[Packet, torch.Tensor]:
    """Pack a batch in host memory; return the layout and the block, ``[n]`` uint8.

    Args:
        flat: drawn rows, ``[B]`` int64.
        report: what the sampler says of each of them.
        rows: the transitions, ``[B, ...]``, or the stored rows that they are gathered from.
        last: the layout of the batch before, which is used again if it fits.
        pin_memory: whether the memory is page-locked.
    """
    entries = _entries(flat, report)
    report_layout, report_leaves = _layout_of(entries, None if last is None else last.report)
    if isinstance(rows, TensorDictBase):
        layout, leaves = _layout_of(rows, None if last is None else last.rows)
    else:
        layout, leaves = rows.layout, []
    packet = Packet(layout, report_layout, flat.shape[0])
    host = torch.empty(sum(packet.sizes()), dtype=torch.uint8, pin_memory=pin_memory, device="cpu")
    packed, packed_report = packet.split(host)
    if isinstance(rows, TensorDictBase):
        torch._foreach_copy_(layout.columns(packed), leaves)
    else:
        rows.pack_(flat, packed)
    torch._foreach_copy_(report_layout.columns(packed_report), report_leaves)
    return packet, host


def _rows_of(block: torch.Tensor, layout: RowLayout, count: int) -> torch.Tensor:
    return block.view(layout.carrier).view(count, layout.row_bytes // layout.carrier.itemsize)


def _entries(flat: torch.Tensor, report: dict[Any, Any]) -> TensorDict:
    """Return the report with the drawn rows as a TensorDict, one entry for each row."""
    entries = TensorDict({"index": flat}, flat.shape)
    for key, value in report.items():
        if not isinstance(value, torch.Tensor) or value.shape[:1] != flat.shape:
            raise TypeError(
                f"what a sampler reports goes to a device as tensors with one entry for each of {len(flat)} rows, "
                f"got {show_key(key)} as {getattr(value, 'shape', type(value).__name__)}"
            )
        entries.set(key, value)
    return entries


def _layout_of(data: TensorDictBase, last: RowLayout | None) -> tuple[RowLayout, list[torch.Tensor]]:
    """Return how ``data``, ``[B, ...]``, is packed (as ``last`` if that fits), and its leaves in that order."""
    lead = data.batch_size[:1]
    if last is not None:
        try:
            return last, last.collect(data, lead)
        except SchemaError:
            pass
    layout = RowLayout(data, lead_dims=1)
    return layout, layout.collect(data, lead)
