"""The hot loops, each written more than once.

A public module here (``sum_tree``, ...) holds the *specification*: short functions in torch ops that run on any
device. Its twin for the CPU is a private module beside it (``_sum_tree_numba``). The public functions choose between
the two by the device of their tensors; nothing above this package knows which one ran. Numba is imported with the
first CPU call, never with the package, and compiled code is cached on disk.

Kernels know tensors only: no storage, no sampler, no TensorDict.
"""
