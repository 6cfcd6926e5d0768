"""Fixtures that every test module shares."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from typing import Any

import torch

# Without a GPU, its kernels run on the CPU where a test asks for them. Triton reads the
# variable when it is imported, which other libraries do.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
from gymnasium.utils import seeding
from hypothesis import HealthCheck, Phase, register_random, settings

from tests.backends import forced

# Workers run side by side on few cores: more threads per worker only wait. Subprocesses
# read the variable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


# Without a GPU, `torch.manual_seed` takes a millisecond, because it formats the stack for
# the day when there is one.
seed_torch = (
    torch.manual_seed
    if torch.cuda.is_available()
    else torch.default_generator.manual_seed
)


class TorchsGenerator:
    """What Hypothesis seeds before each example, as it does with the generators that it
    knows."""

    seed = staticmethod(seed_torch)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCHS_GENERATOR = TorchsGenerator()  # which Hypothesis does not keep alive
register_random(TORCHS_GENERATOR)


def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis try the same few examples in every run; ``--hypothesis-seed=N``
    tries 100 of seed ``N``."""
    has_seed = config.getoption("--hypothesis-seed") is not None
    slow = [HealthCheck.too_slow]  # on a busy machine
    how: dict[str, Any] = {
        "deadline": None,
        "suppress_health_check": slow,
        "database": None,
        "print_blob": True,
    }
    settings.register_profile("same examples", derandomize=True, max_examples=20, **how)
    settings.register_profile(
        "examples of a seed", derandomize=False, max_examples=100, **how
    )
    # for ``--hypothesis-profile``: does not look for the shortest failure
    explicit = Phase.explicit, Phase.generate
    settings.register_profile(
        "the first failure", derandomize=True, max_examples=20, phases=explicit, **how
    )
    settings.load_profile("examples of a seed" if has_seed else "same examples")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Compile all loops before workers start that will run all tests."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        print("compiling all loops (two minutes, once)", flush=True)
        subprocess.run(
            [sys.executable, "-m", "rlbuf_td", "compile"],
            cwd=config.rootpath,
            capture_output=True,
        )


@pytest.fixture(autouse=True, scope="session")
def seeds_of_environments() -> Iterator[None]:
    """Take the seeds of Gymnasium's environments and spaces from NumPy's generator, not
    from the system."""
    make = seeding.np_random
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            seeding,
            "np_random",
            lambda seed=None: make(
                np.random.randint(2**31) if seed is None else seed  # noqa: NPY002
            ),
        )
        yield


@pytest.fixture(autouse=True, scope="session")
def temporary_files() -> Iterator[None]:
    """Delete the temporary files and folders that tests leave."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(
        prefix="rlbuf_td_", ignore_cleanup_errors=True
    ) as folder:
        tempfile.tempdir = folder
        yield
    tempfile.tempdir = before


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Let a test draw the same numbers whichever tests have run before it in its
    process."""
    seed_torch(0)
    np.random.seed(0)  # noqa: NPY002  libraries draw from it
    random.seed(0)


@pytest.fixture(params=["compiled", "torch"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Run the test on the CPU, with its compiled loops and with the torch operations of
    other devices."""
    with forced("torch") if request.param == "torch" else nullcontext():
        yield torch.device("cpu")


#: The slow tests that take longest, longest first: where workers share them out, these
# must not begin last.
LONGEST = [
    "test_compile_compiles",
    "demo_solves",
    "11_demonstrations",
    "14_torchrl",
    "test_ray.py",
    "07_checkpoints",
    "19_threads",
]
LONGEST += [
    "04_hindsight",
    "06_sequences",
    "18_recurrent",
    "17_many",
    "test_every_library",
    "01_quick",
    "08_migration",
    "16_world",
]
LONGEST += ["15_multi", "13_recipes", "20_more", "test_wheel", "test_kill.py"]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let a test module that cannot be imported fail; pytest skips it for the sake of
    the package's modules, some of which need extras."""
    report = yield
    cause = str(report.longrepr)
    if report.skipped and "unable to import module" in cause:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} cannot be imported: {cause}"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        names = LONGEST if item.get_closest_marker("slow") else []
        return next(
            (at for at, name in enumerate(names) if name in item.nodeid), len(LONGEST)
        )

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Let garbage collections pass over what imports have made, a million objects."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip tests of TorchRL's prioritized sampler where its extension does not load: it
    was built for another torch."""
    try:
        yield
    except RuntimeError as error:
        if "SegmentTreeFp32 is not available" not in str(error):
            raise
        pytest.skip("TorchRL's extension does not load with this torch")


@pytest.fixture(params=["loops", "torch"])
def boundaries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with the look-ups of episodes of the CPU, and with those of other
    devices."""
    if request.param == "torch":
        monkeypatch.setattr(
            "rlbuf_td.storages.episodes.uses_numba", lambda device: False
        )


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Run Ray on this machine, for all tests that ask for it."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112  else it kills what runs where memory is short
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  with Ray's 15, other tests delay restarts
    paths = {
        "PYTHONPATH": os.pathsep.join((os.getcwd(), os.environ.get("PYTHONPATH", "")))
    }
    ray.init(
        address="local",  # else one that somebody else runs here is taken
        num_cpus=2,
        object_store_memory=200_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": paths},
    )
    yield
    ray.shutdown()
