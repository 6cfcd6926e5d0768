"""What is built from the sources can be installed and used, also where nothing can be written."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMOKE = """
import torch, rlbuf_td
from importlib.metadata import version
from tensordict import TensorDict

rb = rlbuf_td.ReplayBuffer(storage=rlbuf_td.PackedStorage(8), batch_size=4)
rb.extend(TensorDict({"x": torch.arange(10)}, [10]))
assert rb.sample()["x"].min() >= 2
assert version("rlbuf_td") == rlbuf_td.__version__
print(rlbuf_td.__file__)
"""


def run(*command: str, cwd: Path) -> str:
    return subprocess.run([sys.executable, *command], cwd=cwd, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_wheel_and_source_archive_hold_all_files_and_work(tmp_path):
    pytest.importorskip("hatchling")
    run("-m", "hatchling", "build", "-d", str(tmp_path), cwd=ROOT)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "rlbuf_td").rglob("*.py")} | {"rlbuf_td/py.typed"}
    notebooks = {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    with zipfile.ZipFile(wheel) as archive:
        within = {f"rlbuf_td/{name}" for name in notebooks}
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == files | within
    with tarfile.open(source) as archive:
        assert {"README.md", "LICENSE", *files, *notebooks} <= {name.partition("/")[2] for name in archive.getnames()}
    for built in (wheel, source):
        folder = tmp_path / built.name.replace(".", "_")
        install = "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(folder)
        run(*install, str(built), cwd=tmp_path)
        assert Path(run("-c", SMOKE, cwd=folder).strip()).is_relative_to(folder)
        where, *listed = run("-m", "rlbuf_td", "notebooks", cwd=folder).splitlines()
        assert where == f"{folder / 'rlbuf_td' / 'notebooks'}:"
        assert {f"notebooks/{line.strip()}" for line in listed if line.endswith(".ipynb")} == notebooks
        run("-m", "rlbuf_td", "notebooks", "notebooks", cwd=folder)
        assert all((folder / name).read_bytes() == (ROOT / name).read_bytes() for name in notebooks)


READ_ONLY = "mount --make-rprivate / && mount -t tmpfs tmpfs $TMPDIR && mount -o remount,bind,ro / && "
EVERYTHING = """
import sys
from pathlib import Path
import torch
from rlbuf_td.__main__ import main
from tests.buffers.test_learner_device import NAMES, SAMPLERS, buffer, data

for name in NAMES:
    rb = buffer(SAMPLERS[name](200))
    for step in range(3):
        rb.extend(data(20, 20 * step))
        batch = rb.sample()
        rb.update_tensordict_priority(batch.set("td_error", torch.rand(batch.batch_size)))
assert main(["demo", "--steps", "1500", "--out", sys.argv[1] + "/out"]) in (0, 1)
assert main(["demo", "--steps", "1500"]) == 2  # the folder for its picture cannot be made
assert list(Path(sys.argv[1]).glob("rlbuf_td_*/*/*/*/*.nbc"))
"""


@pytest.mark.slow
def test_samplers_and_demo_run_without_home_on_read_only_files(tmp_path):
    names = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    environment = names | {"HOME": "/nonexistent", "TMPDIR": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)}

    def alone(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        shell = ["unshare", "--mount", "sh", "-c", READ_ONLY + command, "sh", *arguments]
        return subprocess.run(shell, cwd=ROOT, env=environment, capture_output=True, text=True)

    if os.name != "posix" or alone("true").returncode:
        pytest.skip("needs the right to mount file systems")
    assert "Read-only" in alone("touch pyproject.toml").stderr
    done = alone('exec "$@"', sys.executable, "-W", "error::RuntimeWarning", "-c", EVERYTHING, str(tmp_path))
    assert done.returncode == 0, done.stderr
