"""Rows that share observations, under everything that works on a buffer: dumps, doctor, plan, processes, recorder."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbuf_td import PackedStorage, ReplayBuffer, RolloutBuffer, plan
from rlbuf_td.checkpoint import open_checkpoint
from rlbuf_td.diagnostics.doctor import check as diagnose
from rlbuf_td.storages.rows.dedup import DedupRows
from tests.catalogue import assert_same, copied
from tests.kernels.invariants import check_pool
from tests.storages.observations import FRAMES, Lanes
from tests.storages.test_sharing import all_elsewhere

POOLED = partial(PackedStorage, share_next=True, frames={"pixels": FRAMES})
KINDS: dict[str, Any] = {
    "plain": PackedStorage,
    "once": partial(PackedStorage, share_next=True),
    "frames": partial(PackedStorage, frames={"pixels": FRAMES}),
    "both": POOLED,
}


def filled(make: Any, capacity: int = 40, steps: int = 100, ndim: int = 1, **kwargs: Any) -> ReplayBuffer:
    lanes = 2 if ndim > 1 else 1
    rb = ReplayBuffer(storage=make(capacity * lanes, ndim=ndim), batch_size=16, **kwargs)
    world = Lanes(lanes, 0)
    while steps > 0:
        data = world.steps(min(7, steps), 0.2)
        rb.extend(data.transpose(0, 1).contiguous() if ndim > 1 else data[:, 0])
        steps -= 7
    return rb


def check(rb: ReplayBuffer) -> None:
    rows = rb.storage.rows
    if isinstance(rows, DedupRows):
        check_pool(rows.table)


@pytest.mark.parametrize(("steps", "ndim"), [(20, 2), (100, 1)])
@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("since", KINDS)
def test_a_dump_goes_to_any_kind_of_rows(since, to, steps, ndim, tmp_path: Path) -> None:
    original = filled(KINDS[since], steps=steps, ndim=ndim)
    original.dumps(tmp_path)
    fresh = ReplayBuffer(storage=KINDS[to](40 * (1 + (ndim > 1)), ndim=ndim), batch_size=16)
    used = filled(KINDS[to], steps=33, ndim=ndim)
    for rb in (fresh, used):
        rb.loads(tmp_path)
        assert_same(rb[:], original[:])
        check(rb)
        for buffer in (original, rb):
            torch.manual_seed(3)
            buffer.extend(Lanes(2, 5).steps(9, 0.2)[:, 0] if ndim == 1 else Lanes(2, 5).steps(9, 0.2).transpose(0, 1))
        assert_same(rb[:], original[:])
        check(rb)
        original.loads(tmp_path)


@pytest.mark.parametrize("capacity", [25, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dump_goes_to_another_capacity(kind, capacity, tmp_path: Path) -> None:
    original = filled(KINDS[kind])
    original.dumps(tmp_path)
    results = []
    for each in (kind, "plain"):
        rb = ReplayBuffer(storage=KINDS[each](capacity), batch_size=16)
        with pytest.warns(UserWarning, match="dropped") if capacity < 40 else nullcontext():
            rb.loads(tmp_path)
        check(rb)
        results.append(rb[:])
    assert_same(*results)


def test_a_dump_can_be_opened_by_itself(tmp_path: Path) -> None:
    original = filled(POOLED)
    original.dumps(tmp_path)
    found = open_checkpoint(tmp_path)
    assert_same(found.rows, original[:])
    assert diagnose(tmp_path).codes == diagnose(original).codes


def test_the_doctor_says_the_same() -> None:
    plain, shared = (diagnose(filled(kind)) for kind in (PackedStorage, POOLED))
    assert str(plain) == str(shared)
    assert plain.codes


def test_the_plan_counts_what_is_shared() -> None:
    rb = filled(POOLED, capacity=4000, steps=4500)
    needed = plan(rb)
    assert {*needed.saved} == {"'observation'", "('agent', 'goal')", "'clock'", "'pixels'"}
    assert sum(needed.saved.values()) + needed.rows == pytest.approx(needed.capacity * needed.row_bytes, rel=0.01)
    assert "'pixels' shared" in str(needed)
    data = Lanes(1, 0).steps(1, 0.0)[0, 0]
    again = plan(data, 4000, share_next=True, frames={"pixels": FRAMES})
    assert (again.rows, again.saved) == (needed.rows, needed.saved)
    assert plan(data, 4000).saved == {}


def test_what_is_shared_is_shown() -> None:
    rb = filled(POOLED)
    assert "saved by deduplication" in repr(rb.storage)
    assert "'observation': float32 (3,) (deduplicated)" in repr(rb.storage)


def _write(rb: ReplayBuffer, seed: int) -> None:
    for _ in range(5):
        rb.extend(Lanes(1, seed).steps(8, 0.2)[:, 0])
        rb.sample(4)


@pytest.mark.parametrize(("start", "first"), [("fork", True), pytest.param("spawn", False, marks=pytest.mark.slow)])
def test_several_processes_write_to_the_same_entries(start, first) -> None:
    rb = ReplayBuffer(storage=POOLED(50, shared=first), batch_size=4)  # sending it shares it
    if first:
        rb.extend(Lanes(1, 9).steps(8, 0.2)[:, 0])
    all_elsewhere(_write, [(rb, seed) for seed in (1, 2)], start)
    rb.extend(Lanes(1, 3).steps(8, 0.2)[:, 0])
    assert len(rb) == 50
    check(rb)
    written = {tuple(row.tolist()) for seed in (1, 2, 3, 9) for row in _all_pixels(seed)}
    assert {tuple(row.tolist()) for row in rb["next", "pixels"].flatten(1)} <= written


def _all_pixels(seed: int) -> torch.Tensor:
    return Lanes(1, seed).steps(8, 0.2)[:, 0]["next", "pixels"].flatten(1)


@pytest.mark.parametrize("kind", ["once", "both"])
def test_epochs_over_a_rollout_are_the_same(kind):
    data = Lanes(3, 4).steps(16, 0.2).transpose(0, 1).contiguous()
    value = torch.randn(3, 17, 1, generator=torch.Generator().manual_seed(0))
    data["state_value"], data["next", "state_value"] = value[:, :-1].clone(), value[:, 1:].clone()
    data["next", "reward"], data["next", "terminated"] = torch.ones(3, 16, 1), data["next", "done"].clone()
    epochs = []
    for make in (PackedStorage, KINDS[kind]):
        torch.manual_seed(1)
        rollout = RolloutBuffer(16, 3, batch_size=8, epochs=2, storage=make(48, ndim=2))
        rollout.extend(copied(data))
        epochs.append(list(rollout))
        check(rollout)
    assert len(epochs[0]) == 12
    for plain, shared in zip(*epochs, strict=True):
        assert_same(shared, plain)
    assert float(epochs[0][0]["advantage"].abs().sum()) > 0
