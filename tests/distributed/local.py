"""Shards in this process: what a client takes for Ray, fast and deterministic."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from functools import partial
from inspect import iscoroutine
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from rlbuf_td import ReplayBuffer
from rlbuf_td.buffers.flow import FlowControl
from rlbuf_td.distributed.client import Client
from rlbuf_td.distributed.shard import Shard, Spec
from rlbuf_td.distributed.sharded import Limiter, ShardedReplayBuffer

_METHODS = "report", "answer", "write", "refusals", "empty", "dump", "prepare"
_METHODS += "accept", "discard"


class LocalLayout:
    """The layout that the shards agree on."""

    def __init__(self) -> None:
        self.layout: bytes | None = None

    def find(self) -> bytes | None:
        return self.layout

    def offer(self, layout: bytes) -> bytes:
        self.layout = self.layout or layout
        return self.layout

    def replace(self, layout: bytes) -> None:
        self.layout = layout


class Later:
    """The answer of a frozen process, which calls the method when it goes on."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.is_there, self.answer = call, False, None

    def arrive(self) -> None:
        self.answer, self.is_there = self.call(), True


class Process:
    """Answers at once, or, while it is frozen, later."""

    def __init__(self) -> None:
        self.is_frozen = False
        self.waiting: list[Later] = []

    def answer(self, call: Callable[[], Any]):
        if not self.is_frozen:
            return call()
        self.waiting.append(Later(call))
        return self.waiting[-1]

    def thaw(self) -> None:
        self.is_frozen, waiting, self.waiting = False, self.waiting, []
        for later in waiting:
            later.arrive()


class Method:
    def __init__(self, handle: LocalHandle, name: str) -> None:
        self.handle, self.name = handle, name

    def options(self, max_task_retries: int) -> Method:
        return self

    def remote(self, *given):
        """Call the method at once; return what came out of it, as bytes."""
        handle = self.handle
        handle.calls.append(self.name)
        return handle.process.answer(partial(self._call, pickle.dumps(given)))

    def _call(self, given: bytes):
        if self.handle.is_lost:
            return ActorUnavailableError("lost", None)
        try:
            return getattr(self.handle.shard, self.name)(*pickle.loads(given))
        except Exception as error:  # noqa: BLE001  as Ray does, the caller gets it
            return error


class LocalHandle:
    def __init__(
        self, make_buffer: Callable[[], ReplayBuffer], agreed: LocalLayout
    ) -> None:
        self.make_buffer, self.agreed, self.is_lost = make_buffer, agreed, False
        self.calls: list[str] = []
        self.process = Process()
        self.shard = Shard(make_buffer, lambda: None, agreed)
        for name in _METHODS:
            setattr(self, name, Method(self, name))

    def restart(self, dump: str | None = None) -> None:
        self.restart_from(lambda: dump)

    def restart_from(self, find_dump: Callable[[], str | None]) -> None:
        self.shard = Shard(self.make_buffer, find_dump, self.agreed)
        self.is_lost = False


#: Of flow control, whose calls share it as in its actor.
_LOOP = asyncio.new_event_loop()


class LocalLimiter:
    """Flow control in this process; the calls return at once or wait, as those to Ray's
    actor."""

    def __init__(self, flow: FlowControl) -> None:
        self.process = Process()
        self.limiter = Limiter(
            lambda: None, flow.samples_per_insert, flow.min_size, flow.given_tolerance
        )

    def __getattr__(self, name: str):
        def remote(*given, **named):
            return self.process.answer(partial(call, *given, **named))

        def call(*given, **named):
            try:
                result = getattr(self.limiter, name)(*given, **named)
                return (
                    _LOOP.run_until_complete(result) if iscoroutine(result) else result
                )
            except Exception as error:  # noqa: BLE001
                return error

        return SimpleNamespace(remote=remote)


class LocalEngine:
    """Ray's ``get`` and ``wait``, which wait for no answer."""

    def get(self, answer, timeout: float | None = None):
        if isinstance(answer, Later):
            if not answer.is_there:
                assert timeout is not None, "this call would wait forever"
                raise GetTimeoutError
            answer = answer.answer
        if isinstance(answer, Exception):
            raise answer
        return pickle.loads(pickle.dumps(answer))

    def wait(
        self, answers: list[Any], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        late = [
            each for each in answers if isinstance(each, Later) and not each.is_there
        ]
        found = [each for each in answers if not any(each is other for other in late)]
        is_enough = len(found) >= num_returns
        assert is_enough or timeout is not None, "this call would wait forever"
        return found, late

    def cancel(self, answer) -> None:
        pass


def connect(
    handles: list[LocalHandle], flow
) -> tuple[list[LocalHandle], Any, LocalEngine]:
    return handles, flow, LocalEngine()


class World:
    def __init__(
        self, shards: int, make_buffer: Callable[[], ReplayBuffer], flow=None
    ) -> None:
        self.agreed = LocalLayout()
        self.handles = [LocalHandle(make_buffer, self.agreed) for _ in range(shards)]
        self.spec = Spec.of(make_buffer())
        self.flow: Any = None if flow is None else LocalLimiter(flow)

    def client(self, home: int | None = None, prefetch: int = 0) -> Client:
        connection = partial(connect, self.handles, self.flow)
        return Client(connection, self.spec, None, prefetch, home)

    def buffer(self) -> ShardedReplayBuffer:
        """Return a client that can also dump, load and empty the shards."""
        return Whole(self)

    @property
    def shards(self) -> list[Shard]:
        return [handle.shard for handle in self.handles]


class Whole(ShardedReplayBuffer):
    def __init__(self, world: World) -> None:
        self.dump_dir, self._actors, self._next_home = None, [*world.handles], 0
        Client.__init__(
            self, partial(connect, world.handles, world.flow), world.spec, None, 0, None
        )
