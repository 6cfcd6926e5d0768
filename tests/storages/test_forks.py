"""A fork beside a thread that is inside a call of a buffer: neither process waits for ever."""

from __future__ import annotations

import copy
import multiprocessing as mp
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from numba.core.compiler_lock import global_compiler_lock
from tensordict import TensorDict

from rlbuf_td import PackedStorage, RankSampler, ReplayBuffer

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:this process was forked"),
]


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.rand(count, 3)}, [count])


def test_the_first_write_of_a_child_warns_if_the_buffer_is_not_shared() -> None:
    def write_twice(rb: ReplayBuffer) -> None:
        with pytest.warns(UserWarning, match=r"forked from .* not shared: .* Call rb.share\(\) before forking"):
            rb.extend(rows(3))
        warnings.simplefilter("error")
        rb.extend(rows(3))

    def write_to_a_copy(rb: ReplayBuffer) -> None:
        copy.deepcopy(rb).extend(rows(3))

    for act, shared in ((write_twice, False), (write_to_a_copy, False), (lambda rb: rb.extend(rows(3)), True)):
        rb = ReplayBuffer(storage=PackedStorage(100), batch_size=8, shared=shared)
        for _ in range(3):
            rb.extend(rows(3))  # bound
        child = mp.get_context("fork").Process(target=act, args=(rb,))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert len(rb) == 9 + 3 * shared


def use(rb: ReplayBuffer) -> None:
    batch = rb.sample()
    rb.extend(rows(3))
    rb.update_tensordict_priority(batch.set("td_error", torch.rand(8)))


def fork_beside(hold: Callable[[Any], AbstractContextManager[Any]], shared: bool) -> None:
    """Fork while another thread holds a lock, and use the buffer in both processes."""
    os.setsid()  # the test kills this process and its child together
    torch.set_num_threads(1)
    rb = ReplayBuffer(storage=PackedStorage(100), sampler=RankSampler(100), batch_size=8)
    rb.extend(rows(20))
    use(rb)
    if shared:
        rb.share()
    began = threading.Event()

    def work() -> None:
        with hold(rb):
            began.set()
            time.sleep(0.5)

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    child = mp.get_context("fork").Process(target=use, args=(rb,))
    child.start()
    use(rb)
    child.join(20)
    thread.join()
    if child.is_alive():
        child.kill()
    os._exit(0 if child.exitcode == 0 else 1)


@contextmanager
def inside_a_draw(rb: Any) -> Iterator[None]:
    with rb.storage.lock, rb.sampler.law.table.lock:
        yield


HOLDS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "numba's compiler": lambda rb: global_compiler_lock,
    "the rows": lambda rb: rb.storage.lock,
    "the ranks": inside_a_draw,
}


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("what", HOLDS)
def test_a_fork_beside_a_thread_that_holds_a_lock_stops_no_process(what: str, shared: bool) -> None:
    process = mp.get_context("fork").Process(target=fork_beside, args=(HOLDS[what], shared))
    process.start()
    process.join(30)
    ended = process.exitcode
    if ended is None:
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    assert ended == 0, "a process waits for ever" if ended is None else f"exit status {ended}"
