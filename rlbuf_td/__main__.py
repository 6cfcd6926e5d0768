"""The command line: ``python -m rlbuf_td {demo, bench}``."""

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
    bench.add_argument(
        "--rows", type=float, nargs="*", default=[1e4, 1e5, 1e6, 1e7], help="capacities, full; 1e7 takes 18 GB"
    )
    bench.add_argument("--images", type=float, default=5e3, help="capacity of the image buffers; 0 for none")
    bench.add_argument("--batch", type=int, default=256)
    bench.add_argument("--rounds", type=int, default=15, help="interleaved blocks of 10 ms each")
    bench.add_argument(
        "--only", nargs="*", default=None, choices=OPERATIONS, metavar="OPERATION", help=", ".join(OPERATIONS)
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command; return its exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    extra = options.command
    try:
        if options.command == "demo":
            env, sampler = DEFAULTS[options.algo]
            options.env, options.sampler = options.env or env, options.sampler or sampler
            extra = EXTRAS.get(options.algo, extra)
            command = importlib.import_module(f"rlbuf_td.demos.{options.algo.replace('-', '_')}").main
        else:
            command = importlib.import_module("rlbuf_td.bench.compare").main
    except ModuleNotFoundError as error:
        print(f"'{error.name}' is missing: pip install 'rlbuf_td[{extra}]'", file=sys.stderr)
        return 1
    return command(options)


if __name__ == "__main__":
    sys.exit(main())
