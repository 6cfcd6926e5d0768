"""Dumps of rows on GPUs, as far as the host goes: stand-ins take the place of the GPUs' generators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlbuf_td.checkpoint import parts
from tests.checkpoint.worlds import make


@pytest.mark.parametrize("device", ["mps", "cuda:1"])
def test_generators_of_devices_that_are_not_here_are_left_out(device, monkeypatch):
    rb, state = make("uniform"), torch.get_rng_state()
    generator = rb._rng
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.warns(UserWarning, match=f"generator is on {device}, which is not available"):
        parts.restore_generator(rb, {"device": device, "state": state})
    assert rb._rng is generator
    parts.restore_default_generators({device: state})
    saved = {"buffer": {"batch_size": 1, "consume_after_n_samples": None, "prefetched": ()}, "writer": {"state": {}}}
    saved |= {"trajectories": [], "generator": {"device": device, "state": state}}
    parts.refuse_malformed(rb, saved | {"default_generator": {"cuda:2": state}})
    with pytest.raises((RuntimeError, TypeError)):
        parts.refuse_malformed(rb, saved | {"default_generator": {"cpu": state[:5]}})


def test_the_default_generators_of_the_host_and_of_the_rows_device_are_restored(monkeypatch):
    states: dict[Any, torch.Tensor] = {torch.device("cuda:0"): torch.tensor([1, 2])}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({torch.device(device): state}))
    storage: Any = SimpleNamespace(device=torch.device("cuda:0"))
    saved = parts._default_generators(storage)
    expected = torch.rand(3)
    states.clear()
    parts.restore_default_generators(saved)
    assert torch.equal(torch.rand(3), expected)
    assert states[torch.device("cuda:0")].tolist() == [1, 2]
