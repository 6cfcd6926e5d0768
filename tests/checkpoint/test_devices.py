"""Dumps of rows on GPUs, as far as the host goes: stand-ins take the place of the GPUs' streams and generators."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlbuf_td.checkpoint import files, parts
from tests.checkpoint.worlds import make, step


def test_threads_use_memory_of_a_gpu_after_what_was_asked_of_it_before(monkeypatch):
    waited: list[str] = []

    def current_stream(device: str) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    tensors: Any = [SimpleNamespace(is_cuda=device != "cpu", device=device) for device in ("cuda:1", "cpu", "cuda:1")]
    files.wait_for_gpus(tensors)
    assert waited == ["cuda:1"]


def test_dumps_and_loads_wait_for_gpus_before_threads_begin(monkeypatch, tmp_path):
    log: list[str] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            log.append(name)
            return call(*args)

        return noted

    rb = make("uniform")
    step(rb, 0)
    monkeypatch.setattr(files, "wait_for_gpus", noting("wait", files.wait_for_gpus))
    for working, name in ((files.DumpWriter, "_put"), (files.DumpReader, "_read_part")):
        monkeypatch.setattr(working, name, noting("work", getattr(working, name)))
    rb.dumps(tmp_path)
    assert (log[0], log.count("wait"), "work" in log) == ("wait", 1, True)
    log.clear()
    rb.loads(tmp_path)
    assert (log[0], "work" in log) == ("wait", True)


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
