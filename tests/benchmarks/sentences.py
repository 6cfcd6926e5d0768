"""Print sentences of the package's docstrings, drawn at random, for a reader to judge: clear at first sight, or not.

python -m tests.benchmarks.sentences --seed 0 --count 60 --context
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from pathlib import Path

import rlbuf_td

PACKAGE = Path(rlbuf_td.__file__).parent
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sentences_of(docstring: str) -> list[str]:
    """Return the prose sentences of a docstring: no examples, tables or section titles."""
    prose = re.sub(r"^ *>>> .*(\n.*\S.*)*", "", docstring, flags=re.MULTILINE)  # an example ends at an empty line
    prose = re.sub(r"::\n(\n+    .*)+", "", prose)  # a table or a picture
    prose = re.sub(r"^ *[A-Z]\w+: *$", "\n\n", prose, flags=re.MULTILINE)  # "Args:"
    prose = re.sub(r"^ *(\*{0,2}\w+(, \*{0,2}\w+)*: )", r"\n\n\1", prose, flags=re.MULTILINE)  # "alpha: ..."
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", prose))
    found = [sentence for each in paragraphs for sentence in re.split(r"(?<=[^.][.!?])\s+(?=[^a-z])", each)]
    return [sentence for sentence in found if len(sentence.split()) >= 3]


def heading(node: ast.AST, path: Path) -> str:
    """Return the line that a reader sees above a docstring: the file, and the signature."""
    where = path.relative_to(PACKAGE)
    if isinstance(node, ast.ClassDef):
        return f"{where}: class {node.name}({', '.join(map(ast.unparse, node.bases))})"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{where}: def {getattr(node, 'owner', '')}{node.name}({ast.unparse(node.args)}){result}"
    return f"{where}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default 0)")
    parser.add_argument("--count", type=int, default=60, help="number of sentences (default 60)")
    parser.add_argument("--list", nargs="+", metavar="FOLDER", help="print all sentences of these folders instead")
    parser.add_argument("--context", action="store_true", help="also print what precedes a sentence in its docstring")
    arguments = parser.parse_args()
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for member in owner.body:
                member.owner = f"{owner.name}."  # type: ignore
        for node in (node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)):
            before, where = "", heading(node, path)
            for sentence in sentences_of(ast.get_docstring(node) or ""):
                found.append(f"{where}\n" + (f"    [{before.strip()}]\n" if arguments.context and before else ""))
                found[-1] += f"    {sentence}"
                before = f"{before} {sentence}"
    if arguments.list:
        chosen = [sentence for sentence in found if sentence.startswith(tuple(arguments.list))]
    else:
        chosen = random.Random(arguments.seed).sample(found, arguments.count)
    for number, sentence in enumerate(chosen, 1):
        print(f"{number}. {sentence}")
