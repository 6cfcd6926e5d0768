"""Check and time everything that runs on a GPU, in one call: ``python tests/benchmarks/bench_cuda.py [--rows 1e6]``.

The same as ``python -m rlbuf_td bench --device cuda --rows 1e6``, for a clone that is not installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlbuf_td.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--device", "cuda", *(sys.argv[1:] or ["--rows", "1e6"])]))
