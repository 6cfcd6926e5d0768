"""Parts that let several processes use one buffer: numbers, memory, a lock, and a journal of the current write."""
