"""A mixture of replay buffers: each batch has rows of several buffers, in given
proportions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    Sampler,
    SliceSampler,
    Storage,
)

from rlbuf_td.buffers.experience_queue import ExperienceQueue
from rlbuf_td.buffers.permission import Permission
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.buffers.writing import refuse_columns
from rlbuf_td.checkpoint.buffer import try_dump, try_state
from rlbuf_td.checkpoint.files import delete_others, new_folder, reading, writing
from rlbuf_td.kernels.dispatch import backend_of, untraced
from rlbuf_td.kernels.strata import LEAST_RATIO
from rlbuf_td.samplers import EpisodeSampler, SequenceSampler
from rlbuf_td.samplers.common import (
    OwnSignature,
    StatefulSampler,
    refuse_errors,
    refuse_priorities,
    stored_names,
)
from rlbuf_td.samplers.priorities import Update
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.storages import SchemaError
from rlbuf_td.storages.checks import (
    State,
    as_number,
    fraction,
    optional,
    whole,
)
from rlbuf_td.storages.indexing import device_of, flat_rows, merge_, row_count
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.processes import pickled_generator, unpickled_generator
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.schema import kind, show_key
from rlbuf_td.storages.tensordict_fast import entries_of, new_tensordict, set_entries_
from rlbuf_td.storages.writes import as_integers

if TYPE_CHECKING:
    from typing_extensions import Self

    from rlbuf_td.storages import PackedStorage

_FOLDER = "mixture"  # of the manifest of a dump
# members are folders of a dump
_BAD_NAME = re.compile(r"$|[._]|by_name$|.*[/\\]").match


class ReplayBufferMixture:
    r"""Samples from several replay buffers (members), for example half demonstrations
    and half online data (RLPD).

    A batch holds the rows of the first member, then the rows of the second member, and
    so on. ``"source"``, ``[B]`` int64, is the position of a row's member in
    :attr:`names`. With ``exact=True``, a member with share s provides
    :math:`\lfloor B s \rfloor` or :math:`\lceil B s \rceil` rows, on average
    :math:`B s`. If a member has a :class:`SequenceSampler`, each member provides a
    multiple of the sampler's window length. A member with a :class:`MinibatchSampler`
    may provide fewer rows at the end of an epoch.

    **Importance weights** correct for the samplers of the members, but not for the
    shares. A row of a prioritized member with N rows has the weight
    :math:`(N P)^{-\beta}`, where P is the probability that its sampler draws the row.
    Rows of other members have the weight 1. Used alone, a prioritized member divides
    its weights by a normalizer, the largest weight in the buffer or in the batch
    (``weight_norm``). A mixture divides all weights of a batch by the largest
    normalizer of its members, which is 1 for members without priorities. Members
    without rows in the batch count, except with ``weight_norm="batch"``. If any member
    has ``weight_norm=None``, weights are not divided.

    Args:
        members: a dict from names to :class:`ReplayBuffer` objects with equal keys,
            dtypes and shapes. Members may have different samplers and transforms, but
            all batches must be on one device. A member can also be used alone.
        shares: the expected fraction of a batch that each member provides, at least 0,
            scaled to add up to 1. For a member "a", ``mixture.sampler.a = x`` or
            ``LinearScheduler(mixture.sampler, "a", ...)`` changes the share.
        batch_size: B, the default for :meth:`sample`.
        exact: if ``True``, the number of rows from each member is fixed up to rounding;
            if ``False``, the member of each row is drawn at random.
        writes_to: the member to which :meth:`extend` and :meth:`add` write by default.
            Required for TorchRL's trainers.
        generator: the random generator that decides how many rows each member provides,
            default: torch's own.

    TorchRL's trainers accept a mixture as their ``replay_buffer``. TorchRL's
    ``ReplayBufferEnsemble`` also samples from several buffers, but stacks their batches
    and does not support priorities.

    Raises:
        TypeError: members or shares are no dict, or a member is not a
            :class:`ReplayBuffer`, is an :class:`ExperienceQueue`, or has TorchRL's
            ``PrioritizedSampler``.
        ValueError: members and shares differ in names, ``writes_to`` is not a member,
            or shares are out of range.
        SchemaError: members hold different keys, dtypes or shapes.

    Cost: a batch of each member, and a copy of these batches into one. With
    ``exact=False``, members make batches of many sizes, which takes about twice as
    long.

    Source: Ball, Smith, Kostrikov, Levine: Efficient Online Reinforcement Learning with
    Offline Data, ICML 2023.

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
        self.members = dict(members)
        self.sampler = Shares({name: shares[name] for name in members})
        self.batch_size = optional(whole(1))("batch_size", batch_size)
        self.exact = bool(exact)
        self.writes_to = writes_to
        self._rng = generator
        self._refuse_other_schemas()

    # -- members

    @property
    def names(self) -> list[str]:
        """The names of the members; ``"source"`` holds positions in this list."""
        return [*self.members]

    @property
    def storage(self) -> PackedStorage:
        """The storage of the member ``writes_to``, or of the first member if
        ``writes_to`` is None."""
        return self.members[self.writes_to or self.names[0]].storage

    def __getitem__(self, name: str) -> ReplayBuffer:
        return self.members[name]

    def __len__(self) -> int:
        return sum(map(len, self.members.values()))

    @property
    def write_count(self) -> int:
        """The sum of the members' :attr:`write_count`."""
        return sum(member.write_count for member in self.members.values())

    def _refuse_other_schemas(self) -> None:
        """Raise a SchemaError if the rows of two members differ in keys, dtypes or
        shapes; rows that are only reserved may still get other ones."""
        refuse_entries(self.members)
        kinds_of = {}
        for name, member in self.members.items():
            storage = member.storage
            if storage.layout is not None and not storage.is_reserved:
                leaves = storage.all_rows().layout.leaves
                kinds_of[name] = {leaf.key: (leaf.dtype, leaf.shape) for leaf in leaves}
        refuse_difference(kinds_of)

    # -- writes

    def _written(self, name: str | None) -> ReplayBuffer:
        name = self.writes_to if name is None else name
        if name not in self.members:
            raise KeyError(
                f"no member {name!r} to write to: name one of {self.names}, or pass writes_to"
            )
        return self.members[name]

    def extend(
        self, data: TensorDictBase, name: str | None = None, *, lanes: object = None
    ) -> torch.Tensor:
        """Write transitions to the member ``name``, default ``writes_to``; see
        :meth:`ReplayBuffer.extend`."""
        return self._written(name).extend(data, lanes=lanes)

    def add(
        self, data: TensorDictBase, name: str | None = None, *columns: object
    ) -> int | torch.Tensor | None:
        """Write one transition to the member ``name``, default ``writes_to``; see
        :meth:`ReplayBuffer.add`."""
        if columns or not isinstance(name, str | None):
            member = f"mixture[{self.writes_to or self.names[0]!r}]"
            refuse_columns(data, name, *columns, buffer=member)
        return self._written(name).add(data)

    def empty(self) -> None:
        """Empty all members."""
        for member in self.members.values():
            member.empty()

    # -- samples

    def counts(self, batch_size: int) -> list[int]:
        """Return the number of rows that each member provides for a batch; each call
        may round differently."""
        window = lcm(*(window_of(member.sampler) for member in self.members.values()))
        if batch_size % window:
            raise ValueError(
                f"batch_size={batch_size} must be a multiple of {window}, the windows of the members"
            )
        return [count * window for count in self._parts_of(batch_size // window)]

    def _parts_of(self, batch_size: int) -> list[int]:
        """Return how many of ``batch_size`` rows each member gives, in the order of the
        names."""
        shares = [*self.sampler.by_name.values()]
        if not self.exact:
            law = torch.tensor(shares, dtype=torch.float64, device="cpu")
            drawn = torch.multinomial(
                law, batch_size, replacement=True, generator=self._rng
            )
            return torch.bincount(drawn, minlength=len(shares)).tolist()
        bounds = [round(total * batch_size, 9) for total in accumulate(shares[:-1])]
        # One random offset for all bounds gives each count the right mean; the counts
        # sum to B.
        offset = 0.0
        if not all(map(float.is_integer, bounds)):
            offset = torch.rand(
                (), dtype=torch.float64, generator=self._rng, device="cpu"
            ).item()
        ends = [*(int(bound + offset) for bound in bounds), batch_size]
        return [end - begin for begin, end in pairwise([0, *ends])]

    @untraced("draws depend on numbers that no graph knows")
    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Return a batch in fresh memory, ``[B]``.

        Raises:
            RuntimeError: there is no batch size, a member that provides rows is empty,
                or the ``min_size`` or ``samples_per_insert`` of a member does not allow
                the batch now.
            ShutDown: a member has been shut down.
            ValueError: the batch size is not positive, or not a multiple of the
                members' window lengths.
            SchemaError: the batches of members differ in keys, dtypes or shapes.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise RuntimeError(
                "batch_size not specified: pass it to the mixture or to sample"
            )
        size = whole(1)("batch_size", size)
        for member in self.members.values():
            member._refuse_shut_down()
        counts = self.counts(size)
        needed = {
            name: count
            for name, count in zip(self.members, counts, strict=True)
            if count
        }
        refuse_entries(self.members)
        for name, member in self.members.items():
            refuse_member(name, member)  # its parts may have been replaced
            if name in needed and not len(member):
                raise RuntimeError(
                    f"member {name!r} has no rows: extend it first, or set its share to 0"
                )
        is_weighted = has_priorities(self.members)
        # all members admit their rows, or none counts them
        with ExitStack() as admitted:
            for name, count in needed.items():
                if self.members[name].flow is not None:
                    permission = Permission(self.members[name], count, waits=False)
                    admitted.enter_context(permission.counted())
            parts = {
                name: draw_rows_of(self.members[name], count, is_weighted)
                for name, count in needed.items()
            }
            return self._joined(parts, is_weighted)

    def _joined(
        self, parts: dict[str, MemberRows], is_weighted: bool
    ) -> TensorDictBase:
        """Add the source, the lane and the common importance weight to the batch of
        each member; return one batch of all."""
        devices = {
            name: entries_of(part.rows)["index"].device for name, part in parts.items()
        }
        if len({*devices.values()}) > 1:
            shown = {name: str(device) for name, device in devices.items()}
            raise ValueError(
                f"the batches of members are on different devices, {shown}: keep "
                "their rows on one device, or give members device="
            )
        has_lanes = any(member.storage.ndim > 1 for member in self.members.values())
        largest = largest_normalizer(
            self.members, {name: part.normalizer for name, part in parts.items()}
        )
        for name, (rows, normalizer) in parts.items():
            known = entries_of(rows)
            index = known["index"]
            added: dict[str, Tensor] = {
                "source": index.new_full(index.shape[:1], self.names.index(name))
            }
            if has_lanes:
                added |= with_lane(rows)
            if is_weighted:
                weight = known.get("priority_weight")
                if weight is None:
                    weight = index.new_ones(index.shape[:1], dtype=torch.float32)
                factor = max((normalizer or 1.0) / largest, LEAST_RATIO)
                added["priority_weight"] = weight * factor
            set_entries_(rows, added)
        batches = [part.rows for part in parts.values()]
        joined = concatenated(batches)
        if joined is not None:
            return joined
        refuse_difference({name: kinds(part.rows) for name, part in parts.items()})
        return torch.cat(batches)  # pyrefly: ignore [bad-argument-type, bad-return]

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            yield self.sample()

    # -- priorities

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Update the priorities of each prioritized member; see
        :meth:`ReplayBuffer.update_tensordict_priority`.

        Raises:
            KeyError: the batch has no ``"source"``, no index, or no TD errors.
            IndexError: an entry ``"source"`` is not the position of a member, or a row
                is out of range.
            ValueError: a TD error is NaN or infinite.

        After an error, all priorities are unchanged.
        """
        flat = data if data.ndim == 1 else data.reshape(-1)
        updates = []
        for name, is_own in members_of(flat, self.names).items():
            member = self.members[name]
            if member._initialize().prioritized is not None:
                updates.append((member, own_update(member, flat, is_own)))
        for member, update in updates if len(updates) > 1 else []:
            refuse_update(member, update)
        for member, update in updates:
            member._update_sampled(update)

    def write_back(
        self,
        batch: TensorDictBase,
        keys: object,
        *,
        sampled_at: Mapping[str, torch.Tensor] | None = None,
    ) -> int:
        """Write entries of a batch to the rows of all members; see
        :meth:`ReplayBuffer.write_back`.

        ``sampled_at`` maps the name of each member to the stamps of its rows in the
        batch, in their order:
        ``{name: rb.storage.stamps(batch["index"][batch["source"] == position])}``. If no
        member is prioritized, the batch has no entry ``"sampled_at"``, and this
        argument is required. After an error, no member has changed.
        """
        flat = batch.reshape(-1)
        times = {} if sampled_at is None else sampled_at
        masks = members_of(flat, self.names)
        if not isinstance(times, Mapping) or (
            SAMPLED_AT not in flat.keys() and not masks.keys() <= times.keys()
        ):
            raise KeyError(
                f"the batch has no 'sampled_at', and sampled_at={times!r} lacks one "
                f"of {[*masks]}: pass a dict of storage.stamps(...) of each member's "
                "rows"
            )
        checked = []
        for name, is_own in masks.items():
            member = self.members[name]
            rows = without_lane(member, flat[is_own])
            entries = member._checked_entries(rows, keys, times.get(name))
            checked.append((member, rows, entries))
        return sum(
            member._write_back(rows, *entries) for member, rows, entries in checked
        )

    # -- state, health

    def _own_state(self) -> State:
        rng = None if self._rng is None else self._rng.get_state()
        return {
            "shares": self.sampler.state_dict(),
            "exact": self.exact,
            "generator": rng,
        }

    def _refuse_own(self, state: State) -> None:
        """Raise an error if :meth:`_restore_own` would."""
        Shares(self.sampler.by_name).load_state_dict(state["shares"])
        bool(state["exact"])
        rng = state["generator"]
        if self._rng is not None and rng is not None:
            torch.Generator(self._rng.device).set_state(rng)

    def _restore_own(self, state: State) -> None:
        """Restore the shares, ``exact`` and ``generator``."""
        self.sampler.load_state_dict(state["shares"])
        self.exact = bool(state["exact"])
        if self._rng is not None and state["generator"] is not None:
            self._rng.set_state(state["generator"])

    def state_dict(self) -> State:
        """Return a copy of the state of all members, of the shares, ``exact`` and
        ``generator``."""
        return {
            "members": {
                name: member.state_dict() for name, member in self.members.items()
            }
        } | self._own_state()

    def load_state_dict(self, state_dict: State) -> None:
        """Restore the result of :meth:`state_dict`.

        If a member cannot load its state, an error is raised before any change. Ctrl-C
        takes effect before the load or after it.
        """
        self._refuse_shut_down()
        states = state_dict.get("members", {})
        if states.keys() != self.members.keys():
            raise ValueError(
                f"the state is of members {[*states]}, the mixture has {self.names}"
            )
        for name, member in self.members.items():
            try_state(member, states[name])
        self._refuse_own(state_dict)
        with self._members_locked(), defer_sigint:
            self._restore_own(state_dict)
            for name, member in self.members.items():
                member.load_state_dict(states[name])

    def dumps(self, path: str | Path) -> None:
        """Save all members and the shares as one crash-safe dump; see
        :meth:`ReplayBuffer.dumps`.

        Unchanged data is hard-linked to the previous dump, if the file system supports
        hard links.
        """
        with writing(Path(path) / _FOLDER, type(self).__name__) as writer:
            last = None
            if writer.previous is not None:
                last = writer.previous.encoded.get("members")
            folder = new_folder(Path(path), "members", last, self.members)
            for name, member in self.members.items():
                member.dumps(folder / name)
            writer.write(self._own_state() | {"members": folder.name})
            delete_others(folder)

    def loads(self, path: str | Path, *, transforms: bool = False) -> None:
        """Load a dump that :meth:`dumps` has written.

        ``transforms``: also load the state of the members' transforms, see
        :meth:`ReplayBuffer.loads`.

        Raises:
            CheckpointError: the dump has other member names, or the dump of a member is
                missing or damaged, or does not fit the member. Nothing is loaded then.
            ShutDown: a member has been shut down.

        Ctrl-C takes effect before the members are loaded or after it. Cost: reads each
        file twice, because all are checked before any is loaded.
        """
        self._refuse_shut_down()
        with reading(Path(path) / _FOLDER, type(self).__name__) as dump:
            state = dump.state()
            self._refuse_own(state)
            folder = Path(path) / state["members"]
            for name, member in self.members.items():
                try_dump(member, folder / name, transforms=transforms)
            with self._members_locked(), defer_sigint:
                self._restore_own(state)
                for name, member in self.members.items():
                    member.loads(folder / name, transforms=transforms)

    def _refuse_shut_down(self) -> None:
        for member in self.members.values():
            member._refuse_shut_down()

    @contextmanager
    def _members_locked(self) -> Iterator[None]:
        """Drop the batches that members have drawn ahead, and hold all locks of the
        members."""
        for member in self.members.values():
            member.synchronize()
        with ExitStack() as locks:
            # first of all members: prefetching threads need the other locks
            for member in self.members.values():
                locks.enter_context(member._futures_lock)
                member._clear_prefetch_queue_locked()
            for member in self.members.values():
                locks.enter_context(member._locked())
            yield

    def share(self) -> Self:
        """Share the members with other processes (:meth:`ReplayBuffer.share`); each
        process has its own ``shares``."""
        for member in self.members.values():
            member.share()
        return self

    def health(self) -> dict[str, float]:
        """Return the share and :meth:`ReplayBuffer.health` of each member, with keys
        ``"name/entry"``."""
        report = {}
        for name, member in self.members.items():
            numbers = {"share": self.sampler.by_name[name]} | member.health()
            report |= {f"{name}/{key}": value for key, value in numbers.items()}
        return report

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_rng": pickled_generator(self._rng)}

    def __setstate__(self, state: State) -> None:
        self.__dict__.update(state, _rng=unpickled_generator(state["_rng"]))

    def __repr__(self) -> str:
        shares = self.sampler.by_name
        lines = [
            f"    {name} ({shares[name]:.4g}): {member!r}".replace("\n", "\n    ")
            for name, member in self.members.items()
        ]
        return "\n".join(
            [
                f"{type(self).__name__}(",
                *lines,
                f"    batch_size={self.batch_size}, exact={self.exact})",
            ]
        )


class Shares(StatefulSampler):
    """The members' shares as attributes; setting a share scales the other shares, so
    that the sum stays 1."""

    by_name: dict[str, float]

    def __init__(self, shares: Mapping[str, float]) -> None:
        for name in shares:
            if (
                not isinstance(name, str)
                or not name.isprintable()
                or hasattr(StatefulSampler, name)
                or _BAD_NAME(name)
            ):
                raise ValueError(
                    f"{name!r} cannot be the name of a member: choose another one"
                )
        numbers = {name: as_number(share) for name, share in shares.items()}
        total = sum(numbers.values())
        if any(not share >= 0 for share in numbers.values()) or not 0 < total < float(
            "inf"
        ):
            raise ValueError(
                f"shares must be at least 0 and finite, one of them positive, got {dict(shares)}"
            )
        self.__dict__["by_name"] = {
            name: share / total for name, share in numbers.items()
        }

    def __getattr__(self, name: str) -> float:
        shares = self.__dict__.get("by_name", {})
        if name not in shares:
            raise AttributeError(
                f"a mixture of {', '.join(shares)} has no share {name!r}"
            )
        return shares[name]

    def __setattr__(self, name: str, value: object) -> None:
        before = self.__dict__["by_name"]
        if name not in before:
            if not name.startswith("_"):
                raise AttributeError(
                    f"a mixture of {', '.join(before)} has no share {name!r}"
                )
            self.__dict__[name] = value
            return
        share = fraction(name, value)
        others = sum(old for other, old in before.items() if other != name)
        if len(before) == 1 and share != 1:
            raise ValueError(
                f"{name} is the only member: its share must be 1, got {value}"
            )
        even = (1 - share) / max(1, len(before) - 1)
        scaled = {
            other: old * (1 - share) / others if others else even
            for other, old in before.items()
        }
        self.__dict__["by_name"] = scaled | {name: share}

    def sample(self, storage: Storage, batch_size: int) -> Any:
        raise NotImplementedError(
            "the shares of a mixture cannot draw rows: sample the mixture or a member"
        )

    def _empty(self) -> None:
        pass

    def snapshot(self) -> State:
        return self.by_name

    def load_state_dict(self, state_dict: State) -> None:
        if state_dict.keys() != self.by_name.keys():
            raise ValueError(
                f"the saved shares belong to {', '.join(state_dict)}, these to {', '.join(self.by_name)}"
            )
        self.__dict__["by_name"] = Shares(
            {name: state_dict[name] for name in self.by_name}
        ).by_name

    def __repr__(self) -> str:
        return (
            "Shares("
            + ", ".join(f"{name}={share:.4g}" for name, share in self.by_name.items())
            + ")"
        )


def refuse_members(members: object, shares: object, writes_to: str | None) -> None:
    """Raise a TypeError or a ValueError for the arguments of a mixture that cannot
    work."""
    if not (isinstance(members, Mapping) and isinstance(shares, Mapping)):
        fault = f"got {type(members).__name__} and {type(shares).__name__}"
        raise TypeError(
            'members must be a dict of buffers by name, such as {"demos": rb1, '
            '"online": rb2}, and shares a dict of numbers, such as {"demos": 0.5, '
            f'"online": 0.5}}, {fault}'
        )
    for name, member in members.items():
        refuse_member(name, member)
    if (
        not members
        or members.keys() != shares.keys()
        or (writes_to is not None and writes_to not in members)
    ):
        fault = f"members are {[*members]}, shares are of {[*shares]}, writes_to={writes_to!r}"
        raise ValueError(f"members and shares must have the same names: {fault}")


def refuse_member(name: object, member: object) -> None:
    """Raise a TypeError if a buffer cannot be a member of a mixture."""
    if not isinstance(member, ReplayBuffer):
        raise TypeError(
            f"member {name!r} must be a ReplayBuffer, got {type(member).__name__}: "
            "copy its rows, ReplayBuffer.from_torchrl(member)"
        )
    if isinstance(member, ExperienceQueue):
        raise TypeError(
            f"member {name!r} is an ExperienceQueue, which gives each row once: sample it apart"
        )
    if isinstance(member.sampler, EpisodeSampler):
        raise TypeError(
            f"member {name!r} has an EpisodeSampler, whose batches have no fixed "
            "number of rows: sample it apart, or use a SequenceSampler"
        )
    sampler = getattr(member.sampler, "innermost", member.sampler)
    if (
        isinstance(sampler, PrioritizedSampler)
        and member._initialize().prioritized is None
    ):
        raise TypeError(
            f"member {name!r} has TorchRL's PrioritizedSampler: use a ProportionalSampler"
        )


def has_priorities(members: Mapping[str, ReplayBuffer]) -> bool:
    """Whether any member is prioritized."""
    return any(
        member._initialize().prioritized is not None for member in members.values()
    )


def refuse_entries(members: Mapping[str, ReplayBuffer]) -> None:
    """Raise a SchemaError if a member stores an entry that batches of the mixture use
    for something else."""
    adds = {"source"} | (Prioritized.report_keys if has_priorities(members) else set())
    for name, member in members.items():
        for key in stored_names(member.storage).keys() & adds:
            raise SchemaError(
                f"member {name!r} stores the key {key!r}, which the mixture adds to "
                f"batches: store it under another name, data.rename_key_({key!r}, "
                f"'my_{key}')"
            )


class MemberRows(NamedTuple):
    """The rows that a member provides for a batch."""

    rows: TensorDictBase  # with the sampler's report
    normalizer: float | None  # see :func:`normalizer_of`


def normalizer_of(
    member: ReplayBuffer, report: Mapping[Any, Any] | None
) -> float | None:
    """Return the largest importance weight of a member, by which the member divides its
    weights; None: no division.

    ``report`` is the sampler's report of the member's rows in the batch, or None if the
    batch has no row of the member.
    """
    sampler = member._initialize().prioritized
    rows = row_count(member.storage)
    if sampler is None or not rows or sampler.weight_norm is None:
        return None
    if sampler.weight_norm == "buffer":  # of all rows, drawn or not
        with member._locked():
            return float((rows * sampler.least_probability()) ** -sampler.beta)
    if report is None or "priority_weight" not in report:
        return None
    drawn = flat_rows(
        report.get("anchor_index", report["index"]), member.storage, sampler.device
    )
    probability = sampler.probability(drawn)
    likeliest = probability.argmax()
    # all rows are fresh, and are never drawn otherwise
    if not probability[likeliest] > 0.0:
        return 1.0
    weight = (rows * probability[likeliest]) ** -sampler.beta
    # which may have underflowed
    return float(weight / report["priority_weight"][likeliest].clamp(min=LEAST_RATIO))


def largest_normalizer(
    members: Mapping[str, ReplayBuffer], drawn: Mapping[str, float | None]
) -> float:
    """Return the largest normalizer of all members; 1 if a member has
    ``weight_norm=None``.

    ``drawn`` has the normalizers of the members with rows in the batch.
    """
    normalizers: list[float | None] = []
    for name, member in members.items():
        sampler = member._initialize().prioritized
        if sampler is None:
            normalizers.append(1.0)  # uniform draws have the weight 1
        elif sampler.weight_norm is None:
            return 1.0
        elif name in drawn:
            normalizers.append(drawn[name])
        else:
            normalizers.append(normalizer_of(member, report=None))
    return max((number for number in normalizers if number is not None), default=1.0)


def draw_rows_of(member: ReplayBuffer, count: int, is_weighted: bool) -> MemberRows:
    """Draw ``count`` rows from a member, and transform them; ``is_weighted``: with
    their stamps, also if the member has no priorities."""
    stamps = None
    # priorities must not change before the normalizer is known
    with member._locked():
        batch, report, _ = member._draw(count)
        normalizer = normalizer_of(member, report)
        if is_weighted and SAMPLED_AT not in report:
            stamps = member.storage.stamps(report["index"])
    if not member.include_info:
        merge_(batch, report)
    rows = member._finish(batch, report)[0]
    if rows.ndim != 1:
        inner = [*rows.shape[1:]]
        raise ValueError(
            f"members must store single transitions, these rows have further batch dims, {inner}"
        )
    if stamps is not None:
        set_entries_(rows, {SAMPLED_AT: stamps.to(entries_of(rows)["index"].device)})
    # TorchRL's slices have an index [B, 1]
    return MemberRows(without_lane(member, rows), normalizer)


def concatenated(batches: Sequence[Any]) -> TensorDict | None:
    """Return batches ``[B]`` one after the other; None if they differ in keys, dtypes
    or shapes, or have entries that are no tensors."""
    first, *others = map(entries_of, batches)
    if any(other.keys() != first.keys() for other in others):
        return None
    entries: dict[str, Any] = {}
    for key, value in first.items():
        values = [value, *(other[key] for other in others)]
        types = {*map(type, values)}
        joined = None
        if types == {TensorDict}:
            joined = concatenated(values)
        elif types == {Tensor} and len({(x.dtype, x.shape[1:]) for x in values}) == 1:
            joined = torch.cat(values)
        if joined is None:
            return None
        entries[key] = joined
    size = torch.Size([sum(map(len, batches)), *batches[0].shape[1:]])
    return new_tensordict(entries, size, batches[0].device)


def window_of(sampler: Sampler) -> int:
    """Return a number that must divide the batch size: the length of windows or slices,
    the number of slices, or 1."""
    if isinstance(sampler, SequenceSampler):
        return sampler.window
    if isinstance(sampler, SliceSampler):
        return sampler.slice_len or sampler.num_slices or 1
    return 1


INDICES = "index", "anchor_index"


def with_lane(rows: TensorDictBase) -> dict[str, Tensor]:
    """Return index entries ``[B]`` as ``[B, 2]``, (time step, lane); the lane is 0."""
    lane_indices = {}
    for key in INDICES:
        index = rows.get(key, None)
        if index is not None and index.ndim == 1:
            lane_indices[key] = torch.stack((index, torch.zeros_like(index)), -1)
    return lane_indices


def without_lane(member: ReplayBuffer, rows: TensorDictBase) -> TensorDictBase:
    """Undo :func:`with_lane` if the member has ``ndim=1``."""
    if has_lane(member, rows):
        for key in INDICES:
            if key in rows.keys():
                rows[key] = rows[key][:, 0]
    return rows


def has_lane(member: ReplayBuffer, rows: TensorDictBase) -> bool:
    """Whether rows of a member with ``ndim=1`` have indices with a lane."""
    index = entries_of(rows).get("index")
    return index is not None and index.ndim > 1 and member.storage.ndim == 1


def members_of(batch: TensorDictBase, names: Sequence[str]) -> dict[str, Tensor]:
    """Map each member's name to a bool mask of its rows in a batch ``[B]``; omit
    members without rows."""
    source = batch.get("source", None)
    if source is None:
        raise KeyError(
            "the batch has no 'source', the member of each row: pass a batch of this mixture"
        )
    masks = {name: source == position for position, name in enumerate(names)}
    counts = {name: int(is_own.sum()) for name, is_own in masks.items()}
    is_plain = source.ndim == 1 and as_integers(source) is not None
    if not is_plain or sum(counts.values()) != len(source):
        raise IndexError(
            f"'source' must hold one position in {[*names]} per row, [B] integers, got "
            f"{source.dtype} {source.unique().tolist()} of shape {[*source.shape]}"
        )
    return {name: is_own for name, is_own in masks.items() if counts[name]}


def own_update(member: ReplayBuffer, batch: TensorDictBase, is_own: Tensor) -> Update:
    """Return the update of a member's priorities by a batch ``[B]``.

    Rows of others are left out, or have the index -1.
    """
    parts = member.parts
    if parts.wrapper is not None:
        batch = cast("TensorDictBase", batch[is_own])
    elif has_lane(member, batch):
        batch = batch.copy()
    batch = without_lane(member, batch)
    update = parts.update_of(batch, 1, member.priority_key).reduced()
    if parts.wrapper is not None:
        return update
    index = update.index
    return update._replace(
        index=torch.where(is_own[:, None] if index.ndim > 1 else is_own, index, -1),
        td_error=torch.where(is_own, update.td_error, 0),
    )


def refuse_update(member: ReplayBuffer, update: Update) -> None:
    """Raise the error that an update of a prioritized member's priorities would
    raise."""
    storage = member.storage
    index, td_error, stamp, *_ = update
    flat = flat_rows(index, storage, device_of(storage))
    rows = len(storage)
    if stamp is not None:
        flat, _ = storage.ring.skip_stale(flat, stamp)
    if backend_of(flat) == "numba" and backend_of(td_error) == "numba" and len(flat):
        refuse_errors(td_error.reshape(-1))
        if not -1 <= int(flat.min()) <= int(flat.max()) < rows:
            refuse_priorities(flat, td_error, rows)


def kinds(data: TensorDictBase) -> dict[tuple[str, ...], Any]:
    items = data.items(include_nested=True, leaves_only=True)
    return {
        as_tuple(key): (value.dtype, value.shape[data.ndim :]) for key, value in items
    }


def refuse_difference(members: dict[str, dict[tuple[str, ...], Any]]) -> None:
    """Raise a SchemaError if members differ in keys, dtypes or shapes."""
    if not members:
        return
    (first, expected), *others = members.items()
    for name, entries in others:
        for key in sorted(expected.keys() | entries.keys()):
            if expected.get(key) == entries.get(key):
                continue
            one, other = (
                f"missing in {member!r}"
                if entry is None
                else f"{kind(*entry)} in {member!r}"
                for member, entry in (
                    (first, expected.get(key)),
                    (name, entries.get(key)),
                )
            )
            raise SchemaError(
                f"members must hold the same entries: {show_key(key)} is {one}, {other}"
            )
