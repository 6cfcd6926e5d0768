"""The cases of ``python -m rlbuf_td bench`` under pytest-benchmark; not collected unless named.

pip install -e '.[tests,bench]' && pytest tests/benchmarks/bench_buffers.py --benchmark-columns=median,iqr
"""

from __future__ import annotations

import functools

import pytest
import torch

from rlbuf_td.cli.bench import rollouts
from rlbuf_td.cli.bench.compare import OPERATIONS, REPLAY
from rlbuf_td.cli.bench.contenders import Contender, available, image_rows, small_rows

KINDS = {"small": (100_000, small_rows), "image": (2_000, image_rows)}


@functools.lru_cache(maxsize=1)
def contender(cls: type[Contender], kind: str) -> Contender:
    torch.set_num_threads(1)
    rows, make_rows = KINDS[kind]
    return cls(rows, 256, make_rows)


@pytest.mark.parametrize("operation", REPLAY)
@pytest.mark.parametrize("cls", available(), ids=lambda cls: cls.name)
@pytest.mark.parametrize("kind", KINDS)
def test_time(benchmark, kind, cls, operation):
    if not hasattr(cls, operation):
        pytest.skip(f"{cls.name} does not offer it")
    benchmark.group = f"{OPERATIONS[operation]}, {kind} rows"
    benchmark(getattr(contender(cls, kind), operation))


ON_POLICY = {
    f"{operation} {shape} {name}": (operation, shape, call)
    for operation, _, shape, calls in rollouts.cases(list(rollouts.OPERATIONS), 256)
    for name, call in calls.items()
}


@pytest.mark.parametrize("case", ON_POLICY)
def test_time_on_policy(benchmark, case):
    operation, shape, call = ON_POLICY[case]
    benchmark.group = f"{OPERATIONS[operation]}, {shape}"
    benchmark(call)
