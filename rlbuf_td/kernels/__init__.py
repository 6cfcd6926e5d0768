"""The hot loops, on plain tensors: no storage, no sampler, no TensorDict.

Each operation has two implementations: a reference in torch operations for any device, which ``torch.compile`` traces,
and loops that numba compiles for the CPU. The sum tree and the reach of trajectories also have Triton kernels.
:mod:`~rlbuf_td.kernels.dispatch` alone selects the backend. The first call that needs numba or Triton imports it;
:mod:`~rlbuf_td.kernels.code_cache` documents where compiled code is stored.
"""
