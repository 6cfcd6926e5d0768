"""The short path gives what the general path gives, bit for bit, whatever happens between two calls."""

from __future__ import annotations

import tempfile
from functools import partial
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rlbuf_td import (
    EpisodeStats,
    FreshRowsSampler,
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    RingWriter,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.samplers.bound import BoundBatch
from rlbuf_td.samplers.proportional import ProportionalLaw
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests import catalogue
from tests.catalogue import assert_same, reward_fn

CAPACITY, LANES, BATCH = 24, 3, 8


def fresh(name: str, rows: int) -> FreshRowsSampler:
    return FreshRowsSampler(catalogue.SAMPLERS[name](rows), 3)


def sequence_of_n_step(rows: int) -> SequenceSampler:
    return SequenceSampler(NStepSampler(RankSampler(rows), 3, 0.9), 3, burn_in=1)


FRESH = ["uniform", "recency", "proportional", "independent", "rank", "minibatch"]
MIXED: Any = {"future": 0.5, "episode": 0.3, "random": 0.2}
SAMPLERS: dict[str, Any] = catalogue.SAMPLERS | {
    "uniform, in a file": lambda rows: UniformSampler(),
    "goals of every kind": lambda rows: HindsightSampler(RankSampler(rows), reward_fn, strategy=MIXED),
    "goals that end": lambda rows: HindsightSampler(UniformSampler(), reward_fn, terminated_fn=terminated_fn),
    "several rewards": lambda rows: NStepSampler(RankSampler(rows), 3, 0.9, reward_key=("next", "rewards")),
    "shift": lambda rows: SequenceSampler(ProportionalSampler(rows), 3, burn_in=1, boundary="shift"),
    **{f"fresh, {name}": partial(fresh, name) for name in FRESH},
    **{f"{name}, deduplicated": catalogue.SAMPLERS[name] for name in ("uniform", "proportional", "rank", "minibatch")},
    "fresh, deduplicated": partial(fresh, "proportional"),
    "subclass": lambda rows: Subclass(rows),
    "largest in the buffer": lambda rows: ProportionalSampler(rows, max_priority_within_buffer=True, min_priority=2.0),
    "n-step, fresh": lambda rows: NStepSampler(fresh("proportional", rows), 3, 0.9),
    "sequence of fresh": lambda rows: SequenceSampler(fresh("proportional", rows), 3, burn_in=1),
    "n-step, deduplicated": lambda rows: NStepSampler(UniformSampler(), 3, 0.9),
    "sequence, in a file": catalogue.SAMPLERS["sequence"],
    "sequence, deduplicated": catalogue.SAMPLERS["sequence"],
    **{f"sequence of n-step, {kind}": sequence_of_n_step for kind in ("plain", "in a file", "deduplicated")},
}


def terminated_fn(batch: TensorDict) -> torch.Tensor:
    return (batch["next", "achieved_goal"] < batch["desired_goal"]).all(-1)


class Subclass(ProportionalSampler):
    """A sampler of a user's own that changes nothing."""


class GeneralBuffer(ReplayBuffer):
    bound = property(lambda rb: {}, lambda rb, bound: None)
    bound_write = property(lambda rb: None, lambda rb, plan: None)


def steps(count: int, lanes: int | None, seed: int) -> TensorDict:
    """Return transitions with leaves of 1, 2, 4, 8 and many bytes, nested, ``[count]`` or ``[lanes, count]``."""
    generator = torch.Generator().manual_seed(seed)
    lead = [count] if lanes is None else [lanes, count]

    def rand(*shape, dtype=torch.float32):
        return (100 * torch.rand(*lead, *shape, generator=generator)).to(dtype)

    following = {"reward": rand(1), "done": rand(1) > 90, "observation": {"pixels": rand(2, 3, dtype=torch.uint8)}}
    following |= {"terminated": rand(1) > 95, "rewards": rand(2, 2, dtype=torch.float64), "achieved_goal": rand(3)}
    data = {"observation": rand(17), "id": rand(dtype=torch.int64), "half": rand(3, dtype=torch.float16)}
    for place in data, following:  # observations that often equal those of the rows around
        place |= {"state": (rand(1) > 50).float().expand(*lead, 6).clone(), "flag": (rand(3) > 50).byte()}
        place["stack"] = (rand(2, 3, 1) > 70).expand(*lead, 2, 3, 9).clone()
    return TensorDict(data | {"none": rand(0), "desired_goal": rand(3), "next": following}, lead)


def buffers(sampler: str, lanes: int | None):
    for cls in (ReplayBuffer, GeneralBuffer):
        folder = tempfile.mkdtemp() if sampler.endswith("file") else None
        once: dict[str, Any] = {}
        if sampler.endswith("deduplicated"):
            once = {"share_next": ["state"], "frames": {"stack": (3, 1)}}
        storage = PackedStorage(CAPACITY * (lanes or 1), ndim=1 if lanes is None else 2, scratch_dir=folder, **once)
        generator = torch.Generator().manual_seed(3)
        yield cls(storage=storage, sampler=SAMPLERS[sampler](CAPACITY * LANES), batch_size=BATCH, generator=generator)


def set_alpha(rb: ReplayBuffer, value: int) -> None:
    if hasattr(rb.sampler, "alpha"):
        rb.sampler.alpha = 0.1 * (value % 5)


def set_beta(rb: ReplayBuffer, value: int) -> None:
    if hasattr(rb.sampler, "alpha"):
        rb.sampler.beta, rb.sampler.stratified = 0.3 * (value % 4), bool(value % 2)


def set_wrapper(rb: ReplayBuffer, value: int) -> None:
    if isinstance(rb.sampler, HindsightSampler):
        rb.sampler.her_ratio, rb.sampler.only_finished = (value % 5) / 4, value % 2 == 0
    elif isinstance(rb.sampler, NStepSampler):
        rb.sampler.n_steps, rb.sampler.gamma = 1 + value % 7, (value % 3) / 2


def reload(rb: ReplayBuffer, value: int) -> None:
    rb.load_state_dict(rb.state_dict())


def set_generator(rb: ReplayBuffer, value: int) -> None:
    rb.set_rng(torch.Generator().manual_seed(value))


def rewrite(rb: ReplayBuffer, value: int) -> None:
    """Replace rows: the clock notes the time of each row from then on."""
    rb.storage.set(torch.tensor([value % 2, 0]), rb.storage.get(torch.tensor([0, 1])), set_cursor=False)


def put_cursor(rb: ReplayBuffer, value: int) -> None:
    """Put the cursor elsewhere; the next write follows the newest row all the same."""
    rb.writer._cursor = value % (rb.storage.written_rows().steps)


CHANGES = {
    "cursor": put_cursor,
    "drop": lambda rb, value: rb._connect(),
    "alpha": set_alpha,
    "beta": set_beta,
    "wrapper": set_wrapper,
    "empty": lambda rb, value: rb.empty(),
    "reload": reload,
    "generator": set_generator,
    "rewrite": rewrite,
}


OFTEN = ["add", "extend", "sample", "update"]
STEPS = st.one_of(*[st.sampled_from(OFTEN)] * 2, st.sampled_from(["ask", "own", "late", *CHANGES]))
FORMS = {
    "plain": lambda data: data,
    "strided": lambda data: data.apply(lambda leaf: torch.stack([leaf, leaf], -1)[..., 0]),
    "with index": lambda data: data.set("index", torch.zeros(data.batch_size)),
    "with gradient": lambda data: data.set("observation", data["observation"].requires_grad_()),
    "other dtype": lambda data: data.set(("next", "reward"), data["next", "reward"].double()),
    "other shape": lambda data: data.set("id", data["id"][..., None]),
    "unknown key": lambda data: data.set(("next", "extra"), data["id"]),
    "with TD errors": lambda data: data.set("td_error", data["id"] / 7),
    "missing key": lambda data: data.exclude(("next", "done")),
    "leaf for a level": lambda data: data.set("next", data["id"]),
}


def write(rb: ReplayBuffer, step: str, lanes: int | None, value: int) -> object:
    """Return what a write returns or refuses: new data in some form, or rows of the buffer itself."""
    if step == "own":
        data = rb.storage[: 1 + value % CAPACITY]
        data = data if lanes is None else data.transpose(0, 1)
    else:
        data = steps(1 + value % (2 * CAPACITY), lanes, value)
        data = data if step == "extend" else data[..., 0]
        data = FORMS[list(FORMS)[max(0, value % 16 - 6)]](data)
    try:
        return (rb.add if step == "add" else rb.extend)(data)
    except ValueError as error:
        return str(error)


def ask(rb: ReplayBuffer) -> object:
    return torch.stack([part.long() for part in TrajectoryIndex.of(rb.storage).reach(torch.arange(len(rb)))])


def state(rb: ReplayBuffer) -> dict[str, object]:
    found = rb.state_dict() | {"trajectories": TrajectoryIndex.of(rb.storage).state_dict()}
    found["_storage"]["rows"] = rb.storage[:]
    return found


def assert_equal(mine: Any, theirs: Any) -> None:
    assert type(mine) is type(theirs)
    if isinstance(mine, dict | list | tuple):
        assert len(mine) == len(theirs)
        for name in mine if isinstance(mine, dict) else range(len(mine)):
            assert_equal(mine[name], theirs[name])
    elif isinstance(mine, torch.Tensor | TensorDict):
        assert_same(mine, theirs)
    else:
        assert mine == theirs


@pytest.mark.parametrize("lanes", [None, LANES])
@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(max_examples=settings().max_examples // 10)
@given(attached=st.booleans(), history=st.lists(st.tuples(STEPS, st.integers(0, 1 << 20)), min_size=20, max_size=60))
def test_plan_and_general_path_agree_over_any_history(sampler, lanes, attached, history):
    pair = list(buffers(sampler, lanes))
    kept: list[list[TensorDict]] = [[], []]
    found: list[list[object]] = [[], []]
    first = [("extend", 9), ("ask" if attached else "sample", 0), ("add", 1)]
    for step, value in [*first, *history, ("sample", 0), ("update", 1), ("sample", 0)]:
        for rb, batches, answers in zip(pair, kept, found, strict=True):
            if step in ("extend", "add", "own") and (step != "own" or len(rb)):
                answers.append(write(rb, step, lanes, value))
            elif step == "ask" and len(rb):
                answers.append(ask(rb))
            elif step == "sample" and len(rb):
                try:
                    batches.append(rb.sample())
                except (RuntimeError, ValueError) as refused:  # too few rows
                    answers.append(str(refused))
            elif step in ("update", "late") and batches:
                batch = batches[-1 if step == "update" else value % len(batches)].clone()
                error = torch.randn(len(batch), generator=torch.Generator().manual_seed(value))
                batch["td_error"] = (error, error[:, None], error.double(), error.requires_grad_())[value % 4]
                try:
                    rb.update_tensordict_priority(batch if value % 5 else batch.exclude("sampled_at"))
                except IndexError as error:  # rows that are no more
                    answers.append(str(error))
            elif step in CHANGES and len(rb) > 2 * LANES:
                CHANGES[step](rb, value)
    for mine, theirs in (*zip(*kept, strict=True), *zip(*found, strict=True)):
        assert_equal(mine, theirs)
    assert_equal(*map(state, pair))
    mine, theirs = (rb.health() | {"compiled": None} for rb in pair)
    assert mine == pytest.approx(theirs, nan_ok=True)


@pytest.fixture
def rb():
    rb = next(buffers("proportional", None))
    rb.extend(steps(20, None, 0))
    rb.sample()
    return rb


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_rows_beyond_those_written_are_not_read(sampler):
    rb = ReplayBuffer(storage=PackedStorage(CAPACITY), sampler=sampler(1_000_000, alpha=5.0), batch_size=BATCH)
    rb.extend(steps(20, None, 0))
    rb.sample()
    rb.sampler.update_priority(torch.tensor([900_000]), torch.tensor([1e6]))
    with pytest.raises(IndexError, match="row 900000 was drawn"):
        rb.sample()


@pytest.mark.parametrize("planned", [True, False])
def test_lazily_negated_td_errors_update_priorities(rb, planned):
    batch = rb.sample()
    batch["td_error"] = torch._neg_view(-torch.arange(1.0, BATCH + 1))
    if not planned:
        rb.bound = {}
    rb.update_tensordict_priority(batch)
    last = {int(i): float(k) for k, i in enumerate(batch["index"], start=1)}
    assert rb.sampler.priority(torch.tensor([*last])).tolist() == [*last.values()]


def test_writes_count_the_generations_that_another_writer_begins_to_track(rb):
    rb.add(steps(1, None, 0)[0])
    other = RingWriter(track_generations=True)
    other.register_storage(rb.storage)
    other._cursor = rb.writer._cursor
    other.extend(steps(CAPACITY, None, 1))  # a whole round: the ring goes on in order
    assert [other.generations_of(rb.add(steps(1, None, 0)[0])).item() for _ in range(2)] == [1, 1]


def test_new_rows_get_the_eps_of_a_loaded_state_in_shared_memory(rb):
    rb.sampler.share_memory_()
    rb.extend(steps(2, None, 0))
    rb.sampler.load_state_dict(rb.sampler.state_dict() | {"eps": 0.5})
    index = rb.extend(steps(2, None, 0))
    new, old = rb.sampler.probability(torch.stack([index[0], index[0] - 1])).tolist()
    assert new / old == pytest.approx(1.5**rb.sampler.alpha, rel=1e-5)


@pytest.mark.parametrize("sampler", ["proportional", "rank"])
def test_priorities_that_have_moved_to_shared_memory_are_updated_there(sampler):
    rb = next(buffers(sampler, None))
    rb.extend(steps(20, None, 0))
    rb.sample()
    batch = rb.sample()
    rb.sampler.share_memory_()
    batch["td_error"] = batch["index"] + 2.0
    rb.update_tensordict_priority(batch)
    assert torch.equal(rb.sampler.priority(batch["index"]), batch["index"] + 2.0)


def test_rows_hold_what_a_lazily_negated_or_conjugated_leaf_shows():
    number = torch.tensor([[1 + 2j], [3 - 4j]])
    for leaf in (number.conj().imag, number.conj()):
        rb = ReplayBuffer(storage=PackedStorage(CAPACITY))
        for _ in range(3):
            rb.extend(TensorDict({"x": leaf}, [2]))
            rb.add(TensorDict({"x": leaf[0]}, []))
        assert torch.equal(rb.storage["x"], torch.cat([leaf, leaf[:1]] * 3).resolve_neg().resolve_conj())


def test_every_buffer_over_one_storage_lets_new_rows_in(rb):
    rb.extend(steps(1, None, 0))
    other = ReplayBuffer(storage=rb.storage, sampler=ProportionalSampler(CAPACITY), batch_size=BATCH)
    index = rb.extend(steps(2, None, 0))
    assert other.sampler.priority(index).tolist() == [1.0, 1.0]


def test_trajectories_are_not_read_anew_after_a_write(rb):
    index = TrajectoryIndex.of(rb.storage)
    index.reach(torch.arange(20))
    for write in (rb.add, rb.add, rb.extend):
        write(steps(1, None, 0)[0] if write == rb.add else steps(9, None, 0))
        with mock.patch.object(index, "rebuild", side_effect=AssertionError):
            index.reach(torch.arange(20))


def test_trajectories_in_shared_memory_are_kept_up_to_date(rb):
    index = TrajectoryIndex.of(rb.storage)
    for seed in range(3):
        index.reach(torch.arange(20))
        rb.extend(steps(3, None, seed))
    assert rb.bound_write.holds()
    index.share_memory_()
    assert not rb.bound_write.holds()  # it would write to freed memory
    rb.extend(steps(9, None, 5))
    reach = index.reach(torch.arange(CAPACITY))
    index.rebuild()
    assert_equal(reach, index.reach(torch.arange(CAPACITY)))


def test_unique_set_later_draws_no_row_twice():
    rb = ReplayBuffer(storage=PackedStorage(CAPACITY), batch_size=BATCH)
    rb.extend(steps(BATCH, None, 0))
    rb.sample()
    rb.sample()
    rb.sampler.unique = True
    assert rb.sample()["index"].sort().values.tolist() == list(range(BATCH))
    rb.sampler.unique = False
    assert any(len(rb.sample()["index"].unique()) < BATCH for _ in range(10))


def test_planned_writes_follow_counters_that_are_shared():
    rb = ReplayBuffer(storage=PackedStorage(20), batch_size=2)
    for first in range(0, 16, 4):
        if first == 12:
            assert rb.bound_write is not None
            rb.writer.share_memory_()
        rb.extend(TensorDict({"x": torch.arange(first, first + 4)}, [4]))
    assert (rb.write_count, rb.writer._cursor) == (16, 16)
    assert rb.storage["x"][:16].tolist() == list(range(16))


class OwnDraw(Subclass):
    def draw(self, storage: Any, batch_size: int) -> Any:
        flat, info = super().draw(storage, batch_size)
        return torch.zeros_like(flat), info


class OwnLaw(Subclass):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.law.__class__ = type("Doubled", (type(self.law),), {"update_": doubled})


def doubled(law: Any, flat: torch.Tensor, td_error: torch.Tensor, rows: int) -> Any:
    return ProportionalLaw.update_(law, flat, 2 * td_error, rows)


class OwnStorage(PackedStorage):
    """A storage of a user's own that changes nothing."""


class ReadsItself(PackedStorage):
    def gather(self, flat: torch.Tensor) -> TensorDict:
        return super().gather(flat).set("id", flat + 1_000)


class OwnAnchors(NStepSampler):
    def anchored(self, batch: Any, index: Any, td_error: torch.Tensor) -> Any:
        return index, 2 * td_error


class LooksUpRanks:
    """A listener that asks the sampler for ranks after each write."""

    def __init__(self, rb: ReplayBuffer) -> None:
        self.rb, self.told = rb, 0

    def mark_update(self, index: Any) -> None:
        self.rb.sampler.rank(torch.arange(len(self.rb)))
        self.told += 1


def test_what_a_subclass_overrides_is_called_at_every_sample_and_update():
    rb = ReplayBuffer(storage=ReadsItself(CAPACITY), sampler=ProportionalSampler(CAPACITY), batch_size=BATCH)
    rb.extend(steps(20, None, 0))
    for _ in range(3):
        batch = rb.sample()
        assert torch.equal(batch["id"], batch["index"] + 1_000)
    assert "ReadsItself has no compiled read" in rb.compiled
    sampler = OwnAnchors(ProportionalSampler(CAPACITY), 3, 0.9)
    rb = ReplayBuffer(storage=PackedStorage(CAPACITY), sampler=sampler, batch_size=BATCH)
    rb.extend(steps(20, None, 0))
    for error in (1.0, 2.0, 3.0):
        batch = rb.sample().set("td_error", torch.full((BATCH,), error))
        rb.update_tensordict_priority(batch)
        assert (rb.sampler.priority(batch["index"]) == 2 * error).all()


def test_listeners_may_look_up_ranks_during_a_write():
    rb = ReplayBuffer(storage=PackedStorage(CAPACITY), sampler=RankSampler(CAPACITY), batch_size=BATCH)
    listener = LooksUpRanks(rb)
    rb.storage.attach(listener)

    def write() -> None:
        for seed in range(3):
            rb.extend(steps(5, None, seed))
            rb.add(steps(1, None, seed)[0])

    thread = Thread(target=write, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()  # it would wait for a lock that it holds
    assert (listener.told, rb.compiled.startswith("add, extend")) == (6, True)


def options() -> dict[str, ReplayBuffer]:
    def made(sampler: type[ProportionalSampler] = ProportionalSampler, storage: Any = PackedStorage, **kwargs: Any):
        return ReplayBuffer(storage=storage(CAPACITY), sampler=sampler(CAPACITY), batch_size=BATCH, **kwargs)

    return {
        "subclass of the sampler": made(Subclass),
        "subclass of the storage": made(storage=OwnStorage),
        "statistics": made(stats=EpisodeStats()),
        "counts of replays": made(count_replays=True),
        "flow control": made(samples_per_insert=1.0, tolerance=1_000),
        "a draw of one's own": made(OwnDraw),
        "a law of one's own": made(OwnLaw),
    }


@pytest.mark.parametrize("option", options())
def test_options_and_subclasses_are_compiled(option):
    rb = options()[option]
    for seed in range(3):
        rb.extend(steps(6, None, seed))
        batch = rb.sample()
        batch["td_error"] = torch.full((BATCH,), 3.0)
        rb.update_tensordict_priority(batch)
    compiled, *reasons = rb.compiled.split("; not ")
    assert "extend" in compiled
    assert ("sample" in compiled, len(reasons)) == ((False, 1) if "own" in option else (True, 0))
    expected = 6.0 if option == "a law of one's own" else 3.0
    assert (rb.sampler.priority(batch["index"]) == expected).all()
    assert option != "a draw of one's own" or (batch["index"] == 0).all()
    assert rb.replay_count is None or rb.replay_count.counts().sum() == 3 * BATCH
    assert rb.flow is None or rb.health()["samples"] == 3 * BATCH


@pytest.mark.parametrize("sampler", ["proportional", "fresh, proportional"])
def test_calls_follow_a_storage_in_a_file_that_is_shared_by_itself(sampler, tmp_path):
    storage = PackedStorage(CAPACITY, scratch_dir=tmp_path)
    rb = ReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](CAPACITY), batch_size=BATCH)
    for seed in range(3):
        rb.extend(steps(5, None, seed))
        rb.sample()
    storage.share_memory_()
    following = 9  # fresh row
    for count in range(16, CAPACITY + 3):
        rb.add(steps(1, None, count)[0])
        batch = rb.sample()
        assert (batch["sampled_at"] == count).all()
        assert (len(rb), rb.storage.clock.now) == (min(count, CAPACITY), count)
        assert sampler == "proportional" or batch["index"][0] == following % CAPACITY
        following = min(following + 3, count)


WRAPPERS = ["hindsight", "n-step", "sequence", "sequence, in a file", "sequence of n-step, in a file"]
WRAPPERS += ["sequence of n-step, deduplicated", "sequence of fresh"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_take_the_short_path(wrapper):
    rb = next(buffers(wrapper, None))
    rb.extend(steps(20, None, 0))
    rb.sample()
    bound = rb.bound[BATCH]
    assert isinstance(bound, BoundBatch)
    rb.extend(steps(20, None, 1))
    rb.sample()
    assert rb.bound[BATCH] is bound


def test_deduplicated_rows_take_the_short_path():
    rb = next(buffers("proportional, deduplicated", LANES))
    rb.extend(steps(5, LANES, 0))
    rb.sample()
    step = steps(1, LANES, 1)[:, 0]
    for call in (rb.sample, lambda: rb.extend(steps(5, LANES, 2)), lambda: rb.add(step)):
        call()
        plans = rb.bound[BATCH], rb.bound_write
        call()
        assert isinstance(plans[0], BoundBatch)
        assert plans[1] is not None
        assert (rb.bound[BATCH], rb.bound_write) == plans
    assert ("state",) in rb.storage.saved_bytes


def test_flags_of_deduplicated_observations_are_marked():
    flag = torch.zeros(CAPACITY, 8, dtype=torch.bool)
    rows = TensorDict({"is_init": flag, "next": {"is_init": flag, "done": flag[:, :1]}}, [CAPACITY])
    sampler = SequenceSampler(UniformSampler(), 4)
    rb = ReplayBuffer(storage=PackedStorage(CAPACITY, share_next=["is_init"]), sampler=sampler, batch_size=BATCH)
    rb.extend(rows)
    for _ in range(3):
        assert rb.sample()["is_init"].view(-1, 4, 8)[:, 0].all()


ANCHORS: dict[str, Any] = {
    "proportional": ProportionalSampler,
    "floored": lambda rows: ProportionalSampler(rows, min_priority=0.7),
    "rank": RankSampler,
    "n-step": lambda rows: NStepSampler(ProportionalSampler(rows), 3, 0.9),
}
ERRORS = ["finite", "finite", "hidden", "nan", "inf", "row"]


@pytest.mark.parametrize("lanes", [None, LANES])
@pytest.mark.parametrize("inner", ANCHORS)
@given(
    how=st.fixed_dictionaries(
        {
            **{
                "length": st.integers(1, 6),
                "burn_in": st.integers(0, 3),
                "boundary": st.sampled_from(["pad", "shift"]),
            },
            **{"priority": st.sampled_from(["max", "mix"]), "eta": st.sampled_from([0.0, 0.3, 0.9, 1.0])},
        }
    ),
    later=st.integers(0, CAPACITY),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    stamped=st.booleans(),
    errors=st.sampled_from(ERRORS),
    reduction=st.sampled_from(["max", "min", "mean", "median"]),
    seed=st.integers(0, 999),
)
def test_compiled_updates_reduce_windows_as_torch_does(
    inner, lanes, how, later, masked, stamped, errors, reduction, seed
):
    generator, found = torch.Generator().manual_seed(seed), []
    for cls in ReplayBuffer, GeneralBuffer:
        torch.manual_seed(seed)
        sampler = SequenceSampler(ANCHORS[inner](CAPACITY * (lanes or 1)), **how)
        storage = PackedStorage(CAPACITY * (lanes or 1), ndim=1 if lanes is None else 2)
        rb = cls(storage=storage, sampler=sampler, batch_size=5 * sampler.window)
        rb.extend(steps(CAPACITY - 3, lanes, seed))
        batch = [rb.sample(), rb.sample()][1]
        count = len(batch)
        generator.manual_seed(seed)
        sampler.innermost.reduction = reduction
        batch["td_error"] = torch.randn(count, *[(), (1,), (2,)][seed % 3], generator=generator)
        batch["mask"] &= torch.rand(count, generator=generator) >= masked
        if errors == "hidden":  # padding and burn-in may have any error
            batch["td_error"][~batch["mask"] | batch["burn_in_mask"]] = torch.nan
        elif errors != "finite":
            batch["mask"][-1], batch["burn_in_mask"][-1] = True, False
            batch["td_error"][-1] = torch.tensor(float(errors)) if errors != "row" else 1.0
            batch["anchor_index"][-sampler.window :] += CAPACITY if errors == "row" else 0
        if later:
            rb.extend(steps(later, lanes, seed + 1))
        if not stamped:
            del batch["sampled_at"]
        found.append(updated(rb, batch))
    assert_equal(found[0][1:], found[1][1:])
    assert (found[0][1] is None) == found[0][0]  # compiled code refuses only what the general path refuses
    assert found[0][0] or errors not in ("finite", "hidden")


@pytest.mark.parametrize("lanes", [None, LANES])
@pytest.mark.parametrize("reduction", ["max", "min", "mean", "median"])
def test_several_td_errors_of_a_row_are_reduced_as_on_the_general_path(reduction, lanes):
    found = []
    for rb in buffers("proportional", lanes):
        rb.sampler.reduction = reduction
        rb.extend(steps(20, lanes, 0))
        batch = [rb.sample(), rb.sample()][1]
        batch["td_error"] = torch.randn(BATCH, 3, 1, generator=torch.Generator().manual_seed(1))
        found.append(updated(rb, batch))
    assert found[0][0]
    assert_equal(found[0][1:], found[1][1:])


def updated(rb: ReplayBuffer, batch: TensorDict) -> tuple[object, ...]:
    """Return whether compiled code updates priorities, the error, the number of stale rows, and the priorities."""
    bound, is_compiled, error = rb.bound.get(len(batch)), False, None
    if isinstance(bound, BoundBatch):
        stale = bound.update(batch, "td_error")
        is_compiled = stale is not None
        rb.stale_updates.add(stale or 0)
    if not is_compiled:
        try:
            rb.update_tensordict_priority(batch)
        except (ValueError, IndexError) as refusal:
            error = str(refusal)
    priority = rb.sampler.priority(torch.arange(len(rb)), storage=rb.storage)
    return is_compiled, error, rb.stale_updates.total(), rb.sampler.default_priority, priority
