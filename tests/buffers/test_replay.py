"""The replay buffer: its direct path against TorchRL's general one, and everything that
TorchRL's users do with one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from threading import Thread
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    CompressedListStorage,
    LazyTensorStorage,
    ListStorage,
)
from torchrl.data.replay_buffers import (
    RandomSampler,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers import ReplayBuffer as TorchRLReplayBuffer
from torchrl.envs.transforms import (
    Compose,
    DoubleToFloat,
    ObservationNorm,
    RenameTransform,
    SelectTransform,
)

import rlbuf_td
from rlbuf_td import (
    EpisodeStats,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    PrioritizedReplayBuffer,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    UniformSampler,
)
from rlbuf_td.samplers.priorities import Update
from rlbuf_td.samplers.proportional import ProportionalRule
from tests import catalogue
from tests.catalogue import SAMPLERS, buffer_of


def transitions(count: int, *, lanes: int = 0, start: int = 0) -> TensorDict:
    shape = [lanes, count] if lanes else [count]
    number = torch.arange(start, start + count * max(lanes, 1)).view(shape)
    return TensorDict(
        {
            "observation": number[..., None].expand(*shape, 3).float().clone(),
            "action": (number % 5)[..., None].clone(),
            "next": {
                "reward": number[..., None].double(),
                "done": (number % 7 == 0)[..., None],
            },
        },
        shape,
    )


def make(
    cls, sampler: str, *, lanes: int = 0, seed: int = 0, **kwargs
) -> TensorDictReplayBuffer:
    parts = {"cls": cls, "seed": seed, "writer": RingWriter(), "batch_size": 8} | kwargs
    return buffer_of(60 // max(lanes, 1), SAMPLERS[sampler](60), lanes, **parts)


def filled(
    count: int, sampler: str = "uniform", *, lanes: int = 0, **kwargs
) -> ReplayBuffer:
    rb = make(ReplayBuffer, sampler, lanes=lanes, **kwargs)
    rb.extend(transitions(count, lanes=lanes))
    return rb


def assert_same(first: TensorDict, second: TensorDict) -> None:
    # TorchRL's buffers do not add it
    catalogue.assert_same(first.exclude("sampled_at"), second.exclude("sampled_at"))


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("lanes", [0, 3])
def test_what_is_known_of_the_rows_survives_a_transform_that_selects_keys(
    lanes, device
):
    key = ("loss", "error")
    options = {
        "transform": SelectTransform("observation"),
        "device": device,
        "priority_key": key,
    }
    rb = filled(20, "proportional", lanes=lanes, **options)
    batch, info = rb.sample(return_info=True)
    assert isinstance(info["index"], tuple) == bool(lanes)
    assert set(batch.keys()) == {
        "observation",
        "index",
        "priority_weight",
        "sampled_at",
    }
    index = batch["index"].unbind(-1) if lanes else batch["index"]
    assert torch.equal(rb.storage.get(index)["observation"], batch["observation"])
    batch[key] = torch.full((8, 1), 7.0)
    rb.update_tensordict_priority(batch)
    assert (rb.sampler.priority(torch.arange(20 * (lanes or 1))) == 7).sum() == len(
        batch["index"].unique(dim=0)
    )


def test_transforms_see_the_index_and_may_drop_rows_and_cast():
    seen = set()

    def look(batch: TensorDict) -> TensorDict:
        seen.update(batch.keys())
        return batch

    rb = filled(20, "proportional", transform=look)
    rb.append_transform(RenameTransform(["observation"], ["state"]))
    rb.append_transform(DoubleToFloat(in_keys=[("next", "reward")]))
    batch = rb.sample()
    assert {"index", "priority_weight"} <= seen
    assert "state" in batch.keys()
    assert (batch["next", "reward"].dtype, rb.storage["next", "reward"].dtype) == (
        torch.float32,
        torch.float64,
    )
    rb = filled(
        20, "proportional", transform=lambda batch: batch.select("observation")[:3]
    )
    assert list(rb.sample().keys()) == ["observation"]  # no index of others


def test_a_transform_on_the_way_in_changes_what_the_short_path_stores(monkeypatch):
    norm = ObservationNorm(
        loc=0.0, scale=2.0, in_keys=["observation"], in_keys_inv=["observation"]
    )
    rb = filled(4, transform=Compose(norm))
    assert torch.equal(rb.storage["observation"], transitions(4)["observation"] / 2)
    assert torch.equal(
        rb.sample().get("observation").sort(0).values % 1, torch.zeros(8, 3)
    )
    monkeypatch.setattr(RingWriter, "extend", None)
    monkeypatch.setattr(RingWriter, "add", None)
    data = transitions(6)
    assert rb.extend(data[4:]).tolist() == [4, 5]
    assert rb.add(data[0]) == 6
    assert torch.equal(
        rb.storage["observation"],
        torch.cat([data["observation"] / 2, torch.zeros(1, 3)]),
    )


def test_sample_options_and_iteration_do_as_in_torchrl():
    rb = filled(20, "proportional")
    assert set(rb.sample(return_info=True)[1]) == {
        "index",
        "priority_weight",
        "sampled_at",
    }
    assert "index" not in rb.sample(include_info=False).keys()
    assert [batch.batch_size for batch in islice(rb, 4)] == [(8,)] * 4
    assert rb.sample(5).batch_size == (5,)
    for index in (slice(None), slice(2, 4), torch.tensor([1, 5])):
        assert_same(rb[index], transitions(20)[index])
    words = (
        "20 of 60 rows",
        "bytes per row",
        "'observation': float32 (3,)",
        "ProportionalSampler(alpha=0.6",
        "33.3%",
    )
    assert [word for word in words if word not in repr(rb)] == []


@pytest.mark.parametrize("sampler", ["uniform", "general"])
def test_a_buffer_may_leave_the_report_out_as_torchrls_plain_one_does(sampler):
    slices = SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=False)
    options = {"sampler": slices} if sampler == "general" else {}
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (ReplayBuffer, {}),
        (ReplayBuffer, {"include_info": False}),
    ]
    kinds.append((TorchRLReplayBuffer, {}))
    buffers = [
        cls(storage=PackedStorage(40), batch_size=8, **options, **more)
        for cls, more in kinds
    ]
    found = []
    for rb in buffers:
        flags = {
            name: torch.zeros(40, 1, dtype=torch.bool) for name in ("done", "truncated")
        }
        rb.extend(TensorDict({"x": torch.arange(40), "next": flags}, [40]))
        for _ in range(2):  # the general path, then the plan
            batch, (_, info) = rb.sample(), rb.sample(return_info=True)
        assert "index" in info
        found.append(("index" in batch, bool(batch["next", "truncated"].any())))
    assert found == [(True, sampler == "general"), (False, False), (False, False)]


def test_transforms_see_what_torchrls_samplers_report_also_in_batches_drawn_ahead():
    for ahead in (0, 3):
        options: Any = {"batch_size": 8, "prefetch": ahead}
        rb = ReplayBuffer(storage=PackedStorage(20), sampler=RandomSampler(), **options)
        rb.append_transform(lambda batch: batch.set("seen", batch["index"]))
        rb.extend(transitions(20))
        for _ in range(6):
            batch = rb.sample()
            assert torch.equal(batch["seen"], batch["index"])


def test_the_keywords_of_torchrls_prioritized_buffer():
    rb = PrioritizedReplayBuffer(
        alpha=0.7, beta=0.9, storage=lambda: PackedStorage(30), batch_size=4, prefetch=3
    )
    assert (rb.sampler.alpha, rb.sampler.beta, rb.sampler.eps, rb.storage.max_size) == (
        0.7,
        0.9,
        1e-8,
        30,
    )
    rb.extend(transitions(20))
    batch = rb.sample()
    batch["td_error"] = torch.full((4,), 2.0)
    rb.update_tensordict_priority(batch)
    assert (rb.sampler.priority(batch["index"]) == 2).all()
    again = ReplayBuffer(storage=PackedStorage(30))
    again.extend(batch.exclude("td_error"))  # without the sampler's report
    assert {"priority_weight", "sampled_at"}.isdisjoint(again.storage[:].keys())
    rb.extend(batch.exclude("td_error"))
    mine = ReplayBuffer(storage=PackedStorage(30))
    mine.extend(TensorDict({"sampled_at": torch.arange(5)}, [5]))  # a key of one's own
    assert mine.storage["sampled_at"].tolist() == [0, 1, 2, 3, 4]


def test_parts_have_defaults_and_may_be_made_at_the_first_use():
    rb = ReplayBuffer(delayed_init=True)
    assert "not initialized" in repr(rb)
    rb.extend(transitions(3))
    assert [type(part) for part in (rb.storage, rb.sampler, rb.writer)] == [
        PackedStorage,
        UniformSampler,
        RingWriter,
    ]
    assert rb.storage.max_size == 1_000
    assert rb.sample(2).batch_size == (2,)


@pytest.mark.parametrize("how", ["add", "extend"])
def test_td_errors_that_come_with_the_data_are_the_rows_priorities(how):
    rb = make(ReplayBuffer, "proportional")
    data = transitions(4)
    data["td_error"] = torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    for each in data.unbind(0) if how == "add" else [data]:
        getattr(rb, how)(each)
    assert rb.sampler.priority(torch.arange(4)).tolist() == [1.0, 2.0, 3.0, 0.5]
    if how == "extend":
        rb.extend(data, update_priority=False)
        assert rb.sampler.priority(torch.arange(4, 8)).tolist() == [3.0] * 4


@pytest.mark.parametrize(("lanes", "shape"), [(0, (1,)), (3, ()), (3, (4,))])
@pytest.mark.parametrize("reduction", ["max", "min", "mean", "median"])
def test_several_td_errors_a_row_are_reduced_by_magnitude(lanes, shape, reduction):
    rb = filled(20, "proportional", lanes=lanes)
    rb.sampler.reduction = reduction
    for _ in range(2):  # the second update is compiled
        batch = rb.sample().exclude("sampled_at")  # these are the stamps of other rows
        batch["index"] = batch["index"][:1].expand_as(batch["index"]).clone()
        batch["td_error"] = (
            -torch.arange(1.0, 9.0)
            .view(8, *(1,) * len(shape))
            .expand(8, *shape)
            .clone()
        )
        if shape == (4,):
            batch["td_error"][:, 1] *= -3
        rb.update_tensordict_priority(batch)
        last = rb.sampler.priority(batch["index"][:1], storage=rb.storage)
        assert last.tolist() == [
            {"max": 24.0, "mean": 12.0}.get(reduction, 8.0) if shape == (4,) else 8.0
        ]


@pytest.mark.parametrize("ndim", [1, 2])
def test_rows_that_are_batches_come_back_as_such(ndim):
    rb = ReplayBuffer(
        storage=PackedStorage(12, ndim=ndim),
        sampler=ProportionalSampler(12),
        batch_size=4,
    )
    rb.extend(
        TensorDict(
            {"x": torch.arange(24.0).view(2, 3, 4)[(0,) * (2 - ndim)]},
            [2, 3, 4][2 - ndim :],
        )
    )
    batch = rb.sample()  # of rows of four
    assert (
        batch.batch_size
        == batch["priority_weight"].shape
        == batch["index"].shape[:2]
        == (4, 4)
    )
    batch["td_error"] = batch["x"] + 1
    rb.update_tensordict_priority(batch)
    index = batch["index"][:, 0].unbind(-1) if ndim == 2 else batch["index"][:, 0]
    found = rb.sampler.priority(index, storage=rb.storage)
    assert torch.equal(found, batch["x"][:, 3].double() + 1)  # the largest of each row


@pytest.mark.parametrize(
    "writer", [TensorDictMaxValueWriter, TensorDictRoundRobinWriter]
)
@pytest.mark.parametrize("first", ["add", "extend"])
def test_writers_of_torchrl_that_add_the_index_write_one_row_and_then_several(
    writer, first
):
    settings = {"rank_key": "observation"} if writer is TensorDictMaxValueWriter else {}
    rb = ReplayBuffer(storage=PackedStorage(8), writer=writer(**settings), batch_size=4)
    data = TensorDict({"observation": torch.arange(6.0)[:, None]}, [6])
    for how in (first, "add", "extend"):
        rb.add(data[0].clone()) if how == "add" else rb.extend(data.clone())
    assert len(rb) == 8
    assert sorted(rb[:].keys()) == ["observation"]
    assert sorted(rb.sample().keys()) == ["index", "observation"]


def test_batches_without_the_report_say_how_to_update_their_priorities():
    rb = ReplayBuffer(
        storage=PackedStorage(9),
        sampler=ProportionalSampler(9),
        batch_size=4,
        include_info=False,
    )
    rb.extend(transitions(9))
    batch = rb.sample().set("td_error", torch.full((4,), 7.0))
    with pytest.raises(
        KeyError,
        match=r"no 'index': it was sampled with include_info=False.* with return_info=True",
    ):
        rb.update_tensordict_priority(batch)
    batch, info = rb.sample(return_info=True)
    rb.update_priority(info["index"], torch.full((4,), 7.0))
    assert (rb.sampler.priority(info["index"]) == 7).all()
    with pytest.raises(KeyError, match="include_info=True"):
        rb.write_back(batch, "observation", sampled_at=torch.zeros(4))


def steps_of(lanes: int, steps: int) -> TensorDict:
    seen = torch.rand(lanes, steps, 3)
    after = {
        "observation": seen,
        "reward": seen[..., :1],
        "done": torch.zeros(lanes, steps, 1, dtype=torch.bool),
    }
    return TensorDict({"observation": seen, "next": after}, [lanes, steps])


def test_a_first_write_that_makes_rows_of_whole_trajectories_says_so():
    rb = ReplayBuffer(storage=PackedStorage(20), batch_size=4)
    with pytest.warns(
        UserWarning,
        match=r"batch size \[4, 5\] makes rows of \[5\] steps .* storage with ndim=2, or flat",
    ):
        rb.extend(steps_of(4, 5))
    assert rb.sample().shape == (4, 5)  # it may be meant
    meant = ReplayBuffer(storage=PackedStorage(20), batch_size=4)
    meant.storage.reserve(steps_of(4, 5)[0])
    meant.extend(steps_of(4, 5))
    with pytest.warns(
        UserWarning,
        match=r"batch size \[5\] makes rows of \[5\] steps .* rows of one step, use extend",
    ):
        ReplayBuffer(storage=PackedStorage(20)).add(steps_of(4, 5)[0])


@pytest.mark.parametrize("lanes", [0, 3])
def test_what_has_been_extended_can_be_given_priorities_afterwards(lanes):
    rb = make(ReplayBuffer, "proportional", lanes=lanes)
    data = transitions(4, lanes=lanes)
    index = rb.extend(data)
    # time first, as the index has it
    rows = data.transpose(0, 1).reshape(-1) if lanes else data
    rb.update_priority(index, rows["observation"][:, 0] + 1)
    stored = rb.storage["observation"][..., 0].flatten()
    assert torch.equal(
        rb.sampler.priority(torch.arange(len(rb))), (stored + 1).double()
    )
    shaped = index.view(4, 3, 2).transpose(0, 1) if lanes else index
    # lanes first, both alike
    rb.update_priority(shaped, data["observation"][..., 0] + 2)
    assert torch.equal(
        rb.sampler.priority(torch.arange(len(rb))), (stored + 2).double()
    )


def test_a_storage_put_in_place_later_takes_the_writes():
    rb, other = make(ReplayBuffer, "proportional"), make(ReplayBuffer, "uniform")
    rb.extend(transitions(6))
    other.extend(transitions(65, start=100))
    rb.set_storage(other.storage)
    assert (rb.sampler.priority(torch.arange(60)) == 1.0).all()
    assert rb.extend(transitions(2, start=900)).tolist() == [5, 6]
    assert rb.chronological()["observation"][-3:, 0].tolist() == [164.0, 900.0, 901.0]
    assert rb.chronological()["observation"][0, 0] == 107.0


@pytest.mark.parametrize("delayed_init", [False, True])
@pytest.mark.parametrize(
    ("written", "expected"), [(6, [6, 7]), (60, [0, 1]), (65, [5, 6])]
)
def test_a_new_buffer_over_rows_that_are_there_goes_on_behind_the_newest(
    written, expected, delayed_init
):
    first = ReplayBuffer(storage=PackedStorage(60))
    first.extend(transitions(written))
    rb = ReplayBuffer(
        storage=first.storage,
        sampler=ProportionalSampler(60),
        delayed_init=delayed_init,
    )
    assert rb.chronological()["observation"][:, 0].tolist() == list(
        range(max(0, written - 60), written)
    )
    assert rb.extend(transitions(2, start=900)).tolist() == expected
    assert rb.write_count == first.write_count == written + 2
    assert len(rb) == min(60, written + 2)
    assert rb.chronological()["observation"][-3:, 0].tolist() == [
        written - 1.0,
        900.0,
        901.0,
    ]


def test_consumed_items_are_left_to_torchrls_sampler():
    rb = ReplayBuffer(
        storage=PackedStorage(20), batch_size=4, consume_after_n_samples=1
    )
    rb.extend(transitions(20))
    assert {row for _ in range(5) for row in rb.sample()["index"].tolist()} == {
        *range(20)
    }
    assert len(rb) == 0


@pytest.mark.parametrize("writer", [ReservoirWriter, ReservoirWriter()])
def test_other_buffers_over_the_storage_go_on_without_a_buffer_that_was_refused(writer):
    rb = ReplayBuffer(
        storage=PackedStorage(10), sampler=ProportionalSampler(10), batch_size=4
    )
    rb.extend(transitions(5))
    with pytest.raises(ValueError, match="a RecencySampler needs rows in time order"):
        ReplayBuffer(
            storage=rb.storage, sampler=RecencySampler(), writer=writer, batch_size=4
        )
    assert rb.extend(transitions(3)).tolist() == [5, 6, 7]
    assert len(rb.sample()) == 4


# -- calls that are compiled, and what users put into them


class OwnDraw(ProportionalSampler):
    def draw(self, storage: Any, batch_size: int) -> Any:
        flat, info = super().draw(storage, batch_size)
        return torch.zeros_like(flat), info


class OwnRule(ProportionalSampler):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rule.__class__ = type("Doubled", (type(self.rule),), {"update_": doubled})


def doubled(rule: Any, flat: torch.Tensor, td_error: torch.Tensor, rows: int) -> Any:
    return ProportionalRule.update_(rule, flat, 2 * td_error, rows)


class OwnStorage(PackedStorage):
    """A storage of a user's own that changes nothing."""


class ReadsItself(PackedStorage):
    def gather(self, flat: torch.Tensor) -> TensorDict:
        return super().gather(flat).set("number", flat + 1_000)


class OwnAnchors(NStepSampler):
    def anchored(self, entries: Any, update: Update) -> Update:
        return update._replace(td_error=2 * update.td_error)


def options() -> dict[str, ReplayBuffer]:
    def made(
        sampler: Any = ProportionalSampler, storage: Any = PackedStorage, **options: Any
    ) -> ReplayBuffer:
        return ReplayBuffer(
            storage=storage(24), sampler=sampler(24), batch_size=8, **options
        )

    return {
        "subclass of the sampler": made(type("Subclass", (ProportionalSampler,), {})),
        "subclass of the storage": made(storage=OwnStorage),
        "statistics": made(stats=EpisodeStats()),
        "flow control": made(samples_per_insert=1.0, tolerance=1_000),
        "a draw of one's own": made(OwnDraw),
        "a rule of one's own": made(OwnRule),
    }


@pytest.mark.parametrize("option", options())
def test_options_and_subclasses_are_compiled(option):
    rb = options()[option]
    for start in range(0, 18, 6):
        rb.extend(transitions(6, start=start))
        batch = rb.sample().set("td_error", torch.full((8,), 3.0))
        rb.update_tensordict_priority(batch)
    compiled, *reasons = rb.compiled.split("; not ")
    assert "extend" in compiled
    assert "sample" in compiled
    assert not reasons
    expected = 6.0 if option == "a rule of one's own" else 3.0
    assert (rb.sampler.priority(batch["index"]) == expected).all()
    assert option != "a draw of one's own" or (batch["index"] == 0).all()
    assert rb.flow is None or rb.health()["samples"] == 24


def test_what_a_subclass_overrides_is_called_at_every_sample_and_update():
    rb = ReplayBuffer(
        storage=ReadsItself(24), sampler=ProportionalSampler(24), batch_size=8
    )
    rb.extend(transitions(20).set("number", torch.arange(20)))
    for _ in range(3):
        batch = rb.sample()
        assert torch.equal(batch["number"], batch["index"] + 1_000)
    assert "ReadsItself has no compiled read" in rb.compiled
    rb = ReplayBuffer(
        storage=PackedStorage(24),
        sampler=OwnAnchors(ProportionalSampler(24), 3, 0.9),
        batch_size=8,
    )
    rb.extend(
        transitions(20).set(
            ("next", "terminated"), torch.zeros(20, 1, dtype=torch.bool)
        )
    )
    for error in (1.0, 2.0, 3.0):
        batch = rb.sample().set("td_error", torch.full((8,), error))
        rb.update_tensordict_priority(batch)
        assert (rb.sampler.innermost.priority(batch["index"]) == 2 * error).all()


def test_unique_set_later_draws_no_row_twice():
    rb = ReplayBuffer(storage=PackedStorage(24), batch_size=8)
    rb.extend(transitions(8))
    for unique in (False, False, True, False):
        rb.sampler.unique = unique
        counts = torch.stack([rb.sample()["index"].sort().values for _ in range(10)])
        assert (counts == torch.arange(8)).all() == unique


class LooksUpRanks:
    """A listener that asks the sampler for ranks after each write."""

    def __init__(self, rb: ReplayBuffer) -> None:
        self.rb, self.told = rb, 0

    def mark_update(self, index: Any) -> None:
        self.rb.sampler.rank(torch.arange(len(self.rb)))
        self.told += 1


def test_listeners_may_look_up_ranks_during_a_write():
    rb = ReplayBuffer(storage=PackedStorage(24), sampler=RankSampler(24), batch_size=8)
    listener = LooksUpRanks(rb)
    rb.storage.attach(listener)

    def write() -> None:
        for start in range(3):
            rb.extend(transitions(5, start=start))
            rb.add(transitions(1, start=start)[0])

    thread = Thread(target=write, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()  # it would wait for a lock that it holds
    assert (listener.told, rb.compiled.startswith("add, extend")) == (6, True)


def test_rows_hold_what_a_lazily_negated_or_conjugated_leaf_shows():
    number = torch.tensor([[1 + 2j], [3 - 4j]])
    for leaf in (number.conj().imag, number.conj()):
        rb = ReplayBuffer(storage=PackedStorage(24))
        for _ in range(3):
            rb.extend(TensorDict({"x": leaf}, [2]))
            rb.add(TensorDict({"x": leaf[0]}, []))
        assert torch.equal(
            rb.storage["x"],
            torch.cat([leaf, leaf[:1]] * 3).resolve_neg().resolve_conj(),
        )


# -- over a storage of TorchRL's

CAPACITY, LANES = 24, 3
STORAGES: dict[str, Any] = {
    "tensors": LazyTensorStorage,
    "lanes": partial(LazyTensorStorage, ndim=2),
    "list": ListStorage,
    "compressed": CompressedListStorage,
}
OVER_OTHERS: dict[str, Any] = {
    "uniform": UniformSampler,
    "proportional": partial(ProportionalSampler, CAPACITY, 1.0),
    "ranks": partial(RankSampler, CAPACITY),
    "recency": partial(RecencySampler, half_life=2.0),
    "epochs": MinibatchSampler,
}


# which TorchRL's buffer says
@pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes")
@pytest.mark.parametrize("sampler", OVER_OTHERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_draws_are_those_over_a_packed_storage(storage: str, sampler: str):
    lanes = [LANES] if storage == "lanes" else []
    buffers = []
    for made in (
        STORAGES[storage](CAPACITY),
        PackedStorage(CAPACITY, ndim=1 + len(lanes)),
    ):
        rb = ReplayBuffer(storage=made, sampler=OVER_OTHERS[sampler](), batch_size=4)
        rb.set_rng(torch.Generator().manual_seed(3))
        buffers.append(rb)
    assert [type(rb) for rb in buffers] == [TensorDictReplayBuffer, ReplayBuffer]
    for call in range(4):
        k = torch.arange(9 * call, 9 * call + 9).expand(*lanes, 9)
        k = k * 10 + torch.arange(LANES)[:, None] if lanes else k
        for rb in buffers:
            rb.extend(TensorDict({"k": k}, k.shape))
        for size in (4, 6):
            theirs, ours = (rb.sample(size) for rb in buffers)
            assert torch.equal(theirs["k"].long(), ours["k"])
            for rb, batch in zip(buffers, (theirs, ours), strict=True):
                rb.update_tensordict_priority(
                    batch.set("td_error", batch["k"] % 7 + 1.0)
                )


# -- wrong arguments of buffers: errors say what was meant

td: Any = rlbuf_td  # the arguments are not checked: they are wrong on purpose

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a capacity": (
        lambda: td.ReplayBuffer(100),
        r"ReplayBuffer takes keywords only, got 100: .*storage=PackedStorage\(",
    ),
    "a storage": (
        lambda: td.ReplayBuffer(td.PackedStorage(4)),
        "takes keywords only, got PackedStorage",
    ),
    "a queue's capacity": (
        lambda: td.ExperienceQueue(100),
        r"ExperienceQueue\(storage=PackedStorage",
    ),
    "capacity=": (
        lambda: td.ReplayBuffer(capacity=100),
        r"no keyword capacity=: .*storage=PackedStorage\(",
    ),
    "alpha=": (
        lambda: td.ReplayBuffer(alpha=0.6),
        r"no keyword alpha=: .*sampler=ProportionalSampler\(\.\.\., alpha=",
    ),
    "n_steps=": (
        lambda: td.ReplayBuffer(n_steps=3),
        r"sampler=NStepSampler\(\.\.\., n_steps=",
    ),
    "lanes=": (
        lambda: td.ReplayBuffer(lanes=3),
        r"storage=PackedStorage\(\.\.\., lanes=",
    ),
    "value_key=": (
        lambda: td.RolloutBuffer(4, value_key="v"),
        r"RolloutBuffer has no .*writer=RolloutWriter\(\.\.\., value_key=",
    ),
    "alpha= of a queue": (
        lambda: td.ExperienceQueue(alpha=0.6),
        "ExperienceQueue has no keyword alpha=: there are .*batch_size",
    ),
    "a word": (
        lambda: td.ReplayBuffer(nothing_of_the_kind=1),
        "no keyword nothing_of_the_kind=: there are .*batch_size, .*transform",
    ),
    "a storage class": (
        lambda: td.ReplayBuffer(storage=td.PackedStorage),
        r"the class PackedStorage: make one, storage=PackedStorage\(\.\.\.\).*'max_size'",
    ),
    "a sampler class": (
        lambda: td.ReplayBuffer(sampler=td.ProportionalSampler),
        r"the class ProportionalSampler: make one, .*'max_capacity'",
    ),
    "a prioritized buffer's storage class": (
        lambda: td.PrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=td.PackedStorage
        ),
        "the class PackedStorage: make one",
    ),
    "a writer class": (
        lambda: td.RolloutBuffer(4, writer=td.RolloutWriter),
        "the class RolloutWriter: make one",
    ),
    "a wrapped class": (
        lambda: td.NStepSampler(td.UniformSampler, 3, 0.9),
        "wraps a sampler, got the class UniformSampler: make one",
    ),
    "a class of statistics": (
        lambda: td.ReplayBuffer(stats=td.EpisodeStats),
        "stats= takes an EpisodeStats, got the class EpisodeStats: make one",
    ),
    "set_sampler": (
        lambda: td.ReplayBuffer().set_sampler(td.UniformSampler),
        "set_sampler takes a sampler, got the class UniformSampler: make one",
    ),
    "set_writer": (
        lambda: td.ReplayBuffer().set_writer(td.RingWriter),
        "set_writer takes a writer, got the class RingWriter: make one",
    ),
    "set_storage": (
        lambda: td.ReplayBuffer().set_storage(td.PackedStorage),
        "set_storage takes a storage, got the class PackedStorage: make one",
    ),
}


@pytest.mark.parametrize(("call", "said"), REFUSED.values(), ids=REFUSED)
def test_an_error_says_what_was_meant(call, said):
    with pytest.raises(TypeError, match=said):
        call()


def test_classes_and_functions_that_need_no_arguments_still_make_parts():
    rb = td.ReplayBuffer(
        storage=partial(td.PackedStorage, 8),
        sampler=td.UniformSampler,
        writer=td.RingWriter,
    )
    assert (rb.storage.max_size, type(rb.writer)) == (8, td.RingWriter)


def test_a_buffer_of_ones_own_may_take_positional_arguments():
    class Mine(td.ReplayBuffer):
        def __init__(self, size: int, **kwargs: Any) -> None:
            super().__init__(storage=td.PackedStorage(size), **kwargs)

    assert Mine(8, batch_size=2).storage.max_size == 8
