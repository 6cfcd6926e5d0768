"""The hot loops, on plain tensors: no storage, no sampler, no TensorDict.

Each operation has a folder and two implementations: a reference in torch operations for any device, which defines the
results and which ``torch.compile`` traces, and loops that numba compiles for the CPU; tests compare them. The sum tree
and the reach of trajectories also have Triton kernels. :mod:`~rlbuf_td.kernels.dispatch` alone selects the backend. The
first call that needs numba or Triton imports it; :mod:`~rlbuf_td.kernels.code_cache` documents where compiled code is
stored.

Begin with ``sum_tree/`` (draws in proportion to priorities), ``rank_order/`` (draws by rank), ``episodes/`` (the bitmap
of trajectory ends), ``rows/`` (copies of rows, and observations stored once), ``batch/`` (a whole batch in one call)
and ``scan/`` (advantages and returns). ``notebooks/10_how_it_works.ipynb`` draws the tree and the bitmap.
"""
