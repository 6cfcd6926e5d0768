"""What a buffer looks like in Jupyter: a fill bar, its parts, and a table of its keys.

Colours are inherited or translucent, so that it can be read in light and in dark themes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from math import prod
from typing import Any

import torch
from tensordict import TensorDictBase

_FAINT = "rgba(127,127,127,.18)"
_CODE = "background:none;color:inherit;padding:0;font-size:95%"
_CELL = (
    "padding:1px 10px 1px 0;text-align:left;border:0;background:none;color:inherit;vertical-align:baseline;"
    "font-size:inherit"
)


def html_of(rb: Any) -> str:
    """Return a buffer as HTML, without scripts and style sheets."""
    name = escape(type(rb).__name__)
    if not rb._initialized:
        return f"<div><b>{name}</b> (not initialized)</div>"
    storage = rb._storage
    fields = list(_fields(storage))
    parts: list[tuple[str, Any]] = [("storage", _storage(storage)), ("sampler", rb._sampler), ("writer", rb._writer)]
    parts += [("transform", each) for each in rb._stages]
    parts += [("batch size", rb._batch_size)] if rb._batch_size is not None else []
    parts += [("episodes", rb.episode_stats)] if rb.episode_stats is not None else []
    keys = (
        _table(("key", "dtype", "shape", "bytes"), fields) if fields else "<i>no keys yet: nothing has been written</i>"
    )
    return (
        f'<div style="font-size:90%;line-height:1.45;max-width:46em"><b>{name}</b>'
        + _bar(len(storage), storage.max_size)
        + f'<div style="margin:6px 0">{keys}</div>'
        + _table((), parts)
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
        cells = "".join(f'<td style="{_CELL}"><code style="{_CODE}">{_words(each)}</code></td>' for each in others)
        label = f'<code style="{_CODE}">{escape(str(first))}</code>' if names else escape(str(first))
        fade = "" if names else ";opacity:.65;white-space:nowrap"
        lines.append(f'<tr style="background:none"><td style="{_CELL}{fade}">{label}</td>{cells}</tr>')
    rule = f"border:0;border-top:1px solid {_FAINT};border-collapse:collapse;margin:0;color:inherit;font-size:inherit"
    return f'<table style="{rule}">{"".join(lines)}</table>'


def _words(value: Any) -> str:
    return escape(str(value)).replace("\n", "<br>")


def _storage(storage: Any) -> str:
    """Say in a line what a storage is; its ``repr`` would list the keys again."""
    words = [f"{storage.ndim} dim{'s' * (storage.ndim > 1)}", str(getattr(storage, "device", "cpu"))]
    if getattr(storage, "row_bytes", 0):
        words.append(f"{storage.row_bytes} bytes a row, {_bytes(storage.nbytes)} in all")
    saved = getattr(storage, "saved_bytes", {})
    if saved:
        words.append(f"{_bytes(sum(saved.values()))} saved by sharing {', '.join('.'.join(key) for key in saved)}")
    if getattr(storage, "scratch_dir", None) is not None:
        words.append(f"mapped file in {storage.scratch_dir}")
    if getattr(storage, "shared", False):
        words.append("shared memory")
    if getattr(storage, "offload", False):
        words.append("page-locked RAM")
    return f"{type(storage).__name__}({', '.join(words)})"


def _bytes(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:,.1f} GiB"


def _fields(storage: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, dtype, shape and bytes of each leaf of a row; nothing where the storage keeps no columns."""
    rows = getattr(storage, "_storage", None)
    if not isinstance(rows, TensorDictBase):
        return
    if getattr(storage, "pooling", None) is not None:
        for leaf in sorted(storage.layout.leaves, key=lambda leaf: leaf.key):
            dtype, size = str(leaf.dtype).removeprefix("torch."), " × ".join(map(str, leaf.shape)) or "scalar"
            yield (
                ".".join(leaf.key),
                dtype,
                size,
                f"{leaf.nbytes:,}" + " (shared)" * (leaf.key in storage.pooling.places),
            )
        return
    for key, x in sorted(
        rows.items(True, True), key=lambda item: item[0] if isinstance(item[0], tuple) else (item[0],)
    ):
        if not isinstance(x, torch.Tensor):
            continue
        shape = tuple(x.shape[storage.ndim :])
        words = key if isinstance(key, str) else ".".join(key)
        dtype = str(x.dtype).removeprefix("torch.")
        yield words, dtype, " × ".join(map(str, shape)) or "scalar", f"{prod(shape) * x.dtype.itemsize:,}"
