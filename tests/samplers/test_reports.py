"""Entries that a sampler adds to batches never replace an entry that the user stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ReplayBuffer, SchemaError, UniformSampler

SIZE = 12
NAMES = ["mask", "burn_in_mask", "anchor_index", "steps_to_next_obs", "relabeled", "priority_weight", "sampled_at"]


def rows(name: str | None = None, value: Any = None, count: int = SIZE) -> TensorDict:
    done = torch.arange(count).view(-1, 1) % 6 == 5
    place = torch.arange(count * 1.0).view(-1, 1)
    following = {"reward": torch.ones(count, 1), "done": done, "observation": place + 1}
    data = TensorDict({"observation": place, "next": following}, [count])
    if name is not None:
        data[name] = torch.arange(count) + 100 if value is None else value
    return data


def buffer(sampler: Any = None, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=PackedStorage(SIZE), sampler=sampler, batch_size=12, **options)


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_of_another_samplers_report_is_stored(name: str) -> None:
    other = buffer()
    other.extend(rows(name))
    batch = other.sample()
    assert torch.equal(batch[name], batch["observation"][:, 0].long() + 100)


class OwnSampler(UniformSampler):
    def draw(self, storage: Any, batch_size: int) -> Any:
        flat, info = super().draw(storage, batch_size)
        return flat, info | {"chosen_by": torch.zeros(batch_size)}


def test_a_sampler_of_ones_own_is_refused_at_the_first_draw() -> None:
    rb = buffer(OwnSampler())
    rb.extend(rows("chosen_by"))
    with pytest.raises(SchemaError, match="have an entry 'chosen_by', and a OwnSampler adds"):
        rb.sample()


class ChangesFlags(UniformSampler):  # as TorchRL's SliceSampler does
    def draw(self, storage: Any, batch_size: int) -> Any:
        flat, info = super().draw(storage, batch_size)
        return flat, info | {("next", "done"): torch.ones(batch_size, 1, dtype=torch.bool)}


def test_batches_without_the_report_keep_what_the_rows_have() -> None:
    rb = buffer(ChangesFlags(), include_info=False)
    rb.extend(rows())
    batch = rb.sample()
    assert batch["next", "done"].all()
    assert set(batch.keys()) == {"observation", "next"}
