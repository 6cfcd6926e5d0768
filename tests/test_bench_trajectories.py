"""The benchmark of what needs trajectories runs and says what it measured."""

from __future__ import annotations

import pytest

pytest.importorskip("rich")


def test_it_times_every_case_against_its_rivals(capsys: pytest.CaptureFixture[str]) -> None:
    from rlbuf_td.cli.bench import trajectories

    trajectories.main(["--rows", "20000", "--rows-of-cycle", "20000", "--rounds", "2"])
    lines = capsys.readouterr().out.splitlines()
    for case in trajectories.CASES:
        (start,) = (number for number, line in enumerate(lines) if line.startswith(f"{case}, 20,000 rows"))
        assert lines[start + 1].endswith(" us (1.00)")
        assert " us (" in lines[start + 2]
    assert sum(line.startswith("  TorchRL") for line in lines) == 3
