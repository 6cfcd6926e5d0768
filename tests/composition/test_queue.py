"""A queue within every wrapper: each row is an anchor once, in the order in which it was written."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    QueueSampler,
    QueueWriter,
    ReplayBuffer,
    SequenceSampler,
)

STEPS = 24


def episodes() -> TensorDict:
    step = torch.arange(STEPS, dtype=torch.float32)
    done = (torch.arange(STEPS) % 6 == 5).unsqueeze(-1)
    outcome = {"observation": step + 1, "achieved_goal": step.unsqueeze(-1) + 1, "reward": step.unsqueeze(-1)}
    outcome |= {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    goal = torch.full((STEPS, 1), -1.0)
    return TensorDict({"observation": step, "desired_goal": goal, "next": outcome}, [STEPS])


def reached(batch):
    return (batch["next", "achieved_goal"] == batch["desired_goal"]).float()


WRAPPERS = {
    "hindsight": lambda sampler: HindsightSampler(sampler, reached, her_ratio=1.0, strategy="final"),
    "n-step": lambda sampler: NStepSampler(sampler, 3, 1.0),
    "sequence": lambda sampler: SequenceSampler(sampler, 2),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_queue_gives_each_row_once_in_order(name):
    writer, size = QueueWriter(), 4
    sampler = WRAPPERS[name](QueueSampler(writer))
    rows = size * 2 if name == "sequence" else size
    rb = ReplayBuffer(storage=PackedStorage(STEPS), sampler=sampler, writer=writer, batch_size=rows)
    rb.extend(episodes())
    key = "anchor_index" if name == "sequence" else "index"
    batches = [rb.sample() for _ in range(STEPS // size)]
    drawn = torch.cat([batch[key] for batch in batches])
    assert drawn[:: rows // size].tolist() == [*range(STEPS)]
    last = (drawn // 6 + 1) * 6  # where the episode of each anchor ends
    found = torch.cat(batches)
    if name == "hindsight":
        assert torch.equal(found["desired_goal"].squeeze(-1), last.float())
    elif name == "n-step":
        wanted = [sum(range(row, min(row + 3, int(end)))) for row, end in zip(drawn.tolist(), last, strict=True)]
        assert found["next", "reward"].flatten().tolist() == wanted
    else:
        following = torch.minimum(drawn[::2] + 1, last[::2] - 1)
        assert torch.equal(found["observation"][1::2].long(), following)
