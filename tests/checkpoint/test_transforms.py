"""Transforms are the buffer's own: a dump gives them its tensors only on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import Compose, DoubleToFloat, RewardScaling

from rlbuf_td import PackedStorage, ReplayBuffer, ReplayBufferMixture
from rlbuf_td.checkpoint import CheckpointError

ROWS = TensorDict(
    {"observation": torch.zeros(3, 2), "next": {"reward": torch.ones(3, 1)}}, [3]
)


def scaled(*scales: float) -> Any:
    parts = [
        RewardScaling(0.0, scale, in_keys=[("next", "reward")]) for scale in scales
    ]
    return parts[0] if len(parts) == 1 else Compose(*parts)


def buffer(transform: Any = None) -> ReplayBuffer:
    kwargs = {} if transform is None else {"transform": transform}
    return ReplayBuffer(storage=PackedStorage(10), batch_size=2, **kwargs)


def dumped(transform: Any, folder: Path) -> Path:
    rb = buffer(transform)
    rb.extend(ROWS)
    rb.dumps(folder)
    return folder


def reward_of(rb: Any) -> float:
    return rb.sample()["next", "reward"].unique().item()


def to_float() -> Any:
    return DoubleToFloat(in_keys=["observation"])


#: Makers of the saved transform and of the buffer's own, and the reward then.
PAIRS: dict[str, tuple[Any, Any, float]] = {
    "none now": (lambda: scaled(0.1), lambda: None, 1.0),
    "none saved": (lambda: None, lambda: scaled(0.1), 0.1),
    "other numbers": (lambda: scaled(0.1), lambda: scaled(0.5), 0.5),
    "one of two": (lambda: scaled(0.1, 0.1), lambda: scaled(0.5), 0.5),
    "two of one": (lambda: scaled(0.1), lambda: scaled(0.5, 0.5), 0.25),
    "without tensors": (to_float, lambda: scaled(0.5), 0.5),
    "another kind": (lambda: scaled(0.1), to_float, 1.0),
}


@pytest.mark.parametrize("rows_only", [False, True])
@pytest.mark.parametrize(("saved", "own", "reward"), PAIRS.values(), ids=PAIRS)
def test_a_load_keeps_the_buffers_own_transforms(
    saved, own, reward, rows_only, tmp_path
):
    folder = dumped(saved(), tmp_path)
    rb = buffer(own())
    rb.loads(folder, rows_only=rows_only)
    assert len(rb) == 3
    assert reward_of(rb) == pytest.approx(reward)


@pytest.mark.parametrize("rows_only", [False, True])
def test_a_load_gives_transforms_the_saved_tensors_on_request(rows_only, tmp_path):
    folder = dumped(scaled(0.1), tmp_path)
    rb = buffer(scaled(0.5))
    rb.loads(folder, rows_only=rows_only, transforms=True)
    assert reward_of(rb) == pytest.approx(0.1)


def test_a_mixture_loads_the_transforms_of_its_members_on_request(tmp_path):
    def mixture(scale: float) -> ReplayBufferMixture:
        members = {name: buffer(scaled(scale)) for name in ("a", "b")}
        return ReplayBufferMixture(members, {"a": 1, "b": 1}, batch_size=4)

    mixed = mixture(0.1)
    for name in mixed.names:
        mixed.extend(ROWS, name)
    mixed.dumps(tmp_path)
    for transforms, reward in ((False, 0.5), (True, 0.1)):
        other = mixture(0.5)
        other.loads(tmp_path, transforms=transforms)
        assert reward_of(other) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        (lambda: scaled(0.1), lambda: None),
        (lambda: None, lambda: scaled(0.1)),
        (lambda: scaled(0.1), to_float),
        (lambda: scaled(0.1, 0.1), lambda: scaled(0.5)),
    ],
    ids=["none now", "none saved", "another kind", "one of two"],
)
def test_other_transforms_do_not_take_the_saved_tensors(saved, own, tmp_path):
    folder = dumped(saved(), tmp_path)
    rb = buffer(own())
    rb.extend(ROWS[:1])
    said = "the saved transforms have the tensors .*, those of this buffer .*: make it with the same transforms"
    with pytest.raises(CheckpointError, match=said):
        rb.loads(folder, transforms=True)
    filled = buffer(saved())
    filled.extend(ROWS)
    with pytest.raises(ValueError, match=said):
        rb.load_state_dict(filled.state_dict())
    assert len(rb) == 1
    rb.loads(folder)  # the remedy
    assert len(rb) == 3
