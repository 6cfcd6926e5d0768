"""Health, episode statistics, plots, the doctor and the memory plan.

They read buffers, and change none. ``health.py`` summarizes the last batch and the priorities, ``episode_stats.py``
counts episodes at each write, and ``memory_plan.py`` computes the bytes of a buffer before it is allocated. The
doctor tests stored rows for faults that training would not reveal. ``values.py`` checks each column; ``sequence.py``
compares each next observation with the following row, and so finds wrong ends and shifted flags.
"""
