"""Storages: the memory of the transitions, one row of bytes each.

A transition of seven entries, such as HalfCheetah's, is a row of 168 bytes (one is padding)::

    byte  0        24            92            96                 164    165    166    167
          +--------+-------------+-------------+------------------+------+------+------+-+
          | action | observation | next.reward | next.observation | done |term. |trunc.| |
          +--------+-------------+-------------+------------------+------+------+------+-+

**Rows.** :class:`PackedStorage` is one byte matrix ``[T, *lanes, row_bytes]``. The first write fixes keys, dtypes and
shapes; a later write that differs raises a :class:`SchemaError`. Leaves (the tensors of a transition) are ordered by
item size, largest first, so that each is aligned. ``storage[key]`` is a strided view of one column. A batch is fresh
memory; on the CPU, each of its leaves is a contiguous tensor. Read ``layout.py``, then ``packed.py``.

**Time and lanes.** Dim 0 is time, the others are lanes (environments); row ``(t, e)`` has the flat position
``t * E + e``. :class:`~rlbuf_td.TrajectoryIndex` tells how far the trajectory of a row extends in its lane.

**Observations once.** The next observation of a step is usually the observation of the following step, and consecutive
frame stacks differ in one frame. With ``share_next`` and ``frames`` a row stores ids of entries in a pool of
observations, and neighbouring rows with the same observation store the same id. Read ``dedup.py``, ``rows/`` and
:mod:`rlbuf_td.kernels.rows.pool`.

**Stale rows.** The storage counts the time steps written, and a prioritized batch stores this count as
``"sampled_at"``. A ring is written in order, so the count shows which rows of a batch have been overwritten since they
were sampled. Priority updates skip these rows. Read ``write_clock.py``.

**Processes.** Shared rows are in shared memory, with one lock that the system releases if its holder dies. A journal,
also in shared memory, saves the rows that a write replaces: the next holder of the lock can undo an unfinished write.
Read ``shared/``.
"""

from rlbuf_td.storages.packed import PackedStorage
from rlbuf_td.storages.schema import SchemaError

__all__ = ["PackedStorage", "SchemaError"]
