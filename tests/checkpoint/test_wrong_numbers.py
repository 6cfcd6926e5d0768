"""A state with a wrong number is refused before anything changes, by every part."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import rlbuf_td as td
from tests.checkpoint.test_dumps import transitions

T = 70


def queue() -> dict[str, Any]:
    writer = td.QueueWriter()
    return {"writer": writer, "sampler": td.QueueSampler(writer)}


def reward(batch: Any) -> Tensor:
    return batch["next", "reward"]


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "uniform": lambda: {"sampler": td.UniformSampler()},
    "proportional": lambda: {"sampler": td.ProportionalSampler(T)},
    "rank": lambda: {"sampler": td.RankSampler(T)},
    "minibatch": lambda: {"sampler": td.MinibatchSampler(3)},
    "recency": lambda: {"sampler": td.RecencySampler(4.0, 9)},
    "n-step": lambda: {"sampler": td.NStepSampler(td.UniformSampler(), 3, 0.9)},
    "hindsight": lambda: {"sampler": td.HindsightSampler(td.UniformSampler(), reward)},
    "windows": lambda: {"sampler": td.SequenceSampler(td.UniformSampler(), 2)},
    "reservoir": lambda: {"writer": td.ReservoirWriter()},
    "rollout": lambda: {"writer": td.RolloutWriter()},
    "queue": queue,
}


def make(name: str, share_next: bool = False, count: int = 30) -> td.ReplayBuffer:
    generator = torch.Generator().manual_seed(0)
    storage = td.PackedStorage(T, share_next=["observation"] if share_next else False)
    rb = td.ReplayBuffer(
        storage=storage, batch_size=8, generator=generator, **PARTS[name]()
    )
    rows = transitions(count)
    rows["state_value"] = rows["next", "state_value"] = rows["next", "reward"].clone()
    rows["next", "observation"] = rows["observation"].roll(-1, 0)
    rb.extend(rows)
    if count:
        rb.sample()
    return rb


def flat(state: Any) -> list[Any]:
    return [
        x.numpy().tobytes() if isinstance(x, Tensor) else x
        for x in tree_flatten(state)[0]
    ]


NOT_A_COUNT = [-5, 10**12, 2.5, "one", None]
STORAGE: dict[str, list[Any]] = {
    "_len": [29, 31, T, *NOT_A_COUNT],
    "rows": [None, lambda x: x[:-1], lambda x: x[:, :-1], lambda x: x.long()],
    "layout": [None, {}],
    "ring": [{}, 5],
    "ring.steps": [29, None, 1.0],
    "ring.is_estimated": [1, None],
    "ring.value_rows": [-1, 2**62 + 1, None],
    "ring.head": [
        None,
        lambda x: x[:-1],
        lambda x: x.float(),
        lambda x: x - 1,
        lambda x: x[[1, 0]],
    ],
}
SHARED: dict[str, list[Any]] = {
    "entries": [[], lambda x: [x[0][:3]], lambda x: [x[0].float()]],
    "deduplicated": [None, [[]]],
}
PRIORITIES: dict[str, list[Any]] = {
    "alpha": [-1.0, float("nan"), None],
    "beta": [-1.0],
    "largest": [-0.5, float("inf"), float("nan"), None],
    "max_capacity": [T - 1, None],
    "weight_norm": ["other"],
    "magnitude": [
        lambda x: x - 3,
        lambda x: x[:-1],
        lambda x: x.half(),
        lambda x: x / 0,
    ],
}
WRITER: dict[str, list[Any]] = {
    "_cursor": NOT_A_COUNT[:1] + NOT_A_COUNT[2:],
    "_write_count": [-5, 2.5, "one", 2**63],
}
WRONG: dict[str, dict[str, dict[str, list[Any]]]] = {
    "uniform": {
        "_storage": STORAGE,
        "_writer": WRITER,
        "": {"_batch_size": [-1, 1.5], "_rng": [(Tensor(3), "cpu"), 3]},
    },
    "proportional": {
        "_sampler": PRIORITIES | {"eps": [-1.0], "min_priority": [float("nan")]}
    },
    "rank": {"_sampler": PRIORITIES},
    "minibatch": {
        "_sampler": {
            "order": [
                lambda x: x + 1,
                lambda x: x * 0,
                lambda x: x[:-1],
                lambda x: x.float(),
                5,
            ],
            "position": [-1, 31, None],
            "epoch": [-1, 3, None],
            "epochs": [0, None],
            "len_storage": [-1, 29, None],
        }
    },
    "recency": {
        "_sampler": {"half_life": [0.0, float("nan"), None], "window": [0, "one"]}
    },
    "n-step": {
        "_sampler": {
            "settings.n_steps": [0, None],
            "settings.gamma": [1.5, None],
            "settings": [None, {"k": 1}],
        }
    },
    "hindsight": {
        "_sampler": {"settings.her_ratio": [1.5], "settings.future_gamma": [-1.0]}
    },
    "windows": {"_sampler": {"settings.eta": [2.0]}},
    "reservoir": {
        "_writer": {
            "_write_count": [-1, 0.5, None],
            "following": [-1, 5],
            "threshold": [5, 2**62, None],
        }
    },
    "rollout": {"_writer": WRITER, "_storage": STORAGE},
    "queue": {"_writer": WRITER | {"taken": [-1, 31, None]}},
}


def put(state: Any, path: str, wrong: Any) -> Any:
    """Return a copy of a state with another value at ``path``."""
    state = copy.deepcopy(state)
    *levels, last = [name for name in path.split(".") if name]
    inner = state
    for name in levels:
        inner = inner[name]
    inner[last] = wrong(inner[last]) if callable(wrong) else wrong
    return state


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_number_is_refused_and_changes_nothing(name):
    state = make(name, share_next=False).state_dict()
    rb = make(name, count=20)
    before = flat(rb.state_dict())
    kept = {"_storage": rb.storage, "_sampler": rb.sampler, "_writer": rb.writer}
    for part, paths in WRONG[name].items():
        for path, numbers in paths.items():
            for wrong in numbers:
                bad = put(state, f"{part}.{path}", wrong)
                loads = [(rb, bad)] + ([(kept[part], bad[part])] if part else [])
                for into, given in loads:
                    with pytest.raises(ValueError, match=r"."):
                        into.load_state_dict(given)
                    assert flat(rb.state_dict()) == before, (part, path, wrong)
    rb.load_state_dict(state)
    assert flat(rb.storage.state_dict()["rows"]) == flat(state["_storage"]["rows"])


@pytest.mark.parametrize(
    "wrong", [True, "x", [["x"]], [[[1], "x", "y"]], [[["x"], "y"]]]
)
def test_a_wrong_class_of_rows_is_refused_and_changes_nothing(wrong: object) -> None:
    rb, state = make("uniform"), make("uniform", count=20).state_dict()
    before, state["_storage"]["row_class"] = rb[:].clone(), wrong
    with pytest.raises(ValueError, match="not that of a PackedStorage"):
        rb.load_state_dict(state)
    assert (rb[:] == before).all()


def test_wrong_entries_of_deduplicated_rows_are_refused():
    state, rb = (
        make("uniform", share_next=True, count=count).storage for count in (30, 20)
    )
    state, before = state.state_dict(), flat(rb.state_dict())
    for path, values in SHARED.items():
        for wrong in values:
            with pytest.raises(ValueError, match=r"."):
                rb.load_state_dict(put(state, path, wrong))
            assert flat(rb.state_dict()) == before


def test_a_damaged_or_foreign_dump_of_the_storage_is_refused(tmp_path):
    rb, into = make("uniform"), make("uniform", count=20)
    rb.storage.dumps(tmp_path)
    (file,), before = tmp_path.iterdir(), flat(into.storage.state_dict())
    data = file.read_bytes()
    for wrong in (data[: len(data) // 2], b"", pickle.dumps(rb.storage, protocol=2)):
        file.write_bytes(wrong)
        with pytest.raises(
            ValueError, match="is damaged, or no dump of a PackedStorage"
        ):
            into.storage.loads(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"from_torchrl\(folder\) reads dumps"):
        into.storage.loads(tmp_path)
    assert flat(into.storage.state_dict()) == before


@pytest.mark.parametrize(("name", "key"), [
    ("uniform", "_cursor"), ("uniform", "_write_count"), ("queue", "taken"), ("rollout", "_write_count"),
    ("reservoir", "following"),
])  # fmt: skip
def test_a_wrong_number_in_a_dump_of_a_writer_is_refused(
    name: str, key: str, tmp_path: Path
) -> None:
    writer, into = make(name).writer, make(name, count=20).writer
    writer.dumps(tmp_path)
    file, before = tmp_path / "writer.pt", into.state_dict()
    saved = torch.load(file, weights_only=True)
    for wrong in (-1, "one", 1 << 63, None):
        torch.save(saved | {key: wrong}, file)
        with pytest.raises(ValueError, match=r"saved|state"):
            into.loads(tmp_path)
        assert into.state_dict() == before
    torch.save(saved, file)
    into.loads(tmp_path)
    # the rows tell it
    assert into.state_dict() | {"_cursor": 0} == writer.state_dict() | {"_cursor": 0}


def test_damaged_numbers_of_episodes_are_refused_or_reach_no_other_memory():
    rb = make("n-step")
    state, before = (
        rb.storage.state_dict(),
        td.TrajectoryIndex(rb.storage).reach(torch.arange(30)),
    )
    saved = state["episodes"]
    for name, wrong in {
        "back": saved["back"][:, 1:],
        "following": saved["following"].int(),
        "done_key": [],
    }.items():
        with pytest.raises(ValueError, match="saved"):
            rb.storage.load_state_dict(state | {"episodes": saved | {name: wrong}})
    assert all(
        map(torch.equal, td.TrajectoryIndex(rb.storage).reach(torch.arange(30)), before)
    )
    forged = {
        "back": torch.full_like(saved["back"], 2**31 - 1),
        "following": torch.full_like(saved["following"], 2**62),
    }
    rb.storage.load_state_dict(state | {"episodes": saved | forged})
    back, ahead, _ = td.TrajectoryIndex(rb.storage).reach(torch.arange(30))
    assert back.min() >= 0
    assert ahead.min() >= 0
    assert (back + ahead).max() < 30
    rb.sample()
