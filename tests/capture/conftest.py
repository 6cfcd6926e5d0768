"""Devices on which captured steps are tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.graphs import graphs_by


@pytest.fixture(params=["cpu", "torch", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Run the test on the CPU without graphs, on the CPU with graphs that a backend records, and on CUDA."""
    torch.manual_seed(0)
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "torch":
        with graphs_by(request.param):
            yield torch.device("cpu")
    else:
        yield torch.device(request.param)


@pytest.fixture
def captures(request: pytest.FixtureRequest, device: torch.device) -> bool:
    return request.node.callspec.params["device"] != "cpu"


@pytest.fixture
def recorded() -> Iterator[None]:
    torch.manual_seed(0)
    with graphs_by("torch"):
        yield
