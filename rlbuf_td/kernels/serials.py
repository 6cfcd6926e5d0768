"""What compiled loops read of a :class:`~rlbuf_td.storages.ring.Ring`."""

#: Rows of ``Ring.head``, ``[3, E]`` int64: the oldest live serial; the number of rows ever written; the serial from
#: which on rows are in time order.
TAIL, WRITTEN, ORDERED = range(3)
