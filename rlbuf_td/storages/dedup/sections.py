"""Where the parts of rows that share observations lie in one block of memory."""

from __future__ import annotations

from dataclasses import dataclass

from rlbuf_td.storages.dedup.pooling import Pooling
from rlbuf_td.storages.schema import SchemaError

_PAGE = 4096
_MOST_NAMES = 2**31 - 2


@dataclass(frozen=True)
class Sections:
    """Where the parts of a pooled storage lie in one block of memory, in bytes; each begins at a page.

    Rows come first, then the counters, then of each group the stack of free names and the entries. Of these, memory is
    taken as they are used: there is room for rows that share nothing, and for as many that replace them at once.
    """

    rows: int
    counters: int
    stacks: tuple[int, ...]
    entries: tuple[int, ...]
    most: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, pooling: Pooling, cells: int) -> Sections:
        """Return the sections for ``cells`` rows.

        Raises:
            SchemaError: they are more than can be named.
        """
        most = tuple(2 * cells * group.names for group in pooling.groups)
        if max(most) > _MOST_NAMES:
            fit = cells * _MOST_NAMES // max(most)
            raise SchemaError(
                f"{cells:,} rows are too many to share observations or frames: {fit:,} of these fit. Take a smaller "
                "max_size, or several storages"
            )
        at, stacks, entries = _pages(cells * pooling.own.row_bytes), [], []
        counters, at = at, at + _pages(16 * len(most))
        for group, count in zip(pooling.groups, most, strict=True):
            stacks.append(at)
            at += _pages(4 * (count + 1))
            entries.append(at)
            at += _pages(group.nbytes * (count + 1))
        return cls(cells * pooling.own.row_bytes, counters, tuple(stacks), tuple(entries), most, at)

    @property
    def fixed(self) -> int:
        """Bytes of rows and counters."""
        return self.stacks[0]

    def likely(self, pooling: Pooling, cells: int) -> int:
        """Return the bytes that ``cells`` rows take where each shares its next observation."""
        return self.fixed + sum(cells * group.nbytes for group in pooling.groups)


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
