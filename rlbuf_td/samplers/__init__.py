"""Samplers, which choose the rows of a batch.

A sampler's ``draw(storage, batch_size)`` returns *flat rows* (indices of the flattened
storage, ``[B]`` int64), and an info dict of further batch entries, such as
``"priority_weight"``: see :class:`RowSampler`. All random numbers come from one
``torch.Generator`` (the sampler's ``_rng``, or torch's default generator), so a seed
determines the batches.

**Prioritized samplers** have a *rule* that converts TD errors to probabilities.
:class:`ProportionalSampler` stores powers of the TD errors in a sum tree
(:mod:`rlbuf_td.kernels.sum_tree`). :class:`RankSampler` uses the ranks of the TD errors
(:mod:`rlbuf_td.kernels.rank_order`). By default, a new row gets the largest
``|td_error|`` seen so far, and draws are stratified: one row is drawn from each of
``B`` segments of equal probability. To read the code, begin with ``priorities.py``,
``proportional.py`` and :mod:`rlbuf_td.kernels.strata`.

**Wrappers** change the batch of another sampler. :class:`HindsightSampler` and
:class:`NStepSampler` replace or add entries; :class:`SequenceSampler` expands each
drawn row to a window of rows, and :class:`EpisodeSampler` to its whole episode. The
innermost sampler draws rows; then each wrapper, from the inside out, changes the batch.
To read the code, begin with ``wrapper.py`` and ``n_step.py``.
"""

from rlbuf_td.samplers.episode import EpisodeSampler
from rlbuf_td.samplers.goal_env import gymnasium_reward_fn, gymnasium_terminated_fn
from rlbuf_td.samplers.hindsight import HindsightSampler
from rlbuf_td.samplers.minibatch import MinibatchSampler
from rlbuf_td.samplers.n_step import NStepSampler
from rlbuf_td.samplers.proportional import ProportionalSampler
from rlbuf_td.samplers.queue import QueueSampler
from rlbuf_td.samplers.rank import RankSampler
from rlbuf_td.samplers.recency import RecencySampler
from rlbuf_td.samplers.row_sampler import RowSampler
from rlbuf_td.samplers.sequence import SequenceSampler
from rlbuf_td.samplers.uniform import UniformSampler

UniformSampler.without_replacement = MinibatchSampler
EpisodeSampler.default = UniformSampler

__all__ = [
    "EpisodeSampler",
    "HindsightSampler",
    "MinibatchSampler",
    "NStepSampler",
]
__all__ += [
    "ProportionalSampler",
    "QueueSampler",
    "RankSampler",
    "RecencySampler",
    "RowSampler",
    "SequenceSampler",
]
__all__ += ["UniformSampler", "gymnasium_reward_fn", "gymnasium_terminated_fn"]
