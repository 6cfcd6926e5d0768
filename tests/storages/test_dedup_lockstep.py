"""A storage whose rows share observations in lockstep with a plain one: the same bytes, whatever is done to both."""

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
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictMaxValueWriter, TensorDictRoundRobinWriter

from rlbuf_td import PackedStorage, RingWriter, SchemaError
from rlbuf_td.storages.dedup.rows import DedupRows
from tests.catalogue import assert_same
from tests.kernels.invariants import check_pool
from tests.storages.observations import FRAMES, Lanes

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


PLACES = ("dedup.rows", "allocate")


def _everywhere(device: torch.device) -> bool:
    return True


class Lockstep(RuleBasedStateMachine):
    @initialize(
        how=st.sampled_from([*HOW]),
        ndim=st.sampled_from([1, 1, 2, 3]),
        steps=st.integers(1, 9),
        lanes=st.integers(1, 3),
        alphabet=st.sampled_from([1, 2, 3, 50]),
        often=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        seed=st.integers(0, 999),
        compiled=st.sampled_from([True, True, True, False]),
        writer=st.sampled_from([RingWriter, RingWriter, TensorDictRoundRobinWriter, TensorDictMaxValueWriter]),
        shared=st.sampled_from([False, False, True]),
    )
    def make(self, how, ndim, steps, lanes, alphabet, often, seed, compiled, writer, shared) -> None:
        self.how, self.ndim, self.often, self.compiled = how, ndim, often, compiled
        self.shape: tuple[int, ...] = {1: (), 2: (lanes,), 3: (lanes, 2)}[ndim]
        self.cells = torch.Size(self.shape).numel()
        self.world = Lanes(self.cells, seed, alphabet)
        if ndim > 1 and writer is TensorDictMaxValueWriter:
            writer = RingWriter
        self.patches = [] if compiled else [patch(f"rlbuf_td.storages.{name}.grows", _everywhere) for name in PLACES]
        for each in self.patches:
            each.start()
        shared = shared and compiled  # shared memory is always the CPU's
        self.plain = PackedStorage(steps * self.cells, ndim=ndim)
        self.pooled = PackedStorage(steps * self.cells, ndim=ndim, **HOW[how])
        if shared:
            self.pooled.share_memory_()
        self.storages = [self.plain, self.pooled]
        self.writers = (
            [writer(), writer(rank_key="rank")] if writer is TensorDictMaxValueWriter else [writer(), writer()]
        )
        if writer is TensorDictMaxValueWriter:
            self.writers = [writer(rank_key="rank"), writer(rank_key="rank")]
        for one, storage in zip(self.writers, self.storages, strict=True):
            one.register_storage(storage)
        self.ranks = torch.Generator().manual_seed(seed)
        self.extend(1, False)

    def teardown(self) -> None:
        for each in getattr(self, "patches", []):
            each.stop()

    def data(self, count: int) -> TensorDict:
        """Return ``[count, *lanes]`` rows that mostly follow each other and those before."""
        data = self.world.steps(count, self.often).view(count, *self.shape)
        if self.how == "frames of the root":
            data = data.exclude(("next", "pixels"))
        if self.how == "frames along another dim":
            for key in ("pixels", ("next", "pixels")):
                data[key] = data[key].movedim(-3, -1).contiguous()
        data["rank"] = torch.rand(count, *self.shape, generator=self.ranks)
        return data

    @property
    def live(self) -> int:
        return len(self.plain) // self.cells

    # -- writes

    @rule(count=st.integers(1, 25), transposed=st.booleans())
    def extend(self, count: int, transposed: bool) -> None:
        data = self.data(count)
        if transposed and self.ndim == 2:  # as collectors give it: other strides, the same rows
            data = data.transpose(0, 1).contiguous().transpose(0, 1)
        if isinstance(self.writers[0], TensorDictRoundRobinWriter):
            data = data[: self.plain._max_size_along_dim0(batched_data=data)]
        for writer in self.writers:
            writer.extend(data.clone(False))

    @rule()
    def add(self) -> None:
        data = self.data(1)[0]
        for writer in self.writers:
            writer.add(data.clone(False))

    @precondition(lambda self: not isinstance(self.writers[0], TensorDictMaxValueWriter))
    @rule(picks=st.lists(st.integers(0, 100), min_size=1, max_size=9), counted=st.booleans(), how=st.integers(0, 2))
    def set_steps(self, picks: list[int], counted: bool, how: int) -> None:
        steps = [pick % self.live for pick in picks]
        if how == 2:
            steps = list(range(min(steps), max(steps) + 1))
        data = self._as_stored(self.data(len(steps)))
        cursor: Any = [steps, torch.tensor(steps), slice(steps[0], steps[-1] + 1)][how]
        for storage in self.storages:
            storage.set(cursor, data, set_cursor=counted)

    @precondition(lambda self: not isinstance(self.writers[0], TensorDictMaxValueWriter))
    @rule(picks=st.lists(st.integers(0, 1000), max_size=9), as_mask=st.booleans())
    def replace(self, picks: list[int], as_mask: bool) -> None:
        cells = [pick % len(self.plain) for pick in picks]
        shape = (self.live, *self.shape)
        region: Any
        if as_mask:
            region = torch.zeros(shape, dtype=torch.bool)
            region.view(-1)[cells] = True
            cells = sorted(set(cells))
        else:
            region = tuple(torch.from_numpy(part) for part in np.unravel_index(np.array(cells, dtype=np.int64), shape))
        first: tuple[Any, ...] = (slice(len(cells)), *(0,) * len(self.shape))
        data = self._as_stored(self.data(len(cells) + 1))[first]
        for storage in self.storages:
            storage.set(region, data)

    @rule(steps=st.integers(1, 9))
    def write_again_what_is_there(self, steps: int) -> None:
        """Write what the storage itself gave."""
        if isinstance(self.writers[0], TensorDictMaxValueWriter):
            return
        at = list(range(min(steps, self.live)))
        data = self.pooled.get(torch.tensor(at))
        for storage in self.storages:
            storage.set(at, data, set_cursor=False)

    def _as_stored(self, data: TensorDict) -> TensorDict:
        if "index" in self.plain._storage.keys():
            lead = data.batch_size
            like = self.plain._storage["index"]
            data["index"] = torch.zeros((*lead, *like.shape[len(lead) :]), dtype=like.dtype)
        return data

    @rule(wrong=st.sampled_from(["missing", "dtype", "out of range"]))
    def refused(self, wrong: str) -> None:
        data = self._as_stored(self.data(1))
        if wrong == "missing":
            del data["next", "observation"]
        elif wrong == "dtype":
            data["observation"] = data["observation"].double()
        for storage in self.storages:
            with pytest.raises((SchemaError, IndexError)):
                storage.set([self.live + 50] if wrong == "out of range" else [0], data)

    @rule(how=st.sampled_from(["empty", "state", "pickle", "deepcopy", "into a plain one and back"]))
    def empty_or_reload(self, how: str) -> None:
        if how == "empty":
            for storage, writer in zip(self.storages, self.writers, strict=True):
                storage._empty()
                writer._empty()
            self.extend(1, False)
            return
        if how == "state":
            self.pooled.load_state_dict(self.pooled.state_dict())
            return
        if how == "into a plain one and back":
            self.plain.load_state_dict(self.pooled.state_dict())
            self.pooled.load_state_dict(self.plain.state_dict())
            return
        self.pooled = copy.deepcopy(self.pooled) if how == "deepcopy" else pickle.loads(pickle.dumps(self.pooled))
        self.storages = [self.plain, self.pooled]
        self.writers[1].register_storage(self.pooled)

    # -- reads

    @rule(
        picks=st.lists(st.integers(-100, 100), max_size=9), how=st.sampled_from(["tensor", "list", "cells", "two dims"])
    )
    def read(self, picks: list[int], how: str) -> None:
        live = self.live
        steps = [pick % live if pick >= 0 else -1 - (-pick % live) for pick in picks]
        if how == "cells":
            flat = torch.tensor([pick % len(self.plain) for pick in picks], dtype=torch.int64)
            assert_same(self.plain.gather(flat), self.pooled.gather(flat))
            if len(flat):
                for left, right in zip(
                    *(one.written_rows().batches_at_cells(flat, 2) for one in self.storages), strict=True
                ):
                    assert_same(left, right)
            return
        index: Any = steps if how == "list" else torch.tensor(steps, dtype=torch.int64)
        if how == "two dims":
            index = torch.stack([index, index])
        left, right = (storage.get(index) for storage in self.storages)
        assert_same(left, right)
        right.apply_(lambda leaf: leaf.zero_())  # fresh memory: the invariant would see it

    @rule(start=st.integers(-9, 9), stop=st.integers(-9, 9), step=st.integers(1, 3), lane=st.integers(0, 2))
    def read_views(self, start: int, stop: int, step: int, lane: int) -> None:
        indices: list[Any] = [slice(start, stop, step), start % self.live, ..., (slice(start, stop), ...), None]
        if self.ndim > 1:
            indices += [(slice(None), lane % self.shape[0]), (start % self.live, lane % self.shape[0])]
        for index in indices:
            assert_same(*(storage.get(index) for storage in self.storages))

    @rule(picks=st.lists(st.integers(0, 100), max_size=9))
    def read_coordinates(self, picks: list[int]) -> None:
        cells = np.array([pick % len(self.plain) for pick in picks], dtype=np.int64)
        index = tuple(torch.from_numpy(part) for part in np.unravel_index(cells, (self.live, *self.shape)))
        mask = torch.zeros(self.live, *self.shape, dtype=torch.bool)
        mask.view(-1)[torch.from_numpy(cells)] = True
        for each in (index if self.ndim > 1 else index[0], mask):
            assert_same(*(storage.get(each) for storage in self.storages))

    @rule(beyond=st.integers(0, 3))
    def read_what_is_not_there(self, beyond: int) -> None:
        for storage in self.storages:
            for index in (torch.tensor([self.live + beyond]), torch.tensor([-self.live - 1 - beyond])):
                with pytest.raises((IndexError, RuntimeError)):
                    storage.get(index)

    # -- what must always hold

    @invariant()
    def same_bytes_and_no_leak(self) -> None:
        if not hasattr(self, "pooled"):
            return
        assert len(self.plain) == len(self.pooled)
        assert self.plain._last_cursor_index == self.pooled._last_cursor_index
        assert_same(self.plain[:], self.pooled[:])
        for key in ("observation", ("next", "observation"), "next", "action", ("agent", "goal"), "pixels"):
            assert_same_entry(self.plain[key], self.pooled[key])
        rows = self.pooled.rows
        assert isinstance(rows, DedupRows) == (self.how != "auto" or isinstance(rows, DedupRows))
        if isinstance(rows, DedupRows):
            check_pool(rows.table)


def assert_same_entry(left: Any, right: Any) -> None:
    assert_same(TensorDict({"x": left}, []), TensorDict({"x": right}, []))


TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(
    max_examples=50, stateful_step_count=25, deadline=None, derandomize=True, database=None
)
