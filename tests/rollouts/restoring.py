"""Ways to carry the state of a buffer over to another."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

HOW = ["state_dict", "dumps", "pickle"]


def restored(rb: Any, other: Any, how: str, folder: Path) -> Any:
    """Return a buffer with the state and the generator's state of ``rb``: ``other``, or a copy."""
    if how == "pickle":
        return pickle.loads(pickle.dumps(rb))
    if how == "state_dict":
        other.load_state_dict(rb.state_dict())
    else:
        rb.dumps(folder)
        other.loads(folder)
    other.set_rng(torch.Generator())
    other._rng.set_state(rb._rng.get_state())
    return other
