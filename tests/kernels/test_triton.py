"""Kernels for rows on a GPU, in Triton's interpreter: each against its reference, on
CPU tensors."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.cli import info
from rlbuf_td.kernels import dispatch, launches, self_check
from rlbuf_td.kernels.strata import masses, stratification_of
from rlbuf_td.kernels.sum_tree import SumTree
from rlbuf_td.kernels.sum_tree.blocks import set_blocks_
from rlbuf_td.storages.writes import Write
from tests.backends import forced
from tests.benchmarks import device as benchmark
from tests.catalogue import (
    SCHEMAS,
    Schema,
    assert_same,
    numbered_rows,
    reward_fn,
    transitions,
)
from tests.statistics import assert_follows

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels run on the GPU: tests/test_gpu.py", allow_module_level=True)

CPU = torch.device("cpu")
AGENTS_REWARD = ("next", "agents", "reward")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with forced("triton"):
        yield


def buffer(rows: int, sampler: Any, **options: Any) -> ReplayBuffer:
    storage = PackedStorage(rows, **options)
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=8)


def first_fast(*cases: Any) -> list[Any]:
    """Mark all cases but the first as slow: the interpreter takes a second for each."""
    return [
        cases[0],
        *(pytest.param(case, marks=pytest.mark.slow) for case in cases[1:]),
    ]


def test_the_self_check_passes():
    assert self_check.fault_on(CPU) == ""


FAULTS: dict[str, tuple[str, str, int]] = {
    "update priorities": ("sum_tree", "enter_", 0),
    "draw by priority": ("draws", "stamps_of", 0),
    "sum rewards": ("wrappers", "sum_steps", 1),
    "list windows": ("wrappers", "expand", 2),
    "relabel goals": ("wrappers", "relabel_", 0),
}


@pytest.mark.parametrize("name", first_fast(*FAULTS))
def test_a_kernel_that_differs_is_named_once_and_torch_runs(name, monkeypatch):
    """Of what a kernel returns, or of its first tensor, one element is changed."""
    room, function, part = FAULTS[name]
    module = importlib.import_module(f"rlbuf_td.kernels.{room}.triton")
    right = getattr(module, function)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        changed = args[0] if result is None else result
        changed = changed if torch.is_tensor(changed) else changed[part]
        changed.view(-1)[-1] = changed.view(-1)[-1] == 0
        return result

    monkeypatch.setattr(module, function, wrong)
    fault_on = self_check.fault_on
    monkeypatch.setattr(self_check, "fault_on", lambda device: fault_on(CPU))
    gpu = torch.device("cuda", 90 + [*FAULTS].index(name))
    fault = f"Triton's kernels do not {name} as torch does: rlbuf_td runs"
    with pytest.warns(RuntimeWarning, match=fault) as warned:
        assert dispatch.why_not_triton(gpu)
    assert len(warned) == 1
    monkeypatch.setattr(dispatch, "_forced", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not dispatch.uses_triton(gpu)


def test_info_says_which_kernels_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 80)
    for fault, words in {
        "": "in use: draw uniformly, read and write rows, update priorities, draw by "
        "priority, note episodes, sum rewards, list windows, relabel goals",
        "they are wrong": "off (they are wrong): the reference in torch runs",
    }.items():
        monkeypatch.setattr(info, "why_not_triton", lambda device, fault=fault: fault)
        assert dict(info.facts())["GPU kernels"] == words


def test_a_kernel_that_does_not_compile_is_named_with_the_first_line_of_its_error(
    monkeypatch,
):
    def read(*_: Any) -> None:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr("rlbuf_td.kernels.rows.triton.RowWords.read", read)
    wanted = "Triton cannot read and write rows (RuntimeError: no compiler)"
    assert self_check.fault_on(CPU) == wanted


def test_a_call_within_a_cuda_graph_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    rows = mock.Mock(is_cuda=True)
    with pytest.raises(RuntimeError, match="capture the learner's step alone"):
        launches.launch(mock.Mock(), (1,), rows)


def rows_of_lanes(steps: int, rows: int, lanes: int, sampler: Any) -> ReplayBuffer:
    """Return a buffer to whose lanes of ``steps`` cells ``rows`` rows are written
    twice."""
    options = {} if lanes == 1 else {"ndim": 2, "lanes": lanes}
    rb = buffer(steps * lanes, sampler, **options)
    for start in (0, rows):
        data = numbered_rows(rows * lanes, start * lanes)
        data["is_init"] = data["x"] % 7 == 0
        data[AGENTS_REWARD] = torch.sin(
            data["x"][:, None, None] + torch.arange(3.0).view(3, 1)
        )
        rb.extend(data if lanes == 1 else data.view(lanes, rows))
    return rb


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)
def test_every_schema_is_stored_byte_for_byte(schema: Schema) -> None:
    rows = transitions(schema, 3)
    storage = PackedStorage(3)
    storage.set(range(3), rows)
    assert_same(storage[torch.tensor([2, 0])], rows[[2, 0]])
    assert_same(storage[torch.tensor([1, 0, 2])[::2]], rows[[1, 2]])
    assert_same(storage[torch.tensor([[0, 1], [2, 0]]).T], rows[[[0, 2], [1, 0]]])


@pytest.mark.parametrize("rows", first_fast(5, 1, 9, 23))
@pytest.mark.parametrize("lanes", [1, 3])
def test_rows_are_those_that_torch_writes(rows, lanes):
    """One row, a ring that wraps, and more rows than there are cells."""
    every = torch.arange(9 * lanes)

    def written() -> tuple[Any, Any]:
        rb = rows_of_lanes(9, rows, lanes, ProportionalSampler(9 * lanes))
        if lanes == 1:
            rb.add(rb[0])
        rb.sampler.rule.check()
        return rb[:], rb.sampler.priority(every)

    found, priorities = written()
    with forced("torch"):
        wanted, expected = written()
    assert_same(found, wanted)
    assert torch.equal(priorities, expected)


def test_rows_of_other_strides_and_of_the_buffer_itself_are_written():
    rb = buffer(8, UniformSampler())
    data = TensorDict({"x": torch.arange(12.0).view(2, 6).T, "y": torch.arange(6)}, [6])
    rb.extend(data)
    rb.extend(rb[:4].flip(0))
    rb.extend(rb.storage[2:4])
    assert rb.chronological()["y"].tolist() == [4, 5, 3, 2, 1, 0, 2, 3]
    assert torch.equal(rb.chronological()["x"][2], torch.tensor([3.0, 9.0]))


def test_rows_beyond_two_gibibytes_are_found(tmp_path):
    from rlbuf_td.kernels.rows.triton import RowWords

    # a file with holes; the tensor is its begin, and the kernel reads behind it
    row_bytes, cell = 1 << 20, 3000
    memory = np.memmap(tmp_path / "rows", np.uint8, "w+", shape=(cell + 1) * row_bytes)
    memory[cell * row_bytes : cell * row_bytes + 8] = range(8)
    words = RowWords(np.array([(0, 8)]), CPU)
    rows = torch.from_numpy(memory[:16]).as_strided((1, 8), (row_bytes, 1))

    class Rows:
        """Claims to have all rows."""

        shape = cell + 1, 8
        device = CPU

        def __getattr__(self, name: str) -> Any:
            return getattr(rows, name)

    block = words.read(Rows(), torch.tensor([cell]))  # pyrefly: ignore [bad-argument-type]
    assert block[:8].tolist() == [*range(8)]


def uniform_rows(
    count: int, rows: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    from rlbuf_td.kernels.draws.triton import uniform_rows_

    out = torch.empty(count, dtype=torch.int64)
    uniform_rows_(out, rows, generator)
    return out


def uniforms(generator: torch.Generator, count: int) -> torch.Tensor:
    """Return the random numbers of a draw."""
    return uniform_rows(count, 2**53, generator).to(torch.float64) / 2**53


def tree_of(weight: torch.Tensor) -> SumTree:
    tree = SumTree.empty(len(weight))
    tree.weight[: len(weight)] = weight
    set_blocks_(tree.blocks, tree.weight)
    return tree


def draw(*arguments: Any) -> Any:
    from rlbuf_td.kernels.sum_tree import triton

    return triton.draw(*arguments)


SIZES = [1, 1023, 1024, 2500]


@pytest.mark.parametrize(
    ("size", "stratified", "norm"),
    [
        (size, stratified, ("buffer", "batch", None)[(i + stratified) % 3])
        for (i, size), stratified in product(enumerate(SIZES), (False, True))
    ],
)
def test_a_draw_is_that_of_cumulative_sums(size, stratified, norm):
    """One row, blocks that are full and that are not, and weights of 0 among and around
    the others."""
    weight = (torch.rand(size) - 0.5).clamp(min=0.0)
    weight[-1] = 1.0 if size == 1 else 0.0
    tree, batch = tree_of(weight), 4
    generator = torch.Generator().manual_seed(size)
    law = stratification_of(batch, stratified, 0.7, norm)
    flat, importance, _ = draw(tree, batch, generator, law, size, None)
    sums = weight.cumsum(0, dtype=torch.float64)
    uniform = uniforms(generator.manual_seed(size), batch)
    mass = masses(uniform, sums[-1], law.step)
    assert torch.equal(flat, torch.searchsorted(sums, mass, right=True))
    chosen = weight[flat].to(torch.float64)
    least = {
        "buffer": weight[weight > 0].min(),
        "batch": chosen.min(),
        None: sums[-1] / size,
    }
    wanted = (chosen / least[norm]).pow(-0.7).to(torch.float32)
    torch.testing.assert_close(importance, wanted, rtol=1e-6, atol=0.0)


@pytest.mark.slow  # a block takes milliseconds
def test_a_draw_finds_its_block_among_thousands():
    weight = torch.zeros(1024 * 1030)
    rows = torch.tensor([5, 1024 * 1023 + 7, 1024 * 1024, 1024 * 1029 + 1023])
    weight[rows] = 1.0
    law = stratification_of(4, True, 0.5, "buffer")
    flat, importance, _ = draw(tree_of(weight), 4, None, law, len(weight), None)
    assert torch.equal(flat.sort().values, rows)
    assert importance.tolist() == [1.0] * 4


def test_no_weight_at_all_draws_finite_numbers():
    law = stratification_of(2, True, 0.5, "buffer")
    flat, importance, _ = draw(tree_of(torch.zeros(5)), 2, None, law, 5, None)
    assert flat.tolist() == [0, 0]
    assert importance.isfinite().all()


@pytest.mark.parametrize(
    ("alpha", "dtype"), [(0.6, torch.float32), (0.0, torch.float64)]
)
def test_updates_are_those_of_torch(alpha, dtype):
    """Repeated rows, rows that are gone, rows out of range, -1, NaN and infinity."""
    index = torch.tensor([3, 3, -1, 59, 7, 7, 900, 12, 13, 3, 7, 20])
    td_error = torch.tensor(
        [1, -2, 9, 0.5, 4, torch.nan, 8, torch.inf, -0.0, 0.25, 9, 3], dtype=dtype
    )

    def update() -> ReplayBuffer:
        sampler = ProportionalSampler(60, alpha=alpha, min_priority=0.3)
        rb = buffer(60, sampler)
        rb.extend(numbered_rows(60))
        stamps = rb.storage.stamps(index.clamp(0, 59))
        rb.extend(numbered_rows(10, 60))  # rows 0 to 9 are others now
        stamps[9] = 63  # of the new row
        data = {"index": index, "td_error": td_error, "sampled_at": stamps}
        rb.update_tensordict_priority(TensorDict(data, [12]))
        rb.update_priority(index[:2], td_error[:2])
        sampler.rule.check()
        return rb

    rb = update()
    with forced("torch"):
        other = update()
    every = torch.arange(60)
    torch.testing.assert_close(
        rb.sampler.priority(every), other.sampler.priority(every), rtol=0, atol=0
    )
    weights = (each.sampler.tree.weight[:60] for each in (rb, other))
    torch.testing.assert_close(*weights, rtol=2.0**-23, atol=0.0)
    for name in ("refused_priorities", "stale_updates"):
        assert rb.health()[name] == other.health()[name]
    assert rb.sampler.default_priority == other.sampler.default_priority


@pytest.mark.slow
def test_a_load_goes_on_with_the_generator_of_the_state():
    rb = buffer(50, ProportionalSampler(50))
    rb.set_rng(torch.Generator().manual_seed(3))
    rb.extend(numbered_rows(50))
    state = rb.state_dict()
    before = rb.sample()
    rb.load_state_dict(state)
    assert torch.equal(rb.sample()["index"], before["index"])


@pytest.mark.slow
def test_settings_may_change_and_a_copy_goes_on():
    rb = buffer(30, ProportionalSampler(30))
    rb.extend(numbered_rows(30))
    rb.update_priority(torch.arange(30), torch.arange(30.0))
    rb.sampler.alpha, rb.sampler.beta = 0.9, 1.0
    assert rb.sample()["priority_weight"].max() <= 1.0
    other = copy.deepcopy(rb)
    for each in (rb, other):
        each.extend(numbered_rows(3))
        each.sample()
        each.sampler.rule.check()


@pytest.mark.parametrize(
    ("capacity", "dtype"),
    [
        (5, torch.int64),
        *(
            pytest.param(capacity, dtype, marks=pytest.mark.slow)
            for capacity, dtype in (
                *product((1, 200), (None, torch.int64)),
                *product([5], (None, torch.int32, torch.int16, torch.uint8)),
            )
        ),
    ],
    ids=str,
)
def test_episodes_are_noted_as_torch_notes_them(capacity, dtype):
    """Rings that wrap, writes of more rows than there are cells or than a block has,
    lanes that advance alone, breaks, and rows that an edit made stale."""
    generator = np.random.default_rng(capacity)
    lanes, writes = 3, []
    for count in (1, 1, 3, 70, 1, 130, 4, 450):
        flags = generator.random((2, count, lanes, 1)) < 0.1
        ids = generator.integers(0, 2, (count, lanes)).repeat(3, 0)[:count]
        alone = generator.integers(0, lanes, count)
        writes.append((count, *torch.from_numpy(flags), ids, alone))

    def numbers() -> list[torch.Tensor]:
        storage, after = PackedStorage(lanes * capacity, ndim=2, lanes=lanes), []
        for count, terminated, truncated, ids, alone in writes:
            data = TensorDict({"terminated": terminated, "truncated": truncated})
            data = TensorDict({"next": data}, [count, lanes])
            if dtype is not None:
                data["collector", "traj_ids"] = torch.from_numpy(ids).to(dtype)
            storage.advance(Write(data))
            storage.advance(Write(data[:, 0], lanes=torch.from_numpy(alone)))
            episodes = storage.episodes
            assert episodes is not None
            storage.check()
            live = torch.from_numpy(episodes.ring.count)
            for lane, rows in enumerate(live.tolist()):
                serials = episodes.ring.written[lane] - 1 - torch.arange(rows)
                after.append(episodes.numbers[lane, serials % capacity].clone())
            after.append(episodes.following.clone())
            episodes.end(int(alone[0]))
        return after

    noted = numbers()
    with forced("torch"):
        wanted = numbers()
    with forced("numba"):
        compiled = numbers()
    for here, there, third in zip(noted, wanted, compiled, strict=True):
        assert torch.equal(here, there)
        assert torch.equal(here, third)


@pytest.mark.parametrize("lanes", first_fast(3, 1))
def test_n_step_transitions_are_those_of_torch(lanes):
    """The rewards of agents, and a sum over more steps than an episode has."""
    cells = torch.arange(12 * lanes)

    def joined(n: int) -> TensorDict:
        sampler = NStepSampler(UniformSampler(), n, 0.9, reward_key=AGENTS_REWARD)
        rb = rows_of_lanes(12, 9, lanes, sampler)
        return sampler.read(rb.storage, cells, cells)

    for n, most in ((3, 3), (2**40, 9)):  # torch makes a column of each step
        batch = joined(n)
        with forced("torch"):
            assert_same(batch, joined(most))


WINDOWS: dict[str, dict[str, Any]] = {
    "pad": {"length": 5, "burn_in": 2},
    "one row": {"length": 1},
    "shift": {"length": 9, "burn_in": 1, "boundary": "shift"},
    "strict": {"length": 3, "boundary": "strict"},
    "across episodes": {"length": 9, "burn_in": 3, "across_episodes": True},
    "longer than a lane": {
        "length": 60,
        "across_episodes": True,
        "boundary": "shift",
    },
}


#: Steps of a ring, rows that are written twice to each lane, and lanes: rings that wrap,
# and two rows.
PLACES = first_fast((12, 8, 3), (50, 35, 3), (50, 1, 1))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", first_fast(*WINDOWS))
def test_windows_are_those_of_torch(kind, place):
    """The newest episode goes on."""
    steps, rows, lanes = place
    every = 1 + WINDOWS[kind]["length"] // 4
    anchors = torch.arange(0, min(2 * rows, steps) * lanes, every)

    def windows() -> TensorDict:
        sampler = SequenceSampler(UniformSampler(), **WINDOWS[kind])
        rb = rows_of_lanes(steps, rows, lanes, sampler)
        flat, info, batch = sampler.batch_of(rb.storage, anchors, {})
        return batch.update({"flat": flat, **info})

    batch = windows()
    with forced("torch"):
        assert_same(batch, windows())


GOALS: dict[str, dict[str, Any]] = {
    "future": {},
    "never": {"her_ratio": 0.0},
    "always": {"her_ratio": 1.0, "strategy": "final", "only_finished": True},
    "near": {"future_gamma": 0.7, "her_ratio": 1.0},
    "the next row": {"future_gamma": 0.0, "her_ratio": 1.0},
    "random": {"strategy": "random"},
    "all": {
        "strategy": {"future": 0.3, "final": 0.2, "episode": 0.3, "random": 0.2},
        "future_gamma": 0.99,
        "only_finished": True,
    },
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", first_fast(*GOALS))
def test_goals_are_those_of_torch(kind, place, monkeypatch):
    """The newest episode goes on."""
    steps, rows, lanes = place
    drawn = torch.arange(min(2 * rows, steps) * lanes)

    def relabelled() -> TensorDict:
        sampler = HindsightSampler(UniformSampler(), reward_fn, **GOALS[kind])
        rb = rows_of_lanes(steps, rows, lanes, sampler)
        rb.set_rng(torch.Generator().manual_seed(3))
        return sampler.read(rb.storage, drawn, drawn)

    batch = relabelled()
    numbers = uniforms(torch.Generator().manual_seed(3), len(drawn))
    monkeypatch.setattr(
        "rlbuf_td.samplers.hindsight.uniform_numbers", lambda *_: numbers
    )
    with forced("torch"):
        assert_same(batch, relabelled())


@pytest.mark.slow
def test_wide_goals_bytes_and_two_goals_are_copied():
    """Goals of more words than are copied at once, and of single bytes."""
    for goal in (
        torch.randn(12, 5, 9),
        torch.randint(256, (12, 133), dtype=torch.uint8),
    ):
        rows = numbered_rows(12)
        rows["desired_goal"] = torch.zeros_like(goal)
        rows["next", "desired_goal"] = torch.zeros_like(goal)
        rows["next", "achieved_goal"] = goal
        sampler = HindsightSampler(
            UniformSampler(),
            lambda batch: torch.zeros(len(batch)),
            her_ratio=1.0,
            strategy="final",
        )
        rb = buffer(12, sampler)
        rb.extend(rows)
        batch = rb.sample()
        wanted = goal[torch.where(batch["x"] < 7, 6, 11)]
        assert torch.equal(batch["desired_goal"], wanted)
        assert torch.equal(batch["next", "desired_goal"], wanted)


def test_goals_after_rows_are_lost_and_of_unlike_lanes_are_those_of_live_rows():
    """Where cells are holes, torch chooses."""
    sampler = HindsightSampler(
        UniformSampler(), reward_fn, her_ratio=1.0, strategy="random"
    )
    rb = buffer(12, sampler, ndim=2, lanes=3)
    rb.storage.advance(Write(numbered_rows(5), lanes=torch.tensor([0, 2, 2, 0, 2])))
    for _ in range(3):
        batch = rb.sample()
        assert bool(batch["relabeled"].all())
        assert batch["desired_goal"].max() < 5


def test_a_buffer_says_which_calls_have_kernels():
    wanted = {
        "add, extend, sample": NStepSampler(UniformSampler(), 2, 0.9),
        "add, extend, sample, update_tensordict_priority": SequenceSampler(
            HindsightSampler(ProportionalSampler(9), reward_fn), 2
        ),
        "add, extend; not sample: a RankSampler works with torch on cpu; not update_tensordict_priority: "
        "a RankSampler updates priorities with torch on cpu": RankSampler(9),
        "add, extend; not sample: a SequenceSampler works with torch on cpu": SequenceSampler(
            UniformSampler(), 2, boundary="strict"
        ),
    }
    for words, sampler in wanted.items():
        rb = buffer(9, sampler)
        rb.extend(numbered_rows(9))
        rb.sample()
        assert rb.compiled == words


@pytest.mark.slow
def test_calls_start_few_operations():
    samplers = {**benchmark.SAMPLERS}
    samplers.pop("by rank")
    counts = dict(benchmark.counts_of(50, 8, "cpu", samplers))
    assert counts == {
        "uniform, extend by 8": 3,
        "uniform, sample": 2,
        "proportional, extend by 8": 4,
        "proportional, sample": 2,
        "proportional, update priorities": 3,
        "3-step, extend by 8": 3,
        "3-step, sample": 3,
        "3-step, proportional, extend by 8": 4,
        "3-step, proportional, sample": 4,
        "windows, extend by 8": 3,
        # two of them set flags at the ends of windows
        "windows, sample": 5,
        "hindsight, extend by 8": 3,
        # two of them write the new rewards
        "hindsight, sample": 5,
    }


@pytest.mark.slow
def test_uniform_draws_follow_the_law():
    counts = uniform_rows(20_000, 11).bincount(minlength=11)
    assert_follows(counts, [1 / 11] * 11)
    assert uniform_rows(3, 2**40).max() > 2**32


COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlbuf_td.kernels.draws import triton as draws
from rlbuf_td.kernels.episodes import triton as episodes
from rlbuf_td.kernels.rows import triton as rows
from rlbuf_td.kernels.sum_tree import triton as tree
from rlbuf_td.kernels.wrappers import triton as wrappers

POINTERS = {
    "out": "*i64", "rows": "*fp32", "cells": "*i64", "table": "*i32", "weight": "*fp32",
    "leaves": "*i64", "blocks": "*fp64", "flat": "*i64", "importance": "*fp32",
    "stamp": "*i64", "magnitude": "*fp32", "index": "*i64", "td_error": "*fp32",
    "largest": "*fp32", "refused": "*i64", "stale": "*i64", "numbers": "*i32",
    "ends": "*i64", "taken": "*i64", "totals": "*fp32", "last": "*i64",
    "anchors": "*i64", "mask": "*i1", "burn_in_mask": "*i1", "first_rows": "*i1",
    "last_rows": "*i1", "drawn": "*i64", "owner": "*i64", "relabeled": "*i1",
    "flags": "*i64", "following": "*i64", "following_after": "*i64", "serials": "*i64",
}
SIZES = {"DRAWS": 256, "ROWS": 32, "WORDS": 128, "OTHERS": 256, "BLOCK": 1024, "NORM": 0}
SIZES |= {"SIZE": 4, "BYTES": 4, "WORD": tl.int32, "KIND": tl.int32}
of_tree = tree._draw, tree._set, tree._enter, tree._sum
of_wrappers = wrappers._sum, wrappers._expand, wrappers._relabel
of_rows = draws._draw, draws._stamp, rows._move, episodes._note
for kernel in *of_rows, *of_wrappers, *of_tree:
    for flag in True, False:
        kinds, constants = {}, {}
        for parameter in kernel.params:
            name = parameter.name
            if parameter.is_constexpr:
                kinds[name], constants[name] = "constexpr", SIZES.get(name, flag)
            else:
                kinds[name] = parameter.annotation_type or POINTERS[name]
        source = ASTSource(kernel, kinds, constexprs=constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    subprocess.run([sys.executable, "-c", COMPILE], check=True)
