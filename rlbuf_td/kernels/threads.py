"""Runs compiled loops over large batches in several threads, those of torch's own OpenMP pool.

For milliseconds after an operation, the threads of torch's pool wait for the next one without leaving their processors.
They start at once, while threads outside the pool would wait for a processor.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: Bytes of the smallest batch for which several threads are worth it: threads that sleep take 0.1 ms to wake up.
LARGE = 2 << 20
DRAW_BYTES = 256  # bytes that are copied in the time of a draw
_SOFT = 1  # omp_pause_soft


@cache
def openmp() -> tuple[int, int] | None:
    """Return the addresses of ``GOMP_parallel`` and ``at::get_num_threads``; None if torch does not use OpenMP.

    ``GOMP_parallel`` runs a function in each thread of the pool.
    """
    try:
        # The symbols of a library include those of the libraries that it uses.
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        pause, functions = library.omp_pause_resource_all, (library.GOMP_parallel, library._ZN2at15get_num_threadsEv)
    except (AttributeError, OSError):  # macOS, Windows
        return None
    os.register_at_fork(before=lambda: pause(_SOFT))  # ends the threads; a child would wait for them for ever
    run, count = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return run, count


class ParallelLoop:
    """A compiled loop that several threads run, each on parts of a batch.

    The decorated function takes the address of a *job*: the number of parts taken so far, the number of parts, the size
    of the batch, and further arguments, 8 bytes each. It takes parts with
    :func:`rlbuf_td.kernels.threads_cpu.take_part` until none is left. It must not raise an error.
    """

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function

    @cached_property
    def _compiled(self) -> Any:
        from rlbuf_td.kernels.code_cache import cached_callback

        return cached_callback(self._function, error_model="numpy")

    @property
    def address(self) -> int:
        return int(self._compiled.address)

    def __call__(self, nbytes: int, count: int, arguments: tuple[float, ...]) -> bool:
        """Run the loop on a batch of ``count`` items; return False, without a result, if torch may use one thread."""
        functions = openmp()
        if functions is None or torch.get_num_threads() == 1:
            return False
        job = np.empty(3 + len(arguments), np.int64)
        job[2] = count
        for place, argument in enumerate(arguments, 3):
            (job.view(np.float64) if isinstance(argument, float) else job)[place] = argument
        from rlbuf_td.kernels.threads_cpu import run_parts

        return bool(run_parts(functions, self.address, job.ctypes.data, nbytes))


def addresses_of_loops(*loops: ParallelLoop) -> np.ndarray:
    """Return what kernels need to run the loops themselves: :func:`openmp`, if any, and the loops' addresses, int64."""
    return np.array([*(openmp() or (0, 0)), *(loop.address for loop in loops)], np.int64)
