"""The episodes of a ring in lockstep with the model of the tests, which walks from row to row; both forms."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rlbuf_td.storages.episodes import NEW, STALE, EpisodeKeys, Episodes
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.ring import Ring
from rlbuf_td.storages.rows import PlainRows
from tests.backends import forced
from tests.model import DONE, TRAJ, Model

LANES, STEPS = 2, 5
ROWS = st.lists(st.tuples(st.integers(0, LANES - 1), st.booleans(), st.integers(0, 2)), min_size=1, max_size=8)
WRITE = st.tuples(st.just("write"), ROWS)
OTHERS = st.tuples(st.sampled_from(["empty", "break", "edit", "kill"]), ROWS)
HISTORIES = st.lists(st.one_of(WRITE, WRITE, OTHERS), min_size=1, max_size=25)


class Pair:
    """Rows with episodes beside their model."""

    def __init__(self) -> None:
        row = TensorDict(
            {"next": {"done": torch.zeros(1, 1).bool()}, "collector": {"traj_ids": torch.zeros(1).int()}}, [1]
        )
        layout = RowLayout(row, 1)
        rows = PlainRows(layout, torch.zeros(STEPS, LANES, layout.row_bytes, dtype=torch.uint8).view(layout.carrier))
        self.ring, self.columns = Ring(STEPS, LANES), rows.unpack(rows.matrix)
        self.episodes = Episodes(rows, self.ring, EpisodeKeys())
        self.model = Model(STEPS, LANES)

    def begin(self, rows: list[tuple[int, bool, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        lane = np.array([lane for lane, *_ in rows])
        lanes, counts = np.unique(lane, return_counts=True)
        first = self.ring.written[lanes].copy()
        self.ring.begin(lanes, counts)
        serial = dict(zip(lanes.tolist(), first.tolist(), strict=True))
        for each, done, traj in rows:
            self._put(serial[each] % STEPS, each, done, traj)
            serial[each] += 1
        return lanes, first, counts

    def _put(self, slot: int, lane: int, done: bool, traj: int) -> None:
        self.columns["next", "done"][slot, lane] = done
        self.columns["collector", "traj_ids"][slot, lane] = traj

    def write(self, rows: list[tuple[int, bool, int]]) -> None:
        for part in (rows[:STEPS], rows[STEPS:]):
            if part:
                lanes, first, counts = self.begin(part)
                self.episodes.note(lanes, first, counts, np.zeros(len(lanes), bool))
                self.ring.publish()
                self.ring.finish()
                for each, done, traj in part:
                    self.model.append(each, {DONE: done, TRAJ: traj})

    def empty(self, rows: object) -> None:
        self.ring.empty()
        self.model.empty()

    def breaks(self, rows: list[tuple[int, bool, int]]) -> None:
        lanes = {lane for lane, *_ in rows}
        for lane in lanes:
            self.episodes.end(lane)
        self.model.begin_episodes(lanes)

    def edit(self, rows: list[tuple[int, bool, int]]) -> None:
        for (_, done, traj), row in zip(rows, self.model.rows(), strict=False):
            self._put(*self.model.cell(row), done, traj)
            self.model.edit(row, {DONE: done, TRAJ: traj})
        self.episodes.mark(STALE)

    def kill(self, rows: list[tuple[int, bool, int]]) -> None:
        """Die before the rows are published: those that they would have replaced are gone, and nothing has come."""
        lanes, _, counts = self.begin(rows[: STEPS - 1])
        self.ring.recover(self.episodes.rows.matrix)
        self.ring.finish()
        self.episodes.mark(STALE)
        for lane, count in zip(lanes.tolist(), counts.tolist(), strict=True):
            self.model._drop(self.model.rows_of[lane], STEPS - count)

    def check(self) -> None:
        self.ring.check()
        self.episodes.check()
        rows = self.model.rows()
        found = self.episodes.spans(torch.tensor([self.model.flat(row) for row in rows], dtype=torch.int64))
        assert [*zip(*(x.tolist() for x in found[:3]), strict=True)] == [self.model.reach(row) for row in rows]
        whole = {id(row) for each in self.model.whole(only_finished=False) for row in each}
        assert found.whole.tolist() == [id(row) in whole for row in rows]
        for only_finished in (True, False):
            first, length = self.episodes.whole(only_finished=only_finished)
            wanted = [(self.model.flat(each[0]), len(each)) for each in self.model.whole(only_finished=only_finished)]
            assert [*zip(first.tolist(), length.tolist(), strict=True)] == wanted


@pytest.mark.parametrize("form", ["compiled", "torch"])
@settings(max_examples=60)
@given(history=HISTORIES)
def test_episodes_are_those_of_the_model(form: str, history: list[tuple[str, list[tuple[int, bool, int]]]]) -> None:
    with forced("torch") if form == "torch" else nullcontext():
        pair = Pair()
        for how, rows in history:
            getattr(pair, "breaks" if how == "break" else how)(rows)
            pair.check()


@pytest.mark.parametrize("form", ["compiled", "torch"])
def test_episodes_of_unknown_beginning_are_never_whole(form: str) -> None:
    with forced("torch") if form == "torch" else nullcontext():
        pair = Pair()
        for _ in range(2):
            pair.write([(0, False, 1)] * 4)
        pair.episodes.mark(NEW)
        for _ in range(3):
            assert not pair.episodes.spans(torch.arange(0, 2 * STEPS, LANES)).whole.any()
            pair.episodes.check()
            pair.write([(0, False, 1)] * 2)
