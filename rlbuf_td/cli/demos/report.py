"""Progress, evaluation and learning curves of the demos."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import gymnasium
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from numba.core import event
from PIL import Image
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type
from tqdm import tqdm

from rlbuf_td.cli import UsageError, refuse_missing_device, refuse_unwritable
from rlbuf_td.diagnostics.episode_stats import running

T = TypeVar("T")
WINDOW = 20  # episodes
SHOWN = f"""return: mean of the last {WINDOW} training episodes
in buffer: share of the time in calls of the buffer, without compilation"""
_LONG = 2.0  # seconds: compilations that take longer are announced
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_COLOURS = "C0", "C1", "C2"


def whole_batches(steps: int, frames: int) -> int:
    """Return the number of steps, rounded up to whole batches of the collector."""
    return -(-steps // frames) * frames


class Compilations(event.Listener):
    """Adds up the time in which Numba compiles loops, and announces each loop that takes more than 2 seconds."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0
        self._open = 0  # the loop, and the functions within it, that are being compiled

    def on_start(self, happened: event.Event) -> None:
        if not self._open:
            self._began = time.perf_counter()
        self._open += 1

    def on_end(self, happened: event.Event) -> None:
        self._open -= 1
        if self._open:
            return
        seconds = time.perf_counter() - self._began
        self.seconds += seconds
        if seconds > _LONG:
            loop = happened.data["dispatcher"].py_func
            room = loop.__module__.removeprefix("rlbuf_td.kernels.").partition(".")[0]
            name = f"{room}, {loop.__name__}".replace("_", " ")
            tqdm.write(f"compiled in {seconds:.0f} s, once per installation: {name}", file=sys.stderr)


class Clock:
    """Measures the time of a run without compilation, and the share of it that is spent in the buffer."""

    def __init__(self) -> None:
        self._start, self._in_buffer = time.perf_counter(), 0.0
        self._end: float | None = None
        self.compilations = Compilations()
        event.register("numba:compile", self.compilations)

    def stop(self) -> None:
        self._end = time.perf_counter()
        event.unregister("numba:compile", self.compilations)

    @contextmanager
    def in_buffer(self) -> Iterator[None]:
        begin, compiled = time.perf_counter(), self.compilations.seconds
        try:
            yield
        finally:
            self._in_buffer += time.perf_counter() - begin - (self.compilations.seconds - compiled)

    def batches(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; count the time to get each item as time in the buffer."""
        iterator = iter(items)
        while True:
            with self.in_buffer():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    @property
    def seconds(self) -> float:
        return (self._end or time.perf_counter()) - self._start - self.compilations.seconds

    @property
    def share(self) -> float:
        return self._in_buffer / self.seconds


class Run(Clock):
    """Shows the progress of a training run, records its episodes, and evaluates and saves the final policy."""

    def __init__(
        self,
        make_env: Callable[[], EnvBase],
        out: Path,
        seed: int,
        steps: int,
        threshold: float,
        *,
        stop_when_solved: bool = True,
    ) -> None:
        super().__init__()
        self.make_env, self.out, self.seed, self.threshold = make_env, out, seed, threshold
        self._stop_when_solved = stop_when_solved
        self.steps = 0
        self.final = float("nan")  # mean return of the final policy over 10 new episodes without exploration
        self.episodes: list[tuple[int, float]] = []  # (environment steps, return)
        self.most_steps = steps
        self._bar = tqdm(total=steps, unit_scale=True, bar_format=_BAR, ncols=None if sys.stderr.isatty() else 80)

    def count(self, data: TensorDictBase, **shown: str) -> None:
        """Count the steps ``[*E, T]`` and the episodes that ended, each at the step at which it ended."""
        lanes = data.shape[:-1].numel()
        ended, returns = (data["next", key].squeeze(-1).movedim(-1, 0) for key in ("done", "episode_reward"))
        steps = self.steps + (1 + ended.nonzero()[:, 0]) * lanes
        self.episodes += zip(steps.tolist(), returns[ended].tolist(), strict=True)
        self.steps += data.numel()
        self._bar.update(data.numel())
        self._bar.set_postfix({"return": f"{self.recent:.0f}", **shown, "in buffer": f"{self.share:.0%}"})

    @property
    def recent(self) -> float:
        last = [total for _, total in self.episodes[-WINDOW:]]
        return sum(last) / len(last) if last else float("nan")

    @property
    def is_solved(self) -> bool:
        return len(self.episodes) >= WINDOW and self.recent >= self.threshold

    @property
    def should_stop(self) -> bool:
        return self._stop_when_solved and self.is_solved

    @property
    def stopped_early(self) -> bool:
        return self.should_stop and self.steps < self.most_steps

    @property
    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """The steps at which episodes ended, and the mean return of the last episodes at each."""
        steps, returns = np.array(self.episodes or [(0, np.nan)]).T
        return steps, running(returns, WINDOW)[0]

    @torch.no_grad()
    def evaluate(self, policy: TensorDictModuleBase, episodes: int = 10) -> float:
        env = self.make_env()
        env.set_seed(10_000 + self.seed)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            rollouts = [env.rollout(10_000, policy, auto_cast_to_device=True) for _ in range(episodes)]
        return sum(float(rollout["next", "reward"].sum()) for rollout in rollouts) / episodes

    def finish(self, policy: TensorDictModuleBase, title: str) -> None:
        self._bar.close()
        self.stop()
        self.final = self.evaluate(policy)
        torch.save(policy.state_dict(), self.out / "policy.pt")
        figure, axes = _axes(title)
        if self.episodes:
            axes.plot(*np.array(self.episodes).T, ".", markersize=3, color="0.75", label="training episode")
            axes.plot(*self.curve, color="C0", linewidth=2, label=f"mean of the last {WINDOW}")
        _save(figure, axes, self.threshold, self.out / "learning_curve.png")


def _axes(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.0, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set(title=title, xlabel="environment steps", ylabel="return")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Figure, axes: Axes, threshold: float, path: Path) -> None:
    if threshold < float("inf"):
        axes.axhline(threshold, color="0.4", linestyle="--", linewidth=1, label="solved")
    figure.legend(frameon=False, loc="outside lower center", ncols=4)  # no curve can cross it there
    figure.savefig(path, dpi=150)
    with Image.open(path) as picture:  # a palette takes a third of the memory
        few_colours = picture.convert("RGB").quantize(128)
    few_colours.save(path, optimize=True)


def draw_bands(runs: Mapping[str, Sequence[Run]], title: str, path: Path) -> None:
    """Draw a learning curve for each name: the mean of its runs, and a band from the lowest to the highest run."""
    every = [run for members in runs.values() for run in members]
    figure, axes = _axes(title)
    steps = np.linspace(0, min(run.steps for run in every), 300)
    for colour, (name, members) in zip(_COLOURS, runs.items(), strict=False):
        curves = np.stack([np.interp(steps, *run.curve) for run in members])
        axes.fill_between(steps, curves.min(0), curves.max(0), color=colour, alpha=0.2, linewidth=0)
        axes.plot(steps, curves.mean(0), color=colour, linewidth=2, label=name)
    axes.set_ylabel(f"mean return, last {WINDOW} episodes")
    _save(figure, axes, every[0].threshold, path)


def train_all(
    options: argparse.Namespace, out: Path, algo: str, names: Sequence[str], train: Callable[..., Run]
) -> dict[str, list[Run]]:
    """Call ``train(name, seed, out, stop_when_solved)`` for each name and seed.

    A single run stops when it has solved the environment. Several runs take all their steps, so that their curves can
    be compared; each has a folder of its own in ``out``.
    """
    seeds = range(options.seed, options.seed + options.seeds)
    print(SHOWN, file=sys.stderr)
    if len(names) * len(seeds) == 1:
        return {names[0]: [train(names[0], options.seed, out, True)]}
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            folder = out / f"{name}-seed{seed}"
            folder.mkdir(exist_ok=True)
            print(f"{name}, seed {seed}:", file=sys.stderr)
            runs[name].append(train(name, seed, folder, False))
    seen = f"{len(seeds)} seeds: mean, lowest and highest" if len(seeds) > 1 else f"seed {options.seed}"
    draw_bands(runs, f"{algo} on {options.env}, {seen}", out / "learning_curves.png")
    return runs


def tell(runs: Mapping[str, Sequence[Run]], out: Path, following: str) -> None:
    if sum(map(len, runs.values())) > 1:
        _tell_several(runs, out)
        return
    ((run,),) = runs.values()
    if run.stopped_early:
        print(f"solved, stopped early: {run.steps:,} of at most {run.most_steps:,} steps")
    print(f"mean return of the last {WINDOW} training episodes: {run.recent:.1f}, after {run.steps:,} steps")
    print(f"mean return of the final policy over 10 new episodes, no exploration: {run.final:.1f}")
    print(f"{run.seconds:,.0f} s, {run.share:.1%} of them in calls of the buffer")
    if run.compilations.seconds >= 1:
        print(f"and {run.compilations.seconds:,.0f} s of compilation, once per installation")
    print(f"learning curve: {out / 'learning_curve.png'}")
    print(f"policy: {out / 'policy.pt'}")
    print(f"next: {following}")


def _tell_several(runs: Mapping[str, Sequence[Run]], out: Path) -> None:
    print(f"mean return of the last {WINDOW} training episodes, and of the final policy over 10")
    print("new episodes without exploration:")
    for name, members in runs.items():
        for run in members:
            print(f"  {name}, seed {run.seed}: {run.recent:.1f}, {run.final:.1f} ({run.seconds:,.0f} s)")
    print(f"learning curves: {out / 'learning_curves.png'}")
    print(f"each run's own curve and policy: {out / '<name>-seed<seed>'}")


def prepare(options: argparse.Namespace, name: str) -> Path:
    """Refuse options that cannot work, limit torch to one thread, and return a folder for the results."""
    for option, algo in {"sampler": "dqn", "shards": "apex", "collectors": "apex"}.items():
        if getattr(options, option) is not None and options.algo != algo:
            raise UsageError(f"--{option} is for --algo {algo}")
    refuse_missing_device(options.device)
    try:
        gymnasium.make(options.env).close()
    except (gymnasium.error.Error, ImportError) as error:
        raise UsageError(f"--env {options.env}: {error}") from None
    last = options.seed + options.seeds - 1
    seeds = f"seed{options.seed}" if options.seeds == 1 else f"seeds{options.seed}-{last}"
    out = options.out or Path("runs") / f"{name}-{seeds}"
    refuse_unwritable("--out", out)
    torch.set_num_threads(1)  # the networks are too small for more
    return out
