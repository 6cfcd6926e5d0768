"""Writers: they choose where the next transition is stored.

All of them write along time: one time step of all lanes goes to one position of the storage. :class:`RingWriter` keeps
a cursor, which returns to 0 at the end of the storage, so that new rows replace the oldest ones. Row ``t + 1`` follows
row ``t`` in its lane unless a trajectory ends at ``t``, or ``t`` is the newest row. :class:`QueueWriter` also refuses
to replace rows that have not been taken yet. :class:`RolloutWriter` fills the storage once per rollout, and computes
advantages with the last step. :class:`ReservoirWriter` puts a time step in a random slot, or drops it.

After a write, the writer reports the written rows to every object attached to the storage: the trajectory index, the
priorities of new rows, replay counts. Read ``common.py``, then ``ring.py``.
"""

from rlbuf_td.writers.queue import QueueWriter
from rlbuf_td.writers.reservoir import ReservoirWriter
from rlbuf_td.writers.ring import RingWriter
from rlbuf_td.writers.rollout import RolloutWriter

__all__ = ["QueueWriter", "ReservoirWriter", "RingWriter", "RolloutWriter"]
