"""The command line: ``python -m rlbuf_td {demo, bench, train, plan, doctor}``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rlbuf_td.cli import UsageError

OPERATIONS = (
    *("uniform", "proportional", "update", "cycle", "rank", "rank_update"),
    *("extend", "extend_proportional", "add", "add_proportional"),
    *("leaves-12", "leaves-3", "record"),
    *("gae", "gae-vectorized", "ppo"),
)


def _number(low: int, high: int = 10**15) -> Callable[[str], int]:
    """Return a converter of texts such as ``1000`` and ``1e3`` to whole numbers within bounds."""

    def convert(text: str) -> int:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not (low <= number <= high and number == int(number)):
            raise argparse.ArgumentTypeError(f"expected a whole number from {low} to {high:,}, got {text}")
        return int(number)

    return convert


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rlbuf_td", description="Replay buffers for TorchRL.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="train an agent from replay or rollouts, and draw how it learned"))
    _add_bench(commands.add_parser("bench", help="time the calls of this package and of others"))
    _add_train(commands.add_parser("train", help="time whole training scripts with TorchRL's buffers and with ours"))
    _add_plan(commands.add_parser("plan", help="tell what a buffer will take, and where there is room for it"))
    doctor = commands.add_parser("doctor", help="look for faults in a saved buffer")
    doctor.add_argument("path", type=Path, help="the folder that the buffer's dumps(path) wrote")
    doctor.add_argument("--env", default=None, help="a Gymnasium environment: are observations within its bounds?")
    doctor.add_argument("--ignore", nargs="*", default=(), metavar="CODE", help="findings to leave out")
    return parser


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--algo", default="dqn", choices=("dqn", "ppo"), help="dqn: prioritized replay; ppo: rollouts")
    demo.add_argument("--env", default="CartPole-v1", help="a Gymnasium environment; dqn: with discrete actions")
    demo.add_argument(
        "--sampler", default="proportional", choices=("uniform", "proportional", "rank"), help="of dqn's replay"
    )
    demo.add_argument("--steps", type=_number(1), default=None, help="environment steps at most")
    demo.add_argument("--seed", type=_number(0, 2**31), default=0)
    demo.add_argument("--device", default="cpu", help="where network and buffer live")
    demo.add_argument("--out", type=Path, default=None, help="folder for the picture and the policy")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--device", default="cpu", help="cuda: time what runs on the GPU, nothing else")
    bench.add_argument(
        "--rows", type=_number(1), nargs="+", default=[10**4, 10**5, 10**6, 10**7], help="capacities; 1e7 takes 18 GB"
    )
    bench.add_argument("--images", type=_number(0), default=5_000, help="capacity of the image buffers; 0 for none")
    bench.add_argument("--batch", type=_number(1), default=256)
    bench.add_argument("--rounds", type=_number(1), default=15, help="interleaved blocks of 10 calls")
    bench.add_argument(
        "--only", nargs="*", default=None, choices=OPERATIONS, metavar="OPERATION", help=", ".join(OPERATIONS)
    )
    bench.add_argument(
        "--picture", type=Path, default=None, metavar="FILE", help="draw the ratios, too: a .png or .svg"
    )


def _add_train(train: argparse.ArgumentParser) -> None:
    scripts = ("dqn", "sac", "ppo")
    train.add_argument("--only", nargs="+", default=scripts, choices=scripts, metavar="SCRIPT", help="dqn, sac, ppo")
    train.add_argument("--steps", type=_number(1), default=None, help="environment steps per run")
    train.add_argument("--rounds", type=_number(1), default=3, help="runs of each script with each buffer, in turns")


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--env", required=True, help="a Gymnasium environment")
    plan.add_argument("--capacity", type=_number(1), required=True, help="transitions")
    plan.add_argument("--num-envs", type=_number(1), default=None, help="lanes, for rows [T, E]; default: rows [T]")
    plan.add_argument("--sampler", default="uniform", choices=("uniform", "proportional", "rank"))
    plan.add_argument("--device", default="cpu", help="where the rows are to lie")
    plan.add_argument("--scratch-dir", type=Path, default=None, help="a folder, for rows in a memory-mapped file")
    plan.add_argument("--shared", action="store_true", help="rows in shared memory")
    plan.add_argument("--offload", action="store_true", help="rows in RAM, priorities on the CUDA device")


def _demo(options: argparse.Namespace) -> int:
    from rlbuf_td.cli.demos import dqn, ppo

    return (ppo if options.algo == "ppo" else dqn).main(options)


def _bench(options: argparse.Namespace) -> int:
    if options.device != "cpu":
        from rlbuf_td.cli.bench import device

        return device.main(options)
    if options.picture is not None:  # name a missing matplotlib before the work, not after it
        import matplotlib.figure  # noqa: F401
    from rlbuf_td.cli.bench import compare

    return compare.main(options)


def _train(options: argparse.Namespace) -> int:
    from rlbuf_td.cli.bench import train

    return train.main(options)


def _plan(options: argparse.Namespace) -> int:
    from rlbuf_td.diagnostics import memory_plan

    return memory_plan.main(options)


def _doctor(options: argparse.Namespace) -> int:
    from rlbuf_td.diagnostics import doctor

    return doctor.main(options)


COMMANDS = {"demo": _demo, "bench": _bench, "train": _train, "plan": _plan, "doctor": _doctor}


def main(argv: list[str] | None = None) -> int:
    """Run a command; return its exit status."""
    options = _parser().parse_args(argv)
    try:
        return COMMANDS[options.command](options)
    except UsageError as error:
        print(f"python -m rlbuf_td {options.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if str(error.name).startswith("rlbuf_td"):
            raise
        extra = "bench" if options.command in ("bench", "train") else "demo"
        print(f"'{error.name}' is missing: pip install 'rlbuf_td[{extra}]'", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
