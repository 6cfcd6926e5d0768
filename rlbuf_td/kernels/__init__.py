"""Performance-critical operations on plain tensors.

Most operations have a reference implementation in PyTorch, which runs on any device and
defines the correct results. On the CPU, loops compiled by numba replace the reference,
and on a GPU, for some operations, Triton kernels. Tests compare the implementations.
:mod:`~rlbuf_td.kernels.dispatch` selects the implementation.

``sum_tree/`` samples by priority, ``rank_order/`` by priority rank and ``draws/``
without priorities. ``episodes/`` finds trajectory boundaries, ``rows/`` asks for
pages of files and deduplicates rows, ``batch/`` samples or writes a batch in one call, ``wrappers/`` revises batches
(goals, n-step returns, windows), and ``scan/`` computes advantages and returns. The
notebook ``10_how_it_works.ipynb`` illustrates the data structures.
"""
