"""Crash-safe dumps: :meth:`ReplayBuffer.dumps <rlbuf_td.ReplayBuffer.dumps>` and its readers."""

from rlbuf_td.checkpoint.buffer import Checkpoint, open_checkpoint
from rlbuf_td.checkpoint.folder import load_state, save_state
from rlbuf_td.checkpoint.manifest import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "load_state", "open_checkpoint", "save_state"]
