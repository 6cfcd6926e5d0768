"""Replay and rollout buffers, which combine a storage, a sampler and a writer.

A batch is made by a **plan** (``plan.py``): a sampler lists rows, its wrappers revise
the list or the entries, and the rows are gathered. What does this is chosen once for a
storage, a sampler and a batch size: compiled readings where the rows are in host memory
(:mod:`rlbuf_td.samplers.reading`), and otherwise the methods of sampler and storage,
which specify the results. Samplers of TorchRL's, ``sample_unit`` and ``collate_fn`` are
called through TorchRL's interface. A plan holds until the rows move or a part is
replaced.

A write is made by a plan, too (:mod:`rlbuf_td.storages.write_plan`), which belongs to
the storage: it checks the data, scatters it, and tells each listener. Compiled calls
avoid Python calls, which are slow after a learner's step: the step evicts Python's code
from the processor's caches. ``rb.compiled`` says which calls are compiled, and why
others are not.

Reading order of the files: ``replay.py``, ``plan.py``, ``samplers/reading.py``,
``storages/write_plan.py``.
"""
