"""Replay over many machines: a buffer that is divided into shards, on Ray. Needs Ray:
``pip install 'rlbuf_td[ray]'``.

:class:`ShardedReplayBuffer` starts the shards; each learner and each collector holds a
:class:`Client`. Use shards if the rows do not fit into one machine, or if collectors
run on several machines. On one machine, a single :class:`~rlbuf_td.ReplayBuffer` in
shared memory is much faster.

**How it works.** A shard is a ReplayBuffer in its own process (a Ray actor). With each
answer, a shard reports its *mass*: the sum of ``p^alpha`` over the priorities ``p`` of
its rows. To sample a batch, a client chooses a shard for each row, with a probability
proportional to the shard's mass. The shard then draws the row by priority. Thus each
row has the same probability as in one large buffer. A request to a shard also contains
the TD errors of earlier batches; the answer contains the drawn rows, packed into one
block of bytes. To read the code, begin with ``shard.py``.

**How many shards.** One or two shards per machine are enough. Each shard uses one core.
Ray starts the shards on different machines; ``num_cpus=1`` reserves a core for each
shard.

- **Memory.** A row takes its packed bytes (see :func:`rlbuf_td.plan`), 8 bytes and,
  with priorities, 10 more: 1e9 rows of HalfCheetah (168 bytes) take 186 GB, 4 machines
  with 64 GB each.
- **Draws.** A batch costs one Ray request per shard with drawn rows. On two cores,
  sampling and updating a batch took 0.8 ms + 2.1 ms per shard + 1.5 us per row of the
  batch, whether 1e4 or 1e6 rows were stored. Ray takes almost all of this time;
  ``prefetch=k`` divides Ray's time per batch by k. An answer of more than 100 kB takes
  2 ms more, through Ray's object store, unless Ray is started with
  ``RAY_max_direct_call_object_size=1000000``.
  ``python -m tests.benchmarks.sharded`` compares this buffer with TorchRL's
  ``RayReplayBuffer``.
- **Writes.** Each write is a request to Ray, so let collectors write several hundred
  rows at a time.
- **Network.** A batch transfers its packed rows and 16 bytes per row. To sample 1,000
  batches of 256 rows (168 bytes each) per second takes 47 MB/s.

**When a shard is lost.** If the process of a shard dies, clients repeat the current
draw without this shard, and those that wrote to it write to another one. Ray restarts
the shard, which is then empty or holds the rows of the last ``dumps()`` into
``dump_dir``, a folder that all machines must be able to read. Ray also restarts the
process of flow control, whose counts go on from the rows of the shards. Ray notices a
dead process within 1 to 2 s. A shard that does not answer within 3 s counts as lost,
until it answers. If all shards are lost, clients wait up to a minute for the first
answer. A restart takes about 4 s of CPU time; Ray starts its processes with low
priority, so on a busy machine, start Ray with ``RAY_worker_niceness=0``.
"""

try:
    import ray  # noqa: F401
except ModuleNotFoundError:
    raise ImportError(
        "rlbuf_td.distributed needs Ray: pip install 'rlbuf_td[ray]'"
    ) from None

from rlbuf_td.distributed.client import Client
from rlbuf_td.distributed.links import ShardLost
from rlbuf_td.distributed.sharded import ShardedReplayBuffer

__all__ = ["Client", "ShardLost", "ShardedReplayBuffer"]
