"""What is damaged, foreign or forged is refused by name, and the live buffer stays as
it was."""

from __future__ import annotations

import copy
import functools
import json
import operator
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import CheckpointError, RolloutBuffer
from rlbuf_td.checkpoint import open_checkpoint, save_state
from rlbuf_td.checkpoint.files import checksum, chunk_name
from tests.catalogue import assert_same
from tests.checkpoint.test_dumps import make, step, transitions


def damage(data: bytearray, file: Path, chance: random.Random) -> None:
    how = chance.choice(("flip", "flip", "cut", "lengthen", "remove"))
    at = chance.randrange(len(data))
    if how == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del data[at:]
    elif how == "lengthen":
        data += bytes(chance.randint(1, 9))
    file.write_bytes(data)
    if how == "remove":
        file.unlink()


@pytest.mark.parametrize("times", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_random_damage_is_noticed_named_and_changes_nothing(times, tmp_path):
    chance = random.Random(0)
    dumped(tmp_path, steps=500)
    files = {
        file: file.read_bytes() for file in sorted(tmp_path.rglob("*.[jb][si][on]*"))
    }
    live = make(steps=500)
    live.extend(transitions(7))
    before = live.storage[:].clone()
    for number in range(times):
        for target in (live, make(steps=500)):
            file, content = chance.choice([*files.items()])
            damage(bytearray(content), file, chance)
            with pytest.raises(CheckpointError) as error:
                target.loads(tmp_path)
            missing = file.name == "manifest.json" and "has no manifest.json" in str(
                error.value
            )
            assert str(file.relative_to(tmp_path)) in str(error.value) or missing, (
                number
            )
            file.write_bytes(content)
            if target is not live:
                assert (
                    len(target),
                    target.write_count,
                    target.storage.initialized,
                ) == (0, 0, False)
        assert live.write_count == 7
        assert_same(live.storage[:], before)


def dumped(path, **kwargs):
    rb = make(**kwargs)
    for number in range(3):
        step(rb, number)
    rb.dumps(path)
    return rb


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
@pytest.mark.parametrize("again", ["the next dump", "a dump after a load"])
def test_a_dump_writes_chunks_again_that_are_damaged_on_the_disk(
    damaged, again, tmp_path
):
    rb = dumped(tmp_path, steps=500)
    if again == "a dump after a load":
        rb = make(steps=500)
        rb.loads(tmp_path)
        for file in (tmp_path / "data").iterdir():  # as new files are
            os.utime(file, ns=(0, 0))
    for file in (tmp_path / "data").iterdir():
        damaged(file)
    rb.dumps(tmp_path)
    other = make(steps=500)
    other.loads(tmp_path)
    assert_same(other.storage[:], rb.storage[:])


def test_a_dump_keeps_the_files_of_sound_chunks(tmp_path):
    rb = dumped(tmp_path)
    files = {file: file.stat().st_ino for file in (tmp_path / "data").iterdir()}
    for _ in range(2):  # once compared, once remembered
        rb.dumps(tmp_path)
        found = {file: file.stat().st_ino for file in (tmp_path / "data").iterdir()}
        assert found == files


def test_a_manifest_is_damaged_wherever_it_is_cut_or_changed(tmp_path):
    rb = dumped(tmp_path)
    file = tmp_path / "manifest.json"
    whole = file.read_bytes()
    lengths = [*range(60), *range(60, len(whole), 301), len(whole) - 1]
    damaged = [whole[:length] for length in lengths]
    damaged += [b"?" + whole[1:], whole[:9] + b"?" + whole[10:]]
    for data in damaged:
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="is damaged or cut short"):
            make().loads(tmp_path)
    rb.dumps(tmp_path)  # over the last of them
    make().loads(tmp_path)


@pytest.mark.parametrize("when", ["bin", "manifest"])
def test_a_full_disk_leaves_only_the_previous_dump(when, tmp_path, monkeypatch):
    rb = dumped(tmp_path)
    before, files = rb.storage[:].clone(), sorted(tmp_path.rglob("*"))
    step(rb, 4)
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
    assert_same(again.storage[:], before)


@pytest.mark.parametrize(
    ("prepare", "match"),
    [
        (lambda path: None, "holds no dump: there is no such folder"),
        (
            lambda path: path.write_text("x"),
            "holds no dump: it is a file; a dump is a folder",
        ),
        (lambda path: path.mkdir(), "holds no dump: it has no manifest.json"),
        (
            lambda path: (path.mkdir(), (path / "manifest.json").write_text("{}")),
            "is not the manifest of a dump of rl",
        ),
        (
            lambda path: save_state(path, "RankSampler", {"x": 1}),
            "a dump of a RankSampler, expected one of a buf",
        ),
        (
            lambda path: theirs().dumps(path),
            "a TorchRL buffer wrote it: use ReplayBuffer.fr",
        ),
    ],
)
def test_errors_name_what_lies_where_a_dump_was_expected(prepare, match, tmp_path):
    prepare(tmp_path / "it")
    for read in (make().loads, open_checkpoint):
        with pytest.raises(CheckpointError, match=match):
            read(tmp_path / "it")


def theirs(lanes=0):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10, ndim=1 + bool(lanes)), batch_size=2
    )
    rb.extend(transitions(3, lanes))
    return rb


def test_what_is_not_ours_is_not_overwritten_but_a_damaged_dump_is(tmp_path):
    rb = make()
    (tmp_path / "manifest.json").write_text('{"name": "a web application"}')
    with pytest.raises(
        CheckpointError,
        match="It is not overwritten: choose another folder, or remove it",
    ):
        rb.dumps(tmp_path)
    file = tmp_path / "manifest.json"
    file.unlink()
    rb.dumps(tmp_path)
    file.write_bytes(file.read_bytes()[:-9])
    rb.dumps(tmp_path)
    make().loads(tmp_path)
    with pytest.raises(CheckpointError, match="it is a file; a dump is a folder"):
        rb.dumps(file)


def other_keys():
    rb = make()
    rb.extend(TensorDict({"x": torch.arange(5)}, [5]))
    return rb


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            lambda: make("rank"),
            "the dump has a ProportionalSampler as sampler, this buffer a RankSampler; rows_only",
        ),
        (lambda: make(lanes=2), r"the saved storage is \[20\] .*, this one \[40, 1\]"),
        (
            lambda: RolloutBuffer(20),
            "the dump has a RingWriter as writer, this buffer a RolloutWriter",
        ),
        (other_keys, "the saved rows have other keys, dtypes or shapes"),
    ],
)
def test_other_parts_and_other_keys_are_refused_and_change_nothing(
    other, match, tmp_path
):
    dumped(tmp_path)
    rb, expected = other(), other()
    with pytest.raises(CheckpointError, match=match):
        rb.loads(tmp_path)
    assert len(rb) == len(expected)
    if len(rb):
        assert_same(rb.storage[:], expected.storage[:])
        assert torch.equal(rb._rng.get_state(), expected._rng.get_state())


def test_odd_files_in_a_dump_are_refused(tmp_path):
    dumped(tmp_path)
    file = next((tmp_path / "data").glob("*.bin"))
    moved = file.rename(tmp_path / "moved")
    for place in (lambda: file.symlink_to(moved), lambda: os.mkfifo(file)):
        place()
        with pytest.raises(
            CheckpointError, match=r"bin (cannot be read|is not a plain file)"
        ):
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


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(node, dict):
        return [
            place
            for key in node
            for place in [(*path, key), *_places(node[key], (*path, key))]
        ]
    if isinstance(node, list):
        return [
            place
            for j in range(len(node))
            for place in [(*path, j), *_places(node[j], (*path, j))]
        ]
    return []


VALUES = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            -1,
            0,
            1,
            3,
            2**31,
            2**63,
            -(2**70),
            1e300,
            "",
            "x",
            "float64",
            [],
            {},
            [[]],
            "rows.bin",
        ]
    ),
    st.sampled_from(
        [
            {"$tensor": 0},
            {"$tensor": {}},
            {"$tensor": "x"},
            {"$tensor": None},
            float("nan"),
            {"$x": 1},
        ]
    ),
)


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
    max_examples=30,
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
    rb = dumped(path, sampler=sampler)
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
                target.extend(transitions(2))
