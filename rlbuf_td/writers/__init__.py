"""Writers: they choose where the next transition is stored."""

from rlbuf_td.writers.queue import QueueWriter
from rlbuf_td.writers.reservoir import ReservoirWriter
from rlbuf_td.writers.ring import RingWriter
from rlbuf_td.writers.rollout import RolloutWriter

__all__ = ["QueueWriter", "ReservoirWriter", "RingWriter", "RolloutWriter"]
