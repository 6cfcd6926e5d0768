"""Replay and rollout buffers, which combine storage, sampler and writer.

:class:`~rlbuf_td.ReplayBuffer` inherits from TorchRL's ``TensorDictReplayBuffer``. The calls that a training loop
repeats (``add``, ``extend``, ``sample``, ``update_tensordict_priority``) can take two paths with equal results:

- The **general path** calls sampler, storage, writer and transforms one after the other, as TorchRL does. It accepts
  all combinations of parts and raises all errors.
- A **plan** is the short path: it holds the memory addresses and the compiled kernel of one call. Between two calls, a
  learner's step evicts Python's code from the processor's caches: each Python function then costs several times as much
  as in a tight loop. A plan calls few Python functions. Sampler wrappers (n-step, hindsight, sequence) need a second
  compiled call.

The general path makes the plan after its first success, if the rows are in RAM, not shared between processes and not
deduplicated. Each planned call first compares the parts, memory and settings with those that the plan was made for. If
something has changed, or an argument is unusual, the general path takes over and makes a new plan. Both paths use the
same random numbers. Read ``plan.py`` and ``write_plan.py``, then ``replay.py``.

``prefetch.py`` draws batches ahead, and ``graph.py`` records a learner's step as a CUDA graph. ``flow.py`` controls the
number of samples per written row. ``mixture.py`` draws from several buffers, ``rollout.py`` iterates over rollouts.
"""
