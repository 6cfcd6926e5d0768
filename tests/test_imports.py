"""Modules import each other in one direction; ``lint-imports`` holds the order of the rooms."""

from __future__ import annotations

import grimp


def test_no_module_imports_itself_by_way_of_others():
    graph = grimp.build_graph("rlbuf_td", cache_dir=None)  # imports for type checkers included
    circular = [
        f"{module} -> {imported}"
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
        if module in graph.find_upstream_modules(imported)
    ]
    assert sorted(circular) == []
