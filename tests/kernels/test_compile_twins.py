"""Every Triton kernel passes the compiler, GPU or none: the interpreter takes what the compiler refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_KERNEL = re.compile(r"@triton\.jit(?:\(.*\))?\ndef (\w+)\(")
_LAUNCH = re.compile(r"\b(\w+)\[")


def kernels() -> set[str]:
    """Return what is launched in the twins' sources; functions that kernels call are not."""
    found = set()
    for path in (ROOT / "rlbuf_td").glob("kernels/*/cuda.py"):
        source = path.read_text()
        found |= {f"{path.stem}.{name}" for name in set(_KERNEL.findall(source)) & set(_LAUNCH.findall(source))}
    return found


@pytest.mark.slow
def test_every_kernel_becomes_machine_code():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.compile_twins"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {line.partition(":")[0] for line in done.stdout.splitlines()} == kernels()
    assert "Warning" not in done.stderr, done.stderr
