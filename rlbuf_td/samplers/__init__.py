"""Samplers: they choose the rows of a batch, independently of the rows' content."""

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
