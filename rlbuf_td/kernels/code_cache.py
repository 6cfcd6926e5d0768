"""Keeps compiled loops for later processes, in numba's cache.

It lies in ``$NUMBA_CACHE_DIR``, beside the sources, at home, or in the folder of
temporary files, in this order.

A log message says when loops are compiled;
``logging.getLogger("rlbuf_td").setLevel("ERROR")`` silences it. Of processes that need
a loop at the same time, one compiles it, under a lock of the loop's own, and the others
wait and load it. ``python -m rlbuf_td compile`` compiles all loops ahead.

Invariant: code is loaded only if all sources in ``kernels/`` are those from which it
was compiled, because a loop calls functions of other files. Their digest takes the
place of the time of the loop's own file, which numba would compare.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from filelock import FileLock
from numba import config, njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc

if TYPE_CHECKING:
    from numba.core.caching import _CacheLocator
    from numba.core.compiler import CompileResult
    from numba.core.cpu import CPUContext
    from numba.core.dispatcher import Dispatcher
    from numba.core.typing import Signature

Found = TypeVar("Found")
_ROOM = Path(__file__).parent
# seconds that a process waits for another one, which may have been stopped
_PATIENCE = 600
_COMPILER = "rlbuf_td_compiler"  # the name of a thread that compiles


def cached_njit(**options: object) -> Callable[[Callable[..., object]], Dispatcher]:
    """Return a decorator like ``numba.njit`` that keeps the compiled code."""

    def decorate(function: Callable[..., object]) -> Dispatcher:
        loop = njit(**options)(function)
        if folder() is not None:
            # instead of the cache that numba sets for ``cache=True``
            loop._cache = _Cache(function)
        loop.compile = partial(_compile, loop, loop.compile)
        return loop

    return decorate


class Callback:
    """A compiled function of one address, which loops call by its own address; it must
    not raise an error."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function

    @cached_property
    def address(self) -> int:
        """The address of the function."""
        options = {"nopython": True, "error_model": "numpy"}
        self._compiled = CFunc(
            self._function, ((types.int64,), types.void), {}, options
        )
        if folder() is not None:
            self._compiled._cache = _Cache(self._function)
        _in_thread(self._compiled.compile)
        return int(self._compiled.address or 0)


def _compile(
    loop: Dispatcher, compile_: Callable[[Signature], Found], signature: Signature
) -> Found:
    """Load or compile a loop in a thread of its own, which also compiles what the loop
    calls: it holds numba's lock.

    Numba leaves exceptions in reference cycles. The frames of their tracebacks refer to
    those of all callers, and would keep the callers' variables, such as a buffer, until
    a garbage collection.
    """
    return (
        compile_(signature)
        if signature in loop.overloads
        else _in_thread(partial(compile_, signature))
    )


def _in_thread(work: Callable[[], Found]) -> Found:
    if threading.current_thread().name.startswith(_COMPILER):
        return work()
    with ThreadPoolExecutor(1, _COMPILER) as threads:
        return threads.submit(work).result()


class _Cache(FunctionCache):
    """The files of one loop, in the folder of all loops."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)
        path = _locator().get_cache_path()
        self._file_name = f"{function.__module__}.{self._impl.filename_base}"
        self._impl._locator = _locator()
        self._cache_path = path
        self._cache_file = IndexDataCacheFile(path, self._file_name, _digest())
        # read before the rest of an index, which may name classes that other sources
        # had
        self._cache_file._version += _digest()
        # by process: a forked one cannot take its parent's
        self._locks: dict[int, FileLock] = {}

    @property
    def _lock(self) -> FileLock:
        process = os.getpid()
        if process not in self._locks:
            path = Path(self.cache_path, f"{self._file_name}.lock")
            # a thread can take it again
            self._locks[process] = FileLock(path, timeout=_PATIENCE)
        return self._locks[process]

    def load_overload(
        self, signature: Signature, target: CPUContext
    ) -> CompileResult | None:
        """Return compiled code from the cache; None: this process compiles it, and
        holds the lock."""
        code = self._load(signature, target)
        if code is None:
            # Loops do not call each other in a circle, so that no two processes wait
            # for each other. a file system without locks, or a process that has stopped
            with suppress(OSError, NotImplementedError):
                _locator().ensure_cache_path()
                self._lock.acquire()
                code = self._load(signature, target)
                if code is not None:
                    self._lock.release()
        if code is None:
            _announce()
        return code

    def _load(self, signature: Signature, target: CPUContext) -> CompileResult | None:
        with suppress(OSError):
            return super().load_overload(signature, target)
        return None

    def save_overload(self, signature: Signature, code: CompileResult) -> None:
        # otherwise, two processes could mix up the code of two signatures
        if self._lock.is_locked:
            # disk full, or a folder that was deleted: the next process compiles
            with suppress(OSError):
                super().save_overload(signature, code)
            self._lock.release()


@cache
def _announce() -> None:
    logging.getLogger("rlbuf_td").warning(
        "rlbuf_td is compiling its loops for this processor: the first call of each kind takes up to half a minute, "
        "once per installation (python -m rlbuf_td compile compiles all ahead; the code is stored in %s)",
        folder(),
    )


@cache
def _digest() -> str:
    sources = [path for path in sorted(_ROOM.rglob("*.py")) if path.name != "triton.py"]
    return sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


@cache
def _locator() -> _CacheLocator:
    """Return what numba finds the place of this module's code with; raise a
    RuntimeError if none is writable."""
    try:
        return FunctionCache(cached_njit)._impl.locator
    except RuntimeError:  # neither beside the sources nor at home
        with suppress(OSError, AttributeError):  # not on Windows
            private = Path(tempfile.gettempdir(), f"rlbuf_td_{os.getuid()}")
            private.mkdir(mode=0o700, exist_ok=True)
            status = private.lstat()
            # private: numba unpickles these files
            if status.st_uid == os.getuid() and not status.st_mode & 0o022:
                config.CACHE_DIR = str(private)
        return FunctionCache(cached_njit)._impl.locator


@cache
def folder() -> Path | None:
    """Return the cache folder; if no place for it is writable, warn and return None."""
    try:
        return Path(_locator().get_cache_path())
    except RuntimeError:
        warnings.warn(
            "rlbuf_td finds no writable cache folder, so every process compiles its loops again (some seconds per "
            "kind of call): set the environment variable NUMBA_CACHE_DIR to a writable folder",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
