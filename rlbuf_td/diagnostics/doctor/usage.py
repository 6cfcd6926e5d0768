"""What has become of the rows: whether they are drawn, and whether priorities follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torchrl.data.replay_buffers import Sampler, Storage

from rlbuf_td.diagnostics.doctor.record import Record
from rlbuf_td.diagnostics.doctor.report import Finding
from rlbuf_td.samplers.prioritized import Prioritized

# Fewer draws a row, or fewer rows, than this tell nothing.
_DRAWS, _ROWS = 2.0, 100


def usage_findings(record: Record, source: Any, storage: Storage, sampler: Sampler | None) -> Iterator[Finding]:
    """Yield what is wrong with how rows are used, as far as the buffer keeps count of it."""
    counts, drawn = draw_counts(storage), None
    if counts is not None:
        counts = counts[: record.steps * record.lanes].view(record.steps, record.lanes).cpu()
        drawn = counts > 0
        yield from _never_sampled(record, counts)
    elif sampler is not None:
        record.skipped.append("rows that are never drawn: nothing counts the draws of this buffer")
    while hasattr(sampler, "sampler"):
        sampler = sampler.sampler  # type: ignore[union-attr]
    if isinstance(sampler, Prioritized):
        yield from _stale(record, source, sampler, drawn)


def draw_counts(storage: Storage) -> torch.Tensor | None:
    """Return how often each row has been drawn since it was written, ``[max_size]``, if something attached counts."""
    for listener in storage._attached_entities:
        if callable(getattr(listener, "counts", None)):
            return listener.counts()
    return None


def _never_sampled(record: Record, counts: torch.Tensor) -> Iterator[Finding]:
    never, mean = counts == 0, float(counts.double().mean())
    if counts.numel() >= _ROWS and mean >= _DRAWS and 2 * int(never.sum()) > counts.numel():
        yield Finding(
            "never-sampled",
            None,
            record.first(never),
            int(never.sum()),
            counts.numel(),
            f"These rows have never been drawn, though rows are drawn {mean:.1f} times on the average: a few rows get "
            "nearly all draws.",
            "lower alpha, look for outliers among the TD errors (RankSampler does not mind them), and check that "
            "priorities are updated after every batch.",
        )


def _stale(record: Record, source: Any, sampler: Prioritized, drawn: torch.Tensor | None) -> Iterator[Finding]:
    rows = record.steps * record.lanes
    magnitude = sampler.priority(torch.arange(rows, device=sampler.device)).cpu()
    # TD errors hardly ever agree to the last bit; rows that entered together do.
    _, inverse, counts = magnitude.unique(return_inverse=True, return_counts=True)
    untouched = (counts > 1)[inverse].view(record.steps, record.lanes)
    if drawn is None:
        # Without counts all that can be told is that batches have been drawn, and no priority has ever come back.
        if getattr(source, "_last_draw", None) is None or float(sampler._largest) >= 0:
            return
        drawn = torch.ones_like(untouched)
    stale, known = untouched & drawn, int(drawn.sum())
    if known >= _ROWS and 2 * int(stale.sum()) > known:
        yield Finding(
            "stale-priorities",
            None,
            record.first(stale),
            int(stale.sum()),
            known,
            "These rows have been drawn, and still have the priority with which they entered: it was never updated. "
            "Replay is then uniform, at a higher price.",
            "after each batch put the TD errors into it (TorchRL's losses do, under priority_key) and call "
            "rb.update_tensordict_priority(batch).",
        )
