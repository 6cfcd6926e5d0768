"""The benchmark of rows that share observations runs and says what it measured."""

from __future__ import annotations

import re

import pytest


def test_it_measures_memory_time_and_cold_reads(capsys: pytest.CaptureFixture[str]) -> None:
    from rlbuf_td.cli.bench import memory

    memory.main(["--rows", "20000", "--wide", "2000", "--images", "600", "--rounds", "8"])
    found = {line.split()[0]: re.findall(r"(\w+) ([\d.]+)x", line) for line in capsys.readouterr().out.splitlines()}
    for case, most in (("HalfCheetah", 0.65), ("Humanoid", 0.53), ("Atari", 0.14)):
        measured = {name: float(ratio) for name, ratio in found[case]}
        assert measured.keys() == {"memory", "sample", "extend", "add"}
        assert measured["memory"] <= most
    assert [name for name, _ in found["cold"]] == ["plain", "shared"]
