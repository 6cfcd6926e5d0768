"""The replay buffer that starts and stops the shards, and draws from all of them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray

from rlbuf_td.buffers.flow import FlowControl
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.checkpoint import CheckpointError
from rlbuf_td.distributed.client import Client
from rlbuf_td.distributed.limiter import Limiter
from rlbuf_td.distributed.links import OnLoss
from rlbuf_td.distributed.segments import deal
from rlbuf_td.distributed.shard import Shard
from rlbuf_td.distributed.spec import Spec

_MANIFEST = "shards.json"
_LONG = 3_600.0  # the longest time for a dump or a load, in seconds


def connect(name: str, shards: int, has_flow: bool, address: str, namespace: str) -> tuple[list[Any], Any, Any]:
    """Return the actors of a buffer by their names; connect this process to Ray first, if necessary."""
    if not ray.is_initialized():
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="error")
    handles = [ray.get_actor(f"{name}-{place}", namespace) for place in range(shards)]
    return handles, ray.get_actor(f"{name}-flow", namespace) if has_flow else None, ray


class ShardedReplayBuffer(Client):
    """A replay buffer in shards, each an ordinary buffer in a Ray actor; batches come from all of them.

    A batch is drawn as from one buffer with all rows: ``P(i) = p_i^alpha / sum_j p_j^alpha``. Importance weights use
    the number of rows in all shards, and the sum and minimum of their ``p^alpha``. With one learner, probabilities are
    exact even while others write: a shard draws with the mass that the learner knows, and only then applies TD errors
    and new rows. With several learners, each changes priorities without the others' knowledge: the importance weights
    correct for this, and :meth:`health` counts the affected rows as ``drifted``. Each client has its own ``beta``.

    A batch takes one request per shard that it touches. The request also brings the TD errors of earlier batches.
    All writes of a client go to one shard, so that trajectories stay whole; the shard computes n-step returns,
    sequences and hindsight. If clients share a shard, a trajectory is cut where another client's rows follow: use as
    many shards as writing clients, or TorchRL's ``trajs_per_batch``, which writes whole trajectories. Goals of
    hindsight's ``"random"`` strategy come from the same shard.

    TorchRL's ``Collector`` takes this object or a client as its ``replay_buffer``, and ``RayCollector`` takes this
    object. ``MultiSyncCollector`` and ``MultiAsyncCollector`` take a :meth:`client`, and must spawn their workers,
    because forked ones cannot use Ray. TorchRL's ``DistributedCollector``, ``RPCCollector`` and
    ``DistributedSyncCollector`` do not pass a replay buffer to their workers.

    Args:
        num_shards: number of actors to start.
        make_buffer: returns a :class:`~rlbuf_td.ReplayBuffer` with rows in RAM, a uniform or proportional sampler,
            perhaps wrapped; called in every shard, and once in this process.
        batch_size: the rows of a batch; default: the batch size of the buffers.
        samples_per_insert: rows sampled per row written: batches and writes wait to keep this ratio.
        min_size: rows that must have been written before the first batch.
        tolerance: the allowed deviation in sampled rows (:class:`~rlbuf_td.buffers.flow.FlowControl`); ``None``: the
            smallest possible.
        prefetch: k, the number of batches that one request draws ahead. They use the priorities at the time of the
            request; TD errors take effect after k to 2k batches. Ray's time per batch is divided by k.
        dump_dir: the default folder of :meth:`dumps`, whose content a restarted shard loads.
        placement_strategy: where Ray starts the shards: ``"SPREAD"`` over machines, or ``"PACK"`` on few.
        on_loss: ``"continue"``: go on without a lost shard; ``"raise"``: raise a ``ShardLost``.
        **actor_options: options of Ray's actors: ``num_cpus`` (default 0), ``max_restarts`` (default -1: no limit) ...

    Raises:
        TypeError: ``make_buffer`` does not return a ReplayBuffer over a PackedStorage.
        ValueError: an argument is out of range, or a part of the buffer has no exact form over shards (for example a
            ``RankSampler`` or a transform).

    Cost: per request, about 0.5 ms of a core in Ray, and O(B log N) in the shard; see :mod:`rlbuf_td.distributed`.

    Example:
        >>> from tensordict import TensorDict
        >>> from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer
        >>> from rlbuf_td.distributed import ShardedReplayBuffer
        >>> def make_buffer():
        ...     return ReplayBuffer(storage=PackedStorage(100), sampler=ProportionalSampler(100), batch_size=4)
        >>> with ShardedReplayBuffer(2, make_buffer) as rb:
        ...     for client in rb.clients(2):  # for two collectors
        ...         client.extend(TensorDict({"observation": torch.zeros(5, 3)}, [5]))
        ...     batch = rb.sample()
        ...     batch["td_error"] = torch.rand(4)
        ...     rb.update_tensordict_priority(batch)
        ...     len(rb), batch["observation"].shape
        (10, torch.Size([4, 3]))
    """

    def __init__(
        self,
        num_shards: int,
        make_buffer: Callable[[], ReplayBuffer],
        *,
        batch_size: int | None = None,
        samples_per_insert: float | None = None,
        min_size: int = 0,
        tolerance: float | None = None,
        prefetch: int = 0,
        dump_dir: str | Path | None = None,
        placement_strategy: str = "SPREAD",
        on_loss: OnLoss = "continue",
        **actor_options: Any,
    ) -> None:
        if isinstance(num_shards, bool) or int(num_shards) != num_shards or num_shards < 1:
            raise ValueError(f"num_shards must be a whole number, at least 1, got {num_shards}")
        if isinstance(prefetch, bool) or int(prefetch) != prefetch or prefetch < 0:
            raise ValueError(f"prefetch must be a whole number, at least 0, got {prefetch}")
        if on_loss not in ("continue", "raise"):
            raise ValueError(f"on_loss must be 'continue' or 'raise', got {on_loss!r}")
        spec = Spec.of(make_buffer())
        has_flow = samples_per_insert is not None or tolerance is not None or min_size != 0
        flow = FlowControl(samples_per_insert, min_size, tolerance) if has_flow else None
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level="error")
        self.dump_dir, self._next_home = None if dump_dir is None else Path(dump_dir).absolute(), 0
        name, context = f"rlbuf_td-{uuid.uuid4().hex[:12]}", ray.get_runtime_context()
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": placement_strategy} | actor_options
        if placement_strategy == "PACK":
            options["scheduling_strategy"] = "DEFAULT"  # Ray's default packs
        actor = ray.remote(Shard)
        self._actors = [
            actor.options(name=f"{name}-{place}", **options).remote(make_buffer, self._dump_of(place))
            for place in range(num_shards)
        ]
        if flow is not None:
            self._actors.append(ray.remote(Limiter).options(name=f"{name}-flow", num_cpus=0).remote(flow))
        where = name, num_shards, has_flow, context.gcs_address, context.namespace
        super().__init__(partial(connect, *where), spec, batch_size, prefetch, on_loss, None)

    def __reduce__(self) -> Any:
        """Pickle and copy as a :class:`Client`: only this object can shut the shards down."""
        return Client, self._given

    # -- clients

    def client(self) -> Client:
        """Return a client for one learner or collector in any process; it cannot shut the shards down."""
        self._next_home += 1
        return self._client(None)

    def clients(self, n: int) -> list[Client]:
        """Return ``n`` clients, which write to different shards in turn."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"n must be a whole number, at least 1, got {n}")
        first, self._next_home = self._next_home, self._next_home + n
        return [self._client((first + place) % len(self.links.handles)) for place in range(n)]

    def _client(self, home: int | None) -> Client:
        return Client(*self._given[:-1], home)

    # -- contents

    def health(self) -> dict[str, Any]:
        """Return the state of shards and flow control.

        Returns:
            ``"shards"``: a dict for each, with ``alive``, ``rows``, ``waiting``, ``mass``, ``inserts``, ``lost_rows``,
            ``stale_updates``, ``drifted`` and ``requests``; ``"lost_shards"``: how often this object lost a shard;
            ``"retries"``: batches of this object that were drawn again; ``"stale_updates"``: all skipped TD errors;
            with flow control, ``"flow"``: its counters.
        """
        reports = self.links.ask("report")
        for place, report in reports.items():
            self.links.hear(place, report)
        shards = []
        for place, lost_rows in enumerate(self.links.lost_rows):
            report = reports.get(place)
            shard: dict[str, Any] = {"alive": report is not None, "lost_rows": lost_rows}
            if report is not None:
                shard |= {"rows": report.rows, "waiting": report.waiting, "mass": report.mass}
                shard |= {"inserts": report.written, "stale_updates": report.stale, "drifted": report.drifted}
                shard |= {"requests": report.requests}
            shards.append(shard)
        found = {"shards": shards, "lost_shards": self.links.losses, "retries": self.retries}
        found["stale_updates"] = self.stale + sum(shard.get("stale_updates", 0) for shard in shards)
        return found if self._flow is None else found | {"flow": ray.get(self._flow.report.remote())}

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}(batch_size={self.batch_size}, prefetch={self.prefetch}, shards:"]
        for place, shard in enumerate(self.health()["shards"]):
            shown = f"{shard['rows']:,} rows, mass {shard['mass']:.6g}" if shard["alive"] else "lost"
            lines.append(f"    {place}: {shown}")
        return "\n".join(lines) + "\n)"

    # -- all rows

    def empty(self) -> None:
        """Forget all rows and priorities, including rows that are not yet written."""
        self.synchronize()
        self._forget()
        for place, report in self.links.ask("empty").items():
            self.links.hear(place, report)

    def _dump_of(self, place: int, path: Path | None = None) -> str | None:
        path = self.dump_dir if path is None else path
        return None if path is None else str(path / f"shard-{place:04d}")

    def dumps(self, path: str | Path | None = None) -> None:
        """Save each shard in a separate folder in ``path``, which all machines must be able to write to.

        After a crash, the old or the new dump of each shard is intact. Each shard first writes its waiting rows.

        Args:
            path: the folder; default: ``dump_dir``, whose dump restarted shards load.

        Raises:
            ValueError: neither ``path`` nor ``dump_dir`` is given.
            CheckpointError: a part of a buffer cannot be saved, or a shard is lost.
        """
        path = self._folder(path)
        path.mkdir(parents=True, exist_ok=True)
        self.synchronize()
        shards = range(len(self.links.handles))
        calls = self.links.start("dump", {place: (self._dump_of(place, path),) for place in shards})
        steps = self.links.finish(calls, _LONG)
        if len(steps) < len(shards):
            raise CheckpointError(f"shards {sorted(set(shards) - steps.keys())} are lost: the dump is not complete")
        self.links.refresh()
        found = {"steps": [steps[place][0] for place in shards], "lanes": max(steps[place][1] for place in shards)}
        (path / _MANIFEST).write_text(json.dumps(found))

    def loads(self, path: str | Path | None = None) -> None:
        """Replace the content by that of a dump, which may be from another number of shards.

        If the number differs, rows and priorities are redistributed in order; at most one trajectory per lane and shard
        is cut.

        Args:
            path: the folder of the dump; default: ``dump_dir``.

        Raises:
            CheckpointError: the folder holds no complete dump.
            ValueError: the shards have too little room for the rows of the dump; nothing has changed.
        """
        path, count = self._folder(path), len(self.links.handles)
        try:
            manifest = json.loads((path / _MANIFEST).read_text())
            steps, lanes = manifest["steps"], manifest["lanes"]
        except (OSError, ValueError, KeyError):
            raise CheckpointError(f"there is no dump of a ShardedReplayBuffer in {path}") from None
        dealt = deal(steps, count)
        most = max(sum(number for *_, number in part) for part in dealt) * lanes
        if len(steps) == count:
            parts: Any = [[(self._dump_of(place, path), 0, None)] for place in range(count)]
        else:
            parts = [[(self._dump_of(dump, path), *part) for dump, *part in part] for part in dealt]
            if most > self.spec.capacity:
                raise ValueError(f"a shard would get {most} rows of the dump, and has room for {self.spec.capacity}")
        calls = self.links.start("load", {place: (segments,) for place, segments in enumerate(parts)})
        reports = self.links.finish(calls, _LONG)
        for place, report in reports.items():
            self.links.hear(place, report)
        if len(reports) < count:
            raise CheckpointError("shards were lost during the load")
        self._forget()

    def _folder(self, path: str | Path | None) -> Path:
        path = self.dump_dir if path is None else Path(path).absolute()
        if path is None:
            raise ValueError("there is no folder for the dump: pass a path, or dump_dir to the constructor")
        return path

    # -- life cycle

    def start(self) -> ShardedReplayBuffer:
        """Return this object, whose shards already run; TorchRL's trainers call this method."""
        return self

    @property
    def is_alive(self) -> bool:
        """Whether the shards have not been shut down."""
        return bool(self._actors)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop all shards, and wake calls that wait for flow control; rows that were not dumped are lost."""
        if self._flow is not None and self._actors:
            ray.get(self._flow.shutdown.remote(), timeout=timeout or 10.0)
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)

    close = shutdown

    def __enter__(self) -> ShardedReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
