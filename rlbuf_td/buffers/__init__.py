"""Replay and rollout buffers, which combine a storage, a sampler and a writer.

``add``, ``extend``, ``sample`` and ``update_tensordict_priority`` can take two paths with equal results:

- The **general path** calls sampler, storage, writer and transforms one after the other, as TorchRL does. It supports
  every buffer, and raises the errors for invalid arguments.
- The **fast path** uses a plan, which passes stored memory addresses to a compiled kernel. In a training loop, the
  learner's step evicts Python's code from the processor's caches, and Python calls become slow; a plan avoids them.

The general path makes a plan only if the rows are in host memory, not shared between processes and not deduplicated.
Each fast call first checks whether the buffer has changed since the plan was made. If it has, or if an argument is
unusual, the call takes the general path, which replaces an outdated plan. Read ``plan.py`` and ``write_plan.py``, then
``replay.py``.
"""
