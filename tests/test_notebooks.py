"""The notebooks run from top to bottom, say what must hold at their end, and are stored without outputs."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_it_is_stored_without_outputs(path):
    for cell in code_cells(path):
        assert cell.outputs == []
        assert cell.execution_count is None
        assert not cell.metadata
    nbformat.validate(nbformat.read(path, as_version=4))


def test_its_last_cell_asserts_what_it_has_shown(path):
    last = ast.parse(code_cells(path)[-1].source).body
    assert len(last) >= 3
    assert all(isinstance(statement, ast.Assert) for statement in last)


@pytest.mark.slow
def test_it_runs_and_its_pictures_come_out(path, tmp_path):
    if "gymnasium_robotics" in path.read_text():
        pytest.importorskip("gymnasium_robotics")  # Python 3.14 has none that works
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=1800, startup_timeout=600, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    drawn = [output for output in outputs if "image/png" in output.get("data", {})]
    draws = [cell.source for cell in notebook.cells if "plot_" in cell.source or "plt.show()" in cell.source]
    asked = sum("import" not in source for source in draws)
    assert len(drawn) >= asked > 0
