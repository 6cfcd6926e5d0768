"""Keys of entries, as users write them: strings, tuples of strings, or the lists of a
YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensordict import NestedKey


def is_key(key: object) -> bool:
    """Whether ``key`` is a string or a tuple of strings; a list of strings may be an
    index or several keys."""
    names = key if isinstance(key, tuple) else (key,)
    return len(names) > 0 and all(isinstance(name, str) for name in names)


def as_tuple(key: object) -> tuple[str, ...]:
    """Return one key as a tuple of strings.

    Any sequence of strings is a nested key, such as a list, or OmegaConf's
    ``ListConfig``. Raises a ValueError if ``key`` is no key.
    """
    if isinstance(key, str):
        return (key,)
    names = tuple(_names(key))
    if not names or None in names:
        raise ValueError(
            f"a key is a string, or strings such as ('next', 'reward') for a nested entry: got {key!r}"
        )
    return names  # pyrefly: ignore [bad-return]


def _names(key: object) -> Iterator[str | None]:
    """Yield the strings of a key, and None for everything else."""
    if isinstance(key, str):
        yield key
    elif isinstance(key, Sequence):
        for part in key:
            yield from _names(part)
    else:
        yield None


def nested_key(key: object) -> NestedKey:
    """Return one key in the form that TensorDict takes, a string or a tuple of strings;
    see :func:`as_tuple`."""
    names = as_tuple(key)
    return names[0] if len(names) == 1 else names


def optional_key(key: object) -> NestedKey | None:
    return None if key is None else nested_key(key)
