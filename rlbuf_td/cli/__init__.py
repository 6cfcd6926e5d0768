"""The scripts behind the commands of ``python -m rlbuf_td``.

``demos/`` trains DQN, PPO and Ape-X agents with this package's buffers. ``bench/`` compares the speed of the buffers
with that of other libraries. ``notebooks.py`` lists or copies the notebooks. The commands ``plan`` and ``doctor`` are
in :mod:`rlbuf_td.diagnostics`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path


class UsageError(Exception):
    """An invalid command line; ``python -m rlbuf_td`` prints the message and exits with status 2."""


def refuse_missing_device(name: str) -> None:
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).partition("\n")[0].partition(". ")[0]
        raise UsageError(f"--device {name}: torch cannot use this device here: {first}") from None


def refuse_unwritable(option: str, folder: Path) -> None:
    """Create a folder for results, before the work that would otherwise be lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"{option}: cannot write to {folder}: {error.strerror}") from None
