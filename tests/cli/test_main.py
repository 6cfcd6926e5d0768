"""The command line: what it takes, and what it says when something is missing."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys

import gymnasium
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import plan
from rlbuf_td.__main__ import COMMANDS, _parser, main
from rlbuf_td.cli.notebooks import find_notebooks
from rlbuf_td.kernels import code_cache
from tests.narrow import assert_narrow


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
        ("demo --seeds 0", "--seeds: expected a whole number from 1"),
        ("demo --algo ppo --sampler rank", "--sampler is for --algo dqn"),
        ("demo --shards 3", "--shards is for --algo apex"),
        ("demo --out file", "--out: cannot write to file"),
        ("bench --picture chart.docx", "--picture chart.docx: expected a file name that ends in one of"),
        ("bench --picture file/chart.png", "--picture: cannot write to file"),
        ("bench --rows 1000 --batch 2000", "the buffers must hold a batch, 2000 rows or more"),
        ("bench --images 10", "the buffers must hold a batch, 256 rows or more"),
        ("doctor nowhere", "cannot examine nowhere"),
    ],
)
def test_a_command_that_cannot_work_says_why_and_exits_with_status_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    try:
        status: object = main(arguments.split())
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_says_what_a_command_is_for_and_gives_an_example_that_works(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert_narrow(text)
    assert "example: python -m rlbuf_td" in text
    if command:
        purpose, example, _ = COMMANDS[command]
        assert purpose[1:40] in " ".join(text.split())
        assert _parser().parse_args([command, *example.split()]).command == command


def test_without_a_command_help_is_printed(capsys):
    assert main([]) == 0
    said = capsys.readouterr()
    assert all(f"    {command}" in said.out for command in COMMANDS)
    assert not said.err


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gymnasium, "make", interrupt)
    assert main(["plan", "--env", "CartPole-v1", "--capacity", "10"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.slow
def test_output_may_be_cut_by_a_pipe():
    command = f"{shlex.quote(sys.executable)} -W ignore -m rlbuf_td notebooks | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == f"{find_notebooks()[0].parent}:\n"
    assert done.stderr == ""


def test_info_says_what_a_bug_report_needs(capsys):
    assert main(["info"]) == 0
    said = capsys.readouterr().out.replace(":\n  ", ": ")  # a long folder begins on a line of its own
    facts = dict(line.split(": ", 1) for line in said.splitlines() if not line.startswith(" "))
    assert facts["torch"] == torch.__version__
    assert facts["Python"].startswith(platform.python_version())
    assert facts["compiled loops"] == "in use"
    folder = code_cache.folder()
    assert folder is not None
    words = " ".join(said.partition("cache folder: ")[2].split())
    assert words.startswith(f"{folder} (writable, ")
    assert int(words.partition("writable, ")[2].split()[0]) > 0
    assert_narrow(said.replace(str(folder), "").replace(facts["rlbuf_td"], ""))


def test_info_needs_no_extra_and_no_compiler():
    without = "import sys; sys.modules.update(dict.fromkeys(['gymnasium', 'matplotlib', 'tqdm', 'rich']));"
    code = f"{without} from rlbuf_td.__main__ import main; sys.exit(main(['info']))"
    variables = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
    assert "compiled loops: off (NUMBA_DISABLE_JIT)" in done.stdout
    assert "cache folder: none" in done.stdout


def test_a_plan_of_long_keys_and_long_remedies_is_narrow(capsys):
    assert main(["plan", "--env", "CartPole-v1", "--capacity", "1e12"]) == 1
    assert_narrow(capsys.readouterr().out)
    leaf = torch.zeros(40, dtype=torch.uint8)
    row = TensorDict({"observation": {"the_camera_of_the_left_hand": {"image_in_the_dark": leaf}}}, [])
    needed = str(plan(row, 10**12))
    assert "('observation', 'the_camera_of_the_left_hand', 'image_in_the_dark')\n" in needed
    assert_narrow(needed)


def test_notebooks_are_listed_in_order_with_their_titles_and_copied(capsys, tmp_path):
    assert main(["notebooks"]) == 0
    folder, first, title, second, *others = capsys.readouterr().out.splitlines()
    assert folder == f"{find_notebooks()[0].parent}:"
    assert first == "  1_quick_start.ipynb"
    assert title.startswith("      Quick start")
    assert second == "  2_prioritized_replay.ipynb"
    assert_narrow("\n".join([title, *others]))
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
