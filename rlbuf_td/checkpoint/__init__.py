"""Saves buffers with :meth:`ReplayBuffer.dumps <rlbuf_td.ReplayBuffer.dumps>`, and
loads them.

A dump is a folder of data files and a manifest. The manifest lists the files with their
checksums, and holds all other state as JSON. A new dump writes new files beside those
of the old dump and then replaces the manifest atomically. If the process is killed, the
folder therefore holds either the old or the new dump. A load checks all files before it
changes the buffer. If a component refuses its saved state, the load undoes all changes.
A load never unpickles data.
"""

from rlbuf_td.checkpoint.buffer import Checkpoint, open_checkpoint
from rlbuf_td.checkpoint.files import CheckpointError, load_state, save_state

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "load_state",
    "open_checkpoint",
    "save_state",
]
