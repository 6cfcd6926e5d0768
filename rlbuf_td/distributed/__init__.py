"""Replay over many machines: shards on Ray, one prioritized law. Needs Ray: ``pip install 'rlbuf_td[ray]'``."""

try:
    import ray  # noqa: F401
except ModuleNotFoundError:
    raise ImportError("rlbuf_td.distributed needs Ray: pip install 'rlbuf_td[ray]'") from None

from rlbuf_td.distributed.client import Client
from rlbuf_td.distributed.links import ShardLost
from rlbuf_td.distributed.sharded import ShardedReplayBuffer

__all__ = ["Client", "ShardLost", "ShardedReplayBuffer"]
