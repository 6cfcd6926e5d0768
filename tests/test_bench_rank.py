"""The benchmark of rank-based replay runs and says what it measured."""

from __future__ import annotations

import pytest

pytest.importorskip("rich")


def test_it_times_every_operation_and_every_adversary(capsys: pytest.CaptureFixture[str]) -> None:
    from rlbuf_td.cli.bench import rank

    rank.main(["--rows", "20000", "--rounds", "3", "--adversaries", "5000"])
    printed = capsys.readouterr().out
    assert "20,000 rows" in printed
    for operation in ("sample", "update", "extend 256", "extend 10000"):
        line = next(line for line in printed.splitlines() if line.startswith(f"  {operation} "))
        assert line.count(" us (") == 3
        assert "rank" in line
        assert "(1.00)" in line
    for name in rank.adversaries(5_000):
        assert f"  {name}" in printed
