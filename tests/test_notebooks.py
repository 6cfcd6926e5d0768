"""The notebooks are stored with the outputs of a run from top to bottom, and still
run."""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import os
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
from PIL import Image

nbformat = pytest.importorskip("nbformat", reason="needs the extra notebooks")
pytest.importorskip("nbclient", reason="needs the extra notebooks")
from nbclient import NotebookClient  # noqa: E402
from nbformat import NotebookNode  # noqa: E402
from nbformat.v4 import (  # noqa: E402
    new_code_cell,
    new_markdown_cell,
    new_notebook,
)

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
REFRESH = (
    "RLBUF_TD_RENDER=1 .venv/bin/python -m pytest tests/test_notebooks.py -m slow -k {}"
)


# -- executing notebooks, storing them so that diffs are small, and finding what is
# wrong

LARGEST_PICTURE = 60_000  # bytes
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# A short run adds this to a cell tagged "settings", which sets SEEDS (a tuple) and
# STEPS (a number, or a dict of them).
SHORTER = """
SEEDS = SEEDS[:1]
STEPS = {name: steps // 20 for name, steps in STEPS.items()} if isinstance(STEPS, dict) else STEPS // 20
"""
# Only the first run of an installation says this.
COMPILING = re.compile(r"^rlbuf_td is compiling its loops.*\n?", re.MULTILINE)
UNWANTED = {
    "a warning": r"\b\w*Warning\b: |\bWARNING\b",
    "a path of this machine": r"(?<![\w./:<~])/\w[\w.-]*/[\w.-]|\b[A-Z]:\\|site-packages",
    "an address in memory": r"\b0x[0-9a-f]{6,}",
}


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(cell: NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", ())


def shorten(notebook: NotebookNode) -> NotebookNode:
    """Return the notebook with few steps and without its checks, if it has a cell
    tagged "settings"."""
    if not any(tagged(cell, "settings") for cell in notebook.cells):
        return notebook
    notebook = deepcopy(notebook)
    notebook.cells = [cell for cell in notebook.cells if not tagged(cell, "checks")]
    for cell in notebook.cells:
        cell.source += SHORTER if tagged(cell, "settings") else ""
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Execute all cells in a folder; their outputs replace those of the notebook."""
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(
        notebook,
        timeout=3600,
        startup_timeout=600,
        resources=resources,
        record_timing=False,
        coalesce_streams=True,
    ).execute()


def tidy(notebook: NotebookNode) -> None:
    """Keep only what a reader sees of an executed notebook, and the digest of each
    cell's source."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in code_cells(notebook):
        kept = {
            name: value
            for name, value in cell.metadata.items()
            if name in ("jupyter", "tags")
        }
        cell.metadata = nbformat.from_dict(
            kept | {"source_digest": digest(cell.source)}
        )
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = COMPILING.sub("", output.text)
            if "image/png" in output.get("data", ()):
                output.data["image/png"] = _with_palette(output.data["image/png"])
        cell.outputs = [output for output in cell.outputs if output.get("text") != ""]


def _with_palette(picture: str) -> str:
    """Return a base64 PNG in at most 256 colours, which takes a third of the bytes."""
    small = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def faults(notebook: NotebookNode, refresh: str) -> list[str]:
    """Return what is wrong with a stored notebook; ``refresh`` is the command that
    stores it anew."""
    found = []
    for number, cell in enumerate(code_cells(notebook), 1):
        place = f"code cell {number} ({cell.source.partition(chr(10))[0]})"
        if cell.metadata.get("source_digest") != digest(cell.source):
            found.append(f"{place} was edited after its outputs were stored: {refresh}")
        if cell.execution_count != number:
            found.append(
                f"{place} was not executed from a fresh start, in order: {refresh}"
            )
        found += [
            f"{place} shows {what}"
            for output in cell.outputs
            for what in _unwanted(output)
        ]
    return found


def _unwanted(output: NotebookNode) -> Iterator[str]:
    if output.output_type == "error":
        yield f"an error: {output.ename}: {output.evalue}"
    if output.get("name") == "stderr":
        yield f"text on stderr: {output.text}"
    data = output.get("data", {})
    size = len(base64.b64decode(data.get("image/png", "")))
    if size > LARGEST_PICTURE:
        yield f"a picture of {size} bytes: at most {LARGEST_PICTURE}, so lower its dpi or its size"
    for kind in data.keys() - {"text/plain", "text/html", "text/markdown", "image/png"}:
        yield f"an output of type {kind}"
    for text in (
        output.get("text", ""),
        *(text for kind, text in data.items() if kind.startswith("text/")),
    ):
        for what, pattern in UNWANTED.items():
            if match := re.search(pattern, text):
                yield f"{what}: {text[max(0, match.start() - 40) : match.end() + 40]!r}"


def missing_pictures(notebook: NotebookNode) -> int:
    """Return how many pictures the code draws beyond those that are shown."""
    draws = [
        cell.source
        for cell in code_cells(notebook)
        if re.search(r"plot_|plt\.show\(\)", cell.source)
    ]
    shown = [
        output
        for cell in code_cells(notebook)
        for output in cell.outputs
        if "image/png" in output.get("data", ())
    ]
    return sum("import" not in source for source in draws) - len(shown)


# -- the notebooks

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each_notebook
def test_it_is_stored_as_it_was_executed(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert faults(notebook, REFRESH.format(path.stem)) == []
    assert missing_pictures(notebook) <= 0
    assert path.stat().st_size <= 500_000


@each_notebook
def test_its_asserts_stand_in_folded_cells_at_its_end(path):
    cells = nbformat.read(path, as_version=4).cells
    (heading,) = (
        number
        for number, cell in enumerate(cells)
        if cell.source.startswith("## Checks")
    )
    for cell in cells[heading + 1 :]:
        assert cell.metadata.tags == ["checks", "hide-input"]
        assert cell.metadata.jupyter.source_hidden
    bodies = [ast.parse(cell.source).body for cell in cells if cell.cell_type == "code"]
    last = bodies.pop()
    assert len(last) >= 3
    assert all(isinstance(statement, ast.Assert) for statement in last)
    assert not [
        node
        for body in bodies
        for each in body
        for node in ast.walk(each)
        if isinstance(node, ast.Assert)
    ]


@each_notebook
def test_it_begins_with_what_its_reader_will_be_able_to_do(path):
    beginning = nbformat.read(path, as_version=4).cells[0].source
    assert re.match(r"# .*\n\nAfter this notebook you can\n\n- ", beginning)


def minutes_to_read(cells: list[NotebookNode]) -> float:
    """Return how long cells take to read: 200 words, or 25 lines of code without
    imports and lone brackets, in a minute."""
    words = lines = 0
    for cell in cells:
        if cell.cell_type == "markdown":
            words += len(re.sub(r"\]\([^)]*\)", "]", cell.source).split())
            continue
        imports = {
            number
            for node in ast.parse(cell.source).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        lines += sum(
            re.search(r"\w", line) is not None and number not in imports
            for number, line in enumerate(cell.source.splitlines(), 1)
        )
    return words / 200 + lines / 25


@each_notebook
def test_it_is_read_in_a_quarter_of_an_hour(path):
    cells = nbformat.read(path, as_version=4).cells
    before_checks = [cell for cell in cells if not cell.source.startswith("## Checks")]
    read = [cell for cell in before_checks if not tagged(cell, "checks")]
    assert minutes_to_read(read) <= 15


@each_notebook
def test_its_settings_are_explained(path):
    cells = nbformat.read(path, as_version=4).cells
    if any(tagged(cell, "settings") for cell in cells):
        for name in ("`SEEDS`", "`STEPS`"):
            assert name in cells[0].source


def test_another_notebook_links_to_each_notebook():
    texts = {path: path.read_text() for path in NOTEBOOKS}
    for path in NOTEBOOKS:
        assert any(path.name in text for other, text in texts.items() if other != path)


def test_reading_takes_a_minute_for_200_words_or_25_lines():
    text = new_markdown_cell("word " * 399 + "[a](b c d e f)")
    code = new_code_cell("import a\nfrom b import (\n    c,\n)\n" + "call(\n)\n" * 50)
    assert minutes_to_read([text, code]) == 4.0


@each_notebook
@pytest.mark.slow
def test_it_runs_and_its_pictures_come_out(path, tmp_path):
    # Python 3.14 has no gymnasium_robotics that works, Python 3.10 no such Minari
    for name in ("gymnasium_robotics", "minari"):
        if f"import {name}" in path.read_text():
            pytest.importorskip(name)
    stored = nbformat.read(path, as_version=4)
    storing = "RLBUF_TD_RENDER" in os.environ
    notebook = stored if storing else shorten(stored)
    execute(notebook, tmp_path)
    assert missing_pictures(notebook) <= 0
    if storing:
        tidy(notebook)
        path.write_text(
            nbformat.writes(notebook).replace(str(tmp_path), ".") + "\n",
            encoding="utf-8",
        )
        assert (
            faults(nbformat.read(path, as_version=4), REFRESH.format(path.stem)) == []
        )


def executed(*outputs: NotebookNode, source: str = "1 + 1") -> NotebookNode:
    notebook = new_notebook(
        cells=[new_code_cell(source, execution_count=1, outputs=list(outputs))]
    )
    tidy(notebook)
    return notebook


@pytest.mark.parametrize("steps", ["2_000", "{'dqn': 2_000}"])
def test_a_notebook_with_settings_is_tested_with_few_of_them(steps):
    notebook = executed(source=f"SEEDS, STEPS = (0, 1, 2), {steps}")
    notebook.cells[0].metadata.tags = ["settings"]
    notebook.cells.append(new_code_cell("assert False", metadata={"tags": ["checks"]}))
    (cell,) = shorten(notebook).cells
    settings: dict[str, object] = {}
    exec(cell.source, settings)
    assert settings["SEEDS"] == (0,)
    assert settings["STEPS"] in (100, {"dqn": 100})
    assert len(notebook.cells) == 2
