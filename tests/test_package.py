"""What importing the package costs, and what it promises."""

from __future__ import annotations

import inspect
import pickle
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer

import rlbuf_td
from rlbuf_td import functional
from rlbuf_td.__main__ import main
from rlbuf_td.diagnostics import plots
from rlbuf_td.storages import notebooks

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
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
    return [name for name, thing in own if not name.startswith("_") and thing.__module__.startswith(module.__name__)]


PUBLIC = [
    *((rlbuf_td, name) for name in rlbuf_td.__all__),
    *((functional, name) for name in functional.__all__),
    *((plots, name) for name in functions_of(plots)),
    (rlbuf_td.checkpoint, "open_checkpoint"),
]
CLASSES = [thing for name in rlbuf_td.__all__ if isinstance(thing := getattr(rlbuf_td, name), type)]


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=[name for _, name in PUBLIC])
def test_docstrings_have_an_example_and_name_each_argument_the_result_and_the_cost(module, name):
    thing = getattr(module, name)
    assert ">>> " in thing.__doc__
    if isinstance(thing, type):
        arguments = [] if issubclass(thing, Exception) else list(inspect.signature(thing).parameters)
        sections = [] if issubclass(thing, Exception) else ["Cost"]
    else:
        arguments, sections = list(inspect.signature(thing).parameters), ["Args", "Returns", "Raises", "Cost"]
    for argument in (name for name in arguments if not name.startswith("_")):  # Ray adds one to classes that it has run
        assert re.search(rf"^ +.*\*{{0,2}}\b{argument}\b.*:", thing.__doc__, re.MULTILINE), argument
    for section in sections:
        assert re.search(rf"^ *{section}:", thing.__doc__, re.MULTILINE), section


def test_public_methods_are_documented_and_stand_in_their_class():
    ours = {cls: None for thing in CLASSES for cls in thing.__mro__ if cls.__module__.startswith("rlbuf_td")}
    for cls, method, thing in [(each, *item) for each in ours for item in vars(each).items()]:
        if method.startswith("_"):
            continue
        if inspect.isroutine(thing) or isinstance(thing, (property, classmethod)):
            assert thing.__doc__, (cls, method)
        function = getattr(thing, "__func__", thing)  # of a class method
        if inspect.isfunction(function):
            assert function.__qualname__.startswith(f"{cls.__qualname__}."), (cls, method)
            assert function.__module__ == cls.__module__, (cls, method)


@pytest.mark.parametrize("method", ["sample", "extend", "update_tensordict_priority", "__setitem__", "set_at_"])
def test_methods_of_a_buffer_can_be_pickled(method):
    rb = rlbuf_td.ReplayBuffer(batch_size=2)
    copied = pickle.loads(pickle.dumps(getattr(rb, method)))
    assert (type(copied.__self__), copied.__func__) == (rlbuf_td.ReplayBuffer, getattr(rlbuf_td.ReplayBuffer, method))


def test_help_shows_the_signature_of_a_method():
    text = pydoc.plain(pydoc.render_doc(rlbuf_td.ReplayBuffer.add))
    assert "add(self, data: 'Any') -> 'int | torch.Tensor'" in text


def test_help_shows_what_a_constructor_takes():
    assert "max_capacity: 'int', alpha: 'float'" in pydoc.render_doc(rlbuf_td.ProportionalSampler)
    for name in rlbuf_td.__all__:
        thing = getattr(rlbuf_td, name)
        if isinstance(thing, type) and not issubclass(thing, Exception):
            assert "args" not in inspect.signature(thing).parameters, name

    class Mine(rlbuf_td.UniformSampler):
        def __init__(self, mine: int) -> None:
            super().__init__()

    assert list(inspect.signature(Mine).parameters) == ["mine"]


def test_files_that_the_package_names_exist():
    text = "".join(path.read_text() for path in (ROOT / "rlbuf_td").rglob("*.py"))
    named = set(re.findall(r"tests/benchmarks/\w+\.py", text))
    named |= {f"notebooks/{name}" for name in re.findall(r"\b\d+_\w+\.ipynb", text)}
    assert len(named) >= 2
    assert not [name for name in named if not (ROOT / name).is_file()]


ENDINGS = [ending for name, ending in vars(notebooks).items() if name.isupper()]


def test_errors_name_notebooks_that_the_command_they_name_lists(capsys):
    assert main(["notebooks"]) == 0
    listed = capsys.readouterr().out
    for ending in ENDINGS:
        name = re.fullmatch(r" \(see (\d+_\w+\.ipynb): python -m rlbuf_td notebooks\)", ending)
        assert name is not None
        assert f"{name[1]}\n" in listed


@pytest.mark.parametrize(("error", "notebook"), [(rlbuf_td.SchemaError, "5_"), (rlbuf_td.CheckpointError, "7_")])
def test_errors_of_the_package_end_with_a_notebook(error, notebook):
    assert re.fullmatch(
        rf"what is wrong \(see {notebook}\w+\.ipynb: python -m rlbuf_td notebooks\)", str(error("what is wrong"))
    )


def test_parts_have_one_parent_of_torchrls():
    assert rlbuf_td.ReplayBuffer.__bases__ == (TensorDictReplayBuffer,)
    assert rlbuf_td.RolloutBuffer.__bases__ == (rlbuf_td.ReplayBuffer,)
    assert rlbuf_td.PackedStorage.__bases__ == (LazyTensorStorage,)
