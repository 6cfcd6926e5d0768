"""Tests that need a CUDA device pass on a pretended one, which shows what the host does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretended_cuda import why_not

ROOT = Path(__file__).parents[1]
FOLDERS = ["storages", "capture", "checkpoint", "test_learner_device.py"]

#: What each process runs.
PARTS = {
    "storages": ["tests/storages"],
    "learners": ["tests/capture", "tests/checkpoint", "tests/test_learner_device.py"],
    "the others": ["tests", *(f"--ignore=tests/{name}" for name in FOLDERS)],
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_cuda_tests_pass_on_a_pretended_device(part):
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    options = ["-p", "tests.pretended_cuda", "-p", "no:cacheprovider", "--tb=short", "-m", "cuda and not slow"]
    command = [sys.executable, "-m", "pytest", *options, *PARTS[part]]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    summary = run.stdout[-10_000:] + run.stderr[-2_000:]
    assert run.returncode == 0, summary
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, summary
    assert int(passed[1]) >= 30, summary
