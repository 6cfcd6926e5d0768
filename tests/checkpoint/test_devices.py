"""Dumps of rows on devices that this machine lacks."""

from __future__ import annotations

import pytest
import torch

from rlbuf_td.checkpoint import parts
from tests.checkpoint.worlds import make


@pytest.mark.parametrize("device", ["mps", "cuda:99"])
def test_generators_of_devices_that_are_not_here_are_left_out(device):
    rb, state = make("uniform"), torch.get_rng_state()
    generator = rb._rng
    with pytest.warns(UserWarning, match=f"generator is on {device}, which is not available"):
        parts.restore_generator(rb, {"device": device, "state": state})
    assert rb._rng is generator
    parts.restore_default_generators({device: state})
    saved = {"buffer": {"batch_size": 1, "consume_after_n_samples": None}, "writer": {"state": {}}}
    saved |= {"trajectories": [], "generator": {"device": device, "state": state}}
    parts.refuse_malformed(rb, saved | {"default_generator": {"cuda:98": state}})
    with pytest.raises((RuntimeError, TypeError)):
        parts.refuse_malformed(rb, saved | {"default_generator": {"cpu": state[:5]}})
