"""Rows that TorchRL's list storages keep: ragged, or compressed. Samplers that need only a count of rows draw them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import CompressedListStorage, ListStorage, TensorDictReplayBuffer

from rlbuf_td import (
    EpisodeSampler,
    FreshRowsSampler,
    HindsightSampler,
    NStepSampler,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)

SAMPLERS: dict[str, Any] = {
    "uniform": UniformSampler,
    "prioritized": lambda: ProportionalSampler(60, 1.0, eps=0.0),
    "rank": lambda: RankSampler(60),
    "recency": lambda: RecencySampler(window=10),
}
STORAGES: dict[str, Any] = {
    "ragged": (lambda: ListStorage(60), lambda rows: lazy_stack([*rows])),
    "compressed": (lambda: CompressedListStorage(60), None),
}


def row(k: int, is_ragged: bool) -> TensorDictBase:
    nodes = torch.full((2 + (k % 5 if is_ragged else 0), 3), float(k))
    after = {"nodes": nodes + 1, "reward": torch.ones(1), "done": torch.tensor([k % 10 == 9])}
    return TensorDict({"k": torch.tensor(k), "nodes": nodes, "next": after})


def buffer(kind: str, sampler: Any, cls: Any = ReplayBuffer) -> Any:
    storage, collate = STORAGES[kind]
    rb = cls(storage=storage(), sampler=sampler, batch_size=16, **({} if collate is None else {"collate_fn": collate}))
    for k in range(50):
        rb.add(row(k, kind == "ragged"))
    return rb


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_rows_are_drawn_and_get_priorities(name: str, kind: str, cls: Any):
    rb = buffer(kind, SAMPLERS[name](), cls)
    seen = set()
    for _ in range(20):
        batch = rb.sample()
        seen |= {*batch["k"].tolist()}
        assert torch.equal(batch["index"].flatten(), batch["k"])
        for each in batch.unbind(0):
            assert (each["nodes"] == each["k"]).all()
    assert seen <= {*range(40 if name == "recency" else 0, 50)}
    assert len(seen) == {"recency": 10, "rank": len(seen)}.get(name, 50)
    if name in ("prioritized", "rank"):
        batch.set("td_error", batch["k"] - 60.0)
        rb.update_tensordict_priority(batch)
        assert torch.equal(rb.sampler.priority(batch["k"]), 60.0 - batch["k"].double())


WRAPPERS: dict[str, Any] = {
    "NStepSampler": lambda: NStepSampler(UniformSampler(), 3, 1.0),
    "SequenceSampler": lambda: SequenceSampler(UniformSampler(), 4),
    "HindsightSampler": lambda: HindsightSampler(UniformSampler(), lambda batch: batch["next", "reward"]),
    "FreshRowsSampler": lambda: FreshRowsSampler(UniformSampler()),
    "EpisodeSampler": lambda: EpisodeSampler(UniformSampler(), 1),
}


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("name", WRAPPERS)
def test_samplers_that_look_up_episodes_refuse_them_by_name(name: str, kind: str, cls: Any):
    storage = type(STORAGES[kind][0]()).__name__
    with pytest.raises(TypeError, match=rf"{name} looks up .* which a {storage} does not keep: use a PackedStorage"):
        buffer(kind, WRAPPERS[name](), cls).sample()
