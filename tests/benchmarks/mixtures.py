"""What mixtures, fresh rows and recency cost after a learner's step (``python tests/benchmarks/mixtures.py``).

Each sampler draws the same batch from buffers of HalfCheetah's rows. Before each learner's step a row is written to
every buffer, so that there is always a fresh one. Medians and means of blocks of calls that take turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from rlbuf_td import (
    FreshRowsSampler,
    PackedStorage,
    ProportionalSampler,
    RecencySampler,
    ReplayBuffer,
    ReplayBufferMixture,
    UniformSampler,
)
from rlbuf_td.cli.bench.contenders import small_rows
from rlbuf_td.cli.bench.timing import Learner, in_loop, one_thread

#: Pairs to compare, and the limit: a ratio, or microseconds more.
LIMITS: dict[tuple[str, str], str] = {
    ("mixture", "uniform"): "1.5 x",
    ("mixture of uneven shares", "uniform"): "1.5 x",
    ("mixture of proportional", "proportional"): "",
    ("fresh", "uniform"): "+15 us",
    ("fresh over proportional", "proportional"): "+15 us",
    ("half-life", "uniform"): "1.1 x",
    ("window", "uniform"): "1.1 x",
}


def buffers(rows: int, batch: int) -> dict[str, Any]:
    data = small_rows(rows)

    def filled(sampler: Any) -> ReplayBuffer:
        rb = ReplayBuffer(storage=PackedStorage(rows), sampler=sampler, batch_size=batch)
        rb.extend(data)
        return rb

    def mixed(sampler: Any, demos: float = 0.5) -> ReplayBufferMixture:
        members = {name: filled(sampler()) for name in ("demos", "online")}
        shares = {"demos": demos, "online": 1 - demos}
        return ReplayBufferMixture(members, shares, batch_size=batch, writes_to="online")

    def proportional() -> ProportionalSampler:
        return ProportionalSampler(rows)

    return {
        "uniform": filled(UniformSampler()),
        "mixture": mixed(UniformSampler),
        "mixture of uneven shares": mixed(UniformSampler, 0.3),
        "fresh": filled(FreshRowsSampler(UniformSampler())),
        "half-life": filled(RecencySampler(half_life=rows / 5)),
        "window": filled(RecencySampler(window=rows // 2)),
        "proportional": filled(proportional()),
        "mixture of proportional": mixed(proportional),
        "fresh over proportional": filled(FreshRowsSampler(proportional())),
    }


def main(arguments: Sequence[str] | None = None) -> dict[tuple[str, str], float]:
    """Print microseconds per batch, and compare them; return the median ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args(arguments)
    with one_thread():
        compared, learner, row = buffers(given.rows, given.batch), Learner(given.batch), small_rows(1)[0]

        def learn() -> None:
            for rb in compared.values():
                rb.add(row)
            learner.step()

        calls = {name: rb.sample for name, rb in compared.items()}
        in_loop(calls, 2, learn)  # compiled loops are loaded, plans made
        blocks = in_loop(calls, given.rounds, learn)
    for name, times in blocks.items():
        print(f"{name:24} median {statistics.median(times):6.1f} us, mean {statistics.fmean(times):6.1f} us")
    ratios = {}
    for (name, base), limit in LIMITS.items():
        pairs = list(zip(blocks[name], blocks[base], strict=True))
        ratios[name, base] = statistics.median(one / other for one, other in pairs)
        more = statistics.median(one - other for one, other in pairs)
        wanted = f", at most {limit}" if limit else ""
        print(f"{name} against {base}: {ratios[name, base]:.2f} x, {more:+.1f} us{wanted}")
    return ratios


if __name__ == "__main__":
    main()
