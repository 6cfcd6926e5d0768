"""Trajectories by example: what the index is asked and told, what ends them, that
alternating rows are reported, and which writers keep rows in time order."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import TensorDictMaxValueWriter, Writer

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RecencySampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    SequenceSampler,
    TrajectoryIndex,
    UniformSampler,
)
from tests.backends import forced
from tests.catalogue import numbered_rows


def steps(first: int, count: int, *, ids: bool = True, **entries: Any) -> TensorDict:
    """Return rows that know their number, of one trajectory without an end."""
    x = torch.arange(first, first + count)
    done = torch.zeros(count, 1, dtype=torch.bool)
    after = {"reward": torch.ones(count, 1), "done": done}
    rows = TensorDict({"x": x, "next": after} | entries, [count])
    if ids:
        rows["collector", "traj_ids"] = torch.zeros_like(x)
    return rows


def lengths(rb: Any, **keys: Any) -> list[int]:
    return TrajectoryIndex(rb.storage, **keys).length(torch.arange(len(rb))).tolist()


def test_rows_are_named_in_every_form():
    rb = ReplayBuffer(storage=PackedStorage(12, ndim=2))
    done = torch.tensor([[0, 1], [0, 0], [1, 0]], dtype=torch.bool)  # [T, E]
    rows = rb.extend(TensorDict({"next": {"done": done.T}}, [2, 3]))
    index = TrajectoryIndex(rb.storage)
    flat = torch.arange(6)
    t, e = flat // 2, flat % 2
    for form in (flat, (t, e), torch.stack([t, e], -1), rows, flat.int()):
        back, ahead, ended = index.reach(form)
        assert back.tolist() == [0, 0, 1, 0, 2, 1]
        assert ahead.tolist() == [2, 0, 1, 1, 0, 0]
        assert ended.tolist() == [True, True, True, False, True, False]
    assert index.length(flat[:0]).shape == (0,)


def test_a_storage_has_one_pair_of_keys():
    rb = ReplayBuffer(storage=PackedStorage(4))
    ends = torch.tensor([True, False, False, False])
    rb.extend(steps(0, 4, end=ends))
    for key in ("end", ("end",)):
        assert lengths(rb, done_key=key, traj_key=None) == [1, 3, 3, 3]
    words = r"done_key=\('end',\) and traj_key=None, not by .*use one pair"
    with pytest.raises(ValueError, match=words):
        TrajectoryIndex(rb.storage)


# -- edits


@pytest.mark.parametrize("ndim", [1, 2])
def test_done_flags_that_are_edited_through_a_view_end_trajectories(ndim):
    sampler = NStepSampler(UniformSampler(), 3, 0.9)
    rb = ReplayBuffer(storage=PackedStorage(64, ndim=ndim), sampler=sampler)
    rows = steps(0, 64)
    rb.extend(rows if ndim == 1 else rows.view(2, 32))
    rb.sample(64)
    rb["next", "done"].fill_(True)
    assert rb.sample(64)["steps_to_next_obs"].eq(1).all()
    rb["next", "done"][:] = False
    assert rb.sample(64)["steps_to_next_obs"].max() == 3


MOVES: dict[str, Callable[[Any], Any]] = {
    "pickled": lambda rb: pickle.loads(pickle.dumps(rb)),
    "shared": lambda rb: rb.share(),
    "moved": lambda rb: [rb.storage[:]["x"].share_memory_(), rb][1],
}


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("move", MOVES)
def test_an_edit_is_noticed_whatever_happens_to_the_rows_around_it(move, is_early):
    rb = ReplayBuffer(storage=PackedStorage(8))
    rb.extend(steps(0, 8))
    rb["next", "done"].fill_(True)
    assert lengths(rb) == [1] * 8
    if is_early:
        rb["next", "done"].fill_(False)
    rb = MOVES[move](rb)
    if not is_early:
        rb["next", "done"].fill_(False)
    assert lengths(rb) == [8] * 8


ENDS = ("next", "done"), ("next", "terminated")
EDITS: dict[str, Callable[[Any, TensorDict], object]] = {
    "entries": lambda rb, row: [rb.set_at_(key, row[key], [1]) for key in ENDS],
    "a row": lambda rb, row: rb.storage.set([1], row, set_cursor=False),
    "a view": lambda rb, row: rb.storage[:][1:2].update_(row),
}
WRITES: dict[str, Callable[[Any], object]] = {
    "extend": lambda rb: rb.extend(rb.storage[[0, 0]]),
    "add": lambda rb: [rb.add(rb.storage[[0]][0]) for _ in range(2)],
    "add_step": lambda rb: [play(rb, False) for _ in range(2)],
    "add after all are removed": lambda rb: [rb.storage._empty(), play(rb, False)],
}


def play(rb: Any, terminated: bool) -> None:
    numbers = dict.fromkeys(("observation", "action", "reward", "next_observation"), 0)
    rb.add_step(**numbers, terminated=terminated, truncated=False)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_counts_if_its_row_is_replaced_before_anybody_looks(
    edit: Any, write: Any, backend: Any
) -> None:
    """The second row is edited: it ends no episode, so that the third begins none.
    After two more rows, the episode of the oldest row has begun before it."""
    with forced(backend):
        rb: Any = ReplayBuffer(storage=PackedStorage(4))
        for terminated in (False, True, False, False):
            play(rb, terminated)
        edit(rb, rb.storage[[0]])
        write(rb)
        first, _ = TrajectoryIndex(rb.storage).whole(only_finished=False)
        assert first.tolist() == []


# -- loads


def load_rows_alone(rb: Any, folder: Path) -> None:
    rb.dumps(folder)
    rb.loads(folder, rows_only=True)


def load_dumped_storage(rb: Any, folder: Path) -> None:
    rb.storage.dumps(folder)
    rb.storage.loads(folder)


LOADS: dict[str, Callable[[Any, Path], object]] = {
    "state": lambda rb, folder: rb.load_state_dict(rb.state_dict()),
    "rows of a dump": load_rows_alone,
    "storage state": lambda rb, folder: rb.storage.load_state_dict(
        rb.storage.state_dict()
    ),
    "storage dump": load_dumped_storage,
}


@pytest.mark.parametrize("is_edited", [False, True])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("load", LOADS)
def test_a_load_ends_the_open_trajectories_of_rows_with_ids_alone(
    load: str, ids: bool, is_edited: bool, tmp_path: Path
) -> None:
    rb: Any = ReplayBuffer(storage=PackedStorage(8))
    rb.extend(steps(0, 3, ids=ids))
    assert lengths(rb) == [3] * 3
    LOADS[load](rb, tmp_path)
    if is_edited:  # a break that is due outlasts it
        rb["next", "done"] = torch.zeros(3, 1, dtype=torch.bool)
        assert lengths(rb) == [3] * 3
    rb.extend(steps(3, 2, ids=ids))
    assert lengths(rb) == ([3] * 3 + [2] * 2 if ids else [5] * 5)


@pytest.mark.parametrize("shared", [False, True])
def test_keys_that_are_named_after_the_rows_find_the_same_episodes(shared) -> None:
    ends = torch.zeros(13, dtype=torch.bool)
    ends[[7, 9]] = True  # the beginning of the oldest episode is gone
    rows, keys = steps(0, 13, end=ends), {"done_key": "end", "traj_key": None}
    found = []
    for is_early in (True, False):
        rb: Any = ReplayBuffer(storage=PackedStorage(8, shared=shared))
        if is_early:
            TrajectoryIndex(rb.storage, **keys)
        rb.extend(rows[:11])
        rb.load_state_dict(rb.state_dict())  # a break for those with ids
        rb.extend(rows[11:])
        whole = TrajectoryIndex(rb.storage, **keys).whole(only_finished=False)
        found.append((lengths(rb, **keys), [part.tolist() for part in whole]))
    assert found[0] == found[1]
    assert len(found[0][1][0]) == 2


# -- rows of environments that alternate


SAMPLERS: dict[str, Any] = {
    "n-step": lambda: NStepSampler(UniformSampler(), 5, 0.9),
    "sequences": lambda: SequenceSampler(ProportionalSampler(4_000), 8),
    "hindsight": lambda: HindsightSampler(
        UniformSampler(), lambda batch: batch["next", "reward"]
    ),
}


def interleaved(
    steps: int, lanes: int, length: int = 20, ids: bool = True, flags: bool = True
) -> TensorDict:
    """Return transitions ``[T, E]`` of episodes of ``length`` steps, all lanes at the
    same step."""
    step = torch.arange(steps)[:, None].expand(steps, lanes)
    state = (step * lanes + torch.arange(lanes)).unsqueeze(-1).float()
    following = {
        "observation": state + lanes,
        "achieved_goal": state,
        "reward": torch.ones_like(state),
    }
    data = TensorDict(
        {"observation": state, "desired_goal": state.clone(), "next": following},
        [steps, lanes],
    )
    if flags:
        data["next", "done"] = (step % length == length - 1).unsqueeze(-1)
    if ids:
        data["collector", "traj_ids"] = (step // length) * lanes + torch.arange(lanes)
    return data.clone()


def sampled(sampler: Any, rows: TensorDict, **options: Any) -> ReplayBuffer:
    """Return a buffer with rows from which a batch has been drawn."""
    storage = PackedStorage(4_000, **options)
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=16)
    rb.extend(rows)
    rb.sample()
    return rb


LANES = r".* PackedStorage\(\.\.\., ndim=2\)"
STRETCHES = rf"stored in stretches of 1\.0 rows on average, .* alternate:{LANES}"
MIXED = rf"environments alternate in the rows, .* mix the environments\.{LANES}"
ALTERNATING: dict[str, tuple[TensorDict, str]] = {
    "ids": (interleaved(40, 4), STRETCHES),
    "one step": (interleaved(1, 4), STRETCHES),
    "ids without flags": (interleaved(40, 4, flags=False), STRETCHES),
    "flags without ids": (interleaved(40, 4, ids=False), MIXED),
    "two lanes": (interleaved(20, 2, ids=False), MIXED),
    "many lanes": (interleaved(20, 200, ids=False), MIXED),
}


@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(("rows", "words"), ALTERNATING.values(), ids=ALTERNATING)
def test_environments_that_alternate_are_reported_once(
    rows: TensorDict, words: str, kind: str, share_next: bool
) -> None:
    rb = sampled(SAMPLERS[kind](), rows[0, :1], share_next=share_next)  # too few
    rb.extend(rows.flatten()[1:])
    with pytest.warns(RuntimeWarning, match=words):
        rb.sample()
    rb.sample()


def scaled(rows: TensorDict) -> TensorDict:
    """Store next observations of another scale, which are nowhere else."""
    rows["next", "observation"] = rows["next", "observation"] * 2 + 0.5
    return rows


def repeated(rows: TensorDict) -> TensorDict:
    """Store a few observations again and again."""
    rows["observation"] = rows["observation"] % 3
    rows["next", "observation"] = rows["next", "observation"] % 3
    return rows


WHOLE: dict[str, TensorDict] = {
    "1 step": interleaved(120, 1, length=1),
    "2 steps": interleaved(120, 1, length=2),
    "2 steps by id": interleaved(120, 1, length=2, flags=False),
    "2 steps by flag": interleaved(120, 1, length=2, ids=False),
    "one environment, then the next": interleaved(40, 3).transpose(0, 1),
    "in pieces, without ids": interleaved(40, 3, ids=False).transpose(0, 1),
    "one row": interleaved(1, 1),
    "scaled observations": scaled(interleaved(120, 1, ids=False)),
    "repeated observations": repeated(interleaved(120, 1, ids=False)),
}


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("rows", WHOLE.values(), ids=WHOLE)
def test_whole_trajectories_need_no_warning(rows: TensorDict, kind: str) -> None:
    sampled(SAMPLERS[kind](), rows.flatten())


def test_lanes_of_their_own_and_draws_of_single_rows_need_no_warning() -> None:
    rows = interleaved(40, 4)
    rb = sampled(SAMPLERS["n-step"](), rows.transpose(0, 1), ndim=2)
    assert rb.health()["stretch_mean"] == 20.0
    sampled(UniformSampler(), rows.flatten())


# -- samplers that need rows in time order refuse writers that keep none


T = 16


def buffer(
    storage: Any = None, sampler: Any = None, cls: Any = ReplayBuffer, **parts: Any
) -> Any:
    storage = PackedStorage(T) if storage is None else storage
    sampler = sampler or UniformSampler()
    return cls(storage=storage, sampler=sampler, batch_size=8, **parts)


class InAnyOrder(Writer):
    """A writer of a user's own, which happens to write in time order."""

    count = 0

    def add(self, data: Any) -> int:
        index = self.count % T
        self.count += 1
        self._storage.set(index, data)
        for buffer in self._storage._attached_entities:
            buffer.mark_update(index)
        return index

    def extend(self, data: Any) -> torch.Tensor:
        return torch.tensor([self.add(row) for row in data])

    def _empty(self, empty_write_count: bool = True) -> None: ...
    def dumps(self, path: Any) -> None: ...
    def loads(self, path: Any) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class InOrder(InAnyOrder):
    keeps_order = True


@pytest.mark.parametrize("sampler", [SAMPLERS["n-step"], lambda: RecencySampler(2.0)])
def test_a_writer_of_ones_own_says_whether_it_keeps_order(sampler):
    with pytest.raises(
        ValueError, match=r"InAnyOrder may write .*: set keeps_order = "
    ):
        buffer(sampler=sampler(), writer=InAnyOrder())
    rb = buffer(sampler=sampler(), writer=InOrder())
    for first in range(0, 3 * T, 4):
        rb.extend(numbered_rows(4, first))
        assert rb.sample().shape == (8,)
    ring = buffer(rb.storage)
    assert ring.chronological()["x"].tolist() == [*range(2 * T, 3 * T)]


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_samplers_refuse_the_writer_of_any_buffer_over_the_rows(cls):
    words = "order, a ReservoirWriter keeps none: use"
    unordered = buffer(writer=ReservoirWriter())
    unordered.extend(numbered_rows(20 * T))
    with pytest.raises(ValueError, match=words):
        buffer(unordered.storage, SAMPLERS["n-step"](), cls).sample()
    assert buffer(unordered.storage).sample().shape == (8,)
    rb = buffer(sampler=SAMPLERS["n-step"]())
    rb.extend(numbered_rows(5))

    def sample_beside_a_reservoir() -> None:
        other = buffer(rb.storage, cls=cls, writer=ReservoirWriter())
        assert len(other) == 5
        rb.sample()  # TorchRL's buffer refuses nothing before

    with pytest.raises(ValueError, match=words):
        sample_beside_a_reservoir()


def test_torchrls_buffers_of_the_largest_values_are_imported_for_other_samplers(
    tmp_path,
):
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(T), writer=TensorDictMaxValueWriter("x"), batch_size=4
    )
    theirs.extend(numbered_rows(3 * T, 0))
    theirs.dumps(tmp_path)
    for source in (theirs, tmp_path):
        with pytest.raises(ValueError, match="a TensorDictMaxValueWriter keeps none"):
            ReplayBuffer.from_torchrl(source, sampler=RecencySampler(2.0))
        assert len(ReplayBuffer.from_torchrl(source)) == T


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_the_writer_of_the_largest_values_keeps_them_with_their_priorities(cls):
    writer = TensorDictMaxValueWriter("rank")
    rb = buffer(sampler=ProportionalSampler(T), cls=cls, writer=writer)
    rank = torch.randperm(150).float()
    for first in range(0, 150, 6):
        part = torch.arange(first, first + 6)
        rb.extend(TensorDict({"x": part, "rank": rank[part]}, [6]))
        rows, largest = rb.storage[:], rank[: first + 6].sort(descending=True).values
        assert torch.equal(rows["rank"].sort(descending=True).values, largest[:T])
        assert torch.equal(rank[rows["x"]], rows["rank"])
        priority = rb.sampler.priority(torch.arange(len(rows)))
        assert (priority[rows["x"] >= first] == 1.0).all()
        errors = torch.ones(len(rows))
        errors[1:] = 0.5
        rb.update_priority(torch.arange(len(rows)), errors)
    rb.storage.check()


def test_rows_without_order_are_not_continued_as_if_they_had_one() -> None:
    rb = buffer(PackedStorage(4), writer=ReservoirWriter())
    rb.extend(numbered_rows(9))
    with pytest.raises(ValueError, match=r"ReservoirWriter are in no time .*rb.empty"):
        rb.set_writer(RingWriter())
    rb.empty()
    rb.set_writer(RingWriter())
    rb.extend(numbered_rows(5))
    assert rb.chronological()["x"].tolist() == [1, 2, 3, 4]


# -- several buffers over one storage


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_buffers_over_one_storage_write_one_after_the_other(cls):
    rb = buffer()
    other = buffer(rb.storage, cls=cls, writer=RingWriter())
    held: list[int] = []
    for number in range(12):
        if number in (3, 9):
            other.empty()
            held = []
        rb.extend(numbered_rows(3, 5 * number))
        if number != 9:
            other.extend(numbered_rows(2, 5 * number + 3))
        held += range(5 * number, 5 * number + (3 if number == 9 else 5))
        assert rb.chronological()["x"].tolist() == held[-T:]


def test_a_reservoir_begins_again_after_another_buffer_has_removed_its_rows():
    rb = buffer(writer=ReservoirWriter())
    rb.extend(numbered_rows(20 * T))
    buffer(rb.storage).empty()
    rb.extend(numbered_rows(3, 1_000))
    assert (rb[:]["x"].tolist(), rb.write_count) == ([1_000, 1_001, 1_002], 3)
