"""Memory that several processes map, of a size that may be settled after they have parted."""

from __future__ import annotations

import mmap
import os
import tempfile
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch


class NamelessFile:
    """A file in memory that has no name: it goes with the last process that has it, however that ends.

    A forked process has it, and a spawned one to which it is sent. Pages take memory when they are first written.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("rlbuf_td")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())

    def map(self, nbytes: int) -> torch.Tensor:
        """Return the first ``nbytes`` (at least 1), uint8, as every process sees them; zeros where none has written."""
        if os.fstat(self.descriptor).st_size < nbytes:
            os.ftruncate(self.descriptor, nbytes)
        return torch.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=torch.uint8)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            raise RuntimeError("shared memory is sent to a spawned process, never copied")
        return {"descriptor": reduction.DupFd(self.descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.descriptor = state["descriptor"].detach()

    def __del__(self) -> None:
        descriptor = self.__dict__.pop("descriptor", None)
        if isinstance(descriptor, int):
            os.close(descriptor)
