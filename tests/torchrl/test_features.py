"""TorchRL's features over this package's storage and buffer: the same result as over
TorchRL's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import traj
from torchrl.data.replay_buffers import (
    HERReplayBuffer,
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    PrioritizedSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    Sequence,
    SliceSampler,
    StalenessAwareSampler,
    Storage,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers import ReplayBuffer as TorchRLBuffer

from rlbuf_td import (
    MinibatchSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    RingWriter,
    UniformSampler,
)
from tests.backends import needs_torchrl
from tests.catalogue import numbered_rows

CAPACITY = 40


def steps(count: int, start: int = 0) -> TensorDict:
    """Episodes of 7 steps: each entry tells the number of its step."""
    data = numbered_rows(count, start)
    x = data.rename_key_("x", "t")["t"]
    data["achieved_goal"] = x[:, None].float()
    data["collector", "traj_ids"] = x // 7
    data["step_count"], data["policy_version"], data["query"] = x % 7, x // 10, x // 4
    return data


def buffer_over(storage: Any, cls: Any = TensorDictReplayBuffer, **parts: Any) -> Any:
    writer = RingWriter() if cls is ReplayBuffer else TensorDictRoundRobinWriter()
    return cls(storage=storage(CAPACITY), writer=writer, **parts)


theirs = partial(buffer_over, LazyTensorStorage)
packed = partial(buffer_over, PackedStorage)
ours = partial(buffer_over, PackedStorage, ReplayBuffer)
both = pytest.mark.parametrize("make", [packed, ours], ids=["theirs", "ours"])


def same(left: Any, right: Any) -> None:
    assert {*left.keys(True, True)} == {*right.keys(True, True)}
    for key in left.keys(True, True):
        one, other = left[key], right[key]
        assert torch.equal(one.reshape(-1).double(), other.reshape(-1).double()), key


def sampled(make: Callable[..., Any], count: int = 3, **parts: Any) -> list[TensorDict]:
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002  TorchRL draws from it
    rb = make(batch_size=8, **parts)
    rb.extend(steps(CAPACITY + 9))
    return [rb.sample() for _ in range(count)]


def stale() -> StalenessAwareSampler:
    sampler = StalenessAwareSampler(max_staleness=2)
    sampler.consumer_version = 5
    return sampler


@both
@pytest.mark.filterwarnings("ignore:A group .or the set of groups. was smaller")
@pytest.mark.parametrize(
    "parts",
    [
        lambda: {"sample_unit": Sequence(2, burn_in=1, bootstrap=1)},
        lambda: {
            "sample_unit": Sequence(3, bootstrap=1),
            "sampler": PrioritizedSampler(CAPACITY, 0.6, 0.4),
        },
        lambda: {
            "sampler": SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"))
        },
        lambda: {"sampler": stale()},
        lambda: {"sampler": PromptGroupSampler(num_groups=2)},
    ],
    ids=[
        "sequences",
        "prioritized sequences",
        "slices",
        "staleness",
        "groups",
    ],
)
def test_batches_are_the_same(make: Any, parts: Callable[[], dict[str, Any]]) -> None:
    for left, right in zip(
        sampled(theirs, **parts()), sampled(make, **parts()), strict=True
    ):
        same(left, right.exclude("sampled_at"))


@both
def test_staleness_follows_the_consumer(make: Any) -> None:
    found = []
    for make_buffer in (theirs, make):
        torch.manual_seed(1)
        rb = make_buffer(sampler=StalenessAwareSampler(max_staleness=1), batch_size=16)
        rb.extend(steps(30))
        rb.sampler.consumer_version = 3
        found.append(rb.sample())
    versions, our_versions = (batch["policy_version"].tolist() for batch in found)
    assert versions == our_versions
    assert set(our_versions) == {2}  # the consumer's version minus max_staleness


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_torchrls_hindsight_buffer_relabels_the_same(strategy: Any) -> None:
    found = []
    for storage in (LazyTensorStorage, PackedStorage):
        torch.manual_seed(2)
        rb = HERReplayBuffer(
            reward_fn=lambda batch: batch["achieved_goal"] - batch["desired_goal"],
            strategy=strategy,
            storage=storage(CAPACITY),
            batch_size=16,
        )
        rb.extend(steps(30))
        found.append(rb.sample())
    same(*found)
    assert (found[1]["desired_goal"] > 0).any()


def test_offline_to_online() -> None:
    def run(make: Any, storage: Any) -> list[TensorDict]:
        torch.manual_seed(2)
        offline = make()
        offline.extend(steps(30))
        rb = OfflineToOnlineReplayBuffer(
            offline,
            online_storage=storage(CAPACITY),
            offline_fraction=0.5,
            batch_size=8,
        )
        rb.extend(steps(20, 30).exclude("index"))
        return [rb.sample() for _ in range(3)]

    def plain() -> Any:
        return TorchRLBuffer(storage=LazyTensorStorage(CAPACITY))

    for make in (lambda: ours(sampler=RandomSampler(), include_info=False), plain):
        for left, right in zip(
            run(plain, LazyTensorStorage), run(make, PackedStorage), strict=True
        ):
            same(left, right)


@both
def test_ensembles_of_buffers(make: Any) -> None:
    found = []
    for make_buffer in (theirs, make):
        torch.manual_seed(4)
        members = [make_buffer(sampler=RandomSampler(), batch_size=4) for _ in range(2)]
        rb = ReplayBufferEnsemble(*members, batch_size=4, sample_from_all=True)
        for k, member in enumerate(members):
            member.extend(steps(20, 20 * k))
        found.append(rb.sample())
    same(*found)
    assert found[1]["t"].shape == (2, 2)


@needs_torchrl("waiting")
def test_rate_limited_buffers() -> None:
    from torchrl.data.replay_buffers import RateLimitedReplayBuffer

    found = []
    for storage in (LazyTensorStorage, PackedStorage):
        torch.manual_seed(4)
        rb = RateLimitedReplayBuffer(
            storage=storage(CAPACITY), batch_size=4, samples_per_insert=1.0
        )
        rb.extend(steps(8))
        found.append(torch.stack([rb.sample(), rb.sample()]))
        assert not rb.can_sample()
        assert rb.stats()["samples_returned"] == 8
        with pytest.raises((TimeoutError, RuntimeError)):
            rb.sample(wait=True, timeout=0.01)
    same(*found)


@both
def test_queries_find_the_same_trajectories(make: Any) -> None:
    found = []
    for make_buffer in (theirs, make):
        rb = make_buffer(batch_size=8)
        rb.extend(steps(CAPACITY + 9))
        chosen = rb.query((traj.reward.sum() > 100) & (traj.length >= 3))
        found.append([trajectory.t.flatten().tolist() for trajectory in chosen])
        assert len(rb.query()) > len(chosen) > 2
    assert found[0] == found[1]


@needs_torchrl("exports")
@both
def test_exports_hold_the_same_items(make: Any) -> None:
    class Columns:
        def to_external(self, dataset: Any) -> list[int]:
            return [int(dataset[at]["t"]) for at in range(len(dataset))]

    found = []
    for make_buffer in (theirs, make):
        rb = make_buffer(batch_size=8)
        rb.extend(steps(CAPACITY + 9))
        rb.sample()
        keys = {"trajectory_key": ("collector", "traj_ids"), "step_key": "step_count"}
        found.append([rb.export(Columns()), rb.export(Columns(), **keys)])
        rb.sample()
    assert found[0] == found[1]
    assert found[1][1] == list(range(9, CAPACITY + 9))


@both
# TorchRL 0.14.1
@pytest.mark.filterwarnings("ignore:include_info is going to be deprecated")
@pytest.mark.parametrize("include_info", [None, True, False])
def test_the_report_is_included_as_torchrl_includes_it(
    make: Any, include_info: bool | None
) -> None:
    for make_buffer in (theirs, make):
        rb = make_buffer(sampler=PrioritizedSampler(CAPACITY, 0.6, 0.4), batch_size=8)
        rb.extend(steps(30))
        batch, info = rb.sample(include_info=include_info, return_info=True)
        is_included = include_info is not False
        assert ("priority_weight" in batch.keys()) == is_included
        assert {"index", "priority_weight"} <= info.keys()


class Remote(Storage):
    """Rows that are elsewhere: like TorchRL's ``StoreStorage``, it has no
    ``device``."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self._storage: Any = None
        self.length = 0

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        if self._storage is None:
            self._storage = data[0].expand(self.max_size).clone()
        self._storage[cursor] = data
        self.length = max(self.length, int(torch.as_tensor(cursor).max()) + 1)

    def get(self, index: Any) -> Any:
        return self._storage[: self.length][index]

    def __len__(self) -> int:
        return self.length

    def contains(self, item: Any) -> Any:
        return item < self.length

    def _empty(self) -> None:
        self.length = 0

    state_dict = load_state_dict = dumps = loads = None  # not needed here


@pytest.mark.parametrize(
    "make", [UniformSampler, lambda: ProportionalSampler(CAPACITY)]
)
@pytest.mark.parametrize("buffer", [TensorDictReplayBuffer, ReplayBuffer])
def test_a_storage_without_a_device_has_its_rows_on_the_cpu(make, buffer):
    assert not hasattr(Remote(CAPACITY), "device")
    rb = buffer(
        storage=Remote(CAPACITY), sampler=make(), batch_size=8, collate_fn=lambda x: x
    )
    for start in (0, 30):
        rb.extend(steps(30, start))
    batch = rb.sample()
    assert torch.equal(batch["next", "reward"][:, 0], batch["t"].float())
    assert set(batch["t"].tolist()) <= set(range(20, 60))


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_replacement_false_makes_a_sampler_of_epochs(cls: Any) -> None:
    make: Any = UniformSampler
    assert type(make(replacement=True)) is UniformSampler
    sampler = make(replacement=False, drop_last=True, shuffle=False)
    assert type(sampler) is MinibatchSampler
    assert (sampler.drop_last, sampler.shuffle) == (True, False)
    rb = cls(storage=PackedStorage(11), sampler=make(replacement=False), batch_size=3)
    rb.extend(TensorDict({"a": torch.arange(11)}, [11]))
    epoch = torch.cat([rb.sample()["a"] for _ in range(4)])
    assert epoch.sort().values.tolist() == [*range(11)]


@pytest.mark.parametrize(
    ("cls", "storage"),
    [(ReplayBuffer, PackedStorage), (TensorDictReplayBuffer, LazyTensorStorage)],
)
def test_a_max_capacity_below_the_storages_grows(cls: Any, storage: Any) -> None:
    rb = cls(
        storage=storage(10), sampler=ProportionalSampler(5, alpha=1.0), batch_size=4
    )
    rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
    rb.update_priority(torch.arange(4), torch.arange(1.0, 5.0))
    rb.extend(TensorDict({"x": torch.arange(6)}, [6]))
    assert rb.sampler.priority(torch.arange(10)).tolist() == [1, 2, 3, *[4.0] * 7]
    assert rb.sampler.max_size == 10
    small = ProportionalSampler(3)  # priorities that it has go with it
    small.update_priority(torch.arange(3), torch.arange(1.0, 4.0))
    small.mark_update(torch.tensor([7]), storage=rb.storage)
    assert small.priority(torch.arange(8)).tolist() == [1, 2, 3, -1, -1, -1, -1, 3]
