"""Rules that keep the package readable: few rooms, torch's defaults not relied on, private names in one place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from torchrl.data.replay_buffers import LazyTensorStorage, Sampler, TensorDictReplayBuffer, Writer

PACKAGE = Path(__file__).parent.parent / "rlbuf_td"
FILES = sorted(PACKAGE.rglob("*.py"))


def test_there_are_few_rooms():
    rooms = {path.relative_to(PACKAGE).parts[0] for path in FILES}
    assert len(rooms) <= 13, sorted(rooms)


#: Functions of torch that make tensors on its default device, and those of them that make its default dtype.
FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
FACTORIES |= {"tensor", "zeros"}
OF_DEFAULT_DTYPE = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}


def missing_keywords(call: ast.Call) -> set[str]:
    """Return which of ``device`` and ``dtype`` a call leaves to torch's defaults."""
    function = ast.unparse(call.func).removeprefix("torch.")
    if function not in FACTORIES or not isinstance(call.func, ast.Attribute):
        return set()
    has_floats = any(isinstance(getattr(part, "value", None), float) for each in call.args for part in ast.walk(each))
    needed = {"device", "dtype"} if has_floats or function in OF_DEFAULT_DTYPE else {"device"}
    return needed - {keyword.arg or "" for keyword in call.keywords}


@pytest.mark.parametrize("path", [path for path in FILES if "cli" not in path.parts], ids=str)
def test_torchs_default_device_and_dtype_are_not_relied_on(path):
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    assert not {(call.lineno, ast.unparse(call)) for call in calls if missing_keywords(call)}


#: The files that read or set private attributes of objects other than ``self``, and the names of these attributes.
#: A file may also use private names that only a class of its own room has: TorchRL's classes have none of that name.
PRIVATE_NAMES = {
    # TorchRL's classes
    "storages/torchrl_parts.py": (
        "_attached_entities _bump_mutation_revision _cursor _empty _is_full _last_cursor_index _len _modules "
        "_max_size_along_dim0 _mutation_revision _rng _set_last_cursor _storage _write_count _writer"
    ),
    "buffers/flow.py": "_service_shutdown",
    "buffers/mixture_parts.py": "_futures_lock _sample _validate_prefetch_state",
    "buffers/prefetch.py": "_futures_lock _prefetch_executor",
    "buffers/replay.py": "_default_checkpointer",
    "buffers/writing.py": "_service_shutdown",
    "checkpoint/parts.py": (
        "_batch_size _capture_prefetch_state _consume_after_n_samples _locked _prefetch_cap "
        "_restore_prefetch_queue_locked _total_shape _validate_prefetch_state"
    ),
    "diagnostics/doctor/__init__.py": "_replay_lock _write_lock",  # of any buffer
    "diagnostics/health.py": "_sum_tree",
    "samplers/goal_env.py": "_env",
    # the buffer, which is in a room above or below
    "distributed/dumps.py": "_initialize",
    "distributed/shard.py": "_foreach_copy_ _initialize _write_priorities",
    "distributed/spec.py": "_initialize",
    "storages/packed.py": "_order_lost _refuse_checkpointer _rows_restored",
    "storages/writes.py": "_refuse_schema",
    # torch, TensorDict, numba and Python
    "checkpoint/manifest.py": "_metadata",
    "kernels/rows/table.py": "_replace",
    "kernels/batch/memory.py": "_C _cdata _dynamo _empty_strided_cpu _storage_Use_Count",
    "kernels/host_memory.py": "_C _len_torch_dispatch_stack",
    "kernels/threads.py": "_ZN2at15get_num_threadsEv",
    "kernels/code_cache.py": "_cache _data_name_pattern",
    "storages/rows/__init__.py": "_foreach_copy_ _version",
    "storages/rows/dedup.py": "_foreach_copy_",
    "storages/tensordict_fast.py": "_batch_size _device _td_dim_names _tensordict",
}
OWN = {"self", "cls", "super()"}
THEIRS = {name for kind in (TensorDictReplayBuffer, LazyTensorStorage, Sampler, Writer) for name in dir(kind)}


@cache
def names_of_room(room: Path) -> set[str]:
    """Return the names that the classes of a room define, and TorchRL's classes do not."""
    trees = [ast.parse(each.read_text()) for each in (room.rglob("*.py") if room.is_dir() else [room])]
    body = [each for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body]
    assigned = {ast.unparse(each.targets[0]) for each in body if isinstance(each, ast.Assign)}
    return (assigned | {each.name for each in body if isinstance(each, ast.FunctionDef)}) - THEIRS


def private_names(node: ast.AST, in_class: bool = False) -> Iterator[str]:
    """Yield the names of private attributes of other objects; a string counts in ``getattr`` and its relatives."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in OWN:
        yield node.attr
    if isinstance(node, ast.Call):
        function, *given = map(ast.unparse, [node.func, *node.args])
        if function == "partial" and given:
            function, *given = given
        by_object = function in ("getattr", "hasattr", "setattr", "delattr") and given[0] not in OWN
        if by_object or (function in ("attrgetter", "methodcaller") and not in_class):
            strings = (each.value for each in node.args if isinstance(each, ast.Constant))
            yield from (part for each in strings if isinstance(each, str) for part in each.split("."))
    for child in ast.iter_child_nodes(node):
        yield from private_names(child, in_class or isinstance(node, ast.ClassDef))


def is_private(name: str) -> bool:
    is_of_tuples = name in ("_asdict", "_fields")  # public names of a NamedTuple
    return name.startswith("_") and not name.startswith("__") and not is_of_tuples


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_attributes_are_named_in_their_one_place(path):
    allowed = PRIVATE_NAMES.get(str(path.relative_to(PACKAGE)), "").split()
    found = {*filter(is_private, private_names(ast.parse(path.read_text())))}
    assert found - names_of_room(PACKAGE / path.relative_to(PACKAGE).parts[0]) == {*allowed}


def is_of_base(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"


#: Names that only TorchRL's next release has, and two that notebooks call.
CALLED_ELSEWHERE = {"_fork_safe", "_increment_counter", "_requires_shared_state", "_reset_worker_state"}
CALLED_ELSEWHERE |= {"_repr_html_", "_repr_png_", "_share_memory_"}


def test_methods_override_what_a_base_has():
    """A private method that nothing calls, or a call of ``super()``, whose name no base has, has lost its caller."""
    pytest.importorskip("ray")  # which some modules import
    trees = [ast.parse(path.read_text()) for path in FILES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = {node.attr for node in nodes if isinstance(node, ast.Attribute) and not is_of_base(node)}
    strings = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    named |= {name for string in strings for name in re.findall(r"\b_\w+", string)} | CALLED_ELSEWHERE
    lost = []
    for path, tree in zip(FILES, trees, strict=True):
        for node in (each for each in tree.body if isinstance(each, ast.ClassDef)):
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
            of_bases = {name for base in getattr(import_module(module), node.name).__mro__[1:] for name in vars(base)}
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            private = {name for name in methods if is_private(name)} - named
            calls = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and is_of_base(each)}
            lost += [f"{node.name}.{name}" for name in sorted((private | calls) - of_bases - CALLED_ELSEWHERE)]
    assert not lost
