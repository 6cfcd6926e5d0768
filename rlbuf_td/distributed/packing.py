"""Transitions as one block of packed rows, which is sent as one object, however many keys there are."""

from __future__ import annotations

import pickle
from functools import lru_cache

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td.storages.layout import RowLayout


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
