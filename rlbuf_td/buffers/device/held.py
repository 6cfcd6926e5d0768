"""What a feed goes on with after a dump, a load or a journey to another process, as plain state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from rlbuf_td.buffers.device.packet import Drawn

_AGE, _AGES = "age", 1 << 62  # an entry of this name tells batches that a feed has drawn from TorchRL's


class Held(NamedTuple):
    """Batches drawn ahead, and TD errors that are not in place: of which flat rows, and when these were drawn."""

    drawn: list[Drawn]
    learned: list[tuple[torch.Tensor, torch.Tensor, int]]

    def state(self, now: int) -> dict[str, Any]:
        """Return it as plain state, times as ages: how many time steps had been written since, at ``now``.

        What is loaded into a buffer that is in use goes on by another clock.
        """
        queue = (
            (drawn.rows, {"index": drawn.flat, _AGE: now - drawn.sampled_at, "report": drawn.report})
            for drawn in self.drawn
        )
        return {"queue": tuple(queue), "learned": tuple((*errors, now - then) for *errors, then in self.learned)}


def held_of(state: dict[str, Any], now: int) -> Held:
    """Return what :meth:`Held.state` described, by a clock that stands at ``now``.

    Raises:
        ValueError: it describes nothing such.
    """
    drawn, learned = [], []
    for rows, said in _fed(state):
        flat, age, report = said.get("index"), said[_AGE], said.get("report")
        if not isinstance(rows, TensorDictBase) or not isinstance(report, dict) or rows.shape[:1] != _rows(flat):
            raise ValueError("a batch that was drawn ahead must have rows, their places and a report")
        drawn.append(Drawn(flat, report, rows, now - _aged(age)))
    for flat, td_error, age in state.get("learned", ()):
        if not isinstance(td_error, torch.Tensor) or td_error.shape != _rows(flat):
            raise ValueError("TD errors that were on their way must be one a row")
        learned.append((flat, td_error, now - _aged(age)))
    return Held(drawn, learned)


def unfed(state: dict[str, Any]) -> dict[str, Any]:
    """Return the same state without batches that a feed has drawn."""
    fed = [id(entry) for entry in _fed(state)]
    return state | {"queue": [entry for entry in state["queue"] if id(entry) not in fed]} if fed else state


def _fed(state: dict[str, Any]) -> list[Any]:
    queue = state.get("queue")
    entries = queue if isinstance(queue, list | tuple) else ()
    return [entry for entry in entries if len(entry) == 2 and isinstance(entry[1], dict) and _AGE in entry[1]]


def _rows(flat: Any) -> torch.Size | None:
    return flat.shape if isinstance(flat, torch.Tensor) and flat.dtype is torch.int64 and flat.ndim == 1 else None


def _aged(age: Any) -> int:
    if type(age) is not int or not 0 <= age < _AGES:
        raise ValueError(f"rows were drawn so many time steps ago: a whole number of 62 bits, got {age!r}")
    return age
