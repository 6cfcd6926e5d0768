"""The hot loops, on tensors only: no storage, no sampler, no TensorDict.

Each operation has a reference in torch operations, which runs on any device and is what ``torch.compile`` sees, and
loops that numba compiles for the CPU; the sum tree and the reach of trajectories have Triton kernels as well.
:mod:`~rlbuf_td.kernels.dispatch` decides which of them runs; no other room knows. Numba and Triton are imported with
the first call that needs them; :mod:`~rlbuf_td.kernels.code_cache` says where compiled code is kept.
"""
