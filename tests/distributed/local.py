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
from ray.exceptions import ActorUnavailableError

from rlbuf_td import ReplayBuffer
from rlbuf_td.buffers.flow import FlowControl
from rlbuf_td.distributed.client import Client
from rlbuf_td.distributed.shard import Shard, Spec
from rlbuf_td.distributed.sharded import Limiter, ShardedReplayBuffer

_METHODS = "report", "answer", "write", "empty", "dump", "prepare", "accept", "discard"


class Method:
    def __init__(self, handle: LocalHandle, name: str) -> None:
        self.handle, self.name = handle, name

    def options(self, max_task_retries: int) -> Method:
        return self

    def remote(self, *given: Any) -> Any:
        """Call the method at once; return what came out of it, as bytes."""
        handle = self.handle
        handle.calls.append(self.name)
        if handle.is_lost:
            return ActorUnavailableError("lost", None)
        try:
            answer = getattr(handle.shard, self.name)(
                *pickle.loads(pickle.dumps(given))
            )
        except Exception as error:  # noqa: BLE001  as Ray does, the caller gets it
            return error
        return answer


class LocalHandle:
    def __init__(self, make_buffer: Callable[[], ReplayBuffer]) -> None:
        self.make_buffer, self.is_lost = make_buffer, False
        self.calls: list[str] = []
        self.shard = Shard(make_buffer, lambda: None)
        for name in _METHODS:
            setattr(self, name, Method(self, name))

    def restart(self, dump: str | None = None) -> None:
        self.restart_from(lambda: dump)

    def restart_from(self, find_dump: Callable[[], str | None]) -> None:
        self.shard, self.is_lost = Shard(self.make_buffer, find_dump), False


class LocalLimiter:
    """Flow control in this process; the calls return at once or wait, as those to Ray's
    actor."""

    def __init__(self, flow: FlowControl) -> None:
        self.limiter = Limiter(
            flow.samples_per_insert, flow.min_size, flow.given_tolerance
        )

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any, **named: Any) -> Any:
            try:
                found = getattr(self.limiter, name)(*given, **named)
                return asyncio.run(found) if iscoroutine(found) else found
            except Exception as error:  # noqa: BLE001
                return error

        return SimpleNamespace(remote=remote)


class LocalEngine:
    """Ray's ``get`` and ``wait``, for answers that are there already."""

    def get(self, answer: Any, timeout: float | None = None) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return pickle.loads(pickle.dumps(answer))

    def wait(
        self, answers: list[Any], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        return answers, []


def connect(
    handles: list[LocalHandle], flow: Any
) -> tuple[list[LocalHandle], Any, LocalEngine]:
    return handles, flow, LocalEngine()


class World:
    def __init__(
        self, shards: int, make_buffer: Callable[[], ReplayBuffer], flow: Any = None
    ) -> None:
        self.handles = [LocalHandle(make_buffer) for _ in range(shards)]
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
        self.dump_dir, self._actors, self._next_home = None, [], 0
        Client.__init__(
            self, partial(connect, world.handles, world.flow), world.spec, None, 0, None
        )
