"""What importing the package costs, and what it promises."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pickle
import pydoc
import re
import shlex
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from doctest import DocTestFinder, DocTestRunner
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import rlbuf_td
from rlbuf_td import functional, storages
from rlbuf_td.__main__ import COMMANDS, parser
from rlbuf_td.diagnostics import plots
from rlbuf_td.storages.layout import RowLayout
from tests.catalogue import SCHEMAS, transitions

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip().splitlines()[-1]


def test_importing_it_brings_in_no_compiler_no_plots_and_no_environments():
    added = python(
        "import sys, torchrl.data; before = set(sys.modules); import rlbuf_td; "
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names), end=' '); "
        "import rlbuf_td.diagnostics.plots; print('matplotlib.pyplot' in sys.modules)"
    )
    assert added == "['rlbuf_td'] False"  # plots do not touch pyplot's global state


def functions_of(module: ModuleType) -> list[str]:
    own = inspect.getmembers(module, inspect.isfunction)
    return [
        name
        for name, thing in own
        if not name.startswith("_") and thing.__module__.startswith(module.__name__)
    ]


PUBLIC = [
    *((rlbuf_td, name) for name in rlbuf_td.__all__),
    *((functional, name) for name in functional.__all__),
    *((plots, name) for name in functions_of(plots)),
    (rlbuf_td.checkpoint, "open_checkpoint"),
]
CLASSES = [
    thing
    for name in rlbuf_td.__all__
    if isinstance(thing := getattr(rlbuf_td, name), type)
]


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=[name for _, name in PUBLIC])
def test_docstrings_have_an_example_and_name_each_argument_the_result_and_the_cost(
    module, name
):
    thing = getattr(module, name)
    assert ">>> " in thing.__doc__
    if isinstance(thing, type):
        arguments = (
            []
            if issubclass(thing, Exception)
            else list(inspect.signature(thing).parameters)
        )
        sections = [] if issubclass(thing, Exception) else ["Cost"]
    else:
        arguments, sections = (
            list(inspect.signature(thing).parameters),
            ["Args", "Returns", "Raises", "Cost"],
        )
    # Ray adds one to classes that it has run
    for argument in (name for name in arguments if not name.startswith("_")):
        assert re.search(
            rf"^ +.*\*{{0,2}}\b{argument}\b.*:", thing.__doc__, re.MULTILINE
        ), argument
    for section in sections:
        assert re.search(rf"^ *{section}:", thing.__doc__, re.MULTILINE), section


def test_public_methods_are_documented_and_stand_in_their_class():
    ours = {
        cls: None
        for thing in CLASSES
        for cls in thing.__mro__
        if cls.__module__.startswith("rlbuf_td")
    }
    for cls, method, thing in [
        (each, *item) for each in ours for item in vars(each).items()
    ]:
        if method.startswith("_"):
            continue
        if inspect.isroutine(thing) or isinstance(thing, (property, classmethod)):
            assert thing.__doc__, (cls, method)
        function = getattr(thing, "__func__", thing)  # of a class method
        if inspect.isfunction(function):
            assert function.__qualname__.startswith(f"{cls.__qualname__}."), (
                cls,
                method,
            )
            assert function.__module__ == cls.__module__, (cls, method)


@pytest.mark.parametrize(
    "method",
    ["sample", "extend", "update_tensordict_priority", "__setitem__", "set_at_"],
)
def test_methods_of_a_buffer_can_be_pickled(method):
    rb = rlbuf_td.ReplayBuffer(batch_size=2)
    copied = pickle.loads(pickle.dumps(getattr(rb, method)))
    assert (type(copied.__self__), copied.__func__) == (
        rlbuf_td.ReplayBuffer,
        getattr(rlbuf_td.ReplayBuffer, method),
    )


def test_help_shows_what_a_constructor_takes():
    assert "max_capacity: 'int', alpha: 'float'" in pydoc.render_doc(
        rlbuf_td.ProportionalSampler
    )
    for name in rlbuf_td.__all__:
        thing = getattr(rlbuf_td, name)
        if isinstance(thing, type) and not issubclass(thing, Exception):
            assert "args" not in inspect.signature(thing).parameters, name

    class Mine(rlbuf_td.UniformSampler):
        def __init__(self, mine: int) -> None:
            super().__init__()

    assert list(inspect.signature(Mine).parameters) == ["mine"]


def test_files_that_the_package_and_its_documents_name_exist():
    documents = (
        ROOT / "README.md",
        ROOT / "docs" / "CONTRIBUTING.md",
        *(ROOT / "rlbuf_td").rglob("*.py"),
    )
    text = "".join(path.read_text() for path in documents)
    named = {
        f"{name.replace('.', '/')}.py"
        for name in re.findall(r"-m (tests\.benchmarks\.\w+)", text)
    }
    assert len(named) >= 6
    named |= {f"notebooks/{name}" for name in re.findall(r"\b\d+_\w+\.ipynb", text)}
    assert not [name for name in named if not (ROOT / name).is_file()]


@pytest.mark.slow
def test_a_test_module_that_cannot_be_imported_fails(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("from rlbuf_td import no_such_name\n")
    options = "-p", "tests.conftest", "-c", ROOT / "pyproject.toml", "--rootdir"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "cannot be imported" in run.stdout
    assert run.returncode == pytest.ExitCode.INTERRUPTED


def test_everything_that_the_package_imports_is_declared():
    text = (ROOT / "pyproject.toml").read_text()
    declared = set(
        re.findall(
            r'"(\w+)', text[text.index("dependencies = [") : text.index("[tool.hatch")]
        )
    )
    trees = [ast.parse(path.read_text()) for path in (ROOT / "rlbuf_td").rglob("*.py")]
    for_checkers = {
        node
        for tree in trees
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    nodes = [
        node for tree in trees for node in ast.walk(tree) if node not in for_checkers
    ]
    names = [
        alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {
        name.partition(".")[0].replace("PIL", "pillow") for name in names
    } - sys.stdlib_module_names
    assert len(imported) > 10
    assert imported <= declared | {"triton"}  # torch depends on it where it has a wheel


def test_no_module_imports_what_imports_it() -> None:
    """Contracts of import-linter see circles of modules beside each other, not those of
    a package and its module.

    An operation of ``kernels/`` imports its own loops, ``cpu.py``, when it first needs
    them.
    """
    graph = pytest.importorskip("grimp").build_graph(
        "rlbuf_td", exclude_type_checking_imports=True
    )
    for package in {
        name.removesuffix(".cpu") for name in graph.modules if name.endswith(".cpu")
    }:
        graph.remove_import(importer=package, imported=f"{package}.cpu")
    circles = [
        (module, other)
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
        if graph.chain_exists(importer=other, imported=module)
    ]
    assert circles == []


# -- what is built from the sources can be installed and used, also where nothing can be
# written

SMOKE = """
import torch, rlbuf_td
from importlib.metadata import version
from tensordict import TensorDict

rb = rlbuf_td.ReplayBuffer(storage=rlbuf_td.PackedStorage(8), batch_size=4)
rb.extend(TensorDict({"x": torch.arange(10)}, [10]))
assert rb.sample()["x"].min() >= 2
assert version("rlbuf_td") == rlbuf_td.__version__
print(rlbuf_td.__file__)
"""


def run(*command: str, cwd: Path) -> str:
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
def test_wheel_and_source_archive_hold_all_files_and_work(tmp_path):
    pytest.importorskip("hatchling")
    run("-m", "hatchling", "build", "-d", str(tmp_path), cwd=ROOT)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    files = {
        str(path.relative_to(ROOT)) for path in (ROOT / "rlbuf_td").rglob("*.py")
    } | {"rlbuf_td/py.typed"}
    files |= {
        str(path.relative_to(ROOT)) for path in (ROOT / "rlbuf_td").rglob("*.mplstyle")
    }
    assert wheel.stat().st_size < 600_000
    with zipfile.ZipFile(wheel) as archive:
        assert {
            name for name in archive.namelist() if ".dist-info/" not in name
        } == files
    with tarfile.open(source) as archive:
        assert {"README.md", "LICENSE", *files, "notebooks/01_quick_start.ipynb"} <= {
            name.partition("/")[2] for name in archive.getnames()
        }
    for built in (wheel, source):
        folder = tmp_path / built.name.replace(".", "_")
        install = (
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            str(folder),
        )
        run(*install, str(built), cwd=tmp_path)
        assert Path(run("-c", SMOKE, cwd=folder).strip()).is_relative_to(folder)


READ_ONLY = "mount --make-rprivate / && mount -t tmpfs tmpfs $TMPDIR && mount -o remount,bind,ro / && "
EVERYTHING = """
import sys
import tarfile
import zipfile
from importlib import import_module
from pathlib import Path
import torch
from rlbuf_td.__main__ import main
from rlbuf_td import PackedStorage, ReplayBuffer
from tests.catalogue import SAMPLERS, numbered_rows

for name, make in SAMPLERS.items():
    rb = ReplayBuffer(storage=PackedStorage(40), sampler=make(40), batch_size=12)
    for step in range(3):
        rb.extend(numbered_rows(20, 20 * step))
        batch = rb.sample()
        rb.update_tensordict_priority(batch.set("td_error", torch.rand(batch.batch_size)))
assert main(["demo", "--steps", "1500", "--out", sys.argv[1] + "/out"]) in (0, 1)
assert main(["demo", "--steps", "1500"]) == 2  # the folder for its picture cannot be made
assert list(Path(sys.argv[1]).glob("rlbuf_td_*/*/*.nbc"))
"""


@pytest.mark.slow
def test_samplers_and_demo_run_without_home_on_read_only_files(tmp_path):
    names = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    }
    environment = names | {
        "HOME": "/nonexistent",
        "TMPDIR": str(tmp_path),
        "MPLCONFIGDIR": str(tmp_path),
    }

    def alone(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        shell = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            READ_ONLY + command,
            "sh",
            *arguments,
        ]
        return subprocess.run(
            shell, cwd=ROOT, env=environment, capture_output=True, text=True
        )

    if os.name != "posix" or alone("true").returncode:
        pytest.skip("needs the right to mount file systems")
    assert "Read-only" in alone("touch pyproject.toml").stderr
    done = alone(
        'exec "$@"',
        sys.executable,
        "-W",
        "error::RuntimeWarning",
        "-c",
        EVERYTHING,
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr


# -- what the README says can be run


README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "docs" / "CONTRIBUTING.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


STEPS = "range(2_000)"


@pytest.mark.parametrize(
    "block", BLOCKS, ids=[str(number) for number in range(len(BLOCKS))]
)
def test_its_python_runs(block):
    exec(compile(block.replace(STEPS, "range(110)"), "README.md", "exec"), {})


@pytest.mark.slow
def test_its_agent_learns(capsys):
    (block,) = (block for block in BLOCKS if STEPS in block)
    torch.manual_seed(0)
    exec(compile(block, "README.md", "exec"), {})
    assert float(capsys.readouterr().out) > 150


def commands() -> list[list[str]]:
    found = re.findall(r"python -m rlbuf_td (?!\{)([^`#\n]*)", README)
    return [shlex.split(arguments.split(";")[0]) for arguments in found]


def test_the_command_line_takes_every_command_that_it_names():
    assert {arguments[0] for arguments in commands()} == set(COMMANDS)
    for arguments in commands():
        assert parser().parse_args(arguments).command == arguments[0]


def text_of(path: Path) -> str:
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n".join(
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    )


DOCUMENTS = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_file_and_section_that_a_document_links_to_is_there(path):
    for target in re.findall(r"\]\((?!http)([^)]*)\)", text_of(path)):
        file, _, section = target.partition("#")
        place = path.parent / file if file else path
        assert place.stat().st_size <= 500_000
        if section:
            titles = re.findall(r"^#+ (.*)", text_of(place), re.MULTILINE)
            assert section in [
                re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
                for title in titles
            ]


def test_the_sampler_of_the_guide_draws_what_its_example_says():
    (source,) = re.findall(r'   ```python\n(   """.*?)   ```', CONTRIBUTING, re.DOTALL)
    names: dict[str, Any] = {"__name__": "newest"}
    exec(compile(textwrap.dedent(source), "CONTRIBUTING.md", "exec"), names)
    example, *_ = DocTestFinder().find(
        names["NewestSampler"], module=False, globs=names
    )
    assert DocTestRunner().run(example).failed == 0


# -- names in backticks

GUIDES = "README.md", "docs/CORE.md", "docs/CONTRIBUTING.md", "docs/CHANGELOG.md"
BASES = ROOT, ROOT / "rlbuf_td", ROOT / "docs"  # to which file names are relative
NEW = "newest", "NewestSampler"  # what an author of a sampler adds
MADE = "runs/", "dist/"  # by commands


def spans(text: str) -> list[str]:
    """Return what stands in backticks, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def alternatives(name: str) -> list[str]:
    """Return what a file name with ``{a,b}`` stands for."""
    match = re.search(r"\{([\w,]+)\}", name)
    if match is None:
        return [name]
    parts = match[1].split(",")
    return [name[: match.start()] + part + name[match.end() :] for part in parts]


def is_file_name(span: str) -> bool:
    return re.fullmatch(r"[\w./{},<>-]+(/|\.(py|md|rst|ipynb|toml))", span) is not None


@cache
def names_in_code() -> set[str]:
    """Return the identifiers of the code and of its strings, without docstrings."""
    settings = (ROOT / "pyproject.toml").read_text()
    names = {*sys.stdlib_module_names, *re.findall(r"[\w-]+", settings)}
    for folder in ("rlbuf_td", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            names |= {path.stem, path.parent.name}
            for node in ast.walk(ast.parse(path.read_text())):
                fields = (getattr(node, field, None) for field in ("id", "attr", "arg"))
                names |= {field for field in fields if isinstance(field, str)}
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.alias):
                    names |= {*node.name.split(".")}
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names |= {*re.findall(r"^\w+$", node.value)}
    return names | {name.lower() for name in names}  # CORE names constants so


@pytest.mark.parametrize("name", GUIDES)
def test_every_file_that_a_guide_names_is_there(name):
    files = [span for span in spans((ROOT / name).read_text()) if is_file_name(span)]
    assert files
    for file in files:
        if file in MADE or any(word in file for word in NEW):
            continue
        for path in alternatives(re.sub(r"<\w+>", "*", file)):
            assert any([*base.glob(path.rstrip("/"))] for base in BASES), path


@pytest.mark.parametrize("name", GUIDES)
def test_every_identifier_that_a_guide_names_is_in_the_code(name):
    known = names_in_code()
    identifiers = {
        word
        for span in spans((ROOT / name).read_text())
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", span) and not is_file_name(span)
        for word in span.partition("(")[0].split(".")
    }
    assert len(identifiers) > 20
    # single letters are sizes
    assert not {word for word in identifiers - known if len(word) > 1} - {*NEW}


def test_the_row_that_the_storages_draw_is_the_row_that_is_stored():
    layout = RowLayout(transitions(SCHEMAS["halfcheetah"], 2), lead_dims=1)
    drawing = storages.__doc__ or ""
    (numbers, names) = re.findall(r"byte +0 ([ \d]*)\n.*\n *\|(.*)\| *\|\n", drawing)[0]
    assert [int(start) for start in numbers.split()] == list(
        accumulate(leaf.nbytes for leaf in layout.leaves)
    )
    assert f"a row of {layout.row_bytes} bytes" in drawing
    drawn = [name.strip().removesuffix(".") for name in names.split("|")]
    for name, leaf in zip(drawn, layout.leaves, strict=True):
        assert (
            ".".join(leaf.key)
            .removeprefix("next." if "." not in name else "")
            .startswith(name)
        )


def test_its_commands_are_one_line_each_and_install_their_extra():
    for name, extra, ends in (
        ("demo", "demo", "rlbuf_td demo"),
        ("tests", "tests", "pytest -n 2 --dist worksteal"),
    ):
        (command,) = re.findall(
            rf"<!-- {name} -->\n```sh\n(.*?)\n```", README, re.DOTALL
        )
        assert "\n" not in command
        assert f"'.[{extra}]'" in command
        assert command.endswith(ends)
