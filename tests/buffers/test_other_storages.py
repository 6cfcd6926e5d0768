"""Over another storage than PackedStorage, a ReplayBuffer is TorchRL's buffer: equal seeds give equal results."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import (
    CompressedListStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.envs import RewardScaling

from rlbuf_td import (
    MinibatchSampler,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    RingWriter,
    UniformSampler,
)

CAPACITY, LANES = 24, 3
STORAGES: dict[str, Any] = {
    "lazy": partial(LazyTensorStorage, CAPACITY),
    "lanes": partial(LazyTensorStorage, CAPACITY, ndim=2),
    "list": partial(ListStorage, CAPACITY),
    "compressed": partial(CompressedListStorage, CAPACITY),
}
PARTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "transforms": {"transform": lambda: RewardScaling(1.0, 2.0, in_keys=[("next", "reward")])},
    "without replacement": {"sampler": SamplerWithoutReplacement},
    "our ring": {"writer": RingWriter},
    "slices": {"sampler": lambda: SliceSampler(slice_len=2, end_key=("next", "done"), strict_length=False)},
    "our uniform": {"sampler": UniformSampler},
    "our proportional": {"sampler": lambda: ProportionalSampler(CAPACITY, 1.0)},
    "our ranks": {"sampler": lambda: RankSampler(CAPACITY)},
    "our recency": {"sampler": lambda: RecencySampler(half_life=2.0)},
    "our epochs": {"sampler": MinibatchSampler},
}


def rows(start: int, count: int, lanes: int = 0) -> TensorDictBase:
    k = torch.arange(start, start + count)
    k = k[None] * 10 + torch.arange(lanes)[:, None] if lanes else k
    after = {"reward": k.double()[..., None], "done": (k % 5 == 4)[..., None]}
    return TensorDict({"k": k, "rank": (k * 7 % 11).float(), "next": after}, k.shape)


def plain(value: Any) -> Any:
    if isinstance(value, TensorDictBase):
        value = value.to_dict()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in sorted(value.items(), key=str)}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def run(cls: Any, storage: Any, parts: dict[str, Any], folder: Path) -> Any:
    """Write, draw, update, edit, save, load and empty; yield all that a user sees."""
    made = {name: part() if callable(part) else part for name, part in parts.items()}
    rb, generator = cls(storage=storage(), batch_size=4, **made), torch.Generator().manual_seed(3)
    rb.set_rng(generator)
    lanes = LANES if rb.storage.ndim > 1 else 0
    for k in range(4):
        yield rb.extend(rows(9 * k, 3 if lanes else 9, lanes))
        batch, info = rb.sample(return_info=True)
        yield batch, info["index"]
        rb.update_tensordict_priority(batch.set("td_error", batch["k"] % 7 + 1.0))
        yield rb.sample(6), len(rb), rb.write_count, rb.stats(), rb.can_sample(6)
    if not lanes:  # where TorchRL's buffer fails
        yield rb.add(rows(50, 1)[0].clone()), rb.sample()
    if "List" not in type(rb.storage).__name__:
        rb["rank"] = torch.zeros_like(rb["rank"])
        rb.set_at_("rank", torch.tensor(7.0), 2)
        yield rb[:], rb.storage.get(torch.arange(3))
    saved, shown = rb.state_dict(), repr(rb)
    rb.extend(rows(0, 2, lanes))
    rb.load_state_dict(saved)
    yield shown.replace(type(rb).__name__, ""), len(rb), rb.sample()
    if isinstance(rb.storage, LazyTensorStorage):
        rb.dumps(folder / type(rb).__name__)
        rb.loads(folder / type(rb).__name__)
        yield rb.sample(), [*map(len, [each for _, each in zip(range(2), rb, strict=False)])]
    rb.empty()
    yield len(rb), rb.write_count, rb.extend(rows(0, 4, lanes))


@pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes")  # which TorchRL's buffer says
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("storage", STORAGES)
def test_each_call_gives_what_torchrls_buffer_gives(storage: str, parts: str, tmp_path: Path):
    if storage != "lazy" and parts in ("slices", "transforms"):
        pytest.skip("TorchRL's part takes tensors [T] only")
    theirs, ours = (
        run(cls, STORAGES[storage], PARTS[parts], tmp_path) for cls in (TensorDictReplayBuffer, ReplayBuffer)
    )
    for expected, got in zip(theirs, ours, strict=True):
        assert plain(got) == plain(expected)


@pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes")
def test_priorities_are_those_of_torchrls_prioritized_buffer(tmp_path: Path):
    theirs = run(partial(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5), STORAGES["lazy"], {}, tmp_path)
    ours = run(ReplayBuffer, STORAGES["lazy"], {"sampler": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5)}, tmp_path)
    for expected, got in zip(theirs, ours, strict=True):
        assert plain(got) == plain(expected)


def test_batches_are_drawn_ahead_by_torchrl():
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4, prefetch=2)
    rb.extend(rows(0, 9))
    assert all({*rb.sample()["k"].tolist()} <= {*range(9)} for _ in range(5))


def test_a_copy_goes_on():
    generator = torch.Generator().manual_seed(0)
    rb = ReplayBuffer(storage=STORAGES["lazy"], batch_size=4, generator=generator, delayed_init=True)
    rb.extend(rows(0, 9))
    copy = pickle.loads(pickle.dumps(rb))
    assert plain(copy.sample()) == plain(rb.sample())
    assert type(rb.share().storage) is LazyTensorStorage
