"""Compiled loops trust their arguments: no call gives them in the wrong order, nor many of them without names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "rlbuf_td"
FILES = sorted(PACKAGE.rglob("*.py"))
COMPILERS = {"kernel", "inlined", "compiled", "bare", "_contracted"}
MOST = 7  # parameters of a loop, and arguments without names of a call
#: Methods that return machine code, and the attributes that hold it.
RETURNED = {"compiled": "kernel", "compiled_update": "updates"}
Loops = dict[str, list[list[str]]]  # the parameters of the loops that a name may stand for


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def parameters(node: ast.AST) -> list[str] | None:
    """Return the parameters of a compiled loop, or the fields of a NamedTuple; None for all else."""
    if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
        return [ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)]
    if isinstance(node, ast.FunctionDef) and COMPILERS & {*map(ast.unparse, node.decorator_list)}:
        return [each.arg for each in node.args.args]
    return None


@cache
def loops_of(module: str) -> dict[str, list[str]]:
    """Return the loops and NamedTuples that a module of ``kernels/`` defines."""
    path = PACKAGE.parent / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if "kernels" not in path.parts or not path.exists():
        return {}
    found = ((node, parameters(node)) for node in tree_of(path).body)
    return {node.name: names for node, names in found if names is not None and hasattr(node, "name")}


def callees(path: Path, tree: ast.Module) -> Loops:
    """Return the loops under the names by which a file calls them: its own, imported ones and machine code."""
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    found: Loops = {name: [names] for name, names in loops_of(module).items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for each in node.names:
                name = each.asname or each.name
                if each.name in loops_of(node.module):
                    found[name] = [loops_of(node.module)[each.name]]
                inner = loops_of(f"{node.module}.{each.name}")
                found |= {f"{name}.{loop}": [names] for loop, names in inner.items()}
    return found


def loops_held_in(tree: ast.AST, known: Loops) -> Loops:
    """Return the loops that variables and attributes hold, as machine code or not."""
    found: Loops = {}

    def add(attribute: str, value: ast.expr) -> None:
        value = value.values[-1] if isinstance(value, ast.BoolOp) else value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "machine_code":
            value = value.args[0]
        if (name := ast.unparse(value)) in known or name in found:
            found.setdefault(attribute, []).extend((known | found)[name])

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for each, given in zip(target.elts, value.elts, strict=True):
                    add(ast.unparse(each), given)
            add(ast.unparse(target), value)
        if isinstance(node, ast.FunctionDef) and node.name in RETURNED:
            for part in ast.walk(node):
                if isinstance(part, ast.Return) and part.value is not None:
                    add(f"self.{RETURNED[node.name]}", part.value)
    return found


class Fault(NamedTuple):
    call: str
    what: str


def faults(call: ast.Call, loops: list[list[str]]) -> Iterator[Fault]:
    """Yield what is wrong with a call of one of several loops."""
    text = ast.unparse(call)
    if not loops:
        return
    if any(isinstance(each, ast.Starred) for each in call.args):
        yield Fault(text, "arguments without names in a splat")
    elif len(call.args) > MOST:
        yield Fault(text, f"{len(call.args)} arguments without names")
    elif not any(len(names) >= len(call.args) + len(call.keywords) for names in loops):
        yield Fault(text, "too many arguments")
    ends = [ast.unparse(each).split(".")[-1] for each in call.args]
    for names in loops:
        given = [name if name in names else name.removesuffix("_at") for name in ends]
        in_place = {name for name, wanted in zip(given, names, strict=False) if name == wanted}
        for place, name in enumerate(given):
            if name in names and name not in in_place:
                yield Fault(text, f"{name} is parameter {names.index(name)}, not {place}")


def faults_of(path: Path, source: str | None = None) -> list[Fault]:
    tree = tree_of(path) if source is None else ast.parse(source)
    known = callees(path, tree)
    found = []
    for part in tree.body:  # an attribute is a loop of its class, if this class sets it
        bound = known | loops_held_in(tree, known) | loops_held_in(part, known)
        calls = (node for node in ast.walk(part) if isinstance(node, ast.Call))
        found += [fault for call in calls for fault in faults(call, bound.get(ast.unparse(call.func), []))]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arguments_of_compiled_loops_are_in_their_places(path):
    assert not faults_of(path)


@pytest.mark.parametrize("path", [path for path in FILES if "kernels" in path.parts], ids=str)
def test_compiled_loops_have_few_parameters(path):
    functions = (node for node in tree_of(path).body if isinstance(node, ast.FunctionDef))
    found = {function.name: len(parameters(function) or ()) for function in functions}
    assert not {name for name, count in found.items() if count > MOST and name != "count_steps"}  # by keywords only


HEAD = "from rlbuf_td.kernels.batch import cpu\nfrom rlbuf_td.kernels.batch.cpu import sample_rank as draw\n"


@pytest.mark.parametrize(
    ("call", "is_right"),
    [
        ("cpu.sample_rank(self.address, blank.targets, law, written, now)", True),
        ("cpu.sample_rank(blank.targets, self.address, law, written, now)", False),
        ("draw(address, targets, law, now, written)", False),
        ("draw(address, targets, law, now=now, written=written)", True),
        ("draw(address, targets, law, written, now, ranges)", False),
        ("draw(address, *given)", False),
        ("self.draw = machine_code(cpu.sample_rank)\nself.draw(address, targets, law, written, now)", True),
        ("self.draw = machine_code(cpu.sample_rank)\nself.draw(targets, address, law, written, now)", False),
        ("loop = draw\nself.draw = machine_code(loop)\nself.draw(targets, address, law, written, now)", False),
        ("a, self.draw = b, machine_code(cpu.sample_rank)\nself.draw(targets, address, law, written, now)", False),
    ],
)
def test_arguments_in_the_wrong_place_are_found(call, is_right):
    assert (not faults_of(PACKAGE / "samplers" / "rank.py", HEAD + call)) == is_right
