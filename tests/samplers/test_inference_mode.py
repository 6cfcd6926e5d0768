"""A buffer may be used in inference mode at first and outside it later: memory made there cannot be written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer
from rlbuf_td.kernels.dispatch import forced
from tests.samplers.test_no_waiting import SAMPLERS, data, loop


def use(rb: ReplayBuffer, first: int) -> None:
    loop(rb, [data(35, first + 35 * k) for k in range(2)], torch.rand(32))


@pytest.mark.parametrize("path", ["numba", "torch"])
@pytest.mark.parametrize("name", ["unique", "proportional", "rank", "hindsight, n steps", "windows"])
def test_what_was_made_in_inference_mode_is_written_to_outside_it(path: Any, name: str) -> None:
    with forced(path):
        rb = ReplayBuffer(storage=PackedStorage(60), sampler=SAMPLERS[name](), batch_size=32, count_replays=True)
        with torch.inference_mode():
            use(rb, 0)
            rb.load_state_dict(rb.state_dict())
        use(rb, 70)
        assert rb.health()["replays_max"] > 0


def test_rows_that_were_written_out_of_order_in_inference_mode_are_known_outside_it() -> None:
    rb = ReplayBuffer(storage=PackedStorage(10), sampler=ProportionalSampler(10), batch_size=8)
    with torch.inference_mode():
        rb.extend(data(10))
        rb.storage.set(torch.tensor([3]), data(1, 10), set_cursor=False)
    batch = rb.sample()
    rb.storage.set(torch.arange(10), data(10, 11), set_cursor=False)
    batch["td_error"] = torch.full((8,), 5.0)
    rb.update_tensordict_priority(batch)
    assert rb.health()["stale_updates"] == 8
