"""Ten thousand writes that are wrong in one random way: each is refused by name, and changes no byte."""

from __future__ import annotations

from collections.abc import Callable
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
NODES = (("inner",), ("next",), ("inner", "deeper"))


def data_of(lead: tuple[int, ...]) -> TensorDict:
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


def bad_errors(shape: torch.Size, pick: int) -> torch.Tensor:
    td_error = torch.rand(shape)
    td_error.view(-1)[0] = [torch.nan, torch.inf, -torch.inf][pick % 3]
    return td_error


def with_another(data: TensorDict, key: Any, value: torch.Tensor) -> TensorDict:
    return data.clone().set(key, value)


#: By name: wrong data from right data, a random key and a random number, and what the error must name besides the key.
MUTATIONS: dict[str, tuple[Callable[[TensorDict, Any, int], Any], str]] = {
    "without a key": (lambda data, key, pick: data.exclude(key), ""),
    "unknown key": (lambda data, key, pick: data.set((*key[:-1], f"k{pick}"), torch.zeros(*data.shape, 2)), r"k\d+"),
    "dtype": (
        lambda data, key, pick: data.set(key, data[key].to([d for d in DTYPES if d != data[key].dtype][pick % 7])),
        "",
    ),
    "shape": (lambda data, key, pick: data.set(key, torch.stack([data[key]] * (1 + pick % 2), -1)), ""),
    "lanes": (lambda data, key, pick: data_of((LANES + 1 + pick % 3, *data.shape[1:])), "lanes|shape"),
    "device": (lambda data, key, pick: data.set(key, data[key].to("meta")), ""),
    "a node for a leaf": (lambda data, key, pick: data.set(key, TensorDict({"part": data[key]}, data.shape)), ""),
    "a leaf for a node": (
        lambda data, key, pick: data.set(NODES[pick % 3], torch.zeros(*data.shape, 2)),
        "inner|next|deeper",
    ),
    "no numbers": (lambda data, key, pick: data.set(key, NonTensorData("text", batch_size=data.shape)), ""),
    "layout": (lambda data, key, pick: data.set(("inner", "vector"), data["inner", "vector"].to_sparse()), "vector"),
    "type": (lambda data, key, pick: [data.to_dict(), None, data["action"], "rows"][pick % 4], "TensorDict|Tensor"),
    "td errors": (lambda data, key, pick: data.set("td_error", bad_errors(data.shape, pick)), "td_error|TD error|NaN"),
    "ragged": (
        lambda data, key, pick: LazyStackedTensorDict(
            data, with_another(data, key, torch.zeros(*data.shape, 9, dtype=data[key].dtype)), stack_dim=0
        ),
        "",
    ),
}


def buffer(ndim: int, prioritized: bool, reserved: bool) -> ReplayBuffer:
    sampler = ProportionalSampler(STEPS * LANES) if prioritized else UniformSampler()
    schema = data_of(() if ndim == 1 else (LANES,))
    rb = ReplayBuffer.from_schema(schema, STEPS * LANES, sampler=sampler)
    if not reserved:
        rb.extend(data_of((LANES, 2)) if ndim == 2 else data_of((2 * LANES,)))
    return rb


def snapshot(rb: ReplayBuffer) -> tuple[Any, ...]:
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
    more_keys = ("unknown key", *(() if prioritized else ("td errors",)))  # the first write may have them
    while sum(refused.values()) < CASES // 8:
        name = list(MUTATIONS)[generator.integers(len(MUTATIONS))]
        if (reserved and name in more_keys) or (ndim == 1 and name == "lanes"):
            continue
        single, key = bool(generator.integers(2)), PATHS[generator.integers(len(PATHS))]
        lanes, steps = (LANES,) * (ndim - 1), () if single else (int(generator.integers(1, 2 * STEPS)),)
        mutate, culprit = MUTATIONS[name]
        bad = mutate(data_of((*lanes, *steps)), key, int(generator.integers(1000)))
        write = rb.add if single else rb.extend
        with pytest.raises((SchemaError, ValueError, TypeError), match=culprit or key[-1]) as caught:
            write(bad)
        refused[name] += 1
        assert snapshot(rb) == before, (name, caught.value)
    assert sum(count > 50 for count in refused.values()) >= len(MUTATIONS) - 3
    good = data_of((LANES, 4) if ndim == 2 else (4,))
    rb.extend(good)
    assert torch.equal(rb.last(4)["action"], good["action"].transpose(0, -1))
