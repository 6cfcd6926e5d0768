"""Storages hold transitions in memory, each as one row of bytes.

A HalfCheetah transition has seven entries. In float32, it is a row of 168 bytes, the
last of which is padding::

    byte  0        24            92            96                 164    165    166    167
          +--------+-------------+-------------+------------------+------+------+------+-+
          | action | observation | next.reward | next.observation | done |term. |trunc.| |
          +--------+-------------+-------------+------------------+------+------+------+-+

**Rows.** :class:`PackedStorage` keeps its rows in one byte matrix. The first write
fixes keys, dtypes and shapes; a later write that differs raises a :class:`SchemaError`.
Leaves (the tensors of a transition) are ordered by item size, largest first, so that
each leaf is aligned. ``storage[key]`` is a strided view of this key in all rows (a copy
if the key is deduplicated). A sampled batch is a copy; on the CPU, each leaf of a batch
is a contiguous tensor. Read ``layout.py``, then ``packed.py``.

**Time and lanes.** The byte matrix has the shape ``[T, *lanes, row_bytes]``: dim 0 of a
storage is time, the other dims are lanes (environments). With ``E`` lanes, row
``(t, e)`` has the flat index ``t * E + e``.
:class:`~rlbuf_td.TrajectoryIndex` finds how far a row's trajectory extends in its lane.

**Deduplicated observations.** The next observation of a step is usually the observation
of the following step, and consecutive frame stacks differ in one frame. With
``share_next`` or ``frames``, observations are entries of a ring per lane, and a row
stores names of entries: a row whose observation is the next observation of the row
before stores the same name. Read ``dedup.py``, ``entries.py``, ``rows/dedup.py`` and
:mod:`rlbuf_td.kernels.rows.entries`.

**Identity.** A row is its lane and its serial, the number of rows that were written to
the lane before it. Two numbers per lane say which serials are stored. A prioritized
batch stores the serials of its rows as ``"sampled_at"``, so that priority updates skip
rows that have been overwritten since sampling. Read ``ring.py``.

**Processes.** Rows that processes share lie in shared memory or in a file. One lock
protects these rows, and the system releases the lock if its holder dies. A write makes
its rows visible at its end, so that there is nothing to undo: the next holder of the
lock finds the rows that were there, or the new ones, and builds again what is derived
from them. Read :meth:`PackedStorage.advance`, ``lock.py`` and ``processes.py``.

**Who owns whom.** A buffer owns its storage, and a storage owns what is attached to it.
In the other direction there are only weak references, so that ``del rb`` frees memory,
files and locks at once. Read ``listeners.py``.
"""

from rlbuf_td.storages.packed import PackedStorage
from rlbuf_td.storages.schema import SchemaError

__all__ = ["PackedStorage", "SchemaError"]
