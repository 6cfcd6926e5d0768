"""The command line: ``python -m rlbuf_td {demo, doctor, compile, info}``."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

from rlbuf_td.cli import UsageError, whole_number

_SHOWN = "(default: %(default)s)"  # argparse fills in the default

#: For each command: its purpose, and the arguments of an example.
COMMANDS = {
    "demo": (
        "train an agent from replay, and draw its learning curve",
        "--sampler rank",
    ),
    "doctor": (
        "check the data of a saved buffer for faults",
        "runs/buffer --env CartPole-v1",
    ),
    "compile": ("compile all loops ahead, for containers and clusters", ""),
    "info": ("show versions, processor and cache folder, for bug reports", ""),
}


def parser() -> argparse.ArgumentParser:
    about = "Replay and rollout buffers for TorchRL: train agents, check saved buffers, compile loops."
    top = argparse.ArgumentParser(prog="python -m rlbuf_td", description=about)
    group = top.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    commands = {}
    for name, (purpose, arguments) in COMMANDS.items():
        example = f"example: python -m rlbuf_td {name} {arguments}"
        commands[name] = group.add_parser(
            name, help=purpose, description=f"{purpose.capitalize()}.", epilog=example
        )
    demo = commands["demo"].add_argument
    demo("--env", default="CartPole-v1", help=f"a Gymnasium environment {_SHOWN}")
    demo(
        "--sampler",
        choices=("uniform", "proportional", "rank"),
        default="proportional",
        help=f"replay {_SHOWN}",
    )
    demo(
        "--steps", type=whole_number(1), help="most environment steps (default: 60000)"
    )
    demo("--seed", type=whole_number(0, 2**31), default=0, help=f"random seed {_SHOWN}")
    demo(
        "--device", default="cpu", help=f"device of the network and the buffer {_SHOWN}"
    )
    demo(
        "--out", type=Path, help="folder for the picture (default: a new one in runs/)"
    )
    doctor = commands["doctor"].add_argument
    doctor(
        "path",
        type=Path,
        help="the folder of the buffer's dumps(path), or of its rows with reopen=True",
    )
    doctor(
        "--env",
        help="a Gymnasium environment, whose bounds the observations must respect",
    )
    doctor(
        "--ignore",
        nargs="*",
        default=(),
        metavar="CODE",
        help="codes to omit (default: none)",
    )
    return top


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.command is None:
        parser().print_help()
        return 0
    module = (
        "diagnostics.doctor"
        if options.command == "doctor"
        else f"cli.{options.command}"
    )
    try:
        # the only one that is imported
        return int(import_module(f"rlbuf_td.{module}").main(options))
    except UsageError as error:
        print(f"python -m rlbuf_td {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    # the reader of a pipe has seen enough; Python would complain again when it exits
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if str(error.name).startswith("rlbuf_td"):
            raise
        package = str(error.name).split(".")[0]
        is_of_demo = package in ("gymnasium", "matplotlib", "rich")
        remedy = (
            "pip install 'rlbuf_td[demo]'"
            if is_of_demo
            else "no extra of rlbuf_td has it: install the package that provides it"
        )
        print(f"the package {package!r} is missing: {remedy}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
