"""What ``python -m rlbuf_td`` runs."""

from __future__ import annotations


class UsageError(Exception):
    """The command line asks for what cannot be done; the command prints the message and exits with status 2."""


def refuse_missing_device(name: str) -> None:
    """Raise a :class:`UsageError` if torch cannot use the device."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).partition("\n")[0].partition(". ")[0]
        raise UsageError(f"--device {name}: this machine or build of torch has no such device: {first}") from None
