"""``python -m rlbuf_td info``: what a bug report should say about an installation."""

from __future__ import annotations

import os
import platform
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import rlbuf_td
from rlbuf_td.kernels.dispatch import OFF, why_not_triton
from rlbuf_td.kernels.draws import append_distinct_
from rlbuf_td.storages.memory_budget import room_for, show_bytes

_PACKAGES = "tensordict", "torchrl", "numba", "numpy", "gymnasium"


def main(options: Namespace) -> int:
    for name, words in facts():
        print(f"{name}: {words}")
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each fact about this installation."""
    yield "rlbuf_td", f"{rlbuf_td.__version__} in {Path(rlbuf_td.__file__).parent}"
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "torch", torch.__version__  # with its build, such as +cu130
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
    yield "system", platform.platform()
    yield "processor", f"{_processor()} ({platform.machine()})"
    usable = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    yield (
        "cores",
        f"{os.cpu_count()}, {usable} usable; torch uses {torch.get_num_threads()} threads",
    )
    yield "memory", room_for(torch.device("cpu")).words()
    has_gpu = torch.cuda.is_available()
    yield "GPU", torch.cuda.get_device_name() if has_gpu else "none"
    yield "GPU kernels", _gpu_kernels() if has_gpu else "none, without a GPU"
    yield (
        "compiled loops",
        f"off ({OFF}): the reference in torch runs" if OFF else _compiled_loops(),
    )
    yield (
        "cache folder",
        "none, because compiled loops are off" if OFF else _cache_folder(),
    )


def _processor() -> str:
    """Return the processor's name, where Linux knows it; Python itself often knows only
    its architecture."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = (
            line.partition(":")[2].strip()
            for line in lines
            if line.startswith("model name")
        )
        return next(names, platform.processor())
    return platform.processor() or "unknown"


def _compiled_loops() -> str:
    """Run a compiled loop, and say whether it works."""
    try:
        out = torch.zeros(1, dtype=torch.int64)
        works = append_distinct_(out, 0, torch.ones_like(out)) == int(out) == 1
    except Exception as error:  # noqa: BLE001  whatever is wrong belongs into the report
        return f"do not run: {type(error).__name__}: {error}"
    return "in use" if works else "give wrong results"


def _gpu_kernels() -> str:
    """Check the kernels, and say whether they work."""
    device = torch.device("cuda", torch.cuda.current_device())
    reason = why_not_triton(device)
    if reason:
        return f"off ({reason}): the reference in torch runs"
    from rlbuf_td.kernels.self_check import CHECKS, words_of

    return f"in use: {', '.join(map(words_of, CHECKS))}"


def _cache_folder() -> str:
    """Return where compiled functions are cached, and how large the cache is."""
    from rlbuf_td.kernels.code_cache import folder

    path = folder()  # only a writable one; without one, it warns
    if path is None:
        return "none is writable; set NUMBA_CACHE_DIR to a writable folder"
    files = [file.stat().st_size for file in path.rglob("*.nbc")]
    return (
        f"{path} (writable, {len(files)} compiled functions, {show_bytes(sum(files))})"
    )
