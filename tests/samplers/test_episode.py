"""How likely each episode is, and batches of few rows.

``tests/test_lockstep.py`` compares batches of episodes with the model.
"""

from __future__ import annotations

from collections import Counter
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
from tests.model import Episodes, Recipe, World
from tests.statistics import assert_follows, power

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
