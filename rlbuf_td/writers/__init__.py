"""Writers: where the next transition goes."""

from rlbuf_td.writers.ring import RingWriter

__all__ = ["RingWriter"]
