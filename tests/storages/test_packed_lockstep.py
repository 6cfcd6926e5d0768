"""PackedStorage and RingWriter in lockstep with a naive twin: one Python list of rows per lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict, TensorDictBase

from rlbuf_td import PackedStorage, RingWriter, SchemaError
from tests.catalogue import SCHEMAS, as_bytes, transitions

Row = dict[Any, bytes]
KINDS = ("nested", "scalars", "single byte", "complex", "empty nodes", "element dims", "agents")


def rows_of(data: TensorDictBase, lead_dims: int) -> list[Row]:
    """Return every transition of ``data``, in row-major order, as the bytes of its leaves."""
    rows: list[Row] = [{} for _ in range(data.batch_size[:lead_dims].numel())]
    for key, leaf in data.items(True, True):
        raws = as_bytes(leaf if lead_dims else leaf[None]).flatten(0, max(lead_dims, 1) - 1).flatten(1)
        for row, raw in zip(rows, raws.numpy(), strict=True):
            row[key] = raw.tobytes()
    return rows


class NaiveRing:
    """What the storage and the writer should be: lists, one position at a time."""

    def __init__(self, steps: int, lanes: int) -> None:
        self.steps, self.lanes = steps, lanes
        self.rows: list[list[Row]] = [[] for _ in range(lanes)]  # by lane, then by time
        self.cursor = self.write_count = 0
        self.last: int | None = None

    @property
    def live(self) -> int:
        return len(self.rows[0])

    def put(self, step: int, rows: list[Row]) -> None:
        """Write one time step, a row per lane."""
        for lane, row in enumerate(rows):
            self.rows[lane][step : step + 1] = [row]
        self.last = step

    def push(self, rows: list[Row]) -> int:
        step = self.cursor
        self.put(step, rows)
        self.cursor = (step + 1) % self.steps
        self.write_count += 1
        return step

    def empty(self) -> None:
        self.rows = [[] for _ in range(self.lanes)]

    def at(self, steps: list[int]) -> list[Row]:
        return [self.rows[lane][step] for step in steps for lane in range(self.lanes)]


class Lockstep(RuleBasedStateMachine):
    """Random writes and reads; after each, every byte and every counter is compared."""

    @initialize(
        kind=st.sampled_from(KINDS),
        ndim=st.sampled_from([1, 2, 2, 3]),
        steps=st.integers(1, 7),
        lanes=st.integers(1, 3),
        start=st.sampled_from([0, 0, 2**31 - 3, 2**62]),
    )
    def make(self, kind: str, ndim: int, steps: int, lanes: int, start: int) -> None:
        self.schema, self.ndim = SCHEMAS[kind], ndim
        self.shape: tuple[int, ...] = {1: (), 2: (lanes,), 3: (lanes, 2)}[ndim]
        cells = torch.Size(self.shape).numel()
        self.storage, self.writer = PackedStorage(steps * cells, ndim=ndim), RingWriter()
        self.writer.register_storage(self.storage)
        self.twin = NaiveRing(steps, cells)
        self.writer._write_count = self.twin.write_count = start
        self.seed = 0

    def data(self, n: int | None, shape: tuple[int, ...] | None = None) -> TensorDict:
        self.seed += 1
        return transitions(self.schema, n, self.shape if shape is None else shape, seed=self.seed)

    def by_step(self, data: TensorDict) -> list[list[Row]]:
        rows = rows_of(data, self.ndim)
        return [rows[j : j + self.twin.lanes] for j in range(0, len(rows), self.twin.lanes)]

    def flat(self, index: torch.Tensor) -> list[int]:
        """Return a returned index, or one of its forms, as flat rows."""
        if self.ndim == 1:
            return index.tolist()
        strides = [int(np.prod(self.shape[j:])) for j in range(len(self.shape) + 1)]
        return (index * torch.tensor(strides)).sum(-1).tolist()

    # -- writes

    @rule(n=st.integers(1, 17), as_list=st.booleans())
    def extend(self, n: int, as_list: bool) -> None:
        data = self.data(n)
        index = self.writer.extend(list(data.unbind(0)) if as_list else data)
        lanes = self.twin.lanes
        steps = [self.twin.push(rows) for rows in self.by_step(data)]
        expected = [step * lanes + lane for step in steps for lane in range(lanes)]
        assert self.flat(index) == expected

    @rule()
    def add(self) -> None:
        data = self.data(None)
        index = self.writer.add(data)
        step = self.twin.push(rows_of(data, self.ndim - 1))
        if self.ndim == 1:
            assert index == step
        else:
            lanes = self.twin.lanes
            assert isinstance(index, torch.Tensor)
            assert self.flat(index) == [step * lanes + lane for lane in range(lanes)]

    @precondition(lambda self: self.twin.live)
    @rule(picks=st.lists(st.integers(0, 100), min_size=1, max_size=9), counted=st.booleans())
    def set_steps(self, picks: list[int], counted: bool) -> None:
        steps = [pick % self.twin.live for pick in picks]
        data = self.data(len(steps))
        self.storage.set(torch.tensor(steps), data, set_cursor=counted)
        last = self.twin.last
        for step, rows in zip(steps, self.by_step(data), strict=True):
            self.twin.put(step, rows)
        if not counted:
            self.twin.last = last

    @precondition(lambda self: self.twin.live < self.twin.steps)
    @rule(more=st.integers(1, 4), overlap=st.integers(0, 3), backwards=st.booleans())
    def set_appends(self, more: int, overlap: int, backwards: bool) -> None:
        live = self.twin.live
        steps = list(range(max(0, live - overlap), min(live + more, self.twin.steps)))
        data = self.data(len(steps))
        self.storage.set(steps[::-1] if backwards else slice(steps[0], steps[-1] + 1), data)
        rows = self.by_step(data)
        for step, row in zip(steps, rows[::-1] if backwards else rows, strict=True):
            self.twin.put(step, row)
        self.twin.last = steps[0] if backwards else steps[-1]

    @precondition(lambda self: self.twin.live)
    @rule(picks=st.lists(st.integers(0, 1000), max_size=9), as_mask=st.booleans())
    def replace(self, picks: list[int], as_mask: bool) -> None:
        cells = [pick % (self.twin.live * self.twin.lanes) for pick in picks]
        shape = (self.twin.live, *self.shape)
        region: Any
        if as_mask:
            region = torch.zeros(shape, dtype=torch.bool)
            region.view(-1)[cells] = True
            cells = sorted(set(cells))
        else:
            region = tuple(torch.from_numpy(part) for part in np.unravel_index(np.array(cells, dtype=np.int64), shape))
        data = self.data(len(cells), ())
        self.storage.set(region, data)
        for cell, row in zip(cells, rows_of(data, 1), strict=True):
            self.twin.rows[cell % self.twin.lanes][cell // self.twin.lanes] = row

    @precondition(lambda self: self.storage.layout is not None)
    @rule(n=st.integers(1, 9), wrong=st.sampled_from(["missing", "unknown", "dtype", "shape", "lanes"]))
    def refused(self, n: int, wrong: str) -> None:
        data = self.data(n)
        key, leaf = next(iter(data.items(True, True)))
        if wrong == "missing":
            del data[key]
        elif wrong == "unknown":
            data["unknown"] = torch.zeros(data.batch_size)
        elif wrong == "dtype":
            data[key] = torch.zeros_like(leaf, dtype=torch.float16)
        elif wrong == "shape":
            data[key] = torch.stack([leaf, leaf], -1)
        else:
            data = self.data(n, (*self.shape, 2))
        for write in (
            lambda: self.writer.extend(data),
            lambda: self.writer.add(data[0]),
            lambda: self.storage.set(slice(0, n), data),
        ):
            with pytest.raises((SchemaError, IndexError)):
                write()

    @precondition(lambda self: self.storage.layout is not None)
    @rule(how=st.sampled_from(["storage and writer", "state", "state"]))
    def empty_or_reload(self, how: str) -> None:
        if how == "state":
            self.storage.load_state_dict(self.storage.state_dict())
            self.writer.load_state_dict(self.writer.state_dict())
        else:
            self.storage._empty()
            self.writer._empty(empty_write_count=False)
            self.twin.empty()
            self.twin.cursor = 0

    # -- reads

    @precondition(lambda self: self.twin.live)
    @rule(picks=st.lists(st.integers(0, 100), max_size=9), how=st.sampled_from(["tensor", "negative", "list", "cells"]))
    def read(self, picks: list[int], how: str) -> None:
        live, lanes = self.twin.live, self.twin.lanes
        steps = [pick % live for pick in picks]
        if how == "cells":
            cells = [pick % (live * lanes) for pick in picks]
            batch = self.storage.gather(torch.tensor(cells, dtype=torch.int64))
            assert rows_of(batch, 1) == [self.twin.rows[cell % lanes][cell // lanes] for cell in cells]
            return
        index: Any = {
            "tensor": torch.tensor(steps, dtype=torch.int64),
            "negative": torch.tensor([step - live for step in steps], dtype=torch.int64),
            "list": steps,
        }[how]
        batch = self.storage.get(index)
        assert rows_of(batch, self.ndim) == self.twin.at(steps)
        batch.apply_(lambda leaf: leaf.zero_())  # fresh memory: the invariant would see it

    @precondition(lambda self: self.twin.live)
    @rule(start=st.integers(-9, 9), stop=st.integers(-9, 9), step=st.integers(1, 3))
    def read_slice(self, start: int, stop: int, step: int) -> None:
        steps = list(range(self.twin.live))[start:stop:step]
        assert rows_of(self.storage.get(slice(start, stop, step)), self.ndim) == self.twin.at(steps)

    # -- what must always hold

    @invariant()
    def rows_and_counters_agree(self) -> None:
        if not hasattr(self, "twin"):
            return
        twin, storage = self.twin, self.storage
        assert len(storage) == twin.live * twin.lanes
        assert (self.writer._cursor, self.writer._write_count) == (twin.cursor, twin.write_count)
        assert storage._last_cursor_index == twin.last
        assert storage._is_full == (twin.live == twin.steps)
        if storage.layout is not None:
            assert storage.shape == (twin.live, *self.shape)
            assert rows_of(storage[:], self.ndim) == twin.at(list(range(twin.live)))
            key = next(iter(storage.layout.leaves)).key
            assert storage[key].shape[: self.ndim] == (twin.live, *self.shape)


TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
