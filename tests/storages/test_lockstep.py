"""A plain and a deduplicated storage in lockstep with lists of rows: the same bytes, whatever is done to them."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import TensorDictMaxValueWriter, TensorDictRoundRobinWriter

from rlbuf_td import PackedStorage, RingWriter, SchemaError
from rlbuf_td.storages.rows.dedup import DedupRows
from rlbuf_td.storages.write_clock import LAST
from tests.catalogue import SCHEMAS, as_bytes, assert_same, transitions
from tests.kernels.invariants import check_pool
from tests.storages.observations import FRAMES, Lanes

Row = dict[Any, bytes]
HOW: dict[str, dict[str, Any]] = {
    "all": {"share_next": True},
    "auto": {"share_next": "auto"},
    "one key": {"share_next": ["observation"]},
    "a nested key": {"share_next": [("agent", "goal")]},
    "what does not repeat": {"share_next": ["clock", "observation"]},
    "frames": {"frames": {"pixels": FRAMES}},
    "frames, and the rest": {"share_next": True, "frames": {"pixels": FRAMES}},
    "frames of the root": {"frames": {"pixels": FRAMES}},
    "frames along another dim": {"frames": {"pixels": (FRAMES, -1)}},
}
KINDS = ("nested", "scalars", "single byte", "complex", "empty nodes", "element dims", "agents")
WRITERS = [RingWriter, RingWriter, TensorDictRoundRobinWriter, TensorDictMaxValueWriter]


def rows_of(data: TensorDictBase, lead_dims: int) -> list[Row]:
    """Return every transition of ``data``, in row-major order, as the bytes of its leaves."""
    rows: list[Row] = [{} for _ in range(data.batch_size[:lead_dims].numel())]
    for key, leaf in data.items(True, True):
        raws = as_bytes(leaf).flatten(0, lead_dims - 1).flatten(1)
        for row, raw in zip(rows, raws.numpy(), strict=True):
            row[key] = raw.tobytes()
    return [{key: value for key, value in row.items() if key != "index"} for row in rows]


class Lockstep(RuleBasedStateMachine):
    @initialize(
        how=st.sampled_from([*HOW, *KINDS]),
        ndim=st.sampled_from([1, 1, 2, 3]),
        steps=st.integers(1, 9),
        lanes=st.integers(1, 3),
        alphabet=st.sampled_from([1, 2, 3, 50]),
        often=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        seed=st.integers(0, 999),
        grows=st.sampled_from([False, False, False, True]),
        writer=st.sampled_from(WRITERS),
        shared=st.sampled_from([False, False, True]),
        start=st.sampled_from([0, 0, 2**31 - 3, 2**62]),
    )
    def make(self, how, ndim, steps, lanes, alphabet, often, seed, grows, writer, shared, start) -> None:
        self.how, self.ndim, self.often, self.steps = how, ndim, often, steps
        self.shape: tuple[int, ...] = {1: (), 2: (lanes,), 3: (lanes, 2)}[ndim]
        self.lanes = torch.Size(self.shape).numel()
        self.world, self.ranks = Lanes(self.lanes, seed, alphabet), torch.Generator().manual_seed(seed)
        self.seed = seed
        names = ("allocate",) if grows else ()
        self.patches = [patch(f"rlbuf_td.storages.{name}.grows", lambda device: True) for name in names]
        for each in self.patches:
            each.start()
        self.plain = PackedStorage(steps * self.lanes, ndim=ndim)
        self.dedup = PackedStorage(steps * self.lanes, ndim=ndim, **HOW.get(how, {"share_next": "auto"}))
        if shared and not grows:  # shared memory is always the CPU's
            self.dedup.share_memory_()
        self.storages = [self.plain, self.dedup]
        self.is_ring = writer is not TensorDictMaxValueWriter or ndim > 1 or how in KINDS
        if how in KINDS or (self.is_ring and writer is TensorDictMaxValueWriter):
            writer = RingWriter
        self.writers = [writer() if self.is_ring else writer(rank_key="rank") for _ in range(2)]
        for one, storage in zip(self.writers, self.storages, strict=True):
            one.register_storage(storage)
        self.write_count = start if writer is RingWriter else 0
        for one in self.writers if self.is_ring else []:
            one._write_count = self.write_count
        self.rows: list[list[Row]] = []  # by time step, one a lane: what a ring holds
        self.cursor, self.last = 0, -1
        self.follows_rows = hasattr(writer, "find_cursor")  # TorchRL's writers go on at a cursor of their own
        self.extend(1, "as it is")

    def teardown(self) -> None:
        for each in getattr(self, "patches", []):
            each.stop()

    def data(self, count: int) -> TensorDict:
        """Return ``[count, *lanes]`` rows: of a catalogued schema, or such that mostly follow each other."""
        if self.how in KINDS:
            self.seed += 1
            return transitions(SCHEMAS[self.how], count, self.shape, seed=self.seed)
        data = self.world.steps(count, self.often).view(count, *self.shape)
        if self.how == "frames of the root":
            data = data.exclude(("next", "pixels"))
        if self.how == "frames along another dim":
            for key in ("pixels", ("next", "pixels")):
                data[key] = data[key].movedim(-3, -1).contiguous()
        data["rank"] = torch.rand(count, *self.shape, generator=self.ranks)
        return data

    def as_stored(self, data: TensorDict) -> TensorDict:
        if "index" in self.plain._storage.keys():
            like = self.plain._storage["index"]
            data["index"] = torch.zeros((*data.batch_size, *like.shape[data.ndim :]), dtype=like.dtype)
        return data

    def put(self, steps: list[int], data: TensorDict) -> None:
        rows = rows_of(data, self.ndim)
        for j, step in enumerate(steps):
            self.rows[step : step + 1] = [rows[j * self.lanes : (j + 1) * self.lanes]]

    def push(self, data: TensorDict) -> list[int]:
        """Take in what a ring has written; return its flat rows."""
        steps = [(self.cursor + j) % self.steps for j in range(len(data))]
        self.put(steps, data)
        self.cursor, self.last = (steps[-1] + 1) % self.steps, steps[-1]
        self.write_count += len(steps)
        return [step * self.lanes + lane for step in steps for lane in range(self.lanes)]

    def flat(self, index: torch.Tensor) -> list[int]:
        if self.ndim == 1:
            return torch.as_tensor(index).reshape(-1).tolist()
        strides = [int(np.prod(self.shape[j:])) for j in range(len(self.shape) + 1)]
        return (index * torch.tensor(strides)).sum(-1).tolist()

    @property
    def live(self) -> int:
        return len(self.plain) // self.lanes

    @rule(count=st.integers(1, 25), form=st.sampled_from(["as it is", "transposed", "list"]))
    def extend(self, count: int, form: str) -> None:
        data = self.data(count)
        if form == "transposed" and self.ndim == 2:  # as collectors give it: other strides, the same rows
            data = data.transpose(0, 1).contiguous().transpose(0, 1)
        if isinstance(self.writers[0], TensorDictRoundRobinWriter):
            data = data[: self.plain._max_size_along_dim0(batched_data=data)]
        is_ours = isinstance(self.writers[0], RingWriter)
        found = [w.extend(list(data.unbind(0)) if form == "list" and is_ours else data.clone()) for w in self.writers]
        written = self.push(data) if self.is_ring else []
        assert not is_ours or [self.flat(index) for index in found] == [written, written]

    @rule()
    def add(self) -> None:
        data = self.data(1)
        found = [writer.add(data[0].clone()) for writer in self.writers]
        written = self.push(data) if self.is_ring else []
        if isinstance(self.writers[0], RingWriter):
            assert [self.flat(index) for index in found] == [written, written]

    @precondition(lambda self: self.is_ring)
    @rule(picks=st.lists(st.integers(0, 100), min_size=1, max_size=9), counted=st.booleans(), how=st.integers(0, 2))
    def set_steps(self, picks: list[int], counted: bool, how: int) -> None:
        steps = [pick % self.live for pick in picks]
        if how == 2:
            steps = list(range(min(steps), max(steps) + 1))
        data = self.as_stored(self.data(len(steps)))
        cursor: Any = [steps, torch.tensor(steps), slice(steps[0], steps[-1] + 1)][how]
        for storage in self.storages:
            storage.set(cursor, data, set_cursor=counted)
        self.put(steps, data)
        if counted:
            self.last = steps[-1]
            self.go_on()

    @precondition(lambda self: self.is_ring and self.live < self.steps)
    @rule(more=st.integers(1, 4), overlap=st.integers(0, 3), backwards=st.booleans())
    def set_appends(self, more: int, overlap: int, backwards: bool) -> None:
        steps = list(range(max(0, self.live - overlap), min(self.live + more, self.steps)))
        data = self.as_stored(self.data(len(steps)))
        for storage in self.storages:
            storage.set(steps[::-1] if backwards else slice(steps[0], steps[-1] + 1), data)
        self.put(steps, data.flip(0) if backwards else data)
        self.last = steps[0] if backwards else steps[-1]
        self.go_on()

    def go_on(self) -> None:
        """Follow the writer to the step after the newest, unless steps were written in another order."""
        newest = self.plain.clock.numbers[LAST]
        if self.is_ring and self.follows_rows and newest >= 0 and self.steps > 1:
            self.cursor = (newest + 1) % self.steps

    @precondition(lambda self: self.is_ring)
    @rule(picks=st.lists(st.integers(0, 1000), max_size=9), as_mask=st.booleans())
    def replace(self, picks: list[int], as_mask: bool) -> None:
        cells = [pick % len(self.plain) for pick in picks]
        region: Any = self.coordinates(cells)
        if as_mask:
            region, cells = self.mask(cells), sorted(set(cells))
        first: tuple[Any, ...] = (slice(len(cells)), *(0,) * len(self.shape))
        data = self.as_stored(self.data(len(cells) + 1))[first]
        for storage in self.storages:
            storage.set(region, data)
        for cell, row in zip(cells, rows_of(data, 1), strict=True):
            self.rows[cell // self.lanes][cell % self.lanes] = row

    def coordinates(self, cells: list[int]) -> tuple[torch.Tensor, ...]:
        parts = np.unravel_index(np.array(cells, dtype=np.int64), (self.live, *self.shape))
        return tuple(map(torch.from_numpy, parts))

    def mask(self, cells: list[int]) -> torch.Tensor:
        mask = torch.zeros(self.live, *self.shape, dtype=torch.bool)
        mask.view(-1)[cells] = True
        return mask

    @precondition(lambda self: self.is_ring)
    @rule(steps=st.integers(1, 9))
    def write_again_what_is_there(self, steps: int) -> None:
        at = list(range(min(steps, self.live)))
        data = self.dedup.get(torch.tensor(at))
        for storage in self.storages:
            storage.set(at, data, set_cursor=False)

    @rule(wrong=st.sampled_from(["missing", "unknown", "dtype", "shape", "lanes", "out of range"]))
    def refused(self, wrong: str) -> None:
        data = self.as_stored(self.data(1))
        key, leaf = next(iter(data.items(True, True)))
        if wrong == "missing":
            del data[key]
        elif wrong == "unknown":
            data["unknown"] = torch.zeros(data.batch_size)
        elif wrong == "dtype":
            data[key] = torch.zeros_like(leaf, dtype=torch.float16)
        elif wrong == "shape":
            data[key] = torch.stack([leaf, leaf], -1)
        elif wrong == "lanes":
            data = torch.stack([data, data], self.ndim)
        for writer, storage in zip(self.writers, self.storages, strict=True):
            with pytest.raises((SchemaError, IndexError)):
                storage.set([self.live + 50] if wrong == "out of range" else [0], data)
            for write in (writer.extend, lambda rows, writer=writer: writer.add(rows[0])):
                if isinstance(writer, RingWriter) and wrong != "out of range":
                    with pytest.raises(SchemaError):
                        write(data)

    @rule(how=st.sampled_from(["empty", "state", "pickle", "deepcopy", "into a plain one and back"]))
    def empty_or_reload(self, how: str) -> None:
        if how == "empty":
            for storage, writer in zip(self.storages, self.writers, strict=True):
                storage._empty()
                writer._empty(empty_write_count=False)
            self.rows, self.cursor = [], 0
            self.extend(1, "as it is")
        elif how == "state":
            for part in (*self.storages, *(self.writers if self.is_ring else ())):
                part.load_state_dict(part.state_dict())
            self.go_on()
        elif how == "into a plain one and back":
            self.plain.load_state_dict(self.dedup.state_dict())
            self.dedup.load_state_dict(self.plain.state_dict())
            self.go_on()
        else:
            self.dedup = copy.deepcopy(self.dedup) if how == "deepcopy" else pickle.loads(pickle.dumps(self.dedup))
            self.storages = [self.plain, self.dedup]
            self.writers[1]._storage = None  # a writer belongs to one storage
            self.writers[1].register_storage(self.dedup)

    @rule(
        picks=st.lists(st.integers(-100, 100), max_size=9), how=st.sampled_from(["tensor", "list", "cells", "two dims"])
    )
    def read(self, picks: list[int], how: str) -> None:
        steps = [pick % self.live if pick >= 0 else -1 - (-pick % self.live) for pick in picks]
        if how == "cells":
            cells = [pick % len(self.plain) for pick in picks]
            flat = torch.tensor(cells, dtype=torch.int64)
            assert_same(self.plain.gather(flat), self.dedup.gather(flat))
            expected = [self.rows[cell // self.lanes][cell % self.lanes] for cell in cells if self.is_ring]
            assert not self.is_ring or rows_of(self.dedup.gather(flat), 1) == expected
            return
        index: Any = steps if how == "list" else torch.tensor(steps, dtype=torch.int64)
        if how == "two dims":
            index = torch.stack([index, index])
        left, right = (storage.get(index) for storage in self.storages)
        assert_same(left, right)
        if self.is_ring and how != "two dims":
            assert rows_of(left, self.ndim) == [row for step in steps for row in self.rows[step]]
        for batch in (left, right):
            batch.apply_(lambda leaf: leaf.zero_())  # fresh memory: the invariant would see it

    @rule(start=st.integers(-9, 9), stop=st.integers(-9, 9), step=st.integers(1, 3), lane=st.integers(0, 2))
    def read_views(self, start: int, stop: int, step: int, lane: int) -> None:
        indices: list[Any] = [slice(start, stop, step), start % self.live, ..., (slice(start, stop), ...), None]
        if self.ndim > 1:
            indices += [(slice(None), lane % self.shape[0]), (start % self.live, lane % self.shape[0])]
        for index in indices:
            assert_same(*(storage.get(index) for storage in self.storages))
        if self.is_ring:
            expected = [row for rows in self.rows[start:stop:step] for row in rows]
            assert rows_of(self.plain.get(indices[0]), self.ndim) == expected

    @rule(picks=st.lists(st.integers(0, 100), max_size=9))
    def read_coordinates(self, picks: list[int]) -> None:
        cells = [pick % len(self.plain) for pick in picks]
        index = self.coordinates(cells)
        for each in (index if self.ndim > 1 else index[0], self.mask(cells)):
            assert_same(*(storage.get(each) for storage in self.storages))

    @rule(beyond=st.integers(0, 3))
    def read_what_is_not_there(self, beyond: int) -> None:
        for storage in self.storages:
            for index in (torch.tensor([self.live + beyond]), torch.tensor([-self.live - 1 - beyond])):
                with pytest.raises((IndexError, RuntimeError)):
                    storage.get(index)

    @invariant()
    def rows_and_counters_agree(self) -> None:
        if not getattr(self, "rows", None):
            return
        plain, dedup = self.storages
        assert len(plain) == len(dedup)
        assert plain._last_cursor_index == dedup._last_cursor_index
        assert plain._is_full == dedup._is_full
        assert_same(plain[:], dedup[:])
        for key in plain[:].keys(True):
            assert_same(*(TensorDict({"x": storage[key]}, []) for storage in self.storages))
        if isinstance(dedup.rows, DedupRows):
            check_pool(dedup.rows.table)
        assert isinstance(dedup.rows, DedupRows) or self.how == "auto" or self.how in KINDS
        if self.is_ring:
            assert plain.shape == (len(self.rows), *self.shape)
            assert (plain._last_cursor_index, plain._is_full) == (self.last, len(self.rows) == self.steps)
            assert rows_of(plain[:], self.ndim) == [row for rows in self.rows for row in rows]
            for writer in self.writers:
                cursor = writer.find_cursor(1, self.steps) if self.follows_rows else writer._cursor
                assert (cursor, writer._write_count) == (self.cursor, self.write_count)


TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(stateful_step_count=30)
