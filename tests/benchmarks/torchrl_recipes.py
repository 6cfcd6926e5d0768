"""Run TorchRL's own recipes with its buffers and with this package's: their final weights, and the buffer's CPU time.

    python -m tests.benchmarks.torchrl_recipes CHECKOUT [RECIPE ...] [--prefetch 3]

``CHECKOUT`` is a clone of github.com/pytorch/rl at the installed version. Each script of its ``sota-implementations/``
runs in a process of its own, short and on one thread, as it is and with the imports of parts followed by imports of
ours. Without ``--prefetch`` recipes that prefetch do not, because threads draw in no fixed order. Besides the extra
``tests``, the multi-agent recipes need ``vmas``, and IMPALA ``ale-py`` and ``torchvision``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.torchrl_suite import ROOT, swap

NAMES = {
    "TensorDictReplayBuffer": "ReplayBuffer",
    "TensorDictPrioritizedReplayBuffer": "PrioritizedReplayBuffer",
    "LazyTensorStorage": "PackedStorage",
    "LazyMemmapStorage": "PackedStorage",
    "RandomSampler": "UniformSampler",
    "PrioritizedSampler": "ProportionalSampler",
    "SamplerWithoutReplacement": "MinibatchSampler",
}
EDITS = {
    r"(prefetch(?:: int)?\s*=\s*)(?:\d+|cfg\.buffer\.prefetch)": r"\g<1>{prefetch}",
    # Recipes call the wrong method where they replay by priority, and fail with TorchRL's buffers, too.
    r"\.update_priority\(sampled_": ".update_tensordict_priority(sampled_",
    # IMPALA collects in processes of their own, which run ahead of it by no fixed number of steps.
    r'backend="process",\s*num_collectors=num_workers,\s*sync=False,': "",
    r"update_at_each_batch=True,": "",
}
SHORT = ["logger.backend=", "network.device=cpu", "env.library=gymnasium", "collector.init_random_frames=200"]
SHORT += ["collector.total_frames=400", "collector.frames_per_batch=100", "logger.eval_iter=1000000"]
CHEETAH = ["env.name=HalfCheetah-v5", *SHORT, "collector.env_per_collector=1"]
ON_POLICY = ["logger.backend=", "env.env_name=HalfCheetah-v5", "collector.frames_per_batch=512"]
PPO = ["optim.device=cpu", "loss.ppo_epochs=5", "collector.total_frames=2048"]
AGENTS = [  # multi-agent environments of VMAS
    "logger.backend=",
    "collector.frames_per_batch=1000",
    "collector.n_iters=3",
    "train.minibatch_size=100",
    "train.num_epochs=3",
    "eval.evaluation_episodes=2",
]
REDQ = [
    "logger.backend=",
    "env.name=Pendulum-v1",
    "env.library=gym",
    "env.init_env_steps=50",
    "num_workers=1",
    "collector.frames_per_batch=64",
    "collector.total_frames=512",
    "collector.init_random_frames=64",
    "optim.steps_per_batch=16",
    "collector.async_collection=0",
    "buffer.size=5000",
    "logger.record_frames=20",  # pictures of 10,000 fill the memory
]
IMPALA = ["logger.backend=", "device=cpu", "collector.total_frames=25600", "collector.num_workers=1"]
RECIPES: dict[str, tuple[str, list[str]]] = {
    "dqn": (
        "dqn/dqn_cartpole.py",
        ["device=cpu", "logger.backend=", "collector.total_frames=6000", "collector.init_random_frames=1000"],
    ),
    "sac": ("sac/sac.py", CHEETAH),
    "sac, prioritized": ("sac/sac.py", [*CHEETAH, "replay_buffer.prb=1"]),
    "td3": ("td3/td3.py", CHEETAH),
    "discrete sac": ("discrete_sac/discrete_sac.py", SHORT),
    "crossq": ("crossq/crossq.py", [*CHEETAH, "network.critic_hidden_sizes=[256,256]"]),
    "ppo": ("ppo/ppo_mujoco.py", [*ON_POLICY, *PPO]),
    # One pass over each rollout: fewer frames have too few calls to time.
    "a2c": ("a2c/a2c_mujoco.py", [*ON_POLICY, "loss.device=cpu", "collector.total_frames=20480"]),
    "redq": ("redq/redq.py", [*REDQ, "buffer.prb=0"]),
    "redq, prioritized": ("redq/redq.py", [*REDQ, "buffer.prb=1"]),
    "impala": ("impala/impala_single_node.py", IMPALA),
    **{name: (f"multiagent/{name}.py", AGENTS) for name in ("iql", "qmix_vdn", "maddpg_iddpg", "mappo_ippo")},
    "multi-agent sac": ("multiagent/sac.py", AGENTS),
}


WARM_UP = 20  # calls that are not counted, and two of each method: code is loaded and compiled, memory is taken


class Meter:
    """CPU time within a buffer's methods, in all threads, and the parameters of all optimizers."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, Counter[str]()
        self.parameters: list[Any] = []
        self.inside = threading.local()

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(self.inside, "yes", False):
                return method(*args, **kwargs)
            self.inside.yes, start = True, time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.inside.yes = False
                self.calls[method.__name__] += 1
                if self.calls.total() > WARM_UP and self.calls[method.__name__] > 2:
                    self.seconds += time.thread_time() - start

        return call

    def watch(self) -> None:
        import torch
        from torchrl.data import TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
        from torchrl.data.replay_buffers import ReplayBuffer

        import rlbuf_td

        names = "add", "extend", "sample", "_sample", "update_priority", "update_tensordict_priority", "empty"
        for buffer in (ReplayBuffer, TensorDictReplayBuffer, TensorDictPrioritizedReplayBuffer, rlbuf_td.ReplayBuffer):
            for name in names:
                if name in vars(buffer):
                    setattr(buffer, name, self.timed(vars(buffer)[name]))
        make = torch.optim.Optimizer.__init__

        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self.parameters += [each for group in optimizer.param_groups for each in group["params"]]

        torch.optim.Optimizer.__init__ = made

    def digest(self) -> str:
        return hashlib.sha256(b"".join(each.detach().cpu().numpy().tobytes() for each in self.parameters)).hexdigest()


def run_here(script: str, output: str) -> None:
    """Run a recipe in this process, from fixed seeds, and write what was measured."""
    import numpy as np
    import torch

    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    sequence = np.random.SeedSequence  # environments that are given no seed take theirs from it
    np.random.SeedSequence = lambda seed=None: sequence(0 if seed is None else seed)  # type: ignore
    meter = Meter()
    meter.watch()
    sys.path.insert(0, str(Path(script).parent))
    start = time.process_time()
    runpy.run_path(script, run_name="__main__")
    total = time.process_time() - start
    measured = {"seconds": total, "in_buffer": meter.seconds, "digest": meter.digest()}
    Path(output).write_text(json.dumps(measured))


def run(checkout: Path, recipe: str, side: str, prefetch: int) -> dict[str, Any]:
    script, overrides = RECIPES[recipe]
    with tempfile.TemporaryDirectory() as temporary:
        folder, name = Path(temporary, "recipe"), Path(script).name
        shutil.copytree((checkout / "sota-implementations" / script).parent, folder)
        for path in folder.rglob("*.py"):
            source = path.read_text()
            for pattern, replacement in EDITS.items():
                source = re.sub(pattern, replacement.format(prefetch=prefetch), source)
            path.write_text(source)
            if side == "ours":
                swap(path, NAMES)
        output = Path(temporary, "measured")
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--child", str(folder / name), str(output)]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        given = [*overrides, f"hydra.run.dir={temporary}/run"]
        done = subprocess.run([*command, *given], env=variables, capture_output=True, text=True, check=False)
        if not output.exists():
            return {"error": done.stderr[-3500:]}
        return json.loads(output.read_text())


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        _, _, script, output, *overrides = sys.argv
        sys.argv = [script, *overrides]
        return run_here(script, output)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--prefetch", type=int, default=0)
    options = parser.parse_args()
    columns = f"{'in buffer, ms: ours':>20} {'TorchRL':>8} {'ratio':>6} {'share: ours':>12} {'TorchRL':>8}"
    print(f"{'':18} {'weights':7} {columns}", flush=True)
    for recipe in options.recipes:
        ours, theirs = (run(options.checkout, recipe, side, options.prefetch) for side in ("ours", "theirs"))
        if "error" in ours or "error" in theirs:
            print(recipe, ours.get("error", ""), theirs.get("error", ""), sep="\n", flush=True)
            continue
        equal = "equal" if ours["digest"] == theirs["digest"] else "differ"
        ratio, shares = ours["in_buffer"] / theirs["in_buffer"], [s["in_buffer"] / s["seconds"] for s in (ours, theirs)]
        times = f"{ours['in_buffer'] * 1e3:20,.0f} {theirs['in_buffer'] * 1e3:8,.0f} {ratio:6.2f}"
        print(f"{recipe:18} {equal:7} {times} {shares[0]:12.1%} {shares[1]:8.1%}", flush=True)


if __name__ == "__main__":
    main()
