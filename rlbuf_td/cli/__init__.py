"""The command line: ``python -m rlbuf_td demo|bench|plan|doctor``."""
