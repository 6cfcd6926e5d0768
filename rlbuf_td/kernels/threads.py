"""Runs compiled loops over large batches in several threads, those of torch's own OpenMP pool.

For milliseconds after an operation, the threads of torch's pool wait for the next one without leaving their processors.
They start at once, while threads outside the pool would wait for a processor. A call ends when each of its threads has
ended. If other programs keep the processors busy, a thread may wait for one for many milliseconds; such calls take up
to forty times as long as with one thread. Each loop therefore compares its calls in threads with calls in one thread,
and uses threads only while they save time; see :func:`rlbuf_td.kernels.threads_cpu.run_parts`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

#: Bytes of the smallest batch for which several threads are worth it: threads that sleep take 0.1 ms to wake up.
LARGE = 2 << 20
DRAW_BYTES = 256  # bytes that are copied in the time of a draw
_SOFT = 1  # omp_pause_soft

#: What is known of the calls of one loop over items of about one size.
COST = np.dtype([
    ("alone", np.float64),  # seconds per byte with one thread: smoothed; 0 before the first call
    ("debt", np.float64),  # time lost by threads so far, in calls with one thread; negative: time saved
    ("calls", np.int64),  # since the last call with one thread; below 0 until `alone` can be trusted
])  # fmt: skip
SIZES = 40  # items of up to 2^39 bytes


class OpenMP(NamedTuple):
    """Addresses of functions; all are 0 if torch does not use OpenMP."""

    run: int = 0  # ``GOMP_parallel``: run a function in each thread of the pool
    threads: int = 0  # ``at::get_num_threads``
    clock: int = 0  # ``omp_get_wtime``


@cache
def openmp() -> OpenMP:
    """Return the functions of the OpenMP that torch uses."""
    try:
        # The symbols of a library include those of the libraries that it uses.
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        pause = library.omp_pause_resource_all
        functions = library.GOMP_parallel, library._ZN2at15get_num_threadsEv, library.omp_get_wtime
    except (AttributeError, OSError):  # macOS, Windows
        return OpenMP()
    os.register_at_fork(before=lambda: pause(_SOFT))  # ends the threads; a child would wait for them for ever
    return OpenMP(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions))


class ParallelLoop:
    """A compiled loop that one or several threads run, each on parts of a batch.

    The decorated function takes the address of a *job*: the number of parts taken so far, the number of parts, the size
    of the batch, and further arguments, 8 bytes each. It takes parts with
    :func:`rlbuf_td.kernels.threads_cpu.take_part` until none is left. It must not raise an error.
    """

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function
        self._costs = np.zeros(SIZES, COST)

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the compiled function, and of a :data:`COST` for each size of an item (its bits)."""
        from rlbuf_td.kernels.code_cache import cached_callback

        self._compiled = cached_callback(self._function, error_model="numpy")
        return int(self._compiled.address), self._costs.ctypes.data


def addresses_of_loops(*loops: ParallelLoop) -> np.ndarray:
    """Return what kernels need to run the loops themselves: :func:`openmp`, and the loops' addresses, int64."""
    return np.array([*openmp(), *(address for loop in loops for address in loop.addresses)], np.int64)
