"""Batches that are copied to a device are those of a plain buffer, whatever torch's
defaults are; and batches that threads draw ahead."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.transforms import Compose, DoubleToFloat, ObservationNorm, Transform

from rlbuf_td import (
    HindsightSampler,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    QueueSampler,
    QueueWriter,
    RankSampler,
    ReplayBuffer,
    RolloutBuffer,
    RolloutWriter,
    UniformSampler,
)
from tests import catalogue
from tests.catalogue import assert_same, reward_fn
from tests.storages.test_sharing import elsewhere

STEPS, SIZE = 40, 12
QUEUE = QueueWriter()

SAMPLERS: dict[str, Any] = catalogue.SAMPLERS | {
    "final": lambda rows: HindsightSampler(
        RankSampler(rows), reward_fn, strategy="final"
    )
}
NAMES = [
    "uniform",
    "unique",
    "proportional",
    "rank",
    "minibatch",
    "hindsight",
    "n-step over hindsight",
    "n-step",
]
NAMES += ["sequence", "strict", "windows", "final"]


def data(n: int, first: int = 0, lanes: tuple[int, ...] = ()) -> TensorDict:
    time = torch.arange(first, first + n).expand(*lanes, n)
    x = (time * 10 + (torch.arange(lanes[0])[:, None] if lanes else 0)).unsqueeze(-1)
    done = (time % 7 == 6).unsqueeze(-1)

    def seen(x: torch.Tensor) -> TensorDict:
        camera = (x % 251).to(torch.uint8).repeat_interleave(3, -1)
        return TensorDict({"camera": camera, "speed": x.double()}, x.shape[:-1])

    after = {
        "observation": seen(x + 1),
        "achieved_goal": x.float() / 4,
        "reward": x.float(),
        "done": done,
    }
    leaves = {
        "observation": seen(x),
        "desired_goal": -x.float(),
        "action": x[..., 0].clone(),
        "is_init": time % 7 == 0,
    }
    return TensorDict(
        leaves | {"next": after | {"terminated": done, "truncated": done & False}},
        x.shape[:-1],
    )


def buffer(sampler: Any, ndim: int = 1, seed: int = 3, **kwargs: Any) -> Any:
    storage = kwargs.pop("storage", None) or PackedStorage(
        STEPS if ndim == 1 else 3 * STEPS, ndim=ndim
    )
    generator = torch.Generator().manual_seed(seed)
    return ReplayBuffer(
        storage=storage, sampler=sampler, batch_size=SIZE, generator=generator, **kwargs
    )


def write(rb: ReplayBuffer, n: int, first: int) -> None:
    rb.extend(data(n, first, (3,) if rb.storage.ndim == 2 else ()))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


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
    ("name", "ndim"),
    [(name, 1 + at % 2) for at, name in enumerate(NAMES)]
    + [("proportional", 1), ("proportional", 2), ("windows", 1), ("minibatch", 1)],
)
def test_batches_and_priorities_equal_those_without_device(device, name, ndim):
    rb = buffer(SAMPLERS[name](200), ndim, device=device)
    plain = buffer(SAMPLERS[name](200), ndim)
    for each in (rb, plain):
        write(each, STEPS - 3, 0)
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(9):
        batch, expected = rb.sample(), plain.sample()
        assert batch.device.type == device.type
        assert_same(batch.cpu(), expected)
        before.append((batch["action"], batch["action"].clone()))
        # a write would begin new epochs
        if name == "minibatch":
            continue
        if step % 2:  # some of what was drawn is replaced before its errors come
            for each in (rb, plain):
                write(each, 4, STEPS + 4 * step)
        learn(batch)
        learn(expected)
        rb.update_tensordict_priority(batch)
        plain.update_tensordict_priority(expected)
        assert rb.parts.prioritized is None or torch.equal(
            priorities(rb), priorities(plain)
        )
    # later batches are in other memory
    assert all(torch.equal(leaf, copied) for leaf, copied in before)
    if rb.parts.prioritized is not None:
        stale = rb.health()["stale_updates"]
        assert stale == plain.health()["stale_updates"]
        assert stale > 0 or name in ("sequence", "windows")  # which are few
    assert rb.health() == plain.health()


@pytest.mark.parametrize("ndim", [1, 2])
def test_reports_sizes_and_transforms_equal_those_without_device(device, ndim):
    def made(**kwargs: Any) -> ReplayBuffer:
        speeds = [("observation", "speed"), ("next", "observation", "speed")]
        norm = ObservationNorm(loc=1.0, scale=0.5, in_keys=speeds)
        rb = buffer(
            SAMPLERS["windows"](200),
            ndim,
            transform=Compose(
                DoubleToFloat(in_keys=speeds), norm.to(kwargs.get("device"))
            ),
            **kwargs,
        )
        write(rb, STEPS, 0)
        return rb

    rb, plain = made(device=device), made()
    (batch, info), (expected, other) = (
        rb.sample(return_info=True),
        plain.sample(return_info=True),
    )
    assert_same(batch.cpu(), expected)
    assert batch["observation", "speed"].dtype is torch.float32
    assert info.keys() == other.keys()
    assert_same(rb.sample(8).cpu(), plain.sample(8))
    bare = rb.sample(include_info=False)
    assert "index" not in bare
    assert_same(bare.cpu(), plain.sample(include_info=False))


@pytest.mark.parametrize(("ndim", "ahead"), [(1, 2), (2, 0)])
def test_batches_and_reports_are_on_the_device_before_the_transforms(ndim, ahead):
    seen: list[str] = []

    def note(batch: Any) -> Any:
        seen.append(batch.device.type)
        return batch

    rb = buffer(
        ProportionalSampler(3 * STEPS),
        ndim,
        device="meta",
        prefetch=ahead,
        transform=note,
    )
    write(rb, STEPS, 0)
    batch, info = rb.sample(return_info=True)
    assert {leaf.device.type for leaf in batch.values(True, True)} == {"meta"}
    index = info["index"] if ndim == 2 else (info["index"],)
    assert {
        part.device.type
        for part in (*index, info["priority_weight"], info["sampled_at"])
    } == {"meta"}
    rb.shutdown()
    assert {*seen} == {"meta"}


def test_rollouts_are_those_of_a_buffer_without_device(device):
    def made(**kwargs: Any) -> RolloutBuffer:
        rollout = RolloutBuffer(
            7,
            3,
            batch_size=5,
            epochs=2,
            normalize_advantage="minibatch",
            **kwargs,
        )
        rollout.set_rng(torch.Generator().manual_seed(2))
        return rollout

    fed, plain = made(device=device, storing_device="cpu"), made()
    for first in (0, 7):
        for buffer in (fed, plain):
            buffer.extend(
                data(7, first, (3,)).set(
                    "state_value", torch.linspace(0, 1, 21).view(3, 7, 1)
                )
            )
        for _ in range(2):
            next(iter(fed)), next(iter(plain))  # given up
        for ours, theirs in zip(fed, plain, strict=True):
            assert str(ours.device).startswith(device.type)
            assert torch.equal(ours["index"].cpu(), theirs["index"])
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
            assert torch.equal(
                batch["next", "observation", "speed"], batch["observation", "speed"] + 1
            )

    with ThreadPoolExecutor(3) as pool:
        writer, learners = (
            pool.submit(writing),
            [pool.submit(learning) for _ in range(2)],
        )
        wait(learners)
        stop.set()
        for each in (writer, *learners):
            each.result()
    found, own = priorities(rb), (rb.storage["next", "reward"][:, 0] % 7 - 3).abs()
    # never another row's; 3, the highest so far: a new row's
    assert ((found == own) | (found == 3)).all()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_dump_within_an_epoch_loses_no_row(wrapped, device, tmp_path):
    def made() -> ReplayBuffer:
        sampler, storage = MinibatchSampler(2), PackedStorage(STEPS)
        wrapper: Any = NStepSampler(sampler, 1, 0.9) if wrapped else sampler
        return ReplayBuffer(
            storage=storage, sampler=wrapper, batch_size=7, device=device
        )

    rb, again = made(), made()
    write(rb, STEPS, 0)
    batches = iter(rb)
    seen = [next(batches)["action"].cpu() for _ in range(4)]
    rb.dumps(tmp_path)
    again.loads(tmp_path)
    for rest in (batches, again):
        rows = torch.cat([*seen, *(batch["action"].cpu() for batch in rest)]) // 10
        assert [sorted(part.tolist()) for part in rows.split(STEPS)] == [
            [*range(STEPS)]
        ] * 2


def test_a_forked_process_samples_the_shared_rows_by_itself():
    storage = PackedStorage(STEPS, shared=True)
    rb = ReplayBuffer(
        storage=storage,
        sampler=ProportionalSampler(STEPS),
        batch_size=SIZE,
        device="cpu",
        prefetch=2,
    )
    write(rb, STEPS, 0)
    rb.sample()

    def work() -> None:
        write(rb, 10, 1000)
        rb.update_tensordict_priority(
            rb.sample().set("td_error", torch.full((SIZE,), 6.0))
        )
        rb.synchronize()

    elsewhere(work)
    assert (priorities(rb) == 6).any()
    for _ in range(3):
        batch = rb.sample()
    assert torch.equal(batch["action"], rb.storage["action"][batch["index"]])


def doubled(batch: Any, seen: set[str] | None = None) -> Any:
    if seen is not None:
        seen.add(threading.current_thread().name.partition("-")[0])
    return batch.set("twice", batch["action"] * 2)


@pytest.mark.parametrize(
    ("name", "ndim"),
    [("uniform", 1), ("proportional", 2), ("windows", 1), ("n-step", 2)],
)
def test_threads_draw_and_transform_whole_batches_ahead(name, ndim):
    seen: set[str] = set()
    rb = buffer(
        SAMPLERS[name](200), ndim, prefetch=3, transform=partial(doubled, seen=seen)
    )
    write(rb, STEPS - 3, 0)
    for step in range(9):
        batch = rb.sample()
        speed = batch["observation", "speed"][:, 0]
        assert torch.equal(speed, batch["action"].double())
        assert torch.equal(batch["twice"], 2 * batch["action"])
        learn(batch)
        rb.update_tensordict_priority(batch)
        write(rb, 2, STEPS + 2 * step)
    assert seen == {"MainThread", "ThreadPoolExecutor"}
    rb.append_transform(lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rb.sample()
    rb.shutdown()


@pytest.mark.parametrize(
    ("name", "ndim"), [("uniform", 2), ("rank", 1), ("sequence", 1), ("unique", 1)]
)
def test_without_transforms_batches_are_those_of_a_buffer_without_prefetch(name, ndim):
    buffers = [buffer(SAMPLERS[name](200), ndim, prefetch=ahead) for ahead in (0, 3)]
    for rb in buffers:
        write(rb, STEPS, 0)
    for batch, expected in zip(*(run(rb, 0, 9) for rb in buffers), strict=True):
        assert_same(batch, expected)


class Increased(Transform):
    def forward(self, batch: Any) -> Any:
        return batch.set("twice", batch["twice"] + 1)


@pytest.mark.parametrize("way", ["short", "device"])
@pytest.mark.parametrize(
    "change",
    ["sampler", "storage", "empty", "emptied by another", "load", "append", "insert"],
)
def test_no_batch_of_old_rows_is_served(way, change):
    def made(seed: int) -> Any:
        device = "cpu" if way == "device" else None
        return buffer(
            ProportionalSampler(STEPS),
            seed=seed,
            prefetch=3,
            transform=doubled,
            device=device,
        )

    rb, other = made(1), made(2)
    write(rb, STEPS, 0)
    write(other, STEPS, 1000)
    rb.sample(), rb.sample(), rb.sample()
    if change == "sampler":
        rb.set_sampler(UniformSampler())
    elif change == "storage":
        rb.set_storage(PackedStorage(STEPS))
    elif change.startswith("empt"):
        (rb if change == "empty" else ReplayBuffer(storage=rb.storage)).empty()
        with pytest.raises(RuntimeError, match="empty"):
            rb.sample()
    elif change == "load":
        rb.load_state_dict(other.state_dict())
    elif change == "append":
        rb.append_transform(Increased())
    elif change == "insert":
        rb.insert_transform(1, Increased())
    is_changed = change in ("append", "insert")
    if change in ("storage", "empty", "emptied by another"):
        write(rb, STEPS, 1000)
    for _ in range(5):
        batch = rb.sample()
        assert (batch["twice"] == batch["action"] * 2 + is_changed).all()
        assert ("priority_weight" in batch) == (change != "sampler")
        are_kept = is_changed or change == "sampler"
        assert (batch["action"] >= (0 if are_kept else 10_000)).all()
    rb.shutdown(), other.shutdown()


SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "none, with the transform": {"transform": doubled},
    "fewer": {"prefetch": 1, "transform": doubled},
    "as many, without the transform": {"prefetch": 3},
    "fewer, to a device": {"prefetch": 1, "device": "cpu"},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("way", ["state", "dump", "pickle"])
def test_no_way_takes_batches_drawn_ahead_along(way, name, tmp_path):
    rb = buffer(ProportionalSampler(STEPS), prefetch=3, transform=doubled)
    write(rb, STEPS, 0)
    rb.sample()
    again = buffer(ProportionalSampler(STEPS), **SETTINGS[name])
    if way == "state":
        again.load_state_dict(rb.state_dict())
    elif way == "dump":
        rb.dumps(tmp_path)
        again.loads(tmp_path)
    else:
        again = pickle.loads(pickle.dumps(rb))
    for each in (rb, again):
        write(each, STEPS, 1000)
        assert (each.sample()["action"] >= 10_000).all()
    rb.shutdown(), again.shutdown()


def test_prefetch_refuses_a_largest_age():
    with pytest.raises(
        ValueError,
        match="with prefetch=3, batches are drawn too early to keep max_age=4: use ",
    ):
        buffer(UniformSampler(max_age=4), prefetch=3)
    rb = buffer(UniformSampler(), prefetch=3)
    with pytest.raises(ValueError, match="max_age=4: use prefetch=0"):
        rb.set_sampler(NStepSampler(UniformSampler(max_age=4), 2, 0.9))
    assert rb.sampler.max_age is None


LATE: dict[str, dict[str, Any]] = {
    "the order of a MinibatchSampler": {
        "sampler": NStepSampler(MinibatchSampler(), 2, 0.9)
    },
    "the order of a QueueSampler": {"sampler": QueueSampler(QUEUE), "writer": QUEUE},
    "the newest rollout of a RolloutWriter": {"writer": RolloutWriter()},
    "the ratio of flow control": {"samples_per_insert": 1.0},
}


@pytest.mark.parametrize("kept", LATE)
def test_prefetch_refuses_what_decides_late_which_rows_to_draw(kept):
    with pytest.raises(ValueError, match=f"to keep {kept}: use prefetch=0"):
        ReplayBuffer(storage=PackedStorage(9), batch_size=4, prefetch=3, **LATE[kept])


def test_a_refused_writer_changes_nothing():
    rb = buffer(UniformSampler(), prefetch=3)
    writer = rb.writer
    with pytest.raises(ValueError, match="RolloutWriter: use prefetch=0"):
        rb.set_writer(RolloutWriter())
    assert rb.writer is writer


def test_a_batch_of_another_size_leaves_those_drawn_ahead():
    rb = buffer(UniformSampler(), prefetch=2, transform=doubled)
    write(rb, STEPS, 0)
    assert [len(rb.sample(size)) for size in (None, 5, None, 30, None, None)] == [
        SIZE,
        5,
        SIZE,
        30,
        SIZE,
        SIZE,
    ]
    rb.shutdown()


def life(name: str, ndim: int, path: Path) -> list[Any]:
    device = "cpu" if ndim == 2 else None  # with one, batches are prefetched
    rb, loaded = (buffer(SAMPLERS[name](200), ndim, device=device) for _ in range(2))
    given: list[Any] = []
    for first in (0, 30, 60):
        given.append(rb.extend(TRANSITIONS[ndim][..., first : first + 30]))
        given.append(
            torch.as_tensor(rb.add(TRANSITIONS[ndim][..., first]), device="cpu")
        )
        for _ in range(2):
            batch = rb.sample()
            given.append(batch.clone())
            rb.update_tensordict_priority(batch.set("td_error", ERRORS.clone()))
    rb.dumps(path)
    loaded.loads(path)
    loaded.load_state_dict(rb.state_dict())
    return [
        *given,
        loaded.sample(),
        loaded.chronological(),
        loaded.last(3),
        loaded.health(),
    ]


TRANSITIONS = {1: data(90), 2: data(90, lanes=(3,))}
ERRORS = torch.linspace(-2, 3, SIZE)


@pytest.mark.parametrize(
    ("name", "ndim"),
    [
        ("unique", 1),
        ("proportional", 2),
        ("rank", 1),
        ("minibatch", 2),
        ("windows", 1),
        ("strict", 2),
    ],
)
def test_torchs_defaults_change_nothing(name, ndim, tmp_path):
    expected = life(name, ndim, tmp_path / "a")
    dtype = torch.get_default_dtype()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        given = life(name, ndim, tmp_path / "b")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
    for ours, theirs in zip(given[:-1], expected[:-1], strict=True):
        assert_same(ours, theirs)
    assert given[-1] == expected[-1]
