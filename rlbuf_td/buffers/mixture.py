"""Several replay buffers as one: each batch has a share of rows from each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from rlbuf_td.buffers.mixture_plan import MixturePlan, make_mixture_plan
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.buffers.shares import Shares
from rlbuf_td.checkpoint import load_state, save_state
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.samplers.common import OwnSignature, refuse_errors
from rlbuf_td.storages import SchemaError
from rlbuf_td.storages.indexing import flat_rows
from rlbuf_td.storages.schema import kind, show_key
from rlbuf_td.storages.tensordict_fast import set_entries_
from rlbuf_td.storages.trajectory_index import as_tuple
from rlbuf_td.storages.write_clock import SAMPLED_AT

_FOLDER = "mixture"  # of a dump, for what is not a member's


class ReplayBufferMixture:
    r"""Several replay buffers as one: demonstrations and online data, half and half (RLPD), or several tasks.

    A batch has rows of each member, one member's after the other's, and says which in ``"source"``, ``[B]`` int64: the
    member's place in :attr:`names`. With ``exact`` shares a member has :math:`\lfloor B s \rfloor` or
    :math:`\lceil B s \rceil` rows, at random with the mean :math:`B s`; otherwise the member of each row is drawn.

    **Importance weights.** Within a member rows count alike, whatever its sampler prefers, and members by their
    shares: a row of a prioritized member weighs :math:`(N P)^{-\beta}`, with its own N, P and beta, a row of another
    member 1, all divided by the largest weight that a member can give (with ``weight_norm="batch"``, has given).

    Args:
        members: :class:`ReplayBuffer` by name. They hold the same keys, dtypes and shapes, keep their samplers,
            transforms and devices, and can be used on their own. ``[T]`` and ``[T, E]`` can be mixed.
        shares: of each member, at least 0; scaled so that they add up to 1. Set one with ``mixture.sampler.name = x``,
            which scales the others, or by ``LinearScheduler(mixture.sampler, "name", ...)``.
        batch_size: B, for :meth:`sample`.
        exact: whether shares hold in every batch, or on average.
        writes_to: the member that :meth:`extend` and :meth:`add` write to if none is named, for trainers.
        generator: decides how many rows each member has; ``None``: torch's default.

    TorchRL's trainers take a mixture as their ``replay_buffer``. It is no subclass of TorchRL's ``ReplayBuffer``, whose
    methods work on one storage, sampler and writer: there are none here. TorchRL's ``ReplayBufferEnsemble`` draws
    members, gives a batch of stacked parts and refuses priorities.

    Raises:
        TypeError: a member is not a :class:`ReplayBuffer`.
        ValueError: members and shares differ in names, or shares are out of range.
        SchemaError: members hold different keys, dtypes or shapes: says which and how.
        RuntimeError: (when sampling) a member with a share has no rows, or there is no batch size.

    Cost: one compiled call per member for uniform and recency samplers over rows in RAM. Members with other samplers
    are sampled one after the other, and their batches are joined.

    Source: Ball, Smith, Kostrikov, Levine: Efficient Online Reinforcement Learning with Offline Data, ICML 2023.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> demos, online = (ReplayBuffer(storage=PackedStorage(100)) for _ in range(2))
        >>> shares = {"demos": 0.5, "online": 0.5}
        >>> mixture = ReplayBufferMixture({"demos": demos, "online": online}, shares, batch_size=4, writes_to="online")
        >>> _ = mixture.extend(TensorDict({"x": torch.zeros(3)}, [3]), "demos")
        >>> _ = mixture.extend(TensorDict({"x": torch.ones(3)}, [3]))
        >>> mixture.sample()["source"], mixture.sample()["x"]
        (tensor([0, 0, 1, 1]), tensor([0., 0., 1., 1.]))
    """

    __signature__ = OwnSignature()

    def __init__(
        self,
        members: Mapping[str, ReplayBuffer],
        shares: Mapping[str, float],
        *,
        batch_size: int | None = None,
        exact: bool = True,
        writes_to: str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        for name, member in members.items():
            if not isinstance(member, ReplayBuffer):
                remedy = "put its storage into a rlbuf_td.ReplayBuffer"
                raise TypeError(f"member {name!r} must be a ReplayBuffer, got {type(member).__name__}: {remedy}")
        if _FOLDER in members:
            raise ValueError(f"{_FOLDER!r} cannot be the name of a member: dumps use it")
        if not members or members.keys() != shares.keys() or (writes_to is not None and writes_to not in members):
            given = f"members are {[*members]}, shares are of {[*shares]}, writes_to={writes_to!r}"
            raise ValueError(f"members and shares must have the same names: {given}")
        self.members, self.sampler = dict(members), Shares({name: shares[name] for name in members})
        self.batch_size, self.exact, self.writes_to, self._rng = batch_size, bool(exact), writes_to, generator
        self._plan: MixturePlan | None = None
        self._checked: list[Any] = []
        self._refuse_other_schemas()

    # -- members

    @property
    def names(self) -> list[str]:
        """The names of the members, in the order of ``"source"``."""
        return [*self.members]

    @property
    def storage(self) -> Any:
        """The storage of the member that is written to, or of the first one."""
        return (self.members[self.writes_to] if self.writes_to else next(iter(self.members.values()))).storage

    def __getitem__(self, name: str) -> ReplayBuffer:
        """Return a member."""
        return self.members[name]

    def __len__(self) -> int:
        return sum(map(len, self.members.values()))

    def _refuse_other_schemas(self) -> None:
        """Compare the rows of members with those of the first, once for each."""
        rows = [getattr(member.storage, "rows", None) for member in self.members.values()]
        if len(rows) == len(self._checked) and all(map(lambda a, b: a is b, rows, self._checked)):
            return
        layouts = {
            name: {leaf.key: (leaf.dtype, leaf.shape) for leaf in member.storage.layout.leaves}
            for name, member in self.members.items()
            if getattr(member.storage, "layout", None) is not None
        }
        refuse_difference(layouts)
        self._checked, self._plan = rows, None

    # -- writes

    def _written(self, name: str | None) -> ReplayBuffer:
        name = self.writes_to if name is None else name
        if name not in self.members:
            names = ", ".join(map(repr, self.members))
            raise KeyError(
                f"which member to write to: name one of {names}, or give the mixture writes_to=; got {name!r}"
            )
        return self.members[name]

    def extend(self, data: TensorDictBase, name: str | None = None) -> torch.Tensor:
        """Write transitions to a member, default ``writes_to``; see :meth:`ReplayBuffer.extend`."""
        return self._written(name).extend(data)

    def add(self, data: TensorDictBase, name: str | None = None) -> int | torch.Tensor:
        """Write one transition to a member, default ``writes_to``; see :meth:`ReplayBuffer.add`."""
        return self._written(name).add(data)

    def empty(self) -> None:
        """Empty all members."""
        for member in self.members.values():
            member.empty()

    # -- samples

    def counts(self, batch_size: int) -> list[int]:
        """Return how many rows of a batch each member has, at random as the class says."""
        shares = [*self.sampler.by_name.values()]
        if not self.exact:
            law = torch.tensor(shares, dtype=torch.float64, device="cpu")
            drawn = torch.multinomial(law, batch_size, replacement=True, generator=self._rng)
            return torch.bincount(drawn, minlength=len(shares)).tolist()
        total, bounds = 0.0, [0]
        # One offset for all bounds: each count is rounded up or down, with the right mean, and they add up to B.
        offset = torch.rand((), dtype=torch.float64, generator=self._rng, device="cpu").item()
        for share in shares[:-1]:
            total += share * batch_size
            bounds.append(int(round(total, 9) + offset))
        bounds.append(batch_size)
        return [after - before for before, after in pairwise(bounds)]

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Return a batch, as fresh memory, ``[B]``.

        Raises:
            RuntimeError: a member with a share has no rows, or there is no batch size.
            SchemaError: members give different keys, dtypes or shapes.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise RuntimeError("batch_size not specified: give it to the mixture or to sample")
        counts, plan = self.counts(size), self._plan
        if plan is not None and plan.size == size:
            batch = plan.sample(counts)
            if batch is not None:
                return batch
        self._refuse_other_schemas()
        parts = {}
        for (name, member), count in zip(self.members.items(), counts, strict=True):
            if count and not len(member):
                raise RuntimeError(f"member {name!r} has no rows: extend it first, or set its share to 0")
            if count:
                parts[name] = member._initialize() and member._sample(count)[0]
        self._plan = make_mixture_plan([*self.members.values()], size)
        return self._joined(parts)

    def _joined(self, parts: dict[str, TensorDictBase]) -> TensorDictBase:
        weighted = {name: part for name, part in parts.items() if "priority_weight" in part.keys()}
        scales = {name: self._largest(self.members[name], part) for name, part in weighted.items()}
        largest = max([1.0] * (len(scales) < len(parts)) + [scale or 1.0 for scale in scales.values()], default=1.0)
        largest = 1.0 if None in scales.values() else largest  # not normalised
        width = max(part["index"].ndim for part in parts.values())
        for name, part in parts.items():
            member, index, ones = (
                self.members[name],
                part["index"],
                torch.ones(len(part), dtype=torch.float32, device=part.device),
            )
            more = {"source": torch.full((len(part),), self.names.index(name), device=index.device)}
            if index.ndim < width:  # a row of [T] is in lane 0
                more["index"] = torch.stack((index, torch.zeros_like(index)), -1)
            if weighted:
                more["priority_weight"] = part.get("priority_weight", ones) * ((scales.get(name) or 1.0) / largest)
                clock = member.storage.clock.now if hasattr(member.storage, "clock") else 0
                more[SAMPLED_AT] = part.get(SAMPLED_AT, torch.full((len(part),), clock, device=index.device))
            set_entries_(part, more)
        refuse_difference({name: _kinds(part) for name, part in parts.items()})
        return torch.cat([*parts.values()])

    @staticmethod
    def _largest(member: ReplayBuffer, part: TensorDictBase) -> float | None:
        """Return what the weights of a member were divided by; None for nothing."""
        sampler, storage = member._parts.prioritized, member.storage
        if sampler is None or sampler.weight_norm is None:
            return None
        row = flat_rows(part.get("anchor_index", part["index"])[:1], storage, sampler.device)
        weight = (len(storage) * sampler.probability(row)) ** -sampler.beta
        return float(weight / part["priority_weight"][0])

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            yield self.sample()

    # -- priorities

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Give each prioritized member the TD errors of its rows; see :meth:`ReplayBuffer.update_tensordict_priority`.

        Raises:
            KeyError: the batch has no ``"source"``, no index, or no TD errors.
            ValueError: an error is NaN or infinite; all priorities are as they were.
        """
        if "source" not in data.keys():
            raise KeyError("the batch has no 'source', which says whose rows it has: give it as it was sampled")
        flat = data.reshape(-1)
        source, updates = flat["source"], []
        for place, member in enumerate(self.members.values()):
            parts = member._parts or member._initialize()
            if parts.prioritized is None:
                continue
            keys = [as_tuple(key) for key in ("index", SAMPLED_AT, member.priority_key)]
            part = (flat if parts.wrapper is not None else flat.select(*keys, strict=False))[source == place]
            if not len(part):
                continue
            if part["index"].ndim > 1 and member.storage.ndim == 1:
                part["index"] = part["index"][:, 0]
            td_error = part.get(member.priority_key, None)
            if td_error is not None and backend_of(td_error) == "numba":
                refuse_errors(td_error.reshape(-1))
            updates.append((member, part))
        for member, part in updates:
            member.update_tensordict_priority(part)

    # -- state, health

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all that behaviour depends on."""
        members = {name: member.state_dict() for name, member in self.members.items()}
        return {"members": members, "shares": self.sampler.state_dict(), "exact": self.exact}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; ValueError, with nothing changed, if it is of other members."""
        self.sampler.load_state_dict(state_dict["shares"])
        self.exact = bool(state_dict["exact"])
        for name, member in self.members.items():
            member.load_state_dict(state_dict["members"][name])

    def dumps(self, path: str | Path) -> None:
        """Save the members, each in a folder of its name as :meth:`ReplayBuffer.dumps` does, and the shares."""
        for name, member in self.members.items():
            member.dumps(Path(path) / name)
        rng = None if self._rng is None else self._rng.get_state()
        state = {"shares": self.sampler.state_dict(), "exact": self.exact, "generator": rng}
        save_state(Path(path) / _FOLDER, type(self).__name__, state)

    def loads(self, path: str | Path) -> None:
        """Continue from what :meth:`dumps` saved.

        Raises:
            CheckpointError: a folder is missing, damaged or foreign; members before that one have been loaded.
            ValueError: the dump is of other members; nothing has changed.
        """
        state = load_state(Path(path) / _FOLDER, type(self).__name__)
        self.sampler.load_state_dict(state["shares"])
        self.exact = bool(state["exact"])
        if self._rng is not None and state["generator"] is not None:
            self._rng.set_state(state["generator"])
        for name, member in self.members.items():
            member.loads(Path(path) / name)

    def share(self) -> ReplayBufferMixture:
        """Let several processes use the members, see :meth:`ReplayBuffer.share`; shares stay with each process."""
        for member in self.members.values():
            member.share()
        return self

    def health(self) -> dict[str, float]:
        """Return each member's :meth:`ReplayBuffer.health` and share, as ``"name/entry"``."""
        shares = {f"{name}/share": share for name, share in self.sampler.by_name.items()}
        found = {name: member.health() for name, member in self.members.items()}
        return shares | {f"{name}/{key}": value for name, report in found.items() for key, value in report.items()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_plan": None, "_checked": [], "_rng": None}

    def __repr__(self) -> str:
        shares = self.sampler.by_name
        lines = [
            f"    {name} ({shares[name]:.4g}): {member!r}".replace("\n", "\n    ")
            for name, member in self.members.items()
        ]
        return "\n".join([f"{type(self).__name__}(", *lines, f"    batch_size={self.batch_size}, exact={self.exact})"])


def _kinds(data: TensorDictBase) -> dict[tuple[str, ...], Any]:
    items = data.items(include_nested=True, leaves_only=True)
    return {as_tuple(key): (value.dtype, value.shape[data.ndim :]) for key, value in items}


def refuse_difference(members: dict[str, dict[tuple[str, ...], Any]]) -> None:
    """Raise a SchemaError that names the first entry in which a member differs from the first one."""
    if not members:
        return
    (first, known), *others = members.items()
    for name, found in others:
        for key in sorted(known.keys() | found.keys()):
            if known.get(key) == found.get(key):
                continue
            words = [
                f"{kind(*each[key])} in {who!r}" if key in each else f"missing in {who!r}"
                for who, each in ((first, known), (name, found))
            ]
            raise SchemaError(f"members must hold the same entries: {show_key(key)} is {words[0]}, {words[1]}")
