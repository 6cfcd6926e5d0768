"""Several processes write checksummed rows into one prioritized buffer while a learner samples and updates it.

Every row says which worker wrote it, as which of its rows, and a checksum of all its bytes. The learner checks every
row that it samples, and reads the whole buffer each time that half of it has been replaced: each worker's rows must be
there once, in order, without a gap, up to the last one that it was told was written. With ``kill_every``, workers are
killed (SIGKILL) at random moments and others take their place: of a killed one, the write that it was in may be there
or not, but only as a whole.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import random
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer
from tests import catalogue
from tests.kernels.invariants import check_order, check_pool, check_tree

SAMPLERS = {name: catalogue.SAMPLERS[name] for name in ("proportional", "rank", "uniform")}
_FACTORS = torch.tensor([(2 * j + 3) * 0x9E3779B97F4A7C15 % 2**63 for j in range(12)])


def states(worker: torch.Tensor, serial: torch.Tensor) -> torch.Tensor:
    """Return the states before a worker's rows, ``[n, 4]``; the state after a row is that before its next one."""
    return (worker * 1_000_003 + serial)[:, None] * _FACTORS[:4]


def torn(rows: TensorDict) -> int:
    """Return how many rows have wrong bytes."""
    worker, serial = rows["worker"], rows["serial"]
    wrong = checksums(rows) != rows["checksum"]
    for state, after in ((rows["state"], 0), (rows["next", "state"], 1)):
        wrong |= (state != states(worker, serial + after)).any(-1)
    return int(wrong.sum())


def checksums(rows: TensorDict) -> torch.Tensor:
    """Return what the checksums of rows should be, ``[n]`` int64."""
    words = torch.cat((rows["payload"], rows["next", "payload"].view(torch.int64)), -1)
    return (words * _FACTORS[: words.shape[-1]]).sum(-1) + rows["worker"] * 1_000_003 + rows["serial"] * 31


def make_rows(worker: int, first: int, count: int) -> TensorDict:
    rows = TensorDict(
        {
            "worker": torch.full((count,), worker),
            "serial": torch.arange(first, first + count),
            "payload": torch.randint(-(2**62), 2**62, (count, 5)),
            "next": {"payload": torch.randint(2**31, (count, 12), dtype=torch.int32)},
        },
        [count],
    )
    rows["checksum"] = checksums(rows)
    for key, after in (("state", 0), (("next", "state"), 1)):
        rows[key] = states(rows["worker"], rows["serial"] + after)
    return rows


def write(rb: ReplayBuffer, worker: int, intended: Any, told: Any, stop: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(worker)
    draw = random.Random(worker)
    serial = 0
    while not stop[0]:
        rows = make_rows(worker, serial, draw.randint(1, 64))
        serial += len(rows)
        intended[worker] = serial
        if len(rows) == 1:
            rb.add(rows[0])
        else:
            rb.extend(rows)
        told[worker] = serial


@dataclass
class Report:
    sampled: int = 0
    read: int = 0
    torn: int = 0
    lost: int = 0
    duplicated: int = 0
    kills: int = 0
    overruns: int = 0  # times that a whole buffer was written between two reads: rows may have gone unseen
    stale_updates: int = 0
    written: int = 0
    last: dict[int, int] = field(default_factory=dict)  # the last row seen of each worker

    def read_all(self, rb: ReplayBuffer) -> None:
        """Check the whole content, and whether some of it may have come and gone since the last time."""
        with rb._replay_lock:
            rows, written = rb.chronological(), rb.write_count
        self.overruns += written - self.written > rb.storage.max_size
        self.written = written
        self.take_in(rows)

    def take_in(self, rows: TensorDict) -> None:
        """Check these rows, oldest first."""
        self.torn += torn(rows)
        self.read += len(rows)
        for worker in rows["worker"].unique().tolist():
            serial = rows["serial"][rows["worker"] == worker]
            steps = serial.diff()
            self.lost += int((steps - 1).clamp(min=0).sum())
            self.duplicated += int((steps < 1).sum())
            self.last[worker] = int(serial[-1])

    @property
    def is_clean(self) -> bool:
        return self.torn == self.lost == self.duplicated == 0


def run(
    seconds: float,
    workers: int = 4,
    *,
    method: str = "fork",
    sampler: str = "proportional",
    capacity: int = 100_000,
    kill_every: float = 0.0,
    kills: int = 0,
    share_next: bool = False,
) -> tuple[Report, ReplayBuffer]:
    """Run the soak, for longer if there have not been so many kills by then; return what was seen, and the buffer."""
    context: Any = mp.get_context(method)
    storage = PackedStorage(capacity, shared=True, share_next=share_next)
    rb = ReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](capacity), batch_size=256)
    most_kills = max(kills, 2 * int(seconds / kill_every)) if kill_every else 0
    most = workers + most_kills
    intended, told, stop = (RawArray("q", size) for size in (most, most, 1))
    rb.extend(make_rows(most, 0, 256))  # of nobody: there is something to sample at once
    running: dict[int, Any] = {}

    def start() -> None:
        worker = next(begun)
        running[worker] = context.Process(target=write, args=(rb, worker, intended, told, stop), daemon=True)
        running[worker].start()

    report, draw, begun = Report(), random.Random(0), itertools.count()
    for _ in range(workers):
        start()
    killed: set[int] = set()
    while rb.write_count < 256 + workers:
        time.sleep(0.01)
    end, next_kill, next_read = time.monotonic() + seconds, time.monotonic() + kill_every, 0
    try:
        while report.sampled == 0 or report.kills < min(kills, most_kills) or time.monotonic() < end:
            batch = rb.sample()
            report.sampled += len(batch)
            report.torn += torn(batch)
            if sampler != "uniform":
                batch["td_error"] = torch.rand(len(batch))
                rb.update_tensordict_priority(batch)
            if rb.write_count >= next_read:
                report.read_all(rb)
                next_read = rb.write_count + capacity // 4
            if report.kills < most_kills and time.monotonic() > next_kill:
                next_kill = time.monotonic() + draw.uniform(0, 2 * kill_every)
                worker = draw.choice(list(running))
                if told[worker]:
                    os.kill(running[worker].pid, signal.SIGKILL)
                    running.pop(worker).join()
                    killed.add(worker)
                    report.kills += 1
                    start()
    finally:
        stop[0] = 1
        for process in running.values():
            process.join(180)
            if process.exitcode != 0:
                raise RuntimeError(f"a worker ended with {process.exitcode}: is it blocked?")
    report.read_all(rb)
    report.stale_updates = int(rb.health()["stale_updates"])
    _count_missing(report, rb, intended, told, killed)
    check_priorities(rb)
    if share_next:
        check_pool(rb.storage.rows.table)
    return report, rb


def _count_missing(report: Report, rb: ReplayBuffer, intended: Any, told: Any, killed: set[int]) -> None:
    """Count as lost what workers were told was written and what is not there; as duplicated what nobody wrote."""
    total = 256
    for worker, last in report.last.items():
        if worker == len(told):
            continue
        rows = last + 1
        total += rows
        if rows != told[worker] and not (worker in killed and rows == intended[worker]):
            report.duplicated += max(0, rows - intended[worker])
            report.lost += 0 if report.overruns else max(0, told[worker] - rows)
    report.lost += not report.overruns and total != rb.write_count


def check_priorities(rb: ReplayBuffer) -> None:
    """Raise AssertionError unless the priorities are consistent, and every row has one."""
    sampler = rb.parts.prioritized
    if isinstance(sampler, ProportionalSampler):
        check_tree(sampler.tree, sampler.alpha, sampler.eps)
    elif isinstance(sampler, RankSampler):
        check_order(sampler.order)
    assert sampler is None or bool((sampler.priority(torch.arange(len(rb))) >= 0).all())
