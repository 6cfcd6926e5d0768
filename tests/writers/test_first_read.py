"""The first read of a complete rollout computes its estimates: any read, in any process,
again after a failure, a kill or Ctrl-C, and only once."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from rlbuf_td import (
    PackedStorage,
    ReplayBuffer,
    ReplayBufferMixture,
    RolloutBuffer,
    RolloutWriter,
)
from rlbuf_td.diagnostics.plots import plot_advantages
from tests.test_lockstep import forked, stopped
from tests.writers.random_walk import World, make_world

STEPS, LANES = 4, 2
READS: dict[str, Callable[[Any], Any]] = {
    "sample": lambda rb: rb.sample()["advantage"],
    "a loop": lambda rb: next(iter(rb))["advantage"],
    "summary": lambda rb: rb.summary(),
    "index": lambda rb: rb[:]["advantage"],
    "key": lambda rb: rb["advantage"],
    "last": lambda rb: rb.last(1)["advantage"],
    "chronological": lambda rb: rb.chronological()["value_target"],
    "storage, rows": lambda rb: rb.storage[:]["advantage"],
    "storage, key": lambda rb: rb.storage["state_value"],
    "storage, indices": lambda rb: rb.storage.get((torch.zeros(1, dtype=torch.int64),) * 2),
    "plot": plot_advantages,
    "mixture": lambda rb: ReplayBufferMixture({"a": rb}, {"a": 1}, batch_size=3).sample(),
}  # fmt: skip


def made(world: World, **settings: Any) -> RolloutBuffer:
    default = {"batch_size": 3, "gamma": 0.9, "lmbda": 0.8}
    default |= {"value_network": world.module()} | settings
    return RolloutBuffer(STEPS, LANES, **default)


def as_stored(rb: Any) -> torch.Tensor:
    """Return the advantages ``[E, T, 1]`` that lie in memory, without a read."""
    return rb.storage._storage["advantage"].transpose(0, 1)


def assert_estimated(rb: Any, world: World, data: Any) -> None:
    advantage, target = world.estimates(data)
    rows = rb.storage[:].transpose(0, 1)
    torch.testing.assert_close(rows["advantage"], advantage)
    torch.testing.assert_close(rows["value_target"], target)
    torch.testing.assert_close(rows["state_value"], world.value(rows["observation"]))
    rb.storage.check()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_any_read_of_a_complete_rollout_computes_its_estimates_once(read):
    world = make_world(LANES)
    rb, data = made(world), world.steps(STEPS, values=False)
    rb.extend(data.clone())
    assert rb.is_complete
    assert not rb.writer.is_estimated
    assert as_stored(rb).isnan().all()
    read(rb)
    asked = rb.value_rows
    assert asked == STEPS * LANES + world.rows_to_ask(data)
    assert_estimated(rb, world, data)
    for again in READS.values():
        again(rb)
    assert sum(len(each.flatten(0, -2)) for each in world.network.asked) == asked


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_any_buffer_with_the_writer_or_over_its_storage_reads_estimates(cls):
    world = make_world(LANES)
    data, storage = world.steps(STEPS), PackedStorage(STEPS * LANES, ndim=2)
    writer = RolloutWriter(0.9, 0.8, value_network=world.module())
    rb = cls(storage=storage, writer=writer, batch_size=3)
    other = ReplayBuffer(storage=storage, batch_size=3)
    for buffer in (rb, other):
        rb.extend(data.clone())
        assert as_stored(rb).isnan().all()
        assert buffer.sample()["advantage"].isfinite().all()
        assert_estimated(rb, world, data)


def test_other_entries_are_read_without_an_estimate():
    world = make_world(LANES)
    rb = made(world)
    rb.extend(world.steps(STEPS))
    world.network.fails = True
    assert rb.storage["observation"].isfinite().all()
    assert rb.storage["next", "reward"].isfinite().all()
    assert len(rb.state_dict()["_storage"]["rows"]) == STEPS


def test_a_read_that_fails_changes_nothing_and_the_next_one_tries_again():
    world = make_world(LANES)
    rb, data = (
        made(world, samples_per_insert=2.0, tolerance=99),
        world.steps(STEPS, p=0),
    )
    for step in data.unbind(1):
        rb.add(step.clone())
    world.network.fails = True
    for read in READS.values():
        with pytest.raises(RuntimeError, match="the network failed"):
            read(rb)
    flow: Any = rb.flow
    assert rb.write_count == len(rb) == STEPS * LANES
    assert (flow.report()["inserts"], flow.report()["samples"]) == (STEPS * LANES, 0)
    assert as_stored(rb).isnan().all()
    world.network.fails = False
    rb.sample()
    assert_estimated(rb, world, data)
    assert flow.report()["samples"] == 3


@pytest.mark.parametrize("shuffled", [False, True])
def test_values_may_be_missing_in_some_of_the_rows(shuffled):
    """Where the data has values, these count."""
    world = make_world(LANES)
    rb, data = made(world), world.steps(STEPS, p=0)
    expected = world.value(data["observation"])
    for number, step in enumerate(data.unbind(1)):
        step = step.clone()
        if shuffled:
            step["state_value"] += 1
            step["state_value"][number % LANES] = torch.nan
            expected[1 - number % LANES, number] += 1
        rb.add(step.exclude("state_value") if number < 2 and not shuffled else step)
    torch.testing.assert_close(rb.storage["state_value"].transpose(0, 1), expected)
    assert rb.value_rows == STEPS * LANES + LANES
    if not shuffled:
        assert_estimated(rb, world, data)


def test_edits_before_the_first_read_count():
    world = make_world(LANES)
    rb, data = made(world), world.steps(STEPS)
    rb.extend(data.clone())
    data["next", "reward"] += 1
    rb["next", "reward"] = data["next", "reward"]
    assert_estimated(rb, world, data)


# -- processes


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("child_first", [True, False])
def test_processes_that_share_a_rollout_agree_on_it(child_first, values):
    world = make_world(LANES)
    rb = made(world, partial=True).share()

    def write(steps: Any) -> None:
        for step in steps.unbind(1):
            rb.add(step.clone())

    for number in range(2):
        data = world.steps(STEPS, values=values)
        early, late = data[:, :2], data[:, 2:]
        if child_first:
            assert forked(lambda early=early: write(early)) == 0
        else:
            write(early)
        # of two steps, as if the last one were the end
        torch.testing.assert_close(rb[:]["advantage"], world.estimates(early)[0])
        if child_first:
            write(late)
        else:
            assert forked(lambda late=late: write(late)) == 0
        assert rb.is_complete
        assert not rb.writer.is_estimated
        if number:
            assert forked(rb.sample) == 0
            world.network.fails = True  # the child has computed them
            assert rb.value_rows > 0
        assert_estimated(rb, world, data)


def test_a_kill_between_the_last_step_and_its_estimates_leaves_a_rollout_to_read():
    world = make_world(LANES)
    parent, forward = os.getpid(), world.network.forward

    def dies(observation: torch.Tensor) -> torch.Tensor:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(observation)

    world.network.forward = dies
    rb, data = made(world).share(), world.steps(STEPS, p=0)
    rb.extend(data[:, :3].clone())

    def finish() -> None:
        rb.add(data[:, 3].clone())
        rb.sample()

    assert forked(finish) == -signal.SIGKILL
    assert rb.is_complete
    assert rb.sample()["advantage"].isfinite().all()
    assert_estimated(rb, world, data)


@pytest.mark.parametrize("stride", [90, pytest.param(29, marks=pytest.mark.slow)])
def test_a_kill_at_any_line_of_the_first_read_leaves_a_rollout_to_read(stride):
    world = make_world(LANES)
    rb = made(world).share()
    for line in count(1, stride):
        data = world.steps(STEPS, values=False)
        rb.extend(data.clone())

        def read(line: int = line) -> None:
            with stopped(line, signal.SIGKILL):
                rb.storage["advantage"]

        code = forked(read)
        assert rb.is_complete
        assert_estimated(rb, world, data)
        if not code:
            break
    assert line > 60


@pytest.mark.parametrize("how", ["sample", "storage, key"])
@pytest.mark.parametrize("stride", [23, pytest.param(5, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_of_the_first_read_leaves_a_rollout_to_read(
    how, stride
):
    world = make_world(LANES)
    rb = made(world)
    data = world.steps(STEPS, values=False)
    for line in count(1, stride):
        rb.extend(data.clone())
        with stopped(line, signal.SIGINT) as stopper:
            READS[how](rb)
        rb.storage.check()
        assert len(rb) == STEPS * LANES
        assert rb.is_complete
        # whatever is marked as computed is
        if rb.writer.is_estimated:
            assert as_stored(rb).isfinite().all()
        advantage = torch.cat([batch["advantage"].flatten() for batch in rb])
        expected = world.estimates(data)[0].flatten()
        torch.testing.assert_close(advantage.sort()[0], expected.sort()[0])
        if stopper.left > 0:
            break
    assert line > 60


# -- ways to go on


def by_state(rb: Any, other: Any) -> Any:
    other.load_state_dict(rb.state_dict())
    return other


def by_dump(rb: Any, other: Any, folder: Any) -> Any:
    rb.dumps(folder)
    other.loads(folder)
    return other


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("way", ["state", "dump", "copy", "pickle", "share", "emptied"])
def test_whether_a_rollout_has_been_read_goes_with_its_rows(way, read, tmp_path):
    world = make_world(LANES)
    rb, data = made(world), world.steps(STEPS, values=False)
    rb.extend(data.clone())
    if read:
        rb.sample()
    before = rb.value_rows
    other = {
        "state": lambda: by_state(rb, made(world)),
        "dump": lambda: by_dump(rb, made(world), tmp_path),
        "copy": lambda: copy.deepcopy(rb),
        "pickle": lambda: pickle.loads(pickle.dumps(rb)),
        "share": rb.share,
        "emptied": lambda: (rb.empty(), rb.extend(data.clone()), rb)[-1],
    }[way]()
    is_estimated = read and way != "emptied"
    assert other.writer.is_estimated == is_estimated
    assert other.value_rows == (before if is_estimated else 0)
    assert as_stored(other).isfinite().all() == is_estimated
    other.writer.estimator.value_network.module.fails = is_estimated
    assert_estimated(other, world, data)


@pytest.mark.parametrize(
    "read", ["index", "last", "chronological", "sample", "summary"]
)
def test_reads_of_a_part_estimate_it_if_partial_is_set(read):
    world = make_world(LANES)
    data = world.steps(STEPS)
    for partial in (False, True):
        rb = made(world, partial=partial)
        rb.extend(data[:, :2].clone())
        if not partial and read in ("sample", "summary", "mixture"):
            with pytest.raises(RuntimeError, match="the rollout is not complete"):
                READS[read](rb)
        else:
            READS[read](rb)
        assert rb.writer.is_estimated == partial
        assert as_stored(rb)[:, :2].isfinite().all() == partial
        rb.extend(data[:, 2:].clone())
        assert as_stored(rb)[:, 2:].isnan().all()
        assert_estimated(rb, world, data)


def test_flow_control_counts_each_row_of_a_rollout_once():
    def estimator(data: Any) -> Any:
        raise RuntimeError("bad")

    world = make_world(LANES)
    settings: Any = {"gamma": None, "lmbda": None, "samples_per_insert": 0.1}
    settings["tolerance"] = 99
    rb = made(world, estimator=estimator, **settings)
    flow: Any = rb.flow
    for number, step in enumerate(world.steps(3 * STEPS).unbind(1), 1):
        rb.add(step.clone())
        assert flow.inserted == LANES * number
        if rb.is_complete:
            with pytest.raises(RuntimeError, match="bad"):
                rb.summary()
    assert rb.write_count == 3 * STEPS * LANES
