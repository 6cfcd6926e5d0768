"""Minari data sets in and out: what Minari's own collector records comes back byte for
byte."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from tensordict import TensorDict

from rlbuf_td import (
    GymnasiumRecorder,
    PackedStorage,
    ReplayBuffer,
    SchemaError,
    TrajectoryIndex,
)
from rlbuf_td.storages import memory_budget

minari = pytest.importorskip("minari", reason="needs the extra minari")
pytest.importorskip("h5py", reason="needs the extra minari")
pytest.importorskip("jax", reason="Minari's DataCollector needs it")

pytestmark = [
    # it asks for an author, a description and more
    pytest.mark.filterwarnings("ignore::UserWarning:minari"),
    # of its collector's folders
    pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning"),
]

LIMIT = 6
SPACES: dict[str, tuple[Any, Any]] = {
    "a box": (Box(-9, 9, (3,), np.float64), Discrete(4)),
    "one number": (Discrete(9), Box(-1, 1, (2,), np.float32)),
    "an image": (Box(0, 255, (32, 32, 3), np.uint8), Discrete(2)),
    "a dict": (
        Dict(
            camera=Box(0, 255, (4, 4, 3), np.uint8),
            body=Dict(speed=Box(-1, 1, (2,), np.float32), gear=Discrete(5)),
        ),
        Dict(steer=Box(-1, 1, (1,), np.float32), brake=Discrete(2)),
    ),
    "a tuple": (
        Tuple((Box(-1, 1, (2,), np.float32), Discrete(3))),
        Tuple((Discrete(2), Box(0, 1, (3,), np.float64))),
    ),
}


class World(gymnasium.Env):
    def __init__(self, name: str) -> None:
        self.observation_space, self.action_space = SPACES[name]
        self.episode = self.step_count = 0

    def reset(self, **kwargs: Any) -> Any:
        super().reset(seed=kwargs.get("seed"))
        self.episode, self.step_count = self.episode + 1, 0
        return self.observation_space.sample(), {
            "place": np.zeros(2),
            "inner": {"count": 0},
        }

    def step(self, action: Any) -> Any:
        self.step_count += 1
        is_last = self.step_count == (
            LIMIT if self.episode % 3 == 0 else 1 + self.episode % 3
        )
        terminated = is_last and self.episode % 3 != 0
        infos = {"place": self.np_random.random(2), "inner": {"count": self.step_count}}
        return (
            self.observation_space.sample(),
            self.np_random.random(),
            terminated,
            is_last and not terminated,
            infos,
        )


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))


def recorded(
    name: str = "a box", episodes: int = 7, breaks_off: bool = True, **kwargs: Any
) -> Any:
    """Return what Minari's collector records; with ``breaks_off``, it resets in the
    middle of an episode."""
    collector = minari.DataCollector(World(name), **kwargs)
    for episode in range(episodes):
        collector.reset(seed=episode)
        is_last = False
        while not is_last:
            *_, terminated, truncated, _ = collector.step(
                collector.action_space.sample()
            )
            is_last = terminated or truncated or (breaks_off and episode == 3)
    dataset = collector.create_dataset("toy/" + name.replace(" ", "-") + "-v0")
    collector._tmp_dir.cleanup()
    return dataset


def leaves(value: Any) -> Any:
    if isinstance(value, dict | tuple):
        keys = sorted(value) if isinstance(value, dict) else range(len(value))
        return [(type(value), key, leaves(value[key])) for key in keys]
    return value.dtype, value.shape, value.tobytes()


def assert_same_bytes(one: Any, other: Any, infos: bool = True) -> None:
    assert one.total_steps == other.total_steps
    assert len(one) == len(other)
    names = [
        "observations",
        "actions",
        "rewards",
        "terminations",
        "truncations",
        *(["infos"] if infos else []),
    ]
    for mine, theirs in zip(one, other, strict=True):
        for name in names:
            assert leaves(getattr(mine, name)) == leaves(getattr(theirs, name)), name


def spaces_of(dataset: Any) -> dict[str, Any]:
    return {
        "observation_space": dataset.observation_space,
        "action_space": dataset.action_space,
    }


@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize("name", SPACES)
def test_a_set_comes_back_byte_for_byte(name, share_next):
    dataset = recorded(name, record_infos=True, jpeg_encoding=False)
    rb = ReplayBuffer.from_minari(
        dataset, infos=True, share_next=share_next, batch_size=4
    )
    assert len(rb) == dataset.total_steps
    assert_same_bytes(rb.to_minari("toy/again-v0", **spaces_of(dataset)), dataset)
    without = ReplayBuffer.from_minari(dataset).to_minari(
        "toy/without-v0", **spaces_of(dataset)
    )
    assert_same_bytes(without, dataset, infos=False)


def test_an_episode_without_an_end_does_not_run_into_the_next():
    number = np.arange(4.0)[:, None]
    flags = {
        "rewards": np.zeros(3),
        "terminations": np.zeros(3, bool),
        "truncations": np.zeros(3, bool),
    }
    buffers = [
        minari.data_collector.EpisodeBuffer(
            observations=number, actions=number[:3], **flags
        )
        for _ in range(2)
    ]
    spaces = {
        "observation_space": Box(0, 9, (1,), np.float64),
        "action_space": Box(0, 9, (1,), np.float64),
    }
    rb = ReplayBuffer.from_minari(
        minari.create_dataset_from_buffers("toy/open-v0", buffers, **spaces)
    )
    _, ahead, _ = TrajectoryIndex(rb.storage).reach(torch.arange(6))
    assert ahead.tolist() == [2, 1, 0, 2, 1, 0]


def test_chosen_episodes_fill_a_part_of_a_larger_buffer_in_a_file(tmp_path):
    dataset = recorded().filter_episodes(lambda episode: episode.terminations[-1])
    plain = ReplayBuffer.from_minari(dataset, reward_dtype=torch.float32)
    rb = ReplayBuffer.from_minari(
        dataset, 100, scratch_dir=tmp_path / "rows", reward_dtype=torch.float32
    )
    assert (tmp_path / "rows" / "rows.bin").exists()
    assert (rb.storage.max_size, len(rb)) == (100, dataset.total_steps)
    assert (rb.chronological() == plain.chronological()).all()
    assert rb.chronological()["next", "terminated"].any()
    assert not rb.chronological()["next", "truncated"].any()


def test_memory_is_planned_before_more_than_an_episode_is_read(monkeypatch):
    dataset = recorded()
    episodes = iter(list(dataset))
    monkeypatch.setattr(dataset, "iterate_episodes", lambda: episodes)
    monkeypatch.setattr(memory_budget, "_WORTH_A_LOOK", 0)
    monkeypatch.setattr(
        memory_budget, "room_for", lambda *_: memory_budget.Room("RAM", 100, 100)
    )
    with pytest.raises(MemoryError, match=r"rows of \d+ bytes take .* of RAM are free"):
        ReplayBuffer.from_minari(dataset)
    assert [episode.id for episode in episodes] == [1, 2, 3, 4, 5, 6]


def test_what_cannot_be_loaded_is_named(monkeypatch):
    dataset = recorded()
    with pytest.raises(
        ValueError,
        match=r"toy/a-box-v0 has \d+ transitions, more than the capacity of 5: raise it",
    ):
        ReplayBuffer.from_minari(dataset, 5)
    with pytest.raises(ValueError, match="has no transitions"):
        ReplayBuffer.from_minari(dataset.filter_episodes(lambda episode: False))
    with pytest.raises(
        TypeError,
        match="must be the name of a Minari data set or a MinariDataset, got 3",
    ):
        ReplayBuffer.from_minari(3)
    with pytest.raises(
        FileNotFoundError,
        match="no Minari data set 'toy/none-v0': run `minari download toy",
    ):
        ReplayBuffer.from_minari("toy/none-v0")
    with pytest.raises(
        TypeError,
        match=r"reward_dtype must be a dtype of torch, such as torch.float32, got 'float32'",
    ):
        ReplayBuffer.from_minari(dataset, reward_dtype="float32")
    with pytest.raises(
        ValueError,
        match="the storage is made for the transitions, got storage=PackedStorage",
    ):
        ReplayBuffer.from_minari(dataset, storage=PackedStorage(9))
    monkeypatch.setitem(
        SPACES, "words", (Dict(said=Text(3, min_length=3)), Discrete(2))
    )
    with pytest.raises(SchemaError, match=r"'said'.*which no tensor can hold"):
        ReplayBuffer.from_minari(recorded("words"))
    monkeypatch.setitem(__import__("sys").modules, "minari", None)
    with pytest.raises(ImportError, match=r"pip install 'rlbuf_td\[minari\]'"):
        ReplayBuffer.from_minari("toy/a-box-v0")


def test_rewards_of_unlike_dtypes_need_one_that_holds_all():
    def dataset(name: str, *rewards: list[float]) -> Any:
        flags = {"terminations": [False, True], "truncations": [False, False]}
        values = {"observations": np.zeros((3, 1)), "actions": np.zeros(2, np.int64)}
        buffers = [
            minari.data_collector.EpisodeBuffer(rewards=each, **flags, **values)
            for each in rewards
        ]
        spaces = {
            "observation_space": Box(0, 9, (1,), np.float64),
            "action_space": Discrete(1),
        }
        return minari.create_dataset_from_buffers(name, buffers, **spaces)

    mixed = dataset("toy/ints-v0", [0, 1], [0.5, 1.0])
    with pytest.raises(SchemaError, match=r"'reward'\)"):
        ReplayBuffer.from_minari(mixed)
    rb = ReplayBuffer.from_minari(mixed, reward_dtype=torch.float64)
    assert rb.chronological()["next", "reward"].flatten().tolist() == [
        0.0,
        1.0,
        0.5,
        1.0,
    ]


@pytest.mark.parametrize("capacity", [400, 60])
def test_lanes_are_written_one_after_the_other(capacity):
    env = gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
    env.action_space.seed(0)
    rb = ReplayBuffer.from_env(env, capacity)
    recorder = GymnasiumRecorder(rb, env)
    recorder.reset(seed=0)
    for _ in range(120):
        recorder.step(env.action_space.sample())
    # of unlike lengths: the environments reset alone
    lanes = [rb.lane(lane).chronological() for lane in range(3)]
    rows: Any = torch.cat(lanes)
    dataset = rb.to_minari("toy/lanes-v0", env="CartPole-v1")
    assert dataset.total_steps == len(rows) == len(rb)
    assert len(dataset) == sum(
        len(lane.get(("collector", "traj_ids")).unique()) for lane in lanes
    )
    for name, key in (("actions", "action"), ("terminations", ("next", "terminated"))):
        written = np.concatenate([getattr(episode, name) for episode in dataset])
        assert np.array_equal(written, rows[key].flatten())
    assert dataset.env_spec.id == "CartPole-v1"
    again = ReplayBuffer.from_minari(
        dataset, reward_dtype=torch.float32
    ).chronological()
    assert (again.exclude("collector") == rows.exclude("collector")).all()


def test_rows_without_numbers_are_parted_where_they_are_done():
    rb = ReplayBuffer(storage=PackedStorage(9))
    number, done = (
        torch.arange(8.0)[:, None],
        torch.tensor([0, 0, 1, 0, 1, 0, 0], dtype=torch.bool)[:, None],
    )
    flags = {
        "reward": number[:7],
        "done": done,
        "terminated": done,
        "truncated": ~done & done,
    }
    after = {"observation": number[1:]} | flags
    rb.extend(
        TensorDict(
            {"observation": number[:7], "action": number[:7], "next": after}, [7]
        )
    )
    space = Box(0, 9, (1,), np.float32)
    dataset = rb.to_minari("toy/flags-v0", observation_space=space, action_space=space)
    assert [len(episode) for episode in dataset] == [3, 2, 2]
    assert dataset[1].observations.flatten().tolist() == [3, 4, 5]


@pytest.mark.parametrize("in_space", [True, False])
def test_an_observation_with_the_key_info_is_no_info(in_space):
    number, flag = torch.arange(4.0)[:, None], torch.zeros(3, 1, dtype=torch.bool)
    after = {"info": number[1:], "x": number[1:], "reward": number[1:], "done": flag}
    after |= {"terminated": flag, "truncated": flag}
    rb = ReplayBuffer(storage=PackedStorage(9))
    rb.extend(
        TensorDict(
            {"info": number[:3], "x": number[:3], "action": number[:3], "next": after},
            [3],
        )
    )
    box = Box(0, 9, (1,), np.float32)
    space = Dict(info=box, x=box) if in_space else Dict(x=box)
    episode = rb.to_minari("toy/info-v0", observation_space=space, action_space=box)[0]
    assert episode.observations.keys() == space.spaces.keys()
    assert all(
        value[:, 0].tolist() == [0, 1, 2, 3] for value in episode.observations.values()
    )
    assert not episode.infos


def test_what_minari_cannot_hold_leaves_no_set_behind(monkeypatch):
    # an episode at a time
    monkeypatch.setattr("rlbuf_td.buffers.minari_data._WRITTEN_AT_ONCE", 0)
    dataset = recorded()
    rb = ReplayBuffer.from_minari(dataset)
    inner = (~rb.chronological()["next", "done"][:, 0]).nonzero()[-1]
    rb.set_at_(("next", "observation"), torch.ones(1, 3), inner)
    with pytest.raises(
        ValueError,
        match="a next 'observation' differs from that of the row that follows it",
    ):
        rb.to_minari("toy/broken-v0", **spaces_of(dataset))
    assert list(minari.list_local_datasets()) == [dataset.id]
    with pytest.raises(
        ValueError, match="pass the Gymnasium environment as env, or both"
    ):
        rb.to_minari("toy/spaces-v0", action_space=Discrete(4))
    with pytest.raises(
        SchemaError,
        match=r"the rows have no \('observation', 'camera'\), which is in the given space",
    ):
        rb.to_minari(
            "toy/other-v0",
            observation_space=SPACES["a dict"][0],
            action_space=Discrete(4),
        )
    with pytest.raises(
        SchemaError,
        match=r"the shape of 'observation' is \[3\] in the rows, \[2\] in the given space",
    ):
        rb.to_minari(
            "toy/other-v0", observation_space=Box(-1, 1, (2,)), action_space=Discrete(4)
        )
    names: list[Any] = [None, "", "toy/other"]
    for name in names:
        with pytest.raises(
            ValueError, match=r"a data set needs a name with a version, such as .*, got"
        ):
            rb.to_minari(name, **spaces_of(dataset))
    ends = ("next", "done"), ("next", "terminated"), ("next", "truncated")
    for missing, error in ((ends[1:2], SchemaError), (ends, KeyError)):
        short = ReplayBuffer(storage=PackedStorage(9))
        short.extend(rb.storage[:3].exclude(*missing, ("collector", "traj_ids")))
        with pytest.raises(error):
            short.to_minari("toy/short-v0", **spaces_of(dataset))
    with pytest.raises(ValueError, match="already exists"):
        rb.to_minari(dataset.id, **spaces_of(dataset))
    assert_same_bytes(minari.load_dataset(dataset.id), dataset)
    again = ReplayBuffer.from_minari(dataset)
    with pytest.raises(ValueError, match="nonsense"):
        again.to_minari("toy/again-v0", **spaces_of(dataset), data_format="nonsense")
    again.to_minari("toy/again-v0", **spaces_of(dataset))
