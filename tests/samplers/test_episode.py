"""Whole episodes, against brute force over whole histories."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td import (
    EpisodeSampler,
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ReplayBuffer,
    RingWriter,
    SequenceSampler,
    UniformSampler,
)
from tests.model import DONE, INIT, REWARD, Model, World, reward_fn
from tests.statistics import assert_follows, power

BUFFERS: dict[str, Any] = {
    "ours": (ReplayBuffer, PackedStorage, RingWriter),
    "TorchRL's": (TensorDictReplayBuffer, PackedStorage, RingWriter),
}
GAMMA = 0.9
Cell = tuple[int, int]  # slot and lane


def episodes(world: World, finished_only: bool = True) -> dict[Cell, list[Cell]]:
    """Return the rows of each stored episode whose first row is stored, by its first
    row."""
    found = (
        [*map(world.model.cell, whole)]
        for whole in world.model.whole(only_finished=finished_only)
    )
    return {whole[0]: whole for whole in found}


def pieces(batch, padded: bool) -> list[Any]:
    """Return the rows of each episode of a batch, without padding; check the mask and
    the numbers of the episodes."""
    if padded:
        count, longest = batch.shape
        assert (batch["episode"] == torch.arange(count)[:, None]).all()
        assert (
            batch["mask"]
            == (torch.arange(longest) < batch["mask"].sum(1, keepdim=True))
        ).all()
        for piece in batch:
            last = int(piece["mask"].sum()) - 1
            for key in piece.exclude("mask", "reward_to_go", "is_init").keys(
                True, True
            ):
                # padding copies the last row
                assert (piece[key][last:] == piece[key][last]).all(), key
        return [piece[piece["mask"]] for piece in batch]
    assert batch["mask"].all()
    return [
        batch[batch["episode"] == k] for k in range(int(batch["episode"].max()) + 1)
    ]


def assert_pieces(world: World, batch, sampler: EpisodeSampler) -> list[Cell]:
    """Compare a batch with brute force; return the first row of each episode."""
    known, firsts = episodes(world, sampler.finished_only), []
    for piece in pieces(batch, sampler.layout == "padded"):
        cells = [world.model.cell(row) for row in world.rows_at(piece["index"])]
        start = int(piece["episode_step"][0])
        first = ((cells[0][0] - start) % world.model.steps, cells[0][1])
        whole = known[first]
        rows = (
            len(whole)
            if sampler.max_length is None
            else min(len(whole), sampler.max_length)
        )
        assert cells == whole[start : start + rows]
        assert piece["episode_step"].tolist() == [*range(start, start + rows)]
        assert (piece["episode_length"] == len(whole)).all()
        stored = [world.model.row(*cell).fields for cell in cells]
        for key in (("observation",), ("action",), DONE, REWARD):
            torch.testing.assert_close(
                piece[key], torch.tensor([row[key] for row in stored])
            )
        assert piece[INIT].flatten().tolist() == [
            row[INIT][0] or j == 0 for j, row in enumerate(stored)
        ]
        if sampler.gamma is not None:
            rewards = [world.model.row(*cell).fields[REWARD][0] for cell in whole]
            togo = [
                sum(GAMMA**k * r for k, r in enumerate(rewards[at:]))
                for at in range(start, start + rows)
            ]
            torch.testing.assert_close(
                piece["reward_to_go"].flatten(),
                torch.tensor(togo),
                rtol=1e-4,
                atol=1e-5,
            )
        firsts.append(first)
    if sampler.gamma is not None:
        assert (batch["reward_to_go"][~batch["mask"]] == 0).all()
    return firsts


class Lockstep(RuleBasedStateMachine):
    @initialize(
        buffer=st.sampled_from([*BUFFERS]),
        steps=st.sampled_from([2, 3, 5, 13, 64, 70]),
        lanes=st.sampled_from([1, 2, 3]),
        often=st.sampled_from(
            [(0.0, 0.0, 0.0), (0.1, 0.05, 0.05), (0.5, 0.2, 0.2), (1.0, 0.0, 0.0)]
        ),
        max_length=st.sampled_from([None, 1, 3, 10]),
        by=st.sampled_from(["episode", "row"]),
        finished_only=st.booleans(),
        layout=st.sampled_from(["padded", "concatenated"]),
        gamma=st.sampled_from([None, GAMMA]),
        seed=st.integers(0, 999),
    )
    def make(
        self,
        buffer,
        steps,
        lanes,
        often,
        max_length,
        by,
        finished_only,
        layout,
        gamma,
        seed,
    ) -> None:
        cls, storage, writer = BUFFERS[buffer]
        rows = steps * lanes
        options: Any = {
            "finished_only": finished_only,
            "layout": layout,
            "gamma": gamma,
        }

        sampler = EpisodeSampler(None, max_length, by, **options)
        rb = cls(
            storage=storage(rows, ndim=2 if lanes > 1 else 1),
            sampler=sampler,
            writer=writer(),
        )
        sampler.watch(rb.storage)  # as the first draw from a buffer of TorchRL does
        self.world = World(rb, Model(steps, lanes if lanes > 1 else 0), seed, often)
        torch.manual_seed(seed)

    @rule(n=st.one_of(st.integers(1, 4), st.integers(2, 30)))
    def write(self, n: int) -> None:
        # TorchRL's buffer writes one step in another way
        least = 1 if isinstance(self.world.rb, ReplayBuffer) else 2
        n = min(max(n, least), max(self.world.model.steps, least))
        self.world.extend(n)

    @rule()
    def empty(self) -> None:
        self.world.empty()

    @precondition(lambda self: len(self.world.model) > 0)
    @rule(count=st.integers(1, 20))
    def sample(self, count: int) -> None:
        rb, sampler = self.world.rb, self.world.rb.sampler
        found = episodes(self.world, sampler.finished_only)
        size = min(count, len(rb.storage))
        with rb._replay_lock:
            can_sample = sampler.can_sample(rb.storage, size)
        assert can_sample == bool(found)
        if not can_sample:
            with pytest.raises(RuntimeError, match="no complete episode"):
                rb.sample(size)
            return
        batch = rb.sample(size)
        firsts = assert_pieces(self.world, batch, sampler)
        assert len(firsts) == size
        assert {*firsts} <= found.keys()


TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(stateful_step_count=20)


def filled(
    sampler,
    lanes: int = 1,
    steps: int = 60,
    buffer: str = "ours",
    seed: int = 1,
    **parts,
) -> World:
    """Return a world whose ring has wrapped."""
    cls, storage, writer = BUFFERS[buffer]
    parts = {"storage": storage, "writer": writer()} | parts
    often = 0.1, 0.05, 0.03
    return World.of(
        sampler, steps, lanes, 2.4, buffer=cls, seed=seed, often=often, **parts
    )


@pytest.mark.parametrize("by", ["episode", "row"])
@pytest.mark.parametrize(
    ("lanes", "finished_only", "max_length", "boundaries"),
    [
        (1, True, 8, "loops"),
        (3, True, 3, "loops"),
        (3, True, 3, "torch"),
        ("apart", False, 3, "loops"),
    ],
    indirect=["boundaries"],
)
def test_episodes_are_equally_likely_or_in_proportion_to_their_length(
    by, lanes, finished_only, max_length, boundaries
):
    sampler = EpisodeSampler(
        None, max_length, by, finished_only, layout="concatenated", gamma=GAMMA
    )
    if lanes == "apart":
        world = World.of(
            sampler,
            20,
            3,
            often=(0.1, 0.1, 0.0),
            ids=False,
            storage=partial(PackedStorage, lanes=3),
        )
        for lane, count in ((0, 13), (1, 47), (2, 5), (0, 2), (1, 13), (2, 1)):
            world.append([lane] * count)
    else:
        world = filled(sampler, lanes, 60 // lanes)
    assert_pieces(world, world.rb.sample(50), sampler)
    known = episodes(world, finished_only)
    law = np.array(
        [1.0 if by == "episode" else float(len(whole)) for whole in known.values()]
    )
    counts: Counter[Cell] = Counter()
    for _ in range(40):
        batch = world.rb.sample(5_000)
        at = batch[torch.cat((torch.ones(1), batch["episode"].diff())) != 0]
        index = at["index"] if at["index"].ndim > 1 else at["index"][:, None]
        slots = (index[:, 0] - at["episode_step"]) % world.model.steps
        counts.update(
            zip(
                slots.tolist(),
                index[:, 1].tolist() if index.shape[1] > 1 else [0] * 5_000,
                strict=True,
            )
        )
    assert counts.keys() <= known.keys()
    assert power(law / law.sum(), 200_000, 0.02) > 0.99
    assert_follows(np.array([counts[first] for first in known]), law / law.sum())


def test_batches_have_names_and_the_generator_of_the_buffer():
    made = [
        filled(
            EpisodeSampler(None, 5), 3, 20, generator=torch.Generator().manual_seed(5)
        ).rb
        for _ in range(2)
    ]
    batch, other = (rb.sample(9) for rb in made)
    assert (batch == other).all()
    assert (batch.names, batch.shape, len(made[0].sample(0))) == (
        [None, "time"],
        (9, 5),
        0,
    )


def test_each_window_around_a_row_is_equally_likely():
    torch.manual_seed(0)
    rb = ReplayBuffer(
        storage=PackedStorage(20),
        sampler=EpisodeSampler(None, 3, "episode"),
        batch_size=60_000,
    )
    done = torch.zeros(7, dtype=torch.bool)
    done[6] = True
    rb.extend(TensorDict({"next": {"done": done}}, [7]))
    windows = [
        [start for start in range(5) if start <= row < start + 3] for row in range(7)
    ]
    law = [
        sum(1 / len(fitting) for fitting in windows if start in fitting) / 7
        for start in range(5)
    ]
    assert power(np.array(law), 60_000, bias=0.03) > 0.95
    assert_follows(rb.sample()["episode_step"][:, 0].bincount(minlength=5), law)


def written(done: list[bool], capacity: int, **options) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=PackedStorage(capacity),
        sampler=EpisodeSampler(**options),
        batch_size=200,
    )
    rb.extend(
        TensorDict(
            {"x": torch.arange(len(done)), "next": {"done": torch.tensor(done)}},
            [len(done)],
        )
    )
    return rb


def firsts(rb: ReplayBuffer) -> set[int]:
    return {*rb.sample()["x"][:, 0].tolist()}


@pytest.mark.parametrize("share", [False, True])
def test_an_episode_whose_first_rows_were_never_stored_is_not_drawn(share):
    rb = written([False, True], 4)
    if share:
        rb.share()
    done = torch.tensor([False, False, False, True, False, True])
    # rows 10 and 11 are not stored
    rb.extend(TensorDict({"x": torch.arange(10, 16), "next": {"done": done}}, [6]))
    assert firsts(rb) == {14}


def test_a_waiting_call_returns_when_an_episode_ends():
    rb = written([False, False], 9)
    assert not rb.can_sample()
    with pytest.raises(TimeoutError):
        rb.sample(wait=True, timeout=0.01)
    rb.add(TensorDict({"x": torch.tensor(2), "next": {"done": torch.tensor(True)}}))
    assert rb.can_sample()
    assert rb.sample(wait=True, timeout=1)["x"].tolist() == [[0, 1, 2]] * 200


def test_hindsight_gives_an_episode_one_goal_and_n_step_joins_its_transitions():
    inner = NStepSampler(
        HindsightSampler(UniformSampler(), reward_fn, her_ratio=1.0), 3, 0.9
    )
    world = filled(EpisodeSampler(inner))
    batch = world.rb.sample(30)
    assert (batch["desired_goal"] == batch["desired_goal"][:, :1]).all()
    assert batch["relabeled"].all()
    steps = (batch["episode_length"] - batch["episode_step"]).clamp(max=3)
    assert (batch["steps_to_next_obs"][..., 0] <= steps).all()
    assert (batch["steps_to_next_obs"][batch["mask"]] == 3).any()


def test_interleaved_trajectories_are_reported():
    rb = ReplayBuffer(storage=PackedStorage(40), sampler=EpisodeSampler(), batch_size=4)
    ids = torch.arange(40) % 2
    done = torch.zeros(40, dtype=torch.bool)
    rb.extend(
        TensorDict({"collector": {"traj_ids": ids}, "next": {"done": done}}, [40])
    )
    with pytest.warns(RuntimeWarning, match="trajectories are stored in stretches"):
        rb.sample()


@pytest.mark.parametrize("finished_only", [True, False])
def test_an_episode_longer_than_the_storage_is_not_waited_for(finished_only):
    """More steps of an endless episode bring no first rows back."""
    sampler = EpisodeSampler(finished_only=finished_only)
    rb = ReplayBuffer(storage=PackedStorage(8), sampler=sampler, batch_size=2)
    done = torch.zeros(8, 1, dtype=torch.bool)
    rows = TensorDict({"x": torch.arange(8), "next": {"done": done}}, [8])
    for _ in range(2):
        rb.extend(rows)
    said = "first rows of all stored episodes are gone.*longer than the 8 steps .*larger storage, or a SequenceSampler"
    with pytest.raises(RuntimeError, match=said):
        rb.sample()
    windows = SequenceSampler(UniformSampler(), 2)
    assert len(ReplayBuffer(storage=rb.storage, sampler=windows).sample(4))
    ended = rows.clone()
    ended["next", "done"][[1, 5]] = True
    rb.extend(ended)
    assert {episode[0] for episode in rb.sample()["x"].tolist()} <= {2, 6}
