"""Run TorchRL's own replay tests with this package's parts in place of TorchRL's.

    python tests/benchmarks/torchrl_suite.py CHECKOUT [--parts buffer uniform ...] [--only WORDS] [-n WORKERS]

``CHECKOUT`` is a clone of github.com/pytorch/rl at the installed version. Its ``test/`` is copied to a temporary
folder, where each import of a part is followed by an import of ours under the same name. Every test that passes with
TorchRL's part and does not pass with ours is printed with its error. Needs ``pytest-xdist``.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT, PLUGIN = Path(__file__).parents[2], "tests.benchmarks.torchrl_suite"
# TorchRL's names, and ours for each part.
PARTS: dict[str, dict[str, str]] = {
    "": {},
    "buffer": {"TensorDictReplayBuffer": "ReplayBuffer"},
    "uniform": {"RandomSampler": "UniformSampler"},
    "proportional": {"PrioritizedSampler": "ProportionalSampler"},
    "writer": {"RoundRobinWriter": "RingWriter", "TensorDictRoundRobinWriter": "RingWriter"},
    "storage": {"LazyTensorStorage": "PackedStorage"},
}
PARTS["all"] = {theirs: ours for part in list(PARTS)[:-1] for theirs, ours in PARTS[part].items()}  # but the storage
Outcome = tuple[str, str, str]  # name of a test, "passed" or what else, error


class SwapImports(ast.NodeTransformer):
    """Follow each import of a name from TorchRL by one of ours under that name, and replace ``module.Name``."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if not (node.module or "").startswith("torchrl.data"):
            return node
        ours = [
            ast.alias(self.names[each.name], each.asname or each.name) for each in node.names if each.name in self.names
        ]
        return [node, ast.ImportFrom("rlbuf_td", ours, 0)] if ours else node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id in ("samplers", "writers") and node.attr in self.names:
            return ast.parse(f"__import__('rlbuf_td').{self.names[node.attr]}", mode="eval").body
        return self.generic_visit(node)


def swap(path: Path, names: Mapping[str, str]) -> None:
    tree = SwapImports(names).visit(ast.parse(path.read_text()))
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)))


def run(options: argparse.Namespace, part: str, places: Iterable[int] = ()) -> dict[int, Outcome]:
    """Run all tests, or those at some places in the order of collection, with a part of ours; return outcomes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copytree(options.checkout / "test", folder / "test")
        shutil.copy(options.checkout / "pytest.ini", folder)
        for path in (folder / "test" / "rb").glob("*.py"):
            swap(path, PARTS[part])
        log = folder / "log"
        log.touch()
        paths = os.pathsep.join([str(ROOT), str(folder / "test"), os.environ.get("PYTHONPATH", "")])
        own = {"PYTHONPATH": paths, "SUITE_LOG": str(log), "SUITE_PLACES": json.dumps(list(places))}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN, "-n", str(options.n)]
        with (folder / "output").open("w") as output:
            variables = os.environ | {"OMP_NUM_THREADS": "1"} | own
            subprocess.run(
                [*command, "-k", options.only, "test/rb"], cwd=folder, env=variables, stdout=output, check=False
            )
        found: dict[int, Outcome] = {}
        for place, *outcome in map(json.loads, log.read_text().splitlines()):
            if place not in found or outcome[1] != "passed":  # a test has reports of its setup, call and teardown
                found[place] = tuple(outcome)
        return found


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Give each test its number, and leave out those not asked for: with ``-p``, this module is a plugin."""
    for place, item in enumerate(items):
        item.user_properties.append(("place", place))
    if places := json.loads(os.environ["SUITE_PLACES"]):
        items[:] = [items[place] for place in places]


def pytest_runtest_logreport(report: Any) -> None:
    if hasattr(report, "node"):  # from a worker, to the process that started the workers
        error = str(report.longrepr).splitlines()[-1] if report.failed else ""
        with open(os.environ["SUITE_LOG"], "a") as log:
            outcome = "passed" if hasattr(report, "wasxfail") else report.outcome
            print(json.dumps([dict(report.user_properties)["place"], report.nodeid, outcome, error]), file=log)


def compare(options: argparse.Namespace, part: str) -> None:
    ours = run(options, part)
    failed = [place for place, (_, outcome, _) in ours.items() if outcome == "failed"]
    theirs = run(options, "", failed) if failed else {}
    wrong = [place for place in failed if theirs[place][1] == "passed"]
    passed = sum(outcome == "passed" for _, outcome, _ in ours.values())
    print(f"{part}: {passed:,} pass of {passed + len(wrong):,} that pass with TorchRL's", flush=True)
    for place in sorted(wrong):
        print(f"  {ours[place][0].removeprefix('test/rb/')}: {ours[place][2]}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS)[1:], default=list(PARTS)[1:-1])
    parser.add_argument("--only", default="", help="as pytest's -k")
    parser.add_argument("-n", type=int, default=2, help="workers")
    options = parser.parse_args(arguments)
    options.checkout = options.checkout.resolve()
    for part in options.parts:
        compare(options, part)


if __name__ == "__main__":
    main()
