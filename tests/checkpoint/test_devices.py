"""Dumps of rows on GPUs, as far as the host goes: stand-ins take the place of the GPUs' streams and generators."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlbuf_td import PackedStorage, ReplayBuffer
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


@pytest.mark.parametrize("device", ["mps", "xpu:1", "cuda:99"])
def test_a_generator_of_a_device_that_is_not_here_is_left_out(device):
    assert not parts._is_here(torch.device(device))
    rb = ReplayBuffer(storage=PackedStorage(4), batch_size=2)
    state = torch.Generator().get_state()
    parts.restore_default_generators({device: state})
    with pytest.warns(UserWarning, match="not here"):
        parts.restore_generator(rb, {"device": device, "state": state})
    assert rb._rng is None


def test_dumps_and_loads_wait_for_gpus_before_threads_begin(monkeypatch, tmp_path):
    log: list[str] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return call(*args, **kwargs)

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


def test_generators_of_gpus_that_are_not_here_are_left_out(monkeypatch):
    rb, state = make("uniform"), torch.get_rng_state()
    generator = rb._rng
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.warns(UserWarning, match="generator is of cuda:1, which is not here"):
        parts.restore_generator(rb, {"device": "cuda:1", "state": state})
    assert rb._rng is generator
    parts.restore_default_generators({"cuda:1": state})
    saved = {"buffer": {"batch_size": 1, "consume_after_n_samples": None, "prefetched": ()}, "writer": {"state": {}}}
    rest = {
        "trajectories": [],
        "generator": {"device": "cuda:1", "state": state},
        "default_generator": {"cuda:2": state},
    }
    parts.refuse_malformed(rb, saved | rest)
    with pytest.raises((RuntimeError, TypeError)):
        parts.refuse_malformed(rb, saved | rest | {"default_generator": {"cpu": state[:5]}})
