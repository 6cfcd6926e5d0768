"""Ways to carry the state of a buffer over to another."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

HOW = ["state_dict", "dumps", "pickle"]


def restored(rb: Any, other: Any, how: str, folder: Path) -> Any:
    """Return a buffer with the state of ``rb``: ``other``, or a copy."""
    if how == "pickle":
        return copy.deepcopy(pickle.loads(pickle.dumps(rb)))
    if how == "state_dict":
        other.load_state_dict(rb.state_dict())
    else:
        rb.dumps(folder)
        other.loads(folder)
    return other
