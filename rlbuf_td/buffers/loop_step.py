"""The step that a loop of one's own writes with :meth:`ReplayBuffer.add_step`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tensordict import TensorDict

from rlbuf_td.buffers.step_writer import StepWriter
from rlbuf_td.envs.specs import OBSERVATION, Key, Paths, entries
from rlbuf_td.envs.step_columns import StepColumns, part_of
from rlbuf_td.envs.transition import make_transition
from rlbuf_td.storages.schema import SchemaError, walk
from rlbuf_td.storages.staged_step import StagedStep
from rlbuf_td.storages.writes import Beginning

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer


class GymnasiumStep(NamedTuple):
    """One step of Gymnasium environments, as :func:`make_transition` takes it."""

    observation: Any
    action: Any
    reward: Any
    next_observation: Any
    terminated: Any
    truncated: Any
    extras: Mapping[str, Any]

    def parts(self) -> dict[str, Any]:
        """Return the parts that may have keys of their own."""
        return {
            "observation": self.observation,
            "action": self.action,
            "next": self.next_observation,
            "extras": self.extras,
        }


class LoopStep:
    """The memory of a step, which each call fills again, and what writes it.

    Args:
        columns: the memory.
        nodes: the number of entries of each dict or tuple in a step, by the part of the
            step and the path in it. Later steps must have as many.
        lane: the lane to which the step belongs; None: it is a step of all lanes.
    """

    def __init__(
        self, columns: StepColumns, nodes: list[tuple[str, Key, int]], lane: int | None
    ) -> None:
        self.columns, self._nodes, self._lane = columns, nodes, lane
        self._writer = StepWriter(columns.staged, lane)

    @classmethod
    def like(
        cls, buffer: ReplayBuffer, step: GymnasiumStep, lane: int | None
    ) -> LoopStep:
        """Return the memory for steps like ``step``.

        Raises:
            SchemaError: the step is no transition of the buffer.
        """
        transition = make_transition(*step[:-1], **step.extras)
        schema = buffer.with_trajectory_ids(transition, transition.ndim)
        storage = buffer.storage
        lead = storage.ndim - 1 if lane is None else 0
        if schema.ndim != lead:
            expected = "a single environment" if not lead else "E environments"
            raise SchemaError(
                f"'terminated' has shape {[*schema.shape]}, expected that of {expected}, because the rows are "
                f"{'[T, E]' if storage.ndim > 1 else '[T]'} and lane={lane}"
            )
        if not lead:
            schema = schema.unsqueeze(0)
        layout = storage.layout
        leaves = [] if layout is None else layout.leaves
        stored = {leaf.key: leaf for leaf in leaves}
        for key, value in [*walk(schema)]:
            leaf = stored.get(key)
            if leaf is not None and leaf.shape == value.shape[1:]:
                schema.set(key, value.to(leaf.dtype))
        paths, nodes = _structure(step)
        staged = StagedStep.like(cast("TensorDict", schema), storage.ndim == 1)
        return cls(StepColumns(staged, not lead, paths), nodes, lane)

    def fill(self, step: GymnasiumStep) -> None:
        """Copy a step to the memory.

        Raises:
            SchemaError: keys, shapes or dtypes differ from those of the first step.
        """
        values = step.parts()
        try:
            for part, path, size in self._nodes:
                node = part_of(values[part], path)
                if len(node) != size:
                    _refuse_entries(part, path, node, size)
            for part, value in values.items():
                self.columns.fill(part, value)
        except (KeyError, IndexError, TypeError) as error:
            raise SchemaError(
                f"this step has other entries than the first one ({error!r}): give the same keys in each step"
            ) from error
        self.columns.fill_outcome(step.reward, step.terminated, step.truncated)

    def write(self, buffer: ReplayBuffer, *, begins: bool = False) -> None:
        """Write the step; ``begins``: another actor takes the lane over with it."""
        if begins:
            buffer.extend(self.columns.staged.rows, lanes=Beginning(self._lane or 0))
        else:
            self._writer.write(buffer)


def _structure(
    step: GymnasiumStep,
) -> tuple[dict[str, Paths], list[tuple[str, Key, int]]]:
    """Return where the values of each part go, and the nodes of the parts."""
    paths: dict[str, Paths] = {}
    nodes: list[tuple[str, Key, int]] = []
    for part, value in step.parts().items():
        leaves: list[Key] = []
        for path, size in _visit(value):
            if size is None:
                leaves.append(path)
            else:
                nodes.append((part, path, size))
        paths[part] = [(_key_of(part, value, path), path) for path in leaves]
    return paths, nodes


def _visit(value: Any, path: Key = ()) -> Any:
    """Yield each path in nested dicts and tuples, with the number of entries there;
    None: a leaf."""
    items = entries(value)
    if items is None:
        yield path, None
        return
    yield path, len(items)
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
    return ("next", *key) if part == "next" else key


def _refuse_entries(part: str, path: Key, node: Any, size: int) -> None:
    where = ", ".join((part, *path))
    names = [*(entries(node) or ())]
    raise SchemaError(
        f"{where} has the entries {names} in this step, {size} in the first one: give the same keys"
    )
