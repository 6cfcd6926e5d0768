"""The command line: what it takes, and what it says when something is missing."""

from __future__ import annotations

import sys

import pytest

from rlbuf_td.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "module", "missing", "extra"),
    [
        (["demo"], "rlbuf_td.cli.demos.report", "tqdm", "demo"),
        (["bench", "--rows", "10"], "rlbuf_td.cli.bench.compare", "rich.console", "bench"),
        (["bench", "--picture", "unwritten.png"], "rlbuf_td.cli.bench.picture", "matplotlib.figure", "bench"),
        (["plan", "--env", "CartPole-v1", "--capacity", "10"], "rlbuf_td.diagnostics.memory_plan", "gymnasium", "demo"),
    ],
)
def test_a_missing_extra_is_named(arguments, module, missing, extra, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("rlbuf_td.cli.") or name == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(arguments) == 1
    assert f"'{missing}' is missing: pip install 'rlbuf_td[{extra}]'" in capsys.readouterr().err


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["play"])
    assert "invalid choice: 'play'" in capsys.readouterr().err
