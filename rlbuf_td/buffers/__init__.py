"""Replay and rollout buffers, which combine a storage, a sampler and a writer.

``add``, ``extend``, ``sample`` and ``update_tensordict_priority`` can take two paths with equal results:

- The **general path** calls sampler, storage, writer and transforms one after the other, as TorchRL does. It supports
  every buffer, and raises all errors.
- The **fast path** is a plan: it holds the memory addresses and the compiled kernel for one call. In a training loop, a
  learner's step evicts Python's code from the processor's caches, so that each avoided Python call saves time.

The general path makes a plan if the rows are in RAM, not shared between processes and not deduplicated. Each fast call
first checks that the buffer has not changed since then. If the buffer has changed, or an argument is unusual, the call
takes the general path, which makes a new plan. Read ``plan.py`` and ``write_plan.py``, then ``replay.py``.
"""
