"""Each part takes every keyword of the part of TorchRL that it replaces; a new release of TorchRL may add some."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import (
    HERReplayBuffer,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from rlbuf_td import (
    HindsightSampler,
    MinibatchSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    RingWriter,
    SequenceSampler,
    UniformSampler,
)

#: A part, TorchRL's, and the keywords that have another name here, or (in words) none; the class's docstring says why.
REPLACED: list[tuple[type, type, dict[str, str]]] = [
    (UniformSampler, RandomSampler, {}),
    (MinibatchSampler, SamplerWithoutReplacement, {}),
    (ProportionalSampler, PrioritizedSampler, {}),
    (RingWriter, RoundRobinWriter, {}),
    (RingWriter, TensorDictRoundRobinWriter, {}),
    (HindsightSampler, HERReplayBuffer, {"end_key": "done_key"}),
    (
        SequenceSampler,
        SliceSampler,
        {
            "slice_len": "length",
            "num_slices": "batch_size over length",
            "end_key": "done_key",
            "end_keys": "one key says it",
            "strict_length": "boundary",
            "pad_output": "boundary",
            "span": "boundary",
            "truncated_key": "lies beside done_key",
            "step_key": "is not read",
            "fragmented": "is not needed",
            "ends": "come from the storage",
            "trajectories": "come from the storage",
            "cache_values": "is not needed",
            "compile": "is not needed",
            "use_gpu": "is where the rows are",
        },
    ),
]


def keywords(cls: type) -> list[str]:
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    return [parameter.name for parameter in parameters if parameter.kind not in kinds]


@pytest.mark.parametrize(("ours", "theirs", "renamed"), REPLACED, ids=lambda x: getattr(x, "__name__", ""))
def test_a_part_takes_the_keywords_of_the_part_that_it_replaces(ours, theirs, renamed):
    mine, known = keywords(ours), keywords(theirs)
    assert set(renamed) <= set(known)  # TorchRL still has them
    for keyword in known:
        assert keyword in mine or keyword in renamed, f"{ours.__name__} does not know {theirs.__name__}({keyword}=)"
    for keyword, name in renamed.items():
        assert name in mine or f"``{keyword}``" in ours.__doc__, keyword


def test_the_defaults_are_torchrls_and_positions_too():
    parameters = inspect.signature(ProportionalSampler).parameters
    theirs = inspect.signature(PrioritizedSampler.__init__).parameters
    assert list(parameters)[: len(theirs) - 1] == list(theirs)[1:]
    for name in ("eps", "reduction", "max_priority_within_buffer", "device"):
        assert parameters[name].default == theirs[name].default


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_replacement_false_makes_a_sampler_of_epochs(cls: Any) -> None:
    assert type(UniformSampler(replacement=True)) is UniformSampler
    make: Any = UniformSampler
    sampler = make(replacement=False, drop_last=True, shuffle=False)
    assert (type(sampler), sampler.drop_last, sampler.shuffle) == (MinibatchSampler, True, False)
    rb = cls(storage=PackedStorage(11), sampler=UniformSampler(replacement=False), batch_size=3)
    rb.extend(TensorDict({"a": torch.arange(11)}, [11]))
    assert sorted(x for _ in range(4) for x in rb.sample()["a"].tolist()) == list(range(11))


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
def test_a_max_capacity_below_the_storages_grows(cls: Any, storage: Any) -> None:
    rb = cls(storage=storage(10), sampler=ProportionalSampler(5, alpha=1.0), batch_size=4)
    rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
    rb.update_priority(torch.arange(4), torch.arange(1.0, 5.0))
    rb.extend(TensorDict({"x": torch.arange(6)}, [6]))
    assert rb.sampler.priority(torch.arange(10)).tolist() == [1, 2, 3, *[4.0] * 7]
    assert rb.sampler.max_size == 10
    small = ProportionalSampler(3)  # priorities that it has go with it
    small.update_priority(torch.arange(3), torch.arange(1.0, 4.0))
    small.mark_update(torch.tensor([7]), storage=rb.storage)
    assert small.priority(torch.arange(8)).tolist() == [1, 2, 3, -1, -1, -1, -1, 3]
