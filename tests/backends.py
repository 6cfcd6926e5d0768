"""Another backend than the one that the device suggests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlbuf_td.kernels import dispatch
from rlbuf_td.kernels.dispatch import Backend


@contextmanager
def forced(backend: Backend) -> Iterator[None]:
    """Use one backend on every device. Objects remember which backend they were made
    for: make them inside."""
    before, dispatch._forced = dispatch._forced, backend
    try:
        yield
    finally:
        dispatch._forced = before
