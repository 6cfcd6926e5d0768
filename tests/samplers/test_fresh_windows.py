"""Fresh windows, the online queue of DreamerV3: each step once, in order, in windows that do not overlap."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    FreshRowsSampler,
    HindsightSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)

LENGTH, WINDOWS, STEPS = 4, 3, 40


def buffer(inner: Any, lanes: int, across: bool) -> ReplayBuffer:
    sampler = SequenceSampler(FreshRowsSampler(inner, fresh="windows"), LENGTH, across_episodes=across)
    storage = PackedStorage(STEPS * lanes, ndim=2, lanes=lanes)
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=WINDOWS * LENGTH)


def fresh_windows(steps: list[list[tuple[int, bool]]], across: bool) -> list[list[int]]:
    """Take the fresh windows of a batch from the waiting steps of each lane, (number, done): one per lane and turn."""
    found: list[list[int]] = []
    while len(found) < WINDOWS:
        before = len(found)
        for waiting in steps:
            end = next((k + 1 for k, (_, done) in enumerate(waiting) if done and not across), STEPS)
            length = min(end, LENGTH)
            if len(found) < WINDOWS and length <= len(waiting):
                found.append([number for number, _ in waiting[:length]])
                del waiting[:length]
        if len(found) == before:
            break
    return found


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("kind", ["uniform", "proportional"])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("alone", [False, True])
def test_each_step_comes_once_in_windows_that_do_not_overlap(alone: bool, lanes: int, kind: str, across: bool) -> None:
    seen = 0
    for seed in range(6):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        rb = buffer(UniformSampler() if kind == "uniform" else ProportionalSampler(STEPS * lanes), lanes, across)
        waiting: list[list[tuple[int, bool]]] = [[] for _ in range(lanes)]
        count = [0] * lanes
        for _ in range(40):
            for lane in rng.choices(range(lanes), k=rng.choice([0, 1, 5])) if alone else []:
                write(rb, waiting, count, [lane], rng)
            if not alone:
                for _ in range(rng.choice([1, 2, 7])):
                    write(rb, waiting, count, [*range(lanes)], rng)
            for lane, rows in enumerate(waiting):
                waiting[lane] = [row for row in rows if row[0] >= count[lane] - STEPS]
            if not len(rb):
                continue
            batch = rb.sample().view(WINDOWS, LENGTH)
            numbers = [window["number"][window["mask"]].tolist() for window in batch]
            expected = fresh_windows(waiting, across)
            assert numbers[: len(expected)] == expected
            seen += sum(map(len, expected))
        assert seen > 20 * (seed + 1)


def write(rb: ReplayBuffer, waiting: Any, count: list[int], lanes: list[int], rng: random.Random) -> None:
    number = torch.tensor([count[lane] for lane in lanes])
    done = torch.tensor([rng.random() < 0.15 for _ in lanes])
    for lane, over in zip(lanes, done.tolist(), strict=True):
        waiting[lane].append((count[lane], over))
        count[lane] += 1
    data = TensorDict({"number": number, "next": {"done": done}}, [len(lanes)])
    rb.extend(data, lanes=torch.tensor(lanes))


def test_what_has_no_windows_that_do_not_overlap_is_refused() -> None:
    for wrong in ({"boundary": "shift"}, {"boundary": "strict"}, {"burn_in": 1}):
        with pytest.raises(
            ValueError, match='fresh="windows" needs boundary="pad" and neither burn_in nor stride, got'
        ):
            SequenceSampler(FreshRowsSampler(UniformSampler(), fresh="windows"), 4, **wrong)
    alone = FreshRowsSampler(UniformSampler(), fresh="windows")
    rb = ReplayBuffer(storage=PackedStorage(9), sampler=HindsightSampler(alone, lambda batch: batch["x"]), batch_size=2)
    rb.extend(TensorDict({"x": torch.zeros(3)}, [3]))
    with pytest.raises(ValueError, match="hands out windows of a SequenceSampler: use SequenceSampler"):
        alone.sample(rb.storage, 2)
    with pytest.raises(ValueError, match="fresh must be"):
        FreshRowsSampler(UniformSampler(), fresh="rows")  # type: ignore[arg-type]
