"""What runs the operations of a buffer, and what the installed TorchRL has."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torchrl
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import Collector
from torchrl.data.replay_buffers import ReplayBuffer

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


# -- TorchRL

#: What newer releases of TorchRL have: a test that is skipped says what it needs.
FEATURES = {
    "data sets": hasattr(ReplayBuffer, "as_dataset"),
    "waiting": hasattr(ReplayBuffer, "wait_until_sampleable"),
    "exports": hasattr(ReplayBuffer, "export"),
    "trajectory writes": "replay_write_mode"
    in inspect.signature(Collector.__init__).parameters,
    "stop signals": hasattr(torchrl.checkpoint, "StopOnSignal"),
    "parts of a checkpoint": hasattr(Checkpoint, "read_component"),
}


def needs_torchrl(feature: str) -> pytest.MarkDecorator:
    """Skip a test if the installed TorchRL lacks the feature."""
    return pytest.mark.skipif(
        not FEATURES[feature], reason=f"TorchRL {torchrl.__version__} has no {feature}"
    )
