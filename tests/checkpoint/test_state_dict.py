"""A state that a buffer cannot take in is refused in words, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer
from torchrl.envs.transforms import ObservationNorm

from rlbuf_td import PackedStorage, ReplayBuffer, RolloutBuffer
from tests.checkpoint.worlds import make, step, transitions


def observation_norm() -> ObservationNorm:
    return ObservationNorm(1.0, 2.0, in_keys=["observation"])


def torchrls(sampler: Any = None) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=8)
    rb.extend(transitions(9))
    return rb


@pytest.mark.parametrize("kind", ["rank", "uniform", "sequence", "transform", "rows", "capacity", "other"])
def test_a_state_that_does_not_fit_changes_nothing(kind):
    foreign: Any
    if kind == "rows":
        foreign = make("proportional")
        foreign.extend(transitions(3).exclude("observation"))
    elif kind == "capacity":
        foreign = make("proportional", steps=40)
        foreign.extend(transitions(40))
    elif kind == "other":
        foreign = torchrls(PrioritizedSampler(20, 0.6, 0.4))
    else:
        foreign = make("proportional" if kind == "transform" else kind)
    if not len(foreign):
        step(foreign, 0)
    rb = make("proportional", transform=observation_norm() if kind == "transform" else None)
    for number in range(3):
        step(rb, number)
    every = torch.arange(len(rb))
    rows, priority, count, alpha = rb[:].clone(), rb.sampler.priority(every), rb.write_count, rb.sampler.alpha
    with pytest.raises((ValueError, RuntimeError)):
        rb.load_state_dict(foreign.state_dict())
    assert (rb[:] == rows).all()
    assert torch.equal(rb.sampler.priority(every), priority)
    assert (rb.write_count, rb.sampler.alpha) == (count, alpha)
    step(rb, 4)


def test_the_state_of_another_kind_of_part_is_named():
    rb = make("uniform")
    rb.extend(transitions(5))
    with pytest.raises(ValueError, match="not the state of a PackedStorage"):
        rb.load_state_dict(torchrls().state_dict())
    assert len(rb) == 5
    with pytest.raises(ValueError, match="not that of a ProportionalSampler"):
        make("proportional").load_state_dict(make("uniform").state_dict())
    rollout = RolloutBuffer(4)
    with pytest.raises(ValueError, match="not that of a RolloutWriter"):
        rollout.load_state_dict(ReplayBuffer(storage=PackedStorage(4), sampler=rollout.sampler).state_dict())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("share_next", [False, ["x"]])
@pytest.mark.parametrize("into", [False, True])
def test_the_state_of_an_emptied_buffer_is_loaded(shared, share_next, into):
    """``into``: into a buffer whose rows are deduplicated the other way."""
    seen = torch.arange(5.0)[:, None].expand(5, 3)
    rows = TensorDict({"x": seen[:4], "next": {"x": seen[1:]}}, [4])
    kinds = share_next, ["x"] if into and not share_next else False if into else share_next
    emptied, rb = (ReplayBuffer(storage=PackedStorage(8, share_next=k, shared=shared), batch_size=4) for k in kinds)
    for each in (emptied, rb):
        each.extend(rows)
        each.extend(rows)
    emptied.empty()
    rb.load_state_dict(emptied.state_dict())
    assert (len(rb), rb.write_count) == (0, 0)
    rb.extend(rows)
    assert torch.equal(rb[:]["x"], rows["x"])
