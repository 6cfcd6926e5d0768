"""Samplers: which rows a batch takes. A sampler draws rows; it knows nothing of what they hold."""

from rlbuf_td.samplers.minibatch import MinibatchSampler
from rlbuf_td.samplers.proportional import ProportionalSampler
from rlbuf_td.samplers.rank import RankSampler
from rlbuf_td.samplers.uniform import UniformSampler

__all__ = ["MinibatchSampler", "ProportionalSampler", "RankSampler", "UniformSampler"]
