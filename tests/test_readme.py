"""What the README says can be run, and its test command is the one that CI takes."""

from __future__ import annotations

import re
from pathlib import Path

import rlbuf_td

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_its_python_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert "1,000 of 100,000 rows" in capsys.readouterr().out


def test_its_commands_are_one_line_each_and_install_the_extra_that_they_need():
    for name, extra, ends in (("demo", "demo", "-m rlbuf_td demo"), ("tests", "tests", "-m pytest")):
        (command,) = re.findall(rf"<!-- {name} -->\n```sh\n(.*?)\n```", README, re.DOTALL)
        assert "\n" not in command
        assert f"'.[{extra}]'" in command
        assert command.endswith(ends)


def test_it_names_every_public_name():
    for name in rlbuf_td.__all__:
        assert f"`{name}`" in README, name
