"""Tests that need a CUDA device pass on a pretended one, which shows what the host does on the way of CUDA."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretended_cuda import why_not

ROOT = Path(__file__).parents[1]
_LEARNER = "tests/test_learner_device.py"

#: What a process runs, and how many tests it passes at least: a few less than there are.
PARTS: dict[str, tuple[list[str], int]] = {
    "rows and graphs": (["-m", "cuda", "tests/storages", "tests/capture"], 390),
    "learners and states": (["-m", "cuda", _LEARNER, "tests/checkpoint"], 160),
    "the others": (
        ["-m", "cuda", "tests", f"--ignore={_LEARNER}"]
        + [f"--ignore=tests/{folder}" for folder in ("storages", "capture", "checkpoint")],
        40,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_what_needs_a_device_passes_on_a_pretended_one(part):
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    arguments, least = PARTS[part]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.pretended_cuda",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            *arguments,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    summary = run.stdout[-10_000:] + run.stderr[-2_000:]
    assert run.returncode == 0, summary
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, summary
    assert int(passed[1]) >= least, summary
