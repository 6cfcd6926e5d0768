"""Observations that are stored once: what a row and an entry hold, and where they are.

An *entry* is a fixed number of bytes: an observation, or one frame of a stack. A row
holds *names* of entries: int32 numbers from 1 on; name ``i`` is entry ``i - 1``. With
two frames (*pieces*, the oldest first), in one lane::

    row t       | own keys | 7  8 | 8  9 |      the names of the observation, then those of the next observation
    row t + 1   | own keys | 8  9 | 9 10 |      its observation is the next one of row t: the same names
    row t + 2   | own keys |11 11 |11 12 |      an episode begins with a frame twice

    entries     | chunk 0 | chunk 1 | chunk 2 | ...     entries of one lane lie in chunks
    following   |    2    |    1    |    0    | ...     the chunk after each one in the ring of its lane

The entries of a lane are appended in the order of its rows, and the rows are
overwritten in this order. The entries from the first name of a lane's oldest row to the
last name of its newest row are thus *live*, and all others of its ring are free. A row
takes the names of its observation from the row before if their bytes are equal;
otherwise, it appends entries. A ring gets another chunk only when it is full; no entry
moves, and nothing is freed.

Invariants of each group between two writes, unless the number at
:attr:`Stored.counters` is 1 (see ``link``):

- Each chunk below ``used`` is in the ring of one lane, or in the list of spare chunks.
- From the chunk of the oldest live entry on, a ring has the chunks of all live entries
  in the order of their rows.
- In the chunk of the newest entry, all entries after it are free.
- The bytes of a live entry never change.

Compiled loops get the address of a :class:`Stored`. All fields are int64, and have the
same names there and here.
"""

from __future__ import annotations

from typing import NamedTuple


class Group(NamedTuple):
    """A group of deduplicated keys; one entry holds the values of all keys of the
    group."""

    # offset of the names in a row: ``pieces`` for its own observation, then ``pieces``
    # for the next one
    names_at: int
    pieces: int  # entries per observation, oldest first
    sides: int  # 2 if rows have a next observation, else 1
    names: int  # in a row: ``pieces * sides``
    nbytes: int  # of an entry
    bits: int  # a chunk has ``2**bits`` entries
    # its keys are the parts from number `first_part` to number `past_part - 1`
    first_part: int
    past_part: int
    chunks: int = 0  # capacity
    entries: int = 0  # the address of the entries
    following: int = 0  # the address of an int32 per chunk
    # the address of two int64: the first spare chunk plus 1 (0: none), and the chunks
    # used so far
    counters: int = 0


class Part(NamedTuple):
    """The position of one deduplicated key's bytes in an entry, in an observation and
    in a batch."""

    into: int  # offset of its bytes in an entry
    inner: int  # bytes per contiguous run of the key in a row
    outer: int  # number of these runs
    pitch: int  # distance between the starts of runs in a row, in bytes
    root: int  # index of the key's leaf in a batch, for the row's own observation
    next: int  # index of the key's leaf in a batch, for the next observation


class Run(NamedTuple):
    """A key that rows hold themselves."""

    offset: int  # of its bytes in a stored row
    leaf: int  # index of the key's leaf in a batch
    nbytes: int


class Stored(NamedTuple):
    """Where rows and the records of their keys lie."""

    rows: int  # address
    row_bytes: int
    total: int  # the number of cells
    lanes: int  # rows per time step
    groups: int  # address of :class:`Group` records
    group_count: int
    parts: int  # address of :class:`Part` records
    part_count: int
    runs: int  # address of :class:`Run` records
    run_count: int
