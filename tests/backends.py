"""What runs the operations of a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from rlbuf_td.kernels import dispatch
from rlbuf_td.kernels.dispatch import Backend

HAS_GPU = torch.cuda.is_available()
#: The compiled loops; torch's operations, which are the specification; the kernels of a
# GPU in Triton's interpreter, on the CPU; and on a GPU.
BACKENDS: dict[str, Backend | None] = {
    "compiled": "numba",
    "reference": "torch",
    "interpreter": "triton",
    "GPU": None,
}
_NEEDS = {
    "interpreter": pytest.mark.skipif(
        HAS_GPU or find_spec("triton") is None, reason="kernels run on the GPU, or not"
    ),
    "GPU": pytest.mark.skipif(not HAS_GPU, reason="torch finds no GPU"),
}


@contextmanager
def forced(backend: Backend) -> Iterator[None]:
    """Use one backend on every device. Objects remember which backend they were made
    for: make them inside."""
    before, dispatch._forced = dispatch._forced, backend
    try:
        yield
    finally:
        dispatch._forced = before


def running(name: str) -> Any:
    """Use the backend of a name in ``BACKENDS``."""
    backend = BACKENDS[name]
    return nullcontext() if backend is None else forced(backend)


def needs(name: str) -> list[Any]:
    """Return the marks of a test with a backend."""
    return [_NEEDS[name]] if name in _NEEDS else []
