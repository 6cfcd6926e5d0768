"""A part of a stratified batch is a sample, too: a minibatch of it, or a worker's share."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer
from tests.statistics import assert_follows, power

ROWS, BATCH, BATCHES = 40, 64, 20_000


def filled(sampler: type[ProportionalSampler] | type[RankSampler]) -> ReplayBuffer:
    rb = ReplayBuffer(storage=PackedStorage(ROWS), sampler=sampler(ROWS), batch_size=BATCH)
    rb.extend(TensorDict({"x": torch.arange(ROWS)}, [ROWS]))
    rb.update_priority(torch.arange(ROWS), torch.linspace(0.2, 3.0, ROWS))
    return rb


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_every_part_of_a_stratified_batch_follows_the_law(sampler):
    rb = filled(sampler)
    probability = rb.sampler.probability(torch.arange(ROWS))
    drawn = torch.stack([rb.sampler.draw(rb.storage, BATCH)[0] for _ in range(BATCHES)])
    assert power(probability.numpy(), BATCHES * 16, bias=0.02) > 0.95
    for part in drawn.split(16, 1):
        assert_follows(part.flatten().bincount(minlength=ROWS), probability)
    for place in (0, 1, 31, BATCH - 1):
        assert_follows(drawn[:, place].bincount(minlength=ROWS), probability)


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_minibatches_of_a_batch_see_the_whole_buffer(sampler):
    batch = filled(sampler).sample()
    for minibatch in batch.split(BATCH // 4):
        assert minibatch["x"].max() - minibatch["x"].min() > ROWS // 2
