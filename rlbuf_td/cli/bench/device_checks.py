"""Is what runs on a device right? Every kernel against its specification, and buffers by their law, in one go.

Each check takes a device and a size and raises if something is wrong. On a machine without a GPU the tests run them at
small sizes, the kernels in Triton's interpreter.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from tensordict import TensorDict
from torch.testing import assert_close

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
    functional,
)
from rlbuf_td.buffers.device.graph import CapturedStep
from rlbuf_td.kernels import sum_tree
from rlbuf_td.kernels.dispatch import Backend, forced
from rlbuf_td.kernels.episodes import FlagBoundaries

PATHS: tuple[Backend, Backend] = ("triton", "torch")


def trees(device: torch.device, rows: int, batch: int) -> None:
    """Compare updates and draws of the sum tree with the specification."""
    with forced("torch"):
        expected = sum_tree.SumTree.empty(rows, device)
        sum_tree.fill_(expected, 0, rows, 1.0, 0.6, 1e-6)
    tree = copy.deepcopy(expected)
    for _ in range(3):
        index = torch.randint(-1, rows, (batch,), device=device)
        td_error = torch.rand(batch, dtype=torch.float64, device=device)
        td_error[::17] = torch.nan
        uniform = torch.rand(batch, dtype=torch.float64, device=device)
        drawn = []
        for path, mine in zip(PATHS, (tree, expected), strict=True):
            with forced(path):
                sum_tree.update_(mine, index, td_error, rows, 0.6, 1e-6)
        for name, tensor in tree.tensors().items():
            assert_close(tensor, expected.tensors()[name], rtol=1e-12, atol=0.0, msg=f"{name} of the sum tree differs")
        _require(int(tree.refused) == int(expected.refused) > 0, "refused priorities are counted wrongly")
        for path in PATHS:
            with forced(path):
                drawn.append(sum_tree.draw(tree, uniform, True, rows, 0.4, "buffer"))
        _same(drawn[0], drawn[1])


def trajectories(device: torch.device, rows: int, batch: int) -> None:
    """Compare look-ups with the specification."""
    boundaries = FlagBoundaries(rows // 2, 2, device)
    boundaries.write(0, rows // 2, torch.rand(rows // 2, 2, device=device) < 0.01, None)
    cells = torch.randint(rows // 2 * 2, (batch,), device=device)
    found = []
    for path in PATHS:
        with forced(path):
            found.append(boundaries.reach(cells))
    for mine, theirs in zip(*found, strict=True):
        _require(torch.equal(mine, theirs), "a look-up differs from the specification")


def transitions(count: int, first: int = 0) -> TensorDict:
    """Return rows that know their number, in trajectories of ten."""
    x = torch.arange(first, first + count)
    after = {"reward": x[:, None].float(), "done": (x % 10 == 9)[:, None], "achieved_goal": x[:, None].float()}
    return TensorDict({"x": x, "desired_goal": -x[:, None].float(), "next": after}, [count])


def filling(device: torch.device, sampler: Any, batch: int) -> Iterator[tuple[ReplayBuffer, CapturedStep, int]]:
    """Yield a buffer of 50 rows and what it has captured, with how many rows are written: it fills, and it wraps."""
    rb = ReplayBuffer(storage=PackedStorage(50, device=device), sampler=sampler)
    rb.extend(transitions(20).to(device))
    captured = rb.capture(batch_size=batch)
    captured()
    for first in (20, 40):
        rb.extend(transitions(20, first).to(device))
        with waiting_is_an_error(device):
            captured()
        yield rb, captured, first + 20


def put_priorities(rb: ReplayBuffer, sampler: ProportionalSampler) -> torch.Tensor:
    """Give all rows priorities, and return their probabilities."""
    index = torch.arange(len(rb), device=rb.storage.device)
    rb.update_priority(index, torch.rand(len(rb), device=index.device) + 0.2)
    return sampler.probability(index).cpu()


def replays(device: torch.device, rows: int, batch: int) -> None:
    """Ask whether a captured step draws by the law while the buffer fills and wraps."""
    sampler = ProportionalSampler(50, stratified=False)
    for rb, captured, _ in filling(device, sampler, batch):
        probability, counts = put_priorities(rb, sampler), torch.zeros(len(rb))
        for _ in range(-(-100 * len(rb) // batch)):
            counts += captured()["index"].cpu().bincount(minlength=len(rb))
        _require_law(counts, probability, "replays")


def unique_replays(device: torch.device, rows: int, batch: int) -> None:
    """Ask whether captured draws without repeats take the first and the last row of a batch as they should."""
    for rb, captured, _ in filling(device, UniformSampler(unique=True), 9):
        drawn = torch.stack([captured()["index"].clone() for _ in range(max(200, rows // 20))]).cpu()
        _require(bool((drawn.sort(1).values.diff(dim=1) > 0).all()), "a row has been drawn twice")
        group = torch.nn.functional.one_hot(torch.arange(len(rb)) % 3).double()
        law = group.T @ (1 - torch.eye(len(rb), dtype=torch.float64)) @ group / (len(rb) * (len(rb) - 1))
        counts = (drawn[:, 0] % 3 * 3 + drawn[:, -1] % 3).bincount(minlength=9)
        _require_law(counts, law.flatten(), "replays without repeats")


def sequence_replays(device: torch.device, rows: int, batch: int) -> None:
    """Ask whether captured sequences have anchors by the law, rows of one trajectory, and priorities of their own."""
    sampler, reach = ProportionalSampler(50, stratified=False), torch.arange(-2, 4, device=device)
    for rb, captured, written in filling(device, SequenceSampler(sampler, 4, burn_in=2), 6 * batch):
        probability, counts = put_priorities(rb, sampler), torch.zeros(len(rb))
        oldest = written - len(rb)
        for _ in range(-(-max(10, rows // 1_000) * len(rb) // batch)):
            windows = captured().view(-1, 6)
            counts += windows["anchor_index"][:, 0].cpu().bincount(minlength=len(rb))
            wanted = (windows["anchor_index"][:, :1] - oldest) % 50 + oldest + reach
            begin = wanted[:, 2:3] // 10 * 10
            low, high = begin.clamp(min=oldest), (begin + 9).clamp(max=written - 1)
            _require(torch.equal(windows["x"], wanted.maximum(low).minimum(high)), "a window holds other rows")
            _require(torch.equal(windows["mask"], (wanted >= low) & (wanted <= high)), "a mask is wrong")
        _require_law(counts, probability, "anchors")


def ranks_in_replays(device: torch.device, rows: int, batch: int) -> None:
    """Ask whether ranks are those of the priorities while captured steps change them and rows are written."""
    rb = ReplayBuffer(storage=PackedStorage(rows, device=device), sampler=RankSampler(rows))
    part = rows // 8
    rb.extend(transitions(rows - part).to(device))
    captured = rb.capture(lambda drawn: drawn.set("td_error", torch.rand_like(drawn["priority_weight"])), batch)
    for _ in range(3):
        captured()
        captured()
        rb.extend(transitions(part).to(device))
        stored = torch.arange(len(rb), device=device)
        by_rank = rb.sampler.priority(stored).sort(descending=True, stable=True).indices
        _require(torch.equal(rb.sampler.rank(by_rank), stored + 1), "ranks differ from the order of the priorities")


def offloaded(device: torch.device, rows: int, batch: int) -> None:
    """Compare a buffer whose rows lie in RAM with one on the device: writes, batches, dumps."""
    on_gpu = device.type == "cuda"
    buffers = []
    for offload in (False, on_gpu):
        storage = PackedStorage(500, device=device, offload=offload)
        sampler = NStepSampler(ProportionalSampler(500), 3, 0.99)
        buffers.append(ReplayBuffer(storage=storage, sampler=sampler, batch_size=batch))
    plain, mine = buffers
    td_error = torch.rand(batch, device=device)
    for first in (0, 300, 600):  # the second write goes round the end
        drawn = []
        for rb in buffers:
            rb.extend(transitions(300, first).to(device))
            rb.add(transitions(1, first + 300)[0])
            torch.manual_seed(first)
            sampled = [rb.sample(), rb.capture(batch_size=batch)()]
            drawn += [copy.deepcopy(one.exclude("sampled_at")) for one in sampled]
            rb.update_tensordict_priority(sampled[0].set("td_error", td_error))
        _require(torch.equal(plain.storage["x"], mine.storage["x"]), "rows differ")
        _require(all(bool((a == b).all()) for a, b in zip(drawn[:2], drawn[2:], strict=True)), "batches differ")
    _require(mine.storage.device == plain.storage.device == drawn[0].device, "rows or batches lie elsewhere")
    for source, target in ((mine, plain), (plain, mine)):
        rows_before = source.storage[:].clone()
        source.extend(transitions(70, 900).to(device))
        with tempfile.TemporaryDirectory() as folder:
            source.dumps(folder, sync=False)
            target.loads(folder)
        _require(bool((target.storage[:] == source.storage[:]).all()), "loaded rows differ")
        _require(not bool((target.storage[:] == rows_before).all()), "nothing was loaded")
        again = copy.deepcopy(target)
        _require(again.storage.offload == target.storage.offload, "a copy keeps its rows elsewhere")
        _require(bool((again.storage[:] == target.storage[:]).all()), "copied rows differ")


def no_waiting(device: torch.device, rows: int, batch: int) -> None:
    """Ask whether nothing that a training loop calls waits for the device."""
    data = transitions(2_000).set("td_error", torch.rand(2_000)).to(device)
    one, td_error = data[0], torch.rand(batch, device=device)
    given = [torch.randn(8, 128, 1, device=device) for _ in range(3)] + [torch.zeros(8, 128, 1, device=device) > 0] * 2
    samplers = (
        UniformSampler(),
        ProportionalSampler(2_000),
        RankSampler(2_000),
        NStepSampler(ProportionalSampler(2_000), 3, 0.99),
        SequenceSampler(ProportionalSampler(2_000), 3, burn_in=1),
        HindsightSampler(ProportionalSampler(2_000), lambda batch: batch["desired_goal"][:, 0]),
    )
    for sampler, offload in product(samplers, {False, device.type == "cuda"}):
        storage = PackedStorage(2_000, device=device, offload=offload)
        rb = ReplayBuffer(storage=storage, sampler=copy.deepcopy(sampler), batch_size=batch)

        def loop(rb: ReplayBuffer = rb) -> None:
            rb.extend(data[:256])
            rb.add(one)
            drawn = rb.sample()
            drawn["td_error"] = td_error
            rb.update_tensordict_priority(drawn)
            if hasattr(rb.sampler, "alpha"):
                rb.sampler.alpha *= 0.9  # as a schedule does

        loop()
        loop()
        with waiting_is_an_error(device):
            loop()
    functional.generalized_advantage_estimate(0.99, 0.95, *given)
    with waiting_is_an_error(device):
        functional.generalized_advantage_estimate(0.99, 0.95, *given)


@contextmanager
def waiting_is_an_error(device: torch.device) -> Iterator[None]:
    """Raise where the host waits for the device; nothing on the CPU."""
    if device.type != "cuda":
        yield
        return
    try:
        torch.cuda.set_sync_debug_mode("error")  # which may warn, and has done its work then
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


CHECKS: dict[str, Callable[[torch.device, int, int], None]] = {
    "sum tree": trees,
    "trajectories": trajectories,
    "captured steps": replays,
    "captured draws without repeats": unique_replays,
    "captured sequences": sequence_replays,
    "ranks in captured steps": ranks_in_replays,
    "offloaded rows": offloaded,
    "nothing waits": no_waiting,
}


def run(device: torch.device, rows: int, batch: int) -> Iterator[tuple[str, Exception | None]]:
    """Run all checks; yield the name of each with what went wrong."""
    for name, check in CHECKS.items():
        try:
            check(device, rows, batch)
        except Exception as error:  # noqa: BLE001  a GPU is not at hand for long: the other checks are to run, too
            yield name, error
        else:
            yield name, None


def _require_law(counts: torch.Tensor, probability: torch.Tensor, what: str) -> None:
    expected = probability * counts.sum()
    statistic, cells = float(((counts - expected) ** 2 / expected).sum()), len(expected)
    # Chi-square over `cells` has this mean and deviation; five deviations come by chance once in a million.
    _require(statistic < cells + 5 * (2 * cells) ** 0.5, f"{what} do not follow the law: {statistic:.0f}")


def _same(mine: Any, theirs: Any) -> None:
    _require(torch.equal(mine[0], theirs[0]), "rows drawn differ from the specification")
    assert_close(mine[1], theirs[1])


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)
