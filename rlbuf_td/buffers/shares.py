"""The fraction of a batch that each member of a :class:`~rlbuf_td.ReplayBufferMixture` provides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torchrl.data.replay_buffers import Sampler

from rlbuf_td.checkpoint import load_state, save_state
from rlbuf_td.storages.checks import as_number, fraction

_BAD_NAME = re.compile(r"$|[._]|by_name$|.*[/\\]").match  # members are folders of a dump


class Shares(Sampler):
    """The members' shares as attributes; setting a share scales the other shares, so that the sum stays 1."""

    by_name: dict[str, float]

    def __init__(self, shares: Mapping[str, float]) -> None:
        for name in shares:
            if not isinstance(name, str) or not name.isprintable() or hasattr(Sampler, name) or _BAD_NAME(name):
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

    def sample(self, storage: Any, batch_size: int) -> Any:
        raise NotImplementedError("the shares of a mixture cannot draw rows: sample the mixture or a member")

    def _empty(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return dict(self.by_name)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.keys() != self.by_name.keys():
            raise ValueError(f"the saved shares belong to {', '.join(state_dict)}, these to {', '.join(self.by_name)}")
        self.__dict__["by_name"] = Shares({name: state_dict[name] for name in self.by_name}).by_name

    def dumps(self, path: Any) -> None:
        save_state(path, type(self).__name__, self.state_dict())

    def loads(self, path: Any) -> None:
        self.load_state_dict(load_state(path, type(self).__name__))

    def __repr__(self) -> str:
        return "Shares(" + ", ".join(f"{name}={share:.4g}" for name, share in self.by_name.items()) + ")"
