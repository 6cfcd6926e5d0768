"""Rows in page-locked RAM that a CUDA device reads: on one, and with a stand-in for its driver where there is none."""

from __future__ import annotations

import gc
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer, plan
from rlbuf_td.checkpoint import open_checkpoint
from rlbuf_td.storages import allocate as memory
from rlbuf_td.storages import memory_budget as _room
from rlbuf_td.storages import pinned as page_locked
from rlbuf_td.storages.memory_budget import Room
from tests.catalogue import SCHEMAS, assert_same, transitions
from tests.processes.test_sharing import elsewhere

NESTED = SCHEMAS["nested"]
GPU = torch.device("cuda", 1)
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs Linux")


class Driver:
    """What stands in for the CUDA runtime: it notes what it is asked for, and may refuse."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.log: list[tuple[Any, ...]] = []
        self.current = 0
        self.refuses = 0
        self.captures = False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.log.append(("register", address, nbytes, flags, self.current))
        if not self.refuses:
            self.locked[address] = nbytes
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append(("unregister", address, is_mapped(address)))
        return 0 if self.locked.pop(address, None) else 713

    def cudaGetErrorString(self, code: int) -> str:
        return {2: "out of memory"}.get(code, "some error")

    @contextmanager
    def device(self, index: int) -> Any:
        before, self.current = self.current, index
        yield
        self.current = before


class AsArray:
    def __init__(self, locked: Any) -> None:
        self.locked, self.__array_interface__ = locked, locked.__cuda_array_interface__


def is_mapped(address: int) -> bool:
    ranges = re.findall(r"^(\w+)-(\w+) rw", Path("/proc/self/maps").read_text(), re.M)
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Let a stand-in lock pages; tensors "of the device" are then such of the CPU over the same memory."""
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", driver.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: driver.captures)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: driver.log.append(("synchronize", index)))
    monkeypatch.setattr(page_locked, "_tensor_over", lambda locked, _: torch.from_numpy(np.asarray(AsArray(locked))))
    monkeypatch.setattr(page_locked, "_forget_error", lambda index: driver.log.append(("forget", index)))
    yield driver
    _ = driver.locked and gc.collect()
    assert not driver.locked, "pages stay locked"


def offloaded(capacity: int = 5, *, steps: int = 3, **settings: Any) -> PackedStorage:
    storage = PackedStorage(capacity, device="cuda", offload=True, **settings)
    if steps:
        storage.set(range(steps), transitions(NESTED, steps, (2,) * (storage.ndim - 1)))
    return storage


def test_pages_are_locked_for_the_device_and_the_tensor_lies_in_them(driver: Driver) -> None:
    tensor = page_locked.page_locked(10_000, GPU)
    assert driver.log == [("register", tensor.data_ptr(), 10_000, 3, 1)]
    assert (tensor.dtype, tensor.shape, tensor.any().item()) == (torch.uint8, (10_000,), False)
    tensor.fill_(7)
    assert driver.current == 0
    other = page_locked.page_locked(1, torch.device("cuda"))
    assert driver.log[1][2:] == (1, 3, 3)
    assert other.data_ptr() % os.sysconf("SC_PAGE_SIZE") == 0
    assert tensor.sum() == 70_000


def test_pages_are_unlocked_once_before_they_are_given_back(driver: Driver) -> None:
    tensor = page_locked.page_locked(10_000, GPU)
    address, part = tensor.data_ptr(), tensor.view(100, 100)[50:].view(torch.int32)
    del tensor
    assert driver.locked == {address: 10_000}
    del part
    assert driver.log[1:] == [("synchronize", 1), ("unregister", address, True)]
    assert not is_mapped(address)


def test_memory_that_torch_takes_for_another_devices_is_unlocked(driver, monkeypatch):
    monkeypatch.setattr(page_locked, "_tensor_over", lambda *_: torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="that of another device"):
        page_locked.page_locked(100, GPU)
    assert [entry[0] for entry in driver.log] == ["register", "synchronize", "unregister"]


def test_pages_given_up_during_a_capture_are_unlocked_later(driver: Driver) -> None:
    tensors = [page_locked.page_locked(100, GPU) for _ in range(3)]
    driver.captures = True
    del tensors[1:]
    assert len(driver.log) == len(driver.locked) == 3
    driver.captures = False
    page_locked.page_locked(100, GPU)  # whichever comes next unlocks them
    unlock = ["synchronize", "unregister"]
    assert [entry[0] for entry in driver.log[3:]] == [*unlock * 2, "register", *unlock]


def test_a_forked_process_gets_no_copy_and_unlocks_nothing(driver: Driver) -> None:
    tensors = [page_locked.page_locked(10_000, GPU).fill_(7)]

    def look() -> None:
        assert not tensors[0].any()
        tensors.clear()
        assert len(driver.log) == 1

    elsewhere(look)
    assert tensors[0].sum() == 70_000


@pytest.mark.parametrize("ndim", [1, 2])
def test_rows_are_those_of_a_plain_storage(driver: Driver, ndim: int) -> None:
    storage = offloaded(10, ndim=ndim)
    assert driver.locked == {storage.all_rows().matrix.data_ptr(): storage.nbytes}
    data = transitions(NESTED, 3, (2,) * (ndim - 1))
    assert_same(storage[:], data)
    assert_same(storage[torch.tensor([2, 0])], data[torch.tensor([2, 0])])
    assert "page-locked RAM, read by" in repr(storage)
    assert "page-locked RAM" in ReplayBuffer(storage=storage)._repr_html_()


@pytest.mark.parametrize("how", ["extend", "loads"])
def test_reserved_rows_give_their_pages_back_before_others_are_locked(driver: Driver, how: str, tmp_path: Path) -> None:
    rb = ReplayBuffer.from_schema(transitions(NESTED, 1)[0], 5, device="cuda", offload=True)
    data = transitions(NESTED, 3).set("more", torch.zeros(3, 7))
    if how == "extend":
        rb.extend(data)
    else:
        other = ReplayBuffer(storage=PackedStorage(5))
        other.extend(data)
        other.dumps(tmp_path)
        rb.loads(tmp_path)
    assert_same(rb.storage[:], data)
    assert [entry[0] for entry in driver.log] == ["register", "synchronize", "unregister", "register"]
    assert list(driver.locked.values()) == [rb.storage.nbytes]


@pytest.mark.parametrize("steps", [0, 3])
def test_a_copy_has_page_locked_rows_of_its_own(driver: Driver, steps: int) -> None:
    storage = offloaded(steps=steps)
    again = pickle.loads(pickle.dumps(storage))
    assert again.offload
    assert len(driver.locked) == 2 * bool(steps)
    if steps:
        again["first"].zero_()
        assert_same(storage[:], transitions(NESTED, steps))


@pytest.mark.parametrize("how", ["state", "state into used rows", "dump"])
@pytest.mark.parametrize("ours", [True, False])
def test_saved_rows_go_from_page_locked_ones_to_others_and_back(driver, ours, how, tmp_path):
    def make(offload: bool) -> ReplayBuffer:
        storage = PackedStorage(50, device="cuda" if offload else "cpu", offload=offload)
        return ReplayBuffer(storage=storage, batch_size=4)

    source, target = make(ours), make(not ours)
    source.extend(transitions(NESTED, 70))
    expected = source.storage[:].clone()
    if how == "dump":
        source.dumps(tmp_path)
        target.loads(tmp_path)
        found = open_checkpoint(tmp_path)
        assert found.storage is not None
        assert not found.storage.offload
    else:
        if how == "state into used rows":
            target.extend(transitions(NESTED, 4, seed=3))
        state = source.state_dict()
        source.storage["first"].zero_()
        assert state["_storage"]["rows"].device.type == "cpu"
        target.load_state_dict(state)
    assert_same(target.storage[:], expected)
    assert (target.storage.offload, len(driver.locked)) == (not ours, 1)


def test_it_cannot_be_sent_to_another_process(driver: Driver) -> None:
    process = get_context("spawn").Process(target=print, args=(offloaded(),))
    with pytest.raises(ValueError, match=r"rows page-locked in this process for .* cannot be shared"):
        process.start()
    assert len(driver.locked) == 1


BIG = TensorDict({"pixels": torch.zeros(2, 3, 64, 64, dtype=torch.uint8)}, [2])


@pytest.mark.parametrize(("free", "fits"), [(10 << 20, False), (20 << 20, True)])
def test_all_of_the_ram_must_be_free_at_once(driver, monkeypatch, free, fits):
    rooms = {"cpu": Room("RAM", free, 40 << 20), "cuda": Room("cuda:0", 0, 0)}
    monkeypatch.setattr(_room, "room_for", lambda device, **_: rooms[device.type])
    storage = PackedStorage(1_000, device="cuda", offload=True)
    if fits:
        storage.set(range(2), BIG)  # a warning would be an error
        assert len(driver.locked) == 1
        return
    words = r"1,000 rows of .* take 11.* 10.0 MiB of RAM are free .*ulimit -l.*ReplayBuffer\(device="
    with pytest.raises(MemoryError, match=words):
        storage.set(range(2), BIG)
    assert (driver.log, storage.initialized, len(storage)) == ([], False, 0)


def test_pages_that_the_driver_refuses_to_lock_are_a_memory_error(driver, monkeypatch):
    driver.refuses = 2
    storage = PackedStorage(1_000, device="cuda", offload=True)
    words = r"take 11.7 MiB, which cannot be allocated: .* RAM .*locking failed, out of memory \(2\)\. .*ulimit -l"
    with pytest.raises(MemoryError, match=words):
        storage.set(range(2), BIG)
    assert (storage.initialized, len(storage)) == (False, 0)
    (_, address, *_), *others = driver.log
    assert others == [("forget", 3)]
    assert not is_mapped(address)
    driver.refuses = 0
    storage.set(range(2), BIG)
    monkeypatch.setattr(memory, "require_room", lambda *_, **__: None)
    with pytest.raises(MemoryError, match=r"109.1 PiB, which cannot be allocated: .* of RAM .*Cannot allocate memory"):
        PackedStorage(10**13, device="cuda", offload=True).set(range(2), BIG)
    assert len(driver.locked) == 1


def test_rows_that_are_too_many_for_a_gpu_are_told_of_the_ram(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = PackedStorage(10, device="cuda")
    monkeypatch.setattr(memory, "require_room", lambda *_, **__: None)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(MemoryError, match="or offload=True, which keeps the rows in RAM"):
        storage.set(range(2), BIG)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cpu": ({"device": "cpu"}, r"RAM, where the device reads them: it needs device='cuda', got device='cpu'"),
    "auto": ({"device": "auto"}, "needs device='cuda', got device='auto'"),
    "shared": ({"shared": True}, r"without scratch_dir or shared.* ReplayBuffer\(device="),
    "file": ({"scratch_dir": "x"}, r"without scratch_dir or shared.* ReplayBuffer\(device="),
    "share_next": ({"share_next": True}, "excludes share_next and frames"),
    "frames": ({"frames": {"pixels": 4}}, "excludes share_next and frames"),
}


@pytest.mark.parametrize(("settings", "match"), REFUSED.values(), ids=REFUSED)
def test_what_excludes_it_is_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PackedStorage(10, **{"device": "cuda", "offload": True, **settings})


def test_systems_that_map_locked_pages_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(ValueError, match="offload=True needs Linux"):
        PackedStorage(10, device="cuda", offload=True)


def test_rows_are_planned_in_the_ram_and_priorities_on_the_gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = {"cpu": Room("RAM", 20 << 20, 40 << 20), "cuda": Room("cuda:0", 1 << 20, 2 << 20)}
    monkeypatch.setattr("rlbuf_td.diagnostics.memory_plan.room_for", lambda device, **_: rooms[device.type])
    monkeypatch.setattr("rlbuf_td.diagnostics.memory_plan.ram", lambda: rooms["cpu"])
    monkeypatch.setattr("rlbuf_td.diagnostics.memory_plan.disk", lambda _: Room("disk (here)", 1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    needed = plan(BIG[0], 1_000, sampler=ProportionalSampler, device="cuda", offload=True)
    assert ([room.place for room in needed.places], needed.memory.place) == (["RAM", "disk (here)"], "cuda:0")
    assert needed.fits
    assert not plan(BIG[0], 100_000, device="cuda", offload=True).fits
    on_gpu = plan(BIG[0], 1_000, device="cuda")
    assert not on_gpu.fits
    assert "put the rows elsewhere: offload=True keeps them in RAM, where the GPU reads them" in on_gpu.remedy
    assert "put the rows elsewhere: device='cpu', scratch_dir=... keeps them in a file" in on_gpu.remedy
    storage = PackedStorage(1_000, device="cuda", offload=True)
    storage.set(range(2), BIG)
    storage.device = torch.device("cuda")  # the stand-in's tensors are the CPU's
    assert plan(storage).places[0].place == "RAM"
    with pytest.raises(ValueError, match="needs device='cuda', got device='cpu'"):
        plan(BIG[0], 1_000, offload=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnADevice:
    @pytest.mark.parametrize("index", range(max(1, torch.cuda.device_count())))
    def test_rows_take_ram_and_none_of_the_device(self, index: int) -> None:
        device = torch.device("cuda", index)
        before = torch.cuda.memory_allocated(device)
        storage = PackedStorage(100_000, device=device, offload=True)
        storage.set(range(2), BIG.to(device))
        assert storage.nbytes > 1 << 30
        assert torch.cuda.memory_allocated(device) - before < 1 << 20
        assert storage.device == storage[torch.tensor([0, 1])].device == device
        assert_same(storage[torch.tensor([1, 0])].cpu(), BIG)

    def test_kernels_read_and_write_what_lies_there(self) -> None:
        storage, plain = PackedStorage(1_000, device="cuda", offload=True), PackedStorage(1_000)
        for start, seed in ((0, 1), (600, 2), (200, 3)):
            data = transitions(NESTED, 600, seed=seed)
            for one in (storage, plain):
                one.write(start, data)
        index = torch.randint(1_000, (5_000,))
        assert_same(storage[index].cpu(), plain[index])
        assert_same(storage.gather(index.cuda()).cpu(), plain[index])
        assert_same(storage[:].cpu(), plain[:])

    def test_pages_are_given_back_and_no_error_is_left(self) -> None:
        for _ in range(3):
            storage = PackedStorage(10_000, device="cuda", offload=True)
            storage.set(range(2), BIG.cuda())
            address = storage.all_rows().matrix.data_ptr()
            storage.get(torch.zeros(10_000, dtype=torch.int64))
            del storage
            gc.collect()
            assert not is_mapped(address)
        assert torch.ones(3, device="cuda").sum().item() == 3

    def test_a_refused_lock_leaves_no_error_behind(self) -> None:
        kept = page_locked.page_locked(1 << 20, torch.device("cuda"))
        code = torch.cuda.cudart().cudaHostRegister(kept.data_ptr(), 1 << 20, 3)  # registered already
        assert int(code)
        page_locked._forget_error(0)
        assert torch.ones(3, device="cuda").sum().item() == 3

    def test_a_captured_step_reads_rows_written_after_it_was_captured(self) -> None:
        storage = PackedStorage(1_000, device="cuda", offload=True)
        rb = ReplayBuffer(storage=storage, sampler=ProportionalSampler(1_000), batch_size=256)
        x = torch.arange(1_000, device="cuda")
        rb.extend(TensorDict({"x": x[:500]}, [500]))
        step = rb.capture()
        step()
        rb.extend(TensorDict({"x": -x}, [1_000]))
        batch = step()
        assert (batch["x"] <= 0).all()
