"""Transitions as one block of packed rows, however many keys there are; answers in pieces that Ray moves fast."""

from __future__ import annotations

import pickle
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td.storages.layout import RowLayout

_PIECE = 90_000  # bytes: Ray returns up to 100 kB with the reply, and takes 2 ms for an object in its store
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
    """Return in how many pieces an answer travels; 0: as one object in Ray's store."""
    pieces = 1 + nbytes // _PIECE
    return pieces if pieces <= _MOST else 0


def cut(answer: Any, pieces: int) -> Any:
    """Return an answer as bytes, in a list of pieces if there are several; with 0 pieces as it is."""
    if not pieces:
        return answer
    whole = pickle.dumps(answer, protocol=5)
    size = -(-len(whole) // pieces)
    return [whole[place * size : (place + 1) * size] for place in range(pieces)] if pieces > 1 else whole


def join(answer: Any) -> Any:
    """Return the answer that :func:`cut` has cut."""
    if isinstance(answer, list):
        answer = b"".join(answer)
    return pickle.loads(answer) if isinstance(answer, bytes) else answer
