"""What lets several processes use one buffer: numbers, memory, a lock, and a journal of the write in progress."""
