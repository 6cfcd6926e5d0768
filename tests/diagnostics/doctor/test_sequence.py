"""The order of rows: a healthy buffer gives no finding, each planted fault its own."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer

from rlbuf_td import PackedStorage, ReplayBuffer
from rlbuf_td.diagnostics.doctor import check
from tests.diagnostics.doctor.faults import FAULTS
from tests.diagnostics.doctor.world import nested, vector, walk

OBSERVERS = {"vector": vector, "nested": nested}
HOLDERS = ["rows", "packed", "packed ring", "torchrl", "torchrl ring", "unlike lanes", "unlike lanes, deduplicated"]


@cache
def _healthy(lanes: int, observer: str) -> TensorDict:
    return walk(600 if lanes > 1 else 1_200, lanes, observe=OBSERVERS[observer])


def healthy(lanes: int, observer: str = "vector") -> TensorDict:
    return _healthy(lanes, observer).clone()


def held(rows: TensorDict, holder: str) -> Any:
    """Return rows ``[T, E]`` in a buffer; in a ring, the oldest fifth has been overwritten."""
    if rows.shape[1] == 1:
        rows = rows[:, 0]
    if holder == "rows":
        return rows
    if "unlike lanes" in holder:
        return in_unlike_lanes(rows if rows.ndim > 1 else rows[:, None], "deduplicated" in holder)
    storage = PackedStorage if "packed" in holder else LazyTensorStorage
    steps = len(rows) * 4 // 5 if "ring" in holder else len(rows) + 7
    size = steps * rows.shape[1:].numel()
    buffer = ReplayBuffer if "packed" in holder else TensorDictReplayBuffer
    rb = buffer(storage=storage(size, ndim=rows.ndim), dim_extend=0)
    for part in rows.split(min(97, steps)):  # of a longer write TorchRL keeps rows at random, each key for itself
        rb.extend(part)
    return rb


def in_unlike_lanes(rows: TensorDict, share_next: bool = False) -> ReplayBuffer:
    """Return rows ``[T, E]`` in lanes of a ring that hold fewer and fewer rows, the last one none; the first wraps."""
    steps, lanes = len(rows) * 3 // 4, rows.shape[1] + 1
    rb = ReplayBuffer(storage=PackedStorage(steps * lanes, ndim=2, lanes=lanes, share_next=share_next))
    for lane in range(lanes - 1):
        rb.extend(rows[: len(rows) * (lanes - 1 - lane) // (lanes - 1), lane], lanes=lane)
    return rb


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(("lanes", "observer"), [(1, "vector"), (3, "nested")])
def test_a_healthy_buffer_gives_no_finding(lanes: int, observer: str, holder: str) -> None:
    report = check(held(healthy(lanes, observer), holder))
    assert report.healthy
    assert "nothing found" in str(report)


@pytest.mark.parametrize(
    ("lanes", "observer", "holder"),
    [(1, "vector", "rows"), (3, "nested", "packed ring"), (3, "vector", "torchrl"), (1, "vector", "torchrl ring")],
)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_gives_exactly_its_finding(name: str, lanes: int, observer: str, holder: str) -> None:
    fault, needed, code = FAULTS[name]
    report = check(held(fault(healthy(needed or lanes, observer)), holder))
    assert report.codes == [code]


@pytest.mark.parametrize("name", [name for name, (_, lanes, _) in FAULTS.items() if lanes < 2])
def test_a_fault_is_found_in_lanes_of_unlike_lengths(name: str) -> None:
    fault, lanes, code = FAULTS[name]
    report = check(held(fault(healthy(lanes or 3, "nested")), "unlike lanes"))
    assert report.codes == [code]
    assert report.skipped == ("rows that are never drawn: this buffer does not count draws",)


@pytest.mark.parametrize("name", [name for name, (_, lanes, _) in FAULTS.items() if not lanes])
def test_a_fault_is_found_in_rows_with_trajectory_ids(name: str) -> None:
    fault, _, code = FAULTS[name]
    rows = healthy(2)
    ended = rows["next", "done"][..., 0].roll(1, 0)
    ended[0] = False
    rows["collector", "traj_ids"] = 2 * ended.cumsum(0) + torch.arange(2)
    assert check(rows).codes == []
    if code == "reset-without-done":  # the ids tell of the reset
        assert check(fault(rows)).codes == []
    else:
        assert check(fault(rows)).codes == [code]


def test_a_finding_names_the_rows_at_fault() -> None:
    rows = healthy(1)
    ends = rows["next", "done"].flatten().nonzero()[:, 0].tolist()
    lost = check(FAULTS["same-step autoreset"][0](rows.clone()))[0]
    assert lost.rows == tuple((t, 0) for t in ends[:5])
    assert (lost.count, lost.of) == (len([t for t in ends if t < 1_199]),) * 2
    for name, named, words in (
        ("done late", [t + 1 for t in ends], "one step too late"),
        ("done early", [t - 1 for t in ends], "one step too early"),
        ("time limit left out", rows["next", "truncated"].flatten().nonzero()[:, 0].tolist(), ""),
        ("next-step autoreset", [t + 1 + j for j, t in enumerate(ends)], ""),
    ):
        finding = check(FAULTS[name][0](rows.clone())[:, 0])[0]
        assert finding.rows == tuple(named[:5])
        assert words in finding.explanation


def test_rows_of_a_ring_are_named_as_the_storage_indexes_them() -> None:
    rows = healthy(3)
    at = max(t for t in range(500, 590) if not rows["next", "done"][t - 5 : t + 5, 1].any())
    rows["next", "done"][at, 1] = True
    rb = held(rows, "packed ring")
    (finding,) = check(rb)
    assert finding.code == "done-without-reset"
    assert finding.rows == ((at % 480, 1),)
    assert bool(rb.storage[at % 480]["next", "done"][1])


def test_rows_of_lanes_of_unlike_lengths_are_named_as_the_storage_indexes_them() -> None:
    rb = in_unlike_lanes(healthy(3))
    at = [(t, e) for t in range(450) for e in range(4) if (t, e) in {(7, 0), (449, 0), (3, 1), (299, 1), (199, 2)}]
    for t, e in at:
        rb.set_at_(("next", "reward"), float("nan"), (torch.tensor([t]), torch.tensor([e])))
    (finding,) = check(rb)
    assert (finding.code, finding.count, finding.of) == ("not-finite", 5, 450 + 400 + 200)
    assert sorted(finding.rows) == at


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("interleaved", "observation 3 rows later: the rows of 3 environments alternate"),
        ("pieces", "parts of several trajectories follow each other"),
        ("transposed", r"time and lanes are exchanged"),
        ("lanes shuffled", "later in another lane: the order of lanes changes|the observation of another row"),
        ("rows shuffled", "not in time order"),
    ],
)
def test_kinds_of_mixed_lanes_are_distinguished(name: str, words: str) -> None:
    fault, lanes, _ = FAULTS[name]
    (finding,) = check(fault(healthy(lanes)))
    assert re.search(words, finding.explanation), finding.explanation


def test_a_single_wrong_flag_among_thousands_is_found() -> None:
    rows = healthy(1)
    (at,) = [t for t in range(100, 1_000) if not rows["next", "done"][t - 5 : t + 5].any()][:1]
    for change, code in (("done", "done-without-reset"), ("terminated", "terminated-without-done")):
        bad = rows.clone()
        bad["next", change][at] = True
        (finding,) = check(bad[:, 0])
        assert (finding.code, finding.rows, finding.count) == (code, (at,), 1)


def endless(steps: int) -> TensorDict:
    place, no = torch.arange(steps + 1.0).unsqueeze(-1), torch.zeros(steps, 1, dtype=torch.bool)
    return TensorDict({"observation": place[:-1], "next": {"observation": place[1:], "done": no}}, [steps])


def test_a_lane_without_an_end_is_a_fault_only_if_it_is_long() -> None:
    assert check(endless(500)).healthy
    (finding,) = check(endless(20_000))
    assert (finding.code, finding.count) == ("done-never", 20_000)


def test_pieces_of_lanes_that_have_not_ended_yet_are_no_fault_with_ids() -> None:
    rows = walk(20, 12, limit=10_000)
    rows = rows[:4]  # nothing has ended
    assert not rows["next", "done"].any()
    rows["collector", "traj_ids"] = torch.arange(12).expand(4, 12).clone()
    flat = torch.cat([piece.transpose(0, 1).reshape(-1) for piece in rows.split(2)])
    assert check(flat).healthy
    assert check(rows[:2].transpose(0, 1).reshape(-1)).healthy


def test_games_that_often_end_with_the_first_step_are_no_fault() -> None:
    generator = torch.Generator().manual_seed(0)
    observation = torch.randn(500, 4, generator=generator)
    done = torch.rand(500, 1, generator=generator) < 0.7
    following = observation.roll(-1, 0)
    final = torch.where(done, torch.randn(500, 4, generator=generator), following)
    rows = TensorDict({"observation": observation, "next": {"observation": final, "done": done}}, [500])
    assert check(rows).healthy
    assert check(rows.clone().set(("next", "done"), torch.ones_like(done))).codes == ["done-always"]


def test_coincidences_beside_a_number_that_never_repeats_are_no_fault() -> None:
    generator = torch.Generator().manual_seed(0)
    place = torch.randint(0, 5, (60, 10, 2), generator=generator).float()
    battery = torch.rand(60, 10, 1, generator=generator)
    place[4::4, 0] = place[3:-1:4, -1]  # some episodes begin where the one before ended
    done = (torch.arange(9) == 8).expand(60, -1).unsqueeze(-1)
    after = {"place": place[:, 1:], "battery": battery[:, 1:], "done": done}
    rows = TensorDict({"place": place[:, :-1], "battery": battery[:, :-1], "next": after}, [60, 9])
    assert check(rows.flatten()).codes == []


def test_rows_without_next_observations_are_checked_for_the_rest() -> None:
    rows = healthy(1)[:, 0].exclude(("next", "observation"))
    report = check(rows)
    assert report.healthy
    assert any("next observations" in what for what in report.skipped)
    assert "not checked: next observations" in str(report)
    done = torch.ones(1_200, 1, dtype=torch.bool)
    assert check(rows.clone().set(("next", "done"), done)).codes == ["done-always"]
    assert check(rows.exclude("next", "done")).skipped[0].startswith("trajectories: neither done flags nor")
    storage = PackedStorage(4)
    storage.set(range(4), rows.flatten()[:40].reshape(4, 10))  # a collector's batch [E, T]
    assert "ndim=2" in check(storage).skipped[0]


def test_rows_without_an_order_of_time_are_not_checked_for_it() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(200), writer=TensorDictMaxValueWriter(rank_key="key"))
    rb.extend(healthy(1)[:, 0].set("key", torch.rand(1_200, generator=torch.Generator().manual_seed(0))))
    report = check(rb)
    assert report.healthy
    assert "the order of rows, which a TensorDictMaxValueWriter does not keep" in report.skipped
