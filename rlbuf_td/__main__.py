"""The command line: ``python -m rlbuf_td {demo, bench, plan, doctor}``."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

OPERATIONS = (
    *("uniform", "proportional", "update", "cycle", "rank", "rank_update", "extend", "add"),
    *("leaves-12", "leaves-3", "record"),
    *("gae", "gae-vectorized", "ppo"),
)


DEFAULTS = {  # environment and sampler of the demos
    "dqn": ("CartPole-v1", "proportional"),
    "ppo": ("CartPole-v1", None),
    "sac-her": ("FetchReach-v4", "uniform"),
    "drqn": ("CartPole-v1", "uniform"),
}
EXTRAS = {"sac-her": "demo-robotics"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rlbuf_td", description="Replay buffers for TorchRL.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train an agent from replay or rollouts, and draw how it learned")
    demo.add_argument(
        "--algo",
        default="dqn",
        choices=tuple(DEFAULTS),
        help="dqn: prioritized replay; ppo: rollouts; sac-her: sparse rewards, with and without hindsight; "
        "drqn: sequences, with and without memory",
    )
    demo.add_argument(
        "--env", default=None, help="a Gymnasium environment; sac-her: with goals; dqn: with discrete actions"
    )
    demo.add_argument(
        "--sampler", default=None, choices=("uniform", "proportional", "rank"), help="of dqn, sac-her and drqn"
    )
    demo.add_argument("--steps", type=int, default=None, help="environment steps at most")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--device", default="cpu", help="where network and buffer live")
    demo.add_argument("--out", type=Path, default=None, help="folder for the picture and the policy")
    bench = commands.add_parser("bench", help="time this package against others")
    bench.add_argument("--device", default="cpu", help="cuda: check and time what runs on the GPU, nothing else")
    bench.add_argument(
        "--rows", type=float, nargs="*", default=[1e4, 1e5, 1e6, 1e7], help="capacities, full; 1e7 takes 18 GB"
    )
    bench.add_argument("--images", type=float, default=5e3, help="capacity of the image buffers; 0 for none")
    bench.add_argument("--batch", type=int, default=256)
    bench.add_argument("--rounds", type=int, default=15, help="interleaved blocks of 10 ms each")
    bench.add_argument(
        "--only", nargs="*", default=None, choices=OPERATIONS, metavar="OPERATION", help=", ".join(OPERATIONS)
    )
    bench.add_argument(
        "--picture", type=Path, default=None, metavar="FILE", help="draw the ratios, too: a .png or .svg"
    )
    plan = commands.add_parser("plan", help="tell what a buffer will take, and where there is room for it")
    plan.add_argument("--env", required=True, help="a Gymnasium environment")
    plan.add_argument("--capacity", type=float, required=True, help="transitions")
    plan.add_argument("--num-envs", type=int, default=0, help="lanes, for rows [T, E]; 0: rows [T]")
    plan.add_argument("--sampler", default="uniform", choices=("uniform", "proportional", "rank"))
    plan.add_argument("--device", default="cpu", help="where the rows are to lie")
    plan.add_argument("--scratch-dir", type=Path, default=None, help="a folder, for rows in a memory-mapped file")
    plan.add_argument("--shared", action="store_true", help="rows in shared memory")
    plan.add_argument("--offload", action="store_true", help="rows in RAM, priorities on the CUDA device")
    doctor = commands.add_parser("doctor", help="look for faults in a saved buffer")
    doctor.add_argument("path", type=Path, help="the folder that the buffer's dumps(path) wrote")
    doctor.add_argument("--env", default=None, help="a Gymnasium environment: are observations within its bounds?")
    doctor.add_argument("--ignore", nargs="*", default=(), metavar="CODE", help="findings to leave out")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command; return its exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    module, extra = {
        "demo": ("", "demo"),
        "bench": ("rlbuf_td.cli.bench.compare", "bench"),
        "plan": ("rlbuf_td.diagnostics.memory_plan", "demo"),
        "doctor": ("rlbuf_td.diagnostics.doctor", "demo"),
    }[options.command]
    if options.command == "bench" and options.device != "cpu":
        module = "rlbuf_td.cli.bench.device"
    if options.command == "demo":
        env, sampler = DEFAULTS[options.algo]
        options.env, options.sampler = options.env or env, options.sampler or sampler
        module, extra = f"rlbuf_td.cli.demos.{options.algo.replace('-', '_')}", EXTRAS.get(options.algo, extra)
    try:
        if getattr(options, "env", None):
            importlib.import_module("gymnasium")
        if getattr(options, "picture", None):  # ask for matplotlib before the work, not behind it
            importlib.import_module("rlbuf_td.cli.bench.picture")
        command = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        print(f"'{error.name}' is missing: pip install 'rlbuf_td[{extra}]'", file=sys.stderr)
        return 1
    return command(options)


if __name__ == "__main__":
    sys.exit(main())
