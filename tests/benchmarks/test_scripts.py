"""The benchmarks run and print what they measure; the faults of ``breaks.py`` can be made."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks import breaks, memory, mixtures, reopening

pytestmark = pytest.mark.slow


def test_rows_that_share_observations_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    memory.main(["--rows", "20000", "--wide", "2000", "--images", "600", "--rounds", "2"])
    found = {line.split()[0]: re.findall(r"(\w+) ([\d.]+)x", line) for line in capsys.readouterr().out.splitlines()}
    for case, most in (("HalfCheetah", 0.65), ("Humanoid", 0.53), ("Atari", 0.14)):
        measured = {name: float(ratio) for name, ratio in found[case]}
        assert measured.keys() == {"memory", "sample", "extend", "add"}
        assert measured["memory"] <= most


def test_loading_a_minari_set_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("h5py", reason="needs the extra minari")
    pytest.importorskip("minari", reason="needs the extra minari")
    from tests.benchmarks import minari_speed

    monkeypatch.setenv("MINARI_DATASETS_PATH", "")  # which the script replaces
    assert minari_speed.main(["--rows", "20000", "--rounds", "2"]) > 0
    assert capsys.readouterr().out.startswith("20,000 rows in episodes of 1,000, 3 MiB")


@pytest.mark.filterwarnings("ignore:the rows were reopened without their priorities")
def test_reopening_and_its_writes_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    reopening.main(["--rows", "3000", "--rounds", "2"])
    printed = capsys.readouterr().out
    assert len(re.findall(r"add [\d.]+ us, extend [\d.]+ us", printed)) == 3
    assert printed.count("reopening 3,000 rows") == 3


def test_mixtures_fresh_rows_and_recency_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    ratios = mixtures.main(["--rows", "4000", "--batch", "32", "--rounds", "2"])
    printed = capsys.readouterr().out
    assert ratios.keys() == mixtures.LIMITS.keys()
    assert "fresh over proportional against proportional: " in printed


def test_the_forty_faults_can_still_be_made() -> None:
    assert len(breaks.BREAKS) == 40
    assert not [fault for each in breaks.BREAKS if (fault := breaks.fault_of(each))]
    named = [name for each in breaks.BREAKS for name in each.tests.split() if name.startswith("tests/")]
    assert not [name for name in named if not (breaks.ROOT / name).exists()]
