"""Wrong data, and makers of the objects that must refuse it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModule
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from torchrl.data import ReplayBuffer as TorchRLBuffer
from torchrl.envs import ObservationNorm

import rlbuf_td
import rlbuf_td.functional
from rlbuf_td import SchemaError
from tests.catalogue import reward_fn

Row = tuple[Callable[[Any], Any], Any, str]  # a call, the error, a word of its message
Table = dict[tuple[str, Callable[[], Any]], list[Row]]  # by name and maker
td: Any = rlbuf_td  # mypy does not check the arguments: they are wrong on purpose
F: Any = rlbuf_td.functional
zeros, ones, full, tensor, nan = torch.zeros, torch.ones, torch.full, torch.tensor, float("nan")


def steps(*size: int, first: int = 0, **entries: Any) -> TensorDict:
    """Return transitions, numbered along the last dim; no trajectory ends."""
    number = torch.arange(first, first + size[-1]).expand(size).clone() if size else tensor(first)
    observation = number[..., None].float().expand(*size, 3).clone()
    after = {"observation": observation + 1, "reward": number[..., None].float()}
    after |= {name: zeros(*size, 1, dtype=torch.bool) for name in ("done", "terminated")}
    return TensorDict({"observation": observation, "action": number, "next": after} | entries, size)


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
    return torch.nested.nested_tensor([row[: 1 + j % 2] for j, row in enumerate(leaf)], layout=torch.jagged)


def with_leaf(data: Any, key: str, spoil: Callable[[torch.Tensor], Any]) -> Any:
    """Replace an entry without reading the new one."""
    data = data.clone()
    data._tensordict[key] = spoil(data[key])
    return data


def text(data: TensorDictBase) -> NonTensorData:
    return NonTensorData("text", batch_size=data.batch_size)


NO_MEMORY = "no memory|out of bounds for storage"
#: How rows can differ from those that are stored, for any batch size, and what the error says.
MISFITS: list[tuple[Callable[[TensorDict], Any], Any, str]] = [
    (lambda data: data.exclude("action"), SchemaError, r"key 'action' is missing, expected as int64 of shape \("),
    (lambda data: data.exclude("next"), SchemaError, r"key \('next', '\w+'\) is missing"),
    (lambda data: data.exclude(("next", "done")), SchemaError, r"key \('next', 'done'\) is missing"),
    (lambda data: data.set("x", data["action"]), SchemaError, "unknown key 'x': the rows hold .*'action'.*exclude"),
    (lambda data: data.set(("next", "index"), data["action"]), SchemaError, r"unknown key \('next', 'index'\)"),
    (lambda data: data.set("action", data["action"].double()), SchemaError, r"'action' came as float64 .*expected int64"
     r" of shape \(.*\): cast it with \.to\(torch\.int64\)"),
    (lambda data: data.set("action", data["action"][..., None]), SchemaError, "'action' came as int64 .*: reshape"),
    (lambda data: data.set("observation", data["observation"].to("meta")), SchemaError, "'observation'.*meta"),
    (lambda data: data.set("next", data["action"]), SchemaError, r"unknown key 'next'"),
    (lambda data: data.set("action", TensorDict({"z": data["action"]}, data.shape)), SchemaError,
     r"unknown key \('action', 'z'\)"),
    (lambda data: data.set("void", TensorDict({}, data.shape)), SchemaError, r"nesting of \[.*'void'\] differs"),
    (lambda data: data.set("observation", data["observation"].to_sparse()), SchemaError, "a nested, sparse or"),
    (lambda data: data.set("action", text(data)), SchemaError, "key 'action' holds non-tensor data"),
    (lambda data: with_leaf(data, "observation", freed), (ValueError, RuntimeError), NO_MEMORY),
    (lambda data: with_leaf(data, "observation", shrunk), (ValueError, RuntimeError), NO_MEMORY),
    (lambda data: with_leaf(data, "observation", fake), ValueError, "no memory"),
    (lambda data: data.to_dict(), TypeError, r"TensorDict.*, got "),
    (lambda data: data["action"], SchemaError, "cannot write Tensor: the rows of this storage are read as TensorDict"),
    (lambda data: None, TypeError, r"TensorDict.*, got "),
]  # fmt: skip
#: Those of several rows.
RAGGED: list[tuple[Callable[[TensorDict], Any], Any, str]] = [
    (lambda data: with_leaf(data, "observation", jagged), SchemaError, "'observation' is a nested, sparse or q"),
    (lambda data: with_leaf(data, "observation", nested), (SchemaError, ValueError), "nested"),
    (lambda data: with_leaf(data, "observation", freed_behind_an_offset), ValueError, "no memory"),
    (lambda data: lazy_stack([*data[:3], data[3].exclude(("next", "done"))]), SchemaError, r"'done'\) is ragged"),
    (lambda data: data[:0], ValueError, "at least one transition, got none|cannot fill"),
    (lambda data: [], (TypeError, ValueError), "at least one transition|stores TensorDicts"),
    (lambda data: [{"x": zeros(3)}] * 2, TypeError, r"wrap each step, \[TensorDict\(step\)|stores TensorDicts"),
    (lambda data: (zeros(2), zeros(2)), TypeError, "takes a TensorDict|stores TensorDicts"),
]  # fmt: skip
#: What no row can hold, with the storage that can.
UNPACKABLE: list[tuple[Any, str]] = [
    (lambda: TensorDict({"n": {}}, [3]), "contains no tensor"),
    (lambda: steps(3, s=NonTensorStack("a", "b", "c")), r"'s' .*torchrl\.data\.ListStorage, which takes it"),
    (lambda: steps(3, s=ones(3, 2).to_sparse()), r"'s' .*torchrl\.data\.ListStorage, which takes it"),
    (lambda: with_leaf(steps(3), "observation", jagged), r"'observation' .*data\.ListStorage, which takes it"),
    (lambda: lazy_stack([TensorDict({"x": ones(j)}) for j in (1, 2, 3)]), r"'x' .*\.LazyStackStorage, which takes it"),
]  # fmt: skip


def misfits(call: Callable[[Any, Any], Any], data: Callable[[], Any], *more: list[Any]) -> list[Any]:
    """Return rows that give a call all data that do not fit."""
    return [
        (lambda made, spoil=spoil: call(made, spoil(data())), error, word)
        for spoil, error, word in sum(more, [*MISFITS])
    ]


def nothing() -> None:
    return None


def storage(**options: Any) -> Any:
    """Return a storage with 6 of 10 rows."""
    made = td.PackedStorage(10, **options)
    made.set(range(6), steps(6))
    return made


def storage_of_lanes() -> Any:
    """Return a storage [5, 2] with 3 time steps."""
    made = td.PackedStorage(10, ndim=2)
    made.set(range(3), steps(2, 3).transpose(0, 1))
    return made


def no_rows() -> Any:
    return td.PackedStorage(10)


def fresh(**options: Any) -> Any:
    """Return a buffer without rows."""
    return td.ReplayBuffer(**{"storage": td.PackedStorage(30), "batch_size": 4} | options)


def buffer(sampler: Any = None, *, cls: Any = fresh, **options: Any) -> Any:
    """Return a buffer with 20 of 30 rows, in use: its calls are compiled, if they can be. Its ``batch`` has errors."""
    rb = cls(sampler=sampler, **options)
    for first in (0, 10):
        rb.extend(steps(10, first=first))
        rb.batch = rb.sample()
    rb.batch["td_error"] = ones(rb.batch.shape)
    return rb


def prioritized() -> Any:
    return buffer(td.ProportionalSampler(30))


def ranked() -> Any:
    return buffer(td.RankSampler(30))


def update(**entries: Any) -> Callable[[Any], Any]:
    """Return a call that updates the priorities of a batch with other entries; without those that are None."""
    removed = [name for name, value in entries.items() if value is None]
    changed = {name: value for name, value in entries.items() if value is not None}
    return lambda rb: rb.update_tensordict_priority(rb.batch.clone().update(changed).exclude(*removed))


def write_back(keys: Any, **entries: Any) -> Callable[[Any], Any]:
    """Return a call that writes back a batch with other entries; without those that are None."""
    removed = [name for name, value in entries.items() if value is None]
    changed = {name: value for name, value in entries.items() if value is not None}
    return lambda rb: rb.write_back(rb.batch.clone().update(changed).exclude(*removed), keys)


def filled(sampler: Any = None, rows: Any = None, **options: Any) -> Any:
    """Return a buffer with 20 of 30 rows, that was never sampled."""
    rb = fresh(sampler=sampler, **options)
    rb.extend(steps(20) if rows is None else rows)
    return rb


def weightless() -> Any:
    rb = buffer(td.ProportionalSampler(30, alpha=1.0, eps=0.0))
    rb.update_priority(torch.arange(20), zeros(20))
    return rb


def index_of(storage: Any) -> Any:
    return td.TrajectoryIndex.of(storage)


def indexed() -> Any:
    rb = buffer()
    index_of(rb.storage).length(tensor([0]))
    return rb


def ended(entries: dict[str, Any]) -> None:
    rb = fresh()
    for _ in range(2):
        rb.extend(TensorDict(entries, [2]))
    index_of(rb.storage).ended(tensor([0]))


def tensors() -> Any:
    made = LazyTensorStorage(5)
    made.set(range(2), zeros(2, 3))
    return made


def listed() -> Any:
    made = ListStorage(5)
    made.set([0, 1], [1, 2])
    return made


def state_of_index(capacity: int) -> Any:
    made = td.PackedStorage(capacity)
    made.set(range(4), steps(4))
    index_of(made).length(tensor([0]))
    return index_of(made).state_dict()


def estimates(length: int = 9) -> dict[str, Any]:
    """Return the arguments of all estimates, [2, T, 1]."""
    made = {name: zeros(2, length, 1) for name in ("state_value", "next_state_value", "reward")}
    return made | {name: zeros(2, length, 1).bool() for name in ("done", "terminated")}


def gae(gamma: Any, lmbda: Any, **inputs: Any) -> Any:
    return F.generalized_advantage_estimate(gamma, lmbda, **(estimates() | inputs))


FUNCTIONS: list[Any] = [
    lambda **inputs: F.generalized_advantage_estimate(0.9, 0.8, **inputs),
    lambda state_value, **inputs: F.td_lambda_return_estimate(0.9, 0.8, **inputs),
    lambda state_value, **inputs: F.td1_return_estimate(0.9, **inputs),
    lambda **inputs: F.vtrace_advantage_estimate(0.9, inputs["reward"], inputs["reward"], **inputs),
]


class Fixed(td.RowSampler):
    """Draws given rows."""

    report_keys = frozenset({"mark"})
    state_keys = ("rows",)

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def draw(self, storage: Any, batch_size: int) -> Any:
        return self.rows, {}


def hindsight(inner: Any = None, fn: Any = reward_fn, **options: Any) -> Any:
    return td.HindsightSampler(inner or td.UniformSampler(), fn, **options)


def n_step(inner: Any = None) -> Any:
    return td.NStepSampler(inner or td.UniformSampler(), 3, 0.9)


def sequence(inner: Any = None, *, length: Any = 3, **options: Any) -> Any:
    return td.SequenceSampler(inner or td.UniformSampler(), length, **options)


def windows(inner: Any, batch_size: int = 8, **options: Any) -> Any:
    return buffer(sequence(inner, **options), batch_size=batch_size)


def entry(key: Any, value: Any) -> TensorDict:
    return steps(20).set(key, value)


def episodes() -> TensorDict:
    """Return 20 steps of two episodes."""
    return entry(("next", "done"), (torch.arange(20) % 10 == 9)[:, None])


def goals(changes: dict[Any, Any], fn: Any = reward_fn, **options: Any) -> Any:
    """Return a buffer that relabels goals of rows with other entries; without those that are None."""
    rows = steps(20, desired_goal=full((20, 2), 9.0))
    rows["next"].update({"achieved_goal": zeros(20, 2), "desired_goal": full((20, 2), 9.0)})
    rows = rows.exclude(*(key for key, value in changes.items() if value is None))
    for key, value in changes.items():
        if value is not None:
            rows[key] = value
    return filled(hindsight(fn=fn, her_ratio=1.0, **options), rows)


def theirs(sampler: Any, rows: Any, storage: Any = None) -> Any:
    rb = TensorDictReplayBuffer(storage=storage or td.PackedStorage(30), sampler=sampler, batch_size=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows of several steps
        rb.extend(rows)
    return rb


def with_mask() -> Any:
    made = td.PackedStorage(30)
    made.set(range(4), steps(4, mask=zeros(4)))
    return made


def loads(source: Callable[[], Any], **how: Any) -> Callable[[Any], Any]:
    """Return a call that loads a dump of another object."""

    def call(made: Any) -> None:
        with TemporaryDirectory() as folder:
            with torch.random.fork_rng():
                source().dumps(folder)
            made.loads(folder, **how)

    return call


def dumps(made: Any) -> None:
    with TemporaryDirectory() as folder:
        try:
            made.dumps(folder)
        finally:
            assert not [*Path(folder).glob("data/*")]


ENDS = ("next", "done"), ("next", "terminated")
IN_TIME_ORDER: list[Callable[[], Any]] = [
    *(lambda: td.RecencySampler(2.0), lambda: td.FreshRowsSampler(td.UniformSampler())), n_step, sequence, hindsight
]  # fmt: skip
REPORTS: dict[str, Callable[[], Any]] = {
    "mask": sequence,
    "burn_in_mask": lambda: sequence(burn_in=1),
    "anchor_index": sequence,
    "steps_to_next_obs": lambda: sequence(n_step()),
    "relabeled": hindsight,
    "priority_weight": lambda: td.ProportionalSampler(30),
    "sampled_at": lambda: n_step(td.RankSampler(30)),
}


def attached(writer: Any) -> Any:
    """Return a writer with 6 of 10 rows."""
    writer.register_storage(td.PackedStorage(10))
    writer.extend(steps(6))
    return writer


def reservoir(size: int = 30) -> Any:
    rb = fresh(storage=td.PackedStorage(size), writer=td.ReservoirWriter())
    rb.extend(steps(200))
    return rb


def rows_of_reservoir() -> Any:
    rb = fresh()
    loads(reservoir, rows_only=True)(rb)
    return rb


def emptied() -> Any:
    rb = prioritized()
    rb.empty()
    return rb


def stopped(rb: Any) -> Any:
    rb.shutdown()
    return rb


def of_lanes(size: int = 30) -> Any:
    """Return a buffer [T, E], with three lanes of 4 steps unless it is smaller."""
    rb = fresh(storage=td.PackedStorage(size, ndim=2), sampler=td.ProportionalSampler(size))
    if size == 30:
        rb.extend(steps(3, 4))
    return rb


def lane_buffer(**options: Any) -> Any:
    rb = fresh(storage=td.PackedStorage(36, ndim=2, lanes=3), **options)
    rb.storage.reserve(steps(3))
    return rb


def unlike(sampler: Any = None) -> Any:
    """Return a buffer with lanes of 1, 5 and 12 rows, in use."""
    rb = lane_buffer(sampler=sampler or td.ProportionalSampler(36))
    for lane, count in ((0, 1), (1, 5), (2, 30)):
        rb.extend(steps(count), lanes=lane)
    rb.batch = rb.sample().set("td_error", ones(4))
    index_of(rb.storage).length(tensor([0]))
    return rb


def moved_heads(storage: Any) -> Any:
    state = storage.state_dict()
    state["lane_heads"][1] += 1
    return state


def functionalized(work: Callable[[Any, torch.Tensor], object]) -> Callable[[Any], Any]:
    return lambda rb: torch.func.functionalize(lambda x: (work(rb, x), x)[1])(ones(4))


def in_fake_mode(rb: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: a fake tensor has no address
        with FakeTensorMode(allow_non_fake_inputs=True):
            rb.sample()


def changed_sampler(sampler: Any) -> Any:
    rb = buffer(device="cpu")
    rb.set_sampler(sampler)
    return rb


def quietly(make: Callable[[], Any]) -> Any:
    """Make an object without a trace in the generator."""
    with torch.random.fork_rng():
        return make()


def normalized() -> Any:
    return buffer(td.ProportionalSampler(30), transform=ObservationNorm(0.0, 1.0, ["observation"]))


def of_numbers() -> Any:
    rb = TorchRLBuffer(storage=ListStorage(5))
    rb.extend([1, 2])
    return rb


REWARD = ("next", "reward")
WIDER = TensorDict({"observation": ones(20, 3), "reward": ones(20, 7)}, [20])
MISSHAPEN, OUT_OF_ORDER = "shape|size|Failed to update", "needs rows in time order, and some were written elsewhere"
NOT_WRITTEN = "of lane [01] has not been written: it has [15] rows"
GOALS = steps(20, desired_goal=zeros(20, 2)).set(("next", "achieved_goal"), zeros(20, 2))


def rolled(*size: int, value: int = 1, **entries: Any) -> TensorDict:
    """Return steps with values."""
    return steps(*size, state_value=zeros(*size, value), **entries)


def critic(key: str = "state_value", *, fails: bool = False) -> Any:
    def value(observation: torch.Tensor) -> torch.Tensor:
        if fails:
            raise RuntimeError("the network failed")
        return observation[..., :1]

    return TensorDictModule(value, in_keys=["observation"], out_keys=[key])


def rollout(written: int, length: int = 8, lanes: int = 3, **options: Any) -> Any:
    """Return a rollout of ``length`` steps, of which some are written."""
    rb = td.RolloutBuffer(length, lanes, **{"batch_size": 6, "value_network": critic()} | options)
    if written:
        rb.extend(rolled(lanes, written))
    return rb


def tracked(size: int) -> Any:
    return filled(storage=td.PackedStorage(size), writer=td.RingWriter(track_generations=True))


def without(*keys: Any) -> Any:
    return steps(9).exclude(*keys)


def wider() -> TensorDict:
    return steps(3).set("observation", zeros(3, 4))


def holding_an_object() -> Any:
    rb = td.ReplayBuffer(storage=ListStorage(10), batch_size=2, collate_fn=lambda items: items)
    rb.add(TensorDict({"x": zeros(2)}))
    rb.storage._storage.append(object())
    return rb


def queue() -> Any:
    """Return a queue in which 5 rows wait."""
    rb = td.ExperienceQueue(storage=td.PackedStorage(16), batch_size=4, timeout=0.01)
    rb.extend(steps(5))
    return rb


def queue_parts(waiting: int) -> Any:
    writer = td.QueueWriter()
    rb = td.ReplayBuffer(storage=td.PackedStorage(2), sampler=td.QueueSampler(writer), writer=writer, batch_size=2)
    if waiting:
        rb.extend(steps(waiting))
    return rb


def mixture(a: Any = prioritized, b: Any = ranked, rows: Any = None) -> Any:
    """Return a mixture, and write rows to the member that is new. Its ``batch`` has errors."""
    members = {"a": a(), "b": b()}
    mixed = td.ReplayBufferMixture(
        members, {"a": 0.5, "b": 0.5}, batch_size=4, generator=torch.Generator().manual_seed(0)
    )
    if rows is not None:
        members["a" if a is fresh else "b"].extend(rows)
    with suppress(Exception):
        mixed.batch = mixed.sample().set("td_error", ones(4))
    return mixed


def spoiled(mixed: Any, part: str) -> Any:
    """Return a state whose last member has a wrong part."""
    state = mixed.state_dict()
    state["members"]["b"][part] = {"bad": 1}
    return state | {"shares": {"a": 0.9, "b": 0.1}}


def quiet(rb: Any, rows: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows of several steps
        rb.extend(rows)
    return rb


ROWS_OF_X = TensorDict({"x": zeros(3)}, [3])
GOOD = zeros(2, 4, 1)
BAD = zeros(2, 4, 1).index_put_(tuple(tensor([[1, 2, 0], [1, 3, 0]]).T), tensor(nan))
