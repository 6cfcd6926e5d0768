"""Crash-safe dumps: :meth:`ReplayBuffer.dumps <rlbuf_td.ReplayBuffer.dumps>` and its readers.

A dump is a folder of data files and a manifest. The manifest lists the files with their checksums, and holds all other
state as JSON. A new dump writes new files beside those of the old dump and then replaces the manifest atomically. If
the process is killed, the folder therefore holds the old or the new dump. A load checks all files before it changes the
buffer, undoes its changes if a state is refused, and unpickles nothing. Read ``manifest.py``, then ``files.py``
and ``buffer.py``.
"""

from rlbuf_td.checkpoint.buffer import Checkpoint, open_checkpoint
from rlbuf_td.checkpoint.folder import load_state, save_state
from rlbuf_td.checkpoint.manifest import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "load_state", "open_checkpoint", "save_state"]
