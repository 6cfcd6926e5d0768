"""What is damaged, foreign, forged or wrong in a dump or a state is refused by name, and
the live buffer stays as it was."""

from __future__ import annotations

import copy
import functools
import json
import operator
import os
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

import rlbuf_td as td
from rlbuf_td import CheckpointError
from rlbuf_td.checkpoint import open_checkpoint, save_state
from rlbuf_td.checkpoint.files import checksum, chunk_name
from tests.catalogue import assert_same, numbered_rows
from tests.checkpoint.test_dumps import make


def dumped(folder: Path, sampler: str = "proportional", steps: int = 20) -> Any:
    """Return a buffer with rows and priorities, which has been dumped."""
    rb = make(sampler, steps, rows=numbered_rows(14))
    rb.update_priority(torch.arange(9), torch.arange(1.0, 10))
    rb.dumps(folder)
    return rb


def damage(data: bytearray, file: Path, chance: random.Random) -> None:
    how = chance.choice(("flip", "flip", "cut", "lengthen", "remove"))
    place = chance.randrange(len(data))
    if how == "flip":
        data[place] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del data[place:]
    elif how == "lengthen":
        data += bytes(chance.randint(1, 9))
    file.write_bytes(data)
    if how == "remove":
        file.unlink()


@pytest.mark.parametrize("times", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_random_damage_is_noticed_named_and_changes_nothing(times, tmp_path):
    chance = random.Random(0)
    dumped(tmp_path, steps=500)
    files = [tmp_path / "manifest.json", *sorted(tmp_path.glob("data/*.bin"))]
    live, empty = make(steps=500, rows=numbered_rows(7)), make(steps=500)
    for _ in range(times):
        file = chance.choice(files)
        content = file.read_bytes()
        damage(bytearray(content), file, chance)
        for target in (live, empty):
            with pytest.raises(CheckpointError, match=re.escape(file.name)):
                target.loads(tmp_path)
        file.write_bytes(content)
    assert (empty.write_count, empty.storage.initialized) == (0, False)
    assert live.write_count == 7
    assert_same(live.storage[:], numbered_rows(7))


def test_what_a_killed_dump_left_is_removed_by_the_next(tmp_path):
    rb = dumped(tmp_path)
    left = [tmp_path / "data" / f"{0:032x}-1.bin", tmp_path / "manifest.json.next"]
    mine = [tmp_path / "data" / "notes.txt", tmp_path / "manifest.json.backup"]
    for file in (*left, *mine):
        file.write_text("?")
    make().loads(tmp_path)
    rb.dumps(tmp_path)
    assert not any(file.exists() for file in left)
    assert all(file.exists() for file in mine)
    make().loads(tmp_path)


def flip(file: Path) -> None:
    """Change one bit of a file; the file keeps its size and its time of change."""
    times = file.stat()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damaged", [flip, cut, Path.unlink])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_dump_writes_chunks_again_that_are_damaged_on_the_disk(
    damaged, is_loaded, tmp_path
):
    rb = dumped(tmp_path)
    if is_loaded:
        rb = make()
        rb.loads(tmp_path)
    for file in (tmp_path / "data").iterdir():
        if is_loaded:
            os.utime(file, ns=(0, 0))  # as new files are
        damaged(file)
    rb.dumps(tmp_path)
    other = make()
    other.loads(tmp_path)
    assert_same(other.storage[:], rb.storage[:])


@pytest.mark.parametrize("when", ["bin", "manifest"])
def test_a_full_disk_leaves_only_the_previous_dump(when, tmp_path, monkeypatch):
    rb = dumped(tmp_path)
    files = sorted(tmp_path.rglob("*"))
    rb.extend(numbered_rows(3, 14))
    real = os.fsync

    def full(descriptor):
        if when in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        rb.dumps(tmp_path)
    assert sorted(tmp_path.rglob("*")) == files
    again = make()
    again.loads(tmp_path)
    assert_same(again.storage[:], numbered_rows(14))


def manifest(path: Path, text: str) -> None:
    path.mkdir()
    (path / "manifest.json").write_text(text)


def dump_of_torchrl(path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(numbered_rows(3))
    rb.dumps(path)


@pytest.mark.parametrize(
    ("prepare", "match"),
    [
        (lambda path: None, "holds no dump: there is no such folder"),
        (lambda path: path.write_text("x"), "it is a file; a dump is a folder"),
        (lambda path: path.mkdir(), "holds no dump: it has no manifest.json"),
        (lambda path: manifest(path, "{}"), "is not the manifest of a dump of rl"),
        (
            lambda path: save_state(path, "RankSampler", {"x": 1}),
            "a dump of a RankSampler, expected one of a buf",
        ),
        (dump_of_torchrl, "a TorchRL buffer wrote it: use ReplayBuffer.fr"),
    ],
)
def test_errors_name_what_lies_where_a_dump_was_expected(prepare, match, tmp_path):
    prepare(tmp_path / "it")
    for read in (make().loads, open_checkpoint):
        with pytest.raises(CheckpointError, match=match):
            read(tmp_path / "it")


def test_what_is_not_ours_is_not_overwritten_but_a_damaged_dump_is(tmp_path):
    rb, folder = make(), tmp_path / "it"
    manifest(folder, '{"name": "a web application"}')
    words = "It is not overwritten: choose another folder, or remove it"
    with pytest.raises(CheckpointError, match=words):
        rb.dumps(folder)
    file = folder / "manifest.json"
    file.unlink()
    for damaged in (cut, lambda file: file.write_bytes(b"?" + file.read_bytes()[1:])):
        rb.dumps(folder)
        damaged(file)
        with pytest.raises(CheckpointError, match="is damaged or cut short"):
            make().loads(folder)
    rb.dumps(folder)
    make().loads(folder)
    with pytest.raises(CheckpointError, match="it is a file; a dump is a folder"):
        rb.dumps(file)


def test_odd_files_in_a_dump_are_refused(tmp_path):
    dumped(tmp_path)
    file = next((tmp_path / "data").glob("*.bin"))
    moved = file.rename(tmp_path / "moved")
    for place in (lambda: file.symlink_to(moved), lambda: os.mkfifo(file)):
        place()
        words = r"bin (cannot be read|is not a plain file)"
        with pytest.raises(CheckpointError, match=words):
            make().loads(tmp_path)
        file.unlink()


# -- forged: the checksum is right, the content is not


def resign(path, change) -> None:
    file = path / "manifest.json"
    document = json.loads(file.read_text())
    del document["checksum"]
    text = json.dumps(change(document), indent=1).removesuffix("\n}").encode()
    file.write_bytes(text + f',\n"checksum": "{checksum(text)}"\n}}\n'.encode())


@pytest.mark.parametrize(
    "name", ["../outside.bin", "/etc/passwd", f"{0:032x}-1.bin/../../x", None]
)
def test_a_manifest_cannot_name_files_outside_its_folder(name, tmp_path):
    dumped(tmp_path)

    def change(document):
        chunks_of(document)[0][0] = name
        return document

    resign(tmp_path, change)
    with pytest.raises(CheckpointError, match="which is not a file of a dump"):
        make().loads(tmp_path)


def chunks_of(document: dict[str, Any]) -> list[list[Any]]:
    """Return the non-empty lists of a manifest's chunks, one for each tensor."""
    places = (place for place in _places(document) if place[-1] == "chunks")
    found: Iterator[Any] = (
        functools.reduce(operator.getitem, place, document) for place in places
    )
    return [chunks for chunks in found if chunks]


def _places(node, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of each entry of nested dicts and lists."""
    inner: Any = ()
    if isinstance(node, dict):
        inner = node.items()
    elif isinstance(node, list):
        inner = enumerate(node)
    found = []
    for key, value in inner:
        found += [(*path, key), *_places(value, (*path, key))]
    return found


_NUMBERS = None, True, -1, 0, 1, 3, 2**31, 2**63, -(2**70), 1e300, float("nan")
_OTHERS: tuple[Any, ...] = ("", "x", "float64", [], {}, [[]], "rows.bin", {"$x": 1})
_TENSORS = [{"$tensor": value} for value in (0, {}, "x", None)]
VALUES = st.sampled_from([*_NUMBERS, *_OTHERS, *_TENSORS])


#: What a buffer says that was given nonsense with a right checksum; anything else is a
# crash.
REFUSALS = (IndexError, RuntimeError, ValueError, TypeError)


def forge(document: dict[str, Any], path: Path, data: st.DataObject) -> dict[str, Any]:
    """Change the content of a tensor, or entries of the document."""
    if data.draw(st.booleans()):
        chunks = data.draw(st.sampled_from(chunks_of(document)))
        seed, nbytes = (
            data.draw(st.integers(0, 2**32 - 1)),
            (path / "data" / chunks[0]).stat().st_size,
        )
        content = np.random.default_rng(seed).integers(0, 256, nbytes).astype(np.uint8)
        content[seed % nbytes :] = data.draw(st.sampled_from([0, 1, 63, 127, 255]))
        chunks[0] = chunk_name(content)
        (path / "data" / chunks[0]).write_bytes(content.tobytes())
        return document
    for _ in range(data.draw(st.integers(1, 2))):
        *parents, last = data.draw(st.sampled_from(_places(document)))
        node = document
        for key in parents:
            node = node[key]
        if data.draw(st.booleans()):
            # what is drawn twice must not be changed in between
            node[last] = copy.deepcopy(data.draw(VALUES))
        else:
            del node[last]
    return document


@settings(
    deadline=None,
    # a forged dump is no easier to read when it is shorter
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data(), sampler=st.sampled_from(["proportional", "rank"]))
def test_forged_dumps_neither_crash_nor_hang_nor_execute(
    data, sampler, tmp_path_factory
):
    path = tmp_path_factory.mktemp("forged")
    rb = dumped(path, sampler)
    resign(path, lambda document: forge(document, path, data))
    for target in (rb, make(sampler)):
        rows = rb.storage.rows.matrix.view(torch.uint8)
        before = rows.clone()
        try:
            # a generator of a device that is not here is left out
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "the dump's generator is on")
                target.loads(path)
        except CheckpointError:
            assert torch.equal(rows, before)
            continue
        if len(target):  # what was accepted can be used, or refuses to be
            with suppress(*REFUSALS):
                target.sample()
                target.extend(numbered_rows(2))


STEPS = 70


def reward(batch) -> Tensor:
    return batch["next", "reward"]


def queue() -> dict[str, Any]:
    writer = td.QueueWriter()
    return {"writer": writer, "sampler": td.QueueSampler(writer)}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "uniform": lambda: {"sampler": td.UniformSampler()},
    "proportional": lambda: {"sampler": td.ProportionalSampler(STEPS)},
    "rank": lambda: {"sampler": td.RankSampler(STEPS)},
    "minibatch": lambda: {"sampler": td.MinibatchSampler(3)},
    "recency": lambda: {"sampler": td.RecencySampler(4.0, 9)},
    "n-step": lambda: {"sampler": td.NStepSampler(td.UniformSampler(), 3, 0.9)},
    "hindsight": lambda: {"sampler": td.HindsightSampler(td.UniformSampler(), reward)},
    "windows": lambda: {"sampler": td.SequenceSampler(td.UniformSampler(), 2)},
    "reservoir": lambda: {"writer": td.ReservoirWriter()},
    "rollout": lambda: {"writer": td.RolloutWriter()},
    "queue": queue,
    "deduplicated": lambda: {"storage": td.PackedStorage(STEPS, share_next=["seen"])},
}


def filled(name: str, count: int = 30) -> td.ReplayBuffer:
    parts = {"storage": td.PackedStorage(STEPS)} | PARTS[name]()
    generator = torch.Generator().manual_seed(0)
    rb = td.ReplayBuffer(batch_size=8, generator=generator, **parts)
    rows = numbered_rows(count)
    for key in ("state_value", "seen"):
        rows[key] = rows["next", "reward"].expand(-1, 1 if key != "seen" else 3).clone()
        rows["next", key] = rows[key] + 1
    rb.extend(rows)
    rb.sample()
    return rb


def flat(state) -> list[Any]:
    return [
        x.numpy().tobytes() if isinstance(x, Tensor) else x
        for x in tree_flatten(state)[0]
    ]


NOT_A_COUNT = [-5, 10**12, 2.5, "one", None]
STORAGE: dict[str, list[Any]] = {
    "_len": [29, 31, STEPS, *NOT_A_COUNT],
    "rows": [None, lambda x: x[:-1], lambda x: x[:, :-1], lambda x: x.long()],
    "layout": [None, {}],
    "row_class": [True, "x", [["x"]], [[[1], "x", "y"]], [[["x"], "y"]]],
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
ENTRIES: dict[str, list[Any]] = {
    "entries": [[], lambda x: [x[0][:3]], lambda x: [x[0].float()]],
    "deduplicated": [None, [[]]],
}
PRIORITIES: dict[str, list[Any]] = {
    "alpha": [-1.0, float("nan"), None],
    "beta": [-1.0],
    "largest": [-0.5, float("inf"), float("nan"), None],
    "max_capacity": [STEPS - 1, None],
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
    "deduplicated": {"_storage": ENTRIES},
    "n-step": {
        "_storage": {
            "episodes.back": [lambda x: x[:, 1:]],
            "episodes.following": [Tensor.int],
            "episodes.done_key": [[]],
        },
        "_sampler": {
            "settings.n_steps": [0, None],
            "settings.gamma": [1.5, None],
            "settings": [None, {"k": 1}],
        },
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
    "queue": {"_writer": WRITER | {"waiting": [-1, 31, None]}},
}


def put(state, path: str, wrong):
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
    state = filled(name).state_dict()
    rb = filled(name, count=20)
    before = flat(rb.state_dict())
    kept = {"_storage": rb.storage, "_sampler": rb.sampler, "_writer": rb.writer}
    for part, paths in WRONG[name].items():
        for path, numbers in paths.items():
            for wrong in numbers:
                bad = put(state, f"{part}.{path}", wrong)
                loads = [(rb, bad)] + ([(kept[part], bad[part])] if part else [])
                for into, wrong_state in loads:
                    with pytest.raises(ValueError, match=r"."):
                        into.load_state_dict(wrong_state)
                    assert flat(rb.state_dict()) == before, (part, path, wrong)
    rb.load_state_dict(state)
    assert flat(rb.storage.state_dict()["rows"]) == flat(state["_storage"]["rows"])


def test_a_damaged_or_foreign_dump_of_the_storage_is_refused(tmp_path):
    rb, into = filled("uniform"), filled("uniform", count=20)
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


def test_forged_numbers_of_episodes_reach_no_other_memory():
    rb = filled("n-step")
    state = rb.storage.state_dict()
    saved = state["episodes"]
    saved["back"] = torch.full_like(saved["back"], 2**31 - 1)
    saved["following"] = torch.full_like(saved["following"], 2**62)
    rb.storage.load_state_dict(state)
    back, ahead, _ = td.TrajectoryIndex(rb.storage).reach(torch.arange(30))
    assert min(back.min(), ahead.min()) >= 0
    assert (back + ahead).max() < 30
    rb.sample()


def test_a_damaged_dump_leaves_no_rows_in_a_folder(tmp_path):
    rb = td.ReplayBuffer(storage=td.PackedStorage(64))
    rb.extend(numbered_rows(64))
    rb.dumps(tmp_path / "sound")
    shutil.copytree(tmp_path / "sound", tmp_path / "damaged")
    files = (tmp_path / "damaged" / "data").iterdir()
    cut(max(files, key=lambda file: file.stat().st_size))  # that of the rows
    storage = td.PackedStorage(64, scratch_dir=tmp_path / "rows")
    other = td.ReplayBuffer(storage=storage)
    with pytest.raises(CheckpointError):
        other.loads(tmp_path / "damaged")
    other.loads(tmp_path / "sound")
    assert_same(other.storage[:], rb.storage[:])
