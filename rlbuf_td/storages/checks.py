"""Checks of values that users pass: ``check(name, value)`` converts a value, or raises
a TypeError (it is no number) or a ValueError (it is out of range)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

if TYPE_CHECKING:
    from rlbuf_td.storages.packed import PackedStorage

#: What ``state_dict`` returns and a dump holds: numbers, strings and tensors, in dicts
# and lists.
State: TypeAlias = dict[str, Any]
#: The errors, besides ValueErrors, of decoding or loading a malformed state: it may
# contain anything.
MALFORMED = LookupError, TypeError, AttributeError, RuntimeError, OverflowError


def as_number(value: Any) -> float:
    """Convert a value to a float; return NaN if it is no number."""
    # RuntimeError: a tensor with several elements
    with suppress(TypeError, ValueError, RuntimeError):
        return float(value)
    return float("nan")


def usable_device(device: torch.device | str) -> torch.device:
    """Convert a device; raise a RuntimeError if it is a CUDA device that this machine
    lacks."""
    device = torch.device(device)
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        known = f"torch finds {count} CUDA device{'' if count == 1 else 's'} on this machine"
        why = "" if torch.version.cuda else " (this torch was built without CUDA)"
        raise RuntimeError(
            f"device={str(device)!r} is missing: {known}{why}: use device='cpu'"
        )
    return device


def number(name: str, value: object, kind: str = "a number") -> float:
    """Convert a value to a float; raise a TypeError if it is no number."""
    if not isinstance(value, str | bool):
        # RuntimeError: a tensor with several elements
        with suppress(TypeError, ValueError, RuntimeError):
            return float(cast("Any", value))
    raise TypeError(
        f"{name} must be {kind}, got {_shown(value)}, of type {type(value).__name__}"
    )


def exponent(name: str, value: object) -> float:
    exponent = number(name, value)
    if not 0.0 <= exponent < float("inf"):
        raise ValueError(
            f"{name} must be greater or equal to 0, and finite, got {_shown(value)}"
        )
    return exponent


def fraction(name: str, value: object) -> float:
    fraction = number(name, value)
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {_shown(value)}")
    return fraction


def whole(least: int) -> Callable[[str, Any], int]:
    """Return a check that accepts whole numbers from ``least`` on, also floats such as
    3.0."""

    def check(name: str, value: object) -> int:
        kind = f"a whole number, at least {least}"
        value_given = number(name, value, kind)
        if not (value_given >= least and value_given.is_integer()):
            raise ValueError(f"{name} must be {kind}, got {_shown(value)}")
        return int(value_given)

    return check


def optional(check: Callable[[str, object], object]) -> Callable[[str, Any], Any]:
    """Return a check that also accepts None."""
    return lambda name, value: None if value is None else check(name, value)


def saved_number(name: str, value: object, least: int, most: int) -> int:
    """Return a number of a saved state; raise a ValueError unless it is an int from
    ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"the saved {name} is {value!r}, expected a whole number from {least} to {most}"
        )
    return value


def is_count(number: object) -> bool:
    """Whether a number of a saved state is a whole number from 0 on, of 62 bits,
    which leaves room to count on."""
    return type(number) is int and 0 <= number < 1 << 62


@contextmanager
def state_of(part: object) -> Iterator[None]:
    """Convert errors from a malformed state to a ValueError that names the part."""
    try:
        yield
    except ValueError:
        raise
    except MALFORMED as error:
        raise ValueError(
            f"the state is not that of a {type(part).__name__}: {error!r}"
        ) from error


def one_of(*choices: object) -> Callable[[str, Any], Any]:
    def check(name: str, value: object) -> Any:
        if not any(
            value is choice or (type(value) is str and value == choice)
            for choice in choices
        ):
            raise ValueError(
                f"{name} must be {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}, got {value!r}"
            )
        return value

    return check


def _shown(value: object) -> str:
    # NumPy's numbers have a longer repr
    return repr(value) if isinstance(value, str) else str(value)


def shown_kind(value: object) -> str:
    """Return the class of a value; of a class, its name and how to make an object."""
    if isinstance(value, type):
        return f"the class {value.__name__}: make one, {value.__name__}(...)"
    return type(value).__name__


def require(what: str, value: object, kind: type) -> None:
    """Raise a TypeError if ``what`` got no object of this class."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{what} takes a {kind.__name__.lower()}, got {shown_kind(value)}"
        )


def require_packed(storage: object, what: str, remedy: str) -> PackedStorage:
    """Return a storage that ``what`` needs as a :class:`PackedStorage`; raise a
    TypeError if it is of another class."""
    if not getattr(storage, "is_packed", False):
        raise TypeError(
            f"{what} needs a PackedStorage, got a {type(storage).__name__}: {remedy}"
        )
    return cast("PackedStorage", storage)
