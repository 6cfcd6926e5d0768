"""Sharing of one buffer by several processes: numbers, memory, a lock, and a journal of the current write."""
