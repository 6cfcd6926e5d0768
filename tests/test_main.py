"""The command line: what it takes, and what it says when something is missing."""

from __future__ import annotations

import sys

import pytest

from rlbuf_td.__main__ import COMMANDS, _parser, main
from rlbuf_td.cli.notebooks import find_notebooks


@pytest.mark.parametrize(
    ("arguments", "module", "missing", "extra"),
    [
        (["demo"], "rlbuf_td.cli.demos.report", "tqdm", "demo"),
        (["demo", "--algo", "apex"], "rlbuf_td.cli.demos.apex", "ray", "ray"),
        (["bench", "--rows", "10"], "rlbuf_td.cli.bench.compare", "rich.console", "bench"),
        (["bench", "--picture", "unwritten.png"], "rlbuf_td.cli.bench.picture", "matplotlib.figure", "bench"),
        (["plan", "--env", "CartPole-v1", "--capacity", "10"], "rlbuf_td.diagnostics.memory_plan", "gymnasium", "demo"),
    ],
)
def test_a_missing_extra_is_named(arguments, module, missing, extra, monkeypatch, capsys):
    loaded = dict(sys.modules)
    for name in [name for name in loaded if name.startswith("rlbuf_td.cli.") or name == module]:
        parent, _, child = name.rpartition(".")
        if hasattr(loaded[parent], child):  # another import changes it, to be put back
            monkeypatch.setattr(loaded[parent], child, loaded[name])
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(arguments) == 1
    assert f"'{missing}' is missing: pip install 'rlbuf_td[{extra}]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("play", "invalid choice: 'play'"),
        ("plan --env CartPole-v1 --capacity 1e30", "expected a whole number from 1 to 1,000,000,000,000,000, got 1e30"),
        ("plan --env CartPole-v1 --capacity 10 --num-envs 0", "--num-envs: expected a whole number from 1"),
        ("plan --env CartPole-v1 --capacity 10 --device nothing", "cannot plan for CartPole-v1"),
        ("bench --rows -1", "--rows: expected a whole number from 1"),
        ("bench --rounds 0", "--rounds: expected a whole number from 1"),
        ("bench --batch 2.5", "--batch: expected a whole number from 1"),
        ("train --steps many", "--steps: expected a whole number from 1"),
        ("demo --env Nope", "--env Nope: Environment `Nope` doesn't exist"),
        ("demo --env nope:Nope-v1", "No module named 'nope'"),
        ("demo --device nothing", "--device nothing: torch cannot use this device"),
        ("demo --seed -1", "--seed: expected a whole number from 0"),
        ("demo --env Pendulum-v1", "DQN needs an environment with discrete actions"),
        ("demo --steps 100", "--steps must be at least 1024"),
        ("doctor nowhere", "cannot examine nowhere"),
    ],
)
def test_a_command_that_cannot_work_says_why_and_exits_with_status_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status: object = main(arguments.split())
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_says_what_a_command_is_for_and_gives_an_example_that_works(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert "example: python -m rlbuf_td" in text
    if command:
        purpose, example, _ = COMMANDS[command]
        assert purpose[1:40] in " ".join(text.split())
        assert _parser().parse_args([command, *example.split()]).command == command


def test_notebooks_are_listed_in_order_with_their_titles_and_copied(capsys, tmp_path):
    assert main(["notebooks"]) == 0
    first, title, second, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("1_quick_start.ipynb")
    assert title.startswith("    Quick start")
    assert second.endswith("2_prioritized_replay.ipynb")
    for _ in range(2):  # a second copy changes nothing
        assert main(["notebooks", str(tmp_path / "new")]) == 0
    copies = sorted((tmp_path / "new").iterdir())
    assert [path.read_bytes() for path in copies] == [path.read_bytes() for path in sorted(find_notebooks())]
    assert f"{len(copies)} notebooks are in {tmp_path / 'new'}" in capsys.readouterr().out


def test_an_edited_notebook_is_not_overwritten(capsys, tmp_path):
    (tmp_path / "4_hindsight.ipynb").write_text("mine")
    assert main(["notebooks", str(tmp_path)]) == 2
    assert "has other files of these names, which are kept: 4_hindsight.ipynb" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    assert main(["notebooks", str(tmp_path / "4_hindsight.ipynb")]) == 2
    assert "cannot copy to" in capsys.readouterr().err
