"""Methods override what a base has: one that has lost its caller does nothing, and no type checker sees TorchRL's."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "rlbuf_td"

#: Names that only TorchRL's next release has, and two that notebooks call.
CALLED_ELSEWHERE = {"_fork_safe", "_increment_counter", "_requires_shared_state", "_reset_worker_state"}
CALLED_ELSEWHERE |= {"_repr_html_", "_repr_png_", "_share_memory_"}


def is_of_base(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"


def test_methods_override_what_a_base_has() -> None:
    """A private method that nothing calls, or a call of ``super()``, whose name no base has, has lost its caller."""
    pytest.importorskip("ray")  # which some modules import
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    named = {node.attr for node in nodes if isinstance(node, ast.Attribute) and not is_of_base(node)}
    strings = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    named |= {name for string in strings for name in re.findall(r"\b_\w+", string)} | CALLED_ELSEWHERE
    lost = []
    for path, tree in trees.items():
        for node in (each for each in tree.body if isinstance(each, ast.ClassDef)):
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
            of_bases = {name for base in getattr(import_module(module), node.name).__mro__[1:] for name in vars(base)}
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            private = {name for name in methods if re.match("_(?!_)", name)} - named
            calls = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and is_of_base(each)}
            lost += [f"{node.name}.{name}" for name in sorted((private | calls) - of_bases - CALLED_ELSEWHERE)]
    assert not lost
