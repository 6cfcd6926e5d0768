"""Wrong data, and makers of the objects that must refuse it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModule
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from torchrl.data import ReplayBuffer as TorchRLBuffer

import rlbuf_td
import rlbuf_td.functional
from tests.catalogue import reward_fn

# A call, and what it says: the classes of the error, and words of its message.
Row = tuple[Callable[[Any], Any], str]
Table = dict[tuple[str, Callable[[], Any]], list[Row]]  # by name and maker
td: Any = rlbuf_td  # the arguments are not checked: they are wrong on purpose
F: Any = rlbuf_td.functional
zeros, ones, full, tensor, nan = (
    torch.zeros,
    torch.ones,
    torch.full,
    torch.tensor,
    float("nan"),
)


def steps(*size: int, first: int = 0, **entries) -> TensorDict:
    """Return transitions, numbered along the last dim; no trajectory ends."""
    number = (
        torch.arange(first, first + size[-1]).expand(size).clone()
        if size
        else tensor(first)
    )
    observation = number[..., None].float().expand(*size, 3).clone()
    after = {"observation": observation + 1, "reward": number[..., None].float()}
    after |= {
        name: zeros(*size, 1, dtype=torch.bool) for name in ("done", "terminated")
    }
    return TensorDict(
        {"observation": observation, "action": number, "next": after} | entries, size
    )


def freed(leaf: torch.Tensor) -> torch.Tensor:
    leaf = leaf.clone()
    leaf.untyped_storage().resize_(0)
    return leaf


def freed_behind_an_offset(leaf: torch.Tensor) -> torch.Tensor:
    leaf = torch.cat((leaf[:1], leaf))[1:]
    leaf.untyped_storage().resize_(0)
    return leaf


def shrunk(leaf: torch.Tensor) -> torch.Tensor:
    leaf = leaf.clone()
    leaf.untyped_storage().resize_(leaf.nbytes - 1)
    return leaf


def nested(leaf: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: nested tensors are a prototype
        return torch.nested.nested_tensor([*leaf])


def fake(leaf: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(leaf)


def jagged(leaf: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor(
        [row[: 1 + j % 2] for j, row in enumerate(leaf)], layout=torch.jagged
    )


def with_leaf(data, key: str, spoil: Callable[[torch.Tensor], Any]):
    """Replace an entry without reading the new one."""
    data = data.clone()
    data._tensordict[key] = spoil(data[key])
    return data


def text(data: TensorDictBase) -> NonTensorData:
    return NonTensorData("text", batch_size=data.batch_size)


NO_MEMORY = "RuntimeError|SchemaError: no memory|out of bounds for storage"
Spoil = Callable[[TensorDict], Any]
#: How rows can differ from those that are stored, for any batch size, and what the
# error says.
MISFITS: list[tuple[Spoil, str]] = [
    (lambda data: data.exclude("action"), r"SchemaError: key 'action' is missing, expected as int64 of shape \("),
    (lambda data: data.exclude("next"), r"SchemaError: key \('next', '\w+'\) is missing"),
    (lambda data: data.set("x", data["action"]),
     "SchemaError: unknown key 'x': the rows hold .*'action'.*exclude"),
    (lambda data: data.set(("next", "index"), data["action"]), r"SchemaError: unknown key \('next', 'index'\)"),
    (lambda data: data.set("action", data["action"].double()), r"SchemaError: 'action' came as float64 .*expected int64"
     r" of shape \(.*\): cast it with \.to\(torch\.int64\)"),
    (lambda data: data.set("action", data["action"][..., None]), "SchemaError: 'action' came as int64 .*: reshape"),
    (lambda data: data.set("observation", data["observation"].to("meta")), "SchemaError: 'observation'.*meta"),
    (lambda data: data.set("next", data["action"]), "SchemaError: unknown key 'next'"),
    (lambda data: data.set("action", TensorDict({"z": data["action"]}, data.shape)),
     r"SchemaError: unknown key \('action', 'z'\)"),
    (lambda data: data.set("void", TensorDict({}, data.shape)), r"SchemaError: nesting of \[.*'void'\] differs"),
    (lambda data: data.set("observation", data["observation"].to_sparse()), "SchemaError: a nested, sparse or"),
    (lambda data: data.set("action", text(data)), "SchemaError: key 'action' holds non-tensor data"),
    (lambda data: with_leaf(data, "observation", freed), NO_MEMORY),
    (lambda data: with_leaf(data, "observation", shrunk), NO_MEMORY),
    (lambda data: with_leaf(data, "observation", fake), NO_MEMORY),
    (lambda data: data.to_dict(), "TypeError: TensorDict.*, got "),
    (lambda data: data["action"], "SchemaError: cannot write Tensor: the rows of this storage are read as TensorDict"),
    (lambda data: None, "TypeError: TensorDict.*, got "),
]  # fmt: skip
#: Those of several rows.
RAGGED: list[tuple[Spoil, str]] = [
    (lambda data: with_leaf(data, "observation", jagged), "SchemaError: 'observation' is a nested, sparse or q"),
    (lambda data: with_leaf(data, "observation", nested), "SchemaError|ValueError: nested"),
    (lambda data: with_leaf(data, "observation", freed_behind_an_offset), NO_MEMORY),
    (lambda data: lazy_stack([*data[:3], data[3].exclude(("next", "done"))]), r"SchemaError: 'done'\) is ragged"),
    (lambda data: data[:0], "SchemaError|ValueError: at least one transition, got none|cannot fill"),
    (lambda data: [], "TypeError|ValueError: at least one transition|stores TensorDicts"),
    (lambda data: [{"x": zeros(3)}] * 2, r"TypeError: wrap each step, \[TensorDict\(step\)|stores TensorDicts"),
    (lambda data: (zeros(2), zeros(2)), "TypeError: takes a TensorDict|stores TensorDicts"),
]  # fmt: skip


def each(call: Callable[[Any, Any], Any], *cases: tuple[Any, str]) -> list[Row]:
    """Return a row for each input of a call."""
    return [(lambda made, it=it: call(made, it), said) for it, said in cases]


def everywhere(said: str, *calls: Callable[[Any], Any]) -> list[Row]:
    """Return a row for each call that refuses something with the same words."""
    return [(call, said) for call in calls]


def misfits(
    call: Callable[[Any, Any], Any], data: Callable[[], Any], *more: list[Any]
) -> list[Row]:
    """Return rows that give a call all data that do not fit."""
    return each(lambda made, spoil: call(made, spoil(data())), *sum(more, [*MISFITS]))


def sampling(name: str, *cases: tuple[Callable[[], Any], str]) -> Table:
    """Return a table of buffers that refuse to sample after random numbers were
    drawn."""
    return {
        (f"{name}, drawn", make): [(lambda rb: rb.sample(), said)]
        for make, said in cases
    }


def nothing() -> None:
    return None


def storage(**options):
    """Return a storage with 6 of 10 rows."""
    made = td.PackedStorage(10, **options)
    made.set(range(6), steps(6))
    return made


def no_rows():
    return td.PackedStorage(10)


def fresh(**options):
    """Return a buffer without rows."""
    return td.ReplayBuffer(
        **{"storage": td.PackedStorage(30), "batch_size": 4} | options
    )


def buffer(sampler=None, *, cls=fresh, **options):
    """Return a buffer with 20 of 30 rows, in use: its calls are compiled, if they can
    be. Its ``batch`` has errors."""
    rb = cls(sampler=sampler, **options)
    for first in (0, 10):
        rb.extend(steps(10, first=first))
        rb.batch = rb.sample()
    rb.batch["td_error"] = ones(rb.batch.shape)
    return rb


def prioritized():
    return buffer(td.ProportionalSampler(30))


def ranked():
    return buffer(td.RankSampler(30))


def update(**entries) -> Callable[[Any], Any]:
    """Return a call that updates the priorities of a batch with other entries; without
    those that are None."""
    return lambda rb: rb.update_tensordict_priority(other_batch(rb, entries))


def write_back(keys, **entries) -> Callable[[Any], Any]:
    """Return a call that writes back a batch with other entries; without those that are
    None."""
    return lambda rb: rb.write_back(other_batch(rb, entries), keys)


def other_batch(rb, entries: dict[str, Any]) -> TensorDictBase:
    removed = [name for name, value in entries.items() if value is None]
    changed = {name: value for name, value in entries.items() if value is not None}
    return rb.batch.clone().update(changed).exclude(*removed)


def filled(sampler=None, rows=None, **options):
    """Return a buffer with 20 of 30 rows, that was never sampled."""
    rb = fresh(sampler=sampler, **options)
    rb.extend(steps(20) if rows is None else rows)
    return rb


def index_of(storage):
    return td.TrajectoryIndex(storage)


def tensors():
    made = LazyTensorStorage(5)
    made.set(range(2), zeros(2, 3))
    return made


def n_step(inner=None):
    return td.NStepSampler(inner or td.UniformSampler(), 3, 0.9)


def hindsight(inner=None, fn=reward_fn, **options):
    return td.HindsightSampler(inner or td.UniformSampler(), fn, **options)


def sequence(inner=None, *, length=3, **options):
    return td.SequenceSampler(inner or td.UniformSampler(), length, **options)


def windows(inner, batch_size: int = 8, **options):
    return buffer(sequence(inner, **options), batch_size=batch_size)


def entry(key, value) -> TensorDict:
    return steps(20).set(key, value)


def theirs(sampler, rows, storage=None):
    rb = TensorDictReplayBuffer(
        storage=td.PackedStorage(30) if storage is None else storage,
        sampler=sampler,
        batch_size=6,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows of several steps
        rb.extend(rows)
    return rb


def loads(source: Callable[[], Any], **how) -> Callable[[Any], Any]:
    """Return a call that loads a dump of another object."""

    def call(made) -> None:
        with TemporaryDirectory() as folder:
            with torch.random.fork_rng():
                source().dumps(folder)
            made.loads(folder, **how)

    return call


def dumps(made) -> None:
    with TemporaryDirectory() as folder:
        try:
            made.dumps(folder)
        finally:
            assert not [*Path(folder).glob("data/*")]


ENDS = ("next", "done"), ("next", "terminated")


def emptied():
    rb = prioritized()
    rb.empty()
    return rb


def quietly(make: Callable[[], Any]):
    """Make an object without a trace in the generator."""
    with torch.random.fork_rng():
        return make()


def of_numbers():
    rb = TorchRLBuffer(storage=ListStorage(5))
    rb.extend([1, 2])
    return rb


REWARD = ("next", "reward")
MISSHAPEN = "shape|size|Failed to update"


def rolled(*size: int, value: int = 1, **entries) -> TensorDict:
    """Return steps with values."""
    return steps(*size, state_value=zeros(*size, value), **entries)


def critic(key: str = "state_value", *, fails: bool = False):
    def value(observation: torch.Tensor) -> torch.Tensor:
        if fails:
            raise RuntimeError("the network failed")
        return observation[..., :1]

    return TensorDictModule(value, in_keys=["observation"], out_keys=[key])


def rollout(written: int, length: int = 8, lanes: int = 3, **options):
    """Return a rollout of ``length`` steps, of which some are written."""
    rb = td.RolloutBuffer(
        length, lanes, **{"batch_size": 6, "value_network": critic()} | options
    )
    if written:
        rb.extend(rolled(lanes, written))
    if written == length:
        rb.summary()  # the first read, which computes the estimates
    return rb


def without(*keys):
    return steps(9).exclude(*keys)
