"""The one error of this package's checkpoints."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A dump that cannot be written or read: says which file it is and what is wrong. Nothing has been changed.

    Example:
        >>> import tempfile
        >>> from rlbuf_td import ReplayBuffer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ReplayBuffer().loads(folder)
        Traceback (most recent call last):
        rlbuf_td.checkpoint.errors.CheckpointError: ...
    """
