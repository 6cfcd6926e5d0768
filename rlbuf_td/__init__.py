"""Replay and rollout buffers for TorchRL in which a transition is one row."""

from rlbuf_td.buffers import ReplayBuffer
from rlbuf_td.rollouts import RolloutBuffer
from rlbuf_td.samplers import (
    HindsightSampler,
    MinibatchSampler,
    NStepSampler,
    ProportionalSampler,
    RankSampler,
    SequenceSampler,
    UniformSampler,
    gymnasium_reward_fn,
    gymnasium_terminated_fn,
)
from rlbuf_td.stats import EpisodeStats
from rlbuf_td.storages import PackedStorage, SchemaError
from rlbuf_td.trajectories import TrajectoryIndex
from rlbuf_td.writers import RingWriter, RolloutWriter

__all__ = [
    "EpisodeStats",
    "HindsightSampler",
    "MinibatchSampler",
    "NStepSampler",
    "PackedStorage",
    "ProportionalSampler",
    "RankSampler",
    "ReplayBuffer",
    "RingWriter",
    "RolloutBuffer",
    "RolloutWriter",
    "SchemaError",
    "SequenceSampler",
    "TrajectoryIndex",
    "UniformSampler",
    "gymnasium_reward_fn",
    "gymnasium_terminated_fn",
]
__version__ = "0.1.0"
