"""Time this package against what a user would otherwise pick: ``python -m rlbuf_td bench``."""
