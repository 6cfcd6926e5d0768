"""Compares the speed of this package with that of other libraries: ``python -m rlbuf_td bench``."""
