"""Nothing that a training loop calls waits for the device."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
    functional,
)
from tests.waiting import waiting_is_an_error

ROWS, BATCH = 2_000, 64
CUDA = torch.device("cuda")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SAMPLERS = {
    "uniform": lambda: UniformSampler(),
    "proportional": lambda: ProportionalSampler(ROWS),
    "rank": lambda: RankSampler(ROWS),
    "n-step": lambda: NStepSampler(ProportionalSampler(ROWS), 3, 0.99),
    "sequence": lambda: SequenceSampler(ProportionalSampler(ROWS), 3, burn_in=1),
    "hindsight": lambda: HindsightSampler(ProportionalSampler(ROWS), lambda batch: batch["desired_goal"][:, 0]),
}


def transitions() -> TensorDict:
    """Return rows with goals, in trajectories of ten."""
    x = torch.arange(float(ROWS)).unsqueeze(-1)
    following = {"reward": x, "done": x % 10 == 9, "achieved_goal": x}
    return TensorDict({"x": x, "desired_goal": -x, "td_error": torch.rand(ROWS), "next": following}, [ROWS]).to(CUDA)


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_writing_sampling_and_updating_do_not_wait(name, offload):
    storage = PackedStorage(ROWS, device=CUDA, offload=offload)
    rb = ReplayBuffer(storage=storage, sampler=SAMPLERS[name](), batch_size=BATCH)
    data, td_error = transitions(), torch.rand(BATCH, device=CUDA)
    one = data[0]

    def loop() -> None:
        rb.extend(data[:256])
        rb.add(one)
        batch = rb.sample()
        batch["td_error"] = td_error
        rb.update_tensordict_priority(batch)
        if hasattr(rb.sampler, "alpha"):
            rb.sampler.alpha *= 0.9  # as a schedule does

    loop()
    loop()
    with waiting_is_an_error(CUDA):
        loop()


def test_advantages_do_not_wait():
    values = [torch.randn(8, 128, 1, device=CUDA) for _ in range(3)]
    flags = [torch.zeros(8, 128, 1, dtype=torch.bool, device=CUDA)] * 2
    functional.generalized_advantage_estimate(0.99, 0.95, *values, *flags)
    with waiting_is_an_error(CUDA):
        functional.generalized_advantage_estimate(0.99, 0.95, *values, *flags)
