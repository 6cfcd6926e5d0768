"""Fixtures of the tests about trajectories."""

from __future__ import annotations

import pytest

from rlbuf_td.kernels.episodes import FlagBoundaries
from rlbuf_td.storages import trajectory_index as trajectories


@pytest.fixture(params=["bitmap", "flags"])
def boundaries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with the boundaries of the CPU, and with those of other devices."""
    if request.param == "flags":
        monkeypatch.setattr(trajectories, "make_boundaries", FlagBoundaries)
    return request.param
