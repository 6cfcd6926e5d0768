"""Windows across episodes: consecutive steps of a lane, against a list per lane."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td import (
    FreshRowsSampler,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from tests.catalogue import assert_same
from tests.statistics import assert_follows

STEPS = 20
FORMS = {"[T]": [50], "[T], not full": [11], "[T, E]": [33, 33], "lanes of unlike lengths": [7, 61, 20]}


class World:
    """A buffer whose row ``k`` of lane ``e`` has the number ``100 * e + k``, and the first stored row of each lane."""

    def __init__(self, written: list[int], sampler: Any, cls: Any = ReplayBuffer, has_init: bool = False) -> None:
        lanes, generator = len(written), torch.Generator().manual_seed(0)
        place: dict[str, Any] = {"ndim": 2, "lanes": lanes} if lanes > 1 else {"ndim": 1}
        self.rb = cls(storage=PackedStorage(STEPS * lanes, **place), sampler=sampler, generator=generator)
        self.done = [torch.rand(count, generator=generator) < 0.3 for count in written]
        self.first = [max(0, count - STEPS) for count in written]
        self.written = written
        ours = self.rb if isinstance(self.rb, ReplayBuffer) else ReplayBuffer(storage=self.rb.storage)
        for lane, count in enumerate(written):
            data = self.rows(lane, count)
            data = data.set("is_init", torch.zeros(count, 1, dtype=torch.bool)) if has_init else data
            ours.extend(data) if lanes == 1 else ours.extend(data, lanes=lane)

    def rows(self, lane: int, count: int) -> TensorDict:
        after = {"reward": torch.ones(count, 1), "done": self.done[lane][:, None].clone()}
        return TensorDict({"number": 100 * lane + torch.arange(count), "next": after}, [count])

    def begins(self, lane: int, number: int) -> bool:
        return number == self.first[lane] or bool(self.done[lane][number - 1])

    def check(self, batch: TensorDict, length: int, burn_in: int, boundary: str) -> None:
        """Check windows, ``[B, L]``: their rows, and what marks them."""
        lanes = len(self.written)
        for window in batch:
            anchor = window["anchor_index"][0].tolist()
            lane = anchor[1] if lanes > 1 else 0
            step = anchor[0] if lanes > 1 else anchor
            first, past = self.first[lane], self.written[lane]
            at = next(k for k in range(first, past) if k % STEPS == step)
            begin = at - burn_in
            if boundary == "shift":
                begin -= min(max(0, at + length - past), at - first)
            wanted = [*range(begin, begin + burn_in + length)]
            real = [first <= k < past for k in wanted]
            assert boundary != "strict" or all(real)
            numbers = [min(max(k, first), past - 1) for k in wanted]
            assert window["number"].tolist() == [100 * lane + k for k in numbers]
            assert window["mask"].tolist() == real
            assert window["burn_in_mask"].tolist() == [j < burn_in for j in range(burn_in + length)]
            init = [
                j == 0 or (is_real and (not real[j - 1] or self.begins(lane, k)))
                for j, (k, is_real) in enumerate(zip(wanted, real, strict=True))
            ]
            assert window["is_init"].flatten().tolist() == init


@pytest.mark.usefixtures("boundaries")
@pytest.mark.parametrize("has_init", [False, True])
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize(("boundary", "burn_in"), [("pad", 0), ("pad", 3), ("shift", 2), ("strict", 0), ("strict", 2)])
@pytest.mark.parametrize("form", FORMS)
def test_windows_are_consecutive_steps_of_a_lane(form: str, boundary: Any, burn_in: int, cls: Any, has_init: bool):
    length = 4
    for inner in (UniformSampler(), NStepSampler(ProportionalSampler(60), 3, 0.9)):
        options: Any = {"burn_in": burn_in, "boundary": boundary, "across_episodes": True}
        world = World(FORMS[form], SequenceSampler(inner, length, output_layout="batch_time", **options), cls, has_init)
        for _ in range(2):
            batch = world.rb.sample(40 * (burn_in + length))
            world.check(batch, length, burn_in, boundary)
        if isinstance(inner, NStepSampler):  # sums end with the episode
            last = batch["number"] % 100
            steps = batch["steps_to_next_obs"].flatten()[:20].tolist()
            for number, count in zip(batch["number"].flatten()[:20].tolist(), steps, strict=True):
                lane, k = divmod(number, 100)
                done = world.done[lane]
                wanted = next((m + 1 for m in range(3) if k + m == world.written[lane] - 1 or done[k + m]), 3)
                assert count == wanted, last


@pytest.mark.parametrize("form", FORMS)
def test_compiled_code_gives_what_torch_gives(form: str):
    def draw(sampler_cls: Any) -> list[TensorDict]:
        sampler = sampler_cls(FreshRowsSampler(UniformSampler(), 2), 3, boundary="strict", across_episodes=True)
        world = World(FORMS[form], sampler)
        batches = [world.rb.sample(30) for _ in range(4)]
        assert ("sample" in world.rb.compiled.split(";")[0]) == (sampler_cls is SequenceSampler)
        return batches

    class WithTorch(SequenceSampler):
        def _windows(self, *given: Any) -> Any:
            return super()._windows(*given)

    for mine, right in zip(draw(SequenceSampler), draw(WithTorch), strict=True):
        assert_same(mine, right)


@pytest.mark.parametrize("form", FORMS)
def test_strict_anchors_are_uniform_among_those_that_fit(form: str):
    world = World(FORMS[form], SequenceSampler(UniformSampler(), 4, burn_in=1, boundary="strict", across_episodes=True))
    anchors = torch.cat([world.rb.sample(20_000)["number"][1::5] for _ in range(4)])
    fits = [
        100 * lane + k
        for lane, (first, past) in enumerate(zip(world.first, world.written, strict=True))
        for k in range(first + 1, past - 3)
    ]
    assert_follows(
        torch.bincount(anchors, minlength=300)[fits], torch.full((len(fits),), 1 / len(fits), dtype=torch.float64)
    )


@pytest.mark.parametrize("form", FORMS)
def test_an_epoch_has_each_row_once(form: str):
    sampler = SequenceSampler(MinibatchSampler(), 4, burn_in=2, stride=4, across_episodes=True)
    world = World(FORMS[form], sampler)
    world.rb._batch_size = 12
    batch = torch.cat([*world.rb])
    learned = batch["number"][batch["mask"] & ~batch["burn_in_mask"]].sort().values
    stored = [100 * e + k for e, (a, b) in enumerate(zip(world.first, world.written, strict=True)) for k in range(a, b)]
    assert learned.tolist() == stored
