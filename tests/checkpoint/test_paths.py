"""Every argument that is a path takes a str and any path-like object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import (
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    ReplayBufferMixture,
    ReservoirWriter,
    RingWriter,
    UniformSampler,
    check,
)


class Like:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def buffer(**kwargs: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=PackedStorage(8, **kwargs), sampler=ProportionalSampler(8), batch_size=2)


def mixture() -> ReplayBufferMixture:
    return ReplayBufferMixture({"only": buffer()}, {"only": 1.0})


PARTS: dict[str, Any] = {
    "buffer": buffer,
    "mixture": mixture,
    "shares": lambda: mixture().sampler,
    "storage": lambda: buffer().storage,
    "sampler": lambda: ProportionalSampler(8),
    "wrapper": lambda: NStepSampler(UniformSampler(), 2, 0.9),
    "ring": RingWriter,
    "reservoir": ReservoirWriter,
}
ROWS = TensorDict({"x": torch.arange(4), "next": {"done": torch.ones(4, 1, dtype=torch.bool)}}, [4])


@pytest.mark.parametrize("path", [str, Path, Like])
@pytest.mark.parametrize("part", PARTS)
def test_parts_are_saved_and_loaded(part: str, path: Any, tmp_path: Path):
    one, other = PARTS[part](), PARTS[part]()
    if part in ("buffer", "storage"):
        (one.extend if part == "buffer" else lambda rows: one.set(range(4), rows))(ROWS)
    one.dumps(path(tmp_path / "dump"))
    other.loads(path(tmp_path / "dump"))
    if part in ("buffer", "storage"):
        assert (other[:] == ROWS).all()


@pytest.mark.parametrize("path", [str, Path, Like])
def test_folders_are_read_and_rows_are_kept_in_one(path: Any, tmp_path: Path):
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    theirs.extend(ROWS)
    theirs.dumps(tmp_path / "theirs")
    rb = ReplayBuffer.from_torchrl(path(tmp_path / "theirs"), scratch_dir=path(tmp_path))
    assert (rb[:] == ROWS).all()
    buffer(scratch_dir=path(tmp_path / "rows"))
    rb.dumps(path(tmp_path / "dump"))
    assert check(path(tmp_path / "dump")) is not None
