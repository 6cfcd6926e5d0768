"""The command line: ``python -m rlbuf_td {demo, bench, train, plan, doctor, notebooks, info}``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from rlbuf_td.cli import UsageError

OPERATIONS = (
    *("uniform", "proportional", "update", "cycle", "rank", "rank_update"),
    *("extend", "extend_proportional", "add", "add_proportional"),
    *("leaves-12", "leaves-3", "record"),
    *("gae", "gae-vectorized", "ppo"),
)
SAMPLERS = ("uniform", "proportional", "rank")
_SHOWN = "(default: %(default)s)"  # argparse fills in the default


def _number(low: int, high: int = 10**15) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from ``low`` to ``high``, written as ``1000`` or ``1e3``."""

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
    about = "Replay and rollout buffers for TorchRL: train agents, time buffers, plan memory, check saved buffers."
    example = "example: python -m rlbuf_td demo; COMMAND --help shows the options of a command"
    parser = argparse.ArgumentParser(prog="python -m rlbuf_td", description=about, epilog=example)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for name, (purpose, arguments, add) in COMMANDS.items():
        example = f"example: python -m rlbuf_td {name} {arguments}"
        add(commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.", epilog=example))
    return parser


def _add_demo(demo: argparse.ArgumentParser) -> None:
    algos, small = ("dqn", "ppo", "apex"), _number(1, 64)
    demo.add_argument("--algo", default="dqn", choices=algos, help="dqn (default), ppo, or apex (dqn on Ray)")
    demo.add_argument("--env", default="CartPole-v1", help=f"a Gymnasium environment {_SHOWN}")
    samplers = f"for dqn: some of {', '.join(SAMPLERS)}, to compare (default: proportional)"
    demo.add_argument("--sampler", nargs="+", choices=SAMPLERS, metavar="SAMPLER", help=samplers)
    demo.add_argument("--shards", type=small, help="for apex: number of shards (default: 2)")
    demo.add_argument("--collectors", type=small, help="for apex: number of collectors (default: 2)")
    demo.add_argument("--steps", type=_number(1), help="most environment steps (default: depends on the algorithm)")
    demo.add_argument("--seed", type=_number(0, 2**31), default=0, help=f"random seed, or the first of them {_SHOWN}")
    seeds = f"number of runs with seeds SEED, SEED + 1, ...; several runs train to the last step {_SHOWN}"
    demo.add_argument("--seeds", type=_number(1, 100), default=1, help=seeds)
    demo.add_argument("--device", default="cpu", help=f"device of the network and the buffer {_SHOWN}")
    demo.add_argument("--out", type=Path, help="folder for the picture and the policy (default: a new one in runs/)")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    sizes, rows = "numbers of stored rows (default: 1e4 1e5 1e6 1e7; 1e7 needs 18 GB)", [10**4, 10**5, 10**6, 10**7]
    meaning = "cycle: sample and update, leaves-N: a Dict of N leaves"
    operations = f"some of {', '.join(OPERATIONS)} (default: all), or options; {meaning}, options: each option's cost"
    bench.add_argument("--device", default="cpu", help=f"cuda: time operations on the GPU instead {_SHOWN}")
    bench.add_argument("--rows", type=_number(1), nargs="+", default=rows, help=sizes)
    bench.add_argument("--images", type=_number(0), default=5_000, help=f"number of image rows, 0 for none {_SHOWN}")
    bench.add_argument("--batch", type=_number(1), default=256, help=f"rows per batch {_SHOWN}")
    bench.add_argument("--rounds", type=_number(1), default=15, help=f"timed blocks of 16 calls {_SHOWN}")
    bench.add_argument("--only", nargs="*", choices=(*OPERATIONS, "options"), metavar="OPERATION", help=operations)
    bench.add_argument("--wide", action="store_true", help="a table of 130 columns or more, with all times")
    bench.add_argument("--picture", type=Path, metavar="FILE", help="also draw the ratios: a .png or .svg")


def _add_train(train: argparse.ArgumentParser) -> None:
    scripts = ("dqn", "small-dqn", "sac", "ppo")
    names = f"some of {', '.join(scripts)} (default: all)"
    train.add_argument("--only", nargs="+", default=scripts, choices=scripts, metavar="SCRIPT", help=names)
    train.add_argument("--steps", type=_number(1), help="environment steps per run (default: depends on the script)")
    train.add_argument("--rounds", type=_number(1), default=3, help=f"runs per script and buffer {_SHOWN}")


def _add_plan(plan: argparse.ArgumentParser) -> None:
    rows = "number of environments: rows are [T, E] (default: one, rows are [T])"
    plan.add_argument("--env", required=True, help="a Gymnasium environment")
    plan.add_argument("--capacity", type=_number(1), required=True, help="number of transitions")
    plan.add_argument("--num-envs", type=_number(1), help=rows)
    plan.add_argument("--sampler", default="uniform", choices=SAMPLERS, help=f"the buffer's sampler {_SHOWN}")
    plan.add_argument("--device", default="cpu", help=f"device of the rows {_SHOWN}")
    plan.add_argument("--scratch-dir", type=Path, help="folder of a memory-mapped file for the rows")
    plan.add_argument("--shared", action="store_true", help="rows in shared memory")


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument("path", type=Path, help="the folder that the buffer's dumps(path) wrote")
    doctor.add_argument("--env", help="a Gymnasium environment, whose bounds the observations must respect")
    doctor.add_argument("--ignore", nargs="*", default=(), metavar="CODE", help="codes to omit (default: none)")


def _add_notebooks(notebooks: argparse.ArgumentParser) -> None:
    meaning = "copy the notebooks to this folder, which is created if missing (default: only list them)"
    notebooks.add_argument("folder", type=Path, nargs="?", metavar="DIR", help=meaning)


def _add_info(info: argparse.ArgumentParser) -> None:
    """Leave the command without arguments."""


# For each command: the purpose, the arguments of an example, and the function that adds its arguments.
COMMANDS = {
    "demo": ("train an agent from replay or rollouts, and draw its learning curve", "--algo ppo", _add_demo),
    "bench": ("time each call of these buffers and of other libraries", "--rows 1e5 --only uniform update", _add_bench),
    "train": ("time whole training scripts with TorchRL's buffers and with ours", "--only dqn", _add_train),
    "plan": ("show how much memory a buffer needs", "--env CartPole-v1 --capacity 1e6", _add_plan),
    "doctor": ("check the data of a saved buffer for faults", "runs/buffer --env CartPole-v1", _add_doctor),
    "notebooks": ("list the notebooks that explain this package, or copy them", "my_notebooks", _add_notebooks),
    "info": ("show versions, processor and cache folder, for bug reports", "", _add_info),
}


#: The modules of the commands that are not in ``rlbuf_td.cli`` under their own names; see :func:`_module`.
_MODULES = {"train": "cli.bench.train", "plan": "diagnostics.memory_plan", "doctor": "diagnostics.doctor"}


def _module(options: argparse.Namespace) -> str:
    """Return the name of the module of a command, the only one that is imported."""
    if options.command == "demo":
        return f"cli.demos.{options.algo}"
    if options.command == "bench" and options.device != "cpu":
        return "cli.bench.device"
    if options.command == "bench":
        return "cli.bench.options" if "options" in (options.only or ()) else "cli.bench.compare"
    return _MODULES.get(options.command, f"cli.{options.command}")


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return int(import_module(f"rlbuf_td.{_module(options)}").main(options))
    except UsageError as error:
        print(f"python -m rlbuf_td {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough; Python would complain again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if str(error.name).startswith("rlbuf_td"):
            raise
        extra = "ray" if error.name == "ray" else "bench" if options.command in ("bench", "train") else "demo"
        print(f"'{error.name}' is missing: pip install 'rlbuf_td[{extra}]'", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
