"""TorchRL's RayReplayBuffer with the parts of this package, on a Ray of this machine."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import RayReplayBuffer

from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer, RingWriter

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict({"x": number, "next": {"reward": number[:, None].float()}}, [count])


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_sampling_and_priorities_make_the_round_trip(sampler, cluster):
    rb = RayReplayBuffer(
        replay_buffer_cls=ReplayBuffer,
        storage=partial(PackedStorage, 50),
        sampler=partial(sampler, 50, alpha=1.0),
        writer=RingWriter,
        batch_size=16,
        remote_config={"num_cpus": 0},
    )
    try:
        index = rb.extend(rows(0, 50))
        assert (len(rb), rb.write_count, index.tolist()) == (50, 50, list(range(50)))
        batch = rb.sample()
        assert torch.equal(batch["x"], batch["index"])
        assert torch.equal(batch["next", "reward"][:, 0], batch["x"].float())
        assert (batch["priority_weight"] == 1).all() == (sampler is ProportionalSampler)
        rb.update_priority(index, torch.zeros(50))
        batch["td_error"] = torch.full((16,), 1000.0)
        rb.update_tensordict_priority(batch)
        again = rb.sample()
        if sampler is ProportionalSampler:  # rows with an error of 0 are drawn with probability 1e-9
            assert set(again["index"].tolist()) <= set(batch["index"].tolist())
        rb.extend(rows(100, 50))
        again["td_error"] = torch.full((16,), 5.0)
        rb.update_tensordict_priority(again)
        assert ray.get(rb._rb.health.remote())["stale_updates"] == 16
        assert set(rb.sample()["x"].tolist()) <= set(range(100, 150))
        with pytest.raises(ValueError, match="expected int64 of shape"):
            rb.extend(TensorDict({"x": torch.zeros(3), "next": {"reward": torch.zeros(3, 1)}}, [3]))
    finally:
        rb.close()
