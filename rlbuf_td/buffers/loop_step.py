"""The step that a loop of one's own writes with :meth:`ReplayBuffer.add_step`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.buffers.step_writer import StepWriter
from rlbuf_td.envs.specs import OBSERVATION, Key, as_array, entries
from rlbuf_td.envs.step_columns import REWARD, StepColumns, fill_, part_of
from rlbuf_td.envs.transition import GymnasiumStep, as_transition
from rlbuf_td.storages.schema import Leaf, SchemaError, show_key, walk
from rlbuf_td.storages.staged_step import StagedStep

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer


class StepLeaf(NamedTuple):
    """An array of a step, and where it goes."""

    part: int  # which field of a :class:`GymnasiumStep` has it
    path: Key  # of names, in this part
    key: Key  # of its column


class StepNode(NamedTuple):
    """A dict or tuple in a step."""

    part: int  # which field of a :class:`GymnasiumStep` has it
    path: Key  # of names, in this part
    names: Key  # of its entries


class LoopStep:
    """The memory of a step, which each call fills again, and what writes it.

    Args:
        columns: the memory.
        leaves: the arrays of a step.
        nodes: the dicts and tuples of a step; later steps must have the same.
        lane: the lane to which the step belongs; None: it is a step of all lanes.
    """

    def __init__(
        self,
        columns: StepColumns,
        leaves: list[StepLeaf],
        nodes: list[StepNode],
        lane: int | None,
    ) -> None:
        self._columns, self._nodes = columns, nodes
        #: Each leaf, with the column that it fills.
        self._leaves = [(leaf, columns.values[leaf.key]) for leaf in leaves]
        self._writer = StepWriter(columns.staged, lane)

    @classmethod
    def like(
        cls, buffer: ReplayBuffer, step: GymnasiumStep, lane: int | None
    ) -> LoopStep:
        """Return the memory for steps like ``step``.

        Raises:
            SchemaError: the step is no transition of the buffer.
            TypeError: the buffer cannot write single lanes.
        """
        storage = buffer.storage
        if storage.ndim > 2:
            raise SchemaError(
                f"add_step writes rows [T] or [T, E], these have ndim={storage.ndim}: use add(make_transition(...))"
            )
        if lane is not None:
            buffer.refuse_lanes("lane=")
        leaves = [] if storage.layout is None else storage.layout.leaves
        stored = {leaf.key: leaf for leaf in leaves}
        transition = as_transition(_as_stored(step, stored))
        schema = buffer.with_trajectory_ids(transition, transition.ndim)
        lead = storage.ndim - 1 if lane is None else 0
        if schema.ndim != lead:
            _refuse_lead(schema.shape, storage.ndim, lane)
        lanes = storage.lane_count if lead else None
        if lanes is not None and schema.shape[0] != lanes:
            raise SchemaError(
                f"'terminated' has shape {tuple(schema.shape)}, but the rows have {lanes} lanes: give the step of all "
                f"{lanes} environments, or lane=e for the step of environment e"
            )
        if not lead:
            schema = schema.unsqueeze(0)
        for key, value in [*walk(schema)]:
            leaf = stored.get(key)
            if leaf is not None and leaf.shape == value.shape[1:]:
                schema.set(key, value.to(leaf.dtype))
        staged = StagedStep.like(cast("TensorDict", schema), storage.ndim == 1)
        return cls(StepColumns(staged, not lead, {}), *_structure(step), lane)

    def fill(self, step: GymnasiumStep) -> None:
        """Copy a step to the memory.

        Raises:
            SchemaError: keys, shapes or dtypes differ from those of the first step.
        """
        try:
            for part, path, names in self._nodes:
                node: Any = part_of(step[part], path) if path else step[part]
                is_plain = type(node) is dict or type(node) is tuple
                # a name that is missing raises an error below
                if len(node if is_plain else entries(node) or ()) != len(names):
                    _refuse_entries((step._fields[part], *path), node, names)
            for (part, path, key), column in self._leaves:
                value: Any = part_of(step[part], path) if path else step[part]
                fill_(column, value, key)
        except SchemaError:
            raise
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise SchemaError(
                f"a step has other entries than the first one ({error!r}): give the same keys in each step"
            ) from error
        self._columns.fill_outcome(step.reward, step.terminated, step.truncated)

    def write(self, buffer: ReplayBuffer, *, begins: bool = False) -> None:
        """Write the step; ``begins``: another actor takes the lane over with it."""
        if begins:
            self._writer.begin(buffer)
        else:
            self._writer.write(buffer)


def _as_stored(step: GymnasiumStep, stored: dict[Key, Leaf]) -> GymnasiumStep:
    """Convert flags to bool, and rewards to float64 if the rows hold them so, as
    :class:`StepColumns` does."""
    ended = _as_flags(step.terminated, "terminated")
    cut = _as_flags(step.truncated, "truncated")
    reward = step.reward
    leaf = stored.get(REWARD)
    if leaf is not None and leaf.dtype is torch.float64:
        array = as_array(reward, REWARD)
        reward = torch.empty(array.shape, dtype=torch.float64, device="cpu")
        fill_(reward.numpy(), array, REWARD)
    return step._replace(reward=reward, terminated=ended, truncated=cut)


def _as_flags(value: object, name: str) -> np.ndarray:
    array = as_array(value, ("next", name))
    flags = np.empty(array.shape, bool)
    fill_(flags, array, ("next", name))
    return flags


def _structure(step: GymnasiumStep) -> tuple[list[StepLeaf], list[StepNode]]:
    """Return the leaves and the nodes of a step, except reward and end flags."""
    leaves = []
    nodes = []
    for name in ("observation", "action", "next_observation", "extras"):
        part = step._fields.index(name)
        value = getattr(step, name)
        for path, names in _visit(value):
            is_leaf = names is None
            if is_leaf:
                leaves.append(StepLeaf(part, path, _key_of(name, value, path)))
            else:
                nodes.append(StepNode(part, path, names))
    return leaves, nodes


def _visit(value: Any, path: Key = ()) -> Iterator[tuple[Key, Key | None]]:
    """Yield each path in nested dicts and tuples, with the names of the entries there;
    None: a leaf."""
    items = entries(value)
    if items is None:
        yield path, None
        return
    yield path, tuple(items)
    for name, item in items.items():
        yield from _visit(item, (*path, name))


def _key_of(part: str, value: Any, path: Key) -> Key:
    """Return the key under which :func:`make_transition` stores a value of a part."""
    if part == "extras":
        return path
    if part == "action":
        return ("action", *path)
    is_dict = entries(value) is not None and not isinstance(value, tuple)
    key = path if is_dict else (OBSERVATION, *path)
    return ("next", *key) if part == "next_observation" else key


def _refuse_entries(path: Key, node: Any, names: Key) -> NoReturn:
    now = [*(entries(node) or ())]
    raise SchemaError(
        f"{show_key(path)} has the entries {now}, in the first step {[*names]}: give the same in each step"
    )


def _refuse_lead(shape: torch.Size, ndim: int, lane: int | None) -> NoReturn:
    """Raise a SchemaError for a step of another number of environments than the rows
    take."""
    got = f"'terminated' has shape {tuple(shape)}"
    if lane is not None:
        how = "lane= takes the step of one environment: give one bool"
    elif ndim > 1:
        how = "rows [T, E] take steps of E environments: give bools [E], or lane=e for the step of environment e"
    else:
        how = "rows [T] take the steps of one environment: give one bool, or make the buffer with from_env(env, ...)"
    raise SchemaError(f"{got}, but {how}")
