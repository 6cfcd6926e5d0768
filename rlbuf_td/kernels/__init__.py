"""The hot loops, on plain tensors: no storage, no sampler, no TensorDict.

Each operation has a folder and two implementations, which tests compare. The reference, in torch operations for any
device, defines the results; ``torch.compile`` traces it. On the CPU, loops that numba compiles take its place. The sum
tree and the search for trajectory ends also have Triton kernels. :mod:`~rlbuf_td.kernels.dispatch` alone selects the
backend. The first call that needs numba or Triton imports it; :mod:`~rlbuf_td.kernels.code_cache` documents where
compiled code is stored.

The sampling operations are ``sum_tree/`` (by priority), ``rank_order/`` (by rank) and ``recency/`` (by age).
``episodes/`` finds where trajectories begin and end, ``rows/`` copies and deduplicates rows, ``batch/`` samples or
writes a whole batch in one call, and ``scan/`` computes advantages and returns.
``notebooks/10_how_it_works.ipynb`` illustrates the tree and the bitmap of trajectory ends.
"""
