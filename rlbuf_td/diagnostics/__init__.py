"""Tools that inspect a buffer: health, episode statistics, plots, the doctor and the
memory plan.

The tools never change stored rows. The doctor searches rows for faults that training
does not reveal.
"""
