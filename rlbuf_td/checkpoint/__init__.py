"""Crash-safe dumps: :meth:`ReplayBuffer.dumps <rlbuf_td.ReplayBuffer.dumps>` and its readers.

A dump is a folder of data files, which never change once written, and a manifest: it lists the files with their
checksums, and holds all other state as JSON. A new dump writes its files beside the old ones, skips content that the
old dump already has, and then replaces the manifest, which the operating system does atomically. So a process killed
at any time leaves the old or the new dump. A load compares files with checksums and checks every part before it
changes the buffer. It unpickles nothing. Read ``manifest.py``, then ``files.py`` and ``buffer.py``.
"""

from rlbuf_td.checkpoint.buffer import Checkpoint, open_checkpoint
from rlbuf_td.checkpoint.folder import load_state, save_state
from rlbuf_td.checkpoint.manifest import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "load_state", "open_checkpoint", "save_state"]
