"""The kinds of transition that every part of the package must carry, and samplers: one
catalogue for all tests.

``SAMPLERS`` maps a name to what makes a sampler for a number of rows, ``LAWS`` to how
likely it draws each row. ``SCHEMAS`` maps a name to a :class:`Schema`;
``transitions(schema, n, lanes)`` makes random data of it;
``assert_same(left, right)`` compares two TensorDicts byte for byte. To run a test over
all of them::

    @pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor

from rlbuf_td import (
    EpisodeSampler,
    HindsightSampler,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from tests import model

Key = tuple[str, ...]
Fields = Mapping[str, Any]  # a leaf is (dtype, *shape), a node another mapping

_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *(
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
    ),
)
DTYPES = tuple(getattr(torch, name) for name in _NAMES if hasattr(torch, name))


@dataclass(frozen=True, eq=False)
class Schema:
    """What a transition holds."""

    name: str  # for test ids
    fields: Fields  # the leaves of one transition, nested as they are
    # batch dims of the TensorDict behind those that index transitions
    element: tuple[int, ...] = ()
    # more of the nested TensorDict at a key
    node_dims: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_SCHEMAS = (
    Schema(
        "vector",
        {
            "observation": (torch.float32, 3),
            "action": (torch.float32, 2),
            "done": (torch.bool, 1),
        },
    ),
    Schema(
        "halfcheetah",
        {
            "observation": (torch.float32, 17),
            "action": (torch.float32, 6),
            "next": {
                "observation": (torch.float32, 17),
                "reward": (torch.float32, 1),
                "done": (torch.bool, 1),
                "terminated": (torch.bool, 1),
                "truncated": (torch.bool, 1),
            },
        },
    ),
    Schema(
        "nested",
        {
            "first": (torch.float32, 2),
            "next": {
                "done": (torch.bool, 1),
                "deep": {"er": {"x": (torch.int64, 2)}},
                "y": (torch.float32,),
            },
            "last": (torch.float32, 2),
        },
    ),
    Schema("dtypes", {_dtype_name(dtype): (dtype, 3) for dtype in DTYPES}),
    Schema(
        "scalars",
        {"reward": (torch.float32,), "step": (torch.int64,), "done": (torch.bool,)},
    ),
    Schema("single byte", {"done": (torch.bool,)}),
    Schema("complex", {"wave": (torch.complex128, 2), "flag": (torch.bool,)}),
    Schema(
        "image",
        {
            "pixels": (torch.uint8, 4, 12, 12),
            "action": (torch.int64,),
            "reward": (torch.float32, 1),
        },
    ),
    Schema(
        "many leaves",
        {f"leaf {j}": (DTYPES[j % len(DTYPES)], 1 + j % 3) for j in range(60)},
    ),
    Schema(
        "no columns", {"observation": (torch.float32, 3), "nothing": (torch.float32, 0)}
    ),
    Schema(
        "no bytes",
        {"nothing": (torch.float32, 0), "next": {"nothing": (torch.float32, 0)}},
    ),
    Schema(
        "empty nodes",
        {
            "x": (torch.float32, 2),
            "void": {},
            "next": {"void": {"void": {}}, "y": (torch.int32,)},
        },
    ),
    Schema(
        "element dims",
        {"x": (torch.float32, 2), "next": {"done": (torch.bool,)}},
        element=(3, 2),
    ),
    Schema(
        "agents",
        {
            "state": (torch.float32, 4),
            "agents": {"observation": (torch.float32, 2), "action": (torch.int64,)},
        },
        node_dims={("agents",): (3,)},
    ),
)
SCHEMAS: dict[str, Schema] = {schema.name: schema for schema in _SCHEMAS}


def buffer_of(
    steps: int,
    sampler: Any,
    lanes: int = 0,
    storage: Any = PackedStorage,
    cls: Any = ReplayBuffer,
    *,
    rows: TensorDictBase | None = None,
    **parts: Any,
) -> Any:
    """Return a buffer of some time steps, which draws from a generator of its own, with
    ``rows``."""
    place = storage(steps * max(lanes, 1), ndim=2 if lanes else 1)
    generator = torch.Generator().manual_seed(parts.pop("seed", 0))
    rb = cls(storage=place, sampler=sampler, generator=generator, **parts)
    if rows is not None:
        rb.extend(rows)
    return rb


def reward_fn(batch: TensorDictBase) -> torch.Tensor:
    return -(batch["next", "achieved_goal"] - batch["desired_goal"]).abs().sum(-1)


def _windows(rows: int) -> SequenceSampler:
    inner = NStepSampler(HindsightSampler(ProportionalSampler(rows), reward_fn), 2, 0.9)
    return SequenceSampler(inner, 3, burn_in=1, boundary="shift", priority="mix")


def _steps_of_episodes(rows: int) -> EpisodeSampler:
    """Return a sampler of episodes whose batches have one row per episode, as those of
    other samplers."""
    return EpisodeSampler(None, 1, finished_only=False, layout="concatenated")


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "uniform": lambda rows: UniformSampler(),
    "unique": lambda rows: UniformSampler(unique=True),
    "minibatch": lambda rows: MinibatchSampler(2),
    "recency": lambda rows: RecencySampler(half_life=5.0, window=17),
    "proportional": ProportionalSampler,
    "independent": partial(ProportionalSampler, stratified=False, weight_norm="batch"),
    "no norm": partial(ProportionalSampler, weight_norm=None),
    "floored": partial(ProportionalSampler, min_priority=1.0),
    "young": lambda rows: UniformSampler(max_age=11),
    "rank": RankSampler,
    "rank, independent": partial(RankSampler, stratified=False, weight_norm="batch"),
    "hindsight": lambda rows: HindsightSampler(ProportionalSampler(rows), reward_fn),
    "n-step": lambda rows: NStepSampler(ProportionalSampler(rows), 3, 0.9),
    "n-step over hindsight": lambda rows: NStepSampler(
        HindsightSampler(RankSampler(rows), reward_fn), 3, 0.9
    ),
    "sequence": lambda rows: SequenceSampler(ProportionalSampler(rows), 3, burn_in=1),
    "chunks": lambda rows: SequenceSampler(MinibatchSampler(2), 3, burn_in=1, stride=3),
    "strict": lambda rows: SequenceSampler(UniformSampler(), 4, boundary="strict"),
    "windows": _windows,
    "steps of episodes": _steps_of_episodes,
}
#: Each row's probability, in a model of the buffer.
# ``tests/test_composition.py`` compares the draws of these samplers with it, alone and
# within every wrapper.
LAWS: dict[str, Callable[[model.Model], list[float]]] = {
    "uniform": model.uniform,
    "young": lambda rows: model.uniform(rows, 11),
    "recency": lambda rows: model.recency(rows, 5.0, 17),
}


def transitions(
    schema: Schema,
    n: int | None,
    lanes: Sequence[int] = (),
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> TensorDict:
    """Return random transitions ``[n, *lanes, *element]``, or one time step
    ``[*lanes, *element]`` for ``n=None``.

    Integers are of their dtype's whole range, floats finite; the same arguments give
    the same data.
    """
    generator = torch.Generator().manual_seed(seed)
    lead = (*(() if n is None else (n,)), *lanes, *schema.element)
    return _node(schema, schema.fields, (), lead, generator).to(device)


def _node(
    schema: Schema,
    fields: Fields,
    path: Key,
    lead: tuple[int, ...],
    generator: torch.Generator,
) -> TensorDict:
    lead = (*lead, *schema.node_dims.get(path, ()))
    data = TensorDict({}, batch_size=lead)
    for name, kind in fields.items():
        if isinstance(kind, Mapping):
            data[name] = _node(schema, kind, (*path, name), lead, generator)
        else:
            data[name] = random_leaf((*lead, *kind[1:]), kind[0], generator)
    return data


def random_leaf(
    shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Return random values: of the dtype's whole range where it is an integer, normal
    where it is not."""
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, dtype=wide, generator=generator).to(dtype)
    raw = torch.randint(
        256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator
    )
    return raw.view(dtype).squeeze(-1)


def as_bytes(leaf: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a leaf, ``[*shape, itemsize]``, so that NaN equals itself and
    -0.0 is not 0.0."""
    return leaf.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8)


def assert_same(left: Any, right: Any) -> None:
    """Compare two TensorDicts (or leaves) in keys, nesting, batch sizes, dtypes, shapes
    and, byte for byte, values."""
    assert isinstance(left, TensorDictBase) == isinstance(right, TensorDictBase)
    if not isinstance(left, TensorDictBase):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert torch.equal(as_bytes(left), as_bytes(right))
        return
    assert left.batch_size == right.batch_size
    assert set(left.keys()) == set(right.keys())
    for key in left.keys():
        assert_same(left.get(key), right.get(key))


def copied(data: TensorDictBase) -> TensorDictBase:
    """Return a copy of any dtype: ``TensorDict.clone`` adds 0, which torch cannot do
    for all of them."""
    return data.apply(torch.clone, filter_empty=False)


def numbered_rows(
    n: int, first: int = 0, lanes: int = 0, *, every: int = 7
) -> TensorDict:
    """Return rows ``[n]`` or ``[lanes, n]`` that know their number, with goals, in
    trajectories of ``every`` rows; the rows of lane i are 1,000 i further."""
    step = torch.arange(first, first + n)
    x = step + 1_000 * torch.arange(lanes)[:, None] if lanes else step
    number = x[..., None].float()
    done = (step % every == every - 1).expand(x.shape)[..., None].clone()
    after = {
        "reward": number,
        "done": done,
        "achieved_goal": number.clone(),
        "terminated": done.clone(),
        "truncated": torch.zeros_like(done),
    }
    return TensorDict({"x": x, "desired_goal": -number, "next": after}, x.shape)


# -- a small world in which everything about a rollout is known


class AskedNetwork(torch.nn.Module):
    """V(s) = 2 s[0] - s[1] + 1, and a record of the observations that it was asked
    for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
        self.asked: list[Tensor] = []
        self.fails = False

    def forward(self, observation: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("the network failed")
        self.asked.append(observation.clone())
        return (observation * self.scale).sum(-1, keepdim=True) + 1


@dataclass
class RandomWalk:
    """Lanes of a random walk with ends of every kind; ``steps(n)`` continues it, as a
    collector would, ``[E, n]``."""

    lanes: int
    network: AskedNetwork
    generator: torch.Generator
    observation: Tensor
    trajectory: Tensor

    def value(self, observation: Tensor) -> Tensor:
        return (observation * torch.tensor([2.0, -1.0])).sum(-1, keepdim=True) + 1

    def module(self) -> TensorDictModule:
        return TensorDictModule(
            self.network, in_keys=["observation"], out_keys=["state_value"]
        )

    def steps(
        self, n: int, p: float = 0.15, *, values: bool = True, **ends: Any
    ) -> TensorDict:
        """``[E, n]`` steps; ``terminated`` and ``truncated`` may be given, bool
        ``[E, n]``."""
        g = self.generator
        ended = torch.rand(self.lanes, n, generator=g) < p
        coin = torch.rand(self.lanes, n, generator=g) < 0.5
        terminated = ends.get("terminated", ended & coin)
        truncated = ends.get("truncated", ended & ~coin)
        rows = []
        for t in range(n):
            following = self.observation + torch.randn(self.lanes, 2, generator=g)
            flags = {
                "terminated": terminated[:, t, None],
                "truncated": truncated[:, t, None],
            }
            done = flags["terminated"] | flags["truncated"]
            after = {
                "observation": following,
                "reward": torch.randn(self.lanes, 1, generator=g),
                "done": done,
                **flags,
            }
            row = {
                "observation": self.observation,
                "next": after,
                "collector": {"traj_ids": self.trajectory.clone()},
            }
            if values:
                row["state_value"] = self.value(self.observation)
            rows.append(TensorDict(row, [self.lanes]))
            fresh = torch.randn(self.lanes, 2, generator=g)
            self.observation = torch.where(done, fresh, following)
            self.trajectory = torch.where(
                done[:, 0], self.trajectory + self.lanes, self.trajectory
            )
        return torch.stack(rows, 1)

    def estimates(
        self, data: TensorDict, gamma: float = 0.9, lmbda: float = 0.8
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and value targets by the definition (Schulman et al.,
        2016, equation 16), with the values of all true next observations,
        ``[E, n, 1]``."""
        after = data["next"]
        value, following = (
            self.value(rows["observation"]).double() for rows in (data, after)
        )
        steps = value, following, after["reward"], after["terminated"], ~after["done"]
        lanes = [
            model.gae(
                *(entry[lane, :, 0].tolist() for entry in steps),
                gamma=gamma,
                lmbda=lmbda,
            )
            for lane in range(self.lanes)
        ]
        advantage = torch.tensor(lanes, dtype=torch.float64).unsqueeze(-1)
        return advantage.float(), (advantage + value).float()

    def rows_to_ask(self, data: TensorDict) -> int:
        after = data["next"]
        breaks = after["truncated"].clone()
        breaks[:, -1] = ~after["terminated"][:, -1]
        return int(breaks.sum())


def make_world(lanes: int = 3, seed: int = 0) -> RandomWalk:
    g = torch.Generator().manual_seed(seed)
    return RandomWalk(
        lanes,
        AskedNetwork(),
        g,
        torch.randn(lanes, 2, generator=g),
        torch.arange(lanes),
    )
