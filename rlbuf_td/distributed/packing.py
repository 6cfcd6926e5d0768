"""Packs transitions into bytes, and cuts answers into pieces that are small enough to bypass Ray's object store."""

from __future__ import annotations

import pickle
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rlbuf_td.storages.layout import RowLayout

_PIECE = 90_000  # bytes: Ray replies directly with up to 100 kB; more takes 2 ms through Ray's object store
_MOST = 6  # pieces: larger answers use the object store, without a copy


def pack(layout: RowLayout, data: TensorDictBase, lead: torch.Size) -> np.ndarray:
    """Pack ``data`` (batch dims ``lead``) into ``[n, row_bytes]`` uint8; SchemaError if ``data`` does not fit."""
    leaves = layout.collect(data, lead)
    rows = torch.empty((*lead, layout.row_bytes), dtype=torch.uint8, device="cpu")
    torch._foreach_copy_(layout.columns(rows), leaves)
    return rows.view(-1, layout.row_bytes).numpy()


def named(layout: RowLayout) -> bytes:
    """Serialize a layout; equal layouts give equal bytes."""
    return pickle.dumps(layout.state())


@lru_cache(maxsize=64)
def layout_named(name: bytes) -> RowLayout:
    return RowLayout.from_state(pickle.loads(name))


def pieces_of(nbytes: int) -> int:
    """Return the number of pieces for an answer of ``nbytes`` bytes; 0 if the answer is too large to cut."""
    pieces = 1 + nbytes // _PIECE
    return pieces if pieces <= _MOST else 0


def cut(answer: Any, pieces: int) -> Any:
    """Pickle an answer and cut the bytes into ``pieces`` parts."""
    if not pieces:
        return answer
    whole = pickle.dumps(answer, protocol=5)
    size = -(-len(whole) // pieces)
    return [whole[place * size : (place + 1) * size] for place in range(pieces)] if pieces > 1 else whole


def join(answer: Any) -> Any:
    """Undo :func:`cut`."""
    if isinstance(answer, list):
        answer = b"".join(answer)
    return pickle.loads(answer) if isinstance(answer, bytes) else answer
