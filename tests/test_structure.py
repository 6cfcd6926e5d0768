"""Limits that keep the package readable: rooms, files and functions stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "rlbuf_td"
FILES = sorted(PACKAGE.rglob("*.py"))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) and first.end_lineno else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_there_are_few_rooms():
    rooms = {path.relative_to(PACKAGE).parts[0] for path in FILES}
    assert len(rooms) <= 13, sorted(rooms)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_are_short(path):
    assert len(path.read_text().splitlines()) <= 400
    long = {function.name: code_lines(function) for function in functions(path) if code_lines(function) > 40}
    assert not long


#: Functions of torch that make tensors on its default device, and those of them that make its default dtype.
FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
FACTORIES |= {"tensor", "zeros"}
OF_DEFAULT_DTYPE = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}


def missing_keywords(call: ast.Call) -> set[str]:
    """Return which of ``device`` and ``dtype`` a call leaves to torch's defaults."""
    function = ast.unparse(call.func).removeprefix("torch.")
    if function not in FACTORIES or not isinstance(call.func, ast.Attribute):
        return set()
    has_floats = any(isinstance(getattr(part, "value", None), float) for each in call.args for part in ast.walk(each))
    needed = {"device", "dtype"} if has_floats or function in OF_DEFAULT_DTYPE else {"device"}
    return needed - {keyword.arg or "" for keyword in call.keywords}


@pytest.mark.parametrize("path", [path for path in FILES if "cli" not in path.parts], ids=str)
def test_torchs_default_device_and_dtype_are_not_relied_on(path):
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    assert not {(call.lineno, ast.unparse(call)) for call in calls if missing_keywords(call)}
