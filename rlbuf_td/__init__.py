"""Replay and rollout buffers for TorchRL that store each transition as one row of
bytes.

Begin with :class:`ReplayBuffer` (off-policy) or :class:`RolloutBuffer` (on-policy). The
storages, samplers and writers of this package also work in TorchRL's own buffers. For
Gymnasium, use ``ReplayBuffer.from_env`` and :class:`GymnasiumRecorder`. This package
also has:

- ``rlbuf_td.functional``: advantages and returns as functions on tensors;
- ``rlbuf_td.diagnostics.plots``: plots of buffers, episodes and rollouts (needs
  matplotlib);
- ``rlbuf_td.diagnostics.health``: the meaning of the numbers that ``rb.health()``
  returns;
- ``rlbuf_td.diagnostics.doctor.CODES``: the faults that :func:`check` finds;
- ``rlbuf_td.checkpoint.open_checkpoint``: reads a saved buffer without creating one;
- ``rlbuf_td.distributed.ShardedReplayBuffer``: one replay buffer over many processes or
  machines (needs Ray);
- ``python -m rlbuf_td {demo, doctor, compile, info}``: the command line.

In docstrings, B is the batch size, N the number of rows, T the number of time steps,
and E the number of lanes (environments); ``[B]`` is a shape. Examples assume
``import torch`` and ``from rlbuf_td import *``.
"""

from rlbuf_td.buffers.experience_queue import ExperienceQueue
from rlbuf_td.buffers.mixture import ReplayBufferMixture
from rlbuf_td.buffers.replay import PrioritizedReplayBuffer, ReplayBuffer
from rlbuf_td.buffers.rollout import RolloutBuffer
from rlbuf_td.buffers.waiting import ShutDown
from rlbuf_td.checkpoint import CheckpointError
from rlbuf_td.diagnostics.doctor import check
from rlbuf_td.diagnostics.episode_stats import EpisodeStats
from rlbuf_td.diagnostics.memory_plan import plan
from rlbuf_td.envs.aec_recorder import AECRecorder
from rlbuf_td.envs.gymnasium_recorder import GymnasiumRecorder
from rlbuf_td.envs.pettingzoo_recorder import PettingZooRecorder
from rlbuf_td.envs.specs import schema_of
from rlbuf_td.envs.transition import make_transition
from rlbuf_td.samplers import (
    EpisodeSampler,
    HindsightSampler,
    MinibatchSampler,
    NStepSampler,
    ProportionalSampler,
    QueueSampler,
    RankSampler,
    RecencySampler,
    RowSampler,
    SequenceSampler,
    UniformSampler,
    gymnasium_reward_fn,
    gymnasium_terminated_fn,
)
from rlbuf_td.storages import PackedStorage, SchemaError
from rlbuf_td.storages.memory_budget import MemoryWarning
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from rlbuf_td.writers import QueueWriter, ReservoirWriter, RingWriter, RolloutWriter

__all__ = [
    "AECRecorder",
    "CheckpointError",
    "EpisodeSampler",
    "EpisodeStats",
    "ExperienceQueue",
    "GymnasiumRecorder",
    "HindsightSampler",
    "MemoryWarning",
    "MinibatchSampler",
    "NStepSampler",
    "PackedStorage",
    "PettingZooRecorder",
    "PrioritizedReplayBuffer",
    "ProportionalSampler",
    "QueueSampler",
    "QueueWriter",
    "RankSampler",
    "RecencySampler",
    "ReplayBuffer",
    "ReplayBufferMixture",
    "ReservoirWriter",
    "RingWriter",
    "RolloutBuffer",
    "RolloutWriter",
    "RowSampler",
    "SchemaError",
    "SequenceSampler",
    "ShutDown",
    "TrajectoryIndex",
    "UniformSampler",
    "check",
    "gymnasium_reward_fn",
    "gymnasium_terminated_fn",
    "make_transition",
    "plan",
    "schema_of",
]
__version__ = "0.1.0"
