"""The pretended CUDA device refuses what CUDA refuses. On a machine with a GPU, the same is asked of the GPU."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.pretended_cuda import pretended_cuda
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

#: Calls that do not wait.
RUNS_ON: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x[x.long()] * torch.tensor(2.0) + 1).mul_(2).sum(),
    "number put": lambda x: x.__setitem__(1, 3.0),
    "non-blocking copy": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "new tensors": lambda x: torch.arange(4, device=x.device) + torch.zeros_like(x) + x.new_ones(4),
    "kernel": lambda x: _double[(1,)](x, torch.empty_like(x), 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_is_refused(cuda, name):
    call, error, words = REFUSED[name]
    x = torch.arange(4.0, device=cuda)
    with pytest.raises(error, match=words):
        call(x)
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", [*WAITS, *RUNS_ON])
def test_only_what_waits_is_refused_where_waiting_is_an_error(cuda, name):
    x, call = torch.arange(4.0, device=cuda), (WAITS | RUNS_ON)[name]
    call(x)
    refused = pytest.raises(RuntimeError, match="synchroniz") if name in WAITS else nullcontext()
    with waiting_is_an_error(cuda), refused:
        call(x)
    assert x.device == cuda


@pytest.mark.parametrize("name", ["item", "numbers of the host", "nonzero"])
def test_waiting_is_refused_in_a_capture(cuda, name):
    x = torch.arange(4.0, device=cuda)
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        WAITS[name](x)
    assert x.tolist() == [0, 1, 2, 3]


def test_a_replay_repeats_what_was_captured_with_the_numbers_that_the_host_gave(cuda):
    x, y, number = torch.arange(4.0, device=cuda), torch.zeros(4, device=cuda), 3
    _double[(1,)](x, y, 0)
    before, graph = y.tolist(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(number)
        _double[(1,)](x, y, 0)
        z = y + number
    number = 100
    assert (x.tolist(), y.tolist()) == ([0, 1, 2, 3], before)  # a capture does nothing
    for step in range(1, 4):
        graph.replay()
        expected = [2 * (at + 3 * step) for at in range(4)]
        assert (y.tolist(), z.tolist()) == (expected, [one + 3 for one in expected])
    x.zero_()  # memory that the host writes between replays is read by them
    with waiting_is_an_error(cuda):
        graph.replay()
    assert z.tolist() == [9.0] * 4


def test_a_replay_draws_new_numbers_from_its_generator(cuda):
    generator, graph = torch.Generator(cuda), torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        x = torch.rand(5, device=cuda, generator=generator)
    drawn = []
    for _ in range(2):
        generator.manual_seed(3)
        for _ in range(2):
            graph.replay()
            drawn.append(x.tolist())
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


def test_tensors_say_where_they_are_and_copies_share_memory(cuda):
    x = torch.arange(4.0, device=cuda)
    assert (x[2:].device, (x + 1).device, x.cpu().device.type, torch.zeros(2).device.type) == (cuda, cuda, "cpu", "cpu")
    one, part = copy.deepcopy((x, x[2:]))
    part.zero_()
    assert (one.tolist(), x.tolist()) == ([0, 1, 0, 0], [0, 1, 2, 3])
    assert pickle.loads(pickle.dumps(x)).device == cuda


def test_torch_is_as_before_afterwards():
    before = torch.cuda.is_available(), torch.tensor, torch.Generator, torch.Tensor.to, threading.Thread.run
    if not before[0]:
        with pretended_cuda():
            assert torch.cuda.is_available()
    assert before == (torch.cuda.is_available(), torch.tensor, torch.Generator, torch.Tensor.to, threading.Thread.run)
