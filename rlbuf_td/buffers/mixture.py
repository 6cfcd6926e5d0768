"""A mixture of replay buffers: each batch has rows of several buffers, in given proportions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import accumulate, pairwise
from math import lcm
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import Storage

from rlbuf_td.buffers.mixture_parts import (
    MemberRows,
    draw_rows_of,
    kinds,
    largest_normalizer,
    members_of,
    own_errors,
    refuse_difference,
    refuse_entries,
    refuse_member,
    refuse_members,
    refuse_update,
    try_states,
    window_of,
    with_lane,
    without_lane,
    written_columns,
)
from rlbuf_td.buffers.mixture_plan import MixturePlan, plan_mixture
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.checkpoint.files import explained, reading, write_state, writing
from rlbuf_td.checkpoint.group import delete_others, new_folder
from rlbuf_td.kernels.strata import LEAST_RATIO
from rlbuf_td.samplers.common import OwnSignature, StatefulSampler
from rlbuf_td.storages.checks import as_number, fraction, whole
from rlbuf_td.storages.processes import pickled_generator, unpickled_generator
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.tensordict_fast import set_entries_

if TYPE_CHECKING:
    from typing_extensions import Self

_FOLDER = "mixture"  # of the manifest of a dump
_BAD_NAME = re.compile(r"$|[._]|by_name$|.*[/\\]").match  # members are folders of a dump


class ReplayBufferMixture:
    r"""Samples from several replay buffers (members), for example half demonstrations and half online data (RLPD).

    A batch holds the rows of the first member, then the rows of the second member, and so on. ``"source"``, ``[B]``
    int64, is the position of a row's member in :attr:`names`. With ``exact=True``, a member with share s provides
    :math:`\lfloor B s \rfloor` or :math:`\lceil B s \rceil` rows, on average :math:`B s`. If a member has a
    :class:`SequenceSampler`, each member provides a multiple of the sampler's window length. A member with a
    :class:`MinibatchSampler` may provide fewer rows at the end of an epoch.

    **Importance weights** correct for the samplers of the members, but not for the shares. A row of a prioritized
    member with N rows has the weight :math:`(N P)^{-\beta}`, where P is the probability that its sampler draws the
    row. Rows of other members have the weight 1. Used alone, a prioritized member divides its weights by a normalizer,
    the largest weight in the buffer or in the batch (``weight_norm``). A mixture divides all weights of a batch by the
    largest normalizer of its members, which is 1 for members without priorities. Members without rows in the batch
    count, except with ``weight_norm="batch"``. If any member has ``weight_norm=None``, weights are not divided.

    Args:
        members: a dict from names to :class:`ReplayBuffer` objects with equal keys, dtypes and shapes. Members may have
            different samplers and transforms, but all batches must be on one device. A member can also be used alone.
        shares: the expected fraction of a batch that each member provides, at least 0, scaled to add up to 1. For a
            member "a", ``mixture.sampler.a = x`` or ``LinearScheduler(mixture.sampler, "a", ...)`` changes the share.
        batch_size: B, the default for :meth:`sample`.
        exact: if ``True``, the number of rows from each member is fixed up to rounding; if ``False``, the member of
            each row is drawn at random.
        writes_to: the member to which :meth:`extend` and :meth:`add` write by default. Required for TorchRL's trainers.
        generator: the random generator that decides how many rows each member provides, default: torch's own.

    TorchRL's trainers accept a mixture as their ``replay_buffer``. TorchRL's ``ReplayBufferEnsemble`` also samples from
    several buffers, but stacks their batches and does not support priorities.

    Raises:
        TypeError: members or shares are no dict, or a member is not a :class:`ReplayBuffer`, is an
            :class:`ExperienceQueue`, or has TorchRL's ``PrioritizedSampler``.
        ValueError: members and shares differ in names, ``writes_to`` is not a member, or shares are out of range.
        SchemaError: members hold different keys, dtypes or shapes.

    Cost: a draw and a gather per member, if the members have samplers of this package (without wrappers, except
    :class:`FreshRowsSampler`), rows in host memory of equal layout, and no transforms. Otherwise, each member makes a
    batch of its own, and these batches are copied into one.

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
        refuse_members(members, shares, writes_to)
        self.members, self.sampler = dict(members), Shares({name: shares[name] for name in members})
        self.batch_size, self.exact, self.writes_to, self._rng = batch_size, bool(exact), writes_to, generator
        self._plan: MixturePlan | None = None
        self._checked: list[Any] = []
        self._refuse_other_schemas()

    # -- members

    @property
    def names(self) -> list[str]:
        """The names of the members; ``"source"`` holds positions in this list."""
        return [*self.members]

    @property
    def storage(self) -> Any:
        """The storage of the member ``writes_to``, or of the first member if ``writes_to`` is None."""
        return (self.members[self.writes_to] if self.writes_to else next(iter(self.members.values()))).storage

    def __getitem__(self, name: str) -> ReplayBuffer:
        return self.members[name]

    def __len__(self) -> int:
        return sum(map(len, self.members.values()))

    @property
    def write_count(self) -> int:
        """The sum of the members' :attr:`write_count`."""
        return sum(member.write_count for member in self.members.values())

    def _refuse_other_schemas(self) -> None:
        found = [part for each in self.members.values() for part in (written_columns(each.storage), each.sampler)]
        if len(found) == len(self._checked) and all(map(is_, found, self._checked)):
            return
        layouts = {
            name: {leaf.key: (leaf.dtype, leaf.shape) for leaf in member.storage.layout.leaves}
            for name, member in self.members.items()
            if member.storage.layout is not None
        }
        refuse_entries(self.members)
        reserved = {name for name in layouts if self.members[name].storage.is_reserved}
        refuse_difference(layouts, reserved)
        self._checked, self._plan = found, None

    # -- writes

    def _written(self, name: str | None) -> ReplayBuffer:
        name = self.writes_to if name is None else name
        if name not in self.members:
            raise KeyError(f"no member {name!r} to write to: name one of {self.names}, or pass writes_to")
        return self.members[name]

    def extend(self, data: TensorDictBase, name: str | None = None, *, lanes: Any = None) -> torch.Tensor:
        """Write transitions to the member ``name``, default ``writes_to``; see :meth:`ReplayBuffer.extend`."""
        return self._written(name).extend(data, lanes=lanes)

    def add(self, data: TensorDictBase, name: str | None = None) -> int | torch.Tensor:
        """Write one transition to the member ``name``, default ``writes_to``; see :meth:`ReplayBuffer.add`."""
        return self._written(name).add(data)

    def empty(self) -> None:
        """Empty all members."""
        for member in self.members.values():
            member.empty()

    # -- samples

    def counts(self, batch_size: int) -> list[int]:
        """Return the number of rows that each member provides for a batch; each call may round differently."""
        window = lcm(*(window_of(each.sampler) for each in self.members.values()))
        if batch_size % window:
            raise ValueError(f"batch_size={batch_size} must be a multiple of {window}, the windows of the members")
        return [count * window for count in self._parts_of(batch_size // window)]

    def _parts_of(self, batch_size: int) -> list[int]:
        shares = [*self.sampler.by_name.values()]
        if not self.exact:
            law = torch.tensor(shares, dtype=torch.float64, device="cpu")
            drawn = torch.multinomial(law, batch_size, replacement=True, generator=self._rng)
            return torch.bincount(drawn, minlength=len(shares)).tolist()
        bounds = [round(total * batch_size, 9) for total in accumulate(shares[:-1])]
        # One random offset for all bounds gives each count the right mean; the counts sum to B.
        offset = 0.0
        if not all(map(float.is_integer, bounds)):
            offset = torch.rand((), dtype=torch.float64, generator=self._rng, device="cpu").item()
        ends = [*(int(bound + offset) for bound in bounds), batch_size]
        return [end - begin for begin, end in pairwise([0, *ends])]

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Return a batch in fresh memory, ``[B]``.

        Raises:
            RuntimeError: there is no batch size, a member that provides rows is empty, or the ``min_size`` or
                ``samples_per_insert`` of a member does not allow the batch now.
            ShutDown: a member has been shut down.
            ValueError: the batch size is not positive, or not a multiple of the members' window lengths.
            SchemaError: the batches of members differ in keys, dtypes or shapes.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise RuntimeError("batch_size not specified: pass it to the mixture or to sample")
        size = size if type(size) is int else whole(1)("batch_size", size)
        if size < 1:
            raise ValueError(f"a batch must have at least one row, got batch_size={size}")
        for member in self.members.values():
            member._refuse_shut_down()
        counts, plan = self.counts(size), self._plan
        needed = {name: count for name, count in zip(self.members, counts, strict=True) if count}
        if plan is None or plan.size != size or not plan.holds(counts):
            plan = self._plan = None
            self._refuse_other_schemas()
            for name, member in self.members.items():
                refuse_member(name, member)  # its parts may have been replaced
                if name in needed and not len(member):
                    raise RuntimeError(f"member {name!r} has no rows: extend it first, or set its share to 0")
            plan = self._plan = plan_mixture(self.members, size)
        with ExitStack() as admitted:  # all members admit their rows, or none counts them
            for name, count in needed.items():
                if self.members[name].flow is not None:
                    admitted.enter_context(self.members[name]._permission(count, False, None))
            if plan is not None:
                return plan.sample(counts)
            return self._joined({name: draw_rows_of(self.members[name], count) for name, count in needed.items()})

    def _joined(self, parts: dict[str, MemberRows]) -> TensorDictBase:
        is_weighted = any(member._initialize().prioritized is not None for member in self.members.values())
        has_lanes = any(member.storage.ndim > 1 for member in self.members.values())
        largest = largest_normalizer(self.members, {name: part.normalizer for name, part in parts.items()})
        for name, (rows, normalizer, stamps) in parts.items():
            size, device = len(rows), rows["index"].device
            more: dict[str, Any] = {"source": torch.full((size,), self.names.index(name), device=device)}
            if has_lanes:
                more |= with_lane(rows)
            if is_weighted:
                weight = rows.get("priority_weight", torch.ones(size, dtype=torch.float32, device=device))
                more["priority_weight"] = weight * max((normalizer or 1.0) / largest, LEAST_RATIO)
                more[SAMPLED_AT] = stamps if SAMPLED_AT not in rows.keys() else rows[SAMPLED_AT]
            set_entries_(rows, more)
        refuse_difference({name: kinds(part.rows) for name, part in parts.items()})
        return torch.cat([part.rows for part in parts.values()])

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            yield self.sample()

    # -- priorities

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Update the priorities of each prioritized member; see :meth:`ReplayBuffer.update_tensordict_priority`.

        Raises:
            KeyError: the batch has no ``"source"``, no index, or no TD errors.
            IndexError: an entry ``"source"`` is not the position of a member, or a row is out of range.
            ValueError: a TD error is NaN or infinite.

        After an error, all priorities are unchanged.
        """
        flat, updates = data.reshape(-1), []
        for name, is_own in members_of(flat, self.names).items():
            member, parts = self.members[name], self.members[name]._initialize()
            if parts.prioritized is not None:
                updates.append((member, *own_errors(member, flat, is_own)))
        for update in updates if len(updates) > 1 else []:
            refuse_update(*update)
        for member, index, td_error, stamp in updates:
            member._update_sampled(index, td_error, stamp)

    def write_back(
        self, batch: TensorDictBase, keys: Any, *, sampled_at: Mapping[str, torch.Tensor] | None = None
    ) -> int:
        """Write entries of a batch to the rows of all members; see :meth:`ReplayBuffer.write_back`.

        ``sampled_at`` maps the name of each member to the stamps of its rows in the batch, in their order:
        ``{name: rb.storage.stamps(batch["index"][batch["source"] == place])}``. If no member is prioritized, the batch
        has no entry ``"sampled_at"``, and this argument is required. After an error, no member has changed.
        """
        flat, times = batch.reshape(-1), {} if sampled_at is None else sampled_at
        masks = members_of(flat, self.names)
        if not isinstance(times, Mapping) or (SAMPLED_AT not in flat.keys() and not masks.keys() <= times.keys()):
            lacks = f"the batch has no 'sampled_at', and sampled_at={times!r} lacks one of {[*masks]}"
            raise KeyError(f"{lacks}: pass a dict of storage.stamps(...) of each member's rows")
        parts = {name: without_lane(self.members[name], flat[is_own]) for name, is_own in masks.items()}
        own = [(self.members[name], part, times.get(name)) for name, part in parts.items()]
        checked = [member._checked_entries(part, keys, time) for member, part, time in own]
        return sum(member._write_back(part, *found) for (member, part, _), found in zip(own, checked, strict=True))

    # -- state, health

    def _own_state(self) -> dict[str, Any]:
        rng = None if self._rng is None else self._rng.get_state()
        return {"shares": self.sampler.state_dict(), "exact": self.exact, "generator": rng}

    def _restore_own(self, state: dict[str, Any]) -> None:
        """Restore the shares, ``exact`` and ``generator``; an error is raised before any change."""
        rng = state["generator"]
        if self._rng is not None and rng is not None:
            torch.Generator(self._rng.device).set_state(rng)  # raises an error if it is no state
        self.sampler.load_state_dict(state["shares"])
        self.exact = bool(state["exact"])
        if self._rng is not None and rng is not None:
            self._rng.set_state(rng)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of all members, of the shares, ``exact`` and ``generator``."""
        return {"members": {name: member.state_dict() for name, member in self.members.items()}} | self._own_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        If a member cannot load its state, an error is raised before any change.
        """
        try_states(self.members, state_dict.get("members", {}))
        self._restore_own(state_dict)
        for name, member in self.members.items():
            member.load_state_dict(state_dict["members"][name])

    def dumps(self, path: str | Path) -> None:
        """Save all members and the shares as one crash-safe dump; see :meth:`ReplayBuffer.dumps`.

        Unchanged data is hard-linked to the previous dump, if the file system supports hard links.
        """
        with writing(Path(path) / _FOLDER, type(self).__name__) as writer:
            last = None if writer.previous is None else writer.previous.state.get("members")
            folder = new_folder(Path(path), "members", last, self.members)
            for name, member in self.members.items():
                member.dumps(folder / name)
            write_state(writer, self._own_state() | {"members": folder.name}, [])
            delete_others(folder)

    def loads(self, path: str | Path) -> None:
        """Load a dump that :meth:`dumps` has written.

        Raises:
            CheckpointError: the dump has other member names, or the dump of a member is missing or damaged. If the
                names differ, nothing is loaded. If a member's dump is missing or damaged, other members may have been
                loaded.
        """
        with reading(Path(path) / _FOLDER, type(self).__name__) as reader, explained(reader):
            state = reader.state()
            self._restore_own(state)
            for name, member in self.members.items():
                member.loads(Path(path) / state["members"] / name)

    def share(self) -> Self:
        """Share the members with other processes (:meth:`ReplayBuffer.share`); each process has its own ``shares``."""
        for member in self.members.values():
            member.share()
        return self

    def health(self) -> dict[str, float]:
        """Return the share and :meth:`ReplayBuffer.health` of each member, with keys ``"name/entry"``."""
        shares = {f"{name}/share": share for name, share in self.sampler.by_name.items()}
        found = {name: member.health() for name, member in self.members.items()}
        return shares | {f"{name}/{key}": value for name, report in found.items() for key, value in report.items()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_plan": None, "_checked": [], "_rng": pickled_generator(self._rng)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _rng=unpickled_generator(state["_rng"]))

    def __repr__(self) -> str:
        shares = self.sampler.by_name
        lines = [
            f"    {name} ({shares[name]:.4g}): {member!r}".replace("\n", "\n    ")
            for name, member in self.members.items()
        ]
        return "\n".join([f"{type(self).__name__}(", *lines, f"    batch_size={self.batch_size}, exact={self.exact})"])


class Shares(StatefulSampler):
    """The members' shares as attributes; setting a share scales the other shares, so that the sum stays 1."""

    by_name: dict[str, float]

    def __init__(self, shares: Mapping[str, float]) -> None:
        for name in shares:
            if not isinstance(name, str) or not name.isprintable() or hasattr(StatefulSampler, name) or _BAD_NAME(name):
                raise ValueError(f"{name!r} cannot be the name of a member: choose another one")
        given = {name: as_number(share) for name, share in shares.items()}
        total = sum(given.values())
        if any(not share >= 0 for share in given.values()) or not 0 < total < float("inf"):
            raise ValueError(f"shares must be at least 0 and finite, one of them positive, got {dict(shares)}")
        self.__dict__["by_name"] = {name: share / total for name, share in given.items()}

    def __getattr__(self, name: str) -> float:
        found = self.__dict__.get("by_name", {})
        if name not in found:
            raise AttributeError(f"a mixture of {', '.join(found)} has no share {name!r}")
        return found[name]

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.__dict__["by_name"]
        if name not in before:
            if not name.startswith("_"):
                raise AttributeError(f"a mixture of {', '.join(before)} has no share {name!r}")
            self.__dict__[name] = value
            return
        share = fraction(name, value)
        others = sum(old for other, old in before.items() if other != name)
        if len(before) == 1 and share != 1:
            raise ValueError(f"{name} is the only member: its share must be 1, got {value}")
        even = (1 - share) / max(1, len(before) - 1)
        scaled = {other: old * (1 - share) / others if others else even for other, old in before.items()}
        self.__dict__["by_name"] = scaled | {name: share}

    def sample(self, storage: Storage, batch_size: int) -> Any:
        raise NotImplementedError("the shares of a mixture cannot draw rows: sample the mixture or a member")

    def _empty(self) -> None:
        pass

    def snapshot(self) -> dict[str, Any]:
        return self.by_name

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.keys() != self.by_name.keys():
            raise ValueError(f"the saved shares belong to {', '.join(state_dict)}, these to {', '.join(self.by_name)}")
        self.__dict__["by_name"] = Shares({name: state_dict[name] for name in self.by_name}).by_name

    def __repr__(self) -> str:
        return "Shares(" + ", ".join(f"{name}={share:.4g}" for name, share in self.by_name.items()) + ")"
