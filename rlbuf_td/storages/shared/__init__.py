"""Parts of a buffer that several processes share: memory, counters, a lock, and a journal of the current write."""
