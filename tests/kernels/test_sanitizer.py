"""The sanitizer finds what the interpreter would let pass, and lets pass what is sound."""

from __future__ import annotations

import pytest
import torch

from tests.sanitizer import Unsound

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not triton.knobs.runtime.interpret, reason="watches Triton's interpreter"
)


@triton.jit
def _copies(x, y):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(y + at, tl.load(x + at))


@triton.jit
def _counts(x, y):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.atomic_add(y + tl.arange(0, 4), tl.load(x + at))


@triton.jit
def _agrees(x, y):
    at = tl.arange(0, 4)
    tl.store(y + at, tl.load(x + at))
    tl.debug_barrier()
    tl.store(y + 4 + at, tl.load(y + at))


@triton.jit
def _waits(x, y):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(y + at, tl.load(x + at))
    tl.debug_barrier()
    tl.store(x + at, tl.load(y + at))


@triton.jit
def _finishes(x, y):
    """Let the last program add up what all have done."""
    at = tl.program_id(0)
    tl.store(y + at, tl.sum(tl.load(x + at * 4 + tl.arange(0, 4))))
    tl.debug_barrier()
    if tl.atomic_add(y + 2, 1.0) == 1.0:
        tl.store(y + 3, tl.load(y) + tl.load(y + 1))


@pytest.mark.parametrize("kernel", [_copies, _counts, _agrees, _waits, _finishes])
def test_what_is_sound_passes(kernel):
    x, y = torch.arange(8.0), torch.zeros(8)
    kernel[(2,)](x, y)
    expected = {
        _copies: torch.arange(8.0),
        _counts: torch.tensor([4.0, 6, 8, 10, 0, 0, 0, 0]),
        _agrees: torch.tensor([0.0, 1, 2, 3, 0, 1, 2, 3]),
        _waits: torch.arange(8.0),
        _finishes: torch.tensor([6.0, 22, 2, 28, 0, 0, 0, 0]),
    }
    assert torch.equal(y, expected[kernel])


@triton.jit
def _reads_beyond(x, y):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(y + at, tl.load(x + 4_096 + at))


@triton.jit
def _writes_beyond(x, y):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(y - 4_096 + at, tl.load(x + at))


@triton.jit
def _does_not_wait(x, y):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(y + at, tl.load(x + at))
    tl.store(x + at, tl.load(y + at))


@triton.jit
def _overtakes(x, y):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    turned = tl.program_id(0) * 4 + 3 - tl.arange(0, 4)
    tl.store(x + at, tl.load(x + turned))


@triton.jit
def _overtakes_itself(x, y):
    at = tl.program_id(0)
    tl.store(x + at, tl.load(x + at) + 1)


@triton.jit
def _tears(x, y):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(y + at // 2, tl.load(x + at))


@triton.jit
def _reads_another(x, y):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(y + at, tl.load(x + at))
    tl.debug_barrier()
    tl.store(x + at, tl.load(y + 7 - at))


@triton.jit
def _quarrels(x, y):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(y + tl.arange(0, 4), tl.load(x + at))


@triton.jit
def _reads_a_count(x, y):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.atomic_add(y + tl.arange(0, 4), tl.load(x + at))
    tl.debug_barrier()
    tl.store(x + at, tl.load(y + tl.arange(0, 4)))


@triton.jit
def _releases_too_early(x, y):
    at = tl.program_id(0)
    tl.store(y + at, tl.sum(tl.load(x + at * 4 + tl.arange(0, 4))))
    if tl.atomic_add(y + 2, 1.0) == 1.0:
        tl.debug_barrier()
        tl.store(y + 3, tl.load(y) + tl.load(y + 1))


@triton.jit
def _does_not_release(x, y):
    at = tl.program_id(0)
    tl.store(y + at, tl.sum(tl.load(x + at * 4 + tl.arange(0, 4))))
    tl.debug_barrier()
    if tl.atomic_add(y + 2, 1.0, sem="relaxed") == 1.0:
        tl.store(y + 3, tl.load(y) + tl.load(y + 1))


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (_reads_beyond, "load outside of all arguments"),
        (_writes_beyond, "store outside of all arguments"),
        (_does_not_wait, "load where a thread has written since the last barrier: y"),
        (_overtakes, "store where another thread has read since the last barrier: x"),
        (_overtakes_itself, "store where another thread has read since the last barrier: x"),
        (_tears, "different values in one store at y"),
        (_reads_another, "reads what another program writes at y"),
        (_quarrels, "writes something else than another program at y"),
        (_releases_too_early, "reads what another program writes at y"),
        (_does_not_release, "reads what another program writes at y"),
        (_reads_a_count, "an atomic operation where another program reads or writes: y"),
    ],
)
def test_what_is_not_sound_is_found(kernel, complaint):
    with pytest.raises((Unsound, triton.runtime.errors.InterpreterError), match=complaint):
        kernel[(2,)](torch.arange(8.0), torch.zeros(8))


@triton.jit
def _trusts_the_mask(x, y):
    at = tl.arange(0, 4)
    tl.store(y + at, tl.load(x + at, mask=at < 3))


def test_what_a_masked_load_leaves_out_is_rubbish():
    y = torch.zeros(4)
    _trusts_the_mask[(1,)](torch.ones(4), y)
    assert torch.equal(y[:3], torch.ones(3))
    assert y[3] > 1e30


@triton.jit
def _takes_a_number(x, y):
    at = tl.program_id(0)
    tl.store(y + at, tl.atomic_add(x, 1))


def test_programs_run_in_no_order():
    y = torch.zeros(64, dtype=torch.int64)
    _takes_a_number[(64,)](torch.zeros(1, dtype=torch.int64), y)
    assert torch.equal(y.sort().values, torch.arange(64))
    assert not torch.equal(y, torch.arange(64))
