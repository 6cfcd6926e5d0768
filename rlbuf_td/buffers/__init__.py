"""Replay and rollout buffers, which combine a storage, a sampler and a writer.

A batch is made by a **plan** (``plan.py``): a sampler lists rows, its wrappers revise the list or the entries, and the
rows are gathered. What does this is chosen once for a storage, a sampler and a batch size: compiled readings where the
rows are in host memory (:mod:`rlbuf_td.samplers.reading`), and otherwise the methods of sampler and storage, which
specify the results. A plan holds until the rows move or a part is replaced.

``add`` and ``extend`` check the data, scatter it, and tell each listener. The first call of a kind calls writer and
storage one after the other, as TorchRL does; later ones are one compiled call (``bound_write.py``), which refuses what
it does not support. Compiled calls avoid Python calls, which are slow after a learner's step: the step evicts Python's
code from the processor's caches. ``rb.compiled`` says which calls are compiled, and why others are not.

Reading order of the files: ``replay.py``, ``plan.py``, ``samplers/reading.py``, ``bound_write.py``.
"""
