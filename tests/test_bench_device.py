"""The one-call script for a GPU, as far as it goes without one: its checks, its table, its refusal."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rlbuf_td.__main__ import main
from rlbuf_td.cli.bench import device, device_checks
from rlbuf_td.cli.bench.timing import Measured, table
from rlbuf_td.kernels.dispatch import forced


@pytest.mark.parametrize("name", device_checks.CHECKS)
def test_every_check_passes(gpu, name):
    torch.manual_seed(0)
    with forced("triton"):
        device_checks.CHECKS[name](gpu, 640, 64)


def test_a_check_that_fails_is_named_and_the_others_run(gpu, monkeypatch):
    from rlbuf_td.kernels.sum_tree import cuda as _sum_tree_triton

    right = _sum_tree_triton.draw

    def broken(*given, **kwargs):
        index, weight = right(*given, **kwargs)
        return index.flip(0), weight

    monkeypatch.setattr(_sum_tree_triton, "draw", broken)
    monkeypatch.setattr(
        device_checks, "CHECKS", {name: device_checks.CHECKS[name] for name in ("sum tree", "trajectories")}
    )
    with forced("triton"):
        found = dict(device_checks.run(gpu, 640, 64))
    assert "differ from the specification" in str(found["sum tree"])
    assert found["trajectories"] is None


def test_every_timing_runs_and_measures_what_it_says(monkeypatch):
    def once(call, *given):
        call()
        return 2.0

    for name in ("wall", "on_device", "launches"):
        monkeypatch.setattr(device, name, once)
    here = [timing for timing in device.TIMINGS if timing is not device.flashbax]  # JAX has threads, tests fork
    found = [line for timing in here for line in timing(torch.device("cpu"), 600, 0.0)]
    assert len({line.what for line in found}) == len(found) > 15
    assert {line.goal for line in found if line.goal} == {20, 150, 8, 3, 200, 60, 15}
    share = next(line for line in found if line.unit == "%")
    assert (share.value, share.verdict) == (100.0, "yes")


def test_flashbax_is_timed_in_two_programs_and_in_one():
    program = (
        "import torch; from rlbuf_td.cli.bench import device; torch.cuda.synchronize = None;"
        "lines = list(device.flashbax(torch.device('cpu'), 600, 0.001));"
        "print(*(f'{line.what}: {line.value > 1}' for line in lines), sep='\\n')"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [
        f"Flashbax: proportional, sample + update{how}, batch {batch}: True"
        for batch in ("256", "65,536")
        for how in ("", ", one program")
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_script_says_so(capsys):
    assert main(["bench", "--device", "cuda"]) == 1
    assert "has no CUDA device" in capsys.readouterr().err
    assert main(["bench", "--device", "mps"]) == 1
    assert "not mps" in capsys.readouterr().err


def test_the_table_says_which_goals_are_met():
    lines = [
        Measured("a", 12.34, "us", 20),
        Measured("b", 30.0, "us", 20),
        Measured("c", 70.0, "%", 60, at_least=True),
        Measured("d", 5.0, "us"),
    ]
    assert [line.verdict for line in lines] == ["yes", "NO", "yes", ""]
    printed = table(lines, "Some GPU").splitlines()
    assert printed[0] == "Some GPU"
    assert printed[4] == "| a | 12.3 us | <= 20 us | yes |"
    assert printed[6] == "| c | 70.0 % | >= 60 % | yes |"
    assert printed[7] == "| d | 5.0 us |  |  |"
