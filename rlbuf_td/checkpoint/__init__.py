"""Dumps that a crash cannot spoil: :meth:`ReplayBuffer.dumps <rlbuf_td.ReplayBuffer.dumps>` and what reads them."""

from rlbuf_td.checkpoint.errors import CheckpointError
from rlbuf_td.checkpoint.opening import Checkpoint, open_checkpoint
from rlbuf_td.checkpoint.saving import load_state, save_state

__all__ = ["Checkpoint", "CheckpointError", "load_state", "open_checkpoint", "save_state"]
