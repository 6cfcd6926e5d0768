"""Replay and rollout buffers, which combine a storage, a sampler and a writer.

A batch, and a write, is made by a **plan**: the code that runs for a storage, a sampler
and a batch size, chosen once (``plan.py``, :mod:`rlbuf_td.storages.write_plan`). Where
the rows are in host memory, it is compiled. Compiled calls avoid Python calls, which are
slow after a learner's step: the step evicts Python's code from the processor's caches.
``rb.compiled`` says which calls are compiled, and why others are not. ``docs/CORE.md``
has the path of each call.

Reading order of the files: ``replay.py``, ``plan.py``, ``samplers/reading.py``,
``storages/write_plan.py``.
"""
