"""The pretended CUDA device refuses what CUDA refuses. On a machine with a GPU, the same is asked of the GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.pretended_cuda import pretended_cuda, why_not
from tests.waiting import waiting_is_an_error

triton = pytest.importorskip("triton")
tl = triton.language


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """Return a CUDA device: a pretended one where there is none."""
    if torch.cuda.is_available():
        yield torch.device("cuda", 0)
        return
    with pretended_cuda() as device:
        yield device


@triton.jit
def _double(x, y, shift):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(y + at, 2 * tl.load(x + at + shift))


#: Calls on ``[4]`` of the device, and what the error says.
REFUSED: dict[str, tuple[Callable[[Tensor], object], type[Exception], str]] = {
    "sum": (lambda x: x + torch.ones(4), RuntimeError, "same device"),
    "sum into the CPU": (lambda x: torch.ones(()).add_(x[0]), RuntimeError, "same device"),
    "index of the device into the CPU": (lambda x: torch.ones(4)[x.long()], RuntimeError, "indices should|same device"),
    "rows of the CPU put": (lambda x: x.__setitem__(x.long(), torch.ones(4)), RuntimeError, "same device"),
    "generator of the CPU": (lambda x: x.uniform_(generator=torch.Generator()), RuntimeError, "generator"),
    "numpy": (lambda x: x.numpy(), TypeError, "can't convert cuda:0"),
    "kernel that reads the CPU": (lambda x: _double[(1,)](torch.ones(4), x, 0), ValueError, "cannot be accessed"),
}

#: Calls that wait for the device.
WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "list": lambda x: x.tolist(),
    "copy to the CPU": lambda x: x.cpu(),
    "copy from the CPU": lambda x: x.copy_(torch.ones(4)),
    "numbers of the host": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "index of the host": lambda x: x[[1, 2]],
    "mask": lambda x: x[x > 1],
    "nonzero": lambda x: (x > 1).nonzero(),
}


def test_what_cuda_refuses_is_refused(cuda):
    x = torch.arange(4.0, device=cuda)
    for call, error, words in REFUSED.values():
        with pytest.raises(error, match=words):
            call(x)
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_refused_where_waiting_is_an_error(cuda, name):
    x, call = torch.arange(4.0, device=cuda), WAITS[name]
    call(x)
    with waiting_is_an_error(cuda), pytest.raises(RuntimeError, match="synchroniz"):
        call(x)
    if name in ("item", "numbers of the host", "nonzero"):
        with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            call(x)
    assert x.device == cuda


def test_a_replay_repeats_what_was_captured_with_the_same_host_numbers(cuda):
    x, y, number = torch.arange(4.0, device=cuda), torch.zeros(4, device=cuda), 3
    _double[(1,)](x, y, 0)
    before, graph, generator = y.tolist(), torch.cuda.CUDAGraph(), torch.Generator(cuda)
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        x.add_(number)
        _double[(1,)](x, y, 0)
        z, drawn = y + number, torch.rand(5, device=cuda, generator=generator)
    number = 100
    assert (x.tolist(), y.tolist()) == ([0, 1, 2, 3], before)  # a capture does nothing
    numbers = []
    for step in (1, 2, 3, 4):
        if step % 2:
            generator.manual_seed(3)
        graph.replay()
        expected = [2 * (at + 3 * step) for at in range(4)]
        assert (y.tolist(), z.tolist()) == (expected, [one + 3 for one in expected])
        numbers.append(drawn.tolist())
    assert numbers[:2] == numbers[2:] != [numbers[0]] * 2
    x.zero_()  # memory that the host writes between replays is read by them
    with waiting_is_an_error(cuda):
        graph.replay()
    assert z.tolist() == [9.0] * 4


#: What each process runs, of all files that may have tests of a device.
ROOT = Path(__file__).parents[1]
FILES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
OF_DEVICES = {path for path in FILES if re.search(r"\b(device|cuda)\b", (ROOT / path).read_text())}
PARTS = {
    "storages": {path for path in OF_DEVICES if "/storages/" in path},
    "learners": {path for path in OF_DEVICES if re.search("/capture/|/checkpoint/|/test_learner_device", path)},
}
PARTS["the others"] = OF_DEVICES.difference(*PARTS.values())


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_tests_of_a_cuda_device_pass_on_a_pretended_one(part):
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    options = ["-p", "tests.pretended_cuda", "-p", "no:cacheprovider", "--tb=short", "-m", "cuda and not slow"]
    command = [sys.executable, "-m", "pytest", *options, *sorted(PARTS[part])]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr[-2_000:]
    assert passed is not None
    assert int(passed[1]) >= 25
