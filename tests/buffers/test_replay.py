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
    DoubleToFloat,
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
from tests.catalogue import SAMPLERS, assert_same, buffer_of


def transitions(count: int, *, lanes: int = 0, start: int = 0) -> TensorDict:
    """Return rows of three observations, which are equal to their number."""
    shape = [lanes, count] if lanes else [count]
    number = torch.arange(start, start + count * max(lanes, 1)).view(*shape, 1)
    after = {"reward": number.double(), "done": number % 7 == 0}
    observation = number.expand(*shape, 3).float().clone()
    return TensorDict({"observation": observation, "next": after}, shape)


def filled(
    count: int, sampler: str = "uniform", *, lanes: int = 0, **parts: Any
) -> ReplayBuffer:
    steps, rows = 60 // max(lanes, 1), transitions(count, lanes=lanes)
    made = SAMPLERS[sampler](60)
    return buffer_of(steps, made, lanes, rows=rows, **{"batch_size": 8} | parts)


@pytest.mark.parametrize(("lanes", "device"), [(0, None), (3, "cpu")])
def test_what_is_known_of_the_rows_survives_a_transform_that_selects_keys(
    lanes, device
):
    key = ("loss", "error")
    selected = SelectTransform("observation")
    rb = filled(
        20,
        "proportional",
        lanes=lanes,
        transform=selected,
        device=device,
        priority_key=key,
    )
    batch, info = rb.sample(return_info=True)
    assert isinstance(info["index"], tuple) == bool(lanes)
    known = {"index", "priority_weight", "sampled_at"}
    assert set(batch.keys()) == {"observation", *known}
    index = batch["index"].unbind(-1) if lanes else batch["index"]
    assert torch.equal(rb.storage.get(index)["observation"], batch["observation"])
    rb.update_tensordict_priority(batch.set(key, torch.full((8, 1), 7.0)))
    updated = rb.sampler.priority(torch.arange(20 * (lanes or 1))) == 7
    assert updated.sum() == len(batch["index"].unique(dim=0))


def test_transforms_see_the_index_and_may_drop_rows_and_cast():
    seen = set()

    def look(batch: TensorDict) -> TensorDict:
        seen.update(batch.keys())
        return batch

    rb = filled(20, "proportional", transform=look)
    rb.append_transform(DoubleToFloat(in_keys=[("next", "reward")]))
    assert rb.sample()["next", "reward"].dtype is torch.float32
    assert rb.storage["next", "reward"].dtype is torch.float64
    assert {"index", "priority_weight"} <= seen
    rb = filled(
        20, "proportional", transform=lambda batch: batch.select("observation")[:3]
    )
    assert list(rb.sample().keys()) == ["observation"]  # no index of others


def test_sample_options_and_iteration_do_as_in_torchrl():
    rb = filled(20, "proportional")
    known = {"index", "priority_weight", "sampled_at"}
    assert set(rb.sample(return_info=True)[1]) == known
    assert "index" not in rb.sample(include_info=False).keys()
    assert [batch.batch_size for batch in islice(rb, 4)] == [(8,)] * 4
    assert rb.sample(5).batch_size == (5,)
    for index in (slice(None), slice(2, 4), torch.tensor([1, 5])):
        assert_same(rb[index], transitions(20)[index])
    for words in (
        "20 of 60 rows",
        "bytes per row",
        "'observation': float32 (3,)",
        "ProportionalSampler(alpha=0.6",
        "33.3%",
    ):
        assert words in repr(rb)


@pytest.mark.parametrize("sampler", ["uniform", "slices"])
def test_a_buffer_may_leave_the_report_out_as_torchrls_plain_one_does(sampler):
    options: dict[str, Any] = {"batch_size": 8}
    if sampler == "slices":  # which report that a slice is truncated
        options["sampler"] = SliceSampler(slice_len=4, end_key=("next", "done"))
    flags = torch.zeros(40, 1, dtype=torch.bool)
    flags[7::8] = True
    data = TensorDict({"next": {"done": flags, "truncated": flags & False}}, [40])
    found = []
    for cls, more in (
        (ReplayBuffer, {}),
        (ReplayBuffer, {"include_info": False}),
        (TorchRLReplayBuffer, {}),
    ):
        rb = cls(storage=PackedStorage(40), **options, **more)
        rb.extend(data.clone())
        for _ in range(2):  # the general path, then the plan
            batch, (_, info) = rb.sample(), rb.sample(return_info=True)
        assert "index" in info
        found.append(("index" in batch, bool(batch["next", "truncated"].any())))
    assert found == [(True, sampler == "slices"), (False, False), (False, False)]


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
    sampler = rb.sampler
    assert (sampler.alpha, sampler.beta, sampler.eps) == (0.7, 0.9, 1e-8)
    rb.extend(transitions(20))
    batch = rb.sample().set("td_error", torch.full((4,), 2.0))
    rb.update_tensordict_priority(batch)
    assert (sampler.priority(batch["index"]) == 2).all()


def test_batches_are_written_without_the_report_of_their_sampler():
    batch = filled(20, "proportional").sample()
    for sampler in ("uniform", "proportional"):
        rb = buffer_of(60, SAMPLERS[sampler](60), rows=batch)
        assert_same(rb[:], batch.select("observation", "next"))
    own = TensorDict({"sampled_at": torch.arange(5)}, [5])  # a key of one's own
    assert_same(buffer_of(60, None, rows=own)[:], own)


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
    rb = buffer_of(60, SAMPLERS["proportional"](60))
    data = transitions(4)
    data["td_error"] = torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    for rows in data.unbind(0) if how == "add" else [data]:
        getattr(rb, how)(rows)
    rb.extend(data, update_priority=False)
    priorities = rb.sampler.priority(torch.arange(8)).tolist()
    assert priorities == [1.0, 2.0, 3.0, 0.5, *[3.0] * 4]


@pytest.mark.parametrize(("lanes", "shape"), [(0, (1,)), (3, ()), (3, (4,))])
@pytest.mark.parametrize(
    ("reduction", "combined"), [("max", 24), ("min", 8), ("mean", 12), ("median", 8)]
)
def test_several_td_errors_a_row_are_reduced_by_magnitude(
    lanes, shape, reduction, combined
):
    rb = filled(20, "proportional", lanes=lanes)
    rb.sampler.reduction = reduction
    for _ in range(2):  # the second update is compiled
        batch = rb.sample().exclude("sampled_at")  # these are the stamps of other rows
        batch["index"] = batch["index"][:1].expand_as(batch["index"]).clone()
        errors = -torch.arange(1.0, 9.0).view(8, *(1,) * len(shape))
        batch["td_error"] = errors.expand(8, *shape).clone()
        if shape == (4,):
            batch["td_error"][:, 1] *= -3
        rb.update_tensordict_priority(batch)
        last = rb.sampler.priority(batch["index"][:1], storage=rb.storage)
        assert last.item() == (combined if shape == (4,) else 8)


@pytest.mark.parametrize("ndim", [1, 2])
def test_rows_that_are_batches_come_back_as_such(ndim):
    storage, sampler = PackedStorage(12, ndim=ndim), ProportionalSampler(12)
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    shape = [2, 3, 4][2 - ndim :]  # rows of four
    x = torch.arange(24.0).view(2, 3, 4)
    rb.extend(TensorDict({"x": x if ndim == 2 else x[0]}, shape))
    batch = rb.sample()
    assert batch.batch_size == batch["priority_weight"].shape == (4, 4)
    assert batch["index"].shape[:2] == (4, 4)
    batch["td_error"] = batch["x"] + 1
    rb.update_tensordict_priority(batch)
    index = batch["index"][:, 0].unbind(-1) if ndim == 2 else batch["index"][:, 0]
    priorities = rb.sampler.priority(index, storage=rb.storage)
    assert torch.equal(priorities, batch["x"][:, 3].double() + 1)  # the largest


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
    rb = filled(9, "proportional", include_info=False)
    batch = rb.sample().set("td_error", torch.full((8,), 7.0))
    said = "no 'index': it was sampled with include_info=False.* with return_info=True"
    with pytest.raises(KeyError, match=said):
        rb.update_tensordict_priority(batch)
    batch, info = rb.sample(return_info=True)
    rb.update_priority(info["index"], torch.full((8,), 7.0))
    assert (rb.sampler.priority(info["index"]) == 7).all()
    with pytest.raises(KeyError, match="include_info=True"):
        rb.write_back(batch, "observation", sampled_at=torch.zeros(8))


def test_a_first_write_that_makes_rows_of_whole_trajectories_says_so():
    steps = torch.rand(4, 5, 3)
    flags = torch.zeros(4, 5, 1, dtype=torch.bool)
    after = {"observation": steps, "reward": steps[..., :1], "done": flags}
    data = TensorDict({"observation": steps, "next": after}, [4, 5])
    rb = ReplayBuffer(storage=PackedStorage(20), batch_size=4)
    said = r"batch size \[4, 5\] makes rows of \[5\] steps .* with ndim=2, or flat"
    with pytest.warns(UserWarning, match=said):
        rb.extend(data)
    assert rb.sample().shape == (4, 5)  # it may be meant
    meant = ReplayBuffer(storage=PackedStorage(20), batch_size=4)
    meant.storage.reserve(data[0])
    meant.extend(data)
    said = r"batch size \[5\] makes rows of \[5\] steps .* of one step, use extend"
    with pytest.warns(UserWarning, match=said):
        ReplayBuffer(storage=PackedStorage(20)).add(data[0])


@pytest.mark.parametrize("lanes", [0, 3])
def test_what_has_been_extended_can_be_given_priorities_afterwards(lanes):
    rb = filled(4, "proportional", lanes=lanes)
    data = transitions(4, lanes=lanes)
    index = rb.extend(data)
    stored = rb.storage["observation"][..., 0].flatten().double()
    # time first, as the index has it
    rows = data.transpose(0, 1).reshape(-1) if lanes else data
    rb.update_priority(index, rows["observation"][:, 0] + 1)
    assert torch.equal(
        rb.sampler.priority(torch.arange(len(rb)))[-len(index) :],
        stored[-len(index) :] + 1,
    )
    # lanes first, both alike
    shaped = index.view(4, 3, 2).transpose(0, 1) if lanes else index
    rb.update_priority(shaped, data["observation"][..., 0] + 2)
    assert torch.equal(
        rb.sampler.priority(torch.arange(len(rb)))[-len(index) :],
        stored[-len(index) :] + 2,
    )


@pytest.mark.parametrize("way", ["new", "delayed", "set_storage"])
@pytest.mark.parametrize(
    ("written", "expected"), [(6, [6, 7]), (60, [0, 1]), (65, [5, 6])]
)
def test_a_buffer_goes_on_behind_the_newest_row_that_it_finds(written, expected, way):
    first = ReplayBuffer(storage=PackedStorage(60))
    first.extend(transitions(written))
    sampler = ProportionalSampler(60)
    if way == "set_storage":
        rb = buffer_of(60, sampler, rows=transitions(9))
        rb.set_storage(first.storage)
    else:
        rb = ReplayBuffer(
            storage=first.storage, sampler=sampler, delayed_init=way == "delayed"
        )
    assert rb.extend(transitions(2, start=900)).tolist() == expected
    numbers = [*range(max(0, written - 58), written), 900, 901]
    if written == 6:
        numbers = [*range(6), 900, 901]
    assert rb.chronological()["observation"][:, 0].tolist() == numbers
    assert rb.write_count == first.write_count == written + 2
    assert (rb.sampler.priority(torch.arange(len(rb))) == 1).all()


def test_consumed_items_are_left_to_torchrls_sampler():
    rb = ReplayBuffer(
        storage=PackedStorage(20), batch_size=4, consume_after_n_samples=1
    )
    rb.extend(transitions(20))
    assert {row for _ in range(5) for row in rb.sample()["index"].tolist()} == {
        *range(20)
    }
    assert len(rb) == 0


def test_other_buffers_over_the_storage_go_on_without_a_buffer_that_was_refused():
    rb = filled(5, "proportional")
    with pytest.raises(ValueError, match="a RecencySampler needs rows in time order"):
        ReplayBuffer(
            storage=rb.storage, sampler=RecencySampler(), writer=ReservoirWriter()
        )
    assert rb.extend(transitions(3)).tolist() == [5, 6, 7]
    assert len(rb.sample()) == 8


# -- calls that are compiled, and what users put into them


class OwnDraw(ProportionalSampler):
    def draw(self, storage: Any, batch_size: int) -> Any:
        flat, info = super().draw(storage, batch_size)
        return torch.zeros_like(flat), info


class DoubledRule(ProportionalRule):
    def update_(self, flat: Any, td_error: torch.Tensor, rows: int) -> Any:
        return super().update_(flat, 2 * td_error, rows)


class OwnRule(ProportionalSampler):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rule.__class__ = DoubledRule


class OwnStorage(PackedStorage):
    """A storage of a user's own that changes nothing."""


class ReadsItself(PackedStorage):
    def gather(self, flat: torch.Tensor) -> TensorDict:
        return super().gather(flat).set("number", flat + 1_000)


class OwnAnchors(NStepSampler):
    def anchored(self, entries: Any, update: Update) -> Update:
        return update._replace(td_error=2 * update.td_error)


#: The sampler, the storage, and other parts.
COMPILED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "subclass of the sampler": (
        type("Subclass", (ProportionalSampler,), {}),
        PackedStorage,
        {},
    ),
    "subclass of the storage": (ProportionalSampler, OwnStorage, {}),
    "statistics": (ProportionalSampler, PackedStorage, {"stats": EpisodeStats()}),
    "flow control": (
        ProportionalSampler,
        PackedStorage,
        {"samples_per_insert": 1.0, "tolerance": 1_000},
    ),
    "a draw of one's own": (OwnDraw, PackedStorage, {}),
    "a rule of one's own": (OwnRule, PackedStorage, {}),
}


@pytest.mark.parametrize("option", COMPILED)
def test_options_and_subclasses_are_compiled(option):
    sampler, storage, parts = COMPILED[option]
    rb = buffer_of(24, sampler(24), storage=storage, batch_size=8, **parts)
    for start in range(0, 18, 6):
        rb.extend(transitions(6, start=start))
        batch = rb.sample().set("td_error", torch.full((8,), 3.0))
        rb.update_tensordict_priority(batch)
    compiled, *reasons = rb.compiled.split("; not ")
    assert "extend" in compiled
    assert "sample" in compiled
    assert not reasons
    expected = 6.0 if sampler is OwnRule else 3.0
    assert (rb.sampler.priority(batch["index"]) == expected).all()
    assert sampler is not OwnDraw or (batch["index"] == 0).all()


def test_what_a_subclass_overrides_is_called_at_every_sample_and_update():
    rows = transitions(20).set("number", torch.arange(20))
    rows["next", "terminated"] = rows["next", "done"]
    rb = buffer_of(24, ProportionalSampler(24), storage=ReadsItself, rows=rows)
    for _ in range(3):
        batch = rb.sample(8)
        assert torch.equal(batch["number"], batch["index"] + 1_000)
    assert "ReadsItself has no compiled read" in rb.compiled
    rb = buffer_of(24, OwnAnchors(ProportionalSampler(24), 3, 0.9), rows=rows)
    for error in (1.0, 2.0, 3.0):
        batch = rb.sample(8).set("td_error", torch.full((8,), error))
        rb.update_tensordict_priority(batch)
        assert (rb.sampler.innermost.priority(batch["index"]) == 2 * error).all()


class LooksUpRanks:
    """A listener that asks the sampler for ranks after each write."""

    def __init__(self, rb: ReplayBuffer) -> None:
        self.rb, self.told = rb, 0

    def mark_update(self, index: Any) -> None:
        self.rb.sampler.rank(torch.arange(len(self.rb)))
        self.told += 1


def test_listeners_may_look_up_ranks_during_a_write():
    rb = buffer_of(24, RankSampler(24))
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
    assert listener.told == 6
    assert rb.compiled.startswith("add, extend")


@pytest.mark.parametrize("is_complex", [True, False])
def test_rows_hold_what_a_lazily_negated_or_conjugated_leaf_shows(is_complex):
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    leaf = conjugate if is_complex else conjugate.imag
    rb = ReplayBuffer(storage=PackedStorage(24))
    for _ in range(3):
        rb.extend(TensorDict({"x": leaf}, [2]))
        rb.add(TensorDict({"x": leaf[0]}, []))
    assert rb.storage["x"].tolist() == [*leaf.tolist(), leaf[0].item()] * 3


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
    packed = partial(PackedStorage, ndim=1 + len(lanes))
    theirs, ours = (
        ReplayBuffer(
            storage=make(CAPACITY),
            sampler=OVER_OTHERS[sampler](),
            batch_size=4,
            generator=torch.Generator(),
        )
        for make in (STORAGES[storage], packed)
    )
    assert (type(theirs), type(ours)) == (TensorDictReplayBuffer, ReplayBuffer)
    for call in range(4):
        k = torch.arange(9 * call, 9 * call + 9).expand(*lanes, 9)
        k = k * 10 + torch.arange(LANES)[:, None] if lanes else k
        for rb in (theirs, ours):
            rb.extend(TensorDict({"k": k}, k.shape))
        for size in (4, 6):
            batch, expected = theirs.sample(size), ours.sample(size)
            assert torch.equal(batch["k"].long(), expected["k"])
            for rb, rows in ((theirs, batch), (ours, expected)):
                rb.update_tensordict_priority(rows.set("td_error", rows["k"] % 7 + 1.0))


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
