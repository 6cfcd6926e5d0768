"""The replay buffer that starts and stops the shards and their flow control, and
samples from all shards."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError
from ray.experimental import internal_kv

from rlbuf_td.buffers.flow import FlowControl, make_flow, not_now
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.checkpoint import CheckpointError, load_state, save_state
from rlbuf_td.checkpoint.files import delete_others, is_folder, new_folder
from rlbuf_td.distributed.client import Admission, Client
from rlbuf_td.distributed.links import RECOVERY
from rlbuf_td.distributed.shard import Shard, ShardDump, Spec
from rlbuf_td.storages.checks import State, is_count, optional, whole

_LONG = 3_600.0  # longest time for a dump or a load, in seconds
_STORE = "rlbuf_td"  # the namespace of keys in Ray's key-value store
_KIND, _FOLDER = "ShardedReplayBuffer", "shards"  # of the manifest of a dump


class Manifest(NamedTuple):
    """Which dumps of shards belong together: the last complete dump in a folder."""

    dump: str  # the subfolder, with a folder for each shard
    steps: list[int]  # the number of time steps of each shard
    lanes: int
    flow: State | None  # the state of flow control

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Return the manifest in the folder ``path``; raise a CheckpointError if there
        is none."""
        state = load_state(path / _FOLDER, _KIND)
        with suppress(TypeError):
            manifest = cls(**state)
            counts = manifest.lanes, *manifest.steps
            if is_folder(manifest.dump) and all(map(is_count, counts)):
                return manifest
        raise CheckpointError(
            f"{path} does not say which dumps of shards belong together: {state}"
        )

    @classmethod
    def last(cls, path: Path) -> Manifest | None:
        try:
            return cls.read(path)
        except CheckpointError:
            return None

    def folders(self, path: Path) -> list[str]:
        return [str(path / self.dump / name) for name in _names(len(self.steps))]


def _names(shards: int) -> list[str]:
    return [f"shard-{shard:04d}" for shard in range(shards)]


def newest_dump(path: Path, shard: int, shards: int) -> str | None:
    """Return the folder of a shard's last dump; None if there is none of as many
    shards."""
    manifest = Manifest.last(path)
    if manifest is None or len(manifest.steps) != shards:
        return None
    return manifest.folders(path)[shard]


def dump_after_restart(path: Path | None, shard: int, shards: int) -> str | None:
    """Return the dump from which the shard of this process continues; None if it has
    not been restarted."""
    if path is None or not is_restarted():
        return None
    return newest_dump(path, shard, shards)


def is_restarted() -> bool:
    """Whether Ray has restarted the actor of this process."""
    with warnings.catch_warnings():
        # Ray's own code causes this warning
        warnings.simplefilter("ignore", DeprecationWarning)
        return ray.get_runtime_context().was_current_actor_reconstructed


def rows_after_restart(name: str, shards: int, namespace: str) -> int | None:
    """Return the number of rows that the shards have received; None if the actor of
    this process has not been restarted."""
    if not is_restarted():
        return None
    calls = []
    for shard in range(shards):
        with suppress(ValueError):  # Ray does not restart it
            handle = ray.get_actor(f"{name}-{shard}", namespace)
            calls.append(handle.report.options(max_task_retries=-1).remote())
    rows = 0
    for call in ray.wait(calls, num_returns=len(calls), timeout=RECOVERY)[0]:
        with suppress(RayActorError):
            rows += ray.get(call).inserts
    return rows


class LayoutInRay:
    """The layout that the shards have agreed on, in the key-value store of Ray's
    cluster: it outlives the processes of the shards.

    Ray has no public form of this store; these functions are as in Ray 2.60.
    """

    def __init__(self, name: str) -> None:
        self._key = f"{name}-layout"

    def find(self) -> bytes | None:
        return internal_kv._internal_kv_get(self._key, namespace=_STORE)

    def offer(self, layout: bytes) -> bytes:
        internal_kv._internal_kv_put(
            self._key, layout, overwrite=False, namespace=_STORE
        )
        return self.find() or layout

    def replace(self, layout: bytes) -> None:
        internal_kv._internal_kv_put(
            self._key, layout, overwrite=True, namespace=_STORE
        )

    def forget(self) -> None:
        internal_kv._internal_kv_del(self._key, namespace=_STORE)


def connect(
    name: str, shards: int, has_flow: bool, address: str, namespace: str
) -> tuple[list[Any], Any, Any]:
    """Connect to Ray; return the tuple that :class:`Client` expects from its argument
    ``connect``."""
    if not ray.is_initialized():
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    handles = [ray.get_actor(f"{name}-{shard}", namespace) for shard in range(shards)]
    return handles, ray.get_actor(f"{name}-flow", namespace) if has_flow else None, ray


class ShardedReplayBuffer(Client):
    """A replay buffer that is divided into shards; each shard is a ReplayBuffer in a
    Ray actor.

    Rows are drawn from all shards as from one large buffer:
    ``P(i) = p_i^alpha / sum_j p_j^alpha``. Importance weights use ``P(i)`` and the
    number of rows in all shards. Each client has its own ``beta``.

    A learner draws with the sums of ``p^alpha`` that the shards last reported. New rows
    therefore usually wait in a shard until its next draw is done: with one learner, the
    probabilities are exact even while collectors write. A shard stores them at once if
    they would fill more than a quarter of its capacity, or if it got no request for 10
    s. Then, and with several learners, importance weights correct for sums that have
    changed.

    A client writes all its rows to one shard, because n-step returns, sequences and
    hindsight goals need whole trajectories in a shard. If two clients write to the same
    shard, a write by one client ends the open trajectories of the other: use as many
    shards as writing clients, or write whole trajectories (``trajs_per_batch`` in
    TorchRL's collectors).

    TorchRL's ``Collector`` takes this object or a client as its ``replay_buffer``, and
    ``RayCollector`` takes this object. ``MultiSyncCollector`` and
    ``MultiAsyncCollector`` take a :meth:`client`, and must spawn their workers, because
    forked processes cannot use Ray. TorchRL's ``DistributedCollector``,
    ``RPCCollector`` and ``DistributedSyncCollector`` do not pass a replay buffer to
    their workers.

    Args:
        num_shards: number of shards to start.
        make_buffer: a function that returns a :class:`~rlbuf_td.ReplayBuffer` with rows
            on the CPU. The buffer needs a uniform or proportional sampler, which
            n-step, sequence and hindsight samplers may wrap. The function is called in
            each shard, and once in this process.
        batch_size: number of rows in a batch; default: the batch size of the buffers.
        samples_per_insert: number of rows sampled per row written. Batches and writes
            wait to keep this ratio.
        min_size: number of rows that must have been written before the first batch.
        tolerance: allowed deviation from ``samples_per_insert``, in sampled rows;
            default: just enough for the largest batch and the largest write so far.
        prefetch: k, the number of batches that one request draws. A TD error takes
            effect after k to 2k batches. Ray's time per batch is divided by k. With 0,
            a request draws one batch, and is sent when the batch is needed.
        dump_dir: default folder of :meth:`dumps`. A restarted shard loads its rows from
            this folder.
        **actor_options: options of Ray's actors, such as ``num_cpus`` (default 0),
            ``max_restarts`` (default -1: no limit) and ``scheduling_strategy`` (default
            ``"SPREAD"``: on different machines).

    Raises:
        TypeError: ``make_buffer`` does not return a ReplayBuffer with a PackedStorage.
        ValueError: an argument is out of range, or the buffer cannot be sharded exactly
            (because of a ``RankSampler`` or a transform, for example).

    Cost: one Ray request per shard with drawn rows, and O(B log N) in the shard to draw
    B of N rows. The page :mod:`rlbuf_td.distributed` has measured times.

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
        **actor_options: Any,
    ) -> None:
        num_shards = whole(1)("num_shards", num_shards)
        prefetch = whole(0)("prefetch", prefetch)
        batch_size = optional(whole(1))("batch_size", batch_size)
        spec = Spec.of(make_buffer())
        flow = make_flow(samples_per_insert, min_size, tolerance)
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        self.dump_dir = None if dump_dir is None else Path(dump_dir).absolute()
        self._next_home = 0
        name = f"rlbuf_td-{uuid.uuid4().hex[:12]}"
        context = ray.get_runtime_context()
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": -1,
            "scheduling_strategy": "SPREAD",
        } | actor_options
        self._agreed = LayoutInRay(name)
        self._actors = []
        for shard in range(num_shards):
            actor = ray.remote(Shard).options(name=f"{name}-{shard}", **options)
            dump = partial(dump_after_restart, self.dump_dir, shard, num_shards)
            self._actors.append(actor.remote(make_buffer, dump, self._agreed))
        if flow is not None:
            actor = ray.remote(Limiter).options(
                name=f"{name}-flow",
                num_cpus=0,
                max_restarts=options["max_restarts"],
                max_task_retries=-1,
            )
            count = partial(rows_after_restart, name, num_shards, context.namespace)
            settings = flow.samples_per_insert, flow.min_size, flow.given_tolerance
            self._actors.append(actor.remote(count, *settings))
        address = context.gcs_address, context.namespace
        connection = partial(connect, name, num_shards, flow is not None, *address)
        super().__init__(connection, spec, batch_size, prefetch, None)

    def __reduce__(self) -> Any:
        """Pickle and copy as a :class:`Client`, because only this object can shut down
        the shards."""
        return Client, self._arguments

    def client(self) -> Client:
        """Return a client for one learner or collector, which may run in another
        process."""
        return self.clients(1)[0]

    def clients(self, n: int) -> list[Client]:
        """Return ``n`` clients, which write to consecutive shards."""
        n = whole(1)("n", n)
        self.links.require_open()
        homes = range(self._next_home, self._next_home + n)
        self._next_home += n
        shards = len(self.links.handles)
        return [Client(*self._arguments[:-1], home % shards) for home in homes]

    def health(self) -> dict[str, Any]:
        """Return the state of the shards and of flow control.

        Returns:
            ``"shards"``: a list of one dict per shard, with ``alive`` and
            ``lost_rows``; the dict of a live shard also has the fields of its
            :class:`~rlbuf_td.distributed.shard.Report`, such as ``rows`` and ``mass``.
            ``"lost_shards"``: how often this object has lost a shard. ``"retries"``:
            how often a draw was repeated because a shard had been lost or emptied.
            ``"stale_updates"``: number of all skipped TD errors. ``"flow"``: counters
            of flow control, if it is used.
        """
        reports = self.links.ask("report")
        shards = []
        for shard, lost_rows in enumerate(self.links.lost_rows):
            report = reports[shard]._asdict() if shard in reports else {}
            shards.append({"alive": shard in reports, "lost_rows": lost_rows} | report)
        stale = sum(report.stale_updates for report in reports.values())
        health = {
            "shards": shards,
            "lost_shards": self.links.losses,
            "retries": self.retries,
            "stale_updates": self.stale + stale,
        }
        flow = self._ask_flow("report")
        return health if flow is None else health | {"flow": flow}

    def __repr__(self) -> str:
        name = type(self).__name__
        if not self.is_alive:
            return f"{name}(shut down)"
        lines = [
            f"{name}(batch_size={self.batch_size}, prefetch={self.prefetch}, shards:"
        ]
        # as last reported: debuggers print objects, and must not wait for a shard
        for shard, report in enumerate(self.links.known):
            shown = (
                "lost"
                if report is None
                else f"{report.rows:,} rows, mass {report.mass:.6g}"
            )
            lines.append(f"    {shard}: {shown}")
        return "\n".join(lines) + "\n)"

    def empty(self) -> None:
        """Remove all rows and priorities, with received rows that are not yet stored;
        restart flow control."""
        self.synchronize()
        self._forget()
        self.links.ask("empty")
        self._ask_flow("restart", 0)

    def dumps(self, path: str | Path | None = None) -> None:
        """Save each shard in a subfolder of ``path``, to which all machines must be
        able to write.

        A dump is written beside the previous one and then replaces it: if the call is
        interrupted, or a shard crashes while it saves, the previous dump stays valid.
        Data that has not changed is not written again.

        Args:
            path: the folder; default: ``dump_dir``, from which restarted shards load
                their rows.

        Raises:
            ValueError: neither ``path`` nor ``dump_dir`` is given.
            CheckpointError: a component of a buffer cannot be saved, or a shard is
                lost.
        """
        path = self._folder(path)
        self.synchronize()
        names = _names(len(self.links.handles))
        last = Manifest.last(path)
        folder = new_folder(path, _FOLDER, last and last.dump, names)
        flow = self._ask_flow("state_dict")
        folders = {shard: (str(folder / name),) for shard, name in enumerate(names)}
        sizes = self.links.finish(self.links.start("dump", folders), _LONG)
        lost = sorted(folders.keys() - sizes.keys())
        if lost:
            raise CheckpointError(f"shards {lost} are lost: the dump is not complete")
        self.links.ask("report")
        steps = [sizes[shard][0] for shard in folders]
        lanes = max(lanes for _, lanes in sizes.values())
        manifest = Manifest(folder.name, steps, lanes, flow)
        # This makes the new dump the valid one.
        save_state(path / _FOLDER, _KIND, manifest._asdict())
        delete_others(folder)

    def loads(self, path: str | Path | None = None) -> None:
        """Replace all rows and priorities by those of a dump, and the counts of flow
        control.

        If the dump has a different number of shards, its time steps are joined, shard
        after shard, and cut into equal
        parts: each shard of this buffer reads its part, and writes it as new rows with
        the saved priorities. Where the rows of one shard are divided, at most one
        trajectory per lane is divided. While a shard loads, it holds its old and its
        new rows.

        Args:
            path: the folder of the dump; default: ``dump_dir``.

        Raises:
            CheckpointError: the folder holds no complete dump, or a file of it is
                damaged; nothing has changed. Also raised if a shard was lost during the
                load.
            ValueError: no folder is given, or the capacity of a shard is too small;
                nothing has changed.
        """
        self.links.require_open()
        path = self._folder(path)
        links = self.links
        manifest = Manifest.read(path)
        parts = self._parts(path, manifest)
        try:
            FlowControl().refuse_state(manifest.flow)
        except ValueError as error:
            raise CheckpointError(f"cannot load {path}: {error}") from None
        try:
            prepared = links.finish(links.start("prepare", parts), _LONG)
            if len(prepared) < len(parts):
                raise CheckpointError("shards are lost: nothing was loaded")
        except BaseException:
            links.start("discard", dict.fromkeys(links.live, ()))
            raise
        reports = links.reports(links.start("accept", dict.fromkeys(parts, ())), _LONG)
        self._forget()
        rows = sum(report.rows for report in reports.values())
        self._ask_flow("restore", manifest.flow, rows)
        if len(reports) < len(parts):
            raise CheckpointError("shards were lost during the load")

    def _parts(self, path: Path, manifest: Manifest) -> dict[int, tuple[Any, ...]]:
        """Return what each shard loads, arguments of :meth:`Shard.prepare`; ValueError
        if it has too little room."""
        count = len(self.links.handles)
        total = sum(manifest.steps)
        folders = manifest.folders(path)
        dumps = [*map(ShardDump, folders, manifest.steps)]
        if len(dumps) == count:
            return {shard: ([dump],) for shard, dump in enumerate(dumps)}
        ends = [round(shard * total / count) for shard in range(count + 1)]
        parts = [range(first, end) for first, end in pairwise(ends)]
        most = max(map(len, parts)) * manifest.lanes
        if most > self.spec.capacity:
            raise ValueError(
                f"a shard would get {most} rows of the dump, and has room for {self.spec.capacity}"
            )
        return {shard: (dumps, steps) for shard, steps in enumerate(parts)}

    def _folder(self, path: str | Path | None) -> Path:
        path = self.dump_dir if path is None else Path(path).absolute()
        if path is None:
            raise ValueError(
                "there is no folder for the dump: pass a path, or dump_dir to the constructor"
            )
        return path

    def start(self) -> ShardedReplayBuffer:
        """Return this object: its shards already run. TorchRL's trainers call this
        method."""
        return self

    @property
    def is_alive(self) -> bool:
        """True until :meth:`shutdown` is called."""
        return bool(self._actors)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop all shards. Rows that were not dumped are lost, and later or waiting
        calls raise a RuntimeError.

        Clients notice when they next ask a shard: with ``prefetch``, they may first
        return batches drawn ahead.

        Args:
            timeout: not used: this call waits for no shard. TorchRL's buffers have it.
        """
        self._forget()
        self.links.close()
        while self._actors:
            _kill(self._actors[-1])
            self._actors.pop()
        if ray.is_initialized():
            self._agreed.forget()

    close = shutdown

    def __enter__(self) -> ShardedReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _kill(actor: Any) -> None:
    """Kill an actor, whatever its process does; Ray has ended all if it was shut
    down."""
    if ray.is_initialized():
        ray.kill(actor)


class Limiter(FlowControl):
    """Flow control as a Ray actor, which lets calls of clients wait.

    ``count_rows`` returns the number of rows in the shards if this process replaces one
    that has died: the counts go on from them, sampled as often as the target asks.
    """

    def __init__(
        self,
        count_rows: Callable[[], int | None],
        samples_per_insert: float | None,
        min_size: int,
        tolerance: float | None,
    ) -> None:
        super().__init__(samples_per_insert, min_size, tolerance)
        self._incarnation = time.time_ns()
        self._changed = asyncio.Event()  # set at the next change of the counts
        rows = count_rows()
        if rows is not None:
            self.restart(rows)

    @property
    def epoch(self) -> int:
        # what another process has counted is not taken back from these counts
        return self._incarnation + super().epoch

    async def sample(self, rows: int, wait: bool, timeout: float | None) -> Admission:
        """Wait until a batch of ``rows`` rows is admitted; with ``wait=False``, raise
        RuntimeError instead."""
        admit = partial(self.admit_sample, rows)
        reason = partial(self.why_no_batch, rows)
        if wait:
            await self._until(admit, timeout, reason, of_sample=True)
        elif not admit():
            raise RuntimeError(not_now(rows, reason()))
        return self._admitted()

    async def insert(self, rows: int) -> Admission:
        """Wait until a write of ``rows`` rows is admitted."""
        admit = partial(self.admit_insert, rows)
        reason = partial(self.why_no_write, rows)
        await self._until(admit, None, reason, of_sample=False)
        return self._admitted()

    async def _until(
        self,
        admit: Callable[[], bool],
        timeout: float | None,
        reason: Callable[[], str],
        *,
        of_sample: bool,
    ) -> None:
        """Wait until ``admit()`` returns True, for at most ``timeout`` seconds."""
        if admit():
            return
        self.count_wait(of_sample=of_sample)
        # a larger batch or write than any before raises the tolerance for others
        self._wake()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not admit():
            changed = self._changed  # stays set, whenever the call goes on
            seconds = None if deadline is None else deadline - time.monotonic()
            try:
                await asyncio.wait_for(changed.wait(), seconds)
            except asyncio.TimeoutError:
                message = f"waited for {timeout:.3g} seconds: {reason()}"
                raise TimeoutError(message) from None

    def _admitted(self) -> Admission:
        self._wake()
        return Admission(self.epoch, self.inserted)

    # Whatever changes the counts wakes the calls that wait.

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def take_back(self, epoch: int, *, sampled: int = 0, inserted: int = 0) -> None:
        super().take_back(epoch, sampled=sampled, inserted=inserted)
        self._wake()

    def restart(self, rows: int) -> None:
        super().restart(rows)
        self._wake()

    def restore(self, state: State | None, rows: int) -> None:
        super().restore(state, rows)
        self._wake()

    def found_empty(self, epoch: int, inserted: int, sampled: int) -> None:
        """Take back a batch of ``sampled`` rows, because all shards are empty; restart
        the counts.

        The counts are kept if rows have been written since the batch was admitted, with
        ``epoch`` and ``inserted``.
        """
        self.take_back(epoch, sampled=sampled)
        if (epoch, inserted) == (self.epoch, self.inserted):
            self.restart(0)
