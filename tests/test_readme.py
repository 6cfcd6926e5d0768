"""What the README says can be run, and its test command is the one that CI takes."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
import textwrap
from doctest import DocTestFinder, DocTestRunner
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbuf_td import storages
from rlbuf_td.__main__ import COMMANDS, parser
from rlbuf_td.storages.layout import RowLayout
from tests.catalogue import SCHEMAS, transitions

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "docs" / "CONTRIBUTING.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


STEPS = "range(2_000)"


@pytest.mark.parametrize(
    "block", BLOCKS, ids=[str(number) for number in range(len(BLOCKS))]
)
def test_its_python_runs(block):
    exec(compile(block.replace(STEPS, "range(110)"), "README.md", "exec"), {})


@pytest.mark.slow
def test_its_agent_learns(capsys):
    (block,) = (block for block in BLOCKS if STEPS in block)
    torch.manual_seed(0)
    exec(compile(block, "README.md", "exec"), {})
    assert float(capsys.readouterr().out) > 150


def commands() -> list[list[str]]:
    found = re.findall(r"python -m rlbuf_td (?!\{)([^`#\n]*)", README)
    return [shlex.split(arguments.split(";")[0]) for arguments in found]


def test_the_command_line_takes_every_command_that_it_names():
    assert {arguments[0] for arguments in commands()} == set(COMMANDS)
    for arguments in commands():
        assert parser().parse_args(arguments).command == arguments[0]


def text_of(path: Path) -> str:
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n".join(
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    )


DOCUMENTS = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_file_and_section_that_a_document_links_to_is_there(path):
    for target in re.findall(r"\]\((?!http)([^)]*)\)", text_of(path)):
        file, _, section = target.partition("#")
        place = path.parent / file if file else path
        assert place.stat().st_size <= 500_000
        if section:
            titles = re.findall(r"^#+ (.*)", text_of(place), re.MULTILINE)
            assert section in [
                re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
                for title in titles
            ]


def test_the_sampler_of_the_guide_draws_what_its_example_says():
    (source,) = re.findall(r'   ```python\n(   """.*?)   ```', CONTRIBUTING, re.DOTALL)
    names: dict[str, Any] = {"__name__": "newest"}
    exec(compile(textwrap.dedent(source), "CONTRIBUTING.md", "exec"), names)
    example, *_ = DocTestFinder().find(
        names["NewestSampler"], module=False, globs=names
    )
    assert DocTestRunner().run(example).failed == 0


# -- names in backticks

GUIDES = "README.md", "docs/CORE.md", "docs/CONTRIBUTING.md", "docs/CHANGELOG.md"
BASES = ROOT, ROOT / "rlbuf_td", ROOT / "docs"  # to which file names are relative
NEW = "newest", "NewestSampler"  # what an author of a sampler adds
MADE = "runs/", "dist/"  # by commands


def spans(text: str) -> list[str]:
    """Return what stands in backticks, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def alternatives(name: str) -> list[str]:
    """Return what a file name with ``{a,b}`` stands for."""
    match = re.search(r"\{([\w,]+)\}", name)
    if match is None:
        return [name]
    parts = match[1].split(",")
    return [name[: match.start()] + part + name[match.end() :] for part in parts]


def is_file_name(span: str) -> bool:
    return re.fullmatch(r"[\w./{},<>-]+(/|\.(py|md|rst|ipynb|toml))", span) is not None


@cache
def names_in_code() -> set[str]:
    """Return the identifiers of the code and of its strings, without docstrings."""
    settings = (ROOT / "pyproject.toml").read_text()
    names = {*sys.stdlib_module_names, *re.findall(r"[\w-]+", settings)}
    for folder in ("rlbuf_td", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            names |= {path.stem, path.parent.name}
            for node in ast.walk(ast.parse(path.read_text())):
                fields = (getattr(node, field, None) for field in ("id", "attr", "arg"))
                names |= {field for field in fields if isinstance(field, str)}
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.alias):
                    names |= {*node.name.split(".")}
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names |= {*re.findall(r"^\w+$", node.value)}
    return names | {name.lower() for name in names}  # CORE names constants so


@pytest.mark.parametrize("name", GUIDES)
def test_every_file_that_a_guide_names_is_there(name):
    files = [span for span in spans((ROOT / name).read_text()) if is_file_name(span)]
    assert files
    for file in files:
        if file in MADE or any(word in file for word in NEW):
            continue
        for path in alternatives(re.sub(r"<\w+>", "*", file)):
            assert any([*base.glob(path.rstrip("/"))] for base in BASES), path


@pytest.mark.parametrize("name", GUIDES)
def test_every_identifier_that_a_guide_names_is_in_the_code(name):
    known = names_in_code()
    identifiers = {
        word
        for span in spans((ROOT / name).read_text())
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", span) and not is_file_name(span)
        for word in span.partition("(")[0].split(".")
    }
    assert len(identifiers) > 20
    # single letters are sizes
    assert not {word for word in identifiers - known if len(word) > 1} - {*NEW}


def test_the_row_that_the_storages_draw_is_the_row_that_is_stored():
    layout = RowLayout(transitions(SCHEMAS["halfcheetah"], 2), lead_dims=1)
    drawing = storages.__doc__ or ""
    (numbers, names) = re.findall(r"byte +0 ([ \d]*)\n.*\n *\|(.*)\| *\|\n", drawing)[0]
    assert [int(start) for start in numbers.split()] == list(
        accumulate(leaf.nbytes for leaf in layout.leaves)
    )
    assert f"a row of {layout.row_bytes} bytes" in drawing
    drawn = [name.strip().removesuffix(".") for name in names.split("|")]
    for name, leaf in zip(drawn, layout.leaves, strict=True):
        assert (
            ".".join(leaf.key)
            .removeprefix("next." if "." not in name else "")
            .startswith(name)
        )


def test_its_commands_are_one_line_each_and_install_their_extra():
    for name, extra, ends in (
        ("demo", "demo", "rlbuf_td demo"),
        ("tests", "tests", "pytest -n 2 --dist worksteal"),
    ):
        (command,) = re.findall(
            rf"<!-- {name} -->\n```sh\n(.*?)\n```", README, re.DOTALL
        )
        assert "\n" not in command
        assert f"'.[{extra}]'" in command
        assert command.endswith(ends)
