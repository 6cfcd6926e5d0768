"""Ctrl-C at any line of a write: it is made, or not made; then the rows that it
replaces may be gone."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ReplayBuffer
from rlbuf_td.storages.indexing import written_rows
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.catalogue import SAMPLERS, copied
from tests.test_lockstep import stopped

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "planned": {},
    "dedup": {"share_next": True},
}


def steps(first: int, count: int) -> TensorDict:
    """Trajectories of 3 steps; the next observation of a row is that of the following
    one."""
    seen = (
        torch.arange(first, first + count + 1)
        .float()[:, None]
        .expand(-1, 5)
        .contiguous()
    )
    done = (torch.arange(first, first + count) % 3 == 2)[:, None]
    rows = {
        "observation": seen[:-1],
        "action": seen[:-1, 0].clone(),
        "next": {
            "observation": seen[1:],
            "done": done,
            "terminated": done.clone(),
            "truncated": torch.zeros_like(done),
            "reward": seen[:-1, :1].clone(),
        },
    }
    return TensorDict(rows, [count])


def as_step(row: TensorDict) -> dict[str, Any]:
    after = row["next"]
    return {
        "observation": row["observation"].numpy(),
        "action": row["action"].item(),
        "reward": after["reward"].item(),
        "next_observation": after["observation"].numpy(),
        "terminated": after["terminated"].item(),
        "truncated": after["truncated"].item(),
    }


def state_of(rb: ReplayBuffer) -> dict[str, Any]:
    state: dict[str, Any] = {
        "len": len(rb),
        "count": rb.write_count,
        "cursor": rb.writer._cursor,
    }
    rb.storage.ring.check()
    if len(rb):
        rows = written_rows(rb.storage)
        by_age = rows[rb.storage[rows]["observation"][:, 0].argsort()]
        state["rows"] = {
            str(key): value.tolist()
            for key, value in copied(rb.chronological()).items(True, True)
        }
        state["reach"] = [
            part.tolist() for part in TrajectoryIndex(rb.storage).reach(by_age)
        ]
        sampler: Any = getattr(rb.sampler, "sampler", rb.sampler)
        state["priority"] = (
            sampler.priority(by_age).tolist() if hasattr(sampler, "priority") else None
        )
    return state


def without_oldest(state: dict[str, Any], count: int) -> dict[str, Any]:
    """Return a state of a full ring without its ``count`` oldest rows."""
    rows = {key: values[count:] for key, values in state["rows"].items()}
    back, ahead, ended = (values[count:] for values in state["reach"])
    back = [min(steps, at) for at, steps in enumerate(back)]
    priority = None if state["priority"] is None else state["priority"][count:]
    return state | {
        "len": state["len"] - count,
        "rows": rows,
        "reach": [back, ahead, ended],
        "priority": priority,
    }


@pytest.fixture
def handler() -> Iterator[Any]:
    """Python's own handler of Ctrl-C; TorchRL's memory-mapped storages install one that
    gives way to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "every",
    [37, pytest.param(5, marks=pytest.mark.slow)],
    ids=["some lines", "many lines"],
)
@pytest.mark.parametrize("operation", ["extend", "add", "add_step", "empty"])
@pytest.mark.parametrize(
    ("kind", "sampler"),
    [("plain", "uniform"), ("planned", "rank"), ("dedup", "n-step")],
)
def test_an_interrupted_write_is_made_or_loses_at_most_the_rows_that_it_replaces(
    kind: str, sampler: str, operation: str, every: int, handler: Any
) -> None:
    made = ReplayBuffer(
        storage=PackedStorage(7, **KINDS[kind]),
        sampler=SAMPLERS[sampler](7),
        batch_size=2,
    )
    made.extend(steps(0, 9))
    made.sample()
    if sampler != "uniform":
        made.update_priority(torch.arange(7), torch.arange(1.0, 8))
    work: dict[str, Any] = {
        "extend": lambda rb: rb.extend(steps(30, 4)),
        "add": lambda rb: rb.add(steps(30, 1)[0]),
        "add_step": lambda rb: rb.add_step(**as_step(steps(30, 1)[0])),
        "empty": lambda rb: rb.empty(),
    }

    def again() -> ReplayBuffer:
        rb = copy.deepcopy(made)
        if kind == "planned" or operation == "add_step":  # by the second write
            rb.extend(steps(20, 1))
        return rb

    after = again()
    work[operation](after)
    allowed = [state_of(again()), state_of(after)]
    if operation != "empty":
        allowed.append(without_oldest(allowed[0], 4 if operation == "extend" else 1))
    seen = set()
    for line in count(1, every):
        rb, done = again(), False
        with stopped(line, signal.SIGINT) as stopper:
            work[operation](rb)
            done = True
        assert done == (stopper.left > 0), line
        assert signal.getsignal(signal.SIGINT) is handler
        if done:
            break
        found = state_of(rb)
        assert found in allowed, line
        seen.add(allowed.index(found))
        if kind == "dedup" and len(rb):
            vars(rb.storage.rows)["entries"].check(rb.storage.ring.serials)
        rb.extend(steps(60, 2))
        assert copied(rb.chronological())["observation"][:, 0].tolist().count(60.0) == 1
    assert 0 in seen


@pytest.mark.parametrize("sampler", ["proportional", "rank"])
def test_an_interrupted_update_changes_rows_and_new_rows_together(
    sampler: str, handler: Any
) -> None:
    rb = ReplayBuffer(
        storage=PackedStorage(9), sampler=SAMPLERS[sampler](9), batch_size=4
    )
    rb.extend(steps(0, 6))
    batch, td_error = rb.sample(), torch.ones(4)
    updates = [
        rb.update_tensordict_priority,
        lambda batch: rb.update_priority(batch["index"], batch["td_error"]),
    ]
    for update in updates:
        for line in count(1, 7):
            batch["td_error"], done = td_error.add_(1.0), False
            with stopped(line, signal.SIGINT) as stopper:
                update(batch)
                done = True
            assert done == (stopper.left > 0), line
            assert (
                rb.sampler.default_priority
                == rb.sampler.priority(torch.arange(6)).max()
            )
            if done:
                break
