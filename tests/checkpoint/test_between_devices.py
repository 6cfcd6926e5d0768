"""State that is saved by the compiled loops of the CPU, and goes on with the torch operations of other devices."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

from rlbuf_td import PackedStorage, ReplayBuffer
from rlbuf_td.kernels.dispatch import Backend
from tests.backends import forced
from tests.checkpoint.worlds import NAMES, make, step, transitions

STEPS = 24


def buffer(name: str, form: Backend, lanes: int) -> ReplayBuffer:
    with forced(form):
        storage = PackedStorage(STEPS * max(1, lanes), ndim=1 + bool(lanes))
        return make(name, STEPS, lanes, seed=None, storage=storage)


def trained(name: str, form: Backend, lanes: int) -> ReplayBuffer:
    rb = buffer(name, form, lanes)
    with forced(form):
        for number in range(7):  # 26 time steps: the last write goes round the end
            step(rb, number, lanes)
    return rb


def assert_alike(ours: ReplayBuffer, theirs: ReplayBuffer) -> None:
    assert_close(ours.storage[:].to_dict(), theirs.storage[:].to_dict(), rtol=0, atol=0)
    mine, other = ours.parts.prioritized, theirs.parts.prioritized
    if mine is not None and other is not None:
        every = torch.arange(len(ours))
        assert_close(mine.priority(every), other.priority(every))


def go_on(lanes: int, pairs: list[tuple[ReplayBuffer, Backend]]) -> None:
    """Do the same with each buffer, and compare; then sample."""
    data = transitions(3, lanes, 28)
    for rb, form in pairs:
        with forced(form):
            rb.extend(data)
            if rb.parts.prioritized is not None:
                index = torch.arange(0, len(rb), 3)
                rb.parts.prioritized.update_priority(index, index + 0.5)
    assert_alike(*(rb for rb, _ in pairs))
    for rb, form in pairs:
        with forced(form):
            step(rb, 9, lanes)


@pytest.mark.parametrize(
    ("source", "target", "lanes"), [("numba", "torch", 0), ("numba", "torch", 3), ("torch", "numba", 0)]
)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("hindsight", "n-step")])  # one over the other
def test_a_state_goes_on_on_another_device(name, source, target, lanes, tmp_path):
    rb = trained(name, source, lanes)
    others = [trained(name, target, lanes), buffer(name, target, lanes)]
    with forced(source):
        rb.dumps(tmp_path, sync=False)
        state = rb.state_dict()
    with forced(target):
        others[0].load_state_dict(state)
        others[1].loads(tmp_path)
    for other in others:
        assert_alike(rb, other)
    go_on(lanes, [(rb, source), (others[1], target)])
    with forced(target):
        step(others[0], 9, lanes)


@pytest.mark.parametrize("name", ["unique", "highest now", "rank", "n-step over hindsight"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))], ids=["copy", "pickle"])
def test_copies_have_memory_of_their_own_on_the_device(name, copied):
    rb = trained(name, "torch", 0)
    with forced("torch"):
        other = copied(rb)
    assert other.storage.all_rows().matrix.data_ptr() != rb.storage.all_rows().matrix.data_ptr()
    assert_alike(rb, other)
    go_on(0, [(rb, "torch"), (other, "torch")])
