"""The hot loops, each written more than once.

A public module here (``sum_tree``, ...) holds, or names, the *specification*: short functions in torch ops that run on
any device. Its twins are private modules beside it: ``_sum_tree_numba`` for the CPU, ``_sum_tree_triton`` for CUDA. The
public functions ask :mod:`~rlbuf_td.kernels.dispatch` which of them runs; nothing above this package knows. Twins are
imported with the first call that needs them, never with the package, and what they compile to is cached on disk.
Without Triton, and in graphs that ``torch.compile`` makes, the specification runs.

Kernels know tensors only: no storage, no sampler, no TensorDict.
"""
