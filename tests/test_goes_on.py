"""Saved, copied, sent or reopened by any way, a buffer goes on bit for bit: a table of
makers times a table of ways.

Each case, with one of the backends, plays some rounds with a buffer, takes it another
way, and then plays the same rounds with both: what every call returns, and all state at the end, generators
included, must be equal byte by byte.
"""

from __future__ import annotations

import copy
import multiprocessing as mp
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorClass, TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModule
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.envs.transforms import ObservationNorm

from rlbuf_td import (
    EpisodeSampler,
    EpisodeStats,
    ExperienceQueue,
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ReplayBuffer,
    ReplayBufferMixture,
    ReservoirWriter,
    RolloutBuffer,
    UniformSampler,
)
from tests.backends import needs, running
from tests.catalogue import SAMPLERS, SCHEMAS, Schema, as_bytes, reward_fn, transitions

STEPS, BATCH = 20, 8
AFTER = 6  # rounds after the way


# -- rounds: what a run does with a buffer


def steps(first: int, n: int, lanes: int, *, ids: bool = False) -> TensorDict:
    """Return time steps ``[n]`` or ``[n, lanes]``; an episode has five, and
    observations continue from row to row."""
    shape = (n, lanes) if lanes else (n,)
    time = torch.arange(first, first + n + 1).view(-1, *[1] * (len(shape) - 1))
    lane = torch.arange(max(1, lanes)).view(shape[1:] or (1,))
    seen = torch.sin((time + 0.5 * lane).unsqueeze(-1) + torch.arange(3.0)).view(
        n + 1, *shape[1:], 3
    )
    done = (time[:-1] % 5 == 4).unsqueeze(-1).expand(*shape, 1)
    now = {
        "observation": seen[:-1],
        "achieved_goal": seen[:-1, ..., :1],
        "desired_goal": seen[1:, ..., 1:2],
    }
    after = {
        "observation": seen[1:],
        "achieved_goal": seen[1:, ..., :1],
        "desired_goal": now["desired_goal"],
    }
    after |= {"reward": seen[1:, ..., 2:], "done": done, "terminated": done}
    data = TensorDict(now | {"action": time[:-1].expand(shape), "next": after}, shape)
    if ids:
        data["collector", "traj_ids"] = (time[:-1] // 5 * 4 + lane).expand(shape)
    return data.clone()


def lanes_first(data: TensorDict) -> TensorDict:
    return data.transpose(0, 1).contiguous() if data.ndim > 1 else data


def learn(rb: Any, number: int) -> list[Any]:
    """Draw a batch, and report the TD errors of its rows."""
    batch = rb.sample()
    seen = [batch.clone()]
    if "priority_weight" in batch.keys():
        batch["td_error"] = torch.sin(
            batch["observation"].flatten(batch.ndim).sum(-1)
        ) * (1 + number % 5)
        rb.update_tensordict_priority(batch)
    return seen


#: Settings that schedulers and users change in a run: a copy has those of the moment.
SETTINGS: dict[str, Callable[[int], float]] = {
    "alpha": lambda number: 0.5 + number / 100,
    "beta": lambda number: 0.4 + number / 50,
    "half_life": lambda number: 3.0 + number,
    "future_gamma": lambda number: 1 - number / 50,
    "n_steps": lambda number: 2 + number % 2,
    "her_ratio": lambda number: 0.4 + number / 50,
    "eta": lambda number: 0.5 + number / 50,
}


@dataclass(frozen=True)
class Maker:
    """How a buffer is made, and what a round of a run does with it."""

    # from a folder and a seed, which the way must replace
    make: Callable[[Path, int], Any]
    # the number of the round; returns what the calls have returned
    play: Callable[[Any, int], list[Any]]
    lacks: tuple[str, ...] = ()  # ways
    # number of the last round before the way: some rings have wrapped then
    before: int = 10
    turn: int = 2  # one of so many cases is in the fast part

    def run(self, rb: Any, number: int) -> list[Any]:
        torch.manual_seed(number)
        np.random.seed(number)  # noqa: NPY002  TorchRL's samplers draw from it
        return self.play(rb, number)

    def go_on(self, rb: Any, batch: Any) -> list[Any]:
        """Play the rounds after the way; a batch of before comes back late."""
        first, second, *others = self.after()
        seen = [self.run(rb, first), self.run(rb, second)]
        if is_tensor_collection(batch) and "priority_weight" in batch.keys():
            rb.update_tensordict_priority(
                batch.clone().set("td_error", batch["priority_weight"] * 3)
            )
        return seen + [self.run(rb, number) for number in others]

    def after(self) -> range:
        return range(self.before + 1, self.before + 1 + AFTER)


@dataclass(frozen=True)
class Form:
    """What the rows of a buffer are, and where they lie."""

    storage: Callable[..., Any] = PackedStorage
    lanes: int = 0
    apart: bool = False  # one lane is written at a time, and they stand at unlike steps
    # rows have trajectory ids, and the way is taken between two episodes: a load ends
    # open ones
    ids: bool = False
    options: Callable[[int], dict[str, Any]] = lambda seed: {}  # of the buffer
    in_file: bool = False
    emptied: bool = False  # in the last round before the way
    buffer: Any = ReplayBuffer
    lacks: tuple[str, ...] = ()

    def make(self, sampler: Any, folder: Path, seed: int) -> Any:
        rows = STEPS * max(1, self.lanes)
        where = {"scratch_dir": folder} if self.in_file else {}
        storage = self.storage(rows, ndim=2 if self.lanes else 1, **where)
        options = {
            "batch_size": BATCH,
            "generator": torch.Generator().manual_seed(seed),
        } | self.options(seed)
        return self.buffer(storage=storage, sampler=sampler(rows), **options)

    def play(self, rb: Any, number: int) -> list[Any]:
        seen: list[Any] = []
        if self.emptied and number == 10:
            return [rb.empty()]
        if number % 3 != 1:  # now and then only a batch is drawn
            count = 5 if self.ids else 3
            first, count = (
                (number * count + 5, count) if len(rb) else (number * count, count + 10)
            )
            lanes = {"lanes": [0, 1, 0, 2][number % 4]} if self.apart else {}
            data = steps(first, count, 0 if self.apart else self.lanes, ids=self.ids)
            seen.append(rb.extend(lanes_first(data), **lanes))
        if number < 11:
            self.change_settings(rb, number)
        return seen + learn(rb, number)

    def change_settings(self, rb: Any, number: int) -> None:
        for name, value in SETTINGS.items():
            if hasattr(rb.sampler, name):
                setattr(rb.sampler, name, value(number))

    def of(self, sampler: Any, *lacks: str) -> Maker:
        return Maker(
            partial(self.make, sampler),
            self.play,
            (*self.lacks, *lacks),
            turn=47,
        )


def counted(seed: int) -> dict[str, Any]:
    norm = ObservationNorm(loc=float(seed), scale=2.0, in_keys=["observation"])
    flow = {"samples_per_insert": 3.0, "tolerance": 500}
    return {
        "stats": EpisodeStats(),
        "transform": norm,
        "batch_size": BATCH + 4 * seed,
    } | flow


def positive_fn(batch: TensorDictBase) -> torch.Tensor:
    return 1 + reward_fn(batch)


PARTS = "parts", "dumped parts"
FORMS = {
    "rows": Form(),
    "lanes": Form(lanes=3),
    "lanes apart": Form(lanes=3, apart=True, storage=partial(PackedStorage, lanes=3)),
    "ids": Form(lanes=2, ids=True),
    "shared": Form(lanes=2, storage=partial(PackedStorage, shared=True)),
    "file": Form(in_file=True),
    "observations once": Form(
        lanes=2, storage=partial(PackedStorage, share_next=["observation"])
    ),
    "counted": Form(ids=True, options=counted, lacks=PARTS),
}
MORE: dict[str, Callable[[int], Any]] = SAMPLERS | {
    "final goals": lambda rows: HindsightSampler(
        UniformSampler(), positive_fn, strategy="final"
    ),
    "episodes": lambda rows: EpisodeSampler(None, 2, gamma=0.5),
}
THEIRS: dict[str, Callable[[int], Any]] = {
    "RandomSampler": lambda rows: RandomSampler(),
    "SamplerWithoutReplacement": lambda rows: SamplerWithoutReplacement(),
    "SliceSampler": lambda rows: SliceSampler(num_slices=2, end_key=("next", "done")),
    "PrioritizedSampler": lambda rows: PrioritizedSampler(rows, 0.7, 0.5),
    "n-step over PrioritizedSampler": lambda rows: NStepSampler(
        PrioritizedSampler(rows, 0.7, 0.5), 2, 0.9
    ),
}
TORCHRLS_RING = Form(options=lambda seed: {"writer": TensorDictRoundRobinWriter()})
OTHERS = {
    "reservoir": Form(options=lambda seed: {"writer": ReservoirWriter()}, lanes=0),
    "a device": Form(options=lambda seed: {"device": "cpu"}, ids=True, lanes=2),
    "emptied": Form(emptied=True),
    "emptied, observations once": Form(
        emptied=True, lanes=2, storage=partial(PackedStorage, share_next=True)
    ),
    "emptied, shared": Form(emptied=True, storage=partial(PackedStorage, shared=True)),
    "observations once in a file": Form(
        in_file=True, storage=partial(PackedStorage, share_next=["observation"])
    ),
    "frames": Form(storage=partial(PackedStorage, frames={"observation": 3})),
    "TorchRL's buffer": Form(buffer=TensorDictReplayBuffer, lacks=PARTS),
    "TorchRL's ring": TORCHRLS_RING,
}


def product() -> Iterator[tuple[str, Maker]]:
    for sampler, make in MORE.items():
        yield from (
            (f"{sampler}, {form}", kind.of(make)) for form, kind in FORMS.items()
        )
    for form, kind in OTHERS.items():
        for sampler in ("uniform", "proportional", "rank"):
            yield (
                f"{sampler}, {form}",
                replace(kind.of(SAMPLERS[sampler]), turn=3 if kind.lacks else 9),
            )
    for sampler, make in THEIRS.items():
        # its trees are objects of C++
        lacks = ("torch.save", "dump") if "Prioritized" in sampler else ()
        if " over Prioritized" in sampler:
            lacks = (*lacks, "dumped parts")
        yield f"{sampler}, rows", replace(TORCHRLS_RING.of(make, *lacks), turn=5)


MAKERS: dict[str, Maker] = dict(product())


# -- rows of every kind; rollouts, queues and mixtures


def of_schema(schema: Schema, lanes: int) -> Maker:
    def make(folder: Path, seed: int) -> Any:
        place = PackedStorage(STEPS * max(1, lanes), ndim=1 + bool(lanes))
        generator = torch.Generator().manual_seed(seed)
        return ReplayBuffer(
            storage=place, batch_size=BATCH, generator=generator, dim_extend=0
        )

    def play(rb: Any, number: int) -> list[Any]:
        data = transitions(schema, 3, (lanes,) if lanes else (), seed=number)
        return [rb.extend(data), rb.sample()]

    return Maker(make, play, turn=7)


class Step(TensorClass):
    """A row that is an object of a class."""

    observation: torch.Tensor
    action: torch.Tensor


def of_class() -> Maker:
    def play(rb: Any, number: int) -> list[Any]:
        data = steps(number * 3, 3, 0)
        rows = Step(
            observation=data["observation"], action=data["action"], batch_size=[3]
        )
        return [rb.extend(rows), rb.sample(), rb[:]]

    return replace(Form().of(SAMPLERS["uniform"]), play=play)


class Value(torch.nn.Module):
    """A value of an observation."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation.sum(-1, keepdim=True)


def one_step(data: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
    target = (
        data["next", "reward"]
        + 0.5 * data["next", "state_value"] * ~data["next", "terminated"]
    )
    return target - data["state_value"], target


def of_rollouts(before: int, **settings: Any) -> Maker:
    """Return rollouts of eight steps: half full after an odd number of rounds, in
    mid-epoch after an even one."""

    def make(folder: Path, seed: int) -> Any:
        network = TensorDictModule(
            Value(), in_keys=["observation"], out_keys=["state_value"]
        )
        generator = torch.Generator().manual_seed(seed)
        return RolloutBuffer(
            8,
            3,
            epochs=2,
            value_network=network,
            generator=generator,
            batch_size=6,
            **settings,
        )

    def play(rb: Any, number: int) -> list[Any]:
        seen = [rb.extend(lanes_first(steps(4 * number, 4, 3)))]
        return (
            [*seen, rb.sample(), rb.sample(), rb.sample(), rb.summary()]
            if rb.is_complete
            else seen
        )

    return Maker(make, play, before=before, lacks=PARTS)


def of_queues(folder: Path, seed: int) -> Any:
    return ExperienceQueue(storage=PackedStorage(80), batch_size=4, timeout=0.1)


def play_queue(rb: Any, number: int) -> list[Any]:
    return [rb.extend(steps(5 * number, 5, 0)), rb.sample(), rb.waiting]


def of_mixtures(folder: Path, seed: int, *, exact: bool = False) -> Any:
    made = zip(
        ("one", "other"),
        ("proportional", "rank"),
        ("lanes", "rows"),
        (0, 5),
        strict=True,
    )
    members = {
        name: FORMS[form].make(SAMPLERS[sampler], folder / name, seed + more)
        for name, sampler, form, more in made
    }
    generator = torch.Generator().manual_seed(seed)
    return ReplayBufferMixture(
        members,
        {"one": 0.3 + seed / 10, "other": 0.7},
        exact=exact,
        batch_size=BATCH,
        generator=generator,
    )


def play_mixture(rb: Any, number: int) -> list[Any]:
    members = (
        [("one", 3), ("other", 0)]
        if not len(rb)
        else [[("one", 3), ("other", 0)][number % 2]]
    )
    seen = [
        rb.extend(lanes_first(steps(5 * number, 5, lanes)), name)
        for name, lanes in members
    ]
    return seen + learn(rb, number)


MAKERS |= {
    f"{schema}{', lanes' * bool(lanes)}": of_schema(schema, lanes)
    for schema in SCHEMAS.values()
    for lanes in (0, 2)
}
MAKERS |= {
    "tensorclass": of_class(),
    "half a rollout": of_rollouts(10),
    "an epoch": of_rollouts(11, normalize_advantage="minibatch"),
    "half a rollout in chunks": of_rollouts(10, sequence_length=3),
    "an epoch in chunks": of_rollouts(11, sequence_length=3),
    "half a rollout of an estimator": of_rollouts(10, estimator=one_step),
    "part of a rollout": of_rollouts(10, partial=True),
    "queue": Maker(of_queues, play_queue, lacks=PARTS),
    "mixture": Maker(of_mixtures, play_mixture, lacks=PARTS),
    "exact mixture": Maker(partial(of_mixtures, exact=True), play_mixture, lacks=PARTS),
}


# -- ways: from a buffer to another that goes on like it


def with_generator(rb: Any, other: Any) -> Any:
    """Give a copy the state of the generator, where the way does not say that it
    carries it."""
    other._rng.set_state(rb._rng.get_state())
    return other


def by_state(rb: Any, make: Callable[[], Any], folder: Path) -> Any:
    other = make()
    other.load_state_dict(rb.state_dict())
    return other


def by_torch_save(rb: Any, make: Callable[[], Any], folder: Path) -> Any:
    torch.save(rb.state_dict(), folder / "state.pt")
    other = make()
    other.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    return other


def by_dump(rb: Any, make: Callable[[], Any], folder: Path) -> Any:
    rb.dumps(place_of(rb, folder))
    other = make()
    is_ours = isinstance(other, ReplayBuffer | ReplayBufferMixture)
    more = {"transforms": True} if is_ours else {}
    other.loads(place_of(rb, folder), **more)
    return other


def place_of(rb: Any, folder: Path) -> Path:
    """Return where a dump is written: beside the rows, if they are in a file."""
    storage = getattr(rb, "storage", None)
    return (
        isinstance(storage, PackedStorage) and storage.scratch_dir
    ) or folder / "dump"


def by_parts(rb: Any, make: Callable[[], Any], folder: Path) -> Any:
    other = make()
    for name in ("storage", "writer", "sampler"):
        getattr(other, name).load_state_dict(getattr(rb, name).state_dict())
    return with_generator(rb, other)


def by_dumped_parts(rb: Any, make: Callable[[], Any], folder: Path) -> Any:
    other = make()
    for name in ("storage", "writer", "sampler"):
        getattr(rb, name).dumps(folder / name)
        getattr(other, name).loads(folder / name)
    return with_generator(rb, other)


def by_pickle(rb: Any, make: Callable[[], Any], folder: Path) -> Any:
    return pickle.loads(pickle.dumps(rb))


def by_copy(rb: Any, make: Callable[[], Any], folder: Path) -> Any:
    return copy.deepcopy(rb)


WAYS = {
    "state": by_state,
    "torch.save": by_torch_save,
    "dump": by_dump,
    "parts": by_parts,
    "dumped parts": by_dumped_parts,
    "pickle": by_pickle,
    "copy": by_copy,
}


# -- what must be equal


def assert_equal(
    left: Any, right: Any, ignored: Collection[str], where: str = ""
) -> None:
    """Compare nested values, tensors byte by byte; ignore some names."""
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert torch.equal(as_bytes(left), as_bytes(right)), where
    elif isinstance(left, Mapping) or is_tensor_collection(left):
        assert set(left.keys()) == set(right.keys()), where
        for key in set(left.keys()) - {*ignored}:
            assert_equal(left.get(key), right.get(key), ignored, f"{where}[{key!r}]")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for j, pair in enumerate(zip(left, right, strict=True)):
            assert_equal(*pair, ignored, f"{where}[{j}]")
    else:
        np.testing.assert_array_equal(left, right, where)


def everything(rb: Any) -> dict[str, Any]:
    """Return all that is known of a buffer, generators included."""
    found = {"state": rb.state_dict()}
    if isinstance(rb, ReplayBufferMixture):
        found["members"] = {
            name: everything(member) for name, member in rb.members.items()
        }
    if isinstance(rb, ReplayBuffer):
        found |= {"data": rb[:], "count": rb.write_count, "health": rb.health()}
        if rb.episode_stats is not None:
            found["stats"] = rb.episode_stats.state_dict()
    return found


# ways into a buffer that is there, new or used
INTO = {"state", "torch.save", "dump", "parts", "dumped parts"}
#: What a process counts, the episodes, which a load and a reopening end, and bytes of
# rows with padding.
ALWAYS = "compiled", "episodes", "rows", "entries", "_sum_tree", "_min_tree"
CLOCK = "sampled_at", "ring"  # a used buffer goes on counting its rows
OF_BUFFER = "_sample_calls", "_sampled_items", "health"  # not in its parts


def ignored(name: str, way: str, used: bool) -> set[str]:
    """Return names of what a way does not carry."""
    by_torchrl = way == "dumped parts" or (
        way == "dump" and name.endswith("TorchRL's buffer")
    )
    # its dumps have their own order of keys, and no clock
    forms: tuple[str, ...] = ("layout",) if by_torchrl else ()
    # counted by a process, before the way too
    return {
        *ALWAYS,
        *(CLOCK if used or by_torchrl else ()),
        *forms,
        *(OF_BUFFER if way in PARTS else ()),
    }


#: Few, because a batch takes seconds.
INTERPRETED = [
    ("uniform, rows", "copy"),
    ("proportional, lanes", "state"),
    ("rank, observations once", "dump"),
]


def cases() -> Iterator[Any]:
    """Backends times makers times ways.

    With the compiled loops, each way and each maker, but for those of a product, whose
    samplers and forms all occur, is in the fast part; an eighth of the others is in the
    slow part. With the reference, one case of 24 is in the slow part, and a tenth of
    these in the fast part.
    """
    for i, (name, maker) in enumerate(MAKERS.items()):
        for j, way in enumerate(WAYS):
            place = 5 * i + j
            if way in maker.lacks:
                continue
            used = way in INTO and (i + j) % 2 == 1
            if place % maker.turn == 0 or place % 8 == 0:
                yield case("compiled", name, way, used, place % maker.turn > 0)
            # a tree of ranks is not shared without its compiled loops
            is_ranked = name.startswith(("rank", "n-step over hindsight"))
            if place % 24 == 12 and not (is_ranked and "shared" in name):
                yield case("reference", name, way, used, place % 240 != 12)
    for name, way in INTERPRETED:
        yield case("interpreter", name, way, False, True)


def case(backend: str, name: str, way: str, used: bool, is_slow: bool) -> Any:
    marks = [*needs(backend), *[pytest.mark.slow] * is_slow]
    told = f"{name}, {way}{' into a used one' * used}, {backend}"
    return pytest.param(backend, name, way, used, id=told, marks=marks)


# rows with batch dims of their own
@pytest.mark.filterwarnings("ignore:with ndim=., data of batch size")
@pytest.mark.parametrize(("backend", "name", "way", "used"), [*cases()])
def test_it_goes_on(backend, name, way, used, tmp_path):
    maker = MAKERS[name]
    with running(backend):
        rb, other = (maker.make(tmp_path / str(seed), seed) for seed in range(2))
        for number in range(maker.before):
            maker.run(rb, number)
            if number == 4 and way == "dump":
                # where the next dump then finds an earlier one
                rb.dumps(place_of(rb, tmp_path))
        for number in range(99, 102 * used):
            maker.run(other, number)
        last = maker.run(rb, maker.before)
        other = WAYS[way](rb, lambda: other, tmp_path)
        unlike = ignored(name, way, used)
        assert_equal(rb.state_dict(), other.state_dict(), unlike)
        batch = last[-1] if last and "ring" not in unlike else None
        # one after the other: they share no memory
        ours, theirs = maker.go_on(rb, batch), maker.go_on(other, batch)
        assert_equal(ours, theirs, unlike, "calls")
        assert_equal(everything(rb), everything(other), unlike)


@pytest.mark.parametrize("way", WAYS)
def test_reserved_rows_take_more_entries_after_any_way(way, tmp_path):
    rows = steps(0, 3, 0)

    def make() -> Any:
        generator = torch.Generator().manual_seed(0)
        return ReplayBuffer(storage=PackedStorage(STEPS), generator=generator)

    rb = make()
    rb.storage.reserve(rows.exclude("action")[0])
    other = WAYS[way](rb, make, tmp_path)
    other.extend(rows)
    assert_equal(other[:].to_dict(), rows.to_dict(), ())


@pytest.mark.parametrize(
    "name",
    [
        *("proportional, counted", "rank, lanes", "windows, ids", "chunks, file"),
        *("uniform, reservoir", "proportional, frames", "an epoch", "queue", "mixture"),
    ],
)
def test_a_loaded_state_stays_as_it_was(name, tmp_path):
    maker = MAKERS[name]
    rb, other = (maker.make(tmp_path / str(seed), seed) for seed in range(2))
    for number in range(maker.before + 1):
        maker.run(rb, number)
    state = rb.state_dict()
    kept = copy.deepcopy(state)
    other.load_state_dict(state)
    for number in maker.after():
        maker.run(rb, number)
        maker.run(other, number)
    assert_equal(state, kept, ())


# -- ways that need more than a folder: another process, and a file that an earlier
# process has left


def serve(connection: Any, rb: Any, name: str) -> None:
    """Play the rounds that are asked for, in another process; at last tell
    everything."""
    for number in iter(connection.recv, None):
        connection.send_bytes(pickle.dumps(MAKERS[name].run(rb, number)))
    connection.send_bytes(pickle.dumps(everything(rb)))


SENT = [
    f"{sampler}, lanes"
    for sampler in ("uniform", "rank", "windows", "chunks", "episodes")
]
SENT += [
    "proportional, lanes apart",
    "n-step, observations once",
    "n-step, ids",
    "queue",
    "an epoch",
]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("start", "name"),
    [
        *(("fork", name) for name in SENT),
        ("spawn", "n-step, observations once"),
        *(
            pytest.param("spawn", name, marks=pytest.mark.slow)
            for name in ("mixture", "windows, lanes", "rank, counted")
        ),
    ],
)
def test_a_shared_buffer_goes_on_in_another_process(start, name, tmp_path):
    maker, processes = MAKERS[name], mp.get_context(start)
    rb = maker.make(tmp_path, 0)
    for number in range(maker.before + 1):
        maker.run(rb, number)
    copied = copy.deepcopy(rb)
    here, there = processes.Pipe()
    process = processes.Process(target=serve, args=(there, rb.share(), name))
    process.start()
    there.close()  # otherwise a process that died would be waited for
    for number in maker.after():
        here.send(number)
        assert_equal(
            maker.run(copied, number),
            pickle.loads(here.recv_bytes()),
            ALWAYS,
            f"round {number}",
        )
    here.send(None)
    assert_equal(everything(copied), pickle.loads(here.recv_bytes()), ALWAYS)
    process.join(60)
    assert process.exitcode == 0
    for ours, theirs in zip(
        *(getattr(buffer, "members", {"": buffer}).values() for buffer in (copied, rb)),
        strict=True,
    ):
        assert_equal(ours[:], theirs[:], ())


REOPENED = {
    "rows": Form(ids=True, in_file=True, storage=partial(PackedStorage, reopen=True)),
    "lanes": Form(
        ids=True, in_file=True, storage=partial(PackedStorage, reopen=True), lanes=2
    ),
    "lanes apart": Form(
        ids=True,
        in_file=True,
        storage=partial(PackedStorage, reopen=True, lanes=3),
        lanes=3,
        apart=True,
    ),
}
#: What the file does not hold: counts, and whatever the constructor was given.
NOT_IN_FILE = (*ALWAYS, *CLOCK, *OF_BUFFER, "_write_count", "count")


@pytest.mark.parametrize(
    ("sampler", "form"),
    [
        pytest.param(
            sampler, form, marks=[] if j % len(REOPENED) == k else [pytest.mark.slow]
        )
        for j, sampler in enumerate(
            ("rank", "proportional", "n-step", "uniform", "windows")
        )
        for k, form in enumerate(REOPENED)
    ],
)
def test_a_reopened_buffer_goes_on(sampler, form, tmp_path):
    maker = REOPENED[form].of(SAMPLERS[sampler])
    rb = maker.make(tmp_path, 0)
    for number in range(maker.before + 1):
        maker.run(rb, number)
    copied = copy.deepcopy(rb)
    rb.close()
    rb = with_generator(copied, maker.make(tmp_path, 1))
    REOPENED[form].change_settings(rb, maker.before)
    for number in maker.after():
        ours, theirs = (maker.run(buffer, number) for buffer in (copied, rb))
        assert_equal(ours, theirs, NOT_IN_FILE, f"round {number}")
    assert_equal(everything(copied), everything(rb), NOT_IN_FILE)
