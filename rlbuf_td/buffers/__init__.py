"""Replay and rollout buffers, which combine a storage, a sampler and a writer.

``add``, ``extend``, ``sample`` and ``update_tensordict_priority`` are made of stages that the components own: a sampler
draws, wrappers revise, the rows are gathered; a write checks the data, scatters it, and tells each listener. Each stage
has a torch form, and most have a compiled form, with equal results:

- The first call of a kind runs the **torch forms**: it calls sampler, storage, writer and transforms one after the
  other, as TorchRL does. They support every buffer, and raise the errors for invalid arguments.
- Later calls run **bound stages**: compiled calls with memory of their own (:mod:`rlbuf_td.samplers.bound`,
  ``bound_write.py``, ``bound_mixture.py``). They avoid Python calls, which are slow after a learner's step: the step
  evicts Python's code from the processor's caches.

Each bound call first checks that nothing it relies on has changed. If something has, or if it does not support an
argument, the call runs the torch forms, and binds again. ``rb.compiled`` says which calls are compiled, and why others
are not.

Reading order of the files: ``replay.py``, ``samplers/bound.py``, ``bound_write.py``.
"""
