"""Stores compiled loops for later processes, in one folder per version of the kernels' sources.

Compilation takes from a second to half a minute per operation, once per installation; ``python -m rlbuf_td compile``
compiles all loops ahead. A progress bar or a log message announces it (``compile_progress.py``);
``logging.getLogger("rlbuf_td").setLevel("ERROR")`` silences both. Of processes that need a loop at the same time, one
compiles it, under a lock of the loop's own, and the others wait and load it. Numba's own cache does not notice changes
in functions that a loop imports from other files. The folder's name is therefore a digest of all sources in
``kernels/``. When the folder is created, the folders of other versions are deleted. The folder is created in the first
writable one of these places:

- The folder ``$NUMBA_CACHE_DIR``, if this environment variable is set.
- The package's own folder ``kernels/__pycache__/rlbuf_td``.
- The folder ``$XDG_CACHE_HOME/rlbuf_td``, by default ``~/.cache/rlbuf_td``.
- The folder ``rlbuf_td_<user id>`` in the system's temporary folder, if only this user can write to it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial
from hashlib import sha256
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock
from numba import config, njit
from numba.core.caching import FunctionCache

from rlbuf_td.kernels.compile_progress import announce

_ROOM = Path(__file__).parent
_thread = threading.local()  # ``locks``: in a thread that was started to compile a loop, the locks that it holds
_PATIENCE = 600  # seconds that a process waits for another one, which may have been stopped


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like ``numba.njit`` that stores the compiled code in the cache folder."""

    def decorate(function: Callable[..., Any]) -> Any:
        loop = _with_cache(njit(**options)(function), function)
        loop.compile = partial(_compile_once, loop, loop.compile)
        return loop

    return decorate


def _compile_once(loop: Any, compile_: Callable[[Any], Any], signature: Any) -> Any:
    return compile_(signature) if signature in loop.overloads else _compile_in_thread(partial(compile_, signature))


def _compile_in_thread(compile_: Callable[[], Any]) -> Any:
    """Call ``compile_`` in a thread of its own, which also compiles what the loop calls: it holds numba's lock.

    Numba leaves exceptions in reference cycles. The frames of their tracebacks refer to those of all callers, and would
    keep the callers' variables, such as a buffer, until a garbage collection.
    """
    if hasattr(_thread, "locks"):
        return compile_()

    def work() -> Any:
        with ExitStack() as _thread.locks:
            return compile_()

    with ThreadPoolExecutor(1, "rlbuf_td_compiler") as threads:
        return threads.submit(work).result()


def _with_cache(target: Any, function: Callable[..., Any]) -> Any:
    if folder() is not None:
        before, config.CACHE_DIR = config.CACHE_DIR, str(folder())
        try:
            target._cache = _Cache(function)  # as numba does for ``cache=True``
        finally:
            config.CACHE_DIR = before
    return target


class _Cache(FunctionCache):
    def load_overload(self, signature: Any, target: Any) -> Any:
        found = self._load(signature, target)
        if found is None:
            # Loops do not call each other in a circle, so that no two processes wait for each other.
            with suppress(OSError, NotImplementedError):  # a file system without locks, or a process that has stopped
                _thread.locks.enter_context(self._lock)
                found = self._load(signature, target)
                if found is not None:
                    self._lock.release()
        if found is None:
            announce(folder())
        return found

    @property
    def _lock(self) -> FileLock:
        """The lock of this loop: a singleton, which a thread can take again for another signature."""
        path = Path(self.cache_path, f"{self._impl.filename_base}.lock")
        return FileLock(path, timeout=_PATIENCE, is_singleton=True)

    def _load(self, signature: Any, target: Any) -> Any:
        with suppress(OSError):
            return super().load_overload(signature, target)

    def save_overload(self, signature: Any, code: Any) -> None:
        # A unique name: two processes that compile different signatures could otherwise mix up their code.
        self._cache_file._data_name_pattern = f"{self._impl.filename_base}.{uuid4().hex}.{{number:d}}.nbc"
        with suppress(OSError):  # disk full, or another version deleted the folder: the next process compiles
            super().save_overload(signature, code)
            self._lock.release()


@cache
def folder() -> Path | None:
    """Return the cache folder; if no place for it is writable, warn and return None."""
    sources = sorted(_ROOM.rglob("*.py"))
    version = sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    for place in _places() if sources else ():  # without sources, versions cannot be distinguished
        with suppress(OSError):
            return _prepare(place, version)
    warnings.warn(
        "rlbuf_td finds no writable cache folder, so every process compiles its loops again (some seconds per "
        "kind of call): set the environment variable NUMBA_CACHE_DIR to a writable folder",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _places() -> Iterator[Path]:
    installation = "rlbuf_td_" + sha256(bytes(_ROOM)).hexdigest()[:16]
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR, installation)
    yield Path(cache_from_source(__file__)).parent / "rlbuf_td"
    with suppress(RuntimeError):  # this user has no home directory
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rlbuf_td", installation)
    with suppress(OSError, AttributeError):  # not on Windows
        private = Path(tempfile.gettempdir(), f"rlbuf_td_{os.getuid()}")
        private.mkdir(mode=0o700, exist_ok=True)
        status = private.lstat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022:  # private: numba unpickles these files
            yield private / installation


def _prepare(place: Path, version: str) -> Path:
    chosen = (place / version).absolute()  # NUMBA_CACHE_DIR may be relative
    if not chosen.exists():
        chosen.mkdir(parents=True, exist_ok=True)
        for old in place.iterdir():
            if old != chosen:
                shutil.rmtree(old, ignore_errors=True)
    tempfile.TemporaryFile(dir=chosen).close()
    return chosen
