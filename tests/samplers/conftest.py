"""Fixtures of the tests of samplers."""

from __future__ import annotations

import pytest

from rlbuf_td.kernels.episodes import FlagBoundaries


@pytest.fixture(params=["bitmap", "flags"])
def boundaries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with the boundaries of the CPU, and with those of other devices."""
    if request.param == "flags":
        monkeypatch.setattr("rlbuf_td.storages.trajectory_index.make_boundaries", FlagBoundaries)
    return request.param
