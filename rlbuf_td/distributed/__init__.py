"""Replay over many machines: one prioritized buffer in shards on Ray. Needs Ray: ``pip install 'rlbuf_td[ray]'``.

:class:`ShardedReplayBuffer` starts the shards; each learner and collector holds a :class:`Client`. Use shards if the
rows do not fit into one machine, or if collectors run on several. On one machine, a :class:`~rlbuf_td.ReplayBuffer`
that processes share is much faster: a batch takes about 0.2 ms.

How it works
------------

A shard is an ordinary buffer in a process of its own (a Ray actor). With each answer it reports its *mass*: the sum of
its rows' weights. To sample a batch, a client draws positions in the total mass of all shards, and sends to each shard
the positions that fall into its part. Each row thus has the same probability as in one large buffer. The request also
brings the TD errors of earlier batches, and the answer brings the rows, packed in one block. A shard first draws, then
applies TD errors and writes new rows: the draw uses the mass that the client knew. Read ``law.py``, ``shard.py`` and
``client.py``.

How many shards
---------------

- **Memory.** A row takes its packed bytes (``python -m rlbuf_td plan`` shows them) and, with priorities, 20 more. 1e9
  rows of HalfCheetah (168 bytes) take 188 GB: 4 machines with 64 GB each. 1e9 rows of Atari (two stacks of four frames,
  56 kB) take 56 TB, or a few TB with ``share_next`` and ``frames``, in files (``scratch_dir``).
- **Draws.** A batch costs one Ray request per shard that it touches, and the transfer of its rows; the number of stored
  rows does not matter. On two cores, sample and update took 0.8 ms + 2.1 ms per shard + 1.5 us per row (R^2 0.98, 1 to
  16 shards, 64 to 4,096 rows in a batch), equally with 10,000 and 1,000,000 stored rows. Ray takes almost all of this
  time. ``python -m tests.benchmarks.sharded --fit FILE.png`` measures and plots it; without ``--fit``, it compares this
  buffer with TorchRL's ``RayReplayBuffer``. ``prefetch=k`` divides Ray's time per batch by k.
- **Writes.** A write takes Ray about a millisecond, too: let collectors write some hundred rows at a time.
- **Network.** A batch takes its packed rows and 16 bytes per row (windows: 8 per row and 16 per window), however many
  keys there are. Each TD error that is sent back takes 20 bytes. 1,000 batches of 256 rows (168 bytes each) per
  second are 47 MB/s; rows of Atari would be 14 GB/s, more than most networks carry. An observation is sent with every
  row that contains it, even if its shard stores it only once.

One or two shards per machine are enough: a shard uses one core. ``placement_strategy="SPREAD"`` puts them on different
machines; ``num_cpus=1`` keeps a core free for each.

When a shard is lost
--------------------

If the process of a shard dies, the other shards provide all draws, the clients that wrote to it change to another
shard, and a batch in progress is drawn again. Ray restarts the shard, empty or with the rows of the last ``dumps()``
into ``dump_dir``, a folder that all machines must be able to read; call ``dumps()`` from time to time. Ray notices a
dead process within 1 to 2 s. A shard that does not answer within 3 s counts as lost. Clients ask lost shards up to five
times per second whether they are back.

A restart imports torch and TorchRL anew: about 4 s of a core and 0.5 GB. If all shards are lost, clients wait up to a
minute for the first one to come back. Ray starts its workers with low priority (``RAY_worker_niceness=15``), so that
other processes of a busy machine delay restarts: start Ray with ``RAY_worker_niceness=0`` if that matters.
``python -m tests.benchmarks.shard_losses`` kills shards and reports the pauses.
"""

try:
    import ray  # noqa: F401
except ModuleNotFoundError:
    raise ImportError("rlbuf_td.distributed needs Ray: pip install 'rlbuf_td[ray]'") from None

from rlbuf_td.distributed.client import Client
from rlbuf_td.distributed.links import ShardLost
from rlbuf_td.distributed.sharded import ShardedReplayBuffer

__all__ = ["Client", "ShardLost", "ShardedReplayBuffer"]
