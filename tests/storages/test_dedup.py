"""Rows that share observations: what is shared, what is refused, and what it saves."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ReplayBuffer
from rlbuf_td.storages.rows.dedup import DedupRows
from tests.catalogue import assert_same
from tests.kernels.invariants import check_pool
from tests.storages.observations import FRAMES, Lanes


def pooled(storage: PackedStorage) -> DedupRows:
    rows = storage.rows
    assert isinstance(rows, DedupRows)
    return rows


def chain(count: int, width: int = 8, length: int | None = None) -> TensorDict:
    """Return rows whose observations follow each other, but for every ``length``-th."""
    seen = torch.rand(count + 1, width)
    following = seen[1:].clone()
    if length is not None:
        following[length - 1 :: length] = torch.rand(len(following[length - 1 :: length]), width)
    return TensorDict({"observation": seen[:-1].clone(), "next": {"observation": following}}, [count])


def assert_refilled(storage: PackedStorage, data: TensorDict) -> None:
    storage._empty()
    for start in (0, 3):
        storage.set(range(start, 10), data[start:])
    assert_same(storage[:], data)
    check_pool(pooled(storage).table)


def test_rows_of_one_trajectory_take_one_observation_each() -> None:
    storage = PackedStorage(100, share_next=True)
    storage.set(range(100), chain(100))
    assert pooled(storage).in_use == [101]
    assert storage.nbytes == 100 * 8 + 101 * 32
    assert storage.saved_bytes == {("observation",): 200 * 32 - 101 * 32 - 100 * 8}
    storage.set(range(100), chain(100, length=20))  # the end of a trajectory costs one observation
    assert pooled(storage).in_use == [105]


def test_lanes_share_within_themselves() -> None:
    data = torch.stack([chain(50), chain(50)], 1)
    storage = PackedStorage(100, ndim=2, share_next=True)
    storage.set(range(50), data)
    assert pooled(storage).in_use == [102]
    flat = PackedStorage(100, share_next=True)
    flat.set(range(100), data.reshape(-1))  # lanes reshaped together: no row follows the one before it
    assert pooled(flat).in_use == [200]
    assert_same(flat[:], data.reshape(-1))


def test_writes_go_on_where_the_last_one_ended_and_backwards() -> None:
    storage, data, at = PackedStorage(60, share_next=True), chain(60), 0
    for count in (1, 7, 1, 1, 50):
        storage.set(range(at, at + count), data[at : at + count])
        at += count
    assert pooled(storage).in_use == [61]
    storage.set(range(60), torch.zeros_like(data))
    for step in reversed(range(60)):
        storage.set(step, data[step], set_cursor=False)
    assert pooled(storage).in_use == [61]
    assert_same(storage[:], data)


def test_a_ring_holds_as_much_after_each_round() -> None:
    rb = ReplayBuffer(storage=PackedStorage(100, share_next=True))
    used = []
    for seed in range(12):
        torch.manual_seed(seed)
        rb.extend(chain(70, length=10))
        used.append(rb.storage.nbytes)
    assert pooled(rb.storage).in_use[0] <= 112
    assert max(used[3:]) <= 100 * 8 + 32 * 130  # free entries are used again


def test_auto_leaves_out_what_does_not_repeat() -> None:
    storage = PackedStorage(300, share_next="auto")
    storage.set(range(200), Lanes(1, 0, alphabet=50).steps(200, 0.1)[:, 0])
    assert set(storage.saved_bytes) == {("observation",), ("agent", "goal"), ("pixels",)}
    everything = PackedStorage(300, share_next=True)
    everything.set(range(200), Lanes(1, 0, alphabet=50).steps(200, 0.1)[:, 0])
    assert set(everything.saved_bytes) == {("observation",), ("agent", "goal"), ("pixels",), ("clock",)}
    assert storage.nbytes < everything.nbytes


def test_auto_shares_keys_one_by_one_where_it_cannot_look() -> None:
    seen, noise = torch.rand(101, 8), torch.rand(2, 100, 8)
    following = {"observation": seen[1:], "noise": noise[1], "small": torch.zeros(100, 2)}
    now = {"observation": seen[:-1], "noise": noise[0], "small": torch.zeros(100, 2)}
    data = TensorDict(now | {"next": following}, [100])
    storage = PackedStorage(100, share_next="auto")
    for step in range(100):
        storage.set(step, data[step])
    assert set(storage.saved_bytes) == {("observation",), ("noise",)}
    assert sorted(pooled(storage).in_use) == [101, 200]
    assert_same(storage[:], data)
    check_pool(pooled(storage).table)


def test_auto_shares_nothing_that_is_not_worth_it() -> None:
    storage = PackedStorage(10, share_next="auto")
    storage.set(range(4), chain(4, width=2))
    assert storage.dedup is None
    storage = PackedStorage(10, share_next="auto")
    data = TensorDict({"observation": torch.rand(4, 9), "next": {"observation": torch.rand(4, 9)}}, [4])
    storage.set(range(4), data)
    assert storage.dedup is None


def test_flags_stay_in_the_rows() -> None:
    flags = {"done": torch.zeros(4, 16).bool(), "terminated": torch.zeros(4, 16).bool()}
    storage = PackedStorage(10, share_next=True)
    storage.set(range(4), TensorDict({"x": torch.rand(4, 4), **flags, "next": {"x": torch.rand(4, 4), **flags}}, [4]))
    assert set(storage.saved_bytes) == {("x",)}


@pytest.mark.parametrize("dim", [0, -1])
def test_a_row_of_a_stack_takes_one_frame(dim: int) -> None:
    frames = torch.randint(256, (54, 5, 5), dtype=torch.uint8)
    stacks = torch.stack([frames[j : j + 51] for j in range(4)], 1 if dim == 0 else -1)
    storage = PackedStorage(50, frames={"pixels": (4, dim)})
    data = TensorDict({"pixels": stacks[:50], "next": {"pixels": stacks[1:]}}, [50])
    storage.set(range(50), data)
    assert pooled(storage).in_use == [54]
    assert_same(storage[:], data)
    alone = PackedStorage(50, frames={"pixels": (4, dim)})
    alone.set(range(50), data.exclude(("next", "pixels")))
    assert pooled(alone).in_use == [53]


def test_frames_of_the_rows_that_are_left_survive_the_wrap() -> None:
    frames = torch.randint(256, (54, 5, 5), dtype=torch.uint8)
    stacks = torch.stack([frames[j : j + 51] for j in range(4)], 1)
    data = TensorDict({"pixels": stacks[:50], "next": {"pixels": stacks[1:]}}, [50])
    rb = ReplayBuffer(storage=PackedStorage(20, frames={"pixels": (4, 0)}))
    for first in range(0, 49, 7):
        rb.extend(data[first : first + 7])
        assert_same(rb.chronological(), data[max(0, first - 13) : first + 7])


def test_a_stack_that_repeats_its_first_frame_stores_it_once() -> None:
    world = Lanes(1, 0, alphabet=200)
    storage = PackedStorage(60, share_next=True, frames={"pixels": FRAMES})
    storage.set(range(60), torch.cat([world.steps(19, 0.0), world.steps(1, 2.0), world.steps(40, 0.0)])[:, 0])
    assert pooled(storage).in_use[0] == 62


def test_a_reserved_storage_decides_with_the_first_write() -> None:
    storage = PackedStorage(10, share_next="auto")
    storage.reserve(chain(1)[0])
    assert storage.dedup is not None
    storage.set(range(4), TensorDict({"observation": torch.rand(4, 8), "next": {"observation": torch.rand(4, 8)}}, [4]))
    assert storage.dedup is None
    storage = PackedStorage(10, share_next="auto")
    storage.reserve(chain(1)[0])
    storage.set(range(4), chain(4))
    assert storage.dedup is not None


def test_rows_of_another_device_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlbuf_td.storages.allocate.grows", lambda device: True)
    storage, plain = PackedStorage(60, share_next=True), PackedStorage(60)
    taken = []
    for start in range(0, 60, 5):
        data = chain(5)
        for one in (storage, plain):
            one.set(range(start, start + 5), data)
        assert_same(storage[:], plain[:])
        taken.append(len(pooled(storage).table.entries[0]))
    assert pooled(storage).matrix.untyped_storage().nbytes() < 60 * 40 + 2 * 4096
    assert taken[0] < taken[-1] < 120
    data = chain(60, length=1)
    for one in (storage, plain):
        one.set(torch.ones(60, dtype=torch.bool), data)
    assert_same(storage[:], plain[:])
    check_pool(pooled(storage).table)


@pytest.mark.parametrize("start", [1, 0])
def test_rows_can_be_moved_within_the_storage(start) -> None:
    """What a slice gives holds views of what rows do not share."""
    storage, data = PackedStorage(10, share_next=True), chain(10)
    data["action"] = torch.arange(10.0)
    storage.set(range(10), data)
    storage.set(range(start, start + 9), storage[1 - start : 10 - start])
    expected = data.clone()
    expected[start : start + 9] = data[1 - start : 10 - start]
    assert_same(storage[:], expected)


@pytest.mark.parametrize("shared", [False, True])
def test_rows_beyond_those_that_were_loaded_hold_nothing(shared) -> None:
    storage, plain, data = PackedStorage(10, share_next=True, shared=shared), PackedStorage(10), chain(10)
    storage.set(range(10), data)
    plain.set(range(5), chain(5))
    storage.load_state_dict(plain.state_dict())
    assert_same(storage[:], plain[:])
    assert pooled(storage).in_use == [6]
    check_pool(pooled(storage).table)
    assert_refilled(storage, data)


def test_a_load_in_several_parts_leaves_entries_that_a_dead_process_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlbuf_td.storages.rows.dedup._CHUNK", 1)
    storage, other = (PackedStorage(10, share_next=True, shared=shared) for shared in (True, False))
    storage.set(range(10), chain(10))
    other.set(range(10), chain(10))
    rows = pooled(storage)
    names = rows.table.names(0).unique().long() - 1
    entries = rows.table.entries[0][names].clone()
    monkeypatch.setattr(rows, "rebuild", lambda: None)
    storage.load_state_dict(other.state_dict())
    assert_same(storage[:], other[:])
    assert (rows.table.entries[0][names] == entries).all()


def test_a_write_that_was_cut_short_does_not_outlive_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    storage, data = PackedStorage(10, share_next=True), chain(10)
    storage.set(range(4), data[:4])
    with monkeypatch.context() as patched:
        patched.setattr(storage, "count_written", dies)
        with pytest.raises(KeyboardInterrupt):
            storage.set(range(4, 9), data[4:9])
    assert_refilled(storage, data)


@pytest.mark.parametrize("index", [True, False])
def test_a_bool_is_a_mask(index) -> None:
    storage, plain, data = PackedStorage(4, ndim=2, share_next=True), PackedStorage(4, ndim=2), chain(4).view(2, 2)
    for one in (storage, plain):
        one.set(range(2), data)
    assert_same(storage.get(index), plain.get(index))


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("capacity", [10, 100, 300])
@pytest.mark.parametrize("arguments", [{}, {"share_next": True}, {"share_next": True, "shared": True}])
def test_state_with_entries_of_rows_that_were_there_once_goes_anywhere(arguments, capacity, ndim) -> None:
    shape, lanes = ((-1,), 1) if ndim == 1 else ((-1, 2), 2)
    shared = PackedStorage(100 * lanes, ndim=ndim, share_next=True, shared=True)
    few = PackedStorage(100 * lanes, ndim=ndim, share_next=True)
    shared.set(range(90), chain(90 * lanes).view(*shape))
    few.set(range(9), chain(9 * lanes).view(*shape))
    shared.load_state_dict(few.state_dict())
    assert pooled(shared).used[0] > 90 * lanes
    other = PackedStorage(capacity * lanes, ndim=ndim, **arguments)
    other.load_state_dict(shared.state_dict())
    assert_same(other[:], few[:])
    buffers = [ReplayBuffer(storage=storage, batch_size=4) for storage in (shared, other)]
    buffers[1].load_state_dict(buffers[0].state_dict())
    assert_same(other[:], few[:])


def test_a_storage_takes_its_own_snapshot_back() -> None:
    storage, data = PackedStorage(30, share_next=True), chain(20)
    storage.set(range(20), data)
    taken = storage.snapshot()
    storage.set(range(20, 25), chain(5))
    storage.load_state_dict(taken)
    assert_same(storage[:], data)
