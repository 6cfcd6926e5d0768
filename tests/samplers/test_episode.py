"""How likely each episode is, and batches of few rows.

``tests/test_lockstep.py`` compares batches of episodes with the model.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    EpisodeSampler,
    PackedStorage,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from tests.catalogue import buffer_of
from tests.model import Episodes, Recipe, World
from tests.statistics import assert_follows, power

GAMMA = 0.9


def filled(
    sampler,
    lanes: int = 1,
    steps: int = 60,
    **parts,
) -> World:
    """Return a world whose ring has wrapped."""
    often = 0.1, 0.05, 0.03
    return World.of(sampler, steps, lanes, 2.4, seed=1, often=often, **parts)


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
    recipe = Recipe(episodes=Episodes(False, finished_only, max_length, GAMMA))
    world.check_batch(world.rb.sample(50), recipe)
    model = world.model
    known = model.whole(only_finished=finished_only)
    law = np.array([1.0 if by == "episode" else float(len(whole)) for whole in known])
    law /= law.sum()
    cells = np.zeros(model.steps * len(model.rows_of))
    for _ in range(12):
        batch = world.rb.sample(5_000)
        at = batch[torch.cat((torch.ones(1), batch["episode"].diff())) != 0]
        slot, *lane = at["index"].view(5_000, -1).T
        first = (slot - at["episode_step"]) % model.steps * len(model.rows_of)
        np.add.at(cells, (first + sum(lane)).numpy(), 1)
    counts = cells[[model.flat(whole[0]) for whole in known]]
    assert counts.sum() == cells.sum()
    assert power(law, 60_000, 0.04) > 0.99
    assert_follows(counts, law)


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


def written(done: list[bool], capacity: int, **options) -> ReplayBuffer:
    sampler = EpisodeSampler(**options)
    return buffer_of(capacity, sampler, rows=rows_that_end(done), batch_size=200)


def rows_that_end(done: list[bool], first: int = 0) -> TensorDict:
    x = torch.arange(first, first + len(done))
    return TensorDict({"x": x, "next": {"done": torch.tensor(done)}}, [len(done)])


def test_each_window_around_a_row_is_equally_likely():
    rb = written([False] * 6 + [True], 20, max_length=3, by="episode")
    windows = [
        [start for start in range(5) if start <= row < start + 3] for row in range(7)
    ]
    law = [
        sum(1 / len(fitting) for fitting in windows if start in fitting) / 7
        for start in range(5)
    ]
    assert power(np.array(law), 60_000, bias=0.03) > 0.95
    starts = rb.sample(60_000)["episode_step"][:, 0]
    assert_follows(starts.bincount(minlength=5), law)


def firsts(rb: ReplayBuffer) -> set[int]:
    return {*rb.sample()["x"][:, 0].tolist()}


@pytest.mark.parametrize("share", [False, True])
def test_an_episode_whose_first_rows_were_never_stored_is_not_drawn(share):
    rb = written([False, True], 4)
    if share:
        rb.share()
    # rows 10 and 11 are not stored
    rb.extend(rows_that_end([False, False, False, True, False, True], 10))
    assert firsts(rb) == {14}


def test_a_waiting_call_returns_when_an_episode_ends():
    rb = written([False, False], 9)
    assert not rb.can_sample()
    with pytest.raises(TimeoutError):
        rb.sample(wait=True, timeout=0.01)
    rb.add(rows_that_end([True], 2)[0])
    assert rb.can_sample()
    assert rb.sample(wait=True, timeout=1)["x"].tolist() == [[0, 1, 2]] * 200


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
    rb = written([False] * 8, 8, finished_only=finished_only)
    rb.extend(rows_that_end([False] * 8))
    said = "first rows of all stored episodes are gone.*longer than the 8 steps .*larger storage, or a SequenceSampler"
    with pytest.raises(RuntimeError, match=said):
        rb.sample()
    windows = SequenceSampler(UniformSampler(), 2)
    assert len(ReplayBuffer(storage=rb.storage, sampler=windows).sample(4))
    rb.extend(rows_that_end([False, True, False, False, False, True, False, False]))
    assert {episode[0] for episode in rb.sample()["x"].tolist()} <= {2, 6}
