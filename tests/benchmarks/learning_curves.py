"""Draw learning curves (``python -m tests.benchmarks.learning_curves``): DQN with each kind of replay.

A line is the mean of the runs of a sampler, a band reaches from the lowest to the highest run. With three seeds, this
takes half an hour; set ``OMP_NUM_THREADS=1``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from matplotlib.figure import Figure

from rlbuf_td.cli import demo, whole_number
from rlbuf_td.cli.demo import WINDOW, save_curves


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samplers", nargs="+", default=["proportional", "uniform"], choices=[*demo.SAMPLERS])
    parser.add_argument("--seeds", type=whole_number(1), default=3)
    parser.add_argument("--steps", type=whole_number(demo.WARM_UP), default=demo.STEPS)
    parser.add_argument("--out", type=Path, default=Path("runs/learning_curves.png"))
    options = parser.parse_args(arguments)
    env, device = "CartPole-v1", torch.device("cpu")
    figure = Figure(figsize=(6.0, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.set(title=f"DQN on {env}, {options.seeds} seeds", ylabel=f"mean return, last {WINDOW} episodes")
    with TemporaryDirectory() as folder:
        for name in options.samplers:
            train = (env, name, options.steps)
            runs = [demo.train(*train, s, device, Path(folder), stop_when_solved=False) for s in range(options.seeds)]
            steps = np.linspace(0, min(run.steps for run in runs), 300)
            curves = np.stack([np.interp(steps, *run.curve) for run in runs])
            (line,) = axes.plot(steps, curves.mean(0), linewidth=2, label=name)
            axes.fill_between(steps, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_curves(figure, runs[0].threshold, options.out)


if __name__ == "__main__":
    main()
