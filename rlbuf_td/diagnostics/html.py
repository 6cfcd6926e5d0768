"""The HTML with which Jupyter shows a buffer: a fill bar, a table of keys, and the buffer's components.

Colours are inherited or translucent, so that the view suits light and dark themes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from math import prod
from typing import Any

import torch

from rlbuf_td.storages.indexing import stored_rows
from rlbuf_td.storages.lane_heads import row_count
from rlbuf_td.storages.memory_budget import show_bytes
from rlbuf_td.storages.schema import walk

_FAINT = "rgba(127,127,127,.18)"
_CODE = "background:none;color:inherit;padding:0;font-size:95%"
_CELL = (
    "padding:1px 10px 1px 0;text-align:left;border:0;background:none;color:inherit;vertical-align:baseline;"
    "font-size:inherit"
)


def html_of(rb: Any) -> str:
    name = escape(type(rb).__name__)
    if not rb.initialized:
        return f"<div><b>{name}</b> (not initialized)</div>"
    storage = rb.storage
    fields = list(_fields(storage))
    parts = [("storage", _storage(storage)), ("sampler", rb.sampler), ("writer", rb.writer)]
    parts += [("transform", each) for each in getattr(rb.transform, "transforms", ())]
    parts += [("batch size", rb.batch_size), ("episodes", rb.episode_stats)]
    keys = _table(("key", "dtype", "shape", "bytes"), fields) if fields else "<i>no keys yet: nothing was written</i>"
    return (
        f'<div style="font-size:90%;line-height:1.45;max-width:46em"><b>{name}</b>'
        + _bar(row_count(storage), storage.max_size)
        + f'<div style="margin:6px 0">{keys}</div>'
        + _table((), [(name, value) for name, value in parts if value is not None])
        + "</div>"
    )


def _bar(rows: int, capacity: int) -> str:
    share = rows / capacity
    words = f"{rows:,} of {capacity:,} rows, {share:.0%}"
    return (
        '<div style="display:flex;align-items:center;gap:10px;margin:4px 0">'
        f'<div role="img" aria-label="{words}" style="flex:0 0 16em;height:9px;border-radius:5px;background:{_FAINT};'
        'overflow:hidden"><div style="height:100%;background:currentColor;opacity:.65;'
        f'width:{100 * share:.2f}%"></div></div><span>{words}</span></div>'
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    names = "".join(f'<th style="{_CELL};font-weight:normal;opacity:.65">{name}</th>' for name in head)
    lines = [f"<thead><tr>{names}</tr></thead>"] if names else []
    for first, *others in rows:
        words = (escape(str(each)).replace("\n", "<br>") for each in others)
        cells = "".join(f'<td style="{_CELL}"><code style="{_CODE}">{each}</code></td>' for each in words)
        label = f'<code style="{_CODE}">{escape(str(first))}</code>' if names else escape(str(first))
        fade = "" if names else ";opacity:.65;white-space:nowrap"
        lines.append(f'<tr style="background:none"><td style="{_CELL}{fade}">{label}</td>{cells}</tr>')
    rule = f"border:0;border-top:1px solid {_FAINT};border-collapse:collapse;margin:0;color:inherit;font-size:inherit"
    return f'<table style="{rule}">{"".join(lines)}</table>'


def _storage(storage: Any) -> str:
    words = [f"{storage.ndim} dim{'s' * (storage.ndim > 1)}", str(getattr(storage, "device", "cpu"))]
    if getattr(storage, "row_bytes", 0):
        words.append(f"{storage.row_bytes} bytes per row, {show_bytes(storage.nbytes)} in all")
    saved = getattr(storage, "saved_bytes", {})
    if saved:
        words.append(f"{show_bytes(sum(saved.values()))} saved by deduplicating {', '.join(map('.'.join, saved))}")
    if getattr(storage, "scratch_dir", None) is not None:
        words.append(f"mapped file in {storage.scratch_dir}")
    words += ["shared memory"] * bool(getattr(storage, "shared", False))
    return f"{type(storage).__name__}({', '.join(words)})"


def _fields(storage: Any) -> Iterator[tuple[str, str, str, str]]:
    rows, deduplicated = stored_rows(storage), getattr(storage, "deduplicated", {})
    if rows is None:
        return
    found = {key: (x.dtype, x.shape[storage.ndim :]) for key, x in walk(rows) if isinstance(x, torch.Tensor)}
    found |= {key: (leaf.dtype, leaf.shape) for key, leaf in deduplicated.items()}
    for key, (dtype, shape) in sorted(found.items()):
        size = f"{prod(shape) * dtype.itemsize:,}" + " (deduplicated)" * (key in deduplicated)
        yield ".".join(key), str(dtype).removeprefix("torch."), " × ".join(map(str, shape)) or "scalar", size
