"""``ReplayBuffer(device=...)`` gives the batches and priorities of a buffer without ``device``."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.transforms import Compose, DoubleToFloat, ObservationNorm

from rlbuf_td import (
    FreshRowsSampler,
    HindsightSampler,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    RolloutBuffer,
    UniformSampler,
)
from tests import catalogue
from tests.catalogue import SCHEMAS, assert_same, reward_fn, transitions
from tests.restoring import HOW, restored
from tests.storages.test_sharing import elsewhere

STEPS, SIZE = 40, 12

SAMPLERS: dict[str, Any] = catalogue.SAMPLERS | {
    "final": lambda rows: HindsightSampler(RankSampler(rows), reward_fn, strategy="final")
}
NAMES = ["uniform", "unique", "proportional", "rank", "minibatch", "hindsight", "n-step over hindsight", "n-step"]
NAMES += ["sequence", "strict", "windows", "final"]


def data(n: int, first: int = 0, lanes: tuple[int, ...] = ()) -> TensorDict:
    time = torch.arange(first, first + n).expand(*lanes, n)
    x = (time * 10 + (torch.arange(lanes[0])[:, None] if lanes else 0)).unsqueeze(-1)
    done = (time % 7 == 6).unsqueeze(-1)

    def seen(x: torch.Tensor) -> TensorDict:
        camera = (x % 251).to(torch.uint8).repeat_interleave(3, -1)
        return TensorDict({"camera": camera, "speed": x.double()}, x.shape[:-1])

    after = {"observation": seen(x + 1), "achieved_goal": x.float() / 4, "reward": x.float(), "done": done}
    leaves = {"observation": seen(x), "desired_goal": -x.float(), "action": x[..., 0].clone(), "is_init": time % 7 == 0}
    return TensorDict(leaves | {"next": after | {"terminated": done, "truncated": done & False}}, x.shape[:-1])


def buffer(sampler: Any, ndim: int = 1, seed: int = 3, **kwargs: Any) -> Any:
    storage = kwargs.pop("storage", None) or PackedStorage(STEPS if ndim == 1 else 3 * STEPS, ndim=ndim)
    generator = torch.Generator().manual_seed(seed)
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=SIZE, generator=generator, **kwargs)


def write(rb: ReplayBuffer, n: int, first: int) -> None:
    rb.extend(data(n, first, (3,) if rb.storage.ndim == 2 else ()))


class Reference:
    """A buffer without ``device``: draws batches ahead in plain Python."""

    def __init__(self, rb: ReplayBuffer, ahead: int) -> None:
        self.rb, self.ahead = rb, ahead
        self.drawn: deque[Any] = deque()

    def sample(self) -> Any:
        while len(self.drawn) <= self.ahead:
            self.drawn.append(self.rb.sample())
        return self.drawn.popleft()


def learn(batch: Any) -> None:
    batch["td_error"] = (batch["next", "reward"] % 7 - 3).clone()


def run(rb: Any, first: int, last: int, writes: bool = True) -> list[Any]:
    seen = []
    for step in range(first, last):
        batch = rb.sample()
        seen.append(batch.clone().cpu())
        learn(batch)
        rb.update_tensordict_priority(batch)
        if writes and step % 2:
            write(rb, 3, STEPS + 3 * step)
    return seen


def priorities(rb: Any) -> torch.Tensor:
    return rb.parts.prioritized.priority(torch.arange(len(rb.storage)))


@pytest.mark.parametrize(
    ("name", "ndim", "ahead"),
    [(name, 1 + at % 2, at % 3) for at, name in enumerate(NAMES)]
    + [("proportional", 1, 0), ("proportional", 2, 1), ("windows", 1, 2), ("minibatch", 1, 2)],
)
def test_batches_and_priorities_equal_those_without_device(device, name, ndim, ahead):
    rb = buffer(SAMPLERS[name](200), ndim, device=device, prefetch=ahead, count_replays=True)
    plain = Reference(buffer(SAMPLERS[name](200), ndim, count_replays=True), ahead if name != "minibatch" else 0)
    for each in (rb, plain.rb):
        write(each, STEPS - 3, 0)
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(9):
        batch, expected = rb.sample(), plain.sample()
        assert batch.device.type == device.type
        assert_same(batch.cpu(), expected)
        before.append((batch["action"], batch["action"].clone()))
        if name == "minibatch":  # a write would begin new epochs, and drop the batches drawn ahead
            continue
        if step % 2:  # some of what was drawn is replaced before its errors come
            for each in (rb, plain.rb):
                write(each, 4, STEPS + 4 * step)
        learn(batch)
        learn(expected)
        rb.update_tensordict_priority(batch)
        plain.rb.update_tensordict_priority(expected)
        assert rb.parts.prioritized is None or torch.equal(priorities(rb), priorities(plain.rb))
    assert all(torch.equal(leaf, copied) for leaf, copied in before)  # later batches are in other memory
    if rb.parts.prioritized is not None:
        stale = rb.health()["stale_updates"]
        assert stale == plain.rb.health()["stale_updates"]
        assert stale > 0 or name == "windows"  # which are few
    assert ahead or rb.health() == plain.rb.health()


@pytest.mark.filterwarnings("ignore:with ndim=., data of batch size")  # rows with batch dims of their own
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)
def test_every_kind_of_transition_arrives_whole(device, schema):
    def made(**kwargs: Any) -> ReplayBuffer:
        storage = PackedStorage(9, share_next="observation" in transitions(schema, 9).keys())
        rb = ReplayBuffer(storage=storage, sampler=ProportionalSampler(9), batch_size=5, **kwargs)
        rb.set_rng(torch.Generator().manual_seed(1))
        if schema.element:  # such rows are meant
            rb.storage.reserve(transitions(schema, 9)[0])
        rb.extend(transitions(schema, 9))
        return rb

    assert_same(made(device=device).sample().cpu(), made().sample())


@pytest.mark.parametrize("ndim", [1, 2])
def test_reports_sizes_and_transforms_equal_those_without_device(device, ndim):
    def made(**kwargs: Any) -> ReplayBuffer:
        speeds = [("observation", "speed"), ("next", "observation", "speed")]
        norm = ObservationNorm(loc=1.0, scale=0.5, in_keys=speeds)
        rb = buffer(
            SAMPLERS["windows"](200),
            ndim,
            transform=Compose(DoubleToFloat(in_keys=speeds), norm.to(kwargs.get("device"))),
            **kwargs,
        )
        write(rb, STEPS, 0)
        return rb

    rb, plain = made(device=device), made()
    (batch, info), (expected, other) = rb.sample(return_info=True), plain.sample(return_info=True)
    assert_same(batch.cpu(), expected)
    assert batch["observation", "speed"].dtype is torch.float32
    assert info.keys() == other.keys()
    assert_same(rb.sample(8).cpu(), plain.sample(8))
    bare = rb.sample(include_info=False)
    assert "index" not in bare
    assert_same(bare.cpu(), plain.sample(include_info=False))


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("ndim", [1, 2])
def test_batches_and_reports_are_on_the_device_before_the_transforms(ndim, ahead):
    seen: list[str] = []

    def note(batch: Any) -> Any:
        seen.append(batch.device.type)
        return batch

    rb = buffer(ProportionalSampler(3 * STEPS), ndim, device="meta", prefetch=ahead, transform=note)
    write(rb, STEPS, 0)
    batch, info = rb.sample(return_info=True)
    assert {leaf.device.type for leaf in batch.values(True, True)} == {"meta"}
    index = info["index"] if ndim == 2 else (info["index"],)
    assert {part.device.type for part in (*index, info["priority_weight"], info["sampled_at"])} == {"meta"}
    assert seen == ["meta"] * (1 + ahead)
    rb.shutdown()


def test_batches_are_pinned_after_the_transforms(monkeypatch):
    monkeypatch.setattr(TensorDict, "pin_memory", lambda batch: batch.set("pinned", batch["twice"] + 0))
    rb = buffer(UniformSampler(), pin_memory=True, transform=lambda batch: batch.set("twice", 2 * batch["action"]))
    write(rb, STEPS, 0)
    assert all("pinned" in rb.sample() for _ in range(3))


@pytest.mark.parametrize("ahead", [0, 2])
def test_updates_keep_their_order_whatever_they_name(device, ahead):
    rb = buffer(ProportionalSampler(STEPS), device=device, prefetch=ahead)
    plain = buffer(ProportionalSampler(STEPS))
    for each in (rb, plain):
        write(each, STEPS, 0)
    batch = rb.sample()
    part = batch[:5].clone().cpu().set("td_error", torch.full((5,), 30.0))
    for more in (0, 1):
        batch["td_error"] = torch.arange(1.0, 1 + SIZE, device=device) + more
        for update in (batch, part)[: 2 - more]:
            rb.update_tensordict_priority(update)
            plain.update_priority(update["index"].cpu(), update["td_error"].cpu())
    for each in (rb, plain):  # and so do those of rows that are named
        each.update_priority(batch["index"][:2].cpu(), 90.0)
    assert torch.equal(priorities(rb), priorities(plain))


@pytest.mark.parametrize("ahead", [0, 2])
def test_rollouts_are_those_of_a_buffer_without_device(device, ahead):
    def made(**kwargs: Any) -> RolloutBuffer:
        rollout = RolloutBuffer(7, 3, batch_size=5, epochs=2, normalize_advantage="minibatch", prefetch=ahead, **kwargs)
        rollout.set_rng(torch.Generator().manual_seed(2))
        return rollout

    fed, plain = made(device=device, storing_device="cpu"), made()
    for first in (0, 7):
        for each in (fed, plain):
            each.extend(data(7, first, (3,)).set("state_value", torch.linspace(0, 1, 21).view(3, 7, 1)))
        for _ in range(2):
            next(iter(fed)), next(iter(plain))  # given up
        for ours, theirs in zip(fed, plain, strict=True):
            assert ours.device.type == device.type
            assert (ours["index"].cpu() == theirs["index"]).all()
            torch.testing.assert_close(ours["advantage"].cpu(), theirs["advantage"])


def test_threads_write_and_sample_meanwhile(device):
    rb = buffer(ProportionalSampler(STEPS), device=device, prefetch=2)
    write(rb, STEPS, 0)
    rb.update_priority(torch.arange(STEPS), torch.arange(STEPS) * 10 % 7 - 3.0)
    stop = threading.Event()

    def writing() -> None:
        for first in count(STEPS, 3):
            if stop.is_set():
                return
            write(rb, 3, first)

    def learning() -> None:
        for batch in run(rb, 0, 60, writes=False):
            assert torch.equal(batch["next", "reward"][:, 0], batch["action"].float())
            assert torch.equal(batch["next", "observation", "speed"], batch["observation", "speed"] + 1)

    with ThreadPoolExecutor(3) as pool:
        writer, learners = pool.submit(writing), [pool.submit(learning) for _ in range(2)]
        wait(learners)
        stop.set()
        for each in (writer, *learners):
            each.result()
    found, own = priorities(rb), (rb.storage["next", "reward"][:, 0] % 7 - 3).abs()
    assert ((found == own) | (found == 3)).all()  # never another row's; 3, the highest so far: a new row's


@pytest.mark.parametrize("ahead", [0, 2])
def test_updates_are_compiled(ahead, monkeypatch):
    rb = buffer(ProportionalSampler(STEPS), device="cpu", prefetch=ahead)
    write(rb, STEPS, 0)
    rb.sample()
    batch = rb.sample()
    learn(batch)
    monkeypatch.setattr(rb, "_write_priorities", None)  # would be called by the form that is not compiled
    rb.update_tensordict_priority(batch)
    assert priorities(rb)[batch["index"]][-1].item() == batch["td_error"][-1].abs().item()


def saved_in_use(made: Callable[[int], Any], how: str, folder: Path) -> tuple[Any, Any, Any]:
    """Return a buffer that has been saved, one that was in use and has loaded it, and one that was never saved."""
    rb, never_saved, again = made(3), made(3), made(8)
    for each in (rb, never_saved):
        write(each, STEPS - 5, 0)
        run(each, 0, 7)
    write(again, 9, 500)
    run(again, 0, 3)  # these batches drawn ahead are dropped
    return rb, restored(rb, again, how, folder), never_saved


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("name", "ndim", "ahead"), [("proportional", 1, 2), ("windows", 2, 2), ("windows", 2, 0)])
def test_a_saved_buffer_and_a_loaded_one_draw_the_same_batches(device, name, ndim, ahead, how, tmp_path):
    def made(seed: int) -> Any:
        return buffer(SAMPLERS[name](200), ndim, seed, device=device, prefetch=ahead)

    rb, again, never_saved = saved_in_use(made, how, tmp_path)
    assert torch.equal(priorities(again), priorities(rb))
    assert torch.equal(priorities(rb), priorities(never_saved))
    for mine, other in zip(run(again, 7, 12), run(rb, 7, 12), strict=True):
        assert_same(mine.exclude("sampled_at"), other.exclude("sampled_at"))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_dump_within_an_epoch_loses_no_row(wrapped, device, tmp_path):
    def made() -> ReplayBuffer:
        sampler, storage = MinibatchSampler(2), PackedStorage(STEPS)
        wrapper: Any = NStepSampler(sampler, 1, 0.9) if wrapped else sampler
        return ReplayBuffer(storage=storage, sampler=wrapper, batch_size=7, device=device, prefetch=3)

    rb, again = made(), made()
    write(rb, STEPS, 0)
    batches = iter(rb)
    seen = [next(batches)["action"].cpu() for _ in range(4)]
    rb.dumps(tmp_path)
    again.loads(tmp_path)
    for rest in (batches, again):
        rows = torch.cat([*seen, *(batch["action"].cpu() for batch in rest)]) // 10
        assert [sorted(part.tolist()) for part in rows.split(STEPS)] == [[*range(STEPS)]] * 2


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("wrapped", [False, True])
def test_fresh_rows_of_dropped_batches_are_fresh_again(wrapped, device, how, tmp_path):
    def made(first: int) -> ReplayBuffer:
        sampler: Any = FreshRowsSampler(UniformSampler(), fresh=2)
        sampler = NStepSampler(sampler, 1, 0.9) if wrapped else sampler
        rb = ReplayBuffer(storage=PackedStorage(STEPS), sampler=sampler, batch_size=7, device=device, prefetch=3)
        write(rb, 10, first)
        return rb

    rb, again = made(0), made(100)
    seen = [rb.sample()["index"][:2].tolist()]  # and three more batches are drawn ahead
    write(rb, 2, 10)  # two more fresh rows
    again.sample()
    again = restored(rb, again, how, tmp_path)
    for each in (rb, again):
        rows = seen + [each.sample()["index"][:2].tolist() for _ in range(5)]
        assert rows == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_dumps_of_buffers_with_and_without_device_load_into_each_other(device, tmp_path):
    def made(**kwargs: Any) -> ReplayBuffer:
        rb = buffer(ProportionalSampler(STEPS), prefetch=2, **kwargs)
        write(rb, STEPS, 0)
        rb.sample()
        return rb

    for name, source, target in (("from", made(device=device), made()), ("to", made(), made(device=device))):
        source.dumps(tmp_path / name)
        target.loads(tmp_path / name)
        assert not target._prefetch_queue
        batch = target.sample()
        assert (batch["index"] * 10 == batch["action"]).all()
        source.shutdown()
        target.shutdown()


def test_buffers_for_environments_name_both_devices(device):
    schema = data(1)[0]
    rb = ReplayBuffer.from_schema(schema, STEPS, device=device, storing_device="cpu", batch_size=4)
    assert rb.storage.device.type == "cpu"
    write(rb, STEPS, 0)
    assert rb.sample().device.type == device.type
    assert rb._copies_batches
    there = ReplayBuffer.from_schema(schema, STEPS, device=device, batch_size=4, prefetch=2)
    there.extend(data(STEPS).to(device))
    assert there.storage.device.type == there.sample().device.type == device.type
    assert not there._copies_batches


def test_a_forked_process_samples_the_shared_rows_by_itself():
    storage = PackedStorage(STEPS, shared=True)
    rb = ReplayBuffer(storage=storage, sampler=ProportionalSampler(STEPS), batch_size=SIZE, device="cpu", prefetch=2)
    write(rb, STEPS, 0)
    rb.sample()

    def work() -> None:
        write(rb, 10, 1000)
        rb.update_tensordict_priority(rb.sample().set("td_error", torch.full((SIZE,), 6.0)))
        rb.synchronize()

    elsewhere(work)
    assert (priorities(rb) == 6).any()
    for _ in range(3):
        batch = rb.sample()
    assert torch.equal(batch["action"], rb.storage["action"][batch["index"]])
