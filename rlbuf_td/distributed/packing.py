"""Packs transitions into one block of bytes, and cuts answers into pieces that Ray sends fast."""

from __future__ import annotations

import pickle
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td.storages.layout import RowLayout

_PIECE = 90_000  # bytes: Ray sends up to 100 kB with its reply; more takes 2 ms through its object store
_MOST = 6  # pieces: larger answers come from the object store, without a copy


def pack(layout: RowLayout, data: TensorDictBase, lead: torch.Size) -> np.ndarray:
    """Return ``data``, ``[*lead, ...]``, as rows, ``[n, row_bytes]`` uint8; SchemaError if it does not fit."""
    leaves = layout.collect(data, lead)
    rows = torch.empty((*lead, layout.row_bytes), dtype=torch.uint8, device="cpu")
    torch._foreach_copy_(layout.columns(rows), leaves)
    return rows.view(-1, layout.row_bytes).numpy()


def unpack(layout: RowLayout, rows: np.ndarray, lead: torch.Size) -> TensorDict:
    """Return packed rows as a TensorDict of views, ``[*lead, ...]``."""
    return layout.unpack(torch.from_numpy(rows).view(*lead, layout.row_bytes))


def named(layout: RowLayout) -> bytes:
    """Return a layout as bytes to send; equal layouts give equal bytes."""
    return pickle.dumps(layout.state())


@lru_cache(maxsize=64)
def layout_named(name: bytes) -> RowLayout:
    return RowLayout.from_state(pickle.loads(name))


def pieces_of(nbytes: int) -> int:
    """Return the number of pieces for an answer of ``nbytes`` bytes; 0: one object in Ray's object store."""
    pieces = 1 + nbytes // _PIECE
    return pieces if pieces <= _MOST else 0


def cut(answer: Any, pieces: int) -> Any:
    """Return an answer as bytes, or a list of bytes if there are several pieces; with 0 pieces, unchanged."""
    if not pieces:
        return answer
    whole = pickle.dumps(answer, protocol=5)
    size = -(-len(whole) // pieces)
    return [whole[place * size : (place + 1) * size] for place in range(pieces)] if pieces > 1 else whole


def join(answer: Any) -> Any:
    """Return the original answer from what :func:`cut` returned."""
    if isinstance(answer, list):
        answer = b"".join(answer)
    return pickle.loads(answer) if isinstance(answer, bytes) else answer
