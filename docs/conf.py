"""Sphinx settings of the site: ``sphinx-build -W -c docs . build/docs``, from the
repository's root.

The site holds the README, an API page, the notebooks with their stored outputs, and the
notes for contributors.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import rlbuf_td

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(
    f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb")
)
PROJECT = [
    f"docs/{name}"
    for name in ("CHANGELOG", "CONTRIBUTING", "CORE", "BENCHMARKS", "SECURITY")
]
CONTENTS = {"Reference": ["docs/api"], "Notebooks": NOTEBOOKS, "Project": PROJECT}

project, release = "rlbuf_td", rlbuf_td.__version__
extensions = [
    f"sphinx.ext.{name}" for name in ("autodoc", "autosummary", "napoleon", "mathjax")
] + ["myst_nb"]
root_doc = "README"
include_patterns = ["README.md", "docs/**", "notebooks/*.ipynb"]
exclude_patterns = ["docs/_templates"]
templates_path = [str(ROOT / "docs/_templates")]
nitpicky = True
# annotations name types of other packages
nitpick_ignore_regex = [("py:(class|mod|exc|attr|data)", ".*")]
html_theme = "furo"
html_title = f"rlbuf_td {release}"
html_copy_source = False
nb_execution_mode = "off"
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
# pages of names that are gone
shutil.rmtree(ROOT / "docs/generated", ignore_errors=True)
suppress_warnings = ["autosummary.import_cycle"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Give the README the site's tables of contents."""
    if page == root_doc:
        for caption, pages in CONTENTS.items():
            source[0] += "\n".join(
                [
                    "",
                    "```{toctree}",
                    ":hidden:",
                    f":caption: {caption}",
                    *pages,
                    "```",
                    "",
                ]
            )


def skip_inherited(
    app: Sphinx, what: str, name: str, member: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out the members that other packages define, such as the methods of
    TorchRL's classes."""
    home = getattr(getattr(member, "fget", None) or member, "__module__", None) or ""
    return None if home.startswith("rlbuf_td") else True


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("autodoc-skip-member", skip_inherited)
    app.connect(
        "build-finished",
        lambda app, _: shutil.copy(
            app.outdir / "README.html", app.outdir / "index.html"
        ),
    )
