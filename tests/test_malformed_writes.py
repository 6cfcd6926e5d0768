"""Ten thousand writes that are wrong in one random way: each is refused by name, and changes no byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from rlbuf_td import ProportionalSampler, ReplayBuffer, SchemaError, UniformSampler

CASES, LANES, STEPS = 10_000, 3, 20
DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bool)
PATHS: tuple[tuple[str, ...], ...] = (
    ("action",),
    ("image",),
    ("inner", "vector"),
    ("inner", "deeper", "mask"),
    ("next", "image"),
    ("next", "reward"),
    ("next", "done"),
)


def data_of(lead: tuple[int, ...]) -> TensorDict:
    """Return transitions of a nested, mixed schema."""
    image = torch.randint(256, (*lead, 2, 3, 3), dtype=torch.uint8)
    return TensorDict(
        {
            "action": torch.randint(4, lead),
            "image": image,
            "inner": {"vector": torch.randn(*lead, 5), "deeper": {"mask": torch.rand(*lead, 4) < 0.5}},
            "next": {"image": image + 1, "reward": torch.randn(*lead, 1), "done": torch.rand(*lead, 1) < 0.1},
        },
        lead,
    )


def entry(generator: np.random.Generator) -> tuple[str, ...]:
    return PATHS[generator.integers(len(PATHS))]


def replaced(data: TensorDict, key: Any, value: Any) -> tuple[Any, str]:
    data.set(key, value)
    return data, key[-1]


# Each takes right data, and returns wrong data and what the error must name.


def without_a_key(data: TensorDict, generator: np.random.Generator) -> tuple[Any, str]:
    key = entry(generator)
    return data.exclude(key), key[-1]


def with_an_unknown_key(data: TensorDict, generator: np.random.Generator) -> tuple[Any, str]:
    key = (*entry(generator)[:-1], f"k{generator.integers(1000)}")
    return replaced(data, key, torch.zeros(*data.shape, 2))


def with_another_dtype(data: TensorDict, generator: np.random.Generator) -> tuple[Any, str]:
    key = entry(generator)
    dtypes = [dtype for dtype in DTYPES if dtype != data[key].dtype]
    return replaced(data, key, data[key].to(dtypes[generator.integers(len(dtypes))]))


def with_another_shape(data: TensorDict, generator: np.random.Generator) -> tuple[Any, str]:
    key = entry(generator)
    x = data[key]
    return replaced(data, key, [x.unsqueeze(-1), torch.stack([x, x], -1), x[..., None, None]][generator.integers(3)])


def of_other_lanes(data: TensorDict, generator: np.random.Generator) -> tuple[Any, str]:
    return data_of((LANES + int(generator.integers(1, 4)), *data.shape[1:])), "lanes|shape"


def on_another_device(data: TensorDict, generator: np.random.Generator) -> tuple[Any, str]:
    key = entry(generator)
    return replaced(data, key, data[key].to("meta"))


def nested_where_a_tensor_was(data: TensorDict, generator: np.random.Generator) -> tuple[Any, str]:
    key = entry(generator)
    return replaced(data, key, TensorDict({"part": data[key]}, data.shape))


def flat_where_entries_were(data: TensorDict, generator: np.random.Generator) -> tuple[Any, str]:
    key: Any = [("inner",), ("next",), ("inner", "deeper")][generator.integers(3)]
    return replaced(data, key, torch.zeros(*data.shape, 2))


def not_of_numbers(data: TensorDict, generator: np.random.Generator) -> tuple[Any, str]:
    return replaced(data, entry(generator), NonTensorData("text", batch_size=data.shape))


def of_another_layout(data: TensorDict, generator: np.random.Generator) -> tuple[Any, str]:
    return replaced(data, ("inner", "vector"), data["inner", "vector"].to_sparse())


def of_another_type(data: TensorDict, generator: np.random.Generator) -> tuple[Any, str]:
    return [data.to_dict(), None, data["action"], "rows"][generator.integers(4)], "TensorDict"


def with_bad_td_errors(data: TensorDict, generator: np.random.Generator) -> tuple[Any, str]:
    td_error = torch.rand(data.shape)
    td_error.view(-1)[0] = [torch.nan, torch.inf, -torch.inf][generator.integers(3)]
    return data.set("td_error", td_error), "TD error|td_error|NaN"


def ragged(data: TensorDict, generator: np.random.Generator) -> tuple[Any, str]:
    key = entry(generator)
    other, name = replaced(data.clone(), key, torch.zeros(*data.shape, 9, dtype=data[key].dtype))
    return LazyStackedTensorDict(data, other, stack_dim=0), name


MUTATIONS = (
    without_a_key,
    with_an_unknown_key,
    with_another_dtype,
    with_another_shape,
    of_other_lanes,
    on_another_device,
    nested_where_a_tensor_was,
    flat_where_entries_were,
    not_of_numbers,
    of_another_layout,
    of_another_type,
    with_bad_td_errors,
    ragged,
)


def buffer(ndim: int, prioritized: bool, reserved: bool) -> ReplayBuffer:
    sampler = ProportionalSampler(STEPS * LANES) if prioritized else UniformSampler()
    schema = data_of(() if ndim == 1 else (LANES,))
    rb = ReplayBuffer.from_schema(schema, STEPS * LANES, sampler=sampler)
    if not reserved:
        rb.extend(data_of((LANES, 2)) if ndim == 2 else data_of((2 * LANES,)))
    return rb


def snapshot(rb: ReplayBuffer) -> tuple[Any, ...]:
    """Return all that a write could change."""
    storage, writer = rb.storage, rb.writer
    state = storage.state_dict()
    priorities = rb.sampler.priority(torch.arange(STEPS * LANES)) if isinstance(rb.sampler, ProportionalSampler) else 0
    return (
        *(len(storage), writer._cursor, rb.write_count, storage.is_reserved, storage._last_cursor_index_value.value),
        str(state["layout"]),
        storage.rows.matrix.view(torch.uint8).numpy().tobytes(),
        state["rows"].view(torch.uint8).numpy().tobytes(),
        bytes(torch.as_tensor(priorities).numpy().tobytes()),
    )


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("reserved", [False, True])
def test_no_malformed_write_changes_anything(ndim, prioritized, reserved):
    generator = np.random.default_rng(ndim + 2 * prioritized + 4 * reserved)
    torch.manual_seed(0)
    rb = buffer(ndim, prioritized, reserved)
    before, refused = snapshot(rb), dict.fromkeys(MUTATIONS, 0)
    while sum(refused.values()) < CASES // 8:
        mutation = MUTATIONS[generator.integers(len(MUTATIONS))]
        single = bool(generator.integers(2))
        lanes = (LANES,) if ndim == 2 else ()
        steps = () if single else (int(generator.integers(1, 2 * STEPS)),)
        data = data_of((*lanes, *steps))
        more_keys = (with_an_unknown_key, *(() if prioritized else (with_bad_td_errors,)))  # the first write may have
        if (reserved and mutation in more_keys) or (ndim == 1 and mutation is of_other_lanes):
            continue
        bad, culprit = mutation(data, generator)
        write = rb.add if single else rb.extend
        with pytest.raises((SchemaError, ValueError, TypeError), match=culprit) as caught:
            write(bad)
        refused[mutation] += 1
        assert snapshot(rb) == before, (mutation, caught.value)
    assert sum(count > 50 for count in refused.values()) >= len(MUTATIONS) - 3
    good = data_of((LANES, 4) if ndim == 2 else (4,))
    rb.extend(good)
    assert torch.equal(rb.last(4)["action"], good["action"].transpose(0, -1))
