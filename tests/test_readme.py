"""What the README says can be run, and its test command is the one that CI takes."""

from __future__ import annotations

import json
import re
import shlex
from itertools import accumulate
from pathlib import Path

import pytest

from rlbuf_td import storages
from rlbuf_td.__main__ import COMMANDS, parser
from rlbuf_td.storages.layout import RowLayout
from tests.catalogue import SCHEMAS, transitions

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[str(number) for number in range(len(BLOCKS))])
def test_its_python_runs(block, capsys):
    exec(compile(block, "README.md", "exec"), {})
    if "print(rb)" in block:
        assert "1,000 of 100,000 rows" in capsys.readouterr().out


def commands() -> list[list[str]]:
    found = re.findall(r"python -m rlbuf_td (?!\{)([^`#\n]*)", README)
    return [shlex.split(arguments.split(";")[0]) for arguments in found]


def test_the_command_line_takes_every_command_that_it_names():
    assert {arguments[0] for arguments in commands()} == set(COMMANDS)
    for arguments in commands():
        assert parser().parse_args(arguments).command == arguments[0]


DOCUMENTS = [ROOT / "README.md", *(ROOT / ".github").glob("*.md"), *sorted((ROOT / "notebooks").glob("*.ipynb"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_file_and_section_that_a_document_links_to_is_there(path):
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    for target in re.findall(r"\]\((?!http)([^)]*)\)", text):
        if target.startswith("#"):
            assert target[1:] in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        else:
            assert (path.parent / target).stat().st_size <= 500_000


def test_every_file_that_it_names_is_there():
    for name in re.findall(
        r"`((?:tests|kernels|storages|samplers|writers|checkpoint|sharing)/[\w/]*\.py)`", README + CONTRIBUTING
    ):
        assert (ROOT / name).exists() or (ROOT / "rlbuf_td" / name).exists(), name


def test_the_row_that_the_storages_draw_is_the_row_that_is_stored():
    layout = RowLayout(transitions(SCHEMAS["halfcheetah"], 2), lead_dims=1)
    drawing = storages.__doc__ or ""
    (numbers, names) = re.findall(r"byte +0 ([ \d]*)\n.*\n *\|(.*)\| *\|\n", drawing)[0]
    assert [int(start) for start in numbers.split()] == list(accumulate(leaf.nbytes for leaf in layout.leaves))
    assert f"a row of {layout.row_bytes} bytes" in drawing
    drawn = [name.strip().removesuffix(".") for name in names.split("|")]
    for name, leaf in zip(drawn, layout.leaves, strict=True):
        assert ".".join(leaf.key).removeprefix("next." if "." not in name else "").startswith(name)


def test_its_commands_are_one_line_each_and_install_their_extra():
    for name, extra, ends in (("demo", "demo", "rlbuf_td demo"), ("tests", "tests", "pytest -n 2 --dist worksteal")):
        (command,) = re.findall(rf"<!-- {name} -->\n```sh\n(.*?)\n```", README, re.DOTALL)
        assert "\n" not in command
        assert f"'.[{extra}]'" in command
        assert command.endswith(ends)
