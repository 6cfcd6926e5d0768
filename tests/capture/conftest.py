"""Where captured steps are tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.graphs import graphs_by


@pytest.fixture(params=["cpu", "torch", "triton", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Run the test on the CPU, with recorded graphs of torch ops and of kernels that serve devices, and on CUDA."""
    torch.manual_seed(0)
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param in ("torch", "triton"):
        with graphs_by(request.param):
            yield torch.device("cpu")
    else:
        yield torch.device(request.param)


@pytest.fixture
def calls(request: pytest.FixtureRequest, device: torch.device) -> int:
    """Return how many batches of 500 a law is asked of; few where kernels are interpreted."""
    kernels = request.node.callspec.params["device"] in ("triton", "cuda")
    return 6 if kernels and pytest.importorskip("triton").knobs.runtime.interpret else 20


@pytest.fixture
def captures(request: pytest.FixtureRequest, device: torch.device) -> bool:
    """Return whether there are graphs."""
    return request.node.callspec.params["device"] != "cpu"


@pytest.fixture
def recorded() -> Iterator[None]:
    """Run the test with recorded graphs of torch ops."""
    torch.manual_seed(0)
    with graphs_by("torch"):
        yield
