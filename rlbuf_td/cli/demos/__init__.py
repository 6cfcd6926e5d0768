"""Training scripts to read, run and copy: ``python -m rlbuf_td demo``."""
