"""What ``help`` and editors show of a constructor that a metaclass hides."""

from __future__ import annotations

import inspect
from typing import Any


class OwnSignature:
    """A class attribute ``__signature__`` that is the signature of whatever ``__init__`` the class has.

    TorchRL's metaclasses call their classes with ``(*args, **kwargs)``, and ``inspect`` believes them.

    Example:
        >>> class Part:
        ...     __signature__ = OwnSignature()
        ...     def __init__(self, size: int = 3): ...
        >>> str(Part.__signature__)
        "(size: 'int' = 3)"
    """

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        _, *others = signature.parameters.values()
        return signature.replace(parameters=others, return_annotation=inspect.Signature.empty)
