"""The benchmark scripts run and print what they measure."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks import memory, trajectories


def test_rows_that_share_observations_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    memory.main(["--rows", "20000", "--wide", "2000", "--images", "600", "--rounds", "8"])
    found = {line.split()[0]: re.findall(r"(\w+) ([\d.]+)x", line) for line in capsys.readouterr().out.splitlines()}
    for case, most in (("HalfCheetah", 0.65), ("Humanoid", 0.53), ("Atari", 0.14)):
        measured = {name: float(ratio) for name, ratio in found[case]}
        assert measured.keys() == {"memory", "sample", "extend", "add"}
        assert measured["memory"] <= most
    assert [name for name, _ in found["cold"]] == ["plain", "shared"]


@pytest.mark.slow
def test_every_case_of_trajectories_is_timed_against_its_rivals(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("stable_baselines3")
    trajectories.main(["--rows", "20000", "--rows-of-cycle", "20000", "--rounds", "2"])
    lines = capsys.readouterr().out.splitlines()
    for case in trajectories.CASES:
        (start,) = (number for number, line in enumerate(lines) if line.startswith(f"{case}, 20,000 rows"))
        assert lines[start + 1].endswith(" us (1.00)")
        assert " us (" in lines[start + 2]
    assert sum(line.startswith("  TorchRL") for line in lines) == 3
