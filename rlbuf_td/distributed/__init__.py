"""Replay over many machines: shards on Ray, one prioritized law. Needs Ray: ``pip install 'rlbuf_td[ray]'``.

:class:`ShardedReplayBuffer` starts the shards; each learner and collector holds a :class:`Client`. It is worth its cost
where rows do not fit one machine, or collectors run on several. On one machine a plain
:class:`~rlbuf_td.ReplayBuffer`, shared between processes, is faster by far: there a batch takes some 0.2 ms.

How many shards
---------------

- **Memory.** A row takes its packed bytes (``python -m rlbuf_td plan`` tells them) and, with priorities, 20 bytes. 1e9
  rows of HalfCheetah (168 bytes) take 188 GB: 4 machines with 64 GB each. 1e9 rows of Atari (two stacks of four frames,
  56 kB) take 56 TB as they are, and a few TB with ``share_next`` and ``frames``: such rows lie in files
  (``scratch_dir``).
- **Draws.** A batch costs Ray's time for a request, for each shard that it touches, and then for its rows; not more
  where more rows are stored. ``python -m tests.benchmarks.sharded`` measures both, with ``--fit FILE.png`` over 1 to 16
  shards. On two cores that others used as well, sample and update at 4 shards took 9.8 ms for 256 rows and 19.6 ms for
  4,096: almost all of it is Ray's. ``prefetch=k`` divides that by k. With ``prefetch=8`` it was 0.64 ms and 2.8 ms
  (400,000 and 1.4 million rows per second), where TorchRL's ``RayReplayBuffer`` took 10.4 ms and 20 ms.
- **Writes.** Ray takes about a millisecond for each, too: let collectors write some hundred rows at a time.
- **Network.** A batch takes its packed rows and 16 bytes per row (windows: 24), whatever the number of keys; a TD error
  takes 20 bytes on the way back. 256 rows of 168 bytes, 1,000 times a second, are 47 MB/s. Of Atari they are 14 GB/s:
  there the network decides. Rows are whole on the wire, also where observations are stored once.

One or two shards per machine are enough: a shard uses one core. ``placement_strategy="SPREAD"`` puts them on different
machines; ``num_cpus=1`` keeps a core free for each.

What a loss costs
-----------------

A shard whose process dies is drawn from no more, and its writers go on with another one; a batch that was under way is
drawn again. It comes back empty, or with the rows of the last ``dumps()`` into ``dump_dir``, which all machines must
see. Ray notices a dead process within some 1.5 s, and a shard that does not answer counts as lost after 10 s.
"""

try:
    import ray  # noqa: F401
except ModuleNotFoundError:
    raise ImportError("rlbuf_td.distributed needs Ray: pip install 'rlbuf_td[ray]'") from None

from rlbuf_td.distributed.client import Client
from rlbuf_td.distributed.links import ShardLost
from rlbuf_td.distributed.sharded import ShardedReplayBuffer

__all__ = ["Client", "ShardLost", "ShardedReplayBuffer"]
