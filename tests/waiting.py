"""Code that must not wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error(device: torch.device) -> Iterator[None]:
    """Raise where the host waits for a CUDA device; does nothing on the CPU."""
    if device.type != "cuda":
        yield
        return
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
