"""Parts of a buffer that several processes share: memory, counters, and a lock."""
