"""torch's default device and default dtype change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.buffers.test_learner_device import NAMES, SAMPLERS, SIZE, buffer, data
from tests.catalogue import assert_same


def life(name: str, ndim: int, path: Path) -> list[Any]:
    device = "cpu" if ndim == 2 else None  # with one, batches are prefetched
    rb, loaded = (buffer(SAMPLERS[name](200), ndim, device=device) for _ in range(2))
    given: list[Any] = []
    for first in (0, 30, 60):
        given.append(rb.extend(TRANSITIONS[ndim][..., first : first + 30]))
        given.append(torch.as_tensor(rb.add(TRANSITIONS[ndim][..., first]), device="cpu"))
        for _ in range(2):
            batch = rb.sample()
            given.append(batch.clone())
            rb.update_tensordict_priority(batch.set("td_error", ERRORS.clone()))
    rb.dumps(path)
    loaded.loads(path)
    loaded.load_state_dict(rb.state_dict())
    return [*given, loaded.sample(), loaded.chronological(), loaded.last(3), loaded.health()]


TRANSITIONS = {1: data(90), 2: data(90, lanes=(3,))}
ERRORS = torch.linspace(-2, 3, SIZE)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_torchs_defaults_change_nothing(name, ndim, tmp_path):
    expected = life(name, ndim, tmp_path / "a")
    dtype = torch.get_default_dtype()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        given = life(name, ndim, tmp_path / "b")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
    for ours, theirs in zip(given[:-1], expected[:-1], strict=True):
        assert_same(ours, theirs)
    assert given[-1] == expected[-1]
