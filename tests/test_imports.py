"""Modules import each other in one direction; ``lint-imports`` holds the order of the rooms."""

from __future__ import annotations

import grimp


def imports(graph: grimp.ImportGraph) -> set[tuple[str, str]]:
    return {(each, other) for each in graph.modules for other in graph.find_modules_directly_imported_by(each)}


def test_no_module_imports_itself_by_way_of_others():
    graph = grimp.build_graph("rlbuf_td", cache_dir=None, exclude_type_checking_imports=True)
    circular = [f"{a} -> {b}" for a, b in imports(graph) if a in graph.find_upstream_modules(b)]
    assert sorted(circular) == []


def test_imports_for_type_checkers_stay_within_a_room():
    run = grimp.build_graph("rlbuf_td", cache_dir=None, exclude_type_checking_imports=True)
    for_types = imports(grimp.build_graph("rlbuf_td", cache_dir=None)) - imports(run)
    assert for_types
    assert not [f"{a} -> {b}" for a, b in for_types if a.split(".")[1] != b.split(".")[1]]
