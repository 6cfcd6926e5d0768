"""The command line: what it takes, and what it says when something is missing."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from functools import partial

import gymnasium
import pytest
import torch

from rlbuf_td import PackedStorage
from rlbuf_td.__main__ import COMMANDS, OPERATIONS, _parser, main
from rlbuf_td.cli.bench import cases, compare, device, options, timing
from rlbuf_td.cli.bench.contenders import Ours, TorchRL, available
from rlbuf_td.cli.notebooks import find_notebooks
from rlbuf_td.kernels import code_cache


@pytest.mark.parametrize(
    ("arguments", "module", "missing", "extra"),
    [
        (["demo"], "rlbuf_td.cli.demos.report", "tqdm", "demo"),
        (["demo", "--algo", "apex"], "rlbuf_td.cli.demos.apex", "ray", "ray"),
        (["bench", "--rows", "10"], "rlbuf_td.cli.bench.compare", "rich.console", "bench"),
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
        ("plan --env CartPole-v1 --capacity 10 --device nothing", "cannot plan for CartPole-v1"),
        ("demo --env Nope", "--env Nope: Environment `Nope` doesn't exist"),
        ("demo --device nothing", "--device nothing: torch cannot use this device"),
        ("demo --env Pendulum-v1", "DQN needs an environment with discrete actions"),
        ("demo --steps 100", "--steps must be at least 1024"),
        ("demo --algo ppo --sampler rank", "--sampler is for --algo dqn"),
        ("demo --out file", "--out: cannot write to file"),
        ("bench --picture chart.docx", "--picture chart.docx: expected a file name that ends in one of"),
        ("bench --images 10", "the buffers must hold a batch, 256 rows or more"),
        ("bench --only options uniform", "options are timed alone"),
        ("bench --device meta", "expected cpu or cuda"),
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


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_of_each_command_works(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    purpose, example, _ = COMMANDS[command]
    assert purpose[1:40] in " ".join(capsys.readouterr().out.split())
    assert _parser().parse_args([command, *example.split()]).command == command


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
    assert f"{code_cache.folder()} (writable, " in " ".join(said.partition("cache folder: ")[2].split())


@pytest.mark.slow
def test_info_needs_no_extra_and_no_compiler():
    without = "import sys; sys.modules.update(dict.fromkeys(['gymnasium', 'matplotlib', 'tqdm', 'rich']));"
    code = f"{without} from rlbuf_td.__main__ import main; sys.exit(main(['info']))"
    variables = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
    assert "compiled loops: off (NUMBA_DISABLE_JIT)" in done.stdout
    assert "cache folder: none" in done.stdout


def test_notebooks_are_listed_in_order_with_their_titles_and_copied(capsys, tmp_path):
    assert main(["notebooks"]) == 0
    folder, first, title, second, *_ = capsys.readouterr().out.splitlines()
    assert (folder, first) == (f"{find_notebooks()[0].parent}:", "  1_quick_start.ipynb")
    assert title.startswith("      Quick start")
    assert second == "  2_prioritized_replay.ipynb"
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


# -- bench and train, run as a user runs them, only shorter

SIZES = ("--rows", "1000", "--images", "128", "--batch", "128", "--rounds", "2")


@pytest.mark.slow
def test_the_benchmark_prints_a_row_for_every_operation_and_draws_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "available", lambda: [Ours, TorchRL])  # JAX starts threads, and other tests fork
    monkeypatch.setattr(timing, "CALLS", 1)
    monkeypatch.setattr(cases, "SHAPES", ((8, 64), (32, 8), (1, 32)))
    monkeypatch.chdir(tmp_path)
    picture = tmp_path / "new" / "bench.png"
    assert main(["bench", *SIZES, "--picture", "new/bench.png"]) == 0
    printed = capsys.readouterr().out
    for words in ("1,000 rows of 167 bytes in 7 leaves", "128 rows of two 4 x 84 x 84 images", "a Dict of 12 leaves"):
        assert words in printed
    assert printed.count(" us ") >= len(OPERATIONS)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_each_option_is_timed_beside_the_plain_buffer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "CALLS", 1)
    storage = partial(PackedStorage, scratch_dir=tmp_path, share_next=True)
    monkeypatch.setitem(options.OPTIONS, "not compiled", partial(options.made, storage=storage))
    assert main(["bench", "--rows", "1000", "--batch", "16", "--rounds", "1", "--only", "options"]) == 0
    printed = capsys.readouterr().out
    for name in options.OPTIONS:
        (row,) = re.findall(rf"^{re.escape(name)} +\d.*$", printed, re.MULTILINE)
        assert row.removeprefix(name).count("x") >= 3
    assert "deduplicated rows are in a file" in " ".join(printed.split())


@pytest.mark.slow
def test_every_library_that_is_installed_is_timed():
    command = [sys.executable, "-m", "rlbuf_td", "bench", "--rows", "500", "--images", "0", "--rounds", "2", "--only"]
    done = subprocess.run(
        [*command, "uniform", "proportional", "update", "extend", "add", "--wide"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = [contender.name for contender in available()]
    assert [name in done.stdout for name in names] == [True] * len(names)
    assert "Flashbax" in names
    assert done.stdout.count("x)") >= 5 * 2 + 10


@pytest.mark.slow
def test_training_scripts_are_timed_and_sac_learns_the_same_weights(capsys):
    assert main(["train", "--rounds", "1", "--steps", "1100"]) == 0
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line for line in printed.splitlines() if "%" in line}
    assert set(lines) == {"dqn", "small-dqn", "sac", "ppo"}
    assert "equal" in lines["sac"]


@pytest.mark.parametrize("case", device.TIMINGS)
def test_what_is_timed_on_a_device_runs(case, monkeypatch):
    monkeypatch.setattr(device, "wall", lambda call, *_: call() is None or 2.0)
    found = [(what, value) for what, value, _ in case(torch.device("cpu"), 600, 0.0)]
    assert len(dict(found)) == len(found) > 0
