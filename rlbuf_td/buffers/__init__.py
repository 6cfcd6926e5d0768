"""Replay and rollout buffers, which combine a storage, a sampler and a writer.

``add``, ``extend``, ``sample`` and ``update_tensordict_priority`` take one of two paths, which have equal results:

- The **general path** calls sampler, storage, writer and transforms one after the other, as TorchRL does. This path
  supports every buffer, and raises the errors for invalid arguments.
- The **fast path** uses a *plan*: an object that passes stored memory addresses to a compiled kernel. A plan avoids
  Python calls, which are slow after a learner's step: the step evicts Python's code from the processor's caches.

The general path makes a plan only if the rows are in host memory and not shared between processes. With deduplicated
rows, only a :class:`FreshRowsSampler` and samplers that wrap no other sampler have plans. Each call on the fast path
first checks whether the plan is still valid. If it is not, or if the plan does not support an argument, the call takes
the general path. A sample or a write on the general path then makes a new plan.

Reading order of the files: ``plan.py``, ``write_plan.py``, ``replay.py``.
"""
