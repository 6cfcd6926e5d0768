"""Bad input is refused by an error of the right class, with the right word, before
anything has changed.

Each room of the package has a table in ``tests/refusals``: ``REFUSALS`` maps
``(name, maker)`` to rows ``(call, said)``. The runner makes two equal objects, gives one
of them to ``call``, and expects an error of a class before the colon of ``said``, with
the words after it (a regular expression). Then the object must hold what it held before, byte for byte, and its next
batch and its next write must equal those of the other object. A name with ``drawn`` is
of calls that have drawn random numbers before they can know; all others leave the
generator alone. To add a refusal, add a row: one line, if possible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from tests.catalogue import as_bytes
from tests.refusals import arguments, buffers, envs, samplers, storages

ROOMS = arguments, storages, envs, samplers, buffers
ROWS = [
    pytest.param("drawn" in name, make, *row, id=f"{name}: {row[-1]}")
    for room in ROOMS
    for (name, make), rows in room.REFUSALS.items()
    for row in rows
]


def contents(made):
    """Return all that an object holds as plain values, tensors as bytes."""
    if isinstance(made, torch.Tensor):
        return made.dtype, tuple(made.shape), as_bytes(made).numpy().tobytes()
    if isinstance(made, torch.Generator):
        return contents(made.get_state())
    if isinstance(made, TensorDictBase):
        return contents(made.to_dict())
    if isinstance(made, Mapping):
        return {key: contents(value) for key, value in made.items()}
    if isinstance(made, list | tuple):
        return [contents(each) for each in made]
    found = [contents(made.state_dict())] if hasattr(made, "state_dict") else []
    inner = "_rng", "buffer", "episode_stats", "write_count"
    found += [contents(getattr(made, name)) for name in inner if hasattr(made, name)]
    return found or re.sub(" at 0x[0-9a-f]+", "", repr(made))


def what_follows(made):
    """Return the next batch of a buffer and what it holds after its next write, or the
    errors."""
    found: list[Any] = []
    for go_on in (
        lambda: made.sample(),
        lambda: made.extend(made.last(1)),
        lambda: made[:],
    ):
        try:
            found.append(contents(go_on()))
        except Exception as error:  # noqa: BLE001  of what has none
            found.append((type(error), str(error)))
    return found


@pytest.mark.parametrize(("is_drawn", "make", "call", "said"), ROWS)
def test_it_is_refused_and_nothing_changes(is_drawn, make, call, said):
    torch.manual_seed(0)
    made = make()
    random = torch.get_rng_state()
    before = contents(made)
    classes, _, words = said.partition(": ")
    with pytest.raises(Exception, match=words) as refused:
        call(made)
    classes_of_error = {each.__name__ for each in type(refused.value).__mro__}
    assert not classes_of_error.isdisjoint(classes.split("|"))
    if is_drawn:
        torch.set_rng_state(random)
    assert torch.equal(torch.get_rng_state(), random)
    assert contents(made) == before
    found = what_follows(made)
    torch.manual_seed(0)
    assert found == what_follows(make())
