"""Draws and priorities, as far as the buffer keeps count of them."""

from __future__ import annotations

import pytest
import torch

from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer
from rlbuf_td.diagnostics.doctor import check
from rlbuf_td.diagnostics.health import ReplayCount
from rlbuf_td.storages.indexing import attached_or_new
from tests.diagnostics.doctor.world import walk


def buffer(counts: torch.Tensor | None, sampler: type = ProportionalSampler) -> ReplayBuffer:
    rb = ReplayBuffer(storage=PackedStorage(300), sampler=sampler(300), batch_size=8, count_replays=counts is not None)
    rb.extend(walk(200)[:, 0])
    if counts is not None:
        attached_or_new(rb.storage, ReplayCount).restore(counts)
    return rb


def drawn(rows: int, times: int) -> torch.Tensor:
    counts = torch.zeros(300, dtype=torch.int32)
    counts[:rows] = times
    return counts


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_rows_that_are_drawn_and_never_updated_are_found(sampler: type) -> None:
    rb = buffer(drawn(180, 3), sampler)
    rb.update_priority(torch.arange(20), torch.rand(20))
    (finding,) = check(rb)
    assert (finding.code, finding.count, finding.of) == ("stale-priorities", 160, 180)
    assert finding.rows == (20, 21, 22, 23, 24)
    rb.update_priority(torch.arange(180), torch.rand(180))
    assert check(rb).codes == []


def test_rows_that_are_hardly_ever_drawn_are_found_where_others_are_often() -> None:
    counts = drawn(50, 20)
    rb = buffer(counts)
    rb.update_priority(torch.arange(50), torch.rand(50))
    (finding,) = check(rb)
    assert (finding.code, finding.count, finding.of) == ("never-sampled", 150, 200)
    assert "a row is drawn 5.0 times on average" in finding.explanation
    counts[50:150] = 1
    attached_or_new(rb.storage, ReplayCount).restore(counts)
    rb.update_priority(torch.arange(150), torch.rand(150))
    assert check(rb).codes == []


def test_few_draws_tell_nothing_and_a_buffer_that_counts_none_says_so() -> None:
    assert check(buffer(drawn(50, 3))).codes == check(buffer(drawn(0, 0))).codes == []
    assert check(buffer(drawn(9, 1))).skipped == ()
    report = check(buffer(None))
    assert report.codes == []
    assert report.skipped == ("rows that are never drawn: this buffer does not count draws",)
    assert "not checked: rows that are never drawn" in str(report)
