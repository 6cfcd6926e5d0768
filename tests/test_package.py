"""What importing the package costs, and what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlbuf_td

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def test_importing_it_brings_in_no_compiler_no_plots_and_no_environments():
    added = python(
        "import sys, torchrl.data; before = set(sys.modules); import rlbuf_td; "
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    assert added == "['rlbuf_td']"


def test_public_names_are_documented_with_an_example():
    for name in rlbuf_td.__all__:
        thing = getattr(rlbuf_td, name)
        assert thing.__doc__, name
        if not (isinstance(thing, type) and issubclass(thing, Exception)):
            assert ">>>" in thing.__doc__, name


@pytest.mark.parametrize("path", sorted((ROOT / "rlbuf_td").rglob("*.py")), ids=str)
def test_torchrl_is_imported_by_its_public_folders_only(path):
    if {"demos", "bench"} & set(path.parts):
        return
    inner = re.findall(r"(?:from|import) (torchrl[\w.]*)", path.read_text())
    assert set(inner) <= {"torchrl.data", "torchrl.data.replay_buffers"}
