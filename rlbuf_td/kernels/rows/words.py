"""How kernels on a GPU copy a row: in words of four bytes where a leaf allows it,
otherwise of one byte."""

from __future__ import annotations

import numpy as np

WIDE = 4  # bytes of a wide word


#: Where the value of a leaf comes from: its row, the last row of an n-step transition,
# or neither: the leaf is not copied.
ROW, LAST_ROW, ELSEWHERE = range(3)


def words_of(extents: np.ndarray, sources: list[int]) -> tuple[np.ndarray, int]:
    """Return the table of a layout, ``[6, words]`` int32, and how many of its words are
    wide; these come first.

    A column has, in bytes: the offset of a word in the row, its offset in its leaf, the
    size of this leaf in a row, the number of the leaf, the size of all leaves before
    it, and the source of the leaf.

    Args:
        extents: offset and size of each leaf in a row, ``[leaves, 2]``.
        sources: :data:`ROW`, :data:`LAST_ROW` or :data:`ELSEWHERE` for each leaf.
    """
    wide = []
    narrow = []
    before = 0
    for leaf, (offset, size) in enumerate(extents.tolist()):
        is_wide = not (offset % WIDE or size % WIDE)
        words = wide if is_wide else narrow
        source = sources[leaf]
        copied = 0 if source == ELSEWHERE else size
        for inside in range(0, copied, WIDE if is_wide else 1):
            words.append((offset + inside, inside, size, leaf, before, source))
        before += size
    table = np.array(wide + narrow, np.int32).reshape(-1, 6)
    return np.ascontiguousarray(table.T), len(wide)
