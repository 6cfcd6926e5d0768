"""Writers, which choose where in the storage the next transition is written.

A writer stores a time step of all lanes (environments) at one position along the time
dim. Once the storage is full, :class:`RingWriter` replaces the oldest rows.
:class:`QueueWriter` keeps each row until a sampler has taken the row.
:class:`RolloutWriter` fills the storage once per rollout, and computes advantages when
a complete rollout is first read. :class:`ReservoirWriter` drops time steps, or stores them at
random positions, once the storage is full.

After a write, the writer reports the written rows to every object attached to the
storage, such as the trajectory index and the sampler. To read the code, begin with
``common.py`` and ``ring.py``.
"""

from rlbuf_td.writers.queue import QueueWriter
from rlbuf_td.writers.reservoir import ReservoirWriter
from rlbuf_td.writers.ring import RingWriter
from rlbuf_td.writers.rollout import RolloutWriter

__all__ = ["QueueWriter", "ReservoirWriter", "RingWriter", "RolloutWriter"]
