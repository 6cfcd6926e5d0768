"""Print sentences of the package's docstrings, drawn at random, for a reader to judge: clear at first sight, or not.

python -m tests.benchmarks.sentences --seed 0 --count 60
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default 0)")
    parser.add_argument("--count", type=int, default=60, help="number of sentences (default 60)")
    parser.add_argument("--list", nargs="+", metavar="FOLDER", help="print all sentences of these folders instead")
    arguments = parser.parse_args()
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED)):
            where = f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', 'module')}"
            found += [f"{where}\n    {sentence}" for sentence in sentences_of(ast.get_docstring(node) or "")]
    if arguments.list:
        chosen = [sentence for sentence in found if sentence.startswith(tuple(arguments.list))]
    else:
        chosen = random.Random(arguments.seed).sample(found, arguments.count)
    for number, sentence in enumerate(chosen, 1):
        print(f"{number}. {sentence}")
