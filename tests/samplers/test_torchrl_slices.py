"""TorchRL's own samplers of slices, and its sequence unit, over our storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrl.data.replay_buffers import (
    RandomSampler,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)

from rlbuf_td import ProportionalSampler, ReplayBuffer, UniformSampler
from tests.model import World

END = ("next", "done")
#: PrioritizedSliceSampler crosses ends in wrapped storages of two dims, TorchRL's own too: the last is not for it.
PLACES = [(ReplayBuffer, 1, 2.4), (ReplayBuffer, 2, 0.6), (TensorDictReplayBuffer, 2, 1.0), (ReplayBuffer, 2, 2.4)]


def world(sampler: Any, cls: Any, ndim: int, fill: float, **kwargs: Any) -> World:
    steps, lanes = (60, 0) if ndim == 1 else (30, 2)
    return World.of(sampler, steps, lanes, fill, buffer=cls, seed=2, batch_size=24, often=(0.05, 0.03, 0.0), **kwargs)


def assert_slices(made: World, batch: Any, length: int) -> None:
    index = batch["index"]
    if isinstance(index, tuple):
        index = torch.stack(index, -1)
    for rows, places in zip(batch.view(-1, length), index.view(-1, length, *index.shape[1:]), strict=True):
        stored = made.rows_at(places)
        assert stored == list(made.model.later(stored[0]))[:length]
        for row, fields in zip(rows, (each.fields for each in stored), strict=True):
            for key in (("observation",), ("action",), ("next", "reward"), ("next", "achieved_goal")):
                assert row[key].tolist() == fields[key]


@pytest.mark.parametrize(("cls", "ndim", "fill"), PLACES)
@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement])
@pytest.mark.parametrize("by", ["end_key", "traj_key"])
def test_slices(by, kind, ndim, fill, cls):
    key = {"end_key": END} if by == "end_key" else {"traj_key": ("collector", "traj_ids")}
    made = world(kind(slice_len=4, strict_length=True, truncated_key=None, **key), cls, ndim, fill)
    for _ in range(6):
        assert_slices(made, made.rb.sample(), 4)


@pytest.mark.parametrize(("cls", "ndim", "fill"), PLACES)
@pytest.mark.parametrize("sampler", [RandomSampler, UniformSampler, lambda: ProportionalSampler(60)])
def test_torchrls_sequence_unit(sampler, ndim, fill, cls):
    """Anchors by any sampler, expanded by TorchRL: never across an end, a lane or the write head."""
    made = world(sampler(), cls, ndim, fill, sample_unit=Sequence(length=4))
    for _ in range(4):
        batch = made.rb.sample()
        assert batch.shape == (96,)
        for rows in batch.view(24, 4):
            stored = made.rows_at(rows["index"])
            real = [row for row, here in zip(stored, rows["validity_mask"].tolist(), strict=True) if here]
            assert real == list(made.model.later(stored[0]))[:4]
            assert rows["observation"].tolist() == [row.fields["observation",] for row in stored]
