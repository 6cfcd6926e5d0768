"""Rings and episodes in lockstep with the model of the tests, which walks from row to row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlbuf_td.core.episodes import Episodes
from rlbuf_td.storages.ring import Ring
from tests.model import DONE, TRAJ, Model, Row

LANES, STEPS = 2, 5
ROWS = st.lists(st.tuples(st.integers(0, LANES - 1), st.booleans(), st.integers(0, 2)), min_size=1, max_size=12)
WRITE = st.tuples(st.just("write"), ROWS)
OTHERS = st.tuples(st.sampled_from(["empty", "break", "edit", "load", "kill"]), ROWS)
HISTORIES = st.lists(st.one_of(WRITE, WRITE, OTHERS), min_size=1, max_size=25)


class Pair:
    """A ring with episodes beside its model, and the flags and ids that a storage would hold."""

    def __init__(self) -> None:
        self.ring = Ring(STEPS, LANES, np.zeros((5, LANES), np.int64))
        self.episodes, self.model = Episodes(self.ring), Model(STEPS, LANES)
        self.ended, self.name = np.zeros((STEPS, LANES), np.bool_), np.zeros((STEPS, LANES), np.int64)
        self.stamps: list[tuple[Row, int, int]] = []  # rows, their cells and serials when they were written

    def write(self, rows: list[tuple[int, bool, int]]) -> None:
        lane, ended, name = (np.array(column) for column in zip(*rows, strict=True))
        count = np.bincount(lane, minlength=LANES)
        first = self.ring.begin(slice(None), count)
        self.episodes.write(lane, ended, name)
        for each, done, traj in rows:
            slot = first[each] % STEPS
            self.ended[slot, each], self.name[slot, each] = done, traj
            row = self.model.append(each, {DONE: done, TRAJ: traj})
            self.stamps.append((row, slot * LANES + each, first[each]))
            first[each] += 1
        self.episodes.publish(slice(None), count)

    def empty(self, rows: object) -> None:
        self.ring.empty()
        self.model.empty()

    def breaks(self, rows: list[tuple[int, bool, int]]) -> None:
        lanes = np.unique([lane for lane, *_ in rows])
        self.episodes.end(lanes)
        self.model.begin_episodes(lanes.tolist())

    def edit(self, rows: list[tuple[int, bool, int]]) -> None:
        stored = self.model.rows()
        for (_, done, traj), row in zip(rows, stored, strict=False):
            slot, lane = self.model.cell(row)
            self.ended[slot, lane], self.name[slot, lane] = done, traj
            self.model.edit(row, {DONE: done, TRAJ: traj})
        self.episodes.build(self.ended, self.name)

    def load(self, rows: object) -> None:
        """Load what was just saved: stamps of before do not match."""
        self.ring.load(self.ring.state())
        self.stamps = [(Row(**vars(row) | {"number": -1}), cell, stamp) for row, cell, stamp in self.stamps]

    def kill(self, rows: list[tuple[int, bool, int]]) -> None:
        """Die before the rows are published: those that they would have replaced are gone, and nothing has come."""
        lane, ended, name = (np.array(column) for column in zip(*rows[: STEPS - 1], strict=True))
        count = np.bincount(lane, minlength=LANES)
        self.ring.begin(slice(None), count)
        self.episodes.write(lane, ended, name)
        self.episodes.build(self.ended, self.name)
        for held, new in zip(self.model.rows_of, count.tolist(), strict=True):
            self.model._drop(held, STEPS - new)

    def check(self) -> None:
        self.ring.check()
        self.episodes.check()
        rows = self.model.rows()
        cells = np.array([self.model.flat(row) for row in rows], np.int64)
        assert len(self.ring) == len(rows)
        numbers = self.ring.cell_of(torch.arange(len(rows)))
        assert sorted(numbers.tolist()) == cells.tolist()
        assert self.ring.is_live(torch.arange(STEPS * LANES)).nonzero().flatten().tolist() == cells.tolist()
        found = self.episodes.reach(cells)
        assert [*zip(*(x.tolist() for x in found[:3]), strict=True)] == [self.model.reach(row) for row in rows]
        for only_finished in (True, False):
            first, length = self.episodes.whole(only_finished=only_finished)
            wanted = [(self.model.flat(each[0]), len(each)) for each in self.model.whole(only_finished=only_finished)]
            assert [*zip(first.tolist(), length.tolist(), strict=True)] == wanted
        for row, cell, stamp in self.stamps:
            assert bool(self.ring.is_stale(torch.tensor([cell]), torch.tensor([stamp]))) != self.model.holds(row)


@given(HISTORIES)
def test_serials_and_episodes_are_those_of_the_model(history: list[tuple[str, list[tuple[int, bool, int]]]]) -> None:
    pair = Pair()
    for how, rows in history:
        getattr(pair, "breaks" if how == "break" else how)(rows)
        pair.check()


def test_a_killed_write_of_more_rows_than_slots_leaves_an_empty_lane() -> None:
    pair = Pair()
    pair.write([(0, False, 1)] * 3)
    pair.ring.begin(slice(None), np.array([STEPS + 2, 0]))
    pair.episodes.write(np.zeros(STEPS + 2, np.int64), np.zeros(STEPS + 2, np.bool_), np.ones(STEPS + 2, np.int64))
    pair.ring.check()
    assert len(pair.ring) == 0


def test_a_stamp_from_before_empty_never_matches() -> None:
    ring = Ring(4, 1)
    ring.publish(slice(None), 3)
    ring.empty()
    ring.publish(slice(None), 3)
    assert ring.is_stale(torch.arange(3), torch.arange(3)).all()
    assert not ring.is_stale(torch.arange(3), torch.arange(4, 7)).any()
    assert ring.cell_of(torch.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("wrong", [{"tail": 3, "written": 2}, {"tail": 0, "written": 5}, {"tail": -1, "written": 0}])
def test_check_names_numbers_that_do_not_fit(wrong: dict[str, int]) -> None:
    ring = Ring(4, 1)
    ring.tail[0], ring.written[0] = wrong["tail"], wrong["written"]
    with pytest.raises(AssertionError, match="do not fit 4 slots"):
        ring.check()
