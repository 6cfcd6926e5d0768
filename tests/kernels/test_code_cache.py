"""Compiled code is kept where there is room, and never runs for sources that have
changed."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlbuf_td.kernels
from rlbuf_td.kernels import code_cache
from rlbuf_td.kernels.code_cache import cached_njit, folder

ROOM = Path(rlbuf_td.kernels.__file__).parent
INNER = "from rlbuf_td.kernels.compiled import inlined\n\n@inlined\ndef inner(x):\n    return x + {}\n"
OUTER = """
from rlbuf_td.kernels.compiled import kernel
from rlbuf_td.kernels.inner import inner

@kernel
def outer(x):
    return inner(x)
"""


def copy_room(where: Path) -> Path:
    """Copy what the decorators need, to edit it."""
    room = where / "rlbuf_td" / "kernels"
    room.mkdir(parents=True)
    (room.parent / "__init__.py").touch()
    for name in ("__init__.py", "code_cache.py", "compiled.py", "strata.py"):
        shutil.copy(ROOM / name, room)
    return room


def start(where: Path, code: str, **variables: str) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    return subprocess.Popen(
        command,
        cwd=where,
        env=os.environ | variables,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


GO = """
import sys
from rlbuf_td.kernels.outer import outer
print("ready", flush=True)
sys.stdin.readline()
print(outer(1))
"""


def started_together(where: Path) -> tuple[list[str], int]:
    """Return what three processes print that start at once, and how many of them have
    compiled."""
    started = [start(where, GO, NUMBA_CACHE_DIR="") for _ in range(3)]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate() for process in started]
    compiled = sum("once per installation" in errors for _, errors in said)
    return [out for out, _ in said], compiled


@pytest.mark.slow
def test_changed_sources_are_compiled_anew_by_one_of_the_processes_that_start(tmp_path):
    room = copy_room(tmp_path)
    (room / "outer.py").write_text(OUTER)
    (room / "inner.py").write_text(INNER.format(1))
    assert started_together(tmp_path) == (["2\n"] * 3, 1)
    assert started_together(tmp_path) == (["2\n"] * 3, 0)
    (room / "inner.py").write_text(INNER.format(2))
    assert started_together(tmp_path) == (["3\n"] * 3, 1)


@pytest.mark.slow
def test_code_for_a_class_that_is_gone_is_compiled_anew(tmp_path):
    room = copy_room(tmp_path)
    (room / "outer.py").write_text(
        "from rlbuf_td.kernels.compiled import kernel\n\n"
        "@kernel\ndef outer(pair):\n    return pair.x\n"
    )
    for name in ("Pair", "Couple"):
        (room / "inner.py").write_text(
            f"from typing import NamedTuple\n\nclass {name}(NamedTuple):\n    x: float\n"
        )
        code = (
            "from rlbuf_td.kernels import inner; from rlbuf_td.kernels.outer import outer; "
            f"print(outer(inner.{name}(2.0)))"
        )
        printed, errors = start(tmp_path, code, NUMBA_CACHE_DIR="").communicate()
        assert printed == "2.0\n", errors


@pytest.fixture
def new_place() -> Iterator[None]:
    for found in (code_cache._locator, folder):
        found.cache_clear()
    yield
    for found in (code_cache._locator, folder):
        found.cache_clear()


@pytest.mark.usefixtures("new_place")
def test_loops_run_where_their_folder_has_been_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "kept"))
    double = cached_njit()(lambda x: 2 * x)
    assert tmp_path in (folder() or ROOM).parents
    shutil.rmtree(tmp_path / "kept")
    (tmp_path / "kept").touch()  # in the place of the folder
    assert double(4) == 8


@pytest.mark.usefixtures("new_place")
def test_loops_run_where_nothing_can_be_kept(monkeypatch):
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        assert cached_njit()(lambda x: 2 * x)(4) == 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
def test_a_forked_process_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    double = cached_njit()(lambda x: 2 * x)
    process = multiprocessing.get_context("fork").Process(
        target=lambda: sys.exit(double(4))
    )
    process.start()
    process.join(120)
    assert process.exitcode == 8


TRAINING = """
import torch
from tensordict import TensorDict
from rlbuf_td import (EpisodeSampler, EpisodeStats, NStepSampler, PackedStorage, ProportionalSampler, RankSampler,
                      ReplayBuffer, RolloutBuffer, SequenceSampler, UniformSampler)
torch.manual_seed(0)

def rows(*shape):
    ends = {"reward": torch.randn(*shape, 1), "done": torch.rand(*shape, 1) < 0.1}
    entries = {"observation": torch.randn(*shape, 4), "state_value": torch.randn(*shape, 1)}
    after = {"observation": torch.randn(*shape, 4), "state_value": torch.randn(*shape, 1), "terminated": ends["done"]}
    return TensorDict(entries | {"next": ends | after}, shape)

def prioritized():
    return ProportionalSampler(200)

makers = [UniformSampler, prioritized, lambda: RankSampler(200), lambda: NStepSampler(prioritized(), 3, 0.9)]
makers += [lambda: SequenceSampler(prioritized(), 4), EpisodeSampler]
for make in makers:
    rb = ReplayBuffer(storage=PackedStorage(200, ndim=2), sampler=make(), batch_size=8, stats=EpisodeStats())
    for _ in range(15):
        rb.extend(rows(2, 10))
        batch = rb.sample()
        print(batch["index"].tolist(), batch["observation"].flatten().tolist())
        if "priority_weight" in batch.keys():
            rb.update_tensordict_priority(batch.set("td_error", torch.randn(batch.shape)))
    print(rb.compiled, rb.episode_stats.summary())
rollout = RolloutBuffer(8, 2, batch_size=4)
rollout.extend(rows(2, 8))
print([round(number, 4) for batch in rollout for number in batch["advantage"].flatten().tolist()])
"""


WITHOUT_NUMBA = """
import sys
import warnings
sys.modules.update(dict.fromkeys(("numba", "llvmlite")))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import rlbuf_td
print(*(str(each.message) for each in caught if "numba" in str(each.message)), sep="|")
try:
    rlbuf_td.PackedStorage(8, share_next=True)
except RuntimeError as error:
    print(error)
warnings.simplefilter("error")
"""


@pytest.mark.slow
def test_without_numba_one_warning_is_given_and_the_reference_runs(tmp_path):
    out, errors = start(tmp_path, WITHOUT_NUMBA + TRAINING).communicate()
    warning, refused = out.splitlines()[:2]
    assert re.fullmatch(
        r"numba is not installed for Python [\d.]+: rlbuf_td runs the same operations in torch.*",
        warning,
    )
    assert "|" not in warning
    assert re.match("share_next .*: install numba", refused)
    assert sum("[" in line for line in out.splitlines()) == 91, errors


@pytest.mark.slow
def test_without_the_compiler_the_reference_draws_the_same_batches(tmp_path):
    compiled, plain = (
        start(tmp_path, TRAINING, NUMBA_DISABLE_JIT=switch).communicate()[0]
        for switch in "01"
    )
    batches = [
        [line for line in text.splitlines() if "[" in line]
        for text in (compiled, plain)
    ]
    assert batches[0] == batches[1]
    assert len(batches[0]) == 91
