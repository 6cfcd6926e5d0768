"""A run that was dumped, killed and loaded is, bit for bit, the run that was not."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from tests.checkpoint.resumed_run import Run, main
from tests.checkpoint.worlds import SAMPLERS, WRAPPERS


@pytest.mark.parametrize("sampler", [*SAMPLERS, *WRAPPERS])
def test_training_goes_on_bit_for_bit(sampler, tmp_path):
    whole = Run(sampler)
    expected = [whole.step(number) for number in range(60)]
    first = Run(sampler)
    found = [first.step(number) for number in range(30)]
    first.save(tmp_path)
    torch.rand(7)
    second = Run(sampler)
    second.load(tmp_path)
    assert found + [second.step(number) for number in range(30, 60)] == expected


@pytest.mark.parametrize(("sampler", "steps"), [("proportional", 150), ("n-step over hindsight", 40), ("sequence", 40)])
def test_a_killed_process_is_resumed_bit_for_bit(sampler, steps, tmp_path):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    main(sampler, tmp_path / "whole", 0, 2 * steps, dies=False)
    command = [sys.executable, "-m", "tests.checkpoint.resumed_run", sampler, str(tmp_path / "killed")]
    killed = subprocess.run([*command, "0", str(steps), "die"], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    subprocess.run([*command, str(steps), str(2 * steps)], check=True, capture_output=True)
    logs = [(tmp_path / name / "log").read_text().splitlines() for name in ("whole", "killed")]
    assert len(logs[0]) == 2 * steps
    assert logs[0] == logs[1]
