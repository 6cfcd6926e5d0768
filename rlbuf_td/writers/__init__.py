"""Writers: they choose where the next transition is stored.

All of them write whole time steps: the rows of all lanes go to the same position along time. :class:`RingWriter` keeps
a cursor, which returns to 0 at the end of the storage, so that new rows replace the oldest ones. Row ``t + 1`` follows
row ``t`` in its lane unless a trajectory ends at ``t``, or ``t`` is the newest row. :class:`QueueWriter` also writes a
ring, but refuses to replace rows that have not been taken yet. :class:`RolloutWriter` fills the storage once per
rollout, and computes advantages when the last step arrives. :class:`ReservoirWriter` stores a time step in a random
slot, or drops it.

After a write, the writer reports the written rows to every object attached to the storage, such as the trajectory index
and the buffer, which sets the priorities of new rows. To read the code, begin with ``common.py`` and ``ring.py``.
"""

from rlbuf_td.writers.queue import QueueWriter
from rlbuf_td.writers.reservoir import ReservoirWriter
from rlbuf_td.writers.ring import RingWriter
from rlbuf_td.writers.rollout import RolloutWriter

__all__ = ["QueueWriter", "ReservoirWriter", "RingWriter", "RolloutWriter"]
