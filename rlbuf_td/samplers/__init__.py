"""Samplers: they choose the rows of a batch.

A sampler's ``draw(storage, batch_size)`` returns flat rows, ``[B]`` int64, and a *report*: further entries of the
batch, such as ``"priority_weight"``. All random numbers come from one ``torch.Generator`` (``_rng``, else torch's
default), so that a seed determines the batches.

**Prioritized samplers** convert the magnitudes of TD errors to probabilities by a *law*. :class:`ProportionalSampler`
uses a power of the magnitude, in a sum tree (:mod:`rlbuf_td.kernels.sum_tree`); :class:`RankSampler` uses the rank of
the magnitude (:mod:`rlbuf_td.kernels.rank_order`). New rows get the largest magnitude seen, so that each is soon drawn.
Draws are stratified: the total probability is divided into ``B`` equal segments, and one row is drawn from each. The
code begins in ``priorities.py``, ``proportional.py`` and :mod:`rlbuf_td.kernels.strata`.

**Wrappers** (:class:`HindsightSampler`, :class:`NStepSampler`, :class:`SequenceSampler`) revise the batch of another
sampler. The innermost sampler draws rows, then each wrapper, from the inside out, replaces or adds entries. In
TorchRL's buffers, the revised entries are part of the report. :class:`FreshRowsSampler`, also a wrapper, replaces drawn
rows. The code begins in ``wrapper.py`` and ``n_step.py``.
"""

from rlbuf_td.samplers.fresh import FreshRowsSampler
from rlbuf_td.samplers.goal_env import gymnasium_reward_fn, gymnasium_terminated_fn
from rlbuf_td.samplers.hindsight import HindsightSampler
from rlbuf_td.samplers.minibatch import MinibatchSampler
from rlbuf_td.samplers.n_step import NStepSampler
from rlbuf_td.samplers.proportional import ProportionalSampler
from rlbuf_td.samplers.queue import QueueSampler
from rlbuf_td.samplers.rank import RankSampler
from rlbuf_td.samplers.recency import RecencySampler
from rlbuf_td.samplers.sequence import SequenceSampler
from rlbuf_td.samplers.uniform import UniformSampler

UniformSampler.without_replacement = MinibatchSampler

__all__ = [
    "FreshRowsSampler",
    "HindsightSampler",
    "MinibatchSampler",
    "NStepSampler",
    "ProportionalSampler",
    "QueueSampler",
    "RankSampler",
    "RecencySampler",
    "SequenceSampler",
    "UniformSampler",
    "gymnasium_reward_fn",
    "gymnasium_terminated_fn",
]
