"""Compares the speed of this package with that of other libraries: ``python -m rlbuf_td bench``.

``.github/BENCHMARKS.md`` has the results of a run.
"""
