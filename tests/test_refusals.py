"""Bad input is refused by an error of the right class, with the right word, before
anything has changed.

Each room of the package has a table in ``tests/refusals``: ``REFUSALS`` maps
``(name, maker)`` to rows ``(call, said)``. The runner makes two equal objects, gives one
of them to ``call``, and expects an error of a class before the colon of ``said``, with
the words after it (a regular expression). Then the object must hold what it held before, byte for byte, and its next
batch and its next write must equal those of the other object. A name with ``drawn`` is
of calls that have drawn random numbers before they can know; all others leave the
generator alone. To add a refusal, add a row: one line, if possible.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td import (
    EpisodeSampler,
    EpisodeStats,
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ReplayBuffer,
    RolloutWriter,
    SchemaError,
    SequenceSampler,
    TrajectoryIndex,
    UniformSampler,
)
from tests.catalogue import as_bytes
from tests.refusals import arguments, buffers, envs, samplers, storages

ROOMS = arguments, storages, envs, samplers, buffers
ROWS = [
    pytest.param("drawn" in name, make, *row, id=f"{name}: {row[-1]}")
    for room in ROOMS
    for (name, make), rows in room.REFUSALS.items()
    for row in rows
]


def contents(made):
    """Return all that an object holds as plain values, tensors as bytes."""
    if isinstance(made, torch.Tensor):
        return made.dtype, tuple(made.shape), as_bytes(made).numpy().tobytes()
    if isinstance(made, torch.Generator):
        return contents(made.get_state())
    if isinstance(made, TensorDictBase):
        return contents(made.to_dict())
    if isinstance(made, Mapping):
        return {key: contents(value) for key, value in made.items()}
    if isinstance(made, list | tuple):
        return [contents(each) for each in made]
    found = [contents(made.state_dict())] if hasattr(made, "state_dict") else []
    inner = "_rng", "buffer", "episode_stats", "write_count"
    found += [contents(getattr(made, name)) for name in inner if hasattr(made, name)]
    return found or re.sub(" at 0x[0-9a-f]+", "", repr(made))


def what_follows(made):
    """Return the next batch of a buffer and what it holds after its next write, or the
    errors."""
    found: list[Any] = []
    for go_on in (
        lambda: made.sample(),
        lambda: made.extend(made.last(1)),
        lambda: made[:],
    ):
        try:
            found.append(contents(go_on()))
        except Exception as error:  # noqa: BLE001  of what has none
            found.append((type(error), str(error)))
    return found


@pytest.mark.parametrize(("is_drawn", "make", "call", "said"), ROWS)
def test_it_is_refused_and_nothing_changes(is_drawn, make, call, said):
    torch.manual_seed(0)
    made = make()
    random = torch.get_rng_state()
    before = contents(made)
    classes, _, words = said.partition(": ")
    with pytest.raises(Exception, match=words) as refused:
        call(made)
    classes_of_error = {each.__name__ for each in type(refused.value).__mro__}
    assert not classes_of_error.isdisjoint(classes.split("|"))
    if is_drawn:
        torch.set_rng_state(random)
    assert torch.equal(torch.get_rng_state(), random)
    assert contents(made) == before
    found = what_follows(made)
    torch.manual_seed(0)
    assert found == what_follows(make())


# -- keys of flags and ids

N = 8
FLAG = torch.arange(N)[:, None] == 5
FLAGS = {"done": FLAG, "terminated": FLAG, "truncated": FLAG & False}


def rows(flags: dict[str, Any] = FLAGS, **entries: Any) -> TensorDict:
    place = torch.arange(N).float()[:, None]
    after = {"reward": torch.ones(N, 1), "achieved_goal": place + 1} | flags
    stored = {"achieved_goal": place, "desired_goal": place, "state_value": place}
    return TensorDict(stored | {"next": after} | entries, [N])


def sampled_by(wrap: Callable[..., Any], size: int = 4) -> Callable[..., Any]:
    def use(data: TensorDict, **keys: Any) -> Any:
        sampler = wrap(**keys)
        rb = ReplayBuffer(storage=PackedStorage(N), sampler=sampler, batch_size=size)
        rb.extend(data)
        return rb.sample()

    return use


def indexed(data: TensorDict, **keys: Any) -> Any:
    rb = ReplayBuffer(storage=PackedStorage(N))
    rb.extend(data)
    return TrajectoryIndex(rb.storage, **keys).steps_ahead(torch.arange(N))


def counted(data: TensorDict, **keys: Any) -> Any:
    if "traj_key" in keys:
        keys["trajectory_key"] = keys.pop("traj_key")
    rb = ReplayBuffer(storage=PackedStorage(N), stats=EpisodeStats(**keys))
    rb.add(data[0])
    assert len(rb) == 1
    rb.extend(data)
    return rb.episode_stats


def rolled_out(data: TensorDict, **keys: Any) -> Any:
    if "traj_key" in keys:
        keys["trajectory_key"] = keys.pop("traj_key")
    writer = RolloutWriter(**keys)
    rb = ReplayBuffer(storage=PackedStorage(N), writer=writer)
    rb.extend(data.clone().set(("next", "state_value"), data["state_value"] + 1))
    return rb.sample(4)


def reward_of(batch: TensorDict) -> torch.Tensor:
    return batch["next", "reward"]


USES: dict[str, Callable[..., Any]] = {
    "n-step returns": sampled_by(
        lambda **keys: NStepSampler(UniformSampler(), 3, 0.9, **keys)
    ),
    "windows": sampled_by(lambda **keys: SequenceSampler(UniformSampler(), 2, **keys)),
    "goals": sampled_by(
        lambda **keys: HindsightSampler(UniformSampler(), reward_of, **keys)
    ),
    "episodes": sampled_by(lambda **keys: EpisodeSampler(**keys)),
    "an index": indexed,
    "statistics": counted,
    "a rollout": rolled_out,
}
MISSPELT: list[tuple[str, Any, str]] = [
    ("done_key", ("next", "fin"), "fin"),
    ("done_key", ("nxt", "doen"), "doen"),
    ("traj_key", ("collector", "traj_id"), "traj_id'"),
    ("traj_key", "lap", "lap"),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("argument", "key", "said"), MISSPELT)
def test_a_key_that_only_a_user_can_have_named_is_not_replaced_by_others(
    use, argument, key, said
):
    ids = {("collector", "traj_ids"): torch.zeros(N, dtype=torch.int64)}
    for data in (rows(), rows().update(ids)):
        with pytest.raises((KeyError, SchemaError), match=said):
            USES[use](data, **{argument: key})


@pytest.mark.parametrize("use", USES)
def test_keys_that_are_not_named_may_be_missing(use):
    apart = {name: FLAGS[name] for name in ("terminated", "truncated")}
    for flags in (FLAGS, apart, {"done": FLAG}):
        USES[use](rows(flags))
    of_agents = {"knight": TensorDict(apart, [N])}
    USES[use](rows(FLAGS | of_agents), done_key=("next", "knight", "done"))
    USES[use](rows(FLAGS | {"over": FLAG}), done_key=("next", "over"))
    USES[use](rows(lap=torch.arange(N) // 4), traj_key="lap")
