"""Replay buffers for TorchRL in which a transition is one row."""

from rlbuf_td.buffers import ReplayBuffer
from rlbuf_td.samplers import ProportionalSampler, RankSampler, UniformSampler
from rlbuf_td.storages import PackedStorage, SchemaError
from rlbuf_td.writers import RingWriter

__all__ = [
    "PackedStorage",
    "ProportionalSampler",
    "RankSampler",
    "ReplayBuffer",
    "RingWriter",
    "SchemaError",
    "UniformSampler",
]
__version__ = "0.1.0"
