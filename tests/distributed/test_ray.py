"""Shards on a Ray of this machine: clients in other processes, losses, flow control,
dumps, collectors."""

from __future__ import annotations

import doctest
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.collectors.distributed import RayCollector
from torchrl.data import RayReplayBuffer
from torchrl.envs import GymEnv

import rlbuf_td
from rlbuf_td import (
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    RingWriter,
    ShutDown,
)
from rlbuf_td.checkpoint import CheckpointError

ray = pytest.importorskip("ray")

from rlbuf_td import distributed  # noqa: E402
from rlbuf_td.distributed import ShardedReplayBuffer  # noqa: E402
from rlbuf_td.distributed.sharded import LayoutInRay  # noqa: E402
from tests.benchmarks import sharded as benchmark  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # starting Ray alone takes seconds
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore"),
]


def make_buffer(capacity: int = 2_000) -> ReplayBuffer:
    return ReplayBuffer(
        storage=PackedStorage(capacity),
        sampler=ProportionalSampler(capacity),
        batch_size=64,
    )


def rows(first: int, count: int) -> TensorDict:
    """Return rows with a checksum in each, so that a torn or mixed one is seen."""
    number = torch.arange(first, first + count)
    checks = {"check": number * 7_919, "wide": number[:, None].expand(count, 40) * 1.0}
    return TensorDict({"id": number, "next": checks}, [count])


def assert_whole(batch: TensorDict) -> None:
    number, checks = batch["id"], batch["next"]
    assert torch.equal(checks["check"], number * 7_919)
    assert (checks["wide"] == number[:, None]).all()


class Writer:
    def __init__(self, client, first: int) -> None:
        torch.set_num_threads(1)
        self.client, self.first = client, first

    def write(self, seconds: float, count: int = 50) -> int:
        """Write some rows, wait 10 ms, and so on; return how many calls were made."""
        calls, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            self.client.extend(rows(self.first, count))
            self.first += count
            calls += 1
            time.sleep(0.01)
        return calls


def process_of_actor(actor: Any, timeout: float | None = None) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=timeout)


def process_of(rb: ShardedReplayBuffer, place: int) -> int:
    return process_of_actor(rb.links.handles[place])


def kill_in_turn(rb: ShardedReplayBuffer, stop: threading.Event, every: float) -> int:
    """Kill one shard after another, each if it runs; return how many were killed."""
    kills, place = 0, 0
    while not stop.wait(every):
        place = (place + 1) % len(rb.links.handles)
        with suppress(ray.exceptions.RayError):  # of a shard that restarts
            process = process_of_actor(rb.links.handles[place], timeout=5.0)
            os.kill(process, signal.SIGKILL)
            kills += 1
    return kills


def learn(rb, seconds: float) -> int:
    end, batches = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        batch = rb.sample(wait=True, timeout=120.0)
        assert_whole(batch)
        batch["td_error"] = torch.rand(len(batch))
        rb.update_tensordict_priority(batch)
        batches += 1
    return batches


def start_writers(clients: Iterable[Any]) -> list[Any]:
    return [
        ray.remote(Writer).options(num_cpus=0).remote(each, 10**7 * place)
        for place, each in enumerate(clients)
    ]


@pytest.fixture(scope="module")
def two_shards(
    cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ShardedReplayBuffer]:
    """Two shards, which tests share: to start one takes seconds."""
    with ShardedReplayBuffer(
        2, make_buffer, dump_dir=tmp_path_factory.mktemp("shards")
    ) as rb:
        yield rb


@pytest.fixture
def rb(two_shards: ShardedReplayBuffer) -> ShardedReplayBuffer:
    two_shards.empty()
    return two_shards


def fill(rb: ShardedReplayBuffer, count: int) -> None:
    for place, client in enumerate(rb.clients(len(rb.links.handles))):
        client.extend(rows(10_000 * place, count))
        client.synchronize()


def test_a_client_in_another_process_writes_what_a_learner_samples(rb):
    (writer,) = start_writers([pickle.loads(pickle.dumps(rb.client()))])
    written = writer.write.remote(1.0)
    batches = learn(rb, 1.0)
    assert batches > 0
    total = 50 * ray.get(written)
    assert rb.write_count == total
    health = rb.health()
    assert sum(shard["inserts"] for shard in health["shards"]) == total
    assert "0: " in repr(rb)
    assert [client._home for client in rb.clients(2)] in ([0, 1], [1, 0])
    with pytest.raises(ValueError, match="n must be a whole number"):
        rb.clients(0)


def test_a_dump_is_loaded_into_another_number_of_shards(rb, tmp_path):
    fill(rb, 300)
    learn(rb, 0.2)
    rb.dumps(tmp_path)
    mass = sum(shard["mass"] for shard in rb.health()["shards"])
    with ShardedReplayBuffer(1, partial(make_buffer, 600)) as other:
        other.loads(tmp_path)
        (shard,) = other.health()["shards"]
        assert (shard["rows"], shard["mass"]) == (600, pytest.approx(mass))
        learn(other, 0.1)
        with pytest.raises(CheckpointError, match="holds no dump"):
            other.loads(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="there is no folder for the dump"):
            other.dumps()
        other.spec = other.spec._replace(capacity=500)
        with pytest.raises(ValueError, match="has room for 500"):
            other.loads(tmp_path)
        refuses_all_after_shutdown(other)


def refuses_all_after_shutdown(rb: ShardedReplayBuffer) -> None:
    """Every call names the shutdown, at once, although batches were drawn ahead."""
    rb.prefetch = 2
    batch, client = rb.sample().set("td_error", torch.rand(64)), rb.client()
    rb.shutdown()
    calls: list[Callable[[], Any]] = [
        rb.sample,
        partial(rb.update_tensordict_priority, batch),
        rb.synchronize,
    ]
    calls += [
        partial(rb.extend, rows(0, 5)),
        partial(rb.add, rows(0, 1)[0]),
        rb.empty,
        rb.health,
        rb.client,
        rb.__len__,
    ]
    calls += [
        partial(rb.loads, "nowhere"),
        partial(rb.dumps, "nowhere"),
        partial(rb.sample, wait=True),
    ]
    for call in calls:
        with pytest.raises(ShutDown, match="the buffer has been shut down"):
            call()
    assert not Path("nowhere").exists()
    assert repr(rb) == "ShardedReplayBuffer(shut down)"
    begin = time.monotonic()
    with pytest.raises(
        distributed.ShardLost,
        match="the buffer has been shut down, or its shards have crashed",
    ):
        client.sample()  # another client finds out from Ray
    assert time.monotonic() - begin < 20


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1")


def single(rb: ShardedReplayBuffer):
    return Collector(
        make_env(),
        None,
        frames_per_batch=100,
        total_frames=400,
        replay_buffer=rb.client(),
    )


def multi(rb: ShardedReplayBuffer):
    return MultiSyncCollector(
        [make_env] * 2,
        None,
        frames_per_batch=100,
        total_frames=400,
        replay_buffer=rb.client(),
    )


def on_ray(rb: ShardedReplayBuffer):
    free = {"num_cpus": 0, "num_gpus": 0}
    return RayCollector(
        [make_env] * 2,
        None,
        frames_per_batch=100,
        total_frames=400,
        replay_buffer=rb,
        remote_configs=free,
    )


def processes_are_gone(processes: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{process}").exists() for process in processes):
            return True
        time.sleep(0.1)
    return False


def limited(shards: int = 1) -> ShardedReplayBuffer:
    """Return a buffer with flow control and 100 rows in its first shard."""
    rb = ShardedReplayBuffer(
        shards, make_buffer, samples_per_insert=4.0, min_size=10, tolerance=500
    )
    client = rb.clients(1)[0]
    client.extend(rows(0, 100))
    client.synchronize()
    return rb


def process_of_flow(rb: ShardedReplayBuffer) -> int:
    return process_of_actor(rb._flow)


def test_flow_control_that_dies_comes_back_with_the_counts_of_the_shards():
    with limited() as rb:
        rb.sample()
        epoch = ray.get(rb._flow.insert.remote(30)).epoch
        os.kill(process_of_flow(rb), signal.SIGKILL)
        # the call waits for the new process
        flow = rb.health()["flow"]
        assert (flow["inserts"], flow["samples"]) == (100, 360)
        rb._flow.take_back.remote(epoch, inserted=30)
        rb.extend(rows(100, 20))
        assert rb.sample(wait=True, timeout=20.0).shape == (64,)
        assert rb.health()["flow"]["inserts"] == 120


def test_a_frozen_flow_control_holds_up_neither_a_batch_nor_the_shutdown():
    rb = limited(2)
    processes = [process_of(rb, 0), process_of(rb, 1), process_of_flow(rb)]
    os.kill(processes[-1], signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="flow control has not answered"):
        rb.sample(wait=True, timeout=1.0)
    assert 1.0 <= time.monotonic() - begin < 4.0
    begin = time.monotonic()
    rb.shutdown(timeout=2)
    assert time.monotonic() - begin < 4.0
    assert processes_are_gone(processes)


def test_without_flow_control_calls_say_shut_down_and_shutdown_stops_all():
    rb = limited(2)
    processes = [process_of(rb, 0), process_of(rb, 1)]
    ray.kill(rb._flow)
    calls = [rb.health, rb.sample, partial(rb.extend, rows(100, 5)), rb.empty]
    for call in calls:
        with pytest.raises(ShutDown, match="the process of its flow control has"):
            call()
    assert "0: " in repr(rb)
    rb.shutdown()
    rb.shutdown()
    assert processes_are_gone(processes)
    assert repr(rb) == "ShardedReplayBuffer(shut down)"


def test_shards_agree_on_one_schema():
    with ShardedReplayBuffer(2, make_buffer) as rb:
        first, second = rb.clients(2)
        first.extend(rows(0, 50))
        with pytest.raises(rlbuf_td.SchemaError, match="'id' came as float32"):
            second.extend(rows(0, 5).set("id", torch.rand(5)))
        second.extend(rows(100, 50))
        assert set(rb.sample(256)["index"][:, 0].tolist()) == {0, 1}


def test_rays_store_keeps_the_first_layout_that_is_offered():
    layout = LayoutInRay("a test")
    assert layout.find() is None
    assert layout.offer(b"first") == b"first"
    assert LayoutInRay("a test").offer(b"second") == b"first"
    layout.replace(b"third")
    assert LayoutInRay("a test").find() == b"third"
    layout.forget()
    assert layout.find() is None


COLLECTORS: dict[str, Any] = {
    "Collector": single,
    "MultiSyncCollector": multi,
    "RayCollector": on_ray,
}


@pytest.mark.parametrize("make", COLLECTORS.values(), ids=COLLECTORS)
def test_collectors_of_torchrl_write_into_shards(make):
    with ShardedReplayBuffer(1 if make is single else 2, make_buffer) as rb:
        collector = make(rb)
        for _ in collector:
            pass
        collector.shutdown()
        assert rb.write_count >= 400
        assert rb.sample(32)["observation"].shape == (32, 4)


def test_a_killed_shard_comes_back_from_its_dump(two_shards):
    rb = two_shards  # whose rows are replaced by other ones
    fill(rb, 1)
    ray.get([handle.prepare.remote([], (0, 0)) for handle in rb.links.handles])
    ray.get([handle.accept.remote() for handle in rb.links.handles])
    rb.empty()
    fill(rb, 500)
    rb.dumps()
    more = rb.clients(2)[1]
    more.extend(rows(50_000, 100))
    more.synchronize()
    learn(rb, 0.2)
    before = {
        place: report.rows
        for place, report in enumerate(rb.links.known)
        if report is not None
    }
    assert sum(before.values()) == 1_100
    lost = more._home or 0
    os.kill(process_of(rb, lost), signal.SIGKILL)
    learn(rb, 1.0)
    deadline = time.monotonic() + 60
    while len(rb.links.live) < 2 and time.monotonic() < deadline:
        learn(rb, 0.1)
    assert len(rb) == 1_000
    health = rb.health()
    # more where the machine is so busy that a shard answers late
    assert health["lost_shards"] >= 1
    assert health["shards"][lost]["lost_rows"] == 100
    assert set(rb.sample(256)["index"][:, 0].tolist()) == {0, 1}


def test_flow_control_holds_for_a_racing_writer_and_a_learner():
    with ShardedReplayBuffer(
        1, make_buffer, samples_per_insert=4.0, min_size=100, tolerance=500
    ) as rb:
        with pytest.raises(RuntimeError, match="does not admit a batch of 64 rows"):
            rb.sample()
        with pytest.raises(
            TimeoutError, match=r"^waited for 0.0\d+ seconds: the buffer is empty"
        ):
            rb.sample(wait=True, timeout=0.05)
        writer = Writer(rb.client(), 0)
        # the first write waits until the shard has loaded its kernels
        writer.write(0.01, 100)
        thread = threading.Thread(target=writer.write, args=(1.0, 20))
        thread.start()
        worst = 0.0
        while thread.is_alive():
            with suppress(TimeoutError):  # the writer has finished
                assert_whole(rb.sample(wait=True, timeout=0.5))
            flow = ray.get(rb._flow.report.remote())
            worst = max(worst, abs(flow["samples"] - 4.0 * (flow["inserts"] - 100)))
        assert worst <= 500
        assert rb.health()["flow"]["samples"] > 0
        client = rb.client()
        stopper = threading.Timer(0.5, rb.shutdown)
        stopper.start()
        with pytest.raises(ShutDown, match="the buffer has been shut down"):
            learn(rb, 30.0)
        stopper.join()
        with pytest.raises(ShutDown, match="the buffer has been shut down"):
            client.sample()


@pytest.mark.parametrize("name", distributed.__all__)
def test_the_examples_of_the_room_run_as_they_are_pasted(name):
    known = {
        "torch": torch,
        **{each: getattr(rlbuf_td, each) for each in rlbuf_td.__all__},
    }
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    said: list[str] = []
    for example in doctest.DocTestFinder(recurse=False).find(
        getattr(distributed, name), name, globs=known
    ):
        runner.run(example, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def test_killed_shards_give_no_wrong_batch(tmp_path):
    with ShardedReplayBuffer(4, make_buffer, dump_dir=tmp_path) as rb:
        fill(rb, 500)
        rb.dumps()
        writers = start_writers(rb.clients(2))
        # on a busy machine they take long to start
        ray.get([writer.write.remote(0.1) for writer in writers])
        written = [writer.write.remote(20.0) for writer in writers]
        stop = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            kills = pool.submit(kill_in_turn, rb, stop, 3.0)
            try:
                batches = learn(rb, 20.0)
            finally:
                stop.set()  # otherwise, the pool waits for ever
        assert batches > 0
        assert kills.result() > 1
        assert min(ray.get(written, timeout=120)) > 0
        assert rb.health()["lost_shards"] > 0
        assert learn(rb, 1.0) > 0  # and training goes on


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_torchrls_buffer_on_ray_takes_our_parts(sampler):
    rb = RayReplayBuffer(
        replay_buffer_cls=ReplayBuffer,
        storage=partial(PackedStorage, 50),
        sampler=partial(sampler, 50, alpha=1.0),
        writer=RingWriter,
        batch_size=16,
        remote_config={"num_cpus": 0},
    )
    try:
        index = rb.extend(rows(0, 50))
        assert (len(rb), rb.write_count, index.tolist()) == (50, 50, list(range(50)))
        batch = rb.sample()
        assert_whole(batch)
        assert torch.equal(batch["id"], batch["index"])
        assert (batch["priority_weight"] == 1).all() == (sampler is ProportionalSampler)
        rb.update_priority(index, torch.zeros(50))
        batch["td_error"] = torch.full((16,), 1000.0)
        rb.update_tensordict_priority(batch)
        again = rb.sample()
        # rows with an error of 0 are drawn with probability 1e-9
        if sampler is ProportionalSampler:
            assert set(again["index"].tolist()) <= set(batch["index"].tolist())
        rb.extend(rows(100, 50))
        rb.update_tensordict_priority(again.set("td_error", torch.ones(16)))
        assert ray.get(rb._rb.health.remote())["stale_updates"] == 16
        with pytest.raises(ValueError, match="'id' came as float32"):
            rb.extend(rows(0, 3).set("id", torch.zeros(3)))
    finally:
        rb.close()


@pytest.mark.slow
def test_the_benchmark_times_batches_beside_those_of_torchrl(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "SHARDS", 1)
    monkeypatch.setattr(benchmark, "BATCHES", (8,))
    benchmark.compare(stored=40, rounds=1)
    printed = capsys.readouterr().out
    for name in ("RayReplayBuffer", "1 shards", "1 shards, prefetch=8"):
        assert f"8 rows  {name} " in printed
    assert printed.count(" rows/s ") == 3
