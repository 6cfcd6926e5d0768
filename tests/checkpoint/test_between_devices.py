"""State that is saved where rows lie on one device, and goes on where they lie on another."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer
from tests.checkpoint.worlds import NAMES, make, step, transitions

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 24


def buffer(name: str, device: str, lanes: int) -> ReplayBuffer:
    storage = PackedStorage(STEPS * max(1, lanes), ndim=1 + bool(lanes), device=device)
    return make(name, STEPS, lanes, seed=None, storage=storage)


def trained(name: str, device: str, lanes: int) -> ReplayBuffer:
    rb = buffer(name, device, lanes)
    for number in range(7):  # 26 time steps: the last write goes round the end
        step(rb, number, lanes)
    return rb


def assert_alike(ours: ReplayBuffer, theirs: ReplayBuffer) -> None:
    assert_close(ours.storage[:].cpu().to_dict(), theirs.storage[:].cpu().to_dict(), rtol=0, atol=0)
    mine, other = ours.parts.prioritized, theirs.parts.prioritized
    if mine is not None and other is not None:
        every = torch.arange(len(ours))
        assert_close(mine.priority(every).cpu(), other.priority(every).cpu())


def go_on(rb: ReplayBuffer, other: ReplayBuffer, lanes: int) -> None:
    """Do the same with both, and compare; then sample."""
    index, data = torch.arange(0, len(rb), 3), transitions(3, lanes, 28)
    for one in (rb, other):
        one.extend(data.to(one.storage.device))
        if one.parts.prioritized is not None:
            one.parts.prioritized.update_priority(index.to(one.storage.device), (index + 0.5).to(one.storage.device))
    assert_alike(rb, other)
    assert step(other, 9, lanes).device in (None, other.storage.device)


@pytest.mark.parametrize(
    ("source", "target", "lanes"), [("cpu", "cuda", 0), ("cpu", "cuda", 3), ("cuda", "cpu", 0), ("cuda", "cuda", 3)]
)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("hindsight", "n-step")])  # one over the other
def test_a_state_goes_on_on_another_device(name, source, target, lanes, tmp_path):
    rb = trained(name, source, lanes)
    others = [trained(name, target, lanes), buffer(name, target, lanes)]
    rb.dumps(tmp_path, sync=False)
    others[0].load_state_dict(rb.state_dict())
    others[1].loads(tmp_path)
    for other in others:
        assert other.storage.device.type == target
        assert_alike(rb, other)
    go_on(rb, others[1], lanes)
    step(others[0], 9, lanes)


@pytest.mark.parametrize("name", ["unique", "highest now", "rank", "n-step over hindsight"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))], ids=["copy", "pickle"])
def test_copies_have_memory_of_their_own_on_the_device(name, copied):
    rb = trained(name, "cuda", 0)
    other = copied(rb)
    assert other.storage.device == rb.storage.device
    assert other.storage.all_rows().matrix.data_ptr() != rb.storage.all_rows().matrix.data_ptr()
    assert_alike(rb, other)
    go_on(rb, other, 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_may_be_written_and_named_from_either_device(device):
    rb, expected = (make("proportional", STEPS, storage=PackedStorage(STEPS, device=at)) for at in (device, "cpu"))
    whole, two, single = transitions(STEPS), transitions(2, first=50), transitions(1, first=60)
    for one, where in ((rb, "cuda"), (expected, "cpu")):
        one.extend(whole.to(where))
        one.storage.set(torch.tensor([3, 5], device=one.storage.device), two.to(where), set_cursor=False)
        one.storage.set([7], single, set_cursor=False)
        one.update_priority([1, 2], [0.5, 1.0])
        one.update_priority(torch.tensor([3]), torch.tensor([2.0], device=where))
    assert_alike(rb, expected)
    mask = torch.arange(STEPS) % 2 == 0
    for index in (3, slice(2, 5), [1, 2], torch.tensor([1, 2]), mask):
        assert torch.equal(rb.storage[index]["number"].cpu(), expected.storage[index]["number"])
    assert torch.equal(rb.storage[mask.to(device)]["number"].cpu(), expected.storage[mask]["number"])


def test_another_storage_brings_the_sampler_to_its_device():
    rb = trained("proportional", "cuda", 0)
    for device in ("cpu", "cuda"):
        rb.set_storage(PackedStorage(STEPS, device=device))
        rb.set_sampler(ProportionalSampler(STEPS))
        rb.extend(transitions(STEPS).to(device))
        step(rb, 9)
