"""Fixtures that every test module shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from tests.sanitizer import sanitized


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run the test once per device; CUDA is skipped where there is none."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


@pytest.fixture(autouse=True, scope="session")
def watched_launches() -> Iterator[None]:
    """Let every launch in Triton's interpreter be watched for what would go wrong on a GPU."""
    try:
        import triton
    except ImportError:
        yield
        return
    with sanitized() if triton.knobs.runtime.interpret else nullcontext():
        yield


@pytest.fixture
def gpu() -> torch.device:
    """Return where the GPU's kernels run: on a GPU, or on the CPU in Triton's interpreter."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton was imported before TRITON_INTERPRET=1 was set")
    return torch.device("cpu")
