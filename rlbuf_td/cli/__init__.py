"""The commands of ``python -m rlbuf_td``."""

from __future__ import annotations

import argparse
from collections.abc import Callable


class UsageError(Exception):
    """An invalid command line; ``python -m rlbuf_td`` prints the message and exits with
    status 2."""


def whole_number(low: int, high: int = 10**15) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from ``low`` to ``high``, written as
    ``1000`` or ``1e3``."""

    def convert(text: str) -> int:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not (low <= number <= high and number == int(number)):
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {low} to {high:,}, got {text}"
            )
        return int(number)

    return convert
