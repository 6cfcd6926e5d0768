"""What this package assumes of TorchRL's classes, checked against the installed
release.

If a new release of TorchRL breaks something, these tests should fail first. Each
assumption names the release in which it was seen: ``0.14.1``, or ``0.15`` for the
nightly of 2026-10-27 (with tensordict-nightly of 2026-10-26), which is checked only
where the installed release has that feature.
"""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl
from torchrl.data import replay_buffers as theirs

import rlbuf_td
from tests.backends import needs_torchrl
from tests.catalogue import numbered_rows

PACKAGE = Path(rlbuf_td.__file__).parent
HERE = f"TorchRL {torchrl.__version__}"
OLD, NEW = "0.14.1", "0.15 (nightly of 2026-10-27)"

#: Private attributes of TorchRL's objects that this package reads, sets or overrides:
# part, names, seen in, reader.
ATTRIBUTES: list[tuple[str, str, str, str]] = [
    (
        "storage",
        "_attached_entities _attached_entities_list _bump_mutation_revision",
        OLD,
        "torchrl_parts.py",
    ),
    ("storage", "_is_full _last_cursor_index", OLD, "torchrl_parts.py"),
    (
        "storage",
        "_max_size_along_dim0 _mutation_revision _rng _set_last_cursor _storage _len",
        OLD,
        "torchrl_parts.py",
    ),
    (
        "storage",
        "_len_value _mutation_revision_value _last_cursor_index_value",
        OLD,
        "packed.py: replaced by others",
    ),
    (
        "storage",
        "_empty _make_init_directory _total_shape",
        OLD,
        "packed.py: overridden",
    ),
    ("storage", "shared_init", OLD, "packed.py: collectors look for it"),
    ("sampler", "_rng _empty _remaining_batches", OLD, "torchrl_parts.py, wrapper.py"),
    ("writer", "_storage _rng _cursor _write_count _empty", OLD, "torchrl_parts.py"),
    ("writer", "_replicate_index", OLD, "writers/reservoir.py"),
    (
        "buffer",
        "_storage _sampler _writer _transform _sample_unit _rng _batch_size _dim_extend",
        OLD,
        "replay.py",
    ),
    (
        "buffer",
        "_replay_lock _futures_lock _write_lock _prefetch _prefetch_cap _prefetch_queue",
        OLD,
        "replay.py",
    ),
    (
        "buffer",
        "_service_shutdown _initialized _pin_memory _consume_after_n_samples",
        OLD,
        "replay.py",
    ),
    (
        "buffer",
        "_init _get_collate_fn _collate_fn",
        OLD,
        "replay.py: overridden or called",
    ),
    (
        "buffer",
        "_capture_prefetch_state _clear_prefetch_queue_locked _sample",
        OLD,
        "replay.py: overridden or called",
    ),
]
#: The same for features that only the next release has.
NEWER: list[tuple[str, str, str, str]] = [
    ("storage", "_share_memory_ _fork_safe", "data sets", "packed.py: overridden"),
    ("sampler", "requires_shared_state", "data sets", "common.py: overridden"),
    (
        "buffer",
        "_requires_shared_state",
        "data sets",
        "replay.py",
    ),
]

#: Parameters that this package passes by these names, or receives under them: method,
# parameters, seen in.
PARAMETERS: list[tuple[Callable[..., Any], str, str]] = [
    (theirs.Storage.set, "cursor data set_cursor", OLD),
    (theirs.Storage.get, "index", OLD),
    (theirs.Storage._max_size_along_dim0, "single_data batched_data", OLD),
    (theirs.Sampler.sample, "storage batch_size", OLD),
    (theirs.Sampler.can_sample, "storage batch_size", OLD),
    (theirs.Sampler.update_priority, "index priority storage", OLD),
    (theirs.Sampler.mark_update, "index storage", OLD),
    (theirs.RoundRobinWriter._empty, "empty_write_count", OLD),
    (theirs.RoundRobinWriter.__init__, "compilable track_generations", OLD),
    (theirs.ReplayBuffer.sample, "batch_size return_info", OLD),
    (theirs.TensorDictReplayBuffer.sample, "batch_size return_info include_info", OLD),
    (theirs.TensorDictReplayBuffer.extend, "tensordicts update_priority", OLD),
    (theirs.ReplayBuffer.can_sample, "batch_size", OLD),
    (theirs.ReplayBuffer.set_storage, "storage collate_fn", OLD),
    (theirs.ReplayBuffer.empty, "empty_write_count", OLD),
    (theirs.ReplayBuffer.share, "shared", OLD),
    (theirs.ReplayBuffer.shutdown, "timeout", OLD),
    (theirs.ReplayBuffer._capture_prefetch_state, "clone_queue", OLD),
    (theirs.SampleUnit.expand, "index info storage", OLD),
]


def make(cls: Any = theirs.TensorDictReplayBuffer, **kwargs: Any) -> Any:
    parts = {
        "storage": theirs.LazyTensorStorage(10),
        "writer": theirs.TensorDictRoundRobinWriter(),
        "batch_size": 2,
    }
    rb = cls(**parts | kwargs)
    rb.extend(numbered_rows(5))
    rb.sample()
    return rb


def has(part: Any, name: str) -> bool:
    return hasattr(type(part), name) or name in vars(part)


def check_attributes(part: str, names: str, seen: str, reader: str) -> None:
    rb = make()
    found = {
        "buffer": rb,
        "storage": rb.storage,
        "sampler": rb.sampler,
        "writer": rb.writer,
    }[part]
    for name in names.split():
        sentence = f"{HERE} has no {type(found).__name__}.{name}, seen in {seen}, on which {reader} relies"
        assert has(found, name), sentence


@pytest.mark.parametrize(("part", "names", "seen", "reader"), ATTRIBUTES)
def test_private_attributes_are_there(part, names, seen, reader):
    check_attributes(part, names, seen, reader)


@pytest.mark.parametrize(
    ("part", "names", "reader"),
    [
        pytest.param(part, names, reader, marks=needs_torchrl(feature))
        for part, names, feature, reader in NEWER
    ],
)
def test_private_attributes_of_the_next_release_are_there(part, names, reader):
    check_attributes(part, names, NEW, reader)


@pytest.mark.parametrize(
    ("method", "names", "seen"),
    PARAMETERS,
    ids=lambda x: getattr(x, "__qualname__", ""),
)
def test_methods_have_these_parameters(method, names, seen):
    known = inspect.signature(inspect.unwrap(method)).parameters
    for name in names.split():
        sentence = (
            f"{HERE}: {method.__qualname__} has no parameter {name!r}, seen in {seen}"
        )
        assert name in known or any(
            each.kind is each.VAR_KEYWORD for each in known.values()
        ), sentence


@needs_torchrl("waiting")
def test_sample_has_these_parameters_in_the_next_release():
    known = inspect.signature(
        inspect.unwrap(theirs.TensorDictReplayBuffer.sample)
    ).parameters
    ours = inspect.signature(rlbuf_td.ReplayBuffer.sample).parameters
    assert known.keys() <= ours.keys(), (
        f"{HERE}: ReplayBuffer.sample lacks {known.keys() - ours.keys()}"
    )


def imported_names() -> set[str]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == "torchrl.data.replay_buffers"
            ):
                found |= {alias.name for alias in node.names}
    return found


def test_imported_names_are_public_there():
    names = imported_names()
    assert len(names) > 10
    for name in names:
        assert hasattr(theirs, name), (
            f"{HERE} has no torchrl.data.replay_buffers.{name}, seen in {OLD}"
        )


def test_every_private_name_of_torchrl_parts_is_listed_here():
    # of torch
    listed = {
        name for _, names, *_ in [*ATTRIBUTES, *NEWER] for name in names.split()
    } | {"_modules"}
    tree = ast.parse((PACKAGE / "storages/torchrl_parts.py").read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    private = {name for name in used if name.startswith("_") and name.isidentifier()}
    assert private <= listed, f"list {private - listed} here"


# -- what constructors and updates do


def test_the_constructor_replaces_the_checkpointer_by_the_default_one():
    storage = theirs.LazyTensorStorage(10)
    storage.checkpointer = before = theirs.TensorStorageCheckpointer()
    make(storage=storage)
    assert storage.checkpointer is not before
    assert type(storage.checkpointer) is theirs.LazyTensorStorage._default_checkpointer


def test_only_a_prioritized_sampler_receives_priorities():
    class Own(theirs.RandomSampler):
        updates = 0

        def update_priority(self, *args: Any, **kwargs: Any) -> None:
            self.updates += 1

    rb = make(sampler=Own())
    rb.update_tensordict_priority(rb.sample().set("td_error", torch.ones(2)))
    assert not rb.sampler.updates, (
        f"{HERE}: samplers need no longer inherit from PrioritizedSampler, as in {OLD}"
    )


# -- what calls take and return


def test_capacity_counts_cells_and_indices_have_a_column_per_dim():
    rb = theirs.TensorDictReplayBuffer(
        storage=theirs.LazyTensorStorage(12, ndim=2), batch_size=4
    )
    index = rb.extend(numbered_rows(4, lanes=3))
    assert (rb.storage.max_size, rb.storage.shape, rb.dim_extend) == (
        12,
        torch.Size([4, 3]),
        1,
    )
    assert (index.shape, index.dtype) == (torch.Size([12, 2]), torch.int64)
    drawn, info = rb.sampler.sample(rb.storage, 4)
    assert isinstance(drawn, tuple)
    assert [batch.shape for batch in drawn] == [torch.Size([4])] * 2
    assert isinstance(info, dict)


def test_storages_count_changes_and_know_the_newest_step():
    storage = theirs.LazyTensorStorage(10)
    storage.set(range(3), numbered_rows(3))
    first = storage._mutation_revision
    storage.set(range(3, 5), numbered_rows(2))
    assert (storage._last_cursor_index, len(storage), storage._len) == (4, 5, 5)
    assert storage._mutation_revision > first
    for name in ("_len_value", "_mutation_revision_value", "_last_cursor_index_value"):
        assert hasattr(getattr(storage, name), "value"), name


def test_locks_and_their_replacement_by_share():
    rb = make()
    assert isinstance(rb._replay_lock, type(threading.RLock()))
    assert isinstance(rb._futures_lock, type(threading.RLock()))
    assert not rb.shared
    assert rb.share() is rb
    assert rb.shared
    assert isinstance(rb._write_lock, type(get_context().Lock()))


def test_shared_is_set_before_share_is_called_in_the_constructor():
    """``ReplayBuffer.share`` tells by ``_write_lock`` whether TorchRL's own ``share``
    was called."""
    found = []

    class Own(theirs.TensorDictReplayBuffer):
        def share(self, shared: bool = True) -> Any:
            found.append(
                (self.shared, "_write_lock" in vars(self), "_storage" in vars(self))
            )
            return super().share(shared)

    Own(storage=theirs.LazyTensorStorage(10), shared=True)
    assert found == [(True, False, False)]


def test_states_have_these_keys():
    state = make().state_dict()
    needed = {
        "_storage",
        "_sampler",
        "_writer",
        "_transforms",
        "_batch_size",
        "_rng",
        "_prefetch_state",
    }
    assert needed <= state.keys()
    assert state["_prefetch_state"] == {"version": 1, "capacity": 0, "queue": ()}


def test_dumps_have_these_files(tmp_path):
    rb = make(sampler=theirs.PrioritizedSampler(10, 0.6, 0.4))
    rb.dumps(tmp_path)
    for name in (
        "buffer_metadata.json",
        "storage/storage_metadata.json",
        "writer/metadata.json",
        "sampler/sampler_metadata.json",
        "sampler/sumtree.memmap",
    ):
        assert (tmp_path / name).is_file(), (
            f"{HERE} writes no {name}, which from_torchrl reads, as in {OLD}"
        )


def test_pickles_have_no_locks():
    assert {"_replay_lock", "_futures_lock"}.isdisjoint(make().__getstate__())


@needs_torchrl("data sets")
def test_data_sets_ask_for_these_methods():
    asked = []

    class Own(theirs.LazyTensorStorage):
        def _share_memory_(self) -> None:
            asked.append("share")
            super()._share_memory_()

    rb = make(storage=Own(10))
    rb.storage.as_dataset()
    dataset = rb.as_dataset()
    assert asked == ["share"] * 2
    _, state = dataset.__getstate__()["replay_buffer"]
    assert state["_storage"] is rb.storage


# -- each part takes every keyword of the part that it replaces; a new release may add
# some

#: A part, TorchRL's, and the keywords that have another name here, or (in words) none;
# the class's docstring says why.
REPLACED: list[tuple[type, type, dict[str, str]]] = [
    (rlbuf_td.PackedStorage, theirs.LazyTensorStorage, {}),
    (rlbuf_td.PackedStorage, theirs.LazyMemmapStorage, {}),
    (rlbuf_td.UniformSampler, theirs.RandomSampler, {}),
    (rlbuf_td.MinibatchSampler, theirs.SamplerWithoutReplacement, {}),
    (rlbuf_td.ProportionalSampler, theirs.PrioritizedSampler, {}),
    (rlbuf_td.RingWriter, theirs.RoundRobinWriter, {}),
    (rlbuf_td.RingWriter, theirs.TensorDictRoundRobinWriter, {}),
    (rlbuf_td.HindsightSampler, theirs.HERReplayBuffer, {"end_key": "done_key"}),
    (
        rlbuf_td.SequenceSampler,
        theirs.SliceSampler,
        {
            "slice_len": "length",
            "num_slices": "batch_size over length",
            "end_key": "done_key",
            "strict_length": "boundary",
            "pad_output": "boundary",
            "span": "boundary",
            **dict.fromkeys(
                (
                    "end_keys",
                    "truncated_key",
                    "step_key",
                    "fragmented",
                    "ends",
                    "trajectories",
                ),
                "",
            ),
            # what is unnecessary
            **dict.fromkeys(("cache_values", "compile", "use_gpu"), ""),
        },
    ),
]


def keywords(cls: type) -> list[str]:
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.kind not in kinds]


@pytest.mark.parametrize(
    ("ours", "other", "renamed"), REPLACED, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_part_takes_the_keywords_of_the_part_that_it_replaces(ours, other, renamed):
    mine, known = keywords(ours), keywords(other)
    assert set(renamed) <= set(known)  # TorchRL still has them
    for keyword in known:
        assert keyword in mine or keyword in renamed, (
            f"{ours.__name__} does not know {other.__name__}({keyword}=)"
        )
    for keyword, name in renamed.items():
        assert not name or name in mine or f"``{keyword}``" in ours.__doc__, keyword


def test_the_defaults_are_torchrls_and_positions_too():
    parameters = inspect.signature(rlbuf_td.ProportionalSampler).parameters
    other = inspect.signature(theirs.PrioritizedSampler.__init__).parameters
    assert list(parameters)[: len(other) - 1] == list(other)[1:]
    for name in ("eps", "reduction", "max_priority_within_buffer", "device"):
        assert parameters[name].default == other[name].default
