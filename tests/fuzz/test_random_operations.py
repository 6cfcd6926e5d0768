"""Random operations on all kinds of buffers, compared with a NumPy model; a failing list of operations is shortened.

Each list runs in a process of its own, so that Hypothesis also shortens lists that crash or hang.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.world import FORMS, OPERATIONS, SAMPLERS, World

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
EPISODES, LONGEST = 200, 60
_SECONDS = 120
_numbers = st.integers(0, 60)
_operations = st.lists(st.tuples(st.sampled_from(OPERATIONS), _numbers, _numbers), min_size=8, max_size=LONGEST)


def play(form: str, sampler: str, operations: list[tuple[str, int, int]], seed: int) -> None:
    """Do the operations in this process, and compare with the model after each."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchRL warns of another batch size, Python 3.12 of forks beside threads
        world = World(form, sampler, Path(folder))
        for number, (name, a, b) in enumerate(operations):
            try:
                getattr(world, name)(a, b)
                world.check()
            except BaseException as error:
                raise AssertionError(f"operation {number}, {name}({a}, {b}), over {form} rows, {sampler}") from error


def _reported(pipe: Any, *arguments: Any) -> None:
    try:
        play(*arguments)
    except BaseException:  # noqa: BLE001  the parent reports it
        pipe.send(traceback.format_exc())
        raise SystemExit(1) from None


@pytest.fixture(scope="module")
def compiled() -> None:
    """Load the compiled loops in this process, so that its children have them."""
    every = [(name, 3, 4) for name in ("add", "extend", "add", "sample", "update", "sample", "update", "refused")]
    for form in FORMS:
        play(form, "proportional", every, 0)
    for sampler in SAMPLERS:
        for form in ("plain", "lanes", "share_next"):
            play(form, sampler, every, 0)


@pytest.mark.slow
@settings(max_examples=EPISODES, deadline=None)
@given(st.sampled_from([*FORMS]), st.sampled_from([*SAMPLERS]), _operations, st.integers(0, 2**31))
def test_random_operations_agree_with_the_model(
    compiled: None, form: str, sampler: str, operations: list[tuple[str, int, int]], seed: int
) -> None:
    context = mp.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=_reported, args=(writing, form, sampler, operations, seed))
    process.start()
    writing.close()
    process.join(_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail(f"a call has not returned within {_SECONDS} s")
    told = reading.recv() if process.exitcode == 1 else ""
    assert process.exitcode == 0, told or f"the process ended with {process.exitcode}"
